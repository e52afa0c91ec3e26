# SPDX-License-Identifier: BSD-3-Clause
"""``gpukern explain``: prints the kernel instance that a call would run, its tiles, bytes and
FLOPs.

Options describe the call. Every op of `torch_gpukern.EXPLAINED` has an entry in `CALLS`: its
options, and a function that makes the op's arguments from them. Some arguments, such as sinks, have
no option. `torch_gpukern.explain` takes all arguments.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ARCHS, _in_memory, explain
from .._library import ops
from ..ops.fakes import stats_dtype
from ..tuning import timing
from ..tuning.gemm import ACTIVATIONS, DTYPES
from .terminal import device_of, fields, whole

__all__ = ["CALLS", "add_arguments"]

_SHORT = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_WIDE = _SHORT | {"float32": torch.float32}
_FP8 = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
_CODES = _FP8 | {"int8": torch.int8}
_GRANULARITIES = ("tensor", "row", "1x128", "128x128", "1x32")
# default columns per scale, by format
_GROUPS = {"int4": 128, "uint4": 128, "int8": 128, "e4m3": 128, "mxfp4": 32, "nvfp4": 16}


@dataclass(frozen=True)
class Call:
    """How the command describes calls of an op.

    Attributes:
        sizes: the names of positional number options.
        dtypes: the choices of --dtype, the CPU's default first.
        add: adds further options.
        make: makes the op's positional and keyword arguments from the options. `explain` reads only
            shapes and lengths, so values are written only for a measured call: normally
            distributed ones, or codes of 1.
        tiles: the names of the four numbers in explain's "tile"; "" for one that is not used.
    """

    sizes: str
    dtypes: dict[str, torch.dtype]
    add: Callable[[argparse.ArgumentParser], None]
    make: Callable[[argparse.Namespace], tuple[list, dict]]
    tiles: tuple[str, str, str, str] = ("MB", "NB", "KB", "MR*NR")


def _dense(args: argparse.Namespace, *shape: int) -> Tensor:
    """A tensor of the op's --dtype, of 16 or more bits."""
    make = torch.randn if args.measure else torch.empty
    return make(*shape, dtype=CALLS[args.op].dtypes[args.dtype], device=device_of(args.device))


