# SPDX-License-Identifier: BSD-3-Clause
"""What linear_cross_entropy computes: gemm and cross_entropy over some rows, or some classes, at a
time.

x [M, H], weight [V, H], target [M]. z = x weight^T + bias is float32 (float64 of float64), rows of
it at once in memory that is used again; cross_entropy makes of it its gradient, rounded to x's
dtype as dz.

- `scalar`, forward of a mean or a sum, makes the gradients, too: 6 M H V FLOPs. dz has the size of
  a row's own loss, without the factor 1 / M, so that it does not underflow in float16. All of it is
  kept where that is at most twice as large as a float32 sum of dweight; else such a sum is kept, to
  which blocks of rows add. Which of the two follows from shapes alone. On CUDA z stands in rows of
  dz that come later, as long as there are enough: the more rows at once, the less often is weight
  read.
- `scaled` is its backward: multiplies by the gradient of the loss and rounds.
- `rows` gives each row's loss, and `rows_backward` computes z again, 8 M H V FLOPs: by classes
  where dweight is wanted, so that each of its rows is complete at once, else by rows.
- `part_of_rows` and `part_of_backward` are those two where weight holds some of the classes, the
  others being on other ranks.
"""

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from .._library import ops
from .fakes import stats_dtype

__all__ = [
    "FLOATS",
    "Rules",
    "accumulator",
    "kept_rows",
    "part_of_backward",
    "part_of_rows",
    "rows",
    "rows_backward",
    "scalar",
    "scaled",
]

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # of x and weight
# Bytes of z at once. On the CPU it should stay near the caches, as long as a product has rows
# enough to be worth packing weight.
_CPU_BYTES, _MOST_BYTES, _FEWEST_ROWS = 64 << 20, 128 << 20, 256
_ALONE_BYTES = 384 << 20  # of it where nothing else of that size is beside it, on CUDA
_COPY_BYTES = 32 << 20  # of a float32 tensor on the way to a result
# The same on the CPU, where malloc may keep up to 64 MiB of what copies leave free, in the heap of
# each thread that makes some.
_CPU_COPY_BYTES = 2 << 20
_ALIGNED = 8  # values of 16 bits in front of which a product's result may begin


class Rules(NamedTuple):
    """The arguments of every pass that are no tensors of its own."""

    class_weight: Tensor | None
    ignore_index: int
    label_smoothing: float
    softcap: float
    logit_scale: float
    z_loss: float
    fp32_precision: str

    @property
    def of_rows(self) -> tuple:
        return self[:-1]


accumulator = stats_dtype


