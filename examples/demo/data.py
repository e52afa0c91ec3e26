# SPDX-License-Identifier: BSD-3-Clause
"""Real text that every machine has: the sources of the Python standard library, as bytes.

A module or package belongs completely to the training or to the held-out part, by a hash of its
name. So no held-out file has a sibling in training, and the split is the same on every run.
"""

from __future__ import annotations

import gzip
import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Tests are not the library, encodings and pydoc_data are generated tables, and installed packages
# differ between machines.
SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
SKIPPED |= {"encodings", "pydoc_data"}
HELD_OUT_ONE_IN = 32


@dataclass(frozen=True)
class Corpus:
    """train, held_out [bytes] uint8; the names of the held-out modules; their gzip -9 size."""

    train: Tensor
    held_out: Tensor
    held_out_modules: list[str]
    gzip_bits_per_byte: float


def is_held_out(module: str) -> bool:
    """Whether a module is held out: one in HELD_OUT_ONE_IN, by a hash of its name."""
    return int(hashlib.sha256(module.encode()).hexdigest(), 16) % HELD_OUT_ONE_IN == 0


def load_corpus() -> Corpus:
    """Reads every source file of the standard library (about 10 MB)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text: dict[bool, list[bytes]] = {False: [], True: []}
    held_out_modules = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if SKIPPED.intersection(parts):
            continue
        module = parts[0].removesuffix(".py")
        held_out = is_held_out(module)
        text[held_out].append(path.read_bytes())
        if held_out and module not in held_out_modules:
            held_out_modules.append(module)
    if not text[False] or not text[True]:
        raise SystemExit(
            f"{root} holds no Python sources to train on; use an interpreter that ships its "
            "standard library as .py files"
        )
    joined = {side: b"".join(files) for side, files in text.items()}
    packed = len(gzip.compress(joined[True], compresslevel=9, mtime=0))
    return Corpus(
        train=torch.frombuffer(bytearray(joined[False]), dtype=torch.uint8),
        held_out=torch.frombuffer(bytearray(joined[True]), dtype=torch.uint8),
        held_out_modules=held_out_modules,
        gzip_bits_per_byte=8 * packed / len(joined[True]),
    )


def batches(text: Tensor, batch: int, context: int, seed: int):
    """Endless pairs (tokens, targets), each [batch, context] int64, at random places of text."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(context + 1)
    while True:
        starts = torch.randint(len(text) - context, (batch, 1), generator=generator)
        window = text[starts + offsets].long()
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()


def windows(text: Tensor, batch: int, context: int, overlap: int):
    """Yields (tokens, targets), each [batch, context] int64, in which every byte of text but the
    first is a target exactly once, after at least `overlap` bytes if the text has them. Targets
    that belong to another window are -100, which cross_entropy ignores."""
    starts = list(range(0, len(text) - 1, context - overlap))
    starts = [min(s, len(text) - 1 - context) for s in starts]
    tokens, targets, scored = [], [], 0
    for start in starts:
        window = text[start : start + context + 1].long()
        target = window[1:].clone()
        target[: scored - start] = -100
        scored = start + context
        tokens.append(window[:-1])
        targets.append(target)
    while len(tokens) % batch:  # whole batches only, so that one compiled graph serves all
        tokens.append(tokens[-1])
        targets.append(torch.full_like(targets[-1], -100))
    for i in range(0, len(tokens), batch):
        yield torch.stack(tokens[i : i + batch]), torch.stack(targets[i : i + batch])
