# SPDX-License-Identifier: BSD-3-Clause
"""Measured figures in docs/quantise.md, docs/distributed.md and docs/kernels, and pictures, agree with
the stored results, as README's and results.md's do (test_readme.py, test_results.py).
"""

import csv
import re

import figures
import pytest
from figures import ROOT, Cell, close, differ, equal, sentence, tables

from torch_gpukern import results

pytestmark = pytest.mark.figures
reported = figures.reported
H100, H200, TWO_H200 = "nvidia-h100-80gb-hbm3", "nvidia-h200", "2-x-nvidia-h200"
REQUESTS = ("1 requests", "16 requests", "64 requests")


def bench_of(file, bench):
    return results.load(ROOT / "benchmarks" / "results" / f"{file}.csv")["benches"][bench]


def recipe_rows(columns):
    """The rows of the table of recipes that has so many columns."""
    found = tables("docs/quantise.md", "recipe", "1 request", "16", "64")
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
            ratio = f"{tokens / base[n]:.2f}"
            if abs(float(said[1]) / tokens - 1) > 6e-3 or said[2] not in (None, ratio):
                differ(cell.place, f"{name}, {n}: {cell}", f"{tokens:.0f} ({ratio})")
            assert said[2] or name == "bfloat16", cell.place
        if name != "bfloat16":
            equal(milliseconds, ms[f"{name}, 1 requests"])
        read = bench_of(H200, "recipes")["peaks"]["read"]
        close(share, float(gigabytes) / float(milliseconds) * 1e3 / read, least=1.1)
    sentence("docs/quantise.md", f"One H200, torch 2.11, {date}.")


def test_recipes_of_the_h100():
    speed, _, date = recipes(H100)
    rows = recipe_rows(4)
    for name, *cells in rows:
        for cell, n in zip(cells, REQUESTS):
            tokens, ratio = re.match(r"(\d+)(?: \(([\d.]+)\))?$", cell).groups()
            close(Cell(tokens, cell.place), speed[f"{name}, {n}"], least=0.51)
            if ratio:
                now = f"{speed[f'{name}, {n}'] / speed[f'bfloat16, {n}']:.2f}"
                equal(Cell(ratio, cell.place), now)
    sentence("docs/quantise.md", f"One H100 80GB HBM3, torch 2.11, {date}.")


def test_experts_of_mixtral():
    for file, form in ((H200, "{} to {} times"), (H100, "H200, {} to {} on an H100")):
        ratios = [
            results.ratio_of(row)
            for row in bench_of(file, "moe")["rows"]
            if row["group"] == "forward" and row["label"].startswith("Mixtral")
        ]
        sentence("docs/quantise.md", form.format(f"{min(ratios):.2f}", f"{max(ratios):.2f}"))


# ---- pages of kernels ----------------------------------------------------------------------------


def span(ratios):
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def test_attention_on_hopper():
    """Relative to cuDNN, forward."""
    rows = [r for r in bench_of(H100, "flash_attn")["rows"] if r["group"].startswith("forward")]
    long, short = (
        span([r["peers"]["SDPA cuDNN"]["us"] / r["us"] for r in rows if r["label"].endswith(end)])
        for end in (" S8192", " S512")
    )
    words = f"it has {long} times cuDNN's speed at 8192 tokens and {short} times at 512."
    sentence("docs/kernels/flash_attn_hopper.md", words)


def test_8_bit_attention_on_hopper():
    page = "docs/kernels/flash_attn_hopper.md"
    bench = bench_of(H200, "flash_attn_fp8")["rows"]
    (rows,) = tables(page, "", "full 1.5k")
    cases = [r for mask in ("full", "causal") for r in bench if r["group"] == f"{mask} d128, fast"]
    for (_, *shown), figure in zip(rows, (lambda r: r["rate"] / 1e3, results.ratio_of)):
        for cell, case in zip(shown, cases, strict=True):
            close(cell, figure(case))
    (wide,) = [r for r in bench if (r["group"], r["label"]) == ("full d256, fast", "7680")]
    words = f"256 reaches {wide['rate'] / 1e3:.0f} TFLOP/s, {wide['ratio']:.2f} of FlashAttention-3"
    sentence(page, words)


