/* SPDX-License-Identifier: BSD-3-Clause */
/* quant.h: checks that the quantised ops share. quantize.c defines them unless noted. */
#ifndef GPUKERN_API_QUANT_H
#define GPUKERN_API_QUANT_H

#include "../core/checks.h"

enum {
    INT8_MOST_K = 131071 /* a sum of this many products, each at most 2^14, fits int32 */
};

/* For a tensor of codes, or for the result, whose dtype the caller asks for. */
gk_status gk_check_codes(gk_io *io, const char *name, const gk_tensor *t);
/* A float32 [] or [1]. t may be NULL; then there is nothing to check. */
gk_status gk_take_number(gk_io *io, const char *name, const gk_tensor *t);
/* Every element of this contiguous tensor of divisors must be above 0. `nan`: NaN is allowed,
 * too. */
gk_status gk_check_above_0(const char *name, const gk_tensor *t, bool nan);
/* The scales of the matrix `of`, with the same leading dimensions. k_is_row: the sum runs over
 * the rows of `of`, as in operand b. */
gk_status gk_take_scale(gk_io *io, const char *name, const gk_tensor *t, const char *of_name,
                        const gk_tensor *of, bool k_is_row);

/* bias and c may be float32. Beside a 16-bit result they may have its dtype; beside a result of
 * 8 or 32 bits, either 16-bit dtype (scaled_gemm.c). */
gk_status gk_check_addend(gk_io *io, const char *name, const gk_tensor *t, gk_dtype out);
gk_status gk_check_activation(gk_activation activation);
/* out_dtype of a product: float32 or a's dtype; for an 8-bit a float32, bfloat16 or float16
 * (grouped_gemm.c). */
gk_status gk_check_product_out(gk_io *io, gk_dtype a, gk_dtype out);
/* The contents of offs: ends that do not decrease from 0 on and are at most `total`
 * (grouped_gemm.c). */
gk_status gk_check_ends(const gk_tensor *offs, int64_t total);

#endif
