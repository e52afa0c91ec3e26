/* SPDX-License-Identifier: BSD-3-Clause */
/* paged_attn_f32: attention of a few query tokens a sequence over a paged cache in float32, with
 * multiply-adds in full precision.
 *
 *  out[t] = sum_j softmax_j(score(scale k_scale q[t] k[j]), sink) v[j] v_scale
 *           over the keys j in [lo(t), hi(t))
 *
 * q [T, Hq, D]; k_cache, v_cache [num_blocks, block_size, Hkv, D | Dv]; block_table [B,
 * max_blocks], seq_lens [B], cu_seqlens_q [B + 1] int32; out [T, Hq, Dv], lse [T, Hq]. Pages of any
 * size, D and Dv multiples of 4 up to 128. Pages: Kwon et al. 2023; online softmax: Milakov and
 * Gimelshein 2018.
 *
 * Work split: paged_plan.cuh. Within a block each warp works alone on 16 keys at a time:
 *
 *  S    lane l owns key l % 16 and half of the dimensions; q is read as a broadcast
 *  O    lane l owns 4 dimensions (at head_dim 64, of every other key); weights are broadcast
 *
 * Warps synchronise at the end of a tile only.
 *
 *  shared memory, per warp:  ring      stages x (K 16 x HEAD_DIM, V 16 x HEAD_DIM)
 *                            q         [ROWS][HEAD_DIM]
 *                            weights   [16][ROWS]
 *  at the end of a tile the rings' bytes hold, per warp, O [ROWS][HEAD_DIM + 4] and (max, sum)
 *  [ROWS]
 *
 *  step j of a warp      wait(j)  S   softmax   O   issue(j + stages)
 *
 * Not handled: larger head_dim, rows not aligned to 16 bytes, float64 (paged_attn_plain). */
#include "paged_combine.cuh"
#include "paged_factor.cuh"

namespace {

/* ---- 1. shared memory ------------------------------------------------------------------------ */
template <int HEAD_DIM, int ROWS> struct Shared {
    static constexpr int warps = paged_f32_tile<HEAD_DIM>::warps,
                         stages = paged_f32_tile<HEAD_DIM>::stages;
    /* reads of 8 rows of a chunk and of chunks along a row have no bank conflict */
    typedef smem_tile<KEYS, HEAD_DIM * 4> Tile;
    static constexpr int stage_bytes = 2 * Tile::bytes, ring_bytes = stages * stage_bytes;
    static constexpr int q_bytes = ROWS * HEAD_DIM * 4, weights_bytes = KEYS * ROWS * 4;
    static constexpr int pitch = HEAD_DIM + 4;
    static constexpr int o_bytes = ROWS * pitch * 4;
    static constexpr int q_at = warps * ring_bytes, weights_at = q_at + warps * q_bytes;
    static constexpr int bytes = weights_at + warps * weights_bytes;
    static_assert(warps * (o_bytes + ROWS * 8) <= warps * ring_bytes,
                  "what a tile leaves fits the rings");

    /* Bank conflicts of storing weights: 16 lanes write neighbouring 16 bytes (ROWS 4), or 32
     * bytes apart in two stores (ROWS 8). */
    static constexpr int ways_of_weights() {
        int at[16] = {};
        for (int lane = 0; lane < 16; ++lane) at[lane] = lane * ROWS * 4;
        return ways(at, 16);
    }
    static_assert(ways_of_weights() <= ROWS / 4,
                  "two ways with 8 rows: two stores a step of 16 keys");
};

__device__ __forceinline__ float4 ld_shared_f4(smem_addr at) {
    const uint4 x = ld_shared_128(at);
    return make_float4(__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z),
                       __uint_as_float(x.w));
}

__device__ __forceinline__ void st_shared_f4(smem_addr at, float x, float y, float z, float w) {
    st_shared_128(at, make_uint4(__float_as_uint(x), __float_as_uint(y), __float_as_uint(z),
                                 __float_as_uint(w)));
}

