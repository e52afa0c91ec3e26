/* SPDX-License-Identifier: BSD-3-Clause */
/* ref/attn_mask: builds a stored mask (layout in csrc/core/attn_mask.h). The CPU uses this
 * builder, and the tests compare CUDA's builder with it.
 *
 * A first pass has a task for each tile of queries of each head, which builds the tile's flags,
 * list and words. With transposed tables there is also a task for each tile of keys. A second pass
 * sorts the tiles of each head by the length of their lists, longest first, and stores the ranges.
 *
 * A block is 128 rows of 128 bits. If a mask consists of ranges or columns, a block that no edge of
 * a range crosses is found full or empty without computing its bits. */
#include "../core/attn_mask.h"
#include "../core/dispatch.h"
#include "../core/internal.h"

typedef struct builder {
    const gk_attn_mask_args *a;
    gk_mask_layout at;
    gk_mask_store store;
    int64_t heads, masks;
} builder;

/* One head of the call. */
typedef struct head {
    const builder *g;
    int64_t b, h;
    int32_t *out;
} head;

static head head_of(const builder *g, int64_t mask) {
    return (head){g, mask / g->heads, mask % g->heads,
                  (int32_t *)g->a->out.data + mask * g->at.total};
}

static int64_t place(const head *x, const gk_tensor *t, int64_t row) {
    return x->b * t->stride[0] + x->h * t->stride[1] + row * t->stride[2];
}

/* ---- the source of the mask ------------------------------------------------------------------ */
static void range_of(const head *x, int64_t row, int32_t r[4]) {
    const gk_tensor *t = x->g->a->rows;
    const int32_t *from = (const int32_t *)t->data + place(x, t, row);
    for (int i = 0; i < 4; i += 2) {
        r[i] = r[i + 1] = 0;
        if (i >= t->shape[3]) continue;
        const int64_t lo = gk_clamp_i64(from[i * t->stride[3]], 0, x->g->a->seq_k);
        const int64_t hi = gk_clamp_i64(from[(i + 1) * t->stride[3]], 0, x->g->a->seq_k);
        if (lo < hi) {
            r[i] = (int32_t)lo;
            r[i + 1] = (int32_t)hi;
        }
    }
}

static void column_of(const head *x, int64_t key, int32_t c[4]) {
    const gk_tensor *t = x->g->a->rows;
    gk_mask_column((const int32_t *)t->data + place(x, t, key), t->stride[3], (int)t->shape[3],
                   x->g->a->is_causal, key, c);
}

/* True if the list of a tile of queries contains the block. */
static bool lists(const head *x, const gk_tensor *num, const gk_tensor *list, int64_t tile,
                  int64_t block) {
    if (!num) return false;
    const int32_t n = ((const int32_t *)num->data)[place(x, num, tile)];
    const int32_t *entry = (const int32_t *)list->data + place(x, list, tile);
    for (int64_t i = 0; i < n; ++i)
        if (entry[i * list->stride[3]] == block) return true;
    return false;
}

/* Eight bools as bits; 0 is false and any other byte is true. */
static uint32_t eight_bools(const uint8_t *from) {
    uint64_t x;
    memcpy(&x, from, 8);
    x |= x >> 4;
    x |= x >> 2;
    x |= x >> 1; /* now bit 0 of each byte is set if the byte was not 0 */
    return (uint32_t)((x & UINT64_C(0x0101010101010101)) * UINT64_C(0x0102040810204080) >> 56);
}

static void row_of_bool(const head *x, const gk_tensor *t, int64_t row, int64_t first, int64_t n,
                        uint32_t bits[4]) {
    const uint8_t *from = (const uint8_t *)t->data + place(x, t, row) + first * t->stride[3];
    int64_t c = 0;
    for (; t->stride[3] == 1 && c + 8 <= n; c += 8) bits[c / 32] |= eight_bools(from + c) << c % 32;
    for (; c < n; ++c) bits[c / 32] |= (uint32_t)(from[c * t->stride[3]] != 0) << c % 32;
}

