/* check_lines: csrc/cuda/gemm/lines.cuh on the host: random products of rows that begin anywhere, read as gemm_sm90a reads them in
 * lines: a map for each class, boxes of 64 positions of its rows beside boxes of b that begin as many rows earlier as a's class
 * has before its rows, the first slot cleared. Whatever is not an element of a matrix is NaN. Every result must be written once and
 * be exact, and every byte that is read one of the 16 around a row's. Exits with 1 on a failure. */
#include "check_model.h"

#include <string.h>

#include "cuda/gemm/lines.cuh"
#include "cuda/tile/wgmma.cuh"

enum {
    BM = 64,
    BK = 64,
    MOST = 150 /* m, n or k, at most */
};
static const uint16_t POISON = 0xffff; /* a NaN */

alignas(128) static uint16_t memory[MOST * (MOST + 40) + 128];
static float b[MOST][MOST], out[MOST][MOST];
static int written[MOST][MOST];

/* tma: zeros outside [rows][positions]. */
struct Map {
    const uint16_t *base;
    int64_t positions, rows, stride;
    uint16_t at(int64_t row, int64_t q) const { return row < rows && q < positions ? base[row * stride + q] : 0; }
};

/* m x n x k, a's rows `stride` elements apart, the first one `offset` past an aligned place. */
static void check_product(int64_t m, int64_t n, int64_t k, int64_t stride, int64_t offset) {
    typedef wgmma_tile<BM, false> A;
    const uint16_t *const a = memory + 64 + offset;
    const int log2 = gk_line_classes_log2(stride), classes = 1 << log2, last = classes - 1;
    int64_t seen = 0, most = 0;
    for (uint16_t &x : memory) x = POISON;
    for (int64_t i = 0; i < m * k; ++i) memory[a - memory + i / k * stride + i % k] = random_element();
    for (int64_t i = 0; i < n * k; ++i) b[i / n][i % n] = (float)(below(7) - 3);
    memset(written, 0, sizeof written);
    for (int j = 0; j < classes; ++j) most = line_skew(a, stride, j) > most ? line_skew(a, stride, j) : most;
    for (int j = 0; j < classes; ++j) {
        const int skew = line_skew(a, stride, j);
        const int64_t rows = lines_of_class(m, log2, j), steps = (k + most + BK - 1) / BK;
        const Map map = {a + j * stride - skew, k + skew, rows, stride << log2};
        check((uintptr_t)map.base % 16 == 0 && map.stride % LINE_EACH == 0, "what tma takes", j, skew);
        check(skew >= 0 && skew < LINE_EACH, "what lies before a row", j, skew);
        check(rows == (m + last) / classes - (j > (m - 1) % classes), "rows of a class", j, (long)rows);
        seen += rows;
        for (int64_t row0 = 0; row0 < rows; row0 += BM) {
            float sum[BM][MOST] = {};
            for (int64_t step = 0; step < steps; ++step) {
                uint16_t slot[A::bytes / 2];
                for (int r = 0; r < BM; ++r)
                    for (int q = 0; q < BK; ++q) slot[A::offset_of(r, q) / 2] = map.at(row0 + r, step * BK + q);
                for (int r = 0; step == 0 && r < BM; ++r) { /* clear_before: 16 bytes a thread */
                    uint32_t words[4];
                    memcpy(words, slot + A::offset_of(r, 0) / 2, 16);
                    for (int i = 0; i < 4; ++i) words[i] &= line_keep(2 * i, skew);
                    memcpy(slot + A::offset_of(r, 0) / 2, words, 16);
                }
                for (int r = 0; r < BM; ++r)
                    for (int q = 0; q < BK; ++q) {
                        const float x = number(slot[A::offset_of(r, q) / 2]);
                        const int64_t row = step * BK + q - skew; /* of b; tma fills with zeros */
                        for (int64_t c = 0; c < n; ++c) sum[r][c] += x * (row >= 0 && row < k ? b[row][c] : 0.f);
                    }
            }
            for (int64_t r = row0; r < row0 + BM && r < rows; ++r)
                for (int64_t c = 0; c < n; ++c)
                    out[(r << log2) + j][c] = sum[r - row0][c], ++written[(r << log2) + j][c];
        }
    }
    check(seen == m, "every row in one class", (long)seen, (long)m);
    for (int64_t r = 0; r < m; ++r)
        for (int64_t c = 0; c < n; ++c) {
            float want = 0;
            for (int64_t i = 0; i < k; ++i) want += number(a[r * stride + i]) * b[i][c];
            check(written[r][c] == 1, "a result is written once", (long)r, written[r][c]);
            check(out[r][c] == want, "a result", (long)r, (long)c);
        }
}

int main() {
    int seen[4] = {};
    for (int i = 0; i < 240; ++i) {
        const int64_t each = (int64_t)1 << below(4), k = 1 + below(MOST);
        const int64_t stride = (k + below(30) + each - 1) / each * each;
        ++seen[gk_line_classes_log2(stride)];
        check_product(8 + below(MOST - 8), 1 + below(20), k, stride, below(8));
    }
    for (int log2 = 0; log2 < 4; ++log2) check(seen[log2] > 10, "products of each number of classes", log2, seen[log2]);
    for (int skew = 0; skew < LINE_EACH; ++skew)
        for (int q = 0; q < LINE_EACH; q += 2)
            check(line_keep(q, skew) == ((q >= skew ? 0xffffu : 0) | (q + 1 >= skew ? 0xffff0000u : 0)), "what is kept",
                  q, skew);
    printf("%ld passed, %ld failed\n", num_passed, num_failed);
    return num_failed != 0 || num_passed == 0;
}
