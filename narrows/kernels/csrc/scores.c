/* Scores of paged metadata for selection: what each position would get of its queries' attention.
 *
 * A row is one KV head of one request, and its positions are cut into chunks that threads share. For each query of the row's
 * group a chunk's scores become exp(score - the chunk's peak), in scratch, with their sum; when all chunks are done, each is
 * put on the scale of its whole row and the group's queries are added up:
 *
 *     request:  0 .. begin | begin .. sinks | scored, in chunks of codes | newest | beyond
 *     out:         -inf    |     ALWAYS     |   sum of softmax weights   |  +inf  |  -inf
 *
 * Codes are sums of table entries named by nibbles. Tables are rounded to 16 bits, so that a byte shuffle looks up 32 of
 * them at once; the rounding error of a score is at most (nibbles / 2) steps of which 65535 make the query's whole range.
 */

#include <stdlib.h>

#include "simd.h"
#include "threads.h"

#define CHUNK 512 /* codes, a multiple of BLOCK */
#define BLOCK 32
#define ALWAYS 1e38f /* as in scores.py */
#define THREADED 20000 /* codes times queries; below, waking the other threads costs more than they save */

#if defined(__AVX2__) && !defined(NARROWS_GENERIC)
#include <immintrin.h>
#define SHUFFLES 1
#endif

typedef struct {
    float *out;             /* [rows, n] */
    int32_t *num;           /* [rows] */
    const void *query;      /* [rows, group, head_dim] */
    const float *decode;    /* what makes tables of a query, see `table`; NULL: the metadata are keys */
    int by_coordinate;
    const uint8_t *metadata;
    size_t metadata_bytes;
    const int32_t *context_len, *page_table;
    long num_requests, table_stride, page_size, group, num_kv_heads, head_dim;
    long size;              /* nibbles of a code, or head_dim */
    long per_row, per_code; /* tokens; per_row is 1 or page_size */
    long n, sinks, window;  /* window 0: none */
    double ratio;
    float alpha, scale;
    int is_bf16;

    long stride;    /* codes of a row in scratch, a multiple of CHUNK */
    float *weights; /* [rows, group, stride] */
    float *peaks;   /* [rows, group, stride / CHUNK] */
    float *totals;  /* the same */
    int32_t *close; /* [rows, group]: positions at most alpha below the peak */
    uint8_t *luts;  /* of each thread [group, size, 2, 16], or the group's queries as floats */
    size_t lut_bytes;
} scores_call;

typedef struct {
    long request, head, lo, hi; /* positions that are scored */
    long first, end;            /* codes that have any of them */
} score_row;

static long begin_of(const scores_call *c, long request) {
    const long length = c->context_len[request];
    return c->window && length > c->window ? length - c->window : 0;
}

static score_row row_of(const scores_call *c, long row) {
    score_row r = {row / c->num_kv_heads, row % c->num_kv_heads, 0, 0, 0, 0};
    const long begin = begin_of(c, r.request);
    r.lo = begin > c->sinks ? begin : c->sinks;
    r.hi = c->context_len[r.request] - 1;
    if (r.hi <= r.lo) {
        r.lo = r.hi = 0;
        return r;
    }
    r.first = r.lo / c->per_code;
    r.end = (r.hi + c->per_code - 1) / c->per_code;
    return r;
}

static long chunks_of(score_row r) { return (r.end - r.first + CHUNK - 1) / CHUNK; }

/* Walks the codes of a row in order of position. */
typedef struct {
    const int32_t *page;
    const uint8_t *at;
    long left, per_page; /* codes of this page that are still to come; of any page */
    long page_bytes, head_bytes, code_bytes, stride;
} walk;

