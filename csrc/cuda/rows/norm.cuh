// SPDX-License-Identifier: BSD-3-Clause
/* norm.cuh: RMSNorm and LayerNorm over rows in registers, forward and backward. The files that
 * include it say for which groups of threads they are compiled. Ba, Kiros and Hinton 2016,
 * arXiv:1607.06450; Zhang and Sennrich 2019, arXiv:1910.07467.
 *
 *   h = x + residual, rounded to x's dtype;   xhat = (h - mean) rstd;   out = xhat w + b,   w = weight + weight_offset
 *   dx = rstd (g w - c1 - xhat c2) + grad_sum,   c1 = mean(g w) (layer alone),   c2 = mean(g w xhat)
 *   dweight = sum over rows of g xhat,   dbias = sum over rows of g
 *
 * Forward reads x and residual once and writes out and sum once. Backward reads g, h, grad_sum once
 * and writes dx once; g and h wait in shared memory, and each thread keeps its columns' dweight and
 * dbias in registers over all rows of its block, and partial results of the blocks, [blocks, 2, N]
 * of workspace, are added in order by norm_sums.cuh. No atomics: the same bits each time. */
#ifndef GPUKERN_CUDA_ROWS_NORM_CUH
#define GPUKERN_CUDA_ROWS_NORM_CUH

#include "../ptx/cp_async.cuh"
#include "clusters.cuh"
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
    bool weight_wide, layer, wants_weight, wants_bias;
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
                v[i] = x.x + more;
                v[i + 1] = x.y + more;
                v[(i + 2) % row_vec<T>] = x.z + more;
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

__device__ __forceinline__ float norm_rstd(float x) {
    return 1 / sqrtf(x);
} /* rsqrtf errs by two units */
__device__ __forceinline__ double norm_rstd(double x) { return 1 / sqrt(x); }

