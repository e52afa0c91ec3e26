/* SPDX-License-Identifier: BSD-3-Clause */
/* paged_codes_sm80: attention over a paged cache of 8-bit codes (e4m3, e5m2, int8), on tensor cores
 * (mma.sync), on every GPU. q has 16 bits.
 *
 *  out[t] = sum_j softmax_j(score(scale k_scale q[t] k[j]), sink) v[j] v_scale
 *  with j in [lo(t), hi(t))
 *
 * q [T, Hq, D]; k_cache, v_cache [num_blocks, block_size, Hkv, D | Dv]; block_table [B,
 * max_blocks], seq_lens [B], cu_seqlens_q [B + 1] int32; out [T, Hq, Dv], lse [T, Hq]. Scales are
 * one for all, per kv head, or per page and kv head. Pages of any size; D and Dv are multiples of
 * 16, at most 256. Pages: Kwon et al. 2023; online softmax: Milakov and Gimelshein 2018.
 *
 * Work split, rings and merges are those of paged_attn_sm80 (paged_plan.cuh): a warp works alone,
 * 16 keys a step. What differs:
 *
 *  operands   Codes become float16 between shared memory and the mma (codes_f16.cuh). So q, scaled
 *             by a power of two a row, and the weights are float16, too.
 *  columns    ldmatrix gives a lane four consecutive codes of a row. The columns of q and of O are
 *             permuted to match, since a product may add its columns in any order.
 *  pages      A scale of a page is copied beside the page's keys. It multiplies a score, or a
 *             weight. Weights are divided by the largest |v_scale| so far (v_base), so that they
 *             stay at most 1.
 *
 *  shared memory, per warp: a ring of stages x (K 16 x HEAD_DIM, V 16 x HEAD_DIM bytes), behind
 *  all rings the scales of each stage's keys, [warps][stages][16] (k, v). At the end of a tile
 *  the rings' bytes hold, per warp, O [LANES][HEAD_DIM + 4] and (max, sum) [LANES], float32
 *
 * Not handled: other head_dims, float32 q, rows not aligned to 16 bytes, batch-invariant calls
 * (paged_attn_plain). On Hopper, paged_attn_sm90a and the prefill kernels serve pages of a multiple
 * of 16 keys. */
#include "../../tile/codes_f16.cuh"
#include "../../tile/fragment.cuh"
#include "paged_combine.cuh"
#include "paged_factor.cuh"

namespace {

/* ---- 1. tiles and shared memory -------------------------------------------------------------- */
/* Not measured on sm_80. A stage holds half the bytes of a 16-bit one, so more stages are in
 * flight. Blocks of 256 columns take 99 KiB, which GPUs of compute capability 8.6 and 8.9 have. 16
 * warps of 64 x 16 on an SM would spill. */
template <int HEAD_DIM, int LANES> struct codes_tile {
    static constexpr int warps = HEAD_DIM == 64 && LANES == 8 ? 8 : 4,
                         stages = HEAD_DIM == 256 ? 3 : 4,
                         blocks = HEAD_DIM == 256                 ? 1
                                  : HEAD_DIM == 64 && LANES == 16 ? 3
                                                                  : 2;
};

template <int HEAD_DIM, int LANES> struct Shared {
    typedef codes_tile<HEAD_DIM, LANES> Sizes;
    static constexpr int warps = Sizes::warps, stages = Sizes::stages;
    typedef smem_tile<KEYS, HEAD_DIM> Tile;
    static constexpr int stage_bytes = 2 * Tile::bytes, ring_bytes = stages * stage_bytes;
    static constexpr int scales_bytes = stages * KEYS * 8; /* of a warp */
    static constexpr int scales_at = warps * ring_bytes;
    /* distance in floats between rows of O; ways_of_o proves that it avoids conflicts */
    static constexpr int pitch = HEAD_DIM + 4;
    static constexpr int o_bytes = LANES * pitch * 4;
    static constexpr int bytes = scales_at + warps * scales_bytes;
    static_assert(warps * (o_bytes + LANES * 8) <= scales_at, "what a tile leaves fits the rings");
    static_assert(o_bytes % 16 == 0, "rows of O are read in 16 bytes");

    /* Bank conflicts of storing O. Lane l writes rows 2 (l % 4) + e, and columns 2 (l / 4) and the
     * next one. */
    static constexpr int ways_of_o() {
        int at[32] = {};
        for (int lane = 0; lane < 32; ++lane) at[lane] = (lane % 4 * 2 * pitch + lane / 4 * 2) * 4;
        return ways(at, 8);
    }
    static_assert(ways_of_o() == 1, "the pitch spreads rows over banks");
};

struct CodesCall {
    Call c;
    CodeScale k_scale, v_scale; /* used if a scale is by page; c.p has no scales then */
    bool by_page;
};

/* ---- 2. operands ----------------------------------------------------------------------------- */
/* K as A [16 keys][16 columns]. Columns 16 i + 4 (lane % 4) .. + 3 belong to a lane. The even ones
 * go to the first half of the operand's columns. Loads blocks i and i + 1; i is even. */
template <gk_dtype CODE, class Tile>
__device__ __forceinline__ void load_k(uint32_t (&a)[2][4], smem_addr base, int i) {
    uint32_t x[4];
    ldmatrix_x4(x, Tile::along(base, i));
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        codes_to_f16x4<CODE>(&a[j][0], &a[j][2], x[2 * j]);
        codes_to_f16x4<CODE>(&a[j][1], &a[j][3], x[2 * j + 1]);
    }
}

