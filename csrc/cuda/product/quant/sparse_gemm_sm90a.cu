/* SPDX-License-Identifier: BSD-3-Clause */
/* sparse_gemm_sm90a: sparse_gemm on Hopper by sparse WGMMA, which skips the zeros of a 2:4
 * weight. Mishra et al. 2021, arXiv:2104.08378.
 *
 *   out^T [N, M] = activation(scale_b scale_a (W A^T) + bias)
 *
 * a [M, K] is K-major; values [N, K / 2] and meta [N, K / 8] come from sparse_pack. Only WGMMA's
 * first operand may be sparse. So the product is transposed: the weight's rows are WGMMA's rows,
 * and the rows of a (tokens) its columns.
 *
 * Grid: persistent blocks, or clusters of two that share tokens. A block of 3 warpgroups takes
 * tiles of BW = 128 MS weights x BT tokens. Warp 0 fills a ring by TMA with rows of 128 bytes of
 * a and 64 bytes of values. Warps 1 to 3 load meta, every third stage each. The other two
 * warpgroups multiply 64 MS weights each.
 *
 * Sums of 8-bit floats have two levels: 256 of k, which are 128 products, are summed in fresh
 * registers and then added to float32 sums (DeepSeek-AI 2024, arXiv:2412.19437, section 3.3.2).
 *
 * 16-bit results in rows of whole 16-byte chunks are transposed by stmatrix, 32 tokens at a
 * time. Other results are stored one by one (sparse_store.cuh).
 *
 * Workspace: a copy of an 8-bit a that is not K-major or aligned. Refuses: K that is no multiple
 * of 32 (16 bits: 16), a 16-bit a that is not K-major with rows of whole 16 bytes, e5m2
 * (product_plain). */
#include "../gemm/order.cuh"
#include "../../host/tensormap.cuh"
#include "../../layout/wgmma.cuh"
#include "../../ptx/bar.cuh"
#include "../../ptx/cluster.cuh"
#include "../../ptx/laneid.cuh"
#include "../../ptx/tma.cuh"
#include "../../ptx/wgmma_sparse.cuh"
#include "../../tile/tma_ring.cuh"
#include "load_bits.cuh"
#include "relay.cuh"
#include "sparse_store.cuh"
#include "tiles.h"

