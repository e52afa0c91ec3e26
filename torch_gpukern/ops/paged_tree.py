# SPDX-License-Identifier: BSD-3-Clause
"""paged_attn(attn_mask=): the new tokens of each sequence see each other by a mask, as drafts that
form a tree do.

On CUDA it is one op, paged_attn_masked, whose kernel is paged_tree. The CPU, and CUDA with ALiBi,
have no such kernel. There two calls over disjoint keys are merged by attn_merge:

  common  the old keys that every query of a sequence sees: paged_attn without the causal rule, over
          lengths without the new tokens. Each key is read once for all queries of its sequence.
  listed  the new tokens and at most S old keys, S the columns of the mask. They are gathered from
          their pages into a pool of pages of one key, and each query is a sequence of its own whose
          block table lists the keys that it sees. Hidden keys are not read, so they may be NaN.

The old keys of the second call are those at the left edge of a window, which only some queries see,
or all old keys of a sequence that has fewer of them than new tokens: paged_attn refuses fewer keys
than query tokens.

ALiBi depends on positions, which lists do not keep. The common call then takes each query as a
sequence of its own. Its query stands one behind the last old key, so its scores differ from the
right ones by a constant, which is added to lse. The listed call becomes flash_attn with a bias.

Nothing is read on the host. Wrong lengths and pages reach the ops, which report them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._library import any_autocast, bytes_of, is_compiling, ops, traced
from . import fakes
from .attn_merge import attn_merge
from .flash_attn import flash_attn
from .op import Op

__all__ = ["Tree", "check_mask"]


class _Tokens(NamedTuple):
    """The query tokens of a call and the keys of their sequences, int64."""

    sequence: Tensor  # [T] clamped to the sequences that exist
    place: Tensor  # [T] place among the new tokens of the sequence
    owned: Tensor | None  # [T] bool, whether a sequence owns the token; None: all are
    lens: Tensor  # [B] keys
    old: Tensor  # [B] keys that are no new tokens
    short: Tensor  # [B] bool, whether the pool has all old keys


class _Pool(NamedTuple):
    """The keys of the listed call."""

    position: Tensor  # [B, P] int64, their places in the cache
    stored: Tensor  # [B, P] bool, whether the key exists and kv_start does not hide it
    page: Tensor  # [B, P] int64, clamped to the pages that exist
    valid: Tensor  # [B, P] bool, whether block_table names a page that exists
    row: Tensor  # [B, P] int64, row of the page


class Tree:
    """Calls paged_attn with a mask over new tokens. `op` is paged_attn_fwd, `masked` is
    paged_attn_masked."""

    def __init__(self, op: Op, masked: Op, attn_mask: Tensor, prefix: Any, return_lse: bool):
        check_mask(attn_mask, prefix)
        self.op, self.masked = op, masked.all if return_lse else masked
        self.attn_mask, self.return_lse = attn_mask, return_lse

    def call(self, *args: Any) -> Any:
        given = self.op.named(args)
        if given["q"].device.type == "cuda" and given["alibi_slopes"] is None:
            _check_device(self.attn_mask, given["q"])
            at = self.masked.places["attn_mask"]
            return self.masked.call(*args[:at], bytes_of(self.attn_mask), *args[at:])
        both = _attend(self.op, self.attn_mask, given)
        return both if self.return_lse else both[0]


def _attend(op: Op, attn_mask: Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """out and lse. `given` has all arguments of the op by name."""
    q, k_cache, v_cache = given["q"], given["k_cache"], given["v_cache"]
    block_table, seq_lens = given["block_table"], given["seq_lens"]
    if not traced():
        _check_call(op, given)
        if 0 in (*block_table.shape, *k_cache.shape[:2], q.shape[0]):
            return op.call(*given.values())  # no query token has a key
    _check_sizes(attn_mask, q, seq_lens, given["cu_seqlens_q"], given["max_seqlen_q"])
    tokens = _tokens_of(q, seq_lens, given["cu_seqlens_q"])
    pool = _pool_of(tokens, attn_mask.shape[-1], k_cache, block_table, given)
    visible = _visible(tokens, pool, attn_mask, given)
    how = {n: given[n] for n in ("scale", "softcap", "k_scale", "v_scale", "latent_format")}
    if given["alibi_slopes"] is not None:
        return _with_alibi(op, tokens, pool, visible, given, how)
    common = op.call_named(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=block_table,
        seq_lens=_common_lens(tokens, given),
        cu_seqlens_q=given["cu_seqlens_q"],
        max_seqlen_q=given["max_seqlen_q"],
        kv_start=_common_start(tokens, given),
        sinks=given["sinks"],  # they count once
        is_causal=False,
        batch_invariant=given["batch_invariant"],
        **how,
    )
    return attn_merge(*common, *_listed(op, tokens, pool, visible, given, how))


# ---- checks --------------------------------------------------------------------------------------


def check_mask(attn_mask: Tensor, prefix: Any) -> None:
    """ValueError or TypeError if attn_mask is no mask over new tokens, or stands beside a prefix."""
    if not isinstance(attn_mask, Tensor):
        raise TypeError(
            "paged_attn: attn_mask is expected to be a bool tensor [T, S] or [B, S, S], got "
            f"{type(attn_mask).__name__}"
        )
    if attn_mask.dtype is not torch.bool:
        raise ValueError(
            f"paged_attn: attn_mask: expected bool, got {attn_mask.dtype}; it hides or shows new "
            "tokens and is not added to scores"
        )
    if attn_mask.dim() not in (2, 3):
        raise ValueError(
            "paged_attn: attn_mask must have shape [T, S] or [B, S, S], got "
            f"{list(attn_mask.shape)}"
        )
    if prefix is not None:
        raise ValueError(
            "paged_attn: prefix is given with attn_mask; shared keys are seen by every query, and "
            "they may include a new token that the mask hides: leave out prefix"
        )


def _check_call(op: Op, given: dict[str, Any]) -> None:
    """The checks of the call without attn_mask, whose texts name the caller's arguments. The calls
    that follow check what they are given, on every device and in compiled code."""
    if not any_autocast():
        ops.paged_attn_results.default(*given.values())
    if given["q"].device.type == "cpu":  # contents are checked even without heads
        caches = {}
        if given["latent_format"] == "none":  # latents in 8 bits have one head
            caches = {n: given[n][:, :, :0] for n in ("k_cache", "v_cache")}
        per_head = dict.fromkeys(("alibi_slopes", "sinks", "k_scale", "v_scale"))
        op.call_named(**given | per_head | caches | {"q": given["q"][:, :0]})


def _check_device(attn_mask: Tensor, q: Tensor) -> None:
    if attn_mask.device != q.device:
        raise ValueError(
            f"paged_attn: attn_mask must be on q's device {q.device}, got {attn_mask.device}"
        )


def _check_sizes(
    attn_mask: Tensor, q: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor | None, max_seqlen_q: int
) -> None:
    """The checks of paged_attn_masked, with the same texts (csrc/api/paged_attn.c)."""
    _check_device(attn_mask, q)
    shape, tokens, batch = attn_mask.shape, q.shape[0], seq_lens.shape[0]
    columns = shape[-1]
    if attn_mask.dim() == 2:
        _require(shape[0] == tokens, lambda: f"must be [T, S] with T = {tokens}, got {list(shape)}")
        enough = columns * batch >= tokens
    else:
        _require(
            shape[0] == batch and shape[1] == columns,
            lambda: f"must be [B, S, S] with B = {batch}, got {list(shape)}",
        )
        enough = columns * batch == tokens
    if cu_seqlens_q is None:
        _require(
            enough,
            lambda: (
                f"has {columns} columns, the {batch} sequences have {tokens} tokens; [T, S] needs "
                "at least a column for each new token of a sequence, and [B, S, S] as many"
            ),
        )
    else:
        _require(
            columns >= max_seqlen_q,
            lambda: (
                f"has {columns} columns, max_seqlen_q is {max_seqlen_q}; it needs a column for "
                "each new token of a sequence"
            ),
        )


def _require(holds: bool, text: Callable[[], str]) -> None:
    if is_compiling():  # a text with symbols cannot be traced
        torch._check(holds)
    elif not holds:
        raise ValueError(f"paged_attn: attn_mask {text()}")


# ---- tokens and keys -----------------------------------------------------------------------------


def _tokens_of(q: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor | None) -> _Tokens:
    batch = seq_lens.shape[0]
    token = torch.arange(q.shape[0], device=q.device)
    lens = seq_lens.long()
    if cu_seqlens_q is None:
        counts = q.shape[0] // batch
        sequence = token // counts
        place, owned = token - sequence * counts, None
    else:
        starts = cu_seqlens_q.long()
        counts = starts[1:] - starts[:-1]
        owner = torch.searchsorted(starts[1:].contiguous(), token, right=True)
        owned = owner < batch
        sequence = owner.clamp(max=batch - 1)
        place = token - starts[sequence]
    old = lens - counts
    return _Tokens(sequence, place, owned, lens, old, old < counts)


def _common_lens(tokens: _Tokens, given: dict[str, Any]) -> Tensor:
    """The lengths [B] of the common call. Wrong lengths stay wrong: too few keys become a negative
    length, and what exceeds the table stays as it is."""
    lens, old = tokens.lens, tokens.old
    wrong = lens < 0 if given["allow_short"] else (old < 0) & (lens != 0)
    common = torch.where(tokens.short & ~wrong, 0, old)
    return torch.where(lens > _capacity(given), lens, common).int()


def _starts_are_wrong(given: dict[str, Any]) -> Tensor | bool:
    """Whether cu_seqlens_q holds what paged_attn reports: one bool on the device."""
    if (starts := given["cu_seqlens_q"]) is None:
        return False
    counts = starts[1:] - starts[:-1]
    bad = ((counts < 0) | (counts > given["max_seqlen_q"])).any()
    return bad | (starts[0] != 0) | (starts[-1] > given["q"].shape[0])


def _capacity(given: dict[str, Any]) -> int:
    return given["block_table"].shape[1] * given["k_cache"].shape[1]


def _common_start(tokens: _Tokens, given: dict[str, Any]) -> Tensor | None:
    """kv_start [B] of the common call: where the last query's window begins."""
    start = given["kv_start"]
    if given["window_left"] < 0:
        return start
    first = (tokens.lens - 1 - _window(tokens, given)).clamp(min=0)
    return (first if start is None else torch.maximum(first, start.long())).int()


