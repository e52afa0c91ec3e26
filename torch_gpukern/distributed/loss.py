# SPDX-License-Identifier: BSD-3-Clause
"""linear_cross_entropy whose classes are cut over ranks: the loss of a vocabulary-parallel head.

Each rank computes the logits of its own classes, for some rows at a time. The ranks exchange at
most three numbers per row: lse, the target's logit and, with label smoothing, the sum of the
logits. So they send 12 bytes per row instead of the 4 V bytes of its logits.

Source: Shoeybi et al., "Megatron-LM" (2019), arXiv:1909.08053, section 3.
"""

from typing import get_args

import torch
from torch import Tensor

from .._library import ops
from ..ops import linear_cross_entropy
from ..ops import linear_cross_entropy_chunks as chunks
from ..ops.cross_entropy import Reduction, reduce_rows, weight_of_mean
from ..ops.gemm import _torch_allows_tf32
from ..ops.vectors import widened
from ..ops.wrong_types import refuse_non_tensors
from . import transport
from .ranks import Group, Ranks, agree, facts, process_group, refuse
from .sequence import Cut
from .symmetric import define_op_of_ranks

__all__ = ["vocab_parallel_linear_cross_entropy"]

_NAME = "vocab_parallel_linear_cross_entropy"


def vocab_parallel_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    group: Group = None,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    classes: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
    logit_scale: float = 1.0,
    reduction: Reduction = "mean",
    z_loss: float = 0.0,
) -> Tensor:
    """`linear_cross_entropy` of a weight whose rows, the classes, are cut over ranks. Logits never
    leave their rank.

    Args:
        x: [..., H] float32, bfloat16, float16 or float64, the same on every rank.
        weight: [V of this rank, H], x's dtype: rank r of W holds chunk r of
            `torch.tensor_split(whole, W)`.
        target: [...] int64, classes in [0, V of all ranks) or ignore_index, the same on every rank.
        group: a `ProcessGroup`, a `DeviceMesh` of one dimension, or None for all ranks. With one
            rank this is `linear_cross_entropy` with low_memory.
        bias: [V of this rank], x's dtype.
        class_weight: [V of all ranks] float32, the same on every rank: the weight of
            `cross_entropy`. It has no gradient.
        classes: V of all ranks; needed if the ranks have unequal numbers of classes.
        ignore_index, label_smoothing, softcap, logit_scale, reduction, z_loss: as for
            `linear_cross_entropy`.

    Returns:
        [] or, without a reduction, [...]: float32 (float64 with float64), the same bits on every
        rank.

    Gradients: x, weight and bias. x's gradient is the sum over ranks, in float32 in rank order,
    rounded once; every rank gets it. The gradients of weight and bias are those of this rank's
    classes. The loss is the same on every rank, so its gradient must be the same, too. A second
    backward raises NotImplementedError. Autocast casts x, weight and bias.

    Communication: forward sends 8 bytes per row (12 with label smoothing). Backward sends the
    float32 gradient of x to the rows' owners and back. Memory beyond arguments and results, with M
    rows: 4 M H bytes + 512 MiB on each rank, and 4 M H bytes of buffers for transfers. Float64
    takes 8 M H bytes of each.

    Raises:
        ValueError: a shape, dtype or value that the op does not take, or ranks that pass different
            arguments; raised on every rank. The values of tensors are not compared.
        IndexError: a target on the CPU is not in [0, V) and not ignore_index. On CUDA that row's
            loss is NaN instead.
    """
    group = process_group(group)
    if reduction not in get_args(Reduction):
        refuse(group, _NAME, x.device, f"reduction must be none, mean or sum, got '{reduction}'")
    class_weight = widened(class_weight, x, own=False)
    rules = dict(
        class_weight=class_weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        softcap=softcap,
        logit_scale=logit_scale,
        z_loss=z_loss,
    )
    if group.size() == 1:
        _require(
            classes is None or classes == weight.shape[0],
            f"classes is {classes}, but the weight of the one rank has {weight.shape[0]}",
        )
        return linear_cross_entropy(
            x, weight, target, bias, **rules, reduction=reduction, low_memory=True
        )
    precision = (
        "tf32" if x.is_cuda and x.dtype == torch.float32 and _torch_allows_tf32() else "ieee"
    )
    if classes is not None and classes < 0:
        refuse(group, _NAME, x.device, f"classes must be at least 0, got {classes}")
    if class_weight is not None and class_weight.requires_grad:
        refuse(
            group,
            _NAME,
            x.device,
            "class_weight requires a gradient and has none; pass class_weight.detach()",
        )
    if class_weight is not None and reduction == "mean":
        rules["class_weight"] = class_weight = weight_of_mean(class_weight, target, ignore_index)
    whole = -1 if classes is None else classes
    loss, _ = ops.vocab_parallel_lce_fwd(
        x, weight, target, bias, *rules.values(), precision, reduction, whole, group.group_name
    )
    return reduce_rows(_NAME, loss, target, class_weight, ignore_index, reduction)


