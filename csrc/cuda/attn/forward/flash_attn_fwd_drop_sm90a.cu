/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_fwd_drop_sm90a: attention with dropout on Hopper's tensor cores, 16-bit, dense and
 * packed. The equations and the steps are those of flash_attn_fwd_sm90a. Two equations differ:
 *
 *  O = O + (P Z) V   out = O / ((1 - p) (sum P + 2^(sink - m)))
 *
 * Z is 1 for pairs that are kept and 0 for others (csrc/formats/attn_dropout.h). A consumer warp
 * draws the bits of its rows in registers after it has issued the products of a step, so that
 * Philox runs while the tensor cores work. The bits are never stored (fwd_drop.cuh).
 *
 * Not handled: softcap, ALiBi, head_dim above 128, calls with so few tiles that their keys are
 * split, calls with several heads in a tile, a float32 result, 2^31 rows or more.
 * flash_attn_fwd_drop_sm80 serves those. */
#include "fwd_drop.cuh"
#include "fwd_kernel.cuh"

namespace {

/* ---- 1. the kernel --------------------------------------------------------------------------- */
template <class T, class Tile>
__global__ void __launch_bounds__(Smem<Tile>::THREADS, 1)
    flash_attn_fwd_drop_sm90a_kernel(const __grid_constant__ FwdDropParams x) {
    run_block<Tile>([&](smem_addr smem_s) { begin_block<Tile>(x, smem_s); },
                    [&](unsigned char *smem, smem_addr smem_s, const FwdTile *tiles) {
                        const int warp = threadIdx.x / 32 % 4;
                        if (warp == 1) {
                            find_tiles<Tile, false>(x, smem, smem_s, [&](int b) {
                                return sequence_of(x.fwd.problem, b);
                            });
                        } else if (warp == 0 && elect_one()) {
                            prefetch_tensormap(&x.q);
                            prefetch_tensormap(&x.k);
                            prefetch_tensormap(&x.v);
                            load_tiles<Tile, false>(x, tiles, smem_s);
                        } else if (warp == 2 && blockIdx.x == 0 && x.fwd.problem.cu_q) {
                            check_sequences(x.fwd.problem);
                        }
                    },
                    [&](smem_addr smem_s, const FwdTile *tiles, int warpgroup) {
                        consume<T, Tile, false>(x, smem_s, tiles, warpgroup);
                    });
}

/* ---- 2. launcher ----------------------------------------------------------------------------- */
template <class Tile>
bool plan_drop(const gk_cuda_instance *instance, const gk_context *ctx, const void *args,
               gk_plan *to) {
    const gk_flash_attn_args *a = (const gk_flash_attn_args *)args;
    if (fwd_by_parts(a) || !drop_rows_fit(a) || !serves(instance, ctx, a)) return false;
    FwdHopperParams &x = gk_own<FwdHopperParams>(to) = fwd_hopper_params<Tile>(ctx, a);
    if (x.fwd.splits > 1 || x.tile_heads > 1) return false;
    x.box_log2 = FWD_DROP_BOX_LOG2;
    fwd_plan(ctx, x.fwd, Smem<Tile>::BQ, Tile::BKV, 1, x.schedule.units, to);
    return true;
}

template <class T, class Tile>
gk_status run_drop(const gk_context *ctx, const void *args, const gk_plan *plan, void *) {
    typedef Smem<Tile> S;
    static const char op[] = "gk_flash_attn_fwd";
    const gk_flash_attn_args *a = (const gk_flash_attn_args *)args;
    FwdDropParams x = {};
    (FwdHopperParams &)x = gk_own<FwdHopperParams>(plan);
    x.drop = dropout_of(a);
    gk_status status = make_tensor_map(op, attn_shape(a->q), q_box<Tile>(x), &x.q);
    if (status == GK_OK) status = make_tensor_map(op, attn_shape(a->k), S::K::box(), &x.k);
    if (status == GK_OK) status = make_tensor_map(op, attn_shape(a->v), S::V::box(), &x.v);
    if (status == GK_OK) status = make_tensor_map(op, attn_shape(a->out), wgmma_box(2, 16), &x.out);
    /* The launch does not start early: the consumers read the seed, which the previous kernel may
     * write. */
    if (status == GK_OK)
        status = launch<flash_attn_fwd_drop_sm90a_kernel<T, Tile>>(
            op, ctx, dim3((unsigned)x.schedule.blocks), S::THREADS, S::BYTES, x);
    return status == GK_OK ? fwd_finish<T>(op, ctx, a, x.fwd) : status;
}

/* ---- 3. table -------------------------------------------------------------------------------- */
#define INSTANCE(name, T, dtype, TILE)                                             \
    {name,                                                                         \
     dtype,                                                                        \
     plan_drop<TILE>,                                                              \
     run_drop<T, TILE>,                                                            \
     {TILE::HEAD_DIM, TILE::HEAD_DIM_V, false, Smem<TILE>::BYTES, Smem<TILE>::BQ}, \
     NULL}
#define INSTANCES(label, TILE)                                                       \
    INSTANCE("flash_attn_fwd_drop_sm90a_bf16_" label, __nv_bfloat16, GK_BF16, TILE), \
        INSTANCE("flash_attn_fwd_drop_sm90a_f16_" label, __half, GK_F16, TILE)

typedef FwdDrop<FwdHopper64Short, 4> Drop64;
typedef FwdDrop<FwdHopper96, 4> Drop96;
typedef FwdDrop<FwdHopper128, 4> Drop128;

const gk_cuda_instance instances[] = {INSTANCES("d64", Drop64), INSTANCES("d96", Drop96),
                                      INSTANCES("d128", Drop128)};

} // namespace

extern "C" const gk_cuda_table gk_flash_attn_fwd_drop_sm90a_table = {
    instances, sizeof instances / sizeof instances[0], 90, NULL};
