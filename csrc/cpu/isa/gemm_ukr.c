/* SPDX-License-Identifier: BSD-3-Clause */
/* gemm_ukr: the register tile C[M][n] (+)= sum_k A[M][k] B[k][n] (Goto and van de Geijn 2008,
 * the outer-product kernel), the packing and epilogue of gemm_packed, and gemm_act_bwd. Compiled
 * once per ISA. There is one instance for each number of rows, number of vectors and form of A.
 *
 *  a  panel [cells][step] or rows [M][step]   b  [cells][ldb]   c  [M][ldc] float32
 *
 * A step of k loads NV vectors of B, broadcasts M cells of A, and does M * NV multiply-adds. The
 * sums stay in registers. */
#include "../blocks.h"
#include "activation.h"
#include "tile.h"

INLINE void register_tile(const int M, const int nv, const bool a_is_rows, int64_t cells,
                          const cell *a, int64_t step, const cell *b, int64_t ldb, float *c,
                          int64_t ldc, bool accumulate) {
    vf acc[MR][NV];
#pragma GCC unroll 1
    for (int i = 0; i < M; ++i) { /* prefetch the tile of C during the loop over k */
        __builtin_prefetch(c + i * ldc, 1);
        if (nv > 1) __builtin_prefetch(c + i * ldc + (NV - 1) * W, 1);
    }
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
        for (int v = 0; v < nv; ++v) acc[i][v] = vf_set1(0);

    /* Rows: one pointer for every three rows, the others by an index register, because separate
     * pointers exceed the address registers. */
    const cell *a0 = a, *a3 = a + 3 * step, *a6 = a + 6 * step, *a9 = a + 9 * step,
               *a12 = a + 12 * step;
    for (int64_t kc = 0; kc < cells; ++kc) {
        vc bv[NV];
#pragma GCC unroll 4
        for (int v = 0; v < nv; ++v) bv[v] = vc_load(b + v * W);
#pragma GCC unroll 16
        for (int i = 0; i < M; ++i) {
            cell x;
            if (a_is_rows) {
                const cell *base = i < 3 ? a0 : i < 6 ? a3 : i < 9 ? a6 : i < 12 ? a9 : a12;
                x = base[(i % 3) * step];
            } else {
                x = a[i];
            }
            vc av = vc_set1(x);
#pragma GCC unroll 4
            for (int v = 0; v < nv; ++v) acc[i][v] = vc_dot(acc[i][v], av, bv[v]);
        }
        b += ldb;
        if (a_is_rows) {
            ++a0;
            ++a3;
            ++a6;
            ++a9;
            ++a12;
        } else
            a += step;
    }

#pragma GCC unroll 16
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
        for (int v = 0; v < nv; ++v) {
            float *p = c + i * ldc + v * W;
            vf_store(p, accumulate ? acc[i][v] + vf_load(p) : acc[i][v]);
        }
}

#define INSTANCE(form, is_rows, nv, M)                                                       \
    static void form##_##nv##_##M(int64_t cells, const void *a, int64_t step, const void *b, \
                                  int64_t ldb, float *c, int64_t ldc, bool accumulate) {     \
        register_tile(M, nv, is_rows, cells, a, step, b, ldb, c, ldc, accumulate);           \
    }
#define ROWS_1_TO_6(X, f, r, v) \
    X(f, r, v, 1) X(f, r, v, 2) X(f, r, v, 3) X(f, r, v, 4) X(f, r, v, 5) X(f, r, v, 6)
#if MR == 14
#define ROWS_1_TO_MR(X, f, r, v) \
    ROWS_1_TO_6(X, f, r, v)      \
    X(f, r, v, 7)                \
    X(f, r, v, 8)                \
    X(f, r, v, 9) X(f, r, v, 10) X(f, r, v, 11) X(f, r, v, 12) X(f, r, v, 13) X(f, r, v, 14)
#else
_Static_assert(MR == 6, "instances exist for 6 and 14 rows");
#define ROWS_1_TO_MR ROWS_1_TO_6
#endif
ROWS_1_TO_MR(INSTANCE, panel, false, 1)
ROWS_1_TO_MR(INSTANCE, panel, false, 2)
ROWS_1_TO_MR(INSTANCE, rows, true, 1)
ROWS_1_TO_MR(INSTANCE, rows, true, 2)

