/* gemm_realign_sm90a: copies matrices to where tma and wgmma can read them; realign.cuh says what from and to.
 *
 * Grid: a block per THREADS chunks of 16 bytes of the copies, one matrix after the other. A thread owns one chunk, so that a
 * warp writes 512 bytes in a row and reads as many; several chunks a thread, or rounds of them, took longer: more of the
 * code's lines, which are new to the SM in every launch.
 * A chunk of a dense row: the one or two aligned 16 bytes around it, shifted. The second is what the next lane loads as
 * its first and comes from L1. Both lie in the batch entry, or between its rows: nothing outside is read, not even to be
 * dropped. What lies across its ends, and rows that are not dense, are read element by element.
 * Bytes: (2 read + 2 written) an element; the second half stays in L2 for the product as far as it fits.
 * For small matrices the launches are the time. This kernel starts, and finds its places, while the one before it drains, and
 * the product's blocks get ready beside it. (So no __ldg: the compiler may move such loads before the wait.)
 *
 * Turned: a block per tile of TURN x TURN elements of 16 or 32 bits, which a warp reads along `outer` one by one, since lines
 * begin anywhere, and writes, through shared memory [inner][outer + 1], in chunks of 16 bytes along `inner`. */
#include "../host/launch.cuh"
#include "../ptx/griddepcontrol.cuh"
#include "../ptx/regs.cuh"
#include "realign.cuh"
#include "tiles.h"

namespace {

constexpr int THREADS = REALIGN_THREADS;

struct Params {
    RealignMatrix matrix[2];
    uint32_t blocks; /* of the first */
};

template <bool BATCHED> __device__ __forceinline__ uint4 by_elements(const RealignMatrix &x, uint32_t chunk) {
    const RealignPlace at = realign_place<BATCHED>(x, chunk);
    uint32_t e[REALIGN_EACH];
#pragma unroll
    for (int i = 0; i < REALIGN_EACH; ++i) e[i] = at.col + i < x.inner ? at.row[(at.col + i) * x.inner_stride] : 0;
    return make_uint4(e[0] | e[1] << 16, e[2] | e[3] << 16, e[4] | e[5] << 16, e[6] | e[7] << 16);
}

template <bool BATCHED>
__global__ void __launch_bounds__(THREADS, REALIGN_PER_SM) realign_kernel(const __grid_constant__ Params p) {
    const bool second = blockIdx.x >= p.blocks;
    const RealignMatrix &x = p.matrix[second];
    const uint32_t chunk = (blockIdx.x - (second ? p.blocks : 0)) * THREADS + threadIdx.x;
    const RealignPlace at = realign_place<BATCHED>(x, chunk);
    const int skew = (int)((uintptr_t)at.row / 2 % REALIGN_EACH), valid = x.inner - at.col;
    const bool whole = chunk < x.total && realign_whole(x, at, skew);
    const uint16_t *from_g = at.row + at.col - skew;
    griddepcontrol_launch_dependents(); /* the product's blocks may get ready */
    griddepcontrol_wait();              /* `from` is written, and what was in `to` is read */
    const uint4 low = ld_global_if_128(from_g, whole), high = ld_global_if_128(from_g + REALIGN_EACH, whole && skew);
    if (chunk >= x.total) return;
    uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    realign_shift(words, skew);
    if (valid < REALIGN_EACH) realign_cut(words, valid);
    ((uint4 *)x.to)[chunk] =
        whole ? make_uint4(words[0], words[1], words[2], words[3]) : by_elements<BATCHED>(x, chunk);
}

constexpr int TURN = REALIGN_TURN, TURN_LD = TURN + 1;
constexpr int PASS_ROWS = THREADS / TURN, PASSES = TURN / PASS_ROWS;
static_assert(TURN % 32 == 0 && THREADS % TURN == 0 && TURN % PASS_ROWS == 0, "a warp reads along `outer`");

/* Thread t's chunk c of a tile, which lies along `inner`: where in `outer`, in `inner`. */
template <class E> constexpr GK_HD coord turn_chunk(int t, int c) {
    constexpr int EACH = 16 / (int)sizeof(E);
    const int at = c * THREADS + t;
    return {at / (TURN / EACH), at % (TURN / EACH) * EACH};
}
/* Bank conflicts of the lanes that gather their chunks; of 32 bits these begin in every fourth bank alone. */
template <class E> constexpr GK_HD int turn_ways() {
    int bytes[32] = {};
    for (int lane = 0; lane < 32; ++lane) {
        const coord at = turn_chunk<E>(lane, 0);
        bytes[lane] = (at.col * TURN_LD + at.row) * (int)sizeof(E);
    }
    return ways(bytes, (int)sizeof(E));
}
static_assert(turn_ways<uint16_t>() == 1 && turn_ways<uint32_t>() == 2, "conflicts as foreseen");

__device__ __forceinline__ uint4 turned_chunk(const uint32_t *from_s) {
    return make_uint4(from_s[0], from_s[TURN_LD], from_s[2 * TURN_LD], from_s[3 * TURN_LD]);
}
__device__ __forceinline__ uint4 turned_chunk(const uint16_t *from_s) {
    uint32_t two[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) two[i] = from_s[2 * i * TURN_LD] | (uint32_t)from_s[(2 * i + 1) * TURN_LD] << 16;
    return make_uint4(two[0], two[1], two[2], two[3]);
}

struct TurnParams {
    RealignMatrix matrix;
    uint32_t tiles_inner, tiles_outer;
};

template <class E>
__global__ void __launch_bounds__(THREADS) realign_turn_kernel(const __grid_constant__ TurnParams p) {
    constexpr int EACH = 16 / (int)sizeof(E), CHUNKS = TURN * TURN / EACH / THREADS;
    static_assert(TURN * TURN % (THREADS * EACH) == 0 && CHUNKS > 0, "whole passes");
    __shared__ E tile[TURN * TURN_LD];
    const RealignMatrix &x = p.matrix;
    /* neighbours along `outer` run together: they read the same rows of `from` */
    const uint32_t tile_outer = blockIdx.x % p.tiles_outer, rest = blockIdx.x / p.tiles_outer;
    const uint32_t tile_inner = rest % p.tiles_inner, entry = rest / p.tiles_inner;
    const int inner = x.inner / ((int)sizeof(E) / 2) - (int)tile_inner * TURN,
              outer = (int)x.outer.by - (int)tile_outer * TURN;
    const int o_read = (int)threadIdx.x % TURN, i_read = (int)threadIdx.x / TURN;
    const E *from_g = (const E *)x.from + realign_entry(x, entry) +
                      ((int64_t)tile_inner * TURN + i_read) * x.inner_stride +
                      ((int64_t)tile_outer * TURN + o_read) * x.outer_stride;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait(); /* as above */
    E v[PASSES];           /* all loads are under way before the first is stored */
#pragma unroll
    for (int c = 0; c < PASSES; ++c) {
        v[c] = o_read < outer && i_read + c * PASS_ROWS < inner ? *from_g : 0;
        from_g += PASS_ROWS * x.inner_stride;
    }
#pragma unroll
    for (int c = 0; c < PASSES; ++c) tile[(i_read + c * PASS_ROWS) * TURN_LD + o_read] = v[c];
    __syncthreads(); /* the tile is there */
    const uint32_t row0 = entry * x.outer.by + tile_outer * TURN;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const coord at = turn_chunk<E>((int)threadIdx.x, c);
        if (at.col >= inner || at.row >= outer) continue;
        ((uint4 *)x.to)[(int64_t)(row0 + at.row) * x.chunks.by + (tile_inner * TURN + at.col) / EACH] =
            turned_chunk(tile + at.col * TURN_LD + at.row);
    }
}

