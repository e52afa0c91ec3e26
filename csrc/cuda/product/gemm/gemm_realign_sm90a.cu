/* SPDX-License-Identifier: BSD-3-Clause */
/* gemm_realign_sm90a: copies matrices to where TMA and WGMMA can read them. realign.cuh
 * describes source and result.
 *
 * Grid: a block for every THREADS 16-byte chunks of the copies, one matrix after the other. A
 * thread owns one chunk, so a warp writes 512 contiguous bytes and reads as many. Several chunks
 * a thread, in registers or in a loop, took longer: they need more instructions, and the
 * instruction cache is cold at every launch.
 *
 * A chunk of a dense row is made from the one or two aligned 16-byte chunks around it, by
 * shifting. The second is the next lane's first and comes from L1. The kernel reads both only if
 * they lie inside the batch entry. Chunks that cross its ends, and rows that are not dense, are
 * read element by element.
 *
 * Bytes: 2 read and 2 written for each element. What is written stays in L2 for the product as
 * far as it fits.
 *
 * For small matrices, launches are all of the time. So this kernel starts and computes its
 * addresses while the kernel before drains, and the product's blocks start beside it. It must
 * not use __ldg, because the compiler may move such loads before the wait.
 *
 * Transposed copies: a block takes a tile of 32-bit elements. A warp reads them along `outer`
 * one by one and writes them, through shared memory, in 16-byte chunks along `inner`. */
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
    uint32_t blocks; /* of the first matrix */
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
    griddepcontrol_launch_dependents(); /* the product's blocks may start */
    griddepcontrol_wait(); /* `from` has been written, and reads of `to`'s old contents are done */
    const uint4 low = ld_global_if_128(from_g, whole),
                high = ld_global_if_128(from_g + REALIGN_EACH, whole && shift);
    if (chunk >= x.total) return;
    uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    realign_shift(words, shift);
    if (valid < REALIGN_EACH) realign_cut(words, valid);
    ((uint4 *)x.to)[chunk] =
        whole ? make_uint4(words[0], words[1], words[2], words[3]) : by_elements<BATCHED>(x, chunk);
}

/* Bank conflicts of the lanes' loads of their chunks, which begin in every fourth bank. */
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
    uint32_t v[TRANSPOSE_PASSES]; /* all loads are issued before the first store */
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
    __syncthreads(); /* the tile is complete */
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
