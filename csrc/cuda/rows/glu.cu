// SPDX-License-Identifier: BSD-3-Clause
/* glu: gated linear units (glu.cuh) on every GPU. Serves gk_glu_fwd and gk_glu_bwd. */
#include "glu.cuh"

namespace {

template <class T>
gk_status bwd_run(const gk_context *ctx, const void *args, const gk_plan *, void *) {
    const gk_glu_bwd_args *a = (const gk_glu_bwd_args *)args;
    const gk_tensor gate = gk_glu_half(&a->gate, a->up, 0), up = gk_glu_half(&a->gate, a->up, 1);
    const gk_tensor dgate = gk_glu_half(&a->dgate, a->dup, 0),
                    dup = gk_glu_half(&a->dgate, a->dup, 1);
    GluParams p = {row_tensor(a->grad_out), row_tensor(gate), row_tensor(up), row_tensor(dgate),
                   row_tensor(dup)};
    p.rows = num_rows(a->grad_out);
    p.n = a->grad_out.shape[a->grad_out.ndim - 1];
    p.activation = a->activation;
    return glu_run<T, true, BeginsAlone>(ctx, p, rows_whole(a->grad_out, &gate, &up, &dgate, &dup));
}

bool fwd_plan(const gk_cuda_instance *, const gk_context *, const void *args, gk_plan *plan) {
    return glu_plan_rows(((const gk_glu_args *)args)->out, plan);
}
bool bwd_plan(const gk_cuda_instance *, const gk_context *, const void *args, gk_plan *plan) {
    return glu_plan_rows(((const gk_glu_bwd_args *)args)->grad_out, plan);
}

const gk_cuda_instance fwd[] = {
    {"glu_fwd_f32", GK_F32, fwd_plan, glu_fwd_run<float>, {}, NULL},
    {"glu_fwd_bf16", GK_BF16, fwd_plan, glu_fwd_run<__nv_bfloat16>, {}, NULL},
    {"glu_fwd_f16", GK_F16, fwd_plan, glu_fwd_run<__half>, {}, NULL},
    {"glu_fwd_f64", GK_F64, fwd_plan, glu_fwd_run<double>, {}, NULL},
};
const gk_cuda_instance bwd[] = {
    {"glu_bwd_f32", GK_F32, bwd_plan, bwd_run<float>, {}, NULL},
    {"glu_bwd_bf16", GK_BF16, bwd_plan, bwd_run<__nv_bfloat16>, {}, NULL},
    {"glu_bwd_f16", GK_F16, bwd_plan, bwd_run<__half>, {}, NULL},
    {"glu_bwd_f64", GK_F64, bwd_plan, bwd_run<double>, {}, NULL},
};

} // namespace

extern "C" const gk_cuda_table gk_glu_fwd_table = {fwd, 4, 80, NULL};
extern "C" const gk_cuda_table gk_glu_bwd_table = {bwd, 4, 80, NULL};
