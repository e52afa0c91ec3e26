# SPDX-License-Identifier: BSD-3-Clause
"""The float64 reference (tests/exact.py) is exact up to a rounding, in whatever order PyTorch
adds."""

import math
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from attention_cases import modifiers
from conftest import Exact, f64, generator, randn, reference, same_bits
from exact import product, total
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class AnotherCPU(TorchDispatchMode):
    """Simulates PyTorch on another CPU: float64 products and sums add one by one, from the last
    term to the first."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        x = args[0] if args else None
        if isinstance(x, torch.Tensor) and x.dtype == torch.float64:
            if func in (aten.mm.default, aten.bmm.default):
                a, b = (t.flip(d) for t, d in zip(args, (-1, -2)))
                out = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=x.dtype)
                for k in range(a.shape[-1]):
                    out = out + a[..., k, None] * b[..., k, None, :]
                return out
            if func is aten.sum.dim_IntList and len(args[1]) == 1:
                parts = x.movedim(args[1][0], -1).flip(-1)
                out = parts.cumsum(-1)[..., -1] if parts.shape[-1] else func(*args)
                return (
                    out.unsqueeze(args[1][0])
                    if len(args) > 2 and args[2] and parts.shape[-1]
                    else out
                )
            if func in (
                aten.mean.dim,
                aten.logsumexp.default,
                aten._softmax.default,
                aten._log_softmax.default,
            ):
                dims = args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
                out = func(x.flip(dims), *args[1:], **(kwargs or {}))
                return out.flip(dims) if out.shape == x.shape else out
        return func(*args, **(kwargs or {}))


def test_another_cpu_is_another():
    """The tests below rely on this: PyTorch's own results have other bits there."""
    a, b = (randn(generator("other"), *s, dtype=torch.float64) for s in ((9, 301), (301, 8)))

    def run():
        return a @ b, a.sum(-1), a.mean(-1), a.logsumexp(-1), a.softmax(-1), a.log_softmax(-1)

    here = run()
    with AnotherCPU():
        there = run()
    assert not any(same_bits(x, y) for x, y in zip(here, there))


@pytest.mark.parametrize("spread", (0, 6, 300))
def test_products_and_sums_are_rounded_once(spread):
    """Products and sums agree with rational numbers, also with terms of very different sizes."""
    gen = generator("rounded once", spread)
    a, b = (randn(gen, *s, dtype=torch.float64) for s in ((3, 70), (70, 4)))
    a, b = (
        x * 2.0 ** torch.randint(-spread, spread + 1, x.shape, generator=gen).double()
        for x in (a, b)
    )
    exact = [
        [sum(Fraction(x) * Fraction(y) for x, y in zip(row, col)) for col in b.T.tolist()]
        for row in a.tolist()
    ]
    got = product(a, b).tolist()
    for i, j in ((i, j) for i in range(3) for j in range(4)):
        size = Fraction(a[i].abs().max().item()) * Fraction(b[:, j].abs().max().item()) * 70
        off = abs(Fraction(got[i][j]) - exact[i][j])
        assert off <= abs(exact[i][j]) * Fraction(1, 2**53) + size / 2**62
    for row, x in zip(a.tolist(), total(a, -1).tolist()):
        assert x == pytest.approx(
            float(sum(map(Fraction, row))), rel=2**-52, abs=max(map(abs, row)) * 2**-90
        )


def test_infinities_and_nan_are_where_they_belong():
    a, b = (randn(generator("inf"), *s, dtype=torch.float64) for s in ((4, 5), (5, 6)))
    a[1, 2], b[3, 4] = math.inf, math.nan
    plain, got = a @ b, product(a, b)
    assert torch.equal(plain.isnan(), got.isnan()) and torch.equal(
        plain == math.inf, got == math.inf
    )
    assert total(torch.tensor([1.0, math.inf, 2.0]).double()) == math.inf and total(a).isinf()
    for shapes in (
        ((0, 3), (3, 4)),
        ((2, 0), (0, 4)),
        ((2, 1, 3, 4), (5, 4, 2)),
        ((4,), (4, 2)),
        ((3, 4), (4,)),
        ((4,), (4,)),
    ):
        a, b = (torch.ones(s, dtype=torch.float64) for s in shapes)
        assert torch.equal(product(a, b), a @ b), shapes


