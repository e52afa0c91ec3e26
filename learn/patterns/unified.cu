// SPDX-License-Identifier: BSD-3-Clause
// unified: 64 MiB of host data go to a kernel (out = 2 in), in every way that CUDA offers.
//
//   pageable, copied       memory from malloc: one CPU core copies it in pieces to the driver's
//                          pinned memory, and the copy engine takes it from there
//   pinned, copied         cudaMallocHost: the copy engine reads it directly
//   pinned, in place       The kernel's loads go over PCIe. Nothing is copied or kept, which is
//                          right if every byte is read once.
//   unified, faults        cudaMallocManaged, last touched by the host: the kernel's first access
//                          to a page faults, and the page is moved
//   unified, prefetched    the same with cudaMemPrefetchAsync before the kernel: all is moved at
//                          once
//   unified, there         the same again, with the pages left on the GPU by the last run: like any
//                          device memory
//
// Measured on one H100: 8, 52, 50, 10, 46 and 1216 GB/s.
//
// The time in which the host takes its pages back is not measured.
#include "measure.cuh"

enum {
    THREADS = 256,
    BLOCKS = 132 * 8
};

__global__ void __launch_bounds__(THREADS) twice_kernel(const float *in, float *out, int n) {
    const int first = blockIdx.x * THREADS + threadIdx.x;
    for (int i = first; i < n / 4; i += gridDim.x * THREADS) {
        const float4 x = ((const float4 *)in)[i];
        ((float4 *)out)[i] = make_float4(2 * x.x, 2 * x.y, 2 * x.z, 2 * x.w);
    }
    if (first < n % 4) out[n - 1 - first] = 2 * in[n - 1 - first];
}
static void twice(const float *in, float *out, int n) {
    twice_kernel<<<BLOCKS, THREADS>>>(in, out, n);
}

// The input in every kind of memory. It is made anew for every input.
static struct {
    const float *in;
    int n;
    float *pageable, *pinned, *unified, *device;
} kinds;

static void make_kinds(const float *in, int rows, int cols) {
    const int n = rows * cols;
    const size_t bytes = n * sizeof *in;
    if (kinds.in == in && kinds.n == n) return;
    if (kinds.in) {
        free(kinds.pageable);
        MUST(cudaFreeHost(kinds.pinned));
        MUST(cudaFree(kinds.unified));
        MUST(cudaFree(kinds.device));
    }
    kinds.in = in;
    kinds.n = n;
    kinds.pageable = (float *)malloc(bytes);
    MUST(cudaMallocHost((void **)&kinds.pinned, bytes));
    MUST(cudaMallocManaged((void **)&kinds.unified, bytes));
    MUST(cudaMalloc((void **)&kinds.device, bytes));
    MUST(cudaMemcpy(kinds.pageable, in, bytes, cudaMemcpyDefault));
    memcpy(kinds.pinned, kinds.pageable, bytes);
    memcpy(kinds.unified, kinds.pageable, bytes);
}
static void take_back(const float *in, int rows, int cols) { // moves every page back to the host
    make_kinds(in, rows, cols);
    MUST(cudaDeviceSynchronize());
    for (int i = 0; i < kinds.n; i += 1024)
        *(volatile float *)&kinds.unified[i] = kinds.pageable[i];
}

static void copied(const float *from, float *out, int n) {
    MUST(cudaMemcpyAsync(kinds.device, from, n * sizeof *from, cudaMemcpyHostToDevice));
    twice(kinds.device, out, n);
}
static void pageable(const float *, float *out, int, int) { copied(kinds.pageable, out, kinds.n); }
static void pinned(const float *, float *out, int, int) { copied(kinds.pinned, out, kinds.n); }
static void in_place(const float *, float *out, int, int) { twice(kinds.pinned, out, kinds.n); }
static void unified(const float *, float *out, int, int) { twice(kinds.unified, out, kinds.n); }
static void prefetched(const float *, float *out, int, int) {
    const cudaMemLocation gpu = {cudaMemLocationTypeDevice, 0};
    MUST(cudaMemPrefetchAsync(kinds.unified, kinds.n * sizeof(float), gpu, 0, 0));
    twice(kinds.unified, out, kinds.n);
}

static bool good(const float *in, const float *out, int rows, int cols) {
    for (int i = 0; i < rows * cols; ++i) {
        if (out[i] != 2 * in[i]) return false;
    }
    return true;
}

int main(void) {
    // PCIe gives 52 GB/s one way (the pattern streams), and a core copies some 12. A fault brings
    // up to 2 MiB and takes some 30 us more.
    const double pcie = 52, fault = 2.097e6 / (2.097e6 / pcie + 30e3);
    const pattern p = {"unified", same_size, good, 4096, 4096, 4.0 * 4096 * 4096, small_integer};
    const char *const timeline = "nsys: the timeline's copies", *const faults =
                                                                    "nsys: page faults of the GPU";
    const variant variants[] = {
        {"pageable, copied", pageable, 12, "a core", timeline, NULL, make_kinds},
        {"pinned, copied", pinned, pcie, "PCIe", timeline, NULL, make_kinds},
        {"pinned, in place", in_place, pcie, "PCIe", "pcie__read_bytes.sum", NULL, make_kinds},
        {"unified, faults", unified, fault, "page faults", faults, NULL, take_back},
        {"unified, prefetched", prefetched, pcie, "PCIe", timeline, NULL, take_back},
        {"unified, there", unified, memory_gbs() / 2, "memory", faults, NULL, make_kinds},
    };
    const int sizes[][2] = {{1, 1}, {17, 1}, {1, 255}, {4097, 1}, {1024, 1024}};
    return run(p, variants, sizes);
}
