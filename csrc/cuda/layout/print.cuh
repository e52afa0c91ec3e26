// SPDX-License-Identifier: BSD-3-Clause
// print: prints a layout or a tile from inside a kernel or on the host, for debugging. No
// library code includes it, because printf needs a stack and registers.
//
//   if (threadIdx.x == 0 && blockIdx.x == 0) device_print(l);       prints (4,8):(8,1) and offsets
//   if (threadIdx.x == 0 && blockIdx.x == 0) device_print<Tile>();  prints the byte offset of each
//                                                                   16-byte chunk of a smem_tile
#ifndef GPUKERN_LAYOUT_PRINT_CUH
#define GPUKERN_LAYOUT_PRINT_CUH

#include <stdio.h>

#include "banks.cuh"

// One mode: prints its offsets in a row. Two modes: a row for each index of mode 0. More: only
// shape and stride.
static inline GK_HD void device_print(const layout &l) {
    for (int m = 0; m < l.modes; ++m) printf("%s%d", m ? "," : "(", l.shape[m]);
    printf("):");
    for (int m = 0; m < l.modes; ++m) printf("%s%d", m ? "," : "(", l.stride[m]);
    printf(")\n");
    if (l.modes > 2) return;
    const int rows = l.modes == 2 ? l.shape[0] : 1, cols = l.shape[l.modes - 1];
    for (int row = 0; row < rows; ++row) {
        for (int col = 0; col < cols; ++col) {
            const int where[2] = {l.modes == 2 ? row : col, col};
            printf("%5d", at(l, where));
        }
        printf("\n");
    }
}

template <typename Tile> static inline GK_HD void device_print() {
    printf("%d rows of %d bytes\n", Tile::rows, Tile::row_bytes);
    for (int row = 0; row < Tile::rows; ++row) {
        for (int chunk = 0; chunk < Tile::chunks; ++chunk) printf("%5d", Tile::offset(row, chunk));
        printf("\n");
    }
}

#endif
