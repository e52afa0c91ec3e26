/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_bwd_masked_sm90a: the gradients of attention with a stored mask
 * (../../../core/attn_mask.h), with a bias [.., Sq, Sk], or with both, on Hopper's tensor cores,
 * 16-bit, dense, head_dim up to 128. The equations, the steps and the consumers are those of
 * flash_attn_bwd_sm90a.
 *
 * Work split with a mask: a thread block owns 128 keys of one kv head. The mask has a list of
 * blocks of 128 queries for this tile of keys. The thread block takes the queries of this list, for
 * every query head of the group, BQ rows a step. Tiles of keys with long lists start first. If all
 * pairs of a block of queries are visible, the step runs as without a mask. For a partial block the
 * producer loads one bit for each pair into shared memory, and P and dS of hidden pairs become 0.
 * Without a mask, a thread block takes the rows that flash_attn_bwd_sm90a would take. The bits then
 * encode causal and the window.
 *
 * A tile of keys that many more queries see than the others is cut into parts (bwd_split.cuh). Each
 * part is a thread block that takes a share of the queries and stores its dK and dV in float32. The
 * part that ends last adds these sums in the order of the parts and rounds them, so the bits of the
 * result do not depend on the order in which blocks run.
 *
 * TMA loads the bias, BQ rows x 128 keys a step. It is added to the exponents. Its gradient is dS,
 * which TMA stores from the same shared memory that the product dQ reads.
 *
 * A hidden row or key may hold NaN or inf, and 0 times NaN is NaN. So there are two launches. The
 * first sets `spoilt` if a gradient is not finite. The second returns at once if `spoilt` is 0.
 * Otherwise it computes everything again, and its producer replaces NaN and inf of Q, K, V and dO
 * in shared memory by 0. NaN and inf of a visible pair still reach the gradients, because they make
 * lse or delta of its row NaN.
 *
 * Not handled: a float32 bias; a bias that broadcasts over queries or keys; the gradient of a bias
 * that broadcasts; distance_bias; dropout, softcap, ALiBi, kv_start, kv_end, q_start; causal or a
 * window together with a mask; packed and deterministic calls; rows that are not aligned to 16
 * bytes. flash_attn_bwd_scores_sm80 and flash_attn_bwd_plain serve those. */
#include "../mask_words.cuh"
#include "bwd_keys.cuh"
#include "bwd_masked.cuh"

