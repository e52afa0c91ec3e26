/* SPDX-License-Identifier: BSD-3-Clause */
/* kv_cache_write: writes new keys and values to their rows of the paged caches (Kwon et al. 2023,
 * PagedAttention).
 *
 *  cache[s / block_size][s % block_size][h][:] = saturate(x[t][h][:] / scale[h])       s = slots[t]
 *
 * k [T, Hkv, D], v [T, Hkv, Dv], any strides; caches [num_blocks, block_size, Hkv, D | Dv]; slots
 * [T] int64 or int32. A negative slot is skipped; a slot past the cache is skipped and reported.
 * The quotient is float32 (float64 for float64), rounded once to nearest even. If several tokens
 * have the same slot, the result in each vector is that of any one of them. 8-bit caches hold codes
 * (tile/codes.cuh), with or without a scale; a scale may be per page and head.
 *
 * Work split: a block takes up to TOKENS tokens and THREADS vectors of each. A vector, named
 * `piece` in the code, is 16 bytes if every row is dense and aligned, otherwise one element. A
 * thread takes the same vector of all the tokens, so it computes its head and column once. The
 * kernel is bound by memory bandwidth.
 *
 *  1. load the vectors; these loads do not wait for the slots
 *  2. the first threads compute cache offsets from the slots, in shared memory: 24 bytes a token
 *  3. divide, store */
#include "../../host/launch.cuh"
#include "../../ptx/regs.cuh"
#include "kv_store.cuh"
#include "../tiles.h"

