/* check_layout: csrc/cuda/layout and gemm/order.cuh on the host.
 *
 *   check_layout         every function against its definition, over all small layouts; fragments against the formulas
 *                        of the PTX ISA; conflict degrees against cases worked out by hand. Exits with 1 on a failure.
 *   check_layout dump    reads lines "function argument ...", prints one line each, for tests/test_layout.py:
 *                        layouts as (2,4):(4,1), integers as they are, "none MODE" where a function refuses. */
#include "cuda/layout/atoms.cuh"
#include "cuda/layout/wgmma.cuh"

// what order.cuh needs of a device
#define __device__
#define __forceinline__ inline
static unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
#include "cuda/gemm/order.cuh"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Used by kernels in just this form.
static_assert(size(layout{2, {4, 8}, {8, 1}}) == 32 && cosize(layout{2, {4, 8}, {8, 1}}) == 32, "");
static_assert(at(layout{2, {4, 8}, {8, 1}}, 5) == 9, "");
static_assert(compose(layout{1, {64}, {2}}, layout{1, {8}, {4}}).ok, "");
static_assert(smem_tile_ways(128) == 1 && smem_tile<64, 128>::offset(1, 0) == 128 + 16, "");

// Where today's kernels find their operands; tests/data/layout.golden has more of each.
static_assert(wgmma_tile<128, false>::descriptor(1024) == 4611686293305360448u, "");
static_assert(wgmma_tile<128, true>::descriptor(1024) == 4611686293338849344u, "");
static_assert(wgmma_tile<128, false>::offset_of(4, 0) == 576 && wgmma_tile<128, true>::offset_of(4, 8) == 1032, "");
static_assert(wgmma_panels<64, 128>::offset_of(4, 64) == 8192 + 576, "");
static_assert(frag_a16(5, 2).row == 9 && frag_a16(5, 2).col == 2 && frag_c(5, 3).row == 9, "");

static long num_passed, num_failed;

static void check(bool good, const char *format, ...) {
    if (good) {
        ++num_passed;
        return;
    }
    if (++num_failed > 40) return; // enough to see a pattern
    va_list list;
    va_start(list, format);
    printf("FAILED ");
    vprintf(format, list);
    printf("\n");
    va_end(list);
}

// ---- text -----------------------------------------------------------------------------------------------------------

static void print_numbers(char *to, int n, const int *x) {
    if (n == 1) {
        sprintf(to, "%d", x[0]);
        return;
    }
    for (int i = 0; i < n; ++i) to += sprintf(to, "%c%d", i ? ',' : '(', x[i]);
    strcpy(to, n ? ")" : "()");
}

static const char *text(const layout &l) {
    static char ring[8][256];
    static int next;
    char *to = ring[next = (next + 1) % 8];
    print_numbers(to, l.modes, l.shape);
    strcat(to, ":");
    print_numbers(to + strlen(to), l.modes, l.stride);
    return to;
}

static int parse_numbers(const char **from, int *x) {
    int n = 0;
    bool many = **from == '(';
    if (many) ++*from;
    do {
        char *end;
        if (n == LAYOUT_MAX_MODES) exit(2);
        x[n++] = (int)strtol(*from, &end, 10);
        if (end == *from) exit(2);
        *from = end;
    } while (many && *(*from)++ == ',');
    return n;
}

static layout parse(const char *from) {
    layout l = {};
    l.modes = parse_numbers(&from, l.shape);
    if (*from++ != ':' || parse_numbers(&from, l.stride) != l.modes) exit(2);
    return l;
}

static void print_result(const layout_result &r, bool with_overhang) {
    if (!r.ok) printf("none %d\n", r.mode);
    if (r.ok && with_overhang) printf("%s %d\n", text(r.value), r.overhang);
    if (r.ok && !with_overhang) printf("%s\n", text(r.value));
}

// ---- what lies where, for tests/data/layout.golden ------------------------------------------------------------------

// Row + rows * column of element e of lane l, e by e.
template <typename Map> static void print_elements(Map map, int rows, int elements) {
    for (int i = 0; i < 32 * elements; ++i) {
        coord at = map(i % 32, i / 32);
        printf("%d%c", at.row + rows * at.col, i + 1 < 32 * elements ? ' ' : '\n');
    }
}

static coord transposed(coord at) { return {at.col, at.row}; }

static int dump_fragments(const char *name) {
    if (strcmp(name, "c") == 0)
        print_elements(frag_c, 16, 4);
    else if (strcmp(name, "a16") == 0)
        print_elements(frag_a16, 16, 8);
    else if (strcmp(name, "b16") == 0) // by n + 8 k
        print_elements([](int lane, int e) { return transposed(frag_b16(lane, e)); }, 8, 4);
    else if (strcmp(name, "a32") == 0)
        print_elements(frag_a32, 16, 4);
    else if (strcmp(name, "b32") == 0)
        print_elements([](int lane, int e) { return transposed(frag_b32(lane, e)); }, 8, 2);
    else if (strcmp(name, "ldmatrix") == 0)
        print_elements([](int lane, int half) { return ldmatrix_element(lane, half, false); }, 8, 2);
    else if (strcmp(name, "ldmatrix.trans") == 0)
        print_elements([](int lane, int half) { return ldmatrix_element(lane, half, true); }, 8, 2);
    else if (strcmp(name, "movmatrix") == 0)
        print_elements(movmatrix_element, 8, 2);
    else
        return 2;
    return 0;
}

// The descriptor of the operand at byte 1024, then the bytes of elements (x, k), 16 of x and every 16th byte of k.
template <typename Tile> static void print_operand(int each_chunk, int k) {
    printf("%llu", (unsigned long long)Tile::descriptor(1024));
    for (int x = 0; x < 16; ++x) {
        for (int i = 0; i < k; i += each_chunk) printf(" %d", Tile::offset_of(x * 4, i));
    }
    printf("\n");
}

