// algebra: where elements lie, as values that the compiler computes: shapes, strides and what is done with them.
//
// Plain C++17 for the host compiler and nvcc alike, as all of this room; torch_gpukern.layout has the same operations under the
// same names, and tests/data/layout.golden holds both to one set of answers.
//
//   layout       shape:stride per mode; the first mode runs fastest (colexicographic order). (4,8):(8,1) sends index i
//                to 8 (i % 4) + i / 4. At most LAYOUT_MAX_MODES modes, no nesting.
#ifndef GPUKERN_LAYOUT_ALGEBRA_CUH
#define GPUKERN_LAYOUT_ALGEBRA_CUH

#ifdef __CUDACC__
#define GK_HD __host__ __device__
#else
#define GK_HD
#endif

// A place in a matrix.
struct coord {
    int row, col;
};

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
// last mode of coalesce(l) goes on; an l of one element with the stride of its last mode.
constexpr GK_HD layout_result divide(const layout &l, const layout &tile) {
    layout_result rest = complement(tile, size(l));
    if (!rest.ok) return rest;
    layout both = tile, longer = coalesce(l);
    if (size(l) == 1 && l.modes > 0) longer.stride[0] = l.stride[l.modes - 1];
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

#endif
