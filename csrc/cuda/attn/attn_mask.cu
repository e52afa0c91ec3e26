/* SPDX-License-Identifier: BSD-3-Clause */
/* attn_mask: builds a stored mask (csrc/core/attn_mask.h) without a word from the host, so that it
 * can be captured.
 *
 *   clear   zeros in the whole mask: ends of lists, words of blocks that have none
 *   mark    a block of threads for each block of 128 x 128: its class; of a dense store also its words, by queries and by keys
 *   list    a block of threads for each tile: the list of its blocks, ascending; of other stores the slots of the partial blocks that
 *           are kept, and their words; a share of the copy of ranges
 *   order   a block of threads for each head: its tiles, longest list first
 *
 * Predicted by bytes at 8,192 x 8,192 of bool, one head, 4.0 TB/s: mark reads 67 MB (17 us) and
 * writes up to 17 MB with twins, as clear does (4 us each); list and order read some KB. With
 * launches that is under 45 us. */
#include "../../core/attn_mask.h"
#include "../host/launch.cuh"

namespace {

constexpr int TILE = GK_MASK_TILE, THREADS = 256;

/* A tensor [B, H, ..] as kernels read it. */
struct Source {
    const void *data;
    int64_t b, h, row, last; /* strides in elements */
    int n;                   /* size of the last dimension */
};

struct Params {
    int32_t *out;
    int2 *unsorted; /* [masks][tiles_q + tiles_k] {blocks in the list, full ones} */
    gk_mask_layout at;
    gk_mask_source source;
    gk_mask_store store;
    Source mask, rows, num_blocks, blocks, num_full, full;
    int64_t seq_q, seq_k;
    int heads;
    /* aligned: rows of bools lie at multiples of 16 bytes */
    bool has_mask, is_bits, is_causal, twins, aligned;
    uint8_t *error_word;
};

__device__ __forceinline__ int64_t place(const Source &x, const Params &p, int mask, int64_t row) {
    return mask / p.heads * x.b + mask % p.heads * x.h + row * x.row;
}

/* ---- what the mask was made of --------------------------------------------------------------- */
__device__ __forceinline__ int4 range_of(const Params &p, int mask, int64_t row) {
    const int32_t *from = (const int32_t *)p.rows.data + place(p.rows, p, mask, row);
    int r[4] = {0, 0, 0, 0};
    for (int i = 0; i < p.rows.n && i < 4; i += 2) {
        const int64_t lo = min(max((int64_t)from[i * p.rows.last], (int64_t)0), p.seq_k);
        const int64_t hi = min(max((int64_t)from[(i + 1) * p.rows.last], (int64_t)0), p.seq_k);
        if (lo >= hi) continue;
        r[i] = (int)lo;
        r[i + 1] = (int)hi;
    }
    return make_int4(r[0], r[1], r[2], r[3]);
}

__device__ __forceinline__ int4 column_of(const Params &p, int mask, int64_t key) {
    int32_t c[4];
    gk_mask_column((const int32_t *)p.rows.data + place(p.rows, p, mask, key), p.rows.last,
                   p.rows.n, p.is_causal, key, c);
    return make_int4(c[0], c[1], c[2], c[3]);
}

/* Whether ranges or columns show a pair that lies within the mask. */
__device__ __forceinline__ bool shows(const Params &p, int mask, int64_t row, int64_t key) {
    if (p.store == GK_MASK_RANGES) {
        const int4 r = range_of(p, mask, row);
        return (key >= r.x && key < r.y) || (key >= r.z && key < r.w);
    }
    const int4 c = column_of(p, mask, key);
    return !((row >= c.x && row < c.y) || (row >= c.z && row < c.w));
}

/* Four bools as bits; any byte but 0 is true. */
__device__ __forceinline__ uint32_t four_bools(uint32_t x) {
    x |= x >> 4 & 0x0f0f0f0fu;
    x |= x >> 2 & 0x03030303u;
    x |= x >> 1;
    return (x & 0x01010101u) * 0x01020408u >> 24 & 15;
}

/* Columns [col, col + 64) of a row of bools, `valid` of them. */
__device__ __forceinline__ uint2 bools_of(const Params &p, int mask, int64_t row, int64_t col,
                                          int valid) {
    const uint8_t *from =
        (const uint8_t *)p.mask.data + place(p.mask, p, mask, row) + col * p.mask.last;
    uint32_t bits[2] = {0, 0};
    if (p.aligned && valid == 64) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint4 v = *(const uint4 *)(from + 16 * i);
            const uint32_t sixteen = four_bools(v.x) | four_bools(v.y) << 4 | four_bools(v.z) << 8 |
                                     four_bools(v.w) << 12;
            bits[i / 2] |= sixteen << i % 2 * 16;
        }
    } else {
        for (int c = 0; c < valid; ++c)
            bits[c / 32] |= (uint32_t)(from[c * p.mask.last] != 0) << c % 32;
    }
    return make_uint2(bits[0], bits[1]);
}