/* V as A [16 columns][16 keys]. Each pair of bytes that a lane loads is columns 2 g and 2 g + 1 of
 * one key, with g = lane / 4. So two keys' even bytes belong to one column, and their odd bytes to
 * the other. */
template <gk_dtype CODE, class Tile>
__device__ __forceinline__ void load_v(uint32_t (&a)[2][4], smem_addr base, int i) {
    uint32_t x[4];
    ldmatrix_x4_trans(x, Tile::along(base, i));
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        codes_to_f16x4<CODE>(&a[j][0], &a[j][1], x[2 * j]);
        codes_to_f16x4<CODE>(&a[j][2], &a[j][3], x[2 * j + 1]);
    }
}

/* ---- 3. the ring of a warp ------------------------------------------------------------------- */
/* The ring of paged_plan.cuh, which also copies the scales of the keys' pages. */
template <class S> struct CodesRing {
    typedef typename S::Tile Tile;
    static constexpr int STAGES = S::stages;
    static_assert(KEYS * STAGES <= 64, "a bit a key on the way");
    Keys keys; /* of the step after the last one issued */
    uint64_t there;
    int stage; /* the oldest */

    __device__ __forceinline__ void begin(const CodesCall &x, const TileShare &work,
                                          smem_addr ring_s, smem_addr scales_s) {
        there = 0;
        stage = 0;
        keys = keys_at(x.c.p, work.b, work.first_key + work.step0 * x.c.chunk_keys, work.lo,
                       work.step0 < work.steps ? work.hi : 0);
#pragma unroll
        for (int i = 0; i < STAGES; ++i)
            fill(x, work, work.step0 + i, i, ring_s + i * S::stage_bytes, scales_s + i * KEYS * 8);
    }

    /* Called when all lanes have read `step`. Refills its stage with the keys of step + STAGES. */
    __device__ __forceinline__ void next(const CodesCall &x, const TileShare &work,
                                         smem_addr ring_s, smem_addr scales_s, int step) {
        there >>= 16;
        fill(x, work, step + STAGES, STAGES - 1, ring_s + stage * S::stage_bytes,
             scales_s + stage * KEYS * 8);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }

    __device__ __forceinline__ void fill(const CodesCall &x, const TileShare &work, int step,
                                         int place, smem_addr stage_s, smem_addr scales_s) {
        if (step < work.steps) {
            const Keys now = keys;
            keys = keys_at(x.c.p, work.b, now.first + x.c.chunk_keys, work.lo,
                           step + 1 < work.steps ? work.hi : 0);
            const unsigned good = issue<uint8_t, Tile>(x.c.p, now, work.head_kv, stage_s);
            there |= (uint64_t)good << (16 * place);
            if (x.by_page) {
                const int lane = threadIdx.x % 32; /* lanes 0 to 15: k's, others: v's */
                const CodeScale &its = lane < KEYS ? x.k_scale : x.v_scale;
                const smem_addr to = scales_s + lane % KEYS * 8 + lane / KEYS * 4;
                const int64_t at = max(now.page, 0) * its.page + work.head_kv * its.head;
                if (its.data)
                    cp_async_ca<4>(to, (const float *)its.data + at, now.page >= 0 ? 4 : 0);
                else
                    st_shared_f32(to, 1);
            }
        }
        cp_async_commit_group();
    }
};

