/* SPDX-License-Identifier: BSD-3-Clause */
/* bwd_sm80.cuh: the kernel of flash_attn_bwd_sm80, with DROP of flash_attn_bwd_drop_sm80, and with
 * SCORES of flash_attn_bwd_scores_sm80. It computes the gradients of attention in bfloat16 and
 * float16 with mma.sync (Dao 2023, arXiv:2307.08691, Algorithm 2). The equations are in bwd.cuh.
 *
 * Reads q, grad_out [B, Hq, Sq, D | Dv], k, v [B, Hkv, Sk, D | Dv], or packed, with rows aligned to
 * 16 bytes, and the stats of the pre-pass. Writes dk and dv, rounded once. Adds dq into dq_sum
 * (float32), which the post-pass scales, rounds and writes.
 *
 * Work split: a block owns BKV keys of one kv head. It loops over the rows that see them, BQ at a
 * time, for every query head of the group. dK and dV stay in registers, 32 keys a warp. S^T = K Q^T
 * and dP^T = V dO^T have keys as rows. P^T and dS^T in registers are then already the A operands of
 * dV += P^T dO and dK += dS^T Q. Only dQ += dS K sums over the keys of all warps: dS^T goes through
 * shared memory, and dQ to dq_sum by atomic adds in no fixed order.
 *
 *  SHARED   more warps than WARPS_KV: several warps have the same keys. Each has a part of the rows
 *           in S and dP and a part of the columns in dK and dV, so P^T also goes through shared
 *           memory.
 *  PAIRS    SHARED with two warps for the same keys.
 *
 * Shared memory: Smem<Tile> below. The steps of tile j, which is a tile of rows of one head:
 *
 *  wait for Q_j dO_j | barrier | copy Q_j+1 dO_j+1 ..............................................
 *    not SHARED                | dQ_j-1 from dS_j-1 | S | dP, P | dV, dS | dK
 *    PAIRS                     | S | dP, P | barrier of the pair | dV, dS | barrier | dK | dQ
 *    SHARED otherwise          | S | dP, P | dS | barrier | dV | dK | dQ
 *
 * With SCORES the call has a mask or biases (../scores_mma.cuh). Steps whose block of a stored mask
 * is empty are skipped. The gradient of a bias is stored, or added up in float32 by atomic adds if
 * the bias broadcasts.
 *
 * A hidden row or key may hold NaN. P and dS are 0 there, but 0 times NaN is NaN. So NaN and inf in
 * the elements of dO, Q and K are replaced by finite numbers before the products with P and dS. A
 * NaN of dO in a visible pair still reaches the gradients, because it makes delta of its row NaN.
 *
 * In deterministic calls flash_attn_bwd_dq_sm80 computes dq and this kernel leaves it out (ADD
 * false). Not handled: float32 (flash_attn_bwd_simt); float64 and unaligned rows
 * (flash_attn_bwd_plain). */
#ifndef GPUKERN_CUDA_BWD_SM80_CUH
#define GPUKERN_CUDA_BWD_SM80_CUH

#include "../../ptx/bar.cuh"
#include "../../ptx/laneid.cuh"
#include "bwd_mma.cuh"
#include "../drop.cuh"
#include "../scores_mma.cuh"

