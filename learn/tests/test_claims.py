# SPDX-License-Identifier: BSD-3-Clause
"""learn/claims.md: each row that names a test here is computed, and the page has the computed
figures.

Rows about shared memory are in test_layout_docs.py. Measured figures are read from result files, and
a row must cite every file that its test reads.
"""

import csv
import functools
import inspect
import itertools
import re
from pathlib import Path

import figures
import numpy as np
import pytest
import torch
from figures import cells, differ, lines

from torch_gpukern import cli, results
from torch_gpukern import layout as L
from torch_gpukern.cli import devices
from torch_gpukern.cli.roofline import NOMINAL

pytestmark = pytest.mark.figures
reported = figures.reported

H100 = "NVIDIA H100 80GB HBM3"
ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "learn" / "claims.md").read_text()
# Rows of four columns: claim, verdict, what is right, evidence.
ROWS = [
    row
    for place, line in lines("learn/claims.md")
    if line.startswith("|") and "---" not in line and len(row := cells(place, line)) == 4
]
ROWS = [row for row in ROWS if row[0] != "what circulates" and row[1] != "not measured"]
READ = set()  # the result files that the running test has read


@pytest.fixture(autouse=True)
def cites_what_it_reads(request):
    """A row cites the result files that its test reads, and no others."""
    READ.clear()
    yield
    for _, _, _, evidence in ROWS:
        if f"`{request.function.__name__}`" in evidence:
            assert READ == set(re.findall(r"\]\(([\w./-]+\.csv)\)", evidence)), evidence


def says(*figures):
    """The row whose evidence is the calling test has these figures."""
    name = inspect.stack()[1].function
    (row,) = [cells[2] for cells in ROWS if f"`{name}`" in cells[3]]
    missing = [
        figure
        for figure in map(str, figures)
        if not re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d]|\.\d)", row)
    ]
    if missing:
        differ(row.place, f"'{row[:80]}..'", ", ".join(missing))


def test_every_row_has_its_evidence():
    assert len(ROWS) > 40
    tests = {name for name in globals() if name.startswith("test_")}
    named = set()
    for claim, verdict, _, evidence in ROWS:
        assert verdict in ("true", "false", "depends"), claim
        mine = set(re.findall(r"`(test_\w+)`", evidence))
        assert mine <= tests and (
            mine or "](https://docs.nvidia.com/" in evidence or "](https://dev" in evidence
        ), claim
        named |= mine
    assert tests - named == {
        "test_every_row_has_its_evidence",
        "test_what_was_measured_cites_a_result",
        "test_what_is_not_measured_says_so",
    }


def section(title):
    """The rows of a section, as lists of cells."""
    text = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines[1:]]


def test_what_was_measured_cites_a_result():
    """A measured figure stands in a result file, with its device and date, not on another page."""
    for title in ("Latencies and on-chip memory", "Gains"):
        assert len(section(title)) > 5
        for claim, *_, evidence in section(title):
            files = re.findall(r"\]\(([\w./-]+\.csv)\)", evidence)
            assert files and all((ROOT / "learn" / file).exists() for file in files), claim
            assert ".md" not in evidence, claim


def test_what_is_not_measured_says_so():
    """Each row says whether a committed command would measure it, and that command exists."""
    rows = section("Not measured here")
    assert len(rows) >= 3
    for claim, verdict, missing, command in rows:
        assert verdict == "not measured" and missing, claim
        assert command == "none" or re.fullmatch(r"`(python|make) [^`]+`", command), claim
        for file in re.findall(r"[\w/]+\.(?:py|cu)", command):
            assert (ROOT / file).exists(), file


# ---- layouts -------------------------------------------------------------------------------------


def test_compose_with_the_identity():
    a = L.Layout("(8,4):(1,8)")
    assert a.offsets == list(range(32)) and str(L.compose(a, "(2,2):(0,1)")) == "(2,2):(0,1)"


def test_cosize_is_no_bijection():
    x = L.Layout("(2,2):(0,3)")
    assert x.size == x.cosize == 4 and set(x.offsets) == {0, 3} and not x.injective


def composed(a, b):
    try:
        return None if a is None or b is None else L.compose(a, b)
    except L.Refusal:
        return None