namespace {

/* ---- 1. the producer ------------------------------------------------------------------------- */
/* Computes the words of a block of the mask if the mask does not store them, or if the keys end
 * within a full block. Without a mask, computes the words of causal and the window. Each row of the
 * words is a key and each column a query. One warp. */
template <class Tile>
__device__ __forceinline__ void make_words_t(const BwdMaskedParams &x, const Sequence &seq,
                                             int head, int b, int j0, int row0, bool full,
                                             smem_addr to_s) {
    const int i0 = row0 / GK_MASK_TILE * GK_MASK_TILE;
    const int4 *source = (const int4 *)(mask_of(x, b, head) + x.at.source);
    if constexpr (!ScoresOf<Tile>::MASK) {
        words_of_rows(to_s, [&](int r) {
            const int j = j0 + r, first = i0 + laneid() % 4 * 2;
            const bool any = j >= seq.span.key_lo && j < seq.span.key_hi;
            return any ? columns_in<32>(seq.span.row_lo(j) - first,
                                        seq.span.row_hi(j, seq.seq_q) - first)
                       : 0u;
        });
    } else if (full || x.store == GK_MASK_COLUMNS) {
        words_of_rows(to_s, [&](int r) {
            const int j = j0 + r, first = i0 + laneid() % 4 * 2;
            if (j >= seq.seq_k) return 0u;
            if (full) return 0xffffffffu;
            const int4 c = __ldg(source + j);
            return ~(columns_in<32>(c.x - first, c.y - first) |
                     columns_in<32>(c.z - first, c.w - first));
        });
    } else {
        /* Only the words of this step's queries are computed. Queries that see a prefix of these
         * keys often have equal bits. */
        words_of_columns<Tile::BQ / 32, true>(
            to_s,
            [&](int c, int r) {
                if (i0 + c >= seq.seq_q) return 0u;
                const int4 a = __ldg(source + i0 + c);
                return rows_in(a.x, a.y, j0 + r) | rows_in(a.z, a.w, j0 + r);
            },
            (row0 - i0) / 32);
    }
    fence_proxy_async(); /* orders these stores before a later bulk copy into the stage */
    __syncwarp();
}

/* One warp loads K and V once, then Q, dO, the stats and the mask's words, step after step. Its
 * position in the lists is in shared memory, because registers are few. */
template <class T, class Tile>
__device__ __forceinline__ void load_masked(const BwdMaskedParams &x, const BwdWork &w,
                                            smem_addr smem_s) {
    typedef BwdSmem<Tile> S;
    constexpr int BQ = Tile::BQ;
    const Bwd &g = x.g;
    const smem_addr raw_s = smem_s + S::RAW, kv_s = smem_s + S::KV_FULL;
    if (laneid() == 0) {
        const smem_addr to_s = x.again ? raw_s : kv_s;
        mbarrier_arrive_expect_tx(to_s, S::K::bytes + S::V::bytes);
        load_panels<typename S::K>(smem_s + S::K_AT, &x.k, w.j0, w.kv_head, w.b, to_s);
        load_panels<typename S::V>(smem_s + S::V_AT, &x.v, w.j0, w.kv_head, w.b, to_s);
    }
    if (x.again) {
        mbarrier_wait(raw_s, 0);
        clear_wild<T, typename S::K>(smem_s + S::K_AT);
        clear_wild<T, typename S::V>(smem_s + S::V_AT);
        fence_proxy_async(); /* orders this lane's stores before WGMMA's reads */
        __syncwarp();
        if (laneid() == 0) mbarrier_arrive(kv_s);
    }
    const tma_steps<Tile::STAGES> ring = {smem_s + S::RING};
    const BwdPlace at = {smem_s + S::PLACE};
    if constexpr (ScoresOf<Tile>::MASK) {
        at.set(BwdPlace::KEPT, words_before(x, w, at)); /* place() has set the other fields */
    } else {
        at.set(BwdPlace::HEAD, w.first_head - 1);
        at.set(BwdPlace::LEFT, 0);
    }
    at.set(BwdPlace::ROW, GK_MASK_TILE - BQ);
    __syncwarp();
#pragma unroll 1
    for (int n = 0; n < ((const volatile BwdWork &)w).tiles; ++n) {
        next_step<Tile>(x, w, at);
        ring.wait_empty(n);
        if (at[BwdPlace::KIND] == GK_BLOCK_MADE) {
            smem_addr words_s = smem_s + S::WORDS_AT + ring.stage(n) * S::WORDS_BYTES;
            /* keeps the compiler from holding the address in a register until the bulk copy
             * below */
            opaque(words_s);
            make_words_t<Tile>(x, w.seq, at[BwdPlace::HEAD], w.b, w.j0, at[BwdPlace::ROW],
                               at[BwdPlace::FULL], words_s);
        }
        if (laneid() == 0) {
            const smem_addr to_s = x.again ? raw_s : ring.full(n);
            const int i0 = at[BwdPlace::ROW], kind = at[BwdPlace::KIND];
            load_panels<typename S::Q>(smem_s + S::Q_AT + ring.stage(n) * S::Q::bytes, &x.q, i0,
                                       at[BwdPlace::HEAD], w.b, to_s);
            load_panels<typename S::O>(smem_s + S::O_AT + ring.stage(n) * S::O::bytes, &x.grad_out,
                                       i0, at[BwdPlace::HEAD], w.b, to_s);
            const int stats_tile = at[BwdPlace::HEAD] * g.row_tiles + w.row_tile + i0 / BQ;
            const unsigned edge = kind == GK_BLOCK_FULL ? 0 : 2 + i0 % GK_MASK_TILE / 4;
            st_shared_128(
                smem_s + S::TILES + ring.stage(n) * (int)sizeof(BwdTileOf),
                make_uint4((unsigned)stats_tile, edge, (unsigned)i0, (unsigned)at[BwdPlace::HEAD]));
            if (n == 0) { /* see load_tiles */
                wait_count(x.rows_done + w.task.unit, x.grid.rows * BwdGrid::PARTS);
                fence_proxy_async_global();
            }
            if constexpr (ScoresOf<Tile>::BIAS)
                load_panels<typename S::Scores>(
                    smem_s + S::BIAS_AT + ring.stage(n) * S::Scores::bytes, &x.bias, i0,
                    at[BwdPlace::HEAD] * x.bias_of_head, w.b * x.bias_of_batch, to_s, w.j0);
            mbarrier_arrive_expect_tx(to_s, S::Q::bytes + S::O::bytes + S::STATS +
                                                (ScoresOf<Tile>::BIAS ? S::Scores::bytes : 0) +
                                                (kind == GK_BLOCK_WORDS ? S::WORDS_BYTES : 0));
            bulk_load(smem_s + S::STATS_AT + ring.stage(n) * S::STATS,
                      (const char *)g.stats + (int64_t)stats_tile * S::STATS, S::STATS, to_s);
            if (kind == GK_BLOCK_WORDS)
                bulk_load(smem_s + S::WORDS_AT + ring.stage(n) * S::WORDS_BYTES,
                          mask_of(x, w.b, at[BwdPlace::HEAD]) + x.at.words_t +
                              (int64_t)at[BwdPlace::WORDS] * GK_MASK_BLOCK_INTS,
                          S::WORDS_BYTES, to_s);
        }
        __syncwarp();
        if (x.again) {
            mbarrier_wait(raw_s, (n + 1) & 1);
            clear_wild<T, typename S::Q>(smem_s + S::Q_AT + ring.stage(n) * S::Q::bytes);
            clear_wild<T, typename S::O>(smem_s + S::O_AT + ring.stage(n) * S::O::bytes);
            carry_nan<Tile>(smem_s + S::STATS_AT + ring.stage(n) * S::STATS);
            fence_proxy_async(); /* as above */
            __syncwarp();
            if (laneid() == 0) mbarrier_arrive(ring.full(n));
        }
    }
}

/* ---- 2. the consumer ------------------------------------------------------------------------- */
template <class T, class Tile_, bool MODIFIED, bool ORDERED>
struct BwdMaskedConsumer : BwdConsumer<T, Tile_, MODIFIED, ORDERED> {
    typedef Tile_ Tile;
    typedef BwdMaskedParams Params;
    typedef BwdSmem<Tile> S;
    static_assert(GK_MASK_TILE % Tile::BQ == 0 && Tile::BKV == GK_MASK_TILE && !ORDERED,
                  "a step lies within one block of the mask");

