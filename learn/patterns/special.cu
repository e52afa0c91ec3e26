// SPDX-License-Identifier: BSD-3-Clause
// special: exp, sin, 1 / sqrt and tanh as C means them, and as the special function unit (SFU)
// makes them.
//
//   expf, sinf, 1 / sqrtf, tanhf                 within a few bits of the last place; many instructions around the same unit
//   __expf, __sinf, rsqrtf, tanh.approx          the unit, and what fits its argument to it. No switch of the compiler: the source
//                                                says where less is enough
// The error is the largest on 0.05 .. 6.05: relative where the result is above 1, else absolute.
// Outside of -pi .. pi __sinf loses more
// with every turn, __expf loses with |x|; tanh.approx has 11 bits, and near 0, where tanh x is x, that is 11 bits of x.
#include "cuda/ptx/regs.cuh"
#include "measure.cuh"

enum {
    THREADS = 256,
    BLOCKS = 132 * 8,
    ROUNDS = 32 // of an element, or memory would be the limit
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

// zero is 0, which the compiler does not know: so it makes every round.
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
    // Clocks of an SM for a warp's round: an instruction a quarter of a clock, a special function
    // 2; 2 instructions are the loop's.
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
