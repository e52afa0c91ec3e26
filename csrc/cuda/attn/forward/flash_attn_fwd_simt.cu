/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_fwd_simt: attention in float32 on CUDA cores, dense and packed, every modifier, in
 * FlashAttention-2's order (Dao 2023, arXiv:2307.08691). Every multiply-add is rounded to float32.
 *
 *  s_j = cap(scale q k_j) - slope |i + diagonal - j|   lse = log(e^sink + sum e^s_j)
 *  out = sum e^(s_j - lse) v_j
 *
 * q [.., Sq, D], k [.., Sk, D], v [.., Sk, Dv], out [.., Sq, Dv], rows aligned to 16 bytes; lse
 * [.., Sq]. D and Dv are multiples of 8 up to the bucket HEAD_DIM; the remaining columns are zeros
 * in shared memory.
 *
 * Work split: grid x = (split, head, tile of BQ rows) as in fwd_work.cuh; a block has 16 x TY
 * threads (tx, ty). A thread owns rows ty + TY i, keys tx + 16 j of S, and columns 4 (tx + 16 c) ..
 * + 3 of O. The 16 threads of a row are half a warp.
 *
 *  Pipeline: a buffer is refilled when all threads have read it
 *    cp.async  K0 | V0  | K1            | V1  |
 *    compute      | QK0 | softmax, P V0 | QK1 |
 *
 * Not handled: unaligned rows (flash_attn_fwd_plain). */
#include "../../tile/copy.cuh"
#include "../../tile/pipeline.cuh"
#include "../../tile/reduce.cuh"
#include "fwd_work.cuh"
#include "../softmax.cuh"

namespace {

/* ---- 1. shared memory ------------------------------------------------------------------------ */
template <class Tile> struct Smem {
    static constexpr int TX = 16, TY = Tile::BQ / Tile::ROWS, THREADS = TX * TY;
    typedef smem_tile<Tile::BQ, Tile::HEAD_DIM * 4> QTile;   /* 16, 32, 64 KiB */
    typedef smem_tile<Tile::BKV, Tile::HEAD_DIM * 4> KvTile; /* 16, 32, 64 KiB, K and V */
    typedef smem_tile<Tile::BQ, Tile::BKV * 4> PTile;        /* 16 KiB */
    static constexpr int K = QTile::bytes, V = K + KvTile::bytes, P = V + KvTile::bytes,
                         BYTES = P + PTile::bytes;
    static constexpr int CTAS = 227 * 1024 / BYTES; /* 3, 2, 1: shared memory sets the limit */
    static_assert(TY % 8 == 0 && Tile::BQ == TY * Tile::ROWS && Tile::BKV % TX == 0 &&
                      Tile::HEAD_DIM % (4 * TX) == 0,
                  "threads tile S, O");
};

/* The number of bank conflicts when K is read: 16 threads read 16 rows of one chunk, and the other
 * 16 read the same. */
template <class KvTile> constexpr int key_ways() {
    int at[32] = {};
    for (int lane = 0; lane < 32; ++lane) at[lane] = KvTile::offset(lane % 16, 5);
    return ways(at, 16);
}

/* The number of bank conflicts when P is written: two rows with 16 keys each, in four chunks. Both
 * rows are in the same half of the banks. */
template <class PTile> constexpr int weight_ways() {
    int at[32] = {};
    for (int lane = 0; lane < 32; ++lane) at[lane] = PTile::offset_of(lane / 16, lane % 16, 4);
    return ways(at, 4);
}

__device__ __forceinline__ float4 ld_float4(smem_addr at) {
    const uint4 x = ld_shared_128(at);
    return make_float4(__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z),
                       __uint_as_float(x.w));
}

__device__ __forceinline__ float dot4(float4 a, float4 b, float sum) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

__device__ __forceinline__ float4 fma4(float a, float4 b, float4 sum) {
    return make_float4(fmaf(a, b.x, sum.x), fmaf(a, b.y, sum.y), fmaf(a, b.z, sum.z),
                       fmaf(a, b.w, sum.w));
}

