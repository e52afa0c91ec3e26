# SPDX-License-Identifier: BSD-3-Clause
"""The vLLM plugin, without vLLM: against the signatures of its wheel, and run inside a stub made
from them.
"""

import abc
import ast
import dataclasses
import enum
import inspect
import itertools
import json
import re
import sys
import types
import typing
from pathlib import Path

import pytest
import torch
from conftest import generator, randn, reference, run_python

ROOT = Path(__file__).resolve().parents[2]
KNOWN = json.loads((ROOT / "tests" / "data" / "vllm_signatures.json").read_text())
CLASSES = KNOWN["classes"]
BASES = {"ABC": abc.ABC, "Enum": enum.Enum, "str": str}


def method(what):
    """A method that does nothing and has the given signature. `__init__` keeps its arguments."""
    names = [parameter.lstrip("*").split("=")[0] for parameter in what["parameters"]]
    body = (
        "; ".join(f"{names[0]}.{name} = {name}" for name in names[1:])
        if names[:1] == ["self"]
        else ""
    )
    text = f"def made({', '.join(what['parameters'])}): {body or 'pass'}"
    space = {"AttentionType": types.SimpleNamespace(DECODER="decoder")}
    exec(text, space)
    made = space["made"]
    if what["abstract"]:
        made = abc.abstractmethod(made)
    return {
        "method": lambda x: x,
        "staticmethod": staticmethod,
        "classmethod": classmethod,
        "property": property,
    }[what["kind"]](made)


@pytest.fixture
def vllm(monkeypatch):
    """A package of empty classes with vLLM's names, bases, fields and signatures. Its list of
    backends accepts new ones."""
    modules = {}
    made = dict(BASES, Generic=typing.Generic, Protocol=object)
    made |= {name: typing.TypeVar(name) for name in "TMAD"}
    for name, what in CLASSES.items():
        fields = {k: v for k, v in what["fields"].items()}
        bases = tuple(made[b] for b in what["bases"] if b != "Generic") or (object,)
        if name == "AttentionBackendEnum":
            made[name] = backends = registry()
        elif enum.Enum in bases:
            made[name] = enum.Enum(
                name,
                {k: ast.literal_eval(v) for k, v in fields.items()},
                type=str if str in bases else None,
            )
        elif not what["methods"] or name == "CommonAttentionMetadata":
            made[name] = dataclasses.make_dataclass(
                name,
                [
                    (k, object, *([dataclasses.field(default=ast.literal_eval(v))] if v else []))
                    for k, v in fields.items()
                ],
            )
        else:
            methods = {k: method(v) for k, v in what["methods"].items()}
            methods["__class_getitem__"] = classmethod(lambda cls, _: cls)
            made[name] = type(bases[0])(name, bases, methods)
        module = modules.setdefault(what["module"], types.ModuleType(what["module"]))
        setattr(module, name, made[name])
    for module in list(modules):
        for parent in itertools.accumulate(module.split("."), lambda a, b: f"{a}.{b}"):
            monkeypatch.setitem(sys.modules, parent, modules.get(parent, types.ModuleType(parent)))
    for name in ("vllm", "vllm_backend", "vllm_mla"):
        monkeypatch.delitem(sys.modules, f"torch_gpukern.integrations.{name}", raising=False)
    yield types.SimpleNamespace(backends=backends, **made)
    for name in ("vllm", "vllm_backend", "vllm_mla"):
        sys.modules.pop(f"torch_gpukern.integrations.{name}", None)


def registry():
    class AttentionBackendEnum(enum.Enum):
        FLASH_ATTN = "vllm.FlashAttentionBackend"

        @classmethod
        def register(cls, name, value):
            if name in cls._member_map_:
                raise ValueError(f"Backend {name} already exists")
            member = object.__new__(cls)
            member._name_, member._value_ = name, value
            cls._member_map_[name] = member
            cls._member_names_.append(name)
            return member

    return AttentionBackendEnum


@pytest.fixture
def backend(vllm):
    """GPUKERN as vLLM finds it: by the entry point, vLLM's list of backends, and the path in that
    list."""
    text = (ROOT / "pyproject.toml").read_text()
    assert (
        '[project.entry-points."vllm.general_plugins"]\ngpukern = '
        '"torch_gpukern.integrations.vllm:register"\n' in text
    )
    from torch_gpukern.integrations.vllm import register

    register()
    register()
    module, _, name = vllm.backends["GPUKERN"].value.rpartition(".")
    __import__(module)
    return getattr(sys.modules[module], name)


