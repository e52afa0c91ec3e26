// SPDX-License-Identifier: BSD-3-Clause
// texture: a picture sampled between its pixels (bilinear: the weighted mean of four neighbours),
// by loads and by the texture unit.
//
//   loads, rows         lanes along a row: four loads, three of which hit L1
//   loads, columns      lanes down a column, as a transposed picture is read: 32 lines a load
//   texture, rows       one fetch: the unit finds the four neighbours, clamps at the edge and
//                       weights them
//   texture, columns    the same; in a cudaArray neighbours in both directions are close together
//
// Measured on one H100: 2047, 497, 2055 and 2011 GB/s.
//
// A fetch saves arithmetic and lines, not bytes. Its weights have 8 bits: 1 / 4 and 1 / 2, as here,
// are exact; others are off by up to 1 / 512. So it suits pictures, not tables of a function.
#include "measure.cuh"

enum {
    LANES = 32, // a block is 32 x 8 threads
    WARPS = 8
};
// out(row, col) is the picture at (row + DOWN, col + RIGHT). If lanes read down columns, out is the
// transpose, so that the stores are the same.
static constexpr float RIGHT = 0.25f, DOWN = 0.5f;

static __host__ __device__ float mix(float a, float b, float weight) {
    return a + weight * (b - a);
}
static __host__ __device__ float sample(const float *in, int row, int col, int rows, int cols) {
    const int below = row + 1 < rows ? row + 1 : row, right = col + 1 < cols ? col + 1 : col;
    const float *upper = in + (size_t)row * cols, *lower = in + (size_t)below * cols;
    return mix(mix(upper[col], upper[right], RIGHT), mix(lower[col], lower[right], RIGHT), DOWN);
}

struct Loads {
    const float *in;
    __device__ float at(int row, int col, int rows, int cols) const {
        return sample(in, row, col, rows, cols);
    }
};
struct Texture {
    cudaTextureObject_t of;
    __device__ float at(int row, int col, int, int) const { // the centre of pixel i is at i + 1 / 2
        return tex2D<float>(of, col + 0.5f + RIGHT, row + 0.5f + DOWN);
    }
};

// COLUMNS: the lanes of a warp read different rows of the picture, and out is [cols][rows].
template <bool COLUMNS, class From>
__global__ void __launch_bounds__(LANES *WARPS)
    sample_kernel(From from, float *out, int rows, int cols) {
    const int x = blockIdx.x * LANES + threadIdx.x, y = blockIdx.y * WARPS + threadIdx.y;
    const int width = COLUMNS ? rows : cols, height = COLUMNS ? cols : rows;
    if (x < width && y < height)
        out[(size_t)y * width + x] = from.at(COLUMNS ? x : y, COLUMNS ? y : x, rows, cols);
}
template <bool COLUMNS, class From>
static void start(const From &from, float *out, int rows, int cols) {
    const int width = COLUMNS ? rows : cols, height = COLUMNS ? cols : rows;
    const dim3 grid((width + LANES - 1) / LANES, (height + WARPS - 1) / WARPS);
    sample_kernel<COLUMNS><<<grid, dim3(LANES, WARPS)>>>(from, out, rows, cols);
}

template <bool COLUMNS> static void loads(const float *in, float *out, int rows, int cols) {
    start<COLUMNS>(Loads{in}, out, rows, cols);
}

// Copies the picture to a cudaArray, once for each picture and not timed.
static cudaTextureObject_t texture_of(const float *in, int rows, int cols) {
    static const float *in_then;
    static int rows_then, cols_then;
    static cudaArray_t array;
    static cudaTextureObject_t texture;
    if (in == in_then && rows == rows_then && cols == cols_then) return texture;
    if (array) {
        MUST(cudaDestroyTextureObject(texture));
        MUST(cudaFreeArray(array));
    }
    const cudaChannelFormatDesc format = cudaCreateChannelDesc<float>();
    MUST(cudaMallocArray(&array, &format, cols, rows));
    MUST(cudaMemcpy2DToArray(array, 0, 0, in, cols * 4, cols * 4, rows, cudaMemcpyDeviceToDevice));
    cudaResourceDesc from = {};
    cudaTextureDesc how = {};
    from.resType = cudaResourceTypeArray;
    from.res.array.array = array;
    how.addressMode[0] = how.addressMode[1] = cudaAddressModeClamp;
    how.filterMode = cudaFilterModeLinear;
    MUST(cudaCreateTextureObject(&texture, &from, &how, NULL));
    in_then = in;
    rows_then = rows;
    cols_then = cols;
    return texture;
}
template <bool COLUMNS> static void textures(const float *in, float *out, int rows, int cols) {
    start<COLUMNS>(Texture{texture_of(in, rows, cols)}, out, rows, cols);
}

template <bool COLUMNS> static bool good(const float *in, const float *out, int rows, int cols) {
    for (int r = 0; r < rows; ++r) {
        for (int c = 0; c < cols; ++c) {
            if (out[COLUMNS ? (size_t)c * rows + r : (size_t)r * cols + c] !=
                sample(in, r, c, rows, cols))
                return false;
        }
    }
    return true;
}

int main(void) {
    // Clocks of an SM for the samples of a warp: 4 loads of one line each, 4 loads of 32 lines, or
    // 32 fetches at 4 a clock
    const pattern p = {"texture", same_size,         good<false>,  8192,
                       8192,      8.0 * 8192 * 8192, small_integer};
    const char *const l1 = "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
                      *const tex = "l1tex__texin_requests.sum";
    const variant variants[] = {
        {"loads, rows", loads<false>, sm_gbs(4 * 1.1, 256), "memory", l1, good<false>},
        {"loads, columns", loads<true>, sm_gbs(4 * 32, 256), "L1's lines", l1, good<true>},
        {"texture, rows", textures<false>, sm_gbs(32 / 4, 256), "memory", tex, good<false>},
        {"texture, columns", textures<true>, sm_gbs(32 / 4, 256), "memory", tex, good<true>},
    };
    const int sizes[][2] = {{1, 1}, {17, 1}, {1, 255}, {4097, 1}, {37, 131}, {1024, 1024}};
    return run(p, variants, sizes);
}
