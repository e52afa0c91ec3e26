# SPDX-License-Identifier: BSD-3-Clause
"""``gpukern roofline`` on the stored results and on counters."""

from pathlib import Path

import pytest

from torch_gpukern import cli, results
from torch_gpukern.cli.roofline import counted_points, point_of, read_points

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
PEAKS = {"bf16": 1000.0, "read": 10.0}  # the ridge is at 100


def row(**changes):
    return {
        "group": "square",
        "label": "300",
        "dtype": "bf16",
        "us": 1.0,
        "rate": 500.0,
        "unit": "GFLOP/s",
        "roofline_percent": 50.0,
    } | changes


def test_intensity_and_bound_of_a_row():
    assert point_of("gemm", row(), PEAKS).intensity == pytest.approx(100)  # 2 N^3 over 6 N^2 bytes
    # 80 % of the roofline at 20 % of the peak: 8 of 10 GB/s, so 25 FLOPs a byte, whatever the label
    low = point_of("model", row(rate=200.0, roofline_percent=80.0, label="eager"), PEAKS)
    assert low.intensity == pytest.approx(25) and low.bound == "memory"
    skinny = point_of("gemm", row(unit="GB/s", rate=8.0, label="NT 1x4096x4096"), PEAKS)
    assert skinny.intensity == pytest.approx(1, rel=1e-3) and skinny.gflops == pytest.approx(
        8, rel=1e-3
    )
    attention = point_of("flash_attn", row(group="forward causal", label="d64 B2 S1024"), PEAKS)
    assert attention.intensity == pytest.approx(1024 / 2 / 2) and attention.bound == "compute"
    assert point_of("model", row(label="eager"), PEAKS) is None


def test_short_calls_are_bound_by_latency():
    """A call is short if its ceilings allow less time than a kernel that does nothing takes. Its
    intensity does not matter."""
    # at half of its roofline: 1.95 us
    assert point_of("gemm", row(us=3.9), PEAKS, 2.0).bound == "latency"
    assert point_of("gemm", row(us=4.1), PEAKS, 2.0).bound == "compute"
    low = row(us=100.0, roofline_percent=1.0, unit="GB/s", rate=0.1, label="NT 1x64x64")
    assert (
        point_of("gemm", low, PEAKS, 2.0).bound == "latency"
        and point_of("gemm", low, PEAKS).bound == "memory"
    )
    _, _, points, _ = read_points(RESULTS / "nvidia-h200.csv")
    assert {p.bound for p in points} == {"memory", "compute", "latency"}
    _, _, points, _ = read_points(RESULTS / "amd-epyc-2-threads-avx512bf16.csv")
    # a CPU's own cost of a call is not measured
    assert {p.bound for p in points} <= {"memory", "compute"}


