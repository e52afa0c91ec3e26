# SPDX-License-Identifier: BSD-3-Clause
"""gpukern quantize MODEL_DIR, and load_quantized: shards, an index, what stays, and what is
refused."""

import json

import pytest
import torch
from conftest import assert_bits, generator, randn
from torch import nn

from torch_gpukern import cli
from torch_gpukern import nn as gnn

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
            "recipe w3 is none; expected one of fp8, ",
        ),
        (lambda: gnn.quantize_directory(tmp_path, tmp_path / "x", "w8"), "has no \\*.safetensors"),
        (
            lambda: gnn.load_quantized(Model(), tmp_path / "plain"),
            "was not written by gpukern quantize",
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
