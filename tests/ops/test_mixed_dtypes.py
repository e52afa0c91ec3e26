# SPDX-License-Identifier: BSD-3-Clause
"""Calls that PyTorch takes: vectors of another dtype than the rows, dropout of everything, rows
without columns; and what is refused with what to do instead."""

import itertools

import pytest
import torch
from conftest import HALF, assert_bits, generator, randn, reference, torch_gpukern

gk = torch_gpukern
E4M3, E5M2, I8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
ADDENDS = [
    (out, addend)
    for out, addend in itertools.product((torch.float32, *HALF), (torch.float32, *HALF))
    if addend in (out, torch.float32) or out is torch.float32
]


def whole(gen, *shape, most=4):
    return torch.randint(-most, most + 1, shape, generator=gen).float()


@pytest.mark.parametrize(("out", "addend"), ADDENDS)
@pytest.mark.parametrize("m", (1, 3, 70, 300))
def test_addends_of_another_dtype(m, out, addend, device):
    """Small integers, so that every sum is exact: the bias has the dtype of the result, float32, or
    16 bits beside float32."""
    gen = generator("addends", m)
    n, k = 72, 128
    a, w, bias = (whole(gen, *shape).to(device) for shape in ((m, k), (n, k), (n,)))
    bias = bias.to(addend)
    dtype = out if out in HALF else torch.bfloat16
    want = (a.double() @ w.double().mT + bias.double()).to(out)
    how = dict(bias=bias, out_dtype=out)
    one = torch.ones((), device=device)
    for of_a, of_b in ((E4M3, E4M3), (E4M3, E5M2), (I8, I8)):
        got = gk.scaled_gemm(a.to(of_a), w.to(of_b).mT, one, one, **how)
        assert_bits(got, want)
        got = gk.scaled_gemm(
            a.to(of_a), w.to(of_b).mT, one, one, c=bias.expand(m, n), out_dtype=out
        )
        assert_bits(got, want)
    ends = torch.tensor([m // 2, m], dtype=torch.int32, device=device)
    b = w.mT.to(dtype).expand(2, k, n).contiguous()
    assert_bits(gk.grouped_gemm(a.to(dtype), b, ends, **how), want)
    assert_bits(gk.grouped_gemm(a.to(dtype), b, ends, bias=bias.expand(2, n), out_dtype=out), want)
    assert_bits(
        gk.grouped_gemm(a.to(E4M3), b.to(E4M3), ends, scale_a=one, scale_b=one, **how), want
    )
    scale = torch.ones(1, n, device=device)
    for format, codes in (
        ("int8", w.to(torch.int8)),
        ("int4", w.to(torch.int8)),
        ("e4m3", w.to(E4M3)),
    ):
        packed = gk.pack_weight(codes, format)
        assert_bits(gk.weight_gemm(a.to(dtype), packed, scale, n, format, **how), want)
        assert_bits(gk.weight_gemm(a.to(E4M3), packed, scale, n, format, scale_a=one, **how), want)
    thin = w * (torch.arange(k, device=device) % 4 < 2)
    want = (a.double() @ thin.double().mT + bias.double()).to(out)
    for of in (dtype, E4M3, I8):
        assert_bits(gk.sparse_gemm(a.to(of), *gk.sparse_pack(thin.to(of)), **how), want)


@pytest.mark.parametrize("dtype", HALF)
def test_gradient_of_a_bias_of_another_dtype(dtype, device):
    gen = generator("gradient of a bias", str(dtype))
    a, w = whole(gen, 9, 64).to(device), whole(gen, 16, 64).to(device)
    bias = whole(gen, 16).to(device, dtype).requires_grad_()
    packed, scale = gk.pack_weight(w.to(torch.int8), "int8"), torch.ones(1, 16, device=device)
    gk.weight_gemm(
        a.to(dtype), packed, scale, 16, "int8", bias=bias, out_dtype=torch.float32
    ).sum().backward()
    assert_bits(bias.grad, torch.full_like(bias, 9))
    bias.grad, ends = None, torch.tensor([4, 9], dtype=torch.int32, device=device)
    b = w.mT.to(dtype).expand(2, 64, 16).contiguous()
    gk.grouped_gemm(a.to(dtype), b, ends, bias=bias, out_dtype=torch.float32).sum().backward()
    assert_bits(bias.grad, torch.full_like(bias, 9))


ROWS = (torch.float32, *HALF, torch.float64)


@pytest.mark.parametrize(
    ("dtype", "of"), [(x, w) for x in ROWS for w in (*HALF, torch.float32) if w is not x]
)
def test_weights_of_norms_in_another_dtype(dtype, of, device):
    """As if the weight were float32 (float64): exactly, and its gradient has its own dtype."""
    gen = generator("norm weights", str(dtype), str(of))
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    x = randn(gen, 5, 40).to(device, dtype)
    weight, bias = (randn(gen, 40).to(device, of).requires_grad_() for _ in range(2))
    same = [t.detach().to(wide).requires_grad_() for t in (weight, bias)]
    for call in (
        lambda w, b: gk.layer_norm(x, w, b),
        lambda w, b: gk.rms_norm(x, w, bias=b, weight_offset=1.0),
        lambda w, b: gk.rms_norm(x, w, bias=b, residual=x)[0],
    ):
        got, want = call(weight, bias), call(*same)
        assert_bits(got, want)
        for t, grad in zip(
            (weight, bias),
            torch.autograd.grad(want.sum(), same),
            strict=True,
        ):
            (mine,) = torch.autograd.grad(got.sum(), t, retain_graph=True)
            assert_bits(mine, grad.to(of))
    if dtype is torch.float64:
        return
    with torch.no_grad():
        for got, want in zip(
            gk.rms_norm_quantize(x, weight), gk.rms_norm_quantize(x, same[0]), strict=True
        ):
            assert_bits(got.float(), want.float())
        cache = [torch.zeros(1, 8, 5, 40, device=device, dtype=dtype) for _ in range(4)]
        angle, at = (
            torch.zeros(2, 8, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
        )
        for w, pages in ((weight, cache[:2]), (same[0], cache[2:])):
            heads = x[None]
            gk.rope_kv_write(
                heads, heads, heads, angle, angle, at, *pages, at, q_weight=w, k_weight=w
            )
        assert_bits(cache[0], cache[2])


@pytest.mark.parametrize(
    ("dtype", "of"), [(x, w) for x in ROWS for w in (*HALF, torch.float32) if w is not x]
)
@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
def test_class_weights_in_another_dtype(dtype, of, reduction, device):
    gen = generator("class weights", str(dtype), str(of))
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    x, w = randn(gen, 6, 16).to(device, dtype), randn(gen, 20, 16).to(device, dtype)
    target = torch.randint(0, 20, (6,), generator=gen).to(device)
    weight = torch.rand(20, generator=gen).to(device, of)
    more = dict(reduction=reduction, z_loss=0.01)
    logits = x @ w.mT
    assert_bits(
        gk.cross_entropy(logits, target, weight=weight, **more),
        gk.cross_entropy(logits, target, weight=weight.to(wide), **more),
    )
    for low_memory in (False, True):
        assert_bits(
            gk.linear_cross_entropy(
                x, w, target, class_weight=weight, low_memory=low_memory, **more
            ),
            gk.linear_cross_entropy(
                x, w, target, class_weight=weight.to(wide), low_memory=low_memory, **more
            ),
        )


@pytest.mark.parametrize("dtype", ROWS)
def test_dropout_of_everything(dtype, device):
    """p = 1, as F.dropout takes it: out is 0, lse that of all keys but for its rounding, and no
    gradient is left."""
    gen, seed = generator("dropout of everything"), torch.tensor([1, 2], device=device)
    q, k, v = (randn(gen, 2, 4, 200, 32).to(device, dtype).requires_grad_() for _ in range(3))
    out, lse = gk.flash_attn(q, k, v, dropout_p=1.0, dropout_seed=seed, return_lse=True)
    assert not out.any() and not gk.attn_dropout_mask(q, k, 1.0, seed).any()
    # another kernel may serve the call without dropout, and sum in another order
    plain = gk.flash_attn(q, k, v, return_lse=True)[1]
    torch.testing.assert_close(lse, plain, rtol=8 * torch.finfo(lse.dtype).eps, atol=0)
    for grad in torch.autograd.grad(out.sum(), (q, k, v)):
        assert not grad.any()
    assert not gk.flash_attn(q, k, v, dropout_p=1).any()  # a seed of its own
    q, k, v = (x[0].transpose(0, 1).detach().requires_grad_() for x in (q, k, v))
    cu = torch.tensor([0, 50, 200], dtype=torch.int32, device=device)
    out = gk.flash_attn_varlen(q, k, v, cu, cu, 150, 150, dropout_p=1.0)
    assert not out.any()
    for grad in torch.autograd.grad(out.sum(), (q, k, v)):
        assert not grad.any()


def test_rows_without_columns(device):
    for dtype in ROWS:
        for shape in ((3, 0), (0, 0), (2, 3, 0)):
            x = torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)
            for f in (gk.softmax, gk.log_softmax, gk.swiglu, gk.geglu, lambda x: gk.swiglu(x, x)):
                out = f(x)
                assert out.shape == x.shape and out.dtype == dtype
                (grad,) = torch.autograd.grad(out.sum(), x)
                assert grad.shape == x.shape
                assert torch.compile(f, backend="aot_eager")(x.detach()).shape == x.shape
    with pytest.raises(ValueError, match="logits must have a last dimension of at least 1, got 0"):
        gk.cross_entropy(
            torch.zeros(0, 0, device=device), torch.zeros(0, dtype=torch.int64, device=device)
        )


def test_what_to_do_instead(device):
    """A refusal says it."""
    q, byte = (
        torch.ones(1, 2, 64, device=device),
        torch.zeros(2, 16, 2, 64, dtype=torch.uint8, device=device),
    )
    table, lens, one = (
        torch.zeros(1, 2, device=device).int(),
        torch.ones(1, device=device).int(),
        torch.ones((), device=device),
    )
    flat, slot = byte.flatten(0, 2), torch.zeros(1, dtype=torch.int64, device=device)
    codes, logits, classes = (
        byte.view(E4M3),
        torch.ones(3, 8, device=device),
        torch.zeros(3, dtype=torch.int64, device=device),
    )
    view = r"x\.view\(torch\.float8_e4m3fn\)"
    for call, text in (
        (lambda: gk.paged_attn(q, byte, byte, table, lens), view),
        (lambda: gk.kv_cache_write(q, q, byte, byte.clone(), slot), view),
        (
            lambda: gk.rope_kv_write(
                q, q, q, one.expand(1, 2), one.expand(1, 2), slot, byte, byte.clone(), slot
            ),
            view,
        ),
        (lambda: gk.scaled_gemm(flat, flat.mT, one, one), view),
        (
            lambda: gk.scaled_gemm(flat.view(E4M3), flat.view(E4M3).mT, one.byte(), one),
            r"x\.view\(torch\.float8_e8m0fnu\)",
        ),
        (lambda: gk.grouped_gemm(flat, flat.mT[None], lens), view),
        (lambda: gk.sparse_gemm(flat, flat[:, :32], flat[:, :8]), view),
        (lambda: gk.dequantize(flat, one), view),
        (
            lambda: gk.paged_attn(q, codes, codes, table, lens, k_scale=one.expand(1, 2)),
            "is written to each of its pages",
        ),
        (lambda: gk.cross_entropy(logits, logits), "torch.nn.functional.cross_entropy takes them"),
        (
            lambda: gk.linear_cross_entropy(logits, logits, logits),
            "torch.nn.functional.cross_entropy takes them",
        ),
        (lambda: gk.rms_norm(q.half(), residual=q), "for a float32 residual stream pass x.float()"),
        (lambda: gk.dropout(q, 0.5, 42), r"pass torch.tensor\(\[42, 0\]\)"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    for call, text in (
        (
            lambda: gk.flash_attn(q[None], q[None], q[None], one),
            r"3 positional arguments \(q, k, "
            r"v\), got 4; pass is_causal, ",
        ),
        (
            lambda: gk.attn_merge(q, q[..., 0], q, q[..., 0], one),
            "4 positional arguments .*, got 5; there are no others",
        ),
        (
            lambda: gk.cross_entropy(logits, classes, one),
            "2 positional arguments .logits, target., got 3; pass weight, ",
        ),
        (
            lambda: gk.paged_attn(q, codes, codes, table, lens, output_scale=one),
            "output_scale'; the result has 16 or 32 bits",
        ),
        (
            lambda: gk.attn_merge(q, q[..., 0], q, q[..., 0], output_scale=one),
            "the result has 16 or 32 bits",
        ),
        (lambda: gk.scaled_gemm(flat, flat.mT, one, one, zero_a=3), "operands have no zero point"),
        (lambda: gk.quantize(q, E4M3, "1x32", rounding="floor"), "rounded up to a power of two"),
        (
            lambda: gk.cross_entropy(logits, classes, return_predicted_tokens=True),
            r"logits\.argmax\(-1\)",
        ),
        (lambda: gk.cross_entropy(logits, classes, return_z_loss=True), "take the difference"),
        (lambda: gk.cross_entropy(logits, classes, precomputed_lse=one), "leave it out"),
        (
            lambda: gk.cross_entropy(logits, classes, lse_square_scale=1e-4),
            "use z_loss",
        ),
        (
            lambda: gk.linear_cross_entropy(logits, logits, classes, ce_weight=one),
            "use class_weight",
        ),
        (lambda: gk.layer_norm(q, normalized_shape=(64,)), "over the last dimension"),
    ):
        with pytest.raises(TypeError, match=text):
            call()


def test_references_agree_with_what_is_taken():
    x, w = (
        torch.ones(2, 8, dtype=torch.bfloat16),
        torch.full((8,), 1 + 2.0**-10, dtype=torch.float16),
    )
    assert_bits(gk.rms_norm(x, w, eps=0.0), reference.rms_norm(x, w, eps=0.0))
