/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_fwd_sm90a: attention on Hopper's tensor cores, 16-bit, dense and packed, every modifier.
 * FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608) with a reference for the softmax that may be stale (stale_softmax.cuh):
 *   S = Q K^T   s = score(S) or -inf where the row does not see the key   P = 2^(s - m)   O = O + P V
 *   out = O / (sum P + 2^(sink - m))   lse = m + log(sum P + 2^(sink - m))
 * q [.., Sq, D]  k [.., Sk, D]  v [.., Sk, Dv]  out [.., Sq, Dv], as TMA can describe them;  lse [.., Sq] float32.
 * D, Dv: multiples of 8 up to HEAD_DIM, HEAD_DIM_V; TMA fills the columns after them with zeros.
 *
 * Work split: a block stays on its SM and takes units of tiles (fwd_schedule.cuh). Of the producer warpgroup one warp
 * finds the tiles and one thread loads Q, K and V by TMA; each consumer warpgroup owns 64 rows of S and O. Where tiles
 * would not fill the GPU the keys of a tile are split; parts go through the workspace.
 *
 * A step of a consumer: block j of the keys                        (tensor cores work in the background)
 *   issue S_j = Q K_j^T
 *   issue O  += P_(j-1) V_(j-1)
 *   wait for S_j alone, release K_j
 *   P_j = 2^(S_j - m)                                              runs under O += P_(j-1) V_(j-1)
 *   wait for O, release V_(j-1); rows that are out of range take the block again
 *
 * Not handled, served by flash_attn_fwd_sm80: strides, offsets and scales that TMA or a stale reference cannot take. */
#include "../ptx/cluster.cuh"
#include "../ptx/griddepcontrol.cuh"
#include "fwd_consumer.cuh"

