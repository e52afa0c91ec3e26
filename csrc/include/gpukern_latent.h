/* SPDX-License-Identifier: BSD-3-Clause */
/* gpukern_latent.h: paged caches of latent attention (MLA), whose value rows are the first 512
 * columns of its key rows. It follows gpukern.h's conventions.
 *
 * A row is 576 elements: 512 of the latent and 64 that carry the rotary position. In 8 bits it is
 * 656 bytes of GK_U8: 512 e4m3 codes, four float32 scales of 128 columns each, 64 bfloat16. */
#ifndef GPUKERN_LATENT_H
#define GPUKERN_LATENT_H

#include "gpukern.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One more of gk_paged_flags. k_cache is GK_U8 [num_blocks, block_size, 1, 656], v_cache is its
 * view of the first 512 bytes of each row, and q has head_dim 576. Rows begin at multiples of 16
 * bytes. k_scale and v_scale are NULL. */
#define GK_PAGED_LATENT_FP8 8u

/* Writes new rows. k is the latent [T, 1, 512], v the rotary part [T, 1, 64], of any strides;
 * k_cache is [num_blocks, block_size, 1, 576] of k's dtype, or GK_U8 [.., 656] for a k of 32 or 16
 * bits. v_cache and the scales are not read. slots are as in gk_kv_cache_write. Error texts call
 * the tensors c, k_pe and cache. */
GK_API gk_status gk_kv_cache_write_latent(const gk_context *, const gk_kv_cache_write_args *);

#ifdef __cplusplus
}
#endif
#endif
