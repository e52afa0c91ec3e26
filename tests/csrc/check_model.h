/* SPDX-License-Identifier: BSD-3-Clause */
/* check_model.h: the parts that the host tests of CUDA copies share: counted checks and
 * reproducible random numbers. */
#ifndef GPUKERN_CHECK_MODEL_H
#define GPUKERN_CHECK_MODEL_H

#include <stdint.h>
#include <stdio.h>
#include <string.h>

static long num_passed, num_failed;

static void check(bool good, const char *what, long a, long b) {
    ++(good ? num_passed : num_failed);
    if (!good && num_failed < 40) printf("FAILED %s %ld %ld\n", what, a, b);
}

static uint64_t state = 1;
static int64_t below(int64_t n) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (int64_t)((state >> 33) % (uint64_t)n);
}

/* bfloat16: small whole numbers and their sums are exact */
static inline float number(uint16_t bits) {
    const uint32_t all = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &all, sizeof x);
    return x;
}
static inline uint16_t random_element() {
    const float x = (float)(below(7) - 3);
    uint32_t all;
    memcpy(&all, &x, sizeof all);
    return (uint16_t)(all >> 16);
}

#endif
