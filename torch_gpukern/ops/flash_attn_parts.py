# SPDX-License-Identifier: BSD-3-Clause
"""The raw ops that write attention into given tensors (csrc/include/gpukern.h). Attention over
ranks calls them for parts of a sequence.

    flash_attn_into(q, k, v, out, lse, is_causal=False, ...the rules of flash_attn)
    flash_attn_accumulate(q, k, v, out, lse, is_causal=False, ...the rules of flash_attn)

out is [B, Hq, Sq, Dv] with any leading strides, so it may be a part of a larger tensor. lse is
[B, Hq, Sq]. They have no gradient and no dropout.

flash_attn_into: out has q's dtype or float32, lse is contiguous. Both become what
``flash_attn_fwd(q, k, v, ..., out_dtype=out.dtype)`` returns.

flash_attn_accumulate merges the attention over some keys into the attention over others. out is
float32 (float64 with float64). Both become what ``attn_merge(out, lse, *flash_attn_fwd(q, k, v,
..., out_dtype=out.dtype))`` returns, up to rounding. A row that has seen no key so far has lse
-inf, and its out may hold anything. Only one of the merged calls may have a sink.
"""

from functools import partial

from . import attention
from .in_place import define_in_place

__all__: list[str] = []


def _symbolic(op, q, k, v, out, lse, kv_start, kv_end, q_start, **_):
    bounds = {"kv_start": (kv_start, "B"), "kv_end": (kv_end, "B"), "q_start": (q_start, "B")}
    results = {"out": (out, "B Hq Sq Dv"), "lse": (lse, "B Hq Sq")}
    attention.sizes(op, q, k, v, **results, **bounds)
    return ()


for _name in ("flash_attn_into", "flash_attn_accumulate"):
    define_in_place(_name, partial(_symbolic, _name), ("out", "lse"))
