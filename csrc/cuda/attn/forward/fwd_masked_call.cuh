/* SPDX-License-Identifier: BSD-3-Clause */
/* fwd_masked_call.cuh: the kernel of flash_attn_fwd_masked_sm90a and
 * flash_attn_fwd_masked_wide_sm90a, with its plan and launch. The two differ in their tiles.
 * serves_masked says which calls they refuse. */
#ifndef GPUKERN_CUDA_FWD_MASKED_CALL_CUH
#define GPUKERN_CUDA_FWD_MASKED_CALL_CUH

#include "fwd_kernel.cuh"
#include "fwd_mend.cuh"

#include <float.h>
#include <math.h>

namespace {

/* ---- 1. the kernel --------------------------------------------------------------------------- */
template <class T, class Tile>
__global__ void __launch_bounds__(Smem<Tile>::THREADS, 1)
    flash_attn_fwd_masked_sm90a_kernel(const __grid_constant__ FwdMaskedParams x) {
    typedef Smem<Tile> S;
    run_block<Tile>(
        [&](smem_addr smem_s) {
            begin_block<Tile, 1 + S::MASK + (S::BIAS || S::LIFT || S::TABLE)>(x, smem_s);
            if constexpr (S::LIFT) write_ones<Tile>(x.bias.one, smem_s);
        },
        [&](unsigned char *smem, smem_addr smem_s, const FwdTile *tiles) {
            const int warp = threadIdx.x / 32 % 4;
            griddepcontrol_wait();
            if (warp == 1) {
                if constexpr (S::MASK)
                    find_masked<Tile>(x, smem, smem_s);
                else
                    find_tiles<Tile, false>(x, smem, smem_s,
                                            [&](int b) { return sequence_of(x.fwd.problem, b); });
            } else if (warp == 0 && elect_one()) {
                prefetch_tensormap(&x.q);
                prefetch_tensormap(&x.k);
                prefetch_tensormap(&x.v);
                if constexpr (S::MASK)
                    load_tiles<Tile, false>(x, tiles, smem_s, ListedBlocks<Tile>(x.mask));
                else
                    load_tiles<Tile, false>(x, tiles, smem_s);
            } else if (warp == 2) {
                if constexpr (S::MASK) load_words<Tile>(x, tiles, smem_s);
            } else if (warp == 3) {
                if constexpr (S::LIFT) {
                    if (elect_one()) load_lifted<Tile>(x, tiles, smem_s);
                } else if constexpr (S::TABLE) {
                    if (elect_one()) load_distances<Tile>(x, tiles, smem_s);
                } else if constexpr (S::BIAS) {
                    if (elect_one()) {
                        prefetch_tensormap(&x.bias_map);
                        load_bias<Tile>(x, tiles, smem_s);
                    }
                }
            }
        },
        [&](smem_addr smem_s, const FwdTile *tiles, int warpgroup) {
            consume<T, Tile, false>(x, smem_s, tiles, warpgroup);
        });
}

/* ---- 2. plan --------------------------------------------------------------------------------- */

/* True if a tile with this BIAS (FwdBiasParams) serves the bias. */
bool bias_fits(const gk_flash_attn_args *a, const gk_tensor &t, int kind) {
    if (kind == 2)
        return t.shape[2] == 1 && t.shape[3] == a->k.shape[2] && t.shape[0] * t.shape[1] <= 65535 &&
               (t.dtype == a->q.dtype || (t.dtype == GK_F32 && a->q.dtype == GK_BF16));
    return t.dtype == a->q.dtype && t.shape[2] == a->q.shape[2] && t.shape[3] == a->k.shape[2] &&
           t.shape[3] > 1 && t.stride[3] == 1 && t.stride[2] % 2 == 0 &&
           tensor_map_fits(attn_shape(t));
}

/* ---- the tables of distances ---- */
/* The table of one head has an element for each distance in [-rows, keys), where rows and keys are
 * Sq and Sk rounded up to whole blocks. */
struct DistanceTables {
    const float *from;
    float *to;
    int64_t head, step; /* strides of `from` */
    /* Sq rounded up; elements of a table, with some more that reads of whole copies reach */
    int rows, count;
    int seq_q, last; /* Sq; the last index of distance_bias, Sq + Sk - 2 */
    float per_scale;
};

constexpr int TABLE_THREADS = 256;

/* Writes each head's table twice, divided by the scale. The second copy begins one element later.
 * -inf hides a key. */
__global__ void __launch_bounds__(TABLE_THREADS)
    prepare_distances_kernel(const __grid_constant__ DistanceTables x) {
    const int at = blockIdx.x * TABLE_THREADS + threadIdx.x;
    if (at >= 2 * x.count) return;
    const int place = at < x.count ? at : at - x.count + 1;
    const int entry = min(max(place - x.rows + x.seq_q - 1, 0), x.last);
    const float bias = __ldg(x.from + blockIdx.y * x.head + entry * x.step);
    x.to[(int64_t)blockIdx.y * 2 * x.count + at] =
        bias <= -FLT_MAX ? -INFINITY : bias * x.per_scale;
}

DistanceTables distance_tables(const gk_flash_attn_args *a) {
    const gk_tensor &t = *gk_scores_of(a)->distance_bias;
    const int64_t seq_q = a->q.shape[2], seq_k = a->k.shape[2];
    DistanceTables x = {};
    x.from = (const float *)t.data;
    x.head = t.stride[0];
    x.step = t.stride[1];
    x.rows = (int)gk_round_up(seq_q, GK_MASK_TILE);
    x.count = x.rows + (int)gk_round_up(seq_k, GK_MASK_TILE) + 2 * GK_MASK_TILE;
    x.seq_q = (int)seq_q;
    x.last = (int)(seq_q + seq_k - 2);
    x.per_scale = (float)(1 / a->rules.scale);
    return x;
}

/* ---- the lifted biases of keys ---- */
/* A bias of keys, as 16 additional columns of K (Smem::LIFT). keys: Sk rounded up to whole blocks,
 * and one block more, because the first block of a tile may begin at any key. */
struct LiftedKeys {
    gk_tensor from; /* [B or 1, Hq or 1, 1, Sk] */
    uint4 *to;
    int keys, heads;
    float least;     /* a bias of at most this value hides the key */
    float per_scale; /* the product has bias * per_scale times `one` */
    uint32_t one;
};

/* Writes a key's bias times per_scale as three 16-bit numbers that add up to it. They are the first
 * of the key's 16 columns; the others are 0. The product adds them up. */
template <class T, class Bias>
__global__ void __launch_bounds__(TABLE_THREADS)
    lift_keys_kernel(const __grid_constant__ LiftedKeys x) {
    const int key = blockIdx.x * TABLE_THREADS + threadIdx.x;
    if (key >= x.keys) return;
    const int b = blockIdx.y / x.heads, head = blockIdx.y - b * x.heads;
    const float bias =
        to_f32(((const Bias *)x.from.data)[b * x.from.stride[0] + head * x.from.stride[1] +
                                           min(key, (int)x.from.shape[3] - 1) * x.from.stride[3]]);
    const float whole = bias <= x.least ? -INFINITY : bias * x.per_scale,
                high = to_f32(from_f32<T>(whole)),
                rest = isfinite(high) ? whole - high : 0.f, /* inf - inf is NaN */
        middle = to_f32(from_f32<T>(rest));
    uint4 *to =
        x.to + (int64_t)blockIdx.y * x.keys * 2 + key / LIFT_ROWS * 2 * LIFT_ROWS + key % LIFT_ROWS;
    to[0] = make_uint4(pack2<T>(high, middle), pack2<T>(rest - middle, 0.f), 0, 0);
    to[LIFT_ROWS] = make_uint4(0, 0, 0, 0);
}

LiftedKeys lifted_keys(const gk_flash_attn_args *a) {
    LiftedKeys x = {};
    x.from = *gk_scores_of(a)->bias;
    x.keys = (int)gk_round_up(a->k.shape[2], GK_MASK_TILE) + GK_MASK_TILE;
    x.heads = (int)x.from.shape[1];
    x.least = x.from.dtype == GK_F32 ? -FLT_MAX : x.from.dtype == GK_F16 ? -65504.f : -0x1.fep127f;
    /* float16 could not hold bias / scale. So `one` is a power of 2 of at least 1 / scale, and the
     * parts are smaller by this factor. */
    int power = 0;
    if (a->q.dtype == GK_F16)
        while (power < 15 && ldexp(a->rules.scale, power) < 1) ++power;
    x.one = a->q.dtype == GK_F16 ? (uint32_t)(15 + power) << 10 : 0x3f80u;
    x.per_scale = (float)(1 / ldexp(a->rules.scale, power));
    return x;
}
size_t lifted_bytes(const LiftedKeys &x) {
    return (size_t)x.from.shape[0] * (size_t)x.heads * (size_t)x.keys * 2 * sizeof(uint4);
}

template <class T> gk_status lift_keys(const gk_context *ctx, const char *op, const LiftedKeys &x) {
    const dim3 grid((unsigned)gk_ceil_div(x.keys, TABLE_THREADS),
                    (unsigned)(x.from.shape[0] * x.heads));
    return x.from.dtype == GK_F32
               ? launch<lift_keys_kernel<T, float>>(op, ctx, grid, TABLE_THREADS, 0, x)
               : launch<lift_keys_kernel<T, T>>(op, ctx, grid, TABLE_THREADS, 0, x);
}

/* Bytes of the workspace before the tables, see plan_masked. */
size_t tiles_bytes(const FwdParams &x) {
    return (size_t)gk_round_up(64 + (int64_t)x.problem.batch * x.problem.heads_q * x.tiles_q, 256);
}

/* True if an instance can run the call. The modifiers that it refuses here go to
 * flash_attn_fwd_scores_sm80. */
template <class Tile>
bool serves_masked(const gk_cuda_instance *instance, const gk_context *ctx,
                   const gk_flash_attn_args *a) {
    typedef Smem<Tile> S;
    const gk_attn_scores *scores = gk_scores_of(a);
    const gk_attn_rules &r = a->rules;
    constexpr int KIND = ScoresOf<Tile>::BIAS;
    if (!scores || !scores->mask != !S::MASK || !scores->bias != !(KIND == 1 || KIND == 2) ||
        !scores->distance_bias != !S::TABLE)
        return false;
    if (r.softcap > 0 || r.alibi_slopes || r.kv_start || r.kv_end || r.q_start || a->cu_seqlens_q ||
        fwd_by_parts(a))
        return false;
    if (S::MASK && (r.is_causal || r.window_left >= 0 || r.window_right >= 0)) return false;
    if (S::MASK && gk_ceil_div(a->k.shape[2], GK_MASK_TILE) > FWD_MASK_BLOCKS) return false;
    if (scores->bias && !bias_fits(a, *scores->bias, KIND)) return false;
    if (gk_ceil_div(a->q.shape[2], S::BQ) * a->q.shape[1] * a->q.shape[0] > 1 << 30) return false;
    return serves(instance, ctx, a);
}

/* All parameters except the tensor maps and the addresses in the workspace. */
template <class Tile>
FwdMaskedParams masked_params(const gk_context *ctx, const gk_flash_attn_args *a) {
    typedef Smem<Tile> S;
    const gk_attn_scores *scores = gk_scores_of(a);
    FwdMaskedParams x = {};
    (FwdHopperParams &)x = fwd_hopper_params<Tile>(ctx, a);
    /* This kernel neither splits the keys nor puts several heads into one tile. */
    if (x.fwd.splits > 1 || x.tile_heads > 1) {
        x.fwd.splits = 1;
        x.fwd.by_splits = divisor_of(1);
        x.tile_heads = 1;
        x.by_head = divisor_of(INT32_MAX);
        x.by_batch = divisor_of((uint32_t)x.fwd.problem.heads_q);
        x.q_bytes = S::Q::panels * tma_box_of(q_box<Tile>(x)).bytes;
        x.schedule.splits = 1;
        x.schedule.heads = x.fwd.problem.batch * x.fwd.problem.heads_q;
        x.schedule.paired = false;
        x.schedule.short_tiles = 0;
        fwd_make_schedule(&x.schedule, gk_gpu_of(ctx->index)->num_sms);
        x.simple = !a->rules.sinks;
    }
    const Problem &p = x.fwd.problem;
    const gk_gpu *gpu = gk_gpu_of(ctx->index);
    const int heads = p.batch * p.heads_q;
    if (S::MASK) {
        FwdMaskParams &m = x.mask;
        const gk_tensor *t = scores->mask;
        m.data = (const int32_t *)t->data;
        m.store = scores->store;
        m.batch = t->shape[0] == 1 ? 0 : t->stride[0];
        m.head = t->shape[1] == 1 ? 0 : t->stride[1];
        m.at = gk_mask_layout_of(m.store, p.seq_q, p.seq_k, false);
        m.tiles_q = (int)m.at.tiles_q;
        m.tiles_k = (int)m.at.tiles_k;
        m.units = m.tiles_q * heads;
        m.incomplete_block = p.seq_k % GK_MASK_TILE ? m.tiles_k - 1 : -1;
        const double head_bytes = (double)p.seq_k * (p.head_dim + p.head_dim_v) * 2;
        const double kv_heads =
            gk_min_i64((int64_t)(FWD_MASK_L2_SHARE * (double)gpu->l2_bytes / head_bytes), heads);
        const int most = (int)gk_max_i64((int64_t)kv_heads * p.group, 1);
        const int groups = (int)gk_ceil_div(heads, most), width = (int)gk_ceil_div(heads, groups);
        m.first = heads - width * ((heads - 1) / width);
        m.by_first = divisor_of((uint32_t)m.first);
        m.by_width = divisor_of((uint32_t)width);
        m.by_units = divisor_of((uint32_t)(width * m.tiles_q));
        x.schedule.blocks = (int)gk_min_i64(m.units, gpu->num_sms);
    }
    if (S::TABLE) {
        const DistanceTables t = distance_tables(a);
        x.bias.head = scores->distance_bias->shape[0] > 1 ? 2 * t.count : 0;
        x.bias.row = t.count; /* the distance from the first copy to the second */
        x.bias.zero = t.rows;
    } else if (S::LIFT) {
        const LiftedKeys lifted = lifted_keys(a);
        const int64_t head = (int64_t)lifted.keys * 2 * (int64_t)sizeof(uint4);
        x.bias.one = lifted.one;
        x.bias.head = lifted.heads > 1 ? head : 0;
        x.bias.batch = lifted.from.shape[0] > 1 ? lifted.heads * head : 0;
    } else if (S::BIAS) {
        const gk_tensor &t = *scores->bias;
        x.bias.data = t.data;
        x.bias.row = t.stride[2];
        x.bias.of_batch = t.shape[0] > 1;
        x.bias.of_head = t.shape[1] > 1;
        x.bias.batch = x.bias.of_batch ? t.stride[0] : 0;
        x.bias.head = x.bias.of_head ? t.stride[1] : 0;
    }
    return x;
}

/* The parameters do not fit into the plan's own part, so run_masked computes them again.
 *
 * Workspace: 64 bytes for the counter of tiles; one byte of `spoilt` for each tile; the tables of
 * distances or the additional columns of K. */
template <class Tile>
bool plan_masked(const gk_cuda_instance *instance, const gk_context *ctx, const void *args,
                 gk_plan *to) {
    typedef Smem<Tile> S;
    const gk_flash_attn_args *a = (const gk_flash_attn_args *)args;
    if (!serves_masked<Tile>(instance, ctx, a)) return false;
    const FwdMaskedParams x = masked_params<Tile>(ctx, a);
    fwd_plan(ctx, x.fwd, S::BQ, Tile::BKV, 1, x.schedule.units, to);
    to->workspace_bytes = tiles_bytes(x.fwd);
    if (S::LIFT) to->workspace_bytes += lifted_bytes(lifted_keys(a));
    if (S::TABLE)
        to->workspace_bytes += (size_t)gk_scores_of(a)->distance_bias->shape[0] * 2 *
                               (size_t)distance_tables(a).count * sizeof(float);
    return true;
}

template <class T, class Tile>
gk_status run_masked(const gk_context *ctx, const void *args, const gk_plan *, void *workspace) {
    typedef Smem<Tile> S;
    static const char op[] = "gk_flash_attn_fwd";
    const gk_flash_attn_args *a = (const gk_flash_attn_args *)args;
    FwdMaskedParams x = masked_params<Tile>(ctx, a);
    x.mask.next = (int *)workspace;
    x.spoilt = (uint8_t *)workspace + 64;
    gk_status status = make_tensor_map(op, attn_shape(a->q), q_box<Tile>(x), &x.q);
    if (status == GK_OK) status = make_tensor_map(op, attn_shape(a->k), S::K::box(), &x.k);
    if (status == GK_OK) status = make_tensor_map(op, attn_shape(a->v), S::V::box(), &x.v);
    if (status == GK_OK) status = make_tensor_map(op, attn_shape(a->out), wgmma_box(2, 16), &x.out);
    if (status == GK_OK && S::BIAS && !S::TABLE)
        status =
            make_tensor_map(op, attn_shape(*gk_scores_of(a)->bias), S::Bias::box(), &x.bias_map);
    if (status == GK_OK) status = clear_memory(op, ctx, workspace, tiles_bytes(x.fwd));
    if (status == GK_OK && S::LIFT) {
        LiftedKeys lifted = lifted_keys(a);
        lifted.to = (uint4 *)((char *)workspace + tiles_bytes(x.fwd));
        x.bias.data = lifted.to;
        status = lift_keys<T>(ctx, op, lifted);
    }
    if (status == GK_OK && S::TABLE) {
        DistanceTables t = distance_tables(a);
        t.to = (float *)((char *)workspace + tiles_bytes(x.fwd));
        x.bias.data = t.to;
        const dim3 grid((unsigned)gk_ceil_div(2 * t.count, TABLE_THREADS),
                        (unsigned)gk_scores_of(a)->distance_bias->shape[0]);
        status = launch<prepare_distances_kernel>(op, ctx, grid, TABLE_THREADS, 0, t);
    }
    if (status == GK_OK)
        status = launch<flash_attn_fwd_masked_sm90a_kernel<T, Tile>>(
            op, ctx, dim3((unsigned)x.schedule.blocks), S::THREADS, S::BYTES, x);
    return status == GK_OK ? fwd_mend(ctx, a, x.spoilt, S::BQ) : status;
}

/* ---- 3. the rows of a table ------------------------------------------------------------------ */
#define MASKED_INSTANCE(name, T, dtype, TILE)                  \
    {name,                                                     \
     dtype,                                                    \
     plan_masked<TILE>,                                        \
     run_masked<T, TILE>,                                      \
     {TILE::HEAD_DIM, TILE::HEAD_DIM_V, 0, Smem<TILE>::BYTES}, \
     NULL}
#define MASKED_INSTANCES(KERNEL, label, TILE)                             \
    MASKED_INSTANCE(KERNEL "_bf16_" label, __nv_bfloat16, GK_BF16, TILE), \
        MASKED_INSTANCE(KERNEL "_f16_" label, __half, GK_F16, TILE)

} // namespace

#endif
