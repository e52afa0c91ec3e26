/* SPDX-License-Identifier: BSD-3-Clause */
/* gemm: out = activation(alpha a b + beta c + bias), packed and cache-blocked. This file holds
 * the loops around the register tile; isa/gemm_ukr.c and amx/gemm_amx.c call it with their tile
 * and packing (gk_gemm_isa). After Goto and van de Geijn 2008, "Anatomy of high-performance
 * matrix multiplication"; loop names as in BLIS.
 *
 *  a [batch..., M, K]   b [batch..., K, N]   out [batch..., M, N]
 *  any strides; float32, bfloat16 or float16
 *
 * A task computes one block of at most MB x NB of one product over all of K:
 *  for pc over K by KC       pack a[MB][KC] into strips of at most MR rows,
 *                            pack b[KC][NB] into panels of NR columns
 *    for jr over panels      the panel of b stays in the L1
 *      for ir over strips    strips of a stream from the L2;
 *                            the register tile adds to C or to a float32 block
 *
 * If several blocks read the same columns of b, the work alternates between two phases: all
 * workers pack as many columns of b as fit the shared buffer, then they compute the blocks that
 * read them. Otherwise each task packs its own b. If M is small, a worker packs a only once.
 *
 * The order in which an element's sum runs over k depends only on KC, so neither blocks nor
 * threads change its bits. KC depends on M, unless products are batch-invariant. Workspace: the
 * shared b; for each worker packed a, packed b and, for 16-bit results with K > KC, the float32
 * block. Not served: M <= 16 (gemm_skinny), float64 (ref). */
#include "../core/invariant.h"
#include "blocks.h"
#include "kernels.h"

#include <assert.h>

/* ---- 1 the problem --------------------------------------------------------------------------- */
gk_gemm_problem gk_cpu_gemm_problem(const gk_gemm_args *args) {
    gk_gemm_problem p = gk_gemm_problem_of(args);
    /* (M x K)(K x 1) is computed as (1 x K)(K x M), a row times the transposed matrix; out and
     * preact are contiguous either way */
    if (p.n == 1 && p.m > 1 && p.epilogue.out_row == 1 &&
        (!args->preact || p.epilogue.preact_row == 1)) {
        p = gk_gemm_swapped(&p);
        p.a_m = 0; /* one row */
    }
    return p;
}

gk_gemm_epilogue gk_epilogue_at(const gk_gemm_epilogue *e, int64_t row, int64_t col) {
    gk_gemm_epilogue x = *e;
    if (x.bias)
        x.bias = (const char *)x.bias + (int64_t)gk_dtype_bytes(x.bias_dtype) * col * x.bias_stride;
    if (x.c)
        x.c = (const char *)x.c +
              (int64_t)gk_dtype_bytes(x.c_dtype) * (row * x.c_row + col * x.c_col);
    x.out = (char *)x.out + (int64_t)gk_dtype_bytes(x.out_dtype) * (row * x.out_row + col);
    if (x.preact)
        x.preact =
            (char *)x.preact + (int64_t)gk_dtype_bytes(x.out_dtype) * (row * x.preact_row + col);
    return x;
}

void gk_gemm_at(const gk_gemm_problem *p, gk_dtype dtype, int64_t i, const char **a, const char **b,
                gk_gemm_epilogue *e) {
    const gk_gemm_result *const r = &p->epilogue;
    int64_t ao = 0, bo = 0, co = 0, oo = 0, po = 0;
    for (int d = p->ndim - 1; d >= 0; --d) {
        int64_t x = i % p->shape[d];
        i /= p->shape[d];
        ao += x * p->a_batch[d];
        bo += x * p->b_batch[d];
        co += x * p->c_batch[d];
        oo += x * p->out_batch[d];
        po += x * p->preact_batch[d];
    }
    const int64_t bytes = (int64_t)gk_dtype_bytes(dtype),
                  out_bytes = (int64_t)gk_dtype_bytes(r->out_dtype);
    *a = gk_at(p->a, bytes * ao);
    *b = gk_at(p->b, bytes * bo);
    *e = (gk_gemm_epilogue){.alpha = (float)r->alpha,
                            .beta = (float)r->beta,
                            .bias = r->bias,
                            .c = r->c,
                            .bias_dtype = r->bias_dtype,
                            .c_dtype = r->c_dtype,
                            .out_dtype = r->out_dtype,
                            .bias_stride = r->bias_col,
                            .c_row = r->c_row,
                            .c_col = r->c_col,
                            .out = gk_at(r->out, out_bytes * oo),
                            .preact = gk_at(r->preact, out_bytes * po),
                            .out_row = r->out_row,
                            .preact_row = r->preact_row,
                            .activation = r->activation};
    if (r->c) e->c = (const char *)r->c + (int64_t)gk_dtype_bytes(r->c_dtype) * co;
}

