// SPDX-License-Identifier: BSD-3-Clause
// check_cuda_tile: tests the wrappers of csrc/cuda/ptx and the functions of csrc/cuda/tile on a
// device.
//
// Each function has one kernel on integer data. The host compares the result exactly with the
// constexpr maps of csrc/cuda/layout. Prints a line per function. The last line is "N passed, N
// failed" or "no CUDA device". Exits with 1 on a failure.
//
//  nvcc -std=c++17 -gencode=arch=compute_80,code=[sm_80,sm_90,compute_80] -I csrc
//  tests/csrc/check_cuda_tile.cu
#include "cuda/tile/convert.cuh"
#include "cuda/tile/copy.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/layout/atoms.cuh"
#include "cuda/tile/pipeline.cuh"
#include "cuda/tile/reduce.cuh"

#include "check_tile.cuh"

#include <math.h>

// ---- loads and stores ---------------------------------------------------------------------------

static __global__ void loads_kernel(uint32_t *out_g, const uint32_t *in_g) {
    SMEM;
    smem_addr s = cvta_to_shared(smem);
    int t = threadIdx.x;
    const uint4 *in = (const uint4 *)in_g + t;
    uint4 v = in[0];
    st_shared_128(s + 16 * t, v);
    v = in[32];
    st_shared_64(s + 512 + 16 * t, make_uint2(v.x, v.y));
    st_shared_64(s + 512 + 16 * t + 8, make_uint2(v.z, v.w));
    v = in[64];
    st_shared_32(s + 1024 + 16 * t, v.x);
    st_shared_32(s + 1024 + 16 * t + 4, v.y);
    st_shared_16(s + 1024 + 16 * t + 8, (uint16_t)v.z);
    st_shared_16(s + 1024 + 16 * t + 10, (uint16_t)(v.z >> 16));
    st_shared_32(s + 1024 + 16 * t + 12, v.w);
    st_shared_128(s + 1536 + 16 * t, in[96]);
    __syncthreads();
    int u = t ^ 5; // another thread's index
    st_global_128(out_g + 4 * u, ld_shared_128(s + 16 * u));
    uint2 lo = ld_shared_64(s + 512 + 16 * u), hi = ld_shared_64(s + 512 + 16 * u + 8);
    st_global_128(out_g + 128 + 4 * u, make_uint4(lo.x, lo.y, hi.x, hi.y));
    for (int i = 0; i < 4; ++i) out_g[256 + 4 * u + i] = ld_shared_32(s + 1024 + 16 * u + 4 * i);
    for (int i = 0; i < 4; ++i) {
        out_g[384 + 4 * u + i] = ld_shared_16(s + 1536 + 16 * u + 4 * i) |
                                 (uint32_t)ld_shared_16(s + 1536 + 16 * u + 4 * i + 2) << 16;
    }
}

static void check_loads(const buffer &in, const buffer &out) {
    uint32_t *x = (uint32_t *)in.host, *y = (uint32_t *)out.host;
    for (int i = 0; i < 512; ++i) x[i] = 0x9e3779b9u * (uint32_t)(i + 1);
    to_device(in);
    loads_kernel<<<1, 32, SMEM_BYTES>>>((uint32_t *)out.device, (const uint32_t *)in.device);
    to_host(out);
    for (int i = 0; i < 512; ++i) check(x[i] == y[i], "word", i, y[i], x[i]);
    verb("ld_shared, st_shared, ld_global, st_global");
}

// ---- cp.async -----------------------------------------------------------------------------------

// Thread t copies with src_bytes = t (cg, L2 hint), t % 5 (ca 4), t % 9 (ca 8), t (ca 16); t < 17.
static __global__ void cp_async_kernel(uint32_t *out_g, const unsigned char *in_g, int zero) {
    SMEM;
    smem_addr s = cvta_to_shared(smem);
    int t = threadIdx.x;
    fill_smem(s, 4096, 0xa5a5a5a5u);
    if (t < 17) {
        const unsigned char *from_g = in_g + 16 * t;
        cp_async_cg_16(s + 16 * t, from_g, t);
        cp_async_cg_16_l2_128b(s + 512 + 16 * t, from_g, t);
        cp_async_ca<4>(s + 1024 + 16 * t, from_g, t % 5);
        cp_async_ca<8>(s + 1536 + 16 * t, from_g, t % 9);
        cp_async_ca<16>(s + 2048 + 16 * t, from_g, t);
        cp_async_cg_16(s + 2560 + 16 * t, from_g);
        // a choice between two constants
        cp_async_cg_16(s + 3072 + 16 * t, t % 2 ? from_g : NULL, t % 2 ? 16 : 0);
        const void *nowhere_g = (const void *)(uintptr_t)(16 * t);
        cp_async_cg_16(s + 3584 + 16 * t, nowhere_g, zero);
    }
    cp_async_commit_group();
    cp_async_wait_group<0>();
    smem_to_global(out_g, s, 4096);
}

