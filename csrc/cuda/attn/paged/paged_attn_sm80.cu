/* SPDX-License-Identifier: BSD-3-Clause */
/* paged_attn_sm80: attention of a few query tokens a sequence over a paged cache, on tensor cores
 * (mma.sync), in 16 bits.
 *
 *  out[t] = sum_j softmax_j(score(scale k_scale q[t] k[j]), sink) v[j] v_scale
 *  with j in [lo(t), hi(t))
 *
 * q [T, Hq, D]; k_cache, v_cache [num_blocks, block_size, Hkv, D | Dv]; block_table [B,
 * max_blocks], seq_lens [B], cu_seqlens_q [B + 1] int32; out [T, Hq, Dv], lse [T, Hq]. Pages of any
 * size, D and Dv multiples of 8. Pages: Kwon et al. 2023; online softmax: Milakov and Gimelshein
 * 2018.
 *
 * Work split: paged_plan.cuh. The LANES rows of a tile are the n of the mma. Each warp of a block
 * works alone. It has a kv head, some of the tile's steps, its own ring of stages, and its own
 * maximum and sum. Warps synchronise only at the end of a tile.
 *
 *  shared memory, per warp: a ring of stages x (K 16 x HEAD_DIM, V 16 x HEAD_DIM), 64 HEAD_DIM
 *  bytes a stage. At the end of a tile the same bytes hold, per warp, O [LANES][HEAD_DIM + 4] and
 *  (max, sum) [LANES], float32
 *
 *  step j of a warp      wait(j)  S^T = K Q^T   softmax   O^T += V^T P^T   issue(j + stages)
 *  copies in flight      j .. j + stages - 1 during the wait; page numbers are loaded one step
 *                        before the copies
 *
 * Refused: float32 (paged_attn_f32); float64, 8-bit caches, rows not aligned to 16 bytes
 * (paged_attn_plain). Many query tokens are served, but the keys are read once for each LANES rows.
 * On Hopper paged_prefill_sm90a takes those calls. */
#include "../../tile/fragment.cuh"
#include "paged_combine.cuh"
#include "paged_factor.cuh"

namespace {

/* ---- 1. shared memory ------------------------------------------------------------------------ */
template <int HEAD_DIM, int LANES> struct Shared {
    static constexpr int warps = paged_tile<HEAD_DIM, LANES>::warps,
                         stages = paged_tile<HEAD_DIM, LANES>::stages;
    /* its type proves that accesses have no bank conflict */
    typedef smem_tile<KEYS, HEAD_DIM * 2> Tile;
    static constexpr int stage_bytes = 2 * Tile::bytes, ring_bytes = stages * stage_bytes;
    /* distance in floats between rows of O; ways_of_o proves that it avoids conflicts */
    static constexpr int pitch = HEAD_DIM + 4;
    static constexpr int o_bytes = LANES * pitch * 4;
    static constexpr int bytes = warps * ring_bytes;
    static_assert(warps * (o_bytes + LANES * 8) <= bytes, "what a tile leaves fits the ring");
    static_assert(o_bytes % 16 == 0, "rows of O are read in 16 bytes");

    /* Bank conflicts of storing accumulators: lane l writes rows 2 (l % 4) + e, column l / 4. */
    static constexpr int ways_of_o() {
        int at[32] = {};
        for (int lane = 0; lane < 32; ++lane) at[lane] = (lane % 4 * 2 * pitch + lane / 4) * 4;
        return ways(at, 4);
    }
    static_assert(ways_of_o() == 1, "the pitch spreads rows over banks");
};

/* ---- 2. the stream of a warp ----------------------------------------------------------------- */
template <class T, int HEAD_DIM, int LANES> struct Stream {
    typedef Shared<HEAD_DIM, LANES> S;
    typedef typename S::Tile Tile;
    static constexpr int STEPS = HEAD_DIM / 16, N = LANES / 8;
    /* Products that are summed in one chain of the tensor core, which truncates its sums. Longer
     * sums are added in float32. */
    static constexpr int CHAIN = 4;
    unsigned char *smem;

    __device__ __forceinline__ void attend(const Call &c, const TileShare &work) {
        const Paged &p = c.p;
        const PagedSequence &s = work.s;
        const int head_kv = work.head_kv, row0 = work.row0, last_row = work.last_row;
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const smem_addr ring_s = cvta_to_shared(smem) + warp * S::ring_bytes;
        const smem_addr k_frag_s = frag_a_base<Tile>(ring_s, lane);
        const smem_addr v_frag_s = frag_a_trans_base<Tile>(ring_s + Tile::bytes, lane);

        /* 2.1 rows: q as the B operand */
        uint32_t q[STEPS][N][2];
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const int row = row0 + n * 8 + lane / 4, token = row / p.group;
            const uint16_t *q_g = (const uint16_t *)p.q.data + (s.q0 + token) * p.q.row +
                                  (head_kv * p.group + row - token * p.group) * p.q.head +
                                  lane % 4 * 2;
#pragma unroll
            for (int k = 0; k < STEPS; ++k) {
                q[k][n][0] =
                    row <= last_row && k * 16 < p.head_dim ? *(const uint32_t *)(q_g + k * 16) : 0;
                q[k][n][1] = row <= last_row && k * 16 + 8 < p.head_dim
                                 ? *(const uint32_t *)(q_g + k * 16 + 8)
                                 : 0;
            }
        }
        int index[N][2]; /* the query token of this lane's columns of S^T */
        float slope[N][2];
        RowSoftmax<ExpApprox> softmax[N][2]; /* sum: this lane's share */
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int row = row0 + n * 8 + lane % 4 * 2 + e, token = row / p.group;
                index[n][e] = token;
                softmax[n][e] = {-INFINITY, 0};
                slope[n][e] = 0;
                const int head = head_kv * p.group + row - token * p.group;
                if (row <= last_row) slope[n][e] = slope_of<float>(p.rules, work.b, head);
            }
        const float scale = paged_factor<float>(p, head_kv);
        float o[STEPS][N][4] = {}; /* O^T: head_dim_v by rows */

