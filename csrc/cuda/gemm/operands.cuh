/* operands.cuh: what tma reads for a product: the operands where they lie, aligned copies of them (realign.cuh), or a where it
 * lies in classes of lines (lines.cuh). */
#ifndef GPUKERN_CUDA_GEMM_OPERANDS_CUH
#define GPUKERN_CUDA_GEMM_OPERANDS_CUH

#include "../host/tensormap.cuh"
#include "lines.cuh"
#include "problem.cuh"
#include "realign.cuh"

enum Mode {
    A_ALONG_M = 1,
    B_ALONG_N = 2,
    A_IN_LINES = 4 /* with the one above alone */
};

/* An operand as tma sees it: rows of m or n and k. */
inline TensorShape operand_of(const void *data, gk_dtype dtype, int64_t x, int64_t k, int64_t x_stride,
                              int64_t k_stride, const GemmProblem &p, const int64_t *batch, bool along_x) {
    TensorShape s = {
        data, dtype, {along_x ? x : k, along_x ? k : x, 1, 1, 1}, {1, along_x ? k_stride : x_stride, 0, 0, 0}};
    for (int d = 0; d < p.ndim && d < TENSOR_DIMS - 2; ++d)
        if (batch[d]) s.size[2 + d] = p.shape[d], s.stride[2 + d] = batch[d];
    return s;
}

/* What tma reads: the operands themselves, their copies, a's lines. */
struct Operands {
    GemmProblem p; /* with the copies' strides; in lines that of a class, and `batch` counts every entry's classes */
    int mode;
    bool copied[2];   /* a, b */
    TensorShape x[2]; /* a, b; of a in lines none */
    RealignMatrix copies[2];
    int64_t bytes;          /* of the copies */
    int64_t k;              /* positions of k that a tile's steps cover */
    int64_t lines, line;    /* a in lines: all rows of a batch entry, elements from one to the next, .. */
    int classes_log2;       /* .. in so many classes, .. */
    int skew[LINE_CLASSES]; /* .. and what lies before them */
    int64_t c_line, out_line, preact_line; /* .. and to the next class's rows of these */
};

/* 0 where tma reads an operand, dense along k, as it lies; 1 where along x; else -1. needed: the only answer that
 * suits, or -1. */
inline int as_it_lies(const void *data, gk_dtype dtype, int64_t x, int64_t k, int64_t x_stride, int64_t k_stride,
                      const GemmProblem &p, const int64_t *batch, int needed, TensorShape *s) {
    for (int along = 0; along < 2; ++along) {
        if ((along ? x_stride : k_stride) != 1 || (needed >= 0 && along != needed)) continue;
        *s = operand_of(data, dtype, x, k, x_stride, k_stride, p, batch, along);
        if (tensor_map_fits(*s)) return along;
    }
    return -1;
}

/* The dimension that a copy should be dense along: 1 for x. */
inline int copy_along(int64_t x, int64_t k, int64_t x_stride, int64_t k_stride) {
    if (x == 1 || k == 1) return k == 1;
    if (x_stride == 1 || k_stride == 1) return k_stride != 1;
    return llabs(x_stride) < llabs(k_stride);
}

/* float32: wgmma reads k dense alone, but its A of a turned product comes through registers, dense along m (tf32.cuh). */
inline int needed_along(gk_dtype dtype, bool turned, bool b) { return dtype != GK_F32 ? -1 : turned && !b; }

/* Counts of tiles and, past the last, their coordinates are 32 bits wide. */
inline bool counts_fit(const GemmProblem &p) {
    if (p.m < 1 || p.n < 1 || p.k < 1 || p.batch < 1) return false;
    if (p.m > INT32_MAX - 512 || p.n > INT32_MAX - 512) return false;
    return (double)gk_ceil_div(p.m, 32) * (double)gk_ceil_div(p.n, 32) * (double)p.batch <= INT32_MAX;
}

