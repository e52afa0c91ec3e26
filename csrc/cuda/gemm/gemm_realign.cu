/* gemm_realign: copies matrices to where tma and wgmma can read them; realign.cuh says what from and to.
 *
 * Grid: a block per THREADS x REALIGN_CHUNKS chunks of 16 bytes of the copies, one matrix after the other. A thread owns
 * chunks THREADS apart, so that a warp writes 512 bytes in a row and reads as many, and has the loads of all its chunks
 * under way at once.
 * A chunk of a dense row: the one or two aligned 16 bytes around it, shifted. The second is what the next lane loads as
 * its first and comes from L1. Both must lie in the row: nothing outside of the matrix is read, not even to be dropped. The
 * ends of rows, and rows that are not dense, are read element by element.
 * Bytes: (2 read + 2 written) an element; the second half stays in L2 for the product as far as it fits.
 *
 * Turned: a block per tile of TURN x TURN elements of 32 bits, which a warp reads along `outer` and writes, through
 * shared memory [inner][outer + 1], in chunks of 16 bytes along `inner`. */
#include "../host/launch.cuh"
#include "realign.cuh"
#include "tiles.h"

namespace {

constexpr int THREADS = REALIGN_THREADS, CHUNKS = REALIGN_CHUNKS;

struct Params {
    RealignMatrix matrix[2];
    uint32_t blocks; /* of the first */
};

__device__ __forceinline__ uint4 by_elements(const RealignMatrix &x, const RealignPlace &at) {
    uint32_t e[REALIGN_EACH];
    const uint16_t *from_g = x.inner_stride == 1 ? at.row + at.col : at.row + at.col * x.inner_stride;
#pragma unroll
    for (int i = 0; i < REALIGN_EACH; ++i) {
        e[i] = at.col + i < x.inner ? __ldg(from_g) : 0;
        from_g += x.inner_stride;
    }
    return make_uint4(e[0] | e[1] << 16, e[2] | e[3] << 16, e[4] | e[5] << 16, e[6] | e[7] << 16);
}

__device__ __forceinline__ uint4 shifted(uint4 low, uint4 high, int skew) {
    uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    realign_shift(words, skew);
    return make_uint4(words[0], words[1], words[2], words[3]);
}

__global__ void __launch_bounds__(THREADS, REALIGN_PER_SM) realign_kernel(const __grid_constant__ Params p) {
    const bool second = blockIdx.x >= p.blocks;
    const RealignMatrix &x = p.matrix[second];
    const uint32_t first = (blockIdx.x - (second ? p.blocks : 0)) * (THREADS * CHUNKS) + threadIdx.x;
    uint4 low[CHUNKS], high[CHUNKS];
    int skew[CHUNKS]; /* -1: not loaded */
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        low[c] = high[c] = make_uint4(0, 0, 0, 0), skew[c] = -1;
        if (first + c * THREADS >= x.total) continue;
        const RealignPlace at = realign_place(x, first + c * THREADS);
        const int row_skew = (int)((uintptr_t)at.row / 2 % REALIGN_EACH);
        if (x.inner_stride != 1 || !realign_whole(at.col, x.inner, row_skew)) continue;
        const uint4 *from_g = (const uint4 *)(at.row + at.col - row_skew);
        low[c] = __ldg(from_g), skew[c] = row_skew;
        if (row_skew) high[c] = __ldg(from_g + 1);
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const uint32_t chunk = first + c * THREADS;
        if (chunk >= x.total) break;
        if (skew[c] < 0) low[c] = by_elements(x, realign_place(x, chunk)), skew[c] = 0;
        ((uint4 *)x.to)[chunk] = shifted(low[c], high[c], skew[c]);
    }
}

constexpr int TURN = REALIGN_TURN, TURN_LD = TURN + 1, TURN_EACH = 4;
constexpr int PASS_ROWS = THREADS / TURN, PASSES = TURN / PASS_ROWS;
static_assert(TURN % 32 == 0 && THREADS % TURN == 0 && TURN % PASS_ROWS == 0, "a warp reads along `outer`");
static_assert(TURN * TURN % (THREADS * TURN_EACH) == 0, "whole passes");

