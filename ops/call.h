// SPDX-License-Identifier: BSD-3-Clause
// call.h: a call into csrc: its context (device, stream, threads, instruction set), its workspace,
// and the errors that earlier kernels reported.
#pragma once

#include <cstdlib>
#include <cstring>

#include "core/plan.h"
#include "tensor.h"

#ifndef _WIN32
#include <pthread.h>
#endif

#ifdef GPUKERN_HAS_CUDA
// Only CUDA builds of torch have it. A weak symbol lets one binary load on CPU builds too.
#pragma weak aoti_torch_get_current_cuda_stream
#endif

namespace gk {

// ---- instruction set ----------------------------------------------------------------------------
// The value of GPUKERN_CPU at the first use. NULL is the machine's best instruction set.
inline const char *asked_isa() {
    static const char *const name = [] {
        const char *value = std::getenv("GPUKERN_CPU");
        return value && *value ? strdup(value) : nullptr;
    }();
    return name;
}

inline bool machine_has(const char *isa) {
    std::string have = std::string(",") + gk_cpu_isas() + ",";
    const auto lists = [&have](const std::string &name) {
        return have.find("," + name + ",") != std::string::npos;
    };
    // amx_emulated exists only for tests, so gk_cpu_isas() does not list it
    return lists(isa) || (std::string("amx_emulated") == isa && lists("avx512bf16"));
}

inline const char *chosen_isa(const char *op) {
    static const bool served = !asked_isa() || machine_has(asked_isa());
    if (!served) {
        failed(op, "GPUKERN_CPU is '", asked_isa(), "', which this machine does not have; it has ",
               gk_cpu_isas());
    }
    return asked_isa();
}

// ---- threads: torch's pool ----------------------------------------------------------------------
// A forked child inherits the pool's bookkeeping but not its threads. The next parallel region of
// the thread that forked would wait for those threads for ever, so calls of that thread run without
// the pool. The handler is installed when the library loads, because torch's own ops may start the
// pool.
inline thread_local bool lost_pool = false;

#ifndef _WIN32
inline const int watching_forks = pthread_atfork(nullptr, nullptr, [] { lost_pool = true; });
#endif

struct Job {
    gk_task_fn task;
    void *arg;
};

// A gk_parallel_for_fn. Nothing may be thrown through csrc, so a failure is stored in *pool, a
// bool.
inline void torch_pool(void *pool, int64_t n, gk_task_fn task, void *arg) {
    Job job = {task, arg};
    auto run = [](int64_t begin, int64_t end, void *context) {
        const Job *j = static_cast<const Job *>(context);
        for (int64_t i = begin; i < end; ++i) j->task(j->arg, i);
    };
    if (torch_parallel_for(0, n, 1, run, &job) != TORCH_SUCCESS) *static_cast<bool *>(pool) = true;
}

// ---- workspace ----------------------------------------------------------------------------------
constexpr size_t kAlign = 64;
constexpr size_t kKeptBytes = size_t{64}
                              << 20; // the most that a thread keeps between calls: 64 MiB

struct Scratch {
    void *data = nullptr;
    size_t bytes = 0;
    ~Scratch() { std::free(data); }
};

inline thread_local Scratch scratch;

// ---- what kernels reported ----------------------------------------------------------------------
// Throws if a kernel has met bad contents of an index tensor since the last call. The text names
// the first kind; all kinds are cleared.
inline void raise_device_errors(const char *op, uint8_t *word) {
    if (!word) return;
    uint64_t all;
    static_assert(sizeof all == GK_NUM_DEVICE_ERRORS, "one read for all kinds");
    std::memcpy(&all, word, sizeof all);
    if (__builtin_expect(all == 0, 1)) return;
    uint8_t kinds[GK_NUM_DEVICE_ERRORS];
    std::memcpy(kinds, word, sizeof kinds);
    std::memset(word, 0, sizeof kinds);
    for (int kind = 0; kind < GK_NUM_DEVICE_ERRORS; ++kind) {
        if (!kinds[kind]) continue;
        throw std::out_of_range(
            error_text(op, "an earlier call met bad contents on the GPU; ",
                       gk_device_error_text(static_cast<gk_device_error>(kind))));
    }
}

// ---- a call -------------------------------------------------------------------------------------
// The GPU that this thread's explain_* ops describe instead of their tensors' device. -1: none.
// Other ops do not read it.
inline thread_local int32_t described_gpu = -1;

class Call {
  public:
    // A call with the tensors named in `names`, which are on `device`.
    Call(const char *op, Device device, const char *names, int32_t described = -1)
        : op_(op), device_(device) {
        context_.size = sizeof context_;
        context_.index = device.index;
        context_.num_threads = 1;
        if (described >= 0) {
            context_.device = GK_CUDA;
            context_.index = described;
            return;
        }
        if (device.is_cpu()) {
            context_.device = GK_CPU;
            context_.index = 0;
            context_.cpu_isa = chosen_isa(op);
            uint32_t threads = 1;
            if (!lost_pool) torch_ok(op, torch_get_num_threads(&threads));
            if (threads > 1) {
                context_.num_threads = static_cast<int32_t>(threads);
                context_.parallel_for = torch_pool;
                context_.pool = &pool_failed_;
            }
            return;
        }
#ifdef GPUKERN_HAS_CUDA
        context_.device = GK_CUDA;
        if (!aoti_torch_get_current_cuda_stream) failed(op, "this torch has no CUDA");
        torch_ok(op, aoti_torch_get_current_cuda_stream(device.index, &context_.stream));
        context_.error_word = gk_cuda_error_word();
        raise_device_errors(op, context_.error_word);
        (void)names;
#else
        bad_argument(op, name_of(names, 0), " is on ", device.name(),
                     "; this build of gpukern has kernels for the cpu");
#endif
    }
    Call(const Call &) = delete; // context_ points into it