namespace {

/* ---- 1. a consumer warpgroup ---------------------------------------------------------------------------- */
/* The tile's next step of a consumer warpgroup; the same for all of a block, since turns are counted. true: tile `then` follows
 * tile `now` so that its first scores can be issued behind this one's last values. Of a shorter tile the next Q is not
 * there yet. */
template <class Tile>
__device__ __forceinline__ bool follows(const FwdHopperParams &x, const FwdTile &now, const FwdTile &then) {
    static_assert(FWD_FOLLOWED > Tile::STAGES, "every warpgroup's rows see a block of such a tile");
    const int4 a = *(const int4 *)&now.steps, b = *(const int4 *)&then.steps;
    const int least = Tile::WARPGROUPS == 2 ? min(a.x, a.y) : min(min(a.x, a.y), a.z);
    const int least_then = Tile::WARPGROUPS == 2 ? min(b.x, b.y) : min(min(b.x, b.y), b.z);
    return x.simple && !x.units.sloped && a.w >= FWD_FOLLOWED && a.w - least < Tile::STAGES && b.w > 0 &&
           least_then > 0;
}

/* Tile after tile. */
template <class T, class Tile, bool MODIFIED>
__device__ __forceinline__ void consume(const FwdHopperParams &x, smem_addr smem_s, const FwdTile *tiles,
                                        int warpgroup) {
    typedef Smem<Tile> S;
    typedef Consumer<T, Tile, MODIFIED> C;
    const tma_steps<Tile::Q_BUFFERS> q = {smem_s + S::Q_RING};
    const tma_steps<S::TILE_STAGES> described = {smem_s + S::TILE_RING};
    if (warpgroup == Tile::WARPGROUPS - 1) bar_arrive(1, 256); /* warpgroup 0 has the first turn */
    C c(x, smem_s, warpgroup);
#pragma unroll 1
    for (int n = 0, step = 0;; ++n) {
        q.wait_full(n);
        const FwdTile &t = tiles[n % S::TILE_STAGES];
        const int4 steps = *(const int4 *)&t.steps;
        const int blocks = steps.w, own = warpgroup == 0 ? steps.x : warpgroup == 1 ? steps.y : steps.z;
        if (blocks < 0) break;
        const int lead = MODIFIED && own > 0 ? max(t.nearest - own + 1, 0) : 0;
        const smem_addr q_s = smem_s + q.stage(n) * S::Q::bytes;
        typename C::At at = {step, lead, lead + own, q_s, C::AHEAD && n > 0 ? q.empty(n - 1) : 0};
        c.softmax.clear();
        if (MODIFIED && lead > 0) { /* V of these blocks comes after the next Q */
            if (C::AHEAD) c.release_q(at.q_empty), at.q_empty = 0;
            c.pass(step, lead);
        }
        if (own > 0) {
            c.first_block(t, at);
            c.other_blocks(t, at);
            smem_addr next_s = 0;
            if (C::EARLY) {
                described.wait_full(n + 1);
                if (follows<Tile>(x, t, tiles[(n + 1) % S::TILE_STAGES])) {
                    q.wait_full(n + 1);
                    next_s = smem_s + q.stage(n + 1) * S::Q::bytes;
                }
            }
            c.last_values(t, at, next_s, [&] { store_simple<T, Tile>(x, t, c.softmax, c.o, q_s); });
        } else {
            clear(c.o), c.release_q(C::AHEAD ? at.q_empty : q.empty(n)), c.ready = false;
        }
        if (!C::EARLY || !c.ready) {
            c.pass(step + at.end, blocks - at.end);
            if (own == 0 && blocks > 0)
                turn_begin<Tile>(warpgroup), turn_end<Tile>(warpgroup); /* that of the last product */
            if (x.fwd.splits > 1)
                store_part<T, Tile>(x, t, c.softmax, c.o);
            else if (!C::AHEAD)
                store_direct<T, Tile>(x, t, c.softmax, c.o);
            else if (x.simple)
                store_simple<T, Tile>(x, t, c.softmax, c.o, q_s);
            else
                store_tile<T, Tile>(x, t, c.softmax, c.o, q_s);
        }
        step += blocks;
        __syncwarp(); /* all lanes have read t */
        if (laneid() == 0) mbarrier_arrive(described.empty(n));
    }
    if (laneid() == 0) tma_store_wait_group_read<0>(); /* shared memory stays until TMA has read it */
}

/* ---- 2. the kernel -------------------------------------------------------------------------------------- */
template <class T, class Tile, bool MODIFIED>
__global__ void __launch_bounds__(Smem<Tile>::THREADS, 1)
    flash_attn_fwd_sm90a_kernel(const __grid_constant__ FwdHopperParams x) {
    typedef Smem<Tile> S;
    extern __shared__ __align__(1024) unsigned char smem[];
    const smem_addr smem_s = cvta_to_shared(smem);
    FwdTile *tiles = (FwdTile *)(smem + S::TILES);
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0); /* the compiler sees that lanes agree */
    if (threadIdx.x == 0) {
        /* a warp's rows of Q are its own until its store has read them */
        typename S::QRing(smem_s + S::Q_RING).init(Tile::WARPGROUPS * 4);
        typename S::TileRing(smem_s + S::TILE_RING).init(Tile::WARPGROUPS * 4 + 1);
        typename S::KvRing(smem_s + S::K_RING).init(Tile::WARPGROUPS);
        typename S::KvRing(smem_s + S::V_RING).init(Tile::WARPGROUPS);
        mbarrier_init(smem_s + S::OVER, 1);
        fence_mbarrier_init();
        mbarrier_arrive(smem_s + S::OVER); /* its first phase is over, and there is no second */
    }
    if (x.stacked > 1) { /* rows that no head fills are finite */
        for (int i = threadIdx.x; i < S::K_AT / 16; i += S::THREADS)
            st_shared_128(smem_s + i * 16, make_uint4(0, 0, 0, 0));
        fence_proxy_async();
    }
    griddepcontrol_launch_dependents();
    __syncthreads();
    if (warpgroup == Tile::WARPGROUPS) {
        setmaxnreg_dec<Tile::PRODUCER_REGISTERS>();
        const int warp = threadIdx.x / 32 % 4;
        if (warp == 1) {
            find_tiles<Tile, MODIFIED>(x, smem, smem_s);
        } else if (warp == 0 && elect_one()) {
            prefetch_tensormap(&x.q), prefetch_tensormap(&x.k), prefetch_tensormap(&x.v);
            griddepcontrol_wait(); /* what the kernel before wrote is there, and nobody reads out any more */
            load_tiles<Tile, MODIFIED>(x, tiles, smem_s);
        } else if (warp == 2 && blockIdx.x == 0 && x.fwd.problem.cu_q) {
            griddepcontrol_wait();
            check_sequences(x.fwd.problem);
        }
    } else {
        setmaxnreg_inc<Tile::CONSUMER_REGISTERS>();
        consume<T, Tile, MODIFIED>(x, smem_s, tiles, warpgroup);
    }
}

