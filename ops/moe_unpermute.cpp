// SPDX-License-Identifier: BSD-3-Clause
// moe_unpermute.cpp: the weighted sum of each token's rows, and its gradients.
#include "gpukern_moe.h"
#include "run.h"

namespace gk {
namespace {

// The tensor of the schema's name `place` is called places, because place() is a function of every
// op.
struct MoeUnpermute {
    Tensor rows;   // [R, H]
    Tensor places; // [T, J] int32 or int64
    Tensor weight; // [T, J]

    GK_OP(moe_unpermute, gk_moe_unpermute_args, "moe_unpermute", 1)
    template <class F> void tensors(F &f) { visit(f, rows, places, weight); }
    static constexpr const char *names = "rows, place, weight";

    void fill(C &to) {
        to.rows = rows.view;
        to.place = places.view;
        to.weight = weight.view;
    }
    static void place(C &to, Results &r) { to.out = r[0].view; }
};

struct MoeUnpermuteBwd {
    Tensor grad_out, rows; // [T, H], [R, H]
    Tensor places;         // [T, J] int32 or int64
    Tensor weight;         // [T, J]
    bool need_rows, need_weight;

    GK_OP(moe_unpermute_bwd, gk_moe_unpermute_bwd_args, "moe_unpermute_bwd", 2)
    template <class F> void tensors(F &f) { visit(f, grad_out, rows, places, weight); }
    static constexpr const char *names = "grad_out, rows, place, weight";

    void fill(C &to) {
        to.grad_out = grad_out.view;
        to.rows = rows.view;
        to.place = places.view;
        to.weight = weight.view;
        // csrc's check reads only whether they are given; place() sets the results
        if (need_rows) to.drows = &rows.view;
        if (need_weight) to.dweight = &weight.view;
    }
    // (drows, dweight); each is empty if not needed
    static void place(C &to, Results &r) {
        if (to.drows) to.drows = &r[0].view;
        if (to.dweight) to.dweight = &r[1].view;
    }
    static constexpr bool runs_empty = true; // dweight may be wanted alone
};

void implement(Library &m) {
    m.impl("moe_unpermute", op_all<MoeUnpermute>);
    m.impl("explain_moe_unpermute", op_explain<MoeUnpermute>);
    m.impl("moe_unpermute_bwd", op_all<MoeUnpermuteBwd>);
}
void implement_shapes(Library &m) {
    m.impl("moe_unpermute_results", op_results<MoeUnpermute>);
    m.impl("moe_unpermute_bwd_results", op_results<MoeUnpermuteBwd>);
}

} // namespace
} // namespace gk

GK_IMPLEMENT()
