/* SPDX-License-Identifier: BSD-3-Clause */
/* sample_tokens: a token of each row of logits (gpukern_sample.h has the equations). It serves
 * every dtype on the CPU. A task is one row.
 *
 * top_k and top_p need the place of a token in the order of x. -x is not negative, so its bits as
 * an integer, its key, rise as x falls. A key is found digit by digit from the top: a pass counts
 * the digits of the keys that agree so far and adds up their weights, and the digit is the one in
 * which the count or the sum passes its bound. CMakeLists.txt compiles this file with
 * -ffp-contract=off. */
#include "../formats/sample_weight.h"
#include "gpukern_sample.h"
#include "rows.h"

static const double table[32] = GK_SAMPLE_TABLE;

/* ---- a row ----------------------------------------------------------------------------------- */
typedef struct sampled_row {
    const gk_sample_tokens_args *a;
    int64_t v;
    int64_t at;                      /* of its first logit */
    int64_t slot;                    /* its row of counts; -1: no penalties */
    const gk_tensor *drafted;        /* NULL: none */
    int64_t drafted_at, num_drafted; /* the row's tokens */
    double presence, frequency, repetition;
    double largest, inverse, least; /* max y, 1 / temperature, min_p 2^43 */
} sampled_row;

static double number_of(const gk_tensor *t, int64_t row, double otherwise) {
    return t ? ref_vector_at(t, row) : otherwise;
}

static int64_t integer_of(const gk_tensor *t, int64_t at) {
    return t->dtype == GK_I64 ? ((const int64_t *)t->data)[at] : ((const int32_t *)t->data)[at];
}

static double logit_of(const sampled_row *x, int64_t token) {
    const gk_sample_tokens_args *a = x->a;
    const double y = gk_load(a->logits.data, a->logits.dtype, x->at + token * a->logits.stride[1]);
    if (x->slot < 0) return y;
    int64_t times =
        integer_of(a->counts, x->slot * a->counts->stride[0] + token * a->counts->stride[1]);
    for (int64_t d = 0; d < x->num_drafted; ++d)
        times += integer_of(x->drafted, x->drafted_at + d * x->drafted->stride[1]) == token;
    const gk_tensor *p = a->prompt;
    const int in_prompt =
        p && ((const uint8_t *)p->data)[x->slot * p->stride[0] + token * p->stride[1]] != 0;
    return gk_sample_penalised(y, times, in_prompt, x->presence, x->frequency, x->repetition);
}

/* The key of a token, and its x. False if x < GK_SAMPLE_LEAST. Such a token has no weight, and
 * comes after the others in the order of x. */
static bool key_of(const sampled_row *x, int64_t token, int64_t *key, double *value) {
    *value = (logit_of(x, token) - x->largest) * x->inverse;
    if (!(*value >= GK_SAMPLE_LEAST)) return false;
    *key = gk_double_bits(*value) & INT64_MAX;
    return true;
}

/* The weight for this x. False if min_p leaves the token out. */
static bool weigh(const sampled_row *x, double value, int64_t *weight) {
    const double e = gk_sample_exp(value, table);
    *weight = gk_sample_round(e);
    return e >= x->least;
}

/* ---- top_k and top_p ------------------------------------------------------------------------- */
enum {
    DIGIT = 11, /* bits */
    DIGITS = 1 << DIGIT
};

/* The tokens that stay: those whose key is below `last`, and of those with that key the first
 * `room`. total: their weights. */
typedef struct bound {
    int64_t last, room, total;
} bound;

static const bound no_bound = {INT64_MAX, INT64_MAX, 0};

/* The bound of the first `most` tokens in the order of x, among which a token stays if the weights
 * before it have a sum below `share`; one token stays in any case. INT64_MAX, INFINITY: no limit.
 */
