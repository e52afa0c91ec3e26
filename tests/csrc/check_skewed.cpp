/* check_skewed: csrc/cuda/gemm/skewed.cuh on the host: random products through the functions that gemm_skewed_sm90a is made
 * of, its grid walked block by block: boxes of weights as tma brings them, windows of the tokens, the lanes that put them in
 * place, sums that move up, results. Whatever is not an element of a matrix, and whatever a slot was not given, is NaN. Every
 * result must be written once and be exact, and every byte that is read one of the 16 around a row's. Exits with 1 on a
 * failure. */
#include "check_model.h"

struct uint4 {
    uint32_t x, y, z, w;
};
static uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

#include "cuda/gemm/skewed.cuh"
#include "cuda/tile/wgmma.cuh"

enum {
    TOKENS = SKEWED_MAX_TOKENS,
    K64 = 64,
    STEP_BLOCKS = SKEWED_STEP / K64,
    STEP_K16 = SKEWED_STEP / 16,
    WINDOW_LANES = 64, /* a token's each */
    LONG = 1400        /* n or k, at most */
};
static const uint16_t POISON = 0xffff; /* a NaN */

alignas(128) static uint16_t a_memory[1 << 17], b_memory[1 << 20];

struct Problem {
    int64_t m, n, k;
    const uint16_t *a, *b;
    int64_t a_m, b_k, b_n;
};

/* bfloat16, as which small whole numbers and their sums are exact */
static float number(uint16_t bits) {
    const uint32_t all = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &all, sizeof x);
    return x;
}
static uint16_t random_element() {
    const float x = (float)(below(7) - 3);
    uint32_t all;
    memcpy(&all, &x, sizeof all);
    return (uint16_t)(all >> 16);
}

