/* gemm_sm90a: out = activation(alpha a b + beta c + bias) on Hopper's tensor cores by wgmma, fed by tma: bfloat16, float16.
 *
 * a [batch, M, K]  b [batch, K, N]   each dense along k or along its other dimension, other strides multiples of 16 bytes
 * bias [N], c broadcasts, out [batch, M, N], preact like out; float32 sums, one rounding
 * Grid: as many clusters as fit the GPU; each takes CM x CN tiles of BM x BN side by side, in the order of order.cuh, until
 * none is left. The CN blocks of a row read the same part of a, the CM of a column the same of b: each copies its share to
 * all of them, since L2 feeds the SMs at some 6 TB/s and alone a 128 x 256 tile would ask for 12.
 * Block: WGS warpgroups that multiply, BM / WGS rows each, and one that copies (a single thread of it).
 *
 * Shared memory: STAGES slots of two tiles (wgmma.cuh), then the ring's barriers:
 *   a [BM][64 k] or [BM / 64][64 k][64 m]      b [BN][64 k] or [BN / 64][64 k][64 n]      swizzled by 128 bytes
 *
 * Pipeline (slots full and empty: tma_ring.cuh); one step of products stays under way while the next is issued:
 *   copies      k0 k1 k2 k3 | k4      k5         ..  runs on into the next tile while this one's sums are stored
 *   products                | 0 .. 1 .. 2 ..         slot j - 1 is let go when step j is issued and step j - 1 is done
 *
 * The sums leave by way of 2 KiB a warp that turn the accumulators' order into rows.
 * Not here: other dtypes, rows that tma cannot describe (gemm_sm80, gemm_plain), few rows (gemm_skinny). */
#include "../host/launch.cuh"
#include "../host/tensormap.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/griddepcontrol.cuh"
#include "../ptx/stmatrix.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/wgmma.cuh"
#include "../tile/tma_ring.cuh"
#include "../tile/wgmma.cuh"
#include "epilogue.cuh"
#include "order.cuh"
#include "tiles.h"

