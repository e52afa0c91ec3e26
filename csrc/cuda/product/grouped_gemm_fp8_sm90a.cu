/* SPDX-License-Identifier: BSD-3-Clause */
/* grouped_gemm_fp8_sm90a: grouped_gemm of e4m3 on Hopper, for groups of rows, with sums in two
 * levels (grouped.cuh; scaled_wide.cuh sums the same way). The fast mode has one level
 * (grouped_one_sum.cuh).
 *
 *   out[rows of g] = activation(sum over blocks of k of scale_a scale_b (a[rows of g] b[g]) + bias)
 *
 * Both operands are K-major. Four instructions sum 128 of k in fresh registers, which are then
 * added to float32 sums, because the instruction's own sums keep 13 bits. Scales that do not
 * change along k are applied in the epilogue; those of columns wait in shared memory. Block
 * scales (BLOCKS) multiply each part. The consumers read them one block of k ahead, with any
 * strides, indexed over all rows of a.
 *
 * DeepSeek-AI 2024, arXiv:2412.19437, section 3.3.2. Refuses: e5m2, groups of k; along k, scales
 * of single columns, for 32 of k, or powers of two in a byte (grouped_gemm_plain). */
#include "../../core/invariant.h"
#include "grouped_one_sum.cuh"

namespace {

template <bool BLOCKS> struct Kind : GroupedTile<1, false, false> {
    typedef tma_ring<STAGES> Ring;

    /* Reads the scales of a tile's columns, if they do not change along k. */
    static __device__ __forceinline__ void prepare(const GroupedParams &p, const Work<Kind> &x,
                                                   int col0, float *scales) {
        if (!BLOCKS) read_column_scales(p, x, col0, scales);
    }

    template <int COUNT>
    static __device__ __forceinline__ void take(const GroupedParams &p, Ring &ring,
                                                smem_addr ring_s, const Work<Kind> &x, int col0,
                                                const float *scales, const Releaser &release) {
        const int warpgroup = threadIdx.x / 128;
        float sum[COUNT][64], part[64];
#pragma unroll
        for (int i = 0; i < COUNT * 64; ++i) sum[i / 64][i % 64] = 0;
        float ahead_a[COUNT][2], ahead_b = 0;
        int from_a[COUNT][2], from_b = 0; /* offsets, which fit 31 bits: few_elements */
        if (BLOCKS) {
            /* Read again, so that no register holds it, or values derived from it. */
            const unsigned thread = mov_tid_x();
#pragma unroll
            for (int m = 0; m < COUNT; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int row = min(
                        warp_rows<Kind>(p, x, m, thread).a + (int)thread % 32 / 4 + 8 * h, p.m - 1);
                    from_a[m][h] = (row >> min(p.sa.row_log2, 31)) * (int)p.sa.row;
                }
            from_b = x.task.group * (int)p.scale_group +
                     (min(col0, p.n - 1) >> min(p.sb.col_log2, 31)) * (int)p.sb.col;
        }
        /* Reads the scales of a block of k. */
        const auto look = [&](int step) {
            if (step == x.steps) return;
#pragma unroll
            for (int m = 0; m < COUNT; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    ahead_a[m][h] = __ldg((const float *)p.sa.data +
                                          (uint32_t)(from_a[m][h] + step * (int)p.step_a));
            ahead_b = __ldg((const float *)p.sb.data + (uint32_t)(from_b + step * (int)p.step_b));
        };
        if (BLOCKS && x.steps > 0) look(0);
        for (int step = 0; step < x.steps; ++step) {
            ring.wait_full();
            const smem_addr stage_s = ring_s + ring.stage * STAGE_BYTES;
            const uint64_t a = TileA::descriptor(stage_s + warpgroup * TileA::bytes),
                           b = TileB::descriptor(stage_s + A_BYTES);
            float scale[2 * COUNT], second = 1; /* factors of a row's sums: join_scales */
            if (BLOCKS) {
#pragma unroll
                for (int i = 0; i < 2 * COUNT; ++i) scale[i] = ahead_a[i / 2][i % 2];
                second = p.apart ? ahead_b : join_scales(scale, ahead_b);
            }
#pragma unroll
            for (int m = 0; m < COUNT; ++m) {
                wgmma_fence();
#pragma unroll
                for (int kk = 0; kk < 4; ++kk)
                    wgmma_8bit_ss<e4m3, e4m3, BN>(
                        part, wgmma_descriptor_add(a, 2 * m * TileA::bytes + 32 * kk),
                        wgmma_descriptor_add(b, 32 * kk), kk > 0);
                wgmma_commit_group();
                if (BLOCKS && m == 0) look(step + 1);
                wgmma_wait_group<0>();
                wgmma_pin(part);
                if (m == COUNT - 1) release(ring.empty());
                if (BLOCKS && second != 1) {
#pragma unroll
                    for (int i = 0; i < 64; ++i)
                        sum[m][i] = fmaf(part[i] * scale[2 * m + i % 4 / 2], second, sum[m][i]);
                } else {
#pragma unroll
                    for (int i = 0; i < 64; ++i) {
                        if (BLOCKS)
                            sum[m][i] = fmaf(part[i], scale[2 * m + i % 4 / 2], sum[m][i]);
                        else
                            sum[m][i] += part[i];
                    }
                }
            }
            ring.advance();
        }
#pragma unroll
        for (int m = 0; m < COUNT; ++m) store(p, sum[m], x, m, col0, scales, ring_s);
    }

    static __device__ __forceinline__ void store(const GroupedParams &p, float (&sum)[64],
                                                 const Work<Kind> &x, int m, int col0,
                                                 const float *scales, smem_addr ring_s) {
        /* Read again, so that no register holds it over the products. */
        const unsigned thread = mov_tid_x();
        const int lane = (int)thread % 32;
        const smem_addr panel_s = staging<Kind>(ring_s, thread);
        const WarpRows rows = warp_rows<Kind>(p, x, m, thread);
        if (!BLOCKS && x.steps > 0) { /* rows of no group are zeros, whatever their scales */
            float sa[2];
#pragma unroll
            for (int h = 0; h < 2; ++h)
                sa[h] = scale_of(p.sa, min(rows.a + lane / 4 + 8 * h, p.m - 1), 0);
            scale_sums(sum, sa, scales + 2 * (lane % 4));
        }
        if (p.f.out_dtype == GK_F16)
            store_sums<__half, Panel>(p, sum, x.task.group, rows.out, rows.count, col0, panel_s);
        else
            store_sums<__nv_bfloat16, Panel>(p, sum, x.task.group, rows.out, rows.count, col0,
                                             panel_s);
    }
};

/* True if offsets of all elements fit 31 bits. */
bool few_elements(const gk_tensor &t) {
    int64_t last = 0;
    for (int d = 0; d < t.ndim; ++d) {
        if (t.stride[d] < 0 || t.stride[d] > INT32_MAX) return false;
        last += (t.shape[d] - 1) * t.stride[d];
    }
    return last <= INT32_MAX;
}

enum {
    KEY_BLOCKS, /* scales by block */
    KEY_FAST    /* one sum over all of k, for fast calls alone */
};

bool plan_fp8(const gk_cuda_instance *instance, const gk_context *, const void *args,
              gk_plan *plan) {
    const gk_grouped_gemm_args *g = (const gk_grouped_gemm_args *)args;
    if (g->b.dtype != GK_E4M3) return false;
    const gk_scales sa = gk_scales_of(g->scale_a, g->a.shape[0], g->a.shape[1], false);
    const gk_scales sb = gk_scales_of(g->scale_b, g->a.shape[1], g->b.shape[g->b.ndim - 1], true);
    const bool blocks = sa.col_log2 <= 7 || sb.row_log2 <= 7;
    if (instance->key[KEY_FAST] && g->accumulate != GK_FAST) return false;
    if (sa.dtype != GK_F32 || sb.dtype != GK_F32 || blocks != (bool)instance->key[KEY_BLOCKS])
        return false;
    if (blocks && (sa.col_log2 < 7 || sb.row_log2 < 7 || sb.col_log2 < 7)) return false;
    if (blocks && (!few_elements(*g->scale_a) || !few_elements(*g->scale_b))) return false;
    plan->tile[2] = WGMMA_ROW_BYTES;
    return grouped_fits(g, false, false, plan);
}

template <class K>
gk_status run_fp8(const gk_context *ctx, const void *args, const gk_plan *plan, void *) {
    const gk_grouped_gemm_args *g = (const gk_grouped_gemm_args *)args;
    GroupedParams p = {};
    set_scales(g, p);
    p.apart = gk_batch_invariant();
    p.step_a = p.sa.col_log2 == 7 ? p.sa.col : 0;
    p.step_b = p.sb.row_log2 == 7 ? p.sb.row : 0;
    return run_grouped<K>(ctx, g, plan, p);
}

const gk_cuda_instance instances[] = {
    {"grouped_gemm_fp8_sm90a_e4m3_fast_256x128",
     GK_E4M3,
     plan_fp8,
     run_fp8<OneSum<e4m3, float>>,
     {0, 1},
     NULL},
    {"grouped_gemm_fp8_sm90a_e4m3_256x128", GK_E4M3, plan_fp8, run_fp8<Kind<false>>, {0}, NULL},
    {"grouped_gemm_fp8_sm90a_e4m3_block_256x128",
     GK_E4M3,
     plan_fp8,
     run_fp8<Kind<true>>,
     {1},
     NULL},
};

} // namespace

extern "C" const gk_cuda_table gk_grouped_gemm_fp8_sm90a_table = {
    instances, sizeof instances / sizeof instances[0], 90, NULL};