/* Whether gemm_skinny serves the product: M is so small that reading b in place is faster than
 * packing it. The limit is higher if both operands are contiguous along k. gemm_skinny adds in
 * another order than gemm_packed, so batch-invariant products never use it. */
bool gk_gemm_is_skinny(const gk_gemm_problem *p) {
    if (gk_batch_invariant()) return false;
    if (p->b_n == 1) return p->m <= GK_SKINNY_ROWS_ACROSS;
    return p->b_k == 1 && p->a_k == 1 && p->m <= GK_SKINNY_ROWS_ALONG;
}

/* ---- 2 the plan ------------------------------------------------------------------------------ */
typedef struct plan {
    gk_gemm_problem p;
    /* block sizes differ by at most one row, NR columns or one cell of k */
    int64_t m_blocks, n_blocks, k_blocks;
    int64_t mb, nb, kb; /* largest sizes */
    bool a_rows; /* a is contiguous along k (or on AMX tiles): strips keep rows, no transposition */
    /* cells between rows of packed a; one line more than a multiple of 1 KiB avoids conflicts of
     * L1 sets */
    int64_t a_ld;
    bool a_in_place;   /* the register tile reads a in place, without packing */
    bool b_in_place;   /* and whole panels of b in place */
    bool direct;       /* the register tile may add directly into out */
    bool block;        /* a float32 block for each worker holds the sums between k blocks */
    bool shared;       /* b is packed once for all tasks, `span` columns at a time */
    int64_t span;      /* N if b is not shared */
    bool a_once;       /* a task's rows of a stay packed in a worker for its later tasks */
    int64_t sum_cells; /* cells that are summed before they are added to the total */
    size_t a_bytes, b_bytes, c_bytes, worker_bytes, shared_bytes;
} plan;
GK_PLAN_HOLDS(plan);

enum {
    /* panels of b that one packing task packs; a row of them is one range of addresses */
    PACK_PANELS = 2,
    /* A sum runs over at most this many cells; then the equally long parts are added. The error
     * grows with the length of a part: relative to MKL's, float32 with k 256, 320, 1024 has
     * errors of 1.0, 1.0, 0.85, and of 1.4, 1.2, 1.2 with parts of 256. Results of bfloat16
     * pairs are rounded to 8 bits, so their parts may be longer (SUM_PAIRS); parts of 192
     * take 2 % more time. */
    SUM_CELLS = 192,
    /* float32 operands of products up to these sizes are read in place. Speed of MKL's, Xeon of
     * model 207, packed and in place: 256 cubed 0.92, 0.98; 376 x 184 x 192 NT 0.87, 0.95; 1000 and
     * 1023 cubed 0.90, 0.96; 2000 x 500 x 500 NN 0.95, 0.99. Packing is better for a transposed a
     * beside a shared b (0.91, 0.79) and for b of 216 x 424 x 4392 (0.88, 0.80). */
    READ_A_COLUMNS = 2048,
    READ_B_SIZE = 512,
    SUM_PAIRS = 256
};

/* Replaces avx512's `own` of blocks.h on Intel's cores if M is at most GK_GEMM_SMALL_M and b is
 * contiguous along n. Each row of b is then on its own page, and rows 16 KiB apart share few
 * sets of the L2, so prefetched lines do not stay.
 *
 * Speed of MKL's, Xeon of model 207, at 64 x 4096 x 4096, 64 x 1024 x 1024, 64 x 11008 x 4096:
 *  nb 128: kb 1024 0.80, 0.96, 0.77; kb 256 0.93 at the first
 *  nb 256: kb 256 0.95, 0.95, 0.89; kb 190 0.98, 0.98, 0.93; kb 128 0.97, 1.00, 0.91
 *  nb 512: kb 256 0.90, 0.88 at the first two
 * kb 190 is 152 plus a quarter and splits no sum. With NT, nb 512 reaches 0.89 instead of 0.98. */