def test_groups_on_hopper():
    page = "docs/kernels/gemm_quantised.md"
    rows = bench_of(H100, "grouped_gemm")["rows"]
    sixteen = [1 / r["ratio"] for r in rows if not r["group"].startswith("e4m3")]
    sentence(page, f"| 16 bits | {span(sixteen)} of the better of")
    coded = [(r["us"], r["peers"]) for r in rows if r["group"] == "e4m3 row"]
    fast = span([us / peers["torch._scaled_grouped_mm, fast"]["us"] for us, peers in coded])
    precise = span([peers["torch._scaled_grouped_mm"]["us"] / us for us, peers in coded])
    sentence(page, f"| e4m3, precise sums | {fast} of")
    sentence(page, f"its precise mode takes {precise} times as long as ours |")


def times(bench, group, file=H200):
    """us by the label of a case; and the ratios likewise."""
    rows = [row for row in bench_of(file, bench)["rows"] if row["group"] == group]
    assert rows
    return {row["label"]: row["us"] for row in rows}, {row["label"]: row["ratio"] for row in rows}


SQUARE = [f"{n}x{n}x{n}" for n in (4096, 8192)]


def test_scaled_products_on_hopper():
    """The table of rates by the scales, and small M in MXFP8."""
    page = "docs/kernels/gemm_quantised.md"
    (rows,) = tables(page, "scales", "up to 64 rows of a")
    groups = ["row", "block", "int8 block", None, "mx", None]
    for (name, *_, shown), group in zip(rows, groups, strict=True):
        if group is None:
            assert "H100:" in shown, name  # of another run, as the words before the table say
            continue
        us, _ = times("scaled_gemm", group)
        for cell, size, n in zip(shown.split(", "), SQUARE, (4096, 8192), strict=True):
            close(Cell(cell, shown.place), 2e-6 * n**3 / us[size])
    (row,) = [
        r
        for r in bench_of(H200, "scaled_gemm")["rows"]
        if r["label"] == "16x8192x8192" and r["group"] == "mx"
    ]
    dense = row["peers"]["ours in bf16"]["us"]
    sentence(page, f"takes {row['us']:.1f} us, where bfloat16 takes {dense:.1f} (one H200")


def test_packed_weights_on_hopper():
    page = "docs/kernels/gemm_quantised.md"
    (ours, cublas), (_, *tokens) = (
        tables(page, "8192 x 8192, int4, activations in bfloat16")[0],
        (
            "",
            "1",
            "16",
            "64",
            "128",
        ),
    )
    rows = {r["label"]: r for r in bench_of(H200, "weight_gemm")["rows"] if r["group"] == "int4"}
    for m, own, peer in zip(tokens, ours[1:], cublas[1:], strict=True):
        row = rows[f"{m}x8192x8192"]
        close(own, row["us"])
        close(peer, row["peers"]["torch.matmul, bf16"]["us"])
    ratios = [rows[f"{m}x8192x8192"]["ratio"] for m in (256, 512, 2048)]
    sentence(page, f"From 256 to 2048 tokens it has {span(ratios)} times the speed")


def test_sparse_products_on_hopper():
    page = "docs/kernels/gemm_quantised.md"
    found = []
    for group, label in (
        ("e4m3, fast", SQUARE[0]),
        ("e4m3", SQUARE[0]),
        ("e4m3", "64x8192x8192"),
    ):
        rows = bench_of(H200, "sparse_gemm")["rows"]
        (row,) = [r for r in rows if (r["group"], r["label"]) == (group, label)]
        dense = min(t["us"] for name, t in row["peers"].items() if "dense" in name)
        found += [row["us"], dense]
    form = "takes {:.0f} us for 4096 cubed, where the fastest dense product takes {:.0f}, and {:.0f} us"
    form += (
        " with the default, where a dense one takes {:.0f}. 64 tokens of an 8192 x 8192 weight take"
    )
    sentence(page, (form + " {:.1f} us, dense {:.1f}.").format(*found))


