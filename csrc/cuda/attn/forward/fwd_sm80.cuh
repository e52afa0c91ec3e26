/* SPDX-License-Identifier: BSD-3-Clause */
/* fwd_sm80.cuh: attention on tensor cores by mma.sync, 16-bit, dense and packed, every modifier. It
 * is the kernel of flash_attn_fwd_sm80, of flash_attn_fwd_drop_sm80 (DROP) and of
 * flash_attn_fwd_scores_sm80 (SCORES: a mask or biases, ../scores_mma.cuh). It is FlashAttention-2
 * (Dao 2023, arXiv:2307.08691): a block owns BQ rows of one head and loops over the keys that these
 * rows see.
 *
 *  S = Q K^T   s = score(S), -inf for keys that a row does not see
 *  P = e^(s - m)   O = O e^(m_old - m) + P V
 *  out = O / (sum P + e^(sink - m))   lse = m + log(sum P + e^(sink - m))
 *
 * q [.., Sq, D], k [.., Sk, D], v [.., Sk, Dv], out [.., Sq, Dv], rows aligned to 16 bytes; lse
 * [.., Sq] float32. D and Dv are multiples of 8 up to the bucket HEAD_DIM; the remaining columns
 * are zeros in shared memory.
 *
 * Work split: grid x = (split, head, tile of BQ rows), longest tiles first (fwd_work.cuh). A warp
 * owns BQ / WARPS rows of S and O and reads the shared K and V. If the blocks would not fill the
 * GPU, the keys of a tile are split. The partial results then go through the workspace.
 *
 *  Pipeline, STAGES = 2: one barrier a tile
 *    cp.async  K0 V0 | K1 V1 | K2 V2 |
 *    compute         | Q K0, softmax, P V0 | Q K1, ...
 *  Pipeline, STAGES = 1: two barriers a tile; a buffer is refilled when all have read it
 *    cp.async  K0 | V0 | K1 | V1 | K2 |
 *    compute        | Q K0 | softmax, P V0 | Q K1 |
 *
 * Not handled: float32 (flash_attn_fwd_simt), unaligned rows (flash_attn_fwd_plain). */
#ifndef GPUKERN_CUDA_FWD_SM80_CUH
#define GPUKERN_CUDA_FWD_SM80_CUH

#include "../../tile/copy.cuh"
#include "../../tile/fragment.cuh"
#include "../../tile/pipeline.cuh"
#include "../drop.cuh"
#include "fwd_work.cuh"
#include "../mask.cuh"
#include "../scores_mma.cuh"
#include "../softmax.cuh"

