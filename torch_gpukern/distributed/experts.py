# SPDX-License-Identifier: BSD-3-Clause
"""Expert parallelism: each rank holds some experts. Tokens are sent to the ranks of the experts
that the router chose for them, and results are sent back."""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..nn.moe import (
    MoE,
    check_experts,
    check_tokens,
    combined,
    gathered,
    grouped_experts,
    marked,
)
from ..ops import grouped_gemm, swiglu
from .ranks import Group, Ranks, agree, facts, of_name, process_group
from .transport import exchange

__all__ = ["expert_parallel", "shard_experts"]


class _Exchange(torch.autograd.Function):
    """An all-to-all of rows: [sum(sent), H], sent[r] for each rank r, to [sum(received), H], received[r] from
    each rank r. Backward sends the gradient the opposite way."""

    @staticmethod
    def forward(
        ctx, rows: Tensor, sent: Sequence[int], received: Sequence[int], ranks: Ranks
    ) -> Tensor:
        ctx.back = received, sent, ranks
        return exchange(rows, sent, received, ranks)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _Exchange.apply(grad, *ctx.back), None, None, None


class _Permuted(torch.autograd.Function):
    """Gathers rows by `places`, a permutation. `back` is its inverse, by which backward gathers."""

    @staticmethod
    def forward(ctx, rows: Tensor, places: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back, places)
        return rows.index_select(0, places)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _Permuted.apply(grad, *ctx.saved_tensors), None, None


def _describe(
    x: Tensor, expert_of: Tensor, weight_of: Tensor, matrices: dict[str, Tensor | None]
) -> dict[str, object]:
    check_tokens("expert_parallel", x, expert_of, weight_of)
    check_experts("expert_parallel", x, expert_of, matrices["up"], matrices["down"])
    return {"dtype of x": str(x.dtype), **facts(**matrices)}


@torch.compiler.disable
def expert_parallel(
    x: Tensor,
    expert_of: Tensor,
    weight_of: Tensor,
    up: Tensor,
    down: Tensor,
    group: Group = None,
    gate: Callable[[Tensor], Tensor] = swiglu,
    *,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """`torch_gpukern.nn.grouped_experts` with the experts cut over the ranks: rank r of W holds
    experts ``r E`` to ``(r + 1) E - 1``.

    A token is sent once to each expert that it chose: H values there and H values back, and the
    same in backward. First the ranks exchange how many rows they send to each expert, and the host
    waits for these counts. So no row is padded and none is dropped. But the call cannot be captured
    in a CUDA graph, and torch.compile breaks the graph around it. All ranks must call it, forward
    and backward, even those without tokens.

    Args:
        x: [T, H] float32, bfloat16 or float16: this rank's tokens; T may differ by rank.
        expert_of: [T, J] int32 or int64: the experts of each token, in [0, W E). A choice with
            another number adds nothing.
        weight_of: [T, J]: the weight of each choice.
        up, down: [E, H, I] and [E, I', H]: this rank's experts; E is the same on all ranks.
        group: a `ProcessGroup`, a `DeviceMesh` of one dimension, or None for all ranks.
        gate: maps [R, I] to [R, I'], each row by itself.
        up_bias, down_bias: [E, I] and [E, H].

    Returns:
        [T, H] in x's dtype, for this rank's tokens.

    Gradients: all floating-point arguments; those of the experts are sums over all ranks' tokens.

    Raises:
        ValueError: a dtype or shape does not match, or differs between ranks.

    Source: Lepikhin et al., "GShard" (2020), arXiv:2006.16668, section 3, but without a capacity.
    """
    ranks = Ranks(process_group(group).group_name)
    matrices = {"up": up, "down": down, "up_bias": up_bias, "down_bias": down_bias}
    agree(ranks, "expert_parallel", x.device, lambda: _describe(x, expert_of, weight_of, matrices))
    if ranks.size == 1:
        return grouped_experts(
            x, expert_of, weight_of, up, down, gate, up_bias=up_bias, down_bias=down_bias
        )
    own, (tokens, each) = up.shape[0], expert_of.shape

    expert_of, _ = marked(expert_of, ranks.size * own)
    # sorted by expert, so the rows for a rank are consecutive
    experts, order = torch.sort(expert_of.reshape(-1), stable=True)
    every = torch.arange(ranks.size * own, device=x.device, dtype=experts.dtype)
    ends = torch.searchsorted(experts, every, right=True)
    # [ranks, their experts]
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).view(ranks.size, own)
    every_one = [1] * ranks.size
    incoming = exchange(counts, every_one, every_one, ranks)  # [ranks, this one's experts]
    sent, received = torch.stack([counts.sum(1), incoming.sum(1)]).tolist()

    order = order[: sum(sent)]
    count = torch.arange(sum(sent), dtype=torch.int32, device=x.device)
    place = count.new_full((tokens * each,), -1).scatter_(0, order, count).view(tokens, each)
    rows = _Exchange.apply(gathered(x, order, place), sent, received, ranks)
    # received rows are ordered by rank, then by expert; grouped products need them ordered by
    # expert
    here = torch.arange(own, device=x.device).repeat(ranks.size)
    here = here.repeat_interleave(incoming.flatten(), output_size=sum(received))
    places = torch.sort(here, stable=True).indices
    back = torch.empty_like(places).scatter_(
        0, places, torch.arange(sum(received), device=x.device)
    )
    last = incoming.sum(0).cumsum(0).to(torch.int32)
    rows = _Permuted.apply(rows, places, back)
    rows = gate(grouped_gemm(rows, up, last, bias=up_bias))
    rows = grouped_gemm(rows, down, last, bias=down_bias)
    rows = _Exchange.apply(_Permuted.apply(rows, back, places), received, sent, ranks)

    return combined(rows, place, weight_of, x.dtype)


