/* SPDX-License-Identifier: BSD-3-Clause */
/* quantize_values.cuh: shared by the kernels of quantize: parameters, loading and computing
 * values, scales from amax, and codes.
 *
 * A thread has N groups of VEC columns. It loads all groups of a source before it uses the
 * first, because bandwidth depends on the bytes that threads have in flight. A plain x stays in
 * its dtype: VEC columns of 16 bits are 16 bytes.
 *
 * amax is a maximum of bit patterns, in which infinities and NaN are the largest. x / scale is a
 * correctly rounded quotient: x times 1 / scale, corrected by one Newton step on the remainder
 * (Markstein 1990), 3 instructions in all. */
#ifndef GPUKERN_CUDA_QUANT_QUANTIZE_VALUES_CUH
#define GPUKERN_CUDA_QUANT_QUANTIZE_VALUES_CUH

#include "../../../formats/scales.h"
#include "../gemm/activation.cuh"
#include "../../host/launch.cuh"
#include "../../ptx/cvt_s8.cuh"
#include "../../tile/codes.cuh"
#include "../../tile/convert.cuh"
#include "../../tile/reduce.cuh"

namespace {

constexpr int VEC = 8;            /* columns of a group */
constexpr int N = 4;              /* groups of a thread */
constexpr int MOST_WARPS = 16;    /* of a block */
constexpr int AMAX_BLOCKS = 1056; /* largest grid of the first kernel for a whole tensor */
constexpr float LOG2_E = 1.4426950408889634f;

/* The values that a kernel is compiled for. */
enum form {
    PLAIN, /* x itself, in its dtype */
    GATED, /* silu(gate) * up, in float32. p.vec and p.wide are true. */
    MADE   /* any that Params::what may name, in float32 */
};

struct Source { /* [..., M, K] */
    const void *data;
    int64_t stride[GK_MAX_DIMS]; /* of the leading dimensions in Params::shape */
    int64_t row, col;            /* of the last two */
};

struct Params {
    Source x, more; /* more: up, or the residual */
    const void *weight, *given;
    const float *scale_ub;
    uint8_t *codes;
    void *scale, *sum;
    float *values;  /* the row kernel writes these instead of codes */
    uint32_t *amax; /* [AMAX_BLOCKS] */
    int64_t rows, m, k, weight_step;
    int64_t shape[GK_MAX_DIMS]; /* leading dimensions, merged where possible */
    int ndim, what, granularity;
    int warps;         /* of a row, or of a segment of it */
    int groups;        /* rows of a block */
    unsigned segments; /* of a row; 128x128: blocks along k */
    unsigned tiles;    /* of a tensor; 128x128: blocks along the rows of a matrix */
    int amax_blocks;
    float eps, largest, inverse_largest;
    gk_dtype dtype;
    bool vec, weight_vec; /* 16-byte loads are aligned */
    bool wide;            /* a whole group can be stored at once */
    bool weight_f32, scale_e8m0;
};

__device__ __forceinline__ int64_t row_offset(const Params &p, const Source &s, int64_t row) {
    int64_t at = 0;
    for (int d = p.ndim - 1; d > 0; --d) {
        at += row % p.shape[d] * s.stride[d];
        row /= p.shape[d];
    }
    return at + row * s.stride[0];
}

/* ---- 1. values ------------------------------------------------------------------------------- */
template <class T> struct alignas(16) Group {
    T v[VEC];
    __device__ __forceinline__ float get(int i) const { return to_f32(v[i]); }
};

/* Loads groups `pitch` elements apart. Columns of a group from left(n) on become zeros. */
template <class T, int COUNT, class Left>
__device__ __forceinline__ void load_groups(Group<T> (&to)[COUNT], const T *from, int64_t pitch,
                                            int64_t step, bool vec, Left left) {
    constexpr int WORDS = sizeof(Group<T>) / 16;
#pragma unroll
    for (int n = 0; n < COUNT; ++n)
#pragma unroll
        for (int i = 0; i < WORDS; ++i) ((uint4 *)&to[n])[i] = make_uint4(0, 0, 0, 0);
    if (vec) {
#pragma unroll
        for (int n = 0; n < COUNT; ++n)
            if (left(n) > 0)
#pragma unroll
                for (int i = 0; i < WORDS; ++i)
                    ((uint4 *)&to[n])[i] = ((const uint4 *)(from + n * pitch))[i];
    } else {
#pragma unroll
        for (int n = 0; n < COUNT; ++n)
#pragma unroll
            for (int i = 0; i < VEC; ++i)
                if (i < left(n)) to[n].v[i] = from[n * pitch + i * step];
    }
}

template <class T>
__device__ __forceinline__ void store_group(T *to, const Group<T> &g, int left, bool wide) {
    if (left <= 0) return;
    if (wide) {
#pragma unroll
        for (int i = 0; i < (int)sizeof(Group<T>) / 16; ++i)
            st_global_128((uint4 *)to + i, ((const uint4 *)&g)[i]); /* whole, as store_some */
    } else {
#pragma unroll
        for (int i = 0; i < VEC; ++i)
            if (i < left) to[i] = g.v[i];
    }
}

template <class T> __device__ __forceinline__ uint32_t amax_bits(const Group<T> &g) {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < VEC; ++i) most = max(most, __float_as_uint(g.get(i)) & 0x7fffffffu);
    return most;
}
/* Two values at a time. The maximum with a NaN is NaN. */
template <class T2> __device__ __forceinline__ T2 amax_of_pairs(const T2 *v) {
    return __hmax2_nan(__hmax2_nan(__habs2(v[0]), __habs2(v[1])),
                       __hmax2_nan(__habs2(v[2]), __habs2(v[3])));
}
template <> __device__ __forceinline__ uint32_t amax_bits(const Group<__nv_bfloat16> &g) {
    const __nv_bfloat162 most = amax_of_pairs((const __nv_bfloat162 *)&g);
    return __float_as_uint(to_f32(__hmax_nan(most.x, most.y)));
}
template <> __device__ __forceinline__ uint32_t amax_bits(const Group<__half> &g) {
    const __half2 most = amax_of_pairs((const __half2 *)&g);
    return __float_as_uint(to_f32(__hmax_nan(most.x, most.y)));
}

