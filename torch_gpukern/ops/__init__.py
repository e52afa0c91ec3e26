# SPDX-License-Identifier: BSD-3-Clause
"""The public functions. Each module also registers what its C++ ops need from Python: fakes,
gradients, autocast rules, vmap rules."""

from . import flash_attn_parts as flash_attn_parts
from .attn_dropout import attn_dropout_mask
from .attn_merge import attn_merge
from .cross_entropy import cross_entropy
from .define import tag_compiled_code
from .dropout import bias_gelu_dropout, dropout, dropout_add, dropout_mask
from .flash_attn import flash_attn
from .flash_attn_varlen import flash_attn_varlen
from .gemm import gemm
from .glu import geglu, swiglu
from .grouped_gemm import grouped_gemm
from .keywords import keep_defaults_constant
from .kl_div import kl_div
from .linear import linear
from .linear_cross_entropy import linear_cross_entropy
from .linear_kl_div import linear_kl_div as linear_kl_div
from .moe_unpermute import moe_unpermute
from .norm import layer_norm, rms_norm
from .paged_attn import kv_cache_write, kv_cache_write_latent, paged_attn
from .quantize import dequantize, quantize, rms_norm_quantize, silu_mul_quantize
from .quantize_attn import QuantizedAttn, quantize_attn
from .rope import rope
from .rope_kv_write import rope_kv_write
from .sample_tokens import sample_tokens
from .scaled_gemm import scaled_gemm
from .shared_prefix import SharedPrefix
from .softmax import log_softmax, softmax
from .sparse_gemm import sparse_gemm, sparse_pack
from .switches import batch_invariant
from .weight_gemm import pack_weight, unpack_weight, weight_gemm

__all__ = [
    "QuantizedAttn",
    "SharedPrefix",
    "attn_dropout_mask",
    "attn_merge",
    "batch_invariant",
    "bias_gelu_dropout",
    "cross_entropy",
    "dequantize",
    "dropout",
    "dropout_add",
    "dropout_mask",
    "flash_attn",
    "flash_attn_varlen",
    "geglu",
    "gemm",
    "grouped_gemm",
    "kl_div",
    "kv_cache_write",
    "kv_cache_write_latent",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "log_softmax",
    "moe_unpermute",
    "pack_weight",
    "paged_attn",
    "quantize",
    "quantize_attn",
    "rms_norm",
    "rms_norm_quantize",
    "rope",
    "rope_kv_write",
    "sample_tokens",
    "scaled_gemm",
    "silu_mul_quantize",
    "softmax",
    "sparse_gemm",
    "sparse_pack",
    "swiglu",
    "unpack_weight",
    "weight_gemm",
]

for _name in __all__:
    if callable(_public := globals()[_name]) and not isinstance(_public, type):
        keep_defaults_constant(_public)
tag_compiled_code()
