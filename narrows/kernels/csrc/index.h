/* Attention over selected entries, included once per element type. index.c says how the work is cut.
 *
 * An entry is read where it lies: with a handful of queries to each, packing it first would cost more than it saves. A
 * vector of steps (bfloat16: words of two elements; float32: floats) becomes PER_STEP vectors of floats, the even elements
 * and the odd. Queries and sums are kept in that order, "spread"; the result is put back in order at the end.
 */

#if NARROWS_BF16
#define T(name) name##_bf16
#define STEP word
#define PER_STEP 2

INLINE void T(spread)(const STEP *from, vf *x) {
    const vu w = vu_load(from);
    x[0] = (vf)(w << 16);
    x[1] = (vf)(w & 0xffff0000u);
}

INLINE void T(unspread)(STEP *to, const vf *x) {
    vh half[2];
    for (int i = 0; i < 2; i++) vf_store_bf16((bf16 *)(half + i), x[i]);
    const vu pair = widen(half[0]) | (widen(half[1]) << 16);
    memcpy(to, &pair, sizeof pair);
}
#else
#define T(name) name##_f32
#define STEP float
#define PER_STEP 1

INLINE void T(spread)(const STEP *from, vf *x) { x[0] = vf_load(from); }
INLINE void T(unspread)(STEP *to, const vf *x) { vf_store(to, x[0]); }
#endif

enum { T(VECTORS) = 4 / PER_STEP }; /* of steps, summed together: MAX_ROWS * 4 sums fit 16 registers */

/* Where the entries of a block are. The last repeats, so that keys can be read by fours. */
INLINE void T(find)(const index_call *c, const part *p, long from, const STEP **where, int *count) {
    const int32_t *ids = c->ids + p->row * c->ids_stride + from;
    const long left = p->end - from, entry = c->head_dim * 2 / PER_STEP;
    const int n = left < BLOCK ? (int)left : BLOCK;
    for (int i = 0; i < BLOCK; i++) where[i] = (const STEP *)c->memory + ids[i < n ? i : n - 1] * entry;
    *count = n;
}

/* Ask for half an entry, its keys or its values. */
INLINE void T(ask)(const index_call *c, const STEP *half) {
    for (long i = 0; i < c->head_dim / PER_STEP; i += 64 / (long)sizeof(STEP)) __builtin_prefetch(half + i, 0, 2);
}

/* scores[r * BLOCK + e] of `rows` queries and four keys */
INLINE void T(score)(const index_call *c, const int rows, const float *query, const STEP *const *where, float *scores) {
    vf sum[MAX_ROWS][4] = {0};
    const long dim = c->head_dim;
    for (long d = 0; d < dim; d += VL * PER_STEP, query += VL * PER_STEP)
        UNROLL for (int e = 0; e < 4; e++) {
            vf x[PER_STEP];
            T(spread)(where[e] + d / PER_STEP, x);
            UNROLL for (int r = 0; r < rows; r++)
                UNROLL for (int p = 0; p < PER_STEP; p++) sum[r][e] += x[p] * vf_load(query + r * dim + p * VL);
        }
    UNROLL for (int r = 0; r < rows; r++) sum_of_each(sum[r], scores + r * BLOCK);
}

/* sum = sum * fade + weights * values, for some columns of `rows` rows: `vectors` vectors of steps, from step d on. Asks for
 * the values of entries `soon`, if not NULL. */
