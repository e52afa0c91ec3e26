/* SPDX-License-Identifier: BSD-3-Clause */
/* sparse_store.cuh: the epilogue of sparse_gemm_sm90a: scales, bias, activation, and a
 * transposition, because WGMMA's rows are the weight's. 16-bit results in rows of whole chunks
 * go through stmatrix and a staging tile, 32 tokens at a time. Others are stored one by one. */
#ifndef GPUKERN_CUDA_QUANT_SPARSE_STORE_CUH
#define GPUKERN_CUDA_QUANT_SPARSE_STORE_CUH

#include "../../layout/wgmma.cuh"
#include "../../ptx/bar.cuh"
#include "../../ptx/stmatrix.cuh"
#include "product.cuh"

/* Stores a warpgroup's 64 weights x BT tokens. */
template <class K> struct SparseOut {
    const Finish &f;
    int m, n;
    bool staged; /* 16-bit results in rows of whole chunks */
    smem_addr panel_s;
    const float *scales; /* of the tile's tokens */
    int n0, token0;      /* first weight, first token */
    float sb[2], bias[2];

    /* Scales 32 tokens x 64 weights and adds the bias. */
    template <class D>
    __device__ __forceinline__ void finish_some(float (&v)[16], const D *sum, int part) const {
        const int t = threadIdx.x % 4;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float2 sa = make_float2(1.f, 1.f);
            if (K::BYTES == 1) sa = *(const float2 *)(scales + 32 * part + 8 * j + 2 * t);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float x = (float)sum[4 * j + e];
                if (K::BYTES == 1) x = times_scales(x, e % 2 ? sa.y : sa.x, sb[e / 2]);
                v[4 * j + e] = x + bias[e / 2];
            }
        }
    }
    template <class R> __device__ __forceinline__ void stage(const float (&v)[16], int part) const {
        const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
        const smem_addr to_s = panel_s + part % 2 * K::Panel::bytes;
#pragma unroll
        for (int j = 0; j < 4;
             j += 2) { /* matrices: tokens 8 j with weights 0 and 8, then tokens 8 j + 8 */
            const uint32_t r[4] = {
                pack2<R>(v[4 * j], v[4 * j + 1]), pack2<R>(v[4 * j + 2], v[4 * j + 3]),
                pack2<R>(v[4 * j + 4], v[4 * j + 5]), pack2<R>(v[4 * j + 6], v[4 * j + 7])};
            stmatrix_x4_trans(
                to_s + K::Panel::offset(8 * j + lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2),
                r);
        }
        bar_sync(1 + (int)threadIdx.x / 128, 128);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = thread / 8 + 16 * i, token = token0 + 32 * part + row,
                      col = n0 + thread % 8 * 8;
            if (token < m && col < n)
                *(uint4 *)((uint16_t *)f.out + token * f.out_row + col) =
                    ld_shared_128(to_s + K::Panel::offset(row, thread % 8));
        }
    }
    __device__ __forceinline__ void scatter(const float (&v)[16], int part) const {
        const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const coord d = wgmma_d(warp, lane, i);
            const int64_t token = token0 + 32 * part + d.col, col = n0 + d.row,
                          at = token * f.out_row + col;
            if (token >= m || col >= n) continue;
            if (f.out_dtype == GK_F32)
                ((float *)f.out)[at] = v[i];
            else if (f.out_dtype == GK_BF16)
                ((__nv_bfloat16 *)f.out)[at] = from_f32<__nv_bfloat16>(v[i]);
            else
                ((__half *)f.out)[at] = from_f32<__half>(v[i]);
        }
    }
    __device__ __forceinline__ void leave(const float (&v)[16], int part) const {
        if (!staged)
            scatter(v, part);
        else if (f.out_dtype == GK_BF16)
            stage<__nv_bfloat16>(v, part);
        else
            stage<__half>(v, part);
    }
    template <class D> __device__ __forceinline__ void store(D (&sum)[K::BT / 2]) const {
        if (staged && f.activation == GK_ACT_NONE) {
#pragma unroll
            for (int part = 0; part < K::BT / 32; ++part) {
                float v[16];
                finish_some(v, sum + 16 * part, part);
                if (f.out_dtype == GK_BF16)
                    stage<__nv_bfloat16>(v, part);
                else
                    stage<__half>(v, part);
            }
            return;
        }
#pragma unroll 1
        for (int part = 0; part < K::BT / 32; ++part) { /* not unrolled: shifts the sums down */
            float v[16];
            finish_some(v, sum, part);
#pragma unroll
            for (int i = 0; i + 16 < K::BT / 2; ++i) sum[i] = sum[i + 16];
            if (f.out_dtype == GK_F32)
                activate_in_place<16>(f.activation, v);
            else
                activate_16<16>(f.activation, v);
            leave(v, part);
        }
    }
};

#endif
