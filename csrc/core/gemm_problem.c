/* SPDX-License-Identifier: BSD-3-Clause */
/* gemm_problem.c: makes the problem of gemm_problem.h from a call's tensors. */
#include "gemm_problem.h"

/* Copies the batch dimensions of the result that are not of size 1. */
static void read_batch(gk_gemm_problem *p, const gk_gemm_args *args, const gk_tensor *c) {
    const gk_tensor *const out = &args->out, *const preact = args->preact;
    const int nd = out->ndim;
    p->batch = 1;
    for (int d = 0; d < nd - 2; ++d) {
        const int i = p->ndim;
        if (out->shape[d] == 1) continue;
        p->shape[i] = out->shape[d];
        p->a_batch[i] = gk_broadcast_stride(&args->a, nd, d);
        p->b_batch[i] = gk_broadcast_stride(&args->b, nd, d);
        p->c_batch[i] = c ? gk_broadcast_stride(c, nd, d) : 0;
        p->out_batch[i] = out->stride[d];
        p->preact_batch[i] = preact ? preact->stride[d] : 0;
        p->batch *= p->shape[i];
        ++p->ndim;
    }
}

/* Merges the innermost batch dimensions into the rows as long as b is broadcast along them and all
 * other tensors are dense there. */
static void merge_rows(gk_gemm_problem *p, bool preact, bool c) {
    gk_gemm_result *const e = &p->epilogue;
    /* A single row has no stride of its own, so it takes that of the last batch dimension. */
    if (p->m == 1 && p->ndim > 0) {
        const int i = p->ndim - 1;
        p->a_m = p->a_batch[i];
        e->out_row = p->out_batch[i];
        e->preact_row = p->preact_batch[i];
        if (c) e->c_row = p->c_batch[i];
    }
    while (p->ndim > 0 && p->m > 0 && p->batch > 0) {
        const int i = p->ndim - 1;
        if (p->b_batch[i] != 0 || p->a_batch[i] != p->m * p->a_m) break;
        if (p->out_batch[i] != p->m * e->out_row) break;
        if (preact && p->preact_batch[i] != p->m * e->preact_row) break;
        if (c && p->c_batch[i] != p->m * e->c_row) break;
        p->batch /= p->shape[i];
        p->m *= p->shape[i];
        --p->ndim;
    }
}

gk_gemm_problem gk_gemm_problem_of(const gk_gemm_args *args) {
    gk_gemm_problem p;
    memset(&p, 0, sizeof p);
    gk_gemm_result *const e = &p.epilogue;
    const gk_tensor *const a = &args->a, *const b = &args->b, *const out = &args->out;
    const gk_tensor *const c = args->c && args->beta != 0 ? args->c : NULL;
    const int nd = out->ndim;
    p.a = a->data;
    p.b = b->data;
    p.m = out->shape[nd - 2];
    p.n = out->shape[nd - 1];
    p.k = a->shape[a->ndim - 1];
    p.a_m = a->stride[a->ndim - 2];
    p.a_k = a->stride[a->ndim - 1];
    p.b_k = b->stride[b->ndim - 2];
    p.b_n = b->stride[b->ndim - 1];
    e->alpha = args->alpha;
    e->beta = args->beta;
    e->activation = args->activation;
    e->out = out->data;
    e->out_dtype = out->dtype;
    e->out_row = out->stride[nd - 2];
    e->out_col = 1;
    if (args->preact) {
        e->preact = args->preact->data;
        e->preact_row = args->preact->stride[nd - 2];
        e->preact_col = 1;
    }
    if (args->bias) {
        e->bias = args->bias->data;
        e->bias_dtype = args->bias->dtype;
        e->bias_col = args->bias->stride[0];
    }
    if (c) {
        e->c = c->data;
        e->c_dtype = c->dtype;
        e->c_row = gk_broadcast_stride(c, nd, nd - 2);
        e->c_col = gk_broadcast_stride(c, nd, nd - 1);
    }
    read_batch(&p, args, c);
    /* not by the pointers, which are NULL if a call is only explained */
    merge_rows(&p, args->preact != NULL, c != NULL);
    return p;
}

gk_gemm_problem gk_gemm_swapped(const gk_gemm_problem *p) {
    gk_gemm_problem s = *p;
    gk_gemm_result *const e = &s.epilogue;
    s.m = p->n;
    s.n = p->m;
    s.a = p->b;
    s.b = p->a;
    s.a_m = p->b_n;
    s.a_k = p->b_k;
    s.b_k = p->a_k;
    s.b_n = p->a_m;
    for (int d = 0; d < p->ndim; ++d) {
        s.a_batch[d] = p->b_batch[d];
        s.b_batch[d] = p->a_batch[d];
    }
    e->bias_row = p->epilogue.bias_col;
    e->bias_col = p->epilogue.bias_row;
    e->c_row = p->epilogue.c_col;
    e->c_col = p->epilogue.c_row;
    e->out_row = p->epilogue.out_col;
    e->out_col = p->epilogue.out_row;
    e->preact_row = p->epilogue.preact_col;
    e->preact_col = p->epilogue.preact_row;
    return s;
}
