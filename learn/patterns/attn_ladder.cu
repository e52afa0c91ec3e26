// SPDX-License-Identifier: BSD-3-Clause
// attn_ladder: the first three rungs of the attention ladder, out = softmax(q k^T / 8) v in float32
// without tensor cores. attn_mma.cu has the next two; flash_attn is the last (learn/patterns.md).
//
//   materialised    Three kernels with length^2 scores a head in memory between them. The scores
//                   are written, read, written again and read again.
//   online          Against materialised: each thread has one query and goes over the keys once. It
//                   keeps a running maximum and a running sum, and rescales the sum when the
//                   maximum grows. No score leaves a register, but every warp loads every k and v.
//   tiled           Against online: 64 keys and values at a time are in shared memory.
//
// Measured on one H100, 16 heads of 4096: 5.6, 4.1 and 24.0 TFLOP/s. Online waits for the latency
// of L1; the same code reads shared memory 5.8 times as fast.
#include "attention.cuh"

enum {
    SIDE = 16,     // a block computes 16 x 16 scores
    QUERIES = 128, // threads of a block, one query each
    KEYS = 64
};

// ---- materialised -------------------------------------------------------------------------------

__global__ void scores_kernel(const float *in, float *scores, int length, int heads) {
    __shared__ float q[SIDE][D + 1], k[SIDE][D + 1];
    const Head x = head_of(in, length, heads, blockIdx.z);
    const int i0 = blockIdx.y * SIDE, j0 = blockIdx.x * SIDE, i = i0 + threadIdx.y,
              j = j0 + threadIdx.x;
    for (int d = threadIdx.x; d < D; d += SIDE) {
        q[threadIdx.y][d] = i < length ? x.q[i * D + d] : 0;
        k[threadIdx.y][d] = j0 + threadIdx.y < length ? x.k[(j0 + threadIdx.y) * D + d] : 0;
    }
    __syncthreads(); // all rows of q and k are in shared memory
    float sum = 0;
    for (int d = 0; d < D; ++d) sum = fmaf(q[threadIdx.y][d], k[threadIdx.x][d], sum);
    if (i < length && j < length)
        scores[((size_t)blockIdx.z * length + i) * length + j] = sum * SCALE;
}
__global__ void softmax_kernel(float *scores, int length, int rows) {
    const int row = blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    float *x = scores + (size_t)row * length, most = -INFINITY, sum = 0;
    for (int j = threadIdx.x; j < length; j += 32) most = fmaxf(most, x[j]);
    for (int apart = 16; apart > 0; apart /= 2)
        most = fmaxf(most, __shfl_xor_sync(~0u, most, apart));
    for (int j = threadIdx.x; j < length; j += 32) sum += x[j] = __expf(x[j] - most);
    for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
    for (int j = threadIdx.x; j < length; j += 32) x[j] /= sum;
}
__global__ void __launch_bounds__(D * 4)
    values_kernel(const float *in, const float *weights, float *out, int length, int heads) {
    const Head x = head_of(in, length, heads, blockIdx.y);
    const int i0 = (blockIdx.x * 4 + threadIdx.y) * 4;
    float sum[4] = {};
    for (int j = 0; j < length; ++j) {
        const float v = x.v[j * D + threadIdx.x];
        for (int e = 0; e < 4; ++e)
            if (i0 + e < length)
                sum[e] =
                    fmaf(weights[((size_t)blockIdx.y * length + i0 + e) * length + j], v, sum[e]);
    }
    for (int e = 0; e < 4; ++e)
        if (i0 + e < length) out[((size_t)blockIdx.y * length + i0 + e) * D + threadIdx.x] = sum[e];
}
static void materialised(const float *in, float *out, int rows, int cols) {
    static float *scores;
    static size_t room;
    const int heads = heads_of(cols), squares = (rows + SIDE - 1) / SIDE;
    const size_t bytes = sizeof(float) * heads * rows * rows;
    if (bytes > room) {
        if (scores) MUST(cudaFree(scores));
        MUST(cudaMalloc((void **)&scores, room = bytes));
    }
    scores_kernel<<<dim3(squares, squares, heads), dim3(SIDE, SIDE)>>>(in, scores, rows, heads);
    softmax_kernel<<<(rows * heads + 7) / 8, dim3(32, 8)>>>(scores, rows, rows * heads);
    values_kernel<<<dim3((rows + 15) / 16, heads), dim3(D, 4)>>>(in, scores, out, rows, heads);
}

// ---- online, tiled ------------------------------------------------------------------------------

// One thread's query: its row of q, the running maximum `most`, and the sums relative to it.
struct Query {
    float q[D], o[D], most, sum;

