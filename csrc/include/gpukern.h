/* SPDX-License-Identifier: BSD-3-Clause */
/* gpukern.h: the C API of gpukern: gemm, attention, paged caches, norms and other row operations.
 * gpukern_quant.h has the quantised and sparse products, gpukern_train.h the ops that only training
 * needs. Both include this file and follow its conventions. It needs neither torch nor C++.
 *
 * Structs
 *   Every struct starts with `size`, its sizeof at the caller. Structs grow only at the end.
 *   Start from the initialiser: gk_gemm_args args = GK_GEMM_ARGS_INIT; (in C++ since C++20). Zeros
 *   are not enough: they mean alpha 0, or a window of one key. A field without a default, such as
 *   `scale`, is refused by name until it is set.
 *
 * Tensors
 *   Strides count elements, in int64. They may be zero or negative unless a field says otherwise.
 *   A tensor has at most 2^48 elements, and no stride reaches further.
 *   Names of sizes in bytes end in _bytes. lse is a natural logarithm. T is a number of tokens.
 *
 * Calls
 *   An entry point returns a gk_status. gk_last_error() has the text of this thread's last failure.
 *   No function exits, prints, allocates device memory or synchronises a device. One exception: a
 *   kernel that lacks a dtype which its check admits, a bug, says so on stderr and aborts.
 *   The caller provides gk_<op>_workspace_bytes of workspace, aligned to 64 bytes, zeroed or not.
 *   A process stores constants of its devices and the instances preferred by gk_gemm_prefer. A
 *   thread stores the last instances chosen for gemm, which change no result.
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
    /* an element of a table, of lengths or of slots is out of range; nothing was written */
    GK_ERR_INDEX = 2,
    /* valid, but no kernel on this device serves it; the text says what is supported */
    GK_ERR_UNSUPPORTED = 3,
    GK_ERR_WORKSPACE = 4, /* workspace missing, too small or misaligned */
    /* the device runtime reported a failure, or the machine lacks the requested instruction set */
    GK_ERR_DEVICE = 5
} gk_status;

GK_API const char *gk_version(void);               /* "major.minor.patch" */
GK_API const char *gk_status_name(gk_status code); /* "GK_OK", ... */
GK_API const char *gk_last_error(void); /* the text of this thread's last failure, "" if none */

/* ---- tensors ------------------------------------------------------------------------------ */
typedef enum gk_dtype {
    GK_F32 = 0,
    GK_BF16 = 1,
    GK_F16 = 2,
    GK_F64 = 3,
    GK_I32 = 4,
    GK_I64 = 5,
    /* 8 bits: codes of quantised tensors; e8m0 holds scales that are powers of two */
    GK_E4M3 = 6,
    GK_E5M2 = 7,
    GK_I8 = 8,
    GK_U8 = 9,
    GK_E8M0 = 10
} gk_dtype;

#define GK_MAX_DIMS 8

typedef struct gk_tensor {
    union { /* the first element; may be NULL if a dimension is 0 */
        void *data;
        const void *const_data; /* lets a caller set an input from a pointer to const, uncast */
    };
    gk_dtype dtype;
    int32_t ndim;
    int64_t shape[GK_MAX_DIMS];
    int64_t stride[GK_MAX_DIMS]; /* elements */
} gk_tensor;

/* Bytes of one element; 0 if the value is not a dtype. */
GK_API size_t gk_dtype_bytes(gk_dtype dtype);
GK_API const char *gk_dtype_name(gk_dtype dtype); /* "float32", ... */

/* ---- context ------------------------------------------------------------------------------ */
typedef enum gk_device {
    GK_CPU = 0,
    GK_CUDA = 1
} gk_device;

typedef void (*gk_task_fn)(void *arg, int64_t i);
/* Runs task(arg, i) once for each i in [0, n), in any order and on any threads. Returns when all
 * tasks are done. */
typedef void (*gk_parallel_for_fn)(void *pool, int64_t n, gk_task_fn task, void *arg);

typedef struct gk_context {
    size_t size; /* sizeof(gk_context) */
    gk_device device;
    int32_t index;       /* device index */
    void *stream;        /* CUDA stream; unused on the CPU */
    int32_t num_threads; /* CPU: upper bound of workers (>= 1); results do not depend on it */
    gk_parallel_for_fn parallel_for; /* CPU: NULL runs on the calling thread */
    void *pool;                      /* first argument of parallel_for */
    /* CPU: "base" | "avx2" | "avx512" | "avx512bf16" | "amx"; NULL = gk_cpu_isa() */
    const char *cpu_isa;
    uint8_t *error_word; /* CUDA: GK_NUM_DEVICE_ERRORS bytes of pinned memory; may be NULL */
} gk_context;

/* The CPU with its default instruction set, on the calling thread. */
#define GK_CONTEXT_INIT {.size = sizeof(gk_context), .device = GK_CPU, .num_threads = 1}

/* Bad contents of index tensors. A CUDA kernel that meets them sets byte error_word[kind] and goes
 * on with clamped values. The result of the sequence or token concerned is meaningless; all other
 * results are right. */
