# SPDX-License-Identifier: BSD-3-Clause
"""The engine over HTTP, in the form of OpenAI's completions.

POST /v1/completions, GET /v1/models, GET /health, GET /metrics (Prometheus).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time

from starlette.applications import Starlette
from starlette.requests import Request as Http
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from .engine import Engine
from .request import Busy, Refused, Request
from .text import Bytes, Stream

MOST_BYTES = 4 << 20  # of a request's body
IGNORED = {"model", "user", "stream_options"}
NEUTRAL = {  # what is not served, and the values that ask for nothing
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (None, 0, False),
    "suffix": (None, ""),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": (None, {}),
}


def refusal(status: int, text: str, parameter: str | None = None) -> JSONResponse:
    kind = "invalid_request_error" if status < 429 else "server_error"
    error = {"message": text, "type": kind, "param": parameter, "code": None}
    return JSONResponse({"error": error}, status)


def number(body: dict, name: str, default, kinds: tuple) -> float:
    x = body.get(name)
    if x is None:
        return default
    if isinstance(x, bool) or not isinstance(x, kinds):
        raise Refused(
            name, f"{name} is {x!r:.80}; expected {' or '.join(k.__name__ for k in kinds)}"
        )
    return x


def parse(body, tokenizer, stop_ids: frozenset[int]) -> tuple[Request, list[str], bool]:
    """A request, its stop strings, and whether its answer is streamed."""
    if not isinstance(body, dict):
        raise Refused("body", f"the body is {type(body).__name__}; expected an object")
    known = {
        "prompt",
        "max_tokens",
        "temperature",
        "top_p",
        "seed",
        "stop",
        "stream",
        *IGNORED,
        *NEUTRAL,
    }
    for name in body:
        if name not in known:
            raise Refused(name, f"{name!r:.80} is not known here")
        if name in NEUTRAL and body[name] is not None and body[name] not in NEUTRAL[name]:
            raise Refused(
                name, f"{name} is {body[name]!r:.80}; only {NEUTRAL[name][0]!r} is served"
            )
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        tokens = list(tokenizer.encode(prompt))
    elif isinstance(prompt, list) and all(type(t) is int for t in prompt):
        tokens = prompt
    else:
        raise Refused("prompt", "prompt must be one string, or one list of token ids")
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or len(stop) > 4 or not all(isinstance(s, str) for s in stop):
        raise Refused("stop", "stop must be a string, or up to 4 of them")
    stream = body.get("stream") or False
    if not isinstance(stream, bool):
        raise Refused("stream", f"stream is {stream!r:.80}; expected true or false")
    request = Request(
        tokens,
        max_tokens=number(body, "max_tokens", 16, (int,)),
        temperature=number(body, "temperature", 1.0, (int, float)),
        top_p=number(body, "top_p", 1.0, (int, float)),
        seed=number(body, "seed", secrets.randbits(63), (int,)),
        stop_ids=stop_ids,
    )
    return request, stop, stream


class Answer:
    """A running request as parts of text, in the event loop. Leaving its `with` ends the request."""

    def __init__(self, engine: Engine, request: Request, stop: list[str], tokenizer) -> None:
        self.engine, self.request = engine, request
        self.text = Stream(tokenizer, stop)
        self.tokens = 0
        self.finish: str | None = None
        self.queue: asyncio.Queue = asyncio.Queue()
        loop = asyncio.get_running_loop()
        request.on_tokens = lambda _, new, finish: loop.call_soon_threadsafe(
            self.queue.put_nowait, (new, finish)
        )
        engine.submit(request)

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *error: object) -> None:
        self.request.cancel()

    async def parts(self):
        while self.finish is None:
            new, self.finish = await self.queue.get()
            shown = new[:-1] if self.finish == "stop" else new  # without the end token
            text = self.text.add(shown, last=self.finish is not None)
            self.tokens = len(self.text.tokens) + len(new) - len(shown)  # none behind a stop string
            if self.text.stopped:
                self.tokens = len(self.text.tokens)
                self.finish = "stop"
            if text or self.finish:
                yield text


def application(
    engine: Engine, tokenizer=None, name: str = "gpukern", stop_ids=frozenset()
) -> Starlette:
    """An ASGI application that starts the engine, and closes it when it ends."""
    tokenizer = tokenizer or Bytes()
    began = int(time.time())

    @contextlib.asynccontextmanager
    async def lifespan(_):
        with engine:
            yield

    async def completions(http: Http) -> Response:
        body = b""
        async for part in http.stream():
            body += part
            if len(body) > MOST_BYTES:
                return refusal(413, f"the body has more than {MOST_BYTES} bytes")
        try:
            request, stop, stream = parse(json.loads(body), tokenizer, stop_ids)
            answer = Answer(engine, request, stop, tokenizer)
        except Refused as error:
            return refusal(400, str(error), error.parameter)
        except (ValueError, RecursionError) as error:
            return refusal(400, f"the body is not JSON: {error}")
        except Busy as error:
            return refusal(503, str(error))
        same = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": began,
            "model": name,
        }

        def choice(text: str) -> dict:
            return {
                **same,
                "choices": [
                    {"index": 0, "text": text, "logprobs": None, "finish_reason": answer.finish}
                ],
            }

        def usage() -> dict:
            prompt, made = len(request.prompt), answer.tokens
            return {
                "prompt_tokens": prompt,
                "completion_tokens": made,
                "total_tokens": prompt + made,
            }

        if stream:

            async def events():  # starlette cancels it when the client goes away
                with answer:
                    async for text in answer.parts():
                        data = choice(text) | ({"usage": usage()} if answer.finish else {})
                        yield f"data: {json.dumps(data)}\n\n"
                    yield "data: [DONE]\n\n"

            return StreamingResponse(events(), media_type="text/event-stream")

        async def whole() -> str:
            return "".join([text async for text in answer.parts()])

        async def gone() -> None:
            while not await http.is_disconnected():
                await asyncio.sleep(0.05)

        with answer:
            tasks = [asyncio.create_task(whole()), asyncio.create_task(gone())]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if not tasks[0].done():
                    return Response(status_code=499)
                text = tasks[0].result()
            finally:
                for task in tasks:
                    task.cancel()
        if answer.finish.startswith("error"):
            return refusal(500, answer.finish)
        if answer.finish == "cancelled":
            return refusal(503, "the server closes")
        return JSONResponse(choice(text) | {"usage": usage()})

    async def models(_: Http) -> Response:
        entry = {"id": name, "object": "model", "created": began, "owned_by": "gpukern"}
        return JSONResponse({"object": "list", "data": [entry]})

    async def health(_: Http) -> Response:
        return JSONResponse({"running": len(engine.running), "waiting": len(engine.waiting)})

    async def metrics(_: Http) -> Response:
        return PlainTextResponse(engine.metrics.text())

    routes = [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/models", models),
        Route("/health", health),
        Route("/metrics", metrics),
    ]
    return Starlette(routes=routes, lifespan=lifespan)
