# SPDX-License-Identifier: BSD-3-Clause
"""The class Layout: a shape and a stride with the same nesting, in CuTe's notation.

`Layout("(4,8):(8,1)")` maps a coordinate (i, j) to the offset 8 i + j. Shapes and strides are
integers, or tuples of them nested to any depth. The entries of a shape are its modes; they may have
names: `Layout("(m=4,n=8):(8,1)")`. A leaf is a mode that is an integer. Indices count coordinates
with the first mode fastest (colexicographic order): index 5 of the layout above is the coordinate
(1, 1). Strides may be 0 or negative.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Union

IntTuple = Union[int, tuple["IntTuple", ...]]  # noqa: UP007
Coord = Union[int, None, tuple["Coord", ...]]  # noqa: UP007


class Refusal(ValueError):
    """Raised if no layout is the exact result of an operation. The text names the operation, the
    argument and the mode that is to blame.

    Attributes:
        op: the operation's name.
        argument: the argument's name.
        mode: the number of the leaf, counted from 0 across the nesting; None if no single mode is
            to blame.
        why: the reason.
    """

    def __init__(
        self, op: str, argument: str, layout: Layout | None, mode: int | None, why: str
    ) -> None:
        self.op, self.argument, self.mode, self.why = op, argument, mode, why
        where = argument
        if layout is not None:
            where = f"{argument} = {layout}"
            if mode is not None:
                shape, stride = layout.leaves[mode]
                name = layout.leaf_name(mode)
                where = f"mode {mode}{f' ({name})' if name else ''}, {shape}:{stride}, of {where}"
        super().__init__(f"{op}: {where}: {why}")


# ---- nested tuples -------------------------------------------------------------------------------


def flatten(x: IntTuple) -> list[int]:
    """The integers of a nested tuple, in order."""
    if isinstance(x, tuple):
        return [leaf for part in x for leaf in flatten(part)]
    return [x]


def product(x: IntTuple) -> int:
    n = 1
    for leaf in flatten(x):
        n *= leaf
    return n


def text_of(x: object) -> str:
    """A nested tuple as CuTe prints it: (4,(2,3)). A tuple of one entry keeps its brackets: (4)."""
    if isinstance(x, tuple):
        return "(" + ",".join(map(text_of, x)) + ")"
    return "_" if x is None else str(x)


def unflatten(leaves: Iterator, like: IntTuple) -> IntTuple:
    """Takes leaves from the iterator and nests them as `like`."""
    if isinstance(like, tuple):
        return tuple(unflatten(leaves, part) for part in like)
    return next(leaves)


def compact_stride(shape: IntTuple, first: int = 1) -> IntTuple:
    """The strides with which offset = index: (4,8) -> (1,4)."""
    strides, n = [], first
    for s in flatten(shape):
        strides.append(n)
        n *= s
    return unflatten(iter(strides), shape)


def same_profile(a: IntTuple, b: IntTuple) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(same_profile, a, b))
    return not isinstance(a, tuple) and not isinstance(b, tuple)


def index_to_coord(index: int, shape: IntTuple) -> IntTuple:
    """The coordinate of an index, nested as the shape. An index beyond the end gives a last entry
    beyond its mode."""
    flat, shapes = [], flatten(shape)
    for i, s in enumerate(shapes):
        last = i + 1 == len(shapes)
        flat.append(index if last else index % s)
        index //= s
    return unflatten(iter(flat), shape)


def coord_to_index(coord: IntTuple, shape: IntTuple) -> int:
    """The index of a coordinate. Any nested part of the coordinate may be an index instead of a
    tuple. Raises IndexError for an entry outside its mode."""
    if not isinstance(coord, tuple):
        if not 0 <= coord < product(shape):
            raise IndexError(
                f"coordinate {coord} is outside of the {product(shape)} elements of "
                f"{text_of(shape)}"
            )
        return coord
    if not isinstance(shape, tuple) or len(coord) != len(shape):
        raise ValueError(f"coordinate {text_of(coord)} does not fit shape {text_of(shape)}")
    index, before = 0, 1
    for c, s in zip(coord, shape):
        index += coord_to_index(c, s) * before
        before *= product(s)
    return index


# ---- text ----------------------------------------------------------------------------------------

_TOKEN = re.compile(r"\s*(?:([A-Za-z]\w*)\s*=|(-?\d+)|([(),:]))")


class _Parser:
    """Parses the text of a layout, (4,(2,3)):(1,..). A mode at the top may begin with `name =`."""

    def __init__(self, text: str) -> None:
        self.text, self.names, self.depth = text, [], 0
        self.tokens, at = [], 0
        while text[at:].strip():
            match = _TOKEN.match(text, at)
            if not match:
                raise ValueError(
                    f"layout '{text}': expected a number, a bracket or a name at "
                    f"'{text[at:].strip()}'"
                )
            self.tokens.append((match.lastindex, match[match.lastindex]))
            at = match.end()
        self.at = 0

    def peek(self) -> str:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else "the end"

    def take(self, what: str) -> None:
        if self.peek() != what:
            raise ValueError(f"layout '{self.text}': expected '{what}', found '{self.peek()}'")
        self.at += 1

    def tuple_(self) -> IntTuple:
        if self.at < len(self.tokens) and self.tokens[self.at][0] == 1:
            if self.depth > 1:
                raise ValueError(
                    f"layout '{self.text}': only modes at the top have names, not '{self.peek()}'"
                )
            self.names.append(self.peek())
            self.at += 1
        elif self.depth == 1:
            self.names.append("")
        if self.at < len(self.tokens) and self.tokens[self.at][0] == 2:
            self.at += 1
            return int(self.tokens[self.at - 1][1])
        self.take("(")
        parts = []
        self.depth += 1
        while self.peek() != ")":
            parts.append(self.tuple_())
            if self.peek() != ")":
                self.take(",")
        self.depth -= 1
        self.take(")")
        return tuple(parts)

    def layout(self) -> tuple[IntTuple, IntTuple | None, tuple[str, ...]]:
        shape = self.tuple_()
        names, self.names = tuple(self.names), []
        stride = None
        if self.at < len(self.tokens):
            self.take(":")
            stride = self.tuple_()
        if self.at < len(self.tokens):
            raise ValueError(f"layout '{self.text}': '{self.peek()}' after the end")
        if any(self.names):
            raise ValueError(f"layout '{self.text}': names belong to the shape")
        return shape, stride, names if any(names) else ()


# ---- layouts -------------------------------------------------------------------------------------


class Drawn:
    """Base of classes that have a picture: layouts, swizzled or not. pictures.py, which imports
    this file, adds the methods svg and png."""

    __slots__ = ()
    svg: Any
    png: Any

    def _repr_svg_(self) -> str:
        return self.svg()


class Layout(Drawn):
    """A function from coordinates to offsets, written shape:stride.

    Args:
        shape: sizes of 1 or more, nested to any depth; or the text of a whole layout,
            "(4,8):(8,1)".
        stride: nested like the shape. Default: compact, the first mode fastest.
        names: names of the modes at the top, "" for a mode without a name.

    Call it with a coordinate (`layout(1, 2)`, nested or not), an index (`layout(9)`) or names
    (`layout(m=1, n=2)`).

    Raises:
        IndexError: a coordinate lies outside its mode.
        ValueError: the text, the nesting or the names are invalid.
    """

    __slots__ = ("shape", "stride", "names", "__dict__")
    shape: IntTuple
    stride: IntTuple
    names: tuple[str, ...]

    def __init__(
        self, shape: IntTuple | str, stride: IntTuple | None = None, names: Sequence[str] = ()
    ) -> None:
        if isinstance(shape, str):
            if stride is not None:
                raise ValueError("Layout: a text says the strides, too: Layout('(4,8):(8,1)')")
            shape, stride, read = _Parser(shape).layout()
            names = names or read
        self.shape, self.stride = _checked(shape), None
        self.stride = compact_stride(self.shape) if stride is None else _checked(stride)
        if not same_profile(self.shape, self.stride):
            raise ValueError(
                f"Layout: stride {text_of(self.stride)} is not nested as the shape "
                f"{text_of(self.shape)}"
            )
        if any(s < 1 for s in flatten(self.shape)):
            raise ValueError(f"Layout: shape is {text_of(self.shape)}; sizes must be 1 or more")
        self.names = tuple(names) if any(names) else ()
        if self.names and (not isinstance(self.shape, tuple) or len(self.names) != len(self.shape)):
            raise ValueError(f"Layout: {len(self.names)} names for the shape {text_of(self.shape)}")
        used = [name for name in self.names if name]
        if len(set(used)) != len(used):
            raise ValueError(f"Layout: names are {', '.join(used)}; each must occur once")

    # properties

    @cached_property
    def leaves(self) -> list[tuple[int, int]]:
        """(size, stride) of every leaf, in order."""
        return list(zip(flatten(self.shape), flatten(self.stride)))

    @cached_property
    def size(self) -> int:
        """The number of coordinates."""
        return product(self.shape)

    @property
    def cosize(self) -> int:
        """The number of offsets from the lowest to the highest, both included. Strides may be 0 or
        negative."""
        return 1 + sum((s - 1) * abs(d) for s, d in self.leaves)

    @property
    def lowest(self) -> int:
        """The lowest offset: 0 without negative strides."""
        return sum((s - 1) * d for s, d in self.leaves if d < 0)

    @property
    def rank(self) -> int:
        return len(self.shape) if isinstance(self.shape, tuple) else 1

    def __len__(self) -> int:
        return self.rank

    @property
    def depth(self) -> int:
        def of(x: IntTuple) -> int:
            return 1 + max(map(of, x), default=0) if isinstance(x, tuple) else 0

        return of(self.shape)

    def leaf_name(self, leaf: int) -> str:
        """The name of the mode at the top that holds this leaf."""
        for name, mode in zip(self.names, self.modes):
            if leaf < len(mode.leaves):
                return name
            leaf -= len(mode.leaves)
        return ""

    # modes

    @property
    def modes(self) -> list[Layout]:
        """The modes at the top, as layouts."""
        if not isinstance(self.shape, tuple):
            return [self]
        return [Layout(s, d) for s, d in zip(self.shape, self.stride)]

    def position(self, mode: int | str) -> int:
        """The number of a mode that is given by its number or its name."""
        if isinstance(mode, str):
            if mode not in self.names:
                raise KeyError(f"layout {self} has no mode '{mode}'")
            return self.names.index(mode)
        if not -self.rank <= mode < self.rank:
            raise IndexError(f"layout {self} has {self.rank} modes, mode {mode} was asked for")
        return mode % self.rank

    def __getitem__(self, mode: int | str) -> Layout:
        return self.modes[self.position(mode)]

    def __iter__(self) -> Iterator[Layout]:
        return iter(self.modes)

    def select(self, *modes: int | str) -> Layout:
        """The layout of these modes in this order. `layout.select(1, 0)` is a transpose."""
        at = [self.position(mode) for mode in modes]
        all_, names = self.modes, [self.names[i] if self.names else "" for i in at]
        return join(*(all_[i] for i in at), names=names)

    def group(self, first: int, last: int) -> Layout:
        """Groups modes first to last - 1 into one mode, which one coordinate or tiler then
        addresses: CuTe's group<first, last>."""
        if not 0 <= first < last <= self.rank:
            raise IndexError(
                f"group: modes {first} to {last} of the {self.rank} of {self}; expected 0 <= "
                f"first < last"
            )
        all_, names = self.modes, self.names
        around = (*names[:first], "", *names[last:]) if names else ()
        return join(*all_[:first], join(*all_[first:last]), *all_[last:], names=around)

    def named(self, *names: str) -> Layout:
        return Layout(self.shape, self.stride, names)

    def flat(self) -> Layout:
        """The same modes without nesting."""
        return of_leaves(self.leaves)

    # the function

    def __call__(self, *coord: Coord, **named: Coord) -> int:
        if named:
            unknown = named.keys() - set(self.names)
            if coord or unknown or len(named) != self.rank:
                raise ValueError(
                    f"layout {self}: names {', '.join(named)} were given; expected "
                    f"{self.names or 'none'}"
                )
            coord = tuple(named[name] for name in self.names)
        index, offset = coord_to_index(coord[0] if len(coord) == 1 else coord, self.shape), 0
        for s, d in self.leaves[:-1]:
            offset += index % s * d
            index //= s
        return offset + index * (self.leaves[-1][1] if self.leaves else 0)

    @cached_property
    def offsets(self) -> list[int]:
        """The offset of every index, in order."""
        found = [0]
        for s, d in self.leaves:
            if s > 1:
                found = [o + step for step in range(0, s * d, d) for o in found] if d else found * s
        return found

    def coords(self) -> Iterator[IntTuple]:
        """Every coordinate, in the order of the index."""
        return (index_to_coord(i, self.shape) for i in range(self.size))

    def slice(self, *coord: Coord) -> tuple[Layout, int]:
        """Returns (layout of the modes for which the coordinate has None, offset of the others).
        `layout.slice(None, 3)` is column 3."""
        given = coord[0] if len(coord) == 1 else coord
        kept, offset = _slice(self.shape, self.stride, given, self)
        if len(kept) == 1:
            return Layout(*kept[0]), offset
        names = ()
        if (
            self.names
            and isinstance(given, tuple)
            and all(c is None or isinstance(c, int) for c in given)
        ):
            names = tuple(name for name, c in zip(self.names, given) if c is None)
        return Layout(
            tuple(s for s, _ in kept),
            tuple(d for _, d in kept),
            names if len(names) == len(kept) else (),
        ), offset

    @property
    def injective(self) -> bool:
        """Whether all coordinates have different offsets."""
        reach = 0
        for s, d in sorted(self.leaves, key=lambda leaf: abs(leaf[1])):
            if s > 1 and abs(d) <= reach:
                return len(set(self.offsets)) == self.size
            reach += (s - 1) * abs(d)
        return True

    def explain(self) -> str:
        """A description of the layout, in a few lines."""
        lines = [f"{self}: {self.size} elements in {self.cosize} offsets"]
        names = self.names or ("",) * self.rank
        for i, (mode, name) in enumerate(zip(self.modes, names)):
            lines.append(f"  mode {i}{f' ({name})' if name else ''}: {mode}")
        simple = of_leaves(coalesced(self.leaves))
        lines.append(
            f"  as a function of the index: {simple}"
            + (", contiguous" if simple.stride == 1 else "")
        )
        if not self.injective:
            lines.append(
                f"  {self.size - len(set(self.offsets))} elements share their offset with an "
                f"earlier one"
            )
        elif self.cosize > self.size:
            lines.append(f"  {self.cosize - self.size} offsets between them are not used")
        return "\n".join(lines)

    # text, pictures, equality

    def __str__(self) -> str:
        if not self.names:
            return f"{text_of(self.shape)}:{text_of(self.stride)}"
        parts = [
            f"{name}={text_of(s)}" if name else text_of(s)
            for name, s in zip(self.names, self.shape)
        ]
        return f"({','.join(parts)}):{text_of(self.stride)}"

    def __repr__(self) -> str:
        return f"Layout('{self}')"

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            other = Layout(other)
        if not isinstance(other, Layout):
            return NotImplemented
        return self.shape == other.shape and self.stride == other.stride

    def __hash__(self) -> int:
        return hash((self.shape, self.stride))