static void row_of_bits(const head *x, const gk_tensor *t, int64_t row, int64_t first, int64_t n,
                        uint32_t bits[4]) {
    const uint8_t *from = (const uint8_t *)t->data + place(x, t, row) + first / 8 * t->stride[3];
    for (int64_t c = 0; c < n; c += 8) {
        const uint32_t valid = n - c < 8 ? (1u << (n - c)) - 1 : 0xffu;
        bits[c / 32] |= (from[c / 8 * t->stride[3]] & valid) << c % 32;
    }
}

/* The bits of a block. */
typedef struct block {
    uint32_t bits[GK_MASK_TILE][4];
    int64_t rows, cols; /* the rows and columns within Sq and Sk */
} block;

static void block_make(block *to, const head *x, int64_t tile, int64_t kb) {
    const gk_attn_mask_args *a = x->g->a;
    const int64_t i0 = tile * GK_MASK_TILE, j0 = kb * GK_MASK_TILE;
    to->rows = gk_min_i64(GK_MASK_TILE, a->seq_q - i0);
    to->cols = gk_min_i64(GK_MASK_TILE, a->seq_k - j0);
    memset(to->bits, 0, sizeof to->bits);
    bool whole = false;
    if (a->source == GK_MASK_OF_BLOCKS) {
        whole = lists(x, a->num_full, a->full, tile, kb);
        const bool part = !whole && lists(x, a->num_blocks, a->blocks, tile, kb);
        if (!whole && !part) return;
        whole = whole || !a->mask;
    }
    if (a->source == GK_MASK_OF_COLUMNS) {
        for (int64_t c = 0; c < to->cols; ++c) {
            int32_t hidden[4];
            column_of(x, j0 + c, hidden);
            for (int64_t r = 0; r < to->rows; ++r)
                to->bits[r][c / 32] |= (uint32_t)!gk_mask_hides(hidden, i0 + r) << c % 32;
        }
        return;
    }
    for (int64_t r = 0; r < to->rows; ++r) {
        int32_t range[4];
        if (whole) {
            gk_mask_set_range(to->bits[r], 0, to->cols);
        } else if (a->source == GK_MASK_OF_RANGES) {
            range_of(x, i0 + r, range);
            gk_mask_set_range(to->bits[r], range[0] - j0, gk_min_i64(range[1] - j0, to->cols));
            gk_mask_set_range(to->bits[r], range[2] - j0, gk_min_i64(range[3] - j0, to->cols));
        } else if (a->source == GK_MASK_OF_BITS || (a->source == GK_MASK_OF_BLOCKS && a->is_bits)) {
            row_of_bits(x, a->mask, i0 + r, j0, to->cols, to->bits[r]);
        } else {
            row_of_bool(x, a->mask, i0 + r, j0, to->cols, to->bits[r]);
        }
    }
}

static int class_of(const block *x) {
    uint32_t valid[4] = {0}, any = 0, hole = 0;
    gk_mask_set_range(valid, 0, x->cols);
    for (int64_t r = 0; r < x->rows; ++r)
        for (int w = 0; w < 4; ++w) {
            any |= x->bits[r][w];
            hole |= valid[w] & ~x->bits[r][w];
        }
    return !any ? GK_BLOCK_EMPTY : hole ? GK_BLOCK_WORDS : GK_BLOCK_FULL;
}

static void block_transpose(block *to, const block *x) {
    memset(to->bits, 0, sizeof to->bits);
    to->rows = x->cols;
    to->cols = x->rows;
    for (int64_t r = 0; r < x->rows; ++r)
        for (int w = 0; w < 4; ++w)
            for (uint32_t rest = x->bits[r][w]; rest; rest &= rest - 1)
                to->bits[32 * w + __builtin_ctz(rest)][r / 32] |= 1u << r % 32;
}

/* ---- blocks that no edge crosses ------------------------------------------------------------- */
/* A row has two ranges of keys that it sees; with columns, a key has two ranges of rows that do not
 * see it. A hull bounds one of the two over all rows, or keys, of a tile. Every range lies within
 * [some_from, some_to) and contains [all_from, all_to). If one of them is empty, the latter
 * interval is empty. */
typedef struct hull {
    int64_t some_from, all_from, all_to, some_to;
} hull;

