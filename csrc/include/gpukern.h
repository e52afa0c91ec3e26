/* SPDX-License-Identifier: BSD-3-Clause */
/* gpukern.h: the C API of gpukern: gemm, attention, caches, norms and what stands between them.
 * gpukern_quant.h has the quantised and sparse products, gpukern_train.h what training alone needs;
 * both include this page and keep its conventions. No torch, no C++.
 *
 * Conventions
 *   Strides count elements, int64; they may be zero or negative where a field does not say
 *   otherwise.
 *   Anything in bytes ends in _bytes. lse is the natural logarithm. "T" is a number of tokens.
 *   Every struct starts with `size`, its sizeof at the caller: structs grow at the end only.
 *   Every entry point returns a gk_status; gk_last_error() has the detail text of this thread's
 *   last failure. Nothing here exits, prints, allocates device memory or synchronises a device.
 *   Besides constants of its devices a process keeps the preferred instances that it was told of
 *   (gk_gemm_prefer), and a thread gemm's last choices, which change no result. A struct begins as
 *   its initialiser, gk_gemm_args args = GK_GEMM_ARGS_INIT; (in C++ from 20 on): zeros alone would
 *   mean alpha 0 and windows of one key. What has no default, as scale, is refused by name until it
 *   is set.
 *   At most 2^48 elements a tensor, and no stride that reaches further.
 *   Workspace comes from the caller: ask gk_<op>_workspace_bytes, 64-byte aligned, need not be
 *   zeroed.
 */
#ifndef GPUKERN_H
#define GPUKERN_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define GK_API __attribute__((visibility("default")))
#else
#define GK_API
#endif

#define GK_VERSION_MAJOR 0
#define GK_VERSION_MINOR 3
#define GK_VERSION_PATCH 0

/* ---- status ------------------------------------------------------------------------------- */
typedef enum gk_status {
    GK_OK = 0,
    GK_ERR_ARGUMENT = 1, /* a shape, dtype, stride or value that the op does not take */
    GK_ERR_INDEX =
        2, /* contents of a table, of lengths or of slots out of range; nothing was written */
    GK_ERR_UNSUPPORTED =
        3, /* valid, but no kernel on this device serves it; the text says what is supported */
    GK_ERR_WORKSPACE = 4, /* workspace missing, too small or misaligned */
    GK_ERR_DEVICE =
        5 /* the device runtime reported a failure, or the machine lacks the asked ISA */
} gk_status;

GK_API const char *gk_version(void);               /* "major.minor.patch" */
GK_API const char *gk_status_name(gk_status code); /* "GK_OK", ... */
GK_API const char *gk_last_error(void);            /* this thread's last detail text, "" if none */

/* ---- tensors ------------------------------------------------------------------------------ */
typedef enum gk_dtype {
    GK_F32 = 0,
    GK_BF16 = 1,
    GK_F16 = 2,
    GK_F64 = 3,
    GK_I32 = 4,
    GK_I64 = 5,
    /* 8 bits: codes of quantised tensors, and e8m0, a power of two that is a scale */
    GK_E4M3 = 6,
    GK_E5M2 = 7,
    GK_I8 = 8,
    GK_U8 = 9,
    GK_E8M0 = 10
} gk_dtype;

#define GK_MAX_DIMS 8

typedef struct gk_tensor {
    union {                     /* the first element; may be NULL where a dimension is 0 */
        void *data;             /* of a result, or of an input */
        const void *const_data; /* of an input, which no call writes: a pointer to const is set
                                   without a cast */
    };
    gk_dtype dtype;
    int32_t ndim;
    int64_t shape[GK_MAX_DIMS];
    int64_t stride[GK_MAX_DIMS]; /* elements */
} gk_tensor;

/* of one element, in whole bytes; 0 of what is no dtype */
GK_API size_t gk_dtype_bytes(gk_dtype dtype);
GK_API const char *gk_dtype_name(gk_dtype dtype); /* "float32", ... */

/* ---- context ------------------------------------------------------------------------------ */
typedef enum gk_device {
    GK_CPU = 0,
    GK_CUDA = 1
} gk_device;

typedef void (*gk_task_fn)(void *arg, int64_t i);
/* Runs task(arg, i) once for each i in [0, n), in any order, on any threads, and returns when all
 * are done. */
typedef void (*gk_parallel_for_fn)(void *pool, int64_t n, gk_task_fn task, void *arg);

typedef struct gk_context {
    size_t size; /* sizeof(gk_context) */
    gk_device device;
    int32_t index;       /* device index */
    void *stream;        /* CUDA stream; unused on the CPU */
    int32_t num_threads; /* CPU: upper bound of workers (>= 1); results do not depend on it */
    gk_parallel_for_fn parallel_for; /* CPU: NULL runs on the calling thread */
    void *pool;                      /* first argument of parallel_for */
    const char
        *cpu_isa; /* CPU: "base" | "avx2" | "avx512" | "avx512bf16" | "amx"; NULL = gk_cpu_isa() */
    uint8_t *error_word; /* CUDA: GK_NUM_DEVICE_ERRORS bytes of pinned memory; may be NULL */
} gk_context;

/* The CPU's best instruction set on the calling thread. */
#define GK_CONTEXT_INIT {.size = sizeof(gk_context), .device = GK_CPU, .num_threads = 1}

/* Bad contents of index tensors that a CUDA kernel met: it sets byte error_word[kind] and goes on
 * with clamped values. The sequence or token concerned has no meaningful result, all others have
 * theirs. */
typedef enum gk_device_error {
    /* flash_attn_varlen: decreasing, past the tokens, or longer than max_seqlen */
    GK_BAD_CU_SEQLENS = 0,
    GK_BAD_OFFS = 0,     /* grouped_gemm: decreasing, or past the rows or k that are grouped */
    GK_BAD_SEQ_LENS = 1, /* paged_attn: a length below 0, past the table or below its query tokens;
                            cu_seqlens_q */
    GK_BAD_BLOCK_TABLE = 2,  /* paged_attn: a page outside the cache */
    GK_BAD_SLOTS = 3,        /* kv_cache_write: a slot past the cache */
    GK_BAD_POSITIONS = 4,    /* rope: a position outside cos and sin */
    GK_BAD_TARGETS = 5,      /* cross_entropy: a target outside [0, V) that is not ignore_index */
    GK_BAD_MASK_BLOCKS = 6,  /* attn_mask: a count or an index of blocks out of range */
    GK_NUM_DEVICE_ERRORS = 8 /* some to come: one read for all */
} gk_device_error;

