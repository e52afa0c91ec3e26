# SPDX-License-Identifier: BSD-3-Clause
"""The server: answers over HTTP, refusals by name, clients that go away."""

import json
import socket
import time

import pytest
import torch
from serving import all_free, prompts_of

from torch_gpukern.serve.tokenizer import Bytes

pytest.importorskip("transformers", reason="transformers is not installed")
prometheus = pytest.importorskip("prometheus_client.parser", reason="prometheus-client is missing")
pytest_plugins = ("serve_fixtures",)


def test_answers_are_generates(served, wanted):
    """Whole and streamed."""
    (prompt,) = prompts_of(20, seed=2)
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
    want = Bytes().decode(wanted(prompt, 12))
    status, answer = served.post(body)
    assert status == 200 and answer["choices"][0]["text"] == want
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 12
    parts = served.stream(body)
    assert len(parts) > 2 and "".join(part["choices"][0]["text"] for part in parts) == want
    assert parts[-1]["choices"][0]["finish_reason"] == "length"


def test_a_client_that_goes_away_frees_its_pages(served):
    (prompt,) = prompts_of(20, seed=2)
    engine = served.engine
    long = {"prompt": prompt, "max_tokens": 900, "temperature": 0}
    for stream in (True, False):
        connection = served.connection()
        connection.request("POST", "/v1/completions", json.dumps(long | {"stream": stream}))
        deadline = time.time() + 20
        while not engine.running and time.time() < deadline:
            time.sleep(0.01)
        if stream:
            connection.getresponse().read(10)
        connection.sock.shutdown(socket.SHUT_RDWR)
        while not all_free(engine) and time.time() < deadline:
            time.sleep(0.01)
        assert all_free(engine) and engine.metrics.finished["abort"] == 1 + (not stream)


def test_created_is_the_calls_time(served):
    time.sleep(1.1)  # the server began in an earlier second
    for _ in range(2):
        before = int(time.time())
        _, answer = served.post({"prompt": "x", "max_tokens": 1})
        assert before <= answer["created"] <= time.time()
        (part, *_) = served.stream({"prompt": "x", "max_tokens": 1})
        assert before <= part["created"] <= time.time()
    assert served.get("/v1/models")[1]["data"][0]["created"] < before


def test_a_stop_string_counts_as_stop(served, wanted):
    (prompt,) = prompts_of(20, seed=2)
    text = Bytes().decode(wanted(prompt, 12))
    stop = text[4:6]
    body = {"prompt": prompt, "max_tokens": 900, "temperature": 0, "stop": stop}
    _, answer = served.post(body)
    assert answer["choices"][0]["text"] == text[: text.index(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"
    parts = served.stream(body)
    assert "".join(p["choices"][0]["text"] for p in parts) == text[: text.index(stop)]
    assert parts[-1]["choices"][0]["finish_reason"] == "stop"
    deadline = time.time() + 20
    while not all_free(served.engine) and time.time() < deadline:
        time.sleep(0.01)
    assert dict(served.engine.metrics.finished) == {"stop": 2}


def test_usage_in_a_stream_is_there_on_demand(served):
    body = {"prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0}
    assert all("usage" not in part for part in served.stream(body))
    off = body | {"stream_options": {"include_usage": False}}
    assert all("usage" not in part for part in served.stream(off))
    *parts, last = served.stream(body | {"stream_options": {"include_usage": True}})
    assert all(part["usage"] is None for part in parts)
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}


def test_several_answers_to_several_prompts(served, wanted):
    """In the prompts' order, each prompt's answers beside each other; the n-th is drawn with
    seed + n. In a stream the parts come as they come."""
    prompts = prompts_of(20, 9, seed=4)
    body = {"prompt": prompts, "max_tokens": 6, "temperature": 0, "n": 2}
    _, answer = served.post(body)
    want = [Bytes().decode(wanted(p, 6)) for p in prompts for _ in range(2)]
    assert [c["text"] for c in answer["choices"]] == want
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"] == {
        "prompt_tokens": 29,
        "completion_tokens": 24,
        "total_tokens": 53,
    }
    texts = [""] * 4
    for part in served.stream(body):
        (choice,) = part["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == want

    body = {"prompt": ["one", "two"], "max_tokens": 8, "temperature": 1.0, "seed": 7, "n": 2}
    together = [c["text"] for c in served.post(body)[1]["choices"]]
    alone = [
        served.post(body | {"prompt": prompt, "seed": seed, "n": 1})[1]["choices"][0]["text"]
        for prompt in ("one", "two")
        for seed in (7, 8)
    ]
    assert together == alone and len(set(together)) == 4
    assert served.post(body | {"prompt": ["x"] * 65})[0] == 400  # 130 answers


def test_logprobs_of_completions(served, monkeypatch):
    """They are those of the model's own logits, whatever the temperature; 0 gives the drawn token's
    alone; streamed ones are the same."""
    # The text of a token says which one it is: tokens from 256 on look alike as bytes.
    monkeypatch.setattr(Bytes, "piece", lambda self, token: (str(token), None))
    body = {"prompt": [5, 6, 7], "max_tokens": 6, "temperature": 1.5, "seed": 3}
    assert served.post(body)[1]["choices"][0]["logprobs"] is None
    net = served.engine.model.model
    for asked in (0, 3):
        _, answer = served.post(body | {"logprobs": asked})
        (choice,) = answer["choices"]
        found = choice["logprobs"]
        tokens = list(map(int, found["tokens"]))
        ids = torch.tensor([[5, 6, 7, *tokens]])
        net.set_attn_implementation("sdpa")
        with torch.no_grad():
            want = net(ids).logits[0, 2:-1].double().log_softmax(-1)
        net.set_attn_implementation("gpukern_paged")
        for i, token in enumerate(tokens):
            assert abs(found["token_logprobs"][i] - want[i, token]) < 1e-4
            best = set(want[i].topk(asked).indices.tolist()) | {token}
            assert set(map(int, found["top_logprobs"][i])) == best
        assert len(found["text_offset"]) == 6 and found["text_offset"][0] == 0
        streamed = [p["choices"][0]["logprobs"] for p in served.stream(body | {"logprobs": asked})]
        for key, values in found.items():
            assert [x for part in streamed if part for x in part[key]] == values


def test_what_a_server_tells(served):
    status, answer = served.get("/v1/models")
    assert status == 200 and [m["id"] for m in answer["data"]] == ["tiny"]
    assert served.get("/v1/models/tiny")[1]["object"] == "model"
    assert served.get("/health") == (200, {"status": "ok", "running": 0, "waiting": 0})
    served.post({"prompt": "some text", "max_tokens": 4})
    answer = served.send(None, "/metrics", "GET")
    assert answer.getheader("content-type").startswith("text/plain; version=")
    families = {
        f.name: f for f in prometheus.text_string_to_metric_families(answer.read().decode())
    }
    value = {name: f.samples[0].value for name, f in families.items()}
    assert value["gpukern_new_tokens"] == 4 and value["gpukern_pages"] == 64
    assert families["gpukern_requests"].samples[0].labels == {"reason": "length"}
    counts = {s.labels.get("le"): s.value for s in families["gpukern_first_token_seconds"].samples}
    assert counts["+Inf"] == 1
    served.engine.drain()
    assert served.get("/health")[0] == 503
