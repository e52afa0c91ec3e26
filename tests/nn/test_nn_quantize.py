# SPDX-License-Identifier: BSD-3-Clause
"""torch_gpukern.nn.quantize: every recipe against its own decoded weight; states, dtypes of
devices, training.
"""

import copy
import math
import pickle
import warnings

import pytest
import torch
from conftest import assert_bits, generator, randn
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_gpukern
from torch_gpukern import nn as gnn
from torch_gpukern.nn.quant.schemes import SCHEMES, e2m1_round
from torch_gpukern.pickled import as_bytes

DEPLOYED = [r for r in gnn.RECIPES if r in SCHEMES]
# error of rounding normal values to each format, over the weight's root mean square; it follows
# from the steps of the format
MOST = {
    "fp8": 0.03,
    "fp8-block": 0.03,
    "mxfp8": 0.03,
    "fp8-static": 0.03,
    "int8": 0.011,
    "int8-static": 0.011,
    "w8": 0.011,
    "w4": 0.12,
    "w4-zero": 0.12,
    "mxfp4": 0.16,
    "nvfp4": 0.13,
    "2:4": 0.5,
    "2:4-fp8": 0.5,
}


def network(dtype=torch.float32):
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Linear(260, 70),
        nn.GELU(),
        nn.Linear(70, 64, bias=False),
        gnn.Linear(64, 40, activation="relu"),
    )
    return layers.to(dtype)


