/* SPDX-License-Identifier: BSD-3-Clause */
/* sample_tokens.cuh: draws one token from each row of logits, in one launch and without a sort.
 * gpukern_sample.h has the equations.
 *
 * sample_tokens.cu instantiates the kernel with one block a row, sample_tokens_sm90a.cu with a
 * cluster of 2, 4 or 8 blocks a row. sample_tokens_shared.cuh has the shared memory and what the
 * threads of a block compute together.
 *
 * Quantities. y is a logit after penalties. x = (y - max y) / temperature is at most 0. The weight
 * of a token is exp(x) as an integer below 2^44. The key of a token is -x, read as a 64-bit
 * integer: a larger key means a smaller x, hence a less likely token. Integer weights have the same
 * sum in any order. So the token of a row does not depend on the number of blocks that share the
 * row.
 *
 * Work split. Each block of a row owns an equal, contiguous part of it. The block reads its part
 * once from memory and a few times from L2:
 *
 *   1  Find the largest and the smallest y. Tokens with a count, a mark or a draft ("changed
 *      tokens") are few. Their y are stored in shared memory, so that later passes read only
 *      logits.
 *   2  If the call has top_k or top_p: build a histogram over the range of x. It has 2048 equal
 *      bins, each with the number and the sum of weights of its tokens.
 *   3  Find the key of the last token that top_k keeps, then of the last one that top_p keeps. The
 *      tokens of the bin that holds this token are copied to a list in shared memory, if they are
 *      at most LISTED. Further histograms narrow the range down to a single key. If top_k is at
 *      most LISTED, the list may hold every token that top_k keeps, and top_p reads only the list.
 *   4  Sum the weights of the kept tokens for each chunk of the part.
 *   5  Find the chunk that the random number hits, and the token in that chunk.
 *
 * Blocks of a cluster read each other's maxima, histograms, lists and sums from shared memory.
 *
 * Arithmetic. x and the weights are float64. A pass that looks for few tokens compares x in float32
 * first, because most tokens are far outside of the range. One exponential is a chain of 20
 * dependent operations, so a thread computes those of all elements of a vector side by side.
 *
 * Shared memory: struct Shared, 68 KiB, or 84 KiB in clusters. With penalties the changed tokens
 * follow: 20 bytes for each group of 128 tokens, and 8 bytes for each changed token, as far as
 * there is room. No workspace. */
#ifndef GPUKERN_CUDA_ROWS_SAMPLE_TOKENS_CUH
#define GPUKERN_CUDA_ROWS_SAMPLE_TOKENS_CUH

#include "sample_tokens_shared.cuh"

namespace {

/* ---- one row of logits, or a block's part of it ---------------------------------------------- */
__device__ __forceinline__ float wide(float x) { return x; }
__device__ __forceinline__ double wide(double x) { return x; }
__device__ __forceinline__ float wide(__half x) { return __half2float(x); }
__device__ __forceinline__ float wide(__nv_bfloat16 x) { return __bfloat162float(x); }

/* The vector type of BYTES (8 or 16) bytes. */
template <int BYTES> struct WordsOf {
    typedef uint4 type;
};
template <> struct WordsOf<8> {
    typedef uint2 type;
};
template <int BYTES> using BitsOf = typename WordsOf<BYTES>::type;

template <bool FIRST, class A, class B> struct Either {
    typedef A type;
};
template <class A, class B> struct Either<false, A, B> {
    typedef B type;
};

template <class T, bool PENALISED, bool CLUSTER, class S> struct Row {
    typedef decltype(wide(T())) Wide;
    static constexpr int VEC = sizeof(T) > 4 ? 2 : 4; /* elements of a load */
    static constexpr int VEC_BYTES = VEC * sizeof(T);
    /* Vectors that a thread loads ahead of use, to cover the latency of L2. With penalties there
     * are registers for only one. */
    static constexpr int AHEAD = PENALISED ? 1 : 3;
    static constexpr int LISTED = S::LISTED;

    const Params &p;
    S &s;
    int row;
    const T *logits;
    /* Number of vectors in the block's part. Element e of vector j is token j VEC + e - shift. */
    int vectors, shift;
    int end;  /* one past the block's last token */
    int turn; /* which of the two mailboxes exchange() uses next */

    __device__ Row(const Params &p, S &s, int row, int slot) : p(p), s(s), row(row), turn(0) {
        logits = (const T *)p.logits + row * p.row_stride;
        const int pad = (int)((uintptr_t)logits % VEC_BYTES / sizeof(T));
        const int all = (pad + p.v + VEC - 1) / VEC;
        int each = all, first = 0;
        if constexpr (CLUSTER) {
            each = (all + 32 * p.blocks - 1) / (32 * p.blocks) * 32;
            first = (int)cluster_ctarank() * each;
        }
        vectors = max(min(all - first, each), 0);
        shift = pad - first * VEC;
        end = min(vectors * VEC - shift, p.v);
        if constexpr (PENALISED) {
            if (threadIdx.x == 0) {
                s.slot = slot;
                s.presence = number_of(p.presence, row, 0);
                s.frequency = number_of(p.frequency, row, 0);
                s.repetition = number_of(p.repetition, row, 1);
                s.values = 0;
                s.listed_values = p.most_values;
            }
            const int d = threadIdx.x;
            if (d < DRAFTED && d < p.num_drafted) s.drafted[d] = load_drafted(d);
            __syncthreads();
        }
    }

    /* ---- loads ------------------------------------------------------------------------------- */
    /* A vector of 16-bit values is loaded as whole words. If the type were an array of 16-bit
     * values, the compiler would unpack them right after the load, and wait for it there. */
    union Words {
        BitsOf<VEC_BYTES> bits;
        T v[VEC];
        __device__ __forceinline__ Words() : bits() {}
    };
    struct Values {
        T v[VEC];
    };
    static constexpr bool WORDS = sizeof(T) == 2;
    typedef typename Either<WORDS, Words, Values>::type Vec;
    template <class E> struct alignas(VEC * sizeof(E)) Loaded {
        E v[VEC];
    };

    /* Loads a tensor's values of the tokens of vector j. `from` is the start of the row in that
     * tensor. Tokens outside the row are not read. aligned: the tensor's vectors start at multiples
     * of their size. */
    template <class E>
    __device__ __forceinline__ void load_into(E (&to)[VEC], const E *from, int j,
                                              bool aligned) const {
        const int first = j * VEC - shift;
        if (aligned && first >= 0 && first + VEC <= p.v) {
            const Loaded<E> all = *(const Loaded<E> *)(from + first);
#pragma unroll
            for (int e = 0; e < VEC; ++e) to[e] = all.v[e];
            return;
        }
#pragma unroll
        for (int e = 0; e < VEC; ++e)
            if (first + e >= 0 && first + e < p.v) to[e] = from[first + e];
    }

    __device__ __forceinline__ Vec load(int j) const {
        Vec x = {};
        if (j >= vectors) return x;
        if constexpr (WORDS) {
            const int first = j * VEC - shift;
            if (first >= 0 && first + VEC <= p.v) {
                x.bits = *(const BitsOf<VEC_BYTES> *)(logits + first);
                return x;
            }
        }
        load_into(x.v, logits, j, !WORDS);
        return x;
    }

    __device__ __forceinline__ int token_of(int j, int e) const { return j * VEC + e - shift; }

    /* True if `token` belongs to the block's part. The first and the last vector may also hold
     * tokens outside of it. */
    __device__ __forceinline__ bool there(int token) const { return token >= 0 && token < end; }

    /* Calls f(load(j), j) for every vector j of the block. All lanes of a warp take the same number
     * of steps, so f may use warp-wide operations.
     *
     * AHEAD vectors are in flight while f computes. Each has registers of its own: a copy from
     * register to register would wait for the load. */
    template <int AHEAD, class L, class F>
    __device__ __forceinline__ void each_by(const L &load, const F &f) const {
        decltype(load(0)) x[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) x[i] = load(i * THREADS + threadIdx.x);
#pragma unroll 1
        for (int first = threadIdx.x; first - (int)threadIdx.x < vectors;
             first += AHEAD * THREADS) {
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                const auto now = x[i];
                x[i] = load(first + (AHEAD + i) * THREADS);
                f(now, first + i * THREADS);
            }
        }
    }
    template <int AHEAD = Row::AHEAD, class F> __device__ __forceinline__ void each(F f) const {
        each_by<AHEAD>([&](int j) { return load(j); }, f);
    }

