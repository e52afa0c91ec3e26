// SPDX-License-Identifier: BSD-3-Clause
// op.cpp: the op of an epilogue of the user's (docs/epilogue.md):
//
//   <namespace>::<name>(Tensor a, Tensor b, <the epilogue's arguments>) -> Tensor
//
// a [M, K] and b [K, N], bfloat16 or float16, any strides. The result is [M, N] in a's dtype.
//
// On CUDA the epilogue runs inside gemm's kernels. On the CPU gpukern::gemm gives the sums in
// float32, and a second pass finishes them: the CPU's kernels are not compiled again.
#include <type_traits>

#include "epilogue/call.h"
#include "run.h"

#ifdef GPUKERN_HAS_CUDA
#include "epilogue/plan.h"
#endif

#define STRINGIFY_(x) #x
#define STRINGIFY(x) STRINGIFY_(x)

namespace gk {
namespace {

// ---- the epilogue's arguments -------------------------------------------------------------------
constexpr int kOwn = 2; // arguments before the epilogue's

// Counts the epilogue's tensors, and writes its part of the schema and the names of all tensors.
struct Schema {
    std::string text, names = "a, b";
    int arguments = 0;

    static const Schema &get() {
        static const Schema schema;
        return schema;
    }
    template <class Argument> void add(const Argument &) {
        constexpr bool number = std::is_same_v<Argument, float>;
        const std::string name = name_of(Epilogue::argument_names(), arguments++);
        text += (number ? ", float " : ", Tensor ") + name;
        if (!number) names += ", " + name;
    }

  private:
    Schema() {
        Epilogue own{};
        own.arguments([this](const auto &argument) { add(argument); });
    }
};

struct Product {
    Tensor a, b;
    std::vector<Tensor> own; // the epilogue's tensors
    Epilogue epilogue{};     // its numbers are set; bind() adds its tensors

    using C = EpilogueCall;
    using Results = std::array<Tensor, 1>;
    static constexpr const char *name = STRINGIFY(GPUKERN_EPILOGUE);
    static constexpr int num_results = 1;
    static inline const char *const names = Schema::get().names.c_str();

    explicit Product(const StableIValue *stack)
        : a(bits_as<AtenTensorHandle>(stack[0])), b(bits_as<AtenTensorHandle>(stack[1])) {
        stack += kOwn;
        auto take = [&](auto &argument) {
            if constexpr (std::is_same_v<std::decay_t<decltype(argument)>, float>)
                argument = static_cast<float>(bits_as<double>(*stack++));
            else
                own.emplace_back(bits_as<AtenTensorHandle>(*stack++));
        };
        epilogue.arguments(take);
    }

    template <class F> void tensors(F &f) {
        f(a);
        f(b);
        for (Tensor &t : own) f(t);
    }
    void fill(C &to) {
        to.a = a.view;
        to.b = b.view;
        to.alpha = 1;
        to.activation = GK_ACT_RELU; // to the planners: few instructions for each result
        to.out.dtype = a.view.dtype;
        to.epilogue = epilogue;
    }
    static gk_status check(const gk_context *ctx, const C *x, gk_io *io) {
        const gk_status status = gk_check_gemm(ctx, x, io);
        if (status != GK_OK) return status;
        if (x->a.dtype != GK_BF16 && x->a.dtype != GK_F16)
            bad_argument(name, "a must be bfloat16 or float16, got ", dtype_name(x->a.dtype));
        for (int i = 0; i < 2; ++i) {
            const gk_tensor &t = i ? x->b : x->a;
            if (t.ndim != 2)
                bad_argument(name, name_of(names, i), " must have 2 dimensions, got ", t.ndim);
        }
        if (x->a.shape[0] > INT32_MAX || x->b.shape[1] > INT32_MAX) {
            bad_argument(name, "a has ", x->a.shape[0], " rows and b ", x->b.shape[1],
                         " columns; both must be below 2^31");
        }
        return GK_OK;
    }
#ifdef GPUKERN_HAS_CUDA
    static gk_status plan(const gk_context *ctx, const C *x, gk_plan *to) {
        return gk_plan_epilogue(ctx, x, to);
    }
    static gk_status run(const gk_context *ctx, const C *x, const gk_plan *plan, void *workspace,
                         size_t bytes) {
        return gk_run_epilogue(ctx, x, plan, workspace, bytes);
    }
#else
    static gk_status plan(const gk_context *, const C *, gk_plan *) { return GK_ERR_UNSUPPORTED; }
    static gk_status run(const gk_context *, const C *, const gk_plan *, void *, size_t) {
        return GK_ERR_UNSUPPORTED;
    }
#endif

