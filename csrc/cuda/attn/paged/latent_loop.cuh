/* SPDX-License-Identifier: BSD-3-Clause */
/* latent_loop.cuh: the main loop of paged_latent_sm90a over chunks of keys: the loads of the
 * producer warp, and the products of the two warpgroups of a block.
 *
 * Shared memory holds 64 rows of Q and two chunks of 64 keys. Each is [64][576], stored as nine
 * panels of 64 columns. The chunks of a tile are processed in pairs. Warpgroup w computes the
 * scores of chunk w of the pair, and columns 256 w .. 256 w + 255 of O for both chunks. x = 1 - w
 * is the other chunk:
 *
 *   S_w = Q K_w^T, P_w = softmax weights of S_w
 *   O[256 w ..] += P_w V_w     P_w is in the warpgroup's own registers
 *   O[256 w ..] += P_x V_x     P_x comes from the other warpgroup through shared memory
 *
 * V is columns 0 .. 511 of the chunk itself, read MN-major. P_w overwrites the chunk's rotary
 * columns (512 .. 575), which have exactly its size.
 *
 * Softmax. Both warpgroups must scale O by the same factors, so they agree on a reference m for
 * each row. m changes only when a score exceeds it by SOFTMAX_SLACK_LOG2 in log2 units. The warp
 * that finds such a score sets a flag beside P and stores the new references of its rows. The
 * warpgroup that reads this P scales O, its sums and P to the larger of both references.
 *
 * Barriers of chunk w:
 *
 *   FULL[w][panel]   The panel has arrived. There is one for each panel, so that the scores can
 *                    begin before the whole chunk has arrived.
 *   EMPTY[w][part]   The part may be overwritten. 4 arrivals, one for each warp. There are three
 *                    parts. Warpgroup 0 releases columns 0 .. 255 and warpgroup 1 columns
 *                    256 .. 511, each after its product. The other warpgroup releases the rotary
 *                    columns when it has read P there.
 *   READY[w]         P_w is stored, and the rows of V past the last key are zero. 128 arrivals.
 *   Q_FULL, Q_EMPTY  The same for the rows of Q. 8 arrivals at Q_EMPTY, one for each warp.
 */
#ifndef GPUKERN_CUDA_LATENT_LOOP_CUH
#define GPUKERN_CUDA_LATENT_LOOP_CUH

#include "../../ptx/bar.cuh"
#include "../../ptx/ldmatrix.cuh"
#include "../../ptx/stmatrix.cuh"
#include "../../ptx/tma.cuh"
#include "../../ptx/wgmma.cuh"
#include "../../tile/tma_ring.cuh"
#include "latent_plan.cuh"

namespace {

/* ---- 1. shared memory ------------------------------------------------------------------------ */
typedef wgmma_panels<LATENT_KEYS, LATENT_DIM> LatentPanels;
static_assert(LATENT_ROWS == LATENT_KEYS, "Q has the layout of a chunk");

/* Byte offsets. The barriers of one chunk are consecutive. */
struct LatentSmem {
    static constexpr int PANEL = LatentPanels::panel_bytes, CHUNK = LatentPanels::bytes;
    static constexpr int ROPE = 8 * PANEL; /* in a chunk: rotary columns, then P */
    static constexpr int Q = 2 * CHUNK;
    static constexpr int FULL = 3 * CHUNK, FULL_OF_CHUNK = 8 * LatentPanels::panels;
    static constexpr int EMPTY = FULL + 2 * FULL_OF_CHUNK, READY = EMPTY + 48;
    static constexpr int Q_FULL = READY + 16, Q_EMPTY = Q_FULL + 8;
    static constexpr int MISSING = Q_EMPTY + 8; /* [chunk] one bit for each box without a page */
    /* [chunk][warp] flag: the reference of a row has changed */
    static constexpr int GROWN = MISSING + 16;
    /* [chunk][64] the rows' new references, valid if the flag is set */
    static constexpr int REFS = GROWN + 32;
    static constexpr int SUMS = REFS + 512; /* [2][warpgroup][64] sums of the rows, two buffers */
    static constexpr int SHARE = SUMS + 1024;
    static constexpr int total = SHARE + (int)sizeof(LatentShare);
};
static_assert(LatentSmem::ROPE + LATENT_ROWS * LATENT_KEYS * 2 == LatentSmem::CHUNK,
              "P fits the rotary columns");
static_assert(LatentSmem::total <= 232448, "what a block may have on Hopper");

enum {            /* named barriers; 0 is __syncthreads */
    BAR_OWN = 1,  /* 1 and 2: the threads of one warpgroup */
    BAR_BOTH = 3, /* both warpgroups */
};

/* ---- 2. the producer ------------------------------------------------------------------------- */
/* Finds the page and row of each box of the next chunks. A box is the part of a chunk that one TMA
 * copy loads from one page. Each lane holds one box, so 32 boxes are known at a time. The table
 * entries of the next 32 boxes are already being loaded. */
struct LatentPages {
    int page, row, next_page, next_row; /* page: -1 = missing, num_blocks = past the last key */

