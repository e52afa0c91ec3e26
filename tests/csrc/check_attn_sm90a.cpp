/* SPDX-License-Identifier: BSD-3-Clause */
/* check_attn_sm90a: checks on the host, without a GPU, the device functions of Hopper's
 * attention kernels: which block takes which tile (attn/forward/fwd_schedule.cuh), the order of
 * key blocks, softcap's polynomial, the layout of operands in shared memory (wgmma_panels of
 * layout/wgmma.cuh) as TMA writes and WGMMA reads it, and which accumulator registers are which
 * operand of the next product. Exits with 1 on a failure. */
#include "check_model.h"
#include "cuda/attn/backward/bwd_order.cuh"
#include "cuda/attn/backward/bwd_split.cuh"
#include "cuda/attn/forward/fwd_schedule.cuh"
#include "cuda/attn/forward/fwd_score.cuh"
#include "cuda/tile/divisor.h"
#include "cuda/layout/atoms.cuh"
#include "cuda/layout/wgmma.cuh"

#include <initializer_list>
#include <stdlib.h>
#include <vector>

/* ---- tiles and blocks ------------------------------------------------------------------------ */
/* Number of key blocks that the rows of a tile see under a causal mask in which the last row
 * sees the last key. */
static int keys_of(int tile, int bq, int bkv) { return ((tile + 1) * bq + bkv - 1) / bkv; }

/* Visits every tile of every head and split, which must happen once each, and adds up the keys
 * of each block. */
struct Walk {
    int tiles, heads, splits, bq, bkv;
    std::vector<char> hits;
    std::vector<long> load;
    long longest = 0, most = 0; /* keys of a tile; tiles of a block */
    bool inside = true;

    void take(int block, int head, int split, int tile) {
        inside = inside && head >= 0 && head < heads && split >= 0 && split < splits && tile >= 0 &&
                 tile < tiles;
        if (!inside) return;
        const long cost = keys_of(tile, bq, bkv);
        ++hits[((size_t)head * splits + split) * tiles + tile];
        load[block] += cost;
        longest = cost > longest ? cost : longest;
    }
    bool once() const {
        bool good = inside;
        for (char hit : hits) good = good && hit == 1;
        return good;
    }
    long worst() const {
        long most_keys = 0;
        for (long keys : load) most_keys = keys > most_keys ? keys : most_keys;
        return most_keys;
    }
    double mean() const {
        long total = 0;
        for (long keys : load) total += keys;
        return load.empty() ? 0 : (double)total / (double)load.size();
    }
};

/* find_tiles' loop for a dense call. */
static void check_schedule(int tiles, int heads, int splits, int paired, int sms, int bq, int bkv) {
    FwdSchedule s = {};
    s.tiles = tiles;
    s.splits = splits;
    s.paired = paired;
    s.heads = heads;
    fwd_make_schedule(&s, sms);
    Walk each_tile = {tiles,
                      heads,
                      splits,
                      bq,
                      bkv,
                      std::vector<char>((size_t)heads * splits * tiles),
                      std::vector<long>(s.blocks)};
    for (int block = 0; block < s.blocks; ++block) {
        long taken = 0;
        for (FwdPlace at; (at = fwd_place_of(s, block, (int)taken)).head >= 0 && each_tile.inside;
             ++taken)
            each_tile.take(block, at.head, at.split, at.tile);
        each_tile.most = taken > each_tile.most ? taken : each_tile.most;
    }
    check(s.blocks <= sms && (s.blocks == sms || s.blocks == tiles * heads * splits),
          "blocks: tiles, heads", tiles, heads);
    check(each_tile.once(), "every tile once: tiles, blocks", tiles, s.blocks);
    if (!paired) return;
    /* The worst block has at most one tile more than the mean; with few tiles, one pair more. If
     * the rows of a tile are not a whole number of key blocks, each tile also rounds up by half a
     * block. */
    const long unit = tiles < FWD_SINGLES ? each_tile.longest + 2 : each_tile.longest;
    check((double)each_tile.worst() <=
              each_tile.mean() + (double)unit + (bq % bkv ? (double)each_tile.most / 2 : 0) + 1e-6,
          "the worst block's keys: tiles, blocks", tiles, s.blocks);
}

/* find_tiles' loop for a packed call of one sequence: block c takes units c, c + blocks, .. */
static void check_packed(int tiles, int heads, int splits, int paired, int blocks) {
    FwdSchedule s = {};
    s.splits = splits;
    s.paired = paired;
    s.heads = heads;
    Walk each_tile = {tiles,
                      heads,
                      splits,
                      128,
                      128,
                      std::vector<char>((size_t)heads * splits * tiles),
                      std::vector<long>(blocks)};
    const int units = heads * fwd_units_of(tiles, paired) * splits;
    for (int unit = 0; unit < units; ++unit) {
        const FwdUnit u = fwd_unit(tiles, s, unit);
        for (int tile : u.tile)
            if (tile >= 0) each_tile.take(unit % blocks, u.head, u.split, tile);
    }
    check(each_tile.once(), "packed: every tile once: tiles, blocks", tiles, blocks);
}

