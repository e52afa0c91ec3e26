/* SPDX-License-Identifier: BSD-3-Clause */
/* train: dropout and AdamW by their equations (gpukern_train.h), in double. A task of dropout is
 * one row, a task of AdamW one parameter. */
#include "gpukern_train.h"
#include "../formats/philox.h"
#include "activation.h"
#include "rows.h"

static void dropout_row(void *arg, int64_t row, int64_t worker) {
    (void)worker;
    const gk_dropout_args *a = arg;
    const uint64_t seed = gk_seed_word(&a->seed, 0), offset = gk_seed_word(&a->seed, 1),
                   keep = gk_keep_below(a->p);
    const double scale = gk_keep_scale(a->p);
    const int64_t n = last_size(&a->x);
    for (int64_t i = 0; i < n; ++i) {
        const uint64_t at = (uint64_t)(row * n + i);
        uint32_t word[4];
        gk_philox(seed, offset, at / 4, word);
        double y = 0;
        if (word[at % 4] < keep) {
            const double x = ref_at(&a->x, row, i) + (a->bias ? ref_vector_at(a->bias, i) : 0);
            y = scale * (a->grad_out
                             ? ref_at(a->grad_out, row, i) * act_derivative(a->activation, x)
                             : act(a->activation, x));
        }
        ref_put(&a->out, row, i, a->residual ? y + ref_at(a->residual, row, i) : y);
    }
}

void gk_ref_dropout(const gk_context *ctx, const gk_dropout_args *args) {
    gk_dropout_args a = *args;
    if (gk_numel(&a.x) > 0) gk_parallel(ctx, num_rows(&a.x), dropout_row, &a);
}

static double scalar(const gk_tensor *t, double none) {
    return t ? gk_load(t->data, t->dtype, 0) : none;
}

static void adamw_tensor(void *arg, int64_t t, int64_t worker) {
    (void)worker;
    const gk_adamw_args *a = arg;
    const gk_tensor *w = &a->params[t], *m = &a->exp_avgs[t], *v = &a->exp_avg_sqs[t];
    const double lr = scalar(a->lr_tensor, a->lr), step = scalar(&a->steps[t], 1);
    const double times = (a->maximize ? -1 : 1) * scalar(a->clip, 1) / scalar(a->grad_scale, 1);
    const double rate = lr / (1 - pow(a->beta1, step)), root = sqrt(1 - pow(a->beta2, step));
    /* The tensors of a parameter have the same strides and are dense: i counts in memory order. */
    for (int64_t i = 0; i < gk_numel(w); ++i) {
        const double g = times * gk_load(a->grads[t].data, w->dtype, i);
        double x =
            a->masters ? gk_load(a->masters[t].data, GK_F32, i) : gk_load(w->data, w->dtype, i);
        /* not x -= lr decay x: with lr 0 an infinite x would become NaN */
        x *= 1 - lr * a->weight_decay;
        const double first = a->beta1 * gk_load(m->data, m->dtype, i) + (1 - a->beta1) * g;
        double second = a->beta2 * gk_load(v->data, v->dtype, i) + (1 - a->beta2) * g * g;
        gk_store(m->data, m->dtype, i, first);
        gk_store(v->data, v->dtype, i, second);
        if (a->max_exp_avg_sqs) {
            const double before = gk_load(a->max_exp_avg_sqs[t].data, v->dtype, i);
            second = before > second || isnan(before) ? before : second;
            gk_store(a->max_exp_avg_sqs[t].data, v->dtype, i, second);
        }
        x -= rate * first / (sqrt(second) / root + a->eps);
        if (a->masters) gk_store(a->masters[t].data, GK_F32, i, x);
        if (a->seed) {
            uint32_t word[4];
            gk_philox(gk_seed_word(a->seed, 0), gk_seed_word(a->seed, 1),
                      gk_adamw_counter(t, i / 4), word);
            ((uint16_t *)w->data)[i] = gk_f32_to_bf16_stochastic((float)x, word[i % 4]);
        } else {
            gk_store(w->data, w->dtype, i, x);
        }
    }
}

void gk_ref_adamw(const gk_context *ctx, const gk_adamw_args *args) {
    gk_adamw_args a = *args;
    if (scalar(a.found_inf, 0) == 0) gk_parallel(ctx, a.num, adamw_tensor, &a);
}
