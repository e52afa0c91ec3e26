/* SPDX-License-Identifier: BSD-3-Clause */
/* check_cuda: runs every compiled instance of the CUDA tables (cuda/kernels.h) and compares it
 * with csrc/ref. An instance is called through its own `plan` and `run`, so that instances which
 * dispatch seldom chooses are tested, too.
 *
 * Random problems of an op are drawn until each of its instances has taken several. The
 * reference is computed once for all instances that take the problem. An instance runs twice,
 * directly and from a CUDA graph, on outputs and workspace full of NaN. Both results must have
 * the same bits and be within the bound of check.h. Nothing else may have changed: inputs, the
 * memory between and around the elements, the memory around the workspace, the error word.
 *
 * A check_tensor is copied whole, guards included, into one device arena. The tensors of a
 * problem begin at multiples of 256 bytes, one element behind them, or mixed, so that instances
 * for aligned and for misaligned tensors are both reached.
 *
 * size and loss (check.h), with u = u(float32), or u(float64) for float64:
 *  gemm            size |alpha| sum |a| |b| + |beta c| + |bias|; loss u (32 + 4 sqrt K). tf32
 *                  adds 1.375 x 2^-10: the tensor cores truncate operands, and the kernel's
 *                  correction leaves 2/3 of a unit for each factor
 *  gemm_act_bwd    size |grad| (1 + |x|); loss 16 u
 *  attention       size: the same sum with every term positive. The logits have the error e = u
 *                  (8 + 2 sqrt D) max |logit|, which changes every p by 2 e. In 16 bits p and ds
 *                  are rounded to the inputs' dtype: 1.25 u(dtype) forward, 2.5 backward. Sums
 *                  add u (32 + 2 sqrt(terms)). attn_floor covers underflow
 *  weight_gemm     size sum |a| |w| + |bias|; loss u (32 + 4 sqrt K). If scales are not powers
 *                  of two it adds u(dtype), since a kernel may round weights to a's dtype or not
 *  attn_merge      size |a| w_a + |b| w_b; loss 232 u, because exp(lse_x - lse) has the error
 *                  |lse| u. If only one side saw keys, its result is exact
 *  kv_cache_write  exact
 *
 * check_cuda [-v] [-p] [-n problems] [-t threads] [text ...]: -v prints every instance. -n sets the
 * number of problems for each instance, -t the number of threads of the reference. With texts, only
 * instances whose name contains one of them run.
 * -p draws and plans for a described Hopper GPU, and runs nothing. It needs no GPU and shows
 * whether the draws give every instance a problem.
 *
 * Environment, for runs under a sanitizer: GK_CHECK_SMALL=1 draws few and small problems and
 * runs each once, without a graph. GK_CHECK_ONLY=text,text is the same as the texts.
 * GK_CHECK_PART=2/5 takes the second, the seventh, .. of these instances, so that five processes
 * cover all of them. GK_CHECK_ONLY and GK_CHECK_PART print the instances they run. */
#include "check.h"
#include "core/dispatch.h"
#include "core/paged.h"
#include "formats/weight_tile.h"

#include <cuda_runtime_api.h>
#include <time.h>
#include <unistd.h>

#define PICK(array) ((array)[check_below(CHECK_COUNT(array))])

static const gk_dtype dtypes[] = {GK_F32, GK_BF16, GK_F16, GK_F64, GK_E4M3, GK_E5M2, GK_I8};

/* ---- the current problem --------------------------------------------------------------------- */
enum {
    GAP = 256,
    HOST_BYTES = 192 << 20,  /* all tensors of a problem */
    DEVICE_BYTES = 768 << 20 /* tensors and, behind them, the workspace */
};

/* A tensor's place in the arena. Outputs hold NaN before each run; inputs hold their values. */
typedef struct block {
    check_tensor *x;
    const char *name;
    bool output;
    size_t at;
    unsigned char *first; /* the first run's bytes */
    gk_tensor on_device;
} block;

typedef struct result { /* loss < 0: exactly equal */
    const char *name;
    const check_tensor *got;
    check_tensor exact, size;
    double loss, floor; /* floor: absolute error allowed for underflow */
    /* added to loss for instances that round codes times scales to the dtype of the other
     * operand */
    double rounded;
} result;

static enum {
    ODD,
    ALIGNED,
    MIXED
} placing;
static block blocks[32];
static result results[8];
static int num_blocks, num_results;
static size_t arena_used;
/* on the device; the upload; the download */
static unsigned char *arena_d, *arena_up, *arena_down;
static gk_context ctx, ref_ctx;
static void *device_args[256];  /* the arguments with device pointers */
static bool may_have_workspace; /* true for ops whose kernels may have a workspace */
static bool repeatable;         /* true if two runs must give the same bits */
static int error_kind;          /* the byte of the error word that must be set, -1: none */
static bool (*also)(void);      /* further checks of the results */

/* The largest size of a problem; a sanitizer makes a kernel hundreds of times slower. */
static int64_t small_or(int64_t small, int64_t usual) { return check_small() ? small : usual; }

/* Gap between rows. aligned: every row begins at a multiple of 8 elements. */
static int64_t pad_for(int64_t n) {
    if (check_below(3) == 0 && (placing != ALIGNED || n % 8 == 0)) return 0;
    return placing == ALIGNED ? (8 - n % 8) % 8 + 8 * check_below(2) : check_below(5);
}

static void mirror(check_tensor *x, const char *name, bool output) {
    size_t lead = (size_t)((unsigned char *)x->t.data - x->memory),
           at = (size_t)gk_round_up((int64_t)arena_used, 256);
    if (placing == ALIGNED || (placing == MIXED && check_below(2))) at += (256 - lead % 256) % 256;
    block *b = &blocks[num_blocks++];
    *b = (block){x, name, output, at, output ? check_alloc(x->bytes) : NULL, x->t};
    b->on_device.data = arena_d + at + lead;
    if (output) check_remember(x);
    arena_used = at + x->bytes;
}

static result *expected(const check_tensor *got, double loss) {
    result *r = &results[num_results++];
    *r = (result){"",
                  got,
                  check_dense(GK_F64, got->t.ndim, got->t.shape),
                  check_dense(GK_F64, got->t.ndim, got->t.shape),
                  loss,
                  0,
                  0};
    for (int i = 0; i < num_blocks; ++i)
        if (blocks[i].x == got) r->name = blocks[i].name;
    return r;
}

static void say(const char *format, ...) { /* adds words to the case's name */
    size_t used = strlen(check_case);
    va_list list;
    va_start(list, format);
    vsnprintf(check_case + used, sizeof check_case - used, format, list);
    va_end(list);
}

/* Copies the arguments for the device. A word that is the data pointer of a tensor in the arena,
 * or a pointer to such a tensor, is replaced by its counterpart on the device. The tensors found
 * describe the case. */
static void to_device(const void *args, size_t bytes) {
    memcpy(device_args, args, bytes);
    for (size_t i = 0; i < bytes / sizeof(void *); ++i) {
        for (int b = 0; b < num_blocks; ++b) {
            gk_tensor *t = &blocks[b].x->t;
            if (device_args[i] != t && device_args[i] != t->data) continue;
            device_args[i] =
                device_args[i] == t ? (void *)&blocks[b].on_device : blocks[b].on_device.data;
            say(" %s[", blocks[b].name);
            for (int d = 0; d < t->ndim; ++d) say(d ? ",%lld" : "%lld", (long long)t->shape[d]);
            say("]");
            break;
        }
    }
}
#define TO_DEVICE(args) to_device(&(args), sizeof(args))

/* ---- one run --------------------------------------------------------------------------------- */
static void try_cuda(cudaError_t error, const char *what) {
    if (error == cudaSuccess) return;
    /* after an error every further call fails, too */
    check_result(false, "%s: %s", what, cudaGetErrorString(error));
    check_end();
    exit(1);
}

/* Launches the plan directly, or captures it into a graph and launches the graph. */
static gk_status launch(const gk_cuda_instance *row, const gk_plan *plan, void *memory,
                        bool graph) {
    cudaStream_t stream = ctx.stream;
    if (!graph) return row->run(&ctx, device_args, plan, memory);
    cudaGraph_t captured = NULL;
    cudaGraphExec_t ready = NULL;
    try_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
             "cudaStreamBeginCapture");
    gk_status status = row->run(&ctx, device_args, plan, memory);
    try_cuda(cudaStreamEndCapture(stream, &captured), "cudaStreamEndCapture");
    try_cuda(cudaGraphInstantiateWithFlags(&ready, captured, 0), "cudaGraphInstantiate");
    try_cuda(cudaGraphLaunch(ready, stream), "cudaGraphLaunch");
    try_cuda(cudaStreamSynchronize(stream), "the kernel");
    try_cuda(cudaGraphExecDestroy(ready), "cudaGraphExecDestroy");
    try_cuda(cudaGraphDestroy(captured), "cudaGraphDestroy");
    return status;
}

static bool only_plans; /* -p */

static bool plan_instance(const gk_cuda_instance *row, gk_plan *plan) {
    return row->plan(row, &ctx, device_args, gk_plan_begin(plan, row));
}

/* One run: upload, launch, download. Checks everything except the results. */
static void run_row(const gk_cuda_instance *row, bool again) {
    cudaStream_t stream = ctx.stream;
    check_pass = again ? "(from a graph)" : "";
    gk_plan plan;
    check_result(plan_instance(row, &plan), "the call is not planned again");
    size_t bytes = plan.workspace_bytes;
    size_t at = (size_t)gk_round_up((int64_t)arena_used + GAP, 256),
           end = at + bytes + GAP; /* the workspace and its guard */
    if ((bytes && !may_have_workspace) || end > DEVICE_BYTES) {
        check_result(false, "a workspace of %zu bytes", bytes);
        return;
    }
    memset(arena_up, 0xff, at + GAP);
    for (int i = 0; i < num_blocks; ++i) {
        check_tensor *x = blocks[i].x;
        memcpy(arena_up + blocks[i].at, x->memory, x->bytes);
        if (blocks[i].output) memset(arena_up + blocks[i].at, 0xff, x->bytes);
    }
    memset(ctx.error_word, 0, GK_NUM_DEVICE_ERRORS);
    try_cuda(cudaMemcpyAsync(arena_d, arena_up, arena_used, cudaMemcpyHostToDevice, stream),
             "copy");
    try_cuda(cudaMemsetAsync(arena_d + arena_used, 0xff, end - arena_used, stream), "memset");
    gk_status status = launch(row, &plan, bytes ? arena_d + at : NULL, again);
    check_result(status == GK_OK, "%s: %s", gk_status_name(status),
                 status == GK_OK ? "" : gk_last_error());
    try_cuda(cudaMemcpyAsync(arena_down, arena_d, at, cudaMemcpyDeviceToHost, stream), "copy");
    try_cuda(
        cudaMemcpyAsync(arena_down + at, arena_d + at + bytes, GAP, cudaMemcpyDeviceToHost, stream),
        "copy");
    try_cuda(cudaStreamSynchronize(stream), "the kernel");

    check_result(memcmp(arena_down + arena_used, arena_up + arena_used, at + GAP - arena_used) == 0,
                 "memory around the workspace of %zu bytes was written", bytes);
    for (int e = 0; e < GK_NUM_DEVICE_ERRORS; ++e)
        check_result(ctx.error_word[e] == (e == error_kind), "error_word[%d] is %d", e,
                     ctx.error_word[e]);
    size_t behind = 0; /* end of the previous block */
    for (int i = 0; i < num_blocks; ++i) {
        check_tensor *x = blocks[i].x;
        unsigned char *up = arena_up + blocks[i].at, *down = arena_down + blocks[i].at;
        check_result(memcmp(arena_up + behind, arena_down + behind, blocks[i].at - behind) == 0,
                     "memory before %s was written", blocks[i].name);
        behind = blocks[i].at + x->bytes;
        if (!blocks[i].output) {
            check_result(memcmp(up, down, x->bytes) == 0, "%s was changed", blocks[i].name);
            continue;
        }
        memcpy(x->memory, down, x->bytes);
        memset(x->before, 0xff, x->bytes);
        check_untouched(x, blocks[i].name);
        if (again && repeatable)
            check_result(memcmp(blocks[i].first, down, x->bytes) == 0, "%s of two runs differ",
                         blocks[i].name);
        memcpy(blocks[i].first, down, x->bytes);
    }
}

