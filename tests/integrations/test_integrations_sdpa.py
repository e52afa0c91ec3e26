# SPDX-License-Identifier: BSD-3-Clause
"""F.scaled_dot_product_attention with gpukern in place of PyTorch's flash kernels."""

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close_as, generator, randn, run_python, same_bits
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
    sdpa_kernel,
)

import torch_gpukern
from torch_gpukern.integrations import sdpa

FLASH = SDPBackend.FLASH_ATTENTION


@contextlib.contextmanager
def active(monkeypatch=None):
    """Activates gpukern, and yields the list of our kernels that ran."""
    kernels = [
        f"{name}_{kernel}"
        for name in ("_forward", "_backward")
        for kernel in ("cpu", "cuda", "efficient", "cudnn")
    ]
    ran, serve = [], {name: getattr(sdpa, name) for name in kernels}
    for name, ours in serve.items():

        @functools.wraps(ours)
        def counted(*args, name=name, ours=ours, **kwargs):
            found = ours(*args, **kwargs)
            name = name.rpartition("_")[0]
            ran.append(name if found is not None else f"not {name}")
            return found

        setattr(sdpa, name, counted)
    activate_flash_attention_impl("gpukern")
    try:
        yield ran
    finally:
        restore_flash_attention_impl()
        for name, ours in serve.items():
            setattr(sdpa, name, ours)


def inputs(device, dtype, shape=(2, 4, 9, 16), heads_kv=None, keys=None, stored="BHSD"):
    gen = generator("sdpa", shape, heads_kv, keys)
    batch, heads, seq, d = shape
    q = randn(gen, *shape)
    k, v = (randn(gen, batch, heads_kv or heads, keys or seq, d) for _ in range(2))
    if stored == "BSHD":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    elif stored == "sliced":
        q, k, v = (torch.cat([x, x], -1)[..., :d] for x in (q, k, v))
    return [x.to(device, dtype) for x in (q, k, v)]


def forward_backward(q, k, v, **options):
    leaves = [
        x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in (q, k, v)
    ]
    out = F.scaled_dot_product_attention(*leaves, **options)
    grad = randn(generator("grad"), *out.shape).to(out.device, out.dtype)
    return [out, *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("stored", ["BHSD", "BSHD", "sliced"])
@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"scale": 0.4}, {"enable_gqa": True}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_forward_and_backward(dtype, options, stored, device):
    if device == "cuda" and dtype != torch.bfloat16:
        pytest.skip("PyTorch's CUDA flash kernel is asked for 16 bits only")
    q, k, v = inputs(device, dtype, heads_kv=2 if "enable_gqa" in options else None, stored=stored)
    with sdpa_kernel(FLASH):
        plain = forward_backward(q, k, v, **options)
        with active() as ran:
            ours = forward_backward(q, k, v, **options)
    assert ran == ["_forward", "_backward"]
    with sdpa_kernel(SDPBackend.MATH):
        yards = (
            forward_backward(*(x.float() for x in (q, k, v)), **options)
            if dtype == torch.float64
            else plain
        )
        refs = forward_backward(*(x.double() for x in (q, k, v)), **options)
    for name, got, own, yard, ref in zip(("out", "dq", "dk", "dv"), ours, plain, yards, refs):
        assert got.stride() == own.stride() and got.dtype == own.dtype, name
        assert_close_as(yard, got, ref, name)


def test_other_lengths(device):
    q, k, v = inputs(device, torch.bfloat16, keys=21)
    with sdpa_kernel(FLASH), active() as ran:
        out = F.scaled_dot_product_attention(q, k, v)
    assert ran == ["_forward"]
    assert_close_as(
        F.scaled_dot_product_attention(q, k, v),
        out,
        F.scaled_dot_product_attention(*(x.double() for x in (q, k, v))),
    )


def test_masks_of_bools_and_floats():
    q, k, v = inputs("cpu", torch.float32)
    gen = generator("mask")
    hidden = torch.rand(2, 1, 9, 9, generator=gen) < 0.3
    for mask in (randn(gen, 9, 9), ~hidden):
        plain = forward_backward(q, k, v, attn_mask=mask)
        with active() as ran:
            ours = forward_backward(q, k, v, attn_mask=mask)
        assert ran == ["_forward", "_backward"]
        for x, y in zip(ours, plain, strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kernel, kind",
    [
        ("EFFICIENT_ATTENTION", "bools"),
        ("EFFICIENT_ATTENTION", "keys"),
        ("EFFICIENT_ATTENTION", "floats"),
        ("CUDNN_ATTENTION", "bools"),
        ("CUDNN_ATTENTION", "keys"),
    ],
)
def test_masks_on_cuda(kernel, kind):
    """Calls with a mask are taken over from the PyTorch kernels that serve masks."""
    q, k, v = inputs("cuda", torch.bfloat16, shape=(2, 4, 130, 64), keys=200)
    gen = generator("mask")
    mask = {
        "bools": torch.rand(2, 1, 130, 200, generator=gen) < 0.7,
        "keys": randn(gen, 2, 1, 1, 200).bfloat16(),
        "floats": randn(gen, 4, 130, 200).bfloat16(),
    }[kind].cuda()
    with sdpa_kernel(getattr(SDPBackend, kernel)):
        plain = forward_backward(q, k, v, attn_mask=mask)
        with active() as ran:
            ours = forward_backward(q, k, v, attn_mask=mask)
    assert ran == ["_forward", "_backward"]
    wide = mask if kind == "bools" else mask.double()
    with sdpa_kernel(SDPBackend.MATH):
        refs = forward_backward(*(x.double() for x in (q, k, v)), attn_mask=wide)
    for name, got, own, ref in zip(("out", "dq", "dk", "dv"), ours, plain, refs, strict=True):
        assert got.stride() == own.stride() and got.dtype == own.dtype, name
        assert_close_as(own, got, ref, name)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 4, 130, 200), (1, 4, 130, 200), (2, 1, 1, 200)], ids=str)