namespace {

constexpr const char *OP = "gk_flash_attn_bwd";

/* ---- 1. shapes ------------------------------------------------------------------------------- */
template <class Tile> struct Shape {
    static constexpr int D = Tile::head_dim, BQ = Tile::bq, BKV = Tile::bkv;
    static constexpr int WARPS = Tile::warps, THREADS = WARPS * 32, WARPS_KV = Tile::warps_kv;
    static constexpr int SHARERS = WARPS / WARPS_KV;
    static constexpr int M = BKV / WARPS_KV / 16; /* a warp has M x 16 keys */
    /* rows of queries of a warp in S and dP */
    static constexpr int ROWS_W = BQ / SHARERS;
    /* columns of a warp in dK and dV */
    static constexpr int COLS_W = D / SHARERS;
    static constexpr int DQ_ROWS = BQ / Tile::dq_warps;           /* rows of a warp in dQ */
    static constexpr int DQ_COLS = D / (WARPS / Tile::dq_warps);  /* columns of a warp in dQ */
    static constexpr int DQ_M = DQ_ROWS / 16, DQ_N = DQ_COLS / 8; /* accumulators of dQ */
    typedef smem_tile<BKV, D * 2> Keys;                           /* K, V [BKV][D] */
    typedef smem_tile<BQ, D * 2> Queries;                         /* Q, dO [BQ][D] */
    typedef smem_tile<BKV, BQ * 2> Scores;                        /* P^T, dS^T [BKV][BQ] */
    static_assert(WARPS_KV * M * 16 == BKV && SHARERS * WARPS_KV == WARPS,
                  "warps share the keys evenly");
    static_assert(ROWS_W % 16 == 0 && COLS_W % 16 == 0 && DQ_ROWS % 16 == 0 && DQ_COLS % 16 == 0,
                  "operands are loaded 16 x 16");
    static_assert((BQ * 8) % 16 == 0 && BQ * 8 / 16 <= THREADS, "one pass copies a tile of stats");
};

/* Byte offsets in the block's dynamic shared memory. */
template <class Tile> struct Smem {
    typedef Shape<Tile> X;
    /* SHARED: P^T and dS^T; otherwise dS^T of this step and of the previous one */
    static constexpr int score_tiles = 2;
    static constexpr int k = 0, v = k + X::Keys::bytes;
    static constexpr int q = v + X::Keys::bytes, grad_out = q + Tile::stages * X::Queries::bytes;
    static constexpr int scores = grad_out + Tile::stages * X::Queries::bytes;
    /* [stages][BQ] of {lse, delta} */
    static constexpr int stats = scores + score_tiles * X::Scores::bytes;
    /* the bounds of Mask, which only masked tiles read */
    static constexpr int span = stats + Tile::stages * X::BQ * 8;
    /* what copies read; see store_source */
    static constexpr int source = span + 16;
    /* what the end of the kernel reads: the addresses and rows of dk and dv */
    static constexpr int target = source + 32;
    /* loop bounds: tile_lo, tile_hi, head_end, row_tile */
    static constexpr int range = target + 32;
    static constexpr int bytes = range + 16;
    static_assert(v % 128 == 0 && q % 128 == 0 && grad_out % 128 == 0 && scores % 128 == 0,
                  "tiles start at 128 bytes");
};

/* Bank conflicts of a store of S^T: a warp stores c[0], c[1] of an accumulator as 4 bytes of a
 * row of Scores, that is 8 rows and 4 neighbours of a chunk. */
template <class Scores> constexpr int store_ways() {
    int at[32] = {};
    for (int lane = 0; lane < 32; ++lane)
        at[lane] = Scores::offset_of(frag_c(lane, 0).row, frag_c(lane, 0).col, 2);
    return ways(at, 4);
}
static_assert(store_ways<Shape<Bwd64>::Scores>() == 1 && store_ways<Shape<Bwd128>::Scores>() == 1 &&
                  store_ways<Shape<Bwd256>::Scores>() == 1 &&
                  store_ways<Shape<Bwd128Small>::Scores>() == 1,
              "stores of dS meet no bank conflicts");

/* ---- 2. helpers ------------------------------------------------------------------------------ */
/* Computes dQ [BQ][D] of a tile and adds it into dq_sum. The threads of a warp add to 128
 * contiguous bytes. */
template <class Tile, class T, bool SCORES = false>
__device__ __forceinline__ void add_dq(float *sum_g, int tile, smem_addr ds_s, smem_addr k_s,
                                       int warp, int lane) {
    typedef Shape<Tile> X;
    float c[X::DQ_M][X::DQ_N][4] = {};
    const int row = warp % Tile::dq_warps * X::DQ_ROWS, col = warp / Tile::dq_warps * X::DQ_COLS;
    const smem_addr a_base = frag_a_trans_base<typename X::Scores>(ds_s, lane, 0, row / 8);
    const smem_addr b_base = frag_b_trans_base<typename X::Keys>(k_s, lane, 0, col / 8);
#pragma unroll
    for (int kk = 0; kk < X::BKV / 16; ++kk) {
        uint32_t a[X::DQ_M][4];
#pragma unroll
        for (int m = 0; m < X::DQ_M; ++m)
            load_frag_a_trans(a[m], X::Scores::down(X::Scores::along(a_base, 2 * m), 16 * kk));
        mma_columns<typename X::Keys, T, SCORES>(c, a, X::Keys::down(b_base, 16 * kk));
    }
    float *to = sum_g + (int64_t)tile * (X::BQ * X::D) + threadIdx.x;
#pragma unroll
    for (int m = 0; m < X::DQ_M; ++m)
#pragma unroll
        for (int n = 0; n < X::DQ_N; ++n)
#pragma unroll
            for (int r = 0; r < 4; ++r)
                atomicAdd(to + ((m * X::DQ_N + n) * 4 + r) * X::THREADS, c[m][n][r]);
}

/* Which of a lane's pairs are visible: row i sees keys i + lo_off .. i + lo_off + width - 1
 * within [key_lo, key_hi). */
struct Mask {
    int key, row; /* of element [0][0][0] */
    int lo_off, key_lo, key_hi;
    unsigned width;

    __device__ __forceinline__ bool sees(int m, int n, int r) const {
        const int j = key + m * 16 + r / 2 * 8;
        return j >= key_lo && j < key_hi && (unsigned)(j - (row + n * 8 + r % 2) - lo_off) < width;
    }
};

__device__ __forceinline__ void store_span(smem_addr at_s, const Span &x) {
    st_shared_128(at_s, make_uint4(x.lo_off, x.hi_off - x.lo_off, x.key_lo, x.key_hi));
}

__device__ __forceinline__ Mask load_mask(smem_addr span_s, int key, int row) {
    const uint4 x = ld_shared_128(span_s);
    return {key, row, (int)x.x, (int)x.z, (int)x.w, x.y};
}

template <int M, int N>
__device__ __forceinline__ void hide(float (&s)[M][N][4], const Mask &mask) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int r = 0; r < 4; ++r) s[m][n][r] = mask.sees(m, n, r) ? s[m][n][r] : -INFINITY;
}

/* P = 2^(scale qk - lse) for the n-th group of eight rows. stats: {lse, delta} of the lane's two
 * rows. */
