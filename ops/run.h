// SPDX-License-Identifier: BSD-3-Clause
// run.h: the steps of every call of an op. Read the tensors, let csrc check the call and find the
// shapes of its results, allocate the results, plan, run.
//
// An op is a plain struct whose members are the schema's arguments, in order. It declares:
//   GK_OP(stem, C, "name", n)     stem and C: its stem and argument struct in csrc/core/ops.def
//                                 name: its name in error texts;  n: the number of its results
//   GK_TENSORS(x, weight)         the members that are tensors, in order
//   fill(C &to)                   copies the members into the argument struct of csrc
//   place(C &to, Results &)       static: puts the allocated results into that struct
//   stored_like(int i)            optional: the tensor whose order of dimensions result i follows
//   runs_empty                    optional, static constexpr bool: csrc has work to do even if the
//                                 first result is empty
//   better_dense(context, args)   optional: the input whose dense copy is faster than its strides
#pragma once

#include <array>
#include <cmath>

#include "box.h"
#include "call.h"

namespace gk {

// ---- the tensors of an op -----------------------------------------------------------------------
template <class F, class... T> void visit(F &f, T &...tensors) { (f(tensors), ...); }

#define GK_TENSORS(...)                                                  \
    template <class F> void tensors(F &f) { gk::visit(f, __VA_ARGS__); } \
    static constexpr const char *names = #__VA_ARGS__;

#define GK_OP(stem, arguments, text, many) GK_OP_CHECKED_BY(stem, stem, arguments, text, many)

// GK_OP whose calls are checked by another gk_check_<checked>.
#define GK_OP_CHECKED_BY(checked, stem, arguments, text, many) \
    using C = arguments;                                       \
    using Results = std::array<gk::Tensor, many>;              \
    static constexpr const char *name = text;                  \
    static constexpr int num_results = many;                   \
    static constexpr auto check = gk_check_##checked;          \
    static constexpr auto plan = gk_plan_##stem;               \
    static constexpr auto run = gk_run_##stem;                 \
    static constexpr auto describe = gk_describe_##stem;

// GK_OP for an op whose call in csrc takes the member `member` of C, its first. The rest of C
// follows that member in memory, and the member's `size` says so (gpukern.h).
#define GK_OP_OF_MEMBER(member, stem, arguments, text, many)                                      \
    using C = arguments;                                                                          \
    using Results = std::array<gk::Tensor, many>;                                                 \
    static constexpr const char *name = text;                                                     \
    static constexpr int num_results = many;                                                      \
    static gk_status check(const gk_context *ctx, const C *x, gk_io *io) {                        \
        return gk_check_##stem(ctx, &x->member, io);                                              \
    }                                                                                             \
    static gk_status plan(const gk_context *ctx, const C *x, gk_plan *to) {                       \
        return gk_plan_##stem(ctx, &x->member, to);                                               \
    }                                                                                             \
    static gk_status run(const gk_context *ctx, const C *x, const gk_plan *plan, void *workspace, \
                         size_t bytes) {                                                          \
        return gk_run_##stem(ctx, &x->member, plan, workspace, bytes);                            \
    }                                                                                             \
    static gk_status describe(const gk_context *ctx, const C *x, gk_explanation *out) {           \
        return gk_describe_##stem(ctx, &x->member, out);                                          \
    }

// The tensor whose order of dimensions result i follows: op.stored_like(i) if the op declares it.
template <class O, class = void> struct Order {
    static const Tensor *of(const O &, int) { return nullptr; }
};
template <class O>
struct Order<O, std::void_t<decltype(std::declval<const O &>().stored_like(0))>> {
    static const Tensor *of(const O &op, int i) { return op.stored_like(i); }
};

// Whether csrc has work to do if the first result is empty.
template <class O, class = void> struct RunsEmpty : std::false_type {};
template <class O> struct RunsEmpty<O, std::void_t<decltype(O::runs_empty)>> : std::true_type {};

// The input whose dense copy is faster than its strides: op.better_dense(context, args) if the op
// declares it, otherwise nullptr.
template <class O, class = void> struct BetterDense {
    static Tensor *of(O &, const gk_context *, const typename O::C &) { return nullptr; }
};
template <class O>
struct BetterDense<O, std::void_t<decltype(std::declval<O &>().better_dense(
                          nullptr, std::declval<typename O::C &>()))>> {
    static Tensor *of(O &op, const gk_context *context, const typename O::C &args) {
        return op.better_dense(context, args);
    }
};

template <class O> Tensor make_result(const O &op, const gk_io &io, int i, Device device) {
    const Tensor *like = Order<O>::of(op, i);
    const bool tokens_first = like && like->view.ndim == 4 && like->stride(1) < like->stride(2);
    return empty(O::name, io.result[i].as, device, tokens_first);
}

// Reads each tensor of an op. Refuses tensors that are not strided, have no memory, or are on
// another device than the first. With `data` false only the metadata is read.
class Reader {
  public:
    Device device{};

