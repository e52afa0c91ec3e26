/* SPDX-License-Identifier: BSD-3-Clause */
/* weight_form.cuh: the forms of packed weight for which weight_gemm's Hopper kernels are compiled,
 * the copies of a stage into shared memory, and the decoding of its codes. weight_mma.cuh,
 * weight_wgmma.cuh and the kernels of groups use it.
 *
 * A form fixes the activations' dtype, the code, the length of the group of k that shares a scale,
 * the scale's dtype, and whether there are zero points. So no kernel looks any of these up inside
 * its loop.
 *
 * A stage holds four arrays. The packed tiles have 64 rows x 64 of k (csrc/formats/weight_tile.h):
 *
 *   codes    TILES packed tiles along k for each 64 of ROWS weight rows. One bulk copy brings the
 *            tiles of 64 rows.
 *   tokens   TILES panels of NT tokens x 64 of k, swizzled by 128 bytes. One TMA box.
 *   scales   [group][row]. One TMA box of the call's [ceil(K / g), N] tensor. If a group is longer
 *            than 128, it is one box of one row for each 128 of k.
 *   zeros    as scales
 *
 * N and K need not be whole numbers of stages. Codes beyond the end then repeat the last tile, and
 * tokens beyond the end are zeros. Scales beyond the end are zeros or those of the last group. Rows
 * beyond N are not stored.
 *
 * Refuses (weight_form_fits): empty products, K that is no multiple of 64, dtypes or group lengths
 * of another form, and operands that TMA or bulk copies cannot read. Kernels that look the form up
 * at run time serve such calls (quant/weight_gemm_sm80.cuh, weight_decoded_sm90a.cu). */
#ifndef GPUKERN_CUDA_PRODUCT_WEIGHT_FORM_CUH
#define GPUKERN_CUDA_PRODUCT_WEIGHT_FORM_CUH

#include "../host/tensormap.cuh"
#include "../layout/wgmma.cuh"
#include "../ptx/cvt_f16_fp8.cuh"
#include "../ptx/griddepcontrol.cuh"
#include "../ptx/laneid.cuh"
#include "../ptx/packed.cuh"
#include "../ptx/tma.cuh"
#include "quant/weight_decode.cuh"
#include "cheapest.cuh"
#include "../tile/tma_ring.cuh"

/* GROUP: elements of k that share a scale: 16, 32, 64, or 128 for 128 and every longer group. */
template <class T_, Code C_, int GROUP_, bool ZERO_> struct WeightForm {
    typedef T_ T;
    static constexpr Code C = C_;
    static constexpr int GROUP = GROUP_;
    static constexpr bool ZERO = ZERO_;
    /* 32-bit words of a thread's codes in a tile. */
    static constexpr int WORDS = C == NIBBLES || C == E2M1 ? 4 : 8;
    static constexpr int TILE_BYTES = 512 * WORDS;
    static constexpr gk_dtype SCALE = C != E2M1     ? element<T>::dtype
                                      : GROUP == 32 ? GK_E8M0
                                                    : GK_E4M3;
    static constexpr int SCALE_BYTES = C == E2M1 ? 1 : 2;
    static_assert(!ZERO || C == NIBBLES, "zero points belong to uint4");
};

/* Layout of a stage of ROWS weight rows, TILES tiles along k and NT tokens. */
template <class F, int ROWS, int TILES, int NT> struct WeightStage90 {
    typedef wgmma_panels<NT, 64 * TILES> Tokens;
    static constexpr int CODES = ROWS / GK_TILE * TILES * F::TILE_BYTES;
    static constexpr int GROUPS = 64 * TILES < F::GROUP ? 1 : 64 * TILES / F::GROUP;
    static constexpr int SCALES = GROUPS * ROWS * F::SCALE_BYTES;
    static constexpr int ZEROS = F::ZERO ? GROUPS * ROWS : 0;
    /* Tokens come first, so that their panels start at multiples of 1024 bytes. */
    static constexpr int CODES_AT = Tokens::bytes;
    static constexpr int BYTES = Tokens::bytes + CODES;
    /* Scales and zero points lie behind all stages, which are whole blocks of 1024 bytes. */
    static constexpr int SIDE = (SCALES + ZEROS + 127) / 128 * 128;
    static_assert(BYTES % WGMMA_BLOCK_BYTES == 0 && SCALES % 128 == 0,
                  "TMA writes to multiples of 128");
    /* Bytes copied into a stage if the box of tokens has `tokens` rows, a multiple of 8. */
    static constexpr GK_HD int copied(int tokens) {
        return BYTES - (NT - tokens) * 128 * TILES + SCALES + ZEROS;
    }
};

