# SPDX-License-Identifier: BSD-3-Clause
"""Compares the machine code (SASS) of two builds, kernel by kernel, ignoring names.

    python tools/same_sass.py OLD NEW [--only PATTERN] [--show]
    python tools/same_sass.py --keep FILE OLD

OLD and NEW are libraries, objects or cubins. They may also be JSON files that --keep wrote. These have
digests of the kernels, so that the old build can be deleted. Kernels are matched by architecture and
code, so a renamed template or file makes no difference. A kernel without a match is printed with its demangled
name; with --show also the first lines that differ from the kernel of the same name. Exits with 1 if
anything differs. Uses cuobjdump and nvdisasm (PyPI: nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm);
needs no GPU.
"""

import argparse
import collections
import hashlib
import json
import re
import sys
from pathlib import Path

from ptxas_report import dump, short

# names that occur in code: functions that are called, by their mangled names
NAMES = re.compile(r"`\(.*?\)|\$\S+")


def kernels(path: str, text: bool = False) -> dict[tuple[str, str], list[str]]:
    """(architecture, mangled name) -> the digest of the kernel's code, or with `text` its lines."""
    if Path(path).suffix == ".json":
        return {
            tuple(key.split(" ", 1)): [digest]
            for key, digest in json.loads(Path(path).read_text()).items()
        }
    found, arch, body = {}, "", None
    for line in dump(path, "--dump-sass"):
        if match := re.match(r"\s*\.target\s+(\w+)", line) or re.match(r"arch = (\w+)", line):
            arch = match[1]
        elif match := re.match(r"\s*Function : (\S+)", line):
            body = found[arch, match[1]] = [] if text else hashlib.sha256()
        elif body is not None and re.match(r"\s+/\*", line):
            line = NAMES.sub("", line.strip())
            body.append(line) if text else body.update(line.encode())
        elif body is not None and line.strip().startswith("...."):
            body = None
    return found if text else {key: [body.hexdigest()] for key, body in found.items()}


def plain(name: str) -> str:
    """A mangled name without the hashes that nvcc gives to an anonymous namespace; they depend on
    the file's name."""
    return re.sub(r"\d+_GLOBAL__N__[0-9a-f]+_\d+_\w+?_cu_[0-9a-f]{8}", "", name)


def unmatched(a: dict, b: dict) -> list[tuple[str, str]]:
    """The kernels of a without a match in b. Several kernels may have the same code; each needs a
    match of its own."""
    left = collections.Counter((arch, digest) for (arch, _), (digest,) in b.items())
    out = []
    for (arch, name), (digest,) in sorted(a.items()):
        left[arch, digest] -= 1
        if left[arch, digest] < 0:
            out.append((arch, name))
    return out


def show(old: str, new: str, gone: list, come: list) -> None:
    """Prints the first lines that differ, for each pair of kernels with the same name."""
    before, after = kernels(old, text=True), kernels(new, text=True)
    by_name = {(arch, plain(name)): name for arch, name in come}
    for arch, name in gone:
        if (arch, plain(name)) not in by_name:
            continue
        x, y = before[arch, name], after[arch, by_name[arch, plain(name)]]
        first = next(
            (i for i, pair in enumerate(zip(x, y)) if pair[0] != pair[1]), min(len(x), len(y))
        )
        print(f"{arch} {short([name])[0]}: {len(x)} and {len(y)} lines, the first that differ:")
        for mark, lines in (("-", x), ("+", y)):
            print("\n".join(f"    {mark} {line}" for line in lines[first : first + 4]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("builds", nargs="+", metavar="BUILD")
    parser.add_argument("--keep", metavar="FILE", help="write the digests of one build, as json")
    parser.add_argument("--only", default="", help="kernels whose mangled name matches")
    parser.add_argument("--show", action="store_true", help="print the first lines that differ")
    args = parser.parse_args()
    found = [
        {key: body for key, body in kernels(build).items() if re.search(args.only, key[1])}
        for build in args.builds
    ]
    for build, here in zip(args.builds, found):
        if not here:
            sys.exit(f"same_sass: no kernel in {build}")
    if args.keep:
        text = {f"{arch} {name}": digest for (arch, name), (digest,) in found[0].items()}
        Path(args.keep).write_text(json.dumps(text, indent=0))
        return 0
    if len(found) != 2:
        parser.error("two builds, or --keep and one")
    gone, come = unmatched(found[0], found[1]), unmatched(found[1], found[0])
    for sign, kind in (("-", gone), ("+", come)):
        for arch, name in kind:
            print(sign, arch, short([name])[0])
    if args.show and gone and come:
        show(*args.builds, gone, come)
    print(
        f"{len(found[0])} and {len(found[1])} kernels; {len(gone)} of the old and {len(come)} of "
        f"the new have no partner"
    )
    return 1 if gone or come else 0


if __name__ == "__main__":
    sys.exit(main())
