/* SPDX-License-Identifier: BSD-3-Clause */
/* attn_masked: the block of attn_tile.h with a mask or a bias (csrc/core/attn_mask.h,
 * gpukern_mask.h).
 *
 *   s = cap(scale q k) - slope |i + diagonal - j| + bias    p = exp(s - m) where mask and rules show the key, else 0
 *
 * Tiles of keys begin at multiples of ATTN_MASKED_BKV, which divides a mask's block. Of a tile each
 * strip of lanes is
 *   empty    skipped; a tile that is empty for all strips is not packed
 *   full     as without a mask
 *   partial  masked by words: four vectors of bits, of which each key takes one bit
 * A strip that lacks a key for one lane gives it weight 0, which changes none of the lane's bits,
 * so that skipping depends on other lanes without harm.
 *
 * A value that holds NaN or infinity may be hidden from some lanes and not from others, and 0 times
 * it is NaN. Such keys are packed as zeros; lanes that see them add them one by one behind the
 * product. */
#ifndef GPUKERN_CPU_ATTN_MASKED_H
#define GPUKERN_CPU_ATTN_MASKED_H

#include "attn_tile.h"

enum {
    ATTN_MASKED_BKV = TILED ? GK_MASK_TILE : 64
};

typedef enum strip_state {
    STRIP_EMPTY,
    STRIP_FULL,
    STRIP_PARTIAL
} strip_state;

/* What a strip has of a block by the kinds of its lanes. */
INLINE strip_state strip_state_of(const attn_row *rows, int64_t count, int64_t block) {
    bool any = false, all = true;
    for (int64_t n = 0; n < count; ++n) {
        const int kind = gk_mask_flag(&rows[n].mask, rows[n].i, block) & 3;
        any = any || kind != GK_BLOCK_EMPTY;
        all = all && kind == GK_BLOCK_FULL;
    }
    return !any ? STRIP_EMPTY : all ? STRIP_FULL : STRIP_PARTIAL;
}

/* p of a key and a lane as it was rounded for the product. */
INLINE float strip_p(const cell *p, int64_t key, int64_t lane) {
#if PAIR == 2
    return gk_bf16_to_f32((uint16_t)(p[key / 2 * NR + lane] >> 16 * (key % 2)));
#else
    return p[key * NR + lane];
#endif
}

/* Adds p v of keys that were packed as zeros, to the lanes that see them. */
INLINE void strip_add_keys(float *o, const cell *p, const attn_job *job, const attn_lanes *lanes,
                           int64_t lane, int64_t width, const attn_row *rows, const char *const *v,
                           const int16_t *bad, int count, int64_t j0) {
    for (int b = 0; b < count; ++b)
        for (int64_t n = 0; n < width; ++n) {
            const int64_t j = j0 + bad[b];
            if (j < lanes->lo[lane + n] || j >= lanes->hi[lane + n]) continue;
            if (!attn_row_sees(job->scores, rows + lane + n, j)) continue;
            const float weight = strip_p(p, bad[b], n);
            for (int64_t d = 0; d < job->head_dim_v; ++d)
                o[d * NR + n] += weight * (float)gk_load(v[b], job->dtype, d);
        }
}

