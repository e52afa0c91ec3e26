# SPDX-License-Identifier: BSD-3-Clause
"""grouped_gemm: groups of rows and of k, empty groups, rows of no group, gradients, 8 bits with
scales."""

import itertools

import pytest
import torch
from conftest import ACTIVATIONS, assert_bits, generator, ops, randn, reference, torch_gpukern

E4M3, E5M2, I8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
ENDS = [(), (0,), (5,), (3, 3, 40), (0, 17, 17, 64), (1, 2, 130), (64, 128), (0, 0)]


def offs(ends, device):
    return torch.tensor(ends, dtype=torch.int32, device=device)


def behind(dtype):
    """What rows of no group hold in the tests: it would show in any sum."""
    return float("nan") if dtype.is_floating_point else 127


def powers(gen, shape, device):
    return torch.exp2(torch.randint(-2, 3, shape, generator=gen).float()).to(device)


def whole(gen, shape, dtype, device, most=2):
    return torch.randint(-most, most + 1, shape, generator=gen).float().to(dtype).to(device)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16, E4M3, E5M2, I8))
def test_small_integers_are_exact(dtype, device):
    for ends, (k, n) in itertools.product(ENDS, ((33, 40), (129, 7))):
        gen = generator("grouped", *ends, k)
        m, groups = 130, len(ends)
        eight = dtype.itemsize == 1
        one = torch.ones((), device=device)
        how = dict(out_dtype=torch.float32) | (dict(scale_a=one, scale_b=one) if eight else {})
        a, b = whole(gen, (m, k), dtype, device), whole(gen, (groups, k, n), dtype, device)
        a[(ends or (0,))[-1] :] = behind(dtype)
        for bias in (
            None,
            whole(gen, (n,), torch.float32, device),
            whole(gen, (groups, n), torch.float32, device),
        ):
            got = torch_gpukern.grouped_gemm(a, b, offs(ends, device), bias=bias, **how)
            assert_bits(
                got + 0, reference.grouped_gemm(a, b, offs(ends, device), bias=bias, **how) + 0
            )
            # groups of k: the same ends, along the other dimension
            at, bt = a.mT, whole(gen, (m, n), dtype, device)
            bt[(ends or (0,))[-1] :] = behind(dtype)
            got = torch_gpukern.grouped_gemm(at, bt, offs(ends, device), bias=bias, **how)
            assert got.shape == (groups, k, n)
            assert_bits(
                got + 0, reference.grouped_gemm(at, bt, offs(ends, device), bias=bias, **how) + 0
            )


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_layouts_and_sizes_of_groups(dtype, device):
    """Groups without rows, with one row, and with more than a tile; ends that are no multiples;
    weights stored either way. NaN is in every row of no group and around k."""
    gen = generator("grouped layouts", str(dtype))
    groups_of = (
        (0, 1, 1, 130, 387, 643),
        (256, 512, 520),
        (0, 0, 0, 3),
        (700,),
        (64, 65, 128, 700),
    )
    for ends, (k, n) in itertools.product(groups_of, ((136, 392), (64, 70))):
        m, groups, last = 700, len(ends), ends[-1]
        a, b = whole(gen, (m, k), dtype, device), whole(gen, (groups, k, n), dtype, device)
        bias = whole(gen, (groups, n), torch.float32, device)
        a[last:] = float("nan")
        for weight in (b, b.mT.contiguous().mT):
            for how in (dict(), dict(bias=bias, out_dtype=torch.float32)):
                got = torch_gpukern.grouped_gemm(a, weight, offs(ends, device), **how)
                want = reference.grouped_gemm(a, b, offs(ends, device), **how)
                assert_bits(got + 0, want + 0)
        grad = whole(gen, (m, n), dtype, device)
        grad[last:] = float("nan")
        nan, end = grad.clone(), offs(ends, device)
        for how in (dict(), dict(out_dtype=torch.float32)):
            got = torch_gpukern.grouped_gemm(a.mT, grad, end, **how)
            assert_bits(got + 0, reference.grouped_gemm(a.mT, grad, end, **how) + 0)
        if groups > 1:  # NaN in a group does not reach another
            nan[ends[-2] :] = float("nan")
            got = torch_gpukern.grouped_gemm(a.mT, nan, end)
            assert_bits(got[:-1] + 0, reference.grouped_gemm(a.mT, grad, end)[:-1] + 0)