# ---- the ops -------------------------------------------------------------------------------------


def _require(holds: bool, text: str) -> None:
    if not holds:
        raise ValueError(f"{_NAME}: {text}")


def _own_classes(weight: Tensor, ranks: Ranks, classes: int) -> tuple[int, int]:
    """(this rank's first class, the number of classes of all ranks)."""
    cut = Cut(weight.shape[0] * ranks.size if classes < 0 else classes, ranks.size, "contiguous")
    (start, end), *_ = cut.spans[ranks.rank]
    _require(
        end - start == weight.shape[0],
        f"weight has {weight.shape[0]} classes on rank {ranks.rank}, expected {end - start} of "
        f"{cut.length} over {ranks.size} ranks",
    )
    return start, cut.length


def _begin(
    x, weight, target, bias, rules: chunks.Rules, reduction: str, classes: int, group: str
) -> tuple[Ranks, int, int]:
    ranks, found = Ranks(group), []

    def describe() -> dict:
        refuse_non_tensors(_NAME, x=x, weight=weight, target=target)
        _require(
            x.dtype in chunks.FLOATS,
            f"x must be float32, bfloat16, float16 or float64, got {x.dtype}",
        )
        _require(weight.dim() == 2, f"weight must have 2 dimensions [V, H], got {weight.dim()}")
        first, whole = _own_classes(weight, ranks, classes)
        given, none = rules._asdict(), target.reshape(-1)[:0]
        class_weight, own = given.pop("class_weight"), None
        if class_weight is not None:
            shape = list(class_weight.shape)
            _require(shape == [whole], f"class_weight must have shape [{whole}], got {shape}")
            own = class_weight[first : first + weight.shape[0]]
        if weight.shape[0]:  # a call without rows raises what the single-rank op would
            _require(
                target.shape == x.shape[:-1],
                f"target must have shape {list(x.shape[:-1])}, got {list(target.shape)}",
            )
            try:
                ops.linear_cross_entropy_rows(
                    x.new_empty(0, *x.shape[-1:]), weight, none, bias, class_weight=own, **given
                )
            except ValueError as error:
                raise ValueError(f"{_NAME}: {str(error).partition(': ')[2] or error}") from None
        found.extend((first, whole))
        _check_targets(target, whole, rules.ignore_index)
        columns = "by classes" if classes >= 0 else weight.shape[0]
        more = {
            "reduction": reduction,
            "classes": classes,
            "classes of weight": columns,
            "bias given": bias is not None,
        }
        return facts(x=x, target=target, class_weight=class_weight) | given | more

    agree(ranks, _NAME, x.device, describe)
    return ranks, *found


def _check_targets(target: Tensor, classes: int, ignore_index: int) -> None:
    if target.device.type != "cpu":
        return
    wrong = ((target < 0) | (target >= classes)) & (target != ignore_index)
    if wrong.any():
        raise IndexError(
            f"{_NAME}: target is expected to hold classes in [0, {classes}) or ignore_index, got "
            f"{int(target[wrong][0])}"
        )


