# SPDX-License-Identifier: BSD-3-Clause
"""The public functions; each module adds to its C++ ops what only Python can register."""

from .attn_merge import attn_merge
from .define import tag_compiled_code
from .flash_attn import flash_attn
from .flash_attn_varlen import flash_attn_varlen
from .gemm import gemm
from .linear import linear
from .paged_attn import kv_cache_write, paged_attn

__all__ = ["attn_merge", "flash_attn", "flash_attn_varlen", "gemm", "kv_cache_write", "linear", "paged_attn"]

tag_compiled_code()
