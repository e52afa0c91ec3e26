# SPDX-License-Identifier: BSD-3-Clause
"""The start and the end of the HTTP server.

A signal (SIGTERM, or an interrupt) ends it in three steps:

1. New requests get the status 503. Running requests have `drain_seconds` to end.
2. Requests that still run are aborted. A stream ends with the finish_reason "abort", any other
   answer is 503.
3. Connections of clients that do not read their answers are closed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from .apart import Apart
from .engine import Engine

FLUSH_SECONDS = 2.0  # time for the last bytes to clients
LOST_SECONDS = 1.0  # time for the running step to fail when another rank has ended


def bind(host: str, port: int) -> socket.socket:
    """A socket that is bound to this address, but does not listen yet.

    Raises:
        ValueError: another process uses the address, or this machine does not have it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    own = socket.socket(family, socket.SOCK_STREAM)
    try:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.bind((host, port))
    except OSError as error:
        own.close()
        raise ValueError(f"address {host}:{port}: {error.strerror or error}") from None
    return own


def address_of(own: socket.socket) -> str:
    host, port = own.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """
    Args:
        app: the application of app.py.
        engine: the engine that the application starts.
        drain_seconds: time for running requests to end after a signal.
        says: text that is printed when clients can connect.
        at_end: called when the engine has ended.
    """

    def __init__(
        self,
        app: Starlette,
        engine: Engine | Apart,
        *,
        drain_seconds: float = 5.0,
        says: str = "",
        at_end: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=int(FLUSH_SECONDS) + 1,
            )
        )
        self.engine, self.drain_seconds, self.says = engine, drain_seconds, says
        self.at_end = at_end
        self.ended_by = 0  # the number of the first signal

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """As uvicorn's, which also raises the signal again after the shutdown. That would end the
        process before its own clean-up."""
        self.ended_by = self.ended_by or sig
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.says and self.started:
            print(self.says, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.engine.drain()
        await self.until(lambda: not self.engine.alive, self.drain_seconds)
        await asyncio.to_thread(self.engine.close)
        await self.until(lambda: not self.server_state.tasks, FLUSH_SECONDS)
        for connection in list(self.server_state.connections):
            if (transport := getattr(connection, "transport", None)) is not None:
                transport.abort()
        await super().shutdown(sockets)
        if self.at_end is not None:
            await asyncio.to_thread(self.at_end)

    def lose(self, text: str) -> None:
        """Ends the server because another rank's process has ended, so that no step can run any more.
        Called in a thread of its own. A running step may wait for that rank forever, so a timer ends
        the process in any case."""
        print(f"gpukern serve: {text}; the server ends", file=sys.stderr, flush=True)
        self.drain_seconds = min(self.drain_seconds, LOST_SECONDS)
        self.should_exit = True
        timer = threading.Timer(LOST_SECONDS + FLUSH_SECONDS + 3, os._exit, (1,))
        timer.daemon = True
        timer.start()

    async def until(self, done, seconds: float) -> None:
        """Waits until done() is true, but at most this long. A second interrupt ends the wait."""
        end = time.monotonic() + seconds
        while not done() and time.monotonic() < end and not self.force_exit:
            await asyncio.sleep(0.02)
