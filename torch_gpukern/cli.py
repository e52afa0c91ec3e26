# SPDX-License-Identifier: BSD-3-Clause
"""The command line: what is installed, what a call would run, how fast it is here.

python -m torch_gpukern info | doctor | device   or gpukern info, here as below
python -m torch_gpukern explain gemm 512 512 512 --dtype bfloat16 [--arch sm_90]
python -m torch_gpukern bench flash_attn [--html page.html]
python -m torch_gpukern layout "(4,8):(8,1)" --svg out.svg
python -m torch_gpukern tune gemm --shapes 4096x4096x4096 512x28672x4096:NT
python -m torch_gpukern quantize MODEL_DIR --recipe w4
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from . import ARCHS, __version__, _in_memory, bench, devices, doctor, explain, occupancy, roofline
from ._library import ops
from .layout import cli as layout_cli
from .nn import files as weight_files
from .terminal import device_of, fields, table, whole, with_progress
from .tuning import cache, timing
from .tuning import gemm as gemm_tuner

_DTYPES = gemm_tuner.DTYPES
# Ops whose calls options can say; torch_gpukern.explain knows more.
_EXPLAINED = "gemm", "flash_attn", "flash_attn_varlen", "flash_attn_bwd", "paged_attn", "scaled_gemm", "weight_gemm"
_CODES = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2, "int8": torch.int8}
_GROUPS = {"int4": 128, "uint4": 128, "int8": 128, "e4m3": 128, "mxfp4": 32, "nvfp4": 16}  # of a format, unless said


# ---- info ----------------------------------------------------------------------------------------


def _info(args: argparse.Namespace) -> int:
    known = doctor.facts()
    if args.json:
        print(json.dumps(known, indent=2))
        return 0
    kernels = known["cuda_kernels"]
    cuda = (
        f"{len(kernels)} kernel instances, compute capability 8.0 and later" if kernels else "no kernels in this build"
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
        ("cpu rows in use", known["cpu_isa"] + (f" ({known['cpu_isa_reason']})" if known["cpu_isa_reason"] else "")),
        ("cpu rows of this machine", ",".join(known["cpu_isas"])),
        ("threads", known["threads"]),
        ("cuda", cuda),
    ]
    print(fields(rows))
    if args.kernels:
        print("\ncuda kernels\n  " + "\n  ".join(kernels or ["none"]))
    return 0


# ---- explain -------------------------------------------------------------------------------------


def _explained_call(args: argparse.Namespace) -> tuple[list, dict]:
    """The arguments of the op that the options describe. Explaining reads shapes and lengths, no
    other contents; a call that is measured has normal values.
    """
    if args.op in ("scaled_gemm", "weight_gemm"):
        return _quantised_call(args, device_of(args.device)), {}
    options = {"dtype": _DTYPES[args.dtype], "device": device_of(args.device)}

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, **options) if args.measure else torch.empty(*shape, **options)

    if args.op == "gemm":
        a, b = make(*args.batch, args.m, args.k), make(args.k, args.n)
        a = a.mT.contiguous().mT if args.layout[0] == "T" else a
        b = b.mT.contiguous().mT if args.layout[1] == "T" else b
        bias = make(args.n) if args.bias else None
        return [a, b, bias], {"activation": args.activation}

    heads_kv = args.heads_kv or args.heads
    ints = {"dtype": torch.int32, "device": args.device}
    scores = {"window_left": args.window_left, "softcap": args.softcap, "is_causal": args.causal}
    if args.op == "paged_attn":
        pages = -(-args.seq_k // args.block_size)
        q = make(args.batch * args.seq_q, args.heads, args.head_dim)
        caches = [make(args.batch * pages, args.block_size, heads_kv, args.head_dim) for _ in range(2)]
        table = torch.arange(args.batch * pages, **ints).view(args.batch, pages)
        return [q, *caches, table, torch.full((args.batch,), args.seq_k, **ints)], scores

    seq_k = args.seq_q if args.seq_k is None else args.seq_k
    if args.op == "flash_attn_varlen":
        q, k, v = (
            make(args.batch * seq, heads, args.head_dim)
            for seq, heads in ((args.seq_q, args.heads), (seq_k, heads_kv), (seq_k, heads_kv))
        )
        starts = [torch.arange(args.batch + 1, **ints) * seq for seq in (args.seq_q, seq_k)]
        return [q, k, v, *starts, args.seq_q, seq_k], scores
    q, k, v = (
        make(args.batch, heads, seq, args.head_dim)
        for seq, heads in ((args.seq_q, args.heads), (seq_k, heads_kv), (seq_k, heads_kv))
    )
    if args.op == "flash_attn":
        return [q, k, v], scores
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=lse_dtype, device=args.device)
    if args.measure:
        out, lse = ops.flash_attn_fwd.default(q, k, v, **scores)
    return [make(*q.shape), q, k, v, out, lse], scores


def _quantised_call(args: argparse.Namespace, device: torch.device) -> list:
    """Codes and scales of 1; b as weights are stored, transposed."""

    def scales(rows: int, cols: int, granularity: str) -> Tensor:
        high = {"tensor": 1, "128x128": -(-rows // 128)}.get(granularity, rows)
        across = {"tensor": 1, "row": 1, "1x32": -(-cols // 32)}.get(granularity, -(-cols // 128))
        return torch.ones(high, across, device=device)

    m, n, k = args.m, args.n, args.k
    if args.op == "scaled_gemm":
        a, b = (torch.ones(rows, k, dtype=torch.int8, device=device).to(_CODES[args.dtype]) for rows in (m, n))
        of_a, _, of_b = args.scales.partition(",")
        return [a, b.mT, scales(m, k, of_a), scales(n, k, of_b or of_a).mT]
    group = min(args.group or _GROUPS[args.format], max(k, 1))
    bytes_of_tile = 4096 if args.format in ("int8", "e4m3") else 2048
    packed = torch.full((-(-n // 64), -(-k // 64), bytes_of_tile), 0x11, dtype=torch.uint8, device=device)
    a = torch.ones(m, k, dtype=_DTYPES[args.dtype], device=device)
    return [a, packed, torch.ones(-(-k // group), n, device=device), n, args.format]


def _granularities(text: str) -> str:
    known = ("tensor", "row", "1x128", "128x128", "1x32")
    if not all(part in known for part in text.split(",")) or text.count(",") > 1:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(known)}, or two of them, got {text!r}")
    return text


def _explain(args: argparse.Namespace) -> int:
    if args.arch and (args.measure or args.device != "cpu"):
        raise ValueError("--arch speaks of a GPU that need not be there: it takes neither --device nor --measure")
    with _in_memory():
        call, rules = _explained_call(args)
    x = explain(args.op, *call, arch=args.arch, **rules)
    us = None
    if args.measure:
        op = getattr(ops, args.op).default
        with torch.inference_mode():
            us = timing.median_us(lambda: op(*call, **rules), torch.device(args.device))
    if args.json:
        print(json.dumps(x if us is None else {**x, "measured_us": us}, indent=2))
        return 0
    why = ops.cpu_isa_reason.default() if args.device == "cpu" and not args.arch and args.dtype == "bfloat16" else ""
    names = ("MB", "NB", "KB", "MR*NR") if args.op.endswith("gemm") else ("BQ", "BKV", "chunk", "")
    tiles = "  ".join(f"{name} {size}" for name, size in zip(names, x["tile"], strict=True) if size)
    rows = [
        ("row", x["row"] + (", preferred since it was tuned" if x["preferred"] else "")),
        ("instruction set", x["isa"] + (f" ({why})" if why else "")),
        ("tile", tiles or "none"),
        ("tasks", x["tasks"]),
        ("chunks of the keys", x["chunks"]),
        ("bytes", f"{x['bytes']:,.0f}"),
        ("FLOPs", f"{x['flops']:,.0f}"),
        ("FLOPs per byte", f"{x['flops'] / x['bytes']:.1f}" if x["bytes"] else "0"),
        ("workspace bytes", f"{x['workspace_bytes']:,}"),
    ]
    if x["bound_us"]:
        rows += [("waves", f"{x['waves']:.2f}" if x["waves"] else "unknown without the GPU")]
        rows += [("no faster than", f"{x['bound_us']:.1f} us")]
    if us is not None:
        beside = f", {us / x['bound_us']:.2f} of that bound" if x["bound_us"] else ""
        rows += [("measured", f"{us:.1f} us{beside}, {x['flops'] / us / 1e3:,.1f} GFLOP/s")]
    print(fields(rows))
    return 0


# ---- tune ----------------------------------------------------------------------------------------


def _cache_file(args: argparse.Namespace) -> Path:
    path = args.cache or cache.default_path()
    if path is None:
        raise ValueError("GPUKERN_TUNED is off and there is no cache directory: name a file with --cache")
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
    """None where this shape cannot be measured, out of memory for one, and the reason is printed."""
    try:
        return gemm_tuner.tune(problem, device)
    except RuntimeError as error:
        print(f"tune: {problem}: {str(error).splitlines()[0]}", file=sys.stderr)
        return None


def _report_wrong(results: Sequence[gemm_tuner.Result]) -> int:
    for result in results:
        for row in result.wrong:
            print(f"tune: {result.problem}: the result of {row} is wrong, it was left out", file=sys.stderr)
    return int(any(result.wrong for result in results))


def _tune(args: argparse.Namespace) -> int:
    if args.device == "cpu":
        raise ValueError(f"device is {args.device}; rows are tuned on CUDA, a CPU's follows from its instruction set")
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
    problems = [gemm_tuner.Problem(**gemm_tuner.parse_shape(shape), **options) for shape in args.shapes]
    results = []
    for problem in with_progress(problems, "tuning"):
        result = _tuned(problem, device)
        if result is None:
            continue
        cache.save(
            path, result.device, {result.gemm_class: result.entry()}
        )  # one by one: an end in between loses little
        results.append(result)
    if not results:
        return 1
    heads = ("shape", "default row", "us", "fastest row", "us", "gain", "cuBLAS us", "cuBLAS/ours")
    print(
        f"{results[0].device}, gpukern {__version__}, medians; a gain below {100 * (gemm_tuner.NOISE - 1):.0f} % counts as none"
    )
    print(table([heads, *map(_tuned_row, results)]))
    kept = sum(result.best != result.default for result in results)
    print(f"{kept} of {len(results)} have a row faster than the default one: {path}")
    if path != cache.default_path():
        print(f"to use it: GPUKERN_TUNED={path}")
    return _report_wrong(results) or int(len(results) < len(problems))


def _check_tuned(args: argparse.Namespace, path: Path, device: torch.device) -> int:
    """Measures the tuning keys of the file again, and leaves it as it is; 1 where an instance is no longer the fastest."""
    devices, problem = cache.read(path)
    if problem:
        raise ValueError(f"{path}: {problem}")
    name = torch.cuda.get_device_name(device)[:63]  # as the library cuts it
    if name not in devices:
        raise ValueError(f"{path} has no entries for {name}")
    entries, problem = cache.entries_of(devices[name])
    if problem:
        print(f"tune: {path}: {name} {problem}", file=sys.stderr)
    rows, results, stale = [("class", "row of the file", "us", "fastest row", "us", "")], [], 0
    for gemm_class in with_progress(list(entries), "checking"):
        call, row = gemm_tuner.parse_class(gemm_class), entries[gemm_class]["row"]
        if call is None:
            rows.append((gemm_class, row, "", "", "", "not measured: its strides or alignment are not a shape's"))
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
            (gemm_class, row, "-" if us is None else f"{us:.1f}", result.best, f"{result.us[result.best]:.1f}", verdict)
        )
    print(table(rows))
    print(f"{stale} of {len(results)} rows are no longer the fastest")
    return int(_report_wrong(results) or stale > 0)


# ---- arguments -----------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    prog = "gpukern" if Path(sys.argv[0]).stem == "gpukern" else "python -m torch_gpukern"
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=f"gpukern {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="versions, library, instruction sets, devices")
    info.set_defaults(run=_info)
    info.add_argument("--kernels", action="store_true", help="list every CUDA kernel instance")
    info.add_argument("--json", action="store_true", help="all of it, as JSON")
    checked = commands.add_parser(
        "doctor", help="what works here, what is missing, what to do; 1 where something fails"
    )
    checked.set_defaults(run=lambda args: doctor.report(args.json))
    checked.add_argument("--json", action="store_true")

    explained = commands.add_parser("explain", help="the kernel row that a call would run, its tiles, bytes and FLOPs")
    named = explained.add_subparsers(dest="op", required=True)
    for op in _EXPLAINED:
        p = named.add_parser(op)
        p.set_defaults(run=_explain)
        if op == "scaled_gemm":
            p.add_argument("--dtype", choices=_CODES, default="float8_e4m3fn")
        elif op == "weight_gemm":
            p.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="of the activations")
        else:
            p.add_argument("--dtype", choices=_DTYPES, default="float32")
        p.add_argument("--device", default="cpu")
        p.add_argument("--arch", choices=ARCHS, help="what a GPU of this architecture would run; needs none")
        p.add_argument("--measure", action="store_true", help="run the call, too, and say how long it takes")
        p.add_argument("--json", action="store_true", help="what torch_gpukern.explain returns, as JSON")
        if op.endswith("gemm"):
            for name in ("m", "n", "k"):
                p.add_argument(name, type=whole(0), metavar=name.upper())
        if op == "scaled_gemm":
            p.add_argument(
                "--scales", type=_granularities, default="row", metavar="G[,G]",
                help="tensor, row, 1x128, 128x128 or 1x32; two of them: of a and of b, as 1x128,128x128",
            )  # fmt: skip
            continue
        if op == "weight_gemm":
            p.add_argument("--format", choices=_GROUPS, default="int4")
            p.add_argument(
                "--group", type=whole(1), help="columns that share a scale; default: 128, mxfp4 32, nvfp4 16"
            )
            continue
        if op == "gemm":
            p.add_argument("--batch", type=whole(0), nargs="*", default=[], help="batch dimensions of a")
            p.add_argument("--layout", choices=("NN", "NT", "TN", "TT"), default="NN", help="T: stored transposed")
            p.add_argument("--bias", action="store_true")
            p.add_argument("--activation", choices=gemm_tuner.ACTIVATIONS, default="none")
            continue
        paged = op == "paged_attn"
        p.add_argument("--batch", type=whole(0), default=1)
        p.add_argument("--heads", type=whole(0), default=8)
        p.add_argument("--heads-kv", type=whole(1), help="default: as --heads")
        p.add_argument("--seq-q", type=whole(0), default=1 if paged else 1024, help="query tokens of each sequence")
        p.add_argument("--seq-k", type=whole(0), default=1024 if paged else None, help="keys of each sequence")
        p.add_argument("--head-dim", type=whole(1), default=64)
        p.add_argument("--causal", action=argparse.BooleanOptionalAction, default=paged)
        p.add_argument("--window-left", type=whole(-1), default=-1)
        p.add_argument("--softcap", type=float, default=0.0)
        if paged:
            p.add_argument("--block-size", type=whole(1), default=16)

    devices.add_arguments(commands)
    layout_cli.add_arguments(commands)
    occupancy.add_arguments(commands)
    roofline.add_arguments(commands)

    tune = commands.add_parser(
        "tune", help="measure every row that takes a call, and keep what is faster than the default"
    )
    p = tune.add_subparsers(dest="op", required=True).add_parser("gemm")
    p.set_defaults(run=_tune)
    p.add_argument(
        "--shapes", nargs="+", metavar="MxNxK[:NT]", help="BxMxNxK: a batch of products; T: stored transposed"
    )
    p.add_argument("--dtype", choices=_DTYPES, default="bfloat16")
    p.add_argument("--out-dtype", choices=_DTYPES, help="default: as --dtype")
    p.add_argument("--fp32-precision", choices=("ieee", "tf32"), default="ieee")
    p.add_argument("--activation", choices=gemm_tuner.ACTIVATIONS, default="none")
    p.add_argument("--bias", action="store_true", help="for the figures; calls with and without are of one class")
    p.add_argument("--c", action="store_true", help="with an addend [M, N]")
    p.add_argument("--preact", action="store_true", help="store what the activation reads, as training does")
    p.add_argument("--device", default="cuda:0")
    p.add_argument(
        "--cache", type=Path, metavar="FILE", help="default: GPUKERN_TUNED, else in the user's cache directory"
    )
    p.add_argument("--check", action="store_true", help="measure the file's classes again; it stays as it is")

    weight_files.add_arguments(commands)
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
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `| head` has read enough; what is left would fail once more as Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13  # as the shell says it of SIGPIPE
    except KeyboardInterrupt:
        return 128 + 2
    except (ValueError, IndexError, RuntimeError, OSError, MemoryError) as error:
        print(_said(args.command, error), file=sys.stderr)
        return 1


def _said(command: str, error: Exception) -> str:
    """The error in a line that begins with the command, once."""
    text = str(error).split("\nException raised from ")[0].strip() or type(error).__name__
    if text.lower().startswith(f"{command}: "):
        text = text[len(command) + 2 :]
    return text if text.startswith(f"{command} ") else f"{command}: {text}"
