/* SPDX-License-Identifier: BSD-3-Clause */
/* store_panels.cuh: the usual store of Hopper's gemm. It applies the epilogue to a warp's
 * accumulators and stores results of the kernel's narrow type (for tf32: of float32) through the
 * warp's staging panels.
 *
 * Large tiles are stored by TMA, which runs while the next tile is multiplied. Small tiles are
 * stored from registers, because a block seldom has a next tile. In all functions x is the kernel's
 * Params. It has the tensor maps `out` and `preact`. */
#ifndef GPUKERN_CUDA_GEMM_STORE_PANELS_CUH
#define GPUKERN_CUDA_GEMM_STORE_PANELS_CUH

#include "../../ptx/laneid.cuh"
#include "../../layout/wgmma.cuh"
#include "bias.cuh"
#include "panels.cuh"

/* The variants of the store for results of a's dtype. */
enum Store {
    /* Results are sums times alpha, in rows of whole 16-byte chunks. The code has no loop, because
     * in a launch with one tile for each block no code is in the instruction cache. */
    STORE_SUMS,
    /* Rows of whole chunks, and no activation but relu. 16-bit results also have no preact, and
     * their bias can be read in pairs. */
    STORE_CHEAP,
    STORE_ACTIVATED, /* rows of whole chunks, any activation */
    /* Any activation, c, and rows of any alignment. One variant serves all of these, because this
     * takes a third less time to compile. */
    STORE_UNALIGNED
};

/* Stores the panels' contents to the result, or with to_preact to preact, at position `at`. */
template <class R, class Panel, int N, bool UNALIGNED, bool TMA, class Params>
__device__ __forceinline__ void send(const Params &x, bool to_preact, smem_addr panels_s,
                                     const tma_at &at, unsigned batch, int lane) {
    if (TMA && !(UNALIGNED && x.unaligned)) {
        if (to_preact) /* two calls: a map chosen at run time would be fetched lane by lane */
            send_panels<R, Panel, N>(&x.preact, panels_s, at, lane);
        else
            send_panels<R, Panel, N>(&x.out, panels_s, at, lane);
    } else if constexpr (UNALIGNED || !TMA) {
        const GemmEpilogue &e = x.p.epilogue;
        const GemmPlace place = gemm_place(x.p, batch);
        const int64_t row = at.c[1], col = at.c[0], stride = to_preact ? e.preact_row : e.out_row;
        uint16_t *const to_g =
            (uint16_t *)(to_preact ? e.preact : e.out) + (to_preact ? place.preact : place.out);
        const int rows = (int)(x.p.m - row), cols = (int)(x.p.n - col);
        if (UNALIGNED && x.unaligned) {
            /* Large tiles read laneid() again. Otherwise registers would hold it and the values
             * derived from it while the tile is multiplied. */
            const int late = TMA ? laneid() : lane;
            send_rows<Panel, 2 * N>(to_g + row * stride + col, stride, rows, cols, panels_s, late);
        } else if constexpr (!TMA)
            send_chunks<Panel, 2 * N>(to_g + row * stride + col, stride, rows, cols, panels_s,
                                      lane);
    }
}

/* The Where of epilogue.cuh for a warp's accumulators: 16 rows x 2 N columns of results of type
 * R. */
template <class R, class Panel, int N, Store STORE, bool TMA, class Params>
struct Accumulators : EveryEpilogue {
    static constexpr bool UNALIGNED = STORE == STORE_UNALIGNED,
                          ACTIVATED = STORE >= STORE_ACTIVATED;
    /* True if this variant handles preact and every bias. */
    static constexpr bool ALL = ACTIVATED || (STORE == STORE_CHEAP && element<R>::bits == 32);
    static constexpr bool C = UNALIGNED, PREACT = ALL, OWN_BIAS = true;
    /* Small tiles have the code of the write twice. With a loop over the two writes, the compiler
     * does not keep the stages' addresses in uniform registers, which costs 5 instructions in every
     * step. */
    static constexpr bool ONE_WRITE = TMA;
    /* Accumulators whose bias or c is read at once. More would need too many registers. */
    static constexpr int PART = N % 32 == 0 ? 32 : N;
    template <int> static constexpr int C_AT_ONCE = PART;

    const Params &x;
    const smem_addr panels_s;
    const tma_at &at; /* the first column and row */
    const unsigned batch;
    const int lane;