static const gk_gemm_block small_m_of_intel = {336, 256, 152};
/* AMX with M up to GK_GEMM_SMALL_M. a's block is 32 KiB per 64 rows and stays in the L1.
 * Alternating runs at 16 x 4096 x 4096, 64 x 4096 x 4096 NN, the same NT, 64 x 1024 x 1024,
 * relative to 256 x 512 with prefetch: 256 x 512 without prefetch 1.42x, 1.19x, 1.14x, 1.09x;
 * 256 x 256 1.44x, 1.26x, 1.08x, 1.10x; 512 x 256 1.45x, 1.28x, 1.03x, 1.11x; 2048 x 128 1.59x,
 * 1.23x, 0.79x, 1.03x. */
static const gk_gemm_block small_m_of_amx = {512, 256, 256};
/* The same for a b that is contiguous along k, while a worker can keep all of a: longer runs of
 * b are read. At 8, 16, 64 x 4096 x 4096 and 64 x 1024 x 1024, relative to 256 x 256: 128 x 512
 * 1.08x, 1.09x, 1.08x, 1.00x; 64 x 1024 1.08x, 1.12x, 1.15x, 1.01x; 32 x 1024 1.13x, 1.12x,
 * 1.14x, 1.13x. */
static const gk_gemm_block small_m_along_of_amx = {512, 32, 1024};
bool gk_cpu_is_intel(void); /* features.c */

/* whole_cells: the cells of k that one instruction takes. packed_cells: the cells of a packed
 * block. */
static int64_t whole_cells(const gk_gemm_isa *isa) { return isa->k_cells ? isa->k_cells : 1; }
static int64_t packed_cells(const gk_gemm_isa *isa, int64_t k) {
    return gk_round_up(gk_ceil_div(k, isa->pair), whole_cells(isa));
}

static bool has_tiles(const gk_gemm_isa *isa) { return isa->pack_rows_any != NULL; }

/* The bytes of a buffer of cells. Another w cells take the overrun of narrow panels. */
static size_t buffer_bytes(int64_t cells, const gk_gemm_isa *isa) {
    return (size_t)gk_round_up((cells + isa->w) * 4, 64);
}

/* float32 a that is contiguous along either dimension can be read in place as rows or strips.
 * Rows a multiple of 4 KiB apart are excluded: they share one set of the L1. */
static bool can_read_a(const gk_gemm_problem *p, gk_dtype dtype, const gk_gemm_isa *isa,
                       bool shared) {
    if (dtype != GK_F32 || isa->pair != 1) return false;
    if (p->a_k == 1) return p->n <= READ_A_COLUMNS && p->a_m % 1024 != 0;
    return p->a_m == 1 && !shared && p->n <= READ_B_SIZE && p->a_k % 512 != 0;
}

static bool can_read_b(const gk_gemm_problem *p, gk_dtype dtype, const gk_gemm_isa *isa) {
    return dtype == GK_F32 && isa->pair == 1 && p->m <= READ_B_SIZE && p->n <= READ_B_SIZE &&
           p->b_n == 1 && p->b_k % 256 != 0;
}

/* Decides whether all tasks share one packed b, and how many columns of it a phase packs. The
 * spans are equal, and the two phases of a span must be worth their barriers. */
static void share_b(plan *x, const gk_context *ctx, const gk_gemm_isa *isa) {
    const gk_gemm_problem *p = &x->p;
    const gk_gemm_blocks *bl = isa->blocks;
    const int64_t nr = 2 * isa->w;
    const int64_t fit =
        GK_GEMM_SHARED_BYTES / (4 * gk_max_i64(1, packed_cells(isa, p->k))) / nr * nr;
    const int64_t spans = gk_max_i64(1, gk_ceil_div(p->n, gk_max_i64(fit, nr)));
    x->span = gk_round_up(gk_ceil_div(p->n, spans), nr);
    const double work = (double)p->m * (double)gk_min_i64(p->n, x->span) * (double)p->k;
    x->shared = p->m > bl->own.mb && fit > 0 && x->span >= gk_min_i64(p->n, bl->own.nb) &&
                work >= GK_GEMM_SHARED_MIN;
    if (has_tiles(isa) && p->k <= GK_GEMM_KEPT_K && p->n >= 2 * bl->own.nb * gk_num_threads(ctx))
        x->shared = false;
    if (!x->shared) x->span = p->n;
}

