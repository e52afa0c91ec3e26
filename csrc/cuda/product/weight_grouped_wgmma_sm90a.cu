/* SPDX-License-Identifier: BSD-3-Clause */
/* weight_grouped_wgmma_sm90a: weight_gemm for groups of rows of a by WGMMA, for the forms of weight
 * that experts have (quant/weight_groups.cuh, weight_wgmma.cuh).
 *
 * Tiles of 32 and 128 tokens: a block for each SM lists the groups' tasks and takes every
 * gridDim.x-th. The ring is not drained between tiles: the producer fills stages for the next tile
 * while the consumers store this one, from registers.
 *
 * Tiles of 256 tokens: a block takes one tile, and its results go through the ring's memory. There
 * are as many blocks as there can be tasks, and those without one return. In a loop over tiles,
 * ptxas lets each product wait for the one before if there are four widths (C7512), and two waste
 * more products than the loop saves (docs/worklog/weight_gemm.md).
 *
 * Either way, rows behind the last group's end are tasks that store zeros.
 *
 * A tile multiplies only as many tokens as it has, rounded up to STEP: each width has its own loop,
 * its own sums, and its own tensor map with the height of its box.
 *
 * All instances add a row's products in the same order, one chain over all of k. So a row's bits
 * depend neither on its group's size nor on the instance (weight_invariant.cu). A batch-invariant
 * call with an activation has no tiles of 256 tokens.
 *
 * Workspace: none. Refused forms and operands: weight_form.cuh, and more than WEIGHT_MOST_GROUPS
 * groups. */
#include "../../core/invariant.h"
#include "../ptx/movmatrix.cuh"
#include "weight_grouped.cuh"
#include "weight_grouped_price.cuh"
#include "weight_wgmma.cuh"

