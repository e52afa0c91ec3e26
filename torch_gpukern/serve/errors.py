# SPDX-License-Identifier: BSD-3-Clause
"""Errors in the form of OpenAI's API."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request as Http
from starlette.responses import JSONResponse

from .request import Refused

SERVED = (
    "POST /v1/completions, POST /v1/chat/completions, GET /v1/models, GET /health, GET /metrics"
)


def error_of(status: int, text: str, parameter: str | None = None, code: str | None = None) -> dict:
    kind = "invalid_request_error" if status < 429 else "server_error"
    return {"error": {"message": text, "type": kind, "param": parameter, "code": code}}


def refusal(
    status: int,
    text: str,
    parameter: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    return JSONResponse(error_of(status, text, parameter, code), status, headers)


def refused(error: Refused) -> JSONResponse:
    return refusal(error.status, str(error), error.parameter, error.code)


async def on_http_exception(http: Http, error: Exception) -> JSONResponse:
    """404 and 405, which the routes raise."""
    assert isinstance(error, HTTPException)
    asked = f"{http.method} {http.url.path!r:.200}"
    headers = dict(error.headers or {})
    if error.status_code == 404:
        return refusal(404, f"{asked} is not served; there are {SERVED}", headers=headers)
    if error.status_code == 405:
        return refusal(405, f"{asked}: expected {headers.get('Allow', '')}", headers=headers)
    return refusal(error.status_code, str(error.detail), headers=headers)


async def on_exception(http: Http, error: Exception) -> JSONResponse:
    return refusal(500, f"{type(error).__name__}: {error}"[:500])
