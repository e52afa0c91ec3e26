# SPDX-License-Identifier: BSD-3-Clause
"""The functions of the flash-attn package (2.8), by its signatures and conventions, on gpukern.

::

    from torch_gpukern.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

Heads stand after the sequence, [batch, seq, heads, head_dim]; causal, windows and ALiBi count from
the bottom right, so that the last query stands at the last key. Beyond the package: CPU, float32
and float64, every head_dim that gpukern serves, v with a head_dim of its own. Other than it: lse of
a query that sees no key is -inf, not inf; deterministic backwards by argument are refused by name.
"""

import math
import re

import torch
from torch import Tensor

from .._library import NAMESPACE, below_autocast
from ..ops import flash_attn, flash_attn_varlen, kv_cache_write, paged_attn, rope, rope_kv_write
from ..ops.fakes import stats_dtype
from ..ops.keywords import keep_defaults_constant

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

_Window = tuple[int, int]


def _refuse(function: str, text: str) -> None:
    raise ValueError(f"gpukern {function}: {text}")


def _beyond(function: str, new: int, k_cache: Tensor, table: Tensor, paged: bool) -> str:
    """The error of slots that the cache does not have, in terms of the caller's arguments."""
    blocks, block = k_cache.shape[:2]
    if not paged:
        return (
            f"gpukern {function}: cache_seqlens is expected to leave room for k's {new} tokens in "
            f"a cache of {block} for each "
            f"sequence, and cache_batch_idx to be in [0, {blocks}); pass a longer cache"
        )
    return (
        f"gpukern {function}: block_table is expected to hold pages in [0, {blocks}) for "
        f"cache_seqlens and k's {new} tokens; it has "
        f"{table.shape[1]} columns, pages of {block} tokens; pass a table with more columns"
    )


# names of our ops' arguments, and of the caller's that became them
_CALLERS = {
    "positions is expected to hold": "cache_seqlens and the tokens behind are expected to have",
    "cos": "rotary_cos",
    "sin": "rotary_sin",
    "seq_lens": "cache_seqlens",
    "kv_start": "cache_leftpad",
    "k_scale": "k_descale",
    "v_scale": "v_descale",
}
_OURS = re.compile(rf"\b({'|'.join(_CALLERS)})\b")


def _reworded(function: str, paged: bool, error: str) -> str:
    """Rewords an op's error in terms of the caller's arguments."""
    error = re.sub(rf"\b{NAMESPACE}::\w+", f"{NAMESPACE} {function}", error)
    error = _OURS.sub(lambda found: _CALLERS[found[0]], error)
    if paged:
        return error
    error = error.replace("a row of block_table", "a row of k_cache")
    error = error.replace("block_table is expected to hold pages", "cache_batch_idx is expected")
    return re.sub(r"block_table\[(\d+), \d+\]", r"cache_batch_idx[\1]", error)


def _rules(
    function, q, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
) -> dict:
    if (
        deterministic
        and q.is_cuda
        and q.requires_grad
        and not torch.are_deterministic_algorithms_enabled()
    ):
        _refuse(
            function,
            "deterministic is True; call torch.use_deterministic_algorithms(True), which gpukern "
            "obeys",
        )
    left, right = window_size
    return {
        "is_causal": causal,
        "scale": softmax_scale,
        "window_left": left,
        "window_right": -1 if causal else right,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
    }


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: _Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """q [B, Sq, Hq, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv]; returns [B, Sq, Hq, Dv],
    differentiable.

    Dropout's seed comes from torch's generator. return_attn_probs returns (out, lse [B, Hq, Sq],
    None), under dropout too.

    Raises:
        ValueError: a deterministic backward that torch was not asked for, or what
            `torch_gpukern.flash_attn` refuses.
    """
    rules = _rules(
        "flash_attn_func",
        q,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
    )
    rules |= {"diagonal": k.shape[1] - q.shape[1], "dropout_p": dropout_p}
    out, lse = flash_attn(*(x.transpose(1, 2) for x in (q, k, v)), **rules, return_lse=True)
    out = out.transpose(1, 2)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: _Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """q [Tq, Hq, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv]; returns [Tq, Hq, Dv], differentiable.

    With block_table [B, max_blocks] int32, k and v are caches [num_blocks, block_size, Hkv, D] of
    cu_seqlens_k's lengths, and there is no gradient. There a sequence may have fewer keys than
    queries on the CPU, and on CUDA where causal. return_attn_probs returns (out, lse [Hq, Tq],
    None).

    Raises:
        ValueError: as `flash_attn_func`.
    """
    name = "flash_attn_varlen_func"
    rules = _rules(
        name, q, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    )
    if block_table is None:
        out, lse = flash_attn_varlen(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            **rules,
            dropout_p=dropout_p,
            return_lse=True,
        )
    elif dropout_p:
        _refuse(
            name,
            f"dropout_p is {dropout_p} beside a block_table, whose attention has none; pass 0.0",
        )
    else:
        lengths = cu_seqlens_k.diff()
        queries = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q}
        out, lse = paged_attn(
            q,
            k,
            v,
            block_table,
            lengths,
            **queries,
            **rules,
            allow_short=_short(q, max_seqlen_q, rules),
            return_lse=True,
        )
    return (out, lse.mT, None) if return_attn_probs else out


