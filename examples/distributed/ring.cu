/* SPDX-License-Identifier: BSD-3-Clause */
/* ring.cu: a ring all-reduce, compared with NCCL's. It shows how a collective works.
 *
 *     nvcc -std=c++17 -O3 -arch=sm_90 -I$NCCL/include examples/distributed/ring.cu \
 *         -L$NCCL/lib -l:libnccl.so.2 -o ring
 *     NCCL_NVLS_ENABLE=0 ./ring [MiB]
 *
 * One process uses all of its GPUs. N GPUs hold n bytes each, cut into N chunks.
 *
 * 1. Reduce-scatter, N - 1 steps: in step s, GPU r adds chunk r - s - 1 of GPU r - 1, which it
 * reads over the link, to its own. Afterwards chunk r + 1 of GPU r is the sum over all GPUs.
 * 2. All-gather, N - 1 steps: in step s, GPU r copies the finished chunk r - s of GPU r - 1 with
 * the copy engine.
 *
 * Each step moves n / N bytes over every link of the ring at the same time. So a GPU sends and
 * receives 2 (N - 1) / N n bytes in all, the least that is possible. Each chunk is summed along the
 * ring and then copied, so that all GPUs have the same bits.
 *
 * NCCL also cuts chunks further, so that transfers and sums overlap, and uses several rings; this
 * program does not. Sizes that are no multiple of N x 16 bytes are refused. Without nccl.h the
 * comparison is left out. */
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>
#if __has_include(<nccl.h>)
#include <nccl.h>
#define HAVE_NCCL 1
#endif

#define CHECK(call)                                                                                \
    do {                                                                                           \
        const cudaError_t e_ = (call);                                                             \
        if (e_ != cudaSuccess) {                                                                   \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(e_)); \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

/* ---- 1. the kernels ---- */

/* mine += theirs. `theirs` is on another GPU, so its loads go over the link. n: number of float4s.
 */
__global__ void add_from(float4 *mine, const float4 *theirs, size_t n) {
    const size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        const float4 x = theirs[i];
        float4 y = mine[i];
        y.x += x.x;
        y.y += x.y;
        y.z += x.z;
        y.w += x.w;
        mine[i] = y;
    }
}

__global__ void fill(float *x, size_t n, int rank) {
    const size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step)
        x[i] = (float)((i * 2654435761u >> 8) % 1000) * 0.001f + (float)rank;
}

/* ---- 2. the ring ---- */

struct Gpu {
    float *data;
    cudaStream_t stream;
    std::vector<cudaEvent_t> done; /* one per step */
};

static int mod(int a, int n) { return ((a % n) + n) % n; }

/* In each step GPU r reads the chunk that GPU r - 1 wrote in the step before, so it waits for that
 * step's event. No GPU overwrites a chunk that another one still reads: the chunk that GPU r writes
 * in a step is read by GPU r + 1 in the next step, and GPU r writes other chunks until then. */
static void all_reduce(std::vector<Gpu> &gpus, size_t n) {
    const int ranks = (int)gpus.size();
    const size_t chunk = n / ranks;
    for (int step = 0; step < 2 * (ranks - 1); ++step)
        for (int r = 0; r < ranks; ++r) {
            Gpu &mine = gpus[r], &before = gpus[mod(r - 1, ranks)];
            CHECK(cudaSetDevice(r));
            if (step > 0) CHECK(cudaStreamWaitEvent(mine.stream, before.done[step - 1], 0));
            const bool sums = step < ranks - 1;
            const size_t at =
                chunk * (size_t)mod(sums ? r - step - 1 : r - (step - ranks + 1), ranks);
            if (sums)
                add_from<<<132, 512, 0, mine.stream>>>(
                    (float4 *)(mine.data + at), (const float4 *)(before.data + at), chunk / 4);
            else
                CHECK(cudaMemcpyPeerAsync(mine.data + at, r, before.data + at, mod(r - 1, ranks),
                                          chunk * sizeof(float), mine.stream));
            CHECK(cudaGetLastError());
            CHECK(cudaEventRecord(mine.done[step], mine.stream));
        }
    /* The next call overwrites chunks that a neighbour may still read. */
    for (int r = 0; r < ranks; ++r) {
        CHECK(cudaSetDevice(r));
        CHECK(cudaStreamWaitEvent(gpus[r].stream, gpus[mod(r + 1, ranks)].done[2 * (ranks - 1) - 1],
                                  0));
    }
}

/* ---- 3. NCCL from C ---- */

#ifdef HAVE_NCCL
static std::vector<ncclComm_t> comms;

static void nccl_ok(ncclResult_t result) {
    if (result == ncclSuccess) return;
    fprintf(stderr, "nccl: %s\n", ncclGetErrorString(result));
    exit(1);
}

static void nccl_begin(int ranks) {
    comms.resize((size_t)ranks);
    nccl_ok(ncclCommInitAll(comms.data(), ranks, NULL)); /* one process: GPUs 0 to ranks - 1 */
}

/* One process makes the calls of all ranks. Outside of a group the first call would wait for the
 * others for ever. */
