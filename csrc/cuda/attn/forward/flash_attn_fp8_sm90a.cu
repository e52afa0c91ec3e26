/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_fp8_sm90a: attention of e4m3 codes on Hopper's 8-bit tensor cores, dense and packed,
 * for accumulate="fast". It is FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608) with a stale
 * softmax reference (docs/numerics.md):
 *
 *  S = Q K^T   s = scale q_scale k_scale S, -inf for keys that a row does not see
 *  P = 2^(s - m) as codes   O = O + (P share) V
 *  out = v_scale O / (sum P + 2^(sink - m)) + v_mean sum P / (sum P + 2^(sink - m))
 *
 * With a v scale for each block, v_scale above is the largest one and share is the block's scale
 * relative to it.
 *
 * q [.., Sq, D], k [.., Sk, D], v [.., Sk, Dv] e4m3, with strides that TMA can describe; out [..,
 * Sq, Dv] bf16, f16 or f32; lse [.., Sq] float32. D and Dv are multiples of 8 up to HEAD_DIM and
 * HEAD_DIM_V; TMA fills the remaining columns with zeros. P V is summed over all keys in the tensor
 * cores' accumulators, which keep 14 bits. That is accurate enough if the caller has subtracted the
 * mean from v; v_mean adds it again.
 *
 * Work split: as in flash_attn_fwd_sm90a. In the producer warpgroup one thread loads by TMA, one
 * warp finds the tiles and two warps transpose V in shared memory. Each consumer warpgroup owns 64
 * rows of S and O.
 *
 *  A step of a consumer, key block j                        (tensor cores work in the background)
 *    issue S_j = Q K_j^T
 *    issue O  += P_(j-1) V_(j-1)
 *    wait for S_j alone, release K_j
 *    P_j = 2^(S_j - m) as codes, in registers of their own  runs under O += P_(j-1) V_(j-1)
 *    wait for O, release V_(j-1); rows whose weights leave the range of the codes redo the block
 *
 * At head_dim 256 O takes 128 registers, S 64 and P 32, and the weights overwrite S. A redo must
 * then compute S_j again, so K_j is released only when it is known that no row of the warpgroup
 * redoes the block.
 *
 * Not handled: accumulate="precise", softcap, ALiBi, strides and offsets that are not multiples of
 * 16 bytes, per-block scales with a left window or kv_start, per-block scales of q that end before
 * a tile's rows do, small seq_q with GQA. flash_attn_fp8_decoded and flash_attn_fp8_sm80 serve
 * those. */
#include "fp8_consumer.cuh"
#include "fwd_loop.cuh"

namespace {

/* ---- 1. the kernel --------------------------------------------------------------------------- */
template <class Tile, bool BLOCKS>
__global__ void __launch_bounds__(Smem<Tile>::THREADS, 1)
    flash_attn_fp8_sm90a_kernel(const __grid_constant__ Fp8HopperParams x) {
    run_block<Tile>([](smem_addr smem_s) { fp8_begin_block<Tile>(smem_s); },
                    [&](unsigned char *smem, smem_addr smem_s, const FwdTile *tiles) {
                        /* the shuffle shows the compiler that the value is uniform over the warp */
                        const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0);
                        if (warp == 1) {
                            find_tiles<Tile, false>(x.f, smem, smem_s, [&](int b) {
                                return sequence_of(x.f.fwd.problem, b);
                            });
                        } else if (warp >= 2) {
                            if (warp == 2 && blockIdx.x == 0 && x.f.fwd.problem.cu_q) {
                                griddepcontrol_wait();
                                check_sequences(x.f.fwd.problem);
                            }
                            fp8_transpose_tiles<Tile>(x, tiles, smem_s, warp - 2);
                        } else if (elect_one()) {
                            prefetch_tensormap(&x.f.q);
                            prefetch_tensormap(&x.f.k);
                            prefetch_tensormap(&x.f.v);
                            /* wait until the previous kernel has written its results and has read
                             * `out` */
                            griddepcontrol_wait();
                            fp8_load_tiles<Tile>(x.f, tiles, smem_s);
                        }
                    },
                    [&](smem_addr smem_s, const FwdTile *tiles, int warpgroup) {
                        fp8_consume<Tile, BLOCKS>(x, smem_s, tiles, warpgroup);
                    });
}

