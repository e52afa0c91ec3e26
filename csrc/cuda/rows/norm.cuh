// SPDX-License-Identifier: BSD-3-Clause
/* norm.cuh: RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) and LayerNorm (Ba, Kiros and Hinton
 * 2016, arXiv:1607.06450) over rows in registers, forward and backward:
 *
 *   h = x + residual, rounded to x's dtype
 *   xhat = (h - mean) rstd;   out = xhat w + b,   w = weight + weight_offset
 *   dx = rstd (g w - c1 - xhat c2) + grad_sum,
 *        with c1 = mean(g w) for LayerNorm, 0 for RMSNorm,   c2 = mean(g w xhat)
 *   dweight = sum over rows of g xhat,   dbias = sum over rows of g
 *
 * RMSNorm has mean = 0. norm_fwd.cu, norm_bwd.cu and norm_sm90a.cu instantiate these kernels, with
 * one block or one cluster per row. norm_looped.cu has its own kernels, for rows that these refuse.
 *
 * Forward: a group of threads (row_block.cuh) owns a row. It reads x and residual once, and writes
 * out and sum (the h above) once. Plain rows, the most frequent case, have a kernel that takes
 * fewer registers.
 *
 * Backward: blocks are persistent, and each processes every grid-th row. While a block processes a
 * row, it copies g and h of its next row to shared memory. g, h and grad_sum are read once, and dx
 * is written once. Each thread keeps dweight and dbias of its columns in registers over all its
 * rows. At the end every block writes its partial sums to the workspace [blocks, 2, N], and
 * norm_sums.cu adds them in order. There are no atomics, so results have the same bits each time.
 *
 * Refused: rows that are not whole 16-byte vectors at multiples of 16 bytes, float64, weights and
 * biases that cannot be loaded as 16-byte vectors, and rows longer than the registers of the group.
 */
#ifndef GPUKERN_CUDA_ROWS_NORM_CUH
#define GPUKERN_CUDA_ROWS_NORM_CUH

#include "../ptx/cp_async.cuh"
#include "../ptx/prefetch_l2.cuh"
#include "../tile/begins.cuh"
#include "clusters.cuh"
#include "norm_sums.cuh"

struct NormParams {
    RowTensor x, residual, out, sum;
    const void *weight, *bias;          /* NULL: weight is 1, bias is 0 */
    int64_t weight_stride, bias_stride; /* other than 1 only in norm_looped.cu */
    bool weight_wide, bias_wide, layer; /* wide: float32 beside 16-bit x; layer: LayerNorm */
    int64_t rows, n;
    double eps, weight_offset;
};

struct NormBwdParams {
    RowTensor grad_out, grad_sum, h, dx;
    const void *weight;
    void *sums, *stats; /* partial sums [blocks, 2, N]; norm_looped.cu: mean and rstd [rows, 2] */
    int64_t weight_stride;
    bool weight_wide, layer, wants_weight, wants_bias;
    int64_t rows, n;
    double eps, weight_offset;
};

/* A vector's values of a weight or bias, from column `at` on, each plus `more`. */
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

/* 1 / sqrtf instead of rsqrtf, which may be off by 2 ulp */
__device__ __forceinline__ float norm_rstd(float x) { return 1 / sqrtf(x); }
__device__ __forceinline__ double norm_rstd(double x) { return 1 / sqrt(x); }

/* ---- 1. forward ------------------------------------------------------------------------------ */
/* A row's mean (0 for RMSNorm) and 1 / sqrt(variance + eps), in two passes over registers. */
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

/* With 512 threads of 4 vectors, registers are limited so that an SM holds two blocks: one loads
 * while the other stores. */
