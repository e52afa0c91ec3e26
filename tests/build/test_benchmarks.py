# SPDX-License-Identifier: BSD-3-Clause
"""The benchmarks' own logic: which peer a ratio is against, how rows are stored, and where they
appear in plots.
"""

import importlib.machinery
import itertools
import math
import operator
import os
import statistics
import sys

import pytest
import torch

from torch_gpukern import results

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@pytest.fixture
def bench(monkeypatch):
    """Imports a module of benchmarks/, which is not a package."""
    monkeypatch.syspath_prepend(os.path.join(ROOT, "benchmarks"))
    yield importlib.import_module
    for name in (
        "bench_flash_attn",
        "bench_gemm",
        "bench_integrations",
        "bench_model",
        "bench_moe",
        "bench_moe_recipes",
        "bench_recipes",
        "bench_whole_steps",
        "engine",
        "metrics",
        "models",
        "sampling",
        "gemm_random",
        "shapes",
        "harness",
        "rounds",
        "devices",
        "plots",
    ):
        sys.modules.pop(name, None)


class FakeDevice:
    """A device whose times are the values that the calls return."""

    most_calls = 4
    carries_over = False

    host_bound = False

    def sync(self):
        pass

    def forget(self):
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
    """A bench cannot choose its peer."""
    harness = bench("harness")
    peaks = {"bf16": 1.0, "read": 1.0}
    row = harness.measure(fake_case(harness), FakeDevice(), peaks, harness.QUICK)
    assert row.best_peer == "fast" and row.ratio == 0.5 and row.host_bound == "no"
    assert "against" not in harness.Case.__dataclass_fields__


class DriftingDevice(FakeDevice):
    """A device whose times grow by a quarter with each block."""

    now = 1.0

    def time_block(self, call, calls, live=False):
        self.now *= 1.25
        self.host_bound = live
        return call() * self.now


def test_a_ratio_is_of_the_medians_that_stand_beside_it(bench):
    """If the clock drifts, ratios within rounds have another median. Their half interquartile range
    is the spread. A row is bound by the host if ours or the fastest peer waited for it; slower
    peers do not count."""
    harness = bench("harness")
    peaks = {"bf16": 1.0, "read": 1.0}
    row = harness.measure(fake_case(harness, live=["fast"]), DriftingDevice(), peaks, harness.QUICK)
    assert row.ratio == row.peers["fast"]["us"] / row.us
    assert row.ratio_spread > 0.05 and row.host_bound == "yes"
    other = harness.measure(
        fake_case(harness, live=["slow"]), DriftingDevice(), peaks, harness.QUICK
    )
    assert other.host_bound == "no"


def test_a_plan_for_an_input_is_not_timed(bench):
    """Some peers plan for an input when they first see it, and a case rotates over many inputs."""
    harness = bench("harness")
    made, planned = itertools.count(), set()

    def plans(x):
        first = x.item() not in planned
        planned.add(x.item())
        return 4000.0 if first else 1.0

    case = fake_case(
        harness,
        make=lambda: (torch.tensor([float(next(made))]),),
        peers={"slow": lambda x: 6.0, "plans": plans},
        live=["plans", "not installed"],
        rotate=True,
    )
    row = harness.measure(case, FakeDevice(), {"bf16": 1.0, "read": 1.0}, harness.QUICK)
    assert len(planned) == 256 and row.peers["plans"]["us"] == 1


class PoweredDevice(FakeDevice):
    """A model of a GPU at its power limit. A call returns (clocks, the clock that its power
    allows). A block moves the clock half the way to that value, and is timed with the mean of the
    clocks at its start and end."""

    carries_over = True
    clock = 1500.0

    def estimate(self, call):
        return 1.0

    def time_block(self, call, calls, live=False):
        clocks, allowed = call()
        before, self.clock = self.clock, (self.clock + allowed) / 2
        self.seen = (before + self.clock) / 2
        return clocks / self.seen

    def state(self):
        return self.seen, 700.0