/* ---- 2. launcher and table ------------------------------------------------------------------- */
bool mean_fits(const gk_attn_mean &m) {
    return !m.data ||
           (m.column == 1 && m.head % 4 == 0 && m.batch % 4 == 0 && (uintptr_t)m.data % 16 == 0);
}

/* True if q has a scale for the first row of each warpgroup of a tile, including rows past the
 * last query. */
bool q_scale_fits(const gk_flash_attn_fp8_args *a, int rows) {
    const int64_t seq_q = a->fwd.cu_seqlens_q ? a->fwd.max_seqlen_q : a->fwd.q.shape[2];
    return gk_attn_scale_of(a->q_scale).block == 0 ||
           gk_round_up(seq_q, rows) <= gk_round_up(seq_q, GK_ATTN_SCALE_TOKENS);
}

/* An instance's key. */
struct Fp8Key {
    enum {
        HEAD_DIM,
        HEAD_DIM_V,
        BLOCKS, /* 1: k or v has a scale for each block of tokens */
        SMEM,   /* bytes of shared memory */
        ROWS    /* rows of a tile */
    };
};

bool serves(const gk_cuda_instance *instance, const gk_context *ctx,
            const gk_flash_attn_fp8_args *a) {
    const gk_flash_attn_args &f = a->fwd;
    const gk_attn_rules &rules = f.rules;
    const int last = f.q.ndim - 1;
    const bool blocks =
        gk_attn_scale_of(a->k_scale).block != 0 || gk_attn_scale_of(a->v_scale).block != 0;
    /* key blocks begin at the first key of a block of scales */
    const bool aligned = rules.window_left < 0 && !rules.kv_start;
    return !gk_attn_is_precise(a) && f.q.shape[last] <= instance->key[Fp8Key::HEAD_DIM] &&
           f.v.shape[last] <= instance->key[Fp8Key::HEAD_DIM_V] &&
           blocks == (instance->key[Fp8Key::BLOCKS] != 0) && (!blocks || aligned) &&
           !(rules.softcap > 0) && !rules.alibi_slopes && mean_fits(gk_attn_mean_of(a->v_mean)) &&
           q_scale_fits(a, instance->key[Fp8Key::ROWS]) && tensor_map_fits(attn_shape(f.q)) &&
           tensor_map_fits(attn_shape(f.k)) && tensor_map_fits(attn_shape(f.v)) &&
           rows_aligned(f.out) && smem_fits(ctx, instance->key[Fp8Key::SMEM]);
}

template <class Tile>
bool plan(const gk_cuda_instance *instance, const gk_context *ctx, const void *args, gk_plan *to) {
    const gk_flash_attn_fp8_args *a = (const gk_flash_attn_fp8_args *)args;
    if (!serves(instance, ctx, a)) return false;
    Fp8HopperParams &x = gk_own<Fp8HopperParams>(to);
    x = {fwd_hopper_params<Tile>(ctx, &a->fwd),
         gk_attn_scale_of(a->q_scale),
         gk_attn_scale_of(a->k_scale),
         gk_attn_scale_of(a->v_scale),
         gk_attn_mean_of(a->v_mean),
         a->fwd.out.dtype};
    if (x.f.tile_heads > 1) return false;
    fwd_plan(ctx, x.f.fwd, Smem<Tile>::BQ, Tile::BKV, 1, x.f.schedule.units, to);
    return true;
}

