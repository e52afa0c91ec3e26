/* flash_attn_bwd_sm90a: the gradients of attention on Hopper's tensor cores, 16-bit, dense and packed, every modifier.
 * FlashAttention-2's backward (Dao 2023, arXiv:2307.08691, Algorithm 2) and the equations of bwd.cuh, turned by 90 degrees
 * so that P and dS are left operands as they lie in registers:
 *   S^T = K Q^T   dP^T = V dO^T   P^T = 2^(c S^T - lse)   dS^T = P^T (dP^T - delta)
 *   dV += P^T dO   dK += dS^T Q   dQ^T = K^T dS^T
 * q, grad_out [.., Sq, D | Dv]  k, v [.., Sk, D | Dv], as TMA can describe them; stats of the pre-pass.
 * Writes dk, dv (rounded once) and adds dQ into dq_sum (float32), which the last pass scales, rounds and writes.
 * D, Dv: multiples of 8 up to HEAD_DIM, HEAD_DIM_V; TMA fills the columns after them with zeros.
 *
 * Work split: a block owns 128 keys of one kv head and goes over the rows that see them, BQ at a time, of every query head
 * of the group. One thread of the producer warpgroup loads by TMA. Each of two consumer warpgroups owns 64 keys: S^T,
 * dP^T, dK and dV are its own. dQ sums over all keys: dS goes through shared memory, and each warpgroup makes one half of
 * dQ, which it adds to memory straight from its accumulators, 512 contiguous bytes a warp.
 *
 * A step of a consumer                                           (tensor cores work in the background)
 *   issue S^T, dP^T;  wait for S^T;  P^T                          runs under dP^T
 *   wait for dP^T;  dS^T, to registers and to shared memory
 *   issue dV;  barrier of both warpgroups;  issue dQ
 *   wait for dV, release dO;  issue dK
 *   wait for dQ, add it to memory                                 runs under dK
 *   wait for dK, release Q
 *
 * Not handled, served by flash_attn_bwd_sm80: strides and offsets that TMA cannot take; dQ in one order. */
#include "../ptx/bar.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/laneid.cuh"
#include "../ptx/stmatrix.cuh"
#include "../ptx/wgmma.cuh"
#include "../tile/copy.cuh"
#include "../tile/fragment.cuh"
#include "bwd_producer.cuh"
#include "tiles.h"

#include <utility>

namespace {

constexpr const char *OP = "gk_flash_attn_bwd";

/* ---- 1. shapes ------------------------------------------------------------------------------------------ */
/* dQ^T of a warpgroup is [64][DQ_N]: 64 columns of d of all rows, or where d has no more than 64 all of d of half the
 * rows. In dq_sum a tile is blocks of 16 of d (a warp) by 8 rows, each as the accumulators lie in the warp. */
template <class Tile> struct DqShape {
    static constexpr bool BY_D = Tile::HEAD_DIM > 64;
    static constexpr int N = BY_D ? Tile::BQ : Tile::BQ / 2;
    static constexpr int BLOCKS = BY_D ? Tile::HEAD_DIM / 16 : 8; /* of a warp each */
    static constexpr int FLOATS = Tile::BQ * Tile::HEAD_DIM;
    static_assert(BLOCKS * N * 16 == FLOATS && N % 16 == 0, "blocks make up the tile");
};

/* ---- 2. verbs ------------------------------------------------------------------------------------------- */
template <int N> __device__ __forceinline__ void pin(float (&d)[N]) { wgmma_pin(*(float (*)[1][N]) & d); }

/* Both warpgroups see what both have stored, wgmma too. */
__device__ __forceinline__ void consumers_sync() {
    fence_proxy_async();
    bar_sync(1, 256);
}

/* Which pairs of a lane see each other. Element 4 n + e: key e / 2, row 8 n + e % 2. */
struct BwdMask {
    int ahead[2];     /* key minus the first row's first key */
    unsigned keys[2]; /* how many a row sees; 0 where nobody sees the key */