/* ---- 4. the stream of a warp ----------------------------------------------------------------- */
template <class T, gk_dtype CODE, int HEAD_DIM, int LANES> struct Stream {
    typedef Shared<HEAD_DIM, LANES> S;
    typedef typename S::Tile Tile;
    static constexpr int STEPS = HEAD_DIM / 16, N = LANES / 8;
    /* Products that are summed in one chain of the tensor core, which truncates its sums. Longer
     * sums are added in float32. */
    static constexpr int CHAIN = 4;
    static constexpr float UP = codes_f16_up<CODE>;
    const CodesCall &call;
    unsigned char *smem;

    /* Converts row 8 n + lane / 4 of q to float16, scaled so that its largest element is in [1, 2).
     * Returns the scale: what the row was divided by. */
    static __device__ __forceinline__ float to_halves(uint32_t (&q)[STEPS][N][2], int n) {
        float most = 0;
#pragma unroll
        for (int i = 0; i < STEPS; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float2 x = unpack2<T>(q[i][n][half]);
                most = fmaxf(most, fmaxf(fabsf(x.x), fabsf(x.y)));
            }
        const uint32_t exponent = min(__float_as_uint(quad_max(most)) >> 23, 253u);
        const float by = __uint_as_float((254 - exponent) << 23);
#pragma unroll
        for (int i = 0; i < STEPS; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float2 x = unpack2<T>(q[i][n][half]);
                q[i][n][half] = pack2<__half>(x.x * by, x.y * by);
            }
        return __uint_as_float(exponent << 23);
    }

    __device__ __forceinline__ void attend(const Call &c, const TileShare &work) {
        const Paged &p = c.p;
        const PagedSequence &s = work.s;
        const int head_kv = work.head_kv, row0 = work.row0, last_row = work.last_row;
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const smem_addr ring_s = cvta_to_shared(smem) + warp * S::ring_bytes;
        const smem_addr scales_s = cvta_to_shared(smem) + S::scales_at + warp * S::scales_bytes;
        const smem_addr k_frag_s = frag_down_base<Tile>(ring_s, lane, 0, 0);
        const smem_addr v_frag_s = k_frag_s + Tile::bytes;

        /* 4.1 rows: q as the B operand */
        uint32_t q[STEPS][N][2];
        int index[N][2]; /* the query token of this lane's columns of S^T */
        float slope[N][2], factor[N][2];
        RowSoftmax<ExpApprox> softmax[N][2]; /* sum: this lane's share */
        const float scale = paged_factor<float>(p, head_kv);
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const int row = row0 + n * 8 + lane / 4, token = row / p.group;
            const uint16_t *q_g = (const uint16_t *)p.q.data + (s.q0 + token) * p.q.row +
                                  (head_kv * p.group + row - token * p.group) * p.q.head +
                                  lane % 4 * 4;
#pragma unroll
            for (int k = 0; k < STEPS; ++k) {
                uint2 two = make_uint2(0, 0);
                if (row <= last_row && k * 16 < p.head_dim) two = *(const uint2 *)(q_g + k * 16);
                q[k][n][0] = prmt(two.x, two.y, 0x5410); /* columns 0 and 2 */
                q[k][n][1] = prmt(two.x, two.y, 0x7632); /* columns 1 and 3 */
            }
            const float row_factor = to_halves(q, n);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int col = lane % 4 * 2 + e, its = row0 + n * 8 + col,
                          its_token = its / p.group;
                index[n][e] = its_token;
                softmax[n][e] = {-INFINITY, 0};
                factor[n][e] =
                    finite_factor(scale * UP * __shfl_sync(0xffffffffu, row_factor, col * 4));
                slope[n][e] = 0;
                const int head = head_kv * p.group + its - its_token * p.group;
                if (its <= last_row) slope[n][e] = slope_of<float>(p.rules, work.b, head);
            }
        }
        float v_base = call.by_page ? 0 : 1;
        float o[STEPS][N][4] = {}; /* O^T / (v_base UP): head_dim_v by rows */

        /* 4.2 the stream */
        CodesRing<S> ring;
        ring.begin(call, work, ring_s, scales_s);
