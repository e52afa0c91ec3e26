/* SPDX-License-Identifier: BSD-3-Clause */
/* paged_tree_sm90a: paged_attn with a mask over the new tokens, on Hopper's tensor cores, in 16
 * bits. One pass covers the old keys and the new tokens. It is paged_prefill_sm90a, except that
 * stored bits mask the last key blocks instead of the causal rule. It takes as many launches.
 *
 *  out[t] = sum_j softmax_j(scale q[t] k[j], sink) v[j]     j: all old keys, and the new tokens that
 *                                                           row t of the mask shows
 *
 * q [T, Hq, D]; k_cache, v_cache, block_table, seq_lens, cu_seqlens_q as in paged_prefill_sm90a;
 * attn_mask [T, S] or [B, S, S] bytes, any strides; out [T, Hq, D], lse [T, Hq].
 *
 * Work split: tiles of 128 queries. If sequences have few queries, a tile has queries of several
 * heads of a group. The key blocks of a tile are
 *
 *   [0, plain_first)            only with kv_start: blocks that begin before the first key
 *   [plain_first, plain_end)    old keys, which all rows see
 *   [plain_end, tiles)          blocks with new tokens
 *
 * The first and the last kind are partial blocks. For them the consumers take their path for stored
 * masks (ListedKeys in fwd_keys.cuh). It reads a bit for each row and key, in words that one warp
 * of the producer computes from the mask.
 *
 * The producer's warps:
 *
 *   warp 0  loads Q and K       warp 1  finds tiles
 *   warp 3  loads V             warp 2  reports errors and computes mask words
 *
 * NaN in hidden values. V of a new token that a row does not see may hold NaN, and 0 times NaN is
 * NaN. So before a partial block is multiplied with V, the consumers check the rows of new tokens
 * in shared memory. If a row has a NaN or inf, they zero it there, and add the row from global
 * memory to the queries that see it. The bits of a row therefore do not depend on hidden keys.
 *
 * Refused, served by paged_tree: calls without prefill_has_many, head_dim other than 64 and 128,
 * windows, softcap, 8-bit pages, batch_invariant, pages that are not a multiple of 8 keys. */
#include "../../ptx/bar_or.cuh"
#include "../../ptx/griddepcontrol.cuh"
#include "../forward/fwd_loop.cuh"
#include "paged_tree.cuh"
#include "prefill_launch.cuh"

/* A tile of the dense forward over pages, with mask words for partial blocks. */
template <class Tile> struct TreeTile : Tile {};
template <class Tile> struct InBoxes<TreeTile<Tile>> {
    static constexpr bool value = true;
};
template <class Tile> struct ScoresOf<TreeTile<Tile>> {
    static constexpr int MASK = 1, BIAS = 0;
};
/* The consumers need only the words of a stored mask. */
template <class Tile> struct ParamsOf<TreeTile<Tile>, true> {
    typedef FwdHopperParams type;
};

