# SPDX-License-Identifier: BSD-3-Clause
"""Runs the main benchmarks, each in its own process; at most 15 minutes on 2 cores. Options are
passed to each.

python benchmarks/run_all.py [--quick] [--device cpu|cuda] [--threads N]
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
BENCHES = ("gemm", "flash_attn", "paged_attn", "model")


def main() -> int:
    failed = []
    for bench in BENCHES:
        start = time.perf_counter()
        command = [sys.executable, str(HERE / f"bench_{bench}.py"), *sys.argv[1:]]
        if subprocess.run(command).returncode:
            failed.append(bench)
        print(f"bench_{bench}: {time.perf_counter() - start:.0f} s\n", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
