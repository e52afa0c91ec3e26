# SPDX-License-Identifier: BSD-3-Clause
"""Commands for tools that still call setup.py, such as old pips. Each runs the build backend that
pyproject.toml names.

python setup.py bdist_wheel [-d FOLDER] | install | develop | egg_info [-e FOLDER] | --version
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

# pip installs it for a build; otherwise: pip install 'scikit-build-core>=1.1'
from scikit_build_core import build


def install(make_wheel, more: list[str]) -> None:
    """Builds a wheel into a temporary folder and installs it with pip's options `more`."""
    with tempfile.TemporaryDirectory() as folder:
        wheel = Path(folder) / make_wheel(folder)
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--no-index",
            "--no-deps",
            "--force-reinstall",
        ]
        subprocess.run([*pip, *more, str(wheel)], check=True)


def metadata() -> str:
    """The text of the package's METADATA."""
    with tempfile.TemporaryDirectory() as folder:
        return (
            Path(folder) / build.prepare_metadata_for_build_wheel(folder) / "METADATA"
        ).read_text()


def main(command: str, *options: str) -> None:
    parser = argparse.ArgumentParser(prog=f"setup.py {command}", allow_abbrev=False)
    parser.add_argument("-d", "--dist-dir", default="dist")
    parser.add_argument("-e", "--egg-base", type=Path, default=Path())
    for name in ("--prefix", "--root", "--target"):  # passed on to pip
        parser.add_argument(name)
    parser.add_argument("--user", action="store_true")
    # other options concern setuptools' own work and are ignored
    args, _ = parser.parse_known_args(options)
    where = [f"--{name}={x}" for name in ("prefix", "root", "target") if (x := getattr(args, name))]
    where += ["--user"] if args.user else []
    if command == "bdist_wheel":
        os.makedirs(args.dist_dir, exist_ok=True)
        print(os.path.join(args.dist_dir, build.build_wheel(args.dist_dir)))
    elif command == "install":
        install(build.build_wheel, where)
    elif command == "develop":
        install(build.build_editable, where)
    elif command == "egg_info":
        folder = args.egg_base / "gpukern.egg-info"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "PKG-INFO").write_text(metadata())
    elif command == "--version":
        print(
            next(line.split()[1] for line in metadata().splitlines() if line.startswith("Version:"))
        )
    else:
        sys.exit(f"setup.py has no {command}: pip install . or python -m build\n\n{__doc__}")


if __name__ == "__main__":
    os.chdir(Path(__file__).resolve().parent)
    main(*(sys.argv[1:] or ["no command"]))
