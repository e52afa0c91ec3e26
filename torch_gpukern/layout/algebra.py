# SPDX-License-Identifier: BSD-3-Clause
"""The algebra of layouts: coalesce, compose, complement, inverses, and the widest common vector of
two layouts.

`compose` is sound and complete. It returns a layout exactly if one that is compatible with b has
the values a(b(c)), and otherwise names the mode that is to blame. `complement` raises `Refusal` if
it would leave holes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Union

from .core import (
    IntTuple,
    Layout,
    Leaves,
    Refusal,
    as_layout,
    coalesced,
    join,
    of_leaves,
    unflatten,
)
from .swizzle import Swizzle, Swizzled, parse
from .values import from_values, leaves_of_values, rebuilt

# A divisor or right operand of a composition: a layout, a size (meaning the compact layout), or a
# sequence or dict of these for the modes; None leaves a mode unchanged.
Tiler = Union[  # noqa: UP007
    Layout, str, int, Sequence["Tiler"], dict[str, "Tiler"], None
]


# ---- coalesce ------------------------------------------------------------------------------------


def coalesce(layout: Layout | str, profile: IntTuple | None = None) -> Layout:
    """The unique layout with the fewest modes that is the same function of the index. A layout of
    one element gives 1:0.

    profile: a tuple keeps the modes separate and coalesces each by its entry: (1, 1) coalesces two
    modes one by one. Without it, indices beyond the end may map differently: (4,1):(1,0) -> 4:1.
    """
    layout = as_layout(layout)
    if isinstance(profile, tuple):
        if len(profile) > layout.rank:
            raise ValueError(
                f"coalesce: the profile has {len(profile)} modes, {layout} has {layout.rank}"
            )
        modes = layout.modes
        done = [coalesce(mode, p) for mode, p in zip(modes, profile)] + modes[len(profile) :]
        return join(*done, names=layout.names)
    return of_leaves(coalesced(layout.leaves))


def same(a: Layout, b: Layout) -> bool:
    """Whether both are the same function of the index."""
    return coalesce(a) == coalesce(b) and a.size == b.size


# ---- compose -------------------------------------------------------------------------------------


def _by_division(outer: Leaves, shape: int, stride: int, reach: list[int]) -> Leaves | None:
    """Composes outer with the single mode shape:stride by division. The mode must begin and end at
    boundaries of outer's modes, or stay inside one of them.

    reach[i] grows by the largest coordinate of mode i that is used. None means that this method
    does not decide.
    """
    found: Leaves = []
    if stride < 0:
        return None
    for m, (room, step) in enumerate(outer):
        if (shape - 1) * stride < room:
            reach[m] += (shape - 1) * stride
            found.append((shape, 0 if shape == 1 else stride * step))
            return found
        if stride % room == 0:
            stride //= room
            continue
        if room % stride or shape % (room // stride):
            return None
        reach[m] += room - stride
        found.append((room // stride, stride * step))
        shape //= room // stride
        stride = 1
    return None


def compose_layouts(a: Layout, b: Layout) -> Layout:
    outer, n = coalesced(a.leaves), a.size
    reach, parts, proven = [0] * len(outer), [], True
    values: list[int] = []
    for m, (s, d) in enumerate(b.leaves):
        leaves = _by_division(outer, s, d, reach)
        if leaves is None:
            proven, end = False, (s - 1) * d
            if not 0 <= end < n:
                raise Refusal(
                    "compose",
                    "b",
                    b,
                    m,
                    f"it reaches offset {end}, and a has the indices 0 to {n - 1}",
                )
            values = values or a.offsets
            leaves = leaves_of_values([values[i * d] for i in range(s)])
            if leaves is None:
                raise Refusal(
                    "compose", "b", b, m, f"its values under a = {a} have no common stride"
                )
        parts.append(of_leaves(coalesced(leaves)))
    r = rebuilt(parts, b.shape)
    # If no mode of a is used beyond its size, nothing carries over and the parts add up. Otherwise
    # check every value.
    if not proven or any(asked >= room for asked, (room, _) in zip(reach, outer)):
        _check_every_value(a, b, r)
    return r


def _check_every_value(a: Layout, b: Layout, r: Layout) -> None:
    n, values = a.size, a.offsets
    for i, (inner, got) in enumerate(zip(b.offsets, r.offsets)):
        if 0 <= inner < n and values[inner] == got:
            continue
        # blame the highest mode with a coordinate above 0: without it, the modes below it passed
        mode, rest = 0, i
        for m, (s, _) in enumerate(b.leaves):
            if rest % s:
                mode = m
            rest //= s
        if not 0 <= inner < n:
            raise Refusal(
                "compose",
                "b",
                b,
                mode,
                f"it reaches offset {inner}, and a has the indices 0 to {n - 1}",
            )
        why = (
            f"with the modes before it, it carries in a = {a}: a({inner}) is {values[inner]}, "
            f"the strides add up to {got}"
        )
        raise Refusal("compose", "b", b, mode, why)


def compose(a: Layout | Swizzle | Swizzled | str, b: Tiler | Swizzled) -> Layout | Swizzled:
    """The composition R(c) = a(b(c)). Each of b's modes becomes one or more modes of R.

    Args:
        a: a layout, a swizzle or a swizzled layout.
        b: a layout, or a tuple or dict of layouts, one for each of a's modes; None leaves a mode
            unchanged.

    Raises:
        Refusal: b leaves a's domain, or no layout has these values.
    """
    if isinstance(a, str):
        a = parse(a)
    if isinstance(a, Swizzle):
        if isinstance(b, Swizzled):
            raise Refusal("compose", "b", b.layout, None, f"it is swizzled already, by {b.swizzle}")
        return Swizzled(a, tiler_layout(b))
    if isinstance(a, Swizzled):
        return Swizzled(a.swizzle, expect_layout(compose(a.layout, b)), a.offset)
    if isinstance(b, Swizzled):
        return _compose_swizzled(a, b)
    if isinstance(b, (tuple, list, dict)):
        tilers = per_mode("compose", a, b)
        done = [m if t is None else expect_layout(compose(m, t)) for m, t in zip(a.modes, tilers)]
        return join(*done, names=a.names)
    b = tiler_layout(b)
    r = compose_layouts(a, b)
    return Layout(r.shape, r.stride, b.names) if b.names else r


def _compose_swizzled(a: Layout, b: Swizzled) -> Layout | Swizzled:
    """a composed with a swizzled layout. If a is contiguous, the result is b. Otherwise a layout
    with these values is searched."""
    least, most = min(b.offsets), max(b.offsets)
    if least < 0 or most >= a.size:
        reached = least if least < 0 else most
        raise Refusal(
            "compose",
            "b",
            b.layout,
            None,
            f"it reaches offset {reached}, a has the indices 0 to {a.size - 1}",
        )
    if coalesce(a).stride == 1:
        return b
    values = a.offsets
    found = from_values([values[o] for o in b.offsets], b.layout.shape)
    if found is None:
        raise Refusal(
            "compose",
            "b",
            b.layout,
            None,
            f"after {b.swizzle} its values under a = {a} are no layout",
        )
    return found


def expect_layout(x: Layout | Swizzled) -> Layout:
    if isinstance(x, Layout):
        return x
    raise ValueError("a swizzle may only come last: after the layout, not inside of it")


def tiler_layout(tiler: Tiler) -> Layout:
    """The layout of a tiler that is not a tuple: 4 means 4:1."""
    if isinstance(tiler, (Layout, str, int)):
        return as_layout(tiler)
    raise TypeError(f"expected a layout, its text or a size, got {tiler!r}")


def per_mode(op: str, layout: Layout, tiler: Sequence[Tiler] | dict[str, Tiler]) -> list[Tiler]:
    """The tiler of each mode; None for a mode without one."""
    if isinstance(tiler, dict):
        found: list[Tiler] = [None] * layout.rank
        for name, part in tiler.items():
            found[layout.position(name)] = part
        return found
    if len(tiler) > layout.rank:
        raise ValueError(f"{op}: {len(tiler)} tilers for the {layout.rank} modes of {layout}")
    return [*tiler, *[None] * (layout.rank - len(tiler))]


# ---- complement and inverses ---------------------------------------------------------------------


def complement(layout: Layout | str, n: int | None = None) -> Layout:
    """The layout whose offsets, added to those of `layout`, reach every offset below n once, in
    ascending order.

    n is rounded up to a multiple of the layout's extent; the default is cosize. Modes of stride 0
    are ignored. Raises Refusal for overlaps, holes and negative strides.
    """
    layout = as_layout(layout)
    n = layout.cosize if n is None else n
    found: Leaves = []
    filled = 1
    for m, (s, d) in sorted(enumerate(layout.leaves), key=lambda leaf: leaf[1][1]):
        if s == 1 or d == 0:
            continue
        if d < 0:
            raise Refusal(
                "complement", "layout", layout, m, "a negative stride leaves offsets below 0"
            )
        if d % filled:
            what = "overlap" if d < filled else "leave holes"
            why = f"the modes of smaller stride fill blocks of {filled}, of which {d} is no multiple: they {what}"
            raise Refusal("complement", "layout", layout, m, why)
        found.append((d // filled, filled))
        filled = d * s
    found.append((-(-n // filled), filled))
    return of_leaves(coalesced(found))


def right_inverse(layout: Layout | str) -> Layout:
    """The longest layout r with layout(r(i)) = i for every index i of r. It covers the modes that
    are contiguous from offset 0 on."""
    flat = coalesced(as_layout(layout).leaves)
    steps_below, n = [], 1
    for s, _ in flat:
        steps_below.append(n)
        n *= s
    found: Leaves = []
    next_ = 1
    while True:
        m = next((m for m, (s, d) in enumerate(flat) if d == next_ and s > 1), None)
        if m is None:
            return of_leaves(coalesced(found))
        found.append((flat[m][0], steps_below[m]))
        next_ *= flat[m][0]


def left_inverse(layout: Layout | str) -> Layout:
    """A layout r with r(layout(i)) = i for every index i. Its values at other offsets are
    unspecified.

    Raises Refusal for layouts that are not injective, for negative strides, and if a larger stride
    is no multiple of a smaller one.
    """
    layout = as_layout(layout)
    steps_below, n = [], 1
    for s, _ in layout.leaves:
        steps_below.append(n)
        n *= s
    order = sorted(
        (d, s, before, m)
        for m, ((s, d), before) in enumerate(zip(layout.leaves, steps_below))
        if s > 1
    )
    found: Leaves = []
    unit, room = 1, 1
    for i, (d, s, _, m) in enumerate(order):
        if d <= 0:
            raise Refusal("left_inverse", "layout", layout, m, "its stride must be above 0")
        if d % unit or d < room:
            what = (
                f"is no multiple of the next smaller stride {unit}"
                if d % unit
                else f"overlaps the {room} before it"
            )
            raise Refusal("left_inverse", "layout", layout, m, f"stride {d} {what}")
        if i == 0 and d > 1:
            found.append((d, 0))
        elif i:
            found.append((d // unit, order[i - 1][2]))
        unit, room = d, d * s
    if order:
        found.append((order[-1][1], order[-1][2]))
    return of_leaves(coalesced(found))


# ---- vectors and element types -------------------------------------------------------------------


def max_common_layout(a: Layout | str, b: Layout | str) -> Layout:
    """The longest layout r of indices with a(r(i)) = b(r(i)) = i: the elements that are contiguous
    in both."""
    a, b = as_layout(a), as_layout(b)
    if a.size != b.size:
        raise ValueError(
            f"max_common_layout: {a} has {a.size} elements, {b} has {b.size}; both must have as "
            f"many"
        )
    inverse = right_inverse(b)
    try:
        common = coalesce(compose_layouts(a, inverse))
    except Refusal:
        return Layout(1, 0)
    first = common.leaves[0]
    return (
        of_leaves(coalesced(compose_layouts(inverse, Layout(first[0])).leaves))
        if first[1] == 1
        else Layout(1, 0)
    )


def max_common_vector(a: Layout | str, b: Layout | str) -> int:
    """The number of elements that one access may move between the layouts: they are contiguous in
    both."""
    return max_common_layout(a, b).size


def recast(layout: Layout | Swizzled | str, old_bits: int, new_bits: int) -> Layout | Swizzled:
    """The layout of the same memory in elements of new_bits instead of old_bits bits.

    For narrower elements, the mode of stride 1 grows, or a mode of size 1 if there is none. For
    wider elements, the modes that make up an element shrink. Raises Refusal if there is no such
    layout: for partial elements, holes, overlaps and a mode of stride -1.
    """
    if old_bits < 1 or new_bits < 1 or (old_bits % new_bits and new_bits % old_bits):
        raise ValueError(f"recast: {old_bits} and {new_bits} bits; one must divide the other")
    if isinstance(layout, Swizzled):
        offset, left = divmod(layout.offset * old_bits, new_bits)
        if left:
            raise Refusal(
                "recast",
                "layout",
                layout.layout,
                None,
                f"its offset {layout.offset} begins inside of an element",
            )
        inner = expect_layout(recast(layout.layout, old_bits, new_bits))
        return Swizzled(layout.swizzle.recast(old_bits, new_bits), inner, offset)
    layout = as_layout(layout)
    if old_bits == new_bits:
        return layout
    if new_bits < old_bits:
        done = _narrowed(layout, old_bits // new_bits, new_bits)
    else:
        done = _widened(layout, new_bits // old_bits, new_bits)
    like = layout.shape
    return Layout(
        unflatten(iter([s for s, _ in done]), like),
        unflatten(iter([d for _, d in done]), like),
        layout.names,
    )


def _narrowed(layout: Layout, n: int, bits: int) -> Leaves:
    """The leaves after each element has been cut into n."""
    leaves = layout.leaves
    grows = next((m for m, (s, d) in enumerate(leaves) if s > 1 and d == 1), None)
    grows = next((m for m, (s, _) in enumerate(leaves) if s == 1), None) if grows is None else grows
    if grows is None:
        why = (
            f"no mode of stride 1 can hold the {n} elements of {bits} bits that are one of its own"
        )
        raise Refusal("recast", "layout", layout, 0, why)
    return [
        (s * n, 1) if m == grows else (s, d * n if s > 1 else 0) for m, (s, d) in enumerate(leaves)
    ]


def _widened(layout: Layout, n: int, bits: int) -> Leaves:
    """The leaves after n elements have been merged into one. The modes that together cover offsets
    0 to n - 1 vanish or shrink."""
    done: list[tuple[int, int]] = [(s, 0) for s, _ in layout.leaves]
    filled = 1
    split = f"elements of {bits} bits are {n} of its own; they split it"
    for m, (s, d) in sorted(enumerate(layout.leaves), key=lambda leaf: abs(leaf[1][1])):
        if s == 1 or d == 0:
            continue
        if d % n == 0:
            done[m] = s, d // n
            continue
        room = n // filled
        if d != filled or room == 1 or (s % room and room % s):
            raise Refusal("recast", "layout", layout, m, split)
        taken = min(s, room)
        filled *= taken
        done[m] = s // taken, 1 if s > taken else 0
    if filled < n:
        why = f"elements of {bits} bits are {n} of its own, and it holds {filled} of each"
        raise Refusal("recast", "layout", layout, None, why)
    return done
