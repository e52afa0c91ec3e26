# SPDX-License-Identifier: BSD-3-Clause
"""``gpukern bench``: our time beside PyTorch's, as a table or as a page with plots."""

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from math import log10
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import __version__, flash_attn, gemm, paged_attn
from .charts import even_ticks, short
from .terminal import device_of, table, with_progress
from .tuning import timing
from .tuning.gemm import DTYPES

OPS = ("gemm", "flash_attn", "paged_attn")
OURS = "gpukern"
CHECKOUT = Path(__file__).resolve().parent.parent
# What a page measures over: rows of square products, tokens of a sequence, sequences of 2048 keys. A table: SMALL.
SIZES = {
    "cpu": {"gemm": (256, 512, 1024, 2048), "flash_attn": (256, 512, 1024, 2048), "paged_attn": (1, 4, 16)},
    "cuda": {
        "gemm": (512, 1024, 2048, 4096, 8192),
        "flash_attn": (512, 1024, 2048, 4096, 8192),
        "paged_attn": (1, 4, 16, 64),
    },
}
SMALL = {"gemm": 1024, "flash_attn": 1024, "paged_attn": 4}


@dataclass
class Case:
    """One call: ours, and PyTorch's own ways to the same result."""

    line: str  # of a plot
    size: int
    name: str
    work: float  # of one call: FLOPs, or the bytes of keys and values where reading them is the bound
    unit: str  # of its rate
    ours: Callable[[], Tensor]
    theirs: dict[str, Callable[[], Tensor]]

    def __str__(self) -> str:
        return self.name


@dataclass
class Measured:
    line: str
    size: int
    name: str
    work: float
    unit: str
    us: dict[str, float]  # by way; those that do not serve the call are not in it

    @property
    def peer(self) -> str:
        """PyTorch's fastest."""
        return min((way for way in self.us if way != OURS), key=self.us.__getitem__)

    def rate(self, way: str) -> float:
        return self.work / self.us[way] / 1e3

    def row(self) -> tuple[str, ...]:
        ours, peer = self.us[OURS], self.us[self.peer]
        return (
            self.name,
            f"{ours:.1f}",
            self.peer,
            f"{peer:.1f}",
            f"{peer / ours:.2f}",
            f"{self.rate(OURS):,.1f} {self.unit}",
        )


HEADS = ("case", "ours us", "PyTorch's fastest", "us", "ratio", "ours")
# What a size is, by op: the name of a plot's lower axis.
SIZE_NAMES = {"gemm": "M = N = K", "flash_attn": "tokens of a sequence", "paged_attn": "sequences of 2048 keys"}


# ---- cases ---------------------------------------------------------------------------------------


def _sdpa_on(backend: SDPBackend, *args: Tensor, **options: bool) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(*args, **options)


def _sdpas(device: torch.device) -> dict[str, Callable]:
    """scaled_dot_product_attention by backend: which one PyTorch takes by itself need not be its fastest."""
    if device.type != "cuda":
        return {"SDPA": F.scaled_dot_product_attention}
    backends = {
        "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
        "SDPA flash": SDPBackend.FLASH_ATTENTION,
        "SDPA efficient": SDPBackend.EFFICIENT_ATTENTION,
        "SDPA math": SDPBackend.MATH,
    }
    return {name: partial(_sdpa_on, backend) for name, backend in backends.items()}


