/* Attention over paged KV, included once per element type after micro.h.
 *
 * Keys come in blocks of KEYS tokens, aligned to multiples of KEYS from the request's first token. A block of one KV head is
 * packed into what micro.h multiplies by:
 *   keys   [D / PER_STEP] steps x [KEYS] columns
 *   values [KEYS / PER_STEP] steps x [D] columns
 * and folded into the running softmax (maximum, sum, weighted values) of each row that sees it.
 *
 * A request with many rows (prefill) packs its keys once and lets threads share its rows, `tile_rows` at a time. One with few
 * (decode) is cut along its tokens, CHUNK at a time, each thread packing what it reads; the parts are merged at the end.
 * Neither cut depends on the other requests or on the number of threads, so neither does the result.
 */

INLINE long T(block_steps)(const attend_call *c) { return c->head_dim * (2 * KEYS / PER_STEP); }

/* Where the entries of KEYS tokens from `base` on are. Returns how many there are; the rest is NULL. */
static int T(find_tokens)(const attend_call *c, long request, long base, const STEP **where) {
    const int32_t *pages = c->page_table + request * c->table_stride + base / c->page_size;
    const long words = c->num_kv_heads * c->head_dim * 2 / PER_STEP;
    long left = c->context_len[request] - base, offset = base % c->page_size;
    int i = 0;
    for (left = left < KEYS ? left : KEYS; i < left; offset = 0) {
        const STEP *entry = (const STEP *)c->entries + (*pages++ * c->page_size + offset) * words;
        long run = c->page_size - offset < left - i ? c->page_size - offset : left - i;
        for (; run > 0; run--, entry += words) where[i++] = entry;
    }
    for (i = left > 0 ? (int)left : 0; i < KEYS; i++) where[i] = NULL;
    return left > 0 ? (int)left : 0;
}

/* Entries to be asked for, line by line and in order, while others are computed, so that memory is never idle. */
typedef struct {
    const STEP *const *where;
    long count, stride;   /* tokens, and words of a token's entries */
    long token;           /* the first that is not in the run */
    const char *at, *end; /* the run: neighbours in memory that are left to be asked for */
} T(soon);

/* The address of the next `lines` lines, for the caller to ask for; once all are asked for, of some that are at hand. */
INLINE const char *T(take)(T(soon) *s, long lines, const void *at_hand) {
    if (!s) return at_hand;
    if (s->end - s->at < lines * 64) {
        for (; s->at < s->end; s->at += 64) __builtin_prefetch(s->at, 0, 2);
        if (s->token == s->count) return at_hand;
        const STEP *first = s->where[s->token];
        long n = 1;
        while (s->token + n < s->count && s->where[s->token + n] == first + n * s->stride) n++;
        s->token += n;
        s->at = (const char *)first;
        s->end = (const char *)(first + n * s->stride);
    }
    const char *from = s->at;
    s->at += lines * 64;
    return from;
}

/* Pack 16 tokens of one KV head, `stride` apart, as columns of the keys and steps of the values. */
INLINE void T(pack_tokens)(const attend_call *c, const STEP *from, long stride, T(soon) *soon, STEP *keys,
                           STEP *values) {
    const long half = c->head_dim / PER_STEP;
    long k = 0;
    for (; k + 16 <= half; k += 16) transpose16((const word *)from + k, stride, 16, (word *)(keys + k * KEYS), KEYS);
    if (k < half) transpose16((const word *)from + k, stride, (int)(half - k), (word *)(keys + k * KEYS), KEYS);
    from += half;
    const long lines = half * (long)sizeof(STEP) / 64 * PER_STEP;
    const char *next = T(take)(soon, 16 / PER_STEP * lines, from);
    for (int j = 0; j < 16; j += PER_STEP, from += PER_STEP * stride, values += c->head_dim) {
        if (soon)
            for (long i = 0; i < lines; i++, next += 64) __builtin_prefetch(next, 0, 2);
#if PER_STEP == 2
        interleave((const bf16 *)from, (const bf16 *)(from + stride), values, c->head_dim);
#else
        memcpy(values, from, (size_t)c->head_dim * sizeof(float));
#endif
    }
}