/* ---- the kernel's parts ---------------------------------------------------------------------------------------- */
template <int ROWS, bool ALONG_N> struct Model {
    typedef wgmma_tile<ROWS, ALONG_N> W;
    typedef wgmma_tile<TOKENS, false> X;
    enum {
        ADDERS = ROWS * 2,
        BLOCK = W::bytes + X::bytes,
        SUMS = ALONG_N ? STEP_K16 : 1 /* along n of each 16 of a step's k */
    };
    struct Map {
        const uint16_t *base;
        int64_t inner, outer, stride;
    };

    const Problem &p;
    const SkewedPlan &plan;
    int box_lines;
    Map w[SKEWED_CLASSES];
    uint16_t slot[STEP_BLOCKS * BLOCK / 2], windows[TOKENS][SKEWED_WINDOW];
    float sum[SUMS][ROWS][TOKENS], sums[SKEWED_PARTS][TOKENS][ROWS]; /* of a part */
    float out[TOKENS][LONG];
    int written[TOKENS][LONG];

    Model(const Problem &p, const SkewedPlan &plan) : p(p), plan(plan), out(), written() {
        const int64_t lines = ALONG_N ? p.k : p.n, line = ALONG_N ? p.b_k : p.b_n, inner = ALONG_N ? p.n : p.k;
        box_lines = ALONG_N ? skewed_box(plan) : plan.rows;
        for (int j = 0; j < skewed_classes(plan); ++j) {
            w[j] = {p.b + j * line - plan.skew[j], inner + plan.skew[j],
                    (lines - j + skewed_classes(plan) - 1) >> plan.classes_log2, line << plan.classes_log2};
            check((uintptr_t)w[j].base % 16 == 0, "a map's address", j, plan.skew[j]);
            check(w[j].stride % SKEWED_EACH == 0, "a map's stride", j, line);
            check(plan.skew[j] >= 0 && plan.skew[j] < SKEWED_EACH, "what lies before a line", j, plan.skew[j]);
        }
    }

    uint16_t &at(int byte) { return slot[byte / 2]; }

    /* tma: a box of 64 elements x box_lines, swizzled as its address says; zeros outside the map. */
    void load_box(int to, const Map &map, int x, int y) {
        check(x % SKEWED_EACH == 0 && x >= 0 && y >= 0, "where a box begins", x, y);
        check(to % WGMMA_ROW_BYTES == 0 && to + box_lines * WGMMA_ROW_BYTES <= (int)sizeof slot, "where it goes", to,
              y);
        for (int line = 0; line < box_lines; ++line)
            for (int e = 0; e < 64; ++e) {
                const bool inside = x + e < map.inner && y + line < map.outer;
                at(swizzle<3, 4, 3>::apply(to + line * WGMMA_ROW_BYTES + e * 2)) =
                    inside ? map.base[x + e + (y + line) * map.stride] : 0;
            }
    }

    void load_weights(int tile, int step) {
        const int first = skewed_first(plan, tile);
        int bytes = 0;
        if (ALONG_N) {
            for (int line = 0; line < SKEWED_STEP; line += box_lines)
                for (int j = 0; j < W::panels; ++j, bytes += box_lines * WGMMA_ROW_BYTES)
                    load_box(line / K64 * BLOCK + line % K64 * WGMMA_ROW_BYTES + j * W::panel_bytes,
                             w[skewed_class(plan, line)], first + j * 64, skewed_line(plan, step, line));
        } else {
            for (int i = 0; i < STEP_BLOCKS; ++i, bytes += box_lines * WGMMA_ROW_BYTES)
                load_box(i * BLOCK, w[skewed_class_of(plan, tile)], step * SKEWED_STEP + i * K64, first);
        }
        check(bytes == STEP_BLOCKS * (ALONG_N ? ROWS : plan.rows) * WGMMA_ROW_BYTES, "the bytes announced", bytes,
              step);
    }

    /* One box of all tokens, zeros outside the map. */
    bool boxed() const { return p.m > 1 && p.a_m >= p.k && (uintptr_t)p.a % 16 == 0 && p.a_m % SKEWED_EACH == 0; }
    void load_box_of_tokens(int window) {
        for (int m = 0; m < p.m; ++m)
            for (int e = 0; e < SKEWED_WINDOW; ++e)
                windows[m][e] = window + e >= 0 && window + e < p.k ? p.a[m * p.a_m + window + e] : 0;
    }

    void load_windows(int tile, int step) {
        if (boxed()) return load_box_of_tokens(skewed_window(plan, tile, step));
        for (int m = 0; m < WINDOW_LANES; ++m) {
            const int before = skewed_token(plan, m), end = m < p.m ? ((int)p.k + before + 7) / 8 * 8 : 0;
            const int window = skewed_window(plan, tile, step), from = window > 0 ? window : 0;
            const int until = window + SKEWED_WINDOW < end ? window + SKEWED_WINDOW : end;
            if (until <= from) continue;
            const uint16_t *const row = p.a + m * p.a_m, *const token = row - before, *const x = token + from;
            check((uintptr_t)x % 16 == 0 && (until - from) % SKEWED_EACH == 0, "a copy's address and size", m, from);
            check((uintptr_t)x >= (uintptr_t)row / 16 * 16, "a copy before its token", m, from);
            check((uintptr_t)(token + until) <= ((uintptr_t)(row + p.k) + 15) / 16 * 16, "a copy past its token", m,
                  until);
            const bool fits = m < TOKENS && (from - window) % SKEWED_EACH == 0 && until - window <= SKEWED_WINDOW;
            check(fits, "where a copy goes", m, from - window);
            if (fits) memcpy(windows[m] + from - window, x, (size_t)(until - from) * 2);
        }
    }

    void place_tokens(int tile, int step) {
        for (int i = 0; i < SKEWED_STEP; ++i) {
            const int k = skewed_k(plan, tile, step, i);
            const bool inside = k >= 0 && k < p.k;
            for (int m = 0; m < (p.m + 3) / 4 * 4; ++m) {
                const int from = k - skewed_window(plan, tile, step) + skewed_token(plan, m);
                check(from >= 0 && from < SKEWED_WINDOW, "a read of a window", k, from);
                at(i / K64 * BLOCK + W::bytes + X::offset_of(m, i % K64)) = inside ? windows[m][from] : 0;
            }
        }
    }

    /* What lies before the lines. */
    void clear_heads(int skew) {
        for (int row = 0; row < ROWS; ++row) {
            uint4 head;
            uint16_t *const head_s = &at(W::offset_of(row, 0));
            memcpy(&head, head_s, sizeof head);
            head = skewed_head(head, skew);
            memcpy(head_s, &head, sizeof head);
        }
    }

    /* Rows and tokens that no result could come from are left out. */
    void multiply(bool first) {
        const int rows = ALONG_N ? (int)ROWS : (plan.rows + 3) / 4 * 4, tokens = (int)(p.m + 3) / 4 * 4;
        for (int k = 0; k < SKEWED_STEP; ++k) {
            const int block = k / K64 * BLOCK, s = ALONG_N ? k / 16 : 0;
            const bool fresh = first && k % (ALONG_N ? 16 : SKEWED_STEP) == 0;
            float x[TOKENS];
            for (int m = 0; m < tokens; ++m) x[m] = number(at(block + W::bytes + X::offset_of(m, k % K64)));
            for (int row = 0; row < rows; ++row) {
                const float weight = number(at(block + W::offset_of(row, k % K64)));
                for (int m = 0; m < tokens; ++m) sum[s][row][m] = (fresh ? 0 : sum[s][row][m]) + weight * x[m];
            }
        }
    }

    /* Along n each class's sums go as many rows up as its lines begin late. */
    void gather(int part) {
        for (int m = 0; m < p.m; ++m) {
            for (int row = 0; row < ROWS; ++row) sums[part][m][row] = ALONG_N ? 0 : sum[0][row][m];
            for (int kk = 0; ALONG_N && kk < STEP_K16; ++kk) {
                const int shift = skewed_shift(plan, skewed_class(plan, kk * 16));
                check(skewed_class(plan, kk * 16) == skewed_class(plan, kk * 16 + 15), "sums of one class", kk, shift);
                for (int row = shift; row < ROWS; ++row) sums[part][m][row - shift] += sum[kk][row][m];
            }
        }
    }

    void store(int tile, int part, int thread) {
        const int quads = (plan.rows + 3) / 4, all = (int)p.m * quads;
        for (int i = part * ADDERS + thread; i < all; i += plan.parts * ADDERS) {
            const int token = i / quads, row = (i - token * quads) * 4;
            for (int e = 0; e < 4; ++e) {
                const int n = skewed_n(plan, tile, row + e);
                if (!(row + e < plan.rows && n >= 0 && n < p.n)) continue;
                float total = 0;
                for (int j = 0; j < plan.parts; ++j) total += sums[j][token][row + e];
                out[token][n] = total, ++written[token][n];
            }
        }
    }

    /* A cluster's blocks one after the other, or a block's tiles. */
    void run(int cluster, int num_clusters) {
        for (int tile = cluster; tile < plan.tiles; tile += num_clusters) {
            for (int part = 0; part < plan.parts; ++part) {
                const int step0 = plan.steps * part / plan.parts, step1 = plan.steps * (part + 1) / plan.parts;
                const int skew = ALONG_N ? 0 : plan.skew[skewed_class_of(plan, tile)];
                check(step0 < step1, "a part without a step", part, plan.steps);
                memset(sum, 0xff, sizeof sum);
                for (int step = step0; step < step1; ++step) {
                    memset(slot, 0xff, sizeof slot), memset(windows, 0xff, sizeof windows);
                    load_weights(tile, step), load_windows(tile, step), place_tokens(tile, step);
                    if (!ALONG_N && step == 0 && skew > 0) clear_heads(skew);
                    multiply(step == step0);
                }
                gather(part);
            }
            for (int part = 0; part < plan.parts; ++part)
                for (int thread = 0; thread < ADDERS; ++thread) store(tile, part, thread);
        }
    }
};

