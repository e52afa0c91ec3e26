/* SPDX-License-Identifier: BSD-3-Clause */
/* prefer.h: which instance was asked for, by tuning key of gemm calls: what gk_gemm_prefer writes
 * and dispatch.c reads. Any thread reads at any time without a lock; what an instance is stays the
 * caller's business, so that all of this runs and is tested without a GPU. */
#ifndef GPUKERN_PREFER_H
#define GPUKERN_PREFER_H

#include "internal.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A tuning key: what decides which instance is fastest. Leading dimensions of a that b does not
 * share, and that lie densely, count as rows, so that [4, 512, K] and [2048, K] have one key. bias
 * is in no key: it costs the same in every instance. */
typedef struct gk_gemm_key {
    uint64_t device; /* gk_name_hash of the GPU's name: GPUs of one name share what was measured */
    int64_t m, n, k, batch;
    uint8_t dtype, out_dtype, precision, activation;
    uint8_t a, b;    /* 'N': rows are dense, 'T': columns are, 'S': neither */
    uint8_t aligned; /* GK_ALIGNED_*: begins at a multiple of 16 bytes, and so does every row or
                        column */
    uint8_t extras;  /* GK_READS_C, GK_WRITES_PREACT */
} gk_gemm_key;

enum {
    GK_ALIGNED_A = 1,
    GK_ALIGNED_B = 2,
    GK_ALIGNED_OUT = 4,
    GK_READS_C = 1,
    GK_WRITES_PREACT = 2,
    GK_KEY_TEXT_BYTES = 256
};

uint64_t gk_name_hash(const char *name);
void gk_gemm_key_of(uint64_t device, const gk_gemm_args *args, gk_gemm_key *key);

/* All of a key but the device as one line, and back; text that is none of ours is
 * GK_ERR_ARGUMENT. */
void gk_gemm_key_write(const gk_gemm_key *key, char text[GK_KEY_TEXT_BYTES]);
gk_status gk_gemm_key_read(const char *text, uint64_t device, gk_gemm_key *key);

/* How many keys have a preferred instance: calls look no further while there is none. */
extern int32_t gk_num_preferred;
static inline bool gk_any_preferred(void) {
    return __atomic_load_n(&gk_num_preferred, __ATOMIC_RELAXED) != 0;
}

const void *gk_preferred(const gk_gemm_key *key);             /* NULL = none */
gk_status gk_prefer(const gk_gemm_key *key, const void *row); /* row NULL forgets */
void gk_prefer_none(void);

#ifdef __cplusplus
}
#endif
#endif