def test_many_groups(device):
    """So many groups that a lane of the scanning warp has several ends."""
    gen = generator("grouped many")
    for groups in (33, 300, 1025):
        counts = torch.randint(0, 4, (groups,), generator=gen)
        ends = counts.cumsum(0).to(torch.int32).to(device)
        m = int(counts.sum()) + 5
        a, b = (
            whole(gen, (m, 16), torch.bfloat16, device),
            whole(gen, (groups, 16, 8), torch.bfloat16, device),
        )
        assert_bits(
            torch_gpukern.grouped_gemm(a, b, ends) + 0, reference.grouped_gemm(a, b, ends) + 0
        )


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, E4M3, I8))
def test_more_tiles_than_an_accelerator_takes_at_once(dtype, device):
    """Groups of very different sizes, some without rows, in more tiles than a GPU multiplies at once.
    Every row must be there once, also rows of no group."""
    gen = generator("grouped many tiles", str(dtype))
    eight, whole_size = dtype.itemsize == 1, device == "cuda"
    gen_there = torch.Generator(device).manual_seed(1)  # faster than numbers from the CPU

    def drawn(*shape):
        x = torch.randint(-2, 3, shape, generator=gen_there, device=device, dtype=torch.int8)
        return x.to(dtype)

    # groups, end of the last group, rows, n, steps of k: 1 to 2, 2 to 3 and many tiles a cluster;
    # widths of an odd number of 128 columns; many rows of no group. On Hopper k is so long that the
    # last tiles are assigned by their heights.
    cases = (
        (3, 2000, 2000, 4096, 264),
        (8, 3000, 3100, 4096, 104),
        (40, 4000, 4000, 2056, 104),
        (64, 9000, 16000, 1152, 64),
        (20, 10000, 10001, 896, 264),
        (5, 300, 9000, 2048, 104),
    )
    for groups, last, m, n, steps in cases if whole_size else cases[:1]:
        k = (steps - 1) * (128 if eight else 64) + 16
        if not whole_size:
            last, m, n, k = last // 8, m // 8, 264, 64
        counts = torch.rand(groups, generator=gen) ** 4
        counts[groups // 2] = 0
        ends = (counts.cumsum(0) / counts.sum() * last).int()
        ends[-1] = last
        ends = ends.to(device)
        a, b = drawn(m, k), drawn(groups, n, k).mT
        a[last:] = behind(dtype)
        how = dict(out_dtype=torch.float32)
        if eight:
            how |= dict(
                scale_a=powers(gen, (m, 1), device), scale_b=powers(gen, (groups, 1, n), device)
            )
        got = torch_gpukern.grouped_gemm(a, b, ends, **how)
        assert_bits(torch_gpukern.grouped_gemm(a, b, ends, **how), got)
        begin = 0
        for g, end in enumerate(ends.tolist()):
            want = a[begin:end].double() @ b[g].double()
            if eight:
                want = want * how["scale_a"][begin:end] * how["scale_b"][g]
            assert_bits(got[begin:end] + 0, want.float() + 0)
            begin = end
        assert not got[last:].any()


def test_scales_count_over_the_whole_operand(device):
    gen = generator("grouped scales")
    m, k, n, ends = 300, 304, 140, (5, 5, 200, 290)
    a, b = whole(gen, (m, k), E4M3, device), whole(gen, (4, k, n), E4M3, device)
    a[ends[-1] :] = float("nan")
    weights = (b, b.mT.contiguous().mT) if device == "cuda" else (b,)
    for form_a, form_b in itertools.product(
        ((m, 1), (m, 3), (3, 3), (1, 3), (m, 10)), ((1, n), (3, n), (3, 2), (1, 1))
    ):
        scale_a = torch.exp2(torch.randint(-2, 3, form_a, generator=gen).float()).to(device)
        scale_b = torch.exp2(torch.randint(-2, 3, (4, *form_b), generator=gen).float()).to(device)
        how = dict(scale_a=scale_a, scale_b=scale_b, out_dtype=torch.float32)
        want = reference.grouped_gemm(a, b, offs(ends, device), **how)
        for weight in weights:
            assert_bits(torch_gpukern.grouped_gemm(a, weight, offs(ends, device), **how), want)
    scale_a, scale_b = (
        torch.rand(k, 1, generator=gen).to(device),
        torch.rand(1, n, generator=gen).to(device),
    )
    a, bt = whole(gen, (m, k), E4M3, device), whole(gen, (m, n), E4M3, device)
    how = dict(scale_a=scale_a, scale_b=scale_b, out_dtype=torch.float32)
    got = torch_gpukern.grouped_gemm(a.mT, bt, offs(ends, device), **how)
    torch.testing.assert_close(
        got, reference.grouped_gemm(a.mT, bt, offs(ends, device), **how), rtol=1e-6, atol=1e-6
    )


def test_sums_of_one_sign_keep_their_bits(device):
    """8-bit products are added 128 at a time. 13-bit sums over all of K would be off by 7 %."""
    gen = generator("grouped one sign")
    m, k, n, ends = 70, 4096, 136, (30, 70)
    a, b = (torch.rand(s, generator=gen).to(E4M3).to(device) for s in ((m, k), (2, n, k)))
    scale_a, scale_b = (
        torch.rand(m, 1, generator=gen).to(device),
        torch.rand(2, 1, n, generator=gen).to(device),
    )
    blocks_a, blocks_b = (
        torch.rand(m, 32, generator=gen).to(device),
        torch.rand(2, 32, 2, generator=gen).to(device),
    )
    for scales in ((scale_a, scale_b), (blocks_a, blocks_b)):
        for out_dtype, bias in (
            (torch.float32, None),
            (torch.bfloat16, None),
            (torch.float16, scale_b[:, 0].half()),
        ):
            how = dict(zip(("scale_a", "scale_b"), scales, strict=True)) | dict(bias=bias)
            got = torch_gpukern.grouped_gemm(
                a, b.mT, offs(ends, device), out_dtype=out_dtype, **how
            )
            want = reference.grouped_gemm(
                a, b.mT, offs(ends, device), out_dtype=torch.float64, **how
            )
            assert ((got.double() - want).abs() / want).max() <= 1e-3 + torch.finfo(
                out_dtype
            ).eps / 2


# ends of groups of up to 700 rows: none, one, few, more than a tile, and rows of no group
GROUPS = (
    (0, 1, 1, 130, 387, 643),
    (256, 512, 520),
    (0, 0, 0, 3),
    (700,),
    (3, 7, 40, 72, 105),
)


def test_sums_of_int8_are_exact(device):
    """Codes of the whole range, scales of rows, columns and groups, operands of any strides and of
    odd sizes. The sums are integers, so the float32 result is the exact value rounded once."""
    gen = generator("grouped int8")
    for ends, (k, n) in itertools.product(GROUPS, ((144, 392), (640, 70), (33, 129), (1, 1))):
        m, groups, end = 700, len(ends), offs(ends, device)
        a = torch.randint(-128, 128, (m, k), generator=gen).to(I8).to(device)
        b = torch.randint(-128, 128, (groups, k, n), generator=gen).to(I8).to(device)
        scale_a, scale_b = powers(gen, (m, 1), device), powers(gen, (groups, 1, n), device)
        scale_a[ends[-1] :] = float("nan")
        bias = whole(gen, (groups, n), torch.float32, device)
        how = dict(scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=torch.float32)
        want = reference.grouped_gemm(a, b, end, **how)
        wide = torch.zeros(m, 2 * k + 16, dtype=I8, device=device)
        wide[:, 16 : 16 + k] = a
        k_major = b.mT.contiguous().mT
        # K-major weights, N-major ones, and weights in every second row
        every_second = torch.stack((k_major.mT, k_major.mT), 2).flatten(1, 2).mT[..., ::2]
        for weight in (k_major, b, every_second):
            for rows in (a, wide[:, 16 : 16 + k], a.mT.contiguous().mT):
                got = torch_gpukern.grouped_gemm(rows, weight, end, **how)
                assert_bits(got + 0, want + 0)
        # one bias for all groups, one scale for all of an operand
        for one in (dict(bias=bias[0]), dict(scale_a=scale_a[0]), dict(scale_b=scale_b[0, 0, :1])):
            got = torch_gpukern.grouped_gemm(a, k_major, end, **how | one)
            assert_bits(got + 0, reference.grouped_gemm(a, b, end, **how | one) + 0)


@pytest.mark.parametrize("out_dtype", (torch.bfloat16, torch.float16))
def test_results_of_int8_in_16_bits(out_dtype, device):
    """Codes so small that float32 holds every sum, which is then rounded once. With an activation
    the result is within a unit in its last place."""
    gen = generator("grouped int8 16")
    for ends, (k, n) in itertools.product(GROUPS, ((144, 392), (528, 136), (48, 70))):
        m, groups, end = 700, len(ends), offs(ends, device)
        a, b = whole(gen, (m, k), I8, device, 7), whole(gen, (groups, n, k), I8, device, 7).mT
        a[ends[-1] :] = 127
        how = dict(
            scale_a=powers(gen, (m, 1), device) / 64,
            scale_b=powers(gen, (groups, 1, n), device) / 64,
            out_dtype=out_dtype,
        )
        for bias in (None, whole(gen, (groups, n), out_dtype, device)):
            for activation in ("none", "relu"):
                given = how | dict(bias=bias, activation=activation)
                got = torch_gpukern.grouped_gemm(a, b, end, **given)
                assert_bits(got + 0, reference.grouped_gemm(a, b, end, **given) + 0)
            given = how | dict(bias=bias, activation="silu")
            got = torch_gpukern.grouped_gemm(a, b, end, **given).double()
            want = reference.grouped_gemm(a, b, end, **given | dict(out_dtype=torch.float64))
            error = torch.finfo(out_dtype).eps * want.abs() + 1e-6
            assert ((got - want).abs() <= error).all()


def test_long_sums_of_int8(device):
    """Sums of up to 2^31 - 1, of which float32 holds 24 bits: a sum in float32 would lose the small
    terms."""
    m, k, n, ends = 70, 131056, 136, (30, 66)
    a = torch.full((m, k), 127, dtype=I8, device=device)
    b = torch.full((2, n, k), 127, dtype=I8, device=device).mT
    a[:, 0], a[:, 1::2] = 3, 1
    one = torch.ones((), device=device)
    how = dict(scale_a=one, scale_b=one, out_dtype=torch.float32)
    want = reference.grouped_gemm(a[:1], b[:1, :, :1], offs((1,), device), **how)
    got = torch_gpukern.grouped_gemm(a, b, offs(ends, device), **how)
    assert_bits(got, want.expand(m, n) * (torch.arange(m, device=device) < 66).float()[:, None])


def test_scales_of_int8_along_k(device):
    """Blocks of k and powers of two in a byte, and groups of k with scales of rows and columns."""
    gen = generator("grouped int8 blocks")
    m, k, n, ends = 300, 304, 140, (5, 5, 200, 290)
    a, b = whole(gen, (m, k), I8, device), whole(gen, (4, k, n), I8, device)
    a[ends[-1] :] = 127
    how = dict(out_dtype=torch.float32)
    for form_a, form_b in (
        ((m, 3), (3, 2)),
        ((3, 3), (1, n)),
        ((m, 1), (10, n)),
        ((m, 10), (1, 1)),
    ):
        for bytes_ in (False, True):
            scales = powers(gen, form_a, device), powers(gen, (4, *form_b), device)
            given = [s.to(torch.float8_e8m0fnu) for s in scales] if bytes_ else scales
            want = reference.grouped_gemm(
                a, b, offs(ends, device), scale_a=scales[0], scale_b=scales[1], **how
            )
            got = torch_gpukern.grouped_gemm(
                a,
                b.mT.contiguous().mT,
                offs(ends, device),
                scale_a=given[0],
                scale_b=given[1],
                **how,
            )
            assert_bits(got, want)
    at = torch.randint(-128, 128, (m, k), generator=gen).to(I8).to(device).mT
    bt = torch.randint(-128, 128, (m, n), generator=gen).to(I8).to(device)
    how |= dict(scale_a=powers(gen, (k, 1), device), scale_b=powers(gen, (1, n), device))
    got = torch_gpukern.grouped_gemm(at, bt, offs(ends, device), **how)
    assert_bits(got + 0, reference.grouped_gemm(at, bt, offs(ends, device), **how) + 0)


@pytest.mark.parametrize("dtype", (E4M3, E5M2, I8))
@pytest.mark.parametrize("m, n", ((3, 5), (130, 136)))
def test_an_empty_sum_is_0(m, n, dtype, device):
    """A group of no k is 0, or its bias, where scales of rows or columns are NaN or infinite. The
    other groups keep these scales."""
    ends = offs((0, 64, 64, 96), device)
    a, b = (torch.ones(s, device=device).to(dtype) for s in ((m, 100), (100, n)))
    scale_a, scale_b = torch.ones(m, 1, device=device), torch.ones(1, n, device=device)
    scale_a[1], scale_b[0, 2], scale_b[0, 3] = float("nan"), float("nan"), float("inf")
    bias = whole(generator("grouped empty sum"), (4, n), torch.float32, device)
    for given in (None, bias):
        how = dict(scale_a=scale_a, scale_b=scale_b, bias=given, out_dtype=torch.float32)
        got = torch_gpukern.grouped_gemm(a, b, ends, **how)
        for g, k in enumerate((0, 64, 0, 32)):
            if k == 0:
                want = torch.zeros(m, n, device=device)
            else:
                want = k * scale_a * scale_b
            want = want if given is None else want + bias[g]
            assert_bits(got[g] + 0, want + 0)
            assert bool(got[g, 1].isnan().all()) == (k > 0)
        want = reference.grouped_gemm(a, b, ends, **how)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_fast_sums_of_small_integers(device):
    """Sums of at most 2560, which 13 bits hold, in any grouping of k."""
    gen = generator("grouped fast")
    for ends, (k, n) in itertools.product(GROUPS, ((144, 392), (640, 70))):
        m, groups, end = 700, len(ends), offs(ends, device)
        a, b = whole(gen, (m, k), E4M3, device), whole(gen, (groups, n, k), E4M3, device).mT
        a[ends[-1] :] = behind(E4M3)
        how = dict(
            scale_a=powers(gen, (m, 1), device),
            scale_b=powers(gen, (groups, 1, n), device),
            bias=whole(gen, (n,), torch.float32, device),
            out_dtype=torch.float32,
        )
        got = torch_gpukern.grouped_gemm(a, b, end, **how, accumulate="fast")
        assert_bits(got + 0, reference.grouped_gemm(a, b, end, **how) + 0)


def test_what_int8_refuses(device):
    a, b = torch.ones(4, 16, dtype=I8, device=device), torch.ones(1, 16, 8, device=device)
    end, one = torch.tensor([4], dtype=torch.int32, device=device), torch.ones((), device=device)
    how = dict(scale_a=one, scale_b=one)
    with pytest.raises(ValueError, match="b has dtype float8_e4m3fn, a has int8; they must match"):
        torch_gpukern.grouped_gemm(a, b.to(E4M3), end, **how)
    with pytest.raises(ValueError, match="scale_b must be given where a is int8"):
        torch_gpukern.grouped_gemm(a, b.to(I8), end, scale_a=one)
    with pytest.raises(ValueError, match="accumulate must be precise where a is int8, got fast"):
        torch_gpukern.grouped_gemm(a, b.to(I8), end, **how, accumulate="fast")
    with pytest.raises(
        ValueError, match="out_dtype must be bfloat16, float16 or float32, got int8"
    ):
        torch_gpukern.grouped_gemm(a, b.to(I8), end, **how, out_dtype=I8)
    long = torch.ones(1, 131072, dtype=I8, device=device)
    text = "a has 131072 columns; int8 without scales along K takes at most 131071"
    with pytest.raises(ValueError, match=text):
        torch_gpukern.grouped_gemm(long, long.mT[None], end[:1] // 4, **how)
    sums = torch.ones(1, 1024, device=device)
    got = torch_gpukern.grouped_gemm(
        long, long.mT[None], end // 4, scale_a=sums, scale_b=one, out_dtype=torch.float32
    )
    assert got.item() == 131072


def test_each_group_is_a_gemm(device):
    """Each group equals a gemm up to the rounding of the result, because its tiles begin at its
    first row."""
    gen = generator("grouped random")
    ends = (7, 7, 100, 129)
    for dtype, activation in itertools.product((torch.bfloat16, torch.float16), ACTIVATIONS):
        a, b = (
            randn(gen, 129, 200, dtype=dtype).to(device),
            randn(gen, 4, 200, 70, dtype=dtype).to(device),
        )
        bias = randn(gen, 4, 70, dtype=dtype).to(device)
        got = torch_gpukern.grouped_gemm(
            a, b.mT.contiguous().mT, offs(ends, device), bias=bias, activation=activation
        )
        want = reference.grouped_gemm(
            a, b, offs(ends, device), bias=bias, activation=activation, out_dtype=torch.float64
        )
        assert (got.double() - want).abs().max() <= want.abs().max() * torch.finfo(dtype).eps * 0.52


def test_gradients(device):
    gen = generator("grouped gradients")
    ends = offs((5, 5, 30), device)
    for rows in (True, False):
        a = randn(gen, 33, 24).to(device).requires_grad_()
        b = (randn(gen, 3, 24, 16) if rows else randn(gen, 33, 16)).to(device).requires_grad_()
        x = a if rows else a.mT
        out = torch_gpukern.grouped_gemm(x, b, ends)
        grad = randn(gen, *out.shape).to(device)
        got = torch.autograd.grad(out, (a, b), grad)
        aa, bb = a.detach().double().requires_grad_(), b.detach().double().requires_grad_()
        want = torch.autograd.grad(
            reference.grouped_gemm(aa if rows else aa.mT, bb, ends, out_dtype=torch.float64),
            (aa, bb),
            grad.double(),
        )
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g.double(), w, rtol=1e-5, atol=1e-5)
    with pytest.raises(
        NotImplementedError, match="grouped_gemm: gradients are those of a, b and bias"
    ):
        torch_gpukern.grouped_gemm(x, b, ends, activation="silu")


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("rows", (True, False))
def test_gradient_of_bias(rows, dtype, device):
    """The gradient of bias sums a group's rows. Rows after the last end do not count, whatever
    their gradient is."""
    gen = generator("grouped bias", rows)
    ends = (5, 5, 30)
    a, b = (
        whole(gen, (33, 24), dtype, device),
        whole(gen, (3, 24, 16) if rows else (33, 16), dtype, device),
    )
    for shape in ((16,), (3, 16)):
        bias = whole(gen, shape, dtype, device).requires_grad_()
        out = torch_gpukern.grouped_gemm(a if rows else a.mT, b, offs(ends, device), bias=bias)
        grad = whole(gen, out.shape, dtype, device)
        if rows:
            sums = torch.stack(
                [grad[lo:hi].float().sum(0) for lo, hi in itertools.pairwise((0, *ends))]
            )
            grad[ends[-1] :] = float("nan")
        else:
            sums = grad.float().sum(1)
        want = (sums if len(shape) == 2 else sums.sum(0)).to(dtype)
        assert_bits(torch.autograd.grad(out, bias, grad)[0], want)


def test_bad_ends(device):
    a, b = torch.ones(8, 4, device=device), torch.ones(3, 4, 2, device=device)
    for ends, text in [
        ((3, 2, 8), "offs is expected not to decrease from 0 on, got offs\\[1\\] = 2 after 3"),
        ((-1, 2, 8), "offs is expected not to decrease from 0 on, got offs\\[0\\] = -1 after 0"),
        ((3, 4, 9), "offs is expected to end at or before 8, got offs\\[2\\] = 9"),
    ]:
        if device == "cuda":
            torch_gpukern.grouped_gemm(a, b, offs(ends, device))
            torch.cuda.synchronize()
            with pytest.raises(IndexError, match="grouped_gemm and weight_gemm: offs"):
                torch_gpukern.check_errors()
        else:
            with pytest.raises(IndexError, match="gpukern::grouped_gemm: " + text):
                torch_gpukern.grouped_gemm(a, b, offs(ends, device))


def test_opcheck_and_compile(device):
    gen = generator("grouped compiled")
    a, b, e = (
        randn(gen, 20, 16).to(device),
        randn(gen, 3, 16, 8).to(device),
        offs((4, 4, 15), device),
    )
    torch.library.opcheck(
        ops.grouped_gemm.default,
        (a, b, e),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )
    compiled = torch.compile(
        lambda a: torch_gpukern.grouped_gemm(a, b, e), fullgraph=True, dynamic=True
    )
    for m in (15, 30, 130):
        a = randn(gen, m, 16).to(device)
        assert_bits(compiled(a), torch_gpukern.grouped_gemm(a, b, e))


@pytest.mark.skipif(
    not ops.cuda_kernels.default(), reason="the library is built without CUDA kernels"
)
@pytest.mark.parametrize("dtype, name", ((torch.bfloat16, "bf16"), (torch.float16, "f16")))
def test_kernels_of_gpus_without_wgmma(dtype, name):
    def row(a, b):
        return torch_gpukern.explain(
            "grouped_gemm", a, b, torch.zeros(3, dtype=torch.int32), arch="sm_80"
        )["instance"]

    a, b, x = (
        torch.empty(64, 256, dtype=dtype),
        torch.empty(3, 256, 128, dtype=dtype),
        torch.empty(64, 128, dtype=dtype),
    )
    assert row(a, b) == f"grouped_gemm_sm80_{name}_128x128_n"
    assert row(a, b.mT.contiguous().mT) == f"grouped_gemm_sm80_{name}_128x128"
    assert row(a.mT, x) == f"grouped_gemm_sm80_{name}_128x128_k"
    assert row(a[:, 1:], b[:, 1:]) == f"grouped_gemm_sm80_any_{name}_128x128"
    assert row(a.mT.contiguous(), x) == f"grouped_gemm_sm80_any_{name}_128x128_k"


@pytest.mark.skipif(
    not ops.cuda_kernels.default(), reason="the library is built without CUDA kernels"
)
def test_kernels_of_8_bits():
    one = torch.ones(())

    def row(a, b, arch, scale=one, **more):
        ends = torch.zeros(3, dtype=torch.int32)
        how = dict(scale_a=scale, scale_b=one, arch=arch) | more
        return torch_gpukern.explain("grouped_gemm", a, b, ends, **how)["instance"]

    a, b = torch.empty(64, 256, dtype=I8), torch.empty(3, 128, 256, dtype=I8).mT
    blocks = torch.ones(64, 2)
    assert row(a, b, "sm_90") == "grouped_gemm_int8_sm90a_256x128"
    assert row(a, b, "sm_80") == "grouped_gemm_sm80_i8_128x128"
    for arch in ("sm_80", "sm_90"):  # N-major, no whole 16 bytes a row, scales along k, groups of k
        assert row(a, b.contiguous(), arch) == "grouped_gemm_plain_i8"
        assert row(a[:, 1:], b[:, 1:], arch) == "grouped_gemm_plain_i8"
        assert row(a, b, arch, blocks) == "grouped_gemm_plain_i8"
        assert row(a, b[0], arch) == "grouped_gemm_plain_i8"
    a, b = a.to(E4M3), b.to(E4M3)
    name = "grouped_gemm_fp8_sm90a_e4m3"
    assert row(a, b, "sm_90") == f"{name}_256x128"
    assert row(a, b, "sm_90", blocks) == f"{name}_block_256x128"
    assert row(a, b, "sm_90", accumulate="fast") == f"{name}_fast_256x128"


def test_fast_sums_are_of_one_scale_along_k(device):
    a, b = (
        torch.ones(shape, device=device).to(torch.float8_e4m3fn)
        for shape in ((4, 256), (1, 256, 8))
    )
    offs, one = torch.tensor([4], dtype=torch.int32, device=device), torch.ones((), device=device)
    blocks = torch.ones(4, 2, device=device)
    for scale_a, scale_b in ((blocks, one), (one, blocks[None, :2, :1])):
        with pytest.raises(
            ValueError,
            match="grouped_gemm: accumulate must be precise with scales along K, got fast",
        ):
            torch_gpukern.grouped_gemm(
                a, b, offs, scale_a=scale_a, scale_b=scale_b, accumulate="fast"
            )
    got = torch_gpukern.grouped_gemm(
        a, b, offs, scale_a=blocks[:, :1], scale_b=one, accumulate="fast"
    )
    assert got.float().eq(256).all()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        with pytest.raises(
            ValueError,
            match=f"grouped_gemm: accumulate must be precise where a is {str(dtype)[6:]}, got fast",
        ):
            torch_gpukern.grouped_gemm(a.to(dtype), b.to(dtype), offs, accumulate="fast")
