# SPDX-License-Identifier: BSD-3-Clause
"""One product and one sum in several languages, timed, with the lines of code of each.

python learn/benchmarks/bench_languages.py --device cuda [--quick]

The product runs by the library, the ladder's shortest rung, CUTLASS, CuTe DSL and Triton. The sum a
+ b runs by CuTe DSL and Triton; ours is dropout_add with p = 0. A peer that does not import is left
out and named. learn/languages.md has the table.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import peers  # noqa: E402
import torch  # noqa: E402
from harness import Case, Run, arguments, open_device  # noqa: E402
from torch import Tensor  # noqa: E402

import torch_gpukern  # noqa: E402

SIZES = (4096, 8192)
LENGTH = 1 << 26
# name -> module of peers/
GEMMS = {
    "CUTLASS": "cutlass_gemm",
    "CuTe DSL": "cute_gemm",
    "Triton": "triton_gemm",
    "Triton, persistent": "triton_persistent_gemm",
}


def rung_18() -> Callable[[Tensor, Tensor], Tensor]:
    import ladder

    ladder.library()
    return partial(ladder.gemm, 18)


def gemms(run: Run) -> dict[str, Callable]:
    found = {"torch.matmul": torch.matmul}
    for name, get in {
        "rung 18": rung_18,
        **{n: (lambda m=m: peer(m).gemm) for n, m in GEMMS.items()},
    }.items():
        try:
            found[name] = get()
        except (ImportError, OSError) as error:
            print(f"without {name}: {error}")
    return found


def peer(module: str):
    made = import_module(f"peers.{module}")
    if module == "cutlass_gemm":
        made.library()
    return made


def adds() -> dict[str, Callable]:
    found: dict[str, Callable] = {"torch.add": torch.add}
    for name, module, options in (
        ("CuTe DSL, an element a thread", "cute_add", {"vectorised": False}),
        ("CuTe DSL, 16 bytes a thread", "cute_add", {}),
        ("Triton", "triton_rows", {}),
    ):
        try:
            found[name] = partial(import_module(f"peers.{module}").add, **options)
        except ImportError as error:
            print(f"without {name}: {error}")
    return found


def sample(size: int, device: torch.device) -> Tensor:
    return torch.linspace(0, size - 1, 128, device=device, dtype=torch.float64).round().long()


def product(run: Run, size: int) -> Case:
    device = run.device.device
    at = sample(size, device)
    others = gemms(run)
    return Case(
        group="a @ b",
        label=f"{size}",
        dtype="bf16",
        make=lambda: tuple(torch.randn(size, size, device=device).bfloat16() for _ in range(2)),
        ours=torch_gpukern.gemm,
        peers=others,
        reference=lambda a, b: a[at].double() @ b[:, at].double(),
        compare=lambda out: out[at][:, at],
        flops=2.0 * size**3,
        bytes=6.0 * size**2,
        optional=[name for name in others if name != "torch.matmul"],
    )


def addition(run: Run) -> Case:
    device = run.device.device
    seed = torch.zeros(2, dtype=torch.int64, device=device)
    others = adds()
    return Case(
        group="a + b",
        label=f"{LENGTH}",
        dtype="bf16",
        make=lambda: tuple(
            torch.randn(LENGTH // 4096, 4096, device=device).bfloat16() for _ in range(2)
        ),
        ours=lambda a, b: torch_gpukern.dropout_add(a, b, 0.0, seed),
        peers=others,
        reference=lambda a, b: a.double() + b.double(),
        flops=0.0,
        bytes=6.0 * LENGTH,
        unit="GB/s",
        optional=[name for name in others if name != "torch.add"],
    )


def main() -> None:
    args = arguments("the same in other languages")
    if args.device != "cuda":
        raise SystemExit("bench_languages: the kernels run on a GPU alone: --device cuda")
    run = Run("languages", args, open_device(args.device))
    for size in SIZES:
        run.add(product(run, size))
    run.add(addition(run))
    for name, lines in peers.lines_of_languages().items():
        run.fact("lines of code", name, lines, "")
    run.finish({})


if __name__ == "__main__":
    sys.exit(main())
