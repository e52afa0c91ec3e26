// SPDX-License-Identifier: BSD-3-Clause
// train.cpp: the ops that only training needs: dropout, its fused forms, and a step of AdamW.
#include "run.h"

#include "words.h"

namespace gk {
namespace {

// ---- dropout ------------------------------------------------------------------------------------
gk_activation gelu_of(const char *op, std::string_view approximate) {
    static const char *const words[] = {"none", "tanh"};
    return parse_word(op, "approximate", approximate, words) ? GK_ACT_GELU_TANH : GK_ACT_GELU;
}

struct Dropout {
    Tensor x; // [..., N]
    double p;
    Tensor seed; // [2] int64

    GK_OP(dropout, gk_dropout_args, "dropout", 1)
    GK_TENSORS(x, seed)

    void fill(C &to) {
        to.x = x.view;
        to.p = p;
        to.seed = seed.view;
    }
    static void place(C &to, Results &r) { to.out = r[0].view; }
};

struct DropoutAdd {
    Tensor x, residual;
    double p;
    Tensor seed;

    GK_OP(dropout, gk_dropout_args, "dropout_add", 1)
    GK_TENSORS(x, residual, seed)

    void fill(C &to) {
        to.x = x.view;
        to.residual = &residual.view;
        to.p = p;
        to.seed = seed.view;
    }
    static void place(C &to, Results &r) { to.out = r[0].view; }
};

struct BiasGeluDropout {
    Tensor x;
    OptTensor bias; // [N]
    double p;
    Tensor seed;
    String approximate;

    GK_OP(dropout, gk_dropout_args, "bias_gelu_dropout", 1)
    GK_TENSORS(x, bias, seed)

    void fill(C &to) {
        to.x = x.view;
        to.bias = bias.view_or_null();
        to.p = p;
        to.seed = seed.view;
        to.activation = gelu_of(name, approximate);
    }
    static void place(C &to, Results &r) { to.out = r[0].view; }
};

struct BiasGeluDropoutBwd {
    Tensor grad_out, x;
    OptTensor bias;
    double p;
    Tensor seed;
    String approximate;

    GK_OP(dropout, gk_dropout_args, "bias_gelu_dropout_bwd", 1)
    GK_TENSORS(grad_out, x, bias, seed)

    void fill(C &to) {
        to.grad_out = &grad_out.view;
        to.x = x.view;
        to.bias = bias.view_or_null();
        to.p = p;
        to.seed = seed.view;
        to.activation = gelu_of(name, approximate);
    }
    static void place(C &to, Results &r) { to.out = r[0].view; }
};

// ---- AdamW --------------------------------------------------------------------------------------
struct AdamW {
    TensorList params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, masters, steps;
    OptTensor lr_tensor, grad_scale, clip, found_inf, seed;
    double lr, beta1, beta2, eps, weight_decay;
    bool maximize;

    static constexpr const char *name = "adamw_";
};

// Reads the tensors of a list and holds their views as the array that csrc takes. data() is NULL
// for an empty list.
class Views {
  public:
    Views(const char *argument, TensorList &list, bool written, const Device *device,
          size_t expected, bool optional) {
        const size_t n = list.items().size();
        if (n != expected && !(optional && n == 0))
            bad_argument(AdamW::name, argument, " has ", n, " tensors, params has ", expected,
                         "; they must match");
        views_.reserve(n);
        for (size_t i = 0; i < n; ++i) {
            Tensor &t = list.items()[i];
            const auto named = [&] {
                return std::string(argument) + "[" + std::to_string(i) + "]";
            };
            if (!t.is_strided(AdamW::name))
                bad_argument(AdamW::name, named(), " must be a strided (dense) tensor");
            t.read_form(AdamW::name);
            if (device && t.device != *device)
                bad_argument(AdamW::name, named(), " is on ", t.device.name(), ", params[0] is on ",
                             device->name(), "; they must be on one device");
            t.read_data(AdamW::name, written);
            views_.push_back(t.view);
        }
    }
    const gk_tensor *data() const { return views_.empty() ? nullptr : views_.data(); }

  private:
    std::vector<gk_tensor> views_;
};

// Reads an optional argument that is not a list. It must be on the device of params[0].
const gk_tensor *scalar_of(const char *argument, OptTensor &t, const Device &device) {
    if (!t) return nullptr;
    if (!t.is_strided(AdamW::name))
        bad_argument(AdamW::name, argument, " must be a strided (dense) tensor");
    t.read_form(AdamW::name);
    if (t.device != device)
        bad_argument(AdamW::name, argument, " is on ", t.device.name(), ", params[0] is on ",
                     device.name(), "; they must be on one device");
    t.read_data(AdamW::name, false);
    return &t.view;
}

void adamw(AdamW &op) {
    const size_t n = op.params.items().size();
    if (n == 0) return;
    const Views params("params", op.params, true, nullptr, n, false);
    const Device device = op.params.items()[0].device;
    for (Tensor &t : op.params.items())
        if (t.device != device)
            bad_argument(AdamW::name, "params are on ", device.name(), " and ", t.device.name(),
                         "; they must be on one device");
    const Views grads("grads", op.grads, false, &device, n, false);
    const Views exp_avgs("exp_avgs", op.exp_avgs, true, &device, n, false);
    const Views exp_avg_sqs("exp_avg_sqs", op.exp_avg_sqs, true, &device, n, false);
    const Views most("max_exp_avg_sqs", op.max_exp_avg_sqs, true, &device, n, true);
    const Views masters("masters", op.masters, true, &device, n, true);
    const Views steps("steps", op.steps, false, &device, n, false);
    gk_adamw_args args{};
    args.size = sizeof args;
    args.num = static_cast<int64_t>(n);
    args.params = params.data();
    args.grads = grads.data();
    args.steps = steps.data();
    args.exp_avgs = exp_avgs.data();
    args.exp_avg_sqs = exp_avg_sqs.data();
    args.max_exp_avg_sqs = most.data();
    args.masters = masters.data();
    args.lr_tensor = scalar_of("lr_tensor", op.lr_tensor, device);
    args.grad_scale = scalar_of("grad_scale", op.grad_scale, device);
    args.clip = scalar_of("clip", op.clip, device);
    args.found_inf = scalar_of("found_inf", op.found_inf, device);
    args.seed = scalar_of("seed", op.seed, device);
    args.lr = op.lr;
    args.beta1 = op.beta1;
    args.beta2 = op.beta2;
    args.eps = op.eps;
    args.weight_decay = op.weight_decay;
    args.maximize = op.maximize;
    Call call(AdamW::name, device, "params");
    gk_io io;
    gk_io_begin(&io, GK_CONTENTS);
    io.dtype_name = dtype_name;
    call.done(gk_check_adamw(call.context(), &args, &io));
    call.plan_and_run(args, gk_plan_adamw, gk_run_adamw);
}

// X(name, op)
#define FORWARD(X)               \
    X("dropout", Dropout)        \
    X("dropout_add", DropoutAdd) \
    X("bias_gelu_dropout", BiasGeluDropout)
#define BACKWARD(X) X("bias_gelu_dropout_bwd", BiasGeluDropoutBwd)

void implement(Library &m) {
    FORWARD(GK_OP_RUN) BACKWARD(GK_OP_RUN) FORWARD(GK_OP_EXPLAIN) m.impl("adamw_", boxed<adamw>);
}

void implement_shapes(Library &m) { FORWARD(GK_OP_RESULTS) BACKWARD(GK_OP_RESULTS) }

} // namespace
} // namespace gk

GK_IMPLEMENT()
