// SPDX-License-Identifier: BSD-3-Clause
// quantize.cpp: quantize, silu_mul_quantize, rms_norm_quantize and dequantize. The first three call
// the same op of csrc, gk_quantize.
#include "words.h"

namespace gk {
namespace {

// (codes, scale), and `sum` as third result of RmsNormQuantize, which sets it itself.
template <class O> void place_quantized(typename O::C &to, typename O::Results &r) {
    to.codes = r[0].view;
    if (!to.given) to.scale = r[1].view;
}

void fill_quantized(gk_quantize_args &to, const char *op, int64_t dtype,
                    std::string_view granularity) {
    to.granularity = parse_granularity(op, granularity);
    to.codes.dtype = gk_of(static_cast<int32_t>(dtype));
    to.scale.dtype = to.granularity == GK_PER_1X32 ? GK_E8M0 : GK_F32;
}

struct Quantize {
    Tensor x; // [..., M, K]
    int64_t dtype;
    String granularity;
    OptTensor scale_ub; // []
    OptTensor scale;    // given scales; None: computed from x

    GK_OP(quantize, gk_quantize_args, "quantize", 2)
    GK_TENSORS(x, scale_ub, scale)
    static constexpr bool runs_empty = true; // an empty x still has a scale per tensor

    void fill(C &to) {
        to.what = GK_QUANTIZE_X;
        to.x = x.view;
        to.scale_ub = scale_ub.view_or_null();
        to.given = scale.view_or_null();
        fill_quantized(to, name, dtype, granularity);
    }
    static void place(C &to, Results &r) { place_quantized<Quantize>(to, r); }
};

struct SiluMulQuantize {
    Tensor gate, up; // [..., M, K]
    int64_t dtype;
    String granularity;
    OptTensor scale_ub;

    GK_OP(quantize, gk_quantize_args, "silu_mul_quantize", 2)
    GK_TENSORS(gate, up, scale_ub)
    static constexpr bool runs_empty = true;

    void fill(C &to) {
        to.what = GK_QUANTIZE_SILU_MUL;
        to.x = gate.view;
        to.up = &up.view;
        to.scale_ub = scale_ub.view_or_null();
        fill_quantized(to, name, dtype, granularity);
    }
    static void place(C &to, Results &r) { place_quantized<SiluMulQuantize>(to, r); }
};

struct RmsNormQuantize {
    Tensor x;           // [..., M, K]
    OptTensor weight;   // [K]
    OptTensor residual; // [..., M, K]
    double eps;
    int64_t dtype;
    String granularity;
    OptTensor scale_ub;

    GK_OP(quantize, gk_quantize_args, "rms_norm_quantize", 3)
    GK_TENSORS(x, weight, residual, scale_ub)
    static constexpr bool runs_empty = true;

    void fill(C &to) {
        to.what = GK_QUANTIZE_RMS_NORM;
        to.x = x.view;
        to.weight = weight.view_or_null();
        to.residual = residual.view_or_null();
        to.eps = eps;
        to.scale_ub = scale_ub.view_or_null();
        fill_quantized(to, name, dtype, granularity);
    }
    static void place(C &to, Results &r) {
        place_quantized<RmsNormQuantize>(to, r);
        if (to.residual) to.sum = &r[2].view;
    }
};

struct Dequantize {
    Tensor codes, scale;
    int64_t dtype;

    GK_OP(dequantize, gk_dequantize_args, "dequantize", 1)
    GK_TENSORS(codes, scale)

    void fill(C &to) {
        to.codes = codes.view;
        to.scale = scale.view;
        to.out.dtype = gk_of(static_cast<int32_t>(dtype));
    }
    static void place(C &to, Results &r) { to.out = r[0].view; }
};

// X(name, op). Each op also has an explain.
#define ALL(X)                              \
    X("quantize", Quantize)                 \
    X("silu_mul_quantize", SiluMulQuantize) \
    X("rms_norm_quantize", RmsNormQuantize) \
    X("dequantize", Dequantize)

void implement(Library &m) { ALL(GK_OP_RUN) ALL(GK_OP_EXPLAIN) }

void implement_shapes(Library &m) { ALL(GK_OP_RESULTS) }

} // namespace
} // namespace gk

GK_IMPLEMENT()