/* A window of short_tiles tiles and one more. The worst block has at most `most` times the mean
 * number of keys, or one tile more. */
static void check_window(int tiles, int short_tiles, int heads, int sms, double most) {
    FwdSchedule s = {};
    s.tiles = tiles;
    s.splits = 1;
    s.heads = heads;
    s.short_tiles = short_tiles;
    fwd_make_schedule(&s, sms);
    std::vector<char> hits((size_t)heads * tiles);
    bool inside = true;
    long total = 0, worst = 0;
    for (int block = 0; block < s.blocks; ++block) {
        long load = 0;
        int i = 0;
        for (FwdPlace at; inside && (at = fwd_place_of(s, block, i)).head >= 0; ++i) {
            inside = at.head < heads && at.tile >= 0 && at.tile < tiles && at.split == 0 &&
                     i <= tiles * heads;
            if (inside) {
                ++hits[(size_t)at.head * tiles + at.tile];
                load += at.tile < short_tiles ? at.tile + 1 : short_tiles + 1;
            }
        }
        total += load;
        worst = load > worst ? load : worst;
    }
    bool once = inside;
    for (char hit : hits) once = once && hit == 1;
    check(once, "windows: every tile once: tiles, young", tiles, short_tiles);
    const double mean = (double)total / s.blocks;
    check((double)worst <= fmax(most * mean, most > 2 ? mean + short_tiles + 1 : 0) + 1e-6,
          "windows: the worst block's keys: tiles, young", tiles, short_tiles);
}

static void check_schedules() {
    const int tile[4][2] = {{128, 128}, {192, 128}, {128, 96}, {128, 64}};
    const int some_blocks[] = {1, 2, 3, 7, 16, 66, 114, 132, 1000},
              some_heads[] = {1, 2, 5, 16, 33, 128};
    const int many_tiles[] = {768, 1023, 1024};
    for (int tiles = 1; tiles <= 40; ++tiles)
        for (int paired = 0; paired <= 1; ++paired)
            for (int splits = 1; splits <= 5; splits += 2)
                for (int blocks : some_blocks)
                    for (int heads : some_heads) {
                        const int *t = tile[(tiles + heads) % 4];
                        check_schedule(tiles, heads, paired ? 1 : splits, paired, blocks, t[0],
                                       t[1]);
                        check_packed(tiles, heads, paired ? 1 : splits, paired, blocks);
                    }
    for (int tiles : many_tiles) check_schedule(tiles, 16, 1, 1, 132, 128, 128);
    /* 16 heads of 128 tiles are six rounds of pairs for 132 blocks; the remaining tiles end
     * within 2 % of the mean */
    FwdSchedule long_one = {};
    long_one.tiles = 128;
    long_one.splits = 1;
    long_one.paired = 1;
    long_one.heads = 16;
    fwd_make_schedule(&long_one, 132);
    long worst = 0;
    for (int c = 0; c < 132; ++c) {
        long load = 0;
        FwdPlace at;
        for (int i = 0; (at = fwd_place_of(long_one, c, i)).head >= 0; ++i) load += at.tile + 1;
        worst = load > worst ? load : worst;
    }
    check(long_one.rounds == 6 && worst < 1.02 * 16 * 128 * 129 / 2 / 132, "singles end even",
          worst, long_one.rounds);
    /* Windows: every tile comes once, and a head's first tiles come last. With 32 heads of 64
     * tiles, eight of them short, blocks end within 2 % of the mean. */
    for (int tiles = 1; tiles <= 40; ++tiles)
        for (int short_tiles = 1; short_tiles < tiles; short_tiles += 1 + short_tiles / 2)
            for (int blocks : some_blocks)
                for (int heads : some_heads) check_window(tiles, short_tiles, heads, blocks, 4);
    check_window(64, 8, 32, 132, 1.02);
    check_window(66, 8, 32, 132, 1.02);
    /* longest first; every pair sees equally many keys */
    FwdSchedule s = {};
    s.splits = 1;
    s.paired = 1;
    s.heads = 2;
    for (int unit = 0; unit < 6; ++unit) {
        const FwdUnit u = fwd_unit(6, s, unit);
        check(u.head == unit / 3 && u.tile[0] == 5 - unit % 3 && u.tile[1] == unit % 3,
              "pairs of six", unit, u.tile[1]);
    }
    /* five tiles: two pairs of each head, then the two middle tiles */
    check(fwd_unit(5, s, 3).head == 1 && fwd_unit(5, s, 3).tile[0] == 3 &&
              fwd_unit(5, s, 3).tile[1] == 1,
          "a pair of five", 3, 1);
    check(fwd_unit(5, s, 5).head == 1 && fwd_unit(5, s, 5).tile[0] == 2 &&
              fwd_unit(5, s, 5).tile[1] == -1,
          "the middle of five", 5, -1);
}

