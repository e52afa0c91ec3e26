# SPDX-License-Identifier: BSD-3-Clause
"""What an access of a warp costs: passes of shared memory, sectors of global memory. A model, from
addresses alone.

Shared memory has 32 banks of 4 bytes; an access is served in phases of at most 128 bytes: 32 lanes
of up to 4 bytes, 16 lanes of 8, 8 lanes of 16. In a phase each bank gives one word at a time, and
lanes that want the same word share it. Global memory moves sectors of 32 bytes, four to a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .core import Layout, Refusal
from .swizzle import Swizzled, parse

BANKS, BANK_BYTES, WARP, SECTOR_BYTES = 32, 4, 32, 32
ACCESSES = (1, 2, 4, 8, 16)


def _check_access(op: str, addresses: Sequence[int], access_bytes: int) -> None:
    if access_bytes not in ACCESSES:
        raise ValueError(
            f"{op}: an access is of {access_bytes} bytes; expected one of 1, 2, 4, 8, 16"
        )
    for lane, address in enumerate(addresses):
        if address % access_bytes:
            raise ValueError(
                f"{op}: lane {lane} accesses {access_bytes} bytes at byte {address}; it must be a "
                f"multiple"
            )


def phases(addresses: Sequence[int], access_bytes: int) -> list[int]:
    """The passes of each phase of one warp's access; addresses are bytes, one a lane.

    An ldmatrix or stmatrix is an access of 16 bytes by as many lanes as give it addresses: 8, 16 or
    32.
    """
    _check_access("ways", addresses, access_bytes)
    lanes = 8 if access_bytes > 8 else 16 if access_bytes > 4 else 32
    found = []
    for first in range(0, len(addresses), lanes):
        words = {
            (address + b) // BANK_BYTES
            for address in addresses[first : first + lanes]
            for b in range(0, access_bytes, BANK_BYTES)
        }
        load = [0] * BANKS
        for word in words:
            load[word % BANKS] += 1
        found.append(max(load))
    return found


def ways(addresses: Sequence[int], access_bytes: int) -> int:
    """The bank-conflict degree: the worst of the phases; 1 is free of conflicts."""
    return max(phases(addresses, access_bytes))


def wavefronts(addresses: Sequence[int], access_bytes: int) -> int:
    """Passes of the whole access: what the profiler counts as wavefronts of shared memory.

    One case is counted too high: of 16 bytes a GPU serves two phases at once where lanes l and l ^
    1, or l and l ^ 2, want the same ones (learn/claims.md).
    """
    return sum(phases(addresses, access_bytes))


def sectors(addresses: Sequence[int], access_bytes: int) -> int:
    """32-byte sectors of global memory that one warp's access touches."""
    _check_access("sectors", addresses, access_bytes)
    return len({address // SECTOR_BYTES for address in addresses})


def lines(addresses: Sequence[int], access_bytes: int) -> int:
    """128-byte lines that it touches."""
    _check_access("lines", addresses, access_bytes)
    return len({address // 128 for address in addresses})


@dataclass(frozen=True)
class Access:
    """One way of walking a layout, by warps: the figures are of the worst warp."""

    name: str
    ways: int
    wavefronts: int
    best_wavefronts: int
    sectors: int
    best_sectors: int

    def __str__(self) -> str:
        banks = "free of conflicts" if self.ways == 1 else f"{self.ways}-way"
        return f"{self.name}: {banks}, {self.wavefronts} wavefronts (best {self.best_wavefronts}); {self.sectors} sectors (best {self.best_sectors})"  # noqa: E501


def vectors(
    layout: Layout | Swizzled | str, elem_bytes: int, access_bytes: int
) -> tuple[list[int], int]:
    """(byte address of each access of `access_bytes`, accesses in each column): a layout cut into
    vectors.

    The mode of stride 1 is cut; what is left runs colexicographically. The second figure is how
    many vectors mode 0 has. Refuses where the vector does not divide that mode or the swizzle takes
    it apart.
    """
    layout = parse(layout) if isinstance(layout, str) else layout
    inner = layout.layout if isinstance(layout, Swizzled) else layout
    n = access_bytes // elem_bytes
    if n < 1 or access_bytes % elem_bytes:
        raise ValueError(
            f"access: {access_bytes} bytes are no whole elements of {elem_bytes} bytes"
        )
    mode = next((m for m, (s, d) in enumerate(inner.leaves) if d == 1 and s > 1), None)
    if n > 1 and mode is None:
        raise Refusal(
            "access",
            "layout",
            inner,
            None,
            f"no mode has stride 1, so no {n} elements lie side by side",
        )
    if n > 1 and inner.leaves[mode][0] % n:
        raise Refusal("access", "layout", inner, mode, f"vectors of {n} elements do not divide it")
    offsets, kept, before = layout.offsets, [], 1
    for m, (s, _) in enumerate(inner.leaves):
        if m == mode and n > 1:
            kept = [i for i in range(inner.size) if i // before % s % n == 0]
        before *= s if mode is not None and m < mode else 1
        if m == mode:
            break
    kept = kept or list(range(inner.size))
    if n > 1:
        for i in kept:
            first = offsets[i]
            if first % n or any(offsets[i + j * before] != first + j for j in range(1, n)):
                raise Refusal(
                    "access",
                    "layout",
                    inner,
                    mode,
                    f"the {n} elements from offset {first} on are no vector",
                )
    column = inner.modes[0].size if inner.modes else 1  # () has one element
    if n > 1 and mode is not None and mode < len(inner.modes[0].leaves):
        column //= n
    return [offsets[i] * elem_bytes for i in kept], column


def accesses(layout: Layout | Swizzled | str, elem_bytes: int, access_bytes: int) -> list[Access]:
    """The costs of walking a layout down mode 0 (lanes along it first) and across it (lanes along
    the other modes first)."""
    bytes_, column = vectors(layout, elem_bytes, access_bytes)
    across = [bytes_[i + j * column] for i in range(column) for j in range(len(bytes_) // column)]
    found = []
    for name, walk in (("down mode 0", bytes_), ("across mode 0", across)):
        warps = [walk[i : i + WARP] for i in range(0, len(walk), WARP)]
        worst = max(warps, key=lambda w: (ways(w, access_bytes), wavefronts(w, access_bytes)))
        moved = len(warps[0]) * access_bytes
        far = max(warps, key=lambda w: sectors(w, access_bytes))
        found.append(
            Access(
                name,
                ways(worst, access_bytes),
                wavefronts(worst, access_bytes),
                -(-moved // (BANKS * BANK_BYTES)),
                sectors(far, access_bytes),
                -(-moved // SECTOR_BYTES),
            )
        )
        if column in (1, len(bytes_)):
            break
    return found
