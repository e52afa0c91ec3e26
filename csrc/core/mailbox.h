/* SPDX-License-Identifier: BSD-3-Clause */
/* mailbox.h: the layout of a rank's mailbox (gk_sum_over_ranks): counters of its own calls, a flag
 * for each block of each rank, and two buffers for the x of each rank, which calls use alternately.
 */
#ifndef GPUKERN_MAILBOX_H
#define GPUKERN_MAILBOX_H

#include "gpukern.h"

enum {
    GK_MAILBOX_BLOCKS = 64, /* most blocks of a call; each has its own flag */
    GK_MAILBOX_FLAGS =
        128, /* bytes before the flags: the number of calls, and of a call's blocks that are done */
    GK_MAILBOX_HEADER = GK_MAILBOX_FLAGS + 4 * GK_MAILBOX_BLOCKS * GK_MOST_RANKS,
};

/* csrc/cuda/collective/sum_over_ranks.cu; the arguments are checked. */
#ifdef __cplusplus
extern "C" {
#endif
gk_status gk_cuda_sum_over_ranks(const gk_context *ctx, const gk_sum_over_ranks_args *args);
uint64_t gk_cuda_capture_id(void *stream);
#ifdef __cplusplus
}
#endif

#endif
