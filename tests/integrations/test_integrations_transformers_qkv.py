# SPDX-License-Identifier: BSD-3-Clause
"""accelerate(fuse_qkv=True): q, k and v are one product where no gradient is wanted, and three
wherever the one would be another."""

import contextlib
import copy
import pickle

import pytest
import torch
from conftest import generator, randn
from torch import nn

transformers = pytest.importorskip("transformers")
import test_integrations_transformers as families  # noqa: E402

from torch_gpukern import nn as gnn  # noqa: E402
from torch_gpukern.integrations import transformers as gk  # noqa: E402
from torch_gpukern.integrations import transformers_qkv as qkv  # noqa: E402

IDS = families.words(2, 19)


@pytest.fixture(autouse=True)
def products(monkeypatch):
    """The rows of the weights of all joined products, in the order of the calls."""
    rows, linear = [], qkv.linear

    def counted(x, weight, bias):
        rows.append(weight.shape[0])
        return linear(x, weight, bias)

    monkeypatch.setattr(qkv, "linear", counted)
    return rows


@pytest.fixture
def accelerate():
    """gk.accelerate, undone behind the test: a compiled model may outlive it."""
    made = []

    def call(model, recipe=None):
        made.append(gk.accelerate(model, recipe, fuse_qkv=True, say=None))
        return made[-1]

    yield call
    for done in reversed(made):
        with contextlib.suppress(RuntimeError):  # a layer that the test changed stays
            done.restore()


def small(name):
    model = families.any_model(
        getattr(transformers, f"{name}Config"), getattr(transformers, f"{name}ForCausalLM")
    )
    assert model is not None
    return model.eval()


def logits_of(model, **more):
    with torch.no_grad():
        return model(input_ids=IDS, **more).logits


def attentions_of(model):
    return [m for m in model.modules() if set(qkv.NAMES) <= m._modules.keys()]


@pytest.mark.parametrize("name", ("Llama", "Qwen2", "Qwen3", "Gemma2", "GptOss", "Mistral"))
def test_logits_gradients_and_names_are_the_models_own(name, products, accelerate):
    model = small(name)
    plain = copy.deepcopy(model)
    names = list(model.state_dict())
    with accelerate(model) as done:
        count = len(attentions_of(model))
        what = f"q, k and v of {count} attentions"
        assert done.done[what] == "one product where no gradient is wanted"
        torch.testing.assert_close(logits_of(model), logits_of(plain), rtol=1e-4, atol=1e-4)
        assert len(products) == count
        with torch.inference_mode():
            model(input_ids=IDS)
        assert len(products) == 2 * count
        for m in (model, plain):
            m(input_ids=IDS, labels=IDS).loss.backward()
        assert len(products) == 2 * count  # gradients are wanted
        for (path, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5, msg=path)
        assert list(model.state_dict()) == names
        assert type(attentions_of(model)[0]).__name__ == type(attentions_of(plain)[0]).__name__
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)


def test_checkpoints_are_those_of_the_plain_model(tmp_path, products, accelerate):
    model = small("Llama")
    want = {name: t.clone() for name, t in model.state_dict().items()}
    accelerate(model)
    model.save_pretrained(tmp_path)
    other = type(small("Llama")).from_pretrained(tmp_path)
    assert all(torch.equal(t, want[name]) for name, t in other.state_dict().items())
    for t in model.state_dict().values():
        t.mul_(0.5)
    scaled = logits_of(model)
    model.load_state_dict(want)
    assert not torch.equal(logits_of(model), scaled)
    torch.testing.assert_close(logits_of(model), logits_of(other), rtol=1e-4, atol=1e-4)
    assert products


