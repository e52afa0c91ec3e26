/* SPDX-License-Identifier: BSD-3-Clause */
/* prefer.h: the preferred instance for each tuning key of gemm calls. gk_gemm_prefer writes it
 * and dispatch.c reads it.
 *
 * Any thread may read at any time without a lock. An instance is an opaque pointer here, so that
 * all of this runs and is tested without a GPU. */
#ifndef GPUKERN_PREFER_H
#define GPUKERN_PREFER_H

#include "internal.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A tuning key: the properties of a call that decide which instance is fastest. Leading dimensions
 * of a count as rows if b does not have them and a continues its rows along them with one stride:
 * [4, 512, K] and [2048, K] have one key. bias is not part of the key because it costs the same in
 * every instance. */
typedef struct gk_gemm_key {
    uint64_t device; /* gk_name_hash of the GPU's name; GPUs of one name share measurements */
    int64_t m, n, k, batch;
    uint8_t dtype, out_dtype, precision, activation;
    uint8_t a, b;    /* 'N': rows are dense, 'T': columns are, 'S': neither */
    uint8_t aligned; /* GK_ALIGNED_*: the tensor and each of its rows (or columns) begin at a
                        multiple of 16 bytes */
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

/* All of a key except the device as one line of text, and back. Reading returns GK_ERR_ARGUMENT
 * unless the text is exactly what writing gives. */
void gk_gemm_key_write(const gk_gemm_key *key, char text[GK_KEY_TEXT_BYTES]);
gk_status gk_gemm_key_read(const char *text, uint64_t device, gk_gemm_key *key);

/* Number of keys with a preferred instance. While it is 0, calls do not compute their key. */
extern int32_t gk_num_preferred;
static inline bool gk_any_preferred(void) {
    return __atomic_load_n(&gk_num_preferred, __ATOMIC_RELAXED) != 0;
}

const void *gk_preferred(const gk_gemm_key *key);                  /* NULL = none */
gk_status gk_prefer(const gk_gemm_key *key, const void *instance); /* NULL forgets */
void gk_prefer_none(void);

#ifdef __cplusplus
}
#endif
#endif