static int dump_operand(const char *name) {
    if (strcmp(name, "k64") == 0)
        print_operand<wgmma_tile<64, false>>(8, 64);
    else if (strcmp(name, "k128") == 0)
        print_operand<wgmma_tile<128, false>>(8, 64);
    else if (strcmp(name, "mn128") == 0)
        print_operand<wgmma_tile<128, true>>(8, 64);
    else if (strcmp(name, "tf32") == 0)
        print_operand<wgmma_tile<64, false, 32>>(4, 32);
    else
        return 2;
    return 0;
}

// The conflict degree of lanes whose accesses of so many bytes lie `stride` bytes apart.
static int strided_ways(int access_bytes, int stride) {
    int bytes[32];
    for (int lane = 0; lane < 32; ++lane) bytes[lane] = lane * stride;
    return ways(bytes, access_bytes);
}

static int dump_place(const char *name, const char *what, const char *more) {
    if (strcmp(name, "fragment") == 0) return dump_fragments(what);
    if (strcmp(name, "operand") == 0) return dump_operand(what);
    if (strcmp(name, "ways") == 0) return printf("%d\n", strided_ways(atoi(what), atoi(more))) < 0;
    if (strcmp(name, "tile") != 0) return 2;
    for (int i = 0, chunks = atoi(what) / 16; i < 16 * chunks; ++i)
        printf("%d%c", smem_offset(atoi(what), i / chunks, i % chunks), i + 1 < 16 * chunks ? ' ' : '\n');
    return 0;
}

static int dump() {
    char name[32], first[256], second[256], line[600];
    while (fgets(line, sizeof line, stdin)) {
        int n = sscanf(line, "%31s %255s %255s", name, first, second);
        if (n < 2) return 2;
        if (strcmp(name, "fragment") == 0 || strcmp(name, "operand") == 0 || strcmp(name, "tile") == 0 ||
            (strcmp(name, "ways") == 0 && n == 3)) {
            if (dump_place(name, first, second)) return 2;
            continue;
        }
        layout a = parse(first);
        if (strcmp(name, "size") == 0)
            printf("%d\n", size(a));
        else if (strcmp(name, "cosize") == 0)
            printf("%d\n", cosize(a));
        else if (strcmp(name, "at") == 0 && n == 3)
            printf("%d\n", at(a, atoi(second)));
        else if (strcmp(name, "coalesce") == 0)
            printf("%s\n", text(coalesce(a)));
        else if (strcmp(name, "right_inverse") == 0)
            printf("%s\n", text(right_inverse(a)));
        else if (strcmp(name, "complement") == 0 && n == 3)
            print_result(complement(a, atoi(second)), false);
        else if (strcmp(name, "compose") == 0 && n == 3)
            print_result(compose(a, parse(second)), false);
        else if (strcmp(name, "product") == 0 && n == 3)
            print_result(product(a, parse(second)), false);
        else if (strcmp(name, "divide") == 0 && n == 3)
            print_result(divide(a, parse(second)), true);
        else
            return 2;
    }
    return 0;
}

// ---- layouts --------------------------------------------------------------------------------------------------------

// The number-th layout of `modes` modes with shapes 1 .. shapes and strides first .. first + strides - 1.
static layout small(int modes, int number, int shapes, int first, int strides) {
    layout l = {};
    for (int m = 0; m < modes; ++m) {
        layout_append(l, number % shapes + 1, number / shapes % strides + first);
        number /= shapes * strides;
    }
    return l;
}

static int power(int x, int n) { return n ? x * power(x, n - 1) : 1; }

static void check_coalesce(const layout &l) {
    layout c = coalesce(l);
    bool equal = size(c) == size(l), fewest = true;
    for (int i = 0; i < size(l); ++i) equal = equal && at(c, i) == at(l, i);
    for (int m = 0; m < c.modes; ++m) {
        if (c.modes > 1 && c.shape[m] == 1) fewest = false;
        if (m && c.stride[m] == c.stride[m - 1] * c.shape[m - 1]) fewest = false;
    }
    check(equal && fewest && same(coalesce(c), c), "coalesce %s is %s", text(l), text(c));
}

static void check_cosize(const layout &l) {
    int low = 0, high = 0;
    for (int i = 0; i < size(l); ++i) {
        int offset = at(l, i);
        if (offset < low) low = offset;
        if (offset > high) high = offset;
    }
    check(cosize(l) == high - low + 1, "cosize %s is %d, not %d", text(l), cosize(l), high - low + 1);
}

// How often each offset below `end` is reached; false when one lies outside.
static bool count_offsets(const layout &l, int end, int *counts) {
    memset(counts, 0, (size_t)end * sizeof *counts);
    for (int i = 0; i < size(l); ++i) {
        int offset = at(l, i);
        if (offset < 0 || offset >= end) return false;
        ++counts[offset];
    }
    return true;
}

static bool each_once(const layout &l, int end) {
    static int counts[65536];
    if (size(l) != end || !count_offsets(l, end, counts)) return false;
    for (int i = 0; i < end; ++i) {
        if (counts[i] != 1) return false;
    }
    return true;
}

static bool reaches_twice(const layout &l) {
    for (int i = 0; i < size(l); ++i) {
        for (int k = 0; k < i; ++k) {
            if (at(l, i) == at(l, k)) return true;
        }
    }
    return false;
}

static void check_right_inverse(const layout &l) {
    layout r = right_inverse(l);
    bool good = true;
    for (int i = 0; i < size(r); ++i) good = good && at(r, i) < size(l) && at(l, at(r, i)) == i;
    bool compact = size(l) < 65536 && cosize(l) == size(l) && each_once(l, size(l));
    check(good && (!compact || size(r) == size(l)), "right_inverse %s is %s", text(l), text(r));
}

