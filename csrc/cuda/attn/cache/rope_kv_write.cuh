/* SPDX-License-Identifier: BSD-3-Clause */
/* rope_kv_write.cuh: QK norm, rotary embedding and the write into a paged cache in one launch.
 *
 *  out_q[t] = rotate(norm(q[t]))
 *  k_cache[slots[t]] = rotate(norm(k[t])) / k_scale
 *  v_cache[slots[t]] = v[t] / v_scale
 *
 *  norm(x) = x / sqrt(mean(x^2) + eps) weight, or x if there is no weight
 *  rotate: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin); columns from R on are unchanged
 *
 * RMS norm of q and k: Henry et al. 2020, arXiv:2010.04245. Rotation: Su et al. 2021,
 * arXiv:2104.09864. q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv], last dimension dense; caches
 * [num_blocks, block_size, Hkv, D | Dv], any strides, of q's dtype or 8-bit codes; cos, sin [P,
 * R / 2]; positions, slots [T]. Arithmetic is float32 (float64 for float64), rounded once.
 *
 * rope_kv_write.cu and rope_kv_write_sm90a.cu instantiate the kernel. It refuses calls with more
 * than 65,535 heads of q, k and v together.
 *
 * Work split: blockIdx.x is a token. Each of its heads (those of q, then k, then v) has 4 to 32
 * lanes. A lane takes one item of its head's row at a time. An item is one of:
 *
 *  - a 16-byte vector and its partner R / 2 columns further
 *  - a single vector: interleaved pairs, columns from R on, and v
 *  - if rows are not whole vectors: one element and its partner, or one element
 *
 * A norm reads its row twice, the second time from L1. With many tokens the kernel is bound by
 * memory bandwidth. With few, it is bound by the latency of the chain of loads: position, then cos,
 * then the store. A token with a negative slot is not written to the caches. */
#ifndef GPUKERN_CUDA_ATTN_CACHE_ROPE_KV_WRITE_CUH
#define GPUKERN_CUDA_ATTN_CACHE_ROPE_KV_WRITE_CUH

#include "gpukern.h"
#include "../../tile/begins.cuh"
#include "kv_store.cuh"

