// SPDX-License-Identifier: BSD-3-Clause
// flash_attn.cpp: flash_attn and flash_attn_varlen with their gradients, attn_merge,
// flash_attn_accumulate (adds attention over more keys to a given result) and flash_attn_into
// (writes into given tensors).
#include "attn.h"

namespace gk {
namespace {

// ---- dense --------------------------------------------------------------------------------------
struct FlashAttn {
    Tensor q, k, v; // [B, Hq, Sq, D], [B, Hkv, Sk, D], [B, Hkv, Sk, Dv]
    GK_RULES(flash_attn)

    GK_OP(flash_attn_fwd, gk_flash_attn_args, "flash_attn", 2)
    GK_TENSORS_AND_RULES(flash_attn, q, k, v)

    void fill(C &to) {
        fill_call(*this, to);
        to.out.dtype = dtype_of_result(out_dtype, q.view.dtype);
    }
    static void place(C &to, Results &r) { place_forward(to, r); }
    const Tensor *stored_like(int i) const { return i == 0 ? &q : nullptr; }
};

struct FlashAttnBwd {
    Tensor grad_out, q, k, v, out, lse; // grad_out like out [B, Hq, Sq, Dv]; lse [B, Hq, Sq]
    OptTensor grad_lse;                 // like lse
    GK_RULES(flash_attn_bwd)

    GK_OP(flash_attn_bwd, gk_flash_attn_bwd_args, "flash_attn_bwd", 4)
    GK_TENSORS_AND_RULES(flash_attn_bwd, grad_out, q, k, v, out, lse, grad_lse)

    void fill(C &to) { fill_gradients(*this, to); }
    static void place(C &to, Results &r) { place_gradients(to, r); }
    const Tensor *stored_like(int i) const {
        return i == 0 ? &q : i == 1 ? &k : i == 2 ? &v : nullptr;
    }
};

// ---- packed -------------------------------------------------------------------------------------
struct FlashAttnVarlen {
    Tensor q, k, v;                    // [Tq, Hq, D], [Tk, Hkv, D], [Tk, Hkv, Dv]
    Tensor cu_seqlens_q, cu_seqlens_k; // [B+1] int32
    int64_t max_seqlen_q, max_seqlen_k;
    GK_RULES(varlen)

    GK_OP(flash_attn_fwd, gk_flash_attn_args, "flash_attn_varlen", 2)
    GK_TENSORS_AND_RULES(varlen, q, k, v, cu_seqlens_q, cu_seqlens_k)

    void fill(C &to) {
        fill_call(*this, to);
        fill_lengths(*this, to);
        to.out.dtype = dtype_of_result(out_dtype, q.view.dtype);
    }
    static void place(C &to, Results &r) { place_forward(to, r); }
    static constexpr bool runs_empty = true; // a GPU checks the lengths even without tokens
};

struct FlashAttnVarlenBwd {
    Tensor grad_out, q, k, v, out, lse; // grad_out like out [Tq, Hq, Dv]; lse [Tq, Hq]
    Tensor cu_seqlens_q, cu_seqlens_k;
    int64_t max_seqlen_q, max_seqlen_k;
    OptTensor grad_lse;
    GK_RULES(varlen_bwd)

    GK_OP(flash_attn_bwd, gk_flash_attn_bwd_args, "flash_attn_varlen_bwd", 4)
    GK_TENSORS_AND_RULES(varlen_bwd, grad_out, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k,
                         grad_lse)

    void fill(C &to) {
        fill_gradients(*this, to);
        fill_lengths(*this, to.fwd);
    }
    static void place(C &to, Results &r) { place_gradients(to, r); }
    static constexpr bool runs_empty = true;
};

// ---- backward -----------------------------------------------------------------------------------
template <class O> void backward(StableIValue *stack, uint64_t num_args, uint64_t) {
    O op = read_args<O>(stack, num_args);
    Checked<O> c(op);
    typename O::Results results;
    for (int i = 0; i < O::num_results; ++i) results[i] = c.make(i);
    O::place(c.args, results);
    if (RunsEmpty<O>::value || op.grad_out.numel() > 0) {
        c.run();
    } else { // no rows: the gradients of k, v and sinks are 0
        for (int i = 1; i < O::num_results; ++i) zero(O::name, results[i]);
    }
    give_all(stack, results);
}

// ---- attn_merge ---------------------------------------------------------------------------------
struct AttnMerge {
    Tensor out_a, lse_a; // [..., Dv], [...]
    Tensor out_b, lse_b;

