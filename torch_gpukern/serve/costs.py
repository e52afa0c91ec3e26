# SPDX-License-Identifier: BSD-3-Clause
"""Whether drafts pay: how many times as long a step takes with drafts as without.

The time of a step's graph is known from its capture, where requests had no keys. What a step takes
beyond that is learned from the steps that run: attention over keys, and what the host does while
the device waits. A step without drafts is launched ahead and hides the host, one with drafts does
not.
"""

from __future__ import annotations

import math
from typing import Any

# A step with drafts takes so many times one without if it is not captured and that one is (14.3 ms
# and 5.8, 64 requests on an 8B model in bfloat16, H200).
EAGER_COST = 2.5
# What is expected of the host before a step has run, in ms, and for each request: 16 requests took
# 2.5 ms beyond their graph, one 1.2 (H200, contexts of 1k to 2k).
HOST_MS, HOST_MS_EACH = 1.2, 0.1
NEWEST = 1 / 8  # how much the newest step counts
# How far each step without drafts brings the learned cost of drafts back to what is expected: without
# it a cost that was once too high would never be measured again.
RETURN = 1 / 100


class Costs:
    """Learns from the steps of an engine."""

    def __init__(self, model: Any) -> None:
        self.model = model
        # ms beyond the graph's of a request's share of a step, without drafts and with them
        self.plain: float | None = None
        self.drafted: float | None = None

    def expected(self, requests: int) -> float:
        """What the host adds to a step that is not launched ahead, in ms."""
        return HOST_MS + HOST_MS_EACH * requests

    def took(self, seconds: float, graph_ms: float, requests: int, drafted: int) -> None:
        """A step of decoding requests has taken so long. A stall counts as twice the graph's
        time."""
        more = min(max(1e3 * seconds - graph_ms, 0.0), graph_ms)
        usual = self.expected(requests)
        if drafted:
            before = more / usual if self.drafted is None else self.drafted
            self.drafted = before + NEWEST * (more / usual - before)
            return
        before = more / usual if self.plain is None else self.plain
        self.plain = before + NEWEST * (more / usual - before)
        if self.drafted is not None:  # contexts and the host may have changed since
            self.drafted += RETURN * (1.0 - self.drafted)

    def ratio(self, requests: int, drafted: int) -> float:
        """How many times as long a step takes with so many drafted tokens as without any."""
        plain, longer = (self.model.graph_ms(requests, n) for n in (0, drafted))
        if plain is None or longer is None:
            # Where graphs have drafts, but not for so many requests, the device is busy without them.
            return math.inf if self.model.shapes.drafts else EAGER_COST
        usual = self.expected(requests)
        ahead = 0.0 if self.model.follows else 1.0
        plain += usual * (ahead if self.plain is None else self.plain)
        return (longer + usual * (1.0 if self.drafted is None else self.drafted)) / plain
