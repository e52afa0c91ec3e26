// SPDX-License-Identifier: BSD-3-Clause
/* adamw: one step of AdamW (Loshchilov and Hutter 2019) over a list of tensors. Serves the op
 * gk_adamw; gpukern_train.h has the equations.
 *
 * Parameters and gradients are float32, bfloat16, float16 or float64. The states m and v have that
 * dtype, or float32 beside 16-bit parameters.
 *
 * The tensors' pointers travel as a table in the kernel's parameters. So the call copies nothing to
 * the device, and a captured graph keeps the pointers. A list longer than a table takes several
 * launches. A block updates one chunk of THREADS x EACH vectors of one tensor, and finds its tensor
 * by bisection in the table. Step counts, learning rate, gradient scale and clip are read on the
 * device. No workspace. Bound by memory: 28 bytes per element in float32. */
#include "gpukern_train.h"
#include "philox.cuh"
#include "row_block.cuh"

namespace {

constexpr int THREADS = 256;
/* Vectors per thread. The search for the tensor and two exponentials are paid once per block, that
 * is once per 4096 float32 elements. */
constexpr int EACH = 4;
/* Tensors in a small and in a large table. Up to 4 KiB of kernel parameters are cheap; 32764 bytes
 * are the limit. */
constexpr int FEW = 48, MANY = 420;
constexpr int MOST_CHUNKS = 1 << 30; /* blocks per launch */

struct Entry {
    void *w, *g, *m, *v, *most, *master; /* most (amsgrad's maximum) and master may be NULL */
    const float *step;
    int64_t n;     /* elements */
    int32_t first; /* the tensor's first chunk, counted over the launch */
    bool vectors;  /* all pointers are multiples of 16 bytes */
};

struct Scalars {
    const float *lr, *scale, *clip, *found_inf;
    const int64_t *seed;
    int64_t seed_stride, first; /* first: index in the call's list of the table's first tensor */
    double rate, beta1, beta2, log_beta1, log_beta2, eps, decay;
    bool maximize;
    int32_t num;
};

template <int MOST> struct Params {
    Scalars s;
    Entry entry[MOST];
};
static_assert(sizeof(Params<FEW>) <= 4096 && sizeof(Params<MANY>) <= 32764,
              "what a kernel's parameters may take");

__device__ __forceinline__ float root(float x) { return sqrtf(x); }
__device__ __forceinline__ double root(double x) { return sqrt(x); }
__device__ __forceinline__ float exp_less_1(float x) { return expm1f(x); }
__device__ __forceinline__ double exp_less_1(double x) { return expm1(x); }

/* The factors of the update that all elements of a block share; other = 1 - beta, keep = 1 - lr
 * weight_decay, times = the factor of the gradient. */
template <class W> struct Step {
    W rate, inverse_root, beta1, beta2, other1, other2, keep, eps, times;
};

template <class W> __device__ __forceinline__ Step<W> step_of(const Scalars &s, const Entry &e) {
    Step<W> x;
    const W lr = s.lr ? W(*s.lr) : W(s.rate), step = W(*e.step);
    /* expm1 gives 1 - beta^step without cancellation */
    x.rate = lr / -exp_less_1(step * W(s.log_beta1));
    x.inverse_root = 1 / root(-exp_less_1(step * W(s.log_beta2)));
    x.beta1 = W(s.beta1);
    x.beta2 = W(s.beta2);
    x.other1 = W(1 - s.beta1);
    x.other2 = W(1 - s.beta2);
    x.keep = 1 - lr * W(s.decay);
    x.eps = W(s.eps);
    x.times = (s.clip ? W(*s.clip) : W(1)) / (s.scale ? W(*s.scale) : W(1));
    if (s.maximize) x.times = -x.times;
    return x;
}

/* Updates elements [at, at + V) of a tensor; `tensor` is its index in the call's list, which the
 * Philox counter of stochastic rounding contains. */
template <class T, class S, int V>
__device__ __forceinline__ void update(const Scalars &s, const Entry &e,
                                       const Step<typename element<S>::acc> &x, int64_t tensor,
                                       int64_t at) {
    typedef typename element<S>::acc W;
    typedef RowSome<T, V> Values;
    typedef RowSome<S, V> States;
    Values g = *(const Values *)((const T *)e.g + at), w;
    States m = *(const States *)((const S *)e.m + at), v = *(const States *)((const S *)e.v + at),
           most, master;
    if (e.master)
        master = *(const States *)((const S *)e.master + at);
    else
        w = *(const Values *)((const T *)e.w + at);
    if (e.most) most = *(const States *)((const S *)e.most + at);
    W y[V];
#pragma unroll
    for (int i = 0; i < V; ++i) {
        const W grad = x.times * W(to_acc(g.v[i]));
        const W first = x.beta1 * to_acc(m.v[i]) + x.other1 * grad;
        W second = x.beta2 * to_acc(v.v[i]) + x.other2 * (grad * grad);
        m.v[i] = from_acc<S>(first);
        v.v[i] = from_acc<S>(second);
        if (e.most) {
            const W before = to_acc(most.v[i]);
            second = before > second || before != before ? before : second;
            most.v[i] = from_acc<S>(second);
        }
        y[i] = x.keep * (e.master ? W(to_acc(master.v[i])) : W(to_acc(w.v[i])));
        y[i] -= x.rate * first / (root(second) * x.inverse_root + x.eps);
        if (e.master) master.v[i] = from_acc<S>(y[i]);
    }
    store_some((S *)e.m + at, m);
    store_some((S *)e.v + at, v);
    if (e.most) store_some((S *)e.most + at, most);
    if (e.master) store_some((S *)e.master + at, master);
    if constexpr (sizeof(T) == 2 && sizeof(S) == 4) {
        if (s.seed) { /* T is bfloat16 here: the check refuses a seed with float16 */
            const PhiloxSeed seed(s.seed, s.seed_stride);
            uint4 words;
#pragma unroll
            for (int i = 0; i < V; ++i) {
                if (i == 0 || V < 4) words = philox(seed, gk_adamw_counter(tensor, (at + i) / 4));
                uint32_t u = __float_as_uint(y[i]);
                const bool finite = (u & 0x7f800000u) != 0x7f800000u;
                if (finite)
                    u = (u + (philox_word(words, (int)((at + i) % 4)) & 0xffff)) & 0xffff0000u;
                y[i] = __uint_as_float(u);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < V; ++i) w.v[i] = from_acc<T>(y[i]);
    store_some((T *)e.w + at, w);
}

template <class T, class S, int MOST>
__global__ void __launch_bounds__(THREADS, 3) adamw_kernel(const __grid_constant__ Params<MOST> p) {
    typedef typename element<S>::acc W;
    constexpr int V = row_vec<S>;
    if (p.s.found_inf && *p.s.found_inf != 0) return;
    /* entry[low].first <= block < entry[high].first; of equal ones the last, which has chunks */
    int low = 0, high = p.s.num;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (p.entry[middle].first <= (int)blockIdx.x)
            low = middle;
        else
            high = middle;
    }
    const Entry &e = p.entry[low];
    const Step<W> x = step_of<W>(p.s, e);
    const int64_t tensor = p.s.first + low,
                  from = (int64_t)((int)blockIdx.x - e.first) * (THREADS * EACH * V);
    if (e.vectors) {
#pragma unroll 1
        for (int k = 0; k < EACH; ++k) {
            const int64_t at = from + (k * THREADS + (int)threadIdx.x) * V;
            if (at + V <= e.n) {
                update<T, S, V>(p.s, e, x, tensor, at);
            } else {
#pragma unroll 1
                for (int64_t i = at; i < e.n; ++i) update<T, S, 1>(p.s, e, x, tensor, i);
            }
        }
    } else {
        const int64_t end = from + THREADS * EACH * V < e.n ? from + THREADS * EACH * V : e.n;
#pragma unroll 1
        for (int64_t i = from + threadIdx.x; i < end; i += THREADS)
            update<T, S, 1>(p.s, e, x, tensor, i);
    }
}

template <class T> const T *scalar_at(const gk_tensor *t) {
    return t ? (const T *)t->data : nullptr;
}

Scalars scalars_of(const gk_adamw_args *a) {
    Scalars s = {};
    s.lr = scalar_at<float>(a->lr_tensor), s.scale = scalar_at<float>(a->grad_scale);
    s.clip = scalar_at<float>(a->clip), s.found_inf = scalar_at<float>(a->found_inf);
    s.seed = scalar_at<int64_t>(a->seed);
    s.seed_stride = a->seed ? a->seed->stride[0] : 0;
    s.rate = a->lr;
    s.beta1 = a->beta1;
    s.beta2 = a->beta2;
    s.eps = a->eps;
    s.decay = a->weight_decay;
    s.log_beta1 = log(a->beta1);
    s.log_beta2 = log(a->beta2);
    s.maximize = a->maximize != 0;
    return s;
}

Entry entry_of(const gk_adamw_args *a, int64_t t) {
    Entry e = {a->params[t].data,
               a->grads[t].data,
               a->exp_avgs[t].data,
               a->exp_avg_sqs[t].data,
               a->max_exp_avg_sqs ? a->max_exp_avg_sqs[t].data : nullptr,
               a->masters ? a->masters[t].data : nullptr,
               (const float *)a->steps[t].data,
               gk_numel(&a->params[t]),
               0,
               false};
    e.vectors = ((uintptr_t)e.w | (uintptr_t)e.g | (uintptr_t)e.m | (uintptr_t)e.v |
                 (uintptr_t)e.most | (uintptr_t)e.master) %
                    16 ==
                0;
    return e;
}

template <class S> int64_t chunks_of(int64_t n) {
    return gk_ceil_div(n, THREADS * EACH * row_vec<S>);
}

template <class T, class S, int MOST>
gk_status run_tables(const gk_context *ctx, const gk_adamw_args *a) {
    Params<MOST> p = {scalars_of(a)};
    int64_t chunks = 0;
    for (int64_t t = 0; t <= a->num; ++t) {
        const int64_t more = t < a->num ? chunks_of<S>(gk_numel(&a->params[t])) : 0;
        if (p.s.num == MOST || (p.s.num && (t == a->num || chunks + more > MOST_CHUNKS))) {
            const gk_status status =
                chunks == 0 ? GK_OK
                            : launch<adamw_kernel<T, S, MOST>>(
                                  "gk_adamw", ctx, dim3((unsigned)chunks), THREADS, 0, p);
            if (status != GK_OK) return status;
            p.s.num = 0;
            chunks = 0;
        }
        if (t == a->num) break;
        if (p.s.num == 0) p.s.first = t;
        /* An empty tensor has an entry without a chunk, because an entry's place in the table gives
         * the tensor's index in the list. */
        p.entry[p.s.num] = entry_of(a, t);
        p.entry[p.s.num++].first = (int32_t)chunks;
        chunks += more;
    }
    return GK_OK;
}

template <class T, class S> gk_status run_states(const gk_context *ctx, const gk_adamw_args *a) {
    return a->num <= FEW ? run_tables<T, S, FEW>(ctx, a) : run_tables<T, S, MANY>(ctx, a);
}

template <class T> gk_status run(const gk_context *ctx, const void *args, const gk_plan *, void *) {
    const gk_adamw_args *a = (const gk_adamw_args *)args;
    if constexpr (sizeof(T) == 2)
        if (a->exp_avgs[0].dtype == GK_F32) return run_states<T, float>(ctx, a);
    return run_states<T, T>(ctx, a);
}

bool plan(const gk_cuda_instance *, const gk_context *, const void *args, gk_plan *plan) {
    const gk_adamw_args *a = (const gk_adamw_args *)args;
    for (int64_t t = 0; t < a->num; ++t)
        plan->tasks +=
            gk_ceil_div(gk_numel(&a->params[t]),
                        THREADS * EACH * 16 / (int64_t)gk_dtype_bytes(a->exp_avgs[t].dtype));
    return true;
}

const gk_cuda_instance instances[] = {
    {"adamw_f32", GK_F32, plan, run<float>, {}, NULL},
    {"adamw_bf16", GK_BF16, plan, run<__nv_bfloat16>, {}, NULL},
    {"adamw_f16", GK_F16, plan, run<__half>, {}, NULL},
    {"adamw_f64", GK_F64, plan, run<double>, {}, NULL},
};

} // namespace

extern "C" const gk_cuda_table gk_adamw_table = {instances, 4, 80, NULL};