/* Operand i, a or b: where it lies, or a copy. copy: in any case. false: there is none. */
inline bool find_operand(int i, gk_dtype dtype, int needed, bool copy, void *workspace, Operands *o) {
    GemmProblem &p = o->p;
    const int64_t each = 16 / (int64_t)gk_dtype_bytes(dtype); /* of a chunk of 16 bytes */
    const void *&data = i ? p.b : p.a;
    int64_t &x_stride = i ? p.b_n : p.a_m, &k_stride = i ? p.b_k : p.a_k, *batch = i ? p.b_batch : p.a_batch;
    const int64_t x = i ? p.n : p.m;
    int along = copy ? -1 : as_it_lies(data, dtype, x, p.k, x_stride, k_stride, p, batch, needed, &o->x[i]);
    o->copied[i] = along < 0;
    if (o->copied[i]) {
        RealignMatrix &matrix = o->copies[i];
        along = needed < 0 ? copy_along(x, p.k, x_stride, k_stride) : needed;
        const auto plan = dtype == GK_F32 ? realign_plan_32 : realign_plan;
        if (!plan(data, along ? x : p.k, along ? p.k : x, along ? x_stride : k_stride, along ? k_stride : x_stride,
                  p.ndim, p.shape, batch, &matrix))
            return false;
        o->bytes = gk_round_up(o->bytes, 128);
        data = matrix.to = workspace ? (char *)workspace + o->bytes : NULL;
        o->bytes += realign_bytes(matrix);
        (along ? x_stride : k_stride) = 1;
        (along ? k_stride : x_stride) = gk_round_up(along ? x : p.k, each);
    }
    o->mode |= along << i;
    return true;
}

/* From o->p, the problem. false: neither the operands nor copies of them suit. workspace NULL: to plan only. */
inline bool operands_of(gk_dtype dtype, bool turned, void *workspace, Operands *o) {
    GemmProblem &p = o->p;
    if (!counts_fit(p)) return false;
    if (p.ndim > TENSOR_DIMS - 2) gemm_join_batch(p);
    const bool both = p.ndim > TENSOR_DIMS - 2; /* dense copies may have fewer batch dimensions */
    o->mode = 0, o->bytes = 0, o->k = p.k, o->classes_log2 = 0;
    for (int i = 0; i < 2; ++i)
        if (!find_operand(i, dtype, needed_along(dtype, turned, i), both, workspace, o)) return false;
    if (o->bytes == 0) return true;
    if (both) gemm_join_batch(p);
    if (p.ndim > TENSOR_DIMS - 2) return false;
    o->x[0] = operand_of(p.a, dtype, p.m, p.k, p.a_m, p.a_k, p, p.a_batch, o->mode & A_ALONG_M);
    o->x[1] = operand_of(p.b, dtype, p.n, p.k, p.b_n, p.b_k, p, p.b_batch, o->mode & B_ALONG_N);
    return tensor_map_fits(o->x[0]) && tensor_map_fits(o->x[1]);
}

/* A class of a's lines, as tma sees it; lines.cuh says which elements of each are positions of k. */
inline TensorShape class_of(const Operands &o, gk_dtype dtype, int j) {
    const GemmProblem &p = o.p;
    return operand_of((const uint16_t *)p.a + j * o.line - o.skew[j], dtype, lines_of_class(o.lines, o.classes_log2, j),
                      p.k + o.skew[j], p.a_m, 1, p, p.a_batch, false);
}

/* The same without a copy of a: dense along k, its rows may begin anywhere, but alike in all batch entries. b, or its copy, is
 * dense along n: its boxes begin at any k, and so where position 0 of a class is. */
inline bool operands_in_lines_of(gk_dtype dtype, void *workspace, Operands *o) {
    GemmProblem &p = o->p;
    GemmEpilogue &e = p.epilogue;
    if (dtype == GK_F32 || p.a_k != 1 || (p.b_n != 1 && p.b_k != 1) || p.a_m < 1 || p.ndim > TENSOR_DIMS - 3)
        return false;
    if (p.k > INT32_MAX - 256) return false; /* positions are 32 bits wide */
    const int log2 = gk_line_classes_log2(p.a_m), classes = 1 << log2;
    if (p.m < classes) return false;
    for (int d = 0; d < p.ndim; ++d)
        if (p.a_batch[d] % LINE_EACH != 0) return false;
    int most = 0;
    for (int j = 0; j < classes; ++j) {
        o->skew[j] = line_skew(p.a, p.a_m, j);
        if (o->skew[j] > most) most = o->skew[j];
    }
    o->mode = A_IN_LINES, o->bytes = 0, o->k = p.k + most, o->copied[0] = false;
    o->lines = p.m, o->line = p.a_m, o->classes_log2 = log2;
    o->c_line = e.c_row, o->out_line = e.out_row, o->preact_line = e.preact_row;
    p.batch *= classes, p.m = gk_ceil_div(p.m, classes);
    p.a_m *= classes, e.c_row *= classes, e.out_row *= classes, e.preact_row *= classes;
    if (!counts_fit(p) || !find_operand(1, dtype, 1, false, workspace, o)) return false;
    if (o->copied[1]) o->x[1] = operand_of(p.b, dtype, p.n, p.k, p.b_n, p.b_k, p, p.b_batch, true);
    bool good = tensor_map_fits(o->x[1]);
    for (int j = 0; j < classes; ++j) good = good && tensor_map_fits(class_of(*o, dtype, j));
    return good;
}

#endif
