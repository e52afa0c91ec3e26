/* SPDX-License-Identifier: BSD-3-Clause */
/* entries.c: the entry points of gpukern.h that every op has, and gk_plan_<op>, gk_run_<op> and
 * gk_describe_<op> of op.h. An op's own file in csrc/api/ checks a call (gk_check_<op>) and
 * counts its bytes and FLOPs (gk_cost_<op>). */
#include "../core/checks.h"
#include "../core/dispatch.h"
#include "gpukern.h"

#include <stddef.h>
#include <string.h>

/* The checks of an entry point after the op's own check: strides, and the results, which the
 * caller has allocated. `writes`: the call will run. */
static gk_status check_call(gk_io *io, bool writes) {
    GK_TRY(gk_check_strides(io));
    for (int i = 0; i < io->num_results; ++i) {
        const gk_tensor *t = io->result[i].given;
        if (io->result[i].optional && !(t && t->data)) continue;
        GK_TRY(gk_check_given(io, i));
        if (writes) GK_TRY(gk_check_apart(io, i));
    }
    return GK_OK;
}

/* Replaces a softcap that the kernels cannot compute with (gk_usable_softcap). `args` then
 * points to a copy with a usable one. The copy includes up to MOST_BEHIND bytes behind the
 * arguments, as many as their size field says: structs such as gk_flash_attn_accumulate_args
 * extend gk_flash_attn_args. */
enum {
    MOST_BEHIND = 64
};
#define WITH_USABLE_SOFTCAP(args, copy, first, rules)                                          \
    do {                                                                                       \
        const double softcap = gk_usable_softcap(&(args)->rules, (args)->first.dtype);         \
        if (softcap == (args)->rules.softcap) break;                                           \
        const size_t bytes = (args)->size < sizeof(copy) ? (args)->size : sizeof(copy);        \
        (copy).args = *(args);                                                                 \
        if (bytes > sizeof *(args)) memcpy((copy).behind, (args) + 1, bytes - sizeof *(args)); \
        (copy).args.size = bytes;                                                              \
        (copy).args.rules.softcap = softcap;                                                   \
        (args) = &(copy).args;                                                                 \
    } while (0)
_Static_assert(sizeof(gk_flash_attn_accumulate_args) <= sizeof(gk_flash_attn_args) + MOST_BEHIND,
               "a copy has no room");
_Static_assert(sizeof(gk_flash_attn_masked_args) <= sizeof(gk_flash_attn_args) + MOST_BEHIND,
               "a copy has no room");
_Static_assert(sizeof(gk_flash_attn_masked_bwd_args) <=
                   sizeof(gk_flash_attn_bwd_args) + MOST_BEHIND,
               "a copy has no room");
_Static_assert(sizeof(gk_paged_attn_masked_args) <= sizeof(gk_paged_attn_args) + MOST_BEHIND,
               "a copy has no room");
/* The smallest struct that a caller may pass. weight_gemm's ended before `offs`. */
#define LEAST_SIZE(args)                                                  \
    _Generic((args),                                                      \
        const gk_weight_gemm_args *: offsetof(gk_weight_gemm_args, offs), \
        default: sizeof *(args))
/* Replaces a struct that ends early. `args` then points to a copy whose last fields are 0. */
#define WITH_ALL_FIELDS(args, copy)                           \
    do {                                                      \
        if (!(args) || (args)->size >= sizeof *(args)) break; \
        memset(&(copy).args, 0, sizeof *(args));              \
        memcpy(&(copy).args, args, (args)->size);             \
        (copy).args.size = sizeof *(args);                    \
        (args) = &(copy).args;                                \
    } while (0)
#define COPY_OF(arguments)        \
    struct {                      \
        arguments args;           \
        char behind[MOST_BEHIND]; \
    }

