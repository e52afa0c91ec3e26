# SPDX-License-Identifier: BSD-3-Clause
"""Adds to dist/, which has a wheel, everything else that a maintainer uploads: the sdist, checksums
and an index page.

    make release                                   tests with torch 2.10 and the newest one
    make release RELEASE_TORCH=2.13.0              one torch of your choice
    python cmake/release.py dist --torch 2.10 newest

For each version of torch it makes a fresh environment, installs the wheel through the index page,
and runs tests of the ops against the installed package. The sdist must have the same files as git.
Nothing is uploaded.

dist/simple is an index as PEP 503 describes it:

    pip install --extra-index-url file://$PWD/dist/simple gpukern
"""

import argparse
import hashlib
import html
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "release"
# A sample of every kind of op: products, attention, pages, rows, quantised operands.
TESTS = (
    "tests/ops/test_gemm.py",
    "tests/ops/test_flash_attn.py",
    "tests/ops/test_paged_attn.py",
    "tests/ops/test_rows.py",
    "tests/ops/test_weight_gemm.py",
)


def run(*command, **options):
    print("+", *command, flush=True)
    subprocess.run([str(part) for part in command], check=True, **options)


def make_sdist(dist: Path) -> None:
    """Makes the sdist from the commit. The folder may hold files that git does not know."""
    tree = WORK / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", "HEAD"], check=True, cwd=ROOT, capture_output=True)
    subprocess.run(["tar", "-x", "-C", tree], check=True, input=archive.stdout)
    script = "import sys; from scikit_build_core import build; build.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", script, dist, cwd=tree)


def packages(dist: Path) -> list[Path]:
    """The wheel and the sdist. Raises SystemExit unless there is one of each, of the same version."""
    found = sorted([*dist.glob("*.whl"), *dist.glob("*.tar.gz")])
    versions = {re.match(r"gpukern-([^-]+?)(?:-|\.tar)", path.name)[1] for path in found}
    if len(found) != 2 or len(versions) != 1:
        names = ", ".join(path.name for path in found)
        raise SystemExit(f"release: expected one wheel and one sdist in {dist}, found {names}")
    return found


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def requires_python(path: Path) -> str:
    """The Requires-Python of the wheel's metadata."""
    with zipfile.ZipFile(path) as archive:
        [name] = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return re.search(r"^Requires-Python: (.+)$", archive.read(name).decode(), re.MULTILINE)[1]


def write_sums(dist: Path) -> None:
    """SHA256SUMS, as `sha256sum --check` reads it."""
    lines = [f"{sha256(path)}  {path.name}\n" for path in packages(dist)]
    (dist / "SHA256SUMS").write_text("".join(lines))


def write_index(dist: Path) -> None:
    """simple/index.html and simple/gpukern/index.html, whose links lead to the files of dist."""
    files = packages(dist)
    [wheel] = [path for path in files if path.suffix == ".whl"]
    needs = html.escape(requires_python(wheel), quote=True)
    links = [
        f'<a href="../../{path.name}#sha256={sha256(path)}" data-requires-python="{needs}">{path.name}</a><br>'
        for path in files
    ]

    def page(path, title, lines):
        path.parent.mkdir(parents=True, exist_ok=True)
        head = f'<meta charset="utf-8"><meta name="pypi:repository-version" content="1.0"><title>{title}</title>'
        path.write_text(
            "\n".join(
                ("<!DOCTYPE html>", f"<html><head>{head}</head><body>", *lines, "</body></html>\n")
            )
        )

    simple = dist / "simple"
    page(simple / "index.html", "Simple index", ['<a href="gpukern/">gpukern</a>'])
    page(simple / "gpukern" / "index.html", "Links for gpukern", links)


def pinned(*names: str) -> list[str]:
    """Packages as requirements-test.txt pins them, markers included."""
    lines = (ROOT / "requirements-test.txt").read_text().splitlines()
    return [line for line in lines if re.split(r"[=;]", line)[0] in names]


