# SPDX-License-Identifier: BSD-3-Clause
"""The command `gpukern serve MODEL_DIR`."""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

import torch
from torch import nn

from ..cli.terminal import device_of, whole
from . import loading
from .engine import Engine
from .extras import HTTP, MODELS, need
from .probe import served
from .random_models import SIZES

DTYPES = ("float32", "bfloat16", "float16")


def seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {text}")
    return value


seconds.__name__ = "float"  # which argparse names where float() fails


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
        choices=tuple(SIZES),
        help="instead of MODEL_DIR: a Llama with random weights in this shape, for load tests",
    )
    p.add_argument("--device", default="cpu", help="cpu, cuda or cuda:<index>")
    p.add_argument("--dtype", choices=DTYPES, help="default: float32 on a CPU, bfloat16 on a GPU")
    p.add_argument("--pages", type=whole(2), default=4096, help="pages of 16 tokens in the cache")
    p.add_argument("--batch", type=whole(1), default=64, help="requests that run at once")
    p.add_argument(
        "--step-tokens",
        type=whole(1),
        default=512,
        help="tokens of a step: the longest chunk of a prompt",
    )
    p.add_argument(
        "--drafts",
        type=whole(0),
        default=4,
        help="tokens drafted for a request in a step; 0 is none",
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
    if args.batch > args.step_tokens:
        raise ValueError(
            f"--batch is {args.batch}; expected at most --step-tokens, {args.step_tokens}: each "
            f"request that runs has a token of a step"
        )
    device = device_of(args.device)
    with bind(args.host, args.port) as own:  # before the model is loaded: it may be taken
        return serve(args, own, device)


def serve(args: argparse.Namespace, own: socket.socket, device: torch.device) -> int:
    from .app import application
    from .server import Server, address_of

    dtype = args.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    if args.random:
        net, tokenizer, stop_ids = loading.random(args.random, device, getattr(torch, dtype))
    else:
        net, tokenizer, stop_ids = loading.load(args.model, device, getattr(torch, dtype))
    engine = Engine(
        served(net, args.pages),
        max_batch=args.batch,
        max_step_tokens=args.step_tokens,
        max_drafts=args.drafts,
    )
    name = args.name or args.random or Path(args.model).resolve().name
    says = f"gpukern serve: {address_of(own)}/v1 has {name}: {about(net, engine)}"
    app = application(engine, tokenizer, name, stop_ids)
    Server(app, engine, drain_seconds=args.drain_seconds, says=says).run(sockets=[own])
    return 0


def size(count: int) -> str:
    """Bytes in MiB or GiB, three digits."""
    power, unit = (30, "GiB") if count >= 2**30 else (20, "MiB")
    return f"{count / 2**power:.3g} {unit}"


def about(net: nn.Module, engine: Engine) -> str:
    """Memory and pages, in a line."""
    cache = engine.cache
    weights = sum(t.numel() * t.element_size() for t in (*net.parameters(), *net.buffers()))
    pages = cache.k.numel() * cache.k.element_size() + cache.v.numel() * cache.v.element_size()
    return (
        f"{size(weights)} of weights on {cache.k.device}, "
        f"{size(pages)} of cache: {cache.num_blocks} pages of {cache.block_size} tokens, "
        f"{cache.k.dtype}".replace("torch.", "")
    )
