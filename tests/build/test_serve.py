# SPDX-License-Identifier: BSD-3-Clause
"""examples/serve: answers equal those of generate, whatever runs beside them, and a finished
request leaves nothing behind.
"""

import http.client
import importlib
import json
import random
import socket
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from torch_gpukern.nn import patch

pytest.importorskip("transformers", reason="transformers is not installed")

SERVE = Path(__file__).resolve().parents[2] / "examples" / "serve"
MODULES = ("engine", "models", "metrics", "sampling", "server", "text")


@pytest.fixture(scope="module")
def serve():
    sys.path.insert(0, str(SERVE))
    yield {name: importlib.import_module(name) for name in ("engine", "models", "sampling", "text")}
    sys.path.remove(str(SERVE))
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def net(serve):
    return serve["models"].random_llama("tiny")


@pytest.fixture(scope="module")
def wanted(net):
    """For each prompt the tokens that transformers' generate adds, greedily."""
    known = {}

    def of(prompt, n):
        if (tuple(prompt), n) not in known:
            before = net.config._attn_implementation
            net.set_attn_implementation("sdpa")
            ids = torch.tensor([prompt])
            out = net.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False
            )
            known[tuple(prompt), n] = out[0, len(prompt) :].tolist()
            net.set_attn_implementation(before)
        return known[tuple(prompt), n]

    return of


def prompts_of(*lengths, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(512) for _ in range(n)] for n in lengths]


def run(engine, steps=2000):
    while engine.step():
        steps -= 1
        assert steps, "it does not end"


def all_free(engine):
    return (
        engine.used_pages == 0
        and not engine.cache.sequences
        and not engine.running
        and not engine.waiting
    )


@pytest.mark.gpu
def test_captured_steps_are_generates(serve):
    """Graphs of decoding steps for 1, 2 and 4 requests give the right tokens. They are replayed
    after other tensors have taken the memory that was free at the capture."""
    Engine, Request = serve["engine"].Engine, serve["engine"].Request
    net = serve["models"].random_llama("tiny", "cuda")
    prompts, wanted = prompts_of(9, 30, 17), []
    for prompt in prompts:
        ids = torch.tensor([prompt], device="cuda")
        out = net.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
        )
        wanted.append(out[0, len(prompt) :].tolist())
    patch(net, say=None)  # the server patches the model, too
    model = serve["models"].TransformersModel(net, num_blocks=64)
    for count in (3, 1, 2, 3):
        engine = Engine(model, max_batch=4, max_step_tokens=64, max_drafts=0)
        requests = [engine.submit(Request(prompt, max_tokens=12)) for prompt in prompts[:count]]
        run(engine)
        assert [request.answer for request in requests] == wanted[:count]
        assert all_free(engine)
        taken = [torch.full((n,), 1 << 40, device="cuda") for n in range(1, 65) for _ in range(8)]
        del taken
    assert sorted(model.graphs) == [1, 2, 4]


def test_tokens_are_generates(serve, net, wanted):
    """The tokens stay the same with chunked prompts beside decoding, drafts, shared prefixes, and
    too few pages for all requests."""
    Engine, Request = serve["engine"].Engine, serve["engine"].Request
    common, *rest = prompts_of(40, 5, 33, 1, 17, 60)
    prompts = [common + rest[0], common + rest[1], rest[2], rest[3], rest[4], common + rest[0]]
    model = serve["models"].TransformersModel(net, num_blocks=8)  # too few blocks for two of them
    engine = Engine(model, max_batch=4, max_step_tokens=24, max_drafts=3)
    requests = []
    for prompt in prompts:
        requests.append(engine.submit(Request(prompt, max_tokens=24)))
        engine.step()
    run(engine)
    for request, prompt in zip(requests, prompts):
        assert request.answer == wanted(prompt, 24) and request.finish == "length"
    done = engine.metrics
    assert (
        done.preemptions > 0
        and done.reused_tokens > 0
        and done.accepted > 0
        and done.drafted > done.accepted
    )
    assert all_free(engine) and 0.5 < done.most_cache_use <= 1
    assert len(done.first_token) == 6 and done.new_tokens == 6 * 24
    assert f"gpukern_new_tokens {6 * 24}\n" in done.text()


def test_sampled_answers_depend_on_the_seed_alone(serve, net):
    Engine, Request = serve["engine"].Engine, serve["engine"].Request
    settings = dict(max_tokens=16, temperature=0.7, top_p=0.9)
    prompts = prompts_of(20, 30, 40, 7)

    def answers(seeds, **engine_settings):
        engine = Engine(serve["models"].TransformersModel(net, 64), **engine_settings)
        requests = [engine.submit(Request(p, seed=s, **settings)) for p, s in zip(prompts, seeds)]
        run(engine)
        assert all_free(engine)
        return [r.answer for r in requests]

    together = answers((1, 2, 3, 4), max_drafts=0)
    assert answers((1, 2, 3, 4), max_drafts=4, max_batch=2, max_step_tokens=9) == together
    assert answers((5, 6, 7, 8)) != together