def test_the_gradient_of_a_mask_on_cuda(shape):
    q, k, v = inputs("cuda", torch.bfloat16, shape=(2, 4, 130, 64), keys=200)
    bias = randn(generator("bias", shape), *shape).cuda()

    def run(dtype):
        leaves = [x.to(dtype).detach().requires_grad_() for x in (q, k, v, bias.bfloat16())]
        out = F.scaled_dot_product_attention(*leaves[:3], attn_mask=leaves[3])
        grad = randn(generator("grad"), *out.shape).to(out.device, out.dtype)
        return torch.autograd.grad(out, leaves, grad)

    with sdpa_kernel(SDPBackend.MATH):
        refs = run(torch.float64)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        plain = run(torch.bfloat16)
        with active() as ran:
            ours = run(torch.bfloat16)
    assert ran == ["_forward", "_backward"]
    for name, got, own, ref in zip(("dq", "dk", "dv", "dmask"), ours, plain, refs, strict=True):
        assert_close_as(own, got, ref, name)


def test_what_gpukern_does_not_serve_is_pytorchs_own_bit_for_bit():
    q, k, v = inputs("cpu", torch.float32)
    torch.manual_seed(0)
    plain = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    with active():
        torch.manual_seed(0)
        assert same_bits(F.scaled_dot_product_attention(q, k, v, dropout_p=0.5), plain)


@pytest.mark.gpu
def test_dropout_on_cuda_is_ours():
    """The seed is torch's. It is kept where PyTorch keeps its generator's state for the
    backward."""
    q, k, v = (
        randn(
            generator("sdpa dropout", i), 2, 4, 200, 64, dtype=torch.bfloat16, device="cuda"
        ).requires_grad_()
        for i in range(3)
    )
    grad = torch.ones_like(q)
    torch.manual_seed(3)
    seed = torch.randint(-(2**63), 2**63 - 1, (2,), device="cuda")
    torch.use_deterministic_algorithms(True)
    try:
        want = torch_gpukern.flash_attn(q, k, v, is_causal=True, dropout_p=0.25, dropout_seed=seed)
        want = (want, *torch.autograd.grad(want, (q, k, v), grad))
        with active() as ran, sdpa_kernel(FLASH):
            torch.manual_seed(3)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.25)
            got = (out, *torch.autograd.grad(out, (q, k, v), grad))
    finally:
        torch.use_deterministic_algorithms(False)
    assert ran == ["_forward", "_backward"]
    assert all(map(same_bits, got, want))


def schema_of(text):
    return torch._C.parse_schema(f"aten::attention({text}) -> Tensor")


def test_arguments_come_by_the_schema_of_this_torch():
    """Arguments in another order are found by name. Unknown or unserved arguments are left to
    PyTorch."""
    q, k, v = inputs("cpu", torch.float32)
    ours = sdpa._forward_cpu
    known = "Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False"
    assert sdpa._as_torch_calls(ours, schema_of(f"{known}, *, float? scale=None")) is ours
    swapped = "Tensor query, Tensor value, Tensor key, bool is_causal=False, float dropout_p=0., int num_splits=0"
    call = sdpa._as_torch_calls(ours, schema_of(swapped))
    assert all(map(same_bits, call(q, v, k, True), ours(q, k, v, 0.0, True)))
    assert call(q, v, k, True, 0.5) is None and call(q, v, k, True, 0.0, 3) is None
    assert ours(q, k, v, 0.0, True, 3) is None and ours(q, k, v, block_table=q) is None


@pytest.mark.parametrize(
    "name, kernel",
    [
        ("flash_attention_for_cpu", "cpu"),
        ("flash_attention", "cuda"),
        ("efficient_attention", "efficient"),
        ("cudnn_attention", "cudnn"),
    ],
)
def test_calls_are_taken_as_they_come(name, kernel):
    """If the schema has our order of arguments, no wrapper stands between PyTorch's call and ours.
    Every torch so far has that order."""
    name = f"_scaled_dot_product_{name}"
    for suffix, ours in (("", f"_forward_{kernel}"), ("_backward", f"_backward_{kernel}")):
        ours = getattr(sdpa, ours)
        assert (
            sdpa._as_torch_calls(ours, getattr(torch.ops.aten, name + suffix).default._schema)
            is ours
        )


