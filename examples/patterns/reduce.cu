// reduce: the sum of rows x cols floats, three ways. Each block takes part of them by a stride of the grid.
//
//   atomics    every element is an atomic addition to one address
//   shared     a tree in shared memory, then one atomic a block
//   shuffle    sums in registers, shuffled within warps, one word a warp in shared memory, one atomic a block
// The order of the sum is the hardware's: bits may differ between runs for inputs whose sums are not exact.
#include "pattern.cuh"

enum {
    THREADS = 256,
    BLOCKS = 132 * 8 // fills an H200
};

__global__ void __launch_bounds__(THREADS) atomics_kernel(const float *in, float *out, int n) {
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < n; i += gridDim.x * THREADS) atomicAdd(out, in[i]);
}

static __device__ float sum_of(const float *in, int n) {
    float sum = 0;
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < n; i += gridDim.x * THREADS) sum += in[i];
    return sum;
}

__global__ void __launch_bounds__(THREADS) shared_kernel(const float *in, float *out, int n) {
    __shared__ float part[THREADS];
    part[threadIdx.x] = sum_of(in, n);
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads(); // the sums of the step before
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    }
    if (threadIdx.x == 0) atomicAdd(out, part[0]);
}

static __device__ float warp_sum(float x) {
    for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffff, x, lanes);
    return x;
}

__global__ void __launch_bounds__(THREADS) shuffle_kernel(const float *in, float *out, int n) {
    __shared__ float part[THREADS / 32];
    const float sum = warp_sum(sum_of(in, n));
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
    __syncthreads(); // every warp's sum is there
    if (threadIdx.x < 32) {
        const float all = warp_sum(threadIdx.x < THREADS / 32 ? part[threadIdx.x] : 0);
        if (threadIdx.x == 0) atomicAdd(out, all);
    }
}

template <void (*KERNEL)(const float *, float *, int)>
static void launch(const float *in, float *out, int rows, int cols) {
    MUST(cudaMemsetAsync(out, 0, sizeof *out));
    KERNEL<<<BLOCKS, THREADS>>>(in, out, rows * cols);
}

static int out_size(int, int) { return 1; }
static bool good(const float *in, const float *out, int rows, int cols) {
    double sum = 0;
    for (int i = 0; i < rows * cols; ++i) sum += in[i];
    return *out == (float)sum;
}

int main(void) {
    const variant variants[] = {
        // one address lives in one slice of L2, which adds one float a clock
        {"atomics", launch<atomics_kernel>, GHZ * 4, "L2's atomics", "lts__t_sectors_op_red.sum"},
        {"shared", launch<shared_kernel>, READ_GBS, "memory", "dram__bytes_read.sum"},
        {"shuffle", launch<shuffle_kernel>, READ_GBS, "memory", "dram__bytes_read.sum"},
    };
    const int sizes[][2] = {{1, 1}, {17, 1}, {1, 255}, {4097, 1}, {1024, 1024}};
    return run("reduce", variants, 3, sizes, 5, out_size, good, 8192, 8192, 4.0 * 8192 * 8192);
}
