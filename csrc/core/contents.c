/* SPDX-License-Identifier: BSD-3-Clause */
/* contents.c: checks the contents of index tensors on the CPU before anything is written.
 *
 * cu_seqlens [B+1], block_table [B, max_blocks] and seq_lens [B] are int32 with any strides;
 * slots [T] is int32 or int64. */
#include "checks.h"

#include <inttypes.h>

static int64_t load_int(const gk_tensor *t, int64_t offset) {
    if (t->dtype == GK_I64) return ((const int64_t *)t->data)[offset];
    return ((const int32_t *)t->data)[offset];
}

/* ---- cu_seqlens ------------------------------------------------------------------------------ */
gk_status gk_check_cu_seqlens(const char *name, const gk_tensor *cu_seqlens, int64_t total,
                              int64_t max_seqlen) {
    int64_t batch = cu_seqlens->shape[0] - 1, start = load_int(cu_seqlens, 0);
    if (start != 0) {
        return gk_fail(GK_ERR_INDEX, "%s is expected to start at 0, got %s[0] = %" PRId64, name,
                       name, start);
    }
    for (int64_t b = 0; b < batch; ++b) {
        int64_t end = load_int(cu_seqlens, (b + 1) * cu_seqlens->stride[0]);
        if (end < start) {
            return gk_fail(GK_ERR_INDEX,
                           "%s is expected not to decrease, got %s[%" PRId64 "] = %" PRId64
                           " after %" PRId64,
                           name, name, b + 1, end, start);
        }
        if (end - start > max_seqlen) {
            return gk_fail(GK_ERR_INDEX,
                           "%s is expected to hold sequences of at most max_seqlen %" PRId64
                           " tokens, got %" PRId64 " in sequence %" PRId64,
                           name, max_seqlen, end - start, b);
        }
        start = end;
    }
    if (start > total) {
        return gk_fail(GK_ERR_INDEX,
                       "%s is expected to end at or before the %" PRId64
                       " tokens there are, got %s[%" PRId64 "] = %" PRId64,
                       name, total, name, batch, start);
    }
    return GK_OK;
}

/* ---- scales ---------------------------------------------------------------------------------- */
/* Checks the scales of one page if the cache has a scale for each page. Otherwise checks all
 * scales, which the caller asks for with page -1. */
static gk_status check_scale(const char *name, const gk_tensor *t, int64_t page) {
    if (!t || (t->ndim == 2) != (page >= 0)) return GK_OK;
    const int64_t n = t->ndim ? t->shape[t->ndim - 1] : 1,
                  step = t->ndim ? t->stride[t->ndim - 1] : 0;
    for (int64_t h = 0; h < n; ++h) {
        const double x =
            gk_load(t->data, t->dtype, h * step + (t->ndim == 2 ? page * t->stride[0] : 0));
        if (isfinite(x) && x > 0) continue;
        return gk_fail(GK_ERR_ARGUMENT,
                       "%s must hold finite numbers above 0, got %g for head %" PRId64, name, x, h);
    }
    return GK_OK;
}

static gk_status check_scales(const gk_tensor *k_scale, const gk_tensor *v_scale, int64_t page) {
    const gk_status status = check_scale("k_scale", k_scale, page);
    return status == GK_OK ? check_scale("v_scale", v_scale, page) : status;
}

/* ---- paged_attn ------------------------------------------------------------------------------ */
/* A sequence of length 0 is inactive, whatever its number of query tokens. */
static gk_status check_length(int64_t b, int64_t length, int64_t seq_q, int64_t capacity,
                              bool allow_short) {
    if (length < 0) {
        return gk_fail(GK_ERR_INDEX,
                       "seq_lens is expected not to be negative, got seq_lens[%" PRId64
                       "] = %" PRId64,
                       b, length);
    }
    if (length > capacity) {
        return gk_fail(GK_ERR_INDEX,
                       "seq_lens is expected to fit a row of block_table (%" PRId64
                       " keys), got seq_lens[%" PRId64 "] = %" PRId64,
                       capacity, b, length);
    }
    if (!allow_short && length > 0 && length < seq_q) {
        return gk_fail(GK_ERR_INDEX,
                       "seq_lens is expected to count the query tokens (%" PRId64
                       " in sequence %" PRId64 "), got seq_lens[%" PRId64 "] = %" PRId64,
                       seq_q, b, b, length);
    }
    return GK_OK;
}

/* Checks the entries of row b that some query reads. Pages left of the first query's window or
 * of kv_start may hold anything. */
static gk_status check_pages(const gk_paged_attn_args *x, int64_t b, int64_t length,
                             int64_t seq_q) {
    int64_t block_size = x->k_cache.shape[1], num_blocks = x->k_cache.shape[0];
    if (seq_q == 0 || length == 0) return GK_OK;
    gk_span span = gk_span_paged(x, b, seq_q, length);
    for (int64_t entry = gk_span_lo(&span, 0) / block_size; entry < gk_ceil_div(length, block_size);
         ++entry) {
        int64_t page = load_int(&x->block_table,
                                b * x->block_table.stride[0] + entry * x->block_table.stride[1]);
        if (page >= 0 && page < num_blocks) {
            const gk_status status = check_scales(x->k_scale, x->v_scale, page);
            if (status != GK_OK) return status;
            continue;
        }
        return gk_fail(GK_ERR_INDEX,
                       "block_table is expected to hold pages in [0, %" PRId64
                       "), got block_table[%" PRId64 ", %" PRId64 "] = %" PRId64,
                       num_blocks, b, entry, page);
    }
    return GK_OK;
}