    __device__ __forceinline__ Accumulators(const Params &call, smem_addr panels,
                                            const tma_at &place, unsigned entry, int of_warp)
        : x(call), panels_s(panels), at(place), batch(entry), lane(of_warp) {}
    __device__ __forceinline__ void alpha_and_bias(float alpha, float *v) const {
        if constexpr (OWN_EPILOGUE) return;             /* it has neither alpha nor a bias */
        if (STORE != STORE_SUMS && x.p.epilogue.bias) { /* a branch: adding 0 turns -0 into +0 */
#pragma unroll
            for (int j = 0; j < N; j += PART) {
                float some[PART / 2];
                read_bias<R, ALL>(x.p, at.c[0] + 2 * j, lane, some);
#pragma unroll
                for (int i = 0; i < PART; ++i)
                    v[j + i] = fmaf(v[j + i], alpha, some[i / 4 * 2 + i % 2]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < N; ++i) v[i] *= alpha;
        }
    }
    __device__ __forceinline__ void read_c(int i, float *c) const {
        read_c_pairs<R, PART>(x.p, gemm_place(x.p, batch).c, at.c[1], at.c[0] + 2 * i, lane, c);
    }
    __device__ __forceinline__ void activate(float *v) const {
        if constexpr (OWN_EPILOGUE)
            finish_own(v);
        else if (ACTIVATED)
            activate_16<N>(x.p.epilogue.activation, v);
        else if (STORE == STORE_CHEAP && x.p.epilogue.activation == GK_ACT_RELU)
            activate_16<N>(GK_ACT_RELU, v);
    }
    /* Applies the own epilogue of a compiled kernel (own_epilogue.cuh). In accumulator order, a
     * lane has two rows, and two of every eight columns. */
    __device__ __forceinline__ void finish_own(float *v) const {
        if constexpr (OWN_EPILOGUE) {
            const int row = at.c[1] + lane / 4, col = at.c[0] + lane % 4 * 2;
            const int last_row = (int)x.p.m - 1, last_col = (int)x.p.n - 1;
#pragma unroll
            for (int i = 0; i < N; ++i)
                v[i] = own_finish(x.p, v[i], min(row + i / 2 % 2 * 8, last_row),
                                  min(col + i / 4 * 8 + i % 2, last_col));
        }
    }
    __device__ __forceinline__ void write(bool to_preact, const float *v) const {
        put_panels<R, Panel, N, TMA>(v, panels_s, lane);
        send<R, Panel, N, UNALIGNED, TMA>(x, to_preact, panels_s, at, batch, lane);
    }
};

/* Stores 2 N columns of a warp's 16 rows, and advances `at` behind them. */
template <class R, class Panel, int N, Store STORE, bool TMA, class Params>
__device__ __forceinline__ void store_some(const Params &x, float *v, smem_addr panels_s,
                                           tma_at &at, unsigned batch, int lane) {
    Accumulators<R, Panel, N, STORE, TMA, Params> where(x, panels_s, at, batch, lane);
    finish<N>(x.p.epilogue, (float)x.p.epilogue.alpha, where, v);
    at.c[0] += 2 * N;
}

/* How many of a lane's n accumulators one call of store_some writes. At most `room` fit into the
 * warp's panels, and `panel` fit into one panel. STORE_SUMS writes whole panels. The other variants
 * write equal passes, so that their code is emitted once. */
constexpr int sums_at_once(int n, Store store, int room, int panel) {
    if (store == STORE_SUMS && n % panel == 0) return room < n ? room : n;
    return n / ((n + room - 1) / room);
}

/* Stores a warp's 16 rows; a lane has N sums. The code of all variants but STORE_SUMS exists once,
 * in a loop that shifts the sums down. */
template <class R, class Panel, int PANELS, Store STORE, bool TMA, class Params, int N>
__device__ __forceinline__ void store_panels(const Params &x, float (&sum)[N], smem_addr panels_s,
                                             tma_at at, unsigned batch, int lane) {
    constexpr int EACH = Panel::row_bytes / (2 * (element<R>::bits / 8));
    constexpr int SOME = sums_at_once(N, STORE, PANELS * 2048 / Panel::bytes * EACH, EACH),
                  REST = N % SOME;
    constexpr bool MOVE = STORE != STORE_SUMS && N > SOME;
    static_assert(STORE == STORE_SUMS || REST == 0, "bodies that are alike");
    constexpr int UNROLLED = MOVE ? 1 : N / SOME;
#pragma unroll UNROLLED
    for (int i = 0; i + SOME <= N; i += SOME) {
        store_some<R, Panel, SOME, STORE, TMA>(x, sum + (MOVE ? 0 : i), panels_s, at, batch, lane);
        if (MOVE) {
#pragma unroll
            for (int j = 0; j + SOME < N; ++j) sum[j] = sum[j + SOME];
        }
    }
    if constexpr (REST > 0)
        store_some<R, Panel, REST, STORE, TMA>(x, sum + N - REST, panels_s, at, batch, lane);
}

#endif