/* A thread's groups: pointers to the first, and the distance in elements from each to the next. */
template <class T> struct Place {
    const T *x, *more;
    int64_t x_pitch, more_pitch;
};

template <int FORM, class T> struct values_of {
    typedef Group<float> type;
};
template <class T> struct values_of<PLAIN, T> {
    typedef Group<T> type;
};

__device__ __forceinline__ float silu_mul(float gate, float up) {
    return gate * rcp_approx_ftz(1.f + ex2_approx_ftz(gate * -LOG2_E)) * up;
}

/* Computes a thread's values: x itself, silu(x) * up, or x + residual rounded to x's dtype,
 * which is also stored in `sum`.
 *
 * AT_ONCE groups of both sources are loaded before the first is used. The 32 registers that hold
 * four groups of 16-bit sources can become the float32 values in place, so a gated row loads all
 * of them at once. */
template <int FORM, class T, class Left>
__device__ __forceinline__ void make_groups(const Params &p, const Place<T> &at, Left left,
                                            typename values_of<FORM, T>::type (&v)[N],
                                            T *sum = nullptr, int64_t sum_pitch = 0) {
    if constexpr (FORM == PLAIN) {
        load_groups(v, at.x, at.x_pitch, p.x.col, p.vec, left);
    } else {
        constexpr int AT_ONCE = FORM == GATED && sizeof(T) == 2 ? N : 2;
        const bool gated = FORM == GATED || p.what == GK_QUANTIZE_SILU_MUL,
                   vec = FORM == GATED || p.vec;
#pragma unroll
        for (int begin = 0; begin < N; begin += AT_ONCE) {
            Group<T> x[AT_ONCE], more[AT_ONCE];
            auto left_here = [&](int n) { return left(begin + n); };
            load_groups(x, at.x + begin * at.x_pitch, at.x_pitch, p.x.col, vec, left_here);
            if (FORM == GATED || at.more)
                load_groups(more, at.more + begin * at.more_pitch, at.more_pitch, p.more.col, vec,
                            left_here);
#pragma unroll
            for (int n = 0; n < AT_ONCE; ++n) {
                Group<float> &to = v[begin + n];
                if (gated) {
#pragma unroll
                    for (int i = 0; i < VEC; ++i) to.v[i] = silu_mul(x[n].get(i), more[n].get(i));
                    continue;
                }
                if (at.more) {
#pragma unroll
                    for (int i = 0; i < VEC; ++i)
                        x[n].v[i] = from_f32<T>(x[n].get(i) + more[n].get(i));
                    if (sum) store_group(sum + (begin + n) * sum_pitch, x[n], left_here(n), p.wide);
                }
#pragma unroll
                for (int i = 0; i < VEC; ++i) to.v[i] = x[n].get(i);
            }
        }
    }
}

/* ---- 2. scales ------------------------------------------------------------------------------- */
/* Maximum over the `warps` warps that share a row, in each of their threads. Two uses of `place`
 * [MOST_WARPS] need a barrier between them. */
__device__ __forceinline__ uint32_t max_of_warps(uint32_t x, uint32_t *place, int warps) {
    x = __reduce_max_sync(0xffffffffu, x);
    if (warps == 1) return x;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) place[warp] = x;
    __syncthreads();
    return __reduce_max_sync(0xffffffffu, lane < warps ? place[warp / warps * warps + lane] : 0);
}
__device__ __forceinline__ float sum_of_warps(float x, float *place, int warps) {
    x = warp_sum(x);
    if (warps == 1) return x;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) place[warp] = x;
    __syncthreads();
    return warp_sum(lane < warps ? place[warp / warps * warps + lane] : 0.f);
}

/* amax / largest, correctly rounded. 1x32: the next power of two, from the difference of
 * exponents, plus one if amax has the larger fraction. */