namespace {

struct TreePrefillParams {
    /* rules.right is 0, so that prefill_sequence keeps a sequence with fewer keys than tokens. */
    PrefillParams prefill;
    NewMask mask;
    Rows v; /* the pages of v_cache, for rows with a NaN or inf */
};

/* ---- 1. keys and mask ------------------------------------------------------------------------ */
__device__ __forceinline__ Sequence tree_sequence(const PrefillParams &x, int b) {
    Sequence s = prefill_sequence(x.f.fwd.problem, x.pages, b);
    s.span.hi_off = SPAN_FAR;
    return s;
}

/* The number of keys before new token 0. t.seq.diagonal is the key index of new token 0, and may be
 * negative. */
__device__ __forceinline__ int old_keys(const FwdTile &t) { return max((int)t.seq.diagonal, 0); }
/* The first new token that kv_start does not hide. */
__device__ __forceinline__ int first_new(const FwdTile &t) {
    return max(old_keys(t), t.seq.span.key_lo);
}
/* One past the last new token for which the mask has a column. */
__device__ __forceinline__ int end_new(const NewMask &m, const FwdTile &t) {
    return min(t.seq.seq_k, (int)min(t.seq.diagonal + m.columns, (int64_t)t.seq.seq_k));
}
/* Row i of the mask, shifted so that index 0 is key 0. */
__device__ __forceinline__ const uint8_t *mask_row(const NewMask &m, const FwdTile &t, int i) {
    const int64_t row = (m.by_sequence ? 0 : t.seq.q0) + i;
    return m.data + t.work.b * m.sequence + row * m.row - t.seq.diagonal * m.column;
}
__device__ __forceinline__ bool is_partial(const FwdTile &t, int block) {
    return block < t.keys.plain_first || block >= t.keys.plain_end;
}

/* A mark that the consumers set if a new token of the tile has a NaN or inf in V. */
template <class Tile> __device__ __forceinline__ volatile int &spoilt_of(FwdTile &t) {
    return *(volatile int *)&Smem<Tile>::marks_of(t).tile;
}

/* ---- 2. the producer ------------------------------------------------------------------------- */
/* Does the work of find_tiles (fwd_producer.cuh) for a call that reads lengths, and marks the
 * partial blocks. */
template <class Tile>
__device__ __forceinline__ void find_trees(const PrefillParams &x, unsigned char *smem,
                                           smem_addr smem_s) {
    typedef Smem<Tile> S;
    const tma_steps<S::TILE_STAGES> described = {smem_s + S::TILE_RING};
    griddepcontrol_wait(); /* wait until the previous kernel has written the lengths */
    int n = 0;
#pragma unroll 1
    for (int i = 0;; ++i) {
        described.wait_empty(n);
        FwdTile &t = ((FwdTile *)(smem + S::TILES))[n % S::TILE_STAGES];
        if (!place_tile<S::BQ>(x.f, i, &t.work)) break;
        if (t.work.i0 >= 0 && laneid() == 0) t.seq = tree_sequence(x, t.work.b);
        __syncwarp();
        if (t.work.i0 >= 0 && t.seq.seq_q > t.work.i0) {
            if (laneid() == 0) {
                describe_keys<Tile, false>(t, x.f);
                t.keys.plain_end = max(old_keys(t) - t.keys.lo, 0) / Tile::BKV;
                /* what the consumers ask about their first block */
                S::marks_of(t).partial[0] = is_partial(t, 0);
                spoilt_of<Tile>(t) = 0;
                mbarrier_arrive(described.full(n));
            }
            ++n;
        }
        __syncwarp();
    }
    if (laneid() == 0) {
        ((FwdTile *)(smem + S::TILES))[n % S::TILE_STAGES].steps.blocks = -1;
        mbarrier_arrive(described.full(n));
    }
}

/* Writes the mask words of a partial block. Each lane owns a query, and writes its bits for every
 * head of the tile. */
template <class Tile>
__device__ __forceinline__ void write_words(const TreePrefillParams &x, const FwdTile &t, int block,
                                            smem_addr to_s) {
    const NewMask &m = x.mask;
    const int queries = min(t.seq.seq_q - t.work.i0, Smem<Tile>::BQ);
#pragma unroll 1
    for (int i = laneid(); i < queries; i += 32) {
#pragma unroll 1
        for (int group = 0; group < 4; ++group) {
            const int key0 = t.keys.lo + block * Tile::BKV + 32 * group;
            uint32_t bits = rows_in(t.seq.span.key_lo, old_keys(t), key0);
            const int end = min(end_new(m, t) - key0, 32);
            int c = max(first_new(t) - key0, 0);
            if (c < end) {
                const uint8_t *seen = mask_row(m, t, t.work.i0 + i) + (key0 + c) * m.column;
#pragma unroll 4
                for (; c < end; ++c, seen += m.column) bits |= (uint32_t)(*seen != 0) << c;
            }
#pragma unroll 1
            for (int h = 0; h < x.prefill.f.tile_heads; ++h) {
                /* with one head, by_head.by is larger than a tile */
                const int row = i + h * (int)x.prefill.f.by_head.by;
                const smem_addr at_s = to_s + 4 * gk_mask_word_of(row) + group;
#pragma unroll
                for (int q = 0; q < 4; ++q) /* columns c with c % 8 / 2 = q */
                    st_shared_8(at_s + 8 * q,
                                (uint8_t)((bits >> 2 * q & 0x03030303u) * 0x01041040u >> 24));
            }
        }
    }
}

/* Computes the words of all partial blocks, tile after tile. One warp. */
template <class Tile>
__device__ __forceinline__ void hand_out_words(const TreePrefillParams &x, const FwdTile *tiles,
                                               smem_addr smem_s) {
    typedef Smem<Tile> S;
    const tma_steps<S::TILE_STAGES> described = {smem_s + S::TILE_RING};
    const tma_steps<S::WORDS_STAGES> ring = {smem_s + S::WORDS_RING};
    /* counts are in shared memory, because the producer has only 24 registers */
    const smem_addr tiles_s = smem_s + S::COUNTS, taken_s = tiles_s + 4;
    st_shared_32(tiles_s, 0);
    st_shared_32(taken_s, 0); /* stages of words */
#pragma unroll 1
    for (;;) {
        int n = (int)ld_shared_32(tiles_s);
        described.wait_full(n);
        const FwdTile &t = tiles[n % S::TILE_STAGES];
        if (t.steps.blocks < 0) break;
#pragma unroll 1
        for (int j = 0; j < t.steps.blocks; ++j) {
            if (!is_partial(t, j)) continue;
            int taken = (int)ld_shared_32(taken_s);
            ring.wait_empty(taken);
            write_words<Tile>(x, t, j, smem_s + S::WORDS_AT + ring.stage(taken) * S::WORDS_BYTES);
            __syncwarp(); /* all lanes have written */
            taken = (int)ld_shared_32(taken_s);
            if (laneid() == 0) mbarrier_arrive(ring.full(taken));
            __syncwarp(); /* all lanes have read the count */
            st_shared_32(taken_s, taken + 1);
        }
        n = (int)ld_shared_32(tiles_s);
        __syncwarp(); /* all lanes have read t and the count */
        if (laneid() == 0) mbarrier_arrive(described.empty(n));
        st_shared_32(tiles_s, n + 1);
    }
}

/* ---- 3. the consumers ------------------------------------------------------------------------ */
/* Finds the rows of new V that have a NaN or inf, adds them to the queries that see them, and
 * zeroes them in shared memory. The weights of the block are in c.w. Each warpgroup calls it before
 * its own product. */
template <class T, class Tile>
__device__ __forceinline__ void add_spoilt(const TreePrefillParams &x, const FwdTile &t, int block,
                                           smem_addr v_s, Consumer<T, Tile, false> &c) {
    constexpr int N = Tile::BKV / 8, ND = Tile::HEAD_DIM_V / 8;
    const PrefillPages &pages = x.prefill.pages;
    const int key0 = t.keys.lo + block * Tile::BKV, lane = laneid();
    const int end = min(t.seq.seq_k, key0 + Tile::BKV);
    griddepcontrol_wait(); /* for this thread's own reads of memory */
#pragma unroll 1
    for (int key = max(old_keys(t), key0); key < end; ++key) {
        const int entry = (int)pages.by_block.into((unsigned)key),
                  page = pages.table[t.work.b * pages.table_row + entry * pages.table_entry];
        if ((unsigned)page >= (unsigned)pages.num_blocks) continue;
        const int in_page = key - entry * (int)pages.by_block.by;
        const T *v = (const T *)x.v.data + x.v.at(page, t.from.head_kv, in_page) + lane % 4 * 2;
        bool spoilt = false;
#pragma unroll 4
        for (int n = 0; n < ND; ++n) {
            const float2 two = unpack2<T>(*(const uint32_t *)(v + 8 * n));
            spoilt = spoilt || !(fabsf(two.x) < INFINITY) || !(fabsf(two.y) < INFINITY);
        }
        if (!__any_sync(0xffffffffu, spoilt)) continue;
        const int at = key - key0;
        if (lane < ND)
            st_shared_128(v_s + lane / 8 * Smem<Tile>::V::panel_bytes + at * 128 + lane % 8 * 16,
                          make_uint4(0, 0, 0, 0));
        float weight[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float mine = 0;
#pragma unroll
            for (int i = 0; i < 4 * N; ++i)
                if (i == at / 8 * 4 + 2 * r + (at & 1)) mine = c.w[i];
            mine = __shfl_sync(0xffffffffu, mine, lane / 4 * 4 + at % 8 / 2);
            weight[r] = to_f32(from_f32<T>(mine));
        }
        if (key < first_new(t) || key >= end_new(x.mask, t)) continue; /* no query sees it */
        bool sees[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = own_row() + 8 * r, i = row_of(x.prefill.f, t, row).i;
            sees[r] =
                row < t.rows && i < t.seq.seq_q && mask_row(x.mask, t, i)[key * x.mask.column] != 0;
        }
#pragma unroll
        for (int n = 0; n < ND; ++n) {
            const float2 two = unpack2<T>(*(const uint32_t *)(v + 8 * n));
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float x0 = fmaf(weight[r], two.x, c.o[4 * n + 2 * r]),
                            x1 = fmaf(weight[r], two.y, c.o[4 * n + 2 * r + 1]);
                c.o[4 * n + 2 * r] = sees[r] ? x0 : c.o[4 * n + 2 * r];
                c.o[4 * n + 2 * r + 1] = sees[r] ? x1 : c.o[4 * n + 2 * r + 1];
            }
        }
    }
}

