# SPDX-License-Identifier: BSD-3-Clause
"""Importers of GPTQ, AWQ, torchao and compressed-tensors. Loops here pack tensors as those files
have them.
"""

from types import SimpleNamespace

import pytest
import torch
from conftest import generator, randn

from torch_gpukern import nn as gnn

N, K, GROUP = 48, 128, 32


def parts(bits=4, symmetric=False):
    gen = generator("importers", bits)
    top = 2**bits
    q = torch.randint(0, top, (N, K), generator=gen)
    zero = (
        torch.full((K // GROUP, N), top // 2)
        if symmetric
        else torch.randint(0, top, (K // GROUP, N), generator=gen)
    )
    scale = ((torch.rand(K // GROUP, N, generator=gen) + 0.5) / top).half()
    return q, zero, scale


def weight_of(q, zero, scale, group_of=None):
    """The weight by its definition, element by element of K."""
    group_of = [k // GROUP for k in range(K)] if group_of is None else group_of
    columns = [(q[:, k] - zero[g]).double() * scale[g].double() for k, g in enumerate(group_of)]
    return torch.stack(columns, 1)


def words(x, bits, order=None):
    """Packs codes into int32 words along the last dimension. order[i] is the position within a word
    whose code goes into field i."""
    if bits == 3:  # codes of 3 bits are a stream of bits across words
        streams = [sum(code << (3 * i) for i, code in enumerate(row)) for row in x.tolist()]
        count = x.shape[1] * 3 // 32 if x.shape[1] % 32 == 0 else (x.shape[1] + 31) // 32 * 3
        rows = [[stream >> (32 * i) & 0xFFFFFFFF for i in range(count)] for stream in streams]
        return torch.tensor(
            [[w - 2**32 if w >= 2**31 else w for w in row] for row in rows], dtype=torch.int32
        )
    each = 32 // bits
    order = range(each) if order is None else order
    rows = []
    for row in x.tolist():
        packed = [
            sum(row[at + place] << (bits * i) for i, place in enumerate(order))
            for at in range(0, len(row), each)
        ]
        rows.append([w - 2**32 if w >= 2**31 else w for w in packed])
    return torch.tensor(rows, dtype=torch.int32)


def check(layer, w, exact=True):
    """Checks the decoded weight and products with it."""
    assert (
        torch.equal(layer.decoded(torch.float32), w.float())
        if exact
        else (layer.decoded() - w).abs().max() < 1e-6
    )
    x = randn(generator("importers x"), 9, K, dtype=torch.float32).bfloat16()
    with torch.no_grad():
        got = layer(x).double()
    want = x.double() @ w.mT + (0 if layer.bias is None else layer.bias.double())
    assert (got - want).norm() <= 0.006 * want.norm()
    other = gnn.QuantizedLinear(K, N, layer.bias is not None, layer.scheme)
    other.load_state_dict(layer.state_dict())
    with torch.no_grad():
        assert torch.equal(other(x), layer(x))


@pytest.mark.parametrize("version", (1, 2))
@pytest.mark.parametrize("bits", (2, 3, 4, 8))
def test_gptq(bits, version):
    q, zero, scale = parts(bits)
    stored = (zero - 1) % 2**bits if version == 1 else zero
    args = None, words(stored, bits), scale
    qweight = words(q, bits).mT.contiguous()  # along K
    layer = gnn.from_gptq(qweight, *args[1:], bits=bits, version=version, bias=torch.ones(N))
    check(layer, weight_of(q, zero, scale), exact=bits == 4)
    in_order = torch.arange(K, dtype=torch.int32) // GROUP
    assert "input_order" not in dict(
        gnn.from_gptq(qweight, *args[1:], in_order, bits=bits, version=version).named_buffers()
    )


def test_gptq_of_symmetric_8_bits():
    q, zero, scale = parts(8, symmetric=True)
    layer = gnn.from_gptq(words(q, 8).mT.contiguous(), words(zero - 1, 8), scale, bits=8)
    assert layer.scheme == "w8"
    check(layer, weight_of(q, zero, scale))


def test_gptq_in_the_order_of_activations():
    q, zero, scale = parts()
    group_of = torch.arange(K)[torch.randperm(K, generator=generator("order"))] // GROUP
    layer = gnn.from_gptq(
        words(q, 4).mT.contiguous(), words((zero - 1) % 16, 4), scale, group_of.int()
    )
    w = weight_of(q, zero, scale, group_of.tolist())
    check(layer, w)
    x = randn(generator("order x"), 3, K).requires_grad_()
    (dx,) = torch.autograd.grad(layer(x).sum(), x)
    torch.testing.assert_close(dx.double(), w.sum(0).expand(3, K), rtol=2e-2, atol=2e-2)


def test_awq():
    q, zero, scale = parts()
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    layer = gnn.from_awq(words(q.mT, 4, order), words(zero, 4, order), scale)
    check(layer, weight_of(q, zero, scale))


def test_torchao():
    q, _, scale = parts()
    code = q - 8
    scale, shift = (
        scale.bfloat16(),
        (torch.rand(K // GROUP, N, generator=generator("shift")) - 0.5).bfloat16(),
    )
    qdata = ((code[:, ::2] & 15) | ((code[:, 1::2] & 15) << 4)).to(torch.uint8).view(torch.int8)
    each = lambda x: x.double().repeat_interleave(GROUP, 0).mT  # noqa: E731
    tensor = SimpleNamespace(qdata=qdata, scale=scale, zero_point=shift, act_pre_scale=None)
    check(gnn.from_torchao(tensor), code.double() * each(scale) + each(shift), exact=False)
    tensor.zero_point = torch.zeros_like(shift)
    layer = gnn.from_torchao(tensor, bias=torch.ones(N))
    assert layer.scheme == "w4"
    check(layer, code.double() * each(scale))
    tensor.act_pre_scale = scale
    with pytest.raises(ValueError, match="from_torchao: act_pre_scale is not served"):
        gnn.from_torchao(tensor)


def test_compressed_tensors():
    gen = generator("compressed")
    n, k = 200, 300
    w = randn(gen, n, k).to(torch.float8_e4m3fn)
    x = randn(gen, 7, k).bfloat16()
    for scale, recipe in [
        (torch.tensor([0.5]), "fp8"),
        ((torch.rand(n, 1, generator=gen) + 0.5).bfloat16(), "fp8"),
        (torch.rand(n, generator=gen) + 0.5, "fp8"),
        (torch.rand(2, 3, generator=gen) + 0.5, "fp8-block"),
        (torch.randint(120, 130, (n, 10), generator=gen).to(torch.uint8), "mxfp8"),
        (
            torch.randint(120, 130, (n, 10), generator=gen)
            .to(torch.uint8)
            .view(torch.float8_e8m0fnu),
            "mxfp8",
        ),
    ]:
        layer = gnn.from_compressed_tensors(w, scale)
        if recipe == "fp8-block":
            spread = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
        elif recipe == "mxfp8":
            spread = scale.view(torch.float8_e8m0fnu).float().repeat_interleave(32, 1)[:, :k]
        else:
            spread = scale.reshape(-1, 1)
        want = w.double() * spread.double()
        assert layer.scheme == recipe and torch.equal(layer.decoded(), want.float())
        y = x.double() @ want.mT
        assert (layer(x).double() - y).norm() < 0.04 * y.norm()
    layer = gnn.from_compressed_tensors(w, torch.tensor(0.5), torch.tensor([0.01]))
    assert layer.scheme == "fp8-static" and layer.input_scale == 0.01
    with pytest.raises(ValueError, match="from_compressed_tensors: input_scale must be one number"):
        gnn.from_compressed_tensors(w, torch.ones(2, 3), torch.tensor(1.0))
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="input_scale must be a finite number above 0, got"):
            gnn.from_compressed_tensors(w, torch.tensor(0.5), torch.tensor(bad))
    with pytest.raises(
        ValueError,
        match="weight_scale must have shape \\[\\], \\[1\\], \\[200\\], \\[200, 1\\] or \\[2, "
        "3\\], or as bytes \\[200, 10\\], got \\[3, 2\\]",
    ):
        gnn.from_compressed_tensors(w, torch.ones(3, 2))


def test_what_is_refused():
    q, zero, scale = parts()
    good = words(q, 4).mT.contiguous(), words(zero, 4), scale
    for change, text in [
        ({"qweight": good[0].long()}, "from_gptq: qweight must be int32, got int64"),
        ({"qzeros": good[1][:, :3]}, "from_gptq: qzeros must have shape \\[4, 6\\], got \\[4, "
                                     "3\\]"),
        ({"scales": scale[:, :3]}, "from_gptq: scales must have shape \\[4, 48\\], got \\[4, 3\\]"),
        ({"bits": 5}, "from_gptq: bits must be 2, 3, 4 or 8"),
        ({"g_idx": torch.zeros(K, dtype=torch.int32)}, "from_gptq: g_idx must have 32 columns in "
                                                       "each of the 4 groups"),
        ({"scales": scale.repeat(3, 1), "qzeros": good[1].repeat(3, 1)}, "groups must have 16, "
                                                                         "32, 64, 128, 256 or all "
                                                                         "of K 128, got 12 groups"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=text):
            gnn.from_gptq(
                **(dict(zip(("qweight", "qzeros", "scales"), good, strict=True)) | change)
            )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_addends_are_not_rounded_before_the_sum(dtype):
    """If activations have a mean, code * scale and the addend give large products that cancel."""
    gen, n, k = generator("cancel"), 64, 4096
    w = (
        randn(gen, n, k) * 0.02 + (randn(gen, n, k // 128) * 0.01).repeat_interleave(128, 1)
    ).unflatten(1, (-1, 128))
    scale = ((w.amax(-1) - w.amin(-1)) / 15).bfloat16()
    zero = (w.amin(-1) + 8 * scale.float()).bfloat16()
    q = ((w - zero[..., None].float()) / scale[..., None].float()).round().clamp(-8, 7)
    exact = (q.double() * scale[..., None].double() + zero[..., None].double()).flatten(1)
    codes = q.to(torch.int8).flatten(1)
    qdata = (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)
    layer = gnn.from_torchao(SimpleNamespace(qdata=qdata, scale=scale.mT, zero_point=zero.mT))
    x = (randn(gen, 64, k) + 1).to(dtype)
    want = x.double() @ exact.mT
    error, dense = (
        (y.double() - want).square().mean().sqrt() for y in (layer(x), x @ exact.to(dtype).mT)
    )
    assert error < 1.5 * dense, (error, dense)


def test_whose_tensors_are_no_tensors_of_theirs_are_refused():
    """Bytes that are not MXFP8 are not read as numbers. A bias that does not fit is refused at
    import, not when the layer is called."""
    w, q = torch.ones(40, 64).to(torch.float8_e4m3fn), torch.ones(4, 8, dtype=torch.int32)
    half, byte = torch.ones(2, 3), torch.full((40, 2), 127, dtype=torch.uint8)
    of_fp8, mx = (
        "from_compressed_tensors: ",
        "weight_scale must be floating, or uint8 of shape \\[40, 2\\] \\(MXFP8\\), got ",
    )
    for make, text in [
        (lambda: gnn.from_compressed_tensors(w, byte[:, 0]), of_fp8 + mx + "uint8 \\[40\\]"),
        (lambda: gnn.from_compressed_tensors(w, byte[0, 0]), of_fp8 + mx + "uint8 \\[\\]"),
        (lambda: gnn.from_compressed_tensors(w, byte[:1, :1]), of_fp8 + mx + "uint8 \\[1, 1\\]"),
        (
            lambda: gnn.from_compressed_tensors(w, byte.view(torch.int8)),
            of_fp8 + mx + "int8 \\[40, 2\\]",
        ),
        (
            lambda: gnn.from_compressed_tensors(w, 1.0),
            of_fp8 + "weight_scale must be a Tensor, got float",
        ),
        (
            lambda: gnn.from_compressed_tensors(w, half[0, 0], 1.0),
            of_fp8 + "input_scale must be a Tensor, got float",
        ),
        (
            lambda: gnn.from_compressed_tensors(w[0], byte),
            of_fp8 + "weight must have two dimensions, got shape \\[64\\]",
        ),
        (
            lambda: gnn.from_compressed_tensors(None, byte),
            of_fp8 + "weight must be a Tensor, got NoneType",
        ),
        (
            lambda: gnn.from_compressed_tensors(w, byte, bias=torch.ones(3)),
            of_fp8 + "bias must have shape \\[40\\], got \\[3\\]",
        ),
        (
            lambda: gnn.from_compressed_tensors(w, byte, bias=torch.ones(40, dtype=torch.int32)),
            of_fp8 + "bias must be float32, bfloat16 or float16, got int32",
        ),
        (
            lambda: gnn.from_gptq(q[0], q, half),
            "from_gptq: qweight must have two dimensions, got shape \\[8\\]",
        ),
        (
            lambda: gnn.from_gptq(q, q, None),
            "from_gptq: scales must be floating, \\[groups, N\\], got NoneType",
        ),
        (
            lambda: gnn.from_awq(q, q, q),
            "from_awq: scales must be floating, \\[groups, N\\], got int32 \\[4, 8\\]",
        ),
    ]:
        with pytest.raises(ValueError, match=text):
            make()
