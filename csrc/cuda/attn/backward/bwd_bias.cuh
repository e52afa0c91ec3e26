/* SPDX-License-Identifier: BSD-3-Clause */
/* bwd_bias.cuh: the bias of flash_attn_bwd_masked_wide_sm90a, and the sums of its gradient.
 *
 * Shared memory has no room for a stage of a bias. Warpgroup 0 loads the bias of its next step into
 * registers (BwdWideConsumer::load_bias), so a bias may broadcast over any dimension but the keys.
 * dS is stored as [rows][keys]. If the gradient has an element for each pair, TMA stores dS as the
 * gradient. Otherwise warps 9 and 11 of the producer, which have little else to do, sum it. Each of
 * them reads half of the rows of dS of each step from shared memory and adds them to float32 sums,
 * in no fixed order:
 *
 *   [.., Sq, Sk]   the whole tile, 16 bytes of a lane at a time
 *   [.., 1, Sk]    the columns, once a head
 *   distance       the diagonals
 *
 * The dS that they read has been rounded to 16 bits, as it is for dq and dk. A last kernel rounds
 * the sums to the bias's dtype. If a gradient is not finite, the sums of the first launch are
 * cleared before the second (bwd_masked.cuh). */
#ifndef GPUKERN_CUDA_BWD_BIAS_CUH
#define GPUKERN_CUDA_BWD_BIAS_CUH

#include "bwd_masked.cuh"
#include "bwd_wide.cuh"

