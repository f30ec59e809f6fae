/* Vectors of float and of 32-bit words, as wide as the target has them.
 *
 * A "lane block" is 16 lanes, whatever the machine's vector width: NV vectors of VL lanes. Layouts in memory are in lane
 * blocks, so that they do not depend on the instruction set.
 */
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && !defined(NARROWS_GENERIC)
#include <immintrin.h>
#define NARROWS_AVX512 1
#define VL 16
#elif defined(__AVX2__)
#define VL 8
#else
#define VL 4
#endif

#define LANES 16
#define NV (LANES / VL)
#define INLINE static inline __attribute__((always_inline, unused))
#define UNROLL _Pragma("GCC unroll 16")

typedef float vf __attribute__((vector_size(4 * VL)));
typedef uint32_t vu __attribute__((vector_size(4 * VL)));
typedef int32_t vi __attribute__((vector_size(4 * VL)));
typedef uint16_t vh __attribute__((vector_size(2 * VL)));
typedef uint32_t __attribute__((may_alias)) word; /* two bfloat16 of one row, the first in the low half */
typedef uint16_t bf16;

INLINE vf vf_load(const void *p) { vf v; memcpy(&v, p, sizeof v); return v; }
INLINE vu vu_load(const void *p) { vu v; memcpy(&v, p, sizeof v); return v; }
INLINE void vf_store(void *p, vf v) { memcpy(p, &v, sizeof v); }
INLINE vf vf_all(float x) { return x - (vf){0}; } /* keeps -0 and NaN */

INLINE float bf16_to_float(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

/* Round to nearest even; a NaN stays a NaN. */
INLINE bf16 float_to_bf16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (bf16)((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : rounded);
}

INLINE vu widen(vh v) {
#ifdef NARROWS_AVX512
    return (vu)_mm512_cvtepu16_epi32((__m256i)v);
#else
    return __builtin_convertvector(v, vu);
#endif
}

INLINE vf vf_load_bf16(const bf16 *p) {
    vh v;
    memcpy(&v, p, sizeof v);
    return (vf)(widen(v) << 16);
}

INLINE void vf_store_bf16(bf16 *p, vf v) {
#if defined(NARROWS_AVX512) && defined(__AVX512BF16__)
    __m256bh h = _mm512_cvtneps_pbh((__m512)v);
    memcpy(p, &h, sizeof h);
#else
    vu bits = (vu)v;
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vu nan = (vu)((vi)(bits & 0x7fffffff) > 0x7f800000);
    vh h = __builtin_convertvector((nan & ((bits >> 16) | 0x40)) | (~nan & rounded), vh);
    memcpy(p, &h, sizeof h);
#endif
}

INLINE vf vf_select(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }

/* Lanewise maximum; a NaN in b wins. */
INLINE vf vf_max(vf a, vf b) {
#ifdef NARROWS_AVX512
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return vf_select((vi)(a > b), a, b);
#endif
}

INLINE float vf_reduce_max(vf v) {
#ifdef NARROWS_AVX512
    return _mm512_reduce_max_ps((__m512)v);
#else
    float m = v[0];
    for (int i = 1; i < VL; i++) m = v[i] > m ? v[i] : m;
    return m;
#endif
}

INLINE float vf_reduce_add(vf v) {
#ifdef NARROWS_AVX512
    return _mm512_reduce_add_ps((__m512)v);
#else
    float s = v[0];
    for (int i = 1; i < VL; i++) s += v[i];
    return s;
#endif
}

/* Whether a > b in any lane. */
INLINE int vf_any_greater(vf a, vf b) {
#ifdef NARROWS_AVX512
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ) != 0;
#else
    vi m = a > b;
    int32_t any = 0;
    for (int i = 0; i < VL; i++) any |= m[i];
    return any != 0;
#endif
}

/* 2**f for f in [-0.5, 0.5], to a relative error below 2e-7; exactly 1 for 0, so that a peak weighs 1. */
INLINE vf vf_exp2_near_0(vf f) {
    vf p = f * 1.3264727e-3f + 9.671513e-3f;
    p = p * f + 5.5507336e-2f;
    p = p * f + 2.4022242e-1f;
    p = p * f + 6.93147e-1f;
    return p * f + 1.f;
}

#define ROUNDER 12582912.f /* 1.5 * 2**23: adding it rounds to a whole number, found in the low bits */

/* Keeps the compiler from moving what makes x behind what follows. */
#ifdef NARROWS_AVX512
#define IN_ORDER(x) __asm__ volatile("" : "+v"(x))
#else
#define IN_ORDER(x)
#endif

