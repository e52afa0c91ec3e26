# SPDX-License-Identifier: BSD-3-Clause
"""The server as a process: what it says when it begins, what a signal does, and clients that leave.
Nothing is a traceback."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
for package in ("starlette", "uvicorn", "prometheus_client"):
    pytest.importorskip(package, reason=f"{package} is not installed")
pytest_plugins = ("serve_fixtures",)

LONG = {"prompt": "once", "max_tokens": 8000, "temperature": 0}


class Process:
    """`gpukern serve`, and calls of it."""

    def __init__(self, model_dir, *flags):
        command = [sys.executable, "-m", "torch_gpukern", "serve", str(model_dir), "--port", "0"]
        self.process = subprocess.Popen(
            [*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.says = self.process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/v1", self.says)
        assert found, (self.says, self.process.stderr.read())
        self.port = int(found[1])

    def ask(self, body):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps(body))
        return connection.getresponse()

    def numbers(self):
        """Of /health."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", "/health")
        return json.loads(connection.getresponse().read())

    def metric(self, name):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        return float(re.search(rf"^{re.escape(name)} (.*)$", text, re.MULTILINE)[1])

    def until(self, condition, seconds=60):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.02)

    def end(self, sent=signal.SIGTERM):
        """Lines of stderr, without transformers' progress bar."""
        self.process.send_signal(sent)
        _, error = self.process.communicate(timeout=240)
        return [x for x in error.splitlines() if x and not x.startswith("Loading weights")]


@pytest.fixture
def process(model_dir):
    started = []

    def start(*flags):
        started.append(Process(model_dir, *flags))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.communicate()


def test_it_says_where_and_what(process):
    server = process("--pages", "32", "--name", "mine")
    port = server.port
    assert re.fullmatch(
        rf"gpukern serve: http://127\.0\.0\.1:{port}/v1 has mine: 1\.63 MiB of weights on cpu, "
        rf"0\.5 MiB of cache: 32 pages of 16 tokens, float32\n",
        server.says,
    )
    assert server.end(signal.SIGINT) == []
    assert server.process.returncode == 128 + 2


def test_a_taken_port_is_named(model_dir, capsys):
    from torch_gpukern.cli.commands import main

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", str(model_dir), "--port", str(port)]) == 1
    assert f"serve: address 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err


def test_a_signal_lets_short_answers_end(process):
    server, answers = process("--drain-seconds", "200"), []

    def ask():
        answer = server.ask({"prompt": "x", "max_tokens": 1000, "temperature": 0})
        answers.append((answer.status, json.loads(answer.read())))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    server.until(lambda: server.numbers()["running"] == 3)
    assert server.end() == []
    assert server.process.returncode == 0
    for thread in threads:
        thread.join()
    assert [status for status, _ in answers] == [200] * 3
    assert all(x["choices"][0]["finish_reason"] == "length" for _, x in answers)


def test_a_signal_ends_what_is_left(process):
    """Whole answers are 503, streams end with a finish_reason, clients that do not read are cut,
    and new calls are refused."""
    server, found = process("--drain-seconds", "1"), {}

    def whole():
        answer = server.ask(LONG)
        found["whole"] = answer.status, json.loads(answer.read())

    def stream():
        lines = server.ask(LONG | {"stream": True}).read().splitlines()
        found["stream"] = [line[6:] for line in lines if line.startswith(b"data: ")]

    threads = [threading.Thread(target=x) for x in (whole, stream)]
    for thread in threads:
        thread.start()
    idle = server.ask(LONG | {"stream": True})  # it reads nothing
    half = socket.create_connection(("127.0.0.1", server.port))  # its body never ends
    half.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    server.until(lambda: server.numbers()["running"] == 3)
    server.process.send_signal(signal.SIGTERM)
    refused = []
    for _ in range(50):
        time.sleep(0.02)
        refused.append(server.ask({"prompt": "x"}).status)
        if refused[-1] == 503:
            break
    assert refused[-1] == 503
    assert server.end() == []
    for thread in threads:
        thread.join()
    status, answer = found["whole"]
    assert status == 503 and answer["error"]["message"] == "the server closes"
    assert found["stream"][-1] == b"[DONE]"
    assert json.loads(found["stream"][-2])["choices"][0]["finish_reason"] == "abort"
    del idle
    half.close()


def test_clients_that_leave_anywhere(process):
    """In the headers, in the body, before the first event, in mid-stream, and with a reset. Pages
    and threads return, and stderr is empty."""
    server = process()
    server.ask({"prompt": "x", "max_tokens": 2}).read()
    status = f"/proc/{server.process.pid}/status"

    def threads():
        with open(status) as lines:
            return next(int(x.split()[1]) for x in lines if x.startswith("Threads"))

    before = threads()
    data = json.dumps(LONG | {"stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data)
    for _ in range(5):
        for sent, reads in (
            (head[:20], False),
            (head, False),
            (head + data[:10], False),
            (head + data, False),
            (head + data, True),
            (b"nonsense\r\n\r\n", False),
        ):
            for reset in (False, True):
                client = socket.create_connection(("127.0.0.1", server.port))
                client.sendall(sent)
                if reads:
                    client.recv(100)
                if reset:  # closes with RST
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                client.close()
    # a request on its way to the engine's process neither runs nor waits yet
    server.until(lambda: server.numbers()["running"] == server.numbers()["waiting"] == 0)
    server.until(lambda: server.metric("gpukern_used_pages") == 0)
    assert server.ask({"prompt": "x", "max_tokens": 2}).status == 200
    assert threads() <= before + 40  # starlette's pool for the work that blocks
    assert set(server.end()) <= {"WARNING:  Invalid HTTP request received."}


def engine_of(server):
    """The number of the engine's process."""
    with open(f"/proc/{server.process.pid}/task/{server.process.pid}/children") as children:
        pids = children.read().split()
    found = []
    for pid in pids:
        with open(f"/proc/{pid}/cmdline") as command:
            if "spawn_main" in command.read():
                found.append(int(pid))
    (one,) = found
    return one


def test_the_engine_ends_with_a_killed_server(process):
    server = process()
    engine = engine_of(server)
    server.ask(LONG | {"stream": True}).read(20)
    server.process.kill()
    server.process.wait()

    def gone():
        try:
            with open(f"/proc/{engine}/stat") as stat:
                return stat.read().rsplit(")", 1)[1].split()[0] == "Z"
        except OSError:
            return True

    server.until(gone, 30)


def test_a_killed_engine_ends_the_server(process):
    """A stream gets an error, and the exit code is 1."""
    server = process()
    stream = server.ask(LONG | {"stream": True})
    stream.read(20)
    os.kill(engine_of(server), signal.SIGKILL)
    events = stream.read().splitlines()
    assert events[-2] == b"data: [DONE]"
    text = "the engine's process has ended, exit code -9"
    assert json.loads(events[-4][6:])["error"]["message"] == f"error: {text}"
    _, said = server.process.communicate(timeout=60)
    assert server.process.returncode == 1
    assert said.splitlines().count(f"gpukern serve: {text}; the server ends") == 1
