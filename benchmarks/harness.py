# SPDX-License-Identifier: BSD-3-Clause
"""The harness of every benchmark: it times an op beside its peers.

Rules
- Peers run in the same process on the same inputs. Each round runs one block of calls of every
  contestant, in a random order (rounds.py), so that a drift of the clock reaches all of them.
- A ratio is the peer's time over ours, both medians over the rounds. A reader gets the same number
  by dividing two columns of a table. Its spread is half the interquartile range of the ratios of
  single rounds, over their median.
- SM clock and power of every block are recorded. The ratio in clocks stands beside the ratio in
  time.
- The peer of a ratio is the fastest peer of the row.
- A row says whether ours or that peer waited for the host.
- Every row states the largest error over max|ref|, of ours and of the peer, against a float64
  reference.
- Every row states a percent of the roofline: max(FLOPs / peak, bytes / bandwidth) over the time.
  Peak and bandwidth are measured in the same run, as the best of our own loop and of torch's.
- Data is normally distributed. Rows that are bound by memory rotate over more than ROTATE_BYTES of
  inputs, so that no cache holds them.
- A row or a group of rows may have a bar that it must reach. It prints whether the bar was held.
- Times are in us, bandwidths in GB/s, compute in GFLOP/s.
- A run of all rows replaces the lines of its op in benchmarks/results/. A run of some rows (--only,
  --rows, or a --budget that was spent) is stored with --save alone. It replaces the rows that it
  measured, each with its peers, date and command, and judges their groups again. If the fastest
  peer of a stored row did not run, that row stays. A slower peer that did not run leaves the row.

Devices are in devices.py. `Cpu` times a loop of calls. `Cuda` times the replay of a CUDA graph that
holds the same loop.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from devices import DTYPES, ROTATE_BYTES, Cpu, Cuda, open_device
from rounds import FULL, QUICK, Effort, Rotation, interleave
from torch import Tensor

from torch_gpukern import results
from torch_gpukern.cli.terminal import bar_on_terminal

__all__ = [
    "DTYPES",
    "Bar",
    "Case",
    "Run",
    "arguments",
    "isa_shares",
    "open_device",
    "overhead_facts",
]
# Benchmarks measure the default instances, whatever was tuned on this machine. GPUKERN_TUNED=path
# measures tuned ones.
os.environ.setdefault("GPUKERN_TUNED", "off")

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"


# ---- bars ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """The bar that a row or a group must reach. None sets no limit.

    geomean, each: ratios against the fastest peer. share: part of the fastest limit's speed. rate:
    a row's own figure, in its unit. at_least, at_most: the value of a fact. A firm bar has no floor
    below it.
    """

    geomean: float | None = None
    each: float | None = None
    share: float | None = None
    rate: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    firm: bool = False

    def text(self, unit: str = "") -> str:
        parts = []
        if self.geomean is not None:
            parts.append(f"geomean >= {self.geomean:.2f}x")
        if self.each is not None:
            parts.append(f"each >= {self.each:.2f}x")
        if self.share is not None:
            parts.append(f"each >= {self.share:.2f} of the limit")
        if self.rate is not None:
            parts.append(f"each >= {self.rate:g}{unit}")
        if self.at_least is not None:
            parts.append(f">= {self.at_least:g}{unit}")
        if self.at_most is not None:
            parts.append(f"<= {self.at_most:g}{unit}")
        return ", ".join(parts)


def floor_of(bar: float) -> float:
    """The least that is accepted below a bar: 0.95 of a bar between 1.0x and 1.1x, 0.9 of
    others."""
    return bar * (0.95 if 1.0 <= bar <= 1.1 else 0.9)


def verdict(value: float, bar: float, firm: bool = False) -> str:
    """ "held", or by how much the bar was missed."""
    if value >= bar:
        return "held"
    return "missed, floor held" if value >= floor_of(bar) and not firm else "missed"


# ---- cases --------------------------------------------------------------------------------------


@dataclass
class Case:
    """One line of a table: what to run, on which inputs, and what the row must reach by itself. The
    bars of groups are in each bench's own table.

    make() returns one tuple of inputs, which `ours` and each of `peers` take. reference(inputs)
    returns the expected results in float64. compare(output) selects the part of an output that the
    reference states, for results that are too large to judge in float64.

    `limits` are calls that do the least work that the case must do, such as reading its bytes once.
    They run in the same rounds. The ratio is against the fastest peer.

    Contestants in `live` are called on CUDA, too, instead of being replayed from a graph. This is
    for calls that cannot be captured and that take long compared with their launch. They see every
    input once before the first timed call.

    A peer in `optional` that cannot run the case, or is wrong, is left out, and the run says why.
    An optional peer that cannot be captured is called.
    """

    group: str
    label: str
    dtype: str
    make: Callable[[], tuple]
    ours: Callable
    peers: dict[str, Callable]
    reference: Callable | None
    flops: float
    bytes: float
    compare: Callable = lambda output: output
    rotate: bool = False
    bar: Bar = Bar()
    unit: str = "GFLOP/s"
    limits: dict[str, Callable] = field(default_factory=dict)
    live: Sequence[str] = ()
    optional: Sequence[str] = ()


@dataclass
class Row:
    """A measured case: a line of the device's CSV file."""

    group: str
    label: str
    dtype: str
    us: float
    spread: float  # half the interquartile range over the median
    rate: float
    unit: str
    roofline_percent: float
    peers: dict[str, dict]  # name -> us, spread, rate, error, clock_mhz, watts
    best_peer: str
    ratio: float | None  # best peer's time over ours
    ratio_spread: float
    share: float | None  # fastest limit's time over ours
    error: float | None  # max|out - ref| / max|ref|
    clock_mhz: float  # of the SMs while ours ran, 0 on the CPU
    watts: float
    bar: str
    verdict: str
    ratio_clocks: float | None = None  # best peer's clocks of the SMs over ours
    # whether ours or the best peer waited for the host: yes, no, or "" if unknown
    host_bound: str = ""
    note: str = ""


