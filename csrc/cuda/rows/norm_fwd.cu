// SPDX-License-Identifier: BSD-3-Clause
/* norm_fwd: RMSNorm and LayerNorm forward, in the registers of one block (norm.cuh has equations
 * and kernel). Serves gk_norm_fwd in float32, bfloat16 and float16, rows of up to 32768 16-bit or
 * 16384 float32 values. A block has one row, or several if a warp or less holds one. Rows must be
 * whole 16-byte vectors that start at multiples of 16 bytes; norm_looped.cu serves the others. No
 * workspace. Bound by reading x and writing out. */
#include "norm.cuh"

namespace {

#define SHAPE(T, DTYPE, NAME, LANES, ITEMS)     \
    {                                           \
        "norm_fwd_" NAME "_" #LANES "x" #ITEMS, \
        DTYPE,                                  \
        norm_fwd_plan,                          \
        norm_fwd_run<T, LANES, ITEMS, 1>,       \
        GK_ROW_KEY(T, LANES, ITEMS, 1),         \
        NULL},
#define OF_F32(LANES, ITEMS) SHAPE(float, GK_F32, "f32", LANES, ITEMS)
#define OF_BF16(LANES, ITEMS) SHAPE(__nv_bfloat16, GK_BF16, "bf16", LANES, ITEMS)
#define OF_F16(LANES, ITEMS) SHAPE(__half, GK_F16, "f16", LANES, ITEMS)

const gk_cuda_instance instances[] = {GK_ROW_SHAPES(OF_F32) GK_ROW_SHAPES(OF_BF16)
                                          GK_ROW_SHAPES(OF_F16)};

} // namespace

extern "C" const gk_cuda_table gk_norm_fwd_table = {
    instances, sizeof instances / sizeof instances[0], 80, NULL};