def test_copies_and_moved_weights_multiply_three_times_until_joined_again(products, accelerate):
    model = small("Llama")
    want = logits_of(model)
    accelerate(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(logits_of(other), want, rtol=1e-4, atol=1e-4)
    model.double()
    torch.testing.assert_close(logits_of(model).float(), want, rtol=1e-4, atol=1e-4)
    assert products == []
    again = accelerate(model)
    assert again.left["q, k and v as one product"] == "they are one product already"
    torch.testing.assert_close(logits_of(model).float(), want, rtol=1e-4, atol=1e-4)
    assert len(products) == 2


@pytest.mark.parametrize(
    "what", ("a hook", "another layer", "an activation", "a weight", "a forward")
)
def test_a_layer_that_was_changed_computes_its_own_product(what, products, accelerate):
    """After the model was accelerated: the other two are then not joined either."""
    model = small("Llama")
    accelerate(model)
    before = logits_of(model)
    assert len(products) == 2
    products.clear()
    for attention in attentions_of(model):
        layer = attention.k_proj
        if what == "a hook":
            layer.register_forward_hook(lambda m, args, out: out * 2)
        elif what == "another layer":
            attention.k_proj = nn.Sequential(layer, nn.Tanh())
        elif what == "an activation":
            layer.activation = "relu"
        elif what == "a weight":
            layer.weight = nn.Parameter(layer.weight.detach() * 2)
        else:
            layer.forward = lambda x, layer=layer: 2 * type(layer).forward(layer, x)
    changed = logits_of(model)
    assert products == [] and not torch.allclose(changed, before, atol=1e-3)


def test_a_frozen_model_is_joined_with_gradients_on(products, accelerate):
    model = small("Llama").requires_grad_(False)
    accelerate(model)
    model(input_ids=IDS)
    assert len(products) == 2
    model(inputs_embeds=torch.randn(1, 3, model.config.hidden_size, requires_grad=True))
    assert len(products) == 2


def test_in_few_bits_they_stay(accelerate):
    done = accelerate(small("Llama"), "w4")
    why = "q_proj is no plain nn.Linear (QuantizedLinear)"
    assert done.left["q, k and v as one product"] == why


def test_one_graph(products, accelerate):
    model = small("Llama")
    want = logits_of(model, use_cache=False)
    accelerate(model)
    with torch.no_grad():
        got = torch.compile(model, fullgraph=True)(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert products == []


# ---- attentions of one's own ---------------------------------------------------------------------


class Tiny(nn.Module):
    def __init__(self, biases=(False, False, False)):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (
            gnn.Linear(16, n, bias) for n, bias in zip((24, 8, 8), biases)
        )

    def forward(self, x):
        q = self.q_proj(x)
        k = self.k_proj(x)
        v = self.v_proj(x)
        return q, k, v


class Written(Tiny):
    """x is written between the calls by what the source does not show."""

    def forward(self, x):
        q = self.q_proj(x)
        self.meanwhile()
        k = self.k_proj(x)
        v = self.v_proj(x)
        return q, k, v


class Cross(Tiny):
    def forward(self, x, y):
        return self.q_proj(x), self.k_proj(y), self.v_proj(y)


class Changed(Tiny):
    def forward(self, x):
        q = self.q_proj(x)
        x = x + 1
        k = self.k_proj(x)
        v = self.v_proj(x)
        return q, k, v


class Sometimes(Tiny):
    def forward(self, x, shared=None):
        q = self.q_proj(x)
        k, v = shared if shared is not None else (self.k_proj(x), self.v_proj(x))
        return q, k, v


class Twice(Tiny):
    def forward(self, x):
        q = self.q_proj(x)
        k = self.k_proj(x) + self.k_proj(x)
        v = self.v_proj(x)
        return q, k, v


class Weight(Tiny):
    def forward(self, x):
        q = self.q_proj(x.to(self.q_proj.weight.dtype))
        k = self.k_proj(x)
        v = self.v_proj(x)
        return q, k, v


@pytest.mark.parametrize("kind", (Cross, Changed, Sometimes, Twice, Weight))
def test_a_forward_that_calls_them_otherwise_is_left(kind):
    made, why = qkv.join(kind())
    assert made is None and why.startswith(f"the forward of {kind.__name__} does not call")


def test_layers_that_do_not_fit_together_are_left():
    assert "have a bias" in qkv.join(Tiny((True, False, False)))[1]
    mixed = Tiny()
    mixed.k_proj.double()
    assert "differ in dtype" in qkv.join(mixed)[1]
    plain = Tiny()
    plain.v_proj = nn.Linear(16, 8)
    assert "v_proj is no plain nn.Linear (Linear)" in qkv.join(plain)[1]


def test_an_input_that_is_written_between_the_calls(products):
    attention, x = Written((True, True, True)), randn(generator("written"), 3, 16)
    attention.__class__, why = qkv.join(attention)
    assert why == ""
    attention.meanwhile = lambda: None
    with torch.no_grad():
        q, k, _ = attention(x)
        assert len(products) == 1 and torch.allclose(k, attention.k_proj(x), atol=1e-6)
        attention.meanwhile = lambda: x.mul_(2)
        want = attention.q_proj(x)
        q, k, v = attention(x)
        torch.testing.assert_close(q, want)
        torch.testing.assert_close(k, attention.k_proj(x))
        torch.testing.assert_close(v, attention.v_proj(x))


def test_nothing_is_kept_behind_a_call(products):
    attention = Written()
    attention.__class__, _ = qkv.join(attention)

    def failing():
        raise RuntimeError("no more")

    attention.meanwhile = failing
    with torch.no_grad(), pytest.raises(RuntimeError, match="no more"):
        attention(torch.ones(2, 16))
    assert len(products) == 1 and qkv.PARTS not in vars(attention)
    assert isinstance(attention.k_proj, gnn.Linear)


def test_neighbours_by_chance_are_not_joined():
    """Their memory follows each other, but the first one's storage ends before."""
    numpy = pytest.importorskip("numpy")
    buffer = numpy.ones((40, 16), dtype=numpy.float32)
    rows = [buffer[:24], buffer[24:32], buffer[32:]]
    parts = [nn.Parameter(torch.from_numpy(part)) for part in rows]
    assert parts[1].data_ptr() == parts[0].data_ptr() + parts[0].nbytes
    assert qkv._together(parts) is None
    whole = torch.ones(40, 16)
    parts = [nn.Parameter(part) for part in whole.split([24, 8, 8])]
    assert qkv._together(parts).data_ptr() == whole.data_ptr()


def test_restored_weights_are_apart():
    model = small("Llama")
    one = attentions_of(model)[0]
    before = {name: one._modules[name].weight.detach().clone() for name in qkv.NAMES}
    done = gk.accelerate(model, say=None)
    assert type(one).__name__ == "LlamaAttention" and not hasattr(type(one), "_gpukern_class")
    done.restore()
    done = gk.accelerate(model, fuse_qkv=True, say=None)
    assert len({one._modules[n].weight.untyped_storage().data_ptr() for n in qkv.NAMES}) == 1
    done.restore()
    assert len({one._modules[n].weight.untyped_storage().data_ptr() for n in qkv.NAMES}) == 3
    for name, weight in before.items():
        assert torch.equal(one._modules[name].weight, weight)


def test_a_deleted_projection_is_missing():
    model = small("Llama")
    one = attentions_of(model)[0]
    gk.accelerate(model, fuse_qkv=True, say=None)
    del one.q_proj
    assert not hasattr(one, "q_proj")
