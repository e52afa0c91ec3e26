/* SPDX-License-Identifier: BSD-3-Clause */
/* check_prefer: tests the tuning keys of gemm calls, their text, the table from keys to
 * preferred instances (prefer.h) with several threads, and the public functions without a GPU.
 * Instances here are addresses in `rows`, because the table never reads them. */
#include "check.h"
#include "core/prefer.h"

#include <stddef.h>

enum {
    KEYS = 3000, /* the table grows six times */
    EACH = 4     /* instances that a key may get */
};
static char rows[KEYS][EACH];
static const uint64_t device = 77;

/* ---- keys ------------------------------------------------------------------------------------ */
static float memory[64];

static gk_tensor tensor_of(gk_dtype dtype, int ndim, const int64_t *shape, const int64_t *stride,
                           int64_t offset_bytes) {
    gk_tensor t = {.data = (char *)gk_round_up((intptr_t)memory, 16) + offset_bytes,
                   .dtype = dtype,
                   .ndim = ndim};
    memcpy(t.shape, shape, (size_t)ndim * sizeof *shape);
    memcpy(t.stride, stride, (size_t)ndim * sizeof *stride);
    return t;
}
#define SIZES(...) ((const int64_t[]){__VA_ARGS__})

/* bfloat16, [m, k] by [k, n], contiguous and aligned. */
static gk_gemm_args product(int64_t m, int64_t n, int64_t k) {
    return (gk_gemm_args){.size = sizeof(gk_gemm_args),
                          .a = tensor_of(GK_BF16, 2, SIZES(m, k), SIZES(k, 1), 0),
                          .b = tensor_of(GK_BF16, 2, SIZES(k, n), SIZES(n, 1), 0),
                          .out = tensor_of(GK_BF16, 2, SIZES(m, n), SIZES(n, 1), 0),
                          .alpha = 1};
}

static void check_class(const char *what, const gk_gemm_args *args, const char *expected) {
    gk_gemm_key key, again;
    char text[GK_KEY_TEXT_BYTES];
    snprintf(check_case, sizeof check_case, "class: %s", what);
    gk_gemm_key_of(device, args, &key);
    gk_gemm_key_write(&key, text);
    check_result(strcmp(text, expected) == 0, "is '%s', expected '%s'", text, expected);
    gk_status status = gk_gemm_key_read(text, device, &again);
    check_result(status == GK_OK && memcmp(&key, &again, sizeof key) == 0,
                 "'%s' reads as another key", text);
}

#define PLAIN \
    " batch=1 dtype=bfloat16 out=bfloat16 precision=ieee activation=none c=0 preact=0 aligned="

