// SPDX-License-Identifier: BSD-3-Clause
// tensor_reduce: cp.reduce.async.bulk.tensor. A box leaves shared memory, and L2 combines it with
// what memory holds: by addition, minimum, maximum or a bit operation. Row r of in is combined into
// row r % 8 of out, as 32-bit integers, so that every order gives the same bits.
//
//   red           for comparison: every thread executes one atomic addition for each element
//   add .. xor    one thread loads boxes of 8 x 128 by TMA and issues their reductions into out
//
// Measured on one H100: 1439 GB/s for red, 1499 to 1514 GB/s for the others.
//
// If a box reaches past the end of the matrix, TMA fills it with zeros. Zeros do not change the
// result of `add`, `or` and `xor`, but they do change that of `min`, `max` and `and`. So the rows
// after the last multiple of 8 are combined by red. TMA also needs rows of a multiple of 16 bytes;
// red combines every other matrix.
#include "cuda/ptx/tma.cuh"
#include "cuda/tile/tma_ring.cuh"
#include "measure.cuh"

#include <cuda.h>

enum {
    BOX_ROWS = 8,
    BOX_COLS = 128,
    BYTES = BOX_ROWS * BOX_COLS * 4,
    STAGES = 4,
    AHEAD = STAGES / 2,
    BLOCKS = 132 * 8
};

// One operation in three forms: box() by L2, element() by one thread, and host(). FILL is the byte
// that fills out before the kernel runs: the operation's neutral element.
#define OPERATION(NAME, FILL, PTX, ATOMIC, HOST)                                        \
    struct NAME {                                                                       \
        static constexpr int fill = FILL;                                               \
        static __device__ void box(const CUtensorMap *map, int col, smem_addr from_s) { \
            asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta." PTX       \
                         ".tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),           \
                         "r"(col), "r"(0), "r"(from_s)                                  \
                         : "memory");                                                   \
        }                                                                               \
        static __device__ void element(int *to, int x) { ATOMIC(to, x); }               \
        static int host(int a, int b) { return HOST; }                                  \
    };
OPERATION(Add, 0, "add", atomicAdd, (int)((unsigned)a + (unsigned)b))
OPERATION(Min, 0x7f, "min", atomicMin, a < b ? a : b)
OPERATION(Max, 0x80, "max", atomicMax, a > b ? a : b)
OPERATION(And, 0xff, "and", atomicAnd, a &b)
OPERATION(Or, 0, "or", atomicOr, a | b)
OPERATION(Xor, 0, "xor", atomicXor, a ^ b)

struct Maps {
    CUtensorMap in, out;
};
static __device__ void load_box(smem_addr to_s, const CUtensorMap *map, int col, int row,
                                smem_addr full_s) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4}], [%2];" ::"r"(to_s),
                 "l"(map), "r"(full_s), "r"(col), "r"(row)
                 : "memory");
}

