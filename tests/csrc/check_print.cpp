/* SPDX-License-Identifier: BSD-3-Clause */
/* check_print: tests the output of csrc/cuda/layout/print.cuh, compiled by the host compiler
 * and, by nvcc, called from a kernel. */
#include "cuda/layout/print.cuh"

static GK_HD void print_all() {
    const layout plain = {2, {4, 8}, {8, 1}}, line = {1, {5}, {3}},
                 three = {3, {2, 2, 2}, {1, 4, 2}};
    device_print(plain);
    device_print(line);
    device_print(three);
    device_print<smem_tile<8, 64>>();
}

#ifdef __CUDACC__
static __global__ void print_kernel() {
    if (threadIdx.x == 0) print_all();
}

int main() {
    print_kernel<<<1, 32>>>();
    return cudaDeviceSynchronize() != cudaSuccess;
}
#else
int main() {
    print_all();
    return 0;
}
#endif
