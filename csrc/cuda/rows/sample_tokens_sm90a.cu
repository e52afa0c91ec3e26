// SPDX-License-Identifier: BSD-3-Clause
/* sample_tokens_sm90a: draws a token from each row of logits, with a cluster of 2, 4 or 8 blocks a
 * row (sample_tokens.cuh). Serves gk_sample_tokens for float32, bfloat16, float16 and float64
 * logits of any row stride and alignment, if M is too small to fill the SMs and a row has 4096
 * logits or more. No workspace. */
#include "sample_tokens.cuh"

static const gk_cuda_instance instances[] = GK_SAMPLE_INSTANCES("sample_tokens_sm90a_", true);

extern "C" const gk_cuda_table gk_sample_tokens_sm90a_table = {instances, 4, 90, NULL};