    __device__ __forceinline__ BwdMask(const Sequence &s, int key, int row) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int j = key + 8 * r;
            ahead[r] = j - row - s.span.lo_off;
            keys[r] = j >= s.span.key_lo && j < s.span.key_hi && s.span.hi_off > s.span.lo_off
                          ? (unsigned)s.span.hi_off - (unsigned)s.span.lo_off
                          : 0;
        }
    }
    __device__ __forceinline__ bool sees(int n, int e) const {
        return (unsigned)(ahead[e / 2] - (8 * n + e % 2)) < keys[e / 2];
    }
};

/* ---- 3. a consumer warpgroup ---------------------------------------------------------------------------- */
template <class T, class Tile, bool MODIFIED> struct BwdConsumer {
    typedef BwdSmem<Tile> S;
    typedef DqShape<Tile> Dq;
    static constexpr int BQ = Tile::BQ, BKV = Tile::BKV, D = Tile::HEAD_DIM, DV = Tile::HEAD_DIM_V, N = BQ / 8;
    float dk[D / 2], dv[DV / 2];

    /* This lane's first key of the sequence, worked out where it is asked for: the loop has no register for it. */
    static __device__ __forceinline__ int own_key(const BwdWork &w) {
        const int thread = mov_tid_x();
        return w.j0 + thread / 32 * 16 + thread % 32 / 4;
    }

    static __device__ __forceinline__ smem_addr own_stats(smem_addr smem_s, int n) {
        return smem_s + S::STATS_AT + tma_steps<Tile::STAGES>::stage(n) * S::STATS + (mov_tid_x() & 3) * 8;
    }

    /* P^T in place of S^T. stats_s: lse of the lane's first row, delta BQ floats on. */
    static __device__ __forceinline__ void weights(float (&s)[N * 4], smem_addr stats_s, float scale_log2) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const uint2 lse = ld_shared_64(stats_s + n * 32);
#pragma unroll
            for (int e = 0; e < 4; ++e)
                s[4 * n + e] = ex2_approx_ftz(fmaf(s[4 * n + e], scale_log2, -__uint_as_float(e & 1 ? lse.y : lse.x)));
        }
    }

    /* P and dS as operands of the next products: p [kk / 4] is the fragment of rows kk .. kk + 15. */
    static __device__ __forceinline__ void gradients(const float (&s)[N * 4], const float (&dp)[N * 4],
                                                     uint32_t (&p)[N * 2], uint32_t (&ds)[N * 2], smem_addr stats_s) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const uint2 delta = ld_shared_64(stats_s + BQ * 4 + n * 32);
            const float d0 = __uint_as_float(delta.x), d1 = __uint_as_float(delta.y);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float w0 = s[4 * n + 2 * r], w1 = s[4 * n + 2 * r + 1];
                p[2 * n + r] = pack2<T>(w0, w1);
                ds[2 * n + r] = pack2<T>(w0 * (dp[4 * n + 2 * r] - d0), w1 * (dp[4 * n + 2 * r + 1] - d1));
            }
        }
    }

    /* The same with softcap and ALiBi, from S^T itself. key, row: of element 0. */
    static __device__ __forceinline__ void modified_gradients(const float (&s)[N * 4], const float (&dp)[N * 4],
                                                              uint32_t (&p)[N * 2], uint32_t (&ds)[N * 2],
                                                              smem_addr stats_s, const Score &score,
                                                              const Sequence &seq, int key, int row) {
        const BwdMask mask(seq, key, row);
        const float distance0 = (float)(row + score.position0 - key);
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const uint2 lse = ld_shared_64(stats_s + n * 32), delta = ld_shared_64(stats_s + BQ * 4 + n * 32);
            float w[4], grad[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float derivative;
                const float logit = score_fast(score, s[4 * n + e], distance0 + (8 * n + e % 2 - e / 2 * 8), &derivative);
                w[e] = mask.sees(n, e) ? ex2_approx_ftz(logit * LOG2_E - __uint_as_float(e & 1 ? lse.y : lse.x)) : 0;
                grad[e] = w[e] * (dp[4 * n + e] - __uint_as_float(e & 1 ? delta.y : delta.x)) * derivative;
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                p[2 * n + r] = pack2<T>(w[2 * r], w[2 * r + 1]);
                ds[2 * n + r] = pack2<T>(grad[2 * r], grad[2 * r + 1]);
            }
        }
    }

    /* dS [BQ][64 keys of this warpgroup], transposed on its way. */
    static __device__ __forceinline__ void store_ds(smem_addr ds_s, const uint32_t (&ds)[N * 2], int warpgroup) {
        const int lane = laneid(), warp = mov_tid_x() / 32 % 4;
        const int row = lane / 16 * 8 + lane % 8, col = 64 * warpgroup + 16 * warp + (lane / 8 & 1) * 8;
        const smem_addr at = ds_s + S::Scores::offset_of(row, col);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            const uint32_t four[4] = {ds[2 * n], ds[2 * n + 1], ds[2 * n + 2], ds[2 * n + 3]};
            stmatrix_x4_trans(at + n * 8 * WGMMA_ROW_BYTES, four);
        }
    }

    /* A warp adds 512 contiguous bytes at a time. */
    template <int... J>
    static __device__ __forceinline__ void add_dq(uint64_t to, const float (&dq)[Dq::N / 2],
                                                  std::integer_sequence<int, J...>) {
        (red_add_128<J * 512>(to, dq[4 * J], dq[4 * J + 1], dq[4 * J + 2], dq[4 * J + 3]), ...);
    }

    /* The warp's 16 keys of K or V as operands of the products S^T or dP^T. */
    template <class Panels, int M> static __device__ __forceinline__ void load_rows(uint32_t (&a)[M], smem_addr tile_s) {
        const int lane = laneid(), row = mov_tid_x() / 32 * 16 + lane % 16;
#pragma unroll
        for (int kk = 0; kk < M * 4; kk += 16) ldmatrix_x4(a + kk / 4, tile_s + Panels::offset_of(row, kk + lane / 16 * 8));
    }

    __device__ __forceinline__ void run(const BwdHopperParams &x, const BwdWork &w, const unsigned char *smem,
                                        smem_addr smem_s, int warpgroup) {
        const Bwd &g = x.g;
        const bool signals = threadIdx.x % 128 == 0;
        const int steps = w.tiles * g.p.group;
        const float scale_log2 = (float)g.p.rules.scale * LOG2_E;
        const tma_steps<Tile::STAGES> q = {smem_s + S::Q_RING}, o = {smem_s + S::O_RING};
        const BwdTileOf *tiles = (const BwdTileOf *)(smem + S::TILES);
#pragma unroll
        for (int i = 0; i < D / 2; ++i) dk[i] = 0;
#pragma unroll
        for (int i = 0; i < DV / 2; ++i) dv[i] = 0;

        mbarrier_wait(smem_s + S::KV_FULL, 0);
        uint32_t k_frag[Tile::K_REGISTERS ? D / 4 : 1];
        if (Tile::K_REGISTERS) load_rows<typename S::K>(k_frag, smem_s + S::K_AT);
        if (steps > 0) q.wait_full(0), o.wait_full(0);
        const smem_addr tiles_s = smem_s + S::TILES;
        uint2 now = steps > 0 ? ld_shared_64(tiles_s) : make_uint2(0, 0); /* tile, edge */
#pragma unroll 1
        for (int n = 0; n < steps; ++n) {
            const smem_addr q_s = smem_s + S::Q_AT + q.stage(n) * S::Q::bytes;
            const smem_addr o_s = smem_s + S::O_AT + o.stage(n) * S::O::bytes;
            const smem_addr ds_s = smem_s + S::DS_AT + (n & 1) * S::Scores::bytes;
            const BwdTileOf &t = tiles[q.stage(n)];
            float s[N * 4], dp[N * 4];
            uint32_t p[N * 2], ds[N * 2];
            wgmma_fence();
#pragma unroll
            for (int kk = 0; kk < D; kk += 16) {
                if (Tile::K_REGISTERS)
                    wgmma_rs<T, BQ, 0>(s, k_frag + kk / 4, S::Q::k_major(q_s, 0, kk), kk > 0);
                else
                    wgmma_ss<T, BQ, 0, 0>(s, S::K::k_major(smem_s + S::K_AT, 64 * warpgroup, kk),
                                          S::Q::k_major(q_s, 0, kk), kk > 0);
            }
            wgmma_commit_group();
            wgmma_fence();
#pragma unroll
            for (int kk = 0; kk < DV; kk += 16)
                wgmma_ss<T, BQ, 0, 0>(dp, S::V::k_major(smem_s + S::V_AT, 64 * warpgroup, kk),
                                      S::O::k_major(o_s, 0, kk), kk > 0);
            wgmma_commit_group();
            wgmma_wait_group<1>();
            pin(s);
            if (!MODIFIED) {
                if (now.y) {
                    const BwdMask mask(w.seq, own_key(w), t.i0 + laneid() % 4 * 2);
#pragma unroll
                    for (int i = 0; i < N * 4; ++i)
                        if (!mask.sees(i / 4, i % 4)) s[i] = -INFINITY;
                }
                weights(s, own_stats(smem_s, n), scale_log2);
            }
            mbarrier_wait(smem_s + S::KV_FULL, 0); /* over for ever: ends a basic block, ptxas moves nothing past the wait */
            /* here and not sooner: its registers would be those of the additions, and the products would wait for them */
            if (n > 0 && signals) mbarrier_arrive(o.empty(n - 1)), mbarrier_arrive(q.empty(n - 1));
            wgmma_wait_group<0>();
            pin(dp);
            if (MODIFIED) {
                const Score score = {g.scale, g.softcap, t.slope, span_clamp(w.seq.diagonal)};
                modified_gradients(s, dp, p, ds, own_stats(smem_s, n), score, w.seq, own_key(w), t.i0 + laneid() % 4 * 2);
            } else {
                gradients(s, dp, p, ds, own_stats(smem_s, n));
            }
            store_ds(ds_s, ds, warpgroup);

            /* a part of dV keeps the tensor cores busy over the barrier; the rest and dK, while dQ goes to memory */
            wgmma_fence();
#pragma unroll
            for (int kk = 0; kk < Tile::DV_FIRST; kk += 16)
                wgmma_rs<T, DV, 1>(dv, p + kk / 4, S::O::mn_major(o_s, kk), true);
            wgmma_commit_group();
            consumers_sync(); /* dS is whole; and nobody reads dS of the step before any more */
            float dq[Dq::N / 2];
            wgmma_fence();
#pragma unroll
            for (int kk = 0; kk < BKV; kk += 16)
                wgmma_ss<T, Dq::N, 1, 0>(
                    dq, S::K::mn_major(smem_s + S::K_AT + (Dq::BY_D ? warpgroup * S::K::panel_bytes : 0), kk),
                    S::Scores::k_major(ds_s, Dq::BY_D ? 0 : warpgroup * Dq::N, kk), kk > 0);
            wgmma_commit_group();
            wgmma_fence();
#pragma unroll
            for (int kk = Tile::DV_FIRST; kk < BQ; kk += 16)
                wgmma_rs<T, DV, 1>(dv, p + kk / 4, S::O::mn_major(o_s, kk), true);
            wgmma_commit_group();
            wgmma_wait_group<1>();
            pin(dq);
            wgmma_fence();
#pragma unroll
            for (int kk = 0; kk < BQ; kk += 16) wgmma_rs<T, D, 1>(dk, ds + kk / 4, S::Q::mn_major(q_s, kk), true);
            wgmma_commit_group();
            /* the next step's tiles are asked for before the additions below fill the queue that the answer comes through */
            const int next = min(n + 1, steps - 1);
            q.wait_full(next), o.wait_full(next);
            const uint2 then = ld_shared_64(tiles_s + q.stage(next) * (int)sizeof(BwdTileOf));
            const int block = mov_tid_x() / 32; /* 4 warpgroup + warp */
            const uint64_t to =
                __cvta_generic_to_global(g.dq_sum + (int64_t)now.x * Dq::FLOATS + block * (Dq::N * 16) + laneid() * 4);
            if (Dq::BLOCKS == 8 || block < Dq::BLOCKS) add_dq(to, dq, std::make_integer_sequence<int, Dq::N / 8>());
            wgmma_wait_group<0>();
            pin(dv), pin(dk);
            now = then;
        }
    }
};

