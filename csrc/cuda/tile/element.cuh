/* element.cuh: the dtypes of tensors and the type that sums of them are made in: float, or double for float64. */
#ifndef GPUKERN_CUDA_ELEMENT_CUH
#define GPUKERN_CUDA_ELEMENT_CUH

#include "../../gpukern.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <class T> struct Element;
template <> struct Element<float> {
    typedef float wide;
    static constexpr gk_dtype dtype = GK_F32;
};
template <> struct Element<double> {
    typedef double wide;
    static constexpr gk_dtype dtype = GK_F64;
};
template <> struct Element<__nv_bfloat16> {
    typedef float wide;
    static constexpr gk_dtype dtype = GK_BF16;
};
template <> struct Element<__half> {
    typedef float wide;
    static constexpr gk_dtype dtype = GK_F16;
};

__device__ __forceinline__ float to_wide(float x) { return x; }
__device__ __forceinline__ double to_wide(double x) { return x; }
__device__ __forceinline__ float to_wide(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_wide(__half x) { return __half2float(x); }

/* To nearest even. */
template <class T> __device__ __forceinline__ T from_wide(typename Element<T>::wide x) { return x; }
template <> __device__ __forceinline__ __nv_bfloat16 from_wide<__nv_bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}
template <> __device__ __forceinline__ __half from_wide<__half>(float x) { return __float2half_rn(x); }

#endif
