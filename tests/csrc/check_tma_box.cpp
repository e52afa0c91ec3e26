/* SPDX-License-Identifier: BSD-3-Clause */
/* check_tma_box: one value, smem_box of csrc/cuda/layout, defines the layout of a box in shared
 * memory. This test checks that the tiles' own offsets follow it, and that the tensor-map fields
 * (host/tensor_shape.cuh) are derived from it.
 *
 *  check_tma_box         checks tile offsets of every Hopper kernel, fields of tensor maps, and
 *                        refusals. Exits with 1 on a failure.
 *  check_tma_box dump    reads lines "box NAME" and prints the layout, dimensions, swizzle and
 *                        bytes, for tests/layout/test_layout_headers.py */
#include "check_model.h"
#include "cuda/attn/tiles.h"
#include "cuda/product/gemm/tiles.h"
#include "cuda/host/tensor_shape.cuh"
#include "../../learn/ladder/tiles.h"
#include "cuda/layout/wgmma.cuh"
#include "core/types.c" /* the table of element types */

/* ---- positions of elements ------------------------------------------------------------------- */
static int byte_of(const smem_box &box, int col, int row) {
    const int coordinate[3] = {col, row, 0}, byte = at(box.lies, coordinate) * box.elem_bytes;
    return byte ^ (box.swizzle_bits ? (byte >> 7 & ((1 << box.swizzle_bits) - 1)) << 4 : 0);
}

/* The panels of a tile, one behind the other, each a box. */
template <class Panels> static void check_panels() {
    bool same = tma_box_of(Panels::box()).bytes == Panels::panel_bytes;
    for (int row = 0; row < Panels::rows; ++row)
        for (int col = 0; col < Panels::cols; col += 8)
            same = same && (int)Panels::along((unsigned)Panels::offset_of(row, col & 8),
                                              (col & ~8) / 8) == Panels::offset_of(row, col);
    for (int row = 0; row < Panels::rows; ++row)
        for (int col = 0; col < Panels::cols; ++col)
            same = same && Panels::offset_of(row, col) == col / 64 * Panels::panel_bytes +
                                                              byte_of(Panels::box(), col % 64, row);
    check(same, "panels lie as their box says", Panels::rows, Panels::cols);
}

template <int BX, bool ALONG_X, int EACH> static void check_operand() {
    typedef wgmma_tile<BX, ALONG_X, EACH> Tile;
    const smem_box box = wgmma_box(128 / EACH, Tile::rows);
    bool same = tma_box_of(box).bytes == Tile::panel_bytes;
    for (int x = 0; x < BX; ++x)
        for (int k = 0; k < EACH; ++k)
            same = same && Tile::offset_of(x, k) ==
                               (ALONG_X ? x / EACH * Tile::panel_bytes : 0) +
                                   byte_of(box, ALONG_X ? x % EACH : k, ALONG_X ? k : x);
    check(same, "an operand lies as its box says", BX, ALONG_X);
}

template <int COLS, int ELEM_BYTES> static void check_results() {
    typedef smem_tile<16, COLS * ELEM_BYTES> Panel;
    bool same = tma_box_of(Panel::box(ELEM_BYTES)).bytes == Panel::bytes;
    for (int row = 0; row < 16; ++row)
        for (int col = 0; col < COLS; ++col)
            same = same && Panel::offset_of(row, col, ELEM_BYTES) ==
                               byte_of(Panel::box(ELEM_BYTES), col, row);
    for (int row = 0; row < 16; ++row)
        for (int c = 0; c < Panel::chunks; ++c)
            same = same &&
                   (int)Panel::chunk((unsigned)Panel::offset(row, 0), c) == Panel::offset(row, c);
    check(same, "results lie as their box says", COLS, ELEM_BYTES);
}

template <class Tile> static void check_forward() {
    check_panels<wgmma_panels<Tile::WARPGROUPS * 64, Tile::HEAD_DIM>>();
    check_panels<wgmma_panels<Tile::BKV, Tile::HEAD_DIM>>();
    check_panels<wgmma_panels<Tile::BKV, Tile::HEAD_DIM_V>>();
}

