/* SPDX-License-Identifier: BSD-3-Clause */
/* paged_attn_plain: attention over a paged cache for every dtype, page size, alignment, head_dim
 * and number of query tokens, including 8-bit caches. It serves float64, and every call that the
 * other kernels refuse. It is not tuned for speed: heads of a group and tokens of a sequence share
 * nothing.
 *
 *  out[t] = sum_j softmax_j(score(scale k_scale q[t] k[j]), sink) v[j] v_scale
 *  with j in [lo(t), hi(t))
 *
 * q [T, Hq, D]; k_cache, v_cache [num_blocks, block_size, Hkv, D | Dv]; block_table [B,
 * max_blocks], seq_lens [B], cu_seqlens_q [B + 1] int32; out [T, Hq, Dv], lse [T, Hq]. Online
 * softmax: Milakov and Gimelshein 2018; pages: Kwon et al. 2023.
 *
 * Work split: a block owns a row, that is one head of one token. Its warps take groups of 32 keys
 * in turn. In a warp
 *
 *  2.1 a lane owns a key: the dot product, with q from shared memory
 *  2.2 a lane owns columns of v: the weights come from the other lanes by shuffle
 *
 * At the end the warps' sums are merged through shared memory. Bytes of shared memory in float64,
 * for instances of head_dim up to 256 and of head_dim up to 576:
 *
 *  q        D doubles              2048    4608
 *  o        warps x Dv sums        8192   18432
 *  stats    warps x (max, sum)       64      64 */
#include "../../../core/paged.h"
#include "../../tile/codes.cuh"
#include "../../tile/convert.cuh"
#include "../../tile/reduce.cuh"
#include "../tiles.h"
#include "paged_factor.cuh"

