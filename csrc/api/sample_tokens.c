/* SPDX-License-Identifier: BSD-3-Clause */
/* sample_tokens: the check and the cost of gk_sample_tokens. */
#include "../core/checks.h"
#include "../core/dispatch.h"
#include "gpukern_sample.h"

/* The sum of this many weights of 2^43 fits into an int64 (csrc/formats/sample_weight.h). */
#define MOST_TOKENS ((INT64_C(1) << 20) - 1)

/* A vector [R] of float64 or float32. t may be NULL. */
static gk_status take_numbers(gk_io *io, const char *name, const gk_tensor *t, int64_t rows) {
    if (!t) return GK_OK;
    GK_TRY(gk_take(io, name, t, GK_ANY_STRIDES));
    GK_TRY(gk_check_dtypes(io, name, t, GK_F64, GK_F32));
    return gk_check_length_of(name, t, rows);
}

static gk_status take_integers(gk_io *io, const char *name, const gk_tensor *t) {
    GK_TRY(gk_take(io, name, t, GK_ANY_STRIDES));
    return gk_check_dtypes(io, name, t, GK_I64, GK_I32);
}

/* Checks counts and the arguments that need counts. */
static gk_status take_penalties(gk_io *io, const gk_sample_tokens_args *a, int64_t rows,
                                int64_t vocab) {
    const char *name = a->prompt       ? "prompt"
                       : a->slots      ? "slots"
                       : a->drafted    ? "drafted"
                       : a->presence   ? "presence_penalty"
                       : a->frequency  ? "frequency_penalty"
                       : a->repetition ? "repetition_penalty"
                                       : NULL;
    GK_REQUIRE(a->counts || !name,
               "%s is given without counts; pass counts [S, V] and slots [R], or leave out %s",
               name, name);
    if (!a->counts) return GK_OK;
    GK_TRY(gk_take(io, "counts", a->counts, GK_DENSE_LAST));
    GK_TRY(gk_check_dtype(io, "counts", a->counts, GK_I32));
    GK_TRY(gk_check_dims("counts", a->counts, 2, "[S, V]"));
    GK_TRY(gk_check_same("counts", "tokens", a->counts->shape[1], "logits", vocab));
    if (a->prompt) {
        GK_TRY(gk_take(io, "prompt", a->prompt, GK_DENSE_LAST));
        GK_TRY(gk_check_dtype(io, "prompt", a->prompt, GK_U8));
        GK_TRY(gk_check_shape("prompt", a->prompt, 2, a->counts->shape));
    }
    GK_REQUIRE(a->slots,
               "counts is given without slots; pass slots [R], the row of counts of each row");
    GK_TRY(take_integers(io, "slots", a->slots));
    GK_TRY(gk_check_length_of("slots", a->slots, rows));
    if (a->drafted) {
        GK_TRY(take_integers(io, "drafted", a->drafted));
        GK_TRY(gk_check_dims("drafted", a->drafted, 2, "[R, D]"));
        GK_TRY(gk_check_same("drafted", "rows", a->drafted->shape[0], "logits", rows));
    }
    GK_TRY(take_numbers(io, "presence_penalty", a->presence, rows));
    GK_TRY(take_numbers(io, "frequency_penalty", a->frequency, rows));
    return take_numbers(io, "repetition_penalty", a->repetition, rows);
}

gk_status gk_check_sample_tokens(const gk_context *ctx, const gk_sample_tokens_args *a, gk_io *io) {
    const gk_tensor *logits = &a->logits;
    GK_TRY(gk_take(io, "logits", logits, GK_DENSE_LAST));
    GK_TRY(gk_check_float(io, "logits", logits));
    GK_TRY(gk_check_dims("logits", logits, 2, "[R, V]"));
    const int64_t rows = logits->shape[0], vocab = logits->shape[1];
    GK_REQUIRE(vocab >= 1 && vocab <= MOST_TOKENS,
               "logits must have between 1 and 2^20 - 1 columns, got %lld", (long long)vocab);
    GK_TRY(take_numbers(io, "temperature", &a->temperature, rows));
    GK_TRY(take_numbers(io, "number", &a->number, rows));
    if (a->top_k) {
        GK_TRY(take_integers(io, "top_k", a->top_k));
        GK_TRY(gk_check_length_of("top_k", a->top_k, rows));
    }
    GK_TRY(take_numbers(io, "top_p", a->top_p, rows));
    GK_TRY(take_numbers(io, "min_p", a->min_p, rows));
    GK_TRY(take_penalties(io, a, rows, vocab));
    gk_give(io, "out", &a->out, GK_I64, 1, &rows, GK_CONTIGUOUS);
    return gk_reads_contents(io, ctx) ? gk_check_count_slots(a) : GK_OK;
}

void gk_cost_sample_tokens(const gk_context *ctx, const gk_sample_tokens_args *a,
                           gk_explanation *out) {
    (void)ctx;
    const double values = (double)gk_numel(&a->logits);
    /* a row with penalties also reads 4 bytes of counts and 1 byte of prompt for each token */
    out->bytes = gk_tensor_bytes(&a->logits) + gk_tensor_bytes(&a->out) +
                 values * (a->counts ? (a->prompt ? 5 : 4) : 0);
    out->flops = 20.0 * values;
}