namespace {

constexpr int THREADS = kv_write_tile::threads, TOKENS = kv_write_tile::tokens;

struct Side { /* k or v */
    const void *x;
    void *cache;
    int64_t token, head, col;                 /* strides of x */
    int64_t page, row, cache_head, cache_col; /* strides of the cache */
    CodeScale scale;
    int cols; /* vectors of a row of a head */
};

struct Params {
    Side side[2];
    const void *slots;
    int64_t slot_step, capacity;
    int64_t tokens;
    /* groups of tokens; block x takes group x % groups */
    int block_size, heads, tokens_per_block, groups;
    bool slots_64;
    gk_dtype code; /* the code format of 8-bit caches */
    uint8_t *error_word;
};

/* marks a skipped token; no real offset, since strides may be negative */
constexpr int64_t NOWHERE = INT64_MIN;

/* The cache offsets of the block's tokens. */
struct Places {
    int64_t at[2][TOKENS]; /* offsets into the caches of k and v */
    int64_t page[TOKENS];
};
static_assert(sizeof(Places) == 24 * TOKENS, "the map in the title");

template <class T> __device__ __forceinline__ T scaled(T x, typename element<T>::acc scale) {
    typename element<T>::acc y = to_acc(x) / scale;
    const typename element<T>::acc most = largest<T>();
    y = y > most ? most : y < -most ? -most : y; /* NaN stays NaN */
    return from_acc<T>(y);
}

template <int BYTES> struct Bits; /* the type of one load */
template <> struct Bits<1> {
    typedef uint8_t type;
};
template <> struct Bits<2> {
    typedef uint16_t type;
};
template <> struct Bits<4> {
    typedef uint32_t type;
};
template <> struct Bits<8> {
    typedef uint2 type;
};
template <> struct Bits<16> {
    typedef uint4 type;
};

/* PlainPiece::of and CodePiece::of give a vector as the cache stores it, in T or in 8-bit codes. */
template <class T, int PIECE> struct PlainPiece {
    typedef T stored;
    typedef typename Bits<(int)sizeof(T) * PIECE>::type Vector;
    static __device__ __forceinline__ Vector of(Vector piece, const Side &side, int head,
                                                int64_t page, gk_dtype) {
        if (!side.scale.data) return piece;
        const typename element<T>::acc scale = side.scale.at<typename element<T>::acc>(page, head);
        T x[PIECE];
        memcpy(x, &piece, sizeof x);
#pragma unroll
        for (int e = 0; e < PIECE; ++e) x[e] = scaled<T>(x[e], scale);
        memcpy(&piece, x, sizeof x);
        return piece;
    }
};
template <class T, int PIECE> struct CodePiece {
    typedef uint8_t stored;
    typedef typename Bits<PIECE>::type Vector;
    static __device__ __forceinline__ Vector
    of(const typename Bits<(int)sizeof(T) * PIECE>::type &piece, const Side &side, int head,
       int64_t page, gk_dtype code) {
        const typename element<T>::acc scale = side.scale.at<typename element<T>::acc>(page, head);
        T from[PIECE];
        memcpy(from, &piece, sizeof from);
        uint32_t codes[(PIECE + 3) / 4];
#pragma unroll
        for (int e = 0; e < PIECE; e += 4) {
            float x[4] = {};
#pragma unroll
            for (int i = 0; i < 4 && e + i < PIECE; ++i)
                x[i] = to_odd_f32(to_acc(from[e + i]) / scale);
            codes[e / 4] = codes_x4<CodesBySoftware>(code, x);
        }
        Vector to;
        memcpy(&to, codes, sizeof to);
        return to;
    }
};

template <class T, class Piece, int PIECE>
__global__ void __launch_bounds__(THREADS) kv_cache_write_kernel(Params p) {
    typedef typename Bits<(int)sizeof(T) * PIECE>::type Vector;
    __shared__ Places places;
    const int group = blockIdx.x % p.groups;
    const int64_t token0 = (int64_t)group * p.tokens_per_block;
    const int count = (int)min((int64_t)p.tokens_per_block, p.tokens - token0);

    /* 1. load this thread's vector of k or v */
    const int pieces_k = p.heads * p.side[0].cols, pieces = pieces_k + p.heads * p.side[1].cols;
    const int i = blockIdx.x / p.groups * THREADS + threadIdx.x;
    const int s = i >= pieces_k;
    const Side &side = p.side[s];
    const int rest = s ? i - pieces_k : i, head = rest / max(side.cols, 1),
              col = (rest - head * side.cols) * PIECE;
    const T *x = (const T *)side.x + token0 * side.token + head * side.head + col * side.col;
    Vector piece[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; ++t)
        if (i < pieces && t < count) piece[t] = *(const Vector *)(x + t * side.token);

    /* 2. the cache offsets of the slots */
    if (threadIdx.x < count) {
        const int64_t at = (token0 + threadIdx.x) * p.slot_step;
        const int64_t slot =
            p.slots_64 ? ((const int64_t *)p.slots)[at] : ((const int32_t *)p.slots)[at];
        const bool good = slot >= 0 && slot < p.capacity;
        if (slot >= p.capacity) report(p.error_word, GK_BAD_SLOTS);
        const int64_t page = good ? slot / p.block_size : 0,
                      row = good ? slot - page * p.block_size : 0;
        for (int which = 0; which < 2; ++which) {
            places.page[threadIdx.x] = page;
            places.at[which][threadIdx.x] =
                good ? page * p.side[which].page + row * p.side[which].row : NOWHERE;
        }
    }
    __syncthreads(); /* `places` is complete */
    if (i >= pieces) return;

    /* 3. store */
    typedef typename Piece::stored Stored;
    Stored *cache = (Stored *)side.cache + head * side.cache_head + col * side.cache_col;
#pragma unroll
    for (int t = 0; t < TOKENS; ++t)
        if (t < count && places.at[s][t] != NOWHERE)
            *(typename Piece::Vector *)(cache + places.at[s][t]) =
                Piece::of(piece[t], side, head, places.page[t], p.code);
}

/* ---- launch ---------------------------------------------------------------------------------- */
Side side_of(const gk_tensor &x, const gk_tensor &cache, const gk_tensor *scale, int piece) {
    Side s = {};
    s.x = x.data;
    s.cache = cache.data;
    s.token = x.stride[0];
    s.head = x.stride[1];
    s.col = x.stride[2];
    s.page = cache.stride[0];
    s.row = cache.stride[1];
    s.cache_head = cache.stride[2];
    s.cache_col = cache.stride[3];
    s.scale = code_scale(scale);
    s.cols = (int)x.shape[2] / piece;
    return s;
}

enum {
    KEY_PIECE, /* elements of a vector */
    KEY_CODES  /* the caches hold 8-bit codes */
};

bool plan(const gk_cuda_instance *instance, const gk_context *, const void *args, gk_plan *) {
    const gk_kv_cache_write_args *a = (const gk_kv_cache_write_args *)args;
    const int piece = instance->key[KEY_PIECE];
    return gk_is_code(a->k_cache.dtype) == (instance->key[KEY_CODES] != 0) &&
           (piece == 1 || (in_pieces(a->k, piece) && in_pieces(a->v, piece) &&
                           in_pieces(a->k_cache, piece) && in_pieces(a->v_cache, piece)));
}

template <class T, class Piece, int PIECE>
gk_status run(const gk_context *ctx, const void *args, const gk_plan *, void *) {
    const gk_kv_cache_write_args *a = (const gk_kv_cache_write_args *)args;
    Params p = {};
    p.side[0] = side_of(a->k, a->k_cache, a->k_scale, PIECE);
    p.side[1] = side_of(a->v, a->v_cache, a->v_scale, PIECE);
    p.slots = a->slots.data;
    p.slot_step = a->slots.stride[0];
    p.slots_64 = a->slots.dtype == GK_I64;
    p.capacity = a->k_cache.shape[0] * a->k_cache.shape[1];
    p.tokens = a->k.shape[0];
    p.heads = (int)a->k.shape[1];
    p.block_size = (int)gk_max_i64(a->k_cache.shape[1], 1);
    p.code = a->k_cache.dtype;
    p.error_word = ctx->error_word;
    const int64_t chunks =
        gk_ceil_div((int64_t)p.heads * (p.side[0].cols + p.side[1].cols), THREADS);
    const int64_t blocks = (int64_t)gk_gpu_of(ctx->index)->num_sms * kv_write_tile::blocks_per_sm;
    p.tokens_per_block = (int)gk_clamp_i64(p.tokens * chunks / blocks, 1, TOKENS);
    p.groups = (int)gk_ceil_div(p.tokens, p.tokens_per_block);
    const dim3 grid((unsigned)(p.groups * chunks));
    return launch<kv_cache_write_kernel<T, Piece, PIECE>>("gk_kv_cache_write", ctx, grid, THREADS,
                                                          0, p);
}

#define INSTANCE(NAME, DTYPE, T, PIECE, KIND, CODES) \
    {"kv_cache_write_" NAME, DTYPE, plan, run<T, KIND<T, PIECE>, PIECE>, {PIECE, CODES}, NULL},
#define INSTANCES(NAME, DTYPE, T, PIECE)                            \
    INSTANCE(NAME "_x" #PIECE, DTYPE, T, PIECE, PlainPiece, 0)      \
    INSTANCE(NAME, DTYPE, T, 1, PlainPiece, 0)                      \
    INSTANCE(NAME "_codes_x" #PIECE, DTYPE, T, PIECE, CodePiece, 1) \
    INSTANCE(NAME "_codes", DTYPE, T, 1, CodePiece, 1)
/* clang-format off */
const gk_cuda_instance instances[] = {
    INSTANCES("bf16", GK_BF16, __nv_bfloat16, 8)
    INSTANCES("f16", GK_F16, __half, 8)
    INSTANCES("f32", GK_F32, float, 4)
    INSTANCES("f64", GK_F64, double, 2)
};
/* clang-format on */
#undef INSTANCES
#undef INSTANCE

} // namespace

extern "C" const gk_cuda_table gk_kv_cache_write_table = {
    instances, sizeof instances / sizeof instances[0], 80, NULL};
