// SPDX-License-Identifier: BSD-3-Clause
// rows.cpp: ops along the last dimension: norms, softmax, gated linear units, rotary embedding and
// cross entropy, with their gradients.
#include "gpukern_train.h"
#include "run.h"

namespace gk {
namespace {

// ---- norms --------------------------------------------------------------------------------------
template <gk_norm_kind KIND> struct Norm {
    Tensor x;               // [..., N]
    OptTensor weight, bias; // [N]
    OptTensor residual;     // like x
    double eps;
    double weight_offset;

    GK_OP(norm_fwd, gk_norm_args, KIND == GK_RMS_NORM ? "rms_norm" : "layer_norm", 2)
    GK_TENSORS(x, weight, bias, residual)

    void fill(C &to) {
        to.kind = KIND;
        to.x = x.view;
        to.weight = weight.view_or_null();
        to.bias = bias.view_or_null();
        to.residual = residual.view_or_null();
        to.eps = eps;
        to.weight_offset = weight_offset;
    }
    // (out, sum); sum is empty without a residual
    static void place(C &to, Results &r) {
        to.out = r[0].view;
        if (to.residual) to.sum = &r[1].view;
    }
};

template <gk_norm_kind KIND> struct NormBwd {
    Tensor grad_out, h; // [..., N]
    OptTensor weight, grad_sum;
    double eps, weight_offset;
    bool need_weight, need_bias;
    bool wide_bias; // dbias is float32 although h has 16 bits, because the bias is float32

    GK_OP(norm_bwd, gk_norm_bwd_args, KIND == GK_RMS_NORM ? "rms_norm_bwd" : "layer_norm_bwd", 3)
    GK_TENSORS(grad_out, h, weight, grad_sum)

    void fill(C &to) {
        to.kind = KIND;
        to.grad_out = grad_out.view;
        to.h = h.view;
        to.weight = weight.view_or_null();
        to.grad_sum = grad_sum.view_or_null();
        to.eps = eps;
        to.weight_offset = weight_offset;
        // csrc's check reads only the dtypes of dweight and dbias; place() sets the results
        static const gk_tensor float32 = [] {
            gk_tensor form = {};
            form.dtype = GK_F32;
            return form;
        }();
        if (need_weight) to.dweight = weight ? &weight.view : &h.view;
        if (need_bias) to.dbias = wide_bias ? &float32 : &h.view;
    }
    // (dx, dweight, dbias); dweight and dbias are empty if not needed
    static void place(C &to, Results &r) {
        to.dx = r[0].view;
        if (to.dweight) to.dweight = &r[1].view;
        if (to.dbias) to.dbias = &r[2].view;
    }
    static constexpr bool runs_empty = true; // without rows, dweight and dbias must be set to 0
};

// ---- softmax ------------------------------------------------------------------------------------
template <bool LOG> struct Softmax {
    Tensor x; // [..., N]
    double scale;
    OptTensor lengths; // [...] int32

    GK_OP(softmax_fwd, gk_softmax_args, LOG ? "log_softmax" : "softmax", 1)
    GK_TENSORS(x, lengths)

    void fill(C &to) {
        to.x = x.view;
        to.lengths = lengths.view_or_null();
        to.scale = scale;
        to.log = LOG;
    }
    static void place(C &to, Results &r) { to.out = r[0].view; }
};

template <bool LOG> struct SoftmaxBwd {
    Tensor grad_out, out; // [..., N]
    double scale;
    OptTensor lengths;

    GK_OP(softmax_bwd, gk_softmax_bwd_args, LOG ? "log_softmax_bwd" : "softmax_bwd", 1)
    GK_TENSORS(grad_out, out, lengths)

    void fill(C &to) {
        to.grad_out = grad_out.view;
        to.out = out.view;
        to.lengths = lengths.view_or_null();
        to.scale = scale;
        to.log = LOG;
    }
    static void place(C &to, Results &r) { to.dx = r[0].view; }
};

// ---- gated linear units -------------------------------------------------------------------------
struct Swiglu {
    Tensor gate;  // [..., N], or [..., 2 N] without up
    OptTensor up; // [..., N]

    GK_OP(glu_fwd, gk_glu_args, "swiglu", 1)
    GK_TENSORS(gate, up)

    void fill(C &to) {
        to.gate = gate.view;
        to.up = up.view_or_null();
        to.activation = GK_ACT_SILU;
    }
    static void place(C &to, Results &r) { to.out = r[0].view; }
};

gk_activation parse_gelu(std::string_view approximate) {
    if (approximate == "none") return GK_ACT_GELU;
    if (approximate == "tanh") return GK_ACT_GELU_TANH;
    bad_argument("geglu", "approximate must be none or tanh, got '", approximate, "'");
}

struct Geglu {
    Tensor gate;
    OptTensor up;
    String approximate;

