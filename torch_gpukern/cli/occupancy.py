# SPDX-License-Identifier: BSD-3-Clause
"""python -m torch_gpukern occupancy: how many blocks of a kernel an SM holds, and which resource
limits them. Needs no GPU.

Registers, static shared memory and the launch bound are read from a compiled library with
cuobjdump. Without a library, registers and shared memory come from docs/resources.csv. Dynamic
shared memory is chosen at launch, so neither source has it: give it with --shared.
"""

from __future__ import annotations

import argparse
import csv
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

WARP = 32
REGISTER_UNIT = 256  # registers are allocated to a warp in multiples of this
WARP_UNIT = 4  # an SM has four parts, each with a quarter of the registers; a warp is in one part
SHARED_UNIT = 128  # bytes; shared memory is allocated in multiples of this
RESERVED = 1024  # bytes of shared memory that the system reserves in each block


@dataclass(frozen=True)
class Sm:
    """The limits of one SM (CUDA programming guide, table of compute capabilities)."""

    warps: int
    blocks: int
    shared_bytes: int
    registers: int = 65536


SMS = {
    "sm_80": Sm(64, 32, 164 << 10),
    "sm_86": Sm(48, 16, 100 << 10),
    "sm_89": Sm(48, 24, 100 << 10),
    "sm_90": Sm(64, 32, 228 << 10),
}


@dataclass(frozen=True)
class Occupancy:
    """How many blocks an SM holds.

    Attributes:
        blocks: the smallest of the limits.
        warps: the warps of these blocks.
        of_warps: the most warps that an SM can hold.
        limits: the blocks that each resource allows.
    """

    blocks: int
    warps: int
    of_warps: int
    limits: dict[str, int]

    @property
    def limiter(self) -> str:
        """The resources that allow no more blocks."""
        return ", ".join(name for name, blocks in self.limits.items() if blocks == self.blocks)


