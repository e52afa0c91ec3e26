/* SPDX-License-Identifier: BSD-3-Clause */
/* scaled_gemm_decoded: scaled_gemm as a bfloat16 product of decoded operands (scaled_decoded.cuh),
 * on every GPU. */
#include "../../tile/begins.cuh"
#include "scaled_decoded.cuh"

namespace {

const gk_cuda_instance instances[] = {DECODED("scaled_gemm_decoded", BeginsAlone)};

} // namespace

extern "C" const gk_cuda_table gk_scaled_gemm_decoded_table = {
    instances, sizeof instances / sizeof instances[0], 80, plan_best<instances>};
