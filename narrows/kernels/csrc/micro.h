/* The inner product of everything: C[rows, 16*blocks] (+)= A[rows, steps] * B[steps, 16*blocks].
 *
 * Included once per element type. A step is what one lane holds of the summed dimension:
 *   bfloat16: a word, two neighbours; float32: one float.
 * Each element of C is summed over the steps in order, whatever the number of rows or blocks, so that a row's result
 * does not depend on the rows computed beside it.
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
    const STEP *b; /* element (step, column) at b[step * ldb + column] */
    long ldb;
    long steps;
    float *c; /* element (row, column) at c[row * ldc + column] */
    long ldc;
} T(product);

/* ahead: how many bytes before its use a line of B is asked for; 0: leave it to the hardware. */
INLINE void T(micro)(const int rows, const int blocks, const T(product) *p, const int add, const int ahead) {
    vf c[MAX_ROWS][MAX_BLOCKS][NV];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < blocks; j++)
            UNROLL for (int v = 0; v < NV; v++)
                c[r][j][v] = add ? vf_load(p->c + r * p->ldc + j * LANES + v * VL) : (vf){0};
    const STEP *a = p->a, *b = p->b;
    const long lda = p->lda;
    for (long k = 0; k < p->steps; k++, a++, b += p->ldb) {
        vu w[MAX_BLOCKS][NV];
        UNROLL for (int j = 0; j < blocks; j++) {
            if (ahead) __builtin_prefetch((const char *)(b + j * LANES) + ahead);
            UNROLL for (int v = 0; v < NV; v++) w[j][v] = vu_load(b + j * LANES + v * VL);
        }
        UNROLL for (int r = 0; r < rows; r++) {
            STEP x = a[r * lda];
            UNROLL for (int j = 0; j < blocks; j++)
                UNROLL for (int v = 0; v < NV; v++) c[r][j][v] = T(madd)(c[r][j][v], w[j][v], x);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < blocks; j++)
            UNROLL for (int v = 0; v < NV; v++) vf_store(p->c + r * p->ldc + j * LANES + v * VL, c[r][j][v]);
}
