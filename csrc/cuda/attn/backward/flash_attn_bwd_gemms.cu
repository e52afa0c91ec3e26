/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_bwd_gemms: the gradients of attention as products of gemm, with the scores in memory,
 * if head_dim of q or of v is above 256. The equations are in bwd.cuh. Steps 1 to 4 run for each
 * chunk of rows of queries, then step 5 for the keys:
 *
 *  1. S = Q K^T        float32, gemm
 *  2. dP = dO V^T      float32, gemm
 *  3. P = exp(score(S) - lse), dS = P (dP - delta) cap'       16 bits, pairs_kernel; 0 if hidden
 *  4. dQ = scale dS K                                         gemm
 *  5. dV = P^T dO, dK = scale dS^T Q    gemm, summed over the query heads of a kv head in float32
 *
 * q, grad_out [B, Hq, Sq, D | Dv], k, v [B, Hkv, Sk, D | Dv] of 16 bits, with rows that begin at
 * multiples of 16 bytes; dq, dk, dv likewise. The pre-pass (flash_attn_bwd_pre.cu) computes lse and
 * delta of each row.
 *
 * Work split: the call is cut into work items, named `piece` in the code. An item has `heads` query
 * heads and `rows` rows of queries. These are all rows, unless one head alone takes more than
 * BWD_GEMMS_BYTES. The heads are the query heads of one kv head, or one query head of each of
 * several kv heads, whichever are more. Steps 1 to 4 run for chunks of `chunk` rows of an item,
 * with the keys that at least one row of the chunk sees. Step 5 runs for blocks of BWD_GEMMS_KEYS
 * keys, with the chunks of rows that see at least one of them. Neighbouring blocks of keys with the
 * same rows are one product. The order of all sums depends on the shapes alone, so results are
 * deterministic.
 *
 * Keys that no row sees, and rows that see no key, may hold NaN, and 0 times NaN is NaN. If there
 * may be such keys or rows, the operands are copied first, with zeros in place of these keys and
 * rows. The products then take all pairs.
 *
 * Workspace (Memory): stats (bwd.cuh); two float32 sums of dK and two of dV for the kv heads of an
 * item, because gemm must not write the matrix that it adds; copies of q, grad_out, k, v; P and dS
 * [heads, rows, ld] in 16 bits; S and dP [heads, chunk, ld] in float32; the workspace of the
 * products.
 *
 * Not handled: packed calls, dropout, a mask, biases, float32 gradients, rows that are not aligned,
 * and so many keys that the chunk of one head exceeds BWD_GEMMS_BYTES. flash_attn_bwd_plain and
 * flash_attn_bwd_partial_plain serve those. */
#include "../../product/inner_gemm.cuh"
#include "../wide_tiles.h"
#include "bwd.cuh"

