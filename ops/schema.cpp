// SPDX-License-Identifier: BSD-3-Clause
// schema.cpp: every schema of the plugin, and the ops that take no tensor.
//
//   X            returns the first result, or all results if there is no X_fwd
//   X_fwd        returns all results; X_bwd returns the gradients. torch_gpukern/ops builds
//                autograd from the two.
//   X_results    returns all results on the meta device, for fake tensors
//   X.out        writes the caller's tensor
//   explain_X    takes X's arguments and returns as JSON what the call would do
//
// A result that is not wanted is an empty tensor, because tracers and Inductor's C++ wrapper accept
// no optional results. A SymInt reaches a kernel as int64.
#include "box.h"
#include "call.h"
#include "core/invariant.h"
#include "gpukern.h"
#include "rules.h"

#define GEMM_ARGS                                                                               \
    "(Tensor a, Tensor b, Tensor? bias=None, Tensor? c=None, float alpha=1.0, float beta=1.0, " \
    "str activation=\"none\", ScalarType? out_dtype=None, str fp32_precision=\"ieee\")"

#define QKV "(Tensor q, Tensor k, Tensor v"
#define PACKED_LENGTHS \
    ", Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
#define FORWARD_RESULTS "(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse"

#define FLASH_ATTN_ARGS QKV GK_RULES_SCHEMA(flash_attn) ")"
#define FLASH_ATTN_BWD_ARGS \
    FORWARD_RESULTS ", Tensor? grad_lse=None" GK_RULES_SCHEMA(flash_attn_bwd) ")"
// A mask and biases. attn_mask is the result of the op attn_mask for mask_seq_q queries and
// mask_seq_k keys; mask_store is its gk_mask_store.
#define SCORES                                                                               \
    ", Tensor? attn_mask=None, int mask_store=0, SymInt mask_seq_q=0, SymInt mask_seq_k=0, " \
    "Tensor? bias=None, Tensor? distance_bias=None"
#define FLASH_ATTN_MASKED_ARGS QKV SCORES GK_RULES_SCHEMA(flash_attn) ")"
#define FLASH_ATTN_MASKED_BWD_ARGS                                                           \
    FORWARD_RESULTS ", Tensor? grad_lse=None" SCORES                                         \
                    ", bool need_bias=False, bool need_distance_bias=False" GK_RULES_SCHEMA( \
                        flash_attn_bwd) ")"
#define FLASH_ATTN_FP8_ARGS QKV GK_RULES_SCHEMA(flash_attn_fp8) ")"
// a, b: the alias annotations of out and lse
#define ACCUMULATE_ARGS(a, b) \
    QKV ", Tensor" a " out, Tensor" b " lse" GK_RULES_SCHEMA(flash_attn_into) ")"

#define FLASH_ATTN_VARLEN_ARGS QKV PACKED_LENGTHS GK_RULES_SCHEMA(varlen) ")"
// The lengths have no default, so they come before grad_lse.
#define FLASH_ATTN_VARLEN_BWD_ARGS \
    FORWARD_RESULTS PACKED_LENGTHS ", Tensor? grad_lse=None" GK_RULES_SCHEMA(varlen_bwd) ")"
#define FLASH_ATTN_VARLEN_FP8_ARGS QKV PACKED_LENGTHS GK_RULES_SCHEMA(varlen_fp8) ")"

#define PAGED_ATTN_ARGS                                                                \
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, " \
    "Tensor? cu_seqlens_q=None, SymInt max_seqlen_q=1" GK_RULES_SCHEMA(paged_attn) ")"

// attn_mask has no default, so it comes before cu_seqlens_q.
#define PAGED_ATTN_MASKED_ARGS                                                            \
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, "    \
    "Tensor attn_mask, Tensor? cu_seqlens_q=None, SymInt max_seqlen_q=1" GK_RULES_SCHEMA( \
        paged_attn) ")"

// a, b: the alias annotations of the caches
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
    "out_dtype=None, Tensor? offs=None)"