/* The error word of this process: pinned, zeroed, seen by every GPU; NULL without CUDA. Made at the
 * first call, which may stand inside a stream capture; never freed. A caller that wants one of its
 * own passes that instead. */
GK_API uint8_t *gk_cuda_error_word(void);
GK_API const char *gk_device_error_text(gk_device_error kind);

/* The instruction set that calls take where they name none; the comma-separated list of all that
 * the machine has, each with all of those before it; and why the default is not the last of the
 * list, "" where it is. */
GK_API const char *gk_cpu_isa(void);
GK_API const char *gk_cpu_isas(void);
GK_API const char *gk_cpu_isa_reason(void);

/* Every CUDA kernel instance of this library, comma-separated; "" without CUDA. Valid until this
 * thread's next call. */
GK_API const char *gk_cuda_kernels(void);

/* ---- what a call would do ------------------------------------------------------------------ */
/* A device index for contexts of gk_explain_* and of nothing else: a GPU of that architecture that
 * need not be there. arch is "sm_80", "sm_86", "sm_89" or "sm_90". A library without CUDA explains
 * gk_gemm there, and refuses the other ops. */
GK_API gk_status gk_cuda_arch(const char *arch, int32_t *index);

typedef struct gk_explanation {
    size_t size; /* sizeof(gk_explanation), set by the caller */
    union {
        char instance[64]; /* the kernel instance, e.g. "gemm_packed_f32_avx512" */
        char row[64];      /* its old name, deprecated: gone in the next minor version */
    };
    char isa[16]; /* its instruction set or architecture */
    /* gemm: MB NB KB (block), on the CPU MR*NR; attention: BQ BKV and the span of a context chunk;
     * 0 = unused */
    int64_t tile[4];
    int64_t tasks;  /* independent units of work */
    int64_t chunks; /* parts that keys are split into, 1 = not split */
    double bytes;   /* bytes the op must move at least: inputs read once, outputs written once */
    double flops;   /* multiply-adds count two; keys outside the span do not count */
    int64_t workspace_bytes;
    double
        /* CUDA: tasks over those that run at once, 0 where only a GPU that is there could tell; 0
         * on the CPU */
        waves;
    double
        /* CUDA: the larger of bytes over bandwidth and flops over the peak of the units used; 0 on
         * the CPU */
        bound_us;
    int32_t preferred; /* 1: an instance that gk_gemm_prefer asked for; a size that ends before it
                          is served, too */
} gk_explanation;

#define GK_EXPLANATION_INIT {.size = sizeof(gk_explanation)}

/* ---- gemm ---------------------------------------------------------------------------------- */
typedef enum gk_activation {
    GK_ACT_NONE = 0,
    GK_ACT_RELU = 1,
    GK_ACT_GELU = 2,      /* x/2 (1 + erf(x/sqrt 2)) */
    GK_ACT_GELU_TANH = 3, /* x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) */
    GK_ACT_SILU = 4       /* x / (1 + exp(-x)) */
} gk_activation;

typedef enum gk_precision {
    GK_IEEE = 0,
    GK_TF32 = 1
} gk_precision;

/* out = activation(alpha * (a @ b) + beta * c + bias); float32 inside (float64 for GK_F64), rounded
 * once. */
typedef struct gk_gemm_args {
    size_t size;
    gk_tensor a; /* [batch..., M, K], any strides */
    gk_tensor b; /* [batch..., K, N] or [K, N], a's dtype, any strides; batch dims broadcast */
    const gk_tensor *bias; /* [N], a's or out's dtype; NULL = none */
    const gk_tensor
        *c;        /* broadcasts to out, a's or out's dtype; not read when beta == 0; NULL = none */
    gk_tensor out; /* [batch..., M, N], a's dtype or GK_F32; must not overlap an input */
    const gk_tensor *preact; /* like out: the value before the activation; NULL = not wanted */
    double alpha, beta;      /* numbers that float32 holds, unless a is GK_F64 */
    gk_activation activation;
    gk_precision fp32_precision; /* CUDA only; the CPU computes ieee float32 */
    void *workspace;
    size_t workspace_bytes;
} gk_gemm_args;

#define GK_GEMM_ARGS_INIT {.size = sizeof(gk_gemm_args), .alpha = 1.0}

GK_API size_t gk_gemm_workspace_bytes(const gk_context *, const gk_gemm_args *);
GK_API gk_status gk_gemm(const gk_context *, const gk_gemm_args *);
GK_API gk_status gk_explain_gemm(const gk_context *, const gk_gemm_args *, gk_explanation *);

/* On CUDA several kernel instances take a call. The one of least expected time serves it by
 * default; another one can be preferred for all calls of one tuning key (gk_gemm_class says it):
 * same model of GPU, dtypes, sizes, layouts, alignment, activation, with c and preact or without;
 * bias is in no key. Such a call runs the preferred instance where that takes it, else the default.
 * Instances may round differently. Any thread may prefer at any time: gk_gemm_workspace_bytes
 * covers the preferred instance and the default one, so that a preference which changes before the
 * call does no harm, and captured graphs keep their instance. With a CPU's context and in a build
 * without CUDA: GK_ERR_UNSUPPORTED. Texts are valid until this thread's next call of the
 * function. */

/* Every instance that takes this call, comma-separated, the default one first. */
GK_API gk_status gk_gemm_instances(const gk_context *, const gk_gemm_args *,
                                   const char **instances);
/* Its old name, deprecated: gone in the next minor version. */
GK_API gk_status gk_gemm_rows(const gk_context *, const gk_gemm_args *, const char **instances);
/* The call's tuning key as one line of text. */
GK_API gk_status gk_gemm_class(const gk_context *, const gk_gemm_args *, const char **gemm_class);
/* Prefers an instance, which must take the call, for the call's tuning key; NULL forgets the
 * key's. */
