# SPDX-License-Identifier: BSD-3-Clause
"""Serving of models with latent attention (DeepSeek's): the cache holds latents alone, and answers
are generate's."""

import pytest
import torch
from serving import all_free, prompts_of, run, save_model
from tiny_models import LATENT, latent_lm

from torch_gpukern import nn as gnn
from torch_gpukern.nn.latent import absorbed, is_latent
from torch_gpukern.paged import shared
from torch_gpukern.serve import (
    Engine,
    Request,
    TransformersModel,
    loading,
    memory,
    models,
    probe,
    served,
    shards,
)
from torch_gpukern.serve.models import ATTENTION

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest_plugins = ("serve_fixtures",)

SIZES = LATENT | {
    "num_hidden_layers": 3,
    "vocab_size": 512,
    "n_routed_experts": 8,
    "n_group": 2,
}
DEEPSEEK = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}


def deepseek(kind="DeepseekV3", **settings):
    return latent_lm(kind, **SIZES | settings)


def wanted(net, prompt, n):
    ids = torch.tensor([prompt])
    how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": n, "do_sample": False}
    net.set_attn_implementation("eager")
    out = net.generate(ids, **how)[0, len(prompt) :].tolist()
    net.set_attn_implementation(ATTENTION)
    return out


def test_answers_are_those_of_generate():
    """Prompts in pieces, beside single tokens and drafts; prompts that share their first pages."""
    net = deepseek()
    model = served(net, 40)
    assert net.config._experts_implementation == "gpukern"
    first, second, third = prompts_of(37, 5, 20)
    prompts = [first, second, third, first[:32] + third]
    for settings in ({}, {"max_drafts": 3}):
        engine = Engine(model, max_batch=3, max_step_tokens=16, **settings)
        requests = [engine.submit(Request(p, max_tokens=14)) for p in prompts]
        run(engine)
        assert [r.answer for r in requests] == [wanted(net, p, 14) for p in prompts]
        assert all_free(engine)
    assert model.cache.latent == (32, 16) and model.cache.k.shape[3:] == (1, 48)


def test_shared_prefixes_are_read_once(monkeypatch):
    """Prompts that begin with the same pages, in a step of several tokens each."""
    monkeypatch.setattr(shared, "LEAST_KEYS", {"cpu": 1, "cuda": 1})
    net = deepseek()
    model = served(net, 40)
    engine = Engine(model, max_batch=3, max_step_tokens=64, max_drafts=0)
    first, *rest = prompts_of(48, 5, 7, 9)
    engine.submit(Request(first, max_tokens=1))
    run(engine)
    seen, eager = [], model.eager
    monkeypatch.setattr(model, "eager", lambda *args: seen.append(args[2]) or eager(*args))
    requests = [engine.submit(Request(first + p, max_tokens=6)) for p in rest]
    run(engine)
    assert any(prefix is not None for prefix in seen)
    assert [r.answer for r in requests] == [wanted(net, first + p, 6) for p in rest]


def test_a_network_is_itself_again_outside_of_steps():
    """Other attention functions get keys and values of all heads."""
    net = deepseek()
    model = served(net, 8)
    assert len(model.latents) == 3
    assert not any("expand_kv" in vars(m) for m in net.modules())
    with pytest.raises(RuntimeError, match="a step failed"), model.latents_kept():
        assert all("expand_kv" in vars(m) for m in model.latents)
        raise RuntimeError("a step failed")
    assert not any("expand_kv" in vars(m) for m in net.modules())


def test_accelerate_before_and_behind():
    """A model that was accelerated is served. After that an attention function that does not read
    the pages is refused by name: it would see the step's tokens alone."""
    from torch_gpukern.integrations.transformers import accelerate

    prompt = prompts_of(9)[0]
    net = deepseek()
    served(net, 16)
    want = wanted(net, prompt, 6)
    net = deepseek()
    done = accelerate(net)
    model = served(net, 16)
    for _ in range(2):
        engine = Engine(model)
        request = engine.submit(Request(prompt, max_tokens=6))
        run(engine)
        assert request.answer == want
    assert all("expand_kv" in vars(m) for m in model.latents)  # accelerate's
    assert "latents of" not in str(done)
    done.restore()
    assert not any("expand_kv" in vars(m) for m in model.latents)
    engine.submit(Request(prompt, max_tokens=6))
    with pytest.raises(
        RuntimeError, match="does not read the pages.*make the TransformersModel after"
    ):
        run(engine)