    /* ---- penalties --------------------------------------------------------------------------- */
    __device__ __forceinline__ int64_t load_drafted(int d) const {
        return integer_of(p.drafted, row * p.drafted.stride + d * p.drafted.last_stride);
    }
    __device__ __forceinline__ int64_t drafted(int d) const {
        return d < DRAFTED ? s.drafted[d] : load_drafted(d);
    }

    /* The three arrays of changed tokens, behind struct Shared. Their addresses are computed where
     * they are used, because there are no registers to keep them. */
    __device__ __forceinline__ uint4 *masks() const { return (uint4 *)(&s + 1); }
    __device__ __forceinline__ int *first_of_group() const { return (int *)(masks() + p.groups); }
    __device__ __forceinline__ double *values() const {
        return (double *)(first_of_group() + p.groups);
    }

    /* Returns y of a token, given its count and its prompt mark. The sum is 64 bits wide, because
     * count plus drafts may overflow an int. */
    __device__ __forceinline__ double penalised(Wide logit, int token, int count, bool mark) const {
        int64_t times = count;
#pragma unroll 1
        for (int d = 0; d < p.num_drafted; ++d) times += drafted(d) == token;
        return gk_sample_penalised((double)logit, times, mark, s.presence, s.frequency,
                                   s.repetition);
    }
    __device__ __forceinline__ double penalised(int token) const {
        const bool mark = p.prompt && p.prompt[s.slot * p.prompt_stride + token];
        return penalised(wide(logits[token]), token, p.counts[s.slot * p.counts_stride + token],
                         mark);
    }

    /* The tokens of one vector. y is rounded to the logits' precision if the token changed. In that
     * case `place` says where the exact y is stored. */
    struct Tokens {
        Wide y[VEC];
        int place[VEC]; /* index into values(); NONE: the token did not change, and y is exact */
        bool anew;      /* the group was FULL: the exact y must be computed again from memory */
    };

    /* Fills t with the tokens of vector j. All lanes of a warp call it, and their vectors belong to
     * one group. */
    __device__ __forceinline__ void tokens_of(const Vec &x, int j, Tokens &t) const {
#pragma unroll
        for (int e = 0; e < VEC; ++e) {
            t.y[e] = wide(x.v[e]);
            t.place[e] = NONE;
        }
        t.anew = false;
        if constexpr (PENALISED) {
            const int group = j / 32;
            if (32 * group >= vectors) return;
            int at = group < p.groups ? first_of_group()[group] : FULL;
            if (at == NONE) return;
            if (at == FULL) {
                t.anew = true;
#pragma unroll 1
                for (int e = 0; e < VEC; ++e) {
                    if (!there(token_of(j, e))) continue;
                    const Wide y = (Wide)penalised(token_of(j, e));
#pragma unroll
                    for (int i = 0; i < VEC; ++i) /* a variable index would put t.y on the stack */
                        if (i == e) t.y[i] = y;
                }
                return;
            }
            const uint4 mask = masks()[group];
            const unsigned words[4] = {mask.x, mask.y, mask.z, mask.w};
            const unsigned lane = threadIdx.x % 32;
#pragma unroll
            for (int e = 0; e < VEC; ++e) {
                if (words[e] >> lane & 1) {
                    t.place[e] = at + __popc(words[e] & ((1u << lane) - 1));
                    t.y[e] = (Wide)values()[t.place[e]];
                }
                at += __popc(words[e]);
            }
        }
    }