__device__ __forceinline__ uint2 packed_bits_of(const Params &p, int mask, int64_t row, int64_t col,
                                                int valid) {
    const uint8_t *from =
        (const uint8_t *)p.mask.data + place(p.mask, p, mask, row) + col / 8 * p.mask.last;
    uint32_t bits[2] = {0, 0};
    for (int c = 0; c < valid; c += 8) {
        const uint32_t shown = valid - c < 8 ? (1u << (valid - c)) - 1 : 0xffu;
        bits[c / 32] |= (from[c / 8 * p.mask.last] & shown) << c % 32;
    }
    return make_uint2(bits[0], bits[1]);
}

__device__ __forceinline__ uint2 first_bits(int64_t from, int64_t to) {
    return make_uint2(gk_mask_below(to) & ~gk_mask_below(from),
                      gk_mask_below(to - 32) & ~gk_mask_below(from - 32));
}

/* Whether a tile's list names block kb; asked by all threads of the block. */
__device__ __forceinline__ bool lists(const Params &p, const Source &num, const Source &list,
                                      int mask, int tile, int kb) {
    if (!num.data) return false;
    int n = ((const int32_t *)num.data)[place(num, p, mask, tile)];
    bool found = false, bad = n < 0 || n > list.n;
    n = min(max(n, 0), list.n);
    const int32_t *entry = (const int32_t *)list.data + place(list, p, mask, tile);
    for (int i = threadIdx.x; i < n; i += THREADS) {
        const int block = entry[i * list.last];
        found = found || block == kb;
        bad = bad || block < 0 || block >= p.at.tiles_k;
    }
    if (bad && kb == 0) report(p.error_word, GK_BAD_MASK_BLOCKS);
    return __syncthreads_or(found);
}

/* ---- mark ------------------------------------------------------------------------------------ */
/* Bits of half a row: thread t has row t / 2, columns 64 (t % 2) .. of the block. */
__device__ __forceinline__ uint2 half_row(const Params &p, int mask, int tile, int kb, int64_t row,
                                          int64_t col, int valid, const int4 *hidden) {
    if (row >= p.seq_q || valid <= 0) return make_uint2(0, 0);
    if (p.source == GK_MASK_OF_RANGES) {
        const int4 r = range_of(p, mask, row);
        const uint2 x = first_bits(r.x - col, r.y - col), y = first_bits(r.z - col, r.w - col);
        return make_uint2(x.x | y.x, x.y | y.y);
    }
    if (p.source == GK_MASK_OF_COLUMNS) {
        uint32_t bits[2] = {0, 0};
        for (int c = 0; c < valid; ++c) {
            const int4 h = hidden[threadIdx.x % 2 * 64 + c];
            const bool hides = (row >= h.x && row < h.y) || (row >= h.z && row < h.w);
            bits[c / 32] |= (uint32_t)!hides << c % 32;
        }
        return make_uint2(bits[0], bits[1]);
    }
    return p.is_bits ? packed_bits_of(p, mask, row, col, valid)
                     : bools_of(p, mask, row, col, valid);
}

