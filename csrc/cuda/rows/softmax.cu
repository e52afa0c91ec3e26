// SPDX-License-Identifier: BSD-3-Clause
/* softmax: softmax and log_softmax, in the registers of one block (softmax.cuh has equations and
 * kernels). Serves gk_softmax_fwd for rows of up to 32768 16-bit values and gk_softmax_bwd up to
 * 16384, in float32 (half as many), bfloat16 and float16. Rows must be whole 16-byte vectors that
 * start at multiples of 16 bytes; softmax_looped.cu serves the others. No workspace. */
#include "softmax.cuh"

namespace {

/* GK_ROW_SHAPES without the longest: backward keeps two rows, g and out, in registers. */
#define BWD_SHAPES(X) X(16, 1) X(32, 1) X(32, 4) X(128, 2) X(256, 2) X(512, 2) X(512, 4)

#define FWD_F32(LANES, ITEMS) \
    GK_SOFTMAX_INSTANCE(fwd, float, GK_F32, "_f32_" #LANES "x" #ITEMS, LANES, ITEMS, 1)
#define FWD_BF16(LANES, ITEMS) \
    GK_SOFTMAX_INSTANCE(fwd, __nv_bfloat16, GK_BF16, "_bf16_" #LANES "x" #ITEMS, LANES, ITEMS, 1)
#define FWD_F16(LANES, ITEMS) \
    GK_SOFTMAX_INSTANCE(fwd, __half, GK_F16, "_f16_" #LANES "x" #ITEMS, LANES, ITEMS, 1)
#define BWD_F32(LANES, ITEMS) \
    GK_SOFTMAX_INSTANCE(bwd, float, GK_F32, "_f32_" #LANES "x" #ITEMS, LANES, ITEMS, 1)
#define BWD_BF16(LANES, ITEMS) \
    GK_SOFTMAX_INSTANCE(bwd, __nv_bfloat16, GK_BF16, "_bf16_" #LANES "x" #ITEMS, LANES, ITEMS, 1)
#define BWD_F16(LANES, ITEMS) \
    GK_SOFTMAX_INSTANCE(bwd, __half, GK_F16, "_f16_" #LANES "x" #ITEMS, LANES, ITEMS, 1)

const gk_cuda_instance fwd[] = {GK_ROW_SHAPES(FWD_F32) GK_ROW_SHAPES(FWD_BF16)
                                    GK_ROW_SHAPES(FWD_F16)};
const gk_cuda_instance bwd[] = {BWD_SHAPES(BWD_F32) BWD_SHAPES(BWD_BF16) BWD_SHAPES(BWD_F16)};

} // namespace

extern "C" const gk_cuda_table gk_softmax_fwd_table = {fwd, sizeof fwd / sizeof fwd[0], 80, NULL};
extern "C" const gk_cuda_table gk_softmax_bwd_table = {bwd, sizeof bwd / sizeof bwd[0], 80, NULL};
