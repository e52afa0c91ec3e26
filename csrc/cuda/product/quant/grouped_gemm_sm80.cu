/* SPDX-License-Identifier: BSD-3-Clause */
/* grouped_gemm_sm80: grouped_gemm by mma.sync for bfloat16, float16 and int8, on GPUs without
 * WGMMA and for calls that Hopper's kernels do not take. One launch reads the groups' ends itself
 * (groups.cuh).
 *
 *   groups of rows   out[rows of g] = activation(a[rows of g] b[g] + bias)
 *   groups of k      out[g] = activation(a[:, k of g] b[k of g] + bias)
 *
 * Groups of rows: a is K-major, b[g] K-major or N-major. Groups of k: a is M-major, b N-major.
 * int8: groups of rows, K-major, sums in int32, and scales of rows and columns, which multiply the
 * sums in the epilogue.
 *
 * Blocks are persistent and take tiles of up to 128 x 128 of a group, multiplied by
 * mainloop_sm80.cuh. Rows after the last group's end become zeros. Rows of other strides or
 * alignment are read by ordinary loads (the `any` instances).
 *
 * Workspace: none. Refuses: float32, 8-bit floats, int8 with scales along k, more than 1024 groups
 * (grouped_gemm_plain). */
#include "codes_mma.cuh"
#include "groups.cuh"
#include "store_octets.cuh"
#include "tiles_sm80.h"

