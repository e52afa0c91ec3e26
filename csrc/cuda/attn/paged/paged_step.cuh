/* SPDX-License-Identifier: BSD-3-Clause */
/* paged_step.cuh: one step of keys of a warp in paged_attn_sm90a (paged_pages.cuh has the layouts),
 * and the state of the rows that the warp serves.
 *
 * The maximum is lazy. A lane looks at the scores of its own keys. The lanes exchange maxima and
 * rescale O only if a score exceeds its row's maximum by more than SOFTMAX_SLACK_LOG2, a power
 * of 2.
 *
 * 8-bit codes are multiplied as float16, which represents them exactly. Each row of q is scaled by
 * a power of two, so that it fits float16. */
#ifndef GPUKERN_CUDA_PAGED_STEP_CUH
#define GPUKERN_CUDA_PAGED_STEP_CUH

#include "paged_factor.cuh"
#include "paged_pages.cuh"
#include "paged_stream.cuh"

namespace {

/* The type T of q and out. EitherHalf stands for bfloat16 or float16, chosen at run time by
 * StreamParams::is_f16. If the operands are float16 in both cases, one kernel serves both dtypes.
 */
struct EitherHalf {};
template <class T> __device__ __forceinline__ float2 unpack_16(const StreamParams &, uint32_t x) {
    return unpack2<T>(x);
}
template <>
__device__ __forceinline__ float2 unpack_16<EitherHalf>(const StreamParams &a, uint32_t x) {
    return a.is_f16 ? unpack2<__half>(x) : unpack2<__nv_bfloat16>(x);
}

/* ---- 1. rows --------------------------------------------------------------------------------- */
/* The rows of a share that a lane holds: columns 8 n + 2 (lane % 4) + e of S^T. */
template <class Pages, int N> struct RowsOf {
    static constexpr int STEPS = Pages::STEPS;
    uint32_t q[STEPS][N][2];     /* B operand of the mma */
    float o[STEPS][N][4];        /* O^T; with a v scale per page it is divided by v_base */
    float peak[N][2], sum[N][2]; /* to base 2; sum: this lane's share */
    float factor[N][2];          /* score / (q k) */
    float slope[N][2];
    int index[N][2]; /* query token */
    float v_base;

    template <class T>
    __device__ __forceinline__ void begin(const StreamParams &a, const TileShare &x) {
        const Paged &p = a.c.p;
        const int lane = threadIdx.x % 32;
        const float scale = paged_factor<float>(p, x.head_kv);
        v_base = Pages::CODES && a.by_page ? 0 : 1;
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const int row = x.row0 + n * 8 + lane / 4, token = token_of(a, row);
            const uint16_t *q_g = (const uint16_t *)p.q.data + (x.s.q0 + token) * p.q.row +
                                  (x.head_kv * p.group + row - token * p.group) * p.q.head;
#pragma unroll
            for (int i = 0; i < STEPS; ++i)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int col = Pages::q_col(i, half, lane);
                    const bool there = row <= x.last_row && (!Pages::CODES || col < p.head_dim);
                    q[i][n][half] = there ? *(const uint32_t *)(q_g + col) : 0;
                }
            float row_factor = 1;
            if (Pages::CODES) row_factor = to_halves<T>(a, n);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int col = lane % 4 * 2 + e, its = x.row0 + n * 8 + col,
                          its_token = token_of(a, its);
                factor[n][e] = scale;
                if (Pages::CODES)
                    factor[n][e] =
                        finite_factor(scale * __shfl_sync(0xffffffffu, row_factor, col * 4));
                index[n][e] = its_token;
                slope[n][e] = 0;
                if (its <= x.last_row)
                    slope[n][e] = slope_of<float>(p.rules, x.b,
                                                  x.head_kv * p.group + its - its_token * p.group);
                peak[n][e] = -INFINITY;
                sum[n][e] = 0;
            }
#pragma unroll
            for (int i = 0; i < STEPS; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e) o[i][n][e] = 0;
        }
    }

    /* Converts row 8 n + lane / 4 of q to float16, scaled so that its largest element is in [1, 2).
     * Returns the scale: what the row was divided by. */
    template <class T> __device__ __forceinline__ float to_halves(const StreamParams &a, int n) {
        float most = 0;
#pragma unroll
        for (int i = 0; i < STEPS; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float2 x = unpack_16<T>(a, q[i][n][half]);
                most = fmaxf(most, fmaxf(fabsf(x.x), fabsf(x.y)));
            }
        const uint32_t exponent = min(__float_as_uint(quad_max(most)) >> 23, 253u);
        const float by = __uint_as_float((254 - exponent) << 23);
#pragma unroll
        for (int i = 0; i < STEPS; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float2 x = unpack_16<T>(a, q[i][n][half]);
                q[i][n][half] = pack2<__half>(x.x * by, x.y * by);
            }
        return __uint_as_float(exponent << 23);
    }

    __device__ __forceinline__ void scale_o(int n, int e, float by) {
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            o[i][n][e] *= by;
            o[i][n][e + 2] *= by;
        }
    }
};