namespace {

template <class F, int NT_> struct WeightGrouped : WeightWgmma<F, NT_, 2> {
    static constexpr bool PERSISTENT = NT_ < 256;
    static constexpr int STEP = NT_ == 32 ? 32 : 64, WIDTHS = NT_ / STEP;
    /* The list of tasks, behind the ring. Tiles of 256 tokens have none. */
    static constexpr int LIST_AT =
        WeightWgmma<F, NT_, 2>::RING_AT + tma_ring<WeightWgmma<F, NT_, 2>::STAGES>::bytes;
    static constexpr int SMEM =
        WeightWgmma<F, NT_, 2>::SMEM + (PERSISTENT ? (int)sizeof(WeightGroupList) : 0);
    static_assert(LIST_AT <= SMEM && SMEM <= 227 * 1024, "one block fits an SM");
};
/* The same stages, multiplied by N tokens. */
template <class K, int N> struct WeightWidth : K {
    static constexpr int NT = N;
};

constexpr int MOST_WIDTHS = 4;

struct WeightGroupedParams {
    WeightWgmma90Params x;
    CUtensorMap tokens[MOST_WIDTHS]; /* boxes for STEP, 2 STEP, .. tokens */
    int box[MOST_WIDTHS];            /* rows of each */
    Groups groups;
    int64_t bias_group; /* elements */
    int tile_rows;      /* packed tiles of a group's weight rows */
};

/* The list of tasks. Its address is computed anew for each tile: a register that holds it over the
 * products makes ptxas let each product wait for the one before. */
template <class K> __device__ __forceinline__ const WeightGroupList &tasks_at(smem_addr smem_s) {
    extern __shared__ __align__(1024) unsigned char smem[];
    opaque(smem_s);
    return *(const WeightGroupList *)(smem + (smem_s - cvta_to_shared(smem)) + K::LIST_AT);
}

/* ---- 1 a block's ring and its producer ------------------------------------------------------- */
/* Sets up the ring and waits until the previous kernel's results are visible. */
template <int STAGES> __device__ __forceinline__ void begin_ring(const tma_ring<STAGES> &ring) {
    if (threadIdx.x == 0) {
        ring.init(8);
        fence_mbarrier_init();
    }
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
}

/* Copies a task's stages. width: index of the map for its tokens. */
template <class K>
__device__ __forceinline__ void
produce_task(const WeightGroupedParams &p, tma_ring<K::STAGES> &ring, smem_addr smem_s,
             const WeightTask &at, int width, int steps, uint64_t again, uint64_t once) {
    typedef typename K::F F;
    typedef typename K::Stage S;
    const int tokens = p.box[width];
    const CUtensorMap *const a = &p.tokens[width];
    const int row = at.group * p.tile_rows + at.col * K::RT,
              token0 = box_row(at.row, tokens, p.x.m);
#pragma unroll 1
    for (int step = 0; step < steps; ++step, ring.advance()) {
        const smem_addr stage_s = smem_s + ring.stage * S::BYTES;
        ring.wait_empty();
        mbarrier_arrive_expect_tx(ring.full(), S::copied(tokens));
        produce_codes<F, S, K::ROWS, K::TILES>(p.x.w, stage_s, ring.full(), row, step * K::TILES,
                                               at.shared ? again : once);
        produce_rest<F, S, K::ROWS, K::TILES>(
            p.x.w, a, stage_s, smem_s + K::SIDE_AT + ring.stage * S::SIDE, ring.full(),
            row * GK_TILE, step * K::TILES, token0, again, once);
    }
}

template <class K>
__device__ __forceinline__ void produce_grouped(const WeightGroupedParams &p,
                                                tma_ring<K::STAGES> &ring, smem_addr smem_s) {
    prefetch_maps<typename K::F>(p.x.w, &p.tokens[0]);
    const uint64_t again = l2_last_out(), once = l2_first_out();
    const WeightGroupList &list = tasks_at<K>(smem_s);
    for (int task = blockIdx.x; task < tasks_in(p.groups, list); task += gridDim.x) {
        const WeightTask at = weight_task<K::NT>(p.groups, list, task, gridDim.x);
        if (at.group == p.groups.count) continue;
        produce_task<K>(p, ring, smem_s, at, (at.end - at.row - 1) / K::STEP, p.x.steps, again,
                        once);
    }
}

/* ---- 2 epilogue ------------------------------------------------------------------------------ */
/* Stores a warp's sums of 16 weight rows x N tokens, from token0 on. Only rows of the task are
 * stored. */
template <class K, int N>
__device__ __forceinline__ void store_grouped(const WeightGroupedParams &p, const WeightTask &at,
                                              int token0, float (&sum)[N / 2]) {
    typedef typename K::F::T T;
    const Finish &f = p.x.f;
    unsigned thread = threadIdx.x;
    opaque(thread); /* so that no register holds what follows from it over the products */
    const int lane = thread % 32, col0 = at.col * K::ROWS + thread / 32 * 16;
    if (p.x.plain && p.x.vectors) {
        /* A lane has two tokens of rows lane / 4 and lane / 4 + 8. Transposed, it has four rows of
         * token lane / 4: 32 bytes of a token by four lanes. */
        const bool upper = lane & 2, odd = lane & 1;
        const int col = col0 + lane % 4 * 4;
        int row = token0 + lane / 4;
        T *to = (T *)f.out + row * f.out_row + col;
#pragma unroll
        for (int j = 0; j < N / 8; ++j, row += 8, to += 8 * f.out_row) {
            const uint32_t lo = movmatrix_trans(pack2<T>(sum[4 * j], sum[4 * j + 1])),
                           hi = movmatrix_trans(pack2<T>(sum[4 * j + 2], sum[4 * j + 3]));
            /* Lanes 0 and 1 of four take the low rows, of their own pair and of that two lanes
             * further; then even lanes take the lower pairs, odd ones the upper. */
            const uint32_t other = __shfl_xor_sync(~0u, upper ? lo : hi, 2);
            const uint32_t first = upper ? other : lo, second = upper ? hi : other;
            const uint32_t next = __shfl_xor_sync(~0u, odd ? first : second, 1);
            if (col < p.x.n && row >= at.row && row < at.end)
                *(uint2 *)to = make_uint2(odd ? next : first, odd ? second : next);
        }
        return;
    }
    const int col = col0 + lane / 4;
    float bias[2] = {}, alpha = 1;
    if (f.alpha) alpha = *f.alpha;
    if (f.bias)
#pragma unroll
        for (int h = 0; h < 2; ++h)
            if (col + 8 * h < p.x.n)
                bias[h] = load_any(f.bias, f.bias_dtype,
                                   at.group * p.bias_group + (col + 8 * h) * f.bias_step);
#pragma unroll 1
    for (int part = 0; part < N / 32; ++part) { /* not unrolled: shifts the sums down */
        /* Neighbours belong to one token, because activate_16 lets them share a reciprocal. */
        float v[16];
#pragma unroll
        for (int i = 0; i < 16; ++i)
            v[i] = fmaf(sum[i / 4 * 4 + i % 2 * 2 + i / 2 % 2], alpha, bias[i % 2]);
        if (f.out_dtype == GK_F32)
            activate_in_place<16>(f.activation, v);
        else
            activate_16<16>(f.activation, v);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const int row = token0 + 32 * part + i / 4 * 8 + lane % 4 * 2 + i / 2 % 2,
                      n = col + i % 2 * 8;
            if (n >= p.x.n || row < at.row || row >= at.end) continue;
            if (f.out_dtype == GK_F32)
                ((float *)f.out)[row * f.out_row + n] = v[i];
            else
                ((T *)f.out)[row * f.out_row + n] = from_f32<T>(v[i]);
        }
#pragma unroll
        for (int i = 0; i < N / 2 - 16; ++i) sum[i] = sum[i + 16];
    }
}

