/* What the machine can do at most, for benchmarks to stand their numbers beside. */

#include "simd.h"
#include "threads.h"

typedef struct {
    const char *from;
    long bytes;
    atomic_uint sum; /* so that no compiler drops the work */
} probe_call;

static void read_team(void *data, team me) {
    probe_call *c = data;
    long first, end;
    team_share(me, c->bytes / 256, &first, &end);
    vu sum[4] = {0};
    for (const char *p = c->from + first * 256; p < c->from + end * 256; p += 256)
        UNROLL for (int line = 0; line < 4; line++) {
            __builtin_prefetch(p + 4096 + line * 64);
            UNROLL for (int v = 0; v < NV; v++) sum[line] += vu_load(p + line * 64 + v * VL * 4);
        }
    for (int line = 0; line < 4; line++)
        for (int i = 0; i < VL; i++) atomic_fetch_add(&c->sum, sum[line][i]);
}

/* Read so many bytes once (a multiple of 256). */
unsigned narrows_probe_read(const void *from, long bytes, crew *crew) {
    probe_call c = {from, bytes, 0};
    crew_run(crew, read_team, &c, 1);
    return c.sum;
}

#define NARROWS_BF16 1
#define MAX_ROWS 6
#define MAX_BLOCKS (VL == 16 ? 4 : 1)
#include "micro.h"

static void multiply_team(void *data, team me) {
    (void)me;
    const probe_call *c = data;
    const word a[6 * 256] = {0}, b[4 * LANES] = {0};
    float sums[6 * 4 * LANES] = {0};
    const product_bf16 p = {a, 256, b, 0, 2 * LANES, 256, sums, MAX_BLOCKS * LANES};
    /* x and weights that fit the first-level cache, over and over */
    for (long k = 0; k < c->bytes; k++) {
        micro_bf16(VL == 16 ? 6 : 3, MAX_BLOCKS, 1, &p, 1, 0);
        __asm__ volatile("" ::"r"(a), "r"(b), "r"(sums) : "memory"); /* for all the compiler knows, they changed */
    }
}

/* The bfloat16 products, each an addition too, that each thread makes in narrows_probe_multiply(count). */
long narrows_probe_products(long count) { return count * (VL == 16 ? 6 : 3) * MAX_BLOCKS * LANES * 2 * 256; }

void narrows_probe_multiply(long count, crew *crew) {
    probe_call c = {0, count, 0};
    crew_run(crew, multiply_team, &c, 1);
}
