/* score.cuh: what becomes of scale * q k before the softmax: softcap, then ALiBi.
 *   s = cap tanh(scale qk / cap) - slope |i + diagonal - j|
 * Kernels work in log2 units: weights are exp2(s log2(e) - m). */
#ifndef GPUKERN_CUDA_SCORE_CUH
#define GPUKERN_CUDA_SCORE_CUH

#include "problem.cuh"

constexpr float LOG2_E = 1.4426950408889634f;

struct Score {
    float scale;   /* of qk, natural units */
    float softcap; /* 0 = off */
    float slope;   /* of this head, 0 = off */
    int position0; /* row i stands at position i + position0 */
};

__device__ __forceinline__ Score score_of(const Problem &p, const Sequence &s, int b, int head) {
    return {(float)p.rules.scale, (float)p.rules.softcap, slope_of<float>(p.rules, b, head), span_clamp(s.diagonal)};
}

/* tanh through one exponential: exact to 1e-7 of 1, which is what a score of size softcap needs. */
__device__ __forceinline__ float score_tanh(float x) {
    return 1 - __fdividef(2.f, exp2f(2 * LOG2_E * x) + 1); /* the quotient by infinity is 0 */
}

/* qk -> s, natural units. */
__device__ __forceinline__ float score(const Score &x, float qk, int i, int j) {
    float s = qk * x.scale;
    if (x.softcap > 0) s = x.softcap * score_tanh(__fdividef(s, x.softcap));
    if (x.slope != 0) s -= x.slope * fabsf((float)(i + x.position0 - j));
    return s;
}

#endif
