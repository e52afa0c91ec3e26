// SPDX-License-Identifier: BSD-3-Clause
// kl_div.cpp: the divergence of student's and teacher's logits: kl_div, and kl_div_grad, which
// writes the losses and the gradient into the caller's tensors.
#include "gpukern_distill.h"
#include "run.h"

namespace gk {
namespace {

template <class O> void fill_rows(const O &op, gk_kl_div_args &to) {
    to.logits = op.logits.view;
    to.teacher_logits = op.teacher_logits.view;
    to.mask = op.mask.view_or_null();
    to.beta = op.beta;
    to.temperature = op.temperature;
}

struct KlDiv {
    Tensor logits, teacher_logits; // [..., V]
    OptTensor mask;                // [...] uint8
    double beta, temperature;

    GK_OP(kl_div, gk_kl_div_args, "kl_div", 2)
    GK_TENSORS(logits, teacher_logits, mask)

    void fill(C &to) { fill_rows(*this, to); }
    // (loss, dlogits)
    static void place(C &to, Results &r) {
        to.loss = r[0].view;
        if (r[1]) to.dlogits = &r[1].view;
    }
};

// dlogits may be the same tensor as logits.
struct KlDivGrad {
    Tensor logits, teacher_logits; // [..., V]
    WrittenTensor loss, dlogits;   // [...], [..., V]
    OptTensor mask;                // [...] uint8
    double beta, temperature;

    GK_OP(kl_div, gk_kl_div_args, "kl_div_grad", 0)
    GK_TENSORS(logits, teacher_logits, loss, dlogits, mask)

    void fill(C &to) {
        fill_rows(*this, to);
        to.loss = loss.view;
        to.dlogits = &dlogits.view;
    }
};

void kl_div_grad(KlDivGrad &op) {
    Checked<KlDivGrad> c(op);
    for (int i = 0; i < c.io.num_results; ++i) {
        c.call.done(gk_check_given(&c.io, i));
        c.call.done(gk_check_apart(&c.io, i));
    }
    if (gk_shares_memory(&op.loss.view, &op.dlogits.view))
        bad_argument(KlDivGrad::name, "dlogits shares memory with loss; it must not");
    if (op.logits.numel() > 0) c.run();
}

void implement(Library &m) {
    m.impl("kl_div", op_first<KlDiv>);
    m.impl("kl_div_fwd", op_all<KlDiv>);
    m.impl("explain_kl_div", op_explain<KlDiv>);
    m.impl("kl_div_grad", boxed<kl_div_grad>);
}
void implement_shapes(Library &m) {
    m.impl("kl_div_results", op_results<KlDiv>);
    m.impl("kl_div_grad_results", op_results<KlDivGrad>);
}

} // namespace
} // namespace gk

GK_IMPLEMENT()
