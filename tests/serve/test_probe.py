# SPDX-License-Identifier: BSD-3-Clause
"""Models that the engine would answer wrongly are refused by name; the others' tokens are
generate's."""

import pytest
import torch
from serving import prompts_of, run

from torch_gpukern import nn as gnn
from torch_gpukern.cli.commands import main
from torch_gpukern.serve import Engine, Request, models, probe, served

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest_plugins = ("serve_fixtures",)

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
LATENT = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
    "moe_intermediate_size": 32,
}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}


def network(config, kind, **settings):
    torch.manual_seed(0)
    net = getattr(transformers, kind)(getattr(transformers, config)(**(SMALL | settings))).eval()
    for weight in net.parameters():
        if weight.dim() > 1:  # so large that attention decides tokens
            torch.nn.init.normal_(weight, std=0.15)
    return net


SERVED = {
    "LlamaConfig": ("LlamaForCausalLM", {"num_key_value_heads": 2}),
    "MistralConfig": ("MistralForCausalLM", {"num_key_value_heads": 2, "sliding_window": 8}),
    "Gemma2Config": ("Gemma2ForCausalLM", {"head_dim": 16, "sliding_window": 8}),
    "GptOssConfig": (
        "GptOssForCausalLM",
        {"num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4},
    ),
    "GPT2Config": ("GPT2LMHeadModel", GPT2),
    "OPTConfig": ("OPTForCausalLM", {"ffn_dim": 128, "word_embed_proj_dim": 64}),
    "DeepseekV3Config": ("DeepseekV3ForCausalLM", LATENT),
    "DeepseekV2Config": ("DeepseekV2ForCausalLM", LATENT | {"q_lora_rank": None}),
    "MiniCPM3Config": ("MiniCPM3ForCausalLM", LATENT),
}
REFUSED = {
    "BloomConfig": ("BloomForCausalLM", {"n_layer": 2, "n_head": 4}, "its logits over pages"),
    "GPTNeoConfig": (
        "GPTNeoForCausalLM",
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
        "its logits over pages",
    ),
    "MambaConfig": ("MambaForCausalLM", {}, "a layer is linear_attention"),
    "DeepseekV32Config": ("DeepseekV32ForCausalLM", LATENT, "a layer is indexed_attention"),
    "Llama4TextConfig": (
        "Llama4ForCausalLM",
        {"num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 2},
        "a layer is chunked_attention; expected full_attention or sliding_attention",
    ),
    "StableLmConfig": ("StableLmForCausalLM", {"num_key_value_heads": 2}, "served_by"),
}


@pytest.mark.parametrize("config", SERVED)
def test_tokens_of_a_model_that_is_served(config):
    kind, settings = SERVED[config]
    net = network(config, kind, **settings)
    engine, prompts = Engine(served(net, 16)), prompts_of(12, 3)
    prompts = [[t % 300 for t in p] for p in prompts]
    requests = [engine.submit(Request(p, max_tokens=10)) for p in prompts]
    run(engine)
    net.set_attn_implementation("eager")
    for request, prompt in zip(requests, prompts):
        ids = torch.tensor([prompt])
        out = net.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False
        )
        assert request.answer == out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("config", REFUSED)
def test_a_model_that_is_not_served_is_named(config):
    kind, settings, says = REFUSED[config]
    with pytest.raises(ValueError, match=f"{kind} is not served: .*{says}"):
        served(network(config, kind, **settings), 16)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("recipe", ("w4", "int8", "fp8", "nvfp4"))
def test_quantised_models_are_served(recipe, dtype):
    """Codes amplify the rounding: the largest difference of fp8 in bfloat16 is a third of the
    logits' standard deviation, on pages and with another attention of transformers."""
    net = network("LlamaConfig", "LlamaForCausalLM", hidden_size=128, intermediate_size=256)
    gnn.quantize(net.to(dtype), recipe, say=None)
    served(net, 16)


@pytest.mark.parametrize("config", SERVED)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_sixteen_bits_are_served(dtype, config):
    kind, settings = SERVED[config]
    served(network(config, kind, **settings).to(dtype), 16)


def random_net(hidden, layers):
    """With transformers' own initial weights, which let attention decide little."""
    torch.manual_seed(0)
    settings = SMALL | dict(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=1,
        vocab_size=2048,
    )
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).bfloat16().eval()


