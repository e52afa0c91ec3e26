# SPDX-License-Identifier: BSD-3-Clause
"""Patched models under other tools: adapters, hooks, slices, parametrisations; and restore after
them.
"""

import copy

import pytest
import torch
from conftest import generator, randn
from torch import nn
from torch.nn.utils import parametrize

import torch_gpukern.nn as gnn

ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU}


class Lora(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.a, self.b = (
            nn.Linear(base.in_features, 2, bias=False),
            nn.Linear(2, base.out_features, bias=False),
        )

    def forward(self, x):
        return self.base_layer(x) + self.b(self.a(x))


class Doubled(nn.Module):
    def forward(self, w):
        return 2 * w


def pair(activation="relu"):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), ACTIVATIONS[activation](), nn.Linear(16, 16))


X = randn(generator("adapters"), 5, 16)


def wrap(m):
    torch.manual_seed(1)
    m[0] = Lora(m[0])


def hook(m):
    m[0].register_forward_hook(lambda module, given, out: out - 1)


def hook_of_the_activation(m):
    m[1].register_forward_pre_hook(lambda module, given: (given[0] + 1,))


def replace(m):
    m[1] = nn.Tanh()


def replace_linear(m):
    torch.manual_seed(2)
    m[0] = nn.Linear(16, 16)


def insert(m):
    m.insert(1, nn.LayerNorm(16, elementwise_affine=False))


def other_forward(m):
    m[1].forward = torch.cos


def parametrized(m):
    parametrize.register_parametrization(m[0], "weight", Doubled())


def remove(m):
    del m[1]


CHANGES = (
    wrap,
    hook,
    hook_of_the_activation,
    replace,
    replace_linear,
    insert,
    other_forward,
    parametrized,
    remove,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_pair_that_is_changed_after_patch(activation, change):
    plain, patched = pair(activation), pair(activation)
    gnn.patch(patched, None)
    torch.testing.assert_close(patched(X), plain(X))
    for m in (plain, patched):
        change(m)
    torch.testing.assert_close(patched(X), plain(X))
    for whole, part in ((plain, plain[:1]), (patched, patched[:1])):
        assert len(part) == 1 and part[0] is whole[0]
    torch.testing.assert_close(patched[:1](X), plain[:1](X))
    torch.testing.assert_close(copy.deepcopy(patched)(X), plain(X))
    torch.testing.assert_close(patched[0](X), plain[0](X))


def test_a_global_hook_sees_every_module():
    model, seen = pair(), []
    gnn.patch(model, None)
    with torch.no_grad():
        handle = nn.modules.module.register_module_forward_hook(
            lambda m, given, out: seen.append(type(m).__name__)
        )
        try:
            model(X)
        finally:
            handle.remove()
    assert seen == ["Linear", "ReLU", "Linear", "Fused"]


def test_an_adapter_merged_and_not():
    model, mlp = pair(), gnn.MLP(16, 24)
    gnn.patch(model, None)
    for owner, name, run in ((model, "0", model), (mlp, "gate_proj", mlp)):
        base = owner._modules[name]
        adapter = owner._modules[name] = Lora(base)
        apart = run(X)
        with torch.no_grad():
            base.weight += adapter.b.weight @ adapter.a.weight
        owner._modules[name] = base
        torch.testing.assert_close(run(X), apart)


def test_a_fused_pair_makes_one_pass(monkeypatch):
    """The activation runs in the op instead of its module, as long as nothing stands between the
    two."""
    model, mlp = pair("gelu"), gnn.MLP(16, 24)
    want = model(X)
    done = gnn.patch(model, None)
    assert done.replaced == {"0": "Linear + gelu", "2": "Linear"}
    monkeypatch.setattr(
        nn.GELU, "forward", lambda self, x: pytest.fail("the activation was called")
    )
    torch.testing.assert_close(model(X), want)
    asked = []
    monkeypatch.setattr(
        gnn.layers,
        "linear",
        lambda *args, activation="none": (
            asked.append(activation) or args[0].new_ones(5, args[1].shape[0])
        ),
    )
    mlp(X)
    assert asked == ["silu", "none", "none"]


def test_restore_names_what_was_changed_since_and_undoes_the_rest():
    model = nn.Sequential(pair(), pair(), nn.Linear(16, 16), nn.Linear(16, 16))
    done = gnn.patch(model, None)
    parametrized(model[0])
    model[2].forward = lambda x: x
    with pytest.raises(RuntimeError) as error:
        done.restore()
    assert str(error.value) == (
        "gpukern: modules that were changed after patch cannot be restored; all others are restored: "
        "0.0: its class is ParametrizedLinear now, not Linear; 2: its forward was replaced"
    )
    assert set(done.replaced) == {"0.0", "2"}
    assert [type(m) for m in (model[0], model[0][2], *model[1], model[3])] == [
        nn.Sequential, nn.Linear, nn.Linear, nn.ReLU, nn.Linear, nn.Linear,
    ]  # fmt: skip
    model(X)  # the parametrisation still works
    parametrize.remove_parametrizations(model[0][0], "weight")
    del model[2].forward
    done.restore()
    assert {type(m) for m in model.modules()} == {
        nn.Sequential,
        nn.Linear,
        nn.ReLU,
    } and not done.replaced


def test_restore_after_modules_moved():
    """A trained layer is never overwritten. restore puts modules back by identity, not by place."""
    for move in (
        lambda m: m.insert(0, nn.LayerNorm(16)),
        lambda m: m.__delitem__(0),
        lambda m: m.append(nn.ReLU()),
    ):
        model = pair()
        done = gnn.patch(model, None)
        move(model)
        kept = list(model)
        done.restore()
        assert (
            list(model) == kept
            and type(model) is nn.Sequential
            and "_gpukern_pairs" not in vars(model)
        )
        assert not any(isinstance(m, gnn.Linear) for m in model.modules())


def test_an_attribute_named_activation_is_the_users():
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    model[0].activation, model[2].activation = "mine", nn.ReLU()
    want = model(X)
    with gnn.patch(model, None) as done:
        assert not done.replaced
        assert done.skipped == dict.fromkeys(("0", "2"), "it has an attribute named activation")
        torch.testing.assert_close(model(X), want)
    assert model[0].activation == "mine" and isinstance(model[2].activation, nn.ReLU)


def test_a_patch_that_raises_changes_nothing():
    model = pair()

    def say(line):
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        gnn.patch(model, say)
    assert {type(m) for m in model.modules()} == {nn.Sequential, nn.Linear, nn.ReLU}
    for wrong in ("str", None, nn.Linear):
        with pytest.raises(
            TypeError, match="^gpukern patch: model must be a torch.nn.Module, got "
        ):
            gnn.patch(wrong)


def test_a_patched_pair_compiles_and_pickles(tmp_path):
    model = pair("silu")
    want = model(X)
    gnn.patch(model, None)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(X), want)
    wrap(model)
    torch._dynamo.reset()
    torch.testing.assert_close(
        torch.compile(model, fullgraph=True, backend="aot_eager")(X), model(X)
    )
    torch._dynamo.reset()
    torch.save(model, tmp_path / "model.pt")
    torch.testing.assert_close(torch.load(tmp_path / "model.pt", weights_only=False)(X), model(X))
