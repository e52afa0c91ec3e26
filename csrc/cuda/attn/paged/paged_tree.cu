/* SPDX-License-Identifier: BSD-3-Clause */
/* paged_tree: paged_attn with a mask over the new tokens, as for drafts that form a tree. Serves
 * every call with attn_mask that paged_tree_sm90a does not take. It has three steps:
 *
 *  1. begin   computes lengths [B] without the new tokens, and the first key that all rows of a
 *             sequence see
 *  2. attend  out, lse' = paged_attn over the old keys, not causal. The first kernel of the op that
 *             accepts this call runs it. Sinks are included here.
 *  3. tree    attends from each row to the new tokens that its mask shows, and to the old keys that
 *             step 2 leaves out (paged_tree.cuh). Merges the result with out and lse'.
 *
 * q [T, Hq, D]; k_cache, v_cache, block_table, seq_lens, cu_seqlens_q as in paged_attn_plain;
 * attn_mask [T, S] or [B, S, S] bytes, any strides.
 *
 * Work split of step 3. tree_tiles_kernel serves calls with 16-bit q, caches of q's dtype or of
 * 8-bit codes, and aligned rows. A warp owns 16 rows (new tokens times heads of the group) of a kv
 * head, and up to 128 columns of V. It multiplies 16 keys a step by mma.m16n8k16, with all operands
 * from global memory. If v has a scale for each page, the scale multiplies the softmax weights. In
 * float16 a row divides them by a power of two near the largest |v_scale| so far, so that they stay
 * below 2. tree_rows_kernel serves all other calls. A warp owns a row. Each lane takes a key for
 * the scores, then some columns of V.
 *
 * State. The workspace holds lse' [T, Hq], the lengths and the first keys. Between steps 2 and 3,
 * out holds the result of step 2, rounded to q's dtype.
 *
 * A hidden key is never read, so it may hold NaN, and the bits of a row do not depend on the masks
 * of other rows. ALiBi is refused by the argument check, because step 2 would place its queries too
 * far to the left by the number of new tokens. */
#include "../../../core/dispatch.h"
#include "../../../core/paged.h"
#include "../../../formats/latent_row.h"
#include "../../host/inner_call.cuh"
#include "../../tile/codes.cuh"
#include "../../tile/fragment.cuh"
#include "../tiles.h"
#include "paged_tree.cuh"

