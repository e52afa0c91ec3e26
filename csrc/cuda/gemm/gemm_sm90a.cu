/* gemm_sm90a: out = activation(alpha a b + beta c + bias) on Hopper's tensor cores by wgmma, fed by tma: bfloat16, float16.
 *
 * a [batch, M, K]  b [batch, K, N]   each dense along k or along its other dimension, other strides multiples of 16 bytes;
 *                                    one that is not is copied first (gemm_realign), into the call's workspace
 * bias [N], c broadcasts, out [batch, M, N], preact like out; float32 sums, one rounding
 * Grid: as many clusters of CM x CN x CK blocks as fit the GPU; each takes CM x CN tiles BM x BN side by side, in the order
 * of order.cuh, until none is left. The blocks of a row read the same of a, those of a column the same of b: each copies its
 * share to all of them, since L2 gives the SMs some 8 TB/s and single 128 x 256 tiles would ask for 12. CK = 2: two
 * blocks sum half of k each, trade halves of their sums and store half of the columns.
 * Turned, for few rows: a and b change places (out^T = b^T a^T), so that the weights fill wgmma's 64 rows.
 * Block: WGS warpgroups that multiply, BM / WGS rows each, and one of which a single thread copies.
 *
 * Shared memory (struct Smem): a ring of slots, each K64 times
 *   a [BM][64 k] or [BM / 64][64 k][64 m], b [BN][64 k] or [BN / 64][64 k][64 n]      swizzled by 128 bytes (wgmma.cuh)
 * then the warps' panels of results, the traded halves, the barriers.
 *
 * Pipeline (slots full and empty: tma_ring.cuh); one step of products stays under way while the next is issued:
 *   copies      k0 k1 k2 k3 | k4      k5         ..  runs on into the next tile while this one's sums are stored
 *   products                | 0 .. 1 .. 2 ..         slot j - 1 is let go when step j is issued and step j - 1 is done
 * 16-bit results go through the panels and leave by tma behind the warp's back; float32 ones and sums with c are stored by the
 * lanes, 8 columns each, or 8 rows where rows of the result do not begin at multiples of 16 bytes. The next kernel on the
 * stream may start its own prologue meanwhile.
 *
 * Workspace: the copies, (rows or columns) x (k rounded up to 8) x 2 bytes each, or with both changed.
 * Not here: other dtypes, K = 0 (gemm_sm80, gemm_plain), 64 columns or fewer, few rows of weights that need a copy. */
#include "../host/launch.cuh"
#include "../host/tensormap.cuh"
#include "../ptx/bar.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/griddepcontrol.cuh"
#include "../ptx/stmatrix.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/wgmma.cuh"
#include "../tile/tma_ring.cuh"
#include "../tile/wgmma.cuh"
#include "epilogue.cuh"
#include "operands.cuh"
#include "order.cuh"
#include "tiles.h"

