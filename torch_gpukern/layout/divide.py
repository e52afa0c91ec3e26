# SPDX-License-Identifier: BSD-3-Clause
"""CuTe's divides, which cut a layout into tiles, and products, which repeat a layout.

If tiles do not divide a layout, `logical_divide` rounds up. `overhang` is the number of elements
beyond the end, from which a kernel's predicate follows.
"""

from __future__ import annotations

from .algebra import Tiler, complement, compose_layouts, per_mode, tiler_layout
from .core import Layout, Refusal, as_layout, coalesced, join, of_leaves

# ---- divide --------------------------------------------------------------------------------------


def _divide(layout: Layout, tile: Layout, op: str) -> Layout:
    try:
        rest = complement(tile, layout.size)
    except Refusal as no:
        raise Refusal(op, "tiler", tile, no.mode, no.why) from None
    both = join(tile, rest)
    longer = coalesced(layout.leaves)
    if layout.size == 1:  # a layout of one element is extended with its own stride
        longer = layout.leaves[-1:] or longer
    before = layout.size // longer[-1][0]
    needed = -(-both.cosize // before)
    if needed > longer[-1][0]:  # tiles reach beyond the end: extend the last mode
        longer[-1] = (needed, longer[-1][1])
    try:
        return compose_layouts(of_leaves(longer), both)
    except Refusal as no:
        mode = min(no.mode or 0, len(tile.leaves) - 1)
        raise Refusal(op, "tiler", tile, mode, f"it does not tile {layout}: {no.why}") from None


def logical_divide(layout: Layout | str, tiler: Tiler) -> Layout:
    """Divides a layout into tiles: the result has the modes (inside a tile, over tiles).

    It is the composition of the layout with (tiler, complement of the tiler).

    Args:
        tiler: a layout or a size; or a tuple or dict of them, which divides each mode by its entry;
            None leaves a mode unchanged.

    If tiles do not divide the layout, the number of tiles is rounded up: see `overhang`. Raises
    Refusal if the tiler does not tile the layout.
    """
    layout = as_layout(layout)
    if isinstance(tiler, (tuple, list, dict)):
        tilers = per_mode("logical_divide", layout, tiler)
        done = [m if t is None else logical_divide(m, t) for m, t in zip(layout.modes, tilers)]
        return join(*done, names=layout.names)
    return _divide(layout, tiler_layout(tiler), "logical_divide")


def overhang(layout: Layout | str, tiler: Tiler) -> int:
    """The number of elements of the divided layout that lie beyond the end of the layout. If it is
    0, a kernel needs no predicate."""
    return logical_divide(layout, tiler).size - as_layout(layout).size


def _split(layout: Layout, tiler: Tiler) -> tuple[list[Layout], list[Layout]]:
    """The modes inside a tile and those over tiles."""
    if not isinstance(tiler, (tuple, list, dict)):
        divided = logical_divide(layout, tiler)
        return [divided[0]], [divided[1]]
    tilers = per_mode("divide", layout, tiler)
    divided = logical_divide(layout, tiler)
    inside, over = [], []
    for mode, t in zip(divided.modes, tilers):
        if t is None:
            over.append(mode)
        elif isinstance(t, (tuple, list, dict)):  # a nested tiler divides the modes inside a mode
            one, other = [m[0] for m in mode.modes], [m[1] for m in mode.modes]
            inside.append(join(*one))
            over.append(join(*other))
        else:
            inside.append(mode[0])
            over.append(mode[1])
    return inside, over


def zipped_divide(layout: Layout | str, tiler: Tiler) -> Layout:
    """As `logical_divide`, with one mode inside a tile and one over tiles: ((inside each mode's
    tile), (tiles of each mode, modes without a tiler))."""
    inside, over = _split(as_layout(layout), tiler)
    if not isinstance(tiler, (tuple, list, dict)):
        return join(inside[0], over[0])
    return join(join(*inside), join(*over))


def tiled_divide(layout: Layout | str, tiler: Tiler) -> Layout:
    """As `logical_divide`, with the modes ((inside each mode's tile), tiles of mode 0, of mode 1,
    ...)."""
    inside, over = _split(as_layout(layout), tiler)
    if not isinstance(tiler, (tuple, list, dict)):
        return join(inside[0], *over)
    return join(join(*inside), *over)


def flat_divide(layout: Layout | str, tiler: Tiler) -> Layout:
    """As `logical_divide`, with the modes (inside mode 0's tile, inside mode 1's, ..., tiles of
    mode 0, of mode 1, ...)."""
    inside, over = _split(as_layout(layout), tiler)
    return join(*inside, *over)


# ---- product -------------------------------------------------------------------------------------


def logical_product(layout: Layout | str, copies: Tiler) -> Layout:
    """Repeats a layout: the result has the modes (layout, copies). The copies use the offsets that
    the layout leaves free, in the order that `copies` gives.

    copies: a layout or a size; or a tuple or dict of them, one for each mode.
    """
    layout = as_layout(layout)
    if isinstance(copies, (tuple, list, dict)):
        parts = per_mode("logical_product", layout, copies)
        done = [m if c is None else logical_product(m, c) for m, c in zip(layout.modes, parts)]
        return join(*done, names=layout.names)
    copies = tiler_layout(copies)
    try:
        free = complement(layout, layout.size * copies.cosize)
    except Refusal as no:
        raise Refusal("logical_product", "layout", layout, no.mode, no.why) from None
    try:
        return join(layout, compose_layouts(free, copies))
    except Refusal as no:
        raise Refusal("logical_product", "copies", copies, no.mode, no.why) from None


def _padded(layout: Layout, rank: int) -> Layout:
    modes = layout.modes + [Layout(1, 0)] * (rank - layout.rank)
    return join(*modes)


def _zipped(block: Layout | str, copies: Tiler, copies_first: bool) -> Layout:
    block, copies = as_layout(block), tiler_layout(copies)
    rank = max(block.rank, copies.rank)
    both = logical_product(_padded(block, rank), _padded(copies, rank))
    names = block.names or copies.names
    pairs = [
        join(c, b) if copies_first else join(b, c) for b, c in zip(both[0].modes, both[1].modes)
    ]
    return join(*pairs, names=names if len(names) == rank else ())


def blocked_product(block: Layout | str, copies: Tiler) -> Layout:
    """As `logical_product`, mode by mode: ((block mode 0, copies mode 0), ...). Each block stays
    contiguous."""
    return _zipped(block, copies, False)


def raked_product(block: Layout | str, copies: Tiler) -> Layout:
    """As `logical_product`, mode by mode: ((copies mode 0, block mode 0), ...). The elements of the
    blocks alternate."""
    return _zipped(block, copies, True)


def _product_parts(layout: Layout, copies: Tiler) -> tuple[list[Layout], list[Layout]]:
    product_ = logical_product(layout, copies)
    if not isinstance(copies, (tuple, list, dict)):
        return [product_[0]], product_[1].modes
    parts = per_mode("product", layout, copies)
    pairs = list(zip(product_.modes, parts))
    return [p if c is None else p[0] for p, c in pairs], [p[1] for p, c in pairs if c is not None]


def zipped_product(layout: Layout | str, copies: Tiler) -> Layout:
    """As `logical_product`, with the modes ((the layout's modes), (their copies))."""
    inside, over = _product_parts(as_layout(layout), copies)
    if not isinstance(copies, (tuple, list, dict)):
        return join(inside[0], over[0] if len(over) == 1 else join(*over))
    return join(join(*inside), join(*over))


def tiled_product(layout: Layout | str, copies: Tiler) -> Layout:
    """As `logical_product`, with the modes ((the layout's modes), copies of mode 0, of mode 1,
    ...)."""
    inside, over = _product_parts(as_layout(layout), copies)
    return join(inside[0] if len(inside) == 1 else join(*inside), *over)


def flat_product(layout: Layout | str, copies: Tiler) -> Layout:
    """As `logical_product`, with the modes (mode 0, mode 1, ..., copies of mode 0, of mode 1,
    ...)."""
    inside, over = _product_parts(as_layout(layout), copies)
    first = inside[0].modes if len(inside) == 1 else inside
    return join(*first, *over)