/* 64 rows of dK or dV through this warpgroup's rows of a tile of shared memory. */
template <class T, class Panels, int N>
__device__ __forceinline__ void store_rows(const Rows &to, const BwdWork &w, smem_addr tile_s, const float (&d)[N],
                                           float factor, int columns, int warpgroup) {
    const int lane = laneid(), row0 = 64 * warpgroup + mov_tid_x() / 32 % 4 * 16;
#pragma unroll
    for (int n = 0; n < N / 4; n += 2) {
        uint32_t four[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) four[e] = pack2<T>(d[4 * n + 2 * e] * factor, d[4 * n + 2 * e + 1] * factor);
        stmatrix_x4(tile_s + Panels::offset_of(row0 + lane % 16, 8 * n + lane / 16 * 8), four);
    }
    __syncwarp(); /* the warp's 16 rows are whole */
    const int key = w.j0 + row0;
    T *to_g = (T *)to.data + w.b * to.batch + w.kv_head * to.head + ((int64_t)w.seq.k0 + key) * to.row;
#pragma unroll 1
    for (int i = lane; i < 16 * (N / 4); i += 32) {
        const int row = i / (N / 4), col = i % (N / 4) * 8;
        if (key + row < w.seq.seq_k && col < columns)
            st_global_128(to_g + row * to.row + col, ld_shared_128(tile_s + Panels::offset_of(row0 + row, col)));
    }
}

