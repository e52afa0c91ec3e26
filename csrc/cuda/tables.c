/* tables.c: every CUDA kernel file by op, best first; each file ends with its own table of instances. dispatch.c takes the
 * first row that serves a call on the device's architecture. */
#include "kernels.h"

extern const gk_cuda_table gk_gemm_act_bwd_table, gk_attn_merge_table;

static const gk_cuda_table *const gemm_act_bwd[] = {&gk_gemm_act_bwd_table};
static const gk_cuda_table *const attn_merge[] = {&gk_attn_merge_table};

const gk_cuda_table *const *gk_cuda_tables(gk_op op, int *num_tables) {
    switch (op) {
#define CASE(OP, tables) \
    case OP: *num_tables = (int)(sizeof tables / sizeof tables[0]); return tables;
        CASE(GK_OP_GEMM_ACT_BWD, gemm_act_bwd)
        CASE(GK_OP_ATTN_MERGE, attn_merge)
    default: *num_tables = 0; return NULL;
    }
}
