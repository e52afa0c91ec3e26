# SPDX-License-Identifier: BSD-3-Clause
"""What ranks send each other. Tokens come first in every buffer, so that what a rank sends or receives is one piece."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .ranks import Ranks, all_gather
from .symmetric import pool_for


def _send(x: Tensor, to: int, ranks: Ranks) -> dist.P2POp:
    return dist.P2POp(dist.isend, x, ranks.peer(to), ranks.group)


def _receive(x: Tensor, source: int, ranks: Ranks) -> dist.P2POp:
    return dist.P2POp(dist.irecv, x, ranks.peer(source), ranks.group)


def _post(calls: Sequence[dist.P2POp]) -> list:
    """Begins them together; what is empty is neither sent nor received."""
    calls = [call for call in calls if call.tensor.numel()]
    return dist.batch_isend_irecv(calls) if calls else []


class Gather:
    """[S, ...] in the whole's order, on its way from each rank's [its tokens, ...]: each run of tokens straight to its place.

    Work that is begun before `wait` goes on beside the transfer: by copy engines where they serve (symmetric.py), else by the
    backend's point-to-point calls.
    """

    def __init__(self, x: Tensor, cut, ranks: Ranks):
        self.whole = x.new_empty((cut.length, *x.shape[1:]))
        self._met, self._cut, self._ranks, self._posted = _bytes(self.whole), cut, ranks, []
        most = cut.most * math.prod(x.shape[1:]) * x.element_size()
        self._pool = pool_for(x.device, ranks, most)
        if self._pool is not None:
            self._pull(_bytes(x), most)
        else:
            self._exchange(_bytes(x.contiguous()))

    def _exchange(self, x: Tensor) -> None:
        calls, self._sent, mine = [], x, self._cut.segments(self._ranks.rank)
        for step in range(1, self._ranks.size):
            to, source = self._ranks.around(step)
            calls += [_send(x[at : at + end - start], to, self._ranks) for at, start, end in mine]
            calls += [
                _receive(self._met[start:end], source, self._ranks) for _, start, end in self._cut.segments(source)
            ]
        self._posted = _post(calls)
        for at, start, end in mine:
            self._met[start:end] = x[at : at + end - start]

    def _pull(self, x: Tensor, most: int) -> None:
        pool, ranks = self._pool, self._ranks
        self._buffer = pool.take(most)
        pool.view(self._buffer, ranks.rank, x.shape, x.dtype).copy_(x)
        for at, start, end in self._cut.segments(
            ranks.rank
        ):  # here: a copy inside a GPU may need SMs, and would hold up the rest
            self._met[start:end].copy_(x[at : at + end - start])
        pool.barrier(self._buffer)
        pool.stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(pool.stream):
            for step in range(1, ranks.size):
                _, source = ranks.around(step)
                shape = (self._cut.tokens(source), *x.shape[1:])
                theirs = pool.view(self._buffer, source, shape, x.dtype)
                for at, start, end in self._cut.segments(source):
                    self._met[start:end].copy_(theirs[at : at + end - start])
            self._done = torch.cuda.Event()
            self._done.record()

    def wait(self) -> Tensor:
        if self._pool is not None:
            torch.cuda.current_stream(self.whole.device).wait_event(self._done)
            self._pool.release(self._buffer)
        for work in self._posted:
            work.wait()
        return self.whole


def gather_tokens(x: Tensor, cut, ranks: Ranks) -> Tensor:
    """[S, ...] in the whole's order, from each rank's [its tokens, ...]; never x itself."""
    return Gather(x, cut, ranks).wait()


def _all_gather(met: Tensor, sent: Tensor, ranks: Ranks) -> None:
    if sent.numel():
        all_gather(_bytes(met), _bytes(sent), group=ranks.group)


def _bytes(x: Tensor) -> Tensor:
    """Types that a backend does not know travel as bytes."""
    return x.view(torch.uint8) if x.element_size() == 1 and x.dtype not in (torch.uint8, torch.int8) else x


def tokens_of(x: Tensor, cut, rank: int) -> Tensor:
    """[tokens of a rank, ...] of [S, ...]."""
    parts = [x.narrow(0, start, end - start) for start, end in cut.spans[rank]]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def exchange(rows: Tensor, sent: Sequence[int], met: Sequence[int], ranks: Ranks) -> Tensor:
    """[sum of met, ...], those from each rank in the ranks' order, of [sum of sent, ...], those for each."""
    trailing = rows.shape[1:]
    each = trailing.numel()
    out = rows.new_empty((sum(met), *trailing))
    dist.all_to_all_single(
        out.view(-1), rows.reshape(-1), [n * each for n in met], [n * each for n in sent], group=ranks.group
    )
    return out


def swap(sent: Sequence[Tensor], sizes: Sequence[int], ranks: Ranks) -> list[Tensor]:
    """Rank r gets sent[r] of every rank: [sizes[p], ...] from rank p. All have the same trailing dimensions."""
    return list(exchange(torch.cat(list(sent)), [x.shape[0] for x in sent], sizes, ranks).split(list(sizes)))