static void check_classes(void) {
    gk_gemm_args g = product(32, 48, 64);
    check_class("plain", &g, "32x48x64:NN" PLAIN "abo");
    g.a = tensor_of(GK_BF16, 2, SIZES(32, 64), SIZES(1, 32), 0);
    g.b = tensor_of(GK_BF16, 2, SIZES(64, 48), SIZES(1, 64), 0);
    check_class("columns dense", &g, "32x48x64:TT" PLAIN "abo");
    g.a = tensor_of(GK_BF16, 2, SIZES(32, 64), SIZES(128, 2), 0);
    g.b = tensor_of(GK_BF16, 2, SIZES(64, 48), SIZES(48, 1), 2);
    check_class("a strided, b between multiples of 16 bytes", &g, "32x48x64:SN" PLAIN "--o");
    g = product(32, 48, 64);
    g.a.stride[0] = 65;
    g.out.stride[0] = 50;
    check_class("odd rows", &g, "32x48x64:NN" PLAIN "-b-");
    g = product(1, 48, 64);
    g.a.stride[0] = 3;
    g.out.stride[0] = 5;
    check_class("the stride of one row says nothing", &g, "1x48x64:NN" PLAIN "abo");

    g = product(32, 48, 64);
    const gk_tensor bias = tensor_of(GK_F32, 1, SIZES(48), SIZES(1), 0), c = g.out;
    g.bias = &bias;
    g.c = &c;
    g.beta = 0;
    check_class("a bias and a c that is not read", &g, "32x48x64:NN" PLAIN "abo");
    g.beta = 0.5;
    g.preact = &c;
    g.activation = GK_ACT_GELU_TANH;
    g.out.dtype = GK_F32;
    g.fp32_precision = GK_TF32;
    check_class("c, preact, activation, float32 results", &g,
                "32x48x64:NN batch=1 dtype=bfloat16 out=float32 precision=ieee "
                "activation=gelu_tanh c=1 preact=1 aligned=abo");
    g = product(32, 48, 64);
    g.a.dtype = g.b.dtype = g.out.dtype = GK_F32;
    g.fp32_precision = GK_TF32;
    check_class("tf32", &g,
                "32x48x64:NN batch=1 dtype=float32 out=float32 precision=tf32 activation=none c=0 "
                "preact=0 aligned=abo");

    g = product(32, 48, 64);
    g.a = tensor_of(GK_BF16, 4, SIZES(2, 1, 16, 64), SIZES(1024, 7, 64, 1), 0);
    g.out = tensor_of(GK_BF16, 4, SIZES(2, 1, 16, 48), SIZES(768, 768, 48, 1), 0);
    check_class("a batch that is rows", &g, "32x48x64:NN" PLAIN "abo");
    g.b = tensor_of(GK_BF16, 4, SIZES(2, 1, 64, 48), SIZES(0, 0, 48, 1), 0);
    check_class("and shares a broadcast b", &g, "32x48x64:NN" PLAIN "abo");
    g.a = tensor_of(GK_BF16, 4, SIZES(32, 1, 1, 64), SIZES(64, 9, 9, 1), 0);
    g.out = tensor_of(GK_BF16, 4, SIZES(32, 1, 1, 48), SIZES(48, 48, 48, 1), 0);
    check_class("of one row each", &g, "32x48x64:NN" PLAIN "abo");
    g.a = tensor_of(GK_BF16, 3, SIZES(2, 16, 64), SIZES(2048, 64, 1), 0);
    g.b = product(32, 48, 64).b;
    g.out = tensor_of(GK_BF16, 3, SIZES(2, 16, 48), SIZES(768, 48, 1), 0);
    check_class("rows with gaps between entries", &g,
                "16x48x64:NN batch=2 dtype=bfloat16 out=bfloat16 precision=ieee activation=none "
                "c=0 preact=0 aligned=abo");
    g.a = product(16, 48, 64).a;
    g.b = tensor_of(GK_BF16, 3, SIZES(2, 64, 48), SIZES(3073, 48, 1), 0);
    check_class("b with entries of its own, at odd places", &g,
                "16x48x64:NN batch=2 dtype=bfloat16 out=bfloat16 precision=ieee activation=none "
                "c=0 preact=0 aligned=a-o");

    static const int64_t strides[] = {65, 66, 68, 72};
    for (int i = 0; i < 4; ++i) {
        g = product(32, 48, 64);
        g.a.stride[0] = strides[i];
        check_class("misaligned rows of a", &g,
                    i < 3 ? "32x48x64:NN" PLAIN "-bo" : "32x48x64:NN" PLAIN "abo");
    }
    g = product(32, 48, 64);
    g.a.data = (char *)g.a.data + 2;
    check_class("all alike", &g, "32x48x64:NN" PLAIN "-bo");
    g.b.stride[0] = 1;
    g.b.stride[1] = 64;
    check_class("beside columns of b", &g, "32x48x64:NT" PLAIN "-bo");
    g.b.stride[1] = 65;
    check_class("misaligned, too", &g, "32x48x64:NT" PLAIN "--o");
    g.b.stride[0] = 2;
    check_class("beside a b dense nowhere", &g, "32x48x64:NS" PLAIN "--o");
}

/* ---- texts ----------------------------------------------------------------------------------- */
static gk_gemm_key random_key(void) {
    return (gk_gemm_key){.device = device,
                         .m = check_below(1 << 20),
                         .n = check_below(1 << 20),
                         .k = check_below(1 << 20),
                         .batch = check_below(99),
                         .dtype = (uint8_t)check_below(4),
                         .out_dtype = (uint8_t)check_below(4),
                         .precision = (uint8_t)check_below(2),
                         .activation = (uint8_t)check_below(5),
                         .a = (uint8_t)"NTS"[check_below(3)],
                         .b = (uint8_t)"NTS"[check_below(3)],
                         .aligned = (uint8_t)check_below(8),
                         .extras = (uint8_t)check_below(4)};
}

