// SPDX-License-Identifier: BSD-3-Clause
// check_tile: the parts that the tests of csrc/cuda/ptx and csrc/cuda/tile share: counting,
// buffers, shared memory as bytes.
#ifndef GPUKERN_CHECK_TILE_CUH
#define GPUKERN_CHECK_TILE_CUH

#include "cuda/ptx/smem.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef __nv_bfloat16 bf16;

static int num_passed, num_failed, num_verb_failed;

static void check(bool good, const char *what, long at, double got, double expected) {
    num_passed += good;
    num_failed += !good;
    if (!good && ++num_verb_failed <= 5)
        printf("FAILED %s at %ld: %.9g, expected %.9g\n", what, at, got, expected);
}

static void verb(const char *name) {
    printf("%-44s %s\n", name, num_verb_failed ? "FAILED" : "ok");
    num_verb_failed = 0;
}

static void must(cudaError_t error, const char *what) {
    if (error == cudaSuccess) return;
    printf("FAILED %s: %s\n%d passed, %d failed\n", what, cudaGetErrorString(error), num_passed,
           num_failed + 1);
    exit(1);
}

// Memory for the next kernel: host bytes, copied to the device by to_device and back by to_host.
enum {
    MOST_BYTES = 1 << 20
};
struct buffer {
    unsigned char *host, *device;
};

static buffer make_buffer() {
    buffer b = {(unsigned char *)malloc(MOST_BYTES), NULL};
    must(cudaMalloc((void **)&b.device, MOST_BYTES), "cudaMalloc");
    memset(b.host, 0, MOST_BYTES);
    return b;
}

static void to_device(const buffer &b) {
    must(cudaMemcpy(b.device, b.host, MOST_BYTES, cudaMemcpyHostToDevice), "copy to the device");
}

// Ends the process if a kernel hangs.
static void hung(int) {
    static const char text[] = "FAILED: a kernel hung\n0 passed, 1 failed\n";
    _exit(write(STDOUT_FILENO, text, sizeof text - 1) < 0 ? 2 : 1);
}

static void to_host(const buffer &b) {
    must(cudaGetLastError(), "launch");
    signal(SIGALRM, hung);
    alarm(300);
    must(cudaDeviceSynchronize(), "kernel");
    alarm(0);
    must(cudaMemcpy(b.host, b.device, MOST_BYTES, cudaMemcpyDeviceToHost), "copy to the host");
}

static uint64_t seed = 1;
static int random_below(int n) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (int)((seed >> 33) % (unsigned)n);
}

// Shared memory as bytes, aligned for every tile.
#define SMEM extern __shared__ __align__(128) unsigned char smem[]
enum {
    SMEM_BYTES = 48 * 1024
};

// Fills all of shared memory with a pattern, so that bytes that are not written show.
static __device__ void fill_smem(smem_addr at_s, int bytes, uint32_t pattern) {
    for (int i = threadIdx.x * 4; i < bytes; i += blockDim.x * 4) st_shared_32(at_s + i, pattern);
    __syncthreads();
}

static __device__ void smem_to_global(uint32_t *out_g, smem_addr at_s, int bytes) {
    __syncthreads();
    for (int i = threadIdx.x * 4; i < bytes; i += blockDim.x * 4)
        out_g[i / 4] = ld_shared_32(at_s + i);
}

static void put(float *x, int i, int value) { x[i] = (float)value; }
static void put(bf16 *x, int i, int value) { x[i] = __float2bfloat16((float)value); }
static void put(__half *x, int i, int value) { x[i] = __float2half((float)value); }

#endif
