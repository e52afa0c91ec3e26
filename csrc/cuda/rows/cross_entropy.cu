// SPDX-License-Identifier: BSD-3-Clause
/* cross_entropy: the loss of each row of logits, and its gradient. Serves the ops
 * gk_cross_entropy_fwd and gk_cross_entropy_bwd (gpukern.h, gpukern_train.h). With e the label
 * smoothing, t the row's target, w the weights (1 if none) and V the number of
 * columns of the whole row:
 *
 *   z = softcap tanh(logit_scale logits / softcap), or logit_scale logits;   lse = log sum exp z
 *   loss = (1 - e) w[t] (lse - z[t]) + e / V (W lse - sum w[c] z[c]) + z_loss lse^2,   W = sum w[c]
 *   dz[c] = g (exp(z[c] - lse) ((1 - e) w[t] + e W / V + 2 z_loss lse)
 *              - (c = t) (1 - e) w[t] - e w[c] / V)
 *
 * logits and dlogits [M, V] are float32, bfloat16, float16 or float64; dlogits may have 16 bits
 * beside float32 logits. target [M] is int64. w [V], loss [M] and lse [M] are float32, or float64
 * beside float64 logits.
 *
 * Forward: a block reads a row once, and each thread keeps a running maximum and sum (Milakov and
 * Gimelshein 2018, arXiv:1805.02867). Backward: it needs only lse of the row, so a row's columns
 * are cut over several blocks, and a call may pass a slice of the columns. A forward call that
 * wants dlogits takes two launches; cross_entropy_sm90a.cu does it in one. Threads load 16-byte
 * vectors if every row starts at a multiple of 16 bytes and has whole vectors, otherwise single
 * elements.
 *
 * No workspace. Bound by reading logits, and by writing dlogits. */
#include "gpukern_train.h"
#include "../ptx/regs.cuh"
#include "row_block.cuh"

