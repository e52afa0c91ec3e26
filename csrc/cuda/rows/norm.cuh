// SPDX-License-Identifier: BSD-3-Clause
/* norm.cuh: RMSNorm and LayerNorm over rows in registers, forward and backward. The files that include it say for which groups
 * of threads they are compiled. Ba, Kiros and Hinton 2016, arXiv:1607.06450; Zhang and Sennrich 2019, arXiv:1910.07467.
 *
 *   h = x + residual, rounded to x's dtype;   xhat = (h - mean) rstd;   out = xhat w + b,   w = weight + weight_offset
 *   dx = rstd (g w - c1 - xhat c2) + grad_sum,   c1 = mean(g w) (layer alone),   c2 = mean(g w xhat)
 *   dweight = sum over rows of g xhat,   dbias = sum over rows of g
 *
 * Forward reads x and residual once and writes out and sum once. Backward reads g, h, grad_sum once and writes dx once; each
 * thread keeps its columns' dweight and dbias in registers over all rows of its block, and partial results of the blocks,
 * [blocks, 2, N] of workspace, are added in order by norm_sums.cuh. No atomics: the same bits each time. */
#ifndef GPUKERN_CUDA_ROWS_NORM_CUH
#define GPUKERN_CUDA_ROWS_NORM_CUH

#include "norm_sums.cuh"

struct NormParams {
    RowTensor x, residual, out, sum;
    const void *weight, *bias;          /* NULL: 1, 0 */
    int64_t weight_stride, bias_stride; /* 1 but for norm_walk.cu */
    bool weight_wide, bias_wide, layer;
    int64_t rows, n;
    double eps, weight_offset;
};

struct NormBwdParams {
    RowTensor grad_out, grad_sum, h, dx;
    const void *weight;
    void *sums, *stats; /* [blocks, 2, N]; norm_walk.cu: mean and rstd, [rows, 2] */
    int64_t weight_stride;
    bool weight_wide, layer;
    int64_t rows, n;
    double eps, weight_offset;
};

/* VEC values of a weight or bias from column `at` on. */
template <class T> struct NormVec {
    typedef typename element<T>::acc acc;
    acc v[row_vec<T>];
    __device__ __forceinline__ NormVec(const void *from, bool wide, int64_t at, acc more) {
        if (sizeof(T) < sizeof(acc) && wide) {
#pragma unroll
            for (int i = 0; i < row_vec<T>; i += 4) {
                const float4 x = *(const float4 *)((const float *)from + at + i);
                v[i] = x.x + more, v[i + 1] = x.y + more, v[(i + 2) % row_vec<T>] = x.z + more,
                v[(i + 3) % row_vec<T>] = x.w + more;
            }
        } else {
            RowVec<T> x;
            x.bits = *(const uint4 *)((const T *)from + at);
#pragma unroll
            for (int i = 0; i < row_vec<T>; ++i) v[i] = x.get(i) + more;
        }
    }
};

__device__ __forceinline__ float norm_rstd(float x) { return 1 / sqrtf(x); } /* rsqrtf errs by two units */
__device__ __forceinline__ double norm_rstd(double x) { return 1 / sqrt(x); }

/* ---- 1. forward -------------------------------------------------------------------------------------- */
/* The mean of a row (0 of rms) and 1 / sqrt(variance + eps). */
template <class Group, class T, class W>
__device__ __forceinline__ void norm_stats(Group &group, const RowVec<T> (&h)[Group::ITEMS], int n, bool layer, W eps,
                                           W &mean, W &rstd) {
    W s[1] = {0};
    mean = 0;
    if (layer) {
#pragma unroll
        for (int i = 0; i < Group::ITEMS; ++i)
#pragma unroll
            for (int v = 0; v < Group::VEC; ++v) s[0] += h[i].get(v);
        group.sum(s);
        mean = s[0] / W(n), s[0] = 0;
    }
#pragma unroll
    for (int i = 0; i < Group::ITEMS; ++i)
        if (group.column(i) < n)
#pragma unroll
            for (int v = 0; v < Group::VEC; ++v) {
                const W d = h[i].get(v) - mean;
                s[0] += d * d;
            }
    group.sum(s);
    rstd = norm_rstd(s[0] / W(n) + eps);
}

