# SPDX-License-Identifier: BSD-3-Clause
"""quantize, silu_mul_quantize, rms_norm_quantize, dequantize: codes and scales bit for bit, and
special cases."""

import itertools
import math

import pytest
import torch
from conftest import assert_bits, generator, ops, randn, reference, torch_gpukern

DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
GRANULARITIES = ("tensor", "row", "1x128", "128x128", "1x32")
SHAPES = [(1, 1), (3, 5), (2, 128), (7, 129), (130, 257), (2, 3, 200), (129, 64), (5, 4096 + 8)]
# several rows per block, segments of a row, rows too long for registers
LARGE_SHAPES = [(4300, 72), (2200, 264), (2, 16384), (2, 16392), (3, 20001), (2, 300, 1152)]
SEVERAL_PASSES = (5000, 1160)  # the grid passes over the tensor several times


def bits(x):
    return x.view(torch.uint8) if x.element_size() == 1 else x


def drawn(shape, dtype, device, seed=0):
    """Values of many sizes with a mean, a few of them large."""
    gen = generator("quantize", *shape, seed)
    x = (
        randn(gen, *shape, dtype=torch.float32)
        * torch.exp2(torch.randint(-4, 5, shape, generator=gen).float())
        + 0.3
    )
    return x.to(dtype).to(device)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_and_scales_are_the_reference_s(dtype, granularity, device):
    shapes = SHAPES + (LARGE_SHAPES if device == "cuda" else [])
    shapes = shapes + [SEVERAL_PASSES] * (device == "cuda" and granularity == "tensor")
    for shape, x_dtype in itertools.product(
        shapes, (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    ):
        if x_dtype is torch.float64 and device == "cuda":
            continue
        x = drawn(shape, x_dtype, device)
        codes, scale = torch_gpukern.quantize(x, dtype, granularity)
        want, want_scale = reference.quantize(x, dtype, granularity)
        assert codes.dtype is dtype and codes.is_contiguous() and scale.is_contiguous()
        assert scale.dtype is want_scale.dtype and scale.shape == want_scale.shape, (
            scale.shape,
            want_scale.shape,
        )
        assert_bits(bits(scale), bits(want_scale))
        assert_bits(bits(codes), bits(want))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_infinities_and_nan(dtype, granularity, device):
    x = drawn((256, 384), torch.float32, device)
    x[:128, :128] = 0  # a block of zeros in every granularity except "tensor"
    x[130, 130], x[200, 300] = float("nan"), float("-inf")
    codes, scale = torch_gpukern.quantize(x, dtype, granularity)
    spread = reference.dequantize(torch.ones_like(codes, dtype=torch.int8), scale)
    rows, cols = {
        "tensor": (256, 384),
        "row": (1, 384),
        "1x128": (1, 128),
        "128x128": (128, 128),
        "1x32": (1, 32),
    }[granularity]
    bad = torch.zeros(256, 384, dtype=torch.bool, device=device)
    for i, j in ((130, 130), (200, 300)):
        i, j = i // rows * rows, j // cols * cols
        bad[i : i + rows, j : j + cols] = True
    assert torch.equal(spread.isnan(), bad)
    if granularity != "tensor":
        assert (codes[:128, :128].float() == 0).all()
        assert spread[:128, :32].isfinite().all() and (spread[:128, :32] > 0).all()
    good = torch_gpukern.dequantize(codes, scale)[~bad]
    step = {torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3, torch.int8: 0.0}[dtype]
    if granularity == "1x128" and dtype is not torch.int8:
        near = x[~bad]
        assert ((good - near).abs() <= step * near.abs() * 1.001 + spread[~bad] * 2.0**-9).all()


def test_an_upper_bound_and_given_scales(device):
    x = drawn((6, 256), torch.bfloat16, device)
    for granularity in GRANULARITIES:
        bound = x.float().abs().median()
        codes, scale = torch_gpukern.quantize(x, torch.float8_e4m3fn, granularity, scale_ub=bound)
        want, want_scale = reference.quantize(x, torch.float8_e4m3fn, granularity, scale_ub=bound)
        assert_bits(bits(codes), bits(want)), assert_bits(bits(scale), bits(want_scale))
        again, _ = torch_gpukern.quantize(
            x, torch.float8_e4m3fn, granularity, scale_ub=float(bound)
        )
        assert_bits(bits(again), bits(want))
        codes, kept = torch_gpukern.quantize(x * 3, torch.int8, granularity, scale=scale)
        assert kept is scale
        assert_bits(codes, reference.quantize(x * 3, torch.int8, granularity, scale=scale)[0])


@pytest.mark.parametrize("exponent", [-148, -126, -100, -61, -59, 59, 61, 100, 127])
def test_scales_near_the_ends_of_float32(exponent, device):
    """x / scale is rounded once, even if 1 / scale is not a normal number. Zeros keep their
    sign."""
    x = (drawn((40, 264), torch.float32, device).double() * 2.0 ** min(exponent, 118)).float()
    x[0, :2] = torch.tensor([-0.0, 0.0])
    scale = torch.full(
        (40, 1), math.ldexp(1.5 if exponent > -148 else 1.0, exponent), device=device
    )
    for dtype in DTYPES:
        codes, _ = torch_gpukern.quantize(x, dtype, "row", scale=scale)
        assert_bits(bits(codes), bits(reference.quantize(x, dtype, "row", scale=scale)[0]))
        codes, made = torch_gpukern.quantize(x, dtype, "row")
        want, want_scale = reference.quantize(x, dtype, "row")
        assert_bits(made, want_scale), assert_bits(bits(codes), bits(want))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_strides_and_leading_dimensions(granularity, device):
    x = drawn((2, 3, 300, 140), torch.bfloat16, device)
    views = [
        x.transpose(-1, -2),
        x.transpose(0, 1),
        x[..., 1:, 3:-1],
        x[:, :, ::2, ::3],
        x[:1].expand(4, 3, 300, 140),
    ]
    # rows of whole vectors, or nearly
    views += [x[..., :136], x[:, 1:, 8:-4, :136].transpose(0, 1)]
    if device == "cuda" and granularity == "tensor":
        views.append(drawn(SEVERAL_PASSES, torch.float16, device)[:, :1152])
    for view in views:
        for got, want in zip(
            torch_gpukern.quantize(view, torch.float8_e4m3fn, granularity),
            reference.quantize(view.contiguous(), torch.float8_e4m3fn, granularity),
            strict=True,
        ):
            assert_bits(bits(got), bits(want))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_silu_mul_and_rms_norm(granularity, device):
    """Values in float32 differ from float64 in the last bits, which may change a code at a tie."""
    shapes = [(5, 384), (2, 130, 257)] + ([(3, 20000), (4500, 136)] if device == "cuda" else [])
    for dtype, x_dtype, shape in itertools.product(DTYPES, (torch.bfloat16, torch.float32), shapes):
        x, other = drawn(shape, x_dtype, device), drawn(shape, x_dtype, device, 1)
        weight = drawn(shape[-1:], torch.float32, device, 2)
        cases = [
            (
                torch_gpukern.silu_mul_quantize(x, other, dtype, granularity),
                reference.silu_mul_quantize(x, other, dtype, granularity),
            ),
            (
                torch_gpukern.rms_norm_quantize(x, weight, other, 1e-5, dtype, granularity),
                reference.rms_norm_quantize(x, weight, other, 1e-5, dtype, granularity),
            ),
            (
                torch_gpukern.rms_norm_quantize(x, None, None, 1e-6, dtype, granularity),
                reference.rms_norm_quantize(x, None, None, 1e-6, dtype, granularity),
            ),
        ]
        for got, want in cases:
            torch.testing.assert_close(got[1].float(), want[1].float(), rtol=1e-5, atol=0)
            moved = bits(got[0]).int() != bits(want[0]).int()
            assert moved.float().mean() < 2e-3 and got[0].dtype is dtype
            a, b = reference.dequantize(got[0], got[1]), reference.dequantize(*want[:2])
            assert (
                (a - b).abs() <= 0.26 * b.abs() + 1.01 * reference.spread(got[1], *shape[-2:])
            ).all()
            if len(want) == 3:
                assert_bits(got[2], want[2])


def test_codes_of_one_dimension_and_empty_ones(device):
    x = drawn((300,), torch.float32, device)
    for granularity in ("tensor", "row", "1x128", "1x32"):
        codes, scale = torch_gpukern.quantize(x, torch.float8_e4m3fn, granularity)
        want, want_scale = reference.quantize(x[None], torch.float8_e4m3fn, granularity)
        (
            assert_bits(bits(codes), bits(want[0])),
            assert_bits(bits(scale).flatten(), bits(want_scale).flatten()),
        )
    for shape, granularity in itertools.product(((0, 5), (5, 0), (0, 0), (2, 0, 3)), GRANULARITIES):
        codes, scale = torch_gpukern.quantize(
            torch.empty(shape, device=device), torch.int8, granularity
        )
        assert codes.shape == shape and (scale.float() == 2.0**-126).all()
        assert torch_gpukern.dequantize(codes, scale).shape == shape


@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize(dtype, device):
    gen = generator("dequantize")
    codes = (
        torch.randint(0, 256, (2, 260, 300), generator=gen, dtype=torch.uint8)
        .view(dtype)
        .to(device)
    )
    for rows, cols in itertools.product((1, 3, 260), (1, 3, 10)):
        scale = torch.exp2(randn(gen, 2, rows, cols)).to(device)
        for out in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            assert_bits(
                torch_gpukern.dequantize(codes, scale, dtype=out).nan_to_num(7),
                reference.dequantize(codes, scale, dtype=out).nan_to_num(7),
            )
        transposed = codes.mT.contiguous().mT, scale.mT.contiguous().mT
        assert_bits(
            torch_gpukern.dequantize(*transposed).nan_to_num(7),
            reference.dequantize(codes, scale).nan_to_num(7),
        )
    for scale in (torch.tensor(0.3, device=device), torch.tensor([0.3], device=device)):
        assert_bits(
            torch_gpukern.dequantize(codes, scale).nan_to_num(7),
            reference.dequantize(codes, scale).nan_to_num(7),
        )


def test_quantize_has_no_gradient(device):
    """registry_quantised.py has what the ops refuse."""
    x = torch.ones(4, 256, device=device, requires_grad=True)
    _, scale = torch_gpukern.quantize(x, torch.float8_e4m3fn, "row")
    with pytest.raises(NotImplementedError, match="quantize"):
        scale.sum().backward()


def test_opcheck_and_compile(device):
    x = drawn((3, 256), torch.bfloat16, device)
    for args in (
        (x, torch.float8_e4m3fn, "1x128"),
        (x, torch.int8, "tensor"),
        (x, torch.float8_e5m2, "1x32"),
    ):
        torch.library.opcheck(
            ops.quantize.default, args, test_utils=("test_schema", "test_faketensor")
        )
    torch.library.opcheck(
        ops.rms_norm_quantize.default,
        (x, None, x.clone(), 1e-6, torch.int8, "row"),
        test_utils=("test_schema", "test_faketensor"),
    )

    for dtype in (torch.int8, torch.float8_e4m3fn):
        given = torch_gpukern.quantize(x, dtype, "row")
        # test_schema multiplies inputs by numbers, which torch cannot do for float8
        tests = ("test_schema",) * (dtype is torch.int8) + (
            "test_autograd_registration",
            "test_faketensor",
            "test_aot_dispatch_dynamic",
        )
        for how in ({}, {"dtype": torch.bfloat16}):  # by the schema's default, and by name
            torch.library.opcheck(ops.dequantize.default, given, how, test_utils=tests)

    def both(x):
        codes, scale = torch_gpukern.quantize(x, torch.float8_e4m3fn, "128x128")
        return torch_gpukern.dequantize(codes, scale)

    compiled = torch.compile(both, fullgraph=True, dynamic=True)
    for rows in (3, 130, 200):
        x = drawn((rows, 200), torch.float32, device)
        assert_bits(compiled(x), both(x))


def test_dequantize_without_a_dtype_is_float32(device):
    codes, scale = (
        torch.ones(4, 8, dtype=torch.int8, device=device),
        torch.full((4, 1), 0.5, device=device),
    )
    assert torch.equal(ops.dequantize(codes, scale), torch.full((4, 8), 0.5, device=device))
    torch.library.opcheck(ops.dequantize.default, (codes, scale))


def test_a_tensor_of_nothing_has_a_scale(device):
    """An empty tensor has a scale, in every dtype that the device takes. (float64, which only the
    CPU takes, has its own code path, which once did not write the scale.)"""
    for dtype in (torch.float32, torch.bfloat16, torch.float16) + (
        (torch.float64,) if device == "cpu" else ()
    ):
        for shape in ((0, 4), (3, 0), (2, 0, 4)):
            codes, scale = torch_gpukern.quantize(
                torch.empty(shape, dtype=dtype, device=device), torch.int8, "tensor"
            )
            assert codes.shape == shape and scale.item() == 2.0**-126


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_float64_beyond_float32(dtype, granularity):
    """A scale beyond float32 becomes its largest value, and codes saturate; scale_ub applies, too.
    Only infinity gives NaN."""
    for big in (1e39, 1e300, 1.79e308):
        x = torch.tensor([[1.0, -big, 0.0, big / 4]], dtype=torch.float64)
        for bound in (None, 10.0):
            codes, scale = torch_gpukern.quantize(x, dtype, granularity, scale_ub=bound)
            want, want_scale = reference.quantize(x, dtype, granularity, scale_ub=bound)
            assert_bits(bits(scale), bits(want_scale))
            assert_bits(bits(codes), bits(want))
            assert scale.double().isfinite().all() and codes.double()[0, 1] < 0
            assert bound is None or scale.double().max() < 1
    assert torch_gpukern.quantize(x * 10, dtype, granularity)[1].isnan().all()


def test_matrices_of_nothing():
    for shape, granularity in itertools.product(((3, 0), (0, 3), (0, 0), (2, 3, 0)), GRANULARITIES):
        for dtype in (torch.float32, torch.float64):
            got = torch_gpukern.quantize(torch.ones(shape, dtype=dtype), torch.int8, granularity)
            want = reference.quantize(torch.ones(shape, dtype=dtype), torch.int8, granularity)
            for a, b in zip(got, want, strict=True):
                assert a.shape == b.shape and a.dtype == b.dtype
                assert_bits(bits(a), bits(b))


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan])
def test_bounds_and_scales_that_are_none(bad):
    """With a scale of 0 every code is the largest one. A negative or NaN scale_ub has no effect."""
    x, f8 = randn(generator("none"), 3, 40), torch.float8_e4m3fn
    for given in (bad, torch.tensor(bad)):
        with pytest.raises(ValueError, match="gpukern::quantize: scale_ub must be"):
            torch_gpukern.quantize(x, f8, "row", scale_ub=given)
        with pytest.raises(ValueError, match="gpukern::silu_mul_quantize: scale_ub must be"):
            torch_gpukern.silu_mul_quantize(x, x, f8, "row", scale_ub=given)
        with pytest.raises(ValueError, match="gpukern::rms_norm_quantize: scale_ub must be"):
            torch_gpukern.rms_norm_quantize(x, scale_ub=given)
    scale = torch.tensor([[1.0], [bad], [1.0]])
    if bad == bad:
        with pytest.raises(ValueError, match="gpukern::quantize: scale must be above 0, got"):
            torch_gpukern.quantize(x, f8, "row", scale=scale)
        with pytest.raises(
            ValueError, match="gpukern::scaled_gemm: out_scale must be above 0, got"
        ):
            one, a = torch.tensor(1.0), x.to(f8)
            torch_gpukern.scaled_gemm(a, a.mT, one, one, out_scale=torch.tensor(bad), out_dtype=f8)
    else:  # what is NaN is shown
        codes, scale = torch_gpukern.quantize(x, f8, "row", scale=scale)
        assert torch_gpukern.dequantize(codes, scale).isnan().any(1).tolist() == [
            False,
            True,
            False,
        ]
