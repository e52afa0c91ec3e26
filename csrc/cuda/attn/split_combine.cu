/* SPDX-License-Identifier: BSD-3-Clause */
/* split_combine: merges attention over parts of the keys into attention over all of them
 * (Flash-Decoding; Dao et al. 2023). The forward kernels launch it after a call with split keys.
 *
 *  lse = log(e^sink + sum_s e^lse_s)      out = sum_s e^(lse_s - lse) out_s
 *
 * out_splits [splits][rows][head_dim_v], lse_splits [splits][rows] float32; out in its own dtype
 * and strides, lse [rows] float32. The parts are added in a fixed order, so results repeat bit for
 * bit. A part with lse -inf saw no key and is not read. A row that saw no key and has no sink gives
 * 0 and -inf. To accumulate, the old out and lse count as one more part.
 *
 * Work split: a warp owns a row, a block WARPS rows; a lane owns column pairs 2 lane, 2 lane + 64,
 * and so on. The kernel is bound by memory bandwidth. It does not serve float64. */
#include "../tile/convert.cuh"
#include "softmax.cuh"
#include "split_combine.cuh"

namespace {

/* Warps are independent, so any block size that fills an SM will do. */
constexpr int THREADS = 128, WARPS = THREADS / 32;
constexpr int PAIRS = 256 / 64; /* column pairs of a lane */

/* ---- 1. the kernel --------------------------------------------------------------------------- */
/* ONTO: the old out and lse count as one more part. */
template <class T, bool ONTO>
__global__ void __launch_bounds__(THREADS) split_combine_kernel(SplitCombine p) {
    const int lane = threadIdx.x % 32;
    const int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (row >= p.rows) return;
    const int z = (int)(row % p.size_z), y = (int)(row / p.size_z % p.size_y);
    const int64_t x = row / p.size_z / p.size_y;

    const float sink =
        p.sinks ? load_sink(p.sinks, p.sinks_dtype, y * p.sink_y + z * p.sink_z) : -INFINITY;
    RowSoftmax<ExpByTwo> all = {sink, 0};
    for (int s = 0; s < p.splits; ++s) all.peak = fmaxf(all.peak, p.lse_splits[s * p.rows + row]);
    float old_lse = -INFINITY;
    if (ONTO) {
        old_lse = p.lse[row];
        all.peak = fmaxf(all.peak, old_lse);
        __syncwarp(); /* all lanes have read old_lse before it is overwritten */
    }

    if (sink != -INFINITY) all.sum = all.weight(sink);
    float2 sum[PAIRS] = {};
    T *out = (T *)p.out + x * p.out_x + y * p.out_y + z * p.out_z;
    if (ONTO && old_lse != -INFINITY) {
        const float weight = all.join(old_lse, 1);
#pragma unroll
        for (int c = 0; c < PAIRS; ++c) {
            const int col = 2 * lane + 64 * c;
            if (col >= p.head_dim_v) break;
            sum[c] = make_float2(weight * to_acc(out[col]), weight * to_acc(out[col + 1]));
        }
    }
    /* The peak is not tested for -inf: fmaxf ignores NaN, so parts whose lse are all NaN leave it
     * at -inf. */
    for (int s = 0; s < p.splits; ++s) {
        const float lse = p.lse_splits[s * p.rows + row];
        if (lse == -INFINITY) continue;
        const float weight = all.join(lse, 1);
        const float2 *part = (const float2 *)(p.out_splits + (s * p.rows + row) * p.head_dim_v);
#pragma unroll
        for (int c = 0; c < PAIRS; ++c) {
            if (2 * lane + 64 * c >= p.head_dim_v) break;
            const float2 v = part[lane + 32 * c];
            sum[c].x = fmaf(weight, v.x, sum[c].x);
            sum[c].y = fmaf(weight, v.y, sum[c].y);
        }
    }

    const float total = all.sum, factor = total == 0 ? 0.f : 1 / total;
#pragma unroll
    for (int c = 0; c < PAIRS; ++c) {
        const int col = 2 * lane + 64 * c;
        if (col >= p.head_dim_v) break;
        out[col] = from_acc<T>(sum[c].x * factor);
        out[col + 1] = from_acc<T>(sum[c].y * factor);
    }
    if (lane == 0 && p.lse) p.lse[row] = total == 0 ? -INFINITY : all.peak + logf(total);
}

} // namespace

/* ---- 2. launcher ----------------------------------------------------------------------------- */
gk_status split_combine(const char *op, const gk_context *ctx, gk_dtype dtype,
                        const SplitCombine &p) {
    /* rows < 2^31, because the parts fit in the workspace */
    const dim3 grid((unsigned)gk_ceil_div(p.rows, WARPS));
    switch (dtype) {
    case GK_F32:
        return p.accumulates
                   ? launch<split_combine_kernel<float, true>>(op, ctx, grid, THREADS, 0, p)
                   : launch<split_combine_kernel<float, false>>(op, ctx, grid, THREADS, 0, p);
    case GK_BF16:
        return launch<split_combine_kernel<__nv_bfloat16, false>>(op, ctx, grid, THREADS, 0, p);
    case GK_F16: return launch<split_combine_kernel<__half, false>>(op, ctx, grid, THREADS, 0, p);
    default: return gk_no_case(op, dtype);
    }
}