GK_API gk_status gk_gemm_prefer(const gk_context *, const gk_gemm_args *, const char *instance);
/* The same from what was kept in a file: needs no GPU, device is what gk_cuda_device_name said,
 * gemm_class what gk_gemm_class did. The instance must exist for that dtype; whether it takes a
 * call is asked at each call. */
GK_API gk_status gk_gemm_prefer_class(const char *device, const char *gemm_class,
                                      const char *instance);
GK_API void gk_gemm_prefer_none(void); /* forgets all */
GK_API gk_status gk_cuda_device_name(int32_t index, const char **name);

/* grad_in = grad_out * activation'(saved); saved is the preact, for relu the output. Any
 * strides. */
typedef struct gk_gemm_act_bwd_args {
    size_t size;
    gk_tensor grad_out; /* [...] */
    gk_tensor saved;    /* [...] same shape, may have another dtype */
    gk_tensor grad_in;  /* [...] same shape, grad_out's dtype */
    gk_activation activation;
} gk_gemm_act_bwd_args;

#define GK_GEMM_ACT_BWD_ARGS_INIT {.size = sizeof(gk_gemm_act_bwd_args)}

GK_API gk_status gk_gemm_act_bwd(const gk_context *, const gk_gemm_act_bwd_args *);

/* ---- flash_attn ---------------------------------------------------------------------------- */
/* What every attention op adds to softmax(scale q k^T) v. Row i sees key j iff j lies in one
 * interval. */
typedef struct gk_attn_rules {
    /* finite, within +-1e38 unless q is GK_F64; usually 1/sqrt(head_dim) */
    double scale;
    double softcap;    /* s -> softcap * tanh(s / softcap); 0 = off */
    int32_t is_causal; /* j <= i + diagonal */
    int64_t diagonal;  /* dense only; varlen and paged use each sequence's bottom-right diagonal */
    int64_t window_left,
        window_right; /* i + diagonal - left <= j <= i + diagonal + right; -1 = unbounded */
    const gk_tensor *
        alibi_slopes; /* [Hq] or [B, Hq] float32 (float64 with GK_F64): s - slope |i + diagonal - j| */
    const gk_tensor *
        sinks; /* [Hq] float32 or q's dtype (float64 with GK_F64): an extra logit without a value */
    const gk_tensor
        *kv_start; /* [B] int32, dense and paged: first key that is seen; clamped to [0, Sk] */
    const gk_tensor *kv_end; /* [B] int32, dense only: end of the keys that are seen */
    const gk_tensor *
        q_start; /* [B] int32, dense only: the diagonal of each sequence; diagonal must then be 0 */
} gk_attn_rules;

/* Every key is seen, nothing changes a score; scale is to be set. */
#define GK_ATTN_RULES_INIT {.scale = NAN, .window_left = -1, .window_right = -1}

/* Dense when cu_seqlens_q is NULL, packed ("varlen") otherwise.
 *   dense   q [B, Hq, Sq, D]  k [B, Hkv, Sk, D]  v [B, Hkv, Sk, Dv]  out [B, Hq, Sq, Dv]  lse [B, Hq, Sq]
 *   packed  q [Tq, Hq, D]     k [Tk, Hkv, D]     v [Tk, Hkv, Dv]     out [Tq, Hq, Dv]     lse [Tq, Hq]
 * Last dimensions of q, k, v, out and their gradients have stride 1; lse is contiguous, float32
 * (float64 with GK_F64). A row that sees no key gives out 0 and lse -inf (the sink where there is
 * one). Dropout comes after lse: attn_dropout.h. */
typedef struct gk_flash_attn_args {
    size_t size;
    gk_tensor q, k, v;
    const gk_tensor *cu_seqlens_q; /* [B+1] int32, starts at 0, does not decrease */
    const gk_tensor *cu_seqlens_k;
    int64_t max_seqlen_q, max_seqlen_k; /* packed only: upper bounds of a sequence's lengths */
    gk_attn_rules rules;
    /* written forward, in q's dtype or (CPU) float32, unrounded; read backward, in q's dtype */
    gk_tensor out;
    gk_tensor lse; /* written forward, read backward; forward, data NULL = not wanted */
    void *workspace;
    size_t workspace_bytes;
    double dropout_p;              /* 0 <= p <= 1; 1: out is 0 */
    const gk_tensor *dropout_seed; /* [2] int64: seed and offset, read on the device; NULL with
                                      dropout_p 0 alone */
} gk_flash_attn_args;

#define GK_FLASH_ATTN_ARGS_INIT {.size = sizeof(gk_flash_attn_args), .rules = GK_ATTN_RULES_INIT}

GK_API size_t gk_flash_attn_fwd_workspace_bytes(const gk_context *, const gk_flash_attn_args *);
GK_API gk_status gk_flash_attn_fwd(const gk_context *, const gk_flash_attn_args *);
GK_API gk_status gk_explain_flash_attn_fwd(const gk_context *, const gk_flash_attn_args *,
                                           gk_explanation *);

typedef struct gk_flash_attn_bwd_args {
    size_t size;
    /* inputs, out and lse of the forward call; its workspace fields are not read */
    gk_flash_attn_args fwd;
    gk_tensor grad_out;        /* like out, any strides of the leading dimensions */
    const gk_tensor *grad_lse; /* like lse, any strides; NULL = 0 */
    gk_tensor dq, dk, dv;      /* like q, k, v; or (CPU) all three float32, unrounded */
    const gk_tensor *dsinks;   /* [Hq] sinks' dtype; NULL = not wanted */
    int32_t deterministic;     /* CUDA; the CPU always is */
    void *workspace;
    size_t workspace_bytes;
    /* 1: k and v are some of the keys of out and lse; CUDA: sinks must be NULL (see
     * gk_flash_attn_accumulate_args) */
    int32_t is_part;
} gk_flash_attn_bwd_args;

#define GK_FLASH_ATTN_BWD_ARGS_INIT \
    {.size = sizeof(gk_flash_attn_bwd_args), .fwd = GK_FLASH_ATTN_ARGS_INIT}