/* Lanes `first` .. of kv head h_kv of sequence b, as attn_lanes_fill made them. */
INLINE void attn_block_masked(const attn_job *job, attn_lanes *lanes, const attn_keys *keys,
                              const attn_seq *seq, int64_t b, int64_t h_kv, int64_t first,
                              float scale, float v_scale, char *scratch) {
    static const char zeros[4 * 512]; /* a row of any head_dim */
    const attn_scratch x = attn_scratch_at(scratch, job);
    const attn_scores *scores = job->scores;
    const int64_t head_dim = job->head_dim, head_dim_v = job->head_dim_v, last = lanes->count - 1;
    const int64_t whole = gk_round_up(lanes->count, NR);
    const char *k[ATTN_MAX_BKV], *v[ATTN_MAX_BKV], *bad_v[ATTN_MAX_BKV];
    int16_t bad[ATTN_MAX_BKV];
    attn_row rows[ATTN_MAX_BQ];
    bool started[ATTN_MAX_BQ / NR] = {false};
    strip_state state[ATTN_MAX_BQ / NR];
    const bool biased = attn_has_bias(scores);
    const float left = PAIR == 2 ? scale : 1;
    const bool score_step =
        biased || job->rules->softcap > 0 || job->rules->alibi_slopes || !(left > 0);

    for (int64_t n = 0; n < whole; ++n) {
        const int64_t lane = first + gk_min_i64(n, last);
        rows[n] = attn_row_of(scores, b, h_kv * job->group + lane % job->group, lane / job->group);
    }
    attn_pack_q(&x, lanes, job->dtype, head_dim, scale);
    const int64_t end = lanes->hi[last];
    for (int64_t j = lanes->lo[0] / job->bkv * job->bkv; j < end; j += job->bkv) {
        const int64_t n = gk_min_i64(job->bkv, seq->seq_k - j), cells = cells_of(n),
                      block = j / GK_MASK_TILE;
        bool any = false;
        for (int64_t lane = 0; lane <= last; lane += NR) {
            const int64_t width = gk_min_i64(NR, last + 1 - lane);
            strip_state s = scores->mask ? strip_state_of(rows + lane, width, block) : STRIP_FULL;
            if (lanes->hi[lane + width - 1] <= j || lanes->lo[lane] >= j + n) s = STRIP_EMPTY;
            state[lane / NR] = s;
            any = any || s != STRIP_EMPTY;
        }
        if (!any) continue;

        attn_keys_at(keys, j, n, k, v);
        attn_pack_k(&x, k, n, job->dtype, head_dim);
        const int num_bad = attn_not_finite(v, n, job->dtype, head_dim_v, bad);
        for (int i = 0; i < num_bad; ++i) {
            bad_v[i] = v[bad[i]];
            v[bad[i]] = zeros;
        }
        attn_pack_v(&x, v, n, job->dtype, head_dim_v);
        for (int64_t lane = 0; lane <= last; lane += NR) {
            const int64_t strip = lane / NR, width = gk_min_i64(NR, last + 1 - lane),
                          strip_last = lane + width - 1;
            if (state[strip] == STRIP_EMPTY) continue;
            const bool edge = lanes->lo[strip_last] > j || lanes->hi[lane] < j + n;
            const bool partial = state[strip] == STRIP_PARTIAL;
            float *o = x.o + strip * x.o_strip;
            const int nv = width > W ? NV : 1;
            attn_strip_scores own = {.column = j % GK_MASK_TILE, .bias = x.bias};
            for (int w = 0; w < nv; ++w) {
                const attn_row *row[W];
                vi word[4] = {vi_set1(-1), vi_set1(-1), vi_set1(-1), vi_set1(-1)};
                for (int i = 0; i < W; ++i) row[i] = rows + lane + w * W + i;
                if (partial) attn_words(row, block, word);
                for (int q = 0; q < 4; ++q) own.word[q][w] = word[q];
                if (biased) attn_bias_tile(scores, row, j, n, x.bias + w * W, NR);
            }
            vf shrink[NV];
            bool moved;
            tile_product(job->sum_cells, true, n, width, cells_of(head_dim), x.k, x.k_step,
                         x.q + strip * x.q_strip, NR, x.s, NR, false);
            if (nv == 1 && biased)
                moved = attn_softmax(x.s, n, j, lanes, lane, job, left, shrink, 1, true, true, &own,
                                     true, true);
            else if (nv == 1)
                moved = attn_softmax(x.s, n, j, lanes, lane, job, left, shrink, 1, true, true, &own,
                                     true, false);
            else if (biased)
                moved = attn_softmax(x.s, n, j, lanes, lane, job, left, shrink, NV, true, true,
                                     &own, true, true);
            else if (score_step)
                moved = attn_softmax(x.s, n, j, lanes, lane, job, left, shrink, NV, true, true,
                                     &own, true, false);
            else if (edge || partial)
                moved = attn_softmax(x.s, n, j, lanes, lane, job, left, shrink, NV, false, true,
                                     &own, true, false);
            else
                moved = attn_softmax(x.s, n, j, lanes, lane, job, left, shrink, NV, false, false,
                                     &own, false, false);
            if (keys->dropout) attn_drop((cell *)x.s, n, j, lanes, lane, nv, keys->dropout);
            if (moved && started[strip])
                for (int64_t d = 0; d < head_dim_v; ++d)
                    for (int w = 0; w < nv; ++w) {
                        float *at = o + d * NR + w * W;
                        vf_store(at, vf_load(at) * shrink[w]);
                    }
            tile_product(SUM_CELLS, TILED, head_dim_v, width, cells, x.v, x.v_step,
                         (const cell *)x.s, NR, o, NR, started[strip]);
            started[strip] = true;
            if (num_bad)
                strip_add_keys(o, (const cell *)x.s, job, lanes, lane, width, rows, bad_v, bad,
                               num_bad, j);
        }
    }
    for (int64_t strip = 0; strip * NR <= last; ++strip)
        if (!started[strip]) memset(x.o + strip * x.o_strip, 0, 4 * (size_t)x.o_strip);
    release_tiles();
    attn_store(&x, lanes, job, v_scale);
}

#endif
