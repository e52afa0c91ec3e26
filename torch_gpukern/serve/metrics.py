# SPDX-License-Identifier: BSD-3-Clause
"""What an engine has done, as numbers and in Prometheus' text form."""

from __future__ import annotations

import time
from collections import Counter, deque

import numpy as np

KEPT = 10_000  # of the newest times


class Metrics:
    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.steps = self.new_tokens = self.step_tokens = self.preemptions = 0
        self.drafted = self.accepted = self.prompt_tokens = self.reused_tokens = 0
        self.step_seconds = self.cache_use = self.most_cache_use = 0.0
        self.finished: Counter[str] = Counter()
        self.first_token: deque[float] = deque(maxlen=KEPT)  # seconds from arrival
        self.between_tokens: deque[float] = deque(maxlen=KEPT)

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
            self.first_token.append(now - arrived)
        else:
            self.between_tokens.extend([(now - heard) / n] * n)

    def drafts(self, drafted: int, accepted: int) -> None:
        self.drafted += drafted
        self.accepted += accepted

    def prefix(self, known: int, tokens: int) -> None:
        self.prompt_tokens += tokens
        self.reused_tokens += known

    def end(self, finish: str) -> None:
        self.finished[finish.split(":")[0]] += 1

    def numbers(self) -> dict[str, float]:
        found = {
            "steps": self.steps,
            "new_tokens": self.new_tokens,
            "step_tokens": self.step_tokens,
            "tokens_per_second": self.new_tokens / max(self.step_seconds, 1e-9),
            "preemptions": self.preemptions,
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "drafted_tokens": self.drafted,
            "accepted_drafts": self.accepted,
            "cache_use": self.cache_use,
            "most_cache_use": self.most_cache_use,
        }
        for name, times in (
            ("first_token", self.first_token),
            ("between_tokens", self.between_tokens),
        ):
            times = list(times)
            for q in (50, 90, 99):
                found[f"{name}_seconds_p{q}"] = float(np.percentile(times, q)) if times else 0.0
        return found

    def text(self) -> str:
        lines = [f"gpukern_{name} {value:.9g}" for name, value in self.numbers().items()]
        lines += [
            f'gpukern_finished{{reason="{reason}"}} {n}'
            for reason, n in sorted(self.finished.items())
        ]
        return "\n".join(lines) + "\n"
