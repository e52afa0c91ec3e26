/* SPDX-License-Identifier: BSD-3-Clause */
/* bwd_consumer.cuh: the kernel of the Hopper backward and its launcher. bwd.cuh has the equations.
 *
 * The kernel is a template over a Consumer, which is the code of one consumer warpgroup.
 * bwd_keys.cuh defines it for head_dim up to 128, bwd_wide.cuh for larger head_dims. The kernels
 * with dropout, with a mask and with float32 gradients derive theirs from these two. A Consumer has
 * a Tile; Params; run(), the steps of the warpgroup; store(), which writes its dK and dV; and the
 * members of BwdUnmasked, which find the rows that a block takes and load them.
 *
 * A block has three warpgroups: two consumers and a producer (bwd_producer.cuh). A block whose task
 * is a rows or rounding task runs bwd_tasks.cuh in all of its threads instead.
 *
 * This file also has the helpers that all consumers use: P and dS from the products, the additions
 * of dQ to memory, and the stores of dK and dV. serves() and short_enough() decide which calls an
 * instance refuses. */
#ifndef GPUKERN_CUDA_BWD_CONSUMER_CUH
#define GPUKERN_CUDA_BWD_CONSUMER_CUH

#include "../../ptx/bar.cuh"
#include "../../ptx/cluster.cuh"
#include "../../ptx/ldmatrix.cuh"
#include "../../ptx/stmatrix.cuh"
#include "../../ptx/wgmma.cuh"
#include "../../tile/copy.cuh"
#include "../../tile/fragment.cuh"
#include "bwd_tasks.cuh"
#include "../blocks.h"

namespace {

constexpr const char *OP = "gk_flash_attn_bwd";

/* ---- 1. helpers ------------------------------------------------------------------------------ */
/* A barrier of both consumer warpgroups. WGMMA also sees what their threads stored to shared memory
 * before it. */
__device__ __forceinline__ void consumers_sync() {
    fence_proxy_async();
    bar_sync(BAR_CONSUMERS, 256);
}

/* Which pairs (row, key) of a lane are visible by causal, window, kv_start and kv_end. Element 4 n
 * + e of the lane's accumulators is key 8 (e / 2) and row 8 n + e % 2, relative to the lane's first
 * key and row. */
struct BwdMask {
    int ahead[2];     /* key minus the first key that the lane's first row may see */
    unsigned keys[2]; /* number of keys that a row sees; 0 if no row sees this key */

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

/* This lane's first key, counted from the sequence's first. It is computed at each use, because
 * the loop has no register for it. first: the warpgroup's first key in the block. */
__device__ __forceinline__ int own_key(const BwdWork &w, int first) {
    const int thread = mov_tid_x();
    return w.j0 + first + thread / 32 % 4 * 16 + thread % 32 / 4;
}

/* The address of lse of this lane's first row in the tile of step n. delta follows BQ floats
 * later. */
template <class Tile> __device__ __forceinline__ smem_addr own_stats(smem_addr smem_s, int n) {
    typedef BwdSmem<Tile> S;
    return smem_s + S::STATS_AT + tma_steps<Tile::STAGES>::stage(n) * S::STATS +
           (mov_tid_x() & 3) * 8;
}

/* Sets S^T of hidden pairs to -inf. key, row: those of the lane's first accumulator. */
template <int M>
__device__ __forceinline__ void hide(float (&s)[M], const Sequence &seq, int key, int row) {
    const BwdMask mask(seq, key, row);
#pragma unroll
    for (int i = 0; i < M; ++i)
        if (!mask.sees(i / 4, i % 4)) s[i] = -INFINITY;
}

/* Reads which of a lane's pairs a stored mask shows. Bit 2 n + e of seen[r] is row 8 n + e and key
 * 8 r, relative to the lane's first row and key. This is the order of a stored mask's words. edge:
 * see BwdTileOf. */
template <class Tile>
__device__ __forceinline__ void seen_by_words(uint32_t (&seen)[2], smem_addr smem_s, int n,
                                              unsigned edge) {
    typedef BwdSmem<Tile> S;
    seen[0] = seen[1] = 0xffffffffu;
    if (!edge) return;
    const uint2 words =
        ld_shared_64(smem_s + S::WORDS_AT + tma_steps<Tile::STAGES>::stage(n) * S::WORDS_BYTES +
                     mov_tid_x() * 8);
    seen[0] = words.x >> (edge - 2);
    seen[1] = words.y >> (edge - 2);
}

/* Sets P and dS of hidden pairs to 0, even if they are NaN. p[2 n + r] and ds[2 n + r] hold rows 8
 * n and 8 n + 1 of key 8 r. */
template <int M>
__device__ __forceinline__ void hide_pairs(uint32_t (&p)[M], uint32_t (&ds)[M],
                                           const uint32_t (&seen)[2]) {
#pragma unroll
    for (int n = 0; n < M / 2; ++n)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const uint32_t two = seen[r] >> 2 * n;
            const uint32_t kept = (0u - (two & 1) & 0xffffu) | (0u - (two >> 1 & 1)) << 16;
            p[2 * n + r] &= kept;
            ds[2 * n + r] &= kept;
        }
}

/* Replaces S^T by P^T, with a bias whose tile [rows][keys] is in shared memory. A bias of at most
 * `least` hides its pair: the pair's bit of `seen` is cleared. lse_s: the address of lse of the
 * lane's first row. */
template <class T, class Panels, int M>
__device__ __forceinline__ void biased_weights(float (&s)[M], smem_addr lse_s, float scale_log2,
                                               smem_addr bias_s, float least, uint32_t (&seen)[2]) {
    const coord c = ds_place(mov_tid_x(), 0);
    const smem_addr from_s = bias_s + Panels::offset_of(c.row, c.col);
#pragma unroll
    for (int n = 0; n < M / 4; n += 2) {
        uint32_t four[4]; /* rows 8 n, keys 0 and 8; rows 8 n + 8, keys 0 and 8 */
        ldmatrix_x4_trans(four, from_s + n * 8 * WGMMA_ROW_BYTES);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            const uint2 lse = ld_shared_64(lse_s + (n + m) * 32);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float2 bias = unpack2<T>(four[2 * m + r]);
                float *own = s + 4 * (n + m) + 2 * r;
                if (bias.x <= least) seen[r] &= ~(1u << 2 * (n + m));
                if (bias.y <= least) seen[r] &= ~(2u << 2 * (n + m));
                own[0] = ex2_approx_ftz(
                    fmaf(bias.x, LOG2_E, fmaf(own[0], scale_log2, -__uint_as_float(lse.x))));
                own[1] = ex2_approx_ftz(
                    fmaf(bias.y, LOG2_E, fmaf(own[1], scale_log2, -__uint_as_float(lse.y))));
            }
        }
    }
}