template <int M, int N>
__device__ __forceinline__ void weights(float (&s)[M][N][4], int n, uint4 stats, float scale_log2) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int r = 0; r < 4; ++r)
            s[m][n][r] = ex2_approx_ftz(s[m][n][r] * scale_log2 -
                                        __uint_as_float(r & 1 ? stats.z : stats.x));
}

/* dS = P (dP - delta), in place of dP. */
template <int M, int N>
__device__ __forceinline__ void gradients(const float (&w)[M][N][4], float (&dp)[M][N][4], int n,
                                          uint4 stats) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int r = 0; r < 4; ++r)
            dp[m][n][r] = w[m][n][r] * (dp[m][n][r] - __uint_as_float(r & 1 ? stats.w : stats.y));
}

/* The dropout bits of the n-th group of eight rows. The batch index is in shared memory. */
template <int M>
__device__ __forceinline__ uint2 keep_eight(const Dropping<Bwd> &g, smem_addr source_s, int head,
                                            int n, const Mask &mask) {
    const Problem &p = g.p;
    const int b = (int)ld_shared_128(source_s + 16).w, lane = threadIdx.x % 32;
    const int64_t row0 =
        drop_row0(p, b, head, drop_q0(p, b)) + (int64_t)(mask.row - lane % 4 * 2) * p.lse.row;
    return keep_of_rows<M>(g.drop, row0, p.lse.row, mask.key - lane / 4, n);
}
template <int M>
__device__ __forceinline__ uint2 keep_eight(const Bwd &, smem_addr, int, int, const Mask &) {
    return make_uint2(0, 0);
}

/* weights and gradients with softcap, ALiBi and, with DROP, dropout: qk becomes P, dP becomes
 * dS. factor: 1 / (1 - p) of dropout. */
template <bool DROP, int M, int N>
__device__ __forceinline__ void modified_gradients(float (&s)[M][N][4], float (&dp)[M][N][4], int n,
                                                   uint4 stats, const Score &score, float distance0,
                                                   const Mask &mask, uint2 keep, float factor) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const float distance = distance0 + (n * 8 + r % 2 - m * 16 - r / 2 * 8);
            float derivative;
            const float logit = score_fast(score, s[m][n][r], distance, &derivative);
            const float w =
                ex2_approx_ftz(logit * LOG2_E - __uint_as_float(r & 1 ? stats.z : stats.x));
            s[m][n][r] = mask.sees(m, n, r) ? w : 0;
            const bool kept = !DROP || ((r & 1 ? keep.y : keep.x) & 1u << (16 * m + 8 * (r / 2)));
            if (DROP) dp[m][n][r] = kept ? dp[m][n][r] * factor : 0;
            dp[m][n][r] = s[m][n][r] * (dp[m][n][r] - __uint_as_float(r & 1 ? stats.w : stats.y)) *
                          derivative;
            if (DROP && !kept) s[m][n][r] = 0;
        }
}

/* A call with a mask or biases. P: Bwd or Dropping<Bwd>. */
template <class P> struct ScoredBwd : Scored<P> {
    /* The gradient of the bias, with strides that are 0 where the bias broadcasts; NULL = not
     * wanted. With `sums` the kernel adds to float32 elements, otherwise it stores elements of the
     * bias's dtype. */
    void *dbias;
    int64_t dbias_stride[4];
    bool sums;
    float *ddistance; /* [Hq or 1][Sq + Sk - 1]; NULL = not wanted */
    int64_t ddistance_head;
};
template <class P> __host__ __device__ inline float drop_factor(const ScoredBwd<P> &p) {
    return drop_factor((const P &)p);
}

/* Moves (*head, *tile) to the first step at or after it whose block of the mask is not empty.
 * Returns false if there is none. */
template <class Tile, class G>
__device__ __forceinline__ bool seen_step(const G &g, int b, int j0, int tile_lo, int tile_hi,
                                          int head_end, int *head, int *tile) {
    const MmaScores &x = g.scores;
    for (; *head < head_end; ++*head, *tile = tile_lo) {
        if (!x.mask && *tile < tile_hi) return true;
        if (!x.mask) continue;
        const int32_t *data = mask_of(x, b, *head);
        for (; *tile < tile_hi; ++*tile)
            if (block_flag(x, data, *tile * Tile::bq, j0) != GK_BLOCK_EMPTY) return true;
    }
    return false;
}

/* The mask bits and the bias of a lane's keys in one step. */
template <int M> struct StepScores {
    uint32_t bits[M][2]; /* bit 2 n + e: query mask.row + 8 n + e sees the key */
    float bias[M][2];    /* the key's bias, if it is the same for all queries; otherwise 0 */
    bool whole;          /* no pair of the step is hidden or changed by a bias or a modifier */
};
template <class T, int M, class G>
__device__ __forceinline__ StepScores<M> step_scores(const G &g, int b, int head, const Mask &mask,
                                                     bool in_span) {
    const MmaScores &x = g.scores;
    StepScores<M> y;
    y.whole = in_span && !x.bias && !x.distance && !g.p.rules.modified;
#pragma unroll
    for (int m = 0; m < M; ++m) {
        y.bits[m][0] = y.bits[m][1] = ~0u;
        y.bias[m][0] = y.bias[m][1] = 0;
    }
    if (x.bias && x.bias_stride[2] == 0) {
        const char *from = bias_of<T>(x, b, head);
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int key = min(mask.key + 16 * m + 8 * h, x.seq_k - 1);
                const float v = bias_at<T>(x, from, key * x.bias_stride[3]);
                y.bias[m][h] = v <= x.least ? -INFINITY : v;
            }
    }
    if (!x.mask) return y;
    const int32_t *data = mask_of(x, b, head);
    if ((block_flag(x, data, mask.row, mask.key) & 3) <= GK_BLOCK_FULL) return y;
    y.whole = false;
    const int first = mask.row / GK_MASK_TILE * GK_MASK_TILE + mask.row % 8,
              skip = mask.row % GK_MASK_TILE / 8 * 2;
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h)
            y.bits[m][h] = bits_of_key(x, data, mask.key + 16 * m + 8 * h, first) >> skip;
    return y;
}