/* Pack one KV head of the tokens that `where` points to; absent ones become zeros. */
static void T(pack_block)(const attend_call *c, long head, const STEP *const *where, T(soon) *soon, STEP *out) {
    STEP copy[16 * MAX_HEAD_DIM * 2 / PER_STEP] __attribute__((aligned(64)));
    const long entry = c->head_dim * 2 / PER_STEP, at = head * entry, stride = entry * c->num_kv_heads;
    for (int i = 0; i < KEYS; i += 16) {
        STEP *keys = out + i, *values = out + entry / 2 * KEYS + i / PER_STEP * c->head_dim;
        int in_line = where[i + 15] != NULL;
        if (c->page_size % 16)
            for (int j = 1; j < 16; j++) in_line &= where[i + j] == where[i] + j * stride;
        if (in_line) {
            T(pack_tokens)(c, where[i] + at, stride, soon, keys, values);
            continue;
        }
        for (int j = 0; j < 16; j++)
            if (where[i + j])
                memcpy(copy + j * entry, where[i + j] + at, (size_t)entry * sizeof(STEP));
            else
                memset(copy + j * entry, 0, (size_t)entry * sizeof(STEP));
        T(pack_tokens)(c, copy, entry, soon, keys, values);
    }
}

/* Rows of one KV head that are computed together, in ascending order of position. */
typedef struct {
    const STEP *query; /* [rows, D / PER_STEP] */
    int rows;
    const long *end; /* [rows]: row r sees the tokens before end[r], its own the last of them */
    float *sum;      /* [rows, D] weighted values */
    float *total;    /* [rows, LANES]: the sum of weights is the sum over lanes */
    float *peak;     /* [rows] greatest score so far, unscaled */
    T(soon) *soon;   /* NULL when rows are many and wait for no memory */
} T(tile);

static void T(start)(const attend_call *c, const T(tile) *t) {
    memset(t->sum, 0, sizeof(float) * (size_t)(t->rows * c->head_dim));
    memset(t->total, 0, sizeof(float) * (size_t)(t->rows * LANES));
    for (int r = 0; r < t->rows; r++) t->peak[r] = -INFINITY;
}

/* Raise a row's peak to that of its scores for n vectors of keys; what it has summed fades accordingly. */
INLINE void T(raise_peak)(const attend_call *c, const T(tile) *t, long row, const vf *scores, const int n) {
    vf peak = scores[0];
    UNROLL for (int i = 1; i < n; i++) peak = vf_max(peak, scores[i]);
    const float old = t->peak[row];
    if (!vf_any_greater(peak, vf_all(old))) return;
    const float now = t->peak[row] = vf_reduce_max(peak);
    const vf fade = vf_exp2(vf_all((old - now) * c->scale2));
    float *sum = t->sum + row * c->head_dim, *total = t->total + row * LANES;
    for (long d = 0, dim = c->head_dim; d < dim; d += VL) vf_store(sum + d, vf_load(sum + d) * fade);
    UNROLL for (int v = 0; v < LANES; v += VL) vf_store(total + v, vf_load(total + v) * fade);
}

/* Write n weights as what micro.h multiplies by, and add them to their row's total. */
INLINE void T(put_weights)(const T(tile) *t, long row, const vf *weight, const int n, STEP *to) {
    float *lanes = t->total + row * LANES;
    vf total[NV];
    UNROLL for (int v = 0; v < NV; v++) total[v] = vf_load(lanes + v * VL);
    UNROLL for (int i = 0; i < n; i++) total[i % NV] += weight[i];
    UNROLL for (int v = 0; v < NV; v++) vf_store(lanes + v * VL, total[v]);
    UNROLL for (int i = 0; i < n; i++)
#if PER_STEP == 2
        vf_store_bf16((bf16 *)to + i * VL, weight[i]);
#else
        vf_store(to + i * VL, weight[i]);
#endif
}

/* Turn the scores of `rows` rows (1 or 2) for KEYS keys, which they all see, into weights. */
INLINE void T(weigh)(const attend_call *c, const T(tile) *t, long row, const float *scores, const int rows, STEP *weights) {
    enum { N = KEYS / VL, PART = N < 8 ? N : 8 };
    vf s[2 * N];
    UNROLL for (int i = 0; i < rows * N; i++) s[i] = vf_load(scores + i * VL);
    UNROLL for (int r = 0; r < rows; r++) {
        T(raise_peak)(c, t, row + r, s + r * N, N);
        /* subtracted before scaling: exact near the peak, and no overflow */
        const vf shift = vf_all(t->peak[row + r] == -INFINITY ? 0.f : t->peak[row + r]);
        UNROLL for (int i = 0; i < N; i++) s[r * N + i] -= shift;
    }
    const vf scale = vf_all(c->scale2), lowest = vf_all(c->lowest);
    if (VL == 16)
        vf_exp2_below(s, rows * N, scale, lowest);
    else
        for (int i = 0; i < rows * N; i += PART) vf_exp2_below(s + i, PART, scale, lowest);
    UNROLL for (int r = 0; r < rows; r++)
        T(put_weights)(t, row + r, s + r * N, N, weights + r * (KEYS / PER_STEP));
}

