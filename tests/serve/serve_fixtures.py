# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures of the tests of serving: a model with random weights and what transformers makes of it, its
directory, a server."""

import http.client
import json
import socket
import threading
import time

import pytest
import torch
from serving import save_model

from torch_gpukern.nn import patch
from torch_gpukern.serve import Engine, TransformersModel
from torch_gpukern.serve.random_models import random_llama


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


@pytest.fixture
def served():
    pytest.importorskip("starlette", reason="starlette is not installed")
    uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed")
    from torch_gpukern.serve.app import application

    served_net = random_llama("tiny")
    patch(served_net, say=None)
    engine = Engine(TransformersModel(served_net, 64), max_batch=4)
    own = socket.socket()  # the server's from here on: nobody else gets the port
    own.bind(("127.0.0.1", 0))
    port = own.getsockname()[1]
    config = uvicorn.Config(application(engine), log_level="error", timeout_graceful_shutdown=1)
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