    /* Computes x of each token of vector j, in float64. */
    __device__ __forceinline__ void x_of(const Facts &f, const Tokens &t, int j,
                                         double (&x)[VEC]) const {
#pragma unroll
        for (int e = 0; e < VEC; ++e) {
            double y = (double)t.y[e];
            if (PENALISED && sizeof(T) <= 4 && t.place[e] >= 0) y = values()[t.place[e]];
            x[e] = GK_MUL(GK_ADD(y, -f.largest), f.inverse);
        }
        if (PENALISED && sizeof(T) <= 4 && t.anew) {
#pragma unroll 1
            for (int e = 0; e < VEC; ++e) {
                if (!there(token_of(j, e))) continue;
                const double y = penalised(token_of(j, e));
#pragma unroll
                for (int i = 0; i < VEC; ++i)
                    if (i == e) x[i] = GK_MUL(GK_ADD(y, -f.largest), f.inverse);
            }
        }
    }

    /* A range of x in float32, widened by the rounding error of float32. Tokens outside of it need
     * no arithmetic in float64. */
    struct Near {
        float from, to;
    };
    __device__ __forceinline__ Near near_keys(const Facts &f, int64_t low, int64_t high) const {
        if (sizeof(T) > 4 || !f.in_float) return {-INFINITY, INFINITY};
        /* NO_KEY has the bits of a NaN, which fmax ignores */
        const double from = fmax(-__longlong_as_double(high), f.lowest);
        return {(float)from - MARGIN, (float)-__longlong_as_double(low) + MARGIN};
    }
    __device__ __forceinline__ bool is_far(const Facts &f, Wide y, const Near &near) const {
        if constexpr (sizeof(T) > 4) return false;
        const float x = ((float)y - f.largest32) * f.inverse32;
        return x < near.from || x > near.to;
    }

    /* ---- 1: the largest y -------------------------------------------------------------------- */
    /* True if y of token i comes before `than` of token `other`. NaN counts as larger than any
     * number. Of equal values the lower token wins. */
    template <class Y> static __device__ __forceinline__ bool beats(Y y, int i, Y than, int other) {
        if (y != y) return than == than || i < other;
        return y > than || (y == than && i < other);
    }

    /* The best token so far. low: the smallest finite y. */
    template <class Y> struct Best {
        Y top = -(Y)INFINITY, low = (Y)INFINITY;
        int at = INT32_MAX;
        __device__ __forceinline__ void see(Y y, int token) {
            if (beats(y, token, top, at)) {
                top = y;
                at = token;
            }
            if (y < low && y > -(Y)INFINITY) low = y;
        }
    };

    /* Pass 1 with penalties. Reads logits, counts and marks once, and stores the changed tokens in
     * shared memory. */
    __device__ __forceinline__ Best<double> best_penalised() {
        struct Counted {
            Vec logits;
            int count[VEC] = {};
            uint32_t marks = 0; /* a byte for each element */
        };
        const int32_t *counts = p.counts + s.slot * p.counts_stride;
        const uint8_t *prompt = p.prompt ? p.prompt + s.slot * p.prompt_stride : NULL;
        const bool counts_aligned = (uintptr_t)(counts - shift) % (4 * VEC) == 0;
        const bool prompt_aligned = (uintptr_t)(prompt - shift) % VEC == 0;
        const auto load_counted = [&](int j) {
            Counted x = {};
            if (j >= vectors) return x;
            x.logits = load(j);
            load_into(x.count, counts, j, counts_aligned);
            if (!prompt) return x;
            const int first = token_of(j, 0);
            if (prompt_aligned && first >= 0 && first + VEC <= p.v) {
                if constexpr (VEC == 2)
                    x.marks = *(const uint16_t *)(prompt + first);
                else
                    x.marks = *(const uint32_t *)(prompt + first);
                return x;
            }
#pragma unroll
            for (int e = 0; e < VEC; ++e)
                if (there(first + e)) x.marks |= (uint32_t)prompt[first + e] << 8 * e;
            return x;
        };
        /* a penalty that is not finite changes every token, because 0 times infinity is NaN */
        const bool change_all = !isfinite(s.presence) || !isfinite(s.frequency);
        const int lane = threadIdx.x % 32;
        /* The first 32 drafts, one in each lane. A lane without a draft has -1, which is no token.
         */
        int draft = -1;
        if (lane < p.num_drafted) {
            const int64_t d = integer_of(p.drafted, row * p.drafted.stride +
                                                        (int64_t)lane * p.drafted.last_stride);
            draft = d >= 0 && d < p.v ? (int)d : -1;
        }
        Best<Wide> plain;
        Best<double> other;
        const auto see = [&](const Counted &now, int j) {
            const int group = j / 32;
            bool differs[VEC];
#pragma unroll
            for (int e = 0; e < VEC; ++e)
                differs[e] = there(token_of(j, e)) &&
                             (now.count[e] != 0 || now.marks >> 8 * e & 255 || change_all);
            const unsigned in_group = (unsigned)(draft - token_of(32 * group, 0));
            if (p.num_drafted > 32 ||
                __any_sync(ALL, draft >= 0 && in_group < (unsigned)(32 * VEC))) {
#pragma unroll 1
                for (int d = 0; d < p.num_drafted; ++d) {
                    const int64_t token = drafted(d);
#pragma unroll
                    for (int e = 0; e < VEC; ++e)
                        if (token == token_of(j, e) && there(token_of(j, e))) differs[e] = true;
                }
            }
            unsigned words[4] = {}, mine = 0;
            int num = 0;
#pragma unroll
            for (int e = 0; e < VEC; ++e) {
                words[e] = __ballot_sync(ALL, differs[e]);
                mine |= (unsigned)differs[e] << e;
                num += __popc(words[e]);
            }
            int at = NONE;
            if (num) {
                at = FULL;
                if (group < p.groups) {
                    if (lane == 0) at = atomicAdd(&s.values, num);
                    at = __shfl_sync(ALL, at, 0);
                    if (at + num > p.most_values) {
                        if (lane == 0) atomicMin(&s.listed_values, at);
                        at = FULL;
                    }
                }
            }
            if (lane == 0 && group < p.groups) {
                first_of_group()[group] = at;
                masks()[group] = make_uint4(words[0], words[1], words[2], words[3]);
            }
            if (at == FULL) {
#pragma unroll 1
                for (int e = 0; e < VEC; ++e)
                    if (mine >> e & 1) other.see(penalised(token_of(j, e)), token_of(j, e));
            } else if (num) {
#pragma unroll
                /* Stores the token for now. The loop behind the barrier replaces it by y. */
                for (int e = 0; e < VEC; ++e) {
                    if (differs[e])
                        values()[at + __popc(words[e] & ((1u << lane) - 1))] =
                            __longlong_as_double(token_of(j, e));
                    at += __popc(words[e]);
                }
            }
#pragma unroll
            for (int e = 0; e < VEC; ++e)
                if (there(token_of(j, e)) && !differs[e])
                    plain.see(wide(now.logits.v[e]), token_of(j, e));
        };
        each_by<2>(load_counted, see);
        __syncthreads();
        const int listed = min(s.values, s.listed_values);
        for (int i = threadIdx.x; i < listed; i += THREADS) {
            const int token = (int)__double_as_longlong(values()[i]);
            const double y = penalised(token);
            values()[i] = y;
            other.see(y, token);
        }
        if (beats((double)plain.top, plain.at, other.top, other.at)) {
            other.top = plain.top;
            other.at = plain.at;
        }
        other.low = fmin(other.low, (double)plain.low);
        return other;
    }

