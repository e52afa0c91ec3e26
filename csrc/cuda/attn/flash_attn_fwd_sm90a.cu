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
#include "../ptx/bar.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/griddepcontrol.cuh"
#include "../ptx/stmatrix.cuh"
#include "../ptx/wgmma.cuh"
#include "../tile/fragment.cuh"
#include "fwd_producer.cuh"
#include "fwd_products.cuh"
#include "mask.cuh"
#include "softmax.cuh"
#include "stale_softmax.cuh"

namespace {

/* ---- 1. a tile of a consumer warpgroup ------------------------------------------------------------------ */
/* This lane's first row of the tile (the other one is 8 on), worked out where it is asked for: the loop has no register
 * for it. */
__device__ __forceinline__ int own_row() {
    const int thread = mov_tid_x();
    return thread / 32 * 16 + frag_row(thread % 32, 0);
}

template <class T, class Tile, bool MODIFIED> struct Consumer {
    typedef Smem<Tile> S;
    typedef tma_steps<Tile::STAGES> Steps;
    static constexpr int BKV = Tile::BKV, N = BKV / 8, ND = Tile::HEAD_DIM_V / 8;
    StaleSoftmax<T, BKV> softmax;
    float o[ND * 4];

    /* What a lane's two rows make of a block of keys, found while the products run. */
    struct Rows {
        uint32_t kept[2];
        float slope[2], ahead[2];
        int row0, key0;
    };
    static __device__ __forceinline__ bool asks_rows(const FwdHopperParams &x, bool edge) {
        return edge || (MODIFIED && (x.units.sloped || !x.units.plain));
    }
    static __device__ __forceinline__ Rows rows_of_block(const FwdHopperParams &x, const FwdTile &t, int block,
                                                         bool edge) {
        Rows y = {};
        if (!asks_rows(x, edge)) return y;
        const Span span = t.seq.span;
        const int key0 = t.keys.lo + block * BKV + frag_col(mov_tid_x() % 32, 0), last = t.seq.seq_q - 1;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const FwdRow row = row_of(x, t, own_row() + 8 * r);
            const int i = min(row.i, last); /* rows past the sequence see what its last row sees */
            y.kept[r] = columns_in<BKV / 4>(span.lo(i) - key0, span.hi(i) - key0);
            if (r == 0) y.row0 = row.i, y.key0 = key0;
            if (!MODIFIED || !x.units.sloped) continue;
            /* of stacked heads each has its own */
            y.slope[r] = x.stacked == 1 ? t.score.slope : slope_of<float>(x.fwd.problem.rules, t.work.b, row.head);
            y.slope[r] *= x.units.per_slope, y.ahead[r] = (float)(row.i + t.score.position0 - key0);
        }
        return y;
    }

    /* Scores of a block, before the softmax: what the products cannot do. */
    static __device__ __forceinline__ void finish_scores(float (&s)[N * 4], const FwdHopperParams &x, const FwdTile &t,
                                                         const Rows &rows, bool edge) {
        if (MODIFIED && x.units.capped && x.units.plain) cap_scores(s, x.units);
        if (MODIFIED && !x.units.plain)
            modify(*(float (*)[1][N][4]) & s, t.score, rows.row0, rows.key0);
        else if (MODIFIED && x.units.sloped)
            lean_scores(s, rows.slope, rows.ahead);
        if (edge) keep_columns(s, rows.kept);
    }

    static __device__ __forceinline__ smem_addr k_at(smem_addr smem_s, int step) {
        return smem_s + S::K_AT + Steps::stage(step) * S::K::bytes;
    }
    static __device__ __forceinline__ smem_addr v_at(smem_addr smem_s, int step) {
        return smem_s + S::V_AT + Steps::stage(step) * S::V::bytes;
    }

    /* This warp's rows of a Q that its store has read may be loaded anew; barrier 0: there is none. */
    static __device__ __forceinline__ void release_q(smem_addr barrier_s) {
        if (barrier_s && laneid() == 0) tma_store_wait_group_read<0>(), mbarrier_arrive(barrier_s);
    }