def contestants(**changed):
    """The same kernel entered twice, between one that draws much power and one that draws
    little."""
    calls = {"gpukern": (3e5, 1500), "heavy": (6e5, 1400), "cool": (9e5, 1900), "same": (3e5, 1500)}
    return {name: lambda x, does=does: does for name, does in (calls | changed).items()}


def test_the_same_kernel_twice_is_level_in_a_model(bench):
    """Both entries get the same time, whatever runs before them. With a rotated order, in which
    ours always follows the heavy one, they do not."""
    rounds = bench("rounds")
    device = PoweredDevice()
    calls = {name: lambda fn=fn: fn(None) for name, fn in contestants().items()}

    def level(blocks):
        return statistics.median(
            b.us / a.us for a, b in zip(blocks["gpukern"], blocks["same"], strict=True)
        )

    assert level(rounds.interleave(device, calls, rounds.FULL)) == pytest.approx(1, abs=0.01)
    cyclic = {name: [] for name in calls}
    order = ["heavy", "gpukern", "cool", "same"]
    for _ in range(31):
        for name in order:
            cyclic[name].append(rounds.Block(device.time_block(calls[name], 1), *device.state()))
        order.append(order.pop(0))
    assert abs(level(cyclic) - 1) > 0.05


def test_a_ratio_in_clocks_stands_beside_the_one_in_time(bench):
    """A peer that draws less power runs at a higher clock. It is faster in time, but not in
    clocks."""
    harness = bench("harness")
    calls = contestants(same=(3e5, 1800))
    case = fake_case(harness, ours=calls.pop("gpukern"), peers=calls)
    row = harness.measure(case, PoweredDevice(), {"bf16": 1.0, "read": 1.0}, harness.FULL)
    assert row.best_peer == "same" and row.ratio < 0.95 and row.ratio_clocks == pytest.approx(1)
    assert row.clock_mhz + 100 < row.peers["same"][
        "clock_mhz"
    ] and "(1.00 in clocks)" in harness.format_row(row)


