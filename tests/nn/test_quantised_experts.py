# SPDX-License-Identifier: BSD-3-Clause
"""Experts in few bits against a loop over tokens with the decoded weights in float64."""

import copy
import pickle

import pytest
import torch
from conftest import generator, randn
from tiny_models import MIXTURE, causal_lm

from torch_gpukern import nn as gnn
from torch_gpukern.nn.quant.experts import SERVED, PackedExperts, pack_experts, side_by_side
from torch_gpukern.nn.quant.schemes import SCHEMES

EXPERTS, N, K = 5, 72, 160  # N is no multiple of a tile, K of no group but 16 and 32


def relative(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


# what rounding activations (or a result in bfloat16) adds, over the root mean square
MOST = {"fp8": 0.04, "fp8-block": 0.04, "int8": 0.015}


def packed_of(recipe, gen, dtype=torch.float32, experts=EXPERTS, n=N, k=K):
    w = randn(gen, experts, n, k).to(dtype)
    return w, PackedExperts(recipe, pack_experts(recipe, w), (experts, k, n))


def sorted_rows(gen, rows, dtype, experts=EXPERTS, k=K):
    x = randn(gen, rows, k).to(dtype)
    which = torch.randint(experts, (rows,), generator=gen).sort().values
    ends = torch.searchsorted(which, torch.arange(experts), right=True, out_int32=True)
    return x, which, ends


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("recipe", SERVED)
def test_products(recipe, dtype, device):
    """Against the decoded weight, which is the one that the recipe has for a plain layer. nvfp4 has
    one global scale for all experts, so it is judged by its error."""
    gen = generator("expert products", recipe)
    w, packed = packed_of(recipe, gen, dtype)
    for e in range(EXPERTS):
        plain = SCHEMES[recipe].decode(SCHEMES[recipe].pack(w[e]), N, K, torch.float32)
        if recipe == "nvfp4":
            assert relative(packed.decoded()[e], w[e]) < 1.01 * relative(plain, w[e])
        else:
            assert torch.equal(packed.decoded()[e], plain)
    for rows in (23, 300):
        x, which, ends = sorted_rows(gen, rows, dtype)
        bias = randn(gen, EXPERTS, N).to(dtype)
        w64 = packed.decoded(torch.float64)
        want = torch.stack(
            [w64[e] @ row.double() + bias[e].double() for row, e in zip(x, which, strict=True)]
        )
        tensors = {name: t.to(device) for name, t in packed.tensors.items()}
        there = PackedExperts(recipe, tensors, packed.shape)
        got = there.times(x.to(device), ends.to(device), bias.to(device))
        assert got.dtype is dtype and got.shape == (rows, N)
        # 16-bit activations, and weights rounded to 16 bits
        assert relative(got.cpu(), want) < MOST.get(recipe, 6e-3)
        each = (got.cpu().double() - want).norm(dim=1) / want.norm(dim=1)
        assert each.max() < 2 * MOST.get(recipe, 6e-3)


@pytest.mark.parametrize("recipe", ("w4", "w4-zero", "w8", "mxfp4", "nvfp4"))
def test_experts_without_rows_do_not_count(recipe, device):
    """NaN in the scales of experts that have no rows does not show."""
    gen = generator("small m", recipe)
    _, packed = packed_of(recipe, gen, torch.bfloat16, experts=16)
    x, which, ends = sorted_rows(gen, 3, torch.bfloat16, experts=16)
    packed.tensors.update({n: t.to(device) for n, t in packed.tensors.items()})
    x, ends = x.to(device), ends.to(device)
    bias = randn(gen, 16, N).bfloat16().to(device)
    want = packed.times(x, ends, bias)
    scale = packed.tensors["weight_scale"]
    others = [e for e in range(16) if e not in which.tolist()]
    nan = {"mxfp4": 255, "nvfp4": 127}.get(recipe)
    at = (scale if nan is None else scale.view(torch.uint8)).unflatten(1, (16, -1))
    at[:, others] = float("nan") if nan is None else nan
    assert torch.equal(packed.times(x, ends, bias), want) and want.isfinite().all()


def test_nvfp4_experts_of_different_global_scales(device):
    """As other tools write them: the decoded weights have the same values, in float32 scales. A
    state with such scales is loaded into a module of either form."""
    gen = generator("global scales")
    parts = [SCHEMES["nvfp4"].pack(randn(gen, 128, K) * 3.0**e) for e in range(3)]
    assert len({p["weight_global_scale"].item() for p in parts}) == 3
    packed = PackedExperts("nvfp4", side_by_side("nvfp4", parts), (3, K, 128))
    assert packed.tensors["weight_scale"].dtype is torch.float32
    assert packed.tensors["weight_global_scale"] == 1
    for e, part in enumerate(parts):
        want = SCHEMES["nvfp4"].decode(part, 128, K, torch.float64)
        assert relative(packed.decoded(torch.float64)[e], want) < 1e-6
    alike = [part | {"weight_global_scale": torch.ones(())} for part in parts]
    assert side_by_side("nvfp4", alike)["weight_scale"].dtype is torch.float8_e4m3fn
    mixed = [alike[0], packed._slice(1, 1)]
    assert side_by_side("nvfp4", mixed)["weight_scale"].dtype is torch.float32

    layer = moe(torch.bfloat16)
    gnn.quantize(layer, "nvfp4", skip=("router",), say=None)
    x = randn(generator("nvfp4 state"), 4, K).bfloat16()
    with torch.no_grad():
        want = layer(x)
        wide = layer.state_dict()
        for name in ("gate_up_proj", "down_proj"):
            scale, whole = (wide[f"{name}_{part}"] for part in ("scale", "global_scale"))
            wide[f"{name}_scale"] = scale.float() * whole
            wide[f"{name}_global_scale"] = torch.ones(())
        other = moe(torch.bfloat16)
        gnn.quantize(other, "nvfp4", skip=("router",), say=None)
        other.load_state_dict(wide)
        assert other.state_dict()["down_proj_scale"].dtype is torch.float32
        assert relative(other(x), want) < 5e-3
        other.load_state_dict(layer.state_dict())
        assert torch.equal(other(x), want)


@pytest.mark.parametrize("k", (64, 256, 200, 40, 16))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("recipe", ("w4", "w8", "w4-zero", "mxfp4", "nvfp4"))
def test_decoding_rounds_once(recipe, dtype, k, device):
    """The decoder has the bits of the recipe's own, with groups of every size."""
    w = randn(generator("decode", recipe, k), 2, 64, k) * 2.0 ** torch.randint(
        -9, 9, (2, 64, 1), generator=generator("decode scales")
    )
    made = pack_experts(recipe, w)
    for scales in (torch.bfloat16, torch.float32):
        for size in (16, 32, 64, 128, 256, k):
            tensors = dict(made)
            if recipe not in ("mxfp4", "nvfp4"):
                count = 1 if size == k else -(-k // size)
                gen = generator("decode groups", size, k)
                tensors["weight_scale"] = (torch.rand(count, 128, generator=gen) + 0.1).to(scales)
            if recipe == "w4-zero":
                tensors["weight_zero"] = torch.randint(16, (count, 128), generator=gen).byte()
            tensors = {n: t.to(device) for n, t in tensors.items()}
            packed = PackedExperts(recipe, tensors, (2, k, 64))
            want = SCHEMES[recipe].decode(tensors, 128, k, dtype).view(2, 64, k)
            assert torch.equal(packed.decoded(dtype), want)


def moe(dtype=torch.float32, activation="silu"):
    torch.manual_seed(0)
    return gnn.MoE(K, 72, EXPERTS, 2, activation=activation, dtype=dtype)


def loop(layer, x):
    """Token by token, in float64, with the decoded weights."""
    up, down = (p.decoded(torch.float64) for p in layer._matrices())
    rows = x.double().reshape(-1, K)
    logits = (x.reshape(-1, K).to(layer.router.weight.dtype) @ layer.router.weight.mT).double()
    p, e = logits.softmax(-1).topk(2, -1)
    p = p / p.sum(-1, keepdim=True)
    act = {"silu": torch.nn.functional.silu, "relu": torch.relu}[layer.activation]
    out = []
    for t, row in enumerate(rows):
        total = 0
        for j in range(2):
            gate, value = (up[e[t, j]] @ row).chunk(2)
            total = total + p[t, j] * (down[e[t, j]] @ (act(gate) * value))
        out.append(total)
    return torch.stack(out).reshape(x.shape)


@pytest.mark.parametrize("activation", ("silu", "relu"))
@pytest.mark.parametrize("recipe", SERVED)
def test_moe(recipe, activation):
    layer = moe(activation=activation)
    before = copy.deepcopy(layer)
    done = gnn.quantize(layer, recipe, skip=("router",), say=None)
    assert done.replaced == {"": recipe} and isinstance(layer, gnn.MoE)
    assert set(layer._parameters) == set() and done.counted() == "1 MoE"
    x = randn(generator("quantised moe", recipe), 2, 9, K)
    with torch.no_grad():
        got, logits = layer(x, return_logits=True)
        assert torch.equal(layer(x), got) and logits.shape == (2, 9, EXPERTS)
        want = loop(layer, x)
    # activations in e4m3 twice; or in bfloat16
    assert relative(got, want) < (0.06 if recipe in MOST else 1e-2)
    done.restore()
    assert type(layer) is gnn.MoE and list(layer._parameters) == list(before._parameters)
    assert torch.equal(layer(x), before(x))


@pytest.mark.parametrize("recipe", SERVED)
def test_gradient_of_the_input(recipe, monkeypatch):
    """Straight through the rounding: the gradient of experts with the decoded weights."""
    layer = moe()
    gnn.quantize(layer, recipe, skip=("router",), say=None)
    x = randn(generator("experts' gradient"), 11, K)
    grad = randn(generator("experts' gradient", 1), 11, K)
    plain = moe().double()
    plain.router.weight.data = layer.router.weight.detach().double()
    for name in ("gate_up_proj", "down_proj"):
        getattr(plain, name).data = layer.packed(name).decoded(torch.float64)
    given = x.clone().requires_grad_()
    out = layer(given)
    out.backward(grad)
    # the router sees the same rows; its gradient is part of x's
    reference = x.double().requires_grad_()
    p, e = torch.topk(torch.softmax(plain.router(reference), -1), 2)
    p = p / p.sum(-1, keepdim=True)
    rows = []
    for t in range(11):
        total = 0
        for j in range(2):
            gate, value = (plain.gate_up_proj[e[t, j]] @ reference[t]).chunk(2)
            total = total + p[t, j] * (
                plain.down_proj[e[t, j]] @ (torch.nn.functional.silu(gate) * value)
            )
        rows.append(total)
    torch.stack(rows).backward(grad.double())
    assert relative(given.grad, reference.grad) < (0.06 if recipe in MOST else 1e-2)


def test_gradient_of_a_bias():
    gen = generator("experts' bias")
    _, packed = packed_of("w4", gen)
    x, which, ends = sorted_rows(gen, 13, torch.float32)
    bias = randn(gen, EXPERTS, N).requires_grad_()
    grad = randn(gen, 13, N)
    packed.times(x, ends, bias).backward(grad)
    want = torch.zeros(EXPERTS, N).index_add_(0, which, grad)
    torch.testing.assert_close(bias.grad, want)


@pytest.mark.parametrize("recipe", SERVED)
def test_states_pickles_and_dtypes(recipe, tmp_path):
    layer = moe(torch.bfloat16)
    gnn.quantize(layer, recipe, skip=("router",), say=None)
    x = randn(generator("experts' state"), 4, K).bfloat16()
    with torch.no_grad():
        want = layer(x)
    other = moe(torch.bfloat16)
    gnn.quantize(other, recipe, skip=("router",), say=None)
    other._apply(torch.zeros_like)
    other.load_state_dict(layer.state_dict())
    for one in (other, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(one) is type(layer)
        with torch.no_grad():
            assert torch.equal(one(x), want)
    assert layer.state_dict()["gate_up_proj_scale"].dtype is not torch.uint8
    kept = {n: t.clone() for n, t in layer.named_buffers()}
    layer.to(torch.float16)
    assert all(
        torch.equal(t, kept[n]) and t.dtype is kept[n].dtype for n, t in layer.named_buffers()
    )
    wrong = "fp8" if recipe != "fp8" else "w8"
    third = moe(torch.bfloat16)
    gnn.quantize(third, wrong, skip=("router",), say=None)
    with pytest.raises(
        ValueError, match=f"the state is of recipe {recipe}, the layer is of {wrong}"
    ):
        third.load_state_dict(layer.state_dict())


@pytest.mark.parametrize("recipe", SERVED)
def test_torch_func(recipe):
    """Gradients and per-sample gradients by torch.func equal those of autograd."""
    layer = moe()
    gnn.quantize(layer, recipe, say=None, skip=("router",))
    x = randn(generator("func", recipe), 3, 5, layer.hidden_size)
    parameters = dict(layer.named_parameters())

    def loss(parameters, t):
        return torch.func.functional_call(layer, parameters, (t,)).square().sum()

    each = torch.vmap(torch.func.grad(loss, argnums=(0, 1)), (None, 0))(parameters, x)
    alone = torch.func.grad(loss, argnums=(0, 1))(parameters, x[0])
    for i, t in enumerate(x):
        t = t.clone().requires_grad_()
        wanted = torch.autograd.grad(loss(parameters, t), [*parameters.values(), t])
        got = [*(g[i] for g in each[0].values()), each[1][i]]
        for a, b in zip(got, wanted, strict=True):
            assert relative(a, b) < 1e-5
        if i == 0:
            for a, b in zip([*alone[0].values(), alone[1]], wanted, strict=True):
                assert relative(a, b) < 1e-5


def test_what_is_left_and_why(capsys):
    model = torch.nn.Sequential(torch.nn.Linear(K, K), moe())
    done = gnn.quantize(model, "mxfp8", skip=("1.router",))
    out = capsys.readouterr().out
    have = "fp8, fp8-block, int8, w4, w8, w4-zero, mxfp4, nvfp4"
    assert f"gpukern: 1 left: experts have the recipes {have}" in out
    assert done.replaced == {"0": "mxfp8"}
    done = gnn.quantize(model, "w4", skip=("0", "1"), say=None)
    assert done.skipped["1"] == "skipped" and done.skipped["0"] == "it is mxfp8 already"
    spread = moe()
    spread.multiply = lambda *_: None
    done = gnn.quantize(spread, "w4", skip=("router",), say=None)
    assert done.skipped[""] == "its experts are spread over ranks"
    both = torch.nn.Sequential(torch.nn.Linear(K, K), moe())
    assert gnn.quantize(both, "w4", say=None).counted() == "2 Linear and 1 MoE"
    assert gnn.quantize(both, "fp8", say=None).skipped["1"] == "it is w4 already"


@pytest.mark.parametrize("recipe", ("fp8", "int8", "w4"))
def test_dropped_tokens_and_no_tokens(recipe):
    """A token of no expert may hold NaN; no token at all gives an empty result."""
    gen = generator("dropped", recipe)
    up = packed_of(recipe, gen, n=2 * N)[1]
    down = packed_of(recipe, gen, n=K, k=N)[1]
    x = randn(gen, 6, K)
    e = torch.tensor([[0, 1], [-1, 5], [4, 1], [1, -1], [-1, 0], [2, 2]])
    p = torch.rand(6, 2, generator=gen)
    want = gnn.grouped_experts(x, e, p, up, down)
    x[1] = float("nan")
    got = gnn.grouped_experts(x, e, p, up, down)
    assert torch.equal(got, want) and not got[1].any()
    assert gnn.grouped_experts(x[:0], e[:0], p[:0], up, down).shape == (0, K)


@pytest.mark.parametrize("recipe", ("fp8", "int8", "w4", "mxfp4", "nvfp4"))
def test_compile_without_a_break(recipe):
    layer = moe()
    gnn.quantize(layer, recipe, skip=("router",), say=None)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        for tokens in (4, 7):
            x = randn(generator("quantised moe compiled", tokens), tokens, K)
            assert relative(compiled(x), layer(x)) < 1e-2


@pytest.mark.parametrize("family", ("qwen3_moe", "gpt_oss", "mixtral"))
@pytest.mark.parametrize("recipe", ("fp8", "int8", "w4", "mxfp4", "nvfp4"))
def test_transformers(family, recipe):
    """The model's logits beside those of the same model with the decoded weights."""
    pytest.importorskip("transformers", minversion="5.10")
    model = causal_lm(family, dtype=torch.float32, **MIXTURE, vocab_size=32, pad_token_id=0)
    plain = copy.deepcopy(model)
    done = gnn.quantize(model, recipe, skip=lambda name, _: not name.endswith("experts"), say=None)
    assert len(done.replaced) == 2
    for name, module in model.named_modules():
        if name.endswith("experts"):
            for weight in module.shapes:
                w = module.packed(weight).decoded()
                target = plain.get_submodule(name)
                getattr(target, weight).data = w.mT if target.is_transposed else w
    plain.set_experts_implementation("eager")
    ids = torch.arange(22).view(2, 11) % 32
    with torch.no_grad():
        got, want = model(ids).logits, plain.double()(ids).logits
    # of most tokens: a rounding sends a token now and then to another expert
    rows = (got.double() - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-9)
    assert rows.median() < {"fp8": 0.05, "int8": 0.03}.get(recipe, 1e-2)
    done.restore()
    with torch.no_grad():
        assert model(ids).logits.isfinite().all()
