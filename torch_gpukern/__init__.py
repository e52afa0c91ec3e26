# SPDX-License-Identifier: BSD-3-Clause
"""gpukern: the matrix products, attention and row operations of a transformer, as PyTorch ops with
kernels in C and CUDA.

The public functions below do the same as the ops ``torch.ops.gpukern.*`` of the same names. They
add type hints, documentation and ``return_lse``. `reference` defines every op in plain PyTorch.
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
from torch import uint8 as _uint8

from . import ops as ops
from ._library import ops as _ops
from .masks import (
    AttnMask,
    MaskTiles,
    attn_mask_blocks,
    attn_mask_columns,
    attn_mask_of,
    attn_mask_ranges,
    tree_mask,
)
from .ops import *  # noqa: F403
from .ops.define import Op as _Op
from .ops.flash_attn_masked import scores_of as _scores_of
from .ops.paged_tree import check_mask as _check_paged_mask
from .paged.kv_cache import KVCacheScales, OutOfPages, PagedKVCache
from .tuning import cache as _cache

if TYPE_CHECKING:
    from . import distributed as distributed
    from . import integrations as integrations
    from . import layout as layout
    from . import nn as nn
    from . import optim as optim
    from . import profiling as profiling
    from . import serve as serve

__all__ = [
    "AttnMask",
    "Explanation",
    "KVCacheScales",
    "MaskTiles",
    "OutOfPages",
    "PagedKVCache",
    "attn_mask_blocks",
    "attn_mask_columns",
    "attn_mask_of",
    "attn_mask_ranges",
    "check_errors",
    "explain",
    "tree_mask",
]
__all__ += ops.__all__

__version__: str = _ops.version.default()

_OfCudaGemm = _TypedDict(
    "_OfCudaGemm",
    {
        "device": str,
        "class": str,
        "instances": list[str],
        "accumulate": str,
    },
    total=False,
)


class Explanation(_OfCudaGemm):
    """The type of `explain`'s result; its docstring describes the entries. device, class and
    instances exist only for a CUDA gemm, accumulate only for float8_e4m3fn attention."""

    instance: str
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
    "kl_div",
    "moe_unpermute",
    "dropout",
    "dropout_add",
    "bias_gelu_dropout",
]
EXPLAINED: tuple[str, ...] = _get_args(Explained)


def check_errors() -> None:
    """Raises IndexError if a CUDA kernel found invalid contents in a block table, lengths or slots.

    A kernel clamps such contents, and the next call of any op raises the error. This function
    raises it now, and resets it. It does not wait for the device; synchronise first to cover
    everything launched so far. On the CPU, the call with such contents raises itself, and this
    function does nothing.
    """
    _ops.check_errors.default()


ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90")


def explain(op: Explained, *args: _Any, arch: str | None = None, **kwargs: _Any) -> Explanation:
    """The kernel instance that a call would run, and what the call costs, without running it.

    Args:
        op: one of ``torch_gpukern.EXPLAINED``: the products, ``"flash_attn"``,
            ``"flash_attn_varlen"``, ``"flash_attn_bwd"``, ``"paged_attn"``, ``"rope_kv_write"``,
            the quantising ops, and the forward of the row operations.
        *args: the arguments of ``torch.ops.gpukern.<op>``. For float8_e4m3fn attention, they are
            those of the public function.
        **kwargs: the same by name; for paged_attn also ``attn_mask``, which is one kernel on CUDA.
        arch: ``"sm_80"``, ``"sm_86"``, ``"sm_89"`` or ``"sm_90"``: explains what a GPU of that
            architecture (an A100, RTX 3090, L40S, H100) would run, wherever the tensors are. No GPU
            is needed, and contents of tensors on the CPU are not read. A build without the CUDA
            kernels (GPUKERN_CUDA=0) answers only for gemm.

    Returns:
        An `Explanation`:

        - ``instance``: the name of the kernel instance.
        - ``isa``: its instruction set or architecture.
        - ``tile``: its block sizes. gemm: MB NB KB, and on the CPU MR * NR. Attention: BQ BKV and
          the keys of a context chunk. 0 is unused.
        - ``tasks``: independent tasks.
        - ``chunks``: the parts into which the keys are split; 1 if they are not.
        - ``bytes``: the least memory traffic: inputs read once and outputs written once.
        - ``flops``: a multiply-add counts as two; keys that no query sees do not count.
        - ``workspace_bytes``: memory beyond inputs and outputs.
        - ``waves``: on CUDA, tasks over those that the device runs at once; 0 on the CPU, and with
          `arch` if only a device could tell.
        - ``bound_us``: on CUDA, the larger of bytes over the device's bandwidth and flops over its
          peak, in microseconds; 0 on the CPU.
        - ``preferred``: whether the instance was chosen by tuning (``python -m torch_gpukern tune
          gemm``).
        - ``device``, ``class``, ``instances``: for a gemm on CUDA, the device's name, the call's tuning
          key, and every instance that can serve the call, the default one first.
        - ``accumulate``: for flash_attn and flash_attn_varlen with float8_e4m3fn: ``"fast"`` or
          ``"precise"``, also if the argument was ``"auto"``.

    On CUDA, contents of index tensors are not read. Packed sequences are assumed to be equally
    long, kv_start, kv_end and q_start to be 0, Sk and Sk - Sq, and a paged sequence to fill its row
    of the block table.

    Raises:
        ValueError: an op that cannot be explained, or arguments that the op does not take.
        MemoryError: there is no memory for the results, which are allocated, though not written.
    """
    if op not in EXPLAINED:
        raise ValueError(f"explain: op is '{op}'; expected one of {', '.join(EXPLAINED)}")
    if getattr(args[0] if args else kwargs.get("q"), "dtype", None) is _e4m3 and op in (
        "flash_attn",
        "flash_attn_varlen",
    ):
        op = f"{op}_fp8"  # the raw op that the function of that name calls
    if op == "flash_attn" and {"attn_mask", "bias", "distance_bias"} & set(kwargs):
        op, kwargs = _masked_call(args, kwargs)
    if op == "paged_attn" and kwargs.get("attn_mask") is not None:
        op, kwargs = _masked_paged_call(args, kwargs, arch)
    elif op == "paged_attn":
        kwargs.pop("attn_mask", None)
    declared = next(x for x in _Op.every if x.name == op)
    declared.refuse_types(args, kwargs)
    declared.refuse_non_bools(args, kwargs)
    if arch is not None:
        _ops.explain_for.default(arch)
    try:
        with _in_memory():
            return _json.loads(getattr(_ops, f"explain_{op}").default(*args, **kwargs))
    finally:
        if arch is not None:
            _ops.explain_for.default("")


def _masked_call(args: tuple, kwargs: dict[str, _Any]) -> tuple[str, dict[str, _Any]]:
    """The name and keyword arguments of the raw op that serves flash_attn with a mask or a bias."""
    q, k = (kwargs[name] if name in kwargs else args[i] for i, name in enumerate("qk"))
    names = ("attn_mask", "mask_store", "mask_seq_q", "mask_seq_k", "bias", "distance_bias")
    given = {name: kwargs.get(name) for name in ("attn_mask", "bias", "distance_bias")}
    return "flash_attn_masked", kwargs | dict(
        zip(names, _scores_of("flash_attn", q, k, **given), strict=True)
    )


def _masked_paged_call(
    args: tuple, kwargs: dict[str, _Any], arch: str | None
) -> tuple[str, dict[str, _Any]]:
    """The name and keyword arguments of the raw op that serves paged_attn with a mask on CUDA."""
    q, attn_mask = args[0] if args else kwargs["q"], kwargs["attn_mask"]
    _check_paged_mask(attn_mask, kwargs.pop("prefix", None))
    if kwargs.get("alibi_slopes") is not None or (arch is None and q.device.type == "cpu"):
        raise ValueError(
            "explain: paged_attn with attn_mask is several calls on the CPU and with alibi_slopes; "
            "pass arch='sm_90' for the kernel that serves attn_mask on CUDA without alibi_slopes, "
            "or leave out attn_mask"
        )
    return "paged_attn_masked", kwargs | {"attn_mask": attn_mask.view(_uint8)}


@_contextlib.contextmanager
def _in_memory() -> _Iterator[None]:
    """Context that turns the allocation errors of torch into a MemoryError that says what to do."""
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
        """Imports a submodule at its first use, since most programs need none of them."""
        if name in ("distributed", "integrations", "layout", "nn", "optim", "profiling", "serve"):
            return _importlib.import_module(f".{name}", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_cache.use()