def shard_experts(layer: MoE, group: Group = None) -> MoE:
    """Reduces a `torch_gpukern.nn.MoE` in place to this rank's experts: ``num_experts / W`` of
    them, the first ones on rank 0.

    Its forward then sends tokens to the ranks of their experts (`expert_parallel`), so every rank
    must call it. The gradients of the experts are sums over all ranks' tokens, so data parallelism
    must not reduce them again. The gradients of the router are of this rank's tokens only.

    Args:
        layer: a layer with all experts, the same on every rank.
        group: a `ProcessGroup`, a `DeviceMesh` of one dimension, or None for all ranks.
            `num_experts` must be a multiple of its size.

    Returns:
        The layer.

    Raises:
        ValueError: the experts are cut already, or are quantised, or `num_experts` is no multiple of the group's
            size.
    """
    ranks = Ranks(process_group(group).group_name)
    if "gate_up_proj" not in layer._parameters:
        raise ValueError(
            "shard_experts: the layer's experts are quantised; expert_parallel multiplies by 16 and "
            "32 bits. Restore them first"
        )
    if layer.gate_up_proj.shape[0] != layer.num_experts:
        raise ValueError("shard_experts: the layer's experts are spread over ranks already")
    if layer.num_experts % ranks.size:
        raise ValueError(
            f"shard_experts: num_experts {layer.num_experts} is no multiple of the group's "
            f"{ranks.size} ranks"
        )
    for name in ("gate_up_proj", "down_proj"):
        whole = getattr(layer, name)
        part = whole.detach().chunk(ranks.size)[ranks.rank].clone()
        setattr(layer, name, torch.nn.Parameter(part, whole.requires_grad))
    layer.multiply = functools.partial(_of_group, ranks.group.group_name)
    return layer


def _of_group(
    name: str, x: Tensor, expert_of: Tensor, weight_of: Tensor, up: Tensor, down: Tensor, gate
) -> Tensor:
    return expert_parallel(x, expert_of, weight_of, up, down, of_name(name), gate)