__global__ void __launch_bounds__(THREADS, 6) mark_kernel(Params p) {
    __shared__ uint32_t rows[TILE][4];
    __shared__ int4 hidden[TILE];
    const int kb = blockIdx.x, tile = blockIdx.y, mask = blockIdx.z, tid = threadIdx.x;
    const int64_t row = (int64_t)tile * TILE + tid / 2, first = (int64_t)kb * TILE,
                  col = first + tid % 2 * 64;
    const int valid = (int)min(max(p.seq_k - col, (int64_t)0), (int64_t)64);

    uint2 own = make_uint2(0, 0);
    if (p.source == GK_MASK_OF_BLOCKS) {
        const bool whole = lists(p, p.num_full, p.full, mask, tile, kb);
        const bool part = lists(p, p.num_blocks, p.blocks, mask, tile, kb);
        if (whole || (part && !p.has_mask))
            own = row < p.seq_q ? first_bits(0, valid) : make_uint2(0, 0);
        else if (part)
            own = half_row(p, mask, tile, kb, row, col, valid, hidden);
    } else {
        if (p.source == GK_MASK_OF_COLUMNS) {
            if (tid < TILE && first + tid < p.seq_k) hidden[tid] = column_of(p, mask, first + tid);
            __syncthreads();
        }
        own = half_row(p, mask, tile, kb, row, col, valid, hidden);
    }

    const uint2 all = row < p.seq_q ? first_bits(0, valid) : make_uint2(0, 0);
    rows[tid / 2][tid % 2 * 2] = own.x;
    rows[tid / 2][tid % 2 * 2 + 1] = own.y;
    const int any = __syncthreads_or(own.x | own.y); /* the rows are written, too */
    const int hole = __syncthreads_or((all.x & ~own.x) | (all.y & ~own.y));
    int32_t *out = p.out + mask * p.at.total;
    const int64_t at = (int64_t)tile * p.at.tiles_k + kb;
    if (tid == 0)
        ((uint8_t *)(out + p.at.flags))[at] = !any   ? GK_BLOCK_EMPTY
                                              : hole ? GK_BLOCK_WORDS
                                                     : GK_BLOCK_FULL;
    if (p.store != GK_MASK_DENSE || !any || !hole) return;

    const int r = tid / 32 * 16 + tid % 32 / 4, q = tid % 4;
    int2 *words = (int2 *)(out + p.at.words + at * GK_MASK_BLOCK_INTS);
    words[tid] = make_int2((int)gk_mask_word(rows[r], q), (int)gk_mask_word(rows[r + 8], q));
    if (!p.twins) return;
    uint32_t turned[2] = {0, 0};
    for (int bit = 0; bit < 32; ++bit) {
        const int query = bit / 2 * 8 + 2 * q + bit % 2;
        turned[0] |= (rows[query][r / 32] >> r % 32 & 1) << bit;
        turned[1] |= (rows[query][(r + 8) / 32] >> (r + 8) % 32 & 1) << bit;
    }
    int2 *words_t =
        (int2 *)(out + p.at.words_t + ((int64_t)kb * p.at.tiles_q + tile) * GK_MASK_BLOCK_INTS);
    words_t[tid] = make_int2((int)turned[0], (int)turned[1]);
}