GK_API size_t gk_flash_attn_bwd_workspace_bytes(const gk_context *, const gk_flash_attn_bwd_args *);
GK_API gk_status gk_flash_attn_bwd(const gk_context *, const gk_flash_attn_bwd_args *);
GK_API gk_status gk_explain_flash_attn_bwd(const gk_context *, const gk_flash_attn_bwd_args *,
                                           gk_explanation *);

/* ---- paged_attn ---------------------------------------------------------------------------- */
/* What a caller of gk_paged_attn asks for beside the rules. */
typedef enum gk_paged_flags {
    GK_PAGED_WINDOW_RIGHT = 1, /* rules.window_right is read */
    GK_PAGED_ALLOW_SHORT = 2, /* a length may be less than its query tokens, which else is an error.
                               * A query at a negative position then sees what the rules let it see,
                               * as one of gk_flash_attn_fwd; CUDA: with is_causal (or a
                               * window_right of 0), and bad lengths and pages are not reported */
    /* the bits of a sequence do not depend on the other sequences of the call (docs/numerics.md) */
    GK_PAGED_BATCH_INVARIANT = 4
} gk_paged_flags;

/* Attention of new tokens over a paged cache. Query t of the n_b of sequence b stands at position
 * seq_lens[b] - n_b + t; a negative position sees no key. Pages are read in place. */
typedef struct gk_paged_attn_args {
    size_t size;
    gk_tensor q;       /* [T, Hq, D], last stride 1 */
    gk_tensor k_cache; /* [num_blocks, block_size, Hkv, D], q's dtype or GK_E4M3, GK_E5M2, GK_I8;
                          last stride 1 */
    gk_tensor v_cache; /* [num_blocks, block_size, Hkv, Dv], k_cache's dtype, last stride 1 */
    gk_tensor block_table;         /* [B, max_blocks] int32 */
    gk_tensor seq_lens;            /* [B] int32, the new tokens included */
    const gk_tensor *cu_seqlens_q; /* [B+1] int32; NULL = T/B tokens each */
    int64_t
        max_seqlen_q; /* upper bound of a sequence's query tokens; read with cu_seqlens_q only */
    gk_attn_rules
        rules; /* diagonal, kv_end, q_start are not read, window_right by flags; is_causal is */
    const gk_tensor *
        /* [] or [Hkv] float32 (float64 with GK_F64), of 8 bits [num_blocks, Hkv] too: stored *
         * k_scale; NULL = 1 */
        k_scale;
    const gk_tensor *v_scale;
    gk_tensor out; /* [T, Hq, Dv] contiguous, q's dtype */
    gk_tensor lse; /* [T, Hq] contiguous, float32 (float64 with GK_F64); data NULL = not wanted */
    void *workspace;
    size_t workspace_bytes;
    uint32_t flags; /* of gk_paged_flags; 0 as before there were any */
} gk_paged_attn_args;

#define GK_PAGED_ATTN_ARGS_INIT {.size = sizeof(gk_paged_attn_args), .rules = GK_ATTN_RULES_INIT}

GK_API size_t gk_paged_attn_workspace_bytes(const gk_context *, const gk_paged_attn_args *);
GK_API gk_status gk_paged_attn(const gk_context *, const gk_paged_attn_args *);
GK_API gk_status gk_explain_paged_attn(const gk_context *, const gk_paged_attn_args *,
                                       gk_explanation *);

/* Writes new keys and values into the caches: row s % block_size of page s / block_size, s =
 * slots[t]. A k or v that shares memory with a row that is written must be copied first: which
 * token is read or written when is not defined. */
typedef struct gk_kv_cache_write_args {
    size_t size;
    gk_tensor k, v;             /* [T, Hkv, D], [T, Hkv, Dv], any strides */
    gk_tensor k_cache, v_cache; /* [num_blocks, block_size, Hkv, D], [..., Dv]; k's dtype or 8-bit
                                   codes; written */
    gk_tensor slots;            /* [T] int64 or int32; negative = skip */
    const gk_tensor *k_scale, *v_scale; /* as above: the stored value is k / k_scale; NULL = 1 */
} gk_kv_cache_write_args;

#define GK_KV_CACHE_WRITE_ARGS_INIT {.size = sizeof(gk_kv_cache_write_args)}

GK_API gk_status gk_kv_cache_write(const gk_context *, const gk_kv_cache_write_args *);

/* ---- attn_merge ---------------------------------------------------------------------------- */
/* lse = logaddexp(lse_a, lse_b); out = out_a exp(lse_a - lse) + out_b exp(lse_b - lse). */
typedef struct gk_attn_merge_args {
    size_t size;
    gk_tensor out_a, out_b; /* [..., Dv], one dtype, any strides */
    gk_tensor lse_a, lse_b; /* [...] float32 (float64 with GK_F64), any strides */
    gk_tensor out;          /* [..., Dv] contiguous */
    gk_tensor lse;          /* [...] contiguous */
} gk_attn_merge_args;

#define GK_ATTN_MERGE_ARGS_INIT {.size = sizeof(gk_attn_merge_args)}

GK_API gk_status gk_attn_merge(const gk_context *, const gk_attn_merge_args *);

/* ---- rows: operations along the last dimension ----------------------------------------------- */
/* Tensors [..., N] have a dense last dimension; their leading dimensions may have any strides,
 * those of results too. */
typedef enum gk_norm_kind {
    GK_RMS_NORM = 0,  /* mean = 0 */
    GK_LAYER_NORM = 1 /* mean = mean(h) */
} gk_norm_kind;

/* out = (h - mean) rstd (weight + weight_offset) + bias, rstd = 1 / sqrt(mean((h - mean)^2) + eps),
 * over the last dimension. h = x + residual, rounded to x's dtype. float32 inside (float64 for
 * GK_F64). */
