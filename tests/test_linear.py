# SPDX-License-Identifier: BSD-3-Clause
"""linear is F.linear and an activation."""

import pytest
import torch
import torch.nn.functional as F
from conftest import ACTIVATIONS, generator, randn, reference, same_bits, torch_gpukern

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
        out = torch_gpukern.gemm(x if x.dim() > 1 else x[None], weight.mT, bias, activation=activation)
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
        lambda x: linear(x, layer.weight, layer.bias, activation="silu"), fullgraph=True, backend="aot_eager"
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
        linear(x, weight.as_subclass(Plain), bias).as_subclass(torch.Tensor), F.linear(x, weight, bias)
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