namespace {

constexpr int K_BLOCK = 64, WARPGROUP = 128;

/* ---- 1 the call ---------------------------------------------------------------------------------------------- */
struct Params {
    CUtensorMap a, b;        /* [batch dimensions, up to 3][m or n][k], or with k and the other changed */
    CUtensorMap out, preact; /* where `plain` */
    bool plain;              /* store_plain serves the call */
    bool across;   /* store_any: the lanes' values lie down the rows; in the epilogue rows and columns change places */
    GemmProblem p; /* tiles_m counts the tiles of clusters */
};

template <class Tile, int MODE> struct Smem {
    static constexpr bool ALONG_M = MODE & A_ALONG_M, ALONG_N = MODE & B_ALONG_N;
    typedef wgmma_tile<Tile::BM, ALONG_M> A;
    typedef wgmma_tile<Tile::BN, ALONG_N> B;
    typedef wgmma_part<Tile::BM, ALONG_M, Tile::CN> APart;
    typedef wgmma_part<Tile::BN, ALONG_N, Tile::CM> BPart;
    static constexpr int BLOCK = A::bytes + B::bytes, SLOT = Tile::K64 * BLOCK; /* 64 of k; a step */
    static constexpr int STAGES = Tile::STAGES * SLOT <= MOST_RING ? Tile::STAGES : MOST_RING / SLOT,
                         RING = STAGES * SLOT;

    /* The columns of a tile that a block finishes, and a warp's 16 rows of up to 128 bytes on their way from the accumulators'
     * order to that of rows; turned: all columns as rows of 64 floats, 4 more to spread them over the banks. */
    static constexpr int COLS = Tile::BN / Tile::CK, PANEL_COLS = COLS % 64 == 0 ? 64 : 32;
    typedef smem_tile<16, PANEL_COLS * 2> Panel;
    static constexpr int TURNED_LD = 64 + 4, WARP_PANELS = Tile::TURNED ? COLS * TURNED_LD : Tile::PANELS * 2048;

    static constexpr int PANELS = RING, TRADE = PANELS + Tile::WGS * 4 * WARP_PANELS;
    static constexpr int WARPGROUP_TRADE = Tile::CK > 1 ? COLS * 256 : 0; /* what the other part of k sends */
    static constexpr int BARRIERS = TRADE + Tile::WGS * WARPGROUP_TRADE, TRADED = BARRIERS + tma_ring<STAGES>::bytes;
    static constexpr int BYTES = TRADED + 16 + WGMMA_BLOCK_BYTES; /* to align the ring */
    static_assert(BYTES <= 232448 && PANELS % 1024 == 0, "shared memory of a block");
    static_assert(Tile::TURNED || COLS % PANEL_COLS == 0, "whole panels");
    static_assert(Tile::CK <= 2 && (!Tile::TURNED || Tile::WGS == 1), "two blocks trade; one turns");
};

/* Where a batch entry's boxes begin; dimensions without a stride are not in the map. */
__device__ __forceinline__ void place_batch(const GemmProblem &p, const int64_t *strides, unsigned batch, tma_at &at) {
#pragma unroll
    for (int d = TENSOR_DIMS - 3; d >= 0; --d) {
        if (d >= p.ndim) continue;
        at.c[2 + d] = strides[d] ? (int)(batch % (unsigned)p.shape[d]) : 0;
        batch /= (unsigned)p.shape[d];
    }
}

/* ---- 2 copies ------------------------------------------------------------------------------------------------ */
/* Part `part` of the rows or columns from x on and 64 of k, into the blocks of the cluster whose bits are set. */
template <class Part, bool ALONG_X, int SHARERS>
__device__ __forceinline__ void copy_part(smem_addr to_s, const CUtensorMap *map, tma_at at, int x, int k, int part,
                                          smem_addr full, uint16_t blocks) {
#pragma unroll
    for (int i = 0; i < Part::boxes; ++i) {
        const int x_at = x + Part::x(part, i), k_at = k + Part::k(part);
        at.c[0] = ALONG_X ? x_at : k_at, at.c[1] = ALONG_X ? k_at : x_at;
        if (SHARERS > 1)
            tma_load_5d_multicast(to_s + Part::offset(part, i), map, at, full, blocks);
        else
            tma_load_5d(to_s + Part::offset(part, i), map, at, full);
    }
}

/* ---- 3 results ----------------------------------------------------------------------------------------------- */
/* A warp's 16 rows of 16-bit results go to a panel and leave by tma while the warp goes on. at: their first column and row. */
template <class T, class Panel, int PANELS>
__device__ __forceinline__ void store_panel(const CUtensorMap *map, const float (&v)[Panel::row_bytes / 4],
                                            smem_addr panel_s, const tma_at &at, int lane) {
    if (lane == 0) tma_store_wait_group_read<PANELS - 1>();
    __syncwarp(); /* the panel's last contents have been read */
    const unsigned put = Panel::offset(lane % 16, 0);
#pragma unroll
    for (int j = 0; j < Panel::chunks; j += 2) { /* rows 0-7 and 8-15 of one octet of columns, then of the next */
        const uint32_t two[4] = {pack2<T>(v[4 * j], v[4 * j + 1]), pack2<T>(v[4 * j + 2], v[4 * j + 3]),
                                 pack2<T>(v[4 * j + 4], v[4 * j + 5]), pack2<T>(v[4 * j + 6], v[4 * j + 7])};
        stmatrix_x4(panel_s + (put ^ (j + lane / 16) * 16), two);
    }
    fence_proxy_async();
    __syncwarp(); /* all of the panel is written */
    if (lane == 0) {
        tma_store_5d(map, at, panel_s);
        tma_store_commit_group();
    }
}

/* 16 rows of BN columns of 16-bit results without c. panel: the one written longest ago. CURVED: with an
 * activation that costs many instructions: one body for all panels, past which the sums move instead of the code. */
template <class T, class Panel, int BN, int PANELS, bool CURVED>
__device__ __forceinline__ void store_plain(const Params &x, float (&sum)[BN / 2], smem_addr panels_s, int &panel,
                                            tma_at at, int lane) {
    constexpr int WIDE = Panel::row_bytes / 2, EACH = WIDE / 2, UNROLLED = CURVED ? 1 : BN / WIDE;
    const GemmEpilogue &e = x.p.epilogue;
    const float alpha = (float)e.alpha;
    const bool relu = e.activation == GK_ACT_RELU;
#pragma unroll UNROLLED
    for (int c = 0; c < BN; c += WIDE) {
        const int first = CURVED ? 0 : c / 2;
        float v[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) v[i] = sum[first + i] * alpha;
        if (e.bias) { /* not + 0: -0 stays */
#pragma unroll
            for (int j = 0; j < EACH; j += 4) {
                const int64_t col = at.c[0] + j * 2 + lane % 4 * 2;
                float bias[2];
                read_any<T, 2>(e.bias, e.bias_dtype, col * e.bias_col, e.bias_col, false,
                               (int)max((int64_t)0, min((int64_t)2, x.p.n - col)), bias);
                v[j] += bias[0], v[j + 1] += bias[1], v[j + 2] += bias[0], v[j + 3] += bias[1];
            }
        }
        if (e.preact) {
            store_panel<T, Panel, PANELS>(&x.preact, v, panels_s + panel * Panel::bytes, at, lane);
            panel = panel + 1 == PANELS ? 0 : panel + 1;
        }
        if (CURVED) {
            activate_16(e.activation, v);
        } else if (relu) {
#pragma unroll
            for (int i = 0; i < EACH; ++i) v[i] = v[i] <= 0 ? 0.f : v[i]; /* a NaN stays one */
        }
        store_panel<T, Panel, PANELS>(&x.out, v, panels_s + panel * Panel::bytes, at, lane);
        panel = panel + 1 == PANELS ? 0 : panel + 1;
        at.c[0] += WIDE;
        if (CURVED) {
#pragma unroll
            for (int i = 0; i + EACH < BN / 2; ++i) sum[i] = sum[i + EACH];
        }
    }
}

/* Everything else, 32 columns of floats at a time: one body, past which the sums move instead of the code. A lane has 8
 * columns of a row; across, 8 rows of a column: without wide stores, the lanes of one should fall beside each other. */
template <class T, int BN>
__device__ __forceinline__ void store_any(const GemmProblem &p, const GemmPlace &at, float (&sum)[BN / 2],
                                          smem_addr panel_s, int64_t row0, int64_t col0, bool across, int lane) {
    typedef smem_tile<16, 128> Panel;
#pragma unroll 1
    for (int c = 0; c < BN; c += 32) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = lane / 4 + h * 8, byte = j * 32 + lane % 4 * 8;
                st_shared_64(panel_s + Panel::offset(row, byte / 16) + byte % 16,
                             make_float2(sum[j * 4 + h * 2], sum[j * 4 + h * 2 + 1]));
            }
        __syncwarp(); /* the warp's lanes read what the others stored */
#pragma unroll 1
        for (int r = 0; r < 16; r += 8) {
            /* what the epilogue takes for the row, and for the first of 8 columns */
            const int64_t row = across ? col0 + c + lane : row0 + r + lane / 4;
            const int64_t col = across ? row0 + r : col0 + c + lane % 4 * 8;
            const int valid = (int)min((int64_t)8, (across ? p.m : p.n) - col);
            uint32_t bits[8];
            if (across) {
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    bits[i] = ld_shared_32(panel_s + Panel::offset(r + i, lane / 4) + lane % 4 * 4);
            } else {
                const uint4 x = ld_shared_128(panel_s + Panel::offset(r + lane / 4, lane % 4 * 2)),
                            y = ld_shared_128(panel_s + Panel::offset(r + lane / 4, lane % 4 * 2 + 1));
                bits[0] = x.x, bits[1] = x.y, bits[2] = x.z, bits[3] = x.w;
                bits[4] = y.x, bits[5] = y.y, bits[6] = y.z, bits[7] = y.w;
            }
            float v[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] = __uint_as_float(bits[i]);
            if (row < (across ? p.n : p.m) && valid > 0) epilogue_cols<T, 8>(p.epilogue, at, row, col, valid, v);
        }
        __syncwarp(); /* the panel has been read */
#pragma unroll
        for (int i = 0; i + 16 < BN / 2; ++i) sum[i] = sum[i + 16];
    }
}

