// SPDX-License-Identifier: BSD-3-Clause
// tma_ring: a ring of STAGES stages that one thread fills by TMA and warpgroups read,
// synchronised by mbarriers.
//
//   full[s]    ends a phase when the bytes of the copies into stage s have arrived. It takes one
//              arrival, which announces the bytes.
//   empty[s]   ends a phase when all consumers have released stage s: `consumers` arrivals
//
//   producer                            consumer
//   ring.wait_empty()                   ring.wait_full()
//   arrive_expect_tx(ring.full(), n)    read stage ring.stage
//   tma .. -> stage, ring.full()        arrive(ring.empty())
//   ring.advance()                      ring.advance()
//
// Both sides keep stage and parity in registers, and advance once a step. The producer waits for
// the opposite parity. A barrier that has not ended any phase yet reports that the phase of parity
// 1 has ended, so the producer does not wait in the first round.
#ifndef GPUKERN_TILE_TMA_RING_CUH
#define GPUKERN_TILE_TMA_RING_CUH

#include "../ptx/mbarrier.cuh"

// Waits until the phase of this parity has ended.
static __device__ __forceinline__ void mbarrier_wait(smem_addr barrier_s, unsigned parity) {
    while (!mbarrier_try_wait_parity(barrier_s, parity)) {
    }
}

template <int STAGES> struct tma_ring {
    static constexpr int bytes = STAGES * 16; // size of the barriers
    smem_addr barriers_s;                     // full[STAGES], empty[STAGES]
    int stage = 0;
    unsigned parity = 0;

    __device__ __forceinline__ explicit tma_ring(smem_addr at_s) : barriers_s(at_s) {}

    // One thread, once. Then fence_mbarrier_init and a barrier of all users must follow.
    __device__ __forceinline__ void init(unsigned consumers, unsigned producers = 1) const {
        for (int s = 0; s < STAGES; ++s) mbarrier_init(barriers_s + 8 * s, producers);
        for (int s = 0; s < STAGES; ++s) mbarrier_init(barriers_s + 8 * (STAGES + s), consumers);
    }
    __device__ __forceinline__ smem_addr full() const { return barriers_s + 8 * stage; }
    __device__ __forceinline__ smem_addr empty() const { return barriers_s + 8 * (STAGES + stage); }
    // empty() of the previous step.
    __device__ __forceinline__ smem_addr before() const {
        return empty() + (stage == 0 ? 8 * (STAGES - 1) : -8);
    }
    __device__ __forceinline__ void wait_full() const { mbarrier_wait(full(), parity); }
    __device__ __forceinline__ void wait_empty() const { mbarrier_wait(empty(), parity ^ 1); }
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
    // Skips steps that other consumers process.
    __device__ __forceinline__ void skip(int count) {
        const int at = stage + count;
        stage = at % STAGES;
        parity ^= at / STAGES & 1;
    }
};

// The same ring for code with few registers: its threads count steps, and several rings can
// share one count. STAGES is a power of two.
template <int STAGES> struct tma_steps {
    static_assert((STAGES & (STAGES - 1)) == 0, "a stage is some bits of the count");
    smem_addr barriers_s;
    static __device__ __forceinline__ int stage(int step) { return step & (STAGES - 1); }
    __device__ __forceinline__ smem_addr full(int step) const {
        return barriers_s + 8 * stage(step);
    }
    __device__ __forceinline__ smem_addr empty(int step) const { return full(step) + 8 * STAGES; }
    __device__ __forceinline__ void wait_full(int step) const {
        mbarrier_wait(full(step), step / STAGES & 1);
    }
    __device__ __forceinline__ void wait_empty(int step) const {
        mbarrier_wait(empty(step), step / STAGES & 1 ^ 1);
    }
};

#endif