/* Rows of no group, by THREADS threads. */
template <class K, int THREADS>
__device__ __forceinline__ void store_zeros(const WeightGroupedParams &p, const WeightTask &at) {
    const Finish &f = p.x.f;
    const int words = f.out_dtype == GK_F32 ? 2 : 1, cols = min(K::ROWS, p.x.n - at.col * K::ROWS);
#pragma unroll 1
    for (int i = threadIdx.x; i < (at.end - at.row) * K::ROWS; i += THREADS) {
        if (i % K::ROWS >= cols) continue;
        const int64_t to = (at.row + i / K::ROWS) * f.out_row + at.col * K::ROWS + i % K::ROWS;
        if (words == 2)
            ((float *)f.out)[to] = 0;
        else
            ((uint16_t *)f.out)[to] = 0;
    }
}

/* ---- 3 consumers ----------------------------------------------------------------------------- */
/* Releases the stages that consume_weight_wgmma has not: it does so one tile of k later. */
template <class K>
__device__ __forceinline__ void release_last(const tma_ring<K::STAGES> &ring, int steps) {
    if (threadIdx.x % 32) return;
    mbarrier_arrive(ring.before());
    if (K::EACH == 1 && steps > 1)
        mbarrier_arrive(ring.barriers_s +
                        8 * (K::STAGES + (ring.stage + K::STAGES - 2) % K::STAGES));
}

/* Multiplies a task by the least width that holds its tokens, and stores it. */
template <class K, int N>
__device__ __forceinline__ void consume_grouped(const WeightGroupedParams &p,
                                                tma_ring<K::STAGES> &ring, smem_addr smem_s,
                                                int task, int tokens) {
    if constexpr (N > K::STEP)
        if (tokens <= N - K::STEP) {
            consume_grouped<K, N - K::STEP>(p, ring, smem_s, task, tokens);
            return;
        }
    float sum[N / 2];
    const int box = p.box[N / K::STEP - 1];
    consume_weight_wgmma<WeightWidth<K, N>>(p.x, ring, smem_s, sum, box * WGMMA_ROW_BYTES,
                                            p.x.steps);
    release_last<K>(ring, p.x.steps);
    /* found again, so that no register holds it over the products */
    const WeightTask at = weight_task<K::NT>(p.groups, tasks_at<K>(smem_s), task, gridDim.x);
    store_grouped<K, N>(p, at, box_row(at.row, box, p.x.m), sum);
}