/* Every block of a tile comes once, the nearest first. On each side the distance then only
 * grows. */
static void check_blocks() {
    for (int blocks = 1; blocks <= 40; ++blocks)
        for (int nearest = 0; nearest < blocks; ++nearest) {
            int hits[40] = {};
            bool order = fwd_block(0, nearest) == nearest;
            for (int at = 0; at < blocks; ++at) {
                const int block = fwd_block(at, nearest);
                order = order && block >= 0 && block < blocks && ++hits[block] == 1;
                order = order && (block <= nearest ? block == nearest - at : block == at);
            }
            check(order, "blocks from the nearest on: blocks, nearest", blocks, nearest);
        }
}

/* row_of: in a tile of one head there are more rows per head than exist; with several heads
 * there are seq_q. */
static void check_stacked() {
    const Divisor alone = divisor_of(INT32_MAX);
    for (uint32_t row : {0u, 1u, 191u, 1u << 20, 1u << 30, (1u << 30) + 191, 2147483646u})
        check(alone.into(row) == 0, "a head alone", (long)row, 0);
    for (uint32_t rows = 1; rows <= 192; ++rows)
        for (uint32_t row = 0; row < 192; ++row)
            check(divisor_of(rows).into(row) == row / rows, "stacked heads", (long)rows, (long)row);
}

/* ---- scores ---------------------------------------------------------------------------------- */
/* Scores near the cap: within 1e-6 of cap tanh(scale s / cap) for caps of every size. `end`
 * distinguishes them by one bit. */
static void check_softcap() {
    for (double scale : {1.1e-6, 0.0625, 0.088388, 0.125, 1.0, 37.5, 9e5})
        for (double factor :
             {1.1e-15, 1e-9, 1e-6, 1.1e-6, 1e-4, 2.9e-4, 3.1e-4, 1.25e-3, 0.02, 0.5, 8.0, 900.0}) {
            const ScoreUnits u = score_units(scale, scale / factor, true);
            const double most = (factor > 1e-6 ? 0.272 : 1e-3) / factor,
                         unit = 1.4426950408889634 * (double)(float)scale;
            int exponent;
            bool good = u.plain && u.capped && frexp(u.end, &exponent) == 0.5;
            double worst = 0;
            for (int i = 1; i <= 20000; ++i) {
                const float s = (float)(most * (i % 2 ? i / 20000.0 : exp(-0.002 * i)));
                const float q = cap_square(s, u);
                int of_q;
                frexp(q, &of_q);
                good = good && q == cap_square(-s, u) &&
                       (q < u.end ? of_q == exponent - 1 : s > u.limit);
                worst = fmax(worst,
                             fabs(s * cap_factor(q, u) / (unit * tanh(s * factor) / factor) - 1));
            }
            for (double far : {1.0001, 1.5, 3.0, 1e3, 1e15})
                good = good && !(cap_square((float)(far * most), u) < u.end);
            check(good && !(cap_square(NAN, u) < u.end), "softcap: near and far, 1 / factor",
                  (long)(1 / factor), 0);
            check(worst < 1e-6, "softcap: relative error in 1e-9, 1 / factor", (long)(worst * 1e9),
                  (long)(1 / factor));
            check(fabs(u.over / (unit / factor) - 1) < 1e-6, "softcap: the cap itself",
                  (long)(1 / factor), 0);
        }
    const double odd[][2] = {{0, 3}, {-0.5, 3}, {1e-30, 3}, {1e30, 3}, {1, 1e16}, {1, 1e-4}};
    for (const double (&x)[2] : odd)
        check(!score_units(x[0], x[1], false).plain, "not in the product's unit", 0, 0);
    for (int from = -70; from <= 140;
         ++from) /* rows_of_block: the columns that a row sees, from the lane's first */
        for (int to = -70; to <= 140; ++to) {
            uint32_t want[3] = {};
            for (int n = 0; n < 16; ++n)
                for (int e = 0; e < 2; ++e)
                    for (int size = 0; size < 3; ++size)
                        if (8 * n + e >= from && 8 * n + e < to && n < 8 + 4 * size)
                            want[size] |= 1u << (2 * n + e);
            check(columns_in<16>(from, to) == want[0] && columns_in<24>(from, to) == want[1] &&
                      columns_in<32>(from, to) == want[2],
                  "columns that a row sees: from, to", from, to);
        }
    for (double scale : {-1.0, 0.0, 1e-31})
        check(!score_units(scale, 0, false).plain, "a scale that is not above 0", 0, 0);
    check(score_units(1e30, 0, false).plain, "scale alone", 0, 0);
}

