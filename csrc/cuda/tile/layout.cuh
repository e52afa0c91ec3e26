// layout: where elements lie, as values that the compiler computes: offsets, swizzles, bank conflicts, fragments.
//
// Plain C++17 for the host compiler and nvcc alike; a kernel proves with static_assert on ways() that its accesses to
// shared memory are free of conflicts, for their own width.
//
//   layout       shape:stride per mode; the first mode runs fastest (colexicographic order). (4,8):(8,1) sends index i
//                to 8 (i % 4) + i / 4. At most LAYOUT_MAX_MODES modes, no nesting.
//   swizzle      the xor that spreads rows over banks
//   ways         how many passes one access of a warp needs, 1 being best
//   smem_tile    rows of 16-byte chunks in shared memory, swizzled
//   frag_*       which element each register of an mma, ldmatrix or movmatrix holds
#ifndef GPUKERN_TILE_LAYOUT_CUH
#define GPUKERN_TILE_LAYOUT_CUH

#ifdef __CUDACC__
#define GK_HD __host__ __device__
#else
#define GK_HD
#endif

// ---- layouts --------------------------------------------------------------------------------------------------------

enum {
    LAYOUT_MAX_MODES = 8
};

struct layout {
    int modes;
    int shape[LAYOUT_MAX_MODES], stride[LAYOUT_MAX_MODES]; // shapes >= 1; strides of any sign
};

// ok false: there is no such layout; mode names the mode of the last argument that is to blame (of the first, for
// functions of one layout), and value is empty.
struct layout_result {
    bool ok;
    layout value;
    int mode;
    int overhang; // divide: how many elements of the result lie past the end of the divided layout
};

constexpr GK_HD layout_result layout_refuse(int mode) { return {false, {}, mode, 0}; }

// Adds a mode at the end; false when there is no room.
constexpr GK_HD bool layout_append(layout &l, int shape, int stride) {
    if (l.modes == LAYOUT_MAX_MODES) return false;
    l.shape[l.modes] = shape;
    l.stride[l.modes++] = stride;
    return true;
}

constexpr GK_HD int size(const layout &l) {
    int n = 1;
    for (int m = 0; m < l.modes; ++m) n *= l.shape[m];
    return n;
}

// Offsets from the lowest to the highest, both included: also right for strides of 0 and below.
constexpr GK_HD int cosize(const layout &l) {
    int n = 1;
    for (int m = 0; m < l.modes; ++m) n += (l.shape[m] - 1) * (l.stride[m] < 0 ? -l.stride[m] : l.stride[m]);
    return n;
}

// The offset of an index. Past size(l) the last mode goes on.
constexpr GK_HD int at(const layout &l, int index) {
    int offset = 0;
    for (int m = 0; m < l.modes; ++m) {
        offset += (m + 1 < l.modes ? index % l.shape[m] : index) * l.stride[m];
        index /= l.shape[m];
    }
    return offset;
}

// The offset of a coordinate: one number per mode.
constexpr GK_HD int at(const layout &l, const int *coordinate) {
    int offset = 0;
    for (int m = 0; m < l.modes; ++m) offset += coordinate[m] * l.stride[m];
    return offset;
}

constexpr GK_HD bool same(const layout &a, const layout &b) {
    bool equal = a.modes == b.modes;
    for (int m = 0; equal && m < a.modes; ++m) equal = a.shape[m] == b.shape[m] && a.stride[m] == b.stride[m];
    return equal;
}

// The same function of the index with the fewest modes; the one such layout. A layout of one element is 1:0.
constexpr GK_HD layout coalesce(const layout &l) {
    layout r = {};
    for (int m = 0; m < l.modes; ++m) {
        int last = r.modes - 1;
        if (l.shape[m] == 1) continue;
        if (r.modes && l.stride[m] == r.shape[last] * r.stride[last])
            r.shape[last] *= l.shape[m];
        else
            layout_append(r, l.shape[m], l.stride[m]);
    }
    if (r.modes == 0) layout_append(r, 1, 0);
    return r;
}

