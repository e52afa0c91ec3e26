// SPDX-License-Identifier: BSD-3-Clause
// sample_tokens.cpp: the op sample_tokens, which draws a token from each row of logits.
#include "gpukern_sample.h"
#include "run.h"

namespace gk {
namespace {

struct SampleTokens {
    Tensor logits;                                                     // [R, V]
    Tensor temperature, number;                                        // [R]
    OptTensor top_k, top_p, min_p;                                     // [R]
    OptTensor counts, prompt;                                          // [S, V]
    OptTensor slots;                                                   // [R]
    OptTensor drafted;                                                 // [R, D]
    OptTensor presence_penalty, frequency_penalty, repetition_penalty; // [R]

    GK_OP(sample_tokens, gk_sample_tokens_args, "sample_tokens", 1)
    GK_TENSORS(logits, temperature, number, top_k, top_p, min_p, counts, prompt, slots, drafted,
               presence_penalty, frequency_penalty, repetition_penalty)

    void fill(C &to) {
        to.logits = logits.view;
        to.temperature = temperature.view;
        to.number = number.view;
        to.top_k = top_k.view_or_null();
        to.top_p = top_p.view_or_null();
        to.min_p = min_p.view_or_null();
        to.counts = counts.view_or_null();
        to.prompt = prompt.view_or_null();
        to.slots = slots.view_or_null();
        to.drafted = drafted.view_or_null();
        to.presence = presence_penalty.view_or_null();
        to.frequency = frequency_penalty.view_or_null();
        to.repetition = repetition_penalty.view_or_null();
    }
    static void place(C &to, Results &r) { to.out = r[0].view; }
};

void implement(Library &m) { m.impl("sample_tokens", op_all<SampleTokens>); }
void implement_shapes(Library &m) { m.impl("sample_tokens_results", op_results<SampleTokens>); }

} // namespace
} // namespace gk

GK_IMPLEMENT()
