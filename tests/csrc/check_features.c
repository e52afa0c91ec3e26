/* SPDX-License-Identifier: BSD-3-Clause */
/* check_features: which instruction set is the default on processors and systems other than this
 * one. features.c is compiled into this program, in place of the library's copy. A table answers
 * its questions to the processor (CPUID, XGETBV) and to Linux (arch_prctl). In one case Linux
 * itself answers, through a filter that refuses the request as containers do.
 *
 * features.c remembers what it finds, so each case is a process of its own. */
#define _GNU_SOURCE
#include <stdio.h>

#if defined(GK_X86_ISAS) && defined(GK_HAS_AMX) && defined(__linux__)
#include <cpuid.h>
#include <immintrin.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static bool here_has_avx512(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

/* ---- the simulated machine ------------------------------------------------------------------- */
enum {
    ASKS_LINUX = -1 /* as `refusal`: the request goes to the real system */
};
typedef struct machine {
    const char *name;
    unsigned vendor;                /* the first four letters, as CPUID returns them */
    bool avx512, bf16, tiles, save; /* save: OSXSAVE */
    unsigned rows;                  /* rows of a tile */
    unsigned long long xcr0;
    int refusal; /* errno of the request; 0: granted */
    bool filter, multiplies;
    const char *usual, *best, *reason; /* expected results; `reason` is a part of the text */
} machine;
static machine now;
static int requests;

static int fake_cpuid(unsigned leaf, unsigned sub, unsigned *eax, unsigned *ebx, unsigned *ecx,
                      unsigned *edx) {
    *eax = *ebx = *ecx = *edx = 0;
    if (leaf == 0) *ebx = now.vendor;
    if (leaf == 1) *ecx = 1u << 29 /* f16c */ | (unsigned)now.save << 27;
    if (leaf == 7 && sub == 0) {
        *ecx = (unsigned)now.bf16 << 11;
        *edx = now.tiles ? 1u << 22 | 1u << 24 | 1u << 25 : 0;
    }
    if (leaf == 7 && sub == 1) *eax = (unsigned)now.bf16 << 5;
    if (leaf == 0x1d && sub == 1 && now.tiles) {
        *eax = 1024u << 16 | 8192;
        *ebx = 8u << 16 | 64;
        *ecx = now.rows;
    }
    return 1;
}
static bool fake_supports(const char *name) { return now.avx512 || !strstr(name, "avx512"); }
static bool fake_multiplies(void) { return now.multiplies; }
static long fake_syscall(long number, long request, long feature) {
    ++requests;
    if (number != SYS_arch_prctl || request != 0x1023 || feature != 18) return errno = ENOSYS, -1;
    if (now.refusal == ASKS_LINUX) return syscall(number, request, feature);
    return now.refusal ? (errno = now.refusal, -1) : 0;
}

#define __get_cpuid(leaf, a, b, c, d) fake_cpuid(leaf, 0, a, b, c, d)
#define __get_cpuid_count(leaf, sub, a, b, c, d) fake_cpuid(leaf, sub, a, b, c, d)
#undef __cpuid
#define __cpuid(leaf, a, b, c, d) fake_cpuid(leaf, 0, &(a), &(b), &(c), &(d))
#undef _xgetbv
#define _xgetbv(index) (now.xcr0)
#define __builtin_cpu_supports(name) fake_supports(name)
#define syscall(...) fake_syscall(__VA_ARGS__)
#define gk_tiles_multiply_amx fake_multiplies
#include "../../csrc/cpu/features.c"
#undef syscall
#undef gk_tiles_multiply_amx

#include "check.h"

/* ---- one case, in a process of its own ------------------------------------------------------- */
/* Makes Linux refuse this request, and nothing else, from here on. Returns false if the system
 * has no filters. */
static bool refuse_the_request(void) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_arch_prctl, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[0])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0x1023, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {CHECK_COUNT(code), code};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

/* A product of bfloat16 ones with the given instruction set, or the default one. */
static gk_status product(const char *isa, uint16_t *out) {
    enum {
        SIZE = 40
    };
    static uint16_t a[SIZE * SIZE];
    static char workspace[1 << 20] __attribute__((aligned(64)));
    for (int i = 0; i < SIZE * SIZE; ++i) {
        a[i] = gk_f32_to_bf16(1);
        out[i] = 0;
    }
    gk_context ctx = check_context(isa, 1);
    gk_gemm_args args = GK_GEMM_ARGS_INIT;
    gk_tensor t = {
        .data = a, .dtype = GK_BF16, .ndim = 2, .shape = {SIZE, SIZE}, .stride = {SIZE, 1}};
    args.a = args.b = args.out = t;
    args.out.data = out;
    args.workspace = workspace;
    args.workspace_bytes = sizeof workspace;
    const gk_status status = gk_gemm(&ctx, &args);
    for (int i = 0; status == GK_OK && i < SIZE * SIZE; ++i)
        check_result(gk_bf16_to_f32(out[i]) == SIZE, "element %d is %g", i,
                     (double)gk_bf16_to_f32(out[i]));
    return status;
}