#define NAME(form, is_rows, nv, M) form##_##nv##_##M,
const gk_ukr_fn SYM(gk_ukr_panel)[NV][MR] = {{ROWS_1_TO_MR(NAME, panel, false, 1)},
                                             {ROWS_1_TO_MR(NAME, panel, false, 2)}};
const gk_ukr_fn SYM(gk_ukr_rows)[NV][MR] = {{ROWS_1_TO_MR(NAME, rows, true, 1)},
                                            {ROWS_1_TO_MR(NAME, rows, true, 2)}};

/* ---- the epilogue: activation(alpha acc + beta c + bias) -> out, preact ---------------------- */
/* W values of one row at columns col .. col + n. The columns of p are `stride` apart. */
INLINE vf load_strided(const void *p, gk_dtype dtype, int64_t stride, int64_t col, int64_t n) {
    if (stride == 1) return vf_load_dtype(p, dtype, col, n);
    vf v = vf_set1(0);
    for (int64_t l = 0; l < W && l < n; ++l) v[l] = (float)gk_load(p, dtype, (col + l) * stride);
    return v;
}

static void store(const gk_gemm_epilogue *e, const float *acc, int64_t ld, int64_t rows,
                  int64_t cols) {
    if (e->alpha == 1 && !e->c && !e->bias && !e->preact && e->activation == GK_ACT_NONE &&
        cols % W == 0) { /* no epilogue: only convert */
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < cols; j += W)
                vf_store_dtype(e->out, e->out_dtype, i * e->out_row + j, vf_load(acc + i * ld + j),
                               W);
        return;
    }
    const int64_t out_bytes = e->out_dtype == GK_F32 ? 4 : 2,
                  c_bytes = e->c_dtype == GK_F32 ? 4 : 2;
    for (int64_t i = 0; i < rows; ++i) {
        const char *c_row = e->c ? (const char *)e->c + c_bytes * i * e->c_row : NULL;
        char *out_row = (char *)e->out + out_bytes * i * e->out_row;
        char *preact_row = e->preact ? (char *)e->preact + out_bytes * i * e->preact_row : NULL;
        for (int64_t j = 0; j < cols; j += W) {
            const int64_t n = cols - j;
            vf x = vf_load_first(acc + i * ld + j, n) * e->alpha;
            if (c_row)
                x = vf_fma(load_strided(c_row, e->c_dtype, e->c_col, j, n), vf_set1(e->beta), x);
            if (e->bias) x += load_strided(e->bias, e->bias_dtype, e->bias_stride, j, n);
            if (preact_row) vf_store_dtype(preact_row, e->out_dtype, j, x, n);
            vf_store_dtype(out_row, e->out_dtype, j, activate(x, e->activation), n);
        }
    }
}

static void pack(void *dst, int64_t width, const void *src, gk_dtype dtype, int64_t s_lane,
                 int64_t s_k, int64_t lanes, int64_t k) {
    switch (dtype) { /* constant dtypes give one copy of the loops per dtype */
    case GK_BF16: pack_panel(dst, width, src, GK_BF16, s_lane, s_k, lanes, k); break;
    case GK_F16: pack_panel(dst, width, src, GK_F16, s_lane, s_k, lanes, k); break;
    case GK_F32: pack_panel(dst, width, src, GK_F32, s_lane, s_k, lanes, k); break;
    default: gk_stop_without_case("gemm: pack", dtype);
    }
}

static void panels(void *dst, const void *src, gk_dtype dtype, int64_t s_lane, int64_t s_k,
                   int64_t lanes, int64_t k) {
    switch (dtype) {
    case GK_BF16: pack_panels(dst, src, GK_BF16, s_lane, s_k, lanes, k); break;
    case GK_F16: pack_panels(dst, src, GK_F16, s_lane, s_k, lanes, k); break;
    case GK_F32: pack_panels(dst, src, GK_F32, s_lane, s_k, lanes, k); break;
    default: gk_stop_without_case("gemm: panels", dtype);
    }
}

static void rows(void *dst, int64_t ld, const void *src, gk_dtype dtype, int64_t row_stride,
                 int64_t m, int64_t k) {
    switch (dtype) {
    case GK_BF16: pack_rows(dst, ld, src, GK_BF16, row_stride, m, k); break;
    case GK_F16: pack_rows(dst, ld, src, GK_F16, row_stride, m, k); break;
    case GK_F32: pack_rows(dst, ld, src, GK_F32, row_stride, m, k); break;
    default: gk_stop_without_case("gemm: rows", dtype);
    }
}

