# SPDX-License-Identifier: BSD-3-Clause
"""pack_weight, unpack_weight, weight_gemm: bits of packed and decoded weights, and products against
float64."""

import itertools
from functools import partial

import pytest
import torch
from conftest import ACTIVATIONS, assert_bits, generator, ops, randn, reference, torch_gpukern

from torch_gpukern.reference import quantised as reference_quantised

FORMATS = ("int4", "uint4", "int8", "e4m3", "mxfp4", "nvfp4")
SIZES = [(1, 1), (64, 64), (65, 63), (130, 200), (70, 33), (16, 520)]


def codes(gen, n, k, format, device):
    """Random codes [n, k] of a format."""
    if format == "int4":
        q = torch.randint(-8, 8, (n, k), generator=gen, dtype=torch.int8)
    elif format == "int8":
        q = torch.randint(-128, 128, (n, k), generator=gen, dtype=torch.int8)
    elif format == "e4m3":
        q = (
            torch.randint(-120, 120, (n, k), generator=gen)
            .float()
            .mul(0.25)
            .to(torch.float8_e4m3fn)
        )
    else:
        q = torch.randint(0, 16, (n, k), generator=gen, dtype=torch.uint8)
    return q.to(device)


def weight(gen, n, k, format, group, device, dtype=torch.bfloat16):
    """q, scale [ceil(K / group), N], zero and global_scale of a random weight."""
    group = {"mxfp4": 32, "nvfp4": 16}.get(format, group) or k
    scale = (torch.rand(-(-k // group), n, generator=gen) + 0.5) / 8
    more = {}
    if format == "mxfp4":
        scale = torch.exp2(scale.log2().round()).to(torch.float8_e8m0fnu)
    elif format == "nvfp4":
        scale, more["global_scale"] = (
            (scale * 9).to(torch.float8_e4m3fn),
            torch.tensor(0.03, device=device),
        )
    else:
        scale = scale.to(dtype)
    if format == "uint4":
        more["zero"] = torch.randint(0, 16, scale.shape, generator=gen, dtype=torch.uint8).to(
            device
        )
    return codes(gen, n, k, format, device), scale.to(device), more


@pytest.mark.parametrize("format", FORMATS)
def test_packed_bits_equal_the_reference_and_unpack_again(format, device):
    for n, k in SIZES:
        q = codes(generator("pack", n, k), n, k, format, device)
        packed = torch_gpukern.pack_weight(q, format)
        assert_bits(packed, reference_quantised.pack_weight(q, format))
        assert_bits(torch_gpukern.unpack_weight(packed, n, k, format), q)
        assert_bits(reference_quantised.unpack_weight(packed, n, k, format), q)
        assert_bits(torch_gpukern.pack_weight(q.mT.contiguous().mT, format), packed)


@pytest.mark.parametrize("format", FORMATS)
def test_shards_are_slices(format, device):
    n, k = 200, 320
    gen = generator("shards", format)
    q, scale, more = weight(gen, n, k, format, 64, device)
    packed = torch_gpukern.pack_weight(q, format)
    rows = packed.narrow(0, 1, 2)
    assert_bits(torch_gpukern.unpack_weight(rows, 128, k, format), q[64:192].contiguous())
    part = packed.narrow(1, 2, 3)
    assert_bits(torch_gpukern.unpack_weight(part, n, 192, format), q[:, 128:].contiguous())
    a = randn(gen, 5, k, dtype=torch.bfloat16).to(device)
    want = torch_gpukern.weight_gemm(a, packed, scale, n, format, **more)
    cut = {name: x[:, 64:192] if name == "zero" else x for name, x in more.items()}
    assert_bits(
        torch_gpukern.weight_gemm(a, rows, scale[:, 64:192], 128, format, **cut),
        want[:, 64:192].contiguous(),
    )


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("format", FORMATS)
def test_a_one_reads_the_decoded_weight(format, dtype, device):
    for n, k, group in [
        (70, 200, 32),
        (130, 96, 16),
        (33, 640, 128),
        (64, 130, None),
        (20, 300, 64),
        (8, 520, 256),
    ]:
        gen = generator("one hot", n, k)
        q, scale, more = weight(gen, n, k, format, group, device, dtype)
        packed = torch_gpukern.pack_weight(q, format)
        got = torch_gpukern.weight_gemm(
            torch.eye(k, dtype=dtype, device=device), packed, scale, n, format, **more
        )
        want = reference_quantised.decoded(q, scale, format, **more, dtype=torch.float32).to(dtype)
        exact = reference_quantised.decoded(q, scale, format, **more)
        assert got.shape == (k, n)
        if format == "nvfp4":  # its two scales are multiplied in float32, in another order
            assert (
                (got.mT.double() - exact).abs()
                <= exact.abs() * torch.finfo(dtype).eps * 0.5001 + 1e-9
            ).all()
        else:
            assert_bits(got.mT.contiguous() + 0, want + 0)


@pytest.mark.parametrize("format", FORMATS)
def test_float64(format, device):
    """Compared with the exact code * scale, the error is at most twice that of `gemm` with the
    decoded weight."""
    for (m, n, k, group), dtype in itertools.product(
        [(1, 130, 256, 128), (5, 70, 200, 32), (33, 65, 1000, None), (130, 200, 640, 64)],
        (torch.bfloat16, torch.float16),
    ):
        gen = generator("products", m, n, k)
        q, scale, more = weight(gen, n, k, format, group, device, dtype)
        a = (randn(gen, m, k) + 0.2).to(dtype).to(device)
        packed = torch_gpukern.pack_weight(q, format)
        exact = reference_quantised.decoded(q, scale, format, **more)
        w = reference_quantised.decoded(q, scale, format, **more, dtype=torch.float32).to(dtype)
        for bias, activation, out in [
            (None, "none", None),
            (randn(gen, n, dtype=dtype).to(device), "silu", None),
            (None, "relu", torch.float32),
        ]:
            got = torch_gpukern.weight_gemm(
                a, packed, scale, n, format, **more, bias=bias, activation=activation, out_dtype=out
            )
            want = reference.gemm(
                a.double(), exact.mT, None if bias is None else bias.double(), activation=activation
            )
            yard = torch_gpukern.gemm(a, w.mT, bias, activation=activation, out_dtype=out)
            error = (got.double() - want).abs().max()
            assert (
                error
                <= 2 * (yard.double() - want).abs().max()
                + want.abs().max() * torch.finfo(got.dtype).eps
            )


GROUPS = [(f, g) for f in ("int4", "uint4") for g in (32, 64, 128, 256)]
GROUPS += [(f, g) for f in ("int8", "e4m3") for g in (64, 128, None)]
GROUPS += [("mxfp4", 32), ("nvfp4", 16)]

# Tokens on both sides of every tile size: 8, 16, 32, 64, 128, 256.
TOKENS = (1, 7, 8, 9, 16, 17, 32, 33, 40, 64, 65, 128, 129, 250, 256, 300)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize(("format", "group"), GROUPS)
def test_tiles_and_their_edges(format, group, dtype, device):
    """Whole and partial tiles of tokens, rows and k, for the forms that Hopper has kernels for, and
    for neighbouring forms."""
    for n, k in ((208, 64), (336, 1088), (64, 2112)):
        gen = generator("edges", n, k)
        q, scale, more = weight(gen, n, k, format, group, device, dtype)
        packed = torch_gpukern.pack_weight(q, format)
        exact = reference_quantised.decoded(q, scale, format, **more)
        bias = randn(gen, n).to(device)
        for m in TOKENS if torch.device(device).type == "cuda" else (1, 9, 40):
            a = randn(gen, m, k).to(dtype).to(device)
            got = torch_gpukern.weight_gemm(
                a, packed, scale, n, format, **more, out_dtype=torch.float32
            )
            want = a.double() @ exact.mT
            # weights may be rounded to a's dtype, sums are float32
            yard = a.double().abs() @ exact.mT.abs() * (torch.finfo(dtype).eps / 2 + 1e-6)
            assert ((got.double() - want).abs() <= yard).all(), (m, n, k)
            own = torch_gpukern.weight_gemm(a, packed, scale, n, format, **more)
            assert (
                (own.double() - got.double()).abs()
                <= got.double().abs() * torch.finfo(dtype).eps + yard
            ).all()
            biased = torch_gpukern.weight_gemm(
                a, packed, scale, n, format, **more, bias=bias, activation="relu"
            )
            torch.testing.assert_close(
                biased.double(),
                (got.double() + bias.double()).relu(),
                rtol=torch.finfo(dtype).eps,
                atol=1e-4,
            )


def test_nan_codes_of_e4m3_spoil_their_row_alone(device):
    n, k = 208, 576
    gen = generator("nan codes")
    q, scale, _ = weight(gen, n, k, "e4m3", 128, device)
    bits = q.view(torch.uint8)
    bits[5, 77], bits[40, k - 1], bits[207, 0] = 0x7F, 0xFF, 0x7F
    packed = torch_gpukern.pack_weight(q, "e4m3")
    for dtype, m in itertools.product((torch.bfloat16, torch.float16), (1, 16, 40, 130, 300)):
        a = randn(gen, m, k, dtype=dtype).to(device)
        got = torch_gpukern.weight_gemm(a, packed, scale.to(dtype), n, "e4m3")
        rows = got.isnan().all(0).nonzero().flatten().tolist()
        assert rows == [5, 40, 207] and got.isnan().sum() == 3 * m


def test_scales_at_the_ends_of_e8m0(device):
    """Code 0 is 2^-127, 255 is NaN."""
    n, k = 64, 256
    gen = generator("ends of e8m0")
    q = torch.randint(0, 16, (n, k), generator=gen, dtype=torch.uint8).to(device)
    bits = torch.full((k // 32, n), 127, dtype=torch.uint8)
    bits[:, 3], bits[2, 9] = 0, 255
    scale = bits.to(device).view(torch.float8_e8m0fnu)
    packed = torch_gpukern.pack_weight(q, "mxfp4")
    exact = reference_quantised.decoded(q, scale, "mxfp4")
    for m in (1, 16, 40):
        a = (randn(gen, m, k) * 1e3).bfloat16().to(device)
        got = torch_gpukern.weight_gemm(a, packed, scale, n, "mxfp4", out_dtype=torch.float32)
        assert got[:, 9].isnan().all() and got.isnan().sum() == m
        keep = [i for i in range(n) if i != 9]
        want = a.double() @ exact.mT
        torch.testing.assert_close(got[:, keep].double(), want[:, keep], rtol=1e-2, atol=1.0)
        assert got[:, 3].abs().max() <= 1e-30


@pytest.mark.parametrize("m", (1, 8, 9, 40))
@pytest.mark.parametrize("k", (16, 33, 64, 100))
def test_codes_beyond_k_do_not_count_whatever_the_scale(k, m, device):
    """Code 0 of uint4 minus 8 times this scale is an infinity in float16."""
    q = torch.full((70, k), 8, dtype=torch.uint8)
    q[:, 0] = torch.arange(70) % 3 + 7
    packed = ops.pack_weight(q, "uint4").to(device)
    a = torch.ones(m, k, dtype=torch.float16, device=device)
    scale = torch.full((1, 70), 1e4, device=device)
    want = (q[:, 0].double() - 8) * 1e4
    out = ops.weight_gemm(a, packed, scale, 70, "uint4")
    assert torch.equal(out.cpu().double(), want.expand(m, -1))
    rows = torch.tensor([m], dtype=torch.int32, device=device)
    wide = torch.full((1, 128), 1e4, device=device)
    assert torch.equal(ops.weight_gemm(a, packed, wide, 70, "uint4", offs=rows), out)


@pytest.mark.parametrize("format", FORMATS)
def test_activations_of_8_bits(format, device):
    for m, n, k, group in [(1, 70, 128, 32), (40, 130, 400, 128), (7, 64, 100, None)]:
        gen = generator("w4a8", m, n, k)
        q, scale, more = weight(gen, n, k, format, group, device, torch.float32)
        a = randn(gen, m, k).to(torch.float8_e4m3fn).to(device)
        for scale_a in (
            torch.tensor(0.5, device=device),
            torch.rand(m, 1, generator=gen).to(device),
        ):
            got = torch_gpukern.weight_gemm(
                a,
                torch_gpukern.pack_weight(q, format),
                scale,
                n,
                format,
                **more,
                scale_a=scale_a,
                out_dtype=torch.float32,
            )
            want = reference_quantised.weight_gemm(
                a, q, scale, format, **more, scale_a=scale_a, out_dtype=torch.float64
            )
            assert (got.double() - want).abs().max() <= 1e-5 * want.abs().max()


def test_leading_dimensions_strides_activations_and_nothing(device):
    gen = generator("leading")
    q, scale, _ = weight(gen, 48, 128, "int4", 64, device)
    packed = torch_gpukern.pack_weight(q, "int4", scale=scale)
    a = randn(gen, 2, 3, 128, dtype=torch.bfloat16).to(device)
    want = torch_gpukern.weight_gemm(a.reshape(6, 128), packed, scale, 48, "int4")
    assert_bits(torch_gpukern.weight_gemm(a, packed, scale, 48, "int4"), want.reshape(2, 3, 48))
    assert_bits(
        torch_gpukern.weight_gemm(a.mT.contiguous().mT, packed, scale, 48, "int4"),
        want.reshape(2, 3, 48),
    )
    transposed = scale.mT.contiguous().mT
    assert_bits(
        torch_gpukern.weight_gemm(a, packed, transposed, 48, "int4"), want.reshape(2, 3, 48)
    )
    for activation in ACTIVATIONS:
        got = torch_gpukern.weight_gemm(
            a, packed, scale, 48, "int4", activation=activation, out_dtype=torch.float32
        )
        bare = torch_gpukern.weight_gemm(a, packed, scale, 48, "int4", out_dtype=torch.float32)
        torch.testing.assert_close(
            got, reference.ACTIVATIONS[activation](bare.double()).float(), rtol=1e-5, atol=1e-5
        )
    assert torch_gpukern.weight_gemm(a[:0], packed, scale, 48, "int4").shape == (0, 3, 48)


@pytest.mark.parametrize("format", FORMATS)
def test_gradients(format, device):
    """The gradient of a is gemm's with the decoded weight, that of bias the sum over rows."""
    for n, k, group in ((70, 200, 32), (33, 130, None)):
        gen = generator("weight gradients", n, k, format)
        q, scale, more = weight(gen, n, k, format, group, device)
        packed = torch_gpukern.pack_weight(q, format)
        a = randn(gen, 2, 3, k, dtype=torch.bfloat16).to(device).requires_grad_()
        bias = randn(gen, n).to(device).requires_grad_()
        out = torch_gpukern.weight_gemm(a, packed, scale, n, format, **more, bias=bias)
        grad = randn(gen, 2, 3, n, dtype=torch.bfloat16).to(device)
        got = torch.autograd.grad(out, (a, bias), grad)
        w = reference_quantised.decoded(q, scale, format, **more, dtype=torch.float32).bfloat16()
        if format == "nvfp4":  # its two scales are multiplied in float32, in another order
            exact = grad.double() @ w.double()
            assert (got[0].double() - exact).abs().max() <= exact.abs().max() * 2**-7
        else:
            assert_bits(got[0], torch_gpukern.gemm(grad, w))
        assert_bits(got[1], grad.flatten(0, 1).float().sum(0))
    only = "weight_gemm: gradients are those of a 16-bit a and of bias"
    with pytest.raises(NotImplementedError, match=only):
        torch_gpukern.weight_gemm(a, packed, scale, n, format, **more, activation="relu")
    trained = scale.float().requires_grad_()
    with pytest.raises(NotImplementedError, match=only):
        torch_gpukern.weight_gemm(a, packed, trained, n, format, **more, out_dtype=torch.bfloat16)


def test_scales_that_do_not_fit_codes_are_refused(device):
    """registry_quantised.py has the refusals of the ops; this scale is the function's own."""
    q = torch.zeros(64, 128, dtype=torch.int8, device=device)
    for scale, text in (
        (torch.ones(2, 3, device=device), "scale must have shape"),
        (torch.zeros(2, 64, device=device), "scale must be positive and finite"),
    ):
        with pytest.raises(ValueError, match=f"gpukern::pack_weight: {text}"):
            torch_gpukern.pack_weight(q, "int4", scale=scale)


def test_opcheck_and_compile(device):
    gen = generator("compiled")
    q, scale, more = weight(gen, 70, 256, "uint4", 128, device)
    packed = torch_gpukern.pack_weight(q, "uint4")
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.pack_weight.default, (q, "uint4"), test_utils=utils)
    torch.library.opcheck(ops.unpack_weight.default, (packed, 70, 256, "uint4"), test_utils=utils)
    a = randn(gen, 4, 256, dtype=torch.bfloat16).to(device)
    torch.library.opcheck(
        ops.weight_gemm.default, (a, packed, scale, 70, "uint4", more["zero"]), test_utils=utils
    )

    def run(x, activation="none"):
        return torch_gpukern.weight_gemm(
            x, packed, scale, 70, "uint4", **more, activation=activation
        )

    with_gelu = partial(run, activation="gelu")
    compiled = torch.compile(with_gelu, fullgraph=True, dynamic=True)
    for m in (3, 5, 130):
        x = randn(gen, m, 256, dtype=torch.bfloat16).to(device)
        assert_bits(compiled(x), with_gelu(x))
    x = randn(gen, 130, 256, dtype=torch.bfloat16).to(device).requires_grad_()
    calls = (torch.compile(run, fullgraph=True), run)
    assert_bits(*(torch.autograd.grad(call(x).sum(), x)[0] for call in calls))


def test_row_scales_of_more_than_two_dimensions(device):
    """Row scales of quantize for [..., M, K] fit weight_gemm."""
    gen = generator("rows of e4m3")
    q = torch.randint(-8, 8, (70, 100), generator=gen, dtype=torch.int8).to(device)
    packed, scale = (
        torch_gpukern.pack_weight(q, "int4"),
        torch.rand(1, 70, generator=gen).to(device) + 0.5,
    )
    a, scale_a = torch_gpukern.quantize(
        randn(gen, 2, 3, 5, 100, device=device) + 1, torch.float8_e4m3fn, "row"
    )
    flat = torch_gpukern.weight_gemm(
        a.flatten(0, 2), packed, scale, 70, "int4", scale_a=scale_a.flatten(0, 2)
    )
    for given in (scale_a, torch.stack([scale_a, scale_a], -1)[..., 0], scale_a.flatten(0, 2)):
        got = torch_gpukern.weight_gemm(a, packed, scale, 70, "int4", scale_a=given)
        assert_bits(got, flat.view(2, 3, 5, 70))
    exact = (a.double() * scale_a.double()) @ (q.double() * scale.double().mT).mT
    torch.testing.assert_close(flat.double(), exact.flatten(0, 2), rtol=2**-7, atol=1e-3)
    with pytest.raises(ValueError, match="weight_gemm: scale_a"):
        torch_gpukern.weight_gemm(a, packed, scale, 70, "int4", scale_a=scale_a[:, :2])
    with pytest.raises(
        ValueError, match="pack_weight: scale must be of a floating dtype, got int32"
    ):
        torch_gpukern.pack_weight(q, "int4", scale=scale.int() + 1)


def test_autocast_takes_a_float32_stream(device):
    gen = generator("weight_gemm autocast")
    q = torch.randint(-8, 8, (20, 32), generator=gen, dtype=torch.int8).to(device)
    packed, scale = (
        torch_gpukern.pack_weight(q, "int4"),
        torch.rand(1, 20, generator=gen).to(device) + 0.5,
    )
    a = randn(gen, 3, 32, device=device).requires_grad_()
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        got = torch_gpukern.weight_gemm(a, packed, scale, 20, "int4", bias=scale[0])
        half = torch_gpukern.weight_gemm(a.detach().half(), packed, scale, 20, "int4")
    want = torch_gpukern.weight_gemm(
        a.detach().bfloat16(), packed, scale, 20, "int4", bias=scale[0]
    )
    assert_bits(got.detach(), want)
    assert half.dtype is torch.float16
    got.float().sum().backward()
    assert a.grad.dtype is torch.float32 and a.grad.count_nonzero()


def test_scales_of_codes_whose_product_float32_does_not_hold():
    """a in e4m3: a group's sum is multiplied by its own scale and a's row scale, both 1e30. Zero
    codes must give 0."""
    q = torch.zeros(8, 128, dtype=torch.int8)
    packed = torch_gpukern.pack_weight(q, "int8")
    a = torch.zeros(3, 128).to(torch.float8_e4m3fn)
    scale = torch.full((1, 8), 1e30)
    got = torch_gpukern.weight_gemm(a, packed, scale, 8, "int8", scale_a=torch.full((3, 1), 1e30))
    assert got.eq(0).all()