template <class Op>
__global__ void __launch_bounds__(32)
    boxes_kernel(const __grid_constant__ Maps maps, int across, int boxes) {
    __shared__ __align__(128) char stages[STAGES][BYTES];
    __shared__ __align__(8) unsigned long long full[STAGES];
    const int count = (boxes - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
    if (threadIdx.x > 0) return;
    for (int s = 0; s < STAGES; ++s) mbarrier_init(cvta_to_shared(&full[s]), 1);
    fence_mbarrier_init();
    const auto col = [&](int j) {
        return ((int)blockIdx.x + j * (int)gridDim.x) % across * BOX_COLS;
    };
    const auto load = [&](int j) {
        const smem_addr full_s = cvta_to_shared(&full[j % STAGES]);
        if (j >= count) return;
        mbarrier_arrive_expect_tx(full_s, BYTES);
        const int row = (blockIdx.x + j * gridDim.x) / across * BOX_ROWS;
        load_box(cvta_to_shared(stages[j % STAGES]), &maps.in, col(j), row, full_s);
    };
    for (int j = 0; j < AHEAD; ++j) load(j);
    for (int j = 0; j < count; ++j) {
        // wait until TMA has read the stage that load() fills next; AHEAD - 1 newer reductions may
        // still be reading theirs
        tma_store_wait_group_read<AHEAD - 1>();
        load(j + AHEAD);
        mbarrier_wait(cvta_to_shared(&full[j % STAGES]), j / STAGES & 1);
        Op::box(&maps.out, col(j), cvta_to_shared(stages[j % STAGES]));
        tma_store_commit_group();
    }
    tma_store_wait_group_read<0>(); // the block may not exit before TMA has read its shared memory
}
template <class Op>
__global__ void __launch_bounds__(256)
    red_kernel(const int *in, int *out, int row0, int rows, int cols) {
    const int col = blockIdx.x * 256 + threadIdx.x;
    for (int r = row0 + blockIdx.y; col < cols && r < rows; r += gridDim.y)
        Op::element(&out[r % BOX_ROWS * cols + col], in[(size_t)r * cols + col]);
}

static CUtensorMap map_of(const void *data, int rows, int cols) {
    static void *encode;
    cudaDriverEntryPointQueryResult found;
    if (!encode)
        MUST(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000,
                                              cudaEnableDefault, &found));
    const cuuint64_t size[2] = {(cuuint64_t)cols, (cuuint64_t)rows},
                     pitch[1] = {(cuuint64_t)cols * 4};
    const cuuint32_t box[2] = {BOX_COLS, BOX_ROWS}, step[2] = {1, 1};
    CUtensorMap map;
    const CUresult made = ((decltype(&cuTensorMapEncodeTiled))encode)(
        &map, CU_TENSOR_MAP_DATA_TYPE_INT32, 2, (void *)data, size, pitch, box, step,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
        CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return made == CUDA_SUCCESS ? map : (fprintf(stderr, "no tensor map\n"), exit(1), map);
}

template <class Op, bool BOXES>
static void launch(const float *in, float *out, int rows, int cols) {
    const int by_boxes = BOXES && cols % 4 == 0 ? rows / BOX_ROWS * BOX_ROWS : 0;
    MUST(cudaMemsetAsync(out, Op::fill, sizeof *out * BOX_ROWS * cols));
    if (by_boxes > 0) {
        const int across = (cols + BOX_COLS - 1) / BOX_COLS, boxes = across * (by_boxes / BOX_ROWS);
        const Maps maps = {map_of(in, rows, cols), map_of(out, BOX_ROWS, cols)};
        boxes_kernel<Op><<<min(boxes, BLOCKS), 32>>>(maps, across, boxes);
    }
    const dim3 grid((cols + 255) / 256, min(rows - by_boxes + 1, 256));
    if (by_boxes < rows)
        red_kernel<Op><<<grid, 256>>>((const int *)in, (int *)out, by_boxes, rows, cols);
}

static int out_size(int, int cols) { return BOX_ROWS * cols; }
template <class Op> static bool good(const float *in, const float *out, int rows, int cols) {
    for (int i = 0; i < BOX_ROWS * cols; ++i) {
        int x = (int)(Op::fill * 0x01010101u);
        for (int r = i / cols; r < rows; r += BOX_ROWS)
            x = Op::host(x, ((const int *)in)[(size_t)r * cols + i % cols]);
        if (((const int *)out)[i] != x) return false;
    }
    return true;
}
template <class Op, bool BOXES = true> static variant of(const char *name) {
    // L2 adds 48e9 sectors of 32 bytes per second, as measured by the pattern TMA reduce
    return {name,           launch<Op, BOXES>,           capped(48 * 32),
            "L2's atomics", "lts__t_sectors_op_red.sum", good<Op>};
}

int main(void) {
    const pattern p = {"tensor reduce",   out_size,     good<Add>, 8192, 8192,
                       4.0 * 8192 * 8192, small_integer};
    const variant variants[] = {of<Add, false>("red"), of<Add>("add"), of<Min>("min"),
                                of<Max>("max"),        of<And>("and"), of<Or>("or"),
                                of<Xor>("xor")};
    const int sizes[][2] = {{1, 1}, {17, 1}, {1, 255}, {4097, 1}, {13, 260}, {1027, 1024}};
    return run(p, variants, sizes);
}
