/* SPDX-License-Identifier: BSD-3-Clause */
/* sample_tokens_shared.cuh: the arguments and the shared memory of the kernel in sample_tokens.cuh,
 * and what the threads of a block compute together: prefix sums, histograms, and the choice of a
 * histogram bin.
 *
 * A row has one block, or a cluster of blocks (CLUSTER). Each block of a cluster owns a part of the
 * row. The blocks exchange integer sums by reading each other's shared memory. Every block then
 * computes the same results from the same integers. */
#ifndef GPUKERN_CUDA_ROWS_SAMPLE_TOKENS_SHARED_CUH
#define GPUKERN_CUDA_ROWS_SAMPLE_TOKENS_SHARED_CUH

#include "../../formats/sample_weight.h"
#include "../host/launch.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/cluster_reads.cuh"
#include "../ptx/smem.cuh"
#include "gpukern_sample.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace {

enum {
    THREADS = 512, /* 128 registers a thread: four exponentials side by side need more than 64 */
    WARPS = THREADS / 32,
    BINS = 2048,
    BINS_EACH = BINS / THREADS, /* bins of a thread in choose() */
    DRAFTED = 16,               /* drafted tokens in shared memory */
    MOST_CHUNKS = THREADS
};
constexpr unsigned ALL = 0xffffffffu;
constexpr int64_t NO_KEY = INT64_MAX;
/* Bound of the error of x in float32: |x| is at most 31, so rounding alone is 31 x 2^-21 = 1.5e-5.
 */
constexpr float MARGIN = 1e-4f;
__constant__ double powers[32] = GK_SAMPLE_TABLE;

/* ---- parameters ------------------------------------------------------------------------------ */
/* [R] float64 or float32; data NULL: not given. */
struct Numbers {
    const void *data;
    int64_t stride;
    bool wide;
};
/* [R] or [R, D] int64 or int32 */
struct Integers {
    const void *data;
    int64_t stride, last_stride;
    bool wide;
};

struct Params {
    const void *logits;
    int64_t row_stride;
    int v;
    Numbers temperature, number, top_p, min_p, presence, frequency, repetition;
    Integers top_k, slots, drafted;
    int num_drafted;
    const int32_t *counts;
    const uint8_t *prompt;
    int64_t num_slots, counts_stride, prompt_stride;
    int64_t *out;
    uint8_t *error_word;
    int blocks;              /* blocks that share a row */
    int groups, most_values; /* capacity for changed tokens, see below */
};

__device__ __forceinline__ double number_of(const Numbers &x, int row, double otherwise) {
    if (!x.data) return otherwise;
    return x.wide ? ((const double *)x.data)[row * x.stride]
                  : (double)((const float *)x.data)[row * x.stride];
}
__device__ __forceinline__ int64_t integer_of(const Integers &x, int64_t at) {
    return x.wide ? ((const int64_t *)x.data)[at] : (int64_t)((const int32_t *)x.data)[at];
}

/* ---- shared memory --------------------------------------------------------------------------- */
struct Histogram {
    alignas(16) uint32_t count[BINS];
    alignas(16) uint32_t low[BINS], high[BINS]; /* the two 32-bit words of each sum */
};
struct Chunks {
    int64_t sum[MOST_CHUNKS]; /* sum of the weights of keys below the bound's key */
    int equal[MOST_CHUNKS];   /* number of tokens with exactly that key */
};

/* The tokens with keys in [low, high]. before, before_sum: number and weights of the tokens with
 * smaller keys. count: number of the tokens themselves. */
struct Group {
    int64_t low, high;
    int64_t before_sum;
    int before, count;
    int bin; /* bin of the last histogram that choose() read */
};

/* The tokens that are kept: all with a key below `last`, and the first `room` of those whose key
 * equals it. total: the sum of their weights. */
struct Bound {
    int64_t last, total;
    int room;
};

/* Constants of a row. They are in shared memory, and every pass loads them again, so that they
 * occupy no registers between passes. */