/* ---- gemm ------------------------------------------------------------------------------------ */
static struct {
    gk_gemm_args args;
    check_tensor a, b, bias, c, out, preact;
} g;

/* Matrices stored by rows or by columns, with elements `step` apart and a gap of `pad` after
 * each row or column. swapped: the first two batch dimensions are exchanged. */
static check_tensor stored(gk_dtype dtype, const int64_t *batch, int64_t rows, int64_t cols,
                           bool columns, bool swapped, int64_t step, int64_t pad) {
    int64_t shape[GK_MAX_DIMS] = {0};
    int order[GK_MAX_DIMS] = {0}, ndim = (int)batch[0] + 2;
    for (int d = 0; d < ndim; ++d) {
        order[d] = columns && d >= ndim - 2 ? 2 * ndim - 3 - d : d;
        shape[d] = d < ndim - 2 ? batch[d + 1] : d == ndim - 2 ? rows : cols;
    }
    if (swapped) {
        order[0] = 1;
        order[1] = 0;
    }
    return check_tensor_make(dtype, ndim, shape, order, step, pad);
}

/* A matrix [batch..., rows, cols]: row-major, column-major, every second element, mirrored, or
 * one row repeated. In some problems the two outermost batch dimensions are in the other order. */
static check_tensor operand(gk_dtype dtype, const int64_t *batch, int64_t rows, int64_t cols) {
    const int ndim = (int)batch[0] + 2;
    int64_t layout = check_below(8) ? check_below(2) : 2 + check_below(3);
    const bool swapped = ndim > 3 && check_below(3) == 0;
    check_tensor x = stored(dtype, batch, rows, cols, layout == 1, swapped, 1 + (layout == 2),
                            pad_for(layout == 1 ? rows : cols));
    for (int d = ndim - 2; layout == 3 && gk_numel(&x.t) && d < ndim; ++d) {
        x.t.data =
            (char *)x.t.data + (x.t.shape[d] - 1) * x.t.stride[d] * (int64_t)gk_dtype_bytes(dtype);
        x.t.stride[d] = -x.t.stride[d];
    }
    if (layout == 4) x.t.stride[ndim - 2] = 0;
    return x;
}

static void gemm_draw(gk_dtype dtype, bool large) {
    static const int64_t sizes[] = {1, 7, 8, 16, 33, 64, 100, 128, 130, 257, 512, 1000};
    static const int64_t wide[] = {512, 1000, 1024, 2048}, narrow[] = {1, 2, 4, 8, 16, 64},
                         deep[] = {2048, 4096, 8192};
    static const double alphas[] = {1, -0.75}, betas[] = {0, 1, 0.5};
    static const int64_t none[2][5] = {{0}},
                         batches[][2][5] = {/* number of dimensions and sizes, of a and of b */
                                            {{1, 3}, {0}},
                                            {{0}, {1, 2}},
                                            {{1, 2}, {1, 2}},
                                            {{2, 2, 1}, {1, 3}},
                                            {{2, 1, 3}, {2, 2, 1}},
                                            {{3, 2, 1, 2}, {1, 2}},
                                            /* these batches become 3 batch dimensions */
                                            {{4, 2, 1, 2, 3}, {4, 1, 2, 2, 3}},
                                            {{4, 2, 1, 2, 3}, {4, 2, 1, 2, 3}},
                                            {{4, 2, 2, 2, 2}, {4, 2, 2, 2, 2}},
                                            {{4, 2, 1, 2, 1}, {4, 1, 2, 1, 2}} /* not merged */};
    int64_t m, n, k, shape[GK_MAX_DIMS], entries = 1;
    const int64_t (*batch)[5] = check_below(4) ? none : PICK(batches);
    int ndim = (int)gk_max_i64(batch[0][0], batch[1][0]);
    for (int d = 0; d < ndim; ++d) {
        int64_t i = d - ndim + batch[0][0], j = d - ndim + batch[1][0];
        shape[d] = gk_max_i64(i < 0 ? 1 : batch[0][i + 1], j < 0 ? 1 : batch[1][j + 1]);
        entries *= shape[d];
    }
    do {
        bool flat = large && check_below(2);
        m = !large ? PICK(sizes) : flat ? PICK(wide) : PICK(narrow);
        n = !large ? PICK(sizes) : flat || check_below(2) ? PICK(wide) : PICK(narrow);
        k = !large || flat ? PICK(sizes) : PICK(deep);
    } while (entries * m * n * (k + 8) >
             small_or(large ? 80000000 : 6000000, large ? 500000000 : 40000000));
    /* misaligned rows of a beside rows or columns of b, some of them aligned */
    const bool rows = check_below(6) == 0, columns = rows && check_below(2);
    if (columns && entries == 1 && !check_small() && check_below(2)) {
        m = 2048 + check_below(2);
        n = 130;
        k = 1000;
    }
    if (check_below(30) == 0) k = 0;
    if (check_below(60) == 0) *(check_below(2) ? &m : &n) = 0;
    shape[ndim] = m;
    shape[ndim + 1] = n;
    int64_t c = check_below(8), column[2] = {m, 1};
    gk_dtype out = dtype != GK_F64 && check_below(3) == 0 ? GK_F32 : dtype,
             added = check_below(2) ? dtype == GK_F64 ? GK_F64 : GK_F32 : dtype;
    if (rows) {
        g.a = stored(dtype, batch[0], m, k, false, false, 1, check_below(12));
        g.b = stored(dtype, batch[1], k, n, columns, false, 1,
                     columns ? check_below(12) : (8 - n % 8) % 8);
    } else {
        g.a = operand(dtype, batch[0], m, k);
        g.b = operand(dtype, batch[1], k, n);
    }
    g.bias =
        check_tensor_make(check_below(2) ? out : dtype, 1, &n, NULL, 1 + (check_below(4) == 0), 0);
    g.c = c == 0   ? check_dense(added, 1, &n)
          : c == 1 ? check_dense(added, 2, column)
          : c == 2 ? check_dense(added, 0, NULL)
                   : check_tensor_make(added, ndim + 2, shape, NULL, 1, pad_for(n));
    g.out = check_tensor_make(out, ndim + 2, shape, NULL, 1, pad_for(n));
    g.preact = check_tensor_make(out, ndim + 2, shape, NULL, 1, pad_for(n));
    mirror(&g.a, "a", false);
    mirror(&g.b, "b", false);
    mirror(&g.bias, "bias", false);
    mirror(&g.c, "c", false);
    mirror(&g.out, "out", true);
    mirror(&g.preact, "preact", true);
    g.args = (gk_gemm_args){.size = sizeof g.args, .a = g.a.t, .b = g.b.t, .out = g.out.t};
    g.args.bias = check_below(2) ? &g.bias.t : NULL;
    g.args.c = c < 5 ? &g.c.t : NULL;
    g.args.preact = check_below(3) ? NULL : &g.preact.t;
    g.args.alpha = PICK(alphas);
    g.args.beta = PICK(betas);
    g.args.activation = check_below(2) ? GK_ACT_NONE : (gk_activation)check_below(5);
    g.args.fp32_precision = dtype == GK_F32 && check_below(2) ? GK_TF32 : GK_IEEE;
    may_have_workspace = true;
    say("alpha %g beta %g activation %d tf32 %d strides a %lld,%lld b %lld,%lld", g.args.alpha,
        g.args.beta, g.args.activation, g.args.fp32_precision,
        (long long)g.a.t.stride[g.a.t.ndim - 2], (long long)g.a.t.stride[g.a.t.ndim - 1],
        (long long)g.b.t.stride[g.b.t.ndim - 2], (long long)g.b.t.stride[g.b.t.ndim - 1]);
    TO_DEVICE(g.args);
}

static void gemm_expect(void) {
    check_fill_normal(&g.a, 1);
    check_fill_normal(&g.b, 1);
    check_fill_normal(&g.bias, 1);
    check_fill_normal(&g.c, 1);
    if (g.args.beta == 0) check_fill(&g.c, NAN); /* must not be read */
    double loss =
        check_acc_unit(g.a.t.dtype) * (32 + 4 * sqrt((double)g.a.t.shape[g.a.t.ndim - 1]));
    if (g.args.fp32_precision == GK_TF32) loss += 0x1.6p-10;
    result *out = expected(&g.out, loss),
           *preact = g.args.preact ? expected(&g.preact, loss) : NULL;
    gk_gemm_args ref = g.args;
    ref.out = out->exact.t;
    ref.preact = preact ? &preact->exact.t : NULL;
    gk_ref_gemm(&ref_ctx, &ref);
    check_tensor a = check_map(&g.a, fabs), b = check_map(&g.b, fabs),
                 bias = check_map(&g.bias, fabs);
    check_tensor c = check_map(&g.c, fabs);
    ref.a = a.t;
    ref.b = b.t;
    ref.out = out->size.t;
    ref.preact = NULL;
    if (ref.bias) ref.bias = &bias.t;
    if (ref.c) ref.c = &c.t;
    ref.alpha = fabs(ref.alpha);
    ref.activation = GK_ACT_NONE;
    gk_ref_gemm(&ref_ctx, &ref);
    if (preact) preact->size = out->size;
}

/* ---- gemm_act_bwd ---------------------------------------------------------------------------- */
static struct {
    gk_gemm_act_bwd_args args;
    check_tensor grad, saved, got;
} ab;

static void act_bwd_draw(gk_dtype dtype, bool large) {
    static const int transposed[3] = {0, 2, 1};
    static const gk_dtype any[] = {GK_F32, GK_BF16, GK_F16};
    int64_t shape[3] = {1 + check_below(3), check_below(70), check_below(large ? 3000 : 300)};
    const int *in = check_below(4) ? NULL : transposed, *out = check_below(4) ? NULL : transposed;
    bool dense = check_below(2);
    ab.grad = check_tensor_make(dtype, 3, shape, in, 1, dense ? 0 : pad_for(shape[2]));
    ab.saved = check_tensor_make(dtype == GK_F64 || check_below(2) ? dtype : PICK(any), 3, shape,
                                 NULL, 1, dense ? 0 : pad_for(shape[2]));
    ab.got = check_tensor_make(dtype, 3, shape, out, 1, dense ? 0 : pad_for(shape[2]));
    mirror(&ab.grad, "grad_out", false);
    mirror(&ab.saved, "saved", false);
    mirror(&ab.got, "grad_in", true);
    ab.args = (gk_gemm_act_bwd_args){sizeof ab.args, ab.grad.t, ab.saved.t, ab.got.t,
                                     (gk_activation)check_below(5)};
    say("saved %s activation %d transposed %d %d dense %d", gk_dtype_name(ab.saved.t.dtype),
        ab.args.activation, in != NULL, out != NULL, dense);
    TO_DEVICE(ab.args);
}

static void act_bwd_expect(void) {
    result *r = expected(&ab.got, 16 * check_acc_unit(ab.got.t.dtype));
    check_fill_normal(&ab.grad, 1);
    check_fill_normal(&ab.saved, 3);
    gk_gemm_act_bwd_args ref = ab.args;
    ref.grad_in = r->exact.t;
    gk_ref_gemm_act_bwd(&ref_ctx, &ref);
    for (int64_t i = 0; i < gk_numel(&r->size.t); ++i)
        check_set(&r->size.t, i,
                  fabs(check_get(&ab.grad.t, i)) * (1 + fabs(check_get(&ab.saved.t, i))));
}

/* ---- attention: parts that its ops share ----------------------------------------------------- */
static const int64_t heads[][2] = {{1, 1}, {4, 4}, {4, 2}, {6, 1}, {8, 1}, {9, 3}};