static bound bound_of(const sampled_row *x, int64_t most, double share) {
    int64_t key = 0, before = 0, sum = 0; /* of the tokens before the digits so far */
    int64_t count[DIGITS], weight[DIGITS];
    for (int low = 64 - DIGIT - 1, bits = DIGIT;; low -= bits) {
        memset(count, 0, sizeof count);
        memset(weight, 0, sizeof weight);
        for (int64_t t = 0; t < x->v; ++t) {
            int64_t k, w;
            double value;
            if (!key_of(x, t, &k, &value) || (low + bits < 63 && k >> (low + bits) != key))
                continue;
            if (!weigh(x, value, &w)) continue;
            const int64_t digit = k >> low & ((1 << bits) - 1);
            ++count[digit];
            weight[digit] += w;
        }
        int chosen = -1;
        int64_t chosen_before = before, chosen_sum = sum, n = before, w = sum;
        for (int d = 0; d < 1 << bits; ++d) {
            if (!count[d]) continue;
            if (chosen >= 0 && !(n < most && (double)w < share)) break;
            chosen = d;
            chosen_before = n;
            chosen_sum = w;
            n += count[d];
            w += weight[d];
        }
        if (chosen < 0) return no_bound; /* no token has a weight */
        key = key << bits | chosen;
        before = chosen_before;
        sum = chosen_sum;
        if (low == 0) {
            const int64_t each = weight[chosen] / count[chosen];
            int64_t room = gk_min_i64(count[chosen], most - before);
            while (room > 1 && !((double)(sum + (room - 1) * each) < share)) --room;
            return (bound){key, room, sum + room * each};
        }
        if (low < DIGIT) bits = low;
    }
}

/* ---- the draw -------------------------------------------------------------------------------- */
static int64_t token_of(sampled_row *x, int64_t row) {
    const gk_sample_tokens_args *a = x->a;
    int64_t best = 0;
    x->largest = logit_of(x, 0);
    for (int64_t t = 1; t < x->v && x->largest == x->largest; ++t) {
        const double y = logit_of(x, t);
        if (y <= x->largest) continue;
        x->largest = y; /* larger, or NaN */
        best = t;
    }
    const double temperature = number_of(&a->temperature, row, 0);
    if (!(temperature > 0) || !isfinite(x->largest)) return best;
    x->inverse = 1 / temperature;
    x->least = number_of(a->min_p, row, 0) * GK_SAMPLE_ONE;
    const int64_t top_k = a->top_k ? integer_of(a->top_k, row * a->top_k->stride[0]) : 0;
    const double top_p = number_of(a->top_p, row, 1);
    bound keep = no_bound;
    if (top_k > 0 && top_k < x->v) keep = bound_of(x, top_k, INFINITY);
    if (top_p < 1) {
        int64_t total = keep.total, key, w;
        double value;
        if (keep.last == INT64_MAX)
            for (int64_t t = 0; t < x->v; ++t)
                if (key_of(x, t, &key, &value) && weigh(x, value, &w)) total += w;
        keep = bound_of(x, keep.last == INT64_MAX ? INT64_MAX : top_k, top_p * (double)total);
    }
    int64_t total = 0, place = 0;
    for (int draws = 0; draws < 2; ++draws) {
        int64_t upto = 0, room = keep.room, key, w;
        double value;
        for (int64_t t = 0; t < x->v; ++t) {
            if (!key_of(x, t, &key, &value) || key > keep.last) continue;
            if (!weigh(x, value, &w)) continue;
            if (key == keep.last && room-- <= 0) continue;
            upto += w;
            if (draws && upto > place) return t;
        }
        total = upto;
        if (total == 0) return best;
        const double at = number_of(&a->number, row, 0) * (double)total;
        place = at > 0 ? (at < (double)total ? (int64_t)at : total - 1) : 0;
        place = gk_min_i64(place, total - 1);
    }
    return best;
}

static void row_task(void *arg, int64_t row, int64_t worker) {
    (void)worker;
    const gk_sample_tokens_args *a = arg;
    sampled_row x = {.a = a, .v = a->logits.shape[1], .slot = -1};
    x.at = row * a->logits.stride[0];
    if (a->slots) x.slot = integer_of(a->slots, row * a->slots->stride[0]);
    if (x.slot >= 0 && a->drafted) {
        x.drafted = a->drafted;
        x.drafted_at = row * a->drafted->stride[0];
        x.num_drafted = a->drafted->shape[1];
    }
    x.presence = number_of(a->presence, row, 0);
    x.frequency = number_of(a->frequency, row, 0);
    x.repetition = number_of(a->repetition, row, 1);
    ((int64_t *)a->out.data)[row * a->out.stride[0]] = token_of(&x, row);
}

void gk_ref_sample_tokens(const gk_context *ctx, const gk_sample_tokens_args *args) {
    gk_sample_tokens_args a = *args;
    gk_parallel(ctx, a.logits.shape[0], row_task, &a);
}
