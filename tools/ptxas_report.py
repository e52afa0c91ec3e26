# SPDX-License-Identifier: BSD-3-Clause
"""What the compiler made of every CUDA kernel: registers, local memory, and the instructions of the hot loop.

    python tools/ptxas_report.py LIBRARY > docs/resources.csv

Reads a built library or object with cuobjdump and nvdisasm (PyPI: nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm); needs
neither nvcc nor a GPU. One line a kernel, sorted by name:
    kernel, arch, registers, stack_bytes, local_bytes, shared_bytes, loop_instructions, then a count per opcode of interest in
    that loop; those of tma and of other registers (UTMALDG .. USETMAXREG) and of local memory (LDL, STL) in the whole kernel
The hot loop is the innermost one with the most matrix instructions, else with the most FFMA, else the longest. Where a
kernel has wgmma it is the shortest loop with most of them: waiting for a barrier is a loop inside it. So it is where mma.sync
stands around an innermost loop only.
"""

import argparse
import csv
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

WHOLE = ("UTMALDG", "UTMASTG", "STSM", "USETMAXREG", "LDL", "STL")  # counted in the whole kernel
MMA = ("HMMA", "DMMA")  # mma.sync
GMMA = ("HGMMA", "QGMMA", "IGMMA")  # WGMMA of 16 bits and tf32, of fp8, of int8
LOOP = (
    *GMMA,
    "WARPGROUP",
    "HMMA",
    "DMMA",
    "FFMA",
    "DFMA",
    "LDSM",
    "LDS",
    "STS",
    "LDGSTS",
    "LDG",
    "STG",
    "MUFU",
    "BAR",
)
OPCODES = (*LOOP, *WHOLE)
FIELDS = ("kernel", "arch", "registers", "stack_bytes", "local_bytes", "shared_bytes", "loop_instructions", *OPCODES)


def program(name: str) -> str:
    """cuobjdump and nvdisasm of this environment, else those on the path."""
    own = Path(sysconfig.get_path("purelib")) / "nvidia"
    found = sorted(own.glob(f"*/bin/{name}")) or [shutil.which(name)]
    if not found[0]:
        sys.exit(f"ptxas_report: {name} was not found; pip install nvidia-{'cuda-' + name}")
    return str(found[-1])


def _environment() -> dict[str, str]:
    return {"PATH": f"{Path(program('nvdisasm')).parent}:{Path(program('cuobjdump')).parent}:/usr/bin:/bin"}


def dump(library: str, *options: str) -> Iterator[str]:
    """What cuobjdump prints of a library or object, by line."""
    command = [program("cuobjdump"), *options, library]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=quiet, text=True, env=_environment()) as running:
        yield from running.stdout


