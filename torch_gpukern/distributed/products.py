# SPDX-License-Identifier: BSD-3-Clause
"""Matrix products whose operands are cut over ranks: tensor and sequence parallelism.

Tensor parallelism: Shoeybi et al., "Megatron-LM" (2019), arXiv:1909.08053. Sequence parallelism,
which gathers rows before a product and scatters them after: Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models" (2022), arXiv:2205.05198.

Each public function is an op of its own with a kernel (`_*_fwd`), a fake function for the compiler
and a backward. The other ops of this file are the products and transfers that backward needs.
"""

import torch
from torch import Tensor

from .._library import ops
from ..ops.linear_cross_entropy_chunks import accumulator
from . import transport
from .alike import alike
from .ranks import Group, Ranks, agree, checked, process_group, ranks_of, size_of
from .sequence import Cut, cut_of
from .symmetric import define_op_of_ranks

__all__ = ["all_gather_gemm", "gemm_all_reduce", "gemm_reduce_scatter"]


class _Rows(Cut):
    """A cut of rows of which each rank may hold any number, in rank order."""

    def __init__(self, rows: list[int]):
        ends = [sum(rows[: i + 1]) for i in range(len(rows))]
        self.spans = [[(end - n, end)] for n, end in zip(rows, ends, strict=True)]
        self.length, self.size, self.layout, self._segments = ends[-1], len(rows), "contiguous", {}


def _numbers_of_all(mine: list[int], like: Tensor, ranks: Ranks) -> list[list[int]]:
    """Every rank's numbers. If ranks do not compare their calls (`checked`), all are assumed to
    have this rank's numbers."""
    if not checked(like.device):
        return [mine] * ranks.size
    sent = torch.tensor(mine, dtype=torch.int64, device=like.device)
    return torch.stack(transport.all_of(sent, ranks)).tolist()


def _cut_evenly(rows: int, size: int) -> Cut:
    return cut_of(rows, size, "contiguous")


def _describe(what: str, a: Tensor, b: Tensor, *, rows: bool, columns: bool, **more) -> dict:
    """Checks a [M, K] and b [K, N] and returns what must be equal on all ranks. rows, columns:
    whether the rows of a, and the columns of b, must be equal."""
    for name, x in (("a", a), ("b", b)):
        if x.dim() != 2:
            raise ValueError(f"{what}: {name} must have 2 dimensions, got {x.dim()}")
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"{what}: b has {b.shape[0]} rows, a has {a.shape[1]} columns; they must match"
        )
    if a.dtype != b.dtype:
        raise ValueError(f"{what}: b has dtype {b.dtype}, a has {a.dtype}; they must match")
    same = {"dtype": a.dtype}
    if rows:
        same["rows of a"] = a.shape[0]
    if columns:
        same["columns of b"] = b.shape[1]
    return same | more


def _refuse_as_gemm(
    what: str, a: Tensor, b: Tensor, bias: Tensor | None = None, activation: str = "none"
) -> None:
    """Raises what `gemm` would, before anything is sent. It runs a call without rows and columns,
    once for each combination of devices, layouts, dtypes and activation."""
    kind = (a.device, a.layout, a.dtype, b.device, b.layout, b.dtype, activation)
    kind += () if bias is None else (bias.device, bias.layout, bias.dtype, bias.dim())
    if kind in _not_refused:
        return
    try:
        ops.gemm(a[:0], b[:, :0], None if bias is None else bias[:0], activation=activation)
    except ValueError as error:
        raise ValueError(f"{what}: {str(error).partition(': ')[2] or error}") from None
    _not_refused.add(kind)


_not_refused: set[tuple] = set()


def _agree_about_sum(ranks: Ranks, what: str, a: Tensor, b: Tensor) -> list[int]:
    """Checks that all ranks' products have the same shape and dtype. Returns each rank's `_inner`
    number."""

    def describe() -> dict:
        same = _describe(what, a, b, rows=True, columns=True)
        _refuse_as_gemm(what, a, b)
        return same

    return agree(ranks, what, a.device, describe, _inner(b) if b.dim() == 2 else 0)


