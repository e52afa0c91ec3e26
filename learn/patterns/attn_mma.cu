// SPDX-License-Identifier: BSD-3-Clause
// attn_mma: rungs four and five of the attention ladder, which use tensor cores with bfloat16
// operands. A warp has 16 queries, a block 64, and a step takes 64 keys.
//
//   mma.sync     Against attn_ladder's tiled: scores are accumulators of mma.sync, and the weights
//                are computed from them in registers. An accumulator has the lane layout of the
//                next product's operand, so nothing passes through shared memory between the two
//                products. Each step waits for its copies.
//   pipelined    Against mma.sync: the keys are copied one step ahead, and the values while the
//                scores are computed. cp.async fills two stages.
//
// Measured on one H100, 16 heads of 4096: 242 and 273 TFLOP/s (tiled: 24).
//
// The sum of a row stays spread over the four lanes of a quad until the end; only the maximum is
// shared in every step. The library's kernels (csrc/cuda/attn) also use 32 or more queries a warp,
// wgmma, and a producer warp.
#include "attention.cuh"

#include "cuda/tile/copy.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/reduce.cuh"

enum {
    WARPS = 4,
    THREADS = WARPS * 32,
    QUERIES = WARPS * 16,
    KEYS = 64
};
typedef __nv_bfloat16 bf16;
typedef smem_tile<KEYS, D * 2> Tile; // queries, keys and values have the same tile

static __device__ void load(smem_addr tile_s, const bf16 *from, int row0, int length) {
    const int rows = min(KEYS, length - row0);
    if (rows > 0)
        copy_tile_async<Tile, THREADS>(tile_s, from + (size_t)row0 * D, D, rows, threadIdx.x);
    cp_async_commit_group();
}