namespace {

constexpr int WARPS_A_ROW = paged_plan::plain_warps, THREADS = WARPS_A_ROW * 32;
constexpr int NARROW = 256; /* the largest head_dim of narrow instances; wide ones take any */
static_assert(GK_CACHE_HEAD_DIM % 32 == 0, "a lane has whole columns");

template <class W, int MAX_DIM> struct Shared {
    W q[MAX_DIM];
    W o[WARPS_A_ROW][MAX_DIM];
    W peak[WARPS_A_ROW], sum[WARPS_A_ROW];
};
static_assert(sizeof(Shared<double, NARROW>) == 2048 + 8192 + 64 &&
                  sizeof(Shared<double, GK_CACHE_HEAD_DIM>) == 4608 + 18432 + 64,
              "the map in the title");

struct Params {
    Paged p;
    gk_dtype stored;            /* the code format of 8-bit caches */
    CodeScale k_scale, v_scale; /* scales of 8-bit caches; p has none then */
};

/* A row of the cache as T (PlainRow) or as codes (CodeRow). Codes are multiplied by the scale of
 * their page and head later. */
template <class T> struct PlainRow {
    typedef typename element<T>::acc W;
    const T *at;
    __device__ __forceinline__ PlainRow(const void *data, int64_t offset, gk_dtype)
        : at((const T *)data + offset) {}
    __device__ __forceinline__ W operator[](int d) const { return to_acc(at[d]); }
};
template <class T> struct CodeRow {
    typedef typename element<T>::acc W;
    const uint8_t *at;
    gk_dtype dtype;
    __device__ __forceinline__ CodeRow(const void *data, int64_t offset, gk_dtype stored)
        : at((const uint8_t *)data + offset), dtype(stored) {}
    __device__ __forceinline__ W operator[](int d) const { return (W)code_value(dtype, at[d]); }
};

template <class T, bool CODES> struct RowOf {
    typedef PlainRow<T> type;
};
template <class T> struct RowOf<T, true> {
    typedef CodeRow<T> type;
};

/* Wide instances: 18 columns a lane take up to 72 more registers in float64, so one block fewer
 * fits on an SM. */
template <class T, bool CODES, int MAX_DIM>
__global__ void __launch_bounds__(THREADS, MAX_DIM > NARROW ? 2 : 3)
    paged_attn_plain_kernel(Params x) {
    constexpr int COLS = MAX_DIM / 32; /* columns of a lane */
    typedef typename element<T>::acc W;
    typedef typename RowOf<T, CODES>::type Row;
    const Paged &p = x.p;
    __shared__ Shared<W, MAX_DIM> shared;
    const int64_t row = blockIdx.x;
    const int token = (int)(row / p.heads_q), head = (int)(row % p.heads_q),
              head_kv = head / p.group;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    T *out = (T *)p.out + row * p.head_dim_v;
    W *lse = (W *)p.lse + row;

    /* 1. the row */
    const int b = paged_owner(p, token);
    if (b < 0) {
        for (int d = threadIdx.x; d < p.head_dim_v; d += THREADS) out[d] = from_acc<T>(0);
        if (threadIdx.x == 0 && p.lse) *lse = -INFINITY;
        return;
    }
    const PagedSequence s = paged_sequence(p, b);
    const int i = token - s.q0, lo = s.lo(i), hi = s.hi(i);
    const T *q = (const T *)p.q.data + token * p.q.row + head * p.q.head;
    for (int d = threadIdx.x; d < p.head_dim; d += THREADS) shared.q[d] = to_acc(q[d]);
    __syncthreads(); /* q is visible to all threads */
    const WideScore<W> score = {paged_factor<W>(p, head_kv), (W)p.rules.softcap,
                                slope_of<W>(p.rules, b, head), s.diagonal};

    /* 2. 32 keys at a time */
    RowSoftmax<ExpFull, W> softmax = {W(-INFINITY), W(0)}; /* sum: this lane's share */
    W o[COLS] = {};
    for (int j0 = lo + warp * 32; j0 < hi; j0 += THREADS) {
        const int j = j0 + lane;
        const int page = j < hi ? page_of_key(p, b, j) : -1; /* -1: no key */
        const int in_page = j % p.block_size;
        /* 2.1 the score of this lane's key */
        W logit = -INFINITY, v_factor = 1;
        if (page >= 0) {
            const Row k(p.k.data, p.k.at(page, head_kv, in_page), x.stored);
            const W k_factor = CODES ? x.k_scale.at<W>(page, head_kv) : W(1);
            if (CODES) v_factor = x.v_scale.at<W>(page, head_kv);
            /* four sums, because consecutive additions to one sum wait for each other */
            W dot[4] = {};
            int d = 0;
            for (; d + 4 <= p.head_dim; d += 4)
#pragma unroll
                for (int u = 0; u < 4; ++u) dot[u] += shared.q[d + u] * k[d + u];
            for (; d < p.head_dim; ++d) dot[0] += shared.q[d] * k[d];
            const W product = (dot[0] + dot[1]) + (dot[2] + dot[3]);
            logit = score_fine(score, CODES ? product * k_factor : product, i, j);
        }
        const W shrink = softmax.raise(warp_max(logit)), weight = softmax.weight(logit);
        softmax.sum = softmax.sum * shrink + weight;
        const W of_v = CODES ? weight * v_factor : weight;
        /* 2.2 sums over these 32 keys alone, then added to the others: short sums round less */
        W y[COLS] = {};
        for (int r = 0; r < 32; ++r) {
            const int page_r = __shfl_sync(0xffffffffu, page, r),
                      row_r = __shfl_sync(0xffffffffu, in_page, r);
            if (page_r < 0) continue;
            const W w = __shfl_sync(0xffffffffu, of_v, r);
            const Row v(p.v.data, p.v.at(page_r, head_kv, row_r), x.stored);
#pragma unroll
            for (int c = 0; c < COLS; ++c)
                if (c * 32 + lane < p.head_dim_v) y[c] += w * v[c * 32 + lane];
        }
#pragma unroll
        for (int c = 0; c < COLS; ++c) o[c] = o[c] * shrink + y[c];
    }

    /* 3. merge the warps' sums, and the sink */
    const W its_sum = warp_sum(softmax.sum);
#pragma unroll
    for (int c = 0; c < COLS; ++c)
        if (c * 32 + lane < p.head_dim_v) shared.o[warp][c * 32 + lane] = o[c];
    if (lane == 0) {
        shared.peak[warp] = softmax.peak;
        shared.sum[warp] = its_sum;
    }
    __syncthreads(); /* every warp's sums are written */
    const W sink = sink_of<W>(p.rules, head);
    RowSoftmax<ExpFull, W> all = {sink, W(0)};
    for (int w = 0; w < WARPS_A_ROW; ++w) all.peak = lanes_max2(all.peak, shared.peak[w]);
    W factor[WARPS_A_ROW];
    all.join(sink, 1); /* adds nothing without a sink */
    for (int w = 0; w < WARPS_A_ROW; ++w) factor[w] = all.join(shared.peak[w], shared.sum[w]);
    const W total = all.sum;
    const W v_scale = paged_scale<W>(p.v_scale, p.v_scale_step, head_kv);
    for (int d = threadIdx.x; d < p.head_dim_v; d += THREADS) {
        W y = 0;
        for (int w = 0; w < WARPS_A_ROW; ++w) y += factor[w] * shared.o[w][d];
        out[d] = from_acc<T>(total == 0 ? W(0) : y / total * v_scale);
    }
    if (threadIdx.x == 0 && p.lse) *lse = total == 0 ? W(-INFINITY) : all.peak + log(total);
}

/* ---- launch ---------------------------------------------------------------------------------- */
enum {
    KEY_CODES,   /* the caches hold 8-bit codes */
    KEY_HEAD_DIM /* the largest */
};

bool plan(const gk_cuda_instance *instance, const gk_context *ctx, const void *args, gk_plan *to) {
    const gk_paged_attn_args *a = (const gk_paged_attn_args *)args;
    if (a->q.shape[2] > instance->key[KEY_HEAD_DIM] ||
        a->v_cache.shape[3] > instance->key[KEY_HEAD_DIM] ||
        a->q.shape[0] * a->q.shape[1] > INT32_MAX)
        return false;
    const bool codes = instance->key[KEY_CODES];
    if (codes != gk_is_code(a->k_cache.dtype)) return false;
    Params &x = gk_own<Params>(to);
    x = {};
    x.p = paged_of(ctx, a);
    if (codes) {
        x.stored = a->k_cache.dtype;
        x.p.k_scale = x.p.v_scale = NULL;
        x.k_scale = code_scale(a->k_scale);
        x.v_scale = code_scale(a->v_scale);
    }
    to->tile[0] = 1;
    to->tile[1] = THREADS;
    to->tasks = a->q.shape[0] * a->q.shape[1];
    return true;
}

template <class T, bool CODES, int MAX_DIM>
gk_status run(const gk_context *ctx, const void *, const gk_plan *plan, void *) {
    const Params &x = gk_own<Params>(plan);
    const dim3 grid((unsigned)((int64_t)x.p.tokens * x.p.heads_q));
    return launch<paged_attn_plain_kernel<T, CODES, MAX_DIM>>("gk_paged_attn", ctx, grid, THREADS,
                                                              0, x);
}

#define INSTANCE(NAME, DTYPE, T, CODES, MAX_DIM) \
    {"paged_attn_plain_" NAME, DTYPE, plan, run<T, CODES, MAX_DIM>, {CODES, MAX_DIM}, NULL},
#define INSTANCES(NAME, DTYPE, T)                              \
    INSTANCE(NAME, DTYPE, T, false, NARROW)                    \
    INSTANCE(NAME "_codes", DTYPE, T, true, NARROW)            \
    INSTANCE(NAME "_wide", DTYPE, T, false, GK_CACHE_HEAD_DIM) \
    INSTANCE(NAME "_codes_wide", DTYPE, T, true, GK_CACHE_HEAD_DIM)
/* clang-format off */
const gk_cuda_instance instances[] = {
    INSTANCES("f32", GK_F32, float)
    INSTANCES("bf16", GK_BF16, __nv_bfloat16)
    INSTANCES("f16", GK_F16, __half)
    INSTANCES("f64", GK_F64, double)
};
/* clang-format on */
#undef INSTANCES
#undef INSTANCE

} // namespace

extern "C" const gk_cuda_table gk_paged_attn_plain_table = {
    instances, sizeof instances / sizeof instances[0], 80, NULL};
