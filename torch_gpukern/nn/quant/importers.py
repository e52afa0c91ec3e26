# SPDX-License-Identifier: BSD-3-Clause
"""Importers of weights that other tools quantised: GPTQ, AWQ, torchao's Int4Tensor, and
compressed-tensors' 8-bit floats.

Each takes the tensors as they are in files and returns a `QuantizedLinear` with exactly the same
weight. Codes are repacked and never rounded again.
"""

from typing import Any

import torch
from torch import Tensor

from ...ops import pack_weight
from .quantized import QuantizedLinear
from .schemes import E4M3, Tensors, ceil_div

__all__ = ["from_awq", "from_compressed_tensors", "from_gptq", "from_torchao"]

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column, of eight, whose code is nibble i of a word


def _fields(words: Tensor, bits: int) -> Tensor:
    """int32 [..., W] -> codes int32 [..., W, 32 / bits], low bits first. Codes of 3 bits are
    [..., W / 3, 32], because three words hold 32 of them."""
    if bits == 3:
        low, middle, high = (words.long() & 0xFFFFFFFF).unflatten(-1, (-1, 3)).unbind(-1)
        places = torch.arange(0, 63, 3, device=words.device)
        first = ((low | middle << 32).unsqueeze(-1) >> places) & 7
        rest = ((middle >> 31 | high << 1).unsqueeze(-1) >> places[:11]) & 7
        return torch.cat([first, rest], -1).int()
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    return (words.unsqueeze(-1) >> shifts) & (2**bits - 1)


def _check(
    owner: str, name: str, t: Any, dtype: torch.dtype | None, shape: tuple[int, ...]
) -> None:
    if not isinstance(t, Tensor):
        raise ValueError(f"{owner}: {name} must be a Tensor, got {type(t).__name__}")
    if dtype is not None and t.dtype is not dtype:
        raise ValueError(f"{owner}: {name} must be {str(dtype)[6:]}, got {str(t.dtype)[6:]}")
    if tuple(t.shape) != shape:
        raise ValueError(f"{owner}: {name} must have shape {list(shape)}, got {list(t.shape)}")


def _matrix(owner: str, name: str, t: Any, dtype: torch.dtype) -> tuple[int, int]:
    if isinstance(t, Tensor) and t.dim() != 2:
        raise ValueError(f"{owner}: {name} must have two dimensions, got shape {list(t.shape)}")
    _check(owner, name, t, dtype, tuple(getattr(t, "shape", ())))
    return t.shape[0], t.shape[1]


def _count(owner: str, name: str, t: Any) -> int:
    """Groups: the first dimension of scales."""
    if not isinstance(t, Tensor) or t.dim() != 2 or not t.is_floating_point():
        got = f"{str(t.dtype)[6:]} {list(t.shape)}" if isinstance(t, Tensor) else type(t).__name__
        raise ValueError(f"{owner}: {name} must be floating, [groups, N], got {got}")
    return t.shape[0]


def _groups(owner: str, k: int, count: int) -> None:
    if count < 1 or k % count or (count > 1 and k // count not in (16, 32, 64, 128, 256)):
        raise ValueError(
            f"{owner}: groups must have 16, 32, 64, 128, 256 or all of K {k}, got {count} groups"
        )


def _layer(
    owner: str, recipe: str, n: int, k: int, tensors: Tensors, bias: Tensor | None
) -> QuantizedLinear:
    if bias is not None:
        _check(owner, "bias", bias, None, (n,))
        if bias.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"{owner}: bias must be float32, bfloat16 or float16, got {str(bias.dtype)[6:]}"
            )
    layer = QuantizedLinear.__new__(QuantizedLinear)
    torch.nn.Module.__init__(layer)
    layer.register_parameter(
        "bias", None if bias is None else torch.nn.Parameter(bias.detach(), requires_grad=False)
    )
    layer._hold(recipe, k, n, tensors)
    return layer


def kept(scale: Tensor) -> Tensor:
    """A checkpoint's scales as a layer holds them: those of 16 bits as they are, others in
    float32."""
    if scale.dtype not in (torch.bfloat16, torch.float16):
        scale = scale.float()
    return scale.contiguous()


def _with_zeros(
    owner: str, codes: Tensor, zeros: Tensor, scales: Tensor, bits: int, bias: Tensor | None
) -> QuantizedLinear:
    """codes [N, K] and zeros [G, N] int32, from 0; scales [G, N]"""
    n, k = codes.shape
    scale = scales.float()
    if bits <= 4:
        tensors = {
            "weight_packed": pack_weight(codes.to(torch.uint8), "uint4"),
            "weight_scale": kept(scales),
            "weight_zero": zeros.to(torch.uint8).contiguous(),
        }
        return _layer(owner, "w4-zero", n, k, tensors, bias)
    packed = pack_weight((codes - 128).to(torch.int8), "int8")
    tensors = {"weight_packed": packed, "weight_scale": kept(scales)}
    if bool((zeros == 128).all()):
        return _layer(owner, "w8", n, k, tensors, bias)
    return _layer(
        owner,
        "w8-shift",
        n,
        k,
        {**tensors, "weight_shift": ((128 - zeros) * scale).contiguous()},
        bias,
    )