/* ---- 2. the stream of a warp ----------------------------------------------------------------- */
template <int HEAD_DIM, int ROWS> struct Stream {
    typedef Shared<HEAD_DIM, ROWS> S;
    typedef typename S::Tile Tile;
    /* lanes that share a row of V; groups of lanes with different keys */
    static constexpr int CHUNKS = HEAD_DIM / 4, KEY_GROUPS = 32 / CHUNKS;
    static_assert(CHUNKS * KEY_GROUPS == 32, "a lane has one chunk");
    unsigned char *smem;

    __device__ __forceinline__ void attend(const Call &c, const TileShare &work) {
        const Paged &p = c.p;
        const PagedSequence &s = work.s;
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const smem_addr ring_s = cvta_to_shared(smem) + warp * S::ring_bytes;
        const smem_addr q_s = cvta_to_shared(smem) + S::q_at + warp * S::q_bytes;
        const smem_addr weights_s = cvta_to_shared(smem) + S::weights_at + warp * S::weights_bytes;
        const int key_of_lane = lane % KEYS, half = lane / KEYS;
        const int chunk_of_lane = lane % CHUNKS, group_of_lane = lane / CHUNKS;

        /* 2.1 the copies begin; rows: q to shared memory */
        Ring<float, Tile, S::stages> ring;
        ring.begin(c, work, ring_s);
        int index[ROWS]; /* query tokens */
        float slope[ROWS];
        RowSoftmax<ExpFull> softmax[ROWS]; /* sum: this lane's share */
        float4 o[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int row = work.row0 + r, token = row / p.group;
            const int head = work.head_kv * p.group + row - token * p.group;
            const bool is = row <= work.last_row;
            const float *q_g = (const float *)p.q.data + (s.q0 + token) * p.q.row + head * p.q.head;
            for (int chunk = lane; chunk < CHUNKS; chunk += 32) {
                float4 q = make_float4(0, 0, 0, 0);
                if (is && chunk * 4 < p.head_dim) q = *(const float4 *)(q_g + chunk * 4);
                st_shared_f4(q_s + (r * CHUNKS + chunk) * 16, q.x, q.y, q.z, q.w);
            }
            index[r] = token;
            softmax[r] = {-INFINITY, 0};
            o[r] = make_float4(0, 0, 0, 0);
            slope[r] = 0;
            if (is) slope[r] = slope_of<float>(p.rules, work.b, head);
        }
        const float scale = paged_factor<float>(p, work.head_kv);

        /* 2.2 16 keys at a time */
#pragma unroll 1
        for (int step = work.step0; step < work.steps; ++step) {
            cp_async_wait_group<S::stages - 1>();
            __syncwarp(); /* the copies of all lanes have arrived, q is written */
            const int j = work.first_key + step * c.chunk_keys + key_of_lane;
            const smem_addr k_s = ring_s + ring.at, v_s = k_s + Tile::bytes;

            float x[ROWS] = {};
#pragma unroll 4
            for (int i = half; i < CHUNKS; i += 2) {
                const float4 k = ld_shared_f4(k_s + Tile::offset(key_of_lane, i));
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
                    const float4 q = ld_shared_f4(q_s + (r * CHUNKS + i) * 16);
                    /* short sums round less */
                    x[r] += q.x * k.x + q.y * k.y + q.z * k.z + q.w * k.w;
                }
            }

            const bool here = ring.there >> key_of_lane & 1;
            const bool inner =
                j - key_of_lane >= work.inner_lo && j - key_of_lane + KEYS <= work.inner_hi;
            float shrink[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const Score score = {scale, (float)p.rules.softcap, slope[r], s.diagonal};
                const float qk = lanes_sum<16, 32>(x[r]);
                x[r] = p.rules.modified ? score_fine(score, qk, index[r], j) : scale * qk;
                if (!here || (!inner && !(j >= s.lo(index[r]) && j < s.hi(index[r]))))
                    x[r] = -INFINITY;
                shrink[r] = softmax[r].raise(lanes_max<1, 16>(x[r]));
                x[r] = softmax[r].weight(x[r]);
                softmax[r].sum = softmax[r].sum * shrink[r] + x[r];
            }
            if (half == 0) {
#pragma unroll
                for (int r = 0; r < ROWS; r += 4)
                    st_shared_f4(weights_s + (key_of_lane * ROWS + r) * 4, x[r], x[r + 1], x[r + 2],
                                 x[r + 3]);
            }
            __syncwarp(); /* the weights are written */

            /* sums over these keys first, then added to the others: short sums round less */
            float4 y[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) y[r] = make_float4(0, 0, 0, 0);
#pragma unroll 4
            for (int key = group_of_lane; key < KEYS; key += KEY_GROUPS) {
                const float4 v = ld_shared_f4(v_s + Tile::offset(key, chunk_of_lane));
#pragma unroll
                for (int r = 0; r < ROWS; r += 4) {
                    const float4 weight = ld_shared_f4(weights_s + (key * ROWS + r) * 4);
                    add_4(y[r], v, weight.x);
                    add_4(y[r + 1], v, weight.y);
                    add_4(y[r + 2], v, weight.z);
                    add_4(y[r + 3], v, weight.w);
                }
            }
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                add_4(y[r], o[r], shrink[r]);
                o[r] = y[r];
            }

            __syncwarp(); /* all lanes have read the stage and the weights */
            ring.next(c, work, ring_s, step);
        }

        /* 2.3 merge the warps' sums; they overlay the rings */
        cp_async_wait_group<0>();
        __syncthreads(); /* every warp has read its last stage */
        float *o_s = (float *)smem;
        float2 *stats_s = (float2 *)(smem + S::warps * S::o_bytes);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const float all = lanes_sum<1, 16>(softmax[r].sum);
            const float4 y =
                make_float4(lanes_sum<CHUNKS, 32>(o[r].x), lanes_sum<CHUNKS, 32>(o[r].y),
                            lanes_sum<CHUNKS, 32>(o[r].z), lanes_sum<CHUNKS, 32>(o[r].w));
            if (group_of_lane == 0)
                *(float4 *)&o_s[(warp * ROWS + r) * S::pitch + chunk_of_lane * 4] = y;
            if (lane == 0) stats_s[warp * ROWS + r] = make_float2(softmax[r].peak, all);
        }
        __syncthreads(); /* the sums of all warps are written */
        merge_warps<float, S::warps, ROWS, S::pitch>(c, work, o_s, stats_s);
        __syncthreads(); /* the rings' bytes are free */
    }
};

