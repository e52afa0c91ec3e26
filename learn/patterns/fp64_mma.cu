// SPDX-License-Identifier: BSD-3-Clause
// fp64_mma: float64 products by ordinary threads and by the tensor cores, which Hopper has for
// float64, too. A warp multiplies its own 16 x 16 by 16 x 8 over and over and adds the results. All
// operands stay in registers, so only the arithmetic rate is measured.
//
//   multiply-adds       64 a clock and SM: 33.5 TFLOP/s at 1.98 GHz
//   m8n8k4              mma.sync: 128 multiply-adds a clock and SM by the data sheet, twice as many
//   m16n8k4, k8, k16    the same with instructions of 2, 4 and 8 times the size (sm_90)
//
// Measured on one H100: 26.2, 31.1, then 59.4 to 60.6 TFLOP/s. The instruction of Ampere, m8n8k4,
// runs at half rate on Hopper.
//
// Every variant sums in float64: no TF32 and no splitting. The order of the sums differs, but here
// all are exact.
#include "measure.cuh"

enum {
    M = 16,
    N = 8,
    K = 16,
    THREADS = 256,
    ROUNDS = 512
};

// A lane's part of the operands:
//   a[i] is A[lane / 4 + 8 (i % 2)][i / 2 * 4 + lane % 4]
//   b[i] is B[i * 4 + lane % 4][lane / 4]
//   c[i] is C[lane / 4 + 8 (i / 2)][lane % 4 * 2 + i % 2]
struct M8N8K4 {
    static __device__ void round(double (&c)[4][4], const double *a, const double *b) {
        for (int q = 0; q < 4; ++q)
            for (int half = 0; half < 2; ++half)
                asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, "
                    "%1};"
                    : "+d"(c[q][2 * half]), "+d"(c[q][2 * half + 1])
                    : "d"(a[2 * q + half]), "d"(b[q]));
    }
};
struct M16N8K4 {
    static __device__ void round(double (&c)[4][4], const double *a, const double *b) {
        for (int q = 0; q < 4; ++q)
            asm("mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5}, "
                "{%6}, {%0, %1, %2, %3};"
                : "+d"(c[q][0]), "+d"(c[q][1]), "+d"(c[q][2]), "+d"(c[q][3])
                : "d"(a[2 * q]), "d"(a[2 * q + 1]), "d"(b[q]));
    }
};
struct M16N8K8 {
    static __device__ void round(double (&c)[4][4], const double *a, const double *b) {
        for (int q = 0; q < 2; ++q)
            asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, "
                "%7}, {%8, %9}, "
                "{%0, %1, %2, %3};"
                : "+d"(c[q][0]), "+d"(c[q][1]), "+d"(c[q][2]), "+d"(c[q][3])
                : "d"(a[4 * q]), "d"(a[4 * q + 1]), "d"(a[4 * q + 2]), "d"(a[4 * q + 3]),
                  "d"(b[2 * q]), "d"(b[2 * q + 1]));
    }
};
struct M16N8K16 {
    static __device__ void round(double (&c)[4][4], const double *a, const double *b) {
        asm("mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7, "
            "%8, %9, %10, %11}, "
            "{%12, %13, %14, %15}, {%0, %1, %2, %3};"
            : "+d"(c[0][0]), "+d"(c[0][1]), "+d"(c[0][2]), "+d"(c[0][3])
            : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]),
              "d"(a[7]), "d"(b[0]), "d"(b[1]), "d"(b[2]), "d"(b[3]));
    }
};

// Element of the operands of warp w.
static __host__ __device__ double a_of(const float *in, int n, int w, int m, int k) {
    return in[(w * 7 + m * K + k) % n];
}
static __host__ __device__ double b_of(const float *in, int n, int w, int k, int j) {
    return in[(w * 3 + k * N + j) % n];
}