namespace {

enum Mode {
    A_ALONG_M = 1,
    B_ALONG_N = 2
};

constexpr int BK = 64, WARPGROUP = 128;

/* ---- 1 the call ---------------------------------------------------------------------------------------------- */
struct Params {
    CUtensorMap a, b; /* [batch dimensions, up to 3][m or n][k], or with k and the other changed */
    CUtensorMap out;  /* where `plain` */
    bool plain;       /* store_plain serves the call */
    GemmProblem p;    /* tiles_m counts the tiles of clusters */
};

/* A warp's 16 rows of 128 bytes on their way from the accumulators' order to that of rows; a warp has Tile::PANELS. */
typedef smem_tile<16, 128> Panel;

template <class Tile, int MODE> struct Smem {
    static constexpr bool ALONG_M = MODE & A_ALONG_M, ALONG_N = MODE & B_ALONG_N;
    typedef wgmma_tile<Tile::BM, ALONG_M> A;
    typedef wgmma_tile<Tile::BN, ALONG_N> B;
    typedef wgmma_part<Tile::BM, ALONG_M, Tile::CN> APart;
    typedef wgmma_part<Tile::BN, ALONG_N, Tile::CM> BPart;
    static constexpr int SLOT = A::bytes + B::bytes, RING = Tile::STAGES * SLOT;
    static constexpr int PANELS = RING, WARP_PANELS = Tile::PANELS * Panel::bytes;
    static constexpr int BARRIERS = PANELS + Tile::WGS * 4 * WARP_PANELS;
    static constexpr int BYTES = BARRIERS + tma_ring<Tile::STAGES>::bytes + WGMMA_BLOCK_BYTES; /* to align the ring */
    static_assert(BYTES <= 232448 && Tile::BN % 64 == 0, "shared memory of a block; whole panels");
};

/* Where a batch entry's boxes begin; dimensions without a stride are not in the map. */
__device__ __forceinline__ void place_batch(const GemmProblem &p, const int64_t *strides, unsigned batch, tma_at &at) {
#pragma unroll
    for (int d = TENSOR_DIMS - 3; d >= 0; --d) {
        if (d >= p.ndim) continue;
        at.c[2 + d] = strides[d] ? (int)(batch % (unsigned)p.shape[d]) : 0;
        batch /= (unsigned)p.shape[d];
    }
}

/* ---- 2 copies ------------------------------------------------------------------------------------------------ */
/* Part `part` of the rows or columns from x on and 64 of k, into the blocks of the cluster whose bits are set. */
template <class Part, bool ALONG_X, int SHARERS>
__device__ __forceinline__ void copy_part(smem_addr to_s, const CUtensorMap *map, tma_at at, int x, int k, int part,
                                          smem_addr full, uint16_t blocks) {
#pragma unroll
    for (int i = 0; i < Part::boxes; ++i) {
        const int x_at = x + Part::x(part, i), k_at = k + Part::k(part);
        at.c[0] = ALONG_X ? x_at : k_at, at.c[1] = ALONG_X ? k_at : x_at;
        if (SHARERS > 1)
            tma_load_5d_multicast(to_s + Part::offset(part, i), map, at, full, blocks);
        else
            tma_load_5d(to_s + Part::offset(part, i), map, at, full);
    }
}

/* ---- 3 results ----------------------------------------------------------------------------------------------- */
/* 16 rows of BN columns, 16-bit, without c, preact and costly activations: the panels leave by tma while the warp goes on.
 * at: the warp's first row and column. */
template <class T, int BN, int PANELS>
__device__ __forceinline__ void store_plain(const Params &x, const float (&sum)[BN / 2], smem_addr panels_s, tma_at at,
                                            int lane) {
    const GemmEpilogue &e = x.p.epilogue;
    const float alpha = (float)e.alpha;
    const bool relu = e.activation == GK_ACT_RELU;
    const unsigned put = Panel::offset(lane % 16, 0);
#pragma unroll
    for (int c = 0; c < BN; c += 64) {
        constexpr int OCTETS = BN < 64 ? BN / 8 : 8;
        const smem_addr panel_s = panels_s + c / 64 % PANELS * Panel::bytes;
        float bias[OCTETS][2];
        if (e.bias) {
#pragma unroll
            for (int j = 0; j < OCTETS; ++j) {
                const int64_t col = at.c[0] + j * 8 + lane % 4 * 2;
                read_any<T, 2>(e.bias, e.bias_dtype, col * e.bias_col, e.bias_col, false,
                               (int)max((int64_t)0, min((int64_t)2, x.p.n - col)), bias[j]);
            }
        }
        if (lane == 0) tma_store_wait_group_read<PANELS - 1>();
        __syncwarp(); /* the panel's last contents have been read */
#pragma unroll
        for (int j = 0; j < OCTETS && c + j * 8 < BN; j += 2) {
            uint32_t two[4]; /* rows 0-7 and 8-15 of one octet of columns, then of the next */
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int d = (c / 8 + j + i / 2) * 4 + i % 2 * 2;
                float lo = sum[d] * alpha, hi = sum[d + 1] * alpha;
                if (e.bias) lo += bias[j + i / 2][0], hi += bias[j + i / 2][1]; /* not + 0: -0 stays */
                if (relu) lo = lo <= 0 ? 0.f : lo, hi = hi <= 0 ? 0.f : hi;
                two[i] = pack2<T>(lo, hi);
            }
            stmatrix_x4(panel_s + (put ^ (j + lane / 16) * 16), two);
        }
        fence_proxy_async();
        __syncwarp(); /* all of the panel is written */
        if (lane == 0) {
            tma_store_5d(&x.out, at, panel_s);
            tma_store_commit_group();
        }
        at.c[0] += 64;
    }
}

/* Everything else, 32 columns of floats at a time: one body, past which the sums move instead of the code. */
template <class T, int BN>
__device__ __forceinline__ void store_any(const GemmProblem &p, const GemmPlace &at, float (&sum)[BN / 2],
                                          smem_addr panel_s, int64_t row0, int64_t col0, int lane) {
#pragma unroll 1
    for (int c = 0; c < BN; c += 32) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = lane / 4 + h * 8, byte = j * 32 + lane % 4 * 8;
                st_shared_64(panel_s + Panel::offset(row, byte / 16) + byte % 16,
                             make_float2(sum[j * 4 + h * 2], sum[j * 4 + h * 2 + 1]));
            }
        __syncwarp(); /* the warp's lanes read what the others stored */
