# SPDX-License-Identifier: BSD-3-Clause
"""sparse_pack, sparse_gemm: 2:4 masks of every kind, and products that equal the dense ones."""

import pytest
import torch
from conftest import ACTIVATIONS, assert_bits, generator, ops, randn, torch_gpukern

from torch_gpukern.reference import quantised as reference_quantised

DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


def sparse(gen, n, k, dtype, device, most=3):
    """A weight [n, k] of small integers, with at most 2 non-zeros in each group of four along k."""
    w = torch.randint(1, most + 1, (n, k), generator=gen).float() * (
        torch.randint(0, 2, (n, k), generator=gen) * 2 - 1
    )
    rank = torch.rand(n, k // 4, 4, generator=gen).argsort(-1).reshape(n, k)
    kept = torch.randint(0, 3, (n, k // 4, 1), generator=gen).expand(-1, -1, 4).reshape(n, k)
    return torch.where(rank < kept, w, 0).to(dtype).to(device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_packing(dtype, device):
    for n, k in ((1, 4), (3, 12), (70, 200), (5, 0)):
        w = sparse(generator("sparse", n, k), n, k, dtype, device)
        for x in (w, w.mT.contiguous().mT):
            values, meta = torch_gpukern.sparse_pack(x)
            want_values, want_meta = reference_quantised.sparse_pack(w)
            assert_bits(values, want_values)
            assert_bits(meta, want_meta)
    if dtype is not torch.int8:
        w = torch.tensor([[0, float("nan"), 0, 0, 1, 0, 0, 2]], device=device).to(dtype)
        values, meta = torch_gpukern.sparse_pack(w)
        assert (
            values.float()[0, 1].isnan()
            and values.float()[0, 2:].tolist() == [1, 2]
            and meta.tolist() == [[0b1100_0100]]
        )


@pytest.mark.parametrize("shape", ((0, 8), (0, 4), (3, 0), (0, 0)))
def test_packing_of_nothing(shape, device):
    w = torch.ones(shape, dtype=torch.bfloat16, device=device)
    for got, want in zip(
        torch_gpukern.sparse_pack(w), reference_quantised.sparse_pack(w), strict=True
    ):
        assert got.shape == want.shape and got.dtype == want.dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_integers_are_exact(dtype, device):
    for m, n, k in ((1, 1, 4), (5, 70, 200), (130, 65, 1028), (33, 128, 12), (3, 4, 0)):
        gen = generator("sparse", m, n, k)
        w = sparse(gen, n, k, dtype, device)
        a = torch.randint(-3, 4, (m, k), generator=gen).float().to(dtype).to(device)
        packed = torch_gpukern.sparse_pack(w)
        for x in (a, a.mT.contiguous().mT):
            got = torch_gpukern.sparse_gemm(x, *packed, out_dtype=torch.float32)
            assert_bits(got + 0, reference_quantised.sparse_gemm(a, w, out_dtype=torch.float32) + 0)
        if dtype.itemsize == 1:
            scales = dict(
                scale_a=torch.exp2(torch.randint(-3, 3, (m, 1), generator=gen).float()).to(device),
                scale_b=torch.exp2(torch.randint(-3, 3, (1, n), generator=gen).float()).to(device),
            )
            got = torch_gpukern.sparse_gemm(a, *packed, **scales, out_dtype=torch.float32)
            assert_bits(
                got + 0,
                reference_quantised.sparse_gemm(a, w, **scales, out_dtype=torch.float32) + 0,
            )


@pytest.mark.parametrize("shape", ((5, 70, 200), (130, 264, 1028), (300, 520, 2048), (64, 64, 512)))
def test_fast_sums(shape, device):
    """Small integers are exact in any order of summing. For random numbers, of which the sums keep
    13 bits, the error stays below the bound of scaled_gemm."""
    m, n, k = shape
    gen = generator("sparse fast", m, n, k)
    e4m3 = torch.float8_e4m3fn
    w = sparse(gen, n, k, e4m3, device)
    packed = torch_gpukern.sparse_pack(w)
    a = torch.randint(-1, 2, (m, k), generator=gen).float().to(e4m3).to(device)
    how = dict(out_dtype=torch.float32, accumulate="fast")
    got = torch_gpukern.sparse_gemm(a, *packed, **how)
    assert_bits(got + 0, reference_quantised.sparse_gemm(a, w, out_dtype=torch.float32) + 0)
    a = randn(gen, m, k).to(e4m3).to(device)
    got = torch_gpukern.sparse_gemm(a, *packed, **how)
    want = a.double() @ w.double().mT
    size = a.double().abs() @ w.double().abs().mT
    assert ((got.double() - want).abs() <= 2.0**-10 * size + 1e-30).all()
    if device == "cpu":
        assert_bits(got, torch_gpukern.sparse_gemm(a, *packed, out_dtype=torch.float32))


def test_bias_activation_and_rows_of_the_weight(device):
    gen = generator("sparse epilogue")
    a, w = (
        randn(gen, 9, 64, dtype=torch.bfloat16).to(device),
        sparse(gen, 40, 64, torch.bfloat16, device),
    )
    bias = randn(gen, 40, dtype=torch.bfloat16).to(device)
    values, meta = torch_gpukern.sparse_pack(w)
    for activation in ACTIVATIONS:
        got = torch_gpukern.sparse_gemm(a, values, meta, bias=bias, activation=activation)
        want = reference_quantised.sparse_gemm(
            a, w, bias=bias, activation=activation, out_dtype=torch.float64
        )
        assert (got.double() - want).abs().max() <= want.abs().max() * 2.0**-8 * 1.05
    part = torch_gpukern.sparse_gemm(a, values[8:24], meta[8:24])
    assert_bits(part, torch_gpukern.sparse_gemm(a, values, meta)[:, 8:24].contiguous())


def test_opcheck_and_compile(device):
    gen = generator("sparse compiled")
    a, w = (
        randn(gen, 9, 64, dtype=torch.bfloat16).to(device),
        sparse(gen, 40, 64, torch.bfloat16, device),
    )
    values, meta = torch_gpukern.sparse_pack(w)
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.sparse_pack.default, (w,), test_utils=utils)
    torch.library.opcheck(ops.sparse_gemm.default, (a, values, meta), test_utils=utils)
    compiled = torch.compile(
        lambda x: torch_gpukern.sparse_gemm(x, values, meta), fullgraph=True, dynamic=True
    )
    for m in (3, 5, 130):
        x = randn(gen, m, 64, dtype=torch.bfloat16).to(device)
        assert_bits(compiled(x), torch_gpukern.sparse_gemm(x, values, meta))


@pytest.mark.skipif(
    not ops.cuda_kernels.default(), reason="the library is built without CUDA kernels"
)
def test_kernels_of_gpus_without_wgmma():
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "f16"), (torch.int8, "i8")):
        for m, k, row in ((3, 512, "64x32"), (2048, 512, "128x128"), (2048, 36, None)):
            values, meta = (
                torch.empty(4096, k // 2).to(dtype),
                torch.zeros(4096, -(-k // 8), dtype=torch.uint8),
            )
            told = torch_gpukern.explain(
                "sparse_gemm", torch.empty(m, k).to(dtype), values, meta, arch="sm_86"
            )["instance"]
            assert told == (
                f"sparse_gemm_sm80_{name}_{row}" if row else f"sparse_gemm_plain_{name}"
            )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_several_tiles_a_block(dtype):
    """More tiles than a GPU has SMs, an odd number of tiles across, and a K that ends inside a
    stage."""
    for m, n, k in ((2100, 2056, 1056), (4500, 1160, 544), (3, 4200, 2048)):
        gen = generator("many tiles", m, n, k)
        w = sparse(gen, n, k, dtype, "cuda")
        a = torch.randint(-3, 4, (m, k), generator=gen).float().to(dtype).cuda()
        out = dtype if dtype.itemsize == 2 else torch.bfloat16
        packed = torch_gpukern.sparse_pack(w)
        want = a.float() @ w.float().mT
        assert_bits(torch_gpukern.sparse_gemm(a, *packed, out_dtype=torch.float32) + 0, want + 0)
        assert_bits(torch_gpukern.sparse_gemm(a, *packed, out_dtype=out) + 0, want.to(out) + 0)


def test_autocast_takes_a_float32_stream(device):
    gen = generator("sparse_gemm autocast")
    w = randn(gen, 9, 32, device=device).bfloat16()
    w[:, ::4] = w[:, 1::4] = 0
    packed, a, bias = (
        torch_gpukern.sparse_pack(w),
        randn(gen, 5, 32, device=device),
        randn(gen, 9, device=device),
    )
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        got = torch_gpukern.sparse_gemm(a, *packed, bias=bias)
    assert_bits(got, torch_gpukern.sparse_gemm(a.bfloat16(), *packed, bias=bias.bfloat16()))


@pytest.mark.skipif(
    not ops.cuda_kernels.default(), reason="the library is built without CUDA kernels"
)
@pytest.mark.parametrize("arch", ("sm_80", "sm_90"))
def test_too_many_rows_are_refused_for_their_number(arch):
    """The plain kernel has one block along y for each 64 rows, and a grid has at most 65535. The
    error must name the size and not the dtype."""
    values, meta = torch.zeros(1, 10).bfloat16(), torch.zeros(1, 3, dtype=torch.uint8)

    def row(m):
        a = torch.zeros(1, dtype=torch.bfloat16).expand(m, 20)
        return torch_gpukern.explain("sparse_gemm", a, values, meta, arch=arch)["instance"]

    assert row(64 * 65535) == "sparse_gemm_plain_bf16"
    with pytest.raises(
        ValueError,
        match="sparse_gemm: no kernel for bfloat16 on .* serves a call of these sizes; use",
    ):
        row(64 * 65535 + 1)
