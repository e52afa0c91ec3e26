// SPDX-License-Identifier: BSD-3-Clause
// rules.h: the one table of attention's arguments, GK_ATTENTION.
//
// The table has a line for each argument that several attention ops share, such as is_causal, and a
// column for each op. An op's own tensors and lengths are not in it. Macros below make three things
// of a line: the argument in the schemas (schema.cpp), the member of the ops' structs, and the
// assignment to the arguments of csrc. Python reads names, defaults and types from the schemas
// (torch_gpukern/ops/rules.py).
//
// To add an argument, append a line. The raw ops take arguments by position, so the order of the
// lines is part of their contract. docs/add_a_kernel.md lists what else it needs.
#pragma once

#include <cmath>

#include "run.h"

// X(DO, type, name, default, to, columns)
//   type     the member's type; GK_SCHEMA_<type> is its spelling in the schema
//   default  the default, as the schema spells it
//   to       the struct of csrc that receives the argument:
//              RULES    gk_attn_rules
//              FORWARD  gk_flash_attn_args, also inside the struct of a backward
//              OWN      the op's own struct
//              BY_HAND  none; the op's `fill` handles the argument
//   columns  x: the op takes the argument; _: it does not
// paged_attn has some arguments at another position or with another default. These have a second
// line, at the end.
//
// clang-format off
#define GK_ATTENTION(X, DO)                                                                       \
    /*                                               flash_attn        varlen       paged ranks   \
                                                     |   bwd into fp8  |   bwd fp8  |     | paged*/\
    X(DO, bool,      is_causal,     False,  RULES,   x,  x,  x,   x,   x,  x,  x,   _,    x,  _)  \
    X(DO, OptDouble, scale,         None,   RULES,   x,  x,  x,   x,   x,  x,  x,   x,    x,  x)  \
    X(DO, int64_t,   diagonal,      0,      RULES,   x,  x,  x,   x,   _,  _,  _,   _,    _,  _)  \
    X(DO, int64_t,   window_left,   -1,     RULES,   x,  x,  x,   x,   x,  x,  x,   x,    x,  _)  \
    X(DO, int64_t,   window_right,  -1,     RULES,   x,  x,  x,   x,   x,  x,  x,   _,    x,  _)  \
    X(DO, double,    softcap,       0.0,    RULES,   x,  x,  x,   x,   x,  x,  x,   x,    x,  x)  \
    X(DO, OptTensor, alibi_slopes,  None,   RULES,   x,  x,  x,   x,   x,  x,  x,   x,    x,  _)  \
    X(DO, OptTensor, sinks,         None,   RULES,   x,  x,  x,   x,   x,  x,  x,   x,    x,  x)  \
    X(DO, OptTensor, kv_start,      None,   RULES,   x,  x,  x,   x,   _,  _,  _,   _,    _,  _)  \
    X(DO, OptTensor, kv_end,        None,   RULES,   x,  x,  x,   x,   _,  _,  _,   _,    _,  _)  \
    X(DO, OptTensor, q_start,       None,   RULES,   x,  x,  x,   x,   _,  _,  _,   _,    _,  _)  \
    X(DO, OptDtype,  out_dtype,     None,   BY_HAND, x,  _,  _,   x,   x,  _,  x,   _,    _,  _)  \
    X(DO, OptTensor, q_scale,       None,   OWN,     _,  _,  _,   x,   _,  _,  x,   _,    _,  _)  \
    X(DO, OptTensor, k_scale,       None,   OWN,     _,  _,  _,   x,   _,  _,  x,   x,    _,  x)  \
    X(DO, OptTensor, v_scale,       None,   OWN,     _,  _,  _,   x,   _,  _,  x,   x,    _,  x)  \
    X(DO, OptTensor, v_mean,        None,   OWN,     _,  _,  _,   x,   _,  _,  x,   _,    _,  _)  \
    X(DO, String,    accumulate,    "auto", BY_HAND, _,  _,  _,   x,   _,  _,  x,   _,    _,  _)  \
    X(DO, bool,      deterministic, False,  OWN,     _,  x,  _,   _,   _,  x,  _,   _,    _,  _)  \
    X(DO, OptDtype,  grad_dtype,    None,   BY_HAND, _,  x,  _,   _,   _,  x,  _,   _,    _,  _)  \
    X(DO, bool,      is_part,       False,  OWN,     _,  x,  _,   _,   _,  x,  _,   _,    _,  _)  \
    X(DO, double,    dropout_p,     0.0,    FORWARD, x,  x,  _,   _,   x,  x,  _,   _,    _,  _)  \
    X(DO, OptTensor, dropout_seed,  None,   FORWARD, x,  x,  _,   _,   x,  x,  _,   _,    _,  _)  \
    X(DO, bool,      is_causal,     True,   RULES,   _,  _,  _,   _,   _,  _,  _,   x,    _,  _)  \
    X(DO, OptTensor, kv_start,      None,   RULES,   _,  _,  _,   _,   _,  _,  _,   x,    _,  _)  \
    X(DO, int64_t,   window_right,  -1,     RULES,   _,  _,  _,   _,   _,  _,  _,   x,    _,  _)  \
    X(DO, bool,      allow_short,   False,  BY_HAND, _,  _,  _,   _,   _,  _,  _,   x,    _,  _)  \
    X(DO, bool,      batch_invariant, False, BY_HAND, _, _,  _,   _,   _,  _,  _,   x,    _,  _)  \
    X(DO, String,    latent_format, "none", BY_HAND, _,  _,  _,   _,   _,  _,  _,   x,    _,  _)

