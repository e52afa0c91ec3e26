/* SPDX-License-Identifier: BSD-3-Clause */
/* paged_tree.cuh: divides the keys of a masked paged_attn call between the inner call and the tree
 * kernels of paged_tree, and merges their two results.
 *
 * A sequence has `old` keys, followed by its new tokens. Row i is new token i, at position old + i.
 * The inner call serves the old keys [common, old), which every row sees. The tree kernels serve
 * two other ranges:
 *
 *   edge  [edge, edge_end)  old keys at the left edge of the window, that only some rows see. For a
 *                           sequence with fewer old keys than new tokens this range is all its old
 *                           keys, because the inner call takes no such sequence.
 *   new   [fresh, end)      the new tokens, as the mask shows them
 *
 * Each range has at most as many keys as the sequence has new tokens. */
#ifndef GPUKERN_CUDA_PAGED_TREE_CUH
#define GPUKERN_CUDA_PAGED_TREE_CUH

#include "../../tile/convert.cuh"
#include "../../tile/reduce.cuh"
#include "paged_factor.cuh"

namespace {

struct NewMask { /* a mask over the new tokens, in bytes; not 0: the token is seen */
    const uint8_t *data;
    int64_t sequence, row, column; /* strides; sequence 0: a row for each token of q */
    int columns;
    bool by_sequence; /* [B, S, S] */
};

inline NewMask new_mask_of(const gk_paged_attn_args *a) {
    const gk_tensor &mask = *gk_paged_mask_of(a);
    NewMask m = {};
    m.data = (const uint8_t *)mask.data;
    m.by_sequence = mask.ndim == 3;
    m.sequence = mask.ndim == 3 ? mask.stride[0] : 0;
    m.row = mask.stride[mask.ndim - 2];
    m.column = mask.stride[mask.ndim - 1];
    m.columns = (int)gk_min_i64(mask.shape[mask.ndim - 1], INT32_MAX);
    return m;
}

/* True if one of eight 16-bit elements is infinite or NaN, that is, if all bits of its exponent are
 * set. Then adding 1 at the lowest bit of the exponent carries into the sign bit. */
template <class T> __device__ __forceinline__ bool has_special(uint4 x) {
    constexpr uint32_t exponent = element<T>::dtype == GK_BF16 ? 0x7f807f80u : 0x7c007c00u,
                       one = element<T>::dtype == GK_BF16 ? 0x00800080u : 0x04000400u;
    const uint32_t carried = ((x.x & exponent) + one) | ((x.y & exponent) + one) |
                             ((x.z & exponent) + one) | ((x.w & exponent) + one);
    return carried & 0x80008000u;
}

struct TreeParams {
    Paged p; /* the call with its out and lse, without the causal rule */
    NewMask mask;
    const void *old_lse; /* lse [T, heads_q] of the inner call, whose out is stored in p.out */
    gk_dtype stored;     /* the code format of 8-bit caches */
    CodeScale k_scale, v_scale; /* scales of 8-bit caches; p has none then */
    int left, right;            /* windows, -1 = unbounded */
    int tiles, parts; /* tree_tiles_kernel: tiles of a sequence and kv head; parts of Dv */
};

/* ---- 1. keys --------------------------------------------------------------------------------- */
struct TreeKeys {
    /* negative if a sequence has fewer keys than new tokens: its first rows are at negative
     * positions */
    int old;
    int edge, edge_end, fresh, end;
    /* the inner call's length and first key */
    int inner_len, inner_start;
};

__device__ __forceinline__ TreeKeys tree_keys(const TreeParams &x, const PagedSequence &s) {
    TreeKeys k;
    const int start = s.span.key_lo, count = s.seq_k - s.diagonal; /* new tokens */
    k.old = s.diagonal;
    const bool is_short = k.old < count;
    /* the first key that the last row's window holds */
    const int common = x.left < 0 ? 0 : max(s.seq_k - 1 - x.left, 0);
    k.edge = is_short || x.left < 0 ? 0 : max(k.old - x.left, 0);
    k.edge_end = is_short ? max(k.old, 0) : min(k.old, common);
    k.edge = max(k.edge, start);
    k.fresh = max(max(k.old, 0), start);
    k.end = s.seq_k;
    k.inner_len = is_short ? 0 : k.old;
    k.inner_start = max(start, common);
    return k;
}

/* One row, and the rule by which it sees the keys that the tree kernels serve. */
struct TreeRow {
    const uint8_t *mask; /* of new token 0 */
    int64_t column;
    int columns, old, position, left, right;

    /* j must be a key that the sequence has */
    __device__ __forceinline__ bool sees(int j, bool is_new) const {
        bool yes = left < 0 || position - j <= left;
        yes = yes && (right < 0 || j - position <= right);
        if (!is_new) return yes;
        return yes && j - old < columns && mask[(j - old) * column] != 0;
    }
};

__device__ __forceinline__ TreeRow tree_row(const TreeParams &x, const TreeKeys &keys, int b,
                                            int token, int i) {
    const NewMask &m = x.mask;
    const int64_t row = m.by_sequence ? i : token;
    return {m.data + b * m.sequence + row * m.row,
            m.column,
            m.columns,
            keys.old,
            keys.old + i,
            x.left,
            x.right};
}

/* ---- 2. the merge ---------------------------------------------------------------------------- */
/* The factors by which the inner call's O (old) and the tree kernel's O (fresh) are multiplied
 * before they are added, and the lse of the sum. A side whose lse is -inf saw no key, and its O is
 * not read. */
template <class W> struct TreeMerge {
    W old, fresh, lse;
    bool no_old;
};

/* peak and sum are the softmax statistics of the row over the tree kernel's keys. The tree kernel's
 * O is not divided by the sum yet, so `fresh` includes that division. */
template <class W>
__device__ __forceinline__ TreeMerge<W> tree_merge(W old_lse, W peak, W sum, W v_scale) {
    const bool no_old = old_lse == W(-INFINITY), no_fresh = sum == 0;
    if (no_fresh) return {W(1), W(0), old_lse, no_old};
    const W lse = peak + log(sum);
    if (no_old) return {W(0), v_scale / sum, lse, true};
    const W top = lanes_max2(old_lse, lse), of_old = exp(old_lse - top), of_new = exp(lse - top);
    const W all = of_old + of_new;
    return {of_old / all, of_new / all / sum * v_scale, top + log(all), false};
}

} // namespace

#endif
