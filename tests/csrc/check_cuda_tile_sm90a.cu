// SPDX-License-Identifier: BSD-3-Clause
// check_cuda_tile_sm90a: tests the wrappers and functions that only Hopper has on such a device:
// mbarriers, clusters, TMA, WGMMA, the ring, and overlapping launches.
//
// The counterpart of check_cuda_tile. Each function has one kernel on integer data, and the host
// compares the result exactly with the constexpr maps of csrc/cuda/layout. Prints a line per
// function. The last line is "N passed, N failed", "no CUDA device" or "no sm_90 device". Exits
// with 1 on a failure. A wait that never ends traps after some seconds; a hang that no trap ends is
// ended by the host's alarm.
#include "cuda/host/launch.cuh"
#include "cuda/host/tensormap.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/griddepcontrol.cuh"
#include "cuda/ptx/laneid.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/layout/atoms.cuh"
#include "cuda/tile/tma_ring.cuh"
#include "cuda/product/gemm/tf32.cuh"
#include "cuda/layout/wgmma.cuh"
#include "check_tile.cuh"

#include <math.h>
#include <type_traits>

enum {
    WARPGROUP = 128
};

// mbarrier_wait with a limit of some 5 s at 1.7 GHz, far longer than a run under a sanitizer needs.
static __device__ void wait(smem_addr barrier_s, unsigned parity) {
    const long long start = clock64();
    while (!mbarrier_try_wait_parity(barrier_s, parity))
        if (clock64() - start > (long long)1 << 33) __trap();
}

// The next multiple of 1024 in dynamic shared memory, where a swizzled tile must start. The launch
// must ask for 1 KB more.
static __device__ smem_addr aligned_smem(const unsigned char *smem) {
    return (cvta_to_shared(smem) + WGMMA_BLOCK_BYTES - 1) / WGMMA_BLOCK_BYTES * WGMMA_BLOCK_BYTES;
}

// Barrier of all threads of a cluster. Their earlier writes to shared memory must be visible before
// other blocks' copies.
static __device__ void cluster_sync() {
    __threadfence();
    barrier_cluster();
    __threadfence();
}

// Element i of a tensor of 16-bit values. Neighbours differ and none is zero.
static uint16_t value_of(int64_t i) { return (uint16_t)((uint32_t)i * 2654435761u >> 15) | 1; }

template <auto KERNEL> static void allow(int bytes) {
    must(cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
         "shared memory");
}

static CUtensorMap map_of(const TensorShape &shape, int box0, int box1) {
    CUtensorMap map;
    const int each = (int)gk_dtype_bytes(shape.dtype);
    if (make_tensor_map("check", shape, smem_rows(each, box0 * each, box1), &map) == GK_OK)
        return map;
    printf("FAILED %s\n%d passed, %d failed\n", gk_last_error(), num_passed, num_failed + 1);
    exit(1);
}

// ---- mbarrier -----------------------------------------------------------------------------------

enum {
    ASKED = 10,
    PHASES = 12
};

// One thread polls after each arrival. Then all threads pass PHASES phases and read what their
// neighbour wrote before. The launch is a cluster because st.async needs one; the second block does
// nothing.
static __global__ void __cluster_dims__(2) mbarrier_kernel(int *out_g) {
    __shared__ __align__(16) float landed[4];
    __shared__ __align__(8) uint64_t barriers[2];
    __shared__ int words[2][64];
    const int t = threadIdx.x;
    const smem_addr one_s = cvta_to_shared(&barriers[0]), all_s = one_s + 8;
    if (cluster_ctarank() != 0) return;
    if (t == 0) {
        mbarrier_init(one_s, 3);
        mbarrier_init(all_s, 64);
        fence_mbarrier_init();
        int *ask = out_g;
        *ask++ = mbarrier_try_wait_parity(one_s, 1); // the phase before the first
        *ask++ = mbarrier_try_wait_parity(one_s, 0);
        mbarrier_arrive(one_s);
        mbarrier_arrive(one_s);
        *ask++ = mbarrier_try_wait_parity(one_s, 0); // two of three arrivals
        mbarrier_arrive(one_s);
        *ask++ = mbarrier_try_wait_parity(one_s, 0);
        *ask++ = mbarrier_try_wait_parity(one_s, 1); // the second phase
        mbarrier_arrive(one_s);
        mbarrier_arrive(one_s);
        mbarrier_arrive_expect_tx(one_s, 16);
        *ask++ = mbarrier_try_wait_parity(one_s, 1); // all have arrived, the bytes have not
        st_async_128(mapa(cvta_to_shared(landed), 0), 1, 2, 3, 4, mapa(one_s, 0));
        wait(one_s, 1);
        const uint4 v = ld_shared_128(cvta_to_shared(landed));
        *ask++ = __uint_as_float(v.x) == 1 && __uint_as_float(v.y) == 2 &&
                 __uint_as_float(v.z) == 3 && __uint_as_float(v.w) == 4;
        *ask++ = mbarrier_try_wait_parity(one_s, 1);
        *ask++ = mbarrier_try_wait_parity(one_s, 0); // the third
        mbarrier_arrive(one_s);
        mbarrier_arrive(one_s);
        mbarrier_arrive(one_s);
        *ask++ = mbarrier_try_wait_parity(one_s, 0);
    }
    __syncthreads();
    for (int phase = 0; phase < PHASES; ++phase) {
        words[phase % 2][t] = phase * 100 + t;
        mbarrier_arrive(all_s);
        wait(all_s, phase % 2);
        out_g[ASKED + phase * 64 + t] = words[phase % 2][(t + 37) % 64];
    }
}

// Block 0 waits for 32 arrivals from block 1, which waits for 8 from block 0. An arrival at the
// wrong block would complete no phase.
static __global__ void __cluster_dims__(2) remote_kernel(int *out_g) {
    __shared__ __align__(8) uint64_t barrier;
    const int rank = (int)cluster_ctarank(), t = threadIdx.x;
    const smem_addr barrier_s = cvta_to_shared(&barrier);
    if (t == 0) {
        mbarrier_init(barrier_s, rank == 0 ? 32 : 8);
        fence_mbarrier_init();
    }
    barrier_cluster();
    int phases = 0;
    for (; phases < PHASES; ++phases) {
        if (rank == 0 && t < 8) mbarrier_arrive_cluster(barrier_s, 1);
        wait(barrier_s, phases % 2);
        __syncwarp(); // otherwise others could be two phases ahead of a lane
        if (rank == 1) mbarrier_arrive_cluster(barrier_s, 0);
    }
    out_g[rank * 32 + t] = phases + 100 * mbarrier_try_wait_parity(barrier_s, PHASES % 2);
    barrier_cluster();
}