@pytest.fixture
def mla(backend, vllm):
    module, _, name = vllm.backends["GPUKERN_MLA"].value.rpartition(".")
    __import__(module)
    return getattr(sys.modules[module], name)


# ---- signatures ----


def overridden(cls, base):
    for name, what in CLASSES[base]["methods"].items():
        if name in vars(cls):
            yield name, what, inspect.unwrap(getattr(cls, name))


@pytest.mark.parametrize("base", ("AttentionBackend", "AttentionMetadataBuilder", "AttentionImpl"))
def test_signatures_are_vllms(backend, base):
    """Each method of ours takes the parameters of vLLM's method in the same order. Additional
    parameters have defaults."""
    cls = {
        "AttentionBackend": backend,
        "AttentionMetadataBuilder": backend.get_builder_cls(),
        "AttentionImpl": backend.get_impl_cls(),
    }[base]
    found = 0
    for name, what, ours in overridden(cls, base):
        theirs = [
            parameter.split("=")[0]
            for parameter in what["parameters"]
            if parameter not in ("self", "cls")
        ]
        mine = [p for p in inspect.signature(ours).parameters.values() if p.name != "self"]
        assert [p.name for p in mine[: len(theirs)]] == theirs, name
        for p in mine[len(theirs) :]:
            assert p.default is not p.empty or p.kind is p.VAR_KEYWORD, f"{name}: {p}"
        optional = [parameter.split("=")[0] for parameter in what["parameters"] if "=" in parameter]
        assert all(p.default is not p.empty for p in mine if p.name in optional), name
        kind = (
            "staticmethod"
            if isinstance(inspect.getattr_static(cls, name), staticmethod)
            else "method"
        )
        assert (kind == "staticmethod") == (what["kind"] == "staticmethod"), name
        found += 1
    assert found >= 2
    assert not inspect.isabstract(cls)
    required = {name for name, what in CLASSES[base]["methods"].items() if what["abstract"]}
    assert required <= set(vars(cls)), "an abstract method is missing"


@pytest.mark.parametrize("module", ("vllm", "vllm_backend"))
def test_what_the_plugin_reads_is_there(module):
    """The wheel has the fields of the batch, enum members and class settings that the plugin
    uses."""
    text = (ROOT / "torch_gpukern" / "integrations" / f"{module}.py").read_text()
    for name in re.findall(r"\bbatch\.(\w+)", text.split("class GpukernImpl")[0]):
        assert name in CLASSES["CommonAttentionMetadata"]["fields"], name
    for owner in ("AttentionType", "AttentionCGSupport"):
        assert set(re.findall(rf"\b{owner}\.(\w+)", text)) <= set(CLASSES[owner]["fields"])
    settings = {
        **CLASSES["AttentionBackend"]["fields"],
        **CLASSES["AttentionMetadataBuilder"]["fields"],
    }
    for name in re.findall(r"^    (_?supp\w+|forward_\w+)(?:: .*)? = ", text, re.M):
        assert name in settings, name
    assert set(
        re.findall(
            r'"(\w+)"',
            re.search(r"for name in \((.*)\):", text)[1] if module == "vllm_backend" else "",
        )
    ) <= set(CLASSES["CommonAttentionMetadata"]["fields"])


# ---- the backend in the stub ----


def layer_of(backend, heads=4, dim=16, heads_kv=2, **options):
    return backend.get_impl_cls()(heads, dim, dim**-0.5, heads_kv, **options)


def cache_of(layout, blocks=9, heads=2, size=16, dim=16, dtype=torch.float32, device="cpu"):
    """The logical [blocks, heads, size, 2 dim] over memory with the first three dimensions in
    another order."""
    shape = (blocks, heads, size)
    stored = torch.full(
        [shape[i] for i in layout] + [2 * dim], torch.nan, dtype=dtype, device=device
    )
    return stored.permute(*[layout.index(i) for i in range(3)], 3)