    __device__ void begin(const float *from, bool there) {
        most = -INFINITY;
        sum = 0;
        for (int d = 0; d < D; ++d) {
            q[d] = there ? from[d] * (SCALE * LOG2E) : 0;
            o[d] = 0;
        } // q is scaled by log2(e), because exp2 is one instruction
    }
    __device__ void take(const float *k, const float *v) {
        float score[4] = {}; // four independent sums, so that none waits for another
#pragma unroll
        for (int d = 0; d < D; d += 4) {
            const float4 x = *(const float4 *)(k + d);
            score[0] = fmaf(q[d], x.x, score[0]);
            score[1] = fmaf(q[d + 1], x.y, score[1]);
            score[2] = fmaf(q[d + 2], x.z, score[2]);
            score[3] = fmaf(q[d + 3], x.w, score[3]);
        }
        const float s = (score[0] + score[1]) + (score[2] + score[3]),
                    down = s > most ? exp2f(most - s) : 1;
        if (s > most) { // rare after the first keys
            most = s;
            sum *= down;
            for (int d = 0; d < D; ++d) o[d] *= down;
        }
        const float p = exp2f(s - most);
        sum += p;
#pragma unroll
        for (int d = 0; d < D; d += 4) {
            const float4 x = *(const float4 *)(v + d);
            o[d] = fmaf(p, x.x, o[d]);
            o[d + 1] = fmaf(p, x.y, o[d + 1]);
            o[d + 2] = fmaf(p, x.z, o[d + 2]);
            o[d + 3] = fmaf(p, x.w, o[d + 3]);
        }
    }
    __device__ void end(float *to) const {
        for (int d = 0; d < D; ++d) to[d] = o[d] / sum;
    }
};

template <bool TILED>
__global__ void __launch_bounds__(QUERIES)
    online_kernel(const float *in, float *out, int length, int heads) {
    __shared__ __align__(16) float k[KEYS * D], v[KEYS * D];
    const Head x = head_of(in, length, heads, blockIdx.y);
    const int i = blockIdx.x * QUERIES + threadIdx.x;
    Query mine;
    mine.begin(x.q + (size_t)i * D, i < length);
    for (int j0 = 0; j0 < length; j0 += KEYS) {
        // keys past the end are skipped: a score of 0 would still have weight
        const int keys = min(KEYS, length - j0);
        if (TILED) {
            __syncthreads(); // every thread has read the previous tile
            for (int e = threadIdx.x; e < keys * D / 4; e += QUERIES) {
                ((float4 *)k)[e] = ((const float4 *)(x.k + j0 * D))[e];
                ((float4 *)v)[e] = ((const float4 *)(x.v + j0 * D))[e];
            }
            __syncthreads(); // the tile is complete
        }
#pragma unroll 1
        for (int j = 0; j < keys; ++j)
            mine.take(TILED ? k + j * D : x.k + (j0 + j) * D,
                      TILED ? v + j * D : x.v + (j0 + j) * D);
    }
    if (i < length) mine.end(out + ((size_t)blockIdx.y * length + i) * D);
}
template <bool TILED> static void online(const float *in, float *out, int rows, int cols) {
    online_kernel<TILED><<<dim3((rows + QUERIES - 1) / QUERIES, heads_of(cols)), QUERIES>>>(
        in, out, rows, heads_of(cols));
}

int main(void) {
    const int rows = 4096, cols = 3 * D * 16;
    pattern p = {"attention ladder", out_size, good<10>, rows, cols, flops_of(rows, cols), number};
    p.unit = "GFLOP/s";
    // Predictions in GFLOP/s. Online and tiled: a warp makes 32 loads a key, of 16 bytes that all
    // lanes share. Each costs 2 clocks of L1 or shared memory (the pattern banks), so 256 FLOPs a
    // lane take 64 clocks. Materialised: one load for each multiply-add, so 64 FLOPs a clock, and
    // 16 bytes of memory a score.
    const auto gflops = [](double flops_a_clock) {
        return FIGURES.sms * FIGURES.ghz * flops_a_clock;
    };
    const double seconds =
        flops_of(rows, cols) / (gflops(32) * 1e9) + 16.0 * rows * rows * 16 / (memory_gbs() * 1e9);
    const variant variants[] = {
        {"materialised", materialised, flops_of(rows, cols) / seconds * 1e-9, "shared memory, L1",
         "dram__bytes_write.sum"},
        {"online", online<false>, gflops(32 * 4.0 * D / 64), "L1",
         "l1tex__data_pipe_lsu_wavefronts.sum"},
        {"tiled", online<true>, gflops(32 * 4.0 * D / 64), "shared memory",
         "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"},
    };
    const int sizes[][2] = {{1, 3 * D}, {17, 3 * D}, {70, 6 * D}, {255, 3 * D}, {300, 6 * D}};
    return run(p, variants, sizes);
}
