/* bfloat16 entries in fewer bytes, losslessly. The exponents of one entry differ by little: each value keeps its sign and
 * fraction, and of its exponent how far it is below the entry's largest.
 *
 *     largest exponent, 1 byte | distances, 4 bits each | signs and fractions, 1 byte each | exponents of values too far
 *                                                                                            below, 1 byte each
 *
 * Half a byte of distance stands for value i, the other half for value i + E / 2. FAR marks a value too far below. An
 * entry that would not get shorter, or whose largest exponent is 0, is kept as it is behind a byte of 0.
 */

#include <stdint.h>
#include <string.h>

#define HERE 1
#define FAR 15
#define MOST 512 /* values of an entry */

static long pack_entry(uint8_t *out, const uint16_t *x, long n) {
    uint8_t distance[MOST], *half = out + 1, *rest = out + 1 + n / 2, *far = rest + n;
    int largest = 0, num_far = 0;
    for (long i = 0; i < n; i++) {
        const int e = x[i] >> 7 & 255;
        largest = e > largest ? e : largest;
    }
    for (long i = 0; i < n; i++) {
        const int d = largest - (x[i] >> 7 & 255);
        distance[i] = (uint8_t)(d < FAR ? d : FAR);
        num_far += d >= FAR;
    }
    if (!largest || num_far >= n / 2) {
        out[0] = 0;
        memcpy(out + 1, x, (size_t)(2 * n));
        return 1 + 2 * n;
    }
    out[0] = (uint8_t)largest;
    for (long i = 0; i < n / 2; i++) half[i] = (uint8_t)(distance[i] | distance[i + n / 2] << 4);
    for (long i = 0; i < n; i++) rest[i] = (uint8_t)((x[i] >> 8 & 128) | (x[i] & 127));
    if (num_far)
        for (long i = 0; i < n; i++)
            if (distance[i] == FAR) *far++ = (uint8_t)(x[i] >> 7);
    return (far - out);
}

/* memory[ids[i]], i < count, one behind the other; entries of n bfloat16 values. Returns their bytes, at most count * (2 * n
 * + 1). */
long narrows_pack(uint8_t *out, const uint16_t *memory, const int32_t *ids, long count, long n) {
    uint8_t *at = out;
    for (long i = 0; i < count; i++) at += pack_entry(at, memory + ids[i] * n, n);
    return at - out;
}

/* Returns what follows, or NULL when that is beyond `end`. */
static const uint8_t *unpack_entry(uint16_t *x, const uint8_t *in, const uint8_t *end, long n) {
    if (end - in < 1 + n / 2 + n) return NULL;
    const int largest = in[0];
    if (!largest) {
        if (end - in < 1 + 2 * n) return NULL;
        memcpy(x, in + 1, (size_t)(2 * n));
        return in + 1 + 2 * n;
    }
    const uint8_t *half = in + 1, *rest = half + n / 2, *far = rest + n;
    int any_far = 0;
    for (long i = 0; i < n / 2; i++) {
        const int low = half[i] & 15, high = half[i] >> 4, a = rest[i], b = rest[i + n / 2];
        any_far |= (low == FAR) | (high == FAR);
        x[i] = (uint16_t)((a & 128) << 8 | ((largest - low) & 255) << 7 | (a & 127));
        x[i + n / 2] = (uint16_t)((b & 128) << 8 | ((largest - high) & 255) << 7 | (b & 127));
    }
    if (any_far)
        for (long i = 0; i < n; i++) {
            if ((i < n / 2 ? half[i] & 15 : half[i - n / 2] >> 4) != FAR) continue;
            if (far == end) return NULL;
            x[i] = (uint16_t)((x[i] & 0x807f) | *far++ << 7);
        }
    return far;
}

/* The way back: row by row, packed entries become memory[ids[row, i]], i < counts[row], whose states say that they are
 * here. Returns -1, or the first row whose entries end beyond it. */
long narrows_keep_packed(uint16_t *memory, int8_t *states, const uint8_t *packed, const int32_t *ids, const int32_t *counts,
                         long num_rows, long ids_stride, long row_bytes, long n) {
    for (long row = 0; row < num_rows; row++) {
        const uint8_t *at = packed + row * row_bytes, *end = at + row_bytes;
        const int32_t *to = ids + row * ids_stride;
        for (long i = 0; i < counts[row]; i++) {
            at = unpack_entry(memory + to[i] * n, at, end, n);
            if (!at) return row;
            states[to[i]] = HERE;
        }
    }
    return -1;
}
