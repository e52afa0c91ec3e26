# SPDX-License-Identifier: BSD-3-Clause
"""Pictures of layouts: a cell for each element, mode 0 down, the other modes across. Kinds:

offsets   the offset of each element
owners    for a layout (thread, value) -> index in a tile: the thread and value of each element
banks     the bank of shared memory that holds an element's first byte
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from html import escape

from .banks import BANK_BYTES, BANKS
from .core import Drawn, Layout
from .swizzle import Swizzled, parse

KINDS = ("offsets", "owners", "banks")
MAX_CELLS = 16384  # about a megabyte of SVG
# Eight hues that colour-blind readers can tell apart too, light enough for black text.
_HUES = ("#9ecae9", "#ffbf79", "#88d27a", "#f2b6c6", "#d6b5e0", "#f2e28b", "#b2dfdb", "#d8c3a5")
_CELL_HEIGHT = 20


@dataclass(frozen=True)
class Picture:
    """Rows and columns of cells, (text, colour) each, and a title."""

    title: str
    rows: int
    columns: int
    cells: list[tuple[str, str]]  # in column-major order


@lru_cache(maxsize=64)
def _shade(i: int, of: int) -> str:
    """The colour of bank i of `of`: one hue for 4 banks (16 bytes), paler within them."""
    hue = _HUES[i * 8 // of % 8]
    fade = 0.12 * (i % 4)
    parts = [int(hue[at : at + 2], 16) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(p + (255 - p) * fade):02x}" for p in parts)


def picture(
    layout: Layout | Swizzled | str,
    kind: str = "offsets",
    shape: tuple[int, int] | None = None,
    elem_bytes: int = 2,
) -> Picture:
    """The cells of a picture of one of the kinds above.

    Args:
        shape: for owners: rows and columns of the tile.
        elem_bytes: for banks: bytes per element.

    Raises:
        ValueError: an unknown kind, a picture of more than MAX_CELLS cells, or a tile that is too
            small for the layout.
    """
    layout = parse(layout) if isinstance(layout, str) else layout
    if not isinstance(layout, (Layout, Swizzled)):
        raise TypeError(f"picture: {layout} is no layout")
    if kind not in KINDS:
        raise ValueError(f"picture: kind is '{kind}'; expected one of {', '.join(KINDS)}")
    if layout.size > MAX_CELLS:
        raise ValueError(
            f"picture: {layout} has {layout.size} elements; at most {MAX_CELLS} are drawn"
        )
    if kind == "owners":
        return _owners(layout, shape)
    inner = layout.layout if isinstance(layout, Swizzled) else layout
    first = inner.modes[0].size if inner.rank > 1 else 1
    offsets, title = layout.offsets, str(layout)
    if kind == "banks":
        banks = [o * elem_bytes // BANK_BYTES % BANKS for o in offsets]
        title += f", banks of {elem_bytes}-byte elements"
        return Picture(
            title, first, inner.size // first, [(str(b), _shade(b, BANKS)) for b in banks]
        )
    low, high = min(offsets), max(offsets)
    span = max(1, high - low + 1)
    return Picture(
        title,
        first,
        inner.size // first,
        [(str(o), _shade((o - low) * 32 // span, 32)) for o in offsets],
    )


def _owners(layout: Layout | Swizzled, shape: tuple[int, int] | None) -> Picture:
    if layout.rank != 2:
        raise ValueError(
            f"picture: owners are drawn of a layout (thread, value); {layout} has {layout.rank} "
            f"modes"
        )
    shape = (1, max(layout.offsets) + 1) if shape is None else shape
    if len(shape) != 2 or shape[0] * shape[1] <= max(layout.offsets):
        raise ValueError(
            f"picture: the tile is {shape}; index {max(layout.offsets)} of {layout} lies outside"
        )
    if shape[0] * shape[1] > MAX_CELLS:
        raise ValueError(
            f"picture: the tile has {shape[0] * shape[1]} elements; at most {MAX_CELLS} are drawn"
        )
    inner = layout.layout if isinstance(layout, Swizzled) else layout
    threads = inner.modes[0].size
    cells = [("", "#ffffff")] * (shape[0] * shape[1])
    shared = [0] * len(cells)
    for i, index in enumerate(layout.offsets):
        thread, value = i % threads, i // threads
        shared[index] += 1
        if shared[index] == 1:
            cells[index] = (f"T{thread} V{value}", _HUES[thread % 8])
    cells = [(f"{t} +{n - 1}" if n > 1 else t, color) for (t, color), n in zip(cells, shared)]
    return Picture(f"{layout} in a tile of {shape[0]} x {shape[1]}", *shape, cells)


def svg(layout: Layout | Swizzled | str, **options) -> str:
    """The picture as SVG text; options as `picture`. One path draws all cells of a colour, and one
    text the numbers of a row, so that a picture of 2048 cells has some fifty lines."""
    p = picture(layout, **options)
    width = max(22, 7 * max(len(text) for text, _ in p.cells) + 6)
    top, left = 2 * _CELL_HEIGHT + 4, 30
    wide = max(left + p.columns * width + 4, 7 * len(p.title) + 8)
    tall = top + p.rows * _CELL_HEIGHT + 4
    xs = [left + j * width for j in range(p.columns)]
    ys = [top + i * _CELL_HEIGHT for i in range(p.rows)]
    middles = [x + width // 2 for x in xs]
    cells: dict[str, str] = {}  # colour -> path
    for (x, y), (_, color) in zip(((x, y) for x in xs for y in ys), p.cells):
        cells[color] = cells.get(color, "") + f"M{x} {y}h{width}v{_CELL_HEIGHT}h-{width}z"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {tall}" width="{wide}" '
        f'height="{tall}" font-family="monospace" font-size="11" text-anchor="middle">',
        f"<title>{escape(p.title)}</title>",
        f'<rect width="{wide}" height="{tall}" fill="#ffffff"/>',
        f'<text x="4" y="14" text-anchor="start">{escape(p.title)}</text>',
        '<g fill="#666666">',
        _row_of_texts(middles, top - 6, map(str, range(p.columns))),
        *(_row_of_texts([left // 2], y + 14, [str(i)]) for i, y in enumerate(ys)),
        "</g>",
        '<g stroke="#555555" stroke-width="0.5">',
        *(f'<path fill="{color}" d="{path}"/>' for color, path in cells.items()),
        "</g>",
    ]
    for i, y in enumerate(ys):
        out.append(_row_of_texts(middles, y + 14, (text for text, _ in p.cells[i :: p.rows])))
    return "\n".join([*out, "</svg>"]) + "\n"


def _row_of_texts(xs: list[int], y: int, texts: Iterable[str]) -> str:
    spans = (f'<tspan x="{x}">{text}</tspan>' for x, text in zip(xs, texts) if text)
    return f'<text y="{y}">{"".join(spans)}</text>'


def png(layout: Layout | Swizzled | str, **options) -> bytes:
    """The picture as PNG, by matplotlib; options as `picture`."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError as error:
        raise RuntimeError(
            "png: matplotlib is not installed; pip install matplotlib, or take .svg()"
        ) from error
    p = picture(layout, **options)
    width = max(1.0, 0.3 * max(len(text) for text, _ in p.cells))
    figure = Figure(figsize=(0.25 * width * p.columns + 0.3, 0.25 * p.rows + 0.5), dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.01, 0.01, 0.98, 0.85))
    for at, (text, color) in enumerate(p.cells):
        x, y = at // p.rows * width, at % p.rows
        axes.add_patch(
            Rectangle((x, y), width, 1, facecolor=color, edgecolor="#555555", linewidth=0.4)
        )
        axes.text(x + width / 2, y + 0.5, text, ha="center", va="center", fontsize=6)
    axes.set_xlim(0, width * p.columns)
    axes.set_ylim(p.rows, 0)
    axes.axis("off")
    axes.set_title(p.title, fontsize=7)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


Drawn.svg, Drawn.png = svg, png