/* Called after the weights of a block are computed. Checks the V rows of new tokens for NaN and
 * inf, and calls add_spoilt if there are any. */
template <class T, class Tile>
__device__ __forceinline__ void check_values(const TreePrefillParams &x, FwdTile &t, int step,
                                             int block, Consumer<T, Tile, false> &c) {
    constexpr int CHUNKS = Tile::HEAD_DIM_V / 8; /* of 16 bytes in a row */
    const int key0 = t.keys.lo + block * Tile::BKV, from = max(old_keys(t) - key0, 0),
              end = min(t.seq.seq_k - key0, Tile::BKV);
    if (from >= end) return;
    const smem_addr v_s = c.stages().v_at(step + block);
    bool spoilt = false;
    c.stages().wait_values(step + block);
#pragma unroll 1
    for (int i = from * CHUNKS + mov_tid_x() % 128; i < end * CHUNKS; i += 128) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        const smem_addr at_s =
            v_s + chunk / 8 * Smem<Tile>::V::panel_bytes + row * 128 + chunk % 8 * 16;
        spoilt = spoilt || has_special<T>(ld_shared_128(at_s));
    }
    /* The other warpgroup may already have zeroed the rows that this one looks for. It has set the
     * mark before it zeroed them. */
    __threadfence_block();
    spoilt = spoilt || spoilt_of<Tile>(t);
    if (!bar_or(4 + c.warpgroup, 128, spoilt)) return;
    spoilt_of<Tile>(t) = 1;
    __threadfence_block();
    add_spoilt<T, Tile>(x, t, block, v_s, c);
    fence_proxy_async(); /* orders this thread's zeros before WGMMA's reads */
    bar_sync(4 + c.warpgroup, 128);
}

