# SPDX-License-Identifier: BSD-3-Clause
"""context_parallel_attn, mode ring: each rank's K and V pass through all ranks. In backward, the
sums of their gradients travel with them."""

import torch
from torch import Tensor

from . import transport
from .local import Call, accumulate, backward, empty_results, forward, sum_sinks
from .ranks import Ranks
from .sequence import Cut


class _Line:
    """The ring through which K and V, or the sums of their gradients, travel."""

    def __init__(self, cut: Cut, ranks: Ranks):
        self._ring, self._cut = transport.Ring(ranks), cut

    def post(self, keys_values: list[Tensor], owner: int) -> tuple[list[Tensor], list]:
        """Sends `keys_values` to the next rank. Returns the buffers that receive the tokens of rank
        `owner`, and works to wait for."""
        tokens = self._cut.tokens(owner)
        shapes = [(*x.shape[:2], tokens, x.shape[3]) for x in keys_values]
        most = (
            sum(x.shape[0] * x.shape[1] * x.shape[3] * x.element_size() for x in keys_values)
            * self._cut.most
        )
        return self._ring.post(keys_values, shapes, most)


def attend(
    q: Tensor, k: Tensor, v: Tensor, call: Call, cut: Cut, ranks: Ranks
) -> tuple[Tensor, Tensor]:
    """(out, lse). Each rank begins with its own keys and goes on with those of the ranks before it.
    The sinks are counted with the first keys of each run of queries."""
    out, lse = empty_results(q, v)
    wide = lse.dtype
    line = _Line(cut, ranks)
    mine = cut.segments(ranks.rank)
    merged: list[tuple[Tensor, Tensor] | None] = [None] * len(mine)
    keys_values = [k.contiguous(), v.contiguous()]
    for step in range(ranks.size):
        owner = (ranks.rank - step) % ranks.size
        received, posted = [], []
        if step < ranks.size - 1:
            received, posted = line.post(keys_values, (owner - 1) % ranks.size)
        for i, (at, start, end) in enumerate(mine):
            queries = q[:, :, at : at + end - start]
            for key_at, key_start, key_end in cut.segments(owner):
                first = merged[i] is None  # computed even if no key is seen: it counts the sinks
                if not first and not call.sees((start, end), (key_start, key_end)):
                    continue
                keys = (x[:, :, key_at : key_at + key_end - key_start] for x in keys_values)
                if first:
                    merged[i] = forward(queries, *keys, call, start - key_start, wide)
                else:
                    accumulate(queries, *keys, call.but(sinks=None), start - key_start, *merged[i])
        for work in posted:
            work.wait()
        keys_values = received
    for (at, start, end), found in zip(mine, merged, strict=True):
        rows = slice(at, at + end - start)
        out[:, :, rows], lse[:, :, rows] = found
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
    """(dq, dk, dv, dsinks). dq stays on its rank. The sums of dk and dv travel with their keys,
    each rank adds its queries' share, and the last step returns them to their owner."""
    wide = lse.dtype
    line = _Line(cut, ranks)
    mine = cut.segments(ranks.rank)
    dq = q.new_zeros(q.shape, dtype=wide)
    keys_values = [k.contiguous(), v.contiguous()]
    sums = [x.new_zeros(x.shape, dtype=wide) for x in keys_values]
    # The CPU corrects the gradient of sinks for the rounding of out (see _of_sinks). GPUs do not,
    # on one rank or many.
    shares = (
        None
        if call.sinks is None or q.device.type != "cpu"
        else call.sinks.new_zeros(call.sinks.shape, dtype=wide)
    )
    of_block = call.but(sinks=None if shares is None else call.sinks.to(wide))
    for step in range(ranks.size):
        owner = (ranks.rank - step) % ranks.size
        before = (owner - 1) % ranks.size
        last = step == ranks.size - 1
        received, posted = line.post(keys_values, before) if not last else ([], [])
        for at, start, end in mine:
            rows = slice(at, at + end - start)
            for key_at, key_start, key_end in cut.segments(owner):
                if not call.sees((start, end), (key_start, key_end)):
                    continue
                keys = slice(key_at, key_at + key_end - key_start)
                grads = backward(
                    *(x if x is None else x[:, :, rows] for x in (grad_out, grad_lse, q)),
                    *(x[:, :, keys] for x in keys_values),
                    out[:, :, rows],
                    lse[:, :, rows],
                    of_block,
                    start - key_start,
                    part=True,
                )
                dq[:, :, rows] += grads[0]
                if shares is not None:
                    shares += grads[3]
                for total, grad in zip(sums, grads[1:3]):
                    total[:, :, keys] += grad
        for work in posted:
            work.wait()
        sums, summed = line.post(sums, before)
        for work in summed:
            work.wait()
        keys_values = received
    dsinks = None
    if call.sinks is not None:
        dsinks = _of_sinks(grad_out, grad_lse, out, lse, call.sinks, shares)
    return dq, *sums, sum_sinks(dsinks, call, lse, ranks)


def _of_sinks(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor,
    shares: Tensor | None,
) -> Tensor:
    """The gradient [Hq] of the sinks over this rank's rows: -sum p (dO . O - dlse), where p =
    exp(sink
    - lse) is the sink's probability.

    shares: if given, the keys' shares of a form that corrects for the rounding of out: -sum p
    ((dO . O - dlse) (1 - p) - dlse) + shares.

    In a row where only the sink has probability, out is 0, and dO . O counts as 0 even if dO is
    inf.
    """
    alone = lse <= sinks.to(lse.dtype)[:, None]
    delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1).masked_fill(alone, 0)
    if grad_lse is not None:
        delta = delta - grad_lse
    p = torch.exp(sinks.to(lse.dtype)[:, None] - lse).masked_fill((sinks == -torch.inf)[:, None], 0)
    if shares is not None:
        delta = delta * (1 - p) if grad_lse is None else delta * (1 - p) - grad_lse
    total = -(p * delta).sum((0, 2), dtype=torch.float64).to(lse.dtype)
    return total if shares is None else total + shares
