// SPDX-License-Identifier: BSD-3-Clause
// latency: the time of one load if the next load depends on it. A thread follows links, each of
// which is the address of the next.
//
//   shared             links in the block's own shared memory
//   DSMEM              links in the shared memory of the other block of a cluster, across the
//                      network between SMs
//   L1                 16 KiB of global memory, which L1 holds after the first round
//   constant, 1 KiB    the address is in a register, so the entry cannot be an operand; 32 KiB is
//                      more than the first constant cache is said to hold
//   L2                 8 MiB by __ldcg, which bypasses L1
//   HBM                512 MiB, which no cache holds
//
// Measured on one H100: shared 12, DSMEM 97, L1 17, constant 33 (both), L2 144, HBM 349 ns.
//
// One thread hides nothing, unlike the many threads of a real kernel. The figures tell how many
// bytes must be in flight: latency x rate.
#include "cuda/ptx/cluster_reads.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/smem.cuh"
#include "measure.cuh"

enum {
    STEPS = 1 << 16,
    THREADS = 128,
    ENTRIES = 1024, // links in shared memory, 16 bytes each
    LINE = 128,     // bytes between links in global memory: one a line
    APART = 37      // entries from a link to the next: odd, so that a round visits all
};

// ---- shared memory of this block, or of the last block of the cluster ---------------------------

template <int CLUSTER>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS)
    shared_kernel(const float *in, float *out, int steps) {
    __shared__ __align__(16) uint4 links[ENTRIES];
    const smem_addr first_s =
        CLUSTER > 1 ? mapa(cvta_to_shared(links), CLUSTER - 1) : cvta_to_shared(links);
    for (int i = threadIdx.x; i < ENTRIES; i += THREADS)
        links[i].x = first_s + (i + APART) % ENTRIES * 16;
    barrier_cluster_ordered(); // all links are written
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        smem_addr at_s = first_s;
#pragma unroll 16
        for (int i = 0; i < steps; ++i)
            at_s = CLUSTER > 1 ? ld_cluster_128(at_s).x : ld_shared_128(at_s).x;
        *out = at_s == first_s + (unsigned)steps * APART % ENTRIES * 16 ? *in : NAN;
    }
    __syncwarp();
    barrier_cluster_ordered(); // no block exits while its links are read
}

template <int CLUSTER> static void shared(const float *in, float *out, int, int steps) {
    shared_kernel<CLUSTER><<<CLUSTER, THREADS>>>(in, out, steps);
}

// ---- constant memory: a link is the offset of the next ------------------------------------------

template <int COUNT> struct Links {
    uint32_t offset[COUNT];
    constexpr Links() : offset() {
        for (int i = 0; i < COUNT; ++i) offset[i] = (i + APART) % COUNT * 4;
    }
};
__constant__ Links<256> links_1k = Links<256>();
__constant__ Links<8192> links_32k = Links<8192>();

template <int COUNT> __global__ void constant_kernel(const float *in, float *out, int steps) {
    const char *const first = (const char *)(COUNT == 256 ? links_1k.offset : links_32k.offset);
    uint32_t at = 0;
#pragma unroll 16
    for (int i = 0; i < steps; ++i) at = *(const uint32_t *)(first + at);
    *out = at == (unsigned)steps * APART % COUNT * 4 ? *in : NAN;
}
template <int COUNT> static void constant(const float *in, float *out, int, int steps) {
    constant_kernel<COUNT><<<1, 1>>>(in, out, steps);
}

// ---- global memory ------------------------------------------------------------------------------

static __host__ __device__ size_t after(size_t entry, size_t count) {
    return (entry + APART) % count;
}

__global__ void link_kernel(char *table, size_t count) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) *(char **)(table + i * LINE) = table + after(i, count) * LINE;
}
template <bool L1>
__global__ void global_kernel(const float *in, float *out, char *first, char *last, int steps) {
    char *at = first;
#pragma unroll 16
    for (int i = 0; i < steps; ++i)
        at = (char *)(L1 ? __ldca((unsigned long long *)at) : __ldcg((unsigned long long *)at));
    *out = at == last ? *in : NAN;
}
template <int KIB, bool L1> static void global(const float *in, float *out, int, int steps) {
    static char *table;
    const size_t count = (size_t)KIB * 1024 / LINE;
    if (!table) {
        MUST(cudaMalloc((void **)&table, count * LINE));
        link_kernel<<<(unsigned)((count + 255) / 256), 256>>>(table, count);
    }
    // HBM: each launch starts where the last one ended, so that L2 does not hold its entries
    static size_t first;
    const size_t last = (first + (size_t)steps * APART) % count;
    global_kernel<L1><<<1, 1>>>(in, out, table + first * LINE, table + last * LINE, steps);
    first = last;
}

static int out_size(int, int) { return 1; }
static bool good(const float *in, const float *out, int, int) {
    return *out == *in;
} // the kernel itself checks that it ended at the right link
static double clocks(double count) { return count / FIGURES.ghz; }

int main(void) {
    const char *const stalls =
        "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio";
    const char *const short_stalls =
        "smsp__average_warps_issue_stalled_short_scoreboard_per_issue_active.ratio";
    const pattern p = {"latency", out_size, good, 1, STEPS, 0, small_integer, false, "ns", STEPS};
    const variant variants[] = {
        {"shared", shared<1>, clocks(30), "30 clocks", short_stalls},
        {"DSMEM", shared<2>, clocks(180), "180 clocks", short_stalls},
        {"constant, 1 KiB", constant<256>, clocks(27), "27 clocks", "idc__requests.sum"},
        {"constant, 32 KiB", constant<8192>, clocks(90), "90 clocks", "idc__requests.sum"},
        {"L1", global<16, true>, clocks(34), "34 clocks",
         "l1tex__t_sectors_pipe_lsu_mem_global_op_ld_lookup_hit.sum"},
        {"L2", global<8192, false>, clocks(260), "260 clocks",
         "lts__t_sectors_op_read_lookup_hit.sum"},
        {"HBM", global<524288, false>, 440, "an idle memory", stalls},
    };
    const int sizes[][2] = {{1, 1}, {1, 17}, {1, 1000}, {1, STEPS}};
    return run(p, variants, sizes);
}