    __device__ __forceinline__ Best<Wide> best_plain() const {
        Best<Wide> best;
        each<6>([&](const Vec &x, int j) {
#pragma unroll
            for (int e = 0; e < VEC; ++e)
                if (there(token_of(j, e))) best.see(wide(x.v[e]), token_of(j, e));
        });
        return best;
    }

    /* Pass 1. Returns the token with the largest y, and that y in `largest`. range: largest minus
     * the smallest finite y. */
    __device__ __forceinline__ int best(double &largest, double &range) {
        Best<double> b;
        if constexpr (PENALISED) {
            b = best_penalised();
        } else {
            const Best<Wide> found = best_plain();
            b.top = found.top;
            b.low = found.low;
            b.at = found.at;
        }
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int d = 16; d > 0; d /= 2) {
                const double other = __shfl_xor_sync(ALL, b.top, d);
                const int other_at = __shfl_xor_sync(ALL, b.at, d);
                if (beats(other, other_at, b.top, b.at)) {
                    b.top = other;
                    b.at = other_at;
                }
                b.low = fmin(b.low, __shfl_xor_sync(ALL, b.low, d));
            }
            if (half) break;
            if (lane == 0) {
                s.real[warp] = b.top;
                s.narrow[warp] = b.at;
                s.wide[warp] = __double_as_longlong(b.low);
            }
            __syncthreads();
            b.top = s.real[lane % WARPS];
            b.at = s.narrow[lane % WARPS];
            b.low = __longlong_as_double(s.wide[lane % WARPS]);
        }
        const Mail own = {{__double_as_longlong(b.top), b.at, __double_as_longlong(b.low), 0}};
        exchange<CLUSTER>(s, p.blocks, turn, own, [&](int, const Mail &m) {
            const double top = __longlong_as_double(m.word[0]);
            if (beats(top, (int)m.word[1], b.top, b.at)) {
                b.top = top;
                b.at = (int)m.word[1];
            }
            b.low = fmin(b.low, __longlong_as_double(m.word[2]));
        });
        largest = b.top;
        range = b.top - b.low;
        return b.at;
    }

    /* ---- 2: the first histogram -------------------------------------------------------------- */
    template <bool WEIGHTS> __device__ __forceinline__ void count_all() {
        clear(s.all);
        const Facts f = s.facts;
        const Near near = near_keys(f, 0, NO_KEY);
        each([&](const Vec &raw, int j) {
            Tokens t;
            tokens_of(raw, j, t);
            bool has[VEC], any = false;
#pragma unroll
            for (int e = 0; e < VEC; ++e) {
                has[e] = there(token_of(j, e)) && !is_far(f, t.y[e], near);
                any = any || has[e];
            }
            if (!__any_sync(ALL, any)) return;
            double all_x[VEC];
            x_of(f, t, j, all_x);
            /* with penalties, registers suffice for two exponentials side by side */
            constexpr int SIDE = PENALISED ? 2 : VEC;
#pragma unroll
            for (int first = 0; first < VEC; first += SIDE) {
                bool counted[SIDE];
                int bin[SIDE];
                int64_t weight[SIDE];
#pragma unroll
                for (int e = 0; e < SIDE; ++e) {
                    counted[e] = has[first + e] && all_x[first + e] >= GK_SAMPLE_LEAST;
                    const double x = counted[e] ? all_x[first + e] : 0;
                    bin[e] = min((int)(-x * f.bins), BINS - 1);
                    weight[e] = 0;
                    if (WEIGHTS || f.least > 0) {
                        const double exp = gk_sample_exp(x, s.table);
                        counted[e] = counted[e] && exp >= f.least;
                        weight[e] = gk_sample_round(exp);
                    }
                }
                add_of_warp<WEIGHTS>(s.all, counted, bin, weight);
            }
        });
    }

    /* ---- 3: the key of the last token that stays --------------------------------------------- */
    /* Calls call(key) for each token of the block that has a weight and a key in [low, high]. */
    template <class F>
    __device__ __forceinline__ void each_between(int64_t low, int64_t high, F call) const {
        const Facts f = s.facts;
        const Near near = near_keys(f, low, high);
        each([&](const Vec &raw, int j) {
            Tokens t;
            tokens_of(raw, j, t);
            bool has[VEC], any = false;
#pragma unroll
            for (int e = 0; e < VEC; ++e) {
                has[e] = there(token_of(j, e)) && !is_far(f, t.y[e], near);
                any = any || has[e];
            }
            if (!any) return;
            double all_x[VEC];
            x_of(f, t, j, all_x);
#pragma unroll
            for (int e = 0; e < VEC; ++e) {
                if (!has[e]) continue;
                const double x = all_x[e];
                if (!(x >= GK_SAMPLE_LEAST)) continue;
                const int64_t key = __double_as_longlong(x) & INT64_MAX;
                if (key < low || key > high) continue;
                if (f.least > 0 && !(gk_sample_exp(x, s.table) >= f.least)) continue;
                call(key);
            }
        });
    }

    __device__ __forceinline__ int64_t weight_of(int64_t key) const {
        return gk_sample_round(gk_sample_exp(-__longlong_as_double(key), s.table));
    }

    /* Calls f(key) for each token whose key is in the range s.chosen. listed: reads the list, which
     * holds tokens of all blocks. Otherwise it reads the block's part of the row. */
    template <class F> __device__ __forceinline__ void each_chosen(bool listed, F f) const {
        const int64_t low = s.chosen.low, high = s.chosen.high;
        if (!listed) {
            each_between(low, high, f);
            return;
        }
        for (int i = threadIdx.x; i < s.in_list; i += THREADS)
            if (s.list[i] >= low && s.list[i] <= high) f(s.list[i]);
    }

    /* Sets the range s.chosen to [low, high], in thread 0. */
    __device__ __forceinline__ void set_keys(int64_t low, int64_t high) const {
        __syncthreads();
        if (threadIdx.x == 0) {
            s.chosen.low = low;
            s.chosen.high = high;
        }
        __syncthreads();
    }

    /* Stores the keys in [low, high] of the whole row in the list of every block. Returns their
     * number, which the caller knows to be at most LISTED. bin: the histogram bin that the list now
     * stands for, or -1. */
    __device__ __forceinline__ int collect(int64_t low, int64_t high, int bin) {
        __syncthreads();
        if (threadIdx.x == 0) {
            s.in_list = 0;
            s.listed = bin;
        }
        __syncthreads();
        each_between(low, high, [&](int64_t key) { s.list[atomicAdd(&s.in_list, 1)] = key; });
        __syncthreads();
        if constexpr (CLUSTER) {
            const int own = s.in_list, rank = (int)cluster_ctarank();
            int all = own;
            /* each block appends the keys of the other blocks to its own */
            exchange<CLUSTER>(s, p.blocks, turn, Mail{{own, 0, 0, 0}}, [&](int r, const Mail &m) {
                if (r == rank) return;
                const int num = (int)m.word[0];
                for (int i = 2 * threadIdx.x; i < num; i += 2 * THREADS) {
                    const uint4 two = of_peer(&s.list[i], r);
                    s.list[all + i] = word_of(two.x, two.y);
                    if (i + 1 < num) s.list[all + i + 1] = word_of(two.z, two.w);
                }
                all += num;
            });
            if (threadIdx.x == 0) s.in_list = all;
            sync_row<CLUSTER>(); /* the other blocks have read this block's list */
        }
        return s.in_list;
    }

    /* Narrows the range s.chosen to the single key of the last kept token, and stores the bound in
     * s.keep.
     *
     * A token is kept if fewer than s.most tokens come before it, and if the weights of those
     * before it sum to less than s.share. The first token is always kept. Each round builds a
     * histogram of the range and continues with one of its 2048 bins. */
    __device__ __forceinline__ void narrow(bool listed) {
        for (;;) {
            int64_t low = NO_KEY, high = 0;
            each_chosen(listed, [&](int64_t key) {
                low = lower(low, key);
                high = -lower(-high, -key);
            });
            range(s, low, high);
            if (CLUSTER && !listed)
                exchange<CLUSTER>(s, p.blocks, turn, Mail{{low, high, 0, 0}},
                                  [&](int, const Mail &m) {
                                      low = lower(low, m.word[0]);
                                      high = -lower(-high, -m.word[1]);
                                  });
            set_keys(low, high);
            if (low == high) break;
            const int bits = 64 - __clzll(high - low), shift = max(bits - 11, 0);
            clear(s.part);
            each_chosen(listed, [&](int64_t key) {
                add(s.part, (int)((key - low) >> shift), 1, weight_of(key));
            });
            if (listed)
                choose<false>(s, s.part, 1);
            else
                choose<CLUSTER>(s, s.part, p.blocks);
            low += (int64_t)s.chosen.bin << shift;
            set_keys(low, low + ((int64_t)1 << shift) - 1);
        }
        if (threadIdx.x == 0) {
            /* All tokens of the range now have the same key. Find by bisection how many of them are
             * kept. The token at index i is kept if the weights before it sum to less than s.share.
             */
            const Group c = s.chosen;
            const int64_t each_weight = weight_of(c.low);
            int room = 1, most_room = min(c.count, s.most - c.before);
            while (room < most_room) {
                const int middle = room + (most_room - room + 1) / 2;
                if ((double)(c.before_sum + (middle - 1) * each_weight) < s.share)
                    room = middle;
                else
                    most_room = middle - 1;
            }
            s.keep = {c.low, c.before_sum + room * each_weight, room};
        }
        __syncthreads();
    }

    /* Returns the sum of the first histogram's weights over all blocks. */
    __device__ __forceinline__ int64_t sum_of_all() {
        __syncthreads();
        int64_t sum = 0, total;
        for (int i = threadIdx.x; i < BINS; i += THREADS)
            sum += word_of(s.all.low[i], s.all.high[i]);
        int none = 0, nothing;
        scan(s, none, sum, nothing, total);
        sum = 0;
        exchange<CLUSTER>(s, p.blocks, turn, Mail{{total, 0, 0, 0}},
                          [&](int, const Mail &m) { sum += m.word[0]; });
        return sum;
    }

    /* Reduces the list to the tokens that top_k keeps, and returns the sum of their weights. whole:
     * the list already holds all of these tokens, and some more. */
    __device__ __forceinline__ int64_t list_kept(bool whole) {
        const int64_t last = s.keep.last;
        const int room = s.keep.room;
        if (whole) {
            if (threadIdx.x == 0) s.equal_before = 0;
            __syncthreads();
            for (int i = threadIdx.x; i < s.in_list; i += THREADS) {
                const int64_t key = s.list[i];
                if (key > last || (key == last && atomicAdd(&s.equal_before, 1) >= room))
                    s.list[i] = NO_KEY;
            }
        } else {
            const int before = collect(0, last - 1, -1);
            __syncthreads();
            for (int i = threadIdx.x; i < room; i += THREADS) s.list[before + i] = last;
            if (threadIdx.x == 0) s.in_list = before + room;
        }
        __syncthreads();
        int64_t sum = 0, total;
        for (int i = threadIdx.x; i < s.in_list; i += THREADS)
            if (s.list[i] != NO_KEY) sum += weight_of(s.list[i]);
        int none = 0, nothing;
        scan(s, none, sum, nothing, total);
        return total;
    }

    /* Pass 3. Stores in s.keep the bound of the tokens that are left after top_k and then top_p.
     * The loop runs once for top_k, which bounds the number, and once for top_p, which bounds the
     * sum of weights. few: top_k is at most LISTED, so top_p works on the list. */
    __device__ __forceinline__ void bound(int most, bool few) {
#pragma unroll 1
        for (int by_sum = most == INT32_MAX; by_sum < 2; ++by_sum) {
            bool listed = true;
            double share = INFINITY;
            if (by_sum) {
                const double top_p = number_of(p.top_p, row, 1);
                if (!(top_p < 1)) break;
                const int64_t total = few                 ? list_kept(s.whole)
                                      : most == INT32_MAX ? sum_of_all()
                                                          : s.keep.total;
                share = GK_MUL(top_p, (double)total);
            }
            __syncthreads();
            if (threadIdx.x == 0) {
                s.chosen = {0, s.keep.last, 0, 0, s.in_list, 0};
                s.most = by_sum && few ? INT32_MAX : most;
                s.share = share;
            }
            __syncthreads();
            if (!(by_sum && few)) {
                choose<CLUSTER>(s, s.all, p.blocks);
                const int bin = s.bin;
                if (bin < 0) break; /* no token has a weight, so s.keep stays without a bound */
                const double bins = s.facts.bins;
                const int64_t low = __double_as_longlong(bin / bins);
                const int64_t high =
                    bin == BINS - 1 ? NO_KEY : __double_as_longlong((bin + 1) / bins) - 1;
                set_keys(low, high);
                const int count = s.chosen.count;
                const bool whole = few && s.chosen.before + count <= LISTED;
                if (threadIdx.x == 0) s.whole = whole;
                listed = s.listed == bin || count <= LISTED;
                if (listed && s.listed != bin) collect(whole ? 0 : low, high, bin);
            }
            narrow(listed);
        }
    }

    /* ---- 4 and 5: the draw ------------------------------------------------------------------- */
    /* Computes the weights of vector j's tokens whose keys are below the bound's key. Returns one
     * bit for each token whose key equals it. Only the first keep.room tokens with this key are
     * kept, which the caller counts. All lanes of a warp call it. */
    __device__ __forceinline__ unsigned kept(const Facts &f, const Bound &keep, const Near &near,
                                             const Vec &raw, int j, int64_t (&weight)[VEC]) const {
        Tokens t;
        tokens_of(raw, j, t);
        bool has[VEC], any = false;
#pragma unroll
        for (int e = 0; e < VEC; ++e) {
            has[e] = there(token_of(j, e)) && !is_far(f, t.y[e], near);
            any = any || has[e];
            weight[e] = 0;
        }
        unsigned equal = 0;
        if (!__any_sync(ALL, any)) return equal;
        double all_x[VEC];
        x_of(f, t, j, all_x);
#pragma unroll
        for (int e = 0; e < VEC; ++e) {
            const int64_t key = __double_as_longlong(all_x[e]) & INT64_MAX;
            has[e] = has[e] && all_x[e] >= GK_SAMPLE_LEAST && key <= keep.last;
            const double x = has[e] ? all_x[e] : 0;
            const double exp = gk_sample_exp(x, s.table);
            has[e] = has[e] && exp >= f.least;
            equal |= (unsigned)(has[e] && key == keep.last) << e;
            weight[e] = has[e] && key != keep.last ? gk_sample_round(exp) : 0;
        }
        return equal;
    }

    /* Passes 4 and 5. Returns the drawn token, or -1 if it is in another block's part. */
    __device__ __forceinline__ int draw() {
        const Bound keep = s.keep;
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const int rank = CLUSTER ? (int)cluster_ctarank() : 0;
        /* A chunk is each_lane vectors of each lane of one warp. */
        const int most = 32 * MOST_CHUNKS;
        const int each_lane = max((vectors + most - 1) / most, 1);
        const int chunks = (vectors + 32 * each_lane - 1) / (32 * each_lane);
        const int64_t each_weight = keep.last == NO_KEY ? 0 : weight_of(keep.last);
        const Facts f = s.facts;
        const Near near = near_keys(f, 0, keep.last);
        __syncthreads(); /* all threads have read s.part, which s.chunks overlays */
        {
            /* Step i of chunk c is computed now. Step next_i of chunk next_c is loaded next. */
            int c = warp, i = 0, next_c = warp, next_i = 0;
            const auto load_next = [&]() {
                const int j = (next_c * each_lane + next_i) * 32 + lane;
                const Vec x = WORDS             ? load(next_c < chunks ? j : INT32_MAX)
                              : next_c < chunks ? load(j)
                                                : Vec{};
                if (++next_i == each_lane) {
                    next_i = 0;
                    next_c += WARPS;
                }
                return x;
            };
            int64_t sum = 0;
            int equals = 0;
            Vec x[AHEAD];
#pragma unroll
            for (int u = 0; u < AHEAD; ++u) x[u] = load_next();
#pragma unroll 1
            while (c < chunks) {
#pragma unroll
                for (int u = 0; u < AHEAD; ++u) {
                    if (c >= chunks) break;
                    const Vec now = x[u];
                    x[u] = load_next();
                    int64_t weight[VEC];
                    equals +=
                        __popc(kept(f, keep, near, now, (c * each_lane + i) * 32 + lane, weight));
#pragma unroll
                    for (int e = 0; e < VEC; ++e) sum += weight[e];
                    if (++i < each_lane) continue;
#pragma unroll
                    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(ALL, sum, d);
                    equals = __reduce_add_sync(ALL, equals);
                    if (lane == 0) {
                        s.chunks.sum[c] = sum;
                        s.chunks.equal[c] = equals;
                    }
                    sum = 0;
                    equals = 0;
                    i = 0;
                    c += WARPS;
                }
            }
        }
        __syncthreads();
        const bool has_chunk = (int)threadIdx.x < chunks;
        const int equal = has_chunk ? s.chunks.equal[threadIdx.x] : 0;
        int equal_before = equal, all;
        int64_t unused = 0, none;
        scan(s, equal_before, unused, all, none);
        if (keep.last != NO_KEY)
            exchange<CLUSTER>(s, p.blocks, turn, Mail{{all, 0, 0, 0}}, [&](int r, const Mail &m) {
                if (r < rank) equal_before += (int)m.word[0];
            });
        const int stay = max(min(equal, keep.room - equal_before), 0);
        const int64_t own = (has_chunk ? s.chunks.sum[threadIdx.x] : 0) + stay * each_weight;
        int64_t before = own, part, total = 0, part_before = 0;
        int zero = 0;
        scan(s, zero, before, all, part);
        exchange<CLUSTER>(s, p.blocks, turn, Mail{{part, 0, 0, 0}}, [&](int r, const Mail &m) {
            if (r < rank) part_before += m.word[0];
            total += m.word[0];
        });
        if (total == 0) return s.most_likely;
        const double at = GK_MUL(number_of(p.number, row, 0), (double)total);
        int64_t place = at > 0 ? (at < (double)total ? (int64_t)at : total - 1) : 0;
        /* now counted from the start of the block's part */
        place = lower(place, total - 1) - part_before;
        if (place < 0 || place >= part) return -1;
        if (before <= place && place < before + own) {
            s.bin = threadIdx.x;
            s.place = place - before; /* counted from the start of the chunk */
            s.equal_before = equal_before;
        }
        __syncthreads();
        place = s.place;
        equal_before = s.equal_before;
        /* Every warp searches the chunk, so that all threads return the token. */
        for (int i = 0; i < each_lane; ++i) {
            const int j = (s.bin * each_lane + i) * 32 + lane;
            const Vec x = load(j);
            int64_t weight[VEC], sum = 0;
            const unsigned is_equal = kept(f, keep, near, x, j, weight);
            const int equals = __popc(is_equal);
            int equal_upto = equals;
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                const int n = __shfl_up_sync(ALL, equal_upto, d);
                if (lane >= d) equal_upto += n;
            }
            const int in_warp = __shfl_sync(ALL, equal_upto, 31);
            int place_of_equal = equal_before + equal_upto - equals;
#pragma unroll
            for (int e = 0; e < VEC; ++e) {
                if (is_equal >> e & 1) weight[e] = place_of_equal++ < keep.room ? each_weight : 0;
                sum += weight[e];
            }
            int64_t upto = sum;
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                const int64_t w = __shfl_up_sync(ALL, upto, d);
                if (lane >= d) upto += w;
            }
            const unsigned hit = __ballot_sync(ALL, upto > place);
            if (hit) {
                int passed = 0; /* how many of this lane's tokens end at or before `place` */
                upto -= sum;
#pragma unroll
                for (int e = 0; e < VEC; ++e) {
                    upto += weight[e];
                    passed += upto <= place;
                }
                return __shfl_sync(ALL, token_of(j, passed), __ffs(hit) - 1);
            }
            place -= __shfl_sync(ALL, upto, 31);
            equal_before += in_warp;
        }
        return s.most_likely; /* not reached */
    }

    /* Returns the row's token, or -1 if another block has it. */
    __device__ __forceinline__ int token() {
        double largest, range;
        const int most_likely = best(largest, range); /* read from s.most_likely from here on */
        const double temperature = number_of(p.temperature, row, 0);
        if (!(temperature > 0) || !isfinite(largest)) return most_likely;
        if (threadIdx.x == 0) {
            Facts f;
            f.largest = largest;
            f.inverse = GK_DIV(1.0, temperature);
            const double min_p = number_of(p.min_p, row, 0);
            f.least = GK_MUL(min_p, GK_SAMPLE_ONE);
            /* log of a negative number or of NaN is NaN, which fmax ignores */
            f.lowest = fmax(p.min_p.data ? log(min_p) : GK_SAMPLE_LEAST, GK_SAMPLE_LEAST);
            f.largest32 = (float)largest;
            f.inverse32 = (float)f.inverse;
            f.in_float =
                fabs(largest) < 1e30 && range < 1e30 && f.inverse > 1e-30 && f.inverse < 1e30;
            if (PENALISED) /* changed tokens have a y that is rounded to float32 here */
                f.in_float = f.in_float && fabs(largest) * f.inverse < 100;
            /* Choose bins so that range / temperature < 2^k is cut into 2048 bins. Only x down to
             * GK_SAMPLE_LEAST have a weight, so k is at most 5. */
            const double spread = fmin(range * f.inverse, -GK_SAMPLE_LEAST);
            const int k = max((int)(__double_as_longlong(spread) >> 52) - 1022, -40);
            f.bins = __longlong_as_double((int64_t)(1023 + 11 - k) << 52);
            s.facts = f;
            s.most_likely = most_likely;
            s.keep = {NO_KEY, 0, 0};
        }
        __syncthreads();
        const int64_t top_k = p.top_k.data ? integer_of(p.top_k, row * p.top_k.stride) : 0;
        const double top_p = number_of(p.top_p, row, 1);
        const bool by_count = top_k > 0 && top_k < p.v, by_sum = top_p < 1;
        if (by_count || by_sum) {
            const int most = by_count ? (int)top_k : INT32_MAX;
            const bool few = most <= LISTED;
            if (few)
                count_all<false>();
            else
                count_all<true>();
            bound(most, few);
        }
        return draw();
    }
};