/* ---- 3. launcher and table ------------------------------------------------------------------------------ */
/* What TMA copies of Q at once, 64 columns: a tile's rows, or by stacked heads those of each. */
template <class Tile> smem_box q_box(const FwdHopperParams &x) {
    return x.stacked > 1 ? wgmma_box(2, x.fwd.problem.seq_q, x.stacked) : Smem<Tile>::Q::box();
}

template <class Tile> FwdHopperParams params_of(const gk_context *ctx, const gk_flash_attn_args *a) {
    constexpr int BQ = Smem<Tile>::BQ;
    FwdHopperParams x = {};
    x.units = score_units(a->rules.scale, a->rules.softcap, a->rules.alibi_slopes != NULL);
    x.stacked = x.units.plain || !x.units.sloped ? fwd_stacked(problem_of(ctx, a), BQ) : 1;
    x.fwd = fwd_params(ctx, a, BQ, Tile::BKV, 1, x.stacked);
    const Problem &p = x.fwd.problem;
    x.by_head = divisor_of(x.stacked > 1 ? (uint32_t)p.seq_q : INT32_MAX);
    x.q_bytes = Smem<Tile>::Q::panels * tma_box_of(q_box<Tile>(x)).bytes;
    x.schedule.tiles = x.fwd.tiles_q, x.schedule.splits = x.fwd.splits;
    x.schedule.heads = (p.cu_q ? p.heads_q : p.batch * p.heads_q) / x.stacked;
    x.schedule.paired = p.rules.right >= 0 && p.rules.left < 0 && x.fwd.splits == 1;
    x.by_group = divisor_of((uint32_t)gk_max_i64(p.group, 1));
    x.by_batch = divisor_of((uint32_t)gk_max_i64(p.heads_q / x.stacked, 1));
    const int sms = gk_gpu_of(ctx->index)->num_sms;
    fwd_deal(&x.schedule, sms);
    if (p.cu_q) { /* each sequence ends in a tile, or a pair, of its own */
        const int64_t units = x.schedule.heads * (p.total_q / BQ + (int64_t)p.batch) * x.schedule.splits;
        x.schedule.units = (int)gk_min_i64(units, INT32_MAX), x.schedule.blocks = (int)gk_min_i64(units, sms);
    }
    const Rules &r = p.rules;
    x.reads = p.cu_q || r.alibi_slopes || r.kv_start || r.kv_end || r.q_start;
    x.simple = x.fwd.splits == 1 && x.stacked == 1 && !r.sinks;
    if (!x.reads) x.seq = dense_sequence(p);
    return x;
}

bool serves(const gk_cuda_instance *row, const gk_context *ctx, const gk_flash_attn_args *a) {
    const int last = a->q.ndim - 1;
    const bool modified = a->rules.softcap > 0 || a->rules.alibi_slopes || !(a->rules.scale > 1e-30);
    return a->q.shape[last] <= row->key[0] && a->v.shape[last] <= row->key[1] && modified == (row->key[2] != 0) &&
           tensor_map_fits(attn_shape(a->q)) && tensor_map_fits(attn_shape(a->k)) &&
           tensor_map_fits(attn_shape(a->v)) && tensor_map_fits(attn_shape(a->out)) && smem_fits(ctx, row->key[3]);
}

