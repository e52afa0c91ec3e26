# SPDX-License-Identifier: BSD-3-Clause
"""Finds the fastest kernel instance of a gemm call. Measures every instance that can serve the call,
the default one among them, and PyTorch's own product. In this file an instance is its name, a str."""

import contextlib
import functools
import json
import math
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .._library import ops
from ..reference import ACTIVATIONS
from . import timing

__all__ = ["NOISE", "Problem", "Result", "parse_class", "parse_shape", "tune"]

# An instance replaces the default one only if it is faster by this factor, in two sets of rounds.
NOISE = 1.02
# Each instance is timed shortly first. One that takes more than FAR times the best time plus FAR_US us
# is not timed again.
FAR, FAR_US = 1.3, 1.0
ROUNDS = 15
# The default instance's error may be larger than PyTorch's by this factor, because it sums in another
# order. (Measured: a factor of 5 in float32 with k 4096, where cuBLAS splits k. An instance with a
# wrong tile has a factor of 1e5.)
ORDER = 16
# Below this many FLOPs per byte of operands, memory bounds the call. Calls then rotate over several
# sets of inputs, at most MOST_SETS.
ROTATE_BELOW, MOST_SETS = 128, 64

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


# ---- what is tuned -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """A gemm call with aligned operands. layout is that of `explain`: NT means a stored as [M, K]
    and b stored transposed, as [N, K]."""

    m: int
    n: int
    k: int
    layout: str = "NN"
    batch: int = 1
    dtype: str = "bfloat16"
    out_dtype: str | None = None
    fp32_precision: str = "ieee"
    activation: str = "none"
    bias: bool = False
    c: bool = False
    preact: bool = False

    def __str__(self) -> str:
        batch = f"{self.batch}x" if self.batch > 1 else ""
        extras = [name for name in ("bias", "c", "preact") if getattr(self, name)]
        extras += [x for x in (self.activation, self.fp32_precision) if x not in ("none", "ieee")]
        if self.out_dtype not in (None, self.dtype):
            extras.append(f"to {self.out_dtype}")
        return " ".join([f"{batch}{self.m}x{self.n}x{self.k}:{self.layout}", self.dtype, *extras])

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.n * self.k

    @property
    def bytes(self) -> float:
        """The bytes of a and b."""
        return float(self.batch * (self.m + self.n) * self.k * DTYPES[self.dtype].itemsize)

    def inputs(self, device: torch.device) -> dict[str, Tensor | None]:
        """Inputs with normally distributed values. Zeros would not do: values affect a GPU's power,
        and power its clock."""
        options = {"dtype": DTYPES[self.dtype], "device": device}

        def matrix(rows: int, cols: int, stored: str) -> Tensor:
            shape = (rows, cols) if stored == "N" else (cols, rows)
            x = torch.randn(*((self.batch,) if self.batch > 1 else ()), *shape, **options)
            return x if stored == "N" else x.mT

        return {
            "a": matrix(self.m, self.k, self.layout[0]),
            "b": matrix(self.k, self.n, self.layout[1]),
            "bias": torch.randn(self.n, **options) if self.bias else None,
            "c": matrix(self.m, self.n, "N") if self.c else None,
        }

    @property
    def how(self) -> dict[str, object]:
        out_dtype = DTYPES[self.out_dtype] if self.out_dtype else None
        return {
            "activation": self.activation,
            "out_dtype": out_dtype,
            "fp32_precision": self.fp32_precision,
        }

    def ours(self, inputs: dict) -> Tensor:
        if self.preact:
            return ops.gemm_fwd.default(**inputs, **self.how)[0]
        return ops.gemm.default(**inputs, **self.how)

    def torch(self, inputs: dict, dtype: torch.dtype | None = None) -> Tensor:
        """The result of PyTorch's own ops, which use cuBLAS. With `dtype`, operands are converted
        to it first, for a reference."""
        a, b, bias, c = (x if x is None or dtype is None else x.to(dtype) for x in inputs.values())
        out_dtype = dtype or DTYPES[self.out_dtype or self.dtype]
        if out_dtype != a.dtype:
            x = (torch.mm if a.dim() == 2 else torch.bmm)(a, b, out_dtype=out_dtype)
        elif bias is not None and a.dim() == 2:
            x, bias = torch.addmm(bias, a, b), None
        else:
            x = torch.matmul(a, b)
        x = x if bias is None else x + bias
        return ACTIVATIONS[self.activation](x if c is None else x + c)

    def explain(self, inputs: dict) -> dict:
        """The library's plan for the call, and the call's tuning key ("class")."""
        found = json.loads(ops.explain_gemm.default(**inputs, **self.how))
        if self.preact:  # explain describes the call without preact; the same instances serve both
            found["class"] = found["class"].replace(" preact=0 ", " preact=1 ")
        return found


def parse_shape(text: str) -> dict[str, object]:
    """The m, n, k, layout and batch in "512x28672x4096:NT" or, with a batch in front,
    "8x512x512x64". Raises ValueError for another form."""
    match = re.fullmatch(r"(?:(\d+)x)?(\d+)x(\d+)x(\d+)(?::([NT]{2}))?", text)
    if not match or "0" in match.groups():
        raise ValueError(f"shape '{text}' is not MxNxK, MxNxK:NT or BxMxNxK, each 1 or more")
    batch, m, n, k = (int(x or 1) for x in match.groups()[:4])
    return {"m": m, "n": n, "k": k, "layout": match[5] or "NN", "batch": batch}


def parse_class(text: str) -> Problem | None:
    """The problem that a tuning key describes; None if the key has strides or an alignment that a
    Problem cannot express."""
    sizes, *pairs = text.split(" ")
    try:
        of = dict(pair.split("=") for pair in pairs)
        return Problem(
            **parse_shape(f"{of['batch']}x{sizes}"),
            dtype=of["dtype"],
            out_dtype=of["out"] if of["out"] != of["dtype"] else None,
            fp32_precision=of["precision"],
            activation=of["activation"],
            c=of["c"] == "1",
            preact=of["preact"] == "1",
        )
    except (KeyError, ValueError):
        return None


# ---- checking results ----------------------------------------------------------------------------


def errors_of(x: Tensor, exact: Tensor) -> tuple[float, float]:
    """The largest and the root-mean-square error of x."""
    error = (x.to(exact.dtype) - exact).abs_()
    return error.max().item(), error.square_().mean().sqrt().item()


class Judge:
    """Judges whether an instance's result is right.

    Its error may be twice that of PyTorch's own product plus one rounding of the result
    (docs/numerics.md), or that of the default instance, whichever is larger. So tuning makes no call
    less accurate. The default instance is wrong if its error is more than ORDER times PyTorch's.
    """

    def __init__(self, problem: Problem, inputs: dict) -> None:
        narrow = DTYPES[problem.out_dtype or problem.dtype].itemsize == 2
        self.exact = problem.torch(inputs, torch.float32 if narrow else torch.float64)
        own = problem.torch(inputs)
        largest = self.exact.abs().max().item()
        self.rounding = (
            torch.finfo(own.dtype).eps * 2.0 ** math.floor(math.log2(largest)) if largest else 0.0
        )
        self.own = errors_of(own, self.exact)
        self.bounds = tuple(2 * x + self.rounding for x in self.own)

    def accepts(self, out: Tensor) -> bool:
        return all(
            got <= bound for got, bound in zip(errors_of(out, self.exact), self.bounds, strict=True)
        )

    def takes_as_default(self, out: Tensor) -> bool:
        """Whether the default instance's result can be right. If so, its errors become bounds for
        all instances."""
        errors = errors_of(out, self.exact)
        if not all(
            got <= ORDER * x + self.rounding for got, x in zip(errors, self.own, strict=True)
        ):
            return False
        self.bounds = tuple(map(max, self.bounds, errors))
        return True


# ---- the fastest instance ------------------------------------------------------------------------


@dataclass
class Result:
    """The result of `tune` for a problem.

    Attributes:
        default, best: names of instances.
        us: median time in us of each instance that was timed twice.
        cublas_us: PyTorch's median time in us.
        gain: the default's time over the best one's.
        wrong: instances with a wrong result.
    """

    problem: Problem
    device: str
    gemm_class: str
    default: str
    best: str
    us: dict[str, float]
    cublas_us: float
    gain: float
    wrong: list[str] = field(default_factory=list)

    def entry(self) -> dict[str, object] | None:
        """The entry of the file of tuned kernels; None if the default instance is the best."""
        if self.best == self.default:
            return None
        times = {
            "us": self.us[self.best],
            "default_us": self.us[self.default],
            "cublas_us": self.cublas_us,
        }
        return {"row": self.best, "default": self.default} | {
            name: round(us, 2) for name, us in times.items()
        }


@contextlib.contextmanager
def _torch_precision(problem: Problem) -> Iterator[None]:
    """A context in which PyTorch's products have the problem's float32 precision."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = problem.fp32_precision == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _short_time(call: Callable[[], object], pool) -> float:
    us = timing.Replay([call], 1, pool).us()
    return us if us > 100 else timing.Replay([call], 20, pool).us()


