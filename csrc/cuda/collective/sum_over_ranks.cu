/* SPDX-License-Identifier: BSD-3-Clause */
/* sum_over_ranks: out = the sum of all ranks' x, added in float32 in the order of the ranks and
 * rounded once. So every rank gets the same bits. There are two forms, each one kernel.
 *
 * With one exchange a rank writes n (W - 1) floats, where W is the number of ranks:
 *   each block    writes its part of x into its rank's place in every other rank's mailbox
 *                 sets its flag in those mailboxes
 *                 waits for the flags of the same block of all ranks
 *                 adds the parts that its own mailbox holds
 *
 * With two exchanges a rank writes n (W - 1) / W floats and as many results. Each rank owns 1 / W
 * of the elements:
 *   each block    writes its part of each other owner's share into that owner's mailbox
 *                 sets its flag, waits for the others' flags, and adds its part of its own share
 *                 writes these results behind its place in every other rank's mailbox
 *                 sets its flag, waits for the others' flags, and copies their results
 *
 * x [n] float32, out [n] float32, bfloat16 or float16, contiguous, aligned to 16 bytes.
 *
 * State. csrc/core/mailbox.h gives the layout of a mailbox. Calls are numbered, and alternate
 * between the two halves of a mailbox. A call may overwrite the half that the call before last
 * used: this rank waited for the other rank's flags in the last call, and the other rank sets those
 * only after its call before last has ended. So one exchange a call is enough.
 *
 * All blocks wait for each other, so the grid must run at once, even beside a few other kernels.
 * Its size is limited for that.
 *
 * Small calls are bound by latency: each exchange crosses NVLink twice, for data and for the flag.
 * From about 2 MB on the kernel is bound by bytes. */
#include "../../core/mailbox.h"
#include "../host/launch.cuh"
#include "../ptx/flag_sys.cuh"
#include "../tile/convert.cuh"