template <class K>
__global__ void __launch_bounds__(K::THREADS, 1)
    weight_grouped_wgmma_kernel(const __grid_constant__ WeightGroupedParams p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    const smem_addr first_s = cvta_to_shared(smem);
    const smem_addr smem_s =
        (first_s + WGMMA_BLOCK_BYTES - 1) / WGMMA_BLOCK_BYTES * WGMMA_BLOCK_BYTES;
    tma_ring<K::STAGES> ring(smem_s + K::RING_AT);
    begin_ring(ring);
    if (threadIdx.x / 32 == 1)
        list_groups<false, K::NT>(p.groups, const_cast<WeightGroupList &>(tasks_at<K>(smem_s)),
                                  threadIdx.x % 32);
    __syncthreads();
    if (threadIdx.x >= 256) {
        setmaxnreg_dec<40>();
        if (threadIdx.x < 288 && elect_one()) produce_grouped<K>(p, ring, smem_s);
        __syncwarp();
    } else {
        setmaxnreg_inc<232>();
        for (int task = blockIdx.x; task < tasks_in(p.groups, tasks_at<K>(smem_s));
             task += gridDim.x) {
            const WeightTask at =
                weight_task<K::NT>(p.groups, tasks_at<K>(smem_s), task, gridDim.x);
            if (at.group == p.groups.count)
                store_zeros<K, 256>(p, at);
            else
                consume_grouped<K, K::NT>(p, ring, smem_s, task, at.end - at.row);
        }
    }
}

/* ---- 4 a tile of 256 tokens a block ---------------------------------------------------------- */
template <class K>
__device__ __forceinline__ void produce_tile(const WeightGroupedParams &p,
                                             tma_ring<K::STAGES> &ring, smem_addr smem_s,
                                             const WeightTask &at, int steps) {
    const int width = (at.end - at.row - 1) / K::STEP;
    prefetch_maps<typename K::F>(p.x.w, &p.tokens[width]);
    produce_task<K>(p, ring, smem_s, at, width, steps, l2_last_out(), l2_first_out());
}

/* Multiplies by the least width that holds `tokens`, and leaves the sums in shared memory. */
template <class K, int N>
__device__ __forceinline__ void consume_tile(const WeightGroupedParams &p,
                                             tma_ring<K::STAGES> &ring, smem_addr smem_s,
                                             int tokens, int steps) {
    if constexpr (N > K::STEP)
        if (tokens <= N - K::STEP) {
            consume_tile<K, N - K::STEP>(p, ring, smem_s, tokens, steps);
            return;
        }
    typedef WeightWidth<K, N> Width;
    float sum[N / 2];
    consume_weight_wgmma<Width>(p.x, ring, smem_s, sum, p.box[N / K::STEP - 1] * WGMMA_ROW_BYTES,
                                steps);
    bar_sync(1, 256); /* both warpgroups have finished reading the stages */
    stage_sums<Width>(smem_s, sum);
}

