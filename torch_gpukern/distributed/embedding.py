# SPDX-License-Identifier: BSD-3-Clause
"""An embedding whose weight is split over ranks by rows, that is, by vocabulary.

Each rank looks up the tokens whose rows it holds and fills in zeros for the others. The sum over
ranks gives every token its row. All terms of a sum but one are zero, so the all-reduce adds bytes:
the result is exact in every dtype and every order of ranks.

Source: Shoeybi et al., "Megatron-LM" (2019), arXiv:1909.08053, section 3.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from .._library import ops
from ..ops.wrong_types import refuse_non_tensors
from .alike import alike
from .ranks import Group, Ranks, agree, facts, process_group, rank_in, refuse, size_of
from .sequence import Cut
from .symmetric import define_op_of_ranks

__all__ = ["vocab_parallel_embedding"]

_NAME = "vocab_parallel_embedding"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def vocab_parallel_embedding(
    ids: Tensor,
    weight: Tensor,
    group: Group = None,
    *,
    classes: int | None = None,
    padding_idx: int | None = None,
) -> Tensor:
    """`torch.nn.functional.embedding` with a weight whose rows are split over ranks.

    Args:
        ids: [...] int64 or int32 in [0, V of all ranks), the same on every rank.
        weight: [V of this rank, H] float32, bfloat16, float16 or float64: rank r of W holds chunk r
            of `torch.tensor_split(whole, W)`, as for `vocab_parallel_linear_cross_entropy`.
        group: a `ProcessGroup`, a `DeviceMesh` of one dimension, or None for all ranks.
        classes: V of all ranks; needed if the ranks have unequal numbers of rows.
        padding_idx: a token whose row gets no gradient, or None.

    Returns:
        [..., H], weight's dtype: exact copies of the rows, the same on every rank.

    Gradients: weight, for this rank's rows. The gradient of the result must be the same on every
    rank. It is, if all ranks compute the same from the result. Autocast casts nothing.

    Communication: forward all-reduces M H elements of weight's dtype, for M tokens. Backward sends
    nothing.

    Raises:
        ValueError: a shape, dtype or value that the op does not take, or ranks that pass different
            arguments; raised on every rank.
        IndexError: a token on the CPU is not in [0, V). On CUDA its row is NaN instead.
    """
    group = process_group(group)
    for name, value in (("classes", classes), ("padding_idx", padding_idx)):
        if value is not None and value < 0:
            refuse(group, _NAME, weight.device, f"{name} must be at least 0 or None, got {value}")
    return ops.vocab_parallel_embedding(
        ids,
        weight,
        -1 if classes is None else classes,
        -1 if padding_idx is None else padding_idx,
        group.group_name,
    )


# ---- the op --------------------------------------------------------------------------------------


def _require(holds: bool, text: str) -> None:
    if not holds:
        raise ValueError(f"{_NAME}: {text}")


def _cut(rows: int, size: int, classes: int) -> Cut:
    return Cut(rows * size if classes < 0 else classes, size, "contiguous")


def _begin(ids: Tensor, weight: Tensor, classes: int, padding_idx: int, ranks: Ranks) -> Cut:
    cuts: list[Cut] = []

    def describe() -> dict:
        refuse_non_tensors(_NAME, ids=ids, weight=weight)
        _require(weight.dtype in _FLOATS, f"weight must be floating point, got {weight.dtype}")
        _require(weight.dim() == 2, f"weight must have 2 dimensions [V, H], got {weight.dim()}")
        _require(
            ids.dtype in (torch.int64, torch.int32), f"ids must be int64 or int32, got {ids.dtype}"
        )
        _require(
            ids.device == weight.device,
            f"ids are on {ids.device} and weight on {weight.device}; move one of them",
        )
        cut = _cut(weight.shape[0], ranks.size, classes)
        cuts.append(cut)
        start, end = cut.spans[ranks.rank][0]
        _require(
            end - start == weight.shape[0],
            f"weight has {weight.shape[0]} rows on rank {ranks.rank}, expected {end - start} of "
            f"{cut.length} over {ranks.size} ranks; pass classes if the ranks have unequal numbers",
        )
        _require(
            padding_idx < cut.length, f"padding_idx must be in [0, {cut.length}), got {padding_idx}"
        )
        if ids.device.type == "cpu" and ids.numel():
            low, high = ids.aminmax()
            if low < 0 or high >= cut.length:
                raise IndexError(
                    f"{_NAME}: ids are expected to be in [0, {cut.length}), got "
                    f"{int(low if low < 0 else high)}"
                )
        rows = "by classes" if classes >= 0 else weight.shape[0]
        more = {"columns of weight": weight.shape[1], "rows of weight": rows, "classes": classes}
        return facts(ids=ids) | more | {"dtype": str(weight.dtype), "padding_idx": padding_idx}

    agree(ranks, _NAME, weight.device, describe)
    return cuts[0]


def _forward(ids: Tensor, weight: Tensor, classes: int, padding_idx: int, group: str) -> Tensor:
    ranks = Ranks(group)
    cut = _begin(ids, weight, classes, padding_idx, ranks)
    start, end = cut.spans[ranks.rank][0]
    out = weight.new_zeros(*ids.shape, weight.shape[1])
    if end > start:
        mine = (ids >= start) & (ids < end)
        rows = torch.nn.functional.embedding((ids - start).clamp(0, end - start - 1), weight)
        out = torch.where(mine[..., None], rows, out)
    if ranks.size > 1 and out.numel():
        dist.all_reduce(out.view(torch.uint8), group=ranks.group)
    if ids.is_cuda:
        out = out.masked_fill(((ids < 0) | (ids >= cut.length))[..., None], float("nan"))
    return out


def _symbolic(ids: Tensor, weight: Tensor, **_) -> Tensor:
    return weight.new_empty(*ids.shape, weight.shape[1])


def _save(needs, args, out):
    ids, weight = args[:2]
    return (ids,), {"rows": weight.shape[0]}


def _backward(needs, grad_out, ids, rows, classes, padding_idx, group, **_):
    start, end = _cut(rows, size_of(group), classes).spans[rank_in(group)][0]
    mine = (ids >= start) & (ids < end) & (ids != padding_idx)
    # gradients of other ranks' tokens and of padding_idx go to an extra last row, which is dropped
    place = torch.where(mine, ids - start, rows)
    grad = torch.ops.aten.embedding_dense_backward(
        alike(grad_out, group), place, rows + 1, -1, False
    )
    return {"weight": grad[:rows]}


define_op_of_ranks(
    _NAME,
    kernel=_forward,
    symbolic=_symbolic,
    save=_save,
    saved=("ids",),
    backward=_backward,
)