    /* Steps [from, end) of the tile: this warpgroup's rows see keys of their blocks; at least one. step: of earlier tiles. */
    __device__ __forceinline__ void run(const FwdHopperParams &x, const FwdTile &t, smem_addr smem_s, smem_addr q_s,
                                        int step, int warpgroup, int from, int end, smem_addr last_q) {
        const Steps k = {smem_s + S::K_RING}, v = {smem_s + S::V_RING};
        const bool signals = threadIdx.x % 128 == 0;
        const int plain_first = t.keys.plain_first, plain_end = t.keys.plain_end;
        const float unit_log2 = x.units.unit_log2;
        float s[N * 4];
        float w[N * 4]; /* weights in float32 until P's registers are free */
        uint32_t p[N * 2];

        k.wait_full(step + from);
        turn_begin<Tile>(warpgroup);
        issue_scores<T, Tile>(s, q_s, k_at(smem_s, step + from), 64 * warpgroup);
        turn_end<Tile>(warpgroup);
        const int first = block_at<MODIFIED>(t, from);
        const bool first_edge = first < plain_first || first >= plain_end;
        const Rows first_rows = rows_of_block(x, t, first, first_edge);
        clear(o); /* while the products run */
        wgmma_wait_group<0>();
        wgmma_pin(s);
        if (signals) mbarrier_arrive(k.empty(step + from));
        finish_scores(s, x, t, first_rows, first_edge);
        softmax.refer(s, unit_log2);
        softmax.weights(s, unit_log2, w, softmax.total);
        softmax.pack(w, p);
        release_q(last_q); /* the store of the tile before has had the time of a block */
        if (MODIFIED && t.ragged > 0 && first == t.keys.tiles - 1) {
            v.wait_full(step + from);
            clear_rows<Tile>(v_at(smem_s, step + from), t.ragged, warpgroup);
        }

#pragma unroll 1
        for (int j = from + 1; j < end; ++j) {
            float sum[2];
            const int block = block_at<MODIFIED>(t, j);
            k.wait_full(step + j);
            if (MODIFIED) opaque(q_s); /* or its descriptors stay in registers, where there are none left */
            turn_begin<Tile>(warpgroup);
            issue_scores<T, Tile>(s, q_s, k_at(smem_s, step + j), 64 * warpgroup);
            v.wait_full(step + j - 1);
            issue_values<T, Tile>(o, p, v_at(smem_s, step + j - 1));
            turn_end<Tile>(warpgroup);
            const bool edge = block < plain_first || block >= plain_end;
            const Rows rows = rows_of_block(x, t, block, edge);
            wgmma_wait_group<Tile::OVERLAP>();
            wgmma_pin(s);
            if (signals) mbarrier_arrive(k.empty(step + j));
            if (!Tile::OVERLAP) {
                wgmma_pin(o);
                if (signals) mbarrier_arrive(v.empty(step + j - 1));
            }
            finish_scores(s, x, t, rows, edge);
            softmax.weights(s, unit_log2, w, sum);
            if (!Tile::OVERLAP) softmax.pack(w, p);
            const bool again = __any_sync(0xffffffffu, softmax.out_of_range(sum));
            if (Tile::OVERLAP) {
                /* over for ever: ends a basic block, or ptxas moves the powers past the wait below */
                mbarrier_wait(smem_s + S::OVER, 0);
                wgmma_wait_group<0>();
                wgmma_pin(o);
                if (signals) mbarrier_arrive(v.empty(step + j - 1));
            }
            if (again) {
                float factor[2];
                softmax.redo(s, unit_log2, w, sum, factor);
                if (!Tile::OVERLAP) softmax.pack(w, p);
#pragma unroll
                for (int i = 0; i < ND * 4; ++i) o[i] *= factor[i / 2 & 1];
            }
            if (Tile::OVERLAP) softmax.pack(w, p);
            softmax.total[0] += sum[0], softmax.total[1] += sum[1];
        }

        step += end - 1;
        v.wait_full(step);
        if (t.ragged > 0 && block_at<MODIFIED>(t, end - 1) == t.keys.tiles - 1)
            clear_rows<Tile>(v_at(smem_s, step), t.ragged, warpgroup);
        turn_begin<Tile>(warpgroup);
        issue_values<T, Tile>(o, p, v_at(smem_s, step));
        turn_end<Tile>(warpgroup);
        wgmma_wait_group<0>();
        wgmma_pin(o);
        if (signals) mbarrier_arrive(v.empty(step));
    }

    /* Blocks from step on that only other warpgroups read; turns are taken all the same. */
    static __device__ __forceinline__ void pass(smem_addr smem_s, int step, int blocks, int warpgroup) {
        const Steps k = {smem_s + S::K_RING}, v = {smem_s + S::V_RING};
#pragma unroll 1
        for (int j = step; j < step + blocks; ++j) {
            k.wait_full(j), v.wait_full(j);
            turn_begin<Tile>(warpgroup); /* brings the four warps together: all have seen the stages full */
            turn_end<Tile>(warpgroup);
            if (threadIdx.x % 128 == 0) mbarrier_arrive(k.empty(j)), mbarrier_arrive(v.empty(j));
        }
    }
};

