# SPDX-License-Identifier: BSD-3-Clause
"""What torch's profiler saw of a step: the bytes that a rank sent, and how much of its communication went beside kernels."""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

_BYTES = {"Float": 4, "float": 4, "BFloat16": 2, "c10::BFloat16": 2, "Half": 2, "c10::Half": 2, "Double": 8, "double": 8,
          "Long": 8, "long int": 8, "long": 8, "Int": 4, "int": 4}  # fmt: skip


@dataclass
class Seen:
    """sent: bytes. On a GPU also the ms of communication and the share of it beside other kernels; else None."""

    sent: float
    communication_ms: float | None
    hidden: float | None


def watch(step, ranks: int, trace: Path | None = None) -> Seen:
    """Runs step once. ranks: size of the group whose collectives are counted, where the backend does not say (gloo)."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities, record_shapes=True) as profiler:
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = trace or Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    moved = spans(e for e in kernels if "nccl" in e["name"].lower())
    if not kernels:
        return Seen(sent_bytes(events, ranks), None, None)
    others = spans(e for e in kernels if "nccl" not in e["name"].lower())
    total = sum(end - start for start, end in moved)
    return Seen(sent_bytes(events, ranks), total / 1e3, overlap(moved, others) / total if total else None)


def sent_bytes(events: list[dict], ranks: int) -> float:
    """By the algorithms of a ring: n bytes of a rank all-gathered or its n of all reduce-scattered send n (W - 1) and
    n (W - 1) / W, an all-reduce twice the latter, an all-to-all (W - 1) / W of its bytes.
    """
    total = 0.0
    for event in events:
        args, name = event.get("args", {}), event["name"].lower()
        if name == "record_param_comms":
            kind, size = str(args.get("Collective name", "")).lower(), int(args.get("Group size", 1) or 1)
            each = _BYTES.get(str(args.get("dtype", "")), 0) * int(args.get("In msg nelems", 0) or 0)
        elif name.startswith("gloo:"):
            kind, size = name.removeprefix("gloo:"), ranks
            each = _of_shapes(args)
        else:
            continue
        kind = kind.replace("_", "")
        if "recv" in kind:
            continue
        if "send" in kind:
            total += each
        elif "allgather" in kind:
            total += each * (size - 1)
        elif "allreduce" in kind:
            total += each * 2 * (size - 1) / size
        elif "reducescatter" in kind or "alltoall" in kind:
            total += each * (size - 1) / size
    return total


def _of_shapes(args: dict) -> float:
    dims, types = args.get("Input Dims") or [[]], args.get("Input type") or [""]
    return math.prod(dims[0]) * _BYTES.get(types[0], 4) if all(isinstance(n, int) for n in dims[0]) else 0.0


Span = tuple[float, float]


def spans(events) -> list[Span]:
    """The times of some events, without overlaps, in order."""
    found: list[Span] = []
    for start, end in sorted((e["ts"], e["ts"] + e["dur"]) for e in events):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def overlap(a: list[Span], b: list[Span]) -> float:
    """The time that lies in both."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total
