# SPDX-License-Identifier: BSD-3-Clause
"""An attention backend of vLLM over paged_attn and kv_cache_write. vLLM imports this file when the
backend is chosen.

vLLM stores keys and values of a layer in one tensor [num_blocks, heads_kv, block_size, head_dim +
head_dim_v] of any strides. It promises no stable interface. This file was written to vLLM 0.33,
whose signatures are in tests/data/vllm_signatures.json.
"""

from ast import literal_eval
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)

from .. import flash_attn_varlen
from .._library import ops
from .vllm import NAME

_ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
_OLDEST_CUDA = 8  # compute capability
# vLLM's names of 8-bit caches and their dtypes. A value is its code times the layer's _k_scale or
# _v_scale.
_CODES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def _refused(what: str, instead: str) -> NotImplementedError:
    return NotImplementedError(f"{NAME}: {what} is not served; {instead}")


def _check_drafts(vllm_config: Any) -> None:
    """Refuses drafts that form a tree, which would need a mask.

    vLLM 0.33 drafts chains only. Other versions have a setting, speculative_token_tree. It is a text
    that lists a path for each token, in which every number is the index of a child. In a chain every
    token is child 0.
    """
    drafts = getattr(vllm_config, "speculative_config", None)
    tree = getattr(drafts, "speculative_token_tree", None)
    if tree is not None and any(map(any, literal_eval(tree))):
        raise _refused(f"a tree of drafts, speculative_token_tree={tree},", "draft a chain")


