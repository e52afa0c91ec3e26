/* SPDX-License-Identifier: BSD-3-Clause */
/* check_cuda_cache.h: check_cuda's random problems for rope_kv_write, which writes like
 * kv_cache_write and computes before it.
 *
 * size: (|x1 cos| + |x2 sin|) of the normalised row, divided by the scale; loss u (64 + 4 sqrt
 * D). For codes add half a step of the code; for subnormal codes and for int8 there is an
 * absolute floor. */
static struct {
    gk_rope_kv_write_args args;
    check_tensor q, k, v, cos, sin, positions, k_cache, v_cache, slots, q_weight, k_weight, k_scale,
        v_scale, out;
} rk;

static void rope_write_draw(gk_dtype dtype, bool large) {
    static const int64_t dims[] = {1, 2, 6, 8, 24, 40, 64, 80, 96, 128, 128, 192, 256, 320, 512},
                         pages[] = {1, 3, 16, 64};
    static const int transposed[3] = {1, 0, 2};
    const int64_t tokens = check_below(4) ? check_below(large ? 300 : 40) : check_below(4),
                  page = PICK(pages);
    const int64_t heads_q = 1 + check_below(9), heads = 1 + check_below(4), dim = PICK(dims);
    const int64_t dim_v = check_below(3) ? dim : PICK(dims), num_blocks = 2 * tokens / page + 1;
    int64_t half = check_below(3) ? dim / 2 : check_below(dim / 2 + 1);
    if (check_below(3) == 0) half = half / 8 * 8;
    const int64_t q[3] = {tokens, heads_q, dim}, k[3] = {tokens, heads, dim},
                  v[3] = {tokens, heads, dim_v};
    const int64_t table[2] = {3 + check_below(90), half};
    const bool heads_first = check_below(2);
    const gk_dtype stored = draw_stored(dtype), stats = gk_stats_dtype(dtype),
                   weights = vector_dtype(dtype);
    rk.q = check_tensor_make(dtype, 3, q, check_below(2) ? transposed : NULL, 1, pad_for(dim));
    rk.k = check_tensor_make(dtype, 3, k, NULL, 1, pad_for(dim));
    rk.v = check_tensor_make(dtype, 3, v, NULL, 1, pad_for(dim_v));
    rk.out = check_tensor_make(dtype, 3, q, check_below(2) ? transposed : NULL, 1, pad_for(dim));
    rk.cos = check_tensor_make(check_below(2) ? stats : GK_F32, 2, table, NULL, 1, pad_for(half));
    rk.sin = check_tensor_make(rk.cos.t.dtype, 2, table, NULL, 1, pad_for(half));
    rk.positions = check_tensor_make(check_below(2) ? GK_I32 : GK_I64, 1, &tokens, NULL,
                                     1 + check_below(2), 0);
    rk.slots = check_tensor_make(check_below(2) ? GK_I32 : GK_I64, 1, &tokens, NULL,
                                 1 + check_below(2), 0);
    rk.q_weight = check_tensor_make(weights, 1, &dim, NULL, 1 + (check_below(4) == 0), 0);
    rk.k_weight = check_tensor_make(weights, 1, &dim, NULL, 1 + (check_below(4) == 0), 0);
    rk.k_scale = make_scale(stats, stored, num_blocks, heads, 0.5);
    rk.v_scale = make_scale(stats, stored, num_blocks, heads, 0.5);
    rk.k_cache = make_cache(stored, num_blocks, page, heads, dim, heads_first);
    rk.v_cache = make_cache(stored, num_blocks, page, heads, dim_v, heads_first);
    mirror(&rk.q, "q", false);
    mirror(&rk.k, "k", false);
    mirror(&rk.v, "v", false);
    mirror(&rk.cos, "cos", false);
    mirror(&rk.sin, "sin", false);
    mirror(&rk.positions, "positions", false);
    mirror(&rk.slots, "slots", false);
    mirror(&rk.q_weight, "q_weight", false);
    mirror(&rk.k_weight, "k_weight", false);
    mirror(&rk.k_scale, "k_scale", false);
    mirror(&rk.v_scale, "v_scale", false);
    mirror(&rk.k_cache, "k_cache", true);
    mirror(&rk.v_cache, "v_cache", true);
    mirror(&rk.out, "out_q", true);
    rk.args = (gk_rope_kv_write_args){
        .size = sizeof rk.args, .q = rk.q.t, .k = rk.k.t, .v = rk.v.t, .cos = rk.cos.t};
    gk_rope_kv_write_args *a = &rk.args;
    a->sin = rk.sin.t;
    a->positions = rk.positions.t;
    a->k_cache = rk.k_cache.t;
    a->v_cache = rk.v_cache.t;
    a->slots = rk.slots.t;
    a->out_q = rk.out.t;
    a->eps = check_below(2) ? 1e-6 : 0.1;
    a->q_weight = check_below(2) ? &rk.q_weight.t : NULL;
    a->k_weight = check_below(2) ? &rk.k_weight.t : NULL;
    a->k_scale = check_below(2) ? &rk.k_scale.t : NULL;
    a->v_scale = check_below(2) ? &rk.v_scale.t : NULL;
    a->interleaved = (int32_t)check_below(2);
    say("%s interleaved %d cache %s", heads_first ? "heads first" : "tokens first", a->interleaved,
        gk_dtype_name(stored));
    TO_DEVICE(*a);
}

/* The expected result of a cache. Elements that are not written keep their value: NaN, or -1 in
 * int8. */
