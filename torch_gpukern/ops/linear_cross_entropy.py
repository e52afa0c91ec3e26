# SPDX-License-Identifier: BSD-3-Clause
"""linear_cross_entropy: the public function, and the declarations of its ops. Their kernels are
Python: linear_cross_entropy_chunks.py calls gemm and cross_entropy."""

import math
from typing import NoReturn, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from .._library import NAMESPACE, is_grad_enabled, library
from . import linear_cross_entropy_chunks as chunks
from .cross_entropy import Reduction, cross_entropy, reduce_rows, total_weight, weight_of_mean
from .define import define_op
from .gemm import _torch_allows_tf32
from .keywords import hide_unknown, refuse_unknown
from .linear import PLAIN, has_a_function_of_its_own
from .vectors import widened
from .wrong_types import refuse_non_bool, refuse_non_tensors

__all__ = ["linear_cross_entropy"]

_NAME = f"{NAMESPACE}::linear_cross_entropy"


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *more: NoReturn,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
    logit_scale: float = 1.0,
    reduction: Reduction = "mean",
    low_memory: bool = False,
    z_loss: float = 0.0,
    **unknown: NoReturn,
) -> Tensor:
    """Cross entropy of a linear layer's results, without all logits in memory.

    ``cross_entropy(x @ weight.mT + bias, target, ...)``. The logits are float32 (float64 for
    float64). Only those of some rows, or of some classes, are in memory at a time.

    Args:
        x: [..., H], float32, bfloat16, float16 or float64.
        weight: [V, H], x's dtype, any strides.
        target: [...] int64, classes in [0, V) or ignore_index.
        bias: [V], x's dtype.
        class_weight: [V], `cross_entropy`'s weight.
        ignore_index, label_smoothing, softcap, logit_scale, z_loss: as in `cross_entropy`.
        reduction: ``"mean"``, ``"sum"``, or ``"none"``; as in `cross_entropy`.
        low_memory: keep only the inputs and one float32 number a row for backward, which computes
            the logits again. Reduction ``"none"`` always does this.

    Returns:
        [] or, without a reduction, [...]: float32 (float64 with float64), also for a 16-bit x.

    Gradients: x, weight and bias. The gradient of the logits is rounded once to x's dtype. Those of
    weight and bias are summed in float32. They have the same bits each time, also in a second
    backward over the same graph. Not twice differentiable.

    Memory beyond arguments and results, for M rows and b bytes a number (2 in bfloat16), forward
    and backward together, is at most::

        mean, sum               min(b M V, 8 V H) + b M H + 256 MiB     6 M H V FLOPs
        low_memory or none      4 M H + 512 MiB                         8 M H V FLOPs

    In float64, 8 V H and 4 M H double. For mean and sum it is b M H + 256 MiB if weight requires no
    gradient, and 256 MiB if nothing does.

    A tensor subclass with its own ``__torch_function__``, such as a quantised weight, is multiplied
    by ``F.linear``, as in `linear`. All logits are then in memory, and `cross_entropy` reads them.

    Autocast casts x, weight and bias. Float32 on CUDA follows
    ``torch.backends.cuda.matmul.fp32_precision``.

    Raises:
        ValueError: a shape, dtype or value that the op does not take.
        IndexError: a target that is no class. On CUDA the loss of that row is NaN, and the next
            call of an op or `check_errors` raises the error.

    Gradients in the forward pass: Liger Kernel, arXiv:2410.10989. Logits computed again in
    backward: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models" (2024),
    arXiv:2411.09009.
    """
    if more or unknown:
        refuse_unknown(linear_cross_entropy, unknown, more)
    if reduction not in get_args(Reduction):
        raise ValueError(f"{_NAME}: reduction must be none, mean or sum, got '{reduction}'")
    if any(
        type(t) not in PLAIN and has_a_function_of_its_own(t, refuses=False)
        for t in (x, weight, bias)
    ):
        refuse_non_bool(_NAME, "low_memory", low_memory)
        return cross_entropy(
            F.linear(x, weight, bias),
            target,
            weight=class_weight,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            softcap=softcap,
            logit_scale=logit_scale,
            reduction=reduction,
            z_loss=z_loss,
        )
    tf32 = getattr(x, "is_cuda", False) and x.dtype == torch.float32 and _torch_allows_tf32()
    class_weight = widened(class_weight, x, own=False)
    if class_weight is not None and reduction == "mean":
        # without this scaling, float16 gradients would underflow with small class weights and
        # overflow with large ones
        class_weight = weight_of_mean(class_weight, target, ignore_index)
    rules = (
        class_weight,
        ignore_index,
        label_smoothing,
        softcap,
        logit_scale,
        z_loss,
        "tf32" if tf32 else "ieee",
    )
    refuse_non_bool(_NAME, "low_memory", low_memory)
    if low_memory or reduction == "none":
        loss, _ = _rows.call(x, weight, target, bias, *rules)
        return reduce_rows(
            "linear_cross_entropy", loss, target, class_weight, ignore_index, reduction
        )
    wants = (
        t is not None and is_grad_enabled() and getattr(t, "requires_grad", False)
        for t in (x, weight, bias)
    )
    return _scalar.call(x, weight, target, bias, *rules, reduction, *wants)[0]