typedef struct gk_norm_args {
    size_t size;
    gk_norm_kind kind;
    gk_tensor x;               /* [..., N], N >= 1 */
    const gk_tensor *residual; /* like x; NULL = none */
    const gk_tensor *weight;   /* [N] x's dtype or GK_F32; NULL = 1, without weight_offset */
    const gk_tensor *bias;     /* likewise; NULL = 0 */
    gk_tensor out;             /* like x */
    const gk_tensor *sum;      /* like x: h; given with residual, and only then */
    double eps, weight_offset;
    void *workspace;
    size_t workspace_bytes;
} gk_norm_args;
#define GK_NORM_ARGS_INIT {.size = sizeof(gk_norm_args), .eps = 1e-6}
GK_API size_t gk_norm_fwd_workspace_bytes(const gk_context *, const gk_norm_args *);
GK_API gk_status gk_norm_fwd(const gk_context *, const gk_norm_args *);

/* Statistics are computed anew from h, which costs no memory traffic. dweight and dbias are summed
 * in a fixed order. */
typedef struct gk_norm_bwd_args {
    size_t size;
    gk_norm_kind kind;
    gk_tensor grad_out;        /* [..., N] */
    const gk_tensor *grad_sum; /* like grad_out; NULL = 0 */
    gk_tensor h;               /* like grad_out: what was normalised, x or sum */
    const gk_tensor *weight;   /* [N]; NULL = 1 */
    gk_tensor dx;              /* like h: the gradient of x, and of residual */
    const gk_tensor *dweight;  /* [N] h's dtype or GK_F32; NULL = not wanted */
    const gk_tensor *dbias;    /* likewise */
    double eps, weight_offset;
    void *workspace;
    size_t workspace_bytes;
} gk_norm_bwd_args;
#define GK_NORM_BWD_ARGS_INIT {.size = sizeof(gk_norm_bwd_args), .eps = 1e-6}
GK_API size_t gk_norm_bwd_workspace_bytes(const gk_context *, const gk_norm_bwd_args *);
GK_API gk_status gk_norm_bwd(const gk_context *, const gk_norm_bwd_args *);

/* out = softmax(scale x) over the last dimension, or its logarithm. Columns from the row's length
 * on do not take part and give 0; a row of length 0 gives 0. */
typedef struct gk_softmax_args {
    size_t size;
    gk_tensor x;              /* [..., N] */
    const gk_tensor *lengths; /* [...] int32, clamped to [0, N]; NULL = N */
    gk_tensor out;            /* like x */
    double scale;
    int32_t log; /* 1: log_softmax */
    void *workspace;
    size_t workspace_bytes;
} gk_softmax_args;
#define GK_SOFTMAX_ARGS_INIT {.size = sizeof(gk_softmax_args), .scale = 1.0}
GK_API size_t gk_softmax_fwd_workspace_bytes(const gk_context *, const gk_softmax_args *);
GK_API gk_status gk_softmax_fwd(const gk_context *, const gk_softmax_args *);

typedef struct gk_softmax_bwd_args {
    size_t size;
    gk_tensor grad_out, out;  /* [..., N]; out of the forward call */
    const gk_tensor *lengths; /* as there */
    gk_tensor dx;             /* like out */
    double scale;
    int32_t log;
} gk_softmax_bwd_args;
#define GK_SOFTMAX_BWD_ARGS_INIT {.size = sizeof(gk_softmax_bwd_args), .scale = 1.0}
GK_API gk_status gk_softmax_bwd(const gk_context *, const gk_softmax_bwd_args *);

/* out = activation(gate) up, the gated linear unit: of GK_ACT_SILU "SwiGLU", of GK_ACT_GELU and
 * GK_ACT_GELU_TANH "GEGLU". */
typedef struct gk_glu_args {
    size_t size;
    gk_tensor gate;      /* [..., N]; [..., 2 N] where up is NULL: gate first, then up */
    const gk_tensor *up; /* [..., N] gate's dtype */
    gk_tensor out;       /* [..., N] */
    gk_activation activation;
} gk_glu_args;
#define GK_GLU_ARGS_INIT {.size = sizeof(gk_glu_args), .activation = GK_ACT_SILU}
GK_API gk_status gk_glu_fwd(const gk_context *, const gk_glu_args *);

typedef struct gk_glu_bwd_args {
    size_t size;
    gk_tensor grad_out, gate; /* [..., N]; gate and up as above */
    const gk_tensor *up;
    gk_tensor dgate;      /* like gate */
    const gk_tensor *dup; /* like up; NULL where that is */
    gk_activation activation;
} gk_glu_bwd_args;
#define GK_GLU_BWD_ARGS_INIT {.size = sizeof(gk_glu_bwd_args), .activation = GK_ACT_SILU}
GK_API gk_status gk_glu_bwd(const gk_context *, const gk_glu_bwd_args *);

/* Rotary embedding: of the token at position p, columns (x1, x2) of q and k become (x1 cos - x2
 * sin, x2 cos + x1 sin), cos and sin of row p. x1, x2 are column i and i + R / 2, or 2 i and 2 i +
 * 1 where interleaved; columns from R on are copied. The results may be q and k themselves. A
 * position past cos: GK_ERR_INDEX on the CPU; on CUDA the last one, and GK_BAD_POSITIONS. */
typedef struct gk_rope_args {
    size_t size;
    gk_tensor q;                /* [B, Hq, S, D], or packed [T, Hq, D], which is B = 1 and S = T */
    const gk_tensor *k;         /* [B, Hkv, S, D] or [T, Hkv, D], q's dtype; NULL = none */
    gk_tensor cos, sin;         /* [P, R / 2] GK_F32, R <= D; with GK_F64 that too */
    const gk_tensor *positions; /* [S] or [B, S] int32 or int64; NULL = 0 .. S - 1 */
    gk_tensor out_q;            /* like q */
    const gk_tensor *out_k;     /* like k */
    int32_t interleaved;
    int32_t inverse; /* by the angles' negatives: what the gradient is */
} gk_rope_args;
#define GK_ROPE_ARGS_INIT {.size = sizeof(gk_rope_args)}
GK_API gk_status gk_rope(const gk_context *, const gk_rope_args *);