def _rows_of_sum(x: Tensor) -> int:
    """Rows [., V] of x's dtype that have the bytes of dweight's sum."""
    return x.shape[-1] * (accumulator(x).itemsize // x.dtype.itemsize)


def kept_rows(x: Tensor, rows):
    """Rows of the buffer [., V] in x's dtype that `scalar` keeps where dweight is wanted: dz of all
    rows, where that is at most twice dweight's sum, else that sum. rows may be a symbol, so this is
    an expression and no branch. It is a maximum whose first part is positive, because torch.export
    must see from its range that it is a size."""
    sums = _rows_of_sum(x)
    too_many = torch.sym_min(torch.sym_max(rows - 2 * sums, 0), 1)
    all_rows = torch.sym_min(rows, 2 * sums) - 2 * sums * too_many  # 0 of too many
    return torch.sym_max(torch.sym_min(rows, sums), all_rows)


def rows_at_once(x: Tensor, classes: int, most: int) -> int:
    """Rows of logits [., classes] that fit into `most` bytes, in whole tiles of 128 if there are
    as many. On the CPU a block is at most 64 MiB, or 256 rows."""
    row = max(1, classes) * accumulator(x).itemsize
    step = most // row
    if x.device.type == "cpu":
        step = min(step, max(_CPU_BYTES // row, _FEWEST_ROWS))
    return _whole_tiles(step)


def _even(size: int, most: int) -> int:
    """Steps of nearly the same size, of whole tiles, that are `most` at most."""
    each = -(-size // -(-size // most))
    return min(most, -(-each // 128) * 128)


def _whole_tiles(step: int) -> int:
    return max(1, step // 128 * 128 or step)


def _steps(size: int, step: int):
    return (slice(at, min(at + step, size)) for at in range(0, size, step))


def _product(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    rules: Rules,
    bias: Tensor | None = None,
    c: Tensor | None = None,
) -> Tensor:
    """out = a b + bias + c"""
    ops.gemm.out(a, b, bias, c=c, out_dtype=out.dtype, fp32_precision=rules.fp32_precision, out=out)
    return out


class _Sum:
    """A sum [n, h] of products, in float32. gemm adds to a product what is elsewhere: each addition
    moves the sum by `step` rows and back, slice after slice."""

    def __init__(self, like: Tensor, n: int, h: int, rules: Rules) -> None:
        wide = accumulator(like)
        self.rules, self.n, self.step = (
            rules,
            n,
            max(1, min(n, _COPY_BYTES // max(1, h * wide.itemsize))),
        )
        self.room = like.new_empty(n + self.step, h, dtype=wide)
        self.at: int | None = None  # the sum's first row

    @property
    def value(self) -> Tensor:
        return (
            self.room[: self.n].zero_()
            if self.at is None
            else self.room[self.at : self.at + self.n]
        )

    def add(self, factors: Callable[[slice], tuple[Tensor, Tensor]]) -> None:
        """factors(rows) -> (a, b), whose product is what these rows of the sum grow by."""
        to = self.step if self.at == 0 else 0
        slices = list(_steps(self.n, self.step))
        for s in reversed(slices) if to else slices:
            c = None if self.at is None else self.room[s.start + self.at : s.stop + self.at]
            _product(*factors(s), self.room[s.start + to : s.stop + to], self.rules, c=c)
        self.at = to


def _add_rows(to: Tensor, dz: Tensor) -> None:
    """to += the sum of dz's rows, in to's dtype. PyTorch's sum on the CPU copies what is narrower,
    so there it gets some at a time."""
    copied = dz.device.type == "cpu" and dz.dtype is not to.dtype
    step = max(1, _CPU_COPY_BYTES // (dz.shape[1] * to.itemsize)) if copied else max(1, dz.shape[0])
    for s in _steps(dz.shape[0], step):
        to += dz[s].sum(0, dtype=to.dtype)


def _loss(z: Tensor, target: Tensor, rules: Rules) -> tuple[Tensor, Tensor]:
    return ops.cross_entropy.default(z, target, *rules.of_rows)


def _gradient(
    z: Tensor,
    grad: Tensor,
    target: Tensor,
    lse: Tensor,
    rules: Rules,
    out: Tensor,
    first: int = 0,
    classes: int = 0,
) -> Tensor:
    """dz into out, which may be z, or of 16 bits; z may be of `first` and later ones of `classes`."""
    ops.cross_entropy_bwd.out(grad, z, target, lse, *rules.of_rows, first, classes, out=out)
    return out


def _loss_and_gradient(
    z: Tensor, target: Tensor, rules: Rules, loss: Tensor, lse: Tensor, out: Tensor
) -> Tensor:
    """Both in one pass; dz of the sum of losses into out, as above."""
    ops.cross_entropy_grad.default(z, target, loss, lse, out, *rules.of_rows)
    return out


def _prefers_many_rows(x: Tensor) -> bool:
    """Where a product of more rows is faster, however large they are; on the CPU z should stay near
    the caches."""
    return x.device.type != "cpu"


def _beside(dz: Tensor, at: int, wide: torch.dtype) -> Tensor:
    """Room for z [n, V] of the rows of dz [rows, V] from `at` on, in the last rows of dz, for as
    many as there is room."""
    (rows, v), times = dz.shape, wide.itemsize // dz.dtype.itemsize
    n = (
        _whole_tiles((rows - at - 1) // (times + 1))
        if rows - at > times + 1 and v >= _ALIGNED
        else 0
    )
    begin = (rows - n * times) * v // _ALIGNED * _ALIGNED  # the row to spare is for this
    return dz.view(-1)[begin : begin + n * times * v].view(wide).view(n, v)


def _rooms(
    dz: Tensor | None, rows: int, step: int, direct: bool, buffer: Callable[[], Tensor]
) -> Iterator[tuple[slice, Tensor]]:
    """(some rows, room for their z): dz itself where it has z's dtype (`direct`), rows of dz that
    come later, or `buffer` of step rows."""
    at = 0
    while at < rows:
        many = dz is not None and _prefers_many_rows(dz)
        if direct:
            z = dz[at:] if many else dz[at : at + step]
        elif not many or (z := _beside(dz, at, torch.float32)).shape[0] <= step:
            z = buffer()[: rows - at]
        yield slice(at, at + z.shape[0]), z
        at += z.shape[0]


def scalar(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    rules: Rules,
    need_x: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss [M], dx [M, H], kept [rows, V], dbias [V]), gradients of the sum of the rows' losses;
    empty where not needed."""
    (m, h), v, wide = x.shape, weight.shape[0], accumulator(x)
    whole = need_weight and kept_rows(x, m) == m
    alone = whole or not (need_x or need_weight)  # no dz of some rows beside z
    step = rows_at_once(x, v, _MOST_BYTES * 3 // 2 if alone else _MOST_BYTES)
    loss, lse = (x.new_empty(m, dtype=wide) for _ in range(2))
    dx = x.new_empty((m, h) if need_x else 0)
    dbias = x.new_zeros(v if need_bias else 0, dtype=wide)
    kept = x.new_empty((m, v) if whole else 0)
    # Rows whose dz is multiplied at once. One block is as large as the sum of dweight beside it.
    block = max(1, m) if whole else _even(m, max(step, _rows_of_sum(x))) if need_weight else step
    total = _Sum(x, v, h, rules) if need_weight and not whole else None
    needed = need_x or need_weight or need_bias
    # dweight, which backward makes beside kept, is as large
    if need_weight and _prefers_many_rows(x):
        step = max(step, _whole_tiles(h * x.dtype.itemsize // wide.itemsize))
    room = kept if whole else x.new_empty(min(block, m), v) if need_x or need_weight else None
    direct = room is not None and x.dtype is wide  # then z is made where dz is wanted
    buffer = cache(lambda: x.new_empty(min(step, m), v, dtype=wide))
    for outer in _steps(m, block):
        xs, ts = x[outer], target[outer]
        dz = None if room is None else room[: xs.shape[0]]
        for s, z in _rooms(dz, xs.shape[0], step, direct, buffer):
            _product(xs[s], weight.mT, z, rules, bias)
            if not needed:
                loss[outer][s], _ = _loss(z, ts[s], rules)
                continue
            made = _loss_and_gradient(
                z, ts[s], rules, loss[outer][s], lse[outer][s], z if dz is None else dz[s]
            )
            if need_bias:
                _add_rows(dbias, made)
        if need_x:
            _product(dz, weight, dx[outer], rules)
        if total is not None:
            total.add(lambda s, dz=dz, xs=xs: (dz[:, s].mT, xs))
    if total is not None:
        kept = total.value.view(-1).view(x.dtype).view(kept_rows(x, m), v)
    return loss, dx, kept, dbias


def scaled(
    factor: Tensor, dx: Tensor, kept: Tensor, dbias: Tensor, x: Tensor, rules: Rules
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias) of `scalar` times factor [], rounded to x's dtype."""
    wide, (m, h) = accumulator(x), x.shape
    if kept.dim() < 2:
        dweight = x.new_empty(0)
    elif kept.shape[0] < m:
        dweight = _times(kept.view(-1).view(wide).view(kept.shape[1], h), factor, x.dtype)
    else:
        dweight = x.new_empty(kept.shape[1], h)
        # factor may be that of a gradient scaler, which times x would overflow
        if x.dtype is torch.float16:
            _times_product(kept.mT, x, dweight, factor, rules)
        else:
            _product(kept.mT, _times(x, factor, x.dtype), dweight, rules)
    return _times(dx, factor, x.dtype), dweight, _times(dbias, factor, x.dtype)


def _times(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x * factor in factor's dtype, rounded once."""
    if x.dtype is factor.dtype and x.dtype is dtype:
        return x * factor
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.is_cuda and x.dim():  # with a dimension factor decides in what dtype the product is made
        return torch.mul(x, factor.view(1), out=out)
    step = max(1, _CPU_COPY_BYTES // max(1, x[:1].numel() * factor.itemsize)) if x.dim() else 1
    for s in _steps(x.shape[0], step):
        out[s].copy_(x[s].to(factor.dtype) * factor)
    return out


def _times_product(a: Tensor, b: Tensor, out: Tensor, factor: Tensor, rules: Rules) -> None:
    """out = factor * (a @ b), rounded once."""
    step = max(1, _COPY_BYTES // max(1, out.shape[1] * factor.itemsize))
    room = torch.empty(
        (min(step, out.shape[0]), out.shape[1]), dtype=factor.dtype, device=out.device
    )
    for s in _steps(out.shape[0], step):
        wide = room[: s.stop - s.start]
        out[s].copy_(_product(a[s], b, wide, rules).mul_(factor))


def rows(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, rules: Rules
) -> tuple[Tensor, Tensor]:
    """(loss, lse), both [M]."""
    m, wide = x.shape[0], accumulator(x)
    loss, lse = (x.new_empty(m, dtype=wide) for _ in range(2))
    step = rows_at_once(x, weight.shape[0], _ALONE_BYTES)
    buffer = x.new_empty(min(step, m), weight.shape[0], dtype=wide)
    for s in _steps(m, step):
        z = _product(x[s], weight.mT, buffer[: s.stop - s.start], rules, bias)
        loss[s], lse[s] = _loss(z, target[s], rules)
    return loss, lse


def _without_factor(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """grad with the size of a row's own, and what it was divided by: in float16 1 / M times a
    probability would underflow."""
    if x.dtype is not torch.float16 or not x.shape[0]:
        return grad, None
    factor = grad.abs().amax()
    factor = torch.where((factor > 0) & factor.isfinite(), factor, 1.0)
    return grad / factor, factor


def rows_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    rules: Rules,
    need_x: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias) for gradients [M] of the rows' losses; empty where not needed."""
    (m, h), v, wide = x.shape, weight.shape[0], accumulator(x)
    grad, factor = _without_factor(grad, x)
    dx = x.new_empty((m, h) if need_x else 0)
    dweight = x.new_empty((v, h) if need_weight else 0)
    dbias = x.new_zeros(v if need_bias else 0, dtype=wide)
    if need_weight:
        _backward_by_classes(
            grad,
            x,
            weight,
            target,
            lse,
            bias,
            rules,
            dx if need_x else None,
            dweight,
            dbias,
            factor,
        )
    else:
        step = rows_at_once(x, v, _MOST_BYTES)
        buffer = x.new_empty(min(step, m), v, dtype=wide)
        narrow = buffer if x.dtype is wide else x.new_empty(buffer.shape)
        for s in _steps(m, step):
            z = _product(x[s], weight.mT, buffer[: s.stop - s.start], rules, bias)
            dz = _gradient(z, grad[s], target[s], lse[s], rules, out=narrow[: s.stop - s.start])
            if need_bias:
                _add_rows(dbias, dz)
            if need_x and factor is not None:
                _times_product(dz, weight, dx[s], factor, rules)
            elif need_x:
                _product(dz, weight, dx[s], rules)
    dbias = dbias if factor is None else dbias * factor
    return dx, dweight, dbias.to(x.dtype)


def _backward_by_classes(
    grad, x, weight, target, lse, bias, rules, dx, dweight, dbias, factor, first=0, classes=None
) -> None:
    """Writes dx (or None), dweight and dbias (or empty ones). dx is summed over the classes in
    float32.

    weight is that of classes `first` and on, of `classes`.
    """
    (m, h), v, wide = x.shape, weight.shape[0], accumulator(x)
    whole = v if classes is None else classes
    total = None if dx is None else _Sum(x, m, h, rules)
    step = _whole_tiles(
        (2 if _prefers_many_rows(x) else 1) * _MOST_BYTES // (max(1, m) * wide.itemsize)
    )
    room = x.new_empty(m * min(step, v), dtype=wide)
    narrow = room if x.dtype is wide else x.new_empty(room.shape)
    for s in _steps(v, step):
        size = m, s.stop - s.start
        z = room[: math.prod(size)].view(size)
        _product(x, weight[s].mT, z, rules, None if bias is None else bias[s])
        dz = _gradient(
            z, grad, target, lse, rules, narrow[: z.numel()].view(size), first + s.start, whole
        )
        if dbias.numel():
            _add_rows(dbias[s], dz)
        if dweight.numel() and factor is None:
            _product(dz.mT, x, dweight[s], rules)
        elif dweight.numel():
            _times_product(dz.mT, x, dweight[s], factor, rules)
        if total is not None:
            total.add(lambda rows, dz=dz, w=weight[s]: (dz[rows], w))
    if total is not None:
        dx.copy_(total.value if factor is None else total.value.mul_(factor))


# ---- some of the classes -------------------------------------------------------------------------


def part_of_rows(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, rules: Rules, first: int
) -> Tensor:
    """[2, M], with label smoothing [3, M]: lse over these classes, the target's logit or 0 where it
    is another's, and their sum, weighted by class_weight.

    weight is that of classes `first` and on, class_weight that of all. A part without classes has
    lse -inf.
    """
    m, v, wide = x.shape[0], weight.shape[0], accumulator(x)
    found = x.new_zeros((3 if rules.label_smoothing else 2, m), dtype=wide)
    if not v:
        found[0] = -torch.inf
        return found
    step = rows_at_once(x, v, _ALONE_BYTES)
    buffer = x.new_empty(min(step, m), v, dtype=wide)
    none = target.new_zeros(1)  # any class: lse is the same
    weights = None if rules.class_weight is None else rules.class_weight[first : first + v]
    for s in _steps(m, step):
        z = _product(x[s], weight.mT, buffer[: s.stop - s.start], rules, bias)
        alone = rules._replace(class_weight=None, label_smoothing=0.0, ignore_index=-1)
        _, found[0, s] = _loss(z, none.expand(z.shape[0]).contiguous(), alone)
        column = target[s] - first
        here = (column >= 0) & (column < v) & (target[s] != rules.ignore_index)
        own = z.gather(1, column.clamp(0, v - 1)[:, None])[:, 0]
        found[1, s] = _logit(own, rules).masked_fill(~here, 0)
        if rules.label_smoothing:
            logits = _logit(z, rules)
            found[2, s] = (logits if weights is None else logits.mul_(weights)).sum(1)
    return found


def _logit(z: Tensor, rules: Rules) -> Tensor:
    """The logit that the loss reads, of a product."""
    z = z * rules.logit_scale
    return z.div_(rules.softcap).tanh_().mul_(rules.softcap) if rules.softcap > 0 else z


def part_of_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    rules: Rules,
    need_x: bool,
    need_weight: bool,
    need_bias: bool,
    first: int,
    classes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(these classes' share of dx, not rounded, dweight, dbias), where lse is over all `classes`;
    empty where not needed."""
    (m, h), v, wide = x.shape, weight.shape[0], accumulator(x)
    grad, factor = _without_factor(grad, x)
    share = x.new_zeros((m, h) if need_x else 0, dtype=wide)
    dweight = x.new_empty((v, h) if need_weight else 0)
    dbias = x.new_zeros(v if need_bias else 0, dtype=wide)
    _backward_by_classes(
        grad,
        x,
        weight,
        target,
        lse,
        bias,
        rules,
        share if need_x else None,
        dweight,
        dbias,
        factor,
        first,
        classes,
    )
    return share, dweight, (dbias if factor is None else dbias * factor).to(x.dtype)
