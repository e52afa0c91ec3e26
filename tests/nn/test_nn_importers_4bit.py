# SPDX-License-Identifier: BSD-3-Clause
"""Importers of compressed-tensors' 4-bit formats, gpt-oss and bitsandbytes: tensors packed and
decoded here by loops in float64, as the formats are published."""

import pytest
import torch
from conftest import generator, randn
from test_nn_importers import words

from torch_gpukern import nn as gnn

N, K = 48, 128
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip


def e2m1(code):
    return -E2M1[code - 8] if code >= 8 else E2M1[code]


def check(layer, w, exact=True):
    decoded = layer.decoded(torch.float32).double()
    if exact:
        assert torch.equal(decoded, w.float().double())
    else:
        torch.testing.assert_close(decoded, w, rtol=3e-7, atol=0)
    x = randn(generator("importers x"), 9, w.shape[1]).bfloat16()
    with torch.no_grad():
        got = layer(x).double()
    want = x.double() @ w.mT + (0 if layer.bias is None else layer.bias.double())
    assert (got - want).norm() <= 0.006 * want.norm()


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 128])
def test_pack_quantized(bits, zeros, group, order):
    gen, half = generator("pack-quantized", bits), 2 ** (bits - 1)
    q = torch.randint(-half, half, (N, K), generator=gen)
    zero = torch.randint(-half, half, (N, K // group), generator=gen) * zeros
    scale = ((torch.rand(N, K // group, generator=gen) + 0.5) / half).bfloat16()
    group_of = torch.arange(K) // group
    if order:
        group_of = group_of[torch.randperm(K, generator=gen)]
    w = torch.stack(
        [(q[:, k] - zero[:, g]).double() * scale[:, g].double() for k, g in enumerate(group_of)], 1
    )
    layer = gnn.from_pack_quantized(
        words(q + half, bits),
        scale,
        torch.tensor([N, K]),
        words((zero + half).mT, bits).mT if zeros else None,
        group_of if order else None,
        bits=bits,
        bias=torch.linspace(-1, 1, N),
    )
    check(layer, w)
    expected = {(4, False): "w4", (4, True): "w4-zero", (8, False): "w8", (8, True): "w8-shift"}
    assert layer.scheme == expected[bits, zeros]


def test_nvfp4():
    gen = generator("nvfp4")
    codes = torch.randint(0, 16, (N, K), generator=gen)
    scale = (torch.rand(N, K // 16, generator=gen) * 400 + 1).to(torch.float8_e4m3fn)
    whole = torch.tensor([2688.0 / 3.7])
    w = (
        torch.tensor(
            [
                [e2m1(c) * s for c, s in zip(row, scales)]
                for row, scales in zip(
                    codes.tolist(), scale.double().repeat_interleave(16, 1).tolist(), strict=True
                )
            ],
            dtype=torch.float64,
        )
        / whole.double()
    )
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    check(gnn.from_nvfp4(packed, scale, whole, bias=torch.ones(N)), w, exact=False)


def test_mxfp4():
    gen = generator("mxfp4")
    codes = torch.randint(0, 16, (N, K), generator=gen)
    scales = torch.randint(118, 132, (N, K // 32), generator=gen)
    w = torch.tensor(
        [
            [e2m1(c) * 2.0 ** (scales[i, j // 32].item() - 127) for j, c in enumerate(row)]
            for i, row in enumerate(codes.tolist())
        ],
        dtype=torch.float64,
    )
    blocks = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8).view(N, K // 32, 16)
    check(gnn.from_mxfp4(blocks, scales.to(torch.uint8)), w)


def nf4(nested):
    gen, size = generator("nf4"), 64
    codes = torch.randint(0, 16, (N * K,), generator=gen)
    count = N * K // size
    state = {
        "quant_map": torch.tensor(NF4),
        "blocksize": size,
        "shape": (N, K),
        "quant_type": "nf4",
    }
    if nested:
        state |= {
            "absmax": torch.randint(0, 256, (count,), generator=gen).to(torch.uint8),
            "nested_absmax": torch.rand(-(-count // 40), generator=gen) + 0.5,
            "nested_quant_map": torch.linspace(-1, 1, 256),
            "nested_blocksize": 40,
            "nested_offset": 1.75,
        }
        absmax = [
            state["nested_quant_map"].double()[c] * state["nested_absmax"].double()[i // 40] + 1.75
            for i, c in enumerate(state["absmax"].tolist())
        ]
    else:
        state["absmax"] = torch.rand(count, generator=gen) + 0.1
        absmax = state["absmax"].double()
    table = torch.tensor(NF4, dtype=torch.float32).double()
    w = torch.stack([table[c] * absmax[i // size] for i, c in enumerate(codes.tolist())]).view(N, K)
    packed = (codes[0::2] << 4 | codes[1::2]).to(torch.uint8)[:, None]
    return packed, state, w


@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes(nested):
    packed, state, w = nf4(nested)
    bias = torch.linspace(-1, 1, N)
    layer = gnn.from_bitsandbytes(packed, state, bias=bias)
    assert type(layer) is gnn.Linear and layer.weight.dtype is torch.bfloat16
    torch.testing.assert_close(layer.weight.double(), w, rtol=2**-8, atol=0)
    four = gnn.from_bitsandbytes(packed, state, "w4", bias=bias)
    assert four.scheme == "w4"
    assert (four.decoded().double() - w).norm() < 0.15 * w.norm()
    want = gnn.QuantizedLinear(K, N, True, "w4")
    want._hold("w4", K, N, gnn.quant.schemes.SCHEMES["w4"].pack(w.float()))
    torch.testing.assert_close(four.decoded(), want.decoded(), rtol=1e-5, atol=1e-5)


def test_refusals():
    packed, state, _ = nf4(False)
    one = torch.ones(1)
    e4m3 = torch.ones(N, K // 16).to(torch.float8_e4m3fn)
    bytes_ = torch.zeros(N, K // 2, dtype=torch.uint8)
    cases = (
        (
            lambda: gnn.from_bitsandbytes(packed, state, "w5"),
            "from_bitsandbytes: recipe must be one",
        ),
        (
            lambda: gnn.from_bitsandbytes(packed, {}),
            "from_bitsandbytes: state has no absmax, quant_m",
        ),
        (
            lambda: gnn.from_bitsandbytes(packed[1:], state),
            "from_bitsandbytes: weight must be uint8",
        ),
        (
            lambda: gnn.from_nvfp4(bytes_, e4m3, 0 * one),
            "from_nvfp4: weight_global_scale must be a f",
        ),
        (lambda: gnn.from_nvfp4(bytes_, e4m3[1:], one), "from_nvfp4: weight_scale must have shape"),
        (
            lambda: gnn.from_nvfp4(bytes_[:, 1:], e4m3, one),
            "from_nvfp4: K must be a multiple of 16",
        ),
        (
            lambda: gnn.from_mxfp4(bytes_.view(2, N // 2, K // 32, 16), bytes_),
            r"from_mxfp4: blocks must be \[N, K / 32, 16\], of one expert",
        ),
        (
            lambda: gnn.from_pack_quantized(bytes_.int(), torch.ones(N, 1), (N, K), bits=3),
            "from_pack_quantized: bits must be 4 or 8, got 3",
        ),
        (
            lambda: gnn.from_pack_quantized(bytes_.int(), torch.ones(N, 1), (N, K)),
            "from_pack_quantized: weight_packed must have shape",
        ),
    )
    for call, text in cases:
        with pytest.raises(ValueError, match=f"^{text}"):
            call()
