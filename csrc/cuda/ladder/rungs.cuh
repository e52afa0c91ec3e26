/* rungs.cuh: what the rungs share: the call, and the name of each launcher. */
#ifndef GPUKERN_CUDA_LADDER_RUNGS_CUH
#define GPUKERN_CUDA_LADDER_RUNGS_CUH

#include "../host/launch.cuh"
#include "../tile/convert.cuh"

typedef __nv_bfloat16 bf16;

/* out [m][n] = a [m][k] b [k][n]; sizes are multiples of 8, so that rows are whole chunks of 16 bytes */
struct Product {
    const bf16 *a, *b;
    bf16 *out;
    int m, n, k;
};

typedef gk_status LadderRun(const gk_context *, const Product &);
LadderRun ladder_naive, ladder_coalesced, ladder_shared, ladder_registers, ladder_vectorised, ladder_mma;
LadderRun ladder_column, ladder_warp_tile, ladder_wmma, ladder_double_buffer;
LadderRun ladder_wgmma, ladder_cluster, ladder_persistent, ladder_overlap, ladder_raster;

#endif
