/* Where the entries of a KV index are, and copies of those that have come to where they belong. One thread: a few
 * thousand integers, and as much data as a slow link brings. */

#include <stdint.h>
#include <string.h>

enum { NOWHERE, HERE, REMOTE };

/* Row r is head r % heads of request r / heads. Returns how many entries are remote, or -1 when one is nowhere. The last
 * valid entry of a row is here. `states` may be NULL: all are. */
int narrows_locate(int32_t *ids, int32_t *remote_ids, int32_t *remote_positions, int32_t *num_remote,
                   const int32_t *positions, const int32_t *counts, const int32_t *page_table, const int8_t *states,
                   long rows, long stride, long heads, long most_pages, long page_size) {
    long total = 0;
    const int shift = __builtin_ctzl((unsigned long)page_size); /* page sizes are powers of two */
    const int32_t within = (int32_t)page_size - 1, step = (int32_t)heads;
    for (long row = 0; row < rows; row++) {
        const int32_t *at = positions + row * stride, *pages = page_table + row / heads * most_pages;
        const int32_t head = (int32_t)(row % heads);
        int32_t *out = ids + row * stride, *far_ids = remote_ids + row * stride, *far = remote_positions + row * stride;
        const long count = counts[row];
        for (long i = 0; i < count; i++)
            out[i] = ((pages[at[i] >> shift] << shift) + (at[i] & within)) * step + head;
        for (long i = count; i < stride; i++) out[i] = 0;
        long n = 0;
        if (states) {
            int lost = 0;
            for (long i = 0; i + 1 < count; i++) { /* written in any case, counted where remote */
                const int8_t state = states[out[i]];
                far_ids[n] = out[i];
                far[n] = at[i];
                n += state == REMOTE;
                lost |= state == NOWHERE;
            }
            if (lost) return -1;
        }
        num_remote[row] = (int32_t)n;
        total += n;
    }
    return (int)total;
}

/* memory[ids[row, i]] becomes rows[row, i], i < counts[row], and its state says that it is here. */
void narrows_keep(char *memory, int8_t *states, const char *rows, const int32_t *ids, const int32_t *counts, long num_rows,
                  long ids_stride, long row_stride, long entry_bytes) {
    for (long row = 0; row < num_rows; row++) {
        const char *from = rows + row * row_stride * entry_bytes;
        const int32_t *at = ids + row * ids_stride;
        for (long i = 0; i < counts[row]; i++, from += entry_bytes) {
            memcpy(memory + at[i] * entry_bytes, from, (size_t)entry_bytes);
            states[at[i]] = HERE;
        }
    }
}