/* ---- 4. the kernel -------------------------------------------------------------------------------------- */
template <class T, class Tile, bool MODIFIED>
__global__ void __launch_bounds__(BwdSmem<Tile>::THREADS, 1)
    flash_attn_bwd_sm90a_kernel(const __grid_constant__ BwdHopperParams x) {
    typedef BwdSmem<Tile> S;
    extern __shared__ __align__(1024) unsigned char smem[];
    const smem_addr smem_s = cvta_to_shared(smem);
    BwdWork &w = *(BwdWork *)(smem + S::WORK);
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0); /* the compiler sees that lanes agree */
    if (threadIdx.x == 0) {
        typename S::Ring(smem_s + S::Q_RING).init(2);
        typename S::Ring(smem_s + S::O_RING).init(2);
        mbarrier_init(smem_s + S::KV_FULL, 1), mbarrier_init(smem_s + S::RAW, 1);
        fence_mbarrier_init();
        place_block<Tile>(w, x.g);
    }
    __syncthreads();
    if (w.j0 >= w.seq.seq_k) return;
    if (warpgroup == 2) {
        setmaxnreg_dec<Tile::PRODUCER_REGISTERS>();
        if (threadIdx.x / 32 == 8) load_tiles<Tile>(x, w, smem, smem_s);
        return;
    }
    setmaxnreg_inc<Tile::CONSUMER_REGISTERS>();
    BwdConsumer<T, Tile, MODIFIED> c;
    c.run(x, w, smem, smem_s, warpgroup);
    consumers_sync(); /* nobody reads K or V any more */
    store_rows<T, typename S::K>(x.g.dk, w, smem_s + S::K_AT, c.dk, (float)x.g.p.rules.scale, x.g.p.head_dim, warpgroup);
    store_rows<T, typename S::V>(x.g.dv, w, smem_s + S::V_AT, c.dv, 1.f, x.g.p.head_dim_v, warpgroup);
}

