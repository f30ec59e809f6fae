/* bfloat16 matrix products on packed weights, with what follows them.
 *
 * A weight [N, K] is packed by panels of PANEL outputs, so that a step of 16 outputs needs no sum across lanes:
 *   [N / PANEL] panels x [K / 2] steps x [PANEL] outputs x 2 neighbours of K, zeros past N
 * A panel is one contiguous stream. Few rows (decode): threads share the panels, each weight is read once, at the speed of
 * memory. Many rows (prefill): threads draw tasks of some rows by some panels; a panel stays in the first-level cache
 * while the rows go by from the second.
 */

#include "simd.h"
#include "threads.h"

#define PANEL 32
#define MAX_TILE 14 /* rows that are multiplied and written together */
#define TASK_BYTES (256 << 10) /* of x: what stays in the second-level cache beside a panel */
#define AHEAD 16384            /* bytes of weights asked for before their use, when rows are few */
#define PAIR_AHEAD 4096        /* the same for each of two streams */

#if defined(NARROWS_AVX512)
#define MAX_ROWS 14 /* 28 accumulators, 2 vectors of weights and one of x: 31 of 32 registers */
#define PAIR_ROWS 6 /* so few that two panels are multiplied at once: the sums of one would wait for each other */
#define MAX_BLOCKS 4
#else
#define MAX_ROWS 3
#define PAIR_ROWS 0
#define MAX_BLOCKS (VL == 8 ? 2 : 1)
#endif

#define NARROWS_BF16 1
#include "micro.h"

typedef struct {
    const bf16 *x;      /* [rows, steps * 2] */
    const word *weight; /* packed */
    const float *bias;  /* [N] or NULL */
    bf16 *y;            /* [rows, outputs] */
    int add;            /* y += instead of y = */
    int gated;          /* outputs are silu(first half of N) * second half */
    long rows, steps, outputs;
    long task_rows, task_panels;
    atomic_long ticket;
} linear_call;

#define BLOCKS (MAX_BLOCKS < 2 ? 1 : 2)
#define CASE(r) \
    case r: \
        if (r <= MAX_ROWS) { \
            if (hurry == STREAM) micro_bf16(r, BLOCKS, 1, p, 0, AHEAD); \
            else if (hurry == NEXT_PANEL) micro_bf16(r, BLOCKS, 1, p, 0, -1); \
            else micro_bf16(r, BLOCKS, 1, p, 0, 0); \
        } \
        break;

/* Which weights to ask for while others are multiplied: none, those a little ahead, or a half of the next panel. */
enum hurry { CALM, STREAM, NEXT_PANEL };

/* tile [rows, PANEL] = x times one panel */
static void multiply(const linear_call *c, const bf16 *x, int rows, long panel, float *tile, enum hurry hurry, long half) {
    for (int r = 0; r < rows; r += MAX_ROWS)
        for (int j = 0; j < PANEL; j += BLOCKS * LANES) {
            const word *weight = c->weight + panel * c->steps * PANEL;
            const product_bf16 whole = {(const word *)x + r * c->steps, c->steps, weight + j, PANEL, 0, c->steps,
                                        tile + r * PANEL + j, PANEL,
                                        (const char *)(weight + c->steps * (PANEL + half * LANES))}, *p = &whole;
            switch (rows - r < MAX_ROWS ? rows - r : MAX_ROWS) {
                CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7)
                CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14)
            }
        }
}

#define PAIR_CASE(r) \
    case r: \
        if (r <= PAIR_ROWS) micro_bf16(r, MAX_BLOCKS, 1, p, 0, PAIR_AHEAD); \
        break;

/* tile [rows, 2 * PANEL] = x times two panels */
static void multiply_pair(const linear_call *c, int rows, long panel, long other, float *tile) {
    const product_bf16 whole = {(const word *)c->x, c->steps, c->weight + panel * c->steps * PANEL, PANEL,
                                (other - panel) * c->steps * PANEL, c->steps, tile, 2 * PANEL}, *p = &whole;
    switch (rows) { PAIR_CASE(1) PAIR_CASE(2) PAIR_CASE(3) PAIR_CASE(4) PAIR_CASE(5) PAIR_CASE(6) }
}

INLINE vf silu(vf x) { return x / (1.f + vf_exp2(x * -LOG2E)); }

INLINE vf load_partial(const bf16 *p, long n) {
    bf16 whole[VL] = {0};
    memcpy(whole, p, (size_t)n * sizeof *p);
    return vf_load_bf16(whole);
}

/* Write one tile, whose rows are `width` apart: bias, gate, sum with what was there, rounding. `up` is the gate's partner, or NULL. */
static void write_tile(const linear_call *c, const float *tile, const float *up, long width, long row,
                       int rows, long panel) {
    for (long at = 0; at < PANEL; at += VL) {
        const long column = panel * PANEL + at, n = c->outputs - column < VL ? c->outputs - column : VL;
        if (n <= 0) return;
        vf bias = {0}, up_bias = {0};
        if (c->bias) {
            memcpy(&bias, c->bias + column, (size_t)n * sizeof(float));
            if (up) memcpy(&up_bias, c->bias + c->outputs + column, (size_t)n * sizeof(float));
        }
        for (int r = 0; r < rows; r++) {
            bf16 *y = c->y + (row + r) * c->outputs + column;
            vf v = vf_load(tile + r * width + at) + bias;
            if (up) v = silu(v) * (vf_load(up + r * width + at) + up_bias);
            if (c->add) v += n == VL ? vf_load_bf16(y) : load_partial(y, n);
            if (n == VL) {
                vf_store_bf16(y, v);
            } else {
                bf16 whole[VL];
                vf_store_bf16(whole, v);
                memcpy(y, whole, (size_t)n * sizeof *y);
            }
        }
    }
}

