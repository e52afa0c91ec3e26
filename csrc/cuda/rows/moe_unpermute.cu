// SPDX-License-Identifier: BSD-3-Clause
/* moe_unpermute: the end of a mixture of experts, and its gradients. Serves gk_moe_unpermute and
 * gk_moe_unpermute_bwd.
 *
 *  out[t] = sum_j weight[t, j] rows[place[t, j]]        a place below 0 adds nothing
 *  drows[r] = sum of weight[t, j] grad_out[t] over the (t, j) with place[t, j] = r
 *  dweight[t, j] = grad_out[t] . rows[place[t, j]]
 *
 * rows, drows [R, H], out, grad_out [T, H], whose last dimension is dense; place [T, J] int32 or
 * int64, weight [T, J] float32 or the rows' dtype, any strides; dweight [T, J]. Sums are float32
 * (float64 for float64) in the order of j, and of t before it; dot products are summed in one order
 * that depends on H alone. A place that is not below R is reported and adds nothing.
 *
 * Forward: a thread has one vector of a token, 16 bytes if all rows are whole vectors, otherwise
 * one element. It loads AHEAD rows before it adds the first. Lane l of every warp reads choice l of
 * the token, and shuffles give it to the others.
 *
 * Backward, in four steps, of which dweight alone needs the third:
 *
 *  1. clear the workspace: no row has a choice
 *  2. a thread for each choice: the row's first and last choice, by atomic maxima
 *  3. a block for each token: dweight, and drows of the rows that one choice names. In a mixture
 *     these are all rows that have a token. grad_out is read once for eight choices
 *  4. a warp for WARP_ROWS rows: drows of the others. If several choices name a row, the warp
 *     searches all choices from the first to the last, so the sum has a fixed order
 *
 * Workspace of the backward: 16 bytes for each row. Bound by memory. */
#include "gpukern_moe.h"
#include "row_block.cuh"

