/* SPDX-License-Identifier: BSD-3-Clause */
/* paged_tiles: few lanes of paged_attn on tiles (AMX): 2 to 64 query tokens x heads of the group,
 * each key read once.
 *
 *   S^T = K Q^T     A  K of the unit, copied out of its pages     B  Q of 16 lanes
 *   O += P V        A  P of 16 lanes                              B  V of the unit, neighbouring keys zipped
 *
 * p leaves the softmax as a B, [pair of keys][lane]; one transposition of 16 x 16 cells makes it an
 * A. O stays in L1 from unit to unit. While a row is copied, a row of the next unit is fetched.
 * Included by paged_attn.c alone. */
_Static_assert(W == K_CELLS, "a tile is 16 lanes and 16 cells");

/* The lines of some bytes more, one by one: rows of the next unit. */
INLINE void fetch_lines(fetch *f, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) f->at = fetch_bytes(f, f->at, 64);
}

/* Head h of a unit: keys j0 .. j0 + n, whose rows of this head lie k_at and v_at behind k and v. */
static void unit_on_tiles(const paged_job *job, const lanes_scratch *own, const paged_lane *lanes,
                          int64_t num_lanes, int64_t h, float scale, int64_t j0, int64_t n,
                          const char *const *k, int64_t k_at, const char *const *v, int64_t v_at,
                          fetch *k_next, fetch *v_next) {
    const int64_t head_dim = job->tile.head_dim, head_dim_v = job->tile.head_dim_v,
                  unit = job->blocks->unit;
    const gk_dtype dtype = job->tile.dtype;
    for (int64_t i = 0; i < n; ++i) {
        for (int64_t c = 0; c < job->q_step; c += W)
            vc_store(own->k + i * job->q_step + c,
                     vc_load_along_k(k[i] + k_at, dtype, c * PAIR, head_dim - c * PAIR));
        fetch_lines(k_next, 2 * head_dim);
    }
    for (int64_t i = 0; i < PAIR * whole_cells(n); i += PAIR) {
        cell *to = own->v + i / PAIR * job->o_step;
        for (int64_t d = 0; d < head_dim_v; d += W)
            vc_store(to + d, i < n
                                 ? vc_load_across_k(v[i] + v_at, i + 1 < n ? v[i + 1] + v_at : NULL,
                                                    dtype, d, head_dim_v - d)
                                 : vc_set1(0));
        fetch_lines(v_next, PAIR * 2 * head_dim_v);
    }
    for (int64_t l = 0; l < num_lanes; l += W) {
        float *s = own->s + h * own->s_head + l * unit,
              *o = own->o + h * own->o_head + l * job->partial;
        cell *p = own->p + h * own->s_head + l * unit;
        tile_product(SUM_CELLS, true, n, W, cells_of(head_dim), own->k, job->q_step,
                     own->q + h * own->q_head + l * job->q_step, W, s, W, false);
        softmax(W, job, lanes + l, scale, j0, n, s, p, o);
        /* [pair][lane] to [lane][pair], in place */
        for (int64_t c = 0; c < whole_cells(n); c += W) {
            vc r[W];
            for (int64_t i = 0; i < W; ++i)
                r[i] = c + i < cells_of(n) ? vc_load(p + (c + i) * W) : vc_set1(0);
            vc_transpose(r);
            for (int64_t i = 0; i < W; ++i) vc_store(p + (c + i) * W, r[i]);
            tile_product(SUM_CELLS, true, W, head_dim_v, W, p + c * W, W, own->v + c * job->o_step,
                         job->o_step, o, job->partial, true);
        }
    }
}
