# SPDX-License-Identifier: BSD-3-Clause
"""Sphinx: a page for each function of tensors, made of the call that the tests have of it.

A page shows the function's signature, a good call with the shapes of its tensors and results, what
the call costs, and for attention which keys a query sees. Everything is asked of the library, so a
page cannot disagree with it. docs/operators.md lists the pages.
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
    """name -> arguments of a good call, from the tests. The plainest call that they have is shown."""
    sys.path.insert(0, str(HERE.parent / "tests"))
    import registry
    import registry_calls

    return registry_calls.calls() | {name: op.make() for name, op in registry.OPS.items()}


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


def dense(**rules) -> torch.Tensor:
    """Which of 12 keys each of 8 queries sees: with the identity as v, the result is the weights."""
    q, k = torch.zeros(1, 1, 8, 8), torch.zeros(1, 1, 12, 8)
    return gk.flash_attn(q, k, torch.eye(12)[None, None], **rules)[0, 0] > 0


def packed(**rules) -> torch.Tensor:
    """Which of 12 keys each of 8 queries sees, in sequences of 3 and 5 queries, 5 and 7 keys."""
    q, k, v = torch.zeros(8, 1, 8), torch.zeros(12, 1, 8), torch.eye(12)[:, None]
    ends = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 8], [0, 5, 12]))
    return gk.flash_attn_varlen(q, k, v, *ends, 5, 7, **rules)[:, 0] > 0


def paged(**rules) -> torch.Tensor:
    """Which of 12 keys in pages of 4 each of the last 8 tokens sees."""
    k, v = torch.zeros(3, 4, 1, 8), torch.eye(12).view(3, 4, 1, 12)
    table, length = (torch.tensor(x, dtype=torch.int32) for x in ([[0, 1, 2]], [12]))
    new = {"cu_seqlens_q": torch.tensor([0, 8], dtype=torch.int32), "max_seqlen_q": 8}
    return gk.paged_attn(torch.zeros(8, 1, 8), k, v, table, length, **new, **rules)[:, 0] > 0


# function -> (what is shown, which keys are seen under rules, the rules)
MASKS = {
    "flash_attn": (
        "8 queries down, 12 keys across.",
        dense,
        (
            {"is_causal": True},
            {"is_causal": True, "diagonal": 4},
            {"is_causal": True, "window_left": 3},
            {"window_left": 2, "window_right": 2},
        ),
    ),
    "flash_attn_varlen": (
        "Two sequences in one call: 3 and 5 queries down, 5 and 7 keys across.",
        packed,
        ({}, {"is_causal": True}, {"is_causal": True, "window_left": 2}),
    ),
    "paged_attn": (
        "8 new tokens down, the 12 of their sequence across.",
        paged,
        ({}, {"window_left": 3}, {"is_causal": False}),
    ),
}


def masks(name: str) -> str:
    """Pictures of rules, a row for each query and a column for each key."""
    words, seen, forms = MASKS[name]
    found = []
    for rules in forms:
        grid = seen(**rules)
        cells = [
            f'<rect x="{4 + 14 * j}" y="{22 + 14 * i}" width="14" height="14" stroke="#999" '
            f'fill="{"#88d27a" if grid[i, j] else "#fff"}"/>'
            for i in range(8)
            for j in range(12)
        ]
        title = ", ".join(f"{rule}={value}" for rule, value in rules.items()) or "by default"
        found.append(svg(260, 140, [f'<text x="4" y="14">{title}</text>', *cells]))
    return f"<h2>Which keys a query sees</h2><p>{words}</p>{' '.join(found)}"


def cost(name: str, call: dict, tensors: list[tuple[str, torch.Tensor]]) -> str:
    """What the call moves and computes; without an `explain`, the bytes of its tensors."""
    if name not in gk.EXPLAINED:
        moved = sum(x.numel() * x.element_size() for _, x in tensors)
        return f"{moved} bytes of tensors and results at this size."
    schema = getattr(torch.ops.gpukern, f"explain_{name}").default._schema
    needed = {a.name for a in schema.arguments if not a.has_default_value()}
    public = inspect.signature(getattr(gk, name)).parameters
    defaults = {n: public[n].default for n in needed if n in public}
    found = gk.explain(name, **defaults | call)
    return (
        f"{found['bytes']} bytes read and written once, {found['flops']} FLOPs: "
        f"{found['flops'] / found['bytes']:.2g} FLOPs a byte at this size. <code>gpukern explain "
        f"{name}</code> says it for yours."
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
    parts.append(f"<h2>Its cost</h2><p>{cost(name, call, tensors)}</p>")
    if name in MASKS:
        parts.append(masks(name))
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
