/* SPDX-License-Identifier: BSD-3-Clause */
/* fwd_bias.cuh: the Weights policy of fwd_consumer.cuh for calls with a bias [.., Sq, Sk], in place
 * of PlainWeights (fwd_weights.cuh). The bias of a block lies in shared memory (load_bias in
 * fwd_masked.cuh). It becomes the addend of each exponent, bias log2(e) - m, while the products
 * run.
 *
 * The other biases need nothing here: a bias of keys is 16 additional columns of K, and S starts as
 * a bias by distance (fwd_stages.cuh). */
#ifndef GPUKERN_CUDA_FWD_BIAS_CUH
#define GPUKERN_CUDA_FWD_BIAS_CUH

#include "../../ptx/ldmatrix.cuh"
#include "../../ptx/opaque.cuh"
#include "../../tile/release_reads.cuh"
#include "fwd_masked.cuh"
#include "fwd_weights.cuh"

/* A bias of float16's lowest number hides a key. Its addend of -94502 makes the weight 0, unless
 * every key of the row is hidden in this way. In that case m is below LOWEST_BIAS, and note_spoilt
 * marks the tile, so that the row is computed again. */
constexpr float LOWEST_BIAS = -60000.f * LOG2_E;

template <class T, class Tile> struct BiasWeights {
    typedef Smem<Tile> S;
    static constexpr int N = Tile::BKV / 8;
    /* HIDES: a hidden key gets an addend of -inf. HIDES_SCORES: its score becomes -inf instead.
     * With steps of 128 keys and no mask, the second way would keep `columns` in registers across
     * the wait for the products, and spill. With steps of 64 keys, the first way spills. */
    static constexpr bool HIDES = !S::MASK && Tile::BKV == 128, HIDES_SCORES = !HIDES;

    int biases_taken = 0; /* the number of stages of the ring of biases that have been read */

    /* The addend of an exponent of 2: bias log2(e) - m. */
    static __device__ __forceinline__ float addend_of(float bias, float m) {
        return fmaf(bias, LOG2_E, -m);
    }
    /* Reads the bias of a block from shared memory and writes the addends to w. edge: some row does
     * not see all keys of the block. */
    template <class C>
    __device__ __forceinline__ void read_addends(C &c, const float (&m)[2], bool edge,
                                                 const KeptColumns &columns) {
        typedef typename S::Bias B;
        const int tid = mov_tid_x();
        const tma_steps<1> ring = {c.smem_s + S::BIAS_RING + 16 * c.warpgroup};
        const smem_addr first_s = c.smem_s + S::BIAS_AT + c.warpgroup * B::bytes +
                                  B::offset_of(tid % 128 / 32 * 16 + tid % 16, tid % 32 / 16 * 8);
        ring.wait_full(biases_taken);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            uint32_t four[4];
            ldmatrix_x4(four, B::along(first_s, n));
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float2 two = unpack2<T>(four[e]);
                c.w[4 * n + 2 * e] = addend_of(two.x, m[e & 1]);
                c.w[4 * n + 2 * e + 1] = addend_of(two.y, m[e & 1]);
            }
        }
        if (HIDES && edge) keep_columns(c.w, columns);
        release_reads(ring.empty(biases_taken));
        ++biases_taken;
    }

    /* Replaces the scores by exponents of 2, without m. */
    template <class C>
    __device__ __forceinline__ void finish_scores(C &c, bool edge, const KeptColumns &columns) {
        const float none[2] = {0, 0};
        read_addends(c, none, edge, columns);
#pragma unroll
        for (int i = 0; i < N * 4; ++i) c.s[i] = fmaf(c.s[i], c.x.units.unit_log2, c.w[i]);
    }
    template <class C> static __device__ __forceinline__ float unit(const C &) { return 1; }
    template <class C>
    __device__ __forceinline__ void begin(C &c, const FwdTile &, int, bool edge,
                                          const KeptColumns &columns) {
        read_addends(c, c.softmax.m, edge, columns);
    }
    template <class C>
    __device__ __forceinline__ void next(C &c, const FwdTile &, int, bool, const KeptColumns &) {
        c.softmax.weights_of([&](int i) { return fmaf(c.s[i], c.x.units.unit_log2, c.w[i]); }, c.w,
                             c.sum);
    }

    /* Reads two elements of the bias from global memory. read_again uses it for a block that is
     * computed again, because the block's stage has been released by then. */
    static __device__ __forceinline__ uint32_t bias_word(const FwdMaskedParams &x, const FwdTile &t,
                                                         int row, int col) {
        if (col >= t.seq.seq_k) return 0;
        return *(const uint32_t *)((const T *)x.bias.data + t.work.b * x.bias.batch +
                                   t.work.head * x.bias.head +
                                   min(row, t.seq.seq_q - 1) * x.bias.row + col);
    }
    template <class C>
    static __device__ __forceinline__ void read_again(C &c, const FwdTile &t, int j, bool edge) {
        int block = j;
        if constexpr (S::MASK) block = listed_keys<Tile>(c.x.mask, t, j);
        const int col = t.keys.lo + block * Tile::BKV + frag_col(mov_tid_x() % 32, 0),
                  row = t.work.i0 + own_row();
#pragma unroll
        for (int n = 0; n < N * 2; ++n) {
            const float2 v = unpack2<T>(bias_word(c.x, t, row + 8 * (n & 1), col + n / 2 * 8));
            c.s[2 * n] = fmaf(c.s[2 * n], c.x.units.unit_log2, addend_of(v.x, 0));
            c.s[2 * n + 1] = fmaf(c.s[2 * n + 1], c.x.units.unit_log2, addend_of(v.y, 0));
        }
        if (HIDES && edge) keep_columns(c.s, c.columns_of(t, j));
    }
    /* Rows that left the range get the weights that a first block would give. The reason: whether a
     * row's first keys are in the tile's first block depends on other rows' masks, and the bits of
     * a row must not. The other rows keep the weights of `next`, whose exponents are rounded in
     * another order. */
    template <class C>
    __device__ __forceinline__ void again(C &c, const FwdTile &t, int j, bool edge,
                                          float (&factor)[2]) {
        read_again(c, t, j, edge);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            opaque(c.sum[r]); /* otherwise take_block keeps its comparison in a register */
            const bool left =
                c.softmax.refer_row_again(r, c.softmax.row_top(c.s, 1, r), c.sum[r], factor[r]);
            const float m = c.softmax.m[r];
            float part[2] = {0, 0};
#pragma unroll
            for (int n = 0; n < N; ++n) {
                const int i = 4 * n + 2 * r;
                const float w0 = ex2_approx_ftz(c.s[i] - m), w1 = ex2_approx_ftz(c.s[i + 1] - m);
                part[0] += w0;
                part[1] += w1;
                if (C::OVERLAP) {
                    c.w[i] = left ? w0 : c.w[i];
                    c.w[i + 1] = left ? w1 : c.w[i + 1];
                } else {
                    c.p[i / 2] = left ? pack2<T>(w0, w1) : c.p[i / 2];
                }
            }
            c.sum[r] = left ? part[0] + part[1] : c.sum[r];
        }
    }
};

#endif
