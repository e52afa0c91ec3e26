/* SPDX-License-Identifier: BSD-3-Clause */
/* rungs.cuh: what the rungs share: the arguments of a product, loads and stores of 8 and 4
 * elements, and the declarations of the launchers. */
#ifndef GPUKERN_CUDA_LADDER_RUNGS_CUH
#define GPUKERN_CUDA_LADDER_RUNGS_CUH

#include "cuda/host/launch.cuh"
#include "cuda/tile/convert.cuh"

typedef __nv_bfloat16 bf16;

/* out [m][n] = a [m][k] b [k][n]. Sizes are multiples of 8, so that every row is whole chunks of 16
 * bytes. */
template <typename T> struct ProductOf {
    const T *a, *b;
    T *out;
    int m, n, k;
};
typedef ProductOf<bf16> Product;
typedef ProductOf<float> ProductF32;

/* load8 reads 8 consecutive elements from global memory as floats, or zeros if `valid` is false.
 * store4 writes 4 floats to 4 consecutive elements of global memory. */
static __device__ __forceinline__ void load8(const bf16 *from_g, bool valid, float (&v)[8]) {
    const uint4 x = valid ? *(const uint4 *)from_g : make_uint4(0, 0, 0, 0);
    const uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 two = unpack2<bf16>(pairs[i]);
        v[2 * i] = two.x;
        v[2 * i + 1] = two.y;
    }
}
static __device__ __forceinline__ void load8(const float *from_g, bool valid, float (&v)[8]) {
    *(float4 *)v = valid ? *(const float4 *)from_g : make_float4(0, 0, 0, 0);
    *(float4 *)(v + 4) = valid ? *(const float4 *)(from_g + 4) : make_float4(0, 0, 0, 0);
}
static __device__ __forceinline__ void store4(bf16 *to_g, const float *v) {
    *(uint2 *)to_g = make_uint2(pack2<bf16>(v[0], v[1]), pack2<bf16>(v[2], v[3]));
}
static __device__ __forceinline__ void store4(float *to_g, const float *v) {
    *(float4 *)to_g = make_float4(v[0], v[1], v[2], v[3]);
}

/* The launchers. Rungs without tensor cores serve float32, too. */
typedef gk_status LadderRun(const gk_context *, const Product &);
typedef gk_status LadderRunF32(const gk_context *, const ProductF32 &);
LadderRunF32 ladder_naive, ladder_coalesced, ladder_shared, ladder_registers, ladder_vectorised,
    ladder_column, ladder_warp_tile;
LadderRun ladder_naive, ladder_coalesced, ladder_shared, ladder_registers, ladder_vectorised,
    ladder_mma;
LadderRun ladder_column, ladder_warp_tile, ladder_wmma, ladder_double_buffer;
LadderRun ladder_wgmma, ladder_cluster, ladder_persistent, ladder_overlap, ladder_raster,
    ladder_short;

#endif
