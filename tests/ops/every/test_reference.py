# SPDX-License-Identifier: BSD-3-Clause
"""reference.py, the judge of the other tests, against PyTorch's own ops and cases worked out by
hand."""

import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from attention_cases import visible
from conftest import TORCH_ACTIVATION, generator, randn, reference, torch_gpukern


def close(x, y, dtype=torch.float64):
    eps = torch.finfo(dtype).eps
    return torch.allclose(x.double(), y.double(), rtol=64 * eps, atol=64 * eps)


def rand(*shape, key="reference"):
    return randn(generator(key, shape), *shape, dtype=torch.float64)


@pytest.mark.parametrize("activation", TORCH_ACTIVATION)
def test_gemm(activation):
    a, b, bias, c = rand(2, 3, 4), rand(4, 5), rand(5), rand(3, 1)
    want = TORCH_ACTIVATION[activation](0.5 * torch.matmul(a, b) - 2.0 * c + bias)
    assert close(reference.gemm(a, b, bias, c, alpha=0.5, beta=-2.0, activation=activation), want)
    assert close(reference.gemm(a, b), torch.matmul(a, b))


def test_gemm_by_hand():
    a, b = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, -1.0], [4.0, 0.0]])
    assert reference.gemm(a, b).tolist() == [[11.0, -1.0]]
    assert reference.gemm(a, b, activation="relu").tolist() == [[11.0, 0.0]]
    assert reference.gemm(
        a,
        b,
        torch.tensor([1.0, 1.0]),
        torch.tensor(
            [
                [2.0],
            ]
        ),
        2.0,
        3.0,
    ).tolist() == [[29.0, 5.0]]
    nan = torch.full((1, 2), math.nan)
    assert reference.gemm(a, b, c=nan, beta=0.0).tolist() == [[11.0, -1.0]]
    x = torch.tensor([[1.0]], dtype=torch.float64)
    one = torch.ones(1, 1, dtype=torch.float64)
    values = {
        "gelu": 0.8413447460685429,
        "gelu_tanh": 0.8411919906082768,
        "silu": 0.7310585786300049,
    }
    for activation, value in values.items():
        assert close(
            reference.gemm(x, one, activation=activation),
            torch.tensor([[value]], dtype=torch.float64),
        )
    bf16 = torch.ones(1, 4, dtype=torch.bfloat16)
    assert reference.gemm(bf16, bf16.T).dtype == torch.bfloat16
    assert reference.gemm(bf16, bf16.T, out_dtype=torch.float32).dtype == torch.float32
    # 256 + 1 is not a bfloat16: one rounding at the end, none before
    big, unit = (
        torch.tensor([[256.0]], dtype=torch.bfloat16),
        torch.ones(1, 1, dtype=torch.bfloat16),
    )
    assert reference.gemm(big, unit, bias=unit[0], c=unit).item() == 258.0


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (4, 1)], ids=str)
@pytest.mark.parametrize(
    "span",
    [
        {},
        dict(is_causal=True),
        dict(is_causal=True, diagonal=3),
        dict(window_left=2, window_right=1),
        dict(window_left=3, is_causal=True, diagonal=2),
        dict(window_right=0, diagonal=-1),
    ],
    ids=str,
)
def test_flash_attn_is_sdpa(heads, span):
    q, k, v = rand(2, heads[0], 7, 8), rand(2, heads[1], 9, 8), rand(2, heads[1], 9, 5)
    mask = visible(q.shape, k.shape, **span)
    empty = ~mask.any(-1, keepdim=True)
    want = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask | empty, enable_gqa=True
    ).masked_fill(empty, 0)
    out, lse = reference.flash_attn(q, k, v, **span, return_lse=True)
    assert close(out, want) and close(reference.flash_attn(q, k, v, **span), want)
    s = q @ k.repeat_interleave(heads[0] // heads[1], 1).mT / math.sqrt(8)
    assert close(lse.exp(), s.masked_fill(~mask, -math.inf).exp().sum(-1))


def test_is_causal_is_sdpas():
    q, k, v = rand(1, 2, 5, 8), rand(1, 2, 9, 8), rand(1, 2, 9, 8)
    assert close(
        reference.flash_attn(q, k, v, is_causal=True),
        F.scaled_dot_product_attention(q, k, v, is_causal=True),
    )
    keep = torch.ones(5, 9).tril(diagonal=4).bool()
    assert close(
        reference.flash_attn(q, k, v, is_causal=True, diagonal=4),
        F.scaled_dot_product_attention(q, k, v, attn_mask=keep),
    )


def test_flash_attn_by_hand():
    """Two keys with scores ln 3 and 0: probabilities 3/4 and 1/4."""
    q = torch.tensor([math.log(3.0), 0.0], dtype=torch.float64).view(1, 1, 1, 2)
    k = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64).view(1, 1, 2, 2)
    v = torch.tensor([[8.0], [4.0]], dtype=torch.float64).view(1, 1, 2, 1)

    def run(**kwargs):
        out, lse = reference.flash_attn(q, k, v, scale=1.0, return_lse=True, **kwargs)
        return out.item(), math.exp(lse.item())

    assert run() == pytest.approx((7.0, 4.0))
    assert run(is_causal=True) == pytest.approx((8.0, 3.0))
    assert run(is_causal=True, diagonal=1) == pytest.approx((7.0, 4.0))
    assert run(is_causal=True, diagonal=-1) == (0.0, 0.0)
    assert run(window_left=0, diagonal=1) == pytest.approx((4.0, 1.0))
    assert run(window_right=0) == pytest.approx((8.0, 3.0))
    one, zero, nine = (torch.tensor([n], dtype=torch.int32) for n in (1, 0, 9))
    assert run(kv_start=one) == pytest.approx((4.0, 1.0))
    assert run(kv_end=one) == pytest.approx((8.0, 3.0))
    assert run(kv_start=-one, kv_end=nine) == pytest.approx((7.0, 4.0))
    assert run(kv_start=one, kv_end=zero) == (0.0, 0.0)
    sink = torch.tensor([math.log(4.0)], dtype=torch.float64)
    assert run(sinks=sink) == pytest.approx((3.5, 8.0))
    assert run(sinks=torch.tensor([-math.inf], dtype=torch.float64)) == pytest.approx((7.0, 4.0))
    assert run(sinks=sink, is_causal=True, diagonal=-1) == pytest.approx((0.0, 4.0))
    slope = torch.tensor([math.log(2.0)], dtype=torch.float64)
    assert run(alibi_slopes=slope) == pytest.approx(((3 * 8 + 0.5 * 4) / 3.5, 3.5))
    assert run(alibi_slopes=slope[None], diagonal=1) == pytest.approx(
        ((1.5 * 8 + 1 * 4) / 2.5, 2.5)
    )
    cap = 2.0 * math.tanh(math.log(3.0) / 2.0)  # = 1
    assert run(softcap=2.0) == pytest.approx(
        ((8 * math.exp(cap) + 4) / (math.exp(cap) + 1), math.exp(cap) + 1)
    )


