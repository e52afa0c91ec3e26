// SPDX-License-Identifier: BSD-3-Clause
/* norm_bwd: RMSNorm and LayerNorm backward, one block per row (norm.cuh has equations and kernel).
 * Serves gk_norm_bwd in float32, bfloat16 and float16, rows of up to 16384 16-bit or 8192
 * float32 values. Rows must be whole 16-byte vectors that start at multiples of 16 bytes;
 * norm_looped.cu serves the others. Workspace: [blocks, 2, N] float32. Bound by reading g and h and
 * writing dx. */
#include "norm.cuh"

namespace {

/* GK_ROW_SHAPES, up to where a thread's registers hold two sums for each of its columns: with 512
 * threads of 4 vectors, sums take 64 of the 128 registers. Rows of 8192 16-bit columns take 256
 * threads, so that an SM holds two blocks: one computes while the other waits at a barrier. */
#define SHAPES(X) X(16, 1) X(32, 1) X(32, 2) X(128, 2) X(256, 2) X(256, 4) X(512, 4)

#define SHAPE(T, DTYPE, NAME, LANES, ITEMS)                                    \
    {"norm_bwd_" NAME "_" #LANES "x" #ITEMS, DTYPE,                            \
     norm_bwd_plan<T, LANES, ITEMS, 1>,      norm_bwd_run<T, LANES, ITEMS, 1>, \
     GK_ROW_KEY(T, LANES, ITEMS, 1),         NULL},
#define OF_F32(LANES, ITEMS) SHAPE(float, GK_F32, "f32", LANES, ITEMS)
#define OF_BF16(LANES, ITEMS) SHAPE(__nv_bfloat16, GK_BF16, "bf16", LANES, ITEMS)
#define OF_F16(LANES, ITEMS) SHAPE(__half, GK_F16, "f16", LANES, ITEMS)

const gk_cuda_instance instances[] = {SHAPES(OF_F32) SHAPES(OF_BF16) SHAPES(OF_F16)};

} // namespace

extern "C" const gk_cuda_table gk_norm_bwd_table = {
    instances, sizeof instances / sizeof instances[0], 80, NULL};