/* Cross entropy of each row: z = softcap tanh(logit_scale logits / softcap), softcap 0: z =
 * logit_scale logits; lse = log sum exp z;
 *   loss = (1 - e) w[t] (lse - z[t]) + e / V sum over c of w[c] (lse - z[c]),   e the label smoothing, w the weights
 * A row whose target is ignore_index has loss 0 and is not read. Another target outside [0, V):
 * GK_ERR_INDEX on the CPU; on CUDA loss NaN, and GK_BAD_TARGETS. */
typedef struct gk_cross_entropy_args {
    size_t size;
    gk_tensor logits;        /* [..., V], V >= 1 */
    gk_tensor target;        /* [...] int64 */
    const gk_tensor *weight; /* [V] GK_F32 (GK_F64 with GK_F64); NULL = 1 */
    gk_tensor loss, lse;     /* [...] contiguous, GK_F32 (GK_F64 with GK_F64) */
    double label_smoothing, softcap, logit_scale;
    int64_t ignore_index;
} gk_cross_entropy_args;
#define GK_CROSS_ENTROPY_ARGS_INIT \
    {.size = sizeof(gk_cross_entropy_args), .logit_scale = 1.0, .ignore_index = -100}
GK_API gk_status gk_cross_entropy_fwd(const gk_context *, const gk_cross_entropy_args *);

typedef struct gk_cross_entropy_bwd_args {
    size_t size;
    gk_cross_entropy_args fwd; /* of the forward call; loss is not read */
    gk_tensor grad_loss;       /* like loss, any strides, 0 too */
    gk_tensor dlogits; /* like logits, or 16 bits beside GK_F32; may be logits itself; 0 in ignored
                          rows */
} gk_cross_entropy_bwd_args;
#define GK_CROSS_ENTROPY_BWD_ARGS_INIT \
    {.size = sizeof(gk_cross_entropy_bwd_args), .fwd = GK_CROSS_ENTROPY_ARGS_INIT}
GK_API gk_status gk_cross_entropy_bwd(const gk_context *, const gk_cross_entropy_bwd_args *);

/* ---- attention of 8-bit floats ------------------------------------------------------------------- */
/* How P V is summed. Tensor cores of 8-bit floats keep 14 bits of a running sum and cut off the
 * rest, so that what the values of v have in common is lost over thousands of keys. Kernels that
 * multiply 16 or 32 bits sum in float32 whatever is asked for. */
typedef enum gk_attn_accumulate {
    GK_ATTN_AUTO = 0,   /* fast with a v_mean, precise without */
    GK_ATTN_FAST = 1,   /* one sum over all keys */
    GK_ATTN_PRECISE = 2 /* the sums of at most 128 keys are added in float32 */
} gk_attn_accumulate;

/* out = softmax(scale (q q_scale) (k k_scale)^T) (v v_scale + v_mean), forward alone. A scale is
 * one number, [H], [B, H], or [B, H, ceil(S / 128)]: one for each 128 tokens of a sequence, of a
 * packed call counted from the sequence's first token, S the longest's bound. NULL is 1. */
typedef struct gk_flash_attn_fp8_args {
    size_t size;
    gk_flash_attn_args fwd; /* q, k, v GK_E4M3; out bfloat16, float16 or float32; size at most
                             * sizeof fwd; workspace not read; rules.sinks float32 or out's dtype */
    const gk_tensor *q_scale, *k_scale, *v_scale; /* float32, any strides; H is Hq, Hkv, Hkv */
    const gk_tensor *v_mean; /* [Hkv, Dv] or [B, Hkv, Dv] float32, any strides; NULL = 0 */
    gk_attn_accumulate accumulate;
    void *workspace;
    size_t workspace_bytes;
} gk_flash_attn_fp8_args;

#define GK_FLASH_ATTN_FP8_ARGS_INIT \
    {.size = sizeof(gk_flash_attn_fp8_args), .fwd = GK_FLASH_ATTN_ARGS_INIT}

/* Whether the sums of 128 keys are added in float32: what `accumulate` comes to. */
static inline int gk_attn_is_precise(const gk_flash_attn_fp8_args *a) {
    return a->accumulate == GK_ATTN_PRECISE || (a->accumulate == GK_ATTN_AUTO && !a->v_mean);
}

GK_API size_t gk_flash_attn_fp8_workspace_bytes(const gk_context *, const gk_flash_attn_fp8_args *);
GK_API gk_status gk_flash_attn_fp8(const gk_context *, const gk_flash_attn_fp8_args *);
GK_API gk_status gk_explain_flash_attn_fp8(const gk_context *, const gk_flash_attn_fp8_args *,
                                           gk_explanation *);

/* ---- attention over other keys, for work that is spread over ranks ------------------------------- */
/* The arguments of gk_flash_attn_fwd, whose out and lse hold the attention over other keys and
 * become that over both, as gk_attn_merge gives it: out = out_held e^(lse_held - lse) + out_new
 * e^(lse_new - lse). out is float32 (GK_F64: float64), with any leading strides; lse is a must.
 * Dense calls without dropout. A caller passes &x.fwd, and fwd.size says that the rest stands
 * behind it. */
typedef struct gk_flash_attn_accumulate_args {
    gk_flash_attn_args fwd; /* size: of the whole struct */
    int32_t accumulates;    /* 1; 0: as gk_flash_attn_args alone */
} gk_flash_attn_accumulate_args;

#define GK_FLASH_ATTN_ACCUMULATE_ARGS_INIT                                                \
    {.fwd = {.size = sizeof(gk_flash_attn_accumulate_args), .rules = GK_ATTN_RULES_INIT}, \
     .accumulates = 1}

/* Whether the call joins what out and lse hold. */
static inline int32_t gk_accumulates(const gk_flash_attn_args *a) {
    return a->size >= sizeof(gk_flash_attn_accumulate_args) &&
           ((const gk_flash_attn_accumulate_args *)a)->accumulates;
}

/* gk_flash_attn_bwd_args.is_part on the CPU: dsinks, where sinks are given, is what these keys add
 * to the gradient of sinks, with which the rounding of out does not count. Of delta = dO . O - dlse
 * and p = exp(sink - lse) that gradient is
 * -sum p (delta (1 - p) - dlse), over all rows, + the shares of all keys, -sum p sum_j P_j (dP_j -
 * delta).
 * On CUDA kernels take delta as it is, and sinks are refused: there the gradient is -sum p
 * delta. */

