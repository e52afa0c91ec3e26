# SPDX-License-Identifier: BSD-3-Clause
"""Predicts the speed of each rung of the gemm ladder from its accesses and a few device figures.

python learn/benchmarks/ladder_model.py [SIZE]    prints every rung's limits at SIZE cubed (4096)

The model was written before the rungs were measured and was not changed afterwards. If a
measurement differs, learn/ladder.md says why. A rung is as slow as its slowest unit. Waits without
a busy unit are counted only if a field below says so.

Rungs 1 to 5, 14 and 15 are modelled in clocks of an SM for one warp and one k. The units are L1 and
shared memory (one memory with one port), the multiply-adds, and the issue of instructions. The
other rungs are modelled in microseconds of a tile: its steps of k, each as long as its slowest
unit, its start, and the store of its results.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One H200. Rates measured in docs/worklog/gemm.md stand beside those of the data sheet."""

    sms: int = 132
    clock_ghz: float = 1.98  # clock of kernels without tensor cores
    busy_clock_ghz: float = 1.755  # clock of kernels that draw the board's power
    warps_issued: int = 4  # instructions issued a clock: one by each quarter of an SM
    load_clocks: int = 2  # clocks of L1 for the smallest load
    bank_bytes: int = 128  # bytes that shared memory or a line of L1 delivers in a clock
    l2_tbs: float = 8.0  # to all SMs, measured
    l2_latency_us: float = 0.2
    memory_tbs: float = 4.2
    mma_tflops: float = 519.0  # mma.sync with nothing else, measured: 0.655 of cuBLAS
    wgmma_tflops: float = 780.0  # the most at 700 W on normal data: cuBLAS's best
    start_us: float = 1.0  # a block's launch, barriers and first bytes
    store_us: float = 3.3  # store of 64 KiB of results by all SMs at once, measured


H200 = Device()


@dataclass(frozen=True)
class Prediction:
    tflops: float
    limiter: str
    limits: dict[str, float]  # unit -> TFLOP/s if it were the only one


# ---- the cost of an access of a warp ------------------------------------------------------------