template <class T, int LANES, int ITEMS, int CLUSTER>
__global__ void __launch_bounds__(RowGroup<T, LANES, ITEMS, CLUSTER>::THREADS, 1) norm_fwd_kernel(NormParams p) {
    typedef RowGroup<T, LANES, ITEMS, CLUSTER> Group;
    typedef typename Group::acc W;
    __shared__ typename Group::Shared shared;
    Group group(shared);
    const int64_t row = group.first_row();
    const bool is_row = row < p.rows; /* lanes without one take part in the sums */
    const int n = (int)p.n;
    RowVec<T> h[ITEMS];
    group.load(h, is_row ? row_at<T>(p.x, row) : nullptr, n, is_row);
    if (p.residual.data) {
        RowVec<T> r[ITEMS];
        group.load(r, is_row ? row_at<T>(p.residual, row) : nullptr, n, is_row);
        T *sum = is_row ? row_at<T>(p.sum, row) : nullptr;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
#pragma unroll
            for (int v = 0; v < Group::VEC; ++v) h[i].set(v, h[i].get(v) + r[i].get(v));
            if (is_row && group.column(i) < n) group.store(sum, i, h[i]);
        }
    }
    W mean, rstd;
    norm_stats(group, h, n, p.layer, W(p.eps), mean, rstd);
    if (!is_row) return;
    T *out = row_at<T>(p.out, row);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int at = group.column(i);
        if (at >= n) continue;
        W y[Group::VEC];
#pragma unroll
        for (int v = 0; v < Group::VEC; ++v) y[v] = (h[i].get(v) - mean) * rstd;
        if (p.weight) {
            const NormVec<T> w(p.weight, p.weight_wide, at, W(p.weight_offset));
#pragma unroll
            for (int v = 0; v < Group::VEC; ++v) y[v] *= w.v[v];
        }
        if (p.bias) {
            const NormVec<T> b(p.bias, p.bias_wide, at, W(0));
#pragma unroll
            for (int v = 0; v < Group::VEC; ++v) y[v] += b.v[v];
        }
        RowVec<T> result;
#pragma unroll
        for (int v = 0; v < Group::VEC; ++v) result.set(v, y[v]);
        group.store(out, i, result);
    }
}