/* The largest block that suits the product: a measured one of blocks.h or of the tables above. */
static const gk_gemm_block *largest_block(const plan *x, const gk_gemm_isa *isa) {
    const gk_gemm_problem *p = &x->p;
    const bool small_m = p->m <= GK_GEMM_SMALL_M;
    if (has_tiles(isa) && small_m) {
        const bool worker_keeps_a = 2 * p->m * p->k <= GK_GEMM_ONCE_BYTES / 2;
        return p->b_n != 1 && worker_keeps_a ? &small_m_along_of_amx : &small_m_of_amx;
    }
    if (x->shared) return &isa->blocks->shared;
    if (small_m && p->b_n == 1 && isa->w == 16 && isa->pair == 1 && gk_cpu_is_intel())
        return &small_m_of_intel;
    return &isa->blocks->own;
}

/* Cuts a phase into blocks: a few tasks per thread, as long as a task is worth its packing. */
static void cut_into_blocks(plan *x, const gk_context *ctx, const gk_gemm_isa *isa) {
    const gk_gemm_problem *p = &x->p;
    const gk_gemm_blocks *bl = isa->blocks;
    const gk_gemm_block *most = largest_block(x, isa);
    const int64_t nr = 2 * isa->w, n = gk_min_i64(p->n, x->span), batch = x->shared ? 1 : p->batch;
    x->m_blocks = gk_max_i64(1, gk_ceil_div(p->m, most->mb));
    x->n_blocks = gk_max_i64(1, gk_ceil_div(n, most->nb));
    /* One block that is a quarter longer is better than two short ones. Blocks of k that do not
     * depend on M give a row the same sums in every batch. */
    const bool invariant = gk_batch_invariant();
    const int64_t kb = invariant ? bl->own.kb : most->kb;
    x->k_blocks = gk_max_i64(1, gk_ceil_div(p->k, kb + kb / 4));
    /* With a small M reading b dominates. All blocks of b but the first are prefetched during
     * the product. */
    if (!invariant && !x->shared && p->m <= GK_GEMM_SMALL_M)
        x->k_blocks =
            gk_max_i64(x->k_blocks, gk_min_i64(GK_GEMM_FEW_BLOCKS, p->k / GK_GEMM_FEW_KB));
    const int64_t threads = gk_num_threads(ctx);
    const int64_t wanted = ctx->num_threads <= 1 ? 1 : bl->tasks_per_thread * threads;
    for (;;) {
        int64_t tasks = batch * x->m_blocks * x->n_blocks;
        int64_t mb = gk_ceil_div(p->m, x->m_blocks), nb = gk_ceil_div(n, x->n_blocks);
        if (tasks >= wanted || mb * nb * p->k < bl->min_task || (mb < 2 * isa->mr && nb < 2 * nr))
            break;
        if (mb >= (x->shared ? 8 * isa->mr : gk_max_i64(nb, 2 * isa->mr)))
            ++x->m_blocks;
        else if (nb >= 2 * nr)
            ++x->n_blocks;
        else
            ++x->m_blocks;
    }
    /* a phase lasts as long as its last task, so every thread gets the same number of tasks */
    for (int64_t i = 0;
         x->shared && i < threads && x->m_blocks * x->n_blocks % threads &&
         x->m_blocks * x->n_blocks < 8 * threads && p->m / x->m_blocks >= 8 * isa->mr;
         ++i)
        ++x->m_blocks;
    x->mb = gk_ceil_div(p->m, x->m_blocks);
    x->nb = gk_max_i64(nr, gk_round_up(gk_ceil_div(n, x->n_blocks), nr));
    x->n_blocks = gk_max_i64(1, gk_ceil_div(n, x->nb));
    x->kb = gk_round_up(gk_ceil_div(p->k, x->k_blocks), isa->pair * whole_cells(isa));
    x->k_blocks = x->kb ? gk_ceil_div(p->k, x->kb) : 1;
}

/* Decides which operands are packed, which buffer has the sums between blocks of k, and the bytes
 * of each buffer. */
