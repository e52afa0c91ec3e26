/* SPDX-License-Identifier: BSD-3-Clause */
/* attn_mask: builds a stored mask (../../core/attn_mask.h) on the device, with the same bits as
 * ref/attn_mask.c. It does not synchronise with the host.
 *
 * A memset clears the parts that no kernel writes. Three launches follow:
 *
 *  mark    a block owns 128 queries x 128 keys: computes their bits, stores the block's kind and, in
 *          a dense store, its words
 *  list    a block owns one tile of queries, or of keys for the transposed tables: stores its list
 *          and, in other stores, the words of GK_MASK_KEPT blocks
 *  order   a block owns one head: sorts its tiles, longest list first
 *
 * The bits of 128 rows are in shared memory, four words a row in column order. Thread t stores
 * words 2 t and 2 t + 1.
 *
 * Block counts and block indices of the caller that are out of range are clamped or skipped, and
 * reported. More than 65,535 masks (B x H) in a call are refused. */
#include "../../core/attn_mask.h"
#include "../host/launch.cuh"

namespace {

constexpr int THREADS = 256;

struct View {
    const void *data; /* NULL: this tensor is absent */
    int64_t stride[4];
    int last; /* size of the last dimension */
};

/* The parameters of the three kernels. num, list, num_full, full: the caller's lists of blocks
 * (GK_MASK_OF_BLOCKS). rows: ranges or columns (GK_MASK_OF_RANGES, GK_MASK_OF_COLUMNS). */
struct Build {
    View mask, rows, num, list, num_full, full;
    gk_mask_source source;
    gk_mask_store store;
    bool is_bits, is_causal, transposed;
    int heads, seq_q, seq_k, tiles_q, tiles_k;
    gk_mask_layout at;
    int32_t *out;
    uint8_t *error_word;
};

/* One mask of the call: its batch entry, its head and its place in the result. */
struct Head {
    int64_t b, h;
    int32_t *out;
};
__device__ __forceinline__ Head head_of(const Build &x, int mask) {
    return {mask / x.heads, mask % x.heads, x.out + mask * x.at.total};
}
template <class T>
__device__ __forceinline__ const T *row_at(const View &v, const Head &y, int64_t row) {
    return (const T *)v.data + y.b * v.stride[0] + y.h * v.stride[1] + row * v.stride[2];
}

/* The two ranges of keys that a row sees, clamped to the keys; an empty range is 0, 0. */
__device__ __forceinline__ int4 range_of(const Build &x, const Head &y, int row) {
    const int32_t *from = row_at<int32_t>(x.rows, y, row);
    int r[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        if (i >= x.rows.last) continue;
        const int lo = min(max(from[i * x.rows.stride[3]], 0), x.seq_k);
        const int hi = min(max(from[(i + 1) * x.rows.stride[3]], 0), x.seq_k);
        if (lo < hi) {
            r[i] = lo;
            r[i + 1] = hi;
        }
    }
    return make_int4(r[0], r[1], r[2], r[3]);
}

/* The two ranges of rows that do not see a key. */
__device__ __forceinline__ int4 column_of(const Build &x, const Head &y, int key) {
    int32_t c[4];
    gk_mask_column(row_at<int32_t>(x.rows, y, key), x.rows.stride[3], x.rows.last, x.is_causal, key,
                   c);
    return make_int4(c[0], c[1], c[2], c[3]);
}

/* True if the caller's list of a tile of queries contains block kb. All threads take part. */
__device__ bool lists(const Build &x, const Head &y, const View &num, const View &list, int tile,
                      int kb) {
    if (!num.data) return false;
    const int given = *row_at<int32_t>(num, y, tile), n = min(max(given, 0), list.last);
    const int32_t *entry = row_at<int32_t>(list, y, tile);
    bool has = false, bad = given != n;
    for (int i = threadIdx.x; i < n; i += THREADS) {
        const int block = entry[i * list.stride[3]];
        has |= block == kb;
        bad |= block < 0 || block >= x.tiles_k;
    }
    if (bad) report(x.error_word, GK_BAD_MASK_BLOCKS);
    return __syncthreads_or(has);
}

/* Converts four bool bytes to four bits. Any byte but 0 counts as true. */
__device__ __forceinline__ uint32_t four_bools(uint32_t x) {
    return (__vsetgtu4(x, 0) * 0x01020408u >> 24) & 15;
}
__device__ __forceinline__ uint32_t sixteen_bools(uint4 v) {
    return four_bools(v.x) | four_bools(v.y) << 4 | four_bools(v.z) << 8 | four_bools(v.w) << 12;
}

/* bools_of and packed_of read the bits of 64 columns of a row, of which the first n > 0 are keys,
 * from bool bytes or from packed bits. */
__device__ __forceinline__ void bools_of(const View &mask, const uint8_t *at, int n,
                                         uint32_t bits[2]) {
    bits[0] = bits[1] = 0;
    if (mask.stride[3] == 1 && n == 64 && (uintptr_t)at % 16 == 0) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            bits[i / 2] |= sixteen_bools(((const uint4 *)at)[i]) << i % 2 * 16;
        return;
    }
    for (int c = 0; c < n; ++c) bits[c / 32] |= (uint32_t)(at[c * mask.stride[3]] != 0) << c % 32;
}
__device__ __forceinline__ void packed_of(const View &mask, const uint8_t *at, int n,
                                          uint32_t bits[2]) {
    bits[0] = bits[1] = 0;
    if (mask.stride[3] == 1 && n == 64 && (uintptr_t)at % 8 == 0) {
        const uint2 v = *(const uint2 *)at;
        bits[0] = v.x;
        bits[1] = v.y;
        return;
    }
    for (int c = 0; c < n; c += 8) bits[c / 32] |= (uint32_t)at[c / 8 * mask.stride[3]] << c % 32;
    bits[0] &= gk_mask_below(n);
    bits[1] &= gk_mask_below(n - 32);
}

