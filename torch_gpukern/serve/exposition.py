# SPDX-License-Identifier: BSD-3-Clause
"""An engine's metrics in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from .engine import Numbers

__all__ = ["CONTENT_TYPE", "text"]


class Collector:
    def __init__(self, numbers: Numbers) -> None:
        self.numbers = numbers

    def collect(self) -> Iterator[Metric]:
        m, running, waiting, pages, used_pages = self.numbers
        for name, value, about in (
            ("steps", m.steps, "Steps of the engine"),
            ("step_seconds", m.step_seconds, "Time in steps"),
            ("step_tokens", m.step_tokens, "Tokens that steps computed"),
            ("prompt_tokens", m.prompt_tokens, "Tokens of prompts"),
            ("reused_tokens", m.reused_tokens, "Tokens of prompts found in the cache"),
            ("new_tokens", m.new_tokens, "Tokens of answers"),
            ("drafted_tokens", m.drafted, "Tokens drafted"),
            ("accepted_drafts", m.accepted, "Drafted tokens that were right"),
            ("accepted_branch_drafts", m.accepted_beside, "Those that are not of the first branch"),
            ("preemptions", m.preemptions, "Requests that gave their pages back and waited"),
        ):
            yield CounterMetricFamily(f"gpukern_{name}", about, value)
        finished = CounterMetricFamily(
            "gpukern_requests", "Requests that ended, by the reason", labels=["reason"]
        )
        for reason, count in sorted(m.finished.copy().items()):
            finished.add_metric([reason], count)
        yield finished
        for name, number, about in (
            ("running_requests", running, "Requests that run"),
            ("waiting_requests", waiting, "Requests that wait"),
            ("pages", pages, "Pages of the cache"),
            ("used_pages", used_pages, "Pages that requests hold"),
        ):
            yield GaugeMetricFamily(f"gpukern_{name}", about, number)
        for name, times, about in (
            ("first_token_seconds", m.first_token, "From a request's arrival to its first token"),
            ("between_tokens_seconds", m.between_tokens, "Between two tokens of a request"),
        ):
            buckets, total = times.buckets()
            yield HistogramMetricFamily(f"gpukern_{name}", about, buckets, total)


def text(numbers: Numbers) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(numbers))  # type: ignore[arg-type]
    return generate_latest(registry)
