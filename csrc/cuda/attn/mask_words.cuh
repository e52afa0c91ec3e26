/* SPDX-License-Identifier: BSD-3-Clause */
/* mask_words.cuh: one warp computes the words of a partial block of a stored mask
 * (../../core/attn_mask.h) from the ranges that define the mask, and stores them to shared memory.
 * The producers of the masked Hopper kernels use it for blocks whose words are not stored. */
#ifndef GPUKERN_CUDA_MASK_WORDS_CUH
#define GPUKERN_CUDA_MASK_WORDS_CUH

#include "../../core/attn_mask.h"
#include "../ptx/laneid.cuh"
#include "../ptx/smem.cuh"
#include "forward/fwd_score.cuh" /* columns_in */

/* For a mask that gives each row the ranges of the columns that it sees. word(r): the lane's word
 * of row r, whose first column is 2 (lane % 4). The loop takes one row at a time, because registers
 * are few. */
template <class Word>
__device__ __forceinline__ void words_of_rows(smem_addr to_s, const Word &word) {
    const int lane = laneid();
#pragma unroll 1
    for (int w = 0; w < GK_MASK_TILE / 8; ++w)
        st_shared_32(to_s + (32 * (w / 2) + lane) * 8 + 4 * (w & 1), word(8 * w + lane / 4));
}

/* Transposes 32 x 32 bits: bit r of a lane's result is bit `lane` of the word of lane r. All lanes
 * take part. */
__device__ __forceinline__ uint32_t transpose_bits(uint32_t x) {
    uint32_t low = 0x0000ffffu; /* the bits whose index has no `step` */
#pragma unroll
    for (int step = 16; step; step >>= 1, low ^= low << step) {
        const uint32_t other = __shfl_xor_sync(0xffffffffu, x, step);
        x = laneid() & step ? (other >> step & low) | (x & ~low)
                            : (x & low) | (other & low) << step;
    }
    return x;
}

/* For a mask that gives each column the ranges of the rows that see it, or that do not see it. Bit
 * i of seen(c, r) is 1 if row r + i sees column c. Each lane has a column at first and, after the
 * transpose, a row. The bytes of a word are stored one by one, because registers are few.
 *
 * Only the bytes of GROUPS groups of 32 columns are stored, from group `first` on. EQUAL: the
 * columns of a group often have the same bits, and then need no transpose. */
template <int GROUPS = GK_MASK_TILE / 32, bool EQUAL = false, class Seen>
__device__ __forceinline__ void words_of_columns(smem_addr to_s, const Seen &seen, int first = 0) {
#pragma unroll 1
    for (int i = 0; i < 32 * GROUPS; i += 8) { /* 4 sets of 32 rows x GROUPS groups */
        const int row = i / (8 * GROUPS) * 32, group = first + i / 8 % GROUPS;
        uint32_t bits = seen(32 * group + laneid(), row);
        if (EQUAL && __all_sync(0xffffffffu, bits == __shfl_sync(0xffffffffu, bits, 0)))
            bits = 0u - (bits >> laneid() & 1);
        else
            bits = transpose_bits(bits);
        const smem_addr at_s = to_s + 4 * gk_mask_word_of(row + laneid()) + group;
#pragma unroll
        for (int q = 0; q < 4; ++q)
            st_shared_8(at_s + 8 * q, (uint8_t)((bits >> 2 * q & 0x03030303u) * 0x01041040u >> 24));
    }
}

/* The bits i of a word for which i + first >= from. */
__device__ __forceinline__ uint32_t rows_from(int from, int first) {
    const int skipped = max(from, first) - first;
    return skipped < 32 ? 0xffffffffu << skipped : 0;
}
/* The bits i of a word for which from <= i + first < to. */
__device__ __forceinline__ uint32_t rows_in(int from, int to, int first) {
    return rows_from(from, first) & ~rows_from(to, first);
}

#endif
