// SPDX-License-Identifier: BSD-3-Clause
/* sample_tokens: a token of each row of logits in one launch and without a sort. Serves
 * gk_sample_tokens (gpukern_sample.h has the equations) for float32, bfloat16, float16 and float64
 * logits of any row stride and alignment.
 *
 * A block takes one row, and reads it once from memory and a few times from L2:
 *
 *   1  the largest and the smallest y, after penalties
 *   2  with top_k or top_p: how many tokens lie in each of 2048 equal parts of the range of x, and
 *      their weights
 *   3  for top_k, then for top_p: the tokens of the part that holds the last token which stays.
 *      They go to shared memory, where further histograms find the value of that token. If top_k
 *      is at most 4096, top_p only looks at the tokens that top_k left
 *   4  the weights that are left, by chunk of the row
 *   5  the token in the chunk that the number hits
 *
 * x = (y - max y) / temperature is not positive. The bits of -x as an integer, its key, rise as x
 * falls. A weight is an integer below 2^44, so sums in any order agree. A histogram has its sums
 * in two words, because shared memory adds 64 bits only by compare and swap.
 *
 * Shared memory (struct Shared): two histograms of 24 KiB, 4096 keys, the chunks' sums in place of
 * the second histogram. No workspace. */
#include "../../formats/sample_weight.h"
#include "../host/launch.cuh"
#include "gpukern_sample.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace {

enum {
    THREADS = 512, /* 128 registers a thread: four exponentials side by side need more than 64 */
    WARPS = THREADS / 32,
    BINS = 2048,
    BINS_EACH = BINS / THREADS, /* of a thread in a scan */
    DRAFTED = 16,               /* drafted tokens in shared memory */
    LISTED = 4096,              /* keys in shared memory */
    MOST_CHUNKS = THREADS
};
constexpr unsigned ALL = 0xffffffffu;
constexpr int64_t NO_KEY = INT64_MAX;
constexpr float MARGIN = 1e-4f; /* of x in float32: 31 times 2^-21 is 1.5e-5 */
__constant__ double powers[32] = GK_SAMPLE_TABLE;

/* ---- parameters ------------------------------------------------------------------------------ */
/* [R] float64 or float32; data NULL: not given. */
struct Numbers {
    const void *data;
    int64_t stride;
    bool wide;
};
/* [R] or [R, D] int64 or int32 */
struct Integers {
    const void *data;
    int64_t stride, last_stride;
    bool wide;
};

struct Params {
    const void *logits;
    int64_t row_stride;
    int v;
    Numbers temperature, number, top_p, min_p, presence, frequency, repetition;
    Integers top_k, slots, drafted;
    int num_drafted;
    const int32_t *counts;
    const uint8_t *prompt;
    int64_t num_slots, counts_stride, prompt_stride;
    int64_t *out;
    uint8_t *error_word;
};

__device__ __forceinline__ double number_of(const Numbers &x, int row, double otherwise) {
    if (!x.data) return otherwise;
    return x.wide ? ((const double *)x.data)[row * x.stride]
                  : (double)((const float *)x.data)[row * x.stride];
}
__device__ __forceinline__ int64_t integer_of(const Integers &x, int64_t at) {
    return x.wide ? ((const int64_t *)x.data)[at] : (int64_t)((const int32_t *)x.data)[at];
}

/* ---- shared memory --------------------------------------------------------------------------- */
struct Histogram {
    uint32_t count[BINS];
    uint32_t low[BINS], high[BINS]; /* the words of the sums */
};
struct Chunks {
    int64_t sum[MOST_CHUNKS]; /* weights of keys below the last one */
    int equal[MOST_CHUNKS];   /* tokens with the last key */
};

/* The tokens between two keys, and what comes before them in the order of x. */
struct Group {
    int64_t low, high; /* keys */
    int64_t before_sum;
    int before, count;
    int bin; /* of the first histogram */
};

/* The facts of a row that its passes need. Every pass reads them anew, so that they take no
 * registers in between. */
struct Facts {
    double largest, inverse, least; /* max y, 1 / temperature, min_p 2^43 */
    double bins;                    /* of the first histogram in a unit of x; a power of two */
    float largest32, inverse32;
    bool in_float; /* float32 can hold x, and what it is made of */
};