static int64_t draw_dim(void) {
    static const int64_t dims[] = {8, 32, 64, 64, 80, 96, 128, 128, 192, 256};
    return check_below(3) ? PICK(dims) : 8 * (1 + check_below(32));
}

/* Uniform random slopes, sinks or scales. some_off: a few are -inf. */
static check_tensor make_stats(gk_dtype stats, int ndim, const int64_t *shape, double lo, double hi,
                               bool some_off) {
    check_tensor x = check_tensor_make(stats, ndim, shape, NULL, 1 + check_below(2), 0);
    for (int64_t i = 0; i < gk_numel(&x.t); ++i)
        check_set(&x.t, i, some_off && check_below(4) == 0 ? -INFINITY : check_uniform(lo, hi));
    return x;
}

static check_tensor make_slopes(gk_dtype stats, int64_t batch, int64_t heads_q, double most) {
    int64_t shape[2] = {batch, heads_q}, both = check_below(2);
    return make_stats(stats, both ? 2 : 1, both ? shape : shape + 1, 0, most, false);
}

/* For a sum of `terms` products of p or ds with numbers of size 1: values of p and ds below the
 * smallest number vanish; in float16 those below 2^-14 are rounded to a multiple of 2^-24. */
static double attn_floor(gk_dtype dtype, double terms) {
    return dtype == GK_F64 ? 0 : 8 * sqrt(terms) * (dtype == GK_F16 ? 0x1p-25 : 0x1p-120);
}

/* The bounds in the comment at the head of this file. `terms` is the length of a sum, `halves`
 * the number of 16-bit roundings of p or ds. */
static double attn_loss(gk_dtype dtype, int64_t dim, double max_logit, double terms,
                        double halves) {
    double u = check_acc_unit(dtype);
    bool half = dtype == GK_BF16 || dtype == GK_F16;
    return 2 * u * (8 + 2 * sqrt((double)dim)) * max_logit + u * (32 + 2 * sqrt(terms)) +
           (half ? halves * check_unit(dtype) : 0);
}

static void say_rules(const gk_attn_rules *r, const char *more) {
    say("%s scale %g cap %g causal %d diagonal %lld window %lld,%lld", more, r->scale, r->softcap,
        r->is_causal, (long long)r->diagonal, (long long)r->window_left,
        (long long)r->window_right);
}

/* ---- flash_attn ------------------------------------------------------------------------------ */
static struct {
    gk_flash_attn_bwd_args args;
    bool packed, tokens_first;
    int64_t batch, heads_q, heads_kv, seq_q, seq_k, dim, dim_v, tokens_q, tokens_k;
    check_tensor q, k, v, dout, dlse, slopes, sinks, kv_start, kv_end, q_start, cu_q, cu_k, out,
        lse, dq, dk, dv, dsinks, seed;
    /* calls with a mask or a bias (check_cuda_attn_masks.h) */
    bool scored;
    gk_attn_scores scores;
    const gk_tensor *dbias, *ddistance;
    double most_bias; /* the largest finite |bias| */
} f;

/* The reference, with the call's mask and biases. Gradients of biases that are NULL are not
 * computed. */
static void ref_fwd(const gk_flash_attn_args *a) {
    gk_flash_attn_masked_args all = {.fwd = *a, .scores = f.scores};
    if (f.scored) all.fwd.size = sizeof all;
    gk_ref_flash_attn_fwd(&ref_ctx, &all.fwd);
}
static void ref_bwd(const gk_flash_attn_bwd_args *a, const gk_tensor *dbias,
                    const gk_tensor *ddistance) {
    gk_flash_attn_masked_bwd_args all = {
        .bwd = *a, .scores = f.scores, .dbias = dbias, .ddistance_bias = ddistance};
    if (f.scored) all.bwd.size = sizeof all;
    gk_ref_flash_attn_bwd(&ref_ctx, &all.bwd);
}
static void draw_scores(gk_dtype dtype, bool backward);
static void fill_scores(void);
static void expect_bias_gradients(const gk_flash_attn_bwd_args *exact, double most);
static void size_bias_gradients(const gk_flash_attn_bwd_args *sizes);

static int64_t draw_length(bool large) {
    int64_t kind = check_below(4);
    if (check_below(40) == 0) return 0;
    return 1 + check_below(kind == 0 ? 17 : kind == 1 ? 70 : kind == 2 || !large ? 320 : 4200);
}

/* [B, H, S, D] or [T, H, D] with a contiguous last dimension. */
static check_tensor make_heads(gk_dtype dtype, int64_t tokens, int64_t num_heads, int64_t seq,
                               int64_t dim) {
    static const int by_token[4] = {0, 2, 1, 3};
    int64_t dense[4] = {f.batch, num_heads, seq, dim}, packed[3] = {tokens, num_heads, dim};
    if (f.packed) return check_tensor_make(dtype, 3, packed, NULL, 1, pad_for(dim));
    return check_tensor_make(dtype, 4, dense, f.tokens_first ? by_token : NULL, 1, pad_for(dim));
}

/* Random lengths up to `longest`, one of them equal to it. *end becomes the number of tokens. */
static check_tensor make_cu_seqlens(int64_t longest, int64_t *end) {
    int64_t shape = f.batch + 1, at = 0, full = check_below(f.batch);
    check_tensor cu = check_tensor_make(GK_I32, 1, &shape, NULL, 1 + check_below(2), 0);
    for (int64_t b = 0; b <= f.batch; ++b) {
        check_set(&cu.t, b, (double)at);
        *end = at;
        at += b == full ? longest
                        : check_below(check_below(3) ? longest + 1 : gk_min_i64(longest, 1) + 1);
    }
    return cu;
}

static void modify(gk_attn_rules *r, int64_t i) {
    switch (i) {
    case 0: r->is_causal = true; break;
    case 1: r->window_left = check_below(3) ? check_below(90) : check_below(2); break;
    case 2: r->window_right = check_below(60); break;
    case 3:
        r->softcap = 3 * fmax(1, fabs(r->scale) * sqrt((double)f.dim));
        break; /* small enough that tanh's derivative stays above 0.1 */
    case 4: r->alibi_slopes = &f.slopes.t; break;
    case 5: r->sinks = &f.sinks.t; break;
    case 6: r->kv_start = f.packed ? NULL : &f.kv_start.t; break;
    case 7: r->kv_end = f.packed ? NULL : &f.kv_end.t; break;
    case 8: r->diagonal = f.packed ? 0 : f.seq_k - f.seq_q; break;
    case 9: r->diagonal = f.packed ? 0 : check_below(2) ? check_below(50) : -f.seq_q / 2; break;
    case 10: r->scale = check_below(2) ? -0.3 / fmax(1, sqrt((double)f.dim) / 8) : 0; break;
    case 11:
        r->scale = r->softcap > 0 ? r->scale : 40 / sqrt((double)f.dim);
        break; /* nearly one-hot: the running maximum jumps */
    case 12: r->window_left = r->window_right = INT64_MAX; break;
    default: r->q_start = f.packed ? NULL : &f.q_start.t; break;
    }
}

static void flash_draw(gk_dtype dtype, bool large, bool backward, bool scored) {
    const int64_t *h = PICK(heads);
    gk_flash_attn_args *a = &f.args.fwd;
    gk_attn_rules *r = &a->rules;
    static const gk_dtype outs[] = {GK_BF16, GK_F16, GK_F32};
    const bool codes = gk_is_code(dtype);
    gk_dtype stats = codes ? GK_F32 : gk_stats_dtype(dtype), out_dtype = codes ? PICK(outs) : dtype;
    /* 16-bit inputs may have float32 results, which are not rounded */
    const gk_dtype results_of =
        gk_type_of(dtype)->bits == 16 && check_below(3) == 0 && !(scored && backward) ? GK_F32
                                                                                      : dtype;
    f.packed = check_below(3) == 0 && !scored;
    f.scored = scored;
    f.most_bias = 0;
    /* some masks and biases beside few rules, because fast kernels take no others */
    const bool few = scored && check_below(4);
    f.tokens_first = check_below(2);
    f.heads_q = h[0];
    f.heads_kv = h[1];
    f.dim = draw_dim();
    f.dim_v = check_below(4) ? f.dim : draw_dim();
    if (check_below(5) == 0) { /* above 256 */
        f.dim = check_below(2) ? 512 : 8 * (33 + check_below(40));
        if (check_below(4)) f.dim_v = f.dim;
    }
    if (scored && check_below(8) == 0) { /* flash_attn_fwd_masked_wide_sm90a, and its backward */
        f.dim = check_below(2) ? 192 : 8 * (17 + check_below(16));
        f.dim_v = check_below(2) ? f.dim : 128;
    }
    do {
        f.batch = f.packed || check_below(50) ? 1 + check_below(3) : 0;
        f.seq_q = draw_length(large);
        f.seq_k = draw_length(large);
    } while ((scored && f.batch * f.seq_q * f.seq_k == 0) ||
             f.batch * f.heads_q * f.seq_q * f.seq_k * (f.dim + f.dim_v) >
                 small_or(large ? 40000000 : 12000000, backward ? 40000000 : 100000000));
    if (scored && check_below(6) == 0) { /* few keys that many queries see (bwd_split.cuh) */
        f.batch = 1 + check_below(2);
        f.heads_q = 8;
        f.heads_kv = 1;
        f.seq_q = 400 + check_below(200);
        f.seq_k = 1 + check_below(check_small() ? 20 : 130);
        f.dim = f.dim_v = 8 * (1 + check_below(4));
    }
    f.args = (gk_flash_attn_bwd_args){.size = sizeof f.args, .fwd = {.size = sizeof f.args.fwd}};
    if (f.packed) {
        f.cu_q = make_cu_seqlens(f.seq_q, &f.tokens_q);
        f.cu_k = make_cu_seqlens(f.seq_k, &f.tokens_k);
        mirror(&f.cu_q, "cu_seqlens_q", false);
        mirror(&f.cu_k, "cu_seqlens_k", false);
        a->cu_seqlens_q = &f.cu_q.t;
        a->cu_seqlens_k = &f.cu_k.t;
    }
    int64_t rows_q = f.tokens_q + check_below(4), rows_k = f.tokens_k + check_below(4);
    f.q = make_heads(dtype, rows_q, f.heads_q, f.seq_q, f.dim);
    f.k = make_heads(dtype, rows_k, f.heads_kv, f.seq_k, f.dim);
    f.v = make_heads(dtype, rows_k, f.heads_kv, f.seq_k, f.dim_v);
    f.out =
        make_heads(backward || codes ? out_dtype : results_of, rows_q, f.heads_q, f.seq_q, f.dim_v);
    f.lse = check_dense(stats, f.q.t.ndim - 1, f.out.t.shape);
    f.slopes = make_slopes(stats, f.batch, f.heads_q, 0.3);
    f.sinks = make_stats(check_below(2) ? out_dtype : stats, 1, &f.heads_q, -3, 3, true);
    f.kv_start = check_tensor_make(GK_I32, 1, &f.batch, NULL, 2, 0);
    f.kv_end = check_dense(GK_I32, 1, &f.batch);
    f.q_start = check_tensor_make(GK_I32, 1, &f.batch, NULL, 1 + check_below(2), 0);
    for (int64_t b = 0; b < f.batch; ++b) {
        check_set(&f.kv_start.t, b, (double)(check_below(f.seq_k / 2 + 3) - 1));
        check_set(&f.kv_end.t, b, (double)(f.seq_k + 2 - check_below(f.seq_k / 2 + 3)));
        check_set(&f.q_start.t, b, (double)(check_below(f.seq_q + f.seq_k + 3) - f.seq_q - 1));
    }
    mirror(&f.q, "q", false);
    mirror(&f.k, "k", false);
    mirror(&f.v, "v", false);
    mirror(&f.slopes, "alibi_slopes", false);
    mirror(&f.sinks, "sinks", false);
    mirror(&f.kv_start, "kv_start", false);
    mirror(&f.kv_end, "kv_end", false);
    mirror(&f.q_start, "q_start", false);
    const int64_t two = 2;
    f.seed = check_tensor_make(GK_I64, 1, &two, NULL, 1 + check_below(2), 0);
    check_set(&f.seed.t, 0, (double)check_below(1 << 30));
    check_set(&f.seed.t, 1, (double)check_below(3));
    mirror(&f.seed, "dropout_seed", false);
    if (!codes && check_below(3) == 0 && !few) {
        a->dropout_p = check_below(2) ? 0.1 : 0.5;
        a->dropout_seed = &f.seed.t;
    }
    const bool lse_wanted = backward || check_below(4);
    mirror(&f.out, "out", !backward);
    mirror(&f.lse, "lse", !backward && lse_wanted);
    a->q = f.q.t;
    a->k = f.k.t;
    a->v = f.v.t;
    a->out = f.out.t;
    a->lse = f.lse.t;
    /* both forms mean "no lse" */
    if (!lse_wanted) a->lse = check_below(2) ? (gk_tensor){0} : (gk_tensor){.ndim = f.lse.t.ndim};
    a->max_seqlen_q = f.seq_q + check_below(2) * 9;
    a->max_seqlen_k = f.seq_k + check_below(2) * 9;
    r->scale = 1 / sqrt((double)f.dim);
    r->window_left = r->window_right = -1;
    for (int64_t n = few ? 0 : check_below(6); n > 0; --n) modify(r, check_below(14));
    if (few && check_below(3) == 0) modify(r, 5); /* sinks */
    if (few && check_below(3) == 0) modify(r, check_below(3));
    if (r->q_start)
        r->diagonal = 0;
    else if (!f.packed && r->is_causal && !r->alibi_slopes && check_below(20) == 0)
        r->diagonal = INT64_MIN / 2;
    if (backward) {
        f.dout = make_heads(dtype, rows_q, f.heads_q, f.seq_q, f.dim_v);
        f.dlse = check_tensor_make(stats, f.lse.t.ndim, f.lse.t.shape, NULL, 1 + check_below(2), 0);
        f.dq = make_heads(results_of, rows_q, f.heads_q, f.seq_q, f.dim);
        f.dk = make_heads(results_of, rows_k, f.heads_kv, f.seq_k, f.dim);
        f.dv = make_heads(results_of, rows_k, f.heads_kv, f.seq_k, f.dim_v);
        f.dsinks = check_tensor_make(f.sinks.t.dtype, 1, &f.heads_q, NULL, 1 + check_below(2), 0);
        mirror(&f.dq, "dq", true);
        mirror(&f.dk, "dk", true);
        mirror(&f.dv, "dv", true);
        mirror(&f.dsinks, "dsinks", true);
        mirror(&f.dout, "grad_out", false);
        mirror(&f.dlse, "grad_lse", false);
        f.args.grad_out = f.dout.t;
        f.args.dq = f.dq.t;
        f.args.dk = f.dk.t;
        f.args.dv = f.dv.t;
        f.args.grad_lse = check_below(2) ? &f.dlse.t : NULL;
        f.args.dsinks = r->sinks && check_below(4) ? &f.dsinks.t : NULL;
        f.args.deterministic = repeatable = check_below(2);
    }
    may_have_workspace = true;
    say("dropout %g results %s ", a->dropout_p, gk_dtype_name(results_of));
    say_rules(r, f.packed ? "packed" : f.tokens_first ? "tokens first" : "heads first");
    if (codes) return; /* flash_attn_fp8 adds more tensors */
    if (scored) {
        draw_scores(dtype, backward);
        return;
    }
    if (backward)
        TO_DEVICE(f.args);
    else
        TO_DEVICE(f.args.fwd);
}