static void check_machine(void) {
    static uint16_t out[1600];
    const bool amx = strcmp(now.best, "amx") == 0,
               may_ask = now.avx512 && now.bf16 && now.tiles && now.save;
    snprintf(check_case, sizeof check_case, "%s", now.name);
    if (now.filter && !refuse_the_request()) {
        printf("this system takes no filters: the table answers in their place\n");
        now.refusal = EPERM;
    }
    for (int again = 0; again < 2; ++again) {
        const char *last = strrchr(gk_cpu_isas(), ',');
        check_result(strcmp(gk_cpu_isa(), now.usual) == 0, "the default is %s, not %s",
                     gk_cpu_isa(), now.usual);
        check_result(last && strcmp(last + 1, now.best) == 0, "has %s, not up to %s", gk_cpu_isas(),
                     now.best);
        check_result(gk_cpu_has(GK_ISA_AMX) == amx &&
                         gk_cpu_has(GK_ISA_AVX512BF16) == (now.avx512 && now.bf16) &&
                         gk_cpu_has(GK_ISA_AMX_EMULATED) == (now.avx512 && now.bf16),
                     "gk_cpu_has differs from the list");
        check_result(now.reason[0] ? strstr(gk_cpu_isa_reason(), now.reason) != NULL
                                   : !gk_cpu_isa_reason()[0],
                     "the reason is \"%s\"", gk_cpu_isa_reason());
    }
    check_result(requests == (may_ask && now.rows == 16 && (now.xcr0 >> 17 & 3) == 3),
                 "asked Linux %d times", requests);
    if (amx) return; /* its tiles do not exist on this machine */
    check_refused(product("amx", out), GK_ERR_DEVICE, "\"amx\"");
    /* and the set that is used instead works */
    if (strcmp(now.usual, "avx512") == 0 && here_has_avx512())
        check_result(product(NULL, out) == GK_OK, "%s", gk_last_error());
}

#define INTEL signature_INTEL_ebx
#define AMD signature_AMD_ebx
#define XEON_OF(text, saves, tile_rows)                                                        \
    .name = text, .vendor = INTEL, .avx512 = true, .bf16 = true, .tiles = true, .save = saves, \
    .rows = tile_rows
#define XEON(text) XEON_OF(text, true, 16)
#define REFUSED .usual = "avx512", .best = "avx512bf16", .reason = "this process has no AMX"
enum {
    STATES = 0x600e7, /* XCR0 with both tile states */
    NO_STATES = 0xe7
};
static const machine machines[] = {
    {XEON("amx"), .xcr0 = STATES, .multiplies = true, .usual = "amx", .best = "amx", .reason = ""},
    {XEON("Linux before 5.16"), .xcr0 = STATES, .refusal = EINVAL, .multiplies = true, REFUSED},
    {XEON("a container"), .xcr0 = STATES, .refusal = EPERM, .multiplies = true, REFUSED},
    {XEON("a small signal stack"), .xcr0 = STATES, .refusal = ENOSPC, .multiplies = true, REFUSED},
    {XEON("Linux without it"), .xcr0 = STATES, .refusal = EOPNOTSUPP, .multiplies = true, REFUSED},
    {XEON("filtered by Linux"), .xcr0 = STATES, .refusal = ASKS_LINUX, .filter = true,
     .multiplies = true, REFUSED},
    {XEON("a wrong product"), .xcr0 = STATES, .multiplies = false, REFUSED},
    {XEON("states not saved"), .xcr0 = NO_STATES, .multiplies = true, REFUSED},
    {XEON("one state saved"), .xcr0 = NO_STATES | 1 << 17, .multiplies = true, REFUSED},
    {XEON_OF("no OSXSAVE", false, 16), .xcr0 = STATES, .multiplies = true, REFUSED},
    {XEON_OF("another palette", true, 8), .xcr0 = STATES, .multiplies = true, .usual = "avx512",
     .best = "avx512bf16", .reason = "VDPBF16PS"},
    {.name = "Intel, tiles hidden",
     .vendor = INTEL,
     .avx512 = true,
     .bf16 = true,
     .save = true,
     .xcr0 = STATES,
     .usual = "avx512",
     .best = "avx512bf16",
     .reason = "VDPBF16PS"},
    {.name = "Zen 4",
     .vendor = AMD,
     .avx512 = true,
     .bf16 = true,
     .save = true,
     .xcr0 = NO_STATES,
     .usual = "avx512bf16",
     .best = "avx512bf16",
     .reason = ""},
    {.name = "Ice Lake",
     .vendor = INTEL,
     .avx512 = true,
     .save = true,
     .usual = "avx512",
     .best = "avx512",
     .reason = ""},
    {.name = "Haswell",
     .vendor = INTEL,
     .save = true,
     .usual = "avx2",
     .best = "avx2",
     .reason = ""},
};

int main(void) {
    for (int i = 0; i < CHECK_COUNT(machines); ++i) {
        fflush(stdout);
        const pid_t child = fork();
        if (child == 0) {
            now = machines[i];
            check_num_passed = check_num_failed = 0;
            check_machine();
            fflush(stdout);
            _exit(check_num_failed != 0 || check_num_passed < 8);
        }
        int status = -1;
        const bool ended = child > 0 && waitpid(child, &status, 0) == child;
        check_result(ended && WIFEXITED(status) && WEXITSTATUS(status) == 0, "%s: status %d",
                     machines[i].name, status);
    }
    return check_end();
}
#else
int main(void) {
    printf("no AMX in this build\n");
    return 0;
}
#endif
