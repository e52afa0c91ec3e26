# SPDX-License-Identifier: BSD-3-Clause
"""Transfers between ranks: gathers, sums to owners, all-reduces, exchanges and the ring.

Tokens are the first dimension of every buffer, so that the tokens that a rank sends or receives
are contiguous. If all GPUs of the group can read each other's memory (symmetric.py), copy engines
do a transfer. Otherwise the backend's collectives or point-to-point calls do.

In this file "the whole" is the tensor over all ranks' tokens, and a `cut` (sequence.Cut) says which
tokens each rank holds. A "run" is a range of consecutive tokens. Ranks are visited in the order of
`Ranks.around`: at step s a rank sends to the rank s after it and receives from the rank s before.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .._library import ops
from .mailboxes import mailboxes_for
from .ranks import Ranks, all_gather
from .symmetric import pool_for


def _send(x: Tensor, to: int, ranks: Ranks) -> dist.P2POp:
    return dist.P2POp(dist.isend, x, ranks.peer(to), ranks.group)


def _receive(x: Tensor, source: int, ranks: Ranks) -> dist.P2POp:
    return dist.P2POp(dist.irecv, x, ranks.peer(source), ranks.group)


def _post(calls: Sequence[dist.P2POp]) -> list:
    """Starts the calls together; empty tensors are neither sent nor received."""
    calls = [call for call in calls if call.tensor.numel()]
    return dist.batch_isend_irecv(calls) if calls else []


class Gather:
    """An all-gather in flight: each rank's tensors [its tokens, ...] become [S, ...] in the whole's
    order.

    The constructor starts the transfer, `wait` waits for it, and `done` ends it. Work that is
    issued between them overlaps with the transfer. Each run of tokens is written directly to its
    place. All ranks' first runs are sent before their second ones.

    own: whether this rank's own rows are copied into the whole, too.
    in_buffer: the whole may be a view of the buffer that the other ranks read from, which saves a
    copy of each row. The caller must not read it after `done`.
    """

    def __init__(self, cut, ranks: Ranks, *xs: Tensor, own: bool = True, in_buffer: bool = False):
        self._cut, self._ranks = cut, ranks
        self._runs = [cut.segments(rank) for rank in range(ranks.size)]
        # for each stage: the NCCL works to wait for, or one event for each copied rank, in the
        # order of the copies
        self._posted: list[list] = []
        # for each rank the event after the last copy from it, in the order of these copies
        self._last_copy: dict[int, torch.cuda.Event] = {}
        self._pool = None
        if in_buffer:
            self._pool = pool_for(xs[0].device, ranks, sum(_padded_sizes(xs, cut.length)))
        if self._pool is not None:
            self._pull_in_buffer(xs)
            return
        self.whole = [x.new_empty((cut.length, *x.shape[1:])) for x in xs]
        sizes = _padded_sizes(xs, cut.most)
        self._pool = pool_for(xs[0].device, ranks, sum(sizes))
        if self._pool is not None:
            self._pull([_bytes(x) for x in xs], sizes)
        else:
            self._exchange([_bytes(x.contiguous()) for x in xs])
        if own:
            for x, whole in zip(xs, self.whole, strict=True):
                for at, start, end in self._runs[ranks.rank]:
                    _copy(whole[start:end], x[at : at + end - start])

    def _stages(self):
        """Yields all ranks' first runs, then all ranks' second runs; None for a rank without
        one."""
        for stage in range(max(map(len, self._runs))):
            yield [runs[stage] if stage < len(runs) else None for runs in self._runs]

    def _exchange(self, xs: list[Tensor]) -> None:
        self._sent, ranks = xs, self._ranks
        for runs in self._stages():
            calls = []
            for step in range(1, ranks.size):
                to, source = ranks.around(step)
                for x, whole in zip(xs, self.whole, strict=True):
                    if runs[ranks.rank]:
                        at, start, end = runs[ranks.rank]
                        calls.append(_send(x[at : at + end - start], to, ranks))
                    if runs[source]:
                        _, start, end = runs[source]
                        calls.append(_receive(_bytes(whole)[start:end], source, ranks))
            self._posted.append(_post(calls))

    def _pull_in_buffer(self, xs: Sequence[Tensor]) -> None:
        """Starts the copies of a whole that is a view of this rank's buffer. Every rank's buffer
        has the same layout. A rank writes its own rows to its buffer and copies the others' rows
        from the same offsets of their buffers."""
        pool, ranks, dtypes = self._pool, self._ranks, [x.dtype for x in xs]
        xs = [_bytes(x) for x in xs]
        sizes = _padded_sizes(xs, self._cut.length)
        self._buffer = pool.take(sum(sizes))
        shapes = [(self._cut.length, *x.shape[1:]) for x in xs]
        offsets = _offsets(sizes, xs)

        def views(rank: int) -> list[Tensor]:
            parts = zip(shapes, xs, offsets, strict=True)
            return [
                pool.view(self._buffer, rank, shape, x.dtype, offset) for shape, x, offset in parts
            ]

        wholes = views(ranks.rank)
        for x, whole in zip(xs, wholes, strict=True):
            for at, start, end in self._runs[ranks.rank]:
                _copy(whole[start:end], x[at : at + end - start])
        pool.barrier(self._buffer)

        def copy(source: int, at: int, start: int, end: int) -> None:
            for whole, theirs in zip(wholes, views(source), strict=True):
                whole[start:end].copy_(theirs[start:end])

        self._copy_others(copy)
        self.whole = [whole.view(dtype) for whole, dtype in zip(wholes, dtypes, strict=True)]

    def _pull(self, xs: list[Tensor], sizes: list[int]) -> None:
        """Starts the copies of a whole in memory of its own. The ranks' buffers hold their own
        tokens only."""
        pool, ranks = self._pool, self._ranks
        self._buffer, offsets = _put_into_buffer(pool, ranks, xs, sizes)

        def copy(source: int, at: int, start: int, end: int) -> None:
            for offset, whole in zip(offsets, map(_bytes, self.whole), strict=True):
                each = math.prod(whole.shape[1:])
                shape = (end - start, *whole.shape[1:])
                whole[start:end].copy_(
                    pool.view(self._buffer, source, shape, whole.dtype, offset + at * each)
                )

        self._copy_others(copy)

    def _copy_others(self, copy: Callable[[int, int, int, int], None]) -> None:
        """Calls copy(source, at, start, end) for the other ranks' runs on the pool's stream, stage
        by stage, and records an event after each copy. In each step of a stage every rank reads
        from a different one, so no rank's link is shared."""
        pool, ranks = self._pool, self._ranks
        with pool.copying():
            for runs in self._stages():
                posted = []
                for step in range(1, ranks.size):
                    _, source = ranks.around(step)
                    if runs[source]:
                        copy(source, *runs[source])
                        event = pool.stream.record_event()
                        self._last_copy.pop(source, None)  # so that the rank moves to the end
                        self._last_copy[source] = event
                        posted.append(event)
                self._posted.append(posted)

    @property
    def by_copies(self) -> bool:
        """Whether copy engines do the transfer. Ranks' rows then arrive one rank at a time,
        beginning with the rank before this one and going down."""
        return self._pool is not None

    def wait_for(self, steps: int) -> None:
        """Lets work that is issued later read the rows of the `steps` ranks before this one. Only
        if `by_copies`."""
        wanted = {self._ranks.around(step)[1] for step in range(1, steps + 1)}
        for source in reversed(self._last_copy):
            if source in wanted:  # copies run in order, so this event implies the earlier ones
                event = self._last_copy[source]
                torch.cuda.current_stream(self.whole[0].device).wait_event(event)
                return

    def wait(self, tokens: int | None = None) -> list[Tensor]:
        """Returns the whole. Work issued later may read its first `tokens` tokens (None: all)."""
        end, own = self._cut.length if tokens is None else tokens, self._ranks.rank
        stages = [
            stage
            for stage, runs in enumerate(self._stages())
            # this rank's own rows need no transfer
            if any(run and run[1] < end for rank, run in enumerate(runs) if rank != own)
        ]
        wanted = len(self._posted) if tokens is None else max(stages, default=-1) + 1
        for posted in self._posted[:wanted]:
            if self._pool is None:
                for work in posted:
                    work.wait()
            elif posted:  # copies run in order, so the last event implies the earlier ones
                torch.cuda.current_stream(self.whole[0].device).wait_event(posted[-1])
            posted.clear()
        return self.whole

    def done(self) -> None:
        """Waits for all tokens and releases the buffer. With `in_buffer`, all reads of the whole
        must have been issued."""
        self.wait()
        if self._pool is not None:
            self._pool.release(self._buffer)


