// gemm.cpp: checks, results and the call of gemm, gemm_fwd and gemm_act_bwd.
#include "call.h"
#include "checks.h"
#include "overlap.h"

namespace gk {
namespace {

struct GemmArgs {   // the schema, member by member
    Tensor a, b;    // [batch..., M, K], [batch..., K, N] or [K, N]
    OptTensor bias; // [N]
    OptTensor c;    // broadcasts to [batch..., M, N]
    double alpha, beta;
    String activation;
    OptDtype out_dtype;
    String fp32_precision;
};

// gemm_fwd and explain_gemm too speak of the op that the user called.
constexpr const char *kOp = "gemm";

gk_activation parse_activation(const char *op, std::string_view name) {
    if (name == "none") return GK_ACT_NONE;
    if (name == "relu") return GK_ACT_RELU;
    if (name == "gelu") return GK_ACT_GELU;
    if (name == "gelu_tanh") return GK_ACT_GELU_TANH;
    if (name == "silu") return GK_ACT_SILU;
    bad_argument(op, "activation must be none, relu, gelu, gelu_tanh or silu, got '", name, "'");
}

gk_precision parse_precision(std::string_view name) {
    if (name == "ieee") return GK_IEEE;
    if (name == "tf32") return GK_TF32;
    bad_argument(kOp, "fp32_precision must be ieee or tf32, got '", name, "'");
}

// bias and c may come in the result's dtype, so that a float32 sum stays one.
void check_addend_dtype(const Tensor &t, const Tensor &a, const Dtype *out) {
    if (t.dtype->code == a.dtype->code || t.dtype->code == out->code) return;
    if (a.dtype->code == out->code) return check_same_dtype(kOp, t, a);
    bad_argument(kOp, t.name, " must be ", a.dtype->name, " (as a) or ", out->name, " (as out_dtype), got ",
                 t.dtype->name);
}

// a's, or float32 where that is the wider one.
void check_out_dtype(const Dtype &out, const Tensor &a) {
    bool narrow = a.dtype->gk == GK_BF16 || a.dtype->gk == GK_F16;
    if (out.code == a.dtype->code || (narrow && out.gk == GK_F32)) return;
    bad_argument(kOp, "out_dtype must be ", a.dtype->name, " (as a)", narrow ? " or float32" : "", ", got ", out.name);
}

// The result's shape [batch..., M, N].
Shape result_shape(const Tensor &a, const Tensor &b) {
    Shape shape;
    int ndim = shape.ndim = a.view.ndim > b.view.ndim ? a.view.ndim : b.view.ndim;
    for (int d = 0; d < ndim - 2; ++d) {
        int at_a = d - ndim + a.view.ndim, at_b = d - ndim + b.view.ndim;
        int64_t x = at_a < 0 ? 1 : a.size(at_a), y = at_b < 0 ? 1 : b.size(at_b);
        if (x != y && x != 1 && y != 1) {
            bad_argument(kOp, "b has batch dimensions ", shape_text(b.view.shape, b.view.ndim - 2), ", a has ",
                         shape_text(a.view.shape, a.view.ndim - 2), "; they must broadcast");
        }
        shape.size[d] = x == 1 ? y : x;
    }
    shape.size[ndim - 2] = a.size(a.last() - 1);
    shape.size[ndim - 1] = b.size(b.last());
    return shape;
}

void check_broadcasts(const Tensor &c, const Shape &shape) {
    int shift = shape.ndim - c.view.ndim;
    bool fits = shift >= 0;
    for (int d = 0; fits && d < c.view.ndim; ++d) {
        fits = c.size(d) == 1 || c.size(d) == shape.size[d + shift];
    }
    if (fits) return;
    bad_argument(kOp, "c must broadcast to the result's shape ", shape_text(shape), ", got ", shape_text(c));
}

// A view with all dimensions of the result: missing batch dimensions have size 1.
void pad_batch(Tensor &t, int ndim) {
    int missing = ndim - t.view.ndim;
    for (int d = t.last(); missing > 0 && d >= 0; --d) {
        t.view.shape[d + missing] = t.view.shape[d];
        t.view.stride[d + missing] = t.view.stride[d];
    }
    for (int d = 0; d < missing; ++d) {
        t.view.shape[d] = 1;
        t.view.stride[d] = 0;
    }
    if (missing > 0) t.view.ndim = ndim;
}

// Checks every argument in signature order; fills what the C call takes but out, preact and
// workspace.
gk_gemm_args check(GemmArgs &x, const Dtype **out_dtype, Shape *shape) {
    gk_gemm_args args{};
    args.size = sizeof args;
    x.a.read(kOp, "a");
    check_float(kOp, x.a);
    check_ndim_range(kOp, x.a, 2);
    *out_dtype = x.out_dtype.given ? find_dtype(x.out_dtype.code) : x.a.dtype;

    x.b.read(kOp, "b");
    check_same_device(kOp, x.b, x.a);
    check_same_dtype(kOp, x.b, x.a);
    check_ndim_range(kOp, x.b, 2);
    int64_t k = x.a.size(x.a.last());
    if (x.b.size(x.b.last() - 1) != k) {
        bad_argument(kOp, "b has ", x.b.size(x.b.last() - 1), " rows, a has ", k, " columns; they must match");
    }
    *shape = result_shape(x.a, x.b);

    if (x.bias) {
        x.bias.read(kOp, "bias");
        check_same_device(kOp, x.bias, x.a);
        check_addend_dtype(x.bias, x.a, *out_dtype);
        check_shape(kOp, x.bias, Shape{1, {shape->size[shape->ndim - 1]}});
        args.bias = &x.bias.view;
    }
    if (x.c) {
        x.c.read(kOp, "c");
        check_same_device(kOp, x.c, x.a);
        check_addend_dtype(x.c, x.a, *out_dtype);
        check_ndim_range(kOp, x.c, 0);
        check_broadcasts(x.c, *shape);
        args.c = &x.c.view;
    }
    check_held(kOp, "alpha", x.alpha, x.a);
    check_held(kOp, "beta", x.beta, x.a);
    args.alpha = x.alpha;
    args.beta = x.c ? x.beta : 0; // its default is 1 with and without c
    if (args.beta == 0) args.c = nullptr;
    args.activation = parse_activation(kOp, x.activation);
    check_out_dtype(**out_dtype, x.a);
    args.fp32_precision = parse_precision(x.fp32_precision);

    pad_batch(x.a, shape->ndim);
    if (x.b.view.ndim > 2) pad_batch(x.b, shape->ndim);
    args.a = x.a.view;
    args.b = x.b.view;
    return args;
}

// An empty result has nothing to compute. K = 0 has: activation(beta * c + bias).
void run(const GemmArgs &x, gk_gemm_args *args, const Tensor &out) {
    args->out = out.view;
    if (out.numel() == 0) return;
    Call call(kOp, x.a);
    call.plan_and_run(x.a, *args, gk_plan_gemm, gk_run_gemm);
}

// (out, preact). preact is what gemm_act_bwd needs beyond the output; empty for none and relu, whose derivative shows
// in their output.
Both gemm(GemmArgs &x, bool all, Tensor *into) {
    const Dtype *dtype;
    Shape shape;
    gk_gemm_args args = check(x, &dtype, &shape);
    Tensor out = result(kOp, into, shape, dtype, x.a, {&x.a, &x.b, &x.bias, &x.c}), preact;
    if (all) {
        bool wanted = args.activation != GK_ACT_NONE && args.activation != GK_ACT_RELU;
        preact = empty(kOp, wanted ? shape : Shape{1, {0}}, dtype, x.a.device);
        if (wanted) args.preact = &preact.view;
    }
    run(x, &args, out);
    return {std::move(out), std::move(preact)};
}

// On CUDA other rows than the explained one may take the call; gemm_prefer asks for one of them.
std::string other_rows(const Call &call, const gk_gemm_args &args) {
    if (call.context()->device != GK_CUDA) return "";
    const char *device, *gemm_class, *rows;
    call.done(gk_cuda_device_name(call.context()->index, &device));
    call.done(gk_gemm_class(call.context(), &args, &gemm_class));
    call.done(gk_gemm_rows(call.context(), &args, &rows));
    std::string list = rows;
    for (size_t at = list.find(','); at != std::string::npos; at = list.find(',', at + 4))
        list.replace(at, 1, "\", \"");
    return std::string(", \"device\": \"") + device + "\", \"class\": \"" + gemm_class + "\", \"rows\": [\"" + list +
           "\"]";
}

std::string explain_gemm(GemmArgs &x) {
    const Dtype *dtype;
    Shape shape;
    gk_gemm_args args = check(x, &dtype, &shape);
    Tensor out = empty(kOp, shape, dtype, x.a.device);
    args.out = out.view;
    gk_explanation explanation{};
    explanation.size = sizeof explanation;
    Call call(kOp, x.a, described_gpu);
    call.done(gk_explain_gemm(call.context(), &args, &explanation));
    return to_json(explanation, other_rows(call, args));
}

// ---- gemm_act_bwd -------------------------------------------------------------------------------
struct GemmActBwdArgs {
    Tensor grad_out, saved; // [...], one shape
    String activation;
};

Tensor gemm_act_bwd(GemmActBwdArgs &x) {
    const char *op = "gemm_act_bwd";
    gk_gemm_act_bwd_args args{};
    args.size = sizeof args;
    x.grad_out.read(op, "grad_out");
    check_float(op, x.grad_out);
    check_ndim_range(op, x.grad_out, 0);
    x.saved.read(op, "saved");
    check_same_device(op, x.saved, x.grad_out);
    check_float(op, x.saved);
    if (wide_dtype(x.saved) != wide_dtype(x.grad_out)) check_same_dtype(op, x.saved, x.grad_out);
    check_shape(op, x.saved, shape_of(x.grad_out));
    args.activation = parse_activation(op, x.activation);

    Tensor grad_in = empty(op, shape_of(x.grad_out), x.grad_out.dtype, x.grad_out.device);
    if (grad_in.numel() == 0) return grad_in;
    args.grad_out = x.grad_out.view;
    args.saved = x.saved.view;
    args.grad_in = grad_in.view;
    Call call(op, x.grad_out);
    call.done(gk_gemm_act_bwd(call.context(), &args));
    return grad_in;
}

void implement(Library &m) {
    impl_op<gemm>(m, "gemm");
    impl_out<gemm>(m, "gemm");
    m.impl("gemm_act_bwd", boxed<gemm_act_bwd>);
    m.impl("explain_gemm", boxed<explain_gemm>);
}

} // namespace
} // namespace gk

STABLE_TORCH_LIBRARY_IMPL(GPUKERN_NAMESPACE, CPU, m) { gk::implement(m); }
#ifdef GPUKERN_HAS_CUDA
STABLE_TORCH_LIBRARY_IMPL(GPUKERN_NAMESPACE, CUDA, m) { gk::implement(m); }
#endif