struct Facts {
    double largest, inverse, least; /* max y, 1 / temperature, min_p 2^43 */
    double lowest;                  /* tokens with a smaller x have no weight */
    double bins;                    /* bins of the first histogram per unit of x; a power of two */
    float largest32, inverse32;
    bool in_float; /* float32 can represent x and its terms, so that is_far() may be used */
};

/* A block's message to the other blocks of its row; its meaning is that of the exchange. */
struct alignas(16) Mail {
    int64_t word[4];
};

template <int ROOM> struct Shared {
    static constexpr int LISTED = ROOM; /* keys in the list */
    Histogram all;                      /* histogram of the block's part of the row */
    union {
        Histogram part;
        Chunks chunks;
    };
    alignas(16) int64_t list[LISTED];
    double table[32];
    Mail mail[2];
    int64_t wide[WARPS], wide2[WARPS];
    int narrow[WARPS];
    double real[WARPS];
    double presence, frequency, repetition;
    int64_t drafted[DRAFTED];
    Facts facts;
    Group chosen;
    Bound keep;
    int listed, in_list; /* the bin whose keys are in the list; number of keys in the list */
    int bin, equal_before;
    /* changed tokens counted; how many of them have a value in `values` */
    int values, listed_values;
    int64_t place, slot;
    double share; /* the sum of weights that bounds the kept tokens */
    int most;
    int most_likely;
    bool whole; /* the list also holds all tokens with smaller keys than the bin's */
};

/* Changed tokens are tokens of the block's part with a count, a mark or a draft. Their y after
 * penalties are stored behind struct Shared, for p.groups groups and p.most_values values. A group
 * is the 128 tokens (64 in float64) that a warp loads at once.
 *
 *   uint4 masks[groups]      word e has a bit for element e of each lane's vector
 *   int first[groups]        index of the group's first value, in the order of words and bits
 *   double values[most_values]
 */
enum {
    NONE = -1, /* value of first[]: no token of the group changed */
    /* value of first[]: no room, y of the group's tokens are computed again when needed */
    FULL = -2
};

/* ---- reductions of a block ------------------------------------------------------------------- */
/* Replaces each thread's count and sum by their exclusive prefix sums over the block, and returns
 * the totals. */
template <class S>
__device__ __forceinline__ void scan(S &s, int &count, int64_t &sum, int &counts, int64_t &sums) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int own = count;
    const int64_t own_sum = sum;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int n = __shfl_up_sync(ALL, count, d);
        const int64_t w = __shfl_up_sync(ALL, sum, d);
        if (lane >= d) {
            count += n;
            sum += w;
        }
    }
    __syncthreads(); /* the previous call's words have been read */
    if (lane == 31) {
        s.narrow[warp] = count;
        s.wide[warp] = sum;
    }
    __syncthreads();
    int n = lane < WARPS ? s.narrow[lane] : 0;
    int64_t w = lane < WARPS ? s.wide[lane] : 0;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int m = __shfl_up_sync(ALL, n, d);
        const int64_t u = __shfl_up_sync(ALL, w, d);
        if (lane >= d) {
            n += m;
            w += u;
        }
    }
    counts = __shfl_sync(ALL, n, 31);
    sums = __shfl_sync(ALL, w, 31);
    const int n_before = __shfl_sync(ALL, n, warp ? warp - 1 : 0);
    const int64_t w_before = __shfl_sync(ALL, w, warp ? warp - 1 : 0);
    count += (warp ? n_before : 0) - own;
    sum += (warp ? w_before : 0) - own_sum;
}

__device__ __forceinline__ int64_t lower(int64_t a, int64_t b) { return a < b ? a : b; }

