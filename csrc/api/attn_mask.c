/* SPDX-License-Identifier: BSD-3-Clause */
/* attn_mask: the check and the cost of gk_attn_mask. */
#include "../core/attn_mask.h"
#include "../core/checks.h"
#include "../core/dispatch.h"

#include <inttypes.h>

/* A tensor of this dtype with shape [B, H, rows] or [B, H, rows, any]. */
static gk_status take_by_head(gk_io *io, const char *name, const gk_tensor *t, gk_dtype dtype,
                              const char *letters, int ndim, int64_t rows) {
    GK_REQUIRE(t, "%s is missing", name);
    GK_TRY(gk_take(io, name, t, GK_ANY_STRIDES));
    GK_TRY(gk_check_dtype(io, name, t, dtype));
    GK_TRY(gk_check_dims(name, t, ndim, letters));
    GK_REQUIRE(t->shape[2] == rows, "%s must have %lld in dimension 2, got %lld", name,
               (long long)rows, (long long)t->shape[2]);
    return GK_OK;
}

static gk_status take_mask(gk_io *io, const gk_attn_mask_args *a, bool is_bits) {
    const int64_t last = is_bits ? gk_ceil_div(a->seq_k, 8) : a->seq_k;
    GK_TRY(take_by_head(io, "mask", a->mask, GK_U8,
                        is_bits ? "[B, H, Sq, ceil(Sk / 8)]" : "[B, H, Sq, Sk]", 4, a->seq_q));
    GK_REQUIRE(a->mask->shape[3] == last, "mask must have %lld in dimension 3, got %lld",
               (long long)last, (long long)a->mask->shape[3]);
    return GK_OK;
}

static gk_status take_rows(gk_io *io, const gk_attn_mask_args *a) {
    const bool ranges = a->source == GK_MASK_OF_RANGES;
    GK_TRY(take_by_head(io, ranges ? "ranges" : "columns", a->rows, GK_I32,
                        ranges ? "[B, H, Sq, 2 or 4]" : "[B, H, Sk, n]", 4,
                        ranges ? a->seq_q : a->seq_k));
    const int64_t n = a->rows->shape[3];
    if (ranges) {
        GK_REQUIRE(n == 2 || n == 4, "ranges must have 2 or 4 in dimension 3, got %lld",
                   (long long)n);
    } else if (a->is_causal) {
        GK_REQUIRE(n == 1 || n == 2,
                   "columns must have 1 or 2 in dimension 3 where is_causal is true, got %lld",
                   (long long)n);
    } else {
        GK_REQUIRE(n == 2 || n == 4,
                   "columns must have 2 or 4 in dimension 3 where is_causal is false, got %lld",
                   (long long)n);
    }
    return GK_OK;
}

static gk_status same_heads(const char *name, const gk_tensor *t, const char *first_name,
                            const gk_tensor *first) {
    GK_TRY(gk_check_same(name, "batch size", t->shape[0], first_name, first->shape[0]));
    return gk_check_same(name, "heads", t->shape[1], first_name, first->shape[1]);
}

static gk_status take_lists(gk_io *io, const char *num_name, const gk_tensor *num, const char *name,
                            const gk_tensor *list, int64_t tiles_q) {
    GK_TRY(take_by_head(io, num_name, num, GK_I32, "[B, H, nq]", 3, tiles_q));
    GK_TRY(take_by_head(io, name, list, GK_I32, "[B, H, nq, n]", 4, tiles_q));
    return same_heads(name, list, num_name, num);
}

/* Checks the contents of counts and indices on the CPU. */
static gk_status check_lists(const char *num_name, const gk_tensor *num, const char *name,
                             const gk_tensor *list, int64_t tiles_k) {
    for (int64_t b = 0; b < num->shape[0]; ++b)
        for (int64_t h = 0; h < num->shape[1]; ++h)
            for (int64_t t = 0; t < num->shape[2]; ++t) {
                const int32_t n =
                    ((const int32_t *)
                         num->data)[b * num->stride[0] + h * num->stride[1] + t * num->stride[2]];
                if (n < 0 || n > list->shape[3])
                    return gk_fail(GK_ERR_INDEX,
                                   "%s is expected to hold 0 to %" PRId64
                                   " blocks, got %d in [%" PRId64 ", %" PRId64 ", %" PRId64 "]",
                                   num_name, list->shape[3], (int)n, b, h, t);
                for (int64_t i = 0; i < n; ++i) {
                    const int32_t block =
                        ((const int32_t *)list->data)[b * list->stride[0] + h * list->stride[1] +
                                                      t * list->stride[2] + i * list->stride[3]];
                    if (block < 0 || block >= tiles_k)
                        return gk_fail(GK_ERR_INDEX,
                                       "%s is expected to hold blocks 0 to %" PRId64
                                       ", got %d in [%" PRId64 ", %" PRId64 ", %" PRId64
                                       ", %" PRId64 "]",
                                       name, tiles_k - 1, (int)block, b, h, t, i);
                }
            }
    return GK_OK;
}