static void check_texts(void) {
    static const char *const wrong[] = {"",
                                        "32x48x64",
                                        "32x48x64:NN",
                                        "32x48x64:NN" PLAIN "abo ",
                                        " 32x48x64:NN" PLAIN "abo",
                                        "32x48x64:NX" PLAIN "abo",
                                        "32x48x64:NN" PLAIN "oba",
                                        "32x48x64:NN" PLAIN "3bo",
                                        "32x48x64:NN" PLAIN "b8o",
                                        "32x48x64:NN" PLAIN "abo-",
                                        "-2x48x64:NN" PLAIN "abo",
                                        "032x48x64:NN" PLAIN "abo",
                                        "32x48:NN" PLAIN "abo",
                                        "99999999999999999999999x48x64:NN" PLAIN "abo",
                                        "32X48x64:NN" PLAIN "abo",
                                        "32x48x64:NN batch=1 dtype=int8 out=bfloat16 "
                                        "precision=ieee activation=none c=0 preact=0 aligned=abo",
                                        "32x48x64:NN batch=1 dtype=bfloat16 out=bfloat16 "
                                        "precision=ieee activation=tanh c=0 preact=0 aligned=abo",
                                        "32x48x64:NN batch=1 dtype=bfloat16 out=bfloat16 "
                                        "precision=ieee activation=none c=2 preact=0 aligned=abo"};
    gk_gemm_key key;
    char text[GK_KEY_TEXT_BYTES], again[GK_KEY_TEXT_BYTES];
    for (int i = 0; i < CHECK_COUNT(wrong); ++i) {
        snprintf(check_case, sizeof check_case, "text '%s'", wrong[i]);
        check_refused(gk_gemm_key_read(wrong[i], device, &key), GK_ERR_ARGUMENT, "is not a class");
    }
    for (int i = 0; i < 3000; ++i) {
        const gk_gemm_key k = random_key();
        gk_gemm_key_write(&k, text);
        snprintf(check_case, sizeof check_case, "text '%s'", text);
        gk_status status = gk_gemm_key_read(text, device, &key);
        check_result(status == GK_OK && memcmp(&k, &key, sizeof k) == 0, "does not come back");
        /* With one byte changed, the text is refused or means another key, which must be written
         * back as the same text. */
        text[check_below((int64_t)strlen(text))] = (char)(1 + check_below(255));
        if (gk_gemm_key_read(text, device, &key) != GK_OK) continue;
        gk_gemm_key_write(&key, again);
        check_result(strcmp(text, again) == 0, "'%s' is read as '%s'", text, again);
    }
}

/* ---- the table ------------------------------------------------------------------------------- */
static gk_gemm_key key_number(int64_t i) {
    gk_gemm_key k = {.device = device + (uint64_t)(i % 3),
                     .m = i / 3,
                     .n = 48,
                     .k = 64,
                     .batch = 1,
                     .a = 'N',
                     .b = 'N'};
    return k;
}

static void check_table(void) {
    static const char *want[KEYS];
    int32_t live = 0;
    snprintf(check_case, sizeof check_case, "table");
    check_result(!gk_any_preferred(), "there are preferred rows before any was asked for");
    for (int64_t step = 0; step < 40000; ++step) {
        const int64_t i = check_below(1 + step % KEYS);
        const gk_gemm_key key = key_number(i);
        const char *row = check_below(4) ? &rows[i][check_below(EACH)] : NULL;
        check_result(gk_preferred(&key) == want[i], "key %lld has another row", (long long)i);
        check_result(gk_prefer(&key, row) == GK_OK, "%s", gk_last_error());
        live += (row != NULL) - (want[i] != NULL);
        want[i] = row;
        check_result(gk_preferred(&key) == row && gk_num_preferred == live,
                     "key %lld: %d classes, expected %d", (long long)i, gk_num_preferred, live);
    }
    for (int64_t i = 0; i < KEYS; ++i) {
        const gk_gemm_key key = key_number(i);
        check_result(gk_preferred(&key) == want[i], "key %lld has another row at the end",
                     (long long)i);
    }
    gk_prefer_none();
    check_result(!gk_any_preferred(), "%d classes after all were forgotten", gk_num_preferred);
    for (int64_t i = 0; i < KEYS; ++i) {
        const gk_gemm_key key = key_number(i);
        check_result(gk_preferred(&key) == NULL, "key %lld has a row after all were forgotten",
                     (long long)i);
    }
}

/* ---- threads --------------------------------------------------------------------------------- */
enum {
    WRITERS = 3,
    READERS = 5,
    ROUNDS = 6
};
static int64_t done[WRITERS]; /* keys below this, among the writer's own, have an instance */
static int64_t wrong_rows, lost_rows, finished;

