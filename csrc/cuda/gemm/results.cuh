/* results.cuh: how gemm_sm90a's sums leave: 16-bit results and float32 ones of tf32 through a warp's panels, by tma under the
 * next tile's products or, where a block seldom has another, from registers, as all else does. x: the kernel's Params, with
 * tensor maps `out` and `preact`. */
#ifndef GPUKERN_CUDA_GEMM_RESULTS_CUH
#define GPUKERN_CUDA_GEMM_RESULTS_CUH

#include "../ptx/bar.cuh"
#include "../ptx/laneid.cuh"
#include "../ptx/stmatrix.cuh"
#include "../ptx/tma.cuh"
#include "../layout/wgmma.cuh"
#include "epilogue.cuh"
#include "realign.cuh"

/* How results of a's dtype without c leave. */
enum Store {
    STORE_BARE, /* in whole chunks of 16 bytes, nothing but the sums times alpha: in a launch's only tile all code is new */
    STORE_STRAIGHT, /* no activation, or one that costs nothing; 16 bits: no preact, a bias that is read in pairs */
    STORE_CURVED,   /* after any activation */
    STORE_RAGGED /* the same, also in rows that do not consist of whole chunks: a body for both is a third less to compile */
};

/* 16 rows of 32 floats, the first of v, in the accumulators' order. */
template <class Panel> __device__ __forceinline__ void put_floats(smem_addr panel_s, const float *v, int lane) {
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
        const int row = lane / 4 + i / 2 % 2 * 8, byte = i / 4 * 32 + lane % 4 * 8;
        st_shared_64(panel_s + Panel::offset(row, byte / 16) + byte % 16, make_float2(v[i], v[i + 1]));
    }
}

/* Where the i-th of several panels begins: the last one ends where they all do, and holds what the one before it holds, too,
 * where they are not whole. */
constexpr GK_HD int panel_first(int i, int each, int all) { return i * each < all - each ? i * each : all - each; }

/* A warp's 16 rows of N / 8 octets of columns go to its panels, once their last contents have been read. */
template <class T, class Panel, int N, bool TMA>
__device__ __forceinline__ void put_panels(const float *v, smem_addr panels_s, int lane) {
    constexpr int EACH = Panel::row_bytes / (2 * (int)sizeof(T)), NUM = (N + EACH - 1) / EACH;
    if (TMA && lane == 0) tma_store_wait_group_read<0>();
    __syncwarp(); /* the panels' last contents have been read */
#pragma unroll
    for (int i = 0; i < NUM; ++i) {
        const float *const w = v + panel_first(i, EACH, N);
        if constexpr (sizeof(T) == 4) {
            put_floats<Panel>(panels_s + i * Panel::bytes, w, lane);
        } else {
            const unsigned put = Panel::offset(lane % 16, 0);
#pragma unroll
            for (int j = 0; j < Panel::chunks; j += 2) { /* rows 0-7, 8-15 of one octet of columns, then of the next */
                const uint32_t two[4] = {pack2<T>(w[4 * j], w[4 * j + 1]), pack2<T>(w[4 * j + 2], w[4 * j + 3]),
                                         pack2<T>(w[4 * j + 4], w[4 * j + 5]), pack2<T>(w[4 * j + 6], w[4 * j + 7])};
                stmatrix_x4(panels_s + i * Panel::bytes + Panel::chunk(put, j + lane / 16), two);
            }
        }
    }
}

/* They leave by tma while the warp goes on. at: their first column and row. One fence for all panels: each waits until the
 * warp's stores have come. */
template <class T, class Panel, int N>
__device__ __forceinline__ void send_panels(const CUtensorMap *map, smem_addr panels_s, const tma_at &at, int lane) {
    constexpr int COLS = Panel::row_bytes / (int)sizeof(T), NUM = (2 * N + COLS - 1) / COLS;
    fence_proxy_async();
    __syncwarp(); /* all of the panels is written */
    if (lane == 0) {
        tma_at to = at;
#pragma unroll
        for (int i = 0; i < NUM; ++i) {
            to.c[0] = at.c[0] + panel_first(i, COLS, 2 * N);
            tma_store_5d(map, to, panels_s + i * Panel::bytes);
        }
        tma_store_commit_group();
    }
}