struct Shared {
    Histogram all; /* of the whole row */
    union {
        Histogram part;
        Chunks chunks;
    };
    int64_t list[LISTED];
    double table[32];
    int64_t wide[WARPS], wide2[WARPS];
    int narrow[WARPS];
    double real[WARPS];
    double presence, frequency, repetition;
    int64_t drafted[DRAFTED];
    Facts facts;
    Group chosen;
    int listed, in_list; /* the bin whose keys the list has, and their number */
    int bin, equal_before;
    int64_t place;
};

/* ---- reductions of a block ------------------------------------------------------------------- */
/* Every thread gets its exclusive prefix sums, and the totals. */
__device__ __forceinline__ void scan(Shared &s, int &count, int64_t &sum, int &counts,
                                     int64_t &sums) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int own = count;
    const int64_t own_sum = sum;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int n = __shfl_up_sync(ALL, count, d);
        const int64_t w = __shfl_up_sync(ALL, sum, d);
        if (lane >= d) {
            count += n;
            sum += w;
        }
    }
    __syncthreads(); /* the last call has read its words */
    if (lane == 31) {
        s.narrow[warp] = count;
        s.wide[warp] = sum;
    }
    __syncthreads();
    int n = lane < WARPS ? s.narrow[lane] : 0;
    int64_t w = lane < WARPS ? s.wide[lane] : 0;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int m = __shfl_up_sync(ALL, n, d);
        const int64_t u = __shfl_up_sync(ALL, w, d);
        if (lane >= d) {
            n += m;
            w += u;
        }
    }
    counts = __shfl_sync(ALL, n, 31);
    sums = __shfl_sync(ALL, w, 31);
    const int n_before = __shfl_sync(ALL, n, warp ? warp - 1 : 0);
    const int64_t w_before = __shfl_sync(ALL, w, warp ? warp - 1 : 0);
    count += (warp ? n_before : 0) - own;
    sum += (warp ? w_before : 0) - own_sum;
}

__device__ __forceinline__ int64_t lower(int64_t a, int64_t b) { return a < b ? a : b; }

/* The least of `low` and the largest of `high` over a block. */
__device__ __forceinline__ void range(Shared &s, int64_t &low, int64_t &high) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
        low = lower(low, __shfl_xor_sync(ALL, low, d));
        high = -lower(-high, -__shfl_xor_sync(ALL, high, d));
    }
    __syncthreads();
    if (lane == 0) {
        s.wide[warp] = low;
        s.wide2[warp] = high;
    }
    __syncthreads();
    low = s.wide[lane % WARPS];
    high = s.wide2[lane % WARPS];
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
        low = lower(low, __shfl_xor_sync(ALL, low, d));
        high = -lower(-high, -__shfl_xor_sync(ALL, high, d));
    }
}

/* ---- histograms ------------------------------------------------------------------------------ */
__device__ __forceinline__ void clear(Histogram &h) {
    for (int i = threadIdx.x; i < BINS; i += THREADS) h.count[i] = h.low[i] = h.high[i] = 0;
    __syncthreads();
}

__device__ __forceinline__ void add(Histogram &h, int bin, uint32_t count, int64_t weight) {
    const uint32_t low = (uint32_t)weight;
    atomicAdd(&h.count[bin], count);
    const uint32_t old = atomicAdd(&h.low[bin], low);
    const uint32_t high = (uint32_t)(weight >> 32) + (old + low < old);
    if (high) atomicAdd(&h.high[bin], high);
}

/* All lanes of a warp call it. Equal logits would make all lanes wait for one bin. */
template <bool WEIGHTS>
__device__ __forceinline__ void add_of_warp(Histogram &h, bool has, int bin, int64_t weight) {
    const unsigned lanes = __ballot_sync(ALL, has);
    if (!lanes) return;
    const int leader = __ffs(lanes) - 1;
    const int common = __shfl_sync(ALL, bin, leader);
    const bool alike = __all_sync(ALL, !has || bin == common);
    if (alike) {
        has = (int)(threadIdx.x % 32) == leader;
        if (WEIGHTS) {
            weight = lanes >> (threadIdx.x % 32) & 1 ? weight : 0;
#pragma unroll
            for (int d = 16; d > 0; d /= 2) weight += __shfl_xor_sync(ALL, weight, d);
        }
    }
    if (!has) return;
    const uint32_t count = alike ? (uint32_t)__popc(lanes) : 1;
    if (WEIGHTS)
        add(h, bin, count, weight);
    else
        atomicAdd(&h.count[bin], count);
}

/* Chooses the last bin whose first token stays: fewer than `most` tokens come before it, with a
 * sum below `share`. The first token of a group stays in any case. `from` is the group that the
 * histogram is of. Leaves bin, before, before_sum and count in s.chosen. */