def test_scales_in_the_order_of_their_speed():
    page = "docs/quantise.md"
    large = ["1024x1024x1024", "2048x2048x2048", *SQUARE, "4096x7168x16384"]
    us = {g: times("scaled_gemm", g)[0] for g in ("row", "block", "int8", "int8 block")}
    e4m3, int8 = (
        span([us[fast][size] / us[slow][size] for size in large])
        for fast, slow in (("row", "block"), ("int8", "int8 block"))
    )
    sentence(page, f"e4m3 has {e4m3} times the speed of row scales, int8 {int8} times")
    over = [times("scaled_gemm", "int8 block")[1][size] for size in large[1:]]
    sentence(page, f"From 2048 cubed on int8 still has {span(over)} times bfloat16's speed")
    mx = times("scaled_gemm", "mx")[1]
    sentence(page, f"has {mx[large[0]]:.2f} (1024 cubed) to {mx[SQUARE[1]]:.2f} (8192 cubed)")


def test_wide_heads_on_hopper():
    rows = {(r["group"], r["label"]): r for r in bench_of(H200, "flash_attn")["rows"]}
    row = rows["wide forward full", "d512 B2 S8192"]
    words = (
        f"it has {row['rate'] / 1e3:.0f} TFLOP/s at 8k, full, {row['ratio']:.1f} times SDPA's speed"
    )
    sentence("docs/kernels/flash_attn_hopper.md", words)


def test_shared_prefixes_on_hopper():
    page = "docs/kernels/paged_attn.md"
    cases = {r["label"]: r for r in bench_of(H200, "paged_attn")["rows"]}
    (rows,) = tables(page, "sequences x (shared + own)")
    for shape, saved, plain, prefix, ratio in rows:
        n, shared, own = (int(number) for number in re.findall(r"\d+", shape))
        row = cases[f"B{n} {shared} shared + {own} page 16"]
        close(prefix, row["us"])
        close(plain, row["peers"]["without prefix"]["us"])
        close(ratio, results.ratio_of(row))
        equal(saved, f"{(n - 1) * shared:,}")


def test_latent_attention_on_hopper():
    (rows,) = tables("docs/kernels/paged_attn.md", "batch x context")
    cases = {(r["group"], r["label"]): r for r in bench_of(H200, "paged_attn")["rows"]}
    for shape, *cells in rows:
        batch, context = re.match(r"(\d+) x (\d+)k", shape).groups()
        for heads, cell in zip((128, 64, 16), cells, strict=True):
            label = f"B{batch} context {1024 * int(context)}"
            row = cases[f"latent, {heads} heads", label]
            ours, theirs, _ = (Cell(part, cell.place) for part in cell.split(", "))
            close(ours, row["us"])
            close(theirs, row["peers"]["FlashMLA"]["us"])


def test_masks_over_new_tokens_on_hopper():
    cases = {r["label"]: r for r in bench_of(H200, "paged_attn")["rows"] if r["group"] == "tree"}
    (rows,) = tables("docs/kernels/paged_attn.md", "sequences x (old + new)")
    for (sizes, _, _, tree, causal), label in zip(
        rows, [name for name in cases if name.endswith("page 16")], strict=True
    ):
        batch, old, new = re.fullmatch(r"(\d+) x \((\d+) \+ (\d+)\)", sizes).groups()
        assert label == f"B{batch} {old} old + {new} new page 16"
        close(tree, cases[label]["us"])
        close(causal, cases[label]["peers"]["causal rule"]["us"])


# ---- a CPU ---------------------------------------------------------------------------------------