gk_status finish(const char *op, const gk_context *ctx, const gk_flash_attn_args *a,
                 const FwdParams &p) {
    return a->out.dtype == GK_F16 ? fwd_finish<__half>(op, ctx, a, p)
                                  : fwd_finish<__nv_bfloat16>(op, ctx, a, p);
}

template <class Tile, bool BLOCKS>
gk_status run(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    typedef Smem<Tile> S;
    static const char op[] = "gk_flash_attn_fp8";
    const gk_flash_attn_args &a = ((const gk_flash_attn_fp8_args *)args)->fwd;
    Fp8HopperParams x = gk_own<Fp8HopperParams>(plan);
    fwd_place(&x.f.fwd, workspace);
    gk_status status = make_tensor_map(op, attn_shape(a.q), S::Q::box(), &x.f.q);
    if (status == GK_OK) status = make_tensor_map(op, attn_shape(a.k), S::K::box(), &x.f.k);
    if (status == GK_OK) status = make_tensor_map(op, attn_shape(a.v), S::V::box(), &x.f.v);
    if (status != GK_OK) return status;
    status = launch<flash_attn_fp8_sm90a_kernel<Tile, BLOCKS>>(
        op, ctx, dim3((unsigned)x.f.schedule.blocks), S::THREADS, S::BYTES, x, true);
    return status == GK_OK ? finish(op, ctx, &a, x.f.fwd) : status;
}

#define INSTANCE(name, TILE, BLOCKS)                                                \
    {"flash_attn_fp8_sm90a_" name,                                                  \
     GK_E4M3,                                                                       \
     plan<TILE>,                                                                    \
     run<TILE, BLOCKS>,                                                             \
     {TILE::HEAD_DIM, TILE::HEAD_DIM_V, BLOCKS, Smem<TILE>::BYTES, Smem<TILE>::BQ}, \
     NULL}

const gk_cuda_instance instances[] = {INSTANCE("d64", Fp8Hopper64, false),
                                      INSTANCE("d64_block", Fp8Hopper64, true),
                                      INSTANCE("d128_wide", Fp8Hopper128Wide, false),
                                      INSTANCE("d128", Fp8Hopper128, false),
                                      INSTANCE("d128_block", Fp8Hopper128, true),
                                      INSTANCE("d192", Fp8Hopper192, false),
                                      INSTANCE("d256", Fp8Hopper256, false),
                                      INSTANCE("d256_block", Fp8Hopper256, true)};

/* The time of a call with tiles of this many rows, in waves of 128-row tiles. It is exact without a
 * mask and roughly right with one. */
double waves_of(const gk_context *ctx, const gk_flash_attn_args &f, int rows) {
    const int64_t batch = f.cu_seqlens_q ? f.cu_seqlens_q->shape[0] - 1 : f.q.shape[0];
    const int64_t tiles =
        f.cu_seqlens_q ? f.q.shape[0] / rows + batch : batch * gk_ceil_div(f.q.shape[2], rows);
    return (double)gk_ceil_div(tiles * f.q.shape[1], gk_gpu_of(ctx->index)->num_sms) *
           (rows > 128 ? FP8_WIDE_TILE : 1);
}

/* Chooses the first instance that serves the call. Two serve head_dim 128, and the one whose waves
 * take less time is chosen. */
bool plan_best(const gk_context *ctx, const void *args, gk_plan *to) {
    const gk_flash_attn_args &f = ((const gk_flash_attn_fp8_args *)args)->fwd;
    const bool narrow = waves_of(ctx, f, 128) < waves_of(ctx, f, 192);
    for (const gk_cuda_instance &instance : instances) {
        if ((instance.run == run<Fp8Hopper128Wide, false> && narrow) ||
            !instance.plan(&instance, ctx, args, to))
            continue;
        to->kernel = &instance;
        return true;
    }
    return false;
}

} // namespace

extern "C" const gk_cuda_table gk_flash_attn_fp8_sm90a_table = {
    instances, sizeof instances / sizeof instances[0], 90, plan_best};