/* ---- the kernel ------------------------------------------------------------------------------ */
/* The template argument is the number of keys in the list. Without clusters it is 2048, because
 * some GPUs have only 99 KiB of shared memory a block, and the changed tokens need a part of that.
 */
template <bool CLUSTER> using SharedOf = Shared<CLUSTER ? 4096 : 2048>;

template <class T, bool CLUSTER>
__global__ void __launch_bounds__(THREADS, 1) sample_tokens_kernel(Params p) {
    extern __shared__ __align__(16) char memory[];
    typedef SharedOf<CLUSTER> S;
    S &s = *(S *)memory;
    if (threadIdx.x < 32) s.table[threadIdx.x] = powers[threadIdx.x];
    if (threadIdx.x == 0) s.listed = -1;
    __syncthreads();
    const int row = CLUSTER ? blockIdx.x / p.blocks : blockIdx.x;
    int64_t slot = p.slots.data ? integer_of(p.slots, row * p.slots.stride) : -1;
    if (slot >= p.num_slots) {
        if (threadIdx.x == 0) report(p.error_word, GK_BAD_COUNT_SLOTS);
        slot = -1;
    }
    const int token = slot < 0 ? Row<T, false, CLUSTER, S>(p, s, row, -1).token()
                               : Row<T, true, CLUSTER, S>(p, s, row, (int)slot).token();
    if (threadIdx.x == 0 && token >= 0) p.out[row] = token;
    /* other blocks may still read this block's shared memory */
    if constexpr (CLUSTER) barrier_cluster_ordered();
}

