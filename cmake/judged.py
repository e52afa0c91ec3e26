# SPDX-License-Identifier: BSD-3-Clause
"""Finds the CUDA sources that have not changed since docs/resources.csv was written.

    python cmake/judged.py drafts [--nvcc NVCC]      prints these sources
    python cmake/judged.py record BUILD              writes docs/resources.csv and docs/resources.txt

docs/resources.csv lists the registers, spills and stack of every CUDA kernel. Making the machine code
of all kernels takes long, and unchanged sources give the same code again. So a check without a GPU
(GPUKERN_CUDA_DRAFT) makes no machine code of unchanged sources, and tests/build/test_resources.py takes
their rows from docs/resources.csv.

docs/resources.txt decides what is unchanged. It has a digest of docs/resources.csv and of each CUDA
source. The digest of a source covers the file, all headers of csrc/ that it includes, the options of
cmake/GkRules.cmake and the version of nvcc, but neither comments nor white space. Without
docs/resources.txt every source counts as changed.

`record` builds BUILD, which must not have drafts, and runs the tests of resources before it writes the
two files.
"""

import argparse
import functools
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Compiled even if it is unchanged, because tests read the machine code and the messages of ptxas.
ALWAYS = "csrc/cuda/attn/forward/flash_attn_fp8_sm90a.cu"
# A comment, or a string, which may contain the signs of a comment.
COMMENT = re.compile(r'/\*.*?\*/|//[^\n]*|("(?:\\.|[^"\\\n])*")', re.DOTALL)
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
# The parts of cmake/GkRules.cmake that have nvcc's options: -gencode, and those of gk_cuda_objects.
OPTIONS = re.compile(r"^set\(gk_cuda_flags_.*?\)$|^macro\(gk_cuda_objects.*?^endmacro", re.M | re.S)


def code(text: str) -> str:
    """C without comments. White space becomes one space, nothing behind * and &, and a line feed
    around a preprocessor directive."""
    text = COMMENT.sub(lambda m: m[1] or " ", text.replace("\\\n", " "))
    parts = re.split(r"^([ \t]*#[^\n]*)$", text, flags=re.MULTILINE)
    lines = (" ".join(part.split()) for part in parts)
    return "\n".join(re.sub(r"([*&]) (?=\w)", r"\1", line) for line in lines if line)


class Tree:
    """The sources of one checkout."""

    def __init__(self, root: Path):
        self.root = root
        self.read = functools.cache(lambda path: code(path.read_text()))

    def sources(self) -> list[str]:
        found = (self.root / "csrc" / "cuda").rglob("*.cu")
        return sorted(path.relative_to(self.root).as_posix() for path in found)

    def closure(self, source: Path) -> set[Path]:
        """The source and the headers of csrc/ that it includes."""
        found, todo = set(), [source]
        while todo:
            path = todo.pop()
            if path in found:
                continue
            found.add(path)
            for name in INCLUDE.findall(self.read(path)):
                places = (path.parent, self.root / "csrc", self.root / "csrc" / "include")
                files = [Path(os.path.normpath(place / name)) for place in places]
                todo.append(next(file for file in files if file.is_file()))
        return found

    def digest(self, source: str, compiler: str) -> str:
        rules = (self.root / "cmake" / "GkRules.cmake").read_text()
        total = hashlib.sha256("\n".join([compiler, *OPTIONS.findall(rules)]).encode())
        for path in sorted(self.closure(self.root / source)):
            name = path.relative_to(self.root).as_posix()
            total.update(f"\0{name}\0{self.read(path)}".encode())
        return total.hexdigest()


def version(nvcc: str) -> str:
    printed = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"\bV([\d.]+)", printed)[1]


def digest_of(listed: Path) -> str:
    return hashlib.sha256(listed.read_bytes()).hexdigest()


def recorded(root: Path = ROOT) -> dict[str, str]:
    """source -> digest; empty if docs/resources.csv is not the recorded one."""
    file, listed = root / "docs" / "resources.txt", root / "docs" / "resources.csv"
    if not file.exists() or not listed.exists():
        return {}
    digests = {name: digest for digest, name in map(str.split, file.read_text().splitlines())}
    return digests if digests.pop("docs/resources.csv", "") == digest_of(listed) else {}


def drafts(compiler: str, root: Path = ROOT) -> list[str]:
    """The sources that are unchanged, except ALWAYS."""
    tree, before = Tree(root), recorded(root)
    return [
        source
        for source in tree.sources()
        if source != ALWAYS and before.get(source) == tree.digest(source, compiler)
    ]


def write(root: Path, compiler: str) -> None:
    """Writes docs/resources.txt."""
    tree, docs = Tree(root), root / "docs"
    digests = {"docs/resources.csv": digest_of(docs / "resources.csv")}
    digests |= {source: tree.digest(source, compiler) for source in tree.sources()}
    text = "".join(f"{digest} {name}\n" for name, digest in digests.items())
    (docs / "resources.txt").write_text(text)


def record(build: Path, compiler: str) -> None:
    if (build / "cuda_drafts.txt").exists():
        sys.exit(f"judged: {build} has drafts; configure it with -DGPUKERN_CUDA_DRAFT=OFF")
    subprocess.run(["cmake", "--build", build], check=True)
    tools, tests = ROOT / "tools", ROOT / "tests" / "build"
    report = [sys.executable, tools / "ptxas_report.py", build / "libgpukern.so"]
    listed = subprocess.run(report, capture_output=True, text=True, check=True).stdout
    (ROOT / "docs" / "resources.csv").write_text(listed)
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", tests / "test_resources.py"],
        env=os.environ | {"GPUKERN_BUILD_DIR": str(build.resolve())},
        check=True,
    )
    write(ROOT, compiler)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nvcc", default="nvcc", help="the compiler; default: nvcc on PATH")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("drafts")
    commands.add_parser("record").add_argument("build", type=Path, metavar="BUILD")
    args = parser.parse_args()
    if args.command == "record":
        record(args.build, version(args.nvcc))
    else:
        print("\n".join(drafts(version(args.nvcc))))


if __name__ == "__main__":
    main()
