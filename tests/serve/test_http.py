# SPDX-License-Identifier: BSD-3-Clause
"""The server: answers over HTTP, refusals by name, clients that go away."""

import http.client
import json
import socket
import time

import pytest
from serving import all_free, prompts_of

from torch_gpukern.serve.text import Bytes

pytest.importorskip("transformers", reason="transformers is not installed")
pytest_plugins = ("serve_fixtures",)


def test_over_http(served, wanted):
    """Streamed and whole, refusals by name, clients that go away, and the end of the server under
    load."""
    engine, post, port, server, thread = served
    (prompt,) = prompts_of(20, seed=2)
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
    want = Bytes().decode(wanted(prompt, 12))
    status, answer = post(body)
    assert status == 200 and answer["choices"][0]["text"] == want
    assert (
        answer["choices"][0]["finish_reason"] == "length"
        and answer["usage"]["completion_tokens"] == 12
    )
    _, stream = post(body | {"stream": True}, stream=True)
    lines = [line[6:].strip() for line in stream.read().splitlines() if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]" and len(lines) > 3
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1]) == want
    for bad, parameter in (
        (b"{", None),
        (b"[" * 100_000, None),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [1, 10_000]}, "prompt"),
        ({"prompt": "x", "max_tokens": "many"}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 100_000}, "max_tokens"),
        ({"prompt": "x", "n": 2}, "n"),
        ({"prompt": "x", "tempo": 2}, "tempo"),
    ):
        status, answer = post(bad)
        assert status == 400 and answer["error"]["param"] == parameter, (
            bad if len(bad) < 99 else "",
            answer,
        )
    assert post(b"x" * (5 << 20))[0] == 413

    long = {"prompt": prompt, "max_tokens": 900, "temperature": 0}
    for stream in (True, False):  # the client goes away
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("POST", "/v1/completions", json.dumps(long | {"stream": stream}))
        deadline = time.time() + 20
        while not engine.running and time.time() < deadline:
            time.sleep(0.01)
        if stream:
            connection.getresponse().read(10)
        connection.sock.shutdown(socket.SHUT_RDWR)
        while not all_free(engine) and time.time() < deadline:
            time.sleep(0.01)
        assert all_free(engine) and engine.metrics.finished["cancelled"] == 1 + (not stream)
    text = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    text.request("GET", "/metrics")
    assert b"gpukern_first_token_seconds_p50" in text.getresponse().read()
    running = [post(long | {"stream": True}, stream=True) for _ in range(3)]
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive() and all_free(engine) and len(running) == 3
