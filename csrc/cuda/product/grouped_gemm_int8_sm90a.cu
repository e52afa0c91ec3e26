/* SPDX-License-Identifier: BSD-3-Clause */
/* grouped_gemm_int8_sm90a: grouped_gemm of int8 on Hopper, for groups of rows (grouped.cuh).
 *
 *   out[rows of g] = activation(scale_a scale_b (a[rows of g] b[g]) + bias)
 *
 * Both operands are K-major. WGMMA sums in int32, which is exact over all of k, so the sums stay
 * in the accumulators of the instruction. One step is in flight while the next is issued. The
 * scales of rows and columns are applied in the epilogue.
 *
 * Refuses: groups of k, scales along k, scales that are powers of two in a byte, other layouts and
 * rows that TMA cannot read (grouped_gemm_sm80, grouped_gemm_plain). */
#include "../ptx/wgmma_8bit.cuh"
#include "grouped.cuh"

namespace {

struct Int8Groups : GroupedTile<1, false, false> {
    typedef tma_ring<STAGES> Ring;

    static __device__ __forceinline__ void
    prepare(const GroupedParams &p, const Work<Int8Groups> &x, int col0, float *scales) {
        read_column_scales(p, x, col0, scales);
    }

    /* Sums COUNT blocks of 64 rows of a warpgroup. */
    template <int COUNT>
    static __device__ __forceinline__ void
    multiply(Ring &ring, smem_addr ring_s, int32_t (&sum)[COUNT][64], const Work<Int8Groups> &x,
             const Releaser &release) {
        const int warpgroup = threadIdx.x / 128;
        /* rows of no group have sums of 0 */
#pragma unroll
        for (int i = 0; i < COUNT * 64; ++i) sum[i / 64][i % 64] = 0;
        for (int step = 0; step < x.steps; ++step) {
            ring.wait_full();
            const smem_addr stage_s = ring_s + ring.stage * STAGE_BYTES;
            const uint64_t a = TileA::descriptor(stage_s + warpgroup * TileA::bytes),
                           b = TileB::descriptor(stage_s + A_BYTES);
#pragma unroll
            for (int m = 0; m < COUNT; ++m) wgmma_pin(sum[m]);
            wgmma_fence();
#pragma unroll
            for (int kk = 0; kk < 4; ++kk)
#pragma unroll
                for (int m = 0; m < COUNT; ++m)
                    wgmma_8bit_ss<int8_t, int8_t, BN>(
                        sum[m], wgmma_descriptor_add(a, 2 * m * TileA::bytes + 32 * kk),
                        wgmma_descriptor_add(b, 32 * kk), true);
            wgmma_commit_group();
            wgmma_wait_group<1>(); /* the previous step has finished reading its stage */
            if (step > 0) release(ring.before());
            ring.advance();
        }
        wgmma_wait_group<0>();
#pragma unroll
        for (int m = 0; m < COUNT; ++m) wgmma_pin(sum[m]);
        if (x.steps > 0) release(ring.before());
    }

    template <int COUNT>
    static __device__ __forceinline__ void
    take(const GroupedParams &p, Ring &ring, smem_addr ring_s, const Work<Int8Groups> &x, int col0,
         const float *scales, const Releaser &release) {
        int32_t sum[COUNT][64];
        multiply<COUNT>(ring, ring_s, sum, x, release);
        /* Read again, so that no register holds it over the products. */
        const unsigned thread = mov_tid_x();
        const int lane = (int)thread % 32;
        const smem_addr panel_s = staging<Int8Groups>(ring_s, thread);
#pragma unroll
        for (int m = 0; m < COUNT; ++m) {
            const WarpRows rows = warp_rows<Int8Groups>(p, x, m, thread);
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

bool plan_int8(const gk_cuda_instance *, const gk_context *, const void *args, gk_plan *plan) {
    const gk_grouped_gemm_args *g = (const gk_grouped_gemm_args *)args;
    const gk_scales sa = gk_scales_of(g->scale_a, g->a.shape[0], g->a.shape[1], false);
    const gk_scales sb = gk_scales_of(g->scale_b, g->a.shape[1], g->b.shape[g->b.ndim - 1], true);
    if (sa.dtype != GK_F32 || sb.dtype != GK_F32 || sa.col_log2 < GK_WHOLE_LOG2 ||
        sb.row_log2 < GK_WHOLE_LOG2)
        return false;
    plan->tile[2] = WGMMA_ROW_BYTES;
    return grouped_fits(g, false, false, plan);
}

gk_status run_int8(const gk_context *ctx, const void *args, const gk_plan *plan, void *) {
    const gk_grouped_gemm_args *g = (const gk_grouped_gemm_args *)args;
    GroupedParams p = {};
    set_scales(g, p);
    return run_grouped<Int8Groups>(ctx, g, plan, p);
}

const gk_cuda_instance instances[] = {
    {"grouped_gemm_int8_sm90a_256x128", GK_I8, plan_int8, run_int8, {0}, NULL}};

} // namespace

extern "C" const gk_cuda_table gk_grouped_gemm_int8_sm90a_table = {
    instances, sizeof instances / sizeof instances[0], 90, NULL};