namespace {

constexpr int WARPS = paged_tree_plan::warps, THREADS = WARPS * 32;

/* ---- 1. lengths ------------------------------------------------------------------------------ */
struct BeginParams {
    TreeParams x;
    int32_t *lens, *starts; /* starts: NULL if every row sees key 0 */
    int len_blocks; /* blocks that compute lengths; in the others each warp checks one token */
};

/* The first blocks write lengths. In the other blocks each warp clears the result of its token if
 * the token belongs to no sequence. */
template <class T> __global__ void __launch_bounds__(THREADS) tree_begin_kernel(BeginParams begin) {
    const Paged &p = begin.x.p;
    if ((int)blockIdx.x < begin.len_blocks) {
        const int b = (int)blockIdx.x * THREADS + (int)threadIdx.x;
        if (b >= p.batch) return;
        const TreeKeys keys = tree_keys(begin.x, paged_sequence(p, b));
        begin.lens[b] = keys.inner_len;
        if (begin.starts) begin.starts[b] = keys.inner_start;
        return;
    }
    const int lane = threadIdx.x % 32,
              token = ((int)blockIdx.x - begin.len_blocks) * WARPS + (int)threadIdx.x / 32;
    if (token >= p.tokens || paged_owner(p, token) >= 0) return;
    const int64_t row = (int64_t)token * p.heads_q;
    for (int i = lane; p.lse && i < p.heads_q; i += 32)
        ((typename element<T>::acc *)p.lse)[row + i] = -INFINITY;
    for (int i = lane; i < p.heads_q * p.head_dim_v; i += 32)
        ((T *)p.out)[row * p.head_dim_v + i] = from_acc<T>(0);
}

/* ---- 2. rows by CUDA cores ------------------------------------------------------------------- */
enum StoredRow {
    PLAIN_ROW,
    CODE_ROW,
    LATENT_ROW
};

/* Reads a row of the cache in q's precision. Codes are multiplied by their scale later. Latents are
 * rounded to q's dtype, as paged_latent_fp8 does when it decodes them. */
template <class T, StoredRow KIND> struct TreeCacheRow {
    typedef typename element<T>::acc W;
    const void *at;
    gk_dtype dtype;

    __device__ __forceinline__ TreeCacheRow(const Rows &rows, int64_t offset, gk_dtype stored)
        : at((const char *)rows.data + offset * (KIND == PLAIN_ROW ? (int)sizeof(T) : 1)),
          dtype(stored) {}
    __device__ __forceinline__ W operator[](int d) const {
        if (KIND == PLAIN_ROW) return to_acc(((const T *)at)[d]);
        const uint8_t *bytes = (const uint8_t *)at;
        if (KIND == CODE_ROW) return (W)code_value(dtype, bytes[d]);
        if (d >= GK_LATENT_DIM) {
            const uint16_t *rotary = (const uint16_t *)(bytes + GK_LATENT_ROPE_AT);
            const uint32_t upper = rotary[d - GK_LATENT_DIM];
            return to_acc(from_acc<T>((W)__uint_as_float(upper << 16)));
        }
        const W scale = ((const float *)(bytes + GK_LATENT_SCALES_AT))[d / GK_LATENT_BLOCK];
        return to_acc(from_acc<T>((W)e4m3_to_f32(bytes[d]) * scale));
    }
};

/* The second launch bound leaves enough registers for the widest float64 rows. */
template <class T, StoredRow KIND, int MAX_DIM>
__global__ void __launch_bounds__(THREADS, sizeof(T) == 8 ? 2 : 3) tree_rows_kernel(TreeParams x) {
    constexpr int COLS = MAX_DIM / 32; /* columns of a lane */
    typedef typename element<T>::acc W;
    typedef TreeCacheRow<T, KIND> Row;
    const Paged &p = x.p;
    __shared__ W q_s[WARPS][MAX_DIM];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t row = (int64_t)blockIdx.x * WARPS + warp;
    const int token = (int)(row / p.heads_q), head = (int)(row % p.heads_q),
              head_kv = head / p.group;

    /* 1. find the row; from here on each warp works alone */
    if (token >= p.tokens) return;
    const int b = paged_owner(p, token);
    if (b < 0) return; /* tree_begin_kernel has zeroed the result of a token without a sequence */
    const PagedSequence s = paged_sequence(p, b);
    const int i = token - s.q0;
    const TreeKeys keys = tree_keys(x, s);
    const TreeRow its = tree_row(x, keys, b, token, i);
    const T *q = (const T *)p.q.data + token * p.q.row + head * p.q.head;
    for (int d = lane; d < p.head_dim; d += 32) q_s[warp][d] = to_acc(q[d]);
    __syncwarp(); /* q is visible to all lanes */
    const WideScore<W> score = {paged_factor<W>(p, head_kv), (W)p.rules.softcap, W(0), 0};

    /* 2. 32 keys at a time */
    RowSoftmax<ExpFull, W> softmax = {W(-INFINITY), W(0)}; /* sum: this lane's share */
    W o[COLS] = {};
    for (int range = 0; range < 2; ++range) {
        const int end = range ? keys.end : keys.edge_end;
        for (int j0 = range ? keys.fresh : keys.edge; j0 < end; j0 += 32) {
            const int j = j0 + lane;
            const bool sees = j < end && its.sees(j, range == 1);
            const int page = sees ? page_of_key(p, b, j) : -1; /* -1: no key */
            if (!__any_sync(0xffffffffu, page >= 0)) continue;
            const int in_page = j % p.block_size;
            /* 2.1 the score of this lane's key */
            W logit = -INFINITY, v_factor = 1;
            if (page >= 0) {
                const Row k(p.k, p.k.at(page, head_kv, in_page), x.stored);
                if (KIND == CODE_ROW) v_factor = x.v_scale.at<W>(page, head_kv);
                /* four sums, because consecutive additions to one sum wait for each other */
                W dot[4] = {};
                int d = 0;
                for (; d + 4 <= p.head_dim; d += 4)
#pragma unroll
                    for (int u = 0; u < 4; ++u) dot[u] += q_s[warp][d + u] * k[d + u];
                for (; d < p.head_dim; ++d) dot[0] += q_s[warp][d] * k[d];
                W product = (dot[0] + dot[1]) + (dot[2] + dot[3]);
                if (KIND == CODE_ROW) product *= x.k_scale.at<W>(page, head_kv);
                logit = score_fine(score, product, 0, 0);
            }
            const W shrink = softmax.raise(warp_max(logit)), weight = softmax.weight(logit);
            softmax.sum = softmax.sum * shrink + weight;
            const W of_v = KIND == CODE_ROW ? weight * v_factor : weight;
            /* 2.2 add the 32 keys to this lane's columns of V */
#pragma unroll
            for (int c = 0; c < COLS; ++c) o[c] *= shrink;
            for (unsigned rest = __ballot_sync(0xffffffffu, page >= 0); rest; rest &= rest - 1) {
                const int r = __ffs(rest) - 1;
                const int page_r = __shfl_sync(0xffffffffu, page, r),
                          row_r = __shfl_sync(0xffffffffu, in_page, r);
                const W w = __shfl_sync(0xffffffffu, of_v, r);
                const Row v(p.v, p.v.at(page_r, head_kv, row_r), x.stored);
#pragma unroll
                for (int c = 0; c < COLS; ++c)
                    if (c * 32 + lane < p.head_dim_v) o[c] += w * v[c * 32 + lane];
            }
        }
    }

    /* 3. merge */
    const W v_scale = paged_scale<W>(p.v_scale, p.v_scale_step, head_kv);
    const W sum = warp_sum(softmax.sum);
    const TreeMerge<W> merge =
        tree_merge<W>(((const W *)x.old_lse)[row], softmax.peak, sum, v_scale);
    T *out = (T *)p.out + row * p.head_dim_v;
#pragma unroll
    for (int c = 0; c < COLS; ++c) {
        const int d = c * 32 + lane;
        if (sum == 0 || d >= p.head_dim_v) continue; /* out stays as it is */
        const W y = merge.fresh * o[c];
        out[d] = from_acc<T>(merge.no_old ? y : merge.old * to_acc(out[d]) + y);
    }
    if (lane == 0 && p.lse) ((W *)p.lse)[row] = merge.lse;
}

/* ---- 3. rows by tensor cores ----------------------------------------------------------------- */
constexpr int TILE = 16;                            /* rows of a warp, and keys of a step */
constexpr int PART = paged_tree_plan::part_columns; /* columns of V that a warp owns */

template <class T> __device__ __forceinline__ uint4 load_8(const T *at, bool there) {
    return there ? *(const uint4 *)at : make_uint4(0, 0, 0, 0);
}

/* Eight elements of a cache as T. Both 16-bit types represent every code exactly. */
template <class T, gk_dtype STORED>
__device__ __forceinline__ uint4 load_cached_8(const Rows &cache, int64_t at, bool there) {
    if (STORED == element<T>::dtype) return load_8((const T *)cache.data + at, there);
    if (!there) return make_uint4(0, 0, 0, 0);
    const uint2 codes = *(const uint2 *)((const uint8_t *)cache.data + at);
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t two = (i < 2 ? codes.x : codes.y) >> i % 2 * 16;
        pairs[i] = pack2<T>(code_value(STORED, two & 0xff), code_value(STORED, two >> 8 & 0xff));
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

/* The largest power of two that is at most x, clamped to [2^-126, 2^126]; 0 for a smaller x. x is
 * not NaN. inverse_of_power(0) is 2^127, so that 0 times it is 0. */
__device__ __forceinline__ float power_below(float x) {
    return __uint_as_float(min(__float_as_uint(x) >> 23, 253u) << 23);
}
__device__ __forceinline__ float inverse_of_power(float power) {
    return __uint_as_float((254u << 23) - __float_as_uint(power));
}

template <class T, gk_dtype STORED>
__device__ __forceinline__ float load_cached(const Rows &cache, int64_t at) {
    return STORED == element<T>::dtype ? to_f32(((const T *)cache.data)[at])
                                       : code_value(STORED, ((const uint8_t *)cache.data)[at]);
}

/* Layout of a warp's operands. Rows g = lane / 4 and g + 8 of the tile belong to the four lanes of
 * a quad; t = lane % 4.
 *
 *  Q K^T  A sum over columns may add them in any order. So of each 32 columns, lane t loads the
 *         eight that begin at 8 t, of both rows of q and of keys g and g + 8.
 *  P V    Of each 64 columns, lane (g, t) loads 8 g .. 8 g + 7 of keys 2 t, 2 t + 1, 8 + 2 t
 *         and 9 + 2 t. The e-th mma multiplies columns 8 g + e, so that o[e] holds columns 16 t + e
 *         and 16 t + 8 + e of the lane's two rows.
 */
template <class T, gk_dtype STORED>
__global__ void __launch_bounds__(THREADS, 3) tree_tiles_kernel(TreeParams x) {
    constexpr bool CODES = STORED != element<T>::dtype;
    constexpr bool HAS_BASE = CODES && element<T>::dtype == GK_F16;
    const Paged &p = x.p;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int64_t task = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    const int tile = (int)(task % x.tiles);
    task /= x.tiles;
    const int column0 = (int)(task % x.parts) * PART;
    task /= x.parts;
    const int head_kv = (int)(task % p.heads_kv), b = (int)(task / p.heads_kv);

    /* 1. find the tile's rows; each warp works alone */
    if (b >= p.batch) return;
    const PagedSequence s = paged_sequence(p, b);
    const int rows = s.rows * p.group;
    if (tile * TILE >= rows) return;
    const TreeKeys keys = tree_keys(x, s);
    TreeRow its[2];
    const T *q[2];
    int64_t at[2]; /* row of out */
    bool exists[2];
#pragma unroll
    for (int u = 0; u < 2; ++u) {
        const int row = tile * TILE + g + 8 * u;
        exists[u] = row < rows;
        const int i = min(row, rows - 1) / p.group,
                  head = head_kv * p.group + min(row, rows - 1) - i * p.group, token = s.q0 + i;
        its[u] = tree_row(x, keys, b, token, i);
        q[u] = (const T *)p.q.data + token * p.q.row + head * p.q.head;
        at[u] = (int64_t)token * p.heads_q + head;
    }
    const Score score = {paged_factor<float>(p, head_kv), (float)p.rules.softcap, 0.f, 0};

    /* 2. 16 keys at a time */
    RowSoftmax<ExpFull> softmax[2] = {{-INFINITY, 0}, {-INFINITY, 0}}; /* sums: the lane's share */
    float o[PART / 64][8][4] = {};
    /* The power of two by which a row's page scales, and so its O, are divided. 0: no scale above 0
     * yet. */
    float v_base[2] = {0, 0};
    for (int range = 0; range < 2; ++range) {
        const int end = range ? keys.end : keys.edge_end;
        for (int j0 = range ? keys.fresh : keys.edge; j0 < end; j0 += TILE) {
            /* 2.1 which keys are seen. Bit 4 u + n of `seen`: row u sees the lane's key n. Bit k of
             * `wanted`: some row of the tile sees key k. */
            unsigned seen = 0, wanted = 0;
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const int key = n / 2 * 8 + 2 * t + n % 2;
#pragma unroll
                for (int u = 0; u < 2; ++u)
                    if (exists[u] && j0 + key < end && its[u].sees(j0 + key, range == 1)) {
                        seen |= 1u << (4 * u + n);
                        wanted |= 1u << key;
                    }
            }
            wanted = __reduce_or_sync(0xffffffffu, wanted);
            if (!wanted) continue;
            /* 2.2 look up the pages; lane l takes key l % 16 */
            const int j = j0 + lane % TILE;
            const int page = wanted >> lane % TILE & 1 ? page_of_key(p, b, j) : -1;
            const unsigned there = __ballot_sync(0xffffffffu, page >= 0) & ((1u << TILE) - 1);
            const int in_page = j % p.block_size;
            const int64_t k_at = p.k.at(max(page, 0), head_kv, in_page),
                          v_at = p.v.at(max(page, 0), head_kv, in_page);

            /* 2.3 Q K^T */
            int64_t k[2];
            float w[2][4] = {}; /* scores, then weights, of keys 8 h + 2 t, + 1 */
#pragma unroll
            for (int h = 0; h < 2; ++h) k[h] = __shfl_sync(0xffffffffu, k_at, 8 * h + g);
#pragma unroll 4
            for (int d = t * 8; d - t * 8 < p.head_dim; d += 32) {
                const bool inside = d < p.head_dim;
                const uint4 q0 = load_8(q[0] + d, inside), q1 = load_8(q[1] + d, inside);
                const uint32_t first[4] = {q0.x, q1.x, q0.y, q1.y},
                               second[4] = {q0.z, q1.z, q0.w, q1.w};
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const uint4 key = load_cached_8<T, STORED>(
                        p.k, k[h] + d, inside && (there >> (8 * h + g) & 1));
                    const uint32_t low[2] = {key.x, key.y}, high[2] = {key.z, key.w};
                    mma_add<T>(w[h], first, low);
                    mma_add<T>(w[h], second, high);
                }
            }

            /* 2.4 softmax */
            float highest[2] = {-INFINITY, -INFINITY}, shrink[2];
            int its_page[4] = {}; /* pages of the lane's four keys; for codes only */
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const int key = n / 2 * 8 + 2 * t + n % 2;
                if (!(there >> key & 1)) seen &= ~(0x11u << n);
                float k_factor = 1;
                if (CODES) {
                    its_page[n] = max(__shfl_sync(0xffffffffu, page, key), 0);
                    k_factor = x.k_scale.at<float>(its_page[n], head_kv);
                }
#pragma unroll
                for (int u = 0; u < 2; ++u) {
                    float &its_w = w[n / 2][2 * u + n % 2];
                    if (CODES) its_w *= k_factor;
                    its_w = seen >> (4 * u + n) & 1 ? score_fine(score, its_w, 0, 0) : -INFINITY;
                    highest[u] = fmaxf(highest[u], its_w);
                }
            }
#pragma unroll
            for (int u = 0; u < 2; ++u) {
                shrink[u] = softmax[u].raise(quad_max(highest[u]));
                softmax[u].sum *= shrink[u];
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    float &its_w = w[n / 2][2 * u + n % 2];
                    its_w = softmax[u].weight(its_w);
                    softmax[u].sum += its_w;
                }
                if (!CODES || !x.v_scale.page) continue;
                float v_scale[4], largest = 0;
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    /* the scale of a page that the row does not see may be NaN */
                    v_scale[n] =
                        seen >> (4 * u + n) & 1 ? x.v_scale.at<float>(its_page[n], head_kv) : 0.f;
                    largest = fmaxf(largest, fabsf(v_scale[n])); /* a NaN stays in v_scale */
                }
                float by = 1;
                if (HAS_BASE) {
                    const float base = fmaxf(v_base[u], power_below(quad_max(largest)));
                    by = inverse_of_power(base);
                    shrink[u] *= v_base[u] * by;
                    v_base[u] = base;
                }
#pragma unroll
                for (int n = 0; n < 4; ++n) w[n / 2][2 * u + n % 2] *= v_scale[n] * by;
            }
