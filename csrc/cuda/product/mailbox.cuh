/* SPDX-License-Identifier: BSD-3-Clause */
/* mailbox.cuh: split-K by the two blocks of a cluster: exchanges and adds their sums. A mailbox is
 * a buffer of one block into which the other block writes. scaled_swapped.cuh uses it.
 *
 * The sums are WGMMA or mma.sync accumulators: value 4 j + e of a thread lies in row lane / 4 +
 * 8 (e / 2) of its warp's 16. Block 0 finishes rows 0 to 7 of each 16, block 1 rows 8 to 15.
 * Each block sends the half that it does not finish by st.async, whose bytes count at the
 * receiver's barrier. So no thread waits for its own stores.
 *
 * Shared memory of a warpgroup: N / 2 words for each of its 128 threads. Barriers: `full` (1
 * arrival, which announces the bytes) and `empty` (128 arrivals: every thread of the other block
 * has read what this block sent). */
#ifndef GPUKERN_CUDA_PRODUCT_MAILBOX_CUH
#define GPUKERN_CUDA_PRODUCT_MAILBOX_CUH

#include "../ptx/cluster.cuh"
#include "../tile/tma_ring.cuh"

/* Convert a sum to the word that st.async takes, and add such a word to a sum. The conversion only
 * moves bits. */
__device__ __forceinline__ float mail_word(float x) { return x; }
__device__ __forceinline__ float mail_word(int32_t x) { return __int_as_float(x); }
__device__ __forceinline__ float add_mail(float x, uint32_t word) {
    return x + __uint_as_float(word);
}
__device__ __forceinline__ int32_t add_mail(int32_t x, uint32_t word) { return x + (int32_t)word; }

/* N: sums of a thread, a multiple of 8. */
template <class D, int N> struct Mailbox {
    static_assert(N % 8 == 0, "a message is two pairs of a row");
    static constexpr int bytes = 128 * (N / 2) * 4;
    const smem_addr mail_s, full_s, empty_s;
    unsigned parity = 0;

    __device__ __forceinline__ Mailbox(smem_addr mail, smem_addr barriers_s)
        : mail_s(mail + threadIdx.x % 128 * 16), full_s(barriers_s), empty_s(barriers_s + 8) {}

    static __device__ __forceinline__ void begin(smem_addr barriers_s) {
        mbarrier_init(barriers_s, 1);
        mbarrier_init(barriers_s + 8, 128);
    }

    /* mine[2 j + e] becomes value 4 j + 2 rank + e, summed over both blocks. */
    __device__ __forceinline__ void exchange(const D (&sum)[N], D (&mine)[N / 2], unsigned rank) {
        const unsigned other = rank ^ 1;
        if (threadIdx.x % 128 == 0) mbarrier_arrive_expect_tx(full_s, bytes);
        /* Wait until the other block has read the sums of the previous tile. */
        mbarrier_wait(empty_s, parity ^ 1);
        const uint32_t to = mapa(mail_s, other), full_there = mapa(full_s, other);
#pragma unroll
        for (int i = 0; i < N; i += 8)
            st_async_128(to + i / 8 * 128 * 16, mail_word(rank ? sum[i] : sum[i + 2]),
                         mail_word(rank ? sum[i + 1] : sum[i + 3]),
                         mail_word(rank ? sum[i + 4] : sum[i + 6]),
                         mail_word(rank ? sum[i + 5] : sum[i + 7]), full_there);
        mbarrier_wait(full_s, parity);
#pragma unroll
        for (int i = 0; i < N; i += 8) {
            const uint4 mail = ld_shared_128(mail_s + i / 8 * 128 * 16);
            mine[i / 2] = add_mail(rank ? sum[i + 2] : sum[i], mail.x);
            mine[i / 2 + 1] = add_mail(rank ? sum[i + 3] : sum[i + 1], mail.y);
            mine[i / 2 + 2] = add_mail(rank ? sum[i + 6] : sum[i + 4], mail.z);
            mine[i / 2 + 3] = add_mail(rank ? sum[i + 7] : sum[i + 5], mail.w);
        }
        mbarrier_arrive_cluster(empty_s, other);
        parity ^= 1;
    }

    /* Waits until the other block has read the last sums. To be called before the block exits. */
    __device__ __forceinline__ void end() const { mbarrier_wait(empty_s, parity ^ 1); }
};

#endif
