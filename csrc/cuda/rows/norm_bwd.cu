// SPDX-License-Identifier: BSD-3-Clause
/* norm_bwd: RMSNorm and LayerNorm backward (norm.cuh), rows of up to 16K 16-bit values in the
 * registers of one block, which takes every so many rows and keeps the sums of dweight and dbias on
 * the way. float32, bfloat16, float16; rows of whole vectors of 16 bytes that begin at multiples of
 * 16 bytes; norm_walk.cu has the others.
 * Workspace: [blocks, 2, N] in float32. Bound by reading g and h and writing dx. */
#include "norm.cuh"

namespace {

/* As GK_ROW_SHAPES as far as a thread's registers hold two sums of each of its columns: 64 of 128
 * at 512 threads of 4 vectors. One block of 8192 columns is 256 threads, so that an SM has two, and
 * one is at work while the other's threads wait for each other. */
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