/* Computes the bits of block (tile, kb) into rows_s. All threads take part. The caller synchronises
 * before reading them. */
__device__ void make_bits(const Build &x, const Head &y, int tile, int kb,
                          uint32_t (&rows_s)[128][4]) {
    const int tid = threadIdx.x, i0 = tile * GK_MASK_TILE, j0 = kb * GK_MASK_TILE;
    /* a lane owns a column; a warp owns 32 columns and 64 rows */
    if (x.source == GK_MASK_OF_COLUMNS) {
        const int group = tid / 32 % 4, key = j0 + 32 * group + tid % 32;
        const int4 c = key < x.seq_k ? column_of(x, y, key) : make_int4(0, 0, 0, 0);
        const int32_t hidden[4] = {c.x, c.y, c.z, c.w};
#pragma unroll 4
        for (int r = tid / 128 * 64; r < tid / 128 * 64 + 64; ++r) {
            const bool sees = key < x.seq_k && i0 + r < x.seq_q && !gk_mask_hides(hidden, i0 + r);
            const uint32_t word = __ballot_sync(0xffffffffu, sees);
            if (tid % 32 == 0) rows_s[r][group] = word;
        }
        return;
    }
    bool none = false, whole = false;
    if (x.source == GK_MASK_OF_BLOCKS) {
        whole = lists(x, y, x.num_full, x.full, tile, kb);
        /* called even if `whole` is true, because it reports bad entries */
        const bool part = lists(x, y, x.num, x.list, tile, kb);
        none = !whole && !part;
        whole = whole || !x.mask.data;
    }
    const int r = tid / 2, row = i0 + r, col = tid % 2 * 64; /* a thread computes half a row */
    const int n = min(x.seq_k - j0 - col, 64);
    uint32_t bits[2] = {0, 0};
    if (row < x.seq_q && n > 0 && !none) {
        if (whole) {
            bits[0] = gk_mask_below(n);
            bits[1] = gk_mask_below(n - 32);
        } else if (x.source == GK_MASK_OF_RANGES) {
            const int4 g = range_of(x, y, row);
#pragma unroll
            for (int w = 0; w < 2; ++w) {
                const int first = j0 + col + 32 * w;
                bits[w] = (gk_mask_below(g.y - first) & ~gk_mask_below(g.x - first)) |
                          (gk_mask_below(g.w - first) & ~gk_mask_below(g.z - first));
            }
        } else if (x.source == GK_MASK_OF_BITS || (x.source == GK_MASK_OF_BLOCKS && x.is_bits)) {
            packed_of(x.mask, row_at<uint8_t>(x.mask, y, row) + (j0 + col) / 8 * x.mask.stride[3],
                      n, bits);
        } else {
            bools_of(x.mask, row_at<uint8_t>(x.mask, y, row) + (j0 + col) * x.mask.stride[3], n,
                     bits);
        }
    }
    rows_s[r][tid % 2 * 2] = bits[0];
    rows_s[r][tid % 2 * 2 + 1] = bits[1];
}