#pragma unroll
            for (int m = 0; m < PART / 64; ++m)
#pragma unroll
                for (int e = 0; e < 8; ++e)
#pragma unroll
                    for (int n = 0; n < 4; ++n) o[m][e][n] *= shrink[n / 2];

            /* 2.5 P V */
            const uint32_t weights[4] = {pack2<T>(w[0][0], w[0][1]), pack2<T>(w[0][2], w[0][3]),
                                         pack2<T>(w[1][0], w[1][1]), pack2<T>(w[1][2], w[1][3])};
#pragma unroll
            for (int m = 0; m < PART / 64; ++m) {
                const int first = column0 + 64 * m;
                if (first >= p.head_dim_v) break;
                uint4 v[4];
                unsigned special = 0; /* keys with an infinity or NaN in these columns */
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    const int key = n / 2 * 8 + 2 * t + n % 2;
                    const int64_t from = __shfl_sync(0xffffffffu, v_at, key) + first + 8 * g;
                    v[n] = load_cached_8<T, STORED>(
                        p.v, from, first + 8 * g < p.head_dim_v && (there >> key & 1));
                    if (has_special<T>(v[n])) special |= 1u << key;
                }
                special = __reduce_or_sync(0xffffffffu, special);
                if (special) {
#pragma unroll
                    for (int n = 0; n < 4; ++n)
                        if (special >> (n / 2 * 8 + 2 * t + n % 2) & 1)
                            v[n] = make_uint4(0, 0, 0, 0);
                }
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    const unsigned select = e % 2 ? 0x7632 : 0x5410;
                    uint32_t word[4];
