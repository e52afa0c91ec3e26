# SPDX-License-Identifier: BSD-3-Clause
"""Fused layers compute what the network's own layers compute. Other layers are not replaced."""

import gc

import pytest
import torch
from conftest import generator, randn
from torch import nn

from torch_gpukern import PagedKVCache
from torch_gpukern import nn as gnn
from torch_gpukern.nn.joined import joined
from torch_gpukern.serve import TransformersModel
from torch_gpukern.serve.fused import Fused
from torch_gpukern.serve.probe import alone, over_pages

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


def network(kind="Llama", device="cpu", dtype=torch.float32, **settings):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(SIZES | settings))
    net = getattr(transformers, f"{kind}ForCausalLM")(config)
    for name, weight in net.named_parameters():
        if weight.dim() > 1:  # large enough that attention decides the tokens
            nn.init.normal_(weight, std=0.15)
        elif name.endswith("norm.weight"):
            nn.init.uniform_(weight, 0.5, 1.5)
    net = net.to(device, dtype).eval()
    gnn.patch(net, say=None)
    return net


def both(net):
    """(number of fused layers, logits with them, logits of the network's own layers)"""
    model = TransformersModel(net, 16)
    fused, count = over_pages(model), len(model.fused.layers)
    model.fused = Fused()
    model.graphs.clear()
    return count, fused, over_pages(model)


def off(a, b):
    return ((a - b).abs().max() / b.std()).item()


@pytest.mark.parametrize(
    "kind, settings, layers",
    (
        ("Llama", {}, 3),
        ("Llama", {"attention_bias": True, "mlp_bias": True}, 3),
        ("Mistral", {"sliding_window": 4}, 3),
        ("Qwen3", {}, 3),  # QK norm
        ("Qwen2", {}, 3),  # q, k and v have a bias, o has none
        ("Gemma", {}, 3),  # geglu, and norms that add 1
        ("Gemma2", {"sliding_window": 4}, 0),  # four norms a layer
        ("Olmo2", {}, 0),  # norms after the products
    ),
)
def test_logits_are_the_same(kind, settings, layers, device):
    net = network(kind, device, **settings)
    count, fused, plain = both(net)
    assert count == layers
    assert off(fused, plain) < 1e-4
    assert off(fused, alone(net, 300, "eager")) < 1e-4


@pytest.mark.parametrize(
    "recipe",
    ("fp8", "fp8-block", "int8", "mxfp8", "w8", "w4", "w4-zero", "mxfp4", "2:4", "2:4-fp8"),
)
def test_quantised_logits_are_the_same(recipe, device):
    net = network(device=device)
    gnn.quantize(net, recipe, say=None)
    count, fused, plain = both(net)
    assert count == 3
    # Activations are float32, so codes differ only if a value is halfway between two codes.
    assert ((fused - plain).square().mean() / plain.var()).sqrt().item() < 0.02


def test_weights_of_the_whole_stay_apart():
    """nvfp4 has a scale for the whole weight, so q, k and v cannot be joined."""
    net = network(dtype=torch.bfloat16)
    gnn.quantize(net, "nvfp4", say=None)
    assert both(net)[0] == 0


def test_a_layer_that_does_more_is_left():
    net = network()
    layers = net.model.layers
    layers[0].mlp.down_proj.register_forward_hook(lambda module, args, out: 2 * out)
    layers[1].self_attn.q_proj.weight = nn.Parameter(layers[1].self_attn.q_proj.weight.double())
    layers[1].double()
    model = TransformersModel(network(), 16)
    assert len(model.fused.layers) == 3
    layers[1].float()
    count, fused, plain = both(net)
    assert count == 2 and off(fused, plain) < 1e-4


@pytest.mark.parametrize("lost", ("k", "v", "both"))
def test_a_layer_that_writes_no_rows_is_left(lost, monkeypatch):
    """The trial compares rows of the cache, where the network's own run left its keys and
    values."""
    write = PagedKVCache.rope_write

    def loses(cache, q, k, v, cos, sin, positions, slots, layer=0, **how):
        kept = [x[layer].clone() for x in (cache.k, cache.v)]
        q = write(cache, q, k, v, cos, sin, positions, slots, layer, **how)
        for name, pages, before in zip("kv", (cache.k, cache.v), kept):
            if lost in (name, "both"):
                pages[layer].copy_(before)
        return q

    monkeypatch.setattr(PagedKVCache, "rope_write", loses)
    assert not TransformersModel(network(), 16).fused.layers


def test_interleaved_angles_are_left():
    """A network that rotates neighbouring columns has the same modules as one that rotates
    halves."""
    from transformers.models.llama import modeling_llama

    net = network()
    gc.collect()  # a model of another test that accelerate changed has its own rotation in place

    def rotate(x):
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)

    before, modeling_llama.rotate_half = modeling_llama.rotate_half, rotate
    try:
        assert both(net)[0] == 0
    finally:
        modeling_llama.rotate_half = before


def test_the_network_is_as_it_was():
    net = network(dtype=torch.bfloat16)
    done = gnn.quantize(net, "w4", say=None)
    state = {name: t.clone() for name, t in net.state_dict().items() if torch.is_tensor(t)}
    own = [set(vars(m)) for m in net.modules()]
    both(net)
    both(net)  # joined weights are found, not joined again
    for name, t in net.state_dict().items():
        if torch.is_tensor(t):
            assert torch.equal(t.view(torch.uint8), state[name].view(torch.uint8)), name
    assert [set(vars(m)) for m in net.modules()] == own
    done.restore()
    assert both(net)[0] == 3


@pytest.mark.parametrize("recipe", (None, "fp8", "w4", "w4-zero", "int8", "2:4"))
def test_joined_weights_are_in_memory_once(recipe, device):
    gen = generator("joined", str(recipe))
    whole = nn.ModuleList(nn.Linear(128, n, device=device) for n in (192, 64, 64)).to(
        torch.bfloat16
    )
    if recipe:
        gnn.quantize(whole, recipe, say=None)
    x = randn(gen, 5, 128).to(device, torch.bfloat16)
    with torch.no_grad():
        want = torch.cat([layer(x) for layer in whole], -1)
        product = joined(list(whole))
        assert product is not None and product.sizes == [192, 64, 64]
        torch.testing.assert_close(product(x), want, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(torch.cat([m(x) for m in whole], -1), want, rtol=0, atol=0)
    name = {None: "weight", "fp8": "weight_codes", "int8": "weight_codes", "2:4": "weight_values"}
    tensors = [getattr(m, name.get(recipe, "weight_packed")) for m in whole]
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == 1
    again = joined(list(whole))
    assert again is not None
    if recipe is None:
        assert again.weight.data_ptr() == product.weight.data_ptr()
        with torch.no_grad():
            whole[1].weight.zero_()  # in place, so the joined weight changes too
        assert not product(x)[:, 192:256].sub(whole[1].bias).abs().max()


def test_what_cannot_be_joined():
    a, b = nn.Linear(64, 8), nn.Linear(64, 8, bias=False)
    assert joined([a, b]) is None
    assert joined([a, nn.Linear(64, 8).double()]) is None
    assert joined([a, nn.Bilinear(2, 2, 2)]) is None
    c = nn.Linear(64, 8)
    c.register_forward_pre_hook(lambda *_: None)
    assert joined([a, c]) is None
    quantised = nn.ModuleList(nn.Linear(64, 40) for _ in range(2))
    gnn.quantize(quantised, "w4", say=None)
    assert joined(list(quantised)) is None  # 40 rows are no whole number of tiles
