# SPDX-License-Identifier: BSD-3-Clause
"""New Python processes with PyTorch already imported, for `run_python` of conftest.py.

Importing PyTorch takes more than two seconds of a core, and over fifty tests run code in a process
of their own. So each process of the test suite starts this file as a server. The server imports
PyTorch but not gpukern, and forks a child for each request. The child runs the code as `python -c`
does, and ends as an interpreter ends. Until its first use PyTorch has neither threads nor a CUDA
context, so the child behaves like a new process.
"""

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import types
import warnings
from pathlib import Path

_ENVIRONMENT = dict(os.environ)
_servers = {}


def run(code, env, cwd, timeout):
    """Runs code in a process of its own, with env as its environment. Returns the finished process
    with its output. A process that outlives the timeout is killed."""
    # each process has its own server: a fork of this process starts another one
    server = _servers.get(os.getpid())
    if server is None or server.poll() is not None:
        server = _servers[os.getpid()] = subprocess.Popen(
            [sys.executable, __file__],
            env=_ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    with tempfile.TemporaryDirectory() as folder:
        job = {"code": code, "env": env, "cwd": str(cwd), "timeout": timeout, "folder": folder}
        print(json.dumps(job), file=server.stdin, flush=True)
        answer = server.stdout.readline()
        assert answer, f"the server of run_python ended, exit {server.wait()}"
        status, killed = json.loads(answer)
        out, error = ((Path(folder) / name).read_text() for name in ("stdout", "stderr"))
    if killed:
        raise subprocess.TimeoutExpired(code, timeout, out, error)
    return subprocess.CompletedProcess(code, status, out, error)


def serve():
    """Forks for each request on stdin. Returns a request in each child, None in the server."""
    import torch  # noqa: F401

    gc.freeze()  # otherwise a child's collector would write to, and so copy, every page
    for line in sys.stdin:
        job, late = json.loads(line), []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 warns: NumPy's BLAS has idle threads
            child = os.fork()
        if child == 0:
            return job

        def kill(*_, child=child, late=late):
            late.append(True)
            os.kill(child, signal.SIGKILL)

        signal.signal(signal.SIGALRM, kill)
        signal.alarm(job["timeout"])
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        signal.alarm(0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        print(json.dumps([status, bool(late)]), flush=True)
    return None


def become(job):
    """Gives this child what `python -c` would have: environment, folder, streams, sys.path."""
    streams = [os.open(os.devnull, os.O_RDONLY)]
    streams += [
        os.open(f"{job['folder']}/{name}", os.O_WRONLY | os.O_CREAT)
        for name in ("stdout", "stderr")
    ]
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    sys.argv = ["-c"]
    wanted = ["", *job["env"].get("PYTHONPATH", "").split(os.pathsep)]
    sys.path[:] = wanted + [entry for entry in sys.path[1:] if entry not in wanted]


if __name__ == "__main__":
    server, job = sys.modules["__main__"], serve()
    if job is not None:
        become(job)
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(job["code"], "<string>", "exec"), sys.modules["__main__"].__dict__)
