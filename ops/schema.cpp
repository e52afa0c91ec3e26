// SPDX-License-Identifier: BSD-3-Clause
// schema.cpp: every schema of the plugin, and the ops that take no tensor.
//
// A result that is not wanted is an empty tensor: tracers and Inductor's C++ wrapper take no
// optional one.
// SymInt reaches a kernel as int64. The *_fwd and *_bwd ops are what autograd is built of
// (torch_gpukern/ops); each explain_* takes its op's arguments and returns as JSON what the call
// would do.
#include "box.h"
#include "call.h"
#include "gpukern_ranks.h"
#include "gpukern_sums.h"

#define GEMM_ARGS                                                                               \
    "(Tensor a, Tensor b, Tensor? bias=None, Tensor? c=None, float alpha=1.0, float beta=1.0, " \
    "str activation=\"none\", ScalarType? out_dtype=None, str fp32_precision=\"ieee\")"

#define DENSE_RULES                                                                              \
    "bool is_causal=False, float? scale=None, SymInt diagonal=0, SymInt window_left=-1, "        \
    "SymInt window_right=-1, float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None, " \
    "Tensor? kv_start=None, Tensor? kv_end=None, Tensor? q_start=None"

#define DROPOUT ", float dropout_p=0.0, Tensor? dropout_seed=None)"
#define OUT_DTYPE ", ScalarType? out_dtype=None" DROPOUT
#define BACKWARD \
    ", bool deterministic=False, ScalarType? grad_dtype=None, bool is_part=False" DROPOUT

#define FLASH_ATTN_ARGS "(Tensor q, Tensor k, Tensor v, " DENSE_RULES OUT_DTYPE

// a, b: how out and lse are annotated
#define ACCUMULATE_ARGS(a, b) \
    "(Tensor q, Tensor k, Tensor v, Tensor" a " out, Tensor" b " lse, " DENSE_RULES ")"

#define FLASH_ATTN_BWD_ARGS                                                    \
    "(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, " \
    "Tensor? grad_lse=None, " DENSE_RULES BACKWARD

#define PACKED_LENGTHS \
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "

#define PACKED_RULES                                                                           \
    "bool is_causal=False, float? scale=None, SymInt window_left=-1, SymInt window_right=-1, " \
    "float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None"

#define FLASH_ATTN_VARLEN_ARGS \
    "(Tensor q, Tensor k, Tensor v, " PACKED_LENGTHS PACKED_RULES OUT_DTYPE

// The lengths have no default, so they stand before grad_lse.
#define FLASH_ATTN_VARLEN_BWD_ARGS                                                            \
    "(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, " PACKED_LENGTHS \
    "Tensor? grad_lse=None, " PACKED_RULES BACKWARD

// What follows the arguments of flash_attn and flash_attn_varlen where q, k and v are
// float8_e4m3fn.
#define FP8_SCALES                                                                       \
    ", ScalarType? out_dtype=None, Tensor? q_scale=None, Tensor? k_scale=None, Tensor? " \
    "v_scale=None, "                                                                     \
    "Tensor? v_mean=None, str accumulate=\"auto\")"

#define PAGED_ATTN_ARGS                                                                            \
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, "             \
    "Tensor? cu_seqlens_q=None, SymInt max_seqlen_q=1, float? scale=None, SymInt window_left=-1, " \
    "float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? k_scale=None, "     \
    "Tensor? v_scale=None, bool is_causal=True, Tensor? kv_start=None, SymInt window_right=-1, "   \
    "bool allow_short=False)"

// a, b: how the caches are annotated
#define ROPE_KV_WRITE_ARGS(a, b)                                                        \
    "(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor positions, Tensor" a \
    " k_cache, "                                                                        \
    "Tensor" b " v_cache, Tensor slots, Tensor? q_weight=None, Tensor? k_weight=None, " \
    "float eps=1e-06, bool interleaved=False, Tensor? k_scale=None, Tensor? v_scale=None)"

#define SCALED_GEMM_ARGS                                                                       \
    "(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias=None, Tensor? c=None, " \
    "float beta=1.0, "                                                                         \
    "Tensor? out_scale=None, str activation=\"none\", ScalarType? out_dtype=None, str "        \
    "accumulate=\"precise\")"