namespace {

constexpr const char *OP = "gk_flash_attn_bwd";
constexpr int THREADS = BWD_GEMMS_THREADS;

/* ---- 1. P and dS of a chunk ------------------------------------------------------------------ */
struct PairsParams {
    Bwd g;
    const float *s, *dp;            /* [heads, chunk, ld] */
    void *weights, *ds;             /* [heads, rows, ld], from the chunk's first row on */
    int64_t ld, from_head, to_head; /* strides */
    /* the query heads of the chunk are head0, head0 + head_step, and so on */
    int b, head0, head_step;
    int i0;         /* the chunk's first row */
    int col0, col1; /* columns to write, multiples of 4 */
};

/* Step 3 for one row: P and dS in the columns [col0, col1), 0 for pairs that the row does not see.
 * Grid: x = rows of the chunk, y = heads. */
template <class T>
__global__ void __launch_bounds__(THREADS) pairs_kernel(const __grid_constant__ PairsParams x) {
    const Problem &p = x.g.p;
    const int row = blockIdx.x, n = blockIdx.y, i = x.i0 + row, head = x.head0 + n * x.head_step;
    const Sequence seq = sequence_of(p, x.b);
    const Score score = score_of<float>(p, seq, x.b, head);
    const int64_t tile = (int64_t)head * x.g.row_tiles + row_tile_of(x.g, seq, x.b);
    const float *stat = (const float *)x.g.stats + (tile * x.g.tile_rows + i) * 2;
    const float lse = stat[0], delta = stat[1];
    const bool alive = lse != INFINITY;
    const int lo = alive ? seq.span.lo(i) : 0, hi = alive ? seq.span.hi(i) : 0;
    const float *s_g = x.s + n * x.from_head + row * x.ld;
    const float *dp_g = x.dp + n * x.from_head + row * x.ld;
    T *weights_g = (T *)x.weights + n * x.to_head + row * x.ld;
    T *ds_g = (T *)x.ds + n * x.to_head + row * x.ld;
    for (int j = x.col0 + (int)threadIdx.x * 4; j < x.col1; j += THREADS * 4) {
        float weight[4] = {0, 0, 0, 0}, ds[4] = {0, 0, 0, 0};
        if (j + 4 > lo && j < hi) {
            const float4 s4 = *(const float4 *)(s_g + j), dp4 = *(const float4 *)(dp_g + j);
            const float s[4] = {s4.x, s4.y, s4.z, s4.w}, dp[4] = {dp4.x, dp4.y, dp4.z, dp4.w};
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (j + e >= lo && j + e < hi)
                    ds[e] = pair_gradient(score, s[e], dp[e], lse, delta, i, j + e, &weight[e]);
        }
        *(uint2 *)(weights_g + j) =
            make_uint2(pack2<T>(weight[0], weight[1]), pack2<T>(weight[2], weight[3]));
        *(uint2 *)(ds_g + j) = make_uint2(pack2<T>(ds[0], ds[1]), pack2<T>(ds[2], ds[3]));
    }
}

/* ---- 2. copies without what no pair needs ---------------------------------------------------- */
struct CleanParams {
    Bwd g;
    Rows from;
    uint16_t *to; /* [batch, heads, seq, columns] */
    int heads, seq, columns;
    bool queries; /* rows of q or grad_out; otherwise of k or v */
};

/* Copies q, grad_out, k or v, and replaces the rows that no pair needs by zeros. A warp for each
 * row. */
__global__ void __launch_bounds__(THREADS) clean_kernel(const __grid_constant__ CleanParams x) {
    const int64_t at = (int64_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    if (at >= (int64_t)x.g.p.batch * x.heads * x.seq) return;
    const int i = (int)(at % x.seq), head = (int)(at / x.seq % x.heads),
              b = (int)(at / x.seq / x.heads);
    const Sequence seq = sequence_of(x.g.p, b);
    bool alive;
    if (x.queries) {
        const int64_t tile = (int64_t)head * x.g.row_tiles + row_tile_of(x.g, seq, b);
        alive = ((const float *)x.g.stats)[(tile * x.g.tile_rows + i) * 2] != INFINITY;
    } else {
        const Interval seen = seen_keys(seq);
        alive = i >= seen.lo && i < seen.hi;
    }
    const uint4 *from = (const uint4 *)((const uint16_t *)x.from.data + x.from.at(b, head, i));
    uint4 *to = (uint4 *)(x.to + at * x.columns);
    for (int c = threadIdx.x % 32; c < x.columns / 8; c += 32)
        to[c] = alive ? from[c] : make_uint4(0, 0, 0, 0);
}

/* ---- 3. the work items of a call ------------------------------------------------------------- */
struct Own {
    Bwd g;
    bool clean; /* the operands are copied by clean_kernel, and the products take all pairs */
    /* true: the heads of an item belong to one kv head; false: each belongs to another kv head */
    bool of_group;
    int chunk, rows, heads;
    int64_t ld; /* row stride of P, dS, S and dP in elements */
    size_t inner_bytes;
};

/* True if some dK and dV are sums of several terms. */
bool has_sums(const Own &x) { return x.rows < x.g.p.seq_q || x.g.p.group > 1; }

/* The workspace: the offset of each part. */
struct Memory {
    size_t stats, sum[2][2] /* of dk and of dv */, q, grad_out, k, v, weights, ds, s, dp, inner;
};

Memory memory_of(const Own &x) {
    const Problem &p = x.g.p;
    Memory m = {};
    size_t end = 0;
    const auto take = [&](size_t *at, int64_t bytes) {
        *at = end;
        end += (size_t)gk_round_up(bytes, WORKSPACE_ALIGN);
    };
    take(&m.stats, (int64_t)stats_bytes(x.g, sizeof(float)));
    const int64_t keys = (int64_t)(x.of_group ? 1 : x.heads) * p.seq_k;
    for (int i = 0; i < 2 && has_sums(x); ++i) {
        take(&m.sum[0][i], keys * p.head_dim * 4);
        take(&m.sum[1][i], keys * p.head_dim_v * 4);
    }
    if (x.clean) {
        const int64_t rows_q = (int64_t)p.batch * p.heads_q * p.seq_q,
                      rows_k = (int64_t)p.batch * p.heads_kv * p.seq_k;
        take(&m.q, rows_q * p.head_dim * 2);
        take(&m.grad_out, rows_q * p.head_dim_v * 2);
        take(&m.k, rows_k * p.head_dim * 2);
        take(&m.v, rows_k * p.head_dim_v * 2);
    }
    const int64_t row = x.heads * x.ld, chunk = gk_min_i64(x.chunk, p.seq_q);
    take(&m.weights, row * x.rows * 2);
    take(&m.ds, row * x.rows * 2);
    take(&m.s, row * chunk * 4);
    take(&m.dp, row * chunk * 4);
    m.inner = end;
    return m;
}

/* Half-open range of rows or keys. */
struct Range {
    int64_t lo, hi;
    int64_t size() const { return hi - lo; }
};

Range rounded(Range x, int64_t to, int64_t end) {
    return {x.lo / to * to, gk_min_i64(gk_round_up(x.hi, to), end)};
}

/* The keys that some row of `rows` sees. */
Range keys_of(const Own &x, Range rows) {
    const int64_t end = x.g.p.seq_k;
    if (x.clean) return {0, end};
    const Span span = dense_sequence(x.g.p).span;
    return {gk_clamp_i64(rows.lo + span.lo_off, 0, end),
            gk_clamp_i64(rows.hi - 1 + span.hi_off, 0, end)};
}

/* The chunks of rows that see some key of the block of keys from `first` on, as rows. */
Range rows_of_keys(const Own &x, int64_t first) {
    const int64_t end = x.g.p.seq_q;
    if (x.clean) return {0, end};
    const Span span = dense_sequence(x.g.p).span;
    return rounded({gk_max_i64(first - span.hi_off + 1, 0),
                    gk_clamp_i64(first + BWD_GEMMS_KEYS - span.lo_off, 1, end)},
                   x.chunk, end);
}

/* True if every row sees a key and every key is seen, as far as the host knows. */
bool all_meet(const Problem &p) {
    const Rules &r = p.rules;
    if (r.kv_start || r.kv_end || r.q_start) return false;
    const Span span = dense_sequence(p).span;
    const int64_t last = p.seq_q - 1;
    return span.lo_off < span.hi_off && span.lo_off <= 0 && span.hi_off > 0 &&
           last + span.lo_off < p.seq_k && last + span.hi_off >= p.seq_k;
}

/* ---- 4. the products ------------------------------------------------------------------------- */
/* [heads, rows, columns] with these strides. */
gk_tensor matrices(const void *data, gk_dtype dtype, int64_t heads, int64_t head, int64_t rows,
                   int64_t row, int64_t columns, int64_t column) {
    gk_tensor t = {};
    t.data = (void *)data;
    t.dtype = dtype;
    t.ndim = 3;
    const int64_t shape[3] = {heads, rows, columns}, stride[3] = {head, row, column};
    for (int d = 0; d < 3; ++d) {
        t.shape[d] = shape[d];
        t.stride[d] = stride[d];
    }
    return t;
}

gk_gemm_args product(const gk_tensor &a, const gk_tensor &b, const gk_tensor &out, double alpha) {
    gk_gemm_args x = {};
    x.size = sizeof x;
    x.a = a;
    x.b = b;
    x.out = out;
    x.alpha = alpha;
    return x;
}

const void *at(const Rows &t, gk_dtype dtype, int64_t b, int64_t head, int64_t row) {
    return (const char *)t.data +
           (b * t.batch + head * t.head + row * t.row) * (int64_t)gk_dtype_bytes(dtype);
}

Rows contiguous(const void *data, int64_t heads, int64_t seq, int64_t columns) {
    return {data, heads * seq * columns, seq * columns, columns};
}

/* Visits the steps 1 to 5 of a call in order. Calls gemm(args) for a product and pairs(params,
 * rows, heads) for step 3. base: the workspace. sample: visits only one product of each form, so
 * that plan() knows them. */
template <class Gemm, class Pairs>
gk_status visit(const Own &x, gk_dtype dtype, char *base, bool sample, const Gemm &gemm,
                const Pairs &pairs) {
    const Problem &p = x.g.p;
    const Memory m = memory_of(x);
    Rows q = p.q, k = p.k, v = p.v, grad_out = x.g.grad_out;
    if (x.clean) {
        q = contiguous(base + m.q, p.heads_q, p.seq_q, p.head_dim);
        grad_out = contiguous(base + m.grad_out, p.heads_q, p.seq_q, p.head_dim_v);
        k = contiguous(base + m.k, p.heads_kv, p.seq_k, p.head_dim);
        v = contiguous(base + m.v, p.heads_kv, p.seq_k, p.head_dim_v);
    }
    const int64_t d = p.head_dim, dv = p.head_dim_v, ld = x.ld, of_piece = x.rows * ld,
                  of_chunk = gk_min_i64(x.chunk, p.seq_q) * ld;
    const double scale = p.rules.scale;

    /* Step 5 for one product: adds one term to dV (is_v) or dK of the keys [first, end) of n kv
     * heads. The term has the rows `rows` of q or grad_out, of n heads from `head` on, which are
     * `group` heads apart. pairs16: P or dS of these rows. The term is number nth of `of`. The last
     * one writes the result, each earlier one a float32 sum. */
    const auto add_term = [&](bool is_v, int64_t first, int64_t end, const char *pairs16,
                              Range rows, int64_t nth, int64_t of, int b, int64_t kv0, int64_t n,
                              int64_t head) {
        const int64_t columns = is_v ? dv : d, keys = end - first, sums = p.seq_k * columns;
        const Rows &other = is_v ? grad_out : q, &to = is_v ? x.g.dv : x.g.dk;
        const auto sum_of = [&](int64_t term) {
            return matrices(base + m.sum[is_v][term % 2] + first * columns * 4, GK_F32, n, sums,
                            keys, columns, columns, 1);
        };
        const gk_tensor before = sum_of(nth + 1);
        gk_gemm_args args =
            product(matrices(pairs16 + first * 2, dtype, n, of_piece, keys, 1, rows.size(), ld),
                    matrices(at(other, dtype, b, head, rows.lo), dtype, n, other.head * p.group,
                             rows.size(), other.row, columns, 1),
                    nth + 1 == of ? matrices(at(to, dtype, b, kv0, first), dtype, n, to.head, keys,
                                             to.row, columns, 1)
                                  : sum_of(nth),
                    is_v ? 1 : scale);
        if (nth > 0) {
            args.c = &before;
            args.beta = 1;
        }
        return gemm(args);
    };

    /* Steps 1 to 4 for the rows `rows` of an item. They have n query heads from `head` on, which
     * are `apart` heads apart, and the kv heads from kv0 on. */
    const auto take_rows = [&](Range piece, Range rows, int b, int64_t kv0, int64_t n, int64_t head,
                               int64_t apart) {
        const Range seen = keys_of(x, rows), keys = rounded(seen, 64, p.seq_k),
                    written = rounded(seen, BWD_GEMMS_KEYS, p.seq_k);
        const int64_t nr = rows.size(), nk = keys.size(), n_kv = x.of_group ? 1 : n;
        const auto of_rows = [&](const Rows &t, int64_t columns) {
            return matrices(at(t, dtype, b, head, rows.lo), dtype, n, t.head * apart, nr, t.row,
                            columns, 1);
        };
        const gk_tensor s = matrices(base + m.s + keys.lo * 4, GK_F32, n, of_chunk, nr, ld, nk, 1);
        gk_tensor dp = s;
        dp.data = base + m.dp + keys.lo * 4;
        const int64_t to = (rows.lo - piece.lo) * ld * 2;
        PairsParams y = {x.g};
        y.s = (const float *)(base + m.s);
        y.dp = (const float *)(base + m.dp);
        y.weights = base + m.weights + to;
        y.ds = base + m.ds + to;
        y.ld = ld;
        y.from_head = of_chunk;
        y.to_head = of_piece;
        y.b = b;
        y.head0 = (int)head;
        y.head_step = (int)apart;
        y.i0 = (int)rows.lo;
        y.col0 = (int)written.lo;
        y.col1 = (int)gk_round_up(written.hi, 4);
        const void *k_g = at(k, dtype, b, kv0, keys.lo), *v_g = at(v, dtype, b, kv0, keys.lo);
        gk_status status =
            gemm(product(of_rows(q, d), matrices(k_g, dtype, n_kv, k.head, d, 1, nk, k.row), s, 1));
        if (status == GK_OK)
            status = gemm(product(of_rows(grad_out, dv),
                                  matrices(v_g, dtype, n_kv, v.head, dv, 1, nk, v.row), dp, 1));
        if (status == GK_OK) status = pairs(y, nr, n);
        if (status != GK_OK) return status;
        return gemm(product(
            matrices(base + m.ds + to + keys.lo * 2, dtype, n, of_piece, nr, ld, nk, 1),
            matrices(k_g, dtype, n_kv, k.head, nk, k.row, d, 1), of_rows(x.g.dq, d), scale));
    };

    /* Step 5 for the rows and heads of an item. */
    const auto take_keys = [&](Range piece, int b, int64_t kv0, int64_t n, int64_t g) {
        gk_status status = GK_OK;
        for (int64_t first = 0, end; first < p.seq_k && status == GK_OK; first = end) {
            /* blocks of keys that see the same rows share a product */
            const Range all = rows_of_keys(x, first);
            for (end = first + BWD_GEMMS_KEYS; end < p.seq_k; end += BWD_GEMMS_KEYS) {
                const Range more = rows_of_keys(x, end);
                if (more.lo != all.lo || more.hi != all.hi) break;
            }
            end = gk_min_i64(end, p.seq_k);
            const Range rows = {gk_max_i64(all.lo, piece.lo), gk_min_i64(all.hi, piece.hi)};
            if (rows.size() <= 0) continue;
            const int64_t first_piece = all.lo / x.rows,
                          pieces = (all.hi - 1) / x.rows - first_piece + 1;
            /* The query heads of one kv head are terms of one sum, one product after the other. */
            for (int64_t h = 0; h < (x.of_group ? n : 1) && status == GK_OK; ++h) {
                const int64_t from = (h * of_piece + (rows.lo - piece.lo) * ld) * 2,
                              nth = (g + h) * pieces + piece.lo / x.rows - first_piece,
                              of = p.group * pieces, n_kv = x.of_group ? 1 : n,
                              head = kv0 * p.group + g + h;
                status = add_term(true, first, end, base + m.weights + from, rows, nth, of, b, kv0,
                                  n_kv, head);
                if (status == GK_OK)
                    status = add_term(false, first, end, base + m.ds + from, rows, nth, of, b, kv0,
                                      n_kv, head);
            }
        }
        return status;
    };

    const int64_t kv_step = x.of_group ? 1 : x.heads, g_step = x.of_group ? x.heads : 1;
    for (int b = 0; b < (sample ? 1 : p.batch); ++b)
        for (int64_t kv0 = 0; kv0 < p.heads_kv; kv0 += kv_step)
            for (int64_t g = 0; g < p.group; g += g_step) {
                const int64_t n = x.of_group ? gk_min_i64(g_step, p.group - g)
                                             : gk_min_i64(kv_step, p.heads_kv - kv0);
                /* For a sample, the first two groups of heads and the last one have all forms of
                 * sums. Only the last group may have fewer heads. */
                if (sample && ((kv0 > 0 && (x.of_group || n == kv_step)) ||
                               (g > g_step && g + g_step < p.group)))
                    continue;
                for (int64_t r0 = 0; r0 < p.seq_q; r0 += x.rows) {
                    const Range piece = {r0, gk_min_i64(r0 + x.rows, p.seq_q)};
                    for (int64_t i0 = piece.lo; i0 < piece.hi; i0 += x.chunk) {
                        const gk_status status =
                            take_rows(piece, {i0, gk_min_i64(i0 + x.chunk, piece.hi)}, b, kv0, n,
                                      kv0 * p.group + g, x.of_group ? 1 : p.group);
                        if (status != GK_OK) return status;
                    }
                    const gk_status status = take_keys(piece, b, kv0, n, g);
                    if (status != GK_OK) return status;
                }
            }
    return GK_OK;
}

/* ---- 5. plan and run ------------------------------------------------------------------------- */
/* Bytes of S, dP, P and dS of one head in an item of this many rows. */
int64_t pairs_bytes(const Own &x, int64_t rows) {
    return (rows * 4 + gk_min_i64(x.chunk, x.g.p.seq_q) * 8) * x.ld;
}

template <class T>
bool plan(const gk_cuda_instance *, const gk_context *ctx, const void *args, gk_plan *to) {
    const gk_flash_attn_bwd_args *a = (const gk_flash_attn_bwd_args *)args;
    const gk_flash_attn_args &f = a->fwd;
    const int64_t head_dim = gk_max_i64(f.q.shape[f.q.ndim - 1], f.v.shape[f.v.ndim - 1]);
    const double factor = fabs(f.rules.scale); /* gemm's alpha must be 0 or a normal float32 */
    if (f.cu_seqlens_q || head_dim <= BwdHopper256::HEAD_DIM || (factor > 0 && factor < 0x1p-126) ||
        !tile_takes(ctx, a, (int)head_dim, 0))
        return false;
    Own &x = gk_own<Own>(to) = {bwd_of(ctx, a, BWD_PLAIN_ROWS, 0)};
    x.g.lse_factor = 1;
    const Problem &p = x.g.p;
    if (p.batch == 0 || p.heads_q == 0 || p.seq_q == 0 || p.seq_k == 0) return false;
    x.clean = !all_meet(p);
    x.ld = gk_round_up(p.seq_k, 64);
    x.chunk = BWD_GEMMS_ROWS;
    while (x.chunk > BWD_GEMMS_LEAST_ROWS &&
           pairs_bytes(x, gk_min_i64(x.chunk, p.seq_q)) > BWD_GEMMS_BYTES)
        x.chunk /= 2;
    x.rows = p.seq_q;
    const int64_t left = BWD_GEMMS_BYTES - pairs_bytes(x, 0);
    if (left < x.rows * 4 * x.ld) x.rows = (int)(left / (4 * x.ld) / x.chunk * x.chunk);
    if (left <= 0 || x.rows == 0) return false;
    /* If a head's rows are cut, an item has one head: the terms of a sum come in the order of the
     * items of one head. */
    const int64_t most = x.rows < p.seq_q ? 1
                                          : gk_clamp_i64(BWD_GEMMS_BYTES / pairs_bytes(x, x.rows),
                                                         1, 65535); /* the largest y of a grid */
    x.of_group = gk_min_i64(p.group, most) > gk_min_i64(p.heads_kv, most);
    x.heads = (int)gk_min_i64(x.of_group ? p.group : p.heads_kv, most);
    if (!gk_grid_fits(gk_ceil_div((int64_t)p.batch * p.heads_q * p.seq_q, THREADS / 32)) ||
        !gk_grid_fits(gk_ceil_div((int64_t)p.batch * p.heads_kv * p.seq_k, THREADS / 32)))
        return false;

    bool first = true;
    const gk_status status = visit(
        x, element<T>::dtype, unplaced_workspace(), true,
        [&](const gk_gemm_args &product) {
            gk_plan inner;
            if (!plan_inner_gemm(ctx, element<T>::dtype, &product, &inner))
                return GK_ERR_UNSUPPORTED;
            if (inner.workspace_bytes > x.inner_bytes) x.inner_bytes = inner.workspace_bytes;
            to->tasks = first ? inner.tasks : to->tasks;
            to->waves = first ? inner.waves : to->waves;
            first = false;
            return GK_OK;
        },
        [](const PairsParams &, int64_t, int64_t) { return GK_OK; });
    if (status != GK_OK) return false;
    to->tile[0] = gk_min_i64(x.chunk, p.seq_q);
    to->tile[1] = gk_min_i64(BWD_GEMMS_KEYS, p.seq_k);
    to->workspace_bytes = memory_of(x).inner + x.inner_bytes;
    return true;
}

gk_status clean(const gk_context *ctx, const Bwd &g, const Rows &from, char *to, bool queries,
                int columns) {
    const Problem &p = g.p;
    const CleanParams x = {g,
                           from,
                           (uint16_t *)to,
                           queries ? p.heads_q : p.heads_kv,
                           queries ? p.seq_q : p.seq_k,
                           columns,
                           queries};
    const int64_t rows = (int64_t)p.batch * x.heads * x.seq;
    return launch<clean_kernel>(OP, ctx, dim3((unsigned)gk_ceil_div(rows, THREADS / 32)), THREADS,
                                0, x);
}

template <class T>
gk_status run(const gk_context *ctx, const void *, const gk_plan *plan, void *workspace) {
    Own x = gk_own<Own>(plan);
    const Problem &p = x.g.p;
    const Memory m = memory_of(x);
    char *base = (char *)workspace;
    x.g.stats = base + m.stats;
    gk_status status = bwd_pre(ctx, element<T>::dtype, x.g, element<T>::dtype);
    if (x.clean) {
        if (status == GK_OK) status = clean(ctx, x.g, p.q, base + m.q, true, p.head_dim);
        if (status == GK_OK)
            status = clean(ctx, x.g, x.g.grad_out, base + m.grad_out, true, p.head_dim_v);
        if (status == GK_OK) status = clean(ctx, x.g, p.k, base + m.k, false, p.head_dim);
        if (status == GK_OK) status = clean(ctx, x.g, p.v, base + m.v, false, p.head_dim_v);
    }
    if (status != GK_OK) return status;
    return visit(
        x, element<T>::dtype, base, false,
        [&](const gk_gemm_args &product) {
            gk_plan inner;
            if (!plan_inner_gemm(ctx, element<T>::dtype, &product, &inner) ||
                inner.workspace_bytes > x.inner_bytes)
                return gk_fail(GK_ERR_DEVICE, "a product of the backward could not be planned");
            return run_inner(ctx, &product, inner, base, m.inner);
        },
        [&](const PairsParams &y, int64_t rows, int64_t heads) {
            return launch<pairs_kernel<T>>(OP, ctx, dim3((unsigned)rows, (unsigned)heads), THREADS,
                                           0, y);
        });
}

const gk_cuda_instance instances[] = {
    {"flash_attn_bwd_gemms_bf16", GK_BF16, plan<__nv_bfloat16>, run<__nv_bfloat16>, {}, NULL},
    {"flash_attn_bwd_gemms_f16", GK_F16, plan<__half>, run<__half>, {}, NULL},
};

} // namespace

extern "C" const gk_cuda_table gk_flash_attn_bwd_gemms_table = {
    instances, sizeof instances / sizeof instances[0], 80, NULL};
