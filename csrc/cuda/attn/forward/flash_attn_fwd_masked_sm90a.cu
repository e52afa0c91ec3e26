/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_fwd_masked_sm90a: attention with a stored mask (../../../core/attn_mask.h), with a
 * bias [.., Sq, Sk], or with both, or with a bias of keys [.., 1, Sk] or by distance, on Hopper's
 * tensor cores, 16-bit, dense. fwd_kernel.cuh has the equations and the steps, which are those of
 * flash_attn_fwd_sm90a. fwd_masked.cuh has the additional work of the producer.
 *
 * Work split with a mask: tiles of 128 queries, each with a list of the blocks of 128 keys that it
 * sees. A thread block takes the next tile when it is free; in a group of heads, tiles with long
 * lists come first. Without a mask, tiles are scheduled as in flash_attn_fwd_sm90a.
 *
 * A tile takes the blocks of its list in ascending order, so that the bits of a row depend on its
 * own mask only. A block that all rows see in full runs as without a mask. A partial block needs
 * one mask bit for each score, in 32-bit words that a bulk copy brings. The bias comes by TMA, 64
 * rows x 128 keys for each warpgroup, and is added to the exponents. The bias of keys becomes 16
 * more columns of K, which a first kernel writes; their product with a row of ones adds it to the
 * scores. Of a bias by distance, a bulk copy brings the 256 numbers that a block of 128 x 128 pairs
 * has, and S begins as them. A last kernel (fwd_mend.cuh) computes rows again that a NaN behind a
 * hidden key has spoilt.
 *
 * Not handled: a head_dim, of q or of v, above 128, which flash_attn_fwd_masked_wide_sm90a serves.
 * Not handled, served by flash_attn_fwd_scores_sm80: a mask together with causal or a window;
 * kv_start, kv_end, q_start, softcap, ALiBi, dropout; a float32 bias [.., Sq, Sk]; a bias that
 * broadcasts over keys; a bias of keys or by distance beside another one; a
 * mask over more than 131,072 keys. */
#include "fwd_masked_call.cuh"

namespace {

/* ---- table ----------------------------------------------------------------------------------- */
#define ROWS(label, TILE) MASKED_ROWS("flash_attn_fwd_masked_sm90a", label, TILE)

typedef FwdMasked<FwdHopper64Short, 1, 0> Masked64;
typedef FwdMasked<FwdHopper64Short, 0, 1> Biased64;
typedef FwdMasked<FwdHopper64Short, 1, 1> MaskedBiased64;
typedef FwdMasked<FwdHopper64Short, 0, 2> Keys64;
typedef FwdMasked<FwdHopper64Short, 0, 3> Distance64;
typedef FwdMasked<FwdHopper128, 1, 0> Masked128;
typedef FwdMasked<FwdHopper128, 0, 1> Biased128;
typedef FwdMasked<FwdHopper128, 1, 1> MaskedBiased128;
typedef FwdMasked<FwdHopper128, 0, 2> Keys128;
typedef FwdMasked<FwdHopper128, 0, 3> Distance128;

const gk_cuda_instance instances[] = {ROWS("d64_mask", Masked64),
                                      ROWS("d64_bias", Biased64),
                                      ROWS("d64_mask_bias", MaskedBiased64),
                                      ROWS("d64_keys", Keys64),
                                      ROWS("d64_distance", Distance64),
                                      ROWS("d128_keys", Keys128),
                                      ROWS("d128_distance", Distance128),
                                      ROWS("d128_mask", Masked128),
                                      ROWS("d128_bias", Biased128),
                                      ROWS("d128_mask_bias", MaskedBiased128)};

} // namespace

extern "C" const gk_cuda_table gk_flash_attn_fwd_masked_sm90a_table = {
    instances, sizeof instances / sizeof instances[0], 90, NULL};