static void check_cp_async(const buffer &in, const buffer &out) {
    for (int i = 0; i < 17 * 16; ++i) in.host[i] = (unsigned char)(i * 7 % 251 + 1);
    to_device(in);
    cp_async_kernel<<<1, 64, SMEM_BYTES>>>((uint32_t *)out.device, in.device, 0);
    to_host(out);
    for (int region = 0; region < 8; ++region) {
        for (int i = 0; i < 17 * 16; ++i) {
            int t = i / 16, byte = i % 16, width = region == 2 ? 4 : region == 3 ? 8 : 16;
            int read[] = {t, t, t % 5, t % 9, t, 16, t % 2 ? 16 : 0, 0};
            int expected = byte >= width ? 0xa5 : byte < read[region] ? in.host[i] : 0;
            check(out.host[region * 512 + i] == expected, "byte", region * 1000 + i,
                  out.host[region * 512 + i], expected);
        }
    }
    verb("cp_async, zeros past src_bytes");
}

// ---- ldmatrix and movmatrix ---------------------------------------------------------------------

static __global__ void ldmatrix_kernel(uint32_t *out_g) {
    SMEM;
    smem_addr s = cvta_to_shared(smem);
    int lane = threadIdx.x;
    // element: matrix * 64 + row * 8 + col
    for (int i = lane; i < 256; i += 32) st_shared_16(s + 2 * i, (uint16_t)i);
    __syncwarp();
    smem_addr row_s = s + ldmatrix_matrix(lane) * 128 + ldmatrix_row(lane) * 16;
    uint32_t r[2][4] = {};
    ldmatrix_x4(r[0], row_s);
    ldmatrix_x4_trans(r[1], row_s);
    for (int i = 0; i < 8; ++i) out_g[i * 32 + lane] = r[i / 4][i % 4];
    out_g[8 * 32 + lane] = movmatrix_trans(r[0][1]);
}

static void check_ldmatrix(const buffer &out) {
    ldmatrix_kernel<<<1, 32, SMEM_BYTES>>>((uint32_t *)out.device);
    to_host(out);
    const uint16_t *got = (const uint16_t *)out.host;
    for (int i = 0; i < 8; ++i) {
        const int matrix = i % 4;
        const bool trans = i >= 4;
        for (int lane = 0; lane < 32; ++lane) {
            for (int half = 0; half < 2; ++half) {
                coord c = ldmatrix_element(lane, half, trans);
                int expected = matrix * 64 + c.row * 8 + c.col;
                int x = got[(i * 32 + lane) * 2 + half];
                check(x == expected, "element", i * 100 + lane, x, expected);
            }
        }
    }
    verb("ldmatrix x4, trans");
    for (int lane = 0; lane < 32; ++lane) {
        for (int half = 0; half < 2; ++half) {
            coord c = movmatrix_element(lane, half);
            int x = got[(8 * 32 + lane) * 2 + half], expected = 64 + c.row * 8 + c.col;
            check(x == expected, "element", lane, x, expected);
        }
    }
    verb("movmatrix");
}

// ---- mma ----------------------------------------------------------------------------------------

