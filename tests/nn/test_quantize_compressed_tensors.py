# SPDX-License-Identifier: BSD-3-Clause
"""quantize_directory(layout="compressed-tensors"): decoded here by loops in float64, read by our
importers, and loaded by transformers where compressed-tensors is installed."""

import json

import pytest
import torch
from conftest import generator

from torch_gpukern import cli
from torch_gpukern import nn as gnn

transformers = pytest.importorskip("transformers")
from safetensors.torch import load_file  # noqa: E402
from test_nn_importers_4bit import e2m1  # noqa: E402

RECIPES = ("fp8", "fp8-block", "int8", "w8", "w4", "nvfp4")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=70, hidden_size=128, intermediate_size=256, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, dtype="bfloat16",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).bfloat16()
    path = tmp_path_factory.mktemp("compressed") / "plain"
    model.save_pretrained(path)
    return path, model


def code_of(word, place, bits):
    return (word >> (place * bits)) & (2**bits - 1)


def decoded(recipe, t):
    """[N, K] float64 of a layer's tensors, number by number."""
    if recipe in ("w4", "w8"):
        bits, (n, k) = (4 if recipe == "w4" else 8), t["weight_shape"].tolist()
        words, each = (t["weight_packed"].long() & 0xFFFFFFFF).tolist(), 32 // bits
        codes = [
            [code_of(row[j // each], j % each, bits) - 2 ** (bits - 1) for j in range(k)]
            for row in words
        ]
        scale = t["weight_scale"].double().repeat_interleave(k // t["weight_scale"].shape[1], 1)
        return torch.tensor(codes, dtype=torch.float64) * scale
    if recipe == "nvfp4":
        codes = [
            [e2m1(c) for byte in row for c in (byte & 15, byte >> 4)]
            for row in t["weight_packed"].tolist()
        ]
        scale = t["weight_scale"].double().repeat_interleave(16, 1)
        return torch.tensor(codes, dtype=torch.float64) * scale / t["weight_global_scale"].double()
    scale = t["weight_scale"].double()
    if recipe == "fp8-block":
        n, k = t["weight"].shape
        scale = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    return t["weight"].double() * scale


def imported(recipe, t):
    if recipe in ("w4", "w8"):
        bits = 4 if recipe == "w4" else 8
        return gnn.from_pack_quantized(
            t["weight_packed"], t["weight_scale"], t["weight_shape"], bits=bits
        )
    if recipe == "nvfp4":
        return gnn.from_nvfp4(t["weight_packed"], t["weight_scale"], t["weight_global_scale"])
    return gnn.from_compressed_tensors(t["weight"], t["weight_scale"])


@pytest.mark.parametrize("recipe", RECIPES)
def test_files(recipe, plain, tmp_path):
    source, model = plain
    out = tmp_path / "few"
    command = ["quantize", str(source), "--recipe", recipe, "--out", str(out)]
    assert cli.main([*command, "--layout", "compressed-tensors"]) == 0
    files = load_file(out / "model.safetensors")
    limit = {"w4": 0.12, "nvfp4": 0.12}.get(recipe, 0.04)
    for name, layer in model.named_modules():
        parts = {n.rpartition(".")[2]: t for n, t in files.items() if n.startswith(f"{name}.")}
        if not isinstance(layer, torch.nn.Linear):
            continue
        if name == "lm_head":
            assert "weight_scale" not in parts
            continue
        want = decoded(recipe, parts)
        w = layer.weight.detach().double()
        assert (want - w).norm() <= limit * w.norm(), name
        if recipe != "int8":
            torch.testing.assert_close(
                imported(recipe, parts).decoded().double(), want, rtol=3e-7, atol=0
            )
    about = json.loads((out / "config.json").read_text())["quantization_config"]
    assert about["quant_method"] == "compressed-tensors" and "lm_head" in about["ignore"]
    assert not any("q_proj" in name for name in about["ignore"])
    made = transformers.LlamaForCausalLM(model.config)
    names = gnn.load_quantized(made, out)
    assert names and "lm_head" not in names
    for name in names:
        layer = made.get_submodule(name)
        parts = {n.rpartition(".")[2]: t for n, t in files.items() if n.startswith(f"{name}.")}
        assert layer.scheme == recipe
        torch.testing.assert_close(
            layer.decoded().double(), decoded(recipe, parts), rtol=3e-7, atol=0
        )


@pytest.mark.parametrize("recipe", RECIPES)
def test_transformers_loads_them(recipe, plain, tmp_path):
    pytest.importorskip("compressed_tensors")
    source, model = plain
    out = tmp_path / "few"
    gnn.quantize_directory(source, out, recipe, show=False, say=None, layout="compressed-tensors")
    config = transformers.CompressedTensorsConfig(run_compressed=False)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.bfloat16, quantization_config=config
    )
    files = load_file(out / "model.safetensors")
    for name, layer in loaded.named_modules():
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            parts = {n.rpartition(".")[2]: t for n, t in files.items() if n.startswith(f"{name}.")}
            torch.testing.assert_close(
                layer.weight.double(), decoded(recipe, parts), rtol=2**-7, atol=1e-30
            )
    ids = torch.randint(70, (1, 9), generator=generator("compressed tokens"))
    with torch.no_grad():
        got, want = loaded(ids).logits.float(), model(ids).logits.float()
    assert (got - want).norm() < 0.3 * want.norm()


@pytest.mark.parametrize("recipe", ("w4", "nvfp4", "fp8"))
def test_accelerate_beside_layers_that_compressed_tensors_made(recipe, plain, tmp_path):
    """Packed layers are nn.Linear without a weight. They become ours. In a form that is not read they
    keep their forward, and the rest is replaced."""
    pytest.importorskip("compressed_tensors")
    from torch_gpukern.integrations import transformers as gk

    gnn.quantize_directory(
        plain[0], tmp_path / "few", recipe, show=False, say=None, layout="compressed-tensors"
    )
    ids = torch.randint(70, (2, 9), generator=generator("compressed tokens"))
    found = []
    for way in ("theirs", "ours", "kept"):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "few", dtype=torch.bfloat16, attn_implementation="eager"
        ).eval()
        scheme = model.model.layers[0].mlp.up_proj.quantization_scheme
        form = scheme.format
        if way == "kept":
            scheme.format = "mxfp6-pack-quantized"
        if way != "theirs":
            done = gk.accelerate(model, say=None)
            assert ("its forward was replaced before" in done.left.values()) == (way == "kept")
            assert ("quantised before" in done.done) == (way == "ours")
            assert "3 LlamaRMSNorm" in done.done
        scheme.format = form
        found.append(model(input_ids=ids, labels=ids).loss.detach())
    for loss in found[1:]:
        torch.testing.assert_close(loss, found[0], rtol=3e-3, atol=0)


def test_refusals(plain, tmp_path):
    source, _ = plain
    for recipe, layout, text in (
        (
            "mxfp4",
            "compressed-tensors",
            "quantize: layout compressed-tensors has the recipes fp8, ",
        ),
        ("w4", "gguf", "quantize: layout must be gpukern or compressed-tensors, got 'gguf'"),
    ):
        with pytest.raises(ValueError, match=f"^{text}"):
            gnn.quantize_directory(source, tmp_path / "x", recipe, layout=layout)
        assert not (tmp_path / "x").exists()
