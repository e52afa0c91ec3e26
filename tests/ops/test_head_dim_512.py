# SPDX-License-Identifier: BSD-3-Clause
"""head_dim 512, as in Gemma's global layers, and 576 with values of 512, as in dense latent
attention: forward, backward, masks, packed and paged calls beside float64.

On CUDA 16-bit calls without a mask, a bias or dropout run on tensor cores: on Hopper by
flash_attn_fwd_wide_sm90a up to 512, backward by products (flash_attn_bwd_gemms). Plain kernels
serve the others. On a machine without a GPU the CUDA half is not run, except for the checks.
"""

import functools
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from attention_cases import Paged, check_paged
from conftest import (
    FLOATS,
    HALF,
    assert_close_as,
    f64,
    generator,
    ops,
    orders,
    randn,
    reference,
    torch_gpukern,
    yard_dtype,
)
from torch._subclasses.fake_tensor import FakeTensorMode

DIMS = ((512, 512), (512, 256), (320, 512), (576, 512))
ROWS, KEYS = 70, 83


def modifiers(name, gen, dtype):
    """The arguments of flash_attn, and the same as a mask for SDPA."""
    i, j = torch.arange(ROWS)[:, None], torch.arange(KEYS)[None]
    if name == "causal":
        return {"is_causal": True, "diagonal": 5}, j - i <= 5
    if name == "window":
        return {"window_left": 9, "window_right": 3}, (j >= i - 9) & (j <= i + 3)
    if name == "bounds":
        start, end = torch.tensor([[3], [0]]), torch.tensor([[70], [83]])
        bounds = {"kv_start": start.flatten().int(), "kv_end": end.flatten().int()}
        return bounds, ((j >= start) & (j < end))[:, None, None]
    if name == "mask":
        mask = torch.rand(ROWS, KEYS, generator=gen) < 0.6
        mask[:, 0] = True
        return {"attn_mask": mask}, mask
    if name == "bias":
        bias = randn(gen, 4, ROWS, KEYS, dtype=dtype)
        return {"bias": bias}, bias
    return {}, None