struct TurnParams {
    RealignMatrix matrix;
    uint32_t tiles_inner, tiles_outer;
};

__global__ void __launch_bounds__(THREADS) realign_turn_kernel(const __grid_constant__ TurnParams p) {
    __shared__ uint32_t tile[TURN * TURN_LD];
    const RealignMatrix &x = p.matrix;
    /* neighbours along `outer` run together: they read the same rows of `from` */
    const uint32_t tile_outer = blockIdx.x % p.tiles_outer, rest = blockIdx.x / p.tiles_outer;
    const uint32_t tile_inner = rest % p.tiles_inner, entry = rest / p.tiles_inner;
    const int inner = x.inner / 2 - (int)tile_inner * TURN, outer = (int)x.outer.by - (int)tile_outer * TURN;
    const int o_read = (int)threadIdx.x % TURN, i_read = (int)threadIdx.x / TURN;
    const uint32_t *from_g = (const uint32_t *)x.from + realign_entry(x, entry) +
                             ((int64_t)tile_inner * TURN + i_read) * x.inner_stride +
                             ((int64_t)tile_outer * TURN + o_read) * x.outer_stride;
    uint32_t v[PASSES]; /* all loads are under way before the first is stored */
#pragma unroll
    for (int c = 0; c < PASSES; ++c) {
        v[c] = o_read < outer && i_read + c * PASS_ROWS < inner ? __ldg(from_g) : 0;
        from_g += PASS_ROWS * x.inner_stride;
    }
#pragma unroll
    for (int c = 0; c < PASSES; ++c) tile[(i_read + c * PASS_ROWS) * TURN_LD + o_read] = v[c];
    __syncthreads(); /* the tile is there */
    const uint32_t row0 = entry * x.outer.by + tile_outer * TURN;
#pragma unroll
    for (int c = 0; c < TURN * TURN / TURN_EACH / THREADS; ++c) {
        const int at = c * THREADS + (int)threadIdx.x, o = at / (TURN / TURN_EACH),
                  i = at % (TURN / TURN_EACH) * TURN_EACH;
        if (i >= inner || o >= outer) continue;
        const uint32_t *from_s = tile + i * TURN_LD + o;
        ((uint4 *)x.to)[(int64_t)(row0 + o) * x.chunks.by + (tile_inner * TURN + i) / TURN_EACH] =
            make_uint4(from_s[0], from_s[TURN_LD], from_s[2 * TURN_LD], from_s[3 * TURN_LD]);
    }
}

gk_status turn(const char *op, const gk_context *ctx, const RealignMatrix &x) {
    const TurnParams p = {x, (uint32_t)gk_ceil_div(x.inner / 2, TURN), (uint32_t)gk_ceil_div(x.outer.by, TURN)};
    const uint32_t entries = x.total / x.chunks.by / x.outer.by; /* each tile has a chunk: so many blocks fit */
    return launch<realign_turn_kernel>(op, ctx, dim3(entries * p.tiles_inner * p.tiles_outer), THREADS, 0, p);
}

} // namespace

gk_status realign(const char *op, const gk_context *ctx, const RealignMatrix *matrices, int count) {
    Params p = {};
    uint32_t blocks[2] = {0, 0};
    int together = 0;
    for (int i = 0; i < count; ++i) {
        if (matrices[i].turned) {
            const gk_status status = turn(op, ctx, matrices[i]);
            if (status != GK_OK) return status;
            continue;
        }
        p.matrix[together] = matrices[i];
        blocks[together++] = (uint32_t)gk_ceil_div(matrices[i].total, THREADS * CHUNKS);
    }
    p.blocks = blocks[0];
    return launch<realign_kernel>(op, ctx, dim3(blocks[0] + blocks[1]), THREADS, 0, p);
}
