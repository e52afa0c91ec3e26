# SPDX-License-Identifier: BSD-3-Clause
"""gpukern: the matrix multiplication and the attention of a transformer, as PyTorch ops with
kernels in C and CUDA.

The public functions below and the ops ``torch.ops.gpukern.*`` of the same names do the same; the
functions add type hints, documentation and ``return_lse``. `reference` states every op in PyTorch.
"""

import contextlib as _contextlib
import importlib as _importlib
import json as _json
import re as _re
from collections.abc import Iterator as _Iterator
from typing import TYPE_CHECKING
from typing import Any as _Any
from typing import Literal as _Literal
from typing import TypedDict as _TypedDict
from typing import get_args as _get_args

from torch import float8_e4m3fn as _e4m3

from ._library import ops as _ops
from .masks import (
    AttnMask,
    MaskTiles,
    attn_mask_blocks,
    attn_mask_columns,
    attn_mask_of,
    attn_mask_ranges,
)
from .ops import (
    QuantizedAttn,
    attn_dropout_mask,
    attn_merge,
    bias_gelu_dropout,
    cross_entropy,
    dequantize,
    dropout,
    dropout_add,
    dropout_mask,
    flash_attn,
    flash_attn_varlen,
    geglu,
    gemm,
    grouped_gemm,
    kv_cache_write,
    layer_norm,
    linear,
    linear_cross_entropy,
    log_softmax,
    pack_weight,
    paged_attn,
    quantize,
    quantize_attn,
    rms_norm,
    rms_norm_quantize,
    rope,
    rope_kv_write,
    scaled_gemm,
    silu_mul_quantize,
    softmax,
    sparse_gemm,
    sparse_pack,
    swiglu,
    unpack_weight,
    weight_gemm,
)
from .ops.define import Op as _Op
from .ops.flash_attn_masked import scores_of as _scores_of
from .paged.kv_cache import KVCacheScales, OutOfPages, PagedKVCache
from .tuning import cache as _cache

if TYPE_CHECKING:
    from . import distributed as distributed
    from . import integrations as integrations
    from . import layout as layout
    from . import nn as nn
    from . import optim as optim
    from . import profiling as profiling

__all__ = [
    "AttnMask",
    "Explanation",
    "KVCacheScales",
    "MaskTiles",
    "OutOfPages",
    "PagedKVCache",
    "QuantizedAttn",
    "attn_dropout_mask",
    "attn_mask_blocks",
    "attn_mask_columns",
    "attn_mask_of",
    "attn_mask_ranges",
    "attn_merge",
    "bias_gelu_dropout",
    "check_errors",
    "cross_entropy",
    "dequantize",
    "dropout",
    "dropout_add",
    "dropout_mask",
    "explain",
    "flash_attn",
    "flash_attn_varlen",
    "geglu",
    "gemm",
    "grouped_gemm",
    "kv_cache_write",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "log_softmax",
    "pack_weight",
    "paged_attn",
    "quantize",
    "quantize_attn",
    "rms_norm",
    "rms_norm_quantize",
    "rope",
    "rope_kv_write",
    "scaled_gemm",
    "silu_mul_quantize",
    "softmax",
    "sparse_gemm",
    "sparse_pack",
    "swiglu",
    "unpack_weight",
    "weight_gemm",
]

__version__: str = _ops.version.default()

_OfCudaGemm = _TypedDict(
    "_OfCudaGemm",
    {
        "device": str,
        "class": str,
        "instances": list[str],
        "rows": list[str],
        "accumulate": str,
    },
    total=False,
)


class Explanation(_OfCudaGemm):
    """What `explain` returns: each entry is described there. A CUDA gemm alone has device, class
    and instances, and float8_e4m3fn attention alone has accumulate. row and rows are the old names
    of instance and instances, kept for one version."""

    instance: str
    row: str
    isa: str
    tile: list[int]
    tasks: int
    chunks: int
    bytes: float
    flops: float
    workspace_bytes: int
    waves: float
    bound_us: float
    preferred: bool


Explained = _Literal[
    "gemm",
    "flash_attn",
    "flash_attn_varlen",
    "flash_attn_bwd",
    "paged_attn",
    "scaled_gemm",
    "weight_gemm",
    "grouped_gemm",
    "sparse_gemm",
    "rope_kv_write",
    "quantize",
    "dequantize",
    "silu_mul_quantize",
    "rms_norm_quantize",
    "rms_norm",
    "layer_norm",
    "softmax",
    "log_softmax",
    "swiglu",
    "geglu",
    "rope",
    "cross_entropy",
    "dropout",
    "dropout_add",
    "bias_gelu_dropout",
]
EXPLAINED: tuple[str, ...] = _get_args(Explained)


def check_errors() -> None:
    """Raises IndexError if a CUDA kernel met bad contents in a block table, lengths or slots.

    Such contents are clamped on the device and reported by the next call of an op; this asks at
    once, and forgets what it reported. It does not wait for the device: synchronise first to hear
    of everything launched so far. On the CPU such contents raise in the call itself, and this does
    nothing.
    """
    _ops.check_errors.default()


ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90")


