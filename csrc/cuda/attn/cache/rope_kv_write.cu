/* SPDX-License-Identifier: BSD-3-Clause */
/* rope_kv_write: QK norm, rotary embedding and the write into a paged cache, on every GPU. The
 * kernel is in rope_kv_write.cuh. */
#include "rope_kv_write.cuh"

namespace {

#define ROWS(NAME, DTYPE, T, V)                                         \
    {"rope_kv_write_" NAME "_x" #V, DTYPE, plan, run<T, V>, {V}, NULL}, \
        {"rope_kv_write_" NAME, DTYPE, plan, run<T, 1>, {1}, NULL},
/* clang-format off */
const gk_cuda_instance instances[] = {
    ROWS("bf16", GK_BF16, __nv_bfloat16, 8)
    ROWS("f16", GK_F16, __half, 8)
    ROWS("f32", GK_F32, float, 4)
    ROWS("f64", GK_F64, double, 2)
};
/* clang-format on */
#undef ROWS

} // namespace

extern "C" const gk_cuda_table gk_rope_kv_write_table = {
    instances, sizeof instances / sizeof instances[0], 80, NULL};