def from_gptq(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    g_idx: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    bits: int = 4,
    version: int = 1,
) -> QuantizedLinear:
    """A layer of GPTQ's tensors.

    Args:
        qweight: int32 [K * bits / 32, N], codes along K, low bits first.
        qzeros: int32 [G, N * bits / 32], zero points along N.
        scales: [G, N] floating.
        g_idx: int32 [K], the group of each k. If groups are not in order (act-order), the layer
            sorts its input's columns.
        bias: [N].
        bits: 2, 3, 4 or 8. Codes of 2 and 3 bits take 4 bits in the layer.
        version: 1: files hold a zero point less one, modulo 2^bits; 2 ("gptq_v2"): the zero point.

    Raises:
        ValueError: a dtype or shape that does not fit; groups of several sizes.

    Frantar et al., "GPTQ" (2022), arXiv:2210.17323.
    """
    who = "from_gptq"
    if bits not in (2, 3, 4, 8) or version not in (1, 2):
        raise ValueError(
            f"{who}: bits must be 2, 3, 4 or 8 and version 1 or 2, got {bits} and {version}"
        )
    rows, n = _matrix(who, "qweight", qweight, torch.int32)
    groups = _count(who, "scales", scales)
    # that many codes lie in that many words
    words, each = (3, 32) if bits == 3 else (1, 32 // bits)
    if rows % words:
        raise ValueError(
            f"{who}: qweight must have a multiple of 3 rows for codes of 3 bits, got {rows}"
        )
    k = rows // words * each
    _check(who, "scales", scales, None, (groups, n))
    _check(who, "qzeros", qzeros, torch.int32, (groups, ceil_div(n, each) * words))
    _groups(who, k, groups)
    codes = _fields(qweight.mT, bits).flatten(1)
    zeros = _fields(qzeros, bits).flatten(1)[:, :n]
    if version == 1:
        zeros = (zeros + 1) % 2**bits
    order = None
    if g_idx is not None:
        _check(who, "g_idx", g_idx, None, (k,))
        order = torch.sort(g_idx, stable=True).indices
        want = torch.arange(groups, device=g_idx.device).repeat_interleave(k // groups)
        if not torch.equal(g_idx[order].long(), want):
            raise ValueError(
                f"{who}: g_idx must have {k // groups} columns in each of the {groups} groups"
            )
        if torch.equal(order, torch.arange(k, device=order.device)):
            order = None
        else:
            codes = codes[:, order]
    layer = _with_zeros(who, codes, zeros, scales, bits, bias)
    if order is not None:
        layer.order_input(order)
    return layer


def from_awq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, *, bias: Tensor | None = None
) -> QuantizedLinear:
    """A layer of AWQ's 4-bit tensors ("gemm" version).

    Args:
        qweight: int32 [K, N / 8]: nibble i of a word is column 0, 2, 4, 6, 1, 3, 5, 7 of eight.
        qzeros: int32 [G, N / 8] likewise.
        scales: [G, N] floating.
        bias: [N].

    Raises:
        ValueError: a dtype or shape that does not fit.

    Lin et al., "AWQ" (2023), arXiv:2306.00978.
    """
    who = "from_awq"
    k, words = _matrix(who, "qweight", qweight, torch.int32)
    n, groups = 8 * words, _count(who, "scales", scales)
    _check(who, "scales", scales, None, (groups, n))
    _check(who, "qzeros", qzeros, torch.int32, (groups, n // 8))
    _groups(who, k, groups)
    nibble = torch.tensor(_AWQ_ORDER, device=qweight.device).argsort()  # of each column
    codes, zeros = (_fields(t, 4)[..., nibble].flatten(1) for t in (qweight, qzeros))
    return _with_zeros(who, codes.mT, zeros, scales, 4, bias)


def from_torchao(weight: Any, *, bias: Tensor | None = None) -> QuantizedLinear:
    """A layer of torchao's Int4Tensor, or of anything with its ``qdata``, ``scale`` and
    ``zero_point``.

    Args:
        weight: ``qdata`` [N, K / 2] int8 or uint8, two's complement, even k in the low half;
            ``scale`` and ``zero_point`` [K / g, N]: the weight is ``code * scale + zero_point``. An
            ``act_pre_scale`` is refused.
        bias: [N].

    Raises:
        ValueError: a dtype or shape that does not fit.
    """
    who = "from_torchao"
    if getattr(weight, "act_pre_scale", None) is not None:
        raise ValueError(f"{who}: act_pre_scale is not served; multiply it into the layer before")
    qdata, scale, zero = weight.qdata, weight.scale, weight.zero_point
    if qdata.dim() != 2 or qdata.dtype not in (torch.int8, torch.uint8):
        raise ValueError(
            f"{who}: qdata must be int8 or uint8 [N, K / 2], got {str(qdata.dtype)[6:]} "
            f"{list(qdata.shape)}"
        )
    n, k, groups = qdata.shape[0], 2 * qdata.shape[1], scale.shape[0]
    _check(who, "scale", scale, None, (groups, n))
    _check(who, "zero_point", zero, None, (groups, n))
    _groups(who, k, groups)
    raw = qdata.view(torch.uint8)
    codes = ((torch.stack((raw & 15, raw >> 4), -1).flatten(1).int() ^ 8) - 8).to(torch.int8)
    tensors = {
        "weight_packed": pack_weight(codes, "int4"),
        "weight_scale": kept(scale),
    }
    if not bool((zero != 0).any()):
        return _layer(who, "w4", n, k, tensors, bias)
    return _layer(
        who, "w4-shift", n, k, {**tensors, "weight_shift": zero.float().contiguous()}, bias
    )


def from_compressed_tensors(
    weight: Tensor,
    weight_scale: Tensor,
    input_scale: Tensor | None = None,
    *,
    bias: Tensor | None = None,
) -> QuantizedLinear:
    """A layer of compressed-tensors' 8-bit floats (vLLM's and DeepSeek's files have the same
    tensors).

    Args:
        weight: float8_e4m3fn [N, K].
        weight_scale: [] or [1], [N] or [N, 1], or [ceil(N / 128), ceil(K / 128)] (blocks),
            floating; or the powers of two of MXFP8, uint8 or float8_e8m0fnu [N, ceil(K / 32)].
        input_scale: [] or [1]: the one scale of all activations (static). None: activations are
            quantised when they come, with a scale for each row, for each 1x128 beside a weight in
            blocks, or for each 1x32 beside MXFP8.
        bias: [N].

    Raises:
        ValueError: a dtype or shape that does not fit; an input_scale beside blocks, or one that is
            no finite number above 0.
    """
    who = "from_compressed_tensors"
    n, k = _matrix(who, "weight", weight, E4M3)
    for name, given in (("weight_scale", weight_scale), ("input_scale", input_scale)):
        if not isinstance(given, Tensor) and (given is not None or name == "weight_scale"):
            raise ValueError(f"{who}: {name} must be a Tensor, got {type(given).__name__}")
    blocks, thirties = (ceil_div(n, 128), ceil_div(k, 128)), (n, ceil_div(k, 32))
    is_mx = (
        weight_scale.dtype in (torch.uint8, torch.float8_e8m0fnu) and weight_scale.shape == thirties
    )
    scale = weight_scale.float()
    tensors = {"weight_codes": weight.detach().contiguous()}
    if is_mx:
        recipe, tensors["weight_scale"] = (
            "mxfp8",
            weight_scale.contiguous().view(torch.float8_e8m0fnu),
        )
    elif not weight_scale.is_floating_point():  # bytes are powers of two, not numbers
        raise ValueError(
            f"{who}: weight_scale must be floating, or uint8 of shape {list(thirties)} (MXFP8), "
            f"got {str(weight_scale.dtype)[6:]} {list(scale.shape)}"
        )
    elif scale.numel() == 1 and scale.dim() <= 2:
        recipe, tensors["weight_scale"] = "fp8", scale.reshape(1, 1).expand(n, 1).contiguous()
    elif scale.shape in ((n,), (n, 1)):
        recipe, tensors["weight_scale"] = "fp8", scale.reshape(n, 1).contiguous()
    elif scale.shape == blocks:
        recipe, tensors["weight_scale"] = "fp8-block", scale.contiguous()
    else:
        raise ValueError(
            f"{who}: weight_scale must have shape [], [1], [{n}], [{n}, 1] or {list(blocks)}, or "
            f"as bytes {list(thirties)}, "
            f"got {list(scale.shape)}"
        )
    if input_scale is not None:
        if recipe in ("fp8-block", "mxfp8") or input_scale.numel() != 1:
            raise ValueError(
                f"{who}: input_scale must be one number and goes with scales of the whole weight "
                f"or of rows, "
                f"got {list(input_scale.shape)} beside {list(scale.shape)}"
            )
        if not input_scale.is_meta and not 0 < input_scale.item() < float("inf"):
            raise ValueError(
                f"{who}: input_scale must be a finite number above 0, got {input_scale.item()}"
            )
        recipe, tensors["input_scale"] = "fp8-static", input_scale.float().reshape(())
    return _layer(who, recipe, n, k, tensors, bias)