/* ---- 5. dq = scale * dq_sum ------------------------------------------------------------------------------ */
template <class T, class Tile>
__global__ void __launch_bounds__(BWD_PRE_THREADS) flash_attn_bwd_round_kernel(const __grid_constant__ Bwd g) {
    typedef DqShape<Tile> Dq;
    typedef smem_tile<Tile::BQ, Tile::HEAD_DIM * 2> Queries;
    constexpr int PAIRS = Dq::N / 16; /* of 8 rows, a block */
    extern __shared__ __align__(1024) unsigned char smem[];
    const smem_addr smem_s = cvta_to_shared(smem);
    const int lane = threadIdx.x % 32;
    const int tile = blockIdx.x % g.tiles, head = blockIdx.x / g.tiles % g.p.heads_q,
              b = blockIdx.x / g.tiles / g.p.heads_q;
    const Sequence s = sequence_of(g.p, b);
    const int i0 = tile * Tile::BQ;
    if (i0 >= s.seq_q) return;
    const float *from = g.dq_sum + ((int64_t)head * g.row_tiles + row_tile_of(g, s, b) + tile) * Dq::FLOATS + lane * 4;
    const float scale = (float)g.p.rules.scale;
#pragma unroll
    for (int i = threadIdx.x / 32; i < Dq::BLOCKS * PAIRS; i += BWD_PRE_THREADS / 32) {
        const int block = i / PAIRS, pair = i % PAIRS;
        uint32_t four[4];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const float4 d = *(const float4 *)(from + block * (Dq::N * 16) + (2 * pair + j) * 128);
            four[2 * j] = pack2<T>(d.x * scale, d.y * scale), four[2 * j + 1] = pack2<T>(d.z * scale, d.w * scale);
        }
        const int row = (Dq::BY_D ? 0 : block / 4 * Dq::N) + 16 * pair + lane / 16 * 8 + lane % 8;
        const int chunk = 2 * (Dq::BY_D ? block : block % 4) + (lane / 8 & 1);
        stmatrix_x4_trans(smem_s + Queries::offset(row, chunk), four);
    }
    __syncthreads(); /* the rows are whole */
    copy_tile_out<Queries, BWD_PRE_THREADS>(
        (T *)g.dq.data + b * g.dq.batch + head * g.dq.head + ((int64_t)s.q0 + i0) * g.dq.row, g.dq.row, smem_s,
        s.seq_q - i0, g.p.head_dim, threadIdx.x);
}