#pragma unroll 1
        for (int step = work.step0; step < work.steps; ++step) {
            cp_async_wait_group<S::stages - 1>();
            __syncwarp(); /* the copies of all lanes have arrived */
            const int key = work.first_key + step * c.chunk_keys, at = ring.stage * S::stage_bytes;

            /* S^T [16 keys][LANES rows] */
            float x[N][4];
#pragma unroll
            for (int k = 0; k < STEPS; k += CHAIN) {
                float y[N][4] = {};
#pragma unroll
                for (int i = k; i < k + CHAIN; i += 2) {
                    uint32_t a[2][4];
                    load_k<CODE, Tile>(a, k_frag_s + at, i);
#pragma unroll
                    for (int j = 0; j < 2; ++j)
#pragma unroll
                        for (int n = 0; n < N; ++n) mma_add<__half>(y[n], a[j], q[i + j][n]);
                }
#pragma unroll
                for (int n = 0; n < N; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) x[n][e] = k == 0 ? y[n][e] : x[n][e] + y[n][e];
            }

            /* apply the scales of pages; share: what v's scale multiplies a weight by */
            float share[2] = {1, 1};
            if (call.by_page) {
                float size = 0;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const uint2 bits =
                        ld_shared_64(scales_s + ((ring.stage * KEYS) + lane / 4 + half * 8) * 8);
#pragma unroll
                    for (int n = 0; n < N; ++n)
#pragma unroll
                        for (int e = 0; e < 2; ++e) x[n][half * 2 + e] *= __uint_as_float(bits.x);
                    share[half] = __uint_as_float(bits.y);
                    size = fmaxf(size, fabsf(share[half])); /* a NaN stays in share */
                }
                size = octet_max(size);
                if (size > v_base) {
                    const float shrink = v_base / size;
                    v_base = size;
#pragma unroll
                    for (int i = 0; i < STEPS; ++i)
#pragma unroll
                        for (int n = 0; n < N; ++n)
#pragma unroll
                            for (int e = 0; e < 4; ++e) o[i][n][e] *= shrink;
                }
                /* If v_base is still 0, shares are 0 or NaN, and O is multiplied by 0 at the end.
                 */
                if (v_base > 0) {
                    share[0] /= v_base;
                    share[1] /= v_base;
                }
            }

            /* scores; a key that a row does not see has -inf */
            const unsigned here = (unsigned)(ring.there & 0xffff);
            const bool inner =
                key >= work.inner_lo && key + KEYS <= work.inner_hi && here == 0xffff;
            uint32_t weights[N][2]; /* P^T as the B operand */
