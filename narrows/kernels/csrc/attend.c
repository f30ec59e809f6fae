/* Attention over paged KV, for bfloat16 and float32. See attend.h for how the work is cut. */

#include <stdlib.h>

#include "simd.h"
#include "threads.h"

#define MAX_HEAD_DIM 256
#define KEYS 64          /* tokens of a packed block */
#define CHUNK 256        /* tokens of a part, a multiple of KEYS */
#define TILE_ROWS 48     /* rows that share a pass over packed keys */
#define SCRATCH_BYTES (64L << 20)

#if defined(NARROWS_AVX512)
#define MAX_ROWS 6 /* 24 accumulators, 4 vectors of B and one of A: 29 of 32 registers */
#define MAX_BLOCKS 4
#else
#define MAX_ROWS 3
#define MAX_BLOCKS (VL == 8 ? 2 : 1)
#endif
#define FOLD_ROWS 6
#define FOLD_BLOCKS 4

/* A request that is cut along its tokens. */
typedef struct {
    long request, rows;
    long begin, end;   /* tokens that any of its rows sees; begin is a multiple of CHUNK */
    long first, parts; /* its place among all parts */
    float *part;
} narrow;

typedef struct {
    void *out;
    float *lse;
    const void *query, *entries;
    const int32_t *query_start, *context_len, *page_table;
    long num_requests, table_stride, page_size, num_heads, num_kv_heads, head_dim;
    float scale, scale2; /* of the scores, and the same for powers of two */
    float lowest;        /* a score so far below the peak weighs nothing */
    long window;         /* 0: none */
    long narrow_rows;    /* a request of at most this many rows is cut along its tokens */

    long heads_at_once; /* KV heads of a wide request that are packed together */
    void *scratch;
    size_t scratch_stride; /* bytes of each thread's own piece, when requests are narrow */
    atomic_long *tickets;  /* one per wide request */
    narrow *narrow;
    long num_narrow, num_parts, num_narrow_rows;
} attend_call;

static long begin_of(const attend_call *c, long end) { return c->window && end > c->window ? end - c->window : 0; }

static long rows_of(const attend_call *c, long r) { return c->query_start[r + 1] - c->query_start[r]; }

static int is_wide(const attend_call *c, long r) { return rows_of(c, r) > c->narrow_rows; }

static long part_floats(const attend_call *c, long rows) {
    return (rows * c->num_heads * (c->head_dim + LANES + 1) + 15) / 16 * 16;
}

#define CASE(r, j) \
    case (r) * 8 + (j): \
        if ((r) <= MAX_ROWS && (j) <= MAX_BLOCKS) { \
            if (narrow) \
                T(micro)(r, j, (r) <= 3 ? 2 : 1, p, add, -2); \
            else \
                T(micro)(r, j, 1, p, add, 0); \
        } \
        break;
#define CASES(r) CASE(r, 1) CASE(r, 2) CASE(r, 3) CASE(r, 4)
#define MULTIPLY \
    static void T(multiply_small)(int rows, int blocks, int narrow, const T(product) *p, int add) { \
        switch (rows * 8 + blocks) { CASES(1) CASES(2) CASES(3) CASES(4) CASES(5) CASES(6) } \
    } \
    static void T(multiply)(int rows, int blocks, int narrow, const T(product) *whole, int add) { \
        if (rows <= MAX_ROWS && blocks <= MAX_BLOCKS) { \
            T(multiply_small)(rows, blocks, narrow, whole, add); \
            return; \
        } \
        for (int r = 0; r < rows; r += MAX_ROWS) \
            for (int j = 0; j < blocks; j += MAX_BLOCKS) { \
                T(product) p = *whole; \
                p.a += r * p.lda, p.b += j * LANES, p.c += r * p.ldc + j * LANES; \
                T(multiply_small)(rows - r < MAX_ROWS ? rows - r : MAX_ROWS, \
                                  blocks - j < MAX_BLOCKS ? blocks - j : MAX_BLOCKS, narrow, &p, add); \
            } \
    }

#define NARROWS_BF16 1
#include "micro.h"
MULTIPLY
#include "attend.h"
#undef NARROWS_BF16
#undef T
#undef STEP
#undef PER_STEP

#define NARROWS_BF16 0
#include "micro.h"
MULTIPLY
#include "attend.h"

/* Returns 0, or -1 when there is no memory for the scratch. */
int narrows_attend(int is_bf16, void *out, float *lse, const void *query, const void *entries, const int32_t *query_start,
                   const int32_t *context_len, const int32_t *page_table, long num_requests, long table_stride,
                   long page_size, long num_heads, long num_kv_heads, long head_dim, float scale, long window,
                   long narrow_rows, crew *crew) {
    attend_call c = {out, lse, query, entries, query_start, context_len, page_table, num_requests, table_stride, page_size,
                     num_heads, num_kv_heads, head_dim, scale, scale * LOG2E, -125.5f / (scale * LOG2E), window, narrow_rows};
    const size_t block = (size_t)(head_dim * 2 * KEYS) * (is_bf16 ? 2 : 4);
    size_t scratch = block * (size_t)crew_size(crew), parts = 0;
    long work = 0;
    int status = -1;
    c.scratch_stride = block;
    c.heads_at_once = num_kv_heads;
    c.tickets = calloc((size_t)num_requests + 1, sizeof *c.tickets);
    c.narrow = malloc(((size_t)num_requests + 1) * sizeof *c.narrow);
    if (!c.tickets || !c.narrow) goto done;
    for (long r = 0; r < num_requests; r++) {
        const long rows = rows_of(&c, r), length = context_len[r];
        work += rows * num_heads * length;
        if (!is_wide(&c, r)) {
            const long begin = begin_of(&c, length - rows + 1) / CHUNK * CHUNK;
            narrow n = {r, rows, begin, length, c.num_parts, rows ? (length - begin + CHUNK - 1) / CHUNK : 0, NULL};
            c.narrow[c.num_narrow++] = n;
            c.num_parts += n.parts;
            c.num_narrow_rows += rows * num_heads;
            parts += (size_t)(n.parts * part_floats(&c, rows)) * sizeof(float);
            continue;
        }
        const size_t head = block * (size_t)((length + KEYS - 1) / KEYS);
        long heads = head ? (long)(SCRATCH_BYTES / head) : num_kv_heads;
        heads = heads < 1 ? 1 : heads > num_kv_heads ? num_kv_heads : heads;
        if (heads < c.heads_at_once) c.heads_at_once = heads;
        if (head * (size_t)heads > scratch) scratch = head * (size_t)heads;
    }
    if (posix_memalign(&c.scratch, 64, scratch + parts)) {
        c.scratch = NULL;
        goto done;
    }
    float *part = (float *)((char *)c.scratch + scratch);
    for (long n = 0; n < c.num_narrow; n++) {
        c.narrow[n].part = part;
        part += c.narrow[n].parts * part_floats(&c, c.narrow[n].rows);
    }
    crew_run(crew, is_bf16 ? attend_team_bf16 : attend_team_f32, &c, work > 4096);
    status = 0;
done:
    free(c.scratch);
    free(c.narrow);
    free(c.tickets);
    return status;
}
