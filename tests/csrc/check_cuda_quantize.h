/* SPDX-License-Identifier: BSD-3-Clause */
/* check_cuda_quantize.h: check_cuda's random problems for quantize (of a matrix, silu(gate) up
 * and an RMSNorm) and for dequantize.
 *
 * Values of silu and norm have a relative error of s = u (64 + 4 sqrt K), those of a matrix
 * none. Rounding is monotonic, so a scale must be between the scales of amax (1 - s) and amax (1
 * + s). A code must be between those of value (1 - s) / scale and value (1 + s) / scale, with
 * the scale that was returned. If s is 0, both are exact. dequantize: loss u. */
#ifndef GPUKERN_CHECK_CUDA_QUANTIZE_H
#define GPUKERN_CHECK_CUDA_QUANTIZE_H

static struct {
    check_tensor x, up, weight, residual, given, bound, codes, scale, sum, values;
    gk_quantize_args args;
    gk_dequantize_args back;
    int64_t shape[3]; /* leading, rows, columns */
    int ndim;
} z;

static int64_t z_dim(int from_end) { return z.ndim < from_end ? 1 : z.shape[3 - from_end]; }

/* [..., m, k] with at most `most` elements. */
static void z_shape(int64_t most, bool large, bool rows) {
    static const int64_t ks[] = {1,   7,   8,   16,   32,   33,   100,  128, 129,
                                 256, 300, 512, 1000, 1024, 2048, 2056, 4096},
                         long_ks[] = {5000, 8192, 8200, 10000, 16384, 20000},
                         ms[] = {1, 2, 5, 127, 128, 130, 300};
    const int64_t k = large || check_below(4) == 0 ? PICK(long_ks) : PICK(ks);
    z.ndim = rows ? 2 + (int)check_below(2) : 1 + (int)check_below(3);
    z.shape[2] = check_below(60) ? gk_min_i64(k, most) : 0;
    z.shape[0] = 1 + check_below(3);
    z.shape[1] = check_below(40)
                     ? gk_clamp_i64(PICK(ms), 1, gk_max_i64(1, most / (3 * gk_max_i64(1, k))))
                     : 0;
}

/* Dimensions in any order; in some problems every second element. */
static check_tensor z_tensor(gk_dtype dtype) {
    static const int of_2[] = {1, 0}, of_3[][3] = {{1, 0, 2}, {0, 2, 1}, {2, 1, 0}};
    const int *order = check_below(3) ? NULL : z.ndim == 3 ? PICK(of_3) : z.ndim == 2 ? of_2 : NULL;
    return check_tensor_make(dtype, z.ndim, z.shape + 3 - z.ndim, order, 1 + (check_below(8) == 0),
                             pad_for(z.shape[2]));
}

/* Values of many magnitudes with a mean; some rows are zero. */
static void z_fill(const check_tensor *x) {
    const int64_t k = gk_max_i64(1, z.shape[2]), zeros = check_below(3) ? 0 : 1 + check_below(3);
    for (int64_t i = 0; i < gk_numel(&x->t); ++i)
        check_set(&x->t, i,
                  i / k < zeros ? 0 : check_normal() * ldexp(1, (int)check_below(7) - 3) + 0.3);
}

/* ---- quantize -------------------------------------------------------------------------------- */
/* Rows and columns that share a scale. Returns the number of scales of a row of blocks. */
static int64_t z_block(int64_t *rows, int64_t *cols) {
    const gk_granularity g = z.args.granularity;
    const int64_t m = gk_max_i64(1, z_dim(2)), k = gk_max_i64(1, z_dim(1));
    *cols = g == GK_PER_1X32 ? 32 : g == GK_PER_1X128 || g == GK_PER_128X128 ? 128 : k;
    *rows = g == GK_PER_128X128 ? 128 : g == GK_PER_TENSOR ? m * gk_max_i64(1, z_dim(3)) : 1;
    return g == GK_PER_TENSOR || g == GK_PER_ROW ? 1 : gk_ceil_div(z_dim(1), *cols);
}

/* The scale of a block whose largest value is `most`, as csrc/include/gpukern_quant.h defines
 * it. */
static double z_scale(double most) {
    const float q =
        z.args.codes.dtype == GK_I8 ? 127 : (float)gk_type_of(z.args.codes.dtype)->largest;
    if (!isfinite(most)) return NAN;
    if (z.args.scale_ub) most = fmin(most, check_get(&z.bound.t, 0));
    const float s = fmaxf((float)most / q, 0x1p-126f);
    return z.args.granularity == GK_PER_1X32 ? gk_e8m0_to_f32(gk_f32_to_e8m0(s)) : s;
}

static double z_code(double value, double scale) {
    const gk_dtype dtype = z.args.codes.dtype;
    double code = 0;
    gk_store(&code, dtype, 0, (float)value / (float)scale);
    return gk_load(&code, dtype, 0);
}

static bool z_between(double x, double lo, double hi) {
    return isnan(lo) || isnan(hi) ? isnan(x) : fmin(lo, hi) <= x && x <= fmax(lo, hi);
}