def test_order_of_softcap_alibi_and_sink():
    """The cap comes before ALiBi, and the sink knows neither."""
    q, k, v = rand(2, 2, 3, 4), rand(2, 2, 5, 4), rand(2, 2, 5, 4)
    slopes, sinks = rand(2, 2, key="slopes").abs(), rand(2, key="sinks")
    i, j = torch.arange(3)[:, None] + 2, torch.arange(5)[None]
    s = 1.5 * torch.tanh(0.7 * (q @ k.mT) / 1.5) - slopes[..., None, None] * (i - j).abs()
    s = s.masked_fill(j > i, -math.inf)
    p = torch.softmax(torch.cat([s, sinks[None, :, None, None].expand(2, 2, 3, 1)], -1), -1)
    got = reference.flash_attn(
        q,
        k,
        v,
        is_causal=True,
        scale=0.7,
        diagonal=2,
        softcap=1.5,
        alibi_slopes=slopes,
        sinks=sinks,
    )
    assert close(got, p[..., :5] @ v)


def test_flash_attn_gradients():
    q, k, v, sinks = (
        rand(*s).requires_grad_() for s in ((1, 2, 3, 4), (1, 1, 5, 4), (1, 1, 5, 2), (2,))
    )
    run = lambda q, k, v, s: reference.flash_attn(  # noqa: E731
        q, k, v, True, diagonal=1, softcap=2.0, sinks=s, return_lse=True
    )  # noqa: E731
    assert torch.autograd.gradcheck(run, (q, k, v, sinks))
    out, lse = reference.flash_attn(q, k, v, is_causal=True, diagonal=-2, return_lse=True)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(g.isfinite().all() for g in grads) and not grads[0][:, :, :2].any()