#pragma unroll
                    for (int n = 0; n < 4; ++n)
                        word[n] = e / 2 == 0   ? v[n].x
                                  : e / 2 == 1 ? v[n].y
                                  : e / 2 == 2 ? v[n].z
                                               : v[n].w;
                    const uint32_t values[2] = {prmt(word[0], word[1], select),
                                                prmt(word[2], word[3], select)};
                    mma_add<T>(o[m][e], weights, values);
                }
                /* These keys were zeroed for the mma, because 0 times NaN is NaN. Add them one by
                 * one to the rows that see them. */
                for (; special; special &= special - 1) {
                    const int key = __ffs(special) - 1, n = key / 8 * 2 + key % 2,
                              owner = lane / 4 * 4 + key % 8 / 2;
                    const int64_t from = __shfl_sync(0xffffffffu, v_at, key);
                    const unsigned its_seen = __shfl_sync(0xffffffffu, seen, owner);
#pragma unroll
                    for (int u = 0; u < 2; ++u) {
                        const float mine = n == 0   ? w[0][2 * u]
                                           : n == 1 ? w[0][2 * u + 1]
                                           : n == 2 ? w[1][2 * u]
                                                    : w[1][2 * u + 1];
                        const float weight =
                            to_f32(from_f32<T>(__shfl_sync(0xffffffffu, mine, owner)));
                        if (!(its_seen >> (4 * u + n) & 1)) continue;
#pragma unroll
                        for (int c = 0; c < 16; ++c) {
                            const int d = first + 16 * t + c;
                            if (d < p.head_dim_v)
                                o[m][c % 8][2 * u + c / 8] +=
                                    weight * load_cached<T, STORED>(p.v, from + d);
                        }
                    }
                }
            }
        }
    }

    /* 3. merge */
    float v_scale = paged_scale<float>(p.v_scale, p.v_scale_step, head_kv);
    if (CODES && x.v_scale.page == 0) v_scale = x.v_scale.at<float>(0, head_kv);