#pragma unroll 1
        for (int r = lane / 4; r < 16; r += 8) {
            const uint4 x = ld_shared_128(panel_s + Panel::offset(r, lane % 4 * 2)),
                        y = ld_shared_128(panel_s + Panel::offset(r, lane % 4 * 2 + 1));
            float v[8] = {__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w),
                          __uint_as_float(y.x), __uint_as_float(y.y), __uint_as_float(y.z), __uint_as_float(y.w)};
            const int64_t col = col0 + c + lane % 4 * 8;
            const int valid = (int)min((int64_t)8, p.n - col);
            if (row0 + r < p.m && valid > 0) epilogue_cols<T, 8>(p.epilogue, at, row0 + r, col, valid, v);
        }
        __syncwarp(); /* the panel has been read */
#pragma unroll
        for (int i = 0; i + 16 < BN / 2; ++i) sum[i] = sum[i + 16];
    }
}

/* ---- 4 the kernel -------------------------------------------------------------------------------------------- */
template <class T, class Tile, int MODE>
__global__ void __cluster_dims__(Tile::CM *Tile::CN, 1, 1) __launch_bounds__(Tile::THREADS, 1)
    gemm_sm90a_kernel(const __grid_constant__ Params x) {
    typedef Smem<Tile, MODE> S;
    typedef typename S::A A;
    typedef typename S::B B;
    constexpr int BM = Tile::BM, BN = Tile::BN, STAGES = Tile::STAGES, WGS = Tile::WGS;
    constexpr int CM = Tile::CM, CN = Tile::CN, CLUSTER = CM * CN, NEIGHBOURS = CM + CN - 1; /* itself among them */
    constexpr int MT = BM / WGS / 64;
    static_assert(BM % (64 * WGS) == 0 && BN % 32 == 0 && BN <= 256, "whole wgmma");
    extern __shared__ __align__(1024) unsigned char smem[];
    const GemmProblem &p = x.p;
    const int warpgroup = threadIdx.x / WARPGROUP, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int rank = CLUSTER > 1 ? (int)cluster_ctarank() : 0, tile_m = rank % CM,
              tile_n = rank / CM; /* in the cluster */
    const smem_addr ring_s = (cvta_to_shared(smem) + WGMMA_BLOCK_BYTES - 1) / WGMMA_BLOCK_BYTES * WGMMA_BLOCK_BYTES;
    tma_ring<STAGES> ring(ring_s + S::BARRIERS);

    if (threadIdx.x == 0) {
        prefetch_tensormap(&x.a), prefetch_tensormap(&x.b);
        ring.init(WGS * NEIGHBOURS);
        fence_mbarrier_init();
    }
    if (CLUSTER > 1)
        barrier_cluster(); /* the barriers are there before any block's copies or arrivals reach them */
    else
        __syncthreads();

    griddepcontrol_launch_dependents(); /* the next kernel's start, too, may overlap this one's end */
    griddepcontrol_wait(); /* what the kernel before wrote is there, and what it reads may be overwritten */

    const unsigned tiles = (unsigned)p.tiles_m * p.tiles_n, all = tiles * (unsigned)p.batch;
    const unsigned first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
    const int steps = (int)((p.k + BK - 1) / BK);

    if (warpgroup == WGS) {
        /* ---- 4.1 copies ---- */
        if (WGS > 1) setmaxnreg_dec<Tile::COPY_REGS>();
        if (threadIdx.x == WGS * WARPGROUP) {
            uint16_t row_blocks = 0;
            for (int j = 0; j < CN; ++j) row_blocks |= 1 << (tile_m + CM * j);
            const uint16_t col_blocks = ((1 << CM) - 1) << (CM * tile_n);
            for (unsigned t = first; t < all; t += step) {
                const TilePlace tile = tile_place(t % tiles, p.tiles_m, p.tiles_n, p.group);
                const int row = (tile.row * CM + tile_m) * BM, col = (tile.col * CN + tile_n) * BN;
                tma_at a_at = {}, b_at = {};
                place_batch(p, p.a_batch, t / tiles, a_at), place_batch(p, p.b_batch, t / tiles, b_at);
                for (int k = 0; k < steps; ++k) {
                    const smem_addr a_s = ring_s + ring.slot * S::SLOT, b_s = a_s + A::bytes;
                    ring.wait_empty(); /* all readers of what this step overwrites, here and in the others, have let go */
                    mbarrier_arrive_expect_tx(ring.full(), S::SLOT);
                    copy_part<typename S::APart, S::ALONG_M, CN>(a_s, &x.a, a_at, row, k * BK, tile_n, ring.full(),
                                                                 row_blocks);
                    copy_part<typename S::BPart, S::ALONG_N, CM>(b_s, &x.b, b_at, col, k * BK, tile_m, ring.full(),
                                                                 col_blocks);
                    ring.advance();
                }
            }
        }
    } else {
        /* ---- 4.2 products ---- */
        if (WGS > 1) setmaxnreg_inc<Tile::SUM_REGS>();
        float sum[MT][BN / 2];
        /* a lane for each block that copies into this one: the CM of its column, then the other CN - 1 of its row */
        const int other = lane - CM,
                  neighbour = lane < CM ? lane + CM * tile_n : tile_m + CM * (other + (other >= tile_n));
        const bool tells = warp == 0 && lane < NEIGHBOURS;
        const auto let_go = [&](smem_addr barrier_s) {
            if (!tells) return;
            if (CLUSTER > 1)
                mbarrier_arrive_cluster(barrier_s, neighbour);
            else
                mbarrier_arrive(barrier_s);
        };
        for (unsigned t = first; t < all; t += step) {
            for (int k = 0; k < steps; ++k) {
                const smem_addr a_s = ring_s + ring.slot * S::SLOT, b_s = a_s + A::bytes;
                const smem_addr before = ring.empty() + (ring.slot == 0 ? 8 * (STAGES - 1) : -8);
                ring.wait_full();
                wgmma_pin(sum);
                wgmma_fence(); /* sums may have been touched by other code */
#pragma unroll
                for (int kk = 0; kk < BK / 16; ++kk) {
                    const uint64_t b = B::descriptor(b_s + kk * B::k16_bytes);
#pragma unroll
                    for (int m = 0; m < MT; ++m) {
                        const uint64_t a =
                            A::descriptor(a_s + A::offset((warpgroup * MT + m) * 64) + kk * A::k16_bytes);
                        wgmma_ss<T, BN, S::ALONG_M, S::ALONG_N>(sum[m], a, b, k + kk > 0);
                    }
                }
                wgmma_commit_group();
                wgmma_wait_group<1>(); /* the step before is done: its slot may be overwritten */
                if (k > 0) let_go(before);
                ring.advance();
            }
            const smem_addr last = ring.empty() + (ring.slot == 0 ? 8 * (STAGES - 1) : -8);
            wgmma_wait_group<0>();
            wgmma_pin(sum);
            let_go(last);

            /* ---- 4.3 results ---- */
            const TilePlace tile = tile_place(t % tiles, p.tiles_m, p.tiles_n, p.group);
            const smem_addr panels_s = ring_s + S::PANELS + (warpgroup * 4 + warp) * S::WARP_PANELS;
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                const int row = (tile.row * CM + tile_m) * BM + (warpgroup * MT + m) * 64 + warp * 16,
                          col = (tile.col * CN + tile_n) * BN;
                if (x.plain) {
                    tma_at at = {{col, row}};
                    place_batch(p, p.out_batch, t / tiles, at);
                    store_plain<T, BN, Tile::PANELS>(x, sum[m], panels_s, at, lane);
                } else {
                    store_any<T, BN>(p, gemm_place(p, t / tiles), sum[m], panels_s, row, col, lane);
                }
            }
        }
        if (lane == 0) tma_store_wait_group_read<0>(); /* shared memory stays until the last panel has been read */
    }
    if (CLUSTER > 1) barrier_cluster(); /* no block leaves while the other still copies or arrives here */
}