def _fwd(x, weight, target, bias, reduction, classes, group, **rules):
    rules = chunks.Rules(**rules)
    ranks, first, whole = _begin(x, weight, target, bias, rules, reduction, classes, group)
    flat = target.reshape(-1)
    mine = chunks.part_of_rows(
        x.reshape(flat.numel(), x.shape[-1]), weight, flat, bias, rules, first
    )
    parts = transport.all_of(mine, ranks)
    lse = torch.stack([part[0] for part in parts]).logsumexp(0)
    own, *logits = transport.in_rank_order([part[1:] for part in parts])
    smoothing, class_weight = rules.label_smoothing, rules.class_weight
    if class_weight is None:
        loss = lse - (1 - smoothing) * own if smoothing else lse - own
    else:
        loss = (1 - smoothing) * class_weight[flat.clamp(0, whole - 1)] * (lse - own)
        if smoothing:
            loss = loss + (smoothing / whole) * class_weight.sum() * lse
    for total in logits:
        loss = loss - (smoothing / whole) * total
    if rules.z_loss:
        loss = loss + rules.z_loss * lse.square()
    kept = flat != rules.ignore_index
    loss = loss.masked_fill(~kept, 0)
    if x.is_cuda:
        loss = loss.masked_fill(kept & ((flat < 0) | (flat >= whole)), float("nan"))
    return loss.view(target.shape), lse.view(target.shape)


def _bwd(
    grad_loss, x, weight, target, lse, bias, classes, group, need_x, need_weight, need_bias, **rules
):
    ranks = Ranks(group)  # forward has checked that they agree
    first, whole = _own_classes(weight, ranks, classes)
    flat = target.reshape(-1)
    rows = x.reshape(flat.numel(), x.shape[-1])
    share, dweight, dbias = chunks.part_of_backward(
        grad_loss.reshape(-1),
        rows,
        weight,
        flat,
        lse.reshape(-1),
        bias,
        chunks.Rules(**rules),
        need_x,
        need_weight,
        need_bias,
        first,
        whole,
    )
    if not need_x:
        return share.to(x.dtype), dweight, dbias
    rows_cut = Cut(share.shape[0], ranks.size, "contiguous")
    return transport.reduced(share, rows_cut, ranks, x.dtype).view(x.shape), dweight, dbias


def _fwd_fake(x, target, **_):
    return tuple(x.new_empty(target.shape, dtype=chunks.accumulator(x)) for _ in range(2))


def _bwd_fake(x, weight, need_x, need_weight, need_bias, **_):
    shapes = ((x.shape, need_x), (weight.shape, need_weight), (weight.shape[:1], need_bias))
    return tuple(x.new_empty(shape if needed else 0) for shape, needed in shapes)


def _save(needs, args, loss, lse):
    x, weight, target, bias, class_weight = args[:5]
    return (x, weight, target, bias, class_weight, lse), {}


def _backward(needs, grad_loss, grad_lse, reduction, **kept):
    # lse is returned only for backward, so grad_lse is ignored; loss is not reduced here
    if grad_loss is None or not needs & {"x", "weight", "bias"}:
        return {}
    wanted = {f"need_{name}": name in needs for name in ("x", "weight", "bias")}
    grads = _vocab_parallel_lce_bwd.call_named(**kept, **wanted, grad_loss=grad_loss)
    return dict(zip(("x", "weight", "bias"), grads, strict=True))


_vocab_parallel_lce_bwd = define_op_of_ranks(
    "vocab_parallel_lce_bwd",
    kernel=_bwd,
    symbolic=_bwd_fake,
    refuse="vocab_parallel_lce_bwd: it has no backward",
)
_vocab_parallel_lce = define_op_of_ranks(
    "vocab_parallel_lce_fwd",
    kernel=_fwd,
    symbolic=_fwd_fake,
    save=_save,
    saved=("x", "weight", "target", "bias", "class_weight", "lse"),
    backward=_backward,
    without_gradient=("class_weight",),
    autocast=("x", "weight", "bias"),
)
_vocab_parallel_lce.said = _NAME
