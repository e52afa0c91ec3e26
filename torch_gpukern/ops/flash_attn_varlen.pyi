# SPDX-License-Identifier: BSD-3-Clause
"""Types of flash_attn_varlen by the value of return_lse, which one signature cannot say."""

from typing import Literal, overload

import torch
from torch import Tensor

@overload
def flash_attn_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    is_causal: bool = ...,
    scale: float | None = ...,
    window_left: int = ...,
    window_right: int = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    out_dtype: torch.dtype | None = ...,
    q_scale: Tensor | None = ...,
    k_scale: Tensor | None = ...,
    v_scale: Tensor | None = ...,
    v_mean: Tensor | None = ...,
    accumulate: Literal["auto", "fast", "precise"] = ...,
    dropout_p: float = ...,
    dropout_seed: Tensor | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def flash_attn_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    is_causal: bool = ...,
    scale: float | None = ...,
    window_left: int = ...,
    window_right: int = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    out_dtype: torch.dtype | None = ...,
    q_scale: Tensor | None = ...,
    k_scale: Tensor | None = ...,
    v_scale: Tensor | None = ...,
    v_mean: Tensor | None = ...,
    accumulate: Literal["auto", "fast", "precise"] = ...,
    dropout_p: float = ...,
    dropout_seed: Tensor | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    is_causal: bool = ...,
    scale: float | None = ...,
    window_left: int = ...,
    window_right: int = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    out_dtype: torch.dtype | None = ...,
    q_scale: Tensor | None = ...,
    k_scale: Tensor | None = ...,
    v_scale: Tensor | None = ...,
    v_mean: Tensor | None = ...,
    accumulate: Literal["auto", "fast", "precise"] = ...,
    dropout_p: float = ...,
    dropout_seed: Tensor | None = ...,
    return_lse: bool = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...
