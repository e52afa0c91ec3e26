# SPDX-License-Identifier: BSD-3-Clause
"""The README's figures agree with the stored results, and docs/operators.md names the arguments
that have a gradient.
"""

import re
from pathlib import Path
from statistics import geometric_mean

import figures
import pytest
import torch
from conftest import torch_gpukern
from figures import differ, tables
from registry_calls import calls

from torch_gpukern import results

reported = figures.reported
ROOT = Path(__file__).resolve().parents[2]
H100, H200, EPYC = "nvidia-h100-80gb-hbm3", "nvidia-h200", "amd-epyc-2-threads-avx512bf16"


def table():
    """op -> the cell of its gradients"""
    text = (ROOT / "docs" / "operators.md").read_text()
    rows = re.search(r"\| op \| does \| gradients \|\n\|[-|]+\n((?:\|.*\n)+)", text).group(1)
    cells = [row.strip("|\n").split(" | ") for row in rows.splitlines()]
    return {name: row[-1] for row in cells for name in re.findall(r"`(\w+)`", row[0])}


def has_gradient(op, call, name):
    leaf = call[name].detach().clone().requires_grad_()
    try:
        made = getattr(torch_gpukern, op)(**call | {name: leaf})
        made = made if isinstance(made, tuple) else (made,)
        if not any(x.is_floating_point() for x in made):
            return False  # nobody expects a gradient of integers
        results = [x for x in made if x.requires_grad]
        assert results, f"{op} loses the gradient of {name} in silence"
        sum(x.float().sum() for x in results).backward()
    except (NotImplementedError, ValueError) as error:
        assert re.search("gradient|backward", str(error)), error
        return False
    return leaf.grad is not None


CALLS = calls()


def test_every_op_has_its_row():
    functions = {n for n in torch_gpukern.__all__ if n.islower()} - {
        "batch_invariant",
        "check_errors",
        "explain",
    }
    assert set(table()) == set(CALLS) == functions


@pytest.mark.parametrize("op", CALLS)
def test_gradients(op):
    call, cell = CALLS[op], table()[op]
    numbers = [
        n
        for n, x in call.items()
        if isinstance(x, torch.Tensor) and x.is_floating_point() and x.itemsize > 1
    ]
    found = {name for name in numbers if has_gradient(op, call, name)}
    assert found == {name for name in numbers if re.search(rf"\b{name}\b", cell)}
    assert bool(found) != cell.startswith("none")


def ratio(file, op, keep=lambda row: True):
    """The geometric mean of the ratios of an op's cases on a device, as a page prints it, and the
    date of the run."""
    bench = results.load(ROOT / "benchmarks" / "results" / f"{file}.csv")["benches"][op]
    rows = [row for row in bench["rows"] if row["peers"] and keep(row)]
    assert rows
    return f"{geometric_mean(map(results.ratio_of, rows)):.2f}", bench["date"]


def attention(direction, head_dim):
    """Sequences of 1k to 16k on the H200."""

    def keep(row):
        return row["label"].startswith(f"d{head_dim} ") and not row["label"].endswith(" S512")

    return ratio(H200, "flash_attn", lambda row: row["group"].startswith(direction) and keep(row))


def of_bf16(recipe):
    """Tokens a second of a recipe over those of bfloat16, which runs first and again at the end;
    for each number of requests."""
    bench = results.load(ROOT / "benchmarks" / "results" / f"{H200}.csv")["benches"]["recipes"]
    speed = {fact["label"]: fact["value"] for fact in bench["facts"]}
    for requests in ("1 requests", "16 requests", "64 requests"):
        base = (speed[f"bfloat16, {requests}"] + speed[f"bfloat16 again, {requests}"]) / 2
        yield f"{speed[f'{recipe}, {requests}'] / base:.2f}", bench["date"]


def of_group(*names):
    return lambda row: row["group"] in names


def of_sdpa(step):
    return lambda row: row["label"].startswith(step) and "sdpa" in row["peers"]


def of_cpu(start):
    return lambda row: row["group"].startswith(start) and row["dtype"] == "bf16"


FIGURES = {
    "attention forward": [attention("forward", head_dim) for head_dim in (64, 128, 256)],
    "attention backward": [attention("backward", head_dim) for head_dim in (64, 128, 256)],
    "attention with a mask": [ratio(H200, "attn_masks", of_group(name)) for name in ("forward", "backward")],
    "FP8 attention": [ratio(H200, "flash_attn_fp8", of_group(f"{mask} d128, fast")) for mask in ("full", "causal")],
    "products": [ratio(H200, "gemm", of_group("square bf16")), ratio(H200, "gemm", of_group("tall bf16")),
                 ratio(H100, "gemm_random_80808")],
    "decoding over": [ratio(H200, "paged_attn", of_group("decode")), ratio(H100, "paged_attn")],
    "six models": [ratio(H100, "transformers", of_sdpa(step)) for step in ("prefill", "training")],
    "decoding with 4-bit": list(of_bf16("w4")),
    "mixtures": [ratio(H200, "moe", of_group(name)) for name in ("forward", "forward and backward")],
    "two CPU cores": [
        ratio(EPYC, "flash_attn", of_cpu("forward")),
        ratio(EPYC, "flash_attn", of_cpu("backward")),
        ratio(EPYC, "gemm", lambda row: row["dtype"] == "bf16" and "call" not in row["group"]),
    ],
}  # fmt: skip


@pytest.mark.figures
def test_the_figures_are_those_of_the_results():
    """Each figure stands with the date of its run."""
    (rows,) = tables("README.md", "measured, bf16")
    for row, (name, found) in zip(rows, FIGURES.items(), strict=True):
        case, said, _, where = row
        assert case.startswith(name), case.place
        want = [figure for figure, _ in found]
        if re.findall(r"\d\.\d\d", said) != want:
            differ(said.place, said, ", ".join(want))
        dates = {date for _, date in found}
        if set(re.findall(r"2026-\d\d-\d\d", where)) != dates:
            differ(where.place, where, ", ".join(sorted(dates)))