#pragma unroll
            for (int n = 0; n < N; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int place = lane / 4 + e / 2 * 8, j = key + place;
                    if (p.rules.modified) {
                        const Score score_of_row = {factor[n][e % 2], (float)p.rules.softcap,
                                                    slope[n][e % 2], s.diagonal};
                        float derivative;
                        x[n][e] =
                            score_fast(score_of_row, x[n][e],
                                       (float)(index[n][e % 2] + s.diagonal - j), &derivative);
                    } else {
                        x[n][e] *= factor[n][e % 2];
                    }
                    if (!inner && !(j >= s.lo(index[n][e % 2]) && j < s.hi(index[n][e % 2]) &&
                                    (here >> place & 1)))
                        x[n][e] = -INFINITY;
                }
                bool moved = false;
                float shrink[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    RowSoftmax<ExpApprox> &row = softmax[n][e];
                    const float highest = octet_max(fmaxf(x[n][e], x[n][e + 2]));
                    moved |= highest > row.peak;
                    shrink[e] = row.raise(highest);
                    x[n][e] = row.weight(x[n][e]);
                    x[n][e + 2] = row.weight(x[n][e + 2]);
                    row.sum = row.sum * shrink[e] + (x[n][e] + x[n][e + 2]);
                    if (call.by_page) {
                        x[n][e] *= share[0];
                        x[n][e + 2] *= share[1];
                    }
                }
                acc_to_b<__half>(weights[n], x[n]);
                if (__any_sync(0xffffffffu, moved)) {
#pragma unroll
                    for (int i = 0; i < STEPS; ++i)
#pragma unroll
                        for (int e = 0; e < 4; ++e) o[i][n][e] *= shrink[e % 2];
                }
            }

            /* O^T [HEAD_DIM][LANES rows] */
#pragma unroll
            for (int i = 0; i < STEPS; i += 2) {
                uint32_t a[2][4];
                load_v<CODE, Tile>(a, v_frag_s + at, i);
#pragma unroll
                for (int j = 0; j < 2; ++j)
#pragma unroll
                    for (int n = 0; n < N; ++n) mma_add<__half>(o[i + j][n], a[j], weights[n]);
            }

            __syncwarp(); /* all lanes have read the stage */
            ring.next(call, work, ring_s, scales_s, step);
        }

        /* 4.3 merge the warps' sums; they overlay the rings */
        cp_async_wait_group<0>();
        /* every warp has read its last stage */
        __syncthreads();
        float *o_s = (float *)smem;                                 /* [warps][LANES][pitch] */
        float2 *stats_s = (float2 *)(smem + S::warps * S::o_bytes); /* [warps][LANES] */
        const float up = v_base * UP;
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int row = warp * LANES + n * 8 + lane % 4 * 2 + e;
                const float all = octet_sum(softmax[n][e].sum);
                if (lane < 4) stats_s[row] = make_float2(softmax[n][e].peak, all);
#pragma unroll
                for (int i = 0; i < STEPS; ++i)
                    *(float2 *)(o_s + row * S::pitch + i * 16 + lane / 4 * 2) =
                        make_float2(o[i][n][e] * up, o[i][n][e + 2] * up);
            }
        __syncthreads(); /* the sums of all warps are written */

        merge_warps<T, S::warps, LANES, S::pitch>(c, work, o_s, stats_s);
        __syncthreads(); /* the ring's bytes are free */
    }
};

template <class T, gk_dtype CODE, int HEAD_DIM, int LANES>
__global__ void __launch_bounds__(codes_tile<HEAD_DIM, LANES>::warps * 32,
                                  codes_tile<HEAD_DIM, LANES>::blocks)
    paged_codes_kernel(const __grid_constant__ CodesCall x) {
    extern __shared__ __align__(128) unsigned char smem[];
    Stream<T, CODE, HEAD_DIM, LANES> stream = {x, smem};
    each_tile<T, codes_tile<HEAD_DIM, LANES>::warps>(x.c, stream);
}

/* ---- 5. plan and launch ---------------------------------------------------------------------- */
/* the key of paged_plan.cuh, followed by the format of the codes */
enum {
    KEY_CODE = 6
};

struct CodesPlan {
    Planned planned;
    CodeScale k_scale, v_scale;
    bool by_page;
};

