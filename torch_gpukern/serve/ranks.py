# SPDX-License-Identifier: BSD-3-Clause
"""The processes of a model that several ranks serve.

Rank 0 has the engine and the HTTP server. The others have their part of the network and of the
pages, and no bookkeeping: before each step rank 0 sends them what the step reads, through a pipe
each. So an idle server waits for no collective, and a rank that loses rank 0 ends by itself.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from multiprocessing import connection, get_context, parent_process
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ..paged.kv_cache import PagedKVCache
from .captured import Shape

GRACE_SECONDS = 10.0


class Capture(NamedTuple):
    """Rank 0 captures a step."""

    shape: Shape


class Copied(NamedTuple):
    """The first tokens of a page were copied to another page."""

    source: int
    target: int
    tokens: int


class Moved(NamedTuple):
    """Tokens were copied from slots to slots."""

    sources: np.ndarray
    targets: np.ndarray


Copies = list[Copied | Moved]


class Run(NamedTuple):
    """A step. `shape` is that of its captured graph, if it has one."""

    shape: Shape | None
    copies: Copies
    arrays: dict[str, np.ndarray]
    longest: int  # tokens of a request
    rows: list[int]


class CopyingCache(PagedKVCache):
    """A cache that keeps a list of what was copied in it since it was last asked."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.copied: Copies = []

    def _copy_rows(self, source: int, target: int, tokens: int) -> None:
        super()._copy_rows(source, target, tokens)
        self.copied.append(Copied(source, target, tokens))

    def _move_rows(self, sources: np.ndarray, targets: np.ndarray) -> None:
        super()._move_rows(sources, targets)
        self.copied.append(Moved(sources, targets))

    def repeat(self, copies: Copies) -> None:
        """Copies what the cache of rank 0 has copied."""
        for one in copies:
            if isinstance(one, Copied):
                PagedKVCache._copy_rows(self, *one)
            else:
                PagedKVCache._move_rows(self, *one)

    def take_copies(self) -> Copies:
        copies, self.copied = self.copied, []
        return copies


class Lost(RuntimeError):
    """Another rank has ended, or ranks may be in different steps."""


class Others:
    """The other ranks, as rank 0 sees them.

    Args:
        ranks: with rank 0.
        work: runs in each process as ``work(rank, pipe, *args)``; importable by name.
        backend: of torch.distributed.

    Attributes:
        on_loss: is called in a thread with a text when a rank ends. Until it is set, that ends this
            process.
        lost: that text.
    """

    def __init__(self, ranks: int, work: Callable, backend: str, *args: Any) -> None:
        self.lost: str | None = None
        self.on_loss: Callable[[str], None] = self._before
        self.closed, self.noticed = threading.Event(), threading.Event()
        self.lock = threading.Lock()
        context = get_context("spawn")
        self.folder = tempfile.TemporaryDirectory(prefix="gpukern-ranks-")
        self.store = f"file://{self.folder.name}/store"
        self.pipes: list[connection.Connection] = []
        self.processes: list[Any] = []
        for rank in range(1, ranks):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_begin,
                args=(work, rank, ranks, backend, self.store, theirs, *args),
                daemon=True,
                name=f"rank {rank}",
            )
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()
        join(0, ranks, backend, self.store)

    def tell(self, message: Capture | Run) -> None:
        if self.lost:
            raise Lost(self.lost)
        try:
            for pipe in self.pipes:
                pipe.send(message)
        except OSError as error:
            raise Lost(f"a rank has ended: {error}") from None

    def failed(self, error: BaseException) -> None:
        """A step failed on rank 0, so that the others may wait for it in a collective. Mostly one of
        them has ended, which `_watch` notices."""
        if not self.noticed.wait(1.0):
            self.lose(f"a step failed on rank 0, {type(error).__name__}: {error}")

    def lose(self, text: str) -> None:
        """No step can run any more, so the other ranks end, too. One of them may wait for a
        collective for ever."""
        with self.lock:
            if self.closed.is_set() or self.lost is not None:
                return
            self.lost = text
        self.noticed.set()
        self.on_loss(text)
        for process in self.processes:
            process.kill()

    def _before(self, text: str) -> None:
        """A rank has ended before the server runs. What stops one rank mostly stops rank 0, too,
        whose own error says more."""
        if not self.closed.wait(GRACE_SECONDS):
            print(f"serve: {text}", file=sys.stderr, flush=True)
            os._exit(1)

    def close(self) -> None:
        """The others end when their pipe does."""
        if self.closed.is_set():
            return
        self.closed.set()
        for pipe in self.pipes:
            pipe.close()
        if self.lost is None:
            dist.destroy_process_group()
        for process in self.processes:
            process.join(GRACE_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
        self.folder.cleanup()

    def _watch(self) -> None:
        """Waits for an end. A rank says why it ends, if it can."""
        found: Any = connection.wait([*self.pipes, *(p.sentinel for p in self.processes)])
        if self.closed.is_set():
            return
        for rank, (pipe, process) in enumerate(zip(self.pipes, self.processes, strict=True), 1):
            if pipe in found or process.sentinel in found:
                try:
                    text = pipe.recv()
                except (EOFError, OSError):
                    process.join(2)
                    text = f"rank {rank} has ended, exit code {process.exitcode}"
                self.lose(text)
                return


def join(rank: int, ranks: int, backend: str, store: str) -> None:
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks)


def _begin(
    work: Callable, rank: int, ranks: int, backend: str, store: str, pipe: Any, *args: Any
) -> None:
    """A rank's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        join(rank, ranks, backend, store)
        work(rank, pipe, *args)
        dist.destroy_process_group()
    except Exception as error:
        try:
            pipe.send(f"rank {rank}: {error}")
        except OSError:
            pass
        os._exit(1)
    os._exit(0)  # rank 0 waits for it, and nothing is left to save


def end_with_parent() -> None:
    """Rank 0 may end while this one loads, or waits for it in a collective."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def follow(model: Any, pipe: Any) -> None:
    """Runs the steps that rank 0 sends, until it closes the pipe. A signal to all processes is for
    rank 0, whose requests may still need this one."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            return
        if isinstance(message, Capture):
            model.graphs[message.shape] = model.capture(message.shape)
        else:
            model.cache.repeat(message.copies)
            model.follow(message)


def threads_of(ranks: int) -> None:
    """The ranks share the cores of a CPU."""
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