def batch_of(vllm, lens, counts, slots, table, causal=True, padding=0):
    ints = {"dtype": torch.int32, "device": table.device}
    starts = torch.tensor([0, *itertools.accumulate(counts)], **ints)
    fields = dict(
        query_start_loc=starts,
        query_start_loc_cpu=starts.cpu(),
        seq_lens=torch.tensor(lens, **ints),
    )
    return vllm.CommonAttentionMetadata(
        **fields,
        num_reqs=len(lens),
        num_actual_tokens=sum(counts) + padding,
        max_query_len=max(counts),
        max_seq_len=max(lens),
        block_table_tensor=table,
        slot_mapping=slots,
        causal=causal,
    )


RULES = {
    "plain": {},
    "window": {"sliding_window": 7},
    "softcap": {"logits_soft_cap": 5.0},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)},
}


@pytest.mark.parametrize(
    "rule, layout",
    [
        *[(rule, (0, 1, 2)) for rule in RULES],
        *[("plain", x) for x in itertools.permutations(range(3))],
    ],
    ids=str,
)
def test_steps_of_a_batch(vllm, backend, rule, layout, device):
    """A prefill, then a mixed batch of a chunk, a decode and an inactive row, for each storage
    order of the cache."""
    gen = generator("vllm", rule, layout)
    options = {
        name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in RULES[rule].items()
    }
    impl = layer_of(backend, **options)
    builder = backend.get_builder_cls()(None, ["a"], None, torch.device(device))
    cache = cache_of(layout, device=device)
    tables = [[3, 5, 1], [7, 2, 0], [0, 0, 0]]
    kept, lens = [([], []), ([], []), ([], [])], [0, 0, 0]
    for counts, padding, fewer_slots in (([20, 9, 0], 0, 0), ([13, 1, 0], 3, 0), ([1, 1, 0], 2, 2)):
        t = sum(counts)
        q, k, v = (randn(gen, t + padding, heads, 16, device=device) for heads in (4, 2, 2))
        slots, start = [], 0
        for b, n in enumerate(counts):
            slots += [tables[b][p // 16] * 16 + p % 16 for p in range(lens[b], lens[b] + n)]
            lens[b] += n
            for mine, new in zip(kept[b], (k, v)):
                mine.append(new[start : start + n])
            start += n
        slots = torch.tensor(slots + [-1] * (padding - fewer_slots), device=device)
        table = torch.tensor(tables, dtype=torch.int32, device=device)
        batch = builder.build(0, batch_of(vllm, lens, counts, slots, table, padding=padding))
        impl.do_kv_cache_update(None, k, v, cache, batch.slot_mapping)
        out = torch.full((t + padding, 4, 16), torch.nan, device=device)
        assert impl.forward(None, q, k, v, cache, batch, out) is out
        start = 0
        for b, n in enumerate(counts):
            if n:
                keys, values = (torch.cat(x).transpose(0, 1)[None].double() for x in kept[b])
                mine = q[start : start + n].transpose(0, 1)[None].double()
                slopes = (
                    torch.tensor(options["alibi_slopes"], dtype=torch.float64, device=device)
                    if "alibi_slopes" in options
                    else None
                )
                want = reference.flash_attn(
                    mine,
                    keys,
                    values,
                    is_causal=True,
                    diagonal=lens[b] - n,
                    window_left=options.get("sliding_window", 0) - 1,
                    softcap=options.get("logits_soft_cap", 0.0),
                    alibi_slopes=slopes,
                    sinks=options.get("sinks"),
                )
                got = out[start : start + n].transpose(0, 1)[None].double()
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
            start += n


@pytest.mark.parametrize("name", ("fp8", "fp8_e4m3", "fp8_e5m2"))
def test_8_bit_cache(vllm, backend, name, device):
    """vLLM's cache of bytes: a prompt and a step equal attention over the decoded values."""
    gen, code = (
        generator("vllm", name),
        torch.float8_e5m2 if name == "fp8_e5m2" else torch.float8_e4m3fn,
    )
    assert name in backend.supported_kv_cache_dtypes
    assert (
        backend.supports_combination(64, torch.bfloat16, name, 16, False, False, False, False, None)
        is None
    )
    impl, builder = (
        layer_of(backend, kv_cache_dtype=name),
        backend.get_builder_cls()(None, ["a"], None, torch.device(device)),
    )
    scales = {
        "_k_scale": torch.tensor(0.05, device=device),
        "_v_scale": torch.tensor([0.03, 0.07], device=device),
    }
    layer = types.SimpleNamespace(**scales)
    cache = torch.full((4, 2, 16, 32), 0xFF, dtype=torch.uint8, device=device)
    table, kept = torch.tensor([[2, 1, 0]], dtype=torch.int32, device=device), ([], [])
    for start, n in ((0, 20), (20, 1)):
        q, k, v = (randn(gen, n, heads, 16, device=device) for heads in (4, 2, 2))
        slots = torch.tensor(
            [table[0, p // 16] * 16 + p % 16 for p in range(start, start + n)], device=device
        )
        batch = builder.build(0, batch_of(vllm, [start + n], [n], slots, table))
        impl.do_kv_cache_update(layer, k, v, cache, batch.slot_mapping)
        out = impl.forward(layer, q, k, v, cache, batch, torch.empty_like(q))
        for mine, x, scale in zip(kept, (k, v), scales.values()):
            by = scale.view(-1, 1)
            mine.append((x / by).to(code).double() * by.double())
        keys, values = (torch.cat(x).transpose(0, 1)[None] for x in kept)
        want = reference.flash_attn(
            q.transpose(0, 1)[None].double(), keys, values, is_causal=True, diagonal=start
        )
        torch.testing.assert_close(out.transpose(0, 1)[None].double(), want, rtol=1e-4, atol=1e-5)


def test_not_causal_and_encoder(vllm, backend, device):
    gen = generator("encoder")
    builder = backend.get_builder_cls()(None, ["a"], None, torch.device(device))
    q, k, v = (randn(gen, 12, heads, 16, device=device) for heads in (4, 2, 2))
    table = torch.tensor([[1], [2]], dtype=torch.int32, device=device)
    slots = torch.tensor([*range(16, 23), *range(32, 37)], device=device)
    for attn_type, causal in (("decoder", False), ("encoder_only", True)):
        impl = layer_of(backend, attn_type=attn_type)
        cache = cache_of((0, 1, 2), device=device)
        batch = builder.build(0, batch_of(vllm, [7, 5], [7, 5], slots, table, causal=causal))
        impl.do_kv_cache_update(None, k, v, cache, batch.slot_mapping)
        assert cache.isnan().all() == (attn_type != "decoder")
        out = torch.empty(12, 4, 16, device=device)
        impl.forward(None, q, k, v, cache, batch, out)
        for span in (slice(0, 7), slice(7, 12)):
            want = reference.flash_attn(
                *(x[span].transpose(0, 1)[None].double() for x in (q, k, v))
            )
            torch.testing.assert_close(
                out[span].transpose(0, 1)[None].double(), want, rtol=1e-4, atol=1e-5
            )


def test_profiling_without_a_batch(backend):
    out = torch.full((3, 4, 16), torch.nan)
    layer_of(backend).forward(None, None, None, None, torch.empty(0), None, out)
    assert not out.any()


def test_refused_by_name(vllm, backend):
    made = backend.get_impl_cls()
    for options, text in (
        (
            {"attn_type": "encoder_decoder"},
            "GPUKERN: attention of type encoder_decoder is not served; use TRITON_ATTN or "
            "FLASH_ATTN",
        ),
        ({"kv_cache_dtype": "nvfp4"}, "GPUKERN: kv_cache_dtype=nvfp4 is not served; use auto"),
        ({"use_alibi_sqrt": True}, "GPUKERN: use_alibi_sqrt=True is not served; use TRITON_ATTN"),
    ):
        with pytest.raises(NotImplementedError) as error:
            layer_of(backend, **options)
        assert str(error.value) == text
    made(4, 16, 0.25, 2, chunk_lookback=-1, use_alibi_sqrt=False)  # these settings have no effect
    table = torch.zeros(1, 1, dtype=torch.int32)
    builder = backend.get_builder_cls()(None, ["a"], None, torch.device("cpu"))
    good = batch_of(vllm, [1], [1], torch.tensor([0]), table)
    for change in (
        {"causal": torch.tensor([True])},
        {"mm_req_doc_ranges": {0: [(0, 1)]}},
        {"rswa_prefix_lens": torch.tensor([1])},
    ):
        with pytest.raises(
            NotImplementedError, match="^GPUKERN: .* is not served; use TRITON_ATTN$"
        ):
            builder.build(0, dataclasses.replace(good, **change))
    batch = builder.build(0, dataclasses.replace(good, causal=False))
    q = torch.zeros(1, 4, 16)
    for impl, options in (
        (layer_of(backend, sliding_window=4), {}),
        (layer_of(backend), {"output_scale": torch.ones(1)}),
    ):
        with pytest.raises(NotImplementedError, match="^GPUKERN: "):
            impl.forward(None, q, q, q, cache_of((0, 1, 2)), batch, q.clone(), **options)


def test_trees_of_drafts_are_refused_by_name(backend):
    """The wheel has no such setting. One that lists a chain changes nothing."""
    assert KNOWN["absent"] == ["TREE_ATTN", "speculative_token_tree"]
    build = backend.get_builder_cls()

    def config(tree):
        return types.SimpleNamespace(
            speculative_config=types.SimpleNamespace(speculative_token_tree=tree)
        )

    device = torch.device("cpu")
    for fine in (config("[(0,), (0, 0), (0, 0, 0)]"), config(None), types.SimpleNamespace()):
        build(None, ["a"], fine, device)
    with pytest.raises(NotImplementedError) as error:
        build(None, ["a"], config("[(0,), (1,), (0, 0)]"), device)
    assert str(error.value) == (
        "GPUKERN: a tree of drafts, speculative_token_tree=[(0,), (1,), (0, 0)], is not served; "
        "draft a chain"
    )


def test_what_vllm_asks(backend):
    sizes = [size for size in range(1, 300) if backend.supports_head_size(size)]
    assert sizes == list(range(8, 257, 8)) and backend.get_name() == "GPUKERN"
    assert [size.base for size in backend.get_supported_kernel_block_sizes()] == [16]
    assert [
        x
        for x in ("decoder", "encoder", "encoder_only", "encoder_decoder")
        if backend.supports_attn_type(x)
    ] == [
        "decoder",
        "encoder",
        "encoder_only",
    ]
    capability = types.SimpleNamespace(major=7, minor=5)
    assert not backend.supports_compute_capability(capability)
    same = (None, 16, False, False, False, False, None)
    assert backend.supports_combination(64, torch.float16, "float16", *same[1:]) is None
    assert (
        backend.supports_combination(64, torch.float16, "bfloat16", *same[1:])
        == "a cache of bfloat16 for queries of torch.float16"
    )


# ---- latent attention ----

WIDTHS = dict(
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    qk_head_dim=24,
    v_head_dim=20,
)


def latent_layer(mla, **options):
    given = dict(
        num_heads=6,
        head_size=40,
        scale=0.2,
        num_kv_heads=1,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="auto",
        logits_soft_cap=None,
        attn_type="decoder",
        kv_sharing_target_layer_name=None,
    )
    return mla.get_impl_cls()(**given | options, **WIDTHS, kv_b_proj=None)


def test_signatures_of_latent_attention(mla):
    impl = mla.get_impl_cls()
    for name in ("__init__", "forward_mqa"):
        theirs = CLASSES["MLAAttentionImpl"]["methods"][name]["parameters"]
        mine = list(inspect.signature(getattr(impl, name)).parameters)
        named = [x for x in mine if x != "mla"]
        assert theirs[: len(named)] == named and (name == "__init__" or theirs == named)
    text = (ROOT / "torch_gpukern" / "integrations" / "vllm_mla.py").read_text()
    for owner, variable in (
        ("MLACommonMetadata", "attn_metadata"),
        ("MLACommonDecodeMetadata", "batch"),
    ):
        read = set(re.findall(rf"\b{variable}\.(\w+)", text))
        assert read and read <= set(CLASSES[owner]["fields"])
    settings = {
        **CLASSES["AttentionBackend"]["fields"],
        **CLASSES["AttentionMetadataBuilder"]["fields"],
        **CLASSES["MLACommonMetadataBuilder"]["fields"],
        **CLASSES["AttentionImplBase"]["fields"],
    }
    for name in re.findall(r"^    (\w+): .* = ", text, re.M):
        assert name in settings, name
    assert {"scale", "kv_lora_rank", "need_to_return_lse_for_decode"} <= {
        *CLASSES["AttentionImplBase"]["fields"],
        *(x for x in CLASSES["MLACommonBaseImpl"]["methods"]["__init__"]["parameters"]),
    }
    assert set(re.findall(r"AttentionCGSupport\.(\w+)", text)) <= set(
        CLASSES["AttentionCGSupport"]["fields"]
    )
    assert set(re.findall(r"QueryLenSupport\.(\w+)", text)) <= set(
        CLASSES["QueryLenSupport"]["fields"]
    )
    assert mla.get_name() == "GPUKERN_MLA" and not inspect.isabstract(impl)


@pytest.mark.parametrize("tokens", (1, 3))
@pytest.mark.parametrize("causal", (True, False))
def test_decoding_over_latents(vllm, mla, tokens, causal, device):
    """A batch with an inactive row, queries whole and in parts, beside float64."""
    gen = generator("vllm mla", tokens, causal)
    impl = latent_layer(mla)
    lens = [37, 0, 9]
    cache = torch.full((6, 16, 40), torch.nan, device=device)
    table = torch.tensor([[3, 5, 1], [0, 0, 0], [2, 0, 0]], dtype=torch.int32, device=device)
    kept = [randn(gen, n, 40, device=device) for n in lens]
    for b, n in enumerate(lens):
        for p in range(n):
            cache[table[b, p // 16], p % 16] = kept[b][p]
    batch = vllm.MLACommonDecodeMetadata(
        block_table=table,
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        dcp_tot_seq_lens=None,
    )
    about = types.SimpleNamespace(decode=batch, causal=causal)
    q = randn(gen, 3 * tokens, 6, 40, device=device)
    impl.need_to_return_lse_for_decode = True
    out, lse = impl.forward_mqa(q, cache, about, None)
    impl.need_to_return_lse_for_decode = False
    again, none = impl.forward_mqa((q[..., :32], q[..., 32:]), cache, about, None)
    assert none is None and torch.equal(again, out) and out.shape == (3 * tokens, 6, 32)
    for b, n in enumerate(lens):
        rows = slice(b * tokens, (b + 1) * tokens)
        if n == 0:
            assert (out[rows] == 0).all()
            continue
        keys = kept[b].double()[None, None]
        want, want_lse = reference.flash_attn(
            q[rows].transpose(0, 1)[None].double(),
            keys,
            keys[..., :32],
            scale=0.2,
            is_causal=causal,
            diagonal=n - tokens if causal else 0,
            return_lse=True,
        )
        torch.testing.assert_close(
            out[rows].transpose(0, 1)[None].double(), want, rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(lse[rows].T[None].double(), want_lse, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options, text",
    (
        ({"alibi_slopes": [0.5] * 6}, "alibi_slopes is not served; use TRITON_MLA"),
        ({"sliding_window": 8}, "sliding_window is not served; use TRITON_MLA"),
        ({"logits_soft_cap": 3.0}, "logits_soft_cap is not served; use TRITON_MLA"),
        ({"attn_type": "encoder"}, "attention of type encoder is not served; use TRITON_MLA"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype=fp8 is not served; use auto"),
    ),
    ids=str,
)
def test_latent_layers_that_are_refused(mla, options, text):
    with pytest.raises(NotImplementedError, match=f"^GPUKERN_MLA: {text}$"):
        latent_layer(mla, **options)


def test_a_vllm_that_takes_no_names_is_left_alone(vllm, monkeypatch):
    from torch_gpukern.integrations.vllm import register

    monkeypatch.setattr(vllm.backends, "register", None, raising=False)
    monkeypatch.delattr(vllm.backends, "register")
    with pytest.warns(
        UserWarning,
        match="^gpukern: this vLLM takes no new attention backend .* needs vLLM 0.33 or later$",
    ):
        register()
    assert "GPUKERN" not in vllm.backends.__members__


def test_nothing_else_imports_it():
    for path in (ROOT / "torch_gpukern").rglob("*.py"):
        if path.stem not in ("vllm", "vllm_backend", "vllm_mla"):
            assert not re.search(r"^\s*(from|import) .*\bvllm", path.read_text(), re.M), path
    run_python(
        "import sys, torch_gpukern, torch_gpukern.nn, torch_gpukern.integrations.flash_attn, "
        "torch_gpukern.cli\n"
        "assert not [name for name in sys.modules if 'vllm' in name]"
    )