/* A turned product: a warpgroup's 64 rows are columns of the result, its COLS columns rows. */
constexpr GK_HD int turned_ways(int ld) {
    int bytes[32] = {};
    for (int lane = 0; lane < 32; ++lane) bytes[lane] = (wgmma_d(0, lane, 0).col * ld + wgmma_d(0, lane, 0).row) * 4;
    return ways(bytes, 4);
}

template <class T, int COLS, int LD>
__device__ __forceinline__ void store_turned(const GemmProblem &p, const GemmPlace &at, const float (&sum)[COLS / 2],
                                             float *turned, int row0, int col0) {
    static_assert(turned_ways(LD) == 1, "the lanes' sums fall into 32 banks");
    const int thread = threadIdx.x % WARPGROUP, warp = thread / 32, lane = thread % 32;
#pragma unroll
    for (int i = 0; i < COLS / 2; ++i) {
        const coord d = wgmma_d(warp, lane, i);
        turned[d.col * LD + d.row] = sum[i];
    }
    bar_sync(1, WARPGROUP); /* all sums are there */
#pragma unroll 1
    for (int i = thread; i < COLS * 8; i += WARPGROUP) {
        const int row = col0 + i / 8, col = row0 + i % 8 * 8, valid = (int)min((int64_t)8, p.m - col);
        const float4 x = *(const float4 *)(turned + i / 8 * LD + i % 8 * 8),
                     y = *(const float4 *)(turned + i / 8 * LD + i % 8 * 8 + 4);
        float v[8] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
        if (row < p.n && valid > 0) epilogue_cols<T, 8>(p.epilogue, at, row, col, valid, v);
    }
    bar_sync(1, WARPGROUP); /* they have been read */
}

