# SPDX-License-Identifier: BSD-3-Clause
"""Types of flash_attn by the value of return_lse, which one signature cannot say."""

from typing import Literal, overload

import torch
from torch import Tensor

@overload
def flash_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = ...,
    scale: float | None = ...,
    diagonal: int = ...,
    window_left: int = ...,
    window_right: int = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    kv_start: Tensor | None = ...,
    kv_end: Tensor | None = ...,
    q_start: Tensor | None = ...,
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
def flash_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = ...,
    scale: float | None = ...,
    diagonal: int = ...,
    window_left: int = ...,
    window_right: int = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    kv_start: Tensor | None = ...,
    kv_end: Tensor | None = ...,
    q_start: Tensor | None = ...,
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
def flash_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = ...,
    scale: float | None = ...,
    diagonal: int = ...,
    window_left: int = ...,
    window_right: int = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    kv_start: Tensor | None = ...,
    kv_end: Tensor | None = ...,
    q_start: Tensor | None = ...,
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