/* This thread's two words of a block, in the order that consumers read (gk_mask_word). flipped: a
 * row of the words is a key, and a column is a query. */
__device__ __forceinline__ uint2 words_of(const uint32_t (&rows_s)[128][4], bool flipped) {
    const int first = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    uint32_t word[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int r = first + 8 * i;
        if (!flipped) {
            const uint32_t bits[4] = {rows_s[r][0], rows_s[r][1], rows_s[r][2], rows_s[r][3]};
            word[i] = gk_mask_word(bits, q);
        } else {
            for (int bit = 0; bit < 32; ++bit)
                word[i] |= (rows_s[bit / 2 * 8 + 2 * q + bit % 2][r / 32] >> r % 32 & 1) << bit;
        }
    }
    return make_uint2(word[0], word[1]);
}

/* ---- 1. the kind of a block, and in a dense store its words ---------------------------------- */
__global__ void __launch_bounds__(THREADS) attn_mask_mark_kernel(const __grid_constant__ Build x) {
    __shared__ uint32_t rows_s[128][4];
    const int kb = blockIdx.x, tile = blockIdx.y, tid = threadIdx.x;
    const Head y = head_of(x, blockIdx.z);
    if (x.store != GK_MASK_DENSE && (x.store == GK_MASK_RANGES ? kb : tile) == 0) {
        const int i = (x.store == GK_MASK_RANGES ? tile : kb) * GK_MASK_TILE + tid;
        int4 *to = (int4 *)(y.out + x.at.source) + i;
        if (tid < GK_MASK_TILE && x.store == GK_MASK_RANGES && i < x.seq_q) *to = range_of(x, y, i);
        if (tid < GK_MASK_TILE && x.store == GK_MASK_COLUMNS && i < x.seq_k)
            *to = column_of(x, y, i);
    }
    /* if there are no queries or no keys, the grid still has one block */
    if (kb >= x.tiles_k || tile >= x.tiles_q) return;
    make_bits(x, y, tile, kb, rows_s);
    __syncthreads();
    const int left = x.seq_k - kb * GK_MASK_TILE, col = tid % 2 * 64;
    const uint32_t low = rows_s[tid / 2][tid % 2 * 2], high = rows_s[tid / 2][tid % 2 * 2 + 1];
    const bool valid = tile * GK_MASK_TILE + tid / 2 < x.seq_q;
    const bool hole =
        valid && ((gk_mask_below(left - col) & ~low) || (gk_mask_below(left - col - 32) & ~high));
    const int any = __syncthreads_or(low | high), part = __syncthreads_or(hole);
    const int flag = !any ? GK_BLOCK_EMPTY : part ? GK_BLOCK_WORDS : GK_BLOCK_FULL;
    if (tid == 0) ((uint8_t *)(y.out + x.at.flags))[(int64_t)tile * x.tiles_k + kb] = (uint8_t)flag;
    if (x.store != GK_MASK_DENSE) return;
    const uint2 none = make_uint2(0, 0);
    uint2 *to =
        (uint2 *)(y.out + x.at.words + ((int64_t)tile * x.tiles_k + kb) * GK_MASK_BLOCK_INTS);
    to[tid] = flag == GK_BLOCK_WORDS ? words_of(rows_s, false) : none;
    if (!x.transposed) return;
    to = (uint2 *)(y.out + x.at.words_t + ((int64_t)kb * x.tiles_q + tile) * GK_MASK_BLOCK_INTS);
    to[tid] = flag == GK_BLOCK_WORDS ? words_of(rows_s, true) : none;
}