template <class T, int LANES, int ITEMS, int CLUSTER, class Begins>
__global__ void __launch_bounds__(RowGroup<T, LANES, ITEMS, CLUSTER>::THREADS,
                                  LANES == 512 && ITEMS == 4 ? 2 : 1)
    norm_fwd_kernel(NormParams p) {
    typedef RowGroup<T, LANES, ITEMS, CLUSTER> Group;
    typedef typename Group::acc W;
    /* Vectors whose loads a thread has in flight at the same time. With a small M, latency bounds
     * the kernel. With a large M, the registers are needed for more blocks. */
    constexpr int AT_ONCE = Begins::overlaps && ITEMS <= 2 ? ITEMS : 1;
    __shared__ typename Group::Shared shared;
    Group group(shared);
    if (Begins::overlaps && p.weight && threadIdx.x % 8 == 0) {
        /* Prefetch the weight now. Its latency would otherwise follow that of the reduction. */
        const int bytes = p.weight_wide ? 4 : (int)sizeof(T);
#pragma unroll
        for (int i = 0; i < ITEMS; ++i)
            if (group.column(i) < p.n)
                prefetch_l2((const char *)p.weight + (int64_t)group.column(i) * bytes);
    }
    Begins::begin();
    const int64_t row = group.first_row();
    const bool is_row = row < p.rows; /* lanes without a row take part in the reductions */
    const int n = (int)p.n;
    RowVec<T> h[ITEMS];
    group.load(h, is_row ? row_at<T>(p.x, row) : nullptr, n, is_row);
    if (p.residual.data && is_row) {
        const T *residual = row_at<T>(p.residual, row);
        T *sum = row_at<T>(p.sum, row);
#pragma unroll
        for (int begin = 0; begin < ITEMS; begin += AT_ONCE) {
            RowVec<T> r[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
                if (group.column(begin + i) < n)
                    r[i].bits = *(const uint4 *)(residual + group.column(begin + i));
#pragma unroll
            for (int i = begin; i < begin + AT_ONCE; ++i) {
                if (group.column(i) >= n) continue;
#pragma unroll
                for (int v = 0; v < Group::VEC; ++v) h[i].set(v, h[i].get(v) + r[i - begin].get(v));
                group.store(sum, i, h[i]);
            }
        }
    }
    RowVec<T> weight[ITEMS];
    const bool has_weight = AT_ONCE > 1 && p.weight && !p.weight_wide && is_row;
    if (has_weight)
#pragma unroll
        for (int i = 0; i < ITEMS; ++i)
            if (group.column(i) < n)
                weight[i].bits = *(const uint4 *)((const T *)p.weight + group.column(i));
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
        if (has_weight) {
#pragma unroll
            for (int v = 0; v < Group::VEC; ++v) y[v] *= weight[i].get(v) + W(p.weight_offset);
        } else if (p.weight) {
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

/* ---- 2. forward of plain rows ---------------------------------------------------------------- */
/* A call has plain rows if its tensors have 16 bits, the rows of x and of out have a single stride
 * (row_in), there is no residual, and weight and bias have x's dtype. The kernel needs so few
 * registers that an SM has three or four rows in flight, or six blocks of clusters (measured:
 * rms_norm 4096 x 8192 took 37.8 us instead of 51.4, H200). */
template <class T, int LANES, int ITEMS, int CLUSTER>
constexpr bool NORM_PLAIN =
    sizeof(T) == 2 && LANES >= 128 && ITEMS <= 4 && (CLUSTER == 1 ? LANES <= 512 : LANES == 256);
/* Threads on an SM, for __launch_bounds__. With up to 2 vectors a thread has 32 registers. With 4
 * vectors, which take 16 registers, it has 40. */
constexpr int norm_plain_threads(int items) { return items <= 2 ? ROW_SM_THREADS : 1536; }

struct NormPlainParams {
    const void *x, *weight, *bias; /* NULL: weight is 1, bias is 0 */
    void *out;
    int64_t x_stride, out_stride; /* of rows, in elements */
    int n;
    float eps, weight_offset;
};

__device__ __forceinline__ uint32_t norm_word(const uint4 &x, int k) {
    return k == 0 ? x.x : k == 1 ? x.y : k == 2 ? x.z : x.w;
}

/* Returns the pivot, a value near the row's mean: the mean of the row's first 32 values. Four lanes
 * load eight values each.
 *
 * In a cluster, LayerNorm sums h - pivot and (h - pivot)^2. This gives mean and variance after one
 * exchange (measured: 1024 x 65536 takes 76.3 us instead of 80.8, H200). In one block two
 * reductions are as fast (8192 x 4096: 34.8 us instead of 35.7). NormRing::pivot says why a pivot
 * loses no digits of a 16-bit result. */
template <class T> __device__ __forceinline__ float norm_pivot(const uint4 &first) {
    float sum = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const float2 h = unpack2<T>(norm_word(first, k));
        sum += h.x + h.y;
    }
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    return sum * (1.f / 32);
}

/* Values stay in 32-bit words of two. If they were separate 16-bit values, the compiler would keep
 * each in its own register, and spill. */
template <class T, int LANES, int ITEMS, int CLUSTER, bool LAYER, class Begins>
__global__ void __launch_bounds__(LANES, norm_plain_threads(ITEMS) / LANES)
    norm_plain_kernel(NormPlainParams p) {
    typedef RowGroup<T, LANES, ITEMS, CLUSTER> Group;
    constexpr bool PIVOT = LAYER && CLUSTER > 1;
    __shared__ typename Group::Shared shared;
    Group group(shared);
    Begins::begin();
    const int n = p.n;
    const T *x = (const T *)p.x + blockIdx.x / CLUSTER * p.x_stride;
    uint4 h[ITEMS], first;
    /* Load the pivot's values before any result is stored, because out may be x. The reduction
     * below orders the loads before all stores. */
    if constexpr (PIVOT)
        first = *(const uint4 *)(x + min((int)threadIdx.x % 4 * Group::VEC, n - Group::VEC));
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        h[i] = make_uint4(0, 0, 0, 0);
        if (group.column(i) < n) h[i] = *(const uint4 *)(x + group.column(i));
    }
    const float each = 1.f / (float)n;
    float about = 0;
    if constexpr (PIVOT) {
        about = norm_pivot<T>(first);
    } else if constexpr (LAYER) {
        float sum[1] = {0};
#pragma unroll
        for (int i = 0; i < ITEMS; ++i)
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float2 v = unpack2<T>(norm_word(h[i], k));
                sum[0] += v.x;
                sum[0] += v.y;
            }
        group.sum(sum);
        about = sum[0] * each;
        /* Correct the product to the rounded quotient sum / n, so that the mean of equal values is
         * exactly that value. A division would call a function, for which there are no registers.
         */
        about = fmaf(fmaf(-about, (float)n, sum[0]), each, about);
    }
    float s[PIVOT ? 2 : 1] = {}; /* sum of squares; with a pivot also sum of differences */
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (group.column(i) < n)
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float2 v = unpack2<T>(norm_word(h[i], k));
                const float a = v.x - about, b = v.y - about;
                s[0] = fmaf(a, a, s[0]);
                s[0] = fmaf(b, b, s[0]);
                if constexpr (PIVOT) s[1] += a + b;
            }
    group.sum(s);
    float mean = about, var = s[0] * each;
    if constexpr (PIVOT) {
        const float off = s[1] * each;
        mean = about + off;
        var -= off * off;
        if (var < 0) var = 0; /* NaN stays */
    }
    const float rstd = norm_rstd(var + p.eps);
    T *out = (T *)p.out + blockIdx.x / CLUSTER * p.out_stride;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int at = group.column(i);
        if (at >= n) continue;
        uint4 w, b;
        if (p.weight) w = *(const uint4 *)((const T *)p.weight + at);
        if (p.bias) b = *(const uint4 *)((const T *)p.bias + at);
        uint32_t y[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            float2 v = unpack2<T>(norm_word(h[i], k));
            v.x = (v.x - mean) * rstd;
            v.y = (v.y - mean) * rstd;
            if (p.weight) {
                const float2 by = unpack2<T>(norm_word(w, k));
                v.x *= by.x + p.weight_offset;
                v.y *= by.y + p.weight_offset;
            }
            if (p.bias) {
                const float2 more = unpack2<T>(norm_word(b, k));
                v.x += more.x;
                v.y += more.y;
            }
            y[k] = pack2<T>(v.x, v.y);
        }
        st_global_128(out + at, make_uint4(y[0], y[1], y[2], y[3]));
    }
}