typedef enum gk_device_error {
    /* flash_attn_varlen: decreasing, past the tokens, or longer than max_seqlen */
    GK_BAD_CU_SEQLENS = 0,
    /* offs of grouped_gemm or weight_gemm: decreasing, or past the dimension that is grouped */
    GK_BAD_OFFS = 0,
    /* paged_attn: a length below 0, past the table or below its query tokens; bad cu_seqlens_q */
    GK_BAD_SEQ_LENS = 1,
    GK_BAD_BLOCK_TABLE = 2,  /* paged_attn: a page outside the cache */
    GK_BAD_SLOTS = 3,        /* kv_cache_write: a slot past the cache */
    GK_BAD_POSITIONS = 4,    /* rope: a position outside cos and sin */
    GK_BAD_TARGETS = 5,      /* cross_entropy: a target outside [0, V) that is not ignore_index */
    GK_BAD_MASK_BLOCKS = 6,  /* attn_mask: a count or an index of blocks out of range */
    GK_BAD_COUNT_SLOTS = 7,  /* sample_tokens: a slot past counts */
    GK_NUM_DEVICE_ERRORS = 8 /* the number of the kinds above: one 64-bit read covers all bytes */
} gk_device_error;

/* The error word of this process: pinned, zeroed, visible to every GPU. NULL without CUDA. The
 * first call allocates it, also inside a stream capture. It is never freed. A caller may pass its
 * own error word in gk_context instead. */
GK_API uint8_t *gk_cuda_error_word(void);
GK_API const char *gk_device_error_text(gk_device_error kind);

/* The default instruction set: the one of calls that name none. */
GK_API const char *gk_cpu_isa(void);
/* All instruction sets of this machine, comma-separated. Each contains those before it. */
GK_API const char *gk_cpu_isas(void);
/* Why the default is not the last one in that list; "" if it is. */
GK_API const char *gk_cpu_isa_reason(void);

/* Every CUDA kernel instance of this library, comma-separated; "" without CUDA. Valid as long as
 * the library is loaded. */
GK_API const char *gk_cuda_kernels(void);

/* ---- what a call would do ------------------------------------------------------------------ */
/* Sets *index to a device index that describes a GPU of this architecture. The GPU need not exist,
 * so only gk_explain_* accepts the index. arch is "sm_80", "sm_86", "sm_89" or "sm_90". A library
 * without CUDA explains gk_gemm on it and refuses the other ops. */
GK_API gk_status gk_cuda_arch(const char *arch, int32_t *index);

