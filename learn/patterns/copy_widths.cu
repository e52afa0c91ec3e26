// SPDX-License-Identifier: BSD-3-Clause
// copy_widths: out = in with 4 and with 16 bytes a thread, and two access patterns that waste
// sectors.
//
//   4 bytes              one float a thread, neighbouring lanes on neighbouring floats
//   16 bytes             four floats a thread
//   4 bytes, 2 apart     lanes 2 floats apart: 8 sectors instead of 4
//   4 bytes, 32 apart    lanes 32 floats apart: 32 sectors instead of 4
//
// Measured on one H100: 2336, 2722, 2431 and 424 GB/s.
//
// A warp's access is cut into sectors of 32 bytes. Neighbouring lanes on neighbouring floats use
// every byte of 4 sectors. Lanes 32 floats apart touch 32 sectors and move 8 times as much, unless
// L1 still holds the sectors when the other floats are read.
#include "measure.cuh"

enum {
    THREADS = 256,
    BLOCKS = 132 * 8 // fills an H200
};

// Sectors that a warp touches if its lanes are `stride` floats apart.
constexpr int sectors_of(int stride) {
    int sectors = 0, last = -1;
    for (int lane = 0; lane < 32; ++lane) {
        const int sector = lane * stride * 4 / 32;
        sectors += sector != last;
        last = sector;
    }
    return sectors;
}
static_assert(sectors_of(1) == 4 && sectors_of(2) == 8 && sectors_of(32) == 32, "");

// Index i of a permutation of 0 .. n - 1 whose neighbours lie STRIDE apart: blocks of 32 * STRIDE
// floats, transposed.
template <int STRIDE> static __device__ int place(int i, int n) {
    const int block = 32 * STRIDE, begin = i / block * block, rest = i - begin;
    return begin + block <= n ? begin + rest % 32 * STRIDE + rest / 32 : i;
}

template <int STRIDE>
__global__ void __launch_bounds__(THREADS) stride_kernel(const float *in, float *out, int n) {
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < n; i += gridDim.x * THREADS) {
        const int at = place<STRIDE>(i, n);
        out[at] = in[at];
    }
}

__global__ void __launch_bounds__(THREADS) wide_kernel(const float *in, float *out, int n) {
    const int whole = n / 4, first = blockIdx.x * THREADS + threadIdx.x;
    for (int i = first; i < whole; i += gridDim.x * THREADS)
        ((float4 *)out)[i] = ((const float4 *)in)[i];
    if (first < n % 4) out[4 * whole + first] = in[4 * whole + first];
}

template <void (*KERNEL)(const float *, float *, int)>
static void launch(const float *in, float *out, int rows, int cols) {
    KERNEL<<<BLOCKS, THREADS>>>(in, out, rows * cols);
}

static bool good(const float *in, const float *out, int rows, int cols) {
    return memcmp(in, out, sizeof *in * rows * cols) == 0;
}

int main(void) {
    // A warp reads and writes 32 floats. If lanes are 32 apart, the 8 warps of a block read the
    // same 32 sectors, and L1 serves seven of them. Every store goes to L2 sector by sector.
    const pattern p = {"copy", same_size, good, 8192, 8192, 8.0 * 8192 * 8192, small_integer};
    const char *const sectors = "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum";
    const variant variants[] = {
        {"4 bytes", launch<stride_kernel<1>>, l2_gbs(2 * sectors_of(1), 256), "memory",
         "dram__bytes_read.sum"},
        {"16 bytes", launch<wide_kernel>, l2_gbs(2 * sectors_of(1), 256), "memory",
         "dram__bytes_read.sum"},
        {"4 bytes, 2 apart", launch<stride_kernel<2>>, l2_gbs(4 + sectors_of(2), 256), "memory",
         sectors},
        {"4 bytes, 32 apart", launch<stride_kernel<32>>, l2_gbs(4 + sectors_of(32), 256),
         "sectors of L2", sectors},
    };
    const int sizes[][2] = {{1, 1}, {17, 1}, {1, 255}, {4097, 1}, {1024, 1024}};
    return run(p, variants, sizes);
}