    const gk_context *context() const { return &context_; }

    // Plans a call, allocates the workspace that the plan asks for, and runs it.
    template <class Args>
    void plan_and_run(const Args &args,
                      gk_status (*plan)(const gk_context *, const Args *, gk_plan *),
                      gk_status (*run)(const gk_context *, const Args *, const gk_plan *, void *,
                                       size_t)) {
        gk_plan planned;
        done(plan(&context_, &args, &planned));
        void *memory = workspace(planned.workspace_bytes);
        done(run(&context_, &args, &planned, memory, planned.workspace_bytes));
    }

    void done(gk_status status) const {
        if (pool_failed_) failed(op_, "torch's thread pool failed");
        status_ok(op_, status);
    }

  private:
    // Memory that is valid until this thread's next call.
    void *workspace(size_t bytes) {
        char *data = nullptr;
        if (bytes && context_.device == GK_CPU && bytes <= kKeptBytes) {
            data = kept(bytes);
        } else if (bytes) {
            gk_tensor form;
            form.dtype = GK_U8;
            form.ndim = 1;
            form.shape[0] = static_cast<int64_t>(bytes);
            large_ = empty(op_, form, device_);
            data = static_cast<char *>(large_.view.data);
        }
        return data;
    }

    char *kept(size_t bytes) {
        if (scratch.bytes < bytes) {
            size_t grown = size_t{1} << 16;
            while (grown < bytes) grown *= 2;
            std::free(scratch.data);
            scratch.bytes = 0;
            scratch.data = std::aligned_alloc(kAlign, grown);
            if (!scratch.data) failed(op_, "out of memory: ", grown, " bytes of workspace");
            scratch.bytes = grown;
        }
        return static_cast<char *>(scratch.data);
    }

    const char *op_;
    Device device_;
    gk_context context_{};
    bool pool_failed_ = false;
    Tensor large_;
};

// ---- explain ------------------------------------------------------------------------------------
// The JSON of an explain_* op. `more` holds further members, each beginning with ", ".
inline std::string to_json(const gk_explanation &e, const std::string &more = "") {
    std::ostringstream json;
    json.precision(17);
    json << "{\"instance\": \"" << e.instance << "\", \"isa\": \"" << e.isa << "\", \"tile\": ["
         << e.tile[0] << ", " << e.tile[1] << ", " << e.tile[2] << ", " << e.tile[3]
         << "], \"tasks\": " << e.tasks << ", \"chunks\": " << e.chunks
         << ", \"bytes\": " << e.bytes << ", \"flops\": " << e.flops
         << ", \"workspace_bytes\": " << e.workspace_bytes << ", \"waves\": " << e.waves
         << ", \"bound_us\": " << e.bound_us
         << ", \"preferred\": " << (e.preferred ? "true" : "false") << more << "}";
    return json.str();
}

} // namespace gk