def _copy(to: Tensor, x: Tensor) -> None:
    """to.copy_(x), by 16-byte elements if both tensors allow it. torch's kernel for non-contiguous
    tensors is bound by the number of elements (16 MiB of bfloat16 on an H200: 24 us, by 16 bytes
    9 us).
    """
    if _of_16_bytes(to) and _of_16_bytes(x):
        to, x = to.view(torch.complex128), x.view(torch.complex128)
    to.copy_(x)


def _of_16_bytes(x: Tensor) -> bool:
    """Whether x can be viewed as 16-byte elements."""
    if x.dim() < 2 or x.stride(-1) != 1 or x.data_ptr() % 16:
        return False
    each = x.element_size()
    return all(n * each % 16 == 0 for n in (x.shape[-1], x.storage_offset(), *x.stride()[:-1]))


_ALIGNED = 256  # bytes: alignment of a tensor in a buffer


def _padded(size: int) -> int:
    return (size + _ALIGNED - 1) // _ALIGNED * _ALIGNED


def _padded_sizes(xs: Sequence[Tensor], tokens: int) -> list[int]:
    """The bytes that `tokens` tokens of each tensor take in a buffer, with padding."""
    return [_padded(tokens * math.prod(x.shape[1:]) * x.element_size()) for x in xs]