template <class E> gk_status turn(const char *op, const gk_context *ctx, const RealignMatrix &x) {
    const int64_t inner = x.inner / ((int64_t)sizeof(E) / 2);
    const TurnParams p = {x, (uint32_t)gk_ceil_div(inner, TURN), (uint32_t)gk_ceil_div(x.outer.by, TURN)};
    const uint32_t entries = x.total / x.chunks.by / x.outer.by; /* each tile has a chunk: so many blocks fit */
    return launch<realign_turn_kernel<E>>(op, ctx, dim3(entries * p.tiles_inner * p.tiles_outer), THREADS, 0, p, true);
}

} // namespace

gk_status realign(const char *op, const gk_context *ctx, const RealignMatrix *matrices, int count) {
    Params p = {};
    uint32_t blocks[2] = {0, 0};
    int together = 0;
    bool batched = false;
    for (int i = 0; i < count; ++i) {
        if (matrices[i].turned) {
            const auto turn_it = matrices[i].turned == 2 ? turn<uint16_t> : turn<uint32_t>;
            const gk_status status = turn_it(op, ctx, matrices[i]);
            if (status != GK_OK) return status;
            continue;
        }
        p.matrix[together] = matrices[i], batched |= matrices[i].ndim > 0;
        blocks[together++] = (uint32_t)gk_ceil_div(matrices[i].total, THREADS);
    }
    p.blocks = blocks[0];
    const dim3 grid(blocks[0] + blocks[1]);
    return batched ? launch<realign_kernel<true>>(op, ctx, grid, THREADS, 0, p, true)
                   : launch<realign_kernel<false>>(op, ctx, grid, THREADS, 0, p, true);
}