namespace {

/* 256 threads x 4 vectors x 16 bytes: a block has 16 KB of loads in flight. Four blocks or more of
 * an SM hide each other's reductions and the wait for a row's target. */
constexpr int THREADS = 256, UNROLL = 4;
constexpr float LOG2_E = 1.44269504f;

struct Params {
    RowTensor logits, target, dlogits, grad_loss;
    const void *weight;
    void *loss, *lse;
    int64_t rows, n, weight_stride, ignore_index;
    int64_t first, classes; /* backward: the place of column 0 of logits in the whole row, and the
                               whole row's columns */
    double smoothing, softcap, scale, z_loss;
    uint8_t *error_word;
    unsigned parts; /* backward: blocks that share a row */
};

__device__ __forceinline__ float e_to(float x) { return expf(x); }
__device__ __forceinline__ double e_to(double x) { return exp(x); }

/* Maps a logit to z. */
template <class W> struct Logit {
    W scale, cap, inverse_cap;
    __device__ __forceinline__ explicit Logit(const Params &p)
        : scale(W(p.scale)), cap(W(p.softcap)),
          inverse_cap(p.softcap > 0 ? W(1 / p.softcap) : W(0)) {}
    __device__ __forceinline__ W z(W x) const {
        return cap == 0 ? scale * x : cap * tanh(scale * x * inverse_cap);
    }
    /* dz / dlogit, computed from z: 1 - tanh^2 if there is a soft cap */
    __device__ __forceinline__ W slope(W z) const {
        return cap == 0 ? scale : scale * (1 - z * inverse_cap * (z * inverse_cap));
    }
};

template <class W> __device__ __forceinline__ W weight_of(const Params &p, int64_t c) {
    return p.weight ? ((const W *)p.weight)[c * p.weight_stride] : W(1);
}

/* The sum of all weights; all threads of a block call it. `place`: 32 values. */
template <class W> __device__ __forceinline__ W all_weights(const Params &p, W *place) {
    if (!p.weight) return W(p.classes);
    W sum[1] = {0};
    for (int64_t c = threadIdx.x; c < p.classes; c += THREADS) sum[0] += weight_of<W>(p, c);
    block_sum(sum, place);
    return sum[0];
}

/* Reads a row's target. Returns false if the row is ignored. A target outside [0, V) sets `bad` and
 * is reported through the error word. */
__device__ __forceinline__ bool read_target(const Params &p, int64_t row, int64_t &target,
                                            bool &bad) {
    target = *row_at<int64_t>(p.target, row);
    bad = false;
    if (target == p.ignore_index) return false;
    bad = target < 0 || target >= p.classes;
    if (bad && threadIdx.x == 0) report(p.error_word, GK_BAD_TARGETS);
    return true;
}

/* The maximum (peak) of z = scale x over a thread's columns, and the sum of exp(z - peak). A step
 * loads UNROLL vectors, takes their maximum and then their exponentials, so that it rescales the
 * sum once. A NaN in x makes the sum NaN. */
template <class T, int V>
__device__ __forceinline__ void plain_sums(const Params &p, const T *x, float &peak, float &sum) {
    typedef RowSome<T, V> Vec;
    const int64_t end = p.n / V;
    const float scale = (float)p.scale;
    for (int64_t first = threadIdx.x; first < end; first += UNROLL * THREADS) {
        Vec v[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            if (first + u * THREADS < end) v[u] = ((const Vec *)x)[first + u * THREADS];
        float top = peak;
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            if (first + u * THREADS < end)
#pragma unroll
                for (int k = 0; k < V; ++k) top = fmaxf(top, __fmul_rn(scale, to_acc(v[u].v[k])));
        const float base = top == -INFINITY ? 0 : top;
        sum *= ex2_approx_ftz((peak - base) * LOG2_E);
        peak = top;
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            if (first + u * THREADS < end)
#pragma unroll
                for (int k = 0; k < V; ++k)
                    sum += ex2_approx_ftz((__fmul_rn(scale, to_acc(v[u].v[k])) - base) * LOG2_E);
    }
}

/* Loss and lse of the rows blockIdx.x, blockIdx.x + gridDim.x, .. PLAIN: float32 accumulation,
 * without soft cap and label smoothing. */
template <class T, int V, bool PLAIN>
__global__ void __launch_bounds__(THREADS, PLAIN ? 4 : 2) cross_entropy_fwd_kernel(Params p) {
    typedef typename element<T>::acc W;
    typedef RowSome<T, V> Vec;
    __shared__ W place[64];
    const Logit<W> logit(p);
    const W e = W(p.smoothing);
    const W weights = p.smoothing != 0 ? all_weights<W>(p, place) : W(0);
    for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
        int64_t target;
        bool bad;
        if (!read_target(p, row, target, bad) || bad) {
            if (threadIdx.x == 0) ((W *)p.loss)[row] = ((W *)p.lse)[row] = bad ? W(NAN) : W(0);
            continue;
        }
        const T *x = row_at<T>(p.logits, row);
        W peak = -INFINITY, sums[2] = {0, 0};
        bool nan = false;
        if constexpr (PLAIN) plain_sums<T, V>(p, x, peak, sums[0]);
#pragma unroll UNROLL
        for (int64_t i = threadIdx.x; !PLAIN && i < p.n / V; i += THREADS) {
            const Vec v = ((const Vec *)x)[i];
            W z[V], top = peak;
#pragma unroll
            for (int k = 0; k < V; ++k) {
                z[k] = logit.z(to_acc(v.v[k]));
                nan |= z[k] != z[k];
                top = lanes_max2(top, z[k]);
                if (p.smoothing != 0) sums[1] += weight_of<W>(p, i * V + k) * z[k];
            }
            if (top == -INFINITY) continue;
            if (top > peak) {
                sums[0] *= peak == -INFINITY ? W(0) : e_to(peak - top);
                peak = top;
            }
#pragma unroll
            for (int k = 0; k < V; ++k) sums[0] += e_to(z[k] - peak);
        }
        const W all = block_max(peak, place);
        sums[0] *= peak == -INFINITY ? W(0) : e_to(peak - all);
        if (nan || all == INFINITY) sums[0] = NAN;
        block_sum(sums, place);
        if (threadIdx.x == 0) {
            const W log_sum = log(sums[0]), lse = all + log_sum;
            W loss =
                (1 - e) * weight_of<W>(p, target) * (all - logit.z(to_acc(x[target])) + log_sum);
            if (p.smoothing != 0) loss += e / W(p.n) * (weights * lse - sums[1]);
            if (p.z_loss != 0) loss += W(p.z_loss) * lse * lse;
            ((W *)p.loss)[row] = loss;
            ((W *)p.lse)[row] = lse;
        }
    }
}

/* V logits, loaded 16 bytes at a time. */
template <class T, int V> struct alignas(V * sizeof(T) < 16 ? V * sizeof(T) : 16) Run {
    T v[V];
};

/* Runs that a thread loads before it computes, as many as its registers allow. */
template <class T, int V> constexpr int AHEAD = V * sizeof(T) > 16 || sizeof(T) == 8 ? 2 : 4;

/* A row's gradients of a run. The general form has soft cap, smoothing and results of 32 and 64
 * bits. */
template <class T, class D, int V, class W>
__device__ __forceinline__ void gradients(const Params &p, const Logit<W> &logit,
                                          const Run<T, V> &x, W lse, W of_p, W own, W e, W g,
                                          int64_t first, int64_t target, RowSome<D, V> &d) {
#pragma unroll
    for (int k = 0; k < V; ++k) {
        const W z = logit.z(to_acc(x.v[k]));
        W y = e_to(z - lse) * of_p;
        if (first + k == target) y -= own;
        if (p.smoothing != 0) y -= e * weight_of<W>(p, first + k);
        d.v[k] = from_acc<D>(g * y * logit.slope(z));
    }
}

/* Results of 16 bits without soft cap and smoothing. target: its place in this run. */
template <class T, class D, int V>
__device__ __forceinline__ void plain_gradients(const Run<T, V> &x, float scale, float lse,
                                                float of_p, float own, int64_t target,
                                                RowSome<D, V> &d) {
    float y[V];
#pragma unroll
    for (int k = 0; k < V; ++k)
        y[k] = ex2_approx_ftz((__fmul_rn(scale, to_acc(x.v[k])) - lse) * LOG2_E) * of_p;
    if (target >= 0 && target < V)
#pragma unroll
        for (int k = 0; k < V; ++k) y[k] -= k == (int)target ? own : 0;
#pragma unroll
    for (int k = 0; k < V; ++k) d.v[k] = from_acc<D>(y[k]);
}

/* The grid strides over the rows. Neighbouring blocks share a row, and take its chunks of THREADS x
 * AHEAD runs in turn. Before its first chunk a block executes as many instructions as for a chunk.
 * So a row has more than one block only if M is small.
 *
 * T is the logits' type, D the gradient's. A thread loads all its logits of a chunk before it
 * stores, because dlogits may be the logits' own memory. PLAIN: results of 16 bits, without soft
 * cap and label smoothing. */
template <class T, class D, int V, bool PLAIN>
__global__ void __launch_bounds__(THREADS, sizeof(T) == 8 ? 1 : 4)
    cross_entropy_bwd_kernel(Params p) {
    typedef typename element<T>::acc W;
    __shared__ W place[32];
    const Logit<W> logit(p);
    const W e = W(p.smoothing) / W(p.classes);
    const W weights = p.smoothing != 0 ? all_weights<W>(p, place) : W(0);
    constexpr int MANY = AHEAD<T, V>;
    const unsigned block = blockIdx.x / p.parts, part = blockIdx.x - block * p.parts;
    const int64_t end = p.n / V;
    for (int64_t row = block; row < p.rows; row += gridDim.x / p.parts) {
        int64_t target;
        bool bad;
        const bool counts = read_target(p, row, target, bad);
        D *dx = row_at<D>(p.dlogits, row);
        const Run<T, V> *x = (const Run<T, V> *)row_at<T>(p.logits, row);
        const W g = !counts ? W(0) : p.grad_loss.data ? *row_at<W>(p.grad_loss, row) : W(1);
        const W lse = ((const W *)p.lse)[row];
        const W own =
            bad ? W(NAN) : W(1 - p.smoothing) * weight_of<W>(p, counts && !bad ? target : 0);
        const W of_p = own + e * weights + 2 * W(p.z_loss) * lse, by = g * logit.scale;
        for (int64_t first = (int64_t)part * (THREADS * MANY) + threadIdx.x; first < end;
             first += (int64_t)p.parts * (THREADS * MANY)) {
            Run<T, V> in[MANY];
#pragma unroll
            for (int u = 0; u < MANY; ++u)
                if (counts && first + u * THREADS < end) in[u] = x[first + u * THREADS];
#pragma unroll
            for (int u = 0; u < MANY; ++u) {
                const int64_t i = first + u * THREADS, at = p.first + i * V;
                if (i >= end) continue;
                RowSome<D, V> d;
#pragma unroll
                for (int k = 0; k < V; ++k) d.v[k] = from_acc<D>(0);
                if constexpr (PLAIN) {
                    if (counts)
                        plain_gradients(in[u], logit.scale, lse, by * of_p, by * own, target - at,
                                        d);
                } else if (counts) {
                    gradients<T, D, V>(p, logit, in[u], lse, of_p, own, e, g, at, target, d);
                }
                store_some(dx + i * V, d);
            }
        }
    }
}

Params params_of(const gk_context *ctx, const gk_cross_entropy_args *a, const gk_loss_more &more) {
    Params p = {row_tensor(a->logits), row_elements(&a->target)};
    if (a->weight) {
        p.weight = a->weight->data;
        p.weight_stride = a->weight->stride[0];
    }
    p.loss = a->loss.data;
    p.lse = a->lse.data;
    p.rows = num_rows(a->logits);
    p.n = a->logits.shape[a->logits.ndim - 1];
    p.ignore_index = a->ignore_index;
    p.smoothing = a->label_smoothing;
    p.softcap = a->softcap;
    p.scale = a->logit_scale;
    p.z_loss = more.z_loss;
    p.first = more.first_class;
    p.classes = more.num_classes;
    p.error_word = ctx->error_word;
    return p;
}

template <class T, class D, int V, bool PLAIN>
gk_status bwd_launch(const gk_context *ctx, Params p, const gk_tensor &dlogits, const char *op) {
    p.dlogits = row_tensor(dlogits);
    /* eight blocks an SM, of which four run at a time */
    const int64_t chunks = gk_ceil_div(p.n / V, THREADS * AHEAD<T, V>), rows = row_blocks(p.rows),
                  wanted = gk_gpu_of(ctx->index)->num_sms * 8;
    p.parts =
        (unsigned)gk_clamp_i64(gk_ceil_div(wanted, gk_max_i64(rows, 1)), 1, gk_max_i64(chunks, 1));
    const dim3 grid((unsigned)rows * p.parts);
    return launch<cross_entropy_bwd_kernel<T, D, V, PLAIN>>(op, ctx, grid, THREADS, 0, p);
}

template <class T, class D>
gk_status bwd_vectors(const gk_context *ctx, const Params &p, const gk_tensor &logits,
                      const gk_tensor &dlogits, const char *op) {
    constexpr int V = row_vec<D>;
    if (!rows_whole(dlogits, &logits)) return bwd_launch<T, D, 1, false>(ctx, p, dlogits, op);
    if constexpr (sizeof(D) == 2)
        if (p.smoothing == 0 && p.softcap == 0)
            return bwd_launch<T, D, V, true>(ctx, p, dlogits, op);
    return bwd_launch<T, D, V, false>(ctx, p, dlogits, op);
}

template <class T>
gk_status bwd_any(const gk_context *ctx, const Params &p, const gk_tensor &logits,
                  const gk_tensor &dlogits, const char *op) {
    if constexpr (sizeof(T) == 4) {
        if (dlogits.dtype == GK_BF16)
            return bwd_vectors<T, __nv_bfloat16>(ctx, p, logits, dlogits, op);
        if (dlogits.dtype == GK_F16) return bwd_vectors<T, __half>(ctx, p, logits, dlogits, op);
    }
    return bwd_vectors<T, T>(ctx, p, logits, dlogits, op);
}

const char *const FWD = "gk_cross_entropy_fwd";

template <class T>
gk_status losses(const gk_context *ctx, const gk_cross_entropy_args *a, const Params &p) {
    const dim3 grid(row_blocks(p.rows));
    const bool plain = p.smoothing == 0 && p.softcap == 0;
#define LAUNCH(V, PLAIN) \
    launch<cross_entropy_fwd_kernel<T, V, PLAIN>>(FWD, ctx, grid, THREADS, 0, p)
    if constexpr (sizeof(T) <= 4)
        if (plain && rows_whole(a->logits)) return LAUNCH(row_vec<T>, true);
    return rows_whole(a->logits) ? LAUNCH(row_vec<T>, false) : LAUNCH(1, false);
#undef LAUNCH
}

template <class T>
gk_status fwd_run(const gk_context *ctx, const void *args, const gk_plan *, void *) {
    const gk_cross_entropy_args *a = (const gk_cross_entropy_args *)args;
    const gk_loss_more more = gk_more_of_fwd(a);
    const Params p = params_of(ctx, a, more);
    const gk_status status = losses<T>(ctx, a, p);
    return status == GK_OK && more.dlogits ? bwd_any<T>(ctx, p, a->logits, *more.dlogits, FWD)
                                           : status;
}

template <class T>
gk_status bwd_run(const gk_context *ctx, const void *args, const gk_plan *, void *) {
    const gk_cross_entropy_bwd_args *b = (const gk_cross_entropy_bwd_args *)args;
    Params p = params_of(ctx, &b->fwd, gk_more_of_bwd(b));
    p.grad_loss = row_elements(&b->grad_loss);
    return bwd_any<T>(ctx, p, b->fwd.logits, b->dlogits, "gk_cross_entropy_bwd");
}

bool fwd_plan(const gk_cuda_instance *, const gk_context *, const void *args, gk_plan *plan) {
    plan->tasks = num_rows(((const gk_cross_entropy_args *)args)->logits);
    return true;
}
bool bwd_plan(const gk_cuda_instance *, const gk_context *, const void *args, gk_plan *plan) {
    plan->tasks = num_rows(((const gk_cross_entropy_bwd_args *)args)->fwd.logits);
    return true;
}

const gk_cuda_instance fwd[] = {
    {"cross_entropy_fwd_f32", GK_F32, fwd_plan, fwd_run<float>, {}, NULL},
    {"cross_entropy_fwd_bf16", GK_BF16, fwd_plan, fwd_run<__nv_bfloat16>, {}, NULL},
    {"cross_entropy_fwd_f16", GK_F16, fwd_plan, fwd_run<__half>, {}, NULL},
    {"cross_entropy_fwd_f64", GK_F64, fwd_plan, fwd_run<double>, {}, NULL},
};
const gk_cuda_instance bwd[] = {
    {"cross_entropy_bwd_f32", GK_F32, bwd_plan, bwd_run<float>, {}, NULL},
    {"cross_entropy_bwd_bf16", GK_BF16, bwd_plan, bwd_run<__nv_bfloat16>, {}, NULL},
    {"cross_entropy_bwd_f16", GK_F16, bwd_plan, bwd_run<__half>, {}, NULL},
    {"cross_entropy_bwd_f64", GK_F64, bwd_plan, bwd_run<double>, {}, NULL},
};

} // namespace

extern "C" const gk_cuda_table gk_cross_entropy_fwd_table = {fwd, 4, 80, NULL};
extern "C" const gk_cuda_table gk_cross_entropy_bwd_table = {bwd, 4, 80, NULL};