    GK_OP(glu_fwd, gk_glu_args, "geglu", 1)
    GK_TENSORS(gate, up)

    void fill(C &to) {
        to.gate = gate.view;
        to.up = up.view_or_null();
        to.activation = parse_gelu(approximate);
    }
    static void place(C &to, Results &r) { to.out = r[0].view; }
};

// The gradient of swiglu if `approximate` is empty, otherwise of geglu.
struct GluBwd {
    Tensor grad_out, gate;
    OptTensor up;
    String approximate;

    GK_OP(glu_bwd, gk_glu_bwd_args, "glu_bwd", 2)
    GK_TENSORS(grad_out, gate, up)

    void fill(C &to) {
        to.grad_out = grad_out.view;
        to.gate = gate.view;
        to.up = up.view_or_null();
        const std::string_view text = approximate;
        to.activation = text.empty() ? GK_ACT_SILU : parse_gelu(text);
    }
    // (dgate, dup); dup is empty without up
    static void place(C &to, Results &r) {
        to.dgate = r[0].view;
        if (to.up) to.dup = &r[1].view;
    }
};

// ---- rotary embedding ---------------------------------------------------------------------------
struct Rope {
    Tensor q;            // [B, Hq, S, D] or [T, Hq, D]
    OptTensor k;         // [B, Hkv, S, D] or [T, Hkv, D]
    Tensor cos, sin;     // [P, R / 2] float32
    OptTensor positions; // [S], [B, S] or [T]
    bool interleaved, inverse;

    GK_OP(rope, gk_rope_args, "rope", 2)
    GK_TENSORS(q, k, cos, sin, positions)

    void fill(C &to) {
        to.q = q.view;
        to.k = k.view_or_null();
        to.cos = cos.view;
        to.sin = sin.view;
        to.positions = positions.view_or_null();
        to.interleaved = interleaved;
        to.inverse = inverse;
    }
    // (out_q, out_k); out_k is empty without k
    static void place(C &to, Results &r) {
        to.out_q = r[0].view;
        if (to.k) to.out_k = &r[1].view;
    }
    const Tensor *stored_like(int i) const { return i ? &k : &q; }
    static constexpr bool runs_empty = true; // k may have elements although q has none
};

// ---- cross entropy ------------------------------------------------------------------------------
// An argument struct of csrc without `size`, whose first member is an argument struct with `size`
// (gpukern_train.h). run.h sets `size` of every argument struct; csrc reads that of the member.
template <class A> struct WithSize : A {
    size_t size;
};

template <class O> void fill_loss(const O &op, gk_cross_entropy_args &to, size_t size) {
    to.size = size;
    to.logits = op.logits.view;
    to.target = op.target.view;
    to.weight = op.weight.view_or_null();
    to.ignore_index = op.ignore_index;
    to.label_smoothing = op.label_smoothing;
    to.softcap = op.softcap;
    to.logit_scale = op.logit_scale;
}

struct CrossEntropy {
    Tensor logits;    // [..., V]
    Tensor target;    // [...] int64
    OptTensor weight; // [V]
    int64_t ignore_index;
    double label_smoothing, softcap, logit_scale, z_loss;

    GK_OP_OF_MEMBER(fwd, cross_entropy_fwd, WithSize<gk_cross_entropy_more_args>, "cross_entropy",
                    2)
    GK_TENSORS(logits, target, weight)

    void fill(C &to) {
        fill_loss(*this, to.fwd, sizeof(gk_cross_entropy_more_args));
        to.z_loss = z_loss;
    }
    // (loss, lse) of each row
    static void place(C &to, Results &r) {
        to.fwd.loss = r[0].view;
        to.fwd.lse = r[1].view;
    }
};

// Writes the losses and the gradient of their sum into the caller's tensors. dlogits may be the
// same tensor as logits.
struct CrossEntropyGrad {
    Tensor logits, target;            // [..., V], [...]
    WrittenTensor loss, lse, dlogits; // [...], [...], [..., V]
    OptTensor weight;
    int64_t ignore_index;
    double label_smoothing, softcap, logit_scale, z_loss;

    GK_OP_OF_MEMBER(fwd, cross_entropy_fwd, WithSize<gk_cross_entropy_more_args>,
                    "cross_entropy_grad", 0)
    GK_TENSORS(logits, target, loss, lse, dlogits, weight)