static gk_status take_blocks(const gk_context *ctx, gk_io *io, const gk_attn_mask_args *a) {
    const int64_t nq = gk_ceil_div(a->seq_q, GK_MASK_TILE),
                  nk = gk_ceil_div(a->seq_k, GK_MASK_TILE);
    GK_TRY(take_lists(io, "kv_num_blocks", a->num_blocks, "kv_indices", a->blocks, nq));
    GK_REQUIRE(!a->num_full == !a->full,
               "full_kv_num_blocks and full_kv_indices go together: one of them is missing");
    if (a->num_full) {
        GK_TRY(take_lists(io, "full_kv_num_blocks", a->num_full, "full_kv_indices", a->full, nq));
        GK_TRY(same_heads("full_kv_num_blocks", a->num_full, "kv_num_blocks", a->num_blocks));
    }
    if (a->mask) {
        GK_TRY(take_mask(io, a, a->is_bits));
        GK_TRY(same_heads("mask", a->mask, "kv_num_blocks", a->num_blocks));
    }
    if (!gk_reads_contents(io, ctx)) return GK_OK;
    GK_TRY(check_lists("kv_num_blocks", a->num_blocks, "kv_indices", a->blocks, nk));
    return a->num_full
               ? check_lists("full_kv_num_blocks", a->num_full, "full_kv_indices", a->full, nk)
               : GK_OK;
}

int64_t gk_attn_mask_ints(gk_mask_store store, int64_t seq_q, int64_t seq_k, int32_t transposed) {
    return gk_mask_layout_of(store, seq_q, seq_k, transposed != 0).total;
}

static gk_status check_length(const char *name, int64_t n) {
    GK_TRY(gk_check_not_negative(name, n));
    GK_REQUIRE(n <= (int64_t)GK_MASK_TILE * (GK_MASK_MAX_TILES - 1),
               "%s must be at most %lld, got %lld", name,
               (long long)GK_MASK_TILE * (GK_MASK_MAX_TILES - 1), (long long)n);
    return GK_OK;
}

gk_status gk_check_attn_mask(const gk_context *ctx, const gk_attn_mask_args *a, gk_io *io) {
    GK_REQUIRE((int)a->source >= 0 && a->source <= GK_MASK_OF_BLOCKS,
               "source is %d, expected a gk_mask_source", (int)a->source);
    GK_TRY(check_length("seq_q", a->seq_q));
    GK_TRY(check_length("seq_k", a->seq_k));
    const gk_tensor *first = NULL;
    switch (a->source) {
    case GK_MASK_OF_BOOL:
    case GK_MASK_OF_BITS:
        GK_TRY(take_mask(io, a, a->source == GK_MASK_OF_BITS));
        first = a->mask;
        break;
    case GK_MASK_OF_RANGES:
    case GK_MASK_OF_COLUMNS:
        GK_TRY(take_rows(io, a));
        first = a->rows;
        break;
    case GK_MASK_OF_BLOCKS: GK_TRY(take_blocks(ctx, io, a)); first = a->num_blocks;
    }
    const int64_t shape[3] = {
        first->shape[0], first->shape[1],
        gk_attn_mask_ints(gk_mask_store_of(a->source), a->seq_q, a->seq_k, a->transposed)};
    gk_give(io, "out", &a->out, GK_I32, 3, shape, GK_CONTIGUOUS);
    return GK_OK;
}

static double bytes_of(const gk_tensor *t) { return t ? gk_tensor_bytes(t) : 0; }

void gk_cost_attn_mask(const gk_context *ctx, const gk_attn_mask_args *a, gk_explanation *out) {
    (void)ctx;
    out->bytes = bytes_of(a->mask) + bytes_of(a->rows) + bytes_of(a->num_blocks) +
                 bytes_of(a->blocks) + bytes_of(a->num_full) + bytes_of(a->full) +
                 gk_tensor_bytes(&a->out);
    out->flops = 0;
}