#define STAGE(x, what) \
    UNROLL for (int i = 0; i < n; i++) { \
        x = what; \
        IN_ORDER(x); \
    }

/* x[i] = 2**(x[i] * scale) for n x <= 0, but never below 2**-126 or so. Each step for all x after the other: a processor's
 * scheduler holds too few instructions to find independent ones behind chains of dependent ones. */
INLINE void vf_exp2_below(vf *x, const int n, vf scale, vf lowest) {
    vf whole[8], p[8];
    STAGE(x[i], vf_max(lowest, x[i]))
    STAGE(whole[i], x[i] * scale + ROUNDER)
    STAGE(p[i], whole[i] - ROUNDER)
    STAGE(x[i], x[i] * scale - p[i])
    STAGE(p[i], x[i] * 1.3264727e-3f + 9.671513e-3f)
    STAGE(p[i], p[i] * x[i] + 5.5507336e-2f)
    STAGE(p[i], p[i] * x[i] + 2.4022242e-1f)
    STAGE(p[i], p[i] * x[i] + 6.93147e-1f)
    STAGE(p[i], p[i] * x[i] + 1.f)
    STAGE(x[i], (vf)((vi)p[i] + ((vi)whole[i] << 23)))
}

/* 2**x; 0 for x below -126, 2**127 at most. */
INLINE vf vf_exp2(vf x) {
    const vi under = x < -126.f;
    x = vf_select((vi)(x > 127.f), vf_all(127.f), vf_max(vf_all(-125.5f), x));
    const vf n = x + ROUNDER;
    return vf_select(under, vf_all(0.f), (vf)((vi)vf_exp2_near_0(x - (n - ROUNDER)) + ((vi)n << 23)));
}

#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f

/* out[i] = low[i] in the low half, high[i] in the high half of a word, for n elements, a multiple of 16 */
INLINE void interleave(const bf16 *low, const bf16 *high, word *out, long n) {
    long i = 0;
#ifdef NARROWS_AVX512
    static const uint16_t order[64] __attribute__((aligned(64))) = {
        0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47,
        16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
    const __m512i first = _mm512_load_si512(order), second = _mm512_load_si512(order + 32);
    for (; i + 32 <= n; i += 32) {
        const __m512i a = _mm512_loadu_si512(low + i), b = _mm512_loadu_si512(high + i);
        _mm512_storeu_si512(out + i, _mm512_permutex2var_epi16(a, first, b));
        _mm512_storeu_si512(out + i + 16, _mm512_permutex2var_epi16(a, second, b));
    }
#endif
    for (; i < n; i += VL) {
        vh a, b;
        memcpy(&a, low + i, sizeof a);
        memcpy(&b, high + i, sizeof b);
        vu pair = widen(a) | (widen(b) << 16);
        memcpy(out + i, &pair, sizeof pair);
    }
}

/* Transpose 16 rows of `cols` (1..16) words, `stride` apart, into out[c * to + row]. */
INLINE void transpose16(const word *in, long stride, int cols, word *out, long to) {
#ifdef NARROWS_AVX512
    __m512i r[16], t[16];
    const __mmask16 mask = (__mmask16)((1u << cols) - 1);
    if (cols == 16)
        UNROLL for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(in + i * stride);
    else
        UNROLL for (int i = 0; i < 16; i++) r[i] = _mm512_maskz_loadu_epi32(mask, in + i * stride);
    UNROLL for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    /* r[4g + c] holds columns c, c+4, c+8, c+12 of the rows 4g..4g+3, one per 128-bit lane */
    UNROLL for (int c = 0; c < 4; c++) {
        t[c] = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88);
        t[4 + c] = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);
        t[8 + c] = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
        t[12 + c] = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
    }
    UNROLL for (int c = 0; c < 4; c++) {
        r[c] = _mm512_shuffle_i32x4(t[c], t[8 + c], 0x88);
        r[8 + c] = _mm512_shuffle_i32x4(t[c], t[8 + c], 0xdd);
        r[4 + c] = _mm512_shuffle_i32x4(t[4 + c], t[12 + c], 0x88);
        r[12 + c] = _mm512_shuffle_i32x4(t[4 + c], t[12 + c], 0xdd);
    }
    UNROLL for (int c = 0; c < 16; c++)
        if (c < cols) _mm512_store_si512(out + c * to, r[c]);
#else
    for (int c = 0; c < cols; c++)
        for (int i = 0; i < 16; i++) out[c * to + i] = in[i * stride + c];
#endif
}
