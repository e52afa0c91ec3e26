# SPDX-License-Identifier: BSD-3-Clause
"""Sphinx: a page for each op, made of the call that the tests have of it.

A page shows the op's signature, a good call with the shapes of its tensors and results, what the call
costs by `explain`, and for attention which keys a query sees. Everything is asked of the library.
docs/operators.md lists the pages.
"""

import inspect
import sys
from html import escape
from pathlib import Path

import torch

import torch_gpukern as gk

HERE = Path(__file__).resolve().parent
MARK = "<!-- pages of ops -->"


def calls() -> dict[str, dict]:
    """name -> arguments of a good call, from the registry of the tests."""
    sys.path.insert(0, str(HERE.parent / "tests"))
    import registry
    import registry_quantised as quantised

    found = {name: op.make() for name, op in registry.OPS.items()}
    found |= {"scaled_gemm": quantised.codes(), "weight_gemm": quantised.packed_weight()}
    found |= {"grouped_gemm": quantised.experts(), "sparse_gemm": quantised.sparse()}
    return found


def named(call: dict, results) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a call and its results."""
    given = [(name, x) for name, x in call.items() if isinstance(x, torch.Tensor)]
    results = results if isinstance(results, tuple) else (results,)
    results = tuple(x for x in results if isinstance(x, torch.Tensor))  # an op that writes has none
    return given + [
        (f"result {i}" if len(results) > 1 else "result", x) for i, x in enumerate(results)
    ]


def boxes(tensors: list[tuple[str, torch.Tensor]]) -> str:
    """A box for each tensor, as wide and tall as its last two dimensions."""
    parts, left = [], 4
    for name, x in tensors:
        rows, columns = ([1, 1, *x.shape])[-2:]
        wide, tall = (min(150, 6 * n + 10) for n in (columns, rows))
        text = f"[{', '.join(map(str, x.shape))}]"
        fill = "#ffbf79" if name.startswith("result") else "#9ecae9"
        parts.append(
            f'<rect x="{left}" y="20" width="{wide}" height="{tall}" fill="{fill}" stroke="#555"/>'
            f'<text x="{left}" y="14">{escape(name)}</text><text x="{left}" y="{tall + 36}">{text}</text>'
        )
        left += max(wide, 7 * max(len(name), len(text))) + 16
    tall = max(min(150, 6 * [1, 1, *x.shape][-2] + 10) for _, x in tensors) + 44
    return svg(left, tall, parts)


def svg(wide: int, tall: int, parts: list[str]) -> str:
    return (
        f'<svg viewBox="0 0 {wide} {tall}" width="{wide}" height="{tall}" style="max-width:100%" '
        f'font-family="monospace" font-size="11">'
        f'<rect width="{wide}" height="{tall}" fill="#fff"/>{"".join(parts)}</svg>'
    )


def seen(seq_q: int, seq_k: int, **rules) -> torch.Tensor:
    """Which keys each query sees: with the identity as v, the result is the weights."""
    q, k = torch.zeros(1, 1, seq_q, 8), torch.zeros(1, 1, seq_k, 8)
    return gk.flash_attn(q, k, torch.eye(seq_k)[None, None], **rules)[0, 0] > 0


def masks() -> str:
    """Pictures of rules, a row for each query and a column for each key."""
    forms = (
        {"is_causal": True},
        {"is_causal": True, "diagonal": 4},
        {"is_causal": True, "window_left": 3},
        {"window_left": 2, "window_right": 2},
    )
    found = []
    for rules in forms:
        grid = seen(8, 12, **rules)
        cells = [
            f'<rect x="{4 + 14 * j}" y="{22 + 14 * i}" width="14" height="14" stroke="#999" '
            f'fill="{"#88d27a" if grid[i, j] else "#fff"}"/>'
            for i in range(8)
            for j in range(12)
        ]
        title = ", ".join(f"{name}={value}" for name, value in rules.items())
        found.append(svg(260, 140, [f'<text x="4" y="14">{title}</text>', *cells]))
    return "<h2>Which keys a query sees</h2><p>8 queries down, 12 keys across.</p>" + " ".join(
        found
    )


def body(name: str, call: dict) -> str:
    function = getattr(gk, name)
    tensors = named(call, function(**call))
    rows = "".join(
        f"<tr><td><code>{escape(n)}</code></td><td>[{', '.join(map(str, x.shape))}]</td>"
        f"<td>{str(x.dtype).removeprefix('torch.')}</td></tr>"
        for n, x in tensors
    )
    other = {n: x for n, x in call.items() if not isinstance(x, torch.Tensor)}
    parts = [
        f"<h1>{name}</h1>",
        f"<p>{escape(inspect.getdoc(function).split(chr(10) * 2)[0])}</p>",
        f"<pre style='white-space: pre-wrap'>{escape(f'torch_gpukern.{name}{inspect.signature(function)}')}</pre>",
        f'<p><a href="../python.html#torch_gpukern.{name}">All arguments</a></p>',
        "<h2>A call</h2>",
        boxes(tensors),
        f"<table class='docutils'><tr><th>tensor</th><th>shape</th><th>dtype</th></tr>{rows}</table>",
    ]
    if other:
        said = ", ".join(f"{n}={x}" for n, x in other.items())
        parts.append(f"<p>and <code>{escape(said)}</code></p>")
    if name in gk.EXPLAINED:
        cost = gk.explain(name, **call)
        parts.append(
            f"<h2>Its cost</h2><p>{cost['bytes']} bytes read and written once, {cost['flops']} FLOPs: "
            f"{cost['flops'] / cost['bytes']:.2g} FLOPs a byte at this size. <code>gpukern explain "
            f"{name}</code> says it for yours.</p>"
        )
    if name == "flash_attn":
        parts.append(masks())
    return "\n".join(parts)


def setup(app):
    found = calls()

    def pages(_app):
        for name, call in found.items():
            yield f"ops/{name}", {"title": name, "body": body(name, call)}, "page.html"

    def links(_app, page, text):
        if page == "operators":
            listed = ", ".join(f'<a href="ops/{name}.html">{name}</a>' for name in sorted(found))
            text[0] = text[0].replace(MARK, listed)

    app.connect("html-collect-pages", pages)
    app.connect("source-read", links)
    return {"parallel_read_safe": True, "version": "1"}