/* Processes the key blocks of a tile after the first one, as Consumer::other_blocks does. Full
 * blocks run in an inner loop without masks. A partial block, or a block that must be computed
 * again, leaves that loop, and the outer loop enters it again. */
template <class T, class Tile>
__device__ __forceinline__ void later_blocks(const TreePrefillParams &x, FwdTile &t,
                                             Consumer<T, Tile, false> &c,
                                             const typename Consumer<T, Tile, false>::At &at) {
#pragma unroll 1
    for (int j = 0;;) {
        if (is_partial(t, j)) check_values<T, Tile>(x, t, at.step, j, c);
        /* The shuffle tells the compiler that j is uniform over the warp. Otherwise it assumes that
         * the branch above may diverge. */
        j = __shfl_sync(0xffffffffu, j + 1, 0);
        if (j == at.end) break;
        const int plain = j < t.keys.plain_first ? j : min(t.keys.plain_end, at.end);
        bool again = false;
#pragma unroll 1
        for (; j < plain; ++j) {
            again = c.take_block(t, at, j, false);
            if (again) break;
            c.block_taken();
        }
        if (again) {
            c.take_again(t, j, false);
            c.block_taken();
            continue;
        }
        if (j == at.end) break;
        if (c.take_block(t, at, j, true)) c.take_again(t, j, true);
        c.block_taken();
    }
}

