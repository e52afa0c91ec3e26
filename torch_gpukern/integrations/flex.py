# SPDX-License-Identifier: BSD-3-Clause
"""FlexAttention's signature on gpukern: masks by BlockMask, and three changes of scores.

::

    from torch.nn.attention.flex_attention import create_block_mask
    from torch_gpukern.integrations.flex import alibi, flex_attention

    block_mask = create_block_mask(mask_mod, B, H, Sq, Sk, device=q.device)
    out = flex_attention(q, k, v, score_mod=alibi(slopes), block_mask=block_mask)

A BlockMask of any mask_mod is taken. mask_mod is evaluated once, for all pairs of positions. As in
FlexAttention, it decides for the blocks that the BlockMask lists as partial. Full blocks are seen
completely, and other blocks not at all. A score_mod is a program, which kernels that are compiled
ahead cannot run. Only the three that this module makes are taken.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._library import NAMESPACE
from ..masks import AttnMask, attn_mask_blocks, attn_mask_of
from ..ops.attn_mask import TILE
from ..ops.flash_attn import flash_attn

__all__ = ["ScoreMod", "alibi", "bias", "flex_attention", "mask_of", "softcap"]


@dataclass(frozen=True)
class ScoreMod:
    """A change of scores as arguments of `flash_attn`. alibi, softcap and bias make one."""

    arguments: dict[str, Any]


def alibi(slopes: Tensor) -> ScoreMod:
    """score - slopes[h] * |i - j|; slopes [Hq] or [B, Hq] float32."""
    return ScoreMod({"alibi_slopes": slopes})


def softcap(x: float) -> ScoreMod:
    """x * tanh(score / x)."""
    return ScoreMod({"softcap": x})


def bias(t: Tensor) -> ScoreMod:
    """score + t[b, h, i, j]; t broadcasts to [B, Hq, Sq, Sk] and has a gradient."""
    return ScoreMod({"bias": t})


def mask_of(block_mask: Any) -> AttnMask:
    """A BlockMask as an `AttnMask`, made once for each BlockMask and kept with it. It is made again
    if the BlockMask has another mask_mod, other lists or other lengths since."""
    source = (block_mask.mask_mod, *_lists(block_mask))
    lengths = tuple(block_mask.seq_lengths)
    kept = getattr(block_mask, "_gpukern_mask", None)
    if kept is not None:
        mask, its_lengths, its_source = kept
        if its_lengths == lengths and all(x is y for x, y in zip(its_source, source, strict=True)):
            return mask
    mask = _made(block_mask)
    block_mask._gpukern_mask = mask, lengths, source
    return mask


def _lists(block_mask: Any) -> tuple[Tensor | None, ...]:
    return (
        block_mask.kv_num_blocks,
        block_mask.kv_indices,
        block_mask.full_kv_num_blocks,
        block_mask.full_kv_indices,
    )


def _made(block_mask: Any) -> AttnMask:
    from torch.nn.attention.flex_attention import create_mask

    seq_q, seq_k = block_mask.seq_lengths
    num, indices, full_num, full_indices = lists = _lists(block_mask)
    dense = create_mask(block_mask.mask_mod, *num.shape[:2], seq_q, seq_k, device=num.device)
    if tuple(block_mask.BLOCK_SIZE) == (TILE, TILE):
        return attn_mask_blocks(*lists, mask=dense, seq_q=seq_q, seq_k=seq_k)
    dense = dense & _listed(num, indices, block_mask)
    if full_num is not None:
        dense = dense | _listed(full_num, full_indices, block_mask)
    return attn_mask_of(dense)


def _listed(num: Tensor, indices: Tensor, block_mask: Any) -> Tensor:
    """The pairs in the blocks of one list, bool [B, H, Sq, Sk]."""
    seq_q, seq_k = block_mask.seq_lengths
    size_q, size_k = block_mask.BLOCK_SIZE
    columns = -(-seq_k // size_k)
    used = torch.arange(indices.shape[-1], device=num.device) < num[..., None]
    # entries that are not used mark one column more, which is cut off
    column = torch.where(used & (indices >= 0), indices, columns).clamp(max=columns).long()
    blocks = torch.zeros(*num.shape, columns + 1, dtype=torch.bool, device=num.device)
    blocks.scatter_(-1, column, True)
    rows = torch.arange(seq_q, device=num.device) // size_q
    keys = torch.arange(seq_k, device=num.device) // size_k
    return blocks[:, :, rows[:, None], keys]


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    return_aux: Any = None,
) -> Any:
    """torch.nn.attention.flex_attention.flex_attention by `flash_attn`.

    Args:
        query, key, value: [B, Hq, Sq, D], [B, Hkv, Sk, D], [B, Hkv, Sk, Dv].
        score_mod: None, or what `alibi`, `softcap` or `bias` of this module returned.
        block_mask: None, a BlockMask, or an `AttnMask`.
        scale: as in `flash_attn`.
        enable_gqa: whether key and value may have fewer heads than query.
        return_lse: also return lse [B, Hq, Sq], natural logarithms. FlexAttention's newer name for
            it is return_aux.
        kernel_options: ignored; they choose among FlexAttention's own kernels.
        return_aux: None, or an AuxRequest: also return an AuxOutput, whose lse is that of
            return_lse. Its max_scores is refused.

    Raises:
        ValueError: a score_mod that this module did not make; a block_mask that is no mask; fewer
            heads of key without enable_gqa; return_lse beside return_aux; a request of max_scores.
    """
    if return_aux is not None:
        if return_lse:
            raise ValueError(
                f"{NAMESPACE}::flex_attention: return_lse and return_aux are given; pass "
                "only return_aux=AuxRequest(lse=True)"
            )
        if return_aux.max_scores:
            raise ValueError(
                f"{NAMESPACE}::flex_attention: return_aux requests max_scores, which flash_attn "
                "does not keep; request only lse"
            )
    if score_mod is not None and not isinstance(score_mod, ScoreMod):
        raise ValueError(
            f"{NAMESPACE}::flex_attention: score_mod must be None, alibi(slopes), softcap(x) or "
            f"bias(t) of "
            f"torch_gpukern.integrations.flex, got {score_mod!r}"
        )
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"{NAMESPACE}::flex_attention: key has {key.shape[1]} heads, query has "
            f"{query.shape[1]}; pass enable_gqa=True"
        )
    if block_mask is not None and not isinstance(block_mask, AttnMask):
        if not hasattr(block_mask, "mask_mod"):
            raise ValueError(
                f"{NAMESPACE}::flex_attention: block_mask must be None, a BlockMask or an AttnMask, "
                f"got {type(block_mask).__name__}; flash_attn takes a bool tensor as attn_mask"
            )
        block_mask = mask_of(block_mask)
    changes = score_mod.arguments if score_mod is not None else {}
    wants_lse = return_lse or (return_aux is not None and return_aux.lse)
    got = flash_attn(
        query, key, value, scale=scale, attn_mask=block_mask, return_lse=wants_lse, **changes
    )
    if return_aux is None:
        return got
    from torch.nn.attention.flex_attention import AuxOutput

    out, lse = got if wants_lse else (got, None)
    return out, AuxOutput(lse=lse)
