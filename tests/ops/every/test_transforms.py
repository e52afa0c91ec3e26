# SPDX-License-Identifier: BSD-3-Clause
"""torch.func over every op of the registry: grad, vjp, jacrev, vmap and their combinations."""

import warnings

import pytest
import torch
from conftest import ops, same_bits, torch_gpukern
from registry import IN_PLACE, OPS, VARIANTS, drawn, public

DIFFERENTIABLE = [(name, variant) for name, variant in VARIANTS if OPS[name].gradients]
BATCHED = [
    (name, variant) for name, variant in VARIANTS if name not in IN_PLACE | {"rope_kv_write"}
]
COPIES = 3


@pytest.fixture(autouse=True)
def _no_slow_loop():
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "error", message=".*performance drop because we have not yet implemented.*"
        )
        yield


def leaves_of(name: str, call: dict) -> list[str]:
    return [n for n in OPS[name].gradients if n in call]


def loss_of(name: str, call: dict, fn=None):
    """(a function of the arguments that have a gradient, those): the sum of all results, each times
    what makes it count."""
    names = leaves_of(name, call)
    fn = public(name) if fn is None else fn

    def loss(*leaves):
        results = fn(**call | dict(zip(names, leaves, strict=True)))
        results = results if isinstance(results, tuple) else (results,)
        return sum(
            (r * (1 + torch.arange(r.numel(), dtype=r.dtype, device=r.device).view(r.shape))).sum()
            for r in results
        )

    return loss, [call[n] for n in names]


def wanted(loss, leaves):
    leaves = [x.clone().requires_grad_() for x in leaves]
    return torch.autograd.grad(loss(*leaves), leaves)


@pytest.mark.parametrize("name,variant", DIFFERENTIABLE)
def test_grad_and_vjp(name, variant, device):
    """The public function, the op, its overload and the raw op give the bits of autograd."""
    call = drawn(name, variant, device)
    packet = getattr(ops, name)
    every = [getattr(ops, OPS[name].raw)] if OPS[name].raw and name != "gemm" else []
    for fn in (public(name), packet, packet.default, *every):
        loss, leaves = loss_of(name, call, fn)
        want = wanted(loss, leaves)
        places = tuple(range(len(leaves)))
        for got, x in zip(torch.func.grad(loss, argnums=places)(*leaves), want, strict=True):
            assert same_bits(got, x)
        out, pull = torch.func.vjp(loss, *leaves)
        for got, x in zip(pull(torch.ones_like(out)), want, strict=True):
            assert same_bits(got, x)


@pytest.mark.parametrize("name,variant", DIFFERENTIABLE)
def test_jacrev(name, variant, device):
    call = drawn(name, variant, device)
    names = leaves_of(name, call)

    def few(x):
        result = public(name)(**call | {names[0]: x})
        return (result[0] if isinstance(result, tuple) else result).flatten()[:4]

    x = call[names[0]]
    assert torch.allclose(
        torch.func.jacrev(few)(x),
        torch.autograd.functional.jacobian(few, x),
        rtol=1e-12,
        atol=1e-12,
    )


