# SPDX-License-Identifier: BSD-3-Clause
"""context_parallel_attn, mode all_gather: every rank gathers K and V and computes attention for its
own queries.

A rank has one or two runs of consecutive queries. A run is computed as soon as the keys that it
sees have arrived. With the zigzag layout and a causal mask, every rank has an early and a late run,
and the late run's keys arrive while the early run is computed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from . import transport
from .local import Call, backward, empty_results, forward, forward_into, sum_sinks
from .ranks import Ranks
from .sequence import Cut

# If K and V of all ranks have fewer bytes, every run waits for all keys and is given all of them.
# Short attention splits its keys by their number. With the same number as on one rank, the last bits
# are the same, too.
_STAGED_BYTES = 8 << 20


class _Keys:
    """All ranks' K and V [B, Hkv, S, D], stored [S, B, Hkv, D], while they are gathered."""

    def __init__(self, k: Tensor, v: Tensor, cut: Cut, ranks: Ranks):
        self._moving = transport.Gather(
            cut, ranks, *(x.movedim(2, 0) for x in (k, v)), in_buffer=True
        )

    def before(self, end: int) -> list[Tensor]:
        """K and V of the first `end` tokens, once they have arrived."""
        return [x.narrow(0, 0, end).movedim(0, 2) for x in self._moving.wait(end)]

    def done(self) -> None:
        self._moving.done()


def _runs(k: Tensor, v: Tensor, call: Call, cut: Cut, ranks: Ranks) -> list[tuple[slice, int, int]]:
    """This rank's runs of queries: (rows of q, place of the first in the sequence, number of
    leading keys that the run is given)."""
    each = sum(x.shape[0] * x.shape[1] * x.shape[3] * x.element_size() for x in (k, v))
    staged = each * cut.length >= _STAGED_BYTES
    return [
        (
            slice(at, at + end - start),
            start,
            call.last_seen(end, cut.length) if staged else cut.length,
        )
        for at, start, end in cut.segments(ranks.rank)
    ]


def attend(
    q: Tensor, k: Tensor, v: Tensor, call: Call, cut: Cut, ranks: Ranks
) -> tuple[Tensor, Tensor]:
    """(out, lse)."""
    keys, runs = _Keys(k, v, cut, ranks), _runs(k, v, call, cut, ranks)
    if len(runs) == 1:
        [(rows, start, seen)] = runs
        out, lse = forward(q[:, :, rows], *keys.before(seen), call, start, q.dtype)
    else:
        out, lse = empty_results(q, v)
        for rows, start, seen in runs:
            lse[:, :, rows] = forward_into(
                out[:, :, rows], q[:, :, rows], *keys.before(seen), call, start
            )
    keys.done()
    return out, lse


def differentiate(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: Call,
    cut: Cut,
    ranks: Ranks,
):
    """(dq, dk, dv, dsinks). A rank's shares of dk and dv are sent to the owners of the tokens."""
    keys, dq = _Keys(k, v, cut, ranks), torch.empty_like(q)
    shares, dsinks = [], None  # the parts of (dk, dv), and of dsinks, by this rank's queries
    for rows, start, seen in _runs(k, v, call, cut, ranks):
        given = (x if x is None else x[:, :, rows] for x in (grad_out, grad_lse, q))
        results = (x[:, :, rows] for x in (out, lse))
        grads = backward(*given, *keys.before(seen), *results, call, start, part=False)
        dq[:, :, rows] = grads[0]
        shares.append(grads[1:3])
        dsinks = grads[3] if dsinks is None else dsinks + grads[3]
    keys.done()
    sums = [
        _sum_of(parts, x, cut.length, lse.dtype)
        for x, parts in zip((k, v), zip(*shares) if shares else ((), ()), strict=True)
    ]
    moving = transport.ToOwners(cut, ranks, *sums).send_all(*sums)
    mine = moving.add(*(transport.tokens_of(x, cut, ranks.rank) for x in sums), dtype=k.dtype)
    return dq, *(x.movedim(0, 2) for x in mine), sum_sinks(dsinks, call, lse, ranks)


def _sum_of(shares: Sequence[Tensor], like: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """The sum of gradients [B, Hkv, n, D], each for the first n <= S keys, as [S, B, Hkv, D] in
    dtype."""
    longest = max((x.shape[2] for x in shares), default=0)
    batch, heads, _, dim = like.shape
    total = None
    for share in sorted(shares, key=lambda x: -x.shape[2]):
        share = share.movedim(2, 0)
        if total is not None:
            total.narrow(0, 0, share.shape[0]).add_(share)
        elif longest == tokens:
            total = share if share.dtype == dtype else share.to(dtype)
        else:
            total = share.new_zeros((tokens, batch, heads, dim), dtype=dtype)
            total.narrow(0, 0, longest).copy_(share)
    return like.new_zeros((tokens, batch, heads, dim), dtype=dtype) if total is None else total
