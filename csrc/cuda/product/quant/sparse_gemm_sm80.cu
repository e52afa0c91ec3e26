/* SPDX-License-Identifier: BSD-3-Clause */
/* sparse_gemm_sm80: sparse_gemm by sparse mma.sync for bfloat16, float16 and int8, on GPUs
 * without WGMMA and for calls that Hopper's kernel does not take. Mishra et al. 2021,
 * arXiv:2104.08378.
 *
 *   out^T [N, M] = activation(scale_b scale_a (W A^T) + bias)
 *
 * a [M, K] is K-major. values [N, K / 2] and meta [N, K / 8] come from sparse_pack. Only the
 * instruction's first operand may be sparse. So the rows of a tile are weight rows, and its columns
 * are rows of a (tokens). Results are transposed through shared memory.
 *
 * The loop is that of mainloop_sm80.cuh, with half of k in the weight's tile. Meta has stages of
 * its own in shared memory. It is copied together with the tiles of its step.
 *
 * Workspace: a copy of an int8 a that is not K-major or aligned (k_major_copy.cuh).
 *
 * Refuses: K that is no multiple of 32 (16-bit types: 16), rows that are not whole 16 bytes, and
 * 8-bit floats, which product_plain computes. */
#include "../../../core/invariant.h"
#include "../gemm/mainloop_sm80.cuh"
#include "../gemm/order.cuh"
#include "../../ptx/mma_s8.cuh"
#include "../../ptx/mma_sparse.cuh"
#include "k_major_copy.cuh"
#include "store_octets.cuh"
#include "tiles.h"
#include "tiles_sm80.h"