def test_latents_of_another_tool():
    net = deepseek()
    net.model.layers[0].self_attn.expand_kv = lambda c, k_pe: (c, k_pe)
    with pytest.raises(ValueError, match="expand_kv that another tool replaced; put its own back"):
        served(net, 8)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_pages_of_8_bits(dtype):
    """Rows of 656 bytes, within the bounds of the trial."""
    net = deepseek(**DEEPSEEK).to(dtype)
    model = served(net, 16, dtype=torch.uint8)
    assert model.cache.k.shape[-1] == 656
    (prompt,) = prompts_of(20)
    engine = Engine(model)
    request = engine.submit(Request(prompt, max_tokens=8))
    run(engine)
    assert len(request.answer) == 8 and all_free(engine)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    found = save_model(tmp_path_factory.mktemp("latent"))
    deepseek(**DEEPSEEK).save_pretrained(found)
    return found


def ready(directory, **settings):
    what = loading.What(str(directory), None, torch.float32, 32, **settings)
    return loading.ready(what, torch.device("cpu")).model


def test_a_directory_is_served(directory):
    model = ready(directory)
    (prompt,) = prompts_of(20)
    engine = Engine(model)
    request = engine.submit(Request(prompt, max_tokens=10))
    run(engine)
    assert request.answer == wanted(deepseek(**DEEPSEEK), prompt, 10)
    size = memory.bytes_of_page(model.model, 16, 4, 1)
    assert 32 * size == model.cache.nbytes == 32 * 16 * 3 * 576 * 4


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_random_weights(dtype):
    what = loading.What(None, "tiny-latent", dtype, 32)
    model = loading.ready(what, torch.device("cpu")).model
    assert model.cache.latent == (64, 16) and model.cache.k.dtype == dtype
    engine = Engine(model)
    request = engine.submit(Request([5, 6, 7], max_tokens=5))
    run(engine)
    assert len(request.answer) == 5


def test_the_flag_for_8_bits(directory):
    model = ready(directory, cache="e4m3")
    assert model.cache.k.dtype == torch.uint8
    assert 32 * memory.bytes_of_page(model.model, 16, 1, 1) == model.cache.nbytes
    with pytest.raises(ValueError, match=r"--kv-cache is int8, and the model caches latents"):
        ready(directory, cache="int8")


@pytest.mark.parametrize("recipe", (None, "fp8", "w8"))
def test_8_bits_are_compared_with_rounded_latents(directory, recipe, monkeypatch):
    """The rounding of latents alone sends tokens to other experts, so logits are far from those of
    latents in float32. A wrong attention would still show."""
    model = ready(directory, cache="e4m3", recipe=recipe)
    net, found = model.model, probe.over_pages(model)
    plain = probe.alone(net, model.vocab, "eager")
    with probe.rounded_latents(model):
        want = probe.alone(net, model.vocab, "eager")
    assert probe.apart(found, want) < 2e-3 < 0.05 < probe.apart(found, plain)
    monkeypatch.setattr(probe, "_of_rounded", lambda expand: expand)
    with pytest.raises(ValueError, match="its logits over pages are off by"):
        served(net, 16, dtype=torch.uint8)


def test_a_recipe_leaves_the_expansion(directory):
    model = ready(directory, recipe="w8")
    layer = model.model.model.layers[1].self_attn
    assert type(layer.o_proj).__name__ == "QuantizedLinear"
    assert type(layer.kv_b_proj).__name__ != "QuantizedLinear"


def test_an_expansion_of_few_bits_is_decoded():
    """Its answers over pages are those of the quantised network without a cache."""
    net = deepseek(**DEEPSEEK)
    gnn.quantize(net, "w8", say=None)
    layer = net.model.layers[1].self_attn
    assert type(layer.kv_b_proj).__name__ == "QuantizedLinear"
    assert served(net, 16).latents[layer].weight.shape == (4 * 40, 512)


def test_absorbed_products_are_the_layers_own():
    """Attention over latents against expanded keys and values, float64."""
    net = deepseek().double()
    layer = next(m for m in net.modules() if is_latent(m))
    found = absorbed(layer)
    gen = torch.Generator().manual_seed(1)
    q = torch.randn(2, 4, 5, 32, generator=gen, dtype=torch.float64)
    c = torch.randn(2, 1, 7, 32, generator=gen, dtype=torch.float64)
    k_pe = torch.randn(2, 1, 7, 16, generator=gen, dtype=torch.float64)
    with torch.no_grad():
        k, v = layer.expand_kv(c, k_pe)
        want = (q @ k.mT).softmax(-1) @ v
        rows = torch.cat([c, k_pe], -1)
        p = (found.queries(q).transpose(1, 2) @ rows.mT).softmax(-1)
        got = found.values((p @ c).transpose(1, 2)).transpose(1, 2)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_layers_that_do_more_are_refused():
    def refuses(text, change, **settings):
        net = deepseek(**settings)
        change(net.model.layers[1].self_attn)
        with pytest.raises(ValueError, match=text):
            TransformersModel(net, 8)

    refuses(
        "DeepseekV3Attention does more than latent attention: indexer",
        lambda m: m.add_module("indexer", torch.nn.Linear(2, 2)),
    )

    def scaled(m):
        own = type(m)

        class Scaled(own):
            def expand_kv(self, c, k_pe):
                k, v = own.expand_kv(self, c, k_pe)
                return k, 1.2 * v

        m.__class__ = Scaled

    refuses("Scaled expands its latents by more than kv_b_proj", scaled)
    refuses(
        "its layers have latents of several widths",
        lambda m: setattr(m, "qk_rope_head_dim", 8),
    )


