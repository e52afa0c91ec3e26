// SPDX-License-Identifier: BSD-3-Clause
// attn.h: what the ops of attention have in common: how the members of an op fill the arguments of
// csrc, and where the results go. flash_attn.cpp, flash_attn_fp8.cpp and flash_attn_masked.cpp use
// it. The arguments that they share are the table in rules.h.
#pragma once

#include "gpukern.h"
#include "rules.h"

namespace gk {

// ---- arguments ----------------------------------------------------------------------------------
// Fills q, k, v and the arguments of GK_ATTENTION. `to` is the struct of a forward, or a struct
// that contains one as `fwd`.
template <class O, class C> void fill_call(const O &op, C &to) {
    gk_flash_attn_args &fwd = forward_of(to);
    fwd.size = sizeof fwd;
    fwd.q = op.q.view;
    fwd.k = op.k.view;
    fwd.v = op.v.view;
    op.fill_rules(to);
}

template <class O> void fill_lengths(const O &op, gk_flash_attn_args &to) {
    to.cu_seqlens_q = &op.cu_seqlens_q.view;
    to.cu_seqlens_k = &op.cu_seqlens_k.view;
    to.max_seqlen_q = op.max_seqlen_q;
    to.max_seqlen_k = op.max_seqlen_k;
}

// A result's dtype: the requested one if there is one, otherwise `other`.
inline gk_dtype dtype_of_result(const OptDtype &requested, gk_dtype other) {
    return requested.given ? gk_of(requested.code) : other;
}

template <class O> void fill_gradients(const O &op, gk_flash_attn_bwd_args &to) {
    fill_call(op, to);
    to.grad_out = op.grad_out.view;
    to.fwd.out = op.out.view;
    to.fwd.lse = op.lse.view;
    to.grad_lse = op.grad_lse.view_or_null();
    to.dq.dtype = dtype_of_result(op.grad_dtype, op.q.view.dtype);
}

// ---- results ------------------------------------------------------------------------------------
// (out, lse)
inline void place_forward(gk_flash_attn_args &to, std::array<Tensor, 2> &r) {
    to.out = r[0].view;
    if (r[1]) to.lse = r[1].view;
}

// (dq, dk, dv, dsinks, ..); dsinks is empty without sinks.
template <size_t N> void place_gradients(gk_flash_attn_bwd_args &to, std::array<Tensor, N> &r) {
    to.dq = r[0].view;
    to.dk = r[1].view;
    to.dv = r[2].view;
    if (to.fwd.rules.sinks) to.dsinks = &r[3].view;
}

} // namespace gk
