/* skewed.cuh: where everything lies that gemm_skewed_sm90a reads and writes: weights as lines of classes (lines.cuh), windows of
 * the tokens, sums. Plain C++, so that the tests walk the same functions. */
#ifndef GPUKERN_CUDA_GEMM_SKEWED_CUH
#define GPUKERN_CUDA_GEMM_SKEWED_CUH

#include "../../internal.h"
#include "../tile/layout.cuh"
#include "lines.cuh"
#include "tiles.h"

enum {
    SKEWED_PANEL = 64,   /* elements of 128 bytes */
    SKEWED_COPIERS = 16, /* threads that copy a token's window and a box of weights each */
    /* of a token's elements, in which a step's k lie, and 16 bytes that keep the lanes' tokens off each other's banks */
    SKEWED_WINDOW = SKEWED_STEP + 3 * LINE_EACH
};

/* The lines of weights [k][n] dense along k or along n, in classes: line j, j + classes, j + 2 classes .. begin `skew[j]`
 * elements past a multiple of 16 bytes, where position 0 of each is. */
struct SkewedPlan {
    bool along_n;     /* lines are rows of n, one for each k */
    int classes_log2; /* 1, 2, 4 or 8 */
    int tiles, rows;  /* rows: lines of a tile, or n that a tile finishes */
    int steps, parts; /* of a tile, SKEWED_STEP of k each; that share them */
    /* of the parts: the first step of each, the first token whose results it stores, and the most tokens that one has */
    int first_step[SKEWED_PARTS + 1], first_token[SKEWED_PARTS + 1], most_tokens;
    int64_t cost;           /* 256 bytes that a block reads */
    int back;               /* along n with one class: n of position 0, below 0 */
    int skew[LINE_CLASSES]; /* elements before the lines */
    int token,
        token_stride; /* elements before the first token, and more before each next one, but for multiples of 8 */
};

constexpr GK_HD int skewed_classes(const SkewedPlan &plan) { return 1 << plan.classes_log2; }

/* A step's weights are boxes of 64 elements of so many lines: along k of the tile's for each 64 of k, along n of each class for
 * each 64 of n. */
constexpr GK_HD int skewed_box_lines(const SkewedPlan &plan) {
    return plan.along_n ? SKEWED_STEP >> plan.classes_log2 : plan.rows;
}
constexpr GK_HD int skewed_boxes(const SkewedPlan &plan, int panels) {
    return plan.along_n ? skewed_classes(plan) * panels : SKEWED_STEP / SKEWED_PANEL;
}

/* Along n: the class of a step's line, and which of the class's it is. */
constexpr GK_HD int skewed_class(const SkewedPlan &plan, int line) {
    return line >> (SKEWED_STEP_LOG2 - plan.classes_log2);
}
constexpr GK_HD int skewed_line(const SkewedPlan &plan, int step, int line) {
    const int log2 = SKEWED_STEP_LOG2 - plan.classes_log2;
    return (step << log2) + (line & ((1 << log2) - 1));
}

/* Along k: the class of a tile. */
constexpr GK_HD int skewed_class_of(const SkewedPlan &plan, int tile) { return tile & (skewed_classes(plan) - 1); }

/* The k of the step's i-th; some are not in the matrix. */
constexpr GK_HD int skewed_k(const SkewedPlan &plan, int tile, int step, int i) {
    return plan.along_n ? (skewed_line(plan, step, i) << plan.classes_log2) + skewed_class(plan, i)
                        : step * SKEWED_STEP + i - plan.skew[skewed_class_of(plan, tile)];
}

/* From one k of a warp's 16 to the next. */
constexpr GK_HD int skewed_k_step(const SkewedPlan &plan) { return plan.along_n ? skewed_classes(plan) : 1; }

/* Elements of 16 bytes before a token. */
constexpr GK_HD int skewed_token(const SkewedPlan &plan, int m) {
    return (plan.token + m * plan.token_stride) & (LINE_EACH - 1);
}

/* The k at which a step's window of the tokens begins, for a token without elements before it. */
constexpr GK_HD int skewed_window(const SkewedPlan &plan, int tile, int step) {
    return step * SKEWED_STEP - (!plan.along_n && plan.skew[skewed_class_of(plan, tile)] > 0 ? LINE_EACH : 0);
}

/* A tile's first line of its class, or its first position. */
constexpr GK_HD int skewed_first(const SkewedPlan &plan, int tile) {
    return (plan.along_n ? tile : tile >> plan.classes_log2) * plan.rows;
}

