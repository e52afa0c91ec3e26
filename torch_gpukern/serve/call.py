# SPDX-License-Identifier: BSD-3-Clause
"""A call of either API: the requests that it makes, and what both forms have in common."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .answers import Part, Token
from .fields import Fields
from .request import Refused, Request, integer, shown

MOST_ANSWERS = 128  # of a call
MOST_STOPS = 4
DRAWING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


class Form(Protocol):
    """How answers look in JSON."""

    prefix: str  # of ids
    kind: str  # of a whole answer
    kind_of_part: str

    def opening(self, index: int) -> dict | None:
        """The choice that begins a stream."""

    def part(self, part: Part) -> dict:
        """A choice of a stream."""

    def whole(self, index: int, text: str, tokens: list[Token], finish: str) -> dict:
        """A choice."""


@dataclass
class Call:
    form: Form
    requests: list[Request]  # the answers of the first prompt, then those of the next
    prompt_tokens: int
    stop: list[str]
    stream: bool
    include_usage: bool


def read(
    fields: Fields,
    form: Form,
    prompts: Sequence[list[int]],
    *,
    max_tokens: Any,
    logprobs: int | None,
    stop_ids: frozenset[int],
) -> Call:
    """What both APIs ask for alike. Values are refused by the engine, by the same names."""
    n = integer("n", fields.take("n", 1), 1, MOST_ANSWERS)
    if n * len(prompts) > MOST_ANSWERS:
        raise Refused(
            "prompt",
            f"{len(prompts)} prompts with {n} answers each are more than the {MOST_ANSWERS} answers "
            f"of a call",
        )
    seed = integer("seed", fields.take("seed", secrets.randbits(63)))
    drawing = {name: fields.take(name) for name in DRAWING}
    drawing = {name: x for name, x in drawing.items() if x is not None}
    drawing.setdefault("temperature", 1.0)
    stop, stream = stops(fields), fields.boolean("stream")
    include_usage = streamed_usage(fields, stream)
    fields.text("user")
    fields.only("logit_bias", {})
    fields.done()
    requests = [
        Request(
            prompt,
            max_tokens=max_tokens,
            seed=seed + i,
            stop_ids=stop_ids,
            logprobs=logprobs,
            **drawing,
        )
        for prompt in prompts
        for i in range(n)
    ]
    tokens = sum(len(prompt) for prompt in prompts)
    return Call(form, requests, tokens, stop, stream, include_usage)


def stops(fields: Fields) -> list[str]:
    stop = fields.take("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if (
        not isinstance(stop, list)
        or len(stop) > MOST_STOPS
        or not all(isinstance(s, str) and s for s in stop)
    ):
        raise Refused(
            "stop",
            f"stop is {shown(stop)}; expected a string, or up to {MOST_STOPS} of them, none empty",
        )
    return stop


def streamed_usage(fields: Fields, stream: bool) -> bool:
    options = fields.take("stream_options")
    if options is None:
        return False
    name = "stream_options"
    if not stream:
        raise Refused(name, f"{name} is {shown(options)}; expected it only with stream: true")
    if not isinstance(options, dict) or not options.keys() <= {"include_usage"}:
        raise Refused(
            name, f"{name} is {shown(options)}; expected an object that has only include_usage"
        )
    usage = options.get("include_usage", False)
    if usage is not None and not isinstance(usage, bool):
        raise Refused(name, f"{name}.include_usage is {shown(usage)}; expected true or false")
    return bool(usage)
