# SPDX-License-Identifier: BSD-3-Clause
"""Times calls: on CUDA by replaying a graph, on the CPU by torch's Timer.

CUDA events around a single call would measure the launch. So a graph holds many calls, one after the
other on one stream. If several contestants are compared, their rounds alternate, so that a drift of
the clock affects all of them.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence

import torch

__all__ = ["Replay", "median_us", "rounds_us"]

# The bytes of all sets of inputs together, more than any cache holds. Calls that are bound by memory
# rotate over the sets, so that they do not find their inputs in a cache.
ROTATE_BYTES = 256 << 20


class Replay:
    """A CUDA graph of `calls` calls, which go through the functions again and again. It is captured
    on the current device."""

    def __init__(self, functions: Sequence[Callable[[], object]], calls: int, pool=None) -> None:
        self.calls = max(calls, len(functions))
        self.graph = torch.cuda.CUDAGraph()
        functions[0]()  # loads kernels before the capture
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, pool=pool):
            for i in range(self.calls):
                functions[i % len(functions)]()
        self.graph.replay()
        torch.cuda.synchronize()

    def us(self) -> float:
        """The time of one call in us, by CUDA events."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / self.calls


def calls_for(us: float, total_us: float = 2000.0) -> int:
    """How many calls of `us` each a graph needs to run for `total_us`, which is much longer than the
    launch of the graph."""
    return int(min(max(total_us / max(us, 0.1), 1), 400))


def rounds_us(replays: Mapping[str, Replay], rounds: int) -> dict[str, list[float]]:
    """The times in us of every contestant, one for each round; contestants alternate."""
    times: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(rounds):
        for name, replay in replays.items():
            times[name].append(replay.us())
    return times


def median_us(call: Callable[[], object], device: torch.device) -> float:
    """The median time in us of a call whose inputs may stay in caches."""
    if device.type != "cuda":
        from torch.utils.benchmark import Timer

        timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
        return timer.blocked_autorange().median * 1e6
    with torch.cuda.device(device):
        first = Replay([call], 1).us()
        replay = Replay([call], calls_for(first))
        return statistics.median(replay.us() for _ in range(15))
