// SPDX-License-Identifier: BSD-3-Clause
// occupancy: a copy needs bytes in flight, bandwidth x latency (Little's law): on an H200 some 3 MB
// of reads. The variants provide them in two ways.
//
//   1 .. 8 blocks       256 threads a block, one load of 4 bytes in flight a thread. Shared memory
//                       limits the number of blocks an SM.
//   1 block, 8 ahead    One block an SM whose threads have 8 loads in flight: an eighth of the
//                       occupancy, as many bytes.
//
// Measured on one H100: 619, 1120, 1862 and 2351 GB/s for 1, 2, 4 and 8 blocks, 2075 GB/s for 1
// block with 8 loads ahead.
//
// High occupancy is one way to have enough bytes in flight. It is not the aim.
#include "measure.cuh"

enum {
    THREADS = 256,
    SM_BYTES = 227 * 1024, // shared memory of an SM for all blocks; each block takes 1 KiB more
};

template <int AHEAD>
__global__ void __launch_bounds__(THREADS) copy_kernel(const float *in, float *out, int n) {
    const int apart = gridDim.x * THREADS;
#pragma unroll 1
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < n; i += AHEAD * apart) {
        float x[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) x[a] = i + a * apart < n ? in[i + a * apart] : 0;
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            if (i + a * apart < n) out[i + a * apart] = x[a];
        }
    }
}

template <int BLOCKS, int AHEAD>
static void launch(const float *in, float *out, int rows, int cols) {
    const int smem = (SM_BYTES / BLOCKS - 1024) / 1024 * 1024;
    MUST(cudaFuncSetAttribute(copy_kernel<AHEAD>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              smem));
    copy_kernel<AHEAD><<<BLOCKS * FIGURES.sms, THREADS, smem>>>(in, out, rows * cols);
}

static bool good(const float *in, const float *out, int rows, int cols) {
    return memcmp(in, out, sizeof *in * rows * cols) == 0;
}

int main(void) {
    const pattern p = {"occupancy", same_size, good, 8192, 8192, 8.0 * 8192 * 8192, small_integer};
    // A load from memory takes 0.7 us. As many bytes are stored as loaded.
    const auto gbs = [&](int loads) {
        return capped(FIGURES.sms * 8.0 * THREADS * loads / 0.7 / 1e3);
    };
    const char *const under_way = "bytes under way",
                      *const counter = "sm__warps_active.avg.pct_of_peak_sustained_active";
    const variant variants[] = {
        {"1 block an SM", launch<1, 1>, gbs(1), under_way, counter},
        {"2 blocks", launch<2, 1>, gbs(2), under_way, counter},
        {"4 blocks", launch<4, 1>, gbs(4), under_way, counter},
        {"8 blocks", launch<8, 1>, gbs(8), under_way, counter},
        {"1 block, 8 ahead", launch<1, 8>, gbs(8), under_way, counter},
    };
    const int sizes[][2] = {{1, 1}, {17, 1}, {1, 255}, {4097, 1}, {1024, 1024}};
    return run(p, variants, sizes);
}
