/* SPDX-License-Identifier: BSD-3-Clause */
/* status.c: status names and this thread's detail text. */
#include "io.h"
#include "internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#define STRINGIFY_(x) #x
#define STRINGIFY(x) STRINGIFY_(x)

static _Thread_local char last_error[512];

const char *gk_version(void) {
    return STRINGIFY(GK_VERSION_MAJOR) "." STRINGIFY(GK_VERSION_MINOR) "." STRINGIFY(
        GK_VERSION_PATCH);
}

const char *gk_status_name(gk_status code) {
    switch (code) {
    case GK_OK: return "GK_OK";
    case GK_ERR_ARGUMENT: return "GK_ERR_ARGUMENT";
    case GK_ERR_INDEX: return "GK_ERR_INDEX";
    case GK_ERR_UNSUPPORTED: return "GK_ERR_UNSUPPORTED";
    case GK_ERR_WORKSPACE: return "GK_ERR_WORKSPACE";
    case GK_ERR_DEVICE: return "GK_ERR_DEVICE";
    }
    return "unknown gk_status";
}

const char *gk_device_error_text(gk_device_error kind) {
    switch (kind) {
    case GK_BAD_CU_SEQLENS:
        return "flash_attn_varlen: cu_seqlens is expected to start at 0, not to decrease, to end "
               "within the tokens and to hold sequences of at most max_seqlen; grouped_gemm and "
               "weight_gemm: offs is expected not to decrease and to end within the rows or "
               "columns that it groups";
    case GK_BAD_SEQ_LENS:
        return "paged_attn: seq_lens is expected to be at least the sequence's query tokens and at "
               "most the tokens of its row of block_table; cu_seqlens_q is expected to start at 0, "
               "not to decrease and to end within the tokens";
    case GK_BAD_BLOCK_TABLE:
        return "paged_attn: block_table is expected to hold pages of the cache";
    case GK_BAD_SLOTS:
        return "kv_cache_write: slots is expected to hold slots of the cache, or negative ones to "
               "skip; moe_unpermute: place is expected to hold rows, or negative numbers";
    case GK_BAD_POSITIONS: return "rope: positions is expected to hold rows of cos and sin";
    case GK_BAD_TARGETS: return "cross_entropy: target is expected to hold classes or ignore_index";
    case GK_BAD_MASK_BLOCKS:
        return "attn_mask_blocks: kv_num_blocks is expected to hold counts of the lists, and "
               "kv_indices blocks of the keys";
    case GK_BAD_COUNT_SLOTS:
        return "sample_tokens: slots is expected to hold rows of counts, or negative ones";
    case GK_NUM_DEVICE_ERRORS: break;
    }
    return "unknown gk_device_error";
}

/* Offset of the detail in last_error. gk_named puts the entry point's name in front of it. */
static _Thread_local size_t detail_at;

const char *gk_last_error(void) { return last_error; }
const char *gk_last_detail(void) { return last_error + detail_at; }

gk_status gk_no_case(const char *what, gk_dtype dtype) {
    return gk_fail(GK_ERR_UNSUPPORTED, "%s: no case for %s", what, gk_dtype_name(dtype));
}

void gk_stop_without_case(const char *what, gk_dtype dtype) {
    fprintf(stderr, "gpukern: %s: no case for %s\n", what, gk_dtype_name(dtype));
    abort();
}

gk_status gk_fail(gk_status code, const char *format, ...) {
    va_list list;
    va_start(list, format);
    vsnprintf(last_error, sizeof last_error, format, list);
    va_end(list);
    detail_at = 0;
    return code;
}

gk_status gk_named(const char *name, gk_status status) {
    const size_t length = strlen(name) + 2;
    if (status == GK_OK || length > sizeof last_error / 2) return status;
    memmove(last_error + length, last_error, sizeof last_error - length);
    last_error[sizeof last_error - 1] = 0;
    memcpy(last_error, name, length - 2);
    memcpy(last_error + length - 2, ": ", 2);
    detail_at = length;
    return status;
}