/* ---- 2. a step ------------------------------------------------------------------------------- */
/* Products that are summed in one chain of the tensor core, which truncates its sums. Longer sums
 * are added in float32. */
constexpr int CHAIN = 4;

template <class Pages, int N>
__device__ __forceinline__ void multiply_k(const RowsOf<Pages, N> &r, float (&x)[N][4],
                                           smem_addr k_s, int half) {
#pragma unroll
    for (int k = 0; k < Pages::STEPS; k += CHAIN) {
        float y[N][4] = {};
#pragma unroll
        for (int i = k; i < k + CHAIN; i += 2) {
            uint32_t a[2][4];
            Pages::load_k(a, k_s, i, half);
#pragma unroll
            for (int j = 0; j < 2; ++j)
#pragma unroll
                for (int n = 0; n < N; ++n) mma_add<typename Pages::T>(y[n], a[j], r.q[i + j][n]);
        }
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) x[n][e] = k == 0 ? y[n][e] : x[n][e] + y[n][e];
    }
}

/* Zeroes the rows of V that no row of the tile sees. They may hold NaN, and 0 times NaN is NaN. */
template <class Pages>
__device__ __forceinline__ void clear_unseen(smem_addr v_s, int key, int lo, int hi) {
    constexpr int chunks = Pages::COLS * (Pages::CODES ? 1 : 2) / 16;
    for (int i = threadIdx.x % 32; i < Pages::tile_bytes / 16; i += 32) {
        const int j = key + i / chunks % Pages::KEYS;
        if (j < lo || j >= hi) st_shared_128(v_s + i * 16, make_uint4(0, 0, 0, 0));
    }
    fence_proxy_async(); /* orders these stores before TMA's next write */
    __syncwarp();        /* all lanes have stored */
}

/* Turns the products of a step into scores to base 2. The score of a key that a row does not
 * see is -inf. */
template <class Pages, int N>
__device__ __forceinline__ void score(const StreamParams &a, const TileShare &share,
                                      const RowsOf<Pages, N> &r, float (&x)[N][4], int key,
                                      bool inner, bool there, float k_scale) {
    const Paged &p = a.c.p;
    const int j0 = key + threadIdx.x % 32 / 4;
    if (Pages::CODES && a.by_page) {
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) x[n][e] *= k_scale;
    }
    if (p.rules.modified) {
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int j = j0 + e / 2 * 8;
                const Score of = {r.factor[n][e % 2], (float)p.rules.softcap, r.slope[n][e % 2],
                                  share.s.diagonal};
                float derivative;
                x[n][e] = score_fast(of, x[n][e], (float)(r.index[n][e % 2] + share.s.diagonal - j),
                                     &derivative);
                x[n][e] *= LOG2_E;
            }
    } else {
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) x[n][e] *= r.factor[n][e % 2] * LOG2_E;
    }
    if (inner) return;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int j = j0 + e / 2 * 8, i = r.index[n][e % 2];
            if (!there || j < share.s.lo(i) || j >= share.s.hi(i)) x[n][e] = -INFINITY;
        }
}

