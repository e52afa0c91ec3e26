# SPDX-License-Identifier: BSD-3-Clause
"""Times of calls: on CUDA by the replay of a graph, on the CPU by torch's Timer.

Events around single calls would measure the launch. A graph holds many calls, one after the other
on one stream, and a contestant's rounds alternate with the others', so that a drift of the clock
meets all of them.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence

import torch

__all__ = ["Replay", "median_us", "rounds_us"]

# Inputs that together fill more than any cache holds: where bytes bound a call, it must not find
# its own of last time.
ROTATE_BYTES = 256 << 20


class Replay:
    """`calls` of functions in turn, captured once as a CUDA graph on the current device."""

    def __init__(self, functions: Sequence[Callable[[], object]], calls: int, pool=None) -> None:
        self.calls = max(calls, len(functions))
        self.graph = torch.cuda.CUDAGraph()
        functions[0]()  # kernels are loaded before the capture
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, pool=pool):
            for i in range(self.calls):
                functions[i % len(functions)]()
        self.graph.replay()
        torch.cuda.synchronize()

    def us(self) -> float:
        """Of one call, by the device's own clock."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / self.calls


def calls_for(us: float, total_us: float = 2000.0) -> int:
    """Calls of a graph that runs for some milliseconds, long beside the start of its replay."""
    return int(min(max(total_us / max(us, 0.1), 1), 400))


def rounds_us(replays: Mapping[str, Replay], rounds: int) -> dict[str, list[float]]:
    """Every contestant once a round, alternately: its times."""
    times: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(rounds):
        for name, replay in replays.items():
            times[name].append(replay.us())
    return times


def median_us(call: Callable[[], object], device: torch.device) -> float:
    """Of a call whose inputs stay where they are."""
    if device.type != "cuda":
        from torch.utils.benchmark import Timer

        timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
        return timer.blocked_autorange().median * 1e6
    with torch.cuda.device(device):
        first = Replay([call], 1).us()
        replay = Replay([call], calls_for(first))
        return statistics.median(replay.us() for _ in range(15))
