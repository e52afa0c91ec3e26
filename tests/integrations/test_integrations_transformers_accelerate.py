# SPDX-License-Identifier: BSD-3-Clause
"""accelerate: a model with everything of ours in it gives what the plain model gives."""

import copy
import gc
import importlib

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")
import test_integrations_transformers as families  # noqa: E402

from torch_gpukern import nn as gnn  # noqa: E402
from torch_gpukern.integrations import transformers as gk  # noqa: E402
from torch_gpukern.integrations import transformers_accelerate as parts  # noqa: E402
from torch_gpukern.nn.similar import SimilarRMSNorm  # noqa: E402

MASK = families.padding([19, 11], 19, "left")
IDS = families.words(2, 19)
# The first token of a padded sequence follows padding, whose values mean nothing.
LABELS = IDS.masked_fill((IDS < 9) | (MASK == 0), -100)
LABELS[1, 8] = -100


@pytest.fixture(autouse=True, scope="module")
def _registered():
    gk.register()
    transformers.AttentionInterface.register("exact", families.exact)
    transformers.AttentionMaskInterface.register("exact", gk.hf.eager_mask)


def small(name, dtype=torch.float32):
    model = families.any_model(getattr(transformers, f"{name}Config"), _causal(name))
    assert model is not None, name
    return model.to(dtype)


def _causal(name):
    found = getattr(transformers, f"{name}ForCausalLM", None)
    return found or getattr(transformers, f"{name}LMHeadModel")


def step(model):
    """The loss, the logits of tokens, and all gradients."""
    model.zero_grad()
    out = model(input_ids=IDS, attention_mask=MASK, labels=LABELS)
    out.loss.backward()
    with torch.no_grad():
        logits = model(input_ids=IDS, attention_mask=MASK).logits[MASK.bool()]
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return out.loss.detach(), logits, grads


def assert_close(got, want):
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-4 * float(want[1].abs().max()))
    assert got[2].keys() == want[2].keys()
    most = max(float(g.abs().max()) for g in want[2].values())
    for name, grad in want[2].items():
        # A key's bias has no gradient but rounding.
        size = max(float(grad.abs().max()), 1e-4 * most)
        torch.testing.assert_close(got[2][name], grad, rtol=0, atol=2e-3 * size, msg=name)


FAMILIES = (
    "Llama", "Qwen2", "Qwen3", "Qwen3Moe", "Mistral", "Mixtral", "Gemma", "Gemma2", "Phi", "Phi3",
    "GPT2", "GPTNeoX", "GPTJ", "OPT", "GptOss", "Cohere", "Granite", "Olmo2", "StableLm", "Bloom",
    "Glm4", "Starcoder2", "Llama4Text:Llama4",
)  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_loss_logits_and_gradients(name):
    config, _, model_name = name.partition(":")
    model = families.any_model(
        getattr(transformers, f"{config}Config"), _causal(model_name or name)
    )
    before = {path: type(m) for path, m in model.named_modules()}
    want = step(model)
    done = gk.accelerate(model, say=None)
    assert done.done["loss"].startswith("linear_cross_entropy"), str(done)
    got = step(model)
    assert_close(got, want)
    done.restore()
    assert {path: type(m) for path, m in model.named_modules()} == before
    after = step(model)
    assert torch.equal(after[0], want[0]) and torch.equal(after[1], want[1])


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "mixtral", "deepseek_v3"])
def test_as_near_to_float64_as_eager(family):
    def run(model):
        if model.config._attn_implementation == "gpukern":
            gk.accelerate(model, say=None)
        out = model(input_ids=IDS, attention_mask=MASK, labels=LABELS)
        out.loss.backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        return {"loss": out.loss.detach(), **grads}

    families.assert_as_eager(families.FAMILIES[family], run)


@pytest.mark.parametrize("name", ["Llama", "Mixtral"])
def test_bfloat16(name):
    """About as far from float32 as the plain model in bfloat16. Experts may be chosen otherwise, so
    a mixture is asked for its loss alone."""
    model = small(name)
    exact = step(copy.deepcopy(model))
    plain = step(model.bfloat16())
    gk.accelerate(model, say=None)
    got = step(model)
    assert (got[0] - exact[0]).abs() <= 2 * (plain[0] - exact[0]).abs() + 2e-2
    if name == "Llama":
        off, theirs = (float((x[1].float() - exact[1]).norm()) for x in (got, plain))
        assert off <= 1.5 * theirs


