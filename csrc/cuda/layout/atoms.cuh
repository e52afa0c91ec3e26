// SPDX-License-Identifier: BSD-3-Clause
// atoms: which matrix element each register of an mma, ldmatrix or movmatrix holds.
#ifndef GPUKERN_LAYOUT_ATOMS_CUH
#define GPUKERN_LAYOUT_ATOMS_CUH

#include "layout.cuh"

// ---- fragments ----------------------------------------------------------------------------------
// e counts a lane's elements. With 16 bits, a register holds two (register e / 2, low half
// first); with 32 bits, one. The maps are written in shifts, because a kernel's lane is a signed
// number that the compiler does not know to be non-negative.

// Accumulator of m16n8, any k: (m, n) of c[e], e < 4.
constexpr GK_HD coord frag_c(int lane, int e) {
    return {(lane >> 2) + (e >> 1) * 8, (lane & 3) * 2 + (e & 1)};
}

// m16n8k16, 16-bit operands: (m, k) of element e < 8 of A; (k, n) of element e < 4 of B.
constexpr GK_HD coord frag_a16(int lane, int e) {
    return {(lane >> 2) + (e >> 1 & 1) * 8, (lane & 3) * 2 + (e & 1) + (e >> 2) * 8};
}
constexpr GK_HD coord frag_b16(int lane, int e) {
    return {(lane & 3) * 2 + (e & 1) + (e >> 1) * 8, lane >> 2};
}

// m16n8k8, tf32: (m, k) of a[e], e < 4; (k, n) of b[e], e < 2.
constexpr GK_HD coord frag_a32(int lane, int e) {
    return {(lane >> 2) + (e & 1) * 8, (lane & 3) + (e >> 1) * 4};
}
constexpr GK_HD coord frag_b32(int lane, int e) { return {(lane & 3) + e * 4, lane >> 2}; }

// ldmatrix: lane l gives the address of row ldmatrix_row(l) of matrix ldmatrix_matrix(l). Then
// register i of a lane holds elements (row, col) of matrix i, halves 0 and 1.
constexpr GK_HD int ldmatrix_matrix(int lane) { return lane >> 3; }
constexpr GK_HD int ldmatrix_row(int lane) { return lane & 7; }
constexpr GK_HD coord ldmatrix_element(int lane, int half, bool trans) {
    return trans ? coord{(lane & 3) * 2 + half, lane >> 2}
                 : coord{lane >> 2, (lane & 3) * 2 + half};
}

// movmatrix.trans: the element (row, col) of the source that a lane receives. The source has the
// layout of an ldmatrix matrix.
constexpr GK_HD coord movmatrix_element(int lane, int half) {
    return ldmatrix_element(lane, half, true);
}

// The (row, chunk) that each lane of an ldmatrix.x4 addresses for a block of 16 rows and 2
// chunks. The order of the four matrices is rows first (A from [m][k], or B from [k][n] with
// transposition) or chunks first (B from [n][k], or A from [k][m] with transposition).
constexpr GK_HD coord ldmatrix_down_first(int lane) { return {lane & 15, lane >> 4}; }
constexpr GK_HD coord ldmatrix_along_first(int lane) {
    return {(lane & 7) + (lane >> 4) * 8, lane >> 3 & 1};
}

#endif