__device__ __forceinline__ void choose(Shared &s, const Histogram &h, const Group &from, int most,
                                       double share) {
    __syncthreads(); /* the histogram is complete, and s.chosen was read */
    int count[BINS_EACH], before = 0, all;
    int64_t sum[BINS_EACH], before_sum = 0, all_sum;
#pragma unroll
    for (int i = 0; i < BINS_EACH; ++i) {
        const int bin = BINS_EACH * threadIdx.x + i;
        count[i] = (int)h.count[bin];
        sum[i] = (int64_t)h.high[bin] << 32 | h.low[bin];
        before += count[i];
        before_sum += sum[i];
    }
    if (threadIdx.x == 0) s.bin = -1;
    scan(s, before, before_sum, all, all_sum);
    before += from.before;
    before_sum += from.before_sum;
    int mine = -1;
    Group found = from;
#pragma unroll
    for (int i = 0; i < BINS_EACH; ++i) {
        if (count[i] && (before == from.before || (before < most && (double)before_sum < share))) {
            mine = found.bin = BINS_EACH * threadIdx.x + i;
            found.before = before;
            found.before_sum = before_sum;
            found.count = count[i];
        }
        before += count[i];
        before_sum += sum[i];
    }
    if (mine >= 0) atomicMax(&s.bin, mine);
    __syncthreads();
    if (mine >= 0 && s.bin == mine) s.chosen = found;
    __syncthreads();
}

/* ---- a row ----------------------------------------------------------------------------------- */
__device__ __forceinline__ float wide(float x) { return x; }
__device__ __forceinline__ double wide(double x) { return x; }
__device__ __forceinline__ float wide(__half x) { return __half2float(x); }
__device__ __forceinline__ float wide(__nv_bfloat16 x) { return __bfloat162float(x); }

/* The tokens that stay: those whose key is below `last`, and of those with that key the first
 * `room`. total: their weights. */
struct Bound {
    int64_t last, total;
    int room;
};

/* A token of a row with penalties: its logit, its count and its mark. */
template <class T> struct Counted {
    T logit;
    int count;
    uint8_t mark;
};

template <class T, bool PENALISED> struct ElementOf {
    typedef T type;
};
template <class T> struct ElementOf<T, true> {
    typedef Counted<T> type;
};