// c [16][8] = c + a [16][K] b [K][8], operands picked from global memory by the maps.
template <typename T>
static __global__ void mma_kernel(float *c_g, const float *a_g, const float *b_g) {
    constexpr int elements = sizeof(T) == 2 ? 2 : 1, k = 8 * elements;
    int lane = threadIdx.x;
    uint32_t a[4], b[2];
    float c[4];
    for (int r = 0; r < 4; ++r) {
        coord lo = elements == 2 ? frag_a16(lane, 2 * r) : frag_a32(lane, r);
        coord hi = elements == 2 ? frag_a16(lane, 2 * r + 1) : lo;
        float x = a_g[lo.row * k + lo.col], y = a_g[hi.row * k + hi.col];
        if constexpr (elements == 2)
            a[r] = pack2<T>(x, y);
        else
            a[r] = cvt_rna_tf32(x);
    }
    for (int r = 0; r < 2; ++r) {
        coord lo = elements == 2 ? frag_b16(lane, 2 * r) : frag_b32(lane, r);
        coord hi = elements == 2 ? frag_b16(lane, 2 * r + 1) : lo;
        float x = b_g[lo.row * 8 + lo.col], y = b_g[hi.row * 8 + hi.col];
        if constexpr (elements == 2)
            b[r] = pack2<T>(x, y);
        else
            b[r] = cvt_rna_tf32(x);
    }
    for (int r = 0; r < 4; ++r) c[r] = c_g[frag_row(lane, r) * 8 + frag_col(lane, r)];
    mma_add<T>(c, a, b);
    for (int r = 0; r < 4; ++r) c_g[frag_row(lane, r) * 8 + frag_col(lane, r)] = c[r];
}

template <typename T>
static void check_mma(const buffer &a, const buffer &b, const buffer &c, const char *name) {
    int k = sizeof(T) == 2 ? 16 : 8;
    float *x = (float *)a.host, *y = (float *)b.host, *z = (float *)c.host;
    double exact[128];
    for (int i = 0; i < 16 * k; ++i) x[i] = (float)(random_below(255) - 127);
    for (int i = 0; i < k * 8; ++i) y[i] = (float)(random_below(255) - 127);
    for (int i = 0; i < 128; ++i) z[i] = (float)random_below(1000);
    for (int m = 0; m < 16; ++m) {
        for (int n = 0; n < 8; ++n) {
            exact[m * 8 + n] = z[m * 8 + n];
            for (int i = 0; i < k; ++i) exact[m * 8 + n] += (double)x[m * k + i] * y[i * 8 + n];
        }
    }
    to_device(a);
    to_device(b);
    to_device(c);
    mma_kernel<T><<<1, 32>>>((float *)c.device, (const float *)a.device, (const float *)b.device);
    to_host(c);
    for (int i = 0; i < 128; ++i) check(z[i] == exact[i], "element", i, z[i], exact[i]);
    verb(name);
}

// ---- tile copies --------------------------------------------------------------------------------

enum copy_kind {
    COPY_ROWS,
    COPY_WHOLE,
    COPY_RAGGED
};

template <typename Tile, int THREADS, typename T>
static __global__ void copy_kernel(uint32_t *out_g, T *back_g, const T *src_g, copy_kind kind,
                                   int64_t row_stride, int rows_valid, int cols_valid) {
    SMEM;
    smem_addr s = cvta_to_shared(smem);
    int t = threadIdx.x;
    fill_smem(s, SMEM_BYTES, 0xa5a5a5a5u);
    if (kind == COPY_ROWS) copy_tile_async<Tile, THREADS>(s, src_g, row_stride, rows_valid, t);
    if (kind == COPY_WHOLE)
        copy_tile_async<Tile, THREADS>(s, src_g, row_stride, rows_valid, cols_valid, t);
    if (kind == COPY_RAGGED)
        copy_tile_async_ragged<Tile, THREADS>(s, src_g, row_stride, rows_valid, cols_valid, t);
    cp_async_commit_group();
    cp_async_wait_group<0>();
    smem_to_global(out_g, s, SMEM_BYTES);
    constexpr int cols = Tile::row_bytes / (int)sizeof(T);
    copy_tile_out<Tile, THREADS>(back_g, cols, s, Tile::rows - 1, cols - 16 / (int)sizeof(T), t);
}

