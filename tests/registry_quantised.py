# SPDX-License-Identifier: BSD-3-Clause
"""The calls that the quantised and sparse products refuse: each is a valid call with one change.
registry.py has those of the other ops.

These ops are not in OPS, because the tests over OPS draw normal numbers of any dtype. Ops on 8- and
4-bit codes have tests of their own in tests/ops.
"""

import torch

E4M3, I8, U8 = torch.float8_e4m3fn, torch.int8, torch.uint8
BF16, F16, F64 = torch.bfloat16, torch.float16, torch.float64


# Tensors of few elements, so that no thread pool starts at import: a forked child of test_runtime
# would wait for it.
def t(*shape, dtype=torch.float32):
    return torch.ones(*shape, dtype=dtype)


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def codes(**change):
    """A valid scaled_gemm call with some of its arguments changed."""
    return (
        dict(a=t(2, 8, dtype=E4M3), b=t(8, 5, dtype=E4M3), scale_a=t(2, 1), scale_b=t(1, 5))
        | change
    )


def packed_weight(**change):
    """A valid weight_gemm call of a weight [5, 32] with some of its arguments changed."""
    return (
        dict(
            a=t(2, 32, dtype=BF16),
            packed=t(1, 1, 2048, dtype=U8),
            scale=t(1, 5),
            n=5,
            format="int4",
        )
        | change
    )


def packed_experts(**change):
    """A valid weight_gemm call of two groups [5, 32] with some of its arguments changed."""
    of_groups = dict(packed=t(2, 1, 2048, dtype=U8), scale=t(1, 128), offs=i32(1, 2))
    return packed_weight(**of_groups) | change


def experts(**change):
    """A valid grouped_gemm call of three groups of rows with some of its arguments changed."""
    return dict(a=t(8, 4), b=t(3, 4, 5), offs=i32(2, 2, 7)) | change


def sparse(**change):
    """A valid sparse_gemm call of a weight [5, 8] with some of its arguments changed."""
    return (
        dict(
            a=t(2, 8, dtype=BF16),
            values=t(5, 4, dtype=BF16),
            meta=torch.full((5, 1), 0x44, dtype=U8),
        )
        | change
    )