def cases(op: str, size: int, dtype: torch.dtype, device: torch.device) -> list[Case]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    if op == "gemm":
        a, b = randn(size, size), randn(size, size)
        name = f"gemm {size} cubed"
        return [Case(op, size, name, 2.0 * size**3, "GFLOP/s", lambda: gemm(a, b), {"matmul": lambda: a @ b})]
    if op == "flash_attn":
        q, k, v = (randn(1, 8, size, 64) for _ in range(3))
        return [
            Case(
                f"{op}, causal" if causal else op,
                size,
                f"flash_attn 8 heads, {size} tokens, d64{', causal' if causal else ''}",
                4.0 * 8 * size**2 * 64 / (2 if causal else 1),
                "GFLOP/s",
                partial(flash_attn, q, k, v, is_causal=causal),
                {way: partial(sdpa, q, k, v, is_causal=causal) for way, sdpa in _sdpas(device).items()},
            )
            for causal in (False, True)
        ]
    q, k, v = randn(size, 32, 128), randn(size * 128, 16, 8, 128), randn(size * 128, 16, 8, 128)
    pages = torch.randperm(size * 128, device=device).int().view(size, 128)
    lens = torch.full((size,), 2048, dtype=torch.int32, device=device)

    def gather(sdpa: Callable) -> Tensor:
        keys, values = (x[pages.long()].flatten(1, 2).transpose(1, 2) for x in (k, v))
        return sdpa(q[:, :, None], keys, values, enable_gqa=True)[:, :, 0]

    name = f"paged_attn {size} x 2048 keys, 32/8 heads, d128"
    theirs = {f"gather, {way}": partial(gather, sdpa) for way, sdpa in _sdpas(device).items()}
    read = 2.0 * size * 2048 * 8 * 128 * k.element_size()
    return [Case(op, size, name, read, "GB/s", lambda: paged_attn(q, k, v, pages, lens), theirs)]


def measure(case: Case, device: torch.device) -> Measured:
    us = {OURS: timing.median_us(case.ours, device)}
    for way, call in case.theirs.items():
        try:
            call()  # before any capture
            us[way] = timing.median_us(call, device)
        except RuntimeError:  # a backend of PyTorch that does not serve the call
            continue
    return Measured(case.line, case.size, case.name, case.work, case.unit, us)


# ---- the page ------------------------------------------------------------------------------------

COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b")
WIDTH, HEIGHT, MARGIN, LEFT = 800, 360, 60, 76


def plot(title: str, points: Sequence[Measured]) -> str:
    """The rate over the size as SVG, a line for each way; a point's figures under the pointer."""
    ways = list(dict.fromkeys(way for p in points for way in p.us))
    sizes = sorted({p.size for p in points})
    unit, across = points[0].unit, SIZE_NAMES[points[0].line.partition(",")[0]]
    ticks = even_ticks(1.02 * max(p.rate(way) for p in points for way in p.us))
    low, high = log10(sizes[0]), log10(sizes[-1])
    floor, right = HEIGHT - MARGIN, WIDTH - 24

    def at(size: int, rate: float) -> tuple[float, float]:
        along = (log10(size) - low) / (high - low) if high > low else 0.5
        return LEFT + 16 + along * (right - LEFT - 32), floor - rate / ticks[-1] * (HEIGHT - 2 * MARGIN)

    shapes = [f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}: {unit}</text>']
    for tick in ticks:
        _, y = at(sizes[0], tick)
        shapes.append(f'<line x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        shapes.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(tick)}</text>')
    for size in sizes:
        x, _ = at(size, 0)
        shapes.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{floor}" y2="{floor + 4}" stroke="#444"/>')
        shapes.append(f'<text x="{x:.1f}" y="{floor + 16}" text-anchor="middle">{size}</text>')
    shapes.append(f'<path d="M{LEFT},{MARGIN - 10}V{floor}H{right}" fill="none" stroke="#444"/>')
    shapes.append(f'<text x="{(LEFT + right) / 2:.0f}" y="{floor + 30}" text-anchor="middle">{across}</text>')
    middle = HEIGHT // 2
    shapes.append(f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">{unit}</text>')
    for i, way in enumerate(ways):
        mine = sorted((p for p in points if way in p.us), key=lambda p: p.size)
        color, thick = COLORS[i % len(COLORS)], 3 if way == OURS else 1.5
        line = " ".join("{:.1f},{:.1f}".format(*at(p.size, p.rate(way))) for p in mine)
        shapes.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="{thick}"/>')
        for p in mine:
            x, y = at(p.size, p.rate(way))
            text = escape(f"{way}, {p.name}: {p.us[way]:,.1f} us, {p.rate(way):,.0f} {p.unit}")
            shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"><title>{text}</title></circle>')
        x = LEFT + i * (right - LEFT) // len(ways)
        shapes.append(f'<text x="{x}" y="{HEIGHT - 8}" fill="{color}">{escape(way)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" font-size="11" '
        'font-family="sans-serif">\n' + "\n".join(shapes) + "\n</svg>\n"
    )


def page(what: str, points: Sequence[Measured]) -> str:
    """One page without scripts or links: for each line of cases its plot and its table."""
    parts = []
    for line in dict.fromkeys(p.line for p in points):
        mine = [p for p in points if p.line == line]
        heads = "".join(f"<th>{escape(head)}</th>" for head in HEADS)
        rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in p.row())}</tr>\n" for p in mine)
        parts.append(f"<h2>{escape(line)}</h2>\n{plot(line, mine)}<table>\n<tr>{heads}</tr>\n{rows}</table>\n")
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>gpukern bench</title>\n'
        "<style>body{font-family:sans-serif;max-width:60em;margin:auto}td,th{padding:1px 8px;text-align:right}"
        "td:first-child{text-align:left}</style>\n"
        f"<h1>gpukern beside PyTorch</h1>\n<p>{escape(what)}</p>\n" + "".join(parts) + "</html>\n"
    )


