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

import torch

from .. import __version__
from .._library import ops
from ..layout import cli as layout_cli
from ..nn.quant import files as weight_files
from ..serve import command as serving
from ..tuning import cache
from ..tuning import gemm as gemm_tuner
from . import bench, devices, doctor, explained, occupancy, roofline
from .terminal import device_of, fields, table, with_progress

_DTYPES = gemm_tuner.DTYPES


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


# ---- tune ----------------------------------------------------------------------------------------


def _cache_file(args: argparse.Namespace) -> Path:
    path = args.cache or cache.default_path()
    if path is None:
        raise ValueError(
            "GPUKERN_TUNED is off and there is no cache directory: name a file with --cache"
        )
    return path


def _tuned_row(result: gemm_tuner.Result) -> list[str]:
    us, best = result.us, result.us[result.best]
    gain = f"{100 * (result.gain - 1):.1f} %" if result.best != result.default else "-"
    return [
        str(result.problem),
        result.default,
        f"{us[result.default]:.1f}",
        result.best if result.best != result.default else "the same",
        f"{best:.1f}",
        gain,
        f"{result.cublas_us:.1f}",
        f"{result.cublas_us / best:.2f}",
    ]


def _tuned(problem: gemm_tuner.Problem, device: torch.device) -> gemm_tuner.Result | None:
    """Tunes a problem. If it cannot be measured, for example for lack of memory, prints the reason
    and returns None."""
    try:
        return gemm_tuner.tune(problem, device)
    except RuntimeError as error:
        print(f"tune: {problem}: {str(error).splitlines()[0]}", file=sys.stderr)
        return None


def _report_wrong(results: Sequence[gemm_tuner.Result]) -> int:
    for result in results:
        for row in result.wrong:
            print(
                f"tune: {result.problem}: the result of {row} is wrong, it was left out",
                file=sys.stderr,
            )
    return int(any(result.wrong for result in results))


def _tune(args: argparse.Namespace) -> int:
    if args.device == "cpu":
        raise ValueError(
            f"device is {args.device}; only CUDA is tuned: on a CPU, the instruction set decides "
            f"which kernel runs"
        )
    if not ops.cuda_kernels.default():
        raise ValueError("this build of gpukern has no CUDA kernels")
    device = device_of(args.device)
    path = _cache_file(args)
    if args.check:
        return _check_tuned(args, path, device)
    options = {
        name: getattr(args, name)
        for name in ("dtype", "out_dtype", "fp32_precision", "activation", "bias", "c", "preact")
    }
    if not args.shapes:
        raise ValueError("--shapes is missing: MxNxK, with :NT for a transposed b, or BxMxNxK")
    problems = [
        gemm_tuner.Problem(**gemm_tuner.parse_shape(shape), **options) for shape in args.shapes
    ]
    results = []
    for problem in with_progress(problems, "tuning"):
        result = _tuned(problem, device)
        if result is None:
            continue
        cache.save(
            path, result.device, {result.gemm_class: result.entry()}
        )  # after each problem, so that an interrupt loses little
        results.append(result)
    if not results:
        return 1
    heads = (
        "shape", "default instance", "us", "fastest instance", "us", "gain", "cuBLAS us",
        "cuBLAS/ours",
    )  # fmt: skip
    print(
        f"{results[0].device}, gpukern {__version__}, medians; a gain below "
        f"{100 * (gemm_tuner.NOISE - 1):.0f} % counts as none"
    )
    print(table([heads, *map(_tuned_row, results)]))
    kept = sum(result.best != result.default for result in results)
    print(f"{kept} of {len(results)} have an instance faster than the default one: {path}")
    if path != cache.default_path():
        print(f"to use it: GPUKERN_TUNED={path}")
    return _report_wrong(results) or int(len(results) < len(problems))


def _check_tuned(args: argparse.Namespace, path: Path, device: torch.device) -> int:
    """Measures the entries of the file again, without changing the file. Returns 1 if an instance
    is no longer the fastest."""
    devices, problem = cache.read(path)
    if problem:
        raise ValueError(f"{path}: {problem}")
    name = torch.cuda.get_device_name(device)[:63]  # the library cuts names to 63 characters
    if name not in devices:
        raise ValueError(f"{path} has no entries for {name}")
    entries, problem = cache.entries_of(devices[name])
    if problem:
        print(f"tune: {path}: {name} {problem}", file=sys.stderr)
    rows, results, stale = (
        [("tuning key", "instance in the file", "us", "fastest instance", "us", "")],
        [],
        0,
    )
    for gemm_class in with_progress(list(entries), "checking"):
        call, row = gemm_tuner.parse_class(gemm_class), entries[gemm_class]["row"]
        if call is None:
            rows.append(
                (
                    gemm_class,
                    row,
                    "",
                    "",
                    "",
                    "not measured: no shape describes its strides or alignment",
                )
            )
            continue
        result = _tuned(call, device)
        if result is None:
            rows.append((gemm_class, row, "", "", "", "not measured"))
            continue
        results.append(result)
        us = result.us.get(row)
        good = us is not None and us <= gemm_tuner.NOISE * result.us[result.best]
        stale += not good
        verdict = "still the fastest" if good else "tune it again"
        rows.append(
            (
                gemm_class,
                row,
                "-" if us is None else f"{us:.1f}",
                result.best,
                f"{result.us[result.best]:.1f}",
                verdict,
            )
        )
    print(table(rows))
    print(f"{stale} of {len(results)} instances are no longer the fastest")
    return int(_report_wrong(results) or stale > 0)


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

    tune = commands.add_parser(
        "tune",
        help="measure every instance that can serve a gemm, and use the fastest from now on",
        description="Only gemm can be tuned: the other ops choose among few instances, by sizes. "
        "`explain OP .. --measure` prints the choice and its time.",
    )
    p = tune.add_subparsers(dest="op", required=True).add_parser("gemm")
    p.set_defaults(run=_tune)
    p.add_argument(
        "--shapes",
        nargs="+",
        metavar="MxNxK[:NT]",
        help="sizes; BxMxNxK: a batch of products; T: stored transposed",
    )
    p.add_argument("--dtype", choices=_DTYPES, default="bfloat16")
    p.add_argument("--out-dtype", choices=_DTYPES, help="default: that of --dtype")
    p.add_argument("--fp32-precision", choices=("ieee", "tf32"), default="ieee")
    p.add_argument("--activation", choices=gemm_tuner.ACTIVATIONS, default="none")
    p.add_argument(
        "--bias",
        action="store_true",
        help="time calls with a bias; the choice serves calls with and without one",
    )
    p.add_argument("--c", action="store_true", help="with an addend [M, N]")
    p.add_argument(
        "--preact",
        action="store_true",
        help="also store the activation's input, as training does",
    )
    p.add_argument("--device", default="cuda:0")
    p.add_argument(
        "--cache",
        type=Path,
        metavar="FILE",
        help="file of tuned kernels; default: GPUKERN_TUNED, or in the user's cache directory",
    )
    p.add_argument(
        "--check",
        action="store_true",
        help="measure the file's entries again, without changing the file",
    )

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
    except (
        BrokenPipeError
    ):  # a reader such as `| head` is gone; flushing again at exit would fail, too
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