def _window(tokens: _Tokens, given: dict[str, Any]) -> Tensor:
    """window_left for each sequence [B], at most 2^31, so that positions less a window do not
    overflow."""
    return torch.full_like(tokens.lens, given["window_left"]).clamp(max=2**31)


def _pool_of(
    tokens: _Tokens, new: int, k_cache: Tensor, block_table: Tensor, given: dict[str, Any]
) -> _Pool:
    """The pool: room for `new` old keys, and `new` new tokens."""
    lens, old, short = tokens.lens, tokens.old, tokens.short
    num_blocks, block_size = k_cache.shape[:2]
    if given["window_left"] < 0:
        first, end = torch.zeros_like(old), torch.where(short, old, 0)
    else:
        window = _window(tokens, given)
        first = torch.where(short, 0, old - window)
        end = torch.where(short, old, torch.minimum(old, lens - 1 - window))
    column = torch.arange(new, device=old.device)
    position = torch.cat([first[:, None] + column, old[:, None] + column], 1)
    end = torch.stack([end, lens], 1).repeat_interleave(new, 1)
    start = 0 if given["kv_start"] is None else given["kv_start"].long().clamp(min=0)[:, None]
    at = position.clamp(0, _capacity(given) - 1)
    page = block_table.gather(1, at // block_size).long()
    return _Pool(
        position=position,
        stored=(position >= start) & (position < end),
        page=page.clamp(0, num_blocks - 1),
        valid=(page >= 0) & (page < num_blocks),
        row=at % block_size,
    )


def _visible(tokens: _Tokens, pool: _Pool, attn_mask: Tensor, given: dict[str, Any]) -> Tensor:
    """[T, P] bool: the keys of the pool that each query sees."""
    sequence, new = tokens.sequence, attn_mask.shape[-1]
    if attn_mask.dim() == 3:
        attn_mask = attn_mask[sequence, tokens.place.clamp(0, new - 1)]
    visible = pool.stored[sequence]
    visible = torch.cat([visible[:, :new], visible[:, new:] & attn_mask], 1)
    if tokens.owned is not None:
        visible = visible & tokens.owned[:, None]
    if given["window_left"] >= 0:
        visible = visible & (_distance(tokens, pool) <= given["window_left"])
    if given["window_right"] >= 0:
        visible = visible & (-_distance(tokens, pool) <= given["window_right"])
    return visible


def _distance(tokens: _Tokens, pool: _Pool) -> Tensor:
    """[T, P] int64: the position of each query less that of each key of the pool."""
    position = tokens.old[tokens.sequence] + tokens.place
    return position[:, None] - pool.position[tokens.sequence]


def _gathered(cache: Tensor, pool: _Pool) -> Tensor:
    """The pool's rows of a cache, [B, P, Hkv, D]."""
    if cache.dtype.itemsize > 1:
        return cache[pool.page, pool.row]
    return cache.view(torch.uint8)[pool.page, pool.row].view(cache.dtype)


# ---- calls ---------------------------------------------------------------------------------------


def _listed(
    op: Op,
    tokens: _Tokens,
    pool: _Pool,
    visible: Tensor,
    given: dict[str, Any],
    how: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """The call over the pool. It is batch-invariant, so that the bits of a query do not depend on
    the lengths of other queries' lists."""
    keys = visible.shape[1]
    k = _gathered(given["k_cache"], pool).flatten(0, 1)[:, None]
    if how["latent_format"] == "none":
        v = _gathered(given["v_cache"], pool).flatten(0, 1)[:, None]
    else:  # latents in 8 bits: v_cache must be the beginning of k_cache's rows
        v = k[..., : given["v_cache"].shape[3]]
    scales = {n: how[n] for n in ("k_scale", "v_scale")}
    for name, scale in scales.items():
        if scale is not None and scale.dim() == 2:  # of pages
            scales[name] = scale[pool.page].flatten(0, 1)
    slot = torch.arange(k.shape[0], device=k.device, dtype=torch.int32).view_as(pool.page)
    slot = torch.where(pool.valid, slot, -1)  # the call reports a page that does not exist
    # Column `keys` takes the hidden keys. Entries behind a list are not read.
    column = torch.where(visible, visible.cumsum(1) - 1, keys)
    table = slot.new_zeros(visible.shape[0], keys + 1)
    table = table.scatter(1, column, slot[tokens.sequence])
    return op.call_named(
        q=given["q"],
        k_cache=k,
        v_cache=v,
        block_table=table[:, :keys],
        seq_lens=visible.sum(1, dtype=torch.int32),
        batch_invariant=True,
        **how | scales,
    )


def _with_alibi(
    op: Op,
    tokens: _Tokens,
    pool: _Pool,
    visible: Tensor,
    given: dict[str, Any],
    how: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    q, slopes, sequence = given["q"], given["alibi_slopes"], tokens.sequence
    if given["latent_format"] != "none":
        raise ValueError(
            f"paged_attn: latent_format is {given['latent_format']} with attn_mask and "
            "alibi_slopes, which need rows of elements: leave out one of the three"
        )
    if given["batch_invariant"]:
        raise ValueError(
            "paged_attn: alibi_slopes is given with attn_mask and batch_invariant; flash_attn, "
            "which then serves the new tokens, is not batch-invariant: leave out one of the three"
        )
    if slopes.dim() == 2:
        slopes = slopes[sequence]

    # The query stands at the last old key here, place + 1 before its position.
    lens = _common_lens(tokens, given)[sequence]
    if tokens.owned is not None:
        lens = lens * tokens.owned
    wrong = (visible & ~pool.valid[sequence]).any(1) | _starts_are_wrong(given)
    lens = torch.where(wrong, _capacity(given) + 1, lens).int()  # which the call reports
    start = _common_start(tokens, given)
    out, lse = op.call_named(
        q=q,
        k_cache=given["k_cache"],
        v_cache=given["v_cache"],
        block_table=given["block_table"][sequence],
        seq_lens=lens,
        kv_start=None if start is None else start[sequence],
        alibi_slopes=slopes,
        **how,
    )
    lse = lse - slopes * (tokens.place + 1)[:, None]

    wide = fakes.stats_dtype(q)
    bias = -slopes.expand(lse.shape)[..., None] * _distance(tokens, pool).abs()[:, None]
    own_out, own_lse = flash_attn(
        q.to(wide)[:, :, None],
        *(_by_query(given[x], given[scale], pool, sequence, wide) for x, scale in _CACHES),
        scale=given["scale"],
        softcap=given["softcap"],
        sinks=None if given["sinks"] is None else given["sinks"].to(wide),
        bias=bias.masked_fill(~visible[:, None], -torch.inf)[:, :, None],
        return_lse=True,
    )
    own_out, own_lse = own_out[:, :, 0].to(out.dtype), own_lse[:, :, 0]
    if tokens.owned is not None:  # no sequence, no sink
        own_lse = own_lse.masked_fill(~tokens.owned[:, None], -torch.inf)
    return attn_merge(out, lse, own_out, own_lse)


_CACHES = (("k_cache", "k_scale"), ("v_cache", "v_scale"))


def _by_query(
    cache: Tensor, scale: Tensor | None, pool: _Pool, sequence: Tensor, wide: torch.dtype
) -> Tensor:
    """The pool's keys or values for each query, [T, Hkv, P, D]."""
    x = _gathered(cache, pool).to(wide)
    if scale is not None:
        x = x * (scale[pool.page] if scale.dim() == 2 else scale).to(wide)[..., None]
    return x[sequence].transpose(1, 2)