def _gain(times: dict[str, list[float]], instance: str, default: str) -> float:
    return statistics.median(x / y for x, y in zip(times[default], times[instance], strict=True))


def tune(problem: Problem, device: torch.device) -> Result:
    """Measures every instance that can serve the problem, and makes the library prefer the best one
    from now on.

    Raises:
        RuntimeError: the default instance's result is wrong.
    """
    with torch.cuda.device(device), torch.no_grad(), _torch_precision(problem):
        inputs = problem.inputs(device)
        plan = problem.explain(inputs)
        name, gemm_class, instances = plan["device"], plan["class"], plan["instances"]
        before = plan["instance"] if plan["preferred"] else ""

        def prefer(instance: str) -> None:
            ops.gemm_prefer.default(name, gemm_class, instance)

        try:
            result = _measured(problem, inputs, instances, prefer)
        except BaseException:
            prefer(before)
            raise
        result.device, result.gemm_class = name, gemm_class
        prefer(result.best if result.best != result.default else "")
        return result


def _measured(
    problem: Problem, inputs: dict, instances: list[str], prefer: Callable[[str], None]
) -> Result:
    default = instances[0]
    wrong: list[str] = []
    first_us: dict[str, float] = {}  # of the instances whose results are right
    pool = torch.cuda.graph_pool_handle()
    judge = Judge(problem, inputs)
    for instance in instances:
        prefer(instance)
        ran = problem.explain(inputs)["instance"]
        if ran != instance:
            raise RuntimeError(f"the library would run {ran} although {instance} is preferred")
        out = problem.ours(inputs)
        if judge.takes_as_default(out) if instance == default else judge.accepts(out):
            first_us[instance] = _short_time(lambda: problem.ours(inputs), pool)
        else:
            wrong.append(instance)
    if default in wrong:
        raise RuntimeError(f"the result of {default} is wrong: please report this")
    del judge, out
    least = min(first_us.values())
    near = [
        instance
        for instance, us in first_us.items()
        if us <= FAR * least + FAR_US or instance == default
    ]

    sets = [inputs]
    if problem.flops < ROTATE_BELOW * problem.bytes:
        count = min(math.ceil(timing.ROTATE_BYTES / problem.bytes), MOST_SETS)
        sets += [problem.inputs(inputs["a"].device) for _ in range(count - 1)]

    def replay(call: Callable[[dict], object], us: float) -> timing.Replay:
        functions = [functools.partial(call, x) for x in sets]
        return timing.Replay(functions, timing.calls_for(us), pool)

    replays = {}
    for instance in near:
        prefer(instance)
        replays[instance] = replay(problem.ours, first_us[instance])
    replays["cublas"] = replay(problem.torch, least)
    times = timing.rounds_us(replays, ROUNDS)
    us = {name: statistics.median(x) for name, x in times.items()}
    best = min(near, key=us.__getitem__)
    gain = _gain(times, best, default)
    if best != default and gain > NOISE:
        # The best of many is the best by chance, too, so time it again beside the default.
        again = timing.rounds_us(
            {name: replays[name] for name in (default, best, "cublas")}, ROUNDS
        )
        us |= {name: statistics.median(x) for name, x in again.items()}
        gain = min(gain, _gain(again, best, default))
    if gain <= NOISE:
        best, gain = default, 1.0
    cublas_us = us.pop("cublas")
    return Result(problem, "", "", default, best, us, cublas_us, gain, wrong)
