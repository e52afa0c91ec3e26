# SPDX-License-Identifier: BSD-3-Clause
"""``gpukern bench``: our time beside PyTorch's, as a table or as a page with plots."""

import argparse
import ast
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from math import log10
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import (
    __version__,
    flash_attn,
    gemm,
    grouped_gemm,
    pack_weight,
    paged_attn,
    quantize,
    scaled_gemm,
    sparse_gemm,
    sparse_pack,
    weight_gemm,
)
from ..serve import load
from ..tuning import timing
from ..tuning.gemm import DTYPES
from .charts import even_ticks, short
from .terminal import device_of, fields, table, with_progress

OURS = "gpukern"
CHECKOUT = Path(__file__).resolve().parents[2]


@dataclass
class Case:
    """One call: ours, and PyTorch's own ways to the same result."""

    line: str  # of a plot
    size: int
    name: str
    # of one call: FLOPs, or the bytes of keys and values where reading them is the bound
    work: float
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


# ---- cases ---------------------------------------------------------------------------------------


def _sdpa_on(backend: SDPBackend, *args: Tensor, **options: bool) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(*args, **options)


def _sdpas(device: torch.device) -> dict[str, Callable]:
    """scaled_dot_product_attention by backend: which one PyTorch takes by itself need not be its
    fastest."""
    if device.type != "cuda":
        return {"SDPA": F.scaled_dot_product_attention}
    backends = {
        "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
        "SDPA flash": SDPBackend.FLASH_ATTENTION,
        "SDPA efficient": SDPBackend.EFFICIENT_ATTENTION,
        "SDPA math": SDPBackend.MATH,
    }
    return {name: partial(_sdpa_on, backend) for name, backend in backends.items()}