static void nccl_all_reduce(std::vector<Gpu> &gpus, size_t n) {
    nccl_ok(ncclGroupStart());
    for (size_t r = 0; r < gpus.size(); ++r)
        nccl_ok(ncclAllReduce(gpus[r].data, gpus[r].data, n, ncclFloat, ncclSum, comms[r],
                              gpus[r].stream));
    nccl_ok(ncclGroupEnd());
}

static void nccl_end(void) {
    for (ncclComm_t comm : comms) nccl_ok(ncclCommDestroy(comm));
}
#endif

/* ---- 4. check and time ---- */

static void wait_all(std::vector<Gpu> &gpus) {
    for (size_t r = 0; r < gpus.size(); ++r) {
        CHECK(cudaSetDevice((int)r));
        CHECK(cudaStreamSynchronize(gpus[r].stream));
    }
}

static void fill_all(std::vector<Gpu> &gpus, size_t n) {
    for (size_t r = 0; r < gpus.size(); ++r) {
        CHECK(cudaSetDevice((int)r));
        fill<<<528, 256, 0, gpus[r].stream>>>(gpus[r].data, n, (int)r);
        CHECK(cudaGetLastError());
    }
    wait_all(gpus);
}

/* The largest error over all GPUs against the sum in double, and whether all have the same bits. */
static double worst(std::vector<Gpu> &gpus, size_t n, bool *same) {
    std::vector<float> first(n), x(n);
    double error = 0;
    *same = true;
    for (size_t r = 0; r < gpus.size(); ++r) {
        CHECK(cudaSetDevice((int)r));
        std::vector<float> &to = r ? x : first;
        CHECK(cudaMemcpy(to.data(), gpus[r].data, n * sizeof(float), cudaMemcpyDeviceToHost));
        for (size_t i = 0; i < n; ++i) {
            double want = 0;
            for (size_t q = 0; q < gpus.size(); ++q)
                want += (double)((float)((i * 2654435761u >> 8) % 1000) * 0.001f + (float)q);
            error = fmax(error, fabs(to[i] - want));
            *same = *same && to[i] == first[i];
        }
    }
    return error;
}

template <class Call>
static void report(const char *name, std::vector<Gpu> &gpus, size_t n, Call call) {
    fill_all(gpus, n);
    call(gpus, n);
    wait_all(gpus);
    bool same;
    const double error = worst(gpus, n, &same);
    const int repeats = 20, ranks = (int)gpus.size();
    cudaEvent_t begin, end;
    CHECK(cudaSetDevice(0));
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    CHECK(cudaEventRecord(begin, gpus[0].stream));
    for (int i = 0; i < repeats; ++i) call(gpus, n);
    CHECK(cudaSetDevice(0));
    CHECK(cudaEventRecord(end, gpus[0].stream));
    wait_all(gpus);
    float ms;
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    const double bytes = 2.0 * (ranks - 1) / ranks * (double)n * sizeof(float);
    printf("%-6s %9.1f us, %8.2f MB sent a GPU, %6.1f GB/s a direction, largest error %.1e, the "
           "GPUs %s\n",
           name, ms * 1e3 / repeats, bytes / 1e6, bytes / (ms / repeats * 1e-3) / 1e9, error,
           same ? "agree bit for bit" : "DIFFER");
    if (!same || error > 1e-5) exit(1);
}

int main(int argc, char **argv) {
    int ranks = 0;
    if (cudaGetDeviceCount(&ranks) != cudaSuccess || ranks < 2) {
        printf("a ring needs two GPUs, here are %d\n", ranks);
        return 0;
    }
    const size_t n = (size_t)(argc > 1 ? atof(argv[1]) : 64) * ((1 << 20) / sizeof(float)) /
                     (4 * ranks) * (4 * ranks);
    if (n == 0) return fprintf(stderr, "usage: ring [MiB], at least 1\n"), 2;
    std::vector<Gpu> gpus((size_t)ranks);
    for (int r = 0; r < ranks; ++r) {
        CHECK(cudaSetDevice(r));
        const int before = mod(r - 1, ranks), behind = mod(r + 1, ranks);
        for (int peer : {before, behind}) {
            int can = 0;
            CHECK(cudaDeviceCanAccessPeer(&can, r, peer));
            if (!can) return fprintf(stderr, "GPU %d cannot read GPU %d\n", r, peer), 2;
            const cudaError_t e = cudaDeviceEnablePeerAccess(peer, 0);
            if (e == cudaErrorPeerAccessAlreadyEnabled)
                (void)cudaGetLastError(); /* with two GPUs, both neighbours are the same GPU */
            else
                CHECK(e);
        }
        CHECK(cudaMalloc(&gpus[r].data, n * sizeof(float)));
        CHECK(cudaStreamCreateWithFlags(&gpus[r].stream, cudaStreamNonBlocking));
        gpus[r].done.resize((size_t)(2 * (ranks - 1)));
        for (cudaEvent_t &event : gpus[r].done)
            CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    }
    printf("%d GPUs, %.1f MB each\n", ranks, (double)n * sizeof(float) / 1e6);
    report("ring", gpus, n, all_reduce);
#ifdef HAVE_NCCL
    nccl_begin(ranks);
    report("NCCL", gpus, n, nccl_all_reduce);
    nccl_end();
#endif
    return 0;
}
