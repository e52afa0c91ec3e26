/* skinny.cuh: what the two kernels that stream weights past few tokens plan alike: which operand holds the tokens, and how
 * many tiles a block takes. Host code. */
#ifndef GPUKERN_CUDA_GEMM_SKINNY_CUH
#define GPUKERN_CUDA_GEMM_SKINNY_CUH

#include "../host/launch.cuh"
#include "problem.cuh"

enum SkinnyKey { /* of a row: the most tokens, the most weights a tile, bytes of shared memory */
    SKINNY_KEY_TOKENS,
    SKINNY_KEY_ROWS,
    SKINNY_KEY_SMEM
};

/* The call's problem or its transposed product, where fits(p) says that the kernel serves it; the one with fewer tokens. */
template <class Fits>
inline bool skinny_problem(const gk_gemm_args *args, int64_t most_tokens, const Fits &fits, GemmProblem *p) {
    *p = gemm_problem_of(args);
    bool good = fits(*p);
    if (p->n <= most_tokens && (!good || p->n < p->m)) {
        const GemmProblem swapped = gemm_swapped(*p);
        if (fits(swapped)) *p = swapped, good = true;
    }
    return good;
}

/* Blocks: equally many tiles each, at most one block an SM. */
inline int64_t skinny_blocks(const gk_context *ctx, const GemmProblem &p) {
    const int64_t tiles = (int64_t)p.tiles_n * p.batch;
    return gk_max_i64(1, gk_ceil_div(tiles, gk_max_i64(1, gk_ceil_div(tiles, gk_gpu_of(ctx->index)->num_sms))));
}

inline bool skinny_serves(const gk_cuda_row *row, const gk_context *ctx, const GemmProblem &p) {
    return p.m <= row->key[SKINNY_KEY_TOKENS] && p.group <= row->key[SKINNY_KEY_ROWS] &&
           smem_fits(ctx, row->key[SKINNY_KEY_SMEM]);
}

/* The first of a table's rows that serves a planned problem. */
inline const gk_cuda_row *skinny_row(const gk_cuda_row *rows, int num_rows, const gk_context *ctx, gk_dtype dtype,
                                     const GemmProblem &p) {
    for (const gk_cuda_row *row = rows; row < rows + num_rows; ++row)
        if (row->dtype == dtype && skinny_serves(row, ctx, p)) return row;
    return NULL;
}

inline void skinny_explain(const gk_cuda_row *row, const gk_context *ctx, const GemmProblem &p, int step,
                           gk_explanation *out) {
    out->tile[0] = row->key[SKINNY_KEY_TOKENS], out->tile[1] = p.group, out->tile[2] = step;
    out->tasks = (int64_t)p.tiles_n * p.batch;
    out->waves = (double)gk_ceil_div(out->tasks, skinny_blocks(ctx, p)); /* tiles that a block takes in turn */
}

#endif
