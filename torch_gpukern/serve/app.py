# SPDX-License-Identifier: BSD-3-Clause
"""The engine over HTTP, in the form of OpenAI's API.

POST /v1/completions, POST /v1/chat/completions, GET /v1/models, GET /health, GET /metrics
(Prometheus).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as Http
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from . import chat, completions, exposition
from .answers import Answers, Post, Token
from .apart import Apart
from .call import Call
from .engine import Engine
from .errors import error_of, on_exception, on_http_exception, refusal, refused
from .fields import Fields
from .request import Busy, Refused, shown
from .tokenizer import Bytes

MOST_BYTES = 4 << 20  # of a request's body
GONE = 499  # the client has left; nobody reads this

Parse = Callable[[Fields, Any, frozenset[int]], Call]


class Events(StreamingResponse):
    """A stream whose requests end with it, also where the client has left before its first event."""

    def __init__(self, answers: Answers, content: AsyncIterator[str]) -> None:
        super().__init__(content, media_type="text/event-stream")
        self.answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.answers:
            await super().__call__(scope, receive, send)


class App:
    """The endpoints.

    Args:
        engine: of this process or apart, which runs while the application does.
        tokenizer: of tokenizer.py.
        name: of the model; calls for another are refused.
        stop_ids: tokens that end an answer.
    """

    def __init__(
        self, engine: Engine | Apart, tokenizer: Any, name: str, stop_ids: frozenset[int]
    ) -> None:
        self.engine, self.tokenizer, self.name, self.stop_ids = engine, tokenizer, name, stop_ids
        self.began = int(time.time())
        self.post: Post  # of the loop in which the application runs

    # ---- answers ----

    def answering(self, parse: Parse) -> Callable:
        async def endpoint(http: Http) -> Response:
            created = int(time.time())
            try:
                body = await body_of(http)
                call = await run_in_threadpool(self.call_of, body, parse)
                answers = Answers(self.engine, call.requests, call.stop, self.tokenizer, self.post)
            except ClientDisconnect:
                return Response(status_code=GONE)
            except Refused as error:
                return refused(error)
            except Busy as error:
                return refusal(503, str(error), headers={"retry-after": "1"})
            same = {
                "id": f"{call.form.prefix}-{secrets.token_hex(12)}",
                "created": created,
                "model": self.name,
            }
            if call.stream:
                events = self.events(answers, call, same | {"object": call.form.kind_of_part})
                return Events(answers, events)
            return await self.whole(http, answers, call, same | {"object": call.form.kind})

        return endpoint

    def call_of(self, body: bytes, parse: Parse) -> Call:
        try:
            fields = Fields(json.loads(body))
        except Refused:
            raise
        except (ValueError, RecursionError) as error:
            raise Refused(None, f"the body is not JSON: {error}") from None
        asked = fields.text("model")
        if asked is not None and asked != self.name:
            raise self.no_model(asked)
        return parse(fields, self.tokenizer, self.stop_ids)

    def no_model(self, asked: str) -> Refused:
        return Refused(
            "model",
            f"model is {shown(asked)}, which this server does not have; it has {self.name!r}",
            status=404,
            code="model_not_found",
        )

    async def events(self, answers: Answers, call: Call, same: dict) -> AsyncIterator[str]:
        usage = {"usage": None} if call.include_usage else {}
        for answer in answers.answers:
            if opening := call.form.opening(answer.index):
                yield event(same | {"choices": [opening]} | usage)
        async for part in answers.parts():
            if part.finish and part.finish.startswith("error"):
                yield event(error_of(500, part.finish))
                break
            yield event(same | {"choices": [call.form.part(part)]} | usage)
        else:
            if call.include_usage:
                yield event(same | {"choices": [], "usage": usage_of(answers, call)})
        yield "data: [DONE]\n\n"

    async def whole(self, http: Http, answers: Answers, call: Call, same: dict) -> Response:
        texts: list[list[str]] = [[] for _ in call.requests]
        tokens: list[list[Token]] = [[] for _ in call.requests]

        async def collect() -> None:
            async for part in answers.parts():
                texts[part.answer].append(part.text)
                tokens[part.answer] += part.tokens

        with answers:
            tasks = [asyncio.create_task(collect()), asyncio.create_task(left(http))]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if not tasks[0].done():
                    return Response(status_code=GONE)
                tasks[0].result()
            finally:
                for task in tasks:
                    task.cancel()
        ends = [answer.finish or "" for answer in answers.answers]
        for end in ends:
            if end.startswith("error"):
                return refusal(500, end)
            if end == "abort":
                return refusal(503, "the server closes", headers={"retry-after": "1"})
        choices = [
            call.form.whole(i, "".join(texts[i]), tokens[i], end) for i, end in enumerate(ends)
        ]
        return JSONResponse(same | {"choices": choices, "usage": usage_of(answers, call)})

    # ---- about the server ----

    def model(self) -> dict:
        return {"id": self.name, "object": "model", "created": self.began, "owned_by": "gpukern"}

    async def models(self, _: Http) -> Response:
        return JSONResponse({"object": "list", "data": [self.model()]})

    async def one_model(self, http: Http) -> Response:
        asked = http.path_params["name"]
        return JSONResponse(self.model()) if asked == self.name else refused(self.no_model(asked))

    async def health(self, _: Http) -> Response:
        """503 from the moment on when new requests are refused."""
        well = self.engine.alive and not self.engine.closing
        about = {
            "status": "ok" if well else "closing",
            "running": len(self.engine.running),
            "waiting": len(self.engine.waiting),
        }
        return JSONResponse(about, 200 if well else 503)

    async def metrics(self, _: Http) -> Response:
        numbers = await run_in_threadpool(self.engine.numbers)
        return Response(exposition.text(numbers), media_type=exposition.CONTENT_TYPE)


def application(
    engine: Engine | Apart,
    tokenizer: Any = None,
    name: str = "gpukern",
    stop_ids: frozenset[int] = frozenset(),
) -> Starlette:
    """An ASGI application that starts the engine, and closes it when it ends."""
    app = App(engine, tokenizer or Bytes(), name, stop_ids)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        app.post = Post()
        with engine:
            yield

    routes = [
        Route("/v1/completions", app.answering(completions.parse), methods=["POST"]),
        Route("/v1/chat/completions", app.answering(chat.parse), methods=["POST"]),
        Route("/v1/models", app.models),
        Route("/v1/models/{name:path}", app.one_model),
        Route("/health", app.health),
        Route("/metrics", app.metrics),
    ]
    handlers: dict = {HTTPException: on_http_exception, Exception: on_exception}
    starlette = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
    starlette.state.app = app
    return starlette


async def body_of(http: Http) -> bytes:
    body = bytearray()
    async for part in http.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise Refused(None, f"the body has more than {MOST_BYTES} bytes", status=413)
    return bytes(body)


async def left(http: Http) -> None:
    """Ends when the client has gone away. The body was read before."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


def event(data: dict) -> str:
    return f"data: {json.dumps(data)}\n\n"


def usage_of(answers: Answers, call: Call) -> dict:
    return {
        "prompt_tokens": call.prompt_tokens,
        "completion_tokens": answers.made,
        "total_tokens": call.prompt_tokens + answers.made,
    }
