# SPDX-License-Identifier: BSD-3-Clause
"""paged_attn, kv_cache_write and kv_cache_write_latent: public functions and declarations: fakes,
autocast rule, FLOPs. None has a gradient.

The build makes overloads of paged_attn by the value of return_lse from its signature
(cmake/stubs.py).
"""

from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from .._library import any_requires_grad, is_grad_enabled, traced
from . import attention, fakes, switches
from .attn_merge import attn_merge
from .define import define_op
from .in_place import define_in_place
from .keywords import hide_unknown, refuse_unknown
from .paged_tree import Tree
from .shared_prefix import SharedPrefix
from .wrong_types import refuse_non_bool

__all__ = ["kv_cache_write", "kv_cache_write_latent", "paged_attn"]


def paged_attn(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *more: NoReturn,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int = 1,
    scale: float | None = None,
    window_left: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    is_causal: bool = True,
    kv_start: Tensor | None = None,
    window_right: int = -1,
    allow_short: bool = False,
    batch_invariant: bool = False,
    latent_format: Literal["none", "fp8_656"] = "none",
    prefix: SharedPrefix | None = None,
    attn_mask: Tensor | None = None,
    return_lse: bool = False,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each sequence's newest tokens over its keys, read in place from a paged cache.

    ``out[token t of sequence b] = softmax(scale * q_t K_b^T + ...) V_b``, where ``K_b[j]`` is row
    ``j % block_size`` of page ``block_table[b, j // block_size]``. Sequence b has n_b query tokens.
    Token t of them is at position ``p = seq_lens[b] - n_b + t``. It sees keys ``p - window_left <=
    j <= p``, or without is_causal keys up to ``p + window_right``.

    Args:
        q: [T, Hq, D] float32, bfloat16, float16 or float64. D and Dv: 1 to 576, on CUDA multiples
            of 8.
        k_cache: [num_blocks, block_size, Hkv, D] in q's dtype or of 8 bits: float8_e4m3fn,
            float8_e5m2 or int8. The last dimension must be contiguous, other strides are free. So a
            cache stored [num_blocks, Hkv, block_size, D] is passed as a transposed view, and a
            cache [B, Hkv, S, D] as one with a single page per sequence.
        v_cache: [num_blocks, block_size, Hkv, Dv], likewise, k_cache's dtype. Latent attention
            (MLA) passes ``cache[..., :512]`` of a cache [num_blocks, block_size, 1, 576]: the
            kernels then read each row once.
        block_table: [B, max_blocks] int32, the pages of each sequence. Only the first
            ``ceil(seq_lens[b] / block_size)`` entries of a row are read. Entries of pages that are
            entirely left of every window or of kv_start may hold anything. Sequences may share
            pages.
        seq_lens: [B] int32: keys of each sequence, including the new tokens. 0 is an inactive row.
        cu_seqlens_q: [B + 1] int32: sequence b owns query tokens ``cu_seqlens_q[b]`` to
            ``cu_seqlens_q[b + 1]``. None gives each sequence T / B tokens.
        max_seqlen_q: upper bound of the query tokens of a sequence. Read only with cu_seqlens_q.
        scale: factor of the scores, finite, `|scale| <= 1e38` unless q is float64. None is
            1 / sqrt(D).
        window_left: keys before its own position that a query sees; -1 is no bound.
        softcap: ``softcap * tanh(s / softcap)``; 0 switches it off.
        alibi_slopes: [Hq] or [B, Hq] float32 (float64 with float64): ``s - slope * |p - j|``.
        sinks: [Hq] float32 or q's dtype (float64 with float64): one more logit per head. It enters
            the softmax's sum but adds no value.
        k_scale: [] or [Hkv] float32: a key is its stored value times k_scale. For 8-bit caches also
            [num_blocks, Hkv], a scale for each page and head. None is 1.
        v_scale: likewise for values.
        is_causal: with False, each query sees every key below ``seq_lens[b]`` within its windows.
        kv_start: [B] int32: sequence b sees keys ``j >= kv_start[b]`` only, for padding on the
            left. Positions remain key indices. Clamped to [0, seq_lens[b]].
        window_right: keys after its own position that a query sees; -1 is no bound. Windows and
            is_causal intersect.
        allow_short: a sequence may have fewer keys than query tokens. By default this raises,
            because usually seq_lens does not include the new tokens. The first queries are then at
            negative positions, and is_causal and windows apply to them as in `flash_attn_varlen`.
            CUDA requires is_causal or a window_right of 0, and clamps bad contents of such a call
            without a report.
        batch_invariant: the bits of a sequence's results depend on that sequence alone, not on the
            others of the call. `torch_gpukern.batch_invariant` switches this on for every call.
            docs/numerics.md says when it holds anyway on the CPU, and what it costs on CUDA.
        latent_format: ``"fp8_656"`` reads latents in 8 bits. k_cache is uint8 [num_blocks,
            block_size, 1, 656], v_cache is ``k_cache[..., :512]``, D is 576 and the result has 512
            columns. A row is 512 codes of float8_e4m3fn, four float32 scales of 128 columns each,
            and 64 bfloat16. `kv_cache_write_latent` writes such rows. They begin at multiples of 16
            bytes. Neither k_scale nor v_scale is taken. CUDA decodes the rows of the call into its
            workspace first.
        prefix: keys that sequences of the call share, which are then read once for all of them. The
            result is that of the call without it, but for one rounding to q's dtype of the shared
            part and of the own part. Not beside kv_start. With window_left, alibi_slopes or
            batch_invariant, prefix is not used: windows and slopes need each query's own distance
            from the shared keys.
        attn_mask: bool [T, S] or [B, S, S], true where a new token sees another, for drafts that
            form a tree. Column j is the j-th new token of the row's own sequence. It replaces
            is_causal: a query sees all old keys, and the new tokens that its row shows, itself
            included only if the row shows it. Windows, kv_start and slopes count cache positions,
            as without it. In [T, S], S is at least the new tokens of every sequence, and further
            columns are not read. [B, S, S] has a row for each new token of each sequence. Old and
            new keys are read by two passes, so a result has one more rounding to q's dtype. Not
            beside prefix. With alibi_slopes, batch_invariant is refused.
        return_lse: return ``(out, lse)``.

    Returns:
        out [T, Hq, Dv] contiguous in q's dtype; with return_lse also lse [T, Hq], contiguous,
        float32 (float64 with float64). A query that sees no key has out 0 and lse -inf (its sink,
        if it has one).

    There is no gradient: a backward through it raises NotImplementedError. Under autocast q and
    16-bit sinks are cast to the dtype of the cache, if that has 16 bits.

    Raises:
        ValueError: a shape, dtype, device or value that the op does not take. On the CPU, a scale
            that is read and is not a finite number above 0. CUDA multiplies by any scale.
        IndexError: on the CPU, bad contents of block_table, seq_lens or cu_seqlens_q: a length that
            is negative, beyond the table or shorter than its query tokens, or a page outside the
            cache. On CUDA they are clamped on the device, and the next call or `check_errors`
            raises.

    Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention"
    (2023), arXiv:2309.06180; the split of long contexts is that of Flash-Decoding (Dao et al.
    2023).
    """
    if more or unknown:
        refuse_unknown(paged_attn, unknown, more)
    if return_lse is not False:
        refuse_non_bool(_paged_attn.said, "return_lse", return_lse)
    invariant = switches.is_batch_invariant if batch_invariant is False else batch_invariant
    op = _paged_attn.all if return_lse else _paged_attn
    if attn_mask is not None:
        op = Tree(_paged_attn.all, _paged_attn_masked, attn_mask, prefix, return_lse)
    elif prefix is not None:
        _check_prefix(prefix, kv_start)
        if window_left < 0 and alibi_slopes is None and not invariant:
            # Sinks count once, in the sequences' own part.
            how = {
                "scale": scale,
                "softcap": softcap,
                "k_scale": k_scale,
                "v_scale": v_scale,
                "latent_format": latent_format,
            }
            own = {
                "cu_seqlens_q": cu_seqlens_q,
                "max_seqlen_q": max_seqlen_q,
                "sinks": sinks,
                "is_causal": is_causal,
                "window_right": window_right,
                "allow_short": allow_short,
            }
            both = _with_prefix(q, k_cache, v_cache, block_table, seq_lens, prefix, how, own)
            return both if return_lse else both[0]
    return op.call(
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        cu_seqlens_q,
        max_seqlen_q,
        scale,
        window_left,
        softcap,
        alibi_slopes,
        sinks,
        k_scale,
        v_scale,
        is_causal,
        kv_start,
        window_right,
        allow_short,
        invariant,
        latent_format,
    )


def _check_prefix(prefix: SharedPrefix, kv_start: Tensor | None) -> None:
    if not isinstance(prefix, SharedPrefix):
        raise ValueError(
            f"paged_attn: prefix must be a SharedPrefix, got {type(prefix).__name__}; "
            "PagedKVCache.shared_prefix makes one"
        )
    if kv_start is not None:
        raise ValueError(
            "paged_attn: kv_start is given with prefix; padding on the left would hide shared keys "
            "from some sequences: leave out one of the two"
        )


def _with_prefix(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    prefix: SharedPrefix,
    how: dict[str, Any],
    own: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """out and lse of two calls over disjoint keys, merged.

    The first call takes a group of sequences as one sequence: its query tokens are those of the
    group, and all of them see all shared keys. The second call is the ordinary one, from the first
    key on that a sequence has for itself. kv_start leaves positions as they are.
    """
    op = _paged_attn.all
    shared = op.call_named(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=prefix.block_table,
        seq_lens=prefix.seq_lens,
        cu_seqlens_q=prefix.cu_seqlens_q,
        max_seqlen_q=q.shape[0],
        is_causal=False,
        **how,
    )
    rest = op.call_named(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        kv_start=prefix.kv_start,
        **how,
        **own,
    )
    return attn_merge(*shared, *rest)


def kv_cache_write(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *more: NoReturn,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    **unknown: NoReturn,
) -> None:
    """Writes new keys and values into the pages of a cache.

    ``k_cache[s // block_size, s % block_size] = k[t]`` with ``s = slots[t]``, and likewise v. With
    a scale, the stored value is ``k / k_scale``, saturated to the range of the cache's dtype and
    rounded to nearest even. 8-bit caches saturate without a scale too: infinities become the
    largest finite code. NaN stays NaN (int8: 0).

    Args:
        k: [T, Hkv, D], the cache's dtype; float32, bfloat16, float16 or float64 for 8-bit caches.
            Any strides. k and v may share memory with the caches: the result is as if all of both
            were read before anything is written.
        v: [T, Hkv, Dv], k's dtype, any strides.
        k_cache: [num_blocks, block_size, Hkv, D], written in place, any strides: k's dtype or
            float8_e4m3fn, float8_e5m2 or int8.
        v_cache: [num_blocks, block_size, Hkv, Dv], written in place. It may be a view of the tensor
            that k_cache views, but must not overlap k_cache.
        slots: [T] int64 or int32. Tokens with a negative slot are skipped.
        k_scale: [] or [Hkv] float32; for 8-bit caches also [num_blocks, Hkv]. None is 1.
        v_scale: likewise. slots and scales must not share memory with the caches.

    There is no gradient: if grad mode is on and an input requires one, the call raises
    NotImplementedError. Autocast casts nothing.

    Raises:
        ValueError: a shape, dtype or device that the op does not take. On the CPU, a scale that is
            used and is not a finite number above 0. CUDA divides by any scale.
        IndexError: on the CPU, a slot past the end of the cache, before anything is written. On
            CUDA such a token is skipped, and the next call or `check_errors` raises.

    Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention"
    (2023), arXiv:2309.06180.
    """
    if more or unknown:
        refuse_unknown(kv_cache_write, unknown, more)
    args = k, v, k_cache, v_cache, slots, k_scale, v_scale
    if traced() or (is_grad_enabled() and any_requires_grad(*args)):
        _kv_cache_write.overload(*args)
    else:  # what the Autograd kernel would do, without entering it through the dispatcher
        _write(*args)


def kv_cache_write_latent(
    c: Tensor, k_pe: Tensor, cache: Tensor, slots: Tensor, *more: NoReturn, **unknown: NoReturn
) -> None:
    """Writes new rows into the pages of a cache of latent attention (MLA).

    Row ``s % block_size`` of page ``s // block_size`` becomes ``cat(c[t], k_pe[t])``, with
    ``s = slots[t]``. A uint8 cache takes rows of 656 bytes, which `paged_attn` reads with
    ``latent_format="fp8_656"``: codes and scales of c, those of ``quantize(c,
    torch.float8_e4m3fn, "1x128")``, and k_pe in bfloat16.

    Args:
        c: [T, 1, 512], the latents: the cache's dtype; float32, bfloat16 or float16 for a uint8
            cache. Any strides. c and k_pe may share memory with the cache: the result is as if all
            of both were read before anything is written.
        k_pe: [T, 1, 64], the part of the keys that carries the rotary position, c's dtype, any
            strides.
        cache: [num_blocks, block_size, 1, 576] of any strides, or uint8 [num_blocks, block_size, 1,
            656], whose rows are contiguous and begin at multiples of 16 bytes. Written in place.
        slots: [T] int64 or int32. Tokens with a negative slot are skipped. On CUDA a row is
            undefined if two tokens have its slot. slots must not share memory with the cache.

    There is no gradient: if grad mode is on and an input requires one, the call raises
    NotImplementedError. Autocast casts nothing.

    Raises:
        ValueError: a shape, dtype, device or strides that the op does not take.
        IndexError: on the CPU, a slot past the end of the cache, before anything is written. On
            CUDA such a token is skipped, and the next call or `check_errors` raises.

    DeepSeek-AI, "DeepSeek-V2" (2024), arXiv:2405.04434.
    """
    if more or unknown:
        refuse_unknown(kv_cache_write_latent, unknown, more)
    args = c, k_pe, cache, slots
    if traced() or (is_grad_enabled() and any_requires_grad(*args)):
        _kv_cache_write_latent.overload(*args)
    else:
        _write_latent(*args)


# ---- fake functions ------------------------------------------------------------------------------


def _symbolic(q, k_cache, v_cache, block_table, seq_lens, latent_format, **_):
    n = fakes.sizes(
        "paged_attn",
        q=(q, "T Hq D"),
        k_cache=(
            k_cache,
            "num_blocks block_size Hkv D"
            if latent_format == "none"
            else "num_blocks block_size Hkv bytes",
        ),
        v_cache=(v_cache, "num_blocks block_size Hkv Dv"),
        block_table=(block_table, "B max_blocks"),
        seq_lens=(seq_lens, "B"),
    )
    attention.same_group("paged_attn", n["Hq"], "k_cache", n["Hkv"])
    return q.new_empty((*q.shape[:2], n["Dv"])), q.new_empty(
        q.shape[:2], dtype=fakes.stats_dtype(q)
    )


def _write_symbolic(k, v, k_cache, v_cache, slots, **_):
    fakes.sizes(
        "kv_cache_write",
        k=(k, "T Hkv D"),
        v=(v, "T Hkv Dv"),
        k_cache=(k_cache, "num_blocks block_size Hkv D"),
        v_cache=(v_cache, "num_blocks block_size Hkv Dv"),
        slots=(slots, "T"),
    )
    return ()


def _write_latent_symbolic(c, k_pe, cache, slots, **_):
    fakes.sizes(
        "kv_cache_write_latent",
        c=(c, "T heads latent"),
        k_pe=(k_pe, "T heads rotary"),
        cache=(cache, "num_blocks block_size heads row"),
        slots=(slots, "T"),
    )
    return ()


# ---- autocast and FLOPs --------------------------------------------------------------------------


def _cast(dtype, to, q, k_cache, sinks, **_):
    cast = {"q": to(q, k_cache.dtype)} if k_cache.dtype in (torch.bfloat16, torch.float16) else {}
    return cast | attention.sinks_as(cast.get("q", q).dtype, to, sinks)


def _flops(q, k_cache, v_cache, block_table, window_left, window_right, is_causal, **_) -> int:
    """An upper bound, 2 (D + Dv) for each query token, head and key: shapes give the pages of a
    table, but not the lengths.
    """
    keys = block_table[1] * k_cache[1]
    if window_left >= 0:
        right = 0 if is_causal else window_right
        keys = torch.sym_min(keys, window_left + 1 + right) if right >= 0 else keys
    return 2 * q[0] * q[1] * keys * (q[2] + v_cache[3])


# ---- declarations --------------------------------------------------------------------------------

_paged_attn = define_op(
    "paged_attn",
    public=paged_attn,
    symbolic=_symbolic,
    refuse="paged_attn: it has no backward; use flash_attn to train",
    autocast=_cast,
    flops=_flops,
    whole_sequences=True,
)
# It serves attn_mask on CUDA (paged_tree.py). Its errors call it paged_attn.
_paged_attn_masked = define_op(
    "paged_attn_masked",
    symbolic=_symbolic,
    refuse="paged_attn: it has no backward; use flash_attn to train",
    autocast=_cast,
    flops=_flops,
    whole_sequences=True,
)
_paged_attn_masked.said = _paged_attn_masked.all.said = _paged_attn.said
_kv_cache_write, _write = define_in_place("kv_cache_write", _write_symbolic, ("k_cache", "v_cache"))
hide_unknown(kv_cache_write)
_kv_cache_write_latent, _write_latent = define_in_place(
    "kv_cache_write_latent", _write_latent_symbolic, ("cache",)
)
hide_unknown(kv_cache_write_latent)