/* The part of a kernel's parameters that locates the operands. */
struct WeightOperands {
    CUtensorMap a, scale, zero; /* boxes as in the file's head */
    CUtensorMap a_end;          /* box of fewer rows, for the tokens of an incomplete last tile */
    const uint8_t *packed;
    int64_t tile_row; /* bytes from one row of tiles to the next */
    int rows, cols;   /* in tiles */
    int log2;         /* binary logarithm of the group's length */
    uint32_t whole;   /* constant for decode_nibbles */
    bool keep;        /* several blocks read the same codes, so L2 should keep them */
};

/* ---- 1 producer ------------------------------------------------------------------------------ */
/* Brings the tensor maps into TMA's cache. The producer calls this first (saves 1 us with 16
 * tokens). */
template <class F>
__device__ __forceinline__ void prefetch_maps(const WeightOperands &w, const CUtensorMap *a) {
    prefetch_tensormap(a);
    prefetch_tensormap(&w.scale);
    if constexpr (F::ZERO) prefetch_tensormap(&w.zero);
}

/* One thread copies the codes of tile columns tile0 to tile0 + TILES - 1 to stage_s. row: index of
 * the first row of tiles. */
template <class F, class S, int ROWS, int TILES>
__device__ __forceinline__ void produce_codes(const WeightOperands &w, smem_addr stage_s,
                                              smem_addr full, int row, int tile0, uint64_t policy) {
    const int left = min(TILES, w.cols - tile0);
#pragma unroll
    for (int h = 0; h < ROWS / GK_TILE; ++h) {
        const uint8_t *from_g =
            w.packed + min(row + h, w.rows - 1) * w.tile_row + (int64_t)tile0 * F::TILE_BYTES;
        const smem_addr to_s = stage_s + S::CODES_AT + h * TILES * F::TILE_BYTES;
        bulk_load_by(to_s, from_g, left * F::TILE_BYTES, full, policy);
#pragma unroll 1
        for (int i = left; i < TILES; ++i)
            bulk_load_by(to_s + i * F::TILE_BYTES, from_g + (left - 1) * F::TILE_BYTES,
                         F::TILE_BYTES, full, policy);
    }
}

/* Brings the same codes into L2. Unlike a copy, this may be done while a kernel that writes them
 * still runs. */
template <class F, int ROWS, int TILES>
__device__ __forceinline__ void prefetch_codes(const WeightOperands &w, int row, int tile0) {
    const int left = min(TILES, w.cols - tile0);
#pragma unroll
    for (int h = 0; h < ROWS / GK_TILE; ++h)
        bulk_prefetch(w.packed + min(row + h, w.rows - 1) * w.tile_row +
                          (int64_t)tile0 * F::TILE_BYTES,
                      left * F::TILE_BYTES);
}

/* Rows of the TMA box for tokens from token0 on. TMA fills rows outside a tensor at a third of its
 * normal speed, so an incomplete last tile has a box of fewer rows. The other rows of the stage
 * hold old values, which only reach sums that are not stored. */
template <int NT> GK_HD int box_tokens(int m, int token0) {
    const int left = m - token0;
    return left >= NT ? NT : (left + 7) / 8 * 8;
}

/* Copies the stage's tokens, scales and zero points. n0: first row of the weight. a: the tensor map
 * for the tile of token0. again, once: L2 policies for data that other blocks also read, and for
 * data that is read once. */