/* ---- 1. forward ------------------------------------------------------------------------------ */
/* The mean of a row (0 of rms) and 1 / sqrt(variance + eps). */
template <class Group, class T, class W>
__device__ __forceinline__ void norm_stats(Group &group, const RowVec<T> (&h)[Group::ITEMS], int n,
                                           bool layer, W eps, W &mean, W &rstd) {
    W s[1] = {0};
    mean = 0;
    if (layer) {
#pragma unroll
        for (int i = 0; i < Group::ITEMS; ++i)
#pragma unroll
            for (int v = 0; v < Group::VEC; ++v) s[0] += h[i].get(v);
        group.sum(s);
        mean = s[0] / W(n);
        s[0] = 0;
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

/* Two blocks of 512 threads an SM: one loads while the other stores. */
template <class T, int LANES, int ITEMS, int CLUSTER>
__global__ void __launch_bounds__(RowGroup<T, LANES, ITEMS, CLUSTER>::THREADS,
                                  LANES == 512 && ITEMS == 4 ? 2 : 1)
    norm_fwd_kernel(NormParams p) {
    typedef RowGroup<T, LANES, ITEMS, CLUSTER> Group;
    typedef typename Group::acc W;
    __shared__ typename Group::Shared shared;
    Group group(shared);
    const int64_t row = group.first_row();
    const bool is_row = row < p.rows; /* lanes without one take part in the sums */
    const int n = (int)p.n;
    RowVec<T> h[ITEMS];
    group.load(h, is_row ? row_at<T>(p.x, row) : nullptr, n, is_row);
    if (p.residual.data && is_row) {
        const T *residual = row_at<T>(p.residual, row);
        T *sum = row_at<T>(p.sum, row);
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (group.column(i) >= n) continue;
            RowVec<T> r;
            r.bits = *(const uint4 *)(residual + group.column(i));
#pragma unroll
            for (int v = 0; v < Group::VEC; ++v) h[i].set(v, h[i].get(v) + r.get(v));
            group.store(sum, i, h[i]);
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

/* ---- 2. backward ----------------------------------------------------------------------------- */
/* Two stages of shared memory, into which each thread copies its own vectors of g and h of the next
 * row while the block is at work on this one: nobody else reads them, so that no barrier is needed,
 * and a row takes no registers beside its sums. */
template <class Group> struct NormRing {
    typedef RowVec<typename Group::Element> Vec;
    static constexpr bool PIVOT = sizeof(typename Group::Element) == 2;
    static constexpr int STAGE_BYTES = (2 * Group::ITEMS + PIVOT) * Group::THREADS * 16,
                         BYTES = 2 * STAGE_BYTES;
    smem_addr mine;

    __device__ __forceinline__ explicit NormRing(const void *ring)
        : mine(cvta_to_shared(ring) + threadIdx.x * 16) {}
    __device__ __forceinline__ smem_addr at(int stage, int which, int i) const {
        return mine + stage * STAGE_BYTES + (which * Group::ITEMS + i) * Group::THREADS * 16;
    }
    /* g and h of a row, zeros past its end and where it is none. */
    __device__ __forceinline__ void fetch(const Group &group, const NormBwdParams &p, uint32_t row,
                                          int stage) const {
        typedef typename Group::Element T;
        const bool is_row = row < (uint32_t)p.rows;
        const T *g = row_at<T>(p.grad_out, is_row ? row : 0), *h = row_at<T>(p.h, is_row ? row : 0);
#pragma unroll
        for (int i = 0; i < Group::ITEMS; ++i) {
            const int column = group.column(i), bytes = is_row && column < p.n ? 16 : 0;
            const int from = bytes ? column : 0;
            cp_async_cg_16(at(stage, 0, i), g + from, bytes);
            cp_async_cg_16(at(stage, 1, i), h + from, bytes);
        }
        if (PIVOT && p.layer) {
            const int last = (int)p.n / Group::VEC - 1, mine = group.lane % 4;
            cp_async_cg_16(at(stage, 2, 0), h + (mine < last ? mine : last) * Group::VEC,
                           is_row ? 16 : 0);
        }
        cp_async_commit_group();
    }
    /* About what a LayerNorm's squares are summed, so that mean and variance come of one pass: the
     * mean of the row's first 32 values, four lanes of a warp having eight each. Its distance to
     * the row's mean is at most sqrt(n / 32) standard deviations, whatever stands there, so that
     * the variance loses a factor n / 32 of float32's precision at most: less than a 16-bit result
     * rounds. All threads of a row have the same bits of it. */
    __device__ __forceinline__ float pivot(int stage) const {
        const Vec x = get(stage, 2, 0);
        float sum = 0;
#pragma unroll
        for (int v = 0; v < Group::VEC; ++v) sum += (float)x.get(v);
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        return sum / (4 * Group::VEC);
    }
    __device__ __forceinline__ Vec get(int stage, int which, int i) const {
        Vec x;
        x.bits = ld_shared_128(at(stage, which, i));
        return x;
    }
};

/* Blocks that an SM should hold: what sums of two vectors a thread leave of its registers. */
constexpr int norm_bwd_blocks(int lanes, int items) {
    return items == 1 ? 8 : lanes <= 128 ? 4 : lanes == 256 ? (items == 2 ? 3 : 2) : 1;
}

/* A block's sums over its rows, [2][columns of a thread], to its part of the workspace. */
template <class Group, class W, int COUNT>
__device__ __forceinline__ void norm_store_sums(const Group &group, const NormBwdParams &p,
                                                const W (&sums)[2][COUNT]) {
    constexpr int VEC = Group::VEC, SUMS = 2;
    const int n = (int)p.n;
    W *partial = (W *)p.sums + (int64_t)(blockIdx.x / Group::CLUSTER) * 2 * p.n;
    if (Group::ROWS == 1) {
#pragma unroll
        for (int s = 0; s < SUMS; ++s) {
            if (!(s ? p.wants_bias : p.wants_weight)) continue;
#pragma unroll
            for (int i = 0; i < Group::ITEMS; ++i)
                if (group.column(i) < n)
#pragma unroll
                    for (int v = 0; v < VEC; ++v)
                        partial[s * p.n + group.column(i) + v] = sums[s][i * VEC + v];
        }
    } else {
        /* the block's rows one after the other, in shared memory */
        constexpr int COLUMNS = Group::ROWS == 1 ? 1 : Group::COLUMNS;
        __shared__ W all[SUMS][COLUMNS];
        for (int r = 0; r < Group::ROWS; ++r) {
            if (threadIdx.x / Group::LANES == r)
#pragma unroll
                for (int s = 0; s < SUMS; ++s)
#pragma unroll
                    for (int i = 0; i < Group::ITEMS * VEC; ++i) {
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

template <class T, int LANES, int ITEMS, int CLUSTER>
__global__ void __launch_bounds__(RowGroup<T, LANES, ITEMS, CLUSTER>::THREADS,
                                  norm_bwd_blocks(LANES, ITEMS)) norm_bwd_kernel(NormBwdParams p) {
    typedef RowGroup<T, LANES, ITEMS, CLUSTER> Group;
    typedef typename Group::acc W;
    constexpr int VEC = Group::VEC, SUMS = 2;
    /* a LayerNorm's four statistics in one exchange */
    constexpr bool AT_ONCE = NormRing<Group>::PIVOT;
    __shared__ typename Group::Shared shared;
    extern __shared__ uint4 norm_ring[];
    Group group(shared);
    const NormRing<Group> ring(norm_ring);
    const int n = (int)p.n;
    W sums[SUMS][ITEMS * VEC] = {};
    int stage = 0;
    /* all rows of a block's share at once; those past the end take part in the sums with zeros */
    const uint32_t own = Group::ROWS == 1 ? 0 : threadIdx.x / LANES, rows = (uint32_t)p.rows,
                   step = gridDim.x / CLUSTER * Group::ROWS;
    /* rows + step is below 2^32: norm_bwd_plan */
    uint32_t row = blockIdx.x / CLUSTER * Group::ROWS + own;
    ring.fetch(group, p, row, stage);
    for (; row - own < rows; row += step, stage ^= 1) {
        const bool is_row = row < rows;
        ring.fetch(group, p, row + step, stage ^ 1);
        cp_async_wait_group<1>();
        /* calls add(v, h, g w) for each of a vector's columns */
        auto each = [&](int i, auto add) {
            const auto g = ring.get(stage, 0, i), h = ring.get(stage, 1, i);
            W gw[VEC];
#pragma unroll
            for (int v = 0; v < VEC; ++v) gw[v] = g.get(v);
            if (p.weight) {
                const NormVec<T> w(p.weight, p.weight_wide, group.column(i), W(p.weight_offset));
#pragma unroll
                for (int v = 0; v < VEC; ++v) gw[v] *= w.v[v];
            }
#pragma unroll
            for (int v = 0; v < VEC; ++v) add(v, h.get(v), gw[v]);
        };
        W mean = 0, c1 = 0, var, cov; /* cov: mean(gw (h - mean)) */
        if (AT_ONCE && p.layer) {
            const W about = W(ring.pivot(stage));
            W s[4] = {0, 0, 0, 0};
#pragma unroll
            for (int i = 0; i < ITEMS; ++i)
                if (group.column(i) < n)
                    each(i, [&](int, W h, W gw) {
                        const W d = h - about;
                        s[0] += d;
                        s[1] += gw;
                        s[2] += d * d;
                        s[3] += gw * d;
                    });
            group.sum(s);
            const W off = s[0] / W(n);
            mean = about + off;
            c1 = s[1] / W(n);
            var = s[2] / W(n) - off * off;
            cov = s[3] / W(n) - off * c1;
            if (var < 0) var = 0;
        } else {
            W s[2] = {0, 0};
            if (p.layer) {
#pragma unroll
                for (int i = 0; i < ITEMS; ++i)
                    if (group.column(i) < n)
                        each(i, [&](int, W h, W gw) {
                            s[0] += h;
                            s[1] += gw;
                        });
                group.sum(s);
                mean = s[0] / W(n);
                c1 = s[1] / W(n);
                s[0] = s[1] = 0;
            }
#pragma unroll
            for (int i = 0; i < ITEMS; ++i)
                if (group.column(i) < n)
                    each(i, [&](int, W h, W gw) {
                        s[0] += (h - mean) * (h - mean);
                        s[1] += gw * (h - mean);
                    });
            group.sum(s);
            var = s[0] / W(n);
            cov = s[1] / W(n);
        }
        const W rstd = norm_rstd(var + W(p.eps)), c2 = rstd * cov;
        if (!is_row) continue;
        T *dx = row_at<T>(p.dx, row);
        const T *grad_sum = p.grad_sum.data ? row_at<T>(p.grad_sum, row) : nullptr;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int at = group.column(i);
            if (at >= n) continue;
            W y[VEC];
            const auto g = ring.get(stage, 0, i);
            each(i, [&](int v, W h, W gw) {
                const W xhat = (h - mean) * rstd;
                sums[0][i * VEC + v] += g.get(v) * xhat;
                sums[1][i * VEC + v] += g.get(v);
                y[v] = rstd * (gw - c1 - xhat * c2);
            });
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
    cp_async_wait_group<0>();
    if (!p.sums) return;
    norm_store_sums(group, p, sums);
}

/* ---- 3. plan and run ------------------------------------------------------------------------- */
inline bool norm_vector_fits(const gk_tensor *t) {
    return !t || (t->stride[0] == 1 && (uintptr_t)t->data % 16 == 0) || t->shape[0] == 0;
}

inline NormParams norm_params(const gk_norm_args *a) {
    NormParams p = {row_tensor(a->x), row_tensor(a->residual), row_tensor(a->out),
                    row_tensor(a->sum)};
    if (a->weight) {
        p.weight = a->weight->data;
        p.weight_stride = a->weight->stride[0];
        p.weight_wide = a->weight->dtype != a->x.dtype;
    }
    if (a->bias) {
        p.bias = a->bias->data;
        p.bias_stride = a->bias->stride[0];
        p.bias_wide = a->bias->dtype != a->x.dtype;
    }
    p.layer = a->kind == GK_LAYER_NORM;
    p.rows = num_rows(a->x);
    p.n = a->x.shape[a->x.ndim - 1];
    p.eps = a->eps;
    p.weight_offset = a->weight_offset;
    return p;
}
inline NormBwdParams norm_params(const gk_norm_bwd_args *a) {
    NormBwdParams p = {row_tensor(a->grad_out), row_tensor(a->grad_sum), row_tensor(a->h),
                       row_tensor(a->dx)};
    if (a->weight) {
        p.weight = a->weight->data;
        p.weight_stride = a->weight->stride[0];
        p.weight_wide = a->weight->dtype != a->h.dtype;
    }
    p.wants_weight = a->dweight != nullptr;
    p.wants_bias = a->dbias != nullptr;
    p.layer = a->kind == GK_LAYER_NORM;
    p.rows = num_rows(a->h);
    p.n = a->h.shape[a->h.ndim - 1];
    p.eps = a->eps;
    p.weight_offset = a->weight_offset;
    return p;
}

inline bool norm_fwd_plan(const gk_cuda_instance *row, const gk_context *, const void *args,
                          gk_plan *plan) {
    const gk_norm_args *a = (const gk_norm_args *)args;
    if (!rows_fit(row, a->x, a->residual, &a->out, a->sum)) return false;
    if (!norm_vector_fits(a->weight) || !norm_vector_fits(a->bias)) return false;
    plan->tasks = gk_ceil_div(num_rows(a->x), row->key[1]);
    return true;
}

template <class T, int LANES, int ITEMS, int CLUSTER>
gk_status norm_fwd_run(const gk_context *ctx, const void *args, const gk_plan *plan, void *) {
    typedef RowGroup<T, LANES, ITEMS, CLUSTER> Group;
    return launch<norm_fwd_kernel<T, LANES, ITEMS, CLUSTER>>(
        "gk_norm_fwd", ctx, dim3((unsigned)plan->tasks * CLUSTER), Group::THREADS, 0,
        norm_params((const gk_norm_args *)args), false, CLUSTER);
}

template <class T, int LANES, int ITEMS, int CLUSTER>
bool norm_bwd_plan(const gk_cuda_instance *row, const gk_context *ctx, const void *args,
                   gk_plan *plan) {
    typedef RowGroup<T, LANES, ITEMS, CLUSTER> Group;
    const gk_norm_bwd_args *a = (const gk_norm_bwd_args *)args;
    if (!rows_fit(row, a->h, &a->grad_out, a->grad_sum, &a->dx) || !norm_vector_fits(a->weight))
        return false;
    if (num_rows(a->h) > INT32_MAX ||
        !smem_fits(ctx, NormRing<Group>::BYTES + (int)sizeof(typename Group::Shared)))
        return false;
    int64_t most = (int64_t)gk_gpu_of(ctx->index)->num_sms * norm_bwd_blocks(LANES, ITEMS);
    if constexpr (CLUSTER > 1)
        most = clusters_at_once<norm_bwd_kernel<T, LANES, ITEMS, CLUSTER>>(
            ctx, Group::THREADS, NormRing<Group>::BYTES, CLUSTER);
    plan->tasks = gk_clamp_i64(gk_ceil_div(num_rows(a->h), row->key[1]), 1, most);
    plan->workspace_bytes = norm_sums_bytes(a, plan->tasks);
    return true;
}

template <class T, int LANES, int ITEMS, int CLUSTER>
gk_status norm_bwd_run(const gk_context *ctx, const void *args, const gk_plan *plan,
                       void *workspace) {
    typedef RowGroup<T, LANES, ITEMS, CLUSTER> Group;
    const gk_norm_bwd_args *a = (const gk_norm_bwd_args *)args;
    NormBwdParams p = norm_params(a);
    p.sums = a->dweight || a->dbias ? workspace : nullptr;
    const gk_status status = launch<norm_bwd_kernel<T, LANES, ITEMS, CLUSTER>>(
        "gk_norm_bwd", ctx, dim3((unsigned)plan->tasks * CLUSTER), Group::THREADS,
        NormRing<Group>::BYTES, p, false, CLUSTER);
    return status == GK_OK ? norm_add_sums<typename Group::acc>(ctx, a, workspace, plan->tasks)
                           : status;
}

#endif
