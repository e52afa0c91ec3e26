# SPDX-License-Identifier: BSD-3-Clause
"""A request: a prompt, how its answer is drawn, and how the engine refuses one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import index

from .drafts import NGrams

OnTokens = Callable[["Request", list[int], "str | None"], None]


class Refused(ValueError):
    """The engine does not take this request; `parameter` says why."""

    def __init__(self, parameter: str, text: str) -> None:
        super().__init__(text)
        self.parameter = parameter


class Busy(RuntimeError):
    """Too many requests wait, or the engine closes."""


def integers(name: str, values: Iterable[int]) -> list[int]:
    """They as ints of our own; what is none must not reach a step, which would fail for every
    request in it."""
    try:
        return [index(x) for x in values]
    except TypeError:
        raise Refused(name, f"{name} is {values!r:.80}; expected integers") from None


@dataclass(eq=False)
class Request:
    """A prompt and how to go on.

    Args:
        prompt: token ids, at least one.
        max_tokens: at most so many new tokens.
        temperature: 0 takes the most likely token, else one is drawn from softmax(logits /
        temperature).
        top_p: the draw is among the most likely tokens whose probabilities add up to this.
        seed: of the draw.
        stop_ids: tokens that end the answer; they are its last.
        on_tokens: gets the request, its new tokens, and the reason why it ended or None: "stop",
            "length", "cancelled" or "error: ...". It is called in the engine's thread and must not
            wait.
    """

    prompt: Sequence[int]
    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    on_tokens: OnTokens | None = None

    tokens: list[int] = field(default_factory=list, init=False)  # the prompt, then the answer
    finish: str | None = field(default=None, init=False)
    handle: int | None = field(default=None, init=False)
    cached: int = field(default=0, init=False)  # tokens whose keys are in the cache
    cancelled: bool = field(default=False, init=False)
    preempted: int = field(default=0, init=False)
    drafts: int = field(default=1, init=False)  # how many tokens to draft next
    ngrams: NGrams = field(default_factory=NGrams, init=False)
    arrived: float = field(default=0.0, init=False)
    heard: float | None = field(default=None, init=False)  # when its last token was made
    over: threading.Event = field(default_factory=threading.Event, init=False)

    @property
    def answer(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    def cancel(self) -> None:
        """The engine ends it before its next step."""
        self.cancelled = True
