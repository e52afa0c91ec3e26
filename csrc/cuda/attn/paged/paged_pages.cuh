/* SPDX-License-Identifier: BSD-3-Clause */
/* paged_pages.cuh: the keys of one step of a warp in paged_attn_sm90a: how TMA lays them out in
 * shared memory, and how they are loaded as operands of mma.m16n8k16. K is A [16 keys][16 columns],
 * and V is A [16 columns][16 keys].
 *
 *  WidePages   Pages of q's dtype. A step is 16 keys, in panels of 64 columns (rows of 128 bytes).
 *  CodePages   Pages of 8-bit codes. head_dim is a multiple of 16 and at most HEAD_DIM; TMA fills
 *              the other columns with zeros. A step is 32 keys, or 16 if HEAD_DIM is 256, in panels
 *              of up to 128 columns, each loaded by its own copy. Operands are float16, which
 *              represents every code exactly.
 *
 * A product may sum its columns in any order. CodePages permutes the columns of K, V and O so that
 * four consecutive bytes of a row belong to one lane. q and out are permuted to match (q_col,
 * out_col). */
#ifndef GPUKERN_CUDA_PAGED_PAGES_CUH
#define GPUKERN_CUDA_PAGED_PAGES_CUH

#include "../../ptx/cvt_f16_fp8.cuh"
#include "../../tile/fragment.cuh"

template <class T_, int HEAD_DIM_> struct WidePages {
    typedef T_ T; /* type of the operands */
    static constexpr int HEAD_DIM = HEAD_DIM_, KEYS = 16, STEPS = HEAD_DIM / 16;
    static constexpr bool CODES = false;
    static constexpr gk_dtype stored = element<T>::dtype;
    static constexpr int COLS = 64, PLANES = HEAD_DIM / COLS; /* of a TMA box */
    static constexpr int COPIES = 1; /* TMA copies that load all columns of some keys */
    typedef smem_tile<KEYS, COLS * 2> Panel;
    static constexpr int tile_bytes = PLANES * Panel::bytes;
    static smem_box box(int rows) { return smem_rows(2, COLS * 2, rows, PLANES); }

    /* the address in a tile of K, or of V, from which a lane's loads are computed */
    static __device__ __forceinline__ smem_addr k_base(smem_addr tile_s, int lane) {
        return frag_a_base<Panel>(tile_s, lane);
    }
    static __device__ __forceinline__ smem_addr v_base(smem_addr tile_s, int lane) {
        return frag_a_trans_base<Panel>(tile_s, lane);
    }
    static __device__ __forceinline__ smem_addr at(smem_addr base, int i) {
        return Panel::along(base + i / 4 * Panel::bytes, i % 4 * 2);
    }
    /* Loads columns 16 i .. 16 i + 31 of the step's 16 keys; i is even, half is 0. */
    static __device__ __forceinline__ void load_k(uint32_t (&a)[2][4], smem_addr base, int i, int) {
        load_frag_a(a[0], at(base, i));
        load_frag_a(a[1], at(base, i + 1));
    }
    static __device__ __forceinline__ void load_v(uint32_t (&a)[2][4], smem_addr base, int i, int) {
        load_frag_a_trans(a[0], at(base, i));
        load_frag_a_trans(a[1], at(base, i + 1));
    }
    /* The first of the two columns of q in a lane's operand register `half` of the i-th 16
     * columns. */
    static __device__ __forceinline__ int q_col(int i, int half, int lane) {
        return i * 16 + half * 8 + lane % 4 * 2;
    }
    /* The column of O in a lane's accumulators of the i-th 16 columns, rows `half`. */
    static __device__ __forceinline__ int out_col(int i, int half, int lane) {
        return i * 16 + half * 8 + lane / 4;
    }
};

__device__ __forceinline__ uint32_t f16x2_minus(uint32_t a, uint32_t b) {
    const __half2 y = __hsub2(*(const __half2 *)&a, *(const __half2 *)&b);
    return *(const uint32_t *)&y;
}

/* Converts four codes to float16: bytes 0 and 1 to *lo, 2 and 3 to *hi. */
template <gk_dtype CODE>
__device__ __forceinline__ void codes_to_f16(uint32_t *lo, uint32_t *hi, uint32_t x) {
    if (CODE == GK_E4M3) {
        cvt_rn_f16x2_e4m3x4(lo, hi, x);
    } else if (CODE == GK_E5M2) { /* a code is the upper byte of a float16 */
        *lo = prmt(x, 0, 0x1404);
        *hi = prmt(x, 0, 0x3424);
    } else { /* int8: build the bits of 1024 + (x + 128), then subtract exactly */
        const uint32_t above = x ^ 0x80808080u;
        *lo = f16x2_minus(prmt(above, 0x64646464u, 0x4140), 0x64806480u);
        *hi = f16x2_minus(prmt(above, 0x64646464u, 0x4342), 0x64806480u);
    }
}

/* K: ldmatrix gives a lane bytes 4 (lane % 4) .. + 3 of a chunk of 16. V: each pair of bytes that a
 * lane receives is columns 2 g and 2 g + 1 of one key, with g = lane / 4. A byte permutation brings
 * the keys of one column together. */
template <gk_dtype CODE, int HEAD_DIM_> struct CodePages {
    typedef __half T;
    static constexpr int HEAD_DIM = HEAD_DIM_, KEYS = HEAD_DIM > 128 ? 16 : 32,
                         STEPS = HEAD_DIM / 16;
    static constexpr bool CODES = true;
    static constexpr gk_dtype stored = CODE;
    static constexpr int COLS = HEAD_DIM > 128 ? 128 : HEAD_DIM, COPIES = HEAD_DIM / COLS;
    typedef smem_tile<KEYS, COLS> Panel;
    static constexpr int tile_bytes = COPIES * Panel::bytes;
    static smem_box box(int rows) { return smem_rows(1, COLS, rows); }

    static __device__ __forceinline__ smem_addr k_base(smem_addr tile_s, int lane) {
        return frag_down_base<Panel>(tile_s, lane, 0, 0);
    }
    static __device__ __forceinline__ smem_addr v_base(smem_addr tile_s, int lane) {
        return k_base(tile_s, lane);
    }
    static __device__ __forceinline__ smem_addr at(smem_addr base, int i, int half) {
        constexpr int CHUNKS = COLS / 16;
        return Panel::along(Panel::down(base + i / CHUNKS * Panel::bytes, half * 16), i % CHUNKS);
    }
    static __device__ __forceinline__ void load_k(uint32_t (&a)[2][4], smem_addr base, int i,
                                                  int half) {
        uint32_t x[4];
        ldmatrix_x4(x, at(base, i, half));
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            codes_to_f16<CODE>(&a[j][0], &a[j][2], x[2 * j]);
            codes_to_f16<CODE>(&a[j][1], &a[j][3], x[2 * j + 1]);
        }
    }
    static __device__ __forceinline__ void load_v(uint32_t (&a)[2][4], smem_addr base, int i,
                                                  int half) {
        uint32_t x[4];
        ldmatrix_x4_trans(x, at(base, i, half));
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            codes_to_f16<CODE>(&a[j][0], &a[j][1], prmt(x[2 * j], 0, 0x3120));
            codes_to_f16<CODE>(&a[j][2], &a[j][3], prmt(x[2 * j + 1], 0, 0x3120));
        }
    }
    static __device__ __forceinline__ int q_col(int i, int half, int lane) {
        return i * 16 + lane % 4 * 4 + half * 2;
    }
    static __device__ __forceinline__ int out_col(int i, int half, int lane) {
        return i * 16 + lane / 4 * 2 + half;
    }
};

#endif