namespace {

constexpr int MOST_THREADS = 256; /* of a block of the forward pass */
constexpr int LEAST_THREADS = 64; /* more blocks of fewer threads do not help few tokens */
constexpr int BACK_THREADS = 256; /* of a block of the backward's kernels */
constexpr int WARP_ROWS = 8;      /* rows that a warp looks at: few have work for it */

/* place and weight, read by choice. */
struct Choices {
    const void *place, *weight;
    int64_t place_stride[2], weight_stride[2];
    int64_t rows, each; /* R, J */
    bool place_64, weight_narrow;
    uint8_t *error_word;
};

Choices choices_of(const gk_context *ctx, const gk_tensor &place, const gk_tensor &weight,
                   const gk_tensor &rows) {
    Choices c = {};
    c.place = place.data;
    c.weight = weight.data;
    for (int d = 0; d < 2; ++d) {
        c.place_stride[d] = place.stride[d];
        c.weight_stride[d] = weight.stride[d];
    }
    c.rows = rows.shape[0];
    c.each = place.shape[1];
    c.place_64 = place.dtype == GK_I64;
    c.weight_narrow = weight.dtype == rows.dtype;
    c.error_word = ctx->error_word;
    return c;
}

/* The row of choice j of token t; -1 if there is none. */
__device__ __forceinline__ int64_t row_of(const Choices &c, int64_t t, int64_t j) {
    const int64_t at = t * c.place_stride[0] + j * c.place_stride[1];
    const int64_t row =
        c.place_64 ? ((const int64_t *)c.place)[at] : ((const int32_t *)c.place)[at];
    if (row < c.rows) return row < 0 ? -1 : row;
    report(c.error_word, GK_BAD_SLOTS);
    return -1;
}

template <class T>
__device__ __forceinline__ typename element<T>::acc weight_of(const Choices &c, int64_t t,
                                                              int64_t j) {
    const int64_t at = t * c.weight_stride[0] + j * c.weight_stride[1];
    if (c.weight_narrow) return to_acc(((const T *)c.weight)[at]);
    return ((const float *)c.weight)[at];
}

/* ---- forward --------------------------------------------------------------------------------- */
struct Params {
    Choices choices;
    const void *rows;
    void *out;
    int64_t row_stride, out_stride;
    int64_t n;  /* vectors of a row */
    int chunks; /* blocks of a token */
};

/* AHEAD: rows that a thread loads before it adds the first. ITEMS: vectors of a row that it has,
 * blockDim.x apart. */
template <class T, int V, int AHEAD, int ITEMS>
__global__ void __launch_bounds__(MOST_THREADS) moe_unpermute_kernel(Params p) {
    typedef typename element<T>::acc W;
    typedef RowSome<T, V> Vec;
    const int64_t token = blockIdx.x / p.chunks;
    const int64_t i = (int64_t)(blockIdx.x % p.chunks) * blockDim.x * ITEMS + threadIdx.x;
    const int lane = threadIdx.x % 32;
    const Vec *mine = (const Vec *)p.rows + i;
    W sum[ITEMS][V];
#pragma unroll
    for (int c = 0; c < ITEMS; ++c)
#pragma unroll
        for (int k = 0; k < V; ++k) sum[c][k] = 0;
    for (int64_t j0 = 0; j0 < p.choices.each; j0 += 32) {
        const int count = (int)min(int64_t(32), p.choices.each - j0);
        int64_t row = -1;
        W weight = 0;
        if (lane < count) {
            row = row_of(p.choices, token, j0 + lane);
            weight = weight_of<T>(p.choices, token, j0 + lane);
        }
#pragma unroll 1
        for (int j = 0; j < count; j += AHEAD) {
            Vec x[AHEAD][ITEMS];
            bool adds[AHEAD];
#pragma unroll
            for (int u = 0; u < AHEAD; ++u) {
                const int64_t at = __shfl_sync(0xffffffffu, row, (j + u) % 32);
                adds[u] = at >= 0 && j + u < count;
#pragma unroll
                for (int c = 0; c < ITEMS; ++c)
                    if (adds[u] && i + c * (int)blockDim.x < p.n)
                        x[u][c] = *(const Vec *)((const T *)(mine + c * (int)blockDim.x) +
                                                 at * p.row_stride);
            }
#pragma unroll
            for (int u = 0; u < AHEAD; ++u) {
                const W by = __shfl_sync(0xffffffffu, weight, (j + u) % 32);
#pragma unroll
                for (int c = 0; c < ITEMS; ++c)
                    if (adds[u] && i + c * (int)blockDim.x < p.n)
#pragma unroll
                        for (int k = 0; k < V; ++k)
                            sum[c][k] = fma(by, to_acc(x[u][c].v[k]), sum[c][k]);
            }
        }
    }
    T *out = (T *)p.out + token * p.out_stride;
#pragma unroll
    for (int c = 0; c < ITEMS; ++c)
        if (i + c * (int)blockDim.x < p.n) {
            Vec y;
#pragma unroll
            for (int k = 0; k < V; ++k) y.v[k] = from_acc<T>(sum[c][k]);
            store_some(out + (i + c * (int)blockDim.x) * V, y);
        }
}

template <class T, int V, int AHEAD, int ITEMS>
gk_status run_of(const gk_context *ctx, Params &p, int64_t tokens) {
    p.n /= V;
    const int64_t share = gk_ceil_div(p.n, ITEMS); /* threads that a token needs */
    /* few tokens are cut into more blocks, so that more SMs load */
    const int64_t spread = gk_min_i64(gk_ceil_div(share, LEAST_THREADS),
                                      gk_gpu_of(ctx->index)->num_sms / gk_max_i64(tokens, 1));
    const int64_t chunks = gk_max_i64(gk_ceil_div(share, MOST_THREADS), spread);
    p.chunks = (int)chunks;
    const unsigned threads = (unsigned)gk_round_up(gk_ceil_div(share, chunks), 32);
    const dim3 grid((unsigned)(tokens * chunks));
    return launch<moe_unpermute_kernel<T, V, AHEAD, ITEMS>>("gk_moe_unpermute", ctx, grid, threads,
                                                            0, p);
}

template <class T> gk_status run(const gk_context *ctx, const void *args, const gk_plan *, void *) {
    const gk_moe_unpermute_args *a = (const gk_moe_unpermute_args *)args;
    const int64_t tokens = a->out.shape[0], each = a->place.shape[1];
    Params p = {};
    p.choices = choices_of(ctx, a->place, a->weight, a->rows);
    p.rows = a->rows.data;
    p.out = a->out.data;
    p.row_stride = a->rows.stride[0];
    p.out_stride = a->out.stride[0];
    p.n = a->rows.shape[1];
    if (!rows_whole(a->rows, &a->out)) return run_of<T, 1, 8, 1>(ctx, p, tokens);
    /* Few choices do not keep enough loads in flight, so each thread has more of their vectors
     * (measured: Mixtral, 4096 tokens of 2 choices, one vector: 53 us; a floor of 21 us). */
    const bool many = tokens >= gk_gpu_of(ctx->index)->num_sms;
    if (many && each <= 2) return run_of<T, row_vec<T>, 2, 4>(ctx, p, tokens);
    if (many && each <= 4) return run_of<T, row_vec<T>, 4, 2>(ctx, p, tokens);
    return run_of<T, row_vec<T>, 8, 1>(ctx, p, tokens);
}

bool plan(const gk_cuda_instance *, const gk_context *, const void *args, gk_plan *to) {
    const gk_moe_unpermute_args *a = (const gk_moe_unpermute_args *)args;
    to->tasks = a->out.shape[0];
    /* at most two blocks for each MOST_THREADS elements, and one for each token */
    return gk_grid_fits(a->out.shape[0] * (gk_ceil_div(a->rows.shape[1], MOST_THREADS) + 1));
}

/* ---- backward -------------------------------------------------------------------------------- */
/* The first and the last choice t J + j that name a row, counted so that 0 says there is none and
 * both are found by a maximum. */
struct Named {
    unsigned long long before_end; /* T J less the first choice */
    unsigned long long end;        /* the last choice plus 1 */
};

struct BackParams {
    Choices choices;
    const void *grad_out, *rows;
    void *drows, *dweight;
    int64_t grad_stride, row_stride, drow_stride;
    int64_t n, num_choices;
    Named *named;
};

__global__ void __launch_bounds__(BACK_THREADS) named_kernel(BackParams p) {
    const int64_t step = (int64_t)gridDim.x * BACK_THREADS;
    for (int64_t i = (int64_t)blockIdx.x * BACK_THREADS + threadIdx.x; i < p.num_choices;
         i += step) {
        const int64_t row = row_of(p.choices, i / p.choices.each, i % p.choices.each);
        if (row < 0) continue;
        atomicMax(&p.named[row].before_end, (unsigned long long)(p.num_choices - i));
        atomicMax(&p.named[row].end, (unsigned long long)(i + 1));
    }
}

/* dweight of a token's choices, and drows of those rows that no other choice names. AHEAD: choices
 * whose rows a thread loads before it computes. */
template <class T, int V, int AHEAD>
__global__ void __launch_bounds__(BACK_THREADS) token_kernel(BackParams p) {
    typedef typename element<T>::acc W;
    typedef RowSome<T, V> Vec;
    __shared__ W place[32 * AHEAD];
    const int64_t token = blockIdx.x, each = p.choices.each;
    const int lane = threadIdx.x % 32;
    const Vec *grad = (const Vec *)((const T *)p.grad_out + token * p.grad_stride);
    for (int64_t j0 = 0; j0 < each; j0 += 32) {
        const int count = (int)min(int64_t(32), each - j0);
        int64_t row = -1;
        W weight = 0;
        bool alone = false;
        if (lane < count) {
            row = row_of(p.choices, token, j0 + lane);
            weight = weight_of<T>(p.choices, token, j0 + lane);
            if (row >= 0 && p.drows) {
                const Named named = p.named[row];
                alone = named.before_end + named.end == (unsigned long long)p.num_choices + 1;
            }
        }
        const unsigned writes = __ballot_sync(0xffffffffu, alone);
#pragma unroll 1
        for (int j = 0; j < count; j += AHEAD) {
            int64_t at[AHEAD];
            W by[AHEAD], dots[AHEAD];
#pragma unroll
            for (int u = 0; u < AHEAD; ++u) {
                at[u] = __shfl_sync(0xffffffffu, row, (j + u) % 32);
                by[u] = __shfl_sync(0xffffffffu, weight, (j + u) % 32);
                if (j + u >= count) at[u] = -1;
                dots[u] = 0;
            }
#pragma unroll 1
            for (int64_t i = threadIdx.x; i < p.n; i += blockDim.x) {
                const Vec g = grad[i];
                Vec x[AHEAD];
                if (p.dweight)
#pragma unroll
                    for (int u = 0; u < AHEAD; ++u)
                        if (at[u] >= 0)
                            x[u] = *(const Vec *)((const T *)p.rows + at[u] * p.row_stride + i * V);
#pragma unroll
                for (int u = 0; u < AHEAD; ++u) {
                    if (at[u] < 0) continue;
                    if (writes >> ((j + u) % 32) & 1) {
                        Vec d;
#pragma unroll
                        for (int k = 0; k < V; ++k) d.v[k] = from_acc<T>(by[u] * to_acc(g.v[k]));
                        store_some((T *)p.drows + at[u] * p.drow_stride + i * V, d);
                    }
                    if (p.dweight)
#pragma unroll
                        for (int k = 0; k < V; ++k)
                            dots[u] = fma(to_acc(g.v[k]), to_acc(x[u].v[k]), dots[u]);
                }
            }
            if (!p.dweight) continue;
            block_sum(dots, place);
#pragma unroll
            for (int u = 0; u < AHEAD; ++u)
                if (threadIdx.x == u && j + u < count)
                    ((W *)p.dweight)[token * each + j0 + j + u] = dots[u];
        }
    }
}

/* The choices of 32 numbers from i on that name the row, a bit each. */
__device__ __forceinline__ unsigned naming(const BackParams &p, int64_t row, int64_t i, int64_t end,
                                           int lane) {
    const int64_t at = i + lane;
    return __ballot_sync(0xffffffffu, at < end && row_of(p.choices, at / p.choices.each,
                                                         at % p.choices.each) == row);
}

/* drows of a row that several choices from `begin` to `end` name, or none. The warp searches the
 * choices once for each 32 vectors. */
template <class T, int V>
__device__ __forceinline__ void of_several(const BackParams &p, int64_t row, int64_t begin,
                                           int64_t end, int lane) {
    typedef typename element<T>::acc W;
    for (int64_t first = 0; first < p.n; first += 32) {
        const int64_t mine = first + lane;
        W sum[V];
#pragma unroll
        for (int k = 0; k < V; ++k) sum[k] = 0;
        for (int64_t i = begin; i < end; i += 32)
            for (unsigned bits = naming(p, row, i, end, lane); bits; bits &= bits - 1) {
                const int64_t choice = i + __ffs(bits) - 1, token = choice / p.choices.each;
                const W weight = weight_of<T>(p.choices, token, choice % p.choices.each);
                if (mine >= p.n) continue;
                const RowSome<T, V> g = *(const RowSome<T, V> *)((const T *)p.grad_out +
                                                                 token * p.grad_stride + mine * V);
#pragma unroll
                for (int k = 0; k < V; ++k) sum[k] = fma(weight, to_acc(g.v[k]), sum[k]);
            }
        if (mine >= p.n) continue;
        RowSome<T, V> d;
#pragma unroll
        for (int k = 0; k < V; ++k) d.v[k] = from_acc<T>(sum[k]);
        store_some((T *)p.drows + row * p.drow_stride + mine * V, d);
    }
}

template <class T, int V>
__global__ void __launch_bounds__(BACK_THREADS) rows_kernel(BackParams p) {
    const int lane = threadIdx.x % 32;
    const int64_t step = (int64_t)gridDim.x * (BACK_THREADS / 32) * WARP_ROWS;
    for (int64_t first = ((int64_t)blockIdx.x * (BACK_THREADS / 32) + threadIdx.x / 32) * WARP_ROWS;
         first < p.choices.rows; first += step) {
        int64_t begin = 0, end = 1;
        if (lane < WARP_ROWS && first + lane < p.choices.rows) {
            const Named named = p.named[first + lane];
            begin = p.num_choices - (int64_t)named.before_end;
            end = (int64_t)named.end;
        }
        for (unsigned bits = __ballot_sync(0xffffffffu, begin + 1 != end); bits; bits &= bits - 1) {
            const int u = __ffs(bits) - 1;
            of_several<T, V>(p, first + u, __shfl_sync(0xffffffffu, begin, u),
                             __shfl_sync(0xffffffffu, end, u), lane);
        }
    }
}

template <class T>
gk_status bwd_run(const gk_context *ctx, const void *args, const gk_plan *, void *workspace) {
    const char *op = "gk_moe_unpermute_bwd";
    const gk_moe_unpermute_bwd_args *a = (const gk_moe_unpermute_bwd_args *)args;
    const bool whole = rows_whole(a->rows, &a->grad_out, a->drows);
    BackParams p = {};
    p.choices = choices_of(ctx, a->place, a->weight, a->rows);
    p.grad_out = a->grad_out.data;
    p.rows = a->rows.data;
    p.drows = a->drows ? a->drows->data : nullptr;
    p.dweight = a->dweight ? a->dweight->data : nullptr;
    p.grad_stride = a->grad_out.stride[0];
    p.row_stride = a->rows.stride[0];
    p.drow_stride = a->drows ? a->drows->stride[0] : 0;
    p.n = a->rows.shape[1] / (whole ? row_vec<T> : 1);
    p.num_choices = gk_numel(&a->place);
    p.named = (Named *)workspace;
    if (!p.drows && !p.dweight) return GK_OK;
    const auto blocks = [](int64_t n, int64_t each) {
        return dim3((unsigned)gk_min_i64(gk_ceil_div(n, each), 1 << 20));
    };
    gk_status status = GK_OK;
    if (p.drows && p.choices.rows > 0)
        status = clear_memory(op, ctx, workspace, (size_t)p.choices.rows * sizeof(Named));
    if (p.drows && status == GK_OK)
        status =
            launch<named_kernel>(op, ctx, blocks(p.num_choices, BACK_THREADS), BACK_THREADS, 0, p);
    const dim3 tokens((unsigned)a->grad_out.shape[0]);
    const unsigned threads = (unsigned)gk_clamp_i64(gk_round_up(p.n, 32), 32, BACK_THREADS);
    if (status == GK_OK && p.num_choices > 0) {
        /* two choices need few registers, and more blocks are resident */
        if (!whole)
            status = launch<token_kernel<T, 1, 8>>(op, ctx, tokens, threads, 0, p);
        else if (p.choices.each <= 2)
            status = launch<token_kernel<T, row_vec<T>, 2>>(op, ctx, tokens, threads, 0, p);
        else
            status = launch<token_kernel<T, row_vec<T>, 8>>(op, ctx, tokens, threads, 0, p);
    }
    if (!p.drows || status != GK_OK) return status;
    const dim3 grid = blocks(p.choices.rows, BACK_THREADS / 32 * WARP_ROWS);
    return whole ? launch<rows_kernel<T, row_vec<T>>>(op, ctx, grid, BACK_THREADS, 0, p)
                 : launch<rows_kernel<T, 1>>(op, ctx, grid, BACK_THREADS, 0, p);
}

bool bwd_plan(const gk_cuda_instance *, const gk_context *, const void *args, gk_plan *to) {
    const gk_moe_unpermute_bwd_args *a = (const gk_moe_unpermute_bwd_args *)args;
    to->tasks = a->grad_out.shape[0];
    to->workspace_bytes = (size_t)a->rows.shape[0] * sizeof(Named);
    return gk_grid_fits(to->tasks);
}

const gk_cuda_instance forward[] = {
    {"moe_unpermute_f32", GK_F32, plan, run<float>, {}, NULL},
    {"moe_unpermute_bf16", GK_BF16, plan, run<__nv_bfloat16>, {}, NULL},
    {"moe_unpermute_f16", GK_F16, plan, run<__half>, {}, NULL},
    {"moe_unpermute_f64", GK_F64, plan, run<double>, {}, NULL},
};
const gk_cuda_instance backward[] = {
    {"moe_unpermute_bwd_f32", GK_F32, bwd_plan, bwd_run<float>, {}, NULL},
    {"moe_unpermute_bwd_bf16", GK_BF16, bwd_plan, bwd_run<__nv_bfloat16>, {}, NULL},
    {"moe_unpermute_bwd_f16", GK_F16, bwd_plan, bwd_run<__half>, {}, NULL},
    {"moe_unpermute_bwd_f64", GK_F64, bwd_plan, bwd_run<double>, {}, NULL},
};

} // namespace

extern "C" const gk_cuda_table gk_moe_unpermute_table = {forward, 4, 80, NULL};
extern "C" const gk_cuda_table gk_moe_unpermute_bwd_table = {backward, 4, 80, NULL};
