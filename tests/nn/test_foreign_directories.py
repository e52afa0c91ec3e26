# SPDX-License-Identifier: BSD-3-Clause
"""Whole directories that other tools quantised: written here by hand, loaded, and compared with
their codes times their scales in float64."""

import json

import pytest
import torch
from conftest import assert_bits, generator, randn
from test_nn_importers_4bit import E2M1, NF4
from tiny_models import causal_lm

from torch_gpukern import cli
from torch_gpukern import nn as gnn

transformers = pytest.importorskip("transformers")
from safetensors.torch import save_file  # noqa: E402

GROUP = 32
E4M3 = torch.float8_e4m3fn
SIGNED = torch.tensor([*E2M1, *(-x for x in E2M1)], dtype=torch.float64)


def words(x, bits, order=None):
    """Codes [.., K] -> int32 [.., K bits / 32], low bits first, or in `order`."""
    each = 32 // bits
    fields = x.long().unflatten(-1, (-1, each))[..., list(order or range(each))]
    packed = (fields << (bits * torch.arange(each))).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def draw(gen, low, high, *shape):
    return torch.randint(low, high, shape, generator=gen)


def positive(gen, *shape):
    return (torch.rand(*shape, generator=gen) + 0.5) / 100


def wide(scale, size=GROUP):
    return scale.double().repeat_interleave(size, 1)


# each: (tensors of a layer, the weight in float64) of n, k


