/* SPDX-License-Identifier: BSD-3-Clause */
/* glu.cuh: gated linear units, forward and backward (Shazeer 2020, arXiv:2002.05202).
 *
 *   forward    out = act(gate) up
 *   backward   dgate = grad_out up act'(gate)     dup = grad_out act(gate)
 *
 * All tensors are [M, N] of one dtype: float32, bfloat16, float16 or float64. glu.cu and
 * glu_sm90a.cu instantiate the kernel.
 *
 * Work split: a thread takes 16-byte vectors of rows. If rows are not whole vectors that start at
 * multiples of 16 bytes, it takes one element. Forward of 16 bits has a kernel of its own for rows
 * that lie at one stride. No workspace. Memory bandwidth bounds the time.
 * act(-inf) is NaN in both, as in PyTorch. */
#ifndef GPUKERN_CUDA_ROWS_GLU_CUH
#define GPUKERN_CUDA_ROWS_GLU_CUH

#include "../product/gemm/activation_slope.cuh"
#include "../tile/begins.cuh"
#include "row_block.cuh"

namespace {

/* Threads share nothing, so any number that fills an SM will do. */
constexpr int GLU_THREADS = 256;

struct GluParams {
    RowTensor grad_out, gate, up, out, more; /* backward: out is dgate and more is dup */
    int64_t rows, n;
    gk_activation activation;
};

/* The activation by exact functions, for results of 32 and 64 bits. */
template <class W> __device__ __forceinline__ W glu_value(gk_activation activation, W x) {
    return activation == GK_ACT_SILU ? x / (1 + act_exp(-x)) : activate(activation, x);
}

/* Forward: out. Backward: out is dgate and more is dup. */
template <class T, int V, bool BACKWARD>
__device__ __forceinline__ void glu_values(gk_activation activation, const RowSome<T, V> &gate,
                                           const RowSome<T, V> &up, const RowSome<T, V> &grad,
                                           RowSome<T, V> &out, RowSome<T, V> &more) {
    typedef typename element<T>::acc W;
    W x[V];
#pragma unroll
    for (int v = 0; v < V; ++v) x[v] = to_acc(gate.v[v]);
    if constexpr (BACKWARD) {
        W slope[V];
        if constexpr (sizeof(T) == 2 && V % 2 == 0) {
            const unsigned lowest = act_lowest(x);
            activate_and_slope_16<V>(activation, x, slope);
            act_put_nan(activation, lowest, x);
        } else {
#pragma unroll
            for (int v = 0; v < V; ++v) {
                slope[v] = act_derivative(activation, x[v]);
                x[v] = glu_value(activation, x[v]);
            }
        }
#pragma unroll
        for (int v = 0; v < V; ++v) {
            const W g = to_acc(grad.v[v]);
            out.v[v] = from_acc<T>(g * to_acc(up.v[v]) * slope[v]);
            more.v[v] = from_acc<T>(g * x[v]);
        }
    } else {
        if constexpr (sizeof(T) == 2 && V % 2 == 0) {
            const unsigned lowest = act_lowest(x);
            activate_16<V>(activation, x);
            act_put_nan(activation, lowest, x);
        } else {
#pragma unroll
            for (int v = 0; v < V; ++v) x[v] = glu_value(activation, x[v]);
        }
#pragma unroll
        for (int v = 0; v < V; ++v) out.v[v] = from_acc<T>(x[v] * to_acc(up.v[v]));
    }
}

/* Vectors that a thread loads before it computes. A small call needs as many threads as possible,
 * so its kernel, which overlaps the previous one, takes one vector. */
template <class T, int V, class Begins>
constexpr int glu_many = V == 1 || sizeof(T) == 8 || Begins::overlaps ? 1 : 2;

template <class T, int V, bool BACKWARD, class Begins>
__global__ void __launch_bounds__(GLU_THREADS) glu_kernel(GluParams p) {
    Begins::begin();
    typedef RowSome<T, V> Vec;
    constexpr int MANY = glu_many<T, V, Begins>;
    const int64_t each = p.n / V, total = p.rows * each,
                  step = (int64_t)gridDim.x * (GLU_THREADS * MANY);
    /* a 32-bit division takes some 20 instructions less */
    const bool small = total <= UINT32_MAX;
    for (int64_t first = (int64_t)blockIdx.x * (GLU_THREADS * MANY) + threadIdx.x; first < total;
         first += step) {
        Vec gate[MANY], up[MANY], grad[MANY];
        int64_t row[MANY], at[MANY];
#pragma unroll
        for (int u = 0; u < MANY; ++u) {
            const int64_t i = first + u * GLU_THREADS;
            if (u > 0 && i >= total) continue;
            row[u] = small ? (int64_t)((uint32_t)i / (uint32_t)each) : i / each;
            at[u] = (i - row[u] * each) * V;
            gate[u] = *(const Vec *)(row_at<T>(p.gate, row[u]) + at[u]);
            up[u] = *(const Vec *)(row_at<T>(p.up, row[u]) + at[u]);
            if (BACKWARD) grad[u] = *(const Vec *)(row_at<T>(p.grad_out, row[u]) + at[u]);
        }
#pragma unroll
        for (int u = 0; u < MANY; ++u) {
            if (u > 0 && first + u * GLU_THREADS >= total) continue;
            Vec out, more;
            glu_values<T, V, BACKWARD>(p.activation, gate[u], up[u], grad[u], out, more);
            if (BACKWARD) store_some(row_at<T>(p.more, row[u]) + at[u], more);
            store_some(row_at<T>(p.out, row[u]) + at[u], out);
        }
    }
}

/* ---- forward of flat rows of 16 bits ---------------------------------------------------------- */
/* Rows are flat if all leading dimensions of every tensor merge into one. A thread has one vector
 * of gate and one of up, in 32 registers, so that an SM is full of threads. Blocks end one by one:
 * while one computes and stores, others load. */
constexpr int GLU_FLAT_THREADS = 128;

struct GluFlatParams {
    const void *gate, *up;
    void *out;
    int64_t gate_stride, up_stride, out_stride; /* of rows, in elements */
    uint32_t total, each;                       /* vectors: of all rows, of a row */
    uint32_t multiplier, shift;                 /* glu_row_of divides by each */
};

/* i / each for i < 2^31 (Granlund and Montgomery 1994): ceil(2^32 2^shift / each) - 2^32 is the
 * multiplier, with 2^shift >= each. */
inline void glu_set_divisor(GluFlatParams &p) {
    p.shift = 0;
    while (((uint64_t)1 << p.shift) < p.each) ++p.shift;
    p.multiplier = (uint32_t)((((((uint64_t)1 << p.shift) - p.each) << 32) / p.each) + 1);
}
__device__ __forceinline__ uint32_t glu_row_of(const GluFlatParams &p, uint32_t i) {
    return (__umulhi(i, p.multiplier) + i) >> p.shift;
}

/* Values stay in words of two. As single 16-bit values the compiler keeps each in a register of its
 * own, 58 registers instead of 32. */
template <class T> __device__ __forceinline__ uint32_t glu_up_2(float x, float y, uint32_t up) {
    const float2 by = unpack2<T>(up);
    return pack2<T>(x * by.x, y * by.y);
}
template <class T, gk_activation ACTIVATION>
__device__ __forceinline__ uint4 glu_vector(uint4 gate, uint4 up) {
    const float2 a = unpack2<T>(gate.x), b = unpack2<T>(gate.y), c = unpack2<T>(gate.z),
                 d = unpack2<T>(gate.w);
    float x[8] = {a.x, a.y, b.x, b.y, c.x, c.y, d.x, d.y};
    const unsigned lowest = act_lowest(x);
    activate_16<8>(ACTIVATION, x);
    act_put_nan(ACTIVATION, lowest, x);
    return make_uint4(glu_up_2<T>(x[0], x[1], up.x), glu_up_2<T>(x[2], x[3], up.y),
                      glu_up_2<T>(x[4], x[5], up.z), glu_up_2<T>(x[6], x[7], up.w));
}

/* The activation is a template argument. If the kernel chose it, it would take 0.6 us more of 25.
 */
template <class T, gk_activation ACTIVATION, class Begins>
__global__ void __launch_bounds__(GLU_FLAT_THREADS) glu_flat_kernel(GluFlatParams p) {
    const uint32_t i = blockIdx.x * GLU_FLAT_THREADS + threadIdx.x, row = glu_row_of(p, i);
    const int64_t at = (int64_t)(i - row * p.each) * row_vec<T>;
    Begins::begin();
    if (i >= p.total) return;
    const uint4 gate = *(const uint4 *)((const T *)p.gate + row * p.gate_stride + at);
    const uint4 up = *(const uint4 *)((const T *)p.up + row * p.up_stride + at);
    st_global_128((T *)p.out + row * p.out_stride + at, glu_vector<T, ACTIVATION>(gate, up));
}

/* Rows that glu_flat_kernel serves, if they are whole vectors. */
inline bool glu_is_flat(const GluParams &p, int vec) {
    const bool gated = p.activation == GK_ACT_SILU || p.activation == GK_ACT_GELU ||
                       p.activation == GK_ACT_GELU_TANH;
    return gated && p.gate.ndim == 1 && p.up.ndim == 1 && p.out.ndim == 1 &&
           p.rows * (p.n / vec) <= INT32_MAX - GLU_FLAT_THREADS;
}

template <class T, class Begins> gk_status glu_run_flat(const gk_context *ctx, const GluParams &p) {
    GluFlatParams flat = {
        p.gate.data,    p.up.data,       p.out.data, p.gate.stride[0],
        p.up.stride[0], p.out.stride[0], 0,          (uint32_t)(p.n / row_vec<T>)};
    flat.total = (uint32_t)p.rows * flat.each;
    if (flat.total == 0) return GK_OK;
    glu_set_divisor(flat);
    const dim3 grid((unsigned)gk_ceil_div(flat.total, GLU_FLAT_THREADS));
#define GK_GLU_FLAT(ACTIVATION)                                                                  \
    launch<glu_flat_kernel<T, ACTIVATION, Begins>>("gk_glu_fwd", ctx, grid, GLU_FLAT_THREADS, 0, \
                                                   flat, Begins::overlaps)
    return p.activation == GK_ACT_SILU   ? GK_GLU_FLAT(GK_ACT_SILU)
           : p.activation == GK_ACT_GELU ? GK_GLU_FLAT(GK_ACT_GELU)
                                         : GK_GLU_FLAT(GK_ACT_GELU_TANH);
#undef GK_GLU_FLAT
}

template <class T, bool BACKWARD, class Begins>
gk_status glu_run(const gk_context *ctx, const GluParams &p, bool vectors) {
    constexpr int V = row_vec<T>;
    if constexpr (!BACKWARD && sizeof(T) == 2)
        if (vectors && glu_is_flat(p, V)) return glu_run_flat<T, Begins>(ctx, p);
    const int64_t total = p.rows * p.n / (vectors ? V : 1);
    const int many = vectors ? glu_many<T, V, Begins> : 1;
    const dim3 grid((unsigned)gk_min_i64(gk_ceil_div(total, GLU_THREADS * many), 1 << 20));
    const char *op = BACKWARD ? "gk_glu_bwd" : "gk_glu_fwd";
    if constexpr (!Begins::overlaps)
        if (!vectors)
            return launch<glu_kernel<T, 1, BACKWARD, Begins>>(op, ctx, grid, GLU_THREADS, 0, p);
    return launch<glu_kernel<T, V, BACKWARD, Begins>>(op, ctx, grid, GLU_THREADS, 0, p,
                                                      Begins::overlaps);
}

inline GluParams glu_params(const gk_glu_args *a, const gk_tensor &gate, const gk_tensor &up) {
    GluParams p = {{}, row_tensor(gate), row_tensor(up), row_tensor(a->out)};
    p.rows = num_rows(a->out);
    p.n = a->out.shape[a->out.ndim - 1];
    p.activation = a->activation;
    return p;
}

template <class T, class Begins = BeginsAlone>
gk_status glu_fwd_run(const gk_context *ctx, const void *args, const gk_plan *, void *) {
    const gk_glu_args *a = (const gk_glu_args *)args;
    const gk_tensor gate = gk_glu_half(&a->gate, a->up, 0), up = gk_glu_half(&a->gate, a->up, 1);
    return glu_run<T, false, Begins>(ctx, glu_params(a, gate, up), rows_whole(a->out, &gate, &up));
}

bool glu_plan_rows(const gk_tensor &x, gk_plan *plan) {
    plan->tasks = gk_ceil_div(gk_numel(&x), GLU_THREADS);
    return true;
}

} // namespace

#endif
