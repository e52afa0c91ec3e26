# SPDX-License-Identifier: BSD-3-Clause
"""Second derivatives: correct through gemm, linear and attn_merge, refused by name through
attention, never silently 0."""

import pytest
import torch
import torch.nn.functional as F
from conftest import FLOATS, generator, ops, randn, reference, torch_gpukern
from registry import drawn
from torch.autograd.functional import hessian, vhp

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")
SHAPES = dict(a=(2, 3, 4), b=(4, 5), bias=(5,), c=(3, 5))
TORCHS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def leaves(gen, device, wanted=tuple(SHAPES)):
    tensors = {n: randn(gen, *s, dtype=torch.float64, device=device) for n, s in SHAPES.items()}
    return [x.requires_grad_(n in wanted) for n, x in tensors.items()]


@pytest.mark.parametrize("wanted", (tuple(SHAPES), ("a",), ("b",), ("bias",), ("c",)), ids="-".join)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gemm(activation, wanted, device, one_thread):
    """Also with a single operand that requires a gradient: then only the other operand and the
    preact are saved."""
    t = leaves(generator("twice", activation), device, wanted)
    run = lambda a, b, bias, c: ops.gemm(a, b, bias, c, 0.7, -1.3, activation)  # noqa: E731
    assert torch.autograd.gradgradcheck(run, t)
    batch = (t[0], t[1].detach()[None].requires_grad_())
    assert wanted != tuple(SHAPES) or torch.autograd.gradgradcheck(
        lambda a, b: ops.gemm(a, b, activation=activation), batch
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gemm_under_every_way_to_ask(activation, device):
    """create_graph, functional.hessian, torch.func of both orders of reverse mode, and a third
    derivative."""
    a, b, bias, c = (x.detach() for x in leaves(generator("ways", activation), device))

    def loss(gemm):
        return lambda x: gemm(x, b, bias, c=c, alpha=0.7, activation=activation).square().sum()

    ours, theirs = loss(torch_gpukern.gemm), loss(reference.gemm)
    want = hessian(theirs, a)
    assert activation == "none" or want.abs().max() > 0
    assert torch.allclose(hessian(ours, a), want)
    assert torch.allclose(hessian(ours, a, vectorize=True), want)
    assert torch.allclose(torch.func.jacrev(torch.func.grad(ours))(a), want)
    third = [
        torch.func.grad(lambda x, f=f: torch.func.grad(f)(x).pow(3).sum()) for f in (ours, theirs)
    ]
    once_more = [torch.func.grad(lambda x, f=f: f(x).pow(2).sum()) for f in third]
    for got, expected in (third, once_more):
        assert torch.allclose(got(a), expected(a))


def test_gemm_by_hand(device):
    one = torch.ones(1, 1, dtype=torch.float64, device=device)
    for activation, value in (
        ("gelu", 0.24197072),
        ("silu", 0.30237),
        ("gelu_tanh", 0.24215),
        ("relu", 0.0),
        ("none", 0.0),
    ):
        got = hessian(lambda z, f=activation: torch_gpukern.gemm(z, one, activation=f).sum(), one)
        assert abs(got.item() - value) < 1e-5, activation


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_far_from_zero(activation, dtype, device):
    """Values up to the ends of the dtype: no NaN beside a second derivative of 0, and as near as
    PyTorch's own elsewhere."""
    ends = [torch.finfo(dtype).max, 1e4, 300.0, 41.0, 12.0, 5.0, 1.0, 1e-3, 0.0]
    x = torch.tensor([ends + [-e for e in ends]], dtype=dtype, device=device)

    def second(f, x):
        x = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        return torch.autograd.grad(g.sum(), x)[0]

    one = torch.eye(x.shape[1], dtype=dtype, device=device)
    got = second(lambda x: torch_gpukern.gemm(x, one, activation=activation), x)
    near = x.abs() < 50  # PyTorch's own has NaN further out, and it is 0 there
    want = torch.where(near, second(TORCHS[activation], x.double().clamp(-50, 50)), 0.0)
    assert got.isfinite().all()
    tolerance = 4 * torch.finfo(dtype).eps
    assert torch.allclose(got.double(), want, rtol=tolerance, atol=tolerance)


def test_a_patched_model(device):
    model = (
        torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
        .to(device)
        .double()
    )
    x, v = (randn(generator("patched"), 3, 4, dtype=torch.float64, device=device) for _ in range(2))
    want = vhp(lambda x: model(x).sum(), x, v)[1]
    with torch_gpukern.nn.patch(model, say=None):
        assert want.abs().max() > 0 and torch.allclose(vhp(lambda x: model(x).sum(), x, v)[1], want)


def test_a_gradient_penalty_trains_the_weights(device):
    """The gradient of a gradient's norm, by backward(), with weights frozen and not."""
    gen = generator("penalty")
    x, w = (randn(gen, *s, dtype=torch.float64, device=device) for s in ((6, 4), (5, 4)))

    def step(linear):
        leaf, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
        out = linear(leaf, weight)
        (g,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
        (out.sum() + (g.norm(dim=1) - 1).square().sum()).backward()
        return leaf.grad, weight.grad

    pairs = zip(
        step(lambda x, w: torch_gpukern.linear(x, w, activation="silu")),
        step(lambda x, w: F.silu(F.linear(x, w))),
        strict=True,
    )
    for got, want in pairs:
        assert torch.allclose(got, want)


def test_attn_merge(device, one_thread):
    gen = generator("merge")
    shapes = ((3, 2, 8), (3, 2)) * 2
    for alone in (None, 0, 1, 2, 3):
        t = [
            randn(gen, *s, dtype=torch.float64, device=device).requires_grad_(alone in (None, i))
            for i, s in enumerate(shapes)
        ]
        assert torch.autograd.gradgradcheck(torch_gpukern.attn_merge, t)


@pytest.mark.parametrize("of", ("out", "lse", "both"))
@pytest.mark.parametrize("wanted", ("q", "k", "v", "sinks"))
@pytest.mark.parametrize("name", ("flash_attn", "flash_attn_varlen"))
def test_attention_refuses_by_name_on_every_path(name, wanted, of, device):
    """create_graph alone is not refused; a gradient through the gradients is."""
    variant = {"flash_attn": "sinks", "flash_attn_varlen": "sinks, slopes"}[name]
    call = drawn(name, variant, device)

    def loss(x):
        out, lse = getattr(torch_gpukern, name)(**call | {wanted: x}, return_lse=True)
        return {"out": out.sum(), "lse": lse.sum(), "both": out.sum() + lse.sum()}[of]

    def penalty(x, through=torch.autograd.grad):
        x = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(loss(x), x, create_graph=True)
        return through(g.square().sum(), x)

    ways = (
        penalty,
        lambda x: penalty(x, lambda y, _: y.backward()),
        lambda x: hessian(loss, x),
        lambda x: hessian(loss, x, vectorize=True),
        torch.func.jacrev(torch.func.grad(loss)),
        torch.func.hessian(loss),
    )
    x = call[wanted]
    for way in ways:
        with pytest.raises(NotImplementedError, match=f"gpukern::{name}"):
            way(x)
    leaf = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    (plain,) = torch.autograd.grad(loss(leaf), leaf)
    assert torch.equal(g, plain)
