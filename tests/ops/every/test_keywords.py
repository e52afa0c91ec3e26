# SPDX-License-Identifier: BSD-3-Clause
"""Arguments by position, by another library's name, and of another type than bool are never
misinterpreted."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from conftest import ops, torch_gpukern
from registry import OPS, public

CORE = {
    "gemm": ("a", "b", "bias"),
    "linear": ("x", "weight", "bias"),
    "flash_attn": ("q", "k", "v"),
    "flash_attn_varlen": (
        "q",
        "k",
        "v",
        "cu_seqlens_q",
        "cu_seqlens_k",
        "max_seqlen_q",
        "max_seqlen_k",
    ),
    "paged_attn": ("q", "k_cache", "v_cache", "block_table", "seq_lens"),
    "kv_cache_write": ("k", "v", "k_cache", "v_cache", "slots"),
    "attn_merge": ("out_a", "lse_a", "out_b", "lse_b"),
}
WITH_BOOLS = ("flash_attn", "flash_attn_varlen", "paged_attn")
NOT_BOOLS = (1, 0, 2.5, 0.0, None, "yes", torch.tensor(1), torch.tensor([True]))


def good(name: str) -> dict:
    if name == "linear":
        return dict(x=torch.ones(3, 4), weight=torch.ones(5, 4), bias=torch.ones(5))
    more = {"bias": torch.ones(5)} if name == "gemm" else {}
    return OPS[name].make() | more


@pytest.mark.parametrize("name", CORE)
def test_what_follows_the_tensors_is_keyword_only(name):
    f, call = public(name), good(name)
    parameters = inspect.signature(f).parameters.values()
    assert tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD) == CORE[name]
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters if p.name not in CORE[name])
    args = [call[n] for n in CORE[name]]
    f(*args)
    for extra in ((None,), (None, 0.0, True), (0.0, None, True), (True,), (torch.ones(5),)):
        with pytest.raises(TypeError, match="positional"):
            f(*args, *extra)


@pytest.mark.parametrize(
    ("name", "keyword", "ours"),
    (
        ("flash_attn", "causal", "use is_causal"),
        ("flash_attn", "softmax_scale", "use scale"),
        ("flash_attn", "window_size", "use window_left and window_right"),
        ("flash_attn", "attention_mask", "use attn_mask"),
        ("flash_attn", "dropout", "use dropout_p"),
        ("paged_attn", "dropout_p", "there is no dropout"),
        ("flash_attn", "enable_gqa", "leave it out"),
        ("flash_attn", "return_attn_probs", "use return_lse"),
        ("flash_attn", "cache_seqlens", "use kv_end"),
        ("flash_attn", "no_such", "its arguments are q, k, v, is_causal, scale, diagonal"),
        ("flash_attn_varlen", "causal", "use is_causal"),
        ("flash_attn_varlen", "window_size", "use window_left and window_right"),
        ("flash_attn_varlen", "cache_seqlens", "its arguments are"),
        ("paged_attn", "causal", "use is_causal"),
        ("paged_attn", "cache_seqlens", "use seq_lens"),
        ("paged_attn", "logits_soft_cap", "use softcap"),
        ("paged_attn", "k_descale", "use k_scale"),
        ("kv_cache_write", "k_descale", "use k_scale"),
        ("gemm", "act", "use activation"),
        ("gemm", "out", "the op's .out overload"),
        ("gemm", "causal", "its arguments are a, b, bias"),
        ("linear", "act", "use activation"),
    ),
)
def test_a_foreign_keyword_names_ours(name, keyword, ours):
    with pytest.raises(
        TypeError, match=f"^gpukern::{name}: it has no argument '{keyword}'; .*{ours}"
    ):
        public(name)(**good(name), **{keyword: None})


def test_compiled_code_refuses_a_foreign_keyword():
    torch._dynamo.reset()
    q = torch.ones(1, 1, 4, 8)
    with pytest.raises(Exception, match="causal"):
        torch.compile(
            lambda q: torch_gpukern.flash_attn(q, q, q, causal=True), backend="aot_eager"
        )(q)
    torch._dynamo.reset()


@pytest.mark.parametrize("value", NOT_BOOLS, ids=repr)
@pytest.mark.parametrize("name", WITH_BOOLS)
def test_what_is_true_or_false_is_a_bool(name, value):
    call = good(name)
    text = r"is_causal must be True or False, got "
    raw = [getattr(ops, n) for n in (name, f"{name}_fwd")]
    for f in (public(name), *raw, *(x.default for x in raw)):
        for wanted in (False, True):
            call["q"].requires_grad_(wanted)
            with pytest.raises(ValueError, match=rf"^gpukern::{name}(_fwd)?: {text}"):
                f(**call, is_causal=value)
    call["q"].requires_grad_(False)
    with pytest.raises(ValueError, match=text), torch.autocast("cpu"):
        public(name)(**call, is_causal=value)
    with pytest.raises(ValueError, match=text):
        torch_gpukern.explain(name, **call, is_causal=value)
    if OPS[name].has_out:
        out = torch.empty_like(public(name)(**call))
        with pytest.raises(ValueError, match=text):
            getattr(ops, name).out(**call, is_causal=value, out=out)
    schema = getattr(ops, name).default._schema.arguments
    before = [a.name for a in schema].index("is_causal")
    by_place = [call.get(a.name, a.default_value) for a in schema[:before]]
    with pytest.raises(ValueError, match=text):
        getattr(ops, name)(*by_place, value)


@pytest.mark.parametrize("value", NOT_BOOLS, ids=repr)
def test_bools_that_only_a_public_function_has(value):
    for name in WITH_BOOLS:
        with pytest.raises(
            ValueError, match=rf"^gpukern::{name}: return_lse must be True or False, got "
        ):
            public(name)(**good(name), return_lse=value)
    x, target = torch.ones(3, 4), torch.tensor([0, 1, 2])
    with pytest.raises(
        ValueError, match="^gpukern::linear_cross_entropy: low_memory must be True or False, got "
    ):
        torch_gpukern.linear_cross_entropy(x, torch.ones(5, 4), target, low_memory=value)


@pytest.mark.parametrize("wrong", (1, None, "x"))
def test_numbers_and_bools_of_an_op_that_writes_in_place(wrong):
    call = OPS["rope_kv_write"].make()
    for f in (torch_gpukern.rope_kv_write, ops.rope_kv_write, ops.rope_kv_write.default):
        with pytest.raises(
            ValueError, match="^gpukern::rope_kv_write: interleaved must be True or False, got "
        ):
            f(**call, interleaved=wrong)
        with pytest.raises(
            ValueError, match="^gpukern::rope_kv_write: eps is a number without a gradient"
        ):
            f(**call, eps=torch.tensor(1e-6, requires_grad=True))


def test_bools_of_a_backward():
    x = torch.ones(1, 1, 4, 8)
    out, lse = ops.flash_attn_fwd(x, x, x)
    for argument in ("is_causal", "deterministic"):
        with pytest.raises(
            ValueError, match=rf"^gpukern::flash_attn_bwd: {argument} must be True or False, got 1$"
        ):
            ops.flash_attn_bwd(x, x, x, x, out, lse, **{argument: 1})


def test_a_bool_that_a_compiler_holds_is_one():
    """A comparison of dynamic lengths, and a bool tensor, as torch.jit.trace makes it of one."""
    torch._dynamo.reset()
    f = torch.compile(
        lambda q: torch_gpukern.flash_attn(q, q, q, is_causal=q.shape[2] > 1),
        dynamic=True,
        backend="aot_eager",
        fullgraph=True,
    )
    for n in (4, 5, 1):
        q = torch.randn(1, 2, n, 8)
        assert torch.equal(f(q), torch_gpukern.flash_attn(q, q, q, is_causal=n > 1))
    torch._dynamo.reset()
    q = torch.randn(1, 2, 4, 8)
    for way in (torch_gpukern.flash_attn, ops.flash_attn):
        assert torch.equal(
            way(q, q, q, is_causal=torch.tensor(True)), ops.flash_attn(q, q, q, is_causal=True)
        )


MAKE_ONE = "; torch.as_tensor makes one"
# The beginning of the message, and the call that raises it.
WRONG_TYPES = [
    (
        "gemm: a must be a Tensor, got numpy.ndarray" + MAKE_ONE,
        lambda x: torch_gpukern.gemm(x.array, x.t),
    ),
    ("gemm: b must be a Tensor, got list" + MAKE_ONE, lambda x: torch_gpukern.gemm(x.t, [[1.0]])),
    ("gemm: b must be a Tensor, got None", lambda x: torch_gpukern.gemm(x.t, None)),
    ("gemm: c must be a Tensor or None, got 1.0", lambda x: torch_gpukern.gemm(x.t, x.t, c=1.0)),
    (
        "gemm: activation must be none, relu, gelu, gelu_tanh or silu, got None",
        lambda x: torch_gpukern.gemm(x.t, x.t, activation=None),
    ),
    (
        "gemm: out_dtype must be a torch.dtype or None, got 'float32'",
        lambda x: torch_gpukern.gemm(x.t, x.t, out_dtype="float32"),
    ),
    ("gemm: alpha must be a number, got 'x'", lambda x: torch_gpukern.gemm(x.t, x.t, alpha="x")),
    ("gemm: a is a nested tensor; pass its parts", lambda x: torch_gpukern.gemm(x.nested, x.t)),
    (
        "gemm: a has layout torch.sparse_coo, expected a dense tensor",
        lambda x: torch_gpukern.gemm(x.t.to_sparse(), x.t),
    ),
    (
        "linear: x, weight and bias must be Tensors, got ndarray",
        lambda x: torch_gpukern.linear(x.array, x.t),
    ),
    (
        "flash_attn: v must be a Tensor, got numpy.ndarray" + MAKE_ONE,
        lambda x: torch_gpukern.flash_attn(x.q, x.q, x.q.numpy()),
    ),
    (
        "flash_attn: q is a nested tensor; pass its parts",
        lambda x: torch_gpukern.flash_attn(x.nested, x.nested, x.nested),
    ),
    (
        "flash_attn: diagonal must be an int, got 1.5",
        lambda x: torch_gpukern.flash_attn(x.q, x.q, x.q, diagonal=1.5),
    ),
    (
        "flash_attn: window_left must be an int, got tuple",
        lambda x: torch_gpukern.flash_attn(x.q, x.q, x.q, window_left=(1, 2)),
    ),
    (
        "flash_attn: kv_end must be a Tensor or None, got list" + MAKE_ONE,
        lambda x: torch_gpukern.flash_attn(x.q, x.q, x.q, kv_end=[1]),
    ),
    (
        "flash_attn_varlen: max_seqlen_q must be an int, got None",
        lambda x: torch_gpukern.flash_attn_varlen(
            x.q[0], x.q[0], x.q[0], x.index[0], x.index[0], None, 1
        ),
    ),
    (
        "paged_attn: seq_lens must be a Tensor, got list" + MAKE_ONE,
        lambda x: torch_gpukern.paged_attn(x.q[0], x.q, x.q, x.index, [1]),
    ),
    (
        "kv_cache_write: slots must be a Tensor, got list" + MAKE_ONE,
        lambda x: torch_gpukern.kv_cache_write(x.q[0], x.q[0], x.q, x.q, [1]),
    ),
    (
        "kv_cache_write: slots must be a Tensor, got list" + MAKE_ONE,
        lambda x: ops.kv_cache_write(x.q[0], x.q[0], x.q, x.q, [1]),
    ),
    (
        "attn_merge: out_a must be a Tensor, got numpy.ndarray" + MAKE_ONE,
        lambda x: torch_gpukern.attn_merge(x.array, x.t, x.t, x.t),
    ),
    (
        "flash_attn: v must be a Tensor, got list" + MAKE_ONE,
        lambda x: torch_gpukern.flash_attn(x.q, x.q, [1.0], return_lse=True),
    ),
    (
        "linear_cross_entropy: target must be a Tensor, got list" + MAKE_ONE,
        lambda x: torch_gpukern.linear_cross_entropy(x.t, x.t, [0]),
    ),
    (
        "linear_cross_entropy: weight must be a Tensor, got numpy.ndarray" + MAKE_ONE,
        lambda x: torch_gpukern.linear_cross_entropy(x.t, x.array, x.index, low_memory=True),
    ),
    (
        "linear: weight is a nested tensor; pass its parts",
        lambda x: torch_gpukern.linear(x.t, x.strided),
    ),
    ("linear: x must be a Tensor, got None", lambda x: torch_gpukern.linear(None, x.t)),
    ("linear: weight must be a Tensor, got None", lambda x: torch_gpukern.linear(x.t, None)),
    (
        "linear_cross_entropy: x must be a Tensor, got None",
        lambda x: torch_gpukern.linear_cross_entropy(None, x.t, x.index),
    ),
    (
        "linear_cross_entropy: target must be a Tensor, got None",
        lambda x: torch_gpukern.linear_cross_entropy(x.t, x.t, None, low_memory=True),
    ),
    (
        "dropout: x must be a Tensor, got numpy.ndarray" + MAKE_ONE,
        lambda x: torch_gpukern.dropout(x.array, 0.5),
    ),
    (
        "dropout: x must be a Tensor, got None",
        lambda x: torch_gpukern.dropout(None, 0.5, x.index[0]),
    ),
    (
        "dropout_add: residual must be a Tensor, got 3",
        lambda x: torch_gpukern.dropout_add(x.t[0, 0], 3, 0.5),
    ),
    (
        "bias_gelu_dropout: x must be a Tensor, got list" + MAKE_ONE,
        lambda x: torch_gpukern.bias_gelu_dropout([1.0], None, 0.5),
    ),
    (
        "flash_attn: q must be a Tensor, got numpy.ndarray" + MAKE_ONE,
        lambda x: torch_gpukern.flash_attn(x.array, x.q, x.q, dropout_p=0.5),
    ),
    (
        "attn_dropout_mask: k must be a Tensor, got None",
        lambda x: torch_gpukern.attn_dropout_mask(x.q, None, 0.5, x.index),
    ),
    (
        "attn_dropout_mask: p must be a number, got 'x'",
        lambda x: torch_gpukern.attn_dropout_mask(x.q, x.q, "x", x.index),
    ),
    (
        "dropout_mask: seed must be a Tensor, got 7; a seed is int64 [2]: pass torch.tensor([7",
        lambda x: torch_gpukern.dropout_mask((2, 3), 0.5, 7),
    ),
    (
        "flash_attn: dropout_seed must be a Tensor or None, got 42; a seed is int64 [2]: pass",
        lambda x: torch_gpukern.flash_attn(x.q, x.q, x.q, dropout_p=0.5, dropout_seed=42),
    ),
    (
        "quantize_attn: hadamard must be True or False, got 1",
        lambda x: torch_gpukern.quantize_attn(x.q, x.q, x.q, hadamard=1),
    ),
    (
        "quantize_attn: center_v must be True or False, got None",
        lambda x: torch_gpukern.quantize_attn(x.q, x.q, x.q, center_v=None),
    ),
    (
        "quantize: dtype must be a torch.dtype, got 'e4m3'",
        lambda x: torch_gpukern.quantize(x.t, "e4m3", "row"),
    ),
    (
        "quantize: granularity must be a string, got None",
        lambda x: torch_gpukern.quantize(x.t, torch.int8, None),
    ),
    (
        "pack_weight: scale must be a Tensor, got list" + MAKE_ONE,
        lambda x: torch_gpukern.pack_weight(x.t[:4].char(), "int4", scale=[1.0]),
    ),
    (
        "gemm: a must be a Tensor, got numpy.ndarray" + MAKE_ONE,
        lambda x: torch_gpukern.explain("gemm", x.array, x.t),
    ),
    (
        "gemm: out must be a Tensor, got numpy.ndarray" + MAKE_ONE,
        lambda x: ops.gemm.out(x.t.detach(), x.t.detach(), out=x.array),
    ),
    ("gemm: a must be a Tensor, got numpy.ndarray" + MAKE_ONE, lambda x: ops.gemm(x.array, x.t)),
    ("gemm: activation must be none, relu,", lambda x: ops.gemm.default(x.t, x.t, activation=None)),
]


@pytest.fixture(scope="module")
def of_types():
    """Arguments of right and of wrong types."""
    t = torch.ones(4, 4)
    jagged, strided = (
        torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=layout)
        for layout in (torch.jagged, torch.strided)
    )
    return SimpleNamespace(
        t=t,
        q=torch.ones(1, 2, 4, 8),
        index=torch.zeros(1, 1, dtype=torch.int32),
        array=t.numpy(),
        nested=jagged,
        strided=strided,
    )


@pytest.mark.parametrize(
    ("text", "call", "wanted"),
    [
        pytest.param(text, call, wanted, id=f"{i}-{text.split(': ')[0]}{'-grad' * wanted}")
        for i, (text, call) in enumerate(WRONG_TYPES)
        for wanted in (False, True)
        if not (wanted and "sparse" in text)  # to_sparse() of what requires a gradient is no leaf
    ],
)
def test_messages_of_wrong_types(of_types, text, call, wanted):
    """They name the op, the argument, what was expected and what came, on one line; and are what
    torch raises, too."""
    given = SimpleNamespace(**vars(of_types))
    given.t = of_types.t.clone().requires_grad_(wanted)
    with pytest.raises(ValueError) as error:
        call(given)
    assert isinstance(error.value, RuntimeError) and "\n" not in str(error.value)
    assert str(error.value).startswith(f"gpukern::{text}"), str(error.value)


def test_messages_of_what_is_composed():
    """Layers, the cache, and functions that call several ops."""
    q, index, layer = (
        torch.ones(1, 2, 8),
        torch.zeros(1, dtype=torch.int32),
        torch.nn.Sequential(torch.nn.Linear(64, 64)),
    )
    array, cache = q.numpy(), torch_gpukern.PagedKVCache(2, 4, heads_kv=2, head_dim=8)
    torch_gpukern.nn.quantize(layer, "w8")
    cases = [
        (
            lambda: torch_gpukern.rope_kv_write(
                q, q, array, q[0], q[0], index, cache.k[0], cache.v[0], index
            ),
            "gpukern::rope_kv_write: v",
        ),
        (lambda: cache.append([cache.allocate()], q, array), "PagedKVCache.append: v"),
        (lambda: layer(array), "QuantizedLinear: x"),
        (lambda: torch_gpukern.nn.Fp8Linear(8, 8)(array), "Fp8Linear: x"),
        (
            lambda: torch_gpukern.nn.LinearCrossEntropy(8, 4)(array, index),
            "gpukern::linear_cross_entropy: x",
        ),
        (lambda: torch_gpukern.nn.MLP(8, 8)(array), "gpukern::linear: x"),
    ]
    for call, text in cases:
        with pytest.raises(ValueError, match=f"^{text}.* Tensors?, got (numpy.)?ndarray"):
            call()


def test_messages_of_attention():
    layer = torch_gpukern.nn.Attention(8, 2)
    for x, got in (
        (torch.ones(3, 8), "3 dimensions [B, S, hidden_size], got 2"),
        (torch.ones(1, 1, 3, 8), "got 4"),
        ([1.0], "got list"),
    ):
        with pytest.raises(ValueError, match="^Attention: x must ") as error:
            layer(x)
        assert str(error.value).endswith(got)


@pytest.mark.parametrize("of_sinks", (torch.bfloat16, torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize("of_q", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("to", (torch.bfloat16, torch.float16), ids=str)
def test_sinks_inside_autocast(to, of_q, of_sinks, device):
    """Those of 16 bits follow q; their gradient has their own dtype."""
    q = torch.randn(1, 2, 4, 8, device=device).to(of_q)
    sinks = torch.randn(2, device=device).to(of_sinks).requires_grad_()
    cu, one = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 4], [4]))
    packed, cache = q[0].transpose(0, 1), q.transpose(1, 2).contiguous()
    with torch.autocast(device, to):
        dense = torch_gpukern.flash_attn(q, q, q, sinks=sinks)
        rows = torch_gpukern.flash_attn_varlen(packed, packed, packed, cu, cu, 4, 4, sinks=sinks)
        paged = torch_gpukern.paged_attn(
            packed[:1].float(), cache, cache, cu[None, :1], one, sinks=sinks.detach()
        )
    (dense.float().sum() + rows.float().sum()).backward()
    assert (
        dense.dtype == rows.dtype == to
        and paged.dtype == cache.dtype
        and sinks.grad.dtype == of_sinks
    )
    near = torch_gpukern.flash_attn(*(q.float(),) * 3, sinks=sinks.detach().float())
    assert torch.allclose(dense.float(), near, atol=5e-2)


@pytest.mark.parametrize("name", ("gemm", "flash_attn"))
def test_a_small_call_hands_on_no_defaults(name, monkeypatch):
    """A small call does not pass defaults on, because each argument costs time, numbers most."""
    from torch_gpukern.ops.op import Op

    op = next(op for op in Op.every if op.name == name)
    seen, unguarded = [], op.unguarded
    monkeypatch.setattr(
        op, "unguarded", lambda *args: (seen.append(len(args)), unguarded(*args))[1]
    )
    x = torch.randn(8, 8) if name == "gemm" else torch.randn(1, 1, 8, 8)
    getattr(torch_gpukern, name)(*[x] * op.required)
    assert seen == [op.required]


@pytest.mark.parametrize("name, inside", (("gemm", "gemm"), ("flash_attn", "flash_attn_bwd")))
def test_a_small_backward_hands_on_no_defaults(name, inside, monkeypatch):
    """A small backward does not pass defaults on, either; its op has even more arguments."""
    from torch_gpukern.ops.op import Op

    op, of_gradient = (next(op for op in Op.every if op.name == n) for n in (name, inside))
    x = torch.randn(8, 8) if name == "gemm" else torch.randn(1, 1, 8, 8)
    tensors = [x.clone().requires_grad_() for _ in range(op.required)]
    out = getattr(torch_gpukern, name)(*tensors)
    seen, unguarded = [], of_gradient.unguarded
    monkeypatch.setattr(
        of_gradient, "unguarded", lambda *args: (seen.append(len(args)), unguarded(*args))[1]
    )
    out.sum().backward()
    assert set(seen) == {of_gradient.required} and all(x.grad is not None for x in tensors)
