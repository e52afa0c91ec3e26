# SPDX-License-Identifier: BSD-3-Clause
"""Swizzles: some bits of an offset are xored into lower (or higher) bits, alone or after a
layout."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .core import Coord, Drawn, Layout, Refusal, as_layout
from .values import from_values


@dataclass(frozen=True)
class Swizzle:
    """CuTe's Swizzle<bits, base, shift>: xors `bits` bits of an offset, from bit base + shift on,
    into the bits from bit base on.

    A swizzle is its own inverse. If shift is negative, the bits from base on are xored into those
    from base - shift on. abs(shift) >= bits, so that source and target bits do not overlap. TMA's
    32-, 64- and 128-byte modes are <1,4,3>, <2,4,3> and <3,4,3> on byte addresses.
    """

    bits: int
    base: int
    shift: int

    def __post_init__(self) -> None:
        if self.bits < 0 or self.base < 0:
            raise ValueError(f"{self}: bits and base must be 0 or more")
        if abs(self.shift) < self.bits:
            raise ValueError(
                f"{self}: abs(shift) must be {self.bits} or more, or the bits would be xored into "
                f"themselves"
            )

    def __call__(self, offset: int) -> int:
        mask = (1 << self.bits) - 1
        if self.shift >= 0:
            return offset ^ ((offset >> (self.base + self.shift) & mask) << self.base)
        return offset ^ ((offset >> self.base & mask) << (self.base - self.shift))

    @property
    def span(self) -> int:
        """The number of offsets after which the pattern repeats."""
        return 1 << (self.base + self.bits + abs(self.shift))

    def recast(self, old_bits: int, new_bits: int) -> Swizzle:
        """The same swizzle of memory for offsets in elements of new_bits instead of old_bits bits.
        Raises ValueError if there is none."""
        if self.bits == 0:
            return self
        base, before, after = self.base, old_bits, new_bits
        while before < after:
            before, base = before * 2, base - 1
        while before > after:
            before, base = before // 2, base + 1
        if before != after or base < 0:
            raise ValueError(
                f"recast: {self} of {old_bits}-bit elements is no swizzle of {new_bits}-bit "
                f"elements"
            )
        return Swizzle(self.bits, base, self.shift)

    def __str__(self) -> str:
        return f"Sw<{self.bits},{self.base},{self.shift}>"


class OfLayout:
    """Base of classes that take shape, size and rank from their attribute `layout`."""

    layout: Any

    @property
    def shape(self):
        return self.layout.shape

    @property
    def size(self) -> int:
        return self.layout.size

    @property
    def rank(self) -> int:
        return self.layout.rank


@dataclass(frozen=True)
class Swizzled(OfLayout, Drawn):
    """A swizzle after a layout: coordinate -> swizzle(offset + layout(coordinate))."""

    swizzle: Swizzle
    layout: Layout
    offset: int = 0

    def __call__(self, *coord: Coord, **named: Coord) -> int:
        return self.swizzle(self.offset + self.layout(*coord, **named))

    @property
    def names(self) -> tuple[str, ...]:
        return self.layout.names

    @cached_property
    def offsets(self) -> list[int]:
        s, first = self.swizzle, self.offset
        mask, up, down = (1 << s.bits) - 1, s.base + max(s.shift, 0), s.base + max(-s.shift, 0)
        return [(o + first) ^ (((o + first) >> up & mask) << down) for o in self.layout.offsets]

    @property
    def cosize(self) -> int:
        return max(self.offsets) - min(self.offsets) + 1

    @property
    def injective(self) -> bool:
        return self.layout.injective

    def slice(self, *coord: Coord) -> tuple[Swizzled, int]:
        """As Layout.slice, but the returned offset is 0. The swizzle applies after the offset, so the
        offset stays part of the swizzled layout."""
        kept, at = self.layout.slice(*coord)
        return Swizzled(self.swizzle, kept, self.offset + at), 0

    def select(self, *modes: int | str) -> Swizzled:
        return Swizzled(self.swizzle, self.layout.select(*modes), self.offset)

    def group(self, first: int, last: int) -> Swizzled:
        return Swizzled(self.swizzle, self.layout.group(first, last), self.offset)

    def linear(self) -> Layout:
        """The layout without a swizzle that has the same values. Raises Refusal if there is
        none."""
        found = from_values(self.offsets, self.layout.shape)
        if found is None:
            raise Refusal(
                "linear",
                "layout",
                self.layout,
                None,
                f"its offsets after {self.swizzle} are not a sum of strides",
            )
        return found

    def explain(self) -> str:
        return f"{self.layout.explain()}\n  then {self.swizzle}, which repeats after {self.swizzle.span} offsets"

    def __str__(self) -> str:
        return f"{self.swizzle} o {self.offset} o {self.layout}"


_SWIZZLE = re.compile(r"\s*S(?:w|wizzle)?<\s*(\d+)\s*,\s*(\d+)\s*,\s*(-?\d+)\s*>\s*")


def parse_swizzle(text: str) -> Swizzle:
    """'3,4,3' or 'Sw<3,4,3>'."""
    match = _SWIZZLE.fullmatch(text if "<" in text else f"Sw<{text}>")
    if not match:
        raise ValueError(f"swizzle is '{text}'; expected bits,base,shift as in 3,4,3")
    return Swizzle(*map(int, match.groups()))


def parse_swizzled(text: str) -> Swizzle | Swizzled:
    head, *rest = re.split(r"\s+o\s+", text)
    swizzle = parse_swizzle(head)
    if not rest:
        return swizzle
    if len(rest) > 2 or (len(rest) == 2 and not re.fullmatch(r"-?\d+", rest[0].strip())):
        raise ValueError(f"layout '{text}': expected Sw<b,m,s> o offset o shape:stride")
    return Swizzled(swizzle, as_layout(rest[-1]), int(rest[0]) if len(rest) == 2 else 0)


def parse(text: str) -> Layout | Swizzled | Swizzle:
    """A layout, a swizzle or a swizzled layout from its text, as CuTe prints them.

    "(4,8):(8,1)", "Sw<3,4,3>" (also "S<..>", "Swizzle<..>"), "Sw<3,4,3> o 0 o (8,64):(64,1)".
    """
    return parse_swizzled(text) if "<" in text else Layout(text)