/* Writer w gives its keys w, w + WRITERS, .. one instance after the other and never forgets a
 * key. */
static void write_rows(int64_t w) {
    for (int64_t round = 0; round < ROUNDS; ++round)
        for (int64_t i = w; i < KEYS; i += WRITERS) {
            const gk_gemm_key key = key_number(i);
            if (gk_prefer(&key, &rows[i][round % EACH]) != GK_OK)
                __atomic_fetch_add(&wrong_rows, 1, __ATOMIC_RELAXED);
            if (round == 0) __atomic_store_n(&done[w], i + 1, __ATOMIC_RELEASE);
        }
    __atomic_fetch_add(&finished, 1, __ATOMIC_RELEASE);
}

/* A key's instance must be one of its own. It must be there once its writer has said so, also
 * while the table grows. */
static void read_rows(int64_t r) {
    uint64_t random = (uint64_t)r * UINT64_C(0x9e3779b97f4a7c15);
    do {
        for (int n = 0; n < 1000; ++n) {
            random = random * UINT64_C(6364136223846793005) + 1;
            const int64_t i = (int64_t)(random >> 33) % KEYS;
            const bool there = i < __atomic_load_n(&done[i % WRITERS], __ATOMIC_ACQUIRE);
            const gk_gemm_key key = key_number(i);
            const char *row = gk_preferred(&key);
            if (!row && there) __atomic_fetch_add(&lost_rows, 1, __ATOMIC_RELAXED);
            if (row && (row < rows[i] || row >= rows[i] + EACH))
                __atomic_fetch_add(&wrong_rows, 1, __ATOMIC_RELAXED);
        }
    } while (__atomic_load_n(&finished, __ATOMIC_ACQUIRE) < WRITERS);
}

static void work(void *arg, int64_t i) {
    (void)arg;
    if (i < WRITERS)
        write_rows(i);
    else
        read_rows(i);
}

static void check_threads(void) {
    snprintf(check_case, sizeof check_case, "threads");
    gk_prefer_none();
    check_parallel_for(NULL, WRITERS + READERS, work, NULL);
    check_result(wrong_rows == 0, "%lld lookups gave the row of another class",
                 (long long)wrong_rows);
    check_result(lost_rows == 0, "%lld lookups missed a row that was there", (long long)lost_rows);
    check_result(gk_num_preferred == KEYS, "%d classes, expected %d", gk_num_preferred, KEYS);
    for (int64_t i = 0; i < KEYS; ++i) {
        const gk_gemm_key key = key_number(i);
        check_result(gk_preferred(&key) == &rows[i][(ROUNDS - 1) % EACH],
                     "key %lld has not its last row", (long long)i);
    }
    gk_prefer_none();
}

/* ---- a described GPU ------------------------------------------------------------------------- */
/* Every build can explain a gemm for a GPU that is described to it. No build can run one there. */
static void check_described(void) {
    gk_context ctx = check_context(NULL, 1);
    const gk_gemm_args g = product(4096, 4096, 4096);
    gk_explanation found = {.size = sizeof found};
    const char *text = NULL;
    snprintf(check_case, sizeof check_case, "a described GPU");
    ctx.device = GK_CUDA;
    check_result(gk_cuda_arch("sm_90", &ctx.index) == GK_OK, "%s", gk_last_error());
    check_result(gk_explain_gemm(&ctx, &g, &found) == GK_OK, "%s", gk_last_error());
    check_result(strcmp(found.instance, "gemm_sm90a_bf16_128x256x64") == 0 && found.tasks == 512 &&
                     found.bound_us > 100,
                 "%s of %lld tasks, at least %g us", found.instance, (long long)found.tasks,
                 found.bound_us);
    check_result(gk_gemm_instances(&ctx, &g, &text) == GK_OK &&
                     strstr(text, ",gemm_sm80_bf16_128x128x64"),
                 "%s", text ? text : gk_last_error());
    check_result(gk_cuda_device_name(ctx.index, &text) == GK_OK && strstr(text, "(described)"),
                 "%s", text);
    check_result(gk_gemm(&ctx, &g) != GK_OK, "a product runs on a GPU that is not there");
    check_refused(gk_cuda_arch("sm_75", &ctx.index), GK_ERR_ARGUMENT, "arch is \"sm_75\"");
}

