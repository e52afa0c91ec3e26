/* SPDX-License-Identifier: BSD-3-Clause */
/* grouped_one_sum.cuh: the Kind of grouped.cuh for K-major groups of rows of 8 bits whose sums over
 * all of k stay in WGMMA's accumulators: int8, whose sums are exact, and the fast mode of e4m3. One
 * step is in flight while the next is issued. Scales of rows and columns are applied in the
 * epilogue. E: an element, D: a sum. */
#ifndef GPUKERN_CUDA_PRODUCT_GROUPED_ONE_SUM_CUH
#define GPUKERN_CUDA_PRODUCT_GROUPED_ONE_SUM_CUH

#include "../ptx/wgmma_8bit.cuh"
#include "grouped.cuh"

namespace {

template <class E, class D> struct OneSum : GroupedTile<1, false, false> {
    typedef tma_ring<STAGES> Ring;

    static __device__ __forceinline__ void prepare(const GroupedParams &p, const Work<OneSum> &x,
                                                   int col0, float *scales) {
        read_column_scales(p, x, col0, scales);
    }

    static __device__ __forceinline__ void issue(D (&sum)[64], uint64_t a, uint64_t b) {
        wgmma_8bit_ss<E, E, BN>(sum, a, b, true);
    }

    template <int COUNT>
    static __device__ __forceinline__ void take(const GroupedParams &p, Ring &ring,
                                                smem_addr ring_s, const Work<OneSum> &x, int col0,
                                                const float *scales, const Releaser &release) {
        D sum[COUNT][64];
        sum_over_k<OneSum>(ring, ring_s, sum, x, release);
        /* Read again, so that no register holds it over the products. */
        const unsigned thread = mov_tid_x();
        const int lane = (int)thread % 32;
        const smem_addr panel_s = staging<OneSum>(ring_s, thread);
#pragma unroll
        for (int m = 0; m < COUNT; ++m) {
            const WarpRows rows = warp_rows<OneSum>(p, x, m, thread);
            float value[64];
#pragma unroll
            for (int i = 0; i < 64; ++i) value[i] = (float)sum[m][i];
            if (x.steps > 0) { /* rows of no group are zeros, whatever their scales */
                float sa[2];
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    sa[h] = scale_of(p.sa, min(rows.a + lane / 4 + 8 * h, p.m - 1), 0);
                scale_sums(value, sa, scales + 2 * (lane % 4));
            }
            if (p.f.out_dtype == GK_F16)
                store_sums<__half, Panel>(p, value, x.task.group, rows.out, rows.count, col0,
                                          panel_s);
            else
                store_sums<__nv_bfloat16, Panel>(p, value, x.task.group, rows.out, rows.count, col0,
                                                 panel_s);
        }
    }
};

} // namespace

#endif