/* Rows first..end by panels from..until. */
static void run_task(const linear_call *c, long first, long end, long from, long until) {
    float tile[2][MAX_TILE * PANEL] __attribute__((aligned(64)));
    const long panels = (c->outputs + PANEL - 1) / PANEL, blocks = (end - first + MAX_TILE - 1) / MAX_TILE;
    for (long panel = from; panel < until; panel++)
        for (long b = 0; b < blocks; b++) {
            /* blocks of nearly equal height */
            const long row = first + (end - first) * b / blocks;
            const int rows = (int)(first + (end - first) * (b + 1) / blocks - row);
            const enum hurry hurry = blocks == 1 ? STREAM : b < 2 && end - first <= 4 * MAX_TILE ? NEXT_PANEL : CALM;
            multiply(c, c->x + row * c->steps * 2, rows, panel, tile[0], hurry, b);
            if (c->gated) multiply(c, c->x + row * c->steps * 2, rows, panels + panel, tile[1], hurry, b);
            write_tile(c, tile[0], c->gated ? tile[1] : NULL, PANEL, row, rows, panel);
        }
}

/* All rows, few, by panels from..until: two streams of weights, each read to its end. */
static void run_pairs(const linear_call *c, long from, long until) {
    float tile[PAIR_ROWS * 2 * PANEL + LANES] __attribute__((aligned(64)));
    const long panels = (c->outputs + PANEL - 1) / PANEL, half = (until - from) / 2;
    const int rows = (int)c->rows;
    if (c->gated) {
        for (long panel = from; panel < until; panel++) {
            multiply_pair(c, rows, panel, panels + panel, tile);
            write_tile(c, tile, tile + PANEL, 2 * PANEL, 0, rows, panel);
        }
        return;
    }
    for (long panel = from; panel < from + half; panel++) {
        multiply_pair(c, rows, panel, panel + half, tile);
        write_tile(c, tile, NULL, 2 * PANEL, 0, rows, panel);
        write_tile(c, tile + PANEL, NULL, 2 * PANEL, 0, rows, panel + half);
    }
    if (from + 2 * half < until) run_task(c, 0, rows, until - 1, until);
}

static void linear_team(void *data, team me) {
    linear_call *c = data;
    const long panels = (c->outputs + PANEL - 1) / PANEL;
    long first, end, i;
    if (c->task_rows >= c->rows) {
        team_share(me, panels, &first, &end);
        if (c->rows <= PAIR_ROWS)
            run_pairs(c, first, end);
        else
            run_task(c, 0, c->rows, first, end);
        return;
    }
    const long high = (c->rows + c->task_rows - 1) / c->task_rows, wide = (panels + c->task_panels - 1) / c->task_panels;
    while ((i = atomic_fetch_add(&c->ticket, 1)) < high * wide) {
        const long row = i / wide * c->task_rows, panel = i % wide * c->task_panels;
        run_task(c, row, row + c->task_rows < c->rows ? row + c->task_rows : c->rows, panel,
                 panel + c->task_panels < panels ? panel + c->task_panels : panels);
    }
}

/* y [rows, outputs] (+)= x [rows, steps * 2] times weight, plus bias. With `gated`, outputs must be a multiple of PANEL. */
void narrows_linear(void *y, const void *x, const void *weight, const float *bias, long rows, long steps, long outputs,
                    int add, int gated, crew *crew) {
    linear_call c = {.x = x, .weight = weight, .bias = bias, .y = y, .add = add, .gated = gated, .rows = rows,
                     .steps = steps, .outputs = outputs};
    const long panels = (outputs + PANEL - 1) / PANEL;
    c.task_rows = TASK_BYTES / (steps * 4) / MAX_TILE * MAX_TILE;
    if (c.task_rows < 4 * MAX_TILE) c.task_rows = 4 * MAX_TILE;
    const long high = (rows + c.task_rows - 1) / c.task_rows;
    /* enough tasks to even out, few enough that x is read from the second-level cache */
    const long tasks = 8 * crew_size(crew);
    c.task_panels = (panels * high + tasks - 1) / tasks;
    if (c.task_panels > panels) c.task_panels = panels;
    if (c.task_panels < 1) c.task_panels = 1;
    if (!rows) return;
    crew_run(crew, linear_team, &c, outputs * (gated ? 2 : 1) * steps > 16384);
}

/* y [rows, half] = silu(x[:, :half]) * x[:, half:] for widths that no panel fits. */
void narrows_silu_mul(bf16 *y, const bf16 *x, long rows, long half) {
    for (long r = 0; r < rows; r++)
        for (long d = 0; d < half; d++) {
            const float gate = bf16_to_float(x[r * 2 * half + d]);
            y[r * half + d] = float_to_bf16(gate / (1.f + expf(-gate)) * bf16_to_float(x[r * 2 * half + half + d]));
        }
}