    GK_OP(attn_merge, gk_attn_merge_args, "attn_merge", 2)
    GK_TENSORS(out_a, lse_a, out_b, lse_b)

    void fill(C &to) {
        to.out_a = out_a.view;
        to.lse_a = lse_a.view;
        to.out_b = out_b.view;
        to.lse_b = lse_b.view;
    }
    static void place(C &to, Results &r) {
        to.out = r[0].view;
        to.lse = r[1].view;
    }
};

// ---- flash_attn_accumulate, flash_attn_into -----------------------------------------------------
struct AccumulateArgs : gk_flash_attn_accumulate_args {
    size_t size; // run.h sets `size` of every argument struct; csrc reads fwd.size
};

// Attention with results in the caller's tensors; out may have any leading strides. With JOINS the
// tensors hold the attention over other keys, and this call adds its keys to it.
template <bool JOINS> struct Written {
    Tensor q, k, v;         // [B, Hq, Sq, D], [B, Hkv, Sk, D], [B, Hkv, Sk, Dv]
    WrittenTensor out, lse; // [B, Hq, Sq, Dv], [B, Hq, Sq]
    GK_RULES(flash_attn_into)

    GK_OP_OF_MEMBER(fwd, flash_attn_fwd, AccumulateArgs,
                    JOINS ? "flash_attn_accumulate" : "flash_attn_into", 0)
    GK_TENSORS_AND_RULES(flash_attn_into, q, k, v, out, lse)

    void fill(C &to) {
        fill_call(*this, to);
        to.fwd.size = sizeof(gk_flash_attn_accumulate_args);
        to.fwd.out = out.view;
        to.fwd.lse = lse.view;
        to.accumulates = JOINS;
    }
};
using FlashAttnAccumulate = Written<true>;
using FlashAttnInto = Written<false>;

template <class O> void write(O &op) {
    Checked<O> c(op);
    for (int i = 0; i < 2; ++i) {
        c.call.done(gk_check_given(&c.io, i));
        c.call.done(gk_check_apart(&c.io, i));
    }
    if (gk_shares_memory(&op.out.view, &op.lse.view))
        bad_argument(O::name, "lse shares memory with out; it must not");
    if (op.out.numel() > 0) c.run();
}

void implement(Library &m) {
    m.impl("flash_attn", op_first<FlashAttn>);
    m.impl("flash_attn_fwd", op_all<FlashAttn>);
    m.impl("explain_flash_attn", op_explain<FlashAttn>);
    m.impl("flash_attn_bwd", backward<FlashAttnBwd>);
    m.impl("explain_flash_attn_bwd", op_explain<FlashAttnBwd>);
    m.impl("flash_attn_varlen", op_first<FlashAttnVarlen>);
    m.impl("flash_attn_varlen_fwd", op_all<FlashAttnVarlen>);
    m.impl("flash_attn_varlen.out", op_out<FlashAttnVarlen>);
    m.impl("explain_flash_attn_varlen", op_explain<FlashAttnVarlen>);
    m.impl("flash_attn_varlen_bwd", backward<FlashAttnVarlenBwd>);
    m.impl("attn_merge", op_all<AttnMerge>);
    m.impl("flash_attn_accumulate", boxed<write<FlashAttnAccumulate>>);
    m.impl("flash_attn_into", boxed<write<FlashAttnInto>>);
}

void implement_shapes(Library &m) {
    m.impl("flash_attn_results", op_results<FlashAttn>);
    m.impl("flash_attn_bwd_results", op_results<FlashAttnBwd>);
    m.impl("flash_attn_varlen_results", op_results<FlashAttnVarlen>);
    m.impl("flash_attn_varlen_bwd_results", op_results<FlashAttnVarlenBwd>);
    m.impl("attn_merge_results", op_results<AttnMerge>);
    m.impl("flash_attn_accumulate_results", op_results<FlashAttnAccumulate>);
    m.impl("flash_attn_into_results", op_results<FlashAttnInto>);
}

} // namespace
} // namespace gk

GK_IMPLEMENT()