def test_the_report():
    lines = []
    model = small("Llama")
    done = gk.accelerate(model, say=lines.append)
    assert lines == [
        'gpukern: attention: "gpukern"',
        "gpukern: rotary embedding: rope, for all models of this family in the process",
        "gpukern: 2 LlamaMLP: MLP with swiglu",
        "gpukern: 5 LlamaRMSNorm: RMSNorm",
        "gpukern: 15 nn.Linear: gnn.Linear",
        "gpukern: loss: linear_cross_entropy, logits are None where labels are given",
    ]
    assert model.config._attn_implementation == "gpukern"
    again = gk.accelerate(model, say=None)
    assert not again.done
    assert again.left["attention"] == 'it is "gpukern" already'
    assert again.left["rotary embedding"] == "it is rope already"
    assert again.left["LlamaForCausalLM"].endswith("it has our loss already")
    again.restore()
    assert isinstance(model.model.norm, SimilarRMSNorm)
    done.restore()
    done.restore()
    assert model.config._attn_implementation == "eager"


def test_without_the_loss():
    model = small("Llama")
    done = gk.accelerate(model, loss=False, say=None)
    assert done.left["loss"] == "loss=False"
    assert model(input_ids=IDS, labels=IDS).logits is not None


@pytest.mark.parametrize(
    "name, what",
    [("Bloom", "has one of its own"), ("Doge", "DogeAttention changes the mask itself")],
)
def test_attention_that_is_left(name, what):
    model = small(name)
    want = step(model)
    done = gk.accelerate(model, say=None)
    assert what in done.left["attention"]
    assert model.config._attn_implementation == "eager"
    assert_close(step(model), want)


def test_rope_belongs_to_the_family():
    where = importlib.import_module("transformers.models.llama.modeling_llama")
    gc.collect()
    own = where.apply_rotary_pos_emb
    assert own.__module__ != parts.__name__  # models of other tests are gone
    one, two = small("Llama"), small("Llama")
    first, second = gk.accelerate(one, say=None), gk.accelerate(two, say=None)
    ours = where.apply_rotary_pos_emb
    assert ours is not own
    first.restore()
    assert where.apply_rotary_pos_emb is ours
    second.restore()
    assert where.apply_rotary_pos_emb is own
    gk.accelerate(one, say=None)
    assert where.apply_rotary_pos_emb is not own
    del one, first
    gc.collect()
    assert where.apply_rotary_pos_emb is own


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "cohere", "gpt_oss", "gpt_neox", "glm"])
def test_rotations(name, dtype):
    """Rotary embeddings of every kind: halves, pairs, angles once, a part of the columns, and
    positions of each row."""
    where = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    model = small({"llama": "Llama", "cohere": "Cohere", "gpt_oss": "GptOss",
                   "gpt_neox": "GPTNeoX", "glm": "Glm"}[name])  # fmt: skip
    maker = next(m for m in model.modules() if "Rotary" in type(m).__name__)
    how, why = parts._kind_of_rotation(where.apply_rotary_pos_emb, model)
    assert how is not None, why
    ours = parts._rotated_by(where.apply_rotary_pos_emb, *how)
    gen = torch.Generator().manual_seed(0)
    for positions in (torch.arange(5)[None], torch.tensor([[0, 1, 2, 3, 4], [7, 9, 1, 0, 30]])):
        q, k = (torch.randn(2, h, 5, 16, generator=gen, dtype=torch.float64) for h in (4, 2))
        cos, sin = maker(q.to(dtype), positions)
        if name != "glm":
            assert cos.shape[-1] in (8, 16, 4)
        want = where.apply_rotary_pos_emb(q, k, cos.double(), sin.double())
        got = ours(q.to(dtype), k.to(dtype), cos, sin)
        tolerance = {torch.float32: 1e-6, torch.float64: 1e-13, torch.bfloat16: 2e-2}[dtype]
        if name == "cohere":  # whose own function rounds to float32
            tolerance = max(tolerance, 1e-6)
        for mine, theirs in zip(got, want, strict=True):
            assert mine.dtype is dtype
            torch.testing.assert_close(mine.double(), theirs, rtol=tolerance, atol=tolerance)
        flipped = ours(*(x.to(dtype).transpose(1, 2) for x in (q, k)), cos, sin, unsqueeze_dim=2)
        assert all(torch.equal(f.transpose(1, 2), g) for f, g in zip(flipped, got, strict=True))


