/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_fwd_masked_wide_sm90a: flash_attn_fwd_masked_sm90a if head_dim of q or v is from 129
 * to 256. It computes the same, takes the same operands and uses the same kernel
 * (fwd_masked_call.cuh), but with steps of 64 keys. Two stages of 128 keys do not fit in shared
 * memory, and 128 scores a row do not fit in the registers beside O.
 *
 * A block of 128 keys in a mask's list takes two steps. Both use the kind and the words of the
 * block: the first step reads the low halves of the words, the second one the high halves. The last
 * block of keys takes one step if its second half has no key. TMA loads a bias [.., Sq, Sk] in
 * boxes of 64 rows x 64 keys. A bias by distance takes 192 numbers a step.
 *
 * Shared memory of head_dim 256: Q 64 KiB, two stages of K and of V 128 KiB, a bias [.., Sq, Sk] 16
 * KiB, words 4 KiB, descriptions of tiles 1 KiB: 213 of 227 KiB.
 *
 * Not handled: the same masks, biases, modifiers and calls as in flash_attn_fwd_masked_sm90a. */
#include "fwd_masked_call.cuh"
#include "masked_tiles.h"

namespace {

/* ---- table ----------------------------------------------------------------------------------- */
#define INSTANCES(label, TILE) MASKED_INSTANCES("flash_attn_fwd_masked_wide_sm90a", label, TILE)

typedef FwdMasked<FwdHopper192v128Masked, 1, 0> Masked192v128;
typedef FwdMasked<FwdHopper192v128Masked, 0, 1> Biased192v128;
typedef FwdMasked<FwdHopper192v128Masked, 1, 1> MaskedBiased192v128;
typedef FwdMasked<FwdHopper192v128Masked, 0, 3> Distance192v128;
typedef FwdMasked<FwdHopper192Masked, 1, 0> Masked192;
typedef FwdMasked<FwdHopper192Masked, 0, 1> Biased192;
typedef FwdMasked<FwdHopper192Masked, 1, 1> MaskedBiased192;
typedef FwdMasked<FwdHopper192Masked, 0, 2> Keys192;
typedef FwdMasked<FwdHopper192Masked, 0, 3> Distance192;
typedef FwdMasked<FwdHopper256, 1, 0> Masked256;
typedef FwdMasked<FwdHopper256, 0, 1> Biased256;
typedef FwdMasked<FwdHopper256, 1, 1> MaskedBiased256;
typedef FwdMasked<FwdHopper256, 0, 2> Keys256;
typedef FwdMasked<FwdHopper256, 0, 3> Distance256;

const gk_cuda_instance instances[] = {INSTANCES("d192_128_mask", Masked192v128),
                                      INSTANCES("d192_128_bias", Biased192v128),
                                      INSTANCES("d192_128_mask_bias", MaskedBiased192v128),
                                      INSTANCES("d192_128_distance", Distance192v128),
                                      INSTANCES("d192_mask", Masked192),
                                      INSTANCES("d192_bias", Biased192),
                                      INSTANCES("d192_mask_bias", MaskedBiased192),
                                      INSTANCES("d192_keys", Keys192),
                                      INSTANCES("d192_distance", Distance192),
                                      INSTANCES("d256_mask", Masked256),
                                      INSTANCES("d256_bias", Biased256),
                                      INSTANCES("d256_mask_bias", MaskedBiased256),
                                      INSTANCES("d256_keys", Keys256),
                                      INSTANCES("d256_distance", Distance256)};

} // namespace

extern "C" const gk_cuda_table gk_flash_attn_fwd_masked_wide_sm90a_table = {
    instances, sizeof instances / sizeof instances[0], 90, NULL};