/* ---- masks of attention -------------------------------------------------------------------------- */
/* What a mask is made of. A query sees a key where the mask says so. */
typedef enum gk_mask_source {
    GK_MASK_OF_BOOL = 0, /* mask [B, H, Sq, Sk] uint8: 0 hides the key */
    GK_MASK_OF_BITS = 1, /* mask [B, H, Sq, ceil(Sk / 8)] uint8: bit j % 8 of byte j / 8 is key j */
    GK_MASK_OF_RANGES =
        2, /* rows [B, H, Sq, 2 or 4] int32 x, y (, z, w): keys [x, y) and [z, w), cut to [0, Sk) */
    GK_MASK_OF_COLUMNS =
        3, /* rows [B, H, Sk, 1, 2 or 4] int32: from which rows key j is hidden (see below) */
    GK_MASK_OF_BLOCKS = 4 /* lists of blocks of 128 x 128 */
} gk_mask_source;

/* How a mask is stored: csrc/core/attn_mask.h has the layout. */
typedef enum gk_mask_store {
    GK_MASK_DENSE = 1, /* words of every block */
    GK_MASK_RANGES =
        2, /* words of a few blocks of each tile; the others are made from ranges of keys */
    GK_MASK_COLUMNS = 3 /* likewise, from ranges of rows */
} gk_mask_store;

/* Builds a mask. B and H are those of the mask, 1 or the batch and the query heads of the attention
 * that reads it. Any strides.
 *
 * Columns follow FlashMask (Wang et al. 2024, arXiv:2410.01359), startend_row_indices of n numbers
 * c0 .. for each key:
 *   is_causal  n = 1   key j is seen by rows j <= i < c0           n = 2   rows i >= j that are not in [c0, c1)
 *   else       n = 2   rows c1 <= i < c0                           n = 4   rows that are neither in [c0, c1) nor in [c2, c3)
 *
 * Blocks follow FlexAttention: num_blocks [B, H, nq] int32, blocks [B, H, nq, n] int32 with nq =
 * ceil(Sq / 128): of each tile of queries the blocks of keys that are seen in part, in any order;
 * num_full and full: those that are seen whole. `mask`, of bytes or bits, says what is seen of the
 * partial ones; without it they are seen whole. Entries past a count are not read. A count or an
 * index out of range is GK_ERR_INDEX on the CPU; on CUDA it is skipped and sets GK_BAD_MASK_BLOCKS
 * in the error word. */
typedef struct gk_attn_mask_args {
    size_t size;
    gk_mask_source source;
    const gk_tensor *mask; /* of bool and bits; of blocks optional */
    const gk_tensor *rows; /* of ranges and columns */
    const gk_tensor *num_blocks, *blocks, *num_full, *full;
    int32_t is_bits;    /* blocks: mask holds bits */
    int32_t is_causal;  /* columns */
    int32_t transposed; /* 1: the tables by keys, which the backward of CUDA reads, are made too */
    int64_t seq_q, seq_k;
    gk_tensor out; /* [B, H, gk_attn_mask_ints] int32, contiguous */
} gk_attn_mask_args;
#define GK_ATTN_MASK_ARGS_INIT {.size = sizeof(gk_attn_mask_args)}

GK_API gk_status gk_attn_mask(const gk_context *, const gk_attn_mask_args *);
GK_API gk_status gk_explain_attn_mask(const gk_context *, const gk_attn_mask_args *,
                                      gk_explanation *);

/* int32 elements of one head of a stored mask. */
GK_API int64_t gk_attn_mask_ints(gk_mask_store store, int64_t seq_q, int64_t seq_k,
                                 int32_t transposed);

/* ---- attention with a mask or a bias --------------------------------------------------------- */
/* What hides scores and what is added to them, beside gk_attn_rules. A bias is added to scale q k^T
 * behind softcap and ALiBi. Where it is -inf or the lowest finite number of its dtype, the key is
 * hidden from the query. A pair that is hidden, by these or by the rules, takes no part: k and v of
 * it may hold NaN or inf. */
typedef struct gk_attn_scores {
    const gk_tensor *mask; /* as gk_attn_mask made it, [B or 1, Hq or 1, n]; NULL = none */
    gk_mask_store store;
    int64_t mask_seq_q, mask_seq_k; /* of the mask: Sq and Sk */
    const gk_tensor *bias; /* [B or 1, Hq or 1, Sq or 1, Sk or 1] q's dtype or float32, any strides;
                              NULL = none */
    const gk_tensor *distance_bias; /* [Hq or 1, Sq + Sk - 1] float32 (float64 with GK_F64): entry j
                                       - i + Sq - 1; not with q_start */
} gk_attn_scores;

/* The arguments of gk_flash_attn_fwd with a mask or a bias: a caller passes &x.fwd, and fwd.size
 * says that the rest stands behind it. Dense calls whose results do not accumulate. */
typedef struct gk_flash_attn_masked_args {
    gk_flash_attn_args fwd; /* size: of the whole struct */
    int32_t accumulates;    /* 0 */
    gk_attn_scores scores;
} gk_flash_attn_masked_args;
#define GK_FLASH_ATTN_MASKED_ARGS_INIT                                                   \
    {                                                                                    \
        .fwd = {.size = sizeof(gk_flash_attn_masked_args), .rules = GK_ATTN_RULES_INIT } \
    }

/* Likewise of gk_flash_attn_bwd: &x.bwd, and bwd.size. Gradients are summed in float32 (GK_F64:
 * float64) over what broadcasts. */
typedef struct gk_flash_attn_masked_bwd_args {
    gk_flash_attn_bwd_args bwd; /* size: of the whole struct; bwd.fwd.size: sizeof bwd.fwd */
    gk_attn_scores scores;
    const gk_tensor *dbias;          /* contiguous, bias's shape and dtype; NULL = not wanted */
    const gk_tensor *ddistance_bias; /* likewise of distance_bias */
} gk_flash_attn_masked_bwd_args;
#define GK_FLASH_ATTN_MASKED_BWD_ARGS_INIT                                                      \
    {                                                                                           \
        .bwd = {.size = sizeof(gk_flash_attn_masked_bwd_args), .fwd = GK_FLASH_ATTN_ARGS_INIT } \
    }

