// SPDX-License-Identifier: BSD-3-Clause
/* kl_div.cuh: the divergence of each row of student's and teacher's logits, and its gradient by the
 * student's; gpukern_distill.h has the definition. kl_div.cu and kl_div_sm90a.cu instantiate the
 * kernel. With x, y the logits of student and teacher, c = log2(e) / temperature, and S, T their
 * distributions:
 *
 *   FORWARD (beta 0)  loss = sum T (y - x) / temperature - (lse_T - lse_S)    dz = S - T
 *   REVERSE (beta 1)  loss = E + (lse_T - lse_S),  E = sum S (x - y) / temperature
 *                     dz = S ((x - y) / temperature - E)
 *   MIXED             w = log2 T - log2 S,  u = log2 S - log2 M = -log2(1 - beta + beta 2^w)
 *                     loss = ln 2 (beta sum T (w + u) + (1 - beta) E),  E = sum S u
 *                     dz = (1 - beta) ln 2 S (u - E)
 *
 * dlogits = dz / temperature. logits, teacher_logits [M, V] and dlogits are float32, bfloat16,
 * float16 or float64; dlogits may have 16 bits beside float32 logits. loss [M] is float32, or
 * float64 beside float64.
 *
 * A block of 256 threads, or a cluster of up to 8, shares a row; each block has a contiguous part
 * of the columns. The first pass finds the maxima and, relative to a running maximum, the sums of a
 * row, and the mean of FORWARD and REVERSE (Milakov and Gimelshein 2018, arXiv:1805.02867). MIXED
 * takes a pass for its own sums. The last pass writes dlogits. A thread reads the same vectors in
 * every pass, so that it may keep them in shared memory (the first `kept` vectors of a part)
 * without a barrier, and dlogits may be the logits' own memory.
 *
 * p of a pass is 2^(x c - peak) / sum, where peak is rounded once: whatever its rounding error, it
 * is the same in all passes and cancels.
 *
 * Bound by reading both logits once and writing dlogits. */
#ifndef GPUKERN_CUDA_ROWS_KL_DIV_CUH
#define GPUKERN_CUDA_ROWS_KL_DIV_CUH

#include "gpukern_distill.h"
#include "../ptx/regs.cuh"
#include "row_block.cuh"

#include <float.h>

namespace kl_div {

/* Threads of a block, and blocks on an SM. A thread has 80 registers. While one block loads,
 * another computes. */
constexpr int THREADS = 256, BLOCKS = 3;
constexpr double LOG2_E = 1.4426950408889634074, LN_2 = 0.69314718055994530942;

enum Kind {
    FORWARD, /* beta 0 */
    REVERSE, /* beta 1 */
    MIXED
};

struct Params {
    RowTensor logits, teacher, mask, dlogits;
    void *loss;
    int64_t rows, n;
    int64_t part; /* vectors of a block */
    int kept;     /* vectors of a part in shared memory, of student and teacher each */
    double beta, scale;
};

/* vectors of each tensor that a thread loads from global memory before it computes */
constexpr int AHEAD = 4;

__device__ __forceinline__ float two_to(float x) { return ex2_approx_ftz(x); }
__device__ __forceinline__ double two_to(double x) { return exp2(x); }
__device__ __forceinline__ float log_2(float x) { return lg2_approx_ftz(x); }
__device__ __forceinline__ double log_2(double x) { return log2(x); }
__device__ __forceinline__ float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double rounded_product(double a, double b) { return __dmul_rn(a, b); }
/* w is clamped to [-MOST, MOST], the range of two_to; beyond it S or T is 0. If both logits are
 * -inf, w is NaN and becomes -MOST. */
template <class W> constexpr W MOST = sizeof(W) == 8 ? W(1000) : W(126);
__device__ __forceinline__ float clamped(float w) {
    return fminf(fmaxf(w, -MOST<float>), MOST<float>);
}
__device__ __forceinline__ double clamped(double w) {
    return fmin(fmax(w, -MOST<double>), MOST<double>);
}

template <class T> struct Pair;
template <> struct Pair<__nv_bfloat16> {
    typedef __nv_bfloat162 type;
};
template <> struct Pair<__half> {
    typedef __half2 type;
};

/* The statistics of some columns. Maxima are times c. Sums are of 2^(z - peak). mean is the sum of
 * the difference of the logits, weighted by T (FORWARD) or S (REVERSE). */
template <class W> struct Sums {
    W peak_s, peak_t, s, t, mean;
};

/* The factor that turns a sum relative to `peak` into one relative to `to`. peak is -inf if nothing
 * was summed. */
template <class W> __device__ __forceinline__ W rescale(W peak, W to) {
    return peak == -INFINITY ? W(0) : two_to(peak - to);
}
/* Rescales a mean of differences by that factor. A thread whose columns all have low logits may
 * have an infinite mean although its columns have no weight in the whole row; a factor of 0 then
 * gives 0. */
template <class W> __device__ __forceinline__ W rescaled_mean(W mean, W factor) {
    return factor == 0 ? W(0) : mean * factor;
}
/* A thread's peak: its largest logit times c. The product is clamped, because masked columns hold
 * the lowest number, whose product would be -inf. */
template <class W> __device__ __forceinline__ W peak_of(W top, W c) {
    const W peak = rounded_product(top, c), least = sizeof(W) == 8 ? W(-DBL_MAX) : W(-FLT_MAX);
    return top == -INFINITY ? W(0) : peak < least ? least : peak;
}

/* The largest of a vector's elements, with fmaxf's rule for NaN. 16-bit elements are compared in
 * pairs. If they were compared as floats, all of them would stay in registers until their
 * exponentials. */
template <class T, int V>
__device__ __forceinline__ typename element<T>::acc top_of(const RowSome<T, V> &v) {
    if constexpr (sizeof(T) == 2 && V == 8) {
        typedef typename Pair<T>::type Two;
        Two pairs[4];
        memcpy(pairs, &v, 16);
        const Two top = __hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3]));
        return fmaxf(to_acc(top.x), to_acc(top.y));
    } else {
        typename element<T>::acc top = to_acc(v.v[0]);
#pragma unroll
        for (int k = 1; k < V; ++k) top = lanes_max2(top, to_acc(v.v[k]));
        return top;
    }
}