static void choose_buffers(plan *x, const gk_gemm_args *args, const gk_gemm_isa *isa) {
    const gk_gemm_problem *p = &x->p;
    const gk_gemm_result *e = &p->epilogue;
    const bool tiles = has_tiles(isa);
    /* The last columns of a direct product add a block of k in another order than the others. If
     * N is 1, rows are those columns. */
    x->direct = !gk_batch_invariant() && e->out_dtype == GK_F32 && (float)e->alpha == 1 &&
                e->activation == GK_ACT_NONE && !args->bias && !args->preact &&
                !(args->c && args->beta != 0);
    x->block = x->k_blocks > 1 && !x->direct;
    x->a_rows = p->a_k == 1 || tiles;
    x->a_in_place = can_read_a(p, args->a.dtype, isa, x->shared);
    x->b_in_place = can_read_b(p, args->a.dtype, isa) && !x->shared;
    x->sum_cells = tiles ? INT64_MAX / 2 : isa->pair > 1 ? SUM_PAIRS : SUM_CELLS;

    const int64_t cells = x->kb / isa->pair;
    x->a_ld = gk_round_up(cells, isa->w) + 16;
    x->a_bytes = buffer_bytes(x->mb * (x->a_rows ? x->a_ld : cells), isa);
    x->a_once = !x->shared &&
                (tiles ? x->n_blocks > 1 : p->batch == 1 && x->m_blocks == 1 && x->n_blocks > 2) &&
                (int64_t)x->a_bytes * x->k_blocks <= GK_GEMM_ONCE_BYTES;
    x->b_bytes = x->shared ? 0 : buffer_bytes(x->nb * cells, isa);
    x->shared_bytes =
        x->shared ? buffer_bytes(x->span * (x->k_blocks * x->kb / isa->pair), isa) : 0;
    x->c_bytes =
        (size_t)gk_round_up(4 * ((x->block ? x->mb * x->nb : 0) + 2 * isa->mr * isa->w), 64);
    x->worker_bytes =
        x->b_bytes + x->c_bytes + (x->a_once ? 64 + x->a_bytes * (size_t)x->k_blocks : x->a_bytes);
}

static plan plan_of(const gk_context *ctx, const gk_gemm_args *args, const gk_gemm_isa *isa) {
    plan x = {.p = gk_cpu_gemm_problem(args)};
    share_b(&x, ctx, isa);
    cut_into_blocks(&x, ctx, isa);
    choose_buffers(&x, args, isa);
    return x;
}

/* The number of tasks; with a shared b, of one phase. */
static int64_t num_tasks(const plan *x) {
    return x->p.m && x->p.n ? (x->shared ? 1 : x->p.batch) * x->m_blocks * x->n_blocks : 0;
}

/* ---- 3 one block of C ------------------------------------------------------------------------ */
/* Prefetches the part of b that a task will pack next into the L2, line by line, while the task
 * multiplies the block before. */
typedef struct fetch {
    const char *row;   /* the row that is being fetched */
    int64_t rows;      /* left, this one included */
    int64_t row_bytes; /* from row to row */
    int64_t lines;     /* cache lines of a row */
    int64_t line;      /* the next line of this row */
} fetch;

static fetch fetch_make(const gk_gemm_problem *p, const char *b, int64_t es, int64_t cols,
                        int64_t k) {
    if (p->b_n == 1) return (fetch){b, k, es * p->b_k, gk_ceil_div(cols * es, 64), 0};
    if (p->b_k == 1) return (fetch){b, cols, es * p->b_n, gk_ceil_div(k * es, 64), 0};
    return (fetch){b, 0, 0, 0, 0};
}

static void fetch_lines(fetch *f, int64_t n) {
    while (n-- > 0 && f->rows > 0) {
        __builtin_prefetch(f->row + 64 * f->line, 0, 2);
        if (++f->line == f->lines) {
            f->line = 0;
            f->row += f->row_bytes;
            --f->rows;
        }
    }
}

typedef struct job {
    const gk_gemm_args *args;
    const gk_gemm_isa *isa;
    plan x;
    char *workspace;
    int64_t batch, column; /* the current phase's batch entry and first column, if b is shared */
} job;

/* Start of strip s when rows are split evenly: 64 rows in 5 strips are 13 13 13 13 12. */
static int64_t strip_start(int64_t rows, int64_t strips, int64_t s) {
    int64_t base = rows / strips, longer = rows % strips;
    return s * base + gk_min_i64(s, longer);
}

/* Strips of a block are even, too, except on AMX, which would have to configure its tiles at
 * each change. */
static int64_t strip_of(const gk_gemm_isa *isa, int64_t rows, int64_t strips, int64_t s) {
    return has_tiles(isa) ? gk_min_i64(rows, s * isa->mr) : strip_start(rows, strips, s);
}

