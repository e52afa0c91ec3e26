// SPDX-License-Identifier: BSD-3-Clause
/* softmax_sm90a: softmax and log_softmax of long rows; softmax.cuh has equations and kernels. A
 * cluster of 2, 4 or 8 blocks shares a row. Serves gk_softmax_fwd and gk_softmax_bwd in float32,
 * bfloat16 and float16, for rows longer than 512 threads of 4 vectors hold (16384 16-bit values),
 * up to 262144 values (float32 backward: 131072). No workspace. */
#include "softmax.cuh"

namespace {

#define SHAPE(PASS, T, DTYPE, NAME, ITEMS, CLUSTER)                                             \
    GK_SOFTMAX_INSTANCE(PASS, T, DTYPE, "_sm90a_" NAME "_512x" #ITEMS "x" #CLUSTER, 512, ITEMS, \
                        CLUSTER)
#define SHAPES(PASS, T, DTYPE, NAME)  \
    SHAPE(PASS, T, DTYPE, NAME, 4, 2) \
    SHAPE(PASS, T, DTYPE, NAME, 4, 4) \
    SHAPE(PASS, T, DTYPE, NAME, 4, 8) SHAPE(PASS, T, DTYPE, NAME, 8, 8)

const gk_cuda_instance fwd[] = {
    SHAPES(fwd, float, GK_F32, "f32") SHAPE(fwd, float, GK_F32, "f32", 16, 8)
        SHAPES(fwd, __nv_bfloat16, GK_BF16, "bf16") SHAPES(fwd, __half, GK_F16, "f16")};
const gk_cuda_instance bwd[] = {SHAPES(bwd, float, GK_F32, "f32") SHAPES(
    bwd, __nv_bfloat16, GK_BF16, "bf16") SHAPES(bwd, __half, GK_F16, "f16")};

} // namespace

extern "C" const gk_cuda_table gk_softmax_fwd_sm90a_table = {fwd, sizeof fwd / sizeof fwd[0], 90,
                                                             NULL};
extern "C" const gk_cuda_table gk_softmax_bwd_sm90a_table = {bwd, sizeof bwd / sizeof bwd[0], 90,
                                                             NULL};
