/* SPDX-License-Identifier: BSD-3-Clause */
/* moe_unpermute: each token's weighted sum of rows, and its gradients, by their equations
 * (gpukern_moe.h), in double. A task is one token of the forward pass, one row of drows, or one
 * token of dweight. */
#include "gpukern_moe.h"
#include "rows.h"

static int64_t place_of(const gk_tensor *place, int64_t choice) {
    const int64_t at = gk_offset_of(place, 2, choice);
    return place->dtype == GK_I64 ? ((const int64_t *)place->data)[at]
                                  : ((const int32_t *)place->data)[at];
}
static double weight_of(const gk_tensor *weight, int64_t choice) {
    return gk_load(weight->data, weight->dtype, gk_offset_of(weight, 2, choice));
}

static void sum_of_token(void *arg, int64_t token, int64_t worker) {
    (void)worker;
    const gk_moe_unpermute_args *a = arg;
    const int64_t each = a->place.shape[1];
    for (int64_t i = 0; i < last_size(&a->rows); ++i) {
        double sum = 0;
        for (int64_t choice = token * each; choice < (token + 1) * each; ++choice) {
            const int64_t at = place_of(&a->place, choice);
            if (at >= 0) sum += weight_of(&a->weight, choice) * ref_at(&a->rows, at, i);
        }
        ref_put(&a->out, token, i, sum);
    }
}

void gk_ref_moe_unpermute(const gk_context *ctx, const gk_moe_unpermute_args *args) {
    gk_moe_unpermute_args a = *args;
    gk_parallel(ctx, a.place.shape[0], sum_of_token, &a);
}

static void drows_of_row(void *arg, int64_t row, int64_t worker) {
    (void)worker;
    const gk_moe_unpermute_bwd_args *a = arg;
    const int64_t each = a->place.shape[1], n = last_size(&a->rows), choices = gk_numel(&a->place);
    int64_t first = 0; /* before the first choice of this row there is nothing to add */
    while (first < choices && place_of(&a->place, first) != row) ++first;
    for (int64_t i = 0; i < n; ++i) {
        double sum = 0;
        for (int64_t choice = first; choice < choices; ++choice)
            if (place_of(&a->place, choice) == row)
                sum += weight_of(&a->weight, choice) * ref_at(&a->grad_out, choice / each, i);
        ref_put(a->drows, row, i, sum);
    }
}

static void dweight_of_token(void *arg, int64_t token, int64_t worker) {
    (void)worker;
    const gk_moe_unpermute_bwd_args *a = arg;
    const int64_t each = a->place.shape[1];
    for (int64_t choice = token * each; choice < (token + 1) * each; ++choice) {
        const int64_t at = place_of(&a->place, choice);
        double sum = 0;
        for (int64_t i = 0; at >= 0 && i < last_size(&a->rows); ++i)
            sum += ref_at(&a->grad_out, token, i) * ref_at(&a->rows, at, i);
        gk_store(a->dweight->data, a->dweight->dtype, choice, sum);
    }
}

void gk_ref_moe_unpermute_bwd(const gk_context *ctx, const gk_moe_unpermute_bwd_args *args) {
    gk_moe_unpermute_bwd_args a = *args;
    if (a.drows) gk_parallel(ctx, a.rows.shape[0], drows_of_row, &a);
    if (a.dweight) gk_parallel(ctx, a.place.shape[0], dweight_of_token, &a);
}