namespace {

/* ---- 1. sums of a step ----------------------------------------------------------------------- */
/* The layout of a step's dS in shared memory. */
typedef wgmma_panels<64, 64> StepDs;

/* Adds rows [first, first + 32) of dS to `keys`, the sums of the lane's two columns. */
template <class T>
__device__ __forceinline__ void add_columns(float2 &keys, int first, smem_addr ds_s) {
#pragma unroll 8
    for (int i = first; i < first + 32; ++i) {
        const float2 ds = unpack2<T>(ld_shared_32(ds_s + StepDs::offset_of(i, 2 * laneid())));
        keys.x += ds.x;
        keys.y += ds.y;
    }
}
__device__ __forceinline__ void flush_columns(float *to, const BwdWork &w, const float2 &keys) {
    const int key = w.j0 + 2 * laneid();
    if (key < w.seq.seq_k) atomicAdd(to + key, keys.x);
    if (key + 1 < w.seq.seq_k) atomicAdd(to + key + 1, keys.y);
}

/* Adds rows [first, first + 32) of dS to a head's sums, whose rows are `pitch` elements apart. */
template <class T>
__device__ __forceinline__ void add_tile(float *to, const BwdWork &w, int i0, int pitch, int first,
                                         smem_addr ds_s) {
    const int key = w.j0 + laneid() % 16 * 4;
#pragma unroll 4
    for (int i = first + laneid() / 16; i < first + 32; i += 2) {
        const uint2 four = ld_shared_64(ds_s + StepDs::offset_of(i, laneid() % 16 * 4));
        if (i0 + i >= w.seq.seq_q || key >= pitch) continue;
        const float2 a = unpack2<T>(four.x), b = unpack2<T>(four.y);
        red_add_128<0>(__cvta_generic_to_global(to + (int64_t)(i0 + i) * pitch + key), a.x, a.y,
                       b.x, b.y);
    }
}

/* Adds the diagonals of rows [first, first + 32) of dS to a head's sums by distance. to: the sum
 * for key w.j0 and row i0. Sums exist for the offsets `least` to `most` from it.
 *
 * In pass r a lane takes word u = (lane + r) % 32, which is columns 2 u and 2 u + 1, of rows 2 r
 * and 2 r + 1. Its four elements lie on the diagonals 2 e, 2 e + 1, 2 e - 1 and 2 e with e = u - r.
 * So e is `lane` in all passes, or `lane` - 32 if u wraps around.
 *
 * `on`, `after` and `before` are the sums of the diagonals 2 e, 2 e + 1 and 2 e - 1. Their index is
 * 1 for e = lane - 32. */
template <class T>
__device__ __forceinline__ void add_diagonals(float *to, int least, int most, int first,
                                              smem_addr ds_s) {
    const int lane = laneid();
    float on[2] = {0, 0}, after[2] = {0, 0}, before[2] = {0, 0};
#pragma unroll 8
    for (int r = first / 2; r < first / 2 + 16; ++r) {
        const int u = (lane + r) % 32;
        const float2 a = unpack2<T>(ld_shared_32(ds_s + StepDs::offset_of(2 * r, 2 * u))),
                     b = unpack2<T>(ld_shared_32(ds_s + StepDs::offset_of(2 * r + 1, 2 * u)));
        const bool wraps = lane + r >= 32;
        on[0] += wraps ? 0 : a.x + b.y;
        after[0] += wraps ? 0 : a.y;
        before[0] += wraps ? 0 : b.x;
        on[1] += wraps ? a.x + b.y : 0;
        after[1] += wraps ? a.y : 0;
        before[1] += wraps ? b.x : 0;
    }
    /* the diagonal 2 e + 1 of a lane is the diagonal 2 e - 1 of the next lane */
    const float next[2] = {__shfl_sync(0xffffffffu, before[0], (lane + 1) % 32),
                           __shfl_sync(0xffffffffu, before[1], (lane + 1) % 32)};
    if (lane < 31) after[0] += next[0];
    after[1] += lane < 31 ? next[1] : next[0];
#pragma unroll
    for (int s = 0; s < 2; ++s) {
        const int at = 2 * (lane - 32 * s);
        if (at >= least && at <= most) atomicAdd(to + at, on[s]);
        if (at + 1 >= least && at + 1 <= most) atomicAdd(to + at + 1, after[s]);
    }
}

/* Warps 9 and 11 run this. They read dS of each step once warpgroup 1 has stored it. send_ds
 * explains why dS is not overwritten before. */
template <class T, class Tile>
__device__ __forceinline__ void collect_bias(const BwdMaskedParams &x, const BwdWork &w,
                                             smem_addr smem_s) {
    typedef BwdSmem<Tile> S;
    static_assert(std::is_same<typename S::Scores, StepDs>::value, "dS has one panel of 64 rows");
    const int steps = steps_of<Tile>(x.g, w);
    const int first = threadIdx.x / 32 == 9 ? 0 : 32; /* the warp's first row */
    float2 keys = make_float2(0, 0);
    float *last = NULL; /* the head's sums to which `keys` must be added */
#pragma unroll 1
    for (int n = 0; n < steps; ++n) {
        bar_sync(BAR_SENT_DS + (n & 1), BWD_SENT_DS<Tile>);
        if (x.bias_sums) {
            const int i0 = (int)ld_shared_32(smem_s + S::COLLECT + 8 * (n & 1)),
                      head = (int)ld_shared_32(smem_s + S::COLLECT + 8 * (n & 1) + 4);
            const smem_addr ds_s = smem_s + S::DS_AT + (n & 1) * S::Scores::bytes;
            float *to = x.bias_sums + w.b * x.sums_batch + head * x.sums_head;
            if constexpr (ScoresOf<Tile>::BIAS == BWD_DISTANCE) {
                const int zero = w.j0 - i0 + w.seq.seq_q - 1;
                add_diagonals<T>(to + zero, -zero, w.seq.seq_q + w.seq.seq_k - 2 - zero, first,
                                 ds_s);
            } else if (x.sums_row == 0) {
                if (to != last) {
                    if (last) flush_columns(last, w, keys);
                    keys = make_float2(0, 0);
                    last = to;
                }
                add_columns<T>(keys, first, ds_s);
            } else {
                add_tile<T>(to, w, i0, (int)x.sums_row, first, ds_s);
            }
        }
    }
    if (last) flush_columns(last, w, keys);
}

/* ---- 2. between and after the launches ------------------------------------------------------- */
constexpr int BIAS_THREADS = 256, BIAS_CLEAR_BLOCKS = 264;

/* sums [rows][pitch] of which `columns` columns are rounded into `to` [rows][columns]. */
struct BwdBiasSums {
    float *sums;
    void *to;
    int64_t rows;
    int columns, pitch;
    const unsigned *spoilt;
};

/* Clears the sums of the first launch if the second launch computes them again. */
__global__ void __launch_bounds__(BIAS_THREADS)
    bwd_bias_clear_kernel(const __grid_constant__ BwdBiasSums x) {
    if (*x.spoilt == 0) return;
    const int64_t step = (int64_t)gridDim.x * BIAS_THREADS;
    for (int64_t i = (int64_t)blockIdx.x * BIAS_THREADS + threadIdx.x; i < x.rows * x.pitch;
         i += step)
        x.sums[i] = 0;
}

template <class T>
__global__ void __launch_bounds__(BIAS_THREADS)
    bwd_bias_round_kernel(const __grid_constant__ BwdBiasSums x) {
    const int64_t i = (int64_t)blockIdx.x * BIAS_THREADS + threadIdx.x, row = i / x.columns;
    if (row < x.rows) ((T *)x.to)[i] = from_f32<T>(x.sums[row * x.pitch + (i - row * x.columns)]);
}

/* ---- 3. plan --------------------------------------------------------------------------------- */
/* A bias that warpgroup 0 loads, and its gradient: the same functions as BwdBiasByTma. */
template <class T, class Tile> struct BwdBiasByLoads {
    static constexpr bool DISTANCE = ScoresOf<Tile>::BIAS == BWD_DISTANCE;

    /* True if the gradient broadcasts, so that several pairs are added to one of its elements. */
    static bool summed(const gk_flash_attn_bwd_args *a) {
        const gk_tensor *t = gk_dbias_of(a);
        const gk_tensor &q = a->fwd.q;
        return t &&
               (t->shape[0] < q.shape[0] || t->shape[1] < q.shape[1] || t->shape[2] < q.shape[2]);
    }
    static bool serves(const gk_flash_attn_bwd_args *a) {
        const gk_attn_scores *scores = gk_scores_of_bwd(a);
        const gk_tensor *bias = scores->bias;
        if (DISTANCE)
            return !bias && scores->distance_bias && scores->distance_bias->dtype == GK_F32 &&
                   scores->distance_bias->stride[1] == 1;
        if (!bias || scores->distance_bias || bias->dtype != a->fwd.q.dtype) return false;
        /* one load takes the bias of two keys */
        bool good = bias->shape[3] == a->fwd.k.shape[2] && bias->shape[3] > 1 &&
                    bias->stride[3] == 1 && (uintptr_t)bias->data % 4 == 0;
        for (int d = 0; d < 3; ++d)
            good = good && (bias->shape[d] == 1 || bias->stride[d] % 2 == 0);
        return good && (!gk_dbias_of(a) || summed(a) || bias_fits(a, *gk_dbias_of(a), false));
    }
    /* The sums of a bias. For a bias by distance they are the gradient itself, which is float32. */
    static BwdBiasSums sums_of(const gk_flash_attn_bwd_args *a, const BwdMaskedParams &x) {
        const gk_tensor *t = DISTANCE ? gk_ddistance_of(a) : gk_dbias_of(a);
        BwdBiasSums s = {
            x.bias_sums, t->data, gk_numel(t) / t->shape[t->ndim - 1], (int)t->shape[t->ndim - 1],
            0,           x.spoilt};
        s.pitch = DISTANCE ? s.columns : (int)gk_round_up(s.columns, 4);
        return s;
    }
    static size_t bytes(const gk_flash_attn_bwd_args *a) {
        if (DISTANCE || !summed(a)) return 0;
        const BwdBiasSums s = sums_of(a, BwdMaskedParams());
        return (size_t)s.rows * (size_t)s.pitch * sizeof(float);
    }
    static gk_status prepare(const gk_context *ctx, const gk_flash_attn_bwd_args *a,
                             BwdMaskedParams &x, void *workspace) {
        const gk_attn_scores *scores = gk_scores_of_bwd(a);
        if constexpr (DISTANCE) {
            const gk_tensor &t = *scores->distance_bias, *grad = gk_ddistance_of(a);
            x.bias_head = t.shape[0] == 1 ? 0 : t.stride[0] * 4;
            x.bias_data = (const char *)t.data + (a->fwd.q.shape[2] - 1) * 4;
            if (!grad) return GK_OK;
            x.bias_sums = (float *)grad->data;
            x.sums_head = grad->shape[0] == 1 ? 0 : grad->shape[1];
            return clear_memory(OP, ctx, grad->data, (size_t)gk_numel(grad) * sizeof(float));
        } else {
            const gk_tensor &bias = *scores->bias, *grad = gk_dbias_of(a);
            x.bias_data = (const char *)bias.data;
            x.bias_batch = bias.shape[0] == 1 ? 0 : bias.stride[0] * 2;
            x.bias_head = bias.shape[1] == 1 ? 0 : bias.stride[1] * 2;
            x.bias_row = bias.shape[2] == 1 ? 0 : bias.stride[2] * 2;
            if (!grad) return GK_OK;
            x.with_dbias = !summed(a);
            if (x.with_dbias)
                return make_tensor_map(OP, attn_shape(*grad), BwdSmem<Tile>::Scores::box(),
                                       &x.dbias);
            x.bias_sums = (float *)workspace;
            const BwdBiasSums s = sums_of(a, x);
            x.sums_row = grad->shape[2] == 1 ? 0 : s.pitch;
            x.sums_head = grad->shape[1] == 1 ? 0 : grad->shape[2] * s.pitch;
            x.sums_batch = grad->shape[0] == 1 ? 0 : grad->shape[1] * grad->shape[2] * s.pitch;
            return clear_memory(OP, ctx, workspace, bytes(a));
        }
    }
    static gk_status between(const gk_context *ctx, const gk_flash_attn_bwd_args *a,
                             const BwdMaskedParams &x) {
        if (!x.bias_sums) return GK_OK;
        return launch<bwd_bias_clear_kernel>(OP, ctx, dim3(BIAS_CLEAR_BLOCKS), BIAS_THREADS, 0,
                                             sums_of(a, x));
    }
    static gk_status finish(const gk_context *ctx, const gk_flash_attn_bwd_args *a,
                            const BwdMaskedParams &x) {
        if (!x.bias_sums || DISTANCE) return GK_OK;
        const BwdBiasSums s = sums_of(a, x);
        const dim3 grid((unsigned)gk_ceil_div(s.rows * s.columns, BIAS_THREADS));
        return launch<bwd_bias_round_kernel<T>>(OP, ctx, grid, BIAS_THREADS, 0, s);
    }
};

} // namespace

#endif
