/* SPDX-License-Identifier: BSD-3-Clause */
/* folds.h: which products the plugin folds into one by a copy of a. The C API never copies. */
#ifndef GPUKERN_FOLDS_H
#define GPUKERN_FOLDS_H

#include <stdbool.h>

#include "gpukern.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Whether a of a checked call is rows of one matrix b, but lies so that they make many small
 * products, which take longer than one product and the copy of a that it needs. */
bool gk_gemm_is_better_dense(const gk_context *ctx, const gk_gemm_args *args);

#ifdef __cplusplus
}
#endif

#endif
