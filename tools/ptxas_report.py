# SPDX-License-Identifier: BSD-3-Clause
"""Reports what the compiler made of every CUDA kernel: registers, local memory, and the
instructions of the hot loop.

    python tools/ptxas_report.py LIBRARY > docs/resources.csv

Reads a built library or object with cuobjdump (PyPI: nvidia-cuda-cuobjdump). nvdisasm
(nvidia-cuda-nvdisasm) is needed only for kernels with an opcode that NAMES lacks. Needs neither
nvcc nor a GPU. Prints one line per kernel, sorted by name:

    kernel, arch, registers, stack_bytes, local_bytes, shared_bytes, loop_instructions, then a count
    for each opcode of interest in the hot loop. TMA, setmaxnreg (UTMALDG .. USETMAXREG) and local
    memory (LDL, STL) are counted in the whole kernel.

The hot loop is the innermost loop with the most matrix instructions. If no loop has any, it is the
one with the most FFMA, and otherwise the longest. If a kernel has wgmma, the hot loop is the
shortest of the loops with the most wgmma, innermost or not, because a wait for a barrier is a loop
inside it. The same holds if mma.sync occurs only around the innermost loops.
"""

import argparse
import collections
import contextlib
import csv
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

WHOLE = ("UTMALDG", "UTMASTG", "STSM", "USETMAXREG", "LDL", "STL")  # counted in the whole kernel
MMA = ("HMMA", "IMMA", "DMMA")  # mma.sync
GMMA = ("HGMMA", "QGMMA", "IGMMA")  # WGMMA: 16 bits and TF32, FP8, int8
LOOP = (
    *GMMA,
    "WARPGROUP",
    *MMA,
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
FIELDS = (
    "kernel",
    "arch",
    "registers",
    "stack_bytes",
    "local_bytes",
    "shared_bytes",
    "loop_instructions",
    *OPCODES,
)


def find_program(name: str) -> Path | None:
    """cuobjdump or nvdisasm in this environment, otherwise on PATH; None if it is in neither."""
    own = Path(sysconfig.get_path("purelib")) / "nvidia"
    if found := sorted(own.glob(f"*/bin/{name}")):
        return found[-1]
    on_path = shutil.which(name)
    return None if on_path is None else Path(on_path)


def program(name: str) -> str:
    """The path of cuobjdump or nvdisasm; exits if it is not installed."""
    found = find_program(name)
    if found is None:
        sys.exit(f"ptxas_report: {name} was not found; pip install nvidia-cuda-{name}")
    return str(found)


def _environment() -> dict[str, str]:
    """A PATH with both programs: cuobjdump -sass, which tools/same_sass.py uses, calls nvdisasm.
    The report itself does not need nvdisasm."""
    found = (find_program(name) for name in ("nvdisasm", "cuobjdump"))
    folders = [str(path.parent) for path in found if path is not None]
    return {"PATH": ":".join([*folders, "/usr/bin", "/bin"])}


NO_DEVICE_CODE = 255  # cuobjdump's exit status for a file that it can read and that has no kernels


def _stop_unless_read(status: int, library: str | Path) -> None:
    if status not in (0, NO_DEVICE_CODE):
        sys.exit(f"ptxas_report: cuobjdump cannot read {library}; name a built library or object")


def dump(library: str, *options: str) -> Iterator[str]:
    """The lines that cuobjdump prints for a library or object."""
    command = [program("cuobjdump"), *options, library]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=quiet, text=True, env=_environment()
    ) as running:
        yield from running.stdout
    _stop_unless_read(running.returncode, library)


