/* SPDX-License-Identifier: BSD-3-Clause */
/* quant.h: checks that the quantised ops share (quantize.c). */
#ifndef GPUKERN_API_QUANT_H
#define GPUKERN_API_QUANT_H

#include "../core/checks.h"

/* Of a tensor of codes, or of the result whose dtype is asked for. */
gk_status gk_check_codes(gk_io *io, const char *name, const gk_tensor *t);
/* A float32 [] or [1]; t NULL: nothing to check. */
gk_status gk_take_number(gk_io *io, const char *name, const gk_tensor *t);
/* A contiguous tensor of divisors, which must be above 0; NaN is one where `nan` says so. */
gk_status gk_check_above_0(const char *name, const gk_tensor *t, bool nan);
/* The scales of a matrix `of`, whose leading dimensions they share; k_is_row: its rows are summed
 * over, as b's are. */
gk_status gk_take_scale(gk_io *io, const char *name, const gk_tensor *t, const char *of_name,
                        const gk_tensor *of, bool k_is_row);

/* bias and c: float32, or 16 bits: the dtype of a 16-bit result, either beside a result of 8 or 32
 * bits (scaled_gemm.c). */
gk_status gk_check_addend(gk_io *io, const char *name, const gk_tensor *t, gk_dtype out);
gk_status gk_check_activation(gk_activation activation);
/* out_dtype of a product of a: a's or float32, of 8 bits a 16-bit one or float32
 * (grouped_gemm.c). */
gk_status gk_check_product_out(gk_io *io, gk_dtype a, gk_dtype out);

#endif
