/* Attention over selected entries, for bfloat16 and float32.
 *
 * A row is one KV head of one request, with the queries that share it. Its entries are cut into parts of CHUNK, which the
 * threads draw one after the other; a part goes through its entries BLOCK by BLOCK, each row keeping a running softmax
 * (weighted values, sum of weights, maximum), and asks for the next block while it computes one. The parts of a row are
 * merged at the end. Neither cut depends on the other rows, on the number of threads or on where the entries lie.
 */

#include <stdlib.h>

#ifndef NARROWS_GENERIC
#define NARROWS_GENERIC /* eight lanes keep up with memory, and divide every head size */
#endif
#include "simd.h"
#include "threads.h"
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define MAX_HEAD_DIM 256
#define CHUNK 256
#define BLOCK 32 /* two of them, one asked for ahead, fit a first-level cache */
#define MAX_ROWS 3
#define THREADED_BYTES 65536 /* below, waking the other threads costs more than they save */

/* What is in memory is not to be kept in a register across this. */
#define READ_AGAIN __asm__ volatile("" ::: "memory")

/* Entries begin..end of a row's index. */
typedef struct {
    long row, begin, end;
} part;

/* The softmax of a part so far. */
typedef struct {
    float *sum;   /* [group, D] weighted values, spread */
    float *total; /* [group, VL]: the sum of weights is the sum over lanes */
    float *peak;  /* [group] greatest score, unscaled */
} running;

typedef struct {
    void *out;
    float *lse;
    const void *query, *memory;
    const int32_t *ids;
    long rows, ids_stride, group, head_dim;
    float scale, scale2; /* of the scores, and the same for powers of two */
    float lowest;        /* a score so far below the peak weighs nothing */

    part *parts;
    long *first_part; /* [rows + 1] */
    float *running;   /* of each part */
    float *queries;   /* each thread's room for [group, D] */
    atomic_long ticket;
} index_call;

static long running_floats(long group, long head_dim) { return (group * (head_dim + VL + 1) + 15) / 16 * 16; }

INLINE running running_of(const index_call *c, const part *p) {
    float *sum = c->running + (p - c->parts) * running_floats(c->group, c->head_dim);
    float *total = sum + c->group * c->head_dim;
    return (running){sum, total, total + c->group * VL};
}

/* to[i] = the sum of x[i]'s lanes, i < 4 */
INLINE void sum_of_each(const vf *x, float *to) {
#ifdef __AVX2__
    const __m256 s = _mm256_hadd_ps(_mm256_hadd_ps((__m256)x[0], (__m256)x[1]), _mm256_hadd_ps((__m256)x[2], (__m256)x[3]));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
#else
    for (int i = 0; i < 4; i++) to[i] = vf_reduce_add(x[i]);
#endif
}

/* Turn a row's scores of a block, n of them valid, into weights. Returns by how much its earlier sums fade. */
INLINE float weigh(const index_call *c, float *scores, int n, float *total, float *peak) {
    enum { N = BLOCK / VL };
    vf s[N];
    for (int i = n; i < BLOCK; i++) scores[i] = -INFINITY;
    UNROLL for (int i = 0; i < N; i++) s[i] = vf_load(scores + i * VL);
    vf most = s[0];
    UNROLL for (int i = 1; i < N; i++) most = vf_max(most, s[i]);
    const float old = *peak, here = vf_reduce_max(most), now = here > old ? here : old;
    /* subtracted before scaling: exact near the peak, and no overflow */
    const vf shift = vf_all(now == -INFINITY ? 0.f : now);
    UNROLL for (int i = 0; i < N; i++) s[i] -= shift;
    vf_exp2_below(s, N, vf_all(c->scale2), vf_all(c->lowest));
    float fade = 1.f;
    if (now != old) fade = vf_exp2(vf_all((old - now) * c->scale2))[0], *peak = now;
    for (int i = n; i < BLOCK; i++) ((float *)s)[i] = 0.f;
    vf sum = vf_load(total) * fade;
    UNROLL for (int i = 0; i < N; i++) {
        vf_store(scores + i * VL, s[i]);
        sum += s[i];
    }
    vf_store(total, sum);
    return fade;
}

#define NARROWS_BF16 1
#include "index.h"
#undef NARROWS_BF16
#undef T
#undef STEP
#undef PER_STEP

#define NARROWS_BF16 0
#include "index.h"

/* Returns 0, or -1 when there is no memory for the scratch. */
int narrows_attend_index(int is_bf16, void *out, float *lse, const void *query, const void *memory, const int32_t *ids,
                         const int32_t *counts, long rows, long ids_stride, long group, long head_dim, float scale,
                         crew *crew) {
    index_call c = {.out = out, .lse = lse, .query = query, .memory = memory, .ids = ids, .rows = rows,
                    .ids_stride = ids_stride, .group = group, .head_dim = head_dim,
                    .scale = scale, .scale2 = scale * LOG2E, .lowest = -125.5f / (scale * LOG2E)};
    long num_parts = 0, work = 0;
    for (long r = 0; r < rows; r++) {
        num_parts += (counts[r] + CHUNK - 1) / CHUNK;
        work += counts[r] * head_dim * (is_bf16 ? 4 : 8);
    }
    const size_t floats = (size_t)(num_parts * running_floats(group, head_dim) + crew_size(crew) * group * head_dim);
    const size_t longs = (size_t)rows + 1;
    void *scratch;
    if (posix_memalign(&scratch, 64, floats * sizeof(float) + longs * sizeof(long) + (size_t)num_parts * sizeof(part))) return -1;
    c.running = scratch;
    c.queries = c.running + num_parts * running_floats(group, head_dim);
    c.first_part = (long *)(c.running + floats);
    c.parts = (part *)(c.first_part + longs);
    long n = 0;
    for (long r = 0; r < rows; r++) {
        c.first_part[r] = n;
        for (long at = 0; at < counts[r]; at += CHUNK)
            c.parts[n++] = (part){r, at, at + CHUNK < counts[r] ? at + CHUNK : counts[r]};
    }
    c.first_part[rows] = n;
    crew_run(crew, is_bf16 ? index_team_bf16 : index_team_f32, &c, work >= THREADED_BYTES);
    free(scratch);
    return 0;
}
