// SPDX-License-Identifier: BSD-3-Clause
/* glu_sm90a: gated linear units (glu.cuh) whose launch overlaps the kernels before and after it
 * (begins_sm90a.cuh). Serves gk_glu_fwd in bfloat16 and float16, if rows are whole 16-byte vectors,
 * for small results, as in decoding, and for flat rows. glu.cu serves the other calls. */
#include "../tile/begins_sm90a.cuh"
#include "glu.cuh"

namespace {

/* The most elements of out unless rows are flat. In larger calls the launch is a small part of the
 * time, and glu takes two vectors a thread. */
constexpr int64_t MOST_VALUES = 1 << 23;

bool plan(const gk_cuda_instance *, const gk_context *, const void *args, gk_plan *to) {
    const gk_glu_args *a = (const gk_glu_args *)args;
    const gk_tensor gate = gk_glu_half(&a->gate, a->up, 0), up = gk_glu_half(&a->gate, a->up, 1);
    return (gk_numel(&a->out) <= MOST_VALUES || glu_is_flat(glu_params(a, gate, up), 8)) &&
           rows_whole(a->out, &gate, &up) && glu_plan_rows(a->out, to);
}

const gk_cuda_instance instances[] = {
    {"glu_fwd_sm90a_bf16", GK_BF16, plan, glu_fwd_run<__nv_bfloat16, BeginsOverlapped>, {}, NULL},
    {"glu_fwd_sm90a_f16", GK_F16, plan, glu_fwd_run<__half, BeginsOverlapped>, {}, NULL},
};

} // namespace

extern "C" const gk_cuda_table gk_glu_fwd_sm90a_table = {
    instances, sizeof instances / sizeof instances[0], 90, NULL};
