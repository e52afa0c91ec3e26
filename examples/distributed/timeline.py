# SPDX-License-Identifier: BSD-3-Clause
"""Evaluates a step in torch's profiler: the bytes that a rank sent, and how much of its
communication overlapped with kernels.

python examples/distributed/timeline.py TRACE... --out PICTURE draws traces that train.py --trace
wrote.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

_BYTES = {
    "Float": 4,
    "float": 4,
    "BFloat16": 2,
    "c10::BFloat16": 2,
    "Half": 2,
    "c10::Half": 2,
    "Double": 8,
    "double": 8,
    "Long": 8,
    "long int": 8,
    "long": 8,
    "Int": 4,
    "int": 4,
}


Span = tuple[float, float]


@dataclass
class Seen:
    """sent: bytes. On a GPU also the ms of communication and the share of it that overlapped with
    other kernels; otherwise None."""

    sent: float
    communication_ms: float | None
    hidden: float | None


def watch(step, ranks: int, trace: Path | None = None) -> Seen:
    """Runs step once under the profiler. ranks: the size of the group, for backends that do not
    record it (gloo)."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities, record_shapes=True) as profiler:
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = trace or Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    moved, others = of_gpu(events)
    if not others:
        return Seen(sent_bytes(events, ranks), None, None)
    total = sum(end - start for start, end in moved)
    return Seen(
        sent_bytes(events, ranks), total / 1e3, overlap(moved, others) / total if total else None
    )


# Names of communication: NCCL's kernels, copies between GPUs and the barriers around them, and sums
# through mailboxes.
_MOVES = ("nccl", "ptop", "symmetric_memory::barrier", "sum_over_ranks")


def of_gpu(events: list[dict]) -> tuple[list[Span], list[Span]]:
    """(communication, everything else) that ran on the GPU."""
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    moves = [any(word in e["name"].lower() for word in _MOVES) for e in kernels]
    return tuple(
        spans(e for e, moved in zip(kernels, moves, strict=True) if moved == wanted)
        for wanted in (True, False)
    )


def sent_bytes(events: list[dict], ranks: int) -> float:
    """The bytes that a rank sends, by ring algorithms over W ranks. An all-gather of n bytes per
    rank sends n (W - 1), a reduce-scatter of n bytes n (W - 1) / W, an all-reduce twice that, and
    an all-to-all (W - 1) / W of its bytes. A copy between GPUs is counted on the rank that starts
    it: ranks that read from each other read as much as they send.
    """
    total = 0.0
    for event in events:
        args, name = event.get("args", {}), event["name"].lower()
        if name == "record_param_comms":
            kind, size = (
                str(args.get("Collective name", "")).lower(),
                int(args.get("Group size", 1) or 1),
            )
            each = _BYTES.get(str(args.get("dtype", "")), 0) * int(
                args.get("In msg nelems", 0) or 0
            )
        elif event.get("cat") == "gpu_memcpy":
            total += int(args.get("bytes", 0)) if "ptop" in name else 0
            continue
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
    return (
        math.prod(dims[0]) * _BYTES.get(types[0], 4)
        if all(isinstance(n, int) for n in dims[0])
        else 0.0
    )


def spans(events) -> list[Span]:
    """The time spans of events, merged and in order."""
    found: list[Span] = []
    for start, end in sorted((e["ts"], e["ts"] + e["dur"]) for e in events):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def overlap(a: list[Span], b: list[Span]) -> float:
    """The total time that is in both lists of spans."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def draw(traces: list[Path], out: Path) -> None:
    """A pair of lanes for each trace: kernels, and communication under them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, lanes = pyplot.subplots(len(traces), 1, figsize=(10, 1.6 * len(traces)), squeeze=False)
    for axes, path in zip(lanes[:, 0], traces, strict=True):
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        moved, others = of_gpu(json.loads(text)["traceEvents"])
        start = min(x[0][0] for x in (moved, others) if x)
        for row, (found, colour) in enumerate(((moved, "tab:orange"), (others, "tab:blue"))):
            bars = [((a - start) / 1e3, (b - a) / 1e3) for a, b in found]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour)
        axes.set_yticks([0, 1], ["links", "kernels"])
        axes.set_title(path.name.split(".")[0].removeprefix("trace_"), fontsize=9, loc="left")
    lanes[-1, 0].set_xlabel("ms of a training step")
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    draw(options.traces, options.out)


if __name__ == "__main__":
    main()