/* ---- operands in shared memory --------------------------------------------------------------- */
enum {
    MEMORY = 227 * 1024, /* of a block */
    NOTHING = -1
};
static int memory[MEMORY / 2]; /* for each 16-bit word: row * 1024 + column of the element there */

/* The 128-byte swizzle of TMA and WGMMA: bits 4 .. 6 of an address are xored with bits 7 .. 9. */
static uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

/* load_panels: boxes of 64 columns and ROWS rows of 128 bytes, one behind the other. */
template <int ROWS, int COLS> static void tma_writes(uint32_t tile) {
    typedef wgmma_panels<ROWS, COLS> Panels;
    for (int i = 0; i < MEMORY / 2; ++i) memory[i] = NOTHING;
    for (int c = 0; c < Panels::panels; ++c)
        for (int row = 0; row < ROWS; ++row)
            for (int col = 0; col < 64; ++col) {
                int &at =
                    memory[swizzled(tile + c * Panels::panel_bytes + row * 128 + col * 2) / 2];
                check(at == NOTHING, "boxes do not overlap", row, col);
                at = row * 1024 + c * 64 + col;
            }
}

/* The address from which WGMMA reads element (x, k) of a k16 step; x is m or n. In a descriptor
 * bits 0 to 13 are the address, 16 to 29 the leading and 32 to 45 the stride offset, each over
 * 16. K-major: 8 rows of x are a block of 1024 bytes, and the stride offset leads to the next
 * block. MN-major: a row is one k with 64 of x; the stride offset leads to the next 8 of k, the
 * leading offset to the next 64 of x. */
static int wgmma_reads(uint64_t descriptor, bool mn_major, int x, int k) {
    const uint32_t start = (uint32_t)(descriptor & 0x3fff) << 4,
                   leading = (uint32_t)(descriptor >> 16 & 0x3fff) << 4,
                   stride = (uint32_t)(descriptor >> 32 & 0x3fff) << 4;
    const uint32_t at = mn_major
                            ? start + x / 64 * leading + k / 8 * stride + k % 8 * 128 + x % 64 * 2
                            : start + x / 8 * stride + x % 8 * 128 + k * 2;
    return swizzled(at) < MEMORY ? memory[swizzled(at) / 2] : NOTHING;
}

/* Mode 1 is the 128-byte swizzle; base offset 0; all unused bits are 0. */
static bool good_fields(uint64_t d) {
    return d >> 62 == 1 && (d >> 46 & 0xffff) == 0 && (d & 0xc000c000) == 0;
}

template <int ROWS, int COLS> static void check_panels_at(uint32_t tile) {
    typedef wgmma_panels<ROWS, COLS> Panels;
    tma_writes<ROWS, COLS>(tile);
    bool k_fields = true, q = true, k = true, mn_fields = true, v = true, places = true;
    for (int col = 0; col < COLS; col += 16) {
        for (int row = 0; row + 64 <= ROWS; row += 8) { /* Q: the 64 rows of a warpgroup */
            const uint64_t d = Panels::k_major(tile, row, col);
            k_fields = k_fields && good_fields(d);
            for (int x = 0; x < 64; ++x)
                for (int e = 0; e < 16; ++e)
                    q = q && wgmma_reads(d, false, x, e) == (row + x) * 1024 + col + e;
        }
        const uint64_t d = Panels::k_major(tile, 0, col); /* K: all rows */
        for (int x = 0; x < ROWS; ++x)
            for (int e = 0; e < 16; ++e) k = k && wgmma_reads(d, false, x, e) == x * 1024 + col + e;
    }
    for (int row = 0; row < ROWS; row += 16) { /* V */
        const uint64_t d = Panels::mn_major(tile, row);
        mn_fields = mn_fields && good_fields(d);
        for (int x = 0; x < COLS; ++x)
            for (int e = 0; e < 16; ++e)
                v = v && wgmma_reads(d, true, x, e) == (row + e) * 1024 + x;
    }
    for (int row = 0; row < ROWS; ++row)
        for (int col = 0; col < Panels::panels * 64; ++col) {
            const int at = Panels::offset_of(row, col),
                      in_panel = at - col / 64 * Panels::panel_bytes;
            places = places && memory[(tile + at) / 2] == row * 1024 + col;
            /* clear_rows: a row's bytes contain no other row */
            places = places && in_panel / 128 == row;
        }
    check(k_fields && mn_fields, "fields of a descriptor", ROWS, COLS);
    check(q, "Q by k_major", ROWS, COLS);
    check(k, "K by k_major", ROWS, COLS);
    check(v, "V by mn_major", ROWS, COLS);
    check(places, "offset_of", ROWS, COLS);
}