#pragma unroll
    for (int u = 0; u < 2; ++u) {
        const float sum = quad_sum(softmax[u].sum);
        if (!exists[u]) continue;
        const float of_v = HAS_BASE && x.v_scale.page ? v_base[u] : v_scale;
        const TreeMerge<float> merge =
            tree_merge(((const float *)x.old_lse)[at[u]], softmax[u].peak, sum, of_v);
        if (column0 == 0 && t == 0 && p.lse) ((float *)p.lse)[at[u]] = merge.lse;
        if (sum == 0) continue; /* out stays as it is */
#pragma unroll
        for (int m = 0; m < PART / 64; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int d = column0 + 64 * m + 16 * t + 8 * half;
                if (d >= p.head_dim_v) continue;
                T *out = (T *)p.out + at[u] * p.head_dim_v + d;
                const uint4 old = load_8(out, !merge.no_old);
                const uint32_t olds[4] = {old.x, old.y, old.z, old.w};
                uint32_t y[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float2 a = unpack2<T>(olds[i]);
                    const float *lo = &o[m][2 * i][2 * u + half],
                                *hi = &o[m][2 * i + 1][2 * u + half];
                    y[i] = pack2<T>(merge.old * a.x + merge.fresh * *lo,
                                    merge.old * a.y + merge.fresh * *hi);
                }
                *(uint4 *)out = make_uint4(y[0], y[1], y[2], y[3]);
            }
    }
}