template <class T, int V> struct Chunk {
    RowSome<T, V> x[AHEAD], y[AHEAD];
};

/* A thread's vectors of a block's part of a row. */
template <class T, int V> struct Part {
    const RowSome<T, V> *x, *y; /* in global memory */
    RowSome<T, V> *near_x, *near_y;
    int count, kept;

    /* True if vector u of the chunk that begins at `first` exists. */
    __device__ __forceinline__ bool has(int first, int u) const {
        return first + u * THREADS < count;
    }
    /* Loads a chunk from global memory. If it is one of the first `kept` vectors, stores it in
     * shared memory, too. */
    __device__ __forceinline__ void load(int first, Chunk<T, V> &to) const {
#pragma unroll
        for (int u = 0; u < AHEAD; ++u)
            if (has(first, u)) {
                to.x[u] = x[first + u * THREADS];
                to.y[u] = y[first + u * THREADS];
            }
        if (first >= kept) return;
#pragma unroll
        for (int u = 0; u < AHEAD; ++u)
            if (has(first, u)) {
                near_x[first + u * THREADS] = to.x[u];
                near_y[first + u * THREADS] = to.y[u];
            }
    }
    /* Loads vector i again, from shared memory or L2. */
    __device__ __forceinline__ void reload(int i, RowSome<T, V> &to_x, RowSome<T, V> &to_y) const {
        if (i < kept) {
            to_x = near_x[i];
            to_y = near_y[i];
        } else {
            to_x = x[i];
            to_y = y[i];
        }
    }
};

template <class T, int V, Kind KIND>
__device__ __forceinline__ Sums<typename element<T>::acc> first_pass(const Part<T, V> &part,
                                                                     typename element<T>::acc c) {
    typedef typename element<T>::acc W;
    W top_s = -INFINITY, top_t = -INFINITY;
    Sums<W> all = {-INFINITY, -INFINITY, 0, 0, 0};
#pragma unroll 1
    for (int first = threadIdx.x; first < part.count; first += AHEAD * THREADS) {
        Chunk<T, V> v;
        part.load(first, v);
#pragma unroll
        for (int u = 0; u < AHEAD; ++u)
            if (part.has(first, u)) {
                top_s = lanes_max2(top_s, top_of<T, V>(v.x[u]));
                top_t = lanes_max2(top_t, top_of<T, V>(v.y[u]));
            }
        const W peak_s = peak_of(top_s, c), peak_t = peak_of(top_t, c);
        const W old_s = rescale(all.peak_s, peak_s), old_t = rescale(all.peak_t, peak_t);
        all.peak_s = top_s == -INFINITY ? top_s : peak_s;
        all.peak_t = top_t == -INFINITY ? top_t : peak_t;
        all.s *= old_s;
        all.t *= old_t;
        all.mean = rescaled_mean(all.mean, KIND == FORWARD ? old_t : old_s);
#pragma unroll
        for (int u = 0; u < AHEAD; ++u)
            if (part.has(first, u))
#pragma unroll
                for (int k = 0; k < V; ++k) {
                    const W x = to_acc(v.x[u].v[k]), y = to_acc(v.y[u].v[k]);
                    const W s = two_to(fma(x, c, -peak_s)), t = two_to(fma(y, c, -peak_t));
                    all.s += s;
                    all.t += t;
                    /* a column of weight 0 adds nothing, also if a logit is -inf */
                    if constexpr (KIND == FORWARD) all.mean += t > 0 ? t * (y - x) : W(0);
                    if constexpr (KIND == REVERSE) all.mean += s > 0 ? s * (x - y) : W(0);
                }
    }
    return all;
}

