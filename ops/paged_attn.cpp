// SPDX-License-Identifier: BSD-3-Clause
// paged_attn.cpp: paged_attn, kv_cache_write, kv_cache_write_latent and rope_kv_write.
#include "core/latent.h"
#include "rules.h"
#include "words.h"

namespace gk {
namespace {

template <class O> void fill_paged(const O &op, gk_paged_attn_args &to) {
    to.q = op.q.view;
    to.k_cache = op.k_cache.view;
    to.v_cache = op.v_cache.view;
    to.block_table = op.block_table.view;
    to.seq_lens = op.seq_lens.view;
    to.cu_seqlens_q = op.cu_seqlens_q.view_or_null();
    to.max_seqlen_q = op.max_seqlen_q;
    op.fill_rules(to);
    to.flags = GK_PAGED_WINDOW_RIGHT;
    if (op.allow_short) to.flags |= GK_PAGED_ALLOW_SHORT;
    if (op.batch_invariant) to.flags |= GK_PAGED_BATCH_INVARIANT;
    static const char *const formats[] = {"none", "fp8_656"};
    if (parse_word(O::name, "latent_format", op.latent_format, formats))
        to.flags |= GK_PAGED_LATENT_FP8;
}

struct PagedAttn {
    Tensor q;                // [T, Hq, D]
    Tensor k_cache, v_cache; // [num_blocks, block_size, Hkv, D], [..., Dv]
    Tensor block_table;      // [B, max_blocks] int32
    Tensor seq_lens;         // [B] int32
    OptTensor cu_seqlens_q;  // [B+1] int32
    int64_t max_seqlen_q;
    GK_RULES(paged_attn)

    GK_OP(paged_attn, gk_paged_attn_args, "paged_attn", 2)
    GK_TENSORS_AND_RULES(paged_attn, q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q)

    void fill(C &to) { fill_paged(*this, to); }
    static void place(C &to, Results &r) {
        to.out = r[0].view;
        if (r[1]) to.lse = r[1].view;
    }
    static constexpr bool runs_empty = true; // a GPU checks tables and lengths even without tokens
};

// run.h sets `size` of every argument struct. This one has none, because csrc reads fwd.size.
struct PagedMaskedArgs : gk_paged_attn_masked_args {
    size_t size;
};

struct PagedAttnMasked {
    Tensor q; // as in PagedAttn
    Tensor k_cache, v_cache;
    Tensor block_table;
    Tensor seq_lens;
    Tensor attn_mask; // [T, S] or [B, S, S] uint8
    OptTensor cu_seqlens_q;
    int64_t max_seqlen_q;
    GK_RULES(paged_attn)

    GK_OP_OF_MEMBER(fwd, paged_attn, PagedMaskedArgs, "paged_attn", 2)
    GK_TENSORS_AND_RULES(paged_attn, q, k_cache, v_cache, block_table, seq_lens, attn_mask,
                         cu_seqlens_q)

    void fill(C &to) {
        fill_paged(*this, to.fwd);
        to.fwd.size = sizeof(gk_paged_attn_masked_args);
        to.fwd.rules.is_causal = 0; // the mask replaces it
        to.attn_mask = &attn_mask.view;
    }
    static void place(C &to, Results &r) { PagedAttn::place(to.fwd, r); }
    static constexpr bool runs_empty = true;
};

struct KvCacheWrite {
    Tensor k, v;                    // [T, Hkv, D], [T, Hkv, Dv]
    WrittenTensor k_cache, v_cache; // [num_blocks, block_size, Hkv, D], [..., Dv]
    Tensor slots;                   // [T] int64 or int32
    OptTensor k_scale, v_scale;

    GK_OP(kv_cache_write, gk_kv_cache_write_args, "kv_cache_write", 0)
    GK_TENSORS(k, v, k_cache, v_cache, slots, k_scale, v_scale)

    void fill(C &to) {
        to.k = k.view;
        to.v = v.view;
        to.k_cache = k_cache.view;
        to.v_cache = v_cache.view;
        to.slots = slots.view;
        to.k_scale = k_scale.view_or_null();
        to.v_scale = v_scale.view_or_null();
    }
};

// Whether t shares memory with a row of the cache that the op writes. On a GPU the host does not
// know the slots, so any overlap with the cache counts.
bool overlaps_a_write(const gk_tensor &t, const Tensor &cache, const Tensor &slots) {
    if (!gk_shares_memory(&t, &cache.view)) return false;
    if (!cache.device.is_cpu()) return true;
    gk_tensor row = cache.view; // [Hkv, D]
    row.ndim = 2;
    for (int d = 0; d < 2; ++d) {
        row.shape[d] = cache.size(d + 2);
        row.stride[d] = cache.stride(d + 2);
    }
    int64_t bytes = static_cast<int64_t>(gk_dtype_bytes(row.dtype));
    for (int64_t n = 0; n < slots.size(0); ++n) {
        int64_t at = n * slots.stride(0);
        int64_t slot = slots.view.dtype == GK_I64
                           ? static_cast<const int64_t *>(slots.view.data)[at]
                           : static_cast<const int32_t *>(slots.view.data)[at];
        int64_t page = slot / cache.size(1);
        // A negative slot is not written. csrc has already refused a slot behind the cache.
        if (slot < 0 || page >= cache.size(0)) continue;
        int64_t offset = page * cache.stride(0) + slot % cache.size(1) * cache.stride(1);
        row.data = static_cast<char *>(cache.view.data) + offset * bytes;
        if (gk_shares_memory(&row, &t)) return true;
    }
    return false;
}

// Copies t if it is a view of memory that the op writes. Otherwise one token could read what
// another token has already written.
template <class O, class... Caches>
void copy_if_written(Tensor &t, const O &op, gk_tensor &to, const Caches &...caches) {
    if (!(overlaps_a_write(t.view, caches, op.slots) || ...)) return;
    copy_dense(O::name, t);
    to = t.view;
}

void kv_cache_write(KvCacheWrite &op) {
    Checked<KvCacheWrite> c(op);
    if (op.slots.numel() == 0) return;
    copy_if_written(op.k, op, c.args.k, op.k_cache, op.v_cache);
    copy_if_written(op.v, op, c.args.v, op.k_cache, op.v_cache);
    c.run();
}

struct KvCacheWriteLatent {
    Tensor c, k_pe;      // [T, 1, 512], [T, 1, 64]
    WrittenTensor cache; // [num_blocks, block_size, 1, 576], uint8 [..., 656]
    Tensor slots;        // [T] int64 or int32

