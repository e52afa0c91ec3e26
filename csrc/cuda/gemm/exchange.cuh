/* exchange.cuh: the sums of two blocks of a cluster that took a split of k each. */
#ifndef GPUKERN_CUDA_GEMM_EXCHANGE_CUH
#define GPUKERN_CUDA_GEMM_EXCHANGE_CUH

#include "../ptx/cluster.cuh"
#include "../tile/tma_ring.cuh"

/* Two blocks have each half of the sum over k. Each keeps its half of the columns and sends the other half over; the sum of
 * two does not depend on who adds. to, from: 16 bytes a thread and step of four. */
template <int MT, int N, int ALL>
__device__ __forceinline__ void exchange_halves(const float (&sum)[MT][ALL], float (&mine)[MT][N], int part,
                                                uint32_t to, uint32_t full_there, smem_addr from_s, smem_addr full_s,
                                                unsigned parity) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            float x[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                x[e] = part ? sum[m][i + e] : sum[m][N + i + e];
                mine[m][i + e] = part ? sum[m][N + i + e] : sum[m][i + e];
            }
            st_async_128(to + (m * N + i) / 4 * 128 * 16, x[0], x[1], x[2], x[3], full_there);
        }
    mbarrier_wait(full_s, parity);
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            const uint4 x = ld_shared_128(from_s + (m * N + i) / 4 * 128 * 16);
            mine[m][i] += __uint_as_float(x.x), mine[m][i + 1] += __uint_as_float(x.y);
            mine[m][i + 2] += __uint_as_float(x.z), mine[m][i + 3] += __uint_as_float(x.w);
        }
}

#endif
