# SPDX-License-Identifier: BSD-3-Clause
"""Profiles every rung of the gemm ladder, torch.matmul and the accesses of banks.cu with ncu.

Each product is one call at M = N = K = 4096. banks.cu is in learn/patterns.

python learn/benchmarks/counters.py                 runs ncu once, for half a minute, and writes
                                                    learn/counters.csv
python learn/benchmarks/counters.py --read FILE     writes learn/counters.csv from an earlier ncu
                                                    log (--log) of the same machine
python learn/benchmarks/counters.py --command       prints the ncu command, to be run by a user who
                                                    may read the GPU's counters

It needs ncu, nvcc (for banks.cu) and the ladder's library. Each row of learn/counters.csv is a
kernel, and each column is one of bench_ladder.METRICS. learn/ladder.md and learn/claims.md quote
the rows.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import ladder
import torch
from bench_ladder import METRICS, profile

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "learn" / "counters.csv"
BANKS = ROOT / "build" / "patterns" / "banks"


def accesses() -> list[str]:
    """The names of banks.cu's variants, in the order of their launches."""
    source = (ROOT / "learn" / "patterns" / "banks.cu").read_text()
    return re.findall(r'of<.+>\("(.+)"\),', source)


def command(log: Path) -> list[str]:
    """The ncu command that profiles both programs in one run. PATTERN_CHECK=1 makes banks.cu launch
    every access once, with one block."""
    numbers = " ".join(str(rung.number) for rung in ladder.rungs())
    program = ROOT / "learn" / "benchmarks" / "ladder.py"
    script = f"{shlex.quote(sys.executable)} {program} 4096 {numbers} && {BANKS}"
    kernels = "regex:ladder_|gemm|nvjet|read_kernel"
    ncu = [
        "ncu",
        "--clock-control",
        "none",
        "--target-processes",
        "all",
        "--csv",
        "--print-units",
        "base",
    ]
    ncu += ["--kernel-name", kernels, "--metrics", ",".join(METRICS), "--log-file", str(log)]
    return ["env", "PATTERN_CHECK=1", *ncu, "bash", "-c", script]


def rows(log: Path) -> list[dict]:
    """The kernels of a log, each with the name of its rung or access. Names are assigned in the
    order of launches: the rungs and cuBLAS in one sequence, the accesses in another."""
    kernels = profile(log)
    found = []
    products = [*(f"rung {rung.number} {rung.name}" for rung in ladder.rungs()), "cuBLAS"]
    for names, read in ((products, False), (accesses(), True)):
        members = [kernel for kernel in kernels if ("read_kernel" in kernel["kernel"]) == read]
        if len(members) != len(names):
            what = [kernel["kernel"] for kernel in members]
            raise SystemExit(
                f"{log}: {len(members)} kernels, {what}; expected one for each of "
                f"{', '.join(names)}"
            )
        found += [{"what": name, **kernel} for name, kernel in zip(names, members)]
    for row in found:
        row["kernel"] = row["kernel"].removeprefix("<unnamed>::")
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--log", type=Path, default=Path("ncu.csv"), help="what ncu writes (%(default)s)"
    )
    parser.add_argument("--read", type=Path, help="run nothing")
    parser.add_argument("--command", action="store_true", help="print the command and stop")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args(argv)
    if args.command:
        print(shlex.join(command(args.log)))
        return 0
    if not torch.cuda.is_available():
        raise SystemExit("counters: torch finds no CUDA device")
    if args.read is None:
        if not shutil.which("ncu"):
            raise SystemExit("counters: ncu is not on the path; it comes with the CUDA toolkit")
        subprocess.run(["make", str(BANKS.relative_to(ROOT))], cwd=ROOT, check=True)
        subprocess.run(command(args.log), check=True)
    about = {"device": torch.cuda.get_device_name(), "date": datetime.date.today().isoformat()}
    found = [{**about, **row} for row in rows(args.read or args.log)]
    with args.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*about, "what", "kernel", *METRICS], lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {key: f"{x:.12g}" if isinstance(x, float) else x for key, x in row.items()}
            for row in found
        )
    print(f"{len(found)} kernels: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