/* ---- 3. backward ----------------------------------------------------------------------------- */
/* The ring of backward: two stages in shared memory. While the block processes a row, each thread
 * copies its own vectors of the next row's g and h into the other stage. A thread reads only what
 * it copied itself, so no barrier is needed. g and h then occupy no registers, which the sums of
 * dweight and dbias need.
 *
 * A stage: [g items][h items][pivot vector, 16-bit types only], each of THREADS x 16 bytes. */
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
    /* Starts the copies of a row's g and h into a stage. Columns beyond the row's end become zeros,
     * and all of them if row >= p.rows. For 16-bit types each thread also copies one of the row's
     * first four vectors, for pivot(). */
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
    /* Returns the pivot, a value near the row's mean: the mean of the row's first 32 values, of
     * which each of four lanes has eight. All threads of a row get the same bits.
     *
     * LayerNorm sums h - pivot and (h - pivot)^2, which gives mean and variance in one pass. For
     * any values, the pivot is at most sqrt(n / 32) standard deviations from the mean. So the
     * variance loses at most a factor n / 32 of float32's precision, which is less than the
     * rounding of a 16-bit result. */
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

/* Blocks per SM that __launch_bounds__ asks for. Registers limit them: a thread keeps two sums for
 * each of its columns. */
constexpr int norm_bwd_blocks(int lanes, int items) {
    return items == 1 ? 8 : lanes <= 128 ? 4 : lanes == 256 ? (items == 2 ? 3 : 2) : 1;
}

