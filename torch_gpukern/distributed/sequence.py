# SPDX-License-Identifier: BSD-3-Clause
"""A sequence cut over ranks: which tokens a rank holds, shards of a tensor, and back."""

import functools
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from . import transport
from .alike import alike
from .ranks import Group, Ranks, agree, process_group, rank_in, refuse, size_of
from .symmetric import define_op_of_ranks

__all__ = ["Cut", "Layout", "gather_sequence", "positions", "shard_sequence"]

Layout = Literal["contiguous", "zigzag"]
Span = tuple[int, int]  # tokens [start, end) of the whole sequence


def _layout_error(layout: str) -> str:
    """What is wrong with a layout; empty where it is one."""
    return (
        "" if layout in get_args(Layout) else f"layout must be contiguous or zigzag, got {layout!r}"
    )


def check_layout(group: ProcessGroup, op: str, device: torch.device, layout: str) -> None:
    """Refuses what is no layout, on every rank of the group."""
    if text := _layout_error(layout):
        refuse(group, op, device, text)


class Cut:
    """Which tokens of a sequence of `length` each of `size` ranks holds.

    The sequence is cut as `torch.tensor_split` does: the first ``length % n`` of n chunks have one
    token more. contiguous: n is `size`, rank r holds chunk r. zigzag: n is 2 `size`, rank r holds
    chunk r and then chunk ``2 size - 1 - r``, so that under a causal mask every rank has the same
    share of the work.
    """

    def __init__(self, length: int, size: int, layout: str):
        if text := _layout_error(layout):
            raise ValueError(text)
        self.length, self.size, self.layout = length, size, layout
        chunks = size if layout == "contiguous" or size == 1 else 2 * size
        each, more = divmod(length, chunks)
        starts = [i * each + min(i, more) for i in range(chunks + 1)]
        spans = list(zip(starts, starts[1:]))
        if chunks == size:
            self.spans: list[list[Span]] = [[span] for span in spans]
        else:
            self.spans = [[spans[r], spans[-1 - r]] for r in range(size)]
        self._segments: dict[int, list[tuple[int, int, int]]] = {}

    def tokens(self, rank: int) -> int:
        return sum(end - start for start, end in self.spans[rank])

    @property
    def most(self) -> int:
        """Tokens of the rank that has the most."""
        return max(self.tokens(rank) for rank in range(self.size))

    def segments(self, rank: int) -> list[tuple[int, int, int]]:
        """(first local token, start, end) of each run of tokens that stand side by side in the
        whole; without empty ones."""
        if rank in self._segments:
            return self._segments[rank]
        found: list[tuple[int, int, int]] = []
        at = 0
        for start, end in self.spans[rank]:
            if found and found[-1][2] == start:
                found[-1] = (found[-1][0], found[-1][1], end)
            elif end > start:
                found.append((at, start, end))
            at += end - start
        self._segments[rank] = found
        return found

    def order(self) -> list[tuple[int, int, int]]:
        """(rank, first local token, tokens) of each chunk, in the whole's order."""
        pieces = []
        for rank, spans in enumerate(self.spans):
            at = 0
            for start, end in spans:
                if end > start:
                    pieces.append((start, rank, at, end - start))
                at += end - start
        return [(rank, at, tokens) for _, rank, at, tokens in sorted(pieces)]


@functools.lru_cache(maxsize=256)
def cut_of(length: int, size: int, layout: str) -> Cut:
    """A `Cut`, made once."""
    return Cut(length, size, layout)


def total_of(tokens: int, size: int, seq_len: int | None) -> int:
    """The whole's length: seq_len, or that of equal shards."""
    return tokens * size if seq_len is None or seq_len < 0 else seq_len


def _check_tokens(
    op: str, argument: str, tokens: int, expected: int, seq_len: int | None, rank: int, of: str
) -> None:
    if seq_len is not None and seq_len < -1:
        raise ValueError(f"{op}: seq_len must be at least 0, got {seq_len}")
    if tokens != expected:
        raise ValueError(
            f"{op}: {argument} has {tokens} tokens on rank {rank}, expected {expected} of {of}"
        )


def whole_cut(op: str, ranks: Ranks, seq_len: int | None, layout: str, **tokens: int) -> Cut:
    """The cut whose share of this rank is `tokens`, of each argument; the first one's where seq_len
    is not given."""
    total = total_of(next(iter(tokens.values())), ranks.size, seq_len)
    cut = cut_of(total, ranks.size, layout)
    of = f"a sequence of {total} that is cut {layout} over {ranks.size} ranks (shard_sequence)"
    for argument, own in tokens.items():
        _check_tokens(op, argument, own, cut.tokens(ranks.rank), seq_len, ranks.rank, of)
    return cut


def check_alone(op: str, seq_len: int | None, **tokens: int) -> None:
    """The same of a group of one rank, which has the whole."""
    total = total_of(next(iter(tokens.values())), 1, seq_len)
    for argument, own in tokens.items():
        _check_tokens(op, argument, own, total, seq_len, 0, f"a sequence of {total} on one rank")