#define WEIGHT_GEMM_ARGS                                                                        \
    "(Tensor a, Tensor packed, Tensor scale, SymInt n, str format, Tensor? zero=None, Tensor? " \
    "global_scale=None, "                                                                       \
    "Tensor? scale_a=None, Tensor? bias=None, str activation=\"none\", ScalarType? "            \
    "out_dtype=None)"

#define GROUPED_GEMM_ARGS                                                                    \
    "(Tensor a, Tensor b, Tensor offs, Tensor? scale_a=None, Tensor? scale_b=None, Tensor? " \
    "bias=None, "                                                                            \
    "str activation=\"none\", ScalarType? out_dtype=None, str accumulate=\"precise\")"

#define SPARSE_GEMM_ARGS                                                                          \
    "(Tensor a, Tensor values, Tensor meta, Tensor? scale_a=None, Tensor? scale_b=None, Tensor? " \
    "bias=None, "                                                                                 \
    "str activation=\"none\", ScalarType? out_dtype=None)"

#define CODES_SCALE " -> (Tensor codes, Tensor scale)"
#define NORM_ARGS(eps)                                                                         \
    "(Tensor x, Tensor? weight=None, Tensor? bias=None, Tensor? residual=None, float eps=" eps \
    ", float weight_offset=0.0)"
#define NORM_BWD_ARGS                                                                 \
    "(Tensor grad_out, Tensor h, Tensor? weight, Tensor? grad_sum, float eps, float " \
    "weight_offset, "                                                                 \
    "bool need_weight, bool need_bias, bool wide_bias=False)"
#define SOFTMAX_ARGS "(Tensor x, float scale=1.0, Tensor? lengths=None)"
#define SOFTMAX_BWD_ARGS "(Tensor grad_out, Tensor out, float scale=1.0, Tensor? lengths=None)"
#define ROPE_ARGS                                                                 \
    "(Tensor q, Tensor? k, Tensor cos, Tensor sin, Tensor? positions=None, bool " \
    "interleaved=False, bool "                                                    \
    "inverse=False)"
#define CROSS_ENTROPY_RULES                                                                      \
    "Tensor? weight=None, int ignore_index=-100, float label_smoothing=0.0, float softcap=0.0, " \
    "float "                                                                                     \
    "logit_scale=1.0, "                                                                          \
    "float z_loss=0.0"
#define CROSS_ENTROPY_BWD_ARGS                                                          \
    "(Tensor grad_loss, Tensor logits, Tensor target, Tensor lse, " CROSS_ENTROPY_RULES \
    ", SymInt first_class=0, SymInt num_classes=0)"
// a, b, c: how loss, lse and dlogits are annotated
#define CROSS_ENTROPY_GRAD_ARGS(a, b, c)                                         \
    "(Tensor logits, Tensor target, Tensor" a " loss, Tensor" b " lse, Tensor" c \
    " dlogits, " CROSS_ENTROPY_RULES ")"

#define OUT_LSE " -> (Tensor out, Tensor lse)"
#define GRADIENTS " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)"