template <class T, bool PENALISED> struct Row {
    typedef typename ElementOf<T, PENALISED>::type Element;
    typedef decltype(wide(T())) Wide;
    static constexpr int VEC = PENALISED ? 1 : sizeof(T) > 4 ? 2 : 4; /* elements of a load */
    static constexpr int VEC_BYTES = VEC * sizeof(T);
    static constexpr int AHEAD = 4; /* vectors of a thread on their way */

    const Params &p;
    Shared &s;
    int row;
    const T *logits;
    /* Token 0 is element `pad` of its vector; `vectors` of them hold the row. */
    int pad, vectors;
    int slot;

    __device__ Row(const Params &p, Shared &s, int row, int slot)
        : p(p), s(s), row(row), slot(slot) {
        logits = (const T *)p.logits + row * p.row_stride;
        pad = (int)((uintptr_t)logits % VEC_BYTES / sizeof(T));
        vectors = (pad + p.v + VEC - 1) / VEC;
        if (PENALISED) {
            if (threadIdx.x == 0) {
                s.presence = number_of(p.presence, row, 0);
                s.frequency = number_of(p.frequency, row, 0);
                s.repetition = number_of(p.repetition, row, 1);
            }
            const int d = threadIdx.x;
            if (d < DRAFTED && d < p.num_drafted) s.drafted[d] = drafted(d);
            __syncthreads();
        }
    }

    __device__ __forceinline__ int64_t drafted(int d) const {
        return integer_of(p.drafted, row * p.drafted.stride + d * p.drafted.last_stride);
    }

    struct Vec {
        Element v[VEC];
    };
    struct alignas(VEC_BYTES) Loaded {
        T v[VEC];
    };

    /* Vector j. Elements outside the row are not read. */
    __device__ __forceinline__ Vec load(int j) const {
        Vec x = {};
        if (j >= vectors) return x;
        if constexpr (PENALISED) {
            x.v[0].logit = logits[j];
            x.v[0].count = p.counts[slot * p.counts_stride + j];
            if (p.prompt) x.v[0].mark = p.prompt[slot * p.prompt_stride + j];
        } else {
            const T *from = logits - pad + (int64_t)j * VEC;
            const int first = j * VEC - pad; /* its first token */
            if (first >= 0 && first + VEC <= p.v) {
                const Loaded all = *(const Loaded *)from;
#pragma unroll
                for (int e = 0; e < VEC; ++e) x.v[e] = all.v[e];
                return x;
            }
#pragma unroll
            for (int e = 0; e < VEC; ++e)
                if (first + e >= 0 && first + e < p.v) x.v[e] = from[e];
        }
        return x;
    }

    /* True if a token is one of the row's. */
    __device__ __forceinline__ bool there(int token) const {
        return (unsigned)token < (unsigned)p.v;
    }

    __device__ __forceinline__ Wide logit_of(const Element &raw) const {
        if constexpr (PENALISED)
            return wide(raw.logit);
        else
            return wide(raw);
    }

    __device__ __forceinline__ int times_of(const Element &raw, int token) const {
        if constexpr (PENALISED) {
            int times = raw.count;
#pragma unroll 1
            for (int d = 0; d < p.num_drafted; ++d)
                times += (d < DRAFTED ? s.drafted[d] : drafted(d)) == token;
            return times;
        } else {
            return 0;
        }
    }

    __device__ __forceinline__ double y_of(const Element &raw, int token) const {
        if constexpr (PENALISED)
            return gk_sample_penalised((double)wide(raw.logit), times_of(raw, token), raw.mark != 0,
                                       s.presence, s.frequency, s.repetition);
        else
            return (double)wide(raw);
    }

    __device__ __forceinline__ double x_of(const Facts &f, const Element &raw, int token) const {
        return GK_MUL(GK_ADD(y_of(raw, token), -f.largest), f.inverse);
    }

    /* Bounds of x in float32, wide enough for its rounding errors. Most tokens of a pass lie
     * outside, and cost no arithmetic in float64. */
    struct Near {
        float from, to;
    };
    __device__ __forceinline__ Near near_keys(const Facts &f, int64_t low, int64_t high) const {
        if (sizeof(T) > 4 || !f.in_float) return {-INFINITY, INFINITY};
        /* fmax: the bits of NO_KEY are NaN */
        const double from = fmax(-__longlong_as_double(high), GK_SAMPLE_LEAST);
        return {(float)from - MARGIN, (float)-__longlong_as_double(low) + MARGIN};
    }
    __device__ __forceinline__ bool is_far(const Facts &f, const Element &raw, int token,
                                           const Near &near) const {
        if constexpr (sizeof(T) > 4) return false;
        if constexpr (PENALISED)
            if (raw.mark || times_of(raw, token)) return false;
        const float x = ((float)logit_of(raw) - f.largest32) * f.inverse32;
        return x < near.from || x > near.to;
    }

    /* Calls f(raw, token, whether it is the row's) for each element of vector j. */
    template <class F> __device__ __forceinline__ void each_in(const Vec &x, int j, F f) const {
#pragma unroll
        for (int e = 0; e < VEC; ++e) {
            const int token = j * VEC + e - pad;
            f(x.v[e], token, there(token));
        }
    }

    /* The same for the whole row. Every lane of a warp takes the same steps. The next vectors are
     * on their way while f is computed. */
    template <class F> __device__ __forceinline__ void each(F f) const {
        Vec x[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) x[i] = load(i * THREADS + threadIdx.x);
#pragma unroll 1
        for (int first = 0; first < vectors; first += THREADS) {
            const Vec now = x[0];
#pragma unroll
            for (int i = 0; i + 1 < AHEAD; ++i) x[i] = x[i + 1];
            x[AHEAD - 1] = load(first + AHEAD * THREADS + threadIdx.x);
            each_in(now, first + threadIdx.x, f);
        }
    }

    /* ---- 1: the largest y -------------------------------------------------------------------- */
    /* NaN is larger than any number; of equal values the lower token wins. */
    template <class Y> static __device__ __forceinline__ bool beats(Y y, int i, Y than, int other) {
        if (y != y) return than == than || i < other;
        return y > than || (y == than && i < other);
    }

    /* Returns the token of the largest y, and y; `range`: how far the smallest finite y is below.
     */
    __device__ __forceinline__ int best(double &largest, double &range) {
        typedef decltype(PENALISED ? double() : Wide()) Y;
        Y top = -(Y)INFINITY, low = (Y)INFINITY;
        int at = INT32_MAX;
        each([&](const Element &raw, int token, bool is_there) {
            if (!is_there) return;
            Y y;
            if constexpr (PENALISED)
                y = y_of(raw, token);
            else
                y = wide(raw);
            if (beats(y, token, top, at)) {
                top = y;
                at = token;
            }
            if (y < low && y > -(Y)INFINITY) low = y;
        });
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        double peak = top, least_y = low;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int d = 16; d > 0; d /= 2) {
                const double other = __shfl_xor_sync(ALL, peak, d);
                const int other_at = __shfl_xor_sync(ALL, at, d);
                if (beats(other, other_at, peak, at)) {
                    peak = other;
                    at = other_at;
                }
                least_y = fmin(least_y, __shfl_xor_sync(ALL, least_y, d));
            }
            if (half) break;
            if (lane == 0) {
                s.real[warp] = peak;
                s.narrow[warp] = at;
                s.wide[warp] = __double_as_longlong(least_y);
            }
            __syncthreads();
            peak = s.real[lane % WARPS];
            at = s.narrow[lane % WARPS];
            least_y = __longlong_as_double(s.wide[lane % WARPS]);
        }
        largest = peak;
        range = peak - least_y;
        return at;
    }

    /* ---- 2: the first histogram -------------------------------------------------------------- */
    template <bool WEIGHTS> __device__ __forceinline__ void count_all() {
        clear(s.all);
        const Facts f = s.facts;
        const Near near = near_keys(f, 0, NO_KEY);
        each([&](const Element &raw, int token, bool is_there) {
            double x = GK_SAMPLE_LEAST - 1;
            if (is_there && !is_far(f, raw, token, near)) x = x_of(f, raw, token);
            bool has = x >= GK_SAMPLE_LEAST;
            int bin = 0;
            int64_t weight = 0;
            if (has) {
                if (WEIGHTS || f.least > 0) {
                    const double e = gk_sample_exp(x, s.table);
                    has = e >= f.least;
                    weight = gk_sample_round(e);
                }
                bin = min((int)(-x * f.bins), BINS - 1);
            }
            add_of_warp<WEIGHTS>(s.all, has, bin, weight);
        });
    }

    /* ---- 3: the key of the last token that stays --------------------------------------------- */
    /* Calls call(key) for each token of the row that has a weight and whose key is in [low, high].
     */
    template <class F>
    __device__ __forceinline__ void each_between(int64_t low, int64_t high, F call) const {
        const Facts f = s.facts;
        const Near near = near_keys(f, low, high);
        each([&](const Element &raw, int token, bool is_there) {
            if (!is_there || is_far(f, raw, token, near)) return;
            const double x = x_of(f, raw, token);
            if (!(x >= GK_SAMPLE_LEAST)) return;
            const int64_t key = __double_as_longlong(x) & INT64_MAX;
            if (key < low || key > high) return;
            if (f.least > 0 && !(gk_sample_exp(x, s.table) >= f.least)) return;
            call(key);
        });
    }

    __device__ __forceinline__ int64_t weight_of(int64_t key) const {
        return gk_sample_round(gk_sample_exp(-__longlong_as_double(key), s.table));
    }

    /* Calls f(key) for each token of a group, from the list if it has them. */
    template <class F>
    __device__ __forceinline__ void each_of(const Group &c, bool listed, int in_list, F f) const {
        if (!listed) {
            each_between(c.low, c.high, f);
            return;
        }
        for (int i = threadIdx.x; i < in_list; i += THREADS)
            if (s.list[i] >= c.low && s.list[i] <= c.high) f(s.list[i]);
    }

    /* Puts the keys from low to high into the list, and returns their number. */
    __device__ __forceinline__ int collect(int64_t low, int64_t high, int bin) {
        __syncthreads();
        if (threadIdx.x == 0) {
            s.in_list = 0;
            s.listed = bin;
        }
        __syncthreads();
        each_between(low, high, [&](int64_t key) { s.list[atomicAdd(&s.in_list, 1)] = key; });
        __syncthreads();
        return s.in_list;
    }

    /* The bound of the first `most` tokens in the order of x, among which a token stays if the
     * weights before it have a sum below `share`; one token stays in any case. The last token that
     * stays is in group c. */
    __device__ __forceinline__ Bound narrowed(Group c, int most, double share, bool listed) {
        const int in_list = s.in_list;
        for (;;) {
            int64_t low = NO_KEY, high = 0;
            each_of(c, listed, in_list, [&](int64_t key) {
                low = lower(low, key);
                high = -lower(-high, -key);
            });
            range(s, low, high);
            if (low == high) {
                c.low = low;
                break;
            }
            c.low = low;
            const int bits = 64 - __clzll(high - low), shift = max(bits - 11, 0);
            clear(s.part);
            each_of(c, listed, in_list, [&](int64_t key) {
                add(s.part, (int)((key - low) >> shift), 1, weight_of(key));
            });
            choose(s, s.part, c, most, share);
            c = s.chosen;
            c.low = low + ((int64_t)c.bin << shift);
            c.high = c.low + ((int64_t)1 << shift) - 1;
        }
        /* all tokens of the group have one key; a token has a place if those before leave it one */
        const int64_t each_weight = weight_of(c.low);
        int room = 1, most_room = min(c.count, most - c.before);
        while (room < most_room) {
            const int middle = room + (most_room - room + 1) / 2;
            if ((double)(c.before_sum + (middle - 1) * each_weight) < share)
                room = middle;
            else
                most_room = middle - 1;
        }
        return {c.low, c.before_sum + room * each_weight, room};
    }

    /* The sum of the first histogram. */
    __device__ __forceinline__ int64_t sum_of_all() {
        __syncthreads();
        int64_t sum = 0, total;
        for (int i = threadIdx.x; i < BINS; i += THREADS)
            sum += (int64_t)s.all.high[i] << 32 | s.all.low[i];
        int none = 0, nothing;
        scan(s, none, sum, nothing, total);
        return total;
    }

    /* The bound of the tokens that top_k and then top_p leave: first the bound by count, then the
     * one by weights. If top_k leaves few tokens, the list has all of them for top_p. */
    __device__ __forceinline__ Bound bound_of(int most, double top_p, bool few) {
        Bound keep = {NO_KEY, 0, 0};
        if (most == INT32_MAX) keep.total = sum_of_all();
#pragma unroll 1
        for (int by_sum = most == INT32_MAX; by_sum < (top_p < 1 ? 2 : 1); ++by_sum) {
            Group c = {0, 0, 0, 0, 0, 0};
            double share = INFINITY;
            bool listed = true;
            if (by_sum && few) {
                const int before = collect(0, keep.last - 1, -1);
                __syncthreads();
                for (int i = threadIdx.x; i < keep.room; i += THREADS)
                    s.list[before + i] = keep.last;
                if (threadIdx.x == 0) s.in_list = before + keep.room;
                __syncthreads();
                int64_t sum = 0;
                for (int i = threadIdx.x; i < s.in_list; i += THREADS) sum += weight_of(s.list[i]);
                int none = 0, nothing;
                scan(s, none, sum, nothing, keep.total);
                c.high = keep.last;
                c.count = s.in_list;
                most = INT32_MAX;
            }
            if (by_sum) share = GK_MUL(top_p, (double)keep.total);
            if (!(by_sum && few)) {
                choose(s, s.all, c, most, share);
                if (s.bin < 0) return {NO_KEY, 0, 0}; /* no token has a weight */
                c = s.chosen;
                c.low = __double_as_longlong(c.bin / s.facts.bins);
                c.high = c.bin == BINS - 1 ? NO_KEY
                                           : __double_as_longlong((c.bin + 1) / s.facts.bins) - 1;
                listed = s.listed == c.bin || c.count <= LISTED;
                if (listed && s.listed != c.bin) collect(c.low, c.high, c.bin);
            }
            keep = narrowed(c, most, share, listed);
        }
        return keep;
    }

    /* ---- 4 and 5: the draw ------------------------------------------------------------------- */
    /* The weight of a token whose key is below the bound's; equal: its key is the bound's. */
    __device__ __forceinline__ int64_t kept(const Facts &f, const Bound &keep, const Near &near,
                                            const Element &raw, int token, bool &equal) const {
        equal = false;
        if (!there(token) || is_far(f, raw, token, near)) return 0;
        const double x = x_of(f, raw, token);
        if (!(x >= GK_SAMPLE_LEAST)) return 0;
        const int64_t key = __double_as_longlong(x) & INT64_MAX;
        if (key > keep.last) return 0;
        const double e = gk_sample_exp(x, s.table);
        if (!(e >= f.least)) return 0;
        equal = key == keep.last;
        return equal ? 0 : gk_sample_round(e);
    }

    __device__ __forceinline__ int64_t draw(const Bound &keep, int otherwise) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        /* a chunk is so many vectors a lane */
        const int most = 32 * MOST_CHUNKS * AHEAD;
        const int each_lane = (vectors + most - 1) / most * AHEAD;
        const int chunks = (vectors + 32 * each_lane - 1) / (32 * each_lane);
        const int64_t each_weight = keep.last == NO_KEY ? 0 : weight_of(keep.last);
        const Facts f = s.facts;
        const Near near = near_keys(f, 0, keep.last);
        __syncthreads(); /* the second histogram has been read */
        for (int c = warp; c < chunks; c += WARPS) {
            int64_t sum = 0;
            int equals = 0;
#pragma unroll 1
            for (int i = 0; i < each_lane; i += AHEAD) {
                const int first = (c * each_lane + i) * 32 + lane;
                Vec x[AHEAD];
#pragma unroll
                for (int u = 0; u < AHEAD; ++u) x[u] = load(first + 32 * u);
#pragma unroll
                for (int u = 0; u < AHEAD; ++u)
                    each_in(x[u], first + 32 * u, [&](const Element &raw, int token, bool) {
                        bool equal;
                        sum += kept(f, keep, near, raw, token, equal);
                        equals += equal;
                    });
            }
#pragma unroll
            for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(ALL, sum, d);
            equals = __reduce_add_sync(ALL, equals);
            if (lane == 0) {
                s.chunks.sum[c] = sum;
                s.chunks.equal[c] = equals;
            }
        }
        __syncthreads();
        const bool has_chunk = (int)threadIdx.x < chunks;
        const int equal = has_chunk ? s.chunks.equal[threadIdx.x] : 0;
        int equal_before = equal, all;
        int64_t unused = 0, none;
        scan(s, equal_before, unused, all, none);
        const int stay = max(min(equal, keep.room - equal_before), 0);
        const int64_t own = (has_chunk ? s.chunks.sum[threadIdx.x] : 0) + stay * each_weight;
        int64_t before = own, total;
        int zero = 0;
        scan(s, zero, before, all, total);
        if (total == 0) return otherwise;
        const double at = GK_MUL(number_of(p.number, row, 0), (double)total);
        int64_t place = at > 0 ? (at < (double)total ? (int64_t)at : total - 1) : 0;
        place = lower(place, total - 1);
        if (before <= place && place < before + own) {
            s.bin = threadIdx.x;
            s.place = place - before; /* in the chunk */
            s.equal_before = equal_before;
        }
        __syncthreads();
        place = s.place;
        equal_before = s.equal_before;
        /* every warp looks for it, so that all threads return the token */
        for (int i = 0; i < each_lane; ++i) {
            const int j = (s.bin * each_lane + i) * 32 + lane;
            const Vec x = load(j);
            int64_t weight[VEC], sum = 0;
            int equals = 0;
            unsigned is_equal = 0;
#pragma unroll
            for (int e = 0; e < VEC; ++e) {
                bool equal;
                weight[e] = kept(f, keep, near, x.v[e], j * VEC + e - pad, equal);
                is_equal |= (unsigned)equal << e;
            }
            equals = __popc(is_equal);
            int rank = equals;
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                const int n = __shfl_up_sync(ALL, rank, d);
                if (lane >= d) rank += n;
            }
            const int last_rank = __shfl_sync(ALL, rank, 31);
            rank += equal_before - equals;