def test_a_xeon():
    page, file = "docs/kernels/gemm_cpu.md", "intel-r-xeon-r-processor-2-threads-avx512"
    mean = {group["group"]: group["geomean"] for group in bench_of(file, "flash_attn")["groups"]}
    (rows,) = tables(
        page,
        "bfloat16 attention, two threads, relative to the better of SDPA in bfloat16 and in float32",
    )
    for row, groups in zip(
        rows,
        (
            ("forward full d64", "forward full d128"),
            ("forward causal",),
            ("backward full", "backward causal"),
        ),
        strict=True,
    ):
        for cell, group in zip(row[2].split("; "), groups, strict=True):
            close(Cell(cell, row[2].place), mean[f"{group}, bf16"], least=0.55)
    products = [r for r in bench_of(file, "gemm")["rows"] if r["group"] in ("square", "odd")]
    bf16, f32 = (
        span([results.ratio_of(r) for r in products if r["dtype"] == dtype])
        for dtype in ("bf16", "f32")
    )
    sentence(page, f"have {bf16} times the speed of oneDNN")
    sentence(page, f"have {f32} times that of MKL")
    shares = [r["share"] for r in bench_of(file, "paged_attn")["rows"] if r["dtype"] == "bf16"]
    sentence(page, f"Decoding in bfloat16 reads at {span(shares)} of the loop over the same pages")


# ---- other libraries -----------------------------------------------------------------------------


def test_whole_steps_of_transformers():
    page, bench = "docs/integrations.md", bench_of(H200, "whole_steps")
    (rows,) = tables(page, "step", "gpukern, ms", "sdpa, ms")
    for (step, ours, theirs, ratio, memory), row in zip(rows, bench["rows"], strict=True):
        equal(
            Cell(step.replace(",", ""), step.place),
            f"{row['group']} {row['label']}".replace(",", ""),
        )
        close(ours, row["us"] / 1e3)
        close(theirs, row["peers"]["sdpa"]["us"] / 1e3)
        close(ratio, results.ratio_of(row))
        equal(memory, ", ".join(re.findall(r"[\d.]+", row["note"])))
    sentence(page, f"{bench['date']}; the rows of `whole_steps`")


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


def ms(cell, us):
    close(cell, us / 1e3)


def test_attention_over_two_gpus():
    (rows,) = tables("docs/distributed.md", "tokens a rank", "", "one GPU")
    for tokens, direction, one, ideal, gather, ring, ulysses, cudnn, flash in rows:
        group = "cp forward" if direction == "forward" else "cp forward+backward"
        us = of_two(group, f"{int(tokens.replace(',', ''))} tokens a rank")
        ms(gather, us["ours"])
        best = min(time for name, time in us.items() if name.startswith("torch CP cuDNN"))
        other = min(time for name, time in us.items() if name.startswith("torch CP flash"))
        ms(cudnn, best)
        ms(flash, other)
        ms(one, us["one GPU"])
        ms(ideal, us["one GPU"] / 2)
        ms(ring, us["ring"])
        ms(ulysses, us["ulysses"])


def test_modes_over_two_gpus():
    """Forward, then forward and backward. From 8,192 tokens on with 8 key heads the times are those
    of the first table."""
    (rows,) = tables("docs/distributed.md", "tokens a rank, key heads", "all_gather")
    assert len(rows) == 7
    for shape, *times in rows:
        tokens, heads = (int(number.replace(",", "")) for number in shape.split(", "))
        for i, direction in enumerate(("forward", "forward+backward")):
            label = f"{tokens} tokens a rank"
            if heads == 8 and tokens >= 8192:
                us = of_two(f"cp {direction}", label)
            else:
                us = of_two(f"cp modes, {direction}", f"{label}, 32 heads over {heads}")
            us["ring" if "all_gather" in us else "all_gather"] = us["ours"]
            for cell, mode in zip(times, ("all_gather", "ring", "ulysses")):
                ms(Cell(cell.split(", ")[i], cell.place), us[mode])


