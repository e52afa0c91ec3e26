// SPDX-License-Identifier: BSD-3-Clause
/* rope: rotary embedding of q [B, Hq, S, D] and k [B, Hkv, S, D] in one launch (Su et al. 2021,
 * arXiv:2104.09864). Serves the op gk_rope.
 *
 *   (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)
 *
 * x1 and x2 are R / 2 columns apart, or neighbours if `interleaved`. Columns from R on are copied.
 * q and k are float32, bfloat16, float16 or float64; cos and sin [P, R / 2] are float32, or float64
 * beside float64. `inverse` rotates back, which is the gradient.
 *
 * A thread takes a 16-byte vector of a head's row and the vector of its partners. If rows are not
 * whole vectors that start at multiples of 16 bytes, it takes an element and its partner. Threads
 * are numbered along a row, then over the heads of a token, which share a row of cos and sin.
 *
 * A position outside [0, P) is clamped to P - 1 and reported through the error word. No workspace.
 */
#include "row_block.cuh"

namespace {

constexpr int THREADS = 256;

struct Heads {
    const void *x;
    void *y;
    int64_t x_stride[3], y_stride[3]; /* strides of B, H, S */
};

struct Params {
    Heads q, k;
    const void *cos, *sin, *positions;
    int64_t cos_stride, sin_stride, position_b, position_s, rows_of_cos;
    int64_t batch, seq, heads_q, heads, head_dim, half; /* heads = Hq + Hkv, half = R / 2 */
    uint8_t *error_word;
    bool wide, table_wide, interleaved,
        inverse; /* wide: int64 positions; table_wide: float64 cos */
};

/* Rotates a pair; `cos` and `sin` are element offsets into the tables. */
template <class T, class W>
__device__ __forceinline__ void rotate(T &x1, T &x2, const Params &p, int64_t cos, int64_t sin) {
    W c, s;
    if (sizeof(W) == 8 && p.table_wide) {
        c = W(((const double *)p.cos)[cos]);
        s = W(((const double *)p.sin)[sin]);
    } else {
        c = ((const float *)p.cos)[cos];
        s = ((const float *)p.sin)[sin];
    }
    if (p.inverse) s = -s;
    const W a = to_acc(x1), b = to_acc(x2);
    x1 = from_acc<T>(a * c - b * s);
    x2 = from_acc<T>(b * c + a * s);
}

template <class T, int V> __global__ void __launch_bounds__(THREADS) rope_kernel(Params p) {
    typedef typename element<T>::acc W;
    typedef RowSome<T, V> Vec;
    /* An interleaved vector contains its own partners, unless it is a single element. A row is
     * `rotated` items (a vector, with its partner vector if it is apart), then items to copy. */
    const bool within = p.interleaved && V > 1;
    const int64_t rotated = within ? 2 * p.half / V : p.half / V,
                  each = rotated + (p.head_dim - 2 * p.half) / V;
    const int64_t total = p.batch * p.seq * p.heads * each, step = (int64_t)gridDim.x * THREADS;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < total; i += step) {
        int64_t rest = i / each;
        const int item = (int)(i - rest * each);
        int64_t h = rest % p.heads;
        rest /= p.heads;
        const int64_t s = rest % p.seq, b = rest / p.seq;
        const bool of_k = h >= p.heads_q;
        const Heads &heads = of_k ? p.k : p.q;
        if (of_k) h -= p.heads_q;
        const T *x = (const T *)heads.x + b * heads.x_stride[0] + h * heads.x_stride[1] +
                     s * heads.x_stride[2];
        T *y = (T *)heads.y + b * heads.y_stride[0] + h * heads.y_stride[1] + s * heads.y_stride[2];
        if (item >= rotated) { /* columns from R on */
            const int64_t at = 2 * p.half + (int64_t)(item - rotated) * V;
            if (x != y) *(Vec *)(y + at) = *(const Vec *)(x + at);
            continue;
        }
        int64_t position = s;
        if (p.positions) {
            const int64_t at = b * p.position_b + s * p.position_s;
            position =
                p.wide ? ((const int64_t *)p.positions)[at] : ((const int32_t *)p.positions)[at];
        }
        if (position < 0 || position >= p.rows_of_cos) {
            report(p.error_word, GK_BAD_POSITIONS);
            position = p.rows_of_cos - 1;
        }
        const int64_t cos = position * p.cos_stride, sin = position * p.sin_stride;
        if (within) {
            Vec v = *(const Vec *)(x + item * V);
#pragma unroll
            for (int e = 0; e + 1 < V; e += 2)
                rotate<T, W>(v.v[e], v.v[e + 1], p, cos + (item * V + e) / 2,
                             sin + (item * V + e) / 2);
            *(Vec *)(y + item * V) = v;
        } else {
            const int64_t at1 = p.interleaved ? 2 * item : item * V,
                          at2 = p.interleaved ? 2 * item + 1 : p.half + item * V;
            Vec v1 = *(const Vec *)(x + at1), v2 = *(const Vec *)(x + at2);
#pragma unroll
            for (int e = 0; e < V; ++e)
                rotate<T, W>(v1.v[e], v2.v[e], p, cos + item * V + e, sin + item * V + e);
            *(Vec *)(y + at1) = v1;
            *(Vec *)(y + at2) = v2;
        }
    }
}