/* ---- 2. backward --------------------------------------------------------------------------------------- */
/* SUMS: 0 neither dweight nor dbias, 1 dweight, 2 both. */
template <class T, int LANES, int ITEMS, int CLUSTER, int SUMS>
__global__ void __launch_bounds__(RowGroup<T, LANES, ITEMS, CLUSTER>::THREADS, 1) norm_bwd_kernel(NormBwdParams p) {
    typedef RowGroup<T, LANES, ITEMS, CLUSTER> Group;
    typedef typename Group::acc W;
    constexpr int VEC = Group::VEC;
    __shared__ typename Group::Shared shared;
    Group group(shared);
    const int n = (int)p.n;
    W sums[SUMS ? SUMS : 1][ITEMS * VEC] = {};
    /* all rows of a block's share at once; those past the end take part in the sums with zeros */
    for (int64_t first = (int64_t)(blockIdx.x / CLUSTER) * Group::ROWS; first < p.rows; first += group.row_step()) {
        const int64_t row = first + threadIdx.x / LANES;
        const bool is_row = row < p.rows;
        RowVec<T> h[ITEMS], g[ITEMS];
        group.load(h, is_row ? row_at<T>(p.h, row) : nullptr, n, is_row);
        group.load(g, is_row ? row_at<T>(p.grad_out, row) : nullptr, n, is_row);
        W mean, rstd, c[2] = {0, 0};
        norm_stats(group, h, n, p.layer, W(p.eps), mean, rstd);
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int at = group.column(i);
            if (at >= n) continue;
            W gw[VEC];
#pragma unroll
            for (int v = 0; v < VEC; ++v) gw[v] = g[i].get(v);
            if (p.weight) {
                const NormVec<T> w(p.weight, p.weight_wide, at, W(p.weight_offset));
#pragma unroll
                for (int v = 0; v < VEC; ++v) gw[v] *= w.v[v];
            }
#pragma unroll
            for (int v = 0; v < VEC; ++v) c[0] += gw[v], c[1] += gw[v] * ((h[i].get(v) - mean) * rstd);
        }
        group.sum(c);
        const W c1 = p.layer ? c[0] / W(n) : W(0), c2 = c[1] / W(n);
        if (!is_row) continue;
        T *dx = row_at<T>(p.dx, row);
        const T *grad_sum = p.grad_sum.data ? row_at<T>(p.grad_sum, row) : nullptr;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int at = group.column(i);
            if (at >= n) continue;
            W y[VEC];
#pragma unroll
            for (int v = 0; v < VEC; ++v) {
                const W xhat = (h[i].get(v) - mean) * rstd;
                y[v] = g[i].get(v);
                if (SUMS > 0) sums[0][i * VEC + v] += y[v] * xhat;
                if (SUMS > 1) sums[SUMS - 1][i * VEC + v] += y[v];
            }
            if (p.weight) {
                const NormVec<T> w(p.weight, p.weight_wide, at, W(p.weight_offset));
#pragma unroll
                for (int v = 0; v < VEC; ++v) y[v] *= w.v[v];
            }
#pragma unroll
            for (int v = 0; v < VEC; ++v) y[v] = rstd * (y[v] - c1 - (h[i].get(v) - mean) * rstd * c2);
            if (grad_sum) {
                RowVec<T> more;
                more.bits = *(const uint4 *)(grad_sum + at);
#pragma unroll
                for (int v = 0; v < VEC; ++v) y[v] += more.get(v);
            }
            RowVec<T> result;
#pragma unroll
            for (int v = 0; v < VEC; ++v) result.set(v, y[v]);
            group.store(dx, i, result);
        }
    }
    if (SUMS == 0) return;
    W *partial = (W *)p.sums + (int64_t)(blockIdx.x / CLUSTER) * 2 * p.n;
    if (Group::ROWS == 1) {
#pragma unroll
        for (int s = 0; s < SUMS; ++s)
#pragma unroll
            for (int i = 0; i < ITEMS; ++i)
                if (group.column(i) < n)
#pragma unroll
                    for (int v = 0; v < VEC; ++v) partial[s * p.n + group.column(i) + v] = sums[s][i * VEC + v];
    } else {
        /* the block's rows one after the other, in shared memory */
        constexpr int COLUMNS = Group::ROWS == 1 ? 1 : Group::COLUMNS;
        __shared__ W all[SUMS ? SUMS : 1][COLUMNS];
        for (int r = 0; r < Group::ROWS; ++r) {
            if (threadIdx.x / LANES == r)
#pragma unroll
                for (int s = 0; s < SUMS; ++s)
#pragma unroll
                    for (int i = 0; i < ITEMS * VEC; ++i) {
                        W *at = &all[s][group.column(i / VEC) % COLUMNS + i % VEC];
                        *at = r ? *at + sums[s][i] : sums[s][i];
                    }
            __syncthreads();
        }
        for (int at = threadIdx.x; at < n; at += Group::THREADS)
#pragma unroll
            for (int s = 0; s < SUMS; ++s) partial[s * p.n + at] = all[s][at];
    }
}

/* ---- 3. plan and run ----------------------------------------------------------------------------------- */
inline bool norm_vector_fits(const gk_tensor *t) {
    return !t || (t->stride[0] == 1 && (uintptr_t)t->data % 16 == 0) || t->shape[0] == 0;
}

inline NormParams norm_params(const gk_norm_args *a) {
    NormParams p = {row_tensor(a->x), row_tensor(a->residual), row_tensor(a->out), row_tensor(a->sum)};
    if (a->weight)
        p.weight = a->weight->data, p.weight_stride = a->weight->stride[0],
        p.weight_wide = a->weight->dtype != a->x.dtype;
    if (a->bias) p.bias = a->bias->data, p.bias_stride = a->bias->stride[0], p.bias_wide = a->bias->dtype != a->x.dtype;
    p.layer = a->kind == GK_LAYER_NORM, p.rows = rows_of(a->x), p.n = a->x.shape[a->x.ndim - 1];
    p.eps = a->eps, p.weight_offset = a->weight_offset;
    return p;
}
inline NormBwdParams norm_params(const gk_norm_bwd_args *a) {
    NormBwdParams p = {row_tensor(a->grad_out), row_tensor(a->grad_sum), row_tensor(a->h), row_tensor(a->dx)};
    if (a->weight)
        p.weight = a->weight->data, p.weight_stride = a->weight->stride[0],
        p.weight_wide = a->weight->dtype != a->h.dtype;
    p.layer = a->kind == GK_LAYER_NORM, p.rows = rows_of(a->h), p.n = a->h.shape[a->h.ndim - 1];
    p.eps = a->eps, p.weight_offset = a->weight_offset;
    return p;
}