/* ---- plan and run ---------------------------------------------------------------------------- */
Numbers numbers_of(const gk_tensor *t) {
    return t ? Numbers{t->data, t->stride[0], t->dtype == GK_F64} : Numbers{};
}
Integers integers_of(const gk_tensor *t) {
    if (!t) return {};
    return {t->data, t->stride[0], t->ndim > 1 ? t->stride[1] : 0, t->dtype == GK_I64};
}

/* Chooses the number of blocks a row that minimises the waves, each weighted by the length of a
 * part. An SM holds one block. Clusters of 4 or 8 may leave an eighth of the SMs idle, because a
 * cluster must fit into one GPC. */
int blocks_of_row(const gk_context *ctx, int64_t rows, int64_t v) {
    const int sms = gk_gpu_of(ctx->index)->num_sms;
    int best = 1;
    double best_time = (double)gk_ceil_div(rows, sms);
    for (int blocks = 2; blocks <= 8 && v >= 2048 * blocks; blocks *= 2) {
        const int64_t clusters = gk_max_i64(1, blocks == 2 ? sms / 2 : sms * 7 / 8 / blocks);
        const double time = (double)gk_ceil_div(rows, clusters) * (1.0 / blocks + 0.05);
        if (time < best_time) {
            best = blocks;
            best_time = time;
        }
    }
    return best;
}