        /* 2.2 the stream */
        Ring<T, Tile, S::stages> ring;
        ring.begin(c, work, ring_s);
#pragma unroll 1
        for (int step = work.step0; step < work.steps; ++step) {
            cp_async_wait_group<S::stages - 1>();
            __syncwarp(); /* the copies of all lanes have arrived */
            const int key = work.first_key + step * c.chunk_keys;

            /* S^T [16 keys][LANES rows] */
            float x[N][4];
#pragma unroll
            for (int k = 0; k < STEPS; k += CHAIN) {
                float y[N][4] = {};
#pragma unroll
                for (int i = k; i < k + CHAIN; ++i) {
                    uint32_t a[4];
                    load_frag_a(a, Tile::along(k_frag_s + ring.at, 2 * i));
#pragma unroll
                    for (int n = 0; n < N; ++n) mma_add<T>(y[n], a, q[i][n]);
                }
#pragma unroll
                for (int n = 0; n < N; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) x[n][e] = k == 0 ? y[n][e] : x[n][e] + y[n][e];
            }

            /* scores, -inf for keys that a row does not see */
            const unsigned here = (unsigned)(ring.there & 0xffff);
            const bool inner =
                key >= work.inner_lo && key + KEYS <= work.inner_hi && here == 0xffff;
            uint32_t weights[N][2]; /* P^T as the B operand */
#pragma unroll
            for (int n = 0; n < N; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int place = lane / 4 + e / 2 * 8, j = key + place;
                    if (p.rules.modified) {
                        const Score score_of_row = {scale, (float)p.rules.softcap, slope[n][e % 2],
                                                    s.diagonal};
                        float derivative;
                        x[n][e] =
                            score_fast(score_of_row, x[n][e],
                                       (float)(index[n][e % 2] + s.diagonal - j), &derivative);
                    } else {
                        x[n][e] *= scale;
                    }
                    if (!inner && !(j >= s.lo(index[n][e % 2]) && j < s.hi(index[n][e % 2]) &&
                                    (here >> place & 1)))
                        x[n][e] = -INFINITY;
                }
                bool moved = false;
                float shrink[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    RowSoftmax<ExpApprox> &row = softmax[n][e];
                    const float highest = octet_max(fmaxf(x[n][e], x[n][e + 2]));
                    moved |= highest > row.peak;
                    shrink[e] = row.raise(highest);
                    x[n][e] = row.weight(x[n][e]);
                    x[n][e + 2] = row.weight(x[n][e + 2]);
                    row.sum = row.sum * shrink[e] + (x[n][e] + x[n][e + 2]);
                }
                acc_to_b<T>(weights[n], x[n]);
                if (__any_sync(0xffffffffu, moved)) {
#pragma unroll
                    for (int i = 0; i < STEPS; ++i)
#pragma unroll
                        for (int e = 0; e < 4; ++e) o[i][n][e] *= shrink[e % 2];
                }
            }

