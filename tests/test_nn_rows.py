# SPDX-License-Identifier: BSD-3-Clause
"""Norms, rotary embedding and the head of torch_gpukern.nn, and what patch makes of modules that do the same."""

import copy

import pytest
import torch
import torch.nn.functional as F
from conftest import generator, randn
from torch import nn

from torch_gpukern import nn as gnn


def same(ours, theirs, x, tolerance=1e-5):
    """Results and every gradient."""
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    outs = [m(leaf) for m, leaf in zip((ours, theirs), leaves, strict=True)]
    grad = randn(generator("nn rows"), *outs[0].shape).to(outs[0].dtype)
    grads = [
        torch.autograd.grad(out, [leaf, *m.parameters()], grad)
        for out, leaf, m in zip(outs, leaves, (ours, theirs), strict=True)
    ]
    for got, want in zip((outs[0], *grads[0]), (outs[1], *grads[1]), strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * float(want.detach().abs().max()))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("shape", (48, (6, 8)))
def test_norms(shape, dtype):
    x = randn(generator("norms of nn"), 5, 6, 8, dtype=dtype)
    x = x if isinstance(shape, tuple) else x.flatten(1)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for ours, theirs in ((gnn.RMSNorm, nn.RMSNorm), (gnn.LayerNorm, nn.LayerNorm)):
        for options in ({}, {"eps": 1e-3}, {"elementwise_affine": False}):
            a, b = ours(shape, dtype=dtype, **options), theirs(shape, dtype=dtype, **options)
            with torch.no_grad():
                for p, q in zip(a.parameters(), b.parameters(), strict=True):
                    q.copy_(torch.rand_like(q) + 0.5)
                    p.copy_(q)
            same(a, b, x, tolerance)
        norm = ours(shape, dtype=dtype)
        out, total = norm(x, x)
        assert torch.equal(total, x + x) and torch.equal(out, norm(x + x))
        with pytest.raises(ValueError, match=rf"{ours.__name__}: x must have shape \[\.\.\., "):
            norm(x[..., :-1])


def test_rms_norm_of_small_numbers_has_the_default_eps_of_torch():
    for dtype in (torch.float32, torch.bfloat16):
        x = (randn(generator("small"), 4, 64) * 1e-3).to(dtype)
        got, want = gnn.RMSNorm(64, dtype=dtype)(x), nn.RMSNorm(64, dtype=dtype)(x)
        torch.testing.assert_close(got, want, rtol=1e-2, atol=0)


def test_weight_offset():
    norm, x = gnn.RMSNorm(16, eps=1e-6, weight_offset=1.0), randn(generator("offset"), 3, 16)
    assert (norm.weight == 0).all()
    torch.testing.assert_close(norm(x), F.rms_norm(x, (16,), None, 1e-6))


@pytest.mark.parametrize("interleaved", (False, True))
def test_rotary_embedding(interleaved):
    rotary = gnn.RotaryEmbedding(8, 32, base=100.0, interleaved=interleaved)
    gen = generator("rotary")
    q, k = randn(gen, 2, 4, 9, 16), randn(gen, 2, 2, 9, 16)
    positions = torch.randint(32, (2, 9), generator=gen)
    angle = positions[:, None, :, None].double() * 100.0 ** (-torch.arange(0, 8, 2) / 8)
    for x, got in zip((q, k), rotary(q, k, positions), strict=True):
        first, second = (slice(0, 8, 2), slice(1, 8, 2)) if interleaved else (slice(0, 4), slice(4, 8))
        want, x1, x2 = x.double(), x[..., first].double(), x[..., second].double()
        want[..., first], want[..., second] = x1 * angle.cos() - x2 * angle.sin(), x2 * angle.cos() + x1 * angle.sin()
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    table = rotary.cos.clone()
    assert not rotary.state_dict() and torch.equal(rotary.bfloat16().cos, table)
    with pytest.raises(ValueError, match="rotary_dim must be even and 2 or more, got 7"):
        gnn.RotaryEmbedding(7, 4)


def test_linear_cross_entropy():
    torch.manual_seed(0)
    head = gnn.LinearCrossEntropy(16, 33, bias=True, softcap=4.0, logit_scale=0.5, label_smoothing=0.1)
    x, target = randn(generator("head"), 2, 5, 16), torch.randint(33, (2, 5))
    logits = 4.0 * torch.tanh(F.linear(x, head.weight, head.bias) * 0.5 / 4.0)
    torch.testing.assert_close(head(x), logits)
    want = F.cross_entropy(logits.flatten(0, 1), target.flatten(), label_smoothing=0.1)
    torch.testing.assert_close(head(x, target), want)


class PlainRMSNorm(nn.Module):
    """Llama's, or Gemma's with an offset of 1."""

    def __init__(self, n, offset=0.0):
        super().__init__()
        self.weight, self.variance_epsilon, self.offset = nn.Parameter(torch.rand(n)), 1e-5, offset

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return ((self.weight.float() + self.offset) * h).to(x.dtype)


