# SPDX-License-Identifier: BSD-3-Clause
"""The command line: what is installed, which kernel a call runs, how fast it is here.

python -m torch_gpukern info | doctor | device   or gpukern info, here as below
python -m torch_gpukern explain gemm 512 512 512 [--arch sm_90] [--dtype bfloat16]
python -m torch_gpukern bench flash_attn [--html page.html] | --list
python -m torch_gpukern layout "(4,8):(8,1)" --svg out.svg
python -m torch_gpukern tune gemm --shapes 4096x4096x4096 512x28672x4096:NT
python -m torch_gpukern quantize MODEL_DIR --recipe w4
python -m torch_gpukern serve MODEL_DIR --port 8000
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .. import __version__
from ..layout import cli as layout_cli
from ..nn.quant import files as weight_files
from ..serve import command as serving
from . import bench, devices, doctor, explained, occupancy, roofline, tune
from .terminal import fields

# ---- info ----------------------------------------------------------------------------------------


def _info(args: argparse.Namespace) -> int:
    known = doctor.facts()
    if args.json:
        print(json.dumps(known, indent=2))
        return 0
    kernels = known["cuda_kernels"]
    cuda = (
        f"{len(kernels)} kernel instances, compute capability 8.0 and later"
        if kernels
        else "no kernels in this build"
    )
    for device in known["cuda_devices"]:
        cuda += f"; {device['device']} {device['name']}, compute capability {device['capability']}"
    if not known["cuda_devices"]:
        cuda += "; no device that torch can use"
    rows = [
        ("gpukern", known["gpukern"]),
        ("library", known["library"]),
        ("ops", known["ops"]),
        ("torch", f"{known['torch']}, CUDA {known['torch_cuda'] or 'none'}"),
        ("python", known["python"]),
        (
            "cpu instruction set",
            known["cpu_isa"] + (f" ({known['cpu_isa_reason']})" if known["cpu_isa_reason"] else ""),
        ),
        ("supported here", ",".join(known["cpu_isas"])),
        ("threads", known["threads"]),
        ("cuda", cuda),
    ]
    print(fields(rows))
    if args.kernels:
        print("\ncuda kernels\n  " + "\n  ".join(kernels or ["none"]))
    return 0


# ---- arguments -----------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """A parser that answers an unknown argument with the usage of its command, not of all
    commands."""

    def parse_known_args(self, args=None, namespace=None):
        found, rest = super().parse_known_args(args, namespace)
        if rest and not self.get_default("takes_rest"):
            self.error(f"unknown argument {rest[0]}{self.get_default('instead') or ''}")
        return found, rest


def _parser() -> argparse.ArgumentParser:
    prog = "gpukern" if Path(sys.argv[0]).stem == "gpukern" else "python -m torch_gpukern"
    parser = _Parser(prog=prog, description=__doc__.splitlines()[0])
    # `bench` passes arguments that it does not know on
    parser.set_defaults(takes_rest=True)
    parser.add_argument("--version", action="version", version=f"gpukern {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="versions, library, instruction sets, devices")
    info.set_defaults(run=_info)
    info.add_argument("--kernels", action="store_true", help="list every CUDA kernel instance")
    info.add_argument("--json", action="store_true", help="all of it, as JSON")
    checked = commands.add_parser(
        "doctor", help="checks what works here and says what to do; status 1 if a check fails"
    )
    checked.set_defaults(run=lambda args: doctor.report(args.json))
    checked.add_argument("--json", action="store_true")

    explained.add_arguments(commands)
    devices.add_arguments(commands)
    layout_cli.add_arguments(commands)
    occupancy.add_arguments(commands)
    roofline.add_arguments(commands)

    tune.add_arguments(commands)
    weight_files.add_arguments(commands)
    serving.add_arguments(commands)
    bench.add_arguments(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if rest and args.command != "bench":
        parser.error(f"unknown argument {rest[0]}")
    args.rest = rest
    try:
        status = args.run(args)
        if sys.stdout is not None:  # None if the shell closed it: gpukern info >&-
            sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader, such as `| head`, is gone. Flushing again at exit would fail, too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13  # the shell's status for SIGPIPE
    except KeyboardInterrupt:
        return 128 + 2
    except (ValueError, IndexError, RuntimeError, OSError, MemoryError) as error:
        print(_said(args.command, error), file=sys.stderr)
        return 1


def _said(command: str, error: Exception) -> str:
    """The error's text, with the command in front exactly once."""
    text = str(error).split("\nException raised from ")[0].strip() or type(error).__name__
    if text.lower().startswith(f"{command}: "):
        text = text[len(command) + 2 :]
    return text if text.startswith(f"{command} ") else f"{command}: {text}"