template <bool PIPELINED>
__global__ void __launch_bounds__(THREADS)
    attn_kernel(const bf16 *in, float *out, int length, int heads) {
    constexpr int stages = PIPELINED ? 2 : 1;
    __shared__ __align__(128) char memory[(1 + 2 * stages) * Tile::bytes];
    const smem_addr q_s = cvta_to_shared(memory), k_s = q_s + Tile::bytes,
                    v_s = k_s + stages * Tile::bytes;
    const size_t one = (size_t)length * D;
    const bf16 *q = in + blockIdx.y * one, *k = q + heads * one, *v = k + heads * one;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row0 = blockIdx.x * QUERIES;
    const int steps = (length + KEYS - 1) / KEYS;
    uint32_t a[D / 16][4];
    float o[D / 8][4] = {}, most[2] = {-INFINITY, -INFINITY}, sum[2] = {};

    load(q_s, q, row0, length);
    load(k_s, k, 0, length);
    if (PIPELINED) load(v_s, v, 0, length);
    cp_async_wait_group<PIPELINED ? 2 : 1>();
    __syncthreads(); // the queries have arrived
    const smem_addr a_s = frag_a_base<Tile>(q_s, lane, warp * 16);
    for (int kk = 0; kk < D / 16; ++kk) load_frag_a(a[kk], Tile::along(a_s, 2 * kk));

    for (int j = 0; j < steps; ++j) {
        const int stage = j % stages * Tile::bytes, next = (j + 1) % stages * Tile::bytes;
        if (!PIPELINED && j > 0) {
            __syncthreads(); // every warp has read the previous step
            load(k_s, k, j * KEYS, length);
        }
        if (!PIPELINED) load(v_s, v, j * KEYS, length);
        cp_async_wait_group<PIPELINED ? 1 : 0>(); // pipelined: the values may still be in flight
        __syncthreads();                          // the keys have arrived
        if (PIPELINED) load(k_s + next, k, (j + 1) * KEYS, length);
        float s[KEYS / 8][4] = {};
#pragma unroll
        for (int n = 0; n < KEYS / 16; ++n) {
            const smem_addr b_s = frag_b_base<Tile>(k_s + stage, lane, n * 16);
#pragma unroll
            for (int kk = 0; kk < D / 16; ++kk) {
                uint32_t b[4];
                load_frag_b(b, Tile::along(b_s, 2 * kk));
                mma_add<bf16>(s[2 * n], a[kk], b);
                mma_add<bf16>(s[2 * n + 1], a[kk], b + 2);
            }
        }
        for (int n = 0; n < KEYS / 8; ++n)
            for (int r = 0; r < 4; ++r)
                // a column past the last key
                if (j + 1 == steps && j * KEYS + n * 8 + frag_col(lane, r) >= length)
                    s[n][r] = -INFINITY;
#pragma unroll
        for (int h = 0; h < 2; ++h) { // rows lane / 4 and lane / 4 + 8
            float high = most[h];
            for (int n = 0; n < KEYS / 8; ++n)
                high = fmaxf(high, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
            high = quad_max(high);
            const float down = ex2_approx_ftz((most[h] - high) * (SCALE * LOG2E)),
                        base = high * (SCALE * LOG2E);
            most[h] = high;
            sum[h] *= down;
            for (int n = 0; n < D / 8; ++n) {
                o[n][2 * h] *= down;
                o[n][2 * h + 1] *= down;
            }
            for (int n = 0; n < KEYS / 8; ++n)
                for (int r = 2 * h; r < 2 * h + 2; ++r)
                    sum[h] += s[n][r] = ex2_approx_ftz(fmaf(s[n][r], SCALE * LOG2E, -base));
        }
        if (PIPELINED) {
            cp_async_wait_group<1>(); // the next keys may still be in flight
            __syncthreads();          // the values have arrived
            load(v_s + next, v, (j + 1) * KEYS, length);
        }
#pragma unroll
        for (int kk = 0; kk < KEYS / 16; ++kk) {
            uint32_t p[4];
            acc_to_a<bf16>(p, s[2 * kk], s[2 * kk + 1]);
            const smem_addr b_s = frag_b_trans_base<Tile>(v_s + stage, lane, kk * 16);
#pragma unroll
            for (int n = 0; n < D / 16; ++n) {
                uint32_t b[4];
                load_frag_b_trans(b, Tile::along(b_s, 2 * n));
                mma_add<bf16>(o[2 * n], p, b);
                mma_add<bf16>(o[2 * n + 1], p, b + 2);
            }
        }
    }
    cp_async_wait_group<0>();
    for (int h = 0; h < 2; ++h) sum[h] = 1 / quad_sum(sum[h]);
    for (int n = 0; n < D / 8; ++n) {
        for (int r = 0; r < 4; ++r) {
            const int row = row0 + warp * 16 + frag_row(lane, r);
            if (row < length)
                out[(blockIdx.y * one) + (size_t)row * D + n * 8 + frag_col(lane, r)] =
                    o[n][r] * sum[r / 2];
        }
    }
}

static bf16 *halves; // the input as bfloat16, converted before each launch
__global__ void halve_kernel(const float *in, bf16 *to, int n) {
    const int i = blockIdx.x * 256 + threadIdx.x;
    if (i < n) to[i] = __float2bfloat16_rn(in[i]);
}
static void halve(const float *in, int rows, int cols) {
    static int room;
    const int n = rows * cols;
    if (n > room) {
        if (halves) MUST(cudaFree(halves));
        MUST(cudaMalloc((void **)&halves, (room = n) * sizeof *halves));
    }
    halve_kernel<<<(n + 255) / 256, 256>>>(in, halves, n);
}
template <bool PIPELINED> static void attend(const float *, float *out, int rows, int cols) {
    const dim3 grid((rows + QUERIES - 1) / QUERIES, heads_of(cols));
    attn_kernel<PIPELINED><<<grid, THREADS>>>(halves, out, rows, heads_of(cols));
}

int main(void) {
    const int rows = 4096, cols = 3 * D * 16;
    pattern p = {"attention on tensor cores", out_size, good<5000>, rows, cols,
                 flops_of(rows, cols),        number};
    p.unit = "GFLOP/s";
    // A step of a warp is two products of 16 x 64 x 64. It takes 128 clocks of shared memory for 16
    // KiB of operands, 97 of the tensor cores by mma.sync, 64 of the special functions, and some 70
    // of issue. Without a pipeline the four add up. With one, shared memory and the special
    // functions still follow each other.
    const auto gflops = [](double clocks) {
        return FIGURES.sms * FIGURES.ghz * 4 * 16 * KEYS * D / clocks;
    };
    const char *const tensor = "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active";
    const variant variants[] = {
        {"mma.sync", attend<false>, gflops(128 + 97 + 64 + 70), "one after the other", tensor, NULL,
         halve},
        {"pipelined", attend<true>, gflops(128 + 64), "shared memory, exp2", tensor, NULL, halve},
    };
    const int sizes[][2] = {{1, 3 * D}, {17, 3 * D}, {70, 6 * D}, {255, 3 * D}, {300, 6 * D}};
    return run(p, variants, sizes);
}
