/* SPDX-License-Identifier: BSD-3-Clause */
/* paged_join.cuh: how splits of paged_attn_sm90a's list become one inside the kernel. Each block
 * stores its split, then counts itself at the tile; the one that comes last merges all of them, in
 * the order of the splits: so whoever it is, the bits are the same, and nobody waits.
 *
 * Counts are zeroed by a small kernel ahead of the list: memory that is left zeroed for the next
 * call would be a state, which two graphs that replay at once would share. */
#ifndef GPUKERN_CUDA_PAGED_JOIN_CUH
#define GPUKERN_CUDA_PAGED_JOIN_CUH

#include "../../ptx/flag.cuh"
#include "../../ptx/griddepcontrol.cuh"
#include "paged_combine.cuh"
#include "paged_stream.cuh"

namespace {

/* ---- 1. ahead of the list -------------------------------------------------------------------- */
struct BeginParams {
    Paged p;
    unsigned *arrived; /* [count] */
    int count;
};

/* Block 0 zeroes the counts; a warp of those after it asks whether a token is anybody's. */
template <class T>
__global__ void __launch_bounds__(COMBINE_THREADS) paged_begin_kernel(BeginParams x) {
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    if (blockIdx.x == 0)
        for (int i = threadIdx.x; i < x.count; i += COMBINE_THREADS) x.arrived[i] = 0;
    else
        clear_unowned_token<T>(x.p, ((int)blockIdx.x - 1) * COMBINE_WARPS + (int)threadIdx.x / 32);
}

template <class T> gk_status launch_begin(const gk_context *ctx, const Call &c, unsigned *arrived) {
    const BeginParams x = {c.p, arrived, c.blocks * LIST_WARPS};
    const int64_t askers = c.p.cu_q ? gk_ceil_div(c.p.tokens, COMBINE_WARPS) : 0;
    return launch<paged_begin_kernel<T>>("gk_paged_attn", ctx, dim3((unsigned)(1 + askers)),
                                         COMBINE_THREADS, 0, x, true);
}

/* ---- 2. the merge ------------------------------------------------------------ */
/* Threads that merge a share's sums: of the warp, if it alone has the tile's head, else of the
 * block. */
struct Team {
    int thread, threads, head0, heads; /* heads [head0, head0 + heads) of the block's */
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
__device__ __forceinline__ void write_row(const Paged &p, const TileShare &x, int head_kv, int row,
                                          int col, const Merged &all) {
    const int token = row / p.group, head = head_kv * p.group + row - token * p.group;
    const int64_t at = (int64_t)(x.s.q0 + token) * p.heads_q + head;
    const RowResult f = finish(p, head, all.row.peak, all.row.sum);
    store_4<T>((T *)p.out + at * p.head_dim_v + col, all.y, f.factor);
    if (col == 0 && p.lse) ((float *)p.lse)[at] = f.lse;
}

/* Blocks first .. last have splits of the tile; this one's is stored, and a barrier of the team is
 * behind it. */
template <class T, int HEAD_DIM>
__device__ __forceinline__ void join_splits(const StreamParams &a, const TileShare &x, int first,
                                            int last, const Team &team) {
    constexpr int QUADS = HEAD_DIM / 4;
    const Call &c = a.c;
    bool is_last = false;
    if (team.thread == 0)
        is_last = atom_inc_acq_rel(a.arrived + first * LIST_WARPS + team.head0) ==
                  (unsigned)(last - first);
    if (!team.any(is_last)) return;
    const int rows = x.last_row - x.row0 + 1;
    for (int i = team.thread; i < team.heads * rows * QUADS; i += team.threads) {
        const int line = i / QUADS, quad = i % QUADS, block_head = team.head0 + line / rows,
                  row = line % rows;
        const Merged all =
            sum_splits(c, first, first, last, 1, (int64_t)block_head * c.lanes + row, quad, true);
        write_row<T>(c.p, x, x.head_set * c.block_heads + block_head, x.row0 + row, quad * 4, all);
    }
}

} // namespace

#endif
