# SPDX-License-Identifier: BSD-3-Clause
"""transformers with attn_implementation="gpukern" against "eager": tiny models with random weights.

The error rule is that of the ops. The judge is "eager" in float64, and in float32 ours may be at
most twice as far from it as "eager" in float32. Padded positions are never compared, because their
values in transformers mean nothing.
"""

import ast
import contextlib
import functools
import itertools
import re
import types
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import assert_close_as, generator, randn, reference
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

transformers = pytest.importorskip("transformers")
from torch_gpukern import attn_mask_of  # noqa: E402
from torch_gpukern.integrations import transformers as gk  # noqa: E402

# transformers 5.2x renamed past_key_values to `cache`; older releases only know the old name.
pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")

SMALL = dict(
    hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_hidden_layers=2
)
WORDS = dict(
    vocab_size=96,
    intermediate_size=96,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
WINDOW = 7


def _family(name, **changes):
    config = {**SMALL, **WORDS, **changes}
    config_name, _, model_name = name.partition(":")
    model_name = model_name or f"{config_name}ForCausalLM"
    return getattr(transformers, f"{config_name}Config")(**config), getattr(
        transformers, model_name
    )


LAYERS = ["sliding_attention", "full_attention"]
FAMILIES = {
    "llama": lambda: _family("Llama"),
    "mistral": lambda: _family("Mistral", sliding_window=WINDOW),
    "gemma2": lambda: _family(
        "Gemma2", sliding_window=WINDOW, layer_types=LAYERS, attn_logit_softcapping=2.0
    ),
    "gemma3": lambda: _family(
        "Gemma3Text:Gemma3ForCausalLM", sliding_window=WINDOW, layer_types=LAYERS
    ),
    "qwen3": lambda: _family("Qwen3"),
    "gpt_oss": lambda: _family(
        "GptOss",
        sliding_window=WINDOW,
        layer_types=LAYERS,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "mixtral": lambda: _family("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v3": lambda: _family(
        "DeepseekV3",
        head_dim=8,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=12,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    ),
}
# Families that state their window only in the mask.
BY_THE_MASK = {
    "qwen2_moe": lambda: _family(
        "Qwen2Moe",
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=LAYERS,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
    "phimoe": lambda: _family(
        "Phimoe:PhimoeForCausalLM", sliding_window=WINDOW, num_local_experts=4
    ),
}
ENCODERS = {
    "bert": lambda: _family("Bert:BertModel", num_key_value_heads=None),
    "modernbert": lambda: _family(
        "ModernBert:ModernBertModel",
        layer_types=LAYERS,
        local_attention=8,
        num_key_value_heads=None,
    ),
}


def exact(module, query, key, value, attention_mask, scaling=None, softcap=None, s_aux=None, **_):
    """ "eager" without its float32 softmax."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    score = (query @ key.mT) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    score = score if softcap is None else softcap * torch.tanh(score / softcap)
    score = score if attention_mask is None else score + attention_mask
    if s_aux is not None:
        score = torch.cat([score, s_aux[None, :, None, None].expand(*score.shape[:3], 1)], -1)
    weights = torch.softmax(score, -1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2), None


@pytest.fixture(autouse=True, scope="module")
def _registered():
    gk.register()
    transformers.AttentionInterface.register("exact", exact)
    transformers.AttentionMaskInterface.register("exact", gk.hf.eager_mask)


def build(make, implementation, dtype=torch.float32, seed=0, **changes):
    """A model with weights that depend only on the seed and are large enough that attention is far
    from uniform."""
    config, cls = make()
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = cls._from_config(
            config, attn_implementation="eager", experts_implementation="eager"
        ).to(dtype)
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            values = torch.randn(p.shape, generator=gen, dtype=torch.float64)
            if "sinks" in name or p.dim() > 1:
                p.copy_(values * (1.0 if "sinks" in name else 0.15))
    model.set_attn_implementation(implementation)
    return model.eval()


def words(batch, length, seed=0):
    return torch.randint(
        3, WORDS["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed)
    )


def padding(lengths, total, side):
    place = torch.arange(total).expand(len(lengths), -1)
    n = torch.tensor(lengths)[:, None]
    return (place < n if side == "right" else place >= total - n).long()


def assert_as_eager(make, run, **changes):
    """run(model) returns a dict of tensors. Ours may have at most twice the error of eager's.

    For gradients of only two sequences, the largest error of a layer depends on a few scores, which
    may all round well by luck. So the errors of eager with other weights count, too, scaled to the
    size of this model's results.
    """

    @functools.cache
    def pair(seed):
        ways = (("exact", torch.float64), ("eager", torch.float32))
        return [run(build(make, way, dtype, seed, **changes)) for way, dtype in ways]

    def yards(name, draw):
        (want, yard), first = pair(draw), pair(0)[0][name]
        if draw == 0 or name not in want or want[name].shape != first.shape or not want[name].any():
            return [] if draw else [yard[name]]  # no token chose this expert
        size = first.abs().max() / want[name].abs().max()
        return [(yard[name] * size, want[name].double() * size)]

    (want, yard), got = pair(0), run(build(make, "gpukern", torch.float32, **changes))
    assert want.keys() == yard.keys() == got.keys()
    for name, ref in want.items():
        if ref.is_floating_point():
            assert_close_as(partial(yards, name), got[name], ref.double(), name, sources=512)
        else:
            assert torch.equal(ref, got[name]), name


# ---- a whole sequence at once --------------------------------------------------------------------


def step(ids, mask=None, **inputs):
    """Logits (or hidden states) of the tokens and the gradients of all weights."""

    def run(model):
        out = model(ids, attention_mask=mask, **inputs)[0]
        seen = out if mask is None else out[mask.bool()]
        (
            seen
            * torch.randn(
                seen.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
            )
        ).sum().backward()
        grads = {}
        # the gradient of a key's bias is only rounding, so it is compared together with its weight
        for name, p in model.named_parameters():
            if p.grad is not None:
                grads.setdefault(name.rpartition(".")[0], []).append(p.grad.flatten())
        return {"out": seen.detach(), **{name: torch.cat(g) for name, g in grads.items()}}

    return run


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("family", [*FAMILIES, *ENCODERS])
def test_forward_and_gradients(family, side):
    make = {**FAMILIES, **ENCODERS}[family]
    mask = None if side == "none" else padding([19, 11], 19, side)
    assert_as_eager(make, step(words(2, 19), mask))


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("how", ["position_ids", "cu_seq_lens"])
def test_packed_sequences(family, how):
    """Two rows of several sequences, or with cu_seq_lens one row. (GPT-OSS asks for no packed mask,
    whatever serves it.)"""
    lengths = [[9, 1, 12], [4, 18]] if how == "position_ids" else [[9, 1, 12]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    ids = words(len(lengths), 22)
    inputs = {"position_ids": positions}
    if how == "cu_seq_lens":
        cu = torch.tensor([0, 9, 10, 22], dtype=torch.int32)
        inputs |= {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 12, "max_length_k": 12}
    assert_as_eager(FAMILIES[family], step(ids, use_cache=False, **inputs))


# ---- models whose attention computes with the mask -----------------------------------------------


def _sparse(name, **changes):
    """A model with latent attention whose indexer chooses the keys that a query sees."""
    sizes = dict(kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8)
    sizes |= dict(v_head_dim=8, index_topk=4, index_n_heads=2, index_head_dim=16)
    sizes |= dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    sizes |= dict(n_group=1, topk_group=1, first_k_dense_replace=1, num_key_value_heads=4)
    return _family(name, **sizes, **changes)


MASKED = {
    "doge": lambda: _family("Doge", keep_window_size=4),
    "deepseek_v4": lambda: _family(
        "DeepseekV4",
        num_key_value_heads=1,
        q_lora_rank=16,
        sliding_window=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        layer_types=["sliding_attention", "compressed_sparse_attention"],
        mlp_layer_types=["moe", "moe"],
    ),
}


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("family", MASKED)
def test_a_mask_that_the_model_changes(family, side):
    """Doge hides keys by a mask of its own, DeepSeek-V4 adds columns for compressed keys."""
    try:
        MASKED[family]()
    except AttributeError:
        pytest.skip(f"this transformers has no {family}")
    mask = None if side == "none" else padding([11, 8], 11, side)
    ids, seen = words(2, 11), slice(None) if mask is None else mask.bool()
    assert_as_eager(
        MASKED[family], lambda m: {"out": m(ids, attention_mask=mask)[0][seen].detach()}
    )


@pytest.mark.parametrize("name", ["DeepseekV32", "GlmMoeDsa"])
def test_keys_that_an_indexer_chooses_are_refused_by_name(name):
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"this transformers has no {name}")
    model = build(lambda: _sparse(name), "gpukern", torch.float32)
    with pytest.raises(ValueError, match="gpukern attention: sparse attention by indices of keys"):
        model(words(2, 11))


def test_every_model_that_changes_the_mask_gets_a_matrix():
    """Read from transformers' sources: an attention that takes elements of `attention_mask`, or
    makes another mask of it, and passes it on."""
    # these pass on a mask of another kind, which transformers does not ask gpukern for
    other = {"decision_transformer", "gpt2", "granite_speech5", "nemotron_asr_streaming"}
    other |= {"parakeet", "swin"}
    found = set()
    for path in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        for body in path.read_text().split("\nclass ")[1:]:
            name = re.match(r"\w+", body)[0]
            if name.endswith("Attention") and "get_interface(" in body and "mask" in body:
                text = re.split(r"\n(?=[^\s)])", body)[0]  # up to the class's end
                if _computes_with_the_mask(ast.parse(f"class {text}")):
                    found.add(path.parent.name)
    assert found - other <= {kind.removesuffix("_text") for kind in gk.MATRICES}


def _computes_with_the_mask(kind):
    for node in ast.walk(kind):
        operands = []
        if isinstance(node, ast.Subscript):
            operands = [node.value]
        elif isinstance(node, ast.BinOp):
            operands = [node.left, node.right]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            lists = [x.elts for x in node.args if isinstance(x, ast.List)]
            operands = [node.func.value, *itertools.chain(*lists)]
        if any(isinstance(x, ast.Name) and x.id == "attention_mask" for x in operands):
            return True
    return False


# ---- over a cache --------------------------------------------------------------------------------


def turns(ids, mask, cuts, cache):
    """Logits of the tokens with the sequence given in parts over a cache: prefill in chunks, later
    turns, single steps."""

    def run(model):
        options = {"config": model.config}
        if cache == "static":
            state = transformers.StaticCache(**options, max_cache_len=ids.shape[1] + 5)
        else:
            state = transformers.DynamicCache(**options)
        found, at = {}, 0
        with torch.no_grad():
            for end in cuts:
                seen = None if mask is None else mask[:, :end]
                positions = (
                    torch.arange(at, end)[None]
                    if mask is None
                    else (seen.cumsum(1) - 1).clamp(0)[:, at:end]
                )
                out = model(
                    ids[:, at:end],
                    attention_mask=seen,
                    past_key_values=state,
                    position_ids=positions,
                )[0]
                found[f"{at}:{end}"] = (
                    out.flatten(0, 1) if mask is None else out[mask[:, at:end].bool()]
                )
                at = end
        return found

    return run


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_turns_over_a_cache(family, cache, side):
    """A prefill, chunks shorter and longer than the window, and steps of one token."""
    mask = None if side == "none" else padding([26, 13], 26, side)
    cuts = (5, 9, 20, 21, 22, 24, 26)
    assert_as_eager(FAMILIES[family], turns(words(2, 26), mask, cuts, cache))


class Sees(TorchDispatchMode):
    """Records the ops that run, and the bytes of the largest tensor that any of them allocates."""

    def __init__(self):
        super().__init__()
        self.ops, self.bytes = set(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.add(str(func))
        given = {
            x.untyped_storage().data_ptr()
            for x in tree_leaves((args, kwargs))
            if isinstance(x, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given:
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("side", ["none", "left"])
def test_a_chunk_over_a_static_cache_copies_no_keys(side):
    """The kernel reads the chunk's place from a tensor, so nothing as large as a layer's keys is
    allocated."""
    model, ids = build(FAMILIES["llama"], "gpukern"), words(2, 12)
    mask = None if side == "none" else padding([12, 7], 12, side)
    state = transformers.StaticCache(config=model.config, max_cache_len=4096)
    with torch.no_grad():
        model(
            ids[:, :5], attention_mask=None if mask is None else mask[:, :5], past_key_values=state
        )
        with Sees() as sees:
            model(
                ids[:, 5:],
                attention_mask=mask,
                past_key_values=state,
                position_ids=torch.arange(5, 12)[None],
            )
    keys = [layer.keys for layer in state.layers]
    assert "gpukern.flash_attn.default" in sees.ops and not any("varlen" in op for op in sees.ops)
    assert sees.bytes < min(k.numel() * k.element_size() for k in keys)


def test_a_bidirectional_window_over_a_cache():
    """Queries in the middle of the keys see as many keys on either side."""
    gen = generator("bidirectional window")
    q, k, v = (randn(gen, 2, h, s, 16) for h, s in ((4, 5), (2, 30), (2, 30)))
    start = torch.tensor([3, 20], dtype=torch.int32)
    mask = gk.Rule(causal=False, window=4, q_start=start).to_tensor(2, "cpu")
    out, _ = gk._attention(torch.nn.Module(), q, k, v, mask)
    rules = dict(window_left=4, window_right=4, q_start=start)
    want = reference.flash_attn(q.double(), k.double(), v.double(), **rules).transpose(1, 2)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generate(family, cache):
    """The same greedy tokens, for a batch that is padded on the left."""
    mask = padding([12, 5], 12, "left")
    ids = words(2, 12) * mask
    found = {}
    for way in ("eager", "gpukern"):
        model = build(FAMILIES[family], way)
        options = (
            {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
        )
        found[way] = model.generate(
            ids, attention_mask=mask, max_new_tokens=12, do_sample=False, **options
        )
    assert found["gpukern"].shape == (2, 24)
    assert torch.equal(found["gpukern"], found["eager"])


def test_autocast_and_checkpointing():
    """Training under bfloat16 autocast with recomputed layers is as near to float64 as "eager"
    is."""
    mask = padding([19, 11], 19, "left")
    run = step(words(2, 19), mask)

    def checkpointed(model):
        model.train().gradient_checkpointing_enable()
        with torch.autocast("cpu", torch.bfloat16, enabled=model.dtype is not torch.float64):
            return {
                name: x.float() if x.dtype is torch.bfloat16 else x
                for name, x in run(model).items()
            }

    assert_as_eager(FAMILIES["gemma3"], checkpointed)


# ---- every family --------------------------------------------------------------------------------

ANY = dict(
    **{
        **WORDS,
        **SMALL,
        "eos_token_id": 2,
        "max_position_embeddings": 128,
        "sliding_window": WINDOW,
        "attention_dropout": 0.0,
    },
    **dict.fromkeys(("n_embd", "d_model", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("n_layer", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(
        ("n_head", "num_heads", "encoder_attention_heads", "decoder_attention_heads"), 4
    ),
    **dict.fromkeys(("ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim"), 96),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **{
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
    **{
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "rotary_dim": 8,
    },
)


def any_model(config_class, model_class):
    """A small model of a family, or None if these numbers make no model."""
    transformers.logging.set_verbosity_error()
    for without in ((), ("head_dim", "sliding_window"), ("num_key_value_heads",)):
        with contextlib.suppress(Exception):
            config = config_class(
                **{name: value for name, value in ANY.items() if name not in without}
            )
            with torch.device("meta"):
                size = sum(p.numel() for p in model_class._from_config(config).parameters())
            if size > 3e6:
                return None
            torch.manual_seed(0)
            model = model_class._from_config(config, attn_implementation="eager").eval()
            with torch.no_grad():
                for p in model.parameters():
                    if p.dim() > 1:
                        p.normal_(0, 0.15)
            return model
    return None


@pytest.mark.slow
def test_every_causal_family():
    """Each family of transformers gives the same as "eager" or refuses. None is wrong."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as families

    mask = padding([19, 11], 19, "left")
    ids, served, refused_by = words(2, 19), [], {}
    ways = {"dynamic": {}, "static": {"cache_implementation": "static", "disable_compile": True}}
    for config_class in list(families.keys()):
        model = any_model(config_class, families[config_class])
        for cache, options in ways.items() if model is not None else ():
            found = {}
            for way in ("eager", "gpukern"):
                try:
                    model.set_attn_implementation(way)
                    if model.config._attn_implementation != way:
                        break  # this family has its own attention, which cannot be replaced
                    found[way] = model.generate(
                        ids,
                        attention_mask=mask,
                        max_new_tokens=8,
                        do_sample=False,
                        eos_token_id=None,
                        output_logits=True,
                        return_dict_in_generate=True,
                        **options,
                    ).logits
                except Exception as error:
                    if way == "eager":
                        break
                    refused_by[f"{config_class.__name__} {cache}"] = str(error)
            if len(found) == 2:
                for mine, theirs in zip(found["gpukern"], found["eager"]):
                    assert (mine - theirs).abs().max() < 1e-4 * theirs.abs().max(), (
                        f"{config_class.__name__}, {cache} cache"
                    )
                served.append(config_class.__name__)
    assert len(set(served)) >= 100, f"{len(set(served))} families served; refused: {refused_by}"
    for name, text in refused_by.items():
        assert "gpukern attention: " in text or "The size of tensor" in text, f"{name}: {text}"


# ---- compiled ------------------------------------------------------------------------------------


def compiled(model):
    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize(
    "family, padded", [("llama", False), ("gemma2", True), ("modernbert", True)]
)
def test_fullgraph_training(family, padded):
    mask = padding([19, 11], 19, "left") if padded else None
    run = step(words(2, 19), mask)
    make = {**FAMILIES, **ENCODERS}[family]

    def in_one_graph(model):
        model.forward = (
            compiled(model.forward)
            if model.config._attn_implementation == "gpukern"
            else model.forward
        )
        return run(model)

    assert_as_eager(make, in_one_graph)


@pytest.mark.parametrize("family, side", [("llama", "none"), ("gemma3", "left")])
def test_fullgraph_over_a_static_cache(family, side):
    """Prefill, a chunk and steps. The steps of a full cache share a graph."""
    mask = None if side == "none" else padding([12, 5], 12, side)
    run = turns(words(2, 12), mask, (6, 10, 11, 12), "static")

    def in_one_graph(model):
        model.forward = (
            compiled(model.forward)
            if model.config._attn_implementation == "gpukern"
            else model.forward
        )
        return run(model)

    assert_as_eager(FAMILIES[family], in_one_graph)


def test_one_graph_for_all_lengths():
    model, plain = (build(FAMILIES["gemma3"], way) for way in ("gpukern", "eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    call = torch.compile(model.forward, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (19, 12):
        mask, ids = padding([length, length - 5], length, "left"), words(2, length)
        with torch.no_grad():
            got, want = (
                f(ids, attention_mask=mask, use_cache=False)[0][mask.bool()] for f in (call, plain)
            )
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_generate_compiles_its_steps(family):
    """As transformers does on CUDA: masks come from outside, and all steps share one graph."""
    mask = padding([12, 5], 12, "left")
    ids, options = (
        words(2, 12) * mask,
        {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False},
    )
    want = build(FAMILIES[family], "eager").generate(ids, **options)
    config = transformers.CompileConfig(backend="aot_eager", fullgraph=True, mode=None)
    config._compile_all_devices = True
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = build(FAMILIES[family], "gpukern")
    found = model.generate(ids, **options, cache_implementation="static", compile_config=config)
    assert torch.equal(found, want)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_inductor():
    """The mask and one layer's attention, compiled to C++."""
    model = build(FAMILIES["mistral"], "gpukern", num_hidden_layers=1)
    embeds, tokens = torch.randn(2, 9, 64), padding([9, 5], 9, "left").bool()
    q, k, v = (torch.randn(2, h, 9, 16) for h in (4, 2, 2))

    def attend(q, k, v, embeds, tokens):
        mask = gk.hf.create_sliding_window_causal_mask(
            model.config, embeds, tokens, None, torch.arange(9)[None]
        )
        return gk._attention(model.model.layers[0].self_attn, q, k, v, mask)[0]

    out = torch.compile(attend, fullgraph=True)(q, k, v, embeds, tokens)
    torch.testing.assert_close(out, attend(q, k, v, embeds, tokens))


def test_compiled_packing_is_refused_when_it_runs():
    model = build(FAMILIES["mistral"], "gpukern")
    positions = torch.cat([torch.arange(9), torch.arange(13)])[None]
    call = compiled(model.forward)
    ids = words(1, 22)
    call(ids, position_ids=torch.arange(22)[None], use_cache=False)
    with pytest.raises(RuntimeError, match="pass cu_seq_lens_q for packed sequences"):
        call(ids, position_ids=positions, use_cache=False)
    cu = torch.tensor([0, 9, 22], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 13, "max_length_k": 13}
    out = call(ids, position_ids=positions, use_cache=False, **lengths)[0]
    plain = model(ids, position_ids=positions, use_cache=False)[0]
    torch.testing.assert_close(out, plain)


def test_compiled_holes_are_refused_when_it_runs():
    call = compiled(build(FAMILIES["llama"], "gpukern").forward)
    with pytest.raises(RuntimeError, match="padding must be before or after the tokens"):
        call(words(1, 6), attention_mask=torch.tensor([[1, 1, 0, 0, 1, 1]]), use_cache=False)


# ---- what is refused -----------------------------------------------------------------------------


def refused(text, family="llama", length=8, changes=None, training=False, **inputs):
    model = build(FAMILIES[family], "gpukern", **(changes or {})).train(training)
    with pytest.raises(ValueError, match=f"^gpukern attention: {text}") as error:
        model(words(1, length), use_cache=False, **inputs)
    assert "; " in str(error.value), "the message says what to use instead"


def test_refusals():
    refused("output_attentions", output_attentions=True)
    square = torch.ones(1, 1, 8, 8, dtype=torch.int64).tril()
    refused(
        r"attention_mask is neither a bool nor a float matrix \(\(1, 1, 8, 8\) torch.int64\)",
        attention_mask=square,
    )
    cu = torch.tensor([0, 3, 8], dtype=torch.int32)
    text = "cu_seq_lens_q with a mask or a bias, with a cache, with several rows or without"
    refused(text, cu_seq_lens_q=cu)
    left = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1]])
    refused(text, attention_mask=left, cu_seq_lens_q=cu, cu_seq_lens_k=cu)
    refused(text, attention_mask=square.bool(), cu_seq_lens_q=cu, cu_seq_lens_k=cu)


def test_dropout():
    """In training as the config asks, by torch's generator; none in evaluation."""
    model = build(FAMILIES["llama"], "gpukern", attention_dropout=0.5)
    tokens, runs = words(1, 8), {}
    for training, seed in ((False, 1), (True, 1), (True, 1), (True, 2), (False, 2)):
        torch.manual_seed(seed)
        runs.setdefault((training, seed), []).append(
            model.train(training)(tokens, use_cache=False).logits
        )
    assert torch.equal(*runs[True, 1]) and not torch.equal(runs[True, 1][0], runs[True, 2][0])
    assert torch.equal(runs[False, 1][0], runs[False, 2][0]) and not torch.equal(
        runs[False, 1][0], runs[True, 1][0]
    )


def mask_of(config, length=8, **inputs):
    return gk.hf.create_causal_mask(config, torch.zeros(1, length, 4), None, None, **inputs)


MATRICES = {
    "prefix": {"or_mask_function": lambda b, h, q, k: k < 5},
    "dilated": {"and_mask_function": lambda b, h, q, k: (q - k) % 3 == 0},
    "blocks": {
        "block_sequence_ids": torch.tensor([2 * [-1, -1, 0, 0, 0, -1], 2 * [-1, 0, 0, 1, 1, 1]])
    },
}


@pytest.mark.parametrize("kind", [*MATRICES, "chunks", "holes"])
def test_masks_that_are_no_rule_are_matrices(kind):
    config = build(FAMILIES["llama"], "gpukern").config
    config.attention_chunk_size = 5
    embeds, create, more, padding_mask = torch.zeros(2, 12, 4), gk.hf.create_causal_mask, {}, None
    if kind == "chunks":
        create = gk.hf.create_chunked_causal_mask
    elif kind == "holes":
        padding_mask = torch.ones(2, 12, dtype=torch.bool)
        padding_mask[1, 3:6] = False
    else:
        more = MATRICES[kind]
    got = create(config, embeds, padding_mask, None, **more)
    config._attn_implementation_internal = "eager"
    want = create(config, embeds, padding_mask, None, **more) == 0
    assert got.dtype is torch.bool
    assert torch.equal(got[:, :1].expand_as(want), want)
    # a model that adds the mask to scores of its own must fail, not add 1 where it says True
    for heads in (2, 8, 256):
        with pytest.raises(RuntimeError, match="must match the size"):
            torch.zeros(2, heads, 12, 12) + got


def test_chunks_within_the_first_are_a_rule():
    config = build(FAMILIES["llama"], "gpukern").config
    config.attention_chunk_size = 8
    mask = gk.hf.create_chunked_causal_mask(config, torch.zeros(1, 8, 4), None, None)
    assert gk.Rule.from_tensor(mask) == gk.Rule(causal=True)


def matrix(kind, dtype):
    """A mask of 4 dimensions: causal, the first five tokens seen by all, some keys hidden."""
    sees = torch.ones(2, 1, 19, 19, dtype=torch.bool).tril()
    sees[..., :5] = True
    sees[1, :, 7:, 3:6] = False
    return sees if kind == "bool" else (~sees).to(dtype) * torch.finfo(dtype).min


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_masks_of_four_dimensions(family, kind):
    """They stand for causality and windows, as in "eager"."""

    def run(model):
        if kind == "float" or model.config._attn_implementation != "gpukern":
            mask = matrix("float", model.dtype)
        else:
            mask = matrix(kind, model.dtype)
        return step(words(2, 19), use_cache=False)(_with_mask(model, mask))

    assert_as_eager(FAMILIES[family], run)


def _with_mask(model, mask):
    inner = model.forward
    model.forward = lambda ids, attention_mask=None, **more: inner(ids, attention_mask=mask, **more)
    return model


@pytest.mark.parametrize("cut", [19, 12])
def test_padding_with_holes(cut):
    """Also over a cache, and with steps behind it."""
    mask = torch.ones(2, 26, dtype=torch.int64)
    mask[0, :3] = mask[0, 8:11] = 0
    mask[1, 6:9] = mask[1, 14:15] = 0
    run = turns(words(2, 26), mask, (cut, 20, 21, 26), "dynamic")
    assert_as_eager(FAMILIES["mistral"], run)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_llama4_beyond_its_first_chunk(cache):
    make = partial(
        _family, "Llama4Text:Llama4ForCausalLM", attention_chunk_size=6, num_local_experts=2,
        intermediate_size_mlp=96, interleave_moe_layer_step=2, no_rope_layers=[1, 0],
    )  # fmt: skip
    config, _ = make()
    assert "chunked_attention" in config.layer_types
    assert_as_eager(make, turns(words(2, 26), None, (5, 9, 20, 21, 26), cache))
    if cache == "dynamic":
        assert_as_eager(make, step(words(2, 19), padding([19, 11], 19, "left")))


def t5():
    return transformers.T5Config(
        vocab_size=96, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4,
        relative_attention_num_buckets=8, relative_attention_max_distance=16, dropout_rate=0.0,
        decoder_start_token_id=0,
    ), transformers.T5ForConditionalGeneration  # fmt: skip


def test_t5():
    """Encoder, decoder and cross attention, with the gradient of the position bias."""
    mask = padding([11, 7], 11, "right")
    ids, targets = words(2, 11), words(2, 9, seed=1)

    def run(model):
        out = model(input_ids=ids, attention_mask=mask, decoder_input_ids=targets).logits
        (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert any("relative_attention_bias" in n for n in grads)
        return {"out": out.detach(), **grads}

    assert_as_near_to_eager(t5, run)
    found = {}
    for way in ("eager", "gpukern"):
        model = build(t5, way)
        found[way] = model.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False)
    assert torch.equal(found["gpukern"], found["eager"])


def swin():
    return transformers.SwinConfig(
        image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4,
        drop_path_rate=0.0,
    ), transformers.SwinModel  # fmt: skip


def beit():
    return transformers.BeitConfig(
        image_size=32, patch_size=8, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=96, use_relative_position_bias=True, drop_path_rate=0.0,
    ), transformers.BeitModel  # fmt: skip


@pytest.mark.parametrize("make", [swin, beit], ids=lambda f: f.__name__)
def test_images_with_a_bias(make):
    image = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))

    def run(model):
        out = model(image.to(model.dtype)).last_hidden_state
        (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        return {"out": out.detach(), **grads}

    assert_as_near_to_eager(make, run)


def assert_as_near_to_eager(make, run):
    """For models whose "eager" adds a bias that the exact one of this file does not know."""
    want, got = (run(build(make, way)) for way in ("eager", "gpukern"))
    assert want.keys() == got.keys()
    most = max(float(x.abs().max()) for x in want.values())
    for name, ref in want.items():
        if name.endswith("k_proj.bias"):  # has no gradient but rounding
            continue
        size = max(float(ref.abs().max()), 1e-5 * most)
        torch.testing.assert_close(got[name], ref, rtol=0, atol=1e-4 * size, msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "make", [t5, swin, beit, FAMILIES["llama"]], ids=["t5", "swin", "beit", "matrix"]
)
def test_masks_and_biases_on_cuda(make):
    """In bfloat16: out and all gradients together err at most twice as much as eager's."""
    image = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))

    def run(way, dtype, device):
        model = build(make, way, dtype).to(device)
        if make is t5:
            ids, targets = (words(2, n, seed).to(device) for seed, n in enumerate((11, 9)))
            mask = padding([11, 7], 11, "right").to(device)
            out = model(input_ids=ids, attention_mask=mask, decoder_input_ids=targets).logits
        elif make is FAMILIES["llama"]:
            mask = matrix("bool" if way == "gpukern" else "float", dtype).to(device)
            out = model(words(2, 19).to(device), attention_mask=mask, use_cache=False).logits
        else:
            out = model(image.to(device, dtype)).last_hidden_state
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        (out * weight.to(device, dtype)).sum().backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        return [x.detach().double().cpu() for x in (out, *grads)]

    want = run("eager", torch.float64, "cpu")
    errors = []
    for way in ("eager", "gpukern"):
        got = run(way, torch.bfloat16, "cuda")
        errors.append(
            sum(
                float(((x - y).norm() / max(y.norm(), 1e-9)) ** 2)
                for x, y in zip(got, want, strict=True)
            )
        )
    assert errors[1] <= 4 * errors[0]