/* NULL where the call has none. */
static inline const gk_attn_scores *gk_scores_of(const gk_flash_attn_args *a) {
    if (a->size < sizeof(gk_flash_attn_masked_args)) return NULL;
    const gk_attn_scores *x = &((const gk_flash_attn_masked_args *)a)->scores;
    return x->mask || x->bias || x->distance_bias ? x : NULL;
}
static inline const gk_attn_scores *gk_scores_of_bwd(const gk_flash_attn_bwd_args *a) {
    if (a->size < sizeof(gk_flash_attn_masked_bwd_args)) return NULL;
    const gk_attn_scores *x = &((const gk_flash_attn_masked_bwd_args *)a)->scores;
    return x->mask || x->bias || x->distance_bias ? x : NULL;
}
static inline const gk_tensor *gk_dbias_of(const gk_flash_attn_bwd_args *a) {
    return gk_scores_of_bwd(a) ? ((const gk_flash_attn_masked_bwd_args *)a)->dbias : NULL;
}
static inline const gk_tensor *gk_ddistance_of(const gk_flash_attn_bwd_args *a) {
    return gk_scores_of_bwd(a) ? ((const gk_flash_attn_masked_bwd_args *)a)->ddistance_bias : NULL;
}

/* ---- rotary embedding, norm and the write into a cache in one call ------------------------------- */
/* What gk_norm_fwd (RMS, of each head), gk_rope and gk_kv_cache_write do of new tokens, in one
 * pass:
 *   q = rotate(norm(q)) to out_q,   rotate(norm(k)) / k_scale and v / v_scale to row slots[t] of the caches
 * float32 inside (float64 for GK_F64), rounded once: to q's dtype, and to the caches'. A token with
 * a negative slot is not written, its query is rotated all the same. A slot past the cache and a
 * position past cos: GK_ERR_INDEX on the CPU before anything is written; on CUDA the token is
 * skipped, or has the last position, and GK_BAD_SLOTS, GK_BAD_POSITIONS. A q, k or v that shares
 * memory with a row that is written must be copied first. */
typedef struct gk_rope_kv_write_args {
    size_t size;
    gk_tensor q; /* [T, Hq, D] */
    gk_tensor k,
        v; /* [T, Hkv, D], [T, Hkv, Dv], q's dtype; the last dimension of all three dense */
    gk_tensor cos, sin;  /* [P, R / 2] GK_F32, R <= D; with GK_F64 that too; last dimension dense */
    gk_tensor positions; /* [T] int32 or int64: rows of cos and sin */
    gk_tensor k_cache, v_cache; /* [num_blocks, block_size, Hkv, D], [..., Dv]; q's dtype or 8-bit
                                   codes; written */
    gk_tensor slots;            /* [T] int64 or int32; negative = skip */
    const gk_tensor *q_weight, *k_weight; /* [D] q's dtype or GK_F32; NULL = no norm */
    const gk_tensor *k_scale, *v_scale;   /* as of gk_kv_cache_write_args */
    gk_tensor out_q;                      /* like q */
    double eps;                           /* of the norms */
    int32_t interleaved;                  /* as of gk_rope_args */
} gk_rope_kv_write_args;
#define GK_ROPE_KV_WRITE_ARGS_INIT {.size = sizeof(gk_rope_kv_write_args), .eps = 1e-6}
GK_API gk_status gk_rope_kv_write(const gk_context *, const gk_rope_kv_write_args *);
GK_API gk_status gk_explain_rope_kv_write(const gk_context *, const gk_rope_kv_write_args *,
                                          gk_explanation *);

/* ---- GPUs that work together --------------------------------------------------------------------- */
/* From now on kernels whose blocks stay on their SM are planned for so many SMs, on every GPU and
 * by every thread of this process, so that kernels of other streams find SMs free: the persistent
 * ones of gemm, the quantised products, flash_attn forward and paged_attn. The backward of
 * attention and small kernels launch as many blocks as they have work. 0: all. Bits may follow the
 * limit where it changes how keys or k are split. Workspace that was sized before a change may be
 * too small, which a call refuses. */
GK_API gk_status gk_limit_sms(int32_t sms);
GK_API int32_t gk_sm_limit(void);

/* Most ranks that one call sums over. */
#define GK_MOST_RANKS 16

/* out = the sum over ranks of their x, the same bits on every rank: in float32 in the ranks' order,
 * rounded once. One kernel: each rank writes its x into the others' mailboxes, says so by flags,
 * and adds what came into its own. Every rank makes the same calls in the same order; the kernel
 * waits for the others' on the GPU, up to timeout_s, and then ends the process's use of the GPU by
 * a trap: an error, never a wrong sum. Meant for what is short: all of x goes to every rank.
 *
 * mailboxes: the address of each rank's in this GPU's address space, of gk_mailbox_bytes, zeroed
 * before the first call, multiples of 16. One set of mailboxes serves calls that follow each other
 * on one stream, or one captured graph. */
typedef struct gk_sum_over_ranks_args {
    size_t size;
    gk_tensor x;            /* float32, contiguous */
    gk_tensor out;          /* x's shape, contiguous, GK_F32, GK_BF16 or GK_F16 */
    void *const *mailboxes; /* [num_ranks] */
    size_t mailbox_bytes;   /* of each: the same on every rank */
    int32_t rank, num_ranks;
    double timeout_s;
} gk_sum_over_ranks_args;

/* Of sums of up to so many elements. */
GK_API size_t gk_mailbox_bytes(int64_t elements, int32_t num_ranks);
GK_API gk_status gk_sum_over_ranks(const gk_context *, const gk_sum_over_ranks_args *);
/* The number of the capture into a CUDA graph that a stream is in, unique in this process; 0: none.
 * What finds a set of mailboxes by it gives each graph its own. */
GK_API uint64_t gk_capture_id(void *stream);

#ifdef __cplusplus
}
#endif
#endif
