# SPDX-License-Identifier: BSD-3-Clause
"""linear_kl_div, which torch_gpukern.nn exports: the public function, and the declarations of its
ops. Their kernels are Python: gemm and kl_div over some rows at a time, by the loop of
linear_cross_entropy."""

import math
from typing import Literal

import torch
from torch import Tensor

from .._library import is_grad_enabled, ops
from . import linear_cross_entropy_chunks as chunks
from .define import define_op
from .gemm import _torch_allows_tf32

__all__ = ["linear_kl_div"]

_NAME = "linear_kl_div"


def linear_kl_div(
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    target: Tensor | None = None,
    ignore_index: int = -100,
    beta: float = 0.0,
    temperature: float = 1.0,
    reduction: Literal["mean", "sum"] = "mean",
    low_memory: bool = False,
) -> Tensor:
    """Distillation: the divergence of student and teacher over all classes, without either's
    logits in memory. `kl_div` of the results of two linear layers, whose logits are float32
    (float64 for float64).

    With T and S the softmax of teacher's and student's logits / temperature, a token's loss is
    ``KL(T || S)`` for beta 0, ``KL(S || T)`` for beta 1, and between them, with M = beta T +
    (1 - beta) S, ``beta KL(T || M) + (1 - beta) KL(S || M)``: Liger's fused linear JSD.

    Args:
        x: [..., H] of the student, float32, bfloat16, float16 or float64.
        weight, bias: [V, H] and [V] of the student.
        teacher_x, teacher_weight, teacher_bias: of the teacher, for the same tokens and classes. H
            and dtype may differ from the student's. The teacher gets no gradient.
        target: [...] int64; tokens whose target is ignore_index do not count, and their x may be
            NaN. None counts all.
        reduction: ``"mean"`` over the tokens that count, or ``"sum"``.
        low_memory: sum the gradient of weight in weight's dtype (float32 for float16), over blocks
            of H / 2 tokens. Every block rounds the sum.

    Returns:
        [] float32 (float64 for float64). Gradients of x, weight and bias are made in the forward
        pass. The gradient of the logits is rounded once to x's dtype; those of weight and bias are
        summed in float32. Not twice differentiable.

    Memory beyond arguments and results, for M tokens and b bytes a number (2 in bfloat16), forward
    and backward together, is at most::

        min(b M V, 8 V H) + max(b V H, 256 MiB) + 4 b M H + 256 MiB          on CUDA
        min(b M V, 8 V H) + 128 MiB + 4 b M H + 256 MiB                      on the CPU

    where weight requires a gradient; part of it is free before the gradient of weight is allocated.
    If weight requires none, it is 256 MiB + 4 b M H. In float64, 8 V H doubles. With low_memory it
    is 2 b V H + 4 b M H + 256 MiB (3 b V H for float16).

    Raises:
        ValueError: shapes that do not fit, beta outside [0, 1], a temperature that is not positive,
            another reduction.

    Hinton et al. (2015), arXiv:1503.02531; Agarwal et al. (GKD), arXiv:2306.13649.
    """
    # Each text is made inside its `if`: under torch.compile a number may be a symbol, and printing
    # it would be a guard.
    if not 0 < temperature < math.inf:
        raise _refused(f"temperature must be positive and finite, got {temperature}")
    if not 0 <= beta <= 1:
        raise _refused(f"beta must be between 0 and 1, got {beta}")
    if reduction not in ("mean", "sum"):
        raise _refused(f"reduction must be mean or sum, got {reduction!r}")
    tokens = x.shape[:-1]
    if tokens != teacher_x.shape[:-1]:
        raise _refused(
            f"teacher_x must have x's tokens {list(tokens)}, got {list(teacher_x.shape[:-1])}"
        )
    if weight.shape[0] != teacher_weight.shape[0]:
        raise _refused(
            f"teacher_weight must have weight's {weight.shape[0]} classes, got "
            f"{teacher_weight.shape[0]}"
        )
    if target is not None and (target.shape != tokens or target.is_floating_point()):
        raise _refused(
            f"target must be integers of shape {list(tokens)}, got {target.dtype} "
            f"{list(target.shape)}"
        )
    rows = x.reshape(-1, x.shape[-1])
    mask = None
    if target is not None:
        counts = target.reshape(-1) != ignore_index
        # x of a row that does not count may be NaN, which times its gradient of 0 would be NaN
        rows = rows.masked_fill(~counts[:, None], 0.0)
        mask = counts.to(torch.uint8)
    teacher = (
        teacher_x.detach().reshape(-1, teacher_x.shape[-1]),
        teacher_weight.detach(),
        None if teacher_bias is None else teacher_bias.detach(),
    )
    tf32 = x.is_cuda and x.dtype == torch.float32 and _torch_allows_tf32()
    wants = (t is not None and is_grad_enabled() and t.requires_grad for t in (rows, weight, bias))
    precision = "tf32" if tf32 else "ieee"
    return _scalar.call(
        rows,
        weight,
        bias,
        *teacher,
        mask,
        beta,
        temperature,
        precision,
        reduction,
        low_memory,
        *wants,
    )[0]


def _refused(text: str) -> ValueError:
    return ValueError(f"{_NAME}: {text}")