template <class T, bool CLUSTER>
gk_status run(const gk_context *ctx, const void *args, const gk_plan *, void *) {
    const gk_sample_tokens_args *a = (const gk_sample_tokens_args *)args;
    Params p = {};
    p.logits = a->logits.data;
    p.row_stride = a->logits.stride[0];
    p.v = (int)a->logits.shape[1];
    p.temperature = numbers_of(&a->temperature);
    p.number = numbers_of(&a->number);
    p.top_p = numbers_of(a->top_p);
    p.min_p = numbers_of(a->min_p);
    p.presence = numbers_of(a->presence);
    p.frequency = numbers_of(a->frequency);
    p.repetition = numbers_of(a->repetition);
    p.top_k = integers_of(a->top_k);
    p.slots = integers_of(a->slots);
    p.drafted = integers_of(a->drafted);
    p.num_drafted = a->drafted ? (int)a->drafted->shape[1] : 0;
    p.out = (int64_t *)a->out.data;
    p.error_word = ctx->error_word;
    const int64_t rows = a->logits.shape[0];
    p.blocks = CLUSTER ? blocks_of_row(ctx, rows, p.v) : 1;
    int64_t smem = sizeof(SharedOf<CLUSTER>);
    if (a->counts) {
        p.counts = (const int32_t *)a->counts->data;
        p.counts_stride = a->counts->stride[0];
        p.num_slots = a->counts->shape[0];
        /* Reserve a mask and a first index for each group, as far as 12 bytes of values remain for
         * each group. A part has one more vector than its tokens need, because the first vector may
         * start before the row. */
        const int64_t in_vector = sizeof(T) > 4 ? 2 : 4;
        const int64_t in_part = gk_ceil_div(p.v + 2 * in_vector, 32 * in_vector * p.blocks) + 1;
        const int64_t left = gk_gpu_of(ctx->index)->smem_per_block - smem;
        p.groups = (int)gk_min_i64(gk_round_up(in_part, 2), left / 32 / 2 * 2);
        const int64_t most = gk_min_i64((left - 20 * p.groups) / 8, 32 * in_vector * in_part);
        p.most_values = (int)most;
        smem += 20 * p.groups + 8 * most;
    }
    if (a->prompt) {
        p.prompt = (const uint8_t *)a->prompt->data;
        p.prompt_stride = a->prompt->stride[0];
    }
    return launch<sample_tokens_kernel<T, CLUSTER>>("gk_sample_tokens", ctx,
                                                    dim3((unsigned)(rows * p.blocks)), THREADS,
                                                    (size_t)smem, p, false, p.blocks);
}