namespace {

/* 64 blocks of 512 threads store 512 KiB at a time, 16 bytes a thread. That is enough in flight for
 * a link. */
constexpr int THREADS = 512;

struct Params {
    const float *x;
    void *out;
    int64_t n, part; /* elements of x; elements of a rank's place in half a mailbox */
    char *mailboxes[GK_MOST_RANKS];
    int rank, ranks;
    uint64_t timeout_ns;
};

__device__ __forceinline__ unsigned *flag_of(char *mailbox, int rank, unsigned block) {
    return (unsigned *)(mailbox + GK_MAILBOX_FLAGS) + rank * GK_MAILBOX_BLOCKS + block;
}

/* Waits until the flag has the value `number` or one of the next three, because the other rank may
 * already be in its next call, but no further. The comparison is not "less than", because values
 * wrap around, and a block that took no part in the last calls has an old flag. */
__device__ __forceinline__ void wait_for(const unsigned *flag_g, unsigned number,
                                         uint64_t timeout_ns) {
    uint64_t begin = 0;
    for (unsigned polls = 0; ld_acquire_sys(flag_g) - number > 3; ++polls) {
        if (polls % 256 != 255) continue;
        const uint64_t now = mov_globaltimer();
        if (begin == 0) begin = now;
        /* A rank has stopped. No sum is better than a wrong one. */
        if (now - begin > timeout_ns) __trap();
    }
}

/* Loads four floats; the last group of x may have fewer. */
__device__ __forceinline__ float4 load4(const float *x_g, int64_t at, int64_t n) {
    if (at + 4 <= n) return *(const float4 *)(x_g + at);
    return make_float4(x_g[at], at + 1 < n ? x_g[at + 1] : 0, at + 2 < n ? x_g[at + 2] : 0, 0);
}

/* four results, loaded and stored together */
template <class T> struct __align__(4 * sizeof(T)) Four {
    T v[4];
};

template <class T>
__device__ __forceinline__ void store4(T *out_g, int64_t at, int64_t n, const Four<T> &four) {
    if (at + 4 <= n) {
        *(Four<T> *)(out_g + at) = four;
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (at + i < n) out_g[at + i] = four.v[i];
    }
}

/* Returns the sum over all ranks, in their order, of four elements of x from `at` on. The elements
 * of rank r begin at place_g + r * part. */
template <class T>
__device__ __forceinline__ Four<T> sum4(const Params &p, const float *place_g, int64_t at) {
    float sum[4];
    for (int r = 0; r < p.ranks; ++r) {
        const float4 v =
            r == p.rank ? load4(p.x, at, p.n) : __ldcg((const float4 *)(place_g + r * p.part));
        const float of_rank[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[e] = r == 0 ? of_rank[e] : sum[e] + of_rank[e];
    }
    Four<T> four;
#pragma unroll
    for (int e = 0; e < 4; ++e) four.v[e] = from_acc<T>(sum[e]);
    return four;
}

/* Loads from L2, because lines in L1 may be older than the exchange. */
template <class T> __device__ __forceinline__ Four<T> load_fresh(const Four<T> *four_g) {
    Four<T> four;
    if constexpr (sizeof(four) == sizeof(uint4))
        *(uint4 *)&four = __ldcg((const uint4 *)four_g);
    else
        *(uint2 *)&four = __ldcg((const uint2 *)four_g);
    return four;
}

/* Sets this block's flag in every other rank's mailbox once the block has written, and waits until
 * the same block of every other rank has set its own. */
__device__ __forceinline__ void exchange_flags(const Params &p, unsigned value) {
    __syncthreads();
    const int other = (int)threadIdx.x;
    if (other < p.ranks && other != p.rank) {
        st_release_sys(flag_of(p.mailboxes[other], p.rank, blockIdx.x), value);
        wait_for(flag_of(p.mailboxes[p.rank], other, blockIdx.x), value, p.timeout_ns);
    }
    __syncthreads();
}

/* The last block that has read the call's number ends the call. */
__device__ __forceinline__ void end_call(unsigned *calls, unsigned number) {
    unsigned *const done = calls + 1;
    __syncthreads();
    if (threadIdx.x == 0 && atomicAdd(done, 1u) == gridDim.x - 1) {
        *done = 0;
        *calls = number;
    }
}

/* One exchange. Call `number` sets flags to 2 number after its first exchange, and to 2 number + 1
 * after its second. */
template <class T> __global__ void __launch_bounds__(THREADS) sum_over_ranks_kernel(Params p) {
    char *const own = p.mailboxes[p.rank];
    unsigned *const calls = (unsigned *)own;
    const unsigned number = *(volatile unsigned *)calls + 1;
    const int64_t half = GK_MAILBOX_HEADER / 4 + (number & 1) * p.ranks * p.part; /* in floats */
    const int64_t fours = (p.n + 3) / 4, each = (fours + gridDim.x - 1) / gridDim.x;
    const int64_t begin = blockIdx.x * each, end = begin + each < fours ? begin + each : fours;
    for (int64_t i = begin + threadIdx.x; i < end; i += THREADS) {
        const float4 v = load4(p.x, 4 * i, p.n);
        for (int step = 1; step < p.ranks; ++step) {
            const int to = (p.rank + step) % p.ranks;
            *(float4 *)((float *)p.mailboxes[to] + half + p.rank * p.part + 4 * i) = v;
        }
    }
    exchange_flags(p, 2 * number);
    for (int64_t i = begin + threadIdx.x; i < end; i += THREADS)
        store4((T *)p.out, 4 * i, p.n, sum4<T>(p, (float *)own + half + 4 * i, 4 * i));
    end_call(calls, number);
}

/* Two exchanges. Rank q owns the groups of four elements [q share, (q + 1) share). A place in a
 * mailbox holds a rank's part of the owner's share, followed by that rank's results. */
template <class T> __global__ void __launch_bounds__(THREADS) sum_by_owners_kernel(Params p) {
    char *const own = p.mailboxes[p.rank];
    unsigned *const calls = (unsigned *)own;
    const unsigned number = *(volatile unsigned *)calls + 1;
    const int64_t half = GK_MAILBOX_HEADER / 4 + (number & 1) * p.ranks * p.part; /* in floats */
    const int64_t fours = (p.n + 3) / 4, share = (fours + p.ranks - 1) / p.ranks;
    const int64_t each = (share + gridDim.x - 1) / gridDim.x;
    const int64_t begin = blockIdx.x * each, end = begin + each < share ? begin + each : share;
    for (int64_t i = begin + threadIdx.x; i < end; i += THREADS) {
        for (int step = 1; step < p.ranks; ++step) {
            const int to = (p.rank + step) % p.ranks;
            const int64_t at = to * share + i;
            if (at < fours)
                *(float4 *)((float *)p.mailboxes[to] + half + p.rank * p.part + 4 * i) =
                    load4(p.x, 4 * at, p.n);
        }
    }
    exchange_flags(p, 2 * number);
    const int64_t mine = half + p.rank * p.part + 4 * share; /* my results in a mailbox */
    for (int64_t i = begin + threadIdx.x; i < end; i += THREADS) {
        const int64_t at = p.rank * share + i;
        if (at >= fours) break;
        const Four<T> sum = sum4<T>(p, (float *)own + half + 4 * i, 4 * at);
        store4((T *)p.out, 4 * at, p.n, sum);
        for (int step = 1; step < p.ranks; ++step) {
            const int to = (p.rank + step) % p.ranks;
            *((Four<T> *)((float *)p.mailboxes[to] + mine) + i) = sum;
        }
    }
    exchange_flags(p, 2 * number + 1);
    for (int64_t i = begin + threadIdx.x; i < end; i += THREADS) {
        for (int step = 1; step < p.ranks; ++step) {
            const int from = (p.rank + step) % p.ranks;
            const int64_t at = from * share + i;
            if (at < fours) {
                const Four<T> *const four_g =
                    (const Four<T> *)((float *)own + half + from * p.part + 4 * share) + i;
                store4((T *)p.out, 4 * at, p.n, load_fresh(four_g));
            }
        }
    }
    end_call(calls, number);
}

/* Bytes from which a call takes the form with two exchanges. A second exchange costs about 3.5 us.
 */
constexpr int64_t ONE_EXCHANGE_BYTES = 2 << 20;

template <class T> gk_status launch_sum(const char *name, const gk_context *ctx, const Params &p) {
    const bool by_owners = p.ranks > 2 && 4 * p.n * (p.ranks - 1) > ONE_EXCHANGE_BYTES;
    const int64_t elements = by_owners ? gk_ceil_div(p.n, p.ranks) : p.n;
    const unsigned blocks =
        (unsigned)gk_min_i64(gk_ceil_div(elements, 4 * THREADS), GK_MAILBOX_BLOCKS);
    if (by_owners) return launch<sum_by_owners_kernel<T>>(name, ctx, blocks, THREADS, 0, p);
    return launch<sum_over_ranks_kernel<T>>(name, ctx, blocks, THREADS, 0, p);
}

} // namespace

gk_status gk_cuda_sum_over_ranks(const gk_context *ctx, const gk_sum_over_ranks_args *s) {
    Params p = {(const float *)s->x.const_data, s->out.data, gk_numel(&s->x)};
    /* A rank's place does not depend on n, so calls of different lengths use the same places. */
    p.part = (int64_t)(s->mailbox_bytes - GK_MAILBOX_HEADER) / (int64_t)(8 * sizeof(float)) /
             s->num_ranks * 4;
    for (int r = 0; r < s->num_ranks; ++r) p.mailboxes[r] = (char *)s->mailboxes[r];
    p.rank = s->rank;
    p.ranks = s->num_ranks;
    /* a timeout of 584 years or more waits for ever */
    p.timeout_ns = s->timeout_s < 1.8e10 ? (uint64_t)(s->timeout_s * 1e9) : UINT64_MAX;
    const char *const name = "gk_sum_over_ranks";
    switch (s->out.dtype) {
    case GK_BF16: return launch_sum<__nv_bfloat16>(name, ctx, p);
    case GK_F16: return launch_sum<__half>(name, ctx, p);
    case GK_F32: return launch_sum<float>(name, ctx, p);
    default: return gk_no_case(name, s->out.dtype);
    }
}

uint64_t gk_cuda_capture_id(void *stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    if (cudaStreamGetCaptureInfo((cudaStream_t)stream, &status, &id) != cudaSuccess)
        (void)cudaGetLastError();
    return status == cudaStreamCaptureStatusActive ? id : 0;
}
