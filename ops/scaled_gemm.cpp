// SPDX-License-Identifier: BSD-3-Clause
// scaled_gemm.cpp: scaled_gemm, the product of two quantised matrices.
#include "words.h"

namespace gk {
namespace {

struct ScaledGemm {
    Tensor a, b;             // [M, K], [K, N]
    Tensor scale_a, scale_b; // [] or [Sm, Sk], [Sk, Sn]
    OptTensor bias, c;       // [N], broadcasts to [M, N]
    double beta;
    OptTensor out_scale; // []
    String activation;
    OptDtype out_dtype;
    String accumulate;

    GK_OP(scaled_gemm, gk_scaled_gemm_args, "scaled_gemm", 1)
    GK_TENSORS(a, b, scale_a, scale_b, bias, c, out_scale)

    void fill(C &to) {
        to.a = a.view;
        to.b = b.view;
        to.scale_a = scale_a.view;
        to.scale_b = scale_b.view;
        to.bias = bias.view_or_null();
        to.c = c.view_or_null();
        to.beta = beta;
        to.out_scale = out_scale.view_or_null();
        to.activation = parse_activation(name, activation);
        to.out.dtype = out_dtype.given ? gk_of(out_dtype.code) : GK_BF16;
        to.accumulate = parse_accumulate(name, accumulate);
    }
    static void place(C &to, Results &r) {
        to.out = r[0].view;
        if (to.beta == 0) to.c = nullptr;
    }
};

void implement(Library &m) {
    m.impl("scaled_gemm", op_all<ScaledGemm>);
    m.impl("explain_scaled_gemm", op_explain<ScaledGemm>);
}
void implement_shapes(Library &m) { m.impl("scaled_gemm_results", op_results<ScaledGemm>); }

} // namespace
} // namespace gk

GK_IMPLEMENT()
