# SPDX-License-Identifier: BSD-3-Clause
"""transformers: accelerate on models with latent attention (DeepSeek's), beside their own eager
attention."""

import inspect

import pytest
import torch
from conftest import generator, randn, reference
from tiny_models import LATENT, latent_lm

transformers = pytest.importorskip("transformers")
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs  # noqa: E402

if not hasattr(theirs.DeepseekV3Attention, "expand_kv"):
    pytest.skip("this transformers caches keys and values", allow_module_level=True)
from torch_gpukern.integrations import transformers as gk  # noqa: E402
from torch_gpukern.integrations import transformers_latent as parts  # noqa: E402

SIZES = LATENT | {"vocab_size": 260}
# the name of the argument; transformers 5.17 has the second one
CACHE = "cache"
if CACHE not in inspect.signature(theirs.DeepseekV3ForCausalLM.forward).parameters:
    CACHE = "past_key_values"
LAYERS = SIZES["num_hidden_layers"]
STEPS = 7
CACHES = {
    "dynamic": lambda config: {},
    "static": lambda config: {"cache_implementation": "static", "disable_compile": True},
    "latent": lambda config: {CACHE: gk.LatentCache(config)},
    "latent static": lambda config: {CACHE: gk.LatentCache(config, 40)},
}


def tiny(kind="DeepseekV3", **settings):
    return latent_lm(kind, attention="eager", **SIZES | settings)


@pytest.fixture
def calls(monkeypatch):
    """The number of query tokens of each call of paged_attn."""
    seen, own = [], parts.paged_attn

    def counted(q, *args, **kwargs):
        seen.append(q.shape[0])
        return own(q, *args, **kwargs)

    monkeypatch.setattr(parts, "paged_attn", counted)
    return seen


def words(batch, tokens, padded):
    gen = generator("latent words", batch, tokens)
    ids = torch.randint(3, 250, (batch, tokens), generator=gen)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :4] = 0
    return ids, mask


def generated(net, ids, mask, **more):
    how = {"max_new_tokens": STEPS, "do_sample": False, "output_logits": True}
    out = net.generate(ids, attention_mask=mask, return_dict_in_generate=True, **how, **more)
    return out.sequences, torch.stack(out.logits)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("padded", (False, True), ids=("whole", "padded"))
@pytest.mark.parametrize("kind", ("DeepseekV3", "DeepseekV2"))
def test_generate(kind, padded, cache, calls):
    """Each new token attends over latents, with the logits of eager attention over keys."""
    net = tiny(kind)
    ids, mask = words(2, 60, padded)
    how = dict(CACHES[cache](net.config))
    if cache == "latent static":
        how[CACHE] = gk.LatentCache(net.config, 60 + STEPS)
    tokens, logits = generated(net, ids, mask)
    with gk.accelerate(net, say=None):
        found, got = generated(net, ids, mask, **how)
    assert calls == [2] * LAYERS * (STEPS - 1)
    assert torch.equal(found, tokens)
    assert (got - logits).abs().max() < 2e-5 * logits.abs().max()


def test_generate_with_beams(calls):
    """Beams reorder the cache, whose rows are then no longer side by side."""
    net = tiny()
    ids, mask = words(2, 9, False)
    want = net.generate(ids, attention_mask=mask, max_new_tokens=6, num_beams=3, do_sample=False)
    with gk.accelerate(net, say=None):
        for cache in (None, gk.LatentCache(net.config)):
            how = {"attention_mask": mask, "max_new_tokens": 6, "num_beams": 3, "do_sample": False}
            assert torch.equal(net.generate(ids, **{CACHE: cache}, **how), want)
    assert len(calls) >= 2 * 5 * LAYERS


@pytest.mark.parametrize("padded", (False, True), ids=("whole", "padded"))
@pytest.mark.parametrize("static", (False, True), ids=("grows", "static"))
def test_several_tokens_over_a_cache(static, padded, calls):
    """Drafts and later turns. Where a mask says the last key, keys and values are expanded."""
    net = tiny()
    ids, mask = words(2, 30, padded)
    with torch.no_grad():
        want = net(ids, attention_mask=mask).logits
        with gk.accelerate(net, say=None):
            cache = gk.LatentCache(net.config, 64 if static else None)
            got = []
            for first, end in ((0, 20), (20, 26), (26, 27), (27, 30)):
                how = {"attention_mask": mask[:, :end], CACHE: cache}
                got.append(net(ids[:, first:end], **how).logits)
    seen = mask.bool()
    off = (torch.cat(got, 1) - want)[seen].abs().max()
    assert off < 2e-5 * want.abs().max()
    assert 2 in calls and (12 in calls) == (not padded and not static)