template <class Mma>
__global__ void __launch_bounds__(THREADS) mma_kernel(const float *in, float *out, int n) {
    const int w = (blockIdx.x * THREADS + threadIdx.x) / 32, lane = threadIdx.x % 32;
    double a[8], b[4], c[4][4] = {}; // four independent sums, so that none waits for another
    if (w * M * N >= n) return;
    for (int i = 0; i < 8; ++i) a[i] = a_of(in, n, w, lane / 4 + i % 2 * 8, i / 2 * 4 + lane % 4);
    for (int i = 0; i < 4; ++i) b[i] = b_of(in, n, w, i * 4 + lane % 4, lane / 4);
#pragma unroll 1
    for (int r = 0; r < ROUNDS; ++r) Mma::round(c, a, b);
    for (int i = 0; i < 4; ++i)
        out[w * M * N + (lane / 4 + i / 2 * 8) * N + lane % 4 * 2 + i % 2] =
            (float)((c[0][i] + c[1][i] + c[2][i] + c[3][i]) / ROUNDS);
}

// A lane computes 4 consecutive elements of a row.
__global__ void __launch_bounds__(THREADS) threads_kernel(const float *in, float *out, int n) {
    const int w = (blockIdx.x * THREADS + threadIdx.x) / 32, m = threadIdx.x % 32 / 2,
              j = threadIdx.x % 2 * 4;
    double a[K], b[K][4], c[4] = {};
    if (w * M * N >= n) return;
    for (int k = 0; k < K; ++k) {
        a[k] = a_of(in, n, w, m, k);
        for (int i = 0; i < 4; ++i) b[k][i] = b_of(in, n, w, k, j + i);
    }
#pragma unroll 1
    for (int r = 0; r < ROUNDS; ++r)
        for (int k = 0; k < K; ++k)
            for (int i = 0; i < 4; ++i) c[i] = fma(a[k], b[k][i], c[i]);
    for (int i = 0; i < 4; ++i) out[w * M * N + m * N + j + i] = (float)(c[i] / ROUNDS);
}

template <void (*KERNEL)(const float *, float *, int)>
static void launch(const float *in, float *out, int rows, int cols) {
    const int warps = rows * cols / (M * N);
    KERNEL<<<(warps * 32 + THREADS - 1) / THREADS, THREADS>>>(in, out, rows * cols);
}

static bool good(const float *in, const float *out, int rows, int cols) {
    for (int i = 0; i < rows * cols; ++i) {
        double sum = 0;
        const int w = i / (M * N), n = rows * cols;
        for (int k = 0; k < K; ++k)
            sum += a_of(in, n, w, i % (M * N) / N, k) * b_of(in, n, w, k, i % N);
        if (out[i] != (float)sum) return false;
    }
    return true;
}

int main(void) {
    const int warps = 132 * 16;
    pattern p = {
        "FP64 tensor cores", same_size, good, warps, M * N, 2.0 * M * N * K * ROUNDS * warps,
        small_integer};
    p.unit = "GFLOP/s";
    const auto gflops = [](double multiply_adds) {
        return FIGURES.sms * FIGURES.ghz * 2 * multiply_adds;
    };
    const char *const fp64 = "smsp__inst_executed_pipe_fp64.sum",
                      *const tensor = "sm__inst_executed_pipe_tensor.sum";
    const variant variants[] = {
        {"multiply-adds", launch<threads_kernel>, gflops(64), "FP64 units", fp64},
        {"m8n8k4", launch<mma_kernel<M8N8K4>>, gflops(128), "tensor cores", tensor},
        {"m16n8k4", launch<mma_kernel<M16N8K4>>, gflops(128), "tensor cores", tensor},
        {"m16n8k8", launch<mma_kernel<M16N8K8>>, gflops(128), "tensor cores", tensor},
        {"m16n8k16", launch<mma_kernel<M16N8K16>>, gflops(128), "tensor cores", tensor},
    };
    const int sizes[][2] = {{1, M * N}, {3, M * N}, {100, M * N}};
    return run(p, variants, sizes);
}
