# SPDX-License-Identifier: BSD-3-Clause
"""`gpukern serve`: its arguments, what is missing by name, a model's directory."""

import argparse
import builtins
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from serving import all_free, prompts_of, run
from tiny_models import MIXTURE, causal_lm

from torch_gpukern.cli.commands import main
from torch_gpukern.serve import (
    Engine,
    Request,
    TransformersModel,
    command,
    extras,
    loading,
    sampling,
)

pytest.importorskip("transformers", reason="transformers is not installed")
pytest_plugins = ("serve_fixtures",)
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--dtype", "foo"], "argument --dtype: invalid choice: 'foo'"),
        (["--drafts", "-3"], "argument --drafts: must be 0 or more, got -3"),
        (["--pages", "1"], "argument --pages: must be 2 or more, got 1"),
        (["--batch", "x"], "argument --batch: invalid int value: 'x'"),
        (["--step-tokens", "0"], "argument --step-tokens: must be 1 or more, got 0"),
        (["--memory", "1.5"], "argument --memory: must be above 0, at most 1, got 1.5"),
        (["--port", "65536"], "argument --port: must be at most 65535, got 65536"),
    ],
)
def test_flags_are_refused_by_name(flags, says, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["serve", "model", *flags])
    assert ended.value.code == 2 and says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "given", "batch", "step_tokens", "pages"),
    (
        ("cpu", {}, 64, 512, 4096),
        ("cuda", {}, 256, 2048, None),
        ("cuda", {"step_tokens": 100}, 100, 100, None),
        ("cuda", {"batch": 3000, "pages": 9}, 3000, 3000, 9),
    ),
)
def test_sizes_that_are_left_out_go_by_the_device(device, given, batch, step_tokens, pages):
    args = argparse.Namespace(**{"batch": None, "step_tokens": None, "pages": None} | given)
    command.complete(args, torch.device(device))
    assert (args.batch, args.step_tokens, args.pages) == (batch, step_tokens, pages)


def test_more_requests_than_tokens_are_refused():
    args = argparse.Namespace(batch=9, step_tokens=8, pages=None)
    with pytest.raises(ValueError, match="--batch is 9; expected at most --step-tokens, 8"):
        command.complete(args, torch.device("cpu"))


def test_directories_are_refused_by_name(tmp_path, capsys, model_dir):
    for directory, says in (
        (tmp_path / "none", "which is no directory"),
        (tmp_path, "has no config.json"),
    ):
        assert main(["serve", str(directory), "--port", "0"]) == 1
        assert says in capsys.readouterr().err
    (tmp_path / "config.json").write_text((model_dir / "config.json").read_text())
    assert main(["serve", str(tmp_path), "--port", "0"]) == 1
    assert "has no tokenizer that transformers can load" in capsys.readouterr().err
    assert main(["serve", str(model_dir), "--device", "tpu"]) == 1
    assert "device is tpu" in capsys.readouterr().err


def test_too_large_a_vocabulary_is_refused_before_weights_are_read(tmp_path, capsys, model_dir):
    """sample_tokens takes 2^20 - 1 tokens. The copy has no weights, so whoever reads them fails."""
    for path in model_dir.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((model_dir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 2**20}))
    assert main(["serve", str(tmp_path), "--port", "0"]) == 1
    said = capsys.readouterr().err
    assert "the model's vocabulary has 1,048,576 tokens" in said and "1,048,575" in said
    sampling.Sampler(1, 2**20 - 1, torch.device("cpu"))
    with pytest.raises(ValueError, match="vocabulary has 1,048,576 tokens"):
        sampling.Sampler(1, 2**20, torch.device("cpu"))