static bool z_judge(void) {
    const int64_t m = z_dim(2), k = z_dim(1), n = gk_numel(&z.args.x);
    const double loss = z.args.what == GK_QUANTIZE_X ? 0 : sum_loss(GK_F32, k);
    int64_t rows, cols, across = z_block(&rows, &cols), high = gk_ceil_div(m, rows);
    const int64_t num = gk_numel(z.args.given ? z.args.given : &z.args.scale);
    double *most = (double *)check_alloc((size_t)num * sizeof *most);
    for (int64_t b = 0; b < num; ++b) most[b] = 0;
    for (int pass = 0; pass < 2; ++pass) {
        for (int64_t i = 0; i < n; ++i) {
            const int64_t row = i / k, col = i % k,
                          lead = z.args.granularity == GK_PER_TENSOR ? 0 : row / m;
            const int64_t b = z.args.granularity == GK_PER_TENSOR
                                  ? 0
                                  : (lead * high + row % m / rows) * across + col / cols;
            const double v = check_get(&z.values.t, i),
                         s = check_get(z.args.given ? &z.given.t : &z.scale.t, b);
            if (pass == 0) {
                if (!(fabs(v) <= most[b])) most[b] = isfinite(v) && !isnan(most[b]) ? fabs(v) : NAN;
            } else if (!z_between(check_get(&z.codes.t, i), z_code(v * (1 - loss), s),
                                  z_code(v * (1 + loss), s))) {
                say(" code %lld is %g of %.9g by %.9g", (long long)i, check_get(&z.codes.t, i), v,
                    s);
                return false;
            }
        }
        for (int64_t b = 0; pass == 0 && !z.args.given && b < num; ++b)
            if (!z_between(check_get(&z.scale.t, b), z_scale(most[b] * (1 - loss)),
                           z_scale(most[b] * (1 + loss)))) {
                say(" scale %lld is %.9g of %.9g", (long long)b, check_get(&z.scale.t, b), most[b]);
                return false;
            }
    }
    return true;
}

static void quantize_draw(gk_dtype dtype, bool large) {
    static const gk_dtype codes[] = {GK_E4M3, GK_E5M2, GK_I8};
    const gk_granularity granularity = (gk_granularity)check_below(5);
    z_shape(small_or(20000, 200000), large, granularity == GK_PER_128X128);
    z.args = (gk_quantize_args){
        .size = sizeof z.args, .what = (gk_quantized)check_below(3), .granularity = granularity};
    const bool bytes = granularity == GK_PER_1X32 && check_below(2), given = check_below(4) == 0;
    const bool residual = z.args.what == GK_QUANTIZE_RMS_NORM && check_below(2),
               sum = residual && check_below(3);
    const int64_t k = z_dim(1), *shape = z.shape + 3 - z.ndim;
    int64_t rows, cols, of_scale[3] = {0}, across = z_block(&rows, &cols);
    for (int d = 0; d < z.ndim; ++d) of_scale[d] = shape[d];
    of_scale[z.ndim - 1] = across;
    if (granularity == GK_PER_128X128) of_scale[z.ndim - 2] = gk_ceil_div(z_dim(2), 128);
    z.x = z_tensor(dtype);
    z.up = z_tensor(dtype);
    z.residual = z_tensor(dtype);
    z.weight = check_tensor_make(check_below(2) ? dtype : GK_F32, 1, &k, NULL,
                                 1 + (check_below(4) == 0), 0);
    z.given =
        check_dense(bytes ? GK_E8M0 : GK_F32, granularity == GK_PER_TENSOR ? 0 : z.ndim, of_scale);
    z.scale =
        check_dense(bytes ? GK_E8M0 : GK_F32, granularity == GK_PER_TENSOR ? 0 : z.ndim, of_scale);
    z.bound = check_dense(GK_F32, 0, NULL);
    z.codes = check_dense(PICK(codes), z.ndim, shape);
    z.sum = check_dense(dtype, z.ndim, shape);
    mirror(&z.x, "x", false);
    mirror(&z.up, "up", false);
    mirror(&z.residual, "residual", false);
    mirror(&z.weight, "weight", false);
    mirror(&z.given, "given", false);
    mirror(&z.bound, "scale_ub", false);
    mirror(&z.codes, "codes", true);
    mirror(&z.scale, "scale", !given);
    mirror(&z.sum, "sum", sum);
    z.args.x = z.x.t;
    z.args.codes = z.codes.t;
    z.args.eps = check_below(2) ? 1e-6 : 0.1;
    if (z.args.what == GK_QUANTIZE_SILU_MUL) z.args.up = &z.up.t;
    if (z.args.what == GK_QUANTIZE_RMS_NORM && check_below(3)) z.args.weight = &z.weight.t;
    if (residual) z.args.residual = &z.residual.t;
    if (sum) z.args.sum = &z.sum.t;
    if (check_below(3) == 0) z.args.scale_ub = &z.bound.t;
    if (given)
        z.args.given = &z.given.t;
    else
        z.args.scale = z.scale.t;
    may_have_workspace = true;
    also = z_judge;
    say("what %d by %d to %s%s strides %lld,%lld", z.args.what, granularity,
        gk_dtype_name(z.codes.t.dtype), bytes ? " e8m0" : "",
        (long long)z.x.t.stride[z.ndim > 1 ? z.ndim - 2 : 0], (long long)z.x.t.stride[z.ndim - 1]);
    TO_DEVICE(z.args);
}

