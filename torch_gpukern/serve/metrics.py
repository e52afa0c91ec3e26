# SPDX-License-Identifier: BSD-3-Clause
"""Counters and durations of an engine's work."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Collection

import numpy as np

KEPT = 10_000  # the newest durations, from which percentiles are taken
# Upper ends of a histogram's buckets, in seconds: 1, 2, 5 of each power of ten.
ENDS = tuple(m * 10.0**e for e in range(-3, 2) for m in (1, 2, 5))


def percentile(values: Collection[float], q: float, none: float) -> float:
    """The q-th percentile, q in [0, 100], linear between the two values around it; `none` if there
    are no values."""
    return float(np.percentile(values, q)) if values else none


class Times:
    """Some durations: a histogram of all, and the newest for percentiles."""

    def __init__(self) -> None:
        self.counts = [0] * (len(ENDS) + 1)
        self.total = 0.0
        self.newest: deque[float] = deque(maxlen=KEPT)

    def add(self, seconds: float, times: int = 1) -> None:
        self.counts[bisect_left(ENDS, seconds)] += times
        self.total += times * seconds
        self.newest.extend([seconds] * min(times, KEPT))

    def __len__(self) -> int:
        return sum(self.counts)

    def percentile(self, q: float) -> float:
        """Of the newest durations; 0 if there are none."""
        return percentile(self.newest.copy(), q, 0.0)

    def __getstate__(self) -> dict:
        """Without the newest durations, which no other process asks for."""
        return self.__dict__ | {"newest": deque(maxlen=KEPT)}

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """(upper end and count of all times up to it, for each bucket; the sum of all times)"""
        upto = np.cumsum(self.counts).tolist()
        return list(zip([*(f"{end:g}" for end in ENDS), "+Inf"], upto)), self.total


class Metrics:
    def __init__(self) -> None:
        self.steps = self.new_tokens = self.step_tokens = self.preemptions = 0
        self.drafted = self.accepted = self.accepted_beside = 0
        self.prompt_tokens = self.reused_tokens = 0
        self.step_seconds = self.cache_use = self.most_cache_use = 0.0
        self.finished: Counter[str] = Counter()
        self.first_token = Times()  # seconds from arrival
        self.between_tokens = Times()

    def step(self, seconds: float, tokens: int, cache_use: float) -> None:
        self.steps += 1
        self.step_seconds += seconds
        self.step_tokens += tokens
        self.cache_use = cache_use
        self.most_cache_use = max(self.most_cache_use, cache_use)

    def tokens(self, n: int, now: float, arrived: float, heard: float | None) -> None:
        """n tokens of a request at once, which count as n equal waits."""
        self.new_tokens += n
        if heard is None:
            self.first_token.add(now - arrived)
        else:
            self.between_tokens.add((now - heard) / n, n)

    def drafts(self, drafted: int, accepted: int, beside: int) -> None:
        """beside: accepted tokens that are not of the first branch."""
        self.drafted += drafted
        self.accepted += accepted
        self.accepted_beside += beside

    def prefix(self, known: int, tokens: int) -> None:
        self.prompt_tokens += tokens
        self.reused_tokens += known

    def end(self, finish: str) -> None:
        self.finished[finish.split(":")[0]] += 1
