// attn_merge.cpp: attn_merge, the attention of the same queries over two sets of keys.
#include "run.h"

namespace gk {
namespace {

struct AttnMerge {
    Tensor out_a, lse_a; // [..., Dv], [...]
    Tensor out_b, lse_b;

    GK_OP(attn_merge, gk_attn_merge_args, "attn_merge", 2)
    GK_TENSORS(out_a, lse_a, out_b, lse_b)

    void fill(C &to) {
        to.out_a = out_a.view, to.lse_a = lse_a.view;
        to.out_b = out_b.view, to.lse_b = lse_b.view;
    }
    static void place(C &to, Results &r) { to.out = r[0].view, to.lse = r[1].view; }
};

void implement(Library &m) { m.impl("attn_merge", op_all<AttnMerge>); }
void implement_shapes(Library &m) { m.impl("attn_merge_results", op_results<AttnMerge>); }

} // namespace
} // namespace gk

GK_IMPLEMENT()