/* ---- 2. the kernel --------------------------------------------------------------------------- */
template <class Tile, bool MODIFIED>
__global__ void __launch_bounds__(Smem<Tile>::THREADS, Smem<Tile>::CTAS > 2 ? 2 : 1)
    flash_attn_fwd_simt_kernel(FwdParams params) {
    typedef Smem<Tile> S;
    typedef typename S::QTile QTile;
    typedef typename S::KvTile KvTile;
    typedef typename S::PTile PTile;
    constexpr int THREADS = S::THREADS, TX = S::TX, TY = S::TY, ROWS = Tile::ROWS;
    constexpr int KEYS = Tile::BKV / TX, CHUNKS = Tile::HEAD_DIM / 4, MINE = CHUNKS / TX;
    static_assert(key_ways<KvTile>() == 1, "K is read without conflicts");
    static_assert(weight_ways<PTile>() == 2, "P is written once and read 16 times as often");
    extern __shared__ __align__(1024) unsigned char smem[];
    const smem_addr q_s = cvta_to_shared(smem), k_s = q_s + S::K, v_s = q_s + S::V,
                    p_s = q_s + S::P;
    const Problem &p = params.problem;
    const int thread = threadIdx.x, tx = thread % TX, ty = thread / TX;

    /* 2.1 rows and keys of this block */
    const FwdWork work = fwd_work<Tile::BQ>(params, blockIdx.x);
    const Sequence seq = sequence_of(p, work.b);
    if (work.i0 >= seq.seq_q) return;
    const int rows = min(Tile::BQ, seq.seq_q - work.i0);
    const FwdKeys keys = fwd_keys<Tile::BKV>(params, seq.span, work.i0, rows, work.split);
    const int head_kv = work.head / p.group;
    const float *q_g = (const float *)p.q.data + p.q.at(work.b, work.head, seq.q0 + work.i0);
    const float *k_g = (const float *)p.k.data + p.k.at(work.b, head_kv, seq.k0 + keys.lo);
    const float *v_g = (const float *)p.v.data + p.v.at(work.b, head_kv, seq.k0 + keys.lo);
    const Score modifiers = score_of(p, seq, work.b, work.head);

    RowSoftmax<ExpByTwo> softmax[ROWS]; /* sum: over this thread's keys */
    float4 o[ROWS][MINE];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        softmax[i] = {-INFINITY, 0};
#pragma unroll
        for (int c = 0; c < MINE; ++c) o[i][c] = make_float4(0, 0, 0, 0);
    }

    /* 2.2 the loop over key tiles. Rows of K and V from keys.hi on, which may hold NaN, become
     * zeros. */
    if (keys.tiles > 0) {
        copy_tile_async<QTile, THREADS>(q_s, q_g, p.q.row, rows, p.head_dim, thread);
        copy_tile_async<KvTile, THREADS>(k_s, k_g, p.k.row, keys.hi - keys.lo, p.head_dim, thread);
        cp_async_commit_group();
    }
    for (int t = 0; t < keys.tiles; ++t) {
        const int j0 = t * Tile::BKV, key0 = keys.lo + j0;
        cp_async_wait_group<0>();
        __syncthreads(); /* K of tile t has arrived; all have read V of the previous tile */
        copy_tile_async<KvTile, THREADS>(v_s, v_g + j0 * p.v.row, p.v.row, keys.hi - key0,
                                         p.head_dim_v, thread);
        cp_async_commit_group();

        /* S = Q K^T, then scores in natural units */
        float s[ROWS][KEYS] = {}, part[ROWS][KEYS];
#pragma unroll 2
        for (int d = 0; d < CHUNKS; ++d) {
            constexpr int PART = SIMT_PART / 4;
            if (d % PART == 0)
#pragma unroll
                for (int i = 0; i < ROWS; ++i)
#pragma unroll
                    for (int j = 0; j < KEYS; ++j) part[i][j] = 0;
            float4 k[KEYS];
#pragma unroll
            for (int j = 0; j < KEYS; ++j)
                k[j] = ld_float4(KvTile::down(k_s + KvTile::offset(tx, d), TX * j));
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const float4 q = ld_float4(QTile::down(q_s + QTile::offset(ty, d), TY * i));
#pragma unroll
                for (int j = 0; j < KEYS; ++j) part[i][j] = dot4(q, k[j], part[i][j]);
            }
            if (d % PART == PART - 1)
#pragma unroll
                for (int i = 0; i < ROWS; ++i)
#pragma unroll
                    for (int j = 0; j < KEYS; ++j) s[i][j] += part[i][j];
        }
        const bool edge = t < keys.plain_first || t >= keys.plain_end;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int row = work.i0 + ty + TY * i, seen = min(row, seq.seq_q - 1);
            const int lo = seq.span.lo(seen), hi = seq.span.hi(seen);