/* Rows of COLS 16-bit results, in panels side by side, as chunks of 16 bytes: a pass has whole rows. */
template <class Panel, int COLS> struct panel_rows {
    static constexpr int CHUNKS = COLS / 8, IN_PASS = 32 / CHUNKS;
    /* rows of two narrow panels, and of two that overlap, lie at the same banks */
    static constexpr int WAYS = Panel::chunks < 8 || CHUNKS % Panel::chunks != 0 ? 2 : 1;
    static_assert(16 % IN_PASS == 0, "whole passes");
    static constexpr GK_HD int offset(int row, int chunk) {
        const int panel = chunk / Panel::chunks;
        return panel * Panel::bytes + Panel::offset(row, chunk - panel_first(panel, Panel::chunks, CHUNKS));
    }
    static constexpr GK_HD int read_ways(int further) { /* of the lanes' chunks, or of those `further` on */
        int bytes[32] = {};
        for (int lane = 0; lane < 32; ++lane) {
            const int chunk = lane % CHUNKS + further;
            bytes[lane] = offset(lane / CHUNKS % IN_PASS, chunk < CHUNKS ? chunk : CHUNKS - 1);
        }
        return ways(bytes, 16);
    }
};

/* Or from registers, which end sooner than tma begins to read what they wrote. to_g: element (0, 0), inside the matrix with
 * `rows` and `cols` from there on. */
template <class Panel, int COLS>
__device__ __forceinline__ void send_chunks(uint16_t *to_g, int64_t row_stride, int rows, int cols, smem_addr panels_s,
                                            int lane) {
    typedef panel_rows<Panel, COLS> Rows;
    constexpr int PASSES = 16 / Rows::IN_PASS;
    static_assert(Rows::IN_PASS * Rows::CHUNKS == 32 && Rows::read_ways(0) <= Rows::WAYS, "chunks of whole rows");
    const int chunk = lane % Rows::CHUNKS, row = lane / Rows::CHUNKS;
    __syncwarp(); /* all of the panels is written */
    uint4 x[PASSES];
#pragma unroll
    for (int i = 0; i < PASSES; ++i) x[i] = ld_shared_128(panels_s + Rows::offset(row + i * Rows::IN_PASS, chunk));
    uint16_t *const at_g = to_g + row * row_stride + 8 * chunk;
#pragma unroll
    for (int i = 0; i < PASSES; ++i)
        if (row + i * Rows::IN_PASS < rows && 8 * chunk < cols)
            *(uint4 *)(at_g + i * Rows::IN_PASS * row_stride) = x[i];
}

/* Or from registers, where rows of the result are misaligned or end within 16 bytes: each row's chunks that lie at multiples of
 * 16 bytes are put together from two of the panels', what is left at its ends goes by elements. */
template <class Panel, int COLS>
__device__ __forceinline__ void send_rows(uint16_t *to_g, int64_t row_stride, int rows, int cols, smem_addr panels_s,
                                          int lane) {
    typedef panel_rows<Panel, COLS> Rows;
    static_assert(Rows::read_ways(0) <= Rows::WAYS && Rows::read_ways(1) <= Rows::WAYS, "chunks of whole rows");
    const auto before = [](const uint16_t *row_g) { return (int)(-((uintptr_t)row_g / 2) % 8); }; /* its first chunk */
    const int chunk = lane % Rows::CHUNKS, row0 = lane / Rows::CHUNKS;
    __syncwarp(); /* all of the panels is written */
#pragma unroll 2
    for (int r = row0; r < 16 && row0 < Rows::IN_PASS; r += Rows::IN_PASS) {
        uint16_t *const row_g = to_g + r * row_stride;
        const int head = before(row_g), col = head + 8 * chunk;
        const uint4 low = ld_shared_128(panels_s + Rows::offset(r, chunk)),
                    high = ld_shared_128(panels_s + Rows::offset(r, min(chunk + 1, Rows::CHUNKS - 1)));
        uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        realign_shift(words, head);
        if (r >= rows || col + 8 > COLS) continue;
        if (col + 8 <= cols) {
            *(uint4 *)(row_g + col) = make_uint4(words[0], words[1], words[2], words[3]);
        } else {
#pragma unroll
            for (int e = 0; e < 8; ++e)
                if (col + e < cols) row_g[col + e] = (uint16_t)(words[e / 2] >> e % 2 * 16);
        }
    }
#pragma unroll 2
    for (int r = lane / 8; r < 16; r += 4) {
        uint16_t *const row_g = to_g + r * row_stride;
        const int head = before(row_g), col = lane % 8 < head ? lane % 8 : COLS - 8 + lane % 8;
        const uint32_t word = ld_shared_32(panels_s + Rows::offset(r, col / 8) + col % 8 / 2 * 4);
        if (head > 0 && r < rows && col < cols) row_g[col] = (uint16_t)(word >> col % 2 * 16);
    }
}

/* The bias of a lane's columns from col0 on, two of every eight, all read before one is used; what lies past the last column
 * is not stored. ANY: one that cannot be read in pairs, too. */
