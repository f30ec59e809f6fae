/* The inner product of everything: C[rows, 16*blocks] (+)= A[rows, steps] * B[steps, 16*blocks].
 *
 * Included once per element type. A step is what one lane holds of the summed dimension:
 *   bfloat16: a word, two neighbours; float32: one float.
 * Each element of C is summed over the steps in an order that the number of rows and blocks does not change, so that a
 * row's result does not depend on the rows computed beside it.
 */

#if NARROWS_BF16
#define T(name) name##_bf16
#define STEP word
#define PER_STEP 2

INLINE vf T(madd)(vf c, vu b, word a) {
#if defined(NARROWS_AVX512) && defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)c, (__m512bh)b, (__m512bh)_mm512_set1_epi32((int)a));
#else
    uint32_t low = a << 16, high = a & 0xffff0000u;
    float x, y;
    memcpy(&x, &low, 4);
    memcpy(&y, &high, 4);
    return c + (vf)(b << 16) * x + (vf)(b & 0xffff0000u) * y;
#endif
}
#else
#define T(name) name##_f32
#define STEP float
#define PER_STEP 1

INLINE vf T(madd)(vf c, vu b, float a) { return c + (vf)b * a; }
#endif

typedef struct {
    const STEP *a; /* element (row, step) at a[row * lda + step] */
    long lda;
    const STEP *b; /* element (step, column) at b[step * ldb + column], the third and fourth block at b + jump */
    long ldb, jump;
    long steps;
    float *c; /* element (row, column) at c[row * ldc + column] */
    long ldc;
    const char *soon; /* lines that the caller needs next */
} T(product);

#define TOGETHER 4 /* steps between branches */
#define B_BLOCK(j) ((j) % 2 * LANES + (j) / 2 * jump)

/* add: to C, instead of overwriting it.
 * chains: 1 or 2; two sums over every second step hide the latency of few rows, and round differently from one.
 * ahead: above 0: ask for each line of B so many bytes before its use; below 0: ask for so many lines of `soon` at each
 *   step; 0: ask for nothing. */
INLINE void T(micro)(const int rows, const int blocks, const int chains, const T(product) *p, const int add,
                     const int ahead) {
    vf c[2][MAX_ROWS][MAX_BLOCKS][NV];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < blocks; j++)
            UNROLL for (int v = 0; v < NV; v++) {
                c[0][r][j][v] = add ? vf_load(p->c + r * p->ldc + j * LANES + v * VL) : (vf){0};
                if (chains == 2) c[1][r][j][v] = (vf){0};
            }
    const STEP *a = p->a, *b = p->b;
    const long lda = p->lda, ldb = p->ldb, jump = p->jump;
    const char *soon = p->soon;
    long k = p->steps;
    for (; k >= TOGETHER; k -= TOGETHER)
        UNROLL for (int i = 0; i < TOGETHER; i++, a++, b += ldb) {
            vu w[MAX_BLOCKS][NV];
            UNROLL for (int line = 0; line < -ahead; line++, soon += 64) __builtin_prefetch(soon, 0, 2);
            UNROLL for (int j = 0; j < blocks; j++) {
                if (ahead > 0) __builtin_prefetch((const char *)(b + B_BLOCK(j)) + ahead);
                UNROLL for (int v = 0; v < NV; v++) w[j][v] = vu_load(b + B_BLOCK(j) + v * VL);
            }
            UNROLL for (int r = 0; r < rows; r++) {
                const STEP x = a[r * lda];
                UNROLL for (int j = 0; j < blocks; j++)
                    UNROLL for (int v = 0; v < NV; v++) c[i % chains][r][j][v] = T(madd)(c[i % chains][r][j][v], w[j][v], x);
            }
        }
    for (; k > 0; k--, a++, b += ldb)
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int j = 0; j < blocks; j++)
                UNROLL for (int v = 0; v < NV; v++)
                    c[0][r][j][v] = T(madd)(c[0][r][j][v], vu_load(b + B_BLOCK(j) + v * VL), a[r * lda]);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < blocks; j++)
            UNROLL for (int v = 0; v < NV; v++) {
                if (chains == 2) c[0][r][j][v] += c[1][r][j][v];
                vf_store(p->c + r * p->ldc + j * LANES + v * VL, c[0][r][j][v]);
            }
}
