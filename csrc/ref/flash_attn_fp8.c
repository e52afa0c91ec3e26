/* SPDX-License-Identifier: BSD-3-Clause */
/* ref/flash_attn_fp8: converts e4m3 codes to doubles, q q_scale, k k_scale and v v_scale + v_mean,
 * and calls ref/flash_attn with them. */
#include "../formats/attn_scales.h"
#include "../core/internal.h"
#include "../core/op.h"

#include <stdlib.h>

/* Converts one tensor. Token i of head h in sequence b is element [b, h, i] (packed [start + i,
 * h]). Tokens that belong to no sequence stay 0; attention never reads them. */
typedef struct decode_job {
    const gk_tensor *codes, *cu_seqlens; /* cu_seqlens NULL: dense */
    double *to;                          /* contiguous, with the codes' shape */
    gk_attn_scale scale;
    gk_attn_mean mean;
} decode_job;

static void decode_token(const decode_job *x, int64_t b, int64_t h, int64_t i, int64_t from,
                         int64_t to) {
    const int64_t n = x->codes->shape[x->codes->ndim - 1];
    const gk_attn_scale *s = &x->scale;
    const double scale =
        s->data ? (double)s->data[b * s->batch + h * s->head + i / GK_ATTN_SCALE_TOKENS * s->block]
                : 1;
    for (int64_t d = 0; d < n; ++d) {
        const double mean =
            x->mean.data
                ? (double)x->mean.data[b * x->mean.batch + h * x->mean.head + d * x->mean.column]
                : 0;
        x->to[to * n + d] = gk_load(x->codes->data, GK_E4M3, from + d) * scale + mean;
    }
}

/* Returns the decoded tensor. Its data is NULL if the allocation fails. */
static gk_tensor decode(decode_job x, int64_t batch) {
    const gk_tensor *t = x.codes;
    gk_tensor made = *t;
    made.dtype = GK_F64;
    for (int64_t d = t->ndim - 1, step = 1; d >= 0; step *= t->shape[d--]) made.stride[d] = step;
    made.data = x.to = calloc((size_t)gk_max_i64(gk_numel(t), 1), sizeof(double));
    if (!x.to) return made;
    const int64_t heads = t->shape[1];
    for (int64_t b = 0; b < batch; ++b) {
        const int64_t start = x.cu_seqlens ? gk_i32_at(x.cu_seqlens, b) : 0;
        const int64_t n = x.cu_seqlens ? gk_i32_at(x.cu_seqlens, b + 1) - start : t->shape[2];
        for (int64_t h = 0; h < heads; ++h)
            for (int64_t i = 0; i < n; ++i) {
                if (x.cu_seqlens)
                    decode_token(&x, b, h, i, (start + i) * t->stride[0] + h * t->stride[1],
                                 (start + i) * heads + h);
                else
                    decode_token(&x, b, h, i,
                                 b * t->stride[0] + h * t->stride[1] + i * t->stride[2],
                                 (b * heads + h) * n + i);
            }
    }
    return made;
}

void gk_ref_flash_attn_fp8(const gk_context *ctx, const gk_flash_attn_fp8_args *a) {
    gk_flash_attn_args wide = a->fwd;
    const gk_attn_mean none = {0, 0, 0, 0};
    const int64_t batch = wide.cu_seqlens_q ? wide.cu_seqlens_q->shape[0] - 1 : wide.q.shape[0];
    wide.q =
        decode((decode_job){&a->fwd.q, wide.cu_seqlens_q, NULL, gk_attn_scale_of(a->q_scale), none},
               batch);
    wide.k =
        decode((decode_job){&a->fwd.k, wide.cu_seqlens_k, NULL, gk_attn_scale_of(a->k_scale), none},
               batch);
    wide.v = decode((decode_job){&a->fwd.v, wide.cu_seqlens_k, NULL, gk_attn_scale_of(a->v_scale),
                                 gk_attn_mean_of(a->v_mean)},
                    batch);
    if (wide.q.data && wide.k.data && wide.v.data) gk_ref_flash_attn_fwd(ctx, &wide);
    free(wide.q.data);
    free(wide.k.data);
    free(wide.v.data);
}
