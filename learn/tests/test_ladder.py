# SPDX-License-Identifier: BSD-3-Clause
"""The gemm ladder: every rung against float64, its table, its predictions, its page."""

import csv
import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch
from conftest import assert_close_as, generator, guarded, randn, same_bits, snapshot

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import ptxas_report  # noqa: E402

LADDER = ROOT / "learn" / "ladder"


def script(name):
    """Imports a module of learn/benchmarks/, which is not a package."""
    spec = importlib.util.spec_from_file_location(
        name, ROOT / "learn" / "benchmarks" / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


ladder, model = script("ladder"), script("ladder_model")
NUMBERS = range(1, 19)  # 14 to 18 stand between others
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def rungs():
    if not ladder.LIBRARY.exists():
        pytest.skip(
            f"{ladder.LIBRARY.name} is not built: make learn, in a build for both CUDA "
            f"architectures"
        )
    return ladder.rungs()


# --------------------------------------------------------------------------------------------------
# the table and the model


def test_table_is_complete(rungs):
    assert [r.number for r in rungs] == list(NUMBERS)
    assert len({r.name for r in rungs}) == len(rungs)
    for r in rungs:
        assert r.change and (ROOT / r.source).exists(), r
        own = re.match(r"learn/ladder/(\d\d)_", r.source)
        assert not own or int(own[1]) == (10 if 11 <= r.number <= 13 else r.number), r
    assert {f"learn/ladder/{p.name}" for p in LADDER.glob("[0-9]*.cu")} == {
        r.source for r in rungs if r.source.startswith("learn/ladder/")
    }


def test_predictions_are_the_models(rungs):
    assert {r.name: r.predicted_tflops for r in rungs} == {
        r.name: float(f"{model.predict(r.number).tflops:.3g}") for r in rungs
    }


@pytest.mark.figures
def test_the_rungs_between_have_the_measured_figures():
    """The table of learn/ladder.md agrees with learn/ladder_sizes.csv."""
    with (ROOT / "learn" / "ladder_sizes.csv").open() as file:
        found = {
            (r["dtype"], r["size"], r["rung"]): float(r["tflops"]) for r in csv.DictReader(file)
        }
    at = {
        rung: rate
        for (dtype, size, rung), rate in found.items()
        if (dtype, size) == ("bfloat16", "4096")
    }
    page = (ROOT / "learn" / "ladder.md").read_text()
    names = {3: "shared", 5: "vectorised", 6: "mma"}
    row = r"^\| \[(\d+) (\w+)\]\(.*\) \| (\d) \| .* \| ([\d.]+), [\w ,]+ \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$"
    rows = re.findall(row, page, re.MULTILINE)
    assert [int(number) for number, *_ in rows] == [14, 15, 16, 17]
    for number, name, after, predicted, rate, behind, ratio in rows:
        assert predicted == f"{model.predict(int(number)).tflops:.3g}"
        assert (rate, behind) == (f"{at[name]:.3g}", f"{at[names[int(after)]]:.3g}")
        assert abs(float(ratio) - at[name] / at["cuBLAS"]) < 6e-4
    assert f"cuBLAS {at['cuBLAS']:.0f} TFLOP/s beside them" in page


@pytest.mark.parametrize("number", NUMBERS)
def test_a_prediction_is_its_slowest_unit(number):
    found = model.predict(number)
    assert found.tflops == found.limits[found.limiter] == min(found.limits.values())


def test_the_ladder_rises():
    rates = [model.predict(i).tflops for i in range(1, 14)]
    assert rates == sorted(rates)


def test_those_between_stand_between(rungs):
    """The predictions of rungs 14 to 17 lie above the rung that they stand behind. Those of 14 to
    16 also lie below the next rung. The two-stage ring (17) does not: it asks mma.sync for a little
    less than three stages in larger tiles. Rung 18 is rung 8 in fewer lines, so their predictions
    are equal.
    """
    after = {r.number: r.after for r in rungs if r.after}
    assert after == {14: 3, 15: 5, 16: 5, 17: 6, 18: 8}
    assert model.predict(18) == model.predict(8)
    for number, below in list(after.items())[:-1]:
        rate = model.predict(number).tflops
        assert model.predict(below).tflops < rate
        assert rate < model.predict(below + 1).tflops or number == 17


def test_model_counts_what_the_kernels_assert():
    """The model counts the same conflicts that the kernels state by static_assert."""
    transposing = [(lane % 16 * 128 + lane // 16) * 4 for lane in range(32)]
    assert model.wavefronts(transposing, 4) == 16
    assert model.wavefronts([lane * 4 for lane in range(32)], 4) == 1
    assert model.wavefronts([lane * 16 for lane in range(32)], 16) == 4  # 512 bytes
    assert model.wavefronts([0] * 32, 16) == 1
    assert model.lines([lane * 8192 for lane in range(32)]) == 32


def test_model_knows_the_tiles():
    text = (LADDER / "tiles.h").read_text()
    for name, tile in (
        ("LadderMma", model.RUNGS[6]),
        ("LadderWgmma", model.RUNGS[12]),
        ("LadderWmma", model.RUNGS[16]),
    ):
        body = text[text.index(f"struct {name}") :]
        assert re.search(r"BM = (\d+), BN = (\d+), BK = (\d+)", body).groups() == tuple(
            str(x) for x in (tile.bm, tile.bn, tile.bk)
        )
    assert f"GROUP = {model.RUNGS[12].group};" in text


# --------------------------------------------------------------------------------------------------
# what the compiler made


@pytest.fixture(scope="module")
def report(rungs):
    """kernel -> row of tools/ptxas_report.py, of the ladder's own objects."""
    folder = ladder.LIBRARY.parent / "CMakeFiles"
    objects = sorted(folder.glob("gk_ladder_*.dir/learn/ladder/*.cu.o"))
    if not objects:
        pytest.skip("the objects of the ladder are not here")
    return {row["kernel"]: row for path in objects for row in ptxas_report.report(path)}


def test_no_rung_uses_local_memory(report, rungs):
    # a source's kernel is named after its first rung; those outside ladder/ are the library's
    own = {}
    for rung in rungs:
        if rung.source.startswith("learn/ladder/"):
            own.setdefault(rung.source, f"ladder_{rung.name}_kernel")
    assert {name.split("<")[0] for name in report} == set(own.values())
    assert not {
        n: r for n, r in report.items() if int(r["local_bytes"]) or int(r["LDL"]) or int(r["STL"])
    }


def test_tensor_cores_are_used_where_the_page_says(report):
    hot = {n: (int(r["FFMA"]), int(r["HMMA"]), int(r["HGMMA"])) for n, r in report.items()}
    assert {n for n, (_, hmma, _) in hot.items() if hmma} == {
        "ladder_mma_kernel",
        "ladder_wmma_kernel",
        "ladder_double_buffer_kernel",
    }
    assert {n for n, (_, _, wgmma) in hot.items() if wgmma} == {
        "ladder_wgmma_kernel",
        "ladder_short_kernel",
        "ladder_cluster_kernel",
        "ladder_persistent_kernel<true>",
        "ladder_persistent_kernel<false>",
    }
    assert all(wgmma in (0, 4) for _, _, wgmma in hot.values())  # a step of 64 of k
    for name, ffma in (
        ("registers", 16 * 64),
        ("vectorised", 16 * 64),
        ("column", 32 * 8),
        ("warp_tile", 16 * 128),
    ):
        assert {hot[f"ladder_{name}_kernel<{dtype}>"][0] for dtype in ("bf16", "float")} == {ffma}


def test_ptxas_has_no_notes_on_wgmma(report):
    logs = sorted((ladder.LIBRARY.parent / "CMakeFiles" / "gk_ladder_90a.dir").rglob("*.cu.o.log"))
    assert len(logs) == 4
    for log in logs:
        assert not re.search(r"\(C(7508|751\d|7602)\)|[1-9]\d* bytes spill", log.read_text()), (
            log.name
        )


# --------------------------------------------------------------------------------------------------
# what it refuses


@pytest.mark.parametrize(
    "m, n, k, name", [(9, 8, 8, "m is 9"), (8, 0, 8, "n is 0"), (8, 8, 2**20 + 8, "k is 1048584")]
)
def test_sizes_are_refused(rungs, m, n, k, name):
    lib = ladder.library()
    for rung in rungs:
        assert lib.gk_ladder_gemm(rung.number, None, None, None, m, n, k, None, None) == 3
        text = f"gk_ladder_gemm: {name}; the ladder takes multiples of 8 from 8 to 1048576"
        assert lib.gk_last_error().decode() == text


@pytest.mark.parametrize("rung", [0, 19, -1])
def test_there_are_eighteen(rungs, rung):
    lib = ladder.library()
    assert lib.gk_ladder_gemm(rung, None, None, None, 8, 8, 8, None, None) == 1
    assert (
        lib.gk_last_error().decode() == f"gk_ladder_gemm: rung is {rung}; there are rungs 1 to 18"
    )


@pytest.mark.gpu
def test_unaligned_matrices_are_refused(rungs):
    whole = torch.zeros(8 * 8 + 1, dtype=BF16, device="cuda")
    odd, fine = whole[1:].view(8, 8), torch.zeros(8, 8, dtype=BF16, device="cuda")
    for rung in rungs:
        for name, args in (
            ("a", (odd, fine, fine)),
            ("b", (fine, odd, fine)),
            ("out", (fine, fine, odd)),
        ):
            with pytest.raises(
                RuntimeError, match=f"gk_ladder_gemm: {name} is at .*16-byte aligned"
            ):
                ladder.gemm(rung.number, *args)


# --------------------------------------------------------------------------------------------------
# what it computes

# around the tiles of every rung: 32, 128, 256, and steps of 16, 32, 64 of k; less than one tile,
# and many
SIZES = [
    (8, 8, 8),
    (128, 256, 64),
    (136, 264, 72),
    (120, 248, 56),
    (264, 520, 200),
    (1000, 776, 328),
    (2048, 1024, 512),
]


@pytest.mark.gpu
@pytest.mark.parametrize("m, n, k", SIZES)
@pytest.mark.parametrize("number", NUMBERS)
def test_against_float64(rungs, number, m, n, k):
    """Operands between bands of NaN, a result of NaN before, nothing written around it, the same
    bits twice."""
    gen = generator("ladder", m, n, k)
    (a, _), (b, _) = (
        guarded(randn(gen, *shape, dtype=BF16, device="cuda")) for shape in ((m, k), (k, n))
    )
    out, untouched = guarded(torch.full((m, n), float("nan"), dtype=BF16, device="cuda"))
    unchanged = snapshot(a, b)
    ladder.gemm(number, a, b, out)
    again = ladder.gemm(number, a, b)
    untouched()
    unchanged()
    assert_close_as(torch.matmul(a, b), out, a.double() @ b.double(), f"rung {number}")
    assert same_bits(out, again)


@pytest.mark.gpu
@pytest.mark.parametrize("m, n, k", SIZES)
@pytest.mark.parametrize("number", ladder.F32)
def test_float32_against_float64(rungs, number, m, n, k):
    gen = generator("ladder f32", m, n, k)
    (a, _), (b, _) = (
        guarded(randn(gen, *shape, dtype=torch.float32, device="cuda"))
        for shape in ((m, k), (k, n))
    )
    out, untouched = guarded(torch.full((m, n), float("nan"), device="cuda"))
    ladder.gemm(number, a, b, out)
    untouched()
    want = a.double() @ b.double()
    assert (out - want).abs().max() < 2e-6 * k**0.5 * want.abs().max()


def test_tensor_cores_have_no_float32(rungs):
    lib = ladder.library()
    for rung in rungs:
        status = lib.gk_ladder_gemm_f32(rung.number, None, None, None, 8, 8, 8, None)
        if lib.gk_last_error().decode().startswith("gk_ladder_gemm_f32"):
            assert status == 3 and rung.number not in ladder.F32
        assert status != 0


@pytest.mark.gpu
@pytest.mark.parametrize("number", [8, 9, 10, 11, 12, 18])
def test_many_tiles_a_cluster(rungs, number):
    """Several rounds of the ring and of tiles, an odd number of rows of tiles: a pair's second tile
    lies outside."""
    gen = generator("ladder many", number)
    a, b = (
        randn(gen, *shape, dtype=BF16, device="cuda")
        for shape in ((128 * 33, 520), (520, 256 * 9 + 8))
    )
    assert_close_as(
        torch.matmul(a, b), ladder.gemm(number, a, b), a.double() @ b.double(), f"rung {number}"
    )


@pytest.mark.gpu
def test_runs_in_a_graph(rungs):
    a, b = (
        randn(generator("ladder graph", i), 256, 256, dtype=BF16, device="cuda") for i in range(2)
    )
    want = [ladder.gemm(r.number, a, b) for r in rungs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [ladder.gemm(r.number, a, b) for r in rungs]
    graph.replay()
    assert all(same_bits(x, y) for x, y in zip(want, got))
