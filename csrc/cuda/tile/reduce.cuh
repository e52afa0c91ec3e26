// SPDX-License-Identifier: BSD-3-Clause
// reduce: sums and maxima across lanes. All 32 lanes call it together. Each lane of a group gets
// the group's result, with the same bits in every lane.
//
//   warp   all 32 lanes
//   quad   lanes 4i .. 4i+3: they hold one row of an accumulator
//   octet  lanes i, i+4, .. i+28: they hold one column of an accumulator
#ifndef GPUKERN_TILE_REDUCE_CUH
#define GPUKERN_TILE_REDUCE_CUH

// Butterflies over the lane bits FROM, 2 FROM and so on below TO. After each, both lanes of a
// pair agree.
template <int FROM, int TO, typename T> static __device__ __forceinline__ T lanes_sum(T x) {
#pragma unroll
    for (int bit = FROM; bit < TO; bit *= 2) x += __shfl_xor_sync(0xffffffffu, x, bit);
    return x;
}

// The larger of two; NaN only if both are NaN, as fmaxf.
static __device__ __forceinline__ float lanes_max2(float a, float b) { return fmaxf(a, b); }
static __device__ __forceinline__ double lanes_max2(double a, double b) { return fmax(a, b); }
static __device__ __forceinline__ int lanes_max2(int a, int b) { return max(a, b); }

template <int FROM, int TO, typename T> static __device__ __forceinline__ T lanes_max(T x) {
#pragma unroll
    for (int bit = FROM; bit < TO; bit *= 2)
        x = lanes_max2(x, __shfl_xor_sync(0xffffffffu, x, bit));
    return x;
}

template <typename T> static __device__ __forceinline__ T warp_sum(T x) {
    return lanes_sum<1, 32>(x);
}
template <typename T> static __device__ __forceinline__ T warp_max(T x) {
    return lanes_max<1, 32>(x);
}
template <typename T> static __device__ __forceinline__ T quad_sum(T x) {
    return lanes_sum<1, 4>(x);
}
template <typename T> static __device__ __forceinline__ T quad_max(T x) {
    return lanes_max<1, 4>(x);
}
template <typename T> static __device__ __forceinline__ T octet_sum(T x) {
    return lanes_sum<4, 32>(x);
}
template <typename T> static __device__ __forceinline__ T octet_max(T x) {
    return lanes_max<4, 32>(x);
}

#endif