template <int HEAD_DIM, int ROWS>
__global__ void __launch_bounds__(paged_f32_tile<HEAD_DIM>::warps * 32, 1)
    paged_attn_f32_kernel(Call c) {
    extern __shared__ __align__(128) unsigned char smem[];
    Stream<HEAD_DIM, ROWS> stream = {smem};
    each_tile<float, paged_f32_tile<HEAD_DIM>::warps>(c, stream);
}

/* ---- 3. instances ---------------------------------------------------------------------------- */
#define INSTANCE(NAME, D, LANES, MOST)                                       \
    {"paged_attn_f32_" NAME,                                                 \
     GK_F32,                                                                 \
     plan,                                                                   \
     run_pair<float, paged_attn_f32_kernel<D, LANES>>,                       \
     {D, LANES, paged_f32_tile<D>::warps, 1, Shared<D, LANES>::bytes, MOST}, \
     NULL},
/* clang-format off */
const gk_cuda_instance instances[] = {
    INSTANCE("64x4", 64, 4, 4)
    INSTANCE("64x8", 64, 8, 0)
    INSTANCE("128x4", 128, 4, 4)
    INSTANCE("128x8", 128, 8, 0)
};
/* clang-format on */
#undef INSTANCE

} // namespace

extern "C" const gk_cuda_table gk_paged_attn_f32_table = {
    instances, sizeof instances / sizeof instances[0], 80, NULL};