def test_a_cache_of_8_bits(serve, net, wanted):
    """Answers do not depend on other requests, chunks or shared pages, and start like those of
    generate."""
    Engine, Request = serve["engine"].Engine, serve["engine"].Request
    common, *rest = prompts_of(36, 5, 30, 12, seed=3)
    prompts = [common + rest[0], common + rest[1], rest[2]]
    scales = {"k_scale": torch.tensor(0.02), "v_scale": torch.full((2, 2), 0.02)}
    answers = []
    for settings in ({"max_batch": 1}, {"max_batch": 3, "max_step_tokens": 11}):
        model = serve["models"].TransformersModel(net, 32, dtype=torch.int8, scales=scales)
        engine = Engine(model, **settings)
        requests = [engine.submit(Request(prompt, max_tokens=12)) for prompt in prompts]
        run(engine)
        assert all_free(engine)
        answers.append([r.answer for r in requests])
    assert answers[0] == answers[1]
    assert [a[0] for a in answers[0]] == [wanted(p, 12)[0] for p in prompts]


def test_draws_follow_the_probabilities(serve):
    """The share of each token in 4,000 draws; top_p excludes the rest."""
    Request, pick = serve["engine"].Request, serve["sampling"].pick
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    logits = (2 * p.log()).expand(4000, -1)
    for top_p, shares in ((1.0, p.tolist()), (0.6, [5 / 8, 3 / 8, 0, 0])):
        settings = [
            (Request([0], temperature=2.0, top_p=top_p, seed=seed), 9) for seed in range(4000)
        ]
        counts = Counter(pick(logits, settings))
        assert all(abs(counts[i] / 4000 - share) < 0.03 for i, share in enumerate(shares))
        assert all(counts[i] == 0 for i, share in enumerate(shares) if share == 0)


def test_drafts_are_what_followed(serve):
    ngrams = serve["sampling"].NGrams()
    assert ngrams.draft([1, 2, 3, 4, 1, 2], 3) == [3, 4, 1]
    assert ngrams.draft([1, 2, 3, 4, 1, 2, 9], 3) == []
    assert ngrams.draft([1, 2, 3, 4, 1, 2, 9, 1, 2], 3) == [9, 1, 2]  # the newest match


def test_cancelled_refused_and_failed(serve, net, wanted, monkeypatch):
    """If one request fails, the tokens of the others are unchanged and no page is lost."""
    engine_module = serve["engine"]
    Engine, Request, Refused, Busy = (
        getattr(engine_module, n) for n in ("Engine", "Request", "Refused", "Busy")
    )
    model = serve["models"].TransformersModel(net, 32)
    engine = Engine(model, max_batch=4, max_waiting=5)
    a, b, c = prompts_of(20, 25, 30, seed=1)
    for name, request in {
        "prompt is empty": Request([]),
        "prompt is .1, 2.5.; expected integers": Request([1, 2.5]),
        "prompt is 'abc'": Request("abc"),
        "prompt is None": Request(None),
        "max_tokens is .2.5.": Request([1], max_tokens=2.5),
        "temperature is None": Request([1], temperature=None),
        "token 512": Request([512]),
        "max_tokens is 0": Request([1], max_tokens=0),
        "512 that fit": Request([1] * 500, max_tokens=13),
        "temperature": Request([1], temperature=float("nan")),
        "top_p": Request([1], top_p=0.0),
    }.items():
        with pytest.raises(Refused, match=name):
            engine.submit(request)

    def gone(*_):
        raise ConnectionError

    kept = engine.submit(Request(a, max_tokens=20))
    dropped = engine.submit(Request(b, max_tokens=200))
    unheard = engine.submit(Request(c, max_tokens=200, on_tokens=gone))
    with pytest.raises(Refused, match="submitted before"):
        engine.submit(kept)
    a[0] = b[0]  # later changes of the caller's list have no effect
    stopped = engine.submit(Request(c, max_tokens=20, stop_ids=frozenset(wanted(c, 20)[5:6])))
    never = engine.submit(Request(c))
    with pytest.raises(Busy):
        engine.submit(Request(c))
    never.cancel()
    for _ in range(3):
        engine.step()
    dropped.cancel()
    run(engine)
    (a, _, _) = prompts_of(20, 25, 30, seed=1)
    assert (
        kept.answer == wanted(a, 20)
        and dropped.finish == unheard.finish == never.finish == "cancelled"
    )
    assert (
        stopped.finish == "stop"
        and stopped.answer == wanted(c, 20)[: wanted(c, 20).index(wanted(c, 20)[5]) + 1]
    )
    assert all_free(engine)

    with engine:  # a failed step ends the running requests with its error, and the engine continues
        forward, calls = model.forward, []

        def fails(*args):
            calls.append(args)
            if len(calls) == 3:
                raise RuntimeError("no luck")
            return forward(*args)

        monkeypatch.setattr(model, "forward", fails)
        failed = engine.submit(Request(b, max_tokens=100))
        assert failed.over.wait(20) and failed.finish == "error: no luck"
        after = engine.submit(Request(b, max_tokens=10))
        assert after.over.wait(20) and after.answer == wanted(b, 10)
        slow = [engine.submit(Request(p, max_tokens=200)) for p in (a, b, c)]
    # the engine is closed under load
    assert all(r.over.is_set() and r.finish == "cancelled" for r in slow) and all_free(engine)
    with pytest.raises(Busy):
        engine.submit(Request(a))