/* Stores a block's sums over its rows to its part [2, N] of the workspace. `sums` has a thread's
 * columns: [0] dweight, [1] dbias. */
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
        /* Several groups of the block own the same columns. Add their sums in shared memory, in
         * order. */
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
    /* 16-bit LayerNorm reduces its four statistics together */
    constexpr bool AT_ONCE = NormRing<Group>::PIVOT;
    __shared__ typename Group::Shared shared;
    extern __shared__ uint4 norm_ring[];
    Group group(shared);
    const NormRing<Group> ring(norm_ring);
    const int n = (int)p.n;
    W sums[SUMS][ITEMS * VEC] = {};
    int stage = 0;
    /* All groups of a block loop equally often; rows beyond the end are zeros in the reductions. */
    const uint32_t own = Group::ROWS == 1 ? 0 : threadIdx.x / LANES, rows = (uint32_t)p.rows,
                   step = gridDim.x / CLUSTER * Group::ROWS;
    /* rows + step is below 2^32, since norm_bwd_plan refuses more than 2^31 - 1 rows */
    uint32_t row = blockIdx.x / CLUSTER * Group::ROWS + own;
    ring.fetch(group, p, row, stage);
    for (; row - own < rows; row += step, stage ^= 1) {
        const bool is_row = row < rows;
        ring.fetch(group, p, row + step, stage ^ 1);
        cp_async_wait_group<1>();
        /* Calls add(v, h, g w) for each value v of vector i. */
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
            /* one store of 16 bytes would spill, at 80 registers */
            *(uint4 *)(dx + group.column(i)) = result.bits;
        }
    }
    cp_async_wait_group<0>();
    if (!p.sums) return;
    norm_store_sums(group, p, sums);
}

/* ---- 4. plan and run ------------------------------------------------------------------------- */
/* A weight or bias that the kernels can load as 16-byte vectors. */
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