template <class F, class S, int ROWS, int TILES>
__device__ __forceinline__ void
produce_rest(const WeightOperands &w, const CUtensorMap *a, smem_addr stage_s, smem_addr side_s,
             smem_addr full, int n0, int tile0, int token0, uint64_t again, uint64_t once) {
    tma_load_5d_by(stage_s, a, {{0, token0, tile0}}, full, again);
    if (F::GROUP < 128 || w.log2 == 7) {
        const int group = tile0 * GK_TILE / F::GROUP;
        tma_load_5d_by(side_s, &w.scale, {{n0, group}}, full, once);
        if constexpr (F::ZERO)
            tma_load_5d_by(side_s + S::SCALES, &w.zero, {{n0, group}}, full, once);
    } else {
#pragma unroll
        for (int i = 0; i < S::GROUPS; ++i) {
            const int group = (tile0 * GK_TILE + 128 * i) >> w.log2;
            tma_load_5d_by(side_s + i * ROWS * F::SCALE_BYTES, &w.scale, {{n0, group}}, full, once);
        }
    }
}

/* ---- 2 scales and zero points in shared memory ----------------------------------------------- */
/* Loads the scale at at_s as float32. */
template <class F> __device__ __forceinline__ float load_scale(smem_addr at_s) {
    if constexpr (F::SCALE == GK_BF16)
        return __uint_as_float((uint32_t)ld_shared_16(at_s) << 16);
    else if constexpr (F::SCALE == GK_F16)
        return to_f32(__ushort_as_half(ld_shared_16(at_s)));
    else if constexpr (F::SCALE == GK_E8M0) { /* codes 0 (2^-127) and 255 (NaN) set the first bit of
                                                 the fraction */
        const uint32_t code = ld_shared_8(at_s);
        return __uint_as_float(code << 23 | (((code + 1) & 0xfe) == 0 ? 1u << 22 : 0));
    } else {
        uint32_t lo, hi;
        cvt_rn_f16x2_e4m3x4(&lo, &hi, ld_shared_8(at_s));
        return to_f32(__ushort_as_half((unsigned short)lo));
    }
}

/* Loads the scale at at_s as type T and returns it in both halves of a word. */
template <class F> __device__ __forceinline__ uint32_t load_two_scales(smem_addr at_s) {
    if constexpr (F::SCALE_BYTES == 2) {
        return ld_shared_16(at_s) * 0x10001u;
    } else if constexpr (F::SCALE == GK_E8M0) {
        static_assert(element<typename F::T>::dtype == GK_BF16,
                      "float16 holds not all powers of two of e8m0");
        const uint32_t code = ld_shared_8(at_s);
        return (code << 7 | (((code + 1) & 0xfe) == 0 ? 1u << 6 : 0)) * 0x10001u;
    } else if constexpr (element<typename F::T>::dtype == GK_F16) {
        uint32_t lo, hi;
        cvt_rn_f16x2_e4m3x4(&lo, &hi, ld_shared_8(at_s) * 0x101u);
        return lo;
    } else {
        const float f = load_scale<F>(at_s);
        return pack2<typename F::T>(f, f);
    }
}

/* Loads the zero point at at_s as the value that decode_step subtracts from NIBBLES codes, in both
 * halves of a word. */
template <class F> __device__ __forceinline__ uint32_t load_zero(smem_addr at_s) {
    return Two<typename F::T>::WHOLE + ld_shared_8(at_s) * 0x10001u;
}

/* ---- 3 NaN codes of e4m3 --------------------------------------------------------------------- */
/* Handles NaN codes of e4m3. decode_e4m3_finite decodes a NaN code as 480. A NaN in a weight row
 * makes all results of that row NaN. So it is enough to record which of a lane's two rows (bytes 0
 * and 1, bytes 2 and 3 of a word) contain a NaN, and to set their sums to NaN at the end. */
