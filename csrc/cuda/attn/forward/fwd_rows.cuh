/* SPDX-License-Identifier: BSD-3-Clause */
/* fwd_rows.cuh: two helpers of all forward kernels. One fills the rows of a packed result that no
 * sequence owns. The other checks the alignment that 16-byte copies need. */
#ifndef GPUKERN_CUDA_FWD_ROWS_CUH
#define GPUKERN_CUDA_FWD_ROWS_CUH

#include "../../tile/convert.cuh"
#include "../problem.cuh"

/* Writes out = 0 and lse = -inf for rows from cu_seqlens_q[batch] on, and for rows of a sequence
 * past max_seqlen_q. Block x serves the end of sequence x, and the last block the end of the
 * tensor. The blocks along y divide these rows. */
template <class T> __global__ void __launch_bounds__(128) clear_unowned_kernel(Problem p) {
    typedef typename element<T>::acc W;
    const int b = blockIdx.x;
    int first, end;
    if (b < p.batch) {
        const int q0 = min(max(p.cu_q[b * p.cu_q_step], 0), p.total_q);
        end = min(max(p.cu_q[(b + 1) * p.cu_q_step], q0), p.total_q);
        first = q0 + min(end - q0, p.seq_q);
    } else {
        first = min(max(p.cu_q[b * p.cu_q_step], 0), p.total_q);
        end = p.total_q;
    }
    const int64_t rows = (int64_t)(end - first) * p.heads_q;
    for (int64_t x = (int64_t)blockIdx.y * 4 + threadIdx.x / 32; x < rows; x += gridDim.y * 4) {
        const int64_t row = first + x / p.heads_q, head = x % p.heads_q;
        T *out = (T *)p.out.data + row * p.out.row + head * p.out.head;
        for (int d = threadIdx.x % 32; d < p.head_dim_v; d += 32) out[d] = from_acc<T>(0);
        if (threadIdx.x % 32 == 0 && p.lse.data)
            ((W *)p.lse.data)[row * p.lse.row + head * p.lse.head] = -INFINITY;
    }
}

template <class T>
inline gk_status clear_unowned(const char *op, const gk_context *ctx, const Problem &p) {
    if (!p.cu_q || p.total_q == 0 || p.heads_q == 0) return GK_OK;
    return launch<clear_unowned_kernel<T>>(op, ctx, dim3(p.batch + 1, 16), 128, 0, p);
}

inline bool all_aligned(const gk_flash_attn_args *a) {
    return rows_aligned(a->q) && rows_aligned(a->k) && rows_aligned(a->v) && rows_aligned(a->out);
}

#endif