static layout without_zero_strides(const layout &l) {
    layout r = {};
    for (int m = 0; m < l.modes; ++m) {
        if (l.stride[m] != 0) layout_append(r, l.shape[m], l.stride[m]);
    }
    return r;
}

// Whether copies of l can cover 0, 1, 2 ... without gap or overlap up to some end >= n: the lowest free offset must be
// the start of a copy, so there is one way to try. Strides of l positive.
static bool can_tile(const layout &l, int n) {
    enum {
        END = 1024
    };
    static bool taken[END];
    memset(taken, 0, sizeof taken);
    int covered = 0, span = cosize(l);
    for (int next = 0; next + span <= END;) {
        for (int i = 0; i < size(l); ++i) {
            if (taken[next + at(l, i)]) return false;
            taken[next + at(l, i)] = true;
            ++covered;
        }
        while (next < END && taken[next]) ++next;
        if (next >= n && covered == next) return true;
    }
    return false;
}

static void check_complement(const layout &l, int n) {
    layout_result r = complement(l, n);
    layout both = without_zero_strides(l);
    bool positive = true;
    for (int m = 0; m < l.modes; ++m) positive = positive && (l.stride[m] >= 0 || l.shape[m] == 1);
    if (!r.ok) {
        check(!positive || !can_tile(both, n), "complement %s in %d was refused", text(l), n);
        return;
    }
    bool ascends = true;
    for (int m = 0; m < r.value.modes; ++m) {
        layout_append(both, r.value.shape[m], r.value.stride[m]);
        ascends = ascends && (m == 0 || r.value.stride[m] > r.value.stride[m - 1]);
    }
    check(ascends && size(both) >= n && each_once(both, size(both)), "complement %s in %d is %s", text(l), n,
          text(r.value));
}

// Whether values f[0], f[step], f[2 step] ... (n of them) are those of some layout: tries every first mode.
static bool is_layout(const int *f, int n, int step) {
    if (n == 1) return f[0] == 0;
    for (int shape = 2; shape <= n; ++shape) {
        if (n % shape) continue;
        bool good = true;
        for (int i = 0; i < n && good; ++i) {
            good = f[i * step] == f[i % shape * step] - f[0] + f[i / shape * shape * step] &&
                   f[i % shape * step] - f[0] == i % shape * (f[step] - f[0]);
        }
        if (good && is_layout(f, n / shape, step * shape)) return true;
    }
    return false;
}

static bool compose_exists(const layout &a, const layout &b) {
    for (int i = 0; i < size(b); ++i) {
        if (at(b, i) < 0 || at(b, i) >= size(a)) return false;
    }
    for (int m = 0; m < b.modes; ++m) {
        int f[64] = {};
        for (int i = 0; i < b.shape[m]; ++i) {
            if (i * b.stride[m] < 0 || i * b.stride[m] >= size(a)) return false;
            f[i] = at(a, i * b.stride[m]);
        }
        if (!is_layout(f, b.shape[m], 1)) return false;
    }
    for (int i = 0; i < size(b); ++i) {
        int sum = 0, rest = i;
        for (int m = 0; m < b.modes; rest /= b.shape[m++]) sum += at(a, rest % b.shape[m] * b.stride[m]);
        if (sum != at(a, at(b, i))) return false;
    }
    return true;
}

static void check_compose(const layout &a, const layout &b) {
    layout_result r = compose(a, b);
    bool exists = compose_exists(a, b), good = r.ok == exists && (r.ok || (r.mode >= 0 && r.mode < b.modes));
    if (r.ok) good = good && size(r.value) == size(b);
    for (int i = 0; good && r.ok && i < size(b); ++i) good = at(r.value, i) == at(a, at(b, i));
    check(good, "compose %s with %s is %s, a layout %s", text(a), text(b), r.ok ? text(r.value) : "refused",
          exists ? "exists" : "does not exist");
}

static void check_divide(const layout &l, const layout &tile) {
    layout_result r = divide(l, tile);
    if (!r.ok) {
        layout_result rest = complement(tile, size(l));
        layout both = tile;
        for (int m = 0; rest.ok && m < rest.value.modes; ++m) {
            layout_append(both, rest.value.shape[m], rest.value.stride[m]);
        }
        bool must = rest.ok && cosize(both) <= size(l) && compose_exists(l, both);
        check(!must, "divide %s by %s was refused", text(l), text(tile));
        return;
    }
    static int found[4096], expected[4096];
    bool good = size(r.value) == size(l) + r.overhang && r.overhang >= 0;
    for (int i = 0; i < size(tile); ++i)
        good = good && (at(tile, i) >= size(l) || at(r.value, i) == at(l, at(tile, i)));
    if (good && r.overhang == 0 && count_offsets(l, cosize(l), expected)) {
        good =
            count_offsets(r.value, cosize(l), found) && memcmp(found, expected, (size_t)cosize(l) * sizeof *found) == 0;
    }
    check(good, "divide %s by %s is %s, overhang %d", text(l), text(tile), text(r.value), r.overhang);
}

static void check_product(const layout &l, const layout &copies) {
    layout_result r = product(l, copies);
    if (!r.ok) {
        check(!complement(l, size(l) * cosize(copies)).ok ||
                  !compose(complement(l, size(l) * cosize(copies)).value, copies).ok,
              "product %s with %s was refused", text(l), text(copies));
        return;
    }
    bool good = size(r.value) == size(l) * size(copies);
    for (int i = 0; i < size(l); ++i) good = good && at(r.value, i) == at(l, i);
    if (!reaches_twice(l) && !reaches_twice(copies)) good = good && !reaches_twice(r.value);
    check(good, "product %s with %s is %s", text(l), text(copies), text(r.value));
}