// a after the mode shape:stride, by division: the mode must start on a boundary of a mode of a and end on one, or stay
// inside one. reach[i] grows by the largest coordinate it asks of mode i. False: not shown this way.
constexpr GK_HD bool compose_by_division(layout &r, const layout &a, int shape, int stride, int *reach) {
    if (stride < 0) return false;
    for (int m = 0; m < a.modes; ++m) {
        int room = a.shape[m];
        if ((shape - 1) * stride < room) {
            reach[m] += (shape - 1) * stride;
            return layout_append(r, shape, shape == 1 ? 0 : stride * a.stride[m]);
        }
        if (stride % room == 0) {
            stride /= room;
            continue;
        }
        if (room % stride != 0 || shape % (room / stride) != 0) return false;
        reach[m] += room - stride;
        if (!layout_append(r, room / stride, stride * a.stride[m])) return false;
        shape /= room / stride;
        stride = 1;
    }
    return false;
}

// The same by value: finds the layout that has these values, if there is one. A run of equal steps is a mode, since
// neighbouring modes that continue each other are one; so what it finds is the only candidate; the caller verifies.
constexpr GK_HD bool compose_by_value(layout &r, const layout &a, int shape, int stride) {
    int n = size(a);
    for (int i = 0; i < shape; ++i) {
        if (i * stride < 0 || i * stride >= n) return false;
    }
    for (int unit = 1; unit < shape;) {
        int step = at(a, unit * stride), run = 2;
        while (unit * run < shape && at(a, unit * run * stride) == run * step) ++run;
        if (shape / unit % run != 0 || !layout_append(r, run, step)) return false;
        unit *= run;
    }
    if (r.modes == 0) layout_append(r, 1, 0);
    return true;
}

// r(i) = a(b(i)) with b's modes kept, each as one or more modes. ok exactly when a layout does that, b stays inside a
// and there is room for the modes; else mode names the mode of b that breaks or that carries into another.
constexpr GK_HD layout_result compose(const layout &a, const layout &b) {
    layout outer = coalesce(a), r = {};
    int reach[LAYOUT_MAX_MODES] = {};
    bool proven = true;
    for (int m = 0; m < b.modes; ++m) {
        layout leaf = {};
        if (!compose_by_division(leaf, outer, b.shape[m], b.stride[m], reach)) {
            proven = false;
            leaf = {};
            if (!compose_by_value(leaf, outer, b.shape[m], b.stride[m])) return layout_refuse(m);
        }
        leaf = coalesce(leaf);
        for (int i = 0; i < leaf.modes; ++i) {
            if (!layout_append(r, leaf.shape[i], leaf.stride[i])) return layout_refuse(m);
        }
    }
    // No mode of a is asked for more than it has: nothing carries, and the parts add up. Else look at every value.
    for (int i = 0; i < outer.modes; ++i) proven = proven && reach[i] < outer.shape[i];
    for (int i = 0, n = size(b); !proven && i < n; ++i) {
        int inner = at(b, i);
        if (inner >= 0 && inner < size(outer) && at(r, i) == at(outer, inner)) continue;
        int mode = 0; // the highest mode that has moved: all below it went through without this one
        for (int m = 0, rest = i; m < b.modes; rest /= b.shape[m++]) {
            if (rest % b.shape[m] != 0) mode = m;
        }
        return layout_refuse(mode);
    }
    return {true, r, 0, 0};
}

// The modes of l by stride, smallest first; modes of equal stride keep their order.
constexpr GK_HD layout layout_sorted(const layout &l) {
    layout r = l;
    for (int i = 1; i < r.modes; ++i) {
        for (int k = i; k > 0 && r.stride[k] < r.stride[k - 1]; --k) {
            int shape = r.shape[k], stride = r.stride[k];
            r.shape[k] = r.shape[k - 1], r.stride[k] = r.stride[k - 1];
            r.shape[k - 1] = shape, r.stride[k - 1] = stride;
        }
    }
    return r;
}