static void fwd_draw(gk_dtype dtype, bool large) { flash_draw(dtype, large, false, false); }
static void bwd_draw(gk_dtype dtype, bool large) { flash_draw(dtype, large, true, false); }
static void masked_fwd_draw(gk_dtype dtype, bool large) { flash_draw(dtype, large, false, true); }
static void masked_bwd_draw(gk_dtype dtype, bool large) { flash_draw(dtype, large, true, true); }

/* Sets row `row` of every head of sequence b to NaN. Packed rows count from the tensor's first
 * row. */
static void poison(const gk_tensor *t, int64_t b, int64_t row) {
    for (int64_t h = 0; h < t->shape[1]; ++h) {
        int64_t at = h * t->stride[1] +
                     (f.packed ? row * t->stride[0] : b * t->stride[0] + row * t->stride[2]);
        for (int64_t e = 0; e < t->shape[t->ndim - 1]; ++e)
            gk_store(t->data, t->dtype, at + e, NAN);
    }
}

/* NaN in keys that no row of their sequence sees, and in tokens that belong to no sequence. */
static void poison_unseen(bool backward) {
    const gk_attn_rules *r = &f.args.fwd.rules;
    for (int64_t b = 0; b < f.batch; ++b) {
        int64_t k0 = 0, seq_q = f.seq_q, seq_k = f.seq_k, lo = INT64_MAX, hi = 0;
        if (f.packed) {
            k0 = (int64_t)check_get(&f.cu_k.t, b);
            seq_k = (int64_t)check_get(&f.cu_k.t, b + 1) - k0;
            seq_q = (int64_t)(check_get(&f.cu_q.t, b + 1) - check_get(&f.cu_q.t, b));
        }
        const int64_t stands = r->q_start ? (int64_t)check_get(&f.q_start.t, b) : r->diagonal;
        gk_span span = gk_span_make(r, seq_k, f.packed ? seq_k - seq_q : stands);
        if (r->kv_start) span.key_lo = gk_clamp_i64((int64_t)check_get(&f.kv_start.t, b), 0, seq_k);
        if (r->kv_end) span.key_hi = gk_clamp_i64((int64_t)check_get(&f.kv_end.t, b), 0, seq_k);
        for (int64_t i = 0; i < seq_q; ++i) {
            if (gk_span_lo(&span, i) >= gk_span_hi(&span, i)) continue;
            lo = gk_min_i64(lo, gk_span_lo(&span, i));
            hi = gk_max_i64(hi, gk_span_hi(&span, i));
        }
        for (int64_t j = 0; j < seq_k; ++j)
            if (j < lo || j >= hi) {
                poison(&f.k.t, b, k0 + j);
                poison(&f.v.t, b, k0 + j);
            }
    }
    for (int64_t t = f.tokens_k; f.packed && t < f.k.t.shape[0]; ++t) {
        poison(&f.k.t, 0, t);
        poison(&f.v.t, 0, t);
    }
    for (int64_t t = f.tokens_q; f.packed && t < f.q.t.shape[0]; ++t) {
        poison(&f.q.t, 0, t);
        if (backward) poison(&f.dout.t, 0, t);
        for (int64_t h = 0; backward && h < f.heads_q; ++h)
            check_set(&f.dlse.t, t * f.heads_q + h, NAN);
    }
}

static double flash_max_logit(void) {
    const gk_attn_rules *r = &f.args.fwd.rules;
    double most =
        1 + f.most_bias + fabs(r->scale) * check_longest_row(&f.q.t) * check_longest_row(&f.k.t);
    return r->alibi_slopes
               ? most + 0.3 * (double)(f.seq_q + f.seq_k + llabs((long long)r->diagonal))
               : most;
}

static void fwd_expect(void) {
    check_fill_normal(&f.q, 1);
    check_fill_normal(&f.k, 1);
    check_fill_normal(&f.v, 1);
    if (f.scored) fill_scores();
    poison_unseen(false);
    double most = flash_max_logit();
    result *out = expected(&f.out, attn_loss(f.q.t.dtype, f.dim, most, (double)f.seq_k, 1.25));
    out->floor = attn_floor(f.q.t.dtype, (double)f.seq_k);
    gk_flash_attn_args ref = f.args.fwd;
    if (ref.lse.data) {
        result *lse = expected(&f.lse, attn_loss(f.lse.t.dtype, f.dim, most, 0, 0));
        check_fill(&lse->size, 1);
        ref.lse = lse->exact.t;
    }
    check_tensor abs_v = check_map(&f.v, fabs);
    ref.v = abs_v.t;
    ref.out = out->size.t;
    ref_fwd(&ref); /* sum_j p_ij |v_j| */
    ref.v = f.v.t;
    ref.out = out->exact.t;
    ref_fwd(&ref);
}

static double minus_abs(double x) { return -fabs(x); }

/* [x, |x|] or [x, 0] along the last dimension. */
static check_tensor widened(const check_tensor *x, bool with_abs) {
    int64_t shape[4], n = x->t.shape[x->t.ndim - 1];
    memcpy(shape, x->t.shape, sizeof shape);
    shape[x->t.ndim - 1] = 2 * n;
    check_tensor y = check_dense(GK_F64, x->t.ndim, shape);
    for (int64_t i = 0; i < gk_numel(&y.t); ++i) {
        double value = check_get(&x->t, i / (2 * n) * n + i % n);
        check_set(&y.t, i, i % (2 * n) < n ? value : with_abs ? fabs(value) : 0);
    }
    return y;
}

/* The reference runs again with |dout|, |v|, -|out| and |dlse|, which makes every term positive:
 *  w_ij = p_ij (|dout_i| |v_j| + |dout_i| |out_i| + |dlse_i|)
 * dv and dsinks are then their own sizes. q = [q, 0] and k = [k, |k|] leave the logits unchanged
 * and give sum_j w_ij |k_j| as the second half of dq; likewise dk. */
static void bwd_expect(void) {
    check_fill_normal(&f.q, 1);
    check_fill_normal(&f.k, 1);
    check_fill_normal(&f.v, 1);
    check_fill_normal(&f.dout, 1);
    check_fill_normal(&f.dlse, 1);
    if (f.scored) fill_scores();
    poison_unseen(true);
    /* rounded as a forward pass rounds it, because ref and kernels both start from it */
    ref_fwd(&f.args.fwd);
    double most = flash_max_logit(),
           longest = (double)gk_max_i64(f.seq_k, f.seq_q * f.heads_q * f.batch);
    double loss = attn_loss(f.q.t.dtype, f.dim, most, longest + (double)f.dim_v, 2.5);
    result *dq = expected(&f.dq, loss), *dk = expected(&f.dk, loss), *dv = expected(&f.dv, loss);
    result *dsinks = f.args.dsinks ? expected(&f.dsinks, loss) : NULL;
    dv->floor = attn_floor(f.q.t.dtype, (double)(f.seq_q * f.heads_q));
    dk->floor = fabs(f.args.fwd.rules.scale) * dv->floor;
    dq->floor = fabs(f.args.fwd.rules.scale) * attn_floor(f.q.t.dtype, (double)f.seq_k);
    gk_flash_attn_bwd_args ref = f.args;
    ref.dq = dq->exact.t;
    ref.dk = dk->exact.t;
    ref.dv = dv->exact.t;
    ref.dsinks = dsinks ? &dsinks->exact.t : NULL;
    ref_bwd(&ref, NULL, NULL);
    if (f.scored) expect_bias_gradients(&ref, most);
    check_tensor dout = check_map(&f.dout, fabs), v = check_map(&f.v, fabs),
                 out = check_map(&f.out, minus_abs);
    check_tensor dlse = check_map(&f.dlse, fabs);
    ref.grad_out = dout.t;
    ref.fwd.v = v.t;
    ref.fwd.out = out.t;
    ref.dv = dv->size.t;
    if (ref.grad_lse) ref.grad_lse = &dlse.t;
    if (dsinks) ref.dsinks = &dsinks->size.t;
    if (f.scored) size_bias_gradients(&ref);
    for (int side = 0; side < 2; ++side) {
        check_tensor q = widened(&f.q, side == 1), k = widened(&f.k, side == 0);
        check_tensor wide_dq = check_dense(GK_F64, q.t.ndim, q.t.shape),
                     wide_dk = check_dense(GK_F64, k.t.ndim, k.t.shape);
        ref.fwd.q = q.t;
        ref.fwd.k = k.t;
        ref.dq = wide_dq.t;
        ref.dk = wide_dk.t;
        ref_bwd(&ref, NULL, NULL);
        check_tensor *size = side == 0 ? &dq->size : &dk->size;
        *size = side == 0 ? wide_dq : wide_dk;
        size->t.shape[size->t.ndim - 1] = f.dim;
        size->t.data = (double *)size->t.data + f.dim;
    }
}