@pytest.mark.parametrize("missing", ("starlette", "uvicorn", "prometheus_client", "transformers"))
def test_a_missing_package_is_named(missing, monkeypatch, capsys, model_dir):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named '{missing}'", name=missing)
        return real(name, *args, **kwargs)

    for name in [n for n in sys.modules if n.split(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.setattr(extras.importlib, "import_module", without)
    assert main(["serve", str(model_dir)]) == 1
    said = capsys.readouterr().err
    assert f"serve needs {missing.replace('_', '-')}, which is not installed" in said
    assert "pip install 'gpukern[serve]'" in said


def test_a_directory_is_loaded(model_dir, wanted):
    net = loading.load(model_dir, torch.float32)
    what = loading.What(str(model_dir), None, torch.float32, 32)
    tokenizer = loading.tokenizer_of(what)
    assert tokenizer.end_ids == {tokenizer.inner.eos_token_id}
    assert loading.ids_of([3, 4]) == {3, 4} and loading.ids_of(None) == frozenset()
    engine = Engine(TransformersModel(net, 16))
    (prompt,) = prompts_of(12)
    request = engine.submit(Request(prompt, max_tokens=8))
    run(engine)
    assert request.answer == wanted(prompt, 8) and all_free(engine)


def test_what_gpukern_quantize_wrote_is_loaded(model_dir, tmp_path, capsys):
    assert main(["quantize", str(model_dir), "--recipe", "w8", "--out", str(tmp_path / "w8")]) == 0
    net = loading.load(tmp_path / "w8", torch.float32)
    assert type(net.model.layers[0].mlp.down_proj).__name__ == "QuantizedLinear"
    engine = Engine(TransformersModel(net, 16))
    request = engine.submit(Request([1, 2, 3], max_tokens=4))
    run(engine)
    assert len(request.answer) == 4


def ready(directory, **settings):
    what = loading.What(str(directory), None, torch.float32, 32, **settings)
    return loading.ready(what, torch.device("cpu"))


def answer_of(model, prompt, n=12):
    engine = Engine(model)
    request = engine.submit(Request(prompt, max_tokens=n))
    run(engine)
    assert all_free(engine)
    return request.answer


@pytest.mark.parametrize("recipe", ("int8", "w4", "auto"))
def test_a_recipe_quantises_when_the_server_begins(model_dir, tmp_path, recipe):
    """The same answers as those of a directory that `gpukern quantize` wrote, from fused layers."""
    written = {"auto": "int8"}.get(recipe, recipe)
    assert (
        main(["quantize", str(model_dir), "--recipe", written, "--out", str(tmp_path / "q")]) == 0
    )
    (prompt,) = prompts_of(20)
    began, read = ready(model_dir, recipe=recipe), ready(tmp_path / "q")
    assert began.recipe == written and read.recipe is None
    for made in (began, read):
        assert len(made.model.fused.layers) == 2
        assert type(made.model.model.model.layers[0].mlp.down_proj).__name__ == "QuantizedLinear"
    assert answer_of(began.model, prompt) == answer_of(read.model, prompt)
    with pytest.raises(
        ValueError, match=f"--recipe is w8, and the directory's weights are {written}"
    ):
        ready(tmp_path / "q", recipe="w8")


def test_heads_of_any_name_stay():
    """As in accelerate and gpukern quantize. The rule was the name lm_head."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BioGptConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    net = transformers.BioGptForCausalLM(config)
    head = net.get_output_embeddings()
    assert net.output_projection is head
    loading.quantised(net, "w8")
    assert type(head) is torch.nn.Linear
    assert type(net.biogpt.layers[0].fc1).__name__ == "QuantizedLinear"


def test_a_directory_of_another_tool_is_served(model_dir, tmp_path):
    """compressed-tensors' packed integers: fused layers, and the answers of gpukern's own form."""
    foreign, ours = tmp_path / "foreign", tmp_path / "ours"
    args = ["quantize", str(model_dir), "--recipe", "w4", "--layout", "compressed-tensors"]
    assert main([*args, "--out", str(foreign)]) == 0
    assert main(["quantize", str(foreign), "--out", str(ours)]) == 0
    models = [ready(directory).model for directory in (foreign, ours)]
    assert all(len(model.fused.layers) == 2 for model in models)
    (prompt,) = prompts_of(20)
    assert answer_of(models[0], prompt) == answer_of(models[1], prompt)
    with pytest.raises(ValueError, match="--recipe is w8, and the directory's weights are w4"):
        ready(foreign, recipe="w8")


@pytest.mark.parametrize("recipe", ("fp8", "w4", "nvfp4"))
def test_a_mixture_of_experts_is_served_in_few_bits(model_dir, tmp_path, recipe):
    """Experts are quantised as the server begins, or read. Router and head keep their bits."""
    pytest.importorskip("transformers", minversion="5.10")
    plain, few = tmp_path / "plain", tmp_path / "few"
    shutil.copytree(model_dir, plain, ignore=shutil.ignore_patterns("*.safetensors"))
    net = causal_lm("qwen3_moe", seed=4, dtype=torch.float32, **MIXTURE, vocab_size=512)
    net.save_pretrained(plain)
    assert main(["quantize", str(plain), "--recipe", recipe, "--out", str(few)]) == 0
    (prompt,) = prompts_of(20)
    answers = []
    for model in (ready(plain, recipe=recipe).model, ready(few).model):
        block = model.model.model.layers[0].mlp
        assert block.experts.scheme == recipe and block.gate.weight.dtype is torch.float32
        assert model.model.lm_head.weight.dtype is torch.float32
        assert type(model.model.lm_head).__name__ == "Linear"
        answers.append(answer_of(model, prompt))
    assert answers[0] == answers[1] and len(answers[0]) == 12
    assert command.kept_experts(ready(few).model.model) == ""
    kept = command.kept_experts(ready(plain, recipe="mxfp8").model.model)
    assert kept == "; its experts keep their dtype"


@pytest.mark.parametrize(("cache", "codes"), (("e4m3", "float8_e4m3fn"), ("int8", "int8")))
def test_a_cache_of_8_bits_has_scales_of_the_models_own(model_dir, wanted, cache, codes):
    """A key's error is that of its code: half a step of int8, half a digit of e4m3."""
    model, whole = ready(model_dir, cache=cache).model, ready(model_dir).model
    assert model.cache.k.dtype is getattr(torch, codes)
    assert model.cache.k_scale.shape == model.cache.v_scale.shape == (2, 2)
    (prompt,) = prompts_of(30, seed=5)
    for each in (model, whole):
        handle = each.cache.allocate()
        each.begin([handle], [30])
        logits = each.forward(prompt, list(range(30)), [29], [0], [[]])
        slots = each.step.slots
        each.found = [x[1].flatten(0, 1).float()[slots] for x in (each.cache.k, each.cache.v)]
        each.logits = logits
        each.cache.free(handle)
    for x, scale, want in zip(
        model.found, (model.cache.k_scale, model.cache.v_scale), whole.found, strict=True
    ):
        off = (x * scale[1][:, None] - want).abs() / want.std()
        assert off.max() < 0.5 and off.mean() < 0.03
    assert ((model.logits - whole.logits).square().mean() / whole.logits.var()).sqrt() < 0.1
    assert answer_of(model, prompt)[0] == wanted(prompt, 1)[0]


def test_the_example_serves_the_demos_model(monkeypatch, tmp_path):
    """Its tokens are those of the network without a cache."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "serve"))
    import demo

    torch.manual_seed(0)
    net = demo.GPT(demo.Config()).eval()
    for weight in net.parameters():  # those that begin as zero would hide what attention does
        torch.nn.init.normal_(weight, std=0.05)
    torch.save({"config": net.config, "weights": net.state_dict()}, tmp_path / "checkpoint.pt")
    engine = Engine(demo.DemoModel(str(tmp_path / "checkpoint.pt"), 32))
    request = engine.submit(Request(list(b"import os"), max_tokens=4))
    run(engine)
    tokens = list(b"import os")
    for _ in range(4):
        with torch.no_grad():
            states = net.dense_states(torch.tensor([tokens]), demo.GpukernOps())
        tokens.append((states @ net.head)[0, -1].argmax().item())
    assert request.answer == tokens[-4:] and all_free(engine)
    for name in ("demo", "model"):
        sys.modules.pop(name, None)
