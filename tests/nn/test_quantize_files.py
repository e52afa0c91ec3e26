# SPDX-License-Identifier: BSD-3-Clause
"""gpukern quantize MODEL_DIR, and load_quantized: shards, an index, kept tensors, and refusals."""

import json

import pytest
import torch
from conftest import assert_bits, generator, randn
from tiny_models import MIXTURE, causal_lm
from torch import nn

from torch_gpukern import cli
from torch_gpukern import nn as gnn
from torch_gpukern.nn.quant.files import stays_in
from torch_gpukern.nn.quant.recommended import recommended

safetensors = pytest.importorskip("safetensors")
from safetensors.torch import load_file, save_file  # noqa: E402


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(20, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=bool(i)) for i in range(2))
        self.norm = nn.LayerNorm(64)
        self.lm_head = nn.Linear(64, 20, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.lm_head(self.norm(x))


def write(path, model):
    path.mkdir()
    state = {name: t.clone() for name, t in model.state_dict().items() if name != "lm_head.weight"}
    names = sorted(state)
    shards = {
        "model-00001-of-00002.safetensors": names[:3],
        "model-00002-of-00002.safetensors": names[3:],
    }
    for file, part in shards.items():
        save_file({name: state[name] for name in part}, path / file, {"format": "pt"})
    where = {name: file for file, part in shards.items() for name in part}
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": where})
    )
    (path / "config.json").write_text("{}")


@pytest.mark.parametrize("recipe", ("fp8", "w4", "mxfp4", "nvfp4", "2:4"))
def test_round_trip(recipe, tmp_path, capsys):
    torch.manual_seed(0)
    model, tokens = Model(), torch.randint(0, 20, (2, 7), generator=generator("tokens"))
    write(tmp_path / "plain", model)
    assert (
        cli.main(
            [
                "quantize",
                str(tmp_path / "plain"),
                "--recipe",
                recipe,
                "--out",
                str(tmp_path / "few"),
            ]
        )
        == 0
    )
    said = capsys.readouterr()
    assert f"gpukern: 2 of 6 tensors -> {recipe}" in said.out and "quantizing" in said.err
    other = Model()
    assert gnn.load_quantized(other, tmp_path / "few") == ["layers.0", "layers.1"]
    gnn.quantize(model, recipe, say=None)
    with torch.no_grad():
        assert_bits(other(tokens), model(tokens))
    assert (tmp_path / "few" / "config.json").exists()
    where = json.loads((tmp_path / "few" / "model.safetensors.index.json").read_text())[
        "weight_map"
    ]
    for name, file in where.items():
        assert name in load_file(tmp_path / "few" / file)


