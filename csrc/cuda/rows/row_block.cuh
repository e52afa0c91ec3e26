// SPDX-License-Identifier: BSD-3-Clause
/* row_block.cuh: a row of a tensor [..., N] in the registers of the threads that share it, and
 * statistics (sums and maxima) over the row. norm.cuh and softmax.cuh build their kernels on
 * RowGroup. Every kernel of this folder uses RowTensor.
 *
 * LANES threads of a block share a row. Up to 32 lanes lie in one warp, and a block then has
 * several rows. With more lanes all threads of the block share one row. On Hopper, CLUSTER blocks
 * may share a row.
 *
 * A thread has ITEMS vectors of 16 bytes, of VEC elements each. Vector i of lane l in block r of
 * the cluster begins at column ((r ITEMS + i) LANES + l) VEC, so neighbouring lanes read
 * neighbouring vectors. Values stay packed in their dtype, and are widened where they are used. So
 * a row takes 4 ITEMS registers per thread in every dtype.
 *
 * A statistic is reduced over the values of a thread, then over the lanes of a warp, then over the
 * warps of the block and cluster. The order is always the same, and every thread gets the same
 * bits.
 *
 * The file also has block_sum and block_max, for kernels that loop over a row of any length, and
 * the tables from which instances are made. */
#ifndef GPUKERN_CUDA_ROWS_ROW_BLOCK_CUH
#define GPUKERN_CUDA_ROWS_ROW_BLOCK_CUH

#include "../host/launch.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/regs.cuh"
#include "../tile/convert.cuh"
#include "../tile/reduce.cuh"

/* ---- where rows lie -------------------------------------------------------------------------- */
/* The rows of a tensor [..., N] whose last dimension is dense. Leading dimensions are merged where
 * their strides allow it. */