def _offsets(sizes: Sequence[int], xs: Sequence[Tensor]) -> list[int]:
    """The offset of each tensor in a buffer, in its elements."""
    return [at // x.element_size() for at, x in zip(itertools.accumulate(sizes, initial=0), xs)]


def _put_into_buffer(
    pool, ranks: Ranks, xs: Sequence[Tensor], sizes: Sequence[int], unread: tuple[int, int] = (0, 0)
):
    """Takes a buffer of the pool and copies this rank's xs into it. Returns the buffer and the
    offset of each x in elements. Work that is issued later on the current stream, or on the pool's
    stream inside `copying`, may read the other ranks' xs.

    sizes: the padded bytes of each tensor, the same on all ranks.
    unread: rows [start, end) of the first tensor that no other rank reads; they are not copied.
    """
    buffer, offsets = pool.take(sum(sizes)), _offsets(sizes, xs)
    for i, (offset, x) in enumerate(zip(offsets, xs, strict=True)):
        mine = pool.view(buffer, ranks.rank, x.shape, x.dtype, offset)
        start, end = unread if i == 0 else (0, 0)
        for rows in (slice(0, start), slice(end, None)):
            if mine[rows].numel():
                _copy(mine[rows], x[rows])
    pool.barrier(buffer)
    return buffer, offsets


def gather_tokens(x: Tensor, cut, ranks: Ranks) -> Tensor:
    """All ranks' x [its tokens, ...] as [S, ...] in the whole's order; never x itself."""
    moving = Gather(cut, ranks, x)
    moving.done()
    return moving.whole[0]


def _all_gather(received: Tensor, sent: Tensor, ranks: Ranks) -> None:
    if sent.numel():
        all_gather(_bytes(received), _bytes(sent), group=ranks.group)


def _bytes(x: Tensor) -> Tensor:
    """x as uint8 if it has an 8-bit type that backends may not know."""
    return (
        x.view(torch.uint8)
        if x.element_size() == 1 and x.dtype not in (torch.uint8, torch.int8)
        else x
    )


def tokens_of(x: Tensor, cut, rank: int) -> Tensor:
    """A rank's tokens [its tokens, ...] of the whole x [S, ...]."""
    parts = [x.narrow(0, start, end - start) for start, end in cut.spans[rank]]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def exchange(rows: Tensor, sent: Sequence[int], received: Sequence[int], ranks: Ranks) -> Tensor:
    """An all-to-all in which the numbers of rows differ.

    rows: [sum(sent), ...], first the sent[0] rows for rank 0, then those for rank 1, and so on.
    Returns [sum(received), ...], first the received[0] rows from rank 0, and so on.
    """
    trailing = rows.shape[1:]
    each = trailing.numel()
    out = rows.new_empty((sum(received), *trailing))
    dist.all_to_all_single(
        out.view(-1),
        rows.reshape(-1),
        [n * each for n in received],
        [n * each for n in sent],
        group=ranks.group,
    )
    return out


def swap(sent: Sequence[Tensor], sizes: Sequence[int], ranks: Ranks) -> list[Tensor]:
    """An all-to-all: rank r gets sent[r]. Returns what each rank p sent, [sizes[p], ...]. All
    tensors have the same trailing dimensions."""
    return list(
        exchange(torch.cat(list(sent)), [x.shape[0] for x in sent], sizes, ranks).split(list(sizes))
    )


class ToOwners:
    """A reduce-scatter in flight. Each rank has shares for all tokens; a token's owner gets the sum
    over ranks. The shares are float32 or wider.

    cut: which tokens each rank owns.
    likes: tensors with the dtype, device and trailing sizes of what is sent.
    """

    def __init__(self, cut, ranks: Ranks, *likes: Tensor):
        self._cut, self._ranks, self._like = cut, ranks, likes[0]
        self._posted: list = []  # NCCL works to wait for
        self._kept: list = []  # tensors that are being sent
        self._sent: list = []  # an event after each copy_rows
        self._runs = [(at, at + end - start) for at, start, end in cut.segments(ranks.rank)]
        sizes = _padded_sizes(likes, cut.most)
        # The buffer has a part for each other rank, into which that rank writes all tensors.
        self._part_bytes, self._starts = sum(sizes), list(itertools.accumulate(sizes, initial=0))
        self._pool = pool_for(likes[0].device, ranks, self._part_bytes * (ranks.size - 1))
        if self._pool is not None:
            self._buffer = self._pool.take(self._part_bytes * (ranks.size - 1))
        tokens = cut.tokens(ranks.rank)
        self._parts = [
            [self._part(i, r, (tokens, *x.shape[1:]), x) for r in range(ranks.size)]
            for i, x in enumerate(likes)
        ]

    def _part(self, i: int, source: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Where tensor i from rank `source` arrives; empty for this rank itself."""
        if source == self._ranks.rank:
            return like.new_empty((0, *shape[1:]))
        if self._pool is None:
            return like.new_empty(shape)
        place = self._place(i, source, self._ranks.rank, like)
        return self._pool.view(self._buffer, self._ranks.rank, shape, like.dtype, place)

    def _place(self, i: int, source: int, owner: int, like: Tensor) -> int:
        """The element of the owner's buffer at which tensor i from `source` begins."""
        part = (source - owner - 1) % self._ranks.size
        return (self._part_bytes * part + self._starts[i]) // like.element_size()

    @property
    def by_copies(self) -> bool:
        """Whether copy engines do the transfer. `landing`, `copy_rows` and `arrived` need them."""
        return self._pool is not None

    def landing(self, step: int, start: int, end: int) -> Tensor:
        """Rows [start, end) of the first tensor in the buffer of the rank `step` after this one."""
        to, like = self._ranks.around(step)[0], self._like
        place = self._place(0, self._ranks.rank, to, like) + start * math.prod(like.shape[1:])
        return self._pool.view(self._buffer, to, (end - start, *like.shape[1:]), like.dtype, place)

    def copy_rows(self, step: int, start: int, rows: Tensor) -> None:
        """Sends rows of the first tensor, from row `start` on, to the rank `step` after this one.
        The copy overlaps with work issued later."""
        self._kept.append(rows)
        if rows.shape[0]:
            to = self.landing(step, start, start + rows.shape[0])
            with self._pool.copying():
                to.copy_(rows)
        self._sent.append(self._pool.stream.record_event())

    def arrived(self, sent: int | None = None) -> list[Tensor]:
        """The rows of the first tensor that each rank has sent (empty for this rank itself). Work
        issued later may read the rows of the first `sent` calls of `copy_rows` (None: of all)."""
        for event in self._sent if sent is None else self._sent[:sent]:
            torch.cuda.current_stream(self._like.device).wait_event(event)
        self._pool.barrier(self._buffer)
        return self._parts[0]

    def done(self) -> None:
        """Releases the buffer, once all reads of it have been issued."""
        self._kept.clear()
        self._pool.release(self._buffer)

    def send(self, step: int, *each: Sequence[Tensor]) -> None:
        """Sends the runs of tokens that the rank `step` after this one owns, of each tensor, and
        receives this rank's tokens from the rank `step` before."""
        to, source = self._ranks.around(step)
        each = [[run.contiguous() for run in runs] for runs in each]
        self._kept += each
        if self._pool is not None:
            self._push(to, each)
            return
        calls = []
        for parts, runs in zip(self._parts, each, strict=True):
            calls += [_send(run, to, self._ranks) for run in runs]
            calls += [
                _receive(parts[source][start:end], source, self._ranks) for start, end in self._runs
            ]
        self._posted += _post(calls)

    def _push(self, to: int, each: Sequence[Sequence[Tensor]]) -> None:
        pool = self._pool
        with pool.copying():
            for i, runs in enumerate(each):
                at = self._place(i, self._ranks.rank, to, runs[0]) if runs else 0
                for run in runs:
                    pool.view(self._buffer, to, run.shape, run.dtype, at).copy_(run)
                    at += run.numel()

    def send_all(self, *xs: Tensor) -> "ToOwners":
        """Sends every other rank its tokens of each tensor [S, ...]."""
        for step in range(1, self._ranks.size):
            runs = self._cut.segments(self._ranks.around(step)[0])
            self.send(step, *([x[start:end] for _, start, end in runs] for x in xs))
        return self

    def add(self, *mine: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """Adds this rank's shares `mine` and returns the sums, in rank order, rounded once to
        dtype."""
        for work in self._posted:
            work.wait()
        if self._pool is not None:
            torch.cuda.current_stream(mine[0].device).wait_stream(self._pool.stream)
            self._pool.barrier(self._buffer)  # after it, all ranks have sent
        self._kept.clear()
        totals = []
        for own, parts in zip(mine, self._parts, strict=True):
            parts[self._ranks.rank] = own
            totals.append(rounded_sum(parts, dtype))
        if self._pool is not None:
            self._pool.release(self._buffer)
        return totals


class OperandsByRank:
    """Transfers the operands of a product whose inner dimension is distributed over ranks to the
    owners of its rows, one rank's operands after another's.

    A rank has a [M, its k] and b [its k, N]. From each other rank it fetches its own rows of that
    rank's a, and all of that rank's b. It begins with the rank before this one and goes down.

    cut: which rows each rank owns.
    inner: for each rank, its k, and whether its b has contiguous columns instead of rows.
    """

    def __init__(self, pool, ranks: Ranks, a: Tensor, b: Tensor, cut, inner: Sequence[tuple]):
        self._pool, self._like = pool, a
        columns, sizes = b.shape[1], sizes_by_rank(cut.length, b.shape[1], a, inner)
        ((first, last),) = cut.spans[ranks.rank]
        self._buffer, offsets = _put_into_buffer(
            pool, ranks, (a, b.t() if inner[ranks.rank][1] else b), sizes, unread=(first, last)
        )
        sources = [ranks.around(step)[1] for step in range(1, ranks.size)]
        self._received = []
        for k, by_columns in (inner[source] for source in sources):
            matrix = b.new_empty((columns, k) if by_columns else (k, columns))
            self._received.append((a.new_empty((last - first, k)), matrix))
        self._column_major = [inner[source][1] for source in sources]
        self._events = []
        with pool.copying():
            for source, pair in zip(sources, self._received, strict=True):
                starts = offsets[0] + first * inner[source][0], offsets[1]
                for x, start in zip(pair, starts, strict=True):
                    if x.numel():
                        x.copy_(pool.view(self._buffer, source, x.shape, x.dtype, start))
                self._events.append(pool.stream.record_event())

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields (a's rows, b) of each other rank. Work issued later may read them."""
        for (rows, matrix), column_major, event in zip(
            self._received, self._column_major, self._events, strict=True
        ):
            torch.cuda.current_stream(self._like.device).wait_event(event)
            yield rows, matrix.t() if column_major else matrix
        self._pool.release(self._buffer)


def sizes_by_rank(rows: int, columns: int, like: Tensor, inner: Sequence[tuple]) -> list[int]:
    """The padded bytes of a [rows, k] and b [k, columns] of the rank with the largest k."""
    most = max(k for k, _ in inner)
    return [_padded(n * most * like.element_size()) for n in (rows, columns)]


class OperandsByColumns:
    """Transfers the same operands as `OperandsByRank` in another order: first this rank's rows of a
    over the whole inner dimension K, then the whole b, `width` columns at a time.

    A buffer holds b as [blocks, K, width], so that a rank's part of a block is contiguous. Each
    rank writes its own part, and copies the other ranks' parts to the same offsets of its buffer.

    inner: the k of each rank.
    """

    def __init__(self, pool, ranks: Ranks, a: Tensor, b: Tensor, cut, inner: list[int], width: int):
        self._pool, self._like, own = pool, a, ranks.rank
        starts = list(itertools.accumulate(inner, initial=0))
        sizes = sizes_by_columns(cut.length, b.shape[1], a, inner)
        self._buffer = pool.take(sum(sizes))
        start_of_b = sizes[0] // a.element_size()
        ((first, last),) = cut.spans[own]

        def rows_of_a(rank: int, start: int, end: int) -> Tensor:
            shape = (end - start, inner[rank])
            return pool.view(self._buffer, rank, shape, a.dtype, start * inner[rank])

        def block(rank: int, at: int, of: int) -> Tensor:
            """The part that rank `of` has of the block at column `at`, in the buffer of `rank`."""
            wide = min(width, b.shape[1] - at)
            start = start_of_b + starts[-1] * at + starts[of] * wide
            return pool.view(self._buffer, rank, (inner[of], wide), b.dtype, start)

        self._starts_at = range(0, b.shape[1], width)
        for at in self._starts_at:
            _copy(block(own, at, own), b[:, at : at + width])
        for start, end in ((0, first), (last, cut.length)):
            if start < end:
                _copy(rows_of_a(own, start, end), a[start:end])
        pool.barrier(self._buffer)
        sources = [ranks.around(step)[1] for step in range(1, ranks.size)]
        self._rows = [a.new_empty((last - first, k)) for k in inner]
        self._rows[own], self._events = a[first:last], []
        with pool.copying():
            for source in sources:
                if self._rows[source].numel():
                    self._rows[source].copy_(rows_of_a(source, first, last))
            for at in self._starts_at:
                for source in sources:
                    if inner[source]:
                        block(own, at, source).copy_(block(source, at, source))
                self._events.append(pool.stream.record_event())
        self._blocks = [
            pool.view(
                self._buffer,
                own,
                (starts[-1], min(width, b.shape[1] - at)),
                b.dtype,
                start_of_b + starts[-1] * at,
            )
            for at in self._starts_at
        ]

    def __iter__(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yields (first column, this rank's rows of a, the block of b). Work may read them if it is
        issued before the iterator ends, which releases the buffer."""
        rows = None
        for at, matrix, event in zip(self._starts_at, self._blocks, self._events, strict=True):
            torch.cuda.current_stream(self._like.device).wait_event(event)
            rows = torch.cat(self._rows, 1) if rows is None else rows
            yield at, rows, matrix
        self._pool.release(self._buffer)


def sizes_by_columns(rows: int, columns: int, like: Tensor, inner: list[int]) -> list[int]:
    """The padded bytes of a [rows, the largest k] and of b [all k, columns]."""
    sizes = rows * max(inner), columns * sum(inner)
    return [_padded(n * like.element_size()) for n in sizes]


def sum_to_owners(x: Tensor, cut, ranks: Ranks, dtype: torch.dtype | None = None) -> Tensor:
    """This rank's tokens [its tokens, ...] of the sum over ranks of x [S, ...], float32 or wider.
    Summed in rank order, rounded once to dtype (None: x's).
    """
    moving = ToOwners(cut, ranks, x).send_all(x)
    return moving.add(tokens_of(x, cut, ranks.rank), dtype=dtype or x.dtype)[0]


def rounded_sum(parts: Sequence[Tensor], dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """The sum of the parts in their order, stored in `out` if given. The last addition rounds to
    dtype."""
    total = parts[0] if len(parts) < 3 else in_rank_order(parts[:-1])
    if len(parts) == 1:
        return total.to(dtype, copy=True)
    if out is None:
        out = torch.empty(total.shape, dtype=dtype, device=total.device)
    return torch.add(total, parts[-1], out=out)


def in_rank_order(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def sum_of_all(x: Tensor, ranks: Ranks, dtype: torch.dtype | None = None) -> Tensor:
    """The sum of x over ranks, on every rank. Summed in rank order, rounded once to dtype (None:
    x's)."""
    dtype = dtype or x.dtype
    found = _sum_in_mailboxes(x, ranks, dtype)
    return rounded_sum(all_of(x, ranks), dtype) if found is None else found


def _sum_in_mailboxes(x: Tensor, ranks: Ranks, dtype: torch.dtype) -> Tensor | None:
    """`sum_of_all` by one kernel. None if mailboxes cannot serve x."""
    mailboxes = mailboxes_for(x, ranks)
    if mailboxes is None:
        return None
    out = x.new_empty(x.shape, dtype=dtype)
    whole = (
        x.contiguous() if x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)
    )
    ops.sum_over_ranks(whole, out, mailboxes, ranks.rank, ranks.timeout_s)
    return out


# Up to this many bytes over all ranks, each rank sends its whole x to all others: one exchange.
# Larger sums take two smaller ones: rows are sent to their owners, and come back summed.
ONE_EXCHANGE_BYTES = 4 << 20


def reduced(x: Tensor, cut, ranks: Ranks, dtype: torch.dtype) -> Tensor:
    """The sum over ranks of x [rows, ...], float32 or wider, on every rank. Summed in rank order,
    rounded once to dtype.

    cut: which rank sums which rows, if x is large.
    """
    found = _sum_in_mailboxes(x, ranks, dtype)
    if found is not None:
        return found
    if x.numel() * x.element_size() * ranks.size <= ONE_EXCHANGE_BYTES:
        return rounded_sum(all_of(x, ranks), dtype)
    return gather_tokens(sum_to_owners(x, cut, ranks, dtype), cut, ranks)


def all_of(x: Tensor, ranks: Ranks) -> list[Tensor]:
    """Every rank's x, in rank order; all have the same shape."""
    received = x.new_empty((ranks.size, *x.shape))
    _all_gather(received.flatten(), x.contiguous().flatten(), ranks)
    return list(received.unbind())


class Ring:
    """A ring: each step sends to the next rank and receives from the previous one."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.next, self.before = ranks.around(1)

    def post(
        self, sent: Sequence[Tensor], shapes: Sequence[Sequence[int]], most: int
    ) -> tuple[list[Tensor], list]:
        """Starts a step. Returns the receive buffers, of the given shapes, and works to wait for
        before the received tensors are read or the sent ones are written.

        most: the most bytes that any rank sends in this step; the same number on all ranks.
        """
        received = [x.new_empty(tuple(shape)) for x, shape in zip(sent, shapes, strict=True)]
        pool = pool_for(sent[0].device, self.ranks, most + _ALIGNED * len(sent))
        if pool is not None:
            return received, [_Pulled(pool, self.ranks.rank, self.before, sent, received, most)]
        calls = [_send(x, self.next, self.ranks) for x in sent]
        calls += [_receive(x, self.before, self.ranks) for x in received]
        return received, _post(calls)


class _Pulled:
    """A ring step by copy engines: copies what the previous rank has put into its buffer."""

    def __init__(
        self,
        pool,
        rank: int,
        before: int,
        sent: Sequence[Tensor],
        received: Sequence[Tensor],
        most: int,
    ):
        self._pool, self._buffer = pool, pool.take(most + _ALIGNED * len(sent))
        for offset, x in zip(self._offsets(sent), sent, strict=True):
            pool.view(self._buffer, rank, x.shape, x.dtype, offset).copy_(x)
        pool.barrier(self._buffer)
        with pool.copying():
            for offset, x in zip(self._offsets(received), received, strict=True):
                x.copy_(pool.view(self._buffer, before, x.shape, x.dtype, offset))
        self._done = pool.stream.record_event()

    @staticmethod
    def _offsets(xs: Sequence[Tensor]) -> list[int]:
        return _offsets([_padded(x.numel() * x.element_size()) for x in xs], xs)

    def wait(self) -> None:
        torch.cuda.current_stream(self._buffer.data.device).wait_event(self._done)
        self._pool.release(self._buffer)