namespace {

template <class T> struct SumOf {
    typedef float type;
    static constexpr bool parts = false;
};
template <> struct SumOf<e4m3> {
    typedef float type;
    static constexpr bool parts = true;
};
template <> struct SumOf<int8_t> {
    typedef int32_t type;
    static constexpr bool parts = false;
};

template <class T_, int MS_, int BT_> struct Kind {
    typedef T_ T;
    typedef typename SumOf<T>::type D;
    static constexpr bool PARTS = SumOf<T>::parts;
    static constexpr int BYTES = sizeof(T), MS = MS_, BW = 128 * MS, BT = BT_,
                         BK = WGMMA_ROW_BYTES / BYTES, THREADS = 384;
    typedef wgmma_tile<BT, false, BK> Tokens;
    /* Bytes of a stage. Meta lies apart. */
    static constexpr int VALUES = BW * 64, META_ROW = BK / 8, META = BW * META_ROW;
    static constexpr int STAGE_BYTES = VALUES + Tokens::bytes;
    /* A warpgroup's staging tile of 32 tokens x 64 results; it has two. */
    typedef smem_tile<32, 128> Panel;
    static constexpr int STAGING = 4 * Panel::bytes, SCALES = BYTES == 1 ? 2 * 2 * BT * 4 : 0;
    static constexpr int MOST =
        (SPARSE_SMEM - STAGING - SCALES - WGMMA_BLOCK_BYTES) / (STAGE_BYTES + META + 16);
    static constexpr int STAGES = MOST < 8 ? MOST : 8;
    static constexpr int STAGING_AT = STAGES * STAGE_BYTES, META_AT = STAGING_AT + STAGING,
                         SCALES_AT = META_AT + STAGES * META, BARRIERS_AT = SCALES_AT + SCALES;
    static constexpr int SMEM = BARRIERS_AT + tma_ring<STAGES>::bytes + WGMMA_BLOCK_BYTES;
};

struct Params {
    /* a: [tokens][k], boxes of half of BT x 128 bytes. values: [weights][k / 2], boxes of BW x
     * 64 bytes. */
    CUtensorMap a, values;
    const uint8_t *meta;
    gk_scales sa, sb;
    Finish f;
    int64_t meta_row;
    /* meta_bytes: of a row. tiles_m: tiles of tokens. tiles_n: tiles of weights, of a whole
     * cluster. */
    int m, n, meta_bytes, steps, tiles_m, tiles_n, group;
    int pair;    /* blocks of a cluster */
    bool whole;  /* a stage's bytes of a row of meta are one aligned load */
    bool staged; /* 16-bit results in rows of whole chunks */
};

/* A cluster takes every tasks_apart-th task: a tile of tokens, and a tile of weights for each of
 * its blocks. */
__device__ __forceinline__ int first_task(const Params &p) { return (int)blockIdx.x / p.pair; }
__device__ __forceinline__ int tasks_apart(const Params &p) { return (int)gridDim.x / p.pair; }
template <class K>
__device__ __forceinline__ int weights_of(const Params &p, const TilePlace &at, int rank) {
    return (at.col * p.pair + rank) * K::BW;
}

/* ---- 1. the producer warps ------------------------------------------------------------------- */
template <class K>
__device__ __forceinline__ void produce(const Params &p, tma_ring<K::STAGES> &ring,
                                        smem_addr ring_s, int rank) {
    prefetch_tensormap(&p.a);
    prefetch_tensormap(&p.values);
    for (int t = first_task(p); t < p.tiles_m * p.tiles_n; t += tasks_apart(p)) {
        const TilePlace at = tile_place(t, p.tiles_m, p.tiles_n, p.group);
        for (int step = 0; step < p.steps; ++step) {
            /* All consumers have read the stage, in both blocks, since the tokens go to both. */
            ring.wait_empty();
            const smem_addr stage_s = ring_s + ring.stage * K::STAGE_BYTES,
                            half_s = stage_s + K::VALUES;
            const int k = step * K::BK, token = at.row * K::BT;
            mbarrier_arrive_expect_tx(ring.full(), K::STAGE_BYTES);
            tma_load_5d(stage_s, &p.values, {{k / 2, weights_of<K>(p, at, rank)}}, ring.full());
            if (p.pair == 2) {
                tma_load_5d_multicast(half_s + rank * (K::Tokens::bytes / 2), &p.a,
                                      {{k, token + rank * (K::BT / 2)}}, ring.full(), 3);
            } else {
                tma_load_5d(half_s, &p.a, {{k, token}}, ring.full());
                tma_load_5d(half_s + K::Tokens::bytes / 2, &p.a, {{k, token + K::BT / 2}},
                            ring.full());
            }
            ring.advance();
        }
    }
    /* Wait for the last arrivals at every stage. Otherwise one could reach the shared memory of
     * a block that has exited. */
    for (int s = 0; s < K::STAGES; ++s) {
        ring.wait_empty();
        ring.advance();
    }
}

/* Loads meta of every third stage, [weight][META_ROW bytes]; zeros after the ends. */
template <class K>
__device__ __forceinline__ void load_meta(const Params &p, tma_ring<K::STAGES> &ring,
                                          smem_addr ring_s, int rank) {
    static_assert(K::STAGES >= 3, "each of three warps passes two stages without waiting for them");
    const int lane = threadIdx.x % 32;
    int turn = threadIdx.x / 32; /* stages until this warp's own */
    for (int t = first_task(p); t < p.tiles_m * p.tiles_n; t += tasks_apart(p)) {
        const int row0 = weights_of<K>(p, tile_place(t, p.tiles_m, p.tiles_n, p.group), rank);
        for (int step = 0; step < p.steps; ++step, ring.advance()) {
            if (--turn > 0) continue;
            turn = 3;
            const int byte0 = step * K::META_ROW;
            const smem_addr to_s = ring_s + K::META_AT + ring.stage * K::META;
#pragma unroll 1
            for (int i0 = 0; i0 < K::BW / 32; i0 += 4) { /* a lane has four rows in flight */
                uint32_t words[4][K::META_ROW / 4];
#pragma unroll
                for (int i = 0; i < 4; ++i)
#pragma unroll
                    for (int w = 0; w < K::META_ROW / 4; ++w) words[i][w] = 0;
                const uint8_t *const from = p.meta + byte0;
                if (p.whole) { /* the branch stands outside the loops, so no load waits for another
                                */
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int row = row0 + lane + 32 * (i0 + i);
                        if (row >= p.n || byte0 >= p.meta_bytes) continue;
                        if constexpr (K::META_ROW == 16) {
                            const uint4 x = __ldg((const uint4 *)(from + row * p.meta_row));
                            words[i][0] = x.x;
                            words[i][1] = x.y;
                            words[i][2] = x.z;
                            words[i][3] = x.w;
                        } else {
                            const uint2 x = __ldg((const uint2 *)(from + row * p.meta_row));
                            words[i][0] = x.x;
                            words[i][1] = x.y;
                        }
                    }
                } else {
#pragma unroll
                    for (int i = 0; i < 4; ++i)
#pragma unroll 1
                        for (int b = 0; b < K::META_ROW; ++b) {
                            const int row = row0 + lane + 32 * (i0 + i);
                            uint32_t x = 0;
                            if (row < p.n && byte0 + b < p.meta_bytes)
                                x = __ldg(from + row * p.meta_row + b);
                            /* Bytes enter at the top and shift down. */
                            if constexpr (K::META_ROW == 16) {
                                words[i][0] = __funnelshift_r(words[i][0], words[i][1], 8);
                                words[i][1] = __funnelshift_r(words[i][1], words[i][2], 8);
                                words[i][2] = __funnelshift_r(words[i][2], words[i][3], 8);
                                words[i][3] = words[i][3] >> 8 | x << 24;
                            } else {
                                words[i][0] = __funnelshift_r(words[i][0], words[i][1], 8);
                                words[i][1] = words[i][1] >> 8 | x << 24;
                            }
                        }
                }
                if (i0 == 0) ring.wait_empty();
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const smem_addr at_s = to_s + (lane + 32 * (i0 + i)) * K::META_ROW;
                    if constexpr (K::META_ROW == 16)
                        st_shared_128(
                            at_s, make_uint4(words[i][0], words[i][1], words[i][2], words[i][3]));
                    else
                        st_shared_64(at_s, make_uint2(words[i][0], words[i][1]));
                }
            }
            __syncwarp();
            if (lane == 0) mbarrier_arrive(ring.full());
        }
    }
}