def disassembly(library: str, *archs: str) -> Iterator[tuple[str, list[tuple[int, str, str, int]]]]:
    """Every kernel of those architectures: its mangled name, and per instruction its address, its opcode, the opcode's
    modifiers with the operands, and where a branch goes or -1. nvdisasm is asked, kernel code alone: cuobjdump prints every
    instruction's bits as well, four times the text. A library takes a minute."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([program("cuobjdump"), "-xelf", "all", Path(library).resolve()],
                       cwd=folder, env=_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        for cubin in sorted(Path(folder).glob("*.cubin")):
            if cubin.suffixes[-2] not in {f".{arch}" for arch in archs}:
                continue
            command = [program("nvdisasm"), "-c", cubin]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=_environment()) as running:
                yield from _kernels(running.stdout)


def _kernels(lines: Iterable[str]) -> Iterator[tuple[str, list[tuple[int, str, str, int]]]]:
    """Those of one cubin. A line is a section, a label, or /*address*/, a predicate, opcode and operands."""
    name, code, labels = None, [], {}

    def placed() -> tuple[str, list[tuple[int, str, str, int]]]:
        return name, [(at, opcode, rest, labels.get(to, -1)) for at, opcode, rest, to in code]

    for line in lines:
        if line.startswith("        /*"):
            address, _, text = line[10:].partition("*/")
            text = text.strip()
            if text[0] == "@":
                text = text.split(None, 1)[1]
            end = OPCODE.match(text).end()
            to = TARGET.search(text) if text.startswith("BRA") else None
            code.append((int(address, 16), text[:end], text[end:].rstrip(" ;"), to[1] if to else ""))
        elif line.startswith(".L_"):
            labels[line.rstrip(":\n")] = code[-1][0] + 16 if code else 0
        elif line.startswith(".text."):
            if name:
                yield placed()
            name, code, labels = line[len(".text.") :].rstrip(":\n"), [], {}
    if name:
        yield placed()


OPCODE = re.compile(r"\w+")
TARGET = re.compile(r"`\((\.L_\w+)\)")


def short(mangled: list[str]) -> list[str]:
    """The demangled names without namespaces and parameters."""
    names = subprocess.run(["c++filt"], input="\n".join(mangled), capture_output=True, text=True).stdout.splitlines()
    return [_short(name) for name in names]


def _short(name: str) -> str:
    name = re.sub(r"\((anonymous namespace|unnamed)\)::|_GLOBAL__N_\w+::", "", name)
    name = re.sub(r"^void ", "", name)
    depth, end = 0, len(name)
    for i, c in enumerate(name):  # the parameter list starts at the first bracket outside < >
        depth += (c == "<") - (c == ">")
        if c == "(" and depth == 0:
            end = i
            break
    return name[:end].replace("__nv_bfloat16", "bf16").replace("__half", "f16")


def resources(library: str, archs: list[str]) -> dict[str, dict]:
    found, here = {}, False
    for line in dump(library, "--dump-resource-usage"):
        if match := re.match(r"arch = (\w+)", line):
            arch = match[1]
            here = arch in archs
        elif match := re.match(r" Function (\S+):", line):
            name = match[1]
        elif here and (match := re.match(r"\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", line)):
            registers, stack, shared, local = map(int, match.groups())
            found[name] = {
                "kernel": name,
                "arch": arch,
                "registers": registers,
                "stack_bytes": stack,
                "local_bytes": local,
                "shared_bytes": shared,
            }
    for row, name in zip(found.values(), short(list(found))):
        row["kernel"] = name
    return found


def hot_loop(code: list[tuple[int, str, int]]) -> list[str]:
    """Opcodes of the hot loop of one kernel; code is (address, opcode, where a branch goes or -1)."""
    index = {address: i for i, (address, _, _) in enumerate(code)}
    loops = [(index[to], i) for i, (address, _, to) in enumerate(code) if 0 <= to < address]
    if not loops:
        return []
    opcodes = [opcode for _, opcode, _ in code]
    bodies = [opcodes[first : last + 1] for first, last in loops]

    def shortest_with_most(kinds: tuple[str, ...]) -> list[str] | None:
        counts = [sum(opcode in kinds for opcode in body) for body in bodies]
        most = max(counts)
        return min((body for body, n in zip(bodies, counts) if n == most), key=len) if most else None

    if body := shortest_with_most(GMMA):
        return body
    innermost = [
        body
        for (first, last), body in zip(loops, bodies)
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in loops)
    ]
    if not any(opcode in MMA for body in innermost for opcode in body):  # a product around a loop that decodes
        if body := shortest_with_most(MMA):
            return body

    def heat(body: list[str]) -> tuple[int, ...]:
        """Products on tensor cores, then others; a curve on the way to a store is no product."""
        matrix, scalar = (sum(x in kind for x in body) for kind in (MMA, ("FFMA", "DFMA")))
        return matrix, 0 if "STG" in body else scalar, scalar, len(body)

    return max(innermost, key=heat)


def loops(library: str) -> dict[str, tuple[list[str], list[str]]]:
    """Per kernel the opcodes of its hot loop and those of all of it."""
    found = {}
    for name, code in disassembly(library, "sm_90", "sm_90a"):
        found[name] = hot_loop([(at, opcode, to) for at, opcode, _, to in code]), [opcode for _, opcode, _, _ in code]
    return found


def report(library: str) -> list[dict]:
    """Each kernel once: none is built for both."""
    rows, bodies = resources(library, ["sm_90", "sm_90a"]), loops(library)
    for name, row in rows.items():
        body, whole = bodies.get(name, ([], []))
        row["loop_instructions"] = len(body)
        row.update({x: (whole if x in WHOLE else body).count(x) for x in OPCODES})
    return sorted(rows.values(), key=lambda row: row["kernel"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library")
    args = parser.parse_args()
    writer = csv.DictWriter(sys.stdout, FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(report(args.library))
    return 0


if __name__ == "__main__":
    sys.exit(main())
