/* SPDX-License-Identifier: BSD-3-Clause */
/* drop_pairs.cuh: the dropout of a block of scores in the order of Hopper's accumulators.
 * csrc/formats/attn_dropout.h defines which probabilities are kept.
 *
 * A pair is a row and a key. A lane's pair (n, r, e) is its accumulator 4 n + 2 r + e, which is
 * packed as half e of word 2 n + r. In the forward kernel, r counts rows that are 8 apart, and the
 * key is 8 n + e. In the backward kernel, whose scores are transposed, r counts keys that are 8
 * apart, and the row is 8 n + e.
 *
 * DropPairs has one bit for each pair of a lane. With n = 4 i + j, it is bit 7 - (4 r + i) of byte
 * j of `word[e]`. A shift to the left by 4 r + i moves it to the sign of its byte, and `prmt`
 * extends it to a mask of 16 or 32 bits.
 *
 * A call of Philox gives the bits of eight keys of a row, so a lane also draws bits that other
 * lanes need. It puts the bits for each of these lanes into one byte. Shuffles then transpose the
 * bytes: 4 x 4 among the lanes of a quad (draw_rows), or 8 x 8 among eight lanes, one of each quad
 * (draw_keys).
 *
 * flash_attn_fwd_drop_sm90a and flash_attn_bwd_drop_sm90a use this file. Row numbers must be below
 * 2^31. */
#ifndef GPUKERN_CUDA_DROP_PAIRS_CUH
#define GPUKERN_CUDA_DROP_PAIRS_CUH

#include "../ptx/laneid.cuh"
#include "../ptx/regs.cuh"
#include "drop.cuh"

/* Replaces Philox counters by the words that they give. The calls are independent, so one computes
 * while another waits, and they use the same round keys. */
template <int CALLS>
__device__ __forceinline__ void philox_calls(const PhiloxSeed &s, uint4 (&c)[CALLS]) {
    uint32_t k0 = (uint32_t)s.seed, k1 = (uint32_t)(s.seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
#pragma unroll
        for (int i = 0; i < CALLS; ++i) {
            const uint64_t a = (uint64_t)GK_PHILOX_A * c[i].x, b = (uint64_t)GK_PHILOX_B * c[i].z;
            c[i] = make_uint4((uint32_t)(b >> 32) ^ c[i].y ^ k0, (uint32_t)b,
                              (uint32_t)(a >> 32) ^ c[i].w ^ k1, (uint32_t)a);
        }
        k0 += GK_PHILOX_KEY_A;
        k1 += GK_PHILOX_KEY_B;
    }
}

/* Transposes 4 x 4 bytes: byte j of lane i becomes byte i of lane j, for the lanes i STRIDE apart.
 */
template <int STRIDE> __device__ __forceinline__ uint32_t transpose_bytes(uint32_t x) {
    const uint32_t lane = (uint32_t)laneid() / STRIDE;
    x = prmt(x, __shfl_xor_sync(0xffffffffu, x, 2 * STRIDE), lane & 2 ? 0x3276 : 0x5410);
    return prmt(x, __shfl_xor_sync(0xffffffffu, x, STRIDE), lane & 1 ? 0x3715 : 0x6240);
}

/* drop_row0 in 32 bits, see drop_rows_fit. */
__device__ __forceinline__ uint32_t drop_row(const Problem &p, int b, int head, int q0) {
    return (uint32_t)b * (uint32_t)p.lse.batch + (uint32_t)head * (uint32_t)p.lse.head +
           (uint32_t)q0 * (uint32_t)p.lse.row;
}
/* True if all row numbers are below 2^31. */
inline bool drop_rows_fit(const gk_flash_attn_args *a) {
    int64_t rows = 1;
    for (int d = 0; d < a->q.ndim - 1; ++d) rows *= a->q.shape[d];
    return rows <= INT32_MAX;
}

struct DropPairs {
    uint32_t word[2];

    static __device__ __forceinline__ uint4 counter(const PhiloxSeed &s, uint32_t row,
                                                    uint32_t group) {
        return make_uint4(gk_attn_counter_low(row, group), gk_attn_counter_high(row),
                          (uint32_t)s.offset, (uint32_t)(s.offset >> 32));
    }

