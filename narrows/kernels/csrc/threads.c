#define _GNU_SOURCE
#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#define SPINS 100 /* pauses, some microseconds in all, before giving way */
#define SLEEP_AFTER_NS 1000000L

struct crew {
    int size; /* the caller included */
    unsigned forks;
    pthread_t *threads;
    pthread_mutex_t calls; /* held for the time of a call: another thread's waits */

    void (*body)(void *, team);
    void *data;
    _Alignas(64) atomic_uint call; /* counts up when there is work, or `leave` is set */
    atomic_int leave;
    _Alignas(64) atomic_int running; /* members but the caller that have not finished */
    _Alignas(64) atomic_int arrived; /* at the barrier */
    atomic_uint passed;              /* barriers that all have left behind */

    pthread_mutex_t sleep;
    pthread_cond_t wake;
    atomic_int sleepers;
};

typedef struct {
    crew *crew;
    int id;
} member;

/* A forked child has the memory of a crew, but not its threads. */
static atomic_uint forks;
static pthread_once_t watching = PTHREAD_ONCE_INIT;
static void forked(void) { atomic_fetch_add(&forks, 1); }
static void watch_forks(void) { pthread_atfork(NULL, NULL, forked); }

static inline void pause_a_bit(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static long now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000L + t.tv_nsec;
}

/* Waits a moment: briefly at first, later by letting others run. `spins` counts them, from 0. */
static inline void wait_a_bit(int *spins) {
    if (*spins < SPINS) {
        ++*spins;
        pause_a_bit();
    } else {
        sched_yield();
    }
}

int crew_size(const crew *c) { return c->size; }

void team_wait(team me) {
    crew *c = me.crew;
    if (me.size == 1) return;
    const unsigned mine = atomic_load(&c->passed);
    if (atomic_fetch_add(&c->arrived, 1) == me.size - 1) {
        atomic_store(&c->arrived, 0);
        atomic_store(&c->passed, mine + 1);
        return;
    }
    for (int spins = 0; atomic_load(&c->passed) == mine;) wait_a_bit(&spins);
}

static void sleep_until_called(crew *c, unsigned seen) {
    pthread_mutex_lock(&c->sleep);
    atomic_fetch_add(&c->sleepers, 1);
    while (atomic_load(&c->call) == seen) pthread_cond_wait(&c->wake, &c->sleep);
    atomic_fetch_sub(&c->sleepers, 1);
    pthread_mutex_unlock(&c->sleep);
}

/* Everyone up for a call that has just been counted. */
static void wake_all(crew *c) {
    if (!atomic_load(&c->sleepers)) return;
    pthread_mutex_lock(&c->sleep);
    pthread_cond_broadcast(&c->wake);
    pthread_mutex_unlock(&c->sleep);
}

static void *serve(void *argument) {
    const member me = *(member *)argument;
    crew *c = me.crew;
    free(argument);
    for (unsigned seen = 0;; seen++) {
        long since = 0;
        for (int spins = 0; atomic_load(&c->call) == seen;) {
            wait_a_bit(&spins);
            if (spins < SPINS) continue;
            if (!since) since = now_ns();
            if (now_ns() - since > SLEEP_AFTER_NS) sleep_until_called(c, seen);
        }
        if (atomic_load(&c->leave)) return NULL;
        c->body(c->data, (team){c, me.id, c->size});
        atomic_fetch_sub(&c->running, 1);
    }
}

void crew_run(crew *c, void (*body)(void *, team), void *data, int together) {
    if (!together || c->size == 1 || c->forks != atomic_load(&forks)) {
        body(data, (team){c, 0, 1});
        return;
    }
    pthread_mutex_lock(&c->calls);
    c->body = body;
    c->data = data;
    atomic_store(&c->running, c->size - 1);
    atomic_fetch_add(&c->call, 1);
    wake_all(c);
    body(data, (team){c, 0, c->size});
    for (int spins = 0; atomic_load(&c->running);) wait_a_bit(&spins);
    pthread_mutex_unlock(&c->calls);
}

/* Dismiss the threads and the crew; no call may be running. In a forked child there are none to dismiss. */
void narrows_crew_free(crew *c) {
    if (!c) return;
    if (c->forks == atomic_load(&forks)) {
        atomic_store(&c->leave, 1);
        atomic_fetch_add(&c->call, 1);
        wake_all(c);
        for (int i = 1; i < c->size; i++) pthread_join(c->threads[i], NULL);
    }
    free(c->threads);
    free(c);
}

/* A crew of `size`, the caller of each call included; smaller if the system refuses threads. NULL: no memory. */
crew *narrows_crew_new(int size) {
    pthread_once(&watching, watch_forks);
    crew *c = aligned_alloc(64, (sizeof *c + 63) / 64 * 64);
    pthread_t *threads = calloc((size_t)size, sizeof *threads);
    if (!c || !threads) {
        free(c);
        free(threads);
        return NULL;
    }
    *c = (crew){.size = size, .forks = atomic_load(&forks), .threads = threads};
    pthread_mutex_init(&c->calls, NULL);
    pthread_mutex_init(&c->sleep, NULL);
    pthread_cond_init(&c->wake, NULL);
    for (int i = 1; i < size; i++) {
        member *m = malloc(sizeof *m);
        if (m) *m = (member){c, i};
        if (!m || pthread_create(&threads[i], NULL, serve, m)) {
            free(m);
            c->size = i; /* members already running have taken no work yet, so they will read this size */
            break;
        }
    }
    return c;
}