/* The constants of a row that the passes after the first need. */
template <class W> struct Row {
    W peak_s, peak_t, inverse_s, inverse_t;
    W lse; /* log2 of the sums: T's less S's */
    W c, beta;

    __device__ __forceinline__ W s(W x) const { return two_to(fma(x, c, -peak_s)); }
    __device__ __forceinline__ W t(W y) const { return two_to(fma(y, c, -peak_t)); }
    /* w = log2 T - log2 S */
    __device__ __forceinline__ W ratio(W x, W y) const { return clamped(fma(y - x, c, -lse)); }
    /* u = log2 S - log2 M */
    __device__ __forceinline__ W middle(W w) const {
        return -log_2(fma(beta, two_to(w), W(1) - beta));
    }
};

/* Sums S u and T (w + u) over a thread's columns. Both are scaled by the row's sums of
 * exponentials. */
template <class T, int V>
__device__ __forceinline__ void mixed_pass(const Part<T, V> &part,
                                           const Row<typename element<T>::acc> &row,
                                           typename element<T>::acc (&sums)[2]) {
    typedef typename element<T>::acc W;
#pragma unroll 1
    for (int i = threadIdx.x; i < part.count; i += THREADS) {
        RowSome<T, V> vx, vy;
        part.reload(i, vx, vy);
#pragma unroll
        for (int k = 0; k < V; ++k) {
            const W x = to_acc(vx.v[k]), y = to_acc(vy.v[k]), w = row.ratio(x, y);
            const W u = row.middle(w);
            sums[0] += row.s(x) * u;
            sums[1] += row.t(y) * (w + u);
        }
    }
}

template <class T, class D, int V, Kind KIND>
__device__ __forceinline__ void
put_gradient(const Part<T, V> &part, const Row<typename element<T>::acc> &row,
             typename element<T>::acc scale, typename element<T>::acc mean, D *dx) {
    typedef typename element<T>::acc W;
    const W of_s = scale * row.inverse_s * (KIND == MIXED ? (1 - row.beta) * W(LN_2) : W(1));
    const W of_t = scale * row.inverse_t;
#pragma unroll 1
    for (int i = threadIdx.x; i < part.count; i += THREADS) {
        RowSome<T, V> vx, vy;
        RowSome<D, V> d;
        part.reload(i, vx, vy);
#pragma unroll
        for (int k = 0; k < V; ++k) {
            const W x = to_acc(vx.v[k]), y = to_acc(vy.v[k]), s = row.s(x);
            W g;
            if constexpr (KIND == FORWARD)
                g = fma(s, of_s, -(row.t(y) * of_t));
            else if constexpr (KIND == REVERSE)
                g = s == 0 ? W(0) : s * of_s * fma(x - y, scale, -mean);
            else
                g = s * of_s * (row.middle(row.ratio(x, y)) - mean);
            d.v[k] = from_acc<D>(g);
        }
        store_some(dx + (int64_t)i * V, d);
    }
}