static void check_layouts() {
    for (int modes = 0; modes <= 3; ++modes) {
        for (int i = 0; i < power(4 * 9, modes); ++i) {
            layout l = small(modes, i, 4, -2, 9);
            check_coalesce(l);
            check_cosize(l);
            check_right_inverse(l);
        }
        for (int i = 0; i < power(4 * 9, modes); ++i) {
            layout l = small(modes, i, 4, 0, 9);
            check_complement(l, 1);
            check_complement(l, 24);
            check_complement(l, 25);
        }
    }
    for (int i = 0; i < power(4 * 7, 2); ++i) {
        layout a = small(2, i, 4, 0, 7);
        for (int k = 0; k < power(4 * 6, 2); ++k) {
            layout b = small(2, k, 4, 0, 6);
            check_compose(a, b);
            if (k % 4 == i % 4) check_divide(a, b);
            if (k % 4 == i % 4) check_product(a, b);
        }
    }
    // three modes against one that walks through them
    for (int i = 0; i < power(3 * 4, 3); ++i) {
        layout a = small(3, i, 3, 1, 4);
        for (int shape = 1; shape <= 12; ++shape) {
            for (int stride = -1; stride <= 9; ++stride) check_compose(a, layout{1, {shape}, {stride}});
        }
    }
    // The cases of the notes: injective is not enough; a step that does not fit; holes; rounding up; zero strides.
    check(compose(layout{3, {2, 8, 4}, {8, 2, 8}}, layout{2, {2, 2}, {12, 6}}).mode == 1 &&
              !compose(layout{3, {2, 8, 4}, {8, 2, 8}}, layout{2, {2, 2}, {12, 6}}).ok,
          "(2,8,4):(8,2,8) with (2,2):(12,6) carries into the second mode");
    check(!compose(layout{2, {4, 4}, {1, 10}}, layout{1, {4}, {3}}).ok, "0, 3, 12, 21 is no layout");
    check(!complement(layout{2, {2, 2}, {1, 3}}, 24).ok, "2 and 5 are holes");
    layout_result tens = divide(layout{1, {10}, {1}}, layout{1, {4}, {1}});
    check(tens.ok && same(tens.value, layout{2, {4, 3}, {1, 4}}) && tens.overhang == 2, "10:1 by 4 is %s",
          text(tens.value));
    check(same(right_inverse(layout{2, {2, 4}, {0, 1}}), layout{1, {4}, {2}}), "right inverse past a stride of 0");
    check(cosize(layout{1, {4}, {-2}}) == 7, "cosize of 4:-2");
    check(same(coalesce(layout{2, {2, 3}, {0, 0}}), layout{1, {6}, {0}}), "coalesce (2,3):(0,0)");
}

// ---- swizzles and banks ---------------------------------------------------------------------------------------------

template <int BITS, int BASE, int SHIFT> static void check_swizzle() {
    typedef swizzle<BITS, BASE, SHIFT> S;
    static bool hit[4096];
    memset(hit, 0, sizeof hit);
    bool good = true;
    for (int i = 0; i < 4096; ++i) {
        int j = S::apply(i);
        good =
            good && j >= 0 && j < 4096 && !hit[j] && S::apply(j) == i && (j >> (BASE + SHIFT)) == (i >> (BASE + SHIFT));
        if (j >= 0 && j < 4096) hit[j] = true;
    }
    check(good, "swizzle<%d, %d, %d> is no bijection", BITS, BASE, SHIFT);
}

// Degree of 32 lanes (8 for 16-byte accesses) that go down `column` of rows of row_bytes; xored says how.
static int ways_of_column(int row_bytes, int access_bytes, int (*xored)(int row, int byte), int column) {
    int bytes[32] = {};
    for (int lane = 0; lane < 32; ++lane) {
        bytes[lane] = lane * row_bytes + (xored ? xored(lane, column * access_bytes) : column * access_bytes);
    }
    return ways(bytes, access_bytes);
}

static int xor_row_by_32(int row, int byte) { return byte ^ ((row >> 5 & 7) * 4); }
static int xor_row(int row, int byte) { return byte ^ (row % 32 * 4); }
static int xor_chunk_row(int row, int byte) { return byte ^ ((row & 7) * 16); }
static int xor_chunk_row_by_8(int row, int byte) { return byte ^ ((row >> 3 & 7) * 16); }
static int swizzle_333_of_128(int row, int byte) {
    return 2 * swizzle<3, 3, 3>::apply(row * 128 + byte / 2) - row * 256;
}
static int swizzle_334_of_128(int row, int byte) {
    return 2 * swizzle<3, 3, 4>::apply(row * 128 + byte / 2) - row * 256;
}
static int swizzle_333_of_64(int row, int byte) { return 2 * swizzle<3, 3, 3>::apply(row * 64 + byte / 2) - row * 128; }

