# SPDX-License-Identifier: BSD-3-Clause
"""Tiles (a block's part of a tensor), partitions (a thread's part), and thread-value layouts.

# Which element of a (16,256) tile does thread t hold as value v?
layout, shape = make_layout_tv("(4,32):(32,1)", "(4,8):(8,1)")
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Union

from .algebra import Tiler, compose, expect_layout, per_mode, right_inverse, tiler_layout
from .core import Coord, IntTuple, Layout, Refusal, as_layout, index_to_coord, join, product
from .divide import raked_product, zipped_divide
from .swizzle import Swizzled, parse
from .tensor import Tensor, as_tensor, plain


def make_layout_tv(thr: Layout | str, val: Layout | str) -> tuple[Layout, tuple[int, ...]]:
    """The thread-value layout (thread, value) -> index in the tile, and the shape of the tile.

    Args:
        thr: the layout of the threads: coordinate -> thread.
        val: the layout of a thread's values: coordinate in its part -> value.

    The tile is raked_product(thr, val). thr and val must be bijections onto 0 .. size - 1;
    otherwise Refusal is raised.
    """
    thr, val = as_layout(thr), as_layout(val)
    for name, x in (("thr", thr), ("val", val)):
        if not x.injective or x.cosize != x.size:
            raise Refusal(
                "make_layout_tv", name, x, None, f"it must reach each of 0 to {x.size - 1} once"
            )
    mn = raked_product(thr, val)
    tv = expect_layout(compose(right_inverse(mn), Layout((thr.size, val.size))))
    return Layout(tv.shape, tv.stride, ("thr", "val")), tuple(mode.size for mode in mn.modes)


def _tile_coord(rest: Layout, coord: Coord) -> Coord:
    """The coordinate over tiles, without its tuple if there is one mode."""
    return coord[0] if isinstance(coord, tuple) and len(coord) == 1 and rest.rank == 1 else coord


# Which modes of a common tiler a tensor has, as CuTe's Step<_1, X, _1>. For a tiler of (M, N, K), a has M
# and K, so its step is (1, None, 1).
Step = Sequence[Union[int, None]]  # noqa: UP007


def _kept(op: str, what: str, step: Step, x: object) -> tuple:
    """The entries of x for which the step is not None."""
    if not isinstance(x, (tuple, list)) or len(x) != len(step):
        raise ValueError(
            f"{op}: {what} is {x!r}; expected a tuple with an entry for each of the step's "
            f"{len(step)}"
        )
    return tuple(entry for entry, keep in zip(x, step) if keep is not None)


def local_tile(
    tensor: Tensor | Layout | Swizzled | str, tiler: Tiler, coord: Coord, step: Step | None = None
) -> Tensor:
    """The tile of a tensor at a coordinate over tiles.

    Args:
        tiler: the tile's shape, or tilers of the modes.
        coord: the tile's coordinate. None keeps all tiles along a mode, as a mode after the tile's.
        step: selects the entries of a tiler and coordinate that several tensors share: one entry
            for each, None for a mode that this tensor does not have. With the tiler (BM, BN, BK)
            and the coordinate (m, n, None), a takes (1, None, 1), b (None, 1, 1) and c (1, 1,
            None).

    A tile at the end may reach beyond the tensor. `inside` says which of its elements exist.
    """
    if step is not None:
        tiler, coord = (
            _kept("local_tile", what, step, x) for what, x in (("tiler", tiler), ("coord", coord))
        )
    tensor = as_tensor(tensor)
    divided = tensor.divided(zipped_divide, tiler)
    return divided[None, _tile_coord(plain(divided)[1], coord)]


def local_partition(
    tensor: Tensor | Layout | Swizzled | str,
    thr: Layout | str,
    index: int,
    step: Step | None = None,
) -> Tensor:
    """The elements of a tensor that thread `index` gets if the threads' shape tiles the tensor and
    each thread takes its coordinate of every tile.

    Args:
        thr: the threads' layout, coordinate -> thread.
        step: one entry for each of thr's modes, None for a mode that the tensor does not have.
            Threads that differ only in such a mode get the same elements.
    """
    tensor, thr = as_tensor(tensor), as_layout(thr)
    if not 0 <= index < thr.size:
        raise IndexError(f"local_partition: thread {index} of {thr.size}")
    where = right_inverse(thr)
    if where.size != thr.size:
        raise Refusal(
            "local_partition", "thr", thr, None, f"it must reach each of 0 to {thr.size - 1} once"
        )
    shape = tuple(mode.size for mode in thr.modes) if isinstance(thr.shape, tuple) else thr.size
    coord = index_to_coord(where(index), shape)
    if step is not None:
        shape, coord = (_kept("local_partition", "thr's shape", step, x) for x in (shape, coord))
    divided = tensor.divided(zipped_divide, shape)
    return divided[coord, None]


def inside(shape: IntTuple | Layout, tiler: Tiler, coord: IntTuple) -> list[bool]:
    """Whether each element of the tile that `local_tile` returns at `coord` lies inside a tensor of
    this shape. This is the predicate of a kernel that copies the tile.
    """
    layout = shape if isinstance(shape, Layout) else Layout(shape)
    if not isinstance(tiler, (tuple, list, dict)):
        divided = zipped_divide(Layout(layout.size), tiler)
        return [o < layout.size for o in Tensor(divided)[None, coord].offsets]
    tilers, masks = per_mode("inside", layout, tiler), []
    coords = list(coord) if isinstance(coord, tuple) else None
    over = [
        Layout(m.size) if t is None else zipped_divide(Layout(m.size), t)[1]
        for m, t in zip(layout.modes, tilers)
    ]
    if coords is None:
        coords = list(index_to_coord(coord, tuple(o.size for o in over)))
    if len(coords) != layout.rank:
        raise ValueError(
            f"inside: coordinate {coord} has {len(coords)} entries, {layout} has {layout.rank} "
            f"modes"
        )
    for mode, t, c in zip(layout.modes, tilers, coords):
        if t is not None:
            part = Tensor(zipped_divide(Layout(mode.size), tiler_layout(t)))[None, c]
            masks.append([o < mode.size for o in part.offsets])
    found = [True]
    for mask in masks:
        found = [a and b for b in mask for a in found]
    return found


def tile_to_shape(
    block: Layout | Swizzled | str, shape: IntTuple, order: tuple[int, ...] | None = None
) -> Layout | Swizzled:
    """Repeats a block, for example a swizzle atom, to fill a shape. `order` lists the modes in the
    order in which copies are laid out. Raises Refusal if the block does not divide the shape."""
    if isinstance(block, str):
        block = parse(block)
    if isinstance(block, Swizzled):
        return Swizzled(
            block.swizzle, expect_layout(tile_to_shape(block.layout, shape, order)), block.offset
        )
    block = as_layout(block)
    sizes = [product(s) for s in shape] if isinstance(shape, tuple) else [shape]
    modes = block.modes if len(sizes) > 1 else [block]
    if len(modes) != len(sizes):
        raise ValueError(f"tile_to_shape: shape has {len(sizes)} modes, {block} has {len(modes)}")
    counts = []
    for m, (mode, n) in enumerate(zip(modes, sizes)):
        if n % mode.size:
            raise Refusal(
                "tile_to_shape", "block", block, m, f"its {mode.size} elements do not divide {n}"
            )
        counts.append(n // mode.size)
    order = tuple(range(len(sizes))) if order is None else order
    strides, before = [0] * len(sizes), block.cosize
    for m in order:
        strides[m] = before
        before *= counts[m]
    done = [join(mode, Layout(n, d if n > 1 else 0)) for mode, n, d in zip(modes, counts, strides)]
    return join(*done, names=block.names) if len(done) > 1 else done[0]
