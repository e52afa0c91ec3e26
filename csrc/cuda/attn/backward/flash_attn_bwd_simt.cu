/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_bwd_simt: the gradients of attention in float32 on CUDA cores (Dao 2023,
 * arXiv:2307.08691, Algorithm 2, run twice: by rows for dq, by keys for dk and dv). The equations
 * are in bwd.cuh.
 *
 * Reads q, grad_out [B, Hq, Sq, D | Dv], k, v [B, Hkv, Sk, D | Dv], or packed, with rows aligned to
 * 16 bytes, and the stats of the pre-pass. Writes dq, dk, dv. The order of the float32 sums is
 * fixed, so results are deterministic.
 *
 * Work split: a block keeps STAY rows in shared memory (keys of a kv head, or queries of a head).
 * The rows of the other side pass through it, PASS at a time. One kernel serves both sides. With
 * KEYS, K and V stay while Q and dO pass, which gives dK = dS^T Q and dV = P^T dO. Without KEYS, Q
 * and dO stay while K and V pass, which gives dQ = dS K. The 8 warps cover a product as 4 x 2, the
 * lanes as 4 x 8; a thread has every 16th row and column.
 *
 * Shared memory: SimtSmem<Tile> below. The staying rows are copied once. A step:
 *  barrier | copy the passing tiles | barrier | S, dP, P and dS to shared memory | barrier | sums
 *
 * Not handled: unaligned rows (flash_attn_bwd_plain), other dtypes. */
#include "../../tile/copy.cuh"
#include "bwd.cuh"
#include "../tiles.h"

