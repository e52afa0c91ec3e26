/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_bwd_masked: a pair of tiles of the backward with a mask or a bias. Included by
 * flash_attn_bwd.c alone.
 *
 * A strip of keys lies in one block of the mask. A strip that is empty for all rows is skipped. dQ
 * begins with zeros and takes each strip as it comes, because strips may be missing. Keys whose K
 * holds NaN or infinity are zeros in dQ's product; rows that see them add them one by one. */

/* Numbers of the keys of a tile whose rows of K, from `k` on, are not finite. Where cells are pairs
 * they become zeros in the panel of dQ; where cells are floats the panel serves S too, and
 * pair_run_masked takes them out for the product of dQ. */
static void find_bad_keys(pair *t, const char *k, int16_t *bad) {
    const int64_t es = (int64_t)gk_dtype_bytes(t->g->dtype), dim = t->g->shape.head_dim;
    const char *rows[MAX_BKV];
    t->k_at = k;
    for (int64_t j = 0; j < t->keys; ++j) rows[j] = k + es * j * t->x->k_row;
    t->num_bad = attn_not_finite(rows, t->keys, t->g->dtype, dim, bad);
#if PAIR == 2
    for (int i = 0; i < t->num_bad; ++i)
        for (int64_t d = 0; d < dim; ++d) {
            const int64_t at =
                TILED ? d * t->g->z.ld_k + bad[i] / 2 : bad[i] / 2 * t->g->z.ld_k + d;
            t->w->k_panel[at] &= bad[i] % 2 ? 0xffffu : 0xffff0000u;
        }
#endif
}

/* Rows without keys take part in nothing, whatever their q and their incoming gradient hold. */
static void clear_empty_rows(const pair *t) {
    const float *lse = (const float *)t->lse;
    const scratch *w = t->w;
    for (int64_t i = 0; i < t->rows; ++i) {
        if (lse[i] != INFINITY) continue;
        cell *const panel[2] = {w->q_panel + i / PAIR * t->g->z.ld_d,
                                w->do_panel + i / PAIR * t->g->z.ld_dv};
        const int64_t dim[2] = {t->g->shape.head_dim, t->g->shape.head_dim_v};
        for (int p = 0; p < 2; ++p)
            for (int64_t d = 0; d < dim[p]; ++d) {
#if PAIR == 2
                panel[p][d] &= i % 2 ? 0xffffu : 0xffff0000u;
#else
                panel[p][d] = 0;
#endif
            }
    }
}

/* Whether the mask shows any key of a block to any of some rows, and all keys to all of them. */
static void ask_rows(const attn_row *rows, int64_t count, int64_t block, bool *any, bool *all) {
    *any = false;
    *all = true;
    for (int64_t i = 0; i < count; ++i) {
        const int kind = gk_mask_flag(&rows[i].mask, rows[i].i, block) & 3;
        *any = *any || kind != GK_BLOCK_EMPTY;
        *all = *all && kind == GK_BLOCK_FULL;
    }
}

/* dS of a key and a lane as it was rounded for the product. */
static float rounded_ds(const pair *t, int64_t key, int64_t lane) {
    const cell x = t->w->ds_panel[key / PAIR * t->g->z.ld_q + lane];
#if PAIR == 2
    return gk_bf16_to_f32((uint16_t)(x >> 16 * (key % 2)));
#else
    return x;
#endif
}

/* dQ of the blocks of lanes [lane0, lane1) and the keys of a strip. */
static void strip_dq(const pair *t, const strip *r, float *dq) {
    const scratch *w = t->w;
    const sizes *z = &t->g->z;
    const int64_t dim = t->g->shape.head_dim, c0 = r->key / PAIR,
                  es = (int64_t)gk_dtype_bytes(t->g->dtype);
    int num = 0;
    int16_t bad[MAX_BKV];
    for (int i = 0; i < t->num_bad; ++i)
        if (t->bad[i] >= r->key && t->bad[i] < r->key + r->keys) bad[num++] = t->bad[i];
    for (int i = 0; PAIR == 1 && i < num; ++i)
        memset(w->k_rows + bad[i] * z->ld_kd, 0, 4 * (size_t)z->ld_kd);
    for (int64_t l = r->lane0; l < gk_min_i64(r->lane1, t->rows); l += NR) {
        float *block = dq + l / NR * z->dq_block;
        for (int64_t c = cells_of(r->keys); c < whole_cells(r->keys); ++c)
            for (int64_t n = 0; n < NR; n += W)
                vc_store(w->ds_panel + (c0 + c) * z->ld_q + l + n, vc_set1(0));
        tile_product(SUM_CELLS, TILED, dim, gk_min_i64(NR, t->lanes - l), cells_of(r->keys),
                     w->k_panel + c0 * (TILED ? 1 : z->ld_k), z->ld_k,
                     w->ds_panel + c0 * z->ld_q + l, z->ld_q, block, NR, true);
        for (int i = 0; i < num; ++i)
            for (int64_t n = l; n < gk_min_i64(l + NR, t->rows); ++n) {
                const int64_t key = t->key0 + bad[i], row = t->i0 + n;
                if (key < gk_span_lo(&t->x->span, row) || key >= gk_span_hi(&t->x->span, row))
                    continue;
                if (!attn_row_sees(&t->g->scores, t->own + n, key)) continue;
                const float ds = rounded_ds(t, bad[i], n);
                const char *k = t->k_at + es * bad[i] * t->x->k_row;
                for (int64_t d = 0; d < dim; ++d)
                    block[d * NR + n - l] += ds * (float)gk_load(k, t->g->dtype, d);
            }
    }
    for (int i = 0; PAIR == 1 && i < num; ++i)
        pack_rows(w->k_rows + bad[i] * z->ld_kd, z->ld_kd, t->k_at + es * bad[i] * t->x->k_row,
                  t->g->dtype, t->x->k_row, 1, dim);
}