def test_what_is_refused(tmp_path, capsys):
    model = Model()
    write(tmp_path / "plain", model)
    gnn.quantize_directory(tmp_path / "plain", tmp_path / "w8", "w8", show=False, say=None)
    for run, text in [
        (
            lambda: gnn.quantize_directory(tmp_path / "plain", tmp_path / "w8", "w8"),
            "exists and is not an empty directory",
        ),
        (
            lambda: gnn.quantize_directory(tmp_path / "w8", tmp_path / "twice", "w8"),
            "has been quantised already",
        ),
        (
            lambda: gnn.quantize_directory(tmp_path / "plain", tmp_path / "x", "fp8-static"),
            "recipe fp8-static needs calibration or training",
        ),
        (
            lambda: gnn.quantize_directory(tmp_path / "plain", tmp_path / "x", "w3"),
            "recipe w3 does not exist; expected one of fp8, ",
        ),
        (lambda: gnn.quantize_directory(tmp_path, tmp_path / "x", "w8"), "has no \\*.safetensors"),
        (
            lambda: gnn.load_quantized(Model(), tmp_path / "plain"),
            "was not written by gpukern quantize",
        ),
        (
            lambda: gnn.quantize_directory(tmp_path / "plain", tmp_path / "x", "w8", skip=["*"]),
            "no tensor of .* is the weight of an nn.Linear",
        ),
        (
            lambda: gnn.load_quantized(nn.Linear(2, 2), tmp_path / "w8"),
            "the model has no nn.Linear layers.0, layers.1",
        ),
    ]:
        with pytest.raises(ValueError, match=text):
            run()
    file = next((tmp_path / "w8").glob("*.safetensors"))
    about = {"gpukern-weight": 2, "recipe": "w8", "layers": []}
    save_file({"x": randn(generator("x"), 2)}, file, {"gpukern": json.dumps(about)})
    with pytest.raises(ValueError, match="is of version 2, this gpukern reads version 1"):
        gnn.load_quantized(Model(), tmp_path / "w8")
    assert cli.main(["quantize", str(tmp_path)]) == 1 and "quantize: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, major, requests, recipe, words",
    (
        ("NVIDIA H200", 9, 1, "w4", "bfloat16's tokens times"),
        ("NVIDIA H200", 9, 33, "fp8", "bfloat16's tokens times"),
        ("NVIDIA H100 PCIe", 9, 16, "w4", "measured on an H200, this is NVIDIA H100 PCIe"),
        ("NVIDIA A100", 8, 1, "int8", "on NVIDIA A100 no decoding was measured"),
    ),
)
def test_the_recommended_recipe(name, major, requests, recipe, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    found = recommended(requests, "cuda")
    assert found.recipe == recipe and words in found.why
    with pytest.raises(ValueError, match="requests is 0; expected 1 or more"):
        recommended(0, "cuda")


def test_the_command_chooses_a_recipe(tmp_path, capsys):
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file({"x.weight": randn(generator("auto"), 64, 64)}, plain / "model.safetensors")
    assert cli.main(["quantize", str(plain), "--recipe", "auto", "--requests", "8"]) == 0
    said = capsys.readouterr().out
    assert "gpukern: recipe int8: products of int8 codes are the fastest on a CPU" in said
    assert (tmp_path / "plain-int8" / "model.safetensors").exists()


def snapshot(model):
    """The state that a failed load must leave unchanged: classes, attributes, and values by their
    bits."""
    return [
        (
            type(m),
            {n: v for n, v in vars(m).items() if not n.startswith("_")},
            set(m._parameters),
            set(m._buffers),
        )
        for m in model.modules()
    ], {name: t.clone() for name, t in model.state_dict().items() if t is not None}


@pytest.mark.parametrize("fault", ("lacks", "beside", "shape", "state"))
def test_a_failed_load_changes_nothing(fault, tmp_path):
    write(tmp_path / "plain", Model())
    gnn.quantize_directory(tmp_path / "plain", tmp_path / "w8", "w8", show=False, say=None)
    file = sorted((tmp_path / "w8").glob("*.safetensors"))[-1]
    with safetensors.safe_open(file, "pt") as held:
        about = held.metadata()
    tensors = load_file(file)
    if fault == "lacks":
        del tensors["norm.weight"]
    elif fault == "beside":
        tensors["other.weight"] = torch.ones(2)
    elif fault == "shape":
        tensors["norm.weight"] = torch.ones(63)
    else:
        tensors["layers.1._extra_state"] = torch.tensor(
            list(b"gpukern-weight 1 w4"), dtype=torch.uint8
        )
    save_file(tensors, file, about)
    model = Model()
    before, values = snapshot(model)
    with pytest.raises(ValueError, match="load_quantized|QuantizedLinear"):
        gnn.load_quantized(model, tmp_path / "w8")
    after, now = snapshot(model)
    assert after == before and now.keys() == values.keys()
    for name, t in values.items():
        assert_bits(now[name], t)


def _half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


FAULTS = {
    "truncated": (_half, "model.safetensors is no whole file of safetensors"),
    "empty": (lambda p: p.write_bytes(b""), "model.safetensors is no whole file of safetensors"),
    "foreign": (lambda p: p.write_bytes(b"PK" * 99), "model.safetensors is no whole file"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_files_that_are_not_whole_are_named(fault, tmp_path, capsys):
    (tmp_path / "plain").mkdir()
    file = tmp_path / "plain" / "model.safetensors"
    save_file(Model().layers.state_dict(), file)
    spoil, text = FAULTS[fault]
    spoil(file)
    assert cli.main(["quantize", str(tmp_path / "plain")]) == 1
    assert text in capsys.readouterr().err and not (tmp_path / "plain-w4").exists()
    with pytest.raises(ValueError, match=text):
        gnn.load_quantized(Model(), tmp_path / "plain")


@pytest.mark.parametrize("text", ("{nope", "[]"))
def test_a_broken_configuration_is_named_before_anything_is_written(text, tmp_path, capsys):
    write(tmp_path / "plain", Model())
    (tmp_path / "plain" / "config.json").write_text(text)
    assert cli.main(["quantize", str(tmp_path / "plain")]) == 1
    assert "config.json" in capsys.readouterr().err and not (tmp_path / "plain-w4").exists()


@pytest.mark.parametrize(
    "metadata, text",
    (
        ("hello", "entry gpukern must be JSON with the field gpukern-weight"),
        ("3", "entry gpukern must be JSON"),
        ('{"gpukern-weight": 1}', "recipe must be one of fp8, .* it is None"),
        ('{"gpukern-weight": 1, "recipe": "w9", "layers": []}', "recipe must be .* it is 'w9'"),
        ('{"gpukern-weight": 1, "recipe": "w8", "layers": "a"}', "layers must be a list of names"),
    ),
)
def test_broken_metadata_is_named(metadata, text, tmp_path):
    save_file({"x": torch.ones(2)}, tmp_path / "model.safetensors", {"gpukern": metadata})
    with pytest.raises(ValueError, match=f"model.safetensors: .*{text}"):
        gnn.load_quantized(Model(), tmp_path)


@pytest.mark.parametrize(
    "part, dtype", (("weight_scale", torch.int32), ("weight_codes", torch.float32))
)
def test_tensors_of_another_kind_are_refused(part, dtype, tmp_path):
    """load_state_dict would cast them without a warning."""
    write(tmp_path / "plain", Model())
    gnn.quantize_directory(tmp_path / "plain", tmp_path / "few", "int8", show=False, say=None)
    for file in (tmp_path / "few").glob("*.safetensors"):
        tensors = load_file(file)
        with safetensors.safe_open(file, "pt") as held:
            about = held.metadata()
        if f"layers.1.{part}" in tensors:
            tensors[f"layers.1.{part}"] = tensors[f"layers.1.{part}"].to(dtype)
        save_file(tensors, file, about)
    with pytest.raises(ValueError, match=f"layers.1.{part} must hold"):
        gnn.load_quantized(Model(), tmp_path / "few")


@pytest.mark.parametrize("shards", ("5GB", "60KB"))
def test_save_pretrained_of_a_quantised_model(shards, tmp_path):
    """transformers refuses the directory, and load_quantized reads it. Without the entry in the
    configuration, transformers would fill in random numbers."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=64, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(4)
    model = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.arange(8)[None]
    done = gnn.quantize(model, "w8", say=None)
    model.save_pretrained(tmp_path / "few", max_shard_size=shards)
    assert (len(list((tmp_path / "few").glob("*.safetensors"))) == 1) == (shards == "5GB")
    with pytest.raises(ValueError, match="quant_method"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "few")
    with pytest.raises(ValueError, match="quantised already"):
        gnn.quantize_directory(tmp_path / "few", tmp_path / "twice", "w8")
    torch.manual_seed(5)
    made = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(tmp_path / "few")
    ).eval()
    assert len(gnn.load_quantized(made, tmp_path / "few")) == 14
    with torch.no_grad():
        assert_bits(made(tokens).logits, model(tokens).logits)
    done.restore()
    model.save_pretrained(tmp_path / "plain")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain").eval()
    with torch.no_grad():
        assert_bits(again(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("recipe", ("w8", "nvfp4", "fp8"))
def test_parameters_on_meta_become_the_files(recipe, tmp_path):
    """No tensor stays on meta, the head stays tied to the embedding, and results equal those of a
    model that was made on the CPU."""
    torch.manual_seed(1)
    write(tmp_path / "plain", Model())
    gnn.quantize_directory(tmp_path / "plain", tmp_path / "few", recipe, show=False, say=None)
    here, model = Model(), Model().to("meta")
    model.lm_head.weight = model.embed_tokens.weight
    for m in (here, model):
        gnn.load_quantized(m, tmp_path / "few")
    assert not any(t.is_meta for t in model.state_dict().values())
    assert model.lm_head.weight is model.embed_tokens.weight
    tokens = torch.arange(14).view(2, 7)
    with torch.no_grad():
        assert_bits(model(tokens), here(tokens))
    model.register_buffer("angles", torch.ones(3, device="meta"), persistent=False)
    other = Model().to("meta")
    other.lm_head.weight = other.embed_tokens.weight
    other.register_buffer("angles", torch.ones(3, device="meta"), persistent=False)
    with pytest.raises(ValueError, match="angles are on meta and in no file"):
        gnn.load_quantized(other, tmp_path / "few")


@pytest.mark.parametrize("head", ["classifier", "score"])
def test_heads_of_any_name_stay(head, tmp_path):
    """Heads are not quantised, whatever their name, as in accelerate. If the caller passes skip, it
    alone decides."""
    transformers = pytest.importorskip("transformers")
    kind = {"classifier": "Bert", "score": "Llama"}[head]
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=70,
        pad_token_id=0,
    )
    model = getattr(transformers, f"{kind}ForSequenceClassification")(config)
    model.save_pretrained(tmp_path / "model")
    for layout in ("gpukern", "compressed-tensors"):
        changed = gnn.quantize_directory(
            tmp_path / "model", tmp_path / layout, "w8", layout=layout, show=False, say=None
        )
        assert head not in changed and len(changed) >= 6
        config = json.loads((tmp_path / layout / "config.json").read_text())
        if layout != "gpukern":
            assert head in config["quantization_config"]["ignore"]
    gnn.load_quantized(model, tmp_path / "gpukern")
    changed = gnn.quantize_directory(
        tmp_path / "model", tmp_path / "all", "w8", skip=("*embed*",), show=False, say=None
    )
    assert head in changed


def test_models_of_transformers(tmp_path):
    """GPT-2 is refused before a file is written, because its Conv1D modules cannot be quantised.
    transformers refuses a quantised directory. With layout compressed-tensors, Mixtral's experts,
    which transformers renames, are refused as well."""
    transformers = pytest.importorskip("transformers")
    size = dict(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    torch.manual_seed(2)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**size))
    llama.save_pretrained(tmp_path / "llama")
    assert (
        len(
            gnn.quantize_directory(tmp_path / "llama", tmp_path / "few", "w8", show=False, say=None)
        )
        == 7
    )
    with pytest.raises(ValueError, match="quant_method"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "few")
    made = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(tmp_path / "few")
    )
    gnn.load_quantized(made, tmp_path / "few")
    gnn.quantize(llama, "w8", say=None)
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert_bits(made.eval()(tokens).logits, llama.eval()(tokens).logits)
    for config, model, layout, text in (
        (
            transformers.MixtralConfig(**size, num_local_experts=2),
            transformers.MixtralForCausalLM,
            "compressed-tensors",
            "renames or joins tensors",
        ),
        (
            transformers.GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=64),
            transformers.GPT2LMHeadModel,
            "gpukern",
            "weight of an nn.Linear",
        ),
    ):
        model(config).save_pretrained(tmp_path / model.__name__)
        with pytest.raises(ValueError, match=text):
            gnn.quantize_directory(
                tmp_path / model.__name__,
                tmp_path / "x",
                "w8",
                show=False,
                say=None,
                layout=layout,
            )
        assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("family", ("mixtral", "qwen3_moe", "gpt_oss"))
@pytest.mark.parametrize("recipe", ("fp8", "w4", "nvfp4", "int8"))
def test_mixtures_of_experts(family, recipe, tmp_path):
    """Quantised directories of mixtures. Tensors in their files have other names than transformers'
    modules (Mixtral, Qwen3) or the same names (gpt-oss).

    The loaded model has the bits of the model that was quantised in memory. It can be saved by
    save_pretrained and loaded again. Routers and heads keep their bits."""
    transformers = pytest.importorskip("transformers", minversion="5.10")
    sizes = MIXTURE | {"vocab_size": 64, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    model = causal_lm(family, seed=3, **sizes)
    model.save_pretrained(tmp_path / "plain")
    changed = gnn.quantize_directory(
        tmp_path / "plain", tmp_path / "few", recipe, show=False, say=None
    )
    experts = [name for name in changed if name.endswith("experts")]
    assert len(experts) == 2 and len(changed) == 10
    assert not any("gate" in name or "router" in name or "head" in name for name in changed)
    done = gnn.quantize(model, recipe, skip=stays_in(model), say=None)
    assert set(done.replaced) == set(changed)
    about = transformers.AutoConfig.from_pretrained(tmp_path / "few")
    ids = torch.arange(14).view(2, 7)
    with torch.no_grad():
        want = model(ids).logits
    model.save_pretrained(tmp_path / "saved")
    for directory in ("few", "saved"):
        made = transformers.AutoModelForCausalLM.from_config(about, dtype=torch.bfloat16).eval()
        made.model.layers[1].mlp.experts.to("meta")
        assert set(gnn.load_quantized(made, tmp_path / directory)) == set(changed)
        with torch.no_grad():
            assert_bits(made(ids).logits, want)