def test_gradients_are_of_expanded_keys(calls):
    net = tiny()
    ids, mask = words(2, 12, True)
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, 4] = -100  # it follows padding, whose result means nothing
    grads = []
    for accelerated in (False, True):
        done = gk.accelerate(net, say=None) if accelerated else None
        net.zero_grad()
        net(ids, attention_mask=mask, labels=labels).loss.backward()
        grads.append(
            {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
        )
        if done is not None:
            done.restore()
    assert not calls and grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        assert (grads[1][name] - grad).abs().max() <= 1e-4 * grad.abs().max() + 1e-7, name


@pytest.mark.parametrize("batch", (1, 3))
@pytest.mark.parametrize("layer", ("grows", "static"))
def test_rows_are_read_in_place(layer, batch):
    made = parts.LatentLayer() if layer == "grows" else parts.StaticLatentLayer(max_cache_len=128)
    gen = generator("latent rows", layer, batch)
    held = []
    for tokens in (5, 1, 70, 1):
        new = [randn(gen, batch, 1, tokens, n) for n in (32, 16)]
        held.append(torch.cat(new, -1))
        c, k_pe = made.update(*new)
        rows, table = parts.rows_of(c, k_pe)
        assert rows.data_ptr() == c.data_ptr() and rows.shape[1] % parts.ROWS == 0
        want = torch.cat(held, 2)[:, 0]
        assert torch.equal(rows[:, : want.shape[1], 0], want) and table.flatten().tolist() == [
            *range(batch)
        ]
    made.crop(-3)
    new = [randn(gen, batch, 1, 2, n) for n in (32, 16)]
    c, k_pe = made.update(*new)
    want = torch.cat([torch.cat(held, 2)[:, :, :-3], torch.cat(new, -1)], 2)[:, 0]
    assert torch.equal(parts.rows_of(c, k_pe)[0][:, : want.shape[1], 0], want)
    order = torch.arange(batch).flip(0)
    made.reorder_cache(order)
    rows = parts.rows_of(made.keys, made.values)[0]
    assert torch.equal(rows[:, : want.shape[1], 0], want[order])
    if layer == "grows":
        c, k_pe = made.update(*new)
        rows = parts.rows_of(c, k_pe)[0]
        want = torch.cat([want[order], torch.cat(new, -1)[:, 0]], 1)
        assert rows.data_ptr() == c.data_ptr()
        assert torch.equal(rows[:, : want.shape[1], 0], want)


def test_gradients_through_a_cache_that_grows():
    made, gen = parts.LatentLayer(), generator("latent gradients")
    total, leaves = 0.0, []
    for tokens in (5, 2):
        new = [randn(gen, 1, 1, tokens, n).requires_grad_() for n in (32, 16)]
        leaves += new
        c, k_pe = made.update(*new)
        total = total + (c**2).sum() + (k_pe**2).sum()
    total.backward()
    for i, x in enumerate(leaves):  # the first ones are in the cache twice
        assert torch.equal(x.grad, 2 * x * (2 if i < 2 else 1))


def test_parts_that_are_not_side_by_side_are_copied():
    gen = generator("latent apart")
    c, k_pe = (randn(gen, 2, 1, 7, n) for n in (32, 16))
    for x, y in ((c, k_pe), (c[:1].expand(2, -1, -1, -1), k_pe)):
        rows, _ = parts.rows_of(x, y)
        assert rows.shape[1] == parts.ROWS
        assert torch.equal(rows[:, :7, 0], torch.cat([x, y], -1)[:, 0])
    wide = randn(gen, 1, 1, 7, 48)  # in place, with fewer rows than a page
    rows, _ = parts.rows_of(wide[..., :32], wide[..., 32:])
    assert rows.data_ptr() == wide.data_ptr() and torch.equal(rows[:, :, 0], wide[:, 0])


def test_attention_over_latents_in_float64():
    """Against the expanded form, with padding and several queries."""
    net = tiny().double()
    module = net.model.layers[0].self_attn
    layer = parts.Layer(module, "gpukern")
    gen = generator("latent float64")
    q = randn(gen, 2, 4, 3, 32, dtype=torch.float64)
    c, k_pe = (randn(gen, 2, 1, 9, n, dtype=torch.float64) for n in (32, 16))
    first, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([2, 0], [9, 7]))
    with torch.no_grad():
        got = layer.attend(q, c, k_pe, 0.3, first, lengths)
        k, v = module.expand_kv(c, k_pe)
        want = reference.flash_attn(
            q, k, v, scale=0.3, is_causal=True, kv_start=first, q_start=lengths - 3
        )
    torch.testing.assert_close(got, want.transpose(1, 2), rtol=1e-12, atol=1e-12)