def _kernel(
    x, weight, bias, teacher_x, teacher_weight, teacher_bias, mask, beta, temperature,
    fp32_precision, reduction, low_memory, need_x, need_weight, need_bias,
):  # fmt: skip
    wide = chunks.accumulator(x)
    rules = chunks.Rules(None, 0, 0.0, 0.0, 1.0, 0.0, fp32_precision)
    loss = x.new_empty(x.shape[0], dtype=wide)
    buffer = teacher_x.new_empty(0)  # of the teacher's logits, reused while the rows fit

    def teachers(rows: slice, n: int) -> Tensor:
        """The teacher's logits of n rows, in the dtype of the student's logits."""
        nonlocal buffer
        own = chunks.accumulator(teacher_x)
        if buffer.shape[0] < n:
            buffer = teacher_x.new_empty(n, teacher_weight.shape[0], dtype=own)
        z = buffer[:n]
        c = None if teacher_bias is None else teacher_bias.to(teacher_x.dtype)
        ops.gemm.out(
            teacher_x[rows], teacher_weight.mT, c, out_dtype=own, fp32_precision=fp32_precision,
            out=z,
        )  # fmt: skip
        return z.to(wide)

    def loss_of(rows: slice, z: Tensor, dz: Tensor | None) -> None:
        other = teachers(rows, z.shape[0])
        kept = None if mask is None else mask[rows]
        if dz is None:
            loss[rows] = ops.kl_div.default(z, other, kept, beta, temperature)
        else:
            ops.kl_div_grad.default(z, other, loss[rows], dz, kept, beta, temperature)

    needs = need_x, need_weight, need_bias and bias is not None
    own_bias = None if bias is None else bias.to(x.dtype)
    dx, kept, dbias = chunks.gradients_by_rows(
        x, weight, own_bias, rules, *needs, loss_of, others=1, sum_dtype=_sum_dtype(x, low_memory)
    )
    total, factor = loss.sum(dtype=torch.float64), loss.new_ones(())
    if reduction == "mean":
        count = x.shape[0] if mask is None else mask.sum(dtype=torch.float64)
        count = torch.as_tensor(count, dtype=torch.float64, device=x.device)
        # If no row counts, the loss is NaN and the gradients are 0.
        factor = torch.where(count == 0, 0.0, 1.0 / count).to(wide)
        total = total / count
    return total.to(wide), factor, dx, kept, dbias


def _sum_dtype(x: Tensor, low_memory: bool) -> torch.dtype | None:
    if not low_memory:
        return None
    # the gradient of a sum over all tokens may exceed float16
    return torch.float32 if x.dtype is torch.float16 else x.dtype


def _bwd_kernel(grad_loss, factor, dx, kept, dbias, x, fp32_precision, low_memory):
    if low_memory:
        factor = factor * grad_loss
        dweight = chunks.times(kept, factor, x.dtype)
        return chunks.times(dx, factor, x.dtype), dweight, chunks.times(dbias, factor, x.dtype)
    rules = chunks.Rules(None, 0, 0.0, 0.0, 1.0, 0.0, fp32_precision)
    return chunks.scaled(factor * grad_loss, dx, kept, dbias, x, rules)


def _fake(x, weight, bias, low_memory, need_x, need_weight, need_bias, **_):
    wide, v = chunks.accumulator(x), weight.shape[0]
    loss, factor = (x.new_empty((), dtype=wide) for _ in range(2))
    rows = chunks.kept_rows(x, x.shape[0])
    kept = x.new_empty((rows, v) if need_weight else 0)
    if low_memory and need_weight:
        kept = x.new_empty(weight.shape, dtype=_sum_dtype(x, True))
    dbias = x.new_empty(v if need_bias and bias is not None else 0, dtype=wide)
    return loss, factor, x.new_empty(x.shape if need_x else 0), kept, dbias


def _bwd_fake(dx, kept, dbias, x, low_memory, **_):
    if low_memory:
        return x.new_empty(dx.shape), x.new_empty(kept.shape), x.new_empty(dbias.shape)
    dweight = x.new_empty((kept.shape[1], x.shape[-1]) if kept.dim() == 2 else 0)
    return x.new_empty(dx.shape), dweight, x.new_empty(dbias.shape)


def _save(needs, args, loss, factor, dx, kept, dbias):
    return (factor, dx, kept, dbias, args[0]), {}


def _backward(needs, factor, dx, kept, dbias, x, fp32_precision, low_memory, grad_loss, **_):
    dx, dweight, dbias = _scalar_bwd.call(
        grad_loss, factor, dx, kept, dbias, x, fp32_precision, low_memory
    )
    return {"x": dx, "weight": dweight, "bias": dbias}


def _flops(x, weight, teacher_x, need_x=False, need_weight=False, **_) -> int:
    student = math.prod(x) * (1 + need_x + need_weight)
    return 2 * weight[0] * (student + math.prod(teacher_x))


_scalar_bwd = define_op(
    "linear_kl_div_bwd",
    kernel=_bwd_kernel,
    symbolic=_bwd_fake,
    refuse="linear_kl_div: it is not twice differentiable",
)
_scalar = define_op(
    "linear_kl_div_fwd",
    kernel=_kernel,
    symbolic=_fake,
    save=_save,
    saved=("factor", "dx", "kept", "dbias", "x"),
    backward=_backward,
    without_gradient=("teacher_x", "teacher_weight", "teacher_bias"),
    autocast=("x", "weight", "bias", "teacher_x", "teacher_weight", "teacher_bias"),
    flops=_flops,
)