/* ---- a product ------------------------------------------------------------------------------------------------- */
template <int ROWS, bool ALONG_N> static void check_product(const Problem &p, const SkewedPlan &plan, int sms) {
    Model<ROWS, ALONG_N> model(p, plan);
    const int clusters = plan.parts > 1 || plan.tiles < sms ? plan.tiles : sms;
    for (int cluster = 0; cluster < clusters; ++cluster) model.run(cluster, clusters);
    for (int m = 0; m < p.m; ++m)
        for (int n = 0; n < p.n; ++n) {
            float want = 0;
            for (int k = 0; k < p.k; ++k) want += number(p.a[m * p.a_m + k]) * number(p.b[k * p.b_k + n * p.b_n]);
            check(model.written[m][n] == 1, "a result is written once", n, model.written[m][n]);
            check(model.out[m][n] == want, "a result", m, n);
        }
}

static int seen[2][4][SKEWED_PARTS + 1]; /* along n, classes, parts */

/* m x n x k, weights along n or k, `stride` elements from one line to the next. */
static void check_case(int64_t m, int64_t n, int64_t k, bool along_n, int64_t stride, int sms) {
    Problem p = {m, n, k, a_memory + (1 << 16) + below(8), b_memory + 64 + below(8), 0, 0, 0};
    p.a_m = below(3) == 0 ? below(4000) - 2000 : k + below(30);
    if (below(3) == 0) p.a = a_memory + (1 << 16), p.a_m = gk_round_up(k + below(30), SKEWED_EACH);
    p.b_k = along_n ? stride : 1, p.b_n = along_n ? 1 : stride;
    for (uint16_t &x : a_memory) x = POISON;
    for (uint16_t &x : b_memory) x = POISON;
    for (int64_t i = 0; i < m * k; ++i) a_memory[p.a - a_memory + i / k * p.a_m + i % k] = random_element();
    for (int64_t i = 0; i < n * k; ++i) b_memory[p.b - b_memory + i / k * p.b_n + i % k * p.b_k] = random_element();
    for (int rows = 64; rows <= 128; rows += 64) {
        const SkewedPlan plan = skewed_plan(p, rows, sms);
        ++seen[plan.along_n][plan.classes_log2][plan.parts];
        check(plan.rows > 0 && plan.rows <= rows && plan.tiles > 0, "a tile's rows", plan.rows, plan.tiles);
        check(plan.parts == 1 || plan.tiles * plan.parts <= sms, "clusters on the GPU", plan.tiles, plan.parts);
        if (rows == 64)
            plan.along_n ? check_product<64, true>(p, plan, sms) : check_product<64, false>(p, plan, sms);
        else
            plan.along_n ? check_product<128, true>(p, plan, sms) : check_product<128, false>(p, plan, sms);
    }
}