template <bool CLUSTER>
bool plan(const gk_cuda_instance *, const gk_context *ctx, const void *args, gk_plan *plan) {
    const gk_sample_tokens_args *a = (const gk_sample_tokens_args *)args;
    const int64_t rows = a->logits.shape[0];
    int64_t blocks = 1;
    if (CLUSTER) {
        blocks = blocks_of_row(ctx, rows, a->logits.shape[1]);
        if (blocks == 1) return false;
    }
    plan->tasks = rows * blocks;
    return gk_grid_fits(plan->tasks) && smem_fits(ctx, (int)sizeof(SharedOf<CLUSTER>));
}

template <class T, bool CLUSTER> int blocks() {
    return blocks_per_sm<sample_tokens_kernel<T, CLUSTER>>(THREADS, sizeof(SharedOf<CLUSTER>));
}

#define GK_SAMPLE_INSTANCES(NAME, CLUSTER)                                                          \
    {                                                                                               \
        {NAME "f32", GK_F32, plan<CLUSTER>, run<float, CLUSTER>, {}, blocks<float, CLUSTER>},       \
            {NAME "bf16",                                                                           \
             GK_BF16,                                                                               \
             plan<CLUSTER>,                                                                         \
             run<__nv_bfloat16, CLUSTER>,                                                           \
             {},                                                                                    \
             blocks<__nv_bfloat16, CLUSTER>},                                                       \
            {NAME "f16", GK_F16, plan<CLUSTER>, run<__half, CLUSTER>, {}, blocks<__half, CLUSTER>}, \
        {                                                                                           \
            NAME "f64", GK_F64, plan<CLUSTER>, run<double, CLUSTER>, {}, blocks<double, CLUSTER>    \
        }                                                                                           \
    }

} // namespace

#endif