def packed_int(gen, n, k, zeros=False):
    q, scale = draw(gen, -8, 8, n, k), positive(gen, n, k // GROUP).bfloat16()
    tensors = {
        "weight_packed": words(q + 8, 4),
        "weight_scale": scale,
        "weight_shape": torch.tensor([n, k]),
    }
    if not zeros:
        return tensors, q.double() * wide(scale)
    zero = draw(gen, -8, 8, n, k // GROUP)
    tensors["weight_zero_point"] = words((zero + 8).mT, 4).mT.contiguous()
    return tensors, (q.double() - wide(zero)) * wide(scale)


def packed_with_zeros(gen, n, k):
    return packed_int(gen, n, k, True)


def float8(gen, n, k):
    w, scale = randn(gen, n, k).to(E4M3), positive(gen, n, 1).bfloat16()
    return {"weight": w, "weight_scale": scale}, w.double() * scale.double()


def float8_static(gen, n, k):
    w, scale = randn(gen, n, k).to(E4M3), positive(gen, 1)
    more = {"weight_scale": scale, "input_scale": torch.tensor([0.02])}
    return {"weight": w, **more}, w.double() * scale.double()


def float8_blocks(gen, n, k, name="weight_scale"):
    w, scale = randn(gen, n, k).to(E4M3), positive(gen, -(-n // 128), -(-k // 128))
    spread = wide(scale.double().repeat_interleave(128, 0)[:n], 128)[:, :k]
    return {"weight": w, name: scale}, w.double() * spread


def deepseek(gen, n, k):
    return float8_blocks(gen, n, k, "weight_scale_inv")


def integers(gen, n, k):
    q, scale = draw(gen, -127, 128, n, k).to(torch.int8), positive(gen, n, 1).bfloat16()
    return {"weight": q, "weight_scale": scale}, q.double() * scale.double()


def nvfp4(gen, n, k):
    codes = draw(gen, 0, 16, n, k)
    scale = (torch.rand(n, k // 16, generator=gen) * 400 + 1).to(E4M3)
    tensors = {
        "weight_packed": (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8),
        "weight_scale": scale,
        "weight_global_scale": torch.tensor([1024.0]),
        "input_global_scale": torch.tensor([3.0]),
    }
    return tensors, SIGNED[codes] * wide(scale.float(), 16) / 1024


def mxfp4(gen, n, k):
    codes, scale = draw(gen, 0, 16, n, k), draw(gen, 118, 124, n, k // 32)
    tensors = {
        "weight_packed": (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8),
        "weight_scale": scale.to(torch.uint8),
    }
    return tensors, SIGNED[codes] * wide(2.0 ** (scale.double() - 127), 32)


def mxfp8(gen, n, k):
    w, scale = randn(gen, n, k).to(E4M3), draw(gen, 118, 124, n, k // 32)
    tensors = {"weight": w, "weight_scale": scale.to(torch.uint8)}
    return tensors, w.double() * wide(2.0 ** (scale.double() - 127), 32)


def gptq(gen, n, k, act_order=False):
    q, zero = draw(gen, 0, 16, n, k), draw(gen, 1, 16, k // GROUP, n)
    scale, group_of = positive(gen, k // GROUP, n).half(), torch.arange(k) // GROUP
    if act_order:
        group_of = group_of[torch.randperm(k, generator=gen)]
    tensors = {
        "qweight": words(q, 4).mT.contiguous(),
        "qzeros": words(zero - 1, 4),
        "scales": scale,
        "g_idx": group_of.int(),
        "bias": torch.zeros(n, dtype=torch.float16),  # as some versions write it
    }
    w = (q - zero.mT[:, group_of]).double() * scale.double().mT[:, group_of]
    return tensors, w


def gptq_in_order_of_activations(gen, n, k):
    return gptq(gen, n, k, True)


def awq(gen, n, k):
    q, zero = draw(gen, 0, 16, n, k), draw(gen, 0, 16, k // GROUP, n)
    scale, order = positive(gen, k // GROUP, n).half(), (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": words(q.mT, 4, order),
        "qzeros": words(zero, 4, order),
        "scales": scale,
    }
    return tensors, (q - zero.mT.repeat_interleave(GROUP, 1)).double() * wide(scale.mT)


def nf4(gen, n, k):
    codes, size = draw(gen, 0, 16, n * k), 64
    absmax = torch.rand(n * k // size, generator=gen) + 0.1
    state = {"quant_type": "nf4", "blocksize": size, "dtype": "bfloat16", "shape": [n, k]}
    tensors = {
        "weight": (codes[0::2] << 4 | codes[1::2]).to(torch.uint8)[:, None],
        "weight.absmax": absmax,
        "weight.quant_map": torch.tensor(NF4),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }
    w = torch.tensor(NF4).double()[codes] * absmax.double().repeat_interleave(size)
    return tensors, w.view(n, k).bfloat16().double()


def group(bits, kind, strategy, inputs=None, **more):
    return {
        "targets": ["Linear"],
        "weights": {
            "num_bits": bits,
            "type": kind,
            "strategy": strategy,
            "symmetric": True,
            "dynamic": False,
            **more,
        },
        "input_activations": inputs,
    }


def by_token(kind, **more):
    return {
        "num_bits": 8,
        "type": kind,
        "strategy": "token",
        "dynamic": True,
        "symmetric": True,
    } | more


def compressed(form, one):
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": one}}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}
# form: (function, quantization_config, recipe)
FORMS = {
    "pack-quantized": (packed_int, compressed("pack-quantized", group(4, "int", "group")), "w4"),
    "pack-quantized, zeros": (
        packed_with_zeros,
        compressed("pack-quantized", group(4, "int", "group", symmetric=False)),
        "w4-zero",
    ),
    "float-quantized": (
        float8,
        compressed("float-quantized", group(8, "float", "channel", by_token("float"))),
        "fp8",
    ),
    "float-quantized, static": (
        float8_static,
        compressed(
            "float-quantized", group(8, "float", "tensor", by_token("float", dynamic=False))
        ),
        "fp8-static",
    ),
    "float-quantized, blocks": (
        float8_blocks,
        compressed("float-quantized", group(8, "float", "block", by_token("float"))),
        "fp8-block",
    ),
    "int-quantized": (
        integers,
        compressed("int-quantized", group(8, "int", "channel", by_token("int"))),
        "int8",
    ),
    "int-quantized, 16-bit activations": (
        integers,
        compressed("int-quantized", group(8, "int", "channel")),
        "w8",
    ),
    "nvfp4": (
        nvfp4,
        compressed("nvfp4-pack-quantized", group(4, "float", "tensor_group")),
        "nvfp4",
    ),
    "mxfp4-pack": (mxfp4, compressed("mxfp4-pack-quantized", group(4, "float", "group")), "mxfp4"),
    "mxfp8": (
        mxfp8,
        compressed(
            "mxfp8-quantized", group(8, "float", "group", by_token("float", strategy="group"))
        ),
        "mxfp8",
    ),
    "gptq": (gptq, GPTQ, "w4-zero"),
    "gptq, act-order": (gptq_in_order_of_activations, GPTQ, "w4-zero"),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "version": "gemm"}, "w4-zero"),
    "fp8": (
        deepseek,
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        "fp8-block",
    ),
    "bitsandbytes": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}, None),
}


def model_of(family="llama", **sizes):
    return causal_lm(
        family,
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
        **sizes,
    )


def layers_of(model):
    return {
        n: m
        for n, m in model.named_modules()
        if isinstance(m, torch.nn.Linear) and n != "lm_head" and "gate" not in n.split(".")
    }


def write(path, model, about, tensors, files=2):
    """A directory of the tensors, in several files: a layer's may lie in two of them."""
    path.mkdir(parents=True)
    model.config.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    config["architectures"] = [type(model).__name__]
    config["quantization_config"] = about
    (path / "config.json").write_text(json.dumps(config))
    names = list(tensors)
    for i in range(files):
        part = {n: tensors[n].contiguous() for n in names[i::files]}
        save_file(part, path / f"model-{i + 1:05}-of-{files:05}.safetensors")


def directory_of(form, path, model):
    """Writes the form; returns each layer's weight in float64."""
    make, about, _ = FORMS[form]
    linear, wanted, tensors = layers_of(model), {}, {}
    for name, t in model.state_dict().items():
        if name.removesuffix(".weight") not in linear:
            tensors[name] = t
    for name, layer in linear.items():
        gen = generator("foreign", form, name)
        own, wanted[name] = make(gen, layer.out_features, layer.in_features)
        tensors |= {f"{name}.{part}": t for part, t in own.items()}
    write(path, model, about, tensors)
    return wanted


def check(model, wanted, recipe):
    for name, w in wanted.items():
        layer = model.get_submodule(name)
        if recipe is None:
            assert torch.equal(layer.weight.double(), w)
            continue
        assert layer.scheme == recipe
        assert torch.equal(layer.decoded(torch.float32), w.float())


@pytest.mark.parametrize("form", FORMS)
def test_each_form(form, tmp_path, capsys):
    """load_quantized of the directory, and of what `gpukern quantize` makes of it."""
    source, recipe = model_of(), FORMS[form][2]
    wanted = directory_of(form, tmp_path / "foreign", source)
    ids, logits = torch.arange(14).view(2, 7), []
    for directory in ("foreign", "ours"):
        if directory == "ours":
            args = ["quantize", str(tmp_path / "foreign"), "--out", str(tmp_path / "ours")]
            assert cli.main(args) == 0
            assert FORMS[form][1]["quant_method"] in capsys.readouterr().out
        made = model_of()
        with torch.no_grad():
            for p in made.parameters():
                p.zero_()
        if directory == "foreign" or recipe is not None:
            names = gnn.load_quantized(made, tmp_path / directory)
            assert set(names) == (set() if recipe is None else set(wanted))
        else:  # 16 bits, which transformers loads
            made = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
        check(made, wanted, recipe)
        assert torch.equal(made.lm_head.weight, source.lm_head.weight)
        assert torch.equal(made.model.norm.weight, source.model.norm.weight)
        with torch.no_grad():
            logits.append(made(ids).logits)
    assert_bits(*logits)
    with pytest.raises(ValueError, match="is quantised already .*expected no recipe, got w4"):
        gnn.quantize_directory(tmp_path / "foreign", tmp_path / "x", "w4", show=False, say=None)


def moe(family):
    return model_of(
        family,
        moe_intermediate_size=128,
        num_local_experts=4,
        num_experts=4,
        num_experts_per_tok=2,
    )


NAMES = {
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
}


@pytest.mark.parametrize(
    "form", ("pack-quantized", "float-quantized", "fp8", "awq", "mxfp4-pack", "nvfp4")
)
@pytest.mark.parametrize("family", ("mixtral", "qwen3_moe"))
def test_experts_one_by_one(family, form, tmp_path):
    """Files with each expert's projections become the joined experts of transformers' modules.
    Each projection of nvfp4 has a global scale of its own, which goes into the scales: two products
    in float32 instead of one in float64."""
    if not hasattr(transformers, "Qwen3MoeConfig"):
        pytest.skip("this transformers has no such experts")
    model = moe(family)
    make, about, recipe = FORMS[form]
    block, (gate, up, down) = NAMES[family]
    linear, tensors, wanted = layers_of(model), {}, {}
    for name, t in model.state_dict().items():
        if name.removesuffix(".weight") not in linear and ".experts." not in name:
            tensors[name.replace(".mlp.gate.", f".{block}.gate.")] = t
    for name, layer in linear.items():
        own, _ = make(generator("foreign", name), layer.out_features, layer.in_features)
        tensors |= {f"{name}.{part}": t for part, t in own.items()}
    for name, module in model.named_modules():
        if not name.endswith(".experts"):
            continue
        where = name.replace(".mlp.", f".{block}.")
        experts, rows, k = module.gate_up_proj.shape
        for e in range(experts):
            parts = []
            for which, (n, columns) in {
                gate: (rows // 2, k), up: (rows // 2, k), down: (k, rows // 2)
            }.items():  # fmt: skip
                gen = generator("foreign expert", name, e, which)
                own, w = make(gen, n, columns)
                tensors |= {f"{where}.{e}.{which}.{part}": t for part, t in own.items()}
                parts.append(w)
            wanted[name, e] = torch.cat(parts[:2]), parts[2]
    write(tmp_path / "foreign", model, about, tensors)
    changed = gnn.quantize_directory(
        tmp_path / "foreign", tmp_path / "ours", None, show=False, say=None
    )
    for directory in ("foreign", "ours"):
        made = moe(family)
        assert set(gnn.load_quantized(made, tmp_path / directory)) == set(changed)
        for (name, e), (one, two) in wanted.items():
            module = made.get_submodule(name)
            assert module.scheme == recipe
            for weight, w in (("gate_up_proj", one), ("down_proj", two)):
                got = module.packed(weight).decoded()[e]
                if recipe == "nvfp4":
                    torch.testing.assert_close(got, w.float(), rtol=2**-22, atol=0)
                else:
                    assert torch.equal(got, w.float())
        with torch.no_grad():
            assert made(torch.arange(9)[None]).logits.isfinite().all()


def test_gpt_oss(tmp_path):
    model = moe("gpt_oss")
    tensors, wanted = {}, {}
    for name, t in model.state_dict().items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = t
            continue
        experts, k, n = t.shape
        gen = generator("gpt-oss", name)
        codes, scales = draw(gen, 0, 16, experts, n, k), draw(gen, 118, 124, experts, n, k // 32)
        packed = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
        tensors[f"{name}_blocks"] = packed.unflatten(2, (k // 32, 16))
        tensors[f"{name}_scales"] = scales.to(torch.uint8)
        wanted[name] = SIGNED[codes] * (2.0 ** (scales.double() - 127)).repeat_interleave(32, 2)
    write(tmp_path / "foreign", model, {"quant_method": "mxfp4"}, tensors)
    gnn.quantize_directory(tmp_path / "foreign", tmp_path / "ours", None, show=False, say=None)
    logits = []
    for directory in ("foreign", "ours"):
        made = moe("gpt_oss")
        gnn.load_quantized(made, tmp_path / directory)
        for name, w in wanted.items():
            owner, _, weight = name.rpartition(".")
            assert torch.equal(made.get_submodule(owner).packed(weight).decoded(), w.float())
        with torch.no_grad():
            logits.append(made(torch.arange(9)[None]).logits)
    assert_bits(*logits)
    for name, w in wanted.items():
        owner, _, weight = name.rpartition(".")
        getattr(model.get_submodule(owner), weight).data = w.mT.bfloat16()
    with torch.no_grad():
        want = model(torch.arange(9)[None]).logits
    error = (logits[0] - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-6)
    assert error.median() < 0.02  # two roundings to bfloat16 in another order


ONE = group(4, "int", "group")
REFUSED = {
    "modelopt": ({"quant_method": "modelopt"}, "quant_method is 'modelopt'; expected one of comp"),
    "gptq of 5 bits": ({**GPTQ, "bits": 5}, "bits is 5; expected 2 or 3 or 4 or 8"),
    "gptq of marlin": ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
    "awq gemv": ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version is 'gemv'"),
    "static fp8": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        "activation_scheme is 'static'",
    ),
    "blocks of 64": (
        {"quant_method": "fp8", "weight_block_size": [64, 64]},
        r"weight_block_size is \[64, 64\]",
    ),
    "8 bits of bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        "bitsandbytes with load_in_8bit is not read",
    ),
    "a sparse format": (
        {**compressed("pack-quantized", ONE), "sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparsity_config has the format 'sparse-24-bitmask'",
    ),
    "a rotation": (
        {**compressed("pack-quantized", ONE), "transform_config": {"config_groups": {}, "x": 1}},
        "transform_config is not read",
    ),
    "8-bit activations beside 4-bit weights": (
        compressed("pack-quantized", {**ONE, "input_activations": by_token("int")}),
        "pack-quantized with input_activations of 8 bits is not read",
    ),
    "e4m3 beside 16 bits": (
        compressed("float-quantized", group(8, "float", "channel")),
        "float-quantized with 16-bit activations beside 8-bit floats is not read",
    ),
    "mxfp6": (
        compressed("mxfp6-pack-quantized", group(6, "float", "group")),
        "the format 'mxfp6-pack-quantized' of 6-bit float weights is not read",
    ),
    "no group": (
        compressed("pack-quantized", {**ONE, "targets": ["re:.*experts.*"]}),
        "no group of config_groups has it among its targets",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case, tmp_path):
    """By the form that was found; the model stays as it was, and nothing is written."""
    about, text = REFUSED[case]
    method = about["quant_method"]
    form = {"gptq": "gptq", "awq": "awq", "fp8": "fp8", "bitsandbytes": "bitsandbytes"}
    form = form.get(method, "pack-quantized")
    if "e4m3" in case:
        form = "float-quantized"
    model = model_of()
    directory_of(form, tmp_path / "foreign", model)
    config = json.loads((tmp_path / "foreign" / "config.json").read_text())
    config["quantization_config"] = about
    (tmp_path / "foreign" / "config.json").write_text(json.dumps(config))
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(ValueError, match=text):
        gnn.load_quantized(model, tmp_path / "foreign")
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    with pytest.raises(ValueError, match=text):
        gnn.quantize_directory(tmp_path / "foreign", tmp_path / "x", None, show=False, say=None)
    assert not (tmp_path / "x").exists()


def test_groups_by_name_and_layers_that_stay(tmp_path):
    """Two groups with a format each; o_proj is in neither and stays."""
    model = model_of()
    linear, tensors, wanted = layers_of(model), {}, {}
    for name, t in model.state_dict().items():
        layer = linear.get(name.removesuffix(".weight"))
        if layer is None or ".o_proj" in name:
            tensors[name] = t
            continue
        name = name.removesuffix(".weight")
        make = packed_int if ".mlp." in name else float8
        own, wanted[name] = make(generator("groups", name), layer.out_features, layer.in_features)
        tensors |= {f"{name}.{part}": t for part, t in own.items()}
    eight = group(8, "float", "channel", by_token("float"))
    about = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": {
            "a": {
                **group(4, "int", "group"),
                "format": "pack-quantized",
                "targets": ["re:.*mlp.*"],
            },
            "b": {**eight, "format": "float-quantized"},
        },
        "ignore": ["lm_head", "re:.*o_proj"],
    }
    write(tmp_path / "foreign", model, about, tensors)
    made = model_of()
    assert set(gnn.load_quantized(made, tmp_path / "foreign")) == set(wanted)
    for name, w in wanted.items():
        assert made.get_submodule(name).scheme == ("w4" if ".mlp." in name else "fp8")
        assert torch.equal(made.get_submodule(name).decoded(), w.float())
    assert type(made.model.layers[0].self_attn.o_proj) is torch.nn.Linear
    changed = gnn.quantize_directory(
        tmp_path / "foreign", tmp_path / "ours", None, show=False, say=None
    )
    again = model_of()
    assert gnn.load_quantized(again, tmp_path / "ours") and set(changed) == set(wanted)
    with torch.no_grad():
        assert_bits(again(torch.arange(9)[None]).logits, made(torch.arange(9)[None]).logits)


@pytest.mark.parametrize("recipe", ("w4", "w8", "fp8", "fp8-block", "int8", "nvfp4"))
def test_from_pretrained_then_accelerate(recipe, tmp_path):
    """transformers loads the directory by compressed-tensors; accelerate makes its layers ours. The
    bits are those of load_quantized. restore gives transformers' layers back, and save_pretrained
    writes what load_quantized reads."""
    pytest.importorskip("compressed_tensors")
    from torch_gpukern.integrations import transformers as gk

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        attention_bias=True,
        dtype="bfloat16",
    )
    source = transformers.LlamaForCausalLM(config).bfloat16()
    source.save_pretrained(tmp_path / "plain")
    gnn.quantize_directory(
        tmp_path / "plain",
        tmp_path / "few",
        recipe,
        layout="compressed-tensors",
        show=False,
        say=None,
    )
    ids = torch.arange(14).view(2, 7)
    called, theirs = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "few").eval() for _ in "12"
    )
    kinds = {n: type(m) for n, m in theirs.named_modules()}
    with torch.no_grad():
        before = called(ids).logits
    done = gk.accelerate(called)
    assert any("at the first call; call accelerate before" in why for why in done.left.values())
    done.restore()
    done = gk.accelerate(theirs)
    assert done.done["quantised before"] == f"14 Linear -> {recipe}"
    assert done.done["2 LlamaMLP"] == "MLP with swiglu"
    ours = transformers.AutoModelForCausalLM.from_config(config).eval()
    gnn.load_quantized(ours, tmp_path / "few")
    others = [gk.accelerate(ours)]
    theirs.save_pretrained(tmp_path / "saved")
    again = transformers.AutoModelForCausalLM.from_config(config).eval()
    gnn.load_quantized(again, tmp_path / "saved")
    others.append(gk.accelerate(again))
    with torch.no_grad():
        got = theirs(ids).logits
        assert_bits(got, ours(ids).logits)
        assert_bits(got, again(ids).logits)
    assert ((got - before).norm() / before.norm()).item() < 0.06
    for one in (done, *others):  # the rotation is replaced for all models of the family
        one.restore()
    assert {n: type(m) for n, m in theirs.named_modules()} == kinds
    with torch.no_grad():
        assert_bits(theirs(ids).logits, before)
    assert theirs.config.quantization_config is not None and theirs.hf_quantizer is not None


def test_layers_of_compressed_tensors_are_adopted_together(tmp_path):
    """compressed-tensors decodes all of its layers at the first call, so one in a form that is not
    read keeps all."""
    pytest.importorskip("compressed_tensors")
    from torch_gpukern.nn.quant.adopted import adopt

    model = model_of()
    model.save_pretrained(tmp_path / "plain")
    gnn.quantize_directory(
        tmp_path / "plain",
        tmp_path / "few",
        "fp8",
        layout="compressed-tensors",
        show=False,
        say=None,
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "few").eval()
    scheme = theirs.model.layers[0].mlp.up_proj.quantization_scheme
    inputs, scheme.input_activations = scheme.input_activations, None
    kinds = {n: (type(m), "forward" in vars(m)) for n, m in theirs.named_modules()}
    done = adopt(theirs)
    assert done.replaced == {} and "16-bit activations" in next(iter(done.left.values()))
    assert {n: (type(m), "forward" in vars(m)) for n, m in theirs.named_modules()} == kinds
    scheme.input_activations = inputs
    assert len(adopt(theirs).replaced) == len(layers_of(model))


def test_fp8_layers_of_transformers(tmp_path):
    """FP8Linear, as from_pretrained makes it on a GPU."""
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    from torch_gpukern.integrations import transformers as gk

    model, other = model_of(), model_of()
    wanted = directory_of("fp8", tmp_path / "foreign", model)
    gnn.load_quantized(other, tmp_path / "foreign")
    for name in wanted:
        plain, loaded = model.get_submodule(name), other.get_submodule(name)
        layer = fp8.FP8Linear(plain.in_features, plain.out_features, (128, 128))
        if getattr(layer, "bias", None) is not None:
            layer.bias = None
        held = loaded._tensors()
        layer.weight = torch.nn.Parameter(held["weight_codes"], requires_grad=False)
        layer.weight_scale_inv = torch.nn.Parameter(held["weight_scale"], requires_grad=False)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, layer)
    static = fp8.FP8Linear(64, 64, (128, 128), activation_scheme="static")
    model.model.left_alone = static
    done = gk.accelerate(model)
    gk.accelerate(other)
    assert done.done["quantised before"] == f"{len(wanted)} Linear -> fp8-block"
    assert any("activation_scheme 'static' is not read" in why for why in done.left.values())
    ids = torch.arange(9)[None]
    with torch.no_grad():
        assert_bits(model(ids).logits, other(ids).logits)