def test_varlen_and_paged_are_flash_attn_of_each_sequence():
    lengths_q, lengths_k = [3, 0, 2], [5, 2, 2]
    cu_q, cu_k = (
        torch.tensor([0, *torch.tensor(n).cumsum(0).tolist()], dtype=torch.int32)
        for n in (lengths_q, lengths_k)
    )
    q, k, v = rand(6, 4, 8), rand(10, 2, 8), rand(10, 2, 8)
    out, lse = reference.flash_attn_varlen(
        q, k, v, cu_q, cu_k, 3, 5, is_causal=True, return_lse=True
    )
    start_q = start_k = 0
    for n, m in zip(lengths_q, lengths_k):
        one = [
            t.transpose(0, 1)[None]
            for t in (q[start_q : start_q + n], k[start_k : start_k + m], v[start_k : start_k + m])
        ]
        want, want_lse = reference.flash_attn(*one, is_causal=True, diagonal=m - n, return_lse=True)
        assert torch.equal(out[start_q : start_q + n], want[0].transpose(0, 1))
        assert torch.equal(lse[start_q : start_q + n], want_lse[0].transpose(0, 1))
        start_q, start_k = start_q + n, start_k + m
    assert not out[5:].any() and (lse[5:] == -math.inf).all()

    # the same keys in pages of two rows
    cache_k, cache_v = rand(9, 2, 2, 8) * math.nan, rand(9, 2, 2, 8) * math.nan
    table = torch.tensor([[7, 2, 4, 99], [0, -5, 99, 99], [6, 99, 99, 99]], dtype=torch.int32)
    for b, m in enumerate(lengths_k):
        for t in range(m):
            cache_k[table[b, t // 2], t % 2], cache_v[table[b, t // 2], t % 2] = (
                k[cu_k[b] + t],
                v[cu_k[b] + t],
            )
    lens = torch.tensor(lengths_k, dtype=torch.int32)
    got = reference.paged_attn(q, cache_k, cache_v, table, lens, cu_q, 3, return_lse=True)
    assert torch.equal(got[0], out) and torch.equal(got[1], lse)
    full = reference.paged_attn(q, cache_k, cache_v, table, lens, cu_q, 3, is_causal=False)
    assert close(full, reference.flash_attn_varlen(q, k, v, cu_q, cu_k, 3, 5))
    scaled = reference.paged_attn(
        q,
        cache_k / 2,
        cache_v / 3,
        table,
        lens,
        cu_q,
        3,
        k_scale=torch.tensor(2.0).double(),
        v_scale=torch.tensor([3.0, 3.0]).double(),
    )
    assert close(scaled, out)


def test_paged_attn_without_lengths():
    q, cache = rand(4, 2, 8), rand(3, 4, 2, 8)
    table, lens = (
        torch.tensor([[0, 1], [2, 0]], dtype=torch.int32),
        torch.tensor([6, 0], dtype=torch.int32),
    )
    out, lse = reference.paged_attn(q, cache, cache, table, lens, return_lse=True)
    assert not out[2:].any() and (lse[2:] == -math.inf).all()
    k = cache[:2].flatten(0, 1)[:6].transpose(0, 1)[None]
    assert close(
        out[:2],
        reference.flash_attn(q[:2].transpose(0, 1)[None], k, k, is_causal=True, diagonal=4)[
            0
        ].transpose(0, 1),
    )
    none = torch.zeros(0, dtype=torch.int32)
    assert reference.paged_attn(q[:0], cache, cache, table[:0], none).shape == (0, 2, 8)


def test_kv_cache_write():
    k, v = rand(3, 1, 2), rand(3, 1, 4)
    caches = torch.zeros(2, 2, 1, 2).double(), torch.zeros(2, 2, 1, 4).double()
    reference.kv_cache_write(k, v, *caches, torch.tensor([3, -1, 0]))
    assert (
        torch.equal(caches[0][1, 1], k[0])
        and torch.equal(caches[0][0, 0], k[2])
        and torch.equal(caches[1][1, 1], v[0])
    )
    assert not caches[0][0, 1].any() and not caches[0][1, 0].any()
    half = torch.tensor([60000.0, 1.0]).half().view(1, 1, 2)
    caches = [torch.zeros(1, 1, 1, 2).half() for _ in range(2)]
    reference.kv_cache_write(
        half, half, *caches, torch.tensor([0]), torch.tensor(0.5), torch.tensor([2.0])
    )
    assert caches[0].flatten().tolist() == [65504.0, 2.0] and caches[1].flatten().tolist() == [
        30000.0,
        0.5,
    ]


def test_attn_merge():
    """Parts of the keys merge to the whole; weights 3/4 and 1/4 by hand."""
    out_a, out_b = torch.tensor([8.0]), torch.tensor([4.0])
    lse_a, lse_b = torch.tensor(math.log(3.0)), torch.tensor(0.0)
    out, lse = reference.attn_merge(out_a, lse_a, out_b, lse_b)
    assert out.item() == pytest.approx(7.0) and lse.exp().item() == pytest.approx(4.0)
    q, k, v = rand(2, 2, 3, 4), rand(2, 2, 9, 4), rand(2, 2, 9, 4)
    parts = [
        reference.flash_attn(q, k[:, :, x], v[:, :, x], return_lse=True)
        for x in (slice(0, 4), slice(4, 9))
    ]
    whole = reference.flash_attn(q, k, v, return_lse=True)
    for x, y in zip(reference.attn_merge(*parts[0], *parts[1]), whole):
        assert close(x, y)
    nothing = torch.tensor(-math.inf)
    assert torch.equal(reference.attn_merge(out_a, lse_a, out_b * math.nan, nothing)[0], out_a)
    assert torch.equal(reference.attn_merge(out_a * math.nan, nothing, out_b, lse_b)[0], out_b)
    out, lse = reference.attn_merge(out_a, nothing, out_b, nothing)
    assert out.item() == 0 and lse.item() == -math.inf


# those of packed weights take the weight as it was: reference_quantised
MASKS = {"attn_mask_blocks", "attn_mask_columns", "attn_mask_of", "attn_mask_ranges", "tree_mask"}
NO_STATEMENT = {"check_errors", "explain", *MASKS} | {
    "pack_weight", "sparse_gemm", "sparse_pack", "unpack_weight", "weight_gemm",
}  # fmt: skip


def test_every_op_is_stated_with_its_own_arguments():
    for name in set(torch_gpukern.__all__) - NO_STATEMENT:
        op = getattr(torch_gpukern, name)
        if not inspect.isfunction(op):
            continue
        assert name in reference.__all__, f"reference has no {name}"
        taken = inspect.signature(getattr(reference, name)).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in taken.values()):
            positional = [
                p for p in inspect.signature(op).parameters.values() if p.default is p.empty
            ]
            missing = {p.name for p in positional if p.kind is not p.VAR_KEYWORD} - set(taken)
            assert not missing, f"reference.{name} does not take {missing}"


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64), ids=str)
def test_rows(dtype):
    """The statements of the operations along the last dimension, in the dtype itself, give what the
    ops give."""
    gen, seed = generator("reference rows", str(dtype)), torch.tensor([5, 9])
    x, r, q, k = (
        randn(gen, *shape, dtype=dtype)
        for shape in ((2, 3, 8), (2, 3, 8), (2, 4, 5, 8), (2, 2, 5, 8))
    )
    w, bias = randn(gen, 8, dtype=dtype), randn(gen, 8, dtype=dtype)
    lengths = torch.tensor([[0, 3, 9], [8, 1, 2]], dtype=torch.int32)
    cos, sin = (randn(gen, 9, 3, dtype=torch.promote_types(dtype, torch.float32)) for _ in range(2))
    at, target = (
        torch.tensor([[8, 0, 1, 1, 2], [0, 1, 2, 3, 4]]),
        torch.tensor([[1, -100, 3], [0, 7, 7]]),
    )
    rules = {"softcap": 3.0, "label_smoothing": 0.1, "logit_scale": 0.7, "z_loss": 0.02}
    calls = [
        ("rms_norm", (x, w), {"bias": bias, "residual": r, "weight_offset": 1.0}),
        ("layer_norm", (x, w, bias), {"residual": r}),
        ("softmax", (x,), {"scale": 2.0, "lengths": lengths}),
        ("log_softmax", (x,), {"scale": 0.5}),
        ("swiglu", (x,), {}),
        ("geglu", (x, r), {"approximate": "tanh"}),
        ("rope", (q, k, cos, sin, at), {"interleaved": True}),
        ("rope", (q[:, :, 0], k[:, :, 0], cos, sin), {}),
        ("cross_entropy", (x, target), {"reduction": "none", **rules}),
        (
            "linear_cross_entropy",
            (x, k[0, 0], target, k[0, 1, :, 0]),
            {"low_memory": True, **rules},
        ),
        ("dropout", (x, 0.4, seed), {}),
        ("dropout_add", (x, r, 0.4, seed), {}),
        ("bias_gelu_dropout", (x, bias, 1.0, seed), {"approximate": "tanh"}),
        ("dropout_mask", ((7, 11), 0.3, seed), {}),
        ("linear", (x, k[0, 0], k[0, 1, :, 0]), {"activation": "gelu"}),
    ]
    target.clamp_(max=4)  # of the product's 5 classes
    for name, arguments, more in calls:
        torch.testing.assert_close(
            getattr(reference, name)(*arguments, **more),
            getattr(torch_gpukern, name)(*arguments, **more),
            msg=name,
        )
    tokens = [randn(gen, 3, heads, 8, dtype=dtype) for heads in (4, 2, 2)]
    slots, found = torch.tensor([1, -1, 7]), []
    for module in (reference, torch_gpukern):
        caches = torch.zeros(2, 2, 4, 2, 8, dtype=dtype)
        how = {"q_weight": w, "k_weight": bias}
        found.append(
            (
                module.rope_kv_write(
                    *tokens, cos, sin, torch.tensor([0, 3, 8]), *caches, slots, **how
                ),
                caches,
            )
        )
    torch.testing.assert_close(*found)