def relative(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("recipe", DEPLOYED)
def test_each_recipe(recipe, dtype):
    """The layer multiplies by the weight that it reports, and that weight is as near to the given
    one as its format allows."""
    layer = nn.Linear(260, 70).to(dtype)
    gen = generator("recipes", recipe)
    with torch.no_grad():
        layer.weight.copy_(randn(gen, 70, 260))
    before = copy.deepcopy(layer)
    x = (randn(gen, 3, 33, 260) + 0.1).to(dtype)
    done = gnn.quantize(layer, recipe, calibration=[x], say=None)
    assert relative(layer.decoded(), before.weight) < MOST[recipe]
    with torch.no_grad():
        got = layer(x)
    want = nn.functional.linear(x.double(), layer.decoded(torch.float64), before.bias.double())
    # the remaining error is the rounding of activations and of the result
    most = {
        "fp8": 0.04,
        "fp8-block": 0.04,
        "mxfp8": 0.04,
        "fp8-static": 0.04,
        "int8": 0.012,
        "int8-static": 0.012,
        "2:4-fp8": 0.04,
    }
    assert got.dtype is dtype and relative(got, want) < most.get(recipe, 0.006)
    grad = randn(gen, *got.shape).to(dtype)
    (dx,) = torch.autograd.grad(layer(x.requires_grad_()), x, grad)
    assert relative(dx, grad.double() @ layer.decoded(torch.float64)) < 0.01
    (db,) = torch.autograd.grad(layer(x), layer.bias, grad)
    torch.testing.assert_close(db, grad.float().sum((0, 1)).to(dtype))
    done.restore()
    assert type(layer) is nn.Linear and list(layer.state_dict()) == list(before.state_dict())
    assert_bits(layer.weight, before.weight)


@pytest.mark.parametrize("recipe", DEPLOYED)
def test_state_dict(recipe):
    """A state loads into a model of the same recipe, and the next result has the same bits. Casts
    leave codes unchanged."""
    x = randn(generator("states"), 5, 260)
    one = network()
    done = gnn.quantize(
        one, recipe, calibration=[x], skip=["0"] if "2:4" in recipe else [], say=None
    )
    assert set(done.skipped) == ({"0", "2"} if "2:4" in recipe else set())
    other = network()
    with torch.no_grad():
        other[3].weight.mul_(2)
        gnn.quantize(
            other, recipe, calibration=[x + 1], skip=["0"] if "2:4" in recipe else [], say=None
        )
        other.load_state_dict(one.state_dict())
        assert_bits(other(x), one(x))
        kept = {name: b.clone() for name, b in one.named_buffers()}
        one.to(torch.bfloat16).to(torch.float32)
    for name, b in one.named_buffers():
        assert b.dtype is kept[name].dtype and torch.equal(
            b.reshape(-1).view(torch.uint8), kept[name].reshape(-1).view(torch.uint8)
        ), name


def test_states_of_another_version_or_recipe_are_refused():
    one, other = network(), network()
    gnn.quantize(one, "w4", say=None), gnn.quantize(other, "w8", say=None)
    state = one.state_dict()
    with pytest.raises((ValueError, RuntimeError)):
        other.load_state_dict(state)
    for text, error in [
        (
            b"gpukern-weight 2 w4",
            "QuantizedLinear: the state is gpukern-weight of version 2, this gpukern reads "
            "version 1",
        ),
        (
            b"safe-weight 1 w4",
            "QuantizedLinear: the state is no gpukern-weight, it begins with 'safe-weight'",
        ),
        (b"gpukern-weight 1 w8", "QuantizedLinear: the state is of recipe w8, the layer is of w4"),
    ]:
        state["0._extra_state"] = torch.tensor(list(text), dtype=torch.uint8)
        with pytest.raises(ValueError, match=error):
            one.load_state_dict(state)


def test_in_place_printed_and_refused(capsys):
    model, said = network(), []
    first, seen = model[0], []
    first.register_forward_hook(lambda *_: seen.append(1))
    with gnn.quantize(model, "w4", skip=["2"], say=said.append) as done:
        assert (
            model[0] is first
            and isinstance(first, gnn.QuantizedLinear)
            and "recipe=w4, bits=" in repr(first)
        )
        assert said[0].startswith(
            "gpukern: 2 Linear -> w4 (int4 weights, a scale a 128): 0, 3; 0.1 -> 0.0 MiB"
        )
        assert (
            said[1:] == ["gpukern: 2 left: skipped"]
            and str(done) == "0: w4\n3: w4\n2: left, skipped"
        )
        model(torch.ones(2, 260))
        # the hook, and the activation of the last layer
        assert seen == [1] and (model(torch.randn(9, 260)) >= 0).all()
        assert first.weight.shape == (70, 260)
    assert type(model[0]) is nn.Linear and type(model[3]) is gnn.Linear
    encoder = nn.TransformerEncoderLayer(16, 2)
    assert (
        not gnn.quantize(encoder, "w8").replaced
        and "nothing to quantize" in capsys.readouterr().out
    )
    for run, error in [
        (lambda: gnn.quantize(model, "w3"), "recipe must be one of fp8, .*, got 'w3'"),
        (lambda: gnn.quantize(model, "int8-static"), "recipe int8-static needs calibration"),
        (
            lambda: gnn.quantize(model, "int8-static", calibration=[]),
            "calibrate: there is no batch",
        ),
        (lambda: done.finish(), "finish is for the recipes qat-"),
        (lambda: first(torch.ones(2, 260, dtype=torch.float64)), None),
    ]:
        if error:
            with pytest.raises(ValueError, match=error):
                run()
    gnn.quantize(model, "fp8", say=None)
    with pytest.raises(
        ValueError, match="QuantizedLinear: x must be float32, bfloat16 or float16, got float64"
    ):
        model(torch.ones(2, 260, dtype=torch.float64))
    with pytest.raises(
        ValueError, match="QuantizedLinear: x has 7 columns, the weight has 260; they must match"
    ):
        model(torch.ones(2, 7))
    again = gnn.quantize(model, "w4", say=said.append)
    assert not again.replaced and said[-4:-2] == [
        "gpukern: nothing to quantize",
        "gpukern: 0 left: it is fp8 already",
    ]
    gnn.quantize(nn.Linear(64, 64), "w4", say=said.append)
    assert ": the model; 0.0 -> 0.0 MiB" in said[-1]
    # the error text of the layer itself, not of what watches it
    with pytest.raises(TypeError, match="linear"):
        gnn.quantize(nn.Linear(64, 64), "int8-static", calibration=[1], say=None)


@pytest.mark.parametrize("recipe", ("fp8", "w4", "qat-w4"))
def test_shapes_without_numbers(recipe):
    """A layer on the meta device gives a result's shape in every dtype."""
    layer = torch.nn.Sequential(torch.nn.Linear(128, 64))
    gnn.quantize(layer, recipe, say=None)
    layer.to("meta")
    for dtype in (torch.float32, torch.bfloat16):
        out = layer(torch.empty(3, 128, dtype=dtype, device="meta"))
        assert out.shape == (3, 64) and out.dtype is dtype and out.is_meta


def test_a_scalar_is_refused():
    layer = torch.nn.Sequential(torch.nn.Linear(128, 64))
    gnn.quantize(layer, "w4", say=None)
    with pytest.raises(
        ValueError, match=r"QuantizedLinear: x must have shape \[.., 128\], got a scalar"
    ):
        layer(torch.tensor(1.0))


def test_calibration(capsys):
    model, gen = network(), generator("calibration")
    batches = [randn(gen, 4, 260) for _ in range(3)]
    model.train()
    seen = gnn.calibrate(model, batches)
    assert model.training and "calibrating" in capsys.readouterr().err
    x = torch.cat(batches)
    assert seen["0"].amax == x.abs().max()
    torch.testing.assert_close(seen["0"].square, x.square().mean(0))
    # columns without inputs cost nothing, so scales fit the others
    layer = nn.Linear(64, 32, bias=False)
    with torch.no_grad():
        layer.weight[:, 32:] *= 8
    used = torch.cat((randn(gen, 50, 32), torch.zeros(50, 32)), 1)
    want = layer(used).detach()
    errors = []
    for batches in (None, [used]):
        done = gnn.quantize(layer, "w4", calibration=batches, say=None)
        errors.append(relative(layer(used), want))
        done.restore()
    assert errors[1] < 0.75 * errors[0]


def test_fp4_rounds_to_the_nearest():
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    x = torch.linspace(-7, 7, 2049)
    x = x[((x.abs()[:, None] - (values[1:] + values[:-1]) / 2).abs() > 1e-6).all(1)]
    both = torch.cat((values, -values))
    assert torch.equal(e2m1_round(x), both[(x[:, None] - both).abs().argmin(1)])
    assert torch.equal(
        e2m1_round(torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])),
        torch.tensor([0.0, 1, 1, 2, 2, 4, 4]),
    )


