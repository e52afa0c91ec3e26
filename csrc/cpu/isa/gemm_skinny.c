/* SPDX-License-Identifier: BSD-3-Clause */
/* gemm_skinny: out = activation(alpha a b + beta c + bias) for small M, where the time goes into
 * reading b once. Compiled once per ISA; tables.c lists it before gemm_packed.
 *
 *  a [M, K]   b [K, N], contiguous along n or along k   out [M, N]
 *
 * A task owns a range of columns over all of K, so nothing is reduced across tasks. There are
 * two forms:
 *  across  (b contiguous along n, "NN")  for KB rows of b:
 *                                        C[M][columns] += a[M][KB] b[KB][columns]
 *  along   (b contiguous along k, "NT")  dot products of TM rows of a and TN columns of b,
 *                                        lanes along k
 *
 * across keeps C in a float32 block. It reads b in place if b is float32 or M is very small; a
 * task's columns are then long enough for the hardware prefetcher. Otherwise KB rows of b are
 * packed at a time (16-bit values are paired or converted), and the next rows are prefetched
 * meanwhile.
 *
 * along reads both operands in place and adds up the lanes at the end. It runs over k in chunks,
 * so that the TN columns of b stay in the L1 for all rows of a.
 *
 * Workspace per worker: the C block and KB packed rows of b and of a (across); lane sums of TN
 * columns (along). Not served: larger M (gemm_packed), b with both strides above 1. */
#include "../blocks.h"
#include "tile.h"

/* ---- across: lanes along n ------------------------------------------------------------------- */
typedef struct plan {
    gk_gemm_problem p;
    bool along, in_place;
    int64_t nb, n_blocks, kb;
    int64_t acc_cells, b_cells, a_cells; /* of a worker's workspace, in cells of 4 bytes */
} plan;
GK_PLAN_HOLDS(plan);

enum {
    TM = W == 16 ? 4 : 3,
    TN = W == 16 ? 6 : 4
}; /* 24 or 12 accumulators and their operands fit the registers */
enum {
    SMALL_M = 4,
    FEW_VECTORS = W == 16 ? 4 : 2
}; /* 16 or 8 accumulators */

static plan plan_of(const gk_context *ctx, const gk_gemm_args *args, const gk_gemm_problem *p) {
    const gk_skinny_blocks *bl = &SYM(gk_skinny_blocks);
    plan x;
    x.p = *p;
    x.along = x.p.b_n != 1;
    x.in_place =
        !x.along && (args->a.dtype == GK_F32 || (x.p.m <= bl->place_rows && x.p.n >= bl->long_row));
    const int64_t unit = x.along ? TN : NR,
                  tasks_per_thread = x.in_place ? 1 : bl->tasks_per_thread;
    const int64_t per_thread = gk_ceil_div(x.p.n, tasks_per_thread * gk_num_threads(ctx));
    const bool few = x.p.m <= bl->small_m;
    /* A chunk of a column has a fixed number of bytes. blocks.h counts kb_along in float32
     * values, or in pairs where PAIR is 2; 16-bit values without pairs are half as long. */
    const int64_t along_kb = bl->kb_along * (PAIR == 1 && args->a.dtype != GK_F32 ? 2 : 1);
    x.kb = x.along      ? along_kb
           : x.in_place ? (few ? bl->place_few : bl->place_many)
                        : (few ? bl->kb_few : bl->kb_many);
    const int64_t nb_max = x.in_place ? bl->place_nb : bl->in_flight / (x.along ? TN : x.kb);
    x.nb = gk_round_up(gk_clamp_i64(per_thread, bl->nb_min, nb_max), unit);
    x.n_blocks = gk_ceil_div(x.p.n, x.nb);
    if (x.along) {
        x.acc_cells = gk_round_up(gk_round_up(x.p.m, TM) * (TN * W + 2 * W), 16);
        x.b_cells = x.a_cells = 0;
    } else {
        x.acc_cells = x.p.m * x.nb;
        x.b_cells = gk_round_up(x.nb * cells_of(x.kb) + W, 16);
        x.a_cells = gk_round_up(x.p.m * gk_round_up(cells_of(x.kb), W) + W, 16);
    }
    return x;
}