def batches(name: str, variant: str, device: str):
    """(arguments of COPIES calls, which of them have the extra dimension): all floating-point
    tensors, and each alone."""
    many = drawn(name, variant, device, copies=COPIES)
    floating = [n for n, x in many.items() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    for chosen in (floating, *([n] for n in floating)):
        yield {n: x[0] if n in floating and n not in chosen else x for n, x in many.items()}, chosen


def one_of(call: dict, chosen: list[str], i: int) -> dict:
    return {n: x[i] if n in chosen else x for n, x in call.items()}


def as_tuple(x) -> tuple:
    return x if isinstance(x, tuple) else (x,)


@pytest.mark.parametrize("name,variant", BATCHED)
def test_vmap_is_the_calls_one_by_one(name, variant, device):
    """vmap equals the calls one by one, whichever arguments have the dimension, and gives no
    warning of a slow loop."""
    for call, chosen in batches(name, variant, device):
        for fn in (public(name), getattr(ops, OPS[name].raw or name)):

            def run(values, fn=fn, call=call):
                return fn(**call | values)

            got = as_tuple(torch.vmap(run)({n: call[n] for n in chosen}))
            want = zip(
                *(as_tuple(fn(**one_of(call, chosen, i))) for i in range(COPIES)), strict=True
            )
            for x, y in zip(got, want, strict=True):
                assert torch.allclose(x, torch.stack(y), rtol=1e-12, atol=1e-12, equal_nan=True), (
                    chosen
                )


@pytest.mark.parametrize("name,variant", BATCHED)
def test_vmap_of_no_call(name, variant, device):
    """An empty result of the right shape and dtype, as PyTorch's own ops give."""
    for call, chosen in batches(name, variant, device):
        # its mean divides two scalars, of which torch's own vmap takes no batch of 0
        if name == "cross_entropy":
            call |= {"reduction": "none"}
        run = lambda values, call=call: public(name)(**call | values)  # noqa: E731
        got = as_tuple(torch.vmap(run)({n: call[n][:0] for n in chosen}))
        for x, y in zip(got, as_tuple(run({n: call[n][0] for n in chosen})), strict=True):
            assert x.shape == (0, *y.shape) and x.dtype == y.dtype, chosen


@pytest.mark.parametrize("sinks", (False, True))
@pytest.mark.parametrize(
    "chosen", (("q_start",), ("q", "q_start"), ("q", "k", "v", "kv_start", "q_start")), ids=str
)
def test_vmap_over_places(chosen, sinks, device):
    """vmap over q_start. With sinks, which have no batch dimension, the calls are made one by
    one."""
    call = drawn("flash_attn", "sinks, places" if sinks else "places", device)
    call.setdefault("kv_start", torch.tensor([0, 1], dtype=torch.int32, device=device))
    many = {n: torch.stack([call[n]] * COPIES) for n in chosen}
    for x in many.values():
        step = torch.arange(COPIES, device=device).view(-1, *[1] * (x.dim() - 1))
        x += step.to(x.dtype)

    def run(values):
        return torch_gpukern.flash_attn(**call | values, return_lse=True)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*performance drop.*")
        got = torch.vmap(run)(many)
    want = zip(*(run(one_of(many, list(many), i)) for i in range(COPIES)), strict=True)
    for x, y in zip(got, want, strict=True):
        assert torch.allclose(x, torch.stack(y), rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("dim", (1, -1))
def test_vmap_of_another_dimension(dim, device):
    a, b = torch.rand(3, 4, 5, device=device).double(), torch.rand(5, 6, device=device).double()
    got = torch.vmap(lambda x: torch_gpukern.gemm(x, b), in_dims=dim, out_dims=1)(a.movedim(0, dim))
    assert torch.allclose(got, (a @ b).movedim(0, 1))


@pytest.mark.parametrize("name,variant", DIFFERENTIABLE)
def test_gradients_of_each_sample(name, variant, device):
    """vmap of grad, with and without grad of vmap around it."""
    for call, chosen in batches(name, variant, device):
        names = leaves_of(name, call)

        def loss(values, call=call, names=names):
            return loss_of(name, call | values)[0](*(values.get(n, call[n]) for n in names))

        batched = {n: call[n] for n in chosen if n in names}
        rest = {n: call[n] for n in chosen if n not in names}
        if not batched:
            continue
        got = torch.vmap(lambda x, y: torch.func.grad(lambda z: loss(z | y))(x))(batched, rest)

        def total(x, rest=rest, loss=loss):
            return torch.vmap(lambda z, y: loss(z | y))(x, rest).sum()

        through = torch.func.grad(total)(batched)
        for i in range(COPIES):
            one = one_of(call, chosen, i)
            f, leaves = loss_of(name, one)
            want = dict(zip(names, wanted(f, leaves), strict=True))
            for n in batched:
                assert torch.allclose(got[n][i], want[n], rtol=1e-10, atol=1e-10), (n, chosen)
                assert torch.allclose(through[n][i], want[n], rtol=1e-10, atol=1e-10), (n, chosen)


def test_second_derivatives(device):
    """gemm has second derivatives; attention refuses them by name."""
    a, b = torch.rand(3, 8, device=device).double(), torch.rand(8, 8, device=device).double()

    def twice(fn):
        return torch.func.grad(
            lambda x: torch.func.grad(lambda y: fn(y).square().sum())(x).square().sum()
        )(a)

    assert torch.allclose(twice(lambda x: torch_gpukern.gemm(x, b)), twice(lambda x: x @ b))
    silu = twice(lambda x: torch.nn.functional.silu(x @ b))
    assert torch.allclose(twice(lambda x: torch_gpukern.gemm(x, b, activation="silu")), silu)
    with pytest.raises(
        NotImplementedError, match="gpukern::flash_attn: it is not twice differentiable"
    ):
        twice(lambda x: torch_gpukern.flash_attn(*(x[None, None],) * 3))


def test_what_has_no_gradient_says_so(device):
    slopes = torch.rand(4, device=device).double()
    call = drawn("flash_attn", "", device)
    with pytest.raises(
        ValueError, match="gpukern::flash_attn: alibi_slopes requires a gradient and has none"
    ):
        torch.func.grad(lambda x: torch_gpukern.flash_attn(**call, alibi_slopes=x).sum())(slopes)
    call = drawn("paged_attn", "", device)
    with pytest.raises(NotImplementedError, match="gpukern::paged_attn: it has no backward"):
        torch.func.grad(lambda q: torch_gpukern.paged_attn(**call | {"q": q}).sum())(call["q"])
    with pytest.raises(NotImplementedError, match="gpukern::gemm_fwd has no backward"):
        torch.func.grad(lambda a: ops.gemm_fwd(a, a.mT)[0].sum())(slopes[None])


def test_autocast_casts_under_a_transform(device):
    a, b = torch.rand(3, 4, device=device), torch.rand(4, 5, device=device)

    def loss(a, b):
        with torch.autocast(device, torch.bfloat16):
            out = torch_gpukern.gemm(a, b, activation="silu")
        assert out.dtype == torch.bfloat16
        return out.float().sum()

    for got, want in zip(
        torch.func.grad(loss, argnums=(0, 1))(a, b), wanted(loss, (a, b)), strict=True
    ):
        assert got.dtype == torch.float32 and same_bits(got, want)


@pytest.mark.parametrize("name", ("gemm", "flash_attn"))
def test_compiled_transforms(name, device):
    """In one graph."""
    call = drawn(name, "", device, dtype=torch.float32)
    loss, leaves = loss_of(name, call)
    torch._dynamo.reset()
    got = torch.compile(torch.func.grad(loss), backend="aot_eager", fullgraph=True)(*leaves)
    assert torch.allclose(got, wanted(loss, leaves)[0], rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()


def test_gradients_of_each_sample_of_a_model(device):
    """torch's recipe: functional_call, grad, vmap over the samples."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = torch.nn.Parameter(torch.randn(16, 48).double() * 0.3)
            self.out = torch.nn.Linear(16, 16).double()

        def forward(self, x):
            q, k, v = torch_gpukern.gemm(x, self.qkv).view(1, -1, 3, 2, 8).permute(2, 0, 3, 1, 4)
            rows = torch_gpukern.flash_attn(q, k, v, is_causal=True).transpose(1, 2).reshape(-1, 16)
            return torch_gpukern.gemm(rows, self.out.weight.mT, self.out.bias, activation="gelu")

    torch.manual_seed(0)
    block = Block().to(device)
    parameters = {n: p.detach() for n, p in block.named_parameters()}
    samples = torch.randn(5, 6, 16, device=device).double()

    def loss(parameters, x):
        return torch.func.functional_call(block, parameters, (x,)).square().sum()

    got = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, samples)
    for i, x in enumerate(samples):
        want = torch.autograd.grad(block(x).square().sum(), tuple(block.parameters()))
        for (n, _), y in zip(block.named_parameters(), want, strict=True):
            assert torch.allclose(got[n][i], y, rtol=1e-10, atol=1e-10), n