@dataclass
class GpukernMetadata:
    """A batch: views of vLLM's own tensors, whose addresses a captured graph may keep."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    causal: bool


class GpukernMetadataBuilder(AttentionMetadataBuilder[GpukernMetadata]):
    # The device reads everything that changes between steps. The host passes only bounds.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    supports_draft_decode_metadata_update = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        _check_drafts(vllm_config)
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> GpukernMetadata:
        batch = common_attn_metadata
        if not isinstance(batch.causal, bool):
            raise _refused("a batch that is causal for only some requests", "use TRITON_ATTN")
        for name in ("mm_req_doc_ranges", "rswa_prefix_lens"):
            if getattr(batch, name, None) is not None:
                raise _refused(name, "use TRITON_ATTN")
        return GpukernMetadata(
            num_actual_tokens=batch.num_actual_tokens,
            max_query_len=batch.max_query_len,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            block_table=batch.block_table_tensor,
            slot_mapping=batch.slot_mapping,
            causal=batch.causal,
        )

    def update_draft_decode_metadata(self, metadata: GpukernMetadata) -> None:
        """Nothing to do: the metadata is views."""


class GpukernImpl(AttentionImpl[GpukernMetadata]):
    """Attention of one layer.

    Args:
        num_heads, head_size, scale, num_kv_heads: vLLM's.
        alibi_slopes, sliding_window, logits_soft_cap, sinks: vLLM's.
        kv_cache_dtype, attn_type, kv_sharing_target_layer_name: vLLM's.

    Any other argument that vLLM may add is refused by name.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **more: Any,
    ) -> None:
        for name, value in more.items():
            if value not in (None, False, -1):
                raise _refused(f"{name}={value}", "use TRITON_ATTN")
        if attn_type not in (AttentionType.DECODER, *_ENCODERS):
            raise _refused(f"attention of type {attn_type}", "use TRITON_ATTN or FLASH_ATTN")
        if kv_cache_dtype not in GpukernBackend.supported_kv_cache_dtypes:
            raise _refused(f"kv_cache_dtype={kv_cache_dtype}", "use auto")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.num_queries_per_kv = num_heads // self.num_kv_heads
        self.alibi_slopes = (
            None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        )
        self.sliding_window = sliding_window
        # vLLM's window counts the query's own key, ours does not
        self.window_left = -1 if sliding_window is None else sliding_window - 1
        self.kv_cache_dtype = kv_cache_dtype
        self.logits_soft_cap = logits_soft_cap or 0.0
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks

    def _caches(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """k_cache and v_cache [num_blocks, block_size, heads_kv, ..], as views. vLLM passes 8-bit
        caches as uint8, so their dtype is set here."""
        code = _CODES.get(self.kv_cache_dtype)
        tokens_first = (kv_cache if code is None else kv_cache.view(code)).transpose(1, 2)
        return tokens_first[..., : self.head_size], tokens_first[..., self.head_size :]

    def _scales(self, layer: torch.nn.Module) -> dict[str, Tensor]:
        """The scales of the layer's keys and values: one for all heads, or one for each."""
        if self.kv_cache_dtype not in _CODES:
            return {}
        scales = {"k_scale": layer._k_scale, "v_scale": layer._v_scale}
        return {
            name: scale.reshape(()) if scale.numel() == 1 else scale
            for name, scale in scales.items()
        }

    def _slopes_and_sinks(
        self, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor | None]:
        """alibi_slopes and sinks as the ops take them. They are converted here and not in __init__,
        because vLLM loads weights after it has created a layer."""
        if self.alibi_slopes is not None and self.alibi_slopes.device != device:
            self.alibi_slopes = self.alibi_slopes.to(device)
        sinks = self.sinks
        if sinks is not None and sinks.dtype not in (torch.float32, dtype):
            sinks = sinks.float()
        return self.alibi_slopes, sinks

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: GpukernMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Writes the attention of query [T, heads, head_dim] to output [T, heads, head_dim_v]. Rows
        behind the batch's tokens are undefined.

        When vLLM profiles memory it passes no attn_metadata. The output is then 0.
        """
        if output_scale is not None or output_block_scale is not None:
            raise _refused(
                "quantised output", "switch the fusion of attention and quantisation off"
            )
        if attn_metadata is None:
            return output.zero_()
        batch, n = attn_metadata, attn_metadata.num_actual_tokens
        slopes, sinks = self._slopes_and_sinks(query.device, query.dtype)
        if self.attn_type in _ENCODERS:
            self._encode(query[:n], key[:n], value[:n], batch, output[:n], slopes, sinks)
            return output
        if not batch.causal and self.window_left >= 0:
            raise _refused("a sliding window that is not causal", "use FLASH_ATTN")
        k_cache, v_cache = self._caches(kv_cache)
        ops.paged_attn.out(
            query[:n],
            k_cache,
            v_cache,
            batch.block_table,
            batch.seq_lens,
            batch.query_start_loc,
            batch.max_query_len,
            self.scale,
            self.window_left,
            self.logits_soft_cap,
            slopes,
            sinks,
            **self._scales(layer),
            is_causal=batch.causal,
            out=output[:n],
        )
        return output

    def _encode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: GpukernMetadata,
        out: Tensor,
        slopes: Tensor | None,
        sinks: Tensor | None,
    ) -> None:
        """Attention of an encoder: every token of a request sees every other, and the cache is not
        read."""
        bounds, longest, window = batch.query_start_loc, batch.max_query_len, self.window_left
        rules = {
            "scale": self.scale,
            "softcap": self.logits_soft_cap,
            "alibi_slopes": slopes,
            "sinks": sinks,
        }
        found = flash_attn_varlen(
            q,
            k,
            v,
            bounds,
            bounds,
            longest,
            longest,
            window_left=window,
            window_right=window,
            **rules,
        )
        out.copy_(found)

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """Writes key and value [T, heads_kv, ..] of the tokens that have a slot."""
        if self.attn_type not in _ENCODERS:
            n = min(key.shape[0], slot_mapping.shape[0])  # either may have padding at its end
            ops.kv_cache_write(
                key[:n], value[:n], *self._caches(kv_cache), slot_mapping[:n], **self._scales(layer)
            )


class GpukernBackend(AttentionBackend):
    """What the backend supports. vLLM asks this before it chooses a backend."""

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", *_CODES]

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[GpukernImpl]:
        return GpukernImpl

    @staticmethod
    def get_builder_cls() -> type[GpukernMetadataBuilder]:
        return GpukernMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and 0 < head_size <= 256

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (AttentionType.DECODER, *_ENCODERS)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability.major >= _OLDEST_CUDA

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        if (
            kv_cache_dtype not in (None, "auto", *_CODES)
            and str(dtype) != f"torch.{kv_cache_dtype}"
        ):
            return f"a cache of {kv_cache_dtype} for queries of {dtype}"
        return None