/* Stores the dS [rows][keys] of a step as the gradient of the bias. One thread calls this, after a
 * barrier that all writers of dS have passed. In masked kernels t.slope holds the head's number. */
template <class Panels, class Params>
__device__ __forceinline__ void store_dbias(const Params &x, const BwdWork &w, const BwdTileOf &t,
                                            smem_addr ds_s) {
    const int head = __float_as_int(t.slope);
#pragma unroll
    for (int c = 0; c < Panels::panels; ++c)
        tma_store_5d(&x.dbias, {{w.j0 + 64 * c, t.i0, head, w.b, 0}},
                     ds_s + c * Panels::panel_bytes);
    tma_store_commit_group();
}

/* Replaces S^T by P^T. lse_s: the address of lse of the lane's first row. delta_s below is that of
 * delta. */
template <int M>
__device__ __forceinline__ void weights(float (&s)[M], smem_addr lse_s, float scale_log2) {
#pragma unroll
    for (int n = 0; n < M / 4; ++n) {
        const uint2 lse = ld_shared_64(lse_s + n * 32);
#pragma unroll
        for (int e = 0; e < 4; ++e)
            s[4 * n + e] = ex2_approx_ftz(
                fmaf(s[4 * n + e], scale_log2, -__uint_as_float(e & 1 ? lse.y : lse.x)));
    }
}

/* Computes dS and packs P and dS to 16 bits, as A operands of the next products. p[kk / 4] begins
 * the fragment of rows kk to kk + 15, and so does ds[kk / 4]. */
