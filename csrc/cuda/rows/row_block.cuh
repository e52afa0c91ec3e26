// SPDX-License-Identifier: BSD-3-Clause
/* row_block.cuh: a row of a tensor [..., N] in the registers of the threads that share it, and
 * statistics over it.
 *
 * LANES threads of a block share a row: up to 32 lanes of a warp (a block then has several rows),
 * or all threads of the block. On Hopper CLUSTER blocks may share one. A thread has ITEMS vectors
 * of 16 bytes; vector i of lane l in block r of the cluster begins at column ((r ITEMS + i) LANES +
 * l) VEC, so that neighbours read neighbouring vectors. Values stay packed as they lie in memory,
 * and are widened where they are used: a row takes 4 ITEMS registers a thread in every dtype.
 *
 * A statistic is summed over the thread's values, the lanes of a warp, the warps of the block, the
 * blocks of the cluster, always in the same order, and every thread has the same bits of it. */
#ifndef GPUKERN_CUDA_ROWS_ROW_BLOCK_CUH
#define GPUKERN_CUDA_ROWS_ROW_BLOCK_CUH

#include "../host/launch.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/mbarrier.cuh"
#include "../tile/convert.cuh"
#include "../tile/reduce.cuh"

/* ---- where rows lie -------------------------------------------------------------------------- */
/* The rows of a tensor [..., N], its last dimension dense; leading dimensions that can be merged
 * are. */
struct RowTensor {
    void *data; /* NULL: not given */
    int64_t stride[GK_MAX_DIMS - 1], shape[GK_MAX_DIMS - 1];
    int ndim; /* leading dimensions, at least 1 */
};

inline RowTensor row_tensor(const gk_tensor &t) {
    RowTensor r = {};
    r.data = t.data;
    r.ndim = 1;
    r.shape[0] = 1;
    for (int d = 0; d < t.ndim - 1; ++d) {
        if (t.shape[d] == 1) continue;
        const int last = r.ndim - 1;
        if (r.shape[last] == 1) {
            r.shape[last] = t.shape[d];
            r.stride[last] = t.stride[d];
        } else if (r.stride[last] == t.shape[d] * t.stride[d]) {
            r.shape[last] *= t.shape[d];
            r.stride[last] = t.stride[d];
        } else {
            r.shape[r.ndim] = t.shape[d];
            r.stride[r.ndim++] = t.stride[d];
        }
    }
    return r;
}
inline RowTensor row_tensor(const gk_tensor *t) { return t ? row_tensor(*t) : RowTensor{}; }

/* A tensor [...] that has one element for each row. */
inline RowTensor row_elements(const gk_tensor *t) {
    if (!t) return RowTensor{};
    gk_tensor with = *t;
    with.shape[with.ndim] = 1;
    with.stride[with.ndim++] = 1;
    return row_tensor(with);
}

inline int64_t num_rows(const gk_tensor &t) {
    int64_t rows = 1;
    for (int d = 0; d < t.ndim - 1; ++d) rows *= t.shape[d];
    return rows;
}

template <class T> __device__ __forceinline__ T *row_at(const RowTensor &t, int64_t row) {
    int64_t offset = 0;
    for (int d = t.ndim - 1; d > 0; --d) {
        offset += row % t.shape[d] * t.stride[d];
        row /= t.shape[d];
    }
    return (T *)t.data + offset + row * t.stride[0];
}

/* ---- a thread's share of a row --------------------------------------------------------------- */
template <class T> constexpr int row_vec = 16 / sizeof(T);

/* One vector of 16 bytes. */
template <class T> union RowVec {
    uint4 bits;
    T v[row_vec<T>];
    __device__ __forceinline__ RowVec() {}
    __device__ __forceinline__ typename element<T>::acc get(int i) const { return to_acc(v[i]); }
    __device__ __forceinline__ void set(int i, typename element<T>::acc x) {
        v[i] = from_acc<T>(x);
    }
};

/* Which threads share a row, and how they agree on a statistic. Blocks are threads x 1 x 1; all
 * threads of a block (of a cluster) call `sum` and `peak` together, as often as each other. */