def test_a_matrix_is_made_once_for_all_layers(monkeypatch):
    from torch_gpukern.integrations import transformers as module

    made = []
    monkeypatch.setattr(module, "attn_mask_of", lambda m: made.append(m.shape) or attn_mask_of(m))
    model = build(FAMILIES["llama"], "gpukern")
    model(words(2, 19), attention_mask=matrix("bool", model.dtype), use_cache=False)
    assert len(made) == 1


def test_compiled_matrix():
    model = build(FAMILIES["llama"], "gpukern")
    mask = matrix("bool", model.dtype)
    want = model(words(2, 19), attention_mask=mask, use_cache=False).logits
    got = compiled(model.forward)(words(2, 19), attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", ["blocks", "chunks"])
def test_compiled_masks_that_are_not_a_rule(kind):
    """Compiled code cannot see what a mask is made of. Both ends of each row tell that blocks are
    no rule; chunks are known by their length, and become a matrix."""
    config = build(FAMILIES["llama"], "gpukern").config
    config.attention_chunk_size = 4
    blocks = torch.tensor([[-1, -1, 0, 0, 0, -1, -1, -1]])
    embeds, positions = torch.zeros(1, 8, 4), torch.arange(8)[None]

    def mask():
        if kind == "blocks":
            return gk.hf.create_causal_mask(
                config, embeds, None, None, positions, block_sequence_ids=blocks
            )
        return gk.hf.create_chunked_causal_mask(config, embeds, None, None, positions)

    found = compiled(mask)()
    if kind == "blocks":
        assert gk.Rule.from_tensor(found).holds.tolist() == [0]
    else:
        assert torch.equal(found, mask()) and found.dtype is torch.bool


def test_a_rule_is_no_bias():
    """A model that adds the mask to scores of its own must fail, not compute."""
    rule = gk.Rule(causal=True).to_tensor(1, "cpu")
    for heads, queries, keys in ((1, 1, 1), (8, 2, 1), (4, 1, 9), (256, 2, 2)):
        with pytest.raises(RuntimeError, match="must match the size"):
            torch.zeros(1, heads, queries, keys) + rule if heads > 1 else torch.zeros(
                1, 2, queries, keys
            ) + rule


def test_register_takes_no_flash_name():
    with pytest.raises(ValueError, match="name is 'gpukern_flash'"):
        gk.register("gpukern_flash")


# ---- continuous batching -------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss", *BY_THE_MASK])
def test_continuous_batching(family, monkeypatch):
    """generate_batch, with prompts in chunks beside decoding steps of other sequences, gives the
    tokens of each sequence alone."""
    config = getattr(transformers, "ContinuousBatchingConfig", None)
    if config is None:
        pytest.skip(f"transformers {transformers.__version__} has no ContinuousBatchingConfig")
    registered = transformers.AttentionInterface._global_mapping
    monkeypatch.setitem(registered, "paged|eager", registered["paged|eager"])  # restored afterwards
    calls = []
    monkeypatch.setattr(
        gk, "_packed", lambda *args, packed=gk._packed: calls.append(args) or packed(*args)
    )
    gk.register_continuous_batching()
    prompts = [words(1, n, seed=n) for n in (5, 19, 11, 3)]
    make = {**FAMILIES, **BY_THE_MASK}[family]
    alone = build(make, "eager")
    want = [
        alone.generate(p, max_new_tokens=12, do_sample=False)[0, p.shape[1] :].tolist()
        for p in prompts
    ]
    found = build(make, "paged|eager").generate_batch(
        inputs=[p[0].tolist() for p in prompts],
        generation_config=transformers.GenerationConfig(
            max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=config(num_blocks=64, page_size=8, max_batch_tokens=16),
        progress_bar=False,
    )
    found = {tuple(out.prompt_ids): out.generated_tokens for out in found.values()}
    assert [found[tuple(p[0].tolist())] for p in prompts] == want
    assert any(len(lengths[0]) > 2 and lengths[2] > 1 for *_, lengths, _ in calls), (
        "no batch of prompts and steps"
    )


def test_continuous_batching_refuses_other_names():
    """transformers' own refusal lists what it accepts. Ours says that no other implementation is
    served under its name."""
    config = getattr(transformers, "ContinuousBatchingConfig", None)
    if config is None:
        pytest.skip(f"transformers {transformers.__version__} has no ContinuousBatchingConfig")
    model = build(FAMILIES["llama"], "gpukern")
    with pytest.raises(
        ValueError, match="gpukern is not supported for continuous batching. Use 'paged.eager'"
    ):
        model.generate_batch(
            inputs=[[5, 6]], continuous_batching_config=config(auto_switch_to_flash=False)
        )
    q = torch.zeros(1, 4, 3, 16)
    with pytest.raises(
        ValueError, match='^gpukern attention: "paged.eager" outside continuous batching; use'
    ):
        gk._paged_attention(model, q, q, q, None)
    with pytest.raises(
        ValueError,
        match="^gpukern attention: Linear has no config and layer_idx that say its window",
    ):
        gk._paged_attention(
            torch.nn.Linear(1, 1), q, q, q, None, cu_seq_lens_q=torch.tensor([0, 3])
        )


def test_a_deterministic_backward_is_refused_where_it_would_not_be_one(monkeypatch):
    """ModernBERT's deterministic_flash_attn. On the CPU gradients have a fixed order of sums."""
    out = torch.zeros(1, 2, 3, 8)
    monkeypatch.setattr(gk, "flash_attn", lambda *args, **rules: out)

    def call(**where):
        q = types.SimpleNamespace(
            **{"is_cuda": True, "requires_grad": True, "shape": out.shape, **where}
        )
        return gk._attention(torch.nn.Module(), q, q, q, None, is_causal=False, deterministic=True)[
            0
        ]

    for served in ({"is_cuda": False}, {"requires_grad": False}):
        assert call(**served).shape == (1, 3, 2, 8)
    with pytest.raises(
        ValueError,
        match="^gpukern attention: deterministic_flash_attn is True, .*; call torch.use_determin",
    ):
        call()
    torch.use_deterministic_algorithms(True)
    try:
        call()
    finally:
        torch.use_deterministic_algorithms(False)


def test_wide_heads_of_float32_are_refused_on_cuda(monkeypatch):
    """Gemma 4's global layers: gpukern has a plain kernel for them, and PyTorch a faster one."""
    out = torch.zeros(1, 2, 3, 512)
    monkeypatch.setattr(gk, "flash_attn", lambda *args, **rules: out)

    def call(dtype, head_dim=512, is_cuda=True):
        q = types.SimpleNamespace(
            is_cuda=is_cuda,
            requires_grad=False,
            shape=(1, 2, 3, head_dim),
            dtype=dtype,
            element_size=lambda: dtype.itemsize,
        )
        return gk._attention(torch.nn.Module(), q, q, q, None, is_causal=False)[0]

    for served in ((torch.bfloat16,), (torch.float32, 256), (torch.float32, 512, False)):
        assert call(*served).shape == (1, 3, 2, 512)
    for dtype in (torch.float32, torch.float64):
        with pytest.raises(ValueError, match="^gpukern attention: float.* with head_dim 512 on CU"):
            call(dtype)