# ---- measuring ----------------------------------------------------------------------------------


def tensors_of(value) -> list[Tensor]:
    """The tensors of an output: a tensor, or a tuple of them."""
    return [value] if isinstance(value, Tensor) else [t for t in value if t is not None]


def relative_error(output, reference) -> float:
    """max|out - ref| / max|ref|, the worst over the tensors of an output."""
    worst = 0.0
    for out, ref in zip(tensors_of(output), tensors_of(reference), strict=True):
        scale = ref.abs().max().item() or 1.0
        error = (out.detach().double() - ref).abs().max().item() / scale
        worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst


def half_iqr(values: Sequence[float]) -> float:
    """Half the interquartile range over the median."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2 / statistics.median(values)


WRONG = 0.5  # error over max|ref| above which a peer computes something else
SLOW_FIRST_CALL = 3.0  # seconds after which a first call is reported; it compiles


def able(case: Case, inputs: tuple, device: Cpu | Cuda) -> dict[str, Callable]:
    """Calls every contestant once and returns the peers that work. Optional peers that fail are
    left out; first calls that took long are reported."""
    found = dict(case.peers)
    for name, call in {"gpukern": case.ours, **case.peers}.items():
        start = time.perf_counter()
        try:
            call(*inputs)
            device.sync()
        except Exception as error:  # another project may raise anything
            if name not in case.optional:
                raise
            words = (str(error).strip() or type(error).__name__).splitlines()[0]
            print(f"{case.group} {case.label}: without {name}: {words}", flush=True)
            del found[name]
        if (seconds := time.perf_counter() - start) > SLOW_FIRST_CALL:
            print(
                f"{case.group} {case.label}: the first call of {name} took {seconds:.0f} s",
                flush=True,
            )
    return found


def ratios_of(amounts: dict[str, list[float]], peer: str) -> list[float]:
    """The peer's amount over ours, round by round. Empty without a peer, or if nothing was
    measured."""
    return [p / o for p, o in zip(amounts.get(peer, []), amounts["gpukern"]) if p > 0 and o > 0]


def measure(case: Case, device: Cpu | Cuda, peaks: dict, effort: Effort) -> Row:
    """Runs one case and judges it."""
    torch.manual_seed(0)
    inputs = [case.make()]
    if case.rotate:
        size = sum(t.nbytes for t in tensors_of(inputs[0]))
        inputs += [case.make() for _ in range(min(255, ROTATE_BYTES // size))]

    case.peers = able(case, inputs[0], device)
    fns = {"gpukern": case.ours, **case.peers}
    errors: dict[str, float | None] = dict.fromkeys(fns)
    if case.reference is not None:
        reference = case.reference(*inputs[0])
        errors = {
            name: relative_error(case.compare(fn(*inputs[0])), reference)
            for name, fn in fns.items()
        }
        for name, error in errors.items():
            if error is None or error <= WRONG:
                continue
            text = f"{name} is wrong by {error:.3g} of the largest value"
            if name not in case.optional:
                raise ValueError(f"{case.group} {case.label}: {text}")
            print(f"{case.group} {case.label}: without {name}: {text}", flush=True)
            del case.peers[name], fns[name]
    contestants = fns | case.limits
    calls = {name: Rotation(fn, inputs) for name, fn in contestants.items()}
    guests = [name for name in case.optional if name in case.peers and name not in case.live]
    live = [*case.live, *(name for name in guests if not device.can_replay(calls[name]))]
    # a plan that a peer makes when it first sees an input is not timed
    for name in contestants.keys() & case.live:
        for given in inputs[1:]:
            contestants[name](*given)
    blocks = interleave(device, calls, effort, live)
    device.forget()
    times = {name: [block.us for block in of] for name, of in blocks.items()}
    clocks = {name: [block.us * block.clock_mhz for block in of] for name, of in blocks.items()}
    state = {
        name: {
            key: statistics.median(getattr(block, key) for block in of)
            for key in ("clock_mhz", "watts")
        }
        for name, of in blocks.items()
    }

    amount = case.bytes if case.unit == "GB/s" else case.flops
    median = {name: statistics.median(t) for name, t in times.items()}
    best_us = max(case.flops / peaks[case.dtype], case.bytes / peaks["read"]) / 1e3
    peers = {
        name: {
            "us": median[name],
            "spread": half_iqr(times[name]),
            "rate": amount / median[name] / 1e3,
            "error": errors[name],
            **state[name],
        }
        for name in case.peers
    }
    best_peer = results.best_peer({"peers": peers})
    ratios = ratios_of(times, best_peer)
    ratio = results.ratio_of({"us": median["gpukern"], "peers": peers})
    in_clocks = [
        statistics.median(clocks[name]) for name in (best_peer, "gpukern") if name in clocks
    ]
    share = None
    if case.limits:
        share = min(median[name] for name in case.limits) / median["gpukern"]
    waited = [block.host_bound for name in ("gpukern", best_peer) for block in blocks.get(name, ())]
    rate = amount / median["gpukern"] / 1e3
    judged = ""
    if case.bar.each is not None:
        judged = verdict(ratio, case.bar.each, case.bar.firm)
    elif case.bar.share is not None:
        judged = verdict(share, case.bar.share, case.bar.firm)
    elif case.bar.rate is not None:
        judged = verdict(rate, case.bar.rate, case.bar.firm)
    return Row(
        group=case.group,
        label=case.label,
        dtype=case.dtype,
        us=median["gpukern"],
        spread=half_iqr(times["gpukern"]),
        rate=rate,
        unit=case.unit,
        roofline_percent=100 * best_us / median["gpukern"],
        peers=peers,
        best_peer=best_peer,
        ratio=ratio,
        ratio_spread=half_iqr(ratios),
        share=share,
        error=errors["gpukern"],
        **state["gpukern"],
        bar=case.bar.text(" " + case.unit),
        verdict=judged,
        ratio_clocks=in_clocks[0] / in_clocks[1] if best_peer and all(in_clocks) else None,
        host_bound="" if None in waited else "yes" if any(waited) else "no",
    )


def geomean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


@dataclass
class Group:
    """The bar that the rows of a group must reach together: one line of the table of bars."""

    group: str
    rows: int
    geomean: float
    worst: float
    bar: str
    verdict: str


def judge_groups(rows: list[dict], bars: dict[str, Bar]) -> list[Group]:
    """The groups of rows with a peer, and each dtype of a group that has several."""
    groups = []
    for name in dict.fromkeys(row["group"] for row in rows):
        rated = [row for row in rows if row["group"] == name and row["ratio"] is not None]
        if not rated:
            continue
        groups.append(judge_group(name, rated, bars.get(name, Bar())))
        dtypes = list(dict.fromkeys(row["dtype"] for row in rated))
        for dtype in dtypes if len(dtypes) > 1 else ():
            part = [row for row in rated if row["dtype"] == dtype]
            groups.append(judge_group(f"{name}, {dtype} alone", part, Bar()))
    return groups


def is_of(name: str, groups: set[str]) -> bool:
    """Whether a line of the table of bars is one of these groups, or one dtype of it."""
    return name in groups or (name.endswith(" alone") and name.rpartition(", ")[0] in groups)


def judge_group(name: str, rows: list[dict], bar: Bar) -> Group:
    """Geomean and worst ratio of a group's rows against its bar."""
    ratios = [row["ratio"] for row in rows]
    mean, worst = geomean(ratios), min(ratios)
    verdicts = []
    if bar.geomean is not None:
        verdicts.append(verdict(mean, bar.geomean, bar.firm))
    if bar.each is not None:
        verdicts.append(verdict(worst, bar.each, bar.firm))
    # min picks the worse verdict: "missed" sorts before "missed, floor held"
    worst_verdict = "held" if set(verdicts) <= {"held"} else min(set(verdicts) - {"held"})
    return Group(name, len(ratios), mean, worst, bar.text(), worst_verdict if verdicts else "")


