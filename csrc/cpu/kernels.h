/* SPDX-License-Identifier: BSD-3-Clause */
/* kernels.h: what the CPU room offers to dispatch.c: one table per op, one instance per dtype, ISA
 * and kernel.
 * The kernels' files are compiled once per ISA; each exports its kernel under the ISA's suffix
 * (tables.c lists them).
 */
#ifndef GPUKERN_CPU_KERNELS_H
#define GPUKERN_CPU_KERNELS_H

#include "../core/internal.h"
#include "../core/op.h"

/* features.c: instruction sets, worst first; a machine has a prefix of the list that its compiler
 * also knew. */
typedef enum gk_isa {
    GK_ISA_BASE = 0,
    GK_ISA_AVX2,
    GK_ISA_AVX512,
    GK_ISA_AVX512BF16,
    GK_ISA_AMX_EMULATED, /* by name alone: AMX's kernels on tiles in plain C, for the tests of
                            machines without it */
    GK_ISA_AMX,
    GK_NUM_ISAS
} gk_isa;
extern const char *const gk_isa_names[GK_NUM_ISAS];
bool gk_cpu_has(gk_isa isa);
/* Whether a stream is better prefetched into the L1 than into the L2, whatever fits there: Zen 5,
 * which loses some of the latter. Zen 3 and 4 are slower by it. */
bool gk_cpu_fetches_near(void);
/* Whether it has VPDPBUSD in vectors of 512 bits, AVX-512 VNNI, or of 256, AVX-VNNI. */
bool gk_cpu_multiplies_quads(bool wide);
/* a product of tiles has the right values */
bool gk_tiles_multiply_amx(void), gk_tiles_multiply_amx_emulated(void);

/* A kernel: `args` is the op's argument struct of gpukern.h, already checked. plan fills
 * workspace_bytes, tile, tasks, chunks and the kernel's own part; false: it does not serve the
 * call. run is given the same args, whose address may be another, and workspace of the planned
 * size. */
typedef struct gk_cpu_kernel {
    bool (*plan)(const gk_context *ctx, const void *args, gk_plan *plan);
    void (*run)(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace);
} gk_cpu_kernel;

typedef struct gk_cpu_instance {
    const char *name; /* stem: "gemm_packed"; the full name adds dtype and ISA */
    gk_dtype dtype;
    gk_isa isa;
    const gk_cpu_kernel *kernel; /* the first of a table that plans a call serves it */
} gk_cpu_instance;

/* The register tile of an ISA: C[m][n] (+)= A B, m <= mr rows and nv <= 2 vectors of w columns. A
 * cell is 32 bits: one float32 or two bfloat16 that are neighbours along k ("pair" values of k per
 * cell).
 *   a panel: a[kc * step + i]     a rows: a[i * step + kc]     b[kc * ldb + lane]     c[i * ldc + lane] */
typedef void (*gk_ukr_fn)(int64_t cells, const void *a, int64_t step, const void *b, int64_t ldb,
                          float *c, int64_t ldc, bool accumulate);

/* What happens to one element of a product on its way out; pointers stand at the element of row 0,
 * column 0. */
typedef struct gk_gemm_epilogue {
    float alpha, beta;
    const void *bias, *c; /* NULL = none */
    gk_dtype bias_dtype, c_dtype, out_dtype;
    int64_t bias_stride, c_row, c_col; /* elements; 0 broadcasts */
    void *out, *preact;                /* preact NULL = not wanted */
    int64_t out_row, preact_row;       /* elements; columns are dense */
    gk_activation activation;
} gk_gemm_epilogue;

/* What gemm.c needs of an ISA (gemm_ukr.c). */
typedef struct gk_gemm_isa {
    int w, mr, pair;
    const gk_ukr_fn *ukr_panel, *ukr_rows; /* [nv - 1][m - 1] */
    /* dst[ceil(k / pair)][width]: lanes side by side, zero past `lanes` and past k; w cells to
     * spare behind the end */
    void (*pack_panel)(void *dst, int64_t width, const void *src, gk_dtype dtype, int64_t s_lane,
                       int64_t s_k, int64_t lanes, int64_t k);
    /* dst[ceil(lanes / (2 w))][ceil(k / pair)][2 w]: panels one behind the other */
    void (*pack_panels)(void *dst, const void *src, gk_dtype dtype, int64_t s_lane, int64_t s_k,
                        int64_t lanes, int64_t k);
    /* dst[rows][ld]: k side by side, zero up to a whole vector; ld is a multiple of w */
    void (*pack_rows)(void *dst, int64_t ld, const void *src, gk_dtype dtype, int64_t row_stride,
                      int64_t rows, int64_t k);
    void (*store)(const gk_gemm_epilogue *e, const float *acc, int64_t ld, int64_t rows,
                  int64_t cols);
    const struct gk_gemm_blocks *blocks; /* blocks.h */
    /* What AMX has besides, NULL and 0 elsewhere. pack_rows_any: a in rows whatever its strides;
     * strips are whole then but the last, sums are not cut. end_task: at the end of each task, on
     * its thread. k_cells: k is padded to so many cells. */
    void (*pack_rows_any)(void *dst, int64_t ld, const void *src, gk_dtype dtype, int64_t s_row,
                          int64_t s_k, int64_t rows, int64_t k);
    void (*end_task)(void);
    int k_cells;
} gk_gemm_isa;

/* gemm.c: the packed product for one ISA. */
bool gk_gemm_packed_plan(const gk_context *ctx, const gk_gemm_args *args, const gk_gemm_isa *isa,
                         gk_plan *plan);
void gk_gemm_packed_run(const gk_context *ctx, const gk_gemm_args *args, const gk_gemm_isa *isa,
                        const gk_plan *plan, void *workspace);

/* A gemm as the kernels see it: batch dimensions that can be merged into rows are, broadcasts have
 * stride 0. */
typedef struct gk_gemm_problem {
    int64_t m, n, k, batch;
    int ndim; /* batch dimensions left */
    int64_t shape[GK_MAX_DIMS], a_batch[GK_MAX_DIMS], b_batch[GK_MAX_DIMS], c_batch[GK_MAX_DIMS],
        out_batch[GK_MAX_DIMS], preact_batch[GK_MAX_DIMS];
    int64_t a_m, a_k, b_k, b_n;
    bool swapped; /* a and b changed places */
    gk_gemm_epilogue epilogue;
} gk_gemm_problem;

/* True where gemm_skinny serves the call: small M, so that reading b once is what costs. */
bool gk_gemm_is_skinny(const gk_gemm_problem *p);

gk_gemm_problem gk_gemm_problem_of(const gk_gemm_args *args);
/* The operands of batch i, and the epilogue placed at its first element. */
void gk_gemm_at(const gk_gemm_args *args, const gk_gemm_problem *p, int64_t i, const char **a,
                const char **b, gk_gemm_epilogue *e);
gk_gemm_epilogue gk_epilogue_at(const gk_gemm_epilogue *e, int64_t row, int64_t col);

/* tables.c: rows of an op, best ISA first. */
const gk_cpu_instance *gk_cpu_instances(gk_op op, int *num_rows);

#endif
