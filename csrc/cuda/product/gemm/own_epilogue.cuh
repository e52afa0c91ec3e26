/* SPDX-License-Identifier: BSD-3-Clause */
/* own_epilogue.cuh: how an epilogue of the user's (docs/epilogue.md) reaches the kernels of gemm.
 *
 * A library of such an epilogue compiles the kernels of gemm_sm90a, gemm_pingpong_sm90a and
 * gemm_sm80 once more, with GPUKERN_EPILOGUE (csrc/epilogue/call.h). The problem that a kernel gets
 * then ends with the epilogue, and `finish` takes the place of the activation. The planners see a
 * relu, an epilogue of few instructions.
 *
 * In libgpukern none of this exists: the two types below are the plain ones. */
#ifndef GPUKERN_CUDA_GEMM_OWN_EPILOGUE_CUH
#define GPUKERN_CUDA_GEMM_OWN_EPILOGUE_CUH

#include "problem.cuh"

#ifdef GPUKERN_EPILOGUE

#include "../../../epilogue/call.h"

constexpr bool OWN_EPILOGUE = true;
struct OwnProblem : GemmProblem {
    Epilogue own;
};
struct OwnPlace : GemmPlace {
    Epilogue own;
};
inline OwnProblem own_problem(const GemmProblem &p, const void *args) {
    OwnProblem to;
    static_cast<GemmProblem &>(to) = p;
    to.own = static_cast<const EpilogueCall *>((const gk_gemm_args *)args)->epilogue;
    return to;
}
__device__ __forceinline__ OwnPlace gemm_place(const OwnProblem &p, int64_t batch) {
    OwnPlace at;
    static_cast<GemmPlace &>(at) = gemm_place(static_cast<const GemmProblem &>(p), batch);
    at.own = p.own;
    return at;
}

#else

constexpr bool OWN_EPILOGUE = false;
typedef GemmProblem OwnProblem;
typedef GemmPlace OwnPlace;
inline const GemmProblem &own_problem(const GemmProblem &p, const void *) { return p; }

#endif

/* x: an OwnProblem or an OwnPlace. */
template <class Owner>
__device__ __forceinline__ float own_finish(const Owner &x, float sum, int row, int column) {
    return x.own.finish(sum, row, column);
}

#endif