/* The same for one row and `width` keys, a multiple of 16, of which those outside [low, high) are hidden. */
static void T(weigh_some)(const attend_call *c, const T(tile) *t, long row, const float *scores, int width, long low,
                          long high, STEP *weights) {
    vf s[KEYS / VL];
    vi seen[KEYS / VL], lane;
    const int n = width / VL;
    for (int i = 0; i < VL; i++) lane[i] = i;
    for (int i = 0; i < n; i++, lane += VL) {
        seen[i] = (vi)(lane >= (int32_t)low) & (vi)(lane < (int32_t)high);
        s[i] = vf_select(seen[i], vf_load(scores + i * VL), vf_all(-INFINITY));
    }
    for (int i = n; i < KEYS / VL; i++) s[i] = vf_all(-INFINITY);
    T(raise_peak)(c, t, row, s, KEYS / VL);
    const vf shift = vf_all(t->peak[row] == -INFINITY ? 0.f : t->peak[row]);
    for (int i = 0; i < n; i++) {
        vf p = s[i] - shift;
        vf_exp2_below(&p, 1, vf_all(c->scale2), vf_all(c->lowest));
        s[i] = vf_select(seen[i], p, vf_all(0.f));
    }
    for (int i = 0; i < n; i += NV) T(put_weights)(t, row, s + i, NV, weights + i * VL / PER_STEP);
}

/* Rows of a tile that go through a block together. */
typedef struct {
    int row, rows, width; /* the keys after the first `width`, a multiple of 16, are hidden from all of them */
    float *scores;        /* [rows, KEYS] */
    STEP *weights;        /* [rows, KEYS / PER_STEP] */
} T(strip);

INLINE void T(score)(const attend_call *c, const T(tile) *t, const T(strip) *s, const STEP *packed) {
    const long half = c->head_dim / PER_STEP;
    const T(product) p = {t->query + s->row * half, half, packed, KEYS, 2 * LANES, half, s->scores, KEYS,
                          T(take)(t->soon, half * 2, packed)};
    T(multiply)(s->rows, s->width / LANES, t->soon != NULL, &p, 0);
}

INLINE void T(weigh_strip)(const attend_call *c, const T(tile) *t, const T(strip) *s, long base) {
    const long *end = t->end + s->row;
    int i = 0;
    if (begin_of(c, end[s->rows - 1]) <= base && end[0] >= base + KEYS) {
        for (; i + 2 <= s->rows; i += 2)
            T(weigh)(c, t, s->row + i, s->scores + i * KEYS, 2, s->weights + i * (KEYS / PER_STEP));
        if (i < s->rows) T(weigh)(c, t, s->row + i, s->scores + i * KEYS, 1, s->weights + i * (KEYS / PER_STEP));
        return;
    }
    for (; i < s->rows; i++)
        T(weigh_some)(c, t, s->row + i, s->scores + i * KEYS, s->width, begin_of(c, end[i]) - base, end[i] - base,
                      s->weights + i * (KEYS / PER_STEP));
}

INLINE void T(add_values)(const attend_call *c, const T(tile) *t, const T(strip) *s, const STEP *values) {
    for (long d = 0; d < c->head_dim; d += FOLD_BLOCKS * LANES) {
        const long columns = c->head_dim - d < FOLD_BLOCKS * LANES ? c->head_dim - d : FOLD_BLOCKS * LANES;
        const T(product) p = {s->weights, KEYS / PER_STEP, values + d, c->head_dim, 2 * LANES, s->width / PER_STEP,
                              t->sum + s->row * c->head_dim + d, c->head_dim,
                              T(take)(t->soon, s->width / PER_STEP * 2, values)};
        T(multiply)(s->rows, (int)(columns / LANES), t->soon != NULL, &p, 1);
    }
}

/* Fold the packed block of the keys base..base+KEYS into every row of the tile that sees any of them.
 *
 * Strip by strip in three stages, each a strip behind the stage before, so that none waits for results just begun:
 *   scores 0 | scores 1, weigh 0 | scores 2, values 0, weigh 1 | ...
 */