/* The shared b: for each k block its consecutive panels. */
static uint32_t *shared_at(const job *jb, int64_t k0, int64_t column) {
    const int64_t cells = packed_cells(jb->isa, gk_min_i64(jb->x.kb, jb->x.p.k - k0));
    return (uint32_t *)jb->workspace + k0 / jb->isa->pair * jb->x.span + column * cells;
}

/* The buffer in which a worker packs a. With a_once it starts with two counters (the number of k
 * blocks packed, and the rows of a they belong to); the blocks follow at 64 bytes. */
static int64_t *blocks_of_a(const job *jb, int64_t worker) {
    const plan *x = &jb->x;
    return (int64_t *)(jb->workspace + x->shared_bytes + (size_t)worker * x->worker_bytes +
                       x->b_bytes + x->c_bytes);
}

/* Packs rows of a: as [rows][a_ld], or as strips that are transposed. */
static void pack_a(const job *jb, uint32_t *to, const char *a, int64_t rows, int64_t kn) {
    const plan *x = &jb->x;
    const gk_gemm_problem *p = &x->p;
    const gk_dtype dtype = jb->args->a.dtype;
    const int64_t strips = gk_ceil_div(rows, jb->isa->mr), cells = gk_ceil_div(kn, jb->isa->pair);
    if (has_tiles(jb->isa)) {
        jb->isa->pack_rows_any(to, x->a_ld, a, dtype, p->a_m, p->a_k, rows, kn);
        return;
    }
    if (x->a_rows) {
        jb->isa->pack_rows(to, x->a_ld, a, dtype, p->a_m, rows, kn);
        return;
    }
    for (int64_t s = 0; s < strips; ++s) {
        int64_t r0 = strip_start(rows, strips, s), rn = strip_start(rows, strips, s + 1) - r0;
        jb->isa->pack_panel(to + r0 * cells, rn,
                            gk_at(a, (int64_t)gk_dtype_bytes(dtype) * r0 * p->a_m), dtype, p->a_m,
                            p->a_k, rn, kn);
    }
}

static int64_t pack_tasks(const job *jb) {
    return jb->x.k_blocks * gk_ceil_div(jb->x.span, PACK_PANELS * 2 * jb->isa->w);
}
static void pack_task(void *arg, int64_t t, int64_t worker) {
    (void)worker;
    const job *jb = arg;
    const gk_gemm_problem *p = &jb->x.p;
    const int64_t width = PACK_PANELS * 2 * jb->isa->w,
                  es = (int64_t)gk_dtype_bytes(jb->args->a.dtype);
    const int64_t k0 = t % jb->x.k_blocks * jb->x.kb, column = t / jb->x.k_blocks * width;
    const int64_t cols =
        gk_min_i64(gk_min_i64(width, jb->x.span - column), p->n - jb->column - column);
    if (cols <= 0) return;
    const char *a, *b;
    gk_gemm_epilogue e;
    gk_gemm_at(p, jb->args->a.dtype, jb->batch, &a, &b, &e);
    jb->isa->pack_panels(shared_at(jb, k0, column),
                         b + es * (k0 * p->b_k + (jb->column + column) * p->b_n), jb->args->a.dtype,
                         p->b_n, p->b_k, cols, gk_min_i64(jb->x.kb, p->k - k0));
}

/* c[rn][nr] (+)= strip of a times panel of b. */
static void multiply(const plan *x, gk_ukr_fn ukr, int64_t cells, const uint32_t *a, int64_t step,
                     const uint32_t *b, int64_t ldb, float *c, int64_t ldc, bool accumulate) {
    const int64_t parts = gk_max_i64(gk_ceil_div(cells, x->sum_cells), 1),
                  each = gk_max_i64(gk_ceil_div(cells, parts), 1);
    for (int64_t k = 0; k == 0 || k < cells; k += each)
        ukr(gk_min_i64(each, cells - k), a + (x->a_rows ? k : k * step), step, b + k * ldb, ldb, c,
            ldc, accumulate || k > 0);
}

/* One block of C at one block of k. */
typedef struct step {
    const job *jb;
    gk_gemm_epilogue e; /* of the block's first element */
    const char *a, *b;  /* the operands at the block's first row and column and at its first k */
    const uint32_t *a_pack, *b_pack;
    int64_t cells;    /* of this block of k */
    int64_t in_place; /* the columns of b before this one are read in place */
    float *tile;      /* sums of one strip by one panel */
    float *block;     /* sums of the whole block, kept between blocks of k */
    bool first, last; /* whether this is the first and the last block of k */
} step;

