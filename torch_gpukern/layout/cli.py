# SPDX-License-Identifier: BSD-3-Clause
"""python -m torch_gpukern layout: explains a layout, counts its bank conflicts and draws it."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from ..cli.terminal import whole
from . import atoms
from .banks import ACCESSES, accesses
from .core import Layout, as_layout
from .divide import logical_divide, overhang
from .pictures import MAX_CELLS, Picture, picture
from .swizzle import Swizzle, Swizzled, parse, parse_swizzle
from .tiling import make_layout_tv

EPILOG = """examples:
  python -m torch_gpukern layout "(4,8):(8,1)"
  python -m torch_gpukern layout "(8,64):(64,1)" --swizzle 3,3,3 --access 16 --kind banks --svg out.svg
  python -m torch_gpukern layout --thr "(4,8):(8,1)" --val "(2,2):(2,1)" --svg out.svg
  python -m torch_gpukern layout --atom mma.c --svg out.svg
"""
# name -> (layout (thread, value) -> index, rows and columns)
ATOMS = {
    "mma.a": lambda: (atoms.mma_sync(16, 16).a, (16, 16)),
    "mma.b": lambda: (atoms.mma_sync(16, 16).b, (8, 16)),
    "mma.c": lambda: (atoms.mma_sync(16, 16).c, (16, 8)),
    "wgmma.c": lambda: (atoms.wgmma(16).c, (64, 16)),
    "ldmatrix": lambda: (atoms.ldmatrix(1).dst, (8, 8)),
    "ldmatrix.trans": lambda: (atoms.ldmatrix(1, True).dst, (8, 8)),
}


MOST_ELEMENTS = 1 << 20
MOST_ROWS = 64


def table(p: Picture, columns: int) -> str:
    """The cells of a picture as text of at most `columns` characters per line: mode 0 down, the
    other modes across."""
    cells = [text for text, _ in p.cells]
    width = max(map(len, cells))
    side = len(str(min(p.rows, MOST_ROWS) - 1))
    fit = max(1, min(p.columns, (columns - side - 3) // (width + 1)))
    head = " " * (side + 3) + " ".join(str(j).rjust(width)[-width:] for j in range(fit))
    lines = [head.rstrip(), " " * (side + 1) + "+" + "-" * (fit * (width + 1))]
    for i in range(min(p.rows, MOST_ROWS)):
        row = (cells[i + j * p.rows].rjust(width) for j in range(fit))
        lines.append(f"{str(i).rjust(side)} | {' '.join(row)}")
    if fit < p.columns or p.rows > MOST_ROWS:
        lines.append(
            f"({min(p.rows, MOST_ROWS)} x {fit} of {p.rows} x {p.columns}; --svg draws all of it)"
        )
    return "\n".join(lines)


def add_arguments(commands: argparse._SubParsersAction) -> None:
    p = commands.add_parser(
        "layout",
        help="what a layout does, its bank conflicts, its picture",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.set_defaults(run=run)
    p.add_argument(
        "layout",
        nargs="?",
        help='as CuTe writes it: "(4,8):(8,1)"; or "Sw<3,3,3> o 0 o (8,64):(64,1)"',
    )
    p.add_argument("--thr", help="a layout of threads; with --val draws who holds which element")
    p.add_argument("--val", help="a layout of each thread's values")
    p.add_argument(
        "--atom",
        choices=ATOMS,
        help="a fragment of an instruction, m16n8k16 and 8 x 8 matrices of 16 bits",
    )
    p.add_argument(
        "--swizzle", metavar="B,M,S", help="an xor after the layout, on offsets in elements"
    )
    p.add_argument(
        "--divide", metavar="TILER", help='a layout, a size, or one for each mode: "4;(2,2):(1,4)"'
    )
    p.add_argument(
        "--elem-bytes",
        type=whole(1, 256),
        default=2,
        metavar="N",
        help="bytes of an element (default 2)",
    )
    p.add_argument(
        "--access",
        type=int,
        choices=ACCESSES,
        metavar="BYTES",
        help="bank conflicts and sectors of accesses of 1 to 16 bytes",
    )
    p.add_argument(
        "--kind",
        choices=("offsets", "banks"),
        default="offsets",
        help="what the picture's colours say",
    )
    p.add_argument("--svg", type=Path, metavar="FILE")
    p.add_argument("--png", type=Path, metavar="FILE", help="needs matplotlib")


def _asked(args: argparse.Namespace) -> tuple[Layout | Swizzled, dict]:
    """The layout that the arguments ask for, and the options of its picture."""
    if sum((args.layout is not None, args.atom is not None, args.thr is not None)) != 1:
        raise ValueError("give a layout, or --atom, or --thr and --val")
    if (args.thr is None) != (args.val is None):
        raise ValueError("--thr and --val belong together")
    if args.atom or args.thr:
        tv, shape = ATOMS[args.atom]() if args.atom else make_layout_tv(args.thr, args.val)
        if args.swizzle or args.divide or args.access:
            raise ValueError(
                "--swizzle, --divide and --access are of a layout, not of threads and values"
            )
        return tv, {"kind": "owners", "shape": shape if len(shape) == 2 else (1, shape[0])}
    found = parse(args.layout)
    if isinstance(found, Swizzle):
        raise ValueError(f"{found} is only a swizzle; write {found} o 0 o shape:stride")
    if found.size > MOST_ELEMENTS:
        raise ValueError(
            f"{found} has {found.size} elements; at most {MOST_ELEMENTS} are looked at"
        )
    if args.divide:
        if isinstance(found, Swizzled):
            raise ValueError("--divide takes a plain layout; add --swizzle to swizzle the result")
        tilers = [as_layout(int(t) if t.strip().isdigit() else t) for t in args.divide.split(";")]
        tiler = tilers[0] if len(tilers) == 1 else tuple(tilers)
        over = overhang(found, tiler)
        found = logical_divide(found, tiler)
        print(
            f"divided, {over} elements past the end" + (": a predicate is needed" if over else "")
        )
    if args.swizzle:
        if isinstance(found, Swizzled):
            raise ValueError("--swizzle: the layout has one already")
        found = Swizzled(parse_swizzle(args.swizzle), found)
    return found, {"kind": args.kind, "elem_bytes": args.elem_bytes}


def run(args: argparse.Namespace) -> int:
    layout, options = _asked(args)
    print(layout.explain())
    if not (args.access or args.svg or args.png) and layout.size <= MAX_CELLS:
        print(table(picture(layout, **options), shutil.get_terminal_size((120, 24)).columns))
    if args.access:
        print(f"accesses of {args.access} bytes, elements of {args.elem_bytes}:")
        for access in accesses(layout, args.elem_bytes, args.access):
            print(f"  {access}")
    if args.svg:
        args.svg.write_text(layout.svg(**options))
    if args.png:
        args.png.write_bytes(layout.png(**options))
    return 0