INLINE void T(add_values)(const index_call *c, const int rows, const int vectors, long d, const STEP *const *where, int n,
                          const float *weights, const float *fade, float *sum, const STEP *const *soon, int num_soon) {
    vf s[MAX_ROWS][4];
    const long dim = c->head_dim, values = dim / PER_STEP;
    sum += d * PER_STEP;
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vectors * PER_STEP; v++) s[r][v] = vf_load(sum + r * dim + v * VL) * fade[r];
    for (int i = 0; i < n; i++) {
        if (i < num_soon) T(ask)(c, soon[i] + values);
        UNROLL for (int v = 0; v < vectors; v++) {
            vf x[PER_STEP];
            T(spread)(where[i] + values + d + v * VL, x);
            UNROLL for (int r = 0; r < rows; r++) {
                const float weight = weights[r * BLOCK + i];
                UNROLL for (int p = 0; p < PER_STEP; p++) s[r][v * PER_STEP + p] += x[p] * weight;
                READ_AGAIN; /* the weight: all of them and the sums are more than 16 registers */
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vectors * PER_STEP; v++) vf_store(sum + r * dim + v * VL, s[r][v]);
}

/* Fold a block of n entries into `rows` rows, asking meanwhile for those of the next block. */
INLINE void T(fold_rows)(const index_call *c, const int rows, const float *query, const STEP *const *where, int n,
                         const STEP *const *soon, int num_soon, const running *to) {
    float weights[MAX_ROWS * BLOCK] __attribute__((aligned(64))), fade[MAX_ROWS];
    for (int i = 0; i < BLOCK; i += 4) {
        for (int j = i; j < i + 4 && j < num_soon; j++) T(ask)(c, soon[j]);
        if (i < n) T(score)(c, rows, query, where + i, weights + i);
    }
    UNROLL for (int r = 0; r < rows; r++) fade[r] = weigh(c, weights + r * BLOCK, n, to->total + r * VL, to->peak + r);
    const long steps = c->head_dim / PER_STEP, together = T(VECTORS) * VL;
    long d = 0;
    for (; d + together <= steps; d += together, num_soon = 0)
        T(add_values)(c, rows, T(VECTORS), d, where, n, weights, fade, to->sum, soon, num_soon);
    for (; d < steps; d += VL, num_soon = 0)
        T(add_values)(c, rows, 1, d, where, n, weights, fade, to->sum, soon, num_soon);
}

static void T(fold)(const index_call *c, long rows, const float *query, const STEP *const *where, int n,
                    const STEP *const *soon, int num_soon, const running *to) {
    switch (rows) {
    case 1: T(fold_rows)(c, 1, query, where, n, soon, num_soon, to); break;
    case 2: T(fold_rows)(c, 2, query, where, n, soon, num_soon, to); break;
    case 3: T(fold_rows)(c, 3, query, where, n, soon, num_soon, to); break;
    }
}

/* One part: all queries of a row over some of its entries. `next` is this thread's next part, or NULL. */
static void T(attend_part)(const index_call *c, const part *p, const part *next, float *query) {
    const long group = c->group, dim = c->head_dim, steps = dim / PER_STEP;
    const STEP *from = (const STEP *)c->query + p->row * group * steps, *where[2][BLOCK];
    for (long i = 0; i < group * steps; i += VL) {
        vf x[PER_STEP];
        T(spread)(from + i, x);
        for (int j = 0; j < PER_STEP; j++) vf_store(query + i * PER_STEP + j * VL, x[j]);
    }
    const running all = running_of(c, p);
    memset(all.sum, 0, sizeof(float) * (size_t)(group * (dim + VL)));
    for (long g = 0; g < group; g++) all.peak[g] = -INFINITY;
    int n[2];
    T(find)(c, p, p->begin, where[0], n);
    for (long at = p->begin, turn = 0; at < p->end; at += BLOCK, turn = !turn) {
        const int last = at + BLOCK >= p->end;
        n[!turn] = 0;
        if (!last)
            T(find)(c, p, at + BLOCK, where[!turn], n + !turn);
        else if (next)
            T(find)(c, next, next->begin, where[!turn], n + !turn);
        const long tiles = (group + MAX_ROWS - 1) / MAX_ROWS;
        for (long i = 0, g = 0; i < tiles; i++) {
            const long end = group * (i + 1) / tiles;
            const running some = {all.sum + g * dim, all.total + g * VL, all.peak + g};
            T(fold)(c, end - g, query + g * dim, where[turn], n[turn], where[!turn], i ? 0 : n[!turn], &some);
            g = end;
        }
    }
}

/* Merge the parts of query g of a row: each counts with exp(its peak - the greatest peak). */
static void T(merge)(const index_call *c, long row, long g) {
    const long dim = c->head_dim, at = row * c->group + g;
    const part *first = c->parts + c->first_part[row], *end = c->parts + c->first_part[row + 1];
    float peak = -INFINITY, total = 0.f, sum[MAX_HEAD_DIM] __attribute__((aligned(64))) = {0};
    for (const part *p = first; p < end; p++) peak = fmaxf(peak, running_of(c, p).peak[g]);
    for (const part *p = first; p < end; p++) {
        const running one = running_of(c, p);
        const float weight = one.peak[g] == peak ? 1.f : expf((one.peak[g] - peak) * c->scale);
        total += weight * vf_reduce_add(vf_load(one.total + g * VL));
        for (long d = 0; d < dim; d += VL) vf_store(sum + d, vf_load(sum + d) + vf_load(one.sum + g * dim + d) * weight);
    }
    const float scale = total == 0.f ? 0.f : 1.f / total;
    STEP *out = (STEP *)c->out + at * (dim / PER_STEP);
    for (long d = 0; d < dim; d += PER_STEP * VL, out += VL) {
        vf x[PER_STEP];
        for (int j = 0; j < PER_STEP; j++) x[j] = vf_load(sum + d + j * VL) * scale;
        T(unspread)(out, x);
    }
    c->lse[at] = total == 0.f ? -INFINITY : peak * c->scale + logf(total);
}

static void T(index_team)(void *data, team me) {
    index_call *c = data;
    float *query = c->queries + me.id * c->group * c->head_dim;
    const part *end = c->parts + c->first_part[c->rows];
    /* drawn one ahead, so that a part's first entries are asked for while the part before is computed */
    const part *p = c->parts + atomic_fetch_add(&c->ticket, 1);
    while (p < end) {
        const part *next = c->parts + atomic_fetch_add(&c->ticket, 1);
        T(attend_part)(c, p, next < end ? next : NULL, query);
        p = next;
    }
    team_wait(me);
    long i, until;
    team_share(me, c->rows * c->group, &i, &until);
    for (; i < until; i++) T(merge)(c, i / c->group, i % c->group);
}
