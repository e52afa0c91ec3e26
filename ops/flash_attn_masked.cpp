// SPDX-License-Identifier: BSD-3-Clause
// flash_attn_masked.cpp: flash_attn with a mask or a bias, and its gradients.
#include "attn.h"

namespace gk {
namespace {

// run.h sets `size` of every argument struct. csrc reads fwd.size or bwd.size.
struct MaskedArgs : gk_flash_attn_masked_args {
    size_t size;
};
struct MaskedBwdArgs : gk_flash_attn_masked_bwd_args {
    size_t size;
    gk_tensor wanted[2]; // dbias and ddistance_bias point here until the results are allocated
};

template <class O> void fill_scores(const O &op, gk_attn_scores &to) {
    to.mask = op.attn_mask.view_or_null();
    to.store = static_cast<gk_mask_store>(op.mask_store);
    to.mask_seq_q = op.mask_seq_q;
    to.mask_seq_k = op.mask_seq_k;
    to.bias = op.bias.view_or_null();
    to.distance_bias = op.distance_bias.view_or_null();
}

// attn_mask [B or 1, Hq or 1, n] int32, bias [B or 1, Hq or 1, Sq or 1, Sk or 1],
// distance_bias [Hq or 1, Sq + Sk - 1]
#define GK_SCORES                               \
    OptTensor attn_mask;                        \
    int64_t mask_store, mask_seq_q, mask_seq_k; \
    OptTensor bias, distance_bias;

struct FlashAttnMasked {
    Tensor q, k, v; // [B, Hq, Sq, D], [B, Hkv, Sk, D], [B, Hkv, Sk, Dv]
    GK_SCORES
    GK_RULES(flash_attn)

    GK_OP_OF_MEMBER(fwd, flash_attn_fwd, MaskedArgs, "flash_attn", 2)
    GK_TENSORS_AND_RULES(flash_attn, q, k, v, attn_mask, bias, distance_bias)

    void fill(C &to) {
        fill_call(*this, to);
        to.fwd.size = sizeof(gk_flash_attn_masked_args);
        to.fwd.out.dtype = dtype_of_result(out_dtype, q.view.dtype);
        fill_scores(*this, to.scores);
    }
    static void place(C &to, Results &r) { place_forward(to.fwd, r); }
    const Tensor *stored_like(int i) const { return i == 0 ? &q : nullptr; }
};

struct FlashAttnMaskedBwd {
    Tensor grad_out, q, k, v, out, lse; // grad_out like out [B, Hq, Sq, Dv]; lse [B, Hq, Sq]
    OptTensor grad_lse;                 // like lse
    GK_SCORES
    bool need_bias, need_distance_bias;
    GK_RULES(flash_attn_bwd)

    GK_OP_OF_MEMBER(bwd, flash_attn_bwd, MaskedBwdArgs, "flash_attn_bwd", 6)
    GK_TENSORS_AND_RULES(flash_attn_bwd, grad_out, q, k, v, out, lse, grad_lse, attn_mask, bias,
                         distance_bias)

    void fill(C &to) {
        fill_gradients(*this, to.bwd);
        to.bwd.size = sizeof(gk_flash_attn_masked_bwd_args);
        fill_scores(*this, to.scores);
        if (need_bias) to.dbias = &to.wanted[0];
        if (need_distance_bias) to.ddistance_bias = &to.wanted[1];
    }

    // (dq, dk, dv, dsinks, dbias, ddistance_bias). Gradients of absent arguments, and biases'
    // gradients that are not needed, are empty.
    static void place(C &to, Results &r) {
        place_gradients(to.bwd, r);
        if (to.dbias) to.dbias = &r[4].view;
        if (to.ddistance_bias) to.ddistance_bias = &r[5].view;
    }
    const Tensor *stored_like(int i) const {
        return i == 0 ? &q : i == 1 ? &k : i == 2 ? &v : nullptr;
    }
};

void backward(StableIValue *stack, uint64_t num_args, uint64_t) {
    FlashAttnMaskedBwd op = read_args<FlashAttnMaskedBwd>(stack, num_args);
    Checked<FlashAttnMaskedBwd> c(op);
    FlashAttnMaskedBwd::Results results;
    for (int i = 0; i < op.num_results; ++i) results[i] = c.make(i);
    op.place(c.args, results);
    const bool rows = op.grad_out.numel() > 0, keys = op.k.size(2) > 0;
    // Without keys, masks and biases change nothing. lse is the sink, so dsinks may be more than 0.
    // csrc then runs attention without a mask.
    if (!keys) c.args.bwd.size = sizeof c.args.bwd;
    if (rows) c.run();
    for (int i = rows ? 4 : 0; i < op.num_results && !(rows && keys); ++i)
        zero(op.name, results[i]);
    give_all(stack, results);
}

void implement(Library &m) {
    m.impl("flash_attn_masked", op_first<FlashAttnMasked>);
    m.impl("flash_attn_masked_fwd", op_all<FlashAttnMasked>);
    m.impl("explain_flash_attn_masked", op_explain<FlashAttnMasked>);
    m.impl("flash_attn_masked_bwd", backward);
}

void implement_shapes(Library &m) {
    m.impl("flash_attn_masked_results", op_results<FlashAttnMasked>);
    m.impl("flash_attn_masked_bwd_results", op_results<FlashAttnMaskedBwd>);
}

} // namespace
} // namespace gk

GK_IMPLEMENT()