def test_pruning():
    w = randn(generator("prune"), 6, 16)
    kept = gnn.prune_2_4(w)
    four = kept.unflatten(1, (-1, 4))
    assert ((four != 0).sum(-1) == 2).all()
    assert torch.equal(four.abs().sum(-1), w.abs().unflatten(1, (-1, 4)).topk(2, -1).values.sum(-1))
    weighted = gnn.prune_2_4(torch.ones(1, 4), torch.tensor([1.0, 3, 2, 4]))
    assert weighted.tolist() == [[0, 1, 0, 1]]
    with pytest.raises(
        ValueError, match="prune_2_4: w must be \\[N, K\\] with K a multiple of 4, got \\[1, 6\\]"
    ):
        gnn.prune_2_4(torch.ones(1, 6))


@pytest.mark.parametrize("scaling", ("current", "delayed"))
def test_fp8_linear(scaling):
    """The three products are those of the rounded operands. Delayed scales follow the sizes of
    earlier calls."""
    gen = generator("fp8", scaling)
    layer = gnn.Fp8Linear(48, 40, scaling=scaling, history=3)
    plain = nn.Linear(48, 40)
    plain.load_state_dict(
        {name: p for name, p in layer.state_dict().items() if "history" not in name}
    )
    for step in range(4):
        x = (randn(gen, 5, 7, 48) * (4 - step)).requires_grad_()
        grad = randn(gen, 5, 7, 40) * 1e-6  # too small for e5m2 without a scale
        got = torch.autograd.grad(layer(x), (x, *layer.parameters()), grad)
        want = torch.autograd.grad(plain(x), (x, *plain.parameters()), grad)
        for name, g, w in zip(("dx", "dw", "db"), got, want, strict=True):
            assert relative(g, w) < (0.12 if name != "db" else 1e-6), name
        assert relative(layer(x.detach()), plain(x)) < 0.06
        if scaling == "delayed":
            assert layer.history_x[0] == x.abs().max() and layer.history_grad[0] == grad.abs().max()
    if scaling == "delayed":
        before = layer.history_x.clone()
        layer.eval()(x)
        assert torch.equal(layer.history_x, before)
        infinite = layer.train()(torch.full((2, 48), float("inf")))
        assert not infinite.isfinite().all() and layer.history_x.isfinite().all()
    compiled = torch.compile(layer.eval(), fullgraph=True, backend="aot_eager")
    assert_bits(compiled(x.detach()), layer(x.detach()))


@pytest.mark.parametrize("reentrant", (False, True))
def test_delayed_scaling_under_checkpointing(reentrant, device):
    """The recomputation uses the scales of the first pass: the same bits as without checkpointing,
    and each call fills one place of the history."""
    torch.manual_seed(1)
    plain = nn.Sequential(
        gnn.Fp8Linear(32, 48, scaling="delayed", history=3),
        nn.GELU(),
        gnn.Fp8Linear(48, 32, scaling="delayed"),
    )
    plain.to(device)
    saving = copy.deepcopy(plain)
    gen = generator("checkpointed")
    for step in range(5):
        # two calls, then backward
        xs = [(randn(gen, 9, 32) * 3.0 ** (-step - part)).to(device) for part in range(2)]
        grads = []
        for model in (plain, saving):
            given = [x.clone().requires_grad_() for x in xs]
            run = lambda x, m=model: (  # noqa: E731
                m(x) if m is plain else checkpoint(m, x, use_reentrant=reentrant)
            )  # noqa: E731
            loss = sum(run(run(x)).square().sum() for x in given)
            grads.append(
                torch.autograd.grad(loss, given, retain_graph=True) if not reentrant else ()
            )
            model.zero_grad(), loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(0.01 * p.grad)
        for a, b in zip(*grads):
            assert_bits(a, b)
        for (name, a), b in zip(plain.named_parameters(), saving.parameters()):
            assert_bits(a.grad, b.grad), name
        for name, a in plain.named_buffers():
            assert_bits(a, saving.get_buffer(name)), name