namespace {

/* ---- 1. shared memory ------------------------------------------------------------------------ */
/* The values that only tiles with a mask and the end of the kernel read. They are in shared memory,
 * because the loop needs every register. */
struct Kept {
    FwdWork work;
    Sequence seq;
    FwdKeys keys;
    Score score;
};

template <class Tile> struct Smem {
    static constexpr int ROW_BYTES = Tile::HEAD_DIM * 2, THREADS = Tile::WARPS * 32;
    /* 16..32 KiB; out is staged here at the end */
    typedef smem_tile<Tile::BQ, ROW_BYTES> QTile;
    typedef smem_tile<Tile::BKV, ROW_BYTES> KvTile; /* 8..32 KiB; STAGES of K, then STAGES of V */
    static constexpr int K = QTile::bytes, V = K + Tile::STAGES * KvTile::bytes;
    static constexpr int KEPT = V + Tile::STAGES * KvTile::bytes, BYTES = KEPT + (int)sizeof(Kept);
    static_assert(QTile::bytes % 128 == 0 && KvTile::bytes % 128 == 0,
                  "every tile begins at a multiple of 128 bytes");
    static_assert(Tile::BQ % (16 * Tile::WARPS) == 0 && Tile::BKV % 16 == 0 &&
                      Tile::HEAD_DIM % 16 == 0,
                  "whole products");
    static_assert(BYTES * Tile::CTAS <= 227 * 1024, "the blocks of an SM share its memory");
};

/* The number of bank conflicts when out is stored to shared memory. A lane stores two columns of an
 * accumulator as 4 bytes, so a warp stores 8 rows of one chunk. */
template <class QTile> constexpr int store_ways() {
    int most = 0;
    for (int chunk = 0; chunk < QTile::chunks; ++chunk) {
        int at[32] = {};
        for (int lane = 0; lane < 32; ++lane)
            at[lane] = QTile::offset_of(frag_row(lane, 0), chunk * 8 + frag_col(lane, 0), 2);
        if (ways(at, 4) > most) most = ways(at, 4);
    }
    return most;
}

/* ---- 2. loading tiles ------------------------------------------------------------------------ */
/* The elements of a tile of K or V that a thread copies: one column of 16-byte chunks in each
 * panel, in rows that are STEP apart. Shared-memory addresses then differ by constants, and global
 * addresses by one addition. */
template <class T, class Tile, int THREADS> struct TileIn {
    static constexpr int COLS = Tile::chunks % 16 == 0   ? 16
                                : Tile::chunks % 12 == 0 ? 12
                                : Tile::chunks % 8 == 0  ? 8
                                                         : 4;
    /* STEP is a multiple of 8, because the swizzle repeats after 8 rows */
    static constexpr int STEP = THREADS / COLS / 8 * 8, PANELS = Tile::chunks / COLS;
    static_assert(Tile::chunks % COLS == 0 && STEP > 0 && Tile::rows % STEP == 0,
                  "threads tile the tile");

    int row, chunk, offset[PANELS];

    __device__ __forceinline__ TileIn(int thread) {
        /* the threads that are left over copy no row */
        row = thread < STEP * COLS ? thread / COLS : Tile::rows;
        chunk = thread % COLS;
#pragma unroll
        for (int panel = 0; panel < PANELS; ++panel)
            offset[panel] = Tile::offset(row, chunk + panel * COLS);
    }

    /* Copies a tile. from_g: this thread's first element. Rows from rows_valid on, which may
     * hold NaN, and columns from cols on become zeros; cols is a multiple of 8. */
    __device__ __forceinline__ void copy(smem_addr tile_s, const T *from_g, int64_t row_stride,
                                         int rows_valid, int cols) const {
        if (STEP * COLS != THREADS && row == Tile::rows) return;
#pragma unroll
        for (int panel = 0; panel < PANELS; ++panel) {
            const int last = (chunk + panel * COLS) * 8 < cols ? rows_valid : 0;
#pragma unroll
            for (int i = 0; i < Tile::rows / STEP; ++i)
                cp_async_cg_16(tile_s + offset[panel] + i * STEP * Tile::row_bytes,
                               from_g + panel * COLS * 8 + i * STEP * row_stride,
                               row + i * STEP < last ? 16 : 0);
        }
    }

    __device__ __forceinline__ int64_t start(int64_t row_stride) const {
        return row * row_stride + chunk * 8;
    }
};

/* ---- 3. the two products of a tile ----------------------------------------------------------- */
template <class T, class Tile> struct Products {
    typedef typename Smem<Tile>::QTile QTile;
    typedef typename Smem<Tile>::KvTile KvTile;
    static constexpr int M = Tile::BQ / Tile::WARPS / 16, N = Tile::BKV / 8,
                         ND = Tile::HEAD_DIM / 8;

    /* Q as operands, for tiles that keep it in registers. */
    static constexpr int KEPT_STEPS = Tile::Q_IN_REGISTERS ? Tile::HEAD_DIM / 16 : 1;
    struct QFragments {
        uint32_t a[KEPT_STEPS][M][4];
    };

    static __device__ __forceinline__ void load_q(QFragments &q, smem_addr q_at) {
#pragma unroll
        for (int kk = 0; kk < KEPT_STEPS; ++kk)
#pragma unroll
            for (int m = 0; m < M; ++m)
                load_frag_a(q.a[kk][m], QTile::down(QTile::along(q_at, 2 * kk), 16 * m));
    }

    /* S [BQ][BKV] = Q K^T; K is stored as [n][k]. */
    static __device__ __forceinline__ void scores(float (&s)[M][N][4], const QFragments &q,
                                                  smem_addr q_at, smem_addr k_at) {
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int n = 0; n < N; ++n) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0;
#pragma unroll
        for (int kk = 0; kk < Tile::HEAD_DIM / 16; ++kk) {
            uint32_t a[M][4], b[4];
#pragma unroll
            for (int m = 0; m < M; ++m) {
                if (Tile::Q_IN_REGISTERS)
                    for (int e = 0; e < 4; ++e) a[m][e] = q.a[kk % KEPT_STEPS][m][e];
                else
                    load_frag_a(a[m], QTile::down(QTile::along(q_at, 2 * kk), 16 * m));
            }
#pragma unroll
            for (int n = 0; n < N / 2; ++n) {
                load_frag_b(b, KvTile::down(KvTile::along(k_at, 2 * kk), 16 * n));
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    mma_add<T>(s[m][2 * n], a[m], b);
                    mma_add<T>(s[m][2 * n + 1], a[m], b + 2);
                }
            }
        }
    }

    /* O [BQ][HEAD_DIM] += P V; P is in the registers of S, V is stored as [k][n]. */
    static __device__ __forceinline__ void values(float (&o)[M][ND][4], const float (&p)[M][N][4],
                                                  smem_addr v_at) {
#pragma unroll
        for (int kk = 0; kk < Tile::BKV / 16; ++kk) {
            uint32_t a[M][4], b[4];
#pragma unroll
            for (int m = 0; m < M; ++m) acc_to_a<T>(a[m], p[m][2 * kk], p[m][2 * kk + 1]);
#pragma unroll
            for (int n = 0; n < ND / 2; ++n) {
                load_frag_b_trans(b, KvTile::down(KvTile::along(v_at, 2 * n), 16 * kk));
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    mma_add<T>(o[m][2 * n], a[m], b);
                    mma_add<T>(o[m][2 * n + 1], a[m], b + 2);
                }
            }
        }
    }
};

