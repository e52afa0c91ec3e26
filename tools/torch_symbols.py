# SPDX-License-Identifier: BSD-3-Clause
"""Lists the C functions that torch's stable shim headers declare for one version of torch.

    python tools/torch_symbols.py INCLUDE_DIR 2.10 > tests/data/torch_2_10_symbols.txt

INCLUDE_DIR is the include folder of that torch or of a later one, which has later functions between
version guards. The plugin may refer to the listed functions, and to any other function only weakly
(tests/build/test_packaging.py).
"""

import re
import sys
from pathlib import Path

HEADERS = (
    "torch/csrc/inductor/aoti_torch/c/shim.h",
    "torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h",
    "torch/csrc/stable/c/shim.h",
)
GUARD = re.compile(r"#\s*if.*TORCH_FEATURE_VERSION\s*>=\s*TORCH_VERSION_(\d+)_(\d+)_\d+")


def declared(text: str, target: tuple[int, int]) -> set[str]:
    """The names of a header's exported functions that version `target` has."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    kept, guards = [], []  # guards: for each open #if whether its body belongs to `target`
    for line in text.splitlines():
        directive = re.match(r"\s*#\s*(if|else|elif|endif)", line)
        if directive and directive.group(1) == "if":
            version = GUARD.match(line.strip())
            guards.append(not version or (int(version[1]), int(version[2])) <= target)
        elif directive and directive.group(1) == "endif":
            guards.pop()
        elif directive and guards[-1] is False:
            sys.exit(
                f"this script does not read the {directive.group(1)} of a version guard: {line}"
            )
        elif not line.lstrip().startswith("#") and all(guards):
            kept.append(line)
    return set(re.findall(r"AOTI_TORCH_EXPORT[^;]*?\b(\w+)\s*\(", " ".join(kept)))


def main():
    if len(sys.argv) != 3 or not re.fullmatch(r"\d+\.\d+", sys.argv[2]):
        sys.exit(__doc__)
    include, target = Path(sys.argv[1]), tuple(int(n) for n in sys.argv[2].split("."))
    names = [declared((include / header).read_text(), target) for header in HEADERS]
    print(*sorted(set().union(*names)), sep="\n")


if __name__ == "__main__":
    main()
