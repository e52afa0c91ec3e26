# SPDX-License-Identifier: BSD-3-Clause
"""Operations along the last dimension: norms, softmax, gated units, rotary embedding, cross
entropy.

Results are compared with the definition in float64. A kernel's error is at most twice that of
PyTorch's own op in the same dtype on the same inputs, plus one rounding of the result if the two
round differently.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import Exact, generator, randn, run_python, same_bits
from torch.autograd import gradcheck

import torch_gpukern as gk

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
UNIT = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float64: 2**-53}
# for every group of threads of the CUDA kernels and the CPU's block sums; whole vectors and others
COLUMNS = (
    1,
    2,
    7,
    8,
    64,
    100,
    128,
    257,
    1000,
    1024,
    2048,
    2056,
    4096,
    8192,
    12288,
    16384,
    24576,
    65536,
    65544,
)


def close(got, ours, theirs, exact, size):
    """|ours - exact| at most twice |theirs - exact|, by the largest error of the tensor. size: of the terms that it is a sum of."""  # noqa: E501
    scale = exact.abs().max().clamp(min=size)
    error, allowed = (ours.double() - exact).abs().max(), 2 * (theirs.double() - exact).abs().max()
    slack = 64 if ours.dtype == torch.float64 else 2  # a plain loop: its sums are not blocked
    assert error <= allowed + slack * UNIT[ours.dtype] * scale, (
        f"{got}: {error:.3g}, allowed {allowed:.3g}"
    )


def judged(ours, theirs, inputs, size=1e-30):
    """Compares results and gradients of `ours` and `theirs`, both functions of `inputs`. The exact
    values are those of `theirs` in float64."""

    def run(fn, dtype=None):
        leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs]
        results = fn(*leaves)
        results = results if isinstance(results, tuple) else (results,)
        gen = generator("rows", "gradient")
        grads = (
            [randn(gen, *r.shape, dtype=r.dtype, device=r.device) for r in results]
            if dtype is None
            else given
        )
        return (
            [r.detach() for r in results],
            torch.autograd.grad(results, leaves, [g.to(r.dtype) for g, r in zip(grads, results)]),
            grads,
        )

    out, grad, given = run(ours)
    out_t, grad_t, _ = run(theirs)
    with Exact():
        out_e, grad_e, _ = run(theirs, torch.float64)
    for i, (x, y, z) in enumerate(zip(out, out_t, out_e, strict=True)):
        close(f"result {i}", x, y, z, size)
    for i, (x, y, z) in enumerate(zip(grad, grad_t, grad_e, strict=True)):
        close(f"gradient {i}", x, y, z, size)
    return out


def rms_statement(x, weight, residual, bias):
    return F.rms_norm(x + residual, x.shape[-1:], weight + 1, 1e-5) + bias, x + residual


def layer_statement(x, weight, residual, bias):
    return F.layer_norm(x + residual, x.shape[-1:], weight, bias, 1e-5), x + residual


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", COLUMNS)
def test_norms(n, dtype, device):
    if dtype == torch.float64 and n > 5000:
        pytest.skip("a loop for each row")
    rows = max(1, min(67, 200_000 // n))
    gen = generator("norms", n, str(dtype))
    x, w = (
        randn(gen, rows, n, dtype=dtype, device=device),
        randn(gen, n, dtype=dtype, device=device),
    )
    size = 1e-30
    # xhat is near 1 or -1, and dx is a difference of equal numbers times rstd
    if n <= 2:
        squares = (
            (x.double() - (x.double().mean(-1, keepdim=True) if n == 2 else 0)).square().mean(-1)
        )
        # gradients are up to 3
        terms = 3 * x.abs().amax(-1).clamp(min=w.abs().max().item()) * (squares + 1e-5).rsqrt()
        size = max(terms.max().item(), rows**0.5)
    judged(
        lambda x, w: gk.rms_norm(x, w, eps=1e-5),
        lambda x, w: F.rms_norm(x, (n,), w, 1e-5),
        (x, w),
        size,
    )
    judged(
        lambda x: gk.rms_norm(x, eps=1e-5), lambda x: F.rms_norm(x, (n,), None, 1e-5), (x,), size
    )
    if n == 1:  # the variance is 0, and the gradient a difference of equal numbers
        assert torch.equal(gk.layer_norm(x, w, 2 * w), (2 * w).expand(rows, 1))
        return
    b = randn(gen, n, dtype=dtype, device=device)
    judged(
        lambda x, w, b: gk.layer_norm(x, w, b),
        lambda x, w, b: F.layer_norm(x, (n,), w, b),
        (x, w, b),
        size,
    )


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_norms_without_eps_where_squares_underflow(dtype):
    """inf and NaN are where PyTorch has them. In a layer norm of subnormal numbers it may be
    either, since it depends on the order of sums."""
    smallest = {
        torch.float32: (0.0, 1e-42, 1e-30, 1e-20),
        torch.float64: (0.0, 1e-320, 1e-200, 1e-150),
    }[dtype]
    for size in smallest:
        for pattern in (
            torch.arange(1, 9, dtype=torch.float64) / 4,
            torch.ones(8, dtype=torch.float64),
        ):
            x = (pattern * size).to(dtype)[None]
            torch.testing.assert_close(
                gk.rms_norm(x, eps=0.0), F.rms_norm(x, (8,), None, 0.0), equal_nan=True
            )
            ours, theirs = gk.layer_norm(x, eps=0.0), F.layer_norm(x, (8,), None, None, 0.0)
            assert torch.equal(ours.isfinite(), theirs.isfinite())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", (8, 96, 1000, 4096))
def test_norms_of_a_sum(n, dtype, device):
    gen = generator("norm of a sum", n, str(dtype))
    x, r = (randn(gen, 3, 5, n, dtype=dtype, device=device) for _ in range(2))
    w, b = (randn(gen, n, dtype=dtype, device=device) for _ in range(2))
    ours = lambda x, w, r, b: gk.rms_norm(x, w, residual=r, bias=b, eps=1e-5, weight_offset=1.0)  # noqa: E731
    _, h = judged(ours, rms_statement, (x, w, r, b))
    assert same_bits(h, x + r)
    judged(lambda x, w, r, b: gk.layer_norm(x, w, b, residual=r), layer_statement, (x, w, r, b))


@pytest.mark.parametrize("name", ("rms_norm", "layer_norm"))
def test_norm_of_16_bits_with_float32_weights(name, device):
    gen = generator("wide", name)
    x = randn(gen, 40, 256, dtype=torch.bfloat16, device=device).requires_grad_()
    w, b = (randn(gen, 256, device=device).requires_grad_() for _ in range(2))
    out = getattr(gk, name)(x, w, bias=b)
    want = getattr(gk, name)(x.float(), w, bias=b)
    assert out.dtype == torch.bfloat16 and same_bits(out, want.to(torch.bfloat16))
    grads = torch.autograd.grad(out, (x, w, b), torch.ones_like(out))
    assert [g.dtype for g in grads] == [torch.bfloat16, torch.float32, torch.float32]


@pytest.mark.parametrize("weight", (None, "16 bits", "float32"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("name", ("rms_norm", "layer_norm"))
def test_gradient_of_a_float32_bias_is_not_rounded_to_16_bits(name, dtype, weight, device):
    """The gradient's sum over two rows is 1 + 2^-12, which 16 bits cannot represent. It must be
    exact, with any weight."""
    x = torch.randn(2, 24, device=device).to(dtype).requires_grad_()
    bias = torch.zeros(24, device=device, requires_grad=True)
    w = (
        None
        if weight is None
        else torch.ones(24, device=device, dtype=dtype if weight == "16 bits" else torch.float32)
    )
    grad = torch.tensor([[1.0], [2.0**-12]], device=device).expand(2, 24).to(dtype)
    for given in (w, None if w is None else w.requires_grad_()):
        (got,) = torch.autograd.grad(getattr(gk, name)(x, given, bias=bias), bias, grad)
        assert got.dtype is torch.float32 and (got == 1 + 2.0**-12).all()
    half = bias.detach().to(dtype).requires_grad_()
    (got,) = torch.autograd.grad(getattr(gk, name)(x, w, bias=half), half, grad)
    assert got.dtype is dtype and (got == 1).all()


def test_norm_of_a_large_mean(device):
    """The variance is that of differences to the mean, so a mean of 1000 costs no precision."""
    gen = generator("mean")
    x = randn(gen, 50, 3000, device=device) + 1000
    judged(lambda x: gk.layer_norm(x), lambda x: F.layer_norm(x, (3000,)), (x,))


@pytest.mark.parametrize("n", COLUMNS)
def test_layer_norm_of_equal_values(n):
    """The mean of equal values has their bits, at every length. An error would be divided by the
    root of eps."""
    gen = generator("equal", n)
    x = (1000 * randn(gen, 9, 1)).repeat(1, n).requires_grad_()
    w = torch.ones(n, requires_grad=True)
    for values in (x, x.detach().bfloat16(), torch.full((1, n), 3e38)):
        assert (gk.layer_norm(values, w) == 0).all()
    grad = randn(gen, 9, n)
    dx, dw = torch.autograd.grad(gk.layer_norm(x, w), (x, w), grad)
    assert (dw == 0).all()
    want = (grad.double() - grad.double().mean(-1, keepdim=True)) * 1e-5**-0.5
    torch.testing.assert_close(dx.double(), want, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("n", (40, 4096, 65536))
def test_layer_norm_of_values_far_from_the_mean(n, dtype, device):
    """A kernel sums squares about the mean of a row's first values, which here are far from the
    others."""
    gen = generator("far", n, str(dtype))
    for first, many in ((1.0, 1), (8.0, 1), (200.0, 1), (200.0, 8), (-3000.0, 40)):
        x, w, b = (randn(gen, *shape, device=device) for shape in ((6, n), (n,), (n,)))
        x[:, : min(many, n)] *= first
        x[3:] += 30
        leaves = [t.to(dtype) for t in (x, w, b)]
        judged(
            lambda x, w, b: gk.layer_norm(x, w, b),
            lambda x, w, b: F.layer_norm(x, (n,), w, b),
            leaves,
        )


MANY_ROWS = (
    (4300, 520),
    (4300, 1024),
    (2200, 2040),
    (2200, 4096),
    (1100, 8192),
    (600, 16384),
    (300, 20000),
    (270, 65536),
    (270, 65544),
)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("rows, n", MANY_ROWS)
def test_norms_of_many_rows(rows, n, dtype):
    """On Hopper, the gradients of many rows are computed through a ring, whose stages come round
    several times. The first values are far from the row's mean, as above."""
    gen = generator("many rows", n, str(dtype))
    x, w, b = (randn(gen, *s, dtype=dtype, device="cuda") for s in ((rows, n), (n,), (n,)))
    x[::3, :8] *= 20
    x[1::3] += 3
    judged(
        lambda x, w: gk.rms_norm(x, w, eps=1e-5),
        lambda x, w: F.rms_norm(x, (n,), w, 1e-5),
        (x, w),
    )
    judged(
        lambda x, w, b: gk.layer_norm(x, w, b),
        lambda x, w, b: F.layer_norm(x, (n,), w, b),
        (x, w, b),
    )
    leaves = [t.requires_grad_() for t in (x, w, b)]
    grad = randn(gen, rows, n, dtype=dtype, device="cuda")
    once, twice = (torch.autograd.grad(gk.layer_norm(*leaves), leaves, grad) for _ in range(2))
    assert all(map(same_bits, once, twice))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("n", (1032, 2048, 4096, 8192, 12808, 16384))
