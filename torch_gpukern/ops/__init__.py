# SPDX-License-Identifier: BSD-3-Clause
"""The public functions; each module adds to its C++ ops what only Python can register."""

from .attn_merge import attn_merge
from .cross_entropy import cross_entropy
from .define import tag_compiled_code
from .flash_attn import flash_attn
from .flash_attn_varlen import flash_attn_varlen
from .gemm import gemm
from .glu import geglu, swiglu
from .linear import linear
from .norm import layer_norm, rms_norm
from .paged_attn import kv_cache_write, paged_attn
from .rope import rope
from .softmax import log_softmax, softmax

__all__ = [
    "attn_merge",
    "cross_entropy",
    "flash_attn",
    "flash_attn_varlen",
    "geglu",
    "gemm",
    "kv_cache_write",
    "layer_norm",
    "linear",
    "log_softmax",
    "paged_attn",
    "rms_norm",
    "rope",
    "softmax",
    "swiglu",
]

tag_compiled_code()
