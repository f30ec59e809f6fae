/* The largest scores of each row: find the smallest that is chosen, then list the positions of those above it.
 *
 * The smallest one is found by repeated cuts at a pivot, taken from a sample so that it falls a little beside the wanted
 * rank: most of what a cut leaves out is far from it, and few cuts leave a handful. Scores are compared as floats, so that
 * both zeros are equal, and no distribution of scores is slow.
 */

#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "threads.h"

#if defined(__AVX2__) && !defined(NARROWS_GENERIC)
#include <immintrin.h>
#define LANES 8
#else
#define LANES 1
#endif

#define SAMPLE 64
#define SLACK 8                /* floats that may be written behind the kept ones */
#define THREADED_SCORES 65536L /* below, waking the other threads costs more than they save */

typedef struct {
    int32_t *out;
    const float *scores;
    const int32_t *num;
    long rows, n, stride;
    float *scratch; /* each thread's room for two times n + SLACK */
    atomic_long ticket;
    atomic_int nan;
} top_k_call;

enum side { ABOVE, BELOW };

#if LANES == 8
/* For each mask of lanes: their numbers, one byte each, those of the mask first. */
static uint64_t front[256];
static void __attribute__((constructor)) fill_front(void) {
    for (int mask = 0; mask < 256; mask++)
        for (int lane = 0, n = 0; lane < 8; lane++)
            if (mask >> lane & 1) front[mask] |= (uint64_t)lane << 8 * n++;
}

static inline __m256i to_front(int mask, __m256i x) {
    return _mm256_permutevar8x32_epi32(x, _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)front[mask])));
}

static inline int lanes_of(__m256 mask) { return _mm256_movemask_ps(mask); }

static inline int lanes_on(enum side side, __m256 x, __m256 pivot) {
    return lanes_of(side == ABOVE ? _mm256_cmp_ps(x, pivot, _CMP_GT_OQ) : _mm256_cmp_ps(x, pivot, _CMP_LT_OQ));
}
#endif

/* Copy what lies on one side of the pivot, in order. Returns how much it is, and counts what equals the pivot. */
static inline __attribute__((always_inline)) long keep(const enum side side, const float *x, long n, float pivot, float *kept,
                                                       long *equal) {
    long i = 0, m = 0, same = 0;
#if LANES == 8
    const __m256 p = _mm256_set1_ps(pivot);
    for (; i + 8 <= n; i += 8) {
        const __m256 v = _mm256_loadu_ps(x + i);
        const int mask = lanes_on(side, v, p);
        _mm256_storeu_si256((__m256i *)(kept + m), to_front(mask, _mm256_castps_si256(v)));
        m += __builtin_popcount((unsigned)mask);
        same += __builtin_popcount((unsigned)lanes_of(_mm256_cmp_ps(v, p, _CMP_EQ_OQ)));
    }
#endif
    for (; i < n; i++) {
        kept[m] = x[i];
        m += side == ABOVE ? x[i] > pivot : x[i] < pivot;
        same += x[i] == pivot;
    }
    *equal = same;
    return m;
}

/* Of n <= SAMPLE values the rank-th largest, 1 to n. */
static float ranked(const float *x, int n, int rank) {
    for (int i = 0;; i++) {
        int above = 0, same = 0;
        for (int j = 0; j < n; j++) above += x[j] > x[i], same += x[j] == x[i];
        if ((above < rank && rank <= above + same) || i == n - 1) return x[i];
    }
}