static walk walk_from(const scores_call *c, score_row r, long code) {
    walk w;
    w.per_page = c->page_size / c->per_code;
    w.code_bytes = c->decode ? c->size / 2 : c->size * (c->is_bf16 ? 2 : 4);
    w.page_bytes = w.per_page * c->num_kv_heads * w.code_bytes;
    w.stride = c->per_row == 1 ? c->num_kv_heads * w.code_bytes : w.code_bytes;
    w.head_bytes = r.head * (c->per_row == 1 ? w.code_bytes : w.per_page * w.code_bytes);
    w.page = c->page_table + r.request * c->table_stride + code / w.per_page;
    const long within = code % w.per_page;
    w.at = c->metadata + *w.page * w.page_bytes + w.head_bytes + within * w.stride;
    w.left = w.per_page - within;
    return w;
}

static inline const uint8_t *walk_next(const scores_call *c, walk *w) {
    if (w->left == 0) {
        w->page++;
        w->at = c->metadata + *w->page * w->page_bytes + w->head_bytes;
        w->left = w->per_page;
    }
    const uint8_t *here = w->at;
    w->at += w->stride;
    w->left--;
    return here;
}

/* Tables of one query as low and high bytes of whole steps [nibbles, 2, 16]; returns a step. */
static float round_tables(const float *tables, long nibbles, uint8_t *lut) {
    float range = 0.f;
    for (long j = 0; j < nibbles; j++) {
        float low = tables[j * 16], high = low;
        for (int i = 1; i < 16; i++) {
            low = tables[j * 16 + i] < low ? tables[j * 16 + i] : low;
            high = tables[j * 16 + i] > high ? tables[j * 16 + i] : high;
        }
        range += high - low;
    }
    const float step = range > 0.f && range < INFINITY ? range / (65535.f - (float)nibbles) : 0.f;
    const float inverse = step > 0.f ? 1.f / step : 0.f;
    for (long j = 0; j < nibbles; j++) {
        float low = tables[j * 16];
        for (int i = 1; i < 16; i++) low = tables[j * 16 + i] < low ? tables[j * 16 + i] : low;
        for (int i = 0; i < 16; i++) {
            const unsigned steps = step > 0.f ? (unsigned)((tables[j * 16 + i] - low) * inverse + 0.5f) : 0;
            lut[j * 32 + i] = (uint8_t)steps;
            lut[j * 32 + 16 + i] = (uint8_t)(steps >> 8);
        }
    }
    return step;
}

#ifdef SHUFFLES
/* Byte b of 16 codes into columns[b], for b < 8. */
INLINE void transpose_bytes(const __m128i *x, __m128i *columns) {
    __m128i a[8], b[8];
    UNROLL for (int i = 0; i < 8; i++) a[i] = _mm_unpacklo_epi8(x[i], x[i + 8]);
    UNROLL for (int i = 0; i < 4; i++) {
        b[i] = _mm_unpacklo_epi8(a[i], a[i + 4]);
        b[4 + i] = _mm_unpackhi_epi8(a[i], a[i + 4]);
    }
    UNROLL for (int i = 0; i < 2; i++) { /* a[4h + 2q + i]: codes i, i + 2, ..; bytes 4h + 2q and the next */
        UNROLL for (int h = 0; h < 2; h++) {
            a[4 * h + i] = _mm_unpacklo_epi8(b[4 * h + i], b[4 * h + i + 2]);
            a[4 * h + 2 + i] = _mm_unpackhi_epi8(b[4 * h + i], b[4 * h + i + 2]);
        }
    }
    UNROLL for (int pair = 0; pair < 4; pair++) {
        columns[2 * pair] = _mm_unpacklo_epi8(a[2 * pair], a[2 * pair + 1]);
        columns[2 * pair + 1] = _mm_unpackhi_epi8(a[2 * pair], a[2 * pair + 1]);
    }
}

INLINE __m128i load_some(const uint8_t *p, const uint8_t *end) {
    if (end - p >= 8) return _mm_loadl_epi64((const __m128i *)p);
    uint64_t x = 0;
    memcpy(&x, p, (size_t)(end - p));
    return _mm_cvtsi64_si128((long long)x);
}
#endif

