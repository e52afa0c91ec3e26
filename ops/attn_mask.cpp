// SPDX-License-Identifier: BSD-3-Clause
// attn_mask.cpp: the op attn_mask, which stores an attention mask in the layout that the kernels
// read (csrc/core/attn_mask.h).
#include "gpukern.h"
#include "words.h"

namespace gk {
namespace {

gk_mask_source parse_source(const char *op, std::string_view word) {
    static const char *const words[] = {"bool", "bits", "ranges", "columns", "blocks"};
    return static_cast<gk_mask_source>(parse_word(op, "source", word, words));
}

struct AttnMask {
    Tensor first; // the mask, the ranges, the columns or kv_num_blocks, [B, H, ...]
    String source;
    int64_t seq_q, seq_k;
    OptTensor kv_indices, full_kv_num_blocks, full_kv_indices, mask; // source "blocks" only
    bool is_bits, is_causal, transposed;

    GK_OP(attn_mask, gk_attn_mask_args, "attn_mask", 1)
    GK_TENSORS(first, kv_indices, full_kv_num_blocks, full_kv_indices, mask)

    void fill(C &to) {
        to.source = parse_source(name, source);
        const bool is_mask = to.source <= GK_MASK_OF_BITS,
                   is_blocks = to.source == GK_MASK_OF_BLOCKS;
        to.mask = is_mask ? &first.view : mask.view_or_null();
        to.rows = is_mask || is_blocks ? nullptr : &first.view;
        to.num_blocks = is_blocks ? &first.view : nullptr;
        to.blocks = kv_indices.view_or_null();
        to.num_full = full_kv_num_blocks.view_or_null();
        to.full = full_kv_indices.view_or_null();
        to.is_bits = is_bits;
        to.is_causal = is_causal;
        to.transposed = transposed;
        to.seq_q = seq_q;
        to.seq_k = seq_k;
    }
    static void place(C &to, Results &r) { to.out = r[0].view; }
};

void implement(Library &m) { m.impl("attn_mask", op_all<AttnMask>); }
void implement_shapes(Library &m) { m.impl("attn_mask_results", op_results<AttnMask>); }

} // namespace
} // namespace gk

GK_IMPLEMENT()
