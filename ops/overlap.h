// overlap.h: whether two tensors share memory, and the tensor of the caller's that an .out overload writes.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "checks.h"

namespace gk {

// Do elements of x and y share a byte? Both lie on lattices of byte offsets; the question is
// whether
//   sum_i step_i * d_i = y - x   has a solution with low_i <= d_i <= high_i.
// One term per distinct stride (of one tensor's two views all are shared), largest first: what is
// left after a term must be within reach of the rest, which leaves two or three candidates per
// term.
struct Lattice {
    struct Term {
        int64_t step, low, high;
    };
    Term term[2 * GK_MAX_DIMS + 1];
    int64_t least[2 * GK_MAX_DIMS + 2], most[2 * GK_MAX_DIMS + 2]; // reach of the terms from i on
    int terms = 0;
    int64_t budget = 1 << 20; // candidates; strides that need more are taken for an overlap

    void add(int64_t step, int64_t low, int64_t high) {
        if (step < 0) {
            step = -step;
            std::swap(low, high);
            low = -low;
            high = -high;
        }
        if (step == 0 || low == high) return; // all low == high terms are 0 .. 0
        for (int i = 0; i < terms; ++i) {
            if (term[i].step != step) continue;
            term[i].low += low;
            term[i].high += high;
            return;
        }
        term[terms++] = {step, low, high};
    }

    bool hits(int i, int64_t rest) {
        if (rest < least[i] || rest > most[i]) return false;
        if (i == terms || --budget < 0) return true;
        const Term &t = term[i];
        auto floor_div = [](int64_t a, int64_t b) { return a / b - (a % b < 0); };
        int64_t first = std::max(t.low, -floor_div(most[i + 1] - rest, t.step));
        int64_t last = std::min(t.high, floor_div(rest - least[i + 1], t.step));
        for (int64_t d = first; d <= last; ++d) {
            if (hits(i + 1, rest - d * t.step)) return true;
        }
        return false;
    }

    bool reaches(int64_t distance) {
        std::sort(term, term + terms, [](const Term &a, const Term &b) { return a.step > b.step; });
        least[terms] = most[terms] = 0;
        for (int i = terms - 1; i >= 0; --i) {
            least[i] = least[i + 1] + term[i].step * term[i].low;
            most[i] = most[i + 1] + term[i].step * term[i].high;
        }
        return hits(0, distance);
    }
};

inline bool overlap(const gk_tensor &x, const gk_tensor &y) {
    int64_t bytes_x = static_cast<int64_t>(gk_dtype_bytes(x.dtype));
    int64_t bytes_y = static_cast<int64_t>(gk_dtype_bytes(y.dtype));
    Lattice lattice;
    for (int d = 0; d < x.ndim; ++d) lattice.add(x.stride[d] * bytes_x, 0, x.shape[d] - 1);
    for (int d = 0; d < y.ndim; ++d) lattice.add(y.stride[d] * bytes_y, 1 - y.shape[d], 0);
    lattice.add(1, 1 - bytes_y, bytes_x - 1);
    return lattice.reaches(static_cast<char *>(y.data) - static_cast<char *>(x.data));
}

// The bytes from the first element to behind the last.
struct Range {
    const char *begin, *end;
};

inline Range range_of(const gk_tensor &t) {
    int64_t below = 0, above = 1;
    for (int d = 0; d < t.ndim; ++d) (t.stride[d] < 0 ? below : above) += t.stride[d] * (t.shape[d] - 1);
    int64_t bytes = static_cast<int64_t>(gk_dtype_bytes(t.dtype));
    const char *data = static_cast<const char *>(t.data);
    return {data + below * bytes, data + above * bytes};
}

inline bool is_empty(const gk_tensor &t) {
    for (int d = 0; d < t.ndim; ++d) {
        if (t.shape[d] == 0) return true;
    }
    return false;
}

// overlap, after what tells nearly all tensors apart.
inline bool shares_memory(const gk_tensor &x, const gk_tensor &y) {
    if (is_empty(x) || is_empty(y)) return false;
    Range a = range_of(x), b = range_of(y);
    return a.begin < b.end && b.begin < a.end && overlap(x, y);
}

// ---- .out overloads -----------------------------------------------------------------------------
// The result of a call: new, or the caller's `into`, which must be what a new one would be and apart from the inputs.
inline Tensor result(const char *op, Tensor *into, const Shape &shape, const Dtype *dtype, const Tensor &first,
                     std::initializer_list<const Tensor *> inputs) {
    if (!into) return empty(op, shape, dtype, first.device);
    Tensor &out = *into;
    out.read(op, "out", true);
    check_same_device(op, out, first);
    if (out.dtype->code != dtype->code) bad_argument(op, "out must be ", dtype->name, ", got ", out.dtype->name);
    check_shape(op, out, shape);
    int64_t dense = 1;
    for (int d = out.last(); d >= 0; --d) {
        if (out.size(d) > 1 && out.stride(d) != dense && out.numel() > 0) bad_argument(op, "out must be contiguous");
        dense *= out.size(d);
    }
    for (const Tensor *input : inputs) {
        if (*input && shares_memory(input->view, out.view)) {
            bad_argument(op, "out shares memory with ", input->name, "; it must not");
        }
    }
    return std::move(out);
}

} // namespace gk