template <class T, bool ANY, int N>
__device__ __forceinline__ void read_bias(const GemmProblem &p, int64_t col0, int lane, float (&bias)[N]) {
    const GemmEpilogue &e = p.epilogue;
    const int64_t col = col0 + lane % 4 * 2, last = p.n - 2;
    if (ANY && !e.bias_vectors) {
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            const int64_t first = min(col + i * 4, p.n - 1);
            read_any<T, 2>(e.bias, e.bias_dtype, first * e.bias_col, e.bias_col, false, first < p.n - 1 ? 2 : 1,
                           bias + i);
        }
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

/* Brings what the stores ask of the call into the constant cache. */
__device__ __forceinline__ void touch_epilogue(const GemmEpilogue &e) {
    have(e.alpha), have(e.out), have(e.out_row), have((int)e.activation);
}

/* What is in the panels goes to the result, or to preact, from at on. */
template <class T, class Panel, int N, bool RAGGED, bool TMA, class Params>
__device__ __forceinline__ void send(const Params &x, bool to_preact, smem_addr panels_s, const tma_at &at,
                                     unsigned batch, int lane) {
    if (TMA && !(RAGGED && x.ragged)) {
        if (to_preact) /* a map chosen in a register would be read back lane by lane */
            send_panels<T, Panel, N>(&x.preact, panels_s, at, lane);
        else
            send_panels<T, Panel, N>(&x.out, panels_s, at, lane);
    } else if constexpr (RAGGED || !TMA) {
        const GemmEpilogue &e = x.p.epilogue;
        const GemmPlace place = gemm_place(x.p, batch);
        const int64_t row = at.c[1], col = at.c[0], stride = to_preact ? e.preact_row : e.out_row;
        uint16_t *const to_g = (uint16_t *)(to_preact ? e.preact : e.out) + (to_preact ? place.preact : place.out);
        const int rows = (int)(x.p.m - row), cols = (int)(x.p.n - col);
        if (RAGGED && x.ragged) {
            /* asked anew for wide tiles: no register keeps what derives of it over the products */
            const int late = TMA ? laneid() : lane;
            send_rows<Panel, 2 * N>(to_g + row * stride + col, stride, rows, cols, panels_s, late);
        } else if constexpr (!TMA)
            send_chunks<Panel, 2 * N>(to_g + row * stride + col, stride, rows, cols, panels_s, lane);
    }
}

/* 2 N columns of a warp's 16 rows of results of T without c; at moves past them. */
template <class T, class Panel, int N, Store STORE, bool TMA, class Params>
__device__ __forceinline__ void store_some(const Params &x, float *v, smem_addr panels_s, tma_at &at, unsigned batch,
                                           int lane) {
    constexpr bool RAGGED = STORE == STORE_RAGGED, CURVED = STORE >= STORE_CURVED;
    constexpr bool ALL = CURVED || (STORE == STORE_STRAIGHT && sizeof(T) == 4); /* preact, any bias */
    constexpr int PART = N % 32 == 0 ? 32 : N; /* whose bias is read at once: more takes registers */
    const GemmEpilogue &e = x.p.epilogue;
    const float alpha = (float)e.alpha;
    if (STORE != STORE_BARE && e.bias) { /* not + 0: -0 stays */
#pragma unroll
        for (int j = 0; j < N; j += PART) {
            float bias[PART / 2];
            read_bias<T, ALL>(x.p, at.c[0] + 2 * j, lane, bias);
#pragma unroll
            for (int i = 0; i < PART; ++i) v[j + i] = fmaf(v[j + i], alpha, bias[i / 4 * 2 + i % 2]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] *= alpha;
    }
    const auto leave = [&](bool to_preact) {
        if (CURVED && !to_preact)
            activate_16<N>(e.activation, v);
        else if (STORE == STORE_STRAIGHT && !to_preact && e.activation == GK_ACT_RELU)
            activate_16<N>(GK_ACT_RELU, v);
        put_panels<T, Panel, N, TMA>(v, panels_s, lane);
        send<T, Panel, N, RAGGED, TMA>(x, to_preact, panels_s, at, batch, lane);
    };
    if (ALL && TMA) {
#pragma unroll 1
        for (int left = e.preact ? 2 : 1; left > 0; --left) leave(left == 2);
    } else { /* twice: after that loop the small tiles' stages are in no uniform register, 5 instructions more a step */
        if (ALL && e.preact) leave(true);
        leave(false);
    }
    at.c[0] += 2 * N;
}

/* How many of N sums a body of store_plain takes, of which ROOM fit a warp's panels and PANEL one: what is bare goes by whole
 * panels, else all bodies are alike. */
constexpr int sums_at_once(int n, Store store, int room, int panel) {
    if (store == STORE_BARE && n % panel == 0) return room < n ? room : n;
    return n / ((n + room - 1) / room);
}

/* A lane's N sums. All but bare ones are stored by one body, past which the sums move instead of the code. */
template <class T, class Panel, int PANELS, Store STORE, bool TMA, class Params, int N>
__device__ __forceinline__ void store_plain(const Params &x, float (&sum)[N], smem_addr panels_s, tma_at at,
                                            unsigned batch, int lane) {
    constexpr int EACH = Panel::row_bytes / (2 * (int)sizeof(T));
    constexpr int SOME = sums_at_once(N, STORE, PANELS * 2048 / Panel::bytes * EACH, EACH), REST = N % SOME;
    constexpr bool MOVE = STORE != STORE_BARE && N > SOME;
    static_assert(STORE == STORE_BARE || REST == 0, "bodies that are alike");
    constexpr int UNROLLED = MOVE ? 1 : N / SOME;
#pragma unroll UNROLLED
    for (int i = 0; i + SOME <= N; i += SOME) {
        store_some<T, Panel, SOME, STORE, TMA>(x, sum + (MOVE ? 0 : i), panels_s, at, batch, lane);
        if (MOVE) {
#pragma unroll
            for (int j = 0; j + SOME < N; ++j) sum[j] = sum[j + SOME];
        }
    }
    if constexpr (REST > 0) store_some<T, Panel, REST, STORE, TMA>(x, sum + N - REST, panels_s, at, batch, lane);
}

/* Everything else, 32 columns of floats at a time: one body, past which the sums move instead of the code. A lane has 8
 * columns of a row; across, 8 rows of a column: without wide stores, the lanes of one should fall beside each other. */
template <class T, int BN>
__device__ __forceinline__ void store_any(const GemmProblem &p, const GemmPlace &at, float (&sum)[BN / 2],
                                          smem_addr panel_s, int64_t row0, int64_t rows, int64_t col0, bool across,
                                          int lane) {
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
            const int valid = (int)min((int64_t)8, (across ? rows : p.n) - col);
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
            if (row < (across ? p.n : rows) && valid > 0) epilogue_cols<T, 8>(p.epilogue, at, row, col, valid, v);
        }
        __syncwarp(); /* the panel has been read */
#pragma unroll
        for (int i = 0; i + 16 < BN / 2; ++i) sum[i] = sum[i + 16];
    }
}

