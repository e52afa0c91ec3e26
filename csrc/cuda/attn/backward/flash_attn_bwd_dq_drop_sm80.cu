/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_bwd_dq_drop_sm80: dq of deterministic calls with dropout. The kernel is in
 * bwd_dq_sm80.cuh. */
#include "bwd_dq_sm80.cuh"

template gk_status bwd_dq<BwdDq64>(const gk_context *, gk_dtype, const Dropping<Bwd> &);
template gk_status bwd_dq<BwdDq128Drop>(const gk_context *, gk_dtype, const Dropping<Bwd> &);
template gk_status bwd_dq<BwdDq256>(const gk_context *, gk_dtype, const Dropping<Bwd> &);