template <class F> struct NanRows {
    static constexpr bool NEEDED = F::C == E4M3 && element<typename F::T>::dtype == GK_BF16;
    uint32_t seen = 0;
    __device__ __forceinline__ void look(const uint32_t *words) {
        if constexpr (NEEDED)
#pragma unroll
            for (int i = 0; i < F::WORDS; ++i) seen |= (words[i] & 0x7f7f7f7fu) + 0x01010101u;
    }
    /* sum[4 j + e] belongs to row e / 2. */
    template <int N> __device__ __forceinline__ void set_nan(float (&sum)[N]) {
        if constexpr (NEEDED) {
            seen |= __shfl_xor_sync(~0u, seen, 1);
            seen |= __shfl_xor_sync(~0u, seen, 2);
#pragma unroll
            for (int i = 0; i < N; ++i)
                if (seen & (i % 4 < 2 ? 0x00008080u : 0x80800000u))
                    sum[i] = __uint_as_float(0x7fc00000u);
        }
    }
};

/* Decodes step s of a tile's four: a fragment of 16 rows x 16 of k, without its scale. */
template <class F>
__device__ __forceinline__ void decode_fragment(uint32_t (&a)[4], const uint32_t *words, int s,
                                                uint32_t whole, const uint32_t (&zero)[2]) {
    if constexpr (F::C == E4M3 && !NanRows<F>::NEEDED) {
        cvt_rn_f16x2_e4m3x4(&a[0], &a[1], words[2 * s]); /* keeps NaN */
        cvt_rn_f16x2_e4m3x4(&a[2], &a[3], words[2 * s + 1]);
    } else if constexpr (F::C == E4M3)
        decode_e4m3_finite<typename F::T>(a, words[2 * s], words[2 * s + 1]);
    else
        decode_step<typename F::T, F::C>(a, words, s, whole, zero);
}

template <class F> __device__ __forceinline__ void load_words(uint32_t *words, smem_addr at_s) {
#pragma unroll
    for (int i = 0; i < F::WORDS / 4; ++i) {
        const uint4 q = ld_shared_128(at_s + i * 2048);
        words[4 * i] = q.x;
        words[4 * i + 1] = q.y;
        words[4 * i + 2] = q.z;
        words[4 * i + 3] = q.w;
    }
}

/* ---- 4 epilogue ------------------------------------------------------------------------------ */
/* True for the usual result: no bias, activation or global scale, and a's dtype. */
inline bool is_plain(const Finish &f, gk_dtype a) {
    return !f.bias && !f.alpha && f.activation == GK_ACT_NONE && f.out_dtype == a;
}

/* ---- 5 host ---------------------------------------------------------------------------------- */
inline int64_t weight_k(const gk_weight_gemm_args *g) { return g->a.shape[g->a.ndim - 1]; }

/* The epilogue of a call, whose result is contiguous. */
inline Finish weight_finish(const gk_weight_gemm_args *g) {
    Finish f = finish_of(g->out, g->bias, nullptr, 0, nullptr, g->activation);
    f.out_row = g->n;
    f.alpha = g->global_scale ? (const float *)g->global_scale->data : nullptr;
    return f;
}

/* True if TMA can read t, of shape [groups, N]. */
inline bool weight_side_fits(const gk_tensor &t) {
    return t.stride[1] == 1 && (uintptr_t)t.data % 16 == 0 &&
           (t.shape[0] == 1 || gk_whole_chunks(t.dtype, t.stride[0]));
}

/* True if the call has form F, and TMA and bulk copies can read its operands. The call may have
 * groups of rows. */
