/* SPDX-License-Identifier: BSD-3-Clause */
/* latent_row.h: a row of a paged cache of latent attention in 8 bits, 656 bytes, as DeepSeek's
 * FlashMLA and vLLM store it ("fp8_656"):
 *
 *   0 .. 511    the 512 latent columns as e4m3 codes
 *   512 .. 527  four float32 scales, each of 128 columns
 *   528 .. 655  the 64 columns with the rotary position, bfloat16
 *
 * A latent column is its code times its scale. Writers make the scales that quantize makes with
 * granularity 1x128, max(amax / 448, 2^-126). Readers take any scale. */
#ifndef GPUKERN_LATENT_ROW_H
#define GPUKERN_LATENT_ROW_H

#include "codes.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    GK_LATENT_DIM = 512, /* latent columns; attention's values are these columns, too */
    GK_LATENT_ROPE = 64,
    GK_LATENT_BLOCK = 128, /* columns of a scale */
    GK_LATENT_SCALES_AT = GK_LATENT_DIM,
    GK_LATENT_ROPE_AT = GK_LATENT_SCALES_AT + GK_LATENT_DIM / GK_LATENT_BLOCK * 4,
    GK_LATENT_BYTES = GK_LATENT_ROPE_AT + GK_LATENT_ROPE * 2
};

/* The scale of latent column d. The row may begin at any address. */
static inline float gk_latent_scale_at(const void *row, int64_t d) {
    float scale;
    memcpy(&scale, (const char *)row + GK_LATENT_SCALES_AT + d / GK_LATENT_BLOCK * 4, 4);
    return scale;
}

/* Column d of a row, 0 .. 575. The product of a code and a scale is exact in double. */
static inline double gk_latent_value(const void *row, int64_t d) {
    if (d < GK_LATENT_DIM)
        return (double)gk_e4m3_to_f32(((const uint8_t *)row)[d]) * gk_latent_scale_at(row, d);
    uint16_t upper;
    memcpy(&upper, (const char *)row + GK_LATENT_ROPE_AT + (d - GK_LATENT_DIM) * 2, 2);
    const uint32_t bits = (uint32_t)upper << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* The scale of a block of columns. It is NaN if one of them is infinite or NaN. */
static inline float gk_latent_scale(const float *x) {
    uint32_t most = 0;
    for (int d = 0; d < GK_LATENT_BLOCK; ++d) {
        uint32_t size;
        memcpy(&size, x + d, 4);
        size &= 0x7fffffff;
        most = size > most ? size : most;
    }
    float amax;
    memcpy(&amax, &most, 4);
    return most >= 0x7f800000u ? NAN : fmaxf(amax / GK_E4M3_MAX, 0x1p-126f);
}

#ifdef __cplusplus
}
#endif
#endif
