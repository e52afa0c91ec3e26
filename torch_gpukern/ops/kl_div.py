# SPDX-License-Identifier: BSD-3-Clause
"""kl_div of student's and teacher's logits: the public function, and the declaration of the op,
which returns each row's divergence and the gradient of their sum."""

from typing import NoReturn

import torch
from torch import Tensor

from .._library import bytes_of
from . import batching, fakes
from .define import define_op
from .in_place import define_in_place
from .keywords import refuse_unknown

__all__ = ["kl_div"]


def kl_div(
    logits: Tensor,
    teacher_logits: Tensor,
    *more: NoReturn,
    mask: Tensor | None = None,
    beta: float = 0.0,
    temperature: float = 1.0,
    **unknown: NoReturn,
) -> Tensor:
    """The divergence of a student's and a teacher's distribution over classes, for each row of
    logits: the loss of distillation. One launch on CUDA, with the gradient.

    In float32 (float64 for float64), with S and T the softmax of ``logits / temperature`` and
    ``teacher_logits / temperature``::

        beta 0      KL(T || S) = sum of T * (log(T) - log(S))
        beta 1      KL(S || T)
        between     beta * KL(T || M) + (1 - beta) * KL(S || M),  M = beta * T + (1 - beta) * S

    The last is the generalised Jensen-Shannon divergence of GKD and of Liger's JSD. A class of
    probability 0 adds nothing to the sum that it weighs, also where both logits are -inf.

    Args:
        logits: [..., V] of the student, float32, bfloat16, float16 or float64; V is 1 or more.
            Leading dimensions may have any strides. If the last dimension is not contiguous, logits
            are copied first.
        teacher_logits: like logits. The teacher gets no gradient.
        mask: [...] bool or uint8. A row with 0 has loss 0 and gradient 0, and is not read: it may
            hold NaN.
        beta: between 0 and 1.
        temperature: positive and finite.

    Returns:
        [...] float32 (float64 with float64), also for 16-bit logits.

    Gradient: logits, in their dtype, made in the forward pass. Not twice differentiable.

    Raises:
        ValueError: a shape, dtype or value that the op does not take.

    Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network" (2015),
    arXiv:1503.02531; Agarwal and others, "On-Policy Distillation of Language Models" (2023),
    arXiv:2306.13649.
    """
    if more or unknown:
        refuse_unknown(kl_div, unknown, more)
    if isinstance(mask, Tensor) and mask.dtype is torch.bool:
        mask = bytes_of(mask)
    return _kl_div.call(logits, teacher_logits, mask, beta, temperature)


def _symbolic(logits, **_):
    loss = logits.new_empty(logits.shape[:-1], dtype=fakes.stats_dtype(logits))
    return loss, logits.new_empty(logits.shape)


def _save(needs, args, loss, dlogits):
    return (dlogits,), {}


def _backward(needs, dlogits, grad_loss, grad_dlogits, **_):
    if grad_dlogits is not None:
        raise NotImplementedError("gpukern::kl_div: it is not twice differentiable")
    return {"logits": _kl_div_bwd.call(grad_loss, dlogits)}


def _times(grad_loss, dlogits):
    return (dlogits * grad_loss[..., None]).to(dlogits.dtype)


_kl_div_bwd = define_op(
    "kl_div_bwd",
    kernel=_times,
    symbolic=lambda dlogits, **_: dlogits.new_empty(dlogits.shape),
    refuse="kl_div: it is not twice differentiable",
    fold=batching.rows("grad_loss", "dlogits"),
)
_kl_div = define_op(
    "kl_div",
    public=kl_div,
    symbolic=_symbolic,
    save=_save,
    saved=("dlogits",),
    backward=_backward,
    # dlogits is then a result of the autograd.Function, so that a second derivative is refused
    reads_all=lambda args: True,
    refuse_fwd="kl_div_fwd has no backward; gpukern::kl_div has",
    without_gradient=("teacher_logits",),
    fold=batching.rows("logits", "teacher_logits", "mask"),
)
# kl_div_grad writes the losses and the gradient of their sum into the caller's tensors. dlogits may
# be logits, and of 16 bits beside float32 logits. The op has no gradient.
define_in_place("kl_div_grad", lambda **_: (), ("loss", "dlogits"))
