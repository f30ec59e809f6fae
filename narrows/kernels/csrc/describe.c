/* Key-derived metadata for selection, as select/codes.py says what its nibbles mean. A token's result depends on its key
 * alone and not on the other tokens of a call: sums run over a key's numbers in order. */

#include "simd.h"
#include "threads.h"

#define MAX_HEAD_DIM 256
#define TOGETHER 4       /* tokens that share a pass over a piece of the matrix */
#define THREADED 2000000 /* products; below, waking the other threads costs more than they save */

typedef struct {
    uint8_t *metadata;
    const void *entries;
    const int32_t *slots;
    const float *encode, *bias;
    long num_tokens, num_kv_heads, head_dim, width;
    int is_bf16, signs;
} encode_call;

static void load_key(const void *entries, int is_bf16, long at, long head_dim, float *key) {
    for (long d = 0; d < head_dim; d++)
        key[d] = is_bf16 ? bf16_to_float(((const bf16 *)entries)[at + d]) : ((const float *)entries)[at + d];
}

/* out[t] = bias + key[t] times 16 columns of the matrix. */
INLINE void project(const float (*key)[MAX_HEAD_DIM], const float *matrix, long stride, long head_dim, const float *bias,
                    float (*out)[LANES]) {
    vf sum[TOGETHER][NV];
    UNROLL for (int t = 0; t < TOGETHER; t++) UNROLL for (int v = 0; v < NV; v++) sum[t][v] = vf_load(bias + v * VL);
    for (long d = 0; d < head_dim; d++) {
        vf line[NV];
        UNROLL for (int v = 0; v < NV; v++) line[v] = vf_load(matrix + d * stride + v * VL);
        UNROLL for (int t = 0; t < TOGETHER; t++) UNROLL for (int v = 0; v < NV; v++) sum[t][v] += vf_all(key[t][d]) * line[v];
    }
    UNROLL for (int t = 0; t < TOGETHER; t++) UNROLL for (int v = 0; v < NV; v++) vf_store(out[t] + v * VL, sum[t][v]);
}

/* The number of the first of the 16 largest. */
INLINE int largest(const float *x) {
    float best = x[0];
    for (int i = 1; i < LANES; i++) best = x[i] > best ? x[i] : best;
    unsigned equal = 0;
    for (int i = 0; i < LANES; i++) equal |= (unsigned)(x[i] == best) << i;
    return equal ? __builtin_ctz(equal) : 0;
}

static void encode_team(void *data, team me) {
    const encode_call *c = data;
    const long bytes = c->signs ? c->width / 8 : c->width / 32;
    long first, end;
    team_share(me, (c->num_tokens + TOGETHER - 1) / TOGETHER, &first, &end);
    for (long block = first; block < end; block++) {
        const long count = c->num_tokens - block * TOGETHER < TOGETHER ? c->num_tokens - block * TOGETHER : TOGETHER;
        for (long h = 0; h < c->num_kv_heads; h++) {
            float key[TOGETHER][MAX_HEAD_DIM], near[TOGETHER][LANES];
            uint8_t *to[TOGETHER];
            for (long t = 0; t < TOGETHER; t++) {
                const long row = c->slots[block * TOGETHER + (t < count ? t : 0)] * c->num_kv_heads + h;
                load_key(c->entries, c->is_bf16, row * 2 * c->head_dim, c->head_dim, key[t]);
                to[t] = c->metadata + row * bytes;
            }
            for (long j = 0; j < c->width / LANES; j++) {
                project(key, c->encode + h * c->head_dim * c->width + j * LANES, c->width, c->head_dim,
                        c->bias + h * c->width + j * LANES, near);
                for (long t = 0; t < count; t++) {
                    if (c->signs) {
                        unsigned bits = 0;
                        for (int i = 0; i < LANES; i++) bits |= (unsigned)(near[t][i] > 0.f) << i;
                        to[t][2 * j] = (uint8_t)bits;
                        to[t][2 * j + 1] = (uint8_t)(bits >> 8);
                        continue;
                    }
                    const int nibble = largest(near[t]);
                    if (j % 2)
                        to[t][j / 2] |= (uint8_t)(nibble << 4);
                    else
                        to[t][j / 2] = (uint8_t)nibble;
                }
            }
        }
    }
}

/* Codes of keys: `width` projections of each, of which signs are bits, or the largest of every 16 is a nibble. */
void narrows_encode(void *metadata, const void *entries, const int32_t *slots, const float *encode, const float *bias,
                    long num_tokens, long num_kv_heads, long head_dim, long width, int is_bf16, int signs, crew *crew) {
    encode_call c = {metadata, entries, slots, encode, bias, num_tokens, num_kv_heads, head_dim, width, is_bf16, signs};
    crew_run(crew, encode_team, &c, num_tokens * num_kv_heads * head_dim * width > THREADED);
}

typedef struct {
    uint8_t *metadata;
    const void *entries;
    const int32_t *slots;
    const float *edges;
    long num_tokens, num_kv_heads, head_dim, page_size, span;
    int is_bf16;
} bounds_call;

static void bounds_team(void *data, team me) {
    const bounds_call *c = data;
    const long dim = c->head_dim, spans = c->page_size / c->span;
    long first, end;
    team_share(me, c->num_kv_heads, &first, &end);
    for (long h = first; h < end; h++) {
        const float *low = c->edges + h * 6 * dim, *high = low + 3 * dim; /* each [3, dim] */
        for (long t = 0; t < c->num_tokens; t++) {
            const long slot = c->slots[t], page = slot / c->page_size, within = slot % c->page_size;
            uint8_t *code = c->metadata + (((page * c->num_kv_heads + h) * spans) + within / c->span) * (dim / 2);
            const int fresh = within % c->span == 0;
            float key[MAX_HEAD_DIM];
            uint8_t lowest[MAX_HEAD_DIM], highest[MAX_HEAD_DIM];
            load_key(c->entries, c->is_bf16, (slot * c->num_kv_heads + h) * 2 * dim, dim, key);
            for (long d = 0; d < dim; d++) {
                lowest[d] = (uint8_t)((key[d] > low[d]) + (key[d] > low[dim + d]) + (key[d] > low[2 * dim + d]));
                highest[d] = (uint8_t)((key[d] > high[d]) + (key[d] > high[dim + d]) + (key[d] > high[2 * dim + d]));
            }
            for (long b = 0; b < dim / 2; b++) {
                const uint8_t old = fresh ? 0x33 : code[b]; /* the empty span: lowest of all, highest of none */
                uint8_t both = 0;
                for (int half = 0; half < 2; half++) {
                    uint8_t l = old >> 4 * half & 3, u = old >> 4 * half >> 2 & 3;
                    const uint8_t ours = lowest[2 * b + half], upper = highest[2 * b + half];
                    l = ours < l ? ours : l;
                    u = upper > u ? upper : u;
                    both |= (uint8_t)((l | u << 2) << 4 * half);
                }
                code[b] = both;
            }
        }
    }
}

/* Bounds of runs of `span` keys, a nibble for each coordinate; edges [num_kv_heads, 2, 3, head_dim] part the values that
 * bounds are rounded to. Tokens are taken in the order of slots. */
void narrows_bounds(void *metadata, const void *entries, const int32_t *slots, const float *edges, long num_tokens,
                    long num_kv_heads, long head_dim, long page_size, long span, int is_bf16, crew *crew) {
    bounds_call c = {metadata, entries, slots, edges, num_tokens, num_kv_heads, head_dim, page_size, span, is_bf16};
    crew_run(crew, bounds_team, &c, num_tokens >= 64);
}