static void hull_add(hull *x, int64_t from, int64_t to) {
    if (from >= to) {
        x->all_from = INT64_MAX;
        x->all_to = INT64_MIN;
        return;
    }
    x->some_from = gk_min_i64(x->some_from, from);
    x->all_from = gk_max_i64(x->all_from, from);
    x->some_to = gk_max_i64(x->some_to, to);
    x->all_to = gk_min_i64(x->all_to, to);
}
static const hull no_hull = {INT64_MAX, INT64_MIN, INT64_MAX, INT64_MIN};
static bool hull_misses(const hull *x, int64_t from, int64_t to) {
    return x->some_from >= to || x->some_to <= from;
}
static bool hull_covers(const hull *x, int64_t from, int64_t to) {
    return x->all_from <= from && x->all_to >= to;
}

/* The two hulls of a tile: of its queries for ranges, of its keys for columns. */
static void hulls_of(const head *x, int64_t tile, hull to[2]) {
    const bool ranges = x->g->store == GK_MASK_RANGES;
    const int64_t seq_q = x->g->a->seq_q, n = ranges ? seq_q : x->g->a->seq_k;
    to[0] = to[1] = no_hull;
    for (int64_t i = tile * GK_MASK_TILE; i < gk_min_i64(n, (tile + 1) * GK_MASK_TILE); ++i) {
        int32_t r[4];
        if (ranges)
            range_of(x, i, r);
        else
            column_of(x, i, r);
        for (int half = 0; half < 2; ++half)
            hull_add(to + half, ranges ? r[2 * half] : gk_clamp_i64(r[2 * half], 0, seq_q),
                     ranges ? r[2 * half + 1] : gk_clamp_i64(r[2 * half + 1], 0, seq_q));
    }
}

/* GK_BLOCK_EMPTY or GK_BLOCK_FULL if the hulls decide the kind of block (tile, kb), otherwise -1.
 * Ranges name the keys that are seen, and columns name the rows that are hidden. */
static int class_by_hulls(const head *x, const hull hulls[2], int64_t tile, int64_t kb) {
    const bool ranges = x->g->store == GK_MASK_RANGES;
    const int64_t from = (ranges ? kb : tile) * GK_MASK_TILE;
    const int64_t to = gk_min_i64(from + GK_MASK_TILE, ranges ? x->g->a->seq_k : x->g->a->seq_q);
    if (hull_misses(hulls, from, to) && hull_misses(hulls + 1, from, to))
        return ranges ? GK_BLOCK_EMPTY : GK_BLOCK_FULL;
    if (hull_covers(hulls, from, to) || hull_covers(hulls + 1, from, to))
        return ranges ? GK_BLOCK_FULL : GK_BLOCK_EMPTY;
    return -1;
}

/* ---- tiles ----------------------------------------------------------------------------------- */
/* Builds tile `major` of queries, or of keys with `by_keys`: its list and words, and for queries
 * its flags. */