template <class T, int LANES_, int ITEMS_, int CLUSTER_ = 1> struct RowGroup {
    typedef T Element;
    typedef typename element<T>::acc acc;
    static constexpr int LANES = LANES_, ITEMS = ITEMS_, CLUSTER = CLUSTER_, VEC = row_vec<T>;
    /* of a block */
    static constexpr int THREADS = LANES < 128 ? 128 : LANES, ROWS = THREADS / LANES;
    /* the longest row */
    static constexpr int COLUMNS = LANES * ITEMS * VEC * CLUSTER;
    static constexpr int WARPS = LANES / 32, PLACES = WARPS * CLUSTER;
    static constexpr bool ALONE = LANES <= 32 && CLUSTER == 1; /* a row never leaves its warp */
    static constexpr int MOST = 4;                             /* statistics at once */
    static_assert(CLUSTER == 1 || (LANES > 32 && sizeof(acc) == 4),
                  "a cluster exchanges floats of whole blocks");

    struct Shared {
        acc place[2][ALONE || CLUSTER > 1 ? 1 : MOST *PLACES];
        /* a warp's statistics, from any block of the cluster */
        float4 sent[2][CLUSTER > 1 ? PLACES : 1];
        uint64_t full[2];
    };

    Shared &shared;
    int lane, rank, round = 0; /* statistics that were taken */

    __device__ __forceinline__ explicit RowGroup(Shared &s)
        : shared(s), lane(threadIdx.x % LANES), rank(CLUSTER > 1 ? cluster_ctarank() : 0) {
        if constexpr (CLUSTER > 1) {
            if (threadIdx.x == 0) {
                mbarrier_init(cvta_to_shared(&s.full[0]), 1);
                mbarrier_init(cvta_to_shared(&s.full[1]), 1);
                fence_mbarrier_init();
            }
            __syncwarp();
            barrier_cluster_arrive();
        }
    }

    /* The row of these lanes, where a block has one for each of its groups. */
    __device__ __forceinline__ int64_t first_row() const {
        return (int64_t)(blockIdx.x / CLUSTER) * ROWS + threadIdx.x / LANES;
    }

    __device__ __forceinline__ int column(int i) const {
        return ((rank * ITEMS + i) * LANES + lane) * VEC;
    }

    /* A row's vectors; zeros from column n on, and everywhere where it is no row. */
    __device__ __forceinline__ void load(RowVec<T> (&x)[ITEMS], const T *row, int n,
                                         bool is_row = true) const {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            x[i].bits = make_uint4(0, 0, 0, 0);
            if (is_row && column(i) < n) x[i].bits = *(const uint4 *)(row + column(i));
        }
    }
    __device__ __forceinline__ void store(T *row, int i, const RowVec<T> &x) const {
        *(uint4 *)(row + column(i)) = x.bits;
    }

    template <int N> __device__ __forceinline__ void sum(acc (&x)[N]) {
        all(x, [](acc a, acc b) { return a + b; }, acc(0));
    }
    template <int N> __device__ __forceinline__ void peak(acc (&x)[N]) {
        /* a NaN stays */
        all(x, [](acc a, acc b) { return a > b || a != a ? a : b; }, acc(-INFINITY));
    }

    /* A warp's statistics to all blocks of the cluster, 16 bytes to each, which count at the
     * barrier there: a cluster's own barrier would wait for what the block has stored in global
     * memory, too, and drop its L1. */
    template <int N>
    __device__ __forceinline__ void exchange(const acc (&x)[N], int set, int warp, int my) {
        const smem_addr full = cvta_to_shared(&shared.full[set]);
        if (round == 0) barrier_cluster_wait(); /* all blocks run, and their barriers are made */
        if (threadIdx.x == 0) mbarrier_arrive_expect_tx(full, PLACES * 16);
        if (my < CLUSTER)
            st_async_128(mapa(cvta_to_shared(&shared.sent[set][rank * WARPS + warp]), my), x[0],
                         N > 1 ? x[N > 1 ? 1 : 0] : 0, N > 2 ? x[N > 2 ? 2 : 0] : 0,
                         N > 3 ? x[N > 3 ? 3 : 0] : 0, mapa(full, my));
        while (!mbarrier_try_wait_parity(full, round >> 1 & 1)) {
        }
    }
    template <int N> __device__ __forceinline__ acc of_place(int set, int n, int i) const {
        if constexpr (CLUSTER == 1)
            return shared.place[set][n * PLACES + i];
        else
            return ((const float *)&shared.sent[set][i])[n];
    }

    template <int N, class Op>
    __device__ __forceinline__ void all(acc (&x)[N], Op op, acc nothing) {
        static_assert(N <= MOST, "more places");
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int bit = 1; bit < (LANES < 32 ? LANES : 32); bit *= 2)
                x[n] = op(x[n], __shfl_xor_sync(0xffffffffu, x[n], bit));
        if constexpr (!ALONE) {
            /* Two sets of places: who writes a set again has waited for the other one since, which
             * no warp filled before it had read this one. */
            const int set = round & 1, warp = threadIdx.x / 32, my = threadIdx.x % 32;
            if constexpr (CLUSTER == 1) {
                if (my == 0) {
#pragma unroll
                    for (int n = 0; n < N; ++n) shared.place[set][n * PLACES + warp] = x[n];
                }
                __syncthreads();
            } else {
                exchange<N>(x, set, warp, my);
            }
            ++round;
#pragma unroll
            for (int n = 0; n < N; ++n) {
                acc y = nothing;
#pragma unroll
                for (int at = 0; at < PLACES; at += 32)
                    if (at + my < PLACES) y = op(y, of_place<N>(set, n, at + my));
#pragma unroll
                for (int bit = 1; bit < 32; bit *= 2)
                    y = op(y, __shfl_xor_sync(0xffffffffu, y, bit));
                x[n] = y;
            }
        }
    }
};

