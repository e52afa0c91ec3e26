# SPDX-License-Identifier: BSD-3-Clause
"""cross_entropy of logits: the public function, and the declaration of the op, which returns each
row's loss and lse."""

from typing import Literal, NoReturn, get_args

import torch
from torch import Tensor

from .._library import NAMESPACE
from . import batching, fakes
from .define import define_op
from .in_place import define_in_place
from .keywords import refuse_unknown
from .vectors import widened

__all__ = ["Reduction", "cross_entropy", "reduce_rows", "total_weight", "weight_of_mean"]

Reduction = Literal["none", "mean", "sum"]


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *more: NoReturn,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
    logit_scale: float = 1.0,
    reduction: Reduction = "mean",
    z_loss: float = 0.0,
    **unknown: NoReturn,
) -> Tensor:
    """Cross entropy of logits and classes. Forward allocates no tensor of the logits' size.

    In float32 (float64 for float64), with e the label smoothing and w the class weights::

        z = logit_scale * logits,  softcap > 0: z = softcap * tanh(logit_scale * logits / softcap)
        lse = log(sum over c of exp(z[c]))
        loss = (1 - e) * w[t] * (lse - z[t]) + e / V * sum over c of w[c] * (lse - z[c]) + z_loss * lse^2

    Args:
        logits: [..., V], float32, bfloat16, float16 or float64; V is 1 or more. Leading dimensions
            may have any strides. If the last dimension is not contiguous, logits are copied first.
        target: [...] int64, classes in [0, V) or ignore_index.
        weight: [V] float32 (float64 with float64). A weight of fewer bits is converted first.
        ignore_index: rows with this target have loss 0 and gradient 0, and are not read.
        label_smoothing: between 0 and 1.
        softcap: 0 (off) or more.
        logit_scale: finite.
        reduction: ``"none"``, ``"sum"`` or ``"mean"``. The mean is the sum, divided by the sum of
            w[t] over the rows that are not ignored. If all rows are ignored it is NaN, as in torch.
        z_loss: factor of lse^2, which keeps lse near 0; 0 switches it off (PaLM, arXiv:2204.02311,
            section 5, uses 1e-4). As in Liger Kernel, class weights and label smoothing do not
            change this term, and a mean divides it by the number of rows that are not ignored.

    Returns:
        [] or, without a reduction, [...]: float32 (float64 with float64), also for 16-bit logits.

    Gradient: logits, in their dtype, 0 in ignored rows. Not twice differentiable.

    Raises:
        ValueError: a shape, dtype or value that the op does not take.
        IndexError: a target that is no class. On CUDA the loss of that row is NaN, and the next
            call of an op or `check_errors` raises the error.
    """
    if more or unknown:
        refuse_unknown(cross_entropy, unknown, more)
    weight = widened(weight, logits, own=False)
    if weight is not None and z_loss != 0 and reduction == "mean":
        weight = weight_of_mean(weight, target, ignore_index)
    rows, _ = _cross_entropy.call(
        logits, target, weight, ignore_index, label_smoothing, softcap, logit_scale, z_loss
    )
    return reduce_rows("cross_entropy", rows, target, weight, ignore_index, reduction)


def reduce_rows(
    op: str,
    rows: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: Reduction,
) -> Tensor:
    """The losses of the rows, summed or averaged."""
    if reduction not in get_args(Reduction):
        raise ValueError(
            f"{NAMESPACE}::{op}: reduction must be none, mean or sum, got '{reduction}'"
        )
    if reduction == "none":
        return rows
    # a float32 sum over many rows would err more than the rows do
    total = rows.sum(dtype=torch.float64)
    if reduction == "mean":
        total = total / total_weight(target, weight, ignore_index)
    return total.to(rows.dtype)


def weight_of_mean(weight: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Scales class weights so that their sum over the rows that count is the number of these rows.
    The mean of the weighted losses does not change.

    A mean then divides z_loss by that number, and a row's gradient has the size of an unweighted
    one. Arguments that the op refuses are returned unchanged, so that the op raises the error.
    """
    tensors = isinstance(weight, Tensor) and isinstance(target, Tensor)
    if not tensors or weight.dim() != 1 or weight.shape[0] == 0 or weight.device != target.device:
        return weight
    kept = target != ignore_index
    if target.dtype is not torch.int64 or not isinstance(kept, Tensor):
        return weight
    total = total_weight(target, weight, ignore_index)
    ratio = kept.sum(dtype=torch.float64) / total
    return (weight * ratio.where(total != 0, 1.0)).to(weight.dtype)


def total_weight(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """The divisor of a mean: the sum of the weights of the rows that are not ignored."""
    kept = target != ignore_index
    if weight is None:
        return kept.sum()
    return (
        weight[target.clamp(0, weight.shape[0] - 1)].masked_fill(~kept, 0).sum(dtype=torch.float64)
    )


def _symbolic(logits, target, **_):
    stats = fakes.stats_dtype(logits)
    return logits.new_empty(target.shape, dtype=stats), logits.new_empty(target.shape, dtype=stats)


def _save(needs, args, loss, lse):
    return (args[0], args[1], args[2] if len(args) > 2 else None, lse), {}


def _backward(
    needs, logits, target, lse, grad_loss, grad_lse, ignore_index, softcap, logit_scale, **rules
):
    if grad_loss is None:
        grad_loss = torch.zeros_like(lse)
    same = {"ignore_index": ignore_index, "softcap": softcap, "logit_scale": logit_scale}
    dlogits = _cross_entropy_bwd.call_named(
        grad_loss=grad_loss, logits=logits, target=target, lse=lse, **same, **rules
    )
    if grad_lse is not None:  # torch.func passes zeros
        dlogits = dlogits + _lse_gradient(grad_lse, logits, target, lse, **same).to(dlogits.dtype)
    return {"logits": dlogits}


def _lse_gradient(grad_lse, logits, target, lse, ignore_index, softcap, logit_scale):
    """The gradient that arrives through lse. Only direct callers of the op get lse."""
    z, slope = logits.to(lse.dtype) * logit_scale, logit_scale
    if softcap > 0:
        z = softcap * torch.tanh(z / softcap)
        slope = logit_scale * (1 - (z / softcap) ** 2)
    grad = grad_lse[..., None] * torch.exp(z - lse[..., None]) * slope
    return grad.masked_fill((target == ignore_index)[..., None], 0)


_cross_entropy_bwd = define_op(
    "cross_entropy_bwd",
    symbolic=lambda logits, **_: (logits.new_empty(logits.shape),),
    refuse="cross_entropy: it is not twice differentiable",
    fold=batching.rows("grad_loss", "logits", "target", "lse"),
)
_cross_entropy = define_op(
    "cross_entropy",
    public=cross_entropy,
    symbolic=_symbolic,
    save=_save,
    saved=("logits", "target", "weight", "lse"),
    backward=_backward,
    without_gradient=("weight",),
    fold=batching.rows("logits", "target"),
)
# cross_entropy_grad writes the losses, lse and the gradient of the sum of losses in one pass over
# the logits. dlogits may be logits. The op has no gradient.
define_in_place("cross_entropy_grad", lambda **_: (), ("loss", "lse", "dlogits"))
