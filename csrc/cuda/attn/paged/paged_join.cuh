/* SPDX-License-Identifier: BSD-3-Clause */
/* paged_join.cuh: the merge of splits inside paged_attn_sm90a's list kernel. Each block stores its
 * split and then increments the tile's counter. The block that arrives last merges all splits, in
 * the order of the blocks. So no block waits, and the bits do not depend on which block is last.
 *
 * The counters are in the call's workspace, and a small kernel before the list kernel zeroes them.
 * Permanent counters, which every call leaves at zero, would not do: two graphs that replay at the
 * same time would share them. */
#ifndef GPUKERN_CUDA_PAGED_JOIN_CUH
#define GPUKERN_CUDA_PAGED_JOIN_CUH

#include "../../ptx/flag.cuh"
#include "../../ptx/griddepcontrol.cuh"
#include "paged_combine.cuh"
#include "paged_step.cuh"

namespace {

/* ---- 1. the kernel before the list ----------------------------------------------------------- */
struct BeginParams {
    Paged p;
    unsigned *arrived; /* [count] */
    int count;
};

/* Block 0 zeroes the counters. In the other blocks each warp checks one token, and clears its
 * result if it belongs to no sequence. Zero has the same bits in bfloat16 and float16. */
__global__ void __launch_bounds__(COMBINE_THREADS) paged_begin_kernel(BeginParams x) {
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    if (blockIdx.x == 0)
        for (int i = threadIdx.x; i < x.count; i += COMBINE_THREADS) x.arrived[i] = 0;
    else
        clear_unowned_token<__half>(x.p,
                                    ((int)blockIdx.x - 1) * COMBINE_WARPS + (int)threadIdx.x / 32);
}

inline gk_status launch_begin(const gk_context *ctx, const Call &c, unsigned *arrived) {
    const BeginParams x = {c.p, arrived, arrived ? c.blocks * LIST_WARPS : 0};
    const int64_t token_blocks = c.p.cu_q ? gk_ceil_div(c.p.tokens, COMBINE_WARPS) : 0;
    return launch<paged_begin_kernel>("gk_paged_attn", ctx, dim3((unsigned)(1 + token_blocks)),
                                      COMBINE_THREADS, 0, x, true);
}

/* ---- 2. the merge ---------------------------------------------------------------------------- */
/* A team is the threads that merge the sums of a share: one warp if each warp of the block has its
 * own kv head, otherwise the whole block. */
struct Team {
    int thread, threads, head0, heads; /* heads [head0, head0 + heads) of the block's heads */
    __device__ __forceinline__ void sync() const {
        if (threads == 32)
            __syncwarp();
        else
            __syncthreads();
    }
    __device__ __forceinline__ bool any(bool x) const {
        return threads == 32 ? __any_sync(0xffffffffu, x) : __syncthreads_or(x);
    }
};

template <class T>
__device__ __forceinline__ void store_16(const StreamParams &a, int64_t at, float4 x,
                                         float factor) {
    store_4<T>((T *)a.c.p.out + at, x, factor);
}
template <>
__device__ __forceinline__ void store_16<EitherHalf>(const StreamParams &a, int64_t at, float4 x,
                                                     float factor) {
    if (a.is_f16)
        store_16<__half>(a, at, x, factor);
    else
        store_16<__nv_bfloat16>(a, at, x, factor);
}

/* Writes four columns of a row to out. The thread with column 0 also writes lse. */
template <class T>
__device__ __forceinline__ void write_row(const StreamParams &a, const TileShare &x, int head_kv,
                                          int row, int col, const Merged &all) {
    const Paged &p = a.c.p;
    const int token = token_of(a, row), head = head_kv * p.group + row - token * p.group;
    const int64_t at = (int64_t)(x.s.q0 + token) * p.heads_q + head;
    const RowResult f = finish(p, head, all.row.peak, all.row.sum);
    store_16<T>(a, at * p.head_dim_v + col, all.y, f.factor);
    if (col == 0 && p.lse) ((float *)p.lse)[at] = f.lse;
}

/* Merges the splits of blocks first .. last if this block is the last to arrive. Before the call,
 * the team has stored its own split and synchronised. */
template <class T>
__device__ __forceinline__ void join_splits(const StreamParams &a, const TileShare &x, int first,
                                            int last, const Team &team) {
    const Call &c = a.c;
    const int quads = (int)a.of_quads.by;
    bool is_last = false;
    if (team.thread == 0)
        is_last = atom_inc_acq_rel(a.arrived + first * LIST_WARPS + team.head0) ==
                  (unsigned)(last - first);
    if (!team.any(is_last)) return;
    const int rows = x.last_row - x.row0 + 1;
    for (int i = team.thread; i < team.heads * rows * quads; i += team.threads) {
        const int line = (int)a.of_quads.into(i), quad = i - line * quads,
                  block_head = team.head0 + line / rows, row = line % rows;
        const Merged all = sum_splits<paged_hopper::join_splits>(
            c, first, first, last, 1, (int64_t)block_head * c.lanes + row, quad, true);
        write_row<T>(a, x, x.head_set * c.block_heads + block_head, x.row0 + row, quad * 4, all);
    }
}

} // namespace

#endif
