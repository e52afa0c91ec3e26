/* SPDX-License-Identifier: BSD-3-Clause */
/* gemm_sm90a: out = activation(alpha a b + beta c + bias) on Hopper for bfloat16 and float16, by
 * WGMMA with operands copied by TMA. It uses the cooperative schedule: the consumer warpgroups
 * of a block share a tile, BM / WGS rows each. hopper.cuh describes what all schedules share.
 *
 * a [batch, M, K], b [batch, K, N]: each K-major or MN-major, with other strides that are
 * multiples of 16 bytes. Any other operand is first copied into the call's workspace
 * (gemm_realign_sm90a). bias [N], c broadcasts, out [batch, M, N], preact like out. Sums are
 * float32 and rounded once.
 *
 * Pipeline (stages full and empty: tma_ring.cuh):
 *   producer    k0 k1 k2 k3 | k4      k5         ..
 *   consumers               | 0 .. 1 .. 2 ..
 * A consumer issues step j, waits for step j - 1, and releases the stage of step j - 1. The
 * producer goes on with the next tile while this tile's sums are stored.
 *
 * Results of a's dtype go through staging tiles and leave by TMA. If a block has one tile, or
 * TMA cannot write the rows, they are stored from registers in 16-byte chunks. Three kinds of
 * results are stored from registers 8 elements at a time: float32 results of 16-bit operands, a
 * c that cannot be read in pairs, and rows that are not dense. c of a large tile is prefetched
 * into L2 under its products.
 *
 * Workspace: the copies, (rows or columns) x (k rounded up to 16 bytes) each, or transposed.
 *
 * Refuses: float32 (gemm_tf32_sm90a, gemm_plain), K = 0 (gemm_sm80), M or N of at most 16 with
 * small K (gemm_skinny). Small M is gemm_swapab_sm90a's. */
#include "hopper_launch.cuh"

namespace {

template <class T, class Shape, int MODE> struct GemmCooperative : Gemm<T, Shape, MODE> {
    typedef Gemm<T, Shape, MODE> Base;
    typedef typename Base::S S;
    typedef Shell<GemmCooperative> Block;
    static constexpr bool TMA = BY_TMA<T, Shape>;
    static_assert(S::MT == 1 && !Shape::SWAP_AB && !Shape::PING_PONG,
                  "a cooperative tile of 64 rows a warpgroup");

    struct Consumer {
        const OwnProblem &p;
        float sum[1][Shape::BN / 2];
        unsigned exchange_parity = 0, batch = 0;
        const int row0;
        coord tile = {};
        tma_at at = {};

        __device__ __forceinline__ explicit Consumer(Block &shell)
            : p(shell.p.p), row0(Shape::WGS > 1 ? shell.me.warpgroup * 64 : 0) {}

        __device__ __forceinline__ bool take(Block &shell, unsigned t, int) {
            const typename Base::Thread &block = shell.me;
            const GemmParams &x = shell.p;
            block.find_results(t, batch, tile, at);
            if (t == shell.first()) griddepcontrol_wait(); /* for the bias and c */
            prefetch_epilogue(p.epilogue);
            if (x.plain) prefetch_bias<S::COLS>(p, tile.col + block.part * S::COLS, block.lane);
            own_prefetch<S::COLS>(p, tile.row + row0 + block.warp * 16,
                                  tile.col + block.part * S::COLS, block.lane);
            if (TMA && !x.across) /* in small tiles its loop would cost every step 5 instructions */
                prefetch_c<S::COLS>(p, batch, tile.row + row0 + block.warp * 16,
                                    tile.col + block.part * S::COLS, block.lane);
            block.multiply(shell.ring, sum, row0, Base::steps(shell, t));
            block.end_products(sum, shell.ring.before(), shell.part_steps);
            if constexpr (Base::HALVES)
                if (block.halved(t) && !block.add_halves(sum[0])) return false;

            const int lane = threadIdx.x % 32;
            const smem_addr staging_s = block.staging_s();
            const auto store = [&](auto &sums) {
                const int row = tile.row + row0, col = tile.col + block.part * S::COLS;
                at.c[0] = col;
                at.c[1] = row + block.warp * 16;
                if (!OWN_EPILOGUE && x.no_epilogue)
                    store_panels<T, typename S::Panel, Shape::PANELS, STORE_SUMS, TMA>(
                        x, sums, staging_s, at, batch, lane);
                else if (x.cheap_epilogue)
                    store_panels<T, typename S::Panel, Shape::PANELS, STORE_CHEAP, TMA>(
                        x, sums, staging_s, at, batch, lane);
                else if (OWN_EPILOGUE || x.plain || x.unaligned)
                    store_panels<T, typename S::Panel, Shape::PANELS, STORE_UNALIGNED, TMA>(
                        x, sums, staging_s, at, batch, lane);
                else if constexpr (!OWN_EPILOGUE)
                    store_any<T, S::COLS>(p, gemm_place(p, batch), sums, staging_s,
                                          row + block.warp * 16, p.m, col, x.across, lane);
            };
            if constexpr (Shape::SPLITS > 1) {
                float mine[1][Shape::BN / 2 / Shape::SPLITS];
                block.exchange(sum, mine, exchange_parity);
                store(mine[0]);
            } else {
                store(sum[0]);
            }
            return true;
        }
        __device__ __forceinline__ void end(Block &shell) {
            /* Shared memory must stay allocated until TMA has read it. */
            if (TMA && shell.me.lane == 0) tma_store_wait_group_read<0>();
            shell.me.end_exchange(exchange_parity);
        }
    };
};

} // namespace

/* The plan halves tiles (HALVES) where the kernel can (TAIL). */
#define SM90_COOP(type, name, bm, bn, stages, wgs, panels, tiles, splits, k64, percent, bytes) \
    static_assert(TAIL<__nv_bfloat16, type, 0> == ((COOP_TRAITS(wgs, tiles) & HALVES) != 0) && \
                      (type::ACROSS != 0) == ((COOP_TRAITS(wgs, tiles) & GRID) != 0),          \
                  "traits");                                                                   \
    HOPPER_LAUNCH_16(gemm_sm90a, GemmCooperative, type, bytes)
#define SM90_NARROW SM90_COOP
#include "instances.def"