    void fill(C &to) {
        fill_loss(*this, to.fwd, sizeof(gk_cross_entropy_more_args));
        to.fwd.loss = loss.view;
        to.fwd.lse = lse.view;
        to.dlogits = &dlogits.view;
        to.z_loss = z_loss;
    }
};

void cross_entropy_grad(CrossEntropyGrad &op) {
    Checked<CrossEntropyGrad> c(op);
    for (int i = 0; i < c.io.num_results; ++i) {
        c.call.done(gk_check_given(&c.io, i));
        c.call.done(gk_check_apart(&c.io, i));
    }
    if (gk_shares_memory(&op.loss.view, &op.lse.view))
        bad_argument(CrossEntropyGrad::name, "lse shares memory with loss; it must not");
    for (const Tensor *t : {&op.loss, &op.lse})
        if (gk_shares_memory(&t->view, &op.dlogits.view))
            bad_argument(CrossEntropyGrad::name,
                         "dlogits shares memory with loss or lse; it must not");
    if (op.logits.numel() > 0) c.run();
}

struct CrossEntropyBwd {
    Tensor grad_loss, logits, target, lse; // [...], [..., V], [...], [...]
    OptTensor weight;
    int64_t ignore_index;
    double label_smoothing, softcap, logit_scale, z_loss;
    int64_t first_class, num_classes;

    GK_OP_OF_MEMBER(bwd, cross_entropy_bwd, WithSize<gk_cross_entropy_bwd_more_args>,
                    "cross_entropy_bwd", 1)
    GK_TENSORS(grad_loss, logits, target, lse, weight)

    void fill(C &to) {
        to.bwd.size = sizeof(gk_cross_entropy_bwd_more_args);
        fill_loss(*this, to.bwd.fwd, sizeof to.bwd.fwd);
        to.bwd.grad_loss = grad_loss.view;
        to.bwd.fwd.lse = lse.view;
        to.z_loss = z_loss;
        to.first_class = first_class;
        to.num_classes = num_classes;
    }
    static void place(C &to, Results &r) { to.bwd.dlogits = r[0].view; }
};

// Writes into the caller's tensor. Its dtype is the gradient's: float32 logits allow a 16-bit one.
struct CrossEntropyBwdInto : CrossEntropyBwd {
    gk_dtype dtype;

    void fill(C &to) {
        CrossEntropyBwd::fill(to);
        to.bwd.dlogits.dtype = dtype;
    }
};

void cross_entropy_bwd_out(StableIValue *stack, uint64_t num_args, uint64_t) {
    CrossEntropyBwdInto op{read_args<CrossEntropyBwd>(stack, num_args - 1), GK_F32};
    Tensor into = Slot{stack[num_args - 1]};
    if (into.is_strided(op.name)) {
        into.read_form(op.name);
        op.dtype = into.view.dtype;
    }
    run_op(op, 1, into);
}

// X(name, op). Forward ops also have an explain.
#define FORWARD(X)                       \
    X("rms_norm", Norm<GK_RMS_NORM>)     \
    X("layer_norm", Norm<GK_LAYER_NORM>) \
    X("softmax", Softmax<false>)         \
    X("log_softmax", Softmax<true>)      \
    X("swiglu", Swiglu)                  \
    X("geglu", Geglu)                    \
    X("rope", Rope)                      \
    X("cross_entropy", CrossEntropy)
#define BACKWARD(X)                             \
    X("rms_norm_bwd", NormBwd<GK_RMS_NORM>)     \
    X("layer_norm_bwd", NormBwd<GK_LAYER_NORM>) \
    X("softmax_bwd", SoftmaxBwd<false>)         \
    X("log_softmax_bwd", SoftmaxBwd<true>)      \
    X("glu_bwd", GluBwd)                        \
    X("cross_entropy_bwd", CrossEntropyBwd)

void implement(Library &m) {
    FORWARD(GK_OP_RUN)
    BACKWARD(GK_OP_RUN)
    FORWARD(GK_OP_EXPLAIN) m.impl("cross_entropy_bwd.out", cross_entropy_bwd_out);
    m.impl("cross_entropy_grad", boxed<cross_entropy_grad>);
}

void implement_shapes(Library &m) {
    FORWARD(GK_OP_RESULTS)
    BACKWARD(GK_OP_RESULTS) m.impl("cross_entropy_grad_results", op_results<CrossEntropyGrad>);
}

} // namespace
} // namespace gk

GK_IMPLEMENT()