    static __device__ __forceinline__ void look_up(const LatentParams &a, const LatentTile &x,
                                                   int box, int &page, int &row) {
        const int key = box * a.page_box, entry = key / a.p.block_size;
        row = key - entry * a.p.block_size;
        page = a.p.num_blocks;
        if (key >= x.w.end || key >= x.t1 * LATENT_KEYS) return;
        page = a.p.table[x.b * a.p.table_row + entry * a.p.table_entry];
        if ((unsigned)page < (unsigned)a.p.num_blocks) return;
        report(a.p.error_word, GK_BAD_BLOCK_TABLE);
        page = -1;
    }
};

/* Loads a group's rows of q. One warp. */
__device__ __forceinline__ void load_q(const LatentParams &a, const LatentTile &x, int rank,
                                       smem_addr smem_s, uint64_t policy) {
    typedef LatentSmem S;
    const int lane = threadIdx.x % 32, heads = a.p.heads_q;
    const int first = (x.group * a.side + rank) * LATENT_ROWS; /* row of the sequence */
    const smem_addr full_s = smem_s + S::Q_FULL, q_s = smem_s + S::Q;
    if (lane == 0) mbarrier_arrive_expect_tx(full_s, S::CHUNK);
    __syncwarp();                 /* the barrier expects the bytes before a copy starts */
    if (a.q_box == LATENT_ROWS) { /* one box covers three panels */
        const int token = a.q_flat ? 0 : x.s.q0 + first / heads;
        const int row = a.q_flat ? x.s.q0 * heads + first : first % heads;
        if (lane < 3)
            tma_load_5d_by(q_s + lane * 3 * S::PANEL, &a.q, {{0, row, lane * 3, token, 0}}, full_s,
                           policy);
        return;
    }
    const int boxes = LATENT_ROWS / a.q_box, token = x.s.q0 + first / heads;
    for (int i = lane; i < LatentPanels::panels * boxes; i += 32) {
        const int panel = i / boxes, box = i - panel * boxes;
        tma_load_5d_by(q_s + panel * S::PANEL + box * a.q_box * WGMMA_ROW_BYTES, &a.q,
                       {{0, 0, panel, token + box, 0}}, full_s, policy);
    }
}

/* Loads part 0, 1 or 2 of chunk w (see EMPTY). (page, row): the place of this lane's box in the
 * cache. One warp. */
__device__ __forceinline__ void load_part(const LatentParams &a, int w, int part, int page, int row,
                                          smem_addr smem_s, uint64_t policy) {
    typedef LatentSmem S;
    const int lane = threadIdx.x % 32, bits = 6 - a.box_bits; /* the chunk has 2^bits boxes */
    const int panel = 4 * part + (lane >> bits), box = lane & ((1 << bits) - 1);
    const smem_addr full_s = smem_s + S::FULL + S::FULL_OF_CHUNK * w + 8 * panel;
    const bool loads = lane < (part == 2 ? 1 : 4) << bits;
    if (loads && box == 0) mbarrier_arrive_expect_tx(full_s, S::PANEL);
    __syncwarp(); /* the barrier expects the bytes before a copy starts */
    if (loads)
        tma_load_5d_by(smem_s + w * S::CHUNK + panel * S::PANEL +
                           (box << a.box_bits) * WGMMA_ROW_BYTES,
                       &a.cache, {{0, row, panel, page, 0}}, full_s, policy);
}

/* The producer warp. For each chunk it first loads the part with which that chunk's scores begin.
 */
__device__ __forceinline__ void latent_produce(const LatentParams &a, const LatentShare &share,
                                               smem_addr smem_s, int rank) {
    typedef LatentSmem S;
    const int lane = threadIdx.x % 32, boxes = LATENT_KEYS / a.page_box;
    const uint64_t policy = l2_first_out();
    unsigned parity = 0, q_parity = 0; /* parity has one bit for each chunk */
    each_latent_tile(a, share, [&](const LatentTile &x) {
        if (x.w.chunks == 0) return;
        LatentPages pages;
        int base = x.t0 * boxes; /* the index of lane 0's box */
        LatentPages::look_up(a, x, base + lane, pages.page, pages.row);
        LatentPages::look_up(a, x, base + 32 + lane, pages.next_page, pages.next_row);
        mbarrier_wait(smem_s + S::Q_EMPTY, q_parity ^ 1);
        load_q(a, x, rank, smem_s, policy);
        q_parity ^= 1;
#pragma unroll 1
        for (int t = x.t0; t < x.t1; t += 2) {
            if (t * boxes - base == 32) {
                base += 32;
                pages.page = pages.next_page;
                pages.row = pages.next_row;
                LatentPages::look_up(a, x, base + 32 + lane, pages.next_page, pages.next_row);
            }
            /* this lane's box in each of the two chunks; every panel has the same boxes */
            const int from = t * boxes - base + lane % boxes;
            const int page0 = __shfl_sync(0xffffffffu, pages.page, from),
                      row0 = __shfl_sync(0xffffffffu, pages.row, from);
            const int page1 = __shfl_sync(0xffffffffu, pages.page, from + boxes),
                      row1 = __shfl_sync(0xffffffffu, pages.row, from + boxes);
            const unsigned gone0 = __ballot_sync(0xffffffffu, page0 < 0),
                           gone1 = __ballot_sync(0xffffffffu, page1 < 0);
            const bool two = t + 1 < x.t1;
            auto load = [&](int w, int part) {
                mbarrier_wait(smem_s + S::EMPTY + 24 * w + 8 * part, (parity >> w & 1) ^ 1);
                if (part == 2 && lane == 0)
                    st_shared_32(smem_s + S::MISSING + 4 * w, w ? gone1 : gone0);
                load_part(a, w, part, w ? page1 : page0, w ? row1 : row0, smem_s, policy);
            };
            load(0, 0);
            if (two) load(1, 1);
            load(0, 1);
            load(0, 2);
            parity ^= 1;
            if (two) {
                load(1, 0);
                load(1, 2);
                parity ^= 2;
            }
        }
    });
}

/* ---- 3. a warpgroup -------------------------------------------------------------------------- */
__device__ __forceinline__ void release(smem_addr barrier_s) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier_s);
}