inline bool norm_fwd_plan(const gk_cuda_instance *instance, const gk_context *, const void *args,
                          gk_plan *plan) {
    const gk_norm_args *a = (const gk_norm_args *)args;
    if (!rows_fit(instance, a->x, a->residual, &a->out, a->sum)) return false;
    if (!norm_vector_fits(a->weight) || !norm_vector_fits(a->bias)) return false;
    plan->tasks = gk_ceil_div(num_rows(a->x), instance->key[RowKey::ROWS]);
    return true;
}

/* True if the call has plain rows, apart from the compile-time condition NORM_PLAIN. */
inline bool norm_is_plain(const NormParams &p) {
    return p.n > 0 && p.x.ndim == 1 && p.out.ndim == 1 && !p.residual.data && !p.weight_wide &&
           !p.bias_wide;
}

/* Below this M, as in decoding, latency bounds the kernel. norm_fwd_kernel then prefetches the
 * weight before the reduction. */
constexpr int NORM_SMALL_M = 512;

template <class T, int LANES, int ITEMS, int CLUSTER, bool LAYER, class Begins>
gk_status norm_plain_run(const gk_context *ctx, dim3 grid, const NormParams &p) {
    const NormPlainParams plain = {p.x.data,   p.weight,      p.bias,
                                   p.out.data, p.x.stride[0], p.out.stride[0],
                                   (int)p.n,   (float)p.eps,  (float)p.weight_offset};
    return launch<norm_plain_kernel<T, LANES, ITEMS, CLUSTER, LAYER, Begins>>(
        "gk_norm_fwd", ctx, grid, LANES, 0, plain, Begins::overlaps, CLUSTER);
}

template <class T, int LANES, int ITEMS, int CLUSTER, class Begins = BeginsAlone>
gk_status norm_fwd_run(const gk_context *ctx, const void *args, const gk_plan *plan, void *) {
    constexpr int THREADS = RowGroup<T, LANES, ITEMS, CLUSTER>::THREADS;
    const NormParams p = norm_params((const gk_norm_args *)args);
    const dim3 grid((unsigned)plan->tasks * CLUSTER);
    if constexpr (NORM_PLAIN<T, LANES, ITEMS, CLUSTER>)
        if (norm_is_plain(p) && !(Begins::overlaps && p.rows <= NORM_SMALL_M))
            return p.layer ? norm_plain_run<T, LANES, ITEMS, CLUSTER, true, Begins>(ctx, grid, p)
                           : norm_plain_run<T, LANES, ITEMS, CLUSTER, false, Begins>(ctx, grid, p);
    return launch<norm_fwd_kernel<T, LANES, ITEMS, CLUSTER, Begins>>(
        "gk_norm_fwd", ctx, grid, THREADS, 0, p, Begins::overlaps, CLUSTER);
}

template <class T, int LANES, int ITEMS, int CLUSTER>
bool norm_bwd_plan(const gk_cuda_instance *instance, const gk_context *ctx, const void *args,
                   gk_plan *plan) {
    typedef RowGroup<T, LANES, ITEMS, CLUSTER> Group;
    const gk_norm_bwd_args *a = (const gk_norm_bwd_args *)args;
    if (!rows_fit(instance, a->h, &a->grad_out, a->grad_sum, &a->dx) ||
        !norm_vector_fits(a->weight))
        return false;
    if (num_rows(a->h) > INT32_MAX ||
        !smem_fits(ctx, NormRing<Group>::BYTES + (int)sizeof(typename Group::Shared)))
        return false;
    int64_t most = (int64_t)gk_gpu_of(ctx->index)->num_sms * norm_bwd_blocks(LANES, ITEMS);
    if constexpr (CLUSTER > 1)
        most = clusters_at_once<norm_bwd_kernel<T, LANES, ITEMS, CLUSTER>>(
            ctx, Group::THREADS, NormRing<Group>::BYTES, CLUSTER);
    plan->tasks = gk_clamp_i64(gk_ceil_div(num_rows(a->h), instance->key[RowKey::ROWS]), 1, most);
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