// Each source element is its own index, so that every copied byte shows where it came from.
template <typename Tile, int THREADS, typename T>
static void check_copy(const buffer &in, const buffer &out, const buffer &back) {
    constexpr int cols = Tile::row_bytes / (int)sizeof(T), per_chunk = 16 / (int)sizeof(T);
    T *x = (T *)in.host;
    // odd, so that no element is zero
    for (int i = 0; i < MOST_BYTES / (int)sizeof(T); ++i) x[i] = (T)(2 * i + 1);
    to_device(in);
    for (int trial = 0; trial < 12; ++trial) {
        copy_kind kind = (copy_kind)(trial % 3);
        int limits[] = {-3, 0, 1, Tile::rows - 1, Tile::rows, Tile::rows + 9};
        int rows_valid = limits[random_below(6)],
            cols_valid = random_below(cols + 3 * per_chunk) - per_chunk;
        const int64_t row_stride = cols + per_chunk;
        const int first = 4 * per_chunk;
        if (trial < 3) {
            rows_valid = Tile::rows - 1;
            cols_valid = cols - per_chunk;
        }
        if (kind == COPY_ROWS) cols_valid = cols;
        if (kind == COPY_WHOLE) cols_valid = cols_valid / per_chunk * per_chunk;
        memset(back.host, 0x77, MOST_BYTES);
        to_device(back);
        copy_kernel<Tile, THREADS, T><<<1, THREADS, SMEM_BYTES>>>(
            (uint32_t *)out.device, (T *)back.device, (const T *)in.device + first, kind,
            row_stride, rows_valid, cols_valid);
        to_host(out);
        to_host(back);
        long wrong = 0, wrong_back = 0, past = 0;
        for (int row = 0; row < Tile::rows; ++row) {
            for (int col = 0; col < cols; ++col) {
                T got, sent, expected = 0, untouched;
                memcpy(&got, out.host + Tile::offset_of(row, col, sizeof(T)), sizeof(T));
                memcpy(&sent, back.host + (row * cols + col) * sizeof(T), sizeof(T));
                memset(&untouched, 0x77, sizeof(T));
                if (row < rows_valid && col < cols_valid)
                    expected = x[first + row * row_stride + col];
                wrong += got != expected;
                wrong_back +=
                    sent != (row < Tile::rows - 1 && col < cols - per_chunk ? expected : untouched);
            }
        }
        for (int i = Tile::bytes; i < SMEM_BYTES; ++i) past += out.host[i] != 0xa5;
        check(wrong == 0, "elements wrong in shared memory, trial", trial, (double)wrong, 0);
        check(wrong_back == 0, "elements wrong in global memory, trial", trial, (double)wrong_back,
              0);
        check(past == 0, "bytes written past the tile, trial", trial, (double)past, 0);
    }
}

// ---- fragments out of tiles ---------------------------------------------------------------------

// Every 16 x 16 block of a tile in the four orders, in steps from one base address: out
// [way][block][lane][4].
template <typename Tile> static __global__ void fragments_kernel(uint32_t *out_g) {
    SMEM;
    smem_addr s = cvta_to_shared(smem);
    constexpr int cols = Tile::row_bytes / 2;
    int lane = threadIdx.x;
    for (int i = lane; i < Tile::rows * cols; i += 32)
        st_shared_16(s + Tile::offset_of(i / cols, i % cols, 2), (uint16_t)i);
    __syncwarp();
    smem_addr base[4] = {frag_a_base<Tile>(s, lane), frag_a_trans_base<Tile>(s, lane),
                         frag_b_base<Tile>(s, lane), frag_b_trans_base<Tile>(s, lane)};
    for (int row = 0; row < Tile::rows; row += 16) {
        for (int chunk = 0; chunk < Tile::chunks; chunk += 2) {
            int block = row / 16 * (Tile::chunks / 2) + chunk / 2;
            uint32_t r[4][4];
            load_frag_a(r[0], Tile::down(Tile::along(base[0], chunk), row));
            load_frag_a_trans(r[1], Tile::along(Tile::down(base[1], row), chunk));
            load_frag_b(r[2], Tile::down(Tile::along(base[2], chunk), row));
            load_frag_b_trans(r[3], Tile::along(frag_b_trans_base<Tile>(s, lane, row), chunk));
            for (int i = 0; i < 16; ++i) {
                out_g[((i / 4 * (Tile::bytes / 512) + block) * 32 + lane) * 4 + i % 4] =
                    r[i / 4][i % 4];
            }
        }
    }
}

template <typename Tile> static void check_fragments(const buffer &out) {
    constexpr int cols = Tile::row_bytes / 2, blocks = Tile::bytes / 512;
    fragments_kernel<Tile><<<1, 32, SMEM_BYTES>>>((uint32_t *)out.device);
    to_host(out);
    const uint16_t *got = (const uint16_t *)out.host;
    for (int i = 0; i < 4 * blocks * 32 * 8; ++i) {
        int e = i % 8, lane = i / 8 % 32, block = i / 256 % blocks, way = i / 256 / blocks;
        coord c = way < 2 ? frag_a16(lane, e) : frag_b16(lane, e % 4);
        if (way >= 2) c.col += e / 4 * 8;
        if (way == 1 || way == 2) c = coord{c.col, c.row}; // the tile holds the transpose
        int row = block / (Tile::chunks / 2) * 16 + c.row,
            col = block % (Tile::chunks / 2) * 16 + c.col;
        check(got[i] == (uint16_t)(row * cols + col), "element", i, got[i], row * cols + col);
    }
}

