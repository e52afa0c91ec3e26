# SPDX-License-Identifier: BSD-3-Clause
"""The computation of linear_cross_entropy: gemm and cross_entropy over some rows, or some classes,
at a time.

x [M, H], weight [V, H], target [M]. The logits z = x weight^T + bias are float32 (float64 for
float64). They are computed for a block of rows at a time, in a buffer that is reused. cross_entropy
turns z into its gradient dz, rounded to x's dtype.

- `scalar` is the forward of a mean or a sum. It also computes the gradients: 6 M H V FLOPs. dz is
  the gradient of the sum of losses, without the factor 1 / M, so that it does not underflow in
  float16. All of dz is kept if it is at most twice as large as a float32 dweight. Otherwise dweight
  is kept, as a float32 sum to which each block of rows adds. This choice depends on shapes only. On
  CUDA z is stored in later rows of dz, as long as there are enough: more rows at a time mean fewer
  reads of weight.
- `scaled` is the backward of `scalar`. It multiplies by the gradient of the loss and rounds.
- `rows` returns each row's loss, and `rows_backward` computes z again: 8 M H V FLOPs. It goes by
  blocks of classes if dweight is wanted, so that each block completes its rows of dweight.
  Otherwise it goes by blocks of rows.
- `rows_and_gradient` and `kept_rows_backward` are the same for 6 M H V FLOPs: they keep dz.
- `gradients_by_rows` is the part of `scalar` that does not know the loss. linear_kl_div.py calls it,
  too.
- `part_of_rows` and `part_of_backward` are the same two functions if weight has only some of the
  classes and other ranks have the others.
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
    "gradients_by_rows",
    "all_rows",
    "kept_rows",
    "kept_rows_backward",
    "part_of_backward",
    "part_of_rows",
    "rows",
    "rows_and_gradient",
    "rows_backward",
    "scalar",
    "scaled",
    "times",
]

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # of x and weight
# Bytes of a block of z. On the CPU it should stay near the caches, but a product needs at least 256
# rows to repay packing weight.
_CPU_BYTES, _MOST_BYTES, _FEWEST_ROWS = 64 << 20, 128 << 20, 256
_ALONE_BYTES = 384 << 20  # the same on CUDA, if no other buffer of that size is allocated
_COPY_BYTES = 32 << 20  # of a float32 intermediate that is rounded into a result
# The same on the CPU. It is smaller because malloc may retain up to 64 MiB of freed copies in the
# heap of each thread.
_CPU_COPY_BYTES = 2 << 20
_ALIGNED = 8  # elements: a product's result begins at a multiple of 16 bytes


class Rules(NamedTuple):
    """The arguments that all functions of this file share."""

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
    """How many rows [V] in x's dtype have as many bytes as the float32 sum of dweight."""
    return x.shape[-1] * (accumulator(x).itemsize // x.dtype.itemsize)


def kept_rows(x: Tensor, rows):
    """Rows of the buffer [., V] in x's dtype that `scalar` keeps if dweight is wanted. It holds dz
    of all rows if that is at most twice as large as dweight's sum, and otherwise that sum.

    rows may be a symbol, so this is an expression without a branch. It is a maximum whose first
    operand is not negative, because torch.export must see from its range that it is a size.
    """
    return torch.sym_max(torch.sym_min(rows, _rows_of_sum(x)), all_rows(x, rows))


def all_rows(x: Tensor, rows):
    """`rows` if dz of all of them is at most twice as large as dweight's sum, otherwise 0; also an
    expression without a branch."""
    sums = _rows_of_sum(x)
    too_many = torch.sym_min(torch.sym_max(rows - 2 * sums, 0), 1)
    return torch.sym_min(rows, 2 * sums) - 2 * sums * too_many


def rows_at_once(x: Tensor, classes: int, most: int) -> int:
    """Rows of logits [., classes] that fit into `most` bytes, rounded down to a multiple of 128 if
    there are that many. On the CPU at most 64 MiB, or 256 rows if these are more."""
    row = max(1, classes) * accumulator(x).itemsize
    step = most // row
    if x.device.type == "cpu":
        step = min(step, max(_CPU_BYTES // row, _FEWEST_ROWS))
    return _whole_tiles(step)


def _even(size: int, most: int) -> int:
    """The size of a step if `size` is cut into steps of nearly equal size, in multiples of 128 and
    at most `most`."""
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
    """A sum [n, h] of products, in float32 unless another dtype is given. gemm cannot add to its
    result in place: it reads c from other memory. So each addition moves the sum by `step` rows,
    slice after slice, and the next one moves it back."""

    def __init__(
        self, like: Tensor, n: int, h: int, rules: Rules, dtype: torch.dtype | None = None
    ) -> None:
        wide = accumulator(like) if dtype is None else dtype
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
        """Adds a @ b to the sum, where factors(rows) returns (a, b) for these rows."""
        to = self.step if self.at == 0 else 0
        slices = list(_steps(self.n, self.step))
        for s in reversed(slices) if to else slices:
            c = None if self.at is None else self.room[s.start + self.at : s.stop + self.at]
            _product(*factors(s), self.room[s.start + to : s.stop + to], self.rules, c=c)
        self.at = to


def _add_rows(to: Tensor, dz: Tensor) -> None:
    """to += the sum of dz's rows, in to's dtype. On the CPU PyTorch's sum makes a wide copy of a
    narrower dz, so it gets a block of rows at a time."""
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
    """Writes dz to out, which may be z itself or a 16-bit tensor. z may hold only a part of the
    `classes` columns, from class `first` on."""
    ops.cross_entropy_bwd.out(grad, z, target, lse, *rules.of_rows, first, classes, out=out)
    return out


def _loss_and_gradient(
    z: Tensor, target: Tensor, rules: Rules, loss: Tensor, lse: Tensor, out: Tensor
) -> Tensor:
    """Writes loss, lse and dz of the sum of losses in one pass. out is as in `_gradient`."""
    ops.cross_entropy_grad.default(z, target, loss, lse, out, *rules.of_rows)
    return out


def _prefers_many_rows(x: Tensor) -> bool:
    """Whether larger blocks of rows are always faster. Not on the CPU, where z should stay near the
    caches."""
    return x.device.type != "cpu"


def _beside(dz: Tensor, at: int, wide: torch.dtype) -> Tensor:
    """Memory for z [n, V] of rows `at` to `at` + n of dz [rows, V], in the last rows of dz. n is as
    large as fits without overlapping these rows."""
    (rows, v), times = dz.shape, wide.itemsize // dz.dtype.itemsize
    n = (
        _whole_tiles((rows - at - 1) // (times + 1))
        if rows - at > times + 1 and v >= _ALIGNED
        else 0
    )
    begin = (rows - n * times) * v // _ALIGNED * _ALIGNED  # the spare row allows this alignment
    return dz.view(-1)[begin : begin + n * times * v].view(wide).view(n, v)


def _rooms(
    dz: Tensor | None, rows: int, step: int, direct: bool, buffer: Callable[[], Tensor], most: int
) -> Iterator[tuple[slice, Tensor]]:
    """Yields (rows, memory for their z), at most `most` rows at a time. The memory is dz itself if
    it has z's dtype (`direct`), later rows of dz, or `buffer` of step rows."""
    at = 0
    while at < rows:
        many = dz is not None and _prefers_many_rows(dz)
        if direct:
            z = dz[at : at + most] if many else dz[at : at + step]
        else:
            found = _beside(dz, at, torch.float32).shape[0] if many else 0
            enough = found > step or found >= most
            z = _beside(dz, at, torch.float32)[:most] if enough else buffer()[: rows - at]
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
    """(loss [M], dx [M, H], kept [rows, V], dbias [V]): gradients of the sum of the rows' losses,
    empty if not needed."""
    loss, lse = (x.new_empty(x.shape[0], dtype=accumulator(x)) for _ in range(2))

    def loss_of(rows: slice, z: Tensor, dz: Tensor | None) -> None:
        if dz is None:
            loss[rows], _ = _loss(z, target[rows], rules)
        else:
            _loss_and_gradient(z, target[rows], rules, loss[rows], lse[rows], dz)

    needs = need_x, need_weight, need_bias
    return loss, *gradients_by_rows(x, weight, bias, rules, *needs, loss_of)


def gradients_by_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rules: Rules,
    need_x: bool,
    need_weight: bool,
    need_bias: bool,
    loss_of: Callable[[slice, Tensor, Tensor | None], None],
    others: int = 0,
    sum_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx [M, H], kept [rows, V], dbias [V]) of a loss over the logits z of x and weight, empty if
    not needed.

    loss_of(rows, z, dz) computes the losses of some rows from their z and writes the gradient of
    their sum to dz, which may be z itself. dz is None if no gradient is needed. `others` says how
    many more tensors like z it allocates; the rows of a call are then fewer by as much.

    sum_dtype: kept is the sum of dweight [V, H] in this dtype, and dz exists for H / 2 rows.
    """
    (m, h), v, wide = x.shape, weight.shape[0], accumulator(x)
    summed = sum_dtype is not None
    whole = need_weight and not summed and kept_rows(x, m) == m
    alone = whole or not (need_x or need_weight)  # z needs no buffer of dz beside it
    step = rows_at_once(x, v, (_MOST_BYTES * 3 // 2 if alone else _MOST_BYTES) // (1 + others))
    dx = x.new_empty((m, h) if need_x else 0)
    dbias = x.new_zeros(v if need_bias else 0, dtype=wide)
    kept = x.new_empty((m, v) if whole else 0)
    # Rows whose dz is multiplied at once. Unless all of dz is kept, a block is about as large as
    # the sum of dweight.
    some = max(1, m)
    block = some if whole else _even(some, max(step, _rows_of_sum(x))) if need_weight else step
    if need_weight and summed:
        block = _even(some, max(1, h // 2))
    total = _Sum(x, v, h, rules, sum_dtype) if need_weight and not whole else None
    needed = need_x or need_weight or need_bias
    # Backward allocates dweight beside kept, so z may have as many bytes without raising the peak.
    # With sum_dtype that is half of it, as much as the other half that dz takes.
    if need_weight and _prefers_many_rows(x):
        parts = (1 + others) * (2 if summed else 1)
        step = max(step, _whole_tiles(h * x.dtype.itemsize // (wide.itemsize * parts)))
    most = step if others else m
    room = kept if whole else x.new_empty(min(block, m), v) if need_x or need_weight else None
    direct = room is not None and x.dtype is wide  # then z is written where dz is wanted
    buffer = cache(lambda: x.new_empty(min(step, m), v, dtype=wide))
    for outer in _steps(m, block):
        xs = x[outer]
        dz = None if room is None else room[: xs.shape[0]]
        for s, z in _rooms(dz, xs.shape[0], step, direct, buffer, most):
            _product(xs[s], weight.mT, z, rules, bias)
            rows = slice(outer.start + s.start, outer.start + s.stop)
            made = None if not needed else z if dz is None else dz[s]
            loss_of(rows, z, made)
            if need_bias:
                _add_rows(dbias, made)
        if need_x:
            _product(dz, weight, dx[outer], rules)
        if total is not None:
            total.add(lambda s, dz=dz, xs=xs: (dz[:, s].mT, xs))
    if total is not None and summed:
        kept = total.value
    elif total is not None:
        kept = total.value.view(-1).view(x.dtype).view(kept_rows(x, m), v)
    return dx, kept, dbias


def scaled(
    factor: Tensor, dx: Tensor, kept: Tensor, dbias: Tensor, x: Tensor, rules: Rules
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias) of `scalar` times factor [], rounded to x's dtype."""
    wide, (m, h) = accumulator(x), x.shape
    if kept.dim() < 2:
        dweight = x.new_empty(0)
    elif kept.shape[0] < m:
        dweight = times(kept.view(-1).view(wide).view(kept.shape[1], h), factor, x.dtype)
    else:
        dweight = x.new_empty(kept.shape[1], h)
        # a gradient scaler may make factor so large that factor * x overflows
        if x.dtype is torch.float16:
            _times_product(kept.mT, x, dweight, factor, rules)
        else:
            _product(kept.mT, times(x, factor, x.dtype), dweight, rules)
    return times(dx, factor, x.dtype), dweight, times(dbias, factor, x.dtype)


def times(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x * factor in factor's dtype, rounded once."""
    if x.dtype is factor.dtype and x.dtype is dtype:
        return x * factor
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.is_cuda and x.dim():  # a factor with a dimension takes part in type promotion
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
    """(grad / factor, factor), where factor is the largest gradient. For float16 only: with a grad
    of 1 / M, dz would underflow. For other dtypes (grad, None)."""
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
    """(dx, dweight, dbias) for gradients [M] of the rows' losses, empty if not needed."""
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
    """Writes dx unless it is None, and dweight and dbias unless they are empty. dx is summed over
    blocks of classes in float32.

    weight has the rows of classes `first` and on, out of `classes`.
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


# ---- each row's loss, with dz kept ---------------------------------------------------------------


def rows_and_gradient(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, rules: Rules
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss [M], lse [M], dz [M, V] of the sum of losses). The gradient of a row is a multiple of
    its dz, so that backward needs no logits. If that is too much memory (`all_rows`), dz has no
    rows."""
    if all_rows(x, x.shape[0]) < x.shape[0]:
        return *rows(x, weight, target, bias, rules), x.new_empty(0, weight.shape[0])
    loss, lse = (x.new_empty(x.shape[0], dtype=accumulator(x)) for _ in range(2))

    def loss_of(some: slice, z: Tensor, dz: Tensor | None) -> None:
        _loss_and_gradient(z, target[some], rules, loss[some], lse[some], dz)

    _, dz, _ = gradients_by_rows(x, weight, bias, rules, False, True, False, loss_of)
    return loss, lse, dz


def kept_rows_backward(
    grad: Tensor,
    dz: Tensor,
    x: Tensor,
    weight: Tensor,
    rules: Rules,
    need_x: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias) for gradients [M] of the rows' losses, empty if not needed."""
    (m, h), v, wide = x.shape, weight.shape[0], accumulator(x)
    dx = x.new_empty((m, h) if need_x else 0)
    dweight = x.new_empty((v, h) if need_weight else 0)
    dbias = x.new_zeros(v if need_bias else 0, dtype=wide)
    column = grad[:, None]
    if need_x:
        _product(dz, weight, dx, rules)
        dx.mul_(column) if dx.dtype is wide else dx.copy_(dx * column)
    if need_weight:
        each, factor = _without_factor(grad, x)
        scaled_x = (x * each[:, None]).to(x.dtype)
        if factor is None:
            _product(dz.mT, scaled_x, dweight, rules)
        else:
            _times_product(dz.mT, scaled_x, dweight, factor, rules)
    if need_bias:
        for s in _steps(m, max(1, _COPY_BYTES // (v * wide.itemsize))):
            dbias += (dz[s] * column[s]).sum(0)
    return dx, dweight, dbias.to(x.dtype)


# ---- some of the classes -------------------------------------------------------------------------


def part_of_rows(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, rules: Rules, first: int
) -> Tensor:
    """[2, M]: lse over these classes, and the target's logit, or 0 if another rank has that class.
    With label smoothing [3, M]: also the sum of the logits, weighted by class_weight.

    weight has the rows of classes `first` and on. class_weight is for all classes. A part without
    classes has lse -inf.
    """
    m, v, wide = x.shape[0], weight.shape[0], accumulator(x)
    found = x.new_zeros((3 if rules.label_smoothing else 2, m), dtype=wide)
    if not v:
        found[0] = -torch.inf
        return found
    step = rows_at_once(x, v, _ALONE_BYTES)
    buffer = x.new_empty(min(step, m), v, dtype=wide)
    none = target.new_zeros(1)  # any class will do: only lse is used
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
    """The products z, scaled and capped as the loss reads them."""
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
    """(these classes' share of dx, not rounded; dweight; dbias), empty if not needed. lse is over
    all `classes`."""
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
