/* lines.cuh: lines of 16-bit elements that begin anywhere, as matrices that tma reads.
 *
 * Lines 8 / gcd(8, stride) apart (gk_line_classes_log2) begin equally many elements, their skew, past a multiple of 16 bytes,
 * whatever the stride: they are a class, a matrix whose position 0 is the 16 bytes around its first line's first element.
 * Position q of a line is element q - skew; what lies before a line may be anything.
 * Plain C++, so that the tests walk the same functions. */
#ifndef GPUKERN_CUDA_GEMM_LINES_CUH
#define GPUKERN_CUDA_GEMM_LINES_CUH

#include "../../internal.h"
#include "../tile/layout.cuh"

#include <stdint.h>

enum {
    LINE_EACH = 8,    /* elements of 16 bytes */
    LINE_CLASSES = 8, /* at most */
};

/* Of line j. */
inline int line_skew(const void *first, int64_t stride, int64_t j) {
    return (int)(((uintptr_t)first / 2 + (uint64_t)(j * stride)) % LINE_EACH);
}

/* How many of `lines` are in class j. */
constexpr GK_HD int64_t lines_of_class(int64_t lines, int classes_log2, int j) {
    return (lines - j + (1 << classes_log2) - 1) >> classes_log2;
}

/* Of the two elements from position q on in a register, the bits that do not lie before their line. */
constexpr GK_HD uint32_t line_keep(int q, int skew) {
    return skew >= q + 2 ? 0 : skew == q + 1 ? 0xffff0000u : 0xffffffffu;
}

#endif