def _up(x: int, unit: int) -> int:
    return -(-x // unit) * unit


def occupancy(
    registers: int, threads: int, shared_bytes: int = 0, arch: str = "sm_90"
) -> Occupancy:
    """How many blocks of `threads` threads one SM holds at once.

    Args:
        registers: registers per thread, 0 to 255.
        threads: threads per block, 1 to 1024.
        shared_bytes: static and dynamic shared memory per block, without the 1024 bytes that the
            system reserves.
        arch: sm_80, sm_86, sm_89, sm_90 (also sm_90a).

    Raises:
        ValueError: an argument is outside its range.
    """
    arch = arch.removesuffix("a")
    if arch not in SMS:
        raise ValueError(f"occupancy: arch is {arch}; expected one of {', '.join(SMS)}")
    if not 1 <= threads <= 1024:
        raise ValueError(f"occupancy: threads is {threads}; a block has 1 to 1024")
    if not 0 <= registers <= 255:
        raise ValueError(f"occupancy: registers is {registers}; a thread has 0 to 255")
    if shared_bytes < 0:
        raise ValueError(f"occupancy: shared_bytes is {shared_bytes}; 0 or more")
    sm, warps = SMS[arch], -(-threads // WARP)
    by_registers = sm.blocks
    if registers:
        most_warps = sm.registers // _up(registers * WARP, REGISTER_UNIT)
        by_registers = most_warps // WARP_UNIT * WARP_UNIT // warps
    limits = {
        "warps": sm.warps // warps,
        "registers": by_registers,
        "shared memory": sm.shared_bytes // _up(shared_bytes + RESERVED, SHARED_UNIT),
        "blocks": sm.blocks,
    }
    blocks = min(limits.values())
    return Occupancy(blocks, blocks * warps, sm.warps, limits)


@dataclass(frozen=True)
class Kernel:
    name: str
    arch: str
    registers: int
    shared_bytes: int  # static, without the reserved bytes
    threads: int | None  # the launch bound; None if it is not known
    function: str = ""  # its mangled name in the library


def _static(reported: int) -> int:
    """Static shared memory without the reserved bytes. cuobjdump includes them for some kernels:
    those whose number is at least RESERVED."""
    return reported - RESERVED if reported >= RESERVED else reported


def read_csv(path: Path) -> list[Kernel]:
    """The kernels of a table with the columns of docs/resources.csv."""
    with path.open() as lines:
        rows = list(csv.DictReader(lines))
    if not rows or not {"kernel", "arch", "registers", "shared_bytes"} <= rows[0].keys():
        raise ValueError(f"{path}: expected the columns kernel, arch, registers, shared_bytes")
    return [
        Kernel(r["kernel"], r["arch"], int(r["registers"]), _static(int(r["shared_bytes"])), None)
        for r in rows
    ]


def program(name: str) -> str:
    """The path of a CUDA tool, from a pip package or PATH; RuntimeError if it is in neither."""
    own = Path(sysconfig.get_path("purelib")) / "nvidia"
    found = [*sorted(map(str, own.glob(f"*/bin/{name}"))), shutil.which(name)]
    if not found[0]:
        raise RuntimeError(f"{name} was not found; pip install nvidia-cuda-{name}")
    return str(found[0])


def _dump(path: Path, *options: str) -> Iterator[str]:
    command = [program("cuobjdump"), *options, str(path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as running:
        yield from running.stdout or ()
    if running.returncode:
        raise RuntimeError(f"cuobjdump cannot read {path}")


def parse_usage(lines: Iterator[str]) -> dict[tuple[str, str], tuple[int, int]]:
    """(arch, function) -> (registers, shared bytes), from cuobjdump --dump-resource-usage."""
    found, arch, name = {}, "", ""
    for line in lines:
        if match := re.match(r"arch = (\w+)", line):
            arch = match[1]
        elif match := re.match(r" Function (\S+):", line):
            name = match[1]
        elif match := re.match(r"\s+REG:(\d+) STACK:\d+ SHARED:(\d+)", line):
            found[arch, name] = int(match[1]), int(match[2])
    return found


def parse_bounds(lines: Iterator[str]) -> dict[str, int]:
    """function -> launch bound in threads, from cuobjdump -elf."""
    found, name, expected = {}, "", False  # expected: the next "Value" line is a launch bound
    for line in lines:
        if match := re.match(r"\.nv\.info\.(\S+)", line):
            name = match[1]
        elif "EIATTR_MAX_THREADS" in line:
            expected = True
        elif expected and (match := re.match(r"\s+Value:\s+0x(\w+) 0x(\w+) 0x(\w+)", line)):
            x, y, z = (int(part, 16) for part in match.groups())
            found[name], expected = x * y * z, False
    return found


def read_library(path: Path, default_arch: str) -> list[Kernel]:
    """The kernels of a compiled library, object or cubin. A cubin does not name its architecture,
    so default_arch stands for it."""
    usage = parse_usage(_dump(path, "--dump-resource-usage"))
    bounds = parse_bounds(_dump(path, "-elf"))
    mangled = [name for _, name in usage]
    names = mangled
    if mangled and shutil.which("c++filt"):
        done = subprocess.run(
            ["c++filt", "-p"], input="\n".join(mangled), capture_output=True, text=True
        )
        names = [name.replace("(anonymous namespace)::", "") for name in done.stdout.splitlines()]
    kernels = [
        Kernel(
            name, arch or default_arch, registers, _static(shared), bounds.get(function), function
        )
        for name, ((arch, function), (registers, shared)) in zip(names, usage.items())
    ]
    if not kernels:
        raise ValueError(f"{path} has no CUDA kernels")
    return sorted(kernels, key=lambda kernel: (kernel.name, kernel.arch))


TABLE = Path(__file__).resolve().parents[2] / "docs" / "resources.csv"


def add_arguments(commands: argparse._SubParsersAction) -> None:
    p = commands.add_parser(
        "occupancy", help="blocks of each kernel that an SM holds, and what limits them"
    )
    p.set_defaults(run=run)
    p.add_argument("pattern", nargs="?", default="", help="part of the kernels' names")
    p.add_argument(
        "--from", dest="source", type=Path, metavar="FILE", help="a library, object, cubin or .csv"
    )
    p.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="threads per block; default: the kernel's launch bound",
    )
    p.add_argument(
        "--registers", type=int, metavar="N", help="registers per thread, instead of a kernel"
    )
    p.add_argument(
        "--shared", type=int, default=0, metavar="BYTES", help="dynamic shared memory per block"
    )
    p.add_argument(
        "--arch", default="sm_90", choices=SMS, help="for files that do not name an architecture"
    )


def _kernels(args: argparse.Namespace) -> list[Kernel]:
    if args.registers is not None:
        if args.threads is None or args.source or args.pattern:
            raise ValueError("--registers replaces a kernel: give --threads, and no file or name")
        return [Kernel("(given)", args.arch, args.registers, 0, args.threads)]
    source = args.source or TABLE
    if not source.exists():
        if args.source is None:
            raise ValueError(
                "docs/resources.csv, the table of all kernels, is only in a checkout: name a "
                "library or table with --from, or give --registers and --threads"
            )
        raise ValueError(f"{source} does not exist; name a library or table with --from")
    found = read_csv(source) if source.suffix == ".csv" else read_library(source, args.arch)
    kernels = [kernel for kernel in found if args.pattern in kernel.name]
    if not kernels:
        raise ValueError(f"no kernel of {source} has '{args.pattern}' in its name")
    if args.threads is None and all(kernel.threads is None for kernel in kernels):
        raise ValueError(f"{source} does not say how many threads a block has; give --threads")
    return kernels


def run(args: argparse.Namespace) -> int:
    rows = [
        ("kernel", "arch", "threads", "registers", "shared", "blocks/SM", "warps", "limited by")
    ]
    for kernel in _kernels(args):
        threads = kernel.threads if args.threads is None else args.threads
        shared = kernel.shared_bytes + args.shared
        row = (kernel.name, kernel.arch, str(threads or "?"), str(kernel.registers), str(shared))
        if threads is None:
            rows.append((*row, "?", "?", "no launch bound"))
            continue
        o = occupancy(kernel.registers, threads, shared, kernel.arch)
        rows.append((*row, str(o.blocks), f"{o.warps} of {o.of_warps}", o.limiter))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.ljust(w) if i in (0, 7) else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths))
        ]
        print("  ".join(cells).rstrip())
    return 0
