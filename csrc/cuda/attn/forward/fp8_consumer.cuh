/* SPDX-License-Identifier: BSD-3-Clause */
/* fp8_consumer.cuh: the work of a consumer warpgroup on one tile of flash_attn_fp8_sm90a, and the
 * store of its results. flash_attn_fp8_sm90a.cu has the equations and the order of a step.
 *
 * The warpgroup owns 64 rows of queries. For each block of BKV keys it computes S = Q K^T, the
 * weights P as e4m3 codes, and O += P V. The reference m of a row stays until a weight leaves the
 * range of the codes. The row then redoes its block with a new m. */
#ifndef GPUKERN_CUDA_ATTN_FP8_CONSUMER_CUH
#define GPUKERN_CUDA_ATTN_FP8_CONSUMER_CUH

#include "../../ptx/bar.cuh"
#include "../../ptx/bar_or.cuh"
#include "../../ptx/opaque.cuh"
#include "../../ptx/wgmma_e4m3.cuh"
#include "fp8_producer.cuh"
#include "fwd_products.cuh"
#include "fwd_results.cuh"

/* BLOCKS: k or v has a scale for each 128 tokens. Layout: s[4 n + 2 r + e] is row r of the lane's
 * two rows and column 8 n + e. */
template <class Tile, bool BLOCKS> struct Fp8Consumer {
    typedef Smem<Tile> S;
    typedef tma_steps<Tile::STAGES> Steps;
    static constexpr int BKV = Tile::BKV, N = BKV / 8, ND = Tile::HEAD_DIM_V / 8;

    const Fp8HopperParams &x;
    const smem_addr smem_s;
    const int warpgroup;
    float s[N * 4], o[ND * 4]; /* S; O */
    uint32_t p[N], next[N];    /* P of the previous block, the A operand of P V; P of this block */
    /* each row's reference in log2 units; this lane's part of each row's sum of weights */
    float m[2], total[2];
    float sum[2]; /* the sum of the current block's weights */
    /* bit 7 of a byte is 1 if a weight of the row reached the largest code or is NaN */
    uint32_t ends[2];
    /* The scale of Q K^T in log2 units, without k's scale if BLOCKS; the scale of v, with BLOCKS
     * the largest one. */
    float score, value;
    /* the present block's scale of S in log2 units; its v scale divided by `value` */
    float unit, share;

    __device__ __forceinline__ Fp8Consumer(const Fp8HopperParams &x, smem_addr smem_s,
                                           int warpgroup)
        : x(x), smem_s(smem_s), warpgroup(warpgroup) {}

    __device__ __forceinline__ Steps k_ring() const { return {smem_s + S::K_RING}; }
    __device__ __forceinline__ Steps v_ring() const { return {smem_s + S::VT_RING}; }
    /* One thread releases a stage for its warpgroup, after the product that read it is complete. */
    static __device__ __forceinline__ void release(smem_addr barrier_s) {
        if (mov_tid_x() % 128 == 0) mbarrier_arrive(barrier_s);
    }
    /* A barrier of the warpgroup. */
    __device__ __forceinline__ void together() const { bar_sync(1 + warpgroup, 128); }

    /* ---- scales ------------------------------------------------------------------------------ */
    __device__ __forceinline__ void begin_tile(const FwdTile &t) {
        const int b = t.work.b, head_kv = t.from.head_kv;
        score = fp8_saturated((float)x.f.fwd.problem.rules.scale * LOG2_E,
                              fp8_scale(x.q_scale, b, t.work.head, t.work.i0 + 64 * warpgroup));
        if (BLOCKS)
            value = fp8_largest(x.v_scale, b, head_kv, t.keys.lo, t.keys.hi);
        else
            unit = unit_of(fp8_saturated(score, fp8_scale(x.k_scale, b, head_kv, 0)));
    }
    /* Loads v's scale. It is called right before the last P V, which hides the load. During the
     * loop there is no register for the scale. */
    __device__ __forceinline__ void end_tile(const FwdTile &t) {
        if (!BLOCKS) value = fp8_scale(x.v_scale, t.work.b, t.from.head_kv, 0);
    }
    /* Replaces a scale of 0 by a number so small that its products vanish. 0 itself would give NaN
     * for hidden scores of -inf. */
    static __device__ __forceinline__ float unit_of(float unit) {
        return unit == 0 ? 0x1p-120f : unit;
    }
    __device__ __forceinline__ void begin_block(const FwdTile &t, int j) {
        if (!BLOCKS) return;
        const int token = t.keys.lo + j * BKV;
        unit = unit_of(fp8_saturated(score, fp8_scale(x.k_scale, t.work.b, t.from.head_kv, token)));
        share = fp8_share(x.v_scale, value, t.work.b, t.from.head_kv, token);
    }

    /* ---- products ---------------------------------------------------------------------------- */
    /* S [64][BKV] = Q K^T for this warpgroup's rows. */
    __device__ __forceinline__ void issue_scores(smem_addr q_s, int step) {
        const smem_addr k_s = smem_s + S::K_AT + Steps::stage(step) * S::K::bytes;
        wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < Tile::HEAD_DIM; kk += 32)
            wgmma_8bit_ss<e4m3, e4m3, BKV>(s, S::Q::k_major(q_s, 64 * warpgroup, kk),
                                           S::K::k_major(k_s, 0, kk), kk > 0);
        wgmma_commit_group();
    }
    /* O [64][HEAD_DIM_V] += P V. */
    __device__ __forceinline__ void issue_values(int step) {
        const smem_addr v_s = smem_s + S::VT_AT + Steps::stage(step) * S::Vt::bytes;
        wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < BKV; kk += 32)
            wgmma_e4m3_rs<Tile::HEAD_DIM_V>(o, p + kk / 8, S::Vt::k_major(v_s, 0, kk));
        wgmma_commit_group();
    }

    /* ---- weights ----------------------------------------------------------------------------- */
    /* Sets the scores of keys that a row does not see to the infinity whose weight is 0. */
    __device__ __forceinline__ void mask(const FwdTile &t, int j) {
        const float none = unit < 0 ? INFINITY : -INFINITY;
        const int key0 = t.keys.lo + j * BKV + frag_col(mov_tid_x() % 32, 0),
                  last = t.seq.seq_q - 1;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            /* rows past the sequence use the mask of its last row */
            const int i = min(t.work.i0 + own_row() + 8 * r, last);
            const uint32_t kept =
                columns_in<BKV / 4>(t.seq.span.lo(i) - key0, t.seq.span.hi(i) - key0);
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (!(kept >> (2 * n + e) & 1)) s[4 * n + 2 * r + e] = none;
        }
    }

    /* Computes the weights of a block with the present references, their sums, and which rows left
     * the range of the codes. */
    __device__ __forceinline__ void weigh() {
        /* two sums a row, because consecutive additions to one sum wait for each other */
        float part[4] = {0, 0, 0, 0};
        ends[0] = ends[1] = 0;
#pragma unroll
        for (int n = 0; n < N; n += 2) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float w[4];
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    w[e] = ex2_approx_ftz(fmaf(s[4 * (n + e / 2) + 2 * r + e % 2], unit, -m[r]));
                part[r] += w[0];
                part[2 + r] += w[1];
                part[r] += w[2];
                part[2 + r] += w[3];
                if (BLOCKS) {
                    w[0] *= share;
                    w[1] *= share;
                    w[2] *= share;
                    w[3] *= share;
                }
                const uint32_t codes = cvt_rn_satfinite_e4m3x4(w[0], w[1], w[2], w[3]);
                next[n + r] = codes;
                ends[r] |= (BLOCKS ? codes & 0x7f7f7f7fu : codes) + 0x02020202u;
            }
        }
        sum[0] = part[0] + part[2];
        sum[1] = part[1] + part[3];
        if (BLOCKS) /* with a small share, large weights do not show in the codes */
            for (int r = 0; r < 2; ++r) ends[r] |= sum[r] < 0x1p80f ? 0u : 0x80u;
    }
    /* True if this lane saw a weight of row r leave the range. */
    __device__ __forceinline__ bool leaves(int r) const { return ends[r] & 0x80808080u; }
    /* True if a row of the warp left the range. Without KEEPS_SCORES: if a row of the warpgroup
     * did, because the whole warpgroup then multiplies the scores again. */
    __device__ __forceinline__ bool any_leaves() const {
        const bool mine = ((ends[0] | ends[1]) & 0x80808080u) != 0;
        return Tile::KEEPS_SCORES ? __any_sync(0xffffffffu, mine)
                                  : bar_or(1 + warpgroup, 128, mine);
    }

    /* The largest score of row r, the same in its four lanes; -inf if the row sees no key of the
     * block. */
    __device__ __forceinline__ float row_top(int r) const {
        float top = s[2 * r] * unit;
#pragma unroll
        for (int n = 0; n < N; ++n)
            top = fmaxf(top, fmaxf(s[4 * n + 2 * r] * unit, s[4 * n + 2 * r + 1] * unit));
        return quad_max(top);
    }
    /* Sets the reference of each row by its largest score in the first block. */
    __device__ __forceinline__ void refer() {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float top = row_top(r);
            m[r] = top == -INFINITY ? STALE_NOTHING : top - FP8_WEIGHT_LOG2;
        }
    }
    /* Redoes block j. Rows that left the range get a new reference, and their O is rescaled. Other
     * rows get the same bits as before. */
    __device__ __forceinline__ void redo(const FwdTile &t, smem_addr q_s, int first, int j) {
        if (!Tile::KEEPS_SCORES) {
            issue_scores(q_s, first + j);
            wgmma_wait_group<0>();
            wgmma_pin(s);
            release(k_ring().empty(first + j));
            if (j < t.keys.plain_first || j >= t.keys.plain_end) mask(t, j);
        }
        float factor[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const unsigned lanes = __ballot_sync(0xffffffffu, leaves(r));
            const bool again = lanes >> (mov_tid_x() & 28) & 15;
            const float to = row_top(r) - FP8_WEIGHT_LOG2;
            factor[r] = again ? ex2_approx_ftz(m[r] - to) : 1.f;
            m[r] = again ? to : m[r];
            total[r] *= factor[r];
        }
        weigh();
#pragma unroll
        for (int i = 0; i < ND * 4; ++i) o[i] *= factor[i / 2 & 1];
    }
    /* Moves the block's weights into the operand registers and adds their sums. The opaque zero
     * keeps the compiler from writing the weights there while the previous product still reads
     * these registers. */
    __device__ __forceinline__ void taken() {
        uint32_t zero = 0;
        opaque(zero);
#pragma unroll
        for (int i = 0; i < N; ++i) p[i] = next[i] ^ zero;
        total[0] += sum[0];
        total[1] += sum[1];
    }

    /* ---- a tile ------------------------------------------------------------------------------ */
    /* The tile's first key block: computes S, sets the references and computes the weights. */
    __device__ __forceinline__ void first_block(const FwdTile &t, smem_addr q_s, int step) {
        begin_block(t, 0);
        k_ring().wait_full(step);
        issue_scores(q_s, step);
        clear(o);
        total[0] = total[1] = 0;
        wgmma_wait_group<0>();
        wgmma_pin(s);
        release(k_ring().empty(step));
        if (0 < t.keys.plain_first || 0 >= t.keys.plain_end) mask(t, 0);
        refer();
        weigh();
        taken();
    }

    /* Step j > 0 of the tile: S of this block and P V of the previous one, then this block's
     * weights. EDGE: some row does not see all keys of the block. Returns true if some row left the
     * range of the codes. */
    template <bool EDGE>
    __device__ __forceinline__ bool take_block(const FwdTile &t, smem_addr q_s, int first, int j) {
        const Steps k = k_ring(), v = v_ring();
        const int step = first + j;
        begin_block(t, j);
        k.wait_full(step);
        issue_scores(q_s, step);
        v.wait_full(step - 1);
        issue_values(step - 1);
        wgmma_wait_group<1>();
        wgmma_pin(s);
        if (Tile::KEEPS_SCORES) release(k.empty(step));
        if (EDGE) mask(t, j);
        weigh();
        const bool again = any_leaves();
        if (!Tile::KEEPS_SCORES && !again) release(k.empty(step));
        /* This barrier completed its only phase at the start, so the wait never blocks. Its loop
         * ends a basic block. Without that, ptxas moves the exponentials to after the wait for
         * O. */
        mbarrier_wait(smem_s + S::OVER, 0);
        wgmma_wait_group<0>();
        wgmma_pin(o);
        release(v.empty(step - 1));
        return again;
    }

    /* All key blocks after the first. The inner loop serves blocks whose keys every row sees. It
     * contains neither masking nor redo code. A block with a mask, or a redo, leaves the loop and
     * re-enters it. */
    __device__ __forceinline__ void other_blocks(const FwdTile &t, smem_addr q_s, int first,
                                                 int own) {
        const int plain_first = t.keys.plain_first, plain_end = min(t.keys.plain_end, own);
#pragma unroll 1
        for (int j = 1; j < own;) {
            bool again = false;
            if (j >= plain_first) {
#pragma unroll 1
                for (; j < plain_end; ++j) {
                    again = take_block<false>(t, q_s, first, j);
                    if (again) break;
                    taken();
                }
            }
            if (!again) {
                if (j >= own) break;
                again = take_block<true>(t, q_s, first, j);
            }
            if (again) redo(t, q_s, first, j);
            taken();
            ++j;
        }
    }

    /* The last P V of the tile. */
    __device__ __forceinline__ void last_values(int step) {
        const Steps v = v_ring();
        v.wait_full(step);
        issue_values(step);
        wgmma_wait_group<0>();
        wgmma_pin(o);
        release(v.empty(step));
    }

    /* Releases key blocks that only other warpgroups read, once all four warps have seen them
     * full. */
    __device__ __forceinline__ void pass(int step, int blocks) const {
        const Steps k = k_ring(), v = v_ring();
#pragma unroll 1
        for (int j = step; j < step + blocks; ++j) {
            k.wait_full(j);
            v.wait_full(j);
            together();
            release(k.empty(j));
            release(v.empty(j));
        }
    }

    /* ---- results ----------------------------------------------------------------------------- */
    static __device__ __forceinline__ void store_four(void *to, gk_dtype dtype, int64_t at,
                                                      const float (&y)[4]) {
        if (dtype == GK_BF16)
            *(uint2 *)((__nv_bfloat16 *)to + at) =
                make_uint2(pack2<__nv_bfloat16>(y[0], y[1]), pack2<__nv_bfloat16>(y[2], y[3]));
        else if (dtype == GK_F16)
            *(uint2 *)((__half *)to + at) =
                make_uint2(pack2<__half>(y[0], y[1]), pack2<__half>(y[2], y[3]));
        else
            *(float4 *)((float *)to + at) = make_float4(y[0], y[1], y[2], y[3]);
    }

    /* Stores O and lse to the tensors. If the keys are split, it stores them without the sink to
     * the split's part of the workspace. A lane has four neighbouring columns of each 16
     * (fp8_transpose). n: the number of the tile, which selects its copy of v_mean. */
    __device__ __forceinline__ void store(const FwdTile &t, int n) const {
        const FwdParams &f = x.f.fwd;
        const Problem &p = f.problem;
        const bool whole = f.splits == 1;
        const int b = t.work.b, head = t.work.head, quad = laneid() % 4;
        const bool has_mean = x.mean.data && t.steps.blocks > 0;
        const smem_addr mean_s = smem_s + S::MEANS + n % S::TILE_STAGES * S::MEAN_BYTES + quad * 16;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = t.work.i0 + own_row() + 8 * r;
            const float all = quad_sum(total[r]);
            if (i >= t.seq.seq_q) continue;
            const RowSum y = row_sum(m[r] * LN_2, all, whole ? sink_of(p, head) : -INFINITY);
            const float seen = all * y.factor(), factor = y.sum == 0 ? 0.f : y.factor() * value;
            const int64_t row =
                b * p.lse.batch + head * p.lse.head + (int64_t)(t.seq.q0 + i) * p.lse.row;
            const int64_t part = t.work.split * f.split_rows + row;
            float *lse = whole ? (float *)p.lse.data : f.lse_splits;
            if (quad == 0 && lse) lse[whole ? row : part] = y.lse();
            void *out = whole ? (void *)p.out.data : (void *)f.out_splits;
            const int64_t at = whole ? p.out.at(b, head, t.seq.q0 + i) : part * p.head_dim_v;
#pragma unroll
            for (int c = 0; c < ND / 2; ++c) {
                const int col = 16 * c + 4 * quad;
                if (col >= p.head_dim_v) continue;
                /* left has columns 0 and 2 of the four, right has columns 1 and 3 */
                const float *left = o + 8 * c + 2 * r, *right = left + 4;
                float four[4] = {left[0] * factor, right[0] * factor, left[1] * factor,
                                 right[1] * factor};
                if (has_mean) {
                    const uint4 add = ld_shared_128(mean_s + c * 64);
                    four[0] = fmaf(seen, __uint_as_float(add.x), four[0]);
                    four[1] = fmaf(seen, __uint_as_float(add.y), four[1]);
                    four[2] = fmaf(seen, __uint_as_float(add.z), four[2]);
                    four[3] = fmaf(seen, __uint_as_float(add.w), four[3]);
                }
                store_four(out, whole ? x.out_dtype : GK_F32, at + col, four);
            }
        }
    }
};