def _randn(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def _cubed(
    op: str, size: int, ours: Callable[[], Tensor], theirs: dict[str, Callable[[], Tensor]]
) -> list[Case]:
    return [Case(op, size, f"{op} {size} cubed", 2.0 * size**3, "GFLOP/s", ours, theirs)]


def _gemm(size: int, dtype: torch.dtype, device: torch.device) -> list[Case]:
    a, b = (_randn(size, size, dtype=dtype, device=device) for _ in range(2))
    return _cubed("gemm", size, lambda: gemm(a, b), {"matmul": lambda: a @ b})


def _flash(size: int, dtype: torch.dtype, device: torch.device) -> list[Case]:
    q, k, v = (_randn(1, 8, size, 64, dtype=dtype, device=device) for _ in range(3))
    return [
        Case(
            "flash_attn, causal" if causal else "flash_attn",
            size,
            f"flash_attn 8 heads, {size} tokens, d64{', causal' if causal else ''}",
            4.0 * 8 * size**2 * 64 / (2 if causal else 1),
            "GFLOP/s",
            partial(flash_attn, q, k, v, is_causal=causal),
            {way: partial(sdpa, q, k, v, is_causal=causal) for way, sdpa in _sdpas(device).items()},
        )
        for causal in (False, True)
    ]


def _paged(size: int, dtype: torch.dtype, device: torch.device) -> list[Case]:
    shapes = (size, 32, 128), (size * 128, 16, 8, 128), (size * 128, 16, 8, 128)
    q, k, v = (_randn(*shape, dtype=dtype, device=device) for shape in shapes)
    pages = torch.randperm(size * 128, device=device).int().view(size, 128)
    lens = torch.full((size,), 2048, dtype=torch.int32, device=device)

    def gather(sdpa: Callable) -> Tensor:
        keys, values = (x[pages.long()].flatten(1, 2).transpose(1, 2) for x in (k, v))
        return sdpa(q[:, :, None], keys, values, enable_gqa=True)[:, :, 0]

    name = f"paged_attn {size} x 2048 keys, 32/8 heads, d128"
    theirs = {f"gather, {way}": partial(gather, sdpa) for way, sdpa in _sdpas(device).items()}
    read = 2.0 * size * 2048 * 8 * 128 * k.element_size()
    return [
        Case(
            "paged_attn", size, name, read, "GB/s", lambda: paged_attn(q, k, v, pages, lens), theirs
        )
    ]


def _scaled(size: int, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Codes with a scale a row of each operand; beside PyTorch's own and the product in bfloat16
    that they stand for."""
    x, w = (_randn(size, size, dtype=dtype, device=device) for _ in range(2))
    (a, scale_a), (b, scale_b) = (quantize(y, torch.float8_e4m3fn, "row") for y in (x, w))
    b, scale_b = b.mT, scale_b.mT
    theirs = {
        "_scaled_mm": lambda: torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=dtype),
        "matmul": lambda: x @ w.mT,
    }
    return _cubed("scaled_gemm", size, lambda: scaled_gemm(a, b, scale_a, scale_b), theirs)


def _weight(size: int, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """A weight of 4 bits, beside the same in the activations' dtype."""
    n = 4096
    a, codes = (
        _randn(size, n, dtype=dtype, device=device),
        torch.randint(-8, 8, (n, n), device=device, dtype=torch.int8),
    )
    packed, scale, w = (
        pack_weight(codes, "int4"),
        torch.ones(n // 128, n, dtype=dtype, device=device),  # as the layers have
        codes.to(dtype),
    )
    name = f"weight_gemm {size} tokens, {n} x {n}"
    flops = 2.0 * size * n * n
    ours = partial(weight_gemm, a, packed, scale, n, "int4")
    return [Case("weight_gemm", size, name, flops, "GFLOP/s", ours, {"matmul": lambda: a @ w.mT})]


def _grouped(size: int, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Eight experts with an eighth of the tokens each."""
    n, experts = 1024, 8
    a, w = (
        _randn(size, n, dtype=dtype, device=device),
        _randn(experts, n, n, dtype=dtype, device=device).mT,
    )
    ends = [size * (i + 1) // experts for i in range(experts)]
    offs = torch.tensor(ends, dtype=torch.int32, device=device)

    def loop() -> Tensor:
        return torch.cat(
            [a[lo:hi] @ w[i] for i, (lo, hi) in enumerate(zip([0, *ends], ends, strict=False))]
        )

    theirs = {"matmul in a loop": loop, "_grouped_mm": lambda: torch._grouped_mm(a, w, offs)}
    name, flops = f"grouped_gemm {size} tokens, {experts} experts, {n} x {n}", 2.0 * size * n * n
    return [
        Case("grouped_gemm", size, name, flops, "GFLOP/s", lambda: grouped_gemm(a, w, offs), theirs)
    ]


def _sparse(size: int, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Two of every four are zero; FLOPs are those of the dense product."""
    a, w = (_randn(size, size, dtype=dtype, device=device) for _ in range(2))
    w = w * torch.tensor([1, 0, 1, 0], dtype=dtype, device=device).repeat(size // 4)
    values, meta = sparse_pack(w)
    return _cubed(
        "sparse_gemm", size, lambda: sparse_gemm(a, values, meta), {"matmul": lambda: a @ w.mT}
    )


def _quantize(size: int, dtype: torch.dtype, device: torch.device) -> list[Case]:
    x, columns = _randn(size, 4096, dtype=dtype, device=device), 4096

    def theirs() -> Tensor:
        scale = x.abs().amax(1, keepdim=True).float() / 448
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)

    name = f"quantize {size} x {columns}, a scale a row"
    moved = float(size * columns * (x.element_size() + 1))
    ours = partial(quantize, x, torch.float8_e4m3fn, "row")
    return [Case("quantize", size, name, moved, "GB/s", ours, {"PyTorch's ops": theirs})]


@dataclass(frozen=True)
class Bench:
    """Cases of an op by size. small: the size of a table; sizes: of a page, by device; axis: what a
    size is; dtypes: the default first."""

    cases: Callable[[int, torch.dtype, torch.device], list[Case]]
    small: int
    sizes: dict[str, tuple[int, ...]]
    axis: str
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16", "float64")


_SQUARE = {"cpu": (256, 512, 1024, 2048), "cuda": (512, 1024, 2048, 4096, 8192)}
_SHORT = ("bfloat16", "float16")
BENCHES = {
    "gemm": Bench(_gemm, 1024, _SQUARE, "M = N = K"),
    "flash_attn": Bench(_flash, 1024, _SQUARE, "tokens of a sequence"),
    "paged_attn": Bench(
        _paged, 4, {"cpu": (1, 4, 16), "cuda": (1, 4, 16, 64)}, "sequences of 2048 keys"
    ),
    "scaled_gemm": Bench(
        _scaled, 1024, {"cpu": (256, 512, 1024), "cuda": _SQUARE["cuda"]}, "M = N = K", _SHORT[:1]
    ),
    "weight_gemm": Bench(
        _weight, 16, {"cpu": (1, 4, 16), "cuda": (1, 4, 16, 64, 256)}, "tokens", _SHORT
    ),
    "grouped_gemm": Bench(
        _grouped,
        512,
        {"cpu": (64, 512), "cuda": (512, 2048, 8192)},
        "tokens",
        ("bfloat16", "float16", "float32"),
    ),
    "sparse_gemm": Bench(
        _sparse, 1024, {"cpu": (256, 1024), "cuda": _SQUARE["cuda"]}, "M = N = K", _SHORT
    ),
    "quantize": Bench(
        _quantize,
        1024,
        {"cpu": (64, 1024), "cuda": (1024, 8192)},
        "rows of 4096",
        ("bfloat16", "float16", "float32"),
    ),
}


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
    unit, across = points[0].unit, BENCHES[points[0].line.partition(",")[0]].axis
    ticks = even_ticks(1.02 * max(p.rate(way) for p in points for way in p.us))
    low, high = log10(sizes[0]), log10(sizes[-1])
    floor, right = HEIGHT - MARGIN, WIDTH - 24

    def at(size: int, rate: float) -> tuple[float, float]:
        along = (log10(size) - low) / (high - low) if high > low else 0.5
        return LEFT + 16 + along * (right - LEFT - 32), floor - rate / ticks[-1] * (
            HEIGHT - 2 * MARGIN
        )

    shapes = [f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}: {unit}</text>']
    for tick in ticks:
        _, y = at(sizes[0], tick)
        shapes.append(f'<line x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        shapes.append(
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(tick)}</text>'
        )
    for size in sizes:
        x, _ = at(size, 0)
        shapes.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{floor}" y2="{floor + 4}" stroke="#444"/>'
        )
        shapes.append(f'<text x="{x:.1f}" y="{floor + 16}" text-anchor="middle">{size}</text>')
    shapes.append(f'<path d="M{LEFT},{MARGIN - 10}V{floor}H{right}" fill="none" stroke="#444"/>')
    shapes.append(
        f'<text x="{(LEFT + right) / 2:.0f}" y="{floor + 30}" text-anchor="middle">{across}</text>'
    )
    middle = HEIGHT // 2
    shapes.append(
        f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 '
        f'{middle})">{unit}</text>'
    )
    for i, way in enumerate(ways):
        mine = sorted((p for p in points if way in p.us), key=lambda p: p.size)
        color, thick = COLORS[i % len(COLORS)], 3 if way == OURS else 1.5
        line = " ".join("{:.1f},{:.1f}".format(*at(p.size, p.rate(way))) for p in mine)
        shapes.append(
            f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="{thick}"/>'
        )
        for p in mine:
            x, y = at(p.size, p.rate(way))
            text = escape(f"{way}, {p.name}: {p.us[way]:,.1f} us, {p.rate(way):,.0f} {p.unit}")
            shapes.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" '
                f'fill="{color}"><title>{text}</title></circle>'
            )
        x = LEFT + i * (right - LEFT) // len(ways)
        shapes.append(f'<text x="{x}" y="{HEIGHT - 8}" fill="{color}">{escape(way)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'font-size="11" '
        'font-family="sans-serif">\n' + "\n".join(shapes) + "\n</svg>\n"
    )


def page(what: str, points: Sequence[Measured]) -> str:
    """One page without scripts or links: for each line of cases its plot and its table."""
    parts = []
    for line in dict.fromkeys(p.line for p in points):
        mine = [p for p in points if p.line == line]
        heads = "".join(f"<th>{escape(head)}</th>" for head in HEADS)
        rows = "".join(
            f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in p.row())}</tr>\n" for p in mine
        )
        parts.append(
            f"<h2>{escape(line)}</h2>\n{plot(line, mine)}<table>\n<tr>{heads}</tr>\n{rows}</table>\n"
        )
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>gpukern bench</title>\n'
        "<style>body{font-family:sans-serif;max-width:60em;margin:auto}td,th{padding:1px "
        "8px;text-align:right}"
        "td:first-child{text-align:left}</style>\n"
        f"<h1>gpukern beside PyTorch</h1>\n<p>{escape(what)}</p>\n" + "".join(parts) + "</html>\n"
    )