def explain(op: Explained, *args: _Any, arch: str | None = None, **kwargs: _Any) -> Explanation:
    """The kernel instance that a call would run, and what it costs, without running it.

    Args:
        op: one of ``torch_gpukern.EXPLAINED``: the products, ``"flash_attn"``,
            ``"flash_attn_varlen"``, ``"flash_attn_bwd"``, ``"paged_attn"``, ``"rope_kv_write"``,
            what quantises, and the forward of the row operations.
        *args: the arguments of ``torch.ops.gpukern.<op>``, by position
        arch: ``"sm_80"``, ``"sm_86"``, ``"sm_89"`` or ``"sm_90"``: what a GPU of that architecture would
            run (an A100, RTX 3090, L40S, H100), wherever the tensors are. No GPU is needed, and of
            tensors on the CPU no contents are read; the build must have the CUDA kernels
            (GPUKERN_CUDA=1).
        **kwargs: or by name.

    Returns:
        An `Explanation`:

        - ``instance``: name of the kernel instance; ``row``, its old name, stays for one version.
        - ``isa``: its instruction set or architecture.
        - ``tile``: block sizes; gemm MB NB KB and on the CPU MR * NR, attention BQ BKV and the span of a
          context chunk; 0 is unused.
        - ``tasks``: independent units of work.
        - ``chunks``: parts that the keys are split into, 1 where they are not.
        - ``bytes``: what the op must move at least, inputs read once and outputs written once.
        - ``flops``: a multiply-add counts two, keys that no query sees count nothing.
        - ``workspace_bytes``: memory beyond inputs and outputs.
        - ``waves``: on CUDA, tasks over those that the device runs at once; 0 on the CPU, and with
          `arch` where only a device could tell.
        - ``bound_us``: on CUDA, the larger of bytes over the device's bandwidth and flops over its peak, in
          microseconds; 0 on the CPU.
        - ``preferred``: whether the instance was preferred since it was tuned (``python -m torch_gpukern tune gemm``).
        - ``device``, ``class``, ``instances``: of a gemm on CUDA, the device's name, the tuning key that a
          preferred instance serves, and every instance that takes the call, the default one first; ``rows`` is
          the old name of ``instances``.
        - ``accumulate``: of flash_attn and flash_attn_varlen of float8_e4m3fn, whose arguments are the function's: ``"fast"`` or
          ``"precise"``, what ``"auto"`` came to.

    On CUDA index tensors are not read: packed sequences count as equal ones, kv_start, kv_end and
    q_start
    as 0, Sk and Sk - Sq, and a paged sequence as one that fills its row of the block table.

    Raises:
        ValueError: an op that cannot be explained, or arguments that the op does not take.
        MemoryError: results for which there is no memory: they are allocated, though not written.
    """  # noqa: E501
    if op not in EXPLAINED:
        raise ValueError(f"explain: op is '{op}'; expected one of {', '.join(EXPLAINED)}")
    if getattr(args[0] if args else kwargs.get("q"), "dtype", None) is _e4m3 and op in (
        "flash_attn",
        "flash_attn_varlen",
    ):
        op = f"{op}_fp8"  # the raw op that the function of that name calls
    if op == "flash_attn" and {"attn_mask", "bias", "distance_bias"} & set(kwargs):
        op, kwargs = _masked_call(args, kwargs)
    declared = next(x for x in _Op.every if x.name == op)
    declared.refuse_types(args, kwargs)
    declared.refuse_non_bools(args, kwargs)
    if arch is not None and not _ops.cuda_kernels.default():
        raise ValueError(
            f"explain: arch is {arch}, and this gpukern was built without CUDA kernels, whose "
            f"tables say what runs there; "
            "GPUKERN_CUDA=1 pip install . builds them where nvcc is, without a GPU"
        )
    if arch is not None:
        _ops.explain_for.default(arch)
    try:
        with _in_memory():
            return _json.loads(getattr(_ops, f"explain_{op}").default(*args, **kwargs))
    finally:
        if arch is not None:
            _ops.explain_for.default("")


def _masked_call(args: tuple, kwargs: dict[str, _Any]) -> tuple[str, dict[str, _Any]]:
    """flash_attn with a mask or a bias as a call of the raw op behind it."""
    q, k = (kwargs[name] if name in kwargs else args[i] for i, name in enumerate("qk"))
    names = ("attn_mask", "mask_store", "mask_seq_q", "mask_seq_k", "bias", "distance_bias")
    given = {name: kwargs.get(name) for name in ("attn_mask", "bias", "distance_bias")}
    return "flash_attn_masked", kwargs | dict(
        zip(names, _scores_of("flash_attn", q, k, **given), strict=True)
    )


@_contextlib.contextmanager
def _in_memory() -> _Iterator[None]:
    """MemoryError in our words where torch's allocator finds no memory for a tensor of a call that
    is explained."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if "allocate" not in text and "out of memory" not in text:
            raise
        found = _re.search(r"allocate (\d[\d.]* ?[KMGT]?i?[Bb]\w*)", text)
        raise MemoryError(
            f"explain: no memory for a tensor of {found[1] if found else 'this size'}: explain "
            f"has the call's arguments and results, though "
            "it writes neither; ask for smaller sizes"
        ) from None


if not TYPE_CHECKING:

    def __getattr__(name: str) -> _Any:
        """Imported when they are first asked for: most programs never do."""
        if name in ("distributed", "integrations", "layout", "nn", "optim", "profiling"):
            return _importlib.import_module(f".{name}", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_cache.use()
