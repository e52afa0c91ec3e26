// SPDX-License-Identifier: BSD-3-Clause
// copy: copies tiles between global and shared memory. All threads of a group take part: a
// block, or some of its warps.
//
// A tile is Tile = smem_tile<ROWS, ROW_BYTES>. `thread` counts from 0 to THREADS - 1 in the
// group. Strides are in elements. Rows from rows_valid on and columns from cols_valid on become
// zeros, and nothing there is read.
#ifndef GPUKERN_TILE_COPY_CUH
#define GPUKERN_TILE_COPY_CUH

#include "../ptx/cp_async.cuh"
#include "../ptx/regs.cuh"
#include "../layout/banks.cuh"

// Which chunk a thread copies in each pass. Neighbouring threads take neighbouring chunks of a
// row, so that global accesses are whole 128-byte lines and shared ones have no bank conflicts.
// Kernels whose rows are scattered (pages) write the loop themselves:
//
//   for (int pass = 0; pass < C::passes; ++pass)
//       if (C::has(thread, pass))
//           cp_async_cg_16(tile_s + C::offset(thread, pass),
//                          source of chunk (C::row(thread, pass), C::chunk(thread, pass)), 16)
template <typename Tile, int THREADS> struct tile_copy {
    static constexpr int total = Tile::rows * Tile::chunks,
                         passes = (total + THREADS - 1) / THREADS;
    // A thread stays in one column of chunks.
    static constexpr bool same_chunk = THREADS % Tile::chunks == 0;
    // The distance of its rows from pass to pass.
    static constexpr int rows_apart = THREADS / Tile::chunks;
    static constexpr bool same_xor = same_chunk && rows_apart % 8 == 0; // all passes swizzle alike

    static constexpr GK_HD bool has(int thread, int pass) {
        return total % THREADS == 0 || pass + 1 < passes || thread + pass * THREADS < total;
    }
    // unsigned, so that division by a power of two is a shift
    static constexpr GK_HD int row(unsigned thread, int pass) {
        return same_chunk ? thread / Tile::chunks + pass * rows_apart
                          : (thread + pass * THREADS) / Tile::chunks;
    }
    static constexpr GK_HD int chunk(unsigned thread, int pass) {
        return same_chunk ? thread % Tile::chunks : (thread + pass * THREADS) % Tile::chunks;
    }
    static constexpr GK_HD int offset(int thread, int pass) {
        return same_xor ? Tile::offset(row(thread, 0), chunk(thread, 0)) + pass * (THREADS * 16)
                        : Tile::offset(row(thread, pass), chunk(thread, pass));
    }
};

// The address of a pass's chunk, computed from the previous pass's address by addition if the
// thread stays in its column of chunks.
template <typename Tile, int THREADS, typename T>
static __device__ __forceinline__ const T *tile_source(const T *src_g, const T *before_g,
                                                       int64_t row_stride, int thread, int pass) {
    typedef tile_copy<Tile, THREADS> C;
    if (C::same_chunk && pass > 0) return before_g + C::rows_apart * row_stride;
    return src_g + C::row(thread, pass) * row_stride +
           C::chunk(thread, pass) * (16 / (int)sizeof(T));
}

// Bytes of a 16-byte chunk that lie before column cols_valid.
template <typename T> static __device__ __forceinline__ int chunk_bytes(int chunk, int cols_valid) {
    int bytes = cols_valid * (int)sizeof(T) - chunk * 16;
    return min(max(bytes, 0), 16);
}

// Copies src_g [rows][cols] with contiguous columns by cp.async. src_g and row_stride *
// sizeof(T) are multiples of 16 bytes. The caller commits, waits and synchronises
// (pipeline.cuh).
template <typename Tile, int THREADS, typename T>
static __device__ __forceinline__ void
copy_tile_async(smem_addr tile_s, const T *src_g, int64_t row_stride, int rows_valid, int thread) {
    typedef tile_copy<Tile, THREADS> C;
    const T *from_g = src_g;
#pragma unroll
    for (int pass = 0; pass < C::passes; ++pass) {
        if (!C::has(thread, pass)) break;
        from_g = tile_source<Tile, THREADS>(src_g, from_g, row_stride, thread, pass);
        cp_async_cg_16(tile_s + C::offset(thread, pass), from_g,
                       C::row(thread, pass) < rows_valid ? 16 : 0);
    }
}

// The same with columns that end at cols_valid, where cols_valid * sizeof(T) is a multiple of
// 16.
template <typename Tile, int THREADS, typename T>
static __device__ __forceinline__ void copy_tile_async(smem_addr tile_s, const T *src_g,
                                                       int64_t row_stride, int rows_valid,
                                                       int cols_valid, int thread) {
    typedef tile_copy<Tile, THREADS> C;
    int chunks_valid = cols_valid / (16 / (int)sizeof(T));
    const T *from_g = src_g;
#pragma unroll
    for (int pass = 0; pass < C::passes; ++pass) {
        if (!C::has(thread, pass)) break;
        bool valid = C::row(thread, pass) < rows_valid && C::chunk(thread, pass) < chunks_valid;
        from_g = tile_source<Tile, THREADS>(src_g, from_g, row_stride, thread, pass);
        cp_async_cg_16(tile_s + C::offset(thread, pass), from_g, valid ? 16 : 0);
    }
}

// The same with columns that end anywhere. The last chunk's byte count costs four more
// instructions per copy.
template <typename Tile, int THREADS, typename T>
static __device__ __forceinline__ void copy_tile_async_ragged(smem_addr tile_s, const T *src_g,
                                                              int64_t row_stride, int rows_valid,
                                                              int cols_valid, int thread) {
    typedef tile_copy<Tile, THREADS> C;
    const T *from_g = src_g;
#pragma unroll
    for (int pass = 0; pass < C::passes; ++pass) {
        if (!C::has(thread, pass)) break;
        int bytes = chunk_bytes<T>(C::chunk(thread, pass), cols_valid);
        from_g = tile_source<Tile, THREADS>(src_g, from_g, row_stride, thread, pass);
        cp_async_cg_16(tile_s + C::offset(thread, pass), from_g,
                       C::row(thread, pass) < rows_valid ? bytes : 0);
    }
}

// Shared to global: dst_g [rows][cols] with contiguous columns. dst_g and row_stride * sizeof(T)
// are multiples of 16 bytes. cols_valid must be the end of a chunk. The caller puts a barrier
// between the stores into the tile and this call.
template <typename Tile, int THREADS, typename T>
static __device__ __forceinline__ void copy_tile_out(T *dst_g, int64_t row_stride, smem_addr tile_s,
                                                     int rows_valid, int cols_valid, int thread) {
    typedef tile_copy<Tile, THREADS> C;
    constexpr int per_chunk = 16 / (int)sizeof(T);
#pragma unroll
    for (int pass = 0; pass < C::passes; ++pass) {
        if (!C::has(thread, pass)) break;
        int row = C::row(thread, pass), col = C::chunk(thread, pass) * per_chunk;
        if (row >= rows_valid || col >= cols_valid) continue;
        st_global_128(dst_g + row * row_stride + col,
                      ld_shared_128(tile_s + C::offset(thread, pass)));
    }
}

#endif