typedef struct gk_explanation {
    size_t size;       /* sizeof(gk_explanation), set by the caller */
    char instance[64]; /* the kernel instance, e.g. "gemm_packed_f32_avx512" */
    char isa[16];      /* its instruction set or architecture */
    /* gemm: MB NB KB (block), on the CPU MR*NR; attention: BQ BKV and the keys of a chunk;
     * 0 = unused */
    int64_t tile[4];
    int64_t tasks;  /* independent tasks */
    int64_t chunks; /* chunks that keys are split into, 1 = not split */
    double bytes;   /* least memory traffic: inputs read once, outputs written once */
    double flops;   /* a multiply-add counts as two; keys outside the span do not count */
    int64_t workspace_bytes;
    /* CUDA: tasks / tasks that run at once; 0 if that is unknown without the GPU. CPU: 0. */
    double waves;
    /* CUDA: the larger of bytes / bandwidth and flops / peak rate; 8-bit inputs: the first alone.
     * CPU: 0. */
    double bound_us;
    /* 1: the instance is the one that gk_gemm_prefer named. Callers whose struct ends before this
     * field are served, too. */
    int32_t preferred;
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

/* out = activation(alpha * (a @ b) + beta * c + bias), computed in float32 (GK_F64: float64) and
 * rounded once. */
typedef struct gk_gemm_args {
    size_t size;
    gk_tensor a; /* [batch..., M, K], any strides */
    gk_tensor b; /* [batch..., K, N] or [K, N], a's dtype, any strides; batch dims broadcast */
    const gk_tensor *bias; /* [N], a's or out's dtype; NULL = none */
    /* broadcasts to out, a's or out's dtype; not read if beta == 0; NULL = none */
    const gk_tensor *c;
    gk_tensor out;           /* [batch..., M, N], a's dtype or GK_F32; must not overlap an input */
    const gk_tensor *preact; /* like out: the value before the activation; NULL = not wanted */
    double alpha, beta;      /* 0 or within float32's normal range, unless a is GK_F64 */
    gk_activation activation;
    gk_precision fp32_precision; /* CUDA only; the CPU computes ieee float32 */
    void *workspace;
    size_t workspace_bytes;
} gk_gemm_args;

#define GK_GEMM_ARGS_INIT {.size = sizeof(gk_gemm_args), .alpha = 1.0}

GK_API size_t gk_gemm_workspace_bytes(const gk_context *, const gk_gemm_args *);
GK_API gk_status gk_gemm(const gk_context *, const gk_gemm_args *);
GK_API gk_status gk_explain_gemm(const gk_context *, const gk_gemm_args *, gk_explanation *);

/* The choice of gemm's instance on CUDA.
 *
 * Several kernel instances may serve one call. By default the instance with the least expected time
 * runs. A caller can prefer another instance for all calls with one tuning key. The key holds the
 * model of GPU, dtypes, sizes, layouts, alignment, the activation, and whether there are c and
 * preact; it does not hold bias. If the preferred instance does not serve a call, the default runs.
 * Instances may round differently.
 *
 * Any thread may set a preference at any time. gk_gemm_workspace_bytes covers the preferred and the
 * default instance, so the workspace stays large enough if a preference is withdrawn before the
 * call. A captured graph keeps its instance. These functions return GK_ERR_UNSUPPORTED for a CPU
 * context and in a build without CUDA. A text is valid until this thread calls the function
 * again. */

/* Every instance that serves this call, comma-separated, the default first. */
GK_API gk_status gk_gemm_instances(const gk_context *, const gk_gemm_args *,
                                   const char **instances);
/* The call's tuning key as one line of text. */
GK_API gk_status gk_gemm_class(const gk_context *, const gk_gemm_args *, const char **gemm_class);
/* Prefers an instance for the call's tuning key. The instance must serve the call. NULL removes the
 * key's preference. */
GK_API gk_status gk_gemm_prefer(const gk_context *, const gk_gemm_args *, const char *instance);
/* The same from stored texts, without a GPU: `device` comes from gk_cuda_device_name, `gemm_class`
 * from gk_gemm_class. The instance must exist for that dtype. Each later call checks whether the
 * instance serves it. */
GK_API gk_status gk_gemm_prefer_class(const char *device, const char *gemm_class,
                                      const char *instance);
GK_API void gk_gemm_prefer_none(void); /* removes all preferences */
GK_API gk_status gk_cuda_device_name(int32_t index, const char **name);

/* grad_in = grad_out * activation'(saved). `saved` is the preact, or for relu the output. All
 * tensors may have any strides. */
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
/* Options that every attention op adds to softmax(scale q k^T) v. The keys that row i sees form one
 * interval. */
typedef struct gk_attn_rules {
    /* finite, within +-1e38 unless q is GK_F64; usually 1/sqrt(head_dim) */
    double scale;
    double softcap;    /* s -> softcap * tanh(s / softcap); 0 = off */
    int32_t is_causal; /* j <= i + diagonal */
    /* dense only; packed and paged calls use each sequence's bottom-right diagonal */
    int64_t diagonal;
    /* i + diagonal - window_left <= j <= i + diagonal + window_right; -1 = unbounded */
    int64_t window_left, window_right;
    /* [Hq] or [B, Hq] float32 (float64 with GK_F64): s - slope |i + diagonal - j| */
    const gk_tensor *alibi_slopes;
    /* [Hq] float32 or q's dtype (float64 with GK_F64): one more logit, which has no value */
    const gk_tensor *sinks;
    /* [B] int32, dense and paged: the first visible key; clamped to [0, Sk] */
    const gk_tensor *kv_start;
    const gk_tensor *kv_end; /* [B] int32, dense only: end of the visible keys */
    /* [B] int32, dense only: the diagonal of each sequence; `diagonal` must then be 0 */
    const gk_tensor *q_start;
} gk_attn_rules;

/* Every key is visible and no option changes a score. The caller must set scale. */
#define GK_ATTN_RULES_INIT {.scale = NAN, .window_left = -1, .window_right = -1}

/* A call is packed ("varlen") if cu_seqlens_q is given, and dense otherwise.
 *
 *          dense               packed
 *   q      [B, Hq,  Sq, D]     [Tq, Hq,  D]
 *   k      [B, Hkv, Sk, D]     [Tk, Hkv, D]
 *   v      [B, Hkv, Sk, Dv]    [Tk, Hkv, Dv]
 *   out    [B, Hq,  Sq, Dv]    [Tq, Hq,  Dv]
 *   lse    [B, Hq,  Sq]        [Tq, Hq]         contiguous, float32 (float64 with GK_F64)
 *
 * The last dimension of q, k, v, out and their gradients has stride 1. A row that sees no key has
 * out 0, and its lse is the sink, or -inf without one. Dropout does not change lse
 * (formats/attn_dropout.h). */
typedef struct gk_flash_attn_args {
    size_t size;
    gk_tensor q, k, v;
    const gk_tensor *cu_seqlens_q; /* [B+1] int32, starts at 0, does not decrease */
    const gk_tensor *cu_seqlens_k;
    int64_t max_seqlen_q, max_seqlen_k; /* packed only: upper bounds of a sequence's lengths */
    gk_attn_rules rules;
    /* forward: written, in q's dtype, or in float32 if q has 16 bits; backward: read, q's dtype */
    gk_tensor out;
    gk_tensor lse; /* forward: written, data NULL = not wanted; backward: read */
    void *workspace;
    size_t workspace_bytes;
    double dropout_p; /* 0 <= p <= 1; 1: out is 0 */
    /* [2] int64: seed and offset, read on the device; may be NULL only if dropout_p is 0 */
    const gk_tensor *dropout_seed;
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
    gk_tensor dq, dk, dv;      /* like q, k, v; or all three float32 if q has 16 bits */
    const gk_tensor *dsinks;   /* [Hq] sinks' dtype; NULL = not wanted */
    int32_t deterministic;     /* CUDA only; the CPU is always deterministic */
    void *workspace;
    size_t workspace_bytes;
    /* 1: out and lse were computed over more keys than k and v hold. On CUDA sinks must then be
     * NULL (see below gk_flash_attn_accumulate_args). */
    int32_t is_part;
} gk_flash_attn_bwd_args;

#define GK_FLASH_ATTN_BWD_ARGS_INIT \
    {.size = sizeof(gk_flash_attn_bwd_args), .fwd = GK_FLASH_ATTN_ARGS_INIT}

GK_API size_t gk_flash_attn_bwd_workspace_bytes(const gk_context *, const gk_flash_attn_bwd_args *);
GK_API gk_status gk_flash_attn_bwd(const gk_context *, const gk_flash_attn_bwd_args *);
GK_API gk_status gk_explain_flash_attn_bwd(const gk_context *, const gk_flash_attn_bwd_args *,
                                           gk_explanation *);

/* ---- paged_attn ---------------------------------------------------------------------------- */
/* Options of gk_paged_attn beyond gk_attn_rules. */
typedef enum gk_paged_flags {
    GK_PAGED_WINDOW_RIGHT = 1, /* rules.window_right is read */
    /* A sequence may be shorter than its query tokens; without the flag that is an error. Queries
     * at negative positions then see what the rules allow, as in gk_flash_attn_fwd. CUDA serves
     * the flag with is_causal or window_right 0 only, and does not report bad lengths and pages. */
    GK_PAGED_ALLOW_SHORT = 2,
    /* the bits of a sequence do not depend on the other sequences of the call (docs/numerics.md) */
    GK_PAGED_BATCH_INVARIANT = 4
} gk_paged_flags;

/* Attention of new tokens over a paged cache. Sequence b has n_b query tokens; query t is at
 * position seq_lens[b] - n_b + t. A query at a negative position sees no key. Kernels read the
 * pages in place. */
typedef struct gk_paged_attn_args {
    size_t size;
    gk_tensor q;       /* [T, Hq, D], last stride 1 */
    gk_tensor k_cache; /* [num_blocks, block_size, Hkv, D], q's dtype or GK_E4M3, GK_E5M2, GK_I8;
                          last stride 1 */
    gk_tensor v_cache; /* [num_blocks, block_size, Hkv, Dv], k_cache's dtype, last stride 1 */
    gk_tensor block_table;         /* [B, max_blocks] int32 */
    gk_tensor seq_lens;            /* [B] int32, the new tokens included */
    const gk_tensor *cu_seqlens_q; /* [B+1] int32; NULL = T/B tokens each */
    /* upper bound of a sequence's query tokens; read only if cu_seqlens_q is given */
    int64_t max_seqlen_q;
    /* diagonal, kv_end and q_start are not read; window_right is read only with its flag */
    gk_attn_rules rules;
    /* The key is the stored value * k_scale; v_scale likewise. [] or [Hkv] float32 (float64 with
     * GK_F64); an 8-bit cache may also have [num_blocks, Hkv]. NULL = 1. */
    const gk_tensor *k_scale;
    const gk_tensor *v_scale;
    gk_tensor out; /* [T, Hq, Dv] contiguous, q's dtype */
    gk_tensor lse; /* [T, Hq] contiguous, float32 (float64 with GK_F64); data NULL = not wanted */
    void *workspace;
    size_t workspace_bytes;
    uint32_t flags; /* a sum of gk_paged_flags */
} gk_paged_attn_args;

#define GK_PAGED_ATTN_ARGS_INIT {.size = sizeof(gk_paged_attn_args), .rules = GK_ATTN_RULES_INIT}

GK_API size_t gk_paged_attn_workspace_bytes(const gk_context *, const gk_paged_attn_args *);
GK_API gk_status gk_paged_attn(const gk_context *, const gk_paged_attn_args *);
GK_API gk_status gk_explain_paged_attn(const gk_context *, const gk_paged_attn_args *,
                                       gk_explanation *);

/* Arguments of gk_paged_attn whose new tokens see each other by a mask, as drafts that form a tree
 * do. Pass &x.fwd; fwd.size tells that the longer struct follows. A query sees all old keys of its
 * sequence within its windows and kv_start, and the new tokens that its row of the mask shows. Set
 * is_causal to 0, because the mask replaces it. CUDA refuses alibi_slopes beside a mask. */
typedef struct gk_paged_attn_masked_args {
    gk_paged_attn_args fwd; /* fwd.size: sizeof the whole struct */
    /* GK_U8, 0 or 1, any strides: [T, S], a row for each query token, or [B, S, S]. Column j is
     * the j-th new token of the row's own sequence. S is at least the new tokens of a sequence.
     * NULL = no mask */
    const gk_tensor *attn_mask;
} gk_paged_attn_masked_args;
#define GK_PAGED_ATTN_MASKED_ARGS_INIT                                                   \
    {                                                                                    \
        .fwd = {.size = sizeof(gk_paged_attn_masked_args), .rules = GK_ATTN_RULES_INIT } \
    }

/* The mask over new tokens of a call; NULL if it has none. */
static inline const gk_tensor *gk_paged_mask_of(const gk_paged_attn_args *a) {
    return a->size < sizeof(gk_paged_attn_masked_args)
               ? NULL
               : ((const gk_paged_attn_masked_args *)a)->attn_mask;
}

/* Writes new keys and values into the caches. Token t goes to row s % block_size of page
 * s / block_size, with s = slots[t]. The order of reads and writes is undefined, so k and v must
 * not share memory with a row that is written. */
typedef struct gk_kv_cache_write_args {
    size_t size;
    gk_tensor k, v;             /* [T, Hkv, D], [T, Hkv, Dv], any strides */
    gk_tensor k_cache, v_cache; /* [num_blocks, block_size, Hkv, D], [..., Dv]; k's dtype or 8-bit
                                   codes; written */
    gk_tensor slots;            /* [T] int64 or int32; negative = skip */
    /* the stored value is k / k_scale, v / v_scale; shapes as in gk_paged_attn_args; NULL = 1 */
    const gk_tensor *k_scale, *v_scale;
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
/* The last dimension of a tensor [..., N] is dense. Its leading dimensions may have any strides,
 * also in results. */
typedef enum gk_norm_kind {
    GK_RMS_NORM = 0,  /* mean = 0 */
    GK_LAYER_NORM = 1 /* mean = mean(h) */
} gk_norm_kind;

/* Normalises h = x + residual, rounded to x's dtype, over the last dimension:
 *   out = (h - mean) rstd (weight + weight_offset) + bias,  rstd = 1 / sqrt(mean((h - mean)^2) +
 * eps) Computed in float32 (GK_F64: float64). */
typedef struct gk_norm_args {
    size_t size;
    gk_norm_kind kind;
    gk_tensor x;               /* [..., N], N >= 1 */
    const gk_tensor *residual; /* like x; NULL = none */
    const gk_tensor *weight;   /* [N] x's dtype or GK_F32; NULL: the factor is 1 */
    const gk_tensor *bias;     /* likewise; NULL = 0 */
    gk_tensor out;             /* like x */
    const gk_tensor *sum;      /* like x: receives h; given if and only if residual is */
    double eps, weight_offset;
    void *workspace;
    size_t workspace_bytes;
} gk_norm_args;
#define GK_NORM_ARGS_INIT {.size = sizeof(gk_norm_args), .eps = 1e-6}
GK_API size_t gk_norm_fwd_workspace_bytes(const gk_context *, const gk_norm_args *);
GK_API gk_status gk_norm_fwd(const gk_context *, const gk_norm_args *);

/* The kernels recompute mean and rstd from h, which they read anyway. dweight and dbias are summed
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

/* out = softmax(scale x) over the last dimension, or its logarithm. Columns at or past the row's
 * length do not take part, and their results are 0. */
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
    const gk_tensor *lengths; /* as in gk_softmax_args */
    gk_tensor dx;             /* like out */
    double scale;
    int32_t log;
} gk_softmax_bwd_args;
#define GK_SOFTMAX_BWD_ARGS_INIT {.size = sizeof(gk_softmax_bwd_args), .scale = 1.0}
GK_API gk_status gk_softmax_bwd(const gk_context *, const gk_softmax_bwd_args *);

/* The gated linear unit, out = activation(gate) up. With GK_ACT_SILU it is SwiGLU, with GK_ACT_GELU
 * and GK_ACT_GELU_TANH it is GEGLU. */
typedef struct gk_glu_args {
    size_t size;
    gk_tensor gate;      /* [..., N]; if up is NULL [..., 2 N], gate first and then up */
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
    const gk_tensor *dup; /* like up; NULL if and only if up is */
    gk_activation activation;
} gk_glu_bwd_args;
#define GK_GLU_BWD_ARGS_INIT {.size = sizeof(gk_glu_bwd_args), .activation = GK_ACT_SILU}
GK_API gk_status gk_glu_bwd(const gk_context *, const gk_glu_bwd_args *);

/* Rotary embedding (Su et al. 2021, arXiv:2104.09864) of q and k. A token at position p takes cos
 * and sin from row p of the tables. Each pair of columns becomes
 *   (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)
 * The pair is columns i and i + R / 2, or 2 i and 2 i + 1 if interleaved. Columns from R on are
 * copied. The results may be q and k themselves. A position past the tables is GK_ERR_INDEX on the
 * CPU; CUDA uses the last position and reports GK_BAD_POSITIONS. */
typedef struct gk_rope_args {
    size_t size;
    gk_tensor q;                /* [B, Hq, S, D], or packed [T, Hq, D], which is B = 1 and S = T */
    const gk_tensor *k;         /* [B, Hkv, S, D] or [T, Hkv, D], q's dtype; NULL = none */
    gk_tensor cos, sin;         /* [P, R / 2] GK_F32 (or GK_F64 if q is), R <= D */
    const gk_tensor *positions; /* [S] or [B, S] int32 or int64; NULL = 0 .. S - 1 */
    gk_tensor out_q;            /* like q */
    const gk_tensor *out_k;     /* like k */
    int32_t interleaved;
    int32_t inverse; /* 1: rotate by the negative angles, which gives the gradient */
} gk_rope_args;
#define GK_ROPE_ARGS_INIT {.size = sizeof(gk_rope_args)}
GK_API gk_status gk_rope(const gk_context *, const gk_rope_args *);

/* Cross entropy of each row, with target t, label smoothing e and weights w:
 *   z    = softcap tanh(logit_scale logits / softcap), or logit_scale logits if softcap is 0
 *   lse  = log sum_c exp z[c]
 *   loss = (1 - e) w[t] (lse - z[t]) + e / V sum_c w[c] (lse - z[c])
 * A row whose target is ignore_index has loss 0, and its logits are not read. Any other target
 * outside [0, V) is GK_ERR_INDEX on the CPU; CUDA sets the loss to NaN and reports
 * GK_BAD_TARGETS. */
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
    gk_tensor grad_loss;       /* like loss, any strides, also 0 */
    /* like logits, or 16-bit if logits are GK_F32; may be logits itself; 0 in ignored rows */
    gk_tensor dlogits;
} gk_cross_entropy_bwd_args;
#define GK_CROSS_ENTROPY_BWD_ARGS_INIT \
    {.size = sizeof(gk_cross_entropy_bwd_args), .fwd = GK_CROSS_ENTROPY_ARGS_INIT}
