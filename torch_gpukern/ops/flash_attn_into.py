# SPDX-License-Identifier: BSD-3-Clause
"""flash_attn_into: the raw op, attention whose results go to the caller's memory.

    flash_attn_into(q, k, v, out, lse, is_causal=False, ...the rules of flash_attn)

out [B, Hq, Sq, Dv], q's dtype or float32, may have any leading strides: some of a larger tensor's
rows. lse [B, Hq, Sq] is contiguous. Both become what ``flash_attn_fwd(q, k, v, ...,
out_dtype=out.dtype)`` returns. No gradient, no dropout.
"""

from functools import partial

from .flash_attn_accumulate import symbolic
from .in_place import define_in_place

__all__: list[str] = []

define_in_place("flash_attn_into", partial(symbolic, "flash_attn_into"), ("out", "lse"))