static void check_ways() {
    struct {
        const char *name;
        int expected, got;
    } cases[] = {
        {"float [32][32], a column", 32, ways_of_column(128, 4, NULL, 3)},
        {"float, col ^ (row >> 5 & 7)", 32, ways_of_column(128, 4, xor_row_by_32, 3)},
        {"float [32][33]", 1, ways_of_column(132, 4, NULL, 3)},
        {"float, col ^ row", 1, ways_of_column(128, 4, xor_row, 3)},
        {"float, every second", 2, ways_of_column(8, 4, NULL, 0)},
        {"float, neighbours", 1, ways_of_column(4, 4, NULL, 0)},
        {"float, all the same", 1, ways_of_column(0, 4, NULL, 0)},
        {"16 bits, neighbours", 1, ways_of_column(2, 2, NULL, 0)},
        {"16 bits, [128][129]", 2, ways_of_column(258, 2, NULL, 0)},
        {"16 bits, [128][130]", 1, ways_of_column(260, 2, NULL, 0)},
        {"8 bytes, neighbours", 1, ways_of_column(8, 8, NULL, 0)},
        {"8 bytes, rows of 128", 16, ways_of_column(128, 8, NULL, 0)},
        {"8 bytes, rows of 136", 1, ways_of_column(136, 8, NULL, 0)},
        {"16 bytes, neighbours", 1, ways_of_column(16, 16, NULL, 0)},
        {"16 bytes, every second", 2, ways_of_column(32, 16, NULL, 0)},
        {"ldmatrix, rows of 128 bytes", 8, ways_of_column(128, 16, NULL, 1)},
        {"ldmatrix, chunk ^ (row & 7)", 1, ways_of_column(128, 16, xor_chunk_row, 1)},
        {"ldmatrix, chunk ^ (row >> 3)", 8, ways_of_column(128, 16, xor_chunk_row_by_8, 1)},
        {"ldmatrix, rows of 144 bytes", 1, ways_of_column(144, 16, NULL, 1)},
        {"ldmatrix, swizzle<3,3,3> of 128 columns", 2, ways_of_column(256, 16, swizzle_333_of_128, 5)},
        {"ldmatrix, swizzle<3,3,4> of 128 columns", 1, ways_of_column(256, 16, swizzle_334_of_128, 5)},
        {"ldmatrix, swizzle<3,3,3> of 64 columns", 1, ways_of_column(128, 16, swizzle_333_of_64, 5)},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        check(cases[i].got == cases[i].expected, "%s: %d ways, expected %d", cases[i].name, cases[i].got,
              cases[i].expected);
    }
}

// ---- tiles ----------------------------------------------------------------------------------------------------------

template <int ROW_BYTES> static void check_tile() {
    typedef smem_tile<40, ROW_BYTES> Tile;
    static int hits[40 * 64];
    memset(hits, 0, sizeof hits);
    bool places = Tile::bytes == 40 * ROW_BYTES, steps = true, tma = true;
    for (int row = 0; row < 40; ++row) {
        for (int chunk = 0; chunk < Tile::chunks; ++chunk) {
            int offset = Tile::offset(row, chunk), plain = row * ROW_BYTES + chunk * 16;
            places = places && offset % 16 == 0 && offset >= row * ROW_BYTES && offset < (row + 1) * ROW_BYTES &&
                     ++hits[offset / 16] == 1 && Tile::offset_of(row, chunk * 8 + 3, 2) == offset + 6 &&
                     Tile::offset_of(row, chunk * 4 + 1, 4) == offset + 4;
            if (ROW_BYTES == 32) tma = tma && offset == swizzle<1, 4, 3>::apply(plain);
            if (ROW_BYTES == 64) tma = tma && offset == swizzle<2, 4, 3>::apply(plain);
            if (ROW_BYTES == 128) tma = tma && offset == swizzle<3, 4, 3>::apply(plain);
            for (unsigned base = 0; base < 1024; base += Tile::align_bytes) {
                if (row < 32) steps = steps && Tile::down(base + offset, 8) == base + Tile::offset(row + 8, chunk);
                for (int more = 0; chunk < 2 && chunk + more < Tile::chunks; more += 2) {
                    steps = steps && Tile::along(base + offset, more) == base + Tile::offset(row, chunk + more);
                }
            }
        }
    }
    check(places, "rows of %d bytes: chunks collide or lie outside", ROW_BYTES);
    check(steps, "rows of %d bytes: a step and a new offset differ", ROW_BYTES);
    check(tma, "rows of %d bytes do not lie as TMA lays them", ROW_BYTES);
    check(smem_tile_ways(ROW_BYTES) == 1, "rows of %d bytes have conflicts", ROW_BYTES);
    for (int row = 0; row < 32; row += 8) { // ldmatrix.x4 in both orders, over all blocks, as one access of 32 lanes
        for (int chunk = 0; chunk + 1 < Tile::chunks && row + 16 <= 40; chunk += 2) {
            int down[32] = {}, along[32] = {};
            for (int lane = 0; lane < 32; ++lane) {
                coord d = ldmatrix_down_first(lane), a = ldmatrix_along_first(lane);
                down[lane] = Tile::offset(row + d.row, chunk + d.col);
                along[lane] = Tile::offset(row + a.row, chunk + a.col);
            }
            check(ways(down, 16) == 1 && ways(along, 16) == 1, "ldmatrix in rows of %d bytes at %d, %d: conflicts",
                  ROW_BYTES, row, chunk);
        }
    }
}

// ---- fragments ------------------------------------------------------------------------------------------------------

static bool equal(coord a, coord b) { return a.row == b.row && a.col == b.col; }