/* The values by the definitions of glu and norm, in float64. */
static void quantize_expect(void) {
    const int64_t n = gk_numel(&z.x.t);
    z_fill(&z.x);
    z_fill(&z.up);
    z_fill(&z.residual);
    check_fill_normal(&z.weight, 1);
    check_fill(&z.bound, 0.5 + check_uniform(0, 4));
    for (int64_t b = 0; b < gk_numel(&z.given.t); ++b)
        check_set(&z.given.t, b, check_uniform(0.01, 0.2));
    if (z.args.what == GK_QUANTIZE_X && n && check_below(4) == 0)
        check_set(&z.x.t, check_below(n), check_below(2) ? NAN : -INFINITY);
    z.values = check_dense(GK_F64, z.ndim, z.x.t.shape);
    check_tensor h = check_dense(z.x.t.dtype, z.ndim, z.x.t.shape);
    if (n && z.args.what == GK_QUANTIZE_SILU_MUL) {
        gk_glu_args glu = GK_GLU_ARGS_INIT;
        glu.gate = z.x.t;
        glu.up = &z.up.t;
        glu.out = z.values.t;
        gk_ref_glu_fwd(&ref_ctx, &glu);
    } else if (n && z.args.what == GK_QUANTIZE_RMS_NORM) {
        gk_norm_args norm = GK_NORM_ARGS_INIT;
        norm.kind = GK_RMS_NORM;
        norm.x = z.x.t;
        norm.weight = z.args.weight;
        norm.eps = z.args.eps;
        norm.out = z.values.t;
        norm.residual = z.args.residual;
        norm.sum = norm.residual ? &h.t : NULL;
        gk_ref_norm_fwd(&ref_ctx, &norm);
    } else {
        for (int64_t i = 0; i < n; ++i) check_set(&z.values.t, i, check_get(&z.x.t, i));
    }
    if (!z.args.sum) return;
    result *sum = expected(&z.sum, -1);
    for (int64_t i = 0; i < n; ++i) check_set(&sum->exact.t, i, check_get(&h.t, i));
}

/* ---- dequantize ------------------------------------------------------------------------------ */
static void dequantize_draw(gk_dtype dtype, bool large) {
    static const gk_dtype codes[] = {GK_E4M3, GK_E5M2, GK_I8};
    z_shape(small_or(20000, 200000), large, true);
    const int64_t m = z_dim(2), k = z_dim(1), high[] = {1, gk_ceil_div(m, 128), m},
                  across[] = {1, gk_ceil_div(k, 128), gk_ceil_div(k, 32)}, one = 1;
    int64_t of_scale[3] = {z.shape[0], PICK(high), PICK(across)};
    const gk_dtype of = check_below(3) ? GK_F32 : GK_E8M0;
    z.codes = z_tensor(PICK(codes));
    z.scale = check_below(5) == 0 ? check_dense(of, (int)check_below(2), &one)
                                  : check_tensor_make(of, z.ndim, of_scale + 3 - z.ndim, NULL,
                                                      1 + check_below(2), check_below(3));
    z.values = check_dense(dtype, z.ndim, z.shape + 3 - z.ndim);
    mirror(&z.codes, "codes", false);
    mirror(&z.scale, "scale", false);
    mirror(&z.values, "out", true);
    z.back = (gk_dequantize_args){
        .size = sizeof z.back, .codes = z.codes.t, .scale = z.scale.t, .out = z.values.t};
    say("%s %s strides %lld,%lld", gk_dtype_name(z.codes.t.dtype), gk_dtype_name(of),
        (long long)z.codes.t.stride[z.ndim - 2], (long long)z.codes.t.stride[z.ndim - 1]);
    TO_DEVICE(z.back);
}

static void dequantize_expect(void) {
    for (int64_t i = 0; i < gk_numel(&z.codes.t); ++i) /* every code, NaN and infinities included */
        ((uint8_t *)z.codes.t.data)[check_offset(&z.codes.t, i)] = (uint8_t)check_below(256);
    for (int64_t i = 0; i < gk_numel(&z.scale.t); ++i)
        check_set(&z.scale.t, i, check_uniform(0.01, 1));
    result *out = expected(&z.values, check_unit(GK_F32));
    gk_dequantize_args ref = z.back;
    ref.out = out->exact.t;
    gk_ref_dequantize(&ref_ctx, &ref);
    for (int64_t i = 0; i < gk_numel(&out->size.t); ++i)
        check_set(&out->size.t, i, fabs(check_get(&out->exact.t, i)));
}

#endif