GK_API gk_status gk_cross_entropy_bwd(const gk_context *, const gk_cross_entropy_bwd_args *);

/* ---- attention of 8-bit floats --------------------------------------------------------------- */
/* How P V is summed. 8-bit tensor cores keep 14 bits of a running sum and truncate the rest. Over
 * thousands of keys the sum then loses the mean of v. Kernels that multiply in 16 or 32 bits always
 * sum in float32. */
typedef enum gk_attn_accumulate {
    GK_ATTN_AUTO = 0,   /* fast with a v_mean, precise without one */
    GK_ATTN_FAST = 1,   /* one sum over all keys */
    GK_ATTN_PRECISE = 2 /* the sums of at most 128 keys are added in float32 */
} gk_attn_accumulate;

/* out = softmax(scale (q q_scale) (k k_scale)^T) (v v_scale + v_mean). There is no backward.
 *
 * A scale is one number, [H], [B, H], or [B, H, ceil(S / 128)] with one scale for 128 tokens of a
 * sequence. In a packed call S is the bound max_seqlen, and the 128 tokens are counted from the
 * sequence's first token. NULL is 1. */
typedef struct gk_flash_attn_fp8_args {
    size_t size;
    /* q, k, v are GK_E4M3; out is bfloat16, float16 or float32; rules.sinks is float32 or has
     * out's dtype. fwd.size is at most sizeof fwd. fwd.workspace is not read. */
    gk_flash_attn_args fwd;
    const gk_tensor *q_scale, *k_scale, *v_scale; /* float32, any strides; H is Hq, Hkv, Hkv */
    const gk_tensor *v_mean; /* [Hkv, Dv] or [B, Hkv, Dv] float32, any strides; NULL = 0 */
    gk_attn_accumulate accumulate;
    void *workspace;
    size_t workspace_bytes;
} gk_flash_attn_fp8_args;