def test_gradients():
    x, w, b = (
        randn(generator("g"), *s, dtype=torch.float64).requires_grad_()
        for s in ((2, 3, 4), (5, 4), (5,))
    )
    target = torch.tensor([[0, 4, -100], [2, 1, 3]]).flatten()
    share = torch.tensor([0.5, 1.0, 0.25, 2.0, 0.75], dtype=torch.float64)

    def all_of_it(x, w, b):
        z = F.linear(F.layer_norm(x, (4,), w[0]) + F.rms_norm(x, (4,)), w, b).flatten(0, 1)
        loss = F.cross_entropy(z, target, share, label_smoothing=0.1)
        return (
            loss
            + z.mean()
            + z.logsumexp(-1).sum()
            + (z.softmax(-1) * z.log_softmax(-1)).sum(0, keepdim=True)
        )

    want = all_of_it(x, w, b)
    with Exact():
        torch.testing.assert_close(all_of_it(x, w, b), want, rtol=1e-14, atol=1e-14)
        assert torch.autograd.gradcheck(all_of_it, (x, w, b)) and torch.autograd.gradgradcheck(
            all_of_it, (x, w, b)
        )


def attention(q, k, v):
    kwargs = modifiers("all", 1, 2, q.shape[2], k.shape[2], generator("mods"), torch.float64)
    return reference.flash_attn(q, k, v, **kwargs, return_lse=True)


TARGET = torch.arange(40) % 90
STATEMENTS = {
    "gemm": (
        lambda a, b, c: (reference.gemm(a, b, c=c, activation="gelu"),),
        ((40, 300), (300, 70), (40, 70)),
    ),
    "linear": (reference.linear, ((2, 3, 300), (70, 300), (70,))),
    "flash_attn": (attention, ((1, 2, 40, 64), (1, 1, 170, 64), (1, 1, 170, 24))),
    "softmax": (lambda x: (reference.softmax(x),), ((40, 1000),)),
    "log_softmax": (lambda x: (reference.log_softmax(x),), ((40, 1000),)),
    "rms_norm": (lambda x, w: reference.rms_norm(x, w), ((40, 1000), (1000,))),
    "layer_norm": (lambda x, w: reference.layer_norm(x, w), ((40, 1000), (1000,))),
    "cross_entropy": (
        lambda x: reference.cross_entropy(x, TARGET, label_smoothing=0.1, z_loss=1e-2),
        ((40, 90),),
    ),
    "linear_cross_entropy": (
        lambda x, w: reference.linear_cross_entropy(x, w, TARGET),
        ((40, 300), (90, 300)),
    ),
}


@pytest.mark.parametrize("name", STATEMENTS)
def test_another_order_of_sums_changes_nothing(name):
    """Results to the bit; gradients to the roundings that broadcasting adds in PyTorch's own
    order."""
    fn, shapes = STATEMENTS[name]
    inputs = [randn(generator(name), *s, dtype=torch.float64).requires_grad_() for s in shapes]

    def run():
        out = fn(*inputs)
        out = out if isinstance(out, tuple) else (out,)
        weights = [randn(generator("weights"), *x.shape, dtype=torch.float64) for x in out]
        seen = [torch.where(x.isfinite(), x, 0.0) for x in out]
        return [x.detach() for x in out], torch.autograd.grad(seen, inputs, weights)

    (here, grads), f = run(), torch.finfo(torch.float64)
    with AnotherCPU():
        there, grads_there = run()
    for x, y in zip(here, there):
        assert same_bits(x, y)
    for x, y in zip(grads, grads_there):
        assert (x - y).abs().max() <= 16 * f.eps * x.abs().max()
    assert f64(here)[0].dtype == torch.float64
