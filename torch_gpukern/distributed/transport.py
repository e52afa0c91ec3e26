# SPDX-License-Identifier: BSD-3-Clause
"""What ranks send each other. Tokens come first in every buffer, so that what a rank sends or receives is one piece."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .ranks import Ranks, all_gather


def gather_tokens(x: Tensor, cut, ranks: Ranks) -> Tensor:
    """[S, ...] in the whole's order, from each rank's [its tokens, ...]."""
    most = cut.most
    if x.shape[0] == most:
        sent = x.contiguous()
    else:  # a shorter shard is padded: ranks send the same number of tokens
        sent = x.new_empty((most, *x.shape[1:]))
        sent[: x.shape[0]] = x
        sent[x.shape[0] :] = 0
    met = x.new_empty((ranks.size * most, *x.shape[1:]))
    _all_gather(met, sent, ranks)
    order = cut.order()
    if [piece[0] * most + piece[1] for piece in order] == _starts(order):
        return met[: cut.length]  # the shards lie as the whole does
    return torch.cat([met.narrow(0, rank * most + at, tokens) for rank, at, tokens in order] or [met[:0]])


def _starts(order) -> list[int]:
    starts, at = [], 0
    for _, _, tokens in order:
        starts.append(at)
        at += tokens
    return starts


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


def swap(sent: Sequence[Tensor], sizes: Sequence[int], ranks: Ranks) -> list[Tensor]:
    """Rank r gets sent[r] of every rank: [sizes[p], ...] from rank p. All have the same trailing dimensions."""
    trailing = sent[0].shape[1:]
    flat = torch.cat([x.reshape(-1) for x in sent])
    each = max(trailing.numel(), 0)
    met = flat.new_empty(sum(sizes) * each)
    dist.all_to_all_single(met, flat, [n * each for n in sizes], [x.shape[0] * each for x in sent], group=ranks.group)
    return [piece.view(n, *trailing) for piece, n in zip(met.split([n * each for n in sizes]), sizes, strict=True)]


def sum_to_owners(x: Tensor, cut, ranks: Ranks) -> Tensor:
    """[tokens of this rank, ...]: the sum over ranks of their [S, ...], float32 or wider, in the order of the ranks."""
    parts = swap([tokens_of(x, cut, r) for r in range(ranks.size)], [cut.tokens(ranks.rank)] * ranks.size, ranks)
    return in_rank_order(parts)


def in_rank_order(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def sum_of_all(x: Tensor, ranks: Ranks) -> Tensor:
    """The sum over ranks on every rank, in the order of the ranks."""
    met = x.new_empty((ranks.size, *x.shape))
    _all_gather(met.flatten(), x.contiguous().flatten(), ranks)
    return in_rank_order(met.unbind())


def all_of(x: Tensor, ranks: Ranks) -> list[Tensor]:
    """x of every rank, of one shape."""
    met = x.new_empty((ranks.size, *x.shape))
    _all_gather(met.flatten(), x.contiguous().flatten(), ranks)
    return list(met.unbind())


class Ring:
    """Tensors that go round: each step sends to the next rank and receives from the one before."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.next = ranks.peer((ranks.rank + 1) % ranks.size)
        self.before = ranks.peer((ranks.rank - 1) % ranks.size)

    def post(self, sent: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> tuple[list[Tensor], list]:
        """Buffers of those shapes, and what to wait for before they are read or the sent ones are written."""
        met = [x.new_empty(tuple(shape)) for x, shape in zip(sent, shapes, strict=True)]
        calls = [dist.P2POp(dist.isend, x, self.next, self.ranks.group) for x in sent if x.numel()]
        calls += [dist.P2POp(dist.irecv, x, self.before, self.ranks.group) for x in met if x.numel()]
        return met, dist.batch_isend_irecv(calls) if calls else []
