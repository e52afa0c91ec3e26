# SPDX-License-Identifier: BSD-3-Clause
"""Tables of measured figures in docs/quantise.md and docs/distributed.md, and pictures, agree with
the stored results, as README's and results.md's do (test_readme.py, test_results.py).
"""

import csv
import re
from pathlib import Path

import pytest

from torch_gpukern import results

ROOT = Path(__file__).resolve().parents[2]
H100, H200, TWO_H200 = "nvidia-h100-80gb-hbm3", "nvidia-h200", "2-x-nvidia-h200"
REQUESTS = ("1 requests", "16 requests", "64 requests")


def bench_of(file, bench):
    return results.load(ROOT / "benchmarks" / "results" / f"{file}.csv")["benches"][bench]


def tables(page, *start):
    """The rows of each table whose head begins with these cells, as lists of cells without marks
    of bold type."""
    head = r" *\| *".join(re.escape(cell) for cell in ("", *start)).removeprefix(" *")
    text = (ROOT / "docs" / page).read_text()
    found = re.findall(rf"^{head}.*\n\|[-| ]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert found, start
    return [
        [
            [
                cell.strip(" *")
                for cell in line.strip().removeprefix("|").removesuffix("|").split("|")
            ]
            for line in rows.splitlines()
        ]
        for rows in found
    ]


def recipe_rows(columns):
    """The rows of the table of recipes that has so many columns."""
    found = tables("quantise.md", "recipe", "1 request", "16", "64")
    (rows,) = [rows for rows in found if len(rows[0]) == columns]
    return rows


def recipes(file):
    """(tokens a second by "recipe, n requests", ms a step likewise, date)."""
    bench = bench_of(file, "recipes")
    speed = {fact["label"]: fact["value"] for fact in bench["facts"]}
    ms = {fact["label"]: fact["note"].split()[0] for fact in bench["facts"]}
    return speed, ms, bench["date"]


def test_recipes_of_the_h200():
    speed, ms, date = recipes(H200)
    rows = recipe_rows(7)
    base = {n: (speed[f"bfloat16, {n}"] + speed[f"bfloat16 again, {n}"]) / 2 for n in REQUESTS}
    assert {row[0] for row in rows} == {
        label.split(",")[0] for label in speed if "again" not in label
    }
    for name, *cells, milliseconds, gigabytes, share in rows:
        for cell, n in zip(cells, REQUESTS):
            tokens = base[n] if name == "bfloat16" else speed[f"{name}, {n}"]
            said = re.match(r"([\d.]+)(?: \(([\d.]+)\))?$", cell)
            assert float(said[1]) == pytest.approx(tokens, rel=6e-3), (name, n)
            assert name == "bfloat16" or said[2] == f"{tokens / base[n]:.2f}", (name, n)
        if name != "bfloat16":
            assert milliseconds == ms[f"{name}, 1 requests"]
        read = bench_of(H200, "recipes")["peaks"]["read"]
        assert float(share) == pytest.approx(
            float(gigabytes) / float(milliseconds) * 1e3 / read, abs=0.011
        )
    assert f"One H200, torch 2.11, {date}." in (ROOT / "docs" / "quantise.md").read_text()


def test_recipes_of_the_h100():
    speed, _, date = recipes(H100)
    rows = recipe_rows(4)
    for name, *cells in rows:
        for cell, n in zip(cells, REQUESTS):
            tokens, ratio = re.match(r"(\d+)(?: \(([\d.]+)\))?$", cell).groups()
            assert float(tokens) == pytest.approx(speed[f"{name}, {n}"], abs=0.51), (name, n)
            if ratio:
                assert ratio == f"{speed[f'{name}, {n}'] / speed[f'bfloat16, {n}']:.2f}", (name, n)
    assert f"One H100 80GB HBM3, torch 2.11, {date}." in (ROOT / "docs" / "quantise.md").read_text()


def test_experts_of_mixtral():
    text = " ".join((ROOT / "docs" / "quantise.md").read_text().split())
    for file, form in ((H200, "{} to {} times"), (H100, "H200, {} to {} on an H100")):
        ratios = [
            results.ratio_of(row)
            for row in bench_of(file, "moe")["rows"]
            if row["group"] == "forward" and row["label"].startswith("Mixtral")
        ]
        assert form.format(f"{min(ratios):.2f}", f"{max(ratios):.2f}") in text, ratios


# ---- two GPUs ------------------------------------------------------------------------------------


def of_two(group, label):
    """us by name of a case on two H200, ours as "ours"."""
    (row,) = [
        row
        for row in bench_of(TWO_H200, "distributed")["rows"]
        if (row["group"], row["label"]) == (group, label)
    ]
    calls = row["peers"] | row["beside"]
    return {"ours": row["us"]} | {name: call["us"] for name, call in calls.items()}


def same(cell, us, unit=1e3):
    """The cell shows this time, with as many digits as it has."""
    digits = len(cell.partition(".")[2])
    return abs(float(cell) - us / unit) <= 0.501 * 10**-digits


def test_attention_over_two_gpus():
    (rows,) = tables("distributed.md", "tokens a rank", "", "one GPU")
    for tokens, direction, one, ideal, gather, ring, ulysses, cudnn, flash in rows:
        group = "cp forward" if direction == "forward" else "cp forward+backward"
        us = of_two(group, f"{int(tokens.replace(',', ''))} tokens a rank")
        assert same(gather, us["ours"]), (tokens, direction)
        best = min(time for name, time in us.items() if name.startswith("torch CP cuDNN"))
        other = min(time for name, time in us.items() if name.startswith("torch CP flash"))
        assert same(cudnn, best) and same(flash, other), (tokens, direction)
        assert same(one, us["one GPU"]) and same(ideal, us["one GPU"] / 2)
        assert same(ring, us["ring"]) and same(ulysses, us["ulysses"])


def test_modes_over_two_gpus():
    """Forward, then forward and backward. From 8,192 tokens on with 8 key heads the times are those
    of the first table."""
    (rows,) = tables("distributed.md", "tokens a rank, key heads", "all_gather")
    assert len(rows) == 7
    for shape, *cells in rows:
        tokens, heads = (int(number.replace(",", "")) for number in shape.split(", "))
        for i, direction in enumerate(("forward", "forward+backward")):
            label = f"{tokens} tokens a rank"
            if heads == 8 and tokens >= 8192:
                us = of_two(f"cp {direction}", label)
            else:
                us = of_two(f"cp modes, {direction}", f"{label}, 32 heads over {heads}")
            us["ring" if "all_gather" in us else "all_gather"] = us["ours"]
            for cell, mode in zip(cells, ("all_gather", "ring", "ulysses")):
                said = cell.replace("*", "").split(", ")[i]
                assert same(said, us[mode]), (shape, direction, mode)


def test_sentences_about_two_gpus():
    text = " ".join((ROOT / "docs" / "distributed.md").read_text().split())
    for keys in ("1,048,576", "4,194,304"):
        us = of_two("cp decode", f"1 x {keys.replace(',', '')} keys")
        one = f"{us['one GPU'] / 1e6 * 1e3:.2f}"
        assert re.search(
            rf"{keys} keys (?:takes )?{us['ours'] / 1e3:.2f} (?:ms )?instead of {one}", text
        )
        assert f"{us['one GPU'] / us['ours']:.2f}" in text
    loss = of_two("vocabulary-parallel loss, forward+backward", "8192 rows, 4096 to 131072")
    experts = of_two(
        "expert parallel, forward+backward",
        "8192 tokens a rank, 8 of 64 experts, 2048 to 768",
    )
    for us, peer in ((loss, "torch loss_parallel"), (experts, "NCCL + torch grouped_mm")):
        assert f"| {us['ours'] / 1e3:.1f} | **{us[peer] / 1e3:.1f}**" in text


def test_products_over_two_gpus():
    (rows,) = tables("distributed.md", "product, M 8192", "(K, N)")
    op = ""
    for name, shape, ours, nccl, fused, alone in rows:
        op = name or op
        k, n = re.findall(r"\d+", shape)
        us = of_two(op, f"8192 {k} {n}")
        assert same(ours, us["ours"]) and same(nccl, us["NCCL + mm"]), (op, shape)
        assert same(fused, us["symm_mem"]), (op, shape)
        assert same(alone, min(us["gemm alone"], us["mm alone"])) or same(alone, us["gemm alone"])


def test_sums_over_two_gpus():
    (rows,) = tables("distributed.md", "rows", "ours")
    for m, ours, best, _ in rows:
        us = of_two("gemm_all_reduce", f"{m} 8192 8192")
        assert same(ours, us["ours"], 1), m
        assert same(best, min(us["one-shot"], us["two-shot"]), 1), m


# ---- pictures ------------------------------------------------------------------------------------


def figures_in(picture):
    """The figures that a picture shows, as its script wrote them into the file."""
    found = re.search(rb"tEXtComment\0figures: (.*?); end", (ROOT / picture).read_bytes())
    assert found, f"{picture} has no figures: draw it again"
    return found[1].decode("latin-1").split(", ")


def test_the_picture_of_the_ladder():
    rows = [row for row in bench_of(H200, "ladder")["rows"] if row["group"] == "4096 cubed"]
    want = [f"{row['label']} {row['rate'] / 1e3:.3g} {row['ratio']:.3f}" for row in rows]
    assert figures_in("learn/ladder.png") == want


def test_the_picture_of_attention_over_ranks():
    want = []
    for card in ("h100-80gb-hbm3", "h200"):
        for row in bench_of(f"2-x-nvidia-{card}", "distributed")["rows"]:
            if row["group"] == "cp forward+backward" and "one GPU" in row["beside"]:
                tokens = 2 * int(row["label"].split()[0])
                for n, us in ((1, row["beside"]["one GPU"]["us"]), (2, row["us"])):
                    want.append(f"{card[:4].upper()} {tokens} {n} {us / 1e3:.4g}")
    assert figures_in("docs/distributed_scale.png") == want


def test_the_pictures_of_patterns():
    with (ROOT / "learn" / "patterns.csv").open() as file:
        lines = [line for line in csv.DictReader(file) if "H100" in line["device"]]

    def measured(*patterns):
        return [
            (line["variant"].replace(", ", " "), float(line["measured"]))
            for line in lines
            if line["pattern"] in patterns
        ]

    loads = sorted(measured("latency"), key=lambda line: line[1])
    assert figures_in("learn/latency.png") == [f"{name} {ns:.4g}" for name, ns in loads]
    rungs = [
        f"{name} {rate / 1e3:.4g}"
        for name, rate in measured("attention ladder", "attention, tensor cores")
    ]
    (row,) = [
        row
        for row in bench_of(H100, "flash_attn")["rows"]
        if (row["group"], row["label"]) == ("forward full", "d64 B4 S4096")
    ]
    rungs += [f"flash_attn {row['rate'] / 1e3:.4g}"]
    rungs += [f"cuDNN {row['peers']['SDPA cuDNN']['rate'] / 1e3:.4g}"]
    assert figures_in("learn/attn_ladder.png") == rungs
