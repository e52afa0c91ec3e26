/* SPDX-License-Identifier: BSD-3-Clause */
/* parallel.c: hands tasks to the workers of the caller's thread pool.
 *
 * A result must not depend on which worker runs a task. So every worker sets the caller's
 * floating-point mode (rounding, flush-to-zero, denormals-are-zero) for its tasks, and restores its
 * own mode afterwards. */
#include "internal.h"

#include <fenv.h>
#include <stdatomic.h>

static _Thread_local char here; /* its address identifies the thread */

typedef struct share {
    gk_work_fn fn;
    void *arg;
    int64_t num_tasks;
    atomic_llong next;  /* task; workers take tasks one by one, so a slow worker delays nobody */
    const char *caller; /* the calling thread: the address of its `here` */
    fenv_t mode;        /* the caller's floating-point mode */
} share;

static void worker_main(void *arg, int64_t worker) {
    share *s = arg;
    const bool own = s->caller == &here;
    fenv_t before;
    if (!own) {
        fegetenv(&before);
        fesetenv(&s->mode);
    }
    for (;;) {
        int64_t task = atomic_fetch_add_explicit(&s->next, 1, memory_order_relaxed);
        if (task >= s->num_tasks) break;
        s->fn(s->arg, task, worker);
    }
    if (!own) fesetenv(&before);
}

int64_t gk_num_workers(const gk_context *ctx, int64_t num_tasks) {
    if (!ctx->parallel_for || ctx->num_threads <= 1) return 1;
    return gk_max_i64(1, gk_min_i64(gk_num_threads(ctx), num_tasks));
}

void gk_parallel(const gk_context *ctx, int64_t num_tasks, gk_work_fn fn, void *arg) {
    int64_t workers = gk_num_workers(ctx, num_tasks);
    if (workers == 1) {
        for (int64_t task = 0; task < num_tasks; ++task) fn(arg, task, 0);
        return;
    }
    share s = {.fn = fn, .arg = arg, .num_tasks = num_tasks, .caller = &here};
    fegetenv(&s.mode);
    ctx->parallel_for(ctx->pool, workers, worker_main, &s);
}
