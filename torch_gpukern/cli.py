"""The command line: what is installed, what a call would run, how fast it is here.

python -m torch_gpukern info
python -m torch_gpukern explain gemm 512 512 512 --dtype bfloat16
python -m torch_gpukern bench flash_attn
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from . import EXPLAINED, __version__, explain, flash_attn, gemm, paged_attn
from ._library import FILE, NAMESPACE, ops

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text, columns aligned: the first to the left, the rest to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)


def _fields(rows: Sequence[tuple[str, object]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)


# ---- info ----------------------------------------------------------------------------------------


def _info(args: argparse.Namespace) -> int:
    try:
        isa = ops.cpu_isa.default()
    except RuntimeError as error:  # GPUKERN_CPU names what this machine lacks
        isa = str(error)
    kernels = [name for name in ops.cuda_kernels.default().split(",") if name]
    cuda = f"{len(kernels)} kernel instances, compute capability 8.0 and later" if kernels else "no kernels in this build"
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(i)
            cuda += f"; cuda:{i} {torch.cuda.get_device_name(i)}, compute capability {major}.{minor}"
    else:
        cuda += "; no device that torch can use"
    rows = [
        ("gpukern", __version__),
        ("library", FILE),
        ("ops", f"torch.ops.{NAMESPACE}"),
        ("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"),
        ("python", sys.version.split()[0]),
        ("cpu rows in use", isa),
        ("cpu rows of this machine", ops.cpu_isas.default()),
        ("threads", torch.get_num_threads()),
        ("cuda", cuda),
    ]
    print(_fields(rows))
    if args.kernels:
        print("\ncuda kernels\n  " + "\n  ".join(kernels or ["none"]))
    return 0


# ---- explain -------------------------------------------------------------------------------------


def _explained_call(args: argparse.Namespace) -> tuple[list, dict]:
    """The arguments of the op that the options describe. Explaining reads shapes and lengths, no
    other contents.
    """
    options = {"dtype": _DTYPES[args.dtype], "device": args.device}
    if args.op == "gemm":
        a = torch.empty(*args.batch, args.m, args.k, **options)
        b = torch.empty(args.k, args.n, **options)
        a = a.mT.contiguous().mT if args.layout[0] == "T" else a
        b = b.mT.contiguous().mT if args.layout[1] == "T" else b
        bias = torch.empty(args.n, **options) if args.bias else None
        return [a, b, bias], {"activation": args.activation}

    heads_kv = args.heads_kv or args.heads
    ints = {"dtype": torch.int32, "device": args.device}
    scores = {"window_left": args.window_left, "softcap": args.softcap, "is_causal": args.causal}
    if args.op == "paged_attn":
        pages = -(-args.seq_k // args.block_size)
        q = torch.empty(args.batch * args.seq_q, args.heads, args.head_dim, **options)
        caches = [
            torch.empty(args.batch * pages, args.block_size, heads_kv, args.head_dim, **options) for _ in range(2)
        ]
        table = torch.arange(args.batch * pages, **ints).view(args.batch, pages)
        return [q, *caches, table, torch.full((args.batch,), args.seq_k, **ints)], scores

    seq_k = args.seq_k or args.seq_q
    if args.op == "flash_attn_varlen":
        q, k, v = (
            torch.empty(args.batch * seq, heads, args.head_dim, **options)
            for seq, heads in ((args.seq_q, args.heads), (seq_k, heads_kv), (seq_k, heads_kv))
        )
        starts = [torch.arange(args.batch + 1, **ints) * seq for seq in (args.seq_q, seq_k)]
        return [q, k, v, *starts, args.seq_q, seq_k], scores
    q, k, v = (
        torch.empty(args.batch, heads, seq, args.head_dim, **options)
        for seq, heads in ((args.seq_q, args.heads), (seq_k, heads_kv), (seq_k, heads_kv))
    )
    if args.op == "flash_attn":
        return [q, k, v], scores
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = torch.empty(q.shape[:3], dtype=lse_dtype, device=args.device)
    return [torch.empty_like(q), q, k, v, torch.empty_like(q), lse], scores


def _explain(args: argparse.Namespace) -> int:
    call, rules = _explained_call(args)
    x = explain(args.op, *call, **rules)
    names = ("MB", "NB", "KB", "MR*NR") if args.op == "gemm" else ("BQ", "BKV", "chunk", "")
    tiles = "  ".join(f"{name} {size}" for name, size in zip(names, x["tile"], strict=True) if size)
    rows = [
        ("row", x["row"]),
        ("instruction set", x["isa"]),
        ("tile", tiles or "none"),
        ("tasks", x["tasks"]),
        ("chunks of the keys", x["chunks"]),
        ("bytes", f"{x['bytes']:,.0f}"),
        ("FLOPs", f"{x['flops']:,.0f}"),
        ("FLOPs per byte", f"{x['flops'] / x['bytes']:.1f}" if x["bytes"] else "0"),
        ("workspace bytes", f"{x['workspace_bytes']:,}"),
    ]
    if x["bound_us"]:
        rows += [("waves", f"{x['waves']:.2f}"), ("no faster than", f"{x['bound_us']:.1f} us")]
    print(_fields(rows))
    return 0


# ---- bench ---------------------------------------------------------------------------------------


def _bench_cases(op: str, dtype: torch.dtype, device: str) -> list[tuple[str, float, Callable, Callable]]:
    """(case, FLOPs, ours, PyTorch's own) at one size each."""
    if op == "gemm":
        a, b = (torch.randn(1024, 1024, device=device).to(dtype) for _ in range(2))
        return [("gemm 1024 cubed", 2.0 * 1024**3, lambda: gemm(a, b), lambda: a @ b)]
    if op == "flash_attn":
        q, k, v = (torch.randn(1, 8, 1024, 64, device=device).to(dtype) for _ in range(3))
        return [
            (
                f"flash_attn 8 heads, 1024 tokens, d64{', causal' if causal else ''}",
                4.0 * 8 * 1024**2 * 64 / (2 if causal else 1),
                lambda causal=causal: flash_attn(q, k, v, is_causal=causal),
                lambda causal=causal: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
            )
            for causal in (False, True)
        ]
    q = torch.randn(4, 32, 128, device=device).to(dtype)
    k, v = (torch.randn(4 * 128, 16, 8, 128, device=device).to(dtype) for _ in range(2))
    table = torch.randperm(4 * 128, device=device).int().view(4, 128)
    lens = torch.full((4,), 2048, dtype=torch.int32, device=device)

    def gather() -> Tensor:
        keys, values = (x[table.long()].flatten(1, 2).transpose(1, 2) for x in (k, v))
        return F.scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)[:, :, 0]

    flops = 4.0 * 4 * 32 * 2048 * 128
    return [
        (
            "paged_attn 4 x 2048 keys, 32/8 heads, d128",
            flops,
            lambda: paged_attn(q, k, v, table, lens),
            gather,
        )
    ]