static void check_mbarrier(const buffer &out) {
    const int expected[ASKED] = {1, 0, 0, 1, 0, 0, 1, 1, 0, 1}, *got = (const int *)out.host;
    mbarrier_kernel<<<2, 64>>>((int *)out.device);
    to_host(out);
    for (int i = 0; i < ASKED; ++i)
        check(got[i] == expected[i], "question", i, got[i], expected[i]);
    for (int i = 0; i < PHASES * 64; ++i) {
        const int word = i / 64 * 100 + (i + 37) % 64;
        check(got[ASKED + i] == word, "phase x thread", i, got[ASKED + i], word);
    }
    verb("mbarrier: init, arrive, expect_tx, parities");
    remote_kernel<<<2, 32>>>((int *)out.device);
    to_host(out);
    for (int i = 0; i < 64; ++i) check(got[i] == PHASES, "lane", i, got[i], PHASES);
    verb("mbarrier_arrive_cluster");
}

// ---- st.async -----------------------------------------------------------------------------------

// Two blocks exchange 128 x 4 floats in every round, as gemm_sm90a exchanges its halves.
static __global__ void __cluster_dims__(2) exchange_kernel(float *out_g) {
    __shared__ __align__(16) float came[WARPGROUP * 4];
    __shared__ __align__(8) uint64_t barriers[2];
    const int rank = (int)cluster_ctarank(), t = threadIdx.x;
    const smem_addr full_s = cvta_to_shared(barriers), empty_s = full_s + 8,
                    from_s = cvta_to_shared(came) + t * 16;
    if (t == 0) {
        mbarrier_init(full_s, 1);
        mbarrier_init(empty_s, 4);
        fence_mbarrier_init();
    }
    barrier_cluster();
    for (int round = 0; round < PHASES; ++round) {
        if (t == 0) mbarrier_arrive_expect_tx(full_s, sizeof came);
        wait(empty_s, round % 2 ^ 1);
        const float x = (float)((round * 2 + rank) * 1000 + t * 4);
        st_async_128(mapa(from_s, rank ^ 1), x, x + 1, x + 2, x + 3, mapa(full_s, rank ^ 1));
        wait(full_s, round % 2);
        const uint4 v = ld_shared_128(from_s);
        __syncwarp();
        if (t % 32 == 0) mbarrier_arrive_cluster(empty_s, rank ^ 1);
        float *to_g = out_g + ((round * 2 + rank) * WARPGROUP + t) * 4;
        to_g[0] = __uint_as_float(v.x);
        to_g[1] = __uint_as_float(v.y);
        to_g[2] = __uint_as_float(v.z);
        to_g[3] = __uint_as_float(v.w);
    }
    barrier_cluster();
}

static void check_exchange(const buffer &out) {
    exchange_kernel<<<2, WARPGROUP>>>((float *)out.device);
    to_host(out);
    for (int i = 0; i < PHASES * 2 * 512; ++i) {
        const float got = ((float *)out.host)[i],
                    expected = (float)((i / 512 ^ 1) * 1000 + i % 512);
        check(got == expected, "float", i, got, expected);
    }
    verb("st_async_128 and mapa between two blocks");
}

// ---- cp.async.bulk ------------------------------------------------------------------------------

enum {
    BULKS = 5,
    BULK_ROOM = 2048 // bytes of shared memory for each
};

static constexpr int bulk_bytes(int i) {
    return i == 0 ? 16 : i == 1 ? 48 : i == 2 ? 288 : i == 3 ? 1040 : 2048;
}

// One lane for each bulk copy, each with its own buffer.
static __global__ void bulk_kernel(uint32_t *out_g, const unsigned char *in_g) {
    __shared__ __align__(128) unsigned char bulk[BULKS * BULK_ROOM];
    __shared__ __align__(8) uint64_t barrier;
    const int t = threadIdx.x;
    const smem_addr bulk_s = cvta_to_shared(bulk), barrier_s = cvta_to_shared(&barrier);
    for (int i = t; i < BULKS * BULK_ROOM / 4; i += WARPGROUP) ((uint32_t *)bulk)[i] = 0x77777777;
    if (t == 0) {
        mbarrier_init(barrier_s, BULKS);
        fence_mbarrier_init();
    }
    fence_proxy_async();
    __syncthreads();
    if (t < BULKS) {
        mbarrier_arrive_expect_tx(barrier_s, bulk_bytes(t));
        bulk_load(bulk_s + t * BULK_ROOM, in_g + t * 4000 + t * 16, bulk_bytes(t), barrier_s);
    }
    wait(barrier_s, 0);
    for (int i = t; i < BULKS * BULK_ROOM / 4; i += WARPGROUP) out_g[i] = ((uint32_t *)bulk)[i];
}

static void check_bulk(const buffer &in, const buffer &out) {
    for (int i = 0; i < 40000; ++i) in.host[i] = (unsigned char)value_of(i);
    to_device(in);
    bulk_kernel<<<1, WARPGROUP>>>((uint32_t *)out.device, in.device);
    to_host(out);
    for (int i = 0; i < BULKS * BULK_ROOM; ++i) {
        const int copy = i / BULK_ROOM, at = i % BULK_ROOM;
        const int expected = at < bulk_bytes(copy) ? in.host[copy * 4016 + at] : 0x77;
        check(out.host[i] == expected, "byte", i, out.host[i], expected);
    }
    verb("bulk_load");
}

// ---- sums across a cluster ----------------------------------------------------------------------

enum {
    MOST_BLOCKS = 4
};

struct AcrossParams {
    float *out_g; // [rounds][block][128][4]
};

// In each round every block adds up what all blocks sent to it. The launch sets the cluster's size.
static __global__ void across_kernel(AcrossParams p) {
    __shared__ __align__(16) float of_block[MOST_BLOCKS][WARPGROUP * 4];
    __shared__ uint64_t all;
    const smem_addr all_s = cvta_to_shared(&all);
    const int t = threadIdx.x, blocks = gridDim.x, rank = blocks > 1 ? (int)cluster_ctarank() : 0;
    if (t == 0) {
        mbarrier_init(all_s, 1);
        fence_mbarrier_init();
    }
    barrier_cluster(); // all blocks run
    for (int round = 0; round < PHASES; ++round) {
        if (t == 0) mbarrier_arrive_expect_tx(all_s, blocks * (int)sizeof of_block[0]);
        for (int j = 0; j < blocks; ++j) {
            const float x = (float)((round + 1) * (rank + 1) * 1000 + t * 4 + j);
            st_async_128(mapa(cvta_to_shared(&of_block[rank][t * 4]), j), x, x + 1, x + 2, x + 3,
                         mapa(all_s, j));
        }
        wait(all_s, round & 1);
        for (int e = 0; e < 4; ++e) {
            float sum = -of_block[rank][t * 4 + e];
            for (int j = 0; j < blocks; ++j) sum += of_block[j][(t ^ 9) * 4 + e];
            p.out_g[((round * blocks + rank) * WARPGROUP + t) * 4 + e] = sum;
        }
        barrier_cluster(); // all blocks have read
    }
}