/* The smallest `low` and the largest `high` of all threads of a block. */
template <class S> __device__ __forceinline__ void range(S &s, int64_t &low, int64_t &high) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
        low = lower(low, __shfl_xor_sync(ALL, low, d));
        high = -lower(-high, -__shfl_xor_sync(ALL, high, d));
    }
    __syncthreads();
    if (lane == 0) {
        s.wide[warp] = low;
        s.wide2[warp] = high;
    }
    __syncthreads();
    low = s.wide[lane % WARPS];
    high = s.wide2[lane % WARPS];
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
        low = lower(low, __shfl_xor_sync(ALL, low, d));
        high = -lower(-high, -__shfl_xor_sync(ALL, high, d));
    }
}

/* ---- the blocks of a row --------------------------------------------------------------------- */
/* Waits for all threads of the row. They then see each other's shared memory. */
template <bool CLUSTER> __device__ __forceinline__ void sync_row() {
    if constexpr (CLUSTER)
        barrier_cluster_ordered();
    else
        __syncthreads();
}

/* Loads 16 bytes from the shared memory of block `rank`. at: the address of the same bytes in this
 * block. */
__device__ __forceinline__ uint4 of_peer(const void *at, int rank) {
    return ld_cluster_128(mapa(cvta_to_shared(at), (unsigned)rank));
}

__device__ __forceinline__ int64_t word_of(uint32_t low, uint32_t high) {
    return (int64_t)high << 32 | low;
}

/* Sends `own` to all blocks of the row, and calls f(rank, mail) in every thread for each block's
 * message, in the order of ranks.
 *
 * There are two mailboxes, and `turn` alternates between them. A block that has passed the barrier
 * of one exchange may already write its next message while another block still reads this one. */
template <bool CLUSTER, class S, class F>
__device__ __forceinline__ void exchange(S &s, int blocks, int &turn, const Mail &own, F f) {
    if constexpr (!CLUSTER) {
        f(0, own);
    } else {
        if (threadIdx.x == 0) s.mail[turn] = own;
        barrier_cluster_ordered();
#pragma unroll 1
        for (int r = 0; r < blocks; ++r) {
            const uint4 a = of_peer(&s.mail[turn].word[0], r);
            const uint4 b = of_peer(&s.mail[turn].word[2], r);
            f(r,
              Mail{{word_of(a.x, a.y), word_of(a.z, a.w), word_of(b.x, b.y), word_of(b.z, b.w)}});
        }
        turn ^= 1;
    }
}

/* ---- histograms ------------------------------------------------------------------------------ */
__device__ __forceinline__ void clear(Histogram &h) {
    for (int i = threadIdx.x; i < BINS; i += THREADS) h.count[i] = h.low[i] = h.high[i] = 0;
    __syncthreads();
}

__device__ __forceinline__ void add(Histogram &h, int bin, uint32_t count, int64_t weight) {
    const uint32_t low = (uint32_t)weight;
    atomicAdd(&h.count[bin], count);
    const uint32_t old = atomicAdd(&h.low[bin], low);
    const uint32_t high = (uint32_t)(weight >> 32) + (old + low < old);
    if (high) atomicAdd(&h.high[bin], high);
}

/* Adds N tokens of each lane to a histogram. All lanes of a warp call it. If all tokens fall into
 * one bin, as equal logits do, the warp sums them first: 32 atomics on one address would run one
 * after the other. The N additions overlap. */
template <bool WEIGHTS, int N>
__device__ __forceinline__ void add_of_warp(Histogram &h, const bool (&has)[N], const int (&bin)[N],
                                            int64_t (&weight)[N]) {
    uint32_t count[N], old[N];
#pragma unroll
    for (int e = 0; e < N; ++e) {
        const unsigned lanes = __ballot_sync(ALL, has[e]);
        const int leader = __ffs(lanes | 1u << 31) - 1;
        const int common = __shfl_sync(ALL, bin[e], leader);
        const bool alike = __all_sync(ALL, !has[e] || bin[e] == common);
        count[e] = has[e];
        if (alike) {
            count[e] = (int)(threadIdx.x % 32) == leader ? (uint32_t)__popc(lanes) : 0;
            if (WEIGHTS) {
                int64_t sum = has[e] ? weight[e] : 0;
#pragma unroll
                for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(ALL, sum, d);
                weight[e] = sum;
            }
        }
    }
#pragma unroll
    for (int e = 0; e < N; ++e) {
        if (!count[e]) continue;
        atomicAdd(&h.count[bin[e]], count[e]);
        if (WEIGHTS) old[e] = atomicAdd(&h.low[bin[e]], (uint32_t)weight[e]);
    }
#pragma unroll
    for (int e = 0; e < N; ++e) {
        if (!WEIGHTS || !count[e]) continue;
        const uint32_t low = (uint32_t)weight[e];
        const uint32_t high = (uint32_t)(weight[e] >> 32) + (old[e] + low < old[e]);
        if (high) atomicAdd(&h.high[bin[e]], high);
    }
}