const gk_gemm_isa SYM(gk_gemm_isa) = {W,
                                      MR,
                                      PAIR,
                                      SYM(gk_ukr_panel)[0],
                                      SYM(gk_ukr_rows)[0],
                                      pack,
                                      panels,
                                      rows,
                                      store,
                                      &SYM(gk_gemm_blocks),
                                      NULL,
                                      NULL,
                                      0};

/* ---- the kernels of tables.c ----------------------------------------------------------------- */
static bool packed_plan(const gk_context *ctx, const void *args, gk_plan *plan) {
    return gk_gemm_packed_plan(ctx, args, &SYM(gk_gemm_isa), plan);
}
static void packed_run(const gk_context *ctx, const void *args, const gk_plan *plan,
                       void *workspace) {
    gk_gemm_packed_run(ctx, args, &SYM(gk_gemm_isa), plan, workspace);
}
const gk_cpu_kernel SYM(gk_gemm_packed) = {packed_plan, packed_run};

/* grad_in = grad_out * activation'(saved), element by element. A task is a range of rows along
 * the last dimension.
 *
 * relu selects instead of multiplying: if its output is 0, an infinite or NaN gradient becomes
 * 0. If the output is NaN, the gradient passes. */
INLINE vf activation_gradient(vf grad, vf saved, gk_activation activation) {
    if (activation != GK_ACT_RELU) return grad * activation_slope(saved, activation);
    const vf zero = vf_set1(0), off = vf_select(vf_lt(saved, vf_set1(1)), zero, grad);
    return vf_select(vf_lt(zero, saved), grad, off);
}

enum {
    ACT_ROWS_PER_TASK = 64
};

static void act_bwd_task(void *arg, int64_t t, int64_t worker) {
    const gk_gemm_act_bwd_args *a = arg;
    const int nd = a->grad_out.ndim;
    const int64_t n = nd ? a->grad_out.shape[nd - 1] : 1, rows = n ? gk_numel(&a->grad_out) / n : 0;
    const gk_tensor *ts[3] = {&a->grad_out, &a->saved, &a->grad_in};
    (void)worker;
    for (int64_t r = t * ACT_ROWS_PER_TASK; r < gk_min_i64(rows, (t + 1) * ACT_ROWS_PER_TASK);
         ++r) {
        char *p[3];
        int64_t col[3];
        for (int x = 0; x < 3; ++x) {
            p[x] = (char *)ts[x]->data +
                   (int64_t)gk_dtype_bytes(ts[x]->dtype) * gk_offset_of(ts[x], nd - 1, r);
            col[x] = nd ? ts[x]->stride[nd - 1] : 1;
        }
        for (int64_t j = 0; j < n; j += W) {
            vf g = load_strided(p[0], ts[0]->dtype, col[0], j, n - j);
            vf y = activation_gradient(g, load_strided(p[1], ts[1]->dtype, col[1], j, n - j),
                                       a->activation);
            if (col[2] == 1)
                vf_store_dtype(p[2], ts[2]->dtype, j, y, n - j);
            else
                for (int64_t l = 0; l < W && l < n - j; ++l)
                    gk_store(p[2], ts[2]->dtype, (j + l) * col[2], y[l]);
        }
    }
}

static int64_t act_bwd_tasks(const gk_gemm_act_bwd_args *a) {
    const int64_t n = a->grad_out.ndim ? a->grad_out.shape[a->grad_out.ndim - 1] : 1;
    return n ? gk_ceil_div(gk_numel(&a->grad_out) / n, ACT_ROWS_PER_TASK) : 0;
}
static bool act_bwd_plan(const gk_context *ctx, const void *args, gk_plan *plan) {
    (void)ctx;
    plan->tasks = act_bwd_tasks(args);
    return true;
}
static void act_bwd_run(const gk_context *ctx, const void *args, const gk_plan *plan,
                        void *workspace) {
    (void)workspace;
    gk_gemm_act_bwd_args a = *(const gk_gemm_act_bwd_args *)args;
    gk_parallel(ctx, plan->tasks, act_bwd_task, &a);
}
const gk_cpu_kernel SYM(gk_gemm_act_bwd) = {act_bwd_plan, act_bwd_run};