static void check_across(const buffer &out, int blocks) {
    gk_context ctx = {};
    ctx.size = sizeof ctx;
    ctx.device = GK_CUDA;
    const AcrossParams p = {(float *)out.device};
    memset(out.host, 0xff, MOST_BYTES);
    to_device(out);
    check(launch<across_kernel>("check", &ctx, dim3((unsigned)blocks), WARPGROUP, 0, p, false,
                                blocks) == GK_OK,
          gk_last_error(), blocks, 0, 0);
    to_host(out);
    for (int i = 0; i < PHASES * blocks * 512; ++i) {
        const int round = i / (blocks * 512) + 1, rank = i / 512 % blocks + 1, t = i % 512 / 4,
                  e = i % 4;
        const int all =
            round * 1000 * (blocks * (blocks + 1) / 2) + blocks * ((t ^ 9) * 4 + e + rank - 1);
        const float expected = (float)(all - (round * rank * 1000 + t * 4 + e + rank - 1)),
                    got = ((float *)out.host)[i];
        check(got == expected, "float", i, got, expected);
    }
    char name[64];
    snprintf(name, sizeof name, "launch by %d, st_async_128 to all of them", blocks);
    verb(name);
}

// ---- setmaxnreg ---------------------------------------------------------------------------------

enum {
    LIVE = 176, // words a thread, more than the 168 that 384 threads start with
    ROUNDS = 5
};

static __host__ __device__ uint32_t mixed(uint32_t x, uint32_t y) {
    return x * 2654435761u + (y >> 3);
}

static __global__ void __launch_bounds__(384, 1)
    setmaxnreg_kernel(uint32_t *out_g, const uint32_t *in_g) {
    const int t = threadIdx.x;
    if (t >= 2 * WARPGROUP) {
        setmaxnreg_dec<40>();
        out_g[t] = in_g[t] + 1;
    } else {
        setmaxnreg_inc<232>();
        uint32_t x[LIVE], sum = 0;
#pragma unroll
        for (int i = 0; i < LIVE; ++i) x[i] = in_g[t + i * 7];
#pragma unroll 1
        for (int round = 0; round < ROUNDS; ++round)
#pragma unroll
            for (int i = 0; i < LIVE; ++i) x[i] = mixed(x[i], x[(i + 11) % LIVE]);
#pragma unroll
        for (int i = 0; i < LIVE; ++i) sum = mixed(sum, x[i]);
        out_g[t] = sum;
    }
}

static void check_setmaxnreg(const buffer &in, const buffer &out) {
    uint32_t *from = (uint32_t *)in.host, *got = (uint32_t *)out.host;
    for (int i = 0; i < 4096; ++i) from[i] = 0x9e3779b9u * (uint32_t)(i + 1);
    to_device(in);
    setmaxnreg_kernel<<<132, 384>>>((uint32_t *)out.device, (const uint32_t *)in.device);
    to_host(out);
    for (int t = 0; t < 384; ++t) {
        uint32_t x[LIVE], expected = 0;
        for (int i = 0; i < LIVE; ++i) x[i] = from[t + i * 7];
        for (int i = 0; i < ROUNDS * LIVE; ++i)
            x[i % LIVE] = mixed(x[i % LIVE], x[(i + 11) % LIVE]);
        for (int i = 0; i < LIVE; ++i) expected = mixed(expected, x[i]);
        if (t >= 2 * WARPGROUP) expected = from[t] + 1;
        check(got[t] == expected, "thread", t, got[t], expected);
    }
    verb("setmaxnreg_dec, setmaxnreg_inc");
}

// ---- tma ----------------------------------------------------------------------------------------

// Tensors of 16-bit elements: 5 dimensions, batch strides in no particular order, padded rows.
static TensorShape shape_of(const buffer &b, int size0, int size1) {
    const int64_t row = (size0 + 15) / 8 * 8, matrix = row * size1;
    return {b.device, GK_BF16, {size0, size1, 2, 3, 2}, {1, row, 3 * matrix, matrix, 6 * matrix}};
}

static int64_t place_of(const TensorShape &x, const int (&c)[5]) {
    int64_t at = 0;
    for (int d = 0; d < TENSOR_DIMS; ++d) {
        if (c[d] < 0 || c[d] >= x.size[d]) return -1;
        at += c[d] * x.stride[d];
    }
    return at;
}

struct BoxParams {
    CUtensorMap in, out;
    tma_at in_at, out_at;
    uint32_t *out_g;
};