# ---- a run --------------------------------------------------------------------------------------


def arguments(
    op: str,
    argv: Sequence[str] | None = None,
    more: Callable[[argparse.ArgumentParser], object] | None = None,
) -> argparse.Namespace:
    """The command line that every bench shares; `more` adds a bench's own options."""
    parser = argparse.ArgumentParser(description=f"benchmarks of {op}: ours beside its peers")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=0, help="torch threads, 0 = torch's default")
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds; stored with --save only"
    )
    parser.add_argument("--budget", type=float, help="seconds after which no further row starts")
    parser.add_argument(
        "--only", nargs="+", default=[], help="run the groups whose name contains one of these"
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        default=[],
        help="and of them the rows whose label contains one of these",
    )
    parser.add_argument(
        "--list", action="store_true", help="print the groups and their rows, measure nothing"
    )
    parser.add_argument("--no-save", action="store_true", help="print only")
    parser.add_argument(
        "--save",
        action="store_true",
        help="store a quick run too, or only the rows that --only, --rows or --budget left in",
    )
    if more:
        more(parser)
    args = parser.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    args.part = bool(args.only or args.rows)
    args.asked = args.save
    args.save = (args.save or not (args.quick or args.part)) and not (args.no_save or args.list)
    args.effort = QUICK if args.quick else FULL
    return args


