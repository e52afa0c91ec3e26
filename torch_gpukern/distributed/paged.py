# SPDX-License-Identifier: BSD-3-Clause
"""context_parallel_paged_attn: decoding over a paged cache whose keys are spread over ranks. Each
rank computes attention over its own keys, and the ranks' results are merged by their lse."""

from torch import Tensor

from .._library import ops
from ..ops import paged_attn
from ..ops.fakes import stats_dtype
from ..ops.paged_attn import _cast
from ..ops.rules import Rules
from . import transport
from .ranks import Group, agree, facts, process_group, ranks_of
from .symmetric import define_op_of_ranks

__all__ = ["context_parallel_paged_attn"]

_TENSORS_OR_NONE = ("sinks", "k_scale", "v_scale")  # rules whose values ranks do not compare


def context_parallel_paged_attn(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    local_seq_lens: Tensor,
    group: Group = None,
    *,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int = 1,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`paged_attn` over the keys of all ranks: each rank holds some keys of every sequence, in its
    own pages.

    Args:
        q: [T, Hq, D], the same on every rank.
        k_cache: [num_blocks, block_size, Hkv, D], this rank's.
        v_cache: [num_blocks, block_size, Hkv, Dv], this rank's.
        block_table: [B, max_blocks] int32, this rank's.
        local_seq_lens: [B] int32: the number of keys of each sequence that this rank holds, 0 if
            none. Every query token of a sequence sees all of them, so several new tokens of a
            sequence are not causal among each other. A sequence may have more query tokens than
            this rank has keys of it.
        group: a `ProcessGroup`, a `DeviceMesh` of one dimension, or None for all ranks.
        cu_seqlens_q, max_seqlen_q, scale, softcap, k_scale, v_scale: as for `paged_attn`.
        sinks: [Hq] as for `paged_attn`, the same on every rank; they count once.
        return_lse: return ``(out, lse)``.

    Returns:
        out [T, Hq, Dv] in q's dtype and lse [T, Hq] float32 (float64 with float64), the same bits
        on every rank. The ranks' results are merged in rank order, in lse's dtype.

    Windows and ALiBi are not supported, because they need the positions of keys. The call can be
    captured in a CUDA graph (NCCL). There is no gradient. Autocast casts as for `paged_attn`.

    Raises:
        ValueError: as `paged_attn`, or ranks pass different arguments; raised on every rank.
        IndexError: as `paged_attn`.
    """
    group = process_group(group)
    given = q, k_cache, v_cache, block_table, local_seq_lens
    rules = dict(scale=scale, softcap=softcap, sinks=sinks, k_scale=k_scale, v_scale=v_scale)
    if group.size() == 1:
        lengths = dict(cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q)
        return paged_attn(*given, **lengths, **rules, is_causal=False, return_lse=return_lse)
    out, lse = ops.cp_paged_attn(*given, cu_seqlens_q, max_seqlen_q, group.group_name, **rules)
    return (out, lse) if return_lse else out


def _fwd(
    q, k_cache, v_cache, block_table, local_seq_lens, cu_seqlens_q, max_seqlen_q, group, **rules
):
    """The op on one rank: its part, the check that all ranks call alike, and the merge."""
    ranks, rules, found = ranks_of(group), Rules(rules), []
    mine = rules if ranks.rank == 0 else rules.but(sinks=None)  # the sinks count once

    def describe() -> dict:
        # Compute this rank's part here, so that an error about its pages, even about their
        # contents, is raised before anything is sent.
        lengths = local_seq_lens, cu_seqlens_q, max_seqlen_q
        found.extend(
            ops.paged_attn_fwd(q, k_cache, v_cache, block_table, *lengths, is_causal=False, **mine)
        )
        heads = f"{k_cache.dtype} {list(k_cache.shape[2:])} {list(v_cache.shape[2:])}"
        same = facts(
            q=q, local_seq_lens=local_seq_lens, cu_seqlens_q=cu_seqlens_q, sinks=rules.sinks
        )
        numbers = {
            name: x
            for name, x in rules.items()
            if not isinstance(x, Tensor) and name not in _TENSORS_OR_NONE
        }
        return same | {"heads of the caches": heads, **numbers, "max_seqlen_q": max_seqlen_q}

    agree(ranks, "context_parallel_paged_attn", q.device, describe)
    out, lse = found
    parts = list(zip(transport.all_of(out, ranks), transport.all_of(lse, ranks), strict=True))
    merged = parts[0][0].to(lse.dtype), parts[0][1]
    for part, part_lse in parts[1:]:
        merged = ops.attn_merge(*merged, part.to(lse.dtype), part_lse)
    return merged[0].to(q.dtype), merged[1]


def _fake(q, v_cache, **_):
    return q.new_empty((*q.shape[:2], v_cache.shape[3])), q.new_empty(
        q.shape[:2], dtype=stats_dtype(q)
    )


_cp_paged_attn = define_op_of_ranks(
    "cp_paged_attn",
    kernel=_fwd,
    symbolic=_fake,
    refuse="cp_paged_attn: it has no backward",
    autocast=_cast,
)
_cp_paged_attn.said = "context_parallel_paged_attn"