/* ---- paged_attn ------------------------------------------------------------------------------ */
enum {
    MAX_BATCH = 8
};
static struct {
    gk_paged_attn_masked_args masked;
    check_tensor mask, q, k, v, table, lens, cu, slopes, sinks, kv_start, k_scale, v_scale, out,
        lse;
    int64_t batch, block_size, seq_q[MAX_BATCH], seq_k[MAX_BATCH], longest, tokens;
    bool shared, powers;  /* powers: all scales are powers of two */
    unsigned char *drawn; /* [num_blocks][block_size]: keys that some query reads */
} p;

/* dtype of a cache: sometimes 8-bit codes. */
static gk_dtype draw_stored(gk_dtype dtype) {
    static const gk_dtype codes[] = {GK_E4M3, GK_E4M3, GK_E5M2, GK_I8};
    return check_below(2) ? dtype : PICK(codes);
}

/* [], [Hkv], or for codes [num_blocks, Hkv] */
static check_tensor make_scale(gk_dtype stats, gk_dtype stored, int64_t num_blocks,
                               int64_t heads_kv, double lo) {
    int64_t shape[2] = {num_blocks, heads_kv};
    int ndim = (int)check_below(gk_is_code(stored) ? 3 : 2);
    return make_stats(stats, ndim, shape + 2 - ndim, lo, 2, false);
}

static void to_powers(const check_tensor *scale) {
    for (int64_t i = 0; i < gk_numel(&scale->t); ++i)
        check_set(&scale->t, i, exp2(floor(log2(check_get(&scale->t, i)))));
}

static check_tensor make_cache(gk_dtype dtype, int64_t num_blocks, int64_t block_size,
                               int64_t heads_kv, int64_t dim, bool heads_first) {
    static const int transposed[4] = {0, 2, 1, 3};
    int64_t shape[4] = {num_blocks, block_size, heads_kv, dim};
    return check_tensor_make(dtype, 4, shape, heads_first ? transposed : NULL, 1, pad_for(dim));
}

static void paged_draw(gk_dtype dtype, bool large) {
    static const int64_t pages[] = {1, 3, 16, 16, 64, 64}, tiled[] = {8, 16, 16, 24, 64, 128, 256};
    static const int64_t latent_heads[][2] = {{5, 1}, {16, 1}, {40, 1}, {128, 1}};
    const int64_t *h = PICK(heads);
    gk_dtype stats = gk_stats_dtype(dtype), stored = draw_stored(dtype);
    int64_t dim = draw_dim(), dim_v = check_below(4) ? dim : draw_dim(),
            most_q = check_below(2)   ? 1
                     : check_below(4) ? 6
                                      : 80;
    bool ragged = check_below(2), heads_first = check_below(3) == 0;
    const bool prefill = check_below(3) == 0; /* problems that the prefill kernels of Hopper take */
    if (prefill) {
        dim = dim_v = 64 << check_below(3);
        most_q = check_below(3) ? 200 : 20;
    }
    /* v_cache is a view of k_cache, with the head_dim and page size that a Hopper kernel serves */
    const bool latent = !prefill && check_below(4) == 0;
    if (latent) {
        h = PICK(latent_heads);
        dim = GK_CACHE_HEAD_DIM;
        dim_v = 512;
        stored = dtype;
        most_q = check_below(3) ? 1 : 6;
    } else if (!prefill && check_below(6) == 0) {
        dim = 8 * (33 + check_below(GK_CACHE_HEAD_DIM / 8 - 32));
    }
    do {
        int64_t length = large ? 5000 : check_below(4) ? 200 : 1300;
        p.batch = 1 + check_below(MAX_BATCH);
        p.block_size = prefill ? PICK(tiled) : latent ? 16 << check_below(4) : PICK(pages);
        p.longest = 0;
        for (int64_t b = 0; b < p.batch; ++b) {
            p.seq_q[b] = ragged ? check_below(most_q + 1)
                         : b    ? p.seq_q[0]
                                : 1 + check_below(most_q);
            p.seq_k[b] = check_below(6) == 0 ? 0 : gk_max_i64(1 + check_below(length), p.seq_q[b]);
            p.longest = gk_max_i64(p.longest, p.seq_k[b]);
        }
    } while (p.batch * p.longest * h[1] * (dim + dim_v) >
             small_or(large ? 6000000 : 1000000, 6000000));
    int64_t longest_q = 0, cu_shape = p.batch + 1;
    p.cu = check_tensor_make(GK_I32, 1, &cu_shape, NULL, 1 + check_below(2), 0);
    p.lens = check_tensor_make(GK_I32, 1, &p.batch, NULL, 1 + check_below(2), 0);
    p.tokens = 0;
    p.shared = check_below(4) == 0;
    for (int64_t b = 0; b < p.batch; ++b) {
        check_set(&p.cu.t, b, (double)p.tokens);
        check_set(&p.lens.t, b, (double)p.seq_k[b]);
        p.tokens += p.seq_q[b];
        longest_q = gk_max_i64(longest_q, p.seq_q[b]);
    }
    check_set(&p.cu.t, p.batch, (double)p.tokens);
    int64_t max_blocks = gk_ceil_div(p.longest, p.block_size) + check_below(2),
            num_blocks = (p.batch + 1) * max_blocks + 1;
    int64_t rows = p.tokens + (ragged ? check_below(3) : 0), table_shape[2] = {p.batch, max_blocks};
    int64_t q_shape[3] = {rows, h[0], dim}, out_shape[3] = {rows, h[0], dim_v};
    p.table = check_tensor_make(GK_I32, 2, table_shape, NULL, 1, check_below(3));
    p.k = make_cache(stored, num_blocks, p.block_size, h[1], dim, heads_first);
    if (latent) {
        p.v = p.k;
        p.v.t.shape[3] = dim_v;
    } else {
        p.v = make_cache(stored, num_blocks, p.block_size, h[1], dim_v, heads_first);
    }
    p.q = check_tensor_make(dtype, 3, q_shape, NULL, 1, pad_for(dim));
    p.out = check_dense(dtype, 3, out_shape);
    p.lse = check_dense(stats, 2, out_shape);
    p.slopes = make_slopes(stats, p.batch, h[0], 0.1);
    p.sinks = make_stats(check_below(2) ? dtype : stats, 1, h, -3, 3, true);
    p.kv_start = check_tensor_make(GK_I32, 1, &p.batch, NULL, 1 + check_below(2), 0);
    for (int64_t b = 0; b < p.batch; ++b)
        check_set(&p.kv_start.t, b,
                  (double)(check_below(4) ? check_below(p.seq_k[b] + 1) : check_below(5) - 2));
    p.k_scale = make_scale(stats, stored, num_blocks, h[1], 0.5);
    p.v_scale = make_scale(stats, stored, num_blocks, h[1], 0.5);
    p.powers = check_below(2);
    if (p.powers) {
        to_powers(&p.k_scale);
        to_powers(&p.v_scale);
    }
    const int64_t columns = gk_max_i64(longest_q, 1) + 5 * check_below(2),
                  mask_shape[2] = {rows, columns};
    p.mask = check_tensor_make(GK_U8, 2, mask_shape, NULL, 1 + check_below(2), check_below(3));
    for (int64_t i = 0; i < rows * columns; ++i) check_set(&p.mask.t, i, check_below(3) == 0);
    mirror(&p.q, "q", false);
    mirror(&p.mask, "attn_mask", false);
    mirror(&p.k, "k_cache", false);
    if (!latent) mirror(&p.v, "v_cache", false);
    mirror(&p.table, "block_table", false);
    mirror(&p.lens, "seq_lens", false);
    mirror(&p.cu, "cu_seqlens_q", false);
    mirror(&p.slopes, "alibi_slopes", false);
    mirror(&p.sinks, "sinks", false);
    mirror(&p.kv_start, "kv_start", false);
    mirror(&p.k_scale, "k_scale", false);
    mirror(&p.v_scale, "v_scale", false);
    mirror(&p.out, "out", true);
    mirror(&p.lse, "lse", true);
    gk_attn_rules *r = &p.masked.fwd.rules;
    p.masked = (gk_paged_attn_masked_args)GK_PAGED_ATTN_MASKED_ARGS_INIT;
    p.masked.fwd.q = p.q.t;
    p.masked.fwd.k_cache = p.k.t;
    p.masked.fwd.v_cache = p.v.t;
    p.masked.fwd.flags = check_below(4) ? 0 : GK_PAGED_BATCH_INVARIANT;
    p.masked.fwd.block_table = p.table.t;
    p.masked.fwd.seq_lens = p.lens.t;
    p.masked.fwd.out = p.out.t;
    p.masked.fwd.lse = p.lse.t;
    if (ragged) {
        p.masked.fwd.cu_seqlens_q = &p.cu.t;
        p.masked.fwd.max_seqlen_q = gk_min_i64(longest_q + check_below(2) * 5, columns);
    }
    p.masked.fwd.k_scale = check_below(3) ? NULL : &p.k_scale.t;
    p.masked.fwd.v_scale = check_below(3) ? NULL : &p.v_scale.t;
    r->scale = (check_below(8) ? 1 : 40) / sqrt((double)dim);
    r->softcap = check_below(5) ? 0 : 3;
    /* the last two are not read */
    r->is_causal = check_below(4) != 0;
    r->diagonal = 77;
    r->window_right = 0;
    r->window_left = check_below(3) ? -1 : check_below(4) ? check_below(150) : check_below(2);
    r->alibi_slopes = check_below(4) ? NULL : &p.slopes.t;
    r->sinks = check_below(3) ? NULL : &p.sinks.t;
    r->kv_start = check_below(3) ? NULL : &p.kv_start.t;
    if (prefill) {
        r->softcap = check_below(3) ? 0 : 3;
        r->alibi_slopes = check_below(3) ? NULL : &p.slopes.t;
        if (check_below(2)) {
            r->window_left = -1;
            r->kv_start = NULL;
        }
        if (!gk_is_code(stored)) p.masked.fwd.k_scale = p.masked.fwd.v_scale = NULL;
    }
    if (latent && check_below(3)) {
        r->softcap = 0;
        r->window_left = -1;
        r->alibi_slopes = NULL;
        r->kv_start = NULL;
        p.masked.fwd.k_scale = NULL;
    }
    if (check_below(3) == 0) { /* a mask over the new tokens replaces is_causal */
        p.masked.attn_mask = &p.mask.t;
        r->is_causal = 0;
        r->alibi_slopes = NULL;
        r->window_right = check_below(6);
        p.masked.fwd.flags |= check_below(4) ? 0 : GK_PAGED_WINDOW_RIGHT;
    } else {
        p.masked.fwd.size = sizeof p.masked.fwd;
    }
    may_have_workspace = true;
    say_rules(&p.masked.fwd.rules, heads_first ? "heads first" : p.shared ? "shared pages" : "");
    TO_DEVICE(p.masked);
    for (int64_t b = 0; b < p.batch; ++b)
        say(" %lld/%lld", (long long)p.seq_q[b], (long long)p.seq_k[b]);
}

static void set_row(const gk_tensor *t, int64_t page, int64_t row, bool poison) {
    const double size = t->dtype == GK_I8 ? 4 : 1;
    for (int64_t h = 0; h < t->shape[2]; ++h) {
        const int64_t at = page * t->stride[0] + row * t->stride[1] + h * t->stride[2];
        for (int64_t e = 0; e < t->shape[3]; ++e)
            gk_store(t->data, t->dtype, at + e, poison ? -128 : size * check_normal());
    }
}

/* Draws one row of a page, unless an earlier sequence has drawn it. */
static void fill_row(int64_t page, int64_t row) {
    unsigned char *drawn = &p.drawn[page * p.block_size + row];
    if (!*drawn) {
        set_row(&p.k.t, page, row, false);
        set_row(&p.v.t, page, row, false);
    }
    *drawn = 1;
}

