/* SPDX-License-Identifier: BSD-3-Clause */
/* mode.h: the layout of a product's operands in memory. Kernels are compiled for each mode. */
#ifndef GPUKERN_CUDA_GEMM_MODE_H
#define GPUKERN_CUDA_GEMM_MODE_H

enum Mode {
    A_ALONG_M = 1, /* a is M-major, else K-major */
    B_ALONG_N = 2, /* b is N-major, else K-major */
    ANY = 4        /* any alignment and strides; gemm_sm80 alone */
};

#endif