/* ---- 2. the list of a tile ------------------------------------------------------------------- */
__global__ void __launch_bounds__(THREADS) attn_mask_list_kernel(const __grid_constant__ Build x) {
    __shared__ uint32_t rows_s[128][4];
    __shared__ int kept_s[GK_MASK_KEPT];
    const int tid = threadIdx.x, lane = tid % 32;
    const bool by_keys = (int)blockIdx.x >= x.tiles_q, compact = x.store != GK_MASK_DENSE;
    const int major = by_keys ? blockIdx.x - x.tiles_q : blockIdx.x,
              n = by_keys ? x.tiles_q : x.tiles_k;
    const Head y = head_of(x, blockIdx.y);
    uint8_t *flags = (uint8_t *)(y.out + x.at.flags);
    if (tid < GK_MASK_KEPT) kept_s[tid] = -1;
    __syncthreads();
    /* One warp writes the list in ascending order. In stores other than dense, the first
     * GK_MASK_KEPT partial blocks of a tile get stored words. For the others (GK_BLOCK_MADE),
     * attention kernels compute the words. */
    if (tid < 32) {
        uint16_t *list =
            (uint16_t *)(y.out + (by_keys ? x.at.lists_t : x.at.lists)) + (int64_t)major * n;
        const unsigned before = (1u << lane) - 1;
        int count = 0, full = 0, partial = 0;
        for (int first = 0; first < n; first += 32) {
            const int minor = first + lane;
            const int64_t at =
                by_keys ? (int64_t)minor * x.tiles_k + major : (int64_t)major * x.tiles_k + minor;
            const int flag = minor < n ? flags[at] & 3 : GK_BLOCK_EMPTY;
            const unsigned is = __ballot_sync(~0u, flag != GK_BLOCK_EMPTY),
                           parts = __ballot_sync(~0u, flag > GK_BLOCK_FULL);
            int kind = flag;
            if (compact && flag > GK_BLOCK_FULL) {
                const int place = partial + __popc(parts & before);
                kind = place < GK_MASK_KEPT ? GK_BLOCK_WORDS : GK_BLOCK_MADE;
                if (place < GK_MASK_KEPT) kept_s[place] = minor;
                if (!by_keys)
                    flags[at] = (uint8_t)(kind == GK_BLOCK_WORDS ? kind | place << 2 : kind);
            }
            if (flag != GK_BLOCK_EMPTY)
                list[count + __popc(is & before)] = (uint16_t)(minor << 2 | kind);
            count += __popc(is);
            partial += __popc(parts);
            full += __popc(is) - __popc(parts);
        }
        if (lane == 0) {
            int4 *tiles = (int4 *)(y.out + (by_keys ? x.at.tiles_t : x.at.tiles));
            tiles[major] = make_int4(count, full, major, 0);
        }
    }
    if (!compact) return;
    __syncthreads();
    for (int place = 0; place < GK_MASK_KEPT && kept_s[place] >= 0; ++place) {
        const int minor = kept_s[place];
        make_bits(x, y, by_keys ? minor : major, by_keys ? major : minor, rows_s);
        __syncthreads();
        uint2 *to = (uint2 *)(y.out + (by_keys ? x.at.words_t : x.at.words) +
                              ((int64_t)major * GK_MASK_KEPT + place) * GK_MASK_BLOCK_INTS);
        to[tid] = words_of(rows_s, by_keys);
        __syncthreads();
    }
}

/* ---- 3. sorts tiles: longest list first; equal lists, later tile first ----------------------- */
__global__ void __launch_bounds__(THREADS) attn_mask_order_kernel(const __grid_constant__ Build x) {
    extern __shared__ int2 counts_s[];
    const bool by_keys = blockIdx.y == 1;
    const int n = by_keys ? x.tiles_k : x.tiles_q;
    const Head y = head_of(x, blockIdx.x);
    int4 *tiles = (int4 *)(y.out + (by_keys ? x.at.tiles_t : x.at.tiles));
    for (int i = threadIdx.x; i < n; i += THREADS) counts_s[i] = make_int2(tiles[i].x, tiles[i].y);
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += THREADS) {
        const int2 mine = counts_s[i];
        int rank = 0;
        for (int j = 0; j < n; ++j)
            rank += counts_s[j].x > mine.x || (counts_s[j].x == mine.x && j > i);
        tiles[rank] = make_int4(mine.x, mine.y, i, 0);
    }
}

/* ---- 4. launcher and table ------------------------------------------------------------------- */
View view_of(const gk_tensor *t) {
    View v = {};
    if (!t) return v;
    v.data = t->data;
    v.last = (int)t->shape[t->ndim - 1];
    for (int d = 0; d < t->ndim; ++d) v.stride[d] = t->stride[d];
    return v;
}