Heads heads_of(const gk_tensor &from, const gk_tensor &to) {
    const gk_tensor x = gk_heads_of(&from), y = gk_heads_of(&to);
    Heads h = {x.data, y.data};
    for (int d = 0; d < 3; ++d) {
        h.x_stride[d] = x.stride[d];
        h.y_stride[d] = y.stride[d];
    }
    return h;
}

template <class T> gk_status run(const gk_context *ctx, const void *args, const gk_plan *, void *) {
    constexpr int V = row_vec<T>;
    const gk_rope_args *a = (const gk_rope_args *)args;
    Params p = {heads_of(a->q, a->out_q)};
    if (a->k) p.k = heads_of(*a->k, *a->out_k);
    p.cos = a->cos.data;
    p.sin = a->sin.data;
    p.table_wide = a->cos.dtype == GK_F64;
    p.cos_stride = a->cos.stride[0];
    p.sin_stride = a->sin.stride[0];
    p.rows_of_cos = a->cos.shape[0];
    if (const gk_tensor *at = a->positions) {
        p.positions = at->data;
        p.wide = at->dtype == GK_I64;
        p.position_s = at->stride[at->ndim - 1];
        p.position_b = at->ndim == 2 ? at->stride[0] : 0;
    }
    const gk_tensor q = gk_heads_of(&a->q);
    p.batch = q.shape[0];
    p.seq = q.shape[2];
    p.head_dim = q.shape[3];
    p.half = a->cos.shape[1];
    p.heads_q = q.shape[1];
    p.heads = p.heads_q + (a->k ? gk_heads_of(a->k).shape[1] : 0);
    p.error_word = ctx->error_word;
    p.interleaved = a->interleaved;
    p.inverse = a->inverse;
    const bool vectors = rows_whole(a->q, &a->out_q, a->k, a->out_k) &&
                         (p.interleaved ? 2 * p.half : p.half) % V == 0;
    const int64_t v = vectors ? V : 1;
    const int64_t each =
        (p.interleaved && v > 1 ? 2 * p.half : p.half) / v + (p.head_dim - 2 * p.half) / v;
    const int64_t blocks = gk_ceil_div(p.batch * p.seq * p.heads * each, THREADS);
    const dim3 grid((unsigned)gk_min_i64(blocks, 1 << 20));
    return vectors ? launch<rope_kernel<T, V>>("gk_rope", ctx, grid, THREADS, 0, p)
                   : launch<rope_kernel<T, 1>>("gk_rope", ctx, grid, THREADS, 0, p);
}

bool plan(const gk_cuda_instance *, const gk_context *, const void *args, gk_plan *to) {
    const gk_rope_args *a = (const gk_rope_args *)args;
    to->tasks = gk_ceil_div(gk_numel(&a->q) + (a->k ? gk_numel(a->k) : 0), THREADS);
    return true;
}

const gk_cuda_instance instances[] = {
    {"rope_f32", GK_F32, plan, run<float>, {}, NULL},
    {"rope_bf16", GK_BF16, plan, run<__nv_bfloat16>, {}, NULL},
    {"rope_f16", GK_F16, plan, run<__half>, {}, NULL},
    {"rope_f64", GK_F64, plan, run<double>, {}, NULL},
};

} // namespace

extern "C" const gk_cuda_table gk_rope_table = {instances, 4, 80, NULL};
