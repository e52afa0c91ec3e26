/* SPDX-License-Identifier: BSD-3-Clause */
/* sparse_pack: values and positions of a 2:4 sparse weight. A thread writes a whole byte of
 * meta, which covers two groups of four. If a group has more than two non-zeros, the first two
 * are kept. */
#include "product.cuh"

namespace {

struct Params {
    const void *w;
    void *values;
    uint8_t *meta;
    int64_t n, k, row, col, meta_row;
    int bytes;
    gk_dtype dtype;
};

__global__ void __launch_bounds__(256) sparse_pack_kernel(Params p) {
    for (int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x; i < p.n * p.meta_row;
         i += (int64_t)gridDim.x * 256) {
        const int64_t row = i / p.meta_row, byte = i % p.meta_row;
        uint32_t meta = 0;
        for (int half = 0; half < 2; ++half) {
            const int64_t group = 2 * byte + half;
            if (4 * group >= p.k) break;
            uint32_t taken = 0; /* bit mask of kept positions */
            int found = 0;
            for (int e = 0; e < 4; ++e)
                if (load_any(p.w, p.dtype, row * p.row + (4 * group + e) * p.col) != 0 &&
                    found < 2) {
                    taken |= 1u << e;
                    ++found;
                }
            for (int e = 0; found < 2; ++e)
                if (!(taken >> e & 1)) {
                    taken |= 1u << e;
                    ++found;
                }
            const int first = __ffs(taken) - 1, second = 31 - __clz(taken),
                      place[2] = {first, second};
            for (int v = 0; v < 2; ++v) {
                const int64_t from = row * p.row + (4 * group + place[v]) * p.col,
                              to = row * (p.k / 2) + 2 * group + v;
                if (p.bytes == 1)
                    ((uint8_t *)p.values)[to] = ((const uint8_t *)p.w)[from];
                else
                    ((uint16_t *)p.values)[to] = ((const uint16_t *)p.w)[from];
            }
            meta |= (uint32_t)(first | second << 2) << 4 * half;
        }
        p.meta[i] = (uint8_t)meta;
    }
}

gk_status run(const gk_context *ctx, const void *args, const gk_plan *, void *) {
    const gk_sparse_pack_args *x = (const gk_sparse_pack_args *)args;
    const Params p = {x->w.data,      x->values.data,   (uint8_t *)x->meta.data,
                      x->w.shape[0],  x->w.shape[1],    x->w.stride[0],
                      x->w.stride[1], x->meta.shape[1], (int)gk_dtype_bytes(x->w.dtype),
                      x->w.dtype};
    const dim3 grid((unsigned)gk_min_i64(gk_ceil_div(p.n * p.meta_row, 256), 1 << 16));
    return launch<sparse_pack_kernel>("sparse_pack", ctx, grid, 256, 0, p);
}

const gk_cuda_instance instances[] = {
    {"sparse_pack_bf16", GK_BF16, plan_any, run, {}, NULL},
    {"sparse_pack_f16", GK_F16, plan_any, run, {}, NULL},
    {"sparse_pack_e4m3", GK_E4M3, plan_any, run, {}, NULL},
    {"sparse_pack_e5m2", GK_E5M2, plan_any, run, {}, NULL},
    {"sparse_pack_i8", GK_I8, plan_any, run, {}, NULL},
};

} // namespace

extern "C" const gk_cuda_table gk_sparse_pack_table = {
    instances, sizeof instances / sizeof instances[0], 80, NULL};