/* store_tile: stores a warp's 16 rows with stmatrix, then as boxes of 64 columns and 16 rows. */
template <int ROWS, int COLS> static void check_store() {
    typedef wgmma_panels<ROWS, COLS> Panels;
    bool registers = true, boxes = true, banks = true;
    for (int warp = 0; warp < ROWS / 16; ++warp) {
        for (int n = 0; n < COLS / 8; n += 2)
            for (int e = 0; e < 4; ++e) {
                unsigned chunks = 0;
                for (int lane = 0; lane < 32;
                     ++lane) /* stage_rows: the others from the first octet's address */
                    registers =
                        registers &&
                        Panels::offset_of(16 * warp + lane % 16, 8 * n + lane / 16 * 8) ==
                            (Panels::offset_of(16 * warp + lane % 16, lane / 16 * 8) ^ n % 8 * 16) +
                                n / 8 * Panels::panel_bytes;
                /* lane 8 e + row points to row `row` of matrix e */
                for (int row = 0; row < 8; ++row) {
                    const int lane = 8 * e + row;
                    const int at = Panels::offset_of(16 * warp + lane % 16, 8 * n + lane / 16 * 8);
                    chunks |= 1u << (at / 16 % 8);
                    for (int col = 0; col < 8; ++col)
                        registers = registers &&
                                    at + 2 * col == Panels::offset_of(16 * warp + e % 2 * 8 + row,
                                                                      8 * (n + e / 2) + col);
                }
                banks = banks && chunks == 0xff;
                for (int lane = 0; lane < 32; ++lane)
                    /* four[e] packs o[4 n + 2 e], o[4 n + 2 e + 1] */
                    for (int half = 0; half < 2; ++half) {
                        const coord at = ldmatrix_element(lane, half, false),
                                    d = wgmma_d(warp, lane, 4 * n + 2 * e + half);
                        registers = registers && d.row == 16 * warp + e % 2 * 8 + at.row &&
                                    d.col == 8 * (n + e / 2) + at.col;
                    }
            }
        for (int col = 0; col < COLS; ++col)
            for (int row = 0; row < 16; ++row)
                boxes =
                    boxes && (int)swizzled(Panels::offset(16 * warp, col / 64 * 64) + row * 128 +
                                           col % 64 * 2) == Panels::offset_of(16 * warp + row, col);
    }
    check(registers, "stmatrix", ROWS, COLS);
    check(banks, "stmatrix without conflicts", ROWS, COLS);
    check(boxes, "boxes of the store", ROWS, COLS);
}

template <int ROWS, int COLS> static void check_panels() {
    typedef wgmma_panels<ROWS, COLS> Panels;
    for (uint32_t tile = 0; tile + Panels::bytes <= MEMORY; tile += 61 * 1024)
        check_panels_at<ROWS, COLS>(tile);
    check_panels_at<ROWS, COLS>((MEMORY - Panels::bytes) / 1024 * 1024);
    check_store<ROWS, COLS>();
}

template <int ROWS> static void check_rows() {
    check_panels<ROWS, 64>(), check_panels<ROWS, 96>(), check_panels<ROWS, 128>();
    check_panels<ROWS, 192>(), check_panels<ROWS, 256>();
}

static void check_descriptor_add() {
    for (int i = 0; i < 20000; ++i) {
        const uint32_t from = 16 * (uint32_t)below(MEMORY / 16),
                       to = 16 * (uint32_t)below(MEMORY / 16);
        const int leading = 16 * (int)below(2048), stride = 1024 * (1 + (int)below(2));
        check(wgmma_descriptor_add(wgmma_descriptor(from, leading, stride), (int)to - (int)from) ==
                  wgmma_descriptor(to, leading, stride),
              "wgmma_descriptor_add", from, to);
    }
}

/* ---- registers ------------------------------------------------------------------------------- */
/* Packed pair i of S is register i % 4 of operand A in k16 step i / 4, so probabilities need no
 * exchange between lanes. */