#define GK_FLASH_ATTN_FP8_ARGS_INIT \
    {.size = sizeof(gk_flash_attn_fp8_args), .fwd = GK_FLASH_ATTN_ARGS_INIT}

/* True if the sums of 128 keys are added in float32. Resolves GK_ATTN_AUTO. */
static inline int gk_attn_is_precise(const gk_flash_attn_fp8_args *a) {
    return a->accumulate == GK_ATTN_PRECISE || (a->accumulate == GK_ATTN_AUTO && !a->v_mean);
}

GK_API size_t gk_flash_attn_fp8_workspace_bytes(const gk_context *, const gk_flash_attn_fp8_args *);
GK_API gk_status gk_flash_attn_fp8(const gk_context *, const gk_flash_attn_fp8_args *);
GK_API gk_status gk_explain_flash_attn_fp8(const gk_context *, const gk_flash_attn_fp8_args *,
                                           gk_explanation *);

/* ---- attention over a part of the keys, for several ranks ------------------------------------ */
/* Arguments of gk_flash_attn_fwd for a result that accumulates. On entry out and lse hold the
 * attention over other keys. On return they hold the attention over those keys and these, as
 * gk_attn_merge computes it:
 *   out = out_before exp(lse_before - lse) + out_new exp(lse_new - lse)
 *
 * out is float32 (GK_F64: float64) with any leading strides, and lse is required. The call must be
 * dense and without dropout. Pass &x.fwd; fwd.size tells that the longer struct follows. */