static int64_t num_tasks(const plan *x) { return x->p.m && x->p.n ? x->p.batch * x->n_blocks : 0; }
static size_t worker_bytes(const plan *x) {
    return 4 * (size_t)gk_round_up(x->acc_cells + x->b_cells + x->a_cells, 16);
}

/* c[M][FEW_VECTORS W] (+)= a[M][k] b[k][FEW_VECTORS W]. 16-bit rows of b are paired or converted
 * in registers; cells of a are broadcast. Sums run in the same order as in the register tile,
 * because the tasks decide which columns come here and that must not change bits. */
INLINE void small_m(const int M, gk_dtype dtype, int64_t k, const cell *a, int64_t a_row,
                    int64_t a_cell, const char *b, int64_t b_row_bytes, float *c, int64_t ldc,
                    bool accumulate) {
    vf acc[SMALL_M][FEW_VECTORS];
#pragma GCC unroll 4
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
        for (int v = 0; v < FEW_VECTORS; ++v) acc[i][v] = vf_set1(0);
    for (int64_t cells = cells_of(k), j = 0; j < cells; ++j) {
        const char *row0 = b + j * PAIR * b_row_bytes,
                   *row1 = PAIR == 2 && 2 * j + 1 < k ? row0 + b_row_bytes : NULL;
        vc x[FEW_VECTORS];
#pragma GCC unroll 2
        for (int v = 0; v < FEW_VECTORS; v += 2) vc_load2_across_k(row0, row1, dtype, v * W, x + v);
#pragma GCC unroll 4
        for (int i = 0; i < M; ++i) {
            const vc ai = vc_set1(a[i * a_row + j * a_cell]);
#pragma GCC unroll 4
            for (int v = 0; v < FEW_VECTORS; ++v) acc[i][v] = vc_dot(acc[i][v], ai, x[v]);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
        for (int v = 0; v < FEW_VECTORS; ++v) {
            float *p = c + i * ldc + v * W;
            vf_store(p, accumulate ? acc[i][v] + vf_load(p) : acc[i][v]);
        }
}

typedef void (*small_m_fn)(int64_t k, const cell *a, int64_t a_row, int64_t a_cell, const char *b,
                           int64_t b_row_bytes, float *c, int64_t ldc, bool accumulate);
#define FEW(dt, M)                                                                      \
    static void few_##dt##_##M(int64_t k, const cell *a, int64_t a_row, int64_t a_cell, \
                               const char *b, int64_t b_row, float *c, int64_t ldc,     \
                               bool accumulate) {                                       \
        small_m(M, dt, k, a, a_row, a_cell, b, b_row, c, ldc, accumulate);              \
    }
#define FEW_1_TO_4(X, dt) X(dt, 1) X(dt, 2) X(dt, 3) X(dt, 4)
#define FEW_NAME(dt, M) few_##dt##_##M,
FEW_1_TO_4(FEW, GK_BF16)
static const small_m_fn few_bf16[SMALL_M] = {FEW_1_TO_4(FEW_NAME, GK_BF16)};
#if PAIR == 1
FEW_1_TO_4(FEW, GK_F16)
static const small_m_fn few_f16[SMALL_M] = {FEW_1_TO_4(FEW_NAME, GK_F16)};
#else
#define few_f16 few_bf16
#endif

static void across(const plan *x, gk_dtype dtype, const char *a, const char *b, int64_t cols,
                   float *acc, cell *b_pack, cell *a_pack) {
    const gk_gemm_problem *p = &x->p;
    const int64_t es = dtype == GK_F32 ? 4 : 2, a_ld = gk_round_up(cells_of(x->kb), W);
    const int64_t step = dtype == GK_F32 ? NR : FEW_VECTORS * W;
    const int64_t whole = x->in_place ? cols / step * step : 0; /* columns that are read in place */
    const small_m_fn *few = dtype == GK_F16 ? few_f16 : few_bf16;
    const bool a_rows = p->a_k == 1;
    for (int64_t k0 = 0; k0 < p->k; k0 += x->kb) {
        const int64_t kn = gk_min_i64(x->kb, p->k - k0), cells = cells_of(kn);
        const char *bk = b + es * k0 * p->b_k, *ak = a + es * k0 * p->a_k;
        if (a_rows)
            pack_rows(a_pack, a_ld, ak, dtype, p->a_m, p->m, kn);
        else
            pack_panel(a_pack, p->m, ak, dtype, p->a_m, p->a_k, p->m, kn);
        if (whole < cols)
            pack_panels(b_pack + whole * cells, bk + es * whole, dtype, 1, p->b_k, cols - whole,
                        kn);
        if (!x->in_place && k0 + x->kb < p->k) /* prefetch the next rows while these are used */
            for (int64_t i = 0; i < gk_min_i64(x->kb, p->k - k0 - x->kb); ++i)
                for (int64_t c = 0; c < cols * es; c += 64)
                    __builtin_prefetch(bk + es * (x->kb + i) * p->b_k + c, 0, 2);
        int64_t j = 0;
        for (; j < whole && dtype != GK_F32; j += step)
            for (int64_t i = 0; i < p->m; i += SMALL_M)
                few[gk_min_i64(SMALL_M, p->m - i) - 1](
                    kn, a_pack + (a_rows ? i * a_ld : i), a_rows ? a_ld : 1, a_rows ? 1 : p->m,
                    bk + es * j, es * p->b_k, acc + i * x->nb + j, x->nb, k0 > 0);
        for (; j < cols; j += NR) {
            const bool in_place = j < whole;
            const cell *bp = in_place ? (const cell *)(bk + es * j) : b_pack + j * cells;
            tile_product(SUM_CELLS, a_rows, p->m, gk_min_i64(NR, cols - j), cells, a_pack,
                         a_rows ? a_ld : p->m, bp, in_place ? p->b_k : NR, acc + j, x->nb, k0 > 0);
        }
    }
}

/* ---- along: lanes along k -------------------------------------------------------------------- */
/* sums[i][j] += a[i][k] b[j][k] for i < tm, j < tn, lane by lane; strides in elements */
INLINE void dots(const int tm, const int tn, gk_dtype dtype, int64_t k, const char *a, int64_t a_m,
                 const char *b, int64_t b_n, vf *sums) {
    const int64_t es = dtype == GK_F32 ? 4 : 2;
    vf s[TM][TN];
#pragma GCC unroll 8
    for (int i = 0; i < tm; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < tn; ++j) s[i][j] = sums[i * TN + j];
    int64_t c = 0;
    /* with 3 rows the halves need more than the registers */
    const bool split = VC_SPLITS && dtype != GK_F32 && tm <= 2;
    for (; split && c + 2 * W <= k; c += 2 * W) {
        vc av[TM][2];
#pragma GCC unroll 8
        for (int i = 0; i < tm; ++i) vc_load2_split_along_k(a + es * i * a_m, dtype, c, av[i]);
#pragma GCC unroll 8
        for (int j = 0; j < tn; ++j) {
            vc bv[2];
            vc_load2_split_along_k(b + es * j * b_n, dtype, c, bv);
#pragma GCC unroll 8
            for (int i = 0; i < tm; ++i)
                s[i][j] = vc_dot(vc_dot(s[i][j], av[i][0], bv[0]), av[i][1], bv[1]);
        }
    }
    /* With more rows, even and odd values are processed one after the other and b is loaded
     * twice. That takes half the conversions of whole vectors. */
    for (; VC_SPLITS && dtype == GK_BF16 && tm > 2 && c + 2 * W <= k; c += 2 * W)
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            vf av[TM];
#pragma GCC unroll 8
            for (int i = 0; i < tm; ++i) av[i] = vf_load_half(a + es * (i * a_m + c), half);
#pragma GCC unroll 8
            for (int j = 0; j < tn; ++j) {
                const vf bv = vf_load_half(b + es * (j * b_n + c), half);
#pragma GCC unroll 8
                for (int i = 0; i < tm; ++i) s[i][j] = vf_fma(av[i], bv, s[i][j]);
            }
        }
    for (; c + W * PAIR <= k; c += W * PAIR) {
        vc av[TM];
#pragma GCC unroll 8
        for (int i = 0; i < tm; ++i) av[i] = vc_load_along_k(a + es * i * a_m, dtype, c, W * PAIR);
#pragma GCC unroll 8
        for (int j = 0; j < tn; ++j) {
            vc bv = vc_load_along_k(b + es * j * b_n, dtype, c, W * PAIR);
#pragma GCC unroll 8
            for (int i = 0; i < tm; ++i) s[i][j] = vc_dot(s[i][j], av[i], bv);
        }
    }
    if (c < k) {
#pragma GCC unroll 8
        for (int j = 0; j < tn; ++j) {
            vc bv = vc_load_along_k(b + es * j * b_n, dtype, c, k - c);
#pragma GCC unroll 8
            for (int i = 0; i < tm; ++i)
                s[i][j] = vc_dot(s[i][j], vc_load_along_k(a + es * i * a_m, dtype, c, k - c), bv);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < tm; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < tn; ++j) sums[i * TN + j] = s[i][j];
}

typedef void (*dots_fn)(int64_t k, const char *a, int64_t a_m, const char *b, int64_t b_n,
                        vf *sums);
#define DOTS(dt, tm, tn)                                                                      \
    static void dots_##dt##_##tm##_##tn(int64_t k, const char *a, int64_t a_m, const char *b, \
                                        int64_t b_n, vf *s) {                                 \
        dots(tm, tn, dt, k, a, a_m, b, b_n, s);                                               \
    }
