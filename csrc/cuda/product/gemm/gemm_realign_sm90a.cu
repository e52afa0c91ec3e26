/* SPDX-License-Identifier: BSD-3-Clause */
/* gemm_realign_sm90a: copies matrices to where tma and wgmma can read them; realign.cuh says what
 * from and to.
 *
 * Grid: a block per THREADS chunks of 16 bytes of the copies, one matrix after the other. A thread
 * owns one chunk, so that a warp writes 512 bytes in a row and reads as many; several chunks a
 * thread, or rounds of them, took longer: more of the code's lines, which are new to the SM in
 * every launch.
 * A chunk of a dense row: the one or two aligned 16 bytes around it, shifted. The second is what
 * the next lane loads as its first and comes from L1. Both lie in the batch entry, or between its
 * rows: nothing outside is read, not even to be dropped. What lies across its ends, and rows that
 * are not dense, are read element by element.
 * Bytes: (2 read + 2 written) an element; the second half stays in L2 for the product as far as it
 * fits.
 * For small matrices the launches are the time. This kernel starts, and finds its places, while the
 * one before it drains, and the product's blocks get ready beside it. (So no __ldg: the compiler
 * may move such loads before the wait.)
 *
 * Transposed: a block per tile of elements of 32 bits, which a warp reads along `outer` one by one
 * and writes, through shared memory, in chunks of 16 bytes along `inner`. */
#include "../../host/launch.cuh"
#include "../../layout/banks.cuh"
#include "../../ptx/griddepcontrol.cuh"
#include "../../ptx/regs.cuh"
#include "realign.cuh"
#include "tiles.h"

namespace {

constexpr int THREADS = REALIGN_THREADS;

struct Params {
    RealignMatrix matrix[2];
    uint32_t blocks; /* of the first */
};

template <bool BATCHED>
__device__ __forceinline__ uint4 by_elements(const RealignMatrix &x, uint32_t chunk) {
    const RealignPlace at = realign_place<BATCHED>(x, chunk);
    uint32_t e[REALIGN_EACH];
#pragma unroll
    for (int i = 0; i < REALIGN_EACH; ++i)
        e[i] = at.col + i < x.inner ? at.row[(at.col + i) * x.inner_stride] : 0;
    return make_uint4(e[0] | e[1] << 16, e[2] | e[3] << 16, e[4] | e[5] << 16, e[6] | e[7] << 16);
}

template <bool BATCHED>
__global__ void __launch_bounds__(THREADS, REALIGN_PER_SM)
    realign_kernel(const __grid_constant__ Params p) {
    const bool second = blockIdx.x >= p.blocks;
    const RealignMatrix &x = p.matrix[second];
    const uint32_t chunk = (blockIdx.x - (second ? p.blocks : 0)) * THREADS + threadIdx.x;
    const RealignPlace at = realign_place<BATCHED>(x, chunk);
    const int shift = (int)((uintptr_t)at.row / 2 % REALIGN_EACH), valid = x.inner - at.col;
    const bool whole = chunk < x.total && realign_whole(x, at, shift);
    const uint16_t *from_g = at.row + at.col - shift;
    griddepcontrol_launch_dependents(); /* the product's blocks may get ready */
    griddepcontrol_wait();              /* `from` is written, and what was in `to` is read */
    const uint4 low = ld_global_if_128(from_g, whole),
                high = ld_global_if_128(from_g + REALIGN_EACH, whole && shift);
    if (chunk >= x.total) return;
    uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    realign_shift(words, shift);
    if (valid < REALIGN_EACH) realign_cut(words, valid);
    ((uint4 *)x.to)[chunk] =
        whole ? make_uint4(words[0], words[1], words[2], words[3]) : by_elements<BATCHED>(x, chunk);
}

/* Bank conflicts of the lanes that gather their chunks, which begin in every fourth bank alone. */
constexpr GK_HD int transpose_ways() {
    int bytes[32] = {};
    for (int lane = 0; lane < 32; ++lane) {
        const coord at = transpose_chunk(lane, 0);
        bytes[lane] = transpose_at(at.col, at.row) * 4;
    }
    return ways(bytes, 4);
}
static_assert(transpose_ways() == 2, "conflicts as foreseen");

__global__ void __launch_bounds__(THREADS) transpose_kernel(const __grid_constant__ Transpose p) {
    __shared__ uint32_t tile[REALIGN_TRANSPOSE * TRANSPOSE_LD];
    const RealignMatrix &x = p.matrix;
    const TransposeTile at = transpose_tile(p, blockIdx.x);
    const coord first = transpose_read((int)threadIdx.x, 0);
    const uint32_t *from_g = (const uint32_t *)x.from + transpose_from(x, at, first.row, first.col);
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();        /* as above */
    uint32_t v[TRANSPOSE_PASSES]; /* all loads are under way before the first is stored */
#pragma unroll
    for (int c = 0; c < TRANSPOSE_PASSES; ++c) {
        const coord read = transpose_read((int)threadIdx.x, c);
        v[c] = transpose_has(at, read.row, read.col) ? *from_g : 0;
        from_g += TRANSPOSE_PASS_ROWS * x.inner_stride;
    }
#pragma unroll
    for (int c = 0; c < TRANSPOSE_PASSES; ++c) {
        const coord read = transpose_read((int)threadIdx.x, c);
        tile[transpose_at(read.row, read.col)] = v[c];
    }
    __syncthreads(); /* the tile is there */
#pragma unroll
    for (int c = 0; c < TRANSPOSE_CHUNKS; ++c) {
        const coord chunk = transpose_chunk((int)threadIdx.x, c);
        const uint32_t *from_s = tile + transpose_at(chunk.col, chunk.row);
        if (transpose_has(at, chunk.col, chunk.row))
            ((uint4 *)x.to)[transpose_to(x, at, chunk)] =
                make_uint4(from_s[0], from_s[TRANSPOSE_LD], from_s[2 * TRANSPOSE_LD],
                           from_s[3 * TRANSPOSE_LD]);
    }
}

gk_status transpose(const char *op, const gk_context *ctx, const RealignMatrix &x) {
    uint32_t blocks;
    const Transpose p = transpose_of(x, &blocks);
    return launch<transpose_kernel>(op, ctx, dim3(blocks), THREADS, 0, p, true);
}

} // namespace

gk_status realign(const char *op, const gk_context *ctx, const RealignMatrix *matrices, int count) {
    Params p = {};
    uint32_t blocks[2] = {0, 0};
    int together = 0;
    bool batched = false;
    for (int i = 0; i < count; ++i) {
        if (matrices[i].transposed) {
            const gk_status status = transpose(op, ctx, matrices[i]);
            if (status != GK_OK) return status;
            continue;
        }
        p.matrix[together] = matrices[i];
        batched |= matrices[i].ndim > 0;
        blocks[together++] = (uint32_t)gk_ceil_div(matrices[i].total, THREADS);
    }
    p.blocks = blocks[0];
    const dim3 grid(blocks[0] + blocks[1]);
    return batched ? launch<realign_kernel<true>>(op, ctx, grid, THREADS, 0, p, true)
                   : launch<realign_kernel<false>>(op, ctx, grid, THREADS, 0, p, true);
}
