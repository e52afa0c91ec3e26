/* SPDX-License-Identifier: BSD-3-Clause */
/* panels.cuh: staging tiles (panels) in shared memory for the epilogue of Hopper's gemm. A panel
 * has 16 rows of up to 128 bytes and belongs to one warp. store_panels.cuh and store_any.cuh use
 * panels to reorder results from accumulator order to rows.
 *
 * Three functions store a warp's panels: send_panels by TMA, send_chunks from registers in 16-byte
 * chunks, and send_rows for a misaligned result. */
#ifndef GPUKERN_CUDA_GEMM_PANELS_CUH
#define GPUKERN_CUDA_GEMM_PANELS_CUH

#include "../../ptx/smem.cuh"
#include "../../ptx/stmatrix.cuh"
#include "../../ptx/tma.cuh"
#include "../../layout/banks.cuh"
#include "../../tile/convert.cuh"
#include "realign.cuh"

/* Writes the first 32 columns of v, in accumulator order, as 16 rows of 32 floats. */
template <class Panel>
__device__ __forceinline__ void put_floats(smem_addr panel_s, const float *v, int lane) {
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
        const int row = lane / 4 + i / 2 % 2 * 8, byte = i / 4 * 32 + lane % 4 * 8;
        st_shared_64(panel_s + Panel::offset(row, byte / 16) + byte % 16,
                     make_float2(v[i], v[i + 1]));
    }
}

/* First column of panel i, if panels of `each` columns cover `all` columns. If these are no whole
 * number of panels, the last panel ends with the last column and overlaps the one before. */
constexpr GK_HD int panel_first(int i, int each, int all) {
    return i * each < all - each ? i * each : all - each;
}

/* Writes a warp's 16 rows of 2 N columns to its panels, after their previous contents have been
 * stored. */
template <class R, class Panel, int N, bool TMA>
__device__ __forceinline__ void put_panels(const float *v, smem_addr panels_s, int lane) {
    constexpr int EACH = Panel::row_bytes / (2 * (element<R>::bits / 8)),
                  NUM = (N + EACH - 1) / EACH;
    if (TMA && lane == 0) tma_store_wait_group_read<0>();
    __syncwarp(); /* the previous contents have been read */
#pragma unroll
    for (int i = 0; i < NUM; ++i) {
        const float *const w = v + panel_first(i, EACH, N);
        if constexpr (element<R>::bits == 32) {
            put_floats<Panel>(panels_s + i * Panel::bytes, w, lane);
        } else {
            const unsigned put = Panel::offset(lane % 16, 0);
#pragma unroll
            /* four 8 x 8 matrices: rows 0-7 and 8-15 of 8 columns, then those of the next 8 */
            for (int j = 0; j < Panel::chunks; j += 2) {
                const uint32_t two[4] = {
                    pack2<R>(w[4 * j], w[4 * j + 1]), pack2<R>(w[4 * j + 2], w[4 * j + 3]),
                    pack2<R>(w[4 * j + 4], w[4 * j + 5]), pack2<R>(w[4 * j + 6], w[4 * j + 7])};
                stmatrix_x4(panels_s + i * Panel::bytes + Panel::chunk(put, j + lane / 16), two);
            }
        }
    }
}

/* Starts TMA stores of the panels; the warp goes on meanwhile. at: first column and row. There is
 * one fence for all panels, because each fence waits for all of the warp's writes. */
template <class R, class Panel, int N>
__device__ __forceinline__ void send_panels(const CUtensorMap *map, smem_addr panels_s,
                                            const tma_at &at, int lane) {
    constexpr int COLS = Panel::row_bytes / (element<R>::bits / 8), NUM = (2 * N + COLS - 1) / COLS;
    fence_proxy_async();
    __syncwarp(); /* all lanes have written the panels */
    if (lane == 0) {
        tma_at to = at;
#pragma unroll
        for (int i = 0; i < NUM; ++i) {
            to.c[0] = at.c[0] + panel_first(i, COLS, 2 * N);
            tma_store_5d(map, to, panels_s + i * Panel::bytes);
        }
        tma_store_commit_group();
    }
}

/* How the 32 lanes read rows of COLS 16-bit results from panels side by side, in 16-byte chunks. A
 * pass reads IN_PASS whole rows. */