/* Multiplies rows [r0, r0 + rn) of a by columns [c0, c0 + cn) of b. Stores or keeps the sums. */
static void strip_by_panel(const step *s, int64_t r0, int64_t rn, int64_t c0, int64_t cn) {
    const gk_gemm_isa *isa = s->jb->isa;
    const plan *x = &s->jb->x;
    const gk_gemm_problem *p = &x->p;
    const int64_t nr = 2 * isa->w, es = (int64_t)gk_dtype_bytes(s->jb->args->a.dtype);
    const gk_ukr_fn *ukrs =
        (x->a_rows ? isa->ukr_rows : isa->ukr_panel) + (cn > isa->w ? isa->mr : 0);
    const gk_ukr_fn ukr = ukrs[rn - 1];
    const uint32_t *ap = s->a_pack + r0 * (x->a_rows ? x->a_ld : s->cells);
    const uint32_t *bp = s->b_pack + c0 * s->cells;
    int64_t step_a = x->a_rows ? x->a_ld : rn, ldb = nr;
    if (x->a_in_place) {
        ap = gk_at(s->a, es * r0 * p->a_m);
        step_a = x->a_rows ? p->a_m : p->a_k;
    }
    if (c0 < s->in_place) {
        bp = gk_at(s->b, es * c0);
        ldb = p->b_k;
    }
    if (x->direct && cn % isa->w == 0) {
        float *to = (float *)s->e.out + r0 * s->e.out_row + c0;
        multiply(x, ukr, s->cells, ap, step_a, bp, ldb, to, s->e.out_row, !s->first);
        return;
    }
    gk_gemm_epilogue at = gk_epilogue_at(&s->e, r0, c0);
    if (x->block) {
        float *to = s->block + r0 * x->nb + c0;
        multiply(x, ukr, s->cells, ap, step_a, bp, ldb, to, x->nb, !s->first);
        if (s->last) isa->store(&at, to, x->nb, rn, cn);
        return;
    }
    /* all of K is one block, or this is an edge of a direct product, which adds to out */
    if (x->direct && !s->first) {
        at.c = at.out;
        at.c_dtype = GK_F32;
        at.c_row = at.out_row;
        at.c_col = 1;
        at.beta = 1;
    }
    multiply(x, ukr, s->cells, ap, step_a, bp, ldb, s->tile, nr, false);
    isa->store(&at, s->tile, nr, rn, cn);
}

