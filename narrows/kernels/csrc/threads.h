/* A crew: threads that work on one call together. Each NativeKernels object owns one; threads.c is its making.
 *
 * OpenMP's own threads spin while they wait. That is fast while a process has the machine for itself, and ruin when two
 * share its cores: each spins for a partner that can not run because the other spins. Ours spin for as long as a wait among
 * running threads takes, some microseconds, and then sleep until they are woken.
 */
#pragma once

#include <stdatomic.h>

typedef struct crew crew;

/* A member's place in its crew, for the time of one call. */
typedef struct {
    crew *crew;
    int id, size;
} team;

/* Run body once in every member, the caller being one, and return when all are done. Alone, if not `together`. */
void crew_run(crew *c, void (*body)(void *data, team me), void *data, int together);

/* Wait until every member of the crew has come here. */
void team_wait(team me);

int crew_size(const crew *c);

/* Member me's share of n things, as first and end. */
static inline void team_share(team me, long n, long *first, long *end) {
    *first = n * me.id / me.size;
    *end = n * (me.id + 1) / me.size;
}
