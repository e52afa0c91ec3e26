/* features.c: what this machine can run. With vec.h the only file that asks about instruction sets.
 * GK_X86_ISAS is defined where the build compiled the x86 sets; elsewhere base is all there is. */
#include "kernels.h"

#if defined(GK_X86_ISAS)
#include <cpuid.h>
#include <stdatomic.h>
#endif

const char *const gk_isa_names[GK_NUM_ISAS] = {"base", "avx2", "avx512", "avx512bf16"};

#if defined(GK_X86_ISAS)
/* By cpuid: __builtin_cpu_supports of clang 14 does not know these names. The system's leave is that of avx2, avx512f. */
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

#if defined(GK_X86_ISAS)
/* One bit for each set that this machine has. */
static unsigned ask_cpu(void) {
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    unsigned sets = 1u << GK_ISA_BASE;
    if (avx2) sets |= 1u << GK_ISA_AVX2;
    if (avx512) sets |= 1u << GK_ISA_AVX512;
    if (avx512 && has_bf16_and_vnni()) sets |= 1u << GK_ISA_AVX512BF16;
    return sets;
}
#endif

bool gk_cpu_has(gk_isa isa) {
#if defined(GK_X86_ISAS)
    static atomic_uint sets; /* 0 until asked for: a cpuid takes 20 us under a hypervisor, and every call asks */
    unsigned known = atomic_load_explicit(&sets, memory_order_relaxed);
    if (known == 0) {
        known = ask_cpu();
        atomic_store_explicit(&sets, known, memory_order_relaxed);
    }
    return known >> isa & 1;
#else
    return isa == GK_ISA_BASE;
#endif
}

bool gk_cpu_fetches_near(void) {
#if defined(GK_X86_ISAS)
    static atomic_int family; /* of AMD, 1 of others; 0 until asked for, since cpuid is slow under a hypervisor */
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

const char *gk_cpu_isa(void) {
    int best = GK_ISA_BASE;
    for (int i = 0; i < GK_NUM_ISAS; ++i)
        if (gk_cpu_has((gk_isa)i)) best = i;
    return gk_isa_names[best];
}

const char *gk_cpu_isas(void) {
    /* the sets nest, so the list is one of four */
    static const char *const lists[GK_NUM_ISAS] = {"base", "base,avx2", "base,avx2,avx512",
                                                   "base,avx2,avx512,avx512bf16"};
    int n = 0;
    while (n + 1 < GK_NUM_ISAS && gk_cpu_has((gk_isa)(n + 1))) ++n;
    return lists[n];
}
