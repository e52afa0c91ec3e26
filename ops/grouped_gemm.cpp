// SPDX-License-Identifier: BSD-3-Clause
// grouped_gemm.cpp: one product for each group; the groups are ranges of rows or of k.
#include "words.h"

namespace gk {
namespace {

struct GroupedGemm {
    Tensor a, b, offs;          // [M, K], [G, K, N] or [K, N], [G]
    OptTensor scale_a, scale_b; // for 8-bit a and b
    OptTensor bias;             // [N] or [G, N]
    String activation;
    OptDtype out_dtype;
    String accumulate;

    GK_OP(grouped_gemm, gk_grouped_gemm_args, "grouped_gemm", 1)
    GK_TENSORS(a, b, offs, scale_a, scale_b, bias)

    void fill(C &to) {
        to.a = a.view;
        to.b = b.view;
        to.offs = offs.view;
        to.scale_a = scale_a.view_or_null();
        to.scale_b = scale_b.view_or_null();
        to.bias = bias.view_or_null();
        to.activation = parse_activation(name, activation);
        const bool eight =
            a.view.dtype == GK_E4M3 || a.view.dtype == GK_E5M2 || a.view.dtype == GK_I8;
        const gk_dtype own = eight ? GK_BF16 : a.view.dtype;
        to.out.dtype = out_dtype.given ? gk_of(out_dtype.code) : own;
        to.accumulate = parse_accumulate(name, accumulate);
    }
    static void place(C &to, Results &r) { to.out = r[0].view; }
};

void implement(Library &m) {
    m.impl("grouped_gemm", op_all<GroupedGemm>);
    m.impl("explain_grouped_gemm", op_explain<GroupedGemm>);
}
void implement_shapes(Library &m) { m.impl("grouped_gemm_results", op_results<GroupedGemm>); }

} // namespace
} // namespace gk

GK_IMPLEMENT()