def count_rows() -> int:
    """The rows that this command measures: the same command lists them."""
    command = [sys.executable, *sys.argv, "--list"]
    listed = subprocess.run(command, capture_output=True, text=True).stdout
    groups = [line.partition(": ")[2] for line in listed.splitlines()]
    return sum(len(rows.split(", ")) for rows in groups if rows)


class Run:
    """Collects the rows of one bench, prints them as they come, and stores them at the end."""

    def __init__(self, op: str, args: argparse.Namespace, device: Cpu | Cuda) -> None:
        self.op, self.args, self.device = op, args, device
        self.rows: list[Row] = []
        self.facts: list[dict] = []
        self.began = _cpu_seconds()
        self.ends = time.perf_counter() + args.budget if args.budget else math.inf
        self.left_out = 0
        self.listed: dict[str, list[str]] = {}  # with --list: the groups and their rows
        self.bar: Any = None
        if args.list:
            self.peaks = {}
            return
        self.peaks = device.peaks()
        figures = ", ".join(
            f"{name} {value:.0f} {'GB/s' if name == 'read' else 'GFLOP/s'}"
            for name, value in self.peaks.items()
            if name != "isa"
        )
        print(f"{op} on {device.name()}; torch {torch.__version__}; peaks: {figures}")
        print(
            f"{'case':<46} {'us':>10} {'rate':>15} {'roof':>5}  "
            f"{'best peer':<14} {'us':>10} {'ratio':>13}  {'error (peer)':<19} verdict"
        )
        self.bar = bar_on_terminal(op, "row", count_rows)

    def say(self, line: str) -> None:
        """Prints a line above the bar."""
        if self.bar is not None:
            self.bar.clear()
        print(line, flush=True)
        if self.bar is not None:
            self.bar.refresh()

    def wants(self, group: str, slow: bool = False) -> bool:
        """Whether the options ask for a group. A `slow` group starts processes, so a quick run
        leaves it out unless --only names it."""
        named = not self.args.only or any(part in group for part in self.args.only)
        if self.args.list:
            if named:
                self.listed.setdefault(group, [])
            return False
        return named and not (slow and self.args.quick and not self.args.only)

    def asks(self, group: str, label: str, dtype: str) -> bool:
        """Whether the options and the budget leave a row in. Benches ask before they make a case
        that takes long."""
        named = not self.args.rows or any(part in f"{label} {dtype}" for part in self.args.rows)
        if not (named and self.wants(group)):
            if named and group in self.listed:
                self.listed[group].append(f"{label} {dtype}")
            return False
        if time.perf_counter() > self.ends:
            self.left_out += 1
            return False
        return True

    def add(self, case: Case) -> Row | None:
        """Measures one case unless --only, --rows or the budget leaves it out."""
        if not self.asks(case.group, case.label, case.dtype):
            return None
        if self.bar is not None:
            self.bar.set_postfix_str(f"{case.group} {case.label} {case.dtype}")
        row = measure(case, self.device, self.peaks, self.args.effort)
        self.rows.append(row)
        if self.bar is not None:
            self.bar.update()
        self.say(format_row(row))
        return row

    def fact(
        self, group: str, label: str, value: float, unit: str, bar: Bar = Bar(), note: str = ""
    ) -> None:
        """A figure that is not a ratio of two times: bytes, a percent of a peak, a host cost."""
        if self.args.list:
            return
        judged = ""
        if bar.at_least is not None:
            judged = "held" if value >= bar.at_least else "missed"
        elif bar.at_most is not None:
            judged = "held" if value <= bar.at_most else "missed"
        entry = {"group": group, "label": label, "value": value, "unit": unit}
        entry |= {"bar": bar.text(" " + unit), "verdict": judged, "note": note}
        self.facts.append(entry)
        line = f"{group + ' ' + label:<46} {value:>10.4g} {unit:<8}"
        self.say(f"{line} {entry['bar']:<16} {judged} {note}".rstrip())

    def finish(self, group_bars: dict[str, Bar]) -> None:
        """Judges the groups, prints the summary, stores the rows."""
        if self.args.list:
            for name, labels in self.listed.items():
                print(f"{name}: {', '.join(labels)}".rstrip(": "))
            return
        if self.bar is not None:
            self.bar.close()
        groups = judge_groups([asdict(row) for row in self.rows], group_bars)
        print()
        for g in groups:
            print(
                f"{g.group:<46} geomean {g.geomean:5.2f}x  worst {g.worst:5.2f}x  {g.bar:<38} "
                f"{g.verdict}".rstrip()
            )
        judged = [r.verdict for r in self.rows] + [g.verdict for g in groups]
        judged = [v for v in judged + [f["verdict"] for f in self.facts] if v]
        print(f"{judged.count('held')} of {len(judged)} bars held")
        others = self.others_percent()
        if others > 5:
            print(f"other programs took {others:.0f}% of the processors: repeat on a quiet machine")
        stored = self.args.save and (self.args.asked or not self.left_out)
        if self.left_out:
            print(
                f"{self.left_out} rows left out, the budget of {self.args.budget:.0f} s was "
                f"spent: {'the others are' if stored else 'nothing is'} stored"
            )
        part = self.args.part or self.left_out
        if stored and part and not self.takes_parts:
            print(f"{self.op} is one table of one run: a part of it is not stored")
        elif stored and part:
            self._store_part(group_bars)
        elif stored:
            self._store(groups)

    def others_percent(self) -> float:
        """Percent of all processors that other programs took since the start; 0 if unknown."""
        (total, busy, own), (total0, busy0, own0) = _cpu_seconds(), self.began
        return 100 * max(0.0, busy - busy0 - (own - own0)) / max(total - total0, 1e-9)

    def stamp(self) -> dict:
        """Date, versions, command, threads and peaks of a run."""
        return {
            "date": datetime.date.today().isoformat(),
            "torch": torch.__version__,
            "driver": self.device.driver(),
            "command": f"python benchmarks/{' '.join([Path(sys.argv[0]).name, *sys.argv[1:]])}",
            "threads": torch.get_num_threads(),
            "peaks": self.peaks,
            "others_percent": self.others_percent(),
        }

    # Whether a part of the rows may be stored among those of another run.
    takes_parts = True

    def _store_part(self, group_bars: dict[str, Bar]) -> None:
        """Stores the rows of this run among those of the op that are stored already."""
        part = self.stamp() | {"rows": [asdict(row) for row in self.rows], "facts": self.facts}
        name = self.device.name()
        stored = results.stored(RESULTS, name).get(self.op)
        bench, said = results.merged(stored, part)
        for line in said:
            print(line)
        touched = {row.group for row in self.rows}
        groups = [g for g in bench["groups"] if not is_of(g["group"], touched)]
        rows = [row for row in bench["rows"] if row["group"] in touched]
        groups += [asdict(group) for group in judge_groups(rows, group_bars)]
        order = list(dict.fromkeys(row["group"] for row in bench["rows"]))
        groups.sort(
            key=lambda g: next((i for i, of in enumerate(order) if is_of(g["group"], {of})), 0)
        )
        path = results.store(RESULTS, name, self.op, bench | {"groups": groups})
        print(f"{len(self.rows)} rows: {path}; `make results` writes the pages and plots")

    def _store(self, groups: list[Group]) -> None:
        bench = self.stamp() | {"rows": [asdict(row) for row in self.rows], "facts": self.facts}
        bench["groups"] = [asdict(group) for group in groups]
        path = results.store(RESULTS, self.device.name(), self.op, bench)
        print(f"results: {path}; `make results` writes the pages and plots")


