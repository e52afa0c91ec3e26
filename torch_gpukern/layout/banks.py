# SPDX-License-Identifier: BSD-3-Clause
"""A model of what an access of a warp costs, from addresses alone: passes of shared memory, sectors
of global memory.

Shared memory has 32 banks of 4 bytes. An access is served in phases of at most 128 bytes: 32 lanes
of up to 4 bytes, 16 lanes of 8 bytes, or 8 lanes of 16 bytes. In a pass of a phase, each bank
serves one word, which all lanes that want it share. Global memory is moved in sectors of 32 bytes;
a line has four.
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
    """The number of passes of each phase of one warp's access.

    addresses: byte addresses, one per lane. An ldmatrix or stmatrix is an access of 16 bytes by the
    8, 16 or 32 lanes that give it addresses.
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
    """The degree of bank conflicts: the passes of the worst phase. 1 means no conflict."""
    return max(phases(addresses, access_bytes))


def wavefronts(addresses: Sequence[int], access_bytes: int) -> int:
    """The passes of the whole access, which the profiler counts as wavefronts of shared memory.

    The model counts one case too high: in accesses of 16 bytes, a GPU serves two phases at once if
    lanes l and l ^ 1, or l and l ^ 2, access the same bytes (learn/claims.md).
    """
    return sum(phases(addresses, access_bytes))


def sectors(addresses: Sequence[int], access_bytes: int) -> int:
    """The number of 32-byte sectors of global memory that one warp's access touches."""
    _check_access("sectors", addresses, access_bytes)
    return len({address // SECTOR_BYTES for address in addresses})


def lines(addresses: Sequence[int], access_bytes: int) -> int:
    """The number of 128-byte lines that one warp's access touches."""
    _check_access("lines", addresses, access_bytes)
    return len({address // 128 for address in addresses})


@dataclass(frozen=True)
class Access:
    """The costs of accessing a whole layout by warps in one order; figures are those of the worst
    warp."""

    name: str
    ways: int
    wavefronts: int
    best_wavefronts: int
    sectors: int
    best_sectors: int

    def __str__(self) -> str:
        banks = "free of conflicts" if self.ways == 1 else f"{self.ways}-way"
        return (
            f"{self.name}: {banks}, {self.wavefronts} wavefronts (best {self.best_wavefronts}); "
            f"{self.sectors} sectors (best {self.best_sectors})"
        )


def vectors(
    layout: Layout | Swizzled | str, elem_bytes: int, access_bytes: int
) -> tuple[list[int], int]:
    """Cuts a layout into vectors of `access_bytes`.

    The mode of stride 1 is cut, and the vectors are listed colexicographically. Returns (the byte
    address of each vector, the number of vectors in mode 0). Raises Refusal if the vector does not
    divide the mode of stride 1, or if the swizzle separates its elements.
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
    """The costs of accessing a whole layout down mode 0 (lanes along mode 0 first) and across it
    (lanes along the other modes first)."""
    bytes_, column = vectors(layout, elem_bytes, access_bytes)
    across = [bytes_[i + j * column] for i in range(column) for j in range(len(bytes_) // column)]
    found = []
    for name, order in (("down mode 0", bytes_), ("across mode 0", across)):
        warps = [order[i : i + WARP] for i in range(0, len(order), WARP)]
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
