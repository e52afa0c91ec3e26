# SPDX-License-Identifier: BSD-3-Clause
"""The command `gpukern`, or `python -m torch_gpukern`. Each command has a file here; commands.py
has their parser."""

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; returns the exit status."""
    # imported here to avoid a cycle: commands.py imports nn and layout, which import terminal.py
    from .commands import main as run

    return run(argv)
