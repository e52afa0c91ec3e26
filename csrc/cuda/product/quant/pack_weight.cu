/* SPDX-License-Identifier: BSD-3-Clause */
/* pack_weight, unpack_weight: convert codes [N, K] to packed tiles (csrc/formats/weight_tile.h)
 * and back. A thread packs one byte of a tile, or unpacks one code. A weight is packed once, so
 * bandwidth does not matter. */
#include "weight.cuh"

namespace {

struct PackParams {
    const uint8_t *q;
    uint8_t *packed;
    int64_t n, k, step_n, step_k, tiles_k;
    bool is_4_bit;
};

/* The position (r, k) in a tile of the code that contains bit `bit`. */
__device__ __forceinline__ int2 place_of(bool is_4_bit, int bit) {
    const int word = bit / 32, inside = bit % 32;
    int thread, s, j, h, i;
    if (is_4_bit) {
        const int nibble = inside / 4;
        thread = word / 4;
        s = word % 4;
        h = nibble & 1;
        j = nibble >> 1 & 1;
        i = nibble >> 2;
    } else {
        const int byte = inside / 8, high = word / 512;
        thread = word / 4 % 128;
        s = 2 * high + (word >> 1 & 1);
        j = word & 1;
        h = byte >> 1;
        i = byte & 1;
    }
    return make_int2(16 * (thread / 32) + thread % 32 / 4 + 8 * h,
                     16 * s + 8 * j + 2 * (thread % 4) + i);
}

__device__ __forceinline__ uint32_t code_of(const PackParams &p, int64_t tile_n, int64_t tile_k,
                                            int bit) {
    const int2 at = place_of(p.is_4_bit, bit);
    const int64_t n = tile_n * GK_TILE + at.x, k = tile_k * GK_TILE + at.y;
    return n < p.n && k < p.k ? p.q[n * p.step_n + k * p.step_k] : 0;
}

__global__ void __launch_bounds__(256) pack_kernel(PackParams p) {
    const int bytes = p.is_4_bit ? GK_TILE_BYTES_4 : GK_TILE_BYTES_8;
    const int64_t tile_n = blockIdx.x / p.tiles_k, tile_k = blockIdx.x % p.tiles_k;
    for (int byte = threadIdx.x; byte < bytes; byte += 256) {
        uint32_t code = code_of(p, tile_n, tile_k, 8 * byte);
        if (p.is_4_bit) code = (code & 15) | (code_of(p, tile_n, tile_k, 8 * byte + 4) & 15) << 4;
        p.packed[(int64_t)blockIdx.x * bytes + byte] = (uint8_t)code;
    }
}

gk_status run_pack(const gk_context *ctx, const void *args, const gk_plan *, void *) {
    const gk_pack_weight_args *x = (const gk_pack_weight_args *)args;
    const PackParams p = {(const uint8_t *)x->q.data,
                          (uint8_t *)x->packed.data,
                          x->q.shape[0],
                          x->q.shape[1],
                          x->q.stride[0],
                          x->q.stride[1],
                          x->packed.shape[1],
                          gk_is_4_bit(x->format)};
    return launch<pack_kernel>(
        "pack_weight", ctx, dim3((unsigned)(x->packed.shape[0] * x->packed.shape[1])), 256, 0, p);
}

struct UnpackParams {
    Weight w;
    uint8_t *q;
    int64_t n, k;
};

__global__ void __launch_bounds__(256) unpack_kernel(UnpackParams p) {
    for (int64_t e = (int64_t)blockIdx.x * 256 + threadIdx.x; e < p.n * p.k;
         e += (int64_t)gridDim.x * 256) {
        const uint32_t code = weight_code(p.w, e / p.k, e % p.k);
        p.q[e] = (uint8_t)(p.w.format == GK_INT4 ? (code ^ 8) - 8 : code);
    }
}

gk_status run_unpack(const gk_context *ctx, const void *args, const gk_plan *, void *) {
    const gk_unpack_weight_args *x = (const gk_unpack_weight_args *)args;
    UnpackParams p = {};
    p.w.packed = (const uint8_t *)x->packed.data;
    p.w.tile_row = x->packed.stride[0];
    p.w.tile_col = x->packed.stride[1];
    p.w.format = x->format;
    p.w.is_4_bit = gk_is_4_bit(x->format);
    p.q = (uint8_t *)x->q.data;
    p.n = x->n;
    p.k = x->k;
    const dim3 grid((unsigned)gk_min_i64(gk_ceil_div(x->n * x->k, 256), 1 << 16));
    return launch<unpack_kernel>("unpack_weight", ctx, grid, 256, 0, p);
}

const gk_cuda_instance packs[] = {
    {"pack_weight_i8", GK_I8, plan_any, run_pack, {}, NULL},
    {"pack_weight_u8", GK_U8, plan_any, run_pack, {}, NULL},
    {"pack_weight_e4m3", GK_E4M3, plan_any, run_pack, {}, NULL},
};
const gk_cuda_instance unpacks[] = {{"unpack_weight_u8", GK_U8, plan_any, run_unpack, {}, NULL}};

} // namespace

extern "C" const gk_cuda_table gk_pack_weight_table = {packs, sizeof packs / sizeof packs[0], 80,
                                                       NULL};
extern "C" const gk_cuda_table gk_unpack_weight_table = {
    unpacks, sizeof unpacks / sizeof unpacks[0], 80, NULL};
