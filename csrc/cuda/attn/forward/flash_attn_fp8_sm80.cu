/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_fp8_sm80: attention of e4m3 codes on 16-bit tensor cores, for every GPU, dense and
 * packed, with every modifier and alignment. Codes are converted to float16 on their way into
 * shared memory, which is exact. The rest is FlashAttention-2 (Dao 2023, arXiv:2307.08691) as in
 * flash_attn_fwd_sm80, with float32 sums for any `accumulate`:
 *
 *  S = scale q_scale k_scale Q K^T, -inf for keys that a row does not see
 *  P = e^(s - m)   O = O e^(m_old - m) + (P share) V
 *  out = v_scale O / l + v_mean sum P / l
 *
 * With a v scale for each block, v_scale above is the largest one and share is the block's scale
 * relative to it.
 *
 * q [.., Sq, D], k [.., Sk, D], v [.., Sk, Dv] e4m3; out [.., Sq, Dv] bf16, f16 or f32; lse [..,
 * Sq] float32. D and Dv are multiples of 8 up to the bucket HEAD_DIM; the remaining columns are
 * zeros in shared memory.
 *
 * Work split: grid x = (tile of BQ rows, head), the last tiles first. A warp owns 16 rows. Key
 * tiles begin at multiples of BKV, so that none spans two blocks of 128 tokens. The loads of a
 * block do not overlap its own products. Instead, two blocks run on an SM, so that one multiplies
 * while the other loads. It refuses head_dims above 256. */
#include "../../ptx/smem.cuh"
#include "../../tile/copy.cuh"
#include "../../tile/fragment.cuh"
#include "fp8.cuh"
#include "fp8_tiles.h"
#include "../mask.cuh"
#include "../softmax.cuh"

namespace {

constexpr int BQ = fp8_any_gpu::rows, BKV = fp8_any_gpu::keys, WARPS = fp8_any_gpu::warps,
              THREADS = WARPS * 32;

template <int HEAD_DIM> struct Smem {
    typedef smem_tile<BQ, HEAD_DIM * 2> QTile;
    typedef smem_tile<BKV, HEAD_DIM * 2> KvTile;
    /* 24, 48 and 96 KiB */
    static constexpr int K = QTile::bytes, V = K + KvTile::bytes, BYTES = V + KvTile::bytes;
};

/* ---- 1. loading codes ------------------------------------------------------------------------ */
/* Loads rows [from, end) and columns [0, cols) of a tile; cols is a multiple of 8. Sets the rest to
 * zero without reading it. */
template <class Tile>
__device__ __forceinline__ void load_codes(smem_addr tile_s, const uint8_t *src_g,
                                           int64_t row_stride, int from, int end, int cols,
                                           bool aligned, int thread) {
    typedef tile_copy<Tile, THREADS> C;
#pragma unroll 4
    for (int pass = 0; pass < C::passes; ++pass) {
        const int row = C::row(thread, pass), col = C::chunk(thread, pass) * 8;
        uint2 codes = make_uint2(0, 0);
        if (row >= from && row < end && col < cols) {
            const uint8_t *at = src_g + row * row_stride + col;
            if (aligned) {
                codes = *(const uint2 *)at;
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    codes.x |= (uint32_t)at[i] << 8 * i;
                    codes.y |= (uint32_t)at[4 + i] << 8 * i;
                }
            }
        }
        uint32_t h[4];
        e4m3x4_to_f16x4(h, codes.x);
        e4m3x4_to_f16x4(h + 2, codes.y);
        st_shared_128(tile_s + C::offset(thread, pass), make_uint4(h[0], h[1], h[2], h[3]));
    }
}

/* ---- 2. the two products of a tile ----------------------------------------------------------- */
template <int HEAD_DIM> struct Fp8Products {
    typedef typename Smem<HEAD_DIM>::QTile QTile;
    typedef typename Smem<HEAD_DIM>::KvTile KvTile;
    static constexpr int N = BKV / 8, ND = HEAD_DIM / 8;

    /* S [16][BKV] = Q K^T */
    static __device__ __forceinline__ void scores(float (&s)[1][N][4], smem_addr q_at,
                                                  smem_addr k_at) {
#pragma unroll
        for (int n = 0; n < N; ++n) s[0][n][0] = s[0][n][1] = s[0][n][2] = s[0][n][3] = 0;
#pragma unroll
        for (int kk = 0; kk < HEAD_DIM / 16; ++kk) {
            uint32_t a[4], b[4];
            load_frag_a(a, QTile::along(q_at, 2 * kk));
#pragma unroll
            for (int n = 0; n < N; n += 2) {
                load_frag_b(b, KvTile::down(KvTile::along(k_at, 2 * kk), 8 * n));
                mma_add<__half>(s[0][n], a, b), mma_add<__half>(s[0][n + 1], a, b + 2);
            }
        }
    }

    /* O [16][HEAD_DIM] += P V */
    static __device__ __forceinline__ void values(float (&o)[1][ND][4], const float (&p)[1][N][4],
                                                  smem_addr v_at) {
#pragma unroll
        for (int kk = 0; kk < BKV / 16; ++kk) {
            uint32_t a[4], b[4];
            acc_to_a<__half>(a, p[0][2 * kk], p[0][2 * kk + 1]);
#pragma unroll
            for (int n = 0; n < ND; n += 2) {
                load_frag_b_trans(b, KvTile::down(KvTile::along(v_at, n), 16 * kk));
                mma_add<__half>(o[0][n], a, b), mma_add<__half>(o[0][n + 1], a, b + 2);
            }
        }
    }
};

