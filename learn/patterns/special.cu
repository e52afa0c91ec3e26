// SPDX-License-Identifier: BSD-3-Clause
// special: exp, sin, 1 / sqrt and tanh by the C functions and by the special function unit (SFU).
//
//   expf, sinf, 1 / sqrtf, tanhf           accurate to a few units in the last place; many
//                                          instructions around the same unit
//   __expf, __sinf, rsqrtf, tanh.approx    The unit itself and the instructions that prepare its
//                                          argument. They are chosen in the source, not by a
//                                          compiler switch.
//
// Measured on one H100: 532 and 666 GB/s for exp, 241 and 796 for sin, 270 and 728 for 1 / sqrt,
// 361 and 826 for tanh.
//
// The error is the largest on 0.05 .. 6.05: relative for results above 1, else absolute. Outside of
// -pi .. pi the error of __sinf grows with the argument, and the error of __expf grows with |x|.
// tanh.approx has 11 bits.
#include "cuda/ptx/regs.cuh"
#include "measure.cuh"

enum {
    THREADS = 256,
    BLOCKS = 132 * 8,
    ROUNDS = 32 // evaluations an element; with fewer, memory would be the limit
};

struct Exp {
    static __device__ float at(float x) { return expf(x); }
    static double exact(double x) { return exp(x); }
};
struct FastExp : Exp {
    static __device__ float at(float x) { return __expf(x); }
};
struct Sin {
    static __device__ float at(float x) { return sinf(x); }
    static double exact(double x) { return sin(x); }
};
struct FastSin : Sin {
    static __device__ float at(float x) { return __sinf(x); }
};
struct Rsqrt {
    static __device__ float at(float x) { return 1 / sqrtf(x); }
    static double exact(double x) { return 1 / sqrt(x); }
};
struct FastRsqrt : Rsqrt {
    static __device__ float at(float x) { return rsqrtf(x); }
};
struct Tanh {
    static __device__ float at(float x) { return tanhf(x); }
    static double exact(double x) { return tanh(x); }
};
struct FastTanh : Tanh {
    static __device__ float at(float x) { return tanh_approx(x); }
};

// `zero` is 0, which the compiler cannot know, so it keeps every round.
template <class F>
__global__ void __launch_bounds__(THREADS)
    special_kernel(const float *in, float *out, int n, float zero) {
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < n; i += gridDim.x * THREADS) {
        const float x = in[i];
        float sum = F::at(x);
#pragma unroll 4
        for (int j = 1; j < ROUNDS; ++j) sum = fmaf(zero, F::at(fmaf(zero, (float)j, x)), sum);
        out[i] = sum;
    }
}
template <class F> static void launch(const float *in, float *out, int rows, int cols) {
    special_kernel<F><<<BLOCKS, THREADS>>>(in, out, rows * cols, 0);
}

template <class F, int BILLIONTHS>
static bool good(const float *in, const float *out, int rows, int cols) {
    double worst = 0;
    for (int i = 0; i < rows * cols; ++i) {
        const double y = F::exact(in[i]), error = fabs(out[i] - y) / fmax(fabs(y), 1);
        if (!(error <= worst)) worst = error; // NaN too
    }
    return within(worst, BILLIONTHS * 1e-9);
}
static float arguments(int i) { return 0.05f + (float)(i % 6144) / 1024; }

int main(void) {
    // Clocks of an SM for one round of a warp: a quarter for an instruction, 2 for a special
    // function. The loop itself takes 2 instructions.
    const auto issue = [](double instructions) { return sm_gbs(ROUNDS * instructions / 4, 256); };
    const auto sfu = [](double functions) { return sm_gbs(ROUNDS * functions * 2, 256); };
    const char *const xu = "smsp__inst_executed_pipe_xu.sum", *const all =
                                                                  "smsp__inst_executed.sum";
    const pattern p = {"special", same_size,         good<Exp, 300>, 4096,
                       4096,      8.0 * 4096 * 4096, arguments};
    const variant variants[] = {
        {"expf", launch<Exp>, issue(9), "issue", all, good<Exp, 300>},
        {"__expf", launch<FastExp>, sfu(1), "special functions", xu, good<FastExp, 1000>},
        {"sinf", launch<Sin>, issue(22), "issue", all, good<Sin, 300>},
        {"__sinf", launch<FastSin>, sfu(1), "special functions", xu, good<FastSin, 1000>},
        {"1 / sqrtf", launch<Rsqrt>, issue(20), "issue", all, good<Rsqrt, 300>},
        {"rsqrtf", launch<FastRsqrt>, sfu(1), "special functions", xu, good<FastRsqrt, 300>},
        {"tanhf", launch<Tanh>, sfu(2), "special functions", all, good<Tanh, 300>},
        {"tanh.approx", launch<FastTanh>, sfu(1), "special functions", xu, good<FastTanh, 1000000>},
    };
    const int sizes[][2] = {{1, 1}, {17, 1}, {1, 255}, {4097, 1}, {1024, 1024}};
    return run(p, variants, sizes);
}
