/* SPDX-License-Identifier: BSD-3-Clause */
/* rope_kv_write: QK norm, rotary embedding and the write into a paged cache, on every GPU. The
 * kernel is in rope_kv_write.cuh. */
#include "rope_kv_write.cuh"

namespace {

#define INSTANCES(NAME, DTYPE, T, V)                                    \
    {"rope_kv_write_" NAME "_x" #V, DTYPE, plan, run<T, V>, {V}, NULL}, \
        {"rope_kv_write_" NAME, DTYPE, plan, run<T, 1>, {1}, NULL},
/* clang-format off */
const gk_cuda_instance instances[] = {
    INSTANCES("bf16", GK_BF16, __nv_bfloat16, 8)
    INSTANCES("f16", GK_F16, __half, 8)
    INSTANCES("f32", GK_F32, float, 4)
    INSTANCES("f64", GK_F64, double, 2)
};
/* clang-format on */
#undef INSTANCES

} // namespace

extern "C" const gk_cuda_table gk_rope_kv_write_table = {
    instances, sizeof instances / sizeof instances[0], 80, NULL};