            /* O^T [HEAD_DIM][LANES rows] */
#pragma unroll
            for (int i = 0; i < STEPS; ++i) {
                uint32_t a[4];
                load_frag_a_trans(a, Tile::along(v_frag_s + ring.at, 2 * i));
#pragma unroll
                for (int n = 0; n < N; ++n) mma_add<T>(o[i][n], a, weights[n]);
            }

            __syncwarp(); /* all lanes have read the stage */
            ring.next(c, work, ring_s, step);
        }

        /* 2.3 merge the warps' sums; they overlay the rings */
        cp_async_wait_group<0>();
        /* every warp has read its last stage */
        __syncthreads();
        float *o_s = (float *)smem;                                 /* [warps][LANES][pitch] */
        float2 *stats_s = (float2 *)(smem + S::warps * S::o_bytes); /* [warps][LANES] */
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int row = warp * LANES + n * 8 + lane % 4 * 2 + e;
                const float all = octet_sum(softmax[n][e].sum);
                if (lane < 4) stats_s[row] = make_float2(softmax[n][e].peak, all);
#pragma unroll
                for (int i = 0; i < STEPS; ++i)
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        o_s[row * S::pitch + i * 16 + half * 8 + lane / 4] = o[i][n][half * 2 + e];
            }
        __syncthreads(); /* the sums of all warps are written */

        merge_warps<T, S::warps, LANES, S::pitch>(c, work, o_s, stats_s);
        __syncthreads(); /* the ring's bytes are free */
    }
};

template <class T, int HEAD_DIM, int LANES>
__global__ void __launch_bounds__(paged_tile<HEAD_DIM, LANES>::warps * 32,
                                  paged_tile<HEAD_DIM, LANES>::blocks) paged_attn_kernel(Call c) {
    extern __shared__ __align__(128) unsigned char smem[];
    Stream<T, HEAD_DIM, LANES> stream = {smem};
    each_tile<T, paged_tile<HEAD_DIM, LANES>::warps>(c, stream);
}

/* ---- 3. instances ---------------------------------------------------------------------------- */
#define INSTANCE(NAME, DTYPE, T, D, LANES, MOST)                           \
    {"paged_attn_sm80_" NAME,                                              \
     DTYPE,                                                                \
     plan,                                                                 \
     run_pair<T, paged_attn_kernel<T, D, LANES>>,                          \
     {D, LANES, paged_tile<D, LANES>::warps, paged_tile<D, LANES>::blocks, \
      Shared<D, LANES>::bytes, MOST},                                      \
     NULL},
/* clang-format off */
const gk_cuda_instance instances[] = {
    INSTANCE("bf16_64x8", GK_BF16, __nv_bfloat16, 64, 8, 8)
    INSTANCE("bf16_64x16", GK_BF16, __nv_bfloat16, 64, 16, 0)
    INSTANCE("bf16_128x8", GK_BF16, __nv_bfloat16, 128, 8, 8)
    INSTANCE("bf16_128x16", GK_BF16, __nv_bfloat16, 128, 16, 0)
    INSTANCE("bf16_256x8", GK_BF16, __nv_bfloat16, 256, 8, 0) /* 16 rows would spill */
    INSTANCE("f16_64x8", GK_F16, __half, 64, 8, 8)
    INSTANCE("f16_64x16", GK_F16, __half, 64, 16, 0)
    INSTANCE("f16_128x8", GK_F16, __half, 128, 8, 8)
    INSTANCE("f16_128x16", GK_F16, __half, 128, 16, 0)
    INSTANCE("f16_256x8", GK_F16, __half, 256, 8, 0)
};
/* clang-format on */
#undef INSTANCE

} // namespace

extern "C" const gk_cuda_table gk_paged_attn_sm80_table = {
    instances, sizeof instances / sizeof instances[0], 80, NULL};