namespace {

// An op that returns all of its results, and its _results, which returns them on meta, of the
// shapes alone.
void def_all(gk::Library &m, const std::string &name, const std::string &arguments,
             const std::string &results) {
    m.def((name + arguments + results).c_str());
    m.def((name + "_results" + arguments + results).c_str());
}

void def_explain(gk::Library &m, const std::string &name, const std::string &arguments) {
    m.def(("explain_" + name + arguments + " -> str").c_str());
}

// An op that returns the first of its results, its _fwd that returns all, its _results, and its
// explain.
void def_op(gk::Library &m, const std::string &name, const std::string &arguments,
            const std::string &results) {
    m.def((name + arguments + " -> Tensor").c_str());
    m.def((name + "_fwd" + arguments + results).c_str());
    m.def((name + "_results" + arguments + results).c_str());
    def_explain(m, name, arguments);
}

// The op into memory of the caller's. It returns nothing: torch.compile takes no op that returns an
// argument. From Python it returns out all the same (torch_gpukern/ops/out.py).
void def_out(gk::Library &m, const std::string &name, const std::string &arguments) {
    m.def((name + ".out" + arguments.substr(0, arguments.size() - 1) + ", *, Tensor(a!) out) -> ()")
              .c_str());
}

// An op, its _results and its explain.
void def_rows(gk::Library &m, const std::string &name, const std::string &arguments,
              const std::string &results) {
    def_all(m, name, arguments, results);
    def_explain(m, name, arguments);
}

void define_rows(gk::Library &m) {
    def_rows(m, "rms_norm", NORM_ARGS("1e-06"), " -> (Tensor out, Tensor sum)");
    def_rows(m, "layer_norm", NORM_ARGS("1e-05"), " -> (Tensor out, Tensor sum)");
    for (const char *name : {"rms_norm_bwd", "layer_norm_bwd"})
        def_all(m, name, NORM_BWD_ARGS, " -> (Tensor dx, Tensor dweight, Tensor dbias)");
    for (const char *name : {"softmax", "log_softmax"})
        def_rows(m, name, SOFTMAX_ARGS, " -> Tensor out");
    for (const char *name : {"softmax_bwd", "log_softmax_bwd"})
        def_all(m, name, SOFTMAX_BWD_ARGS, " -> Tensor dx");
    def_rows(m, "swiglu", "(Tensor gate, Tensor? up=None)", " -> Tensor out");
    def_rows(m, "geglu", "(Tensor gate, Tensor? up=None, str approximate=\"none\")",
             " -> Tensor out");
    def_all(m, "glu_bwd", "(Tensor grad_out, Tensor gate, Tensor? up, str approximate)",
            " -> (Tensor dgate, Tensor dup)");
    def_rows(m, "rope", ROPE_ARGS, " -> (Tensor out_q, Tensor out_k)");
    def_rows(m, "cross_entropy", "(Tensor logits, Tensor target, " CROSS_ENTROPY_RULES ")",
             " -> (Tensor loss, Tensor lse)");
    def_all(m, "cross_entropy_bwd", CROSS_ENTROPY_BWD_ARGS, " -> Tensor");
    def_out(m, "cross_entropy_bwd", CROSS_ENTROPY_BWD_ARGS); // out may be logits
    m.def("cross_entropy_grad" CROSS_ENTROPY_GRAD_ARGS("(a!)", "(b!)", "(c!)") " -> ()");
    m.def("cross_entropy_grad_results" CROSS_ENTROPY_GRAD_ARGS("", "", "") " -> ()");
}

void define_train(gk::Library &m) {
    def_rows(m, "dropout", "(Tensor x, float p, Tensor seed)", " -> Tensor out");
    def_rows(m, "dropout_add", "(Tensor x, Tensor residual, float p, Tensor seed)",
             " -> Tensor out");
    def_rows(m, "bias_gelu_dropout",
             "(Tensor x, Tensor? bias, float p, Tensor seed, str approximate=\"none\")",
             " -> Tensor out");
    def_all(m, "bias_gelu_dropout_bwd",
            "(Tensor grad_out, Tensor x, Tensor? bias, float p, Tensor seed, str approximate)",
            " -> Tensor dx");
    m.def("adamw_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] "
          "exp_avg_sqs, "
          "Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] masters, Tensor[] steps, *, Tensor? "
          "lr_tensor=None, "
          "Tensor? grad_scale=None, Tensor? clip=None, Tensor? found_inf=None, Tensor? seed=None, "
          "float lr=1e-3, "
          "float beta1=0.9, float beta2=0.999, float eps=1e-8, float weight_decay=1e-2, bool "
          "maximize=False) -> ()");
}

void define(gk::Library &m) {
    def_op(m, "gemm", GEMM_ARGS, " -> (Tensor out, Tensor preact)");
    def_out(m, "gemm", GEMM_ARGS);
    def_all(m, "gemm_act_bwd", "(Tensor grad_out, Tensor saved, str activation)",
            " -> Tensor grad_in");

    def_op(m, "flash_attn", FLASH_ATTN_ARGS, OUT_LSE);
    def_all(m, "flash_attn_bwd", FLASH_ATTN_BWD_ARGS, GRADIENTS);
    def_explain(m, "flash_attn_bwd", FLASH_ATTN_BWD_ARGS);

    def_op(m, "flash_attn_varlen", FLASH_ATTN_VARLEN_ARGS, OUT_LSE);
    def_out(m, "flash_attn_varlen", FLASH_ATTN_VARLEN_ARGS);
    def_all(m, "flash_attn_varlen_bwd", FLASH_ATTN_VARLEN_BWD_ARGS, GRADIENTS);

    def_op(m, "flash_attn_fp8", "(Tensor q, Tensor k, Tensor v, " DENSE_RULES FP8_SCALES, OUT_LSE);
    def_op(m, "flash_attn_varlen_fp8",
           "(Tensor q, Tensor k, Tensor v, " PACKED_LENGTHS PACKED_RULES FP8_SCALES, OUT_LSE);

    def_all(m, "attn_merge", "(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b)", OUT_LSE);

    m.def("flash_attn_accumulate" ACCUMULATE_ARGS("(a!)", "(b!)") " -> ()");
    m.def("flash_attn_accumulate_results" ACCUMULATE_ARGS("", "") " -> ()");
    m.def("flash_attn_into" ACCUMULATE_ARGS("(a!)", "(b!)") " -> ()");
    m.def("flash_attn_into_results" ACCUMULATE_ARGS("", "") " -> ()");

    m.def("sum_over_ranks(Tensor x, Tensor(a!) out, Tensor(b!)[] mailboxes, int rank, float "
          "timeout_s) -> ()");

    def_op(m, "paged_attn", PAGED_ATTN_ARGS, OUT_LSE);
    def_out(m, "paged_attn", PAGED_ATTN_ARGS);
    m.def("kv_cache_write(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, "
          "Tensor slots, Tensor? k_scale=None, Tensor? v_scale=None) -> ()");
    m.def("rope_kv_write" ROPE_KV_WRITE_ARGS("(a!)", "(b!)") " -> Tensor out_q");
    m.def("rope_kv_write_results" ROPE_KV_WRITE_ARGS("", "") " -> Tensor out_q");
    def_explain(m, "rope_kv_write", ROPE_KV_WRITE_ARGS("", ""));
    m.def("kv_cache_write_results(Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, "
          "Tensor slots, Tensor? k_scale=None, Tensor? v_scale=None) -> ()");

    def_rows(
        m, "quantize",
        "(Tensor x, ScalarType dtype, str granularity, Tensor? scale_ub=None, Tensor? scale=None)",
        CODES_SCALE);
    def_rows(m, "silu_mul_quantize",
             "(Tensor gate, Tensor up, ScalarType dtype, str granularity, Tensor? scale_ub=None)",
             CODES_SCALE);
    def_rows(m, "rms_norm_quantize",
             "(Tensor x, Tensor? weight, Tensor? residual, float eps, ScalarType dtype, str "
             "granularity, "
             "Tensor? scale_ub=None)",
             " -> (Tensor codes, Tensor scale, Tensor sum)");
    def_rows(m, "dequantize", "(Tensor codes, Tensor scale, ScalarType dtype=float)", " -> Tensor");

    def_all(m, "scaled_gemm", SCALED_GEMM_ARGS, " -> Tensor");
    def_explain(m, "scaled_gemm", SCALED_GEMM_ARGS);

    def_all(m, "pack_weight", "(Tensor q, str format)", " -> Tensor");
    def_all(m, "unpack_weight", "(Tensor packed, SymInt n, SymInt k, str format)", " -> Tensor");
    def_all(m, "weight_gemm", WEIGHT_GEMM_ARGS, " -> Tensor");
    def_explain(m, "weight_gemm", WEIGHT_GEMM_ARGS);

    def_all(m, "grouped_gemm", GROUPED_GEMM_ARGS, " -> Tensor");
    def_explain(m, "grouped_gemm", GROUPED_GEMM_ARGS);
    def_all(m, "sparse_pack", "(Tensor w)", " -> (Tensor values, Tensor meta)");
    def_all(m, "sparse_gemm", SPARSE_GEMM_ARGS, " -> Tensor");
    def_explain(m, "sparse_gemm", SPARSE_GEMM_ARGS);
    define_rows(m);
    define_train(m);

    m.def("version() -> str");
    m.def("cpu_isa() -> str");
    m.def("cpu_isas() -> str");
    m.def("cpu_isa_reason() -> str");
    m.def("cuda_kernels() -> str");
    m.def("check_errors() -> ()");
    m.def("serves_head_dim(int head_dim, bool cuda) -> bool");

    m.def("explain_for(str arch) -> ()");
    m.def("gemm_prefer(str device, str gemm_class, str row) -> ()");
    m.def("gemm_prefer_none() -> ()");
    m.def("limit_sms(int sms) -> int");
    m.def("capture_id(int stream) -> int");
    m.def("mailbox_bytes(int elements, int ranks) -> int");
}

std::string version() { return gk_version(); }

// The one that calls use.
std::string cpu_isa() {
    const char *asked = gk::chosen_isa("cpu_isa");
    return asked ? asked : gk_cpu_isa();
}

std::string cpu_isas() { return gk_cpu_isas(); }

// Why a better set of the machine is not taken; nothing where GPUKERN_CPU chose.
std::string cpu_isa_reason() { return gk::chosen_isa("cpu_isa_reason") ? "" : gk_cpu_isa_reason(); }

std::string cuda_kernels() { return gk_cuda_kernels(); }

// On the CPU every error is raised by the call that made it: there is none to collect.
void check_errors() { gk::raise_device_errors("check_errors", gk_cuda_error_word()); }

struct HeadDimArgs {
    int64_t head_dim;
    bool cuda;
};

bool serves_head_dim(HeadDimArgs &x) {
    return gk_serves_head_dim(x.cuda ? GK_CUDA : GK_CPU, x.head_dim);
}

// Which GPU the explain_* ops of this thread speak of: "sm_90", or "" for that of their tensors.
struct ArchArgs {
    gk::String arch;
};

void explain_for(ArchArgs &x) {
    const std::string arch(x.arch);
    int32_t index = -1;
    if (!arch.empty()) gk::status_ok("explain", gk_cuda_arch(arch.c_str(), &index));
    gk::described_gpu = index;
}

// Both texts are what explain_gemm said of a call on CUDA; an empty row forgets the key's.
struct PreferArgs {
    gk::String device, gemm_class, row;
};

void gemm_prefer(PreferArgs &x) {
    const std::string device(x.device), gemm_class(x.gemm_class), row(x.row);
    gk::status_ok("gemm_prefer", gk_gemm_prefer_class(device.c_str(), gemm_class.c_str(),
                                                      row.empty() ? nullptr : row.c_str()));
}

void gemm_prefer_none() { gk_gemm_prefer_none(); }

struct LimitArgs {
    int64_t sms;
};

// The limit before.
int64_t limit_sms(LimitArgs &x) {
    const int64_t before = gk_sm_limit();
    gk::status_ok("limit_sms", gk_limit_sms(static_cast<int32_t>(x.sms)));
    return before;
}

struct CaptureArgs {
    int64_t stream; // the address of a CUDA stream
};

// The number of the capture that the stream is in, 0: none.
int64_t capture_id(CaptureArgs &x) {
    return static_cast<int64_t>(gk_capture_id(reinterpret_cast<void *>(x.stream)));
}

struct MailboxArgs {
    int64_t elements, ranks;
};

int64_t mailbox_bytes(MailboxArgs &x) {
    return static_cast<int64_t>(gk_mailbox_bytes(x.elements, static_cast<int32_t>(x.ranks)));
}

void implement(gk::Library &m) {
    m.impl("version", gk::boxed<version>);
    m.impl("cpu_isa", gk::boxed<cpu_isa>);
    m.impl("cpu_isas", gk::boxed<cpu_isas>);
    m.impl("cpu_isa_reason", gk::boxed<cpu_isa_reason>);
    m.impl("cuda_kernels", gk::boxed<cuda_kernels>);
    m.impl("check_errors", gk::boxed<check_errors>);
    m.impl("explain_for", gk::boxed<explain_for>);
    m.impl("serves_head_dim", gk::boxed<serves_head_dim>);
    m.impl("gemm_prefer", gk::boxed<gemm_prefer>);
    m.impl("gemm_prefer_none", gk::boxed<gemm_prefer_none>);
    m.impl("limit_sms", gk::boxed<limit_sms>);
    m.impl("capture_id", gk::boxed<capture_id>);
    m.impl("mailbox_bytes", gk::boxed<mailbox_bytes>);
}

const gk::Registered schemas(gk::Library::Kind::DEF, nullptr, define, __FILE__);
const gk::Registered ops_without_tensors(gk::Library::Kind::IMPL, "CompositeExplicitAutograd",
                                         implement, __FILE__);

} // namespace
