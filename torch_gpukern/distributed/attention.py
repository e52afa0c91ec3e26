# SPDX-License-Identifier: BSD-3-Clause
"""Attention whose sequence is cut over ranks: context parallelism, dense and packed.

Three ways to bring a rank's queries and all keys together, one result:

- all_gather: every rank gathers K and V. A query's softmax is then one rank's own, bit for bit
  where shards begin at a tile.
- ring: K and V go round, two shards of each in memory; partial results are merged in float32.
- ulysses: an all-to-all turns shards of the sequence into shards of the heads, each rank attends
  with its heads.

Liu et al., "Ring Attention with Blockwise Transformers" (2023), arXiv:2310.01889; Jacobs et al.,
"DeepSpeed Ulysses" (2023), arXiv:2309.14509.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from .._library import are_deterministic, ops
from ..ops import flash_attn, flash_attn_varlen
from ..ops.attention import autocast, backward_of
from ..ops.fakes import stats_dtype
from . import gathered, ring, transport, ulysses
from .local import Call, empty_results, sum_sinks
from .ranks import Group, Ranks, agree, checked, facts, process_group, ranks_of, refuse
from .sequence import Cut, Layout, check_alone, check_layout, cut_of, total_of, whole_cut
from .symmetric import define_op_of_ranks

__all__ = ["Mode", "context_parallel_attn", "context_parallel_attn_varlen", "mode_of"]

Mode = Literal["auto", "all_gather", "ring", "ulysses"]
_MODES = ("auto", "all_gather", "ring", "ulysses")
_NO_GRADIENT = (
    "alibi_slopes requires a gradient, which it does not have; pass alibi_slopes.detach()"
)

# auto: gathered K and V and the float32 sums of their gradients may take this much memory on a
# rank. Below it all_gather is as fast as ring where links hide it, needs no merge, and has one
# rank's bits.
GATHERED_BYTES = 8 << 30


def mode_of(k: Tensor, v: Tensor, ranks: int) -> str:
    """The mode that ``mode="auto"`` takes, of this rank's k and v: all_gather as long as the whole
    of K and V, with the float32 sums of their gradients, fits into 8 GiB, else ring.
    """
    elements = (k.numel() + v.numel()) * ranks
    return "all_gather" if elements * (k.element_size() + 4) <= GATHERED_BYTES else "ring"


def context_parallel_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    layout: Layout = "zigzag",
    mode: Mode = "auto",
    seq_len: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attn` of a sequence that is cut over ranks: this rank's rows of the attention over all
    tokens.

    Args:
        q: [B, Hq, S of this rank, D] float32, bfloat16, float16 or float64, a shard by
        `shard_sequence`.
        k: [B, Hkv, S of this rank, D], q's dtype, cut alike.
        v: [B, Hkv, S of this rank, Dv], q's dtype, cut alike.
        group: a `ProcessGroup`, a `DeviceMesh` of one dimension, or None for all ranks. With one
        rank this is `flash_attn`. is_causal: query i sees keys ``j <= i``, both counted in the
        whole sequence; likewise the windows.
        scale, window_left, window_right, softcap: as for `flash_attn`.
        alibi_slopes: [Hq] or [B, Hq] float32 (float64 with float64), the same on every rank. It has
        no gradient. sinks: [Hq] float32 or q's dtype, the same on every rank. Its gradient is the
        sum over ranks, on every rank. layout: that of `shard_sequence`.
        mode: ``"all_gather"``, ``"ring"`` or ``"ulysses"`` (which needs Hq and Hkv that the ranks
        divide); ``"auto"`` is `mode_of`. seq_len: S of the whole; needed where the shards have
        unequal lengths.
        return_lse: return ``(out, lse)``.

    Returns:
        out [B, Hq, S of this rank, Dv] in q's dtype, stored [B, S, Hq, Dv] if ``q.stride(1) <
        q.stride(2)``; with return_lse also lse [B, Hq, S of this rank], float32 (float64 with
        float64).

    Memory beyond the shards: all_gather K and V of the whole, and in backward the float32 gradients
    of both; ring two shards of K and V and of their float32 gradients; ulysses the shards once
    more.

    Gradients: q, k, v and sinks, through out and lse. Those of k and v are summed over ranks in
    float32 in a fixed order and rounded once. A second backward raises NotImplementedError.
    Autocast casts as for `flash_attn`.

    Raises:
        ValueError: what `flash_attn` refuses, a shard of a length that the cut does not give, a
            mode or layout that does not exist, or ranks that pass different things; on every rank
            alike.
    """
    rules = dict(
        is_causal=is_causal,
        scale=scale,
        window_left=window_left,
        window_right=window_right,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
    )
    group, what = process_group(group), "context_parallel_attn"
    if mode not in _MODES:
        refuse(group, what, q.device, f"mode must be one of {', '.join(_MODES)}, got {mode!r}")
    check_layout(group, what, q.device, layout)
    if alibi_slopes is not None and alibi_slopes.requires_grad:
        refuse(group, what, q.device, _NO_GRADIENT)
    if group.size() == 1:
        if q.dim() == k.dim() == v.dim() == 4:  # what else is no call is refused by the op
            check_alone(what, seq_len, q=q.shape[2], k=k.shape[2], v=v.shape[2])
        return flash_attn(q, k, v, return_lse=return_lse, **rules)
    total = -1 if seq_len is None else seq_len
    out, lse = ops.cp_attn_fwd(q, k, v, layout, mode, total, group.group_name, **rules)
    return (out, lse) if return_lse else out