static result *expected_cache(const check_tensor *cache, double loss) {
    /* half the step between subnormal codes */
    static const double floors[] = {0x1p-10, 0x1p-17, 0.5};
    const gk_dtype dtype = cache->t.dtype;
    result *r = expected(cache, loss);
    check_fill(&r->exact, dtype == GK_I8 ? -1 : NAN);
    check_fill(&r->size, 0);
    if (gk_is_code(dtype)) r->floor = floors[dtype == GK_E4M3 ? 0 : dtype == GK_E5M2 ? 1 : 2];
    return r;
}

/* Sizes from the reference: of |x|, with |cos| and with -|sin| and |sin|; the larger of the two
 * results. */
static void rope_write_sizes(result *const results[3]) {
    gk_rope_kv_write_args ref = rk.args;
    check_tensor q = check_map(&rk.q, fabs), k = check_map(&rk.k, fabs), v = check_map(&rk.v, fabs);
    check_tensor q_weight = check_map(&rk.q_weight, fabs), k_weight = check_map(&rk.k_weight, fabs);
    check_tensor cosines = check_map(&rk.cos, fabs), sines = check_map(&rk.sin, fabs);
    ref.q = q.t;
    ref.k = k.t;
    ref.v = v.t;
    ref.cos = cosines.t;
    ref.sin = sines.t;
    if (ref.q_weight) ref.q_weight = &q_weight.t;
    if (ref.k_weight) ref.k_weight = &k_weight.t;
    ref.out_q = results[0]->size.t;
    ref.k_cache = results[1]->size.t;
    ref.v_cache = results[2]->size.t;
    gk_ref_rope_kv_write(&ref_ctx, &ref);
    check_tensor other[3];
    for (int i = 0; i < 3; ++i) {
        other[i] = check_dense(GK_F64, results[i]->size.t.ndim, results[i]->size.t.shape);
        check_fill(&other[i], 0);
    }
    sines = check_map(&rk.sin, minus_abs);
    ref.sin = sines.t;
    ref.out_q = other[0].t;
    ref.k_cache = other[1].t;
    ref.v_cache = other[2].t;
    gk_ref_rope_kv_write(&ref_ctx, &ref);
    for (int i = 0; i < 3; ++i) {
        const gk_dtype dtype = results[i]->got->t.dtype;
        /* of a code, relative to its value */
        const double half_step = dtype == GK_E4M3 ? 0x1p-4 : dtype == GK_E5M2 ? 0x1p-3 : 0;
        for (int64_t e = 0; e < gk_numel(&other[i].t); ++e) {
            const double size =
                fmax(fabs(check_get(&results[i]->size.t, e)), fabs(check_get(&other[i].t, e)));
            const double exact = check_get(&results[i]->exact.t, e);
            check_set(&results[i]->size.t, e,
                      size + half_step * (isnan(exact) ? 0 : fabs(exact)) / results[i]->loss);
        }
    }
}

/* Every second slot in mirrored order, some skipped; in some problems one slot behind the cache
 * or one position behind the tables. */
static void rope_write_expect(void) {
    const gk_rope_kv_write_args *a = &rk.args;
    const int64_t tokens = rk.q.t.shape[0], past = check_below(4) ? -1 : check_below(tokens + 1);
    const bool far = check_below(5) == 0 && tokens > 0 && rk.cos.t.shape[1] > 0;
    check_fill_normal(&rk.q, 1);
    check_fill_normal(&rk.k, 1);
    check_fill_normal(&rk.v, 1);
    check_fill_normal(&rk.q_weight, 1);
    check_fill_normal(&rk.k_weight, 1);
    for (int64_t i = 0; i < gk_numel(&rk.cos.t); ++i) {
        const double angle = check_uniform(0, 6.3);
        check_set(&rk.cos.t, i, cos(angle));
        check_set(&rk.sin.t, i, sin(angle));
    }
    for (int64_t t = 0; t < tokens; ++t) {
        check_set(&rk.positions.t, t, (double)check_below(rk.cos.t.shape[0]));
        check_set(&rk.slots.t, t,
                  (double)(t == past || check_below(5) == 0 ? -1 - check_below(9)
                                                            : 2 * (tokens - 1 - t)));
    }
    /* the position that a bad one is clamped to */
    if (far) check_set(&rk.positions.t, 0, (double)(rk.cos.t.shape[0] - 1));
    const double loss = sum_loss(rk.q.t.dtype, rk.q.t.shape[2]);
    result *const results[3] = {expected(&rk.out, loss), expected_cache(&rk.k_cache, loss),
                                expected_cache(&rk.v_cache, loss)};
    gk_rope_kv_write_args ref = *a;
    ref.out_q = results[0]->exact.t;
    ref.k_cache = results[1]->exact.t;
    ref.v_cache = results[2]->exact.t;
    gk_ref_rope_kv_write(&ref_ctx, &ref);
    rope_write_sizes(results);
    if (past >= 0 && past < tokens) {
        check_set(&rk.slots.t, past,
                  (double)(rk.k_cache.t.shape[0] * rk.k_cache.t.shape[1] + check_below(1000)));
        error_kind = GK_BAD_SLOTS;
    } else if (far) {
        check_set(
            &rk.positions.t, 0,
            (double)(check_below(2) ? -1 - check_below(5) : rk.cos.t.shape[0] + check_below(5)));
        error_kind = GK_BAD_POSITIONS;
    }
}