def _filled(
    args: argparse.Namespace, value: int, *shape: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """A tensor filled with `value` if the call is measured. If it is only explained, the tensor is
    not written, so that it takes no physical memory."""
    x = torch.empty(shape, dtype=dtype, device=device_of(args.device))
    return x.fill_(value) if args.measure else x


def _codes(args: argparse.Namespace, *shape: int) -> Tensor:
    """A tensor of the op's --dtype, of 8-bit codes."""
    return _filled(args, 1, *shape, dtype=CALLS[args.op].dtypes[args.dtype])


# ---- gemm ----------------------------------------------------------------------------------------


def _add_gemm(p: argparse.ArgumentParser) -> None:
    p.add_argument("--batch", type=whole(0), nargs="*", default=[], help="batch dimensions of a")
    p.add_argument(
        "--layout", choices=("NN", "NT", "TN", "TT"), default="NN", help="T: stored transposed"
    )
    p.add_argument("--bias", action="store_true")
    p.add_argument("--activation", choices=ACTIVATIONS, default="none")


def _gemm(args: argparse.Namespace) -> tuple[list, dict]:
    m, n, k = args.m, args.n, args.k
    a = (
        _dense(args, *args.batch, k, m).mT
        if args.layout[0] == "T"
        else _dense(args, *args.batch, m, k)
    )
    b = _dense(args, n, k).mT if args.layout[1] == "T" else _dense(args, k, n)
    return [a, b, _dense(args, args.n) if args.bias else None], {"activation": args.activation}


# ---- attention -----------------------------------------------------------------------------------


def _add_attention(p: argparse.ArgumentParser, paged: bool = False) -> None:
    p.add_argument("--batch", type=whole(0), default=1)
    p.add_argument("--heads", type=whole(0), default=8)
    p.add_argument("--heads-kv", type=whole(1), help="default: as --heads")
    p.add_argument(
        "--seq-q", type=whole(0), default=1 if paged else 1024, help="query tokens of each sequence"
    )
    p.add_argument(
        "--seq-k", type=whole(0), default=1024 if paged else None, help="keys of each sequence"
    )
    p.add_argument("--head-dim", type=whole(1), default=64)
    p.add_argument("--causal", action=argparse.BooleanOptionalAction, default=paged)
    p.add_argument("--window-left", type=whole(-1), default=-1)
    p.add_argument("--softcap", type=float, default=0.0)


def _add_paged(p: argparse.ArgumentParser) -> None:
    _add_attention(p, paged=True)
    p.add_argument("--block-size", type=whole(1), default=16)


def _rules(args: argparse.Namespace) -> dict:
    return {"window_left": args.window_left, "softcap": args.softcap, "is_causal": args.causal}


def _paged(args: argparse.Namespace) -> tuple[list, dict]:
    ints = {"dtype": torch.int32, "device": args.device}
    pages = -(-args.seq_k // args.block_size)
    q = _dense(args, args.batch * args.seq_q, args.heads, args.head_dim)
    cache = args.batch * pages, args.block_size, args.heads_kv or args.heads, args.head_dim
    table = torch.arange(args.batch * pages, **ints).view(args.batch, pages)
    lens = torch.full((args.batch,), args.seq_k, **ints)
    return [q, _dense(args, *cache), _dense(args, *cache), table, lens], _rules(args)


def _qkv_sizes(args: argparse.Namespace) -> tuple[tuple[int, int], ...]:
    """(heads, tokens) of q, k and v."""
    kv = args.heads_kv or args.heads, args.seq_q if args.seq_k is None else args.seq_k
    return (args.heads, args.seq_q), kv, kv


def _flash(args: argparse.Namespace) -> tuple[list, dict]:
    return [
        _dense(args, args.batch, heads, seq, args.head_dim) for heads, seq in _qkv_sizes(args)
    ], _rules(args)


def _varlen(args: argparse.Namespace) -> tuple[list, dict]:
    sizes = _qkv_sizes(args)
    packed = [_dense(args, args.batch * seq, heads, args.head_dim) for heads, seq in sizes]
    longest = [seq for _, seq in sizes[:2]]
    starts = [
        torch.arange(args.batch + 1, dtype=torch.int32, device=args.device) * seq for seq in longest
    ]
    return [*packed, *starts, *longest], _rules(args)


def _flash_bwd(args: argparse.Namespace) -> tuple[list, dict]:
    (q, k, v), rules = _flash(args)
    out, lse = (
        torch.empty_like(q),
        torch.empty(q.shape[:3], dtype=stats_dtype(q), device=args.device),
    )
    if args.measure:
        out, lse = ops.flash_attn_fwd.default(q, k, v, **rules)
    return [_dense(args, *q.shape), q, k, v, out, lse], rules


# ---- quantised and sparse products ---------------------------------------------------------------


def _granularities(text: str) -> str:
    if not all(part in _GRANULARITIES for part in text.split(",")) or text.count(",") > 1:
        raise argparse.ArgumentTypeError(
            f"must be one of {', '.join(_GRANULARITIES)}, or two of them, got {text!r}"
        )
    return text


def _scales(args: argparse.Namespace, rows: int, cols: int, granularity: str) -> Tensor:
    high = {"tensor": 1, "128x128": -(-rows // 128)}.get(granularity, rows)
    across = {"tensor": 1, "row": 1, "1x32": -(-cols // 32)}.get(granularity, -(-cols // 128))
    return _filled(args, 1, high, across)


def _add_scaled(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--scales",
        type=_granularities,
        default="row",
        metavar="G[,G]",
        help=f"{', '.join(_GRANULARITIES[:-1])} or {_GRANULARITIES[-1]}; two of them: of a and of "
        f"b, as 1x128,128x128",
    )


def _scaled(args: argparse.Namespace) -> tuple[list, dict]:
    """b is stored transposed, as weights are."""
    m, n, k = args.m, args.n, args.k
    of_a, _, of_b = args.scales.partition(",")
    scales = _scales(args, m, k, of_a), _scales(args, n, k, of_b or of_a).mT
    return [_codes(args, m, k), _codes(args, n, k).mT, *scales], {}


def _add_weight(p: argparse.ArgumentParser) -> None:
    p.add_argument("--format", choices=_GROUPS, default="int4")
    p.add_argument(
        "--group",
        type=whole(1),
        help="columns that share a scale; default: 128, mxfp4 32, nvfp4 16",
    )
    p.add_argument(
        "--groups",
        type=whole(1),
        help="number of weights, which share the M rows evenly; default: one without offs",
    )


def _weight(args: argparse.Namespace) -> tuple[list, dict]:
    m, n, k = args.m, args.n, args.k
    group = min(args.group or _GROUPS[args.format], max(k, 1))
    tile = 4096 if args.format in ("int8", "e4m3") else 2048
    tiles, columns, more = -(-n // 64), n, {}
    if args.groups:
        more["offs"] = _ends(args, m)
        tiles *= args.groups
        columns = 64 * tiles
    packed = _filled(args, 0x11, tiles, -(-k // 64), tile, dtype=torch.uint8)
    a = _dense(args, m, k)
    # the dtypes of the scales that `torch_gpukern.nn.quantize` makes
    dtype = {"mxfp4": torch.float8_e8m0fnu, "nvfp4": torch.float8_e4m3fn}.get(args.format, a.dtype)
    scale = _filled(args, 1, -(-k // group), columns, dtype=dtype)
    if args.format == "uint4":
        more["zero"] = _filled(args, 8, -(-k // group), columns, dtype=torch.uint8)
    return [a, packed, scale, n, args.format], more


def _ends(args: argparse.Namespace, m: int) -> torch.Tensor:
    """offs of args.groups groups, which share M rows evenly."""
    counted = torch.arange(1, args.groups + 1, device=device_of(args.device))
    return (counted * m // args.groups).int()


def _add_grouped(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--groups",
        type=whole(1),
        default=8,
        help="number of products, which share the M rows evenly",
    )
    p.add_argument(
        "--scales",
        choices=("row", "block"),
        default="row",
        help="scales of 8-bit codes; block: 1x128 for a, 128x128 for b",
    )


def _grouped(args: argparse.Namespace) -> tuple[list, dict]:
    """b is stored transposed, as weights are."""
    m, n, k, groups = args.m, args.n, args.k, args.groups
    offs = _ends(args, m)
    if args.dtype not in _CODES:
        return [_dense(args, m, k), _dense(args, groups, n, k).mT, offs], {}
    of_a, of_b = ("row", "row") if args.scales == "row" else ("1x128", "128x128")
    scale_a, scale_b = (
        _scales(args, m, k, of_a),
        _scales(args, n, k, of_b).mT.expand(groups, -1, -1).contiguous(),
    )
    return [_codes(args, m, k), _codes(args, groups, n, k).mT, offs, scale_a, scale_b], {}


def _sparse(args: argparse.Namespace) -> tuple[list, dict]:
    """w keeps the first two of every four elements. `meta` stores their places, 0 and 1, in two bits
    each: the number 4, twice in a byte."""
    m, n, k = args.m, args.n, args.k
    make = _codes if args.dtype in _CODES else _dense
    meta = _filled(args, 0x44, n, -(-k // 8), dtype=torch.uint8)
    return [make(args, m, k), make(args, n, k // 2), meta], {}


# ---- rows ----------------------------------------------------------------------------------------


def _add_codes(p: argparse.ArgumentParser) -> None:
    p.add_argument("--to", choices=_CODES, default="float8_e4m3fn", help="dtype of the codes")
    p.add_argument("--granularity", choices=_GRANULARITIES, default="row")


def _how(args: argparse.Namespace) -> dict:
    return {"dtype": _CODES[args.to], "granularity": args.granularity}


def _quantize(args: argparse.Namespace) -> tuple[list, dict]:
    return [_dense(args, args.m, args.n)], _how(args)


def _gated_codes(args: argparse.Namespace) -> tuple[list, dict]:
    return [_dense(args, args.m, args.n), _dense(args, args.m, args.n)], _how(args)


def _normed_codes(args: argparse.Namespace) -> tuple[list, dict]:
    x, weight, residual = _dense(args, args.m, args.n), _dense(args, args.n), None
    return [x, weight, residual, 1e-6], _how(args)


def _add_dequantize(p: argparse.ArgumentParser) -> None:
    p.add_argument("--to", choices=_WIDE, default="bfloat16", help="dtype of the result")
    p.add_argument("--granularity", choices=_GRANULARITIES, default="row")


def _dequantize(args: argparse.Namespace) -> tuple[list, dict]:
    scale = _scales(args, args.m, args.n, args.granularity)
    return [
        _codes(args, args.m, args.n),
        scale.view(()) if args.granularity == "tensor" else scale,
        _WIDE[args.to],
    ], {}


def _add_norm(p: argparse.ArgumentParser) -> None:
    p.add_argument("--residual", action="store_true", help="add a residual first")


def _rms_norm(args: argparse.Namespace) -> tuple[list, dict]:
    more = {"residual": _dense(args, args.m, args.n)} if args.residual else {}
    return [_dense(args, args.m, args.n), _dense(args, args.n)], more


def _layer_norm(args: argparse.Namespace) -> tuple[list, dict]:
    tensors, more = _rms_norm(args)
    return [*tensors, _dense(args, args.n)], more


def _one(args: argparse.Namespace) -> tuple[list, dict]:
    return [_dense(args, args.m, args.n)], {}


def _two(args: argparse.Namespace) -> tuple[list, dict]:
    return [_dense(args, args.m, args.n), _dense(args, args.m, args.n)], {}


def _cross_entropy(args: argparse.Namespace) -> tuple[list, dict]:
    return [
        _dense(args, args.m, args.n),
        torch.zeros(args.m, dtype=torch.int64, device=device_of(args.device)),
    ], {}


def _add_dropout(p: argparse.ArgumentParser) -> None:
    p.add_argument("--p", type=float, default=0.1, help="probability of dropping an element")


def _seed(args: argparse.Namespace) -> dict:
    return {"p": args.p, "seed": torch.tensor([1, 0], device=device_of(args.device))}


def _dropout(args: argparse.Namespace) -> tuple[list, dict]:
    return [_dense(args, args.m, args.n)], _seed(args)


def _dropout_add(args: argparse.Namespace) -> tuple[list, dict]:
    return [_dense(args, args.m, args.n), _dense(args, args.m, args.n)], _seed(args)


def _gelu_dropout(args: argparse.Namespace) -> tuple[list, dict]:
    return [_dense(args, args.m, args.n), _dense(args, args.n)], _seed(args)


def _add_heads(p: argparse.ArgumentParser) -> None:
    p.add_argument("--heads", type=whole(1), default=8)
    p.add_argument("--heads-kv", type=whole(1), help="default: as --heads")
    p.add_argument("--head-dim", type=whole(1), default=64)


def _packed(args: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Packed q and k of args.tokens tokens, and the cosines and sines of their positions."""
    q, k = (
        _dense(args, args.tokens, heads, args.head_dim)
        for heads in (args.heads, args.heads_kv or args.heads)
    )
    cos, sin = (_filled(args, x, args.tokens, args.head_dim // 2) for x in (1, 0))
    return q, k, cos, sin


def _rope(args: argparse.Namespace) -> tuple[list, dict]:
    return list(_packed(args)), {}


def _add_write(p: argparse.ArgumentParser) -> None:
    _add_heads(p)
    p.add_argument("--block-size", type=whole(1), default=16)


def _rope_kv_write(args: argparse.Namespace) -> tuple[list, dict]:
    q, k, cos, sin = _packed(args)
    places = torch.arange(args.tokens, device=q.device)
    v, pages = _dense(args, *k.shape), -(-args.tokens // args.block_size)
    caches = (
        _filled(args, 0, pages, args.block_size, *k.shape[1:], dtype=k.dtype) for _ in range(2)
    )
    return [q, k, v, cos, sin, places, *caches, places], {}


def _add_top_k(p: argparse.ArgumentParser) -> None:
    p.add_argument("--top-k", type=whole(1), default=8, help="experts of each token")


def _moe_unpermute(args: argparse.Namespace) -> tuple[list, dict]:
    rows = _dense(args, args.tokens * args.top_k, args.n)
    place = torch.arange(args.tokens * args.top_k, dtype=torch.int32, device=rows.device)
    weight = rows.new_ones(args.tokens, args.top_k, dtype=stats_dtype(rows))
    return [rows, place.view(weight.shape), weight], {}


# ---- the table -----------------------------------------------------------------------------------

_ATTENTION = ("BQ", "BKV", "chunk", "")


def _nothing(_: argparse.ArgumentParser) -> None:
    pass


CALLS = {
    "gemm": Call("m n k", DTYPES, _add_gemm, _gemm),
    "flash_attn": Call("", DTYPES, _add_attention, _flash, _ATTENTION),
    "flash_attn_varlen": Call("", DTYPES, _add_attention, _varlen, _ATTENTION),
    "flash_attn_bwd": Call("", DTYPES, _add_attention, _flash_bwd, _ATTENTION),
    "paged_attn": Call("", DTYPES, _add_paged, _paged, _ATTENTION),
    "scaled_gemm": Call("m n k", _CODES, _add_scaled, _scaled),
    "weight_gemm": Call("m n k", _SHORT, _add_weight, _weight),
    "grouped_gemm": Call("m n k", _WIDE | _CODES, _add_grouped, _grouped),
    "sparse_gemm": Call("m n k", _SHORT | _CODES, _nothing, _sparse),
    "quantize": Call("m n", _WIDE, _add_codes, _quantize),
    "silu_mul_quantize": Call("m n", _WIDE, _add_codes, _gated_codes),
    "rms_norm_quantize": Call("m n", _WIDE, _add_codes, _normed_codes),
    "dequantize": Call("m n", _CODES, _add_dequantize, _dequantize),
    "rms_norm": Call("m n", DTYPES, _add_norm, _rms_norm),
    "layer_norm": Call("m n", DTYPES, _add_norm, _layer_norm),
    "softmax": Call("m n", DTYPES, _nothing, _one),
    "log_softmax": Call("m n", DTYPES, _nothing, _one),
    "swiglu": Call("m n", DTYPES, _nothing, _two),
    "geglu": Call("m n", DTYPES, _nothing, _two),
    "cross_entropy": Call("m n", DTYPES, _nothing, _cross_entropy),
    "kl_div": Call("m n", DTYPES, _nothing, _two),
    "moe_unpermute": Call("tokens n", DTYPES, _add_top_k, _moe_unpermute),
    "dropout": Call("m n", DTYPES, _add_dropout, _dropout),
    "dropout_add": Call("m n", DTYPES, _add_dropout, _dropout_add),
    "bias_gelu_dropout": Call("m n", DTYPES, _add_dropout, _gelu_dropout),
    "rope": Call("tokens", DTYPES, _add_heads, _rope),
    "rope_kv_write": Call("tokens", DTYPES, _add_write, _rope_kv_write),
}


# ---- the command ---------------------------------------------------------------------------------


def _default_dtype(call: Call, gpu: bool) -> str:
    """The default of --dtype: bfloat16 on a GPU if the op takes it, otherwise the first choice."""
    return "bfloat16" if gpu and "bfloat16" in call.dtypes else next(iter(call.dtypes))


def _microseconds(us: float) -> str:
    """A time with one decimal, or with two significant digits if it is below 1."""
    return f"{us:.1f}" if us >= 1 else f"{us:.2g}"


def run(args: argparse.Namespace) -> int:
    args.dtype = args.dtype or _default_dtype(
        CALLS[args.op], bool(args.arch) or not args.device.startswith("cpu")
    )
    if args.arch and (args.measure or args.device != "cpu"):
        raise ValueError(
            "--arch describes a GPU that need not exist; leave out --device and --measure, or --arch"
        )
    with _in_memory():
        call, rules = CALLS[args.op].make(args)
    x = explain(args.op, *call, arch=args.arch, **rules)
    us = None
    if args.measure:
        op = getattr(ops, args.op).default
        with torch.inference_mode():
            us = timing.median_us(lambda: op(*call, **rules), torch.device(args.device))
    if args.json:
        print(json.dumps(x if us is None else {**x, "measured_us": us}, indent=2))
        return 0
    why = (
        ops.cpu_isa_reason.default()
        if args.device == "cpu" and not args.arch and args.dtype == "bfloat16"
        else ""
    )
    tiles = "  ".join(
        f"{name} {size}" for name, size in zip(CALLS[args.op].tiles, x["tile"], strict=True) if size
    )
    rows = [
        ("kernel instance", x["instance"] + (", chosen by tuning" if x["preferred"] else "")),
        ("instruction set", x["isa"] + (f" ({why})" if why else "")),
        ("tile", tiles or "none"),
        ("tasks", x["tasks"]),
        *([("chunks of the keys", x["chunks"])] if "BKV" in CALLS[args.op].tiles else []),
        ("bytes", f"{x['bytes']:,.0f}"),
        ("FLOPs", f"{x['flops']:,.0f}"),
        ("FLOPs per byte", f"{x['flops'] / x['bytes']:.1f}" if x["bytes"] else "0"),
        ("workspace bytes", f"{x['workspace_bytes']:,}"),
    ]
    if x["bound_us"]:
        rows += [("waves", f"{x['waves']:.2f}" if x["waves"] else "unknown without the GPU")]
        rows += [("no faster than", f"{_microseconds(x['bound_us'])} us")]
    if us is not None:
        beside = f", {us / x['bound_us']:.2f} of that bound" if x["bound_us"] else ""
        rates = f"{x['flops'] / us / 1e3:,.1f} GFLOP/s, {x['bytes'] / us / 1e3:,.1f} GB/s"
        rows += [("measured", f"{us:.1f} us{beside}, {rates}")]
    print(fields(rows))
    return 0


def add_arguments(commands: argparse._SubParsersAction) -> None:
    named = commands.add_parser(
        "explain", help="the kernel instance that a call would run, its tiles, bytes and FLOPs"
    )
    named = named.add_subparsers(dest="op", required=True)
    for op, call in CALLS.items():
        p = named.add_parser(op)
        p.set_defaults(run=run)
        for name in call.sizes.split():
            p.add_argument(name, type=whole(0), metavar=name.upper())
        if not call.sizes:
            p.set_defaults(
                instead="; give sizes by name: --batch 2 --heads 32 --seq-q 4096 --head-dim 128"
            )
        on_cpu, on_gpu = _default_dtype(call, False), _default_dtype(call, True)
        default = on_cpu if on_cpu == on_gpu else f"{on_cpu}, on a GPU {on_gpu}"
        p.add_argument(
            "--dtype", choices=call.dtypes, help=f"dtype of a, q or x; default: {default}"
        )
        p.add_argument("--device", default="cpu")
        p.add_argument(
            "--arch", choices=ARCHS, help="explain for a GPU of this architecture; needs no GPU"
        )
        p.add_argument(
            "--measure", action="store_true", help="also run the call and print its time"
        )
        p.add_argument(
            "--json", action="store_true", help="print what torch_gpukern.explain returns, as JSON"
        )
        call.add(p)
