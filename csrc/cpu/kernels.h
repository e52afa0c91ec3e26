/* SPDX-License-Identifier: BSD-3-Clause */
/* kernels.h: what csrc/cpu/ offers to dispatch.c: one table of instances per op. An instance is
 * a kernel for one dtype and one instruction set (ISA). The files in isa/ are compiled once per
 * ISA; each exports its kernel under the ISA's suffix, and tables.c lists them. The second half
 * of this file is the interface of the gemm kernels. */
#ifndef GPUKERN_CPU_KERNELS_H
#define GPUKERN_CPU_KERNELS_H

#include "../core/gemm_problem.h"
#include "../core/internal.h"
#include "../core/op.h"

/* features.c: instruction sets, smallest first. A machine has all sets up to its best one, if the
 * compiler knew them. */
typedef enum gk_isa {
    GK_ISA_BASE = 0,
    GK_ISA_AVX2,
    GK_ISA_AVX512,
    GK_ISA_AVX512BF16,
    GK_ISA_AMX_EMULATED, /* only by name: AMX's kernels on tiles in plain C, so that machines
                            without AMX can test them */
    GK_ISA_AMX,
    GK_NUM_ISAS
} gk_isa;
extern const char *const gk_isa_names[GK_NUM_ISAS];
bool gk_cpu_has(gk_isa isa);
/* True if streams should be prefetched into the L1 even if only the L2 holds them. Zen 5 drops
 * some prefetches into the L2; Zen 3 and 4 get slower. */
bool gk_cpu_fetches_near(void);
/* True if the machine has VPDPBUSD in 512-bit vectors (wide, AVX-512 VNNI) or in 256-bit vectors
 * (AVX-VNNI). */
bool gk_cpu_multiplies_quads(bool wide);
/* True if a test product on tiles has the right values. */
bool gk_tiles_multiply_amx(void), gk_tiles_multiply_amx_emulated(void);

/* A kernel. `args` is the op's argument struct of gpukern.h, already checked. plan fills
 * workspace_bytes, tile, tasks, chunks and the kernel's own part, or returns false if it does
 * not serve the call. run receives the same arguments, perhaps at another address, and a
 * workspace of the planned size. */
typedef struct gk_cpu_kernel {
    bool (*plan)(const gk_context *ctx, const void *args, gk_plan *plan);
    void (*run)(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace);
} gk_cpu_kernel;

typedef struct gk_cpu_instance {
    const char *name; /* stem, "gemm_packed"; the full name adds dtype and ISA */
    gk_dtype dtype;
    gk_isa isa;
    const gk_cpu_kernel *kernel; /* the first instance of a table that plans a call serves it */
} gk_cpu_instance;

/* The register tile of an ISA: C[m][n] (+)= A B for m <= mr rows and nv <= 2 vectors of w
 * columns. A cell is 32 bits: one float32, or a pair of bfloat16 that are neighbours along k
 * (`pair` is the number of values in a cell).
 *
 *  a panel: a[kc * step + i]     a rows: a[i * step + kc]
 *  b[kc * ldb + lane]            c[i * ldc + lane] */
typedef void (*gk_ukr_fn)(int64_t cells, const void *a, int64_t step, const void *b, int64_t ldb,
                          float *c, int64_t ldc, bool accumulate);

/* The epilogue of a product: out = activation(alpha acc + beta c + bias), for each element.
 * Pointers point to the element of row 0, column 0. */
typedef struct gk_gemm_epilogue {
    float alpha, beta;
    const void *bias, *c; /* NULL = none */
    gk_dtype bias_dtype, c_dtype, out_dtype;
    int64_t bias_stride, c_row, c_col; /* in elements; 0 broadcasts */
    void *out, *preact;                /* preact NULL = not wanted */
    int64_t out_row, preact_row;       /* in elements; columns are contiguous */
    gk_activation activation;
} gk_gemm_epilogue;

/* The part of gemm that each ISA provides (gemm_ukr.c, gemm_amx.c). */
typedef struct gk_gemm_isa {
    int w, mr, pair;
    const gk_ukr_fn *ukr_panel, *ukr_rows; /* [nv - 1][m - 1] */
    /* dst[ceil(k / pair)][width]: lanes contiguous, zeros beyond `lanes` and beyond k; may write
     * w cells past the end */
    void (*pack_panel)(void *dst, int64_t width, const void *src, gk_dtype dtype, int64_t s_lane,
                       int64_t s_k, int64_t lanes, int64_t k);
    /* dst[ceil(lanes / (2 w))][ceil(k / pair)][2 w]: consecutive panels */
    void (*pack_panels)(void *dst, const void *src, gk_dtype dtype, int64_t s_lane, int64_t s_k,
                        int64_t lanes, int64_t k);
    /* dst[rows][ld]: k contiguous, zeros up to a whole vector; ld is a multiple of w */
    void (*pack_rows)(void *dst, int64_t ld, const void *src, gk_dtype dtype, int64_t row_stride,
                      int64_t rows, int64_t k);
    void (*store)(const gk_gemm_epilogue *e, const float *acc, int64_t ld, int64_t rows,
                  int64_t cols);
    const struct gk_gemm_blocks *blocks; /* blocks.h */
    /* Only on AMX, otherwise NULL and 0. pack_rows_any packs a in rows whatever its strides; all
     * strips but the last are then whole and sums are not split. end_task is called at the end
     * of each task, on its thread. k is padded to a multiple of k_cells cells. */
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

/* True if gemm_skinny serves the call: M is small, so the time goes into reading b once. */
bool gk_gemm_is_skinny(const gk_gemm_problem *p);

/* The problem of core/gemm_problem.h as the CPU's kernels take it: columns of out and preact are
 * contiguous, and a product with one column is exchanged to one with one row. */
gk_gemm_problem gk_cpu_gemm_problem(const gk_gemm_args *args);
/* The operands of batch entry i, whose elements have this dtype, and the epilogue at its first
 * element. */
void gk_gemm_at(const gk_gemm_problem *p, gk_dtype dtype, int64_t i, const char **a, const char **b,
                gk_gemm_epilogue *e);
gk_gemm_epilogue gk_epilogue_at(const gk_gemm_epilogue *e, int64_t row, int64_t col);

/* tables.c: the instances of an op, best ISA first. */
const gk_cpu_instance *gk_cpu_instances(gk_op op, int *num_instances);

#endif
