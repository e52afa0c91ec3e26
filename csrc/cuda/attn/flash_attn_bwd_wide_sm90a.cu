/* flash_attn_bwd_wide_sm90a: flash_attn_bwd_sm90a (see there for the equations) for head_dim up to 256, where dK and dV of 64
 * keys fill the registers of a warpgroup each.
 * q, grad_out [.., Sq, D | Dv]  k, v [.., Sk, D | Dv], as TMA can describe them; stats of the pre-pass.
 * Writes dk, dv (rounded once) and adds dQ into dq_sum (float32), which the last pass scales, rounds and writes.
 *
 * Work split: a block owns 64 keys of one kv head and goes over the rows that see them, 64 at a time. In S^T and dP^T a
 * warpgroup has all keys and half of the rows; P^T and dS^T go through shared memory. Then warpgroup 0 makes dV, warpgroup 1
 * dK, and each half of d of dQ, which it adds to memory straight from its accumulators.
 *
 * A step of a consumer                                           (tensor cores work in the background)
 *   issue S^T, dP^T of half the rows;  wait for S^T;  P^T to shared memory      runs under dP^T
 *   wait for dP^T;  dS^T to shared memory
 *   barrier of both warpgroups;  issue dQ;  issue dV or dK
 *   wait for dQ, add it to memory                                               runs under dV, dK
 *   wait for dV or dK;  the step after releases Q and dO
 *
 * Not handled, served by flash_attn_bwd_sm80: strides and offsets that TMA cannot take. */
#include "bwd_consumer.cuh"

namespace {

/* ---- 1. a consumer warpgroup ---------------------------------------------------------------------------- */
template <class T, class Tile_, bool MODIFIED, bool ORDERED_> struct BwdWideConsumer {
    typedef Tile_ Tile;
    typedef T Element;
    static constexpr bool ORDERED = ORDERED_;
    typedef BwdSmem<Tile> S;
    typedef DqShape<Tile> Dq;
    static constexpr int BQ = Tile::BQ, BKV = Tile::BKV, D = Tile::HEAD_DIM, N = BQ / 2 / 8;
    static_assert(D == Tile::HEAD_DIM_V && BKV == 64 && D > 128,
                  "dV and dK are made alike; dQ is two blocks of 64 of d");
    float sum[D / 2]; /* dV in warpgroup 0, dK in warpgroup 1 */

    /* P^T or dS^T [64 keys][this warpgroup's rows]. */
    static __device__ __forceinline__ void store_scores(smem_addr tile_s, const uint32_t (&x)[N * 2]) {
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            const uint32_t four[4] = {x[2 * n], x[2 * n + 1], x[2 * n + 2], x[2 * n + 3]};
            const coord c = scores_place(mov_tid_x(), n, BQ / 2);
            stmatrix_x4(tile_s + S::Scores::offset_of(c.row, c.col), four);
        }
    }