#pragma unroll
            for (int e = 0; e < VEC; ++e) {
                if (is_equal >> e & 1) weight[e] = rank++ < keep.room ? each_weight : 0;
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
                int passed = 0; /* of this lane's tokens, those up to which the sum is too small */
                upto -= sum;
#pragma unroll
                for (int e = 0; e < VEC; ++e) {
                    upto += weight[e];
                    passed += upto <= place;
                }
                const int token = j * VEC + passed - pad;
                return __shfl_sync(ALL, token, __ffs(hit) - 1);
            }
            place -= __shfl_sync(ALL, upto, 31);
            equal_before += last_rank;
        }
        return otherwise;
    }

    __device__ __forceinline__ int64_t token() {
        double largest, range;
        const int most_likely = best(largest, range);
        const double temperature = number_of(p.temperature, row, 0);
        if (!(temperature > 0) || !isfinite(largest)) return most_likely;
        if (threadIdx.x == 0) {
            Facts f;
            f.largest = largest;
            f.inverse = GK_DIV(1.0, temperature);
            f.least = GK_MUL(number_of(p.min_p, row, 0), GK_SAMPLE_ONE);
            f.largest32 = (float)largest;
            f.inverse32 = (float)f.inverse;
            f.in_float =
                fabs(largest) < 1e30 && range < 1e30 && f.inverse > 1e-30 && f.inverse < 1e30;
            if (PENALISED) /* the largest y is rounded; 0 times a penalty is 0 */
                f.in_float = f.in_float && fabs(largest) * f.inverse < 100 &&
                             isfinite(s.presence) && isfinite(s.frequency);
            /* range / temperature < 2^k, at most 2^5 of which have a weight */
            const double spread = fmin(range * f.inverse, -GK_SAMPLE_LEAST);
            const int k = max((int)(__double_as_longlong(spread) >> 52) - 1022, -40);
            f.bins = __longlong_as_double((int64_t)(1023 + 11 - k) << 52);
            s.facts = f;
        }
        __syncthreads();
        const int64_t top_k = p.top_k.data ? integer_of(p.top_k, row * p.top_k.stride) : 0;
        const double top_p = number_of(p.top_p, row, 1);
        Bound keep = {NO_KEY, 0, 0};
        const bool by_count = top_k > 0 && top_k < p.v, by_sum = top_p < 1;
        if (by_count || by_sum) {
            const int most = by_count ? (int)top_k : INT32_MAX;
            const bool few = most <= LISTED;
            if (few)
                count_all<false>();
            else
                count_all<true>();
            keep = bound_of(most, top_p, few);
        }
        return draw(keep, most_likely);
    }
};