/* ---- 3. the kernel --------------------------------------------------------------------------- */
struct Params {
    Fp8Params call;
    bool q_aligned, k_aligned, v_aligned; /* rows begin at multiples of 8 bytes */
};

template <int HEAD_DIM>
__global__ void __launch_bounds__(THREADS, 2) flash_attn_fp8_sm80_kernel(Params params) {
    typedef Smem<HEAD_DIM> S;
    typedef typename S::QTile QTile;
    typedef typename S::KvTile KvTile;
    typedef Fp8Products<HEAD_DIM> X;
    extern __shared__ __align__(1024) unsigned char smem[];
    const smem_addr q_s = cvta_to_shared(smem), k_s = q_s + S::K, v_s = q_s + S::V;
    const Fp8Params &c = params.call;
    const Problem &p = c.problem;
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;

    /* 3.1 rows and keys of this block */
    const int heads = p.batch * p.heads_q, flat = blockIdx.x % heads;
    const int b = flat / p.heads_q, head = flat % p.heads_q, head_kv = head / p.group;
    const int i0 = (c.tiles_q - 1 - (int)(blockIdx.x / heads)) * BQ;
    const Sequence seq = sequence_of(p, b);
    if (i0 >= seq.seq_q) return;
    const int rows = min(BQ, seq.seq_q - i0), lo = seq.span.lo(i0), hi = seq.span.hi(i0 + rows - 1);
    /* keys that every row sees */
    const int plain_lo = seq.span.lo(i0 + rows - 1), plain_hi = seq.span.hi(i0);
    const uint8_t *q_g = (const uint8_t *)p.q.data + p.q.at(b, head, seq.q0 + i0);
    const uint8_t *k_g = (const uint8_t *)p.k.data + p.k.at(b, head_kv, seq.k0);
    const uint8_t *v_g = (const uint8_t *)p.v.data + p.v.at(b, head_kv, seq.k0);
    /* Scores are in log2 units, where a weight is 2^(s - peak). A conversion inside the softmax
     * would round s and peak differently, and a score above 2^31 would then get a weight of 0 or
     * inf. */
    Score score = score_of(p, seq, b, head);
    score.scale *= LOG2_E;
    score.softcap *= LOG2_E;
    score.slope *= LOG2_E;
    const float scale = score.scale, q_scale = fp8_scale(c.q_scale, b, head, i0);
    const float largest = fp8_largest(c.v_scale, b, head_kv, lo, hi);

    const smem_addr q_at = frag_a_base<QTile>(q_s, lane, warp * 16);
    const smem_addr k_at = frag_b_base<KvTile>(k_s, lane),
                    v_at = frag_b_trans_base<KvTile>(v_s, lane);
    const int row0 = i0 + warp * 16 + frag_row(lane, 0), col0 = frag_col(lane, 0);

    OnlineSoftmax<1> softmax;
    float o[1][X::ND][4];
    softmax.clear();
#pragma unroll
    for (int n = 0; n < X::ND; ++n) o[0][n][0] = o[0][n][1] = o[0][n][2] = o[0][n][3] = 0;
    load_codes<QTile>(q_s, q_g, p.q.row, 0, rows, p.head_dim, params.q_aligned, thread);

    /* 3.2 the loop over key tiles */
    for (int key0 = lo / BKV * BKV; key0 < hi; key0 += BKV) {
        __syncthreads(); /* all threads have read the previous tiles */
        load_codes<KvTile>(k_s, k_g + key0 * p.k.row, p.k.row, lo - key0, hi - key0, p.head_dim,
                           params.k_aligned, thread);
        load_codes<KvTile>(v_s, v_g + key0 * p.v.row, p.v.row, lo - key0, hi - key0, p.head_dim_v,
                           params.v_aligned, thread);
        __syncthreads(); /* the tiles and q are written */
        float s[1][X::N][4];
        X::scores(s, q_at, k_at);
        const Fp8Factors by = fp8_factors(scale, q_scale, fp8_scale(c.k_scale, b, head_kv, key0));
        score.scale = by.first;
        if (by.second != 1)
#pragma unroll
            for (int n = 0; n < X::N; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) s[0][n][e] *= by.second;
        modify(s, score, row0, key0 + col0);
        if (key0 < plain_lo || key0 + BKV > plain_hi) mask(s, seq, row0, key0 + col0);
        softmax.step(s, o, 1);
        const float share = fp8_share(c.v_scale, largest, b, head_kv, key0);
#pragma unroll
        for (int n = 0; n < X::N; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[0][n][e] *= share;
        X::values(o, s, v_at);
    }

    /* 3.3 results */
    const float sink = sink_of(p, head);
    const float *mean = c.mean.data ? c.mean.data + b * c.mean.batch + head_kv * c.mean.head : NULL;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float total = quad_sum(softmax.total[0][r]);
        const RowSum y = row_sum(softmax.peak[0][r] * LN_2, total, sink);
        const int i = row0 + 8 * r;
        if (i >= seq.seq_q) continue;
        const float factor = y.factor(), seen = total * factor;
        const int64_t row = p.out.at(b, head, seq.q0 + i);
        if (col0 == 0 && p.lse.data)
            ((float *)p.lse
                 .data)[b * p.lse.batch + head * p.lse.head + (int64_t)(seq.q0 + i) * p.lse.row] =
                y.lse();
#pragma unroll
        for (int n = 0; n < X::ND; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int d = 8 * n + col0 + e;
                if (d >= p.head_dim_v) continue;
                const float x = o[0][n][2 * r + e] * factor * largest;
                fp8_store((void *)p.out.data, c.out_dtype, row + d,
                          mean ? x + seen * mean[d * c.mean.column] : x);
            }
    }
}