// ---- columns ------------------------------------------------------------------------------------
#define GK_IF_x(...) __VA_ARGS__
#define GK_IF__(...)
#define GK_IN_flash_attn(DO, T, N, V, to, a, ...) GK_IF_##a(DO(T, N, V, to))
#define GK_IN_flash_attn_bwd(DO, T, N, V, to, a, b, ...) GK_IF_##b(DO(T, N, V, to))
#define GK_IN_flash_attn_into(DO, T, N, V, to, a, b, c, ...) GK_IF_##c(DO(T, N, V, to))
#define GK_IN_flash_attn_fp8(DO, T, N, V, to, a, b, c, d, ...) GK_IF_##d(DO(T, N, V, to))
#define GK_IN_varlen(DO, T, N, V, to, a, b, c, d, e, ...) GK_IF_##e(DO(T, N, V, to))
#define GK_IN_varlen_bwd(DO, T, N, V, to, a, b, c, d, e, f, ...) GK_IF_##f(DO(T, N, V, to))
#define GK_IN_varlen_fp8(DO, T, N, V, to, a, b, c, d, e, f, g, ...) GK_IF_##g(DO(T, N, V, to))
#define GK_IN_paged_attn(DO, T, N, V, to, a, b, c, d, e, f, g, h, ...) GK_IF_##h(DO(T, N, V, to))
#define GK_IN_ranks(DO, T, N, V, to, a, b, c, d, e, f, g, h, i, j) GK_IF_##i(DO(T, N, V, to))
#define GK_IN_ranks_paged(DO, T, N, V, to, a, b, c, d, e, f, g, h, i, j) GK_IF_##j(DO(T, N, V, to))
// clang-format on

// ---- the schema ---------------------------------------------------------------------------------
#define GK_SCHEMA_bool "bool"
#define GK_SCHEMA_int64_t "SymInt"
#define GK_SCHEMA_double "float"
#define GK_SCHEMA_String "str"
#define GK_SCHEMA_OptDouble "float?"
#define GK_SCHEMA_OptDtype "ScalarType?"
#define GK_SCHEMA_OptTensor "Tensor?"
#define GK_IN_SCHEMA(type, name, value, to) ", " GK_SCHEMA_##type " " #name "=" #value

// The arguments of column `op` in a schema: ", bool is_causal=False, float? scale=None, ..".
#define GK_RULES_SCHEMA(op) GK_ATTENTION(GK_IN_##op, GK_IN_SCHEMA)

// ---- the op's struct ----------------------------------------------------------------------------
#define GK_VISIT_bool(name)
#define GK_VISIT_int64_t(name)
#define GK_VISIT_double(name)
#define GK_VISIT_String(name)
#define GK_VISIT_OptDouble(name)
#define GK_VISIT_OptDtype(name)
#define GK_VISIT_OptTensor(name) f(name);
#define GK_NAME_bool(name)
#define GK_NAME_int64_t(name)
#define GK_NAME_double(name)
#define GK_NAME_String(name)
#define GK_NAME_OptDouble(name)
#define GK_NAME_OptDtype(name)
#define GK_NAME_OptTensor(name) ", " #name
#define GK_FILL_RULES(name) gk::assign(gk::forward_of(to).rules.name, name);
#define GK_FILL_FORWARD(name) gk::assign(gk::forward_of(to).name, name);
#define GK_FILL_OWN(name) gk::assign(to.name, name);
#define GK_FILL_BY_HAND(name)

#define GK_AS_MEMBER(type, name, value, to) type name;
#define GK_AS_VISIT(type, name, value, to) GK_VISIT_##type(name)
#define GK_AS_NAME(type, name, value, to) GK_NAME_##type(name)
#define GK_AS_FILL(type, name, value, to) GK_FILL_##to(name)

// Declares the members of column `op`, after an op's own members, and fill_rules, which copies them
// into the arguments of csrc.
#define GK_RULES(op)                                           \
    GK_ATTENTION(GK_IN_##op, GK_AS_MEMBER)                     \
    template <class Args> void fill_rules(Args &to) const {    \
        gk::forward_of(to).rules.scale = gk::default_scale(q); \
        GK_ATTENTION(GK_IN_##op, GK_AS_FILL)                   \
    }

// GK_TENSORS for an op's own tensors and for the tensors of column `op`.
#define GK_TENSORS_AND_RULES(op, ...)         \
    template <class F> void tensors(F &f) {   \
        gk::visit(f, __VA_ARGS__);            \
        GK_ATTENTION(GK_IN_##op, GK_AS_VISIT) \
    }                                         \
    static constexpr const char *names = #__VA_ARGS__ GK_ATTENTION(GK_IN_##op, GK_AS_NAME);

namespace gk {

// ---- copying a member to csrc -------------------------------------------------------------------
inline void assign(int32_t &to, bool x) { to = x; }
inline void assign(int64_t &to, int64_t x) { to = x; }
inline void assign(double &to, double x) { to = x; }
inline void assign(double &to, const OptDouble &x) {
    if (x.given) to = x.value;
}
inline void assign(const gk_tensor *&to, const OptTensor &x) { to = x.view_or_null(); }

// The arguments of the forward pass: to.fwd if `to` has such a member, otherwise `to` itself.
template <class T, class = void> struct Forward {
    static T &of(T &to) { return to; }
};
template <class T> struct Forward<T, std::void_t<decltype(std::declval<T &>().fwd)>> {
    static auto &of(T &to) { return to.fwd; }
};
template <class T> auto &forward_of(T &to) { return Forward<T>::of(to); }

// 1 / sqrt(head_dim)
inline double default_scale(const Tensor &q) {
    const int last = q.view.ndim - 1;
    const bool shaped = last >= 0 && last < GK_MAX_DIMS;
    return 1 / std::sqrt(static_cast<double>(shaped ? q.size(last) : 1));
}

} // namespace gk