# ---- cost of use and instruction sets ------------------------------------------------------------


def overhead_facts(
    run: Run,
    name: str,
    call: Callable[[], object],
    bar: Bar,
    own: tuple[str, Callable[[], object]] | None = None,
) -> None:
    """Host time of a small eager call without grad. On the CPU it is stated above torch.mul's.
    `own` is PyTorch's way to the same result; its bar is a ratio, because hosts differ by more than
    calls do.

    On CUDA all calls are measured on each core, again and again for 20 s (1 s in a quick run). The
    figures are those of the pass in which torch.mul took the least. On a virtual machine some cores
    are shared with a neighbour for a while, and then take 1.6 times as long.
    """
    on_cuda = run.device.kind == "cuda"
    x = torch.randn(8, 8, device=run.device.device)
    calls = {name: call, "torch.mul": lambda: torch.mul(x, x)} | ({own[0]: own[1]} if own else {})
    with torch.no_grad():
        for fn in calls.values():
            for _ in range(1000):
                fn()
        if on_cuda and hasattr(os, "sched_setaffinity"):
            medians = _on_quietest_core(
                calls, "torch.mul", run.device, 1.0 if run.args.quick else 20.0
            )
        else:
            medians = _medians(calls, run.device, 31)
    ours, mul, *theirs = (medians[key] for key in calls)
    # on CUDA a launch is most of the time, in ours and in torch.mul, so the bar is for the whole
    # call
    cost = ours if on_cuda else ours - mul
    run.fact("call host time", name, cost, "us", bar, f"{ours:.1f} us, torch.mul {mul:.1f} us")
    if own:
        run.fact(
            "call host time",
            f"{name} / {own[0]}",
            ours / theirs[0],
            "",
            Bar(at_most=1.0),
            f"{theirs[0]:.1f} us",
        )