bool plan_codes(const gk_cuda_instance *instance, const gk_context *ctx, const void *args,
                gk_plan *to) {
    const gk_paged_attn_args *a = (const gk_paged_attn_args *)args;
    if (a->k_cache.dtype != instance->key[KEY_CODE] || a->v_cache.dtype != instance->key[KEY_CODE])
        return false;
    if (!serves(instance, ctx, a)) return false;
    gk_paged_attn_args wide = *a; /* plan expects caches of q's dtype */
    wide.k_cache.dtype = wide.v_cache.dtype = a->q.dtype;
    if (!plan(instance, ctx, &wide, to)) return false;
    CodesPlan &own = gk_own<CodesPlan>(to);
    own.k_scale = code_scale(a->k_scale);
    own.v_scale = code_scale(a->v_scale);
    own.by_page = (a->k_scale && a->k_scale->ndim == 2) || (a->v_scale && a->v_scale->ndim == 2);
    if (own.by_page) own.planned.call.p.k_scale = own.planned.call.p.v_scale = NULL;
    return !own.k_scale.wide && !own.v_scale.wide;
}

template <class T, auto KERNEL>
gk_status run_codes(const gk_context *ctx, const void *, const gk_plan *plan, void *workspace) {
    const gk_cuda_instance *instance = (const gk_cuda_instance *)plan->kernel;
    const CodesPlan &own = gk_own<CodesPlan>(plan);
    CodesCall x = {own.planned.call, own.k_scale, own.v_scale, own.by_page};
    place_splits(x.c, own.planned.sizes, workspace);
    if (x.c.p.tokens == 0 || x.c.p.heads_q == 0) return GK_OK;
    const gk_status status =
        launch<KERNEL>("gk_paged_attn", ctx, dim3((unsigned)x.c.blocks),
                       instance->key[PagedKey::WARPS] * 32, instance->key[PagedKey::SMEM], x);
    if (status != GK_OK || !own.planned.sizes.combines) return status;
    return launch_combine<T>(ctx, x.c);
}

#define INSTANCE(NAME, DTYPE, T, CODE, D, LANES, MOST)                     \
    {"paged_codes_sm80_" NAME,                                             \
     DTYPE,                                                                \
     plan_codes,                                                           \
     run_codes<T, paged_codes_kernel<T, CODE, D, LANES>>,                  \
     {D, LANES, codes_tile<D, LANES>::warps, codes_tile<D, LANES>::blocks, \
      Shared<D, LANES>::bytes, MOST, CODE},                                \
     NULL},
/* 16 rows of 256 columns would spill */
#define INSTANCES(NAME, DTYPE, T, CODE)                  \
    INSTANCE(NAME "_64x8", DTYPE, T, CODE, 64, 8, 8)     \
    INSTANCE(NAME "_64x16", DTYPE, T, CODE, 64, 16, 0)   \
    INSTANCE(NAME "_128x8", DTYPE, T, CODE, 128, 8, 8)   \
    INSTANCE(NAME "_128x16", DTYPE, T, CODE, 128, 16, 0) \
    INSTANCE(NAME "_256x8", DTYPE, T, CODE, 256, 8, 0)
/* clang-format off */
const gk_cuda_instance instances[] = {
    INSTANCES("bf16_e4m3", GK_BF16, __nv_bfloat16, GK_E4M3)
    INSTANCES("bf16_e5m2", GK_BF16, __nv_bfloat16, GK_E5M2)
    INSTANCES("bf16_int8", GK_BF16, __nv_bfloat16, GK_I8)
    INSTANCES("f16_e4m3", GK_F16, __half, GK_E4M3)
    INSTANCES("f16_e5m2", GK_F16, __half, GK_E5M2)
    INSTANCES("f16_int8", GK_F16, __half, GK_I8)
};
/* clang-format on */
#undef INSTANCES
#undef INSTANCE

} // namespace

extern "C" const gk_cuda_table gk_paged_codes_sm80_table = {
    instances, sizeof instances / sizeof instances[0], 80, NULL};