#if W == 16
#define FOR_TN(X, dt, tm) \
    X(dt, tm, 1) X(dt, tm, 2) X(dt, tm, 3) X(dt, tm, 4) X(dt, tm, 5) X(dt, tm, 6)
#define FOR_TM(X, dt) FOR_TN(X, dt, 1) FOR_TN(X, dt, 2) FOR_TN(X, dt, 3) FOR_TN(X, dt, 4)
#else
#define FOR_TN(X, dt, tm) X(dt, tm, 1) X(dt, tm, 2) X(dt, tm, 3) X(dt, tm, 4)
#define FOR_TM(X, dt) FOR_TN(X, dt, 1) FOR_TN(X, dt, 2) FOR_TN(X, dt, 3)
#endif
#define NAME(dt, tm, tn) dots_##dt##_##tm##_##tn,
FOR_TM(DOTS, GK_BF16)
static const dots_fn dots_bf16[TM * TN] = {FOR_TM(NAME, GK_BF16)};
#if PAIR == 1
FOR_TM(DOTS, GK_F32)
FOR_TM(DOTS, GK_F16)
static const dots_fn dots_f32[TM * TN] = {FOR_TM(NAME, GK_F32)};
static const dots_fn dots_f16[TM * TN] = {FOR_TM(NAME, GK_F16)};
#endif

