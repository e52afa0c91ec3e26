# SPDX-License-Identifier: BSD-3-Clause
"""A rank's own attention: queries of one run of tokens over a run of keys, both somewhere in the
whole sequence."""

from typing import Any

import torch
from torch import Tensor

from .._library import are_deterministic, ops
from ..ops.fakes import stats_dtype
from ..ops.rules import Rules
from . import transport
from .ranks import Ranks


class Call(Rules):
    """What an attention call says beside q, k and v: the rules that this package's ops take."""

    def facts(self) -> dict[str, Any]:
        """For the ranks' agreement."""
        return {
            name: f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else x
            for name, x in self.items()
        }

    def kind(self) -> tuple:
        """The same, as a key: of tensors what a call may be refused for."""
        return tuple(
            (x.dtype, x.shape, x.device) if isinstance(x, Tensor) else x for x in self.values()
        )

    def check(self, what: str, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Raises what the op would, before anything is sent: by a call of no token."""
        try:
            none = (x[:, :, :0] for x in (q, k, v))
            ops.flash_attn_fwd(*none, **self)
        except ValueError as error:
            raise ValueError(f"{what}: {str(error).partition(': ')[2] or error}") from None

    def of_heads(self, first: int, heads: int) -> "Call":
        """The call of some of q's heads."""
        slopes, sinks = self.alibi_slopes, self.sinks
        return self.but(
            alibi_slopes=None if slopes is None else slopes[..., first : first + heads],
            sinks=None if sinks is None else sinks[first : first + heads],
        )

    def last_seen(self, end: int, tokens: int) -> int:
        """How many of the first keys of a sequence queries before `end` may see."""
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
    """(out, lse) of a call with these q and v, not filled."""
    batch, heads, tokens, _ = q.shape
    if q.stride(1) < q.stride(2):
        out = q.new_empty((batch, tokens, heads, v.shape[3])).transpose(1, 2)
    else:
        out = q.new_empty((batch, heads, tokens, v.shape[3]))
    return out, q.new_empty((batch, heads, tokens), dtype=stats_dtype(q))


def forward(
    q: Tensor, k: Tensor, v: Tensor, call: Call, diagonal: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(out, lse) of queries that stand at key `diagonal` and after. dtype: out's, q's or float32."""
    return ops.flash_attn_fwd(q, k, v, diagonal=diagonal, out_dtype=dtype, **call)


def forward_into(out: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call, diagonal: int) -> Tensor:
    """lse; out [B, Hq, Sq, Dv] may be some rows of a larger tensor."""
    lse = q.new_empty(q.shape[:3], dtype=stats_dtype(q))
    ops.flash_attn_into(q, k, v, out, lse, diagonal=diagonal, **call)
    return lse


def accumulate(
    q: Tensor, k: Tensor, v: Tensor, call: Call, diagonal: int, out: Tensor, lse: Tensor
) -> None:
    """Joins the attention over more keys to out and lse, which are float32 (float64)."""
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
    """(dq, dk, dv, dsinks), the first three float32 (float64 with float64).

    part: k and v are some of the keys that out and lse are of. dq is then these keys' share, and so
    is dsinks on the CPU (gpukern.h); on a GPU there is none.
    """
    grads = ops.flash_attn_bwd(
        grad_out, q, k, v, out, lse, grad_lse, diagonal=diagonal, deterministic=are_deterministic(),
        grad_dtype=lse.dtype, is_part=part, **call,
    )  # fmt: skip
    return *grads[:3], None if call.sinks is None else grads[3]


def sum_sinks(dsinks: Tensor | None, call: Call, lse: Tensor, ranks: Ranks) -> Tensor | None:
    """The sinks' gradient of all ranks' rows."""
    if call.sinks is None:
        return None
    mine = (
        call.sinks.new_zeros(call.sinks.shape, dtype=lse.dtype)
        if dsinks is None
        else dsinks.to(lse.dtype)
    )
    return transport.sum_of_all(mine, ranks)