    __device__ __forceinline__ void run(const BwdHopperParams &x, const BwdWork &w, const unsigned char *smem,
                                        smem_addr smem_s, int warpgroup) {
        const Bwd &g = x.g;
        const bool signals = threadIdx.x % 128 == 0;
        const int steps = w.tiles * g.p.group;
        const float scale_log2 = (float)g.p.rules.scale * LOG2_E;
        const tma_steps<Tile::STAGES> ring = {smem_s + S::RING};
        const BwdTileOf *tiles = (const BwdTileOf *)(smem + S::TILES);
        const smem_addr tiles_s = smem_s + S::TILES;
#pragma unroll
        for (int i = 0; i < D / 2; ++i) sum[i] = 0;

        mbarrier_wait(smem_s + S::KV_FULL, 0);
        if (steps > 0) ring.wait_full(0);
        uint2 now = steps > 0 ? ld_shared_64(tiles_s) : make_uint2(0, 0); /* tile, edge */
#pragma unroll 1
        for (int n = 0; n < steps; ++n) {
            const smem_addr q_s = smem_s + S::Q_AT + ring.stage(n) * S::Q::bytes;
            const smem_addr o_s = smem_s + S::O_AT + ring.stage(n) * S::O::bytes;
            const smem_addr p_s = smem_s + S::DS_AT + (n & 1) * 2 * S::Scores::bytes, ds_s = p_s + S::Scores::bytes;
            const BwdTileOf &t = tiles[ring.stage(n)];
            float s[N * 4], dp[N * 4];
            uint32_t p[N * 2], ds[N * 2];
            wgmma_fence();
#pragma unroll
            for (int kk = 0; kk < D; kk += 16)
                wgmma_ss<T, BQ / 2, 0, 0>(s, S::K::k_major(smem_s + S::K_AT, 0, kk),
                                          S::Q::k_major(q_s, BQ / 2 * warpgroup, kk), kk > 0);
            wgmma_commit_group();
            wgmma_fence();
#pragma unroll
            for (int kk = 0; kk < D; kk += 16)
                wgmma_ss<T, BQ / 2, 0, 0>(dp, S::V::k_major(smem_s + S::V_AT, 0, kk),
                                          S::O::k_major(o_s, BQ / 2 * warpgroup, kk), kk > 0);
            wgmma_commit_group();
            wgmma_wait_group<1>();
            wgmma_pin(s);
            if (!MODIFIED) {
                if (now.y) hide(s, w.seq, own_key(w, 0), t.i0 + BQ / 2 * warpgroup + laneid() % 4 * 2);
                weights(s, own_stats<Tile>(smem_s, n) + BQ / 2 * 4 * warpgroup, scale_log2);
            }
            mbarrier_wait(smem_s + S::KV_FULL,
                          0); /* over for ever: ends a basic block, ptxas moves nothing past the wait */
            /* here and not sooner: its registers would be those of the additions, and the products would wait for them */
            if (n > 0 && signals) mbarrier_arrive(ring.empty(n - 1));
            wgmma_wait_group<0>();
            wgmma_pin(dp);
            const smem_addr stats_s = own_stats<Tile>(smem_s, n) + BQ / 2 * 4 * warpgroup;
            if (MODIFIED) {
                const Score score = {g.scale, g.softcap, t.slope, span_clamp(w.seq.diagonal)};
                modified_gradients<T>(s, dp, p, ds, stats_s, stats_s + BQ * 4, score, w.seq, own_key(w, 0),
                                      t.i0 + BQ / 2 * warpgroup + laneid() % 4 * 2);
            } else {
                gradients<T>(s, dp, p, ds, stats_s + BQ * 4);
            }
            store_scores(p_s, p);
            store_scores(ds_s, ds);

            consumers_sync(); /* P and dS are whole; and nobody reads those of the step before any more */
            float dq[2][BQ / 2];
            wgmma_fence();
#pragma unroll
            for (int b = 0; b < 2; ++b) /* of three blocks the fourth reads V for K, and is not added */
#pragma unroll
                for (int kk = 0; kk < BKV; kk += 16)
                    wgmma_ss<T, BQ, 1, 1>(
                        dq[b], S::K::mn_major(smem_s + S::K_AT + (2 * warpgroup + b) * S::K::panel_bytes, kk),
                        S::Scores::mn_major(ds_s, kk), kk > 0);
            wgmma_commit_group();
            const smem_addr left_s = warpgroup == 0 ? p_s : ds_s, right_s = warpgroup == 0 ? o_s : q_s;
            wgmma_fence();
#pragma unroll
            for (int kk = 0; kk < BQ; kk += 16)
                wgmma_ss<T, D, 0, 1>(sum, S::Scores::k_major(left_s, 0, kk), S::Q::mn_major(right_s, kk), true);
            wgmma_commit_group();
            if (ORDERED) wait_turn<Tile>(smem_s, n);
            /* the next step's tiles are asked for before the additions below fill the queue that the answer comes through */
            const int next = min(n + 1, steps - 1);
            ring.wait_full(next);
            const uint2 then = ld_shared_64(tiles_s + ring.stage(next) * (int)sizeof(BwdTileOf));
            wgmma_wait_group<1>();
            wgmma_pin(dq[0]), wgmma_pin(dq[1]);
            const uint64_t to = own_dq<Tile>(g, now.x, 8 * warpgroup + mov_tid_x() / 32 % 4);
            constexpr int BLOCK_BYTES = 4 * Dq::N * 16 * 4;
            add_dq<0>(to, dq[0]);
            if (D == 256 || warpgroup == 0) add_dq<BLOCK_BYTES>(to, dq[1]);
            if (ORDERED) pass_turn<Tile>(smem_s);
            wgmma_wait_group<0>();
            wgmma_pin(sum);
            now = then;
        }
    }

    __device__ __forceinline__ void store(const BwdHopperParams &x, const BwdWork &w, smem_addr smem_s,
                                          int warpgroup) const {
        const Bwd &g = x.g;
        if (warpgroup == 0)
            store_rows<T, typename S::V>(g.dv, w, smem_s + S::V_AT, sum, 1.f, g.p.head_dim_v, 0);
        else
            store_rows<T, typename S::K>(g.dk, w, smem_s + S::K_AT, sum, (float)g.p.rules.scale, g.p.head_dim, 0);
    }
};

/* ---- 2. table ------------------------------------------------------------------------------------------- */
#define ROWS(label, TILE) BWD_ROWS("flash_attn_bwd_wide_sm90a", label, BwdWideConsumer, TILE, TILE, TILE)

const gk_cuda_instance instances[] = {ROWS("d192", BwdHopper192), ROWS("d256", BwdHopper256)};

} // namespace

extern "C" const gk_cuda_table gk_flash_attn_bwd_wide_sm90a_table = {instances, sizeof instances / sizeof instances[0],
                                                                     90, NULL};