/* The loop of a consumer warpgroup over the block's tiles. */
template <class Tile, bool BLOCKS>
__device__ __forceinline__ void fp8_consume(const Fp8HopperParams &x, smem_addr smem_s,
                                            const FwdTile *tiles, int warpgroup) {
    typedef Smem<Tile> S;
    const tma_steps<Tile::Q_BUFFERS> q = {smem_s + S::Q_RING};
    const tma_steps<S::TILE_STAGES> described = {smem_s + S::TILE_RING};
    Fp8Consumer<Tile, BLOCKS> c(x, smem_s, warpgroup);
#pragma unroll 1
    for (int n = 0, step = 0;; ++n) {
        q.wait_full(n);
        const FwdTile &t = tiles[n % S::TILE_STAGES];
        const int4 steps = *(const int4 *)&t.steps;
        const int blocks = steps.w, own = warpgroup == 0   ? steps.x
                                          : warpgroup == 1 ? steps.y
                                                           : steps.z;
        if (blocks < 0) break;
        c.begin_tile(t);
        if (own > 0) {
            const smem_addr q_s = smem_s + q.stage(n) * S::Q::bytes;
            c.first_block(t, q_s, step);
            c.other_blocks(t, q_s, step, own);
            c.release(q.empty(n));
            c.end_tile(t);
            c.last_values(step + own - 1);
        } else {
            c.value = 0;
            clear(c.o);
            c.m[0] = c.m[1] = 0;
            c.total[0] = c.total[1] = 0;
            c.together(); /* all four warps have seen Q's barrier complete */
            c.release(q.empty(n));
        }
        c.pass(step + own, blocks - own);
        c.store(t, n);
        step += blocks;
        __syncwarp(); /* all lanes have read t */
        if (laneid() == 0) mbarrier_arrive(described.empty(n));
    }
}

#endif