/* Scores of BLOCK codes for all queries, into out[g * stride + i]. */
static void score_codes(const scores_call *c, const uint8_t *const *codes, const uint8_t *lut, const float *steps, float *out,
                        long stride) {
    const long bytes = c->size / 2;
#ifdef SHUFFLES
    __m256i nibbles[512];
    const uint8_t *end = c->metadata + c->metadata_bytes;
    const __m256i low = _mm256_set1_epi8(15);
    for (long first = 0; first < bytes; first += 8) {
        __m128i x[2][16], columns[2][8];
        for (int i = 0; i < BLOCK; i++) x[i / 16][i % 16] = load_some(codes[i] + first, end);
        transpose_bytes(x[0], columns[0]);
        transpose_bytes(x[1], columns[1]);
        for (int b = 0; b < 8 && first + b < bytes; b++) {
            const __m256i both = _mm256_set_m128i(columns[1][b], columns[0][b]);
            nibbles[2 * (first + b)] = _mm256_and_si256(both, low);
            nibbles[2 * (first + b) + 1] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
        }
    }
    for (long g = 0; g < c->group; g++) {
        const uint8_t *table = lut + g * c->size * 32;
        __m256i even = _mm256_setzero_si256(), odd = even; /* codes 0..7 and 16..23; 8..15 and 24..31 */
        for (long j = 0; j < c->size; j++) {
            const __m256i lows = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(table + j * 32)));
            const __m256i highs = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(table + j * 32 + 16)));
            const __m256i a = _mm256_shuffle_epi8(lows, nibbles[j]), b = _mm256_shuffle_epi8(highs, nibbles[j]);
            even = _mm256_add_epi16(even, _mm256_unpacklo_epi8(a, b));
            odd = _mm256_add_epi16(odd, _mm256_unpackhi_epi8(a, b));
        }
        const __m256 step = _mm256_set1_ps(steps[g]);
        const __m128i quarter[4] = {_mm256_castsi256_si128(even), _mm256_castsi256_si128(odd),
                                    _mm256_extracti128_si256(even, 1), _mm256_extracti128_si256(odd, 1)};
        for (int q = 0; q < 4; q++)
            _mm256_storeu_ps(out + g * stride + 8 * q,
                             _mm256_mul_ps(step, _mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(quarter[q]))));
    }
#else
    for (long g = 0; g < c->group; g++)
        for (int i = 0; i < BLOCK; i++) {
            const uint8_t *table = lut + g * c->size * 32;
            uint32_t sum = 0;
            for (long b = 0; b < bytes; b++, table += 64) {
                const int one = codes[i][b] & 15, other = codes[i][b] >> 4;
                sum += table[one] + ((uint32_t)table[16 + one] << 8);
                sum += table[32 + other] + ((uint32_t)table[48 + other] << 8);
            }
            out[g * stride + i] = (float)sum * steps[g];
        }
#endif
}

/* The same for keys; `query` has the group's as floats, scaled. */
static void score_keys(const scores_call *c, const uint8_t *const *keys, const float *query, float *out, long stride) {
    for (int i = 0; i < BLOCK; i++) {
        for (long g = 0; g < c->group; g++) {
            const float *q = query + g * c->size;
            vf sum = vf_all(0.f), other = sum;
            for (long d = 0; d < c->size; d += 2 * VL) {
                if (c->is_bf16) {
                    sum += vf_load(q + d) * vf_load_bf16((const bf16 *)keys[i] + d);
                    other += vf_load(q + d + VL) * vf_load_bf16((const bf16 *)keys[i] + d + VL);
                } else {
                    sum += vf_load(q + d) * vf_load((const float *)keys[i] + d);
                    other += vf_load(q + d + VL) * vf_load((const float *)keys[i] + d + VL);
                }
            }
            out[g * stride + i] = vf_reduce_add(sum + other);
        }
    }
}

/* What each nibble of a code adds to the score of a scaled query: [nibbles, 16].
 *
 * By a matrix [head_dim, nibbles * 16]; or by coordinate, of which each has a nibble: from its value and its magnitude,
 * which two arrays [head_dim, 16] multiply. */
