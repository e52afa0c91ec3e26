# SPDX-License-Identifier: BSD-3-Clause
"""flash_attn_accumulate: the raw op that computes attention over some keys and merges it into the
attention over other keys (csrc/include/gpukern.h).

    flash_attn_accumulate(q, k, v, out, lse, is_causal=False, ...the rules of flash_attn)

out is [B, Hq, Sq, Dv] float32 (float64 with float64) with any leading strides, lse [B, Hq, Sq].
Both become what ``attn_merge(out, lse, *flash_attn_fwd(q, k, v, ..., out_dtype=out.dtype))``
returns, up to rounding. A row that has seen no key so far has lse -inf, and its out may hold
anything. Only one of the merged calls may have a sink. No gradient, no dropout.
"""

from functools import partial

from . import attention
from .in_place import define_in_place

__all__: list[str] = []


def symbolic(op, q, k, v, out, lse, kv_start, kv_end, q_start, **_):
    bounds = {"kv_start": (kv_start, "B"), "kv_end": (kv_end, "B"), "q_start": (q_start, "B")}
    held = {"out": (out, "B Hq Sq Dv"), "lse": (lse, "B Hq Sq")}
    attention.sizes(op, q, k, v, **held, **bounds)
    return ()


define_in_place("flash_attn_accumulate", partial(symbolic, "flash_attn_accumulate"), ("out", "lse"))