def test_composition_is_associative_where_defined():
    assert (
        composed("4:1", "6:1") is None and str(L.compose("4:1", L.compose("6:1", "2:1"))) == "2:1"
    )
    both = 0
    outer = ("(4,2):(1,8)", "8:2", "(2,4):(4,1)", "(2,2,2):(4,1,2)")
    for a, b, c in itertools.product(
        outer, ("4:2", "(2,2):(2,1)", "6:1", "(4,2):(2,1)"), ("2:1", "2:2", "4:1")
    ):
        left, right = composed(composed(a, b), c), composed(a, composed(b, c))
        if left is not None and right is not None:
            both += 1
            assert left.offsets == right.offsets, (a, b, c)
    assert both > 20


def test_blocked_and_raked():
    block, copies = "(2,2):(1,2)", "(3,3):(1,3)"
    whole = L.logical_product(block, copies)
    # offset -> which block
    of = {whole(inside, copy): copy for inside in range(4) for copy in range(9)}
    first = [
        [of[x(row, 0)] for row in range(6)]
        for x in (L.blocked_product(block, copies), L.raked_product(block, copies))
    ]
    assert first == [[0, 0, 1, 1, 2, 2], [0, 1, 2, 0, 1, 2]]


def test_which_divide_puts_the_tile_first():
    assert str(L.logical_divide("16:1", "4:1")) == "(4,4):(1,4)"
    square = L.Layout("(8,8):(1,8)")
    logical, zipped = L.logical_divide(square, (4, 2)), L.zipped_divide(square, (4, 2))
    assert (
        str(logical) == "((4,2),(2,4)):((1,4),(8,16))"
        and str(zipped) == "((4,2),(2,4)):((1,8),(4,16))"
    )
    assert sorted(zipped[0].offsets) == sorted(r + 8 * c for r in range(4) for c in range(2))
    assert sorted(logical[0].offsets) == list(range(8))
    says("(4,4):(1,4)", "((4,2),(2,4)):((1,4),(8,16))", "((4,2),(2,4)):((1,8),(4,16))")


def test_modes_of_a_complement():
    for size, rest in ((8, "2:1"), (24, "(2,3):(1,8)")):
        made = L.complement("4:2", size)
        assert str(made) == rest
        assert sorted(L.join(L.Layout("4:2"), made).offsets) == list(range(size))
        says(rest)


# ---- what kernels compute ------------------------------------------------------------------------


def test_exp2_by_a_cubic():
    x, ln2 = np.linspace(0, 1, 1001), np.log(2)
    taylor = [1, ln2, ln2**2 / 2, ln2**3 / 6]
    fit = np.polyfit(x, 2**x, 3, w=2**-x)[::-1]

    def percent(coefficients):
        return 100 * np.abs(np.polyval(coefficients[::-1], x) / 2**x - 1).max()

    errors = [percent(c) for c in (taylor, [1, *taylor[:0:-1]], [1, 1, 1 / 2, 1 / 6], fit)]
    bf16 = 100 * 2**-9  # half a unit of 8 bits, at the end of the binade where that is most
    assert errors[3] < bf16 < errors[0]
    says(f"{errors[0]:.2f} %", f"{errors[1]:.0f} %", f"{errors[2]:.0f} %", f"{errors[3]:.3f} %")
    says(f"{bf16:.1f} %")


def blelloch(values):
    """The exclusive scan of Blelloch 1990 as it is usually printed: n / 2 threads, offsets doubled
    and halved."""
    a, n, offset = list(values), len(values), 1
    threads = n >> 1
    while threads:
        for t in range(threads):
            a[offset * (2 * t + 2) - 1] += a[offset * (2 * t + 1) - 1]
        offset, threads = 2 * offset, threads >> 1
    a[n - 1], threads = 0, 1
    while threads < n and offset > 1:
        offset >>= 1
        for t in range(threads):
            left, right = offset * (2 * t + 1) - 1, offset * (2 * t + 2) - 1
            a[left], a[right] = a[right], a[right] + a[left]
        threads *= 2
    return a