template <class Tile> static void check_backward() {
    check_panels<wgmma_panels<Tile::BKV, Tile::HEAD_DIM>>();
    check_panels<wgmma_panels<Tile::BQ, Tile::HEAD_DIM_V>>();
}

/* ---- fields of tensor maps ------------------------------------------------------------------- */
/* The earlier way to make tensor maps, from two or three numbers. The test compares with it. */
static TensorMapFields fields_of_numbers(const TensorShape &shape, int box0, int box1, int box2) {
    const int64_t bytes = (int64_t)gk_dtype_bytes(shape.dtype);
    TensorMapFields f = {
        {}, {}, {(uint32_t)box0, (uint32_t)box1, (uint32_t)box2, 1, 1}, {1, 1, 1, 1, 1}, 0};
    for (int d = 0; d < TENSOR_DIMS; ++d) {
        f.size[d] = (uint64_t)shape.size[d];
        if (d > 0)
            f.stride_bytes[d - 1] = shape.size[d] > 1 ? (uint64_t)(shape.stride[d] * bytes)
                                    : d > 1           ? f.stride_bytes[d - 2]
                                                      : 16;
    }
    f.swizzle_bytes = box0 * bytes == 64 ? 64 : box0 * bytes == 128 ? 128 : 0;
    return f;
}

static bool equal(const TensorMapFields &a, const TensorMapFields &b) {
    bool same = a.swizzle_bytes == b.swizzle_bytes;
    for (int d = 0; d < TENSOR_DIMS; ++d) {
        same = same && a.size[d] == b.size[d] && a.box[d] == b.box[d] && a.step[d] == b.step[d];
        if (d > 0) same = same && a.stride_bytes[d - 1] == b.stride_bytes[d - 1];
    }
    return same;
}

/* Tensors with every subset of dimensions that have one element. */
static void check_fields(gk_dtype dtype, const smem_box &smem, int box0, int box1, int box2 = 1) {
    const tma_box box = tma_box_of(smem);
    bool same = box.ok && smem.elem_bytes == (int)gk_dtype_bytes(dtype) &&
                box.bytes == box0 * box1 * box2 * smem.elem_bytes;
    for (int ones = 0; ones < 1 << TENSOR_DIMS; ++ones) {
        TensorShape x = {NULL, dtype, {}, {1}, false};
        for (int d = 0; d < TENSOR_DIMS; ++d) {
            x.size[d] = ones >> d & 1 ? 1 : 2 + below(5000);
            if (d > 0) x.stride[d] = (1 + below(1 << 20)) * 8;
        }
        same = same && equal(tensor_map_fields(x, box), fields_of_numbers(x, box0, box1, box2));
    }
    check(same, "a tensor map's fields", box0, box1);
}

static void check_every_call() {
    /* gemm's operands and the contents of their last boxes; attention's Q, K, V */
    for (int rows = 1; rows <= 256; ++rows) {
        check_fields(GK_BF16, wgmma_box(2, rows), 64, rows);
        check_fields(GK_F16, wgmma_box(2, rows), 64, rows);
        check_fields(GK_F32, wgmma_box(4, rows), 32, rows);
    }
    for (int queries = 1; queries <= 64; ++queries)
        check_fields(GK_BF16, wgmma_box(2, queries, 4), 64, queries, 4);
    check_fields(GK_BF16, smem_tile<16, 128>::box(2), 64, 16); /* results */
    check_fields(GK_BF16, smem_tile<16, 64>::box(2), 32, 16);
    check_fields(GK_F32, smem_tile<16, 128>::box(4), 32, 16);
    check_fields(GK_F32, smem_rows(4, 1024, 8), 256, 8); /* no swizzle: learn/patterns */
    check_fields(GK_F32, smem_rows(4, 128, 32), 32, 32);
}