def positions(
    seq_len: int,
    group: Group = None,
    layout: Layout = "zigzag",
    *,
    device: torch.device | str = "cpu",
) -> Tensor:
    """[tokens of this rank] int64: where each of this rank's tokens stands in the whole sequence,
    as rotary embeddings ask.

    Args:
        seq_len: tokens of the whole sequence, at least 0.
        group: a `ProcessGroup`, a `DeviceMesh` of one dimension, or None for all ranks.
        layout: ``"contiguous"`` or ``"zigzag"``, as for `shard_sequence`.
        device: where the result lies.
    """
    if seq_len < 0:
        raise ValueError(f"positions: seq_len must be at least 0, got {seq_len}")
    group = process_group(group)
    spans = Cut(seq_len, group.size(), layout).spans[group.rank()]
    return torch.cat(
        [torch.arange(start, end, dtype=torch.int64, device=device) for start, end in spans]
    )


def shard_sequence(
    x: Tensor, group: Group = None, dim: int = -2, layout: Layout = "zigzag"
) -> Tensor:
    """This rank's part of a tensor that every rank has whole.

    Args:
        x: [..., S, ...], any dtype.
        group: a `ProcessGroup`, a `DeviceMesh` of one dimension, or None for all ranks.
        dim: the sequence's dimension.
        layout: ``"contiguous"``: rank r of W holds chunk r of `torch.tensor_split(x, W)`.
            ``"zigzag"``: rank r holds chunks r and 2 W - 1 - r of `torch.tensor_split(x, 2 W)`, one
            behind the other: a causal mask then gives all ranks equal work.

    Returns:
        The shard: a view where it is one chunk, else a copy. Any S: shards of unequal lengths
        differ by 1, or by 2 where they are zigzag.

    Gradients: x; tokens of other ranks get 0 on this one.
    """
    group = process_group(group)
    spans = Cut(x.shape[dim], group.size(), layout).spans[group.rank()]
    parts = [x.narrow(dim, start, end - start) for start, end in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def gather_sequence(
    x: Tensor,
    group: Group = None,
    dim: int = -2,
    layout: Layout = "zigzag",
    *,
    seq_len: int | None = None,
) -> Tensor:
    """The whole tensor on every rank, from the ranks' shards: the inverse of `shard_sequence`.

    Args:
        x: [..., S of this rank, ...], any dtype.
        group: a `ProcessGroup`, a `DeviceMesh` of one dimension, or None for all ranks.
        dim: the sequence's dimension.
        layout: that of `shard_sequence`.
        seq_len: S of the whole; needed where the shards have unequal lengths.

    Returns:
        [..., S, ...] contiguous.

    Gradients: x. The result is the same on every rank, and so its gradient must be: each rank takes
    its tokens' part of its own, nothing is summed.

    Raises:
        ValueError: on every rank, where shapes, dtypes or arguments do not fit together.
    """
    group = process_group(group)
    if not -x.dim() <= dim < x.dim():
        refuse(
            group,
            "gather_sequence",
            x.device,
            f"dim must be a dimension of x, which has {x.dim()}, got {dim}",
        )
    dim %= x.dim()
    check_layout(group, "gather_sequence", x.device, layout)
    if group.size() == 1:
        check_alone("gather_sequence", seq_len, x=x.shape[dim])
        return x.contiguous()
    return torch.ops.gpukern.gather_sequence(
        x, dim, layout, -1 if seq_len is None else seq_len, group.group_name
    )


# ---- the op --------------------------------------------------------------------------------------


def _gather(x: Tensor, dim: int, layout: str, seq_len: int, group: str) -> Tensor:
    ranks = Ranks(group)
    cuts: list[Cut] = []

    def describe() -> dict:
        cuts.append(whole_cut("gather_sequence", ranks, seq_len, layout, x=x.shape[dim]))
        shape = [n if i != dim else "tokens" for i, n in enumerate(x.shape)]
        tokens = x.shape[dim] if seq_len < 0 else "by seq_len"
        return dict(
            x=f"{x.dtype} {shape}", dim=dim, layout=layout, seq_len=seq_len, tokens_of_x=tokens
        )

    agree(ranks, "gather_sequence", x.device, describe)
    return transport.gather_tokens(x.movedim(dim, 0), cuts[0], ranks).movedim(0, dim).contiguous()


def _gather_fake(x: Tensor, dim: int, layout: str, seq_len: int, group: str) -> Tensor:
    shape = list(x.shape)
    shape[dim] = total_of(shape[dim], size_of(group), seq_len)
    return x.new_empty(shape)


def _gather_save(needs, args, out):
    return (), {}


def _gather_backward(needs, grad_out, dim, layout, group, **_):
    spans = Cut(grad_out.shape[dim], size_of(group), layout).spans[rank_in(group)]
    grad = alike(grad_out, group)
    return {"x": torch.cat([grad.narrow(dim, s, e - s) for s, e in spans], dim)}


define_op_of_ranks(
    "gather_sequence",
    kernel=_gather,
    symbolic=_gather_fake,
    save=_gather_save,
    backward=_gather_backward,
)
