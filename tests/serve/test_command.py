# SPDX-License-Identifier: BSD-3-Clause
"""`gpukern serve`: its arguments, what is missing by name, a model's directory."""

import builtins
import sys
from pathlib import Path

import pytest
import torch
from serving import all_free, prompts_of, run

from torch_gpukern.cli.commands import main
from torch_gpukern.serve import Engine, Request, TransformersModel, extras, loading

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
        (["--port", "65536"], "argument --port: must be at most 65535, got 65536"),
    ],
)
def test_flags_are_refused_by_name(flags, says, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["serve", "model", *flags])
    assert ended.value.code == 2 and says in capsys.readouterr().err


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
    net, tokenizer, stop_ids = loading.load(model_dir, torch.device("cpu"), torch.float32)
    assert stop_ids == {tokenizer.inner.eos_token_id}
    engine = Engine(TransformersModel(net, 16))
    (prompt,) = prompts_of(12)
    request = engine.submit(Request(prompt, max_tokens=8))
    run(engine)
    assert request.answer == wanted(prompt, 8) and all_free(engine)


def test_what_gpukern_quantize_wrote_is_loaded(model_dir, tmp_path, capsys):
    assert main(["quantize", str(model_dir), "--recipe", "w8", "--out", str(tmp_path / "w8")]) == 0
    net, *_ = loading.load(tmp_path / "w8", torch.device("cpu"), torch.float32)
    assert type(net.model.layers[0].mlp.down_proj).__name__ == "QuantizedLinear"
    engine = Engine(TransformersModel(net, 16))
    request = engine.submit(Request([1, 2, 3], max_tokens=4))
    run(engine)
    assert len(request.answer) == 4


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
