# SPDX-License-Identifier: BSD-3-Clause
"""Prints torch's include and lib directories as "include;lib" without importing torch.

pip hides an environment's packages from a build that it isolates; torch is looked for where they
are, all the same: it is what the plugin will run beside. Exits with one line that says what to do
when there is no torch, or none that is new enough.
"""

import importlib.util
import pathlib
import re
import sys
import sysconfig

OLDEST = (2, 10)
ADVICE = "pip install 'torch>=2.10' into it, or pass the path of another Python"


def main():
    spec = importlib.util.find_spec("torch")
    places = list(spec.submodule_search_locations or []) if spec else []
    places += [
        p
        for name in ("platlib", "purelib")
        if (p := pathlib.Path(sysconfig.get_path(name), "torch")).is_dir()
    ]
    if not places:
        sys.exit(f"{sys.executable} has no torch; {ADVICE}")
    root = pathlib.Path(places[0]).resolve()
    version = re.search(r"__version__ = '([^']+)'", (root / "version.py").read_text()).group(1)
    if tuple(int(n) for n in re.findall(r"\d+", version)[:2]) < OLDEST:
        sys.exit(
            f"torch {version} of {sys.executable} is older than 2.10, which gpukern needs; {ADVICE}"
        )
    if not (root / "lib" / "libtorch.so").exists():
        sys.exit(f"torch {version} of {sys.executable} has no lib/libtorch.so; {ADVICE}")
    print(f"{root / 'include'};{root / 'lib'}")


main()