def test_intensity_by_counters(capsys):
    """The rungs of learn/ladder. The last one, the library's own gemm, reads the fewest bytes from
    memory."""
    table = str(RESULTS.parent.parent / "learn" / "counters.csv")
    assert (
        cli.main(["roofline", "--counters", table, "--flops", str(2 * 4096**3), "--what", "rung"])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 18 and all(line.startswith("rung ") for line in lines[1:])
    rows = {line[: line.index("  ")]: line.split()[-4:] for line in lines[1:]}
    naive, tuned = (next(v for k, v in rows.items() if k.startswith(f"rung {n} ")) for n in (1, 13))
    assert float(naive[1]) == pytest.approx(2 * 4096**3 / 1189981440, rel=1e-3) and naive[2:] == [
        "295",
        "memory",
    ]
    assert float(tuned[1]) > 500 and tuned[3] == "compute" and float(tuned[0]) < float(tuned[1])


def test_counted_intensities_are_under_the_roofline(tmp_path, capsys):
    """Each rung gives two points, by the bytes of L2 and of memory, under the nominal ceilings. The
    percent of the fastest rung agrees with the counter of the tensor cores."""
    pytest.importorskip("matplotlib")
    table, png, page = (
        RESULTS.parent.parent / "learn" / "counters.csv",
        tmp_path / "r.png",
        tmp_path / "r.html",
    )
    device, points = counted_points(table, 2 * 4096**3, "rung")
    assert (
        len(points) == 34
        and {p.bench for p in points} == {"L2", "memory"}
        and device == "NVIDIA H100 80GB HBM3"
    )
    tuned = next(p for p in points if p.bench == "memory" and p.name.startswith("rung 13 "))
    # the counter of the pipe says 85 to 90
    assert tuned.bound == "compute" and 80 < tuned.percent < 95
    assert all(p.gflops < min(989.4e3, p.intensity * 3350) for p in points if p.bench == "memory")
    words = ["roofline", "--counters", str(table), "--flops", str(2 * 4096**3), "--what", "rung"]
    assert cli.main([*words, "--png", str(png), "--html", str(page)]) == 0
    assert (
        "295" in capsys.readouterr().out
        and png.read_bytes()[:4] == b"\x89PNG"
        and page.read_text().count("<circle") == 34
    )


def test_counters_of_short_kernels_of_uncounted_kernels_and_of_two_devices(tmp_path, capsys):
    """If the ceilings allow less than 2 us, the bound is latency. Kernels that were not counted and
    devices without nominal rates are left out."""
    head = "device,what,sm__cycles_elapsed.max,lts__t_sectors_srcunit_tex.sum,dram__bytes_read.sum"
    rows = [
        "NVIDIA H100 80GB HBM3,small,9000,1000,32000",
        "NVIDIA H100 80GB HBM3,not counted,,,",
        "NVIDIA H100 80GB HBM3,large,9000000,1000000000,32000000000",
        "NVIDIA H200,large,9000000,1000000000,32000000000",
        "another,large,9000000,1000000000,32000000000",
    ]
    table, page = tmp_path / "c.csv", tmp_path / "r.html"
    table.write_text("\n".join([head, *rows]))
    words = ["roofline", "--counters", str(table), "--flops"]
    assert cli.main([*words, "1e9", "--html", str(page)]) == 0
    said = capsys.readouterr().out.splitlines()[1:]
    assert [(line.split()[0], line.split()[-1]) for line in said] == [
        ("small", "latency"),
        ("large", "memory"),
        ("large", "memory"),
    ]
    device, points = counted_points(table, 1e9)
    assert (
        device == "NVIDIA H100 80GB HBM3"
        and [p.name for p in points] == ["small"] * 2 + ["large"] * 2
    )
    assert page.read_text().count("<circle") == 4
    table.write_text("\n".join([head.replace("sm__cycles_elapsed.max", "other"), rows[0]]))
    assert cli.main([*words, "1e9"]) == 0 and cli.main([*words, "1e9", "--html", str(page)]) == 1
    assert "no row '' has sm__cycles_elapsed.max" in capsys.readouterr().err
    for flops in ("0", "-1", "nan", "inf", "many"):
        with pytest.raises(SystemExit):
            cli.main([*words, flops])
        assert "argument --flops: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [[], ["x.csv", "--counters", "x.csv", "--flops", "1"], ["--counters", "x.csv"]]
)
def test_results_or_counters(words, capsys):
    assert cli.main(["roofline", *words]) == 1
    assert "give a file of results, or --counters with --flops" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["nvidia-h200", "nvidia-h100-80gb-hbm3", "amd-epyc-2-threads-avx512bf16"]
)
def test_saved_rows_lie_under_their_ceilings(name, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    _, peaks, points, _ = read_points(RESULTS / f"{name}.csv")
    over = [p for p in points if p.gflops > 1.06 * min(peaks[p.dtype], p.intensity * peaks["read"])]
    saved = results.load(RESULTS / f"{name}.csv")["benches"]
    saved = [
        bench["rows"]
        for name, bench in saved.items()
        if name in ("gemm", "flash_attn", "paged_attn")
    ]  # the benchmarks whose FLOPs and bytes are known
    assert len(points) > 0.6 * sum(map(len, saved)) and not over
    png, page = tmp_path / "r.png", tmp_path / "r.html"
    assert (
        cli.main(["roofline", str(RESULTS / f"{name}.csv"), "--png", str(png), "--html", str(page)])
        == 0
    )
    assert "bound by memory" in capsys.readouterr().out and png.read_bytes()[:4] == b"\x89PNG"
    assert page.read_text().count("<circle") == len(points)


def test_wrong_files(tmp_path, capsys):
    (tmp_path / "x.csv").write_text("{}")
    assert cli.main(["roofline", str(tmp_path / "x.csv")]) == 1
    assert (
        "expected a CSV file whose first line names the columns op, kind" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "changed, said",
    (
        ({"ours": ""}, "line 4: a case of gemm has no ours"),
        (
            {"rate": "", "roofline_percent": ""},
            "line 4: a case of gemm has no rate, roofline_percent",
        ),
        ({"kind": "row"}, "line 4: kind must be device, case, group, fact, peak or run, got 'row'"),
        ({"rate": "fast"}, "line 4: could not convert string to float: 'fast'"),
        ({"peers": "torch.matmul=1"}, "line 4: zip() argument 2 is shorter than argument 1"),
    ),
)
def test_files_without_what_a_row_has_are_refused_by_name(tmp_path, capsys, changed, said):
    path = tmp_path / "rows.csv"
    case = {
        "op": "gemm",
        "kind": "case",
        "ours": "2",
        "unit": "us",
        "rate": "9",
        "rate_unit": "GFLOP/s",
    }
    peak = {"op": "gemm", "kind": "peak", "case": "bf16", "ours": "9"}
    lines = [",".join(results.COLUMNS)]
    for line in (
        {"kind": "device", "case": "any"},
        peak,
        case | {"roofline_percent": "50"} | changed,
    ):
        lines.append(",".join(line.get(name, "") for name in results.COLUMNS))
    path.write_text("\n".join(lines) + "\n")
    assert cli.main(["roofline", str(path)]) == 1
    assert f"roofline: {path}: {said}" in capsys.readouterr().err