    // Checks the epilogue's tensors and gives them to it.
    void bind(C &to) {
        const int64_t m = to.a.shape[0], n = to.b.shape[1];
        int i = 0;
        const auto take = [&](std::initializer_list<int64_t> shape) -> const gk_tensor & {
            const gk_tensor &t = own[i++].view;
            const std::string text = name_of(names, kOwn + i - 1);
            if (t.dtype != GK_F32) {
                bad_argument(name, text, " must be float32, got ", dtype_name(t.dtype), "; pass ",
                             text, ".float()");
            }
            bool good = t.ndim == static_cast<int>(shape.size());
            for (int d = 0; good && d < t.ndim; ++d) good = t.shape[d] == shape.begin()[d];
            if (!good) {
                bad_argument(name, text, " must have the shape ",
                             text_of(shape.size(), shape.begin()), ", got ",
                             text_of(t.ndim, t.shape));
            }
            return t;
        };
        const auto bind_one = [&](auto &argument) {
            using Argument = std::decay_t<decltype(argument)>;
            if constexpr (std::is_same_v<Argument, gk_per_row>) {
                const gk_tensor &t = take({m});
                argument = {static_cast<const float *>(t.data), t.stride[0]};
            } else if constexpr (std::is_same_v<Argument, gk_per_column>) {
                const gk_tensor &t = take({n});
                argument = {static_cast<const float *>(t.data), t.stride[0]};
            } else if constexpr (std::is_same_v<Argument, gk_per_element>) {
                const gk_tensor &t = take({m, n});
                argument = {static_cast<const float *>(t.data), t.stride[0], t.stride[1]};
            } else {
                static_assert(std::is_same_v<Argument, float>,
                              "a member that gpukern_epilogue.h has");
            }
        };
        to.epilogue.arguments(bind_one);
    }

  private:
    static std::string text_of(size_t ndim, const int64_t *shape) {
        std::string text = "[";
        for (size_t d = 0; d < ndim && d < GK_MAX_DIMS; ++d)
            text += (d ? ", " : "") + std::to_string(shape[d]);
        return text + "]";
    }
};

// ---- the CPU ------------------------------------------------------------------------------------
AtenTensorHandle another(const Tensor &t) {
    AtenTensorHandle handle;
    torch_ok(Product::name, aoti_torch_new_tensor_handle(t.get(), &handle));
    return handle;
}

StableIValue some(StableIValue value) { return bits_of(new StableIValue(value)); }

// a b in float32 by gpukern::gemm: (a, b, bias, c, alpha, beta, activation, out_dtype,
// fp32_precision).
Tensor sums_of(const Product &op) {
    StableIValue stack[] = {bits_of(another(op.a)),
                            bits_of(another(op.b)),
                            0,
                            0,
                            bits_of(1.0),
                            bits_of(1.0),
                            give(std::string("none")),
                            some(bits_of(aoti_torch_dtype_float32())),
                            give(std::string("ieee"))};
    if (aoti_torch_call_dispatcher("gpukern::gemm", "", stack) != TORCH_SUCCESS) {
        failed(Product::name, "gpukern::gemm, which gives the sums on the CPU, failed; import "
                              "torch_gpukern before the call");
    }
    Tensor sums(bits_as<AtenTensorHandle>(stack[0]));
    sums.read_form(Product::name);
    sums.read_data(Product::name, true);
    return sums;
}

struct Rows {
    const Epilogue *epilogue;
    float *sums;
    int64_t n;
};

void finish_rows(int64_t begin, int64_t end, void *context) {
    const Rows &x = *static_cast<const Rows *>(context);
    for (int64_t row = begin; row < end; ++row)
        for (int64_t column = 0; column < x.n; ++column) {
            float &value = x.sums[row * x.n + column];
            value = x.epilogue->finish(value, static_cast<int>(row), static_cast<int>(column));
        }
}

// Finishes the sums in place; torch rounds them.
void finish_on_cpu(const Product &op, const Epilogue &epilogue, Tensor &out) {
    const Tensor sums = sums_of(op);
    const int64_t m = out.size(0), n = out.size(1), rows_at_once = 1 + 16384 / n;
    Rows rows = {&epilogue, static_cast<float *>(sums.view.data), n};
    torch_ok(Product::name, torch_parallel_for(0, m, rows_at_once, finish_rows, &rows));
    torch_ok(Product::name, aoti_torch_copy_(out.get(), sums.get(), 0));
}

// ---- registration -------------------------------------------------------------------------------
void product(StableIValue *stack, uint64_t, uint64_t) {
    Product op(stack);
    Checked<Product> c(op);
    op.bind(c.args);
    Tensor out = c.make(0);
    c.args.out = out.view;
    if (out.numel() > 0) {
        if (c.read.device.is_cpu())
            finish_on_cpu(op, c.args.epilogue, out);
        else
            c.run();
    }
    stack[0] = give(out);
}

void define(Library &m) {
    m.def((std::string(Product::name) + "(Tensor a, Tensor b" + Schema::get().text + ") -> Tensor")
              .c_str());
}

void implement(Library &m) { m.impl(Product::name, product); }

const Registered defined(Library::Kind::FRAGMENT, nullptr, define, __FILE__);
const Registered on_cpu(Library::Kind::IMPL, "CPU", implement, __FILE__);
#ifdef GPUKERN_HAS_CUDA
const Registered on_cuda(Library::Kind::IMPL, "CUDA", implement, __FILE__);
#endif

} // namespace
} // namespace gk