def _inner(b: Tensor) -> int:
    """b [k, N] as one number for the other ranks: 2 k, and 1 more if its columns are
    contiguous."""
    return 2 * b.shape[0] + (b.stride(0) == 1 != b.stride(1))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in the accumulator's dtype: float32 (float64)."""
    return ops.gemm(a, b, out_dtype=accumulator(a))


# ---- all_gather_gemm -----------------------------------------------------------------------------


def all_gather_gemm(
    a: Tensor,
    b: Tensor,
    group: Group = None,
    *,
    bias: Tensor | None = None,
    activation: str = "none",
    return_gathered: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """``activation(gathered a @ b + bias)``: Megatron's column-parallel product, over rows that are
    cut over the ranks.

    Args:
        a: [M of this rank, K] float32, bfloat16, float16 or float64. M may differ by rank, but not
            in compiled code.
        b: [K, N of this rank], a's dtype, any strides: this rank's columns of the weight.
        group: a `ProcessGroup`, a `DeviceMesh` of one dimension, or None for all ranks.
        bias: [N of this rank], a's dtype.
        activation: none, relu, gelu, gelu_tanh or silu.
        return_gathered: return ``(out, gathered)``.

    Returns:
        out [M of all ranks, N of this rank] in a's dtype; with return_gathered also all ranks' a,
        in rank order.

    Gradients: a (the ranks' shares summed in float32 in rank order, rounded once), b and bias. They
    can be differentiated again, except for a through both results. Several calls may be in flight.
    Autocast casts a, b and bias.

    Raises:
        ValueError: shapes or dtypes that do not match, or ranks that pass different arguments;
            raised on every rank.
    """
    keep = return_gathered or (b.requires_grad and torch.is_grad_enabled())  # for b's gradient
    out, gathered, _ = ops.all_gather_gemm_fwd(
        a, b, bias, activation, keep, process_group(group).group_name
    )
    return (out, gathered) if return_gathered else out


def _gather_fwd(a, b, bias, activation, keep, group):
    ranks = ranks_of(group)
    what = "all_gather_gemm"

    def describe() -> dict:
        same = _describe(what, a, b, rows=False, columns=False)
        if bias is not None and tuple(bias.shape) != (b.shape[1],):
            raise ValueError(f"{what}: bias must have shape [{b.shape[1]}], got {list(bias.shape)}")
        _refuse_as_gemm(what, a, b, bias, activation)
        return same | {
            "columns of a": a.shape[1],
            "bias given": bias is not None,
            "activation": activation,
        }

    cut = _Rows(agree(ranks, what, a.device, describe, a.shape[0] if a.dim() else 0))
    return _gathered_product(a, b, bias, activation, keep, cut, ranks)


def _gathered_product(a, b, bias, activation, keep, cut, ranks):
    """(out, gathered, preact) of the product of all ranks' rows. Results that are not wanted are
    empty. A large product starts with this rank's rows while the others' arrive."""
    overlaps = activation in ("none", "relu") and _overlaps(
        cut.length // ranks.size, a.shape[1], a, ranks
    )
    moving = transport.Gather(cut, ranks, a, own=keep or not overlaps)
    if not overlaps:
        moving.done()
        out, preact = ops.gemm_fwd(moving.whole[0], b, bias, activation=activation)
        return out, moving.whole[0] if keep else a.new_empty((0, a.shape[1])), preact
    out = a.new_empty((cut.length, b.shape[1]))
    ((start, end),) = cut.spans[ranks.rank]
    if not moving.by_copies:  # the other ranks' rows all arrive together
        _into(out[start:end], a, b, bias, activation=activation)
        moving.done()
        (gathered,) = moving.whole
        for rows in (slice(0, start), slice(end, cut.length)):
            if rows.start < rows.stop:
                _into(out[rows], gathered[rows], b, bias, activation=activation)
    else:
        (gathered,) = moving.whole
        for low, high, steps in _as_they_arrive(
            cut, ranks.rank, b.shape[1], a.shape[1], a.element_size()
        ):
            moving.wait_for(steps)
            own = start <= low and high <= end
            rows = a[low - start : high - start] if own else gathered[low:high]
            _into(out[low:high], rows, b, bias, activation=activation)
        moving.done()
    return out, gathered if keep else a.new_empty((0, a.shape[1])), a.new_empty(0)


def _as_they_arrive(
    cut: Cut, rank: int, columns: int, k: int, itemsize: int
) -> list[tuple[int, int, int]]:
    """Cuts a product of gathered rows into products of blocks of rows, so that it overlaps with
    the gathering. Returns (first row, last row + 1, steps) of each block. A block may run once the
    rows of the `steps` ranks before this one have arrived.

    Ranks' rows arrive in descending order: from the rank before this one down to rank 0, then from
    the last rank down. The first block is this rank's own rows. Each later block has the
    consecutive rows that, by a model of the speeds, have arrived when the previous product ends,
    and at least one wave of tiles. Two ranks have two blocks. With four and more ranks the transfer
    may take longer than the product of a rank's own rows: waiting for all rows would leave the GPU
    idle.
    """
    size, spans = cut.size, [span for (span,) in cut.spans]
    wave_us = 2 * _SMS * _TILE_ROWS * _TILE_COLUMNS * k / _FLOPS_A_US

    def waves(low: int, high: int) -> float:
        return -(-(high - low) // _TILE_ROWS) * -(-columns // _TILE_COLUMNS) / _SMS

    arrives = [0.0]
    for step in range(1, size):
        start, end = spans[(rank - step) % size]
        arrives.append(arrives[-1] + (end - start) * k * itemsize / _BYTES_A_US)
    found, now = [], 0.0
    for first, last in ((0, 0), (1, rank), (rank + 1, size - 1)):  # steps of consecutive rows
        step = first
        while step <= last:
            high, now = spans[(rank - step) % size][1], max(now, arrives[step])
            low = spans[(rank - step) % size][0]
            while step < last and (arrives[step + 1] <= now or waves(low, high) < 1):
                step += 1
                now, low = max(now, arrives[step]), spans[(rank - step) % size][0]
            if low < high:
                found.append((low, high, step))
                now += (max(1, waves(low, high)) + _LAST_WAVE) * wave_us
            step += 1
    return found


# The model that chooses where products are cut: FLOPs and bytes a microsecond of an H200 and its
# links, and the fraction of a wave that the end of a product costs. Measured on an H200, K = 8192
# and 2560 columns: 1664, 2048, 3328, 4096 and 8192 rows take 94, 140, 180, 230 and 471 us. The
# model says 116, 138, 215, 261 and 506 us.
_FLOPS_A_US, _BYTES_A_US, _LAST_WAVE = 700e6, 366e3, 0.15


# A product is cut to overlap with its transfer only if at least this many bytes are transferred:
# otherwise two smaller products take longer than the transfer.
_OVERLAP_BYTES = 2 << 20


def _overlaps(rows: int, columns: int, like: Tensor, ranks: Ranks) -> bool:
    return rows * columns * like.element_size() * (ranks.size - 1) >= _OVERLAP_BYTES


def _into(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    c: Tensor | None = None,
    **more: str,
) -> None:
    ops.gemm.out(a, b, bias, c, out_dtype=out.dtype, out=out, **more)


def _gather_fake(a, b, bias, activation, keep, group):
    rows = a.shape[0] * size_of(group)
    out = a.new_empty((rows, b.shape[1]))
    return (
        out,
        a.new_empty((rows if keep else 0, a.shape[1])),
        a.new_empty(0 if activation in ("none", "relu") else out.shape),
    )


def _gather_save(needs, args, out, gathered, preact):
    a, b, _, activation = args[:4]
    saved = out if activation == "relu" else preact
    return (b, gathered, saved), {"rows": a.shape[0]}


def _gather_backward(
    needs, b, gathered, saved, activation, group, rows, grad_out, grad_gathered, grad_preact, **_
):
    """grad_preact: the gradient of the value before the activation, from a second derivative."""
    grads = {}
    if grad_out is not None and activation != "none":
        grad_out = ops.gemm_act_bwd(grad_out, saved, activation)
    if grad_preact is not None:
        grad_out = grad_preact if grad_out is None else grad_out + grad_preact
    if grad_out is not None:
        if "b" in needs:
            grads["b"] = ops.gemm(gathered.t(), grad_out)
        if "bias" in needs:
            grads["bias"] = grad_out.sum(0, dtype=accumulator(b)).to(b.dtype)
    if "a" in needs:
        if grad_gathered is None and grad_out is not None:
            grads["a"] = ops.product_to_owners(grad_out, b.t(), rows, group)
        elif grad_gathered is not None:
            share = grad_gathered.to(accumulator(b))
            if grad_out is not None:
                share = share + _product(grad_out, b.t())
            grads["a"] = ops.rows_to_owners(share, b, rows, group)
    return grads


def _to_owners(x, b, rows, group):
    ranks = ranks_of(group)
    cut = _Rows([n for (n,) in _numbers_of_all([rows], x, ranks)])
    return transport.sum_to_owners(x, cut, ranks, b.dtype)


def _product_to_owners(a, b, rows, group):
    ranks = ranks_of(group)
    numbers = _numbers_of_all([rows, _inner(b)], a, ranks)
    return _scattered_product(
        a, b, _Rows([n for n, _ in numbers]), [inner for _, inner in numbers], ranks
    )


def _operands(needs, args, *results):
    """Saves a and b for backward."""
    return args[:2], {}


def _product_to_owners_backward(needs, a, b, group, grad_out, **_):
    grad_a, whole, _ = ops.all_gather_gemm_fwd(grad_out, b.t(), None, "none", "b" in needs, group)
    return {"a": grad_a, "b": ops.gemm(a.t(), whole) if "b" in needs else None}


def _product_to_owners_fake(a, b, rows, group):
    return a.new_empty((rows, b.shape[1]))


def _to_owners_fake(x, b, rows, group):
    return b.new_empty((rows, x.shape[1]))


_all_gather_gemm = define_op_of_ranks(
    "all_gather_gemm_fwd",
    kernel=_gather_fwd,
    symbolic=_gather_fake,
    save=_gather_save,
    saved=("b", "gathered", "saved"),
    backward=_gather_backward,
    autocast=("a", "b", "bias"),
)
_all_gather_gemm.said = "all_gather_gemm"
define_op_of_ranks(
    "rows_to_owners",
    kernel=_to_owners,
    symbolic=_to_owners_fake,
    refuse="rows_to_owners: it has no backward",
)
define_op_of_ranks(
    "product_to_owners",
    kernel=_product_to_owners,
    symbolic=_product_to_owners_fake,
    save=_operands,
    saved=("a", "b"),
    backward=_product_to_owners_backward,
)


# ---- gemm_reduce_scatter -------------------------------------------------------------------------


def gemm_reduce_scatter(a: Tensor, b: Tensor, group: Group = None) -> Tensor:
    """This rank's rows of the sum over ranks of ``a @ b``: Megatron's row-parallel product with its
    rows scattered.

    Args:
        a: [M, K of this rank] float32, bfloat16, float16 or float64.
        b: [K of this rank, N], a's dtype, any strides: this rank's rows of the weight.
        group: a `ProcessGroup`, a `DeviceMesh` of one dimension, or None for all ranks.

    Returns:
        [M of this rank, N] in a's dtype: rank r has chunk r of `torch.tensor_split` over M rows,
        for any M. The ranks' products are summed in float32 in rank order and rounded once.

    Gradients: a and b. A second backward raises NotImplementedError. Several calls may be in
    flight. Autocast casts both.

    Raises:
        ValueError: shapes or dtypes that do not match, or ranks that pass different arguments;
            raised on every rank.
    """
    return ops.gemm_reduce_scatter(a, b, process_group(group).group_name)


def _scatter_fwd(a, b, group):
    ranks = ranks_of(group)
    inner = _agree_about_sum(ranks, "gemm_reduce_scatter", a, b)
    return _scattered_product(a, b, _cut_evenly(a.shape[0], ranks.size), inner, ranks)


def _scattered_product(a: Tensor, b: Tensor, cut: Cut, inner: list[int], ranks: Ranks) -> Tensor:
    """This rank's rows of the sum over ranks of a @ b, in a fixed order, rounded once.

    A small product's sums are sent to their owners. Large ones overlap with a transfer in one of
    two ways. The owners of rows fetch the operands if these have fewer bytes than the float32 sums:
    from one rank after the other (`_product_by_rank`), or, from three ranks on and if b's rows are
    contiguous, all ranks' together (`_product_by_columns`). Otherwise the sums are sent in parts
    (`_product_in_parts`).

    inner: each rank's `_inner` number.
    """
    if not _overlaps(cut.length, b.shape[1], a, ranks):
        return transport.sum_to_owners(_product(a, b), cut, ranks, a.dtype)
    operands = [(number // 2, number % 2 == 1) for number in inner]
    if _fetches(cut, b.shape[1], a, operands):
        by_rank = ranks.size == 2 or any(column_major for _, column_major in operands)
        inner = [k for k, _ in operands]
        room = (
            transport.sizes_by_rank(cut.length, b.shape[1], a, operands)
            if by_rank
            else transport.sizes_by_columns(cut.length, b.shape[1], a, inner)
        )
        pool = transport.pool_for(a.device, ranks, sum(room))
        if pool is not None and by_rank:
            return _product_by_rank(a, b, cut, operands, pool, ranks)
        if pool is not None:
            return _product_by_columns(a, b, cut, inner, pool, ranks)
    return _product_in_parts(a, b, cut, ranks)


def _fetches(cut: Cut, columns: int, like: Tensor, operands: list[tuple[int, bool]]) -> bool:
    """Whether the operands that a rank would fetch have fewer bytes than the sums that it would be
    sent. All ranks get the same answer."""
    k = sum(each for each, _ in operands)
    fetched = k * (cut.most + columns) * like.element_size()
    return fetched < cut.length * columns * accumulator(like).itemsize


def _product_by_rank(a: Tensor, b: Tensor, cut: Cut, operands, pool, ranks: Ranks) -> Tensor:
    """Each rank computes its own rows of the sum. It begins with the product over its own k. Then
    it adds the products over the other ranks' k as their operands arrive, beginning with the rank
    before it."""
    ((first, last),) = cut.spans[ranks.rank]
    others = transport.OperandsByRank(pool, ranks, a, b, cut, operands)
    total = _product(a[first:last], b)
    for step, (rows, matrix) in enumerate(others, 1):
        dtype = a.dtype if step == ranks.size - 1 else total.dtype
        out = torch.empty_like(total, dtype=dtype)
        _into(out, rows, matrix, c=total)
        total = out
    return total


def _product_by_columns(a: Tensor, b: Tensor, cut: Cut, inner, pool, ranks: Ranks) -> Tensor:
    """Each rank computes its own rows of the sum, a block of columns at a time. A block is one
    product over the whole inner dimension, so it has the bits of a product on one rank, and no
    float32 sums are stored. With two ranks `_product_by_rank` is as fast, because its first product
    does not wait for operands."""
    ((first, last),) = cut.spans[ranks.rank]
    width = _columns_at_once(cut.most, b.shape[1])
    out = a.new_empty((last - first, b.shape[1]))
    for at, rows, matrix in transport.OperandsByColumns(pool, ranks, a, b, cut, inner, width):
        out[:, at : at + matrix.shape[1]] = ops.gemm(rows, matrix)
    return out


def _columns_at_once(rows: int, columns: int) -> int:
    """The width of a block of columns: its tiles fill whole waves, and there are at most eight
    blocks."""
    wide = max(1, _SMS // max(1, -(-rows // _TILE_ROWS)))  # tiles that one wave has across
    waves = -(-columns // (wide * _TILE_COLUMNS))
    return -(-waves // 8) * wide * _TILE_COLUMNS


def _product_in_parts(a: Tensor, b: Tensor, cut: Cut, ranks: Ranks) -> Tensor:
    """Each rank computes all rows over its own k. It sends the float32 results to the owners of the
    rows in parts, so that the transfer of one part overlaps with the computation of the next.
    Owners add them in rank order."""
    # The other ranks' rows first: each is sent while the next is computed. This rank's rows last.
    moving = transport.ToOwners(cut, ranks, a.new_empty((0, b.shape[1]), dtype=accumulator(a)))
    ((first, last),) = cut.spans[ranks.rank]
    mine = a[first:last]
    if not moving.by_copies:
        for step in range(1, ranks.size):
            ((start, end),) = cut.spans[(ranks.rank + step) % ranks.size]
            moving.send(step, [_product(a[start:end], b)])
        return moving.add(_product(mine, b), dtype=a.dtype)[0]
    count = _how_many(cut.most, b.shape[1])
    for step in range(1, ranks.size):
        ((start, end),) = cut.spans[(ranks.rank + step) % ranks.size]
        for at, to in _parts(end - start, cut.most, count):
            moving.copy_rows(step, at, _product(a[start + at : start + to], b))
    out = a.new_empty((last - first, b.shape[1]))
    if ranks.size == 2:  # a + b = b + a, so the last products may add what arrived
        for i, (at, to) in enumerate(_parts(last - first, cut.most, count)):
            came = moving.arrived(i + 1)[1 - ranks.rank]
            if at < to:
                _into(out[at:to], mine[at:to], b, c=came[at:to])
    else:
        own = _product(mine, b)
        came = moving.arrived()
        came[ranks.rank] = own
        transport.rounded_sum(came, a.dtype, out)
    moving.done()
    return out


def _parts(rows: int, most: int, count: int) -> list[tuple[int, int]]:
    """[0, rows) cut into parts of whole tiles. Every rank gets the same number of parts: they are
    computed from `most`, the rows of the rank that has the most, and later parts may be empty."""
    each = max(1, -(-most // (count * _TILE_ROWS))) * _TILE_ROWS
    return [(min(rows, at), min(rows, at + each)) for at in range(0, most, each)]


def _how_many(rows: int, columns: int) -> int:
    """The number of parts into which a rank's rows are cut: of 2, 3 and 4 the one whose products
    take the fewest waves, on a tie the largest."""

    def waves(count: int) -> int:
        tiles = (
            -(-(to - at) // _TILE_ROWS) * -(-columns // _TILE_COLUMNS)
            for at, to in _parts(rows, rows, count)
        )
        return sum(-(-n // _SMS) for n in tiles)

    return min((4, 3, 2), key=waves)


# Hopper's SMs and tile, used only to choose the number of parts. Measured on two H200 with M 8192,
# us with 2, 3 and 4 parts: (8192, 10240) 1239, 1415, 1329; (4096, 6144) 511, 477, 542; (8192,
# 57344) 7210, 6944, 7066. The number with the fewest waves was fastest each time.
_SMS, _TILE_COLUMNS = 132, 256
_TILE_ROWS = 128


def _scatter_fake(a, b, group):
    ranks = ranks_of(group)
    # the rows of torch.tensor_split, in a form that also works for symbolic sizes
    rows = (a.shape[0] + ranks.size - 1 - ranks.rank) // ranks.size
    return a.new_empty((rows, b.shape[1]))


def _scatter_backward(needs, a, b, group, grad_out, **_):
    grads = {}
    if "a" in needs:
        grads["a"], whole = ops.gathered_product(grad_out, b.t(), a.shape[0], group)
    else:
        whole = ops.gather_rows(grad_out, a.shape[0], group)
    if "b" in needs:
        grads["b"] = ops.gemm(a.t(), whole)
    return grads


def _rows_product(x, b, rows, group):
    ranks = ranks_of(group)
    return _gathered_product(x, b, None, "none", True, _cut_evenly(rows, ranks.size), ranks)[:2]


def _rows_product_fake(x, b, rows, group):
    return x.new_empty((rows, b.shape[1])), x.new_empty((rows, x.shape[1]))


def _gather_rows(x, rows, group):
    ranks = ranks_of(group)
    return transport.gather_tokens(x, _cut_evenly(rows, ranks.size), ranks)


def _gather_rows_fake(x, rows, group):
    return x.new_empty((rows, x.shape[1]))


define_op_of_ranks(
    "gemm_reduce_scatter",
    kernel=_scatter_fwd,
    symbolic=_scatter_fake,
    save=_operands,
    saved=("a", "b"),
    backward=_scatter_backward,
    autocast=("a", "b"),
)
define_op_of_ranks(
    "gather_rows",
    kernel=_gather_rows,
    symbolic=_gather_rows_fake,
    refuse="gather_rows: it has no backward",
)
define_op_of_ranks(
    "gathered_product",
    kernel=_rows_product,
    symbolic=_rows_product_fake,
    refuse="gathered_product: it has no backward",
)


# ---- gemm_all_reduce -----------------------------------------------------------------------------


def gemm_all_reduce(a: Tensor, b: Tensor, group: Group = None) -> Tensor:
    """The sum over ranks of ``a @ b`` on every rank: Megatron's row-parallel product.

    Args:
        a: [M, K of this rank] float32, bfloat16, float16 or float64.
        b: [K of this rank, N], a's dtype, any strides.
        group: a `ProcessGroup`, a `DeviceMesh` of one dimension, or None for all ranks.

    Returns:
        [M, N] in a's dtype, the same bits on every rank: summed in float32 in rank order, rounded
        once.

    Gradients: a and b. The result is the same on every rank, so its gradient must be the same, too.
    Each rank uses its own gradient and nothing is summed (Megatron's convention). Gradients can be
    differentiated again. Several calls may be in flight. Autocast casts both.

    Raises:
        ValueError: shapes or dtypes that do not match, or ranks that pass different arguments;
            raised on every rank.
    """
    return ops.gemm_all_reduce(a, b, process_group(group).group_name)


def _reduce_fwd(a, b, group):
    ranks = ranks_of(group)
    _agree_about_sum(ranks, "gemm_all_reduce", a, b)
    return transport.reduced(_product(a, b), _cut_evenly(a.shape[0], ranks.size), ranks, a.dtype)


def _reduce_fake(a, b, group):
    return a.new_empty((a.shape[0], b.shape[1]))


def _reduce_backward(needs, a, b, group, grad_out, **_):
    grad = alike(grad_out, group)
    return {
        "a": ops.gemm(grad, b.t()) if "a" in needs else None,
        "b": ops.gemm(a.t(), grad) if "b" in needs else None,
    }


define_op_of_ranks(
    "gemm_all_reduce",
    kernel=_reduce_fwd,
    symbolic=_reduce_fake,
    save=_operands,
    saved=("a", "b"),
    backward=_reduce_backward,
    autocast=("a", "b"),
)