    /* Sets the bits of `to` for the probabilities that a call keeps. place(w, h): the bit of `to`
     * that belongs to half h of word w. */
    template <class To>
    static __device__ __forceinline__ void note(const uint4 &c, uint32_t last, uint32_t (&to)[2],
                                                const To &place) {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            bool kept[2];
            __vibmin_u16x2(philox_word(c, w), last, kept + 1, kept);
#pragma unroll
            for (int h = 0; h < 2; ++h)
                if (kept[h]) to[place(w, h) / 32] |= 1u << place(w, h) % 32;
        }
    }

    /* Draws the bits of a warp's 16 rows x 32 CALLS keys, TOGETHER calls at a time; TOGETHER
     * divides 2 CALLS. row: the number of the lane's first row; row_step: from one row's number to
     * the next; group: the first key divided by 8. */
    template <int CALLS, int TOGETHER>
    __device__ __forceinline__ void draw_rows(const PhiloxSeed &s, uint32_t most, uint32_t row,
                                              uint32_t row_step, uint32_t group) {
        const uint32_t last = most >> 16 | (most & 0xffff0000u);
        word[0] = word[1] = 0;
        group += (uint32_t)laneid() % 4;
#pragma unroll
        for (int first = 0; first < 2 * CALLS; first += TOGETHER) {
            uint4 c[TOGETHER];
#pragma unroll
            for (int n = 0; n < TOGETHER; ++n) {
                const int r = (first + n) / CALLS, i = (first + n) % CALLS;
                c[n] = counter(s, row + 8 * r * row_step, group + 4 * i);
            }
            philox_calls(s, c);
#pragma unroll
            for (int n = 0; n < TOGETHER; ++n) {
                const int r = (first + n) / CALLS, i = (first + n) % CALLS;
                /* lane w of the quad needs word w */
                note(c[n], last, word,
                     [&](int w, int h) { return 32 * h + 8 * w + 7 - 4 * r - i; });
            }
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) word[e] = transpose_bytes<1>(word[e]);
    }

    /* Draws the bits of a warp's 16 keys x 32 CALLS rows, TOGETHER calls at a time. row: the number
     * of the first row; group: the warp's first key divided by 8. */
    template <int CALLS, int TOGETHER>
    __device__ __forceinline__ void draw_keys(const PhiloxSeed &s, uint32_t most, uint32_t row,
                                              uint32_t row_step, uint32_t group) {
        const uint32_t last = most >> 16 | (most & 0xffff0000u);
        /* lane 4 k + q draws rows 8 n + 2 q + k / 4, n = 4 i + k % 4 */
        const uint32_t lane = (uint32_t)laneid();
        row += (8 * (lane / 4 % 4) + 2 * (lane % 4) + lane / 16) * row_step;
        /* bytes for the lanes 4 k + q with k < 4; for the lanes with k >= 4 */
        uint32_t to[2] = {0, 0};
#pragma unroll
        for (int first = 0; first < 2 * CALLS; first += TOGETHER) {
            uint4 c[TOGETHER];
#pragma unroll
            for (int n = 0; n < TOGETHER; ++n) {
                const int r = (first + n) % 2, i = (first + n) / 2;
                c[n] = counter(s, row + 32 * i * row_step, group + r);
            }
            philox_calls(s, c);
#pragma unroll
            for (int n = 0; n < TOGETHER; ++n) {
                const int r = (first + n) % 2, i = (first + n) / 2;
                /* half h of word w is key 2 w + h */
                note(c[n], last, to, [&](int w, int h) { return 16 * w + 8 * h + 7 - 4 * r - i; });
            }
        }
        const bool low = lane < 16;
        const uint32_t got = __shfl_xor_sync(0xffffffffu, low ? to[1] : to[0], 16);
        word[0] = transpose_bytes<4>(low ? to[0] : got);
        word[1] = transpose_bytes<4>(low ? got : to[1]);
    }

    /* two: the masks of the two pairs in word 2 n + r, 16 bits each. one: the mask of one pair, 32
     * bits. */
    __device__ __forceinline__ uint32_t two(int n, int r) const {
        const int shift = 4 * r + n / 4, j = n % 4;
        return prmt(word[0] << shift, word[1] << shift, 0x8888 | j * 0x11 | (4 + j) * 0x1100);
    }
    __device__ __forceinline__ uint32_t one(int n, int r, int e) const {
        return prmt(word[e] << (4 * r + n / 4), 0, 0x8888 | n % 4 * 0x1111);
    }
    /* Zeroes the packed pairs that are dropped. */
    template <int M> __device__ __forceinline__ void drop(uint32_t (&p)[M]) const {
#pragma unroll
        for (int i = 0; i < M; ++i) p[i] &= two(i / 2, i % 2);
    }
};

#endif