/* Skips the blocks of a tile in which this warpgroup has no rows. It waits for the mask words
 * without use, because their stage is released only when both warpgroups have read it. */
template <class T, class Tile>
__device__ __forceinline__ void pass_tile(const FwdTile &t, int step, int warpgroup,
                                          Consumer<T, Tile, false> &c) {
#pragma unroll 1
    for (int j = 0; j < t.steps.blocks; ++j) {
        c.pass(step + j, 1);
        if (is_partial(t, j)) c.columns_of(t, j);
    }
    /* take part in the alternation of the warpgroups for the last P V */
    if (t.steps.blocks > 0) turn_begin<Tile>(warpgroup), turn_end<Tile>(warpgroup);
}

/* The consumers' loop over tiles: `consume` of fwd_loop.cuh, without the early start of the next
 * tile. */
template <class T, class Tile>
__device__ __forceinline__ void consume_trees(const TreePrefillParams &a, smem_addr smem_s,
                                              FwdTile *tiles, int warpgroup) {
    typedef Smem<Tile> S;
    typedef Consumer<T, Tile, false> C;
    static_assert(C::AHEAD && C::PACK_LATE && !C::LEADS, "weights stay in w behind a block");
    const FwdHopperParams &x = a.prefill.f;
    const tma_steps<Tile::Q_BUFFERS> q = {smem_s + S::Q_RING};
    const tma_steps<S::TILE_STAGES> described = {smem_s + S::TILE_RING};
    if (warpgroup == Tile::WARPGROUPS - 1) bar_arrive(1, 256); /* warpgroup 0 issues first */
    C c(x, smem_s, warpgroup);
#pragma unroll 1
    for (int n = 0, step = 0;; ++n) {
        q.wait_full(n);
        FwdTile &t = tiles[n % S::TILE_STAGES];
        const int blocks = t.steps.blocks;
        if (blocks < 0) break;
        const int own = t.steps.own[warpgroup];
        const smem_addr q_s = smem_s + q.stage(n) * S::Q::bytes;
        const typename C::At at = {step, 0, own, q_s, n > 0 ? q.empty(n - 1) : 0};
        c.softmax.clear();
        if (own > 0) {
            c.first_block(t, at);
            later_blocks<T, Tile>(a, t, c, at);
            c.last_values(t, at, 0, [] {});
        } else {
            clear(c.o);
            c.stages().release_q(at.q_empty);
            pass_tile<T, Tile>(t, step, warpgroup, c);
        }
        if (x.fwd.splits > 1)
            store_part<T, Tile>(x, t, c.softmax, c.o);
        else
            store_tile<T, Tile>(x, t, c.softmax, c.o, q_s);
        step += blocks;
        __syncwarp(); /* all lanes have read t */
        if (laneid() == 0) mbarrier_arrive(described.empty(n));
    }
    /* shared memory must live until TMA has read it */
    if (laneid() == 0) tma_store_wait_group_read<0>();
}

