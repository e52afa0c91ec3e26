// SPDX-License-Identifier: BSD-3-Clause
// gemm.cpp: gemm, and gemm_act_bwd, the gradient of its activation.
#include "core/folds.h"
#include "words.h"

namespace gk {
namespace {

struct Gemm {
    Tensor a, b;    // [batch..., M, K], [batch..., K, N] or [K, N]
    OptTensor bias; // [N]
    OptTensor c;    // broadcasts to [batch..., M, N]
    double alpha, beta;
    String activation;
    OptDtype out_dtype;
    String fp32_precision;

    GK_OP(gemm, gk_gemm_args, "gemm", 2)
    GK_TENSORS(a, b, bias, c)

    void fill(C &to) {
        to.a = a.view;
        to.b = b.view;
        to.bias = bias.view_or_null();
        to.c = c.view_or_null();
        to.alpha = alpha;
        to.beta = beta;
        to.activation = parse_activation(name, activation);
        to.out.dtype = out_dtype.given ? gk_of(out_dtype.code) : a.view.dtype;
        to.fp32_precision = parse_precision(fp32_precision);
    }
    // (out, preact). preact is empty if the activation's derivative can be computed from out.
    static void place(C &to, Results &r) {
        to.out = r[0].view;
        if (r[1] && r[1].numel() > 0) to.preact = &r[1].view;
        if (!to.c) to.beta = 0; // the schema's default is 1, even without c
        if (to.beta == 0) to.c = nullptr;
    }
    Tensor *better_dense(const gk_context *context, const C &args) {
        return gk_gemm_is_better_dense(context, &args) ? &a : nullptr;
    }

  private:
    static gk_precision parse_precision(std::string_view text) {
        if (text == "ieee") return GK_IEEE;
        if (text == "tf32") return GK_TF32;
        bad_argument(name, "fp32_precision must be ieee or tf32, got '", text, "'");
    }
};

// More members of explain_gemm on CUDA: all instances that serve the call, and the device and
// tuning key that gemm_prefer needs to select one of them.
std::string other_instances(const Checked<Gemm> &c) {
    const gk_context *context = c.call.context();
    if (context->device != GK_CUDA) return "";
    const char *device, *gemm_class, *instances;
    c.call.done(gk_cuda_device_name(context->index, &device));
    c.call.done(gk_gemm_class(context, &c.args, &gemm_class));
    c.call.done(gk_gemm_instances(context, &c.args, &instances));
    std::string list = instances;
    for (size_t at = list.find(','); at != std::string::npos; at = list.find(',', at + 4))
        list.replace(at, 1, "\", \"");
    return std::string(", \"device\": \"") + device + "\", \"class\": \"" + gemm_class +
           "\", \"instances\": [\"" + list + "\"]";
}

std::string explain_gemm(Gemm &op) {
    Checked<Gemm> c(op, described_gpu);
    Gemm::Results results;
    results[0] = c.make(0); // explains a call without preact
    Gemm::place(c.args, results);
    return c.explain(other_instances(c));
}

struct GemmActBwd {
    Tensor grad_out, saved; // [...], one shape
    String activation;

    GK_OP(gemm_act_bwd, gk_gemm_act_bwd_args, "gemm_act_bwd", 1)
    GK_TENSORS(grad_out, saved)

    void fill(C &to) {
        to.grad_out = grad_out.view;
        to.saved = saved.view;
        to.activation = parse_activation(name, activation);
    }
    static void place(C &to, Results &r) { to.grad_in = r[0].view; }
};

void implement(Library &m) {
    m.impl("gemm", op_first<Gemm>);
    m.impl("gemm_fwd", op_all<Gemm>);
    m.impl("gemm.out", op_out<Gemm>);
    m.impl("explain_gemm", boxed<explain_gemm>);
    m.impl("gemm_act_bwd", op_all<GemmActBwd>);
}

void implement_shapes(Library &m) {
    m.impl("gemm_results", op_results<Gemm>);
    m.impl("gemm_act_bwd_results", op_results<GemmActBwd>);
}

} // namespace
} // namespace gk

GK_IMPLEMENT()