namespace {

constexpr int SIMT_THREADS = 256;

/* ---- 1. shared memory ------------------------------------------------------------------------ */
/* Rows are padded by 4 floats, so neighbouring rows start 4 banks apart. If 4 or 8 lanes read 16
 * bytes of as many rows, there is then no bank conflict. */
template <class Tile> struct SimtSmem {
    static constexpr int D = Tile::head_dim, STAY = Tile::stay, PASS = Tile::pass;
    static constexpr int row = D + 4, score_row = PASS + 4;        /* floats */
    static constexpr int stay_a = 0, stay_b = stay_a + STAY * row; /* K, V or Q, dO */
    static constexpr int pass_a = stay_b + STAY * row, pass_b = pass_a + PASS * row;
    /* [staying][passing] */
    static constexpr int p = pass_b + PASS * row, ds = p + STAY * score_row;
    static constexpr int bytes = (ds + STAY * score_row) * 4;
    static_assert(row % 32 == 4 && score_row % 32 == 4, "rows start 4 banks apart");
};

/* The number of bank conflicts when P and dS are stored. A warp stores single floats of 4 rows and
 * 8 columns, so two lanes use the same bank, once a step. */
template <class Tile> constexpr int simt_store_ways() {
    int at[32] = {};
    for (int lane = 0; lane < 32; ++lane)
        at[lane] = (lane / 8 * SimtSmem<Tile>::score_row + lane % 8) * 4;
    return ways(at, 4);
}
static_assert(simt_store_ways<BwdSimt64>() == 2 && simt_store_ways<BwdSimt256>() == 2,
              "stores of P and dS");

/* Copies a tile of `columns` floats a row. Rows outside [first, end) and columns from `columns`
 * on become zeros. */
template <class Tile, int ROWS>
__device__ __forceinline__ void copy_floats(smem_addr to_s, const float *from_g, int64_t row_stride,
                                            int first, int end, int columns) {
    constexpr int CHUNKS = Tile::head_dim / 4, STEP = SIMT_THREADS / CHUNKS;
    const int chunk = threadIdx.x % CHUNKS;
#pragma unroll
    for (int row = threadIdx.x / CHUNKS; row < ROWS; row += STEP) {
        const bool valid = row >= first && row < end && chunk * 4 < columns;
        cp_async_cg_16(to_s + (row * SimtSmem<Tile>::row + chunk * 4) * 4,
                       from_g + row * row_stride + chunk * 4, valid ? 16 : 0);
    }
}

/* ---- 2. products ----------------------------------------------------------------------------- */
/* c[a][b] = row (a) of one tile . row (b) of another. */
template <class Tile>
__device__ __forceinline__ void dot_rows(float (&c)[Tile::per_stay][Tile::per_pass],
                                         const float *a_s, const float *b_s) {
    constexpr int R = Tile::per_stay, P = Tile::per_pass, STEP = 16 * SimtSmem<Tile>::row;
    float part[R][P];
#pragma unroll
    for (int x = 0; x < R; ++x)
#pragma unroll
        for (int y = 0; y < P; ++y) c[x][y] = part[x][y] = 0;
#pragma unroll 2
    for (int d = 0; d < Tile::head_dim; d += 4) {
        float4 a[R], b[P];
#pragma unroll
        for (int x = 0; x < R; ++x) a[x] = *(const float4 *)(a_s + x * STEP + d);
#pragma unroll
        for (int y = 0; y < P; ++y) b[y] = *(const float4 *)(b_s + y * STEP + d);
#pragma unroll
        for (int x = 0; x < R; ++x)
#pragma unroll
            for (int y = 0; y < P; ++y) {
                part[x][y] = fmaf(a[x].x, b[y].x, part[x][y]);
                part[x][y] = fmaf(a[x].y, b[y].y, part[x][y]);
                part[x][y] = fmaf(a[x].z, b[y].z, part[x][y]);
                part[x][y] = fmaf(a[x].w, b[y].w, part[x][y]);
            }
        if (d % SIMT_PART == SIMT_PART - 4)
#pragma unroll
            for (int x = 0; x < R; ++x)
#pragma unroll
                for (int y = 0; y < P; ++y) {
                    c[x][y] += part[x][y];
                    part[x][y] = 0;
                }
    }
}

/* sum[a][..] += weights [staying][passing] times the passing tile. Up to head_dim 128 each passing
 * tile has a sum of its own, which is added to `sum` at the end: one chain of additions over all
 * heads of a group rounds worse than PyTorch does. At 256 there are no registers for that. */
template <class Tile>
__device__ __forceinline__ void add_rows(float4 (&sum)[Tile::per_stay][Tile::head_dim / 64],
                                         const float *weights_s, const float *pass_s) {
    typedef SimtSmem<Tile> S;
    constexpr int R = Tile::per_stay, C = Tile::head_dim / 64;
    constexpr bool OWN = C <= 2;
    /* with four groups of columns and 4 rows, a larger unroll has no registers */
    constexpr int AHEAD = C > 2 ? 1 : 2;
    float4 own[R][C] = {};
#pragma unroll AHEAD
    for (int j = 0; j < Tile::pass; j += 4) {
        float w[R][4];
#pragma unroll
        for (int x = 0; x < R; ++x) {
            const float4 four = *(const float4 *)(weights_s + x * 16 * S::score_row + j);
            w[x][0] = four.x;
            w[x][1] = four.y;
            w[x][2] = four.z;
            w[x][3] = four.w;
        }
#pragma unroll
        for (int e = 0; e < 4; ++e)
#pragma unroll
            for (int c = 0; c < C; ++c) {
                const float4 b = *(const float4 *)(pass_s + (j + e) * S::row + c * 64);
#pragma unroll
                for (int x = 0; x < R; ++x) {
                    float4 &to = OWN ? own[x][c] : sum[x][c];
                    to.x += w[x][e] * b.x;
                    to.y += w[x][e] * b.y;
                    to.z += w[x][e] * b.z;
                    to.w += w[x][e] * b.w;
                }
            }
    }
#pragma unroll
    for (int x = 0; OWN && x < R; ++x)
#pragma unroll
        for (int c = 0; c < C; ++c) {
            sum[x][c].x += own[x][c].x;
            sum[x][c].y += own[x][c].y;
            sum[x][c].z += own[x][c].z;
            sum[x][c].w += own[x][c].w;
        }
}

template <class Tile>
__device__ __forceinline__ void store_sums(float *to_g, int64_t row_stride,
                                           const float4 (&sum)[Tile::per_stay][Tile::head_dim / 64],
                                           float factor, int row, int col, int rows, int columns) {
#pragma unroll
    for (int x = 0; x < Tile::per_stay; ++x)
#pragma unroll
        for (int c = 0; c < Tile::head_dim / 64; ++c) {
            if (row + 16 * x >= rows || col + 64 * c >= columns) continue;
            const float4 y = sum[x][c];
            *(float4 *)(to_g + (row + 16 * x) * row_stride + col + 64 * c) =
                make_float4(y.x * factor, y.y * factor, y.z * factor, y.w * factor);
        }
}

/* ---- 3. one kernel for both sides ------------------------------------------------------------ */
template <class Tile, bool KEYS>
__global__ void __launch_bounds__(SIMT_THREADS, Tile::blocks)
    bwd_simt_kernel(const __grid_constant__ Bwd g) {
    typedef SimtSmem<Tile> S;
    constexpr int R = Tile::per_stay, P = Tile::per_pass, STAY = Tile::stay, PASS = Tile::pass,
                  C = Tile::head_dim / 64;
    extern __shared__ __align__(16) float smem_f[];
    const smem_addr smem_s = cvta_to_shared(smem_f);
    const Problem &p = g.p;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    /* this thread's first row and column; the others follow every 16 */
    const int my_row = warp / 2 * 4 + lane / 8, my_col = warp % 2 * 8 + lane % 8;

    /* 3.1 which rows stay, and which pass */
    const int tiles = ((KEYS ? p.seq_k : p.seq_q) + STAY - 1) / STAY,
              heads = KEYS ? p.heads_kv : p.heads_q;
    /* under a causal mask, the tiles with the most work first */
    const int at = (KEYS ? blockIdx.x % tiles : tiles - 1 - blockIdx.x % tiles) * STAY;
    const int my_head = blockIdx.x / tiles % heads, b = blockIdx.x / tiles / heads;
    const int kv_head = KEYS ? my_head : my_head / p.group;
    const Sequence s = sequence_of(p, b);
    const int length = KEYS ? s.seq_k : s.seq_q;
    if (at >= length) return;
    const Interval seen = seen_keys(s);
    /* rows that see any key; the rows or keys of the passing side that this block needs */
    Interval seeing = {0, 0}, pass = {0, 0};
    if (seen.lo < seen.hi) seeing = seeing_rows(s, seen.lo, seen.hi);
    const Interval &staying = KEYS ? seen : seeing;
    const int lo = max(at, staying.lo), hi = min(at + STAY, staying.hi);
    if (lo < hi) {
        if (KEYS)
            pass = seeing_rows(s, lo, hi);
        else
            pass = {s.span.lo(lo), s.span.hi(hi - 1)};
    }
    const unsigned width = s.span.hi_off - s.span.lo_off;
    const float *k_g =
        (const float *)p.k.data + b * p.k.batch + kv_head * p.k.head + s.k0 * p.k.row;
    const float *v_g =
        (const float *)p.v.data + b * p.v.batch + kv_head * p.v.head + s.k0 * p.v.row;

    /* 3.2 copy the rows that stay, once; their addresses would take registers in the steps */
    if (pass.lo < pass.hi) {
        const float *q_g =
            (const float *)p.q.data + b * p.q.batch + my_head * p.q.head + s.q0 * p.q.row;
        const float *grad_out_g = (const float *)g.grad_out.data + b * g.grad_out.batch +
                                  my_head * g.grad_out.head + s.q0 * g.grad_out.row;
        const float *stay_a_g = KEYS ? k_g : q_g, *stay_b_g = KEYS ? v_g : grad_out_g;
        const int64_t stay_a_row = KEYS ? p.k.row : p.q.row,
                      stay_b_row = KEYS ? p.v.row : g.grad_out.row;
        copy_floats<Tile, STAY>(smem_s + S::stay_a * 4, stay_a_g + at * stay_a_row, stay_a_row,
                                staying.lo - at, staying.hi - at, p.head_dim);
        copy_floats<Tile, STAY>(smem_s + S::stay_b * 4, stay_b_g + at * stay_b_row, stay_b_row,
                                staying.lo - at, staying.hi - at, p.head_dim_v);
    }

    float4 sum_a[R][C] = {}, sum_b[R][C] = {}; /* dK, dV; or dQ alone */
#pragma unroll 1
    for (int head = KEYS ? kv_head * p.group : my_head;
         head < (KEYS ? (kv_head + 1) * p.group : my_head + 1); ++head) {
        const float *q_g =
            (const float *)p.q.data + b * p.q.batch + head * p.q.head + s.q0 * p.q.row;
        const float *grad_out_g = (const float *)g.grad_out.data + b * g.grad_out.batch +
                                  head * g.grad_out.head + s.q0 * g.grad_out.row;
        const float2 *stats = (const float2 *)g.stats +
                              ((int64_t)head * g.row_tiles + row_tile_of(g, s, b)) * g.tile_rows;
        const Score score = score_of(p, s, b, head);
        const float *pass_a_g = KEYS ? q_g : k_g, *pass_b_g = KEYS ? grad_out_g : v_g;
        const int64_t pass_a_row = KEYS ? p.q.row : p.k.row,
                      pass_b_row = KEYS ? g.grad_out.row : p.v.row;
        const Interval &passing = KEYS ? seeing : seen;
#pragma unroll 1
        for (int at2 = pass.lo; at2 < pass.hi; at2 += PASS) {
            /* 3.3 copy the rows that pass */
            __syncthreads(); /* the previous step's tiles have been read */
            copy_floats<Tile, PASS>(smem_s + S::pass_a * 4, pass_a_g + at2 * pass_a_row, pass_a_row,
                                    passing.lo - at2, passing.hi - at2, p.head_dim);
            copy_floats<Tile, PASS>(smem_s + S::pass_b * 4, pass_b_g + at2 * pass_b_row, pass_b_row,
                                    passing.lo - at2, passing.hi - at2, p.head_dim_v);
            cp_async_commit_group();
            cp_async_wait_group<0>();
            __syncthreads(); /* the tiles are visible to all threads */

            /* 3.4 S and dP, then P and dS */
            float qk[R][P], dp[R][P];
            dot_rows<Tile>(qk, smem_f + S::stay_a + my_row * S::row,
                           smem_f + S::pass_a + my_col * S::row);
            dot_rows<Tile>(dp, smem_f + S::stay_b + my_row * S::row,
                           smem_f + S::pass_b + my_col * S::row);
#pragma unroll
            for (int x = 0; x < R; ++x)
#pragma unroll
                for (int y = 0; y < P; ++y) {
                    const int here = at + my_row + 16 * x, there = at2 + my_col + 16 * y;
                    const int i = KEYS ? there : here, j = KEYS ? here : there;
                    const bool sees = i < s.seq_q && j >= s.span.key_lo && j < s.span.key_hi &&
                                      (unsigned)(j - i - s.span.lo_off) < width;
                    float w = 0, ds = 0;
                    if (sees) {
                        const float2 stat = stats[i];
                        ds = pair_gradient(score, qk[x][y], dp[x][y], stat.x, stat.y, i, j, &w);
                    }
                    const int to = (my_row + 16 * x) * S::score_row + my_col + 16 * y;
                    smem_f[S::ds + to] = ds;
                    if (KEYS) smem_f[S::p + to] = w;
                }
            __syncthreads(); /* P and dS are complete */

            /* 3.5 sums */
            add_rows<Tile>(sum_a, smem_f + S::ds + my_row * S::score_row,
                           smem_f + S::pass_a + my_col * 4);
            if (KEYS)
                add_rows<Tile>(sum_b, smem_f + S::p + my_row * S::score_row,
                               smem_f + S::pass_b + my_col * 4);
        }
    }

    /* 3.6 results */
    const float scale = (float)p.rules.scale;
    if (KEYS) {
        float *dk = (float *)g.dk.data + b * g.dk.batch + kv_head * g.dk.head +
                    ((int64_t)s.k0 + at) * g.dk.row;
        float *dv = (float *)g.dv.data + b * g.dv.batch + kv_head * g.dv.head +
                    ((int64_t)s.k0 + at) * g.dv.row;
        store_sums<Tile>(dk, g.dk.row, sum_a, scale, my_row, my_col * 4, length - at, p.head_dim);
        store_sums<Tile>(dv, g.dv.row, sum_b, 1, my_row, my_col * 4, length - at, p.head_dim_v);
    } else {
        float *dq = (float *)g.dq.data + b * g.dq.batch + my_head * g.dq.head +
                    ((int64_t)s.q0 + at) * g.dq.row;
        store_sums<Tile>(dq, g.dq.row, sum_a, scale, my_row, my_col * 4, length - at, p.head_dim);
    }
}

/* ---- 4. launch ------------------------------------------------------------------------------- */
template <class Tile> int64_t key_blocks(const Problem &p) {
    return gk_ceil_div(p.seq_k, Tile::stay) * p.heads_kv * p.batch;
}

template <class Tile>
bool plan(const gk_cuda_instance *, const gk_context *ctx, const void *args, gk_plan *to) {
    const gk_flash_attn_bwd_args *a = (const gk_flash_attn_bwd_args *)args;
    if (!tile_takes(ctx, a, Tile::head_dim, SimtSmem<Tile>::bytes)) return false;
    Bwd &g = gk_own<Bwd>(to) = bwd_of(ctx, a, BWD_PLAIN_ROWS, 0);
    g.lse_factor = 1;
    g.dp_part = SIMT_PART;
    to->tile[0] = Tile::pass;
    to->tile[1] = Tile::stay;
    to->tasks = key_blocks<Tile>(g.p);
    to->workspace_bytes = stats_bytes(g, sizeof(float));
    return true;
}

template <class Tile>
gk_status run(const gk_context *ctx, const void *, const gk_plan *plan, void *workspace) {
    const char *op = "gk_flash_attn_bwd";
    Bwd g = gk_own<Bwd>(plan);
    g.stats = workspace;
    gk_status status = bwd_pre(ctx, GK_F32, g, GK_F32);
    const int64_t row_blocks = gk_ceil_div(g.p.seq_q, Tile::stay) * g.p.heads_q * g.p.batch;
    if (status == GK_OK)
        status = launch<bwd_simt_kernel<Tile, true>>(op, ctx, dim3((unsigned)key_blocks<Tile>(g.p)),
                                                     SIMT_THREADS, SimtSmem<Tile>::bytes, g);
    if (status == GK_OK)
        status = launch<bwd_simt_kernel<Tile, false>>(op, ctx, dim3((unsigned)row_blocks),
                                                      SIMT_THREADS, SimtSmem<Tile>::bytes, g);
    return status;
}

#define INSTANCE(NAME, TILE) \
    {NAME, GK_F32, plan<TILE>, run<TILE>, {TILE::head_dim, TILE::pass, TILE::stay}, NULL}

const gk_cuda_instance table[] = {
    INSTANCE("flash_attn_bwd_simt_f32_d64", BwdSimt64),
    INSTANCE("flash_attn_bwd_simt_f32_d128", BwdSimt128),
    INSTANCE("flash_attn_bwd_simt_f32_d256", BwdSimt256),
};

} // namespace

extern "C" const gk_cuda_table gk_flash_attn_bwd_simt_table = {
    table, sizeof table / sizeof table[0], 80, NULL};
