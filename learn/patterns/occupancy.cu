// SPDX-License-Identifier: BSD-3-Clause
// occupancy: a copy needs bytes under way: bandwidth x latency (Little's law), on an H200 some 3 MB
// of reads. Who has them under way?
//
//   1 .. 8 blocks        256 threads each, a load of 4 bytes a thread; so many blocks an SM as their shared memory leaves room for
//   1 block, 8 ahead     one block an SM whose threads have 8 loads under way: an eighth of the occupancy, as many bytes
// So high occupancy is one way to have enough under way, not the aim.
#include "measure.cuh"

enum {
    THREADS = 256,
    SM_BYTES = 227 * 1024, // of shared memory that blocks may have; each takes 1 KiB besides
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
    // a load's way from memory takes 0.7 us; as many bytes are stored as are loaded
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