#pragma unroll
            for (int j = 0; j < KEYS; ++j) {
                const int key = key0 + tx + TX * j;
                s[i][j] =
                    MODIFIED ? score_fine(modifiers, s[i][j], row, key) : s[i][j] * modifiers.scale;
                if (edge && (key < lo || key >= hi)) s[i][j] = -INFINITY;
            }
        }

        cp_async_wait_group<0>();
        __syncthreads(); /* V of tile t has arrived; all have read its K */
        if (t + 1 < keys.tiles)
            copy_tile_async<KvTile, THREADS>(k_s, k_g + (j0 + Tile::BKV) * p.k.row, p.k.row,
                                             keys.hi - key0 - Tile::BKV, p.head_dim, thread);
        cp_async_commit_group();

        /* online softmax; P goes through shared memory, within half a warp */
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            float highest = s[i][0];
#pragma unroll
            for (int j = 1; j < KEYS; ++j) highest = fmaxf(highest, s[i][j]);
            const float shrink = softmax[i].raise(lanes_max<1, TX>(highest));
            float sum = 0;
#pragma unroll
            for (int j = 0; j < KEYS; ++j) {
                const float weight = softmax[i].weight(s[i][j]);
                sum += weight;
                st_shared_32(PTile::down(p_s + PTile::offset_of(ty, tx + TX * j, 4), TY * i),
                             __float_as_uint(weight));
            }
            softmax[i].sum = fmaf(softmax[i].sum, shrink, sum);
#pragma unroll
            for (int c = 0; c < MINE; ++c) o[i][c] = fma4(shrink, o[i][c], make_float4(0, 0, 0, 0));
        }
        __syncwarp(); /* P of these rows is complete */

        /* O += P V */
#pragma unroll 2
        for (int j = 0; j < Tile::BKV / 4; ++j) {
            float4 w[ROWS];
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
                w[i] = ld_float4(PTile::down(p_s + PTile::offset(ty, j), TY * i));
#pragma unroll
            for (int e = 0; e < 4; ++e) {
#pragma unroll
                for (int c = 0; c < MINE; ++c) {
                    const float4 v = ld_float4(v_s + KvTile::offset(4 * j + e, tx + TX * c));
#pragma unroll
                    for (int i = 0; i < ROWS; ++i)
                        o[i][c] = fma4(e == 0   ? w[i].x
                                       : e == 1 ? w[i].y
                                       : e == 2 ? w[i].z
                                                : w[i].w,
                                       v, o[i][c]);
                }
            }
        }
        __syncwarp(); /* P must be read before the next tile overwrites it */
    }

    /* 2.3 the results go to the tensors, or to a partial result in the workspace */
    const bool whole = params.splits == 1;
    const float sink = whole ? sink_of(p, work.head) : -INFINITY;
    float *lse_g = whole ? (float *)p.lse.data : params.lse_splits + work.split * params.split_rows;
    const int64_t lse0 =
        work.b * p.lse.batch + work.head * p.lse.head + (int64_t)seq.q0 * p.lse.row;
    float *out_g = (float *)p.out.data + p.out.at(work.b, work.head, seq.q0);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const RowResult y = row_result(softmax[i].peak, lanes_sum<1, TX>(softmax[i].sum), sink);
        const int64_t row = work.i0 + ty + TY * i;
        if (row >= seq.seq_q) continue;
        const int64_t at = lse0 + row * p.lse.row;
        if (tx == 0 && lse_g) lse_g[at] = y.lse;
        float *to = whole
                        ? out_g + row * p.out.row
                        : params.out_splits + (work.split * params.split_rows + at) * p.head_dim_v;