def _on_quietest_core(
    calls: dict[str, Callable], judge: str, device: Cpu | Cuda, seconds: float
) -> dict[str, float]:
    """us of host time of each call, from the core and the pass in which `judge` took the least. No
    pass over the cores starts after `seconds`."""
    cores, best = os.sched_getaffinity(0), {judge: math.inf}
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            for core in cores:
                os.sched_setaffinity(0, {core})
                best = min(best, _medians(calls, device, 9), key=lambda medians: medians[judge])
    finally:
        os.sched_setaffinity(0, cores)
    return best


def _medians(calls: dict[str, Callable], device: Cpu | Cuda, rounds: int) -> dict[str, float]:
    """us of host time of each call; the calls run alternately."""
    times = {key: [] for key in calls}
    for _ in range(rounds):
        for key, fn in calls.items():
            times[key].append(_host_us(fn, device, 200))
    return {key: statistics.median(values) for key, values in times.items()}


def _host_us(call: Callable[[], object], device: Cpu | Cuda, calls: int) -> float:
    """us of host time per call. The device is idle before, and its work is not waited for."""
    device.sync()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls * 1e6


ISA_CHILD = """
import json, sys, time, torch, torch_gpukern
dtype = {{"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}}["{dtype}"]
torch.set_num_threads({threads})
torch.manual_seed(0)
{statement}
call()
best = float("inf")
end = time.perf_counter() + {seconds}
while time.perf_counter() < end:
    start = time.perf_counter()
    call()
    best = min(best, time.perf_counter() - start)
print(json.dumps(flops / best / 1e9))
"""