/* ---- 4. the inner call: step 2 --------------------------------------------------------------- */
/* The arguments of step 2: the call over old keys, with lengths, first keys and lse' in the
 * workspace. */
struct Inner {
    gk_paged_attn_args args;
    gk_tensor start;
    InnerOperands operands;

    Inner(const gk_paged_attn_args *a, char *workspace) : args(*a), start(), operands{workspace} {
        const int64_t batch = a->seq_lens.shape[0];
        args.size = sizeof args;
        args.flags &= ~(uint32_t)GK_PAGED_ALLOW_SHORT;
        args.rules.is_causal = 0;
        args.rules.window_left = args.rules.window_right = -1;
        args.seq_lens.data = operands.take(batch * 4);
        args.seq_lens.stride[0] = 1;
        if (a->rules.window_left >= 0 || a->rules.kv_start) {
            start = args.seq_lens;
            start.data = operands.take(batch * 4);
            args.rules.kv_start = &start;
        }
        args.lse.dtype = gk_stats_dtype(a->q.dtype);
        args.lse.ndim = 2;
        for (int d = 0; d < 2; ++d) args.lse.shape[d] = a->q.shape[d];
        args.lse.stride[0] = a->q.shape[1];
        args.lse.stride[1] = 1;
        args.lse.data =
            operands.take(gk_numel(&args.lse) * (int64_t)gk_dtype_bytes(args.lse.dtype));
    }
    Inner(const Inner &) = delete; /* holds a pointer to its own member */