#pragma unroll
        for (int c = 0; c < MINE; ++c) {
            const int col = 4 * (tx + TX * c);
            if (col < p.head_dim_v)
                *(float4 *)(to + col) = fma4(y.factor, o[i][c], make_float4(0, 0, 0, 0));
        }
    }
}

/* ---- 3. launcher and table ------------------------------------------------------------------- */
/* An instance's key. */
struct SimtKey {
    enum {
        HEAD_DIM,
        MODIFIED, /* softcap or ALiBi */
        SMEM      /* bytes of shared memory */
    };
};

bool serves(const gk_cuda_instance *instance, const gk_context *ctx, const gk_flash_attn_args *a) {
    const int64_t head_dim = gk_max_i64(a->q.shape[a->q.ndim - 1], a->v.shape[a->v.ndim - 1]);
    const bool modified = a->rules.softcap > 0 || a->rules.alibi_slopes;
    return head_dim <= instance->key[SimtKey::HEAD_DIM] &&
           modified == (instance->key[SimtKey::MODIFIED] != 0) && all_aligned(a) &&
           smem_fits(ctx, instance->key[SimtKey::SMEM]);
}

template <class Tile>
bool plan(const gk_cuda_instance *instance, const gk_context *ctx, const void *args, gk_plan *to) {
    const gk_flash_attn_args *a = (const gk_flash_attn_args *)args;
    if (!serves(instance, ctx, a)) return false;
    const FwdParams &p = gk_own<FwdParams>(to) =
        fwd_params(ctx, a, Tile::BQ, Tile::BKV, Smem<Tile>::CTAS, 1, fwd_by_parts(a) ? 2 : 1);
    fwd_plan(ctx, p, Tile::BQ, Tile::BKV, Smem<Tile>::CTAS, fwd_blocks(p), to);
    return gk_grid_fits(to->tasks);
}

template <class Tile, bool MODIFIED>
gk_status run(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    FwdParams p = gk_own<FwdParams>(plan);
    fwd_place(&p, workspace);
    const gk_status status = launch<flash_attn_fwd_simt_kernel<Tile, MODIFIED>>(
        "gk_flash_attn_fwd", ctx, dim3((unsigned)plan->tasks), Smem<Tile>::THREADS,
        Smem<Tile>::BYTES, p);
    return status == GK_OK
               ? fwd_finish<float>("gk_flash_attn_fwd", ctx, (const gk_flash_attn_args *)args, p)
               : status;
}

#define INSTANCE(D, name, MODIFIED)                   \
    {name,                                            \
     GK_F32,                                          \
     plan<FlashFwdSimtTile<D>>,                       \
     run<FlashFwdSimtTile<D>, MODIFIED>,              \
     {D, MODIFIED, Smem<FlashFwdSimtTile<D>>::BYTES}, \
     NULL}
#define INSTANCES(D)                                    \
    INSTANCE(D, "flash_attn_fwd_simt_f32_d" #D, false), \
        INSTANCE(D, "flash_attn_fwd_simt_f32_d" #D "_score", true)

const gk_cuda_instance instances[] = {INSTANCES(64), INSTANCES(128), INSTANCES(256)};

} // namespace

extern "C" const gk_cuda_table gk_flash_attn_fwd_simt_table = {
    instances, sizeof instances / sizeof instances[0], 80, NULL};
