# SPDX-License-Identifier: BSD-3-Clause
"""NVTX ranges around the ops, for Nsight Systems' timeline.

>>> from torch_gpukern import profiling
>>> with profiling.nvtx():
...     model(x)

A range covers the host's work for one call of an op and has the op's name, `gpukern::gemm`. The ops
of a backward have ranges of their own, in the thread that runs them. Nsight shows the kernels below
the range (`nsys profile --trace cuda,nvtx`).

**No cost when off**: the entry functions of the ops are replaced only while ranges are on, and
restored afterwards. **Under torch.compile** nothing breaks and nothing is recompiled, because the
compiled code calls the op's entry function. So a function that was compiled without ranges has them
inside `nvtx()`. Code that calls an op without Python has no ranges: torch.jit.script, AOTInductor,
the C API and a replayed CUDA graph.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from ._library import is_compiling, ops
from .ops.define import Op

__all__ = ["nvtx"]

_lock = threading.Lock()
_active: list["nvtx"] = []  # started and not stopped; the last one's options count
# .range: whether this thread is inside a range. An op may call another one, which then gets none.
_inside = threading.local()


class nvtx:
    """Switches NVTX ranges on for every thread of the process. Use it as a context manager, or call
    `start` and `stop`.

    Args:
        shapes: add the shapes of the op's tensors to a range's name:
            ``gpukern::gemm [64, 32] [32, 16]``.

    Raises:
        RuntimeError: on entering, if torch is built without NVTX (a CPU build).
    """

    def __init__(self, shapes: bool = False):
        self.shapes = shapes

    def start(self) -> "nvtx":
        """Switches ranges on. After several starts, they stay on until each has been stopped."""
        try:
            torch.cuda.nvtx.mark("gpukern: ranges on")
        except RuntimeError as error:
            raise RuntimeError(
                f"torch_gpukern.profiling.nvtx: torch {torch.__version__} has no NVTX: {error}"
            ) from error
        with _lock:
            if not _active:
                _replace(on=True)
            _active.append(self)
        return self

    def stop(self) -> None:
        """Switches ranges off. Raises ValueError if they were not started by this object."""
        with _lock:
            if self not in _active:
                raise ValueError("torch_gpukern.profiling.nvtx: stop without start")
            _active.remove(self)
            if not _active:
                _replace(on=False)

    def __enter__(self) -> "nvtx":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


# ---- the entry functions of an op ----------------------------------------------------------------

# (id of holder, attribute) -> (holder, function without a range, function with one)
_entries: dict[tuple[int, str], tuple[Any, Callable, Callable]] = {}


def _replace(on: bool) -> None:
    """Puts the functions with a range (`on`) or without one into every holder: torch.ops, and the
    shortcuts that the public functions call directly."""
    if not _entries:
        for op in Op.every:
            packet = getattr(ops, op.name)
            holders = [(op, "unguarded"), (op.overload, "_op"), (packet, "_op")]
            # the function that Python calls instead of the op if a gradient is wanted
            if op.differentiate is not None:
                holders.append((op, "differentiate"))
            if "out" in packet.overloads():
                holders.append((packet.out, "_op"))
            for holder, attribute in holders:
                plain = getattr(holder, attribute)
                ranged = _ranged(plain, op.qualified)
                if holder is packet:  # torch.jit.script finds an op by the function in its packet
                    torch.jit._builtins._register_builtin(ranged, op.qualified)
                _entries[id(holder), attribute] = holder, plain, ranged
    for (_, attribute), (holder, plain, ranged) in _entries.items():
        setattr(holder, attribute, ranged if on else plain)


def _ranged(call: Callable, name: str) -> Callable:
    """`call` inside an NVTX range."""

    @functools.wraps(call)
    def ranged(*args: Any, **kwargs: Any) -> Any:
        if is_compiling() or getattr(_inside, "range", False):
            return call(*args, **kwargs)
        _inside.range = True
        torch.cuda.nvtx.range_push(_title(name, args, kwargs))
        try:
            return call(*args, **kwargs)
        finally:
            torch.cuda.nvtx.range_pop()
            _inside.range = False

    return ranged


def _title(name: str, args: tuple, kwargs: dict[str, Any]) -> str:
    """The text of a range: the op's name and, if wanted, the shapes of its tensors."""
    last = _active[-1:]  # a copy: another thread may stop the ranges meanwhile
    if not (last and last[0].shapes):
        return name
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    return " ".join([name, *(str(list(x.shape)) for x in tensors)])