# ---- dense: the ops ------------------------------------------------------------------------------


def _begin(
    what: str, q, k, v, call: Call, layout: str, mode: str, seq_len: int, group: str
) -> tuple[Ranks, Cut, str]:
    """The group, the cut and the mode, once all ranks agree about the call; where they do not
    compare, found once for each kind."""
    ranks = ranks_of(group)
    found: list[Any] = []
    kind = None
    if not checked(q.device):
        kind = (
            ranks.rank,
            ranks.size,
            layout,
            mode,
            seq_len,
            *call.kind(),
            *(y for x in (q, k, v) for y in (x.shape, x.dtype, x.device)),
        )
        if kind in _begun:
            return ranks, *_begun[kind]

    def describe() -> dict:
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.dim() != 4:
                raise ValueError(f"{what}: {name} must have 4 dimensions, got {x.dim()}")
            if x.dtype != q.dtype:
                raise ValueError(
                    f"{what}: {name} has dtype {x.dtype}, q has {q.dtype}; they must match"
                )
        cut = whole_cut(what, ranks, seq_len, layout, q=q.shape[2], k=k.shape[2], v=v.shape[2])
        chosen = mode_of(k, v, ranks.size) if mode == "auto" else mode
        if chosen == "ulysses" and (q.shape[1] % ranks.size or k.shape[1] % ranks.size):
            raise ValueError(
                f"{what}: mode ulysses gives each of {ranks.size} ranks the same number of heads; "
                f"q has {q.shape[1]}, k {k.shape[1]}"
            )
        call.check(what, q, k, v)
        found.extend((cut, chosen))
        shapes = {
            f"{name} (without its tokens)": f"{x.dtype} {[x.shape[0], x.shape[1], x.shape[3]]}"
            for name, x in (("q", q), ("k", k), ("v", v))
        }
        tokens = q.shape[2] if seq_len < 0 else "by seq_len"
        return (
            shapes
            | call.facts()
            | dict(layout=layout, mode=mode, seq_len=seq_len, **{"tokens of q": tokens})
        )

    agree(ranks, what, q.device, describe)
    cut, chosen = found
    if kind is not None:
        if len(_begun) >= _MOST_KINDS:
            _begun.clear()
        _begun[kind] = cut, chosen
    return ranks, cut, chosen


_begun: dict[tuple, tuple[Cut, str]] = {}
_MOST_KINDS = 1024


def _fwd(q, k, v, layout, mode, seq_len, group, **rules):
    call = Call(rules)
    ranks, cut, mode = _begin("context_parallel_attn", q, k, v, call, layout, mode, seq_len, group)
    attend = {"ulysses": ulysses.attend, "ring": ring.attend, "all_gather": gathered.attend}[mode]
    return attend(q, k, v, call, cut, ranks)