/* 2^(from - to), from <= to. */
__device__ __forceinline__ float shrink_of(float from, float to) {
    return to == -INFINITY ? 1.f : ex2_approx_ftz(from - to);
}

template <class T> __device__ __forceinline__ uint32_t scaled_pair(uint32_t x, float factor) {
    const float2 pair = unpack2<T>(x);
    return pack2<T>(pair.x * factor, pair.y * factor);
}

__device__ __forceinline__ void scale_rows(float (&o)[128], float f0, float f1) {
#pragma unroll
    for (int n = 0; n < 32; ++n) {
        o[4 * n] *= f0;
        o[4 * n + 1] *= f0;
        o[4 * n + 2] *= f1;
        o[4 * n + 3] *= f1;
    }
}

/* S += Q K^T over panels FROM .. TO - 1. Multiplies each panel as soon as it has arrived. FIRST: S
 * starts at 0. */
template <class T, int FROM, int TO, bool FIRST>
__device__ __forceinline__ void add_scores(float (&s)[32], smem_addr q_s, smem_addr chunk_s,
                                           smem_addr full_s, unsigned parity) {
#pragma unroll
    for (int panel = FROM; panel < TO; ++panel) {
        mbarrier_wait(full_s + 8 * panel, parity);
        wgmma_fence(); /* needed after each wait: otherwise the compiler serialises (C7519) */
#pragma unroll
        for (int k = panel * 4; k < panel * 4 + 4; ++k)
            wgmma_ss<T, 64, 0, 0>(s, LatentPanels::k_major(q_s, 0, k * 16),
                                  LatentPanels::k_major(chunk_s, 0, k * 16),
                                  !(FIRST && k == FROM * 4));
    }
}