static void table(const scores_call *c, long head, const float *query, float *tables) {
    const long width = c->size * 16;
    if (c->by_coordinate) {
        const float *value = c->decode + head * 2 * width, *magnitude = value + width;
        for (long i = 0; i < width; i++) tables[i] = query[i / 16] * value[i] + fabsf(query[i / 16]) * magnitude[i];
        return;
    }
    memset(tables, 0, (size_t)width * sizeof *tables);
    const float *line = c->decode + head * c->head_dim * width;
    for (long d = 0; d < c->head_dim; d++, line += width)
        for (long i = 0; i < width; i++) tables[i] += query[d] * line[i];
}

/* What a thread needs of a row before its chunks: tables of whole steps, or the queries of keys. */
static void prepare(const scores_call *c, long row, uint8_t *lut, float *steps, float *query) {
    float *tables = query + c->group * c->head_dim;
    for (long i = 0; i < c->group * c->head_dim; i++) {
        const long at = row * c->group * c->head_dim + i;
        query[i] = c->scale * (c->is_bf16 ? bf16_to_float(((const bf16 *)c->query)[at]) : ((const float *)c->query)[at]);
    }
    if (!c->decode) return;
    for (long g = 0; g < c->group; g++) {
        table(c, row % c->num_kv_heads, query + g * c->head_dim, tables);
        steps[g] = round_tables(tables, c->size, lut + g * c->size * 32);
    }
}

/* exp(score - peak) of codes first.. of a row, their peak and their sum over positions. */
static void score_chunk(const scores_call *c, long row, score_row r, long chunk, const uint8_t *lut, const float *steps,
                        const float *query) {
    const long first = r.first + chunk * CHUNK, count = r.end - first < CHUNK ? r.end - first : CHUNK;
    float *weights = c->weights + row * c->group * c->stride + chunk * CHUNK;
    const uint8_t *codes[BLOCK];
    walk w = walk_from(c, r, first);
    for (long b = 0; b < count; b += BLOCK) {
        for (long i = 0; i < BLOCK; i++) codes[i] = b + i < count ? walk_next(c, &w) : codes[i - 1];
        if (c->decode)
            score_codes(c, codes, lut, steps, weights + b, c->stride);
        else
            score_keys(c, codes, query, weights + b, c->stride);
    }
    const float before = (float)(r.lo > first * c->per_code ? r.lo - first * c->per_code : 0);
    const long end = (first + count) * c->per_code;
    const float after = (float)(end > r.hi ? end - r.hi : 0);
    for (long g = 0; g < c->group; g++) {
        float *x = weights + g * c->stride;
        const long padded = (count + BLOCK - 1) / BLOCK * BLOCK; /* repeats of the last code */
        vf peaks = vf_load(x), sum = vf_all(0.f);
        for (long i = VL; i < padded; i += VL) peaks = vf_max(peaks, vf_load(x + i));
        const float peak = vf_reduce_max(peaks);
        for (long i = 0; i < padded; i += BLOCK) {
            vf w[BLOCK / VL];
            UNROLL for (int v = 0; v < BLOCK / VL; v++) w[v] = vf_load(x + i + v * VL) - vf_all(peak);
            vf_exp2_below(w, BLOCK / VL, vf_all(LOG2E), vf_all(-125.5f / LOG2E));
            UNROLL for (int v = 0; v < BLOCK / VL; v++) {
                vf_store(x + i + v * VL, w[v]);
                sum += w[v];
            }
        }
        float total = vf_reduce_add(sum);
        for (long i = count; i < padded; i++) total -= x[i];
        const long part = (row * c->group + g) * (c->stride / CHUNK) + chunk;
        c->peaks[part] = peak;
        c->totals[part] = (float)c->per_code * total - before * x[0] - after * x[count - 1];
    }
}

