# SPDX-License-Identifier: BSD-3-Clause
"""linear is F.linear and an activation."""

import pytest
import torch
import torch.nn.functional as F
from conftest import ACTIVATIONS, generator, randn, reference, same_bits, torch_gpukern

from torch_gpukern.ops import parallel

linear = torch_gpukern.linear


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", ((7,), (5, 7), (2, 3, 7), (0, 7)), ids=str)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_values_and_gradients(activation, shape, dtype, device):
    gen = generator("linear", shape, activation)
    x, weight, bias = (randn(gen, *s, dtype=dtype, device=device) for s in (shape, (9, 7), (9,)))

    def results(fn):
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        out = fn(*leaves)
        return [out.detach(), *torch.autograd.grad(out.float().sum(), leaves)]

    def product(x, weight, bias):
        out = torch_gpukern.gemm(
            x if x.dim() > 1 else x[None], weight.mT, bias, activation=activation
        )
        return out if x.dim() > 1 else out[0]

    def torch_linear(*leaves):
        return reference.ACTIVATIONS[activation](F.linear(*leaves))

    got = results(lambda *leaves: linear(*leaves, activation=activation))
    tolerance = 1e-5 if dtype is torch.float32 else 0.1
    for one, same, near in zip(got, results(product), results(torch_linear), strict=True):
        assert same_bits(one, same) and torch.allclose(one, near, rtol=tolerance, atol=tolerance)


def test_it_takes_the_place_of_a_layer(device):
    layer = torch.nn.Linear(6, 4).to(device)
    x = torch.rand(3, 6, device=device)
    assert torch.allclose(linear(x, layer.weight, layer.bias), layer(x), atol=1e-6)
    assert torch.allclose(linear(x, layer.weight), F.linear(x, layer.weight), atol=1e-6)
    compiled = torch.compile(
        lambda x: linear(x, layer.weight, layer.bias, activation="silu"),
        fullgraph=True,
        backend="aot_eager",
    )
    assert torch.allclose(compiled(x), F.silu(layer(x)), atol=1e-6)
    torch._dynamo.reset()


class Quantised(torch.Tensor):
    """Knows F.linear by itself, as quantised weights do."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is F.linear:
            x, weight, *bias = args
            return F.linear(x, 2 * weight.as_subclass(torch.Tensor), *bias)
        return super().__torch_function__(function, types, args, kwargs or {})


class Plain(torch.Tensor):
    pass


def test_a_subclass_that_has_a_linear_is_asked(device):
    x, weight, bias = (torch.rand(*s, device=device) for s in ((3, 6), (4, 6), (4,)))
    got = linear(x, weight.as_subclass(Quantised), bias, activation="gelu")
    assert torch.allclose(got, F.gelu(F.linear(x, 2 * weight, bias)))
    assert torch.allclose(
        linear(x, weight.as_subclass(Plain), bias).as_subclass(torch.Tensor),
        F.linear(x, weight, bias),
    )
    with pytest.raises(ValueError, match="gpukern::linear: activation must be none, relu"):
        linear(x, weight.as_subclass(Quantised), bias, activation="swish")


@pytest.mark.parametrize("x,weight,text", [
    ((3, 6), (4, 5), "weight has 5 columns, x has 6; they must match"),
    ((3, 6), (6,), "x must have at least 1 dimension and weight 2, [N, K]; got 2 and 1"),
    ((), (4, 6), "x must have at least 1 dimension and weight 2, [N, K]; got 0 and 2"),
])  # fmt: skip
def test_errors(x, weight, text):
    with pytest.raises(ValueError) as caught:
        linear(torch.ones(x), torch.ones(weight))
    assert str(caught.value) == f"gpukern::linear: {text}"


@pytest.mark.parametrize(
    "k,n,added", ((64, 128, None), (64, 128, "whole"), (64, 128, "row"), (16, 8, None))
)
@pytest.mark.parametrize("order", ((1, 0, 2), (2, 0, 1, 3), (1, 0, 2, 3)))
def test_a_permuted_batch_is_one_product(order, k, n, added, device):
    """A permuted batch, such as a transposed activation, is copied and computed as one product if
    that costs less than many small ones. Then it has as many tasks as a dense a. Values and
    gradients are right in any case.
    """
    gen = generator("permuted", order, k)
    dims = (3, 40, 5)[: len(order) - 1]
    x = randn(gen, *dims, k, device=device).permute(*order)
    w = randn(gen, n, k, device=device)
    c = (
        None
        if added is None
        else randn(gen, *(x.shape[:-1] if added == "whole" else (1,)), n, device=device)
    )
    dense = x.contiguous()
    assert not x.is_contiguous()
    found = [torch_gpukern.explain("gemm", y, w.mT, c=c) for y in (x, dense)]
    if device == "cpu":
        assert (found[0]["tasks"] == found[1]["tasks"]) == (n >= 64), found
    results = []
    for y in (x, dense):
        y, v = y.detach().requires_grad_(), w.detach().requires_grad_()
        out = torch_gpukern.gemm(y, v.mT, c=c)
        assert out.is_contiguous()
        grads = torch.autograd.grad(out, (y, v), out.detach().cos())
        results.append((out.detach(), *grads))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_rows_in_the_order_in_which_they_lie():
    """The gradient of a weight sums over all rows. If activation and gradient are stored in the
    same order, neither is copied."""
    x, g = torch.randn(4, 6, 8).transpose(0, 1), torch.randn(4, 6, 3).transpose(0, 1)
    for tensors, copied in (
        ((x, g), (False, False)),
        ((x.contiguous(), g), (False, True)),
        ((x, g.contiguous()), (True, False)),
    ):
        rows = parallel.as_rows(*tensors)
        assert [r.data_ptr() != t.data_ptr() for r, t in zip(rows, tensors)] == list(copied)
        torch.testing.assert_close(rows[0].mT @ rows[1], torch.einsum("abk,abn->kn", x, g))
    assert [r.shape for r in parallel.as_rows(x[:0], g[:0])] == [(0, 8), (0, 3)]


def test_the_gradient_of_a_permuted_activation_is_one_product():
    """It is not a batch of products that is summed afterwards, whichever of the two is permuted."""
    w = torch.randn(16, 8, requires_grad=True)
    for x in (torch.randn(4, 6, 8).transpose(0, 1), torch.randn(6, 4, 8)):
        for g in (torch.randn(4, 6, 16).transpose(0, 1), torch.randn(6, 4, 16)):
            out = torch_gpukern.linear(x, w)
            with torch.profiler.profile(record_shapes=True) as run:
                (got,) = torch.autograd.grad(out, w, g)
            shapes = [e.input_shapes[:2] for e in run.events() if e.name == "gpukern::gemm"]
            assert [len(s) for call in shapes for s in call] == [2, 2], shapes
            torch.testing.assert_close(got, torch.einsum("abn,abk->nk", g, x), rtol=1e-5, atol=1e-5)
