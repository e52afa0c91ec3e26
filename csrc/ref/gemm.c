/* SPDX-License-Identifier: BSD-3-Clause */
/* ref/gemm: out = activation(alpha * (a @ b) + beta * c + bias), and the activation's derivative.
 *
 * a [batch..., M, K], b [batch..., K, N] or [K, N], bias [N]; c broadcasts to out [batch..., M, N].
 * Any dtype and strides. Sums are double. RUN products are summed in the order of k, and then these
 * sums are added, because one chain over all of k would have a larger error than PyTorch's. out and
 * preact are each rounded once, from the same double. A task owns a tile of BM x BN results of one
 * batch entry. Its sums and one row of b are on the stack. */
#include "activation.h"

enum {
    BM = 8,
    BN = 64,
    RUN = 128
    /* The tile has 4 KB of sums. If b is strided along n, one k touches BN cache lines, which the
     * next k reads again. */
};

/* ---- gemm ------------------------------------------------------------------------------------ */
/* Offset of the element of `t` that belongs to batch entry `batch` of out. The last `inner`
 * dimensions are at index 0. */
static int64_t batch_offset(const gk_tensor *t, const gk_tensor *out, int64_t batch, int inner) {
    int64_t offset = 0;
    for (int d = out->ndim - 3; d >= 0; --d) {
        int64_t coordinate = batch % out->shape[d];
        batch /= out->shape[d];
        /* batch dimensions are aligned at the end */
        int own = d - (out->ndim - 2) + (t->ndim - inner);
        if (own >= 0 && t->shape[own] != 1) offset += coordinate * t->stride[own];
    }
    return offset;
}

/* Stride of the dimension `from_end` places from the end (1 = last); 0 if it is absent or
 * broadcast. */
static int64_t inner_stride(const gk_tensor *t, int from_end) {
    if (t->ndim < from_end || t->shape[t->ndim - from_end] == 1) return 0;
    return t->stride[t->ndim - from_end];
}

/* n elements of a tensor, `stride` apart, as doubles. */
static void load_strided(double *to, const gk_tensor *t, int64_t offset, int64_t stride,
                         int64_t n) {
    switch (t->dtype) {
    case GK_F64:
        for (int64_t j = 0; j < n; ++j) to[j] = ((const double *)t->data)[offset + j * stride];
        break;
    case GK_F32:
        for (int64_t j = 0; j < n; ++j) to[j] = ((const float *)t->data)[offset + j * stride];
        break;
    default:
        for (int64_t j = 0; j < n; ++j) to[j] = gk_load(t->data, t->dtype, offset + j * stride);
    }
}

typedef struct gemm_job {
    const gk_gemm_args *args;
    int64_t m, n, k, tiles_m, tiles_n;
} gemm_job;

