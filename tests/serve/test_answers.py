# SPDX-License-Identifier: BSD-3-Clause
"""How tokens come from the engine's thread into the loop of HTTP."""

import asyncio
import threading

from torch_gpukern.serve import Request
from torch_gpukern.serve.answers import Answers, Post
from torch_gpukern.serve.tokenizer import Bytes


class Held:
    """An engine that keeps requests and runs none."""

    def __init__(self):
        self.requests = []

    def submit_all(self, requests):
        self.requests += requests


def told(requests, new, finish):
    for request in requests:
        request.on_tokens(request, new, finish)


def in_another_thread(call, *args):
    """The loop does not run meanwhile."""
    thread = threading.Thread(target=call, args=args)
    thread.start()
    thread.join()


def test_a_step_wakes_the_loop_once_and_a_late_loop_gets_one_part():
    async def main():
        post, engine, woken = Post(), Held(), []
        wake = post.wake
        post.wake = lambda call: (woken.append(call), wake(call))
        calls = [Answers(engine, [Request([i])], [], Bytes(), post) for i in range(20)]
        in_another_thread(told, engine.requests, [97], None)
        firsts = [await anext(call.parts()) for call in calls]
        assert len(woken) == 1 and [part.text for part in firsts] == ["a"] * 20
        for new, finish in (([98], None), ([99, 100], None), ([101], "length")):
            in_another_thread(told, engine.requests, new, finish)
        for call in calls:
            (part,) = [part async for part in call.parts()]
            assert part.text == "bcde" and part.finish == "length" and call.made == 5
        assert len(woken) == 2

    asyncio.run(main())


def test_answers_of_a_call_keep_their_own_tokens():
    async def main():
        engine = Held()
        answers = Answers(engine, [Request([1]), Request([2])], [], Bytes(), Post())
        one, two = engine.requests
        for request, new, finish in (
            (one, [97], None),
            (one, [98], None),
            (two, [120], None),
            (one, [99], "length"),
            (two, [121], "stop"),
        ):
            in_another_thread(told, [request], new, finish)
        parts = [part async for part in answers.parts()]
        assert [(p.answer, p.text, p.finish) for p in parts] == [
            (0, "ab", None),
            (1, "x", None),
            (0, "c", "length"),
            (1, "", "stop"),
        ]

    asyncio.run(main())


def test_a_loop_that_has_ended_is_an_error_for_who_tells():
    """The engine then cancels the request."""

    async def main():
        Answers(engine, [Request([1])], [], Bytes(), Post())

    engine, errors = Held(), []
    asyncio.run(main())
    for _ in range(2):
        try:
            told(engine.requests, [97], None)
        except RuntimeError as error:
            errors.append(str(error))
    assert errors == ["Event loop is closed"] * 2
