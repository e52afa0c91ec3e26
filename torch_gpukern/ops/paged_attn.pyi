# SPDX-License-Identifier: BSD-3-Clause
"""Types of paged_attn by the value of return_lse, which one signature cannot say."""

from typing import Literal, overload

from torch import Tensor

@overload
def paged_attn(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    cu_seqlens_q: Tensor | None = ...,
    max_seqlen_q: int = ...,
    scale: float | None = ...,
    window_left: int = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    k_scale: Tensor | None = ...,
    v_scale: Tensor | None = ...,
    is_causal: bool = ...,
    kv_start: Tensor | None = ...,
    window_right: int = ...,
    allow_short: bool = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def paged_attn(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    cu_seqlens_q: Tensor | None = ...,
    max_seqlen_q: int = ...,
    scale: float | None = ...,
    window_left: int = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    k_scale: Tensor | None = ...,
    v_scale: Tensor | None = ...,
    is_causal: bool = ...,
    kv_start: Tensor | None = ...,
    window_right: int = ...,
    allow_short: bool = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def paged_attn(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    cu_seqlens_q: Tensor | None = ...,
    max_seqlen_q: int = ...,
    scale: float | None = ...,
    window_left: int = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    k_scale: Tensor | None = ...,
    v_scale: Tensor | None = ...,
    is_causal: bool = ...,
    kv_start: Tensor | None = ...,
    window_right: int = ...,
    allow_short: bool = ...,
    return_lse: bool = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...
def kv_cache_write(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    k_scale: Tensor | None = ...,
    v_scale: Tensor | None = ...,
) -> None: ...