/* Pages are in random order. Entries that no query reads stay NaN in the caches (for int8 see
 * poison_rest) and -7 in the table. With `shared` the entries before the shortest sequence's
 * last page are the same pages for all sequences. */
static void fill_pages(void) {
    int64_t num_blocks = p.k.t.shape[0], max_blocks = p.table.t.shape[1], shortest = INT64_MAX,
            next = 0;
    int64_t *pages = check_alloc((size_t)num_blocks * sizeof(int64_t));
    p.drawn = check_alloc((size_t)(num_blocks * p.block_size));
    memset(p.drawn, 0, (size_t)(num_blocks * p.block_size));
    for (int64_t i = 0; i < num_blocks; ++i) {
        int64_t other = check_below(i + 1);
        pages[i] = pages[other];
        pages[other] = i;
    }
    for (int64_t b = 0; b < p.batch; ++b)
        if (p.seq_q[b] > 0 && p.seq_k[b] > 0)
            shortest = gk_min_i64(shortest, (p.seq_k[b] - 1) / p.block_size);
    for (int64_t b = 0; b < p.batch; ++b) {
        const gk_attn_rules *r = &p.masked.fwd.rules;
        int64_t first =
            r->window_left < 0 ? 0 : gk_max_i64(0, p.seq_k[b] - p.seq_q[b] - r->window_left);
        if (r->kv_start)
            first = gk_max_i64(first,
                               gk_clamp_i64((int64_t)check_get(&p.kv_start.t, b), 0, p.seq_k[b]));
        for (int64_t e = 0; e < max_blocks; ++e) {
            int64_t page = p.shared && e < shortest && shortest != INT64_MAX
                               ? pages[e]
                               : pages[max_blocks + next++];
            bool read =
                p.seq_q[b] > 0 && e >= first / p.block_size && e * p.block_size < p.seq_k[b];
            check_set(&p.table.t, b * max_blocks + e, read ? (double)page : -7);
            for (int64_t key = e * p.block_size; read && key < (e + 1) * p.block_size; ++key)
                if (key >= first && key < p.seq_k[b]) fill_row(page, key % p.block_size);
        }
    }
}

/* int8 has no NaN, so what no query reads becomes the largest code. */
static void poison_rest(void) {
    for (int64_t i = 0; i < p.k.t.shape[0] * p.block_size; ++i)
        if (!p.drawn[i]) {
            set_row(&p.k.t, i / p.block_size, i % p.block_size, true);
            set_row(&p.v.t, i / p.block_size, i % p.block_size, true);
        }
}

static void paged_expect(void) {
    const gk_attn_rules *r = &p.masked.fwd.rules;
    int64_t dim = p.q.t.shape[2];
    for (int64_t i = 0; i < p.tokens * p.q.t.shape[1] * dim; ++i)
        check_set(&p.q.t, i, check_normal()); /* the rest stays NaN */
    fill_pages();
    double most = 1 + r->scale * (p.masked.fwd.k_scale ? 2 : 1) * check_longest_row(&p.q.t) *
                          check_longest_row(&p.k.t);
    if (p.k.t.dtype == GK_I8) poison_rest();
    if (r->alibi_slopes) most += 0.1 * (double)p.longest;
    result *out = expected(&p.out, attn_loss(p.q.t.dtype, dim, most, (double)p.longest, 1.25));
    /* codes may be weighted in float16 */
    const bool halves = gk_is_code(p.k.t.dtype) && p.q.t.dtype == GK_BF16;
    out->floor = attn_floor(halves ? GK_F16 : p.q.t.dtype, (double)p.longest);
    result *lse = expected(&p.lse, attn_loss(p.lse.t.dtype, dim, most, 0, 0));
    check_fill(&lse->size, 1);
    /* a score has an error of u of its size, a weight twice that */
    if (gk_is_code(p.k.t.dtype) && !p.powers) {
        const double u = check_unit(p.q.t.dtype);
        lse->rounded = p.masked.fwd.k_scale ? u * most : 0;
        out->rounded = 2 * lse->rounded + (p.masked.fwd.v_scale ? u : 0);
    }
    check_tensor abs_v = check_map(&p.v, fabs);
    /* the results over old and over new keys are rounded before they are merged */
    if (p.masked.fwd.size == sizeof p.masked) out->loss += check_unit(p.q.t.dtype);
    gk_paged_attn_masked_args masked = p.masked;
    gk_paged_attn_args *ref = &masked.fwd;
    ref->v_cache = abs_v.t;
    ref->out = out->size.t;
    ref->lse = lse->exact.t;
    gk_ref_paged_attn(&ref_ctx, ref); /* sum_j p_j |v_j| */
    ref->v_cache = p.v.t;
    ref->out = out->exact.t;
    gk_ref_paged_attn(&ref_ctx, ref);
}

/* ---- kv_cache_write -------------------------------------------------------------------------- */
static struct {
    gk_kv_cache_write_args args;
    check_tensor k, v, slots, k_scale, v_scale, k_cache, v_cache;
} w;

static void write_draw(gk_dtype dtype, bool large) {
    static const int transposed[3] = {1, 0, 2};
    static const int64_t pages[] = {1, 3, 16, 64}, kv_heads[] = {1, 2, 3, 8};
    int64_t tokens = check_below(4) ? check_below(large ? 3000 : 90) : check_below(5),
            page = PICK(pages);
    int64_t num_heads = PICK(kv_heads), dim = check_below(2) ? draw_dim() : 1 + check_below(80);
    int64_t dim_v = check_below(2)   ? dim
                    : check_below(2) ? draw_dim()
                                     : dim + 5,
            num_blocks = 2 * tokens / page + 1;
    int64_t k_shape[3] = {tokens, num_heads, dim}, v_shape[3] = {tokens, num_heads, dim_v};
    bool heads_first = check_below(2);
    w.k = check_tensor_make(dtype, 3, k_shape, check_below(2) ? transposed : NULL, 1, pad_for(dim));
    w.v = check_tensor_make(dtype, 3, v_shape, NULL, 1 + (check_below(4) == 0), pad_for(dim_v));
    w.slots = check_tensor_make(check_below(2) ? GK_I32 : GK_I64, 1, &tokens, NULL,
                                1 + check_below(2), 0);
    const gk_dtype stored = draw_stored(dtype);
    w.k_scale = make_scale(gk_stats_dtype(dtype), stored, num_blocks, num_heads, 0.2);
    w.v_scale = make_scale(gk_stats_dtype(dtype), stored, num_blocks, num_heads, 0.2);
    w.k_cache = make_cache(stored, num_blocks, page, num_heads, dim, heads_first);
    w.v_cache = make_cache(stored, num_blocks, page, num_heads, dim_v, heads_first);
    mirror(&w.k, "k", false);
    mirror(&w.v, "v", false);
    mirror(&w.slots, "slots", false);
    mirror(&w.k_scale, "k_scale", false);
    mirror(&w.v_scale, "v_scale", false);
    mirror(&w.k_cache, "k_cache", true);
    mirror(&w.v_cache, "v_cache", true);
    w.args =
        (gk_kv_cache_write_args){.size = sizeof w.args, .k = w.k.t, .v = w.v.t, .slots = w.slots.t};
    w.args.k_cache = w.k_cache.t;
    w.args.v_cache = w.v_cache.t;
    w.args.k_scale = check_below(2) ? &w.k_scale.t : NULL;
    w.args.v_scale = check_below(2) ? &w.v_scale.t : NULL;
    say(heads_first ? "heads first" : "tokens first");
    TO_DEVICE(w.args);
}

static double unchanged(double x) { return x; }

/* Every second slot in mirrored order, some skipped, in some problems one behind the cache.
 * Values include inf, NaN and some that a scale makes too large. Caches are NaN, or -1 in int8,
 * where nothing is written. */
static void write_expect(void) {
    int64_t tokens = w.k.t.shape[0], past = check_below(4) ? -1 : check_below(tokens + 1);
    double large = w.k.t.dtype == GK_F16 ? 60000 : 3e38;
    check_fill_normal(&w.k, 3);
    check_fill_normal(&w.v, 3);
    for (int64_t t = 0; t < tokens; ++t)
        check_set(&w.slots.t, t,
                  (double)(t == past || check_below(5) == 0 ? -1 - check_below(9)
                                                            : 2 * (tokens - 1 - t)));
    if (gk_numel(&w.k.t) > 1) {
        check_set(&w.k.t, 0, large);
        check_set(&w.k.t, 1, -large);
    }
    if (gk_numel(&w.v.t) > 1) {
        check_set(&w.v.t, 0, NAN);
        check_set(&w.v.t, 1, INFINITY);
    }
    result *k = expected(&w.k_cache, -1), *v = expected(&w.v_cache, -1);
    gk_kv_cache_write_args ref = w.args;
    /* with the same strides */
    k->exact = check_map(&w.k_cache, unchanged);
    v->exact = check_map(&w.v_cache, unchanged);
    ref.k_cache = k->exact.t;
    ref.v_cache = v->exact.t;
    gk_ref_kv_cache_write(&ref_ctx, &ref);
    if (past < 0 || past == tokens) return;
    check_set(&w.slots.t, past,
              (double)(w.k_cache.t.shape[0] * w.k_cache.t.shape[1] + check_below(1000)));
    error_kind = GK_BAD_SLOTS;
}

/* ---- attn_merge ------------------------------------------------------------------------------ */
static struct {
    gk_attn_merge_args args;
    check_tensor a, b, lse_a, lse_b, out, lse;
} mg;

static void merge_draw(gk_dtype dtype, bool large) {
    static const int64_t dims[] = {1, 7, 8, 16, 31, 64, 80, 128, 130, 256};
    static const int transposed[4] = {0, 2, 1, 3};
    int64_t shape[4] = {1 + check_below(3), 1 + check_below(5), check_below(large ? 2000 : 120),
                        PICK(dims)};
    int ndim = 2 + (int)check_below(3);
    const int64_t *s = shape + 4 - ndim;
    mg.a = check_tensor_make(dtype, ndim, s, ndim == 4 && check_below(2) ? transposed : NULL, 1,
                             pad_for(shape[3]));
    mg.b = check_tensor_make(dtype, ndim, s, NULL, 1 + (check_below(4) == 0), pad_for(shape[3]));
    mg.lse_a = check_tensor_make(gk_stats_dtype(dtype), ndim - 1, s, NULL, 1, check_below(3));
    mg.lse_b = check_tensor_make(gk_stats_dtype(dtype), ndim - 1, s, NULL, 1 + check_below(2), 0);
    mg.out = check_dense(dtype, ndim, s);
    mg.lse = check_dense(gk_stats_dtype(dtype), ndim - 1, s);
    mirror(&mg.a, "out_a", false);
    mirror(&mg.b, "out_b", false);
    mirror(&mg.lse_a, "lse_a", false);
    mirror(&mg.lse_b, "lse_b", false);
    mirror(&mg.out, "out", true);
    mirror(&mg.lse, "lse", true);
    mg.args = (gk_attn_merge_args){sizeof mg.args, mg.a.t,   mg.b.t,  mg.lse_a.t,
                                   mg.lse_b.t,     mg.out.t, mg.lse.t};
    TO_DEVICE(mg.args);
}

static bool merge_sides(void) { /* if one side has no keys, the other one is unchanged */
    int64_t dim = mg.a.t.shape[mg.a.t.ndim - 1];
    for (int64_t e = 0; e < gk_numel(&mg.out.t); ++e) {
        bool no_a = check_get(&mg.lse_a.t, e / dim) == -INFINITY,
             no_b = check_get(&mg.lse_b.t, e / dim) == -INFINITY;
        double alone = no_a && no_b ? 0 : check_get(no_a ? &mg.b.t : &mg.a.t, e);
        if ((no_a || no_b) && check_get(&mg.out.t, e) != alone) return false;
    }
    return true;
}

