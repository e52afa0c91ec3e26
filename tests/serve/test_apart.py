# SPDX-License-Identifier: BSD-3-Clause
"""The engine in a process of its own: the same answers, and what happens when one process ends."""

import os
import signal
import threading
import time

import pytest
import torch
from serving import prompts_of, run

from torch_gpukern.nn import patch
from torch_gpukern.serve import Busy, Engine, Refused, Request, TransformersModel
from torch_gpukern.serve.apart import Apart, Running
from torch_gpukern.serve.random_models import random_llama

pytest.importorskip("transformers", reason="transformers is not installed")


def tiny(max_waiting):
    net = random_llama("tiny")
    patch(net, say=None)
    return Engine(TransformersModel(net, 64), max_batch=4, max_waiting=max_waiting)


def work(max_waiting):
    """In the engine's process."""
    torch.set_num_threads(1)
    return Running(tiny(max_waiting), os.getpid(), lambda: None, lambda call: None)


def refuses(*_):
    raise ValueError("there is no such model")


@pytest.fixture(scope="module")
def apart():
    made = Apart(work, 8)
    made.pid = made.wait()
    yield made
    made.close()
    made.end()
    assert made.lost is None and made._process.exitcode == 0


def requests_of():
    first, second = prompts_of(20, 45)
    return [
        *[Request(first, max_tokens=9, temperature=1.2, seed=i, logprobs=2) for i in range(3)],
        Request(second, max_tokens=30),
        Request(second, max_tokens=30, stop_ids=frozenset(range(256))),
    ]


def test_answers_are_those_of_an_engine_here(apart):
    here, there, told = requests_of(), requests_of(), {}
    engine = tiny(8)
    engine.submit_all(here)
    run(engine)
    for request in there:
        request.on_tokens = lambda r, new, finish: told.setdefault(id(r), []).extend(new)
    apart.submit_all(there)
    for x, y in zip(here, there, strict=True):
        assert y.over.wait(60)
        assert (x.answer, x.finish) == (y.answer, y.finish) and told[id(y)] == y.answer
        assert [[i for i, _ in s.top] for s in x.scores] == [
            [i for i, _ in s.top] for s in y.scores
        ]
        assert [s.logprob for s in y.scores] == pytest.approx(
            [s.logprob for s in x.scores], abs=1e-4
        )
    assert len(there[0].scores) == 9
    numbers = apart.numbers()
    assert numbers.used_pages == numbers.running == numbers.waiting == 0 and numbers.pages == 64
    assert numbers.metrics.finished == {"length": 4, "stop": 1}


def test_what_is_refused_here_never_travels(apart):
    with pytest.raises(Refused, match="prompt has token 512"):
        apart.submit_all([Request([512])])
    many = [Request([1], max_tokens=2) for _ in range(13)]
    with pytest.raises(Busy, match="0 requests run and wait already, of 12"):
        apart.submit_all(many)
    apart.submit_all(many[:12])
    assert all(request.over.wait(60) for request in many[:12])


def test_a_request_that_is_cancelled_ends(apart):
    request = Request([1], max_tokens=1000)
    began = threading.Event()
    request.on_tokens = lambda *_: began.set()
    apart.submit_all([request])
    assert began.wait(60)
    request.cancel()
    assert request.over.wait(60) and request.finish == "abort" and len(request.answer) < 1000
    assert apart.numbers().used_pages == 0


def test_what_work_raises_is_raised_here():
    made = Apart(refuses)
    with pytest.raises(ValueError, match="there is no such model"):
        made.wait()
    made.end()


def test_a_killed_engine_is_noticed():
    made, said = Apart(work, 8), []
    pid = made.wait()
    made.on_loss = said.append
    request = Request([1], max_tokens=1000)
    made.submit_all([request])
    while not request.answer:
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    assert request.over.wait(60)
    text = "the engine's process has ended, exit code -9"
    assert request.finish == f"error: {text}" and not made.alive
    with pytest.raises(Busy, match="the server closes"):
        made.submit_all([Request([1])])
    made.close()
    made.end()
    assert said == [text]