/* ---- 2. results ----------------------------------------------------------------------------------------- */
/* A warp's 16 rows of O, times factor, to its own rows of Q. */
template <class T, class Tile>
__device__ __forceinline__ void stage_rows(const float (&o)[Tile::HEAD_DIM_V / 2], const float (&factor)[2],
                                           smem_addr q_s) {
    typedef typename Smem<Tile>::Q Q;
    const int warp = mov_tid_x() / 32, lane = laneid();
    /* stmatrix: 8 x 8 blocks, rows 0-7 and 8-15 of one octet of columns, then of the next. The first one's address gives all */
    const smem_addr first_s = q_s + Q::offset_of(16 * warp + lane % 16, lane / 16 * 8);
#pragma unroll
    for (int n = 0; n < Tile::HEAD_DIM_V / 8; n += 2) {
        uint32_t four[4];
#pragma unroll
        for (int e = 0; e < 4; ++e)
            four[e] = pack2<T>(o[4 * n + 2 * e] * factor[e & 1], o[4 * n + 2 * e + 1] * factor[e & 1]);
        stmatrix_x4(Q::along(first_s, n), four);
    }
}

/* The rows that a warp has staged to the tensor. */
template <class T, class Tile>
__device__ __forceinline__ void store_rows(const FwdHopperParams &x, const FwdTile &t, smem_addr q_s) {
    typedef typename Smem<Tile>::Q Q;
    const Problem &p = x.fwd.problem;
    const int warp = mov_tid_x() / 32, lane = laneid(), first = t.work.i0 + 16 * warp;
    /* TMA leaves out rows past a dense tensor, but not those of the next sequence. A vote: the compiler sees that lanes agree */
    if (__all_sync(0xffffffffu, x.stacked == 1 && (!p.cu_q || first + 16 <= t.seq.seq_q))) {
        fence_proxy_async(); /* this lane's part comes before TMA's read */
        __syncwarp();        /* and so do all lanes' */
        if (lane == 0 && first < t.seq.seq_q) {
#pragma unroll
            for (int d = 0; d < Tile::HEAD_DIM_V; d += 64)
                if (d < p.head_dim_v)
                    tma_store_5d(&x.out, {{d, t.seq.q0 + first, t.work.head, p.cu_q ? 0 : t.work.b, 0}},
                                 q_s + Q::offset(16 * warp, d));
        }
        if (lane == 0) tma_store_commit_group();
    } else {
        __syncwarp();
        T *out_g = (T *)p.out.data + t.work.b * p.out.batch + (int64_t)t.seq.q0 * p.out.row;
#pragma unroll 1
        for (int i = 0; i < 16 * (Tile::HEAD_DIM_V / 8); i += 32) {
            const int row = 16 * warp + (i + lane) / (Tile::HEAD_DIM_V / 8),
                      col = (i + lane) % (Tile::HEAD_DIM_V / 8) * 8;
            const FwdRow at = row_of(x, t, row);
            if (row < t.rows && at.i < t.seq.seq_q && col < p.head_dim_v)
                st_global_128(out_g + at.head * p.out.head + (int64_t)at.i * p.out.row + col,
                              ld_shared_128(q_s + Q::offset_of(row, col)));
        }
        fence_proxy_async(); /* these accesses come before TMA's next load of Q */
        __syncwarp();
    }
}

/* O and lse of a warp's rows to the tensors, or to a part of the workspace. */
template <class T, class Tile, bool MODIFIED>
__device__ __forceinline__ void store_tile(const FwdHopperParams &x, const FwdTile &t,
                                           const Consumer<T, Tile, MODIFIED> &c, smem_addr q_s) {
    const FwdParams &f = x.fwd;
    const Problem &p = f.problem;
    const bool whole = f.splits == 1;
    RowSum sum[2];
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const FwdRow at = row_of(x, t, own_row() + 8 * r);
        const bool real = own_row() + 8 * r < t.rows && at.i < t.seq.seq_q;
        sum[r] = c.softmax.result(r, whole && real ? sink_of(p, at.head) : -INFINITY);
        /* rows that stacked heads leave free stay finite in Q */
        factor[r] = real && sum[r].sum != 0 ? __fdividef(sum[r].share, sum[r].sum) : 0.f;
    }
    if (whole) {
        stage_rows<T, Tile>(c.o, factor, q_s);
        store_rows<T, Tile>(x, t, q_s);
    }
    /* lse comes last: the fence before TMA would wait until it has arrived */
    float *lse_g = whole ? (float *)p.lse.data : f.lse_splits + t.work.split * f.split_rows;
    const int64_t lse0 = t.work.b * p.lse.batch + (int64_t)t.seq.q0 * p.lse.row;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const FwdRow at = row_of(x, t, own_row() + 8 * r);
        const bool real = own_row() + 8 * r < t.rows && at.i < t.seq.seq_q;
        const int64_t row = lse0 + at.head * p.lse.head + (int64_t)at.i * p.lse.row;
        if (real && laneid() % 4 == 0 && lse_g) lse_g[row] = sum[r].lse();
        if (!whole && real) {
            float *part = f.out_splits + (t.work.split * f.split_rows + row) * p.head_dim_v;
#pragma unroll
            for (int n = 0; n < Tile::HEAD_DIM_V / 8; ++n) {
                const int col = 8 * n + frag_col(laneid(), 0);
                if (col < p.head_dim_v)
                    *(float2 *)(part + col) =
                        make_float2(c.o[4 * n + 2 * r] * factor[r], c.o[4 * n + 2 * r + 1] * factor[r]);
            }
        }
    }
}