/* The k-th largest of n scores, 1 <= k <= n, and how many are larger. -1 larger: there are NaNs among them. */
static float kth(const float *x, long n, long k, float *scratch, long *larger) {
    float *kept = scratch, *other = scratch + n + SLACK;
    *larger = 0;
    while (0 < k && k <= n) {
        float sample[SAMPLE];
        const int size = n < SAMPLE ? (int)n : SAMPLE;
        const long step = n / size;
        for (int i = 0; i < size; i++) sample[i] = x[i * step];
        /* the wanted rank in the sample, moved towards the middle by as much as it is likely to be off */
        const float part = (float)k / (float)n, off = size == n ? 0.f : 1.2f * sqrtf((float)size * part * (1.f - part)) + 1.f;
        enum side side = part < 0.5f ? ABOVE : BELOW;
        int rank = size == n ? (int)k : (int)lrintf((float)size * part + (side == ABOVE ? off : -off));
        rank = rank < 1 ? 1 : rank > size ? size : rank;
        const float pivot = ranked(sample, size, rank);
        long equal, m, above;
        for (int tries = 0;; tries++, side = !side) { /* the other side if the guess was wrong */
            if (tries == 2) goto nan;
            m = side == ABOVE ? keep(ABOVE, x, n, pivot, kept, &equal) : keep(BELOW, x, n, pivot, kept, &equal);
            above = side == ABOVE ? m : n - m - equal;
            if (above < k && k <= above + equal) {
                *larger += above;
                return pivot;
            }
            if ((side == ABOVE) == (k <= above)) break;
        }
        if (side == BELOW) k -= above + equal, *larger += above + equal;
        n = m;
        x = kept;
        kept = other;
        other = (float *)x;
    }
nan:
    *larger = -1;
    return 0.f;
}

/* The positions of all scores above `least`, and of the first `equal` ones that equal it: k in all, if there are no NaNs.
 * Returns how many they are. `room` is that of `out`. */
static long list(const float *x, long n, float least, long equal, long k, long room, int32_t *out) {
    long i = 0, m = 0;
#if LANES == 8
    const __m256 p = _mm256_set1_ps(least);
    __m256i at = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    for (; i + 8 <= n && m < k; i += 8, at = _mm256_add_epi32(at, _mm256_set1_epi32(8))) {
        const __m256 v = _mm256_loadu_ps(x + i);
        unsigned mask = (unsigned)lanes_on(ABOVE, v, p);
        if (equal) {
            unsigned same = (unsigned)lanes_of(_mm256_cmp_ps(v, p, _CMP_EQ_OQ));
            while (__builtin_popcount(same) > equal) same ^= 1u << (31 - __builtin_clz(same)); /* the last ones go */
            equal -= __builtin_popcount(same);
            mask |= same;
        }
        const int count = __builtin_popcount(mask);
        if (m + 8 <= room)
            _mm256_storeu_si256((__m256i *)(out + m), to_front((int)mask, at));
        else
            for (int j = 0; j < count && m + j < k; j++, mask &= mask - 1) out[m + j] = (int32_t)i + __builtin_ctz(mask);
        m += count;
    }
#else
    (void)room;
#endif
    for (; i < n && m < k; i++) {
        const int same = x[i] == least && equal > 0;
        out[m] = (int32_t)i;
        m += x[i] > least || same;
        equal -= same;
    }
    return m;
}

static void top_k_team(void *data, team me) {
    top_k_call *c = data;
    float *scratch = c->scratch + me.id * 2 * (c->n + SLACK);
    for (long r; (r = atomic_fetch_add(&c->ticket, 1)) < c->rows;) {
        const float *x = c->scores + r * c->n;
        int32_t *out = c->out + r * c->stride;
        const long k = c->num[r];
        if (k > 0) {
            long larger;
            const float least = kth(x, c->n, k, scratch, &larger);
            if (larger < 0 || list(x, c->n, least, k - larger, k, c->stride, out) != k) atomic_store(&c->nan, 1);
        }
        for (long i = k; i < c->stride; i++) out[i] = -1;
    }
}

/* Returns 0, -1 when there is no memory for the scratch, or -2 when NaNs kept a row from being ordered. */
int narrows_top_k(int32_t *out, const float *scores, const int32_t *num, long rows, long n, long stride, crew *crew) {
    const int together = rows > 1 && rows * n >= THREADED_SCORES;
    top_k_call c = {.out = out, .scores = scores, .num = num, .rows = rows, .n = n, .stride = stride};
    c.scratch = malloc(sizeof(float) * 2 * (size_t)(n + SLACK) * (size_t)(together ? crew_size(crew) : 1));
    if (!c.scratch) return -1;
    crew_run(crew, top_k_team, &c, together);
    free(c.scratch);
    return c.nan ? -2 : 0;
}