static void T(fold)(const attend_call *c, const T(tile) *t, const STEP *packed, long base) {
    float scores[2][FOLD_ROWS * KEYS] __attribute__((aligned(64)));
    STEP weights[2][FOLD_ROWS * KEYS / PER_STEP] __attribute__((aligned(64)));
    T(strip) strips[(TILE_ROWS + FOLD_ROWS - 1) / FOLD_ROWS];
    const STEP *values = packed + c->head_dim / PER_STEP * KEYS;
    int n = 0;
    for (int r = 0; r < t->rows; r += FOLD_ROWS) {
        const int rows = t->rows - r < FOLD_ROWS ? t->rows - r : FOLD_ROWS;
        const long seen = t->end[r + rows - 1] - base;
        if (seen <= 0 || begin_of(c, t->end[r]) >= base + KEYS) continue;
        const int width = seen >= KEYS ? KEYS : (int)((seen + LANES - 1) / LANES * LANES);
        strips[n] = (T(strip)){r, rows, width, scores[n % 2], weights[n % 2]};
        n++;
    }
    for (int i = 0; n && i < n + 2; i++) {
        if (i < n) T(score)(c, t, strips + i, packed);
        if (i >= 2) T(add_values)(c, t, strips + i - 2, values);
        if (i >= 1 && i <= n) T(weigh_strip)(c, t, strips + i - 1, base);
    }
}

/* Write one finished row: weighted values over the sum of weights. */
static void T(finish)(const attend_call *c, long row, const float *sum, float total, float peak) {
    const float scale = total == 0.f ? 0.f : 1.f / total;
    for (long d = 0; d < c->head_dim; d += VL) {
#if PER_STEP == 2
        vf_store_bf16((bf16 *)c->out + row * c->head_dim + d, vf_load(sum + d) * scale);
#else
        vf_store((float *)c->out + row * c->head_dim + d, vf_load(sum + d) * scale);
#endif
    }
    c->lse[row] = total == 0.f ? -INFINITY : peak * c->scale + logf(total);
}

static float T(total_of)(const float *lanes) {
    vf s = vf_load(lanes);
    for (int i = VL; i < LANES; i += VL) s += vf_load(lanes + i);
    return vf_reduce_add(s);
}

/* Rows at..at+rows (position-major, then head of the group) of one KV head of a request whose blocks are packed. */
static void T(attend_tile)(const attend_call *c, long request, long head, long at, int rows, const STEP *packed) {
    STEP query[TILE_ROWS * MAX_HEAD_DIM / PER_STEP] __attribute__((aligned(64)));
    float sum[TILE_ROWS * MAX_HEAD_DIM] __attribute__((aligned(64)));
    float total[TILE_ROWS * LANES] __attribute__((aligned(64))), peak[TILE_ROWS];
    const long group = c->num_heads / c->num_kv_heads, half = c->head_dim / PER_STEP;
    const long start = c->query_start[request], length = c->context_len[request];
    const long past = length - (c->query_start[request + 1] - start);
    long to[TILE_ROWS], ends[TILE_ROWS];
    for (int r = 0; r < rows; r++) {
        const long i = (at + r) / group;
        to[r] = (start + i) * c->num_heads + head * group + (at + r) % group;
        ends[r] = past + i + 1;
        memcpy(query + r * half, (const STEP *)c->query + to[r] * half, (size_t)half * sizeof(STEP));
    }
    T(tile) t = {query, rows, ends, sum, total, peak, NULL};
    T(start)(c, &t);
    const long end = (ends[rows - 1] + KEYS - 1) / KEYS;
    for (long b = begin_of(c, ends[0]) / KEYS; b < end; b++) T(fold)(c, &t, packed + b * T(block_steps)(c), b * KEYS);
    for (int r = 0; r < rows; r++)
        T(finish)(c, to[r], sum + r * c->head_dim, T(total_of)(total + r * LANES), peak[r]);
}

/* A request with many rows: all its keys packed, KV heads by groups that fit the scratch, then rows tile by tile. */
static void T(attend_wide)(const attend_call *c, team me, long request, atomic_long *tickets) {
    const long begin = c->query_start[request], rows = (c->query_start[request + 1] - begin) * (c->num_heads / c->num_kv_heads);
    const long blocks = (c->context_len[request] + KEYS - 1) / KEYS, size = T(block_steps)(c);
    const long tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    STEP *packed = c->scratch;
    long base = 0;
    for (long h0 = 0; h0 < c->num_kv_heads; h0 += c->heads_at_once) {
        const long heads = c->num_kv_heads - h0 < c->heads_at_once ? c->num_kv_heads - h0 : c->heads_at_once;
        long first, end, i;
        team_share(me, blocks, &first, &end);
        for (long b = first; b < end; b++) {
            const STEP *where[KEYS];
            T(find_tokens)(c, request, b * KEYS, where);
            for (long h = 0; h < heads; h++) T(pack_block)(c, h0 + h, where, NULL, packed + (h * blocks + b) * size);
        }
        team_wait(me);
        /* the last rows see the most keys: they go first */
        while ((i = atomic_fetch_add(tickets, 1) - base) < tiles * heads) {
            const long at = (tiles - 1 - i / heads) * TILE_ROWS, h = i % heads;
            T(attend_tile)(c, request, h0 + h, at, rows - at < TILE_ROWS ? (int)(rows - at) : TILE_ROWS,
                           packed + h * blocks * size);
        }
        base += tiles * heads + me.size; /* each member draws one ticket too many */
        team_wait(me);
    }
}

