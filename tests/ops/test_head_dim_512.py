# SPDX-License-Identifier: BSD-3-Clause
"""head_dim 512, as in Gemma's global layers, on the CPU: forward, backward, masks, packed and paged
calls beside float64. CUDA refuses it by name, except paged_attn."""

import functools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    FLOATS,
    Paged,
    assert_close_as,
    check_paged,
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

DIMS = ((512, 512), (512, 256), (320, 512))
ROWS, KEYS = 70, 83


def modifiers(name, gen, dtype):
    """The arguments of flash_attn, and the same as a mask for SDPA."""
    i, j = torch.arange(ROWS)[:, None], torch.arange(KEYS)[None]
    if name == "causal":
        return {"is_causal": True, "diagonal": 5}, j - i <= 5
    if name == "window":
        return {"window_left": 9, "window_right": 3}, (j >= i - 9) & (j <= i + 3)
    if name == "mask":
        mask = torch.rand(ROWS, KEYS, generator=gen) < 0.6
        mask[:, 0] = True
        return {"attn_mask": mask}, mask
    if name == "bias":
        bias = randn(gen, 4, ROWS, KEYS, dtype=dtype)
        return {"bias": bias}, bias
    return {}, None


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
@pytest.mark.parametrize("mods", ("none", "causal", "window", "mask", "bias"))
def test_forward_and_backward(mods, dtype, dims):
    shapes = (
        (2, 4, ROWS, dims[0]),
        (2, 2, KEYS, dims[0]),
        (2, 2, KEYS, dims[1]),
        (2, 4, ROWS, dims[1]),
    )

    @functools.cache
    def exact_and_yards(draw):
        """Inputs, the exact results, and PyTorch's in several orders."""
        gen = generator("512", mods, dtype, dims, draw)
        *tensors, grad_out = (randn(gen, *shape, dtype=dtype) for shape in shapes)
        rules, mask = modifiers(mods, gen, dtype)
        exact = with_gradients(reference.flash_attn, f64(tensors), f64(grad_out), **f64(rules))
        yards = [
            of_torch(tensors, grad_out, mask, yard_dtype(dtype), order)
            for order in (torch.arange(KEYS), *orders(gen, KEYS)[1:])
        ]
        return (tensors, grad_out, rules), [x.detach() for x in exact], yards

    def yards_of(draw, which):
        _, exact, yards = exact_and_yards(draw)
        return [(yard[which], exact[which]) for yard in yards]

    (tensors, grad_out, rules), exact, _ = exact_and_yards(0)
    got = with_gradients(torch_gpukern.flash_attn, tensors, grad_out, **rules)
    for i, (x, ref, name) in enumerate(zip(got, exact, ("out", "dq", "dk", "dv"), strict=True)):
        assert x.dtype == dtype
        # the elements of a row share the roundings of its scores
        assert_close_as(partial(yards_of, which=i), x, ref, name, sources=2 * 4 * ROWS)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_packed(dtype):
    """Two sequences packed have the bits of two calls, gradients too."""
    gen, lengths = generator("512 packed", dtype), (33, 70)
    tokens = sum(lengths)
    q, k, v, grad_out = (randn(gen, tokens, h, 512, dtype=dtype) for h in (4, 2, 2, 4))
    starts = torch.tensor([0, 33, tokens], dtype=torch.int32)

    def packed(q, k, v):
        how = {"is_causal": True}
        return torch_gpukern.flash_attn_varlen(q, k, v, starts, starts, 70, 70, **how)

    def apart(q, k, v):
        outs = []
        for rows in (slice(0, 33), slice(33, tokens)):
            x = (y[rows].transpose(0, 1)[None] for y in (q, k, v))
            outs.append(torch_gpukern.flash_attn(*x, is_causal=True)[0].transpose(0, 1))
        return torch.cat(outs)

    got, wanted = (with_gradients(f, (q, k, v), grad_out) for f in (packed, apart))
    exact = with_gradients(apart, f64((q, k, v)), f64(grad_out))
    for x, y, ref in zip(got, wanted, exact, strict=True):
        assert_close_as([y.to(yard_dtype(dtype))], x, ref.detach())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("batch", (([1, 130, 0, 33], [1, 1, 1, 1]), ([65, 300], [65, 17])), ids=str)
def test_paged(batch, dtype):
    case = Paged(generator("512 paged", batch, dtype), *batch, 8, 2, 512, 512, 16, dtype)
    how = {"cu_seqlens_q": case.cu_seqlens_q, "max_seqlen_q": max(case.queries)}
    out, lse = torch_gpukern.paged_attn(*case.args(), **how, return_lse=True)
    check_paged(case, out, lse, {})


def test_what_the_devices_serve():
    served = [d for d in (256, 264, 512, 513) if ops.serves_head_dim(d, False)]
    assert served == [256, 264, 512]
    assert [d for d in (256, 264, 512) if ops.serves_head_dim(d, True)] == [256]


def test_what_cuda_refuses():
    """By the same check on fake tensors, which need no GPU."""
    law = "q has head_dim 512; supported on CUDA are multiples of 8 from 8 to 256; wider heads run"
    with FakeTensorMode():
        dense, packed, pages = (
            torch.empty(shape, device="cuda")
            for shape in ((1, 2, 4, 512), (4, 2, 512), (5, 16, 2, 512))
        )
        starts, lens, table = (
            torch.empty(shape, dtype=torch.int32, device="cuda") for shape in ((2,), (4,), (4, 1))
        )
        with pytest.raises(ValueError, match=f"flash_attn: {law}"):
            torch_gpukern.flash_attn(dense, dense, dense)
        with pytest.raises(ValueError, match=f"flash_attn_varlen: {law}"):
            torch_gpukern.flash_attn_varlen(packed, packed, packed, starts, starts, 4, 4)
        out = torch_gpukern.paged_attn(packed, pages, pages, table, lens)
        assert out.shape == packed.shape
