/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_bwd_sm90a: the gradients of attention on Hopper's tensor cores, 16-bit, dense and
 * packed, every modifier, head_dim up to 128. It is FlashAttention-2's backward (Dao 2023,
 * arXiv:2307.08691, Algorithm 2) with the equations of bwd.cuh. The products are transposed, so
 * that the registers of P^T and dS^T are already A operands of the next products:
 *
 *  S^T = K Q^T   dP^T = V dO^T   P^T = 2^(c S^T - lse)   dS^T = P^T (dP^T - delta)
 *  dV += P^T dO   dK += dS^T Q   dQ^T = K^T dS^T
 *
 * q, grad_out [.., Sq, D | Dv], k, v [.., Sk, D | Dv], with strides that TMA can describe. D and Dv
 * are multiples of 8 up to HEAD_DIM and HEAD_DIM_V; TMA fills the remaining columns with zeros.
 * Writes dk and dv, rounded once. Adds dQ into dq_sum (float32), which the rounding tasks scale,
 * round and write.
 *
 * Work split: a block owns 128 keys of one kv head. It loops over the rows that see them, BQ at a
 * time, for every query head of the group. One warp of the producer warpgroup loads by TMA. Each of
 * two consumer warpgroups owns 64 keys, with their S^T, dP^T, dK and dV. dQ sums over all keys, so
 * dS goes through shared memory, and each warpgroup computes one half of dQ. It adds that half to
 * memory directly from its accumulators, 512 contiguous bytes a warp.
 *
 *  A step of a consumer                                   (tensor cores work in the background)
 *    issue S^T, dP^T;  wait for S^T;  P^T                  runs under dP^T
 *    wait for dP^T;  dS^T, to registers and to shared memory
 *    issue most of dV;  barrier of both warpgroups;  issue dQ and the rest of dV
 *    wait for dQ;  issue dK;  wait for the next step's Q and dO
 *    add dQ to memory                                    runs under dK
 *    wait for dK;  the next step releases Q and dO, after its S^T
 *
 * Not handled: strides and offsets that TMA cannot describe (flash_attn_bwd_sm80). */
#include "bwd_keys.cuh"

namespace {

/* ---- table ----------------------------------------------------------------------------------- */
#define INSTANCES(label, TILE) \
    BWD_INSTANCES("flash_attn_bwd_sm90a", label, BwdConsumer, TILE, TILE##Score, TILE##ScoreOrdered)

/* Softcap and ALiBi use tiles of 64 rows at any length. */
const gk_cuda_instance instances[] = {
    INSTANCES("d64", BwdHopper64), INSTANCES("d96", BwdHopper96),
    BWD_UNMODIFIED_INSTANCES("flash_attn_bwd_sm90a", "d128_short", BwdConsumer, BwdHopper128Short),
    INSTANCES("d128", BwdHopper128)};

} // namespace

extern "C" const gk_cuda_table gk_flash_attn_bwd_sm90a_table = {
    instances, sizeof instances / sizeof instances[0], 90, NULL};