template <class T, int M>
__device__ __forceinline__ void gradients(const float (&s)[M], const float (&dp)[M],
                                          uint32_t (&p)[M / 2], uint32_t (&ds)[M / 2],
                                          smem_addr delta_s) {
#pragma unroll
    for (int n = 0; n < M / 4; ++n) {
        const uint2 delta = ld_shared_64(delta_s + n * 32);
        const float d0 = __uint_as_float(delta.x), d1 = __uint_as_float(delta.y);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float w0 = s[4 * n + 2 * r], w1 = s[4 * n + 2 * r + 1];
            p[2 * n + r] = pack2<T>(w0, w1);
            ds[2 * n + r] =
                pack2<T>(w0 * (dp[4 * n + 2 * r] - d0), w1 * (dp[4 * n + 2 * r + 1] - d1));
        }
    }
}

/* Does the work of weights() and gradients() in calls with softcap or ALiBi. key, row: those of
 * element 0. */
template <class T, int M>
__device__ __forceinline__ void
modified_gradients(const float (&s)[M], const float (&dp)[M], uint32_t (&p)[M / 2],
                   uint32_t (&ds)[M / 2], smem_addr lse_s, smem_addr delta_s, const Score &score,
                   const Sequence &seq, int key, int row) {
    const BwdMask mask(seq, key, row);
    const float distance0 = (float)(row + score.position0 - key);
#pragma unroll
    for (int n = 0; n < M / 4; ++n) {
        const uint2 lse = ld_shared_64(lse_s + n * 32), delta = ld_shared_64(delta_s + n * 32);
        float w[4], grad[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            float derivative;
            const float logit = score_fast(score, s[4 * n + e],
                                           distance0 + (8 * n + e % 2 - e / 2 * 8), &derivative);
            w[e] = mask.sees(n, e)
                       ? ex2_approx_ftz(logit * LOG2_E - __uint_as_float(e & 1 ? lse.y : lse.x))
                       : 0;
            grad[e] =
                w[e] * (dp[4 * n + e] - __uint_as_float(e & 1 ? delta.y : delta.x)) * derivative;
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            p[2 * n + r] = pack2<T>(w[2 * r], w[2 * r + 1]);
            ds[2 * n + r] = pack2<T>(grad[2 * r], grad[2 * r + 1]);
        }
    }
}

/* Adds dQ to memory. Each instruction of a warp adds 512 contiguous bytes. The offsets are
 * immediates of the instruction, so that one address register is enough. */
template <int BYTES, int J = 0, int M>
__device__ __forceinline__ void add_dq(uint64_t to, const float (&dq)[M]) {
    red_add_128<BYTES + J * 128>(to, dq[J], dq[J + 1], dq[J + 2], dq[J + 3]);
    if constexpr (J + 4 < M) add_dq<BYTES, J + 4>(to, dq);
}

/* Ordered kernels: waits until this block may add dQ of step n. */
template <class Tile> __device__ __forceinline__ void wait_turn(smem_addr smem_s, int n) {
    mbarrier_wait(smem_s + BwdSmem<Tile>::TURN, n & 1);
}

/* Ordered kernels: signals that this thread has added its dQ. The thread that runs keep_order then
 * signals the other blocks. No fence is needed here: the additions happen before keep_order's
 * release, since causality order is transitive. A fence would make these warps wait. */
template <class Tile> __device__ __forceinline__ void pass_turn(smem_addr smem_s) {
    mbarrier_arrive(smem_s + BwdSmem<Tile>::ADDED);
}

/* The address of this lane's additions to the `block`-th block of a dQ tile. */
template <class Tile>
__device__ __forceinline__ uint64_t own_dq(const Bwd &g, int tile, int block) {
    typedef DqShape<Tile> Dq;
    return __cvta_generic_to_global(g.dq_sum + (int64_t)tile * Dq::FLOATS + block * (Dq::N * 16) +
                                    laneid() * 4);
}

/* Stores 64 rows of dK or dV, from the block's key `first` on, through the same rows of a tile
 * in shared memory. */