/* ---- 4. masked tiles ------------------------------------------------------------------------- */
/* own_row is the sequence's row of s[0][0][0], own_col the tile's column of it. Both are recomputed
 * at each use. */
template <int M> __device__ __forceinline__ int own_row(const Kept &kept) {
    const int thread = mov_tid_x();
    return kept.work.i0 + thread / 32 * 16 * M + frag_row(thread % 32, 0);
}
__device__ __forceinline__ int own_col() { return frag_col(mov_tid_x() % 32, 0); }

/* Applies dropout to the weights of a tile, after their sums are taken. key: the tile's first key,
 * counted from the block's first. */
template <int M, int N>
__device__ __forceinline__ void drop_weights(float (&s)[M][N][4], const Dropping<FwdParams> &params,
                                             const Kept &kept, int key) {
    const Problem &p = params.problem;
    const int64_t row0 = drop_row0(p, kept.work.b, kept.work.head, kept.seq.q0);
    drop_keys(s, params.drop, row0 + own_row<M>(kept) * p.lse.row, p.lse.row, kept.keys.lo + key);
}
template <int M, int N>
__device__ __forceinline__ void drop_weights(float (&)[M][N][4], const FwdParams &, const Kept &,
                                             int) {}

/* ---- 5. the kernel --------------------------------------------------------------------------- */
/* The parameters of a kernel with or without dropout (DROP), a mask or biases (SCORES). */
template <bool DROP, bool SCORES> struct ParamsOf {
    typedef typename dropping_if<FwdParams, DROP>::type type;
};
template <bool DROP> struct ParamsOf<DROP, true> {
    typedef Scored<typename dropping_if<FwdParams, DROP>::type> type;
};

template <int M, bool SCORES> struct SoftmaxOf {
    typedef OnlineSoftmax<M> type;
};
template <int M> struct SoftmaxOf<M, true> {
    typedef LoneSoftmax<M> type;
};

/* True if a stored mask hides key tile `at` from every row of its block. */
template <int BKV, class Params>
__device__ __forceinline__ bool left_out(const Params &params, const FwdWork &work,
                                         const FwdKeys &keys, int at) {
    const MmaScores &x = params.scores;
    return x.mask && block_flag(x, mask_of(x, work.b, work.head), work.i0, keys.lo + at * BKV) ==
                         GK_BLOCK_EMPTY;
}
/* The first key tile at or after `at` that is not left out, or keys.tiles. */
template <int BKV, class Params>
__device__ __forceinline__ int seen_tile(const Params &params, const FwdWork &work,
                                         const FwdKeys &keys, int at) {
    while (at < keys.tiles && left_out<BKV>(params, work, keys, at)) ++at;
    return at;
}