/* A swap-AB product: a warpgroup's 64 rows are columns of the result, its COLS columns rows. bare: the sums times alpha, in
 * whole chunks of 16 bytes; keep: which the next kernel should find in L2. */
template <class T, int COLS, int LD>
__device__ __forceinline__ void store_transposed(const GemmProblem &p, const GemmPlace &at,
                                                 const float (&sum)[COLS / 2], float *staging, int row0, int col0,
                                                 bool bare, bool keep) {
    static_assert(wgmma_transposed_ways(LD) == 1, "the lanes' sums fall into 32 banks");
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const GemmEpilogue &e = p.epilogue;
#pragma unroll
    for (int i = 0; i < COLS / 2; ++i) {
        const coord d = wgmma_d(warp, lane, i);
        staging[d.col * LD + d.row] = sum[i];
    }
    bar_sync(1, 128); /* all sums are there */
    const auto store = [&](int i, const auto &leave) {
        const int row = col0 + i / 8, col = row0 + i % 8 * 8, valid = (int)min((int64_t)8, p.m - col);
        const float4 x = *(const float4 *)(staging + i / 8 * LD + i % 8 * 8),
                     y = *(const float4 *)(staging + i / 8 * LD + i % 8 * 8 + 4);
        float v[8] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
        if (row < p.n && valid > 0) leave(row, col, valid, v);
    };
    if (bare) {
        const float alpha = (float)e.alpha;
#pragma unroll
        for (int i = 0; i < COLS * 8; i += 128)
            if (i + thread < COLS * 8)
                store(i + thread, [&](int row, int col, int, float *v) {
                    uint32_t two[4];
#pragma unroll
                    for (int j = 0; j < 4; ++j) two[j] = pack2<T>(v[2 * j] * alpha, v[2 * j + 1] * alpha);
                    T *const to_g = (T *)e.out + at.out + row * e.out_row + col;
                    const uint4 chunk = make_uint4(two[0], two[1], two[2], two[3]);
                    if (keep)
                        st_global_128_by(to_g, chunk, l2_last_out());
                    else
                        st_global_128(to_g, chunk);
                });
    } else {
#pragma unroll 1
        for (int i = thread; i < COLS * 8; i += 128)
            store(i, [&](int row, int col, int valid, float *v) { epilogue_cols<T, 8>(e, at, row, col, valid, v); });
    }
    bar_sync(1, 128); /* they have been read */
}

#endif