def _bwd(grad_out, q, k, v, out, lse, grad_lse, layout, mode, seq_len, group, **rules):
    call = Call(rules)
    ranks = ranks_of(group)  # they agreed in the forward
    cut = cut_of(total_of(q.shape[2], ranks.size, seq_len), ranks.size, layout)
    mode = mode_of(k, v, ranks.size) if mode == "auto" else mode
    given = (grad_out, grad_lse, q, k, v, out, lse)
    how = {
        "ulysses": ulysses.differentiate,
        "ring": ring.differentiate,
        "all_gather": gathered.differentiate,
    }[mode]
    dq, dk, dv, dsinks = how(*given, call, cut, ranks)
    stored = tuple(_stored_like(x, grad) for x, grad in ((q, dq), (k, dk), (v, dv)))
    if call.sinks is None:
        return *stored, q.new_empty(0, dtype=lse.dtype)
    return *stored, dsinks.to(call.sinks.dtype)


def _stored_like(x: Tensor, grad: Tensor) -> Tensor:
    """In x's dtype, stored by the rule of out."""
    if x.stride(1) < x.stride(2):
        return grad.transpose(1, 2).to(x.dtype).contiguous().transpose(1, 2)
    return grad.to(x.dtype).contiguous()


def _fwd_fake(q, v, **_):
    return empty_results(q, v)


def _bwd_fake(q, k, v, lse, sinks, **_):
    grads = (empty_results(x, x)[0] for x in (q, k, v))
    return *grads, q.new_empty(0, dtype=lse.dtype) if sinks is None else sinks.new_empty(
        sinks.shape
    )


_cp_attn_bwd = define_op_of_ranks(
    "cp_attn_bwd",
    kernel=_bwd,
    symbolic=_bwd_fake,
    refuse="cp_attn_bwd: it has no backward",
)
_cp_attn = define_op_of_ranks(
    "cp_attn_fwd",
    kernel=_fwd,
    symbolic=_fwd_fake,
    backward=backward_of(_cp_attn_bwd),
    without_gradient=("alibi_slopes",),
    autocast=autocast,
)
_cp_attn.said = "context_parallel_attn"


# ---- packed --------------------------------------------------------------------------------------


