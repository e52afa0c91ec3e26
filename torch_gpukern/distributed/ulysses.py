# SPDX-License-Identifier: BSD-3-Clause
"""context_parallel_attn, mode ulysses: an all-to-all turns shards of the sequence into shards of
the heads, each rank computes attention for its heads, and another all-to-all turns the result
back."""

import torch
from torch import Tensor

from .._library import are_deterministic, ops
from . import transport
from .local import Call, empty_results
from .ranks import Ranks
from .sequence import Cut


def _to_heads(x: Tensor, cut: Cut, ranks: Ranks) -> Tensor:
    """From all heads of this rank's tokens, [B, H, its tokens, ...], to this rank's heads of all
    tokens, [B, H / ranks, S, ...]."""
    parts = [part.movedim(2, 0).contiguous() for part in x.chunk(ranks.size, dim=1)]
    received = transport.swap(parts, [cut.tokens(r) for r in range(ranks.size)], ranks)
    whole = torch.cat(
        [received[rank].narrow(0, at, tokens) for rank, at, tokens in cut.order()]
        or [received[0][:0]]
    )
    return whole.movedim(0, 2)


def _to_tokens(x: Tensor, cut: Cut, ranks: Ranks) -> Tensor:
    """The inverse of `_to_heads`: from [B, H / ranks, S, ...] to [B, H, its tokens, ...]."""
    whole = x.movedim(2, 0)
    parts = [transport.tokens_of(whole, cut, r).contiguous() for r in range(ranks.size)]
    received = transport.swap(parts, [cut.tokens(ranks.rank)] * ranks.size, ranks)
    return torch.cat([part.movedim(0, 2) for part in received], dim=1)


def _mine(call: Call, q: Tensor, ranks: Ranks) -> Call:
    heads = q.shape[1] // ranks.size
    return call.of_heads(ranks.rank * heads, heads)


def attend(
    q: Tensor, k: Tensor, v: Tensor, call: Call, cut: Cut, ranks: Ranks
) -> tuple[Tensor, Tensor]:
    """(out, lse)."""
    out, lse = empty_results(q, v)
    whole = (_to_heads(x, cut, ranks) for x in (q, k, v))
    found = ops.flash_attn_fwd(*whole, **_mine(call, q, ranks))
    out.copy_(_to_tokens(found[0], cut, ranks))
    lse.copy_(_to_tokens(found[1], cut, ranks))
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
    whole = [
        x if x is None else _to_heads(x, cut, ranks)
        for x in (grad_out, q, k, v, out, lse, grad_lse)
    ]
    grads = ops.flash_attn_bwd(
        *whole[:5],
        whole[5].contiguous(),
        whole[6],
        deterministic=are_deterministic(),
        **_mine(call, q, ranks),
    )
    dsinks = None if call.sinks is None else torch.cat(transport.all_of(grads[3], ranks))
    return *(_to_tokens(x, cut, ranks) for x in grads[:3]), dsinks
