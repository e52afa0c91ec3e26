// SPDX-License-Identifier: BSD-3-Clause
// flash_attn_fp8.cpp: flash_attn and flash_attn_varlen for q, k and v in float8_e4m3fn. Forward
// only.
#include "attn.h"
#include "words.h"

namespace gk {
namespace {

template <class O> void fill_fp8(const O &op, gk_flash_attn_fp8_args &to) {
    static const char *const words[] = {"auto", "fast", "precise"};
    fill_call(op, to);
    to.fwd.out.dtype = dtype_of_result(op.out_dtype, GK_BF16);
    to.accumulate =
        static_cast<gk_attn_accumulate>(parse_word(O::name, "accumulate", op.accumulate, words));
}

struct FlashAttnFp8 {
    Tensor q, k, v; // [B, Hq, Sq, D], [B, Hkv, Sk, D], [B, Hkv, Sk, Dv] e4m3
    GK_RULES(flash_attn_fp8)

    GK_OP(flash_attn_fp8, gk_flash_attn_fp8_args, "flash_attn", 2)
    GK_TENSORS_AND_RULES(flash_attn_fp8, q, k, v)

    void fill(C &to) { fill_fp8(*this, to); }
    static void place(C &to, Results &r) { place_forward(to.fwd, r); }
    const Tensor *stored_like(int i) const { return i == 0 ? &q : nullptr; }
};

struct FlashAttnVarlenFp8 {
    Tensor q, k, v;                    // [Tq, Hq, D], [Tk, Hkv, D], [Tk, Hkv, Dv] e4m3
    Tensor cu_seqlens_q, cu_seqlens_k; // [B+1] int32
    int64_t max_seqlen_q, max_seqlen_k;
    GK_RULES(varlen_fp8)

    GK_OP(flash_attn_fp8, gk_flash_attn_fp8_args, "flash_attn_varlen", 2)
    GK_TENSORS_AND_RULES(varlen_fp8, q, k, v, cu_seqlens_q, cu_seqlens_k)

    void fill(C &to) {
        fill_fp8(*this, to);
        fill_lengths(*this, to.fwd);
    }
    static void place(C &to, Results &r) { place_forward(to.fwd, r); }
    static constexpr bool runs_empty = true; // a GPU checks the lengths even without tokens
};

// explain with one more member, "accumulate": the choice that "auto" was resolved to.
template <class O> void explain_fp8(StableIValue *stack, uint64_t num_args, uint64_t) {
    O op = read_args<O>(stack, num_args);
    Checked<O> c(op, described_gpu);
    typename O::Results results;
    for (int i = 0; i < O::num_results; ++i) results[i] = c.make(i);
    O::place(c.args, results);
    const char *chosen = gk_attn_is_precise(&c.args) ? "precise" : "fast";
    stack[0] = give(c.explain(std::string(", \"accumulate\": \"") + chosen + "\""));
}

void implement(Library &m) {
    m.impl("flash_attn_fp8", op_first<FlashAttnFp8>);
    m.impl("flash_attn_fp8_fwd", op_all<FlashAttnFp8>);
    m.impl("explain_flash_attn_fp8", explain_fp8<FlashAttnFp8>);
    m.impl("flash_attn_varlen_fp8", op_first<FlashAttnVarlenFp8>);
    m.impl("flash_attn_varlen_fp8_fwd", op_all<FlashAttnVarlenFp8>);
    m.impl("explain_flash_attn_varlen_fp8", explain_fp8<FlashAttnVarlenFp8>);
}

void implement_shapes(Library &m) {
    m.impl("flash_attn_fp8_results", op_results<FlashAttnFp8>);
    m.impl("flash_attn_varlen_fp8_results", op_results<FlashAttnVarlenFp8>);
}

} // namespace
} // namespace gk

GK_IMPLEMENT()