/* Chooses the last bin whose first token is kept. A token is kept if fewer than s.most tokens come
 * before it, with weights that sum to less than s.share. The first token of the range is always
 * kept.
 *
 * On entry s.chosen is the range that the histogram covers. On return bin, before, before_sum and
 * count of s.chosen describe the chosen bin; low and high are unchanged. s.bin is -1 if the
 * histogram is empty. CLUSTER: sums the histograms of all blocks first. */
template <bool CLUSTER, class S>
__device__ __forceinline__ void choose(S &s, const Histogram &h, int blocks) {
    sync_row<CLUSTER>(); /* the histogram is complete */
    int count[BINS_EACH], before = 0, all;
    int64_t sum[BINS_EACH], before_sum = 0, all_sum;
    const int first = BINS_EACH * threadIdx.x;
    static_assert(BINS_EACH % 4 == 0, "bins of a thread are read 4 at a time");
#pragma unroll
    for (int i = 0; i < BINS_EACH; ++i) {
        count[i] = 0;
        sum[i] = 0;
    }
#pragma unroll 1
    for (int r = 0; r < (CLUSTER ? blocks : 1); ++r) {
#pragma unroll
        for (int i = 0; i < BINS_EACH; i += 4) {
            uint4 n, low, high;
            if constexpr (CLUSTER) {
                n = of_peer(&h.count[first + i], r);
                low = of_peer(&h.low[first + i], r);
                high = of_peer(&h.high[first + i], r);
            } else {
                n = *(const uint4 *)&h.count[first + i];
                low = *(const uint4 *)&h.low[first + i];
                high = *(const uint4 *)&h.high[first + i];
            }
            count[i] += (int)n.x;
            count[i + 1] += (int)n.y;
            count[i + 2] += (int)n.z;
            count[i + 3] += (int)n.w;
            sum[i] += word_of(low.x, high.x);
            sum[i + 1] += word_of(low.y, high.y);
            sum[i + 2] += word_of(low.z, high.z);
            sum[i + 3] += word_of(low.w, high.w);
        }
    }
#pragma unroll
    for (int i = 0; i < BINS_EACH; ++i) {
        before += count[i];
        before_sum += sum[i];
    }
    if (threadIdx.x == 0) s.bin = -1;
    scan(s, before, before_sum, all, all_sum);
    const int from = s.chosen.before, most = s.most;
    const double share = s.share;
    before += from;
    before_sum += s.chosen.before_sum;
    int mine = -1, found_before = 0, found_count = 0;
    int64_t found_sum = 0;
#pragma unroll
    for (int i = 0; i < BINS_EACH; ++i) {
        if (count[i] && (before == from || (before < most && (double)before_sum < share))) {
            mine = first + i;
            found_before = before;
            found_sum = before_sum;
            found_count = count[i];
        }
        before += count[i];
        before_sum += sum[i];
    }
    if (mine >= 0) atomicMax(&s.bin, mine);
    __syncthreads();
    if (mine >= 0 && s.bin == mine) {
        s.chosen.bin = mine;
        s.chosen.before = found_before;
        s.chosen.before_sum = found_sum;
        s.chosen.count = found_count;
    }
    __syncthreads();
}

} // namespace

#endif