/* ---- 6. launcher and table ------------------------------------------------------------------------------ */
bool takes(const gk_cuda_row *row, const gk_context *ctx, const void *args) {
    const gk_flash_attn_bwd_args *a = (const gk_flash_attn_bwd_args *)args;
    const gk_flash_attn_args &f = a->fwd;
    const int last = f.q.ndim - 1;
    const bool modified = f.rules.softcap > 0 || f.rules.alibi_slopes || !(f.rules.scale > 0);
    return f.q.shape[last] <= row->key[0] && f.v.shape[last] <= row->key[1] && modified == (row->key[2] != 0) &&
           !a->deterministic && tensor_map_fits(attn_shape(f.q)) && tensor_map_fits(attn_shape(f.k)) &&
           tensor_map_fits(attn_shape(f.v)) && tensor_map_fits(attn_shape(a->grad_out)) && rows_aligned(a->dq) &&
           rows_aligned(a->dk) && rows_aligned(a->dv) && smem_fits(ctx, row->key[3]);
}

template <class Tile> Bwd params_of(const gk_context *ctx, const gk_flash_attn_bwd_args *a) {
    Bwd g = bwd_of(ctx, a, Tile::BQ, Tile::HEAD_DIM);
    g.stats = a->workspace, g.stats_apart = true, g.lse_factor = LOG2_E;
    if (a->workspace) g.dq_sum = (float *)((char *)a->workspace + stats_bytes(g, sizeof(float)));
    return g;
}