#define GROUPED_GEMM_ARGS                                                                    \
    "(Tensor a, Tensor b, Tensor offs, Tensor? scale_a=None, Tensor? scale_b=None, Tensor? " \
    "bias=None, "                                                                            \
    "str activation=\"none\", ScalarType? out_dtype=None, str accumulate=\"precise\")"

#define SPARSE_GEMM_ARGS                                                                          \
    "(Tensor a, Tensor values, Tensor meta, Tensor? scale_a=None, Tensor? scale_b=None, Tensor? " \
    "bias=None, "                                                                                 \
    "str activation=\"none\", ScalarType? out_dtype=None, str accumulate=\"precise\")"

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
// a, b, c: the alias annotations of loss, lse and dlogits
#define CROSS_ENTROPY_GRAD_ARGS(a, b, c)                                         \
    "(Tensor logits, Tensor target, Tensor" a " loss, Tensor" b " lse, Tensor" c \
    " dlogits, " CROSS_ENTROPY_RULES ")"

#define KL_DIV_RULES "Tensor? mask=None, float beta=0.0, float temperature=1.0)"
// a, b: the alias annotations of loss and dlogits
#define KL_DIV_GRAD_ARGS(a, b) \
    "(Tensor logits, Tensor teacher_logits, Tensor" a " loss, Tensor" b " dlogits, " KL_DIV_RULES

// Arguments that the raw ops of linear_cross_entropy share.
#define LCE_RULES                                                                                  \
    "Tensor? bias, Tensor? class_weight, int ignore_index, float label_smoothing, float softcap, " \
    "float logit_scale, float z_loss, str fp32_precision"
#define LCE_NEEDS ", bool need_x, bool need_weight, bool need_bias"

// The last arguments of the raw ops of context_parallel_attn and context_parallel_attn_varlen.
#define RANKS_RULES ", SymInt seq_len, str group" GK_RULES_SCHEMA(ranks) ")"

#define OUT_LSE " -> (Tensor out, Tensor lse)"
#define GRADIENTS " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)"

