# SPDX-License-Identifier: BSD-3-Clause
"""Finds the layout that has given offsets."""

from __future__ import annotations

from collections.abc import Sequence

from .core import IntTuple, Layout, Leaves, of_leaves, unflatten


def leaves_of_values(values: Sequence[int]) -> Leaves | None:
    """The unique coalesced layout with these values, the first being 0; None if there is none."""
    n, unit = len(values), 1
    found: Leaves = []
    if values[0] != 0:
        return None
    while unit < n:
        step, run = values[unit], 2
        while unit * run < n and values[unit * run] == run * step:
            run += 1
        if n % (unit * run):
            return None
        found.append((run, step))
        unit *= run
    built = [0]
    for s, d in found:
        built = [o + i * d for i in range(s) for o in built]
    return found or [(1, 0)] if built == list(values) else None


def from_values(values: Sequence[int], shape: IntTuple | None = None) -> Layout | None:
    """The layout whose offset at index i is values[i]; None if there is none. values[0] must be 0.

    shape: the nesting of the result: each of its leaves becomes one mode or a tuple of modes.
    """
    if shape is None:
        leaves = leaves_of_values(values)
        return of_leaves(leaves) if leaves else None
    parts, before = [], 1
    shapes = Layout(shape).leaves
    for s, _ in shapes:
        leaves = leaves_of_values([values[i * before] for i in range(s)])
        if leaves is None:
            return None
        parts.append(of_leaves(leaves))
        before *= s
    r = rebuilt(parts, shape)
    return r if r.offsets == list(values) else None


def rebuilt(parts: Sequence[Layout], like: IntTuple) -> Layout:
    """The layouts as modes, nested as `like`."""
    return Layout(
        unflatten(iter([p.shape for p in parts]), like),
        unflatten(iter([p.stride for p in parts]), like),
    )