def _short(q: Tensor, longest: int, rules: dict) -> bool:
    """Whether paged_attn can be told that a sequence may have fewer keys than queries, which with
    one query never is."""
    return longest > 1 and (not q.is_cuda or rules["is_causal"] or rules["window_right"] == 0)


def _rotated(
    x: Tensor, lengths: Tensor, cos: Tensor, sin: Tensor, step: int, interleaved: bool
) -> Tensor:
    """x [B, S, H, D], token i of sequence b by the angles of position lengths[b] + step i."""
    at = lengths[:, None] + step * torch.arange(x.shape[1], dtype=torch.int32, device=x.device)
    heads = x.flatten(0, 1)
    return rope(heads, heads[:, :0], cos, sin, at.flatten(), interleaved=interleaved)[0].view_as(x)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: _Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """q [B, Sq, Hq, D] over a cache that k and v [B, Snew, Hkv, D] are first written into, in
    place, at cache_seqlens.

    Args:
        k_cache, v_cache: [rows, S, Hkv, D], a row a sequence, or with block_table [B, max_blocks]
            int32 pages [num_blocks, block_size, Hkv, D].
        cache_seqlens: keys of each sequence before k is written, an int or [B] int32; None is S.
        cache_batch_idx: [B], the row of each sequence; None is 0 to B - 1. Not with block_table.
        cache_leftpad: [B] int32: sequence b sees keys from here on.
        rotary_cos, rotary_sin: [positions, rotary_dim / 2]: k is rotated before it is written,
            token i of sequence b by row cache_seqlens[b] + i, and q likewise; without causal and a
            window every token of q by row cache_seqlens[b].
        rotary_interleaved: pairs are neighbouring columns; else columns half of rotary_dim apart.
        num_splits: a hint that changes nothing but time: gpukern splits long contexts by itself.
        k_descale, v_descale: [] or [Hkv] float32, what a code of an 8-bit cache is worth. k and v
            are divided by them when they are written.

    Returns:
        [B, Sq, Hq, Dv], with return_softmax_lse also lse [B, Hq, Sq]. No gradients.

    Raises:
        ValueError: one of rotary_cos and rotary_sin, or both without k; k without cache_seqlens;
            and what the ops refuse.
        IndexError: a position outside rotary_cos, on the CPU before anything is written; a row of
            cache_batch_idx that the cache does not have, on the CPU. On CUDA with several queries
            and neither causal nor window_size[1] 0 such a sequence's result is NaN.
    """
    name = "flash_attn_with_kvcache"
    if (rotary_cos is None) != (rotary_sin is None):
        _refuse(name, "rotary_cos and rotary_sin come together")
    if rotary_cos is not None and k is None:
        _refuse(name, "rotary_cos is given and k is not: the cache is rotated already")
    if (k is None) != (v is None):
        _refuse(name, "k and v come together")
    if block_table is not None and cache_batch_idx is not None:
        _refuse(name, "cache_batch_idx is for caches without a block_table")
    batch, seq_q = q.shape[:2]
    scales = {"k_scale": k_descale, "v_scale": v_descale}
    rules = _rules(name, q, softmax_scale, causal, window_size, softcap, alibi_slopes, False)
    if block_table is not None:
        table = block_table
    elif cache_batch_idx is not None:
        table = cache_batch_idx.to(torch.int32)[:, None]
    else:
        table = torch.arange(batch, dtype=torch.int32, device=q.device)[:, None]
    if cache_seqlens is None:
        if k is not None:
            _refuse(name, "k is given and cache_seqlens is not: where would it be written?")
        cache_seqlens = k_cache.shape[1] * table.shape[1]
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    if cache_seqlens.dtype not in (torch.int32, torch.int64):
        _refuse(name, f"cache_seqlens must be int32 or int64, got {str(cache_seqlens.dtype)[6:]}")
    if not torch.compiler.is_compiling():  # before k and v are written
        for what, given, shape in (
            ("cache_seqlens", cache_seqlens, [batch]),
            ("cache_batch_idx", cache_batch_idx, [batch]),
            ("cache_leftpad", cache_leftpad, [batch]),
            ("block_table", block_table, [batch, "max_blocks"]),
        ):
            if given is None:
                continue
            got = list(given.shape)
            if len(got) != len(shape) or got[0] != batch:
                expected = ", ".join(map(str, shape))
                _refuse(name, f"{what} must have shape [{expected}], got {got}")
        if block_table is not None and block_table.dtype is not torch.int32:
            _refuse(name, f"block_table must be int32, got {str(block_table.dtype)[6:]}")
    lengths = cache_seqlens.to(torch.int32)
    if k is not None and v is not None:
        place = lengths[:, None] + torch.arange(k.shape[1], dtype=torch.int32, device=q.device)
        page, row = place // k_cache.shape[1], place % k_cache.shape[1]
        # Tokens outside the table find its last column, a page that the cache does not have: an
        # error, and not another sequence's key.
        blocks, columns = k_cache.shape[0], table.shape[1]
        column = torch.where(page < 0, columns, page).clamp(max=columns).long()
        page = torch.nn.functional.pad(table, (0, 1), value=blocks).gather(1, column)
        page = torch.where(page < 0, blocks, page)
        slots = (page.long() * k_cache.shape[1] + row).flatten()
        try:
            if rotary_cos is not None and rotary_sin is not None:
                here = causal or tuple(window_size) != (-1, -1)
                angles = rotary_cos.to(stats_dtype(q)), rotary_sin.to(stats_dtype(q))
                together = here and seq_q == k.shape[1]  # q and k stand at the same positions
                if not together:
                    q = _rotated(q, lengths, *angles, 1 if here else 0, rotary_interleaved)
                tokens = [x.flatten(0, 1) for x in (q if together else k[:, :, :0], k, v)]
                how = {"interleaved": rotary_interleaved, **scales}
                rotated = rope_kv_write(
                    *tokens, *angles, place.flatten(), k_cache, v_cache, slots, **how
                )
                if together:
                    q = rotated.unflatten(0, (batch, seq_q))
            else:
                kv_cache_write(k.flatten(0, 1), v.flatten(0, 1), k_cache, v_cache, slots, **scales)
        except (IndexError, ValueError) as error:
            paged, text = block_table is not None, str(error)
            if isinstance(error, IndexError) and "slots" in text:  # the CPU's ops look at slots
                text = _beyond(name, k.shape[1], k_cache, table, paged)
            raise type(error)(_reworded(name, paged, text)) from error
        lengths = lengths + k.shape[1]
    first = None if cache_leftpad is None else cache_leftpad.to(torch.int32)
    short = _short(q, seq_q, rules)
    dense = block_table is None and seq_q > 1 and not short and len(k_cache) > 0
    if dense and k_cache.element_size() > 1:
        rows, there = slice(batch), None
        if cache_batch_idx is not None:
            rows, most = cache_batch_idx.long(), k_cache.shape[0] - 1
            there = (rows >= 0) & (rows <= most)
            rows = rows.clamp(0, most)
        keys, values = (x[rows].transpose(1, 2) for x in (k_cache, v_cache))
        places = {"q_start": lengths - seq_q, "kv_start": first, "kv_end": lengths}
        if (
            torch.is_autocast_enabled(q.device.type)
            and q.dtype is not keys.dtype
            and keys.element_size() == 2
        ):
            q = q.to(keys.dtype)  # as paged_attn casts
        with below_autocast():
            out, lse = flash_attn(
                q.transpose(1, 2), keys, values, **rules, **places, return_lse=True
            )
        out = out.transpose(1, 2)
        if there is not None:  # the host does not read a CUDA tensor, so nothing can be raised
            out, lse = (
                x.masked_fill(~there.view(-1, *[1] * (x.dim() - 1)), math.nan) for x in (out, lse)
            )
    else:
        more = {"kv_start": first, "allow_short": short, "return_lse": True, **scales}
        try:
            out, lse = paged_attn(
                q.flatten(0, 1), k_cache, v_cache, table, lengths, **rules, **more
            )
        except (IndexError, ValueError) as error:
            text = _reworded(name, block_table is not None, str(error))
            raise type(error)(text) from error
        out, lse = out.unflatten(0, (batch, seq_q)), lse.unflatten(0, (batch, seq_q)).mT
    return (out, lse) if return_softmax_lse else out


for _public in (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache):
    keep_defaults_constant(_public)
