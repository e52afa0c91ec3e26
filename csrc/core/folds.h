/* SPDX-License-Identifier: BSD-3-Clause */
/* folds.h: which batched products the PyTorch plugin turns into one product by copying a. The C
 * API never copies. */
#ifndef GPUKERN_FOLDS_H
#define GPUKERN_FOLDS_H

#include <stdbool.h>

#include "gpukern.h"

#ifdef __cplusplus
extern "C" {
#endif

/* For a checked call in which all batches share one matrix b: true if a's strides would make
 * many small products that take longer than one product and the copy of a it needs. */
bool gk_gemm_is_better_dense(const gk_context *ctx, const gk_gemm_args *args);

#ifdef __cplusplus
}
#endif

#endif