def context_parallel_attn_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    group: Group = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    layout: Layout = "contiguous",
    seq_len: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attn_varlen` of packed sequences whose tokens are cut over ranks; a sequence may lie
    on several.

    Args:
        q: [T of this rank, Hq, D] float32, bfloat16, float16 or float64, a shard by
            `shard_sequence(..., dim=0, layout=layout)`.
        k: [T of this rank, Hkv, D], q's dtype, cut alike.
        v: [T of this rank, Hkv, Dv], q's dtype, cut alike.
        cu_seqlens: [B + 1] int32, of the whole packed batch, the same on every rank.
        max_seqlen: upper bound of the sequences' lengths.
        group: a `ProcessGroup`, a `DeviceMesh` of one dimension, or None for all ranks.
        is_causal, scale, window_left, window_right, softcap, alibi_slopes, sinks: as for
            `flash_attn_varlen`.
        layout: that of `shard_sequence`.
        seq_len: T of the whole; needed where the shards have unequal lengths.
        return_lse: return ``(out, lse)``.

    Returns:
        out [T of this rank, Hq, Dv] in q's dtype; with return_lse also lse [T of this rank, Hq].
        Every rank gathers K and V (mode all_gather of `context_parallel_attn`). Nothing of
        cu_seqlens is read on the host.

    Gradients: q, k, v and sinks. A second backward raises NotImplementedError. Autocast casts as
    for `flash_attn_varlen`.

    Raises:
        ValueError: as `context_parallel_attn`.
        IndexError: contents of cu_seqlens, as `flash_attn_varlen`: on a GPU by a later call.
    """
    rules = dict(
        is_causal=is_causal,
        scale=scale,
        window_left=window_left,
        window_right=window_right,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
    )
    group, what = process_group(group), "context_parallel_attn_varlen"
    check_layout(group, what, q.device, layout)
    if alibi_slopes is not None and alibi_slopes.requires_grad:
        refuse(group, what, q.device, _NO_GRADIENT)
    if group.size() == 1:
        if q.dim() == k.dim() == v.dim() == 3:  # what else is no call is refused by the op
            check_alone(what, seq_len, q=q.shape[0], k=k.shape[0], v=v.shape[0])
        lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
        return flash_attn_varlen(q, k, v, *lengths, return_lse=return_lse, **rules)
    total = -1 if seq_len is None else seq_len
    out, lse = ops.cp_attn_varlen_fwd(
        q, k, v, cu_seqlens, max_seqlen, layout, total, group.group_name, **rules
    )
    return (out, lse) if return_lse else out


class _Packed:
    """The call of `flash_attn_varlen` that serves a run [start, end) of this rank's queries.

    A sequence's rows end at the run's end, and so do its keys, so that both keep the sequence's
    bottom-right corner. Without a causal mask keys behind the run are seen, too: where places count
    (windows, ALiBi), rows of zeros stand for the queries behind the run, up to the sequence's end.
    """

    def __init__(
        self,
        call: Call,
        cu_seqlens: Tensor,
        refused: Tensor | None,
        max_seqlen: int,
        total: int,
        start: int,
        end: int,
    ):
        ahead = not call.is_causal
        places = call.window_left >= 0 or call.window_right >= 0 or call.alibi_slopes is not None
        self.added = min(max(max_seqlen - 1, 0), total - end) if ahead and places else 0
        self.rows = end - start + self.added
        cu_q = cu_seqlens.clamp(start, start + self.rows) - start
        # which the kernels report
        self.cu_q = cu_q if refused is None else torch.where(refused, -1, cu_q)
        self.cu_k = cu_seqlens if ahead else cu_seqlens.clamp(max=end)
        self.max_q, self.max_k = (
            min(max_seqlen, self.rows),
            min(max_seqlen, total if ahead else end),
        )

    def padded(self, x: Tensor, value: float = 0) -> Tensor:
        return torch.cat([x, x.new_full((self.added, *x.shape[1:]), value)]) if self.added else x

    def lengths(self) -> tuple:
        return self.cu_q, self.cu_k, self.max_q, self.max_k


def _begin_packed(
    q, k, v, cu_seqlens, max_seqlen, call: Call, layout, seq_len, group
) -> tuple[Ranks, Cut]:
    what, ranks, found = "context_parallel_attn_varlen", ranks_of(group), []

    def describe() -> dict:
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.dim() != 3:
                raise ValueError(f"{what}: {name} must have 3 dimensions, got {x.dim()}")
        found.append(
            whole_cut(what, ranks, seq_len, layout, q=q.shape[0], k=k.shape[0], v=v.shape[0])
        )
        call.check(what, *(x[None].transpose(1, 2) for x in (q, k, v)))
        _check_cu_seqlens(what, cu_seqlens, max_seqlen, found[0].length)
        shapes = {
            f"{n} (without its tokens)": f"{x.dtype} {list(x.shape[1:])}"
            for n, x in (("q", q), ("k", k), ("v", v))
        }
        tokens = q.shape[0] if seq_len < 0 else "by seq_len"
        rest = dict(
            layout=layout, seq_len=seq_len, max_seqlen=max_seqlen, **{"tokens of q": tokens}
        )
        return shapes | facts(cu_seqlens=cu_seqlens) | call.facts() | rest

    agree(ranks, what, q.device, describe)
    return ranks, found[0]


def _refused_cu_seqlens(cu_seqlens: Tensor, max_seqlen: int, total: int) -> Tensor | None:
    """On a GPU, [] bool: whether `flash_attn_varlen` of the whole would report contents; a rank's
    call sees a part of them alone."""
    if cu_seqlens.device.type == "cpu":
        return None
    lengths = cu_seqlens.diff()
    wrong = ((lengths < 0) | (lengths > max_seqlen)).any()
    return wrong | (cu_seqlens[0] != 0) | (cu_seqlens[-1] > total)


def _check_cu_seqlens(what: str, cu_seqlens: Tensor, max_seqlen: int, total: int) -> None:
    """Contents are looked at on the CPU, as by `flash_attn_varlen`: each rank's call sees a part of
    them alone."""
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype != torch.int32 or not cu_seqlens.numel():
        got = f"{str(cu_seqlens.dtype).removeprefix('torch.')} {list(cu_seqlens.shape)}"
        raise ValueError(f"{what}: cu_seqlens must be int32 [B+1], got {got}")
    if cu_seqlens.device.type != "cpu":
        return
    first, last, lengths = int(cu_seqlens[0]), int(cu_seqlens[-1]), cu_seqlens.diff()
    if first != 0 or last > total:
        raise IndexError(
            f"{what}: cu_seqlens is expected to start at 0 and to end at no more than {total} "
            f"tokens, got {first} and {last}"
        )
    if lengths.numel() and (lengths.min() < 0 or lengths.max() > max_seqlen):
        raise IndexError(
            f"{what}: cu_seqlens is expected to hold sequences of 0 to max_seqlen {max_seqlen} "
            f"tokens, "
            f"got {int(lengths.min())} to {int(lengths.max())}"
        )


def _varlen_fwd(q, k, v, cu_seqlens, max_seqlen, layout, seq_len, group, **rules):
    call = Call(rules)
    ranks, cut = _begin_packed(q, k, v, cu_seqlens, max_seqlen, call, layout, seq_len, group)
    moving = transport.Gather(cut, ranks, k, v)
    refused = _refused_cu_seqlens(cu_seqlens, max_seqlen, cut.length)
    out, lse = _varlen_fwd_fake(q, v)
    moving.done()
    whole_k, whole_v = moving.whole
    for at, start, end in cut.segments(ranks.rank):
        rows = slice(at, at + end - start)
        packed = _Packed(call, cu_seqlens, refused, max_seqlen, cut.length, start, end)
        found = ops.flash_attn_varlen_fwd(
            packed.padded(q[rows]), whole_k, whole_v, *packed.lengths(), **call
        )
        out[rows], lse[rows] = (x[: end - start] for x in found)
    return out, lse


def _varlen_bwd(
    grad_out, q, k, v, out, lse, cu_seqlens, max_seqlen, grad_lse, layout, seq_len, group, **rules
):
    call = Call(rules)
    ranks = ranks_of(group)  # they agreed in the forward
    cut = cut_of(total_of(q.shape[0], ranks.size, seq_len), ranks.size, layout)
    moving = transport.Gather(cut, ranks, k, v)
    refused = _refused_cu_seqlens(cu_seqlens, max_seqlen, cut.length)
    moving.done()
    whole_k, whole_v = moving.whole
    dq = q.new_empty(q.shape)
    sums = [x.new_zeros(x.shape, dtype=lse.dtype) for x in (whole_k, whole_v)]
    dsinks = None
    for at, start, end in cut.segments(ranks.rank):
        rows = slice(at, at + end - start)
        packed = _Packed(call, cu_seqlens, refused, max_seqlen, cut.length, start, end)
        # An added row has no gradient of out, and with an lse that no score comes near no
        # probability.
        grads = ops.flash_attn_varlen_bwd(
            packed.padded(grad_out[rows]),
            packed.padded(q[rows]),
            whole_k,
            whole_v,
            packed.padded(out[rows]),
            packed.padded(lse[rows], 1e30),
            *packed.lengths(),
            grad_lse=None if grad_lse is None else packed.padded(grad_lse[rows]),
            deterministic=are_deterministic(),
            grad_dtype=lse.dtype,
            **call,
        )
        dq[rows] = grads[0][: end - start].to(q.dtype)
        for total, grad in zip(sums, grads[1:3]):
            total += grad
        if call.sinks is not None:
            dsinks = grads[3].to(lse.dtype) if dsinks is None else dsinks + grads[3]
    mine = (transport.tokens_of(x, cut, ranks.rank) for x in sums)
    dk, dv = transport.ToOwners(cut, ranks, *sums).send_all(*sums).add(*mine, dtype=q.dtype)
    total = sum_sinks(dsinks, call, lse, ranks)
    return (
        dq,
        dk,
        dv,
        q.new_empty(0, dtype=lse.dtype) if total is None else total.to(call.sinks.dtype),
    )


def _varlen_fwd_fake(q, v, **_):
    return q.new_empty((q.shape[0], q.shape[1], v.shape[2])), q.new_empty(
        q.shape[:2], dtype=stats_dtype(q)
    )


def _varlen_bwd_fake(q, k, v, lse, sinks, **_):
    grads = (x.new_empty(x.shape) for x in (q, k, v))
    return *grads, q.new_empty(0, dtype=lse.dtype) if sinks is None else sinks.new_empty(
        sinks.shape
    )


_cp_attn_varlen_bwd = define_op_of_ranks(
    "cp_attn_varlen_bwd",
    kernel=_varlen_bwd,
    symbolic=_varlen_bwd_fake,
    refuse="cp_attn_varlen_bwd: it has no backward",
)
_cp_attn_varlen = define_op_of_ranks(
    "cp_attn_varlen_fwd",
    kernel=_varlen_fwd,
    symbolic=_varlen_fwd_fake,
    backward=backward_of(_cp_attn_varlen_bwd),
    without_gradient=("alibi_slopes",),
    autocast=autocast,
)
_cp_attn_varlen.said = "context_parallel_attn_varlen"