def test_layers_of_an_older_transformers_are_refused(monkeypatch):
    net = deepseek()
    monkeypatch.delattr(type(net.model.layers[0].self_attn), "expand_kv")
    with pytest.raises(ValueError, match="no expand_kv.*expected a later transformers"):
        TransformersModel(net, 8)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize("cache", (None, torch.uint8), ids=("whole", "8 bits"))
def test_long_prompts_expand_their_new_tokens(cache, dtype, monkeypatch):
    """In pieces, behind cached prefixes and beside decoding requests: the logits of steps without
    expansion."""
    if cache is not None and dtype == torch.float64:
        pytest.skip("rows of 8 bits take no float64")
    monkeypatch.setattr(models, "EXPANDED_TOKENS", 4)
    net = deepseek(first_k_dense_replace=3, **DEEPSEEK).to(dtype)
    model = TransformersModel(net, 40, dtype=cache)
    expanded, own = [], models._expanded
    monkeypatch.setattr(
        models, "_expanded", lambda step, *a: expanded.append(step.has_old) or own(step, *a)
    )
    ids = prompts_of(40, 30, 25)

    def logits(least):
        monkeypatch.setattr(models, "EXPANDED_TOKENS", least)
        handles = [model.cache.allocate() for _ in ids]
        done, found = [0, 0, 0], []
        for counts in ((20, 0, 0), (20, 9, 5), (0, 1, 8), (0, 9, 8), (0, 11, 1)):
            some = [i for i, n in enumerate(counts) if n]
            new = [counts[i] for i in some]
            model.begin([handles[i] for i in some], new)
            tokens = [t for i in some for t in ids[i][done[i] : done[i] + counts[i]]]
            places = [p for i in some for p in range(done[i], done[i] + counts[i])]
            starts = [sum(new[:i]) for i in range(len(new))]
            found.append(
                model.forward(
                    tokens, places, list(range(sum(new))), starts, [[]] * len(new)
                ).clone()
            )
            for i in some:
                done[i] += counts[i]
        for handle in handles:
            model.cache.free(handle)
        return torch.cat(found)

    want = logits(10**6)
    assert not expanded
    got = logits(4)
    # the third step has a request with fewer old tokens than new ones
    assert expanded == [False] * 3 + [True] * 9  # three layers in four of the steps
    most = 2e-5 if cache is None else 0.1  # new tokens are not read from 8 bits
    assert (got - want).abs().max() < most * want.abs().max()


@pytest.mark.parametrize(
    "kind, settings",
    (
        ("DeepseekV3", {}),
        ("DeepseekV2", {"q_lora_rank": None}),
        ("DeepseekV2", {}),
        ("DeepseekV2", {"first_k_dense_replace": 0}),
        ("DeepseekV3", {"first_k_dense_replace": 3}),
        ("MiniCPM3", {}),
    ),
    ids=str,
)
def test_two_ranks_are_the_network(ranks, kind, settings):
    """Each rank has a part of all experts, and in V2 its heads; both have all latents."""
    ids = torch.tensor([[5, 7, 9, 11, 2]])
    nets = [deepseek(kind, **settings) for _ in range(3)]
    with torch.inference_mode():
        want = nets[2](input_ids=ids).logits
    assert len({sum(p.numel() for p in net.parameters()) for net in nets}) == 1

    def work(rank):
        shards.shard(nets[rank], rank, 2)
        model = served(nets[rank], 16, ranks=2)
        nets[rank].set_attn_implementation("eager")
        with torch.inference_mode():
            return model, nets[rank](input_ids=ids).logits

    for model, logits in ranks.run(work):
        assert (logits - want).abs().max() < 1e-4 * want.abs().max()
        assert model.cache.k.shape[3:] == (1, 48)
        heads = next(iter(model.latents.values())).heads
        assert heads == (4 if kind == "DeepseekV3" else 2)  # V3's plan leaves attention whole
    experts = [[p.numel() for n, p in net.named_parameters() if ".experts." in n] for net in nets]
    assert [2 * n for n in experts[0]] == experts[2]


def test_experts_that_ranks_do_not_divide():
    with pytest.raises(ValueError, match="experts.gate_up_proj has 47 columns of an expert"):
        shards.shard(deepseek(moe_intermediate_size=47), 0, 2)
    net = deepseek()
    net.model.layers[1].mlp.experts.has_bias = True
    with pytest.raises(ValueError, match="experts.gate_up_proj has biases, is transposed, or"):
        shards.shard(net, 0, 2)
