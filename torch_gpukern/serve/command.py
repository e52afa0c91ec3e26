# SPDX-License-Identifier: BSD-3-Clause
"""The command `gpukern serve MODEL_DIR`."""

from __future__ import annotations

import argparse
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..cli.terminal import device_of, whole
from ..nn.moe import is_transformers_experts
from ..nn.quant.quantized import HoldsCodes
from . import loading
from .apart import Apart, Running
from .eight_bit import CACHES
from .engine import Engine
from .extras import HTTP, MODELS, need
from .random_models import SHAPES
from .ranks import Others, follow, threads_of

DTYPES = ("float32", "bfloat16", "float16")


def seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {text}")
    return value


def share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0, at most 1, got {text}")
    return value


seconds.__name__ = share.__name__ = "float"  # which argparse names where float() fails


class Defaults(NamedTuple):
    batch: int
    step_tokens: int
    pages: int | None


ON_CPU = Defaults(64, 512, 4096)
ON_GPU = Defaults(256, 2048, None)


def complete(args: argparse.Namespace, device: torch.device) -> None:
    """Sets the flags that were left out, by the device.

    Raises:
        ValueError: a step has fewer tokens than requests.
    """
    batch, step_tokens, pages = ON_GPU if device.type == "cuda" else ON_CPU
    if args.batch is None:
        args.batch = batch if args.step_tokens is None else min(batch, args.step_tokens)
    if args.step_tokens is None:
        args.step_tokens = max(step_tokens, args.batch)
    if args.pages is None:
        args.pages = pages
    if args.batch > args.step_tokens:
        raise ValueError(
            f"--batch is {args.batch}; expected at most --step-tokens, {args.step_tokens}: each "
            f"request that runs has a token of a step"
        )


def add_arguments(commands: argparse._SubParsersAction) -> None:
    p = commands.add_parser("serve", help="serve a model over HTTP, in the form of OpenAI's API")
    p.set_defaults(run=run)
    p.add_argument(
        "model",
        nargs="?",
        metavar="MODEL_DIR",
        help="a model as transformers or `gpukern quantize` saves it",
    )
    p.add_argument(
        "--random",
        choices=SHAPES,
        help="instead of MODEL_DIR: random weights in this shape, for load tests",
    )
    p.add_argument("--device", default="cpu", help="cpu, cuda or cuda:<index>")
    p.add_argument("--dtype", choices=DTYPES, help="default: float32 on a CPU, bfloat16 on a GPU")
    p.add_argument(
        "--recipe",
        choices=("auto", *loading.RECIPES),
        help="quantise the weights when the server begins, as gpukern quantize does; auto: by "
        "--batch and the device",
    )
    p.add_argument(
        "--kv-cache",
        choices=tuple(CACHES),
        help="keys and values in 8 bits; their scales come from answers to a few texts",
    )
    p.add_argument(
        "--tensor-parallel",
        type=whole(1, 64),
        default=1,
        metavar="N",
        help="processes that share the model: N GPUs from the first on, or N of a CPU",
    )
    p.add_argument(
        "--pages",
        type=whole(2),
        help="pages of 16 tokens in the cache; default: on a GPU what fits into --memory, on a CPU "
        f"{ON_CPU.pages}",
    )
    p.add_argument(
        "--memory",
        type=share,
        default=0.9,
        metavar="SHARE",
        help="of a GPU's memory, for weights, steps and as many pages as fit; not used with --pages",
    )
    p.add_argument(
        "--batch",
        type=whole(1),
        help=f"requests that run at once; default: on a GPU {ON_GPU.batch}, on a CPU {ON_CPU.batch}",
    )
    p.add_argument(
        "--step-tokens",
        type=whole(1),
        help="tokens of a step: the longest chunk of a prompt; default: on a GPU "
        f"{ON_GPU.step_tokens}, on a CPU {ON_CPU.step_tokens}",
    )
    p.add_argument(
        "--drafts",
        type=whole(0),
        default=3,
        help="tokens of a branch drafted for a request in a step; 0 is none",
    )
    p.add_argument(
        "--draft-branches",
        type=whole(1, 16),
        default=1,
        metavar="N",
        help="continuations that are drafted, each of up to --drafts tokens",
    )
    p.add_argument("--name", help="of the model, in calls; default: the directory's name")
    p.add_argument(
        "--drain-seconds",
        type=seconds,
        default=5.0,
        help="how long requests that run go on after a signal",
    )
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=whole(0, 65535), default=8000)


def run(args: argparse.Namespace) -> int:
    need(HTTP)
    need(MODELS)
    from .server import bind  # it imports packages of the extra

    if (args.model is None) == (args.random is None):
        raise ValueError("expected MODEL_DIR or --random, one of them")
    device = first_device(args.device, args.tensor_parallel)
    complete(args, device)
    with bind(args.host, args.port) as own:  # before the model is loaded: it may be taken
        return serve(args, own, device)


