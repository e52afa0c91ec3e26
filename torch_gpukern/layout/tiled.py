# SPDX-License-Identifier: BSD-3-Clause
"""Tiled copies and tiled MMAs: atoms (single instructions) repeated over the threads of a block.
They say which elements each thread moves or multiplies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .algebra import Tiler, coalesce, compose, expect_layout, right_inverse
from .atoms import CopyAtom, MmaAtom
from .core import IntTuple, Layout, Refusal, as_layout, index_to_coord, join
from .divide import logical_divide, zipped_divide
from .pictures import svg as draw
from .swizzle import Swizzled
from .tensor import Tensor, as_tensor
from .tiling import make_layout_tv


class TiledCopy:
    """A copy atom repeated over the threads and values of a tile.

    Args:
        atom: `atoms.ldmatrix`, `stmatrix`, `vector_copy`.
        thr, val: layouts of the threads and of each thread's values; see `make_layout_tv`.
        tv, shape: instead of thr and val: the layout (thread, value) -> index in the tile, and the
            tile's shape.

    The tv layout describes the side of the copy that `atom.ref` names, which is that of the
    registers.
    """

    def __init__(
        self,
        atom: CopyAtom,
        thr: Layout | str | None = None,
        val: Layout | str | None = None,
        *,
        tv: Layout | str | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        if (tv is None) != (shape is None) or (tv is None) == (thr is None or val is None):
            raise ValueError("TiledCopy: give thr and val, or tv and shape")
        self.atom = atom
        if tv is None:
            self.tv, self.shape = make_layout_tv(thr, val)
        else:
            self.tv, self.shape = as_layout(tv), shape
        ref = getattr(atom, atom.ref)
        for mode, what in ((0, "threads"), (1, "values")):
            have, needed = self.tv[mode].size, ref[mode].size
            if have % needed:
                why = f"its {have} {what} are no multiple of the {needed} of {atom.name}"
                raise Refusal("TiledCopy", "tv", self.tv, None, why)

    @property
    def threads(self) -> int:
        return self.tv[0].size

    def side(self, side: Literal["src", "dst"]) -> Layout:
        """The layout (thread, value) -> index in the tile, for the side that is read (src) or
        written (dst)."""
        ref = getattr(self.atom, self.atom.ref)
        to = compose(right_inverse(ref), getattr(self.atom, side))
        # ((atom threads, atom values), (other threads, other values)) -> index
        parts = zipped_divide(self.tv, (ref[0].size, ref[1].size))
        inside = expect_layout(compose(parts[0], expect_layout(to)))
        tv = join(join(inside[0], parts[1][0]), join(inside[1], parts[1][1]), names=("thr", "val"))
        return coalesce(tv, (1, (1, 1)))

    def partition(
        self, tensor: Tensor | Layout | Swizzled | str, thread: int, side: Literal["src", "dst"]
    ) -> Tensor:
        """The elements of a tensor that a thread reads (src) or writes (dst), with the shape
        ((values of an atom, atoms), tiles)."""
        if not 0 <= thread < self.threads:
            raise IndexError(f"partition: thread {thread} of {self.threads}")
        tv = self.side(side)

        def divide(layout: Layout, tiler: Tiler) -> Layout:
            tiles = zipped_divide(layout, tiler)
            return join(expect_layout(compose(tiles[0], tv)), tiles[1])

        tensor = as_tensor(tensor).divided(divide, self.shape)
        return tensor[(thread, None), None]

    def svg(self, side: Literal["src", "dst"] = "dst", **options) -> str:
        return draw(self.side(side), kind="owners", shape=self.shape, **options)

    def _repr_svg_(self) -> str:
        return self.svg()


@dataclass(frozen=True)
class TiledMma:
    """An MMA atom repeated over groups of threads along m, n and k.

    Attributes:
        atom: the matrix instruction, `atoms.mma_sync`, `wgmma` and so on.
        atoms: the number of groups along m, n and k. Threads are numbered within an atom first,
            then along m, n, k.
        permutations: a tiler for each of m, n and k, which divides a tensor's mode first. So a
            group may take rows that are not adjacent.
    """

    atom: MmaAtom
    atoms: tuple[int, int, int] = (1, 1, 1)
    permutations: tuple[Tiler, Tiler, Tiler] = (None, None, None)

    _MODES = {"a": (0, 2), "b": (1, 2), "c": (0, 1)}

    @property
    def threads(self) -> int:
        m, n, k = self.atoms
        return self.atom.threads * m * n * k

    @property
    def shape(self) -> tuple[int, ...]:
        """(M, N, K) that all groups together cover in one step."""
        return tuple(x * n for x, n in zip(self.atom.shape, self.atoms))

    def _divide(self, layout: Layout, operand: str) -> Layout:
        """The layout (atom thread, (groups), atom value, (steps)) -> offset."""
        modes = self._MODES[operand]
        if layout.rank != 2:
            raise Refusal(
                "TiledMma", operand, layout, None, f"it has {layout.rank} modes; expected 2"
            )
        tilers = tuple(self.permutations[m] for m in modes)
        if any(t is not None for t in tilers):
            layout = logical_divide(layout, tilers)
        for m, mode in zip(modes, layout.modes):
            if mode.size % self.shape[m]:
                why = (
                    f"its {'mnk'[m]} is {mode.size}, no multiple of the {self.shape[m]} of "
                    f"{self.atoms} {self.atom.name}"
                )
                raise Refusal("TiledMma", operand, layout, None, why)
        tiles = zipped_divide(layout, tuple(self.atom.shape[m] for m in modes))
        tv = expect_layout(compose(tiles[0], getattr(self.atom, operand)))
        groups = zipped_divide(tiles[1], tuple(self.atoms[m] for m in modes))
        return join(tv[0], groups[0], tv[1], groups[1])

    def partition(
        self, tensor: Tensor | Layout | Swizzled | str, thread: int, operand: Literal["a", "b", "c"]
    ) -> Tensor:
        """A thread's elements of a tensor a (M, K), b (N, K) or c (M, N), with the shape (values of
        an atom, (steps))."""
        if not 0 <= thread < self.threads:
            raise IndexError(f"partition: thread {thread} of {self.threads}")
        v, *group = index_to_coord(thread, (self.atom.threads, *self.atoms))
        where: IntTuple = tuple(group[m] for m in self._MODES[operand])
        divided = as_tensor(tensor).divided(lambda layout, _: self._divide(layout, operand), None)
        return divided[v, where, None, None]

    def tv(self, operand: Literal["a", "b", "c"], shape: tuple[int, int] | None = None) -> Layout:
        """The layout (thread, value) -> index in a tile of `shape`, by default that of one step."""
        modes = self._MODES[operand]
        shape = tuple(self.shape[m] for m in modes) if shape is None else shape
        v, groups, values, steps = self._divide(Layout(shape), operand).modes
        along = dict(zip(modes, groups.modes))
        of = [along.get(m, Layout(self.atoms[m], 0)) for m in range(3)]
        return coalesce(join(join(v, *of), join(values, steps), names=("thr", "val")), (1, 1))

    def svg(self, operand: Literal["a", "b", "c"] = "c", **options) -> str:
        shape = tuple(self.shape[m] for m in self._MODES[operand])
        return draw(self.tv(operand), kind="owners", shape=shape, **options)

    def _repr_svg_(self) -> str:
        return self.svg()