static const dots_fn *dots_of(gk_dtype dtype) {
#if PAIR == 1
    if (dtype == GK_F32) return dots_f32;
    if (dtype == GK_F16) return dots_f16;
#endif
    (void)dtype;
    return dots_bf16;
}

static void along(const plan *x, gk_dtype dtype, const char *a, const char *b, int64_t cols,
                  const gk_gemm_epilogue *e, const gk_gemm_isa *isa, float *ws) {
    const gk_gemm_problem *p = &x->p;
    const int64_t es = dtype == GK_F32 ? 4 : 2, strips = gk_ceil_div(p->m, TM);
    const int64_t short_bytes = SYM(gk_skinny_blocks).short_bytes;
    const dots_fn *fn = dots_of(dtype);
    vf *sums = (vf *)ws;
    /* [M][W]: TN columns of C, padded to whole vectors */
    float *c = ws + strips * TM * TN * W;
    for (int64_t j = 0; j < cols; j += TN) {
        const int64_t tn = gk_min_i64(TN, cols - j);
        for (int64_t i = 0; i < strips * TM * TN; ++i) sums[i] = vf_set1(0);
        for (int64_t k0 = 0; k0 < p->k; k0 += x->kb) {
            const int64_t kn = gk_min_i64(x->kb, p->k - k0);
            const char *bk = b + es * (j * p->b_n + k0);
            /* The hardware prefetcher does not find short columns in time. Each strip prefetches
             * a share of the next TN columns. */
            const int64_t lines = gk_ceil_div(kn * es, 64);
            const int64_t next = kn * es <= short_bytes ? gk_clamp_i64(cols - j - TN, 0, TN) : 0;
            const int64_t share = gk_ceil_div(next * lines, strips);
            for (int64_t s = 0; s < strips; ++s) {
                for (int64_t n = s * share; n < gk_min_i64((s + 1) * share, next * lines); ++n)
                    __builtin_prefetch(bk + es * (TN + n / lines) * p->b_n + 64 * (n % lines), 0,
                                       2);
                const int64_t i = s * TM, tm = gk_min_i64(TM, p->m - i);
                fn[(tm - 1) * TN + tn - 1](kn, a + es * (i * p->a_m + k0), p->a_m, bk, p->b_n,
                                           sums + s * TM * TN);
            }
        }
        /* The sums are [M][TN]; W of them at a time are reduced to one vector. */
        float flat[W];
        for (int64_t i0 = 0; i0 < p->m * TN; i0 += W) {
            vf group[W];
            for (int l = 0; l < W; ++l)
                group[l] = i0 + l < strips * TM * TN ? sums[i0 + l] : vf_set1(0);
            vf_store(flat, vf_sums(group));
            for (int l = 0; l < W && i0 + l < p->m * TN; ++l)
                c[(i0 + l) / TN * W + (i0 + l) % TN] = flat[l];
        }
        gk_gemm_epilogue at = gk_epilogue_at(e, 0, j);
        isa->store(&at, c, W, p->m, tn);
    }
}