    static constexpr bool SPLITS = ScoresOf<Tile>::MASK;

    static __device__ __forceinline__ bool leaves(const Params &x) {
        return x.again && *x.spoilt == 0;
    }
    static __device__ __forceinline__ bool has_no_work(smem_addr smem_s) {
        return without_keys<Tile>(smem_s);
    }
    /* With a mask, w.tile_lo is the length of the first head's list. Without one, w.start is the
     * number of tiles of each head. One thread. */
    static __device__ __forceinline__ void place(BwdWork &w, const Params &x, smem_addr smem_s) {
        const Bwd &g = x.g;
        if constexpr (!ScoresOf<Tile>::MASK) {
            place_block<Tile>(w, x);
            w.start = w.tiles;
            w.tiles *= g.p.group;
            return;
        }
        w.rank = 0;
        w.task = x.grid.task(blockIdx.x);
        w.b = (int)x.by_heads.into((uint32_t)w.task.unit);
        w.kv_head = w.task.unit - w.b * g.p.heads_kv;
        w.first_head = w.kv_head * g.p.group;
        if (w.task.unit >= x.grid.units || w.task.kind != BWD_KEYS) return;
        place_keys<Tile>(w, x, smem_s);
    }
    static __device__ __forceinline__ void load(const Params &x, const BwdWork &w, unsigned char *,
                                                smem_addr smem_s) {
        load_masked<T, Tile>(x, w, smem_s);
    }
    __device__ __forceinline__ void store(const Params &x, const BwdWork &w, smem_addr smem_s,
                                          int warpgroup) {
        if constexpr (SPLITS) {
            constexpr int DK_FLOATS = Tile::BKV * Tile::HEAD_DIM;
            const bool whole = join_parts<Tile>(x, w, smem_s, [&](const auto &take) {
                take(this->dk, 0);
                take(this->dv, DK_FLOATS);
            });
            if (!whole) return;
        }
        float sum = 0; /* NaN or inf if a gradient is */
#pragma unroll
        for (int i = 0; i < Tile::HEAD_DIM / 2; ++i) sum = fmaf(this->dk[i], 0.f, sum);
#pragma unroll
        for (int i = 0; i < Tile::HEAD_DIM_V / 2; ++i) sum = fmaf(this->dv[i], 0.f, sum);
        if (sum != 0) *x.spoilt = 1;
        BwdConsumer<T, Tile_, MODIFIED, ORDERED>::store(x, w, smem_s, warpgroup);
    }
};

/* ---- 3. table -------------------------------------------------------------------------------- */
#define INSTANCE(name, T, dtype, TILE)                                      \
    {name,                                                                  \
     dtype,                                                                 \
     plan_masked<TILE>,                                                     \
     run_masked<T, BwdMaskedConsumer<T, TILE, false, false>>,               \
     {TILE::HEAD_DIM, TILE::HEAD_DIM_V, 0, BwdSmem<TILE>::BYTES, TILE::BQ}, \
     NULL}
#define INSTANCES(label, TILE)                                                         \
    INSTANCE("flash_attn_bwd_masked_sm90a_bf16_" label, __nv_bfloat16, GK_BF16, TILE), \
        INSTANCE("flash_attn_bwd_masked_sm90a_f16_" label, __half, GK_F16, TILE)

typedef BwdMasked<BwdHopper64, 1, 0> Masked64;
typedef BwdMasked<BwdHopper64Score, 0, 1> Biased64;
typedef BwdMasked<BwdHopper64Score, 1, 1> MaskedBiased64;
typedef BwdMasked<BwdHopper128Score, 1, 0> Masked128;
typedef BwdMasked<BwdHopper128Score, 0, 1> Biased128;
typedef BwdMasked<BwdHopper128Score, 1, 1> MaskedBiased128;

const gk_cuda_instance instances[] = {INSTANCES("d64_mask", Masked64),
                                      INSTANCES("d64_bias", Biased64),
                                      INSTANCES("d64_mask_bias", MaskedBiased64),
                                      INSTANCES("d128_mask", Masked128),
                                      INSTANCES("d128_bias", Biased128),
                                      INSTANCES("d128_mask_bias", MaskedBiased128)};

} // namespace

extern "C" const gk_cuda_table gk_flash_attn_bwd_masked_sm90a_table = {
    instances, sizeof instances / sizeof instances[0], 90, NULL};