def test_sentences_about_two_gpus():
    page, gains = "docs/distributed.md", []
    for keys, form in (
        ("1,048,576", "{keys} keys takes {two} ms instead of {one}"),
        ("4,194,304", "{keys} keys {two} instead of {one}"),
    ):
        us = of_two("cp decode", f"1 x {keys.replace(',', '')} keys")
        gains.append(f"{us['one GPU'] / us['ours']:.2f}")
        two, one = (f"{us[name] / 1e3:.2f}" for name in ("ours", "one GPU"))
        sentence(page, form.format(keys=keys, two=two, one=one))
    sentence(page, ": {} and {} times as fast.".format(*gains))
    loss = of_two("vocabulary-parallel loss, forward+backward", "8192 rows, 4096 to 131072")
    experts = of_two(
        "expert parallel, forward+backward",
        "8192 tokens a rank, 8 of 64 experts, 2048 to 768",
    )
    for us, peer, name in (
        (loss, "torch loss_parallel", "torch's loss_parallel"),
        (experts, "NCCL + torch grouped_mm", "NCCL and torch's grouped_mm"),
    ):
        sentence(page, f"| {us['ours'] / 1e3:.1f} | **{us[peer] / 1e3:.1f}**, {name} |")


def test_products_over_two_gpus():
    (rows,) = tables("docs/distributed.md", "product, M 8192", "(K, N)")
    op = ""
    for name, shape, ours, nccl, fused, alone in rows:
        op = name or op
        k, n = re.findall(r"\d+", shape)
        us = of_two(op, f"8192 {k} {n}")
        ms(ours, us["ours"])
        ms(nccl, us["NCCL + mm"])
        ms(fused, us["symm_mem"])
        # the faster product of the two, or ours
        fastest = min(us["gemm alone"], us["mm alone"])
        ms(alone, min(us["gemm alone"], fastest, key=lambda x: abs(float(alone) - x / 1e3)))


def test_sums_over_two_gpus():
    (rows,) = tables("docs/distributed.md", "rows", "ours")
    for m, ours, best, _ in rows:
        us = of_two("gemm_all_reduce", f"{m} 8192 8192")
        close(ours, us["ours"])
        close(best, min(us["one-shot"], us["two-shot"]))


# ---- pictures ------------------------------------------------------------------------------------


def drawn(picture, want):
    """The picture shows these figures: its script wrote them into the file."""
    found = re.search(rb"tEXtComment\0figures: (.*?); end", (ROOT / picture).read_bytes())
    assert found, f"{picture} has no figures: draw it again"
    shown = found[1].decode("latin-1").split(", ")
    if shown != want:
        old, new = (sorted(set(a) - set(b)) for a, b in ((shown, want), (want, shown)))
        differ(f"{picture}:1", "; ".join(old), "; ".join(new))


def test_the_picture_of_the_ladder():
    rows = [row for row in bench_of(H200, "ladder")["rows"] if row["group"] == "4096 cubed"]
    want = [f"{row['label']} {row['rate'] / 1e3:.3g} {row['ratio']:.3f}" for row in rows]
    drawn("learn/ladder.png", want)


def test_the_picture_of_attention_over_ranks():
    want = []
    for card in ("h100-80gb-hbm3", "h200"):
        for row in bench_of(f"2-x-nvidia-{card}", "distributed")["rows"]:
            if row["group"] == "cp forward+backward" and "one GPU" in row["beside"]:
                tokens = 2 * int(row["label"].split()[0])
                for n, us in ((1, row["beside"]["one GPU"]["us"]), (2, row["us"])):
                    want.append(f"{card[:4].upper()} {tokens} {n} {us / 1e3:.4g}")
    drawn("docs/distributed_scale.png", want)


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
    drawn("learn/latency.png", [f"{name} {ns:.4g}" for name, ns in loads])
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
    drawn("learn/attn_ladder.png", rungs)
