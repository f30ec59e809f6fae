#define _GNU_SOURCE
#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <time.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define SPIN_NS 25000L /* a wait within a call is shorter, if its partner runs at all, and so is Python between two calls */
#define PAUSES 32      /* between two looks at the clock */

/* Something to wait for: whoever changes the value wakes those that sleep on it. */
typedef struct {
    _Alignas(64) atomic_uint value;
    atomic_int sleepers;
} word;

struct crew {
    int size; /* the caller included */
    unsigned forks;
    pthread_t *threads;
    pthread_mutex_t calls; /* held for the time of a call: another thread's waits */

    void (*body)(void *, team);
    void *data;
    word call; /* counts up when there is work, or `leave` is set */
    word done; /* counts up when all members but the caller have finished a call */
    word passed; /* barriers that all have left behind */
    atomic_int leave;
    _Alignas(64) atomic_int running; /* members but the caller that have not finished */
    _Alignas(64) atomic_int arrived; /* at the barrier */
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

static void sleep_on(word *w, unsigned seen) {
#ifdef __linux__
    atomic_fetch_add(&w->sleepers, 1);
    while (atomic_load(&w->value) == seen)
        syscall(SYS_futex, &w->value, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    atomic_fetch_sub(&w->sleepers, 1);
#else
    while (atomic_load(&w->value) == seen) sched_yield();
#endif
}

/* Wait until the value is no longer `seen`: on the processor for as long as a wait among running threads takes, then asleep.
 * One that sleeps is given a processor as soon as it is woken; one that has only yielded waits out others' time slices. */
static void await(word *w, unsigned seen) {
    const long began = now_ns();
    while (atomic_load(&w->value) == seen) {
        for (int i = 0; i < PAUSES && atomic_load(&w->value) == seen; i++) pause_a_bit();
        if (now_ns() - began > SPIN_NS) {
            sleep_on(w, seen);
            return;
        }
    }
}

static void change(word *w) {
    atomic_fetch_add(&w->value, 1);
#ifdef __linux__
    if (atomic_load(&w->sleepers)) syscall(SYS_futex, &w->value, FUTEX_WAKE_PRIVATE, 1 << 20, NULL, NULL, 0);
#endif
}

int crew_size(const crew *c) { return c->size; }

void team_wait(team me) {
    crew *c = me.crew;
    if (me.size == 1) return;
    const unsigned mine = atomic_load(&c->passed.value);
    if (atomic_fetch_add(&c->arrived, 1) == me.size - 1) {
        atomic_store(&c->arrived, 0);
        change(&c->passed);
    } else {
        await(&c->passed, mine);
    }
}

static void *serve(void *argument) {
    const member me = *(member *)argument;
    crew *c = me.crew;
    free(argument);
    for (unsigned seen = 0;; seen++) {
        await(&c->call, seen);
        if (atomic_load(&c->leave)) return NULL;
        c->body(c->data, (team){c, me.id, c->size});
        if (atomic_fetch_sub(&c->running, 1) == 1) change(&c->done);
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
    const unsigned done = atomic_load(&c->done.value);
    atomic_store(&c->running, c->size - 1);
    change(&c->call);
    body(data, (team){c, 0, c->size});
    await(&c->done, done);
    pthread_mutex_unlock(&c->calls);
}

/* Dismiss the threads and the crew; no call may be running. In a forked child there are none to dismiss. */
void narrows_crew_free(crew *c) {
    if (!c) return;
    if (c->forks == atomic_load(&forks)) {
        atomic_store(&c->leave, 1);
        change(&c->call);
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