static void check_identity(int bkv) {
    bool weights = true, scores = true;
    for (int thread = 0; thread < 128; ++thread) {
        const int warp = thread / 32, lane = thread % 32;
        for (int i = 0; i < bkv / 4; ++i)
            for (int half = 0; half < 2; ++half) {
                const coord d = wgmma_d(warp, lane, 2 * i + half),
                            a = frag_a16(lane, 2 * (i % 4) + half);
                weights = weights && d.row == 16 * warp + a.row && d.col == i / 4 * 16 + a.col;
            }
        /* mask and modify: s[n][2 r + e] is 8 r rows and 8 n + e columns from the lane's first
         * element */
        const coord first = frag_c(lane, 0);
        for (int e = 0; e < bkv / 2; ++e) {
            const coord d = wgmma_d(warp, lane, e);
            scores = scores && d.row == 16 * warp + first.row + 8 * (e / 2 % 2) &&
                     d.col == first.col + 8 * (e / 4) + e % 2;
        }
    }
    check(weights, "accumulators as operand A", bkv, 0);
    check(scores, "scores from the lane's first", bkv, 0);
}

/* ---- backward -------------------------------------------------------------------------------- */
/* Every tile of every head of a group comes once, heads in order. */
static void check_steps() {
    for (int group = 1; group <= 4; ++group)
        for (int tiles = 1; tiles <= 9; ++tiles)
            for (int start = 0; start < tiles; ++start) {
                const int lo = 3, first = 5;
                int hits[4][9] = {}, head = first;
                bool good = true;
                BwdStep at = {first, lo + start};
                for (int n = 0; n < group * tiles; ++n) {
                    good = good && at.head >= head && at.head < first + group && at.tile >= lo &&
                           at.tile < lo + tiles;
                    if (good) ++hits[at.head - first][at.tile - lo];
                    head = at.head;
                    at.next(lo, tiles, start);
                }
                for (int h = 0; h < group; ++h)
                    for (int t = 0; t < tiles; ++t) good = good && hits[h][t] == 1;
                check(good, "every tile of a group once: tiles, start", tiles, start);
            }
}

/* The same for ordered kernels: every head of a tile, then the next tile, up or down. */
static void check_ordered_steps() {
    for (int up = 0; up < 2; ++up)
        for (int group = 1; group <= 4; ++group)
            for (int tiles = 1; tiles <= 9; ++tiles) {
                const int lo = 3, first = 5;
                bool good = true;
                BwdOrderedStep at = {first, up ? lo : lo + tiles - 1};
                for (int n = 0; n < group * tiles; ++n) {
                    good = good && at.head == first + n % group;
                    good = good && at.tile == (up ? lo + n / group : lo + tiles - 1 - n / group);
                    at.next(first, group, up);
                }
                check(good, "every head of a tile, tile after tile: group, tiles", group, tiles);
            }
}

/* stmatrix.x4 of a warp. Element (row, half) of matrix i is in register i of lane 4 row + half /
 * 2 and goes to the address of lane 8 i + row; transposed: (column, row). put(the address's
 * lane, element of the eight, the register's lane, i, half). */
template <class Put> static void stmatrix(bool trans, const Put &put) {
    for (int i = 0; i < 4; ++i)
        for (int lane = 0; lane < 32; ++lane)
            for (int half = 0; half < 2; ++half) {
                const int row = lane / 4, col = 2 * (lane % 4) + half;
                put(8 * i + (trans ? col : row), trans ? row : col, lane, i, half);
            }
}

/* Registers 2 n + r of packed accumulators hold row 8 r + lane / 4 of the warp's 16 rows,
 * columns 8 n + 2 (lane % 4) and the next one. Each element of S^T [128 keys][ROWS] must be
 * stored where WGMMA reads (row, key) of dS, K-major. */
template <int ROWS> static void check_ds() {
    typedef wgmma_panels<ROWS, 128> Scores;
    static int at[128][ROWS];
    memset(at, -1, sizeof at);
    bool banks = true;
    for (int warp = 0; warp < 8; ++warp)
        for (int n = 0; n < ROWS / 8; n += 2) {
            stmatrix(true, [&](int to, int element, int lane, int i, int half) {
                const coord c = ds_place(32 * warp + to, n);
                const int key = 16 * warp + 8 * (i & 1) + lane / 4,
                          row = 8 * (n + i / 2) + 2 * (lane % 4) + half;
                at[key][row] = Scores::offset_of(c.row, c.col) + 2 * element;
            });
            for (int i = 0; i < 4; ++i) {
                int bytes[8];
                for (int r = 0; r < 8; ++r) {
                    const coord c = ds_place(32 * warp + 8 * i + r, n);
                    bytes[r] = Scores::offset_of(c.row, c.col);
                }
                banks = banks && ways(bytes, 16) == 1;
            }
        }
    bool good = true;
    for (int key = 0; key < 128; ++key)
        for (int row = 0; row < ROWS; ++row)
            good = good && at[key][row] == Scores::offset_of(row, key);
    check(good, "dS lies as the operand of dQ: rows", ROWS, 128);
    check(banks, "dS is stored without bank conflicts: rows", ROWS, 128);
    /* steps of eight columns are steps of whole rows */
    const coord first = ds_place(5, 0), later = ds_place(5, 4);
    check(Scores::offset_of(later.row, later.col) ==
              Scores::offset_of(first.row, first.col) + 32 * WGMMA_ROW_BYTES,
          "dS from step to step: rows", ROWS, 4);
}

