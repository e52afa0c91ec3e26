// checks.h: one helper per kind of argument check; all run before anything is allocated. "first" is
// the argument that sets dtype and device: a, q, k, out_a.
#pragma once

#include <cmath>
#include <limits>

#include "box.h"

namespace gk {

inline std::string shape_text(const int64_t *size, int ndim) {
    std::string text = "[";
    for (int d = 0; d < ndim; ++d) text += (d ? ", " : "") + std::to_string(size[d]);
    return text + "]";
}
inline std::string shape_text(const Tensor &t) { return shape_text(t.view.shape, t.view.ndim); }
inline std::string shape_text(const Shape &s) { return shape_text(s.size, s.ndim); }

// ---- dtype and device ---------------------------------------------------------------------------
inline bool is_float(const Tensor &t) {
    switch (t.dtype->gk) {
    case GK_F32:
    case GK_BF16:
    case GK_F16:
    case GK_F64: return true;
    default: return false;
    }
}

inline void check_float(const char *op, const Tensor &t) {
    if (!is_float(t)) bad_argument(op, t.name, " must be ", kFloats, ", got ", t.dtype->name);
}

inline void check_dtype(const char *op, const Tensor &t, gk_dtype want) {
    if (t.dtype->gk == want) return;
    bad_argument(op, t.name, " must be ", gk_dtype_name(want), ", got ", t.dtype->name);
}

inline void check_same_dtype(const char *op, const Tensor &t, const Tensor &first) {
    if (t.dtype->code == first.dtype->code) return;
    bad_argument(op, t.name, " has dtype ", t.dtype->name, ", ", first.name, " has ", first.dtype->name,
                 "; they must match");
}

inline void check_same_device(const char *op, const Tensor &t, const Tensor &first) {
    if (t.device == first.device) return;
    bad_argument(op, t.name, " is on ", t.device.name(), ", ", first.name, " is on ", first.device.name(),
                 "; they must be on one device");
}

// lse and slopes: float32, and float64 where the op computes in float64.
inline gk_dtype wide_dtype(const Tensor &first) { return first.dtype->gk == GK_F64 ? GK_F64 : GK_F32; }

// ---- dimensions ---------------------------------------------------------------------------------
// `letters` names the dimensions as the docs do, e.g. "[B, Hq, Sq, D]".
inline void check_ndim(const char *op, const Tensor &t, int ndim, const char *letters) {
    if (t.view.ndim == ndim) return;
    bad_argument(op, t.name, " must have ", ndim, ndim == 1 ? " dimension " : " dimensions ", letters, ", got ",
                 t.view.ndim);
}

inline void check_ndim_range(const char *op, const Tensor &t, int least) {
    if (t.view.ndim < least) {
        bad_argument(op, t.name, " must have at least ", least, least == 1 ? " dimension" : " dimensions", ", got ",
                     t.view.ndim);
    }
    if (t.view.ndim > GK_MAX_DIMS) {
        bad_argument(op, t.name, " must have at most ", GK_MAX_DIMS, " dimensions, got ", t.view.ndim);
    }
}

// "k has head_dim 64, q has 128; they must match"
inline void check_same(const char *op, const Tensor &t, const char *what, int64_t got, const Tensor &other,
                       int64_t want) {
    if (got == want) return;
    bad_argument(op, t.name, " has ", what, " ", got, ", ", other.name, " has ", want, "; they must match");
}

inline void check_shape(const char *op, const Tensor &t, const Shape &want) {
    bool same = t.view.ndim == want.ndim;
    for (int d = 0; same && d < want.ndim; ++d) same = t.view.shape[d] == want.size[d];
    if (same) return;
    if (t.view.ndim > GK_MAX_DIMS) {
        bad_argument(op, t.name, " must have shape ", shape_text(want), ", got ", t.view.ndim, " dimensions");
    }
    bad_argument(op, t.name, " must have shape ", shape_text(want), ", got ", shape_text(t));
}

inline void check_head_dim(const char *op, const Tensor &t, int64_t head_dim) {
    if (head_dim >= 1 && head_dim <= 512) return;
    bad_argument(op, t.name, " has head_dim ", head_dim, "; it must be 1 to 512");
}

inline void check_head_ratio(const char *op, const Tensor &q, int64_t heads_q, const Tensor &k, int64_t heads_kv) {
    if (heads_kv > 0 ? heads_q % heads_kv == 0 : heads_q == 0) return;
    bad_argument(op, k.name, " has ", heads_kv, " heads, ", q.name, " has ", heads_q, "; ", q.name,
                 "'s must be a multiple of ", k.name, "'s");
}

// ---- values -------------------------------------------------------------------------------------
inline void check_not_nan(const char *op, const char *name, double x) {
    if (std::isnan(x)) bad_argument(op, name, " must be a number, got nan");
}

// alpha and beta of 16- and 32-bit calls, which are computed in float32.
inline void check_held(const char *op, const char *name, double x, const Tensor &first) {
    check_not_nan(op, name, x);
    double size = std::fabs(x);
    if (wide_dtype(first) == GK_F64 || std::isinf(x) || size == 0) return;
    if (size >= std::numeric_limits<float>::min() && size <= std::numeric_limits<float>::max()) return;
    bad_argument(op, name, " must be 0 or a number that float32 holds (1.2e-38 to 3.4e38) where ", first.name, " is ",
                 first.dtype->name, ", got ", x);
}

inline void check_finite(const char *op, const char *name, double x) {
    if (!std::isfinite(x)) bad_argument(op, name, " must be finite, got ", x);
}

inline void check_window(const char *op, const char *name, int64_t window) {
    if (window >= -1) return;
    bad_argument(op, name, " must be -1 (unbounded), 0 or more, got ", window);
}

inline void check_not_negative(const char *op, const char *name, int64_t x) {
    if (x < 0) bad_argument(op, name, " must be 0 or more, got ", x);
}

// ---- arguments that several ops have ------------------------------------------------------------
// A tensor of the caller's that only has to be of one shape, dtype and place.
inline void check_tensor(const char *op, Tensor &t, const char *name, const Tensor &first, gk_dtype dtype,
                         const Shape &shape) {
    t.read(op, name);
    check_same_device(op, t, first);
    check_dtype(op, t, dtype);
    check_shape(op, t, shape);
}

// Likewise, of one of two dtypes, which may be the same.
inline void check_tensor(const char *op, Tensor &t, const char *name, const Tensor &first, const Shape &shape,
                         const gk_dtype (&dtypes)[2]) {
    t.read(op, name);
    check_same_device(op, t, first);
    if (t.dtype->gk != dtypes[0]) {
        if (dtypes[0] == dtypes[1]) check_dtype(op, t, dtypes[0]);
        if (t.dtype->gk != dtypes[1]) {
            bad_argument(op, name, " must be ", gk_dtype_name(dtypes[0]), " or ", gk_dtype_name(dtypes[1]), ", got ",
                         t.dtype->name);
        }
    }
    check_shape(op, t, shape);
}

// int32 [n]
inline void check_index(const char *op, Tensor &t, const char *name, const Tensor &first, int64_t n) {
    check_tensor(op, t, name, first, GK_I32, Shape{1, {n}});
}

// From `scale` to `sinks` in signature order; q is read and checked. Fills all of the rules but the
// diagonal and kv_start, kv_end, q_start.
inline gk_attn_rules check_rules(const char *op, const Tensor &q, int64_t batch, int64_t heads_q, bool is_causal,
                                 OptDouble scale, int64_t window_left, int64_t window_right, double softcap,
                                 Tensor &alibi_slopes, Tensor &sinks) {
    gk_attn_rules rules{};
    const bool wide = wide_dtype(q) == GK_F64;
    if (scale.given) check_finite(op, "scale", scale.value);
    if (scale.given && !wide && std::fabs(scale.value) > 1e38) {
        bad_argument(op, "scale must be at most 1e38 in size where q is ", q.dtype->name, ", got ", scale.value);
    }
    rules.scale = scale.given ? scale.value : 1 / std::sqrt(static_cast<double>(q.size(q.last())));
    rules.is_causal = is_causal;
    check_window(op, "window_left", window_left);
    check_window(op, "window_right", window_right);
    rules.window_left = window_left;
    rules.window_right = window_right;
    if (!(softcap >= 0) || std::isinf(softcap)) {
        bad_argument(op, "softcap must be 0 (off) or a positive finite number, got ", softcap);
    }
    if (softcap > 0 && !wide && std::fabs(rules.scale) > 1e27 && std::fabs(rules.scale) > 1e37 * softcap) {
        bad_argument(op, "scale must be at most 1e37 times softcap in size where q is ", q.dtype->name, ", got ",
                     rules.scale, " and ", softcap);
    }
    rules.softcap = softcap;
    if (alibi_slopes) {
        alibi_slopes.read(op, "alibi_slopes");
        check_same_device(op, alibi_slopes, q);
        check_dtype(op, alibi_slopes, wide_dtype(q));
        bool shared = alibi_slopes.view.ndim == 1 && alibi_slopes.size(0) == heads_q;
        bool own = alibi_slopes.view.ndim == 2 && alibi_slopes.size(0) == batch && alibi_slopes.size(1) == heads_q;
        if (!shared && !own) {
            bad_argument(op, "alibi_slopes must have shape ", shape_text(Shape{1, {heads_q}}), " or ",
                         shape_text(Shape{2, {batch, heads_q}}), ", got ",
                         alibi_slopes.view.ndim > GK_MAX_DIMS ? std::to_string(alibi_slopes.view.ndim) + " dimensions"
                                                              : shape_text(alibi_slopes));
        }
        rules.alibi_slopes = &alibi_slopes.view;
    }
    if (sinks) {
        check_tensor(op, sinks, "sinks", q, Shape{1, {heads_q}}, {wide_dtype(q), static_cast<gk_dtype>(q.dtype->gk)});
        rules.sinks = &sinks.view;
    }
    return rules;
}

} // namespace gk