// The PTX ISA's own words: groupID and threadID_in_group, with a case for each range of registers.
static void check_fragment_formulas() {
    for (int lane = 0; lane < 32; ++lane) {
        int group = lane / 4, in_group = lane % 4;
        for (int i = 0; i < 8; ++i) {
            coord expected = {i < 2 || (i >= 4 && i < 6) ? group : group + 8,
                              i < 4 ? in_group * 2 + (i & 1) : in_group * 2 + (i & 1) + 8};
            check(equal(frag_a16(lane, i), expected), "m16n8k16 A, lane %d, a%d", lane, i);
        }
        for (int i = 0; i < 4; ++i) {
            coord b = {i < 2 ? in_group * 2 + (i & 1) : in_group * 2 + (i & 1) + 8, group};
            coord c = {i < 2 ? group : group + 8, in_group * 2 + (i & 1)};
            coord a = {i == 0 || i == 2 ? group : group + 8, i < 2 ? in_group : in_group + 4};
            check(equal(frag_b16(lane, i), b), "m16n8k16 B, lane %d, b%d", lane, i);
            check(equal(frag_c(lane, i), c), "m16n8 C, lane %d, c%d", lane, i);
            check(equal(frag_a32(lane, i), a), "m16n8k8 tf32 A, lane %d, a%d", lane, i);
        }
        for (int i = 0; i < 2; ++i) {
            coord b = {i == 0 ? in_group : in_group + 4, group};
            check(equal(frag_b32(lane, i), b), "m16n8k8 tf32 B, lane %d, b%d", lane, i);
            check(equal(ldmatrix_element(lane, i, false), coord{group, in_group * 2 + i}), "ldmatrix, lane %d", lane);
            check(equal(ldmatrix_element(lane, i, true), coord{in_group * 2 + i, group}), "ldmatrix.trans, lane %d",
                  lane);
        }
    }
    // The same maps as layouts of (lane, register) in a column-major matrix, as they are usually written.
    layout c = {4, {4, 8, 2, 2}, {32, 1, 16, 8}}, a = {5, {4, 8, 2, 2, 2}, {32, 1, 16, 8, 128}};
    for (int i = 0; i < 32 * 8; ++i) {
        coord in_c = frag_c(i % 32, i / 32), in_a = frag_a16(i % 32, i / 32);
        if (i < 32 * 4) check(at(c, i) == in_c.row + 16 * in_c.col, "C as a layout, at %d", i);
        check(at(a, i) == in_a.row + 16 * in_a.col, "A as a layout, at %d", i);
    }
}

// What a lane's register `matrix` holds after an ldmatrix.x4 whose lanes point at `order`: (row, column of 16 bits).
static coord loaded(coord (*order)(int), int lane, int matrix, int half, bool trans) {
    coord element = ldmatrix_element(lane, half, trans);
    coord row = order(8 * matrix + element.row);
    return {row.row, row.col * 8 + element.col};
}

static coord flipped(coord c) { return {c.col, c.row}; }

static void check_fragment_loads() {
    coord (*down)(int) = ldmatrix_down_first, (*along)(int) = ldmatrix_along_first;
    for (int lane = 0; lane < 32; ++lane) {
        check(ldmatrix_matrix(lane) == lane / 8 && ldmatrix_row(lane) == lane % 8, "ldmatrix addresses, lane %d", lane);
        for (int e = 0; e < 8; ++e) {
            int n8 = e / 4; // b[0..1] is the B of n 0..7, b[2..3] that of n 8..15
            coord a = frag_a16(lane, e), b = frag_b16(lane, e % 4);
            b.col += 8 * n8;
            check(equal(loaded(down, lane, e / 2, e % 2, false), a), "A from [m][k], lane %d, %d", lane, e);
            check(equal(flipped(loaded(along, lane, e / 2, e % 2, true)), a), "A from [k][m], lane %d, %d", lane, e);
            check(equal(flipped(loaded(along, lane, e / 2, e % 2, false)), b), "B from [n][k], lane %d, %d", lane, e);
            check(equal(loaded(down, lane, e / 2, e % 2, true), b), "B from [k][n], lane %d, %d", lane, e);
        }
        // Two accumulators side by side are an A; one, its halves transposed, is a B.
        for (int e = 0; e < 8; ++e) {
            coord c = frag_c(lane, e % 4);
            c.col += 8 * (e / 4);
            check(equal(c, frag_a16(lane, e)), "accumulators as A, lane %d, %d", lane, e);
        }
        for (int e = 0; e < 4; ++e) {
            coord source = movmatrix_element(lane, e % 2); // in the 8x8 matrix of rows 8 (e / 2) ..
            check(equal(coord{source.row + 8 * (e / 2), source.col}, frag_b16(lane, e)),
                  "accumulator as B, lane %d, %d", lane, e);
        }
        // float32 through the same ldmatrix: a 32-bit element is two columns of 16 bits.
        for (int e = 0; e < 4; ++e) {
            coord a = loaded(down, lane, e, 0, false), b = loaded(along, lane, e, 0, false);
            coord expected_b = frag_b32(lane, e % 2);
            expected_b.col += 8 * (e / 2);
            check(equal(coord{a.row, a.col / 2}, frag_a32(lane, e)), "tf32 A from [m][k], lane %d, %d", lane, e);
            check(equal(coord{b.col / 2, b.row}, expected_b), "tf32 B from [n][k], lane %d, %d", lane, e);
        }
    }
}

// ---- tma and wgmma --------------------------------------------------------------------------------------------------

