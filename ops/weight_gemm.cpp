// SPDX-License-Identifier: BSD-3-Clause
// weight_gemm.cpp: pack_weight, unpack_weight and weight_gemm, for 4-bit and 8-bit weights.
#include "words.h"

namespace gk {
namespace {

struct PackWeight {
    Tensor q; // [N, K]
    String format;

    GK_OP(pack_weight, gk_pack_weight_args, "pack_weight", 1)
    GK_TENSORS(q)

    void fill(C &to) {
        to.q = q.view;
        to.format = parse_format(name, format);
    }
    static void place(C &to, Results &r) { to.packed = r[0].view; }
};

struct UnpackWeight {
    Tensor packed; // [ceil(N / 64), ceil(K / 64), bytes]
    int64_t n, k;
    String format;

    GK_OP(unpack_weight, gk_unpack_weight_args, "unpack_weight", 1)
    GK_TENSORS(packed)

    void fill(C &to) {
        to.packed = packed.view;
        to.n = n;
        to.k = k;
        to.format = parse_format(name, format);
    }
    static void place(C &to, Results &r) { to.q = r[0].view; }
};

struct WeightGemm {
    Tensor a;             // [..., M, K]; [M, K] with offs
    Tensor packed, scale; // [ceil(N / 64), ceil(K / 64), bytes], [ceil(K / g), N]
    int64_t n;
    String format;
    OptTensor zero, global_scale, scale_a, bias;
    String activation;
    OptDtype out_dtype;
    OptTensor offs; // [G]: the ends of groups of rows

    GK_OP(weight_gemm, gk_weight_gemm_args, "weight_gemm", 1)
    GK_TENSORS(a, packed, scale, zero, global_scale, scale_a, bias, offs)

    void fill(C &to) {
        to.a = a.view;
        to.packed = packed.view;
        to.scale = scale.view;
        to.n = n;
        to.format = parse_format(name, format);
        to.zero = zero.view_or_null();
        to.global_scale = global_scale.view_or_null();
        to.scale_a = scale_a.view_or_null();
        to.bias = bias.view_or_null();
        to.offs = offs.view_or_null();
        to.activation = parse_activation(name, activation);
        const gk_dtype own = a.view.dtype == GK_E4M3 ? GK_BF16 : a.view.dtype;
        to.out.dtype = out_dtype.given ? gk_of(out_dtype.code) : own;
    }
    static void place(C &to, Results &r) { to.out = r[0].view; }
};

void implement(Library &m) {
    m.impl("pack_weight", op_all<PackWeight>);
    m.impl("unpack_weight", op_all<UnpackWeight>);
    m.impl("weight_gemm", op_all<WeightGemm>);
    m.impl("explain_weight_gemm", op_explain<WeightGemm>);
}

void implement_shapes(Library &m) {
    m.impl("pack_weight_results", op_results<PackWeight>);
    m.impl("unpack_weight_results", op_results<UnpackWeight>);
    m.impl("weight_gemm_results", op_results<WeightGemm>);
}

} // namespace
} // namespace gk

GK_IMPLEMENT()