def test_reset_parameters_of_a_delayed_layer():
    """to_empty and reset_parameters make a layer on the meta device equal to a new one."""
    layer = gnn.Fp8Linear(8, 8, scaling="delayed")
    for b in layer.buffers():
        b.fill_(1e30)
    layer.reset_parameters()
    assert all((b == 0).all() for b in layer.buffers())
    assert layer(torch.ones(2, 8)).isfinite().all()


def test_fp8_training_learns_and_is_undone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
    done = gnn.quantize(model, "fp8-train-delayed", say=None)
    x, y = randn(generator("learn"), 64, 32), randn(generator("learn y"), 64, 16)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad(), loss.backward(), optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    now = model[0].weight.clone()
    done.restore()
    assert (
        type(model[0]) is nn.Linear
        and torch.equal(model[0].weight, now)
        and not list(model.buffers())
    )


@pytest.mark.parametrize("recipe", [r for r in gnn.RECIPES if r.startswith("qat-")])
def test_qat(recipe):
    """A layer that is trained through the rounding is better than one that is rounded after
    training. The deployed layer equals the trained one."""
    torch.manual_seed(0)
    gen = generator("qat", recipe)
    layer = nn.Linear(130, 24).bfloat16()
    # correlated columns, so that roundings can compensate for one another; for independent columns
    # rounding to nearest is best
    x = (randn(gen, 256, 12) @ randn(gen, 12, 130) / 3.5 + 0.1 * randn(gen, 256, 130)).bfloat16()
    y = layer(x).detach().float()
    after = copy.deepcopy(layer)
    gnn.quantize(after, recipe.removeprefix("qat-"), say=None)
    done = gnn.quantize(layer, recipe, say=None)
    layer.float()
    optimizer = torch.optim.Adam(
        [{"params": [layer.weight]}, {"params": [layer.log_step]}], lr=3e-4
    )
    for i in range(60):
        optimizer.param_groups[0]["lr"] = 3e-4 * (1 - i / 60)
        loss = nn.functional.mse_loss(layer(x.float()), y)
        optimizer.zero_grad(), loss.backward()
        assert layer.log_step.grad.abs().sum() > 0
        optimizer.step()
    trained = layer(x.float()).detach()
    if recipe == "qat-w4":
        assert relative(trained, y) < 0.8 * relative(after(x), y)
    assert (
        done.finish() is done
        and isinstance(layer, gnn.QuantizedLinear)
        and layer.scheme == recipe.removeprefix("qat-")
    )
    assert relative(layer(x.float()), trained) < 0.006
    done.restore()
    assert type(layer) is nn.Linear and layer.weight.dtype is torch.float32


@pytest.mark.parametrize("recipe", [r for r in gnn.RECIPES if r.startswith("qat-")])
@pytest.mark.parametrize("what", ("row", "group", "tiny row", "all"))
def test_qat_of_zeros_trains(recipe, what, device):
    """A group of zeros has no scale of its own. It still trains, nothing becomes NaN, and the
    deployed layer equals the trained one."""
    gen = generator("qat of zeros", recipe, what)
    layer = nn.Linear(200, 33).to(device)
    with torch.no_grad():
        part = {
            "row": layer.weight[3],
            "group": layer.weight[3, :128],
            "tiny row": layer.weight[3],
            "all": layer.weight,
        }
        part[what].fill_(1e-36 if what == "tiny row" else 0.0)
    x, y = randn(gen, 16, 200).to(device), randn(gen, 16, 33).to(device)
    done = gnn.quantize(layer, recipe, say=None)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        losses.append((layer(x) - y).square()[:, 3].mean())
        optimizer.zero_grad(), (layer(x) - y).square().mean().backward()
        optimizer.step()
    assert all(p.isfinite().all() for p in layer.parameters())
    assert losses[-1] < 0.5 * losses[0]
    trained = layer.fake_weight().detach()
    done.finish()
    assert_bits(trained, layer.decoded(torch.float32))


