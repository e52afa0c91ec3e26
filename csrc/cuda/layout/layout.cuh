// SPDX-License-Identifier: BSD-3-Clause
// layout: maps of coordinates to offsets, computed at compile time.
//
// Like all of layout/, plain C++17 for the host compiler and nvcc. Kernels only need offsets;
// operations on layouts (composition, complement, division, products) are in
// torch_gpukern.layout.
//
// A layout is shape:stride per mode. The first mode runs fastest (colexicographic order). For
// example, (4,8):(8,1) maps index i to 8 (i % 4) + i / 4. There are at most LAYOUT_MAX_MODES
// modes, and no nesting.
#ifndef GPUKERN_LAYOUT_LAYOUT_CUH
#define GPUKERN_LAYOUT_LAYOUT_CUH

#ifdef __CUDACC__
#define GK_HD __host__ __device__
#else
#define GK_HD
#endif

// A position in a matrix.
struct coord {
    int row, col;
};

// ---- layouts ------------------------------------------------------------------------------------

enum {
    LAYOUT_MAX_MODES = 8
};

struct layout {
    int modes;
    int shape[LAYOUT_MAX_MODES], stride[LAYOUT_MAX_MODES]; // shapes >= 1; strides of any sign
};

// The offset of a coordinate: one number per mode.
constexpr GK_HD int at(const layout &l, const int *coordinate) {
    int offset = 0;
    for (int m = 0; m < l.modes; ++m) offset += coordinate[m] * l.stride[m];
    return offset;
}

#endif