    GK_OP_CHECKED_BY(kv_cache_write_latent, kv_cache_write, gk_kv_cache_write_args,
                     "kv_cache_write_latent", 0)
    GK_TENSORS(c, k_pe, cache, slots)

    void fill(C &to) {
        to.k = c.view;
        to.v = k_pe.view;
        to.k_cache = cache.view;
        to.slots = slots.view;
    }
};

void kv_cache_write_latent(KvCacheWriteLatent &op) {
    Checked<KvCacheWriteLatent> c(op);
    if (op.slots.numel() == 0) return;
    gk_latent_parts(&c.args);
    copy_if_written(op.c, op, c.args.k, op.cache);
    copy_if_written(op.k_pe, op, c.args.v, op.cache);
    c.run();
}

struct RopeKvWrite {
    Tensor q, k, v;                 // [T, Hq, D], [T, Hkv, D], [T, Hkv, Dv]
    Tensor cos, sin;                // [P, R / 2] float32
    Tensor positions;               // [T] int32 or int64
    WrittenTensor k_cache, v_cache; // [num_blocks, block_size, Hkv, D], [..., Dv]
    Tensor slots;                   // [T] int64 or int32
    OptTensor q_weight, k_weight;   // [D]
    double eps;
    bool interleaved;
    OptTensor k_scale, v_scale;

    GK_OP(rope_kv_write, gk_rope_kv_write_args, "rope_kv_write", 1)
    GK_TENSORS(q, k, v, cos, sin, positions, k_cache, v_cache, slots, q_weight, k_weight, k_scale,
               v_scale)

    void fill(C &to) {
        to.q = q.view;
        to.k = k.view;
        to.v = v.view;
        to.cos = cos.view;
        to.sin = sin.view;
        to.positions = positions.view;
        to.k_cache = k_cache.view;
        to.v_cache = v_cache.view;
        to.slots = slots.view;
        to.q_weight = q_weight.view_or_null();
        to.k_weight = k_weight.view_or_null();
        to.k_scale = k_scale.view_or_null();
        to.v_scale = v_scale.view_or_null();
        to.eps = eps;
        to.interleaved = interleaved;
    }
    static void place(C &to, Results &r) { to.out_q = r[0].view; }
};

Tensor rope_kv_write(RopeKvWrite &op) {
    Checked<RopeKvWrite> c(op);
    RopeKvWrite::Results results = {c.make(0)};
    if (op.slots.numel() == 0) return std::move(results[0]);
    RopeKvWrite::place(c.args, results);
    copy_if_written(op.q, op, c.args.q, op.k_cache, op.v_cache);
    copy_if_written(op.k, op, c.args.k, op.k_cache, op.v_cache);
    copy_if_written(op.v, op, c.args.v, op.k_cache, op.v_cache);
    c.run();
    return std::move(results[0]);
}

void implement(Library &m) {
    m.impl("paged_attn", op_first<PagedAttn>);
    m.impl("paged_attn_fwd", op_all<PagedAttn>);
    m.impl("paged_attn.out", op_out<PagedAttn>);
    m.impl("paged_attn_masked", op_first<PagedAttnMasked>);
    m.impl("paged_attn_masked_fwd", op_all<PagedAttnMasked>);
    m.impl("explain_paged_attn_masked", op_explain<PagedAttnMasked>);
    m.impl("explain_paged_attn", op_explain<PagedAttn>);
    m.impl("kv_cache_write", boxed<kv_cache_write>);
    m.impl("kv_cache_write_latent", boxed<kv_cache_write_latent>);
    m.impl("rope_kv_write", boxed<rope_kv_write>);
    m.impl("explain_rope_kv_write", op_explain<RopeKvWrite>);
}

void implement_shapes(Library &m) {
    m.impl("paged_attn_results", op_results<PagedAttn>);
    m.impl("paged_attn_masked_results", op_results<PagedAttnMasked>);
    m.impl("kv_cache_write_results", op_results<KvCacheWrite>);
    m.impl("kv_cache_write_latent_results", op_results<KvCacheWriteLatent>);
    m.impl("rope_kv_write_results", op_results<RopeKvWrite>);
}

} // namespace
} // namespace gk

GK_IMPLEMENT()