static void task(void *arg, int64_t t, int64_t worker) {
    const job *jb = arg;
    const gk_gemm_isa *isa = jb->isa;
    const plan *x = &jb->x;
    const gk_gemm_problem *p = &x->p;
    const int64_t nr = 2 * isa->w, es = (int64_t)gk_dtype_bytes(jb->args->a.dtype);
    const gk_dtype dtype = jb->args->a.dtype;
    char *ws = jb->workspace + x->shared_bytes + (size_t)worker * x->worker_bytes;
    int64_t *a_packed = blocks_of_a(jb, worker);
    uint32_t *b_pack = (uint32_t *)ws, *a_pack = (uint32_t *)a_packed;
    float *tile = (float *)(ws + x->b_bytes);

    const int64_t blocks = x->m_blocks * x->n_blocks;
    /* With a_once, n_blocks consecutive tasks have the same rows of a. of_a numbers these rows. */
    const int64_t of_a = t / x->n_blocks;
    const int64_t mi = x->a_once ? of_a % x->m_blocks : t % x->m_blocks;
    const int64_t ni = x->a_once ? t % x->n_blocks : t / x->m_blocks % x->n_blocks;
    const int64_t bi = x->shared ? jb->batch : t / blocks;
    if (x->a_once && a_packed[1] != of_a) {
        a_packed[0] = 0;
        a_packed[1] = of_a;
    }
    const int64_t i0 = strip_start(p->m, x->m_blocks, mi),
                  rows = strip_start(p->m, x->m_blocks, mi + 1) - i0;
    const int64_t j0 = jb->column + ni * x->nb,
                  cols = gk_min_i64(x->nb, gk_min_i64(p->n, jb->column + x->span) - j0);
    if (cols <= 0) return; /* the last span may have fewer blocks */
    const int64_t strips = gk_ceil_div(rows, isa->mr), panels = gk_ceil_div(cols, nr);
    const char *a, *b;
    gk_gemm_epilogue whole;
    gk_gemm_at(p, dtype, bi, &a, &b, &whole);
    a = gk_at(a, es * i0 * p->a_m);
    b = gk_at(b, es * j0 * p->b_n);
    step s = {
        .jb = jb, .e = gk_epilogue_at(&whole, i0, j0), .tile = tile, .block = tile + isa->mr * nr};

    for (int64_t k0 = 0, kbi = 0; kbi < x->k_blocks; ++kbi, k0 += x->kb) {
        const int64_t kn = gk_min_i64(x->kb, p->k - k0), cells = packed_cells(isa, kn);
        if (x->a_once) a_pack = (uint32_t *)((char *)a_packed + 64 + (size_t)kbi * x->a_bytes);
        if (!x->a_in_place && (!x->a_once || *a_packed == kbi)) {
            pack_a(jb, a_pack, gk_at(a, es * k0 * p->a_k), rows, kn);
            if (x->a_once) ++*a_packed;
        }
        const int64_t in_place = x->b_in_place ? cols / nr * nr : 0; /* columns of whole panels */
        if (x->shared)
            b_pack = shared_at(jb, k0, j0 - jb->column);
        else if (in_place < cols)
            isa->pack_panels(b_pack + in_place * cells,
                             gk_at(b, es * (k0 * p->b_k + in_place * p->b_n)), dtype, p->b_n,
                             p->b_k, cols - in_place, kn);
        /* AMX: prefetches of distant lines would occupy the L1's fill buffers while tile loads
         * wait for the L2 */
        const int64_t kn_next =
            !x->shared && !has_tiles(isa) ? gk_clamp_i64(p->k - k0 - kn, 0, x->kb) : 0;
        fetch next = fetch_make(p, gk_at(b, es * (k0 + kn) * p->b_k), es, cols, kn_next);
        const int64_t share = gk_ceil_div(next.rows * next.lines, panels * strips);
        s.a = gk_at(a, es * k0 * p->a_k);
        s.b = gk_at(b, es * k0 * p->b_k);
        s.a_pack = a_pack;
        s.b_pack = b_pack;
        s.cells = cells;
        s.in_place = in_place;
        s.first = kbi == 0;
        s.last = kbi == x->k_blocks - 1;
        for (int64_t c0 = 0; c0 < cols; c0 += nr)
            for (int64_t i = 0; i < strips; ++i) {
                const int64_t r0 = strip_of(isa, rows, strips, i);
                fetch_lines(&next, share);
                strip_by_panel(&s, r0, strip_of(isa, rows, strips, i + 1) - r0, c0,
                               gk_min_i64(nr, cols - c0));
            }
    }
    if (isa->end_task) isa->end_task();
}

/* ---- 4 entry points -------------------------------------------------------------------------- */
bool gk_gemm_packed_plan(const gk_context *ctx, const gk_gemm_args *args, const gk_gemm_isa *isa,
                         gk_plan *to) {
    plan *x = GK_OWN(plan, to);
    *x = plan_of(ctx, args, isa);
    to->tile[0] = x->mb;
    to->tile[1] = x->nb;
    to->tile[2] = x->kb;
    to->tile[3] = isa->mr * 2 * isa->w;
    to->tasks = num_tasks(x);
    to->workspace_bytes =
        x->shared_bytes + (size_t)gk_num_workers(ctx, to->tasks) * x->worker_bytes;
    return true;
}

void gk_gemm_packed_run(const gk_context *ctx, const gk_gemm_args *args, const gk_gemm_isa *isa,
                        const gk_plan *planned, void *workspace) {
    job jb = {args, isa, *GK_OWN_CONST(plan, planned), workspace, 0, 0};
    for (int64_t w = 0; jb.x.a_once && w < gk_num_workers(ctx, num_tasks(&jb.x)); ++w)
        blocks_of_a(&jb, w)[0] = blocks_of_a(&jb, w)[1] = 0;
    if (!jb.x.shared) {
        gk_parallel(ctx, num_tasks(&jb.x), task, &jb);
        return;
    }
    for (jb.batch = 0; jb.batch < jb.x.p.batch; ++jb.batch)
        for (jb.column = 0; jb.column < jb.x.p.n; jb.column += jb.x.span) {
            gk_parallel(ctx, pack_tasks(&jb), pack_task, &jb);
            gk_parallel(ctx, num_tasks(&jb.x), task, &jb);
        }
}
