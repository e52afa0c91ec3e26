# SPDX-License-Identifier: BSD-3-Clause
"""Turns the tokens of a call's answers into parts of text, in the event loop of HTTP."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

from .request import Request, Scores
from .text import Stream


class Token(NamedTuple):
    """A token whose log probability was asked for, and where its text begins in the answer."""

    token: int
    scores: Scores
    offset: int


class Part(NamedTuple):
    answer: int  # its number in the call
    text: str
    tokens: list[Token]
    finish: str | None


class Answer:
    """The text of a request that runs."""

    def __init__(self, index: int, request: Request, text: Stream) -> None:
        self.index, self.request, self.text = index, request, text
        self.finish: str | None = None
        self.made = 0  # tokens up to the end of the text, an end token included

    def add(self, new: Sequence[int], finish: str | None) -> Part:
        parts, tokens = [], []
        for token in new[:-1] if finish == "stop" else new:  # without the end token
            at, offset = len(self.text.tokens), self.text.length
            parts.append(self.text.add([token]))
            if self.request.logprobs is not None:
                tokens.append(Token(token, self.request.scores[at], offset))
            if self.text.stopped:
                break
        if finish:
            parts.append(self.text.add([], last=True))
        self.made = len(self.text.tokens) + (finish == "stop" and not self.text.stopped)
        if self.text.stopped:
            finish = "stop"
            self.request.cancel(finish)
        self.finish = finish
        return Part(self.index, "".join(parts), tokens, finish)


Told = tuple[Answer, list[int], "str | None"]  # new tokens, and why they are the last


class Queue:
    """What one task takes from a loop's callbacks."""

    def __init__(self) -> None:
        self.items: deque[Told] = deque()
        self.filled = asyncio.Event()

    def put(self, item: Told) -> None:
        self.items.append(item)
        self.filled.set()

    async def get(self) -> Told:
        while not self.items:
            self.filled.clear()
            await self.filled.wait()
        return self.items.popleft()

    def next_is(self, answer: Answer) -> bool:
        """Whether the next item is there, and of this answer."""
        return bool(self.items) and self.items[0][0] is answer

    def get_nowait(self) -> Told:
        return self.items.popleft()


class Post:
    """Puts things from other threads into queues of a loop. A step wakes the loop once, not once
    for each request."""

    def __init__(self) -> None:
        self.wake = asyncio.get_running_loop().call_soon_threadsafe
        self.items: deque[tuple[Queue, Told]] = deque()
        self.woken = False

    def put(self, queue: Queue, item: Told) -> None:
        self.items.append((queue, item))
        if not self.woken:
            self.woken = True
            try:
                self.wake(self._empty)
            except RuntimeError:  # the loop has ended
                self.woken = False
                raise

    def _empty(self) -> None:
        self.woken = False  # first: what is put from now on wakes the loop again
        while self.items:
            queue, item = self.items.popleft()
            queue.put(item)


class Answers:
    """The requests of a call, which run while one is in its `with`."""

    def __init__(
        self, engine: Any, requests: Sequence[Request], stop: Sequence[str], tokenizer, post: Post
    ) -> None:
        self.answers = [Answer(i, r, Stream(tokenizer, stop)) for i, r in enumerate(requests)]
        self.queue = Queue()
        for answer in self.answers:

            def tell(_, new, finish, answer=answer) -> None:
                post.put(self.queue, (answer, new, finish))

            answer.request.on_tokens = tell
        engine.submit_all(requests)

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *error: object) -> None:
        for answer in self.answers:
            answer.request.cancel()

    @property
    def made(self) -> int:
        return sum(answer.made for answer in self.answers)

    async def parts(self) -> AsyncIterator[Part]:
        """Those of all answers, as they come. Each answer's last part has its finish. If the loop
        is late, tokens of several steps are one part."""
        left = len(self.answers)
        while left:
            answer, new, finish = await self.queue.get()
            if answer.finish:
                continue  # tokens behind a stop string
            while finish is None and self.queue.next_is(answer):
                _, more, finish = self.queue.get_nowait()
                new = new + more
            part = answer.add(new, finish)
            left -= part.finish is not None
            if part.text or part.tokens or part.finish:
                yield part