/* Each cluster processes row blockIdx.x / CLUSTER and every grid-th row after it. */
template <class T, class D, int V, int CLUSTER, Kind KIND>
__global__ void __launch_bounds__(THREADS, sizeof(T) == 8 ? 1 : BLOCKS) kl_div_kernel(Params p) {
    typedef typename element<T>::acc W;
    typedef RowGroup<T, THREADS, 1, CLUSTER> Group;
    typedef RowSome<T, V> Vec;
    extern __shared__ __align__(16) unsigned char near[];
    __shared__ typename Group::Shared shared;
    Group group(shared);
    const W scale = W(p.scale), c = W(p.scale * LOG2_E);
    const int64_t begin = group.rank * p.part;
    for (int64_t at = blockIdx.x / CLUSTER; at < p.rows; at += gridDim.x / CLUSTER) {
        D *dx = p.dlogits.data ? row_at<D>(p.dlogits, at) + begin * V : nullptr;
        Part<T, V> part;
        part.count = (int)max(int64_t(0), min(p.part, p.n / V - begin));
        part.kept = p.kept;
        if (p.mask.data && *row_at<uint8_t>(p.mask, at) == 0) {
            if (group.rank == 0 && threadIdx.x == 0) ((W *)p.loss)[at] = 0;
            RowSome<D, V> zeros;
#pragma unroll
            for (int k = 0; k < V; ++k) zeros.v[k] = from_acc<D>(0);
            for (int i = threadIdx.x; dx && i < part.count; i += THREADS)
                store_some(dx + (int64_t)i * V, zeros);
            continue;
        }
        part.x = (const Vec *)row_at<T>(p.logits, at) + begin;
        part.y = (const Vec *)row_at<T>(p.teacher, at) + begin;
        part.near_x = (Vec *)near;
        part.near_y = part.near_x + p.kept;

        Sums<W> own = first_pass<T, V, KIND>(part, c);
        W peaks[2] = {own.peak_s, own.peak_t};
        group.peak(peaks);
        const W old_s = rescale(own.peak_s, peaks[0]), old_t = rescale(own.peak_t, peaks[1]);
        W sums[3] = {own.s * old_s, own.t * old_t,
                     rescaled_mean(own.mean, KIND == FORWARD ? old_t : old_s)};
        group.sum(sums);
        Row<W> row;
        row.peak_s = peaks[0];
        row.peak_t = peaks[1];
        row.inverse_s = 1 / sums[0];
        row.inverse_t = 1 / sums[1];
        row.lse = (peaks[1] - peaks[0]) + (log2(sums[1]) - log2(sums[0]));
        row.c = c;
        row.beta = W(p.beta);
        W mean = sums[2] * (scale * (KIND == FORWARD ? row.inverse_t : row.inverse_s));
        W loss = KIND == FORWARD ? mean - row.lse * W(LN_2) : mean + row.lse * W(LN_2);
        if constexpr (KIND == MIXED) {
            W of[2] = {0, 0};
            mixed_pass<T, V>(part, row, of);
            group.sum(of);
            mean = of[0] * row.inverse_s + of[1] * W(0); /* NaN if T has a NaN */
            loss = W(LN_2) * (row.beta * (of[1] * row.inverse_t) + (1 - row.beta) * mean);
        }
        if (group.rank == 0 && threadIdx.x == 0) ((W *)p.loss)[at] = loss;
        if (dx) put_gradient<T, D, V, KIND>(part, row, scale, mean, dx);
    }
}

inline Params params_of(const gk_kl_div_args *a) {
    Params p = {row_tensor(a->logits), row_tensor(a->teacher_logits), row_elements(a->mask),
                row_tensor(a->dlogits)};
    p.loss = a->loss.data;
    p.rows = num_rows(a->logits);
    p.n = a->logits.shape[a->logits.ndim - 1];
    p.beta = a->beta;
    p.scale = 1 / a->temperature;
    return p;
}

/* An instance of the kernel: the type of dlogits, and the kind. */
template <class D_, Kind KIND_> struct Case {
    typedef D_ D;
    static constexpr Kind KIND = KIND_;
};

/* Calls run(Case<D, KIND>()) for the dtype of dlogits and the beta; T is the logits' type. */
template <class D, class Run> gk_status of_kind(const gk_kl_div_args *a, const Run &run) {
    if (a->beta == 0) return run(Case<D, FORWARD>());
    if (a->beta == 1) return run(Case<D, REVERSE>());
    return run(Case<D, MIXED>());
}
template <class T, class Run> gk_status of_dtypes(const gk_kl_div_args *a, const Run &run) {
    if constexpr (sizeof(T) == 4) {
        const gk_dtype dtype = a->dlogits ? a->dlogits->dtype : GK_F32;
        if (dtype == GK_BF16) return of_kind<__nv_bfloat16>(a, run);
        if (dtype == GK_F16) return of_kind<__half>(a, run);
    }
    return of_kind<T>(a, run);
}

} // namespace kl_div

#endif