// O [16][8] = (A B) V with A [16][16], B [16][16], V [16][8]: accumulators become operand A. Then
// O2 [16][8] = W (B2^T A^T): an accumulator [16][8] becomes operand B. All operands come from
// global memory through the maps.
static __global__ void chain_kernel(float *o_g, const float *a_g, const float *b_g,
                                    const float *v_g) {
    int lane = threadIdx.x;
    uint32_t a[4], b[2], p[4];
    float left[4] = {}, right[4] = {}, o[4] = {};
    for (int r = 0; r < 4; ++r) {
        coord c = frag_a16(lane, 2 * r);
        a[r] = pack2<bf16>(a_g[c.row * 16 + c.col], a_g[c.row * 16 + c.col + 1]);
    }
    for (int half = 0; half < 2; ++half) {
        for (int r = 0; r < 2; ++r) {
            coord c = frag_b16(lane, 2 * r);
            b[r] = pack2<bf16>(b_g[c.row * 16 + c.col + 8 * half],
                               b_g[(c.row + 1) * 16 + c.col + 8 * half]);
        }
        mma_add<bf16>(half ? right : left, a, b);
    }
    for (int r = 0; r < 2; ++r) {
        coord c = frag_b16(lane, 2 * r);
        b[r] = pack2<bf16>(v_g[c.row * 8 + c.col], v_g[(c.row + 1) * 8 + c.col]);
    }
    acc_to_a<bf16>(p, left, right);
    mma_add<bf16>(o, p, b);
    for (int r = 0; r < 4; ++r) o_g[frag_row(lane, r) * 8 + frag_col(lane, r)] = o[r];
    // A times the first half of A B
    float o2[4] = {};
    acc_to_b<bf16>(b, left);
    mma_add<bf16>(o2, a, b);
    for (int r = 0; r < 4; ++r) o_g[128 + frag_row(lane, r) * 8 + frag_col(lane, r)] = o2[r];
}

static void check_chain(const buffer &a, const buffer &b, const buffer &v, const buffer &o) {
    float *x = (float *)a.host, *y = (float *)b.host, *z = (float *)v.host, *got = (float *)o.host;
    for (int i = 0; i < 256; ++i) {
        x[i] = (float)(random_below(5) - 2);
        y[i] = (float)(random_below(5) - 2);
    }
    for (int i = 0; i < 128; ++i) z[i] = (float)(random_below(9) - 4);
    to_device(a);
    to_device(b);
    to_device(v);
    chain_kernel<<<1, 32>>>((float *)o.device, (const float *)a.device, (const float *)b.device,
                            (const float *)v.device);
    to_host(o);
    float p[256];
    for (int i = 0; i < 256; ++i) {
        p[i] = 0;
        for (int k = 0; k < 16; ++k) p[i] += x[i / 16 * 16 + k] * y[k * 16 + i % 16];
    }
    for (int i = 0; i < 128; ++i) {
        float first = 0, second = 0;
        for (int k = 0; k < 16; ++k) {
            first += p[i / 8 * 16 + k] * z[k * 8 + i % 8];
            second += x[i / 8 * 16 + k] * p[k * 16 + i % 8];
        }
        check(got[i] == first, "accumulators as A, element", i, got[i], first);
        check(got[128 + i] == second, "accumulator as B, element", i, got[128 + i], second);
    }
    verb("acc_to_a, acc_to_b");
}

// ---- reductions and conversions -----------------------------------------------------------------

static __global__ void reduce_kernel(double *out_g, const int *in_g) {
    int lane = threadIdx.x, x = in_g[lane];
    double got[12] = {
        (double)warp_sum(x),        (double)quad_sum(x),        (double)octet_sum(x),
        (double)warp_max(x),        (double)quad_max(x),        (double)octet_max(x),
        (double)warp_sum((float)x), (double)quad_max((float)x), (double)octet_sum((float)x),
        warp_sum((double)x),        quad_max((double)x),        octet_max((double)x)};
    for (int i = 0; i < 12; ++i) out_g[i * 32 + lane] = got[i];
}