# (op, arguments, whole text after "gpukern::<op>: ").
VALUE_ERRORS = [
    (
        "quantize",
        dict(x=t(2, 3).int(), dtype=E4M3, granularity="row"),
        "x must be float32, bfloat16, float16 or float64, got int32",
    ),
    (
        "quantize",
        dict(x=t(2, 3), dtype=BF16, granularity="row"),
        "dtype must be float8_e4m3fn, float8_e5m2 or int8, got bfloat16",
    ),
    (
        "quantize",
        dict(x=t(2, 3), dtype=E4M3, granularity="column"),
        "granularity must be tensor, row, 1x128, 128x128 or 1x32, got 'column'",
    ),
    (
        "quantize",
        dict(x=t(3), dtype=E4M3, granularity="128x128"),
        "x must have at least 2 dimensions with 128x128, got 1",
    ),
    (
        "quantize",
        dict(x=t(2, 3), dtype=E4M3, granularity="row", scale_ub=t(2)),
        "scale_ub must have shape [] or [1], got [2]",
    ),
    (
        "quantize",
        dict(x=t(2, 3), dtype=E4M3, granularity="row", scale=t(2)),
        "scale must have shape [2, 1], got [2]",
    ),
    (
        "dequantize",
        dict(codes=t(2, 3), scale=t(2, 1), dtype=BF16),
        "codes must be float8_e4m3fn, float8_e5m2 or int8, got float32",
    ),
    (
        "dequantize",
        dict(codes=t(2, 3, dtype=I8), scale=t(3, 1), dtype=BF16),
        "scale has shape [3, 1], which does not fit codes [2, 3]; expected [] or "
        "[r, c] with r of 1, M or ceil(M / 128) and c of 1, ceil(K / 128) or ceil(K / 32)",
    ),
    (
        "dequantize",
        dict(codes=t(2, 3, dtype=I8), scale=t(2, 1), dtype=I8),
        "dtype must be float32, bfloat16, float16 or float64, got int8",
    ),
    (
        "silu_mul_quantize",
        dict(gate=t(2, 3), up=t(2, 4), dtype=E4M3, granularity="row"),
        "up must have shape [2, 3], got [2, 4]",
    ),
    (
        "rms_norm_quantize",
        dict(x=t(2, 3), weight=t(4), residual=None, eps=1e-6, dtype=E4M3, granularity="row"),
        "weight must have shape [3], got [4]",
    ),
    (
        "rms_norm_quantize",
        dict(x=t(2, 3), weight=None, residual=None, eps=-1.0, dtype=E4M3, granularity="row"),
        "eps must be 0 or a positive finite number, got -1",
    ),
    ("scaled_gemm", codes(a=t(2, 8)), "a must be float8_e4m3fn, float8_e5m2 or int8, got float32"),
    (
        "scaled_gemm",
        codes(b=t(8, 5, dtype=I8)),
        "b has dtype int8, a has float8_e4m3fn; int8 goes only with int8",
    ),
    ("scaled_gemm", codes(b=t(7, 5, dtype=E4M3)), "b has 7 rows, a has 8 columns; they must match"),
    ("scaled_gemm", codes(a=t(8, dtype=E4M3)), "a must have 2 dimensions [M, K], got 1"),
    (
        "scaled_gemm",
        codes(scale_a=t(3, 1)),
        "scale_a has shape [3, 1], which does not fit a [2, 8]; expected [] or "
        "[r, c] with r of 1, M or ceil(M / 128) and c of 1, ceil(K / 128) or ceil(K / 32)",
    ),
    (
        "scaled_gemm",
        codes(scale_a=t(2)),
        "scale_a has shape [2], which does not fit a [2, 8]; expected [] or "
        "[r, c] with r of 1, M or ceil(M / 128) and c of 1, ceil(K / 128) or ceil(K / 32)",
    ),
    (
        "scaled_gemm",
        codes(scale_b=t(5, 2)),
        "scale_b has shape [5, 2], which does not fit b [8, 5]; expected [] or "
        "[r, c] with r of 1, ceil(K / 128) or ceil(K / 32) and c of 1, N or ceil(N / 128)",
    ),
    (
        "scaled_gemm",
        codes(scale_b=t(1, 5, dtype=BF16)),
        "scale_b must be float32 or float8_e8m0fnu, got bfloat16",
    ),
    ("scaled_gemm", codes(bias=t(4, dtype=BF16)), "bias must have shape [5], got [4]"),
    (
        "scaled_gemm",
        codes(bias=t(5, dtype=torch.float16)),
        "bias must be bfloat16 (as the result) or float32, got float16",
    ),
    (
        "scaled_gemm",
        codes(out_dtype=F64),
        "out_dtype must be float32, bfloat16, float16, "
        "float8_e4m3fn, float8_e5m2 or int8, got float64",
    ),
    ("scaled_gemm", codes(out_dtype=E4M3), "out_scale must be given with out_dtype float8_e4m3fn"),
    (
        "scaled_gemm",
        codes(out_scale=t(1)),
        "out_scale goes with an 8-bit result, got out_dtype bfloat16",
    ),
    (
        "scaled_gemm",
        codes(activation="tanh"),
        "activation must be none, relu, gelu, gelu_tanh or silu, got 'tanh'",
    ),
    ("scaled_gemm", codes(accumulate="quick"), "accumulate must be precise or fast, got 'quick'"),
    (
        "scaled_gemm",
        codes(a=t(2, 200, dtype=E4M3), b=t(200, 5, dtype=E4M3), scale_a=t(2, 2), accumulate="fast"),
        "accumulate must be precise with scales along K, got fast",
    ),
    (
        "scaled_gemm",
        codes(a=t(2, 8, dtype=I8), b=t(8, 5, dtype=I8), accumulate="fast"),
        "accumulate must be precise with int8, got fast",
    ),
    (
        "scaled_gemm",
        codes(
            a=t(1, 1, dtype=I8).expand(1, 131072),
            b=t(1, 1, dtype=I8).expand(131072, 1),
            scale_a=t(1),
            scale_b=t(1),
        ),
        "a has 131072 columns; int8 without scales along K takes at most 131071, because longer "
        "sums overflow int32",
    ),
    (
        "pack_weight",
        dict(q=t(4, 8, dtype=I8), format="int3"),
        "format must be int4, uint4, int8, e4m3, mxfp4 or nvfp4, got 'int3'",
    ),
    (
        "pack_weight",
        dict(q=t(4, 8, dtype=I8), format="uint4"),
        "q must be uint8 for format uint4, got int8",
    ),
    (
        "pack_weight",
        dict(q=t(8, dtype=I8), format="int8"),
        "q must have 2 dimensions [N, K], got 1",
    ),
    (
        "unpack_weight",
        dict(packed=t(1, 1, 2048, dtype=U8), n=65, k=8, format="int4"),
        "packed must have shape [2, 1, 2048] for n 65, k 8 and format int4, got [1, 1, 2048]",
    ),
    (
        "unpack_weight",
        dict(packed=t(1, 1, 2048, dtype=U8), n=-1, k=8, format="int4"),
        "n and k must be 0 or more, got -1 and 8",
    ),
    (
        "weight_gemm",
        packed_weight(a=t(2, 32)),
        "a must be bfloat16, float16 or float8_e4m3fn, got float32",
    ),
    ("weight_gemm", packed_weight(a=t(32, dtype=BF16)), "a must have at least 2 dimensions, got 1"),
    (
        "weight_gemm",
        packed_weight(packed=t(1, 1, 4096, dtype=U8)),
        "packed must have shape [1, 1, 2048] for n 5, k 32 and format int4, got [1, 1, 4096]",
    ),
    (
        "weight_gemm",
        packed_weight(scale=t(3, 5)),
        "scale must have shape [ceil(K / g), N], g 16, 32, 64, 128, 256 or K, with K 32 and N 5, "
        "got "
        "[3, 5]",
    ),
    (
        "weight_gemm",
        packed_weight(scale=t(1, 4)),
        "scale must have shape [ceil(K / g), N], g 16, 32, 64, 128, 256 or K, with K 32 and N 5, "
        "got [1, 4]",
    ),
    (
        "weight_gemm",
        packed_weight(format="int8"),
        "packed must have shape [1, 1, 4096] for n 5, k 32 and format int8, got [1, 1, 2048]",
    ),
    (
        "weight_gemm",
        packed_weight(format="mxfp4", scale=t(1, 5, dtype=BF16)),
        "scale must be float8_e8m0fnu or float32, got bfloat16",
    ),
    (
        "weight_gemm",
        packed_weight(scale=t(1, 5, dtype=F16)),
        "scale must be bfloat16 or float32, got float16",
    ),
    ("weight_gemm", packed_weight(n=-1), "n must be 0 or more, got -1"),
    ("weight_gemm", packed_weight(zero=t(1, 5, dtype=U8)), "zero goes with format uint4, got int4"),
    (
        "weight_gemm",
        packed_weight(global_scale=t(1)),
        "global_scale goes with format nvfp4, got int4",
    ),
    (
        "weight_gemm",
        packed_weight(scale_a=t(1)),
        "scale_a goes with a float8_e4m3fn a, got bfloat16",
    ),
    (
        "weight_gemm",
        packed_weight(format="mxfp4", scale=t(2, 5)),
        "scale must have groups of 32 for format mxfp4, [1, N], got [2, 5]",
    ),
    (
        "weight_gemm",
        packed_weight(a=t(2, 32, dtype=E4M3)),
        "scale_a must be given where a is float8_e4m3fn",
    ),
    ("weight_gemm", packed_weight(bias=t(4)), "bias must have shape [5], got [4]"),
    ("weight_gemm", packed_weight(bias=t(1, 5)), "bias must have shape [5], got [1, 5]"),
    (
        "weight_gemm",
        packed_experts(a=t(2, 1, 32, dtype=BF16)),
        "a must have 2 dimensions [M, K] with offs, got 3",
    ),
    (
        "weight_gemm",
        packed_experts(offs=torch.tensor([1, 2])),
        "offs must be int32, got int64",
    ),
    ("weight_gemm", packed_experts(offs=i32(1, 2)[None]), "offs must have 1 dimension [G], got 2"),
    (
        "weight_gemm",
        packed_experts(n=2**62),
        f"n is {2**62}, which is too large with the 2 groups of offs",
    ),
    (
        "weight_gemm",
        packed_experts(packed=t(1, 1, 2048, dtype=U8)),
        "packed must have shape [2, 1, 2048] for 2 groups of n 5, k 32 and format int4, got [1, 1, "
        "2048]",
    ),
    (
        "weight_gemm",
        packed_experts(scale=t(1, 10)),
        "scale must have shape [ceil(K / g), G N'], g 16, 32, 64, 128, 256 or K, with K 32 and "
        "G N' 128, got [1, 10]",
    ),
    (
        "weight_gemm",
        packed_experts(format="mxfp4", scale=t(2, 128)),
        "scale must have groups of 32 for format mxfp4, [1, G N'], got [2, 128]",
    ),
    (
        "weight_gemm",
        packed_experts(format="uint4", zero=t(1, 5, dtype=U8)),
        "zero must have shape [1, 128], got [1, 5]",
    ),
    ("weight_gemm", packed_experts(bias=t(3, 5)), "bias must have shape [2, 5], got [3, 5]"),
    ("weight_gemm", packed_experts(bias=t(6)), "bias must have shape [5], got [6]"),
    (
        "weight_gemm",
        packed_weight(out_dtype=F16),
        "out_dtype must be bfloat16 or float32, got float16",
    ),
    (
        "grouped_gemm",
        experts(a=t(8, 4).int()),
        "a must be float32, bfloat16, float16, float8_e4m3fn, float8_e5m2 or int8, got int32",
    ),
    ("grouped_gemm", experts(b=t(3, 5, 5)), "b has 5 rows, a has 4 columns; they must match"),
    ("grouped_gemm", experts(b=t(2, 4, 5)), "offs has 3 groups, b has 2; they must match"),
    (
        "grouped_gemm",
        experts(b=t(3, 4, 5, dtype=BF16)),
        "b has dtype bfloat16, a has float32; they must match",
    ),
    (
        "grouped_gemm",
        experts(b=t(5)),
        "b must have 3 dimensions [G, K, N] or 2 [K, N], got 1",
    ),
    (
        "grouped_gemm",
        experts(a=t(8, 4, dtype=E4M3), b=t(3, 4, 5, dtype=E4M3), scale_a=t(1)),
        "scale_b must be given where a is float8_e4m3fn",
    ),
    ("grouped_gemm", experts(bias=t(4)), "bias must have shape [5], got [4]"),
    ("grouped_gemm", experts(offs=torch.tensor([2, 2, 7])), "offs must be int32, got int64"),
    (
        "grouped_gemm",
        experts(scale_a=t(1)),
        "scale_a goes with float8_e4m3fn, float8_e5m2 and int8, a is float32",
    ),
    ("grouped_gemm", experts(bias=t(2, 5)), "bias must have shape [3, 5], got [2, 5]"),
    (
        "sparse_pack",
        dict(w=t(4, 8)),
        "w must be bfloat16, float16, float8_e4m3fn, float8_e5m2 or int8, got float32",
    ),
    ("sparse_pack", dict(w=t(4, 6, dtype=BF16)), "w has 6 columns, expected a multiple of 4"),
    (
        "sparse_pack",
        dict(w=t(4, 8, dtype=BF16)),
        "w is expected to have at most 2 non-zeros of each 4 along K, got 4 in w[0, 0:4]",
    ),
    (
        "sparse_gemm",
        sparse(a=t(2, 12, dtype=BF16)),
        "values has 4 columns, expected 6, half of a's",
    ),
    (
        "sparse_gemm",
        sparse(values=t(5, 4, dtype=F16)),
        "values has dtype float16, a has bfloat16; they must match",
    ),
    ("sparse_gemm", sparse(meta=t(5, 2, dtype=U8)), "meta must have shape [5, 1], got [5, 2]"),
    ("sparse_gemm", sparse(scale_a=t(1)), "scale_a goes with 8-bit operands, a is bfloat16"),
    ("sparse_gemm", sparse(bias=t(4, dtype=BF16)), "bias must have shape [5], got [4]"),
    (
        "sparse_gemm",
        sparse(accumulate="fast"),
        "accumulate must be precise where a is bfloat16, got fast",
    ),
    ("sparse_gemm", sparse(out_dtype=F16), "out_dtype must be bfloat16 or float32, got float16"),
]

INDEX_ERRORS = [
    ("grouped_gemm", experts(offs=i32(2, 1, 7)), "offs is expected not to decrease from 0 on, got "
                                                 "offs[1] = 1 after 2"),
    ("weight_gemm", packed_experts(offs=i32(2, 1)), "offs is expected not to decrease from 0 on, "
                                                    "got offs[1] = 1 after 2"),
    ("weight_gemm", packed_experts(offs=i32(-1, 1)), "offs is expected not to decrease from 0 on, "
                                                     "got offs[0] = -1 after 0"),
    ("weight_gemm", packed_experts(offs=i32(1, 3)), "offs is expected to end at or before 2, got "
                                                    "offs[1] = 3"),
    ("pack_weight", dict(q=torch.tensor([[0, 8]]).to(I8), format="int4"),
     "q is expected to hold codes in [-8, 7] for format int4, got q[0, 1] = 8"),
    ("grouped_gemm", experts(offs=i32(2, 2, 9)), "offs is expected to end at or before 8, got "
                                                 "offs[2] = 9"),
]  # fmt: skip