/* ---- the kernel ------------------------------------------------------------------------------ */
template <class T> __global__ void __launch_bounds__(THREADS, 1) sample_tokens_kernel(Params p) {
    extern __shared__ __align__(16) char memory[];
    Shared &s = *(Shared *)memory;
    if (threadIdx.x < 32) s.table[threadIdx.x] = powers[threadIdx.x];
    if (threadIdx.x == 0) s.listed = -1;
    __syncthreads();
    const int row = blockIdx.x;
    int64_t slot = p.slots.data ? integer_of(p.slots, row * p.slots.stride) : -1;
    if (slot >= p.num_slots) {
        if (threadIdx.x == 0) report(p.error_word, GK_BAD_COUNT_SLOTS);
        slot = -1;
    }
    const int64_t token = slot < 0 ? Row<T, false>(p, s, row, -1).token()
                                   : Row<T, true>(p, s, row, (int)slot).token();
    if (threadIdx.x == 0) p.out[row] = token;
}

Numbers numbers_of(const gk_tensor *t) {
    return t ? Numbers{t->data, t->stride[0], t->dtype == GK_F64} : Numbers{};
}
Integers integers_of(const gk_tensor *t) {
    if (!t) return {};
    return {t->data, t->stride[0], t->ndim > 1 ? t->stride[1] : 0, t->dtype == GK_I64};
}