@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize(
    "recipe,dtype",
    [(r, torch.float32) for r in gnn.RECIPES if r.startswith("qat-")]
    + [("qat-w4", torch.bfloat16), ("qat-w8", torch.bfloat16)],
)
def test_qat_equals_the_finished_layer(recipe, bias, dtype):
    """The layer in training and the finished layer multiply the same rounded activations by the
    same rounded weight. Only the order of their sums may differ."""
    gen = generator("qat finished", recipe, bias, dtype)
    k = 520
    layer = nn.Linear(k, 72, bias=bias)
    with torch.no_grad():
        layer.weight.copy_(randn(gen, 72, k))
    layer.to(dtype)
    x = randn(gen, 96, k).to(dtype)
    done = gnn.quantize(layer, recipe, say=None)
    with torch.no_grad():
        layer.log_step.add_(0.1 * randn(gen, *layer.log_step.shape))
        training = layer(x)
        done.finish()
        finished = layer(x)
        size = x.double().abs() @ layer.decoded(torch.float32).double().abs().mT
        if bias:
            size += layer.bias.double().abs()
    # Each of two sums of k float32 terms errs by at most k 2^-24 of the terms' sizes. A bfloat16
    # result is rounded once more on each side.
    most = 2 * k * 2.0**-24 * size
    if dtype is torch.bfloat16:
        most += 2.0**-8 * training.double().abs()
    assert ((training.double() - finished.double()).abs() <= most).all()


def test_qat_rounds_as_bfloat16_does():
    from torch_gpukern.nn.quant.qat import straight_through, to_bfloat16_values

    gen = generator("8 bits")
    x = torch.randint(-(2**31), 2**31, (1 << 16,), generator=gen).int().view(torch.float32)
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, 3.4028235e38, -3.4028235e38]
    x = torch.cat([x, torch.tensor([*special, 1e-45, -1e-40, 1 + 2.0**-8, 1 + 3 * 2.0**-8])])
    want = x.bfloat16().float()
    assert torch.equal(to_bfloat16_values(x).nan_to_num(7.0), want.nan_to_num(7.0))
    leaf = x.clone().requires_grad_()
    seen = straight_through(leaf, want)
    seen.sum().backward()
    assert torch.equal(seen.detach().nan_to_num(7.0), want.nan_to_num(7.0))
    assert torch.equal(leaf.grad, torch.ones_like(x))


@pytest.mark.parametrize("value", (1.0, -(2.0**-20), 2.0**60))
@pytest.mark.parametrize("recipe", [r for r in gnn.RECIPES if r.startswith("qat-")])
def test_qat_far_from_its_scale_has_finite_gradients(recipe, value):
    """A weight many orders of magnitude above its scale is clipped. It has no gradient of its own;
    the scale gets the largest code times g."""
    layer = nn.Linear(200, 2)
    gnn.quantize(layer, recipe, say=None)
    with torch.no_grad():
        layer.log_step.fill_(-110.0)
        layer.weight.fill_(value)
    layer(torch.ones(3, 200)).sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    assert (layer.weight.grad == 0).all()


def test_learned_scale_has_its_gradient():
    """Esser et al.: the sum of g (r - v) for values within the range and of g r for clipped ones,
    over sqrt(count * largest)."""
    layer = nn.Linear(8, 1, bias=False)
    gnn.quantize(layer, "qat-w4", say=None)
    with torch.no_grad():
        layer.log_step.fill_(-1.0)
        layer.weight.copy_(torch.tensor([[0.3, -0.6, 9.0, -9.0, 0.0, 1.1, 3.4, -0.2]]))
    layer.fake_weight().sum().backward()
    v = (layer.weight.detach() / 0.5).clamp(-8, 7)
    inside = layer.weight.detach() / 0.5 == v
    want = torch.where(inside, v.round() - v, v).sum() / (8 * 7) ** 0.5
    torch.testing.assert_close(layer.log_step.grad.sum(), want * 0.5 * math.log(2))
    assert torch.equal(layer.weight.grad, inside.float())


def test_what_a_layer_cannot_do_leaves_it_as_it_was():
    """A move that raises, or a state of another recipe, leaves the layer unchanged. A weight that a
    hook computes is not taken."""
    x = randn(generator("quantize fails"), 5, 64)
    layer = nn.Sequential(nn.Linear(64, 48))
    gnn.quantize(layer, "w4", say=None)
    want = layer(x)

    def fail(t):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        layer._apply(fail)
    assert_bits(layer(x), want)
    other = nn.Sequential(nn.Linear(64, 48))
    gnn.quantize(other, "w8", say=None)
    with pytest.raises(ValueError, match="recipe w8, the layer is of w4"):
        layer.load_state_dict(other.state_dict())
    assert_bits(layer(x), want)
    hooked = nn.Sequential(nn.Linear(64, 64), nn.utils.spectral_norm(nn.Linear(64, 64)))
    done = gnn.quantize(hooked, "w4", say=None)
    assert list(done.skipped) == ["1"] and "hook" in done.skipped["1"]
    nothing = nn.Sequential(nn.Linear(64, 0))
    gnn.quantize(nothing, "2:4", say=None)
    assert nothing(x).shape == (5, 0) and nothing[0].weight.shape == (0, 64)


