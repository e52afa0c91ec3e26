/* SPDX-License-Identifier: BSD-3-Clause */
/* mask_words.cuh: one warp computes the words of a partial block of a stored mask
 * (../../core/attn_mask.h) into shared memory, from the ranges that the mask was made of. */
#ifndef GPUKERN_CUDA_MASK_WORDS_CUH
#define GPUKERN_CUDA_MASK_WORDS_CUH

#include "../../core/attn_mask.h"
#include "../ptx/laneid.cuh"
#include "../ptx/smem.cuh"
#include "forward/fwd_score.cuh" /* columns_in */

/* Each row has the ranges of the columns that it sees. word(r): the lane's word of row r, whose
 * first column is 2 (lane % 4). One row at a time, because registers are few. */
template <class Word>
__device__ __forceinline__ void words_of_rows(smem_addr to_s, const Word &word) {
    const int lane = laneid();
#pragma unroll 1
    for (int w = 0; w < GK_MASK_TILE / 8; ++w)
        st_shared_32(to_s + (32 * (w / 2) + lane) * 8 + 4 * (w & 1), word(8 * w + lane / 4));
}

/* Each column has the ranges of the rows that see it, or do not. Each lane owns a column, and a
 * vote gives 32 bits of a row. ranges(c): those of column c; sees(ranges, r): whether row r sees
 * the column. */
template <class Ranges, class Sees>
__device__ __forceinline__ void words_of_columns(smem_addr to_s, const Ranges &ranges,
                                                 const Sees &sees) {
    const int lane = laneid();
#pragma unroll 1
    for (int group = 0; group < 4; ++group) {
        const int4 c = ranges(32 * group + lane);
#pragma unroll 1
        for (int r = 0; r < GK_MASK_TILE; ++r) {
            const uint32_t bits = __ballot_sync(0xffffffffu, sees(c, r));
            const uint32_t byte = (bits >> 2 * lane & 0x03030303u) * 0x01041040u >> 24;
            if (lane < 4)
                st_shared_8(to_s + 4 * (gk_mask_word_of(r) + 2 * lane) + group, (uint8_t)byte);
        }
    }
}

#endif
