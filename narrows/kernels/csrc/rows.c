/* RMS norm, and the rotation of queries and keys with the storing of KV entries. */

#include "simd.h"
#include "threads.h"

#define MAX_HEAD_DIM 256
#define THREADED_ELEMENTS 65536 /* below, waking the other threads costs more than they save */

typedef struct {
    void *y;
    const void *x, *weight;
    long rows, width;
    float eps;
} norm_call;

typedef struct {
    void *query, *entries;
    const void *qkv;
    const int32_t *positions;
    const int32_t *slots;
    const float *cos, *sin;
    const void *q_norm, *k_norm;
    long rows, num_heads, num_kv_heads, head_dim;
    float eps;
} rope_call;

INLINE vf vf_get_bf16(const bf16 *p) { return vf_load_bf16(p); }
INLINE void vf_put_bf16(bf16 *p, vf v) { vf_store_bf16(p, v); }
INLINE vf vf_round_bf16(vf v) {
    bf16 rounded[VL];
    vf_store_bf16(rounded, v);
    return vf_load_bf16(rounded);
}
INLINE vf vf_get_f32(const float *p) { return vf_load(p); }
INLINE void vf_put_f32(float *p, vf v) { vf_store(p, v); }
INLINE vf vf_round_f32(vf v) { return v; }

#define T(name) name##_bf16
#define ELEMENT bf16
#define TO_FLOAT bf16_to_float
#define FROM_FLOAT float_to_bf16
#include "rows.h"
#undef T
#undef ELEMENT
#undef TO_FLOAT
#undef FROM_FLOAT

#define T(name) name##_f32
#define ELEMENT float
#define TO_FLOAT
#define FROM_FLOAT
#include "rows.h"

void narrows_rms_norm(int is_bf16, void *y, const void *x, const void *weight, long rows, long width, float eps,
                      crew *crew) {
    norm_call c = {y, x, weight, rows, width, eps};
    crew_run(crew, is_bf16 ? norm_team_bf16 : norm_team_f32, &c, rows * width >= THREADED_ELEMENTS);
}

void narrows_rope_store(int is_bf16, void *query, void *entries, const void *qkv, const int32_t *positions,
                        const int32_t *slots, const float *cosine, const float *sine, const void *q_norm, const void *k_norm,
                        long rows, long num_heads, long num_kv_heads, long head_dim, float eps, crew *crew) {
    rope_call c = {query, entries, qkv, positions, slots, cosine, sine, q_norm, k_norm,
                   rows, num_heads, num_kv_heads, head_dim, eps};
    const long elements = rows * (num_heads + 2 * num_kv_heads) * head_dim;
    crew_run(crew, is_bf16 ? rope_team_bf16 : rope_team_f32, &c, elements >= THREADED_ELEMENTS);
}
