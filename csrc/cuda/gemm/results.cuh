/* results.cuh: how gemm_sm90a's sums leave: 16-bit results and float32 ones of tf32 through a warp's panels by tma, all else
 * from the lanes. x: the kernel's Params, with tensor maps `out` and `preact`. */
#ifndef GPUKERN_CUDA_GEMM_RESULTS_CUH
#define GPUKERN_CUDA_GEMM_RESULTS_CUH

#include "../ptx/bar.cuh"
#include "../ptx/stmatrix.cuh"
#include "../ptx/tma.cuh"
#include "../tile/wgmma.cuh"
#include "epilogue.cuh"

/* 16 rows of 32 floats, the first of v, in the accumulators' order. */
template <class Panel> __device__ __forceinline__ void put_floats(smem_addr panel_s, const float *v, int lane) {
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
        const int row = lane / 4 + i / 2 % 2 * 8, byte = i / 4 * 32 + lane % 4 * 8;
        st_shared_64(panel_s + Panel::offset(row, byte / 16) + byte % 16, make_float2(v[i], v[i + 1]));
    }
}

/* A warp's 16 rows of N / 8 octets of columns go to its panels and leave by tma while the warp goes on. at: their first
 * column and row. One fence for all panels: each waits until the warp's stores have come. */
template <class T, class Panel, int N>
__device__ __forceinline__ void store_panels(const CUtensorMap *map, const float *v, smem_addr panels_s,
                                             const tma_at &at, int lane) {
    constexpr int EACH = Panel::row_bytes / (2 * (int)sizeof(T)), NUM = N / EACH;
    if (lane == 0) tma_store_wait_group_read<0>();
    __syncwarp(); /* the panels' last contents have been read */
#pragma unroll
    for (int i = 0; i < NUM; ++i) {
        const float *const w = v + i * EACH;
        if constexpr (sizeof(T) == 4) {
            put_floats<Panel>(panels_s + i * Panel::bytes, w, lane);
        } else {
            const unsigned put = Panel::offset(lane % 16, 0);
#pragma unroll
            for (int j = 0; j < Panel::chunks; j += 2) { /* rows 0-7, 8-15 of one octet of columns, then of the next */
                const uint32_t two[4] = {pack2<T>(w[4 * j], w[4 * j + 1]), pack2<T>(w[4 * j + 2], w[4 * j + 3]),
                                         pack2<T>(w[4 * j + 4], w[4 * j + 5]), pack2<T>(w[4 * j + 6], w[4 * j + 7])};
                stmatrix_x4(panels_s + i * Panel::bytes + (put ^ (j + lane / 16) * 16), two);
            }
        }
    }
    fence_proxy_async();
    __syncwarp(); /* all of the panels is written */
    if (lane == 0) {
        tma_at to = at;
#pragma unroll
        for (int i = 0; i < NUM; ++i, to.c[0] += 2 * EACH) tma_store_5d(map, to, panels_s + i * Panel::bytes);
        tma_store_commit_group();
    }
}

/* The bias of a lane's columns from col0 on, two of every eight, all read before one is used. n is even; what lies past the
 * last column is not stored. */
template <class T, int N>
__device__ __forceinline__ void read_bias(const GemmProblem &p, int64_t col0, int lane, float (&bias)[N]) {
    const GemmEpilogue &e = p.epilogue;
    const int64_t col = col0 + lane % 4 * 2, last = p.n - 2;
    if (!e.bias_vectors) {
#pragma unroll
        for (int i = 0; i < N; i += 2)
            read_any<T, 2>(e.bias, e.bias_dtype, min(col + i * 4, last) * e.bias_col, e.bias_col, false, 2, bias + i);
    } else if (e.bias_dtype == GK_F32) {
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            const float2 two = *(const float2 *)((const float *)e.bias + min(col + i * 4, last));
            bias[i] = two.x, bias[i + 1] = two.y;
        }
    } else if constexpr (sizeof(T) == 2) {
        uint32_t two[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; ++i) two[i] = *(const uint32_t *)((const T *)e.bias + min(col + i * 8, last));
#pragma unroll
        for (int i = 0; i < N; ++i) bias[i] = to_acc(((const T *)&two[i / 2])[i % 2]);
    }
}

/* Brings the bias of BN columns from col0 on into L1, where the stores will look for it. */
template <int BN> __device__ __forceinline__ void touch_bias(const GemmProblem &p, int64_t col0, int lane) {
    const GemmEpilogue &e = p.epilogue;
    const int bytes = e.bias_dtype == GK_F32 ? 4 : 2;
    static_assert(BN * 4 <= 32 * 32, "a sector a lane");
    if (e.bias_vectors && lane < BN * bytes / 32)
        touch_global((const char *)e.bias + min(col0 * bytes + lane * 32, p.n * bytes - bytes));
}

/* 2 N columns of a warp's 16 rows of results of T without c; at moves past them. */
template <class T, class Panel, int N, bool CURVED, class Params>
__device__ __forceinline__ void store_some(const Params &x, float *v, smem_addr panels_s, tma_at &at, int lane) {
    const GemmEpilogue &e = x.p.epilogue;
    const float alpha = (float)e.alpha;
    if (e.bias) { /* not + 0: -0 stays */
        float bias[N / 2];
        read_bias<T>(x.p, at.c[0], lane, bias);
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = fmaf(v[i], alpha, bias[i / 4 * 2 + i % 2]);
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] *= alpha;
    }
    if (e.preact) store_panels<T, Panel, N>(&x.preact, v, panels_s, at, lane);
    if (CURVED) {
        activate_16<N>(e.activation, v);
    } else if (e.activation == GK_ACT_RELU) {
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = v[i] <= 0 ? 0.f : v[i]; /* a NaN stays one */
    }
    store_panels<T, Panel, N>(&x.out, v, panels_s, at, lane);
    at.c[0] += 2 * N;
}