def test_another_attention_gets_keys(calls):
    """After accelerate, and for layers that another tool has changed."""
    net = tiny()
    ids, mask = words(2, 9, False)
    want, _ = generated(net, ids, mask)
    with gk.accelerate(net, say=None):
        for way in ("eager", "sdpa"):
            net.set_attn_implementation(way)
            assert torch.equal(generated(net, ids, mask)[0], want)
        assert not calls
        net.set_attn_implementation("gpukern")
        for layer in net.model.layers:
            own = layer.self_attn.kv_b_proj
            layer.self_attn.kv_b_proj = torch.nn.Sequential(own)
        assert torch.equal(generated(net, ids, mask)[0], want) and not calls


def test_rows_that_are_too_wide_are_expanded(calls):
    net = tiny(kv_lora_rank=576)
    ids, mask = words(2, 9, False)
    want, _ = generated(net, ids, mask)
    with gk.accelerate(net, say=None):
        assert torch.equal(generated(net, ids, mask)[0], want) and not calls


def test_report_and_restore():
    net = tiny()
    done = gk.accelerate(net, say=None)
    assert done.done["2 DeepseekV3Attention"] == "over latents where that is less work"
    done.restore()
    assert not any({"expand_kv", parts.ABSORBED} & vars(m).keys() for m in net.modules())
    net.model.layers[1].self_attn.add_module("indexer", torch.nn.Linear(2, 2))
    with gk.accelerate(net, say=None) as done:
        assert done.done["1 DeepseekV3Attention"]
        assert "does more than latent attention: indexer" in str(done)


def test_few_bits_leave_the_expansion(calls):
    net = tiny()
    ids, mask = words(1, 9, False)
    with gk.accelerate(net, quantise="w8", say=None):
        assert type(net.model.layers[0].self_attn.o_proj).__name__ == "QuantizedLinear"
        generated(net, ids, mask)
    assert calls


def test_compiled():
    """One graph for a step over a static cache."""
    net = tiny(first_k_dense_replace=2)
    ids, mask = words(2, 9, False)
    with torch.no_grad():
        want = net(ids, attention_mask=mask).logits[:, -1]
        with gk.accelerate(net, say=None):
            cache = gk.LatentCache(net.config, 64)
            net(ids[:, :-1], **{CACHE: cache}, use_cache=True)
            step = torch.compile(net.forward, fullgraph=True, backend="aot_eager")
            got = step(ids[:, -1:], **{CACHE: cache}, use_cache=True).logits[:, -1]
    assert (got - want).abs().max() < 2e-5 * want.abs().max()


def test_what_a_latent_cache_refuses():
    llama = transformers.LlamaConfig(hidden_size=32, num_attention_heads=2)
    with pytest.raises(ValueError, match="LatentCache: LlamaConfig has no kv_lora_rank; expected"):
        gk.LatentCache(llama)
    for cache in (gk.LatentCache(tiny().config), gk.LatentCache(tiny().config, 8)):
        with pytest.raises(
            ValueError, match="LatentCache: a layer caches keys of 4 heads; expected"
        ):
            cache.update(torch.zeros(1, 4, 2, 32), torch.zeros(1, 4, 2, 24), 0)