@pytest.mark.gpu
def test_the_same_kernel_twice_is_level(bench):
    """The same on the device: within 1 %, beside a product that draws all the power and a copy that
    does not. A wrong order favours one side each time; other work on the device does not."""
    harness = bench("harness")
    x, y = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for n in (4096, 8192))
    peers = {"same": lambda _: x @ x, "heavy": lambda _: y @ y, "cool": lambda _: y.clone()}
    kernels = {"gpukern": lambda _: x @ x, **peers}
    calls = {name: lambda fn=fn: fn(None) for name, fn in kernels.items()}
    rounds, device = sys.modules["rounds"], bench("devices").Cuda()

    def ratio():
        blocks = rounds.interleave(device, calls, harness.Effort(20_000, 31, 31, 9.0))
        assert all(block.clock_mhz > 0 for block in blocks["gpukern"])
        return statistics.median(
            b.us / a.us for a, b in zip(blocks["gpukern"], blocks["same"], strict=True)
        )

    tries = (ratio() for _ in range(3))
    assert any(x == pytest.approx(1, abs=0.01) for x in tries)


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
    """Peers get and return [B, S, H, D], and anything beside the result is dropped."""
    import types

    def flash_attn_func(q, k, v, causal=False):
        assert q.shape == (2, 9, 4, 8)
        heads = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=causal).transpose(
            1, 2
        )
        return (out, None) if version == "flash_attn_4" else out

    module = types.SimpleNamespace(flash_attn_func=flash_attn_func)
    for name in ("flash_attn_interface", "flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, module)
    q, k, v = (torch.randn(2, 4, 9, 8) for _ in range(3))
    out = getattr(bench("bench_flash_attn"), version)(causal)(q, k, v)
    assert torch.equal(
        out, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    )


def test_quack_is_a_peer_where_it_imports(bench, monkeypatch):
    """quack runs in its own configuration, or tuned, or not at all."""
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
    assert place("forward full d64, f32", "B8 H4 S512 d64") == (
        "forward full d64, f32",
        (512,),
        "sequence length",
    )
    assert place("tall bf16", "NT 512x4096x28672") == (
        "tall bf16, NT, K 4096, N 28672",
        (512,),
        "M",
    )
    assert place("skinny 28672x4096", "NT 16x4096x28672") == ("skinny 28672x4096, NT", (16,), "M")
    assert place("square bf16", "512") == ("square bf16", (512,), "M = N = K")
    assert place("decode", "B8 context 8192 page 16") == (
        "decode, page 16",
        (8, 8192),
        "sequences x keys",
    )
    assert place("decode", "compiled") == ("decode", (), "")


def test_every_provider_is_a_line(bench, tmp_path):
    """Also a provider that has only some of the sizes."""
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
    lines = {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
        for line in axes.get_lines()
    }
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


def test_no_two_providers_of_a_picture_share_a_color(bench):
    plots = bench("plots")
    for path, (_, panels) in plots.all_plots().items():
        spare = {}
        names = list(
            dict.fromkeys(
                name for rows in panels.values() for row in rows for name in plots.rates(row)
            )
        )
        colors = [plots.color_of(name, spare) for name in names]
        assert len(set(colors)) == len(names), (path.name, dict(zip(names, colors)))


def lab(color):
    """CIELAB of "#rrggbb" under D65, in which 2 is a difference that is just seen."""
    linear = [
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        for value in (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    ]
    rows = (
        (0.4124564, 0.3575761, 0.1804375, 0.95047),
        (0.2126729, 0.7151522, 0.0721750, 1.0),
        (0.0193339, 0.1191920, 0.9503041, 1.08883),
    )
    x, y, z = (
        t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116
        for *factors, white in rows
        for t in [sum(map(operator.mul, factors, linear)) / white]
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def test_lines_of_one_panel_are_easy_to_tell_apart(bench):
    plots = bench("plots")
    assert math.dist(lab("#8c564b"), lab("#ad494a")) < 30  # two browns
    assert math.dist(lab("#000000"), lab("#ffffff")) == pytest.approx(100, abs=0.01)
    _, panels = plots.all_plots()[plots.SPEED]
    spare = {}
    for panel, rows in panels.items():
        names = dict.fromkeys(name for row in rows for name in plots.rates(row))
        for pair in itertools.combinations(names, 2):
            a, b = (lab(plots.color_of(name, spare)) for name in pair)
            assert math.dist(a, b) >= 30, (panel, pair)


def test_the_picture_shows_the_gpu_that_was_measured_last(bench):
    def result(device, date, rate, **said):
        row = {
            "group": "square bf16",
            "label": "512",
            "dtype": "bf16",
            "unit": "GFLOP/s",
            "rate": rate,
        }
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


@pytest.mark.parametrize("kind", ("cpu", "cuda"))
def test_random_products_are_those_of_their_seed(bench, kind):
    """Sizes are log-uniform multiples of 8 in all layouts and dtypes, and a longer draw starts with
    a shorter one."""
    module = bench("gemm_random")
    drawn = module.draw_shapes(kind, 2000, 5)
    assert drawn[:100] == module.draw_shapes(kind, 100, 5) != module.draw_shapes(kind, 100, 6)
    sizes = [size for x in drawn for size in (x.m, x.n, x.k)]
    assert all(size % 8 == 0 and 64 <= size <= 8192 for size in sizes)
    middle = sum(size < 64 * 128**0.5 for size in sizes) / len(sizes)
    assert 0.45 < middle < 0.55
    for value, share in module.DTYPES_OF[kind].items():
        assert abs(sum(x.dtype == value for x in drawn) / len(drawn) - share) < 0.05
    assert {x.layout for x in drawn} == set(module.LAYOUTS)


def test_fifth_percentile(bench):
    module = bench("gemm_random")
    assert module.fifth_percentile([0.5]) == 0.5
    assert module.fifth_percentile([i / 100 for i in range(101)]) == pytest.approx(0.05)


def test_intensity_is_flops_over_bytes(bench):
    module = bench("gemm_random")
    assert module.intensity("NT 64x128x256", 2) == 2 * 64 * 128 * 256 / (
        2 * (64 * 128 + 128 * 256 + 64 * 256)
    )
    assert module.intensity("NN 64", 4) == module.intensity("NN 64x64x64", 4) == 2 * 64 / (4 * 3)


def test_random_products_report_their_spread(bench, monkeypatch, capsys, tmp_path):
    """The report names the ten worst, worst first, with the kernel that served each. Results are
    stored by seed, beside the other results."""
    import types

    module = bench("gemm_random")
    harness = sys.modules["harness"]
    rows = []
    for i in range(20):
        times = {"ours": lambda x: 2.0, "peers": {"torch.matmul": lambda x, i=i: 2.0 - i / 20}}
        case = fake_case(harness, label=f"NN 64x{64 + 8 * i}x64", **times)
        rows.append(harness.measure(case, FakeDevice(), {"bf16": 1.0, "read": 1.0}, harness.QUICK))
    facts = []
    device = types.SimpleNamespace(kind="cuda", name=lambda: "A GPU")
    args = types.SimpleNamespace(seed=3, save=True, part=False, budget=None)
    run = types.SimpleNamespace(
        rows=rows,
        facts=facts,
        device=device,
        args=args,
        left_out=0,
        stamp=lambda: {"date": "", "command": "", "peaks": {}},
    )
    run.fact = lambda group, label, value, *rest: facts.append(
        dict(group=group, label=label, value=value, unit="x")
    )
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(module, "draw_ratios", lambda *_: False)
    module.report(run, {"NN 64x216x64 bf16": "gemm_worst"})
    worst = capsys.readouterr().out.split("ten worst:")[1].strip().splitlines()
    assert (
        worst[0].split()[:3] == ["NN", "64x216x64", "bf16"]
        and "gemm_worst" in worst[0]
        and "64x144x64" in worst[9]
    )
    found = {fact["label"]: fact["value"] for fact in facts}
    assert found["worst"] == pytest.approx(0.525) and found["5th percentile"] == pytest.approx(
        0.54875
    )
    stored = results.load(tmp_path / "a-gpu.csv")["benches"]["gemm_random_3"]
    assert len(stored["rows"]) == 20 and "gemm_worst" in {row["note"] for row in stored["rows"]}
    run.left_out, args.budget = 1, 60.0
    (tmp_path / "a-gpu.csv").unlink()
    module.report(run, {})
    assert "nothing is stored" in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_lora_rows_are_its_six_products(bench, monkeypatch):
    """The rows are y, dx and both gradients of an adapter in their own layouts. Memory-bound rows
    find cold operands."""
    import types

    module = bench("bench_gemm")
    rows = []
    module.lora(types.SimpleNamespace(add=rows.append), torch.device("cpu"))
    module.router(types.SimpleNamespace(add=rows.append), torch.device("cpu"))
    shapes = sys.modules["shapes"]
    labels = [(row.group, row.label) for row in rows]
    assert len(set(labels)) == len(labels)
    tokens, width = shapes.CUDA_GEMM_LORA_M[0], shapes.CUDA_GEMM_ONE
    for label in (
        ("LoRA forward", f"NT {tokens}x{width}x16"),
        ("LoRA backward", f"NN {tokens}x16x{width}"),
        ("LoRA gradients", f"TN 16x{tokens}x{width}"),
        ("router", f"NT {tokens}x{width}x1"),
    ):
        assert label in labels
    assert all(row.rotate and row.unit == "GB/s" for row in rows)
    assert {group for group, _ in labels} <= set(shapes.CUDA_GEMM_BARS)


def test_lora_step_is_that_of_merged_weights(bench):
    """The loss equals that of weights with their adapters added, and every factor of every adapter
    has a gradient."""
    module = bench("bench_model")
    config = module.Config(
        context=16, layers=2, dim=64, heads_q=2, heads_kv=1, head_dim=32, hidden=96
    )
    case = module.lora_case("eager", 8, torch.device("cpu"), config)
    inputs = case.make()
    want = case.reference(*inputs)
    for step in (case.ours, *case.peers.values()):
        try:
            loss, *grads = step(*inputs)
        except RuntimeError:  # the CPU lacks this backend
            assert step is not case.ours and step is not case.peers["torch built-ins"]
            continue
        assert abs(loss.item() - want.item()) < 0.05 * want.item()
        assert len(grads) == 2 * 4 * config.layers and all(g.abs().max() > 0 for g in grads)


def test_rows_that_are_not_asked_for_are_not_made(bench, monkeypatch, capsys):
    """A model of 1.0e9 weights takes seconds to make. --layers shortens it, and the label says
    so."""
    module, harness = bench("bench_model"), bench("harness")

    class Device(FakeDevice):
        kind, device = "cuda", torch.device("cpu")
        name = driver = str

        def peaks(self):
            return {"bf16": 1.0, "read": 1.0}

    made = []

    def large_case(label, prefill, device, config):
        group, row = module.large_row(label, prefill)
        made.append((group, row, config.layers))
        return fake_case(harness, group=group, label=row + module.depth(config))

    monkeypatch.setattr(module, "large_case", large_case)
    for name in ("gradient_case", "decode_case", "vocabulary_case", "lora_case"):
        monkeypatch.setattr(module, name, None)
    monkeypatch.setattr(module, "open_device", lambda kind: Device())
    command = ["bench_model.py", "--device", "cuda", "--quick", "--layers", "3", "--only", "large"]
    monkeypatch.setattr(
        sys, "argv", [*command, "--rows", "8192 tokens, compiled", "2048 tokens, compiled"]
    )
    module.main()
    assert made == [
        ("large, prefill", "8192 tokens, compiled", 3),
        ("large, gradient step", "4 x 2048 tokens, compiled", 3),
    ]
    assert "4 x 2048 tokens, compiled, 3 layers" in capsys.readouterr().out


def test_a_slow_first_call_is_told_of(bench, monkeypatch, capsys):
    harness = bench("harness")
    monkeypatch.setattr(harness, "SLOW_FIRST_CALL", -1.0)
    harness.able(fake_case(harness, peers={"other": lambda x: 3.0}), (torch.ones(1),), FakeDevice())
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"group 8: the first call of {name} took 0 s" for name in ("gpukern", "other")]


@pytest.mark.parametrize("prefill", (0, 12))
def test_a_large_row_computes_what_its_reference_does(bench, monkeypatch, prefill):
    module = bench("bench_model")
    monkeypatch.setattr(module, "LARGE_SEQ", 16)
    config = module.Config(
        context=16, layers=2, dim=64, heads_q=2, heads_kv=1, head_dim=32, hidden=96
    )
    case = module.large_case("eager", prefill, torch.device("cpu"), config)
    inputs = case.make()
    for step in (case.ours, case.peers["torch built-ins"]):
        assert (
            bench("harness").relative_error(case.compare(step(*inputs)), case.reference(*inputs))
            < 0.03
        )


def test_a_step_of_many_outputs_is_that_of_the_logits(bench):
    """Ours and torch's own have the loss and the gradients of cross_entropy over float32 logits."""
    module, harness = bench("bench_model"), bench("harness")
    config = module.Config(
        vocab=1000,
        grams=1,
        context=16,
        layers=1,
        dim=64,
        heads_q=2,
        heads_kv=1,
        head_dim=32,
        hidden=96,
    )
    case = module.vocabulary_case("eager", torch.device("cpu"), config)
    assert case.label == "32 tokens, 1000 outputs, eager, 1 layers"
    inputs = case.make()
    want = case.peers.pop("torch built-ins, float32")(*inputs)
    assert harness.relative_error(want[0], case.reference(*inputs)) < 1e-5
    assert len(want) > 1 and all(g.abs().max() > 0 for g in want[1:])
    for step in (case.ours, *case.peers.values()):
        assert harness.relative_error(step(*inputs), [x.double() for x in want]) < 0.05


def test_a_captured_step_keeps_what_its_graph_reads(bench, monkeypatch):
    """The step owns its static cache, so that its memory is not reused before the last replay."""
    import contextlib
    import gc
    import types
    import weakref

    module = bench("bench_integrations")
    replays = []
    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    cuda = types.SimpleNamespace(
        Stream=lambda: stream,
        current_stream=lambda: stream,
        stream=lambda stream: contextlib.nullcontext(),
        graph=lambda graph: contextlib.nullcontext(),
        CUDAGraph=lambda: types.SimpleNamespace(replay=lambda: replays.append(1)),
    )
    monkeypatch.setattr(module, "torch", types.SimpleNamespace(cuda=cuda))
    cache = torch.zeros(1)
    there = weakref.ref(cache)
    replay = module.graphed(lambda cache=cache: cache, "cuda")
    del cache
    gc.collect()
    replay()
    assert replays == [1] and there() is not None
    del replay
    gc.collect()
    assert there() is None


def test_integrations_store_each_row_as_it_comes(bench, monkeypatch, tmp_path):
    """A step that fails is stored by its name, and the others remain."""
    module = bench("bench_integrations")

    def failing(self, family, model):
        raise RuntimeError("no\nmore")

    monkeypatch.setattr(module.Bench, "training", failing)
    command = [
        "bench_integrations.py",
        "--device",
        "cpu",
        "--only",
        "mistral",
        "--seconds",
        "0.01",
        "--save",
        str(tmp_path),
    ]
    monkeypatch.setattr(sys, "argv", command)
    module.main()
    stored = results.load(tmp_path / "cpu.csv")["benches"]["transformers"]
    assert stored["torch"] == torch.__version__ and stored["command"].endswith(
        "--device cpu --seconds 0.01 --only mistral"
    )
    (prefill,), (training,) = stored["rows"], stored["facts"]
    assert (prefill["group"], prefill["label"]) == ("mistral", "prefill 2 x 128") and prefill[
        "error"
    ] < 1e-5
    worst = [float(x) for x in prefill["note"].removeprefix("worst token ").split("/")]
    assert max(worst) < 1e-5 and prefill["ratio"] == pytest.approx(
        results.ratio_of(prefill), rel=1e-3
    )
    assert (training["group"], training["label"], training["note"]) == (
        "mistral",
        "training step",
        "no more",
    )


def test_a_run_of_every_instance_is_judged(bench):
    """The report has the chosen and the best instances beside cuBLAS, and the choice that loses the
    most first."""
    module = bench("gemm_instances")
    shape = {"m": 64, "n": 128, "k": 256, "dtype": "bf16", "layout": "NT"}
    products = [
        shape | {"chosen": "x", "cublas_us": 2.0, "us": {"x": 2.0, "y": 2.0}},
        shape | {"chosen": "x", "cublas_us": 2.0, "us": {"x": 4.0, "y": 1.0}},
    ]
    lines = module.judged({"products": products})
    assert "geomean 0.707" in lines[0] and "worst 0.500" in lines[0] and "geomean 1.414" in lines[1]
    assert lines[2].split() == ["NT", "64x256x128", "bf16", "0.25", "of", "y", "by", "x"]


@pytest.mark.gpu
def test_every_instance_of_a_product_is_timed(bench):
    module = bench("gemm_instances")
    for dtype in module.NAMES:
        problem = module.problem_of(sys.modules["gemm_random"].Shape(256, 128, 512, "NT", dtype))
        found = module.times_of(problem, torch.device("cuda"))
        assert (
            found["chosen"] in found["us"]
            and found["cublas_us"] > 0
            and all(us > 0 for us in found["us"].values())
        )
        assert problem.explain(problem.inputs(torch.device("cuda")))["instance"] == found["chosen"]


def test_tokens_by_recipe(bench, monkeypatch, capsys):
    """There is a figure for each recipe and number of requests, and the model is unchanged after
    each."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    path = list(sys.path)
    module = bench("bench_recipes")
    monkeypatch.setattr(sys, "path", path)

    class Device(FakeDevice):
        kind = "cpu"
        name = driver = str

        def peaks(self):
            return {"bf16": 1.0, "read": 1.0}

    monkeypatch.setattr(module, "open_device", lambda kind: Device())
    monkeypatch.setattr(module, "STEPS", {True: 2})
    command = [
        "bench_recipes.py",
        "--quick",
        "--model",
        "tiny",
        "--recipes",
        "w4",
        "--requests",
        "1",
        "2",
    ]
    monkeypatch.setattr(sys, "argv", command)
    module.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if "tokens/s" in line]
    names = ("bfloat16", "w4", "bfloat16 again")
    assert [line.split("tiny ")[1].rsplit(" requests")[0] for line in lines] == [
        f"{r}, {n}" for r in names for n in (1, 2)
    ]
    off = [float(line.split("moved by ")[1].split(" %")[0]) for line in lines]
    assert off[:2] == off[-2:] == [0, 0] and all(0.2 < x < 40 for x in off[2:-2]), off


def test_experts_by_recipe(bench, monkeypatch, capsys):
    """A line for each number of tokens, with an error as the recipes have it."""
    path = list(sys.path)
    module = bench("bench_moe_recipes")
    monkeypatch.setattr(sys, "path", path)
    monkeypatch.setattr(module, "SIZES", {"cpu": {"tiny": (64, 64, 4, 2)}})
    recipes = ["fp8", "w4", "mxfp4"]
    command = ["bench_moe_recipes.py", "--tokens", "1", "9", "--recipes", *recipes]
    monkeypatch.setattr(sys, "argv", command)
    module.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if "tokens:" in line]
    assert [line.split()[0] for line in lines] == ["1", "9"]
    for line in lines:
        parts = line.split(" | ")[1:]
        assert [part.split()[0] for part in parts] == recipes
        errors = [float(part.split("error ")[1]) for part in parts]
        assert 0.01 < errors[0] < 0.08 and all(1e-4 < e < 0.02 for e in errors[1:]), line


def test_a_run_of_some_rows_stores_them_among_the_others(bench, monkeypatch, tmp_path, capsys):
    """With --only or --rows, and --save. The groups that they belong to are judged again."""
    harness = bench("harness")
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    device = FakeDevice()
    device.peaks, device.name = lambda: {"bf16": 1.0, "read": 1.0}, lambda: "a device"
    device.driver = lambda: "1"
    bars = {name: harness.Bar(geomean=1.0) for name in ("a", "b")}

    def run(*words, us=2.0, takes_parts=True):
        made = harness.Run("fake", harness.arguments("fake", words), device)
        made.takes_parts = takes_parts
        for group in ("a", "b"):
            for label in ("8", "16"):
                for dtype in ("bf16", "f32"):
                    case = fake_case(harness, group=group, label=label, dtype=dtype)
                    case.ours = lambda x: us
                    device.peaks = lambda: {"bf16": 1.0, "f32": 1.0, "read": 1.0}
                    made.peaks = device.peaks()
                    made.add(case)
        made.finish(bars)
        return capsys.readouterr().out

    def stored():
        found = results.stored(tmp_path, "a device")["fake"]
        times = {(row["group"], row["label"], row["dtype"]): row["us"] for row in found["rows"]}
        return times, {g["group"]: (g["geomean"], g["verdict"]) for g in found["groups"]}

    run()
    times, groups = stored()
    assert set(times.values()) == {2.0} and len(times) == 8
    assert groups["a"] == (0.5, "missed") and list(groups) == [
        "a", "a, bf16 alone", "a, f32 alone", "b", "b, bf16 alone", "b, f32 alone"
    ]  # fmt: skip
    for words in (["--only", "a"], ["--rows", "8"], ["--only", "a", "--quick"]):
        run(*words, us=1.0)  # nobody asked for it to be stored
        assert stored() == (times, groups)
    run("--only", "a", "--rows", "16 bf16", "--quick", "--save", us=0.5)
    times, groups = stored()
    assert {key for key, us in times.items() if us == 0.5} == {("a", "16", "bf16")}
    assert len(times) == 8 and set(times.values()) == {0.5, 2.0}
    assert groups["a"][0] == pytest.approx((0.5**3 * 2) ** 0.25, rel=1e-3)
    assert groups["a, bf16 alone"][0] == 1.0 and groups["a, f32 alone"][0] == 0.5
    assert groups["b"] == (0.5, "missed") and list(groups)[3] == "b"
    # a budget that is spent before the first row leaves nothing in
    assert "the others are stored" in run("--budget", "1e-9", "--save", us=0.1)
    assert stored()[0] == times
    said = run("--only", "a", "--save", us=0.25, takes_parts=False)
    assert "a part of it is not stored" in said and stored()[0] == times
    run("--save", us=4.0)
    assert set(stored()[0].values()) == {4.0}


def test_both_sides_of_a_whole_step_begin_before_either_ends(bench):
    """They compile at the same time. A side that fails leaves no answer of the other in its pipe."""
    import multiprocessing

    module = bench("bench_whole_steps")
    pairs = [multiprocessing.Pipe() for _ in range(2)]
    here, there = ([pair[i] for pair in pairs] for i in range(2))
    for pipe, answer in zip(there, ((False, "no kernel"), (True, "the other's"))):
        pipe.send(answer)
    with pytest.raises(module.Failed, match="no kernel"):
        module.ask_all(here, "begin", "prefill")
    assert [pipe.recv() for pipe in there] == [("begin", "prefill")] * 2
    for pipe, answer in zip(there, (1, 2)):
        pipe.send((True, answer))
    assert module.ask_all(here, "begin", "prefill") == [1, 2]


def test_whole_steps_resumes_behind_the_rows_of_today(bench):
    """Rows of another day or dtype are measured again."""
    module = bench("bench_whole_steps")
    names = module.row_names("full")
    first, step, answer = names[0], names[4], names[-1]

    def row(name, **more):
        group = next(g for g in ("prefill", "gradient step", "generate") if name.startswith(g))
        label = name.removeprefix(group).strip(" ,")
        return {"group": group, "label": label, "dtype": "bf16"} | more

    stored = {"date": "2026-11-30", "rows": [row(first), row(step), row(answer)]}
    left = module.not_stored(names, stored, "bf16", "2026-11-30")
    assert left == [n for n in names if n not in (first, step, answer)]
    assert module.not_stored(names, stored, "f32", "2026-11-30") == names
    stored["rows"][1]["date"] = "2026-11-29"
    left = module.not_stored(names, stored, "bf16", "2026-11-30")
    assert left == [n for n in names if n not in (first, answer)]
    assert module.not_stored(names, None, "bf16", "2026-11-30") == names


@pytest.mark.parametrize("terminal", (True, False))
def test_a_run_moves_a_bar_on_a_terminal(bench, terminal, monkeypatch, capsys):
    """The bar's length is the number of rows that the command's own --list names."""
    pytest.importorskip("tqdm")
    harness = bench("harness")
    peaks = {"bf16": 1.0, "read": 1.0}
    script = os.path.join(ROOT, "benchmarks", "bench_scaled_gemm.py")
    monkeypatch.setattr(sys, "argv", [script, "--only", "int8"])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    measured = harness.measure(fake_case(harness), FakeDevice(), peaks, harness.QUICK)
    monkeypatch.setattr(harness, "measure", lambda *args: measured)
    device = FakeDevice()
    device.peaks, device.name = lambda: peaks, lambda: "a device"
    run = harness.Run("fake", harness.arguments("fake", ["--quick"]), device)
    run.add(fake_case(harness))
    run.finish({})
    out, err = capsys.readouterr()
    assert harness.format_row(measured) in out
    if terminal:
        rows = harness.count_rows()
        assert rows > 1 and f"| 1/{rows} " in err
    else:
        assert err == ""
