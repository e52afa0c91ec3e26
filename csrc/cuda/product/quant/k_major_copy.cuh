/* SPDX-License-Identifier: BSD-3-Clause */
/* k_major_copy.cuh: makes an operand of bytes [rows, k] readable by TMA, which needs a K-major
 * operand whose rows are whole 16 bytes.
 *
 * Callers: scaled_gemm (scaled_operands.cuh, scaled_gemm_sm80.cu) and sparse_gemm. An operand that
 * has this layout is used in place. Any other is copied into the workspace.
 *
 * A block of the copy transposes 64 x 64 bytes through shared memory, so that both its reads and
 * its writes are contiguous. */
#ifndef GPUKERN_CUDA_QUANT_K_MAJOR_COPY_CUH
#define GPUKERN_CUDA_QUANT_K_MAJOR_COPY_CUH

#include "../../host/launch.cuh"
#include "../../host/tensor_shape.cuh"

/* b [K, N] viewed as [N, K]. */
inline gk_tensor rows_of_n(const gk_tensor &b) {
    gk_tensor x = b;
    x.shape[0] = b.shape[1];
    x.shape[1] = b.shape[0];
    x.stride[0] = b.stride[1];
    x.stride[1] = b.stride[0];
    return x;
}

struct KMajorCopy {
    bool moves;    /* the operand is copied */
    size_t offset; /* of the copy in the workspace */
    int64_t ld;    /* bytes from one row to the next */
};

inline KMajorCopy plan_k_major(const gk_tensor &t, size_t *bytes) {
    KMajorCopy r = {};
    r.ld = t.stride[0];
    r.moves = (t.stride[1] != 1 && t.shape[1] > 1) || (uintptr_t)t.data % 16 != 0 ||
              (t.shape[0] > 1 && (t.stride[0] % 16 != 0 || t.stride[0] <= 0));
    if (!r.moves) return r;
    r.ld = gk_round_up(t.shape[1], 16);
    r.offset = *bytes;
    *bytes += (size_t)gk_round_up(t.shape[0] * r.ld, 256);
    return r;
}

struct KMajorCopyParams {
    const uint8_t *from;
    uint8_t *to;
    int64_t rows, k, row_step, k_step, ld;
};

static __global__ void __launch_bounds__(256) k_major_copy_kernel(KMajorCopyParams p) {
    __shared__ uint8_t tile[64][65];
    const int64_t row0 = (int64_t)blockIdx.y * 64, k0 = (int64_t)blockIdx.x * 64;
    const bool along_rows = p.row_step == 1; /* rows are contiguous in memory, not k */
    for (int i = threadIdx.x; i < 64 * 64; i += 256) {
        const int fast = i % 64, slow = i / 64, r = along_rows ? fast : slow,
                  k = along_rows ? slow : fast;
        if (row0 + r < p.rows && k0 + k < p.k)
            tile[r][k] = p.from[(row0 + r) * p.row_step + (k0 + k) * p.k_step];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 64 * 64; i += 256) {
        const int k = i % 64, r = i / 64;
        if (row0 + r < p.rows && k0 + k < p.k) p.to[(row0 + r) * p.ld + k0 + k] = tile[r][k];
    }
}

inline gk_status copy_k_major(const char *op, const gk_context *ctx, const KMajorCopy &r,
                              const gk_tensor &t, void *workspace, TensorShape *shape) {
    constexpr int64_t most = 64 * INT64_C(65535); /* rows of one launch, limited by gridDim.y */
    const int64_t rows = t.shape[0], k = t.shape[1];
    *shape = {t.data, GK_U8, {k, rows, 1, 1, 1}, {1, r.ld, 0, 0, 0}, false};
    if (!r.moves) return GK_OK;
    KMajorCopyParams p = {(const uint8_t *)t.data,
                          (uint8_t *)workspace + r.offset,
                          rows,
                          k,
                          t.stride[0],
                          t.stride[1],
                          r.ld};
    shape->data = p.to;
    gk_status status = GK_OK;
    for (; p.rows > 0 && status == GK_OK;
         p.rows -= most, p.from += most * p.row_step, p.to += most * p.ld) {
        const dim3 grid((unsigned)gk_ceil_div(k, 64),
                        (unsigned)gk_ceil_div(gk_min_i64(p.rows, most), 64));
        status = launch<k_major_copy_kernel>(op, ctx, grid, 256, 0, p);
    }
    return status;
}

#endif
