# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures of the tests of serving: a model with random weights and what transformers makes of it, its
directory, a server, two ranks."""

import http.client
import json
import threading
import time

import pytest
import torch
from serving import save_model

from torch_gpukern.nn import patch
from torch_gpukern.serve import Engine, TransformersModel, captured, shards
from torch_gpukern.serve.random_models import random_llama
from torch_gpukern.serve.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def net():
    return random_llama("tiny")


@pytest.fixture(scope="module")
def wanted(net):
    """Of each prompt the tokens that transformers' generate adds, greedy."""
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


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "Tiny-1.5-Chat")


class Served:
    """A server in a thread, and calls of it."""

    def __init__(self, engine, tokenizer=None, **settings):
        from torch_gpukern.serve.app import application
        from torch_gpukern.serve.server import Server, bind

        self.engine = engine
        own = bind("127.0.0.1", 0)
        self.port = own.getsockname()[1]
        application_ = application(engine, tokenizer, "tiny")
        self.app = application_.state.app
        self.server = Server(application_, engine, **settings)
        self.thread = threading.Thread(target=self.server.run, args=([own],), daemon=True)
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive()
            time.sleep(0.01)

    def connection(self):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)

    def send(self, body, path="/v1/completions", method="POST"):
        """The response; its body is not read yet."""
        connection = self.connection()
        data = body if isinstance(body, (bytes, str, type(None))) else json.dumps(body)
        connection.request(method, path, data)
        return connection.getresponse()

    def post(self, body, path="/v1/completions", method="POST"):
        """(status, JSON)"""
        answer = self.send(body, path, method)
        return answer.status, json.loads(answer.read())

    def get(self, path):
        return self.post(None, path, "GET")

    def stream(self, body, path="/v1/completions"):
        """The events of a stream, up to its end."""
        return events_of(self.send(body | {"stream": True}, path))

    def end(self):
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()


def events_of(answer):
    assert answer.status == 200, answer.read()
    lines = [x[6:].strip() for x in answer.read().splitlines() if x.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.fixture
def quick():
    """An engine on a model of two layers, patched as the server does."""
    served_net = random_llama("tiny")
    patch(served_net, say=None)
    return Engine(TransformersModel(served_net, 64), max_batch=4)


@pytest.fixture
def served(quick):
    for package in ("starlette", "uvicorn", "prometheus_client"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    server = Served(quick, drain_seconds=0.5)
    yield server
    server.end()


@pytest.fixture
def chat_served(quick, model_dir):
    """With a tokenizer that has a chat template."""
    from transformers import AutoTokenizer

    for package in ("starlette", "uvicorn", "prometheus_client", "jinja2"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    server = Served(quick, Tokenizer(AutoTokenizer.from_pretrained(model_dir)), drain_seconds=0.5)
    yield server
    server.end()


class Threads:
    """Two ranks as threads, with the two collectives that shards use."""

    def __init__(self):
        self.barrier = threading.Barrier(2, timeout=60)
        self.mine = threading.local()
        self.given = [None, None]

    def all_given(self, x):
        self.given[self.mine.rank] = x.clone()
        self.barrier.wait()
        both = list(self.given)
        self.barrier.wait()
        return both

    def all_reduce(self, x):
        a, b = self.all_given(x)
        x.copy_(a + b)

    def all_gather(self, out, x):
        out.copy_(torch.cat(self.all_given(x)))

    def run(self, work):
        """[work(0), work(1)]"""
        results, errors = [None, None], []

        def one(rank):
            self.mine.rank = rank
            try:
                results[rank] = work(rank)
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        assert not errors
        return results


@pytest.fixture
def ranks(monkeypatch):
    threads = Threads()
    monkeypatch.setattr(shards, "dist", threads)
    monkeypatch.setattr(shards, "all_gather", threads.all_gather)
    return threads


class Replayed:
    """In the place of a graph, on a CPU: replays run the work again, over the same tensors."""

    def __init__(self, work):
        self.work, self.replays = work, 0
        self.results = tuple(x.clone() for x in work())

    def replay(self):
        self.replays += 1
        for kept, new in zip(self.results, self.work()):
            kept.copy_(new)


@pytest.fixture
def on_cpu(monkeypatch):
    """Makes a model of the CPU replay its steps, of up to so many requests. A step takes as many
    milliseconds as tokens / 100 + 4."""

    def record(work, pool):
        graph = Replayed(work)
        return graph, graph.results

    monkeypatch.setattr(captured, "record", record)
    monkeypatch.setattr(captured, "new_pool", lambda: None)
    monkeypatch.setattr(captured, "milliseconds", lambda graph: len(graph.results[1]) / 100 + 4)

    def of(model, batch):
        model.captured_batch = batch
        step_of = model.step_of

        def kept(*args):
            """The tokens are read after the next replay, and on a CPU they are not copied."""
            logits = step_of(*args)
            model.best = None if model.best is None else model.best.clone()
            return logits

        model.step_of = kept
        return model

    return of
