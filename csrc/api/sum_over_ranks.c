/* SPDX-License-Identifier: BSD-3-Clause */
/* sum_over_ranks: the check of gk_sum_over_ranks. It is not in ops.def: it has one kernel and
 * needs other ranks. */
#include "../core/checks.h"
#include "../core/mailbox.h"
#ifdef GPUKERN_HAS_CUDA
#include "../cuda/kernels.h"
#endif

static int64_t padded_elements(int64_t elements) { return gk_ceil_div(elements, 4) * 4; }

size_t gk_mailbox_bytes(int64_t elements, int32_t num_ranks) {
    if (elements < 0 || num_ranks < 1) return 0;
    /* two buffers for each rank, which alternate from call to call (cuda/collective) */
    const int64_t element_bytes = 2 * (int64_t)sizeof(float) * num_ranks;
    if (elements > (INT64_MAX - GK_MAILBOX_HEADER) / element_bytes - 4) return SIZE_MAX;
    return GK_MAILBOX_HEADER + (size_t)(padded_elements(elements) * element_bytes);
}

static gk_status check(const gk_context *ctx, const gk_sum_over_ranks_args *s) {
    gk_io io;
    gk_io_begin(&io, GK_CONTENTS);
    GK_REQUIRE(s, "args is NULL");
    GK_TRY(gk_check_context(ctx, s->size, sizeof *s));
    const gk_dtype to = s->out.dtype;
    GK_TRY(gk_take(&io, "x", &s->x, GK_CONTIGUOUS));
    GK_TRY(gk_check_dtype(&io, "x", &s->x, GK_F32));
    GK_REQUIRE(to == GK_F32 || to == GK_BF16 || to == GK_F16,
               "out must be float32, bfloat16 or float16, got %s", io.dtype_name(to));
    gk_give(&io, "out", &s->out, to, s->x.ndim, s->x.shape, GK_CONTIGUOUS);
    GK_TRY(gk_check_strides(&io));
    GK_TRY(gk_check_given(&io, 0));
    GK_TRY(gk_check_apart(&io, 0));
    GK_REQUIRE(s->num_ranks >= 2 && s->num_ranks <= GK_MOST_RANKS,
               "num_ranks must be 2 to %d, got %d", GK_MOST_RANKS, (int)s->num_ranks);
    GK_REQUIRE(s->rank >= 0 && s->rank < s->num_ranks, "rank must be 0 to %d, got %d",
               (int)s->num_ranks - 1, (int)s->rank);
    const size_t least = gk_mailbox_bytes(gk_numel(&s->x), s->num_ranks);
    GK_REQUIRE(s->mailbox_bytes >= least, "a mailbox has %zu bytes, expected %zu", s->mailbox_bytes,
               least);
    for (int32_t r = 0; r < s->num_ranks; ++r)
        GK_REQUIRE(s->mailboxes && s->mailboxes[r] && (uintptr_t)s->mailboxes[r] % 16 == 0,
                   "mailbox %d must be an address that is a multiple of 16", (int)r);
    GK_REQUIRE((uintptr_t)s->x.const_data % 16 == 0 && (uintptr_t)s->out.data % 16 == 0,
               "x and out must begin at multiples of 16 bytes");
    GK_REQUIRE(s->timeout_s > 0, "timeout_s must be more than 0, got %g", s->timeout_s);
    GK_REQUIRE(ctx->device == GK_CUDA, "x must be on a GPU");
    return GK_OK;
}

static gk_status run(const gk_context *ctx, const gk_sum_over_ranks_args *s) {
    GK_TRY(check(ctx, s));
    if (gk_numel(&s->x) == 0) return GK_OK;
#ifdef GPUKERN_HAS_CUDA
    const int32_t before = gk_gpu_enter(ctx->index);
    if (before < 0) return GK_ERR_DEVICE;
    const gk_status status = gk_cuda_sum_over_ranks(ctx, s);
    gk_gpu_leave(before);
    return status;
#else
    return gk_fail(GK_ERR_UNSUPPORTED, "this build of gpukern has kernels for the cpu");
#endif
}

gk_status gk_sum_over_ranks(const gk_context *ctx, const gk_sum_over_ranks_args *args) {
    return gk_named("gk_sum_over_ranks", run(ctx, args));
}

uint64_t gk_capture_id(void *stream) {
#ifdef GPUKERN_HAS_CUDA
    return gk_cuda_capture_id(stream);
#else
    (void)stream;
    return 0;
#endif
}