/* O += P V over the 64 keys of a chunk, for columns 256 W .. 256 W + 255. If add is false, O = P V.
 */
template <class T, int W>
__device__ __forceinline__ void add_values(float (&o)[128], const uint32_t (&p)[4][4],
                                           smem_addr chunk_s, bool add) {
#pragma unroll
    for (int k = 0; k < 4; ++k)
        wgmma_rs<T, 256, 1>(o, p[k],
                            LatentPanels::mn_major(chunk_s + W * 4 * LatentSmem::PANEL, k * 16),
                            k > 0 || add);
}

/* The two rows of Q that a thread holds. */
struct LatentRows {
    int at[2];       /* indices among the block's 64 rows */
    int in_sequence; /* the block's first row in the sequence */
    int left;        /* rows of the sequence from in_sequence on */
    /* number of keys that each of the two rows sees; that every row of the block sees */
    int hi[2], all;

    __device__ __forceinline__ void begin(const LatentParams &a, const LatentTile &x, int rank) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
        in_sequence = (x.group * a.side + rank) * LATENT_ROWS;
        left = x.w.rows - in_sequence;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            at[r] = warp * 16 + lane / 4 + 8 * r;
            hi[r] = x.s.hi(min(in_sequence + at[r], x.w.rows - 1) / a.p.heads_q);
        }
        all = x.s.hi(min(in_sequence, x.w.rows - 1) / a.p.heads_q);
    }
};

/* Hides the keys that a row does not see, and those without a page. */
__device__ __forceinline__ void hide_keys(float (&s)[32], const LatentRows &rows, int key0,
                                          unsigned gone, int box_bits) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int e = 0; e < 32; ++e) {
        const int key = e / 4 * 8 + lane % 4 * 2 + e % 2;
        const bool missing = gone >> (key >> box_bits) & 1;
        if (key0 + key >= rows.hi[e / 2 % 2] || missing) s[e] = -INFINITY;
    }
}

/* The largest score of each of a thread's two rows. */
__device__ __forceinline__ void row_peaks(const float (&s)[32], float (&peak)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float x = fmaxf(s[2 * r], s[2 * r + 1]);
#pragma unroll
        for (int n = 1; n < 8; ++n) x = fmaxf(x, fmaxf(s[4 * n + 2 * r], s[4 * n + 2 * r + 1]));
        peak[r] = quad_max(x);
    }
}