/* ---- 2. products ----------------------------------------------------------------------------- */
/* Descriptor of values: rows of 64 bytes, 8 of which form a block of 512 bytes, swizzled as
 * smem_tile<.., 64>. */
__device__ __forceinline__ uint64_t values_descriptor(smem_addr at_s) {
    return (uint64_t)((at_s & 0x3ffff) >> 4) | (uint64_t)1 << 16 | (uint64_t)(512 >> 4) << 32 |
           (uint64_t)2 << 62;
}

/* Meta of this lane's rows for the two instructions of a stage. With 16 bits one word serves
 * both. */
struct Places {
    uint32_t word[2];
};

template <class K>
__device__ __forceinline__ Places places_of(const Params &p, smem_addr meta_s, int row0) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32,
              row = row0 + 16 * warp + lane / 4;
    if constexpr (K::BYTES == 1) {
        const smem_addr at_s = meta_s + (row + 8 * (lane % 2)) * K::META_ROW + lane / 2 % 2 * 4;
        return {{ld_shared_32(at_s), ld_shared_32(at_s + 8)}};
    } else {
        const smem_addr at_s = meta_s + row * K::META_ROW + lane % 4 * 2;
        const uint32_t x = ld_shared_16(at_s) | (uint32_t)ld_shared_16(at_s + 8 * K::META_ROW)
                                                    << 16;
        return {{x, x}};
    }
}

template <class K, class D>
__device__ __forceinline__ void multiply(D (&d)[K::BT / 2], uint64_t a, uint64_t b,
                                         const Places &places, bool add) {
    wgmma_sp_ss<typename K::T, K::BT, 0>(d, a, b, places.word[0], add);
    wgmma_sp_ss<typename K::T, K::BT, K::BYTES == 2>(
        d, wgmma_descriptor_add(a, 32), wgmma_descriptor_add(b, 64), places.word[1], true);
}

/* A warp releases a stage to each block of the cluster. */
__device__ __forceinline__ void release(smem_addr empty_s, int pair) {
    const unsigned rank = threadIdx.x % 32;
    __syncwarp();
    if (pair == 1) {
        if (rank == 0) mbarrier_arrive(empty_s);
    } else if (rank < 2) {
        mbarrier_arrive_cluster(empty_s, rank);
    }
}

