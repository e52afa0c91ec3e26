# SPDX-License-Identifier: BSD-3-Clause
"""The computation of linear_cross_entropy in blocks, so that the logits are never all in memory.

x [M, H], weight [V, H], target [M]. The logits are z = x weight^T + bias, in float32 (float64 for
float64). gemm computes z for some rows at a time, into a buffer that is reused. cross_entropy turns
z into its gradient dz, rounded to x's dtype. Two products then give dx = dz weight and
dweight = dz^T x.

One loss (`scalar`, a mean or a sum), 6 M H V FLOPs:

- `scalar` is the forward. It computes the gradients, too. dz is the gradient of the sum of losses;
  the factor 1 / M is left out, because dz would underflow in float16.
- `scaled` is the backward. It multiplies the gradients by the gradient of the loss and rounds.
- Between the two, `scalar` keeps one buffer `kept` for dweight. It is all of dz if dz has at most
  twice the bytes of a float32 dweight. Otherwise it is a float32 dweight, to which every block of
  rows is added. The choice depends on shapes only.

A loss for each row:

- `rows` and `rows_backward` keep nothing and compute z twice: 8 M H V FLOPs. If dweight is wanted,
  the backward goes by blocks of classes, so that each block completes its rows of dweight.
  Otherwise it goes by blocks of rows.
- `rows_and_gradient` and `kept_rows_backward` keep dz: 6 M H V FLOPs.
- `part_of_rows` and `part_of_backward` serve a rank that has only some classes of weight.

`gradients_by_rows` is the loop of `scalar` for any loss over logits. linear_kl_div.py calls it.
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

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # dtypes of x and weight
_MOST_BYTES = 128 << 20  # of z's buffer
_ALONE_BYTES = 384 << 20  # of z's buffer, if no other buffer of that size is allocated
# On the CPU z's buffer should stay near the caches. But a product of fewer than 256 rows does not
# repay packing weight.
_CPU_BYTES = 64 << 20
_FEWEST_CPU_ROWS = 256
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
    def of_loss(self) -> tuple:
        """The arguments of cross_entropy: all but the precision of the products."""
        return self[:-1]


accumulator = stats_dtype


def _rows_of_sum(x: Tensor) -> int:
    """The number of rows [V] in x's dtype that have the bytes of a float32 dweight [V, H]."""
    return x.shape[-1] * (accumulator(x).itemsize // x.dtype.itemsize)


def kept_rows(x: Tensor, rows):
    """The number of rows of `kept` [., V], which `scalar` keeps for dweight in x's dtype. See the
    head of this file for what it holds.

    `rows` may be a symbol, so this is an expression without a branch. Its first operand is never
    negative: torch.export must see from the range that the value is a size.
    """
    return torch.sym_max(torch.sym_min(rows, _rows_of_sum(x)), all_rows(x, rows))


def all_rows(x: Tensor, rows):
    """`rows` if dz of all rows has at most twice the bytes of a float32 dweight, otherwise 0. This
    is an expression without a branch, too."""
    sums = _rows_of_sum(x)
    too_many = torch.sym_min(torch.sym_max(rows - 2 * sums, 0), 1)
    return torch.sym_min(rows, 2 * sums) - 2 * sums * too_many


def rows_at_once(x: Tensor, classes: int, most: int) -> int:
    """The number of rows of logits [., classes] that fit into `most` bytes, rounded down to a
    multiple of 128 if it is 128 or more. On the CPU the limit is 64 MiB or 256 rows, whichever is
    more."""
    row = max(1, classes) * accumulator(x).itemsize
    step = most // row
    if x.device.type == "cpu":
        step = min(step, max(_CPU_BYTES // row, _FEWEST_CPU_ROWS))
    return _whole_tiles(step)


def _even(size: int, most: int) -> int:
    """Cuts `size` into as few nearly equal steps of at most `most` as there can be. Returns the
    size of a step, rounded up to a multiple of 128."""
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
    """A sum [n, h] of products a @ b, in float32 unless another dtype is given.

    gemm computes a @ b + c, but its result may not overlap c. A second buffer [n, h] would double
    the memory. So the buffer has only `step` rows more than the sum. An addition goes through the
    sum in slices of `step` rows and writes each slice `step` rows further down, or further up in
    the next addition.
    """

    def __init__(
        self, like: Tensor, n: int, h: int, rules: Rules, dtype: torch.dtype | None = None
    ) -> None:
        wide = accumulator(like) if dtype is None else dtype
        self.rules = rules
        self.n = n
        self.step = max(1, min(n, _COPY_BYTES // max(1, h * wide.itemsize)))
        self.buffer = like.new_empty(n + self.step, h, dtype=wide)
        # The row of the buffer where the sum begins: 0 or step, or None before the first addition.
        self.first: int | None = None

    @property
    def value(self) -> Tensor:
        if self.first is None:
            return self.buffer[: self.n].zero_()
        return self.buffer[self.first : self.first + self.n]

    def add(self, factors: Callable[[slice], tuple[Tensor, Tensor]]) -> None:
        """Adds a @ b to the sum, where factors(rows) returns (a, b) for these rows."""
        first = self.step if self.first == 0 else 0
        slices = list(_steps(self.n, self.step))
        # The last slice moves down first, so that no slice overwrites one that is still to be read.
        for s in reversed(slices) if first else slices:
            c = None
            if self.first is not None:
                c = self.buffer[s.start + self.first : s.stop + self.first]
            out = self.buffer[s.start + first : s.stop + first]
            _product(*factors(s), out, self.rules, c=c)
        self.first = first


def _add_rows(to: Tensor, dz: Tensor) -> None:
    """Adds the sum of dz's rows to `to`, in to's dtype. On the CPU PyTorch's sum first copies a
    16-bit dz to float32, so it gets a block of rows at a time."""
    copied = dz.device.type == "cpu" and dz.dtype is not to.dtype
    step = max(1, _CPU_COPY_BYTES // (dz.shape[1] * to.itemsize)) if copied else max(1, dz.shape[0])
    for s in _steps(dz.shape[0], step):
        to += dz[s].sum(0, dtype=to.dtype)


def _loss(z: Tensor, target: Tensor, rules: Rules) -> tuple[Tensor, Tensor]:
    return ops.cross_entropy.default(z, target, *rules.of_loss)


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
    ops.cross_entropy_bwd.out(grad, z, target, lse, *rules.of_loss, first, classes, out=out)
    return out


def _loss_and_gradient(
    z: Tensor, target: Tensor, rules: Rules, loss: Tensor, lse: Tensor, out: Tensor
) -> Tensor:
    """Writes the losses, lse, and dz of the sum of losses in one pass. dz goes to `out`, as in
    `_gradient`."""
    ops.cross_entropy_grad.default(z, target, loss, lse, out, *rules.of_loss)
    return out


def _prefers_many_rows(x: Tensor) -> bool:
    """Whether larger blocks of rows are always faster, because they read weight less often. Not on
    the CPU, where z should stay near the caches."""
    return x.device.type != "cpu"


def _z_behind(dz: Tensor, at: int, wide: torch.dtype) -> Tensor:
    """Memory for z of rows `at` to `at` + n, in the last rows of dz [rows, V].

    dz of the first `at` rows is there already, and z overlaps neither these rows nor the n rows
    whose dz it becomes. n is as large as that allows.
    """
    rows, v = dz.shape
    times = wide.itemsize // dz.dtype.itemsize  # a row of z takes this many rows of dz
    n = 0
    if rows - at > times + 1 and v >= _ALIGNED:
        n = _whole_tiles((rows - at - 1) // (times + 1))  # one row is spared for the alignment
    begin = (rows - n * times) * v // _ALIGNED * _ALIGNED
    return dz.view(-1)[begin : begin + n * times * v].view(wide).view(n, v)


class _Blocks(NamedTuple):
    """How `gradients_by_rows` cuts the M rows. It takes a block of rows at a time, for which it
    computes dz and then multiplies dz by weight and by x. A block is cut into chunks, for which it
    computes z."""

    keeps_dz: bool  # dz of all rows is kept: there is one block
    rows: int  # of a block
    z_rows: int  # rows of the buffer of z
    most_z_rows: int  # of a chunk, wherever its z is stored
    z_is_dz: bool  # both have the same dtype, and z is overwritten by dz


def _blocks(
    x: Tensor,
    classes: int,
    need_x: bool,
    need_weight: bool,
    others: int,
    sum_dtype: torch.dtype | None,
) -> _Blocks:
    (m, h), wide = x.shape, accumulator(x)
    keeps_dz = need_weight and sum_dtype is None and kept_rows(x, m) == m
    z_is_alone = keeps_dz or not (need_x or need_weight)  # no buffer of a block's dz beside it
    most = _MOST_BYTES * 3 // 2 if z_is_alone else _MOST_BYTES
    z_rows = rows_at_once(x, classes, most // (1 + others))
    if keeps_dz:
        rows = max(1, m)
    elif need_weight and sum_dtype is not None:
        rows = _even(max(1, m), max(1, h // 2))
    elif need_weight:  # a block's dz has about the bytes of the sum of dweight
        rows = _even(max(1, m), max(z_rows, _rows_of_sum(x)))
    else:
        rows = z_rows
    # The backward allocates dweight beside `kept`. So z may have as many bytes here without raising
    # the peak of memory. With sum_dtype z may have half of that, because dz takes the other half.
    if need_weight and _prefers_many_rows(x):
        parts = (1 + others) * (1 if sum_dtype is None else 2)
        z_rows = max(z_rows, _whole_tiles(h * x.dtype.itemsize // (wide.itemsize * parts)))
    has_dz = need_x or need_weight
    return _Blocks(keeps_dz, rows, z_rows, z_rows if others else m, has_dz and x.dtype is wide)


def _z_chunks(
    dz: Tensor | None, rows: int, blocks: _Blocks, z_buffer: Callable[[], Tensor], many: bool
) -> Iterator[tuple[slice, Tensor]]:
    """Cuts a block of `rows` rows into chunks, and yields (rows of a chunk, memory for their z).

    dz is the block's gradient, or None if it has no buffer. `many` is `_prefers_many_rows`. The
    memory is one of three:

    - the chunk's own rows of dz, if z and dz have the same dtype;
    - later rows of dz, if `many` and they hold a larger chunk than `z_buffer`;
    - `z_buffer()`, which the first chunk that needs it allocates.
    """
    at = 0
    while at < rows:
        z = None
        if dz is not None and blocks.z_is_dz:
            z = dz[at : at + (blocks.most_z_rows if many else blocks.z_rows)]
        elif dz is not None and many:
            behind = _z_behind(dz, at, torch.float32)
            if behind.shape[0] > blocks.z_rows or behind.shape[0] >= blocks.most_z_rows:
                z = behind[: blocks.most_z_rows]
        if z is None:
            z = z_buffer()[: rows - at]
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
    """(loss [M], dx [M, H], kept [rows, V], dbias [V]). The gradients are of the sum of the rows'
    losses. A gradient that is not needed is empty."""
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
    """(dx [M, H], kept [rows, V], dbias [V]) of a loss over the logits z of x and weight. A result
    that is not needed is empty.

    Args:
        loss_of: ``loss_of(rows, z, dz)`` computes the losses of some rows from their z, and writes
            the gradient of their sum to dz, which may be z itself. dz is None if no gradient is
            needed.
        others: how many tensors of z's size loss_of allocates. The chunks of rows become smaller by
            as much.
        sum_dtype: the dtype in which dweight is summed. If it is given, `kept` is this sum [V, H],
            and a block has H / 2 rows.
    """
    (m, h), v, wide = x.shape, weight.shape[0], accumulator(x)
    blocks = _blocks(x, v, need_x, need_weight, others, sum_dtype)
    dx = x.new_empty((m, h) if need_x else 0)
    dbias = x.new_zeros(v if need_bias else 0, dtype=wide)
    kept = x.new_empty((m, v) if blocks.keeps_dz else 0)
    dweight = None
    if need_weight and not blocks.keeps_dz:
        dweight = _Sum(x, v, h, rules, sum_dtype)
    dz_buffer = None
    if blocks.keeps_dz:
        dz_buffer = kept
    elif need_x or need_weight:
        dz_buffer = x.new_empty(min(blocks.rows, m), v)
    z_buffer = cache(lambda: x.new_empty(min(blocks.z_rows, m), v, dtype=wide))
    for block in _steps(m, blocks.rows):
        block_x = x[block]
        dz = None if dz_buffer is None else dz_buffer[: block_x.shape[0]]
        chunks = _z_chunks(dz, block_x.shape[0], blocks, z_buffer, _prefers_many_rows(x))
        for chunk, z in chunks:
            _product(block_x[chunk], weight.mT, z, rules, bias)
            rows = slice(block.start + chunk.start, block.start + chunk.stop)
            if dz is not None:
                chunk_dz = dz[chunk]
            else:  # only dbias needs dz, which overwrites z
                chunk_dz = z if need_bias else None
            loss_of(rows, z, chunk_dz)
            if need_bias:
                _add_rows(dbias, chunk_dz)
        if need_x:
            _product(dz, weight, dx[block], rules)
        if dweight is not None:
            dweight.add(lambda rows, dz=dz, block_x=block_x: (dz[:, rows].mT, block_x))
    if dweight is not None:
        kept = dweight.value
        if sum_dtype is None:  # the op's result has x's dtype, so the float32 sum is viewed as such
            kept = kept.view(-1).view(x.dtype).view(kept_rows(x, m), v)
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
    shape = min(step, out.shape[0]), out.shape[1]
    buffer = torch.empty(shape, dtype=factor.dtype, device=out.device)
    for s in _steps(out.shape[0], step):
        wide = buffer[: s.stop - s.start]
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
    """(grad / factor, factor) for float16, where factor is the largest gradient: dz of a grad of
    1 / M would underflow. For other dtypes (grad, None)."""
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

    If a rank has only some classes, its weight [v, H] has classes `first` to `first` + v of
    `classes`.
    """
    (m, h), v, wide = x.shape, weight.shape[0], accumulator(x)
    classes = v if classes is None else classes
    total = None if dx is None else _Sum(x, m, h, rules)
    most = _MOST_BYTES * 2 if _prefers_many_rows(x) else _MOST_BYTES
    step = _whole_tiles(most // (max(1, m) * wide.itemsize))
    buffer = x.new_empty(m * min(step, v), dtype=wide)
    narrow = buffer if x.dtype is wide else x.new_empty(buffer.shape)
    for s in _steps(v, step):
        size = m, s.stop - s.start
        z = buffer[: math.prod(size)].view(size)
        _product(x, weight[s].mT, z, rules, None if bias is None else bias[s])
        dz = _gradient(
            z, grad, target, lse, rules, narrow[: z.numel()].view(size), first + s.start, classes
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
    its dz, so the backward needs no logits. If dz takes too much memory (`all_rows`), it has no
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
    """[2, M]: lse over this rank's classes, and the target's logit, or 0 if another rank has that
    class. With label smoothing [3, M]: also the sum of the logits, weighted by class_weight.

    weight [v, H] has classes `first` to `first` + v. class_weight is for all classes. The lse of a
    rank without classes is -inf.
    """
    m, v, wide = x.shape[0], weight.shape[0], accumulator(x)
    found = x.new_zeros((3 if rules.label_smoothing else 2, m), dtype=wide)
    if not v:
        found[0] = -torch.inf
        return found
    step = rows_at_once(x, v, _ALONE_BYTES)
    buffer = x.new_empty(min(step, m), v, dtype=wide)
    any_class = target.new_zeros(1)  # only lse is used
    weights = None if rules.class_weight is None else rules.class_weight[first : first + v]
    for s in _steps(m, step):
        z = _product(x[s], weight.mT, buffer[: s.stop - s.start], rules, bias)
        alone = rules._replace(class_weight=None, label_smoothing=0.0, ignore_index=-1)
        _, found[0, s] = _loss(z, any_class.expand(z.shape[0]).contiguous(), alone)
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
    """(this rank's part of dx, not rounded; dweight; dbias). A gradient that is not needed is
    empty. lse is over all `classes`."""
    (m, h), v, wide = x.shape, weight.shape[0], accumulator(x)
    grad, factor = _without_factor(grad, x)
    part = x.new_zeros((m, h) if need_x else 0, dtype=wide)
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
        part if need_x else None,
        dweight,
        dbias,
        factor,
        first,
        classes,
    )
    return part, dweight, (dbias if factor is None else dbias * factor).to(x.dtype)
