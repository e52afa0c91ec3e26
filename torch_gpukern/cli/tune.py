# SPDX-License-Identifier: BSD-3-Clause
"""python -m torch_gpukern tune gemm: measures every kernel instance that can serve a product, and
keeps the fastest in a file that later processes read.

Only gemm is tuned: the other ops choose among few instances, by sizes.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from .. import __version__
from .._library import ops
from ..tuning import cache
from ..tuning import gemm as tuner
from .terminal import device_of, table, with_progress

__all__ = ["add_arguments"]

_OPTIONS = ("dtype", "out_dtype", "fp32_precision", "activation", "bias", "c", "preact")
_HEADS = (
    "shape",
    "default instance",
    "us",
    "fastest instance",
    "us",
    "gain",
    "cuBLAS us",
    "cuBLAS/ours",
)
_CHECKED_HEADS = ("tuning key", "instance in the file", "us", "fastest instance", "us", "")


# ---- measuring -----------------------------------------------------------------------------------


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
        return _check(path, device)
    problems = _problems(args)
    results = []
    for problem in with_progress(problems, "tuning"):
        result = _measured(problem, device)
        if result is None:
            continue
        # saved after each problem, so that an interrupt loses little
        cache.save(path, result.device, {result.gemm_class: result.entry()})
        results.append(result)
    if not results:
        return 1
    _print(results, path)
    return _report_wrong(results) or int(len(results) < len(problems))


def _cache_file(args: argparse.Namespace) -> Path:
    path = args.cache or cache.default_path()
    if path is None:
        raise ValueError(
            "GPUKERN_TUNED is off and there is no cache directory: name a file with --cache"
        )
    return path


def _problems(args: argparse.Namespace) -> list[tuner.Problem]:
    if not args.shapes:
        raise ValueError("--shapes is missing: MxNxK, with :NT for a transposed b, or BxMxNxK")
    options = {name: getattr(args, name) for name in _OPTIONS}
    return [tuner.Problem(**tuner.parse_shape(shape), **options) for shape in args.shapes]


def _measured(problem: tuner.Problem, device: torch.device) -> tuner.Result | None:
    """Tunes a problem. If it cannot be measured, for example for lack of memory, prints the reason
    and returns None."""
    try:
        return tuner.tune(problem, device)
    except RuntimeError as error:
        print(f"tune: {problem}: {str(error).splitlines()[0]}", file=sys.stderr)
        return None


# ---- reporting -----------------------------------------------------------------------------------


def _print(results: Sequence[tuner.Result], path: Path) -> None:
    print(
        f"{results[0].device}, gpukern {__version__}, medians; a gain below "
        f"{100 * (tuner.NOISE - 1):.0f} % counts as none"
    )
    print(table([_HEADS, *map(_cells, results)]))
    kept = sum(result.best != result.default for result in results)
    print(f"{kept} of {len(results)} have an instance faster than the default one: {path}")
    if path != cache.default_path():
        print(f"to use it: GPUKERN_TUNED={path}")


def _cells(result: tuner.Result) -> list[str]:
    us, best = result.us, result.us[result.best]
    changed = result.best != result.default
    return [
        str(result.problem),
        result.default,
        f"{us[result.default]:.1f}",
        result.best if changed else "the same",
        f"{best:.1f}",
        f"{100 * (result.gain - 1):.1f} %" if changed else "-",
        f"{result.cublas_us:.1f}",
        f"{result.cublas_us / best:.2f}",
    ]


def _report_wrong(results: Sequence[tuner.Result]) -> int:
    """Names the instances whose results were wrong. 1 if there are any."""
    for result in results:
        for instance in result.wrong:
            print(
                f"tune: {result.problem}: the result of {instance} is wrong, it was left out",
                file=sys.stderr,
            )
    return int(any(result.wrong for result in results))


# ---- checking a file -----------------------------------------------------------------------------


def _check(path: Path, device: torch.device) -> int:
    """Measures the entries of the file again, without changing the file. Returns 1 if an instance
    is no longer the fastest."""
    name = torch.cuda.get_device_name(device)[:63]  # the library cuts names to 63 characters
    rows, results, stale = [_CHECKED_HEADS], [], 0
    for key, instance in with_progress(_entries(path, name), "checking"):
        call = tuner.parse_class(key)
        if call is None:
            reason = "not measured: no shape describes its strides or alignment"
            rows.append((key, instance, "", "", "", reason))
            continue
        result = _measured(call, device)
        if result is None:
            rows.append((key, instance, "", "", "", "not measured"))
            continue
        results.append(result)
        us, best = result.us.get(instance), result.us[result.best]
        good = us is not None and us <= tuner.NOISE * best
        stale += not good
        shown = "-" if us is None else f"{us:.1f}"
        verdict = "still the fastest" if good else "tune it again"
        rows.append((key, instance, shown, result.best, f"{best:.1f}", verdict))
    print(table(rows))
    print(f"{stale} of {len(results)} instances are no longer the fastest")
    return int(_report_wrong(results) or stale > 0)


def _entries(path: Path, device: str) -> list[tuple[str, str]]:
    """(tuning key, instance) of a device of the file."""
    devices, problem = cache.read(path)
    if problem:
        raise ValueError(f"{path}: {problem}")
    if device not in devices:
        raise ValueError(f"{path} has no entries for {device}")
    entries, problem = cache.entries_of(devices[device])
    if problem:
        print(f"tune: {path}: {device} {problem}", file=sys.stderr)
    return [(key, entry["row"]) for key, entry in entries.items()]


# ---- arguments -----------------------------------------------------------------------------------


def add_arguments(commands: argparse._SubParsersAction) -> None:
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
    p.add_argument("--dtype", choices=tuner.DTYPES, default="bfloat16")
    p.add_argument("--out-dtype", choices=tuner.DTYPES, help="default: that of --dtype")
    p.add_argument("--fp32-precision", choices=("ieee", "tf32"), default="ieee")
    p.add_argument("--activation", choices=tuner.ACTIVATIONS, default="none")
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
