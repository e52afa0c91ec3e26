// SPDX-License-Identifier: BSD-3-Clause
// check_epilogue: tests the stores of Hopper's gemm with scales of rows, columns and results, which
// gemm itself never has. Sums are small integers and scales powers of two, so every result is
// exact.
#ifndef GPUKERN_CHECK_EPILOGUE_CUH
#define GPUKERN_CHECK_EPILOGUE_CUH

#include "check_tile.cuh"
#include "cuda/product/gemm/store_any.cuh"
#include "cuda/product/gemm/store_panels.cuh"
#include "cuda/product/gemm/store_transposed.cuh"
#include "cuda/host/launch.cuh"

#include <math.h>

enum {
    EPILOGUE_ROWS = 64, // of accumulators, those of one warpgroup
    EPILOGUE_COLS = 32,
    EPILOGUE_LD = 40 // leading dimension of the result
};

enum ScaledStore {
    SCALED_ANY,
    SCALED_ACROSS,
    SCALED_TRANSPOSED,
    SCALED_PANELS
};

struct ScaledParams {
    GemmProblem p;
    GemmScales scales;
    CUtensorMap out, preact; // not used: results leave from registers
    bool unaligned;
};

static __host__ __device__ float scaled_sum(int row, int col) {
    return (float)((row * 7 + col * 3) % 32 - 12);
}

template <int STORE>
static __global__ void __launch_bounds__(128)
    scaled_kernel(const __grid_constant__ ScaledParams x) {
    __shared__ __align__(1024) unsigned char smem[EPILOGUE_COLS * 68 * 4];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const smem_addr staging_s = cvta_to_shared(smem) + warp * 2048;
    const GemmPlace at = gemm_place(x.p, 0);
    float sum[EPILOGUE_COLS / 2];
    for (int i = 0; i < EPILOGUE_COLS / 2; ++i)
        sum[i] = scaled_sum(wgmma_d(warp, lane, i).row, wgmma_d(warp, lane, i).col);
    if constexpr (STORE == SCALED_TRANSPOSED) {
        store_transposed<bf16, EPILOGUE_COLS, 68>(x.p, at, sum, (float *)smem, 0, 0, false, false,
                                                  x.scales);
    } else if constexpr (STORE == SCALED_PANELS) {
        tma_at to = {};
        to.c[1] = warp * 16;
        store_panels<bf16, smem_tile<16, EPILOGUE_COLS * 2>, 1, STORE_ACTIVATED, false>(
            x, sum, staging_s, to, 0, lane, x.scales);
    } else {
        store_any<bf16, EPILOGUE_COLS>(x.p, at, sum, staging_s, warp * 16, x.p.m, 0,
                                       STORE == SCALED_ACROSS, lane, x.scales);
    }
}

// m x n of the 64 x 32 accumulators are results. Transposed, n x m are.
template <int STORE, class Out>
static void check_scaled(const buffer &in, const buffer &out, int m, int n, int row_shift) {
    constexpr bool TRANSPOSED = STORE == SCALED_TRANSPOSED;
    const int rows = TRANSPOSED ? n : m, cols = TRANSPOSED ? m : n;
    float *const row_scale = (float *)in.host, *const col_scale = row_scale + 64,
                 *const bias = row_scale + 128;
    for (int i = 0; i < 64; ++i) {
        row_scale[i] = ldexpf(1, i % 5 - 2);
        col_scale[i] = ldexpf(1, 1 - i % 3);
        bias[i] = i % 9 - 4.f;
    }
    row_scale[192] = 0.5f;
    to_device(in);
    memset(out.host, 0xff, MOST_BYTES);
    to_device(out);
    const float *const device = (const float *)in.device;
    ScaledParams x = {};
    GemmProblem &p = x.p;
    GemmEpilogue &e = p.epilogue;
    p.m = m;
    p.n = n;
    p.batch = 1;
    x.unaligned = false;
    e.alpha = 1;
    e.bias = device + 128;
    e.bias_dtype = GK_F32;
    e.bias_col = 1;
    e.bias_vectors = true;
    e.out = out.device;
    e.out_dtype = sizeof(Out) == 4 ? GK_F32 : GK_BF16;
    e.out_row = EPILOGUE_LD;
    e.out_col = 1;
    e.out_vectors = true;
    e.activation = GK_ACT_RELU;
    x.scales = {device, device + 64, device + 192, 1, 1, row_shift, 0};
    // rows and columns are exchanged in the epilogue, as in hopper_launch.cuh
    if (STORE == SCALED_ACROSS) {
        p.epilogue = gemm_swapped(p).epilogue;
        x.scales = {device + 64, device, device + 192, 1, 1, 0, row_shift};
    }
    scaled_kernel<STORE><<<1, 128>>>(x);
    must(cudaDeviceSynchronize(), "scaled_kernel");
    to_host(out);
    const Out *const got = (const Out *)out.host;
    for (int row = 0; row < EPILOGUE_ROWS; ++row)
        for (int col = 0; col < EPILOGUE_LD; ++col) {
            const float sum = TRANSPOSED ? scaled_sum(col, row) : scaled_sum(row, col);
            const float v =
                sum * row_scale[row >> row_shift] * col_scale[col % 64] + bias[col % 64];
            const float result = (float)got[row * EPILOGUE_LD + col];
            if (row < rows && col < cols)
                check(result == (v <= 0 ? 0 : v * 2), "result", row * EPILOGUE_LD + col, result,
                      v <= 0 ? 0 : v * 2);
            else
                check(isnan(result), "what is no result", row * EPILOGUE_LD + col, result, 0);
        }
}

static void check_scales(const buffer &in, const buffer &out) {
    check_scaled<SCALED_ANY, float>(in, out, 50, 29, 0);
    check_scaled<SCALED_ANY, bf16>(in, out, 64, 32, 7);
    check_scaled<SCALED_ACROSS, float>(in, out, 50, 29, 0);
    check_scaled<SCALED_TRANSPOSED, bf16>(in, out, 40, 27, 0);
    check_scaled<SCALED_TRANSPOSED, float>(in, out, 37, 32, 1);
    check_scaled<SCALED_PANELS, bf16>(in, out, 50, 24, 0);
    check_scaled<SCALED_PANELS, bf16>(in, out, 64, 32, 1);
    verb("stores with scales of rows, columns and results");
}

#endif