/* One consumer warpgroup: tile after tile. */
template <class T, class Tile, bool MODIFIED>
__device__ __forceinline__ void consume(const FwdHopperParams &x, smem_addr smem_s, const FwdTile *tiles,
                                        int warpgroup) {
    typedef Smem<Tile> S;
    const tma_steps<Tile::Q_BUFFERS> q = {smem_s + S::Q_RING};
    const tma_steps<S::TILE_STAGES> described = {smem_s + S::TILE_RING};
    if (warpgroup == Tile::WARPGROUPS - 1) bar_arrive(1, 256); /* warpgroup 0 has the first turn */
#pragma unroll 1
    for (int n = 0, step = 0;; ++n) {
        q.wait_full(n);
        const FwdTile &t = tiles[n % S::TILE_STAGES];
        const int4 steps = *(const int4 *)&t.steps;
        const int blocks = steps.w, own = warpgroup == 0 ? steps.x : warpgroup == 1 ? steps.y : steps.z;
        if (blocks < 0) break;
        const smem_addr q_s = smem_s + q.stage(n) * S::Q::bytes;
        Consumer<T, Tile, MODIFIED> c;
        c.softmax.clear();
        const int lead = MODIFIED && own > 0 ? max(t.nearest - own + 1, 0) : 0;
        smem_addr last_q = Tile::Q_BUFFERS == 2 && n > 0 ? q.empty(n - 1) : 0;
        if (MODIFIED && lead > 0) { /* V of these blocks comes after the next Q */
            c.release_q(last_q), last_q = 0;
            c.pass(smem_s, step, lead, warpgroup);
        }
        if (own > 0)
            c.run(x, t, smem_s, q_s, step, warpgroup, lead, lead + own, last_q);
        else
            clear(c.o), c.release_q(last_q);
        c.pass(smem_s, step + lead + own, blocks - lead - own, warpgroup);
        if (own == 0 && blocks > 0)
            turn_begin<Tile>(warpgroup), turn_end<Tile>(warpgroup); /* that of the last product */
        step += blocks;
        store_tile(x, t, c, q_s);
        __syncwarp(); /* all lanes have read t */
        if (laneid() == 0) mbarrier_arrive(described.empty(n));
        if (Tile::Q_BUFFERS == 1) c.release_q(q.empty(n));
    }
    if (laneid() == 0) tma_store_wait_group_read<0>(); /* shared memory stays until TMA has read it */
}

/* ---- 3. the kernel -------------------------------------------------------------------------------------- */
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
        griddepcontrol_wait(); /* what the kernel before wrote is there, and nobody reads out any more */
        if (warp == 2 && blockIdx.x == 0 && x.fwd.problem.cu_q)
            check_sequences(x.fwd.problem);
        else if (warp == 1)
            find_tiles<Tile, MODIFIED>(x, smem, smem_s);
        else if (warp == 0 && elect_one())
            load_tiles<Tile, MODIFIED>(x, tiles, smem_s);
    } else {
        setmaxnreg_inc<Tile::CONSUMER_REGISTERS>();
        consume<T, Tile, MODIFIED>(x, smem_s, tiles, warpgroup);
    }
}

/* ---- 4. launcher and table ------------------------------------------------------------------------------ */
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
    /* packed: each sequence ends in a tile, or a pair, of its own */
    const int64_t units = x.schedule.heads * (p.cu_q ? p.total_q / BQ + (int64_t)p.batch
                                                     : fwd_units_of(x.schedule.tiles, x.schedule.paired));
    x.schedule.units = (int)gk_min_i64(units * x.schedule.splits, INT32_MAX);
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
    const int sms = gk_gpu_of(ctx->index)->num_sms;
    const int blocks = x.schedule.units < sms ? x.schedule.units : sms;
    status = launch<flash_attn_fwd_sm90a_kernel<T, Tile, MODIFIED>>(op, ctx, dim3((unsigned)blocks),
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
