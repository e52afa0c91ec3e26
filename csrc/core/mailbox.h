/* SPDX-License-Identifier: BSD-3-Clause */
/* mailbox.h: the memory layout of a rank's mailbox (gk_sum_over_ranks). It holds counters of the
 * rank's own calls, a flag for each block of each rank, and two buffers with a place for the x
 * of each rank. Consecutive calls alternate between the two buffers. */
#ifndef GPUKERN_MAILBOX_H
#define GPUKERN_MAILBOX_H

#include "gpukern.h"

enum {
    GK_MAILBOX_BLOCKS = 64, /* most blocks of a call; each has its own flag */
    /* bytes in front of the flags: a counter of calls, and a counter of a call's finished blocks */
    GK_MAILBOX_FLAGS = 128,
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