/* ---- 4. the kernel --------------------------------------------------------------------------- */
template <class T, class Tile>
__global__ void __launch_bounds__(Smem<Tile>::THREADS, 1)
    paged_tree_sm90a_kernel(const __grid_constant__ TreePrefillParams x) {
    const PrefillParams &a = x.prefill;
    run_block<Tile>([&](smem_addr smem_s) { begin_block<Tile, 3>(a.f, smem_s); },
                    [&](unsigned char *smem, smem_addr smem_s, const FwdTile *tiles) {
                        const int warp = threadIdx.x / 32 % 4;
                        if (warp == 1) {
                            find_trees<Tile>(a, smem, smem_s);
                        } else if (warp == 0) {
                            if (elect_one()) {
                                prefetch_tensormap(&a.f.q);
                                prefetch_tensormap(&a.f.k);
                                prefetch_tensormap(&a.f.v);
                            }
                            /* wait until the previous kernel has written its results and read `out`
                             */
                            griddepcontrol_wait();
                            PageLoader<Tile, false, true>{a, smem_s}.all(tiles);
                        } else if (warp == 3) {
                            griddepcontrol_wait();
                            PageLoader<Tile, false, false>{a, smem_s}.all(tiles);
                        } else {
                            griddepcontrol_wait();
                            check_prefill(a);
                            hand_out_words<Tile>(x, tiles, smem_s);
                        }
                    },
                    [&](smem_addr smem_s, const FwdTile *tiles, int warpgroup) {
                        consume_trees<T, Tile>(x, smem_s, const_cast<FwdTile *>(tiles), warpgroup);
                    });
}

/* ---- 5. launcher and table ------------------------------------------------------------------- */
template <class Tile>
bool plan(const gk_cuda_instance *instance, const gk_context *ctx, const void *args, gk_plan *to) {
    const gk_paged_attn_args *a = (const gk_paged_attn_args *)args;
    const gk_attn_rules &r = a->rules;
    if (!gk_paged_mask_of(a) || !prefill_has_many(a) || r.window_left >= 0 ||
        (a->flags & GK_PAGED_WINDOW_RIGHT && r.window_right >= 0) || r.softcap > 0 ||
        r.alibi_slopes || !prefill_plan<Tile>(ctx, a, instance->key[PrefillKey::SMEM], to))
        return false;
    gk_own<PrefillParams>(to).f.fwd.problem.rules.right = 0;
    return true;
}

template <class T, class Tile>
gk_status run(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    static const char op[] = "gk_paged_attn";
    const gk_paged_attn_args *a = (const gk_paged_attn_args *)args;
    if (a->q.shape[0] == 0 || a->q.shape[1] == 0) return GK_OK;
    TreePrefillParams x = {};
    PrefillParams &prefill = x.prefill = gk_own<PrefillParams>(plan);
    x.mask = new_mask_of(a);
    /* q0 is 0 in a call that is not packed */
    if (!x.mask.by_sequence && !a->cu_seqlens_q)
        x.mask.sequence = prefill.f.fwd.problem.seq_q * x.mask.row;
    x.v = pages_of(a->v_cache);
    gk_status status = prefill_place<Tile>(op, a, workspace, &prefill);
    if (status != GK_OK) return status;
    status =
        launch<paged_tree_sm90a_kernel<T, Tile>>(op, ctx, dim3((unsigned)prefill.f.schedule.blocks),
                                                 Smem<Tile>::THREADS, Smem<Tile>::BYTES, x, true);
    return status == GK_OK ? prefill_finish<T>(op, ctx, prefill.f.fwd) : status;
}

#define INSTANCE(NAME, DTYPE, T, TILE)              \
    {"paged_tree_sm90a_" NAME,                      \
     DTYPE,                                         \
     plan<TreeTile<TILE>>,                          \
     run<T, TreeTile<TILE>>,                        \
     {TILE::HEAD_DIM, Smem<TreeTile<TILE>>::BYTES}, \
     NULL}

const gk_cuda_instance instances[] = {
    INSTANCE("bf16_d64", GK_BF16, __nv_bfloat16, FwdHopper64Short),
    INSTANCE("f16_d64", GK_F16, __half, FwdHopper64Short),
    INSTANCE("bf16_d128", GK_BF16, __nv_bfloat16, FwdHopper128),
    INSTANCE("f16_d128", GK_F16, __half, FwdHopper128)};
#undef INSTANCE

} // namespace

extern "C" const gk_cuda_table gk_paged_tree_sm90a_table = {
    instances, sizeof instances / sizeof instances[0], 90, NULL};