template <class T> gk_status run(const gk_context *ctx, const void *args, const gk_plan *, void *) {
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
    if (a->counts) {
        p.counts = (const int32_t *)a->counts->data;
        p.counts_stride = a->counts->stride[0];
        p.num_slots = a->counts->shape[0];
    }
    if (a->prompt) {
        p.prompt = (const uint8_t *)a->prompt->data;
        p.prompt_stride = a->prompt->stride[0];
    }
    p.out = (int64_t *)a->out.data;
    p.error_word = ctx->error_word;
    return launch<sample_tokens_kernel<T>>(
        "gk_sample_tokens", ctx, dim3((unsigned)a->logits.shape[0]), THREADS, sizeof(Shared), p);
}

bool plan(const gk_cuda_instance *, const gk_context *ctx, const void *args, gk_plan *plan) {
    const gk_sample_tokens_args *a = (const gk_sample_tokens_args *)args;
    plan->tasks = a->logits.shape[0];
    return gk_grid_fits(plan->tasks) && smem_fits(ctx, (int)sizeof(Shared));
}

template <class T> int blocks() {
    return blocks_per_sm<sample_tokens_kernel<T>>(THREADS, sizeof(Shared));
}

const gk_cuda_instance instances[] = {
    {"sample_tokens_f32", GK_F32, plan, run<float>, {}, blocks<float>},
    {"sample_tokens_bf16", GK_BF16, plan, run<__nv_bfloat16>, {}, blocks<__nv_bfloat16>},
    {"sample_tokens_f16", GK_F16, plan, run<__half>, {}, blocks<__half>},
    {"sample_tokens_f64", GK_F64, plan, run<double>, {}, blocks<double>},
};

} // namespace

extern "C" const gk_cuda_table gk_sample_tokens_table = {instances, 4, 80, NULL};