def test_layer_norm_of_many_rows_far_from_the_mean(n, dtype):
    """More rows than the kernel for decoding takes; the first values are far from the others."""
    gen = generator("many rows far", n, str(dtype))
    x, w, b = (randn(gen, *shape, device="cuda") for shape in ((530, n), (n,), (n,)))
    x[::2, :1] = 200
    x[::5, :8] *= 30
    x[1::7, :40] = -100
    x[100:] += 30
    leaves = [t.to(dtype) for t in (x, w, b)]
    judged(
        lambda x, w, b: gk.layer_norm(x, w, b), lambda x, w, b: F.layer_norm(x, (n,), w, b), leaves
    )
    judged(lambda x: gk.layer_norm(x), lambda x: F.layer_norm(x, (n,)), leaves[:1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("n", (1032, 4096, 16384))
def test_norms_of_many_rows_equal_or_no_numbers(n, dtype):
    gen = generator("many rows equal", n, str(dtype))
    equal = (1000 * randn(gen, 530, 1, device="cuda")).to(dtype).expand(530, n)
    assert (gk.layer_norm(equal.contiguous()) == 0).all()
    x, w = randn(gen, 530, n, dtype=dtype, device="cuda"), randn(gen, n, dtype=dtype, device="cuda")
    wild = x.clone()
    wild[3, n - 1], wild[500, 0], wild[501, 77] = torch.nan, torch.inf, -torch.inf
    others = torch.ones(530, dtype=torch.bool, device="cuda")
    others[[3, 500, 501]] = False
    for fn, theirs in (
        (lambda x: gk.layer_norm(x, w), lambda x: F.layer_norm(x, (n,), w)),
        (lambda x: gk.rms_norm(x, w, eps=1e-5), lambda x: F.rms_norm(x, (n,), w, 1e-5)),
    ):
        assert same_bits(fn(wild)[others], fn(x)[others])
        assert torch.equal(fn(wild)[~others].isnan(), theirs(wild)[~others].isnan())
        # rows that lie apart
        wide = torch.zeros(530, n + 8, dtype=dtype, device="cuda")
        wide[:, :n] = x
        assert same_bits(fn(wide[:, :n]), fn(x))


def test_gradients_of_weights_of_numbers_of_one_sign(device):
    """Sums over rows are float32; bfloat16 sums would stop growing at 256."""
    x = torch.rand(5000, 64, device=device).bfloat16() + 1
    w, b = (torch.ones(64, device=device, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    gk.layer_norm(x, w, b).sum().backward()
    assert (b.grad == 5000 // 32 * 32).all()  # 4992 is the bfloat16 next to it


@pytest.mark.parametrize("fn", (gk.rms_norm, gk.layer_norm), ids=("rms", "layer"))
def test_norm_gradients_repeat(fn, device):
    gen = generator("repeat")
    x, w = randn(gen, 3000, 512, device=device), randn(gen, 512, device=device)

    def grads(rows):
        leaves = [y.clone().requires_grad_() for y in (x[:rows], w)]
        fn(*leaves).square().sum().backward()
        return [y.grad for y in leaves]

    first = grads(3000)
    assert all(map(same_bits, first, grads(3000)))
    assert same_bits(first[0][:100], grads(100)[0])  # a row does not depend on its batch


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", COLUMNS)
def test_softmax(n, dtype, device):
    if dtype == torch.float64 and n > 5000:
        pytest.skip("a loop for each row")
    rows = max(1, min(67, 200_000 // n))
    gen = generator("softmax", n, str(dtype))
    x = 3 * randn(gen, rows, n, dtype=dtype, device=device)
    size = 1.0 if n <= 2 else 1e-30  # there gradients are differences of equal numbers
    judged(lambda x: gk.softmax(x, scale=0.7), lambda x: F.softmax(0.7 * x, -1), (x,), size)
    judged(lambda x: gk.log_softmax(x), lambda x: F.log_softmax(x, -1), (x,), size)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize(
    "rows, n",
    (
        (600, 4104),
        (600, 8192),
        (600, 16384),
        (500, 20000),
        (300, 50264),
        (200, 131072),
        (120, 202048),
    ),
)
def test_softmax_of_many_rows(rows, n, dtype):
    """On Hopper, many long rows pass through a ring, whose stages come round several times."""
    gen = generator("softmax of many rows", n, str(dtype))
    x = 3 * randn(gen, rows, n, dtype=dtype, device="cuda")
    judged(lambda x: gk.softmax(x, scale=0.7), lambda x: F.softmax(0.7 * x, -1), (x,))
    judged(lambda x: gk.log_softmax(x), lambda x: F.log_softmax(x, -1), (x,))
    x[0, 3] = math.nan
    x[1, 5] = math.inf
    x[2, 1:] = -math.inf
    x[3] = -math.inf
    torch.testing.assert_close(
        gk.softmax(x[:4].repeat(rows // 4, 1)).float(),
        F.softmax(x[:4].repeat(rows // 4, 1).float(), -1),
        rtol=0,
        atol=1e-2,
        equal_nan=True,
    )


@pytest.mark.parametrize("n", (5, 64, 1000, 4096, 30000))
def test_softmax_of_lengths(n, device):
    """Columns from the row's length on are not read and have no gradient."""
    gen = generator("lengths", n)
    x = randn(gen, 2, 3, n, device=device)
    lengths = torch.tensor([[n, 0, 1], [n // 2, -4, n + 9]], dtype=torch.int32, device=device)
    seen = torch.arange(n, device=device) < lengths[..., None]
    poisoned = x.masked_fill(~seen, math.nan).requires_grad_()
    out = gk.softmax(poisoned, lengths=lengths)
    want = F.softmax(x.double().masked_fill(~seen, -math.inf), -1).nan_to_num(0)
    assert (out - want).abs().max() < 1e-6 and (out[~seen] == 0).all()
    (grad,) = torch.autograd.grad(out, poisoned, torch.randn_like(out).masked_fill(~seen, math.nan))
    assert grad.isfinite().all() and (grad[~seen] == 0).all()


@pytest.mark.parametrize("n", (5, 640, 4096, 70000))
@pytest.mark.parametrize(
    "fn,torch_fn", [(gk.softmax, F.softmax), (gk.log_softmax, F.log_softmax)], ids=("plain", "log")
)
def test_softmax_of_rows_that_are_no_numbers(fn, torch_fn, n, device):
    x = torch.zeros(6, n, device=device)
    x[0], x[1, n // 2], x[2, 0] = -math.inf, math.nan, math.inf
    x[3, : n - 1], x[4, n - 1] = -math.inf, -math.inf
    got, want = fn(x), torch_fn(x, -1)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.allclose(got, want, rtol=1e-6, equal_nan=True)


def test_rows_that_are_no_numbers_leave_the_others_alone(device):
    gen = generator("no numbers")
    x, w = randn(gen, 5, 320, device=device), randn(gen, 320, device=device)
    bad = x.clone()
    bad[1, 3], bad[2, 5], bad[3] = math.nan, math.inf, 1e30
    for fn in (lambda x: gk.rms_norm(x, w), lambda x: gk.layer_norm(x, w)):
        got, want = fn(bad), fn(x)
        assert same_bits(got[[0, 4]], want[[0, 4]]) and got[[1, 2]].isnan().any(-1).all()


def glu_statement(activation):
    return lambda gate, up: activation(gate) * up


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", (1, 7, 64, 1000, 40000))
def test_gated_units(n, dtype, device):
    gen = generator("glu", n, str(dtype))
    gate, up = (2 * randn(gen, 3, 5, n, dtype=dtype, device=device) for _ in range(2))
    both = torch.cat((gate, up), -1)
    # torch rounds the activation, too
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def statement(activation):
        return lambda g, u: (activation(g.to(torch.promote_types(g.dtype, wide))) * u).to(g.dtype)

    for ours, activation in (
        (gk.swiglu, F.silu),
        (gk.geglu, F.gelu),
        (
            lambda g, u=None: gk.geglu(g, u, approximate="tanh"),
            lambda x: F.gelu(x, approximate="tanh"),
        ),
    ):
        (out,) = judged(ours, statement(activation), (gate, up))
        assert same_bits(ours(both), out)
        judged(ours, lambda x, f=activation: statement(f)(x[..., :n], x[..., n:]), (both,))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("rows, n", ((4111, 2056), (1100, 14336), (300_000, 40)))
def test_gated_units_of_many_rows(rows, n, dtype):
    """Large calls divide the number of a vector by those of a row, here also by odd numbers. Rows
    of an operand may lie apart, and each at another distance."""
    gen = generator("many gates", n, str(dtype))
    both = 2 * randn(gen, rows, 2 * n, dtype=dtype, device="cuda")
    both[rows // 2, n // 2], both[rows - 1, n - 1] = torch.nan, -torch.inf
    gate, up = both[:, :n].contiguous(), both[:, n:]
    apart = torch.zeros(rows, n + 24, dtype=dtype, device="cuda")[:, 16 : n + 16]
    apart.copy_(gate)
    for ours, activation in (
        (gk.swiglu, F.silu),
        (gk.geglu, F.gelu),
        (
            lambda g, u=None: gk.geglu(g, u, approximate="tanh"),
            lambda x: F.gelu(x, approximate="tanh"),
        ),
    ):
        out = ours(both)
        want = (activation(gate.double()) * up.double()).to(dtype)
        assert torch.equal(out.isnan(), want.isnan())
        error = (out.double() - want.double()).nan_to_num(0).abs()
        limit = 2 * torch.finfo(dtype).eps * want.double().nan_to_num(0).abs() + 1e-5
        assert (error <= limit).all(), (error - limit).max()
        assert same_bits(ours(gate, up), out) and same_bits(ours(apart, up), out)
        assert same_bits(ours(both[-9:]), out[-9:])


@pytest.mark.parametrize("approximate", (None, "none", "tanh"), ids=str)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_gates_beside_wild_ones(dtype, approximate, device):
    """NaN and inf affect their own element alone."""

    def gated(gate, up):
        return gk.geglu(gate, up, approximate=approximate) if approximate else gk.swiglu(gate, up)

    wild = torch.tensor([math.nan, math.inf, -math.inf, 6e4, -6e4, 1.0, -1.0, 0.5], device=device)
    for shift in range(8):
        gate = wild.roll(shift).to(dtype).repeat(2, 4).requires_grad_()
        up = torch.ones_like(gate).requires_grad_()
        out = gated(gate, up)
        grads = torch.autograd.grad(out, (gate, up), torch.ones_like(out))
        out, dgate, dup = (x.reshape(8, 8).roll(-shift, 1) for x in (out, *grads))
        assert out[:, 0].isnan().all() and dgate[:, 0].isnan().all() and dup[:, 0].isnan().all()
        assert dgate[:, 1:5].tolist() == [[1.0, 0.0, 1.0, 0.0]] * 8
        for x in (out, dgate, dup):
            assert x[:, 3:].isfinite().all()


def ends_of(gen, rows, n, dtype):
    """Gates: numbers, NaN, infinities and the largest of the dtype. Factors: numbers, NaN and
    infinities, but 1 beside the lowest gate, of which some kernels make -1e-16 and others -0."""
    most = torch.finfo(dtype).max

    def drawn(*ends):
        x = randn(gen, rows, n, dtype=torch.float64).clamp(-3, 3)
        ends = torch.tensor(ends, dtype=x.dtype)[
            torch.randint(0, len(ends), x.shape, generator=gen)
        ]
        return torch.where(torch.rand(x.shape, generator=gen) < 0.34, ends, x).to(dtype)

    gate = drawn(math.nan, math.inf, -math.inf, most, -most, 0.0, -0.0)
    factors = (drawn(math.nan, math.inf, -math.inf, 1.0, 1.0, 1.0) for _ in range(2))
    return gate, *(torch.where(gate == -most, 1.0, x.double()).to(dtype) for x in factors)


def assert_same_ends(out, want, dtype):
    """NaN and infinite where `want`, in float64, is so in the dtype, and near it elsewhere."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    want = want.to(wide).to(dtype)
    assert torch.equal(out.isnan(), want.isnan())
    assert torch.equal(out[out.isinf()], want[want.isinf()])
    a, b = (x[want.isfinite()].double() for x in (out, want))
    u = torch.finfo(dtype).eps * (4 if dtype.itemsize == 2 else 64)
    assert ((a - b).abs() <= u * (1 + b.abs())).all()


def slope_at(activation, x):
    """The derivative in float64; beyond +-1000 that at +-1000 (docs/numerics.md)."""
    x = torch.where(x.isnan(), x, x.clamp(-1000, 1000)).requires_grad_()
    return torch.autograd.grad(activation(x).sum(), x)[0]


GATES = {
    "silu": (gk.swiglu, F.silu),
    "gelu": (gk.geglu, F.gelu),
    "gelu_tanh": (
        lambda g, u=None: gk.geglu(g, u, approximate="tanh"),
        lambda x: F.gelu(x, approximate="tanh"),
    ),
}


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_at_their_ends(dtype, name, device):
    """silu and gelu of -inf are NaN, as in PyTorch: in whole vectors of 16 bytes, in tails, in
    rows of any alignment, in a small call (which has a kernel of its own) and in a large one."""
    ours, activation = GATES[name]
    gen = generator("ends", name, str(dtype))
    for rows, n, offset in ((3, 64, 0), (3, 64, 1), (5, 37, 0), (2, 8, 0), (64, 4096, 0)):
        gate, up, grad = ends_of(gen, rows, n, dtype)
        g, u, d = (
            x.new_full((rows, n + 3), math.nan, device=device)[:, offset : offset + n].copy_(x)
            if offset
            else x.to(device)
            for x in (gate, up, grad)
        )
        g, u = g.detach().requires_grad_(), u.detach().requires_grad_()
        out = ours(g, u)
        assert_same_ends(out.cpu(), activation(gate.double()) * up.double(), dtype)
        dgate, dup = torch.autograd.grad(out, (g, u), d)
        slope = slope_at(activation, gate.double())
        assert_same_ends(dgate.cpu(), grad.double() * up.double() * slope, dtype)
        assert_same_ends(dup.cpu(), grad.double() * activation(gate.double()), dtype)
        if offset == 0:
            both = torch.cat((g, u), -1)
            assert torch.equal(ours(both).nan_to_num(77.0), out.nan_to_num(77.0))


@pytest.mark.parametrize("approximate", ("none", "tanh"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu_with_dropout_at_its_ends(dtype, approximate, device):
    gen = generator("ends", "dropout", str(dtype), approximate)
    for rows, n in ((3, 64), (3, 37)):
        x, *_ = ends_of(gen, rows, n, dtype)
        laid = x.to(device).requires_grad_()
        out = gk.bias_gelu_dropout(laid, None, 0.0, approximate=approximate)

        def gelu(y):
            return F.gelu(y, approximate=approximate)

        assert_same_ends(out.cpu(), gelu(x.double()), dtype)
        (dx,) = torch.autograd.grad(out, laid, torch.ones_like(out))
        assert_same_ends(dx.cpu(), slope_at(gelu, x.double()), dtype)


def rope_statement(q, k, cos, sin, positions, interleaved):
    def rotate(x):
        at = torch.arange(x.shape[-2], device=x.device) if positions is None else positions
        c, s = (y[at].to(torch.promote_types(x.dtype, torch.float32)) for y in (cos, sin))
        c, s = (y[:, None] if at.dim() == 2 else y for y in (c, s))
        r = 2 * cos.shape[1]
        x1, x2 = (
            (x[..., 0:r:2], x[..., 1:r:2])
            if interleaved
            else (x[..., : r // 2], x[..., r // 2 : r])
        )
        pair = x1 * c - x2 * s, x2 * c + x1 * s
        y = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
        return torch.cat((y.to(x.dtype), x[..., r:]), -1)

    return rotate(q), rotate(k)


@pytest.mark.parametrize("interleaved", (False, True), ids=("halves", "pairs"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "head_dim,rotated", [(128, 128), (64, 32), (40, 40), (36, 34), (7, 2), (8, 0)]
)
def test_rope(head_dim, rotated, dtype, interleaved, device):
    gen = generator("rope", head_dim, rotated, str(dtype))
    q, k = (randn(gen, 2, h, 11, head_dim, dtype=dtype, device=device) for h in (4, 2))
    angle = torch.rand(20, rotated // 2, generator=gen).to(device) * 7
    cos, sin = angle.cos(), angle.sin()
    at = torch.randint(20, (2, 11), generator=gen).to(device)
    for positions in (None, at[0].int(), at):
        judged(
            lambda q, k, p=positions: gk.rope(q, k, cos, sin, p, interleaved=interleaved),
            lambda q, k, p=positions: rope_statement(q, k, cos, sin, p, interleaved),
            (q, k),
        )


def test_rope_keeps_the_order_of_dimensions(device):
    """Tensors with tokens before heads, as projections store them; and packed tokens."""
    gen = generator("rope order")
    q, k = (randn(gen, 2, 9, h, 64, device=device).transpose(1, 2) for h in (4, 1))
    angle = torch.rand(30, 32, generator=gen).to(device)
    cos, sin = angle.cos(), angle.sin()
    rotated = gk.rope(q, k, cos, sin)
    assert rotated[0].stride() == q.stride() and rotated[1].transpose(1, 2).is_contiguous()
    assert all(map(same_bits, rotated, gk.rope(q.contiguous(), k.contiguous(), cos, sin)))
    packed = gk.rope(q[0].transpose(0, 1), k[0].transpose(0, 1), cos, sin)
    assert all(same_bits(p.transpose(0, 1), r[0]) for p, r in zip(packed, rotated, strict=True))


def test_rope_is_twice_differentiable():
    q, k = (
        torch.randn(1, 2, 3, 4, dtype=torch.float64),
        torch.randn(1, 1, 3, 4, dtype=torch.float64),
    )
    angle = torch.rand(5, 2)
    for leaves in ((True, True), (True, False), (False, True)):
        inputs = tuple(
            x.clone().requires_grad_(wants) for x, wants in zip((q, k), leaves, strict=True)
        )
        assert gradcheck(lambda q, k: gk.rope(q, k, angle.cos(), angle.sin()), inputs)
        assert torch.autograd.gradgradcheck(
            lambda q, k: gk.rope(q, k, angle.cos(), angle.sin()), inputs
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", (1, 2, 17, 1000, 4096, 32003, 50257))
def test_cross_entropy(n, dtype, device):
    if dtype == torch.float64 and n > 5000:
        pytest.skip("a loop for each row")
    gen = generator("loss", n, str(dtype))
    logits = 3 * randn(gen, 2, 9, n, dtype=dtype, device=device)
    target = torch.randint(n, (2, 9), generator=gen).to(device)
    target[0, 3] = target[1, 8] = -100
    size = float(logits.abs().max())  # lse is float32, and exp(z - lse) has its rounding error
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weight = torch.rand(n, generator=gen).to(device, wide)

    def statement(weight=None, softcap=0.0, z_loss=0.0, **more):
        def loss(x):
            x = x.to(torch.promote_types(x.dtype, wide))
            if softcap:
                x = softcap * torch.tanh(0.5 * x / softcap)
            w = None if weight is None else weight.to(x.dtype)
            out = F.cross_entropy(x.flatten(0, 1), target.flatten(), w, **more)
            if z_loss:
                out = out + z_loss * x[target >= 0].logsumexp(-1).square().mean()
            return out.view(target.shape) if more.get("reduction") == "none" else out

        return loss

    judged(lambda x: gk.cross_entropy(x, target), statement(), (logits,), size)
    judged(
        lambda x: gk.cross_entropy(x, target, reduction="none"),
        statement(reduction="none"),
        (logits,),
        size,
    )
    rules = dict(label_smoothing=0.2, reduction="sum")
    judged(lambda x: gk.cross_entropy(x, target, **rules), statement(**rules), (logits,), size)
    judged(
        lambda x: gk.cross_entropy(
            x, target, weight=weight, softcap=4.0, logit_scale=0.5, label_smoothing=0.1
        ),
        statement(weight, softcap=4.0, label_smoothing=0.1),
        (logits,),
        size,
    )
    judged(
        lambda x: gk.cross_entropy(x, target, weight=weight, z_loss=0.01),
        statement(weight, z_loss=0.01),
        (logits,),
        size,
    )


def test_cross_entropy_of_ignored_rows(device):
    """Ignored rows are not read, and their gradient is exactly 0. The mean over no row is NaN, as
    in torch."""
    logits = torch.full((4, 1000), math.nan, device=device)
    logits[2] = 1.0
    logits.requires_grad_()
    target = torch.tensor([7, 7, 3, 7], device=device)
    loss = gk.cross_entropy(logits, target, ignore_index=7)
    assert (loss - math.log(1000)).abs() < 1e-5
    loss.backward()
    assert (logits.grad[[0, 1, 3]] == 0).all() and logits.grad[2].isfinite().all()
    assert gk.cross_entropy(logits, torch.full_like(target, 7), ignore_index=7).isnan()
    assert (
        gk.cross_entropy(logits, torch.full_like(target, 7), ignore_index=7, reduction="sum") == 0
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", (1, 7, 1000, 40000))
def test_cross_entropy_of_rows_without_a_finite_logit(n, dtype, device):
    """lse of a row of -inf is -inf, as torch.logsumexp's, beside rows of numbers and of NaN."""
    logits = torch.zeros(4, n, dtype=dtype, device=device)
    logits[0], logits[2], logits[2, n // 2] = -math.inf, -math.inf, math.nan
    target = torch.zeros(4, dtype=torch.int64, device=device)
    for more in ({}, {"label_smoothing": 0.1}, {"softcap": 30.0}):
        loss, lse = torch.ops.gpukern.cross_entropy(logits, target, **more)
        if "softcap" not in more:  # it makes -30 of -inf
            assert lse[0].item() == -math.inf and loss[0].isnan()
        assert lse[2].isnan() and loss[2].isnan()
        assert lse[[1, 3]].sub(math.log(n)).abs().max() < 1e-5
    if dtype == torch.float32 and n % 8 == 0:  # both in one launch
        loss, lse, grad = (
            torch.empty(4, device=device),
            torch.empty(4, device=device),
            logits.clone(),
        )
        torch.ops.gpukern.cross_entropy_grad(grad, target, loss, lse, grad)
        assert lse[0].item() == -math.inf and lse[2].isnan()
        assert grad[0].isnan().all() and grad[[1, 3]].isfinite().all()


@pytest.mark.parametrize("n", (1, 7, 1000, 4096, 40001))
def test_cross_entropy_gradient_of_16_bits_beside_float32_logits(n, device):
    """The gradient written to a 16-bit tensor is the float32 gradient, rounded once."""
    gen = generator("narrow", n)
    logits, target = (
        3 * randn(gen, 9, n, device=device),
        torch.randint(n, (9,), generator=gen).to(device),
    )
    target[2] = -100
    rules = None, -100, 0.1, 4.0, 0.5
    _, lse = torch.ops.gpukern.cross_entropy(logits, target, *rules)
    given = lse.new_ones(()).expand(9), logits, target, lse, *rules
    want = torch.ops.gpukern.cross_entropy_bwd(*given)
    for dtype in (torch.bfloat16, torch.float16):
        out = torch.full((9, n), math.nan, device=device, dtype=dtype)
        torch.ops.gpukern.cross_entropy_bwd.out(*given, out=out)
        close("dlogits", out, want.to(dtype), want.double(), 1e-30)
        assert (out[2] == 0).all()
    for wrong in (torch.float64, torch.int16):
        with pytest.raises(ValueError, match="cross_entropy_bwd: dlogits must be float32"):
            torch.ops.gpukern.cross_entropy_bwd.out(*given, out=logits.to(wrong))
    with pytest.raises(ValueError, match="dlogits must be bfloat16, got float32"):
        torch.ops.gpukern.cross_entropy_bwd.out(
            given[0], logits.bfloat16(), *given[2:], out=logits.clone()
        )
    with pytest.raises(ValueError, match="dlogits shares memory with logits"):
        torch.ops.gpukern.cross_entropy_bwd.out(
            *given, out=logits.view(torch.bfloat16).view(-1)[: 9 * n].view(9, n)
        )


@pytest.mark.parametrize(
    "n", (1, 7, 1000, 4096, 16384, 32000, 40001, 65536, 151936, 212992, 213000)
)
def test_cross_entropy_and_its_gradient_at_once(n, device):
    """The combined op gives the losses and gradients of the two ops, also in place of the logits.
    Ignored rows are not read."""
    if n > 70000 and torch.device(device).type == "cpu":
        pytest.skip("one way on the CPU")
    gen = generator("at once", n)
    logits, target = (
        3 * randn(gen, 5, n, device=device),
        torch.randint(n, (5,), generator=gen).to(device),
    )
    weight = torch.rand(n, generator=gen).to(device)
    target[0], target[2] = n - 1, -100
    logits[2] = math.nan
    ops = torch.ops.gpukern
    for rules in (
        (weight, -100, 0.0, 0.0, 0.5, 0.01),
        (None, -100, 0.1, 0.0, 1.0),
        (weight, -100, 0.1, 4.0, 1.0, 0.01),
    ):
        want, want_lse = ops.cross_entropy(logits, target, *rules)
        want_grad = ops.cross_entropy_bwd(torch.ones_like(want), logits, target, want_lse, *rules)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            loss, lse = torch.empty_like(want), torch.empty_like(want)
            grad = torch.full_like(logits, math.nan, dtype=dtype)
            ops.cross_entropy_grad(logits, target, loss, lse, grad, *rules)
            torch.testing.assert_close(loss, want, rtol=2e-6, atol=2e-6)
            torch.testing.assert_close(lse, want_lse, rtol=2e-6, atol=2e-6)
            wide = dtype == torch.float32
            torch.testing.assert_close(
                grad.float(), want_grad, rtol=1e-5 if wide else 1e-2, atol=1e-8 if wide else 1e-7
            )
            assert (grad[2] == 0).all() and loss[2] == 0
        over = logits.clone()
        ops.cross_entropy_grad(over, target, loss, lse, over, *rules)
        torch.testing.assert_close(over, want_grad, rtol=1e-5, atol=1e-8)
    halves = logits.bfloat16()
    grad = torch.empty_like(halves)
    ops.cross_entropy_grad(halves, target, loss, lse, grad, *rules)
    assert torch.equal(
        grad, ops.cross_entropy_bwd(torch.ones_like(lse), halves, target, lse, *rules)
    )


def test_cross_entropy_and_its_gradient_at_once_of_many_rows(device):
    """More rows than a block keeps targets for, and runs of ignored rows."""
    rows, n = (90000, 4096) if torch.device(device).type == "cuda" else (300, 4096)
    logits = torch.randn(rows, n, device=device)
    target = torch.arange(rows, device=device) % n
    target[rows // 4 : rows // 2] = -100
    target[::3] = -100
    loss, lse = torch.empty(2, rows, device=device)
    grad = torch.full((rows, n), math.nan, dtype=torch.bfloat16, device=device)
    torch.ops.gpukern.cross_entropy_grad(logits, target, loss, lse, grad)
    want, want_lse = torch.ops.gpukern.cross_entropy(logits, target)
    torch.testing.assert_close(loss, want, rtol=2e-6, atol=2e-6)
    assert (grad[target < 0] == 0).all() and (grad[target >= 0].float().sum(-1).abs() < 0.02).all()
    assert grad.isfinite().all()


def test_cross_entropy_and_its_gradient_at_once_refuses(device):
    logits, target = (
        torch.ones(3, 8, device=device),
        torch.zeros(3, dtype=torch.long, device=device),
    )
    loss, lse = torch.empty(2, 3, device=device)

    def refused(text, **changes):
        given = (
            dict(logits=logits, target=target, loss=loss, lse=lse, dlogits=torch.empty_like(logits))
            | changes
        )
        with pytest.raises(
            (ValueError, NotImplementedError), match=f"gpukern::cross_entropy_grad: {text}"
        ):
            torch.ops.gpukern.cross_entropy_grad(**given)

    refused("dlogits must be float32, got float64", dlogits=logits.double())
    refused(r"loss must have shape \[3\], got \[2\]", loss=loss[:2])
    refused("lse shares memory with loss", lse=loss)
    refused(
        "dlogits shares memory with loss or lse",
        loss=(held := torch.empty(27, device=device))[:3],
        dlogits=held[:24].view(3, 8),
    )
    refused("it has no backward", logits=logits.clone().requires_grad_())
    refused("z_loss must be finite, got inf", z_loss=math.inf)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64), ids=str)
def test_cross_entropy_gradient_of_some_classes(dtype, device):
    """Computing some classes at a time, with lse of all of them, gives the same gradient."""
    gen = generator("some classes", str(dtype))
    logits, target = (
        randn(gen, 6, 4104, dtype=dtype, device=device),
        torch.randint(4104, (6,), generator=gen).to(device),
    )
    target[3] = -100
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for weight, smoothing in (
        (torch.rand(4104, generator=gen).to(device, wide), 0.1),
        (None, 0.2),
        (None, 0.0),
    ):
        rules = weight, -100, smoothing, 3.0, 0.7, 0.01
        loss, lse = torch.ops.gpukern.cross_entropy(logits, target, *rules)
        want = torch.ops.gpukern.cross_entropy_bwd(loss, logits, target, lse, *rules)
        for begin, end in ((0, 1000), (1000, 1003), (1003, 4104)):
            part = torch.ops.gpukern.cross_entropy_bwd(
                loss, logits[:, begin:end], target, lse, *rules, begin, 4104
            )
            torch.testing.assert_close(part, want[:, begin:end], rtol=1e-5, atol=1e-9)
    for first, classes in ((-1, 4104), (1, 4104), (0, 4000)):
        with pytest.raises(ValueError, match="logits are 4104 classes from first_class"):
            torch.ops.gpukern.cross_entropy_bwd(loss, logits, target, lse, *rules, first, classes)


def test_cross_entropy_refuses_an_unknown_reduction():
    with pytest.raises(
        ValueError, match="gpukern::cross_entropy: reduction must be none, mean or sum, got 'max'"
    ):
        gk.cross_entropy(torch.ones(2, 3), torch.zeros(2, dtype=torch.long), reduction="max")


@pytest.mark.gpu
def test_bad_contents_on_a_gpu_are_heard_of_later():
    x = torch.zeros(3, 8, device="cuda")
    loss = gk.cross_entropy(x, torch.tensor([0, 8, 1], device="cuda"), reduction="none")
    torch.cuda.synchronize()
    with pytest.raises(IndexError, match="cross_entropy: target"):
        gk.check_errors()
    assert loss[1].isnan() and loss[[0, 2]].isfinite().all()
    q, table = torch.ones(1, 1, 2, 4, device="cuda"), torch.ones(3, 2, device="cuda")
    gk.rope(q, q, table, table, torch.tensor([0, 3], device="cuda"))
    torch.cuda.synchronize()
    with pytest.raises(IndexError, match="rope: positions"):
        gk.check_errors()


def f64(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    "fn,inputs",
    [
        (
            lambda x, w, b, r: gk.rms_norm(x, w, bias=b, residual=r, weight_offset=0.5),
            lambda: (f64(3, 5), f64(5), f64(5), f64(3, 5)),
        ),
        (
            lambda x, w, b, r: gk.layer_norm(x, w, b, residual=r),
            lambda: (f64(3, 5), f64(5), f64(5), f64(3, 5)),
        ),
        (lambda x: gk.softmax(x, scale=0.5), lambda: (f64(3, 5),)),
        (lambda x: gk.log_softmax(x, scale=0.5), lambda: (f64(3, 5),)),
        (gk.swiglu, lambda: (f64(3, 6),)),
        (gk.geglu, lambda: (f64(3, 6), f64(3, 6))),
        (
            lambda x: gk.cross_entropy(
                x, torch.tensor([0, 4, -100]), label_smoothing=0.1, softcap=3.0
            ),
            lambda: (f64(3, 5),),
        ),
    ],
    ids=("rms_norm", "layer_norm", "softmax", "log_softmax", "swiglu", "geglu", "cross_entropy"),
)
def test_gradients_and_no_second_ones(fn, inputs):
    torch.manual_seed(0)
    leaves = inputs()
    assert gradcheck(fn, leaves)
    out = fn(*leaves)
    out = out[0] if isinstance(out, tuple) else out
    (grad,) = torch.autograd.grad(out.square().sum(), leaves[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="not twice differentiable"):
        grad.sum().backward()


def strided(x, how):
    if how == "rows":  # every second row of a tensor of other columns, too
        room = x.new_full((2 * x.shape[0], x.shape[1], x.shape[2] + 3), math.nan)
        room[::2, :, : x.shape[2]] = x
        return room[::2, :, : x.shape[2]]
    if how == "middle":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if how == "columns":
        return x.mT.contiguous().mT
    return x[:1].expand(x.shape)


@pytest.mark.parametrize("how", ("rows", "middle", "columns", "expanded"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_strides(how, dtype, device):
    gen = generator("strides", how)
    x = randn(gen, 4, 3, 96, dtype=dtype, device=device)
    if how == "expanded":
        x = x[:1].repeat(4, 1, 1)
    y, w = (
        strided(x, how),
        strided(randn(gen, 4, 3, 96, dtype=dtype, device=device), "columns")[0, 0],
    )
    assert not y.is_contiguous() and torch.equal(x, y)
    for fn in (
        lambda x: gk.rms_norm(x, w, bias=w),
        lambda x: gk.layer_norm(x, w, w),
        lambda x: gk.rms_norm(x, residual=x)[1],
        gk.softmax,
        gk.log_softmax,
        gk.swiglu,
        lambda x: gk.swiglu(x, x),
        lambda x: gk.cross_entropy(
            x, torch.zeros(4, 3, dtype=torch.long, device=device), reduction="none"
        ),
    ):
        got, want = fn(y), fn(x)
        assert got.is_contiguous()
        if device == "cpu":
            assert same_bits(got, want)
        else:  # misaligned rows have another kernel, which sums in another order
            assert torch.allclose(got, want, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("shape", ((0, 8), (3, 0, 8), (0, 1)))
def test_no_rows(shape, device):
    x = torch.ones(shape, device=device, requires_grad=True)
    w = torch.ones(shape[-1], device=device, requires_grad=True)
    out = gk.layer_norm(x, w, w)
    out.sum().backward()
    assert out.shape == shape and x.grad.shape == shape and (w.grad == 0).all()
    assert gk.softmax(x).shape == gk.swiglu(x, x).shape == gk.rms_norm(x).shape == shape
    target = torch.ones(shape[:-1], dtype=torch.long, device=device)
    assert gk.cross_entropy(x, target, reduction="none").shape == shape[:-1]
    assert gk.cross_entropy(x, target, reduction="sum") == 0


def test_wide_rows(device):
    """262144 columns, the most that the register kernels take, surrounded by memory that must not
    be read or written."""
    gen = generator("wide rows")
    for dtype in (torch.float32, torch.bfloat16):
        x, w = (
            randn(gen, 3, 262144, dtype=dtype, device=device),
            randn(gen, 262144, dtype=dtype, device=device),
        )
        judged(
            lambda x, w: gk.rms_norm(x, w, eps=1e-5),
            lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-5),
            (x, w),
        )
        judged(
            lambda x, w: gk.layer_norm(x, w), lambda x, w: F.layer_norm(x, x.shape[-1:], w), (x, w)
        )
        judged(lambda x: gk.softmax(x), lambda x: F.softmax(x, -1), (x,))


def test_dynamic_lengths_compile_once(device):
    def step(x, w, target):
        h = gk.rms_norm(x, w)
        h, s = gk.layer_norm(gk.swiglu(torch.cat((h, x), -1)), residual=h)
        return gk.cross_entropy(gk.softmax(h + s), target)

    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
    for rows in (5, 17, 33):
        gen = generator("dynamic", rows)
        x, w = randn(gen, rows, 64, device=device), randn(gen, 64, device=device)
        target = torch.randint(64, (rows,), generator=gen).to(device)
        leaves = [[y.clone().requires_grad_() for y in (x, w)] for _ in range(2)]
        got, want = compiled(*leaves[0], target), step(*leaves[1], target)
        got.backward(), want.backward()
        assert torch.allclose(got, want) and all(
            torch.allclose(a.grad, b.grad) for a, b in zip(*leaves, strict=True)
        )
    assert len(graphs) == 1


EVERY_ISA = """
import torch, torch.nn.functional as F
import torch_gpukern as gk
torch.manual_seed(0)
for dtype, near in ((torch.float32, 2e-5), (torch.bfloat16, 0.05), (torch.float16, 0.01)):
    for n in (1, 3, 16, 37, 1024, 1030, 2061):
        x, w, b = torch.randn(9, n).to(dtype), torch.randn(n).to(dtype), torch.randn(n).to(dtype)
        a = [t.clone().requires_grad_() for t in (x, w, b)]
        e = [t.double().requires_grad_() for t in (x, w, b)]
        target = torch.randint(n, (9,))
        angle = torch.rand(9, n // 2)
        pairs = [
            (gk.rms_norm(a[0], a[1], bias=a[2], eps=1e-5), F.rms_norm(e[0], (n,), e[1], 1e-5) + e[2]),
            (gk.layer_norm(*a), F.layer_norm(e[0], (n,), e[1], e[2])),
            (gk.softmax(a[0]), F.softmax(e[0], -1)), (gk.log_softmax(a[0]), F.log_softmax(e[0], -1)),
            (gk.swiglu(a[0], a[0]), F.silu(e[0]) * e[0]), (gk.geglu(a[0], a[0]), F.gelu(e[0]) * e[0]),
            (gk.cross_entropy(a[0], target, label_smoothing=0.1), F.cross_entropy(e[0], target, label_smoothing=0.1)),
        ][n == 1:]
        for i, (got, want) in enumerate(pairs):
            grads = torch.autograd.grad(got.double().square().sum(), a, allow_unused=True)
            exact = torch.autograd.grad(want.square().sum(), e, allow_unused=True)
            for g, x64 in [(got, want), *((p, q) for p, q in zip(grads, exact) if q is not None)]:
                error, size = (g.double() - x64).abs().max().item(), max(1, x64.abs().max().item())
                assert n == 1 or error <= near * size, (dtype, n, i, error, size)
print("all good on", torch.ops.gpukern.cpu_isa())
"""


@pytest.mark.parametrize("isa", torch.ops.gpukern.cpu_isas().split(","))
def test_every_instruction_set(isa):
    assert f"all good on {isa}" in run_python(EVERY_ISA, {"GPUKERN_CPU": isa}).stdout
