// SPDX-License-Identifier: BSD-3-Clause
// banks: what one access to shared memory costs. Each variant is one access pattern of
// learn/claims.md, measured alone.
//
// Every warp reads its places of a table over and over; nothing else keeps the SM busy. The model
// counts wavefronts, which are clocks of shared memory. Each wavefront delivers up to 128 bytes. In
// one wavefront a bank delivers one word, and lanes that want the same word share it.
//
//   16 bytes on end        16 bytes a lane, consecutive: 4 clocks, the minimum
//   stride 2               every second word, so every second bank: 2-way conflict
//   column, rows of N      a column of float [32][N]. Rows of 32 put it into one bank (32-way).
//                          Rows of 33 spread it over all banks, and so does storing column c of row
//                          r at c ^ r.
//   halves, rows of N      a column of 16-bit [32][N], two elements a word: rows of 129 are 2-way,
//                          rows of 130 are free of conflicts
//   ldmatrix, B,M,S        a column of 16-byte chunks, in rows of 64 or 128 16-bit elements, under
//                          the swizzle B,M,S
//   one word, one chunk    all lanes read the same 4 or 16 bytes
#include "cuda/ptx/ldmatrix.cuh"
#include "measure.cuh"

enum {
    THREADS = 256,
    BLOCKS = 4,    // on an SM: their 32 warps hide the latency of a load
    ROUNDS = 1024, // reads of every warp
    WORDS = 2112,  // size of the table: past the last place of any access
    LDMATRIX = 0   // stands for ldmatrix.x4 where a width is expected
};

template <int STRIDE> struct Bytes { // lane l reads at byte l * STRIDE
    static constexpr GK_HD int at(int lane) { return lane * STRIDE; }
};
template <int SHIFT> struct XorRow { // column 0 of float [32][32], at col ^ (row >> SHIFT & 31)
    static constexpr GK_HD int at(int lane) { return 4 * (lane * 32 + ((lane >> SHIFT) & 31)); }
};
template <int ROW_BYTES, class Swizzle> struct Chunks { // chunk 0 of 32 rows
    static constexpr GK_HD int at(int lane) { return Swizzle::apply(lane * ROW_BYTES); }
};
struct ByRow8 { // chunk 0 of rows of 128 bytes, stored at chunk ^ (row / 8)
    static constexpr GK_HD int at(int lane) { return lane * 128 + ((lane >> 3) & 7) * 16; }
};

template <class Place, int WIDTH> constexpr int wavefronts() {
    const int access = WIDTH == LDMATRIX ? 16 : WIDTH, lanes = access > 8 ? 8 : 32;
    int bytes[32] = {}, sum = 0;
    for (int lane = 0; lane < 32; ++lane) bytes[lane] = Place::at(lane);
    for (int first = 0; first < 32; first += lanes)
        sum += ways_of_phase(bytes, first, lanes, access);
    return sum;
}

// Reads WIDTH bytes. A 16-byte read returns the sum of all four words; otherwise the compiler would
// load only one of them. An ldmatrix returns its first register.
template <int WIDTH> static __device__ uint32_t read(smem_addr at_s) {
    uint32_t r[4];
    if (WIDTH == LDMATRIX) return ldmatrix_x4(r, at_s), r[0];
    if (WIDTH < 16) return WIDTH == 2 ? ld_shared_16(at_s) : ld_shared_32(at_s);
    const uint4 x = ld_shared_128(at_s);
    return x.x + x.y + x.z + x.w;
}

// Writes out = in if every read returned the expected value, else NaN. Word w of the table holds w
// in both halves. `step` is 0, which the compiler cannot know, so it keeps every read.
template <class Place, int WIDTH>
__global__ void __launch_bounds__(THREADS)
    read_kernel(const float *in, float *out, int n, int step) {
    __shared__ __align__(128) uint32_t table[WORDS];
    for (int w = threadIdx.x; w < WORDS; w += THREADS) table[w] = w * 0x10001;
    __syncthreads(); // the table is complete
    const int lane = threadIdx.x % 32;
    const uint32_t place =
        WIDTH == LDMATRIX ? Place::at(lane >> 2) + (lane & 3) * 4 : Place::at(lane);
    const uint32_t there = WIDTH == 2 ? place / 4 : 0x10001 * (WIDTH == 16 ? place + 6 : place / 4);
    smem_addr at_s = cvta_to_shared(table) + Place::at(lane);
    uint32_t sum = 0;
#pragma unroll 8
    for (int i = 0; i < ROUNDS; ++i, at_s += step) sum += read<WIDTH>(at_s);
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < n) out[i] = sum == ROUNDS * there ? in[i] : NAN;
}

template <class Place, int WIDTH>
static void reads(const float *in, float *out, int rows, int cols) {
    read_kernel<Place, WIDTH>
        <<<(rows * cols + THREADS - 1) / THREADS, THREADS>>>(in, out, rows * cols, 0);
}

static bool good(const float *in, const float *out, int rows, int cols) {
    for (int i = 0; i < rows * cols; ++i) {
        if (in[i] != out[i]) return false;
    }
    return true;
}

template <class Place, int WIDTH> static variant of(const char *name) {
    const double clocks = (double)BLOCKS * THREADS / 32 * ROUNDS * wavefronts<Place, WIDTH>();
    const char *const counter = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum";
    return {name, reads<Place, WIDTH>, clocks / FIGURES.ghz * 1e-3, "shared memory", counter};
}

int main(void) {
    const pattern p = {"banks", same_size, good, BLOCKS * FIGURES.sms, THREADS, 0, small_integer};
    const variant variants[] = {
        of<Bytes<16>, 16>("16 bytes on end"),
        of<Bytes<4>, 4>("4 bytes on end"),
        of<Bytes<8>, 4>("stride 2"),
        of<Bytes<128>, 4>("column, rows of 32"),
        of<Bytes<132>, 4>("column, rows of 33"),
        of<XorRow<0>, 4>("column, col ^ row"),
        of<XorRow<5>, 4>("column, col ^ row >> 5"),
        of<Bytes<258>, 2>("halves, rows of 129"),
        of<Bytes<260>, 2>("halves, rows of 130"),
        of<Chunks<128, swizzle<0, 4, 3>>, LDMATRIX>("ldmatrix, rows of 64"),
        of<Chunks<128, swizzle<3, 4, 3>>, LDMATRIX>("ldmatrix, 64 by 3,3,3"),
        of<ByRow8, LDMATRIX>("ldmatrix, 64 by row / 8"),
        of<Chunks<256, swizzle<3, 4, 3>>, LDMATRIX>("ldmatrix, 128 by 3,3,3"),
        of<Chunks<256, swizzle<3, 4, 4>>, LDMATRIX>("ldmatrix, 128 by 3,3,4"),
        of<Bytes<0>, 4>("one word"),
        of<Bytes<0>, 16>("one chunk of 16 bytes"),
    };
    const int sizes[][2] = {{1, 1}, {17, 1}, {1, 255}, {4097, 1}, {1024, 1024}};
    return run(p, variants, sizes);
}