@contextlib.contextmanager
def cubins(library: str | Path, *archs: str) -> Iterator[list[Path]]:
    """The machine code of these architectures: a cubin for each source file that has some."""
    with tempfile.TemporaryDirectory() as folder:
        extracted = subprocess.run(
            [program("cuobjdump"), "-xelf", "all", Path(library).resolve()],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _stop_unless_read(extracted.returncode, library)
        yield [
            x for x in sorted(Path(folder).glob("*.cubin")) if x.suffixes[-2].lstrip(".") in archs
        ]


def disassembly(cubin: Path) -> Iterator[tuple[str, list[tuple[int, str, str, int]]]]:
    """The kernels of a cubin: mangled name, and for each instruction its address, opcode, modifiers
    with operands, and a branch's target or -1.

    It uses nvdisasm, because cuobjdump also prints every instruction's bits, four times the text. A
    whole library takes a minute and a half."""
    command = [program("nvdisasm"), "-c", cubin]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        yield from _kernels(running.stdout)


def _kernels(lines: Iterable[str]) -> Iterator[tuple[str, list[tuple[int, str, str, int]]]]:
    """Parses nvdisasm's lines of one cubin. A line is a section, a label, or an instruction:
    /*address*/, predicate, opcode and operands."""
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
            code.append(
                (int(address, 16), text[:end], text[end:].rstrip(" ;"), to[1] if to else "")
            )
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


# ---- machine code, read in a tenth of a second ---------------------------------------------------
# An instruction of sm_90 has 128 bits. The lowest nine are its opcode; the next ones say where
# operands come from. A BRA contains the distance from the next instruction to its target, in units
# of 4 bytes. A cubin is an ELF file with a section .text.<kernel> for each kernel.
# tests/build/test_resources.py compares all of this with nvdisasm's output.

STEP = 16  # bytes from an instruction to the next
BRA = 0x147
NAMES = {
    int(number, 16): name
    for number, name in re.findall(
        r"(\w{3}) (\w+)",
        """
    002 MOV  003 P2R  004 R2P  005 CS2R  006 VOTE  007 SEL  008 FSEL  009 FMNMX  00A FSET  00B FSETP  00C ISETP
    00F VIMNMX3  010 IADD3  011 LEA  012 LOP3  013 IABS  016 PRMT  019 SHF  01C PLOP3  020 FMUL  021 FADD  023 FFMA
    024 IMAD  025 IMAD  027 IMAD  028 DMUL  029 DADD  02A DSETP  02B DFMA  02D PREEXIT  02E ACQBULK  02F ELECT
    030 HADD2  031 HFMA2  032 HMUL2  035 HFMA2  036 VIADD  037 IMMA  03A MOVM  03B LDSM  03C HMMA  03E F2FP
    03F DMMA  044 STSM  045 I2FP  046 VIADDMNMX  048 VIMNMX  082 UMOV  086 VOTEU  087 USEL  08C UISETP  090 UIADD3
    091 ULEA  092 ULOP3  096 UPRMT  097 UIADD3  099 USHF  09C UPLOP3  0A4 UIMAD  0A5 UIMAD  0B9 ULDC  0BB ULDC
    0BD UFLO  0BE UBREV  0CA R2UR  100 FLO  101 BREV  102 FCHK  104 F2F  105 F2I  106 I2F  107 FRND  108 MUFU
    110 F2F  111 F2I  112 I2F  118 NOP  119 S2R  11A DEPBAR  11B ENDCOLLECTIVE  11C B2R  11D BAR  141 BSYNC
    142 BREAK  144 CALL  145 BSSY  146 YIELD  147 BRA  148 WARPSYNC  149 BRX  14D EXIT  150 RET  15D NANOSLEEP
    181 LDG  182 LDC  183 LDL  184 LDS  186 STG  187 STL  188 STS  189 SHFL  18E REDG  18F CCTL  192 MEMBAR
    1A1 MATCH  1A6 REDG  1A7 SYNCS  1AB ERRBAR  1AE LDGSTS  1AF LDGDEPBAR  1B2 SYNCS  1B4 UTMALDG  1B5 UTMASTG
    1B7 UTMACMDFLUSH  1B9 UTMACCTL  1BA UBLKCP  1BD STAS  1C3 S2UR  1C4 REDUX  1C5 WARPGROUP  1C6 FENCE  1C7 UCGABAR
    1C8 USETMAXREG  1F0 HGMMA  1F1 IGMMA  1F3 QGMMA
    """,
    )
}


class Unknown(Exception):
    """Raised for an opcode that NAMES does not have."""


def sections(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    """Each kernel's mangled name and code."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    (strings,) = struct.unpack_from("<Q", cubin, table + names * entry + 0x18)
    for at in range(table, table + count * entry, entry):
        (name,) = struct.unpack_from("<I", cubin, at)
        start, size = struct.unpack_from("<QQ", cubin, at + 0x18)
        name = cubin[strings + name : cubin.index(b"\0", strings + name)].decode()
        if name.startswith(".text."):
            yield name.removeprefix(".text."), cubin[start : start + size]


def decoded_kernels(cubin: bytes) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """The kernels of a cubin: mangled name, and for each instruction its opcode and the index of a
    branch's target or -1."""
    return [(name, *decoded(code)) for name, code in sections(cubin)]


def decoded(code: bytes) -> tuple[np.ndarray, np.ndarray]:
    """The opcodes of a kernel's code, and for each the index of a branch's target or -1."""
    low, high = np.frombuffer(code, "<u8").reshape(-1, 2).T
    numbers = (low & np.uint64(0x1FF)).astype(np.int64)
    if unknown := set(np.unique(numbers).tolist()) - set(NAMES):
        raise Unknown(", ".join(map(hex, sorted(unknown))))
    # a signed number of 56 bits: the low 8 from bit 16 on, the others from bit 34 on
    far = high.astype(np.int64) << 38 | (low >> np.uint64(34) << np.uint64(8)).astype(np.int64)
    far |= (low >> np.uint64(16) & np.uint64(0xFF)).astype(np.int64)
    to = np.where(numbers == BRA, np.arange(1, len(low) + 1) + (far << 8 >> 8) * 4 // STEP, -1)
    return _NAMES_BY_NUMBER[numbers], to


_NAMES_BY_NUMBER = np.array([NAMES.get(x, "") for x in range(0x200)])


def short(mangled: list[str]) -> list[str]:
    """The demangled names without namespaces and parameters."""
    names = subprocess.run(
        ["c++filt"], input="\n".join(mangled), capture_output=True, text=True
    ).stdout.splitlines()
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
    """Mangled name -> the columns of a kernel that cuobjdump prints."""
    found, here = {}, False
    for line in dump(library, "--dump-resource-usage"):
        if match := re.match(r"arch = (\w+)", line):
            arch = match[1]
            here = arch in archs
        elif match := re.match(r" Function (\S+):", line):
            name = match[1]
        elif here and (
            match := re.match(r"\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", line)
        ):
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


def hot_loop(opcodes: np.ndarray, to: np.ndarray) -> np.ndarray:
    """The opcodes of a kernel's hot loop. to[i] is the target of a branch at i, otherwise -1."""
    last = np.flatnonzero((to >= 0) & (to < np.arange(len(to))))
    first = to[last]
    if not len(last):
        return opcodes[:0]
    size = last + 1 - first

    def count(*kinds: str) -> np.ndarray:
        """How many of these opcodes each loop has."""
        sums = np.concatenate(([0], np.cumsum(np.isin(opcodes, kinds))))
        return sums[last + 1] - sums[first]

    def shortest_with_most(counts: np.ndarray) -> np.ndarray:
        best = np.flatnonzero(counts == counts.max())
        return body(best[np.argmin(size[best])])

    def body(i: int) -> np.ndarray:
        return opcodes[first[i] : last[i] + 1]

    if (gmma := count(*GMMA)).any():
        return shortest_with_most(gmma)
    # by this test, a loop lies inside itself, and inside a loop with the same bounds
    inside = (first[:, None] <= first) & (last <= last[:, None])
    innermost = np.flatnonzero(~(inside & ~inside.T).any(1))
    mma, scalar, stores = count(*MMA), count("FFMA", "DFMA"), count("STG")
    if mma.any() and not mma[innermost].any():  # the products are outside a decoding loop
        return shortest_with_most(mma)

    def heat(i: int) -> tuple[int, ...]:
        """The sort key: tensor-core instructions, then FFMA. FFMA in a loop with a store counts
        less, because it may be an epilogue's activation."""
        return mma[i], 0 if stores[i] else scalar[i], scalar[i], size[i]

    return body(max(innermost, key=heat))


def loops(library: str) -> dict[str, tuple[collections.Counter, collections.Counter]]:
    """For each kernel, the counts of its opcodes in its hot loop and in the whole kernel."""
    found = {}
    with cubins(library, "sm_90", "sm_90a") as paths:
        for path in paths:
            for name, opcodes, to in instructions(path):
                found[name] = (
                    collections.Counter(hot_loop(opcodes, to).tolist()),
                    collections.Counter(opcodes.tolist()),
                )
    return found


def instructions(cubin: Path) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """As decoded_kernels, but with nvdisasm for kernels with an unknown opcode."""
    try:
        return decoded_kernels(cubin.read_bytes())
    except Unknown:
        return [
            (name, np.array([x[1] for x in code]), np.array([x[3] for x in code]) // STEP)
            for name, code in disassembly(cubin)
        ]


def report(library: str) -> list[dict]:
    """The rows of all kernels, sorted. No kernel is compiled for both architectures."""
    rows, bodies = resources(library, ["sm_90", "sm_90a"]), loops(library)
    for name, row in rows.items():
        body, whole = bodies.get(name, (collections.Counter(), collections.Counter()))
        row["loop_instructions"] = body.total()
        row.update({x: (whole if x in WHOLE else body)[x] for x in OPCODES})
    return sorted(rows.values(), key=lambda row: row["kernel"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library")
    args = parser.parse_args()
    rows = report(args.library)  # first, so that an error prints no table
    writer = csv.DictWriter(sys.stdout, FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