/* ---- the public functions -------------------------------------------------------------------- */
static void check_public(void) {
    const gk_context cpu = check_context(NULL, 1);
    const gk_gemm_args g = product(2, 2, 8);
    const char *text = NULL;
    snprintf(check_case, sizeof check_case, "public functions");
#ifdef GPUKERN_HAS_CUDA
    const char *plain = "32x48x64:NN" PLAIN "abo", *row = "gemm_sm80_bf16_64x64x64";
    check_refused(gk_gemm_prefer_class("A GPU", plain, "gemm_of_tomorrow"), GK_ERR_ARGUMENT,
                  "instance 'gemm_of_tomorrow' does not exist in this library");
    check_refused(gk_gemm_prefer_class("A GPU", plain, "flash_attn_fwd_plain_f32"), GK_ERR_ARGUMENT,
                  "does not exist");
    check_refused(gk_gemm_prefer_class("A GPU", plain, "gemm_plain_f64_64x64x16"), GK_ERR_ARGUMENT,
                  "is for float64, the class for bfloat16");
    check_refused(gk_gemm_prefer_class("A GPU", "32x48", row), GK_ERR_ARGUMENT,
                  "'32x48' is not a class");
    check_refused(gk_gemm_prefer_class(NULL, plain, row), GK_ERR_ARGUMENT, "is missing");
    check_refused(gk_gemm_prefer_class("", plain, row), GK_ERR_ARGUMENT, "is missing");
    check_refused(gk_gemm_prefer_class("A GPU", NULL, row), GK_ERR_ARGUMENT, "is missing");
    check_result(!gk_any_preferred(), "a refused row is preferred");
    check_result(gk_gemm_prefer_class("A GPU", plain, row) == GK_OK && gk_num_preferred == 1, "%s",
                 gk_last_error());
    gk_gemm_key key;
    check_result(gk_gemm_key_read(plain, gk_name_hash("A GPU"), &key) == GK_OK &&
                     gk_preferred(&key),
                 "is not kept");
    key.device = gk_name_hash("Another GPU");
    check_result(!gk_preferred(&key), "another GPU's class has it");
    check_result(gk_gemm_prefer_class("A GPU", plain, NULL) == GK_OK && !gk_any_preferred(),
                 "is not forgotten");
    check_result(gk_gemm_prefer_class("A GPU", plain, row) == GK_OK, "%s", gk_last_error());
    gk_gemm_prefer_none();
    check_result(!gk_any_preferred(), "is not forgotten with all");
    check_refused(gk_gemm_prefer(&cpu, &g, "any"), GK_ERR_UNSUPPORTED, "got a CPU one");
#else
    const char *words = "built without CUDA";
    check_refused(gk_gemm_prefer_class("A GPU", "32x48x64:NN" PLAIN "abo", "any"),
                  GK_ERR_UNSUPPORTED, words);
    check_refused(gk_gemm_prefer(&cpu, &g, "any"), GK_ERR_UNSUPPORTED, words);
    check_refused(gk_cuda_device_name(0, &text), GK_ERR_DEVICE, words);
#endif
    check_refused(gk_gemm_class(&cpu, &g, &text), GK_ERR_UNSUPPORTED, "got a CPU one");
}

/* A caller compiled when gk_explanation ended in front of `preferred`: nothing behind its struct
 * may be written. */
static void check_older_caller(void) {
    const gk_context cpu = check_context(NULL, 1);
    gk_gemm_args g = product(2, 2, 8);
    gk_explanation whole = {.size = sizeof whole, .preferred = 9}, old;
    memset(&old, 0x55, sizeof old);
    old.size = offsetof(gk_explanation, preferred);
    const gk_explanation before = old;
    snprintf(check_case, sizeof check_case, "an older caller's explanation");
    check_result(gk_explain_gemm(&cpu, &g, &whole) == GK_OK && whole.preferred == 0, "%s",
                 gk_last_error());
    check_result(gk_explain_gemm(&cpu, &g, &old) == GK_OK, "%s", gk_last_error());
    check_result(
        memcmp(&old.instance, &whole.instance, old.size - offsetof(gk_explanation, instance)) == 0,
        "differs from today's");
    check_result(memcmp((char *)&old + old.size, (const char *)&before + old.size,
                        sizeof old - old.size) == 0,
                 "memory behind it was written");
    old.size -= 1;
    check_refused(gk_explain_gemm(&cpu, &g, &old), GK_ERR_ARGUMENT, "explanation.size");
}

int main(void) {
    check_classes();
    check_texts();
    check_table();
    check_threads();
    check_public();
    check_described();
    check_older_caller();
    return check_end();
}
