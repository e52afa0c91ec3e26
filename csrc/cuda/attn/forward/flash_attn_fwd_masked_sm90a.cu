/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_fwd_masked_sm90a: attention on Hopper's tensor cores, 16-bit, dense, with one of
 * these: a stored mask (../../../core/attn_mask.h); a bias [.., Sq, Sk]; both; a bias of keys [..,
 * 1, Sk]; a bias by distance. The equations and the steps are those of flash_attn_fwd_sm90a. The
 * kernel is in fwd_masked_call.cuh. fwd_masked.cuh has the additional work of the producer.
 *
 * Work split with a mask: tiles of 128 queries, each with a list of the blocks of 128 keys that it
 * sees. A thread block takes the next tile when it is free. In a group of heads, tiles with long
 * lists come first. Without a mask, tiles are scheduled as in flash_attn_fwd_sm90a.
 *
 * A tile takes the blocks of its list in ascending order, so that the bits of a row depend on its
 * own mask only. If all rows see all keys of a block, it runs as without a mask. A partial block
 * needs one mask bit for each score. A bulk copy loads these bits as 32-bit words. If NaN of a
 * hidden key has reached rows of the result, a last kernel (fwd_mend.cuh) computes them again.
 *
 * TMA loads a bias [.., Sq, Sk], 64 rows x 128 keys for each warpgroup, and the consumers add it to
 * the exponents. For a bias of keys, a first kernel writes 16 additional columns of K, whose
 * product with a row of ones adds the bias to the scores. For a bias by distance, a bulk copy loads
 * the 256 numbers that a block of 128 x 128 pairs needs, and S starts as these numbers.
 *
 * Not handled: head_dim of q or v above 128, which flash_attn_fwd_masked_wide_sm90a serves; a mask
 * together with causal or a window; kv_start, kv_end, q_start, softcap, ALiBi, dropout; a float32
 * bias [.., Sq, Sk]; a bias that broadcasts over keys; a bias of keys or by distance together with
 * another bias or a mask; a mask over more than 131,072 keys. flash_attn_fwd_scores_sm80 serves the
 * rest of these. */
#include "fwd_masked_call.cuh"

namespace {

/* ---- table ----------------------------------------------------------------------------------- */
#define INSTANCES(label, TILE) MASKED_INSTANCES("flash_attn_fwd_masked_sm90a", label, TILE)

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

const gk_cuda_instance instances[] = {INSTANCES("d64_mask", Masked64),
                                      INSTANCES("d64_bias", Biased64),
                                      INSTANCES("d64_mask_bias", MaskedBiased64),
                                      INSTANCES("d64_keys", Keys64),
                                      INSTANCES("d64_distance", Distance64),
                                      INSTANCES("d128_keys", Keys128),
                                      INSTANCES("d128_distance", Distance128),
                                      INSTANCES("d128_mask", Masked128),
                                      INSTANCES("d128_bias", Biased128),
                                      INSTANCES("d128_mask_bias", MaskedBiased128)};

} // namespace

extern "C" const gk_cuda_table gk_flash_attn_fwd_masked_sm90a_table = {
    instances, sizeof instances / sizeof instances[0], 90, NULL};