static void build_tile(const head *x, int64_t major, bool by_keys) {
    const builder *g = x->g;
    const gk_mask_layout *at = &g->at;
    const int64_t n = by_keys ? at->tiles_q : at->tiles_k;
    const bool ranges = g->store == GK_MASK_RANGES, columns = g->store == GK_MASK_COLUMNS;
    uint8_t *flags = (uint8_t *)(x->out + at->flags) + major * n;
    uint16_t *list = (uint16_t *)(x->out + (by_keys ? at->lists_t : at->lists)) + major * n;
    int32_t *words = x->out + (by_keys ? at->words_t : at->words);
    int32_t count = 0, full = 0, kept = 0;
    hull hulls[2];
    /* true: one pair of hulls serves all blocks of the tile; false: each block has its own pair */
    const bool own_hulls = by_keys ? columns : ranges;
    if (own_hulls) hulls_of(x, major, hulls);
    for (int64_t minor = 0; minor < n; ++minor) {
        const int64_t tile = by_keys ? minor : major, kb = by_keys ? major : minor;
        block made;
        int class = -1;
        if ((ranges || columns) && !own_hulls) hulls_of(x, minor, hulls);
        if (ranges || columns) class = class_by_hulls(x, hulls, tile, kb);
        if (class < 0) {
            block_make(&made, x, tile, kb);
            class = class_of(&made);
        }
        int flag = class;
        if (class == GK_BLOCK_WORDS) {
            if (g->store != GK_MASK_DENSE && kept == GK_MASK_KEPT) {
                flag = class = GK_BLOCK_MADE;
            } else {
                if (g->store != GK_MASK_DENSE) flag |= kept++ << 2;
                block flipped;
                if (by_keys) block_transpose(&flipped, &made);
                const block *from = by_keys ? &flipped : &made;
                int32_t *to =
                    words + gk_mask_words_of(g->store, major, minor, n, flag) * GK_MASK_BLOCK_INTS;
                for (int r = 0; r < GK_MASK_TILE; ++r)
                    for (int q = 0; q < 4; ++q)
                        to[gk_mask_word_of(r) + 2 * q] = (int32_t)gk_mask_word(from->bits[r], q);
            }
        }
        if (!by_keys) flags[minor] = (uint8_t)flag;
        if (class == GK_BLOCK_EMPTY) continue;
        list[count++] = (uint16_t)(minor << 2 | class);
        full += class == GK_BLOCK_FULL;
    }
    int32_t *tile = x->out + (by_keys ? at->tiles_t : at->tiles) + 4 * major;
    tile[0] = count;
    tile[1] = full;
    tile[2] = (int32_t)major;
    tile[3] = 0;
}

static void tile_task(void *arg, int64_t task, int64_t worker) {
    (void)worker;
    const builder *g = arg;
    const int64_t per_head = g->at.tiles_q + (g->a->transposed ? g->at.tiles_k : 0),
                  tile = task % per_head;
    const head x = head_of(g, task / per_head);
    const bool by_keys = tile >= g->at.tiles_q;
    build_tile(&x, by_keys ? tile - g->at.tiles_q : tile, by_keys);
}

/* Insertion sort: longest list first. Between equal lengths the later tile comes first, because
 * under a causal mask it has more work. */
static void sort_tiles(int32_t *tiles, int64_t n) {
    for (int64_t i = 1; i < n; ++i) {
        int32_t x[4];
        memcpy(x, tiles + 4 * i, sizeof x);
        int64_t j = i;
        for (; j > 0 && (tiles[4 * (j - 1)] < x[0] ||
                         (tiles[4 * (j - 1)] == x[0] && tiles[4 * (j - 1) + 2] < x[2]));
             --j)
            memcpy(tiles + 4 * j, tiles + 4 * (j - 1), sizeof x);
        memcpy(tiles + 4 * j, x, sizeof x);
    }
}

static void head_task(void *arg, int64_t task, int64_t worker) {
    (void)worker;
    const builder *g = arg;
    const head x = head_of(g, task);
    const gk_mask_layout *at = &g->at;
    sort_tiles(x.out + at->tiles, at->tiles_q);
    if (g->a->transposed) sort_tiles(x.out + at->tiles_t, at->tiles_k);
    if (g->store == GK_MASK_DENSE) return;
    int32_t *to = x.out + at->source;
    const bool ranges = g->store == GK_MASK_RANGES;
    for (int64_t i = 0; i < (ranges ? g->a->seq_q : g->a->seq_k); ++i, to += 4) {
        if (ranges)
            range_of(&x, i, to);
        else
            column_of(&x, i, to);
    }
}

void gk_ref_attn_mask(const gk_context *ctx, const gk_attn_mask_args *a) {
    const gk_tensor *out = &a->out;
    builder g = {.a = a, .store = gk_mask_store_of(a->source), .heads = out->shape[1]};
    g.at = gk_mask_layout_of(g.store, a->seq_q, a->seq_k, a->transposed != 0);
    g.masks = out->shape[0] * out->shape[1];
    /* The unused ends of lists and words are 0, so that equal masks have equal bytes. */
    if (g.masks * g.at.total > 0) memset(out->data, 0, 4 * (size_t)(g.masks * g.at.total));
    gk_parallel(ctx, g.masks * (g.at.tiles_q + (a->transposed ? g.at.tiles_k : 0)), tile_task, &g);
    gk_parallel(ctx, g.masks, head_task, &g);
}
