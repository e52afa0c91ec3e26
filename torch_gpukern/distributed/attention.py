# SPDX-License-Identifier: BSD-3-Clause
"""Context parallelism: attention whose sequence is cut over ranks, dense and packed.

Three modes bring a rank's queries and all keys together. They compute the same function:

- all_gather (gathered.py): every rank gathers K and V and computes attention for its own queries.
  If shards begin at a tile's boundary, the bits are those of one rank.
- ring (ring.py): K and V pass from rank to rank, so that a rank keeps two shards of each in memory.
  Partial results are merged in float32. Liu et al., "Ring Attention with Blockwise Transformers"
  (2023), arXiv:2310.01889.
- ulysses (ulysses.py): an all-to-all turns shards of the sequence into shards of the heads, and
  each rank computes attention for its heads. Jacobs et al., "DeepSpeed Ulysses" (2023),
  arXiv:2309.14509.

Packed attention (`context_parallel_attn_varlen`) has the mode all_gather only.
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

# Mode auto takes all_gather up to this many bytes of gathered K and V and of the float32 sums of
# their gradients. There all_gather is as fast as ring, needs no merge and gives one rank's bits.
GATHERED_BYTES = 8 << 30


def mode_of(k: Tensor, v: Tensor, ranks: int) -> str:
    """The mode that ``mode="auto"`` chooses for this rank's k and v: all_gather if all ranks' K and
    V and the float32 sums of their gradients fit into 8 GiB, otherwise ring.
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
    """`flash_attn` over a sequence that is cut over ranks: this rank's rows of the attention over
    all tokens.

    Args:
        q: [B, Hq, S of this rank, D] float32, bfloat16, float16 or float64, a shard by
            `shard_sequence`.
        k: [B, Hkv, S of this rank, D], q's dtype, cut the same way.
        v: [B, Hkv, S of this rank, Dv], q's dtype, cut the same way.
        group: a `ProcessGroup`, a `DeviceMesh` of one dimension, or None for all ranks. With one
            rank this is `flash_attn`.
        is_causal: query i sees keys ``j <= i``, both counted in the whole sequence.
        scale, window_left, window_right, softcap: as for `flash_attn`; windows count in the whole
            sequence.
        alibi_slopes: [Hq] or [B, Hq] float32 (float64 with float64), the same on every rank. It has
            no gradient.
        sinks: [Hq] float32 or q's dtype, the same on every rank. Its gradient on every rank is the
            sum over ranks.
        layout: that of `shard_sequence`.
        mode: ``"all_gather"``, ``"ring"`` or ``"ulysses"``; ``"auto"`` chooses by `mode_of`.
            ulysses needs Hq and Hkv to be multiples of the number of ranks.
        seq_len: S of the whole sequence; needed if the shards have unequal lengths.
        return_lse: return ``(out, lse)``.

    Returns:
        out [B, Hq, S of this rank, Dv] in q's dtype, stored [B, S, Hq, Dv] if ``q.stride(1) <
        q.stride(2)``; with return_lse also lse [B, Hq, S of this rank], float32 (float64 with
        float64).

    Memory beyond the shards: all_gather holds all ranks' K and V, and in backward the float32
    gradients of both. ring holds two shards of K and V and of their float32 gradients. ulysses
    holds the shards a second time.

    Gradients: q, k, v and sinks, through out and lse. Those of k and v are summed over ranks in
    float32 in a fixed order and rounded once. A second backward raises NotImplementedError.
    Autocast casts as for `flash_attn`.

    Raises:
        ValueError: what `flash_attn` refuses, a shard whose length does not fit the cut, an unknown
            mode or layout, or ranks that pass different arguments; raised on every rank.
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
        if q.dim() == k.dim() == v.dim() == 4:  # the op refuses other numbers of dimensions
            check_alone(what, seq_len, q=q.shape[2], k=k.shape[2], v=v.shape[2])
        return flash_attn(q, k, v, return_lse=return_lse, **rules)
    total = -1 if seq_len is None else seq_len
    out, lse = ops.cp_attn_fwd(q, k, v, layout, mode, total, group.group_name, **rules)
    return (out, lse) if return_lse else out


# ---- dense: the ops ------------------------------------------------------------------------------


def _begin(
    what: str, q, k, v, call: Call, layout: str, mode: str, seq_len: int, group: str
) -> tuple[Ranks, Cut, str]:
    """The group, the cut and the mode, once all ranks agree about the call. If the ranks do not
    compare calls, the answer is cached by the call's shapes and arguments."""
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
    ranks = ranks_of(group)  # forward has checked that they agree
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
    """grad [B, H, S, D] in x's dtype, stored [B, S, H, D] if x is."""
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
    """`flash_attn_varlen` over packed sequences whose tokens are cut over ranks. A sequence may
    span several ranks.

    Args:
        q: [T of this rank, Hq, D] float32, bfloat16, float16 or float64, a shard by
            `shard_sequence(..., dim=0, layout=layout)`.
        k: [T of this rank, Hkv, D], q's dtype, cut the same way.
        v: [T of this rank, Hkv, Dv], q's dtype, cut the same way.
        cu_seqlens: [B + 1] int32: boundaries in the whole packed batch, the same on every rank.
        max_seqlen: upper bound of the sequences' lengths.
        group: a `ProcessGroup`, a `DeviceMesh` of one dimension, or None for all ranks.
        is_causal, scale, window_left, window_right, softcap, alibi_slopes, sinks: as for
            `flash_attn_varlen`.
        layout: that of `shard_sequence`.
        seq_len: T of the whole batch; needed if the shards have unequal lengths.
        return_lse: return ``(out, lse)``.

    Returns:
        out [T of this rank, Hq, Dv] in q's dtype; with return_lse also lse [T of this rank, Hq],
        float32 (float64 with float64).

    Every rank gathers K and V (mode all_gather of `context_parallel_attn`). The host does not read
    a cu_seqlens that lies on a GPU.

    Gradients: q, k, v and sinks. A second backward raises NotImplementedError. Autocast casts as
    for `flash_attn_varlen`.

    Raises:
        ValueError: as `context_parallel_attn`.
        IndexError: cu_seqlens has invalid contents. On a GPU a later call raises it, as for
            `flash_attn_varlen`.
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
        if q.dim() == k.dim() == v.dim() == 3:  # the op refuses other numbers of dimensions
            check_alone(what, seq_len, q=q.shape[0], k=k.shape[0], v=v.shape[0])
        lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
        return flash_attn_varlen(q, k, v, *lengths, return_lse=return_lse, **rules)
    total = -1 if seq_len is None else seq_len
    out, lse = ops.cp_attn_varlen_fwd(
        q, k, v, cu_seqlens, max_seqlen, layout, total, group.group_name, **rules
    )
    return (out, lse) if return_lse else out


class _Packed:
    """The arguments of the `flash_attn_varlen` call for a run [start, end) of this rank's queries.

    `flash_attn_varlen` aligns the last query of a sequence with its last key. With a causal mask,
    the call cuts a sequence's queries and keys at the run's end, so that this alignment stays
    right. Without a causal mask, queries also see keys after the run. If positions count (windows,
    ALiBi), the call then appends rows of zeros for the queries after the run, up to the end of its
    last sequence.
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
        # -1 makes the kernels report an IndexError
        self.cu_q = cu_q if refused is None else torch.where(refused, -1, cu_q)
        self.cu_k = cu_seqlens if ahead else cu_seqlens.clamp(max=end)
        self.max_q, self.max_k = (
            min(max_seqlen, self.rows),
            min(max_seqlen, total if ahead else end),
        )

    def padded(self, x: Tensor, value: float = 0) -> Tensor:
        """x with the appended rows, filled with `value`."""
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
    """On a GPU: [] bool, whether `flash_attn_varlen` over the whole batch would report invalid
    contents. The calls of a rank see only part of cu_seqlens. None on the CPU."""
    if cu_seqlens.device.type == "cpu":
        return None
    lengths = cu_seqlens.diff()
    wrong = ((lengths < 0) | (lengths > max_seqlen)).any()
    return wrong | (cu_seqlens[0] != 0) | (cu_seqlens[-1] > total)


def _check_cu_seqlens(what: str, cu_seqlens: Tensor, max_seqlen: int, total: int) -> None:
    """Checks dtype and shape, and on the CPU the contents, as `flash_attn_varlen` would over the
    whole batch. The calls of a rank see only part of cu_seqlens."""
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
    ranks = ranks_of(group)  # forward has checked that they agree
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
        # An appended row adds nothing: its grad_out is 0, and lse = 1e30 makes its probabilities 0.
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
