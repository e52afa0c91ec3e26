# SPDX-License-Identifier: BSD-3-Clause
"""A rank's own attention in context parallelism: a consecutive run of queries over a run of keys,
each at its place in the whole sequence. gathered.py, ring.py and ulysses.py call it."""

from typing import Any

import torch
from torch import Tensor

from .._library import are_deterministic, ops
from ..ops.fakes import stats_dtype
from ..ops.rules import Rules
from . import transport
from .ranks import Ranks


class Call(Rules):
    """The arguments of an attention call other than q, k and v (scale, masks, sinks and so on)."""

    def facts(self) -> dict[str, Any]:
        """The arguments for `agree`: dtype and shape of tensors, values of others."""
        return {
            name: f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else x
            for name, x in self.items()
        }

    def kind(self) -> tuple:
        """The same as a dictionary key: dtype, shape and device of tensors, values of others."""
        return tuple(
            (x.dtype, x.shape, x.device) if isinstance(x, Tensor) else x for x in self.values()
        )

    def check(self, what: str, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Raises what `flash_attn` would, before anything is sent. It runs a call without
        tokens."""
        try:
            none = (x[:, :, :0] for x in (q, k, v))
            ops.flash_attn_fwd(*none, **self)
        except ValueError as error:
            raise ValueError(f"{what}: {str(error).partition(': ')[2] or error}") from None

    def of_heads(self, first: int, heads: int) -> "Call":
        """The same call for q's heads [first, first + heads)."""
        slopes, sinks = self.alibi_slopes, self.sinks
        return self.but(
            alibi_slopes=None if slopes is None else slopes[..., first : first + heads],
            sinks=None if sinks is None else sinks[first : first + heads],
        )

    def last_seen(self, end: int, tokens: int) -> int:
        """The number of leading keys, of `tokens`, that queries before `end` may see."""
        right = 0 if self.is_causal else self.window_right
        return tokens if right < 0 else min(tokens, end + right)

    def sees(self, queries: tuple[int, int], keys: tuple[int, int]) -> bool:
        """Whether any query of [start, end) sees any key of [start, end)."""
        (q0, q1), (k0, k1) = queries, keys
        right = 0 if self.is_causal else self.window_right
        return (right < 0 or k0 <= q1 - 1 + right) and (
            self.window_left < 0 or k1 - 1 >= q0 - self.window_left
        )


def empty_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised out [B, Hq, Sq, Dv] and lse [B, Hq, Sq] of a call with these q and v."""
    batch, heads, tokens, _ = q.shape
    if q.stride(1) < q.stride(2):
        out = q.new_empty((batch, tokens, heads, v.shape[3])).transpose(1, 2)
    else:
        out = q.new_empty((batch, heads, tokens, v.shape[3]))
    return out, q.new_empty((batch, heads, tokens), dtype=stats_dtype(q))


def forward(
    q: Tensor, k: Tensor, v: Tensor, call: Call, diagonal: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(out, lse) of queries whose first stands at key `diagonal`. dtype: out's, q's or float32."""
    return ops.flash_attn_fwd(q, k, v, diagonal=diagonal, out_dtype=dtype, **call)


def forward_into(out: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call, diagonal: int) -> Tensor:
    """Writes out [B, Hq, Sq, Dv], which may be some rows of a larger tensor, and returns lse."""
    lse = q.new_empty(q.shape[:3], dtype=stats_dtype(q))
    ops.flash_attn_into(q, k, v, out, lse, diagonal=diagonal, **call)
    return lse


def accumulate(
    q: Tensor, k: Tensor, v: Tensor, call: Call, diagonal: int, out: Tensor, lse: Tensor
) -> None:
    """Merges the attention over more keys into out and lse, which are float32 (float64)."""
    ops.flash_attn_accumulate(q, k, v, out, lse, diagonal=diagonal, **call)


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: Call,
    diagonal: int,
    part: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv, dsinks); dq, dk and dv are float32 (float64 with float64).

    part: k and v are only some of the keys that out and lse were computed from. Then dq is the
    share of these keys. dsinks is their share on the CPU (gpukern.h); on a GPU it is not
    computed.
    """
    grads = ops.flash_attn_bwd(
        grad_out, q, k, v, out, lse, grad_lse, diagonal=diagonal, deterministic=are_deterministic(),
        grad_dtype=lse.dtype, is_part=part, **call,
    )  # fmt: skip
    return *grads[:3], None if call.sinks is None else grads[3]


def sum_sinks(dsinks: Tensor | None, call: Call, lse: Tensor, ranks: Ranks) -> Tensor | None:
    """The gradient [Hq] of the sinks, summed over all ranks' rows; None without sinks."""
    if call.sinks is None:
        return None
    mine = (
        call.sinks.new_zeros(call.sinks.shape, dtype=lse.dtype)
        if dsinks is None
        else dsinks.to(lse.dtype)
    )
    return transport.sum_of_all(mine, ranks)