/* The same for the wide kernel's dS^T [64 keys][64 rows], which one warpgroup stores. */
static void check_scores() {
    typedef wgmma_panels<64, 64> Scores;
    static int at[64][64];
    memset(at, -1, sizeof at);
    for (int warp = 4; warp < 8; ++warp)
        for (int n = 0; n < 8; n += 2)
            stmatrix(false, [&](int to, int element, int lane, int i, int half) {
                const coord c = scores_place(32 * warp + to, n);
                const int key = 16 * (warp % 4) + 8 * (i & 1) + lane / 4;
                const int row = 8 * (n + i / 2) + 2 * (lane % 4) + half;
                at[key][row] = Scores::offset_of(c.row, c.col) + 2 * element;
            });
    bool good = true;
    for (int key = 0; key < 64; ++key)
        for (int row = 0; row < 64; ++row)
            good = good && at[key][row] == Scores::offset_of(key, row);
    check(good, "dS^T lies as an operand", 64, 64);
}

/* dq_sum is written in the order of the accumulators of dQ^T and read in pairs of eight rows.
 * Every element of dQ [ROWS][D] must be read once, from the right place. */
template <int ROWS, int D> static void check_dq() {
    constexpr bool by_d = D > 64;
    constexpr int N = by_d ? ROWS : ROWS / 2, BLOCKS = by_d ? D / 16 : 8;
    static int owner[ROWS][D]; /* the float of dq_sum from which the last pass takes the element */
    memset(owner, -1, sizeof owner);
    for (int block = 0; block < BLOCKS; ++block)
        for (int pair = 0; pair < N / 16; ++pair)
            stmatrix(true, [&](int to, int element, int lane, int i, int half) {
                const coord c = dq_place(to, block, pair, N, by_d);
                owner[c.row][c.col + element] =
                    block * (N * 16) + (2 * pair + i / 2) * 128 + lane * 4 + 2 * (i & 1) + half;
            });
    bool good = true;
    for (int thread = 0; thread < 256; ++thread)
        for (int e = 0; e < N / 2; ++e) {
            const int block = thread / 32, warpgroup = thread / 128;
            for (int rank = 0; rank < (D > 128 ? 2 : 1);
                 ++rank) { /* the wide kernel: a pair of blocks, 64 of d a warpgroup */
                const int b = 8 * rank + block;
                if (b >= BLOCKS) continue;
                const coord d = wgmma_d(block % 4, thread % 32, e); /* row of d, column of rows */
                const int col = by_d ? b / 4 * 64 + d.row : d.row,
                          row = (by_d ? 0 : warpgroup * N) + d.col;
                good =
                    good && owner[row][col] == b * (N * 16) + e / 4 * 128 + thread % 32 * 4 + e % 4;
            }
        }
    check(good, "dQ comes out as it went in: rows, head_dim", ROWS, D);
}

/* Every task of every unit comes once. The rows of a unit come before its keys, and all its keys
 * before it is rounded, so that a block only waits for lower task numbers. */
static bool tasks_in_order(const BwdGrid &grid) {
    static_assert(BwdGrid::PARTS == 4, "bits below");
    const int units = grid.sets() * grid.together, most[3] = {grid.rows, grid.keys, grid.rows};
    std::vector<int> done[3], seen[3];
    for (int kind = 0; kind < 3; ++kind) {
        done[kind].assign(units, 0);
        seen[kind].assign(units * 32, 0);
    }
    for (int x = 0; x < grid.blocks(); ++x) {
        const BwdTask t = grid.task(x);
        if (t.unit < 0 || t.unit >= units || t.index < 0 || t.index >= most[t.kind]) return false;
        if (t.part >= t.parts || (t.parts != 1 && t.parts != BwdGrid::PARTS)) return false;
        const int parts = t.parts == 1 ? 15 : 1 << t.part; /* one bit for each part */
        int &of = seen[t.kind][t.unit * 32 + t.index];
        if (of & parts) return false;
        of |= parts;
        if (t.kind == BWD_KEYS && done[BWD_ROWS][t.unit] < grid.rows) return false;
        if (t.kind == BWD_ROUND && done[BWD_KEYS][t.unit] < grid.keys) return false;
        done[t.kind][t.unit] += of == 15;
    }
    for (int u = 0; u < grid.units; ++u)
        for (int kind = 0; kind < 3; ++kind)
            if (done[kind][u] != most[kind]) return false;
    return true;
}