def other_heads(q, rules):
    return q.roll(1, 1), rules


# The change of an attention call, and in how many of the layers.
WRONG = {
    "half the scale": (lambda q, rules: (q, rules | {"scale": rules["scale"] / 2}), None),
    "a window": (lambda q, rules: (q, rules | {"window_left": 3}), None),
    "no keys but its own": (lambda q, rules: (q, rules | {"window_left": 0}), None),
    "another head's keys": (other_heads, None),
    "another head's keys in the first layer": (other_heads, 1),
}


@pytest.mark.parametrize("hidden, layers", [(512, 2), (512, 8), (1024, 2)])
def test_random_bfloat16_models_are_told_from_wrong_ones(hidden, layers, monkeypatch):
    """The right wiring is off by about the rounding of transformers' own attentions, which is less
    than half of what is allowed; a wrong one is off by a quarter more than that at least."""
    net = random_net(hidden, layers)
    want = probe.alone(net, 2048, "eager")
    most, rounding = probe.most_off(net, want), probe.rounding(net, want)
    right = served(net, 16)
    off = probe.apart(probe.over_pages(right), want)
    assert 0 < off < 1.5 * rounding and off < most / 2
    attend = models.Step.attend
    for name, (change, count) in WRONG.items():

        def wrong(step, cache, layer, q, change=change, count=count, **rules):
            if count is None or layer < count:
                q, rules = change(q, rules)
            return attend(step, cache, layer, q, **rules)

        monkeypatch.setattr(models.Step, "attend", wrong)
        off = probe.apart(probe.over_pages(right), want)
        assert off > 1.25 * most, (name, off, most)
        with pytest.raises(ValueError, match="its logits over pages are off by"):
            served(net, 16)
        monkeypatch.setattr(models.Step, "attend", attend)


def test_what_may_be_off_follows_the_models_own_rounding(monkeypatch):
    """A deep model of random weights is far from itself. Where it is so far that a wrong attention
    would look the same, nothing more is allowed."""
    net = random_net(256, 1)
    want = torch.zeros(4, 2048)
    for own, most in ((0.0, 0.03), (0.01, 0.03), (0.055, 0.11), (0.3, 0.6), (0.9, 0.7)):
        monkeypatch.setattr(probe, "rounding", lambda *_, own=own: own)
        assert probe.most_off(net, want) == pytest.approx(most)
        assert probe.most_off(net, want, coded=torch.int8) == pytest.approx(min(3 * most, 0.7))
        assert probe.most_off(net, want, coded=torch.uint8) == pytest.approx(most)
    assert probe.most_off(net.float(), want) == probe.EXACT


def test_the_command_refuses_such_a_directory(model_dir, tmp_path, capsys):
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(model_dir).save_pretrained(tmp_path)
    kind, settings, _ = REFUSED["BloomConfig"]
    network("BloomConfig", kind, **settings).save_pretrained(tmp_path)
    assert main(["serve", str(tmp_path), "--port", "0"]) == 1
    assert "serve: BloomForCausalLM is not served: its logits" in capsys.readouterr().err


def test_scales_that_lose_the_keys_are_refused():
    """Keys that are 100 times as large as the largest code saturate."""
    net = network("LlamaConfig", "LlamaForCausalLM")
    scales = {"k_scale": torch.tensor(1e-5), "v_scale": torch.tensor(1e-5)}
    with pytest.raises(ValueError, match="with a cache of torch.int8: .* leave --kv-cache out"):
        served(net, 16, dtype=torch.int8, scales=scales)
