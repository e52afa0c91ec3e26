/* SPDX-License-Identifier: BSD-3-Clause */
/* exchange.cuh: split-K within a cluster. Each block of the cluster has summed its own split of k.
 * The blocks exchange their sums through distributed shared memory and add them. Hopper's gemm
 * calls it. */
#ifndef GPUKERN_CUDA_GEMM_EXCHANGE_CUH
#define GPUKERN_CUDA_GEMM_EXCHANGE_CUH

#include "../../ptx/cluster.cuh"
#include "../../tile/tma_ring.cuh"

/* Value i among the N accumulators of the columns that block `part` finishes. */
template <int PARTS, int N, int ALL>
__device__ __forceinline__ float of_part(const float (&sum)[ALL], int i, int part) {
    if (PARTS == 2) return part ? sum[N + i] : sum[i];
    const float low = part & 1 ? sum[N + i] : sum[i],
                high = part & 1 ? sum[3 * N + i] : sum[2 * N + i];
    return part & 2 ? high : low;
}

/* Each block finishes an equal share of the columns. It sends every other block's share to that
 * block, and adds the sums that it receives to its own (`mine`). Received sums are added in the
 * order of the distance between the ranks, so that the result is the same in every run. Sums from
 * the block `distance` ranks before this one arrive at from_s + (distance - 1) * place_bytes. They
 * are stored as 16 bytes for each thread and each four sums. */
template <int PARTS, int MT, int N, int ALL>
__device__ __forceinline__ void exchange_parts(const float (&sum)[MT][ALL], float (&mine)[MT][N],
                                               int part, int place_bytes, smem_addr from_s,
                                               smem_addr full_s, unsigned parity) {
    static_assert(PARTS == 2 || PARTS == 4, "of_part");
#pragma unroll
    for (int distance = 1; distance < PARTS; ++distance) {
        const int there = (part + distance) % PARTS;
        const uint32_t to = mapa(from_s + (distance - 1) * place_bytes, there),
                       full_there = mapa(full_s, there);
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int i = 0; i < N; i += 4)
                st_async_128(to + (m * N + i) / 4 * 128 * 16, of_part<PARTS, N>(sum[m], i, there),
                             of_part<PARTS, N>(sum[m], i + 1, there),
                             of_part<PARTS, N>(sum[m], i + 2, there),
                             of_part<PARTS, N>(sum[m], i + 3, there), full_there);
    }
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int i = 0; i < N; ++i) mine[m][i] = of_part<PARTS, N>(sum[m], i, part);
    mbarrier_wait(full_s, parity);
#pragma unroll
    for (int distance = 1; distance < PARTS; ++distance)
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int i = 0; i < N; i += 4) {
                const uint4 x = ld_shared_128(from_s + (distance - 1) * place_bytes +
                                              (m * N + i) / 4 * 128 * 16);
                mine[m][i] += __uint_as_float(x.x);
                mine[m][i + 1] += __uint_as_float(x.y);
                mine[m][i + 2] += __uint_as_float(x.z);
                mine[m][i + 3] += __uint_as_float(x.w);
            }
}

#endif