// The offsets below n that l does not reach, as a layout in ascending order: (l, complement) reaches every offset below
// n once (n rounded up to whole repeats of l). Refused where that cannot be: overlaps, holes, negative strides. Modes
// of stride 0 add no offsets and are passed over.
constexpr GK_HD layout_result complement(const layout &l, int n) {
    layout sorted = layout_sorted(l), r = {};
    int filled = 1;
    for (int m = 0; m < sorted.modes; ++m) {
        int shape = sorted.shape[m], stride = sorted.stride[m];
        if (shape == 1 || stride == 0) continue;
        if (stride < 0 || stride % filled != 0) {
            int mode = 0;
            while (l.shape[mode] != shape || l.stride[mode] != stride) ++mode;
            return layout_refuse(mode);
        }
        layout_append(r, stride / filled, filled); // at most one mode a mode of l, and shape 1 goes below
        filled = stride * shape;
        r = coalesce(r);
        if (r.shape[0] == 1) r.modes = 0;
    }
    int repeats = (n + filled - 1) / filled;
    if (repeats > 1 && !layout_append(r, repeats, filled)) return layout_refuse(l.modes - 1);
    return {true, coalesce(r), 0, 0};
}

// l(r(i)) = i for every i below size(r): the offsets 0, 1, 2 ... as far as modes of l continue each other.
constexpr GK_HD layout right_inverse(const layout &l) {
    layout flat = coalesce(l), r = {};
    int next = 1;
    for (int found = 1; found;) {
        found = 0;
        for (int m = 0, before = 1; !found && m < flat.modes; before *= flat.shape[m++]) {
            if (flat.stride[m] != next || flat.shape[m] == 1) continue;
            layout_append(r, flat.shape[m], before); // each mode once: next grows past its stride
            next *= flat.shape[m];
            found = 1;
        }
    }
    return coalesce(r);
}

// (inside a tile, tile): l after (tile, complement of tile in l). Tiles that do not divide l round up: overhang counts
// the elements of the last tiles that lie past l, and where it is not 0 the kernel needs a predicate. Past its end the
// last mode of coalesce(l) goes on.
constexpr GK_HD layout_result divide(const layout &l, const layout &tile) {
    layout_result rest = complement(tile, size(l));
    if (!rest.ok) return rest;
    layout both = tile, longer = coalesce(l);
    for (int m = 0; m < rest.value.modes; ++m) {
        if (!layout_append(both, rest.value.shape[m], rest.value.stride[m])) return layout_refuse(tile.modes - 1);
    }
    int last = longer.modes - 1, before = size(longer) / longer.shape[last];
    int needed = (cosize(both) + before - 1) / before;
    if (needed > longer.shape[last]) longer.shape[last] = needed;
    layout_result r = compose(longer, both);
    if (!r.ok && r.mode >= tile.modes) r.mode = tile.modes - 1;
    r.overhang = r.ok ? size(both) - size(l) : 0;
    return r;
}

// (l, copies of l as `copies` orders them): l repeated in the offsets it leaves free.
constexpr GK_HD layout_result product(const layout &l, const layout &copies) {
    layout_result free_ = complement(l, size(l) * cosize(copies));
    if (!free_.ok) return layout_refuse(0);
    layout_result repeats = compose(free_.value, copies);
    if (!repeats.ok) return repeats;
    layout r = l;
    for (int m = 0; m < repeats.value.modes; ++m) {
        if (!layout_append(r, repeats.value.shape[m], repeats.value.stride[m])) return layout_refuse(copies.modes - 1);
    }
    return {true, r, 0, 0};
}

// ---- swizzle --------------------------------------------------------------------------------------------------------

// Bits BASE + SHIFT .. of an offset, BITS of them, xored into bits BASE ..; its own inverse. TMA's 32, 64 and 128-byte
// modes are swizzle<1, 4, 3>, <2, 4, 3> and <3, 4, 3> of byte addresses.
template <int BITS, int BASE, int SHIFT> struct swizzle {
    static_assert(BITS >= 0 && BASE >= 0 && SHIFT >= BITS, "source and target bits must not overlap");
    static constexpr GK_HD int apply(int offset) {
        return offset ^ (((offset >> (BASE + SHIFT)) & ((1 << BITS) - 1)) << BASE);
    }
};