struct RowTensor {
    void *data; /* NULL: the tensor is not given */
    int64_t stride[GK_MAX_DIMS - 1], shape[GK_MAX_DIMS - 1];
    int ndim; /* leading dimensions after merging, at least 1 */
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

/* The first element of a row; rows are numbered in row-major order of the leading dimensions. */
template <class T> __device__ __forceinline__ T *row_at(const RowTensor &t, int64_t row) {
    int64_t offset = 0;
    for (int d = t.ndim - 1; d > 0; --d) {
        offset += row % t.shape[d] * t.stride[d];
        row /= t.shape[d];
    }
    return (T *)t.data + offset + row * t.stride[0];
}

/* FLAT: the leading dimensions were merged into one. This takes fewer registers. */
template <class T, bool FLAT>
__device__ __forceinline__ T *row_in(const RowTensor &t, int64_t row) {
    return FLAT ? (T *)t.data + row * t.stride[0] : row_at<T>(t, row);
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

/* The threads that share a row, and their reductions. Blocks are one-dimensional. All threads of a
 * block, or of a cluster, must call `sum` and `peak` equally often. */
template <class T, int LANES_, int ITEMS_, int CLUSTER_ = 1> struct RowGroup {
    typedef T Element;
    typedef typename element<T>::acc acc;
    static constexpr int LANES = LANES_, ITEMS = ITEMS_, CLUSTER = CLUSTER_, VEC = row_vec<T>;
    /* threads and rows of a block */
    static constexpr int THREADS = LANES < 128 ? 128 : LANES, ROWS = THREADS / LANES;
    /* the longest row that the group holds */
    static constexpr int COLUMNS = LANES * ITEMS * VEC * CLUSTER;
    /* warps that share a row: in a block, in the cluster */
    static constexpr int WARPS = LANES / 32, PLACES = WARPS * CLUSTER;
    static constexpr bool ALONE = LANES <= 32 && CLUSTER == 1; /* a row lies in one warp */
    static constexpr int MOST = 4;                             /* statistics per reduction */
    static_assert(CLUSTER == 1 || (LANES > 32 && sizeof(acc) == 4),
                  "a cluster exchanges floats of whole blocks");

    struct Shared {
        acc place[2][ALONE || CLUSTER > 1 ? 1 : MOST *PLACES];
        /* a cluster's: the statistics that each of its warps sent here */
        float4 sent[2][CLUSTER > 1 ? PLACES : 1];
        uint64_t full[2]; /* mbarriers: a set of `sent` is complete */
    };

    Shared &shared;
    int lane, rank, round = 0; /* round counts the reductions */

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

    /* The row of this thread's group, in a grid that has a group per row. */
    __device__ __forceinline__ int64_t first_row() const {
        return (int64_t)(blockIdx.x / CLUSTER) * ROWS + threadIdx.x / LANES;
    }

    __device__ __forceinline__ int column(int i) const {
        return ((rank * ITEMS + i) * LANES + lane) * VEC;
    }

    /* Loads a row's vectors; zeros from column n on, and only zeros if !is_row. */
    __device__ __forceinline__ void load(RowVec<T> (&x)[ITEMS], const T *row, int n,
                                         bool is_row = true) const {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            x[i].bits = make_uint4(0, 0, 0, 0);
            if (is_row && column(i) < n) x[i].bits = *(const uint4 *)(row + column(i));
        }
    }
    __device__ __forceinline__ void store(T *row, int i, const RowVec<T> &x) const {
        st_global_128(row + column(i), x.bits);
    }

    template <int N> __device__ __forceinline__ void sum(acc (&x)[N]) {
        all(x, [](acc a, acc b) { return a + b; }, acc(0));
    }
    template <int N> __device__ __forceinline__ void peak(acc (&x)[N]) {
        /* a NaN in `a` is kept */
        all(x, [](acc a, acc b) { return a > b || a != a ? a : b; }, acc(-INFINITY));
    }

    /* Sends a warp's statistics to all blocks of the cluster, 16 bytes to each, and waits for those
     * of the others. The stores count at an mbarrier of the receiving block. A cluster barrier
     * would also wait for the block's stores to global memory, and invalidate its L1. */
    template <int N>
    __device__ __forceinline__ void exchange(const acc (&x)[N], int set, int warp, int my) {
        const smem_addr full = cvta_to_shared(&shared.full[set]);
        /* all blocks run and have initialised their mbarriers: the constructor arrived */
        if (round == 0) barrier_cluster_wait();
        if (threadIdx.x == 0) mbarrier_arrive_expect_tx(full, PLACES * 16);
        if (my < CLUSTER)
            st_async_128(mapa(cvta_to_shared(&shared.sent[set][rank * WARPS + warp]), my), x[0],
                         N > 1 ? x[N > 1 ? 1 : 0] : 0, N > 2 ? x[N > 2 ? 2 : 0] : 0,
                         N > 3 ? x[N > 3 ? 3 : 0] : 0, mapa(full, my));
        while (!mbarrier_try_wait_parity(full, round >> 1 & 1)) {
        }
    }
    /* Statistic n of warp i. */
    template <int N> __device__ __forceinline__ acc of_place(int set, int n, int i) const {
        if constexpr (CLUSTER == 1)
            return shared.place[set][n * PLACES + i];
        else
            return ((const float *)&shared.sent[set][i])[n];
    }

    /* Reduces N statistics over all threads of the row; `nothing` is op's identity. */
    template <int N, class Op>
    __device__ __forceinline__ void all(acc (&x)[N], Op op, acc nothing) {
        static_assert(N <= MOST, "more places");
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int bit = 1; bit < (LANES < 32 ? LANES : 32); bit *= 2)
                x[n] = op(x[n], __shfl_xor_sync(0xffffffffu, x[n], bit));
        if constexpr (!ALONE) {
            /* Two sets of places suffice. Before a warp writes a set again, it has waited for the
             * other set, which is complete only when all warps have read this one. */
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

/* V elements of a row that are loaded and stored by one instruction. */
template <class T, int V> struct alignas(V * sizeof(T)) RowSome {
    T v[V];
};

/* Stores 16 bytes at a time. The compiler splits an assignment into a store of each value as it
 * comes, to save registers. Every such store touches all sectors that the warp writes. */
template <class T, int V>
__device__ __forceinline__ void store_some(T *to, const RowSome<T, V> &x) {
    if constexpr (V * sizeof(T) % 16 == 0) {
#pragma unroll
        for (int k = 0; k < (int)(V * sizeof(T) / 16); ++k) {
            uint4 bits;
            memcpy(&bits, (const char *)&x + 16 * k, 16);
            st_global_128((char *)to + 16 * k, bits);
        }
    } else {
        *(RowSome<T, V> *)to = x;
    }
}

/* ---- rows of any length and alignment: a block loops over a row ------------------------------ */
constexpr int ROW_LOOPED_THREADS = 512;

inline unsigned row_blocks(int64_t rows) { return (unsigned)gk_min_i64(rows, 1 << 20); }

/* Sums N values over a block; every thread gets the sums. `place` has 32 N values. */
template <int N, class W> __device__ __forceinline__ void block_sum(W (&x)[N], W *place) {
    const int warp = threadIdx.x / 32, my = threadIdx.x % 32, warps = blockDim.x / 32;
    __syncthreads(); /* the previous reduction's places have been read */
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
/* X(lanes, items), fewest columns first; the first shape that holds a row serves it.
 * Short rows take a warp or less, so that no barrier is needed. Longer rows first take more
 * threads, then more vectors per thread, up to 512 threads of 4 vectors. An SM holds two such
 * blocks: one loads while the other stores. The last shape is for GPUs without clusters. float64
 * has no register kernels: its arithmetic, not memory, bounds it on most GPUs. */
#define GK_ROW_SHAPES(X) \
    X(16, 1) X(32, 1) X(32, 4) X(128, 2) X(256, 2) X(512, 2) X(512, 4) X(1024, 4)

/* Shapes whose flat form needs only 32 registers a thread, so that an SM is full of threads. */
template <class T, int LANES, int ITEMS, int CLUSTER>
constexpr bool ROW_FITS_32 = sizeof(T) == 2 && LANES >= 128 && ITEMS == 2 && CLUSTER == 1;
constexpr int ROW_SM_THREADS = 2048;

/* An instance's key. */
struct RowKey {
    enum {
        COLUMNS, /* that a group holds */
        ROWS,    /* of a block */
        CLUSTER, /* blocks of a cluster */
        ABOVE    /* rows of at most so many columns are served by other instances */
    };
};
#define GK_ROW_KEY(T, LANES, ITEMS, CLUSTER)                                                \
    {RowGroup<T, LANES, ITEMS, CLUSTER>::COLUMNS, RowGroup<T, LANES, ITEMS, CLUSTER>::ROWS, \
     CLUSTER, CLUSTER > 1 ? RowGroup<T, 512, (ITEMS < 4 ? ITEMS : 4), 1>::COLUMNS : 0}

/* True if every row of all tensors [..., N] consists of whole 16-byte vectors and starts at a
 * multiple of 16 bytes. N is tested in the first tensor's dtype. NULL tensors are skipped. */
template <class... More> inline bool rows_whole(const gk_tensor &first, More... more) {
    return first.shape[first.ndim - 1] % (16 / (int64_t)gk_dtype_bytes(first.dtype)) == 0 &&
           rows_aligned(first) && ((more == nullptr || rows_aligned(*more)) && ...);
}

/* rows_whole, and N is a length that the instance serves. */
template <class... More>
inline bool rows_fit(const gk_cuda_instance *instance, const gk_tensor &first, More... more) {
    const int64_t n = first.shape[first.ndim - 1];
    return n <= instance->key[RowKey::COLUMNS] && n > instance->key[RowKey::ABOVE] &&
           rows_whole(first, more...);
}

#endif