template <class K>
__device__ __forceinline__ void store_tile(const WeightGroupedParams &p, smem_addr smem_s,
                                           const WeightTask &at) {
    typedef typename K::F::T T;
    constexpr int EIGHTS = K::ROWS / 8;
    const Finish &f = p.x.f;
    const int col_at = threadIdx.x % EIGHTS * 8, col = at.col * K::ROWS + col_at;
    const int token0 = box_row(at.row, p.box[(at.end - at.row - 1) / K::STEP], p.x.m);
    float bias[8] = {}, alpha = 1;
    if (col >= p.x.n) return;
    if (!p.x.plain) {
        if (f.alpha) alpha = *f.alpha;
        if (f.bias)
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (col + i < p.x.n)
                    bias[i] = load_any(f.bias, f.bias_dtype,
                                       at.group * p.bias_group + (col + i) * f.bias_step);
    }
#pragma unroll 1
    for (int row = at.row + threadIdx.x / EIGHTS; row < at.end; row += 256 / EIGHTS) {
        const smem_addr from_s = smem_s + ((row - token0) * K::LD + col_at) * 4;
        const uint4 x = ld_shared_128(from_s), y = ld_shared_128(from_s + 16);
        float v[8] = {__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z),
                      __uint_as_float(x.w), __uint_as_float(y.x), __uint_as_float(y.y),
                      __uint_as_float(y.z), __uint_as_float(y.w)};
        if (p.x.plain && p.x.vectors)
            *(uint4 *)((T *)f.out + row * f.out_row + col) =
                make_uint4(pack2<T>(v[0], v[1]), pack2<T>(v[2], v[3]), pack2<T>(v[4], v[5]),
                           pack2<T>(v[6], v[7]));
        else
            store_eight<T>(p.x, row, col, v, bias, alpha);
    }
}

template <class K>
__global__ void __launch_bounds__(K::THREADS, 1)
    weight_grouped_tile_kernel(const __grid_constant__ WeightGroupedParams p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    __shared__ WeightTask found;
    const smem_addr first_s = cvta_to_shared(smem);
    const smem_addr smem_s =
        (first_s + WGMMA_BLOCK_BYTES - 1) / WGMMA_BLOCK_BYTES * WGMMA_BLOCK_BYTES;
    tma_ring<K::STAGES> ring(smem_s + K::RING_AT);
    begin_ring(ring);
    if (threadIdx.x / 32 == 1) { /* lists tasks where the first stages will lie */
        WeightGroupList &list = *(WeightGroupList *)(smem + (smem_s - first_s));
        list_groups<false, K::NT>(p.groups, list, threadIdx.x % 32);
        __syncwarp();
        if (threadIdx.x % 32 == 0)
            found = weight_task<K::NT, false>(p.groups, list, (int)blockIdx.x);
        fence_proxy_async();
    }
    __syncthreads();
    const WeightTask at = found;
    if (at.group < 0) return;
    if (at.group == p.groups.count) {
        store_zeros<K, K::THREADS>(p, at);
        return;
    }
    const int steps = p.x.steps;
    if (threadIdx.x >= 256) {
        setmaxnreg_dec<40>();
        if (threadIdx.x < 288 && elect_one()) produce_tile<K>(p, ring, smem_s, at, steps);
        __syncwarp();
    } else {
        setmaxnreg_inc<232>();
        consume_tile<K, K::NT>(p, ring, smem_s, at.end - at.row, steps);
        bar_sync(1, 256);
        store_tile<K>(p, smem_s, at);
    }
}

/* ---- 5 plan and run -------------------------------------------------------------------------- */
template <class K>
bool plan_weight_grouped(const gk_cuda_instance *instance, const gk_context *ctx, const void *args,
                         gk_plan *plan) {
    const gk_weight_gemm_args *g = (const gk_weight_gemm_args *)args;
    if (gk_gpu_of(ctx->index)->smem_per_block < K::SMEM + 64) return false;
    /* Both epilogues let two results share a reciprocal, but not the same two. */
    if (!K::PERSISTENT && gk_batch_invariant() && g->activation > GK_ACT_RELU) return false;
    return plan_weight_groups<K>(instance, ctx, g, true, 1, plan);
}

