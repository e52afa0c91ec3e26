// SPDX-License-Identifier: BSD-3-Clause
// attn_rules.h: the arguments that every attention op has, as csrc takes them.
#pragma once

#include <cmath>

#include "run.h"

namespace gk {

// Of an op with members q, scale, softcap, is_causal, window_left, alibi_slopes, sinks. scale
// defaults to 1 / sqrt(head_dim).
template <class O> void fill_rules(const O &op, gk_attn_rules &to) {
    const int last = op.q.view.ndim - 1;
    const bool shaped = last >= 0 && last < GK_MAX_DIMS;
    to.scale = op.scale.given ? op.scale.value
                              : 1 / std::sqrt(static_cast<double>(shaped ? op.q.size(last) : 1));
    to.softcap = op.softcap;
    to.is_causal = op.is_causal;
    to.window_left = op.window_left;
    to.window_right = -1;
    to.alibi_slopes = op.alibi_slopes.view_or_null();
    to.sinks = op.sinks.view_or_null();
}

} // namespace gk