// A box is loaded, its shared memory is shown, and it is stored elsewhere.
template <int BYTES> static __global__ void box_kernel(const __grid_constant__ BoxParams x) {
    extern __shared__ __align__(1024) unsigned char smem[];
    __shared__ __align__(8) uint64_t barrier;
    const smem_addr s = aligned_smem(smem), barrier_s = cvta_to_shared(&barrier);
    fill_smem(s, BYTES, 0xa5a5a5a5u);
    fence_proxy_async();
    if (threadIdx.x == 0) {
        prefetch_tensormap(&x.in);
        mbarrier_init(barrier_s, 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx(barrier_s, BYTES);
        tma_load_5d(s, &x.in, x.in_at, barrier_s);
    }
    wait(barrier_s, 0);
    if (threadIdx.x == 0) {
        tma_store_5d(&x.out, x.out_at, s);
        tma_store_commit_group();
        tma_store_wait_group_read<0>();
    }
    smem_to_global(x.out_g, s, BYTES);
}

// 16-bit elements. ROW_BYTES 64 or 128 selects the swizzle.
template <int ROWS, int ROW_BYTES>
static void check_box(const buffer &in, const buffer &lies, const buffer &back, int size0,
                      int size1, tma_at in_at, tma_at out_at) {
    typedef smem_tile<ROWS, ROW_BYTES> Tile;
    constexpr int cols = ROW_BYTES / 2;
    const TensorShape from = shape_of(in, size0, size1), to = shape_of(back, size0 + 24, size1);
    uint16_t *x = (uint16_t *)in.host, *y = (uint16_t *)back.host;
    for (int i = 0; i < MOST_BYTES / 2; ++i) x[i] = value_of(i);
    memset(back.host, 0x77, MOST_BYTES);
    to_device(in);
    to_device(back);
    allow<box_kernel<Tile::bytes>>(Tile::bytes + 1024);
    box_kernel<Tile::bytes><<<1, 96, Tile::bytes + 1024>>>(
        {map_of(from, cols, ROWS), map_of(to, cols, ROWS), in_at, out_at, (uint32_t *)lies.device});
    to_host(lies);
    to_host(back);
    static uint16_t expected[MOST_BYTES / 2];
    memset(expected, 0x77, sizeof expected);
    for (int row = 0; row < ROWS; ++row) {
        for (int col = 0; col < cols; ++col) {
            uint16_t got;
            memcpy(&got, lies.host + Tile::offset_of(row, col, 2), 2);
            const int64_t i = place_of(from, {in_at.c[0] + col, in_at.c[1] + row, in_at.c[2],
                                              in_at.c[3], in_at.c[4]}),
                          o = place_of(to, {out_at.c[0] + col, out_at.c[1] + row, out_at.c[2],
                                            out_at.c[3], out_at.c[4]});
            const uint16_t sent = i < 0 ? 0 : x[i];
            check(got == sent, "loaded, row x 100 + column", row * 100 + col, got, sent);
            if (o >= 0) expected[o] = sent;
        }
    }
    for (int i = 0; i < MOST_BYTES / 2; ++i)
        if (y[i] != expected[i]) check(false, "stored, element", i, y[i], expected[i]);
    check(true, "stored", 0, 0, 0);
}

// Rows are whole chunks of 16 bytes, because a store writes no less.
static void check_boxes(const buffer &a, const buffer &b, const buffer &c) {
    check_box<64, 128>(a, b, c, 136, 100, {{0, 0, 0, 0, 0}}, {{0, 0, 1, 2, 1}});
    check_box<64, 128>(a, b, c, 136, 100, {{64, 32, 1, 2, 1}}, {{96, 64, 0, 1, 0}});
    // tails of both dimensions
    check_box<64, 128>(a, b, c, 152, 71, {{128, 64, 1, 0, 1}}, {{128, 32, 1, 1, 0}});
    // smaller than the box
    check_box<64, 128>(a, b, c, 40, 7, {{0, 0, 0, 1, 1}}, {{8, 3, 0, 0, 1}});
    // a warp's panel
    check_box<16, 128>(a, b, c, 104, 90, {{56, 80, 1, 1, 0}}, {{64, 77, 1, 2, 1}});
    check_box<200, 128>(a, b, c, 72, 210, {{16, 11, 1, 1, 0}}, {{8, 10, 1, 2, 1}});
    verb("tma_load_5d, tma_store_5d, 128-byte rows");
    check_box<64, 64>(a, b, c, 136, 100, {{0, 0, 0, 0, 0}}, {{0, 0, 1, 2, 1}});
    check_box<16, 64>(a, b, c, 88, 90, {{64, 80, 1, 1, 0}}, {{96, 77, 1, 2, 1}});
    check_box<64, 64>(a, b, c, 24, 30, {{8, 0, 1, 0, 0}}, {{24, 15, 0, 2, 0}});
    verb("tma_load_5d, tma_store_5d, 64-byte rows");
}

struct TileParams {
    CUtensorMap map;
    int x, k, batch[3];
    uint32_t *out_g;
};

// PARTS blocks each copy their part of a wgmma operand to all of them.
template <int BX, bool ALONG_X, int PARTS>
static __global__ void __cluster_dims__(PARTS) part_kernel(const __grid_constant__ TileParams p) {
    typedef wgmma_part<BX, ALONG_X, PARTS> Part;
    extern __shared__ __align__(1024) unsigned char smem[];
    __shared__ __align__(8) uint64_t barrier;
    const smem_addr s = aligned_smem(smem), barrier_s = cvta_to_shared(&barrier);
    const int rank = (int)cluster_ctarank();
    fill_smem(s, Part::tile::bytes, 0xa5a5a5a5u);
    fence_proxy_async();
    if (threadIdx.x == 0) {
        mbarrier_init(barrier_s, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(barrier_s, Part::tile::bytes);
    }
    __syncthreads();
    cluster_sync();
    if (threadIdx.x == 0) {
        for (int i = 0; i < Part::boxes; ++i) {
            const int x = p.x + Part::x(rank, i), k = p.k + Part::k(rank);
            const tma_at at = {
                {ALONG_X ? x : k, ALONG_X ? k : x, p.batch[0], p.batch[1], p.batch[2]}};
            if (PARTS > 1)
                tma_load_5d_multicast(s + Part::offset(rank, i), &p.map, at, barrier_s,
                                      (1 << PARTS) - 1);
            else
                tma_load_5d(s + Part::offset(rank, i), &p.map, at, barrier_s);
        }
    }
    wait(barrier_s, 0);
    smem_to_global(p.out_g + rank * (Part::tile::bytes / 4), s, Part::tile::bytes);
    barrier_cluster();
}

template <int BX, bool ALONG_X, int PARTS>
static void check_parts(const buffer &in, const buffer &out) {
    typedef wgmma_part<BX, ALONG_X, PARTS> Part;
    typedef typename Part::tile Tile;
    uint16_t *from = (uint16_t *)in.host;
    for (int i = 0; i < MOST_BYTES / 2; ++i) from[i] = value_of(i);
    to_device(in);
    // the second tile has a tail of x and of k
    const int bytes = Tile::bytes + 1024, all_x = BX + 24, all_k = 80;
    const TensorShape shape = ALONG_X ? shape_of(in, all_x, all_k) : shape_of(in, all_k, all_x);
    allow<part_kernel<BX, ALONG_X, PARTS>>(bytes);
    for (int trial = 0; trial < 2; ++trial) {
        const TileParams p = {map_of(shape, 64, Part::box_rows),
                              trial * 40,
                              trial * 64,
                              {1, 2 - trial, trial},
                              (uint32_t *)out.device};
        part_kernel<BX, ALONG_X, PARTS><<<PARTS, 128, bytes>>>(p);
        to_host(out);
        for (int i = 0; i < PARTS * BX * 64; ++i) {
            const int block = i / (BX * 64), x = i / 64 % BX, k = i % 64, gx = p.x + x,
                      gk = p.k + k;
            const int64_t place = place_of(
                shape, {ALONG_X ? gx : gk, ALONG_X ? gk : gx, p.batch[0], p.batch[1], p.batch[2]});
            uint16_t got;
            memcpy(&got, out.host + block * Tile::bytes + Tile::offset_of(x, k), 2);
            check(got == (place < 0 ? 0 : from[place]), "block x x x k", i, got,
                  place < 0 ? 0 : from[place]);
        }
    }
}

template <int PARTS>
static void check_parts_of(const buffer &a, const buffer &b, const char *name) {
    check_parts<64, false, PARTS>(a, b), check_parts<64, true, PARTS>(a, b);
    check_parts<128, false, PARTS>(a, b), check_parts<128, true, PARTS>(a, b);
    check_parts<192, false, PARTS>(a, b), check_parts<192, true, PARTS>(a, b);
    check_parts<256, false, PARTS>(a, b), check_parts<256, true, PARTS>(a, b);
    verb(name);
}

// ---- stmatrix -----------------------------------------------------------------------------------

// A warp's panel of 16 x 64 as gemm_sm90a stores it: registers, shared memory, TMA.
static __global__ void stmatrix_kernel(const __grid_constant__ BoxParams x) {
    typedef smem_tile<16, 128> Panel;
    extern __shared__ __align__(1024) unsigned char smem[];
    const smem_addr s = aligned_smem(smem);
    const int lane = threadIdx.x;
    for (int j = 0; j < 8; j += 2) {
        uint32_t r[4];
        for (int i = 0; i < 4; ++i) {
            const coord c = ldmatrix_element(lane, 0, false);
            const uint32_t v = (c.row + i % 2 * 8) * 64 + (j + i / 2) * 8 + c.col + 1;
            r[i] = v | (v + 1) << 16;
        }
        stmatrix_x4(s + Panel::offset(lane % 16, j + lane / 16), r);
    }
    fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
        tma_store_5d(&x.out, x.out_at, s);
        tma_store_commit_group();
        tma_store_wait_group_read<0>();
    }
    smem_to_global(x.out_g, s, Panel::bytes);
}

static void check_stmatrix(const buffer &lies, const buffer &back) {
    const TensorShape to = {back.device, GK_F16, {56, 13, 1, 1, 1}, {1, 64, 0, 0, 0}};
    memset(back.host, 0x77, MOST_BYTES);
    to_device(back);
    stmatrix_kernel<<<1, 32, 4096>>>({{}, map_of(to, 64, 16), {}, {}, (uint32_t *)lies.device});
    to_host(lies);
    to_host(back);
    for (int i = 0; i < 16 * 64; ++i) {
        const int row = i / 64, col = i % 64, sent = row < 13 && col < 56 ? i + 1 : 0x7777;
        uint16_t got;
        memcpy(&got, lies.host + smem_tile<16, 128>::offset_of(row, col, 2), 2);
        check(got == i + 1, "in shared memory, element", i, got, i + 1);
        check(((uint16_t *)back.host)[i] == sent, "stored by tma, element", i,
              ((uint16_t *)back.host)[i], sent);
    }
    verb("stmatrix_x4, and tma behind it");
}

// ---- wgmma --------------------------------------------------------------------------------------

struct WgmmaParams {
    const void *a_g, *b_g; // [x][k]
    const float *d_g;
    float *out_g;
    bool add;
};

enum {
    WGMMA_K = 192 // three tiles of 64
};

// d [64][N] (+)= rows 64 .. 127 of a times b, from tiles stored through the maps.
template <class T, int N, bool A_T, bool B_T>
static __global__ void __launch_bounds__(128) wgmma_kernel(WgmmaParams p) {
    typedef wgmma_tile<128, A_T> A;
    typedef wgmma_tile<N, B_T> B;
    extern __shared__ __align__(1024) unsigned char smem[];
    const smem_addr a_s = aligned_smem(smem), b_s = a_s + WGMMA_K / 64 * A::bytes;
    const int t = threadIdx.x;
    const uint16_t *a_g = (const uint16_t *)p.a_g, *b_g = (const uint16_t *)p.b_g;
    for (int i = t; i < 128 * WGMMA_K; i += 128) {
        const int x = i / WGMMA_K, k = i % WGMMA_K;
        st_shared_16(a_s + k / 64 * A::bytes + A::offset_of(x, k % 64), a_g[i]);
        if (x < N) st_shared_16(b_s + k / 64 * B::bytes + B::offset_of(x, k % 64), b_g[i]);
    }
    for (int i = 128 * WGMMA_K + t; i < N * WGMMA_K; i += 128) {
        const int x = i / WGMMA_K, k = i % WGMMA_K;
        st_shared_16(b_s + k / 64 * B::bytes + B::offset_of(x, k % 64), b_g[i]);
    }
    fence_proxy_async();
    __syncthreads();
    float d[1][N / 2];
#pragma unroll
    for (int e = 0; e < N / 2; ++e) d[0][e] = p.d_g[t * (N / 2) + e];
    wgmma_pin(d);
    wgmma_fence();
#pragma unroll
    for (int k16 = 0; k16 < WGMMA_K / 16; ++k16) {
        const uint64_t a = A::descriptor(a_s + k16 / 4 * A::bytes + A::offset(64) +
                                         k16 % 4 * A::step_bytes),
                       b = B::descriptor(b_s + k16 / 4 * B::bytes + k16 % 4 * B::step_bytes);
        wgmma_ss<T, N, A_T, B_T>(d[0], a, b, p.add || k16 > 0);
        if (k16 % 4 == 3) wgmma_commit_group();
    }
    wgmma_wait_group<1>();
    wgmma_wait_group<0>();
    wgmma_pin(d);
#pragma unroll
    for (int e = 0; e < N / 2; ++e) p.out_g[t * (N / 2) + e] = d[0][e];
}

template <class T, int N, bool A_T, bool B_T>
static void check_wgmma(const buffer &a, const buffer &b, const buffer &d, const buffer &out) {
    static int x[128 * WGMMA_K], y[256 * WGMMA_K], before[64 * 256];
    for (int i = 0; i < 128 * WGMMA_K; ++i) put((T *)a.host, i, x[i] = random_below(17) - 8);
    for (int i = 0; i < N * WGMMA_K; ++i) put((T *)b.host, i, y[i] = random_below(17) - 8);
    to_device(a);
    to_device(b);
    const int bytes =
        (wgmma_tile<128, A_T>::bytes + wgmma_tile<N, B_T>::bytes) * (WGMMA_K / 64) + 1024;
    allow<wgmma_kernel<T, N, A_T, B_T>>(bytes);
    for (int add = 0; add < 2; ++add) {
        for (int i = 0; i < 64 * N; ++i) {
            before[i] = add ? random_below(1000) - 500 : 0;
            ((float *)d.host)[i] = add ? (float)before[i] : NAN; // not read
        }
        to_device(d);
        wgmma_kernel<T, N, A_T, B_T><<<1, 128, bytes>>>(
            {a.device, b.device, (const float *)d.device, (float *)out.device, add == 1});
        to_host(out);
        for (int i = 0; i < 64 * N; ++i) {
            const int thread = i / (N / 2);
            const coord at = wgmma_d(thread / 32, thread % 32, i % (N / 2));
            int exact = before[i];
            for (int k = 0; k < WGMMA_K; ++k)
                exact += x[(64 + at.row) * WGMMA_K + k] * y[at.col * WGMMA_K + k];
            const float got = ((float *)out.host)[i];
            check(got == (float)exact, "row x 1000 + column", at.row * 1000 + at.col, got, exact);
        }
    }
}

template <class T, int N>
static void check_modes(const buffer &a, const buffer &b, const buffer &c, const buffer &d) {
    check_wgmma<T, N, false, false>(a, b, c, d), check_wgmma<T, N, false, true>(a, b, c, d);
    check_wgmma<T, N, true, false>(a, b, c, d), check_wgmma<T, N, true, true>(a, b, c, d);
    char name[64];
    snprintf(name, sizeof name, "wgmma_ss %s, n%d, four transpositions",
             std::is_same_v<T, bf16> ? "bf16" : "f16", N);
    verb(name);
}

template <class T>
static void check_widths(const buffer &a, const buffer &b, const buffer &c, const buffer &d) {
    check_modes<T, 8>(a, b, c, d), check_modes<T, 16>(a, b, c, d), check_modes<T, 32>(a, b, c, d);
    check_modes<T, 64>(a, b, c, d), check_modes<T, 96>(a, b, c, d), check_modes<T, 128>(a, b, c, d);
    check_modes<T, 160>(a, b, c, d), check_modes<T, 176>(a, b, c, d),
        check_modes<T, 192>(a, b, c, d);
    check_modes<T, 224>(a, b, c, d), check_modes<T, 256>(a, b, c, d);
}

// tf32: d [128][N] = a b with K = 64. a comes from descriptors or from registers; its tile is [64
// k][128 x].
template <int N, bool FROM_REGISTERS>
static __global__ void __launch_bounds__(128) wgmma_tf32_kernel(WgmmaParams p) {
    typedef wgmma_tile<128, FROM_REGISTERS, 32> A;
    typedef wgmma_tile<N, false, 32> B;
    enum {
        K = 64
    };
    extern __shared__ __align__(1024) unsigned char smem[];
    const smem_addr a_s = aligned_smem(smem), b_s = a_s + K / 32 * A::bytes;
    const int t = threadIdx.x, warp = t / 32, lane = t % 32;
    const uint32_t *a_g = (const uint32_t *)p.a_g, *b_g = (const uint32_t *)p.b_g;
    for (int i = t; i < 128 * K; i += 128)
        st_shared_32(a_s + i % K / 32 * A::bytes + A::offset_of(i / K, i % 32), a_g[i]);
    for (int i = t; i < N * K; i += 128)
        st_shared_32(b_s + i % K / 32 * B::bytes + B::offset_of(i / K, i % 32), b_g[i]);
    fence_proxy_async();
    __syncthreads();
    float d[2][N / 2];
    wgmma_pin(d);
#pragma unroll
    for (int k8 = 0; k8 < K / 8; ++k8) {
        const smem_addr at_s = a_s + k8 / 4 * A::bytes;
        const uint64_t b = B::descriptor(b_s + k8 / 4 * B::bytes + k8 % 4 * B::step_bytes);
        uint32_t a[2][4];
        if (FROM_REGISTERS)
            load_tf32(a, at_s + A::offset(warp * 32) + tf32_offset(lane, lane % 4), k8 % 4);
        wgmma_fence();
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            if constexpr (FROM_REGISTERS)
                wgmma_tf32_rs<N>(d[m], a[m], b, k8 > 0);
            else
                wgmma_tf32_ss<N>(d[m],
                                 A::descriptor(at_s + A::offset(m * 64) + k8 % 4 * A::step_bytes),
                                 b, k8 > 0);
        }
        wgmma_commit_group();
        wgmma_wait_group<0>();
    }
    wgmma_pin(d);
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int e = 0; e < N / 2; ++e) {
            const coord at = wgmma_d(warp, lane, e);
            const int row = FROM_REGISTERS ? warp * 32 + 4 * tf32_chunk(lane) + 2 * m + e / 2 % 2
                                           : m * 64 + at.row;
            p.out_g[row * N + at.col] = d[m][e];
        }
}