__device__ __forceinline__ float scale_of(const Params &p, uint32_t bits) {
    if (bits >= 0x7f800000u) return __uint_as_float(0x7fc00000u);
    if (p.scale_ub) bits = __float_as_uint(fminf(__uint_as_float(bits), *p.scale_ub));
    if (p.granularity == GK_PER_1X32) {
        const uint32_t largest = __float_as_uint(p.largest);
        const int code =
            (int)((bits + 0x7fffffu - (largest & 0x7fffffu)) >> 23) - (int)(largest >> 23) + 127;
        return __uint_as_float((uint32_t)max(code, 1) << 23);
    }
    const float amax = __uint_as_float(bits), near = amax * p.inverse_largest;
    return fmaxf(__fmaf_rn(-__fmaf_rn(near, p.largest, -amax), p.inverse_largest, near), 0x1p-126f);
}

/* The scale of a block, computed or given. writes: this thread stores it. */
__device__ __forceinline__ float scale_at(const Params &p, int64_t block, uint32_t bits,
                                          bool writes) {
    if (p.given)
        return p.scale_e8m0 ? e8m0_to_f32(((const uint8_t *)p.given)[block])
                            : ((const float *)p.given)[block];
    const float scale = scale_of(p, bits);
    if (writes) {
        if (p.scale_e8m0)
            ((uint8_t *)p.scale)[block] = (uint8_t)f32_to_e8m0(scale);
        else
            ((float *)p.scale)[block] = scale;
    }
    return scale;
}

/* ---- 3. codes -------------------------------------------------------------------------------- */
/* Computes x / scale. shift is 0 if the scale is a power of two. If the scale is so small or
 * large that 1 / scale or a remainder would leave the normal numbers, both scale and x are first
 * multiplied by a power of two. A value that then overflows saturates; one that then is rounded
 * has code 0. */
struct Quotient {
    float scale, inverse, shift;
    static __device__ __forceinline__ Quotient by(float s) {
        const float size = fabsf(s), shift = size < 0x1p-60f  ? 0x1p100f
                                             : size > 0x1p60f ? 0x1p-100f
                                                              : 1.f;
        s *= shift;
        return {size == INFINITY ? 0.f : s, __frcp_rn(s), shift};
    }
    /* For a power of two computed from amax, whose inverse has the exponent 254 - e; or NaN. */
    static __device__ __forceinline__ Quotient by_power(float s) {
        return {s, s == s ? __uint_as_float(0x7f000000u - __float_as_uint(s)) : s, 0.f};
    }
    __device__ __forceinline__ float better(float x, float near) const {
        /* Computed as -(near scale - x): with x - near scale, -0 would become 0. */
        return __fmaf_rn(-__fmaf_rn(near, scale, -x), inverse, near);
    }
    /* plain: no quotient overflows, or the scale is a power of two. The shorter code serves
     * scales that cover few values. */
    template <class V>
    __device__ __forceinline__ void of(const V &values, float (&q)[VEC], bool plain) const {
#pragma unroll
        for (int i = 0; i < VEC; ++i) q[i] = values.get(i);
        if (shift != 1.f)
#pragma unroll
            for (int i = 0; i < VEC; ++i) q[i] *= plain && shift == 0 ? inverse : shift;
        if (plain) {
            if (shift == 0) return;
#pragma unroll
            for (int i = 0; i < VEC; ++i) q[i] = better(q[i], q[i] * inverse);
            return;
        }
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            const float near = q[i] * inverse;
            q[i] = fabsf(near) <= 3e38f ? better(q[i], near) : near; /* keep infinities and NaN */
        }
    }
};

/* Four codes. A NaN has code 0 in int8. */
template <class Codes>
__device__ __forceinline__ uint32_t four_codes(gk_dtype dtype, const float *q) {
    if (dtype != GK_I8) return codes_x4<Codes>(dtype == GK_E4M3 ? GK_E4M3 : GK_E5M2, q);
    const uint32_t low = __byte_perm(cvt_rni_s8(q[0]), cvt_rni_s8(q[1]), 0x0040),
                   high = __byte_perm(cvt_rni_s8(q[2]), cvt_rni_s8(q[3]), 0x0040);
    return __byte_perm(low, high, 0x5410);
}

template <class Codes, class V>
__device__ __forceinline__ void store_codes(const Params &p, uint8_t *to, int left, const V &values,
                                            const Quotient &by, bool plain = false) {
    if (left <= 0) return;
    float q[VEC];
    by.of(values, q, plain);
    const uint2 codes =
        make_uint2(four_codes<Codes>(p.dtype, q), four_codes<Codes>(p.dtype, q + 4));
    if (p.wide) {
        *(uint2 *)to = codes;
    } else {
#pragma unroll
        for (int i = 0; i < VEC; ++i)
            if (i < left) to[i] = (uint8_t)((i < 4 ? codes.x : codes.y) >> 8 * (i % 4));
    }
}

} // namespace

#endif