    bool plan(const gk_context *ctx, gk_plan *to) const {
        return gk_dispatch_plan_default(ctx, GK_OP_PAGED_ATTN, args.q.dtype, &args, to) == GK_OK;
    }
};

/* ---- 5. launcher and table ------------------------------------------------------------------- */
TreeParams params_of(const gk_context *ctx, const gk_paged_attn_args *a) {
    TreeParams x = {};
    gk_paged_attn_args call = *a;
    call.rules.is_causal = 0;
    x.p = paged_of(ctx, &call);
    x.left = (int)gk_min_i64(x.p.rules.left, SPAN_FAR);
    x.right = (int)gk_min_i64(x.p.rules.right, SPAN_FAR);
    x.mask = new_mask_of(a);
    x.stored = a->k_cache.dtype;
    if (gk_is_code(a->k_cache.dtype)) {
        x.p.k_scale = x.p.v_scale = NULL;
        x.k_scale = code_scale(a->k_scale);
        x.v_scale = code_scale(a->v_scale);
    }
    x.tiles = (int)gk_ceil_div((int64_t)x.p.seq_q * x.p.group, TILE);
    x.parts = (int)gk_ceil_div(x.p.head_dim_v, PART);
    return x;
}

/* Blocks of tree_tiles_kernel. */
int64_t tile_blocks(const TreeParams &x) {
    return gk_ceil_div((int64_t)x.p.batch * x.p.heads_kv * x.tiles * x.parts, WARPS);
}

bool in_chunks(const gk_tensor &t) { return t.shape[t.ndim - 1] % 8 == 0 && rows_aligned(t); }

bool tiles_serve(const gk_paged_attn_args *a) {
    const gk_dtype stored = a->k_cache.dtype;
    return stored == a->q.dtype || stored == GK_E4M3 || stored == GK_E5M2 || stored == GK_I8;
}

/* An instance's key. */
struct TreeKey {
    enum {
        BY_TILES /* tree_tiles_kernel serves the call */
    };
};

bool plan(const gk_cuda_instance *instance, const gk_context *ctx, const void *args, gk_plan *to) {
    const gk_paged_attn_args *a = (const gk_paged_attn_args *)args;
    if (!gk_paged_mask_of(a) || a->q.shape[0] * a->q.shape[1] > INT32_MAX) return false;
    const bool by_tiles = instance->key[TreeKey::BY_TILES];
    if (by_tiles && (!tiles_serve(a) || !in_chunks(a->q) || !in_chunks(a->k_cache) ||
                     !in_chunks(a->v_cache) || !in_chunks(a->out)))
        return false;
    const TreeParams x = params_of(ctx, a);
    if (by_tiles && !gk_grid_fits(tile_blocks(x))) return false;
    const Inner call(a, unplaced_workspace());
    gk_plan inner;
    if (!call.plan(ctx, &inner)) return false;
    plan_around(inner, call.operands.bytes, to);
    return true;
}