/* Two blocks have each half of the sum over k. Each keeps its half of the columns and sends the other half over; the sum of
 * two does not depend on who adds. to, from: 16 bytes a thread and step of four. */
template <int BN>
__device__ __forceinline__ void trade_halves(const float (&sum)[BN / 2], float (&mine)[BN / 4], int part, uint32_t to,
                                             uint32_t full_there, smem_addr from_s, smem_addr full_s, unsigned parity) {
#pragma unroll
    for (int i = 0; i < BN / 4; i += 4) {
        float x[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            x[e] = part ? sum[i + e] : sum[BN / 4 + i + e];
            mine[i + e] = part ? sum[BN / 4 + i + e] : sum[i + e];
        }
        st_async_128(to + i / 4 * WARPGROUP * 16, x[0], x[1], x[2], x[3], full_there);
    }
    mbarrier_wait(full_s, parity);
#pragma unroll
    for (int i = 0; i < BN / 4; i += 4) {
        const uint4 x = ld_shared_128(from_s + i / 4 * WARPGROUP * 16);
        mine[i] += __uint_as_float(x.x), mine[i + 1] += __uint_as_float(x.y);
        mine[i + 2] += __uint_as_float(x.z), mine[i + 3] += __uint_as_float(x.w);
    }
}

/* ---- 4 the kernel -------------------------------------------------------------------------------------------- */
template <class T, class Tile, int MODE>
__global__ void __cluster_dims__(Tile::CM *Tile::CN *Tile::CK, 1, 1) __launch_bounds__(Tile::THREADS, 1)
    gemm_sm90a_kernel(const __grid_constant__ Params x) {
    typedef Smem<Tile, MODE> S;
    typedef typename S::A A;
    typedef typename S::B B;
    constexpr int BM = Tile::BM, BN = Tile::BN, STAGES = S::STAGES, WGS = Tile::WGS;
    constexpr int CM = Tile::CM, CN = Tile::CN, CK = Tile::CK, CLUSTER = CM * CN * CK,
                  NEIGHBOURS = CM + CN - 1; /* itself among them */
    constexpr int MT = BM / WGS / 64, BK = Tile::K64 * K_BLOCK;
    static_assert(BM % (64 * WGS) == 0 && BN % 16 == 0 && BN <= 256 && (CK == 1 || MT == 1), "whole wgmma");
    extern __shared__ __align__(1024) unsigned char smem[];
    const GemmProblem &p = x.p;
    const int warpgroup = threadIdx.x / WARPGROUP, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    /* (row, column, part of k) in the cluster, row fastest */
    const int rank = CLUSTER > 1 ? (int)cluster_ctarank() : 0;
    const int tile_m = rank % CM, tile_n = rank / CM % CN, part = rank / (CM * CN), first_of_part = part * CM * CN;
    const smem_addr ring_s = (cvta_to_shared(smem) + WGMMA_BLOCK_BYTES - 1) / WGMMA_BLOCK_BYTES * WGMMA_BLOCK_BYTES;
    tma_ring<STAGES> ring(ring_s + S::BARRIERS);

    if (threadIdx.x == 0) {
        prefetch_tensormap(&x.a), prefetch_tensormap(&x.b);
        ring.init(WGS * NEIGHBOURS);
        if (CK > 1) mbarrier_init(ring_s + S::TRADED, 1), mbarrier_init(ring_s + S::TRADED + 8, WGS * 4);
        fence_mbarrier_init();
    }
    if (CLUSTER > 1)
        barrier_cluster(); /* the barriers are there before any block's copies or arrivals reach them */
    else
        __syncthreads();

    griddepcontrol_wait(); /* what the kernel before wrote is there, and what it reads may be overwritten */
    /* after the wait: who begins now may rely on all but this kernel having ended */
    griddepcontrol_launch_dependents();

    const unsigned tiles = (unsigned)p.tiles_m * p.tiles_n, all = tiles * (unsigned)p.batch;
    const unsigned first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
    const int all_steps = (int)((p.k + BK - 1) / BK), part_steps = (all_steps + CK - 1) / CK;
    const int step0 = part * part_steps, steps = max(0, min(part_steps, all_steps - step0));

    if (warpgroup == WGS) {
        /* ---- 4.1 copies ---- */
        if (WGS > 1) setmaxnreg_dec<Tile::COPY_REGS>();
        if (threadIdx.x == WGS * WARPGROUP) {
            uint16_t row_blocks = 0;
            for (int j = 0; j < CN; ++j) row_blocks |= 1 << (first_of_part + tile_m + CM * j);
            const uint16_t col_blocks = ((1 << CM) - 1) << (first_of_part + CM * tile_n);
            for (unsigned t = first; t < all; t += step) {
                const TilePlace tile = tile_place(t % tiles, p.tiles_m, p.tiles_n, p.group);
                const int row = (tile.row * CM + tile_m) * BM, col = (tile.col * CN + tile_n) * BN;
                tma_at a_at = {}, b_at = {};
                place_batch(p, p.a_batch, t / tiles, a_at), place_batch(p, p.b_batch, t / tiles, b_at);
                for (int k = step0; k < step0 + steps; ++k) {
                    const smem_addr a_s = ring_s + ring.slot * S::SLOT, b_s = a_s + A::bytes;
                    ring.wait_empty(); /* all readers of what this step overwrites, here and in the others, have let go */
                    mbarrier_arrive_expect_tx(ring.full(), S::SLOT);
#pragma unroll
                    for (int kb = 0; kb < Tile::K64; ++kb) {
                        const int at_k = k * BK + kb * K_BLOCK;
                        copy_part<typename S::APart, S::ALONG_M, CN>(a_s + kb * S::BLOCK, &x.a, a_at, row, at_k, tile_n,
                                                                     ring.full(), row_blocks);
                        copy_part<typename S::BPart, S::ALONG_N, CM>(b_s + kb * S::BLOCK, &x.b, b_at, col, at_k, tile_m,
                                                                     ring.full(), col_blocks);
                    }
                    ring.advance();
                }
            }
            /* all readers' last arrivals have come: none is on its way to a block that has left */
            for (int s = 0; s < STAGES; ++s) ring.wait_empty(), ring.advance();
        }
    } else {
        /* ---- 4.2 products ---- */
        if (WGS > 1) setmaxnreg_inc<Tile::SUM_REGS>();
        float sum[MT][BN / 2];
        unsigned trade_parity = 0;
        int panel = 0;
        /* a lane for each block that copies into this one: the CM of its column, then the other CN - 1 of its row */
        const int other = lane - CM,
                  neighbour =
                      first_of_part + (lane < CM ? lane + CM * tile_n : tile_m + CM * (other + (other >= tile_n)));
        const bool tells = warp == 0 && lane < NEIGHBOURS;
        const auto let_go = [&](smem_addr barrier_s) {
            if (!tells) return;
            if (CLUSTER > 1)
                mbarrier_arrive_cluster(barrier_s, neighbour);
            else
                mbarrier_arrive(barrier_s);
        };
        for (unsigned t = first; t < all; t += step) {
            for (int k = 0; k < steps; ++k) {
                const smem_addr a_s = ring_s + ring.slot * S::SLOT, b_s = a_s + A::bytes;
                const smem_addr before = ring.empty() + (ring.slot == 0 ? 8 * (STAGES - 1) : -8);
                ring.wait_full();
                wgmma_pin(sum);
                wgmma_fence(); /* sums may have been touched by other code */
#pragma unroll
                for (int kk = 0; kk < BK / 16; ++kk) {
                    const int block = kk / (K_BLOCK / 16) * S::BLOCK, k16 = kk % (K_BLOCK / 16);
                    const uint64_t b = B::descriptor(b_s + block + k16 * B::k16_bytes);
#pragma unroll
                    for (int m = 0; m < MT; ++m) {
                        const uint64_t a =
                            A::descriptor(a_s + block + A::offset((warpgroup * MT + m) * 64) + k16 * A::k16_bytes);
                        wgmma_ss<T, BN, S::ALONG_M, S::ALONG_N>(sum[m], a, b, k + kk > 0);
                    }
                }
                wgmma_commit_group();
                wgmma_wait_group<1>(); /* the step before is done: its slot may be overwritten */
                if (k > 0) let_go(before);
                ring.advance();
            }
            const smem_addr last = ring.empty() + (ring.slot == 0 ? 8 * (STAGES - 1) : -8);
            wgmma_wait_group<0>();
            wgmma_pin(sum);
            if (steps > 0) let_go(last);
            if (CK > 1 && steps == 0) {
#pragma unroll
                for (int i = 0; i < BN / 2; ++i) sum[0][i] = 0;
            }

            /* ---- 4.3 results ---- */
            const TilePlace tile = tile_place(t % tiles, p.tiles_m, p.tiles_n, p.group);
            const smem_addr panels_s = ring_s + S::PANELS + (warpgroup * 4 + warp) * S::WARP_PANELS;
            const auto store = [&](auto &sums, int m) {
                const int row = (tile.row * CM + tile_m) * BM + (warpgroup * MT + m) * 64,
                          col = (tile.col * CN + tile_n) * BN + part * S::COLS;
                if constexpr (Tile::TURNED) {
                    float *const turned = (float *)(smem + (panels_s - cvta_to_shared(smem)) -
                                                    warp * S::WARP_PANELS); /* the warpgroup's */
                    store_turned<T, S::COLS, S::TURNED_LD>(p, gemm_place(p, t / tiles), sums, turned, row, col);
                } else if (x.plain) {
                    tma_at at = {{col, row + warp * 16}};
                    place_batch(p, p.out_batch, t / tiles, at);
                    if (p.epilogue.activation == GK_ACT_NONE || p.epilogue.activation == GK_ACT_RELU)
                        store_plain<T, typename S::Panel, S::COLS, Tile::PANELS, false>(x, sums, panels_s, panel, at,
                                                                                        lane);
                    else
                        store_plain<T, typename S::Panel, S::COLS, Tile::PANELS, true>(x, sums, panels_s, panel, at,
                                                                                       lane);
                } else {
                    store_any<T, S::COLS>(p, gemm_place(p, t / tiles), sums, panels_s, row + warp * 16, col, x.across,
                                          lane);
                }
            };
            if constexpr (CK > 1) {
                const int there = rank ^ (CM * CN), slot = S::TRADE + warpgroup * S::WARPGROUP_TRADE;
                const smem_addr full_s = ring_s + S::TRADED, empty_s = full_s + 8;
                const smem_addr from_s = ring_s + slot + threadIdx.x % WARPGROUP * 16;
                if (threadIdx.x == 0) mbarrier_arrive_expect_tx(full_s, WGS * S::WARPGROUP_TRADE);
                mbarrier_wait(empty_s, trade_parity ^ 1); /* the other has read what came of the last tile */
                float mine[BN / 4];
                trade_halves<BN>(sum[0], mine, part, mapa(from_s, there), mapa(full_s, there), from_s, full_s,
                                 trade_parity);
                __syncwarp(); /* the warp has read what came */
                if (lane == 0) mbarrier_arrive_cluster(empty_s, there);
                trade_parity ^= 1;
                store(mine, 0);
            } else {
#pragma unroll
                for (int m = 0; m < MT; ++m) store(sum[m], m);
            }
        }
        if (lane == 0) tma_store_wait_group_read<0>(); /* shared memory stays until the last panel has been read */
        if (CK > 1 && threadIdx.x == 0) mbarrier_wait(ring_s + S::TRADED + 8, trade_parity ^ 1); /* the other's, too */
    }
    if (CLUSTER > 1) barrier_cluster(); /* no block leaves while the other still copies to it */
}

