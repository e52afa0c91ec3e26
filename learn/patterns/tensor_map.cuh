// SPDX-License-Identifier: BSD-3-Clause
// tensor_map: makes tensor maps for the patterns. It includes the library's source, because a
// pattern does not link the library.
#ifndef TENSOR_MAP_CUH
#define TENSOR_MAP_CUH

#include <stdarg.h>

#include "cuda/host/tensormap.cu"
#include "cuda/ptx/tma.cuh"
#include "measure.cuh"
#include "core/types.c" // the table of element types

extern "C" gk_status gk_fail(gk_status code, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    exit(code);
}
extern "C" gk_status gk_no_case(const char *what, gk_dtype dtype) {
    return gk_fail(GK_ERR_UNSUPPORTED, "%s: no case for %s", what, gk_dtype_name(dtype));
}

// The tensor map of a dense [rows][cols] matrix of floats with boxes of box_rows x box_cols. A row
// must be a multiple of 16 bytes.
static inline CUtensorMap map_of(const float *data, int rows, int cols, int box_rows,
                                 int box_cols) {
    CUtensorMap map;
    const TensorShape shape = {data, GK_F32, {cols, rows, 1, 1, 1}, {1, cols, 0, 0, 0}, false};
    make_tensor_map("pattern", shape, smem_rows(4, box_cols * 4, box_rows), &map);
    return map;
}

#endif