def _checked(x: object) -> IntTuple:
    if isinstance(x, (tuple, list)):
        return tuple(map(_checked, x))
    if isinstance(x, bool) or not isinstance(x, int):
        raise TypeError(f"Layout: shapes and strides are integers or tuples of them, got {x!r}")
    return x


def _slice(shape: IntTuple, stride: IntTuple, coord: Coord, whole: Layout) -> tuple[list, int]:
    if coord is None:
        return [(shape, stride)], 0
    if not isinstance(coord, tuple):
        if coord < 0 or coord >= product(shape):
            raise IndexError(
                f"slice: {coord} is outside of the {product(shape)} elements of a mode of {whole}"
            )
        return [], Layout(shape, stride)(coord)
    if not isinstance(shape, tuple) or len(coord) != len(shape):
        raise ValueError(
            f"slice: coordinate {text_of(coord)} does not fit shape {text_of(shape)} of {whole}"
        )
    kept, offset = [], 0
    for s, d, c in zip(shape, stride, coord):
        more, at = _slice(s, d, c, whole)
        kept += more
        offset += at
    return kept, offset


Leaves = list[tuple[int, int]]


def coalesced(leaves: Leaves) -> Leaves:
    """The fewest leaves that give the same function of the index."""
    found: Leaves = []
    for s, d in leaves:
        if s == 1:
            continue
        if found and d == found[-1][0] * found[-1][1]:
            found[-1] = (found[-1][0] * s, found[-1][1])
        else:
            found.append((s, d))
    return found or [(1, 0)]


def of_leaves(leaves: Leaves) -> Layout:
    if len(leaves) == 1:
        return Layout(*leaves[0])
    return Layout(tuple(s for s, _ in leaves), tuple(d for _, d in leaves))


def join(*layouts: Layout, names: Sequence[str] = ()) -> Layout:
    """The layout whose modes are the given layouts."""
    return Layout(tuple(x.shape for x in layouts), tuple(x.stride for x in layouts), names)


def as_layout(x: Layout | str | IntTuple) -> Layout:
    """x as a Layout: x is a layout, its text, or a shape, which means the compact layout."""
    if isinstance(x, Layout):
        return x
    return Layout(x)