/* What the weights of each chunk of a query count in the row, into fades [group, chunks], and the alpha rule's bound. */
static void scale_row(const scores_call *c, long row, long chunks, float *fades, float *bounds) {
    for (long g = 0; g < c->group; g++) {
        const long part = (row * c->group + g) * (c->stride / CHUNK);
        float peak = c->peaks[part], total = 0.f;
        for (long i = 1; i < chunks; i++) peak = c->peaks[part + i] > peak ? c->peaks[part + i] : peak;
        for (long i = 0; i < chunks; i++) {
            fades[g * chunks + i] = expf(c->peaks[part + i] - peak);
            total += fades[g * chunks + i] * c->totals[part + i];
        }
        for (long i = 0; i < chunks; i++) fades[g * chunks + i] /= total;
        bounds[g] = expf(-c->alpha) / total;
    }
}

static void merge_chunk(const scores_call *c, long row, score_row r, long chunk, long chunks, const float *fades,
                        const float *bounds) {
    const long first = r.first + chunk * CHUNK, count = r.end - first < CHUNK ? r.end - first : CHUNK;
    float *out = c->out + row * c->n;
    const float *weights = c->weights + row * c->group * c->stride + chunk * CHUNK;
    float mass[CHUNK];
    for (long i = 0; i < count; i++) mass[i] = 0.f;
    for (long g = 0; g < c->group; g++) {
        const float fade = fades[g * chunks + chunk], bound = bounds[g];
        const float *x = weights + g * c->stride;
        int32_t close = 0;
        for (long i = 0; i < count; i++) {
            const float w = x[i] * fade;
            mass[i] += w;
            close += w >= bound;
        }
        close *= (int32_t)c->per_code;
        if (x[0] * fade >= bound && r.lo > first * c->per_code) close -= (int32_t)(r.lo - first * c->per_code);
        const long end = (first + count) * c->per_code;
        if (x[count - 1] * fade >= bound && end > r.hi) close -= (int32_t)(end - r.hi);
        __atomic_fetch_add(c->close + row * c->group + g, close, __ATOMIC_RELAXED);
    }
    if (c->per_code == 1) {
        memcpy(out + first, mass, (size_t)count * sizeof(float));
        return;
    }
    for (long i = 0; i < count; i++) {
        long at = (first + i) * c->per_code, end = at + c->per_code;
        if (at < r.lo) at = r.lo;
        if (end > r.hi) end = r.hi;
        for (; at < end; at++) out[at] = mass[i];
    }
}

static void fill_rest(const scores_call *c, long row) {
    const long request = row / c->num_kv_heads, begin = begin_of(c, request), length = c->context_len[request];
    const long always = c->sinks < length - 1 ? c->sinks : length - 1;
    float *out = c->out + row * c->n;
    for (long i = 0; i < begin; i++) out[i] = -INFINITY;
    for (long i = begin; i < always; i++) out[i] = ALWAYS;
    out[length - 1] = INFINITY;
    for (long i = length; i < c->n; i++) out[i] = -INFINITY;
}

static void scores_team(void *data, team me) {
    scores_call *c = data;
    const long rows = c->num_requests * c->num_kv_heads;
    uint8_t *lut = c->luts + (size_t)me.id * c->lut_bytes;
    float *steps = (float *)(lut + c->group * c->size * 32), *bounds = steps + c->group;
    float *fades = bounds + c->group, *query = fades + c->group * (c->stride / CHUNK);
    long all = 0, first, end;
    for (long row = 0; row < rows; row++) all += chunks_of(row_of(c, row));
    team_share(me, all, &first, &end);
    for (int stage = 0; stage < 2; stage++) {
        long at = 0;
        for (long row = 0; row < rows && at < end; row++) {
            const score_row r = row_of(c, row);
            const long chunks = chunks_of(r);
            const long from = first > at ? first - at : 0, to = end - at < chunks ? end - at : chunks;
            at += chunks;
            if (from >= to) continue;
            if (stage == 0)
                prepare(c, row, lut, steps, query);
            else
                scale_row(c, row, chunks, fades, bounds);
            for (long i = from; i < to; i++) {
                if (stage == 0)
                    score_chunk(c, row, r, i, lut, steps, query);
                else
                    merge_chunk(c, row, r, i, chunks, fades, bounds);
            }
        }
        if (stage == 0) {
            long mine, last;
            team_share(me, rows, &mine, &last);
            for (; mine < last; mine++) fill_rest(c, mine);
            team_wait(me);
        }
    }
}

