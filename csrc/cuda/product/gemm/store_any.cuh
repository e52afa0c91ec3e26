/* SPDX-License-Identifier: BSD-3-Clause */
/* store_any.cuh: the fallback store of Hopper's gemm, for every epilogue, result dtype and stride.
 * gemm_sm90a.cu and gemm_tf32_sm90a.cu call it. The sums go from registers through one panel of
 * floats. */
#ifndef GPUKERN_CUDA_GEMM_STORE_ANY_CUH
#define GPUKERN_CUDA_GEMM_STORE_ANY_CUH

#include "epilogue.cuh"
#include "panels.cuh"

/* Stores a warp's 16 rows x BN columns, 32 columns at a time. The loop is not unrolled, so that its
 * code exists once: each pass takes the first 16 sums and shifts the others down. A lane stores 8
 * columns of a row. With `across`, the columns of the result are dense instead of its rows. A lane
 * then stores 8 rows of a column, so that neighbouring lanes still write neighbouring addresses. */
template <class R, int BN>
__device__ __forceinline__ void store_any(const GemmProblem &p, const GemmPlace &at,
                                          float (&sum)[BN / 2], smem_addr panel_s, int64_t row0,
                                          int64_t rows, int64_t col0, bool across, int lane) {
    typedef smem_tile<16, 128> Panel;
#pragma unroll 1
    for (int c = 0; c < BN; c += 32) {
        put_floats<Panel>(panel_s, sum, lane);
        __syncwarp(); /* lanes read what other lanes wrote */
#pragma unroll 1
        for (int r = 0; r < 16; r += 8) {
            /* The epilogue's row, and the first of its 8 columns. */
            const int64_t row = across ? col0 + c + lane : row0 + r + lane / 4;
            const int64_t col = across ? row0 + r : col0 + c + lane % 4 * 8;
            const int valid = (int)min((int64_t)8, (across ? rows : p.n) - col);
            uint32_t bits[8];
            if (across) {
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    bits[i] = ld_shared_32(panel_s + Panel::offset(r + i, lane / 4) + lane % 4 * 4);
            } else {
                const uint4 x = ld_shared_128(panel_s + Panel::offset(r + lane / 4, lane % 4 * 2)),
                            y = ld_shared_128(panel_s +
                                              Panel::offset(r + lane / 4, lane % 4 * 2 + 1));
                bits[0] = x.x;
                bits[1] = x.y;
                bits[2] = x.z;
                bits[3] = x.w;
                bits[4] = y.x;
                bits[5] = y.y;
                bits[6] = y.z;
                bits[7] = y.w;
            }
            float v[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] = __uint_as_float(bits[i]);
            if (row < (across ? p.n : rows) && valid > 0)
                epilogue_row<R, 8>(p.epilogue, at, row, col, valid, v);
        }
        __syncwarp(); /* all lanes have read the panel */
#pragma unroll
        for (int i = 0; i + 16 < BN / 2; ++i) sum[i] = sum[i + 16];
    }
}

#endif