def row_losses(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    softcap: float,
    logit_scale: float,
) -> Tensor:
    """`linear_cross_entropy` without a reduction, for 6 M H V FLOPs instead of 8: forward keeps the
    gradient of the logits, b M V bytes, if it is at most twice as large as a float32 sum of
    weight's gradient. `linear_log_probs` calls it."""
    rules = None, ignore_index, 0.0, softcap, logit_scale, 0.0
    tf32 = x.is_cuda and x.dtype == torch.float32 and _torch_allows_tf32()
    return _kept.call(x, weight, target, bias, *rules, "tf32" if tf32 else "ieee")[0]


# ---- checks --------------------------------------------------------------------------------------


def _require(holds: bool, text: str) -> None:
    if not holds:
        raise ValueError(f"{_NAME}: {text}")


def _dtype(x: torch.dtype) -> str:
    return str(x).removeprefix("torch.")


def _check(
    x, weight, target, bias, class_weight, label_smoothing, softcap, logit_scale, z_loss, **_
) -> None:
    """Shapes, dtypes, devices and values; of symbols these are guards."""
    refuse_non_tensors(_NAME, x=x, weight=weight, target=target)
    _require(x.dim() >= 1, f"x must have at least 1 dimension, got {x.dim()}")
    _require(
        x.dtype in chunks.FLOATS,
        f"x must be float32, bfloat16, float16 or float64, got {_dtype(x.dtype)}",
    )
    _require(weight.dim() == 2, f"weight must have 2 dimensions [V, H], got {weight.dim()}")
    _require(weight.shape[0] >= 1, "weight must have 1 class or more, got 0")
    _require(
        weight.shape[1] == x.shape[-1],
        f"weight has {weight.shape[1]} columns, x has {x.shape[-1]}; they must match",
    )
    probabilities = (
        "; probabilities of classes are not taken, torch.nn.functional.cross_entropy takes them"
    )
    _require(
        target.dtype is torch.int64,
        f"target must be int64, got "
        f"{_dtype(target.dtype)}{probabilities if target.is_floating_point() else ''}",
    )
    _require(
        target.dim() == x.dim() - 1 and all(a == b for a, b in zip(target.shape, x.shape)),
        f"target must have shape {list(x.shape[:-1])}, got {list(target.shape)}",
    )
    wide = chunks.accumulator(x)
    for name, t, dtype in (
        ("weight", weight, x.dtype),
        ("bias", bias, x.dtype),
        ("class_weight", class_weight, wide),
    ):
        if t is None:
            continue
        _require(t.dtype is dtype, f"{name} must be {_dtype(dtype)}, got {_dtype(t.dtype)}")
        if name != "weight":
            _require(
                t.dim() == 1 and t.shape[0] == weight.shape[0],
                f"{name} must have shape [{weight.shape[0]}], got {list(t.shape)}",
            )
    for name, t in (
        ("weight", weight),
        ("target", target),
        ("bias", bias),
        ("class_weight", class_weight),
    ):
        _require(
            t is None or t.device == x.device,
            f"{name} is on {'' if t is None else t.device}, x is on {x.device}; they must be on "
            f"one device",
        )
    _require(
        0 <= label_smoothing <= 1,
        f"label_smoothing must be between 0 and 1, got {label_smoothing:g}",
    )
    _require(
        math.isfinite(softcap) and softcap >= 0,
        f"softcap must be 0 (off) or a positive finite number, got {softcap:g}",
    )
    _require(math.isfinite(logit_scale), f"logit_scale must be finite, got {logit_scale:g}")
    _require(math.isfinite(z_loss), f"z_loss must be finite, got {z_loss:g}")


def _check_targets(target: Tensor, classes: int, ignore_index: int) -> None:
    """On the CPU; CUDA's kernels report to the error word."""
    if target.device.type != "cpu":
        return
    bad = ((target < 0) | (target >= classes)) & (target != ignore_index)
    if bad.any():
        row = int(bad.to(torch.int8).argmax())
        raise IndexError(
            f"{_NAME}: target is expected to hold classes in [0, {classes}) or ignore_index, got "
            f"{int(target[row])} in row {row}"
        )