def test_delayed_scaling_of_a_layer_that_is_called_twice():
    """Every backward writes the history of gradients: for several calls of one layer, and for a
    call whose backward runs twice."""
    layer = nn.Sequential(nn.Linear(64, 64))
    gnn.quantize(layer, "fp8-train-delayed", say=None)
    x = randn(generator("fp8 twice"), 5, 64).requires_grad_()
    layer(layer(x)).sum().backward()
    once = layer(x).sum()
    once.backward(retain_graph=True)
    once.backward()
    (layer(x).sum() + layer(2 * x).sum()).backward()
    assert x.grad.isfinite().all() and layer[0].history_grad.count_nonzero() == 6


@pytest.mark.parametrize("recipe", ("w4", "w4-zero", "nvfp4", "mxfp4", "qat-w4"))
def test_inductor_reaches_the_last_columns(recipe, device):
    """K is not a multiple of a group. The decoded weight and the gradient through it have all
    columns."""
    gen = generator("last columns", recipe)
    layer = nn.Linear(200, 24).to(device)
    gnn.quantize(layer, recipe, say=None)
    x, grad = randn(gen, 7, 200).to(device).requires_grad_(), randn(gen, 7, 24).to(device)
    wrt = [x, *(p for p in layer.parameters() if p.requires_grad)]
    decode = (
        (lambda: layer.fake_weight())
        if recipe == "qat-w4"
        else (lambda: layer.decoded(torch.float32))
    )

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: (layer(x), decode()), fullgraph=True)
    out, decoded = compiled(x)
    # Inductor's exp2 may differ by an ulp
    torch.testing.assert_close(decoded.detach(), decode().detach(), rtol=1e-6, atol=0)
    got, want = (torch.autograd.grad(y, wrt, grad) for y in (out, layer(x)))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_compile_and_autocast():
    model, x = network(), randn(generator("compiled"), 6, 260)
    for recipe in ("fp8", "w4"):
        done = gnn.quantize(model, recipe, say=None)
        compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x), rtol=2e-2, atol=2e-2)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        assert out.dtype is torch.bfloat16 and relative(out, model(x)) < 0.08
        done.restore()
    x.requires_grad_()
    gnn.quantize(model, "int8", say=None)
    grads = [
        torch.autograd.grad(f(x).sum(), x)[0]
        for f in (torch.compile(model, fullgraph=True, backend="aot_eager"), model)
    ]
    torch.testing.assert_close(*grads, rtol=2e-2, atol=2e-2)


def test_an_mlp_keeps_its_activation():
    mlp = gnn.MLP(32, 64)
    x = randn(generator("mlp"), 3, 32)
    want = mlp(x)
    gnn.quantize(mlp, "w8", say=None)
    assert relative(mlp(x), want) < 0.02
    assert torch_gpukern.nn.quantize is gnn.quantize


@pytest.mark.parametrize("recipe", gnn.quantize.__globals__["RECIPES"])
def test_torch_func(recipe):
    """vmap runs as a loop, and per-sample gradients equal those of a loop."""
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(64, 16), nn.GELU(), nn.Linear(16, 8)),
        randn(generator("func"), 3, 2, 64),
    )
    gnn.quantize(model, recipe, say=None, calibration=[x] if "static" in recipe else None)
    model(x)
    model.eval()  # in training mode delayed scales would change
    parameters = dict(model.named_parameters())
    torch.testing.assert_close(
        torch.vmap(model)(x), torch.stack([model(t) for t in x]), rtol=1e-3, atol=2e-3
    )

    def loss(parameters, t):
        return torch.func.functional_call(model, parameters, (t,)).square().sum()

    each = torch.vmap(torch.func.grad(loss, argnums=(0, 1)), (None, 0))(parameters, x)
    for i, t in enumerate(x):
        t = t.clone().requires_grad_()
        wanted = torch.autograd.grad(loss(parameters, t), [*parameters.values(), t])
        got = [*(g[i] for g in each[0].values()), each[1][i]]
        for a, b in zip(got, wanted, strict=True):
            assert relative(a, b) < 0.03