namespace {

struct Params {
    const void *a, *b;
    int64_t a_m, a_k, b_k, b_n, b_group, bias_group;
    int m, n, k;
    Groups groups;
    Finish f;
    Vectors vectors;
    gk_scales sa, sb; /* int8 */
    int64_t scale_group;
};

/* ---- 1 the kernel ---------------------------------------------------------------------------- */
template <class T, int MODE> struct TileOf {
    typedef TileGroups_128x128 type;
};
template <class T> struct TileOf<T, ANY> {
    typedef TileGroups_any type;
};
template <class T> struct TileOf<T, ANY | A_ALONG_M | B_ALONG_N> {
    typedef TileGroups_any type;
};
template <> struct TileOf<uint8_t, 0> {
    typedef Tile8_128x128 type;
};

template <class T> struct ProductOf : MmaProduct<T> {};
template <> struct ProductOf<uint8_t> : Int8Product {
    __device__ __forceinline__ ProductOf() : Int8Product(TwoCodeBits{}) {}
};

template <class T, class Tile, int MODE> struct Smem {
    static constexpr int RING = Ring<T, Tile, MODE>::BYTES, SUMS = SumStage<Tile>::BYTES;
    static constexpr int LIST = RING > SUMS ? RING : SUMS, BYTES = LIST + (int)sizeof(GroupList);
};

template <class T, bool BY_K, int MODE>
__global__ void __launch_bounds__(TileOf<T, MODE>::type::THREADS, TileOf<T, MODE>::type::PER_SM)
    grouped_gemm_sm80_kernel(Params p) {
    typedef typename TileOf<T, MODE>::type Tile;
    typedef Smem<T, Tile, MODE> S;
    constexpr int BM = Tile::BM, BN = Tile::BN, WM = Tile::WM, WN = Tile::WN,
                  OCTETS = SumStage<Tile>::OCTETS;
    extern __shared__ __align__(128) unsigned char smem[];
    GroupList &list = *(GroupList *)(smem + S::LIST);
    const int warp = threadIdx.x / 32, warp_m = warp % (BM / WM) * WM,
              warp_n = warp / (BM / WM) * WN;
    if (warp == 0) list_groups<BY_K, BM>(p.groups, list, threadIdx.x);
    __syncthreads();
    for (int t = blockIdx.x; t < tasks_in(p.groups, list); t += gridDim.x) {
        const Task task = find_task<BY_K, BM>(p.groups, list, t, gridDim.x);
        const bool given = task.group < p.groups.count; /* rows of no group are zeros */
        const int col0 = task.col * BN, row0 = BY_K ? task.row : task.begin + task.row,
                  rows = task.limit - task.row;
        const int k0 = BY_K ? task.begin : 0, k = BY_K ? task.end - task.begin : given ? p.k : 0;
        const Operand<T> a = {(const T *)p.a + row0 * p.a_m + k0 * p.a_k, p.a_m, p.a_k, rows};
        const Operand<T> b = {(const T *)p.b + (BY_K || !given ? 0 : task.group * p.b_group) +
                                  col0 * p.b_n + k0 * p.b_k,
                              p.b_n, p.b_k, min(BN, p.n - col0)};
        typename ProductOf<T>::Sum sum[WM / 16][WN / 8][4] = {};
        ProductOf<T> product;
        multiply_sm80<T, Tile, MODE>(product, sum, a, b, k, cvta_to_shared(smem), warp_m, warp_n);
        cp_async_wait_group<0>();
        /* No thread reads the ring any more and no copy writes it, so the sums may overwrite it. */
        __syncthreads();

        const int col = col0 + warp_n + threadIdx.x % 32 % OCTETS * 8, valid = min(8, p.n - col);
        Finish f = p.f;
        float bias[8] = {};
        if (!given) {
            f.bias = nullptr;
            f.activation = GK_ACT_NONE;
        } else if (f.bias && valid > 0)
            read_octet(f.bias, f.bias_dtype, task.group * p.bias_group + col * f.bias_step,
                       f.bias_step, false, valid, bias);
        const int64_t out_row = (BY_K ? (int64_t)task.group * p.m : 0) + row0;
        if constexpr (sizeof(T) == 1) {
            float by[8] = {};
            if (given) {
                gk_scales sb = p.sb;
                sb.data = (const char *)sb.data + task.group * p.scale_group;
#pragma unroll
                for (int i = 0; i < 8; ++i) by[i] = scale_of(sb, 0, min(col + i, p.n - 1));
            }
            take_octets<Tile>(smem, sum, [&](int r, float (&v)[8]) {
                if (warp_m + r >= rows || valid <= 0) return;
                if (given) { /* rows of no group are zeros, whatever their scales */
                    const float sa = scale_of(p.sa, row0 + warp_m + r, 0);
#pragma unroll
                    for (int i = 0; i < 8; ++i) v[i] = times_scales(v[i], sa, by[i]);
                }
                finish_octet(f, p.vectors, out_row + warp_m + r, col, valid, v, bias);
            });
        } else {
            take_octets<Tile>(smem, sum, [&](int r, float (&v)[8]) {
                if (warp_m + r < rows && valid > 0)
                    finish_octet(f, p.vectors, out_row + warp_m + r, col, valid, v, bias);
            });
        }
        __syncthreads(); /* the next tile's copies overwrite the sums */
    }
}

/* ---- 2 plan and run -------------------------------------------------------------------------- */
enum Key { /* of an instance */
    KEY_BY_K,
    KEY_MODE,
    KEY_SMEM
};

/* True if rows are whole 16 bytes along the last dimension, or with `transposed` along the one
 * before. */
bool reads_rows(const gk_tensor &t, bool transposed) {
    const int last = t.ndim - 1 - transposed, rows = t.ndim - 2 + transposed;
    if ((uintptr_t)t.data % 16 != 0 || (t.stride[last] != 1 && t.shape[last] > 1)) return false;
    if (t.ndim == 3 && t.shape[0] > 1 && !gk_whole_chunks(t.dtype, t.stride[0])) return false;
    return t.shape[rows] == 1 || gk_whole_chunks(t.dtype, t.stride[rows]);
}

bool scales_along_k(const gk_grouped_gemm_args *g) {
    const int64_t m = g->a.shape[0], k = g->a.shape[1], n = g->b.shape[g->b.ndim - 1];
    return gk_scales_of(g->scale_a, m, k, false).col_log2 < GK_WHOLE_LOG2 ||
           gk_scales_of(g->scale_b, k, n, true).row_log2 < GK_WHOLE_LOG2;
}

bool plan_grouped(const gk_cuda_instance *instance, const gk_context *ctx, const void *args,
                  gk_plan *plan) {
    const gk_grouped_gemm_args *g = (const gk_grouped_gemm_args *)args;
    const int64_t m = g->a.shape[0], k = g->a.shape[1], n = g->b.shape[g->b.ndim - 1],
                  groups = g->offs.shape[0];
    const bool by_k = g->b.ndim == 2;
    const int mode = instance->key[KEY_MODE];
    if (by_k != (bool)instance->key[KEY_BY_K] || groups < 1 || groups > GROUPED_MOST) return false;
    if (m < 1 || n < 1 || k < 1 || m > 1 << 30 || n > 1 << 30 || k > 1 << 30) return false;
    if (!(mode & ANY) &&
        !(reads_rows(g->a, (mode & A_ALONG_M) != 0) && reads_rows(g->b, (mode & B_ALONG_N) == 0)))
        return false;
    if (g->a.dtype == GK_I8 && scales_along_k(g)) return false;
    if (!smem_fits(ctx, instance->key[KEY_SMEM])) return false;
    const int64_t across = gk_ceil_div(n, 128),
                  down = gk_ceil_div(m, 128) * (by_k ? groups : 1) + groups;
    if (!gk_grid_fits(2 * across * down)) return false;
    plan->tile[0] = plan->tile[1] = 128;
    plan->tile[2] = g->a.dtype == GK_I8 ? 64 : 32;
    plan->tasks = across * down;
    return true;
}

template <class T, bool BY_K, int MODE>
gk_status run_grouped(const gk_context *ctx, const void *args, const gk_plan *plan, void *) {
    typedef typename TileOf<T, MODE>::type Tile;
    const gk_grouped_gemm_args *g = (const gk_grouped_gemm_args *)args;
    const int nd = g->b.ndim;
    Params p = {};
    p.a = g->a.data;
    p.b = g->b.data;
    p.m = (int)g->a.shape[0];
    p.k = (int)g->a.shape[1];
    p.n = (int)g->b.shape[nd - 1];
    p.a_m = g->a.stride[0];
    p.a_k = g->a.stride[1];
    p.b_k = g->b.stride[nd - 2];
    p.b_n = g->b.stride[nd - 1];
    p.b_group = nd == 3 ? g->b.stride[0] : 0;
    p.f = finish_of(g->out, g->bias, nullptr, 0, nullptr, g->activation);
    p.f.out_row = p.n;
    if (g->bias) {
        p.f.bias_step = g->bias->stride[g->bias->ndim - 1];
        if (g->bias->ndim == 2) p.bias_group = g->bias->stride[0];
    }
    p.vectors = vectors_of(p.f);
    if (sizeof(T) == 1) {
        p.sa = gk_scales_of(g->scale_a, p.m, p.k, false);
        p.sb = gk_scales_of(g->scale_b, p.k, p.n, true);
        if (g->scale_b->ndim == 3)
            p.scale_group = g->scale_b->stride[0] * (int64_t)gk_dtype_bytes(g->scale_b->dtype);
    }
    p.groups = {(const int32_t *)g->offs.data,
                g->offs.stride[0],
                BY_K ? p.k : p.m,
                (int)g->offs.shape[0],
                p.m,
                (int)gk_ceil_div(p.n, Tile::BN),
                ctx->error_word};
    const int64_t blocks =
        gk_min_i64(plan->tasks, (int64_t)gk_gpu_of(ctx->index)->num_sms * Tile::PER_SM);
    return launch<grouped_gemm_sm80_kernel<T, BY_K, MODE>>(
        "grouped_gemm", ctx, dim3((unsigned)blocks), Tile::THREADS, Smem<T, Tile, MODE>::BYTES, p);
}

#define INSTANCE(name, dtype, T, by_k, mode)                    \
    {"grouped_gemm_sm80_" name,                                 \
     dtype,                                                     \
     plan_grouped,                                              \
     run_grouped<T, by_k, mode>,                                \
     {by_k, mode, Smem<T, TileOf<T, mode>::type, mode>::BYTES}, \
     NULL}
#define INSTANCES(name, T)                                                              \
    INSTANCE(name "_128x128", element<T>::dtype, T, false, 0),                          \
        INSTANCE(name "_128x128_n", element<T>::dtype, T, false, B_ALONG_N),            \
        INSTANCE(name "_128x128_k", element<T>::dtype, T, true, A_ALONG_M | B_ALONG_N), \
        INSTANCE("any_" name "_128x128", element<T>::dtype, T, false, ANY),             \
        INSTANCE("any_" name "_128x128_k", element<T>::dtype, T, true,                  \
                 ANY | A_ALONG_M | B_ALONG_N)

const gk_cuda_instance instances[] = {INSTANCES("bf16", __nv_bfloat16), INSTANCES("f16", __half),
                                      INSTANCE("i8_128x128", GK_I8, uint8_t, false, 0)};

} // namespace

extern "C" const gk_cuda_table gk_grouped_gemm_sm80_table = {
    instances, sizeof instances / sizeof instances[0], 80, NULL};