template <class K>
__device__ __forceinline__ void consume(const Params &p, tma_ring<K::STAGES> &ring,
                                        smem_addr ring_s, int rank, float *scales_s) {
    typedef typename K::D D;
    const int warpgroup = threadIdx.x / 128 - 1, thread = threadIdx.x % 128;
    int turn = 0;
    /* Scales of the thread's tokens of the next tile, read one tile ahead. */
    uint32_t next_sa[K::BT / 128 + (K::BT < 128)];
    const auto prefetch_scales = [&](int t) {
        const int token0 = tile_place(t, p.tiles_m, p.tiles_n, p.group).row * K::BT;
        load_scale_bits(next_sa, p.sa, [&](int i) {
            return scale_at(p.sa, min(token0 + thread + 128 * i, p.m - 1), 0);
        });
    };
    if (K::BYTES == 1) prefetch_scales(first_task(p));
    for (int t = first_task(p); t < p.tiles_m * p.tiles_n; t += tasks_apart(p), turn ^= 1) {
        const TilePlace at = tile_place(t, p.tiles_m, p.tiles_n, p.group);
        const int token0 = at.row * K::BT,
                  row0 = weights_of<K>(p, at, rank) + warpgroup * 64 * K::MS;
        /* Two sets: a warp may be one tile ahead of the others. */
        float *const scales = scales_s + (2 * warpgroup + turn) * K::BT;
        uint32_t sb[2 * K::MS];
        const auto weight = [&](int i) { /* index i of the thread's rows */
                                         return min(row0 + i / 2 * 64 + thread / 32 * 16 +
                                                        thread % 32 / 4 + i % 2 * 8,
                                                    p.n - 1);
        };
        if (K::BYTES == 1) {
#pragma unroll
            for (int i = 0; i < K::BT; i += 128)
                if (thread + i < K::BT) scales[thread + i] = scale_from(p.sa, next_sa[i / 128]);
            bar_sync(2 + warpgroup, 128);
            prefetch_scales(min(t + tasks_apart(p), p.tiles_m * p.tiles_n - 1));
            load_scale_bits(sb, p.sb, [&](int i) { return scale_at(p.sb, 0, weight(i)); });
        }
        float bias[2 * K::MS];
        load_bias(bias, p.f, weight);
        const auto descriptors = [&](const tma_ring<K::STAGES> &r, int m, uint64_t &a,
                                     uint64_t &b) {
            const smem_addr stage_s = ring_s + r.stage * K::STAGE_BYTES;
            a = values_descriptor(stage_s + (warpgroup * K::MS + m) * 64 * 64);
            b = K::Tokens::descriptor(stage_s + K::VALUES);
        };
        const auto places = [&](const tma_ring<K::STAGES> &r, int m) {
            return places_of<K>(p, ring_s + K::META_AT + r.stage * K::META,
                                (warpgroup * K::MS + m) * 64);
        };
        D sum[K::MS][K::BT / 2];
#pragma unroll
        for (int m = 0; m < K::MS; ++m)
#pragma unroll
            for (int i = 0; i < K::BT / 2; ++i) sum[m][i] = 0;
        uint64_t a, b;
        if constexpr (!K::PARTS) {
            static_assert(K::MS == 1 || K::PARTS, "one sum");
            Places even, odd = {};
            const auto follow = [&](Places &now, Places &before, int step) {
                ring.wait_full();
                now = places(ring, 0);
                descriptors(ring, 0, a, b);
                wgmma_fence();
                multiply<K>(sum[0], a, b, now, true);
                wgmma_commit_group();
                wgmma_wait_group<1>();
                wgmma_pin_meta(before.word);
                if (step > 0) release(ring.before(), p.pair);
                ring.advance();
            };
            for (int step = 0; step < p.steps; step += 2) {
                follow(even, odd, step);
                if (K::BYTES == 1 || step + 1 < p.steps) follow(odd, even, step + 1);
            }
            wgmma_wait_group<0>();
            wgmma_pin_meta(even.word);
            wgmma_pin_meta(odd.word);
            wgmma_pin(sum[0]);
            release(ring.before(), p.pair);
        } else {
            /* Two stages at a time; the number of steps is even. */
            for (int step = 0; step < p.steps; step += 2) {
                tma_ring<K::STAGES> next = ring;
                next.advance();
                ring.wait_full();
                next.wait_full();
#pragma unroll
                for (int m = 0; m < K::MS; ++m) {
                    D part[K::BT / 2];
                    Places first = places(ring, m), second = places(next, m);
                    wgmma_fence();
                    descriptors(ring, m, a, b);
                    multiply<K>(part, a, b, first, false);
                    descriptors(next, m, a, b);
                    multiply<K>(part, a, b, second, true);
                    wgmma_commit_group();
                    wgmma_wait_group<0>();
                    wgmma_pin_meta(first.word);
                    wgmma_pin_meta(second.word);
                    wgmma_pin(part);
                    if (m == K::MS - 1) {
                        release(ring.empty(), p.pair);
                        release(next.empty(), p.pair);
                    }
#pragma unroll
                    for (int i = 0; i < K::BT / 2; ++i) sum[m][i] += part[i];
                }
                ring = next;
                ring.advance();
            }
        }
#pragma unroll
        for (int m = 0; m < K::MS; ++m) {
            const SparseOut<K> out = {p.f,
                                      p.m,
                                      p.n,
                                      p.staged,
                                      ring_s + K::STAGING_AT + 2 * warpgroup * K::Panel::bytes,
                                      scales,
                                      row0 + 64 * m,
                                      token0,
                                      {K::BYTES == 1 ? scale_from(p.sb, sb[2 * m]) : 1.f,
                                       K::BYTES == 1 ? scale_from(p.sb, sb[2 * m + 1]) : 1.f},
                                      {bias[2 * m], bias[2 * m + 1]}};
            out.store(sum[m]);
        }
    }
}

