/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_bwd_pre: the pre-pass of the backward kernels (Dao 2023, arXiv:2307.08691, Algorithm
 * 2, line 4). It computes the stats of each row and the gradients that need no product.
 *
 *  delta_i = sum_d dO_id O_id - dlse_i       dsink_h = -sum_i exp(sink_h - lse_i) delta_i
 *
 * Both hold for rows that see a key. If a row sees no key, its lse is the sink, so it adds dlse_i
 * to dsink and its dO does not matter.
 *
 * Reads out, grad_out [B, Hq, Sq, Dv] or [Tq, Hq, Dv], lse and grad_lse [B, Hq, Sq] or [Tq, Hq],
 * any leading strides. Writes stats {lse in the kernels' unit, delta}, zeros into dq_sum (bwd.cuh),
 * dsinks [Hq], and zeros into the gradients of packed tokens that belong to no sequence.
 *
 * Work split, by kernel: 1. A block for each tile of rows of one head, 8 lanes a row. 2. A block
 * for each head, a warp for each 32 rows, summed in a fixed order. 3. A warp for each token. All
 * three are bound by memory bandwidth. */
#include "../../tile/copy.cuh"
#include "../../tile/reduce.cuh"
#include "bwd.cuh"
#include "../softmax.cuh"
#include "../tiles.h"

namespace {

/* LANES: the lanes that work on a row. At head_dim 64 each loads 16 bytes once. */
constexpr int THREADS = BWD_PRE_THREADS, LANES = 8;
static_assert(LANES * SIMT_PART == 256, "a lane's columns are a part of dP at any head_dim");
constexpr int SINK_WARPS = BWD_SINK_THREADS / 32, CLEAR_WARPS = THREADS / 32;

template <class W> struct Stat {
    W lse, delta;
};

/* Store and load row r of a tile of stats that begins at tile_g. */
template <class W>
__device__ __forceinline__ void store_stat(const Bwd &g, W *tile_g, int r, const Stat<W> &x) {
    tile_g[g.stats_apart ? r : 2 * r] = x.lse;
    tile_g[g.stats_apart ? g.tile_rows + r : 2 * r + 1] = x.delta;
}
template <class W>
__device__ __forceinline__ Stat<W> load_stat(const Bwd &g, const W *tile_g, int r) {
    return {tile_g[g.stats_apart ? r : 2 * r], tile_g[g.stats_apart ? g.tile_rows + r : 2 * r + 1]};
}

/* The part of a row's dot product dO . O that this lane sums. In float32 and float64 the order of
 * sums is that of the products dP: runs of dp_part columns for each lane, or every eighth column. A
 * row that sees a single key then has dP = delta bit for bit, and dS = 0. */
template <class T>
__device__ __forceinline__ typename element<T>::acc lane_dot(const T *a, const T *b, int n,
                                                             int lane, bool vector, int dp_part) {
    typename element<T>::acc sum = 0;
    if (sizeof(T) == 2 && vector) {
        union Eight {
            uint4 bits;
            T x[16 / sizeof(T)];
            __device__ Eight() {}
        } left, right;
        for (int d = lane * 8; d < n; d += LANES * 8) {
            left.bits = *(const uint4 *)(a + d);
            right.bits = *(const uint4 *)(b + d);
#pragma unroll
            for (int e = 0; e < (int)(16 / sizeof(T)); ++e)
                sum += to_acc(left.x[e]) * to_acc(right.x[e]);
        }
        return sum;
    }
    const bool parts = sizeof(T) == 4 && dp_part > 0;
    const int first = parts ? lane * dp_part : lane, end = parts ? min(first + dp_part, n) : n;
#pragma unroll 8
    for (int d = first; d < end; d += parts ? 1 : LANES) sum = fma(to_acc(a[d]), to_acc(b[d]), sum);
    return sum;
}

/* The sum of the lanes' parts. With dp_part it adds them one after the other. Without, it uses the
 * same tree of eight sums as flash_attn_bwd_plain. */
template <class T> __device__ __forceinline__ T row_dot(T part, int dp_part) {
    if (sizeof(T) != 4 || dp_part == 0) return lanes_sum<1, LANES>(part);
    T sum = 0;
#pragma unroll
    for (int lane = 0; lane < LANES; ++lane) sum += __shfl_sync(0xffffffffu, part, lane, LANES);
    return sum;
}

/* ---- 1. stats, zeros ------------------------------------------------------------------------- */
template <class T>
__global__ void __launch_bounds__(THREADS) bwd_rows_kernel(const __grid_constant__ Bwd g) {
    typedef typename element<T>::acc W;
    const int lane = threadIdx.x % LANES;
    const int tile = blockIdx.x % g.tiles, head = blockIdx.x / g.tiles % g.p.heads_q,
              b = blockIdx.x / g.tiles / g.p.heads_q;
    const Sequence s = sequence_of(g.p, b);
    const int i0 = tile * g.tile_rows;
    if (i0 >= s.seq_q) return;
    const int64_t at = (int64_t)head * g.row_tiles + row_tile_of(g, s, b) + tile;
    W *stats = (W *)g.stats + at * g.tile_rows * 2;
    const T *out = (const T *)g.p.out.data + b * g.p.out.batch + head * g.p.out.head;
    const T *grad_out = (const T *)g.grad_out.data + b * g.grad_out.batch + head * g.grad_out.head;
    const W *lse = (const W *)g.p.lse.data + b * g.p.lse.batch + head * g.p.lse.head;
    const W *grad_lse = (const W *)g.grad_lse.data + b * g.grad_lse.batch + head * g.grad_lse.head;

    if (g.dq_sum) {
        float4 *sum = (float4 *)(g.dq_sum + at * g.tile_rows * g.columns);
        for (int n = threadIdx.x; n < g.tile_rows * g.columns / 4; n += THREADS)
            sum[n] = make_float4(0, 0, 0, 0);
    }
    for (int r = threadIdx.x / LANES; r < g.tile_rows; r += THREADS / LANES) {
        const int64_t row = s.q0 + i0 + r;
        Stat<W> x = {INFINITY, 0};
        if (i0 + r < s.seq_q) {
            const W l = lse[row * g.p.lse.row];
            const W sum = lane_dot<T>(out + row * g.p.out.row, grad_out + row * g.grad_out.row,
                                      g.p.head_dim_v, lane, g.vector_out, g.dp_part);
            if (l != -INFINITY && s.span.lo(i0 + r) < s.span.hi(i0 + r))
                x = {l * (W)g.lse_factor, sum};
        }
        /* a row that sees no key contributes nothing, even if its grad_out holds NaN */
        const bool alive = x.lse != INFINITY;
        x.delta = row_dot(x.delta, g.dp_part);
        if (alive && g.grad_lse.data) x.delta -= grad_lse[row * g.grad_lse.row];
        if (lane == 0) store_stat(g, stats, r, x);
    }
}

/* ---- 2. dsinks ------------------------------------------------------------------------------- */
template <class T>
__global__ void __launch_bounds__(SINK_WARPS * 32) bwd_sinks_kernel(const __grid_constant__ Bwd g) {
    typedef typename element<T>::acc W;
    __shared__ double sums_s[SINK_WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = blockIdx.x;
    const W sink = sink_of<W>(g.p.rules, head);
    const double to_natural = 1 / g.lse_factor;
    const int chunks = (g.p.seq_q + 31) / 32;
    double sum = 0;
    for (int64_t n = warp; n < (int64_t)chunks * g.p.batch && sink != -INFINITY; n += SINK_WARPS) {
        const int b = (int)(n / chunks), i = (int)(n % chunks) * 32 + lane;
        const Sequence s = sequence_of(g.p, b);
        if (i >= s.seq_q) continue;
        const int64_t tile = (int64_t)head * g.row_tiles + row_tile_of(g, s, b);
        const int64_t row = tile * g.tile_rows + i;
        const Stat<W> x = load_stat(g, (const W *)g.stats + row / g.tile_rows * g.tile_rows * 2,
                                    (int)(row % g.tile_rows));
        if (s.span.lo(i) >= s.span.hi(i)) {
            const W *grad_lse =
                (const W *)g.grad_lse.data + b * g.grad_lse.batch + head * g.grad_lse.head;
            if (g.grad_lse.data) sum += grad_lse[(int64_t)(s.q0 + i) * g.grad_lse.row];
        } else if (x.lse != INFINITY) {
            sum -= exp((double)sink - x.lse * to_natural) * x.delta;
        }
    }
    sum = warp_sum(sum);
    if (lane == 0) sums_s[warp] = sum;
    __syncthreads(); /* every warp's sum is written */
    if (threadIdx.x > 0) return;
    for (int w = 1; w < SINK_WARPS; ++w) sum += sums_s[w];
    const int64_t at = head * g.dsink_head;
    if (g.p.rules.sinks_dtype == element<T>::dtype)
        ((T *)g.dsinks)[at] = from_acc<T>((W)sum);
    else
        ((W *)g.dsinks)[at] = (W)sum;
}

/* ---- 3. tokens of no sequence ---------------------------------------------------------------- */
template <class T>
__device__ __forceinline__ void clear_token(const Rows &to, int token, int heads, int columns,
                                            int lane) {
    for (int n = lane; n < heads * columns; n += 32)
        ((T *)to.data)[n / columns * to.head + token * to.row + n % columns] = from_acc<T>(0);
}

template <class T>
__global__ void __launch_bounds__(THREADS) bwd_clear_kernel(const __grid_constant__ Bwd g) {
    const int lane = threadIdx.x % 32, token = blockIdx.x * CLEAR_WARPS + threadIdx.x / 32;
    if (token < g.p.total_q) {
        const int b = owner_of(g.p.cu_q, g.p.cu_q_step, g.p.batch, token);
        bool none = b < 0;
        if (!none) {
            const Sequence s = sequence_of(g.p, b);
            none = token - s.q0 >= s.seq_q;
        }
        if (none) clear_token<T>(g.dq, token, g.p.heads_q, g.p.head_dim, lane);
    }
    if (token < g.p.total_k) {
        const int b = owner_of(g.p.cu_k, g.p.cu_k_step, g.p.batch, token);
        bool none = b < 0;
        if (!none) {
            const Sequence s = sequence_of(g.p, b);
            none = token - s.k0 >= s.seq_k;
        }
        if (none) {
            clear_token<T>(g.dk, token, g.p.heads_kv, g.p.head_dim, lane);
            clear_token<T>(g.dv, token, g.p.heads_kv, g.p.head_dim_v, lane);
        }
    }
}

/* ---- 4. launch ------------------------------------------------------------------------------- */
template <class T> gk_status sinks(const gk_context *ctx, const Bwd &g) {
    return launch<bwd_sinks_kernel<T>>("gk_flash_attn_bwd", ctx, dim3(g.p.heads_q), SINK_WARPS * 32,
                                       0, g);
}

template <class T> gk_status clear(const gk_context *ctx, const Bwd &g) {
    const int64_t tokens = gk_max_i64(g.p.total_q, g.p.total_k);
    return launch<bwd_clear_kernel<T>>(
        "gk_flash_attn_bwd", ctx, dim3((unsigned)gk_ceil_div(tokens, CLEAR_WARPS)), THREADS, 0, g);
}

template <class T> gk_status pre(const gk_context *ctx, const Bwd &g, gk_dtype grads) {
    const char *op = "gk_flash_attn_bwd";
    const int64_t blocks = (int64_t)g.tiles * g.p.heads_q * g.p.batch;
    gk_status status = launch<bwd_rows_kernel<T>>(op, ctx, dim3((unsigned)blocks), THREADS, 0, g);
    if (status == GK_OK && g.dsinks) status = sinks<T>(ctx, g);
    if (status == GK_OK && g.p.cu_q)
        status = grads == element<T>::dtype ? clear<T>(ctx, g) : clear<float>(ctx, g);
    return status;
}

} // namespace

gk_status bwd_pre(const gk_context *ctx, gk_dtype dtype, const Bwd &g, gk_dtype grads) {
    switch (dtype) {
    case GK_BF16: return pre<__nv_bfloat16>(ctx, g, grads);
    case GK_F16: return pre<__half>(ctx, g, grads);
    case GK_F64: return pre<double>(ctx, g, grads);
    case GK_F32: return pre<float>(ctx, g, grads);
    default: return gk_no_case("gk_flash_attn_bwd", dtype);
    }
}

gk_status bwd_sinks(const gk_context *ctx, gk_dtype dtype, const Bwd &g) {
    switch (dtype) {
    case GK_BF16: return sinks<__nv_bfloat16>(ctx, g);
    case GK_F16: return sinks<__half>(ctx, g);
    default: return gk_no_case("gk_flash_attn_bwd", dtype);
    }
}