def test_text_comes_whole(serve):
    """Characters of several bytes, and stop strings that span tokens."""
    Bytes, Stream = serve["text"].Bytes, serve["text"].Stream
    text = "naïve — 日本 stop here"
    stream = Stream(Bytes(), ["stop it", "stop h"])
    parts = [stream.add([b]) for b in text.encode()]
    assert "".join(parts) == "naïve — 日本 " and stream.stopped and "\ufffd" not in "".join(parts)
    stream = Stream(Bytes(), ["zz"])
    long = "xyz é " * 40 + "z"
    parts = [stream.add([b]) for b in long.encode()]
    assert "".join(parts) + stream.add([], last=True) == long


class ByteFallback:
    """A tokenizer like sentencepiece's: a run of byte tokens is text if all of it is valid UTF-8,
    otherwise U+FFFD for each byte. Tokens above 255 are words."""

    words = ("hello", " world", "日本")

    def decode(self, tokens):
        text, run = "", []
        for t in [*tokens, 256]:
            if t < 256:
                run.append(t)
                continue
            try:
                text += bytes(run).decode()
            except UnicodeDecodeError:
                text += "\ufffd" * len(run)
            run, text = [], text + ("" if t == 256 else self.words[t - 257])
        return text


@pytest.mark.parametrize("name", ("Bytes", "ByteFallback"))
def test_text_does_not_depend_on_how_many_tokens_a_step_brings(serve, name):
    """Drafts bring several tokens a step. The text equals that of all bytes, nothing is lost, and
    invalid bytes appear at the end at the latest."""
    tokenizer = serve["text"].Bytes() if name == "Bytes" else ByteFallback()
    gen = random.Random(5)
    letters = "aé日本語𝄞 x"
    for each in range(1, 12):
        for _ in range(20):
            text = "".join(gen.choice(letters) for _ in range(60))
            tokens = list(text.encode())
            stream, parts, at = serve["text"].Stream(tokenizer), [], 0
            while at < len(tokens):
                step = each if gen.random() < 0.5 else gen.randint(1, each)
                parts.append(stream.add(tokens[at : at + step]))
                at += step
                assert text.startswith("".join(parts))
            assert "".join(parts) + stream.add([], last=True) == text
    stream = serve["text"].Stream(tokenizer)
    parts = stream.add([255, 254]) + stream.add(b"a") + stream.add([0xE6], last=True)
    assert (
        parts == "\ufffd\ufffda\ufffd"
        if name == "Bytes"
        else parts.count("\ufffd") + parts.count("a") >= 3
    )


@pytest.mark.parametrize("each", (1, 2, 3, 100))
@pytest.mark.parametrize(
    ("text", "stop", "want", "read"),
    [
        # the stop string that starts first wins, even if another is complete earlier
        ("abcd", ["abcd", "c"], "", 4),
        ("abcx", ["abcd", "c"], "ab", 4),
        ("abc", ["abcd", "c"], "ab", 3),
        ("ab--c", ["--", "-"], "ab", 3),
        ("xxENDyyyyyy", ["END"], "xx", 5),
        ("日本END!!", ["END"], "日本", 9),
    ],
)
def test_stop_strings_and_the_tokens_until_them(serve, text, stop, want, read, each):
    stream, tokens = serve["text"].Stream(serve["text"].Bytes(), stop), list(text.encode())
    parts = [stream.add(tokens[at : at + each]) for at in range(0, len(tokens), each)]
    assert "".join(parts) + stream.add([], last=True) == want
    assert stream.stopped and len(stream.tokens) == read


@pytest.fixture
def served(serve):
    pytest.importorskip("starlette", reason="starlette is not installed")
    uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed")
    server_module = importlib.import_module("server")
    # the weights of net, with norms and MLPs patched
    model, *_ = server_module.load("tiny", "cpu", torch.float32, 64)
    engine = serve["engine"].Engine(model, max_batch=4)
    own = socket.socket()  # reserves the port, so that no other process gets it
    own.bind(("127.0.0.1", 0))
    port = own.getsockname()[1]
    config = uvicorn.Config(
        server_module.application(engine), log_level="error", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([own],), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)

    def post(body, stream=False):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request(
            "POST", "/v1/completions", body if isinstance(body, (bytes, str)) else json.dumps(body)
        )
        answer = connection.getresponse()
        return (connection, answer) if stream else (answer.status, json.loads(answer.read()))

    yield engine, post, port, server, thread
    server.should_exit = True
    thread.join(20)


def test_over_http(serve, served, wanted):
    """Streamed and whole answers, refusals by name, clients that disconnect, and a shutdown under
    load."""
    engine, post, port, server, thread = served
    (prompt,) = prompts_of(20, seed=2)
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
    want = serve["text"].Bytes().decode(wanted(prompt, 12))
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
    for stream in (True, False):  # the client disconnects
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
