// flash_attn.cpp: checks, results and the call of flash_attn, flash_attn_varlen, their parts, and
// attn_merge.
#include "call.h"
#include "checks.h"
#include "overlap.h"

namespace gk {
namespace {

// ---- arguments: the schemas, member by member ---------------------------------------------------
struct DenseArgs {
    Tensor q, k, v; // [B, Hq, Sq, D], [B, Hkv, Sk, D], [B, Hkv, Sk, Dv]
    bool is_causal;
    OptDouble scale;
    int64_t diagonal, window_left, window_right;
    double softcap;
    OptTensor alibi_slopes, sinks; // [Hq] or [B, Hq], [Hq]
    OptTensor kv_start, kv_end;    // [B] int32
    OptTensor q_start;             // [B] int32
};

struct DenseBwdArgs {
    Tensor grad_out, q, k, v, out, lse; // grad_out like out [B, Hq, Sq, Dv]; lse [B, Hq, Sq]
    OptTensor grad_lse;                 // like lse
    bool is_causal;
    OptDouble scale;
    int64_t diagonal, window_left, window_right;
    double softcap;
    OptTensor alibi_slopes, sinks, kv_start, kv_end, q_start;
    bool deterministic;
};

struct PackedArgs {
    Tensor q, k, v;                    // [Tq, Hq, D], [Tk, Hkv, D], [Tk, Hkv, Dv]
    Tensor cu_seqlens_q, cu_seqlens_k; // [B+1] int32
    int64_t max_seqlen_q, max_seqlen_k;
    bool is_causal;
    OptDouble scale;
    int64_t window_left, window_right;
    double softcap;
    OptTensor alibi_slopes, sinks;
};

struct PackedBwdArgs {
    Tensor grad_out, q, k, v, out, lse; // grad_out like out [Tq, Hq, Dv]; lse [Tq, Hq]
    Tensor cu_seqlens_q, cu_seqlens_k;
    int64_t max_seqlen_q, max_seqlen_k;
    OptTensor grad_lse;
    bool is_causal;
    OptDouble scale;
    int64_t window_left, window_right;
    double softcap;
    OptTensor alibi_slopes, sinks;
    bool deterministic;
};

// ---- checks -------------------------------------------------------------------------------------
// Dense and packed differ in the place of the dimensions.
struct Places {
    int ndim, heads, tokens;
    const char *q, *k, *v;
};
constexpr Places kDense = {4, 1, 2, "[B, Hq, Sq, D]", "[B, Hkv, Sk, D]", "[B, Hkv, Sk, Dv]"};
constexpr Places kPacked = {3, 1, 0, "[Tq, Hq, D]", "[Tk, Hkv, D]", "[Tk, Hkv, Dv]"};

void check_q(const char *op, const Places &at, Tensor &q) {
    q.read(op, "q");
    check_float(op, q);
    check_ndim(op, q, at.ndim, at.q);
    check_head_dim(op, q, q.size(q.last()));
}

// Only dense tensors have a batch dimension to compare.
void check_k_v(const char *op, const Places &at, const Tensor &q, Tensor &k, Tensor &v) {
    k.read(op, "k");
    check_same_device(op, k, q);
    check_same_dtype(op, k, q);
    check_ndim(op, k, at.ndim, at.k);
    if (at.ndim == 4) check_same(op, k, "batch size", k.size(0), q, q.size(0));
    check_head_ratio(op, q, q.size(at.heads), k, k.size(at.heads));
    check_same(op, k, "head_dim", k.size(k.last()), q, q.size(q.last()));
    v.read(op, "v");
    check_same_device(op, v, q);
    check_same_dtype(op, v, q);
    check_ndim(op, v, at.ndim, at.v);
    if (at.ndim == 4) check_same(op, v, "batch size", v.size(0), k, k.size(0));
    check_same(op, v, "heads", v.size(at.heads), k, k.size(at.heads));
    check_same(op, v, "length", v.size(at.tokens), k, k.size(at.tokens));
    check_head_dim(op, v, v.size(v.last()));
}

// From cu_seqlens_q to max_seqlen_k; the batch size is cu_seqlens_q's.
template <class Args> int64_t check_lengths(const char *op, Args &x) {
    x.cu_seqlens_q.read(op, "cu_seqlens_q");
    check_same_device(op, x.cu_seqlens_q, x.q);
    check_dtype(op, x.cu_seqlens_q, GK_I32);
    check_ndim(op, x.cu_seqlens_q, 1, "[B+1]");
    int64_t batch = x.cu_seqlens_q.size(0) - 1;
    if (batch < 0) bad_argument(op, "cu_seqlens_q must have at least 1 element, got 0");
    check_index(op, x.cu_seqlens_k, "cu_seqlens_k", x.q, batch + 1);
    check_not_negative(op, "max_seqlen_q", x.max_seqlen_q);
    check_not_negative(op, "max_seqlen_k", x.max_seqlen_k);
    return batch;
}

template <class Args> gk_attn_rules check_dense_rules(const char *op, Args &x) {
    int64_t batch = x.q.size(0);
    gk_attn_rules rules = check_rules(op, x.q, batch, x.q.size(1), x.is_causal, x.scale, x.window_left, x.window_right,
                                      x.softcap, x.alibi_slopes, x.sinks);
    rules.diagonal = x.diagonal;
    if (x.kv_start) {
        check_index(op, x.kv_start, "kv_start", x.q, batch);
        rules.kv_start = &x.kv_start.view;
    }
    if (x.kv_end) {
        check_index(op, x.kv_end, "kv_end", x.q, batch);
        rules.kv_end = &x.kv_end.view;
    }
    if (x.q_start) {
        check_index(op, x.q_start, "q_start", x.q, batch);
        if (x.diagonal != 0) bad_argument(op, "diagonal must be 0 where q_start is given, got ", x.diagonal);
        rules.q_start = &x.q_start.view;
    }
    return rules;
}

template <class Args> gk_attn_rules check_packed_rules(const char *op, Args &x, int64_t batch) {
    return check_rules(op, x.q, batch, x.q.size(1), x.is_causal, x.scale, x.window_left, x.window_right, x.softcap,
                       x.alibi_slopes, x.sinks);
}

// grad_out before q, as the schema has it; its shape follows from q and v and is checked after
// them.
void check_grad_out(const char *op, Tensor &grad_out) {
    grad_out.read(op, "grad_out");
    check_float(op, grad_out);
}

Shape out_shape(const Tensor &q, const Tensor &v) {
    Shape shape = shape_of(q);
    shape.size[shape.ndim - 1] = v.size(v.last());
    return shape;
}

Shape lse_shape(const Tensor &q) {
    Shape shape = shape_of(q);
    --shape.ndim;
    return shape;
}

void check_out_lse(const char *op, const Tensor &q, const Tensor &v, Tensor &grad_out, Tensor &out, Tensor &lse) {
    check_same_device(op, grad_out, q);
    check_same_dtype(op, grad_out, q);
    check_shape(op, grad_out, out_shape(q, v));
    check_tensor(op, out, "out", q, static_cast<gk_dtype>(q.dtype->gk), out_shape(q, v));
    check_tensor(op, lse, "lse", q, wide_dtype(q), lse_shape(q));
}

// ---- results ------------------------------------------------------------------------------------
// A dense result is stored [B, S, H, D] if the input that it follows is.
bool tokens_first(const Tensor &t) { return t.view.ndim == 4 && t.stride(1) < t.stride(2); }

Tensor like(const char *op, const Tensor &t) { return empty(op, shape_of(t), t.dtype, t.device, tokens_first(t)); }

Tensor make_out(const char *op, const Tensor &q, const Tensor &v) {
    return empty(op, out_shape(q, v), q.dtype, q.device, tokens_first(q));
}

Tensor make_lse(const char *op, const Tensor &q) { return empty(op, lse_shape(q), dtype_of(wide_dtype(q)), q.device); }

// ---- forward ------------------------------------------------------------------------------------
// A checked call.
struct Problem {
    const char *op;
    Tensor *q, *k, *v;
    gk_flash_attn_args args;
};

constexpr const char *kDenseOp = "flash_attn";
constexpr const char *kPackedOp = "flash_attn_varlen";

Problem check(DenseArgs &x) {
    Problem p{kDenseOp, &x.q, &x.k, &x.v, {}};
    p.args.size = sizeof p.args;
    check_q(p.op, kDense, x.q);
    check_k_v(p.op, kDense, x.q, x.k, x.v);
    p.args.rules = check_dense_rules(p.op, x);
    return p;
}

template <class Args> void fill_lengths(Args &x, gk_flash_attn_args *args) {
    args->cu_seqlens_q = &x.cu_seqlens_q.view;
    args->cu_seqlens_k = &x.cu_seqlens_k.view;
    args->max_seqlen_q = x.max_seqlen_q;
    args->max_seqlen_k = x.max_seqlen_k;
}

Problem check(PackedArgs &x) {
    Problem p{kPackedOp, &x.q, &x.k, &x.v, {}};
    p.args.size = sizeof p.args;
    check_q(p.op, kPacked, x.q);
    check_k_v(p.op, kPacked, x.q, x.k, x.v);
    int64_t batch = check_lengths(p.op, x);
    p.args.rules = check_packed_rules(p.op, x, batch);
    fill_lengths(x, &p.args);
    return p;
}

void fill_inputs(const char *op, Tensor &q, Tensor &k, Tensor &v, gk_flash_attn_args *args) {
    make_last_dense(op, q);
    make_last_dense(op, k);
    make_last_dense(op, v);
    args->q = q.view;
    args->k = k.view;
    args->v = v.view;
}

// lse NULL: the caller does not want it.
void run(Problem &p, const Tensor &out, const Tensor *lse) {
    // Without rows there is no work; packed calls still have lengths whose contents count.
    if (out.numel() == 0 && !p.args.cu_seqlens_q) return;
    fill_inputs(p.op, *p.q, *p.k, *p.v, &p.args);
    p.args.out = out.view;
    Call call(p.op, *p.q);
    if (lse) {
        p.args.lse = lse->view;
    } else {
        gk_tensor &view = p.args.lse;
        view.dtype = wide_dtype(*p.q);
        view.ndim = p.q->view.ndim - 1;
        int64_t rows = 1;
        for (int d = view.ndim - 1; d >= 0; --d) {
            view.shape[d] = p.q->size(d);
            view.stride[d] = rows;
            rows *= p.q->size(d);
        }
    }
    call.plan_and_run(*p.q, p.args, gk_plan_flash_attn_fwd, gk_run_flash_attn_fwd);
}

template <class Args> Both forward(Args &x, bool all, Tensor *into) {
    Problem p = check(x);
    Tensor out, lse;
    if constexpr (std::is_same_v<Args, PackedArgs>) {
        out = result(p.op, into, out_shape(x.q, x.v), x.q.dtype, x.q,
                     {&x.q, &x.k, &x.v, &x.cu_seqlens_q, &x.cu_seqlens_k, &x.alibi_slopes, &x.sinks});
    } else {
        out = make_out(p.op, x.q, x.v);
    }
    if (all) lse = make_lse(p.op, x.q);
    run(p, out, all ? &lse : nullptr);
    return {std::move(out), std::move(lse)};
}

template <class Args> std::string explain(Args &x) {
    Problem p = check(x);
    Tensor out = make_out(p.op, x.q, x.v), lse = make_lse(p.op, x.q);
    fill_inputs(p.op, x.q, x.k, x.v, &p.args);
    p.args.out = out.view;
    p.args.lse = lse.view;
    gk_explanation explanation{};
    explanation.size = sizeof explanation;
    Call call(p.op, x.q, described_gpu);
    call.done(gk_explain_flash_attn_fwd(call.context(), &p.args, &explanation));
    return to_json(explanation);
}

// ---- backward -----------------------------------------------------------------------------------
// dq, dk, dv, dsinks; the last is empty where there are no sinks.
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;

gk_flash_attn_bwd_args check(const char *op, DenseBwdArgs &x) {
    gk_flash_attn_bwd_args args{};
    check_grad_out(op, x.grad_out);
    check_q(op, kDense, x.q);
    check_k_v(op, kDense, x.q, x.k, x.v);
    check_out_lse(op, x.q, x.v, x.grad_out, x.out, x.lse);
    if (x.grad_lse) {
        check_tensor(op, x.grad_lse, "grad_lse", x.q, wide_dtype(x.q), lse_shape(x.q));
    }
    args.fwd.rules = check_dense_rules(op, x);
    return args;
}

gk_flash_attn_bwd_args check(const char *op, PackedBwdArgs &x) {
    gk_flash_attn_bwd_args args{};
    check_grad_out(op, x.grad_out);
    check_q(op, kPacked, x.q);
    check_k_v(op, kPacked, x.q, x.k, x.v);
    check_out_lse(op, x.q, x.v, x.grad_out, x.out, x.lse);
    int64_t batch = check_lengths(op, x);
    if (x.grad_lse) {
        check_tensor(op, x.grad_lse, "grad_lse", x.q, wide_dtype(x.q), lse_shape(x.q));
    }
    args.fwd.rules = check_packed_rules(op, x, batch);
    fill_lengths(x, &args.fwd);
    return args;
}

template <class Args> Gradients make_gradients(const char *op, Args &x, gk_flash_attn_bwd_args *args) {
    Tensor dq = like(op, x.q), dk = like(op, x.k), dv = like(op, x.v);
    Tensor dsinks = x.sinks ? empty(op, shape_of(x.sinks), x.sinks.dtype, x.q.device)
                            : empty(op, Shape{1, {0}}, dtype_of(wide_dtype(x.q)), x.q.device);
    args->dq = dq.view;
    args->dk = dk.view;
    args->dv = dv.view;
    return {std::move(dq), std::move(dk), std::move(dv), std::move(dsinks)};
}

template <class Args>
void fill_backward(const char *op, Args &x, const Gradients &gradients, gk_flash_attn_bwd_args *args) {
    args->size = sizeof *args;
    args->fwd.size = sizeof args->fwd;
    fill_inputs(op, x.q, x.k, x.v, &args->fwd);
    make_last_dense(op, x.grad_out);
    make_last_dense(op, x.out);
    make_dense(op, x.lse);
    args->grad_out = x.grad_out.view;
    args->fwd.out = x.out.view;
    args->fwd.lse = x.lse.view;
    args->grad_lse = x.grad_lse.view_or_null();
    if (x.sinks) args->dsinks = &std::get<3>(gradients).view;
    args->deterministic = x.deterministic;
}

template <class Args> Gradients backward(const char *op, Args &x) {
    gk_flash_attn_bwd_args args = check(op, x);
    Gradients gradients = make_gradients(op, x, &args);
    // Without rows nothing depends on k, v and sinks.
    if (x.grad_out.numel() == 0 && !args.fwd.cu_seqlens_q) {
        zero(op, std::get<1>(gradients));
        zero(op, std::get<2>(gradients));
        zero(op, std::get<3>(gradients));
        return gradients;
    }
    fill_backward(op, x, gradients, &args);
    Call call(op, x.q);
    call.plan_and_run(x.q, args, gk_plan_flash_attn_bwd, gk_run_flash_attn_bwd);
    return gradients;
}

Gradients flash_attn_bwd(DenseBwdArgs &x) { return backward("flash_attn_bwd", x); }
Gradients flash_attn_varlen_bwd(PackedBwdArgs &x) { return backward("flash_attn_varlen_bwd", x); }

std::string explain_bwd(DenseBwdArgs &x) {
    const char *op = "flash_attn_bwd";
    gk_flash_attn_bwd_args args = check(op, x);
    Gradients gradients = make_gradients(op, x, &args);
    fill_backward(op, x, gradients, &args);
    gk_explanation explanation{};
    explanation.size = sizeof explanation;
    Call call(op, x.q, described_gpu);
    call.done(gk_explain_flash_attn_bwd(call.context(), &args, &explanation));
    return to_json(explanation);
}

// ---- attn_merge ---------------------------------------------------------------------------------
struct MergeArgs {
    Tensor out_a, lse_a; // [..., Dv], [...]
    Tensor out_b, lse_b;
};

Both attn_merge(MergeArgs &x) {
    const char *op = "attn_merge";
    gk_attn_merge_args args{};
    args.size = sizeof args;
    x.out_a.read(op, "out_a");
    check_float(op, x.out_a);
    check_ndim_range(op, x.out_a, 1);
    check_tensor(op, x.lse_a, "lse_a", x.out_a, wide_dtype(x.out_a), lse_shape(x.out_a));
    x.out_b.read(op, "out_b");
    check_same_device(op, x.out_b, x.out_a);
    check_same_dtype(op, x.out_b, x.out_a);
    check_shape(op, x.out_b, shape_of(x.out_a));
    check_tensor(op, x.lse_b, "lse_b", x.out_a, wide_dtype(x.out_a), lse_shape(x.out_a));

    Tensor out = empty(op, shape_of(x.out_a), x.out_a.dtype, x.out_a.device);
    Tensor lse = make_lse(op, x.out_a);
    if (lse.numel() > 0) {
        args.out_a = x.out_a.view;
        args.out_b = x.out_b.view;
        args.lse_a = x.lse_a.view;
        args.lse_b = x.lse_b.view;
        args.out = out.view;
        args.lse = lse.view;
        Call call(op, x.out_a);
        call.done(gk_attn_merge(call.context(), &args));
    }
    return {std::move(out), std::move(lse)};
}

void implement(Library &m) {
    impl_op<forward<DenseArgs>>(m, "flash_attn");
    m.impl("flash_attn_bwd", boxed<flash_attn_bwd>);
    m.impl("explain_flash_attn", boxed<explain<DenseArgs>>);
    m.impl("explain_flash_attn_bwd", boxed<explain_bwd>);
    impl_op<forward<PackedArgs>>(m, "flash_attn_varlen");
    impl_out<forward<PackedArgs>>(m, "flash_attn_varlen");
    m.impl("flash_attn_varlen_bwd", boxed<flash_attn_varlen_bwd>);
    m.impl("explain_flash_attn_varlen", boxed<explain<PackedArgs>>);
    m.impl("attn_merge", boxed<attn_merge>);
}

} // namespace
} // namespace gk

STABLE_TORCH_LIBRARY_IMPL(GPUKERN_NAMESPACE, CPU, m) { gk::implement(m); }
#ifdef GPUKERN_HAS_CUDA
STABLE_TORCH_LIBRARY_IMPL(GPUKERN_NAMESPACE, CUDA, m) { gk::implement(m); }
#endif