namespace {

constexpr int THREADS = 128; /* 16 heads of 128 in 16 bits */

/* N consecutive elements, aligned for loads and stores of up to 16 bytes. */
template <class F, int N> struct alignas(N * sizeof(F) < 16 ? N * sizeof(F) : 16) Some {
    F v[N];
};

struct Line { /* one of q, k and v, and the destination of its rows: out_q or a cache */
    const void *x;
    void *to;
    int64_t token, head; /* strides of x */
    /* strides of the destination: out_q uses to_token and to_head, a cache all but to_token */
    int64_t to_token, page, row, to_head, to_col;
    const void *weight; /* NULL: no norm */
    int64_t weight_step;
    bool weight_f32;
    CodeScale scale;
    int heads, columns, half; /* half: R / 2, the number of rotated pairs; 0 for v */
};

struct Params {
    Line line[3];
    const void *cos, *sin, *positions, *slots;
    int64_t cos_stride, sin_stride, rows_of_cos, position_step, slot_step, capacity;
    double eps;
    uint8_t *error_word;
    gk_dtype code; /* the code format of 8-bit caches */
    int block_size, lanes, lanes_log2;
    bool codes, interleaved, positions_64, slots_64, angles_64;
};

template <class F, int N, class W>
__device__ __forceinline__ void widen(W (&to)[N], const void *from, int64_t at) {
    const Some<F, N> x = *(const Some<F, N> *)((const F *)from + at);
#pragma unroll
    for (int e = 0; e < N; ++e) to[e] = (W)to_acc(x.v[e]);
}

/* N consecutive elements of a row of cos or sin. */
template <int N, class W>
__device__ __forceinline__ void angles(W (&to)[N], const void *from, int64_t at, bool wide) {
    if (sizeof(W) == 8 && wide)
        widen<double, N>(to, from, at);
    else
        widen<float, N>(to, from, at);
}

__device__ __forceinline__ int64_t index_at(const void *from, int64_t at, bool wide) {
    return wide ? ((const int64_t *)from)[at] : ((const int32_t *)from)[at];
}

/* Multiplies elements of a row by rstd and weight. */
template <class T, int V, class W>
__device__ __forceinline__ void weigh(W (&x)[V], const Line &line, int col, W rstd) {
    if (!line.weight) return;
    W w[V];
    if (V == 1)
        w[0] = line.weight_f32 ? (W)((const float *)line.weight)[col * line.weight_step]
                               : (W)to_acc(((const T *)line.weight)[col * line.weight_step]);
    else if (line.weight_f32)
        widen<float, V>(w, line.weight, col);
    else
        widen<T, V>(w, line.weight, col);
#pragma unroll
    for (int e = 0; e < V; ++e) x[e] *= rstd * w[e];
}

/* The destination of a row, and its scale. */
template <class W> struct Place {
    void *to;     /* first element of the row */
    int64_t step; /* column stride */
    W scale;
    bool codes, scaled;
};

/* Stores V elements of a row from column col on, divided by the scale. */
template <class T, int V, class W>
__device__ __forceinline__ void put(const Place<W> &at, gk_dtype code, int col, W (&x)[V]) {
    if (at.codes) {
        uint32_t four[(V + 3) / 4];
#pragma unroll
        for (int e = 0; e < V; e += 4) {
            float y[4] = {};
#pragma unroll
            for (int i = 0; i < 4 && e + i < V; ++i) y[i] = to_odd_f32(x[e + i] / at.scale);
            four[e / 4] = codes_x4<CodesBySoftware>(code, y);
        }
        Some<uint8_t, V> y;
        memcpy(&y, four, sizeof y);
        *(Some<uint8_t, V> *)((uint8_t *)at.to + col * at.step) = y;
        return;
    }
    Some<T, V> y;
#pragma unroll
    for (int e = 0; e < V; ++e) {
        W z = x[e];
        if (at.scaled) {
            const W most = largest<T>();
            z /= at.scale;
            z = z > most ? most : z < -most ? -most : z; /* NaN stays NaN */
        }
        y.v[e] = from_acc<T>(z);
    }
    *(Some<T, V> *)((T *)at.to + col * at.step) = y;
}

template <class T, int V, class Begins>
__global__ void __launch_bounds__(THREADS) rope_kv_write_kernel(const __grid_constant__ Params p) {
    Begins::begin();
    typedef typename element<T>::acc W;
    const int64_t token = blockIdx.x;
    int head = blockIdx.y * (THREADS >> p.lanes_log2) + (threadIdx.x >> p.lanes_log2);
    const int first = threadIdx.x & (p.lanes - 1);
    int kind = 0;
    while (kind < 2 && head >= p.line[kind].heads) head -= p.line[kind++].heads;
    const Line &line = p.line[kind];
    if (head >= line.heads) return; /* the same for all lanes of the row */
    int64_t position = index_at(p.positions, token * p.position_step, p.positions_64);
    const int64_t slot = index_at(p.slots, token * p.slot_step, p.slots_64);
    const T *x = (const T *)line.x + token * line.token + head * line.head;
    /* true if both elements of an interleaved pair are in one vector */
    const bool within = p.interleaved && V > 1;
    const int half = line.half, rotated = (within ? 2 * half : half) / V,
              items = rotated + (line.columns - 2 * half) / V;

    /* 1. the norm: rstd = 1 / sqrt(mean(x^2) + eps) */
    W rstd = 1;
    if (line.weight) {
        W squares = 0;
        for (int i = first; i < line.columns / V; i += p.lanes) {
            W a[V];
            widen<T, V>(a, x, i * V);
#pragma unroll
            for (int e = 0; e < V; ++e) squares += a[e] * a[e];
        }
        const unsigned lanes =
            p.lanes == 32 ? 0xffffffffu : ((1u << p.lanes) - 1) << (threadIdx.x % 32 - first);
        for (int bit = p.lanes / 2; bit > 0; bit /= 2)
            squares += __shfl_xor_sync(lanes, squares, bit);
        rstd = W(1) / (W)sqrt(squares / W(line.columns) + (W)p.eps);
    }

    /* 2. the destination */
    Place<W> at = {nullptr, 1, W(1), false, false};
    if (kind == 0) {
        at.to = (T *)line.to + token * line.to_token + head * line.to_head;
    } else {
        if (slot >= p.capacity && first == 0) report(p.error_word, GK_BAD_SLOTS);
        if (slot < 0 || slot >= p.capacity) return;
        const int64_t page = slot <= INT32_MAX ? (uint32_t)slot / (uint32_t)p.block_size
                                               : slot / (int64_t)p.block_size;
        const int64_t to =
            page * line.page + (slot - page * p.block_size) * line.row + head * line.to_head;
        at.codes = p.codes;
        at.scaled = line.scale.data;
        at.step = line.to_col;
        at.to = p.codes ? (void *)((uint8_t *)line.to + to) : (void *)((T *)line.to + to);
        at.scale = line.scale.at<W>(page, head);
    }
    if (position < 0 || position >= p.rows_of_cos) {
        if (half > 0 && first == 0) report(p.error_word, GK_BAD_POSITIONS);
        position = p.rows_of_cos - 1;
    }
    const int64_t cos_at = position * p.cos_stride, sin_at = position * p.sin_stride;

    /* 3. the rotation and the store */
    for (int i = first; i < items; i += p.lanes) {
        W a[V];
        if (i >= rotated || within) {
            const int col = i >= rotated ? 2 * half + (i - rotated) * V : i * V;
            widen<T, V>(a, x, col);
            weigh<T, V>(a, line, col, rstd);
            if (i < rotated) {
                W c[(V + 1) / 2], s[(V + 1) / 2];
                angles(c, p.cos, cos_at + i * (V / 2), p.angles_64);
                angles(s, p.sin, sin_at + i * (V / 2), p.angles_64);
#pragma unroll
                for (int e = 0; e + 1 < V; e += 2) {
                    const W x1 = a[e], x2 = a[e + 1];
                    a[e] = x1 * c[e / 2] - x2 * s[e / 2];
                    a[e + 1] = x2 * c[e / 2] + x1 * s[e / 2];
                }
            }
            put<T, V>(at, p.code, col, a);
        } else {
            W b[V], c[V], s[V];
            const int col1 = p.interleaved ? 2 * i : i * V,
                      col2 = p.interleaved ? 2 * i + 1 : half + i * V;
            widen<T, V>(a, x, col1), widen<T, V>(b, x, col2);
            angles(c, p.cos, cos_at + i * V, p.angles_64);
            angles(s, p.sin, sin_at + i * V, p.angles_64);
            weigh<T, V>(a, line, col1, rstd), weigh<T, V>(b, line, col2, rstd);
#pragma unroll
            for (int e = 0; e < V; ++e) {
                const W x1 = a[e], x2 = b[e];
                a[e] = x1 * c[e] - x2 * s[e];
                b[e] = x2 * c[e] + x1 * s[e];
            }
            put<T, V>(at, p.code, col1, a), put<T, V>(at, p.code, col2, b);
        }
    }
}

/* ---- launch ---------------------------------------------------------------------------------- */
Line line_of(const gk_tensor &x, const gk_tensor *weight) {
    Line line = {};
    line.x = x.data;
    line.token = x.stride[0];
    line.head = x.stride[1];
    line.heads = (int)x.shape[1];
    line.columns = (int)x.shape[2];
    if (weight) {
        line.weight = weight->data;
        line.weight_step = weight->stride[0];
        line.weight_f32 = weight->dtype == GK_F32;
    }
    return line;
}

void to_cache(Line *line, const gk_tensor &cache, const gk_tensor *scale) {
    line->to = cache.data;
    line->page = cache.stride[0];
    line->row = cache.stride[1];
    line->to_head = cache.stride[2];
    line->to_col = cache.stride[3];
    line->scale = code_scale(scale);
}

/* True if rows of cos or sin can be read `each` elements at a time. */
bool angles_whole(const gk_tensor &t, int each) {
    const int64_t bytes = gk_min_i64(16, each * (int64_t)gk_dtype_bytes(t.dtype));
    return t.shape[1] % each == 0 && (uintptr_t)t.data % bytes == 0 &&
           (t.shape[0] <= 1 || t.stride[0] * (int64_t)gk_dtype_bytes(t.dtype) % bytes == 0);
}
bool weight_whole(const gk_tensor *t) {
    return !t || ((t->stride[0] == 1 || t->shape[0] <= 1) && (uintptr_t)t->data % 16 == 0);
}

enum {
    KEY_VECTOR /* elements of a vector */
};

bool plan(const gk_cuda_instance *instance, const gk_context *, const void *args, gk_plan *to) {
    const gk_rope_kv_write_args *a = (const gk_rope_kv_write_args *)args;
    const int v = instance->key[KEY_VECTOR];
    const int64_t tokens = a->q.shape[0];
    if (tokens > INT32_MAX || a->q.shape[1] + 2 * a->k.shape[1] > 65535) return false;
    to->tasks = tokens;
    return v == 1 ||
           (in_pieces(a->q, v) && in_pieces(a->k, v) && in_pieces(a->v, v) &&
            in_pieces(a->out_q, v) && in_pieces(a->k_cache, v) && in_pieces(a->v_cache, v) &&
            weight_whole(a->q_weight) && weight_whole(a->k_weight) &&
            angles_whole(a->cos, a->interleaved ? v / 2 : v) &&
            angles_whole(a->sin, a->interleaved ? v / 2 : v));
}

template <class T, int V, class Begins = BeginsAlone>
gk_status run(const gk_context *ctx, const void *args, const gk_plan *, void *) {
    const gk_rope_kv_write_args *a = (const gk_rope_kv_write_args *)args;
    Params p = {};
    p.line[0] = line_of(a->q, a->q_weight);
    p.line[1] = line_of(a->k, a->k_weight);
    p.line[2] = line_of(a->v, NULL);
    p.line[0].half = p.line[1].half = (int)a->cos.shape[1];
    p.line[0].to = a->out_q.data;
    p.line[0].to_token = a->out_q.stride[0];
    p.line[0].to_head = a->out_q.stride[1];
    to_cache(&p.line[1], a->k_cache, a->k_scale);
    to_cache(&p.line[2], a->v_cache, a->v_scale);
    p.cos = a->cos.data;
    p.sin = a->sin.data;
    p.angles_64 = a->cos.dtype == GK_F64;
    p.cos_stride = a->cos.stride[0];
    p.sin_stride = a->sin.stride[0];
    p.rows_of_cos = a->cos.shape[0];
    p.positions = a->positions.data;
    p.position_step = a->positions.stride[0];
    p.slots = a->slots.data;
    p.slot_step = a->slots.stride[0];
    p.positions_64 = a->positions.dtype == GK_I64;
    p.slots_64 = a->slots.dtype == GK_I64;
    p.capacity = a->k_cache.shape[0] * a->k_cache.shape[1];
    p.block_size = (int)gk_clamp_i64(a->k_cache.shape[1], 1, INT32_MAX);
    p.codes = gk_is_code(a->k_cache.dtype);
    p.code = a->k_cache.dtype;
    p.eps = a->eps;
    p.interleaved = a->interleaved;
    p.error_word = ctx->error_word;
    const int64_t half = a->cos.shape[1], columns = a->q.shape[2];
    const int64_t items = (a->interleaved && V > 1 ? columns : columns - half) / V;
    for (p.lanes = 4, p.lanes_log2 = 2; p.lanes < 32 && p.lanes < items; p.lanes *= 2)
        ++p.lanes_log2;
    const int64_t heads = p.line[0].heads + 2 * (int64_t)p.line[1].heads;
    const dim3 grid((unsigned)a->q.shape[0], (unsigned)gk_ceil_div(heads, THREADS >> p.lanes_log2));
    return launch<rope_kv_write_kernel<T, V, Begins>>("gk_rope_kv_write", ctx, grid, THREADS, 0, p,
                                                      Begins::overlaps);
}

} // namespace

#endif
