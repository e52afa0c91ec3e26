# SPDX-License-Identifier: BSD-3-Clause
"""The public functions; each module adds to its C++ ops what only Python can register."""

from .attn_merge import attn_merge
from .define import tag_compiled_code
from .flash_attn import flash_attn
from .flash_attn_varlen import flash_attn_varlen
from .gemm import gemm
from .grouped_gemm import grouped_gemm
from .linear import linear
from .paged_attn import kv_cache_write, paged_attn
from .quantize import dequantize, quantize, rms_norm_quantize, silu_mul_quantize
from .scaled_gemm import scaled_gemm
from .sparse_gemm import sparse_gemm, sparse_pack
from .weight_gemm import pack_weight, unpack_weight, weight_gemm

__all__ = [
    "attn_merge",
    "dequantize",
    "flash_attn",
    "flash_attn_varlen",
    "gemm",
    "grouped_gemm",
    "kv_cache_write",
    "linear",
    "pack_weight",
    "paged_attn",
    "quantize",
    "rms_norm_quantize",
    "scaled_gemm",
    "silu_mul_quantize",
    "sparse_gemm",
    "sparse_pack",
    "unpack_weight",
    "weight_gemm",
]

tag_compiled_code()