/* ---- list ------------------------------------------------------------------------------------ */
__global__ void __launch_bounds__(THREADS) list_kernel(Params p) {
    __shared__ int kept[GK_MASK_KEPT], num_kept;
    const int tid = threadIdx.x, mask = blockIdx.y;
    const bool by_keys = blockIdx.x >= p.at.tiles_q, dense = p.store == GK_MASK_DENSE;
    const int major = by_keys ? (int)(blockIdx.x - p.at.tiles_q) : (int)blockIdx.x;
    const int n = (int)(by_keys ? p.at.tiles_q : p.at.tiles_k);
    int32_t *out = p.out + mask * p.at.total;
    uint8_t *flags = (uint8_t *)(out + p.at.flags);
    uint16_t *list = (uint16_t *)(out + (by_keys ? p.at.lists_t : p.at.lists)) + (int64_t)major * n;

    if (tid < 32) {
        int count = 0, full = 0, partial = 0;
        for (int first = 0; first < n; first += 32) {
            const int minor = first + tid;
            const int64_t at = by_keys ? (int64_t)minor * p.at.tiles_k + major
                                       : (int64_t)major * p.at.tiles_k + minor;
            /* a block of a tile of queries may be at these flags, too: it makes GK_BLOCK_MADE of
             * some GK_BLOCK_WORDS */
            const int kind = minor < n ? flags[at] & 3 : GK_BLOCK_EMPTY;
            const bool is = kind != GK_BLOCK_EMPTY, is_partial = kind >= GK_BLOCK_WORDS;
            const unsigned before = (1u << tid) - 1, all = __ballot_sync(~0u, is),
                           parts = __ballot_sync(~0u, is_partial);
            const int slot = partial + __popc(parts & before);
            const bool made = is_partial && !dense && slot >= GK_MASK_KEPT;
            const int own = !is_partial ? kind : made ? GK_BLOCK_MADE : GK_BLOCK_WORDS;
            if (is) list[count + __popc(all & before)] = (uint16_t)(minor << 2 | own);
            if (is_partial && !dense && !by_keys)
                flags[at] = (uint8_t)(made ? GK_BLOCK_MADE : GK_BLOCK_WORDS | slot << 2);
            if (is_partial && !dense && !made) kept[slot] = minor;
            count += __popc(all);
            full += __popc(__ballot_sync(~0u, kind == GK_BLOCK_FULL));
            partial += __popc(parts);
        }
        if (tid == 0) {
            num_kept = dense ? 0 : min(partial, (int)GK_MASK_KEPT);
            p.unsorted[mask * (p.at.tiles_q + p.at.tiles_k) + blockIdx.x] = make_int2(count, full);
        }
    }
    __syncthreads();
    const int r = tid / 32 * 16 + tid % 32 / 4, q = tid % 4;
    for (int slot = 0; slot < num_kept; ++slot) {
        uint32_t word[2] = {0, 0};
        for (int half = 0; half < 2; ++half)
            for (int bit = 0; bit < 32; ++bit) {
                const int64_t x = (int64_t)major * TILE + r + 8 * half;
                const int64_t y = (int64_t)kept[slot] * TILE + bit / 2 * 8 + 2 * q + bit % 2;
                const int64_t row = by_keys ? y : x, key = by_keys ? x : y;
                if (row < p.seq_q && key < p.seq_k)
                    word[half] |= (uint32_t)shows(p, mask, row, key) << bit;
            }
        const int64_t at = (int64_t)(major * GK_MASK_KEPT + slot) * GK_MASK_BLOCK_INTS;
        ((int2 *)(out + (by_keys ? p.at.words_t : p.at.words) + at))[tid] =
            make_int2((int)word[0], (int)word[1]);
    }
    if (dense) return;
    const bool ranges = p.store == GK_MASK_RANGES;
    const int64_t count = ranges ? p.seq_q : p.seq_k;
    int4 *copy = (int4 *)(out + p.at.source);
    for (int64_t i = (int64_t)blockIdx.x * THREADS + tid; i < count;
         i += (int64_t)gridDim.x * THREADS)
        copy[i] = ranges ? range_of(p, mask, i) : column_of(p, mask, i);
}

/* ---- order ----------------------------------------------------------------------------------- */
/* Longest lists first; of equal ones the later tile. */
__global__ void __launch_bounds__(THREADS) order_kernel(Params p) {
    const int mask = blockIdx.x;
    const bool by_keys = blockIdx.y != 0;
    const int n = (int)(by_keys ? p.at.tiles_k : p.at.tiles_q);
    const int2 *from =
        p.unsorted + mask * (p.at.tiles_q + p.at.tiles_k) + (by_keys ? p.at.tiles_q : 0);
    int4 *to = (int4 *)(p.out + mask * p.at.total + (by_keys ? p.at.tiles_t : p.at.tiles));
    for (int i = threadIdx.x; i < n; i += THREADS) {
        const int2 own = from[i];
        int before = 0;
        for (int j = 0; j < n; ++j) before += from[j].x > own.x || (from[j].x == own.x && j > i);
        to[before] = make_int4(own.x, own.y, i, 0);
    }
}