gk_status gk_check_paged_contents(const gk_paged_attn_args *args) {
    int64_t batch = args->seq_lens.shape[0], tokens = args->q.shape[0];
    const gk_tensor *cu = args->cu_seqlens_q;
    if (cu) { /* first, because the lengths are checked against it */
        gk_status status = gk_check_cu_seqlens("cu_seqlens_q", cu, tokens, args->max_seqlen_q);
        if (status != GK_OK) return status;
    }
    int64_t capacity = args->block_table.shape[1] * args->k_cache.shape[1];
    gk_status scales = check_scales(args->k_scale, args->v_scale, -1);
    if (scales != GK_OK) return scales;
    for (int64_t b = 0; b < batch; ++b) {
        int64_t length = load_int(&args->seq_lens, b * args->seq_lens.stride[0]);
        int64_t seq_q = cu ? load_int(cu, (b + 1) * cu->stride[0]) - load_int(cu, b * cu->stride[0])
                           : tokens / batch;
        gk_status status =
            check_length(b, length, seq_q, capacity, args->flags & GK_PAGED_ALLOW_SHORT);
        if (status == GK_OK) status = check_pages(args, b, length, seq_q);
        if (status != GK_OK) return status;
    }
    return GK_OK;
}

/* ---- kv_cache_write -------------------------------------------------------------------------- */
gk_status gk_check_slots(const gk_kv_cache_write_args *args) {
    int64_t capacity = args->k_cache.shape[0] * args->k_cache.shape[1];
    gk_status status = check_scales(args->k_scale, args->v_scale, -1);
    if (status != GK_OK) return status;
    for (int64_t t = 0; t < args->slots.shape[0]; ++t) {
        int64_t slot = load_int(&args->slots, t * args->slots.stride[0]);
        if (slot < 0) continue; /* skipped */
        if (slot < capacity) {
            status = check_scales(args->k_scale, args->v_scale, slot / args->k_cache.shape[1]);
            if (status != GK_OK) return status;
            continue;
        }
        return gk_fail(GK_ERR_INDEX,
                       "slots is expected to hold slots below %" PRId64
                       " (num_blocks * block_size), got slots[%" PRId64 "] = %" PRId64,
                       capacity, t, slot);
    }
    return GK_OK;
}

gk_status gk_check_positions(const gk_rope_args *args) {
    const gk_tensor *p = args->positions;
    const int64_t rows = args->cos.shape[0], last = p ? p->shape[p->ndim - 1] : 0;
    for (int64_t i = 0; p && i < gk_numel(p); ++i) {
        const int64_t position = load_int(
            p, p->ndim == 2 ? i / last * p->stride[0] + i % last * p->stride[1] : i * p->stride[0]);
        if (position >= 0 && position < rows) continue;
        return gk_fail(GK_ERR_INDEX,
                       "positions is expected to hold rows of cos, [0, %" PRId64 "), got %" PRId64
                       " at token %" PRId64,
                       rows, position, i);
    }
    return GK_OK;
}

gk_status gk_check_targets(const gk_cross_entropy_args *args, int64_t classes) {
    const gk_tensor *t = &args->target;
    for (int64_t row = 0; row < gk_numel(t); ++row) {
        const int64_t target = load_int(t, gk_offset_of(t, t->ndim, row));
        if ((target >= 0 && target < classes) || target == args->ignore_index) continue;
        return gk_fail(GK_ERR_INDEX,
                       "target is expected to hold classes in [0, %" PRId64
                       ") or ignore_index, got %" PRId64 " in row %" PRId64,
                       classes, target, row);
    }
    return GK_OK;
}

gk_status gk_check_count_slots(const gk_sample_tokens_args *args) {
    const gk_tensor *t = args->slots;
    for (int64_t row = 0; t && row < t->shape[0]; ++row) {
        const int64_t slot = load_int(t, row * t->stride[0]);
        if (slot < args->counts->shape[0]) continue;
        return gk_fail(GK_ERR_INDEX,
                       "slots is expected to hold rows of counts, below %" PRId64
                       ", or negative ones, got slots[%" PRId64 "] = %" PRId64,
                       args->counts->shape[0], row, slot);
    }
    return GK_OK;
}

gk_status gk_check_places(const gk_tensor *place, int64_t rows) {
    for (int64_t i = 0; i < gk_numel(place); ++i) {
        const int64_t at = load_int(place, gk_offset_of(place, 2, i));
        if (at < rows) continue;
        return gk_fail(GK_ERR_INDEX,
                       "place is expected to hold rows, below %" PRId64
                       ", or negative ones, got place[%" PRId64 ", %" PRId64 "] = %" PRId64,
                       rows, i / place->shape[1], i % place->shape[1], at);
    }
    return GK_OK;
}