template <class K>
gk_status run_weight_grouped(const gk_context *ctx, const void *args, const gk_plan *plan, void *) {
    const gk_weight_gemm_args *g = (const gk_weight_gemm_args *)args;
    WeightGroupedParams p = {};
    WeightWgmma90Params &x = p.x;
    const gk_status status = weight_codes<typename K::F, typename K::Stage, K::ROWS>(
        g, group_rows(g) * g->offs->shape[0], &x.w);
    if (status != GK_OK) return status;
    x.m = (int)weight_rows(g->a);
    for (int i = 0; i < K::WIDTHS; ++i) {
        p.box[i] = (int)gk_min_i64((i + 1) * K::STEP, gk_round_up(x.m, 8));
        if (const gk_status failed = make_tensor_map(
                "weight_gemm", token_panels(g), wgmma_box(2, p.box[i], K::TILES), &p.tokens[i]))
            return failed;
    }
    x.f = weight_finish(g);
    p.bias_group = bias_of_groups(g, &x.f);
    x.plain = is_plain(x.f, g->a.dtype);
    x.n = (int)g->n;
    x.steps = (int)gk_ceil_div(x.w.cols, K::TILES);
    x.vectors = x.n % 8 == 0 && (uintptr_t)x.f.out % 16 == 0;
    p.groups = weight_groups(ctx, g, K::ROWS);
    p.tile_rows = (int)(group_rows(g) / GK_TILE);
    if constexpr (K::PERSISTENT) {
        const int64_t blocks = gk_min_i64(plan->tasks, gk_gpu_of(ctx->index)->num_sms);
        return launch<weight_grouped_wgmma_kernel<K>>("weight_gemm", ctx, dim3((unsigned)blocks),
                                                      K::THREADS, K::SMEM, p, true);
    } else {
        return launch<weight_grouped_tile_kernel<K>>(
            "weight_gemm", ctx, dim3((unsigned)plan->tasks), K::THREADS, K::SMEM, p, true);
    }
}

#define GROUPED90(name, T, C, GROUP, ZERO, NT)                              \
    {"weight_gemm_grouped_wgmma_" name,                                     \
     element<T>::dtype,                                                     \
     plan_weight_grouped<WeightGrouped<WeightForm<T, C, GROUP, ZERO>, NT>>, \
     run_weight_grouped<WeightGrouped<WeightForm<T, C, GROUP, ZERO>, NT>>,  \
     {},                                                                    \
     NULL}
#define GROUPED90_ALL(name, T, C, GROUP, ZERO)              \
    GROUPED90(name "_32x128", T, C, GROUP, ZERO, 32),       \
        GROUPED90(name "_128x128", T, C, GROUP, ZERO, 128), \
        GROUPED90(name "_256x128", T, C, GROUP, ZERO, 256)

const gk_cuda_instance instances[] = {
    GROUPED90_ALL("bf16_int4_g128", __nv_bfloat16, NIBBLES, 128, false),
    GROUPED90_ALL("bf16_int4_g32", __nv_bfloat16, NIBBLES, 32, false),
    GROUPED90_ALL("bf16_int4_g64", __nv_bfloat16, NIBBLES, 64, false),
    GROUPED90_ALL("bf16_uint4_zero_g128", __nv_bfloat16, NIBBLES, 128, true),
    GROUPED90_ALL("bf16_uint4_zero_g64", __nv_bfloat16, NIBBLES, 64, true),
    GROUPED90_ALL("bf16_mxfp4", __nv_bfloat16, E2M1, 32, false),
    GROUPED90_ALL("bf16_nvfp4", __nv_bfloat16, E2M1, 16, false),
    GROUPED90_ALL("bf16_int8_g128", __nv_bfloat16, INT8, 128, false),
    GROUPED90_ALL("f16_int4_g128", __half, NIBBLES, 128, false),
    GROUPED90_ALL("f16_int4_g64", __half, NIBBLES, 64, false),
    GROUPED90_ALL("f16_uint4_zero_g128", __half, NIBBLES, 128, true),
    GROUPED90_ALL("f16_uint4_zero_g64", __half, NIBBLES, 64, true),
    GROUPED90_ALL("f16_int8_g128", __half, INT8, 128, false),
};

bool plan_best(const gk_context *ctx, const void *args, gk_plan *plan) {
    if (!((const gk_weight_gemm_args *)args)->offs) return false;
    return plan_cheapest(instances, sizeof instances / sizeof instances[0], ctx, args, plan);
}

} // namespace

extern "C" const gk_cuda_table gk_weight_grouped_wgmma_table = {
    instances, sizeof instances / sizeof instances[0], 90, plan_best};