/* ---- the task and the kernel of tables.c ----------------------------------------------------- */
typedef struct job {
    const gk_gemm_args *args;
    const plan *x;
    char *workspace;
} job;

static void task(void *arg, int64_t t, int64_t worker) {
    const job *jb = arg;
    const plan *x = jb->x;
    const gk_dtype dtype = jb->args->a.dtype;
    const int64_t j0 = t % x->n_blocks * x->nb, cols = gk_min_i64(x->nb, x->p.n - j0);
    float *ws = (float *)(jb->workspace + (size_t)worker * worker_bytes(x));
    const char *a, *b;
    gk_gemm_epilogue whole, e;
    gk_gemm_at(&x->p, dtype, t / x->n_blocks, &a, &b, &whole);
    e = gk_epilogue_at(&whole, 0, j0);
    b = gk_at(b, (int64_t)gk_dtype_bytes(dtype) * j0 * x->p.b_n); /* NULL if K is 0 */
    if (x->along) {
        along(x, dtype, a, b, cols, &e, &SYM(gk_gemm_isa), ws);
        return;
    }
    cell *b_pack = (cell *)ws + x->acc_cells, *a_pack = b_pack + x->b_cells;
    if (x->p.k == 0) memset(ws, 0, 4 * (size_t)x->acc_cells);
    across(x, dtype, a, b, cols, ws, b_pack, a_pack);
    SYM(gk_gemm_isa).store(&e, ws, x->nb, x->p.m, cols);
}

static bool make_plan(const gk_context *ctx, const void *args, gk_plan *to) {
    const gk_gemm_problem p = gk_cpu_gemm_problem(args);
    if (!gk_gemm_is_skinny(&p)) return false;
    plan *x = GK_OWN(plan, to);
    *x = plan_of(ctx, args, &p);
    to->tile[0] = x->p.m;
    to->tile[1] = x->nb;
    to->tile[2] = x->kb;
    to->tile[3] = x->along ? TM * TN : MR * NR;
    to->tasks = num_tasks(x);
    to->workspace_bytes = (size_t)gk_num_workers(ctx, to->tasks) * worker_bytes(x);
    return true;
}

static void run(const gk_context *ctx, const void *args, const gk_plan *planned, void *workspace) {
    job jb = {args, GK_OWN_CONST(plan, planned), workspace};
    gk_parallel(ctx, planned->tasks, task, &jb);
}

const gk_cpu_kernel SYM(gk_gemm_skinny) = {make_plan, run};
