/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_bwd_dq_sm80: dq of deterministic calls. The kernel is in bwd_dq_sm80.cuh. Not
 * handled: dropout (flash_attn_bwd_dq_drop_sm80). */
#include "bwd_dq_sm80.cuh"

template gk_status bwd_dq<BwdDq64>(const gk_context *, gk_dtype, const Bwd &);
template gk_status bwd_dq<BwdDq128>(const gk_context *, gk_dtype, const Bwd &);
template gk_status bwd_dq<BwdDq256>(const gk_context *, gk_dtype, const Bwd &);
template gk_status bwd_dq<BwdDq256Small>(const gk_context *, gk_dtype, const Bwd &);