class ToOwners:
    """[tokens of this rank, ...]: the sum over ranks of what each has for all, float32 or wider, on its way.

    cut: whose tokens are whose. like: of the dtype, device and trailing sizes of what is sent.
    """

    def __init__(self, cut, ranks: Ranks, like: Tensor):
        self._cut, self._ranks, self._posted, self._kept = cut, ranks, [], []
        self._runs = [(at, at + end - start) for at, start, end in cut.segments(ranks.rank)]
        each = math.prod(like.shape[1:])
        self._slot = cut.most * each  # elements of the buffer for each of the other ranks
        self._pool = pool_for(like.device, ranks, self._slot * like.element_size() * (ranks.size - 1))
        tokens, sizes = cut.tokens(ranks.rank), like.shape[1:]
        if self._pool is None:
            self._parts = [like.new_empty((tokens * (r != ranks.rank), *sizes)) for r in range(ranks.size)]
        else:
            self._buffer = self._pool.take(self._slot * like.element_size() * (ranks.size - 1))
            view = self._pool.view
            self._parts = [
                view(self._buffer, ranks.rank, (tokens, *sizes), like.dtype, self._slot * self._place(r, ranks.rank))
                for r in range(ranks.size)
            ]

    def _place(self, source: int, owner: int) -> int:
        """Which part of the owner's buffer holds what comes from a rank; an owner sends itself nothing."""
        return (source - owner - 1) % self._ranks.size if source != owner else 0

    def send(self, step: int, runs: Sequence[Tensor]) -> None:
        """To the rank `step` behind this one the runs of its tokens, and from the one before this rank's."""
        to, source = self._ranks.around(step)
        runs = [run.contiguous() for run in runs]
        self._kept += runs
        if self._pool is not None:
            self._push(to, runs)
            return
        calls = [_send(run, to, self._ranks) for run in runs]
        calls += [_receive(self._parts[source][start:end], source, self._ranks) for start, end in self._runs]
        self._posted += _post(calls)

    def _push(self, to: int, runs: Sequence[Tensor]) -> None:
        pool, at = self._pool, self._slot * self._place(self._ranks.rank, to)
        pool.stream.wait_stream(torch.cuda.current_stream(runs[0].device) if runs else torch.cuda.current_stream())
        with torch.cuda.stream(pool.stream):
            for run in runs:
                pool.view(self._buffer, to, run.shape, run.dtype, at).copy_(run)
                at += run.numel()

    def send_all(self, x: Tensor, cut) -> "ToOwners":
        """Of [S, ...] each rank's tokens."""
        for step in range(1, self._ranks.size):
            self.send(step, [x[start:end] for _, start, end in cut.segments(self._ranks.around(step)[0])])
        return self

    def add(self, mine: Tensor, dtype: torch.dtype) -> Tensor:
        """The sum in the order of the ranks, rounded once to dtype."""
        for work in self._posted:
            work.wait()
        if self._pool is not None:
            torch.cuda.current_stream(mine.device).wait_stream(self._pool.stream)
            self._pool.barrier(self._buffer)  # all ranks have sent
        self._kept.clear()
        self._parts[self._ranks.rank] = mine
        total = rounded_sum(self._parts, dtype)
        if self._pool is not None:
            self._pool.release(self._buffer)
        return total


def sum_to_owners(x: Tensor, cut, ranks: Ranks, dtype: torch.dtype | None = None) -> Tensor:
    """[tokens of this rank, ...]: the sum over ranks of their [S, ...], float32 or wider, in the order of the ranks, rounded once to
    dtype (None is x's).
    """
    return ToOwners(cut, ranks, x).send_all(x, cut).add(tokens_of(x, cut, ranks.rank), dtype or x.dtype)


def rounded_sum(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The sum in the parts' order, of which the last addition rounds to dtype."""
    total = parts[0] if len(parts) < 3 else in_rank_order(parts[:-1])
    if len(parts) == 1:
        return total.to(dtype, copy=True)
    return torch.add(total, parts[-1], out=torch.empty(total.shape, dtype=dtype, device=total.device))


def in_rank_order(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def sum_of_all(x: Tensor, ranks: Ranks, dtype: torch.dtype | None = None) -> Tensor:
    """The sum over ranks on every rank, in the order of the ranks, rounded once to dtype (None is x's)."""
    return rounded_sum(all_of(x, ranks), dtype or x.dtype)


# Up to this many bytes of what all ranks send together each sends all of it to all: one exchange. Above, rows go to their
# owners and come back summed: two exchanges of a rank's share each.
ONE_EXCHANGE_BYTES = 4 << 20


def reduced(x: Tensor, cut, ranks: Ranks, dtype: torch.dtype) -> Tensor:
    """[rows, ...] in dtype on every rank: the sum over ranks, float32 or wider, in the order of the ranks, rounded once.

    cut: of the rows, for sums that have owners.
    """
    if x.numel() * x.element_size() * ranks.size <= ONE_EXCHANGE_BYTES:
        return sum_of_all(x, ranks, dtype)
    return gather_tokens(sum_to_owners(x, cut, ranks, dtype), cut, ranks)


def all_of(x: Tensor, ranks: Ranks) -> list[Tensor]:
    """x of every rank, of one shape."""
    met = x.new_empty((ranks.size, *x.shape))
    _all_gather(met.flatten(), x.contiguous().flatten(), ranks)
    return list(met.unbind())


class Ring:
    """Tensors that go round: each step sends to the next rank and receives from the one before."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.next, self.before = ranks.around(1)

    def post(self, sent: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> tuple[list[Tensor], list]:
        """Buffers of those shapes, and what to wait for before they are read or the sent ones are written."""
        met = [x.new_empty(tuple(shape)) for x, shape in zip(sent, shapes, strict=True)]
        calls = [_send(x, self.next, self.ranks) for x in sent]
        return met, _post([*calls, *(_receive(x, self.before, self.ranks) for x in met)])