def test_restore_goes_where_the_model_went():
    for recipe in ("w4", "fp8"):
        model = nn.Sequential(nn.Linear(64, 16), nn.Linear(16, 8))
        before = [m.weight.detach().clone() for m in model]
        done = gnn.quantize(model, recipe, say=None)
        model.to(torch.float16).to(torch.bfloat16)
        done.restore()
        assert model(torch.ones(2, 64, dtype=torch.bfloat16)).dtype is torch.bfloat16
        for m, weight in zip(model, before, strict=True):
            torch.testing.assert_close(m.weight.float(), weight, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize(
    "recipe", ["fp8", "int8-static", "w4-zero", "fp8-train-delayed", "qat-int8"]
)
def test_nothing_to_multiply(recipe):
    """No tokens, as an expert may have, no columns, and no rows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about weights without elements
        layers = [nn.Linear(32, 8), nn.Linear(0, 8), nn.Linear(8, 0)]
    for layer in layers:
        x = torch.randn(3, layer.in_features)
        gnn.quantize(layer, recipe, say=None, calibration=[x] if "static" in recipe else None)
        assert layer(x).shape == (3, layer.out_features)
        none = x[:0].unflatten(0, (0, 2)).requires_grad_()
        out = layer(none)
        assert out.shape == (0, 2, layer.out_features)
        out.sum().backward()
        assert none.grad.shape == none.shape
    torch.testing.assert_close(layers[1](torch.zeros(3, 0)), layers[1].bias.detach().expand(3, 8))


def test_a_row_with_nan_is_shown():
    for recipe in SCHEMES:
        if recipe in ("w4-shift", "w8-shift", "fp8-block", "nvfp4"):
            continue  # the last two recipes have scales that span several rows
        layer = nn.Linear(64, 8)
        layer.weight.data[0, 3] = math.nan
        x = torch.ones(2, 64)
        gnn.quantize(layer, recipe, say=None, calibration=[x] if "static" in recipe else None)
        assert layer(x).isnan().any(0).tolist() == [True] + 7 * [False], recipe


@pytest.mark.parametrize(
    "recipe", ("int8-static", "fp8-static", "w4", "nvfp4", "mxfp4", "2:4", "qat-w4")
)
@pytest.mark.parametrize("value", (math.nan, math.inf, -math.inf, 1e30, 0.0))
def test_calibration_that_shows_nothing_is_refused_by_name(recipe, value):
    """Zeros are refused if a scale depends on them; non-finite values are refused wherever they are
    read."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64, bias=False))
    model[1].register_forward_hook(lambda module, args, out: out.detach().clone().fill_(value))
    before = {name: p.clone() for name, p in model.named_parameters()}
    run = lambda: gnn.quantize(model, recipe, say=None, calibration=[torch.ones(2, 64)])  # noqa: E731
    if value == 0 and "static" not in recipe:
        run()
        return
    what = "only zeros" if value == 0 else "values that are infinite or NaN"
    with pytest.raises(ValueError, match=f"recipe {recipe}: calibration gave 2 {what}"):
        run()
    assert all(type(m) is nn.Linear for m in model)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_calibration_of_a_layer_that_is_called_by_name():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(8, 8)

        def forward(self, x):
            return self.up(input=x)

    model = Named()
    gnn.quantize(model, "int8-static", say=None, calibration=[torch.ones(2, 8)])
    assert model.up.input_scale == 1 / 127


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("recipe", DEPLOYED)
def test_a_model_that_multiplies_by_the_weight_itself(recipe, dtype):
    """As Mamba's dt_proj does. The decoded weight has the dtype that the weight had, also after the
    layer was cast."""
    gen = generator("weight itself", recipe, dtype)
    x = randn(gen, 4, 64).to(dtype)
    layer = nn.Linear(64, 32).to(dtype)
    gnn.quantize(layer, recipe, calibration=[x], say=None)
    assert_bits(layer.weight, layer.decoded(dtype))
    assert torch.compile(lambda x: layer.weight @ x.mT, backend="aot_eager")(x).dtype is dtype
    assert layer.double().weight.dtype is torch.float64
    assert layer.to(dtype).weight.dtype is dtype


def test_pickle():
    """Plain pickle, which passes models to other processes, and copies that share nothing."""
    for recipe in SCHEMES:
        if recipe in ("w4-shift", "w8-shift"):
            continue
        model, x = nn.Sequential(nn.Linear(64, 8)), randn(generator("pickle"), 3, 64)
        gnn.quantize(model, recipe, say=None, calibration=[x] if "static" in recipe else None)
        for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
            assert_bits(other(x).detach(), model(x).detach())
            assert not {t.data_ptr() for t in other.buffers()} & {
                t.data_ptr() for t in model.buffers()
            }
            assert [t.dtype for t in other.buffers()] == [t.dtype for t in model.buffers()]
            assert list(other.state_dict()) == list(model.state_dict())


EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)