// The byte at which tma's 128-byte mode puts byte `linear` of a box and at which wgmma looks for it: bits 4 .. 6 of the
// address xored with bits 7 .. 9.
static uint32_t swizzled_128(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

// All parts of a tile as boxes of EACH elements x rows, one row of 128 bytes behind the other.
template <int BX, bool ALONG_X, int PARTS, int EACH> static void check_part() {
    typedef wgmma_part<BX, ALONG_X, PARTS, EACH> Part;
    typedef wgmma_tile<BX, ALONG_X, EACH> Tile;
    constexpr int BYTES = 128 / EACH;
    static int hits[256 * 64];
    memset(hits, 0, sizeof hits);
    bool blocks = true, places = true, inside = true, once = true;
    int x_hits = 0;
    for (int part = 0; part < PARTS; ++part) {
        for (int i = 0; i < Part::boxes; ++i) {
            const int start = Part::offset(part, i);
            blocks = blocks && start % 1024 == 0 && Part::box_rows <= 256;
            for (int row = 0; row < Part::box_rows; ++row) {
                for (int col = 0; col < EACH; ++col) {
                    const int at = (int)swizzled_128(start + row * 128 + col * BYTES);
                    const int x = Part::x(part, i) + (ALONG_X ? col : row), k = Part::k(part) + (ALONG_X ? row : col);
                    inside = inside && at >= 0 && at < Tile::bytes && k < EACH;
                    if (at < Tile::bytes) ++hits[at / BYTES];
                    if (x >= BX) continue; // of the last panel, where BX is no multiple of EACH
                    ++x_hits;
                    places = places && at == Tile::offset_of(x, k);
                }
            }
        }
    }
    for (int i = 0; i < Tile::bytes / BYTES; ++i) once = once && hits[i] == 1;
    check(blocks && inside, "%d parts of %d x %d, %d: a box lies outside or on no block", PARTS, BX, EACH, ALONG_X);
    check(places, "%d parts of %d x %d, %d: tma puts an element elsewhere", PARTS, BX, EACH, ALONG_X);
    check(once && x_hits == BX * EACH, "%d parts of %d x %d, %d: not every byte once", PARTS, BX, EACH, ALONG_X);
}

// Tiles that end outside the matrix: the boxes that are copied have all that lies inside, lower ones nothing else, and bring
// as many bytes as their consumers wait for.
template <int BX, bool ALONG_X, int PARTS, int EACH> static void check_part_ends() {
    typedef wgmma_part<BX, ALONG_X, PARTS, EACH> Part;
    bool bytes = true, all = true, lower = true;
    for (int left = -BX; left <= 2 * BX; ++left) {
        int brought = 0, x_hits = 0;
        for (int part = 0; part < PARTS; ++part) {
            for (int i = 0; i < Part::boxes_of(part, left); ++i) {
                /* as the host makes the map of ends: the rest of the matrix' rows over whole boxes, which `left` shares */
                const int rows = Part::ends(part, left) ? left % Part::box_rows : Part::box_rows;
                const int first = Part::x(part, i), count = ALONG_X ? EACH : rows;
                brought += rows * WGMMA_ROW_BYTES;
                lower = lower && rows > 0 && (ALONG_X ? first < left : first + count <= (left < BX ? left : BX));
                if (Part::k(part) > 0) continue; /* the same x as a part before */
                for (int x = first; x < first + count && x < BX; ++x) x_hits += x < left;
            }
        }
        bytes = bytes && brought == Part::bytes_of(left);
        all = all && x_hits == (left < 0 ? 0 : left < BX ? left : BX);
    }
    check(bytes, "%d parts of %d x %d, %d: consumers of an ending tile wait for other bytes", PARTS, BX, EACH, ALONG_X);
    check(all && lower, "%d parts of %d x %d, %d: an ending tile is copied wrongly", PARTS, BX, EACH, ALONG_X);
}

// Which byte wgmma reads for element (x, k16) of the operand that a descriptor describes, elements of `bytes`; x from the
// descriptor's start.
static uint32_t wgmma_reads(uint64_t descriptor, bool along_x, int x, int k, int bytes) {
    const uint32_t start = (uint32_t)(descriptor & 0x3fff) << 4, leading = (uint32_t)(descriptor >> 16 & 0x3fff) << 4,
                   stride = (uint32_t)(descriptor >> 32 & 0x3fff) << 4;
    if (along_x) return swizzled_128(start + x / 64 * leading + k / 8 * stride + k % 8 * 128 + x % 64 * 2);
    return swizzled_128(start + x / 8 * stride + x % 8 * 128 + k * bytes);
}

// Every place that a product can start at: 64 rows of a, or all of b.
template <int BX, bool ALONG_X, int EACH> static void check_descriptor() {
    typedef wgmma_tile<BX, ALONG_X, EACH> Tile;
    bool fields = true, reads = true;
    for (uint32_t base = 0; base < 3 * 65536; base += 13 * 1024) {
        for (int first = 0; first < BX; first += 64) {
            for (int k = 0; k < EACH; k += EACH / 4) {
                const uint64_t d = Tile::descriptor(base + Tile::offset(first) + k / (EACH / 4) * Tile::step_bytes);
                fields = fields && d >> 62 == 1 && (d >> 46 & 0xffff) == 0 && (d & 0xc000c000c000) == 0;
                for (int x = 0; first + x < BX; ++x)
                    for (int e = 0; e < EACH / 4; ++e)
                        reads = reads &&
                                wgmma_reads(d, ALONG_X, x, e, 128 / EACH) == base + Tile::offset_of(first + x, k + e);
            }
        }
    }
    check(fields, "descriptor of %d x %d, %d: wrong mode, or bits where none belong", BX, EACH, ALONG_X);
    check(reads, "descriptor of %d x %d, %d: wgmma reads another byte", BX, EACH, ALONG_X);
}

template <int BX, bool ALONG_X, int EACH> static void check_parts() {
    check_part<BX, ALONG_X, 1, EACH>(), check_part_ends<BX, ALONG_X, 1, EACH>();
    if constexpr (BX % 64 == 0 || BX == 224)
        check_part<BX, ALONG_X, 2, EACH>(), check_part_ends<BX, ALONG_X, 2, EACH>();
    if constexpr (BX % 64 == 0) check_part<BX, ALONG_X, 4, EACH>(), check_part_ends<BX, ALONG_X, 4, EACH>();
}

template <int BX> static void check_operand() {
    check_descriptor<BX, false, 64>(), check_descriptor<BX, true, 64>();
    check_parts<BX, false, 64>(), check_parts<BX, true, 64>();
}

// tf32: wgmma reads it along k alone; along x the lanes' loads must meet every element of a warpgroup's 128 x 8 once, where
// the ISA wants A's, and take a row's four from 16 bytes in a row.
template <int BX> static void check_operand_tf32() {
    typedef wgmma_tile<BX, true, 32> Tile;
    check_descriptor<BX, false, 32>(), check_parts<BX, false, 32>();
    if constexpr (BX % 128 == 0) {
        static int hits[BX * 32];
        memset(hits, 0, sizeof hits);
        bool good = true;
        for (int thread = 0; thread < BX; ++thread) { // of BX / 128 warpgroups
            const int warp = thread / 32, lane = thread % 32, first = warp * 32 + 4 * tf32_chunk(lane);
            for (int k8 = 0; k8 < 32; k8 += 8) {
                for (int e = 0; e < 2; ++e) { // frag_a32: the lane's k of a row
                    const int k = k8 + frag_a32(lane, 2 * e).col;
                    const int at = Tile::offset(warp * 32) + tf32_offset(lane, k);
                    for (int i = 0; i < 4; ++i)
                        good = good && at + 4 * i == Tile::offset_of(first + i, k) && ++hits[(first + i) * 32 + k] == 1;
                }
            }
        }
        for (int i = 0; i < BX * 32; ++i) good = good && hits[i] == 1;
        check(good, "tf32 from registers, %d rows: not every element once", BX);
        check_parts<BX, true, 32>();
    }
}

// 64 x N once, in the ISA's words: D0 .. D(N / 2 - 1) of warp, groupID and threadID_in_group.
static void check_wgmma_d(int n) {
    static int hits[64 * 256];
    memset(hits, 0, sizeof hits);
    bool good = true;
    for (int thread = 0; thread < 128; ++thread) {
        for (int e = 0; e < n / 2; ++e) {
            const coord d = wgmma_d(thread / 32, thread % 32, e);
            const int row = thread / 32 * 16 + thread % 32 / 4 + (e % 4 >= 2 ? 8 : 0);
            good = good && equal(d, coord{row, e / 4 * 8 + thread % 4 * 2 + e % 2}) && ++hits[d.row * n + d.col] == 1;
        }
    }
    for (int i = 0; i < 64 * n; ++i) good = good && hits[i] == 1;
    check(good, "wgmma_d of %d columns", n);
}

// ---- which cluster takes which tile ---------------------------------------------------------------------------------

// The persistent loop of gemm_sm90a: cluster c of `clusters` takes c, c + clusters, ..; each tile of each batch entry once.
static void check_schedule(int tiles_m, int tiles_n, int group, int batch, int clusters) {
    static int hits[4096];
    memset(hits, 0, sizeof hits);
    const unsigned tiles = (unsigned)tiles_m * tiles_n, all = tiles * batch;
    bool good = all <= 4096;
    const TileOrder order = tile_order(tiles_m, tiles_n, group);
    int most = 0;
    for (int c = 0; c < clusters; ++c) {
        int load = 0;
        for (unsigned t = c; t < all; t += clusters, ++load) {
            const TilePlace at = tile_place(t % tiles, tiles_m, tiles_n, group);
            const unsigned entry = order.tiles.into(t);
            const TilePlace same = tile_place(t - entry * tiles, order);
            good = good && entry == t / tiles && same.row == at.row && same.col == at.col;
            const bool inside = at.row >= 0 && at.row < tiles_m && at.col >= 0 && at.col < tiles_n;
            good = good && inside;
            if (inside) ++hits[(t / tiles * tiles_m + at.row) * tiles_n + at.col];
        }
        most = load > most ? load : most;
    }
    for (unsigned i = 0; i < all; ++i) good = good && hits[i] == 1;
    good = good && most == (int)((all + clusters - 1) / clusters);
    check(good, "%d x %d tiles in groups of %d, %d times, on %d clusters", tiles_m, tiles_n, group, batch, clusters);
}

static void check_schedules() {
    const int clusters[5] = {1, 2, 7, 66, 132};
    for (int m = 1; m <= 19; ++m)
        for (int n = 1; n <= 13; ++n)
            for (int group = 1; group <= 9; ++group)
                for (int c = 0; c < 5; ++c) check_schedule(m, n, group, 1 + m % 3, clusters[c]);
    for (int batch = 1; batch <= 5; ++batch) check_schedule(33, 17, 8, batch, 66);
    // the picture in order.cuh
    const int rows[12] = {0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3}, cols[12] = {0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2};
    for (int t = 0; t < 12; ++t) {
        const TilePlace at = tile_place(t, 4, 3, 2);
        check(at.row == rows[t] && at.col == cols[t], "tile %d of 4 x 3 in groups of 2: %d, %d", t, at.row, at.col);
    }
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "dump") == 0) return dump();
    check_layouts();
    check_swizzle<1, 4, 3>(), check_swizzle<2, 4, 3>(), check_swizzle<3, 4, 3>(), check_swizzle<3, 3, 3>();
    check_swizzle<3, 3, 4>(), check_swizzle<2, 0, 5>(), check_swizzle<0, 4, 0>();
    check_ways();
    check_tile<16>(), check_tile<32>(), check_tile<48>(), check_tile<64>(), check_tile<80>(), check_tile<96>();
    check_tile<128>(), check_tile<160>(), check_tile<192>(), check_tile<224>(), check_tile<256>(), check_tile<320>();
    check_tile<384>(), check_tile<512>(), check_tile<640>(), check_tile<768>(), check_tile<1024>();
    check_fragment_formulas();
    check_fragment_loads();
    check_operand<64>(), check_operand<128>(), check_operand<192>(), check_operand<256>();
    check_operand<8>(), check_operand<16>(), check_operand<32>(), check_operand<96>(), check_operand<224>();
    check_operand_tf32<64>(), check_operand_tf32<128>(), check_operand_tf32<192>(), check_operand_tf32<256>();
    for (int n = 8; n <= 256; n += 8) check_wgmma_d(n);
    check_schedules();
    printf("%ld passed, %ld failed\n", num_passed, num_failed);
    return num_failed != 0 || num_passed == 0;
}