static void merge_expect(void) {
    double u = check_acc_unit(mg.out.t.dtype);
    result *out = expected(&mg.out, 232 * u), *lse = expected(&mg.lse, 8 * u);
    int64_t dim = mg.a.t.shape[mg.a.t.ndim - 1];
    also = merge_sides;
    check_fill_normal(&mg.a, 1);
    check_fill_normal(&mg.b, 1);
    /* NaN beside an lse of -inf, because such a side must not be read */
    for (int64_t i = 0; i < gk_numel(&mg.lse.t); ++i) {
        int64_t kind = check_below(6);
        bool no_a = kind == 0 || kind == 2, no_b = kind == 1 || kind == 2;
        double x = 30 * check_normal(), y = x + 3 * check_normal();
        check_set(&mg.lse_a.t, i, no_a ? -INFINITY : x);
        check_set(&mg.lse_b.t, i, no_b ? -INFINITY : y);
        check_set(&lse->size.t, i, 1 + fabs(x) + fabs(y));
        if (no_a) check_set(&mg.a.t, i * dim, NAN);
        if (no_b) check_set(&mg.b.t, i * dim, NAN);
    }
    check_tensor abs_a = check_map(&mg.a, fabs), abs_b = check_map(&mg.b, fabs);
    gk_attn_merge_args ref = mg.args;
    ref.out_a = abs_a.t;
    ref.out_b = abs_b.t;
    ref.out = out->size.t;
    ref.lse = lse->exact.t;
    gk_ref_attn_merge(&ref_ctx, &ref);
    ref.out_a = mg.a.t;
    ref.out_b = mg.b.t;
    ref.out = out->exact.t;
    gk_ref_attn_merge(&ref_ctx, &ref);
}

/* ---- weight_gemm ----------------------------------------------------------------------------- */
static struct {
    gk_weight_gemm_args args;
    /* q: the codes, which the device does not need */
    check_tensor q, a, packed, scale, zero, global_scale, bias, out;
    bool powers;
} wg;

static void weight_draw(gk_dtype dtype, bool large) {
    static const int64_t ms[] = {1, 5, 8, 9, 16, 17, 33, 70, 130, 300},
                         ns[] = {1, 16, 33, 64, 70, 130, 200, 264};
    static const int64_t ks[] = {1, 33, 64, 128, 200, 512, 1000, 1096},
                         groups[] = {16, 32, 64, 128, 256, 1 << 20};
    static const int64_t none[1] = {0};
    /* Half of the problems have the strides of linear layers. Hopper's kernels take no others. */
    const bool usual = check_below(2);
    int64_t m, n, k;
    may_have_workspace = true; /* the decoded weight */
    do {
        m = large ? 1 + check_below(40) : PICK(ms);
        n = usual ? 16 * (1 + check_below(17)) : large ? 8 * (1 + check_below(200)) : PICK(ns);
        k = usual ? 64 * (1 + check_below(18)) : large ? 8 * (1 + check_below(700)) : PICK(ks);
    } while (m * n * k > small_or(1000000, 20000000));
    if (usual) placing = ALIGNED;
    may_have_workspace = true;
    const gk_weight_format format = (gk_weight_format)check_below(6);
    const bool e2m1 = format == GK_MXFP4 || format == GK_NVFP4;
    const int64_t group = format == GK_MXFP4   ? 32
                          : format == GK_NVFP4 ? 16
                          : usual              ? 32 << check_below(3)
                                               : PICK(groups);
    const int64_t high = gk_ceil_div(k, group), one = 1, codes[2] = {n, k}, rows[2] = {m, n};
    const int64_t tiles[3] = {gk_ceil_div(n, 64), gk_ceil_div(k, 64), gk_tile_bytes(format)};
    const gk_dtype own = format == GK_MXFP4 ? GK_E8M0 : format == GK_NVFP4 ? GK_E4M3 : dtype;
    const gk_dtype out = check_below(3) ? dtype : GK_F32;
    wg.powers = format == GK_MXFP4 || check_below(3);
    wg.q = check_dense(gk_code_dtype(format), 2, codes);
    wg.a = usual ? check_dense(dtype, 2, (int64_t[2]){m, k}) : operand(dtype, none, m, k);
    wg.packed = check_dense(GK_U8, 3, tiles);
    wg.scale = stored(usual || check_below(4) ? own : GK_F32, none, high, n,
                      !usual && check_below(4) == 0, false, 1, usual ? 0 : check_below(3));
    wg.zero = stored(GK_U8, none, high, n, false, false, 1, usual ? 0 : check_below(3));
    wg.global_scale = check_dense(GK_F32, 1, &one);
    wg.bias =
        check_tensor_make(check_below(2) ? out : GK_F32, 1, &n, NULL, 1 + (check_below(4) == 0), 0);
    wg.out = check_dense(out, 2, rows);
    mirror(&wg.a, "a", false);
    mirror(&wg.packed, "packed", false);
    mirror(&wg.scale, "scale", false);
    mirror(&wg.zero, "zero", false);
    mirror(&wg.global_scale, "global_scale", false);
    mirror(&wg.bias, "bias", false);
    mirror(&wg.out, "out", true);
    wg.args = (gk_weight_gemm_args){.size = sizeof wg.args,
                                    .a = wg.a.t,
                                    .packed = wg.packed.t,
                                    .scale = wg.scale.t,
                                    .n = n,
                                    .format = format,
                                    .out = wg.out.t};
    wg.args.zero = format == GK_UINT4 && check_below(4) ? &wg.zero.t : NULL;
    wg.args.global_scale = format == GK_NVFP4 && check_below(2) ? &wg.global_scale.t : NULL;
    wg.args.bias = check_below(2) ? &wg.bias.t : NULL;
    wg.args.activation = check_below(2) ? GK_ACT_NONE : (gk_activation)check_below(5);
    say("format %d group %lld activation %d scale %s%s", (int)format, (long long)group,
        wg.args.activation, gk_dtype_name(wg.scale.t.dtype),
        e2m1 || wg.powers ? ", powers of two" : "");
    TO_DEVICE(wg.args);
}

/* The value of a code without its scale. */
static double weight_code(gk_weight_format format, double code, double zero) {
    return format == GK_UINT4                         ? code - zero
           : format == GK_MXFP4 || format == GK_NVFP4 ? gk_e2m1_to_f32((int)code)
                                                      : code;
}

/* Draws the operands of a call with so many codes and scales. */
static void weight_fill(int64_t codes, int64_t scales) {
    check_fill_normal(&wg.a, 1);
    check_fill_normal(&wg.bias, 1);
    check_fill(&wg.global_scale, 0.125);
    for (int64_t i = 0; i < codes; ++i)
        check_set(&wg.q.t, i,
                  wg.args.format == GK_W_E4M3 ? 0.25 * (double)(check_below(256) - 128)
                  : wg.args.format == GK_INT8 ? (double)(check_below(256) - 128)
                  : wg.args.format == GK_INT4 ? (double)(check_below(16) - 8)
                                              : (double)check_below(16));
    for (int64_t i = 0; i < scales; ++i) {
        check_set(&wg.scale.t, i,
                  wg.powers ? ldexp(1, (int)check_below(5) - 4) : 0.05 + fabs(check_normal()));
        check_set(&wg.zero.t, i, (double)check_below(16));
    }
}

static void weight_expect(void) {
    const gk_weight_gemm_args *x = &wg.args;
    const int64_t m = x->a.shape[0], n = x->n, k = x->a.shape[1], groups = x->scale.shape[0];
    weight_fill(n * k, groups * n);
    const gk_pack_weight_args pack = {
        .size = sizeof pack, .q = wg.q.t, .format = x->format, .packed = wg.packed.t};
    gk_ref_pack_weight(&ref_ctx, &pack);
    /* scales that are powers of two round no weight; with others a kernel may round weights to
     * a's dtype or not */
    result *out = expected(&wg.out, check_acc_unit(x->a.dtype) * (32 + 4 * sqrt((double)k)) +
                                        (wg.powers ? 0 : check_unit(x->a.dtype)));
    gk_weight_gemm_args ref = *x;
    ref.out = out->exact.t;
    gk_ref_weight_gemm(&ref_ctx, &ref);
    const int log2 = gk_group_log2(k, groups);
    double *w = (double *)check_alloc((size_t)k * sizeof *w);
    for (int64_t j = 0; j < n; ++j) {
        for (int64_t i = 0; i < k; ++i) {
            const int64_t at = (i >> log2) * n + j;
            w[i] = fabs(weight_code(x->format, check_get(&wg.q.t, j * k + i),
                                    x->zero ? check_get(&wg.zero.t, at) : 8) *
                        check_get(&wg.scale.t, at));
            if (x->global_scale) w[i] *= 0.125;
        }
        for (int64_t r = 0; r < m; ++r) {
            double size = x->bias ? fabs(check_get(&wg.bias.t, j)) : 0;
            for (int64_t i = 0; i < k; ++i) size += w[i] * fabs(check_get(&wg.a.t, r * k + i));
            check_set(&out->size.t, r * n + j, size);
        }
    }
}

#include "check_cuda_attn_fp8.h"
#include "check_cuda_attn_masks.h"
#include "check_cuda_weight_grouped.h"

#include "check_cuda_quant.h"
#include "check_cuda_rows.h"

#include "check_cuda_quantize.h"

#include "check_cuda_cache.h"

/* ---- the loop over ops and instances --------------------------------------------------------- */
/* draw makes the tensors of a random problem and copies them to the arena. expect fills the
 * inputs and computes the expected results. */
static const struct {
    gk_op op;
    const char *name;
    void (*draw)(gk_dtype dtype, bool large);
    void (*expect)(void);
} ops[] = {{GK_OP_GEMM, "gemm", gemm_draw, gemm_expect},
           {GK_OP_GEMM_ACT_BWD, "gemm_act_bwd", act_bwd_draw, act_bwd_expect},
           {GK_OP_FLASH_ATTN_FWD, "flash_attn_fwd", fwd_draw, fwd_expect},
           {GK_OP_FLASH_ATTN_BWD, "flash_attn_bwd", bwd_draw, bwd_expect},
           {GK_OP_FLASH_ATTN_FP8, "flash_attn_fp8", attn_fp8_draw, attn_fp8_expect},
           {GK_OP_PAGED_ATTN, "paged_attn", paged_draw, paged_expect},
           {GK_OP_KV_CACHE_WRITE, "kv_cache_write", write_draw, write_expect},
           {GK_OP_ROPE_KV_WRITE, "rope_kv_write", rope_write_draw, rope_write_expect},
           {GK_OP_WEIGHT_GEMM, "weight_gemm", weight_draw, weight_expect},
           {GK_OP_WEIGHT_GEMM, "weight_gemm_grouped", weight_grouped_draw, weight_grouped_expect},
           {GK_OP_SCALED_GEMM, "scaled_gemm", scaled_draw, scaled_expect},
           {GK_OP_GROUPED_GEMM, "grouped_gemm", grouped_draw, grouped_expect},
           {GK_OP_SPARSE_GEMM, "sparse_gemm", sparse_draw, sparse_expect},
           {GK_OP_ATTN_MERGE, "attn_merge", merge_draw, merge_expect},
           {GK_OP_NORM_FWD, "norm_fwd", norm_draw, norm_expect},
           {GK_OP_NORM_BWD, "norm_bwd", norm_bwd_draw, norm_bwd_expect},
           {GK_OP_SOFTMAX_FWD, "softmax_fwd", softmax_draw, softmax_expect},
           {GK_OP_SOFTMAX_BWD, "softmax_bwd", softmax_bwd_draw, softmax_bwd_expect},
           {GK_OP_GLU_FWD, "glu_fwd", glu_draw, glu_expect},
           {GK_OP_GLU_BWD, "glu_bwd", glu_bwd_draw, glu_bwd_expect},
           {GK_OP_ROPE, "rope", rope_draw, rope_expect},
           {GK_OP_CROSS_ENTROPY_FWD, "cross_entropy_fwd", loss_draw, loss_expect},
           {GK_OP_CROSS_ENTROPY_BWD, "cross_entropy_bwd", loss_bwd_draw, loss_bwd_expect},
           {GK_OP_KL_DIV, "kl_div", kl_div_draw, kl_div_expect},
           {GK_OP_MOE_UNPERMUTE, "moe_unpermute", moe_draw, moe_expect},
           {GK_OP_MOE_UNPERMUTE_BWD, "moe_unpermute_bwd", moe_bwd_draw, moe_bwd_expect},
           {GK_OP_DROPOUT, "dropout", dropout_draw, dropout_expect},
           {GK_OP_QUANTIZE, "quantize", quantize_draw, quantize_expect},
           {GK_OP_DEQUANTIZE, "dequantize", dequantize_draw, dequantize_expect},
           {GK_OP_FLASH_ATTN_FWD, "flash_attn_masked_fwd", masked_fwd_draw, fwd_expect},
           {GK_OP_FLASH_ATTN_BWD, "flash_attn_masked_bwd", masked_bwd_draw, bwd_expect}};

