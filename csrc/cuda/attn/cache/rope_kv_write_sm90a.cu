/* SPDX-License-Identifier: BSD-3-Clause */
/* rope_kv_write_sm90a: the kernel of rope_kv_write.cuh in bfloat16 and float16 for at most
 * MOST_TOKENS tokens, as in decoding. Its launch overlaps the kernels before and after it
 * (begins_sm90a.cuh). rope_kv_write serves the other calls. */
#include "../../tile/begins_sm90a.cuh"
#include "rope_kv_write.cuh"

namespace {

constexpr int64_t MOST_TOKENS = 512; /* with more, the launch is a small part of the time */

bool few_plan(const gk_cuda_instance *instance, const gk_context *ctx, const void *args,
              gk_plan *to) {
    return ((const gk_rope_kv_write_args *)args)->q.shape[0] <= MOST_TOKENS &&
           plan(instance, ctx, args, to);
}

const gk_cuda_instance instances[] = {
    {"rope_kv_write_sm90a_bf16_x8",
     GK_BF16,
     few_plan,
     run<__nv_bfloat16, 8, BeginsOverlapped>,
     {8},
     NULL},
    {"rope_kv_write_sm90a_f16_x8", GK_F16, few_plan, run<__half, 8, BeginsOverlapped>, {8}, NULL},
};

} // namespace

extern "C" const gk_cuda_table gk_rope_kv_write_sm90a_table = {
    instances, sizeof instances / sizeof instances[0], 90, NULL};