// ---- bank conflicts -------------------------------------------------------------------------------------------------

// Passes that shared memory needs for the lanes first .. first + count - 1: the most different 4-byte words that one of
// the 32 banks must give. Lanes that want the same word share it.
constexpr GK_HD int ways_of_phase(const int *bytes, int first, int count, int access_bytes) {
    int words[32] = {}, num_words = 0, words_of_bank[32] = {}, most = 0;
    for (int lane = first; lane < first + count; ++lane) {
        for (int b = 0; b < access_bytes; b += 4) {
            int word = (bytes[lane] + b) / 4, seen = 0;
            for (int i = 0; i < num_words; ++i) seen |= words[i] == word;
            if (seen) continue;
            words[num_words++] = word;
            if (++words_of_bank[word % 32] > most) most = words_of_bank[word % 32];
        }
    }
    return most;
}

// The bank-conflict degree of one access: the worst of its phases; 1 is free of conflicts. bytes: the byte address of
// each lane, a multiple of access_bytes (1 to 16). A phase serves 128 bytes: 8 lanes of 16 bytes, 16 of 8, 32 of fewer.
// An ldmatrix is an access of 16 bytes by as many lanes as give it addresses: 8, 16 or 32.
template <int LANES> constexpr GK_HD int ways(const int (&bytes)[LANES], int access_bytes) {
    int lanes = access_bytes > 8 ? 8 : access_bytes > 4 ? 16 : 32, most = 0;
    for (int first = 0; first < LANES; first += lanes) {
        int degree = ways_of_phase(bytes, first, first + lanes < LANES ? lanes : LANES - first, access_bytes);
        if (degree > most) most = degree;
    }
    return most;
}

// ---- a tile in shared memory ----------------------------------------------------------------------------------------

struct coord {
    int row, col;
};

// How many bits of the chunk's number a tile xors: its rows start on so many different multiples of 16 bytes less.
constexpr GK_HD int smem_xor_bits(int row_bytes) {
    return row_bytes % 128 == 0 ? 3 : row_bytes % 64 == 0 ? 2 : row_bytes % 32 == 0 ? 1 : 0;
}

constexpr GK_HD int smem_offset(int row_bytes, int row, int chunk) {
    int bits = smem_xor_bits(row_bytes);
    return row * row_bytes + (chunk ^ ((row >> (3 - bits)) & ((1 << bits) - 1))) * 16;
}

// The worst conflict degree of: ldmatrix, trans or not (8 rows, one chunk); 16-byte accesses that run along the rows
// (cp.async, ld, st). Rows repeat after 8.
constexpr GK_HD int smem_tile_ways(int row_bytes) {
    int chunks = row_bytes / 16, most = 0;
    for (int c = 0; c < chunks; ++c) {
        int down[8] = {}, along[8] = {};
        for (int i = 0; i < 8; ++i) {
            int linear = 8 * c + i;
            down[i] = smem_offset(row_bytes, i, c);
            along[i] = smem_offset(row_bytes, linear / chunks, linear % chunks);
        }
        int degree = ways(down, 16) > ways(along, 16) ? ways(down, 16) : ways(along, 16);
        if (degree > most) most = degree;
    }
    return most;
}