def test_in_few_bits_and_back():
    model = small("Llama")
    want = step(model)
    done = gk.accelerate(model, "w4", say=None)
    assert done.done["quantised"] == "14 Linear -> w4"
    assert done.left["lm_head in w4"] == "skipped"
    assert isinstance(model.model.layers[0].mlp.up_proj, gnn.QuantizedLinear)
    loss = model(input_ids=IDS, attention_mask=MASK, labels=LABELS).loss
    assert loss.isfinite()
    done.restore()
    after = step(model)
    assert torch.equal(after[1], want[1])


BERT = dict(
    hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=70
)
WHISPER = dict(
    d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, num_mel_bins=8,
    decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=70,
    max_source_positions=20, max_target_positions=20, pad_token_id=0, bos_token_id=1,
    eos_token_id=2, decoder_start_token_id=1,
)  # fmt: skip
HEADS = {
    "classifier": ("BertForSequenceClassification", "BertConfig", BERT),
    "cls.predictions.decoder": ("BertForMaskedLM", "BertConfig", BERT),
    "score": ("LlamaForSequenceClassification", "LlamaConfig", {**BERT, "pad_token_id": 0}),
    "proj_out": ("WhisperForConditionalGeneration", "WhisperConfig", WHISPER),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_of_any_name_stay(name):
    """LoRA trains a classifier as it is, and a quantised one has nothing to train."""
    kind, config, sizes = HEADS[name]
    model = getattr(transformers, kind)(getattr(transformers, config)(**sizes))
    done = gk.accelerate(model, "w8", say=None)
    assert type(model.get_submodule(name)) is gnn.Linear
    assert done.quantized.skipped[name] == "skipped" and len(done.quantized.replaced) >= 6


LEFT = {
    "Nemotron": {"5 NemotronLayerNorm1P": "it is neither torch's norm nor called RMSNorm"},
    "Phi3": {"2 Phi3MLP": "its modules are not act_fn, down_proj, gate_proj, up_proj"},
    "DeepseekV2": {
        "rotary embedding of modeling_deepseek_v2": "it is apply_rotary_emb, not apply_rotary_pos_emb"
    },
    "Llama4Text:Llama4": {
        "rotary embedding of modeling_llama4": "it is apply_rotary_emb, not apply_rotary_pos_emb"
    },
    "Llama": {},
}


@pytest.mark.parametrize("name", LEFT)
def test_layers_under_other_names_are_reported(name):
    config, _, model_name = name.partition(":")
    model = families.any_model(
        getattr(transformers, f"{config}Config"), _causal(model_name or name)
    )
    done = gk.accelerate(model, say=None)
    assert done.left.items() >= LEFT[name].items()
    if not LEFT[name]:
        assert done.left == {}


def test_t5_is_reported():
    config = transformers.T5Config(
        d_model=64, d_kv=32, d_ff=64, num_layers=1, num_heads=2, vocab_size=70,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    done = gk.accelerate(transformers.T5ForConditionalGeneration(config), say=None)
    assert {"7 T5LayerNorm", "2 T5DenseGatedActDense"} <= done.left.keys()


def test_refusals_change_nothing():
    with pytest.raises(TypeError, match="gpukern accelerate: model must be a transformers model"):
        gk.accelerate(nn.Linear(4, 4))
    model = small("Llama")
    before = [type(m) for m in model.modules()]
    for recipe in ("w3", "fp8-static"):
        with pytest.raises(ValueError, match="gpukern quantize: recipe"):
            gk.accelerate(model, recipe)
        assert [type(m) for m in model.modules()] == before
        assert model.config._attn_implementation == "eager"
    where = importlib.import_module("transformers.models.llama.modeling_llama")
    assert where.apply_rotary_pos_emb.__module__ != parts.__name__


def test_one_graph():
    model = small("Llama")
    want = step(model)
    gk.accelerate(model, say=None)
    model.zero_grad()
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    out = model(input_ids=IDS, attention_mask=MASK, labels=LABELS)
    out.loss.backward()
    torch.testing.assert_close(out.loss.detach(), want[0], rtol=1e-5, atol=1e-5)
    grad = model.model.layers[0].self_attn.q_proj.weight.grad
    torch.testing.assert_close(
        grad, want[2]["model.layers.0.self_attn.q_proj.weight"], rtol=1e-3, atol=1e-6
    )


@pytest.mark.slow
def test_every_causal_family():
    """Each family of transformers gives what it gives plain, or a part is left by name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as every

    served = []
    for config_class in list(every.keys()):
        model = families.any_model(config_class, every[config_class])
        if model is None:
            continue
        try:
            want = step(model)
        except Exception:  # these sizes make no model that runs
            continue
        gk.accelerate(model, say=None)
        assert_close(step(model), want)
        served.append(config_class.__name__)
    assert len(served) >= 100, served