static void gemm_tile(void *arg, int64_t task, int64_t worker) {
    (void)worker;
    const gemm_job *job = arg;
    const gk_gemm_args *x = job->args;
    int64_t j0 = task % job->tiles_n * BN, i0 = task / job->tiles_n % job->tiles_m * BM;
    int64_t batch = task / job->tiles_n / job->tiles_m;
    int64_t rows = gk_min_i64(BM, job->m - i0), cols = gk_min_i64(BN, job->n - j0);

    /* 1. the product */
    double sum[BM][BN] = {{0}}, b_row[BN];
    int64_t a_m = x->a.stride[x->a.ndim - 2], a_k = x->a.stride[x->a.ndim - 1];
    int64_t b_k = x->b.stride[x->b.ndim - 2], b_n = x->b.stride[x->b.ndim - 1];
    int64_t a_at = batch_offset(&x->a, &x->out, batch, 2) + i0 * a_m;
    int64_t b_at = batch_offset(&x->b, &x->out, batch, 2) + j0 * b_n;
    for (int64_t k0 = 0; k0 < job->k; k0 += RUN) {
        double run[BM][BN] = {{0}};
        for (int64_t k = k0; k < gk_min_i64(job->k, k0 + RUN); ++k) {
            load_strided(b_row, &x->b, b_at + k * b_k, b_n, cols);
            for (int64_t i = 0; i < rows; ++i) {
                double a = gk_load(x->a.data, x->a.dtype, a_at + i * a_m + k * a_k);
                for (int64_t j = 0; j < cols; ++j) run[i][j] += a * b_row[j];
            }
        }
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < cols; ++j) sum[i][j] += run[i][j];
    }

    /* 2. c, bias, the activation, the stores */
    /* with beta 0, c is not read: it may hold NaN */
    const gk_tensor *c = x->c && x->beta != 0 ? x->c : NULL;
    int64_t c_at = c ? batch_offset(c, &x->out, batch, 2) : 0;
    int64_t c_m = c ? inner_stride(c, 2) : 0, c_n = c ? inner_stride(c, 1) : 0;
    int64_t out_m = x->out.stride[x->out.ndim - 2], out_n = x->out.stride[x->out.ndim - 1];
    int64_t out_at = batch_offset(&x->out, &x->out, batch, 2);
    for (int64_t i = i0; i < i0 + rows; ++i) {
        for (int64_t j = j0; j < j0 + cols; ++j) {
            double y = x->alpha * sum[i - i0][j - j0];
            if (c) y += x->beta * gk_load(c->data, c->dtype, c_at + i * c_m + j * c_n);
            if (x->bias) y += gk_load(x->bias->data, x->bias->dtype, j * x->bias->stride[0]);
            if (x->preact) {
                const gk_tensor *p = x->preact;
                int64_t at = batch_offset(p, &x->out, batch, 2) + i * p->stride[p->ndim - 2];
                gk_store(p->data, p->dtype, at + j * p->stride[p->ndim - 1], y);
            }
            gk_store(x->out.data, x->out.dtype, out_at + i * out_m + j * out_n,
                     act(x->activation, y));
        }
    }
}

void gk_ref_gemm(const gk_context *ctx, const gk_gemm_args *args) {
    const gk_tensor *out = &args->out;
    if (gk_numel(out) == 0) return;
    gemm_job job = {args,
                    out->shape[out->ndim - 2],
                    out->shape[out->ndim - 1],
                    args->a.shape[args->a.ndim - 1],
                    0,
                    0};
    job.tiles_m = gk_ceil_div(job.m, BM);
    job.tiles_n = gk_ceil_div(job.n, BN);
    int64_t batches = gk_numel(out) / (job.m * job.n);
    gk_parallel(ctx, batches * job.tiles_m * job.tiles_n, gemm_tile, &job);
}

/* ---- gemm_act_bwd ---------------------------------------------------------------------------- */
enum {
    ELEMENTS_PER_TASK = 4096
};

static void act_bwd_elements(void *arg, int64_t task, int64_t worker) {
    (void)worker;
    const gk_gemm_act_bwd_args *x = arg;
    int64_t begin = task * ELEMENTS_PER_TASK;
    int64_t end = gk_min_i64(begin + ELEMENTS_PER_TASK, gk_numel(&x->grad_in));
    for (int64_t e = begin; e < end; ++e) {
        double saved =
            gk_load(x->saved.data, x->saved.dtype, gk_offset_of(&x->saved, x->saved.ndim, e));
        double grad = gk_load(x->grad_out.data, x->grad_out.dtype,
                              gk_offset_of(&x->grad_out, x->grad_out.ndim, e));
        double slope = act_derivative(x->activation, saved);
        /* relu selects: where its output is 0, an infinite or NaN gradient becomes 0 */
        double result = x->activation == GK_ACT_RELU && slope == 0 ? 0 : grad * slope;
        gk_store(x->grad_in.data, x->grad_in.dtype, gk_offset_of(&x->grad_in, x->grad_in.ndim, e),
                 result);
    }
}

void gk_ref_gemm_act_bwd(const gk_context *ctx, const gk_gemm_act_bwd_args *args) {
    gk_gemm_act_bwd_args x = *args;
    gk_parallel(ctx, gk_ceil_div(gk_numel(&args->grad_in), ELEMENTS_PER_TASK), act_bwd_elements,
                &x);
}
