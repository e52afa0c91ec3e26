# SPDX-License-Identifier: BSD-3-Clause
"""Finds the layout that has the given offsets."""

from __future__ import annotations

from collections.abc import Sequence

from .core import IntTuple, Layout, Leaves, of_leaves, unflatten


def leaves_of_values(values: Sequence[int]) -> Leaves | None:
    """The (size, stride) pairs of the unique coalesced layout with these values. None if there is
    none; values[0] must be 0.

    The modes are read off one after the other: the indices covered so far are 0 to `covered` - 1, so
    values[covered] is the next stride. Its mode ends where the multiples of the stride end.
    """
    n = len(values)
    covered = 1
    found: Leaves = []
    if values[0] != 0:
        return None
    while covered < n:
        stride = values[covered]
        size = 2
        while covered * size < n and values[covered * size] == size * stride:
            size += 1
        if n % (covered * size):
            return None
        found.append((size, stride))
        covered *= size
    # Only the values at the modes' own indices were compared, so compare all.
    offsets = [0]
    for size, stride in found:
        offsets = [o + i * stride for i in range(size) for o in offsets]
    return found or [(1, 0)] if offsets == list(values) else None


def from_values(values: Sequence[int], shape: IntTuple | None = None) -> Layout | None:
    """The layout whose offset at index i is values[i]; None if there is none. values[0] must be 0.

    shape: the nesting of the result. Each number in it becomes one mode or a tuple of modes.
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
