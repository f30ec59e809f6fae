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

INLINE vu widen(vh v) { return __builtin_convertvector(v, vu); }

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

/* 2**x to a relative error below 2e-7; 0 for x <= -150 (-126 without AVX-512), NaN for NaN. */
INLINE vf vf_exp2(vf x) {
#ifdef NARROWS_AVX512
    x = (vf)_mm512_max_ps(_mm512_set1_ps(-200.f), (__m512)x);
    vf n = (vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    vf tiny = vf_all(-126.f), huge = vf_all(127.f);
    vi under = x < tiny;
    x = vf_select(under, tiny, x);
    x = vf_select((vi)(x > huge), huge, x);
    vf n = (x + 12582912.f) - 12582912.f; /* 1.5 * 2**23: rounds to a whole number */
#endif
    vf f = x - n; /* in [-0.5, 0.5] */
    vf p = f * 1.3264727e-3f + 9.671513e-3f;
    p = p * f + 5.5507336e-2f;
    p = p * f + 2.4022242e-1f;
    p = p * f + 6.93147e-1f;
    p = p * f + 1.f; /* exactly 1 at 0: a row whose maximum did not move is not scaled */
#ifdef NARROWS_AVX512
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    vi power = (__builtin_convertvector(n, vi) + 127) << 23;
    return vf_select(under, vf_all(0.f), p * (vf)power);
#endif
}

#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f

/* Transpose 16 rows of `cols` (1..16) words, rows[i] + at, into out[c * stride + i]. */
INLINE void transpose16(const word *const *rows, long at, int cols, word *out, long stride) {
#ifdef NARROWS_AVX512
    __m512i r[16], t[16];
    __mmask16 in = (__mmask16)((1u << cols) - 1);
    UNROLL for (int i = 0; i < 16; i++) r[i] = _mm512_maskz_loadu_epi32(in, rows[i] + at);
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
        if (c < cols) _mm512_store_si512(out + c * stride, r[c]);
#else
    for (int c = 0; c < cols; c++)
        for (int i = 0; i < 16; i++) out[c * stride + i] = rows[i][at + c];
#endif
}
