# SPDX-License-Identifier: BSD-3-Clause
"""Blocks of a kernel on an SM: what this GPU's driver says, beside the calculator (python -m
torch_gpukern occupancy).

python benchmarks/occupancy.py LIBRARY [PATTERN] [--threads N] [--shared BYTES]

The driver loads the machine code of the library and answers by
cuOccupancyMaxActiveBlocksPerMultiprocessor and cuOccupancyMaxPotentialBlockSize (in the runtime
cudaOccupancy..): the block that fills an SM best, and how many of them fill the GPU. How many warps
are really active is a counter, sm__warps_active.avg.per_cycle_active, by ncu.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from torch_gpukern.cli import occupancy
from torch_gpukern.cli.terminal import table

MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


@dataclass(frozen=True)
class Measured:
    """blocks: of the asked threads and dynamic shared memory, on an SM. threads: of the block that
    fills an SM best; grid: so many of them fill the GPU."""

    blocks: int
    threads: int
    grid: int


class Driver:
    """Modules of machine code, on the current device of torch, by the CUDA driver."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("occupancy: it asks the driver of a GPU; torch finds none")
        torch.zeros(1, device="cuda")  # the device's context is there, and this thread's
        self.lib = ctypes.CDLL("libcuda.so.1")

    def call(self, name: str, *arguments: object) -> None:
        status = getattr(self.lib, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self.lib.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"occupancy: {name}: {(text.value or b'').decode() or status}")

    def module(self, code: bytes) -> ctypes.c_void_p | None:
        """None: the code is of another architecture."""
        found = ctypes.c_void_p()
        return found if self.lib.cuModuleLoadData(ctypes.byref(found), code) == 0 else None

    def function(self, module: ctypes.c_void_p, name: str) -> ctypes.c_void_p | None:
        found = ctypes.c_void_p()
        status = self.lib.cuModuleGetFunction(ctypes.byref(found), module, name.encode())
        return found if status == 0 else None

    def ask(self, function: ctypes.c_void_p, threads: int, shared: int) -> Measured:
        if shared > 48 << 10:
            self.call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED, shared)
        blocks, grid, best = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        size = ctypes.c_size_t(shared)
        self.call(
            "cuOccupancyMaxActiveBlocksPerMultiprocessor",
            ctypes.byref(blocks),
            function,
            threads,
            size,
        )
        self.call(
            "cuOccupancyMaxPotentialBlockSize",
            ctypes.byref(grid),
            ctypes.byref(best),
            function,
            None,
            size,
            0,
        )
        return Measured(blocks.value, best.value, grid.value)


def modules(driver: Driver, path: Path) -> list[ctypes.c_void_p]:
    """The machine code in a library or cubin that this GPU can run."""
    codes = [path.read_bytes()] if path.suffix == ".cubin" else []
    with tempfile.TemporaryDirectory() as folder:
        if not codes:
            command = [occupancy.program("cuobjdump"), "-xelf", "all", str(path.resolve())]
            done = subprocess.run(
                command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            if done.returncode:
                raise RuntimeError(
                    f"occupancy: cuobjdump cannot take the machine code out of {path}"
                )
            codes = [cubin.read_bytes() for cubin in sorted(Path(folder).iterdir())]
    return [module for code in codes if (module := driver.module(code))]


def rows(path: Path, pattern: str, threads: int | None, shared: int) -> list[tuple[str, ...]]:
    driver = Driver()
    here = "sm_{}{}".format(*torch.cuda.get_device_capability())
    found = [
        ("kernel", "threads", "registers", "shared", "calculated", "by the driver", "best block")
    ]
    loaded = modules(driver, path)
    for kernel in occupancy.read_library(path, here):
        block = threads or kernel.threads
        if pattern not in kernel.name or kernel.arch.removesuffix("a") != here or block is None:
            continue
        function = next(
            (f for module in loaded if (f := driver.function(module, kernel.function))), None
        )
        if function is None:
            continue
        calculated = occupancy.occupancy(
            kernel.registers, block, kernel.shared_bytes + shared, here
        )
        said = driver.ask(function, block, shared)
        figures = (
            block,
            kernel.registers,
            kernel.shared_bytes + shared,
            calculated.blocks,
            said.blocks,
        )
        found.append((kernel.name, *map(str, figures), f"{said.threads} x {said.grid}"))
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", type=Path)
    parser.add_argument("pattern", nargs="?", default="", help="part of the kernels' names")
    parser.add_argument(
        "--threads", type=int, help="of a block; default: the kernel's launch bound"
    )
    parser.add_argument(
        "--shared", type=int, default=0, metavar="BYTES", help="dynamic shared memory of a block"
    )
    args = parser.parse_args(argv)
    found = rows(args.library, args.pattern, args.threads, args.shared)
    if len(found) == 1:
        raise SystemExit(
            f"occupancy: {args.library} has no such kernel for this GPU, or says no launch bound: "
            f"--threads"
        )
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
