/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_bwd_wide_sm90a: flash_attn_bwd_sm90a for head_dim from 129 to 256.
 * flash_attn_bwd_sm90a.cu describes the equations, inputs and results. At this size dK of 64 keys
 * fills the registers of one warpgroup, and dV those of the other.
 *
 * Work split: a block owns 64 keys of one kv head. Two blocks form a pair, and each of them
 * computes half of the columns of dQ for the keys of both. bwd_wide.cuh has the steps.
 *
 * Not handled: strides and offsets that TMA cannot describe (flash_attn_bwd_sm80). */
#include "bwd_wide.cuh"

namespace {

/* ---- table ----------------------------------------------------------------------------------- */
#define INSTANCES(label, TILE) \
    BWD_INSTANCES("flash_attn_bwd_wide_sm90a", label, BwdWideConsumer, TILE, TILE, TILE)

const gk_cuda_instance instances[] = {INSTANCES("d192", BwdHopper192),
                                      INSTANCES("d256", BwdHopper256)};

} // namespace

extern "C" const gk_cuda_table gk_flash_attn_bwd_wide_sm90a_table = {
    instances, sizeof instances / sizeof instances[0], 90, NULL};