/* The largest pitch that cudaMemset2D takes on every device (cudaDeviceProp::memPitch). A dense
 * store of 131,072 queries and keys is larger. */
constexpr size_t MOST_PITCH = INT32_MAX;

/* Clears int32 [from, end) of each mask. */
gk_status clear_part(const char *op, const gk_context *ctx, const Build &x, int masks, int64_t from,
                     int64_t end) {
    const size_t pitch = 4 * (size_t)x.at.total, bytes = 4 * (size_t)(end - from);
    char *at = (char *)(x.out + from);
    cudaError_t error = cudaSuccess;
    if (masks > 1 && pitch <= MOST_PITCH)
        error = cudaMemset2DAsync(at, pitch, 0, bytes, (size_t)masks, (cudaStream_t)ctx->stream);
    else
        for (int i = 0; i < masks && error == cudaSuccess; ++i)
            error = cudaMemsetAsync(at + i * pitch, 0, bytes, (cudaStream_t)ctx->stream);
    if (error == cudaSuccess) return GK_OK;
    (void)cudaGetLastError();
    return gk_fail(GK_ERR_DEVICE, "the result of %s could not be cleared: %s", op,
                   cudaGetErrorString(error));
}

gk_status run(const gk_context *ctx, const void *args, const gk_plan *, void *) {
    static const char op[] = "gk_attn_mask";
    const gk_attn_mask_args *a = (const gk_attn_mask_args *)args;
    Build x = {};
    x.mask = view_of(a->mask);
    x.rows = view_of(a->rows);
    x.num = view_of(a->num_blocks);
    x.list = view_of(a->blocks);
    x.num_full = view_of(a->num_full);
    x.full = view_of(a->full);
    x.source = a->source;
    x.store = gk_mask_store_of(a->source);
    x.is_bits = a->is_bits != 0;
    x.is_causal = a->is_causal != 0;
    x.transposed = a->transposed != 0;
    x.heads = (int)a->out.shape[1];
    x.seq_q = (int)a->seq_q;
    x.seq_k = (int)a->seq_k;
    x.at = gk_mask_layout_of(x.store, a->seq_q, a->seq_k, x.transposed);
    x.tiles_q = (int)x.at.tiles_q;
    x.tiles_k = (int)x.at.tiles_k;
    x.out = (int32_t *)a->out.data;
    x.error_word = ctx->error_word;
    const int64_t masks = a->out.shape[0] * a->out.shape[1];
    if (masks * x.at.total == 0) return GK_OK;
    if (masks > 65535)
        return gk_fail(
            GK_ERR_UNSUPPORTED,
            "%s: %lld masks, B x H, are more than the 65535 of one call; build them in parts", op,
            (long long)masks);
    /* the kernels write all words of a dense store */
    const bool dense = x.store == GK_MASK_DENSE;
    gk_status status = clear_part(op, ctx, x, (int)masks, 0, dense ? x.at.words : x.at.total);
    if (status == GK_OK && dense && x.transposed)
        status = clear_part(op, ctx, x, (int)masks, x.at.tiles_t, x.at.words_t);
    const dim3 blocks((unsigned)gk_max_i64(x.tiles_k, 1), (unsigned)gk_max_i64(x.tiles_q, 1),
                      (unsigned)masks);
    if (status == GK_OK) status = launch<attn_mask_mark_kernel>(op, ctx, blocks, THREADS, 0, x);
    const dim3 tiles((unsigned)(x.tiles_q + (x.transposed ? x.tiles_k : 0)), (unsigned)masks);
    if (status == GK_OK) status = launch<attn_mask_list_kernel>(op, ctx, tiles, THREADS, 0, x);
    const size_t bytes = 8 * (size_t)gk_max_i64(x.tiles_q, x.transposed ? x.tiles_k : 0);
    if (status == GK_OK)
        status = launch<attn_mask_order_kernel>(
            op, ctx, dim3((unsigned)masks, x.transposed ? 2 : 1), THREADS, bytes, x);
    return status;
}

const gk_cuda_instance instances[] = {{"attn_mask", GK_I32, plan_any, run, {}, NULL}};

} // namespace

extern "C" const gk_cuda_table gk_attn_mask_table = {instances, 1, 80, NULL};