template <class Pages, int N, int HALVES>
__device__ __forceinline__ void weigh(RowsOf<Pages, N> &r, float (&x)[HALVES][N][4],
                                      uint32_t (&weights)[HALVES][N][2],
                                      const float (&v_scale)[HALVES]) {
    bool grown = false;
#pragma unroll
    for (int h = 0; h < HALVES; ++h)
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) grown |= x[h][n][e] > r.peak[n][e % 2] + SOFTMAX_SLACK_LOG2;
    if (__any_sync(0xffffffffu, grown)) {
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float highest = r.peak[n][e];
#pragma unroll
                for (int h = 0; h < HALVES; ++h)
                    highest = fmaxf(highest, fmaxf(x[h][n][e], x[h][n][e + 2]));
                highest = octet_max(highest);
                const float shrink =
                    ex2_approx_ftz(r.peak[n][e] - (highest == -INFINITY ? 0.f : highest));
                r.peak[n][e] = highest;
                r.sum[n][e] *= shrink;
                r.scale_o(n, e, shrink);
            }
    }
    float factor[HALVES];
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
        factor[h] = 1;
        if (!Pages::CODES) continue;
        /* The scale of the page is the same in all lanes. It may be negative or 0. */
        const float size = fabsf(v_scale[h]);
        if (size > r.v_base) {
            const float shrink = r.v_base / size;
#pragma unroll
            for (int n = 0; n < N; ++n) {
                r.scale_o(n, 0, shrink);
                r.scale_o(n, 1, shrink);
            }
#pragma unroll
            for (int before = 0; before < h; ++before) factor[before] *= shrink;
            r.v_base = size;
        }
        /* If v_base is still 0, all scales so far were 0, and O is multiplied by 0 at the end. */
        if (v_scale[h] != r.v_base) factor[h] = v_scale[h] / r.v_base;
    }
#pragma unroll
    for (int h = 0; h < HALVES; ++h)
#pragma unroll
        for (int n = 0; n < N; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float base = r.peak[n][e] == -INFINITY ? 0.f : r.peak[n][e];
                x[h][n][e] = ex2_approx_ftz(x[h][n][e] - base);
                x[h][n][e + 2] = ex2_approx_ftz(x[h][n][e + 2] - base);
                r.sum[n][e] += x[h][n][e] + x[h][n][e + 2];
                if (Pages::CODES) {
                    x[h][n][e] *= factor[h];
                    x[h][n][e + 2] *= factor[h];
                }
            }
            acc_to_b<typename Pages::T>(weights[h][n], x[h][n]);
        }
}

template <class Pages, int N>
__device__ __forceinline__ void attend_step(const StreamParams &a, const TileShare &share,
                                            RowsOf<Pages, N> &r, smem_addr stage_s,
                                            smem_addr scales_s, int key, unsigned here) {
    constexpr int HALVES = Pages::KEYS / 16;
    const int lane = threadIdx.x % 32;
    const unsigned all = (1u << a.boxes) - 1;
    const bool inner = key >= share.inner_lo && key + Pages::KEYS <= share.inner_hi && here == all;
    if (!inner) clear_unseen<Pages>(stage_s + Pages::tile_bytes, key, share.lo, share.hi);
    const smem_addr k_s = Pages::k_base(stage_s, lane),
                    v_s = Pages::v_base(stage_s + Pages::tile_bytes, lane);
    float x[HALVES][N][4], v_scale[HALVES];
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
        const int box = a.boxes > 1 ? h : 0;
        float2 scales = make_float2(1, r.v_base);
        if (Pages::CODES && a.by_page) {
            const uint2 bits = ld_shared_64(scales_s + box * 8);
            scales = make_float2(__uint_as_float(bits.x), __uint_as_float(bits.y));
        }
        v_scale[h] = scales.y;
        multiply_k<Pages, N>(r, x[h], k_s, h);
        score<Pages, N>(a, share, r, x[h], key + h * 16, inner, here >> box & 1, scales.x);
    }
    uint32_t weights[HALVES][N][2];
    weigh<Pages, N, HALVES>(r, x, weights, v_scale);
#pragma unroll
    for (int h = 0; h < HALVES; ++h)
#pragma unroll
        for (int i = 0; i < Pages::STEPS; i += 2) {
            uint32_t b[2][4];
            Pages::load_v(b, v_s, i, h);
#pragma unroll
            for (int j = 0; j < 2; ++j)
#pragma unroll
                for (int n = 0; n < N; ++n)
                    mma_add<typename Pages::T>(r.o[i + j][n], b[j], weights[h][n]);
        }
}

} // namespace

#endif
