/* A team of threads from the OpenMP runtime that torch has already started, by the entry points GCC's code calls.
 *
 * Called directly, so that any compiler will do and no second runtime, whose idle workers spin, comes into the process.
 */
#pragma once

#include <stdatomic.h>

extern void GOMP_parallel(void (*body)(void *), void *data, unsigned num_threads, unsigned flags);
extern void GOMP_barrier(void);
extern int omp_get_thread_num(void);
extern int omp_get_num_threads(void);

typedef struct {
    int id, size;
} team;

static inline team this_team(void) { return (team){omp_get_thread_num(), omp_get_num_threads()}; }

static inline void team_run(void (*body)(void *), void *data, int num_threads) {
    if (num_threads > 1)
        GOMP_parallel(body, data, (unsigned)num_threads, 0);
    else
        body(data);
}

static inline void team_wait(team t) {
    if (t.size > 1) GOMP_barrier();
}

/* Member t's share of n things, as first and end. */
static inline void team_share(team t, long n, long *first, long *end) {
    *first = n * t.id / t.size;
    *end = n * (t.id + 1) / t.size;
}
