// SPDX-License-Identifier: BSD-3-Clause
/* sample_tokens: draws a token from each row of logits, with one block a row (sample_tokens.cuh).
 * Serves gk_sample_tokens for float32, bfloat16, float16 and float64 logits of any row stride and
 * alignment. On Hopper it serves calls with so many rows, or so few logits in a row, that clusters
 * would not help. No workspace. */
#include "sample_tokens.cuh"

static const gk_cuda_instance instances[] = GK_SAMPLE_INSTANCES("sample_tokens_", false);

extern "C" const gk_cuda_table gk_sample_tokens_table = {instances, 4, 80, NULL};
