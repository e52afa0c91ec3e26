"""What the benchmarks say: against whom a ratio is, and where a row stands in a plot."""

import importlib.machinery
import os
import sys

import pytest
import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@pytest.fixture
def bench(monkeypatch):
    """Imports a module of benchmarks/, which is no package."""
    monkeypatch.syspath_prepend(os.path.join(ROOT, "benchmarks"))
    yield importlib.import_module
    for name in ("bench_flash_attn", "bench_gemm", "shapes", "harness", "devices", "plots"):
        sys.modules.pop(name, None)


class FakeDevice:
    """Times are what the calls return."""

    most_calls = 4

    def sync(self):
        pass

    def state(self):
        return 0.0, 0.0

    def can_replay(self, call):
        return True

    def estimate(self, call):
        return call()

    def time_block(self, call, calls, live=False):
        return call()


def fake_case(harness, **changed):
    options = {
        "group": "group",
        "label": "8",
        "dtype": "bf16",
        "make": lambda: (torch.ones(1),),
        "ours": lambda x: 2.0,
        "peers": {"slow": lambda x: 6.0, "fast": lambda x: 1.0, "other": lambda x: 3.0},
        "reference": None,
        "flops": 4000.0,
        "bytes": 1.0,
    }
    return harness.Case(**options | changed)


def test_a_ratio_is_against_the_fastest_peer(bench):
    """A peer cannot be chosen."""
    harness = bench("harness")
    peaks = {"bf16": 1.0, "read": 1.0}
    row = harness.measure(fake_case(harness), FakeDevice(), peaks, harness.QUICK)
    assert row.best_peer == "fast" and row.ratio == 0.5
    assert "against" not in harness.Case.__dataclass_fields__


def test_a_peer_that_is_not_here_is_left_out(bench, capsys):
    harness = bench("harness")

    def broken(x):
        raise RuntimeError("no such kernel")

    case = fake_case(harness, peers={"fast": broken, "other": lambda x: 3.0}, optional=["fast"])
    row = harness.measure(case, FakeDevice(), {"bf16": 1.0, "read": 1.0}, harness.QUICK)
    assert row.best_peer == "other" and "without fast: no such kernel" in capsys.readouterr().out


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("version", ("flash_attn_3", "flash_attn_4"))
def test_other_projects_get_their_own_layout(bench, version, causal, monkeypatch):
    """[B, S, H, D] in and out, and whatever stands beside the result is left."""
    import types

    def flash_attn_func(q, k, v, causal=False):
        assert q.shape == (2, 9, 4, 8)
        heads = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=causal).transpose(1, 2)
        return (out, None) if version == "flash_attn_4" else out

    module = types.SimpleNamespace(flash_attn_func=flash_attn_func)
    for name in ("flash_attn_interface", "flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, module)
    q, k, v = (torch.randn(2, 4, 9, 8) for _ in range(3))
    out = getattr(bench("bench_flash_attn"), version)(causal)(q, k, v)
    assert torch.equal(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal))


def test_quack_is_a_peer_where_it_imports(bench, monkeypatch):
    """In its own configuration, or tuned, or not at all."""
    import types

    asked = []

    def gemm(a, b, tuned=True):
        asked.append(tuned)
        return a @ b

    module = bench("bench_gemm")
    harness = sys.modules["harness"]
    assert list(module.beside_quack(fake_case(harness, peers={}), "default").peers) == []
    package, interface = types.ModuleType("quack"), types.ModuleType("quack.gemm_interface")
    package.__spec__, interface.gemm = importlib.machinery.ModuleSpec("quack", None), gemm
    monkeypatch.setitem(sys.modules, "quack", package)
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", interface)
    for how, name in (("default", ["quack"]), ("tuned", ["quack, tuned"]), ("none", [])):
        case = module.beside_quack(fake_case(harness, peers={}), how)
        assert list(case.peers) == name == list(case.optional)
        for peer in case.peers.values():
            assert torch.equal(peer(torch.ones(2, 3), torch.ones(3, 2)), torch.full((2, 2), 3.0))
    assert asked == [False, True]


def test_rows_stand_over_their_sizes(bench):
    place = bench("plots").place
    assert place("forward full", "d64 B32 S512") == ("forward full, d64", (512,), "sequence length")
    assert place("forward full d64, f32", "B8 H4 S512 d64") == ("forward full d64, f32", (512,), "sequence length")
    assert place("tall bf16", "NT 512x4096x28672") == ("tall bf16, NT, K 4096, N 28672", (512,), "M")
    assert place("skinny 28672x4096", "NT 16x4096x28672") == ("skinny 28672x4096, NT", (16,), "M")
    assert place("square bf16", "512") == ("square bf16", (512,), "M = N = K")
    assert place("decode", "B8 context 8192 page 16") == ("decode, page 16", (8, 8192), "sequences x keys")
    assert place("decode", "compiled") == ("decode", (), "")


def test_every_provider_is_a_line(bench, tmp_path):
    """Also one that has some of the sizes only."""
    plots = bench("plots")
    rows = [
        {
            "group": "forward full",
            "label": f"d64 B1 S{size}",
            "dtype": "bf16",
            "unit": "GFLOP/s",
            "rate": 2e4,
            "peers": {"SDPA flash": {"rate": 1e4}} | ({"FA3": {"rate": 3e4}} if size > 512 else {}),
        }
        for size in (1024, 512, 2048)
    ]
    pytest.importorskip("matplotlib")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots()
    plots.draw_panel(axes, "panel", rows, {})
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}
    plt.close(figure)
    assert lines == {
        "gpukern": ([0, 1, 2], [20, 20, 20]),
        "SDPA flash": ([0, 1, 2], [10, 10, 10]),
        "FA3": ([1, 2], [30, 30]),
    }
    panels = plots.panels_of(rows)
    assert plots.draw(panels, "title", tmp_path / "plot.png")
    assert plots.digest_in(tmp_path / "plot.png") == plots.digest(panels)
    rows[0]["rate"] *= 2
    assert plots.digest_in(tmp_path / "plot.png") != plots.digest(plots.panels_of(rows))


def test_every_plot_shows_the_committed_results(bench):
    assert bench("plots").main(["--check"]) == 0, "run `make results`"


def test_the_picture_shows_the_gpu_that_was_measured_last(bench):
    def result(device, date, rate, **said):
        row = {"group": "square bf16", "label": "512", "dtype": "bf16", "unit": "GFLOP/s", "rate": rate}
        rows = [row | {"peers": {"another": {"rate": 1.0}}}]
        return {"device": device, "benches": {"gemm": {"date": date, "rows": rows, **said}}}

    results = [
        result("NVIDIA A", "2026-01-02", 1.0),
        result("NVIDIA B", "2026-01-03", 2.0),
        result("NVIDIA C", "2026-01-03", 3.0, note="changed since"),
        result("a CPU", "2026-01-04", 4.0),
    ]
    ((name, rows),) = bench("plots").speed_panels(results).items()
    assert "NVIDIA B" in name and rows[0]["rate"] == 2.0