/* ---- the call -------------------------------------------------------------------------------- */
Source source_of(const gk_tensor *t) {
    Source x = {};
    if (!t) return x;
    const int last = t->ndim - 1;
    x.data = t->data;
    x.b = t->shape[0] == 1 ? 0 : t->stride[0];
    x.h = t->shape[1] == 1 ? 0 : t->stride[1];
    x.row = t->stride[2];
    x.last = last > 2 ? t->stride[last] : 0;
    x.n = last > 2 ? (int)gk_min_i64(t->shape[last], INT32_MAX) : 1;
    return x;
}

bool is_aligned(const gk_tensor *t) {
    return t && (uintptr_t)t->data % 16 == 0 && t->stride[3] == 1 && t->stride[0] % 16 == 0 &&
           t->stride[1] % 16 == 0 && t->stride[2] % 16 == 0;
}

int64_t masks_of(const gk_attn_mask_args *a) { return a->out.shape[0] * a->out.shape[1]; }

bool plan(const gk_cuda_instance *, const gk_context *, const void *args, gk_plan *to) {
    const gk_attn_mask_args *a = (const gk_attn_mask_args *)args;
    const int64_t tiles_q = gk_ceil_div(a->seq_q, TILE), tiles_k = gk_ceil_div(a->seq_k, TILE);
    if (masks_of(a) > 65535) return false;
    to->tile[0] = to->tile[1] = TILE;
    to->tasks = masks_of(a) * tiles_q * tiles_k;
    to->workspace_bytes = (size_t)(masks_of(a) * (tiles_q + tiles_k)) * sizeof(int2);
    return true;
}

gk_status run(const gk_context *ctx, const void *args, const gk_plan *, void *workspace) {
    const gk_attn_mask_args *a = (const gk_attn_mask_args *)args;
    const char *op = "attn_mask";
    Params p = {};
    p.source = a->source;
    p.store = gk_mask_store_of(a->source);
    p.at = gk_mask_layout_of(p.store, a->seq_q, a->seq_k, a->twins != 0);
    p.out = (int32_t *)a->out.data;
    p.unsorted = (int2 *)workspace;
    p.mask = source_of(a->mask);
    p.rows = source_of(a->rows);
    p.num_blocks = source_of(a->num_blocks);
    p.blocks = source_of(a->blocks);
    p.num_full = source_of(a->num_full);
    p.full = source_of(a->full);
    p.seq_q = a->seq_q;
    p.seq_k = a->seq_k;
    p.heads = (int)a->out.shape[1];
    p.has_mask = a->mask != nullptr;
    p.is_bits = a->source == GK_MASK_OF_BITS || (a->source == GK_MASK_OF_BLOCKS && a->is_bits);
    p.is_causal = a->is_causal != 0;
    p.twins = a->twins != 0;
    p.aligned = !p.is_bits && is_aligned(a->mask);
    p.error_word = ctx->error_word;
    const unsigned masks = (unsigned)masks_of(a), nq = (unsigned)p.at.tiles_q,
                   nk = (unsigned)p.at.tiles_k;
    gk_status status = clear_memory(op, ctx, p.out, (size_t)(masks_of(a) * p.at.total) * 4);
    if (status == GK_OK) status = launch<mark_kernel>(op, ctx, dim3(nk, nq, masks), THREADS, 0, p);
    if (status == GK_OK)
        status = launch<list_kernel>(op, ctx, dim3(nq + (p.twins ? nk : 0), masks), THREADS, 0, p);
    if (status == GK_OK)
        status = launch<order_kernel>(op, ctx, dim3(masks, p.twins ? 2 : 1), THREADS, 0, p);
    return status;
}

const gk_cuda_instance instances[] = {{"attn_mask", GK_I32, plan, run, {}, NULL}};

} // namespace

extern "C" const gk_cuda_table gk_attn_mask_table = {instances, 1, 80, NULL};