def _median_us(call: Callable) -> float:
    from torch.utils.benchmark import Timer

    return Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads()).blocked_autorange().median * 1e6


def _bench(args: argparse.Namespace) -> int:
    script = Path(__file__).resolve().parent.parent / "benchmarks" / f"bench_{args.op}.py"
    if script.exists() and not args.small:
        return subprocess.run([sys.executable, str(script), *args.rest]).returncode
    if args.rest:
        print(
            f"bench: unknown option {args.rest[0]}; options go to the benchmarks of the repository",
            file=sys.stderr,
        )
        return 2
    rows = [("case", "ours us", "torch us", "ratio", "GFLOP/s")]
    with torch.inference_mode():
        for name, flops, ours, theirs in _bench_cases(args.op, _DTYPES[args.dtype], args.device):
            a, b = _median_us(ours), _median_us(theirs)
            rows.append((name, f"{a:.1f}", f"{b:.1f}", f"{b / a:.2f}", f"{flops / a / 1e3:.1f}"))
    print(f"{args.dtype} on {args.device}, {torch.get_num_threads()} threads, medians; ratio is torch's time over ours")
    print(_table(rows))
    return 0


# ---- arguments -----------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m torch_gpukern", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="versions, library, instruction sets, devices")
    info.set_defaults(run=_info)
    info.add_argument("--kernels", action="store_true", help="list every CUDA kernel instance")

    explained = commands.add_parser("explain", help="the kernel row that a call would run, its tiles, bytes and FLOPs")
    named = explained.add_subparsers(dest="op", required=True)
    for op in EXPLAINED:
        p = named.add_parser(op)
        p.set_defaults(run=_explain)
        p.add_argument("--dtype", choices=_DTYPES, default="float32")
        p.add_argument("--device", default="cpu")
        if op == "gemm":
            for name in ("m", "n", "k"):
                p.add_argument(name, type=int, metavar=name.upper())
            p.add_argument("--batch", type=int, nargs="*", default=[], help="batch dimensions of a")
            p.add_argument(
                "--layout",
                choices=("NN", "NT", "TN", "TT"),
                default="NN",
                help="T: stored transposed",
            )
            p.add_argument("--bias", action="store_true")
            p.add_argument("--activation", default="none")
            continue
        paged = op == "paged_attn"
        p.add_argument("--batch", type=int, default=1)
        p.add_argument("--heads", type=int, default=8)
        p.add_argument("--heads-kv", type=int, help="default: as --heads")
        p.add_argument("--seq-q", type=int, default=1 if paged else 1024, help="query tokens of each sequence")
        p.add_argument("--seq-k", type=int, default=1024 if paged else None, help="keys of each sequence")
        p.add_argument("--head-dim", type=int, default=64)
        p.add_argument("--causal", action=argparse.BooleanOptionalAction, default=paged)
        p.add_argument("--window-left", type=int, default=-1)
        p.add_argument("--softcap", type=float, default=0.0)
        if paged:
            p.add_argument("--block-size", type=int, default=16)

    bench = commands.add_parser(
        "bench",
        help="our time beside PyTorch's; in a checkout runs its benchmarks and passes options on",
    )
    bench.set_defaults(run=_bench)
    bench.add_argument("op", nargs="?", choices=("gemm", "flash_attn", "paged_attn"), default="gemm")
    bench.add_argument("--small", action="store_true", help="one size, also in a checkout")
    bench.add_argument("--dtype", choices=_DTYPES, default="float32")
    bench.add_argument("--device", default="cpu")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if rest and args.command != "bench":
        parser.error(f"unknown argument {rest[0]}")
    args.rest = rest
    try:
        return args.run(args)
    except (ValueError, IndexError, RuntimeError) as error:
        print(f"{args.command}: {error}", file=sys.stderr)
        return 1