template <class Tile> bool plan(const gk_cuda_instance *row, const gk_context *ctx, const void *args, gk_plan *to) {
    const gk_flash_attn_args *a = (const gk_flash_attn_args *)args;
    if (!serves(row, ctx, a)) return false;
    const FwdHopperParams &x = gk_own<FwdHopperParams>(to) = params_of<Tile>(ctx, a);
    fwd_plan(ctx, x.fwd, Smem<Tile>::BQ, Tile::BKV, 1, x.schedule.units, to);
    return true;
}

template <class T, class Tile, bool MODIFIED>
gk_status run(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    typedef Smem<Tile> S;
    static const char op[] = "gk_flash_attn_fwd";
    const gk_flash_attn_args *a = (const gk_flash_attn_args *)args;
    FwdHopperParams x = gk_own<FwdHopperParams>(plan);
    fwd_place(&x.fwd, workspace);
    gk_status status = make_tensor_map(op, attn_shape(a->q), q_box<Tile>(x), &x.q);
    if (status == GK_OK) status = make_tensor_map(op, attn_shape(a->k), S::K::box(), &x.k);
    if (status == GK_OK) status = make_tensor_map(op, attn_shape(a->v), S::V::box(), &x.v);
    if (status == GK_OK) status = make_tensor_map(op, attn_shape(a->out), wgmma_box(2, 16), &x.out);
    if (status != GK_OK) return status;
    status = launch<flash_attn_fwd_sm90a_kernel<T, Tile, MODIFIED>>(op, ctx, dim3((unsigned)x.schedule.blocks),
                                                                    Smem<Tile>::THREADS, Smem<Tile>::BYTES, x, true);
    return status == GK_OK ? fwd_finish<T>(op, ctx, x.fwd) : status;
}

#define ROW(name, T, dtype, TILE, MODIFIED)                                           \
    {name,                                                                            \
     dtype,                                                                           \
     plan<TILE>,                                                                      \
     run<T, TILE, MODIFIED>,                                                          \
     {TILE::HEAD_DIM, TILE::HEAD_DIM_V, MODIFIED, Smem<TILE>::BYTES, Smem<TILE>::BQ}, \
     NULL}
#define ROWS(label, TILE)                                                                     \
    ROW("flash_attn_fwd_sm90a_bf16_" label, __nv_bfloat16, GK_BF16, TILE, false),             \
        ROW("flash_attn_fwd_sm90a_f16_" label, __half, GK_F16, TILE, false),                  \
        ROW("flash_attn_fwd_sm90a_bf16_" label "_score", __nv_bfloat16, GK_BF16, TILE, true), \
        ROW("flash_attn_fwd_sm90a_f16_" label "_score", __half, GK_F16, TILE, true)

const gk_cuda_instance instances[] = {ROWS("d64", FwdHopper64),           ROWS("d64_short", FwdHopper64Short),
                                      ROWS("d96", FwdHopper96),           ROWS("d128", FwdHopper128),
                                      ROWS("d192_128", FwdHopper192v128), ROWS("d192", FwdHopper192),
                                      ROWS("d256", FwdHopper256)};

/* By the first row that serves the call, but for short sequences one whose tiles waste less. */
bool plan_best(const gk_context *ctx, const void *args, gk_plan *to) {
    const gk_flash_attn_args *a = (const gk_flash_attn_args *)args;
    const int64_t seq_q = a->cu_seqlens_q ? a->max_seqlen_q : a->q.shape[2];
    const bool wasteful = seq_q <= (a->rules.is_causal ? FWD_SHORT_CAUSAL : FWD_SHORT);
    for (const gk_cuda_instance &row : instances) {
        if (row.dtype != a->q.dtype || (row.key[4] > 128 && wasteful) || !row.plan(&row, ctx, args, to)) continue;
        to->kernel = &row;
        return true;
    }
    return false;
}

} // namespace

extern "C" const gk_cuda_table gk_flash_attn_fwd_sm90a_table = {instances, sizeof instances / sizeof instances[0], 90,
                                                                plan_best};