template <class Tile> size_t workspace_bytes(const gk_cuda_row *, const gk_context *ctx, const void *args) {
    const Bwd g = params_of<Tile>(ctx, (const gk_flash_attn_bwd_args *)args);
    return stats_bytes(g, sizeof(float)) + dq_sum_bytes(g);
}

template <class Tile> int64_t blocks_of(const Problem &p) {
    return gk_ceil_div(p.seq_k, Tile::BKV) * p.heads_kv * p.batch;
}

template <class T, class Tile, bool MODIFIED>
gk_status run(const gk_cuda_row *, const gk_context *ctx, const void *args) {
    const gk_flash_attn_bwd_args *a = (const gk_flash_attn_bwd_args *)args;
    BwdHopperParams x = {};
    x.g = params_of<Tile>(ctx, a);
    gk_status status = make_tensor_map(OP, attn_shape(a->fwd.q), 64, Tile::BQ, &x.q);
    if (status == GK_OK) status = make_tensor_map(OP, attn_shape(a->fwd.k), 64, Tile::BKV, &x.k);
    if (status == GK_OK) status = make_tensor_map(OP, attn_shape(a->fwd.v), 64, Tile::BKV, &x.v);
    if (status == GK_OK) status = make_tensor_map(OP, attn_shape(a->grad_out), 64, Tile::BQ, &x.grad_out);
    if (status == GK_OK) status = bwd_pre(ctx, element<T>::dtype, x.g);
    if (status == GK_OK)
        status = launch<flash_attn_bwd_sm90a_kernel<T, Tile, MODIFIED>>(
            OP, ctx, dim3((unsigned)blocks_of<Tile>(x.g.p)), BwdSmem<Tile>::THREADS, BwdSmem<Tile>::BYTES, x);
    if (status != GK_OK) return status;
    const dim3 grid((unsigned)((int64_t)x.g.tiles * x.g.p.heads_q * x.g.p.batch));
    return launch<flash_attn_bwd_round_kernel<T, Tile>>(OP, ctx, grid, BWD_PRE_THREADS, Tile::BQ * Tile::HEAD_DIM * 2,
                                                        x.g);
}

template <class Tile> void explain(const gk_cuda_row *, const gk_context *ctx, const void *args, gk_explanation *out) {
    out->tile[0] = Tile::BQ, out->tile[1] = Tile::BKV;
    out->tasks = blocks_of<Tile>(problem_of(ctx, &((const gk_flash_attn_bwd_args *)args)->fwd));
    out->waves = (double)out->tasks / (double)gk_gpu_of(ctx->index)->num_sms;
}

#define ROW(name, T, dtype, TILE, MODIFIED)                                                     \
    {                                                                                           \
        name, dtype, takes, workspace_bytes<TILE>, run<T, TILE, MODIFIED>, explain<TILE>, {     \
            TILE::HEAD_DIM, TILE::HEAD_DIM_V, MODIFIED, BwdSmem<TILE>::BYTES, TILE::BQ          \
        }                                                                                       \
    }
#define ROWS(label, TILE)                                                                     \
    ROW("flash_attn_bwd_sm90a_bf16_" label, __nv_bfloat16, GK_BF16, TILE, false),             \
        ROW("flash_attn_bwd_sm90a_f16_" label, __half, GK_F16, TILE, false),                  \
        ROW("flash_attn_bwd_sm90a_bf16_" label "_score", __nv_bfloat16, GK_BF16, TILE##Score, true), \
        ROW("flash_attn_bwd_sm90a_f16_" label "_score", __half, GK_F16, TILE##Score, true)

const gk_cuda_row rows[] = {ROWS("d64", BwdHopper64), ROWS("d96", BwdHopper96), ROWS("d128", BwdHopper128)};

} // namespace

extern "C" const gk_cuda_table gk_flash_attn_bwd_sm90a_table = {rows, sizeof rows / sizeof rows[0], 90, NULL};
