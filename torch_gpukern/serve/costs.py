# SPDX-License-Identifier: BSD-3-Clause
"""Whether drafts pay: how many times as long a step takes with drafts as without, and how many tokens
they add.

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
# With so many tokens that came as expected the count begins. Code has 0.75 of the expected tokens:
# that a guess is right says less of the one behind it than is taken for granted.
PRIOR = 8
NEXT = 1 / 2  # how much the next step counts in what drafts are expected to add
# Drafts begin if so many steps gain what their beginning and their end cost. On a simulated clock, 16
# requests for code had 0.95 of the tokens/s without drafts while these costs were not counted, and
# have 1.00 now; with 8 steps instead of 3 they have 0.95 again.
BEGIN = 3


class Costs:
    """Learns from the steps of an engine."""

    def __init__(self, model: Any) -> None:
        self.model = model
        # tokens that drafts have added, and that were expected of them, the newer ones counting more
        self.added = self.hoped = 0.0
        self.gain = 0.0  # what is expected for each request, the newer steps counting more
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
        self.added -= RETURN * self.added
        self.hoped -= RETURN * self.hoped

    def gave(self, added: int, expected: float) -> None:
        """A step with drafts has added so many tokens to those of a step without."""
        self.added += added - NEWEST * self.added
        self.hoped += expected - NEWEST * self.hoped

    @property
    def kept(self) -> float:
        """How many tokens drafts add for each one that is expected of them."""
        return (self.added + PRIOR) / (self.hoped + PRIOR)

    def pays(self, gain: float, requests: int, drafted: int, drafting: bool) -> bool:
        """Whether the next step should have drafts. Call it once behind each step.

        Steps without drafts are launched ahead. Where drafts begin and end, a step is not, so it
        waits for the host. So drafts begin only where BEGIN steps would gain that.

        Args:
            gain: tokens that drafts are expected to add to the next step.
            requests: of the step.
            drafted: the most tokens that its drafts may have.
            drafting: whether the step before was to have drafts.
        """
        self.gain += NEXT * (gain / requests - self.gain)
        if gain <= 0:
            return False
        needed = self.ratio(requests, drafted) - 1
        plain = self.model.graph_ms(requests, 0)
        if plain is not None and self.model.follows and not drafting:
            needed += self.expected(requests) / plain / BEGIN
        return self.gain * self.kept > needed

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
