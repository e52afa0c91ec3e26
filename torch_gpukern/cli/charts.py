# SPDX-License-Identifier: BSD-3-Clause
"""Where the ticks of an axis stand."""

from math import ceil, floor, log10


def even_ticks(top: float, about: int = 5) -> list[float]:
    """0, and round numbers at even distances, the last of them at or above top: some `about` of
    them."""
    if top <= 0:
        return [0.0, 1.0]
    rough = top / about
    unit = 10.0 ** floor(log10(rough))
    step = next(unit * f for f in (1, 2, 2.5, 5, 10) if unit * f >= rough * (1 - 1e-9))
    return [step * i for i in range(ceil(top / step * (1 - 1e-9)) + 1)]


def decades(low: float, high: float) -> list[tuple[float, bool]]:
    """1, 2 and 5 times each power of ten within [low, high], and whether it is a power: the ticks
    of a logarithmic axis."""
    found = []
    for power in range(floor(log10(low)), ceil(log10(high)) + 1):
        found += [(f * 10.0**power, f == 1) for f in (1, 2, 5) if low <= f * 10.0**power <= high]
    return found


def short(x: float) -> str:
    """1,000 and 0.05 as they are read: no digits that say nothing."""
    return f"{x:,.0f}" if x >= 10 or x == int(x) else f"{x:g}"
