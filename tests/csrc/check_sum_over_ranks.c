/* SPDX-License-Identifier: BSD-3-Clause */
/* check_sum_over_ranks: what gk_sum_over_ranks refuses, and the size of a mailbox. The sums
 * themselves need GPUs (tests/distributed). A call with a CPU context passes every check but the
 * last, which asks for a GPU. */
#include <math.h>

#include "check.h"
#include "core/mailbox.h"

enum {
    N = 24,
    RANKS = 3
};

static _Alignas(16) float x_data[2 * N], out_data[2 * N];
static _Alignas(16) char mailbox_data[GK_MAILBOX_HEADER + 8 * N * RANKS];

static gk_tensor dense(void *data, int64_t rows, int64_t columns) {
    return (gk_tensor){
        .data = data, .dtype = GK_F32, .ndim = 2, .shape = {rows, columns}, .stride = {columns, 1}};
}

static void check_calls(void) {
    const gk_context ctx = check_context(NULL, 1);
    void *const all[RANKS] = {mailbox_data, mailbox_data, mailbox_data};
    const gk_sum_over_ranks_args good = {.size = sizeof good,
                                         .x = dense(x_data, 4, N / 4),
                                         .out = dense(out_data, 4, N / 4),
                                         .mailboxes = all,
                                         .mailbox_bytes = sizeof mailbox_data,
                                         .num_ranks = RANKS,
                                         .timeout_s = 1};
    const char *const needs_gpu = "x must be on a GPU";
    gk_sum_over_ranks_args args = good;
    check_refused(gk_sum_over_ranks(&ctx, &args), GK_ERR_ARGUMENT, needs_gpu);
    check_refused(gk_sum_over_ranks(&ctx, NULL), GK_ERR_ARGUMENT, "args is NULL");
    check_refused(gk_sum_over_ranks(NULL, &args), GK_ERR_ARGUMENT, "context is missing");
#define REFUSED(words, ...)                                                    \
    do {                                                                       \
        args = good;                                                           \
        __VA_ARGS__;                                                           \
        check_refused(gk_sum_over_ranks(&ctx, &args), GK_ERR_ARGUMENT, words); \
    } while (0)
    REFUSED("size", args.size = 8);
    REFUSED("x must be contiguous", args.x.stride[0] = N / 4 + 1);
    REFUSED("x must be contiguous", args.x.stride[1] = 2);
    REFUSED("x must be contiguous", args.x.stride[0] = 1, args.x.stride[1] = 4);
    REFUSED("out must be contiguous", args.out.stride[0] = N / 4 + 1);
    REFUSED("out must have shape [4, 6], got [6, 4]", args.out = dense(out_data, N / 4, 4));
    REFUSED("out shares memory with x", args.out = args.x);
    REFUSED("x must be float32", args.x.dtype = GK_BF16);
    REFUSED("out must be float32, bfloat16 or float16", args.out.dtype = GK_F64);
    REFUSED("num_ranks must be 2 to 16, got 1", args.num_ranks = 1);
    REFUSED("num_ranks must be 2 to 16, got 17", args.num_ranks = 17);
    REFUSED("rank must be 0 to 2, got 3", args.rank = RANKS);
    REFUSED("rank must be 0 to 2, got -1", args.rank = -1);
    REFUSED("a mailbox has", args.mailbox_bytes -= 1);
    REFUSED("mailbox 0 must be an address", args.mailboxes = NULL);
    void *const odd[RANKS] = {mailbox_data, mailbox_data + 8, mailbox_data};
    REFUSED("mailbox 1 must be an address", args.mailboxes = odd);
    REFUSED("timeout_s must be more than 0", args.timeout_s = 0);
    REFUSED("timeout_s must be more than 0", args.timeout_s = NAN);
    REFUSED(needs_gpu, args.timeout_s = INFINITY);
    /* a dimension of size 1 may have any stride */
    REFUSED(needs_gpu, args.x = dense(x_data, 1, N), args.out = dense(out_data, 1, N),
            args.x.stride[0] = 7);
}

static void check_sizes(void) {
    check_result(gk_mailbox_bytes(N, RANKS) == sizeof mailbox_data, "of %d elements", N);
    check_result(gk_mailbox_bytes(N - 3, RANKS) == sizeof mailbox_data, "of whole groups of four");
    check_result(gk_mailbox_bytes(0, 2) == GK_MAILBOX_HEADER, "of none");
    check_result(gk_mailbox_bytes(-1, 2) == 0 && gk_mailbox_bytes(1, 0) == 0, "of negative sizes");
    for (int bits = 55; bits < 63; ++bits)
        for (int32_t ranks = 2; ranks <= 16; ranks *= 2) {
            const long double bytes = 8.0L * ranks * (long double)(INT64_C(1) << bits);
            check_result((long double)gk_mailbox_bytes(INT64_C(1) << bits, ranks) >= bytes ||
                             gk_mailbox_bytes(INT64_C(1) << bits, ranks) == SIZE_MAX,
                         "2^%d elements of %d ranks", bits, (int)ranks);
        }
}

int main(void) {
    snprintf(check_case, sizeof check_case, "sum_over_ranks");
    check_calls();
    check_sizes();
    return check_end();
}