template <class F> bool weight_form_fits(const gk_weight_gemm_args *g) {
    const int64_t m = weight_rows(g->a), n = g->n, k = weight_k(g), most = 1 << 30;
    if (g->a.dtype != element<typename F::T>::dtype || code_of(g->format) != F::C) return false;
    if (g->scale.dtype != F::SCALE || (g->zero != NULL) != F::ZERO) return false;
    if (m == 0 || n == 0 || k == 0 || m > most || n > most || k > most || k % GK_TILE) return false;
    const int log2 = gk_group_log2(k, g->scale.shape[0]);
    /* TMA cannot write a single row of 64 zero points (64 bytes), so groups longer than 128 have
     * none. */
    if (F::GROUP == 128 ? log2 < 7 || (F::ZERO && log2 > 7) : log2 > 6 || 1 << log2 != F::GROUP)
        return false;
    if ((uintptr_t)g->packed.data % 16 || g->packed.stride[0] % 16) return false;
    if (g->packed.stride[1] != F::TILE_BYTES && k > GK_TILE) return false;
    if (!weight_side_fits(g->scale) || (g->zero && !weight_side_fits(*g->zero))) return false;
    const int64_t step_m = g->a.stride[g->a.ndim - 2];
    return g->a.stride[g->a.ndim - 1] == 1 && (uintptr_t)g->a.data % 16 == 0 &&
           (m == 1 || (step_m > 0 && step_m % 8 == 0));
}

/* weight_form_fits for kernels that do not serve groups of rows. */
template <class F> bool weight_form_serves(const gk_weight_gemm_args *g) {
    return !g->offs && weight_form_fits<F>(g);
}

/* The activations as panels of 64 columns. */
inline TensorShape token_panels(const gk_weight_gemm_args *g) {
    const int64_t m = weight_rows(g->a), k = weight_k(g);
    const int64_t ld = m == 1 ? gk_round_up(k, 8) : g->a.stride[g->a.ndim - 2];
    return {g->a.data, g->a.dtype, {64, m, k / 64, 1, 1}, {1, ld, 64, 0, 0}, false};
}

/* Fills in all of w but the tensor maps of the activations. n: rows of the weight, over all
 * groups. */
template <class F, class S, int ROWS>
gk_status weight_codes(const gk_weight_gemm_args *g, int64_t n, WeightOperands *w) {
    const int64_t k = weight_k(g);
    w->log2 = gk_group_log2(k, g->scale.shape[0]);
    if (w->log2 > 30) w->log2 = 30;
    const int box_rows = F::GROUP < 128 || w->log2 == 7 ? S::GROUPS : 1;
    const auto side = [&](const gk_tensor &t, int bytes, CUtensorMap *map) {
        const int64_t step = t.shape[0] > 1 ? t.stride[0] : gk_round_up(n, 16);
        const TensorShape shape = {t.data,
                                   bytes == 2 ? GK_BF16 : GK_U8,
                                   {n, t.shape[0], 1, 1, 1},
                                   {1, step, 0, 0, 0},
                                   false};
        const smem_box box = {{3, {ROWS, box_rows, 1}, {1, ROWS, ROWS * box_rows}}, bytes, 0};
        return make_tensor_map("weight_gemm", shape, box, map);
    };
    if (const gk_status failed = side(g->scale, F::SCALE_BYTES, &w->scale)) return failed;
    if constexpr (F::ZERO)
        if (const gk_status failed = side(*g->zero, 1, &w->zero)) return failed;
    w->packed = (const uint8_t *)g->packed.data;
    w->tile_row = g->packed.stride[0];
    w->rows = (int)gk_ceil_div(n, GK_TILE);
    w->cols = (int)(k / GK_TILE);
    w->whole = Two<typename F::T>::WHOLE ^ (g->format == GK_INT4 ? 0x00080008u : 0);
    return GK_OK;
}

template <class F, class S, int ROWS, int TILES, int NT>
gk_status weight_operands(const gk_weight_gemm_args *g, WeightOperands *w) {
    const TensorShape a = token_panels(g);
    const int m = (int)weight_rows(g->a), whole = m / NT * NT, rest = box_tokens<NT>(m, whole);
    if (whole > 0)
        if (const gk_status failed =
                make_tensor_map("weight_gemm", a, wgmma_box(2, NT, TILES), &w->a))
            return failed;
    if (rest > 0)
        if (const gk_status failed =
                make_tensor_map("weight_gemm", a, wgmma_box(2, rest, TILES), &w->a_end))
            return failed;
    return weight_codes<F, S, ROWS>(g, g->n, w);
}

#endif