/* Steps 3 and 4 of keys [from, to) of the tile; dq are the blocks of the query tile. */
static void pair_run_masked(pair *t, int64_t from, int64_t to, float *dq) {
    const scratch *w = t->w;
    const sizes *z = &t->g->z;
    const attn_scores *scores = &t->g->scores;
    const int64_t dim = t->g->shape.head_dim, dim_v = t->g->shape.head_dim_v, ld_q = z->ld_q,
                  ld_qc = z->ld_qc;

    for (int64_t k = from / z->tile.strip * z->tile.strip; k < to; k += z->tile.strip) {
        const int64_t keys = gk_min_i64(z->tile.strip, to - k), skip = PAIR == 1 ? k * ld_q : 0;
        const int64_t block = (t->key0 + k) / GK_MASK_TILE;
        const int64_t row0 =
            gk_clamp_i64(first_row(t->x, t->key0 + k) - t->i0, 0, t->rows - 1) / NR * NR;
        const int64_t row1 =
            gk_clamp_i64(end_row(t->x, t->key0 + k + keys - 1) - t->i0, row0 + 1, t->rows);
        const strip r = {k, keys, row0, gk_min_i64(t->lanes, gk_round_up(row1, NR))};
        const int64_t rows = gk_min_i64(r.lane1, t->rows) - row0;
        bool any = true, full = true;
        if (t->word) ask_rows(t->own + row0, rows, block, &any, &full);
        if (!any) continue;
        const bool edge = gk_span_lo(&t->x->span, t->i0 + row0 + rows - 1) > t->key0 + k ||
                          gk_span_hi(&t->x->span, t->i0 + row0) < t->key0 + k + keys ||
                          k + keys > t->keys;
        full = full && !edge && !w->bias && !w->raw;
        t->column = (t->key0 + k) % GK_MASK_TILE;
        for (int64_t l = r.lane0; l < r.lane1 && !full; l += W) {
            const attn_row *row[W];
            for (int i = 0; i < W; ++i) row[i] = t->own + l + i;
            if (t->word) {
                vi word[4];
                attn_words(row, block, word);
                for (int q = 0; q < 4; ++q) t->word[q * KEEP_STEP + l / W] = word[q];
            }
            if (w->bias)
                attn_bias_tile(scores, row, t->key0 + k, gk_min_i64(keys, t->keys - k), w->bias + l,
                               ld_q);
        }
        /* 3. scores */
        if (t->keep) keep_strip(t, &r);
        tile_product(t->g->shape.sum_cells, true, keys, r.lane1 - row0, cells_of(dim),
                     w->k_rows + k * z->ld_kd, z->ld_kd, w->q_t + row0, ld_q, w->s + skip + row0,
                     ld_q, false);
        tile_product(t->g->shape.sum_cells, true, keys, r.lane1 - row0, cells_of(dim_v),
                     w->v_rows + k * z->ld_kdv, z->ld_kdv, w->do_t + row0, ld_q,
                     w->dp + skip + row0, ld_q, false);
        (!full ? score_own : t->modified ? score_modified : score_plain)(t, &r);
        if (PAIR == 2 && r.lane1 > t->rows)
            clear_lanes(w, ld_qc, k, keys, t->rows, row0 / PAIR + whole_cells(rows));
        /* 4. gradients */
        const int64_t c0 = row0 / PAIR, cells = cells_of(rows);
        tile_product(SUM_CELLS, true, keys, dim_v, cells, w->p_rows + k * ld_qc + c0, ld_qc,
                     w->do_panel + c0 * z->ld_dv, z->ld_dv, w->dv + k * z->ld_dv, z->ld_dv, true);
        tile_product(SUM_CELLS, true, keys, dim, cells, w->ds_rows + k * ld_qc + c0, ld_qc,
                     w->q_panel + c0 * z->ld_d, z->ld_d, w->dk + k * z->ld_d, z->ld_d, true);
        strip_dq(t, &r, dq);
        if (w->raw) add_dbias(t, &r);
    }
}
