# SPDX-License-Identifier: BSD-3-Clause
"""Shared by the commands: number arguments, tables, progress bars and device names."""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

MOST = (1 << 63) - 1  # the largest size of a tensor


def whole(least: int, most: int = MOST) -> Callable[[str], int]:
    """The argparse type of an integer from `least` to `most`."""

    def parse(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            bound = f"{least} or more" if value < least else f"at most {most}"
            raise argparse.ArgumentTypeError(f"must be {bound}, got {value}")
        return value

    parse.__name__ = "int"  # argparse's error text has this name if int() fails
    return parse


def table(rows: Sequence[Sequence[str]]) -> str:
    """Text in columns: the first is aligned to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    )


def fields(rows: Sequence[tuple[str, object]]) -> str:
    """Text with a line for each (name, value)."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)


def device_of(text: str) -> torch.device:
    """The device of that name. Raises ValueError if no call can run on it."""
    try:
        device = torch.device(text)
    except RuntimeError:  # torch's own text lists device types that this build does not have
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {text}; it must be cpu, cuda or cuda:<index>")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {text}, and torch {torch.__version__} finds no CUDA device")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device is {text}; there are {torch.cuda.device_count()} CUDA devices, counted from 0"
        )
    return device


def with_progress(items: Sequence, what: str) -> Iterator:
    """Yields the items and names each on stderr: in a progress bar if tqdm is installed, otherwise
    in a line of its own."""
    for item, bar in _counted(items, what, "shape", lambda item: f": {item}"):
        if bar is not None:
            bar.set_postfix_str(str(item))
        yield item


def progress(items: Iterable, what: str, unit: str) -> Iterator:
    """As `with_progress`, without names."""
    for item, _ in _counted(items, what, unit, lambda item: ""):
        yield item


def bar_on_terminal(what: str, unit: str, count: Callable[[], int]) -> Any:
    """A tqdm bar of `count()` items, which the caller advances. None if stderr is not a terminal or
    tqdm is not installed; then `count` is not called."""
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=count(), desc=what, unit=unit)


def _counted(
    items: Iterable, what: str, unit: str, name: Callable[[object], str]
) -> Iterator[tuple]:
    try:
        from tqdm import tqdm
    except ImportError:
        of = f" of {len(items)}" if hasattr(items, "__len__") else ""
        for i, item in enumerate(items):
            print(f"{what} {i + 1}{of}{name(item)}", file=sys.stderr, flush=True)
            yield item, None
        return
    bar = tqdm(items, desc=what, unit=unit)
    for item in bar:
        yield item, bar