/* How many each row of a request may read: a part of it, and by the alpha rule no more than the neediest of its KV heads. */
static void count(const scores_call *c, long request) {
    const long length = c->context_len[request], most = length - begin_of(c, request);
    long num = (long)ceil((double)length * c->ratio - 1e-9);
    num = num < 1 ? 1 : num > most ? most : num;
    int32_t neediest = 0;
    for (long h = 0; h < c->num_kv_heads; h++) {
        const int32_t *close = c->close + (request * c->num_kv_heads + h) * c->group;
        int32_t all = 0;
        for (long g = 0; g < c->group; g++) all += close[g];
        neediest = all > neediest ? all : neediest;
    }
    const long wanted = 1 + c->sinks + (neediest + c->group - 1) / c->group;
    if (c->ratio < 1. && c->alpha < INFINITY && wanted < num) num = wanted;
    for (long h = 0; h < c->num_kv_heads; h++) c->num[request * c->num_kv_heads + h] = (int32_t)num;
}

/* Bytes of scratch that narrows_scores needs. */
static size_t lay_out(scores_call *c, char *scratch, long threads) {
    const size_t queries = (size_t)(c->num_requests * c->num_kv_heads * c->group);
    c->stride = ((c->n + c->per_code - 1) / c->per_code + CHUNK) / CHUNK * CHUNK;
    const size_t parts = queries * (size_t)(c->stride / CHUNK), weights = queries * (size_t)c->stride;
    c->weights = (float *)scratch;
    c->peaks = c->weights + weights;
    c->totals = c->peaks + parts;
    c->close = (int32_t *)(c->totals + parts);
    c->luts = (uint8_t *)(c->close + queries);
    const long floats = c->group * (2 + c->stride / CHUNK + c->head_dim) + c->size * 16;
    c->lut_bytes = (size_t)(c->group * c->size * 32 + floats * 4 + 63) / 64 * 64;
    return (weights + 2 * parts + queries) * 4 + c->lut_bytes * (size_t)threads;
}

/* decode NULL: the metadata are keys, and size is head_dim. Returns the bytes of scratch that are needed if `scratch_bytes`
 * are fewer, and nothing is done then; else 0. */
long narrows_scores(float *out, int32_t *num, const void *query, const float *decode, int by_coordinate,
                    const void *metadata, long metadata_bytes, const int32_t *context_len, const int32_t *page_table,
                    long num_requests, long table_stride, long page_size, long group, long num_kv_heads, long head_dim,
                    long size, long per_row, long per_code, long n, long sinks, long window, double ratio, float alpha,
                    float scale, int is_bf16, void *scratch, long scratch_bytes, crew *crew) {
    scores_call c = {out, num, query, decode, by_coordinate, metadata, (size_t)metadata_bytes, context_len, page_table,
                     num_requests, table_stride, page_size, group, num_kv_heads, head_dim, size, per_row, per_code, n,
                     sinks, window, ratio, alpha, scale, is_bf16, 0, NULL, NULL, NULL, NULL, NULL, 0};
    const size_t needed = lay_out(&c, scratch, crew_size(crew));
    if (needed > (size_t)scratch_bytes) return (long)needed;
    const long queries = num_requests * num_kv_heads * group;
    memset(c.close, 0, (size_t)queries * sizeof *c.close);
    crew_run(crew, scores_team, &c, queries * (n / per_code) > THREADED);
    for (long r = 0; r < num_requests; r++) count(&c, r);
    return 0;
}