/* ---- 5 the plan ---------------------------------------------------------------------------------------------- */
enum Key {  /* of a row */
    KEY_CM, /* rows and columns of a cluster */
    KEY_CN,
    KEY_CLUSTER, /* its blocks */
    KEY_PERCENT, /* of the dense peak */
    KEY_SMEM,
    KEY_PARTS, /* of k */
    KEY_TURNED
};

/* The call as a row computes it: turned, the results stay where they are. */
GemmProblem problem_of(const void *args, bool turned) {
    const GemmProblem p = gemm_problem_of((const gk_gemm_args *)args);
    if (!turned) return p;
    GemmProblem t = gemm_swapped(p);
    t.epilogue = p.epilogue;
    return t;
}

/* Time of a row: the busiest cluster's tiles one after the other. */
double us_of(const gk_cuda_row *row, const gk_gpu *gpu, const GemmProblem &p) {
    const int64_t rows = row->key[KEY_CM], cols = row->key[KEY_CN], blocks = row->key[KEY_CLUSTER];
    const int64_t tiles = gk_ceil_div(p.m, rows) * gk_ceil_div(p.n, cols) * p.batch;
    const double busiest = (double)gk_ceil_div(tiles, gpu->num_sms / blocks);
    const double peak = 4096 * gpu->clock_khz * 1e-3 * row->key[KEY_PERCENT] * 0.01;
    const double tile_us = 2.0 * (double)(rows * cols / blocks * gk_round_up(p.k, K_BLOCK)) / peak;
    const double trade_us = row->key[KEY_PARTS] > 1 ? TRADE_US * (double)(rows * cols) / (128 * 128) : 0;
    return busiest * (tile_us + TILE_US + trade_us);
}

