/* SPDX-License-Identifier: BSD-3-Clause */
/* finish.cuh: the epilogue of Hopper's scaled_gemm, and the staging panels through which results of
 * products built on shell.cuh are stored.
 *
 *   out = activation(alpha sum + beta c + bias) / out_scale        in float32, rounded once
 *
 * `finish_values` computes this. It divides by out_scale with __fdiv_rn, because 8-bit codes must
 * round as the CPU's do. For 16-bit results it uses the fast activations of activation.cuh.
 *
 * `Panel` is a warp's staging buffer for 16-bit results, which TMA stores. If TMA cannot write the
 * result, kernels store single elements instead (store_value in quant/product.cuh). */
#ifndef GPUKERN_CUDA_PRODUCT_FINISH_CUH
#define GPUKERN_CUDA_PRODUCT_FINISH_CUH

#include "../host/tensormap.cuh"
#include "../layout/banks.cuh"
#include "../ptx/stmatrix.cuh"
#include "../ptx/tma.cuh"
#include "quant/load_bits.cuh"

/* ---- the formula ----------------------------------------------------------------------------- */
__device__ __forceinline__ float float_of_bits(gk_dtype dtype, uint32_t bits) {
    return dtype == GK_F32    ? __uint_as_float(bits)
           : dtype == GK_BF16 ? __uint_as_float(bits << 16)
                              : to_f32(__ushort_as_half((unsigned short)bits));
}

/* Applies the epilogue to N sums v. row(i), col(i): coordinates of value i, which must lie inside
 * the result. */
template <int N, class Row, class Col>
__device__ __forceinline__ void finish_values(const Finish &f, float (&v)[N], const Row &row,
                                              const Col &col) {
    if (f.alpha) {
        const float alpha = *f.alpha;
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] *= alpha;
    }
    if (f.c) {
        uint32_t bits[N];
        load_bits(bits, f.c, f.c_dtype == GK_F32 ? 2 : 1,
                  [&](int i) { return row(i) * f.c_row + col(i) * f.c_col; });
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = fmaf(f.beta, float_of_bits(f.c_dtype, bits[i]), v[i]);
    }
    if (f.bias) { /* a branch, because adding 0 would turn -0 into +0 */
        float bias[N];
        load_bias(bias, f, col);
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] += bias[i];
    }
    if (f.activation != GK_ACT_NONE) {
        if (f.out_dtype == GK_BF16 || f.out_dtype == GK_F16)
            activate_16<N>(f.activation, v);
        else
            activate_in_place<N>(f.activation, v);
    }
    if (f.out_scale) {
        const float scale = *f.out_scale;
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = __fdiv_rn(v[i], scale);
    }
}

/* ---- a warp's panel -------------------------------------------------------------------------- */
/* A staging buffer of 16 rows x 64 results of 16 bits, swizzled by 128 bytes. stmatrix writes
 * WGMMA accumulators to it. TMA stores it while the warp goes on. */
struct Panel {
    typedef smem_tile<16, 128> Tile;
    static constexpr int bytes = Tile::bytes, cols = 64;
    static constexpr GK_HD smem_box box() { return Tile::box(2); }

    /* Waits until TMA has read the panel's previous contents. */
    static __device__ __forceinline__ void reuse() {
        if (threadIdx.x % 32 == 0) tma_store_wait_group_read<0>();
        __syncwarp();
    }
    /* Writes columns 16 c to 16 c + 15. Each word is a lane's part of an 8 x 8 matrix: rows 0-7 and
     * 8-15 of the first 8 columns, then rows 0-7 and 8-15 of the other 8. */
    static __device__ __forceinline__ void put(smem_addr panel_s, int c,
                                               const uint32_t (&words)[4]) {
        const int lane = threadIdx.x % 32;
        const unsigned row = Tile::offset(lane % 16, 0);
        stmatrix_x4(panel_s + Tile::chunk(row, 2 * c + lane / 16), words);
    }
    /* Starts the store of the panel at (row, col) of the result. */
    static __device__ __forceinline__ void send(const CUtensorMap *map, smem_addr panel_s, int col,
                                                int row) {
        fence_proxy_async();
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            tma_store_5d(map, {{col, row}}, panel_s);
            tma_store_commit_group();
        }
    }
    /* Waits until all stores have ended. To be called before the block exits. */
    static __device__ __forceinline__ void end() {
        if (threadIdx.x % 32 == 0) tma_store_wait_group<0>();
    }
};

/* True if TMA can write the result: 16-bit elements, and rows that begin and end at multiples of
 * 16 bytes. */
inline bool panels_fit(const Finish &f, int64_t n) {
    return (f.out_dtype == GK_BF16 || f.out_dtype == GK_F16) && n % 8 == 0 && f.out_row % 8 == 0 &&
           (uintptr_t)f.out % 16 == 0;
}

/* Makes the tensor map through which TMA writes the result. */
inline gk_status make_panel_map(const char *op, const Finish &f, int64_t m, int64_t n,
                                CUtensorMap *map) {
    const TensorShape out = {f.out, f.out_dtype, {n, m, 1, 1, 1}, {1, f.out_row, 0, 0, 0}, false};
    return make_tensor_map(op, out, Panel::box(), map);
}

/* True if the epilogue only applies the scales and rounds to bfloat16. */
inline bool only_rounds(const Finish &f) {
    return !f.alpha && !f.c && !f.bias && !f.out_scale && f.activation == GK_ACT_NONE;
}

#endif