/* One chunk of a request with few rows: all its heads, to a part of the result. */
static void T(attend_chunk)(const attend_call *c, long request, long from, long until, float *part, STEP *packed) {
    const long group = c->num_heads / c->num_kv_heads, half = c->head_dim / PER_STEP;
    const long start = c->query_start[request], rows = c->query_start[request + 1] - start;
    float *sum = part, *total = sum + rows * c->num_heads * c->head_dim, *peak = total + rows * c->num_heads * LANES;
    const STEP *where[2][KEYS];
    T(find_tokens)(c, request, from, where[0]);
    for (long base = from, turn = 0; base < until; base += KEYS, turn = !turn) {
        T(soon) soon = {.where = where[!turn], .stride = c->num_kv_heads * c->head_dim * 2 / PER_STEP,
                        .count = T(find_tokens)(c, request, base + KEYS, where[!turn])};
        for (long h = 0; h < c->num_kv_heads; h++) {
            T(pack_block)(c, h, where[turn], &soon, packed);
            for (long i = 0; i < rows; i++) {
                const long row = i * c->num_heads + h * group;
                for (long g = 0; g < group; g += TILE_ROWS) {
                    long ends[TILE_ROWS];
                    const int n = group - g < TILE_ROWS ? (int)(group - g) : TILE_ROWS;
                    for (int r = 0; r < n; r++) ends[r] = c->context_len[request] - rows + i + 1;
                    T(tile) t = {(const STEP *)c->query + (start * c->num_heads + row + g) * half, n, ends,
                                 sum + (row + g) * c->head_dim, total + (row + g) * LANES, peak + row + g, &soon};
                    if (base == from) T(start)(c, &t);
                    T(fold)(c, &t, packed, base);
                }
            }
        }
    }
}

/* Merge the parts of one row: each counts with exp(its peak - the greatest peak). */
static void T(merge)(const attend_call *c, const narrow *n, long row) {
    const long size = part_floats(c, n->rows), totals = n->rows * c->num_heads * c->head_dim;
    const long peaks = totals + n->rows * c->num_heads * LANES;
    float peak = -INFINITY, total = 0.f, sum[MAX_HEAD_DIM] __attribute__((aligned(64))) = {0};
    for (long p = 0; p < n->parts; p++) {
        const float here = n->part[p * size + peaks + row];
        if (here > peak) peak = here;
    }
    for (long p = 0; p < n->parts; p++) {
        const float *part = n->part + p * size, here = part[peaks + row];
        /* a part that saw nothing holds zeros */
        const float weight = here == -INFINITY ? 1.f : expf((here - peak) * c->scale);
        total += weight * T(total_of)(part + totals + row * LANES);
        for (long d = 0; d < c->head_dim; d++) sum[d] += weight * part[row * c->head_dim + d];
    }
    T(finish)(c, c->query_start[n->request] * c->num_heads + row, sum, total, peak);
}

static void T(attend_team)(void *data, team me) {
    attend_call *c = data;
    atomic_long *ticket = c->tickets;
    for (long r = 0; r < c->num_requests; r++)
        if (is_wide(c, r)) T(attend_wide)(c, me, r, ticket++);
    if (!c->num_parts) return;
    STEP *packed = (STEP *)((char *)c->scratch + (size_t)me.id * c->scratch_stride);
    long first, end, n = 0, row = 0;
    team_share(me, c->num_parts, &first, &end);
    for (long i = first; i < end; i++) {
        while (i >= c->narrow[n].first + c->narrow[n].parts) n++;
        const narrow *w = c->narrow + n;
        const long from = w->begin + (i - w->first) * CHUNK, until = from + CHUNK < w->end ? from + CHUNK : w->end;
        T(attend_chunk)(c, w->request, from, until, w->part + (i - w->first) * part_floats(c, w->rows), packed);
    }
    team_wait(me);
    team_share(me, c->num_narrow_rows, &first, &end);
    for (n = 0; n < c->num_narrow; n++) {
        const long rows = c->narrow[n].rows * c->num_heads;
        for (long k = first > row ? first - row : 0; k < rows && row + k < end; k++) T(merge)(c, c->narrow + n, k);
        row += rows;
    }
}
