# SPDX-License-Identifier: BSD-3-Clause
"""NVTX ranges around the ops, for Nsight Systems' timeline.

>>> from torch_gpukern import profiling
>>> with profiling.nvtx():
...     model(x)

A range is what the host does for one call of an op, named `gpukern::gemm`; a backward's ops have
ranges of their own, in the thread that runs them. Kernels are found below it in the timeline (`nsys
profile --trace cuda,nvtx`).

**Off it is free**: the ops' ways in are replaced while ranges are wanted, and are then the very
objects that they were before. **Under torch.compile** nothing breaks and nothing is compiled again:
the graph holds the op, and the compiled code calls it where the range is; so a function that was
compiled without ranges has them inside `nvtx()`, and none outside. Code that reaches the op without
Python has none: torch.jit.script, AOTInductor, the C API, a replayed CUDA graph.
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
_active: list["nvtx"] = []  # who has switched ranges on, the last one's wishes count
# .range: this thread is in a range, so that an op that calls its raw op has one
_inside = threading.local()


class nvtx:
    """Switches NVTX ranges on for every thread of the process; a context manager, or `start` and
    `stop`.

    Args:
        shapes: whether a range's name also has the shapes of the op's tensors:
            ``gpukern::gemm [64, 32] [32, 16]``.

    Raises:
        RuntimeError: on entering, where torch is built without NVTX (a CPU build).
    """

    def __init__(self, shapes: bool = False):
        self.shapes = shapes

    def start(self) -> "nvtx":
        """Ranges from here on. Started twice, by one or by several, they last until all have
        stopped."""
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
        """Raises ValueError where it was not started."""
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


# ---- the ways into an op -------------------------------------------------------------------------

# (holder, attribute) -> without a range, with one
_ways: dict[tuple[int, str], tuple[Any, Callable, Callable]] = {}


def _replace(on: bool) -> None:
    """Exchanges all ways in: what Python calls of torch.ops, and what the public functions call
    below it."""
    if not _ways:
        for op in Op.every:
            packet = getattr(ops, op.name)
            holders = [(op, "bare"), (op.overload, "_op"), (packet, "_op")]
            # called in the op's place once its arguments' types are known
            if op.differentiate is not None:
                holders.append((op, "differentiate"))
            if "out" in packet.overloads():
                holders.append((packet.out, "_op"))
            for holder, attribute in holders:
                plain = getattr(holder, attribute)
                ranged = _ranged(plain, op.qualified)
                if holder is packet:  # torch.jit.script asks for an op by what the packet calls
                    torch.jit._builtins._register_builtin(ranged, op.qualified)
                _ways[id(holder), attribute] = holder, plain, ranged
    for (_, attribute), (holder, plain, ranged) in _ways.items():
        setattr(holder, attribute, ranged if on else plain)


def _ranged(call: Callable, name: str) -> Callable:
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
    if not (_active and _active[-1].shapes):
        return name
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    return " ".join([name, *(str(list(x.shape)) for x in tensors)])
