# SPDX-License-Identifier: BSD-3-Clause
"""A request: a prompt, how its answer is drawn, and how the engine refuses one.

The checks of every value are written here once, for callers of the engine and for bodies of HTTP.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import NamedTuple

from .drafts import NGrams

OnTokens = Callable[["Request", list[int], "str | None"], None]

MOST_LOGPROBS = 20


class Refused(ValueError):
    """The engine does not take this request; `parameter` says why."""

    def __init__(
        self, parameter: str | None, text: str, *, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(text)
        self.parameter, self.status, self.code = parameter, status, code


class Busy(RuntimeError):
    """Too many requests wait, or the engine closes."""


def shown(value: object) -> str:
    """A value for an error's text, at most 80 characters."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of more than 4300 digits
        return "an integer of more than 4300 digits"
    return text if len(text) <= 80 else text[:77] + "..."


def integer(name: str, value: object, low: int | None = None, high: int | None = None) -> int:
    """The value as an int of our own."""
    try:
        if isinstance(value, bool):
            raise TypeError
        x = index(value)  # type: ignore[arg-type]
    except TypeError:
        raise Refused(name, f"{name} is {shown(value)}; expected an integer") from None
    if low is not None and x < low:
        raise Refused(name, f"{name} is {shown(value)}; expected at least {low}")
    if high is not None and x > high:
        raise Refused(name, f"{name} is {shown(value)}; expected at most {high}")
    return x


class Range(NamedTuple):
    low: float
    high: float
    above: bool = False  # whether `low` itself is refused

    def __str__(self) -> str:
        if self.high == FINITE:
            return f"above {self.low:g}" if self.above else f"from {self.low:g} on"
        least = f"above {self.low:g}, at most" if self.above else f"from {self.low:g} to"
        return f"{least} {self.high:g}"


FINITE = sys.float_info.max
RANGES = {
    "temperature": Range(0, FINITE),
    "top_p": Range(0, 1, above=True),
    "min_p": Range(0, 1),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "repetition_penalty": Range(0, FINITE, above=True),
}


def number(name: str, value: object) -> float:
    """The value as a float within its range. An integer of any size is looked at: one that is too
    large for a float must not reach a step, which would fail for every request in it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Refused(name, f"{name} is {shown(value)}; expected a number")
    try:
        x = float(value)
    except OverflowError:
        x = float("inf")
    low, high, above = RANGES[name]
    if not (low < x if above else low <= x) or not x <= high:
        raise Refused(name, f"{name} is {shown(value)}; expected a number {RANGES[name]}")
    return x


def tokens_of(name: str, values: Iterable[int], vocab: int) -> list[int]:
    """The values as tokens of the model."""
    try:
        found = [index(x) for x in values]
    except TypeError:
        raise Refused(name, f"{name} is {shown(values)}; expected integers") from None
    for token in found:
        if not 0 <= token < vocab:
            raise Refused(name, f"{name} has token {shown(token)}; expected 0 to {vocab - 1}")
    return found


class Scores(NamedTuple):
    """The log probability of a token, and the most likely tokens at its place, best first. Both are
    the model's own: before penalties, temperature and filters."""

    logprob: float
    top: list[tuple[int, float]]


@dataclass(eq=False)
class Request:
    """A prompt and how to go on.

    The logits of a place become a token in this order: penalties, temperature, min_p, top_k, top_p,
    each over what the one before has left.

    Args:
        prompt: token ids, at least one.
        max_tokens: at most so many new tokens; None: as many as fit.
        temperature: 0 takes the most likely token, else one is drawn from softmax(logits /
            temperature).
        top_p: the draw is among the fewest most likely tokens whose probabilities add up to this.
        top_k: the draw is among so many most likely tokens; 0 and -1: among all. Of equal logits
            the lower token counts first.
        min_p: tokens are left out whose probability is below this share of the largest.
        presence_penalty: taken off the logit of each token that the answer has.
        frequency_penalty: taken off it as often as the answer has the token.
        repetition_penalty: divides positive and multiplies negative logits of each token that the
            prompt or the answer has.
        seed: of the draw. A token depends on seed and position, not on other requests.
        stop_ids: tokens that end the answer; they are its last.
        logprobs: None, or how many of the most likely tokens `scores` has for each place.
        on_tokens: gets the request, its new tokens, and the reason why it ended or None: "stop",
            "length", "abort" or "error: ...". It is called in the engine's thread and must not
            wait.
    """

    prompt: Sequence[int]
    max_tokens: int | None = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    on_tokens: OnTokens | None = None

    tokens: list[int] = field(default_factory=list, init=False)  # the prompt, then the answer
    scores: list[Scores] = field(default_factory=list, init=False)  # of the answer's tokens
    finish: str | None = field(default=None, init=False)
    # the requests that were submitted with it and have the same prompt, itself among them
    group: list[Request] = field(default_factory=list, init=False, repr=False)
    handle: int | None = field(default=None, init=False)
    cached: int = field(default=0, init=False)  # tokens whose keys are in the cache
    leaves: str | None = field(default=None, init=False)  # why the engine is to end it
    # is called with that reason, where the engine is another process (apart.py)
    on_cancel: Callable[[str], None] | None = field(default=None, init=False, repr=False)
    preempted: int = field(default=0, init=False)
    drafts: int = field(default=1, init=False)  # how many tokens to draft next
    ngrams: NGrams = field(default_factory=NGrams, init=False)
    arrived: float = field(default=0.0, init=False)
    heard: float | None = field(default=None, init=False)  # when its last token was made
    over: threading.Event = field(default_factory=threading.Event, init=False)

    @property
    def answer(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def answered(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens) - len(self.prompt)

    @property
    def penalised(self) -> bool:
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )

    def cancel(self, finish: str = "abort") -> None:
        """The engine ends it before its next step. The first reason that is given counts."""
        if self.leaves is None:
            self.leaves = finish
            if self.on_cancel is not None:
                self.on_cancel(finish)

    def check(self, vocab: int, max_length: int) -> list[int]:
        """Its prompt as tokens. Numbers become floats and ints of our own.

        Raises:
            Refused: by name, what no step could run.
        """
        if self.tokens:
            raise Refused("request", "the request was submitted before; make a new one")
        prompt = tokens_of("prompt", self.prompt, vocab)
        if not prompt:
            raise Refused("prompt", "prompt is empty; expected at least one token")
        for name in RANGES:
            setattr(self, name, number(name, getattr(self, name)))
        self.seed = integer("seed", self.seed)
        self.top_k = integer("top_k", self.top_k, -1)
        if self.logprobs is not None:
            self.logprobs = min(integer("logprobs", self.logprobs, 0, MOST_LOGPROBS), vocab)
        self.stop_ids = frozenset(tokens_of("stop_ids", self.stop_ids, vocab))
        room = max_length - len(prompt)
        if self.max_tokens is None:
            self.max_tokens = max(room, 1)
        self.max_tokens = integer("max_tokens", self.max_tokens, 1)
        if self.max_tokens > room:
            raise Refused(
                "max_tokens",
                f"{len(prompt)} tokens of prompt and max_tokens {shown(self.max_tokens)} are more "
                f"than the {max_length} that fit",
                code="context_length_exceeded",
            )
        return prompt