    Reader(const char *op, const char *names, bool data) : op_(op), names_(names), data_(data) {}

    template <class T> void operator()(T &t) {
        if (t) read(t, std::is_same_v<T, WrittenTensor>); // false: an optional tensor is None
        ++index_;
    }

    std::string name(int i) const { return name_of(names_, i); }

  private:
    void read(Tensor &t, bool writable) {
        if (!t.is_strided(op_))
            bad_argument(op_, name(index_), " must be a strided (dense) tensor");
        t.read_form(op_);
        if (index_ == 0) device = t.device;
        if (t.device != device) {
            bad_argument(op_, name(index_), " is on ", t.device.name(), ", ", name(0), " is on ",
                         device.name(), "; they must be on one device");
        }
        if (!data_) return;
        t.read_data(op_, writable);
        if (!t.view.data && t.view.ndim <= GK_MAX_DIMS && t.numel() > 0) {
            bad_argument(op_, name(index_),
                         " has no memory behind it; a subclass must unwrap it first");
        }
    }

    const char *op_, *names_;
    bool data_;
    int index_ = 0;
};

// ---- a call -------------------------------------------------------------------------------------
// A call whose tensors are read and whose arguments csrc has checked. The constructor does both.
template <class O> class Checked {
  public:
    O &op;
    typename O::C args{};
    gk_io io;
    Reader read;
    Call call;

    explicit Checked(O &x, int32_t described = -1)
        : op(x), read(O::name, O::names, true), call(O::name, read_all(), O::names, described) {
        args.size = sizeof args;
        op.fill(args);
        gk_io_begin(&io, GK_CONTENTS);
        io.dtype_name = dtype_name;
        call.done(O::check(call.context(), &args, &io));
    }

    Tensor make(int i) const { return make_result(op, io, i, read.device); }

    // Uses the caller's tensor as result 0. The tensor must have that result's dtype and shape, and
    // must not share memory with an input.
    Tensor take(Tensor &into) {
        if (!into.is_strided(O::name))
            bad_argument(O::name, "out must be a strided (dense) tensor");
        into.read_form(O::name);
        if (into.device != read.device) {
            bad_argument(O::name, "out is on ", into.device.name(), ", ", read.name(0), " is on ",
                         read.device.name(), "; they must be on one device");
        }
        into.read_data(O::name, true);
        io.result[0].given = &into.view;
        io.result[0].strides = GK_CONTIGUOUS;
        call.done(gk_check_given(&io, 0));
        call.done(gk_check_apart(&io, 0));
        return std::move(into);
    }

    // Replaces an input by a dense copy if the kernels do not serve its strides, or are slow with
    // them.
    void copy_inputs() {
        const Tensor *slow = BetterDense<O>::of(op, call.context(), args);
        for (int i = 0; i < io.num_inputs; ++i) {
            const gk_input &input = io.input[i];
            const bool taken = gk_has_strides(input.tensor, input.strides);
            if (taken && !slow) continue;
            int n = 0;
            auto replace = [&](Tensor &t) {
                if (read.name(n++) != input.name || (taken && &t != slow)) return;
                copy_dense(O::name, t);
                // input.tensor is in args, or it is the view of an optional tensor
                *const_cast<gk_tensor *>(input.tensor) = t.view;
            };
            op.tensors(replace);
        }
    }

    void run() {
        copy_inputs();
        call.plan_and_run(args, O::plan, O::run);
    }

    std::string explain(const std::string &more = "") {
        gk_explanation explanation{};
        explanation.size = sizeof explanation;
        copy_inputs();
        call.done(O::describe(call.context(), &args, &explanation));
        return to_json(explanation, more);
    }

  private:
    Device read_all() {
        op.tensors(read);
        return read.device;
    }
};

// Runs the op and returns `wanted` results. With `into`, the first result is the caller's tensor.
template <class O, class... Into> typename O::Results run_op(O &op, int wanted, Into &...into) {
    Checked<O> c(op);
    typename O::Results results;
    ((results[0] = c.take(into)), ...);
    for (int i = sizeof...(Into); i < wanted; ++i) results[i] = c.make(i);
    O::place(c.args, results);
    if (RunsEmpty<O>::value || results[0].numel() > 0) c.run();
    return results;
}

// ---- what torch calls ---------------------------------------------------------------------------
template <class O> void op_first(StableIValue *stack, uint64_t num_args, uint64_t) {
    O op = read_args<O>(stack, num_args);
    stack[0] = give(run_op(op, 1)[0]);
}

template <class Results> void give_all(StableIValue *stack, Results &&results) {
    for (Tensor &result : results) *stack++ = give(result);
}

template <class O> void op_all(StableIValue *stack, uint64_t num_args, uint64_t) {
    O op = read_args<O>(stack, num_args);
    give_all(stack, run_op(op, O::num_results));
}

template <class O> void op_out(StableIValue *stack, uint64_t num_args, uint64_t) {
    O op = read_args<O>(stack, num_args - 1);
    Tensor into = Slot{stack[num_args - 1]};
    run_op(op, 1, into);
}

// Computes only the shapes: returns results on the meta device, for inputs without data. The ops'
// fake functions call it (torch_gpukern/ops/fakes.py).
template <class O> void op_results(StableIValue *stack, uint64_t num_args, uint64_t) {
    O op = read_args<O>(stack, num_args);
    typename O::C args{};
    gk_context context{};
    Reader read(O::name, O::names, false);
    gk_io io;
    op.tensors(read);
    args.size = sizeof args;
    context.size = sizeof context;
    context.device = read.device.is_cuda() ? GK_CUDA : GK_CPU;
    op.fill(args);
    gk_io_begin(&io, GK_SHAPES);
    io.dtype_name = dtype_name;
    status_ok(O::name, O::check(&context, &args, &io));
    for (int i = 0; i < O::num_results; ++i) {
        Tensor result = make_result(op, io, i, Device::meta());
        stack[i] = give(result);
    }
}

template <class O> void op_explain(StableIValue *stack, uint64_t num_args, uint64_t) {
    O op = read_args<O>(stack, num_args);
    Checked<O> c(op, described_gpu);
    typename O::Results results;
    for (int i = 0; i < O::num_results; ++i) results[i] = c.make(i);
    O::place(c.args, results);
    stack[0] = give(c.explain());
}

} // namespace gk

// Used as X in a file's list X(name, op), inside `implement` and `implement_shapes`.
#define GK_OP_RUN(name, ...) m.impl(name, op_all<__VA_ARGS__>);
#define GK_OP_EXPLAIN(name, ...) m.impl("explain_" name, op_explain<__VA_ARGS__>);
#define GK_OP_RESULTS(name, ...) m.impl(name "_results", op_results<__VA_ARGS__>);

// The last line of an op's file. It registers that file's `implement`, which adds the kernels, and
// `implement_shapes`, which adds the *_results ops.
#ifdef GPUKERN_HAS_CUDA
#define GK_IMPLEMENT_CUDA \
    static const gk::Registered on_cuda(gk::Library::Kind::IMPL, "CUDA", gk::implement, __FILE__);
#else
#define GK_IMPLEMENT_CUDA
#endif
#define GK_IMPLEMENT()                                                                           \
    static const gk::Registered on_cpu(gk::Library::Kind::IMPL, "CPU", gk::implement, __FILE__); \
    GK_IMPLEMENT_CUDA                                                                            \
    static const gk::Registered on_all(gk::Library::Kind::IMPL, "CompositeExplicitAutograd",     \
                                       gk::implement_shapes, __FILE__);
