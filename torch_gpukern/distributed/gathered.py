# SPDX-License-Identifier: BSD-3-Clause
"""context_parallel_attn, mode all_gather: every rank gets all keys, some heads at a time, and attends with its queries."""

import torch
from torch import Tensor

from . import transport
from .local import Call, backward, forward, sum_sinks
from .ranks import Ranks
from .sequence import Cut

# From this many bytes of K and V of all ranks on, they travel in parts of the heads: one part's attention hides the next.
_PARTS_BYTES = 8 << 20


def _head_parts(q: Tensor, k: Tensor, v: Tensor, ranks: Ranks) -> list[tuple[slice, slice]]:
    """(heads of q, heads of k and v) of each part; one on the CPU, where nothing travels beside a kernel."""
    heads, group = k.shape[1], q.shape[1] // max(k.shape[1], 1)
    sent = (k.numel() + v.numel()) * k.element_size() * (ranks.size - 1)
    parts = 2 if k.is_cuda and sent >= _PARTS_BYTES and heads % 2 == 0 else 1
    each = heads // parts
    return [(slice(i * each * group, (i + 1) * each * group), slice(i * each, (i + 1) * each)) for i in range(parts)]


class _Part:
    """Some heads of a call, their K and V on their way from all ranks."""

    def __init__(self, heads: tuple[slice, slice], q: Tensor, k: Tensor, v: Tensor, call: Call, cut: Cut, ranks: Ranks):
        self.heads, of_kv = heads
        self.q, self.call = q[:, self.heads], call.of_heads(self.heads.start, self.heads.stop - self.heads.start)
        self._moving = [transport.Gather(x[:, of_kv].movedim(2, 0), cut, ranks) for x in (k, v)]

    def keys(self) -> list[Tensor]:
        """K and V [B, Hkv, S, D] of all ranks' tokens, stored [S, B, Hkv, D]; on CUDA contiguous, which is read faster."""
        keys = [moving.wait().movedim(0, 2) for moving in self._moving]
        return [x.contiguous() for x in keys] if keys[0].is_cuda else keys


def attend(q: Tensor, k: Tensor, v: Tensor, call: Call, cut: Cut, ranks: Ranks, out: Tensor, lse: Tensor) -> None:
    """Fills out and lse."""
    for part in [_Part(heads, q, k, v, call, cut, ranks) for heads in _head_parts(q, k, v, ranks)]:
        keys = part.keys()
        for at, start, end in cut.segments(ranks.rank):
            rows = slice(at, at + end - start)
            found = forward(part.q[:, :, rows], *keys, part.call, start, q.dtype)
            out[:, part.heads, rows], lse[:, part.heads, rows] = found


def differentiate(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, cut: Cut,
    ranks: Ranks,
):  # fmt: skip
    """(dq, dk, dv, dsinks); the shares of dk and dv go to their tokens' ranks."""
    dq, on_their_way, dsinks = torch.empty_like(q), [], []
    for part in [_Part(heads, q, k, v, call, cut, ranks) for heads in _head_parts(q, k, v, ranks)]:
        keys = part.keys()
        shapes = ((x.shape[2], *x.shape[:2], x.shape[3]) for x in keys)
        sums = [q.new_empty(shape, dtype=lse.dtype).movedim(0, 2) for shape in shapes]  # tokens first, as they are sent
        of_sinks = None
        for i, (at, start, end) in enumerate(cut.segments(ranks.rank)):
            rows = slice(at, at + end - start)
            given = (x if x is None else x[:, part.heads, rows] for x in (grad_out, grad_lse, q))
            results = (x[:, part.heads, rows] for x in (out, lse))
            grads = backward(*given, *keys, *results, part.call, start, part=False)
            dq[:, part.heads, rows] = grads[0]
            for total, grad in zip(sums, grads[1:3], strict=True):
                total.add_(grad) if i else total.copy_(grad)
            of_sinks = grads[3] if of_sinks is None or grads[3] is None else of_sinks + grads[3]
        if not cut.segments(ranks.rank):  # this rank has no token
            sums = [x.zero_() for x in sums]
        dsinks.append(of_sinks)
        sums = [x.movedim(2, 0) for x in sums]
        on_their_way.append([(x, transport.ToOwners(cut, ranks, x).send_all(x, cut)) for x in sums])
    parts = [
        [moving.add(transport.tokens_of(x, cut, ranks.rank), k.dtype).movedim(0, 2) for x, moving in both]
        for both in on_their_way
    ]
    dk, dv = (x[0] if len(x) == 1 else torch.cat(x, 1) for x in zip(*parts, strict=True))
    mine = None if dsinks[0] is None else torch.cat(dsinks)
    return dq, dk, dv, sum_sinks(mine, call, lse, ranks)