namespace {

// Defines X, which returns all results, and X_results.
void def_all(gk::Library &m, const std::string &name, const std::string &arguments,
             const std::string &results) {
    m.def((name + arguments + results).c_str());
    m.def((name + "_results" + arguments + results).c_str());
}

void def_explain(gk::Library &m, const std::string &name, const std::string &arguments) {
    m.def(("explain_" + name + arguments + " -> str").c_str());
}

// Defines X, which returns the first result, X_fwd, X_results and explain_X.
void def_op(gk::Library &m, const std::string &name, const std::string &arguments,
            const std::string &results) {
    m.def((name + arguments + " -> Tensor").c_str());
    m.def((name + "_fwd" + arguments + results).c_str());
    m.def((name + "_results" + arguments + results).c_str());
    def_explain(m, name, arguments);
}

// Defines X.out, which writes the caller's tensor. The schema returns nothing, because
// torch.compile accepts no op that returns one of its arguments. The public Python function returns
// out anyway (torch_gpukern/ops/out.py).
void def_out(gk::Library &m, const std::string &name, const std::string &arguments) {
    m.def((name + ".out" + arguments.substr(0, arguments.size() - 1) + ", *, Tensor(a!) out) -> ()")
              .c_str());
}

// Defines X, which returns all results, X_results and explain_X.
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
    def_op(m, "kl_div", "(Tensor logits, Tensor teacher_logits, " KL_DIV_RULES,
           " -> (Tensor loss, Tensor dlogits)");
    m.def("kl_div_grad" KL_DIV_GRAD_ARGS("(a!)", "(b!)") " -> ()");
    m.def("kl_div_grad_results" KL_DIV_GRAD_ARGS("", "") " -> ()");
    def_rows(m, "moe_unpermute", "(Tensor rows, Tensor place, Tensor weight)", " -> Tensor out");
    def_all(m, "moe_unpermute_bwd",
            "(Tensor grad_out, Tensor rows, Tensor place, Tensor weight, bool need_rows, bool "
            "need_weight)",
            " -> (Tensor drows, Tensor dweight)");
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

// Ops whose kernels are Python functions that call other ops. define_op registers those functions
// (torch_gpukern/ops/define.py).
void define_composed(gk::Library &m) {
    m.def("kl_div_bwd(Tensor grad_loss, Tensor dlogits) -> Tensor");
    m.def("linear_kl_div_fwd(Tensor x, Tensor weight, Tensor? bias, Tensor teacher_x, Tensor "
          "teacher_weight, Tensor? teacher_bias, Tensor? mask, float beta, float temperature, str "
          "fp32_precision, str reduction, bool low_memory" LCE_NEEDS
          ") -> (Tensor loss, Tensor factor, Tensor dx, Tensor kept, Tensor dbias)");
    m.def("linear_kl_div_bwd(Tensor grad_loss, Tensor factor, Tensor dx, Tensor kept, Tensor "
          "dbias, Tensor x, str fp32_precision, bool low_memory) -> (Tensor dx_scaled, Tensor "
          "dweight, Tensor "
          "dbias_scaled)");
    m.def("linear_cross_entropy(Tensor x, Tensor weight, Tensor target, Tensor? bias=None, *, "
          "Tensor? class_weight=None, int ignore_index=-100, float label_smoothing=0.0, float "
          "softcap=0.0, "
          "float logit_scale=1.0, str reduction=\"mean\", bool low_memory=False, float z_loss=0.0) "
          "-> Tensor");
    m.def("linear_cross_entropy_fwd(Tensor x, Tensor weight, Tensor target, " LCE_RULES
          ", str reduction" LCE_NEEDS
          ") -> (Tensor loss, Tensor factor, Tensor dx, Tensor kept, Tensor dbias)");
    m.def("linear_cross_entropy_bwd(Tensor grad_loss, Tensor factor, Tensor dx, Tensor kept, "
          "Tensor dbias, Tensor x, "
          "str fp32_precision) -> (Tensor dx_scaled, Tensor dweight, Tensor dbias_scaled)");
    m.def("linear_cross_entropy_rows(Tensor x, Tensor weight, Tensor target, " LCE_RULES
          ") -> (Tensor loss, Tensor lse)");
    m.def("linear_cross_entropy_kept(Tensor x, Tensor weight, Tensor target, " LCE_RULES
          ") -> (Tensor loss, Tensor lse, Tensor kept)");
    m.def("linear_cross_entropy_kept_bwd(Tensor grad_loss, Tensor kept, Tensor x, Tensor weight, "
          "Tensor target, Tensor lse, " LCE_RULES LCE_NEEDS
          ") -> (Tensor dx, Tensor dweight, Tensor dbias)");
    m.def("linear_cross_entropy_rows_bwd(Tensor grad_loss, Tensor x, Tensor weight, Tensor target, "
          "Tensor lse, " LCE_RULES LCE_NEEDS ") -> (Tensor dx, Tensor dweight, Tensor dbias)");
}

// Ops over several ranks, also implemented in Python (torch_gpukern/distributed). `group` is the
// name of a process group.
void define_ranks(gk::Library &m) {
    m.def("cp_attn_fwd" QKV ", str layout, str mode" RANKS_RULES OUT_LSE);
    m.def("cp_attn_bwd" FORWARD_RESULTS
          ", Tensor? grad_lse, str layout, str mode" RANKS_RULES GRADIENTS);
    m.def("cp_attn_varlen_fwd" QKV
          ", Tensor cu_seqlens, SymInt max_seqlen, str layout" RANKS_RULES OUT_LSE);
    m.def("cp_attn_varlen_bwd" FORWARD_RESULTS
          ", Tensor cu_seqlens, SymInt max_seqlen, Tensor? grad_lse, str layout" RANKS_RULES
              GRADIENTS);
    m.def("cp_paged_attn(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor "
          "local_seq_lens, "
          "Tensor? cu_seqlens_q, SymInt max_seqlen_q, str group" GK_RULES_SCHEMA(
              ranks_paged) ")" OUT_LSE);

    m.def("all_gather_gemm_fwd(Tensor a, Tensor b, Tensor? bias, str activation, bool keep, str "
          "group) -> "
          "(Tensor out, Tensor gathered, Tensor preact)");
    m.def("rows_to_owners(Tensor x, Tensor b, SymInt rows, str group) -> Tensor out");
    m.def("product_to_owners(Tensor a, Tensor b, SymInt rows, str group) -> Tensor out");
    m.def("gemm_reduce_scatter(Tensor a, Tensor b, str group) -> Tensor out");
    m.def("gather_rows(Tensor x, SymInt rows, str group) -> Tensor out");
    m.def("gathered_product(Tensor x, Tensor b, SymInt rows, str group) -> (Tensor out, Tensor "
          "gathered)");
    m.def("gemm_all_reduce(Tensor a, Tensor b, str group) -> Tensor out");
    m.def(
        "gather_sequence(Tensor x, int dim, str layout, SymInt seq_len, str group) -> Tensor out");

    m.def("vocab_parallel_embedding(Tensor ids, Tensor weight, SymInt classes, SymInt padding_idx, "
          "str group) -> Tensor out");
    // reduction is what the caller does with loss: the op compares it over the ranks
    m.def("vocab_parallel_lce_fwd(Tensor x, Tensor weight, Tensor target, " LCE_RULES
          ", str reduction, SymInt classes, str group) -> (Tensor loss, Tensor lse)");
    m.def("vocab_parallel_lce_bwd(Tensor grad_loss, Tensor x, Tensor weight, Tensor target, Tensor "
          "lse, " LCE_RULES ", SymInt classes, str group" LCE_NEEDS
          ") -> (Tensor dx, Tensor dweight, Tensor dbias)");
}

void define(gk::Library &m) {
    def_op(m, "gemm", GEMM_ARGS, " -> (Tensor out, Tensor preact)");
    def_out(m, "gemm", GEMM_ARGS);
    def_all(m, "gemm_act_bwd", "(Tensor grad_out, Tensor saved, str activation)",
            " -> Tensor grad_in");

    def_op(m, "flash_attn", FLASH_ATTN_ARGS, OUT_LSE);
    def_all(m, "flash_attn_bwd", FLASH_ATTN_BWD_ARGS, GRADIENTS);
    def_explain(m, "flash_attn_bwd", FLASH_ATTN_BWD_ARGS);

    def_op(m, "flash_attn_masked", FLASH_ATTN_MASKED_ARGS, OUT_LSE);
    def_all(m, "flash_attn_masked_bwd", FLASH_ATTN_MASKED_BWD_ARGS,
            " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks, Tensor dbias, Tensor "
            "ddistance_bias)");

    def_op(m, "flash_attn_varlen", FLASH_ATTN_VARLEN_ARGS, OUT_LSE);
    def_out(m, "flash_attn_varlen", FLASH_ATTN_VARLEN_ARGS);
    def_all(m, "flash_attn_varlen_bwd", FLASH_ATTN_VARLEN_BWD_ARGS, GRADIENTS);

    def_op(m, "flash_attn_fp8", FLASH_ATTN_FP8_ARGS, OUT_LSE);
    def_op(m, "flash_attn_varlen_fp8", FLASH_ATTN_VARLEN_FP8_ARGS, OUT_LSE);

    def_all(m, "attn_mask",
            "(Tensor first, str source, SymInt seq_q, SymInt seq_k, Tensor? kv_indices=None, "
            "Tensor? full_kv_num_blocks=None, Tensor? full_kv_indices=None, Tensor? mask=None, "
            "bool is_bits=False, "
            "bool is_causal=False, bool transposed=False)",
            " -> Tensor out");
    def_all(m, "sample_tokens",
            "(Tensor logits, Tensor temperature, Tensor number, Tensor? top_k=None, "
            "Tensor? top_p=None, Tensor? min_p=None, Tensor? counts=None, Tensor? prompt=None, "
            "Tensor? slots=None, Tensor? drafted=None, Tensor? presence_penalty=None, "
            "Tensor? frequency_penalty=None, Tensor? repetition_penalty=None)",
            " -> Tensor out");
    def_all(m, "attn_merge", "(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b)", OUT_LSE);

    m.def("flash_attn_accumulate" ACCUMULATE_ARGS("(a!)", "(b!)") " -> ()");
    m.def("flash_attn_accumulate_results" ACCUMULATE_ARGS("", "") " -> ()");
    m.def("flash_attn_into" ACCUMULATE_ARGS("(a!)", "(b!)") " -> ()");
    m.def("flash_attn_into_results" ACCUMULATE_ARGS("", "") " -> ()");

    m.def("sum_over_ranks(Tensor x, Tensor(a!) out, Tensor(b!)[] mailboxes, int rank, float "
          "timeout_s) -> ()");

    def_op(m, "paged_attn", PAGED_ATTN_ARGS, OUT_LSE);
    def_out(m, "paged_attn", PAGED_ATTN_ARGS);
    def_op(m, "paged_attn_masked", PAGED_ATTN_MASKED_ARGS, OUT_LSE);
    m.def("kv_cache_write(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, "
          "Tensor slots, Tensor? k_scale=None, Tensor? v_scale=None) -> ()");
    m.def("kv_cache_write_latent(Tensor c, Tensor k_pe, Tensor(a!) cache, Tensor slots) -> ()");
    m.def("kv_cache_write_latent_results(Tensor c, Tensor k_pe, Tensor cache, Tensor slots) -> ()");
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
    define_composed(m);
    define_ranks(m);

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
    m.def("set_batch_invariant(bool on) -> bool");
    m.def("capture_id(int stream) -> int");
    m.def("mailbox_bytes(int elements, int ranks) -> int");
}

std::string version() { return gk_version(); }

// The instruction set that calls use: GPUKERN_CPU if it is set, otherwise the default.
std::string cpu_isa() {
    const char *asked = gk::chosen_isa("cpu_isa");
    return asked ? asked : gk_cpu_isa();
}

std::string cpu_isas() { return gk_cpu_isas(); }

// Why calls do not use the machine's best instruction set; "" if GPUKERN_CPU is set.
std::string cpu_isa_reason() { return gk::chosen_isa("cpu_isa_reason") ? "" : gk_cpu_isa_reason(); }

std::string cuda_kernels() { return gk_cuda_kernels(); }

// Raises the errors that CUDA kernels have reported so far. On the CPU, each call raises its own.
void check_errors() { gk::raise_device_errors("check_errors", gk_cuda_error_word()); }

struct HeadDimArgs {
    int64_t head_dim;
    bool cuda;
};

bool serves_head_dim(HeadDimArgs &x) {
    return gk_serves_head_dim(x.cuda ? GK_CUDA : GK_CPU, x.head_dim);
}

// Sets the GPU that this thread's explain_* ops describe: "sm_90", or "" for the tensors' device.
struct ArchArgs {
    gk::String arch;
};

void explain_for(ArchArgs &x) {
    const std::string arch(x.arch);
    int32_t index = -1;
    if (!arch.empty()) gk::status_ok("explain", gk_cuda_arch(arch.c_str(), &index));
    gk::described_gpu = index;
}

// device and gemm_class are texts that explain_gemm returned for a call on CUDA. row is the name of
// an instance; an empty one removes the preference.
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

// Sets the limit and returns the previous one.
int64_t limit_sms(LimitArgs &x) {
    const int64_t before = gk_sm_limit();
    gk::status_ok("limit_sms", gk_limit_sms(static_cast<int32_t>(x.sms)));
    return before;
}

struct SwitchArgs {
    bool on;
};

// Switches batch-invariant products on the CPU and returns the previous state.
bool set_batch_invariant(SwitchArgs &x) { return gk_set_batch_invariant(x.on); }

struct CaptureArgs {
    int64_t stream; // the address of a CUDA stream
};

// The id of the graph capture that the stream is in; 0 if there is none.
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
    m.impl("set_batch_invariant", gk::boxed<set_batch_invariant>);
    m.impl("capture_id", gk::boxed<capture_id>);
    m.impl("mailbox_bytes", gk::boxed<mailbox_bytes>);
}

const gk::Registered schemas(gk::Library::Kind::DEF, nullptr, define, __FILE__);
const gk::Registered ops_without_tensors(gk::Library::Kind::IMPL, "CompositeExplicitAutograd",
                                         implement, __FILE__);

} // namespace