def environment(name: str) -> Path:
    """The Python of a fresh environment."""
    folder = WORK / name
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "venv", folder)
    return folder / "bin" / "python"


def check(dist: Path, version: str, tests: list[str]) -> None:
    """Makes a fresh environment with this torch, installs the wheel through the index, and runs
    tests."""
    python = environment(f"torch-{version}")
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile")
    torch = (
        "torch" if version == "newest" else f"torch=={version}" + ".*" * (version.count(".") < 2)
    )
    run(*pip, torch, "numpy", *pinned("pytest", "pytest-xdist", "hypothesis"))
    # no other index and no cache, so that the installed wheel is the one in dist
    index = (dist / "simple").as_uri()
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    alone = {"env": plain | {"PIP_CONFIG_FILE": os.devnull}}
    only = ("--no-deps", "--no-cache-dir", "--only-binary", ":all:")
    run(*pip, *only, "--index-url", index, "gpukern", **alone)
    versions = (
        "import torch, torch_gpukern as g; print('torch', torch.__version__, 'with', g.__file__)"
    )
    run(python, "-c", versions, cwd=WORK)
    run(python, "-m", "torch_gpukern", "doctor", cwd=WORK)
    workers = os.environ.get("MAX_JOBS", str(os.cpu_count()))
    spread = ("-n", workers, "--dist", "worksteal")
    run(python, "-m", "pytest", "-q", *spread, *(ROOT / test for test in tests), cwd=WORK)


def check_sdist(dist: Path, build: bool) -> None:
    """Checks that the sdist has the files that git has. With `build`, also makes a wheel from it,
    without CUDA, and checks that both wheels have the same files."""
    [archive] = dist.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        packed = {m.name.split("/", 1)[1] for m in files.getmembers() if m.isfile()} - {"PKG-INFO"}
    listed = subprocess.run(
        ["git", "ls-files"], check=True, cwd=ROOT, capture_output=True, text=True
    )
    if differ := packed ^ set(listed.stdout.splitlines()):
        raise SystemExit(
            f"release: the sdist and git differ in {', '.join(sorted(differ))}; commit or remove them"
        )
    if not build:
        return
    [wheel] = dist.glob("*.whl")
    folder = WORK / "from-sdist"
    shutil.rmtree(folder, ignore_errors=True)
    settings = ("--config-settings=cmake.define.GPUKERN_CUDA=0",)
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check")
    run(*pip, "--no-deps", "--no-index", "--no-build-isolation", *settings, archive, "-w", folder)
    [made] = folder.iterdir()
    with zipfile.ZipFile(wheel) as ours, zipfile.ZipFile(made) as theirs:
        names = [{n for n in z.namelist() if not n.endswith("/")} for z in (ours, theirs)]
    if names[0] != names[1]:
        raise SystemExit(
            f"release: the wheel and the sdist's wheel differ in {sorted(names[0] ^ names[1])}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="sdist, checks, checksums and index of a release")
    parser.add_argument("dist", type=Path, help="the folder that holds the wheel")
    parser.add_argument("--torch", nargs="*", default=["2.10", "newest"], metavar="VERSION")
    parser.add_argument("--tests", nargs="*", default=list(TESTS), metavar="FILE")
    parser.add_argument("--build-sdist", action="store_true", help="compile the sdist, too")
    args = parser.parse_args()
    dist = args.dist.resolve()
    WORK.mkdir(parents=True, exist_ok=True)
    make_sdist(dist)
    write_sums(dist)
    write_index(dist)
    check_sdist(dist, args.build_sdist)
    for version in args.torch:
        check(dist, version, args.tests)
    print(f"gpukern: {dist} is ready to upload; served from there it installs by")
    print(f"    pip install --extra-index-url {(dist / 'simple').as_uri()} gpukern")


if __name__ == "__main__":
    main()
