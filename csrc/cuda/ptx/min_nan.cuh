// SPDX-License-Identifier: BSD-3-Clause
// min_nan: the smaller of two floats. Any thread. Checked against PTX ISA 9.0.
#ifndef GPUKERN_PTX_MIN_NAN_CUH
#define GPUKERN_PTX_MIN_NAN_CUH

// min.NaN.f32, sm_80: NaN if one of the two is NaN.
static __device__ __forceinline__ float min_nan(float a, float b) {
    float y;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

#endif
