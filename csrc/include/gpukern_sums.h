/* SPDX-License-Identifier: BSD-3-Clause */
/* gpukern_sums.h: sums over the GPUs of one host by one kernel, through memory that all of them
 * reach. gpukern.h has the conventions; include this page beside it. */
#ifndef GPUKERN_SUMS_H
#define GPUKERN_SUMS_H

#include "gpukern.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Most ranks that one call sums over. */
#define GK_MOST_RANKS 16

/* out = the sum over ranks of their x, the same bits on every rank: in float32 in the ranks' order,
 * rounded once. One kernel: each rank writes its x into the others' mailboxes, says so by flags,
 * and adds what came into its own. Every rank makes the same calls in the same order; the kernel
 * waits for the others' on the GPU, up to timeout_s, and then ends the process's use of the GPU by
 * a trap: an error, never a wrong sum. Meant for what is short: all of x goes to every rank.
 *
 * mailboxes: the address of each rank's in this GPU's address space, of gk_mailbox_bytes, zeroed
 * before the first call, multiples of 16. One set of mailboxes serves calls that follow each other
 * on one stream, or one captured graph. */
typedef struct gk_sum_over_ranks_args {
    size_t size;
    gk_tensor x;            /* float32, contiguous */
    gk_tensor out;          /* x's shape, contiguous, GK_F32, GK_BF16 or GK_F16 */
    void *const *mailboxes; /* [num_ranks] */
    size_t mailbox_bytes;   /* of each: the same on every rank */
    int32_t rank, num_ranks;
    double timeout_s;
} gk_sum_over_ranks_args;

/* Of sums of up to so many elements. */
GK_API size_t gk_mailbox_bytes(int64_t elements, int32_t num_ranks);
GK_API gk_status gk_sum_over_ranks(const gk_context *, const gk_sum_over_ranks_args *);
/* The number of the capture into a CUDA graph that a stream is in, unique in this process; 0: none.
 * What finds a set of mailboxes by it gives each graph its own. */
GK_API uint64_t gk_capture_id(void *stream);

#ifdef __cplusplus
}
#endif
#endif
