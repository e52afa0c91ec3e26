# SPDX-License-Identifier: BSD-3-Clause
"""Runs the engine in a process of its own.

HTTP takes about as much time in Python as the steps do, and threads of one process share one lock. A
wait of 4 ms for the device became 14 ms beside a thread that wrote 64 streams. So `gpukern serve` runs
the engine in another process. This module has both ends of the pipe between them.

    Apart     in the process of HTTP: the methods of an Engine that the application calls
    _begin    in the process of the engine

After each step the engine sends one message with the tokens of all requests. The engine's process
ends when the pipe does. If it ends first, all requests get an error, and `on_loss` is called.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import count
from multiprocessing import connection, get_context
from typing import Any, NamedTuple

from .engine import Engine, Numbers
from .metrics import Metrics
from .ranks import end_with_parent
from .request import Busy, Request

GRACE_SECONDS = 20.0
# What the engine needs of a request: its arguments, but for what is called here.
SENT = tuple(f.name for f in fields(Request) if f.init and f.name != "on_tokens")


class Running(NamedTuple):
    """What `work` of Apart makes in the engine's process."""

    engine: Engine
    about: Any  # is sent to the other process
    close: Callable[[], None]
    watch: Callable[[Callable[[str], None]], None]  # takes what is to be called when a rank is lost


class Ready(NamedTuple):
    """What the other process says when it can take requests."""

    about: Any
    vocab: int
    max_length: int
    most: int  # requests that may run and wait


class Told(NamedTuple):
    """What a step has made: (number of the request, new tokens, finish, their scores) each."""

    parts: list[tuple[int, list[int], str | None, list]]
    running: int
    waiting: int