/* P = 2^(S scale - ref), packed as A operands of wgmma. sum: this lane's part of each row's sum. */
template <class T>
__device__ __forceinline__ void weigh(const float (&s)[32], float scale, const float (&ref)[2],
                                      uint32_t (&p)[4][4], float (&sum)[2]) {
    const float base0 = ref[0] == -INFINITY ? 0.f : ref[0],
                base1 = ref[1] == -INFINITY ? 0.f : ref[1];
    sum[0] = sum[1] = 0;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
        const float x0 = ex2_approx_ftz(fmaf(s[4 * n], scale, -base0)),
                    x1 = ex2_approx_ftz(fmaf(s[4 * n + 1], scale, -base0));
        const float y0 = ex2_approx_ftz(fmaf(s[4 * n + 2], scale, -base1)),
                    y1 = ex2_approx_ftz(fmaf(s[4 * n + 3], scale, -base1));
        p[n / 2][n % 2 * 2] = pack2<T>(x0, x1);
        p[n / 2][n % 2 * 2 + 1] = pack2<T>(y0, y1);
        sum[0] += x0 + x1;
        sum[1] += y0 + y1;
    }
}

/* Zeroes the rows of V past the last key. P is 0 there, but 0 times NaN would be NaN. */
__device__ __forceinline__ void clear_values(smem_addr chunk_s, int keys) {
    for (int i = keys * 8 + threadIdx.x % 128; i < LATENT_KEYS * 8; i += 128)
#pragma unroll
        for (int panel = 0; panel < 8; ++panel)
            st_shared_128(chunk_s + panel * LatentSmem::PANEL + i * 16, make_uint4(0, 0, 0, 0));
}

/* Parities of the barriers. They continue from one tile to the next. */
struct LatentParity {
    unsigned full, ready, q;
};

/* The loop of warpgroup W over the chunks of a tile. On return o holds the warpgroup's columns of
 * O, and m the references of the rows in log2 units. l holds this lane's part of the row sums over
 * chunks W of the pairs only, so the caller adds the sums of both warpgroups. */