// ROWS rows of ROW_BYTES (a multiple of 16, rows one behind the other), 16-byte chunks swizzled inside their row so
// that ldmatrix and 16-byte accesses along rows meet no bank conflict. Rows of 32, 64 and 128 bytes lie as TMA lays
// them.
//
// The swizzle depends on row % 8 alone. So a lane computes one address and steps from it:
//   down(at, rows)     rows a multiple of 8: one addition, an immediate of the load when rows is constant
//   along(at, chunks)  one xor of a constant and an immediate; the low 3 bits of chunks and those of the chunk that
//                      `at` was made for must have no bit in common (even steps from chunk 0 or 1 do not)
template <int ROWS, int ROW_BYTES> struct smem_tile {
    static_assert(ROWS > 0 && ROW_BYTES > 0 && ROW_BYTES % 16 == 0, "rows are whole chunks of 16 bytes");
    static_assert(smem_tile_ways(ROW_BYTES) == 1, "ldmatrix, cp.async and row accesses must be free of conflicts");
    static constexpr int rows = ROWS, row_bytes = ROW_BYTES, chunks = ROW_BYTES / 16, bytes = ROWS * ROW_BYTES;
    static constexpr int align_bytes = 128; // of the tile's first byte: every xor stays below it
    static constexpr int xor_mask = (1 << smem_xor_bits(ROW_BYTES)) - 1;

    static constexpr GK_HD int offset(int row, int chunk) { return smem_offset(ROW_BYTES, row, chunk); }
    // The byte offset of an element of elem_bytes (at most 16).
    static constexpr GK_HD int offset_of(int row, int col, int elem_bytes) {
        return offset(row, col * elem_bytes / 16) + col * elem_bytes % 16;
    }
    static constexpr GK_HD unsigned down(unsigned at, int rows_down) { return at + rows_down * ROW_BYTES; }
    static constexpr GK_HD unsigned along(unsigned at, int chunks_along) {
        return (at ^ ((chunks_along & xor_mask) * 16)) + (chunks_along & ~xor_mask) * 16;
    }
};

// ---- fragments ------------------------------------------------------------------------------------------------------
// e counts a lane's elements: of 16 bits, two to a register (register e / 2, low half first); of 32 bits, one. Written
// in shifts, since a kernel's lane is a signed number that the compiler does not know to be positive.

// Accumulator of m16n8, any k: (m, n) of c[e], e < 4.
constexpr GK_HD coord frag_c(int lane, int e) { return {(lane >> 2) + (e >> 1) * 8, (lane & 3) * 2 + (e & 1)}; }

// m16n8k16, 16-bit operands: (m, k) of element e < 8 of A; (k, n) of element e < 4 of B.
constexpr GK_HD coord frag_a16(int lane, int e) {
    return {(lane >> 2) + (e >> 1 & 1) * 8, (lane & 3) * 2 + (e & 1) + (e >> 2) * 8};
}
constexpr GK_HD coord frag_b16(int lane, int e) { return {(lane & 3) * 2 + (e & 1) + (e >> 1) * 8, lane >> 2}; }

// m16n8k8, tf32: (m, k) of a[e], e < 4; (k, n) of b[e], e < 2.
constexpr GK_HD coord frag_a32(int lane, int e) { return {(lane >> 2) + (e & 1) * 8, (lane & 3) + (e >> 1) * 4}; }
constexpr GK_HD coord frag_b32(int lane, int e) { return {(lane & 3) + e * 4, lane >> 2}; }

// ldmatrix: lane l gives the address of row ldmatrix_row(l) of matrix ldmatrix_matrix(l); then register i of a lane
// holds elements (row, col) of matrix i, half 0 and 1.
constexpr GK_HD int ldmatrix_matrix(int lane) { return lane >> 3; }
constexpr GK_HD int ldmatrix_row(int lane) { return lane & 7; }
constexpr GK_HD coord ldmatrix_element(int lane, int half, bool trans) {
    return trans ? coord{(lane & 3) * 2 + half, lane >> 2} : coord{lane >> 2, (lane & 3) * 2 + half};
}

// movmatrix.trans: the element (row, col) of its source that a lane receives; the source lies as a matrix of ldmatrix.
constexpr GK_HD coord movmatrix_element(int lane, int half) { return ldmatrix_element(lane, half, true); }

// Where the lanes of an ldmatrix.x4 point in a tile for a block of 16 rows and 2 chunks, as (row, chunk). The four
// matrices come down the rows first (for A from [m][k] and, transposed, B from [k][n]) or along them first (B from
// [n][k] and, transposed, A from [k][m]).
constexpr GK_HD coord ldmatrix_down_first(int lane) { return {lane & 15, lane >> 4}; }
constexpr GK_HD coord ldmatrix_along_first(int lane) { return {(lane & 7) + (lane >> 4) * 8, lane >> 3 & 1}; }

#endif