/* ---- 5 the plan ---------------------------------------------------------------------------------------------- */
enum Key {  /* of a row */
    KEY_CM, /* rows and columns of a cluster */
    KEY_CN,
    KEY_CLUSTER, /* its blocks */
    KEY_PERCENT, /* of the dense peak */
    KEY_SMEM
};

/* An operand as tma sees it: rows of m or n and k. */
TensorShape operand_of(const void *data, gk_dtype dtype, int64_t x, int64_t k, int64_t x_stride, int64_t k_stride,
                       const GemmProblem &p, const int64_t *batch, bool along_x) {
    TensorShape s = {
        data, dtype, {along_x ? x : k, along_x ? k : x, 1, 1, 1}, {1, along_x ? k_stride : x_stride, 0, 0, 0}};
    for (int d = 0; d < p.ndim && d < TENSOR_DIMS - 2; ++d)
        if (batch[d]) s.size[2 + d] = p.shape[d], s.stride[2 + d] = batch[d];
    return s;
}

/* The mode whose operands tma can describe, or -1. */
int mode_of(const GemmProblem &p, gk_dtype dtype, TensorShape *a, TensorShape *b) {
    const int64_t most_tiles = gk_ceil_div(p.m, 64) * gk_ceil_div(p.n, 64) * p.batch;
    if (p.ndim > TENSOR_DIMS - 2 || p.k == 0 || most_tiles > INT32_MAX) return -1;
    for (int mode = 0; mode < 4; ++mode) {
        if ((mode & A_ALONG_M ? p.a_m : p.a_k) != 1 || (mode & B_ALONG_N ? p.b_n : p.b_k) != 1) continue;
        *a = operand_of(p.a, dtype, p.m, p.k, p.a_m, p.a_k, p, p.a_batch, mode & A_ALONG_M);
        *b = operand_of(p.b, dtype, p.n, p.k, p.b_n, p.b_k, p, p.b_batch, mode & B_ALONG_N);
        if (tensor_map_fits(*a) && tensor_map_fits(*b)) return mode;
    }
    return -1;
}

