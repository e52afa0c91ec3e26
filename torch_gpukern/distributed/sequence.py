# SPDX-License-Identifier: BSD-3-Clause
"""A sequence cut over ranks: which tokens a rank holds, the shards of a tensor, and the gather of
the whole."""

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
    """The error text for a layout; empty if it is valid."""
    return (
        "" if layout in get_args(Layout) else f"layout must be contiguous or zigzag, got {layout!r}"
    )


def check_layout(group: ProcessGroup, op: str, device: torch.device, layout: str) -> None:
    """Raises ValueError for an invalid layout, on every rank of the group."""
    if text := _layout_error(layout):
        refuse(group, op, device, text)


class Cut:
    """Which tokens of a sequence of `length` each of `size` ranks holds.

    The sequence is cut into n chunks as by `torch.tensor_split`: the first ``length % n`` chunks
    have one token more. layout contiguous: n is `size`, and rank r holds chunk r. layout zigzag: n
    is 2 `size`, and rank r holds chunk r followed by chunk ``2 size - 1 - r``. Under a causal mask,
    every rank then has the same share of the work.

    spans[rank] lists a rank's chunks as (start, end) in the whole sequence.
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
        """The number of tokens of the rank that has the most."""
        return max(self.tokens(rank) for rank in range(self.size))

    def segments(self, rank: int) -> list[tuple[int, int, int]]:
        """A rank's runs of consecutive tokens: (first local token, start, end). Adjacent chunks are
        merged, empty ones left out."""
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
        """(rank, first local token, tokens) of each chunk, in the order of the whole sequence."""
        chunks = []
        for rank, spans in enumerate(self.spans):
            at = 0
            for start, end in spans:
                if end > start:
                    chunks.append((start, rank, at, end - start))
                at += end - start
        return [(rank, at, tokens) for _, rank, at, tokens in sorted(chunks)]


@functools.lru_cache(maxsize=256)
def cut_of(length: int, size: int, layout: str) -> Cut:
    """A cached `Cut`."""
    return Cut(length, size, layout)


def total_of(tokens: int, size: int, seq_len: int | None) -> int:
    """The length of the whole sequence: seq_len if given, otherwise tokens * size."""
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
    """The cut of the whole sequence. Raises ValueError if an argument does not have the tokens that
    this rank holds. Without seq_len, the length follows from the first argument."""
    total = total_of(next(iter(tokens.values())), ranks.size, seq_len)
    cut = cut_of(total, ranks.size, layout)
    of = f"a sequence of {total} that is cut {layout} over {ranks.size} ranks (shard_sequence)"
    for argument, own in tokens.items():
        _check_tokens(op, argument, own, cut.tokens(ranks.rank), seq_len, ranks.rank, of)
    return cut


def check_alone(op: str, seq_len: int | None, **tokens: int) -> None:
    """The same check for a group of one rank, which has the whole sequence."""
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
    """The position in the whole sequence of each of this rank's tokens, for rotary embeddings.

    Args:
        seq_len: tokens of the whole sequence, at least 0.
        group: a `ProcessGroup`, a `DeviceMesh` of one dimension, or None for all ranks.
        layout: ``"contiguous"`` or ``"zigzag"``, as for `shard_sequence`.
        device: the result's device.

    Returns:
        [tokens of this rank] int64.

    Raises:
        ValueError: seq_len is negative, or the layout does not exist.
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
    """This rank's shard of a tensor that every rank has in full.

    Args:
        x: [..., S, ...], any dtype.
        group: a `ProcessGroup`, a `DeviceMesh` of one dimension, or None for all ranks.
        dim: the sequence's dimension.
        layout: ``"contiguous"``: rank r of W holds chunk r of `torch.tensor_split(x, W)`.
            ``"zigzag"``: rank r holds chunks r and 2 W - 1 - r of `torch.tensor_split(x, 2 W)`,
            concatenated. A causal mask then gives all ranks equal work.

    Returns:
        The shard, a view if it is one chunk and otherwise a copy. S need not be a multiple of the
        number of chunks: the ranks' lengths then differ by 1.

    Gradients: x; the tokens of other ranks get 0 on this rank.
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
    """Gathers the ranks' shards into the whole tensor on every rank: the inverse of
    `shard_sequence`.

    Args:
        x: [..., S of this rank, ...], any dtype.
        group: a `ProcessGroup`, a `DeviceMesh` of one dimension, or None for all ranks.
        dim: the sequence's dimension.
        layout: that of `shard_sequence`.
        seq_len: S of the whole tensor; needed if the shards have unequal lengths.

    Returns:
        [..., S, ...] contiguous.

    Gradients: x. The result is the same on every rank, so its gradient must be the same, too. Each
    rank takes its own tokens' gradient, and nothing is summed over ranks.

    Raises:
        ValueError: on every rank, if shapes, dtypes or arguments do not match.
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