typedef struct gk_flash_attn_accumulate_args {
    gk_flash_attn_args fwd; /* fwd.size: sizeof the whole struct */
    int32_t accumulates;    /* 1; 0 means the same as gk_flash_attn_args alone */
} gk_flash_attn_accumulate_args;

#define GK_FLASH_ATTN_ACCUMULATE_ARGS_INIT                                                \
    {.fwd = {.size = sizeof(gk_flash_attn_accumulate_args), .rules = GK_ATTN_RULES_INIT}, \
     .accumulates = 1}

/* True if the result accumulates into what out and lse hold. */
static inline int32_t gk_accumulates(const gk_flash_attn_args *a) {
    return a->size >= sizeof(gk_flash_attn_accumulate_args) &&
           ((const gk_flash_attn_accumulate_args *)a)->accumulates;
}

/* The gradient of sinks if gk_flash_attn_bwd_args.is_part is 1. With delta = dO . O - dlse and
 * p = exp(sink - lse), the gradient over all keys is
 *   -sum_rows p (delta (1 - p) - dlse)  -  sum_rows p sum_j P_j (dP_j - delta)
 * On the CPU dsinks receives the second sum over the keys of this call, and the caller adds the
 * first sum. In this form the rounding of out, which enters delta, does not bias the gradient. On
 * CUDA the gradient is -sum_rows p delta, without that correction, and a call with both sinks and
 * is_part is refused. */