/* Time of a product of few rows: its operands' bytes. */
double turned_us(const GemmProblem &p) {
    return TURNED_US + 2.0 * (double)(p.m + p.n) * (double)p.k * (double)p.batch / REALIGN_BYTES_PER_US;
}

/* The least that gemm_sm80's rows take: k split so that every SM has work. */
double other_us(const gk_gpu *gpu, const GemmProblem &p, bool chunks) {
    typedef Tile16_any Any;
    const int64_t tiles = gk_ceil_div(p.m, Any::BM) * gk_ceil_div(p.n, Any::BN) * p.batch;
    const int64_t steps = gk_ceil_div(p.k, Any::BK);
    const int64_t parts = gk_clamp_i64(gpu->num_sms / tiles, 1, gk_clamp_i64(steps / 4, 1, MAX_SPLITS));
    const int64_t busiest = gk_ceil_div(tiles * parts, gpu->num_sms);
    const double peak = 4096 * gpu->clock_khz * 1e-3 * (chunks ? PERCENT_128x128 : PERCENT_ANY) * 0.01;
    const double step_us = 2.0 * Any::BM * Any::BN * Any::BK / peak;
    return (double)(busiest * gk_ceil_div(steps, parts)) * step_us + BLOCK_US + (parts > 1 ? REDUCE_US : 0);
}