static void check_reduce(const buffer &in, const buffer &out) {
    int *x = (int *)in.host;
    for (int i = 0; i < 32; ++i) x[i] = random_below(2000) - 1000;
    to_device(in);
    reduce_kernel<<<1, 32>>>((double *)out.device, (const int *)in.device);
    to_host(out);
    const int groups[12] = {0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2},
              is_max[12] = {0, 0, 0, 1, 1, 1, 0, 1, 0, 0, 1, 1};
    for (int i = 0; i < 12; ++i) {
        for (int lane = 0; lane < 32; ++lane) {
            double sum = 0, most = -1e9;
            for (int other = 0; other < 32; ++other) {
                if (groups[i] == 1 && other / 4 != lane / 4) continue;
                if (groups[i] == 2 && other % 4 != lane % 4) continue;
                sum += x[other];
                most = x[other] > most ? x[other] : most;
            }
            double got = ((double *)out.host)[i * 32 + lane], expected = is_max[i] ? most : sum;
            check(got == expected, "lane", i * 100 + lane, got, expected);
        }
    }
    verb("warp, quad and octet sums and maxima");
}

static __global__ void convert_kernel(uint32_t *out_g, const float *in_g, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        float x = in_g[i], y = in_g[(i + 1) % n];
        uint32_t *out = out_g + 16 * i;
        out[0] = pack2<bf16>(x, y);
        out[1] = pack2<__half>(x, y);
        out[2] = __float_as_uint(unpack2<bf16>(out[0]).y);
        out[3] = __float_as_uint(unpack2<__half>(out[1]).y);
        out[4] = __float_as_uint(to_f32(from_f32<bf16>(x)));
        out[5] = __float_as_uint(to_f32(from_f32<__half>(x)));
        out[6] = __float_as_uint(to_f32(from_f32<float>(x)));
        out[7] = __float_as_uint(to_f32(from_f32<double>(x)));
        out[8] = cvt_rna_tf32(x);
        out[9] = prmt(__float_as_uint(x), __float_as_uint(y), 0x6351);
        out[10] = __float_as_uint(ex2_approx_ftz(x / 64));
        out[11] = __float_as_uint(lg2_approx_ftz(fabsf(x)));
        out[12] = __float_as_uint(tanh_approx(x / 64));
    }
}

static float as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
static uint32_t as_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

// Rounds to nearest even with 8 significant bits; exact in the range of float32.
static uint32_t to_bf16(float x) { return (as_bits(x) + 0x7fff + (as_bits(x) >> 16 & 1)) >> 16; }
// The same for float16, computed by arithmetic. Normal numbers below 65520.
static double to_f16(float x) {
    int exponent;
    frexp(x, &exponent);
    double unit = ldexp(1, exponent - 11);
    return nearbyint(x / unit) * unit;
}

static void check_convert(const buffer &in, const buffer &out) {
    const int n = 2048;
    float *x = (float *)in.host;
    // multiples of half a unit in the last place of both types, which include the ties
    for (int i = 0; i < n; ++i) {
        x[i] = (float)(random_below(2) * 2 - 1) * (float)(4096 + random_below(4096)) /
               (float)(1 << random_below(14));
        if (i % 3 == 0) x[i] = (float)(random_below(2) * 2 - 1) * (float)(512 + random_below(512));
        if (i % 3 == 1) x[i] += ldexpf(x[i], -20);
    }
    to_device(in);
    convert_kernel<<<1, 256>>>((uint32_t *)out.device, (const float *)in.device, n);
    to_host(out);
    for (int i = 0; i < n; ++i) {
        const uint32_t *got = (const uint32_t *)out.host + 16 * i;
        float y = x[(i + 1) % n];
        uint32_t pair = to_bf16(x[i]) | to_bf16(y) << 16, bits = as_bits(x[i]), next = as_bits(y);
        check(got[0] == pair, "pack2 bf16", i, got[0], pair);
        check(as_float(got[2]) == as_float(pair & 0xffff0000u), "unpack2 bf16", i, as_float(got[2]),
              y);
        check(as_float(got[3]) == to_f16(y), "pack2 and unpack2 half", i, as_float(got[3]),
              to_f16(y));
        check(as_float(got[4]) == as_float(pair << 16), "from_f32 bf16", i, as_float(got[4]), x[i]);
        check(as_float(got[5]) == to_f16(x[i]), "from_f32 half", i, as_float(got[5]), to_f16(x[i]));
        check(as_float(got[6]) == x[i] && as_float(got[7]) == x[i], "float and double", i,
              as_float(got[6]), x[i]);
        uint32_t tf32 = (bits + 0x1000) & 0xffffe000u; // ties go away from zero
        check((got[8] & 0xffffe000u) == tf32, "cvt_rna_tf32", i, got[8], tf32);
        uint32_t bytes[8], permuted = 0;
        for (int b = 0; b < 8; ++b) bytes[b] = (b < 4 ? bits : next) >> (8 * (b % 4)) & 0xff;
        permuted = bytes[1] | bytes[5] << 8 | bytes[3] << 16 | bytes[6] << 24;
        check(got[9] == permuted, "prmt", i, got[9], permuted);
        double e = exp2((double)(x[i] / 64)), l = log2(fabs((double)x[i])),
               t = tanh((double)(x[i] / 64));
        if (e < 3e38 && e > 2e-38)
            check(fabs(as_float(got[10]) - e) <= e * 0x1p-21, "ex2", i, as_float(got[10]), e);
        check(fabs(as_float(got[11]) - l) <= 0x1p-21 * (1 + fabs(l)), "lg2", i, as_float(got[11]),
              l);
        check(fabs(as_float(got[12]) - t) <= 0x1p-10 * fabs(t), "tanh", i, as_float(got[12]), t);
    }
    verb("conversions, prmt, ex2, lg2, tanh");
}