static void check_grid() {
    for (int units : {1, 2, 3, 5, 8, 31})
        for (int keys : {1, 2, 5, 31})
            for (int rows : {0, 1, 3, 10})
                for (int together : {1, 2, 3, 8})
                    for (int lead : {0, 1, 2, 7})
                        for (int lag : {0, 1, 2, 7}) {
                            BwdGrid grid = {};
                            grid.units = units;
                            grid.keys = keys;
                            grid.rows = rows;
                            grid.together = together;
                            grid.lead = lead;
                            grid.lag = lag;
                            if (together > units || lead > grid.sets() || lag > grid.sets() ||
                                (rows > 0 && (lead == 0 || lag == 0)))
                                continue;
                            if (rows == 0) grid.lead = grid.lag = 0;
                            grid.prepare();
                            check(tasks_in_order(grid),
                                  "every task once and after what it waits for: units, keys", units,
                                  keys);
                        }
}

/* The keys tasks of a unit have every part of a tile that is cut and every other tile once. */
static void check_split_tasks() {
    for (int longest : {1, 31, 32, 50, 64, 1000})
        for (int tiles_k : {1, 2, 3, 40})
            for (int cut : {BWD_SPLIT_TILES, BWD_SPLIT_TILES_OF_PAIRS}) {
                const BwdSplit split = bwd_split_of(longest, tiles_k, cut);
                std::vector<std::vector<int>> seen(tiles_k, std::vector<int>(split.most, 0));
                bool good =
                    split.most <= BWD_SPLIT_PARTS && split.tiles <= tiles_k && split.tiles <= cut;
                for (int task = 0; task < tiles_k + split.more_tasks(); ++task) {
                    const int rank = split.rank(task), part = split.part(task);
                    good = good && rank >= 0 && rank < tiles_k && part >= 0 && part < split.most;
                    if (good) ++seen[rank][part];
                }
                for (int rank = 0; rank < tiles_k; ++rank)
                    for (int part = 0; part < split.most; ++part)
                        good = good && seen[rank][part] == (rank < split.tiles || part == 0);
                for (int count = 0; count <= longest; ++count)
                    for (int uncut = 0; uncut <= count; ++uncut) {
                        const int parts = split.parts(count, uncut);
                        good = good && parts >= 1 && parts <= split.most &&
                               (parts == 1 || count / parts >= BWD_SPLIT_LEAST);
                    }
                check(good, "parts of tiles of keys: longest list, tiles", longest, tiles_k);
            }
}

/* Each entry of the lists of a group's heads is in one part. */
static void check_split_parts() {
    for (int group : {1, 2, 5})
        for (int parts : {1, 2, 3, 8}) {
            std::vector<int> lengths;
            for (int h = 0; h < group; ++h) lengths.push_back(37 * (h + 1) % (40 - 9 * (h % 4)));
            if (group > 2) lengths[group - 1] = 0;
            std::vector<std::vector<int>> seen;
            int total = 0, last = -1;
            for (int n : lengths) {
                seen.emplace_back(n, 0);
                total += n;
            }
            bool good = true;
            for (int part = 0; part < parts; ++part) {
                int size = 0;
                bwd_take_part(
                    group, part, parts, [&](int h) { return lengths[h]; },
                    [&](int h, int first, int end, int n) {
                        good = good && h >= last && n == lengths[h] && first >= 0 && end <= n;
                        last = h;
                        size += end - first;
                        for (int i = first; good && i < end; ++i) ++seen[h][i];
                    });
                good = good && size >= total / parts && size <= total / parts + 1;
            }
            for (const std::vector<int> &of : seen)
                for (int times : of) good = good && times == 1;
            check(good, "each entry is in one part: heads, parts", group, parts);
        }
}

static void check_backward() {
    check_grid();
    check_split_tasks();
    check_split_parts();
    check_steps();
    check_ordered_steps();
    check_ds<48>(), check_ds<64>(), check_ds<80>(), check_ds<128>();
    check_scores();
    check_dq<128, 64>(), check_dq<48, 128>(), check_dq<64, 64>(), check_dq<80, 96>(),
        check_dq<80, 128>(), check_dq<64, 128>();
    check_dq<64, 192>(), check_dq<64, 256>();
}

int main() {
    check_backward();
    check_schedules();
    check_blocks();
    check_stacked();
    check_softcap();
    check_rows<64>(), check_rows<80>(), check_rows<96>(), check_rows<112>(), check_rows<128>();
    check_rows<144>(), check_rows<160>(), check_rows<176>(), check_rows<192>();
    check_descriptor_add();
    for (int bkv = 16; bkv <= 256; bkv += 16) check_identity(bkv);
    printf("%ld passed, %ld failed\n", num_passed, num_failed);
    return num_failed != 0 || num_passed == 0;
}
