// SPDX-License-Identifier: BSD-3-Clause
// sparse_gemm.cpp: sparse_pack and sparse_gemm, for weights with 2:4 sparsity.
#include "words.h"

namespace gk {
namespace {

struct SparsePack {
    Tensor w; // [N, K]

    GK_OP(sparse_pack, gk_sparse_pack_args, "sparse_pack", 2)
    GK_TENSORS(w)

    void fill(C &to) { to.w = w.view; }
    static void place(C &to, Results &r) {
        to.values = r[0].view;
        to.meta = r[1].view;
    }
};

struct SparseGemm {
    Tensor a, values, meta;     // [M, K], [N, K / 2], [N, ceil(K / 8)]
    OptTensor scale_a, scale_b; // [] or [M, 1], [1, N]
    OptTensor bias;             // [N]
    String activation;
    OptDtype out_dtype;
    String accumulate;

    GK_OP(sparse_gemm, gk_sparse_gemm_args, "sparse_gemm", 1)
    GK_TENSORS(a, values, meta, scale_a, scale_b, bias)

    void fill(C &to) {
        to.a = a.view;
        to.values = values.view;
        to.meta = meta.view;
        to.scale_a = scale_a.view_or_null();
        to.scale_b = scale_b.view_or_null();
        to.bias = bias.view_or_null();
        to.activation = parse_activation(name, activation);
        to.accumulate = parse_accumulate(name, accumulate);
        const gk_dtype own = gk_dtype_bytes(a.view.dtype) == 1 ? GK_BF16 : a.view.dtype;
        to.out.dtype = out_dtype.given ? gk_of(out_dtype.code) : own;
    }
    static void place(C &to, Results &r) { to.out = r[0].view; }
};

void implement(Library &m) {
    m.impl("sparse_pack", op_all<SparsePack>);
    m.impl("sparse_gemm", op_all<SparseGemm>);
    m.impl("explain_sparse_gemm", op_explain<SparseGemm>);
}

void implement_shapes(Library &m) {
    m.impl("sparse_pack_results", op_results<SparsePack>);
    m.impl("sparse_gemm_results", op_results<SparseGemm>);
}

} // namespace
} // namespace gk

GK_IMPLEMENT()