/* DROP: dropout; requires MODIFIED. SCORES: a mask or biases; requires MODIFIED. */
template <class T, class Tile, bool MODIFIED, bool DROP, bool SCORES = false>
__global__ void __launch_bounds__(Tile::WARPS * 32, Tile::CTAS)
    flash_attn_fwd_sm80_kernel(typename ParamsOf<DROP, SCORES>::type params) {
    typedef Smem<Tile> S;
    typedef typename S::QTile QTile;
    typedef typename S::KvTile KvTile;
    typedef Products<T, Tile> X;
    constexpr int M = X::M, N = X::N, ND = X::ND, THREADS = S::THREADS, BKV = Tile::BKV;
    static_assert(store_ways<QTile>() == 1, "out goes to shared memory without conflicts");
    extern __shared__ __align__(1024) unsigned char smem[];
    const smem_addr q_s = cvta_to_shared(smem), k_s = q_s + S::K, v_s = q_s + S::V;
    const Problem &p = params.problem;
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;

    /* 5.1 rows and keys of this block */
    const FwdWork work = fwd_work<Tile::BQ>(params, blockIdx.x);
    const Sequence seq = sequence_of(p, work.b);
    if (work.i0 >= seq.seq_q) return;
    const int rows = min(Tile::BQ, seq.seq_q - work.i0);
    static_assert(!SCORES || GK_MASK_TILE % BKV == 0, "a tile lies in one block of a mask");
    const FwdKeys keys =
        fwd_keys<BKV>(params, seq.span, work.i0, rows, work.split, SCORES ? BKV : 1);
    int tiles = keys.tiles; /* minus the key tiles that a stored mask leaves out */
    if constexpr (SCORES)
        for (int at = 0; at < keys.tiles; ++at) tiles -= left_out<BKV>(params, work, keys, at);
    const int head_kv = work.head / p.group;
    const T *q_g = (const T *)p.q.data + p.q.at(work.b, work.head, seq.q0 + work.i0);
    /* This thread's first element of the next tile to load. */
    const TileIn<T, KvTile, THREADS> in(thread);
    const T *k_g =
        (const T *)p.k.data + p.k.at(work.b, head_kv, seq.k0 + keys.lo) + in.start(p.k.row);
    const T *v_g =
        (const T *)p.v.data + p.v.at(work.b, head_kv, seq.k0 + keys.lo) + in.start(p.v.row);

    const smem_addr q_at = frag_a_base<QTile>(q_s, lane, warp * 16 * M);
    const smem_addr k_at = frag_b_base<KvTile>(k_s, lane),
                    v_at = frag_b_trans_base<KvTile>(v_s, lane);
    const float unit = MODIFIED ? 1.f : (float)p.rules.scale, unit_log2 = unit * LOG2_E;

    Kept &kept = *(Kept *)(smem + S::KEPT); /* visible to all threads after the first barrier */
    if (thread == 0) {
        kept.work = work;
        kept.seq = seq;
        kept.keys = keys;
        if (MODIFIED) kept.score = score_of(p, seq, work.b, work.head);
    }

    typename SoftmaxOf<M, SCORES>::type softmax;
    float o[M][ND][4];
    softmax.clear();
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < ND; ++n) o[m][n][0] = o[m][n][1] = o[m][n][2] = o[m][n][3] = 0;

    /* 5.2 the loop over key tiles. left: the number of keys from the next tile to load on */
    int left = keys.hi - keys.lo;
    int at = 0; /* SCORES: index of the t-th tile among all key tiles */
    if constexpr (SCORES) {
        at = seen_tile<BKV>(params, work, keys, 0);
        k_g += (int64_t)at * BKV * p.k.row;
        v_g += (int64_t)at * BKV * p.v.row;
        left -= at * BKV;
    }
    if (tiles > 0) {
        copy_tile_async<QTile, THREADS>(q_s, q_g, p.q.row, rows, p.head_dim, thread);
        in.copy(k_s, k_g, p.k.row, left, p.head_dim);
        cp_async_commit_group();
        if (Tile::STAGES == 2) {
            in.copy(v_s, v_g, p.v.row, left, p.head_dim_v);
            cp_async_commit_group();
        }
    }
    typename X::QFragments q;
    for (int t = 0; t < tiles; ++t) {
        const int stage = (t & (Tile::STAGES - 1)) * KvTile::bytes;
        /* in the first tile, the first product waits for Q and K only */
        const bool v_later = Tile::STAGES == 2 && t == 0;
        if (v_later)
            cp_async_wait_group<1>();
        else
            cp_async_wait_group<0>();
        /* Tile t has arrived (with one stage, its K), and all threads have read what is overwritten
         * next. */
        __syncthreads();
        if (Tile::Q_IN_REGISTERS && t == 0) X::load_q(q, q_at);
        if (SCORES) left = kept.keys.hi - kept.keys.lo - at * BKV;
        if (Tile::STAGES == 1) in.copy(v_s, v_g, p.v.row, left, p.head_dim_v);
        int next = 0;
        if constexpr (SCORES) {
            next = seen_tile<BKV>(params, kept.work, kept.keys, at + 1);
            k_g += (next - at) * (BKV * p.k.row);
            v_g += (next - at) * (BKV * p.v.row);
            /* recomputed: as a variable of the loop it spilled */
            left = kept.keys.hi - kept.keys.lo - next * BKV;
        } else {
            k_g += BKV * p.k.row;
            v_g += BKV * p.v.row;
            left -= BKV;
        }
        if (Tile::STAGES == 2 && t + 1 < tiles) {
            in.copy(k_s + KvTile::bytes - stage, k_g, p.k.row, left, p.head_dim);
            in.copy(v_s + KvTile::bytes - stage, v_g, p.v.row, left, p.head_dim_v);
        }
        cp_async_commit_group();

        float s[M][N][4];
        X::scores(s, q, q_at, k_at + stage);
        const int place = SCORES ? at : t;
        if (MODIFIED)
            modify(s, kept.score, own_row<M>(kept), own_col() + kept.keys.lo + place * BKV);
        if (place < kept.keys.plain_first || place >= kept.keys.plain_end)
            mask(s, kept.seq, own_row<M>(kept), own_col() + kept.keys.lo + place * BKV);
        if constexpr (SCORES)
            add_scores<T>(s, params.scores, kept.work.b, kept.work.head, own_row<M>(kept),
                          own_col() + kept.keys.lo + place * BKV);

        if (Tile::STAGES == 1) {
            cp_async_wait_group<0>();
            __syncthreads(); /* V of tile t has arrived; all have read its K */
            if (t + 1 < tiles) in.copy(k_s, k_g, p.k.row, left, p.head_dim);
            cp_async_commit_group();
        }
        if (v_later) {
            cp_async_wait_group<1>();
            /* V of the first tile has arrived; the next tile is still in flight */
            __syncthreads();
        }
        if constexpr (SCORES)
            softmax.step(s, o);
        else
            softmax.step(s, o, unit_log2);
        drop_weights<M>(s, params, kept, place * BKV);
        X::values(o, s, v_at + stage);
        if (SCORES) at = next;
    }

    /* 5.3 the results go to the tensors, or to a partial result in the workspace */
    /* Makes `kept` visible if there was no tile. All threads have read Q, whose space out takes. */
    __syncthreads();
    const FwdWork own = kept.work;
    const int row0 = own_row<M>(kept), col0 = own_col();
    const int q0 = kept.seq.q0, seq_q = kept.seq.seq_q;
    const bool whole = params.splits == 1;
    const float sink = whole ? sink_of(p, own.head) : -INFINITY;
    float *lse_g = whole ? (float *)p.lse.data : params.lse_splits + own.split * params.split_rows;
    const int64_t lse0 = own.b * p.lse.batch + own.head * p.lse.head + (int64_t)q0 * p.lse.row;
    if constexpr (SCORES) { /* mark the tile if O is not finite (fwd_mend.cuh) */
        float none = 0;
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int n = 0; n < ND; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) none = fmaf(o[m][n][e], 0.f, none);
        if (none != none)
            params.spoilt[(own.b * p.heads_q + own.head) * params.tiles_q + own.i0 / Tile::BQ] = 1;
    }
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            RowResult y =
                row_result(softmax.peak[m][r] * unit, quad_sum(softmax.total[m][r]), sink);
            if (DROP) y.factor *= drop_factor(params);
            const int i = row0 + 16 * m + 8 * r;
            const int64_t row = lse0 + (int64_t)i * p.lse.row;
            if (col0 == 0 && i < seq_q && lse_g) lse_g[row] = y.lse;
            if (whole) {
#pragma unroll
                for (int n = 0; n < ND; ++n)
                    st_shared_32(
                        q_s + QTile::offset_of(i - own.i0, 8 * n + col0, 2),
                        pack2<T>(o[m][n][2 * r] * y.factor, o[m][n][2 * r + 1] * y.factor));
            } else if (i < seq_q) {
                float *part =
                    params.out_splits + (own.split * params.split_rows + row) * p.head_dim_v;
#pragma unroll
                for (int n = 0; n < ND; ++n) {
                    const int col = 8 * n + col0;
                    if (col < p.head_dim_v)
                        *(float2 *)(part + col) =
                            make_float2(o[m][n][2 * r] * y.factor, o[m][n][2 * r + 1] * y.factor);
                }
            }
        }
    }
    if (!whole) return;
    __syncthreads(); /* out is complete */
    T *out_g = (T *)p.out.data + p.out.at(own.b, own.head, q0 + own.i0);
    copy_tile_out<QTile, THREADS>(out_g, p.out.row, q_s, min(Tile::BQ, seq_q - own.i0),
                                  p.head_dim_v, mov_tid_x());
}