template <class T, int W>
__device__ __forceinline__ void
attend_chunks(const LatentParams &a, const LatentTile &x, const LatentRows &rows, smem_addr smem_s,
              float scale, LatentParity &parity, float (&o)[128], float (&m)[2], float (&l)[2]) {
    typedef LatentSmem S;
    constexpr int X = 1 - W; /* the other warpgroup */
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const smem_addr q_s = smem_s + S::Q, own_s = smem_s + W * S::CHUNK,
                    other_s = smem_s + X * S::CHUNK;
    const smem_addr full_s = smem_s + S::FULL + S::FULL_OF_CHUNK * W;
    const smem_addr empty_own_s = smem_s + S::EMPTY + 24 * W,
                    empty_other_s = smem_s + S::EMPTY + 24 * X;
    /* the row of P that this lane addresses in ldmatrix and stmatrix */
    const int p_at = LatentPanels::offset_of(warp * 16 + lane % 16, LATENT_DIM_V + lane / 16 * 8);
    bool add = false; /* false: o holds nothing yet */
    mbarrier_wait(smem_s + S::Q_FULL, parity.q);
    parity.q ^= 1;
#pragma unroll 1
    for (int t = x.t0; t < x.t1; t += 2) {
        const bool two = t + 1 < x.t1, has = W == 0 || two;
        bool grown = false;
        float ref[2] = {m[0], m[1]};

        /* 3.1 the scores of its own chunk, and P */
        if (has) {
            const int key0 = (t + W) * LATENT_KEYS;
            float s[32];
            wgmma_pin(s);
            add_scores<T, W * 4, W * 4 + 4, true>(s, q_s, own_s, full_s, parity.full);
            add_scores<T, X * 4, X * 4 + 4, false>(s, q_s, own_s, full_s, parity.full);
            add_scores<T, 8, 9, false>(s, q_s, own_s, full_s, parity.full);
            wgmma_commit_group();
            const unsigned gone = ld_shared_32(smem_s + S::MISSING + 4 * W);
            wgmma_wait_group<0>();
            wgmma_pin(s);
            parity.full ^= 1;
            if (t + 2 + W >= x.t1) release(smem_s + S::Q_EMPTY);
            if (key0 + LATENT_KEYS > rows.all || gone) hide_keys(s, rows, key0, gone, a.box_bits);
            float peak[2];
            row_peaks(s, peak);
            peak[0] *= scale;
            peak[1] *= scale;
            grown = __any_sync(0xffffffffu, peak[0] - m[0] > SOFTMAX_SLACK_LOG2 ||
                                                peak[1] - m[1] > SOFTMAX_SLACK_LOG2);
            if (grown) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    ref[r] = fmaxf(m[r], peak[r]);
                    if (lane % 4 == 0)
                        st_shared_f32(smem_s + S::REFS + 256 * W + rows.at[r] * 4, ref[r]);
                }
            }
            if (lane == 0) st_shared_32(smem_s + S::GROWN + 16 * W + warp * 4, grown);
            uint32_t p[4][4];
            float sum[2];
            weigh<T>(s, scale, ref, p, sum);
            /* all warps of the warpgroup have computed their scores, so P may overwrite the rotary
             * columns */
            bar_sync(BAR_OWN + W, 128);
#pragma unroll
            for (int n = 0; n < 4; ++n) stmatrix_x4(LatentPanels::along(own_s + p_at, 2 * n), p[n]);
            const bool last = key0 + LATENT_KEYS > x.w.end;
            if (last) clear_values(own_s, x.w.end - key0);
            fence_proxy_async();
            mbarrier_arrive(smem_s + S::READY + 8 * W);
            if (last) bar_sync(BAR_OWN + W, 128); /* all warps have cleared their part of V */
            if (grown) {
                const float f0 = shrink_of(m[0], ref[0]), f1 = shrink_of(m[1], ref[1]);
                l[0] *= f0;
                l[1] *= f1;
                if (add) scale_rows(o, f0, f1);
            }
            l[0] += sum[0];
            l[1] += sum[1];
            wgmma_pin(o);
            wgmma_fence();
            add_values<T, W>(o, p, own_s, add);
            wgmma_commit_group();
            add = true;
        }

        /* 3.2 the other chunk, with P of the other warpgroup */
        if (W == 1 || two) {
            mbarrier_wait(smem_s + S::READY + 8 * X, parity.ready);
            parity.ready ^= 1;
            const bool theirs = ld_shared_32(smem_s + S::GROWN + 16 * X + warp * 4);
            uint32_t p[4][4];
#pragma unroll
            for (int k = 0; k < 4; ++k)
                ldmatrix_x4(p[k], LatentPanels::along(other_s + p_at, 2 * k));
            if (__any_sync(0xffffffffu, theirs || grown)) { /* the references differ */
                float of_p[2], of_o[2];
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const float its =
                        theirs ? ld_shared_f32(smem_s + S::REFS + 256 * X + rows.at[r] * 4) : m[r];
                    const float to = fmaxf(ref[r], its);
                    of_o[r] = shrink_of(ref[r], to);
                    of_p[r] = shrink_of(its, to);
                    ref[r] = to;
                    l[r] *= of_o[r];
                }
#pragma unroll
                for (int k = 0; k < 4; ++k)
#pragma unroll
                    for (int i = 0; i < 4; ++i) p[k][i] = scaled_pair<T>(p[k][i], of_p[i % 2]);
                wgmma_wait_group<0>();
                wgmma_pin(o);
                if (add) scale_rows(o, of_o[0], of_o[1]);
            }
            wgmma_pin(o);
            wgmma_fence();
            add_values<T, W>(o, p, other_s, add);
            wgmma_commit_group();
            wgmma_wait_group<1>();
            if (has) release(empty_own_s + 8 * W);
            wgmma_wait_group<0>();
            wgmma_pin(o);
            add = true;
            release(empty_other_s + 8 * W);
            release(empty_other_s + 16);
        } else { /* the other chunk does not exist */
            wgmma_wait_group<0>();
            wgmma_pin(o);
            release(empty_own_s + 8 * W);
        }
        m[0] = ref[0];
        m[1] = ref[1];
    }
    /* if the tile has a single chunk, warpgroup 1 computes no scores and has not released Q */
    if (W == 1 && x.t0 + 1 >= x.t1) release(smem_s + S::Q_EMPTY);
}

} // namespace

#endif