/* Rows and k in chunks of 16 bytes, as the kernels that copy by cp.async want them. */
bool in_chunks(const void *data, gk_dtype dtype, int64_t x_stride, int64_t k_stride, const int64_t *batch, int ndim) {
    return (k_stride == 1 && gemm_aligned(data, dtype, x_stride, batch, ndim)) ||
           (x_stride == 1 && gemm_aligned(data, dtype, k_stride, batch, ndim));
}

/* Whether the copies and a product of `us` are worth while. p: the problem before them. */
bool worth_copies(const gk_gpu *gpu, gk_dtype dtype, const GemmProblem &p, const Operands &o, bool turned, double us) {
    const bool chunks = in_chunks(p.a, dtype, p.a_m, p.a_k, p.a_batch, p.ndim) &&
                        in_chunks(p.b, dtype, p.b_n, p.b_k, p.b_batch, p.ndim);
    /* few rows: the copy of the weights would take longer than the product; as chunks gemm_skinny reads them */
    if (turned && (chunks || o.copied[0])) return false;
    return us + REALIGN_US + 2.0 * (double)o.bytes / REALIGN_BYTES_PER_US < other_us(gpu, p, chunks);
}

extern const gk_cuda_row *const sm90_rows;
extern const int num_sm90_rows;

bool takes(const gk_cuda_row *row, const gk_context *ctx, const void *args) {
    Operands o;
    o.p = problem_of(args, row->key[KEY_TURNED]);
    return operands_of(row->dtype, NULL, &o) && (!row->key[KEY_TURNED] || o.p.n <= row->key[KEY_CN]) &&
           smem_fits(ctx, row->key[KEY_SMEM]);
}

size_t workspace_bytes(const gk_cuda_row *row, const gk_context *, const void *args) {
    Operands o;
    o.p = problem_of(args, row->key[KEY_TURNED]);
    return operands_of(row->dtype, NULL, &o) ? (size_t)o.bytes : 0;
}

/* The row of least time among those that fit the GPU; few rows: the smallest turned one that holds them. */
const gk_cuda_row *choose(const gk_context *ctx, const void *arguments) {
    const gk_gemm_args *args = (const gk_gemm_args *)arguments;
    if (args->a.dtype != GK_BF16 && args->a.dtype != GK_F16) return NULL;
    const GemmProblem p = gemm_problem_of(args);
    const gk_gpu *gpu = gk_gpu_of(ctx->index);
    const bool turned = p.m <= SM90_TURNED_ROWS;
    if (turned ? p.n < 2 * SM90_TURNED_ROWS || p.k < SM90_TURNED_K : p.n <= SM90_TURNED_ROWS) return NULL;
    Operands o;
    o.p = turned ? gemm_swapped(p) : p;
    if (!operands_of(args->a.dtype, NULL, &o)) return NULL;
    const bool copies = o.bytes > 0, many_tiles = p.n * p.batch > (int64_t)SM90_TURNED_ROWS * gpu->num_sms;
    if (!copies && p.m <= SM90_SKINNY_ROWS && many_tiles && p.a_k == 1) return NULL;
    const gk_cuda_row *best = NULL;
    double best_us = 1e31;
    for (int i = 0; i < num_sm90_rows; ++i) {
        const gk_cuda_row *r = &sm90_rows[i];
        if (r->dtype != args->a.dtype || r->key[KEY_SMEM] > gpu->smem_per_block) continue;
        if (r->key[KEY_TURNED] != turned || (turned && p.m > r->key[KEY_CN])) continue;
        const double us = turned ? r->key[KEY_CN] : us_of(r, gpu, p);
        if (us < best_us) best = r, best_us = us;
    }
    if (best && copies && !worth_copies(gpu, args->a.dtype, p, o, turned, turned ? turned_us(p) : best_us)) return NULL;
    return best;
}

/* ---- 6 the launch -------------------------------------------------------------------------------------------- */
template <class Tile> void plan(const gk_context *ctx, GemmProblem *p, unsigned *clusters) {
    p->tiles_m = (int)gk_ceil_div(p->m, Tile::BM * Tile::CM), p->tiles_n = (int)gk_ceil_div(p->n, Tile::BN * Tile::CN);
    p->group = GROUP_ROWS_SM90, p->splits = 1;
    const int64_t tiles = (int64_t)p->tiles_m * p->tiles_n * p->batch;
    *clusters = (unsigned)gk_min_i64(tiles, gk_gpu_of(ctx->index)->num_sms / Tile::CLUSTER);
}