class Apart:
    """An engine in another process.

    Args:
        work: makes the engine there as ``work(*args)``; importable by name.

    Attributes:
        on_loss: is called in a thread with a text when the other process, or a rank of its model,
            has ended.
        lost: that text.

    Raises:
        Exception: what `work` has raised.
    """

    def __init__(self, work: Callable[..., Running], *args: Any) -> None:
        self.on_loss: Callable[[str], None] = lambda text: None
        self.lost: str | None = None
        self.closing = False
        self.running: Sequence[None] = ()
        self.waiting: Sequence[None] = ()
        self._requests: dict[int, Request] = {}
        self._numbers = Numbers(Metrics(), 0, 0, 0, 0)
        self._ids = count()
        self._lock = threading.Lock()  # of the pipe's end, and of _requests
        self._ready = False
        self._over = threading.Event()
        self._counted = threading.Event()
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        # not daemonic, because the ranks of a model are children of it
        self._process = context.Process(target=_begin, args=(theirs, work, *args), name="engine")
        self._process.start()
        theirs.close()

    def wait(self) -> Any:
        """Until the engine can take requests. Returns `about`."""
        try:
            first = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(GRACE_SECONDS)
            raise ValueError(
                f"the engine's process ended, exit code {self._process.exitcode}, before it was "
                f"ready"
            ) from None
        if isinstance(first, Exception):
            raise first
        self.about, self.vocab, self.max_length, self.most = first
        self._ready = True
        threading.Thread(target=self._read, name="engine's tokens", daemon=True).start()
        return self.about

    # ---- what the application calls ----

    @property
    def alive(self) -> bool:
        return not self._over.is_set()

    def submit_all(self, requests: Sequence[Request]) -> None:
        """As that of Engine."""
        prompts = [request.check(self.vocab, self.max_length) for request in requests]
        with self._lock:
            if self.closing or self._over.is_set():
                raise Busy("the server closes")
            if len(self._requests) + len(requests) > self.most:
                raise Busy(f"{len(self._requests)} requests run and wait already, of {self.most}")
            numbers = []
            for request, prompt in zip(requests, prompts):
                request.prompt, request.tokens = tuple(prompt), prompt
                request.arrived = time.perf_counter()
                number = next(self._ids)
                numbers.append(number)
                self._requests[number] = request
                request.on_cancel = lambda finish, number=number: self._cancel(number, finish)
            settings = [{name: getattr(r, name) for name in SENT} for r in requests]
            self._send("submit", list(zip(numbers, settings)))

    def _cancel(self, number: int, finish: str) -> None:
        with self._lock:
            if number in self._requests:
                self._send("cancel", number, finish)

    def drain(self) -> None:
        with self._lock:
            self.closing = True
            self._send("drain")

    def close(self) -> None:
        """Ends the engine. Requests that are not done end with "abort"."""
        with self._lock:
            self.closing = True
            self._send("close")
        self._over.wait()

    def __enter__(self) -> Apart:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def numbers(self) -> Numbers:
        """As those of Engine; may wait a moment for the other process."""
        self._counted.clear()
        with self._lock:
            self._send("numbers")
        if self.alive:
            self._counted.wait(2.0)
        return self._numbers

    def end(self) -> None:
        """Ends the process."""
        self._over.set()  # its end is no loss
        if self._ready:
            with self._lock:
                self._send("end")  # closing the pipe would not do: _read keeps it open
            self._process.join(GRACE_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _send(self, *message: Any) -> None:
        try:
            self._pipe.send(message)
        except OSError:  # it has ended, which _read says
            pass

    # ---- what the engine says ----

    def _read(self) -> None:
        loss: str | None = None  # that was not said yet
        try:
            while True:
                message = self._pipe.recv()
                if isinstance(message, Told):
                    self.running = range(message.running)  # type: ignore[assignment]
                    self.waiting = range(message.waiting)  # type: ignore[assignment]
                    for part in message.parts:
                        self._tell(*part)
                elif isinstance(message, Numbers):
                    self._numbers = message
                    self._counted.set()
                elif message is None:
                    self._over.set()
                else:
                    self.lost = message
                    self.on_loss(message)
        except (EOFError, OSError):
            pass
        if not self._over.is_set():
            self._process.join(GRACE_SECONDS)
            self.closing = True
            if self.lost is None:
                loss = f"the engine's process has ended, exit code {self._process.exitcode}"
                self.lost = loss
        self._over.set()
        self._counted.set()
        with self._lock:
            left = list(self._requests)
        for number in left:
            self._tell(number, [], "abort" if self.lost is None else f"error: {self.lost}", [])
        if loss is not None:
            self.on_loss(loss)

    def _tell(self, number: int, new: list[int], finish: str | None, scores: list) -> None:
        request = self._requests.get(number)
        if request is None:
            return
        request.tokens += new
        request.scores += scores
        if finish is not None:
            request.finish = finish
            with self._lock:
                del self._requests[number]
        try:
            if request.on_tokens is not None:
                request.on_tokens(request, new, finish)
        except Exception:  # who asked is gone; the others go on
            if finish is None:
                request.cancel()
        if finish is not None:
            request.over.set()


# ---- the engine's process ----


class Teller:
    """Collects what a step has made, and sends it."""

    def __init__(self, engine: Engine, pipe: connection.Connection) -> None:
        self.engine, self.pipe = engine, pipe
        self.lock = threading.Lock()
        self.parts: list[tuple[int, list[int], str | None, list]] = []
        self.requests: dict[int, Request] = {}

    def send(self, message: Any) -> None:
        with self.lock:
            try:
                self.pipe.send(message)
            except OSError:  # the other process has ended, and so will this one
                pass

    def after_step(self) -> None:
        parts, self.parts = self.parts, []
        engine = self.engine
        self.send(Told(parts, len(engine.running), len(engine.waiting)))

    def submit(self, asked: list[tuple[int, dict]]) -> None:
        requests = []
        for number, settings in asked:
            request = Request(**settings)
            request.tokens = list(request.prompt)
            request.on_tokens = lambda r, new, finish, number=number: self.on_tokens(
                number, r, new, finish
            )
            self.requests[number] = request
            requests.append(request)
        if not self.engine.queue(requests):
            self.send(Told([(number, [], "abort", []) for number, _ in asked], 0, 0))

    def on_tokens(self, number: int, request: Request, new: list[int], finish: str | None) -> None:
        scores = request.scores[len(request.scores) - len(new) :] if request.scores else []
        self.parts.append((number, new, finish, scores))
        if finish is not None:
            self.requests.pop(number, None)

    def cancel(self, number: int, finish: str) -> None:
        request = self.requests.get(number)
        if request is not None:
            request.cancel(finish)


def _begin(pipe: connection.Connection, work: Callable[..., Running], *args: Any) -> None:
    """A signal to all processes is for the other one, whose requests may still need this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        from tqdm import tqdm  # transformers' bars: their lock between processes outlives os._exit

        tqdm.set_lock(threading.RLock())
    except ImportError:
        pass
    try:
        engine, about, close, watch = work(*args)
    except Exception as error:
        if not isinstance(error, ValueError):
            traceback.print_exc()
            error = RuntimeError(f"{type(error).__name__}: {error}")
        pipe.send(error)
        sys.exit(1)
    # What there is now stays. A full collection that looks at it stops all answers for as long as
    # that takes: 0.1 to 0.6 s, because transformers alone are 370,000 objects.
    gc.collect()
    gc.freeze()
    teller = Teller(engine, pipe)
    watch(teller.send)
    engine.after_step = teller.after_step
    engine.at_end = lambda: teller.send(None)
    engine.start()
    most = engine.max_batch + engine.max_waiting
    teller.send(Ready(about, engine.model.vocab, engine.max_length, most))
    calls = {
        "submit": teller.submit,
        "cancel": teller.cancel,
        "drain": engine.drain,
        "close": engine.stop,
        "numbers": lambda: teller.send(engine.numbers()),
    }
    try:
        while (message := pipe.recv())[0] != "end":
            name, *given = message
            calls[name](*given)
    except (EOFError, OSError):
        pass
    engine.close()
    close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the other process waits for it, and nothing is left to save
