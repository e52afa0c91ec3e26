# SPDX-License-Identifier: BSD-3-Clause
"""flash_attn_into: the raw op that writes the results of attention into given tensors.

    flash_attn_into(q, k, v, out, lse, is_causal=False, ...the rules of flash_attn)

out is [B, Hq, Sq, Dv] in q's dtype or float32. It may have any leading strides, so it may be a part
of a larger tensor. lse [B, Hq, Sq] is contiguous. Both become what ``flash_attn_fwd(q, k, v, ...,
out_dtype=out.dtype)`` returns. No gradient, no dropout.
"""

from functools import partial

from .flash_attn_accumulate import symbolic
from .in_place import define_in_place

__all__: list[str] = []

define_in_place("flash_attn_into", partial(symbolic, "flash_attn_into"), ("out", "lse"))