namespace {

struct Params {
    const void *values, *a;
    const uint8_t *meta;
    int64_t values_row, a_row, meta_row;
    int m, n, k, meta_bytes; /* meta_bytes: bytes of meta of a weight row */
    gk_scales sa, sb;
    Finish f;
    Vectors vectors;
    bool whole; /* a step's bytes of a row of meta are one aligned copy */
    int tiles_m, tiles_n;
};

/* ---- 1 products ------------------------------------------------------------------------------ */
template <class T> struct SumOf {
    typedef float type;
};
template <> struct SumOf<int8_t> {
    typedef int type;
};

template <class T, class Tile> struct SparseProduct : DefaultProduct {
    static constexpr int SHARE = 2, MT = Tile::WM / 16, KK = 2;
    static constexpr bool BYTES = sizeof(T) == 1;
    typedef typename SumOf<T>::type Sum;
    struct A {
        uint32_t r[4];
    };
    struct B { /* [columns 8 h][k in order] */
        uint32_t r[2][4];
    };
    /* WORDS: words of meta that a lane needs for a step. With 16-bit elements, both instructions
     * use the same word. ROW: bytes of meta of a weight row for a step. */
    static constexpr int WORDS = BYTES ? 2 * MT : MT, ROW = BYTES ? 16 : 8, STAGE = Tile::BM * ROW;
    uint32_t now[WORDS];
    const Params &p;
    const uint8_t *mine_g; /* meta of the row that this thread copies */
    smem_addr meta_s;      /* [STAGES][BM][ROW] */
    int warp_m;
    bool copies;

    __device__ __forceinline__ SparseProduct(const Params &params, smem_addr at_s, int row0, int m)
        : p(params), meta_s(at_s), warp_m(m) {
        const int row = threadIdx.x;
        static_assert(Tile::THREADS >= Tile::BM, "a row a thread");
        copies = row < Tile::BM && row0 + row < p.n;
        mine_g = p.meta + (copies ? row0 + row : 0) * p.meta_row;
        for (int j = 0; j < Tile::STAGES - 1; ++j) copy(j);
    }
    /* Copies meta of step j. Bytes after the row's end become zeros. The values there are zeros,
     * too.
     */
    __device__ __forceinline__ void copy(int j) const {
        if (!copies) return;
        const smem_addr to_s = meta_s + (unsigned)j % Tile::STAGES * STAGE + threadIdx.x * ROW;
        const int at = j * ROW, left = min(max(p.meta_bytes - at, 0), ROW);
        if (p.whole) {
            cp_async_ca<ROW>(to_s, left ? mine_g + at : p.meta, left);
            return;
        }
        uint32_t words[ROW / 4];
#pragma unroll
        for (int i = 0; i < ROW / 4; ++i) {
            words[i] = 0;
            if constexpr (BYTES) {
                if (4 * i < left) words[i] = __ldg((const uint32_t *)(mine_g + at) + i);
            } else {
                if (4 * i < left) words[i] = __ldg((const uint16_t *)(mine_g + at) + 2 * i);
                if (4 * i + 2 < left)
                    words[i] |= (uint32_t)__ldg((const uint16_t *)(mine_g + at) + 2 * i + 1) << 16;
            }
        }
#pragma unroll
        for (int i = 0; i < ROW / 4; ++i) st_shared_32(to_s + 4 * i, words[i]);
    }
    /* Reads meta of the lane's rows for step j. */
    __device__ __forceinline__ void read(int j) {
        const int lane = threadIdx.x % 32;
        const smem_addr from_s =
            meta_s + (unsigned)j % Tile::STAGES * STAGE + (warp_m + lane / 4) * ROW;
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            if constexpr (BYTES) {
                const int row = i / 2 * 16 + lane % 2 * 8;
                now[i] = ld_shared_32(from_s + row * ROW + i % 2 * 8 + lane / 2 % 2 * 4);
            } else {
                const smem_addr at_s = from_s + i * 16 * ROW + lane % 4 * 2;
                now[i] = ld_shared_16(at_s) | (uint32_t)ld_shared_16(at_s + 8 * ROW) << 16;
            }
        }
    }
    __device__ __forceinline__ void begin() { read(0); }
    /* Copies meta of the step that the ring copies next. All warps have read the stage's previous
     * contents before the barrier of step j - 1. */
    __device__ __forceinline__ void before_barrier(int j) { copy(j + Tile::STAGES - 1); }
    template <class Sums> __device__ __forceinline__ void join(Sums &, int q, bool) {
        if (q % KK == KK - 1) read(q / KK + 1);
    }
    static __device__ __forceinline__ A ready_a(const uint32_t *x) {
        return {{x[0], x[1], x[2], x[3]}};
    }
    static __device__ __forceinline__ B ready_b(const uint32_t *x) {
        return {{{x[0], x[1], x[2], x[3]}, {x[4], x[5], x[6], x[7]}}};
    }
    template <int NT>
    __device__ __forceinline__ void multiply(Sum (&sum)[2 * NT][4], const A &a, const B (&b)[NT],
                                             int i, int kk) const {
#pragma unroll
        for (int n = 0; n < 2 * NT; ++n) {
            const uint32_t *const of_n = b[n / 2].r[n % 2];
            if constexpr (BYTES)
                mma_sparse_s8(sum[n], a.r, of_n, now[2 * i + kk]);
            else if (kk == 0)
                mma_sparse<T, 0>(sum[n], a.r, of_n, now[i]);
            else
                mma_sparse<T, 1>(sum[n], a.r, of_n, now[i]);
        }
    }
};