/* ---- 4. launcher and table ------------------------------------------------------------------- */
bool in_eights(const gk_tensor &t) {
    bool all = (uintptr_t)t.data % 8 == 0;
    for (int d = 0; d < t.ndim - 1; ++d) all = all && (t.shape[d] <= 1 || t.stride[d] % 8 == 0);
    return all;
}

template <int HEAD_DIM> int blocks_an_sm() {
    return blocks_per_sm<flash_attn_fp8_sm80_kernel<HEAD_DIM>>(THREADS, Smem<HEAD_DIM>::BYTES);
}

enum {
    KEY_HEAD_DIM,
    KEY_SMEM /* bytes of shared memory */
};

bool plan(const gk_cuda_instance *instance, const gk_context *ctx, const void *args, gk_plan *to) {
    const gk_flash_attn_fp8_args *a = (const gk_flash_attn_fp8_args *)args;
    const gk_flash_attn_args *f = &a->fwd;
    if (gk_max_i64(f->q.shape[f->q.ndim - 1], f->v.shape[f->v.ndim - 1]) >
        instance->key[KEY_HEAD_DIM])
        return false;
    if (!smem_fits(ctx, instance->key[KEY_SMEM])) return false;
    const Params &x = gk_own<Params>(to) = {fp8_params(ctx, a, BQ), in_eights(f->q),
                                            in_eights(f->k), in_eights(f->v)};
    to->tile[0] = BQ;
    to->tile[1] = BKV;
    to->tasks = (int64_t)x.call.tiles_q * x.call.problem.heads_q * x.call.problem.batch;
    return gk_grid_fits(to->tasks);
}

template <int HEAD_DIM>
gk_status run(const gk_context *ctx, const void *, const gk_plan *plan, void *) {
    const Params &x = gk_own<Params>(plan);
    const gk_status status = launch<flash_attn_fp8_sm80_kernel<HEAD_DIM>>(
        "gk_flash_attn_fp8", ctx, dim3((unsigned)plan->tasks), THREADS, Smem<HEAD_DIM>::BYTES, x);
    return status == GK_OK ? fp8_finish("gk_flash_attn_fp8", ctx, x.call) : status;
}

#define INSTANCE(D) \
    {"flash_attn_fp8_sm80_d" #D, GK_E4M3, plan, run<D>, {D, Smem<D>::BYTES}, blocks_an_sm<D>}
const gk_cuda_instance instances[] = {INSTANCE(64), INSTANCE(128), INSTANCE(256)};
#undef INSTANCE

} // namespace

extern "C" const gk_cuda_table gk_flash_attn_fp8_sm80_table = {
    instances, sizeof instances / sizeof instances[0], 80, NULL};