/* V elements of a row that are loaded and stored at once. */
template <class T, int V> struct alignas(V * sizeof(T)) RowSome {
    T v[V];
};

/* ---- rows of any size and alignment: a block walks a row, which it reads again from the caches
 * ---- */
constexpr int ROW_WALK_THREADS = 512;

inline unsigned row_blocks(int64_t rows) { return (unsigned)gk_min_i64(rows, 1 << 20); }

/* Sums of N values over a block; every thread has them. `place` is of 32 N values. */
template <int N, class W> __device__ __forceinline__ void block_sum(W (&x)[N], W *place) {
    const int warp = threadIdx.x / 32, my = threadIdx.x % 32, warps = blockDim.x / 32;
    __syncthreads(); /* the places were read */
#pragma unroll
    for (int n = 0; n < N; ++n) {
        x[n] = warp_sum(x[n]);
        if (my == 0) place[n * 32 + warp] = x[n];
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N; ++n) x[n] = warp_sum(my < warps ? place[n * 32 + my] : W(0));
}

template <class W> __device__ __forceinline__ W block_max(W x, W *place) {
    const int warp = threadIdx.x / 32, my = threadIdx.x % 32, warps = blockDim.x / 32;
    x = warp_max(x);
    __syncthreads();
    if (my == 0) place[warp] = x;
    __syncthreads();
    return warp_max(my < warps ? place[my] : W(-INFINITY));
}

/* ---- the shapes of groups -------------------------------------------------------------------- */
/* X(lanes, items), fewest columns first: a row is served by the first shape that holds it. A warp
 * or less for short rows, so that no barrier is needed; then blocks that grow before their threads'
 * vectors do, up to 512 threads of 4 vectors, of which an SM holds two blocks: one loads while the
 * other stores. The last is for what has no clusters. float64 walks: its units are the bound on
 * most GPUs. */
#define GK_ROW_SHAPES(X) \
    X(16, 1) X(32, 1) X(32, 4) X(128, 2) X(256, 2) X(512, 2) X(512, 4) X(1024, 4)

/* An instance's key: 0 the columns that a group holds, 1 rows of a block, 2 blocks of a cluster, 3
 * columns up to which one block is better than a cluster. */
#define GK_ROW_KEY(T, LANES, ITEMS, CLUSTER)                                                \
    {RowGroup<T, LANES, ITEMS, CLUSTER>::COLUMNS, RowGroup<T, LANES, ITEMS, CLUSTER>::ROWS, \
     CLUSTER, CLUSTER > 1 ? RowGroup<T, 512, (ITEMS < 4 ? ITEMS : 4), 1>::COLUMNS : 0}

/* Whether every row of all tensors [..., N], of one dtype, is of whole vectors that begin at
 * multiples of 16 bytes. A tensor that is NULL is not given. */
template <class... More> inline bool rows_whole(const gk_tensor &first, More... more) {
    return first.shape[first.ndim - 1] % (16 / (int64_t)gk_dtype_bytes(first.dtype)) == 0 &&
           rows_aligned(first) && ((more == nullptr || rows_aligned(*more)) && ...);
}

/* And whether the groups of an instance hold such a row. */
template <class... More>
inline bool rows_fit(const gk_cuda_instance *row, const gk_tensor &first, More... more) {
    const int64_t n = first.shape[first.ndim - 1];
    return n <= row->key[0] && n > row->key[3] && rows_whole(first, more...);
}

#endif