/* Stores the gradients ds of the pairs into the gradient of the bias, or adds them, and adds them
 * to the gradient of the distance bias. i, j: query and key of ds[0][0]; the layout is that of
 * addends_of. Hidden pairs and rows past seq_q are left out. */
template <class T, int M, class G>
__device__ __forceinline__ void store_bias_gradients(const G &g, const float (&ds)[M][4],
                                                     const bool (&visible)[M][4], int b, int head,
                                                     int i, int j) {
    if (g.dbias) {
        const int64_t own = b * g.dbias_stride[0] + head * g.dbias_stride[1];
        if (g.dbias_stride[2] == 0 && g.sums) { /* one atomic add a key for the quad's rows */
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float sum = (visible[m][2 * h] ? ds[m][2 * h] : 0) +
                                (visible[m][2 * h + 1] ? ds[m][2 * h + 1] : 0);
                    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
                    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
                    const int key = j + 16 * m + 8 * h;
                    if (threadIdx.x % 4 == 0 && key < g.p.seq_k)
                        atomicAdd((float *)g.dbias + own + key * g.dbias_stride[3], sum);
                }
        } else {
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    if (!visible[m][r]) continue;
                    const int64_t at = own + (i + r % 2) * g.dbias_stride[2] +
                                       (j + 16 * m + r / 2 * 8) * g.dbias_stride[3];
                    if (g.sums)
                        atomicAdd((float *)g.dbias + at, ds[m][r]);
                    else if (g.scores.wide)
                        ((float *)g.dbias)[at] = ds[m][r];
                    else
                        ((T *)g.dbias)[at] = from_f32<T>(ds[m][r]);
                }
        }
    }
    if (g.ddistance) {
        float *to = g.ddistance + head * g.ddistance_head + (g.p.seq_q - 1);
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int r = 0; r < 4; ++r)
                if (visible[m][r]) atomicAdd(to + (j + 16 * m + r / 2 * 8) - (i + r % 2), ds[m][r]);
    }
}

/* modified_gradients for a call with a mask or biases, with the gradients of the biases. */
template <class T, bool DROP, int M, int N, class G>
__device__ __forceinline__ void
scored_gradients(const G &g, float (&s)[M][N][4], float (&dp)[M][N][4], int n, uint4 stats,
                 const Score &score, float distance0, const Mask &mask, uint2 keep, float factor,
                 int b, int head, const StepScores<M> &step) {
    float ds[M][4];
    bool visible[M][4];
    addends_of<T>(ds, g.scores, b, head, mask.row + 8 * n, mask.key, step.bits, step.bias, n);
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const float distance = distance0 + (n * 8 + r % 2 - m * 16 - r / 2 * 8);
            const float lse = __uint_as_float(r & 1 ? stats.z : stats.x),
                        delta = __uint_as_float(r & 1 ? stats.w : stats.y);
            float derivative;
            const float logit = score_fast(score, s[m][n][r], distance, &derivative) + ds[m][r];
            visible[m][r] =
                mask.sees(m, n, r) && ds[m][r] != -INFINITY && mask.row + 8 * n + r % 2 < g.p.seq_q;
            const float w = visible[m][r] ? ex2_approx_ftz(logit * LOG2_E - lse) : 0;
            const bool kept = !DROP || ((r & 1 ? keep.y : keep.x) & 1u << (16 * m + 8 * (r / 2)));
            if (DROP) dp[m][n][r] = kept ? dp[m][n][r] * factor : 0;
            ds[m][r] = w * (dp[m][n][r] - delta);
            s[m][n][r] = kept ? w : 0;
            dp[m][n][r] = visible[m][r] ? ds[m][r] * derivative : 0;
        }
    store_bias_gradients<T>(g, ds, visible, b, head, mask.row + 8 * n, mask.key);
}

template <class Scores, class T, int M, int N>
__device__ __forceinline__ void store_scores(smem_addr lane_at, const float (&c)[M][N][4], int n) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
        const smem_addr at = Scores::down(Scores::along(lane_at, n), 16 * m);
        st_shared_32(at, pack2<T>(c[m][n][0], c[m][n][1]));
        st_shared_32(Scores::down(at, 8), pack2<T>(c[m][n][2], c[m][n][3]));
    }
}

/* Stores two addresses as 16 bytes of shared memory. */
__device__ __forceinline__ void store_pair(smem_addr at_s, const void *first, const void *second) {
    const uint64_t a = (uint64_t)first, b = (uint64_t)second;
    st_shared_128(at_s,
                  make_uint4((uint32_t)a, (uint32_t)(a >> 32), (uint32_t)b, (uint32_t)(b >> 32)));
}