/* ---- 2 the kernel ---------------------------------------------------------------------------- */
template <class T, class Tile> struct Smem {
    static constexpr int RING = Ring<T, Tile, 0, 2>::BYTES, SUMS = SumStageAcross<Tile>::BYTES;
    static constexpr int META = RING > SUMS ? RING : SUMS;
    static constexpr int BYTES = META + Tile::STAGES * SparseProduct<T, Tile>::STAGE;
};

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::THREADS, Tile::PER_SM) sparse_gemm_sm80_kernel(Params p) {
    constexpr int BM = Tile::BM, BN = Tile::BN, WM = Tile::WM, WN = Tile::WN;
    extern __shared__ __align__(128) unsigned char smem[];
    const int warp = threadIdx.x / 32, warp_m = warp % (BM / WM) * WM,
              warp_n = warp / (BM / WM) * WN;
    const TilePlace tile = tile_place(blockIdx.x, p.tiles_m, p.tiles_n, SPARSE_GROUP);
    const int weight0 = tile.row * BM, token0 = tile.col * BN;
    const Operand<T> w = {(const T *)p.values + weight0 * p.values_row, p.values_row, 1,
                          min(BM, p.n - weight0)};
    const Operand<T> a = {(const T *)p.a + token0 * p.a_row, p.a_row, 1, min(BN, p.m - token0)};
    typedef SparseProduct<T, Tile> Product;
    typename Product::Sum sum[WM / 16][WN / 8][4] = {};
    Product product(p, cvta_to_shared(smem) + Smem<T, Tile>::META, weight0, warp_m);
    multiply_sm80<T, Tile, 0>(product, sum, w, a, p.k, cvta_to_shared(smem), warp_m, warp_n);
    cp_async_wait_group<0>();
    /* No thread reads the ring any more and no copy writes it, so the sums may overwrite it. */
    __syncthreads();
    take_octets_across<Tile>(smem, sum, [&](int c, int r, float (&v)[8]) {
        const int token = token0 + warp_n + c, weight = weight0 + warp_m + r,
                  valid = min(8, p.n - weight);
        if (token >= p.m || valid <= 0) return;
        float bias[8] = {};
        if (p.f.bias)
            read_octet(p.f.bias, p.f.bias_dtype, weight * p.f.bias_step, p.f.bias_step, false,
                       valid, bias);
        if constexpr (sizeof(T) == 1) {
            const float sa = scale_of(p.sa, token, 0);
#pragma unroll
            for (int i = 0; i < 8; ++i)
                v[i] = times_scales(v[i], sa, scale_of(p.sb, 0, min(weight + i, p.n - 1)));
        }
        finish_octet(p.f, p.vectors, token, weight, valid, v, bias);
    });
}

/* ---- 3 plan and run -------------------------------------------------------------------------- */
struct Plan {
    KMajorCopy a;
};

enum Key { /* of an instance */
    KEY_BM,
    KEY_BN,
    KEY_SMEM,
    KEY_SMALL
};

bool plan_sparse(const gk_cuda_instance *instance, const gk_context *ctx, const void *args,
                 gk_plan *plan) {
    const gk_sparse_gemm_args *g = (const gk_sparse_gemm_args *)args;
    const int64_t m = g->a.shape[0], k = g->a.shape[1], n = g->values.shape[0];
    const bool eight = g->a.dtype == GK_I8;
    if (m < 1 || n < 1 || k < 1 || m > 1 << 30 || n > 1 << 30 || k > 1 << 30 ||
        k % (eight ? 32 : 16))
        return false;
    if (!rows_aligned(g->values) || !smem_fits(ctx, instance->key[KEY_SMEM])) return false;
    if ((uintptr_t)g->meta.data % 4 || (n > 1 && g->meta.stride[0] % (eight ? 4 : 2))) return false;
    Plan &x = gk_own<Plan>(plan);
    size_t bytes = 0;
    if (eight)
        x.a = plan_k_major(g->a, &bytes);
    else if ((g->a.stride[1] != 1 && k > 1) || !rows_aligned(g->a))
        return false;
    const int64_t tiles =
        gk_ceil_div(n, instance->key[KEY_BM]) * gk_ceil_div(m, instance->key[KEY_BN]);
    if (!gk_grid_fits(tiles)) return false;
    plan->workspace_bytes = bytes;
    plan->tasks = tiles;
    plan->kernel = instance;
    plan->tile[0] = instance->key[KEY_BN];
    plan->tile[1] = instance->key[KEY_BM];
    plan->tile[2] = eight ? 128 : 64;
    return true;
}

