/* Copies of chosen entries: from a pool into rows, one after the other, and from rows back to where they belong. */

#include <stdint.h>
#include <string.h>

#include "threads.h"

#define AHEAD 16             /* entries asked for before their turn */
#define THREADED_BYTES 65536 /* below, waking the other threads costs more than they save */

typedef struct {
    char *memory, *rows;
    const int32_t *ids, *counts, *start; /* start may be NULL */
    long num_rows, ids_stride, row_stride, entry; /* row_stride in entries, entry in bytes */
    long total;
    int back; /* from rows to memory */
} gather_call;

static inline __attribute__((always_inline)) void copy(char *to, const char *from, long bytes) {
    if (bytes % 64) {
        memcpy(to, from, (size_t)bytes);
        return;
    }
    for (long i = 0; i < bytes; i += 64) memcpy(to + i, from + i, 64); /* a few vectors, without a call */
}

static void copy_row(const gather_call *c, long row, long from, long until) {
    const int32_t *ids = c->ids + row * c->ids_stride;
    char *at = c->rows + (row * c->row_stride + (c->start ? c->start[row] : 0) + from) * c->entry;
    for (long i = from; i < until; i++, at += c->entry) {
        char *one = c->memory + ids[i] * c->entry;
        if (i + AHEAD < until) {
            const char *soon = c->memory + ids[i + AHEAD] * c->entry;
            for (long line = 0; line < c->entry; line += 64) __builtin_prefetch(soon + line, 0, 2);
        }
        if (c->back)
            copy(one, at, c->entry);
        else
            copy(at, one, c->entry);
    }
}

static void gather_team(void *data, team me) {
    const gather_call *c = data;
    long first, end;
    team_share(me, c->total, &first, &end);
    for (long row = 0, before = 0; before < end; before += c->counts[row++]) {
        const long from = first > before ? first - before : 0, left = end - before;
        copy_row(c, row, from, left < c->counts[row] ? left : c->counts[row]);
    }
}

/* Entry memory[ids[row, i]] and rows[row, start[row] + i], i < counts[row]: the second becomes the first, or with `back` the
 * first the second. */
void narrows_gather(int back, void *memory, void *rows, const int32_t *ids, const int32_t *counts, const int32_t *start,
                    long num_rows, long ids_stride, long row_stride, long entry_bytes, crew *crew) {
    gather_call c = {memory, rows, ids, counts, start, num_rows, ids_stride, row_stride, entry_bytes, 0, back};
    for (long row = 0; row < num_rows; row++) c.total += counts[row];
    crew_run(crew, gather_team, &c, c.total * entry_bytes >= THREADED_BYTES);
}