/* Each 16 bytes with each number of elements before the line. */
static void check_heads() {
    for (int skew = 0; skew < SKEWED_EACH; ++skew) {
        uint16_t in[SKEWED_EACH], got[SKEWED_EACH];
        for (uint16_t &x : in) x = (uint16_t)(1 + below(65535));
        uint4 x;
        memcpy(&x, in, sizeof x);
        x = skewed_head(x, skew);
        memcpy(got, &x, sizeof got);
        for (int e = 0; e < SKEWED_EACH; ++e) check(got[e] == (e < skew ? 0 : in[e]), "a head", skew, e);
    }
}

int main() {
    const int gpus[] = {132, 114, 4, 1};
    check_heads();
    for (int i = 0; i < 320; ++i) {
        /* small ones, few n of long lines, few k, and those that are cut into parts */
        const int64_t m = 1 + below(TOKENS), most_n[] = {200, 60, LONG, 300}, most_k[] = {300, LONG, 60, LONG};
        const int64_t n = 1 + below(most_n[i % 4]), k = 1 + below(most_k[i % 4]);
        const bool along_n = i / 4 % 2;
        const int64_t size = along_n ? n : k, each = (int64_t)1 << below(4); /* of which the stride is a multiple */
        check_case(m, n, k, along_n, gk_round_up(size + below(2) * below(40), each), gpus[i / 8 % 4]);
    }
    for (int along_n = 0; along_n < 2; ++along_n)
        for (int log2 = 0; log2 < 4; ++log2) {
            int parts = 0;
            for (int j = 2; j <= SKEWED_PARTS; ++j) parts += seen[along_n][log2][j];
            check(seen[along_n][log2][1] > 0 && parts > 0, "whole tiles and parts of each kind", along_n, log2);
        }
    printf("%ld passed, %ld failed\n", num_passed, num_failed);
    return num_failed != 0 || num_passed == 0;
}
