// SPDX-License-Identifier: BSD-3-Clause
/* norm_sm90a: RMSNorm and LayerNorm on Hopper. norm.cuh has equations and kernels. There are two
 * kinds of instances.
 *
 * Long rows: 2, 4 or 8 blocks of a cluster share a row and send each other their sums. They serve
 * gk_norm_fwd and gk_norm_bwd in float32, bfloat16 and float16, for rows longer than 512 threads of
 * 4 vectors hold (16384 16-bit values): forward up to 262144 16-bit values, backward up to 131072.
 * Backward's workspace is [clusters, 2, N] float32.
 *
 * Overlapped launches: gk_norm_fwd of 16-bit rows of 1025 to 16384 values, one block a row as in
 * norm_fwd.cu. The launch overlaps the previous and the next kernel. They serve a small M, as in
 * decoding, and plain rows (norm.cuh). */
#include "../../core/invariant.h"
#include "../tile/begins_sm90a.cuh"
#include "norm.cuh"

namespace {

#define FWD(T, DTYPE, NAME, ITEMS, CLUSTER)              \
    {"norm_fwd_sm90a_" NAME "_512x" #ITEMS "x" #CLUSTER, \
     DTYPE,                                              \
     norm_fwd_plan,                                      \
     norm_fwd_run<T, 512, ITEMS, CLUSTER>,               \
     GK_ROW_KEY(T, 512, ITEMS, CLUSTER),                 \
     NULL},
/* Plans the overlapped instances: for a small M and for plain rows. Other rows need so many
 * registers that the launch is a small part of the time. Batch-invariant calls are refused, because
 * plain rows of a small and of a large M round differently here. */
bool overlapped_plan(const gk_cuda_instance *instance, const gk_context *ctx, const void *args,
                     gk_plan *plan) {
    const gk_norm_args *a = (const gk_norm_args *)args;
    return !gk_batch_invariant() && a->x.shape[a->x.ndim - 1] > 1024 &&
           norm_fwd_plan(instance, ctx, args, plan) &&
           (num_rows(a->x) <= NORM_SMALL_M || norm_is_plain(norm_params(a)));
}

#define OVERLAPPED(T, DTYPE, NAME, LANES, ITEMS)         \
    {"norm_fwd_sm90a_" NAME "_" #LANES "x" #ITEMS,       \
     DTYPE,                                              \
     overlapped_plan,                                    \
     norm_fwd_run<T, LANES, ITEMS, 1, BeginsOverlapped>, \
     GK_ROW_KEY(T, LANES, ITEMS, 1),                     \
     NULL},
#define OVERLAPPED_SHAPES(T, DTYPE, NAME) \
    OVERLAPPED(T, DTYPE, NAME, 128, 2)    \
    OVERLAPPED(T, DTYPE, NAME, 256, 2)    \
    OVERLAPPED(T, DTYPE, NAME, 512, 2) OVERLAPPED(T, DTYPE, NAME, 512, 4)
#define BWD(T, DTYPE, NAME, ITEMS, CLUSTER)              \
    {"norm_bwd_sm90a_" NAME "_512x" #ITEMS "x" #CLUSTER, \
     DTYPE,                                              \
     norm_bwd_plan<T, 512, ITEMS, CLUSTER>,              \
     norm_bwd_run<T, 512, ITEMS, CLUSTER>,               \
     GK_ROW_KEY(T, 512, ITEMS, CLUSTER),                 \
     NULL},
/* 16-bit rows of up to 65536 values. An SM holds four blocks of 256 threads instead of two of 512,
 * and six if the rows are plain. While one block waits for sums, the others load or store. */
#define FWD_HALF(T, DTYPE, NAME, CLUSTER)       \
    {"norm_fwd_sm90a_" NAME "_256x4x" #CLUSTER, \
     DTYPE,                                     \
     norm_fwd_plan,                             \
     norm_fwd_run<T, 256, 4, CLUSTER>,          \
     GK_ROW_KEY(T, 256, 4, CLUSTER),            \
     NULL},
#define FWD_HALVES(T, DTYPE, NAME) FWD_HALF(T, DTYPE, NAME, 4) FWD_HALF(T, DTYPE, NAME, 8)
#define FWD_SHAPES(T, DTYPE, NAME) \
    FWD(T, DTYPE, NAME, 4, 2)      \
    FWD(T, DTYPE, NAME, 4, 4) FWD(T, DTYPE, NAME, 4, 8) FWD(T, DTYPE, NAME, 8, 8)
#define BWD_SHAPES(T, DTYPE, NAME) \
    BWD(T, DTYPE, NAME, 4, 2) BWD(T, DTYPE, NAME, 4, 4) BWD(T, DTYPE, NAME, 4, 8)

const gk_cuda_instance fwd[] = {
    OVERLAPPED_SHAPES(__nv_bfloat16, GK_BF16, "bf16") OVERLAPPED_SHAPES(__half, GK_F16, "f16")
        FWD_HALVES(__nv_bfloat16, GK_BF16, "bf16") FWD_HALVES(__half, GK_F16, "f16")
            FWD_SHAPES(float, GK_F32, "f32") FWD_SHAPES(__nv_bfloat16, GK_BF16, "bf16")
                FWD_SHAPES(__half, GK_F16, "f16")};
const gk_cuda_instance bwd[] = {BWD_SHAPES(float, GK_F32, "f32") BWD_SHAPES(
    __nv_bfloat16, GK_BF16, "bf16") BWD_SHAPES(__half, GK_F16, "f16")};

} // namespace

extern "C" const gk_cuda_table gk_norm_fwd_sm90a_table = {fwd, sizeof fwd / sizeof fwd[0], 90,
                                                          NULL};
extern "C" const gk_cuda_table gk_norm_bwd_sm90a_table = {bwd, sizeof bwd / sizeof bwd[0], 90,
                                                          NULL};