template <class Panel, int COLS> struct panel_rows {
    static constexpr int CHUNKS = COLS / 8, IN_PASS = 32 / CHUNKS;
    /* Rows of two narrow or overlapping panels fall into the same banks. */
    static constexpr int WAYS = Panel::chunks < 8 || CHUNKS % Panel::chunks != 0 ? 2 : 1;
    static_assert(16 % IN_PASS == 0, "whole passes");
    static constexpr GK_HD int offset(int row, int chunk) {
        const int panel = chunk / Panel::chunks;
        return panel * Panel::bytes +
               Panel::offset(row, chunk - panel_first(panel, Panel::chunks, CHUNKS));
    }
    /* Bank conflicts of the lanes' loads of chunk `further` after their own. */
    static constexpr GK_HD int read_ways(int further) {
        int bytes[32] = {};
        for (int lane = 0; lane < 32; ++lane) {
            const int chunk = lane % CHUNKS + further;
            bytes[lane] = offset(lane / CHUNKS % IN_PASS, chunk < CHUNKS ? chunk : CHUNKS - 1);
        }
        return ways(bytes, 16);
    }
};

/* Stores the panels from registers. This ends before TMA would begin to read shared memory. to_g:
 * where the panels' first element goes. The matrix has `rows` rows and `cols` columns from there
 * on. */
template <class Panel, int COLS>
__device__ __forceinline__ void send_chunks(uint16_t *to_g, int64_t row_stride, int rows, int cols,
                                            smem_addr panels_s, int lane) {
    typedef panel_rows<Panel, COLS> Rows;
    constexpr int PASSES = 16 / Rows::IN_PASS;
    static_assert(Rows::IN_PASS * Rows::CHUNKS == 32 && Rows::read_ways(0) <= Rows::WAYS,
                  "chunks of whole rows");
    const int chunk = lane % Rows::CHUNKS, row = lane / Rows::CHUNKS;
    __syncwarp(); /* all lanes have written the panels */
    uint4 x[PASSES];
#pragma unroll
    for (int i = 0; i < PASSES; ++i)
        x[i] = ld_shared_128(panels_s + Rows::offset(row + i * Rows::IN_PASS, chunk));
    uint16_t *const at_g = to_g + row * row_stride + 8 * chunk;
#pragma unroll
    for (int i = 0; i < PASSES; ++i)
        if (row + i * Rows::IN_PASS < rows && 8 * chunk < cols)
            *(uint4 *)(at_g + i * Rows::IN_PASS * row_stride) = x[i];
}

/* Stores the panels from registers if rows of the result are misaligned or end within a chunk. Each
 * aligned 16-byte chunk of a row is assembled from two chunks of the panels. The elements before
 * and after these chunks are stored one by one. */
template <class Panel, int COLS>
__device__ __forceinline__ void send_rows(uint16_t *to_g, int64_t row_stride, int rows, int cols,
                                          smem_addr panels_s, int lane) {
    typedef panel_rows<Panel, COLS> Rows;
    static_assert(Rows::read_ways(0) <= Rows::WAYS && Rows::read_ways(1) <= Rows::WAYS,
                  "chunks of whole rows");
    /* Elements before the row's first aligned chunk. */
    const auto before = [](const uint16_t *row_g) { return (int)(-((uintptr_t)row_g / 2) % 8); };
    const int chunk = lane % Rows::CHUNKS, row0 = lane / Rows::CHUNKS;
    __syncwarp(); /* all lanes have written the panels */
#pragma unroll 2
    for (int r = row0; r < 16 && row0 < Rows::IN_PASS; r += Rows::IN_PASS) {
        uint16_t *const row_g = to_g + r * row_stride;
        const int head = before(row_g), col = head + 8 * chunk;
        const uint4 low = ld_shared_128(panels_s + Rows::offset(r, chunk)),
                    high =
                        ld_shared_128(panels_s + Rows::offset(r, min(chunk + 1, Rows::CHUNKS - 1)));
        uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        realign_shift(words, head);
        if (r >= rows || col + 8 > COLS) continue;
        if (col + 8 <= cols) {
            *(uint4 *)(row_g + col) = make_uint4(words[0], words[1], words[2], words[3]);
        } else {
#pragma unroll
            for (int e = 0; e < 8; ++e)
                if (col + e < cols) row_g[col + e] = (uint16_t)(words[e / 2] >> e % 2 * 16);
        }
    }
#pragma unroll 2
    for (int r = lane / 8; r < 16; r += 4) {
        uint16_t *const row_g = to_g + r * row_stride;
        const int head = before(row_g), col = lane % 8 < head ? lane % 8 : COLS - 8 + lane % 8;
        const uint32_t word = ld_shared_32(panels_s + Rows::offset(r, col / 8) + col % 8 / 2 * 4);
        if (head > 0 && r < rows && col < cols) row_g[col] = (uint16_t)(word >> col % 2 * 16);
    }
}

#endif