# ---- kernels -------------------------------------------------------------------------------------


def _flat(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return x.reshape(target.numel(), x.shape[-1]), target.reshape(-1)


def _checked(x, weight, target, bias, rules: dict) -> tuple[chunks.Rules, Tensor, Tensor]:
    """Checks a forward op's arguments. Returns its rules, x [M, H] and target [M]."""
    _check(x, weight, target, bias, **rules)
    flat, classes = _flat(x, target)
    _check_targets(classes, weight.shape[0], rules["ignore_index"])
    return chunks.Rules(**rules), flat, classes


def _scalar_kernel(x, weight, target, bias, reduction, need_x, need_weight, need_bias, **rules):
    rules, flat, classes = _checked(x, weight, target, bias, rules)
    loss, dx, kept, dbias = chunks.scalar(
        flat, weight, classes, bias, rules, need_x, need_weight, need_bias and bias is not None
    )
    total, factor = loss.sum(dtype=torch.float64), loss.new_ones(())
    if reduction == "mean":
        divisor = total_weight(target, rules.class_weight, rules.ignore_index).to(torch.float64)
        # if all rows are ignored the loss is NaN, but gradients are 0
        none = (classes == rules.ignore_index).all()
        factor = torch.where(none, 0.0, 1.0 / divisor).to(loss.dtype)
        total = total / divisor
    return total.to(loss.dtype), factor, dx.view(x.shape) if need_x else dx, kept, dbias


def _scalar_bwd_kernel(grad_loss, factor, dx, kept, dbias, x, fp32_precision):
    flat = x.reshape(-1, x.shape[-1]) if x.shape[-1] else x.reshape(math.prod(x.shape[:-1]), 0)
    rules = chunks.Rules(None, 0, 0.0, 0.0, 1.0, 0.0, fp32_precision)
    made, dweight, dbias = chunks.scaled(factor * grad_loss, dx, kept, dbias, flat, rules)
    return made, dweight, dbias


def _rows_kernel(x, weight, target, bias, **rules):
    rules, flat, classes = _checked(x, weight, target, bias, rules)
    return tuple(r.view(target.shape) for r in chunks.rows(flat, weight, classes, bias, rules))


def _rows_bwd_kernel(
    grad_loss, x, weight, target, lse, bias, need_x, need_weight, need_bias, **rules
):
    flat, classes = _flat(x, target)
    needs = need_x, need_weight, need_bias
    of_rows = grad_loss.reshape(-1), flat, weight, classes, lse.reshape(-1), bias
    dx, dweight, dbias = chunks.rows_backward(*of_rows, chunks.Rules(**rules), *needs)
    return dx.view(x.shape) if need_x else dx, dweight, dbias


def _kept_kernel(x, weight, target, bias, **rules):
    rules, flat, classes = _checked(x, weight, target, bias, rules)
    loss, lse, kept = chunks.rows_and_gradient(flat, weight, classes, bias, rules)
    return loss.view(target.shape), lse.view(target.shape), kept


def _kept_bwd_kernel(
    grad_loss, kept, x, weight, target, lse, bias, need_x, need_weight, need_bias, **rules
):
    flat, classes = _flat(x, target)
    rules, needs = chunks.Rules(**rules), (need_x, need_weight, need_bias)
    grad = grad_loss.reshape(-1)
    if kept.shape[0] < flat.shape[0]:
        of_rows = grad, flat, weight, classes, lse.reshape(-1), bias
        grads = chunks.rows_backward(*of_rows, rules, *needs)
    else:
        grads = chunks.kept_rows_backward(grad, kept, flat, weight, rules, *needs)
    return grads[0].view(x.shape) if need_x else grads[0], *grads[1:]


library.impl("linear_cross_entropy", linear_cross_entropy, "CompositeImplicitAutograd")


# ---- fake functions ------------------------------------------------------------------------------


def _scalar_fake(x, weight, target, bias, need_x, need_weight, need_bias, **rules):
    _check(x, weight, target, bias, **rules)
    wide, v = chunks.accumulator(x), weight.shape[0]
    loss, factor = (x.new_empty((), dtype=wide) for _ in range(2))
    kept = x.new_empty((chunks.kept_rows(x, target.numel()), v) if need_weight else 0)
    dx = x.new_empty(x.shape if need_x else 0)
    return (
        loss,
        factor,
        dx,
        kept,
        x.new_empty(v if need_bias and bias is not None else 0, dtype=wide),
    )


def _scalar_bwd_fake(dx, kept, dbias, x, **_):
    dweight = x.new_empty((kept.shape[1], x.shape[-1]) if kept.dim() == 2 else 0)
    return x.new_empty(dx.shape), dweight, x.new_empty(dbias.shape)


def _rows_fake(x, weight, target, bias, **rules):
    _check(x, weight, target, bias, **rules)
    return tuple(x.new_empty(target.shape, dtype=chunks.accumulator(x)) for _ in range(2))


def _rows_bwd_fake(x, weight, need_x, need_weight, need_bias, **_):
    shapes = ((x.shape, need_x), (weight.shape, need_weight), (weight.shape[:1], need_bias))
    return tuple(x.new_empty(shape if needed else 0) for shape, needed in shapes)


def _kept_fake(x, weight, target, **rules):
    loss, lse = _rows_fake(x, weight, target, **rules)
    return loss, lse, x.new_empty(chunks.all_rows(x, target.numel()), weight.shape[0])


# ---- gradients -----------------------------------------------------------------------------------


def _scalar_save(needs, args, loss, factor, dx, kept, dbias):
    return (factor, dx, kept, dbias, args[0]), {}


def _scalar_backward(needs, factor, dx, kept, dbias, x, fp32_precision, grad_loss, **_):
    dx, dweight, dbias = _scalar_bwd.call(grad_loss, factor, dx, kept, dbias, x, fp32_precision)
    return {"x": dx, "weight": dweight, "bias": dbias}


def _rows_save(needs, args, loss, lse):
    x, weight, target, bias, class_weight = args[:5]
    return (x, weight, target, bias, class_weight, lse), {}


def _rows_backward(needs, grad_loss, grad_lse, **kept):
    # only direct callers of the op get lse; torch.func passes zeros for its gradient
    if grad_lse is not None and grad_loss is not None:
        raise NotImplementedError(f"{_NAME}: lse has no gradient")
    return _gradients(_rows_bwd, needs, grad_loss, kept)


def _kept_save(needs, args, loss, lse, kept):
    return (*args[:5], lse, kept), {}


def _kept_backward(needs, grad_loss, grad_lse, grad_kept, **kept):
    if grad_lse is not None or grad_kept is not None:
        raise NotImplementedError(f"{_NAME}: it is not twice differentiable")
    return _gradients(_kept_bwd, needs, grad_loss, kept)


def _gradients(bwd, needs, grad_loss: Tensor, kept: dict) -> dict[str, Tensor]:
    """Of x, weight and bias, by the op bwd."""
    wanted = {f"need_{name}": name in needs for name in ("x", "weight", "bias")}
    dx, dweight, dbias = bwd.call_named(**kept, **wanted, grad_loss=grad_loss)
    return {"x": dx, "weight": dweight, "bias": dbias}


# ---- declarations --------------------------------------------------------------------------------


def _flops(times: int):
    def flops(x, weight, need_x=False, need_weight=False, **_) -> int:
        return 2 * math.prod(x) * weight[0] * (times + need_x + need_weight)

    return flops


def _define_bwd(name: str, **how):
    """An op that computes gradients and has none."""
    refuse = f"{_NAME.split('::')[1]}: it is not twice differentiable"
    return define_op(f"linear_cross_entropy_{name}", refuse=refuse, **how)


def _define_fwd(name: str, **how):
    op = define_op(
        f"linear_cross_entropy_{name}",
        without_gradient=("class_weight",),
        autocast=("x", "weight", "bias"),
        flops=_flops(1),
        **how,
    )
    op.said = _NAME
    return op


_OF_ROWS = "x", "weight", "target", "bias", "class_weight", "lse"
_scalar_bwd = _define_bwd("bwd", kernel=_scalar_bwd_kernel, symbolic=_scalar_bwd_fake)
_scalar = _define_fwd(
    "fwd",
    kernel=_scalar_kernel,
    symbolic=_scalar_fake,
    save=_scalar_save,
    saved=("factor", "dx", "kept", "dbias", "x"),
    backward=_scalar_backward,
)
_kept_bwd = _define_bwd(
    "kept_bwd", kernel=_kept_bwd_kernel, symbolic=_rows_bwd_fake, flops=_flops(0)
)
_kept = _define_fwd(
    "kept",
    kernel=_kept_kernel,
    symbolic=_kept_fake,
    save=_kept_save,
    saved=(*_OF_ROWS, "kept"),
    backward=_kept_backward,
)
_rows_bwd = _define_bwd(
    "rows_bwd", kernel=_rows_bwd_kernel, symbolic=_rows_bwd_fake, flops=_flops(1)
)
_rows = _define_fwd(
    "rows",
    kernel=_rows_kernel,
    symbolic=_rows_fake,
    save=_rows_save,
    saved=_OF_ROWS,
    backward=_rows_backward,
)
hide_unknown(linear_cross_entropy)
