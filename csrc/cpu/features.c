/* SPDX-License-Identifier: BSD-3-Clause */
/* features.c: what this machine can run. With vec.h the only file that asks about instruction sets.
 * GK_X86_ISAS is defined where the build compiled the x86 sets; elsewhere base is all there is. */
#include "kernels.h"

#if defined(GK_X86_ISAS)
#include <cpuid.h>
#include <immintrin.h>
#include <stdatomic.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

const char *const gk_isa_names[GK_NUM_ISAS] = {"base",       "avx2",         "avx512",
                                               "avx512bf16", "amx_emulated", "amx"};

#if defined(GK_X86_ISAS)
/* By cpuid: __builtin_cpu_supports of clang 14 does not know these names. The system's leave is
 * that of avx2, avx512f. */
static bool has_f16c(void) {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx >> 29 & 1);
}
static bool has_bf16_and_vnni(void) {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (ecx >> 11 & 1) &&
           __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 5 & 1);
}
#endif

#if defined(GK_X86_ISAS) && defined(GK_HAS_AMX) && defined(__linux__)
/* The processor has tiles of the kernels' palette, 8 of 16 rows of 64 bytes, and their products of
 * bfloat16 and int8, which no processor has one of. */
static bool has_tiles(void) {
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || !(edx >> 22 & 1) ||
        (edx >> 24 & 3) != 3)
        return false;
    return __get_cpuid_count(0x1d, 1, &eax, &ebx, &ecx, &edx) && eax >> 16 == 1024 &&
           (ebx & 0xffff) == 64 && ebx >> 16 == 8 && (ecx & 0xffff) == 16;
}

/* And the system saves them, and lets this process have them: an old kernel does not know the
 * request, a container may refuse it, and a signal stack that is too small for them does. Linux,
 * Documentation/arch/x86/xstate.rst: the permission is of the process, so of all its threads, a
 * forked child inherits it, and exec drops it. Asked for once. A first product shows that the tiles
 * work. */
__attribute__((target("xsave"))) static bool may_use_tiles(void) {
    enum {
        REQUEST = 0x1023,
        TILE_DATA = 18
    }; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    unsigned eax, ebx, ecx, edx;
    /* OSXSAVE */
    if (!has_tiles() || !__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx >> 27 & 1)) return false;
    return (_xgetbv(0) >> 17 & 3) == 3 && syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0 &&
           gk_tiles_multiply_amx();
}
#else
static bool has_tiles(void) { return false; }
static bool may_use_tiles(void) { return false; }
#endif

static gk_isa find_best(void) {
#if defined(GK_X86_ISAS)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !has_f16c())
        return GK_ISA_BASE;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        return GK_ISA_AVX2;
    if (!has_bf16_and_vnni()) return GK_ISA_AVX512;
    return may_use_tiles() ? GK_ISA_AMX : GK_ISA_AVX512BF16;
#else
    return GK_ISA_BASE;
#endif
}

/* Found once: every call asks, and a cpuid takes 20 to 70 us under a hypervisor. */
static gk_isa best(void) {
#if defined(GK_X86_ISAS)
    static atomic_int found; /* 1 + the set; 0 until asked for */
    int known = atomic_load_explicit(&found, memory_order_relaxed);
    if (known == 0) {
        known = 1 + (int)find_best();
        atomic_store_explicit(&found, known, memory_order_relaxed);
    }
    return (gk_isa)(known - 1);
#else
    return find_best();
#endif
}

/* The sets nest in what they hold. */
bool gk_cpu_has(gk_isa isa) {
    return isa <= best() || (isa == GK_ISA_AMX_EMULATED && best() >= GK_ISA_AVX512BF16);
}

bool gk_cpu_fetches_near(void) {
#if defined(GK_X86_ISAS)
    /* of AMD, 1 of others; 0 until asked for, since cpuid is slow under a hypervisor */
    static atomic_int family;
    int known = atomic_load_explicit(&family, memory_order_relaxed);
    if (known == 0) {
        unsigned leaf, vendor, model = 0, unused;
        __cpuid(0, leaf, vendor, unused, unused);
        if (vendor == signature_AMD_ebx) __cpuid(1, model, unused, unused, unused);
        known = vendor == signature_AMD_ebx ? (int)((model >> 8 & 15) + (model >> 20 & 255)) : 1;
        atomic_store_explicit(&family, known, memory_order_relaxed);
    }
    return known >= 26;
#else
    return false;
#endif
}

/* Vectors of that width themselves are those of the set that asks. */
bool gk_cpu_multiplies_quads(bool wide) {
#if defined(GK_X86_ISAS)
    static atomic_int found; /* 4 and a bit for each width; 0 until asked for */
    int known = atomic_load_explicit(&found, memory_order_relaxed);
    if (known == 0) {
        unsigned eax, ebx, ecx, edx;
        known = 4;
        if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) known |= (int)(ecx >> 11 & 1) << 1;
        if (__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx)) known |= (int)(eax >> 4 & 1);
        atomic_store_explicit(&found, known, memory_order_relaxed);
    }
    return known >> wide & 1;
#else
    (void)wide;
    return false;
#endif
}

bool gk_cpu_is_intel(void); /* gemm.c, too */
bool gk_cpu_is_intel(void) {
#if defined(GK_X86_ISAS)
    static atomic_int found; /* 1 of others, 2 of Intel; 0 until asked for */
    int known = atomic_load_explicit(&found, memory_order_relaxed);
    if (known == 0) {
        unsigned leaf, vendor, unused;
        __cpuid(0, leaf, vendor, unused, unused);
        known = vendor == signature_INTEL_ebx ? 2 : 1;
        atomic_store_explicit(&found, known, memory_order_relaxed);
    }
    return known == 2;
#else
    return false;
#endif
}

/* The sets do not nest in speed: the best one may be left to who asks for it by name. */
static gk_isa usual(void) {
    if (best() != GK_ISA_AVX512BF16) return best();
    return gk_cpu_is_intel() ? GK_ISA_AVX512 : GK_ISA_AVX512BF16; /* see gk_cpu_isa_reason */
}

const char *gk_cpu_isa(void) { return gk_isa_names[usual()]; }

/* Measured on a Xeon of model 207 (Emerald Rapids) whose AMX is hidden, one core, GFLOP/s of
 * bfloat16 by avx512 | avx512bf16, and
 * of float32: 512 cubed 158 | 92, 163; attention forward, S 1024 and head_dim 128 138 | 80, 130; backward 145 | 80, 139; decoding
 * 10.7 | 10.1 GB/s; small M, read in place, the same. */
const char *gk_cpu_isa_reason(void) {
    if (usual() == best()) return "";
    if (has_tiles())
        return "avx512bf16 is slower here, and this process has no AMX: an old kernel, a container "
               "or a signal "
               "stack too small for tiles refuses it, or a first product came out wrong";
    return "avx512bf16 is slower here: VDPBF16PS of Intel's cores multiplies bfloat16 at half the "
           "rate of float32";
}

const char *gk_cpu_isas(void) {
    static const char *const lists[GK_NUM_ISAS] = {"base",
                                                   "base,avx2",
                                                   "base,avx2,avx512",
                                                   "base,avx2,avx512,avx512bf16",
                                                   "base,avx2,avx512,avx512bf16",
                                                   "base,avx2,avx512,avx512bf16,amx"};
    return lists[best()];
}
