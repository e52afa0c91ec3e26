# SPDX-License-Identifier: BSD-3-Clause
"""weight_gemm with offs: each group of rows times its own packed weight, against float64."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from conftest import ACTIVATIONS, assert_bits, generator, ops, randn, reference, torch_gpukern
from test_weight_gemm import FORMATS, GROUPS, weight

from torch_gpukern.reference import quantised as reference_quantised

HALVES = (torch.bfloat16, torch.float16)

# The ends of groups and M: empty groups in every place, groups of one row, groups on both sides of
# each tile of rows, no rows at all, one group, and rows of no group.
ENDS = (
    ((0, 3, 3, 11, 28, 28), 28),
    ((1, 2, 3, 4, 5, 6), 9),
    ((0, 0, 130, 130, 259, 300), 305),
    ((33, 33, 33, 33, 33, 33), 40),
    ((0, 0, 0, 0, 0, 0), 5),
    ((64, 128, 129, 193, 257, 257), 257),
    ((70,), 70),
    ((5,), 12),
)


def offs(ends, device):
    return torch.tensor(ends, dtype=torch.int32, device=device)


def beside(parts, rows):
    """Tensors [.., n] of the groups, each filled up to `rows` columns: floating ones with NaN, since
    the rows of a weight that fill a tile must not count."""
    eight = parts[0].dtype.itemsize == 1
    filler = 0x7F if parts[0].is_floating_point() else 200
    words = [p.view(torch.uint8) if eight else p for p in parts]
    value = filler if eight else float("nan")
    whole = torch.cat([F.pad(p, (0, rows - p.shape[-1]), value=value) for p in words], -1)
    return whole.view(parts[0].dtype)


def weights(gen, groups, n, k, format, group, device, dtype=torch.bfloat16):
    """q [G, N, K], and packed, scale and zero of all groups."""
    rows = -(-n // 64) * 64
    each = [weight(gen, n, k, format, group, "cpu", dtype) for _ in range(groups)]
    q = torch.stack([one[0] for one in each])
    filled = F.pad(q.view(torch.uint8), (0, 0, 0, rows - n), value=7).view(q.dtype)
    packed = torch_gpukern.pack_weight(filled.flatten(0, 1), format)
    scale = beside([one[1] for one in each], rows)
    more = {name: x.to(device) for name, x in each[0][2].items()}
    if format == "uint4":
        more["zero"] = beside([one[2]["zero"] for one in each], rows).to(device)
    return q.to(device), packed.to(device), scale.to(device), more


def exactly(a, q, scale, format, more, ends, bias=None):
    """The products [M, N] in float64 before the activation, and the size of what they add."""
    groups, n, _ = q.shape
    rows = -(-n // 64) * 64
    out, size = (a.new_zeros(a.shape[0], n, dtype=torch.float64) for _ in range(2))
    for g, (low, high) in enumerate(itertools.pairwise((0, *ends))):
        columns = slice(g * rows, g * rows + n)
        own = {name: x[:, columns] if name == "zero" else x for name, x in more.items()}
        w = reference_quantised.decoded(q[g], scale[:, columns], format, **own)
        out[low:high] = a[low:high].double() @ w.mT
        size[low:high] = a[low:high].double().abs() @ w.mT.abs()
        if bias is not None:
            out[low:high] += (bias[g] if bias.dim() == 2 else bias).double()
    return out, size


def check(got, want, size, dtype, activation="none"):
    """Weights may be rounded to a's dtype, sums are float32, and the result is rounded. The slope of
    an activation is at most 1.13."""
    yard = 1.13 * size * (torch.finfo(dtype).eps / 2 + 1e-6)
    want = reference.ACTIVATIONS[activation](want)
    yard = yard + want.abs() * torch.finfo(got.dtype).eps * 0.51 + 1e-30
    assert ((got.double() - want).abs() <= yard * (1 + 2.0**-8)).all()


SHAPES = ((72, 256, 128), (129, 192, 64), (64, 130, None), (200, 96, 32))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("format", FORMATS)
def test_float64(format, dtype, device):
    for (ends, m), (n, k, group) in zip(ENDS, itertools.cycle(SHAPES)):
        gen = generator("groups", format, m, n, k)
        q, packed, scale, more = weights(gen, len(ends), n, k, format, group, device, dtype)
        a = (randn(gen, m, k) + 0.2).to(dtype)
        a[ends[-1] :] = float("nan")
        a = a.to(device)
        for bias, activation, out in (
            (None, "none", None),
            (randn(gen, len(ends), n, dtype=dtype).to(device), "silu", None),
            (randn(gen, n).to(device), "relu", torch.float32),
            (randn(gen, n, len(ends), dtype=dtype).to(device).mT, "gelu", torch.float32),
        ):
            got = torch_gpukern.weight_gemm(
                a,
                packed,
                scale,
                n,
                format,
                **more,
                bias=bias,
                activation=activation,
                out_dtype=out,
                offs=offs(ends, device),
            )
            assert got.shape == (m, n) and got.dtype is (out or dtype)
            assert got[ends[-1] :].eq(0).all()
            last = ends[-1]
            want, size = exactly(a, q, scale, format, more, ends, bias)
            check(got[:last], want[:last], size[:last], dtype, activation)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("format", "group"), GROUPS)
def test_sizes_of_groups(format, group, dtype, device):
    """The forms that Hopper has kernels for, and neighbouring forms. Groups of rows have every size
    around those of tiles."""
    sizes = (1, 7, 8, 9, 0, 16, 17, 31, 33, 64, 65, 127, 129, 0, 3)
    ends = tuple(itertools.accumulate(sizes))
    for n, k in ((336, 1088), (64, 320)) if device == "cuda" else ((136, 320),):
        gen = generator("groups' sizes", n, k)
        q, packed, scale, more = weights(gen, len(ends), n, k, format, group, device, dtype)
        a = randn(gen, ends[-1], k).to(dtype).to(device)
        want, size = exactly(a, q, scale, format, more, ends)
        for out in (None, torch.float32):
            got = torch_gpukern.weight_gemm(
                a, packed, scale, n, format, **more, out_dtype=out, offs=offs(ends, device)
            )
            check(got, want, size, dtype)


@pytest.mark.parametrize("format", FORMATS)
def test_a_one_reads_the_decoded_weight(format, device):
    """Each group reads its own rows, bit for bit, up to the sign of a zero."""
    n, k, groups = 70, 200, 3
    gen = generator("one hot groups", format)
    q, packed, scale, more = weights(gen, groups, n, k, format, 32, device)
    a = torch.eye(k, dtype=torch.bfloat16, device=device).repeat(groups, 1)
    ends = tuple(k * (g + 1) for g in range(groups))
    got = torch_gpukern.weight_gemm(
        a, packed, scale, n, format, **more, offs=offs(ends, device)
    ).view(groups, k, n)
    exact, _ = exactly(a.double(), q, scale, format, more, ends)
    exact = exact.view(groups, k, n)
    if format == "nvfp4":  # its two scales are multiplied in float32, in another order
        eps = torch.finfo(torch.bfloat16).eps
        assert ((got.double() - exact).abs() <= exact.abs() * eps * 0.5001 + 1e-9).all()
    else:
        assert_bits(got + 0, exact.float().bfloat16() + 0)


@pytest.mark.parametrize("format", FORMATS)
def test_activations_of_8_bits(format, device):
    for (ends, m), (n, k, group) in zip(ENDS, itertools.cycle(SHAPES)):
        gen = generator("e4m3 groups", format, m, n, k)
        q, packed, scale, more = weights(gen, len(ends), n, k, format, group, device, torch.float32)
        a = randn(gen, m, k).to(torch.float8_e4m3fn)
        a.view(torch.uint8)[ends[-1] :] = 0x7F
        a = a.to(device)
        bias = randn(gen, len(ends), n).to(device)
        for scale_a in (
            torch.tensor(0.5, device=device),
            torch.rand(m, 1, generator=gen).to(device) + 0.5,
        ):
            how = dict(scale_a=scale_a, bias=bias, offs=offs(ends, device))
            got = torch_gpukern.weight_gemm(
                a, packed, scale, n, format, **more, **how, out_dtype=torch.float32
            )
            want = reference_quantised.weight_gemm(
                a, q, scale, format, **more, **how, out_dtype=torch.float64
            )
            assert got[ends[-1] :].eq(0).all()
            torch.testing.assert_close(
                got.double(), want, rtol=1e-5, atol=1e-5 * float(want.abs().max())
            )


@pytest.mark.parametrize("format", FORMATS)
def test_each_group_is_a_call_of_its_own(format):
    """On the CPU, bit for bit, whatever kernel serves a group, for operands of any strides."""
    n, k, ends = 70, 256, (3, 3, 40, 41, 50, 60)
    gen = generator("own calls", format)
    q, packed, scale, more = weights(gen, len(ends), n, k, format, 64, "cpu")
    wide = torch.cat([packed, packed], 1)[:, : packed.shape[1]]
    a = randn(gen, k, 60, dtype=torch.bfloat16).mT
    for given in (packed, wide):
        got = torch_gpukern.weight_gemm(
            a, given, scale.mT.contiguous().mT, n, format, **more, offs=offs(ends, "cpu")
        )
        for g, (low, high) in enumerate(itertools.pairwise((0, *ends))):
            columns = slice(128 * g, 128 * g + n)
            own = {name: x[:, columns] if name == "zero" else x for name, x in more.items()}
            want = torch_gpukern.weight_gemm(
                a[low:high], packed[2 * g : 2 * g + 2], scale[:, columns], n, format, **own
            )
            assert_bits(got[low:high], want)


def test_activations_strides_and_nothing(device):
    n, k, ends = 48, 128, (2, 9, 20)
    gen = generator("strides of groups")
    q, packed, scale, _ = weights(gen, 3, n, k, "int4", 64, device)
    a = randn(gen, 22, k, dtype=torch.bfloat16).to(device)
    every_other = torch.stack([offs(ends, device), offs((7, 7, 7), device)], 1)[:, 0]
    want = torch_gpukern.weight_gemm(a, packed, scale, n, "int4", offs=offs(ends, device))
    for given in (every_other, offs(ends, device)):
        got = torch_gpukern.weight_gemm(
            a.mT.contiguous().mT, packed, scale.mT.contiguous().mT, n, "int4", offs=given
        )
        assert_bits(got, want)
    plain, size = exactly(a, q, scale, "int4", {}, ends)
    for activation in ACTIVATIONS:
        got = torch_gpukern.weight_gemm(
            a, packed, scale, n, "int4", activation=activation, offs=offs(ends, device)
        )
        check(got[:20], plain[:20], size[:20], torch.bfloat16, activation)
        assert got[20:].eq(0).all()

    def call(a, packed, scale, n, ends):
        return torch_gpukern.weight_gemm(a, packed, scale, n, "int4", offs=offs(ends, device))

    assert call(a[:0], packed, scale, n, (0, 0, 0)).shape == (0, n)
    none = call(a, packed[:0], scale[:, :0], n, ())
    assert none.shape == (22, n) and none.eq(0).all()
    assert call(a, packed[:0], scale[:, :0], 0, ends).shape == (22, 0)
    bias = randn(gen, 3, n, dtype=torch.bfloat16).to(device)
    got = torch_gpukern.weight_gemm(
        a[:, :0], packed[:, :0], scale[:1], n, "int4", bias=bias, offs=offs(ends, device)
    )
    assert_bits(
        got[:20], torch.cat([bias[:1].expand(2, n), bias[1:2].expand(7, n), bias[2:].expand(11, n)])
    )
    assert got[20:].eq(0).all()


@pytest.mark.parametrize("format", FORMATS)
def test_gradients(format, device):
    """The gradient of a is grouped_gemm's with the decoded weights. Rows of no group have none, and
    do not count in that of bias."""
    for n, k, group in ((70, 200, 32), (64, 130, None)):
        gen = generator("gradients of groups", n, k, format)
        q, packed, scale, more = weights(gen, 4, n, k, format, group, device)
        ends = (3, 3, 20, 31)
        a = randn(gen, 33, k, dtype=torch.bfloat16).to(device).requires_grad_()
        grad = randn(gen, 33, n, dtype=torch.bfloat16).to(device)
        grad[31:] = float("nan")
        for shape in ((4, n), (n,)):
            bias = randn(gen, *shape).to(device).requires_grad_()
            out = torch_gpukern.weight_gemm(
                a, packed, scale, n, format, **more, bias=bias, offs=offs(ends, device)
            )
            got = torch.autograd.grad(out, (a, bias), grad)
            want = torch.zeros(33, k, dtype=torch.float64, device=device)
            sums = torch.zeros(4, n, dtype=torch.float64, device=device)
            for g, (low, high) in enumerate(itertools.pairwise((0, *ends))):
                columns = slice(128 * g, 128 * g + n) if n > 64 else slice(64 * g, 64 * g + n)
                own = {name: x[:, columns] if name == "zero" else x for name, x in more.items()}
                w = reference_quantised.decoded(q[g], scale[:, columns], format, **own)
                w = w.float().bfloat16().double()
                want[low:high] = grad[low:high].double() @ w
                sums[g] = grad[low:high].double().sum(0)
            assert got[0][31:].eq(0).all()
            error = (got[0].double() - want).abs().max()
            assert error <= want.abs().max() * 2**-7
            wanted = sums if len(shape) == 2 else sums.sum(0)
            torch.testing.assert_close(got[1].double(), wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(NotImplementedError, match="weight_gemm: gradients are those of"):
        torch_gpukern.weight_gemm(
            a, packed, scale, n, format, **more, activation="relu", offs=offs(ends, device)
        )


@pytest.mark.parametrize("format", ("int4", "int8", "mxfp4"))
def test_batch_invariant_rows(format, device):
    """A row has the same bits in a group of any size, beside any other groups."""
    n, k = 128, 256
    gen = generator("invariant groups", format)
    _, packed, scale, more = weights(gen, 3, n, k, format, 128, device)
    a = randn(gen, 300, k, dtype=torch.bfloat16).to(device)

    def call(rows, ends):
        return torch_gpukern.weight_gemm(
            rows, packed, scale, n, format, **more, offs=offs(ends, device)
        )

    with torch_gpukern.batch_invariant():
        alone = call(a[:1], (0, 1, 1))
        for size in (2, 8, 9, 33, 129, 250):
            got = call(torch.cat([a[50:57], a[:size], a[:5]]), (7, 7 + size, 12 + size))
            assert_bits(got[7:8], alone)


def test_bad_ends(device):
    gen = generator("bad ends")
    _, packed, scale, _ = weights(gen, 3, 5, 32, "int4", 32, device)
    a = torch.ones(8, 32, dtype=torch.bfloat16, device=device)
    for ends, text in (
        ((3, 2, 8), "offs is expected not to decrease from 0 on, got offs\\[1\\] = 2 after 3"),
        ((-1, 2, 8), "offs is expected not to decrease from 0 on, got offs\\[0\\] = -1 after 0"),
        ((3, 4, 9), "offs is expected to end at or before 8, got offs\\[2\\] = 9"),
    ):
        if device == "cuda":
            torch_gpukern.weight_gemm(a, packed, scale, 5, "int4", offs=offs(ends, device))
            torch.cuda.synchronize()
            with pytest.raises(IndexError, match="weight_gemm: offs"):
                torch_gpukern.check_errors()
        else:
            with pytest.raises(IndexError, match="gpukern::weight_gemm: " + text):
                torch_gpukern.weight_gemm(a, packed, scale, 5, "int4", offs=offs(ends, device))


def test_opcheck_compile_autocast_and_explain(device):
    gen = generator("compiled groups")
    n, k, ends = 70, 256, offs((2, 2, 4), device)
    q, packed, scale, more = weights(gen, 3, n, k, "uint4", 128, device)
    bias = randn(gen, 3, n).to(device)
    a = randn(gen, 5, k, dtype=torch.bfloat16).to(device)
    torch.library.opcheck(
        ops.weight_gemm.default,
        (a, packed, scale, n, "uint4", more["zero"], None, None, bias, "none", None, ends),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )

    def run(x, ends, activation="none"):
        return torch_gpukern.weight_gemm(
            x, packed, scale, n, "uint4", **more, bias=bias, activation=activation, offs=ends
        )

    compiled = torch.compile(run, fullgraph=True, dynamic=True)
    for m in (3, 5, 130):
        x = randn(gen, m, k, dtype=torch.bfloat16).to(device)
        until = offs((1, m // 2, m), device)
        assert_bits(compiled(x, until, "gelu"), run(x, until, "gelu"))
    x = randn(gen, 130, k, dtype=torch.bfloat16).to(device).requires_grad_()
    until = offs((40, 41, 129), device)
    calls = (torch.compile(run, fullgraph=True), run)
    assert_bits(*(torch.autograd.grad(call(x, until).sum(), x)[0] for call in calls))

    with torch.autocast(torch.device(device).type, torch.bfloat16):
        got = run(x.detach().float(), until)
    assert_bits(got, run(x.detach(), until))
    batched = torch.vmap(lambda one: run(one, until))(torch.stack([x.detach(), -x.detach()]))
    assert_bits(batched, torch.stack([run(x.detach(), until), run(-x.detach(), until)]))
    found = torch_gpukern.explain("weight_gemm", a, packed, scale, n, "uint4", **more, offs=ends)
    assert found["instance"].startswith("weight_gemm") and found["flops"] == 2 * 5 * n * k
    one, two = (
        torch_gpukern.explain(
            "weight_gemm", a[:m], packed, scale, n, "uint4", **more, offs=ends.clamp(max=m)
        )
        for m in (1, 2)
    )
    each = sum(t.numel() * t.element_size() for t in (packed, scale, more["zero"])) // 3
    assert two["bytes"] - one["bytes"] == each + 2 * (n + k)