// ---- all together: c [m][n] = a [m][k] b [n][k]^T by a ring of STAGES tiles of 64 x 64 ---------

template <typename T, int STAGES, bool TRANS>
static __global__ void __launch_bounds__(128)
    ring_kernel(float *c_g, const T *a_g, const T *b_g, int64_t lda, int64_t ldb, int m, int n,
                int k) {
    typedef smem_tile<64, 128> Tile;
    constexpr int elements = 128 / (int)sizeof(T), steps_of_tile = elements / (32 / (int)sizeof(T));
    SMEM;
    int thread = threadIdx.x, lane = thread % 32, w = thread / 32;
    smem_addr a_s = cvta_to_shared(smem), b_s = a_s + STAGES * Tile::bytes;
    smem_addr a_base = frag_a_base<Tile>(a_s, lane, 16 * w);
    smem_addr b_base = TRANS ? frag_b_trans_base<Tile>(b_s, lane) : frag_b_base<Tile>(b_s, lane);
    cp_ring<STAGES> ring;
    int steps = (k + elements - 1) / elements;
    float c[8][4] = {};
    for (int j = 0; j < steps + STAGES - 1; ++j) {
        // the first STAGES - 1 fill the ring
        int stage = j < STAGES - 1 ? j : ring.write, at = j * elements;
        if (j >= STAGES - 1) ring.wait();
        if (j < steps) {
            copy_tile_async_ragged<Tile, 128>(a_s + stage * Tile::bytes, a_g + at, lda, m, k - at,
                                              thread);
            if (TRANS)
                copy_tile_async<Tile, 128>(b_s + stage * Tile::bytes, b_g + at * ldb, ldb, k - at,
                                           thread);
            else
                copy_tile_async_ragged<Tile, 128>(b_s + stage * Tile::bytes, b_g + at, ldb, n,
                                                  k - at, thread);
        }
        ring.commit();
        if (j < STAGES - 1) continue;
        int read = ring.read * Tile::bytes;
#pragma unroll
        for (int kk = 0; kk < steps_of_tile; ++kk) {
            uint32_t a[4], b[4];
            load_frag_a(a, Tile::along(a_base + read, 2 * kk));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (TRANS)
                    load_frag_b_trans(b, Tile::along(Tile::down(b_base + read, 16 * kk), 2 * i));
                else
                    load_frag_b(b, Tile::down(Tile::along(b_base + read, 2 * kk), 16 * i));
                mma_add<T>(c[2 * i], a, b);
                mma_add<T>(c[2 * i + 1], a, b + 2);
            }
        }
        ring.advance();
    }
    for (int i = 0; i < 32; ++i) {
        int row = 16 * w + frag_row(lane, i % 4), col = i / 4 * 8 + frag_col(lane, i % 4);
        if (row < m && col < n) c_g[row * n + col] = c[i / 4][i % 4];
    }
}