/* Time of a row: the busiest cluster's tiles one after the other. */
double us_of(const gk_cuda_row *row, const gk_gpu *gpu, const GemmProblem &p) {
    const int64_t rows = row->key[KEY_CM], cols = row->key[KEY_CN], blocks = row->key[KEY_CLUSTER];
    const int64_t tiles = gk_ceil_div(p.m, rows) * gk_ceil_div(p.n, cols) * p.batch;
    const double busiest = (double)gk_ceil_div(tiles, gpu->num_sms / blocks);
    const double peak = 4096 * gpu->clock_khz * 1e-3 * row->key[KEY_PERCENT] * 0.01;
    const double tile_us = 2.0 * (double)(rows * cols / blocks * gk_round_up(p.k, BK)) / peak;
    return busiest * (tile_us + TILE_US);
}

extern const gk_cuda_row *const sm90_rows;
extern const int num_sm90_rows;

/* The row of least time among those that fit the GPU. */
const gk_cuda_row *choose(const gk_context *ctx, const void *arguments) {
    const gk_gemm_args *args = (const gk_gemm_args *)arguments;
    const GemmProblem p = gemm_problem_of(args);
    TensorShape a, b;
    if (gk_min_i64(p.m, p.n) <= SM90_LEAST_ROWS || mode_of(p, args->a.dtype, &a, &b) < 0) return NULL;
    const gk_gpu *gpu = gk_gpu_of(ctx->index);
    const gk_cuda_row *best = NULL;
    double best_us = 1e31;
    for (int i = 0; i < num_sm90_rows; ++i) {
        const gk_cuda_row *r = &sm90_rows[i];
        if (r->dtype != args->a.dtype || r->key[KEY_SMEM] > gpu->smem_per_block) continue;
        const double us = us_of(r, gpu, p);
        if (us < best_us) best = r, best_us = us;
    }
    return best;
}

/* ---- 6 the launch -------------------------------------------------------------------------------------------- */
template <class Tile> void plan(const gk_context *ctx, GemmProblem *p, unsigned *clusters) {
    p->tiles_m = (int)gk_ceil_div(p->m, Tile::BM * Tile::CM), p->tiles_n = (int)gk_ceil_div(p->n, Tile::BN * Tile::CN);
    p->group = GROUP_ROWS_SM90, p->splits = 1;
    const int64_t tiles = (int64_t)p->tiles_m * p->tiles_n * p->batch;
    *clusters = (unsigned)gk_min_i64(tiles, gk_gpu_of(ctx->index)->num_sms / (Tile::CM * Tile::CN));
}