template <class T> __device__ __forceinline__ T *first_of(uint4 pair) {
    return (T *)((uint64_t)pair.y << 32 | pair.x);
}
template <class T> __device__ __forceinline__ T *second_of(uint4 pair) {
    return (T *)((uint64_t)pair.w << 32 | pair.z);
}

/* Stores what only copies and modified scores read, because registers are short: row 0 of head 0
 * of q and grad_out, the rows that see any key (other rows may hold anything), position0 and b. */
template <class T>
__device__ __forceinline__ void store_source(smem_addr at_s, const T *q, const T *grad_out,
                                             Interval rows, int position0, int b) {
    store_pair(at_s, q, grad_out);
    st_shared_128(at_s + 16, make_uint4(rows.lo, rows.hi, position0, b));
}

__device__ __forceinline__ Score load_score(smem_addr at_s, const Bwd &g, int head) {
    const uint4 x = ld_shared_128(at_s + 16);
    return {g.scale, g.softcap, slope_of<float>(g.p.rules, (int)x.w, head), (int)x.z};
}

/* Copies Q, dO and stats of one tile of rows of one head into a stage. stats_tile counts tiles
 * over all heads. */
template <class T, class Tile>
__device__ __forceinline__ void copy_step(const Bwd &g, smem_addr smem_s, int stage, int head,
                                          int tile, int stats_tile) {
    typedef Shape<Tile> X;
    typedef Smem<Tile> M;
    const uint4 from = ld_shared_128(smem_s + M::source),
                rows = ld_shared_128(smem_s + M::source + 16);
    const T *q_g = first_of<const T>(from), *grad_out_g = second_of<const T>(from);
    const int64_t i0 = (int64_t)tile * X::BQ;
    const int first = (int)rows.x - (int)i0, end = (int)rows.y - (int)i0;
    copy_rows<typename X::Queries, X::THREADS>(smem_s + M::q + stage * X::Queries::bytes,
                                               q_g + head * g.p.q.head + i0 * g.p.q.row, g.p.q.row,
                                               first, end, g.p.head_dim);
    copy_rows<typename X::Queries, X::THREADS>(smem_s + M::grad_out + stage * X::Queries::bytes,
                                               grad_out_g + head * g.grad_out.head +
                                                   i0 * g.grad_out.row,
                                               g.grad_out.row, first, end, g.p.head_dim_v);
    if (threadIdx.x < X::BQ * 8 / 16)
        cp_async_cg_16(smem_s + M::stats + stage * X::BQ * 8 + threadIdx.x * 16,
                       (const float2 *)g.stats + (int64_t)stats_tile * X::BQ + threadIdx.x * 2);
}

/* Stores a warp's dK and dV. 16-bit results are rounded into the shared tiles of K and V, whose
 * rows must no longer be read; float32 results are stored from registers. */
template <class T, class Tile, class Grad, class G, int M, int N>
__device__ __forceinline__ void store_keys(const G &g, smem_addr smem_s, const float (&dk)[M][N][4],
                                           const float (&dv)[M][N][4], int warp_kv, int sharer,
                                           int lane) {
    typedef Shape<Tile> X;
    typedef Smem<Tile> S;
    typedef typename X::Keys Keys;
    const float f = (float)g.p.rules.scale, f_v = drop_factor(g);
    if constexpr (sizeof(Grad) == 4) {
        const uint4 target = ld_shared_128(smem_s + S::target);
        const int key = warp_kv * M * 16 + lane / 4, col = sharer * X::COLS_W + lane % 4 * 2,
                  keys = ld_shared_32(smem_s + S::target + 24);
        store_sums(first_of<float>(target), g.dk.row, dk, f, key, col, keys, g.p.head_dim);
        store_sums(second_of<float>(target), g.dv.row, dv, f_v, key, col, keys, g.p.head_dim_v);
    } else {
        const smem_addr k_at = smem_s + S::k +
                               Keys::offset(warp_kv * M * 16 + lane / 4, sharer * X::COLS_W / 8) +
                               lane % 4 * 4;
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int n = 0; n < N; ++n) {
                const smem_addr at = Keys::down(Keys::along(k_at, n), 16 * m),
                                at_v = at + (S::v - S::k);
                st_shared_32(at, pack2<T>(dk[m][n][0] * f, dk[m][n][1] * f));
                st_shared_32(Keys::down(at, 8), pack2<T>(dk[m][n][2] * f, dk[m][n][3] * f));
                st_shared_32(at_v, pack2<T>(dv[m][n][0] * f_v, dv[m][n][1] * f_v));
                st_shared_32(Keys::down(at_v, 8), pack2<T>(dv[m][n][2] * f_v, dv[m][n][3] * f_v));
            }
        __syncthreads(); /* all rows are complete */
        const uint4 target = ld_shared_128(smem_s + S::target);
        const int rows_valid = ld_shared_32(smem_s + S::target + 24);
        copy_tile_out<Keys, X::THREADS>(first_of<T>(target), g.dk.row, smem_s + S::k, rows_valid,
                                        g.p.head_dim, threadIdx.x);
        copy_tile_out<Keys, X::THREADS>(second_of<T>(target), g.dv.row, smem_s + S::v, rows_valid,
                                        g.p.head_dim_v, threadIdx.x);
    }
}