def quantized_layer(recipe):
    x = randn(generator("eight bits", recipe), 3, 128)
    model = nn.Sequential(nn.Linear(128, 64))
    gnn.quantize(model, recipe, say=None, calibration=[x] if "static" in recipe else None)
    return model, x


@pytest.fixture
def one_rank():
    dist = pytest.importorskip("torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("recipe", DEPLOYED)
def test_ddp_on_gloo_sends_the_buffers(recipe, one_rank):
    """gloo has no 8-bit floats: "Invalid scalar type"."""
    model, x = quantized_layer(recipe)
    want = model(x).detach()
    for t in model.buffers():
        one_rank.broadcast(t, 0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(model, nn.Linear(64, 8)))
    model(x).sum().backward()
    assert_bits(model.module[0](x).detach(), want)


@pytest.mark.parametrize("recipe", DEPLOYED)
def test_states_and_pickles_hold_8_bit_floats_in_their_own_dtype(recipe):
    """Files of earlier versions load, and earlier versions can read files that are written now."""
    model, x = quantized_layer(recipe)
    (layer,), want = model, model(x).detach()
    spec = {n: dtype for n, (_, dtype) in SCHEMES[recipe].spec(64, 128).items()}
    state = model.state_dict()
    assert {n: state[f"0.{n}"].dtype for n in spec} == spec
    for name, dtype in spec.items():
        held = layer.get_buffer(name)
        assert held.dtype is (torch.uint8 if dtype in EIGHT_BITS else dtype)
        assert held.data_ptr() == state[f"0.{name}"].data_ptr()

    for assign in (False, True):
        other, _ = quantized_layer(recipe)
        for t in other.buffers():
            t.zero_()
        other.load_state_dict(state, assign=assign)
        assert_bits(other(x).detach(), want)
        assert [t.dtype for t in other.buffers()] == [t.dtype for t in model.buffers()]

    # as earlier versions pickled a layer
    earlier = copy.copy(layer)
    del earlier.__dict__["code_dtypes"]
    buffers = {n: t.view(spec[n]) if n in spec else t for n, t in layer._buffers.items()}
    made = type(layer).__new__(type(layer))
    made.__setstate__({**earlier.__dict__, "_buffers": as_bytes(buffers)})
    assert_bits(made(x).detach(), want)
    assert list(made.state_dict()) == list(layer.state_dict())


@pytest.mark.parametrize("recipe", DEPLOYED)
def test_8_bit_floats_under_a_compiler(recipe):
    model, x = quantized_layer(recipe)
    torch._dynamo.reset()
    with torch.no_grad():
        assert_bits(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("recipe", ("w4", "w4-zero", "w8"))
def test_scales_of_packed_weights_have_16_bits(recipe, dtype, device):
    """The Hopper kernels of weight_gemm read scales of the activations' dtype alone: float32 ones
    would go to the general kernel. Codes are chosen for the rounded scale."""
    half = torch.float16 if dtype is torch.float16 else torch.bfloat16
    gen = generator("16-bit scales", recipe, str(dtype))
    layer = nn.Linear(256, 64, bias=False).to(device, dtype)
    with torch.no_grad():
        layer.weight.copy_(randn(gen, 64, 256).to(dtype) / 16)
        layer.weight[3] = 1e-7  # below what float16 scales hold
    w = layer.weight.detach().double()
    gnn.quantize(layer, recipe, say=None)
    assert layer.weight_scale.dtype is half and (layer.weight_scale > 0).all()
    step = layer.weight_scale.double().mT.repeat_interleave(256 // layer.weight_scale.shape[0], 1)
    off = (layer.decoded(torch.float32).double() - w).abs() / step
    # half a step, but for what saturates: int8 rounds its scale, int4 may choose half of it
    assert off.median() < 0.3 and off.max() < {"w4": 4.0, "w4-zero": 0.57, "w8": 0.76}[recipe]
    for x_dtype in (torch.float32, torch.bfloat16, torch.float16):  # the other 16 bits, too
        x = randn(gen, 3, 256).to(device, x_dtype)
        want = x.double() @ layer.decoded(torch.float32).double().mT
        torch.testing.assert_close(layer(x).double(), want, rtol=2e-2, atol=2e-2)


def test_float32_scales_of_earlier_states_stay():
    """States and checkpoints with float32 scales give the same bits as when they were written."""
    layer = nn.Linear(256, 64)
    gnn.quantize(layer, "w4", say=None)
    scale = layer.weight_scale.float() * (1 + 2.0**-12)  # which bfloat16 does not hold
    state = layer.state_dict() | {"weight_scale": scale}
    layer.load_state_dict(state)
    assert layer.weight_scale.dtype is torch.float32
    assert_bits(layer.weight_scale, scale)