def test_blelloch_needs_a_power_of_two():
    for n in (16, 17, 1000, 1024):
        values = [(7 * i) % 13 for i in range(n)]
        want = [0, *itertools.accumulate(values[:-1])]
        assert (blelloch(values) == want) == (n in (16, 1024)), n
        padded = values + [0] * ((1 << (n - 1).bit_length()) - n)
        assert blelloch(padded)[:n] == want


def normal(*shape, mean=0.0):
    return mean + torch.randn(
        *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )


def test_padded_keys_need_a_mask():
    q, k, v = normal(3, 70, 64)
    want = torch.softmax(q @ k.T / 8, -1) @ v
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, 128 - 70)) for x in (k, v))
    score = q @ k.T / 8
    wrong = torch.softmax(score, -1) @ v
    says(f"{(wrong - want).abs().mean():.2f}", f"{want.abs().mean():.2f}")
    score[:, 70:] = -torch.inf
    torch.testing.assert_close(torch.softmax(score, -1) @ v, want)


def test_masked_lanes_enter_the_variance():
    x = normal(70, mean=2.0)
    lanes = torch.nn.functional.pad(x, (0, 128 - 70))
    away = lanes - lanes.sum() / 70
    says(f"{(away**2).sum() / 70:.2f}", f"{x.var(unbiased=False):.2f}")
    torch.testing.assert_close((away[:70] ** 2).sum() / 70, x.var(unbiased=False))


def test_a_cast_is_no_quantisation():
    x = 30 * normal(100_000)
    x = x[x.abs() < 127]
    cast, rounded = x.to(torch.int8), x.round().clamp(-128, 127).to(torch.int8)
    assert (cast - x).square().mean().sqrt() / (
        rounded - x
    ).square().mean().sqrt() == pytest.approx(2, rel=0.02)
    assert torch.tensor(130.0).to(torch.int32).to(torch.int8) == -126
    says(-126)


def test_a_col_major_fragment_is_the_transpose():
    a, b = normal(2, 16, 16)
    memory = a.reshape(-1)  # row-major, 16 elements a row
    row, col = (
        L.Tensor(f"(16,16):{strides}", memory).values().reshape(16, 16).T
        for strides in ("(16,1)", "(1,16)")
    )
    torch.testing.assert_close(row @ b, a @ b)
    torch.testing.assert_close(col @ b, a.T @ b)
    assert (col @ b - a @ b).abs().max() > 1