/* Instances for a mask or a bias have entries of their own, and so have groups of rows of
 * weight_gemm, which weight_gemm_sm80 takes in tiles of 8 and 32 tokens. */
static bool belongs_to(int o, const gk_cuda_instance *row) {
    if (ops[o].op == GK_OP_WEIGHT_GEMM) {
        const bool grouped = strstr(row->name, "_grouped_") != NULL;
        const char *last = strrchr(row->name, '_');
        if (strcmp(ops[o].name, "weight_gemm") == 0) return !grouped;
        return grouped || strstr(row->name, "_plain_") ||
               (strstr(row->name, "_sm80_") && strcmp(last, "_16") != 0);
    }
    const bool scored = strstr(row->name, "_masked_") || strstr(row->name, "_scores_");
    return scored == (strstr(ops[o].name, "_masked_") != NULL);
}

/* Ops whose operands may both have 8 bits; the others have codes beside wider operands. */
static bool takes_codes(gk_op op) {
    return op == GK_OP_SCALED_GEMM || op == GK_OP_GROUPED_GEMM || op == GK_OP_SPARSE_GEMM ||
           op == GK_OP_FLASH_ATTN_FP8;
}

typedef struct tested {
    int table; /* index in gk_cuda_tables */
    const gk_cuda_instance *row;
    int64_t problems, failed;
    double seconds;
    bool wants;
} tested;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Which instances run: every parts-th of those whose name contains one of the texts. */
static struct {
    char only[256];
    char *texts[32];
    int num_texts, part, parts;
    int64_t num_rows, tested, problems; /* instances named, instances run, problems run */
} chosen = {.part = 1, .parts = 1};

/* texts: from the command line. Returns false if GK_CHECK_PART is not of the form 2/5. */
static bool choose(char **texts) {
    const char *only = getenv("GK_CHECK_ONLY"), *part = getenv("GK_CHECK_PART");
    char more;
    for (; *texts && chosen.num_texts < CHECK_COUNT(chosen.texts); ++texts)
        chosen.texts[chosen.num_texts++] = *texts;
    snprintf(chosen.only, sizeof chosen.only, "%s", only ? only : "");
    for (char *text = strtok(chosen.only, ",");
         text && chosen.num_texts < CHECK_COUNT(chosen.texts); text = strtok(NULL, ","))
        chosen.texts[chosen.num_texts++] = text;
    if (!part || !*part) return true;
    return sscanf(part, "%d/%d%c", &chosen.part, &chosen.parts, &more) == 2 && chosen.part >= 1 &&
           chosen.part <= chosen.parts;
}

static bool is_chosen(const char *name) {
    bool named = chosen.num_texts == 0;
    for (int i = 0; i < chosen.num_texts; ++i) named = named || strstr(name, chosen.texts[i]);
    return named && chosen.num_rows++ % chosen.parts == chosen.part - 1;
}

/* The chosen instances of ops[o] and a dtype that this device runs. */
static int rows_of(int o, gk_dtype dtype, int32_t arch, tested *to, int most) {
    int n = 0, num_tables;
    const gk_cuda_table *const *tables = gk_cuda_tables(ops[o].op, &num_tables);
    for (int t = 0; t < num_tables; ++t) {
        if (tables[t]->arch == 90 ? arch != 90 : arch < tables[t]->arch) continue;
        for (int r = 0; r < tables[t]->num_instances; ++r) {
            const gk_cuda_instance *row = &tables[t]->instances[r];
            if (row->dtype != dtype || !belongs_to(o, row) || !is_chosen(row->name)) continue;
            if (n == most) abort();
            to[n++] = (tested){.row = row, .table = t};
        }
    }
    return n;
}

static void try_row(tested *x) {
    if (only_plans) {
        ++x->problems;
        return;
    }
    double start = now();
    int64_t failed = check_num_failed;
    /* paged_tree may call paged_prefill_decoded for old keys */
    const bool rounds = strstr(x->row->name, "paged_prefill_decoded") != NULL ||
                        strstr(x->row->name, "paged_tree") != NULL;
    check_isa = x->row->name;
    for (int again = 0; again < (check_small() ? 1 : 2); ++again) {
        run_row(x->row, again);
        if (again && repeatable) break; /* the second run has the same bits, which were checked */
        for (int i = 0; i < num_results; ++i) {
            const result *r = &results[i];
            if (r->loss < 0)
                check_equal(r->name, &r->got->t, &r->exact.t);
            else
                check_close(r->name, &r->got->t, &r->exact.t, &r->size.t,
                            r->loss + (rounds ? r->rounded : 0));
        }
        if (also) check_result(also(), "values that should have passed unchanged");
    }
    x->seconds += now() - start;
    x->failed += check_num_failed - failed;
    ++x->problems;
}

/* Draws until every instance has had its problems. The second half of the attempts draws large
 * problems for instances that took no small one. An instance that seldom takes small problems
 * may then have fewer. */
static void test_instances(int o, gk_dtype dtype, tested *rows, int num_rows, int64_t problems) {
    const int most = check_small() ? 1000 : 3000;
    for (int attempt = 0; attempt < most; ++attempt) {
        bool done = true, any = false, late = attempt >= most / 2;
        for (int r = 0; r < num_rows; ++r) done = done && rows[r].problems >= (late ? 1 : problems);
        if (done) break;
        check_seed = ((uint64_t)attempt * GK_NUM_OPS + (uint64_t)o) * 64 + dtype;
        placing = check_below(3) ? ALIGNED : check_below(2) ? ODD : MIXED;
        num_blocks = num_results = 0;
        arena_used = 0;
        check_case[0] = 0;
        may_have_workspace = false;
        repeatable = true;
        error_kind = -1;
        also = NULL;
        ops[o].draw(dtype, late || (!check_small() && check_below(10) == 0));
        gk_plan plan;
        for (int r = 0; r < num_rows; ++r) {
            const gk_cuda_instance *row = rows[r].row;
            rows[r].wants = rows[r].problems < problems && arena_used + 3 * GAP <= HOST_BYTES &&
                            gk_cuda_takes(ops[o].op, rows[r].table, device_args) &&
                            plan_instance(row, &plan);
            any = any || rows[r].wants;
        }
        if (any && !only_plans) ops[o].expect();
        for (result *r = results; r < results + num_results; ++r)
            for (int64_t i = 0; r->floor > 0 && i < gk_numel(&r->size.t); ++i)
                check_set(&r->size.t, i, fabs(check_get(&r->size.t, i)) + r->floor / r->loss);
        for (int r = 0; r < num_rows; ++r)
            if (rows[r].wants) try_row(&rows[r]);
        check_free(0);
    }
}

/* Instances that this program cannot test: those that add to the contents of out
 * (tests/ops/test_partial_attn.py), and those for latents in 8 bits
 * (tests/ops/test_latent_fp8.py). */
static bool drawn_elsewhere(const gk_cuda_instance *row) {
    if (strstr(row->name, "latent_fp8") || strstr(row->name, "write_latent")) return true;
    return strncmp(row->name, "flash_attn_fwd_partial_plain", 28) == 0 &&
           gk_type_of(row->dtype)->bits > 16;
}

/* Finds the device and its memory. Returns the GPU, or NULL if there is none. */
static const gk_gpu *begin(int64_t threads) {
    ctx = (gk_context){.size = sizeof ctx, .device = GK_CUDA};
    ref_ctx = check_context(NULL, (int32_t)gk_clamp_i64(threads, 1, 16));
    if (only_plans) {
        arena_d = (unsigned char *)(uintptr_t)(1 << 30); /* a plan reads no memory */
        return gk_cuda_arch("sm_90", &ctx.index) == GK_OK ? gk_gpu_of(ctx.index) : NULL;
    }
    if (gk_gpu_count() == 0) return NULL;
    cudaStream_t stream;
    try_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    try_cuda(cudaMalloc((void **)&arena_d, DEVICE_BYTES), "cudaMalloc");
    try_cuda(cudaMallocHost((void **)&arena_up, HOST_BYTES), "cudaMallocHost");
    try_cuda(cudaMallocHost((void **)&arena_down, HOST_BYTES), "cudaMallocHost");
    ctx.stream = stream;
    ctx.error_word = gk_cuda_error_word();
    return gk_gpu_of(0);
}

int main(int argc, char **argv) {
    bool verbose = getenv("GK_CHECK_ONLY") || getenv("GK_CHECK_PART");
    int64_t problems = check_small() ? 3 : 16, threads = sysconf(_SC_NPROCESSORS_ONLN);
    /* so that a run that is cut off shows what it has done */
    setvbuf(stdout, NULL, _IOLBF, BUFSIZ);
    for (; argc > 1 && argv[1][0] == '-'; --argc, ++argv) {
        verbose = verbose || strcmp(argv[1], "-v") == 0;
        only_plans = only_plans || strcmp(argv[1], "-p") == 0;
        const bool counts = strcmp(argv[1], "-n") == 0;
        if ((counts || strcmp(argv[1], "-t") == 0) && argc > 2) {
            *(counts ? &problems : &threads) = atoi(argv[2]);
            --argc;
            ++argv;
        }
    }
    if (!choose(argv + 1)) {
        printf("GK_CHECK_PART is \"%s\"; expected the number of a part and how many there are, as "
               "in 2/5\n",
               getenv("GK_CHECK_PART"));
        return 2;
    }
    const gk_gpu *gpu = begin(threads);
    if (!gpu) {
        printf("no CUDA device: nothing checked\n0 passed, 0 failed\n");
        return 0;
    }
    printf("%s, compute capability %d.%d\n", gpu->name, gpu->arch / 10, gpu->arch % 10);
    for (int o = 0; o < CHECK_COUNT(ops); ++o) {
        for (int d = 0; d < CHECK_COUNT(dtypes); ++d) {
            if (gk_is_code(dtypes[d]) && !takes_codes(ops[o].op)) continue;
            tested rows[256];
            int n = rows_of(o, dtypes[d], gpu->arch, rows, CHECK_COUNT(rows));
            double start = now();
            test_instances(o, dtypes[d], rows, n, problems);
            chosen.tested += n;
            for (int r = 0; r < n; ++r) {
                chosen.problems += rows[r].problems;
                snprintf(check_case, sizeof check_case, "instance %s", rows[r].row->name);
                check_result(rows[r].problems > 0 || drawn_elsewhere(rows[r].row),
                             "took no problem");
                if (verbose || rows[r].failed || !rows[r].problems)
                    printf("%-48s %3lld problems %8.3f s%s\n", rows[r].row->name,
                           (long long)rows[r].problems, rows[r].seconds,
                           rows[r].failed ? "   FAILED" : "");
            }
            if (verbose && n)
                printf("  %s %s: %d rows, %.1f s\n", ops[o].name, gk_dtype_name(dtypes[d]), n,
                       now() - start);
        }
    }
    printf("walked %lld of %lld rows, %lld problems", (long long)chosen.tested,
           (long long)chosen.num_rows, (long long)chosen.problems);
    if (chosen.parts > 1) printf("; part %d of %d", chosen.part, chosen.parts);
    for (int i = 0; i < chosen.num_texts; ++i)
        printf("%s%s", i ? ", " : "; rows with ", chosen.texts[i]);
    printf("\n");
    return check_end();
}
