# SPDX-License-Identifier: BSD-3-Clause
"""A backend of vLLM for latent attention (MLA) over paged_attn. vLLM imports this file when the
backend is chosen.

The backend only decodes: it attends from queries that are already multiplied by the projection of keys
to pages [num_blocks, block_size, latent + rotary]. vLLM itself projects, writes the cache and attends to
long prompts. This file was written to vLLM 0.33, whose signatures are in tests/data/vllm_signatures.json.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, MultipleOf

from .. import paged_attn
from .vllm import NAME_MLA

_OLDEST_CUDA = 8  # compute capability


def _refused(what: str, instead: str) -> NotImplementedError:
    return NotImplementedError(f"{NAME_MLA}: {what} is not served; {instead}")


class GpukernMLAMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    # All requests of a captured step have the same number of tokens. Lengths and pages are read on the
    # device.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.UNIFORM


class GpukernMLAImpl(MLACommonImpl[MLACommonMetadata]):
    """Decoding of one layer.

    Args:
        num_heads, head_size, scale, num_kv_heads: vLLM's.
        alibi_slopes, sliding_window, logits_soft_cap: vLLM's; refused if they are given.
        attn_type: vLLM's; refused unless it is that of a decoder.
        kv_cache_dtype, kv_sharing_target_layer_name: vLLM's.
        mla: vLLM's arguments of latent attention.
    """

    can_return_lse_for_decode: bool = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla: Any,
    ) -> None:
        rules = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
        }
        for name, rule in rules.items():
            if rule:
                raise _refused(name, "use TRITON_MLA")
        if attn_type != AttentionType.DECODER:
            raise _refused(f"attention of type {attn_type}", "use TRITON_MLA")
        if kv_cache_dtype not in GpukernMLABackend.supported_kv_cache_dtypes:
            raise _refused(f"kv_cache_dtype={kv_cache_dtype}", "use auto")
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla,
        )

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: MLACommonMetadata,
        layer: torch.nn.Module,
    ) -> tuple[Tensor, Tensor | None]:
        """q [T, heads, latent + rotary], or its two parts -> [T, heads, latent], and the natural lse
        [T, heads] if vLLM needs it. All requests have the same number of tokens."""
        batch = attn_metadata.decode
        queries = torch.cat(q, -1) if isinstance(q, tuple) else q
        rows = kv_c_and_k_pe_cache.unsqueeze(2)
        pages = rows, rows[..., : self.kv_lora_rank]
        out, lse = paged_attn(
            queries,
            *pages,
            batch.block_table,
            batch.seq_lens,
            scale=float(self.scale),
            is_causal=attn_metadata.causal,
            return_lse=True,
        )
        return out, lse if self.need_to_return_lse_for_decode else None


class GpukernMLABackend(MLACommonBackend):
    """What the backend supports. vLLM asks this before it chooses a backend."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return NAME_MLA

    @staticmethod
    def get_impl_cls() -> type[GpukernMLAImpl]:
        return GpukernMLAImpl

    @staticmethod
    def get_builder_cls() -> type[GpukernMLAMetadataBuilder]:
        return GpukernMLAMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability.major >= _OLDEST_CUDA