template <class K>
__global__ void __launch_bounds__(K::THREADS, 1)
    sparse_gemm_kernel(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    const smem_addr ring_s =
        (cvta_to_shared(smem) + WGMMA_BLOCK_BYTES - 1) / WGMMA_BLOCK_BYTES * WGMMA_BLOCK_BYTES;
    tma_ring<K::STAGES> ring(ring_s + K::BARRIERS_AT);
    const int rank = p.pair == 1 ? 0 : (int)cluster_ctarank();
    if (threadIdx.x == 0) {
        ring.init(8 * p.pair, 2);
        fence_mbarrier_init();
    }
    if (p.pair > 1) barrier_cluster();
    __syncthreads();
    if (threadIdx.x < 128) {
        setmaxnreg_dec<40>();
        if (threadIdx.x >= 32)
            load_meta<K>(p, ring, ring_s, rank);
        else if (elect_one())
            produce<K>(p, ring, ring_s, rank);
    } else {
        setmaxnreg_inc<232>();
        consume<K>(p, ring, ring_s, rank,
                   (float *)(smem + (ring_s - cvta_to_shared(smem)) + K::SCALES_AT));
    }
    if (p.pair > 1) barrier_cluster();
}

/* ---- 3. plan and run ------------------------------------------------------------------------- */
enum {
    KEY_BW,
    KEY_BT
};

struct Plan {
    KMajorCopy a; /* 8 bits */
};

TensorShape shape_of(const gk_tensor &t) {
    const gk_dtype dtype = gk_dtype_bytes(t.dtype) == 1 ? GK_U8 : t.dtype;
    return {t.data, dtype, {t.shape[1], t.shape[0], 1, 1, 1}, {1, t.stride[0], 0, 0, 0}, false};
}

bool plan_instance(const gk_cuda_instance *row, const gk_context *, const void *args,
                   gk_plan *plan) {
    const gk_sparse_gemm_args *g = (const gk_sparse_gemm_args *)args;
    const int64_t m = g->a.shape[0], k = g->a.shape[1], n = g->values.shape[0], most = 1 << 30;
    if (m == 0 || n == 0 || k == 0 || m > most || n > most || k > most) return false;
    if (g->a.dtype != row->dtype || g->values.dtype != row->dtype) return false;
    if (!tensor_map_fits(shape_of(g->values))) return false;
    Plan *x = &gk_own<Plan>(plan);
    size_t bytes = 0;
    *x = {};
    if (gk_dtype_bytes(g->a.dtype) == 1)
        x->a = plan_k_major(g->a, &bytes);
    else if (g->a.stride[1] != 1 || !tensor_map_fits(shape_of(g->a)))
        return false;
    plan->workspace_bytes = bytes;
    plan->tile[0] = row->key[KEY_BT];
    plan->tile[1] = row->key[KEY_BW];
    plan->tile[2] = 128 / gk_dtype_bytes(g->a.dtype);
    plan->tasks = gk_ceil_div(m, plan->tile[0]) * gk_ceil_div(n, plan->tile[1]);
    plan->kernel = row;
    return gk_grid_fits(plan->tasks);
}

