# SPDX-License-Identifier: BSD-3-Clause
"""Quantised products that accelerate joins: the same bits, fewer ops, and what may be done to the
model afterwards."""

import copy
import pickle
import threading
from collections import Counter

import pytest
import torch
from conftest import assert_bits
from tiny_models import causal_lm
from torch.utils._python_dispatch import TorchDispatchMode

from torch_gpukern import nn as gnn
from torch_gpukern.nn import joint
from torch_gpukern.nn.quant.files import stays_in

transformers = pytest.importorskip("transformers")
IDS = torch.arange(14).view(2, 7)
RECIPES = ("fp8", "fp8-block", "int8", "w4", "w8", "mxfp4", "2:4")


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.of = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "gpukern":
            self.of[func.__name__.partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def model_of(family="llama", **more):
    return causal_lm(
        family,
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        pad_token_id=0,
        **more,
    )


def accelerated(recipe, joined=True, family="llama", monkeypatch=None, **more):
    from torch_gpukern.integrations import transformers as gk

    model = model_of(family, **more)
    done = gk.accelerate(model, recipe)
    if not joined:
        joint.leave(model)
    return model, done


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("family", ("llama", "qwen2", "qwen3", "gemma2"))
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_same_bits_by_fewer_products(family, recipe):
    """qwen2 has biases, qwen3 norms of q and k, gemma2 geglu."""
    model, done = accelerated(recipe, family=family)
    assert done.done["joined"].startswith(
        ("q_proj, k_proj, v_proj of 2", "gate_proj, up_proj of 2")
    )
    other, _ = accelerated(recipe, False, family=family)
    with Count() as one:
        got = logits(model)
    with Count() as many:
        want = logits(other)
    assert_bits(got, want)
    products = ("scaled_gemm", "weight_gemm", "sparse_gemm")
    counts = [sum(c.of[name] for name in products) for c in (one, many)]
    assert counts == [2 * 4, 2 * 7]
    if recipe in ("fp8", "int8", "fp8-block"):
        before = 2 * (7 if family == "gemma2" else 6)  # swiglu and quantize are one op
        assert (one.of["quantize"], many.of["quantize"]) == (before - 2 * 3, before)


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_more_ops_than_in_16_bits(recipe):
    from torch_gpukern.integrations import transformers as gk

    plain = model_of()
    gk.accelerate(plain)
    few, _ = accelerated(recipe)
    counts = []
    for model in (plain, few):
        with Count() as count:
            logits(model, IDS[:, :1])
        counts.append(sum(count.of.values()))
    assert counts[1] <= counts[0]


@pytest.mark.parametrize("recipe", ("fp8", "w4"))
def test_what_changes_the_weights_is_seen(recipe):
    """A state that is loaded, a dtype, a scale that is written in place, a layer that is restored."""
    model, done = accelerated(recipe, family="qwen2")
    first = logits(model)
    other, _ = accelerated(recipe, family="qwen2")
    state = copy.deepcopy(other.state_dict())
    for name in state:
        if name.endswith("weight_scale"):
            state[name] *= 2
        elif name.endswith("_proj.bias"):
            state[name] += 1
    model.load_state_dict(state)
    other.load_state_dict(state)
    joint.leave(other)
    assert_bits(logits(model), logits(other))
    layer = model.model.layers[0].self_attn.k_proj
    with torch.no_grad():
        for m in (model, other):
            one = m.model.layers[0].self_attn.k_proj
            one.weight_scale.mul_(0.5)
            one.bias.add_(1)
    assert_bits(logits(model), logits(other))
    layer.bias = torch.nn.Parameter(layer.bias * 2)
    other.model.layers[0].self_attn.k_proj.bias = layer.bias
    assert_bits(logits(model), logits(other))
    model.to(torch.float16)
    other.to(torch.float16)
    assert_bits(logits(model), logits(other))
    done.restore()
    plain = model_of("qwen2")
    assert not any("joint" in vars(m) for m in model.modules())
    assert {n: type(m) for n, m in model.named_modules()} == {
        n: type(m) for n, m in plain.named_modules()
    }
    assert not torch.equal(first, logits(model).to(first.dtype))


def test_copies_pickles_and_hooks():
    model, _ = accelerated("fp8")
    want = logits(model)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_bits(logits(made), want)
        layer = made.model.layers[0].self_attn.q_proj
        assert layer.joint[0].layers[0] is layer and layer.joint[0].whole is not None
    seen = []
    hook = model.model.layers[0].self_attn.k_proj.register_forward_hook(
        lambda m, given, out: seen.append(out.shape)
    )
    assert_bits(logits(model), want)
    hook.remove()
    assert seen == [(2, 7, 128)]


def test_save_pretrained(tmp_path):
    model, _ = accelerated("fp8")
    model.save_pretrained(tmp_path / "saved")
    made = model_of()
    gnn.load_quantized(made, tmp_path / "saved")
    other = model_of()
    gnn.quantize(other, "fp8", skip=stays_in(other), say=None)
    assert_bits(logits(made), logits(other))
    whole = model.state_dict()
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in whole.values() if t.numel() > 1)