template <class T, class Panels, int N>
__device__ __forceinline__ void store_rows(const Rows &to, const BwdWork &w, smem_addr tile_s,
                                           const float (&d)[N], float factor, int columns,
                                           int first) {
    const int lane = laneid(), row0 = first + mov_tid_x() / 32 % 4 * 16;
#pragma unroll
    for (int n = 0; n < N / 4; n += 2) {
        uint32_t four[4];
#pragma unroll
        for (int e = 0; e < 4; ++e)
            four[e] = pack2<T>(d[4 * n + 2 * e] * factor, d[4 * n + 2 * e + 1] * factor);
        stmatrix_x4(tile_s + Panels::offset_of(row0 + lane % 16, 8 * n + lane / 16 * 8), four);
    }
    __syncwarp(); /* the warp's 16 rows are complete */
    const int key = w.j0 + row0;
    T *to_g =
        (T *)to.data + w.b * to.batch + w.kv_head * to.head + ((int64_t)w.seq.k0 + key) * to.row;
#pragma unroll 1
    for (int i = lane; i < 16 * (N / 4); i += 32) {
        const int row = i / (N / 4), col = i % (N / 4) * 8;
        if (key + row < w.seq.seq_k && col < columns)
            st_global_128(to_g + row * to.row + col,
                          ld_shared_128(tile_s + Panels::offset_of(row0 + row, col)));
    }
}

/* store_rows in float32, from registers. */
template <int N>
__device__ __forceinline__ void store_rows(const Rows &to, const BwdWork &w, const float (&d)[N],
                                           float factor, int columns, int first) {
    const int key = w.j0 + first + mov_tid_x() / 32 % 4 * 16 + frag_row(laneid(), 0),
              col = frag_col(laneid(), 0);
    float *to_g = (float *)to.data + w.b * to.batch + w.kv_head * to.head +
                  ((int64_t)w.seq.k0 + key) * to.row + col;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int n = 0; n < N / 4; ++n)
            if (key + 8 * r < w.seq.seq_k && 8 * n + col < columns)
                *(float2 *)(to_g + 8 * r * to.row + 8 * n) =
                    make_float2(d[4 * n + 2 * r] * factor, d[4 * n + 2 * r + 1] * factor);
}

/* The members of a Consumer that find and load the rows of a block. Here they are the rows that can
 * see the block's keys by causal, window, kv_start and kv_end (place_block). BwdMaskedConsumer and
 * BwdMaskedWideConsumer replace these members for stored masks. */
template <class Tile, bool ORDERED> struct BwdUnmasked {
    typedef BwdHopperParams Params;
    /* true: a keys task may have no work, and the Consumer has has_no_work() */
    static constexpr bool SPLITS = false;
    /* True if the kernel has nothing to do. */
    static __device__ __forceinline__ bool leaves(const Params &) { return false; }
    static __device__ __forceinline__ void place(BwdWork &w, const Params &x, smem_addr) {
        place_block<Tile>(w, x);
    }
    static __device__ __forceinline__ void load(const Params &x, const BwdWork &w,
                                                unsigned char *smem, smem_addr smem_s) {
        load_tiles<Tile, ORDERED>(x, w, smem, smem_s);
    }
};

/* ---- 2. the kernel --------------------------------------------------------------------------- */
/* The roles of the warps in a keys task. Warps 0 to 7 are the consumers. Warp 8 loads. Thread 0 of
 * warp 9 keeps the order of additions (ordered kernels). Warp 10 sends dS to the other block
 * (pairs). Warp 11 counts the task as done when both consumers have added their last dQ. With
 * bwd_collects, warps 9 and 11 also sum the gradient of a bias. */
