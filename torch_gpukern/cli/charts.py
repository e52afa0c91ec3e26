# SPDX-License-Identifier: BSD-3-Clause
"""Ticks of a chart's axes."""

from math import ceil, floor, log10


def even_ticks(top: float, about: int = 5) -> list[float]:
    """About `about` evenly spaced round numbers, from 0 to the first one >= top."""
    if top <= 0:
        return [0.0, 1.0]
    rough = top / about
    unit = 10.0 ** floor(log10(rough))
    step = next(unit * f for f in (1, 2, 2.5, 5, 10) if unit * f >= rough * (1 - 1e-9))
    return [step * i for i in range(ceil(top / step * (1 - 1e-9)) + 1)]


def decades(low: float, high: float) -> list[tuple[float, bool]]:
    """The ticks of a logarithmic axis: 1, 2 and 5 times the powers of ten in [low, high], each with
    whether it is a power of ten."""
    found = []
    for power in range(floor(log10(low)), ceil(log10(high)) + 1):
        found += [(f * 10.0**power, f == 1) for f in (1, 2, 5) if low <= f * 10.0**power <= high]
    return found


def short(x: float) -> str:
    """A tick's label without needless digits: 1,000 or 0.05."""
    return f"{x:,.0f}" if x >= 10 or x == int(x) else f"{x:g}"