template <class T, class Tile>
gk_status run_sparse(const gk_context *ctx, const void *args, const gk_plan *plan,
                     void *workspace) {
    const gk_sparse_gemm_args *g = (const gk_sparse_gemm_args *)args;
    Params p = {};
    p.a = g->a.data;
    p.a_row = g->a.stride[0];
    if (sizeof(T) == 1) {
        const KMajorCopy &x = gk_own<Plan>(plan).a;
        TensorShape a;
        const gk_status status = copy_k_major("sparse_gemm", ctx, x, g->a, workspace, &a);
        if (status != GK_OK) return status;
        p.a = a.data;
        p.a_row = x.ld;
    }
    p.values = g->values.data;
    p.values_row = g->values.stride[0];
    p.meta = (const uint8_t *)g->meta.data;
    p.meta_row = g->meta.stride[0];
    p.meta_bytes = (int)g->meta.shape[1];
    const int row = SparseProduct<T, Tile>::ROW;
    p.whole = (uintptr_t)p.meta % row == 0 && (p.meta_row % row == 0 || g->meta.shape[0] == 1);
    p.m = (int)g->a.shape[0];
    p.k = (int)g->a.shape[1];
    p.n = (int)g->values.shape[0];
    p.sa = gk_scales_of(g->scale_a, p.m, p.k, false);
    p.sb = gk_scales_of(g->scale_b, p.k, p.n, true);
    p.f = finish_of(g->out, g->bias, nullptr, 0, nullptr, g->activation);
    p.f.out_row = p.n;
    p.vectors = vectors_of(p.f);
    p.tiles_m = (int)gk_ceil_div(p.n, Tile::BM);
    p.tiles_n = (int)gk_ceil_div(p.m, Tile::BN);
    return launch<sparse_gemm_sm80_kernel<T, Tile>>("sparse_gemm", ctx, dim3((unsigned)plan->tasks),
                                                    Tile::THREADS, Smem<T, Tile>::BYTES, p);
}

#define INSTANCE(name, dtype, T, Tile, small)           \
    {"sparse_gemm_sm80_" name,                          \
     dtype,                                             \
     plan_sparse,                                       \
     run_sparse<T, Tile>,                               \
     {Tile::BM, Tile::BN, Smem<T, Tile>::BYTES, small}, \
     NULL}
#define INSTANCES(name, dtype, T)                                              \
    INSTANCE(name "_128x128", dtype, T, TileSparse_128x128<sizeof(T)>, false), \
        INSTANCE(name "_64x32", dtype, T, TileSparse_64x32<sizeof(T)>, true)

const gk_cuda_instance instances[] = {INSTANCES("bf16", GK_BF16, __nv_bfloat16),
                                      INSTANCES("f16", GK_F16, __half),
                                      INSTANCES("i8", GK_I8, int8_t)};

bool plan_best(const gk_context *ctx, const void *args, gk_plan *plan) {
    const gk_sparse_gemm_args *g = (const gk_sparse_gemm_args *)args;
    const int64_t m = g->a.shape[0],
                  large = gk_ceil_div(m, 128) * gk_ceil_div(g->values.shape[0], 128);
    const bool small = !gk_batch_invariant() &&
                       (m <= SPARSE_SMALL_M || 2 * large <= gk_gpu_of(ctx->index)->num_sms);
    for (const gk_cuda_instance &instance : instances)
        if (instance.dtype == g->a.dtype && (instance.key[KEY_SMALL] != 0) == small &&
            plan_sparse(&instance, ctx, args, plan))
            return true;
    return false;
}

} // namespace

extern "C" const gk_cuda_table gk_sparse_gemm_sm80_table = {
    instances, sizeof instances / sizeof instances[0], 80, plan_best};