def first_device(name: str, ranks: int) -> torch.device:
    """That of rank 0.

    Raises:
        ValueError: the machine does not have it, or not so many.
    """
    device = device_of(name)
    if ranks == 1 or device.type == "cpu":
        return device
    if device.index is not None:
        raise ValueError(f"--device is {name}; expected cuda beside --tensor-parallel {ranks}")
    if ranks > torch.cuda.device_count():
        raise ValueError(
            f"--tensor-parallel is {ranks}; there are {torch.cuda.device_count()} CUDA devices"
        )
    return torch.device("cuda", 0)


def part_of(rank: int, pipe: Any, what: loading.What, kind: str) -> None:
    """The work of a rank other than 0."""
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    at_work(device, what.ranks)
    (transformers,) = need(MODELS)
    transformers.utils.logging.disable_progress_bar()  # rank 0 shows one
    follow(loading.ready(what, device, rank).model, pipe)


def at_work(device: torch.device, ranks: int) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        threads_of(ranks)


def serve(args: argparse.Namespace, own: socket.socket, device: torch.device) -> int:
    from .app import application
    from .server import Server, address_of

    dtype = args.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    what = loading.What(
        args.model,
        args.random,
        getattr(torch, dtype),
        args.pages,
        args.recipe,
        args.kv_cache,
        args.batch,
        args.tensor_parallel,
        args.step_tokens,
        args.drafts,
        args.memory,
        args.draft_branches,
    )
    apart = Apart(engine_of, what, device)
    try:
        tokenizer = loading.tokenizer_of(what)  # while the other process loads the model
        about, stop_ids = apart.wait()
        name = args.name or args.random or Path(args.model).resolve().name
        server = Server(
            application(apart, tokenizer, name, stop_ids | tokenizer.end_ids),
            apart,
            drain_seconds=args.drain_seconds,
            says=f"gpukern serve: {address_of(own)}/v1 has {name}: {about}",
            at_end=apart.end,
        )
        apart.on_loss = server.lose
        server.run(sockets=[own])
        if apart.lost is not None:
            return 1
        return 128 + signal.SIGINT if server.ended_by == signal.SIGINT else 0
    finally:
        apart.end()


def engine_of(what: loading.What, device: torch.device) -> Running:
    """The engine, in its own process, and the ranks of its model."""
    others = None
    if what.ranks > 1:
        at_work(device, what.ranks)
        backend = "nccl" if device.type == "cuda" else "gloo"
        others = Others(what.ranks, part_of, backend, what, device.type)
    try:
        ready = loading.ready(what, device)
        if others is not None:
            ready.model.lead(others)
        began = time.perf_counter()
        ready.model.prepare(what.batch, what.drafts, what.draft_branches)
        captured = time.perf_counter() - began
    except BaseException:
        if others is not None:
            others.close()
        raise
    engine = Engine(
        ready.model,
        max_batch=what.batch,
        max_step_tokens=what.step_tokens,
        max_drafts=what.drafts,
        draft_branches=what.draft_branches,
    )
    said = about(ready, engine, captured), ready.stop_ids
    if others is None:
        return Running(engine, said, lambda: None, lambda call: None)

    def watch(call: Callable[[str], None]) -> None:
        others.on_loss = call

    return Running(engine, said, others.close, watch)


def size(count: int) -> str:
    """Bytes in MiB or GiB, three digits."""
    power, unit = (30, "GiB") if count >= 2**30 else (20, "MiB")
    return f"{count / 2**power:.3g} {unit}"


def kept_experts(net: Any) -> str:
    """What a recipe without a product of experts leaves."""
    kept = any(is_transformers_experts(m) and not isinstance(m, HoldsCodes) for m in net.modules())
    return "; its experts keep their dtype" if kept else ""


def about(ready: loading.Ready, engine: Engine, captured: float) -> str:
    """Memory and pages, in a line, and what captures have taken."""
    cache, net, ranks = engine.cache, ready.model.model, ready.model.ranks
    weights = sum(t.numel() * t.element_size() for t in (*net.parameters(), *net.buffers()))
    pages = cache.nbytes
    where = f"on {cache.k.device}" if ranks == 1 else f"on each of {ranks} ranks"
    few = "" if ready.recipe is None else f" ({ready.recipe}{kept_experts(net)})"
    graphs, steps = ready.model.graphs, ""
    if graphs:
        most = max(shape.requests for shape in graphs)
        steps = f"; {len(graphs)} steps of up to {most} requests captured in {captured:.1f} s"
    return (
        f"{size(weights)} of weights{few} {where}, "
        f"{size(pages)} of cache: {cache.num_blocks} pages of {cache.block_size} tokens, "
        f"{cache.k.dtype}{steps}".replace("torch.", "")
    )