# ---- the command ---------------------------------------------------------------------------------


def _described(dtypes: Iterable[str], device: torch.device) -> str:
    where = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{torch.get_num_threads()} threads"
    )
    of = " and ".join(dict.fromkeys(dtypes))
    return f"{of} on {device}, {where}, medians; ratio is PyTorch's time over ours"


def _measured(work: Sequence[tuple[str, int, str]], device: torch.device) -> Iterator[Measured]:
    """Measures each op, size and dtype. Inputs are made for one case at a time, so that those of
    all sizes need not fit into memory together."""
    items = [f"{op} {size}" for op, size, _ in work]
    with torch.inference_mode():
        for (op, size, dtype), _ in zip(work, with_progress(items, "bench"), strict=True):
            for case in BENCHES[op].cases(size, DTYPES[dtype], device):
                yield measure(case, device)


def scripts() -> dict[str, Path]:
    """The repository's benchmarks by name; none where this is no checkout."""
    return {
        path.stem.removeprefix("bench_"): path
        for path in sorted((CHECKOUT / "benchmarks").glob("bench_*.py"))
    }


def _listed() -> int:
    """Each benchmark and what it measures; of the repository's the first sentence of the file."""
    lines = [(name, f"--small and --html: over {found.axis}") for name, found in BENCHES.items()]
    lines.append(("serve", "a server on loopback under many requests at once"))
    for path in scripts().values():
        text = " ".join(
            (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split()
        )
        lines.append((f"{path.parent.name}/{path.name}", text))
    print(fields(lines))
    return 0


def run(args: argparse.Namespace) -> int:
    files = scripts()
    if args.op is None and "--list" in args.rest:
        return _listed()
    if args.op == "serve":
        return load.main(args.rest, args.device, args.dtype)
    op = args.op or "gemm"
    if op not in BENCHES and op not in files:
        raise ValueError(
            f"op is '{op}'; expected one of {', '.join(dict.fromkeys((*BENCHES, *files, 'serve')))}"
        )
    own_table = args.small or args.html is not None or args.dtype is not None
    if op in files and not own_table:
        device_too = [] if args.device is None else ["--device", args.device]
        return subprocess.run([sys.executable, str(files[op]), *device_too, *args.rest]).returncode
    if args.rest:
        why = (
            "which --small, --html and --dtype are not of" if op in files else "which are not here"
        )
        print(
            f"bench: {args.rest[0]} is an option of the repository's benchmarks, {why}",
            file=sys.stderr,
        )
        return 2
    if op not in BENCHES:
        raise ValueError(
            f"{op} has no table of its own: --small, --html and --dtype are of {', '.join(BENCHES)}"
        )
    device = device_of(args.device or "cpu")
    ops = (
        [op]
        if args.html is None or args.op
        else [name for name, x in BENCHES.items() if args.dtype in (None, *x.dtypes)]
    )
    for name in ops:
        if args.dtype not in (None, *BENCHES[name].dtypes):
            raise ValueError(f"{name} is of {' or '.join(BENCHES[name].dtypes)}, got {args.dtype}")
    work = []
    for name in ops:
        found = BENCHES[name]
        sizes = (
            found.sizes[device.type] if args.html is not None and not args.small else (found.small,)
        )
        work += [(name, size, args.dtype or found.dtypes[0]) for size in sizes]
    if args.html is not None:
        args.html.parent.resolve(strict=True)  # before minutes of measuring
    points = list(_measured(work, device))
    said = _described((dtype for _, _, dtype in work), device)
    print(said)
    print(table([HEADS, *(p.row() for p in points)]))
    if args.html is not None:
        args.html.write_text(
            page(f"{said}. gpukern {__version__}, torch {torch.__version__}.", points)
        )
        print(f"wrote {args.html}")
    return 0


def add_arguments(commands: argparse._SubParsersAction) -> None:
    p = commands.add_parser(
        "bench",
        help="our time beside PyTorch's; in a checkout runs its benchmarks, with your options; "
        "--list names them, or the rows of one",
        epilog=f"serve has options of its own: {load.parser().format_usage()}",
    )
    p.set_defaults(takes_rest=True, run=run)
    p.add_argument(
        "op",
        nargs="?",
        help=f"{', '.join(BENCHES)}, serve, or X of the repository's benchmarks/bench_X.py; "
        f"default: gemm; with --html all of them",
    )
    p.add_argument("--small", action="store_true", help="one size, also in a checkout")
    p.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="sizes from small to large, as one page with plots and tables",
    )
    p.add_argument(
        "--dtype",
        choices=DTYPES,
        help="default: the op's first; the repository's benchmarks measure each dtype",
    )
    p.add_argument("--device", help="default: cpu")