def lines(bytes_of_lanes: Iterable[int]) -> int:
    """Lines of 128 bytes that a load from global memory touches. L1 delivers one a clock."""
    return len({at // 128 for at in bytes_of_lanes})


def wavefronts(bytes_of_lanes: Iterable[int], width: int) -> int:
    """Clocks of shared memory: the largest number of different 4-byte words that one of the 32
    banks must deliver to the warp."""
    words = {at // 4 + i for at in bytes_of_lanes for i in range(width // 4)}
    return max(sum(word % 32 == bank for word in words) for bank in range(32))


LANES = range(32)


def _l1(device: Device, *loads: Iterable[int]) -> int:
    return sum(max(device.load_clocks, lines(load)) for load in loads)


def naive(k: int, n: int, device: Device) -> tuple[int, dict[str, float]]:
    a, b = (lane * k * 2 for lane in LANES), (0 for _ in LANES)
    return 64, {"L1": _l1(device, a, b), "multiply-adds": 1 / 4, "issue": 5 / device.warps_issued}


def coalesced(k: int, n: int, device: Device) -> tuple[int, dict[str, float]]:
    a, b = (0 for _ in LANES), (lane * 2 for lane in LANES)
    return 64, {"L1": _l1(device, a, b), "multiply-adds": 1 / 4, "issue": 5 / device.warps_issued}


def shared(k: int, n: int, device: Device) -> tuple[int, dict[str, float]]:
    """Rung 3. A thread copies two elements for each 32 of k; a is read 4 of k at a time."""
    read = wavefronts((lane * 4 for lane in LANES), 4) + wavefronts((0 for _ in LANES), 16) / 4
    copy = 2 * wavefronts((lane * 4 for lane in LANES), 4) + _l1(
        device, *(2 * [[lane * 2 for lane in LANES]])
    )
    return 64, {
        "shared memory": read + copy / 32,
        "multiply-adds": 1 / 4,
        "issue": (1 + 1.25 + 12 / 32) / device.warps_issued,
    }


def registers(k: int, n: int, device: Device) -> tuple[int, dict[str, float]]:
    """Rung 4. A thread copies 8 + 8 elements for each 16 of k, each with a conversion and two
    address instructions."""
    read = 8 * wavefronts((lane // 4 * 4 for lane in LANES), 4) + 8 * wavefronts(
        (lane % 4 * 4 for lane in LANES), 4
    )
    store_a = wavefronts(((lane % 16 * 128 + lane // 16) * 4 for lane in LANES), 4)
    store_b = wavefronts((lane * 4 for lane in LANES), 4)
    loads = [[lane // 16 * k * 2 + lane % 16 * 2 for lane in LANES], [lane * 2 for lane in LANES]]
    return 4096, {
        "shared memory": read + 8 * (store_a + store_b + _l1(device, *loads)) / 16,
        "multiply-adds": 64 / 4,
        "issue": (64 + 16 + 16 * (1 + 1 + 1 + 2) / 16) / device.warps_issued,
    }


def vectorised(k: int, n: int, device: Device) -> tuple[int, dict[str, float]]:
    """Rung 5. A thread copies a chunk of a and one of b for each 16 of k and stores them swizzled
    (05_vectorised.cu)."""
    read = 2 * wavefronts((lane // 4 * 16 for lane in LANES), 16) + 2 * wavefronts(
        (lane % 4 * 16 for lane in LANES), 16
    )
    store_a = wavefronts(
        (((lane % 2 * 8 * 128 + lane // 2) ^ lane % 2 * 16) * 4 for lane in LANES), 4
    )
    chunks = [lane // 16 * 32 + lane % 16 * 2 for lane in LANES]
    store_b = wavefronts(((chunk ^ chunk >> 3 & 1) * 16 for chunk in chunks), 16)
    loads = [
        [lane // 2 * k * 2 + lane % 2 * 16 for lane in LANES],
        [lane // 16 * n * 2 + lane % 16 * 16 for lane in LANES],
    ]
    return 4096, {
        "shared memory": read + (8 * store_a + 2 * store_b + _l1(device, *loads)) / 16,
        "multiply-adds": 64 / 4,
        "issue": (64 + 4 + (2 + 10 + 16 + 4) / 16) / device.warps_issued,
    }


def column(k: int, n: int, device: Device) -> tuple[int, dict[str, float]]:
    """Rung 14. A thread copies 4 + 4 elements for each 32 of k; a is read 4 of k at a time."""
    read = wavefronts((lane * 4 for lane in LANES), 4) + 8 * wavefronts((0 for _ in LANES), 16) / 4
    copy = 8 * wavefronts((lane * 4 for lane in LANES), 4) + _l1(
        device, *(8 * [[lane * 2 for lane in LANES]])
    )
    return 512, {
        "shared memory": read + copy / 32,
        "multiply-adds": 8 / 4,
        "issue": (8 + 1 + 2 + 8 * 5 / 32) / device.warps_issued,
    }


def warp_tile(k: int, n: int, device: Device) -> tuple[int, dict[str, float]]:
    """Rung 15. As rung 5 with 8 x 16 sums a lane, and two chunks of a and two of b a thread."""
    rung_5 = vectorised(k, n, device)[1]
    a, b = (
        wavefronts((lane // 4 * 16 for lane in LANES), 16),
        wavefronts((lane % 4 * 16 for lane in LANES), 16),
    )
    copy = rung_5["shared memory"] - 2 * a - 2 * b
    return 8192, {
        "shared memory": 2 * a + 4 * b + 2 * copy,
        "multiply-adds": 128 / 4,
        "issue": (128 + 6 + 2 * (2 + 10 + 16 + 4) / 16) / device.warps_issued,
    }


# ---- tiles of the tensor cores ------------------------------------------------------------------


@dataclass(frozen=True)
class Tiles:
    """Rungs 6 to 13 and 16 to 18: the tile of a block, and which parts of its time nothing
    hides."""

    bm: int
    bn: int
    bk: int
    blocks: int = 1  # blocks on an SM
    # tile of a warp that reads by ldmatrix; None: wgmma reads shared memory directly
    warp: tuple[int, int] | None = None
    alone: bool = False  # a block copies and multiplies alternately
    sharers: int = 1  # blocks that copy one tile of b together
    starts: bool = True  # whether every tile waits for its start, not only the first
    stores: bool = True  # whether every tile waits for its store, not only the last
    launched_early: bool = False
    group: int = 1  # rows of tiles (or of clusters' tiles) in a group


RUNGS = {
    6: Tiles(128, 128, 64, blocks=2, warp=(64, 64), alone=True),
    7: Tiles(256, 128, 64, warp=(64, 64), group=8),
    8: Tiles(128, 256, 64),
    9: Tiles(128, 256, 64, sharers=2),
    10: Tiles(128, 256, 64, sharers=2, starts=False),
    11: Tiles(128, 256, 64, sharers=2, starts=False, stores=False),
    12: Tiles(128, 256, 64, sharers=2, starts=False, stores=False, group=8),
    13: Tiles(128, 256, 64, sharers=2, starts=False, stores=False, launched_early=True, group=8),
    16: Tiles(128, 128, 32, blocks=2, warp=(64, 32), alone=True),
    17: Tiles(128, 128, 64, blocks=2, warp=(64, 64)),
    18: Tiles(128, 256, 64),
}


def step_us(t: Tiles, device: Device) -> dict[str, float]:
    """us of one step of k of one block, by unit, as if the block had the SM to itself. With several
    blocks an SM, tiles_of multiplies by their number."""
    flop = 2 * t.bm * t.bn * t.bk
    copied = (t.bm + t.bn / t.sharers) * t.bk * 2
    peak, unit = (
        (device.mma_tflops, "mma.sync") if t.warp else (device.wgmma_tflops, "wgmma at 700 W")
    )
    units = {
        unit: flop * device.sms / peak / 1e6,
        "L2": copied * device.sms / device.l2_tbs / 1e6,
    }
    if t.warp:
        wm, wn = t.warp
        reads = t.bm // wm * (t.bn // wn) * (wm + wn) * t.bk * 2 / device.bank_bytes
        writes = (t.bm + t.bn) * t.bk * 2 / device.bank_bytes
        units["shared memory"] = (reads + writes) / device.busy_clock_ghz / 1e3
    else:  # each warpgroup reads 64 rows of a and all of b, and TMA writes both
        reads = t.bm // 64 * (64 + t.bn) * t.bk * 2 / device.bank_bytes
        units["shared memory"] = (
            (reads + (t.bm + t.bn) * t.bk * 2 / device.bank_bytes) / device.busy_clock_ghz / 1e3
        )
    if t.alone:
        units["copy, then multiply"] = (units[unit] + units["L2"] + device.l2_latency_us) / t.blocks
    return units


def tiles_of(t: Tiles, m: int, n: int, k: int, device: Device) -> Prediction:
    slots = device.sms * t.blocks // t.sharers
    tiles = math.ceil(m / (t.bm * t.sharers)) * math.ceil(n / t.bn)
    waves, steps = math.ceil(tiles / slots), math.ceil(k / t.bk)
    units = step_us(t, device)
    # a wave covers `group` rows of tiles and as many columns as it needs; it reads their a and b
    # once from memory
    rows = min(t.group, math.ceil(m / (t.bm * t.sharers)))
    columns = min(slots / rows, math.ceil(n / t.bn))
    rows = slots / columns
    wave_bytes = (rows * t.bm * t.sharers + columns * t.bn) * k * 2
    units["memory"] = wave_bytes / device.memory_tbs / 1e6 / steps / t.blocks
    start = device.start_us * (0 if t.launched_early else 1 if not t.starts else waves)
    store = device.store_us / t.blocks * (waves if t.stores else 1)

    def tflops(us: float) -> float:
        return 2 * m * n * k / (waves * steps * us * t.blocks + start + store) / 1e6

    limiter = max(units, key=units.get)
    return Prediction(
        tflops(units[limiter]), limiter, {unit: tflops(us) for unit, us in units.items()}
    )


def predict(
    rung: int, m: int = 4096, n: int = 4096, k: int = 4096, device: Device = H200
) -> Prediction:
    """TFLOP/s of a rung, and the unit that it waits for."""
    if rung in RUNGS:
        return tiles_of(RUNGS[rung], m, n, k, device)
    simple = {
        1: naive,
        2: coalesced,
        3: shared,
        4: registers,
        5: vectorised,
        14: column,
        15: warp_tile,
    }
    flop, clocks = simple[rung](k, n, device)
    limits = {unit: flop / c * device.sms * device.clock_ghz / 1e3 for unit, c in clocks.items()}
    limiter = min(limits, key=limits.get)
    return Prediction(limits[limiter], limiter, limits)


def main(argv: list[str]) -> int:
    size = int(argv[0]) if argv else 4096
    for rung in range(1, 19):
        found = predict(rung, size, size, size)
        others = ", ".join(
            f"{unit} {rate:.3g}" for unit, rate in found.limits.items() if unit != found.limiter
        )
        print(f"{rung:2} {found.tflops:6.3g} TFLOP/s by {found.limiter}; alone {others}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
