// SPDX-License-Identifier: BSD-3-Clause
// exp2: 2^x by the special function unit, by polynomials, and by both at once. Softmax computes it
// for every score.
//
//   exp2f                   the C function: ex2.approx and the code that keeps subnormal results
//   ex2                     ex2.approx.ftz: 16 a clock and SM, an eighth of the rate of
//                           multiply-adds; error 2^-22.5
//   polynomial, ERROR       x = n + f with |f| <= 1/2: a polynomial of 2^f, to whose exponent n is
//                           added. The allowed error sets the degree (exp2_within): 3, 4 or 5, one
//                           fma more for each.
//   a quarter polynomial    One of four by the polynomial of degree 3 while the special function
//                           unit makes the others. Its error is acceptable if the result is rounded
//                           to 8 bits of mantissa anyway, as the weights of attention are.
//
// Measured on one H100: exp2f 463, ex2 479, polynomials 244 to 317, a quarter polynomial 577 GB/s.
//
// The coefficients minimise the largest relative error on [-1/2, 1/2]. They hold for |x| < 126; a
// softmax clamps smaller arguments.
#include "cuda/ptx/regs.cuh"
#include "measure.cuh"

enum {
    THREADS = 256,
    BLOCKS = 132 * 8,
    ROUNDS = 64 // exponentials an element; with fewer, memory would be the limit
};

template <int DEGREE> static __device__ float exp2_polynomial(float x) {
    constexpr float c[3][6] = {
        {0.99992806f, 0.69326097f, 0.24261113f, 0.055171669f},
        {0.99999928f, 0.69312179f, 0.24024744f, 0.055917859f, 0.0095701021f},
        {1.0000001f, 0.69314694f, 0.2402212f, 0.055507131f, 0.009675541f, 0.0013276472f},
    };
    // adding `magic` rounds x to an integer n, which is then in the low bits of `shifted`
    const float magic = 0x1.8p23f, shifted = x + magic;
    const float f = x - (shifted - magic);
    float y = c[DEGREE - 3][DEGREE];
#pragma unroll
    for (int i = DEGREE - 1; i >= 0; --i) y = fmaf(y, f, c[DEGREE - 3][i]);
    return __int_as_float(__float_as_int(y) + (__float_as_int(shifted) << 23));
}

// 2^x within a relative error of so many millionths.
template <int MILLIONTHS> static __device__ float exp2_within(float x) {
    if constexpr (MILLIONTHS >= 80) return exp2_polynomial<3>(x);
    if constexpr (MILLIONTHS >= 3) return exp2_polynomial<4>(x);
    if constexpr (MILLIONTHS >= 1) return exp2_polynomial<5>(x);
    return ex2_approx_ftz(x);
}

struct Library {
    static __device__ float at(float x, int) { return exp2f(x); }
};
template <int MILLIONTHS, int OF = 1>
struct Within { // one of OF by the polynomial, the others exactly
    static __device__ float at(float x, int i) {
        return i % OF ? exp2_within<0>(x) : exp2_within<MILLIONTHS>(x);
    }
};

// `zero` is 0, which the compiler cannot know, so it keeps every round.
template <class Exp2>
__global__ void __launch_bounds__(THREADS)
    exp2_kernel(const float *in, float *out, int n, float zero) {
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < n; i += gridDim.x * THREADS) {
        const float x = in[i];
        float sum = Exp2::at(x, 0);
#pragma unroll
        for (int j = 1; j < ROUNDS; ++j)
            sum = fmaf(zero, Exp2::at(fmaf(zero, (float)j, x), j), sum);
        out[i] = sum;
    }
}
template <class Exp2> static void launch(const float *in, float *out, int rows, int cols) {
    exp2_kernel<Exp2><<<BLOCKS, THREADS>>>(in, out, rows * cols, 0);
}

template <int HUNDRED_MILLIONTHS>
static bool good(const float *in, const float *out, int rows, int cols) {
    double worst = 0;
    for (int i = 0; i < rows * cols; ++i) {
        const double error = fabs(out[i] / exp2((double)in[i]) - 1);
        if (!(error <= worst)) worst = error; // NaN too
    }
    return within(worst, HUNDRED_MILLIONTHS * 1e-8);
}
static float exponents(int i) { return (float)(i % 8191) / 256 - 16; }

int main(void) {
    // Clocks of an SM for one round of a warp: a quarter for an instruction, 2 for a special
    // function.
    const auto gbs = [](double clocks) { return sm_gbs(ROUNDS * clocks, 256); };
    const char *const xu = "smsp__inst_executed_pipe_xu.sum",
                      *const fma = "smsp__inst_executed_pipe_fma.sum";
    const pattern p = {"exp2", same_size, good<30>, 4096, 4096, 8.0 * 4096 * 4096, exponents};
    const variant variants[] = {
        {"exp2f", launch<Library>, gbs(2), "special functions", xu, good<30>},
        {"ex2", launch<Within<0>>, gbs(2), "special functions", xu, good<20>},
        {"polynomial, 1e-6", launch<Within<1>>, gbs(11 / 4.0), "issue", fma, good<100>},
        {"polynomial, 3e-6", launch<Within<3>>, gbs(10 / 4.0), "issue", fma, good<300>},
        {"polynomial, 8e-5", launch<Within<80>>, gbs(9 / 4.0), "issue", fma, good<8000>},
        {"a quarter polynomial", launch<Within<80, 4>>, gbs(1.5), "special functions", xu,
         good<8000>},
    };
    const int sizes[][2] = {{1, 1}, {17, 1}, {1, 255}, {4097, 1}, {1024, 1024}};
    return run(p, variants, sizes);
}
