// paged_attn.cpp: checks, results and the call of paged_attn, paged_attn_fwd and kv_cache_write.
#include "call.h"
#include "checks.h"
#include "overlap.h"

namespace gk {
namespace {

// ---- paged_attn ---------------------------------------------------------------------------------
struct PagedArgs {           // the schema, member by member
    Tensor q;                // [T, Hq, D]
    Tensor k_cache, v_cache; // [num_blocks, block_size, Hkv, D], [..., Dv]
    Tensor block_table;      // [B, max_blocks] int32
    Tensor seq_lens;         // [B] int32
    OptTensor cu_seqlens_q;  // [B+1] int32
    int64_t max_seqlen_q;
    OptDouble scale;
    int64_t window_left;
    double softcap;
    OptTensor alibi_slopes, sinks, k_scale, v_scale; // [Hq] or [B, Hq], [Hq], [] or [Hkv]
    bool is_causal;
    OptTensor kv_start; // [B] int32
    int64_t window_right;
    bool allow_short;
};

constexpr const char *kOp = "paged_attn";

// k_cache and v_cache, of an op whose `first` argument sets dtype and device.
void check_caches(const char *op, const Tensor &first, Tensor &k_cache, Tensor &v_cache, bool writable) {
    k_cache.read(op, "k_cache", writable);
    check_same_device(op, k_cache, first);
    check_same_dtype(op, k_cache, first);
    check_ndim(op, k_cache, 4, "[num_blocks, block_size, Hkv, D]");
    check_same(op, k_cache, "head_dim", k_cache.size(3), first, first.size(2));
    if (k_cache.size(1) < 1) bad_argument(op, "k_cache has block_size 0; it must be 1 or more");
    v_cache.read(op, "v_cache", writable);
    check_same_device(op, v_cache, first);
    check_same_dtype(op, v_cache, first);
    check_ndim(op, v_cache, 4, "[num_blocks, block_size, Hkv, Dv]");
    check_same(op, v_cache, "num_blocks", v_cache.size(0), k_cache, k_cache.size(0));
    check_same(op, v_cache, "block_size", v_cache.size(1), k_cache, k_cache.size(1));
    check_same(op, v_cache, "heads", v_cache.size(2), k_cache, k_cache.size(2));
    check_head_dim(op, v_cache, v_cache.size(3));
}

// [] or [Hkv] float32 (float64 where q is)
const gk_tensor *check_scale(const char *op, OptTensor &t, const char *name, const Tensor &first, int64_t heads_kv) {
    if (!t) return nullptr;
    t.read(op, name);
    check_same_device(op, t, first);
    check_dtype(op, t, wide_dtype(first));
    if (t.view.ndim == 0) return &t.view;
    if (t.view.ndim != 1 || t.size(0) != heads_kv) {
        std::string got = t.view.ndim > GK_MAX_DIMS ? std::to_string(t.view.ndim) + " dimensions" : shape_text(t);
        bad_argument(op, name, " must have shape [] or ", shape_text(Shape{1, {heads_kv}}), ", got ", got);
    }
    return &t.view;
}

gk_paged_attn_args check(PagedArgs &x) {
    gk_paged_attn_args args{};
    args.size = sizeof args;
    x.q.read(kOp, "q");
    check_float(kOp, x.q);
    check_ndim(kOp, x.q, 3, "[T, Hq, D]");
    check_head_dim(kOp, x.q, x.q.size(2));
    check_caches(kOp, x.q, x.k_cache, x.v_cache, false);
    int64_t tokens = x.q.size(0), heads_q = x.q.size(1), heads_kv = x.k_cache.size(2);
    check_head_ratio(kOp, x.q, heads_q, x.k_cache, heads_kv);

    x.block_table.read(kOp, "block_table");
    check_same_device(kOp, x.block_table, x.q);
    check_dtype(kOp, x.block_table, GK_I32);
    check_ndim(kOp, x.block_table, 2, "[B, max_blocks]");
    int64_t batch = x.block_table.size(0);
    check_index(kOp, x.seq_lens, "seq_lens", x.q, batch);
    if (x.cu_seqlens_q) {
        check_index(kOp, x.cu_seqlens_q, "cu_seqlens_q", x.q, batch + 1);
        check_not_negative(kOp, "max_seqlen_q", x.max_seqlen_q);
        args.cu_seqlens_q = &x.cu_seqlens_q.view;
        args.max_seqlen_q = x.max_seqlen_q;
    } else if (batch == 0 ? tokens != 0 : tokens % batch != 0) {
        bad_argument(kOp, "q has ", tokens, " tokens, block_table has ", batch,
                     " sequences; without cu_seqlens_q the tokens must be a multiple of them");
    }
    args.rules = check_rules(kOp, x.q, batch, heads_q, x.is_causal, x.scale, x.window_left, x.window_right, x.softcap,
                             x.alibi_slopes, x.sinks);
    args.k_scale = check_scale(kOp, x.k_scale, "k_scale", x.q, heads_kv);
    args.v_scale = check_scale(kOp, x.v_scale, "v_scale", x.q, heads_kv);
    if (x.kv_start) {
        check_index(kOp, x.kv_start, "kv_start", x.q, batch);
        args.rules.kv_start = &x.kv_start.view;
    }
    args.flags = GK_PAGED_WINDOW_RIGHT | (x.allow_short ? GK_PAGED_ALLOW_SHORT : 0u);
    if (x.allow_short && !x.q.device.is_cpu() && !x.is_causal && x.window_right != 0) {
        bad_argument(kOp, "allow_short on CUDA is served with is_causal or a window_right of 0");
    }
    args.block_table = x.block_table.view;
    args.seq_lens = x.seq_lens.view;
    return args;
}

Shape out_shape(const PagedArgs &x) { return {3, {x.q.size(0), x.q.size(1), x.v_cache.size(3)}}; }
Shape lse_shape(const PagedArgs &x) { return {2, {x.q.size(0), x.q.size(1)}}; }

void fill_inputs(PagedArgs &x, const Tensor &out, gk_paged_attn_args *args) {
    make_last_dense(kOp, x.q);
    make_last_dense(kOp, x.k_cache);
    make_last_dense(kOp, x.v_cache);
    args->q = x.q.view;
    args->k_cache = x.k_cache.view;
    args->v_cache = x.v_cache.view;
    args->out = out.view;
}

// lse NULL: the caller does not want it. The contents of tables and lengths count even where there
// are no tokens, so csrc is always asked.
void run(PagedArgs &x, gk_paged_attn_args *args, const Tensor &out, const Tensor *lse) {
    fill_inputs(x, out, args);
    if (lse) args->lse = lse->view;
    Call call(kOp, x.q);
    call.plan_and_run(x.q, *args, gk_plan_paged_attn, gk_run_paged_attn);
}

Both paged_attn(PagedArgs &x, bool all, Tensor *into) {
    gk_paged_attn_args args = check(x);
    Tensor out = result(kOp, into, out_shape(x), x.q.dtype, x.q,
                        {&x.q, &x.k_cache, &x.v_cache, &x.block_table, &x.seq_lens, &x.cu_seqlens_q, &x.alibi_slopes,
                         &x.sinks, &x.k_scale, &x.v_scale, &x.kv_start});
    Tensor lse;
    if (all) lse = empty(kOp, lse_shape(x), dtype_of(wide_dtype(x.q)), x.q.device);
    run(x, &args, out, all ? &lse : nullptr);
    return {std::move(out), std::move(lse)};
}

std::string explain_paged_attn(PagedArgs &x) {
    gk_paged_attn_args args = check(x);
    Tensor out = empty(kOp, out_shape(x), x.q.dtype, x.q.device);
    Tensor lse = empty(kOp, lse_shape(x), dtype_of(wide_dtype(x.q)), x.q.device);
    fill_inputs(x, out, &args);
    args.lse = lse.view;
    gk_explanation explanation{};
    explanation.size = sizeof explanation;
    Call call(kOp, x.q, described_gpu);
    call.done(gk_explain_paged_attn(call.context(), &args, &explanation));
    return to_json(explanation);
}

// ---- kv_cache_write -----------------------------------------------------------------------------
struct WriteArgs {
    Tensor k, v;             // [T, Hkv, D], [T, Hkv, Dv]
    Tensor k_cache, v_cache; // [num_blocks, block_size, Hkv, D], [..., Dv]; written
    Tensor slots;            // [T] int64 or int32
    OptTensor k_scale, v_scale;
};

// Whether t shares memory with a row of the cache that is written. On a GPU only the device knows which rows are.
bool meets_a_write(const gk_tensor &t, const Tensor &cache, const Tensor &slots) {
    if (!shares_memory(t, cache.view)) return false;
    if (!cache.device.is_cpu()) return true;
    gk_tensor row = cache.view; // [Hkv, D]
    row.ndim = 2;
    for (int d = 0; d < 2; ++d) row.shape[d] = cache.size(d + 2), row.stride[d] = cache.stride(d + 2);
    int64_t bytes = static_cast<int64_t>(gk_dtype_bytes(row.dtype));
    for (int64_t n = 0; n < slots.size(0); ++n) {
        int64_t at = n * slots.stride(0);
        int64_t slot = slots.view.dtype == GK_I64 ? static_cast<const int64_t *>(slots.view.data)[at]
                                                  : static_cast<const int32_t *>(slots.view.data)[at];
        int64_t page = slot / cache.size(1);
        if (slot < 0 || page >= cache.size(0)) continue; // skipped, refused
        int64_t offset = page * cache.stride(0) + slot % cache.size(1) * cache.stride(1);
        row.data = static_cast<char *>(cache.view.data) + offset * bytes;
        if (shares_memory(row, t)) return true;
    }
    return false;
}

// k and v may be views of the caches; a token must not meet what another has written, so they are read in full first.
void read_first(const char *op, Tensor &t, const WriteArgs &x) {
    if (meets_a_write(t.view, x.k_cache, x.slots) || meets_a_write(t.view, x.v_cache, x.slots)) copy_dense(op, t);
}

void check_apart(const char *op, const Tensor &t, const Tensor &cache) {
    if (!t || !shares_memory(t.view, cache.view)) return;
    bad_argument(op, t.name, " shares memory with ", cache.name, "; it must not, since ", cache.name, " is written");
}

void check_written_once(const char *op, const Tensor &cache) {
    for (int d = 0; d < cache.view.ndim; ++d) {
        if (cache.size(d) > 1 && cache.stride(d) == 0) {
            bad_argument(op, cache.name, " has stride 0 in dimension ", d, "; its elements must not share memory");
        }
    }
}

void kv_cache_write(WriteArgs &x) {
    const char *op = "kv_cache_write";
    gk_kv_cache_write_args args{};
    args.size = sizeof args;
    x.k.read(op, "k");
    check_float(op, x.k);
    check_ndim(op, x.k, 3, "[T, Hkv, D]");
    int64_t tokens = x.k.size(0), heads_kv = x.k.size(1);
    check_head_dim(op, x.k, x.k.size(2));
    x.v.read(op, "v");
    check_same_device(op, x.v, x.k);
    check_same_dtype(op, x.v, x.k);
    check_ndim(op, x.v, 3, "[T, Hkv, Dv]");
    check_same(op, x.v, "tokens", x.v.size(0), x.k, tokens);
    check_same(op, x.v, "heads", x.v.size(1), x.k, heads_kv);
    check_caches(op, x.k, x.k_cache, x.v_cache, true);
    check_same(op, x.k_cache, "heads", x.k_cache.size(2), x.k, heads_kv);
    check_same(op, x.v_cache, "head_dim", x.v_cache.size(3), x.v, x.v.size(2));
    check_written_once(op, x.k_cache);
    check_written_once(op, x.v_cache);
    if (shares_memory(x.k_cache.view, x.v_cache.view)) {
        bad_argument(op, "v_cache overlaps k_cache; they may be views of one tensor but must not "
                         "share memory");
    }
    x.slots.read(op, "slots");
    check_same_device(op, x.slots, x.k);
    if (x.slots.dtype->gk != GK_I32 && x.slots.dtype->gk != GK_I64) {
        bad_argument(op, "slots must be int64 or int32, got ", x.slots.dtype->name);
    }
    check_shape(op, x.slots, Shape{1, {tokens}});
    args.k_scale = check_scale(op, x.k_scale, "k_scale", x.k, heads_kv);
    args.v_scale = check_scale(op, x.v_scale, "v_scale", x.k, heads_kv);
    for (const Tensor *cache : {&x.k_cache, &x.v_cache}) {
        check_apart(op, x.slots, *cache);
        check_apart(op, x.k_scale, *cache);
        check_apart(op, x.v_scale, *cache);
    }
    if (tokens == 0) return;

    read_first(op, x.k, x);
    read_first(op, x.v, x);
    args.k = x.k.view;
    args.v = x.v.view;
    args.k_cache = x.k_cache.view;
    args.v_cache = x.v_cache.view;
    args.slots = x.slots.view;
    Call call(op, x.k);
    call.done(gk_kv_cache_write(call.context(), &args));
}

void implement(Library &m) {
    impl_op<paged_attn>(m, "paged_attn");
    impl_out<paged_attn>(m, "paged_attn");
    m.impl("explain_paged_attn", boxed<explain_paged_attn>);
    m.impl("kv_cache_write", boxed<kv_cache_write>);
}

} // namespace
} // namespace gk

STABLE_TORCH_LIBRARY_IMPL(GPUKERN_NAMESPACE, CPU, m) { gk::implement(m); }
#ifdef GPUKERN_HAS_CUDA
STABLE_TORCH_LIBRARY_IMPL(GPUKERN_NAMESPACE, CUDA, m) { gk::implement(m); }
#endif
