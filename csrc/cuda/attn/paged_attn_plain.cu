/* SPDX-License-Identifier: BSD-3-Clause */
/* paged_attn_plain: attention over a paged cache for every dtype, page size, alignment and number of query tokens; the
 * kernel of float32 and float64, and of what the tensor-core kernel does not take.
 *   out[t] = sum_j softmax_j(score(scale k_scale q[t] k[j]), sink) v[j] v_scale         j in [lo(t), hi(t))
 * q [T, Hq, D]; k_cache, v_cache [num_blocks, block_size, Hkv, D | Dv]; block_table [B, max_blocks], seq_lens [B],
 * cu_seqlens_q [B + 1] int32; out [T, Hq, Dv], lse [T, Hq].
 * Online softmax: Milakov and Gimelshein 2018; pages: Kwon et al. 2023.
 *
 * Work split: a block owns a row, that is one head of one token. Its warps take 32 keys in turn; in a warp
 *   2.1 a lane owns a key: the dot product, q out of shared memory
 *   2.2 a lane owns columns of v: weights by shuffle
 * and at the end the warps' sums meet in shared memory:
 *   q        D doubles              2048 bytes
 *   o        warps x Dv sums        8192 bytes
 *   stats    warps x (max, sum)       64 bytes
 * Not for speed: nothing is shared between heads of a group or tokens of a sequence. */
#include "../tile/convert.cuh"
#include "../tile/reduce.cuh"
#include "kv.cuh"
#include "tiles.h"

namespace {

constexpr int WARPS_A_ROW = paged_plan::plain_warps, THREADS = WARPS_A_ROW * 32;
constexpr int MAX_DIM = 256, COLS = MAX_DIM / 32; /* columns of a lane */

template <class W> struct Shared {
    W q[MAX_DIM];
    W o[WARPS_A_ROW][MAX_DIM];
    W peak[WARPS_A_ROW], sum[WARPS_A_ROW];
};
static_assert(sizeof(Shared<double>) == 2048 + 8192 + 64, "the map in the title");

template <class T> __global__ void __launch_bounds__(THREADS, 3) paged_attn_plain_kernel(Paged p) {
    typedef typename element<T>::acc W;
    __shared__ Shared<W> shared;
    const int64_t row = blockIdx.x;
    const int token = (int)(row / p.heads_q), head = (int)(row % p.heads_q), head_kv = head / p.group;
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
    __syncthreads(); /* q is there */
    const WideScore<W> score = {(W)p.rules.scale * paged_scale<W>(p.k_scale, p.k_scale_step, head_kv),
                                (W)p.rules.softcap, slope_of<W>(p.rules, b, head), s.diagonal};

    /* 2. 32 keys at a time */
    RowSoftmax<ExpFull, W> softmax = {W(-INFINITY), W(0)}; /* sum: this lane's share */
    W o[COLS] = {};
    for (int j0 = lo + warp * 32; j0 < hi; j0 += THREADS) {
        const int j = j0 + lane;
        const int page = j < hi ? page_of_key(p, b, j) : -1; /* -1: no key */
        const int in_page = j % p.block_size;
        /* 2.1 */
        W x = -INFINITY;
        if (page >= 0) {
            const T *k = (const T *)p.k.data + p.k.at(page, head_kv, in_page);
            W dot[4] = {}; /* independent sums: a single one would wait for each addition */
            int d = 0;
            for (; d + 4 <= p.head_dim; d += 4)
#pragma unroll
                for (int u = 0; u < 4; ++u) dot[u] += shared.q[d + u] * to_acc(k[d + u]);
            for (; d < p.head_dim; ++d) dot[0] += shared.q[d] * to_acc(k[d]);
            x = score_fine(score, (dot[0] + dot[1]) + (dot[2] + dot[3]), i, j);
        }
        const W shrink = softmax.raise(warp_max(x)), weight = softmax.weight(x);
        softmax.sum = softmax.sum * shrink + weight;
        /* 2.2: these keys by themselves, then to the others: short sums keep their digits */
        W y[COLS] = {};
        for (int r = 0; r < 32; ++r) {
            const int page_r = __shfl_sync(0xffffffffu, page, r), row_r = __shfl_sync(0xffffffffu, in_page, r);
            if (page_r < 0) continue;
            const W w = __shfl_sync(0xffffffffu, weight, r);
            const T *v = (const T *)p.v.data + p.v.at(page_r, head_kv, row_r);
#pragma unroll
            for (int c = 0; c < COLS; ++c)
                if (c * 32 + lane < p.head_dim_v) y[c] += w * to_acc(v[c * 32 + lane]);
        }
#pragma unroll
        for (int c = 0; c < COLS; ++c) o[c] = o[c] * shrink + y[c];
    }

    /* 3. the warps' sums become one; the sink joins them */
    const W its_sum = warp_sum(softmax.sum);
#pragma unroll
    for (int c = 0; c < COLS; ++c)
        if (c * 32 + lane < p.head_dim_v) shared.o[warp][c * 32 + lane] = o[c];
    if (lane == 0) shared.peak[warp] = softmax.peak, shared.sum[warp] = its_sum;
    __syncthreads(); /* every warp's sums are written */
    const W sink = sink_of<W>(p.rules, head);
    RowSoftmax<ExpFull, W> all = {sink, W(0)};
    for (int w = 0; w < WARPS_A_ROW; ++w) all.peak = lanes_max2(all.peak, shared.peak[w]);
    W factor[WARPS_A_ROW];
    all.join(sink, 1); /* nothing where there is none */
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

/* ---- launch -------------------------------------------------------------------------------------------- */
bool plan(const gk_cuda_instance *, const gk_context *ctx, const void *args, gk_plan *to) {
    const gk_paged_attn_args *a = (const gk_paged_attn_args *)args;
    if (a->q.shape[2] > MAX_DIM || a->v_cache.shape[3] > MAX_DIM || a->q.shape[0] * a->q.shape[1] > INT32_MAX)
        return false;
    gk_own<Paged>(to) = paged_of(ctx, a);
    to->tile[0] = 1, to->tile[1] = THREADS;
    to->tasks = a->q.shape[0] * a->q.shape[1];
    return true;
}

template <class T> gk_status run(const gk_context *ctx, const void *, const gk_plan *plan, void *) {
    const Paged &p = gk_own<Paged>(plan);
    const dim3 grid((unsigned)((int64_t)p.tokens * p.heads_q));
    return launch<paged_attn_plain_kernel<T>>("gk_paged_attn", ctx, grid, THREADS, 0, p);
}

const gk_cuda_instance instances[] = {
    {"paged_attn_plain_f32", GK_F32, plan, run<float>, {}, NULL},
    {"paged_attn_plain_bf16", GK_BF16, plan, run<__nv_bfloat16>, {}, NULL},
    {"paged_attn_plain_f16", GK_F16, plan, run<__half>, {}, NULL},
    {"paged_attn_plain_f64", GK_F64, plan, run<double>, {}, NULL},
};

} // namespace

extern "C" const gk_cuda_table gk_paged_attn_plain_table = {instances, sizeof instances / sizeof instances[0], 80,
                                                            NULL};
