// SPDX-License-Identifier: BSD-3-Clause
// inline_ptx: 16 tanh for each element. The hardware has an instruction for tanh that C has no name
// for.
//
//   tanhf           the C library's, with an error of 1e-7: a branch, an exponential, a division,
//                   polynomials
//   asm             tanh.approx.f32, with an error of 2^-11, written where it is used. "=f" is the
//                   result's register, "f" the operand's.
//   asm volatile    the same, but the compiler may not remove it, merge it or move it past another
//                   volatile asm. Assembly that accesses memory or barriers needs that. For
//                   arithmetic it is a needless restriction.
//   ptx/regs.cuh    the library's form: a wrapper named after the instruction, so that kernels
//                   contain no assembly
//
// Measured on one H100: 768 GB/s for tanhf, 1582 to 1585 GB/s for the other three.
#include "cuda/ptx/regs.cuh"
#include "measure.cuh"

enum {
    THREADS = 256,
    BLOCKS = 132 * 8,
    TIMES = 16
};

struct Library {
    static __device__ float of(float x) { return tanhf(x); }
};
struct Asm {
    static __device__ float of(float x) {
        float y;
        asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
        return y;
    }
};
struct AsmVolatile {
    static __device__ float of(float x) {
        float y;
        asm volatile("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
        return y;
    }
};
struct Wrapper {
    static __device__ float of(float x) { return tanh_approx(x); }
};

template <class How>
__global__ void __launch_bounds__(THREADS) tanh_kernel(const float *in, float *out, int n) {
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < n; i += gridDim.x * THREADS) {
        float x = in[i];
#pragma unroll
        for (int t = 0; t < TIMES; ++t) x = How::of(x);
        out[i] = x;
    }
}

template <class How> static void launch(const float *in, float *out, int rows, int cols) {
    tanh_kernel<How><<<BLOCKS, THREADS>>>(in, out, rows * cols);
}

static bool good(const float *in, const float *out, int rows, int cols) {
    double want[13]; // the result for each value of small_integer
    for (int v = -6; v <= 6; ++v) {
        want[v + 6] = v;
        for (int t = 0; t < TIMES; ++t) want[v + 6] = tanh(want[v + 6]);
    }
    for (int i = 0; i < rows * cols; ++i) { // each tanh shrinks the error of its operand
        if (!(fabs(out[i] - want[(int)in[i] + 6]) <= 4.0 / (1 << 11))) return false;
    }
    return true;
}

int main(void) {
    // An SM makes 16 special functions a clock, so a warp takes 2 clocks. tanhf takes some 24
    // instructions, and an SM issues 4 a clock.
    const pattern p = {"inline PTX", same_size, good, 8192, 8192, 8.0 * 8192 * 8192, small_integer};
    const double by_unit = sm_gbs(TIMES * 2, 256), by_issue = sm_gbs(TIMES * 24 / 4, 256);
    const char *const unit = "special functions", *const counter =
                                                      "smsp__inst_executed_pipe_xu.sum";
    const variant variants[] = {
        {"tanhf", launch<Library>, by_issue, "issue", "smsp__inst_executed.sum"},
        {"asm", launch<Asm>, by_unit, unit, counter},
        {"asm volatile", launch<AsmVolatile>, by_unit, unit, counter},
        {"ptx/regs.cuh", launch<Wrapper>, by_unit, unit, counter},
    };
    const int sizes[][2] = {{1, 1}, {17, 1}, {1, 255}, {4097, 1}, {1024, 1024}};
    return run(p, variants, sizes);
}
