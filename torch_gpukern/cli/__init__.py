# SPDX-License-Identifier: BSD-3-Clause
"""The command `gpukern`, or `python -m torch_gpukern`: one file a command, their parser in
commands.py."""

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; returns the exit status."""
    from .commands import (
        # modules of nn and layout import terminal.py of this room, and commands.py imports them
        main as run,
    )

    return run(argv)