/* ---- 3. dK, dV, and dQ added up -------------------------------------------------------------- */
template <int M, bool SCORES> struct StepOf {
    struct type {};
};
template <int M> struct StepOf<M, true> {
    typedef StepScores<M> type;
};
template <bool DROP, bool SCORES> struct ParamsOf {
    typedef typename dropping_if<Bwd, DROP>::type type;
};
template <bool DROP> struct ParamsOf<DROP, true> {
    typedef ScoredBwd<typename dropping_if<Bwd, DROP>::type> type;
};

/* ADD false: another kernel computes dq. DROP: dropout; requires MODIFIED. Grad: type of dK and
 * dV, T or float. SCORES: a mask or biases; requires MODIFIED. */
template <class T, class Tile, bool MODIFIED, bool ADD, bool DROP, class Grad = T,
          bool SCORES = false>
__global__ void __launch_bounds__(Tile::warps * 32, Tile::blocks)
    bwd_sm80_kernel(const __grid_constant__ typename ParamsOf<DROP, SCORES>::type g) {
    typedef Shape<Tile> X;
    typedef Smem<Tile> S;
    typedef typename X::Keys Keys;
    typedef typename X::Queries Queries;
    typedef typename X::Scores Scores;
    constexpr int D = X::D, BQ = X::BQ, BKV = X::BKV, NQ = X::ROWS_W / 8, NC = X::COLS_W / 8,
                  KEYS_W = X::M * 16;
    constexpr bool SHARED = X::SHARERS > 1;
    /* two sharers have enough scores a warp to be worth one more barrier: see 3.6 */
    constexpr bool PAIRS = X::SHARERS == 2;
    static_assert(Tile::stages == 2, "a step computes on one stage while the other fills");
    extern __shared__ __align__(128) unsigned char smem[];
    const smem_addr smem_s = cvta_to_shared(smem);
    const Problem &p = g.p;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int warp_kv = warp % X::WARPS_KV, sharer = warp / X::WARPS_KV;

    /* 3.1 which keys, which rows */
    const int kv_tiles = (p.seq_k + BKV - 1) / BKV;
    const int j0 = blockIdx.x % kv_tiles * BKV;
    const int kv_head = blockIdx.x / kv_tiles % p.heads_kv, b = blockIdx.x / kv_tiles / p.heads_kv;
    const Sequence s = sequence_of(p, b);
    if (j0 >= s.seq_k) return;
    const Interval seen = seen_keys(s);
    const int j_lo = max(j0, seen.lo), j_hi = min(j0 + BKV, seen.hi);
    /* rows that see these keys; rows that see any key */
    Interval rows = {0, 0}, rows_all = {0, 0};
    if (j_lo < j_hi) {
        rows = seeing_rows(s, j_lo, j_hi);
        rows_all = seeing_rows(s, seen.lo, seen.hi);
    }
    const int tile_lo = rows.lo / BQ,
              tile_hi = rows.hi > rows.lo ? (rows.hi + BQ - 1) / BQ : tile_lo;
    const int row_tile = row_tile_of(g, s, b);
    if (threadIdx.x == 0) {
        const Interval full = full_tiles(s, j0, BKV, BQ);
        store_pair(smem_s + S::target,
                   (Grad *)g.dk.data + b * g.dk.batch + kv_head * g.dk.head +
                       ((int64_t)s.k0 + j0) * g.dk.row,
                   (Grad *)g.dv.data + b * g.dv.batch + kv_head * g.dv.head +
                       ((int64_t)s.k0 + j0) * g.dv.row);
        st_shared_128(smem_s + S::target + 16, make_uint4(full.lo, full.hi, s.seq_k - j0, 0));
        st_shared_128(smem_s + S::range,
                      make_uint4(tile_lo, tile_hi, (kv_head + 1) * p.group, row_tile));
        store_span(smem_s + S::span, s.span);
        store_source(smem_s + S::source, (const T *)p.q.data + b * p.q.batch + s.q0 * p.q.row,
                     (const T *)g.grad_out.data + b * g.grad_out.batch + s.q0 * g.grad_out.row,
                     rows_all, span_clamp(s.diagonal), b);
    }
    __syncthreads(); /* the values above are visible to all threads */
    /* 3.2 a lane's addresses */
    const smem_addr k_base = frag_a_base<Keys>(smem_s + S::k, lane, warp_kv * KEYS_W);
    const smem_addr q_base = frag_b_base<Queries>(smem_s + S::q, lane, sharer * X::ROWS_W);
    const smem_addr scores_base =
        smem_s + S::scores + Scores::offset(warp_kv * KEYS_W + lane / 4, sharer * X::ROWS_W / 8) +
        lane % 4 * 4;
    /* row and key of the lane's first accumulator of S^T */
    const int lane_row = sharer * X::ROWS_W + lane % 4 * 2;
    const int lane_key = j0 + warp_kv * KEYS_W + lane / 4;

    float dk[X::M][NC][4] = {}, dv[X::M][NC][4] = {};
    int head = kv_head * p.group, tile = tile_lo, stage = 0;
    static_assert(!SCORES || (GK_MASK_TILE % BQ == 0 && GK_MASK_TILE % BKV == 0),
                  "a step lies in one block of a mask");
    bool more = tile_lo < tile_hi;
    if constexpr (SCORES)
        more = more &&
               seen_step<Tile>(g, b, j0, tile_lo, tile_hi, (kv_head + 1) * p.group, &head, &tile);
    int last_dq = -1; /* where the previous step's dQ belongs, in tiles of dq_sum */
    const float scale_log2 = (float)p.rules.scale * LOG2_E;

    if (more) {
        copy_rows<Keys, X::THREADS>(smem_s + S::k,
                                    (const T *)p.k.data + b * p.k.batch + kv_head * p.k.head +
                                        ((int64_t)s.k0 + j0) * p.k.row,
                                    p.k.row, seen.lo - j0, seen.hi - j0, p.head_dim);
        copy_rows<Keys, X::THREADS>(smem_s + S::v,
                                    (const T *)p.v.data + b * p.v.batch + kv_head * p.v.head +
                                        ((int64_t)s.k0 + j0) * p.v.row,
                                    p.v.row, seen.lo - j0, seen.hi - j0, p.head_dim_v);
        copy_step<T, Tile>(g, smem_s, 0, head, tile, head * g.row_tiles + row_tile + tile);
    }
    cp_async_commit_group();

#pragma unroll 1
    while (more) {
        /* 3.3 this step's tiles have arrived, the previous step's may be overwritten, its dS^T
         * is complete */
        cp_async_wait_group<0>();
        __syncthreads();
        const uint4 range = ld_shared_128(smem_s + S::range);
        const bool last_tile = tile + 1 == (int)range.y;
        int next_tile = last_tile ? (int)range.x : tile + 1,
            next_head = last_tile ? head + 1 : head;
        if constexpr (SCORES)
            more =
                seen_step<Tile>(g, (int)ld_shared_128(smem_s + S::source + 16).w, j0, (int)range.x,
                                (int)range.y, (int)range.z, &next_head, &next_tile);
        else
            more = next_head < (int)range.z;
        if (more)
            copy_step<T, Tile>(g, smem_s, stage ^ 1, next_head, next_tile,
                               next_head * g.row_tiles + (int)range.w + next_tile);
        cp_async_commit_group();
        if (ADD && !SHARED && last_dq >= 0)
            add_dq<Tile, T, SCORES>(g.dq_sum, last_dq,
                                    smem_s + S::scores + (stage ^ 1) * Scores::bytes, smem_s + S::k,
                                    warp, lane);
        last_dq = head * g.row_tiles + (int)range.w + tile;
        /* 3.4 S^T */
        const smem_addr q_s = stage * Queries::bytes, grad_out_s = q_s + (S::grad_out - S::q);
        const smem_addr stats_s = smem_s + S::stats + stage * (BQ * 8) + lane_row * 8;
        const smem_addr ds_at = scores_base + (SHARED ? 1 : stage) * Scores::bytes;
        float sc[X::M][NQ][4] = {}, dp[X::M][NQ][4] = {};
#pragma unroll
        for (int kk = 0; kk < D / 16; ++kk)
            mma_rows<Keys, Queries, T>(sc, Keys::along(k_base, 2 * kk),
                                       Queries::along(q_base + q_s, 2 * kk));
        const uint2 full = ld_shared_64(smem_s + S::target + 16);
        if (!MODIFIED && (tile < (int)full.x || tile >= (int)full.y))
            hide(sc, load_mask(smem_s + S::span, lane_key, tile * BQ + lane_row));

        /* 3.5 dP^T, and between its products P^T */
#pragma unroll
        for (int kk = 0; kk < D / 16; ++kk) {
            mma_rows<Keys, Queries, T>(dp, Keys::along(k_base + (S::v - S::k), 2 * kk),
                                       Queries::along(q_base + grad_out_s, 2 * kk));
            if (!MODIFIED)
#pragma unroll
                for (int n = NQ * kk / (D / 16); n < NQ * (kk + 1) / (D / 16); ++n) {
                    weights(sc, n, ld_shared_128(stats_s + n * 64), scale_log2);
                    if (PAIRS) store_scores<Scores, T>(scores_base, sc, n);
                }
        }
        if (MODIFIED) {
            const Mask mask = load_mask(smem_s + S::span, lane_key, tile * BQ + lane_row);
            const Score score = load_score(smem_s + S::source, g, head);
            /* for element [0][0][0] */
            const float distance0 = (float)(mask.row + score.position0 - mask.key);
            typename StepOf<X::M, SCORES>::type step;
            if constexpr (SCORES)
                step = step_scores<T, X::M>(g, (int)ld_shared_128(smem_s + S::source + 16).w, head,
                                            mask, tile >= (int)full.x && tile < (int)full.y);
#pragma unroll
            for (int n = 0; n < NQ; ++n) {
                const uint2 keep = keep_eight<X::M>(g, smem_s + S::source, head, n, mask);
                if constexpr (SCORES) {
                    uint4 stats = ld_shared_128(stats_s + n * 64);
                    /* carries a NaN of dO into the weights by delta (see the head of this file) */
                    stats.x = __float_as_uint(
                        fmaf(__uint_as_float(stats.y), 0.f, __uint_as_float(stats.x)));
                    stats.z = __float_as_uint(
                        fmaf(__uint_as_float(stats.w), 0.f, __uint_as_float(stats.z)));
                    if (!DROP && step.whole) {
                        weights(sc, n, stats, scale_log2);
                        gradients(sc, dp, n, stats);
                    } else {
                        scored_gradients<T, DROP>(
                            g, sc, dp, n, stats, score, distance0, mask, keep, drop_factor(g),
                            (int)ld_shared_128(smem_s + S::source + 16).w, head, step);
                    }
                } else
                    modified_gradients<DROP>(sc, dp, n, ld_shared_128(stats_s + n * 64), score,
                                             distance0, mask, keep, drop_factor(g));
                if (PAIRS) store_scores<Scores, T>(scores_base, sc, n);
            }
        }

        /* 3.6 dV += P^T dO, and between its products dS^T; dK += dS^T Q */
        /* recomputed, so that the address takes no register elsewhere */
        const int lane_here = SHARED ? lane : laneid();
        const smem_addr q_trans_base =
            frag_b_trans_base<Queries>(smem_s + S::q, lane_here, 0, sharer * X::COLS_W / 8);
        if (SHARED) {
            if (PAIRS) {
                /* P^T of both sharers is stored; dS^T is made between the products */
                bar_sync(1 + warp_kv, X::SHARERS * 32);
            } else {
#pragma unroll
                for (int n = 0; n < NQ; ++n) {
                    store_scores<Scores, T>(scores_base, sc, n);
                    if (!MODIFIED) gradients(sc, dp, n, ld_shared_128(stats_s + n * 64));
                    store_scores<Scores, T>(ds_at, dp, n);
                }
                /* P^T and dS^T of all sharers are stored; for dQ, those of all warps */
                __syncthreads();
            }
            const smem_addr p_base =
                frag_a_base<Scores>(smem_s + S::scores, lane, warp_kv * KEYS_W);
#pragma unroll
            for (int kk = 0; kk < BQ / 16; ++kk) {
                uint32_t a[X::M][4];
#pragma unroll
                for (int m = 0; m < X::M; ++m)
                    load_frag_a(a[m], Scores::down(Scores::along(p_base, 2 * kk), 16 * m));
                mma_columns<Queries, T, SCORES>(dv, a,
                                                Queries::down(q_trans_base + grad_out_s, 16 * kk));
#pragma unroll
                for (int n = NQ * kk / (BQ / 16); PAIRS && n < NQ * (kk + 1) / (BQ / 16); ++n) {
                    if (!MODIFIED) gradients(sc, dp, n, ld_shared_128(stats_s + n * 64));
                    store_scores<Scores, T>(ds_at, dp, n);
                }
            }
            /* dS^T of both sharers is stored; for dQ, that of all warps */
            if (PAIRS) __syncthreads();
#pragma unroll
            for (int kk = 0; kk < BQ / 16; ++kk) {
                uint32_t a[X::M][4];
#pragma unroll
                for (int m = 0; m < X::M; ++m)
                    load_frag_a(
                        a[m], Scores::down(Scores::along(p_base + Scores::bytes, 2 * kk), 16 * m));
                mma_columns<Queries, T, SCORES>(dk, a, Queries::down(q_trans_base + q_s, 16 * kk));
            }
            if (ADD)
                add_dq<Tile, T, SCORES>(g.dq_sum, last_dq, smem_s + S::scores + Scores::bytes,
                                        smem_s + S::k, warp, lane);
        } else {
#pragma unroll
            for (int kk = 0; kk < NQ / 2; ++kk) {
                uint32_t a[X::M][4];
#pragma unroll
                for (int m = 0; m < X::M; ++m) acc_to_a<T>(a[m], sc[m][2 * kk], sc[m][2 * kk + 1]);
                mma_columns<Queries, T, SCORES>(dv, a,
                                                Queries::down(q_trans_base + grad_out_s, 16 * kk));
#pragma unroll
                for (int n = 2 * kk; n < 2 * kk + 2; ++n) {
                    if (!MODIFIED) gradients(sc, dp, n, ld_shared_128(stats_s + n * 64));
                    if (ADD) store_scores<Scores, T>(ds_at, dp, n);
                }
            }
#pragma unroll
            for (int kk = 0; kk < NQ / 2; ++kk) {
                uint32_t a[X::M][4];
#pragma unroll
                for (int m = 0; m < X::M; ++m) acc_to_a<T>(a[m], dp[m][2 * kk], dp[m][2 * kk + 1]);
                mma_columns<Queries, T, SCORES>(dk, a, Queries::down(q_trans_base + q_s, 16 * kk));
            }
        }
        tile = next_tile;
        head = next_head;
        stage ^= 1;
    }
    /* 3.7 the last dQ; dK and dV through the tiles of K and V */
    cp_async_wait_group<0>();
    __syncthreads(); /* the last dS^T is complete */
    if (ADD && !SHARED && last_dq >= 0) {
        add_dq<Tile, T, SCORES>(g.dq_sum, last_dq, smem_s + S::scores + (stage ^ 1) * Scores::bytes,
                                smem_s + S::k, warp, lane);
        __syncthreads(); /* K is no longer read */
    }
    store_keys<T, Tile, Grad>(g, smem_s, dk, dv, warp_kv, sharer, lane);
}

} // namespace

#endif