def test_restores_cleanly():
    q, k, v = inputs("cpu", torch.float32, shape=(1, 4, 300, 64))
    plain = forward_backward(q, k, v, is_causal=True)
    assert "gpukern" in list_flash_attention_impls() and current_flash_attention_impl() is None
    for _ in range(2):
        with active() as ran:
            assert current_flash_attention_impl() == "gpukern"
            forward_backward(q, k, v, is_causal=True)
            assert len(ran) == 2
        assert current_flash_attention_impl() is None
        assert all(map(same_bits, forward_backward(q, k, v, is_causal=True), plain))
        assert len(ran) == 2


def test_compiled():
    q, k, v = inputs("cpu", torch.float32, heads_kv=2, stored="BSHD")
    want = forward_backward(q, k, v, is_causal=True, enable_gqa=True)
    torch._dynamo.reset()

    @torch.compile(fullgraph=True)
    def call(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True) + 1

    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with active() as ran:
        out = call(*leaves)
        grads = torch.autograd.grad(out, leaves, randn(generator("grad"), *out.shape))
    assert ran == ["_forward", "_backward"]
    for got, ref in zip((out - 1, *grads), want):
        torch.testing.assert_close(got, ref)


class TimmAttention(torch.nn.Module):
    """Attention as in timm's vision transformers: one projection, with q, k and v as strided views
    of its result."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = torch.nn.Linear(dim, 3 * dim), torch.nn.Linear(dim, dim)
        self.q_norm, self.k_norm = (
            torch.nn.LayerNorm(dim // heads),
            torch.nn.LayerNorm(dim // heads),
        )

    def forward(self, x):
        batch, tokens, dim = x.shape
        q, k, v = (
            self.qkv(x).reshape(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        )
        x = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, dropout_p=0.0)
        return self.proj(x.transpose(1, 2).reshape(batch, tokens, dim))


def heads_of_self(x, **options):
    """nn.MultiheadAttention as a module of x alone."""
    layer = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    return layer, lambda x: layer(x, x, x, need_weights=False, **options)[0]


def encoder_layer(**options):
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return layer, lambda x: layer(x, **options)


def vision(x):
    layer = torch.nn.Sequential(TimmAttention(32, 4), TimmAttention(32, 4))
    return layer, layer


CAUSAL = torch.nn.Transformer.generate_square_subsequent_mask(7)
PADDED = torch.tensor([[False] * 7, [False] * 5 + [True] * 2])
MODULES = {  # how a module is made, and how many of its attentions ours serves
    "MultiheadAttention": (lambda x: heads_of_self(x), 1),
    "MultiheadAttention causal": (lambda x: heads_of_self(x, attn_mask=CAUSAL, is_causal=True), 1),
    "MultiheadAttention padded": (lambda x: heads_of_self(x, key_padding_mask=PADDED), 1),
    "TransformerEncoderLayer": (lambda x: encoder_layer(), 1),
    "TransformerEncoderLayer causal": (lambda x: encoder_layer(src_mask=CAUSAL, is_causal=True), 1),
    "TransformerEncoderLayer padded": (lambda x: encoder_layer(src_key_padding_mask=PADDED), 1),
    "timm": (vision, 2),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_in_training(name):
    torch.manual_seed(0)
    x = randn(generator("layer"), 2, 7, 32)
    make, served = MODULES[name]
    layer, call = make(x)

    def step():
        layer.zero_grad()
        out = call(x)
        out.square().sum().backward()
        return [out.detach(), *(p.grad.clone() for p in layer.parameters())]

    plain = step()
    with active() as ran:
        ours = step()
    assert [ran.count(way) for way in ("_forward", "_backward")] == [served, served]
    for got, want in zip(ours, plain):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("fast", [True, False], ids=["fast path", "fast path off"])
@pytest.mark.parametrize("name", MODULES)
def test_modules_in_evaluation(name, fast):
    """PyTorch's transformer layers have a fast path that never calls attention. If it is off, or a
    gradient is required, ours runs."""
    torch.manual_seed(0)
    x = randn(generator("layer"), 2, 7, 32)
    make, served = MODULES[name]
    layer, call = make(x)
    layer.eval()
    on = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(fast)
    try:
        with torch.no_grad():
            plain = call(x)
            with active() as ran:
                ours = call(x)
    finally:
        torch.backends.mha.set_fastpath_enabled(on)
    own_path = fast and name not in ("timm", "MultiheadAttention causal")
    assert ran.count("_forward") == (0 if own_path else served)
    torch.testing.assert_close(ours, plain)


def test_active_at_exit():
    run_python(
        """
        import torch, torch.nn.functional as F, torch_gpukern.integrations.sdpa
        torch.nn.attention.activate_flash_attention_impl("gpukern")
        q = torch.randn(1, 2, 8, 16, requires_grad=True)
        F.scaled_dot_product_attention(q, q, q).sum().backward()
        """,
        fresh=True,
    )