def to(device, x):
    """x with its tensors on the device."""
    if isinstance(x, dict):
        return {name: to(device, value) for name, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [to(device, value) for value in x]
    return x.to(device) if isinstance(x, torch.Tensor) else x


def with_gradients(attend, tensors, grad_out, **rules):
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = attend(*leaves, **rules)
    return out, *torch.autograd.grad(out, leaves, grad_out)


def of_torch(tensors, grad_out, mask, dtype, order):
    """out, dq, dk and dv of SDPA in a dtype. Keys and the elements of head_dim stand in another
    order, so that the largest of a few errors is not luck."""
    q, k, v = (x.to(dtype) for x in tensors)
    shuffled = torch.randperm(q.shape[-1], generator=generator("512 order", order[:4].tolist()))
    k, v = k[:, :, order], v[:, :, order]
    if mask is not None:
        mask = (mask if mask.dtype == torch.bool else mask.to(dtype))[..., order]
    how = {"attn_mask": mask, "enable_gqa": True}
    inputs = q[..., shuffled], k[..., shuffled], v
    out, dq, dk, dv = with_gradients(
        F.scaled_dot_product_attention, inputs, grad_out.to(dtype), **how
    )
    back, columns = order.argsort(), shuffled.argsort()
    return out, dq[..., columns], dk[:, :, back][..., columns], dv[:, :, back]


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("mods", ("none", "causal", "window", "bounds", "mask", "bias"))
def test_forward_and_backward(mods, dtype, dims, device):
    shapes = (
        (2, 4, ROWS, dims[0]),
        (2, 2, KEYS, dims[0]),
        (2, 2, KEYS, dims[1]),
        (2, 4, ROWS, dims[1]),
    )

    @functools.cache
    def exact_and_yards(draw):
        """Inputs, the exact results, and PyTorch's in several orders, on the CPU and the device."""
        gen = generator("512", mods, dtype, dims, draw)
        *tensors, grad_out = (randn(gen, *shape, dtype=dtype) for shape in shapes)
        rules, mask = modifiers(mods, gen, dtype)
        exact = with_gradients(reference.flash_attn, f64(tensors), f64(grad_out), **f64(rules))
        yards = [
            of_torch(*to(place, (tensors, grad_out, mask)), yard_dtype(dtype), order)
            for place in {"cpu", device}
            for order in (torch.arange(KEYS), *orders(gen, KEYS)[1:])
        ]
        return (tensors, grad_out, rules), [x.detach() for x in exact], to("cpu", yards)

    def yards_of(draw, which):
        _, exact, yards = exact_and_yards(draw)
        return [(yard[which], exact[which]) for yard in yards]

    given, exact, _ = exact_and_yards(0)
    tensors, grad_out, rules = to(device, given)
    got = with_gradients(torch_gpukern.flash_attn, tensors, grad_out, **rules)
    for i, (x, ref, name) in enumerate(zip(got, exact, ("out", "dq", "dk", "dv"), strict=True)):
        assert x.dtype == dtype
        # the elements of a row share the roundings of its scores
        assert_close_as(partial(yards_of, which=i), x, ref, name, sources=2 * 4 * ROWS)


def exactly(tensors, grad_out, **how):
    """out, dq, dk and dv of [1, H, S, D] in float64, by SDPA's formula on the tensors' device. The
    judge of the other tests would take minutes for these sizes."""

    def attend(q, k, v, is_causal=False, diagonal=0):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        s = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
        if is_causal:
            hidden = torch.ones(s.shape[2:], dtype=torch.bool, device=s.device).triu(diagonal + 1)
            s = s.masked_fill(hidden, -math.inf)
        return s.softmax(-1) @ v

    return [x.detach() for x in with_gradients(attend, f64(tensors), f64(grad_out), **how)]


def relative_rms(x, ref):
    x, ref = x.cpu().double(), ref.detach().cpu()
    return (x - ref).square().mean().sqrt() / ref.square().mean().sqrt()


def check_large(key, heads, lengths, dtype, device, **how):
    """A call of many tiles: the errors are within a few roundings of the largest result."""
    (hq, hkv), (sq, sk) = heads, lengths
    gen = generator("512 large", key, heads, lengths)
    tensors = [randn(gen, 1, h, s, 512, dtype=dtype, device=device)
               for h, s in ((hq, sq), (hkv, sk), (hkv, sk))]  # fmt: skip
    grad_out = randn(gen, 1, hq, sq, 512, dtype=dtype, device=device)
    got = with_gradients(torch_gpukern.flash_attn, tensors, grad_out, **how)
    wanted = exactly(tensors, grad_out, **how)
    for x, ref, name in zip(got, wanted, ("out", "dq", "dk", "dv"), strict=True):
        error = relative_rms(x, ref)
        assert error < 4 * torch.finfo(dtype).eps, f"{name}: relative RMS error {error:.2e}"


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("diagonal", (None, 0, 171), ids=str)
def test_several_tiles(diagonal, dtype, device):
    """Forward tiles of 128 rows and blocks of 32 keys, the last of them incomplete."""
    how = {} if diagonal is None else {"is_causal": True, "diagonal": diagonal}
    check_large("tiles", (4, 2), (300, 471), dtype, device, **how)


def test_one_row_and_many_keys(device):
    """As in decoding: heads share a tile, and the keys of a tile are split."""
    gen = generator("512 decode")
    q, k, v = (randn(gen, 1, h, s, 512, dtype=torch.bfloat16, device=device)
               for h, s in ((8, 1), (1, 3001), (1, 3001)))  # fmt: skip
    out, lse = torch_gpukern.flash_attn(q, k, v, return_lse=True)
    wanted = reference.flash_attn(*f64((q.cpu(), k.cpu(), v.cpu())), return_lse=True)
    assert relative_rms(out, wanted[0]) < 4 * torch.finfo(out.dtype).eps
    assert (lse.cpu().double() - wanted[1]).abs().max() < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize(
    "heads, lengths, causal",
    (
        ((2, 1), (2500, 4200), False),  # three chunks of rows, and two terms of dk and dv
        ((2, 2), (4200, 4200), True),  # blocks of keys that see different rows
        ((24, 12), (4096, 4096), True),  # not all kv heads at once
        ((5, 1), (8200, 8200), True),  # not all query heads of a kv head at once
        ((2, 1), (17000, 17000), True),  # not all rows at once: 4 bytes a pair exceed 1 GiB
    ),
    ids=str,
)
def test_chunks_of_the_backward(heads, lengths, causal):
    check_large("chunks", heads, lengths, torch.bfloat16, "cuda", is_causal=causal)


@pytest.mark.gpu
def test_hidden_operands_do_not_count():
    """Keys that no row sees and rows that see no key may hold NaN, on the way by products, too."""
    gen = generator("512 hidden")
    q, grad_out = (randn(gen, 2, 2, 90, 512, dtype=torch.bfloat16) for _ in range(2))
    k, v = (randn(gen, 2, 1, 150, 512, dtype=torch.bfloat16) for _ in range(2))
    start, end = torch.tensor([40, 0]).int(), torch.tensor([70, 150]).int()
    how = {"is_causal": True, "kv_start": start, "kv_end": end}
    exact = with_gradients(reference.flash_attn, f64((q, k, v)), f64(grad_out), **how)
    for x in (k, v):
        x[0, :, :40] = x[0, :, 70:] = x[1, :, 90:] = math.nan
    q[0, :, :40] = grad_out[0, :, :40] = math.nan  # causal: these rows see keys before 40 alone
    got = with_gradients(
        torch_gpukern.flash_attn, *to("cuda", ((q, k, v), grad_out)), **to("cuda", how)
    )
    for x, ref, name in zip(got, exact, ("out", "dq", "dk", "dv"), strict=True):
        error = relative_rms(x, ref)
        assert error < 2**-6, f"{name}: relative RMS error {error:.2e}"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_packed(dtype, device):
    """Two sequences packed have the results of two calls, gradients too."""
    gen, lengths = generator("512 packed", dtype), (33, 70)
    tokens = sum(lengths)
    q, k, v, grad_out = (
        randn(gen, tokens, h, 512, dtype=dtype, device=device) for h in (4, 2, 2, 4)
    )
    starts = torch.tensor([0, 33, tokens], dtype=torch.int32, device=device)

    def packed(q, k, v):
        how = {"is_causal": True}
        return torch_gpukern.flash_attn_varlen(q, k, v, starts, starts, 70, 70, **how)

    def apart(q, k, v):
        outs = []
        for rows in (slice(0, 33), slice(33, tokens)):
            x = (y[rows].transpose(0, 1)[None] for y in (q, k, v))
            outs.append(torch_gpukern.flash_attn(*x, is_causal=True)[0].transpose(0, 1))
        return torch.cat(outs)

    got = with_gradients(packed, (q, k, v), grad_out)
    yard = yard_dtype(dtype)
    wanted = with_gradients(apart, [x.to(yard) for x in (q, k, v)], grad_out.to(yard))
    exact = with_gradients(apart, f64(to("cpu", (q, k, v))), f64(grad_out.cpu()))
    for x, y, ref in zip(got, wanted, exact, strict=True):
        assert_close_as([y], x, ref.detach())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("batch", (([1, 130, 0, 33], [1, 1, 1, 1]), ([65, 300], [65, 17])), ids=str)
def test_paged(batch, dtype, device):
    case = Paged(generator("512 paged", batch, dtype), *batch, 8, 2, 512, 512, 16, dtype, device)
    how = {"cu_seqlens_q": case.cu_seqlens_q, "max_seqlen_q": max(case.queries)}
    out, lse = torch_gpukern.paged_attn(*case.args(), **how, return_lse=True)
    check_paged(case, out, lse, {})


def test_what_the_devices_serve():
    dims = (252, 256, 264, 511, 512, 513, 575, 576, 577, 584)
    assert [d for d in dims if ops.serves_head_dim(d, False)] == [*dims[:-2]]
    assert [d for d in dims if ops.serves_head_dim(d, True)] == [256, 264, 512, 576]


@pytest.mark.parametrize("head_dim", (252, 584))
def test_what_cuda_refuses(head_dim):
    """By the same check on fake tensors, which need no GPU."""
    law = f"q has head_dim {head_dim}; supported on CUDA are multiples of 8 from 8 to 576"
    with FakeTensorMode():
        dense, packed = (
            torch.empty(shape, device="cuda") for shape in ((1, 2, 4, head_dim), (4, 2, head_dim))
        )
        starts = torch.empty(2, dtype=torch.int32, device="cuda")
        with pytest.raises(ValueError, match=f"flash_attn: {law}"):
            torch_gpukern.flash_attn(dense, dense, dense)
        with pytest.raises(ValueError, match=f"flash_attn_varlen: {law}"):
            torch_gpukern.flash_attn_varlen(packed, packed, packed, starts, starts, 4, 4)


def test_cuda_takes_512_but_not_of_codes():
    with FakeTensorMode():
        dense, packed = (torch.empty(s, device="cuda") for s in ((1, 2, 4, 512), (4, 2, 512)))
        starts = torch.empty(2, dtype=torch.int32, device="cuda")
        assert torch_gpukern.flash_attn(dense, dense, dense).shape == dense.shape
        out = torch_gpukern.flash_attn_varlen(packed, packed, packed, starts, starts, 4, 4)
        assert out.shape == packed.shape
        codes = dense.to(torch.float8_e4m3fn)
        law = "q has head_dim 512; supported on CUDA for float8_e4m3fn are multiples of 8 from 8 to"
        with pytest.raises(ValueError, match=f"{law} 256; pass bfloat16 or float16"):
            torch_gpukern.flash_attn(codes, codes, codes)


def test_sdpa_keeps_wide_heads_on_cuda():
    """PyTorch sends them here with a mask only, and then its own kernel is faster than ours."""
    from torch_gpukern.integrations import sdpa

    with FakeTensorMode():
        for device, served in (("cpu", [256, 512]), ("cuda", [256])):
            q = {d: torch.empty(1, 2, 4, d, device=device) for d in (256, 512)}
            assert [d for d, x in q.items() if sdpa._serves(x, x, x, False)] == served