template <class T>
gk_status run_rows(const char *op, const gk_context *ctx, const TreeParams &x, bool wide) {
    const dim3 grid((unsigned)gk_ceil_div((int64_t)x.p.tokens * x.p.heads_q, WARPS));
    constexpr int NARROW = paged_tree_plan::narrow_dim;
    if (x.stored == GK_U8)
        return launch<tree_rows_kernel<T, LATENT_ROW, GK_CACHE_HEAD_DIM>>(op, ctx, grid, THREADS, 0,
                                                                          x);
    if (x.stored != element<T>::dtype)
        return wide ? launch<tree_rows_kernel<T, CODE_ROW, GK_CACHE_HEAD_DIM>>(op, ctx, grid,
                                                                               THREADS, 0, x)
                    : launch<tree_rows_kernel<T, CODE_ROW, NARROW>>(op, ctx, grid, THREADS, 0, x);
    return wide ? launch<tree_rows_kernel<T, PLAIN_ROW, GK_CACHE_HEAD_DIM>>(op, ctx, grid, THREADS,
                                                                            0, x)
                : launch<tree_rows_kernel<T, PLAIN_ROW, NARROW>>(op, ctx, grid, THREADS, 0, x);
}

template <class T> gk_status run_tiles(const char *op, const gk_context *ctx, const TreeParams &x) {
    const dim3 grid((unsigned)tile_blocks(x));
    switch (x.stored) {
    case GK_E4M3: return launch<tree_tiles_kernel<T, GK_E4M3>>(op, ctx, grid, THREADS, 0, x);
    case GK_E5M2: return launch<tree_tiles_kernel<T, GK_E5M2>>(op, ctx, grid, THREADS, 0, x);
    case GK_I8: return launch<tree_tiles_kernel<T, GK_I8>>(op, ctx, grid, THREADS, 0, x);
    default: return launch<tree_tiles_kernel<T, element<T>::dtype>>(op, ctx, grid, THREADS, 0, x);
    }
}

template <class T, bool BY_TILES>
gk_status run(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    static const char op[] = "gk_paged_attn";
    const gk_paged_attn_args *a = (const gk_paged_attn_args *)args;
    const Inner call(a, (char *)workspace);
    gk_plan inner;
    if (!call.plan(ctx, &inner) || !inner_fits(inner, call.operands.bytes, plan))
        return gk_fail(GK_ERR_DEVICE, "the attention over old keys could not be planned");
    TreeParams x = params_of(ctx, a);
    x.old_lse = call.args.lse.data;

    BeginParams begin = {};
    begin.x = x;
    begin.lens = (int32_t *)call.args.seq_lens.data;
    begin.starts = (int32_t *)call.start.data;
    begin.len_blocks = (int)gk_ceil_div(x.p.batch, THREADS);
    const int64_t token_blocks = x.p.cu_q ? gk_ceil_div(x.p.tokens, WARPS) : 0;
    gk_status status = launch<tree_begin_kernel<T>>(
        op, ctx, dim3((unsigned)(begin.len_blocks + token_blocks)), THREADS, 0, begin);
    if (status == GK_OK) status = run_inner(ctx, &call.args, inner, workspace, call.operands.bytes);
    if (status != GK_OK || x.p.tokens == 0 || x.p.heads_q == 0) return status;
    if constexpr (BY_TILES)
        return run_tiles<T>(op, ctx, x);
    else
        return run_rows<T>(op, ctx, x,
                           gk_max_i64(x.p.head_dim, x.p.head_dim_v) > paged_tree_plan::narrow_dim);
}

const gk_cuda_instance instances[] = {
    {"paged_tree_mma_bf16", GK_BF16, plan, run<__nv_bfloat16, true>, {1}, NULL},
    {"paged_tree_mma_f16", GK_F16, plan, run<__half, true>, {1}, NULL},
    {"paged_tree_bf16", GK_BF16, plan, run<__nv_bfloat16, false>, {0}, NULL},
    {"paged_tree_f16", GK_F16, plan, run<__half, false>, {0}, NULL},
    {"paged_tree_f32", GK_F32, plan, run<float, false>, {0}, NULL},
    {"paged_tree_f64", GK_F64, plan, run<double, false>, {0}, NULL},
};

} // namespace

extern "C" const gk_cuda_table gk_paged_tree_table = {
    instances, sizeof instances / sizeof instances[0], 80, NULL};