template <class T, class Tile, int MODE>
gk_status start(const gk_context *ctx, Params *x, TensorShape *a, TensorShape *b) {
    typedef Smem<Tile, MODE> S;
    unsigned clusters;
    plan<Tile>(ctx, &x->p, &clusters);
    gk_status status = make_tensor_map("gk_gemm", *a, 64, S::APart::box_rows, &x->a);
    if (status == GK_OK) status = make_tensor_map("gk_gemm", *b, 64, S::BPart::box_rows, &x->b);
    const GemmEpilogue &e = x->p.epilogue;
    x->plain = !e.c && !e.preact && e.out_vectors && e.out_dtype == element<T>::dtype &&
               (e.activation == GK_ACT_NONE || e.activation == GK_ACT_RELU);
    if (x->plain) {
        const TensorShape out =
            operand_of(e.out, element<T>::dtype, x->p.m, x->p.n, e.out_row, 1, x->p, x->p.out_batch, false);
        x->plain = tensor_map_fits(out);
        if (status == GK_OK && x->plain) status = make_tensor_map("gk_gemm", out, 64, 16, &x->out);
    }
    if (status != GK_OK) return status;
    return launch<gemm_sm90a_kernel<T, Tile, MODE>>("gk_gemm", ctx, dim3(clusters * Tile::CM * Tile::CN), Tile::THREADS,
                                                    S::BYTES, *x, true);
}

template <class T, class Tile> gk_status run(const gk_cuda_row *row, const gk_context *ctx, const void *args) {
    Params x;
    x.p = gemm_problem_of((const gk_gemm_args *)args);
    if (x.p.m == 0 || x.p.n == 0 || x.p.batch == 0) return GK_OK;
    TensorShape a, b;
    switch (mode_of(x.p, row->dtype, &a, &b)) {
    case 0: return start<T, Tile, 0>(ctx, &x, &a, &b);
    case 1: return start<T, Tile, 1>(ctx, &x, &a, &b);
    case 2: return start<T, Tile, 2>(ctx, &x, &a, &b);
    default: return start<T, Tile, 3>(ctx, &x, &a, &b);
    }
}

template <class Tile> void explain(const gk_cuda_row *, const gk_context *ctx, const void *args, gk_explanation *out) {
    GemmProblem p = gemm_problem_of((const gk_gemm_args *)args);
    unsigned clusters;
    plan<Tile>(ctx, &p, &clusters);
    out->tile[0] = Tile::BM, out->tile[1] = Tile::BN, out->tile[2] = BK;
    out->tasks = (int64_t)p.tiles_m * p.tiles_n * p.batch * Tile::CM * Tile::CN;
    out->waves = (double)p.tiles_m * p.tiles_n * p.batch / gk_gpu_of(ctx->index)->num_sms / (Tile::CM * Tile::CN);
}

#define ROW(name, T, Tile)                                                                                  \
    {                                                                                                       \
        name, element<T>::dtype, NULL, NULL, run<T, Tile>, explain<Tile>, {                                 \
            Tile::BM *Tile::CM, Tile::BN *Tile::CN, Tile::CM *Tile::CN, Tile::PERCENT, Smem<Tile, 3>::BYTES \
        }                                                                                                   \
    }
#define ROWS(name, T)                                             \
    ROW("gemm_sm90a_" name "_128x256x64", T, Tile90_128x256),     \
        ROW("gemm_sm90a_" name "_128x192x64", T, Tile90_128x192), \
        ROW("gemm_sm90a_" name "_128x128x64", T, Tile90_128x128), \
        ROW("gemm_sm90a_" name "_64x128x64", T, Tile90_64x128), ROW("gemm_sm90a_" name "_64x64x64", T, Tile90_64x64)

const gk_cuda_row rows[] = {ROWS("bf16", __nv_bfloat16), ROWS("f16", __half)};
const gk_cuda_row *const sm90_rows = rows;
const int num_sm90_rows = sizeof rows / sizeof rows[0];

} // namespace

extern "C" const gk_cuda_table gk_gemm_sm90a_table = {rows, sizeof rows / sizeof rows[0], 90, choose};