static void check_refusals() {
    const struct {
        smem_box box;
        int mode;
    } cases[] = {
        {{{2, {64, 64}, {2, 128}}, 2, 3}, 0},                /* gaps within a row */
        {{{2, {64, 64}, {1, 65}}, 2, 3}, 1},                 /* gaps between rows */
        {{{2, {32, 64}, {1, 32}}, 2, 3}, 0},                 /* the swizzle covers two rows */
        {{{2, {4, 64}, {1, 4}}, 2, 0}, 0},                   /* half a chunk of 16 bytes */
        {{{2, {64, 257}, {1, 64}}, 2, 3}, 1},                /* too many rows */
        {{{4, {64, 8, 2, 2}, {1, 64, 512, 1024}}, 2, 3}, 3}, /* one dimension too many */
        {{{3, {64, 8, 2}, {1, 64, 1024}}, 2, 3}, 2},         /* gaps between planes */
        {{{2, {64, 0}, {1, 64}}, 2, 3}, 1},                  /* empty */
    };
    for (const auto &c : cases) {
        const tma_box box = tma_box_of(c.box);
        check(!box.ok && box.mode == c.mode, "a refusal of mode", c.mode, box.mode);
    }
}

/* ---- for the Python counterpart -------------------------------------------------------------- */
static void print(const smem_box &box) {
    const tma_box tma = tma_box_of(box);
    const int shift = box.elem_bytes == 4 ? 2 : 1; /* bytes to elements */
    if (box.swizzle_bits) printf("Sw<%d,%d,3> o 0 o ", box.swizzle_bits, 4 - shift);
    const int *n = box.lies.shape, *d = box.lies.stride;
    printf("(%d,%d,%d):(%d,%d,%d) %d,%d,%d %d %d\n", n[0], n[1], n[2], d[0], d[1], d[2],
           tma.size[0], tma.size[1], tma.size[2], tma.swizzle_bytes, tma.bytes);
}

static int dump() {
    char name[64];
    while (scanf(" box %63s", name) == 1) {
        if (strcmp(name, "operand") == 0) /* of gemm_sm90a_*_128x*: 64 of k */
            print(wgmma_box(2, 128));
        else if (strcmp(name, "operand_tf32") == 0)
            print(wgmma_box(4, 128));
        else if (strcmp(name, "keys") == 0) /* a panel of flash_attn_fwd_sm90a's K */
            print(wgmma_panels<FwdHopper128::BKV, FwdHopper128::HEAD_DIM>::box());
        else if (strcmp(name, "stacked") == 0) /* 16 queries of 8 heads */
            print(wgmma_box(2, 16, 8));
        else if (strcmp(name, "results") == 0)
            print(smem_tile<16, 128>::box(2));
        else if (strcmp(name, "results_narrow") == 0)
            print(smem_tile<16, 64>::box(2));
        else if (strcmp(name, "plain") == 0)
            print(smem_rows(4, 1024, 8));
        else
            return 2;
    }
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "dump") == 0) return dump();
    check_forward<FwdHopper64>(), check_forward<FwdHopper64Short>(), check_forward<FwdHopper96>();
    check_forward<FwdHopper128>(), check_forward<FwdHopper192>(), check_forward<FwdHopper192v128>();
    check_forward<FwdHopper256>();
    check_backward<BwdHopper64>(), check_backward<BwdHopper96>(), check_backward<BwdHopper128>();
    check_backward<BwdHopper256>();
    check_operand<64, false, 64>(), check_operand<128, false, 64>(),
        check_operand<176, false, 64>();
    check_operand<256, false, 64>(), check_operand<64, true, 64>(), check_operand<256, true, 64>();
    check_operand<128, false, 32>(), check_operand<128, true, 32>();
    check_results<64, 2>(), check_results<32, 2>(), check_results<32, 4>();
    check_every_call();
    check_refusals();
    printf("%ld passed, %ld failed\n", num_passed, num_failed);
    return num_failed != 0 || num_passed == 0;
}