/* ---- 6. launcher ----------------------------------------------------------------------------- */
/* An instance's key. */
struct FwdSm80Key {
    enum {
        HEAD_DIM,
        MODIFIED,  /* softcap, ALiBi, or a scale near 0 */
        SMEM,      /* bytes of shared memory */
        EVERY_CALL /* the modified kernel serves calls without modifiers too */
    };
};

/* True if an instance can run the call. */
bool serves(const gk_cuda_instance *instance, const gk_context *ctx, const gk_flash_attn_args *a) {
    const int64_t head_dim = gk_max_i64(a->q.shape[a->q.ndim - 1], a->v.shape[a->v.ndim - 1]);
    /* The unmodified kernel takes the maximum of raw products and multiplies by the scale later,
     * so the scale must be positive and must not vanish. */
    const bool modified = instance->key[FwdSm80Key::EVERY_CALL] || a->rules.softcap > 0 ||
                          a->rules.alibi_slopes || !(a->rules.scale > 1e-30);
    return head_dim <= instance->key[FwdSm80Key::HEAD_DIM] &&
           modified == (instance->key[FwdSm80Key::MODIFIED] != 0) && all_aligned(a) &&
           smem_fits(ctx, instance->key[FwdSm80Key::SMEM]);
}

template <class Tile>
bool plan(const gk_cuda_instance *instance, const gk_context *ctx, const void *args, gk_plan *to) {
    const gk_flash_attn_args *a = (const gk_flash_attn_args *)args;
    if (!serves(instance, ctx, a)) return false;
    const FwdParams &p = gk_own<FwdParams>(to) =
        fwd_params(ctx, a, Tile::BQ, Tile::BKV, Tile::CTAS, 1, fwd_by_parts(a) ? 2 : 1);
    fwd_plan(ctx, p, Tile::BQ, Tile::BKV, Tile::CTAS, fwd_blocks(p), to);
    return gk_grid_fits(to->tasks);
}

inline void take_dropout(FwdParams &, const gk_flash_attn_args *) {}
inline void take_dropout(Dropping<FwdParams> &p, const gk_flash_attn_args *a) {
    p.drop = dropout_of(a);
}

template <class T, class Tile, bool MODIFIED, bool DROP = false>
gk_status run(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    const gk_flash_attn_args *a = (const gk_flash_attn_args *)args;
    typename dropping_if<FwdParams, DROP>::type p;
    (FwdParams &)p = gk_own<FwdParams>(plan);
    take_dropout(p, a);
    fwd_place(&p, workspace);
    const gk_status status = launch<flash_attn_fwd_sm80_kernel<T, Tile, MODIFIED, DROP>>(
        "gk_flash_attn_fwd", ctx, dim3((unsigned)plan->tasks), Smem<Tile>::THREADS,
        Smem<Tile>::BYTES, p);
    return status == GK_OK ? fwd_finish<T>("gk_flash_attn_fwd", ctx, a, p) : status;
}

} // namespace

#endif