class OtherRMSNorm(PlainRMSNorm):
    def forward(self, x):
        return super().forward(x) * 1.25


class PlainMLP(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(24, 40), nn.Linear(24, 40), nn.Linear(40, 24)
        self.act_fn = activation

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def block():
    torch.manual_seed(0)
    activations = (nn.SiLU(), nn.GELU(), nn.GELU(approximate="tanh"), nn.Tanh())
    norms = PlainRMSNorm(24), PlainRMSNorm(24, 1.0), nn.RMSNorm(24, eps=1e-5), nn.LayerNorm(24)
    return nn.Sequential(*(m for pair in zip(norms, map(PlainMLP, activations), strict=True) for m in pair))


@pytest.mark.parametrize("what", ("another activation", "its approximation", "its forward", "eps"))
def test_what_is_changed_after_patch(what):
    def change(model):
        if what == "another activation":
            model[1].act_fn = nn.GELU()
        elif what == "its approximation":
            model[3].act_fn.approximate = "tanh"
        elif what == "its forward":
            model[1].act_fn.forward = torch.tanh
        else:
            model[0].variance_epsilon = 1.0
        return model

    model, x = block(), randn(generator("changed"), 3, 24)
    done = gnn.patch(model, say=None)
    change(model)
    want = change(block())(x)
    torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(copy.deepcopy(model)(x), want, rtol=1e-4, atol=1e-4)
    done.restore()
    torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-4)


def test_patch_and_restore():
    model, lines = block(), []
    plain = copy.deepcopy(model)
    done = gnn.patch(model, say=lines.append)
    kinds = [type(m).__name__ for m in model]
    assert kinds == ["SimilarRMSNorm", "SimilarMLP"] * 2 + ["RMSNorm", "SimilarMLP", "LayerNorm", "PlainMLP"]
    assert any(line.startswith("gpukern: 2 PlainRMSNorm -> RMSNorm: 0, 2") for line in lines)
    assert any(line.startswith("gpukern: 1 PlainMLP -> MLP with swiglu: 1") for line in lines)
    same(model, plain, randn(generator("patched"), 2, 7, 24), 1e-4)
    assert list(model.state_dict()) == list(plain.state_dict())
    with torch.profiler.profile() as run:
        model(torch.ones(1, 24))
    seen = {event.key for event in run.key_averages()}
    assert {"gpukern::rms_norm", "gpukern::layer_norm", "gpukern::swiglu", "gpukern::geglu"} <= seen
    gnn.patch(model, say=None)  # finds nothing more
    assert [type(m).__name__ for m in model] == kinds
    done.restore()
    assert [type(m) for m in model] == [type(m) for m in plain]
    assert all("_gpukern_rule" not in vars(m) for m in model)


def test_patch_leaves_a_norm_that_computes_something_else():
    model = nn.Sequential(OtherRMSNorm(24))
    assert gnn.patch(model, say=None).replaced == {}


def causal_model(**config):
    transformers = pytest.importorskip("transformers")
    sizes = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    torch.manual_seed(0)
    kind = config.pop("kind", "Llama")
    config = getattr(transformers, f"{kind}Config")(vocab_size=70, head_dim=8, **sizes, **config)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def test_loss_of_a_causal_model():
    model = causal_model()
    plain, lines = copy.deepcopy(model), []
    done = gnn.patch(model, say=lines.append, fused_linear_cross_entropy=True)
    assert any("LlamaRMSNorm -> RMSNorm" in line for line in lines)
    assert any("LlamaMLP -> MLP with swiglu" in line for line in lines)
    assert "gpukern: 1 loss -> linear_cross_entropy: LlamaForCausalLM" in lines
    ids = torch.randint(70, (2, 11))
    labels = ids.masked_fill(ids < 9, -100)
    for more in ({}, {"num_items_in_batch": 7}):
        got, want = (m(input_ids=ids, labels=labels, **more) for m in (model, plain))
        assert got.logits is None and want.logits is not None
        torch.testing.assert_close(got.loss, want.loss)
        got.loss.backward(), want.loss.backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5, msg=name)
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-4)
    assert type(model).__name__ == "LlamaForCausalLM" and type(model) is not type(plain)
    done.restore()
    assert type(model) is type(plain) and model(input_ids=ids, labels=labels).logits is not None


def test_loss_of_a_model_with_a_softcap_is_left():
    model, lines = causal_model(kind="Gemma2", final_logit_softcapping=5.0), []
    gnn.patch(model, say=lines.append, fused_linear_cross_entropy=True)
    assert any("Gemma2RMSNorm -> RMSNorm" in line for line in lines)
    assert any("Gemma2MLP -> MLP with geglu" in line for line in lines)
    assert any("Gemma2ForCausalLM left: loss and logits as before" in line for line in lines)