template <class T, class Tile, int MODE>
gk_status start(const gk_context *ctx, Params *x, const TensorShape *operands) {
    typedef Smem<Tile, MODE> S;
    unsigned clusters;
    plan<Tile>(ctx, &x->p, &clusters);
    gk_status status = make_tensor_map("gk_gemm", operands[0], 64, S::APart::box_rows, &x->a);
    if (status == GK_OK) status = make_tensor_map("gk_gemm", operands[1], 64, S::BPart::box_rows, &x->b);
    const GemmEpilogue &e = x->p.epilogue;
    /* tma stores whole chunks of 16 bytes: it would write past a last column that ends within one */
    x->plain = !Tile::TURNED && !e.c && e.out_vectors && e.out_dtype == element<T>::dtype && x->p.n % 8 == 0;
    const TensorShape out =
        operand_of(e.out, element<T>::dtype, x->p.m, x->p.n, e.out_row, 1, x->p, x->p.out_batch, false);
    const TensorShape preact =
        operand_of(e.preact, element<T>::dtype, x->p.m, x->p.n, e.preact_row, 1, x->p, x->p.preact_batch, false);
    x->plain = x->plain && tensor_map_fits(out) && (!e.preact || tensor_map_fits(preact));
    x->across = !Tile::TURNED && !e.out_vectors;
    if (status != GK_OK) return status;
    x->plain = x->plain && make_tensor_map("gk_gemm", out, S::PANEL_COLS, 16, &x->out) == GK_OK;
    x->plain = x->plain && (!e.preact || make_tensor_map("gk_gemm", preact, S::PANEL_COLS, 16, &x->preact) == GK_OK);
    if (x->across) x->p.epilogue = gemm_swapped(x->p).epilogue;
    return launch<gemm_sm90a_kernel<T, Tile, MODE>>("gk_gemm", ctx, dim3(clusters * Tile::CLUSTER), Tile::THREADS,
                                                    S::BYTES, *x, true);
}

template <class T, class Tile> gk_status run(const gk_cuda_row *row, const gk_context *ctx, const void *args) {
    Operands o;
    o.p = problem_of(args, Tile::TURNED);
    if (!operands_of(row->dtype, ((const gk_gemm_args *)args)->workspace, &o))
        return gk_fail(GK_ERR_UNSUPPORTED, "gk_gemm: %s does not take this call", row->name);
    if (o.bytes > 0) {
        const gk_status status = realign("gk_gemm", ctx, &o.copies[!o.copied[0]], o.copied[0] + o.copied[1]);
        if (status != GK_OK) return status;
    }
    Params x;
    x.p = o.p;
    switch (o.mode) {
    case 0: return start<T, Tile, 0>(ctx, &x, o.x);
    case 1: return start<T, Tile, 1>(ctx, &x, o.x);
    case 2: return start<T, Tile, 2>(ctx, &x, o.x);
    default: return start<T, Tile, 3>(ctx, &x, o.x);
    }
}

template <class Tile> void explain(const gk_cuda_row *, const gk_context *ctx, const void *args, gk_explanation *out) {
    GemmProblem p = problem_of(args, Tile::TURNED);
    unsigned clusters;
    plan<Tile>(ctx, &p, &clusters);
    out->tile[0] = Tile::BM, out->tile[1] = Tile::BN, out->tile[2] = Tile::K64 * K_BLOCK;
    out->tasks = (int64_t)p.tiles_m * p.tiles_n * p.batch * Tile::CLUSTER;
    out->waves = (double)out->tasks / (gk_gpu_of(ctx->index)->num_sms / Tile::CLUSTER * Tile::CLUSTER);
}

#define ROW(name, T, Tile)                                                                                        \
    {                                                                                                             \
        name, element<T>::dtype, takes, workspace_bytes, run<T, Tile>, explain<Tile>, {                           \
            Tile::BM *Tile::CM, Tile::BN *Tile::CN, Tile::CLUSTER, Tile::PERCENT, Smem<Tile, 3>::BYTES, Tile::CK, \
                Tile::TURNED                                                                                      \
        }                                                                                                         \
    }
#define ROWS(name, T)                                                        \
    ROW("gemm_sm90a_" name "_128x256x64", T, Tile90_128x256),                \
        ROW("gemm_sm90a_" name "_128x224x64", T, Tile90_128x224),            \
        ROW("gemm_sm90a_" name "_128x192x64", T, Tile90_128x192),            \
        ROW("gemm_sm90a_" name "_128x128x64", T, Tile90_128x128),            \
        ROW("gemm_sm90a_" name "_64x128x64", T, Tile90_64x128),              \
        ROW("gemm_sm90a_" name "_128x128x64_k2", T, Tile90_128x128_k2),      \
        ROW("gemm_sm90a_" name "_64x64x64_k2", T, Tile90_64x64_k2),          \
        ROW("gemm_sm90a_" name "_turned_64x16x256_k2", T, Tile90_turned_16), \
        ROW("gemm_sm90a_" name "_turned_64x32x128_k2", T, Tile90_turned_32), \
        ROW("gemm_sm90a_" name "_turned_64x64x128_k2", T, Tile90_turned_64)

const gk_cuda_row rows[] = {ROWS("bf16", __nv_bfloat16), ROWS("f16", __half)};
const gk_cuda_row *const sm90_rows = rows;
const int num_sm90_rows = sizeof rows / sizeof rows[0];

} // namespace

extern "C" const gk_cuda_table gk_gemm_sm90a_table = {rows, sizeof rows / sizeof rows[0], 90, choose};
