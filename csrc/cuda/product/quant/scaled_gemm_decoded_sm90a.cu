/* SPDX-License-Identifier: BSD-3-Clause */
/* scaled_gemm_decoded_sm90a: scaled_gemm as a bfloat16 product of decoded operands
 * (scaled_decoded.cuh), on Hopper. Decoding overlaps the end of the kernel before it, and the
 * product sets up its barriers meanwhile. */
#include "../../tile/begins_sm90a.cuh"
#include "scaled_decoded.cuh"

namespace {

const gk_cuda_instance instances[] = {DECODED("scaled_gemm_decoded_sm90a", BeginsOverlapped)};

} // namespace

extern "C" const gk_cuda_table gk_scaled_gemm_decoded_sm90a_table = {
    instances, sizeof instances / sizeof instances[0], 90, plan_best<instances>};