template <class K>
gk_status run_instance(const gk_context *ctx, const void *args, const gk_plan *plan,
                       void *workspace) {
    const gk_sparse_gemm_args *g = (const gk_sparse_gemm_args *)args;
    Params p;
    TensorShape a = shape_of(g->a);
    gk_status status = GK_OK;
    if (K::BYTES == 1)
        status = copy_k_major("sparse_gemm", ctx, gk_own<Plan>(plan).a, g->a, workspace, &a);
    if (status == GK_OK)
        status = make_tensor_map("sparse_gemm", a, wgmma_box(K::BYTES, K::BT / 2), &p.a);
    if (status == GK_OK)
        status = make_tensor_map("sparse_gemm", shape_of(g->values), smem_rows(K::BYTES, 64, K::BW),
                                 &p.values);
    if (status != GK_OK) return status;
    p.m = (int)g->a.shape[0];
    p.n = (int)g->values.shape[0];
    p.meta = (const uint8_t *)g->meta.data;
    p.meta_row = g->meta.stride[0];
    p.meta_bytes = (int)g->meta.shape[1];
    p.whole = (uintptr_t)p.meta % K::META_ROW == 0 && p.meta_row % K::META_ROW == 0 &&
              p.meta_bytes % K::META_ROW == 0;
    p.sa = gk_scales_of(g->scale_a, p.m, g->a.shape[1], false);
    p.sb = gk_scales_of(g->scale_b, g->a.shape[1], p.n, true);
    p.f = finish_of(g->out, g->bias, nullptr, 0, nullptr, g->activation);
    p.staged = g->out.dtype != GK_F32 && p.n % 8 == 0 && p.f.out_row % 8 == 0 &&
               (uintptr_t)p.f.out % 16 == 0;
    p.steps = (int)gk_ceil_div(g->a.shape[1], K::BK);
    if (K::BYTES == 1) p.steps += p.steps % 2; /* the last step may be all zeros */
    const int tiles_n = (int)gk_ceil_div(p.n, K::BW), sms = gk_gpu_of(ctx->index)->num_sms;
    p.pair = tiles_n % 2 == 0 || tiles_n > SPARSE_PAIRS ? 2 : 1;
    p.tiles_m = (int)gk_ceil_div(p.m, K::BT);
    p.tiles_n = (int)gk_ceil_div(tiles_n, p.pair);
    p.group = SPARSE_GROUP;
    const int64_t clusters =
        gk_min_i64((int64_t)p.tiles_m * p.tiles_n, gk_clusters_of(sms, p.pair));
    return launch<sparse_gemm_kernel<K>>("sparse_gemm", ctx, dim3((unsigned)(clusters * p.pair)),
                                         K::THREADS, K::SMEM, p, false, p.pair);
}

#define ROW(name, dtype, T, MS, BT)                                \
    {"sparse_gemm_sm90a_" name,     dtype,          plan_instance, \
     run_instance<Kind<T, MS, BT>>, {128 * MS, BT}, NULL}

const gk_cuda_instance instances[] = {
    ROW("bf16_256x128", GK_BF16, __nv_bfloat16, 1, 256),
    ROW("bf16_64x128", GK_BF16, __nv_bfloat16, 1, 64),
    ROW("f16_256x128", GK_F16, __half, 1, 256),
    ROW("f16_64x128", GK_F16, __half, 1, 64),
    ROW("e4m3_128x256", GK_E4M3, e4m3, 2, 128),
    ROW("e4m3_64x128", GK_E4M3, e4m3, 1, 64),
    ROW("i8_256x128", GK_I8, int8_t, 1, 256),
    ROW("i8_64x128", GK_I8, int8_t, 1, 64),
};

/* Chooses the large tiles if they fill at least half of the SMs. */
bool plan_best(const gk_context *ctx, const void *args, gk_plan *plan) {
    const gk_sparse_gemm_args *g = (const gk_sparse_gemm_args *)args;
    for (const gk_cuda_instance &row : instances) {
        if (row.dtype != g->a.dtype || !plan_instance(&row, ctx, args, plan)) continue;
        if (row.key[KEY_BT] == 64 || 2 * plan->tasks >= gk_gpu_of(ctx->index)->num_sms) return true;
    }
    return false;
}

} // namespace

extern "C" const gk_cuda_table gk_sparse_gemm_sm90a_table = {
    instances, sizeof instances / sizeof instances[0], 90, plan_best};
