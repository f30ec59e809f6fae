/* What works on one row after the other, included once per element type. */



/* y = x / rms(x), rounded to the element type, times weight */
INLINE void T(norm_row)(ELEMENT *y, const ELEMENT *x, const ELEMENT *weight, long n, float eps) {
    vf squares[4] = {0};
    long i = 0;
    for (; i + 4 * VL <= n; i += 4 * VL)
        UNROLL for (int j = 0; j < 4; j++) {
            vf v = T(vf_get)(x + i + j * VL);
            squares[j] += v * v;
        }
    float sum = vf_reduce_add((squares[0] + squares[1]) + (squares[2] + squares[3]));
    for (; i < n; i++) sum += TO_FLOAT(x[i]) * TO_FLOAT(x[i]);
    const float scale = 1.f / sqrtf(sum / (float)n + eps);
    for (i = 0; i + VL <= n; i += VL) T(vf_put)(y + i, T(vf_round)(T(vf_get)(x + i) * scale) * T(vf_get)(weight + i));
    for (; i < n; i++) y[i] = FROM_FLOAT(TO_FLOAT(FROM_FLOAT(TO_FLOAT(x[i]) * scale)) * TO_FLOAT(weight[i]));
}

static void T(norm_team)(void *data, team me) {
    const norm_call *c = data;
    long first, end;
    team_share(me, c->rows, &first, &end);
    for (long r = first; r < end; r++)
        T(norm_row)((ELEMENT *)c->y + r * c->width, (const ELEMENT *)c->x + r * c->width, c->weight, c->width, c->eps);
}

/* Rotate one head: the pairs (i, i + n/2). `norm` may be NULL. */
INLINE void T(rotate)(const rope_call *c, ELEMENT *to, const ELEMENT *from, const void *norm, const float *cosine,
                      const float *sine) {
    const long n = c->head_dim, half = n / 2;
    ELEMENT normed[MAX_HEAD_DIM];
    if (norm) {
        T(norm_row)(normed, from, norm, n, c->eps);
        from = normed;
    }
    long i = 0;
    for (; i + VL <= half; i += VL) {
        vf low = T(vf_get)(from + i), high = T(vf_get)(from + half + i), a = vf_load(cosine + i), b = vf_load(sine + i);
        T(vf_put)(to + i, low * a - high * b);
        T(vf_put)(to + half + i, high * a + low * b);
    }
    for (; i < half; i++) {
        const float low = TO_FLOAT(from[i]), high = TO_FLOAT(from[half + i]);
        to[i] = FROM_FLOAT(low * cosine[i] - high * sine[i]);
        to[half + i] = FROM_FLOAT(high * cosine[i] + low * sine[i]);
    }
}

static void T(rope_team)(void *data, team me) {
    const rope_call *c = data;
    const long dim = c->head_dim, width = (c->num_heads + 2 * c->num_kv_heads) * dim;
    long first, end;
    team_share(me, c->rows, &first, &end);
    for (long t = first; t < end; t++) {
        const ELEMENT *row = (const ELEMENT *)c->qkv + t * width, *key = row + c->num_heads * dim;
        const ELEMENT *value = key + c->num_kv_heads * dim;
        const float *cosine = c->cos + c->positions[t] * (dim / 2), *sine = c->sin + c->positions[t] * (dim / 2);
        for (long h = 0; h < c->num_heads; h++)
            T(rotate)(c, (ELEMENT *)c->query + (t * c->num_heads + h) * dim, row + h * dim, c->q_norm, cosine, sine);
        ELEMENT *entry = (ELEMENT *)c->entries + c->slots[t] * c->num_kv_heads * 2 * dim;
        for (long h = 0; h < c->num_kv_heads; h++, entry += 2 * dim) {
            T(rotate)(c, entry, key + h * dim, c->k_norm, cosine, sine);
            memcpy(entry + dim, value + h * dim, (size_t)dim * sizeof(ELEMENT));
        }
    }
}