/* A lane's N sums, as many at a time as PANELS times 2 KiB hold. CURVED: with an activation that costs many instructions: one
 * body, past which the sums move instead of the code. */
template <class T, class Panel, int PANELS, bool CURVED, class Params, int N>
__device__ __forceinline__ void store_plain(const Params &x, float (&sum)[N], smem_addr panels_s, tma_at at, int lane) {
    constexpr int SOME = PANELS * 2048 / Panel::bytes * Panel::row_bytes / (2 * (int)sizeof(T)),
                  MOST = SOME < N ? SOME : N;
    constexpr bool MOVE = CURVED && N > MOST;
    constexpr int UNROLLED = MOVE ? 1 : N / MOST, REST = N % MOST;
#pragma unroll UNROLLED
    for (int i = 0; i + MOST <= N; i += MOST) {
        store_some<T, Panel, MOST, CURVED>(x, sum + (MOVE ? 0 : i), panels_s, at, lane);
        if (MOVE) {
#pragma unroll
            for (int j = 0; j + MOST < N; ++j) sum[j] = sum[j + MOST];
        }
    }
    if constexpr (REST > 0) store_some<T, Panel, REST, CURVED>(x, sum + (MOVE ? 0 : N - REST), panels_s, at, lane);
}

/* Everything else, 32 columns of floats at a time: one body, past which the sums move instead of the code. A lane has 8
 * columns of a row; across, 8 rows of a column: without wide stores, the lanes of one should fall beside each other. */
template <class T, int BN>
__device__ __forceinline__ void store_any(const GemmProblem &p, const GemmPlace &at, float (&sum)[BN / 2],
                                          smem_addr panel_s, int64_t row0, int64_t col0, bool across, int lane) {
    typedef smem_tile<16, 128> Panel;
#pragma unroll 1
    for (int c = 0; c < BN; c += 32) {
        put_floats<Panel>(panel_s, sum, lane);
        __syncwarp(); /* the warp's lanes read what the others stored */
#pragma unroll 1
        for (int r = 0; r < 16; r += 8) {
            /* what the epilogue takes for the row, and for the first of 8 columns */
            const int64_t row = across ? col0 + c + lane : row0 + r + lane / 4;
            const int64_t col = across ? row0 + r : col0 + c + lane % 4 * 8;
            const int valid = (int)min((int64_t)8, (across ? p.m : p.n) - col);
            uint32_t bits[8];
            if (across) {
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    bits[i] = ld_shared_32(panel_s + Panel::offset(r + i, lane / 4) + lane % 4 * 4);
            } else {
                const uint4 x = ld_shared_128(panel_s + Panel::offset(r + lane / 4, lane % 4 * 2)),
                            y = ld_shared_128(panel_s + Panel::offset(r + lane / 4, lane % 4 * 2 + 1));
                bits[0] = x.x, bits[1] = x.y, bits[2] = x.z, bits[3] = x.w;
                bits[4] = y.x, bits[5] = y.y, bits[6] = y.z, bits[7] = y.w;
            }
            float v[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] = __uint_as_float(bits[i]);
            if (row < (across ? p.n : p.m) && valid > 0) epilogue_cols<T, 8>(p.epilogue, at, row, col, valid, v);
        }
        __syncwarp(); /* the panel has been read */
#pragma unroll
        for (int i = 0; i + 16 < BN / 2; ++i) sum[i] = sum[i + 16];
    }
}

/* A turned product: a warpgroup's 64 rows are columns of the result, its COLS columns rows. */
constexpr GK_HD int turned_ways(int ld) {
    int bytes[32] = {};
    for (int lane = 0; lane < 32; ++lane) bytes[lane] = (wgmma_d(0, lane, 0).col * ld + wgmma_d(0, lane, 0).row) * 4;
    return ways(bytes, 4);
}

template <class T, int COLS, int LD>
__device__ __forceinline__ void store_turned(const GemmProblem &p, const GemmPlace &at, const float (&sum)[COLS / 2],
                                             float *turned, int row0, int col0) {
    static_assert(turned_ways(LD) == 1, "the lanes' sums fall into 32 banks");
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
#pragma unroll
    for (int i = 0; i < COLS / 2; ++i) {
        const coord d = wgmma_d(warp, lane, i);
        turned[d.col * LD + d.row] = sum[i];
    }
    bar_sync(1, 128); /* all sums are there */
#pragma unroll 1
    for (int i = thread; i < COLS * 8; i += 128) {
        const int row = col0 + i / 8, col = row0 + i % 8 * 8, valid = (int)min((int64_t)8, p.m - col);
        const float4 x = *(const float4 *)(turned + i / 8 * LD + i % 8 * 8),
                     y = *(const float4 *)(turned + i / 8 * LD + i % 8 * 8 + 4);
        float v[8] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
        if (row < p.n && valid > 0) epilogue_cols<T, 8>(p.epilogue, at, row, col, valid, v);
    }
    bar_sync(1, 128); /* they have been read */
}

#endif