# ---- the command ---------------------------------------------------------------------------------


def _described(args: argparse.Namespace, device: torch.device) -> str:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    return f"{args.dtype} on {args.device}, {where}, medians; ratio is PyTorch's time over ours"


def _measured(work: Sequence[tuple[str, int]], args: argparse.Namespace, device: torch.device) -> Iterator[Measured]:
    """Inputs are made when their turn comes: those of all sizes need not fit together."""
    items = [f"{op} {size}" for op, size in work]
    with torch.inference_mode():
        for (op, size), _ in zip(work, with_progress(items, "bench"), strict=True):
            for case in cases(op, size, DTYPES[args.dtype], device):
                yield measure(case, device)


def run(args: argparse.Namespace) -> int:
    op = args.op or "gemm"
    script = CHECKOUT / "benchmarks" / f"bench_{op}.py"
    own_table = args.small or args.html is not None or args.dtype is not None
    if script.exists() and not own_table:
        device_too = [] if args.device is None else ["--device", args.device]
        return subprocess.run([sys.executable, str(script), *device_too, *args.rest]).returncode
    if args.rest:
        why = "which --small, --html and --dtype are not of" if script.exists() else "which are not here"
        print(f"bench: {args.rest[0]} is an option of the repository's benchmarks, {why}", file=sys.stderr)
        return 2
    args.dtype, args.device = args.dtype or "float32", args.device or "cpu"
    device = device_of(args.device)
    if args.html is None:
        work = [(op, SMALL[op])]
    else:
        args.html.parent.resolve(strict=True)  # before minutes of measuring
        ops = OPS if args.op is None else (args.op,)
        work = [(op, size) for op in ops for size in ((SMALL[op],) if args.small else SIZES[device.type][op])]
    points = list(_measured(work, args, device))
    print(_described(args, device))
    print(table([HEADS, *(p.row() for p in points)]))
    if args.html is not None:
        args.html.write_text(
            page(f"{_described(args, device)}. gpukern {__version__}, torch {torch.__version__}.", points)
        )
        print(f"wrote {args.html}")
    return 0


def add_arguments(commands: argparse._SubParsersAction) -> None:
    p = commands.add_parser(
        "bench", help="our time beside PyTorch's; in a checkout runs its benchmarks, with your options"
    )
    p.set_defaults(run=run)
    p.add_argument("op", nargs="?", choices=OPS, help="default: gemm; with --html all of them")
    p.add_argument("--small", action="store_true", help="one size, also in a checkout")
    p.add_argument(
        "--html", type=Path, metavar="FILE", help="sizes from small to large, as one page with plots and tables"
    )
    p.add_argument("--dtype", choices=DTYPES, help="default: float32; the repository's benchmarks measure each dtype")
    p.add_argument("--device", help="default: cpu")