template <class Consumer>
__global__ void __cluster_dims__(BwdSmem<typename Consumer::Tile>::BLOCKS, 1, 1)
    __launch_bounds__(BwdSmem<typename Consumer::Tile>::THREADS, 1)
        flash_attn_bwd_sm90a_kernel(const __grid_constant__ typename Consumer::Params x) {
    typedef typename Consumer::Tile Tile;
    typedef BwdSmem<Tile> S;
    extern __shared__ __align__(1024) unsigned char smem[];
    const smem_addr smem_s = cvta_to_shared(smem);
    BwdWork &w = *(BwdWork *)(smem + S::WORK);
    /* the shuffle shows the compiler that the value is uniform over the warp */
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    if (Consumer::leaves(x)) return;
    if (threadIdx.x == 0) { /* this takes longest, so other warps do the rest at the same time */
        Consumer::place(w, x, smem_s);
    } else if (threadIdx.x == 8 * 32) {
        prefetch_tensormap(&x.k);
        prefetch_tensormap(&x.v);
        prefetch_tensormap(&x.q);
        prefetch_tensormap(&x.grad_out);
    } else if (threadIdx.x == 32) {
        typename S::Ring(smem_s + S::RING).init(2);
        if (Tile::PAIR) {
            typename S::ORing(smem_s + S::O_RING).init(2);
            mbarrier_init(smem_s + S::peer_full(0), 1);
            mbarrier_init(smem_s + S::peer_full(1), 1);
        }
        mbarrier_init(smem_s + S::KV_FULL, 1);
        mbarrier_init(smem_s + S::RAW, 1);
        if (Consumer::ORDERED) {
            mbarrier_init(smem_s + S::TURN, 1);
            mbarrier_init(smem_s + S::ADDED, 256);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    if (Tile::PAIR) barrier_cluster(); /* both blocks have initialised their barriers */
    if (w.task.unit >= x.grid.units) return;
    if (w.task.kind != BWD_KEYS)
        return other_task<typename Consumer::Element, Tile, typename Consumer::Grad>(x, w, smem_s);
    if constexpr (Consumer::SPLITS) {
        if (Consumer::has_no_work(smem_s)) {
            if (threadIdx.x == 0) red_add_release(x.keys_done + w.task.unit);
            return;
        }
    }
    /* The block's keys lie after the end of the sequence, which happens in packed calls only. */
    if (w.j0 - (Tile::PAIR ? w.rank * Tile::BKV : 0) >= w.seq.seq_k) return;
    if (warpgroup == 2) {
        setmaxnreg_dec<Tile::PRODUCER_REGISTERS>();
        if (threadIdx.x / 32 == 8) Consumer::load(x, w, smem, smem_s);
        if (Consumer::ORDERED && threadIdx.x == 9 * 32) keep_order<Tile>(x, w, smem_s);
        if constexpr (bwd_collects<Tile>)
            if (threadIdx.x / 32 % 2 == 1) Consumer::collect(x, w, smem, smem_s);
        /* The release waits until the additions have reached memory. This warp waits for it, so
         * that the consumers can store dK and dV meanwhile. */
        if (threadIdx.x / 32 == 11 && x.grid.rows > 0) {
            bar_sync(BAR_ADDED, 256 + 32);
            if (laneid() == 0) red_add_release(x.keys_done + w.task.unit);
        }
        if constexpr (Tile::PAIR) {
            if (threadIdx.x / 32 == 10) send_ds<Tile>(x, w, smem_s);
            __syncwarp();
            barrier_cluster();
        }
        return;
    }
    setmaxnreg_inc<Tile::CONSUMER_REGISTERS>();
    Consumer c;
    c.run(x, w, smem, smem_s, warpgroup);
    if (x.grid.rows > 0) bar_arrive(BAR_ADDED, 256 + 32);
    consumers_sync(); /* K and V are no longer read */
    c.store(x, w, smem_s, warpgroup);
    /* the other block may access this block's shared memory until here */
    if (Tile::PAIR) barrier_cluster();
}

/* ---- 3. the last pass of packed calls -------------------------------------------------------- */
/* Scales dQ of one tile of rows and rounds it. In dense calls a rounding task does this. */
template <class T, class Tile, class Grad>
__global__ void __launch_bounds__(BWD_PRE_THREADS)
    flash_attn_bwd_round_kernel(const __grid_constant__ Bwd g) {
    extern __shared__ __align__(1024) unsigned char smem[];
    const int tile = blockIdx.x % g.tiles, head = blockIdx.x / g.tiles % g.p.heads_q,
              b = blockIdx.x / g.tiles / g.p.heads_q;
    if constexpr (sizeof(Grad) == 4)
        scale_tiles<Tile, BWD_PRE_THREADS>(g, b, head, tile, 1);
    else
        round_tiles<T, Tile, BWD_PRE_THREADS, 1>(g, b, head, tile, 1, cvta_to_shared(smem));
}

/* ---- 4. launcher ----------------------------------------------------------------------------- */
/* An instance's key. */
struct BwdKey {
    enum {
        HEAD_DIM,
        HEAD_DIM_V,
        FORM, /* bit 0: softcap, ALiBi or a scale that is not positive; bit 1: deterministic */
        SMEM, /* bytes of shared memory */
        BQ    /* rows of a tile */
    };
};

/* True if an instance can run the call. */
bool serves(const gk_cuda_instance *instance, const gk_context *ctx,
            const gk_flash_attn_bwd_args *a) {
    const gk_flash_attn_args &f = a->fwd;
    const int last = f.q.ndim - 1;
    const bool modified = f.rules.softcap > 0 || f.rules.alibi_slopes || !(f.rules.scale > 0);
    return f.q.shape[last] <= instance->key[BwdKey::HEAD_DIM] &&
           f.v.shape[last] <= instance->key[BwdKey::HEAD_DIM_V] &&
           (modified ? 1 : 0) + (a->deterministic ? 2 : 0) == instance->key[BwdKey::FORM] &&
           tensor_map_fits(attn_shape(f.q)) && tensor_map_fits(attn_shape(f.k)) &&
           tensor_map_fits(attn_shape(f.v)) && tensor_map_fits(attn_shape(a->grad_out)) &&
           rows_aligned(a->dq) && rows_aligned(a->dk) && rows_aligned(a->dv) &&
           smem_fits(ctx, instance->key[BwdKey::SMEM]);
}

/* True if the sequences are short enough for this tile. A tile with fewer rows wastes less at the
 * ends of short sequences; a larger one is faster for long ones. */
template <class Tile> bool short_enough(const gk_flash_attn_args &a) {
    const int64_t seq_q = a.cu_seqlens_q ? a.max_seqlen_q : a.q.shape[2];
    const bool causal = a.rules.is_causal || a.rules.window_right >= 0;
    /* With GQA, one block takes all heads of a group, so its fixed cost matters less. */
    const bool alone = a.q.shape[1] == a.k.shape[1];
    return seq_q <= (causal ? BwdRange<Tile>::MOST_ROWS_CAUSAL : BwdRange<Tile>::MOST_ROWS) /
                        (alone ? 1 : 2);
}

/* True if the grid has fewer than eight waves. If a causal mask or a window makes blocks differ,
 * the longest ones must then not start last, because one of them takes a large part of the whole
 * time. */
template <class Tile> bool few_waves(const gk_context *ctx, const BwdGrid &grid) {
    return (int64_t)grid.units * grid.keys * BwdSmem<Tile>::BLOCKS <
           8 * gk_gpu_of(ctx->index)->num_sms;
}

/* True if ordered kernels start with the last keys and take the rows upwards (BwdOrderedStep). */
template <class Tile> bool goes_up(const gk_context *ctx, const Bwd &g, const BwdGrid &grid) {
    return g.p.rules.right >= 0 && !few_waves<Tile>(ctx, grid);
}

/* Plans the grid. Each cluster runs one task. In dense calls the grid also contains the rows and
 * rounding tasks, which run while the tensor cores of other SMs multiply. Separate kernels do this
 * work in packed calls, whose grid has many empty blocks, and in calls in which rows of out are not
 * aligned to 16 bytes. */
template <class Tile>
BwdGrid grid_of(const gk_context *ctx, const gk_flash_attn_bwd_args *a, const Bwd &g) {
    constexpr int BLOCKS = BwdSmem<Tile>::BLOCKS;
    /* clusters that run at the same time */
    const int clusters = gk_gpu_of(ctx->index)->num_sms / BLOCKS;
    BwdGrid grid = {};
    grid.units = g.p.heads_kv * g.p.batch;
    grid.keys = (int)gk_ceil_div(g.p.seq_k, BLOCKS * Tile::BKV);
    grid.together = 1;
    if (grid.units == 0 || grid.keys == 0) return grid;
    const bool masked = bwd_masked<Tile> || g.p.rules.left >= 0 || g.p.rules.right >= 0,
               few = few_waves<Tile>(ctx, grid);
    /* work units (kv heads) that run at the same time */
    const int wave = (int)gk_min_i64(gk_max_i64(clusters / grid.keys, 1), grid.units);
    if (a->deterministic && !goes_up<Tile>(ctx, g, grid)) {
        /* Blocks that start together have the same index in their unit, so none waits for
         * another. */
        grid.together = wave;
    } else if (masked && !few && grid.keys >= BWD_SET_KEYS && g.p.rules.left < 0) {
        grid.together = wave; /* the longest blocks of a wave come first */
    } else if (masked && few) {
        /* sets of equal size, each at most about a wave */
        const int64_t sets = gk_ceil_div(grid.units, gk_ceil_div(clusters, grid.keys));
        grid.together = (int)gk_ceil_div(grid.units, sets);
    }
    if (g.p.cu_q || !rows_aligned(a->fwd.out)) return grid;
    grid.rows = g.p.group * (int)gk_ceil_div(g.tiles, BLOCKS * Tile::TASK_TILES);
    const int64_t set_keys = (int64_t)grid.together * grid.keys;
    /* Rows tasks are short, so they need to run only a few sets before the keys tasks that use
     * them. */
    const int64_t lead = gk_ceil_div(clusters, set_keys + 2 * (int64_t)grid.together * grid.rows);
    /* Rounding tasks follow when the last block of their set is done. Under a mask a block takes up
     * to twice the mean time. */
    const int64_t lag = gk_ceil_div(2 * clusters, set_keys) + 1;
    grid.lead = (int)gk_min_i64(lead, grid.sets());
    grid.lag = (int)gk_min_i64(lag, grid.sets());
    return grid;
}

/* Bytes of the counters: two for each unit and, in ordered kernels, one for each tile of dQ. */
template <class Tile> size_t counters_bytes(const BwdGrid &grid, const Bwd &g, bool ordered) {
    const size_t counters =
        (grid.rows > 0 ? (size_t)grid.units * 2 : 0) +
        (ordered ? (size_t)g.p.heads_q * (size_t)g.row_tiles * BwdSmem<Tile>::BLOCKS : 0);
    return counters * sizeof(unsigned);
}

template <class Tile>
bool plan(const gk_cuda_instance *instance, const gk_context *ctx, const void *args, gk_plan *to) {
    const gk_flash_attn_bwd_args *a = (const gk_flash_attn_bwd_args *)args;
    if (!serves(instance, ctx, a) || !short_enough<Tile>(a->fwd)) return false;
    Bwd &g = gk_own<Bwd>(to) = bwd_of(ctx, a, Tile::BQ, Tile::HEAD_DIM);
    g.stats_apart = true;
    g.lse_factor = LOG2_E;
    to->tile[0] = Tile::BQ;
    to->tile[1] = Tile::BKV;
    const BwdGrid grid = grid_of<Tile>(ctx, a, g);
    to->tasks = (int64_t)grid.blocks() * BwdSmem<Tile>::BLOCKS;
    to->waves = (double)(grid.units * (int64_t)grid.keys * BwdSmem<Tile>::BLOCKS) /
                (double)gk_gpu_of(ctx->index)->num_sms;
    to->workspace_bytes = stats_bytes(g, sizeof(float)) + dq_sum_bytes(g) +
                          counters_bytes<Tile>(grid, g, a->deterministic);
    return true;
}

/* Fills in all parameters of a call. The counters follow dq_sum in the workspace. */
template <class Consumer>
gk_status hopper_params(const gk_context *ctx, const gk_flash_attn_bwd_args *a, const gk_plan *plan,
                        void *workspace, BwdHopperParams *to) {
    typedef typename Consumer::Tile Tile;
    typedef BwdSmem<Tile> S;
    BwdHopperParams &x = *to;
    x.g = gk_own<Bwd>(plan);
    x.grid = grid_of<Tile>(ctx, a, x.g);
    x.grid.prepare();
    x.by_heads = divisor_of((uint32_t)gk_max_i64(x.g.p.heads_kv, 1));
    x.by_keys = divisor_of((uint32_t)gk_max_i64(x.grid.keys, 1));
    x.g.stats = workspace;
    x.g.dq_sum = (float *)((char *)workspace + stats_bytes(x.g, sizeof(float)));
    x.up = Consumer::ORDERED && goes_up<Tile>(ctx, x.g, x.grid);
    unsigned *counters = (unsigned *)((char *)x.g.dq_sum + dq_sum_bytes(x.g));
    x.rows_done = counters;
    x.keys_done = counters + x.grid.units;
    x.turns = counters + (x.grid.rows > 0 ? 2 * x.grid.units : 0);
    gk_status status = make_tensor_map(OP, attn_shape(a->fwd.q), S::Q::box(), &x.q);
    if (status == GK_OK) status = make_tensor_map(OP, attn_shape(a->fwd.k), S::K::box(), &x.k);
    if (status == GK_OK) status = make_tensor_map(OP, attn_shape(a->fwd.v), S::V::box(), &x.v);
    if (status == GK_OK)
        status = make_tensor_map(OP, attn_shape(a->grad_out), S::O::box(), &x.grad_out);
    return status;
}

/* Runs the kernels of a call whose parameters are complete. */
template <class T, class Consumer>
gk_status run_kernels(const gk_context *ctx, const gk_flash_attn_bwd_args *a, const gk_plan *plan,
                      const typename Consumer::Params &x) {
    typedef typename Consumer::Tile Tile;
    const bool alone = x.grid.rows > 0; /* the grid computes everything except dsinks */
    const size_t cleared = counters_bytes<Tile>(x.grid, x.g, Consumer::ORDERED);
    gk_status status = cleared > 0 ? clear_memory(OP, ctx, x.rows_done, cleared) : GK_OK;
    if (status == GK_OK && !alone) status = bwd_pre(ctx, element<T>::dtype, x.g, a->dq.dtype);
    if (status == GK_OK)
        status = launch<flash_attn_bwd_sm90a_kernel<Consumer>>(
            OP, ctx, dim3((unsigned)plan->tasks), BwdSmem<Tile>::THREADS, BwdSmem<Tile>::BYTES, x);
    if (status != GK_OK) return status;
    if (alone) return x.g.dsinks ? bwd_sinks(ctx, element<T>::dtype, x.g) : GK_OK;
    const dim3 grid((unsigned)((int64_t)x.g.tiles * x.g.p.heads_q * x.g.p.batch));
    return launch<flash_attn_bwd_round_kernel<T, Tile, typename Consumer::Grad>>(
        OP, ctx, grid, BWD_PRE_THREADS, Tile::BQ * Tile::HEAD_DIM * 2, x.g);
}

template <class T, class Consumer>
gk_status run(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    const gk_flash_attn_bwd_args *a = (const gk_flash_attn_bwd_args *)args;
    BwdHopperParams x = {};
    const gk_status status = hopper_params<Consumer>(ctx, a, plan, workspace, &x);
    return status == GK_OK ? run_kernels<T, Consumer>(ctx, a, plan, x) : status;
}

/* One instance. MODIFIED: with softcap or ALiBi. ORDERED: dQ is added in a fixed order. */
#define BWD_INSTANCE(name, T, dtype, CONSUMER, TILE, MODIFIED, ORDERED)                          \
    {name,                                                                                       \
     dtype,                                                                                      \
     plan<TILE>,                                                                                 \
     run<T, CONSUMER<T, TILE, MODIFIED, ORDERED>>,                                               \
     {TILE::HEAD_DIM, TILE::HEAD_DIM_V, MODIFIED + 2 * ORDERED, BwdSmem<TILE>::BYTES, TILE::BQ}, \
     NULL}
/* Instances without softcap and ALiBi: both types, unordered and ordered. */
#define BWD_UNMODIFIED_INSTANCES(file, label, CONSUMER, TILE)                                \
    BWD_INSTANCE(file "_bf16_" label, __nv_bfloat16, GK_BF16, CONSUMER, TILE, false, false), \
        BWD_INSTANCE(file "_f16_" label, __half, GK_F16, CONSUMER, TILE, false, false),      \
        BWD_INSTANCE(file "_bf16_" label "_ordered", __nv_bfloat16, GK_BF16, CONSUMER, TILE, \
                     false, true),                                                           \
        BWD_INSTANCE(file "_f16_" label "_ordered", __half, GK_F16, CONSUMER, TILE, false, true)
/* All instances of a head_dim. */
#define BWD_INSTANCES(file, label, CONSUMER, TILE, SCORE_TILE, SCORE_ORDERED_TILE)               \
    BWD_UNMODIFIED_INSTANCES(file, label, CONSUMER, TILE),                                       \
        BWD_INSTANCE(file "_bf16_" label "_score", __nv_bfloat16, GK_BF16, CONSUMER, SCORE_TILE, \
                     true, false),                                                               \
        BWD_INSTANCE(file "_f16_" label "_score", __half, GK_F16, CONSUMER, SCORE_TILE, true,    \
                     false),                                                                     \
        BWD_INSTANCE(file "_bf16_" label "_score_ordered", __nv_bfloat16, GK_BF16, CONSUMER,     \
                     SCORE_ORDERED_TILE, true, true),                                            \
        BWD_INSTANCE(file "_f16_" label "_score_ordered", __half, GK_F16, CONSUMER,              \
                     SCORE_ORDERED_TILE, true, true)

} // namespace

#endif