template <int N, bool FROM_REGISTERS>
static void check_wgmma_tf32(const buffer &a, const buffer &b, const buffer &out,
                             const char *name) {
    static int x[128 * 64], y[256 * 64];
    for (int i = 0; i < 128 * 64; ++i) put((float *)a.host, i, x[i] = random_below(33) - 16);
    for (int i = 0; i < N * 64; ++i) put((float *)b.host, i, y[i] = random_below(33) - 16);
    to_device(a);
    to_device(b);
    const int bytes = (128 + N) * 64 * 4 + 1024;
    allow<wgmma_tf32_kernel<N, FROM_REGISTERS>>(bytes);
    wgmma_tf32_kernel<N, FROM_REGISTERS>
        <<<1, 128, bytes>>>({a.device, b.device, NULL, (float *)out.device, false});
    to_host(out);
    for (int i = 0; i < 128 * N; ++i) {
        int exact = 0;
        for (int k = 0; k < 64; ++k) exact += x[i / N * 64 + k] * y[i % N * 64 + k];
        check(((float *)out.host)[i] == (float)exact, "row, column", i / N, i % N,
              ((float *)out.host)[i]);
    }
    verb(name);
}

// A box of float32 loaded as tf32: rounded to nearest, ties to even, with 10 bits of significand.
static __global__ void tf32_box_kernel(const __grid_constant__ TileParams p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    __shared__ __align__(8) uint64_t barrier;
    const smem_addr s = aligned_smem(smem), barrier_s = cvta_to_shared(&barrier);
    if (threadIdx.x == 0) {
        mbarrier_init(barrier_s, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(barrier_s, 64 * 128);
        tma_load_5d(s, &p.map, tma_at{{0, 0, 0, 0, 0}}, barrier_s);
    }
    __syncthreads();
    wait(barrier_s, 0);
    smem_to_global(p.out_g, s, 64 * 128);
}

static void check_tf32_box(const buffer &in, const buffer &out) {
    uint32_t *from = (uint32_t *)in.host;
    for (int i = 0; i < 64 * 32; ++i) /* every third a tie or one off it */
    {
        from[i] = (uint32_t)random_below(1 << 30) << 1 & 0xbf7fffffu;
        from[i] = i % 3 ? from[i] : (from[i] & ~0x1fffu) + 0xfffu + i % 9 / 3;
    }
    to_device(in);
    const TensorShape shape = {in.device, GK_F32, {32, 64, 1, 1, 1}, {1, 32, 0, 0, 0}, true};
    allow<tf32_box_kernel>(64 * 128 + 1024);
    const TileParams p = {map_of(shape, 32, 64), 0, 0, {0, 0, 0}, (uint32_t *)out.device};
    tf32_box_kernel<<<1, 128, 64 * 128 + 1024>>>(p);
    to_host(out);
    for (int i = 0; i < 64 * 32; ++i) {
        const uint32_t exact = (from[i] + 0xfffu + (from[i] >> 13 & 1)) & ~0x1fffu;
        const uint32_t got =
            ((uint32_t *)out.host)[wgmma_tile<64, false, 32>::offset_of(i / 32, i % 32) / 4];
        check(got == exact, "bits, rounded, expected", from[i], got, exact);
    }
    verb("tma_load_5d of float32 as tf32");
}

// ---- the ring -----------------------------------------------------------------------------------

enum {
    RING_STAGES = 3,
    RING_ROWS = 128, // of a block: two warpgroups
    RING_COLS = 64,
    RING_TILES = 4, // tiles of columns, one after the other
    RING_K = 13 * 64 - 24
};

struct RingParams {
    CUtensorMap a, b;
    float *out_g; // [block][128][RING_TILES * 64]
};

// Skipping steps at once and one by one must end at the same stage and parity.
template <int STAGES> static __global__ void skip_kernel(int *out_g) {
    tma_ring<STAGES> at_once(0), one_by_one(0);
    for (int i = 0; i < 64; ++i) {
        const int count = i * 7 % 23;
        at_once.skip(count);
        for (int j = 0; j < count; ++j) one_by_one.advance();
        out_g[2 * i] = at_once.stage * 2 + (int)at_once.parity;
        out_g[2 * i + 1] = one_by_one.stage * 2 + (int)one_by_one.parity;
    }
}

template <int STAGES> static void check_skip(const buffer &out) {
    skip_kernel<STAGES><<<1, 1>>>((int *)out.device);
    to_host(out);
    const int *const got = (const int *)out.host;
    for (int i = 0; i < 128; i += 2) check(got[i] == got[i + 1], "skip", i / 2, got[i], got[i + 1]);
    verb("tma_ring, skip");
}

// c = a b^T. One thread copies, two warpgroups multiply, and a step of products runs while the next
// is issued. BLOCKS blocks have their own rows of a and share b; each copies its part of b to all.
template <int BLOCKS>
static __global__ void __cluster_dims__(BLOCKS) __launch_bounds__(384, 1)
    ring_kernel(const __grid_constant__ RingParams x) {
    typedef wgmma_tile<RING_ROWS, false> A;
    typedef wgmma_part<RING_COLS, false, BLOCKS> BPart;
    typedef typename BPart::tile B;
    constexpr int stage_bytes = A::bytes + B::bytes, steps = (RING_K + 63) / 64;
    extern __shared__ __align__(1024) unsigned char smem[];
    __shared__ __align__(8) uint64_t barriers[2 * RING_STAGES];
    const int t = threadIdx.x, warpgroup = t / WARPGROUP, lane = t % 32, warp = t / 32 % 4;
    const int rank = (int)cluster_ctarank();
    const smem_addr ring_s = aligned_smem(smem);
    tma_ring<RING_STAGES> ring(cvta_to_shared(barriers));
    static_assert(tma_ring<RING_STAGES>::bytes == sizeof barriers, "");
    if (t == 0) {
        ring.init(2 * BLOCKS);
        fence_mbarrier_init();
    }
    barrier_cluster();
    if (warpgroup == 2) {
        if (warp == 0 && elect_one()) {
            for (int step = 0; step < RING_TILES * steps; ++step) {
                const int k = step % steps * 64, col = step / steps * RING_COLS;
                const smem_addr a_s = ring_s + ring.stage * stage_bytes, b_s = a_s + A::bytes;
                wait(ring.empty(), ring.parity ^ 1);
                ring.wait_empty();
                mbarrier_arrive_expect_tx(ring.full(), stage_bytes);
                tma_load_5d_by(a_s, &x.a, {{k, rank * RING_ROWS, 0, 0, 0}}, ring.full(),
                               l2_first_out());
                tma_load_5d_multicast(b_s + BPart::offset(rank, 0), &x.b,
                                      {{k, col + BPart::x(rank, 0), 0, 0, 0}}, ring.full(),
                                      (1 << BLOCKS) - 1);
                ring.advance();
            }
        }
    } else {
        float sum[1][RING_COLS / 2];
        const auto release = [&](smem_addr barrier_s) {
            if (warp == 0 && lane < BLOCKS) mbarrier_arrive_cluster(barrier_s, lane);
        };
        for (int tile = 0; tile < RING_TILES; ++tile) {
            for (int k = 0; k < steps; ++k) {
                const smem_addr a_s = ring_s + ring.stage * stage_bytes, b_s = a_s + A::bytes;
                const smem_addr before =
                    ring.empty() + (ring.stage == 0 ? 8 * (RING_STAGES - 1) : -8);
                wait(ring.full(), ring.parity);
                ring.wait_full();
                wgmma_pin(sum);
                wgmma_fence();
#pragma unroll
                for (int k16 = 0; k16 < 4; ++k16)
                    wgmma_ss<bf16, RING_COLS, false, false>(
                        sum[0],
                        A::descriptor(a_s + A::offset(warpgroup * 64) + k16 * A::step_bytes),
                        B::descriptor(b_s + k16 * B::step_bytes), k + k16 > 0);
                wgmma_commit_group();
                wgmma_wait_group<1>();
                if (k > 0) release(before);
                ring.advance();
            }
            wgmma_wait_group<0>();
            wgmma_pin(sum);
            release(ring.empty() + (ring.stage == 0 ? 8 * (RING_STAGES - 1) : -8));
#pragma unroll
            for (int e = 0; e < RING_COLS / 2; e += 2) { /* four columns of two lanes */
                const coord d = wgmma_d(warp, lane, e);
                const int row = (rank * 2 + warpgroup) * 64 + d.row,
                          col = tile * RING_COLS + d.col / 4 * 4;
                const uint32_t low = __float_as_uint(sum[0][e]),
                               high = __float_as_uint(sum[0][e + 1]);
                const uint32_t third = __shfl_down_sync(0xffffffff, low, 1),
                               fourth = __shfl_down_sync(0xffffffff, high, 1);
                if (lane % 2 == 0)
                    st_global_128_by(x.out_g + row * (RING_TILES * RING_COLS) + col,
                                     make_uint4(low, high, third, fourth), l2_last_out());
            }
        }
    }
    barrier_cluster();
}

template <int BLOCKS>
static void check_ring(const buffer &a, const buffer &b, const buffer &c, const char *name) {
    constexpr int rows = BLOCKS * RING_ROWS, cols = RING_TILES * RING_COLS,
                  ld = (RING_K + 15) / 8 * 8;
    constexpr int bytes = RING_STAGES * (RING_ROWS + RING_COLS) * 128 + 1024;
    static int x[4 * RING_ROWS * RING_K], y[RING_TILES * RING_COLS * RING_K];
    // large or NaN behind the last rows
    memset(a.host, 0x7f, MOST_BYTES);
    memset(b.host, 0x7f, MOST_BYTES);
    for (int i = 0; i < rows * RING_K; ++i)
        put((bf16 *)a.host, i / RING_K * ld + i % RING_K, x[i] = random_below(9) - 4);
    for (int i = 0; i < cols * RING_K; ++i)
        put((bf16 *)b.host, i / RING_K * ld + i % RING_K, y[i] = random_below(9) - 4);
    to_device(a);
    to_device(b);
    const TensorShape a_shape = {a.device, GK_BF16, {RING_K, rows, 1, 1, 1}, {1, ld, 0, 0, 0}},
                      b_shape = {b.device, GK_BF16, {RING_K, cols, 1, 1, 1}, {1, ld, 0, 0, 0}};
    const RingParams p = {map_of(a_shape, 64, RING_ROWS),
                          map_of(b_shape, 64, wgmma_part<RING_COLS, false, BLOCKS>::box_rows),
                          (float *)c.device};
    allow<ring_kernel<BLOCKS>>(bytes);
    for (int again = 0; again < 8; ++again) { // timing differs from run to run
        memset(c.host, 0xff, MOST_BYTES);
        to_device(c);
        ring_kernel<BLOCKS><<<BLOCKS, 384, bytes>>>(p);
        to_host(c);
        for (int i = again; i < rows * cols; i += again == 0 ? 1 : 61) {
            int exact = 0;
            for (int k = 0; k < RING_K; ++k)
                exact += x[i / cols * RING_K + k] * y[i % cols * RING_K + k];
            check(((float *)c.host)[i] == (float)exact, "element", i, ((float *)c.host)[i], exact);
        }
    }
    verb(name);
}

// ---- launches that overlap ----------------------------------------------------------------------

struct ChainParams {
    const uint32_t *from_g;
    uint32_t *to_g;
};

enum {
    CHAIN_BLOCKS = 64, // half of the SMs, so that the next kernel can start early
    CHAIN = 32
};

// Signals the next kernel early and writes its result late. Without its wait the next kernel would
// read data that is not there yet.
static __global__ void chained_kernel(ChainParams p) {
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const uint32_t x = p.from_g[i ^ 1023]; // an element of another block
    const long long start = clock64();
    while (clock64() - start < 20000) {
    }
    p.to_g[i] = x * 3 + 1;
}

static void check_chain(const buffer &a, const buffer &b) {
    gk_context ctx = {};
    ctx.size = sizeof ctx;
    ctx.device = GK_CUDA;
    constexpr int n = CHAIN_BLOCKS * 128;
    uint32_t *x = (uint32_t *)a.host;
    static uint32_t expected[n], next[n];
    for (int i = 0; i < n; ++i) x[i] = expected[i] = (uint32_t)random_below(1 << 30);
    to_device(a);
    for (int link = 0; link < CHAIN; ++link) {
        const buffer &from = link % 2 ? b : a, &to = link % 2 ? a : b;
        const ChainParams p = {(const uint32_t *)from.device, (uint32_t *)to.device};
        if (launch<chained_kernel>("check", &ctx, dim3(CHAIN_BLOCKS), 128, 0, p, link > 0) !=
            GK_OK) {
            check(false, gk_last_error(), link, 0, 0);
            break;
        }
        for (int i = 0; i < n; ++i) next[i] = expected[i ^ 1023] * 3 + 1;
        memcpy(expected, next, sizeof next);
    }
    to_host(a);
    for (int i = 0; i < n; ++i) check(x[i] == expected[i], "element", i, x[i], expected[i]);
    verb("griddepcontrol: a chain of kernels");
}

int main() {
    setvbuf(stdout, NULL, _IOLBF, 0); // line-buffered: a kernel that hangs ends the process
    int devices = 0, major = 0, minor = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        printf("no CUDA device\n");
        return 0;
    }
    must(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0),
         "compute capability");
    must(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0),
         "compute capability");
    if (major != 9 || minor != 0) {
        printf("no sm_90 device\n");
        return 0;
    }
    buffer a = make_buffer(), b = make_buffer(), c = make_buffer(), d = make_buffer();
    check_mbarrier(b);
    check_exchange(b);
    check_bulk(a, b);
    check_across(b, 2);
    check_across(b, 3);
    check_across(b, MOST_BLOCKS);
    check_setmaxnreg(a, b);
    check_boxes(a, b, c);
    check_parts_of<1>(a, b, "wgmma_tile by tma_load_5d");
    check_parts_of<2>(a, b, "wgmma_part by multicast, 2 blocks");
    check_parts_of<4>(a, b, "wgmma_part by multicast, 4 blocks");
    check_stmatrix(b, c);
    check_widths<bf16>(a, b, c, d);
    check_widths<__half>(a, b, c, d);
    check_tf32_box(a, b);
    check_wgmma_tf32<64, false>(a, b, c, "wgmma_tf32_ss n64"),
        check_wgmma_tf32<128, false>(a, b, c, "wgmma_tf32_ss n128");
    check_wgmma_tf32<64, true>(a, b, c, "wgmma_tf32_rs n64"),
        check_wgmma_tf32<128, true>(a, b, c, "wgmma_tf32_rs n128");
    check_skip<5>(b), check_skip<4>(b);
    check_ring<1>(a, b, c, "tma_ring, 2 warpgroups");
    check_ring<2>(a, b, c, "tma_ring, 2 warpgroups of 2 blocks");
    check_ring<4>(a, b, c, "tma_ring, 2 warpgroups of 4 blocks");
    check_chain(a, b);
    printf("%d passed, %d failed\n", num_passed, num_failed);
    return num_failed != 0 || num_passed == 0;
}
