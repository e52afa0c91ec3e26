# SPDX-License-Identifier: BSD-3-Clause
"""The command `gpukern serve MODEL_DIR`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from ..cli.terminal import device_of, whole
from . import loading
from .engine import Engine
from .extras import HTTP, MODELS, need
from .models import TransformersModel

DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(commands: argparse._SubParsersAction) -> None:
    p = commands.add_parser("serve", help="serve a model over HTTP, in the form of OpenAI's API")
    p.set_defaults(run=run)
    p.add_argument(
        "model", metavar="MODEL_DIR", help="a model as transformers or `gpukern quantize` saves it"
    )
    p.add_argument("--device", default="cpu", help="cpu, cuda or cuda:<index>")
    p.add_argument("--dtype", choices=DTYPES, help="default: float32 on a CPU, bfloat16 on a GPU")
    p.add_argument("--pages", type=whole(1), default=4096, help="pages of 16 tokens in the cache")
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
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=whole(0, 65535), default=8000)


def run(args: argparse.Namespace) -> int:
    _, uvicorn, _ = need(HTTP)
    need(MODELS)
    from .app import application  # imports the packages of the extra

    device = device_of(args.device)
    name = args.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    net, tokenizer, stop_ids = loading.load(args.model, device, getattr(torch, name))
    model = TransformersModel(net, args.pages)
    engine = Engine(
        model, max_batch=args.batch, max_step_tokens=args.step_tokens, max_drafts=args.drafts
    )
    app = application(engine, tokenizer, Path(args.model).resolve().name, stop_ids)
    # A signal ends it: new requests are refused at once, running ones have five seconds.
    uvicorn.run(
        app, host=args.host, port=args.port, log_level="warning", timeout_graceful_shutdown=5
    )
    return 0