/* ---- masks of attention ---------------------------------------------------------------------- */
/* The forms in which a caller describes which keys a query sees. */
typedef enum gk_mask_source {
    GK_MASK_OF_BOOL = 0, /* mask [B, H, Sq, Sk] uint8: 0 hides the key */
    GK_MASK_OF_BITS = 1, /* mask [B, H, Sq, ceil(Sk / 8)] uint8: bit j % 8 of byte j / 8 is key j */
    /* rows [B, H, Sq, 2 or 4] int32 x, y (, z, w): keys [x, y) and [z, w), clamped to [0, Sk) */
    GK_MASK_OF_RANGES = 2,
    /* rows [B, H, Sk, 1, 2 or 4] int32: the rows that do not see key j (gk_attn_mask_args) */
    GK_MASK_OF_COLUMNS = 3,
    GK_MASK_OF_BLOCKS = 4 /* lists of 128 x 128 blocks (gk_attn_mask_args) */
} gk_mask_source;

/* How a mask is stored. csrc/core/attn_mask.h has the layout. */
typedef enum gk_mask_store {
    GK_MASK_DENSE = 1, /* the bits of every block */
    /* the bits of a few blocks of each tile; kernels compute the others from ranges of keys */
    GK_MASK_RANGES = 2,
    GK_MASK_COLUMNS = 3 /* the same, from ranges of rows */
} gk_mask_store;

/* Builds a stored mask. B is 1 or the batch size, and H is 1 or the number of query heads, of the
 * attention that reads the mask. Tensors may have any strides.
 *
 * GK_MASK_OF_COLUMNS follows startend_row_indices of FlashMask (Wang et al. 2024,
 * arXiv:2410.01359). Each key j has n numbers c0, c1, ..:
 *
 *   is_causal   n   rows i that see key j
 *   1           1   j <= i < c0
 *   1           2   i >= j, except [c0, c1)
 *   0           2   c1 <= i < c0
 *   0           4   all except [c0, c1) and [c2, c3)
 *
 * GK_MASK_OF_BLOCKS follows FlexAttention. There are nq = ceil(Sq / 128) tiles of queries.
 * num_blocks [B, H, nq] and blocks [B, H, nq, n], both int32, list the partial blocks of keys of a
 * tile, in any order. num_full and full list the full blocks in the same way. `mask` holds the
 * elements of the partial blocks, as bytes or bits; without it they count as full. Entries past a
 * count are not read. A count or an index out of range is GK_ERR_INDEX on the CPU. CUDA skips it
 * and reports GK_BAD_MASK_BLOCKS. */