def test_a_gradient_is_that_of_each_layer():
    grads = []
    for joined in (True, False):
        model, _ = accelerated("fp8", joined)
        embeds = model.get_input_embeddings()(IDS).detach().requires_grad_()
        model(inputs_embeds=embeds).logits.float().square().sum().backward()
        grads.append(embeds.grad)
    assert_bits(*grads)


@pytest.mark.parametrize("recipe", ("fp8", "w4"))
def test_one_graph(recipe):
    model, _ = accelerated(recipe)
    want = logits(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_bits(compiled(IDS).logits, want)
        for layer in model.model.layers:
            layer.self_attn.v_proj.load_state_dict(layer.self_attn.v_proj.state_dict())
        assert_bits(compiled(IDS).logits, want)


def test_threads_do_not_take_each_others_products():
    model, _ = accelerated("fp8")
    inputs = [(IDS + i) % 64 for i in range(4)]
    want = [logits(model, ids) for ids in inputs]
    wrong = []

    def work(i):
        for _ in range(20):
            if not torch.equal(logits(model, inputs[i]), want[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_layers_that_are_called_by_themselves():
    """Each has its own product of what x is at that time, and the gradient that nn.Linear has."""
    model, _ = accelerated("fp8")
    attention = model.model.layers[0].self_attn
    q, k = attention.q_proj, attention.k_proj
    x = torch.randn(2, 3, 128).bfloat16()
    with torch.no_grad():
        first = q(x)
        q(x).zero_()
        assert_bits(q(x), first)
        x.mul_(-1)
        assert_bits(k(x), k(x.clone()))
        assert_bits(q(x), q(x.clone()))
    assert not torch.equal(first, q(x))
    with torch.inference_mode():
        q(x)
    assert not k(x).is_inference()
    with torch.no_grad():
        q(x.requires_grad_())
    assert k(x).requires_grad and q(x).requires_grad


def test_a_product_may_be_added_to_in_place():
    model, _ = accelerated("fp8")
    model.requires_grad_(False)
    attention = model.model.layers[0].self_attn
    x, more = torch.randn(3, 128).bfloat16(), torch.zeros(128, requires_grad=True)
    q = attention.q_proj(x)
    q += more.bfloat16()
    k = attention.k_proj(x)
    q.sum().backward()
    assert not k.requires_grad and more.grad.tolist() == [3.0] * 128


def test_peft():
    peft = pytest.importorskip("peft")
    from torch_gpukern.integrations import peft as gkpeft

    gkpeft.register()
    results = []
    for joined in (True, False):
        model, _ = accelerated("fp8", joined)
        torch.manual_seed(1)
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        adapted = peft.get_peft_model(model, config).eval()
        with Count() as count:
            results.append(logits(adapted))
        products = count.of["scaled_gemm"]
        assert products == (8 if joined else 14)
        adapted.train()
        adapted(IDS, labels=IDS).loss.backward()
        results.append(
            adapted.base_model.model.model.layers[0].self_attn.q_proj.lora_A.default.weight.grad
        )
    assert_bits(results[0], results[2])
    assert_bits(results[1], results[3])


def test_modules_that_are_left():
    """One whose forward does not split columns, one whose forward was replaced, an nvfp4 weight, a
    skipped layer."""
    model, done = accelerated("nvfp4")
    assert "joined" not in done.done
    model = model_of()
    gnn.quantize(model, "fp8", skip=("1.self_attn.k_proj", "lm_head"), say=None)
    model.model.layers[0].self_attn.forward = model.model.layers[0].self_attn.forward
    found = joint.join(model)
    assert "model.layers.0.self_attn" not in found
    opt = transformers.OPTForCausalLM(
        transformers.OPTConfig(
            vocab_size=64, hidden_size=128, ffn_dim=128, num_hidden_layers=1,
            num_attention_heads=4, word_embed_proj_dim=128,
        )
    )  # fmt: skip
    gnn.quantize(opt, "fp8", say=None)
    assert joint.join(opt) == {}


def test_our_own_modules():
    torch.manual_seed(0)
    block = torch.nn.ModuleDict({"a": gnn.Attention(128, 4, 2), "m": gnn.MLP(128, 256)}).bfloat16()
    gnn.quantize(block, "fp8", say=None)
    x = torch.randn(2, 5, 128).bfloat16()
    with torch.no_grad():
        want = block["a"](x), block["m"](x)
        assert set(joint.join(block)) == {"a", "m"}
        for name, w in zip("am", want, strict=True):
            assert_bits(block[name](x), w)