inline bool norm_fwd_plan(const gk_cuda_instance *row, const gk_context *, const void *args, gk_plan *plan) {
    const gk_norm_args *a = (const gk_norm_args *)args;
    if (!rows_fit(row, a->x, a->residual, &a->out, a->sum)) return false;
    if (!norm_vector_fits(a->weight) || !norm_vector_fits(a->bias)) return false;
    plan->tasks = gk_ceil_div(rows_of(a->x), row->key[1]);
    return true;
}

template <class T, int LANES, int ITEMS, int CLUSTER>
gk_status norm_fwd_run(const gk_context *ctx, const void *args, const gk_plan *plan, void *) {
    typedef RowGroup<T, LANES, ITEMS, CLUSTER> Group;
    return launch<norm_fwd_kernel<T, LANES, ITEMS, CLUSTER>>("gk_norm_fwd", ctx, dim3((unsigned)plan->tasks * CLUSTER),
                                                             Group::THREADS, 0, norm_params((const gk_norm_args *)args),
                                                             false, CLUSTER);
}

/* Whether a thread's registers hold g, h and both sums (key 5). Where they do not, dbias is norm_walk.cu's. */
#define GK_NORM_BOTH(LANES, ITEMS) ((LANES) * (ITEMS) < 512 * 4)

inline bool norm_bwd_plan(const gk_cuda_instance *row, const gk_context *ctx, const void *args, gk_plan *plan) {
    const gk_norm_bwd_args *a = (const gk_norm_bwd_args *)args;
    /* of clusters those with room for both sums come second: twice as many blocks have to agree on a row */
    if (a->dbias ? !row->key[5] : row->key[5] && row->key[2] > 1) return false;
    if (!rows_fit(row, a->h, &a->grad_out, a->grad_sum, &a->dx) || !norm_vector_fits(a->weight)) return false;
    const int64_t most = (int64_t)gk_gpu_of(ctx->index)->num_sms * row->key[4] / row->key[2];
    plan->tasks = gk_clamp_i64(gk_ceil_div(rows_of(a->h), row->key[1]), 1, most);
    plan->workspace_bytes = norm_sums_bytes(a, plan->tasks);
    return true;
}

template <class T, int LANES, int ITEMS, int CLUSTER>
gk_status norm_bwd_run(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    typedef RowGroup<T, LANES, ITEMS, CLUSTER> Group;
    const gk_norm_bwd_args *a = (const gk_norm_bwd_args *)args;
    NormBwdParams p = norm_params(a);
    p.sums = workspace;
    const dim3 grid((unsigned)plan->tasks * CLUSTER);
    const char *op = "gk_norm_bwd";
    gk_status status;
    if (GK_NORM_BOTH(LANES, ITEMS) && a->dbias)
        status = launch<norm_bwd_kernel<T, LANES, ITEMS, CLUSTER, GK_NORM_BOTH(LANES, ITEMS) ? 2 : 1>>(
            op, ctx, grid, Group::THREADS, 0, p, false, CLUSTER);
    else if (a->dweight)
        status =
            launch<norm_bwd_kernel<T, LANES, ITEMS, CLUSTER, 1>>(op, ctx, grid, Group::THREADS, 0, p, false, CLUSTER);
    else
        status =
            launch<norm_bwd_kernel<T, LANES, ITEMS, CLUSTER, 0>>(op, ctx, grid, Group::THREADS, 0, p, false, CLUSTER);
    return status == GK_OK ? norm_add_sums<typename Group::acc>(ctx, a, workspace, plan->tasks) : status;
}

#endif