typedef struct gk_attn_mask_args {
    size_t size;
    gk_mask_source source;
    const gk_tensor *mask; /* bool and bits; optional with blocks */
    const gk_tensor *rows; /* ranges and columns */
    const gk_tensor *num_blocks, *blocks, *num_full, *full;
    int32_t is_bits;    /* blocks: mask holds bits */
    int32_t is_causal;  /* columns */
    int32_t transposed; /* 1: also build the tables by keys, which CUDA's backward reads */
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
/* A mask and biases beyond gk_attn_rules. Biases are added to the score after softcap and ALiBi. A
 * bias of -inf, or of the lowest finite number of its dtype, hides the key from the query. A hidden
 * pair takes no part, so its k and v may hold NaN or inf. */
typedef struct gk_attn_scores {
    const gk_tensor *mask; /* as gk_attn_mask made it, [B or 1, Hq or 1, n]; NULL = none */
    gk_mask_store store;
    int64_t mask_seq_q, mask_seq_k; /* the mask's Sq and Sk */
    /* [B or 1, Hq or 1, Sq or 1, Sk or 1], q's dtype or float32, any strides; NULL = none */
    const gk_tensor *bias;
    /* [Hq or 1, Sq + Sk - 1] float32 (float64 with GK_F64): row i, key j take entry
     * j - i + Sq - 1; not allowed with q_start; NULL = none */
    const gk_tensor *distance_bias;
} gk_attn_scores;

/* Arguments of gk_flash_attn_fwd with a mask or a bias. Pass &x.fwd; fwd.size tells that the longer
 * struct follows. The call must be dense, and its result does not accumulate. */
typedef struct gk_flash_attn_masked_args {
    gk_flash_attn_args fwd; /* fwd.size: sizeof the whole struct */
    int32_t accumulates;    /* 0 */
    gk_attn_scores scores;
} gk_flash_attn_masked_args;
#define GK_FLASH_ATTN_MASKED_ARGS_INIT                                                   \
    {                                                                                    \
        .fwd = {.size = sizeof(gk_flash_attn_masked_args), .rules = GK_ATTN_RULES_INIT } \
    }

/* The same for gk_flash_attn_bwd, which takes &x.bwd. The gradients of biases are summed over
 * dimensions that broadcast, in float32 (GK_F64: float64). */
typedef struct gk_flash_attn_masked_bwd_args {
    gk_flash_attn_bwd_args
        bwd; /* bwd.size: sizeof the whole struct; bwd.fwd.size: sizeof bwd.fwd */
    gk_attn_scores scores;
    const gk_tensor *dbias;          /* contiguous, bias's shape and dtype; NULL = not wanted */
    const gk_tensor *ddistance_bias; /* the same for distance_bias */
} gk_flash_attn_masked_bwd_args;
#define GK_FLASH_ATTN_MASKED_BWD_ARGS_INIT                                                      \
    {                                                                                           \
        .bwd = {.size = sizeof(gk_flash_attn_masked_bwd_args), .fwd = GK_FLASH_ATTN_ARGS_INIT } \
    }

/* The mask and biases of a call; NULL if it has neither. */
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

/* ---- rotary embedding, norm and the write into a cache in one call --------------------------- */
/* RMSNorm of each head, rotary embedding and the write of new tokens into a paged cache, in one
 * pass:
 *   out_q            = rotate(norm(q))
 *   k_cache[slots[t]] = rotate(norm(k)) / k_scale
 *   v_cache[slots[t]] = v / v_scale
 * Computed in float32 (GK_F64: float64) and rounded once, to q's dtype or the caches'.
 *
 * A token with a negative slot is not written, but its query is still rotated. On the CPU, a slot
 * past the cache or a position past the tables is GK_ERR_INDEX, and nothing is written. CUDA skips
 * the write and reports GK_BAD_SLOTS, or uses the last position and reports GK_BAD_POSITIONS. q, k
 * and v must not share memory with a row that is written. */
typedef struct gk_rope_kv_write_args {
    size_t size;
    gk_tensor q;         /* [T, Hq, D]; the last dimension of q, k and v is dense */
    gk_tensor k, v;      /* [T, Hkv, D], [T, Hkv, Dv], q's dtype */
    gk_tensor cos, sin;  /* [P, R / 2] GK_F32 (or GK_F64 if q is), R <= D; last dimension dense */
    gk_tensor positions; /* [T] int32 or int64: rows of cos and sin */
    gk_tensor k_cache, v_cache; /* [num_blocks, block_size, Hkv, D], [..., Dv]; q's dtype or 8-bit
                                   codes; written */
    gk_tensor slots;            /* [T] int64 or int32; negative = skip */
    const gk_tensor *q_weight, *k_weight; /* [D] q's dtype or GK_F32; NULL = no norm */
    const gk_tensor *k_scale, *v_scale;   /* as in gk_kv_cache_write_args */
    gk_tensor out_q;                      /* like q */
    double eps;                           /* of both norms */
    int32_t interleaved;                  /* as in gk_rope_args */
} gk_rope_kv_write_args;
#define GK_ROPE_KV_WRITE_ARGS_INIT {.size = sizeof(gk_rope_kv_write_args), .eps = 1e-6}
GK_API gk_status gk_rope_kv_write(const gk_context *, const gk_rope_kv_write_args *);
GK_API gk_status gk_explain_rope_kv_write(const gk_context *, const gk_rope_kv_write_args *,
                                          gk_explanation *);

/* ---- several GPUs ---------------------------------------------------------------------------- */
/* Limits the number of SMs that persistent kernels are planned for, so that kernels of other
 * streams find SMs free. 0 is no limit. It holds for every GPU and thread of this process. The
 * persistent kernels are those of gemm, the quantised products, flash_attn forward and paged_attn.
 * Other kernels launch as many blocks as they have tasks.
 *
 * The limit may change how keys or k are split, and so the bits of a result. A workspace sized
 * before a change may be too small; the call then returns GK_ERR_WORKSPACE. */
GK_API gk_status gk_limit_sms(int32_t sms);
GK_API int32_t gk_sm_limit(void);

/* The largest number of ranks of gk_sum_over_ranks. */
#define GK_MOST_RANKS 16

/* out = sum over ranks of x. The sum is float32, in the order of the ranks, and rounded once, so
 * every rank gets the same bits.
 *
 * One kernel does it. Ranks write data and flags into each other's mailboxes, wait for the flags of
 * the others, and sum what arrived in their own mailbox. It is meant for short tensors. Every rank
 * must make the same calls in the same order. The kernel waits on the GPU for at most timeout_s.
 * Then it traps: the process gets a CUDA error and cannot use the GPU any more, but it never gets a
 * wrong sum.
 *
 * A mailbox has gk_mailbox_bytes, is aligned to 16 bytes and zeroed before the first call.
 * mailboxes[r] is the address of rank r's mailbox in this GPU's address space. One set of mailboxes
 * serves the calls of one stream, or of one captured graph. */
typedef struct gk_sum_over_ranks_args {
    size_t size;
    gk_tensor x;            /* float32, contiguous */
    gk_tensor out;          /* x's shape, contiguous, GK_F32, GK_BF16 or GK_F16 */
    void *const *mailboxes; /* [num_ranks] */
    size_t mailbox_bytes;   /* of each: the same on every rank */
    int32_t rank, num_ranks;
    double timeout_s;
} gk_sum_over_ranks_args;

/* Bytes of a mailbox for sums of up to this many elements. */
GK_API size_t gk_mailbox_bytes(int64_t elements, int32_t num_ranks);
GK_API gk_status gk_sum_over_ranks(const gk_context *, const gk_sum_over_ranks_args *);
/* The id of the graph capture that a stream is in, unique in this process; 0 if there is none. A
 * caller can look up mailboxes by this id, so that each graph has its own set. */
GK_API uint64_t gk_capture_id(void *stream);

#ifdef __cplusplus
}
#endif
#endif
