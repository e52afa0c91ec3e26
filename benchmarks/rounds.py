# SPDX-License-Identifier: BSD-3-Clause
"""Rounds of timed blocks: every contestant runs once a round, in a random order.

A GPU under load is limited by its power, and a block inherits the clock that the block before it
left. That moves a ratio by 9 to 12 %. A rotated order would keep each contestant behind the same
other one and so keep the error. Two things remove it: the order is random, and on a device that
`carries_over` each block follows an untimed block of the same contestant.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from devices import Cpu, Cuda


@dataclass(frozen=True)
class Effort:
    """How long a case may run. A block lasts about block_us. A case runs at least min_rounds
    rounds, and then until `seconds` are spent or max_rounds are done."""

    block_us: float
    min_rounds: int
    max_rounds: int
    seconds: float


FULL = Effort(block_us=20_000, min_rounds=5, max_rounds=31, seconds=1.5)
QUICK = Effort(block_us=5_000, min_rounds=3, max_rounds=5, seconds=0.2)


class Rotation:
    """Calls fn on one input after the other, so that a memory-bound call finds cold memory."""

    def __init__(self, fn: Callable, inputs: list[tuple]) -> None:
        self.fn, self.inputs, self.next = fn, inputs, 0

    def __call__(self):
        inputs = self.inputs[self.next]
        self.next = (self.next + 1) % len(self.inputs)
        return self.fn(*inputs)


@dataclass(frozen=True)
class Block:
    """A timed block of calls: us of one call, clock and power of the device while it ran (0 if
    unknown), and whether the device waited for the host (None if unknown)."""

    us: float
    clock_mhz: float
    watts: float
    host_bound: bool | None = None


def interleave(
    device: Cpu | Cuda,
    calls: dict[str, Callable[[], object]],
    effort: Effort,
    live: Sequence[str] = (),
) -> dict[str, list[Block]]:
    """The blocks of every contestant, one of each a round. The random orders are the same in every
    run."""
    count = {}
    for name, call in calls.items():
        call()
        device.sync()
        count[name] = max(
            1, min(device.most_calls, round(effort.block_us / max(device.estimate(call), 0.1)))
        )
    blocks: dict[str, list[Block]] = {name: [] for name in calls}
    draw, order = random.Random(0), list(calls)
    start, rounds = time.perf_counter(), 0
    while rounds < effort.min_rounds or (
        rounds < effort.max_rounds and time.perf_counter() - start < effort.seconds
    ):
        draw.shuffle(order)
        for name in order:
            if device.carries_over:
                device.time_block(calls[name], count[name], name in live)
            us = device.time_block(calls[name], count[name], name in live)
            blocks[name].append(Block(us, *device.state(), device.host_bound))
        rounds += 1
    return blocks