def isa_shares(run: Run, label: str, statement: str, bar: Bar) -> None:
    """Percent of each instruction set's own multiply-add peak, as the best of a second of calls.
    Each runs in a process of its own with GPUKERN_CPU set. `statement` defines `call` and `flops`
    from `dtype`."""
    seconds = 0.3 if run.args.quick else 1.0
    for isa in run.device.isas():
        for dtype in ("f32", "bf16", "f16"):
            if dtype == "f16" and isa == "avx512bf16":
                continue  # float16 has instances up to avx512
            if dtype == "f32" and isa == "avx512bf16":
                continue  # and so has float32
            code = ISA_CHILD.format(
                dtype=dtype,
                threads=torch.get_num_threads(),
                statement=statement,
                seconds=seconds,
            )
            environment = os.environ | {"GPUKERN_CPU": isa}
            before = run.device.madd_peak(isa, dtype)
            child = subprocess.run(
                [sys.executable, "-c", code], env=environment, capture_output=True, text=True
            )
            if child.returncode:
                raise SystemExit(f"{label} with GPUKERN_CPU={isa} failed:\n{child.stderr}")
            rate = json.loads(child.stdout)
            # the clock of a shared machine drifts, so the peak is measured with every figure
            peak = max(before, run.device.madd_peak(isa, dtype))
            run.fact(
                "isa",
                f"{label} {isa} {dtype}",
                100 * rate / peak,
                "% of peak",
                bar,
                f"{rate:.0f} of {peak:.0f} GFLOP/s",
            )


def _cpu_seconds() -> tuple[float, float, float]:
    """Seconds of all processors together so far: elapsed, busy, and busy for this program."""
    own = sum(os.times()[:4])
    stat = Path("/proc/stat")
    if not stat.exists():
        return own, own, own
    ticks = [int(x) for x in stat.read_text().splitlines()[0].split()[1:9]]
    hertz = os.sysconf("SC_CLK_TCK")
    idle = ticks[3] + ticks[4]
    return sum(ticks) / hertz, (sum(ticks) - idle) / hertz, own


def format_row(row: Row) -> str:
    """One line of the table."""
    label = f"{row.group} {row.label} {row.dtype}"
    line = (
        f"{label:<46} {row.us:>10.1f} {row.rate:>8.1f} {row.unit:<7}{row.roofline_percent:>4.0f}%"
    )
    if row.best_peer:
        peer = row.peers[row.best_peer]
        line += f"  {row.best_peer:<14} {peer['us']:>10.1f}"
        line += f" {row.ratio:>6.2f}x +-{100 * row.ratio_spread:>2.0f}%"
        if row.ratio_clocks is not None:
            line += f" ({row.ratio_clocks:.2f} in clocks)"
        if row.error is not None:
            line += f"  {row.error:.1e} ({peer['error']:.1e})"
    elif row.error is not None:
        line += f"  error {row.error:.1e}"
    if row.share is not None:
        line += f"  {row.share:.2f} of the limit"
    for name, peer in row.peers.items():
        if name != row.best_peer:
            line += f"  {name} {peer['us']:.1f}"
    if row.clock_mhz:
        line += f"  {row.clock_mhz:.0f} MHz {row.watts:.0f} W"
        if row.best_peer:
            line += f" (peer {row.peers[row.best_peer]['clock_mhz']:.0f} MHz)"
    return f"{line:<130} {row.verdict and row.bar + ': ' + row.verdict}".rstrip()
