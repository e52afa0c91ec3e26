/* check_skewed: csrc/cuda/gemm/skewed.cuh on the host: random products through the functions that gemm_skewed_sm90a is made
 * of, its grid walked block by block: boxes of weights as tma brings them, windows of the tokens, the lanes' fragments of
 * them, sums that move up, totals, results. Whatever is not an element of a matrix, and whatever a slot was not given, is NaN.
 * Every result must be written once and be exact, and every byte that is read one of the 16 around a row's. Exits with 1 on a
 * failure. */
#include "check_model.h"

#include "cuda/gemm/skewed.cuh"

enum {
    TOKENS = SKEWED_MAX_TOKENS,
    COPIERS = SKEWED_COPIERS,
    LONG = 1400 /* n or k, at most */
};
static const uint16_t POISON = 0xffff; /* a NaN */

alignas(128) static uint16_t a_memory[1 << 17], b_memory[1 << 20];

struct Problem {
    int64_t m, n, k;
    const uint16_t *a, *b;
    int64_t a_m, b_k, b_n;
};

/* ---- the kernel's parts ---------------------------------------------------------------------------------------- */
template <int ROWS, bool ALONG_N> struct Model {
    typedef smem_tile<ALONG_N ? SKEWED_STEP : ROWS, SKEWED_PANEL * 2> W;
    enum {
        TILES = ALONG_N ? ROWS / SKEWED_PANEL : SKEWED_STEP / SKEWED_PANEL,
        WARPS = SKEWED_STEP / 16,
        ADDERS = WARPS * 32
    };
    struct Map {
        const uint16_t *base;
        int64_t inner, outer, stride;
    };

    const Problem &p;
    const SkewedPlan &plan;
    int box_lines;
    Map w[LINE_CLASSES];
    uint16_t slot[TILES * W::bytes / 2], windows[TOKENS][SKEWED_WINDOW];
    float sum[WARPS][ROWS][TOKENS];                           /* of a warp, in its registers */
    float sums[WARPS * skewed_sums_bytes(ROWS, ALONG_N) / 4]; /* of a block, in shared memory */
    float totals[SKEWED_PARTS][TOKENS + 2][ROWS];             /* in a block of a cluster */
    int received[SKEWED_PARTS];                               /* totals, of all parts */
    float out[TOKENS][LONG];
    int written[TOKENS][LONG];

    Model(const Problem &p, const SkewedPlan &plan) : p(p), plan(plan), out(), written() {
        const int64_t lines = ALONG_N ? p.k : p.n, line = ALONG_N ? p.b_k : p.b_n, inner = ALONG_N ? p.n : p.k;
        box_lines = skewed_box_lines(plan);
        check(skewed_boxes(plan, TILES) <= COPIERS, "a box a thread", skewed_boxes(plan, TILES), COPIERS);
        for (int j = 0; j < skewed_classes(plan); ++j) {
            w[j] = {p.b + j * line - plan.skew[j], inner + plan.skew[j],
                    (lines - j + skewed_classes(plan) - 1) >> plan.classes_log2, line << plan.classes_log2};
            check((uintptr_t)w[j].base % 16 == 0, "a map's address", j, plan.skew[j]);
            check(w[j].stride % LINE_EACH == 0, "a map's stride", j, line);
            check(plan.skew[j] >= 0 && plan.skew[j] < LINE_EACH, "what lies before a line", j, plan.skew[j]);
        }
    }

    uint16_t &at(int byte) { return slot[byte / 2]; }
    uint16_t &weight(int row, int k) {
        return ALONG_N ? at(row / SKEWED_PANEL * W::bytes + W::offset_of(k, row % SKEWED_PANEL, 2))
                       : at(k / SKEWED_PANEL * W::bytes + W::offset_of(row, k % SKEWED_PANEL, 2));
    }

    /* tma: a box of 64 elements x box_lines, swizzled as its address says; zeros outside the map. */
    void load_box(int to, const Map &map, int x, int y) {
        check(x % LINE_EACH == 0 && x >= 0 && y >= 0, "where a box begins", x, y);
        check(to % 128 == 0 && to + box_lines * 128 <= (int)sizeof slot, "where it goes", to, y);
        for (int line = 0; line < box_lines; ++line)
            for (int e = 0; e < SKEWED_PANEL; ++e) {
                const bool inside = x + e < map.inner && y + line < map.outer;
                at(swizzle<3, 4, 3>::apply(to + line * 128 + e * 2)) =
                    inside ? map.base[x + e + (y + line) * map.stride] : 0;
            }
    }

    /* The window of a token and a box of weights that a thread copies; the box's bytes. */
    int copy(int m, int tile, int step) {
        const int before = skewed_token(plan, m), end = m < p.m ? ((int)p.k + before + 7) / 8 * 8 : 0;
        const int window = skewed_window(plan, tile, 0) + step * SKEWED_STEP, from = window > 0 ? window : 0;
        const int until = window + SKEWED_WINDOW < end ? window + SKEWED_WINDOW : end;
        if (until > from) {
            const uint16_t *const row = p.a + m * p.a_m, *const token = row - before, *const x = token + from;
            check((uintptr_t)x % 16 == 0 && (until - from) % LINE_EACH == 0, "a copy's address and size", m, from);
            check((uintptr_t)x >= (uintptr_t)row / 16 * 16, "a copy before its token", m, from);
            check((uintptr_t)(token + until) <= ((uintptr_t)(row + p.k) + 15) / 16 * 16, "a copy past its token", m,
                  until);
            const bool fits = m < TOKENS && (from - window) % LINE_EACH == 0 && until - window <= SKEWED_WINDOW;
            check(fits, "where a copy goes", m, from - window);
            if (fits) memcpy(windows[m] + from - window, x, (size_t)(until - from) * 2);
        }
        if (m >= skewed_boxes(plan, TILES)) return 0;
        const int panel = m % TILES, line = ALONG_N ? m / TILES * box_lines : 0, first = skewed_first(plan, tile);
        load_box(panel * W::bytes + line * W::row_bytes,
                 w[ALONG_N ? skewed_class(plan, line) : skewed_class_of(plan, tile)],
                 panel * SKEWED_PANEL + (ALONG_N ? first : step * SKEWED_STEP),
                 ALONG_N ? skewed_line(plan, 0, line) + step * box_lines : first);
        return box_lines * SKEWED_PANEL * 2;
    }

    /* A warp's 16 k: what its lanes read of the tokens, and of a line's first 8 elements what they keep. */
    void fragments(int tile, int step, int warp, float (&x)[16][TOKENS], bool (&keeps)[16]) {
        const uint32_t none = 0xffffffffu;
        for (int lane = 0; lane < 32; ++lane) {
            const int first = skewed_k(plan, tile, 0, warp * 16 + frag_b16(lane, 0).row);
            for (int e = 0; e < 8; ++e) {
                const int i = frag_b16(lane, e % 4).row, m = frag_b16(lane, e % 4).col + e / 4 * 8;
                const int in_step = first + frag_b16(0, e % 4).row * skewed_k_step(plan),
                          k = in_step + step * SKEWED_STEP;
                const int from = in_step - skewed_window(plan, tile, 0) + skewed_token(plan, m);
                check(k == skewed_k(plan, tile, step, warp * 16 + i), "the k of a fragment", k, i);
                check(from >= 0 && from < SKEWED_WINDOW, "a read of a window", k, from);
                x[i][m] = k >= 0 && k < p.k ? number(windows[m][from]) : 0;
            }
            const uint32_t keep =
                !ALONG_N && step == 0 && warp == 0 ? skewed_keep(lane, plan.skew[skewed_class_of(plan, tile)]) : none;
            for (int e = 0; e < 8; ++e) keeps[frag_a16(lane, e).col] = e >= 4 || keep >> e % 2 * 16 & 1;
        }
    }

    /* Rows and tokens that no result could come from are left out. */
    void multiply(int tile, int step) {
        const int rows = ALONG_N ? (int)ROWS : (plan.rows + 3) / 4 * 4;
        for (int warp = 0; warp < WARPS; ++warp) {
            float x[16][TOKENS];
            bool keeps[16];
            fragments(tile, step, warp, x, keeps);
            for (int i = 0; i < 16; ++i)
                for (int row = 0; row < rows; ++row) {
                    const float y = keeps[i] ? number(weight(row, warp * 16 + i)) : 0;
                    for (int m = 0; m < p.m; ++m) sum[warp][row][m] += y * x[i][m];
                }
        }
    }

    /* Where a row's sum with a token is among those of all warps. */
    static int sum_at(int warp, int row, int token) {
        return (warp * skewed_sums_bytes(ROWS, ALONG_N) + skewed_sum_at(ROWS, ALONG_N, row, token)) / 4;
    }

    /* Along n each class's sums go as many rows up as its lines begin late; no two to one place. */
    void put() {
        static bool taken[sizeof sums / sizeof *sums];
        memset(sums, 0xff, sizeof sums), memset(taken, 0, sizeof taken);
        for (int warp = 0; warp < WARPS; ++warp) {
            const int cls = skewed_class(plan, warp * 16), up = ALONG_N ? skewed_shift(plan, cls) : 0;
            check(cls == skewed_class(plan, warp * 16 + 15), "sums of one class", warp, cls);
            check(plan.rows + up <= ROWS, "a tile's rows are whole", plan.rows, up);
            for (int token = 0; token < (p.m > 8 ? 16 : 8); ++token)
                for (int row = 0; row < ROWS; ++row) {
                    const int at = sum_at(warp, row - up, token);
                    const bool free = at >= 0 && at < (int)(sizeof sums / sizeof *sums) && !taken[at];
                    check(free, "a place for a sum", row, token);
                    if (free) taken[at] = true, sums[at] = sum[warp][row][token];
                }
        }
    }

    /* The totals of four rows at a time. */
    void add(int part) {
        for (int token = 0; token < p.m; ++token) {
            const int owner = skewed_owner(plan, token), mine = token - plan.first_token[owner];
            check(owner < plan.parts && mine >= 0 && mine < plan.most_tokens && token < plan.first_token[owner + 1],
                  "who stores a token's results", token, owner);
            check((part + 1) * plan.most_tokens <= TOKENS + 2, "room for the totals", part, plan.most_tokens);
            for (int row = 0; row < ROWS; ++row) {
                float total = 0;
                for (int warp = 0; warp < WARPS; ++warp) total += sums[sum_at(warp, row, token)];
                totals[owner][part * plan.most_tokens + mine][row] = total;
                check(sum_at(0, row, token) % 4 == row % 4, "16 bytes at a time", row, token);
                ++received[owner];
            }
        }
    }

    void store(int tile, int part, int thread) {
        const int row = thread % ROWS, n = skewed_n(plan, tile, row);
        if (row >= plan.rows || n < 0 || n >= p.n) return;
        for (int i = thread / ROWS; plan.first_token[part] + i < plan.first_token[part + 1]; i += ADDERS / ROWS) {
            const int token = plan.first_token[part] + i;
            float total = 0;
            for (int j = 0; j < plan.parts; ++j) total += totals[part][j * plan.most_tokens + i][row];
            out[token][n] = total, ++written[token][n];
        }
    }

    /* A cluster's blocks one after the other, or a block's tiles. */
    void run(int cluster, int num_clusters) {
        for (int tile = cluster; tile < plan.tiles; tile += num_clusters) {
            memset(totals, 0xff, sizeof totals), memset(received, 0, sizeof received);
            for (int part = 0; part < plan.parts; ++part) {
                check(plan.first_step[part] < plan.first_step[part + 1], "a part without a step", part, plan.steps);
                memset(sum, 0, sizeof sum);
                for (int step = plan.first_step[part]; step < plan.first_step[part + 1]; ++step) {
                    int bytes = 0;
                    memset(slot, 0xff, sizeof slot), memset(windows, 0xff, sizeof windows);
                    for (int m = 0; m < COPIERS; ++m) bytes += copy(m, tile, step);
                    check(bytes == SKEWED_STEP * 2 * (ALONG_N ? (int)ROWS : plan.rows), "a step's bytes", bytes, step);
                    multiply(tile, step);
                }
                put(), add(part);
            }
            for (int part = 0; part < plan.parts; ++part) /* what the block's barrier waits for */
                check(received[part] == (plan.first_token[part + 1] - plan.first_token[part]) * plan.parts * ROWS,
                      "totals that come", received[part], part);
            check(plan.first_step[0] == 0 && plan.first_step[plan.parts] == plan.steps, "all steps", tile, plan.steps);
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
    if (below(3) == 0) p.a = a_memory + (1 << 16), p.a_m = gk_round_up(k + below(30), LINE_EACH);
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

int main() {
    const int gpus[] = {132, 114, 4, 1};
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