template <typename T, int STAGES, bool TRANS>
static void check_ring(const buffer &a, const buffer &b, const buffer &c, int m, int n, int k) {
    int ld = (k + 23) / 8 * 8, ldb = TRANS ? 64 : ld;
    static int x[64 * 1024], y[64 * 1024];
    // large or NaN outside the matrices
    memset(a.host, 0x7f, MOST_BYTES);
    memset(b.host, 0x7f, MOST_BYTES);
    for (int i = 0; i < m * k; ++i)
        put((T *)a.host, i / k * ld + i % k, x[i] = random_below(17) - 8);
    for (int i = 0; i < n * k; ++i) {
        put((T *)b.host, TRANS ? i % k * ldb + i / k : i / k * ldb + i % k,
            y[i] = random_below(17) - 8);
    }
    to_device(a);
    to_device(b);
    int bytes = STAGES * 2 * 64 * 128;
    must(cudaFuncSetAttribute(ring_kernel<T, STAGES, TRANS>,
                              cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
         "shared memory");
    ring_kernel<T, STAGES, TRANS><<<1, 128, bytes>>>((float *)c.device, (const T *)a.device,
                                                     (const T *)b.device, ld, ldb, m, n, k);
    to_host(c);
    for (int i = 0; i < m * n; ++i) {
        int exact = 0;
        for (int e = 0; e < k; ++e) exact += x[i / n * k + e] * y[i % n * k + e];
        check(((float *)c.host)[i] == (float)exact, "element", i, ((float *)c.host)[i], exact);
    }
}

template <typename T>
static void check_rings(const buffer &a, const buffer &b, const buffer &c, const char *name) {
    check_ring<T, 2, false>(a, b, c, 64, 64, 64);
    check_ring<T, 3, false>(a, b, c, 64, 64, 576);
    check_ring<T, 4, false>(a, b, c, 37, 53, 333);
    check_ring<T, 2, false>(a, b, c, 64, 64, 1);
    if constexpr (sizeof(T) == 2) {
        check_ring<T, 3, true>(a, b, c, 64, 64, 576);
        check_ring<T, 2, true>(a, b, c, 50, 64, 130);
    }
    verb(name);
}

int main() {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        printf("no CUDA device\n");
        return 0;
    }
    buffer a = make_buffer(), b = make_buffer(), c = make_buffer(), d = make_buffer();
    check_loads(a, b);
    check_cp_async(a, b);
    check_ldmatrix(b);
    check_mma<bf16>(a, b, c, "mma_m16n8k16_bf16");
    check_mma<__half>(a, b, c, "mma_m16n8k16_f16");
    check_mma<float>(a, b, c, "mma_m16n8k8_tf32");
    check_copy<smem_tile<64, 128>, 128, uint16_t>(a, b, c);
    check_copy<smem_tile<64, 128>, 256, uint32_t>(a, b, c);
    check_copy<smem_tile<16, 64>, 32, uint16_t>(a, b, c);
    check_copy<smem_tile<48, 32>, 64, uint64_t>(a, b, c);
    check_copy<smem_tile<64, 256>, 128, uint16_t>(a, b, c);
    check_copy<smem_tile<33, 512>, 128, uint32_t>(a, b, c);
    check_copy<smem_tile<64, 192>, 128, uint16_t>(a, b, c);
    check_copy<smem_tile<40, 160>, 96, uint16_t>(a, b, c);
    check_copy<smem_tile<8, 16>, 128, uint16_t>(a, b, c);
    verb("copy_tile_async, _ragged, _any, _out");
    check_fragments<smem_tile<32, 32>>(b);
    check_fragments<smem_tile<32, 64>>(b);
    check_fragments<smem_tile<64, 128>>(b);
    check_fragments<smem_tile<32, 160>>(b);
    check_fragments<smem_tile<32, 192>>(b);
    check_fragments<smem_tile<64, 256>>(b);
    check_fragments<smem_tile<32, 512>>(b);
    verb("load_frag_a, _a_trans, _b, _b_trans");
    check_chain(a, b, c, d);
    check_reduce(a, b);
    check_convert(a, b);
    check_rings<bf16>(a, b, c, "a ring of tiles, bf16");
    check_rings<__half>(a, b, c, "a ring of tiles, f16");
    check_rings<float>(a, b, c, "a ring of tiles, tf32");
    printf("%d passed, %d failed\n", num_passed, num_failed);
    return num_failed != 0 || num_passed == 0;
}