/* The n of a tile's row; some are not in the matrix. */
constexpr GK_HD int skewed_n(const SkewedPlan &plan, int tile, int row) {
    const int at = skewed_first(plan, tile) + row;
    return plan.along_n ? at + plan.back : (at << plan.classes_log2) + skewed_class_of(plan, tile);
}

/* Along n: the rows that sums of a class move up. One class moves none: its tiles begin elsewhere. */
constexpr GK_HD int skewed_shift(const SkewedPlan &plan, int cls) { return plan.classes_log2 > 0 ? plan.skew[cls] : 0; }

/* Byte of a row's sum with a token among a warp's, [token][rows + 4]; along n rows up to 7 before the tile's first have a place,
 * whose neighbours at the other end of a token's rows are those that no result comes from. And bytes of all. */
constexpr GK_HD int skewed_sum_at(int rows, bool along_n, int row, int token) {
    return (token * (rows + 4) + row + (along_n ? LINE_EACH : 0)) * 4;
}
constexpr GK_HD int skewed_sums_bytes(int rows, bool along_n) {
    return skewed_sum_at(rows, along_n, 0, SKEWED_MAX_TOKENS);
}

/* Of a lane's pair of a line's first 8 elements (frag_a16), the bits that do not lie before the line. */
constexpr GK_HD uint32_t skewed_keep(int lane, int skew) { return line_keep((lane & 3) * 2, skew); }

/* The block of a cluster that stores a token's results. */
constexpr GK_HD int skewed_owner(const SkewedPlan &plan, int token) { return token * plan.parts / SKEWED_MAX_TOKENS; }

/* ---- host -------------------------------------------------------------------------------------------------- */
/* b dense along k (b_k 1) or along n (b_n 1), its other stride positive; a dense along k. */
template <class Problem> inline SkewedPlan skewed_plan(const Problem &p, int most_rows, int64_t sms) {
    SkewedPlan x = {};
    const int64_t n = p.n, k = p.k;
    x.along_n = p.b_k != 1;
    const int64_t line = x.along_n ? p.b_k : p.b_n, lines = x.along_n ? k : n;
    x.classes_log2 = gk_line_classes_log2(line);
    const int all = skewed_classes(x);
    int most = 0;
    for (int j = 0; j < all; ++j) {
        x.skew[j] = line_skew(p.b, line, j);
        most = x.skew[j] > most ? x.skew[j] : most;
    }
    x.token = (int)((uintptr_t)p.a / 2 % LINE_EACH), x.token_stride = (int)((uint64_t)p.a_m % LINE_EACH);
    x.steps = (int)gk_ceil_div(k + (x.along_n ? 0 : most), SKEWED_STEP);
    x.back = x.along_n && all == 1 ? -x.skew[0] : 0;

    /* along k tiles may be lower than most_rows, as many in each class as the SMs take in equally many turns; along n they are
     * read whole, and the last positions of many are those of the next */
    const int64_t whole = x.along_n && all > 1 ? most_rows - LINE_EACH : most_rows;
    const int64_t of_class = gk_ceil_div(x.along_n ? n - x.back : lines, x.along_n ? 1 : all);
    const int64_t classes = x.along_n ? 1 : all, least = gk_ceil_div(of_class, whole);
    int64_t best = INT64_MAX;
    for (int parts = 1; parts <= SKEWED_PARTS && (parts == 1 || x.steps >= 2 * parts); ++parts) {
        const int64_t clusters = parts > 2 ? sms * 8 / 9 / parts : sms / parts; /* that find their SMs side by side */
        if (clusters < 1) break;
        const int64_t turns = gk_ceil_div(least * classes, clusters);
        if (parts > 1 && turns > 1) break;
        const int64_t tiles = x.along_n ? least : gk_max_i64(least, turns * clusters / classes);
        const int64_t rows = x.along_n ? whole : gk_ceil_div(of_class, tiles);
        const int64_t bytes =
            turns * gk_ceil_div(x.steps, parts) * ((x.along_n ? most_rows : gk_max_i64(rows, 64)) + p.m);
        if (bytes >= best) continue;
        best = x.cost = bytes, x.parts = parts, x.rows = (int)rows;
        x.tiles = (int)(classes * gk_ceil_div(of_class, rows));
    }
    for (int j = 0; j <= x.parts; ++j) {
        x.first_step[j] = x.steps * j / x.parts;
        x.first_token[j] = (int)gk_min_i64(gk_ceil_div(j * SKEWED_MAX_TOKENS, x.parts), p.m);
    }
    x.most_tokens = (int)gk_ceil_div(SKEWED_MAX_TOKENS, x.parts);
    return x;
}

#endif