#define ENTRIES(NAME, stem, arguments, first, adapt, workspace_of, workspace_bytes_of)            \
    static gk_status checked_##stem(const gk_context *ctx, const arguments *args, gk_depth depth, \
                                    bool writes) {                                                \
        COPY_OF(arguments) copy;                                                                  \
        gk_io io;                                                                                 \
        gk_io_begin(&io, depth);                                                                  \
        GK_REQUIRE(args, "args is NULL");                                                         \
        GK_TRY(gk_check_context(ctx, args->size, LEAST_SIZE(args)));                              \
        WITH_ALL_FIELDS(args, copy);                                                              \
        GK_TRY(gk_check_##stem(ctx, args, &io));                                                  \
        return check_call(&io, writes);                                                           \
    }                                                                                             \
    gk_status gk_plan_##stem(const gk_context *ctx, const arguments *args, gk_plan *plan) {       \
        COPY_OF(arguments) copy;                                                                  \
        adapt;                                                                                    \
        return gk_dispatch_plan(ctx, GK_OP_##NAME, args->first.dtype, args, plan);                \
    }                                                                                             \
    gk_status gk_run_##stem(const gk_context *ctx, const arguments *args, const gk_plan *plan,    \
                            void *work, size_t work_bytes) {                                      \
        COPY_OF(arguments) copy;                                                                  \
        adapt;                                                                                    \
        return gk_dispatch_run(ctx, args, plan, work, work_bytes);                                \
    }                                                                                             \
    gk_status gk_describe_##stem(const gk_context *ctx, const arguments *args,                    \
                                 gk_explanation *out) {                                           \
        COPY_OF(arguments) copy;                                                                  \
        adapt;                                                                                    \
        GK_TRY(gk_dispatch_explain(ctx, GK_OP_##NAME, args->first.dtype, args, out));             \
        gk_cost_##stem(ctx, args, out);                                                           \
        gk_dispatch_bound(ctx, args->first.dtype, out);                                           \
        return GK_OK;                                                                             \
    }                                                                                             \
    static gk_status call_##stem(const gk_context *ctx, const arguments *args) {                  \
        COPY_OF(arguments) copy;                                                                  \
        GK_TRY(checked_##stem(ctx, args, GK_CONTENTS, true));                                     \
        adapt;                                                                                    \
        return gk_dispatch_call(ctx, GK_OP_##NAME, args->first.dtype, args, workspace_of,         \
                                workspace_bytes_of);                                              \
    }                                                                                             \
    gk_status gk_##stem(const gk_context *ctx, const arguments *args) {                           \
        return gk_named("gk_" #stem, call_##stem(ctx, args));                                     \
    }                                                                                             \
    gk_status gk_explain_##stem(const gk_context *ctx, const arguments *args,                     \
                                gk_explanation *out) {                                            \
        gk_status status = checked_##stem(ctx, args, GK_CONTENTS, false);                         \
        if (status == GK_OK) status = gk_describe_##stem(ctx, args, out);                         \
        return gk_named("gk_explain_" #stem, status);                                             \
    }                                                                                             \
    size_t gk_##stem##_workspace_bytes(const gk_context *ctx, const arguments *args) {            \
        COPY_OF(arguments) copy;                                                                  \
        size_t bytes = 0;                                                                         \
        gk_status status = checked_##stem(ctx, args, GK_DATA, false);                             \
        if (status == GK_OK) {                                                                    \
            adapt;                                                                                \
            status = gk_dispatch_workspace(ctx, GK_OP_##NAME, args->first.dtype, args, &bytes);   \
        }                                                                                         \
        gk_named("gk_" #stem, status);                                                            \
        return bytes;                                                                             \
    }

#define OP(NAME, stem, arguments, first) \
    ENTRIES(NAME, stem, arguments, first, WITH_ALL_FIELDS(args, copy), NULL, 0)
#define OP_WITH_WORKSPACE(NAME, stem, arguments, first)                                 \
    ENTRIES(NAME, stem, arguments, first, WITH_ALL_FIELDS(args, copy), args->workspace, \
            args->workspace_bytes)
#define OP_WITH_RULES(NAME, stem, arguments, first, rules)                               \
    ENTRIES(NAME, stem, arguments, first, WITH_USABLE_SOFTCAP(args, copy, first, rules), \
            args->workspace, args->workspace_bytes)
#include "../core/ops.def"
