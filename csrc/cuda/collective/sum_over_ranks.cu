/* SPDX-License-Identifier: BSD-3-Clause */
/* sum_over_ranks: out = sum of the ranks' x, added in float32 in the ranks' order and rounded
 * once, so that every rank gets the same bits. One kernel with one exchange:
 *
 *   each block    writes its part of x into its rank's place in every other rank's mailbox
 *                 sets its flag in those mailboxes
 *                 waits for the flags of the same block of all ranks
 *                 adds the parts that its own mailbox holds
 *
 * x [n] float32, out [n] float32, bfloat16 or float16, dense, aligned to 16 bytes.
 * csrc/core/mailbox.h gives the layout of a mailbox.
 *
 * Calls are numbered and alternate between the two halves of a mailbox. A call may overwrite the
 * half of the call before last. The other rank has finished reading it: this rank waited for the
 * other's flags of the last call, and a call begins only after the call before it has ended. So
 * one exchange is enough. All blocks wait for each other, so the grid is limited to what runs at
 * once, even beside a few other kernels.
 *
 * Bound by latency: two passes over NVLink, data and flag. At 2 MB it is bound by bytes. */
#include "../../core/mailbox.h"
#include "../host/launch.cuh"
#include "../ptx/flag_sys.cuh"
#include "../tile/convert.cuh"

namespace {

/* 64 blocks of 512 threads with 16 bytes each store 512 KiB at a time, which is enough in flight
 * for a link. */
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

/* Waits until the flag says that call `number` has written. Numbers wrap around. */
__device__ __forceinline__ void wait_for(const unsigned *flag_g, unsigned number,
                                         uint64_t timeout_ns) {
    uint64_t begin = 0;
    for (unsigned polls = 0; (int)(ld_acquire_sys(flag_g) - number) < 0; ++polls) {
        if (polls % 256 != 255) continue;
        const uint64_t now = mov_globaltimer();
        if (begin == 0) begin = now;
        /* A rank is gone. No sum is better than a wrong one. */
        if (now - begin > timeout_ns) __trap();
    }
}

/* Loads four floats; the last group of x may have fewer. */
__device__ __forceinline__ float4 load4(const float *x_g, int64_t at, int64_t n) {
    if (at + 4 <= n) return *(const float4 *)(x_g + at);
    return make_float4(x_g[at], at + 1 < n ? x_g[at + 1] : 0, at + 2 < n ? x_g[at + 2] : 0, 0);
}

template <class T>
__device__ __forceinline__ void store4(T *out_g, int64_t at, int64_t n, const float (&sum)[4]) {
    struct __align__(4 * sizeof(T)) Four {
        T v[4];
    } four;
#pragma unroll
    for (int i = 0; i < 4; ++i) four.v[i] = from_acc<T>(sum[i]);
    if (at + 4 <= n) {
        *(Four *)(out_g + at) = four;
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (at + i < n) out_g[at + i] = four.v[i];
    }
}

template <class T> __global__ void __launch_bounds__(THREADS) sum_over_ranks_kernel(Params p) {
    char *const own = p.mailboxes[p.rank];
    unsigned *const calls = (unsigned *)own, *const done = calls + 1;
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
    __syncthreads();
    if ((int)threadIdx.x < p.ranks && (int)threadIdx.x != p.rank) {
        st_release_sys(flag_of(p.mailboxes[threadIdx.x], p.rank, blockIdx.x), number);
        wait_for(flag_of(own, (int)threadIdx.x, blockIdx.x), number, p.timeout_ns);
    }
    __syncthreads();
    for (int64_t i = begin + threadIdx.x; i < end; i += THREADS) {
        float sum[4];
        for (int r = 0; r < p.ranks; ++r) {
            const float4 v =
                r == p.rank ? load4(p.x, 4 * i, p.n)
                            : __ldcg((const float4 *)((float *)own + half + r * p.part + 4 * i));
            const float of_rank[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int e = 0; e < 4; ++e) sum[e] = r == 0 ? of_rank[e] : sum[e] + of_rank[e];
        }
        store4((T *)p.out, 4 * i, p.n, sum);
    }
    __syncthreads();
    if (threadIdx.x == 0 && atomicAdd(done, 1u) == gridDim.x - 1) {
        *done = 0;
        *calls = number;
    } /* all blocks have read the number */
}

} // namespace

gk_status gk_cuda_sum_over_ranks(const gk_context *ctx, const gk_sum_over_ranks_args *s) {
    Params p = {(const float *)s->x.const_data, s->out.data, gk_numel(&s->x)};
    /* The place of a rank does not depend on n, so that calls of any length agree. */
    p.part = (int64_t)(s->mailbox_bytes - GK_MAILBOX_HEADER) / (int64_t)(8 * sizeof(float)) /
             s->num_ranks * 4;
    for (int r = 0; r < s->num_ranks; ++r) p.mailboxes[r] = (char *)s->mailboxes[r];
    p.rank = s->rank;
    p.ranks = s->num_ranks;
    p.timeout_ns = (uint64_t)(s->timeout_s * 1e9);
    const unsigned blocks = (unsigned)gk_min_i64(gk_ceil_div(p.n, 4 * THREADS), GK_MAILBOX_BLOCKS);
    const char *const name = "gk_sum_over_ranks";
    switch (s->out.dtype) {
    case GK_BF16:
        return launch<sum_over_ranks_kernel<__nv_bfloat16>>(name, ctx, blocks, THREADS, 0, p);
    case GK_F16: return launch<sum_over_ranks_kernel<__half>>(name, ctx, blocks, THREADS, 0, p);
    case GK_F32: return launch<sum_over_ranks_kernel<float>>(name, ctx, blocks, THREADS, 0, p);
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