def test_vectors_lie_along_stride_1():
    matrix = L.Layout("(row=8,col=8):(8,1)")
    registers = L.Layout("8:1")
    assert (
        L.max_common_vector(matrix["col"], registers) == 8
        and L.max_common_vector(matrix["row"], registers) == 1
    )
    four_on_end = [matrix(2, 4 + i) for i in range(4)]
    assert four_on_end == list(range(20, 24)) and {offset // 8 for offset in four_on_end} == {2}


# ---- access --------------------------------------------------------------------------------------


def test_rows_and_columns():
    along, down = [4 * lane for lane in range(32)], [4 * 1024 * lane for lane in range(32)]
    assert (L.sectors(along, 4), L.sectors(down, 4)) == (4, 32)
    says(4, 32)


def test_a_warp_is_one_instruction():
    warp = [4 * lane for lane in range(32)]
    assert L.sectors(warp, 4) == 4 and L.banks.lines(warp, 4) == 1
    says(4, 32)


def test_misaligned_loads():
    moved, aligned = (L.sectors([start + 4 * lane for lane in range(32)], 4) for start in (16, 0))
    assert (moved, aligned) == (5, 4)
    says(moved, aligned)
    assert L.sectors([16], 16) == 1
    with pytest.raises(ValueError, match="accesses 16 bytes at byte 8; it must be a multiple"):
        L.sectors([8], 16)


# ---- rates and sizes -----------------------------------------------------------------------------


def test_multiply_adds_a_clock():
    h100, a100 = NOMINAL[H100]["bf16"] * 1e12 / (132 * 1.83e9), 312e12 / (108 * 1.41e9)
    assert h100 == pytest.approx(4096, rel=1e-3) and a100 == pytest.approx(2048, rel=2e-3)
    says(2048, 1024, 989.4, 132, 312, 108)


@pytest.mark.gpu
def test_l2_of_this_gpu():
    size = {"NVIDIA H100 80GB HBM3": 50, "NVIDIA H200": 60}.get(torch.cuda.get_device_name(0))
    if size is None:
        pytest.skip("the row is about others")
    assert devices.gpu_facts(torch.cuda.get_device_properties(0), 0)["l2_bytes"] == size << 20
    says(size)


def test_the_ridge():
    assert 2 * NOMINAL[H100]["bf16"] == pytest.approx(1979, rel=1e-3)
    says(f"{NOMINAL[H100]['bf16']:.0f}")


def test_the_ridge_point():
    h100, h200 = (
        NOMINAL[name]["bf16"] * 1e3 / NOMINAL[name]["read"] for name in (H100, "NVIDIA H200")
    )
    assert f"{h100:.0f}" == "295"  # the claim
    a100 = NOMINAL["NVIDIA A100-SXM4-80GB"]
    says(
        f"{a100['bf16'] * 1e3 / a100['read']:.0f}",
        f"{a100['bf16']:.0f}",
        f"{a100['read'] / 1e3:.2f}",
    )
    says(989.4, f"{NOMINAL[H100]['read'] / 1e3:.2f}", f"{h200:.0f}")


def ladder(rung):
    """The result of one rung at 4096 cubed on the H200."""
    rows = saved(H200_FILE, "ladder", "4096 cubed")
    (row,) = [row for row in rows if row["label"].startswith(f"{rung} ")]
    return row


def tflops(rung):
    """As learn/ladder.md prints it."""
    return float(f"{ladder(rung)['rate'] / 1e3:.3g}")


def counted(counter, rung):
    """The profiler's figure for one call of a rung at 4096 cubed on the H200."""
    facts = bench_of(H200_FILE, "ladder")["facts"]
    found = [fact for fact in facts if fact["group"] == "counted, 4096 cubed"]
    (value,) = [f["value"] for f in found if (f["label"], f["unit"]) == (str(rung), counter)]
    return value


def test_four_issue_slots():
    row = ladder(5)
    clocks = row["us"] * row["clock_mhz"] * 132
    a_clock = counted("smsp__inst_executed.sum", 5) / clocks
    used = counted("smsp__issue_active.avg.pct_of_peak_sustained_active", 5)
    assert a_clock / 4 == pytest.approx(used / 100, rel=0.06)
    says(f"{a_clock:.1f}", f"{25 * a_clock:.0f}", f"{used:.0f}")


def attention_traffic(n, d, on_chip):
    """Elements between memory and chip in Algorithm 1 of FlashAttention (Dao et al. 2022), by
    running its two loops."""
    keys = -(-on_chip // (4 * d))
    rows = min(keys, d)
    moved = 0
    for j in range(0, n, keys):
        moved += 2 * d * min(keys, n - j)  # k and v
        for i in range(0, n, rows):
            # q, out there and back, peak and sum there and back
            moved += min(rows, n - i) * (3 * d + 4)
    return moved


def test_flash_attention_traffic():
    twice = [
        attention_traffic(2 * n, 128, 64 << 10) / attention_traffic(n, 128, 64 << 10)
        for n in (4096, 16384)
    ]
    assert all(3.7 < ratio < 4.1 for ratio in twice)
    wider = attention_traffic(16384, 256, 64 << 10) / attention_traffic(16384, 128, 64 << 10)
    larger = attention_traffic(16384, 128, 128 << 10) / attention_traffic(16384, 128, 64 << 10)
    assert wider == pytest.approx(4, rel=0.05) and larger == pytest.approx(1 / 2, rel=0.05)
    at_least = 4 * 16384 * 128  # q, k, v and out once
    assert attention_traffic(16384, 128, 1 << 30) < 1.3 * at_least
    says(f"{attention_traffic(16384, 128, 64 << 10) / at_least:.0f}")


def test_intensity_of_a_tile():
    flops, elements = 2 * 64 * 64, 64 + 64  # for each k
    says(flops // (2 * elements), flops // (4 * elements))


def test_bytes_under_way():
    ps = 16 / NOMINAL[H100]["read"] / 1e9 * 1e12
    # The pattern occupancy predicts the rate of one block an SM by a latency of 0.7 us. Eight
    # blocks have eight times as many bytes under way.
    one = float(line_of("occupancy", "1 block an SM")["predicted"])
    idle = 0.7 * one / pattern("occupancy", "1 block an SM", "H100")
    busy = 0.7 * 8 * one / pattern("occupancy", "8 blocks", "H100")
    says(f"{ps:.1f} ps", f"{idle:.1f}", f"{busy:.1f}", f"{idle * NOMINAL[H100]['read'] / 1e3:.1f}")
    assert busy * NOMINAL[H100]["read"] / 1e3 == pytest.approx(3, rel=0.05)


def test_a_chain_of_six():
    apart = sum(1 + 1 for _ in range(6))  # each reads a tensor and writes one
    assert (apart, apart / (1 + 1)) == (12, 6)
    says(12, 2, 6)


def test_e2m1_ends_at_6():
    def value(code):
        exponent, mantissa = code >> 1, code & 1
        return mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)

    values = [value(code) for code in range(8)]
    assert values == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    says("0, 0.5, 1, 1.5, 2, 3, 4, 6")


def test_the_occupancy_command(capsys):
    assert cli.main(["occupancy", "--registers", "128", "--threads", "256"]) == 0
    assert "16 of 64" in capsys.readouterr().out


# ---- gains: ratios of what was measured ----------------------------------------------------------


DEVICES = {"H100": H100, "H200": "NVIDIA H200"}
H100_FILE, H200_FILE = "nvidia-h100-80gb-hbm3.csv", "nvidia-h200.csv"


@functools.cache
def lines_of(file):
    with (ROOT / "learn" / file).open() as lines:
        return tuple(csv.DictReader(lines))


def line_of(name, variant, gpu="H100"):
    """What a variant of a pattern reached: a time, GB/s or GFLOP/s."""
    READ.add("patterns.csv")
    key = (name, variant, DEVICES[gpu])
    (line,) = [
        line
        for line in lines_of("patterns.csv")
        if (line["pattern"], line["variant"], line["device"]) == key and line["share"]
    ]
    return line


def pattern(name, variant, gpu):
    return float(line_of(name, variant, gpu)["measured"])


def share(name, variant, gpu="H100"):
    """What a GPU reached of the prediction."""
    return float(line_of(name, variant, gpu)["share"])


def instructions(name, variant):
    READ.add("patterns.csv")
    (line,) = [
        line
        for line in lines_of("patterns.csv")
        if (line["pattern"], line["variant"], line["unit"]) == (name, variant, "M instructions")
    ]
    return line["measured"]


load = functools.cache(results.load)


def bench_of(file, bench):
    READ.add(f"../benchmarks/results/{file}")
    return load(ROOT / "benchmarks" / "results" / file)["benches"][bench]


def saved(file, bench, group):
    return [row for row in bench_of(file, bench)["rows"] if row["group"] == group]


def test_gain_of_a_fused_epilogue():
    row = saved("nvidia-h200.csv", "gemm", "bias + gelu")[0]
    apart, addmm = (row["peers"][name]["us"] for name in ("mm + add + gelu", "gelu(addmm)"))
    assert row["label"] == "4096"
    says(f"{apart / row['us']:.2f}", apart, row["us"], f"{addmm / row['us']:.2f}")


def test_gain_of_persistence():
    before, after, overlap = map(tflops, (9, 10, 11))
    says(f"{before:.0f}", f"{after:.0f}", f"{after / before:.2f}", f"{overlap / after:.2f}")


def between(name, after, size=4096):
    """(TFLOP/s of a rung between others, TFLOP/s of the rung behind which it stands), H100."""
    READ.add("ladder_sizes.csv")
    found = {
        line["rung"]: float(f"{float(line['tflops']):.3g}")
        for line in lines_of("ladder_sizes.csv")
        if (line["dtype"], line["size"]) == ("bfloat16", str(size))
    }
    return found[name], found[after]


def test_gain_of_warp_tiling():
    after, before = between("warp_tile", "vectorised")
    says(before, after, f"{after / before:.2f}")


def test_gain_of_one_dimension():
    after, before = between("column", "shared")
    says(before, after, f"{after / before:.2f}")


def test_gain_of_double_buffering():
    after, before = between("double_buffer", "mma")
    large, alone = between("double_buffer", "mma", 8192)
    one, two = (pattern("double buffer", f"{n}", "H100") for n in ("one buffer", "two buffers"))
    says(
        f"{before:.0f}",
        f"{after:.0f}",
        f"{after / before:.2f}",
        f"{large / alone:.2f}",
        f"{two / one:.2f}",
    )


def test_cost_of_uncoalesced_access():
    gain = tflops(2) / tflops(1)
    apart = [
        pattern("copy", "4 bytes", gpu) / pattern("copy", "4 bytes, 32 apart", gpu)
        for gpu in ("H100", "H200")
    ]
    says(f"{gain:.1f}", *(f"{x:.1f}" for x in apart))


def test_gain_of_shuffles():
    shared, shuffle, block = (
        pattern("reduce", variant, "H100") for variant in ("shared", "shuffle", "block")
    )
    says(f"{shared:.0f}", f"{shuffle:.0f}", f"{shuffle / shared:.2f}", f"{block / shuffle:.2f}")
    tree, shuffles = (pattern("blelloch", v, "H100") for v in ("padded tree", "shuffles"))
    says(f"{tree:.0f}", f"{shuffles:.0f}", f"{shuffles / tree:.2f}")


def test_cost_of_a_launch():
    launches = int(
        re.search(r"\bSTEPS = (\d+)", (ROOT / "learn" / "patterns" / "graph.cu").read_text())[1]
    )
    each = [
        pattern("graph", variant, gpu) / launches
        for variant in ("stream", "graph")
        for gpu in ("H200", "H100")
    ]
    says(launches, *(f"{us:.1f}" for us in each))


def test_gain_of_a_transpose():
    for gpu in ("H100", "H200"):
        naive = pattern("transpose", "naive", gpu)
        gains = [
            pattern("transpose", variant, gpu) / naive for variant in ("padded", "swizzled", "tma")
        ]
        assert all(5 < gain < 10 for gain in gains)
        says(*(f"{gain:.1f}" for gain in gains))


def test_gain_of_a_fused_softmax():
    for gpu in ("H100", "H200"):
        three, online, registers = (
            pattern("softmax", v, gpu) for v in ("three kernels", "online", "registers")
        )
        assert 2 < registers / three < 3
        says(f"{registers / three:.2f}", f"{online / three:.2f}")


def test_cost_of_paging():
    for file in ("nvidia-h100-80gb-hbm3.csv", "nvidia-h200.csv"):
        rows = [
            row for row in saved(file, "paged_attn", "decode") if row["label"].endswith("page 16")
        ]
        longer = [row["us"] / row["peers"]["cuDNN, dense cache"]["us"] for row in rows]
        says(f"{min(longer):.2f}", f"{max(longer):.2f}")
    rows = saved("nvidia-h100-80gb-hbm3.csv", "claims", "paging")
    longer = [row["us"] / row["peers"]["pages of 256 in order"]["us"] for row in rows]
    says(f"{min(longer):.3f}", f"{max(longer):.2f}")


def test_polynomials_in_attention():
    READ.add("patterns.csv")
    ex2, cubics = (
        float(line["measured"])
        for line in lines_of("patterns.csv")
        if line["pattern"] == "forward of head_dim 64"
    )
    assert cubics < ex2
    says(f"{cubics:.0f}", f"{ex2:.0f}", f"{cubics / ex2:.2f}")


def test_gain_of_splitting_keys():
    rows = saved(H200_FILE, "claims", "split keys")
    assert len(rows) == 3
    for row in rows:
        split, whole = (
            row["peers"][name]["us"] for name in ("FlashAttention-3", "FlashAttention-3, not split")
        )
        says(f"{whole / split:.1f}", row["label"].split()[-1])


# ---- latencies and memory on the chip ------------------------------------------------------------

GHZ = 1.98  # of the H100 while latency.cu ran: its predictions in ns are clocks of that rate


def ns(variant):
    return pattern("latency", variant, "H100")


def test_latencies():
    predicted = {"shared": 30, "L1": 34, "L2": 260}  # clocks, by the table's column
    for variant, clocks in predicted.items():
        assert line_of("latency", variant)["limit"] == f"{clocks} clocks"
        measured = clocks / share("latency", variant)
        assert measured / GHZ == pytest.approx(ns(variant), rel=0.05)
        says(f"{measured:.0f}")
    says(f"{ns('HBM') * GHZ:.0f}")


def test_chains():
    for variant, clocks, digits in (("multiply-add", 4, 1), ("shuffle", 23, 0)):
        assert line_of("chains", variant, "H200")["limit"] == f"{clocks} clocks"
        measured = f"{clocks / share('chains', variant, 'H200'):.{digits}f}"
        says(measured)
        told = rf"{variant} (takes )?{re.escape(measured)} \(predicted: {clocks}\)"
        assert re.search(told, (ROOT / "learn" / "patterns.md").read_text()), told


def test_shared_memory_beside_hbm():
    own, hbm = pattern("DSMEM", "own", "H100"), pattern("vector add", "16 bytes", "H100")
    says(f"{ns('shared'):.0f}", f"{ns('HBM'):.0f}", f"{ns('HBM') / ns('shared'):.0f}")
    says(f"{own / 1e3:.1f}", f"{hbm / 1e3:.1f}", f"{own / hbm:.0f}")


def test_dsmem():
    far = ns("DSMEM")
    says(f"{far:.0f}", f"{ns('HBM') / far:.1f}", f"{ns('L2') / far:.1f}")
    says(f"{(far - ns('shared')) * GHZ:.0f}")
    own, two = (pattern("DSMEM", variant, "H100") for variant in ("own", "the next of 2"))
    says(f"{two / 1e3:.1f}", f"{two / own:.2f}")


def test_gain_of_tma():
    narrow, wide, tma = (
        pattern("TMA tiles", v, "H100") for v in ("4 bytes a copy", "16 bytes a copy", "TMA")
    )
    says(f"{tma / narrow:.2f}", f"{tma / wide:.2f}")
    says(instructions("TMA tiles", "16 bytes a copy"), instructions("TMA tiles", "TMA"))


def test_swizzle_beside_padding():
    for gpu in ("H100", "H200"):
        padded, swizzled = (pattern("transpose", v, gpu) for v in ("padded", "swizzled"))
        says(f"{swizzled / padded:.2f}")


def test_gain_of_polynomials():
    unit, all_of_them, quarter = (
        pattern("exp2", v, "H100") for v in ("ex2", "polynomial, 8e-5", "a quarter polynomial")
    )
    says(f"{100 * (quarter / unit - 1):.0f} %", f"{100 * (1 - all_of_them / unit):.0f} %")


# ---- headline gains ------------------------------------------------------------------------------


def test_gain_of_shared_memory():
    says(tflops(2), tflops(3), f"{tflops(3) / tflops(2):.2f}", f"{tflops(4) / tflops(3):.2f}")


def test_gain_of_tensor_cores():
    says(f"{tflops(6) / tflops(5):.1f}", f"{tflops(13) / tflops(5):.1f}")


def test_rate_of_wmma():
    rate, cublas = between("wmma", "cuBLAS")
    says(f"{rate:.0f}", f"{rate / cublas:.2f}")


def case(file, bench, group, label):
    """The case's us by name, ours as "ours"."""
    (row,) = [row for row in saved(file, bench, group) if row["label"] == label]
    return {"ours": row["us"]} | {name: peer["us"] for name, peer in row["peers"].items()}


def test_gain_of_a_layer_norm():
    for file in (H100_FILE, H200_FILE):
        for label in ("8192x4096", "4096x16384"):
            us = case(file, "rows", "layer_norm", label)
            says(f"{us['torch'] / us['ours']:.2f}")


CUBE = "8192x8192x8192"


def test_gain_of_8_bits():
    dense = case(H200_FILE, "sparse_gemm", "bf16", CUBE)["ours, dense"]
    for group in ("row, fast", "int8"):
        says(f"{dense / case(H200_FILE, 'scaled_gemm', group, CUBE)['ours']:.2f}")


def test_gain_of_2_4():
    for group in ("bf16", "int8", "e4m3"):
        us = case(H200_FILE, "sparse_gemm", group, CUBE)
        says(f"{us['ours, dense'] / us['ours']:.2f}")
    us = case(H200_FILE, "sparse_gemm", "bf16", CUBE)
    says(f"{us['torch, dense'] / us['torch._cslt_sparse_mm']:.2f}")


def test_gain_of_compiling():
    for group, label in (
        ("gradient step", "{}"),
        ("large, gradient step", "4 x 2048 tokens, {}, 6 layers"),
        ("large, prefill", "8192 tokens, {}, 6 layers"),
        ("lora", "rank 16, {}, 6 layers"),
    ):
        eager, compiled = (
            case(H100_FILE, "model", group, label.format(how))["torch built-ins"]
            for how in ("eager", "compiled")
        )
        says(f"{eager / compiled:.2f}")


def test_shares_of_cublas():
    for label in ("4096", "8192"):
        us = case(H100_FILE, "languages", "a @ b", label)
        for name in ("CUTLASS", "Triton", "CuTe DSL"):
            says(f"{us['torch.matmul'] / us[name]:.2f}")


def attention_cases():
    """Forward at head_dim 128 on an H100: us by name."""
    for group in ("forward full", "forward causal"):
        for row in saved(H100_FILE, "flash_attn", group):
            if row["label"].startswith("d128 "):
                yield case(H100_FILE, "flash_attn", group, row["label"])


def test_shares_of_attention():
    us = case(H100_FILE, "flash_attn", "forward full", "d128 B1 S16384")
    (row,) = [
        row
        for row in saved(H100_FILE, "flash_attn", "forward full")
        if row["label"] == "d128 B1 S16384"
    ]
    rate = {name: row["rate"] / 1e3 * us["ours"] / time for name, time in us.items()}  # TFLOP/s
    percent = {name: 100 * x / NOMINAL[H100]["bf16"] for name, x in rate.items()}
    assert abs(percent["FA3"] - 75) <= 5 and abs(percent["SDPA flash"] - 35) <= 5
    says(*(f"{rate[name]:.0f}" for name in ("FA3", "SDPA flash")))
    says(*(f"{percent[name]:.0f}" for name in ("FA3", "SDPA flash", "SDPA cuDNN", "ours")))


def test_gain_of_flash_attention_3():
    gains = [us["SDPA flash"] / us["FA3"] for us in attention_cases()]
    says(f"{min(gains):.2f}", f"{max(gains):.2f}")


def test_flash_attention_4_on_hopper():
    gains = [us["FA3"] / us["FA4"] for us in attention_cases()]
    says(f"{min(gains):.2f}", f"{max(gains):.2f}")


def test_cudnn_beside_flash_attention_2():
    for direction in ("forward", "backward"):
        for head_dim in (64, 128, 256):
            rows = [
                row
                for mask in ("full", "causal")
                for row in saved(H100_FILE, "flash_attn", f"{direction} {mask}")
                if row["label"].startswith(f"d{head_dim} ")
            ]
            gains = [
                row["peers"]["SDPA flash"]["us"] / row["peers"]["SDPA cuDNN"]["us"] for row in rows
            ]
            says(f"{min(gains):.2f} to {max(gains):.2f}")


def test_flex_attention_beside_flash_attention():
    for direction in ("forward", "backward"):
        rows = [
            row["peers"]
            for mask in ("full", "causal")
            for row in saved(H200_FILE, "flash_attn", f"{direction} {mask}")
            if "FlexAttention" in row["peers"]
        ]
        gains = [peers["SDPA flash"]["us"] / peers["FlexAttention"]["us"] for peers in rows]
        says(f"{min(gains):.2f} to {max(gains):.2f}")
        if direction == "forward":
            shares = [peers["FA3"]["us"] / peers["FlexAttention"]["us"] for peers in rows]
            says(f"{min(shares):.2f} to {max(shares):.2f}")


def test_rate_of_fp8_attention():
    for head_dim in (64, 128, 256):
        rates = [
            row["rate"] * row["us"] / row["peers"]["FA3"]["us"]
            for row in bench_of(H100_FILE, "flash_attn_fp8")["rows"]
            if f" d{head_dim}," in row["group"]
        ]
        says(f"{max(rates) / 1e6:.2f}")
