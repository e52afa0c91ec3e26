# SPDX-License-Identifier: BSD-3-Clause
"""Losses over a linear head without its logits in memory: log-probabilities of tokens, preference
(DPO), policy gradients (GRPO), distillation (KL and Jensen-Shannon), and two losses of routers.

The logits [T, V] exist for some rows, or some classes, at a time, as in `linear_cross_entropy`.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import gemm, linear_cross_entropy
from ..ops.fakes import stats_dtype
from ..ops.linear_cross_entropy_chunks import rows_at_once

__all__ = [
    "DPOLoss",
    "dpo_loss",
    "grpo_loss",
    "linear_dpo_loss",
    "linear_kl_div",
    "linear_log_probs",
    "load_balancing_loss",
    "router_z_loss",
]

# Bytes of a float32 block of logits in `linear_kl_div`, which holds some five of them.
_BLOCK_BYTES = 32 << 20


def linear_log_probs(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float = 0.0,
) -> Tensor:
    """``log_softmax((x @ weight.mT + bias) / temperature)[target]`` of each token, without the
    logits in memory. TRL calls it selective_log_softmax or get_per_token_logps.

    Args:
        x: [..., H], float32, bfloat16, float16 or float64.
        weight: [V, H], x's dtype.
        target: [...] int64, classes in [0, V) or ignore_index.
        bias: [V], x's dtype.
        ignore_index: a token with this target has log-probability 0 and no gradient.
        temperature: positive; logits are divided by it.
        softcap: as in `cross_entropy`, of the divided logits.

    Returns:
        [...] float32 (float64 for float64). Gradients of x, weight and bias.

    Memory beyond arguments and results is at most 4 M H bytes + 512 MiB for M tokens
    (`linear_cross_entropy` without a reduction).

    Raises:
        ValueError: a temperature that is not positive, or what `linear_cross_entropy` refuses.
        IndexError: a target that is no class.
    """
    _check_temperature("linear_log_probs", temperature)
    return -linear_cross_entropy(
        x,
        weight,
        target,
        bias,
        ignore_index=ignore_index,
        logit_scale=1.0 / temperature,
        softcap=softcap,
        reduction="none",
    )


def _check_temperature(owner: str, temperature: float) -> None:
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"{owner}: temperature must be positive and finite, got {temperature}")


# ---- preference ----------------------------------------------------------------------------------


class DPOLoss(NamedTuple):
    """loss []; the implicit rewards beta * (log-probability - the reference's) of the chosen and
    rejected sequences, [B] without gradients."""

    loss: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor


DPOKind = Literal["sigmoid", "hinge", "ipo", "robust"]


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    loss_type: DPOKind = "sigmoid",
) -> DPOLoss:
    """Direct preference optimisation over log-probabilities of sequences, by TRL's names.

    With d = (chosen - ref_chosen) - (rejected - ref_rejected), the mean over pairs of::

        sigmoid   -(1 - e) log sigmoid(beta d) - e log sigmoid(-beta d)        e the label smoothing
        robust    (-(1 - e) log sigmoid(beta d) + e log sigmoid(-beta d)) / (1 - 2 e)
        hinge     max(0, 1 - beta d)
        ipo       (d - 1 / (2 beta))^2

    Args:
        chosen, rejected: [B], of the model, sums over each sequence's tokens (means for ipo).
        ref_chosen, ref_rejected: [B], of the reference.

    Raises:
        ValueError: another loss_type, or label_smoothing outside [0, 0.5).

    Rafailov et al., "Direct Preference Optimization" (2023), arXiv:2305.18290; Azar et al. (IPO),
    arXiv:2310.12036; Chowdhury et al. (robust), arXiv:2403.00409.
    """
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(
            f"dpo_loss: label_smoothing must be at least 0 and below 0.5, got {label_smoothing}"
        )
    margin = (chosen - ref_chosen) - (rejected - ref_rejected)
    up, down = F.logsigmoid(beta * margin), F.logsigmoid(-beta * margin)
    if loss_type == "sigmoid":
        losses = -(1 - label_smoothing) * up - label_smoothing * down
    elif loss_type == "robust":
        losses = (label_smoothing * down - (1 - label_smoothing) * up) / (1 - 2 * label_smoothing)
    elif loss_type == "hinge":
        losses = (1 - beta * margin).relu()
    elif loss_type == "ipo":
        losses = (margin - 1 / (2 * beta)) ** 2
    else:
        raise ValueError(
            f"dpo_loss: loss_type must be sigmoid, robust, hinge or ipo, got {loss_type!r}"
        )
    rewards = (beta * (a - b).detach() for a, b in ((chosen, ref_chosen), (rejected, ref_rejected)))
    return DPOLoss(losses.mean(), *rewards)


def linear_dpo_loss(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    ref_x: Tensor,
    ref_weight: Tensor,
    bias: Tensor | None = None,
    ref_bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    loss_type: DPOKind = "sigmoid",
    average_log_prob: bool = False,
) -> DPOLoss:
    """`dpo_loss` of hidden states, as in Liger's fused linear DPO: the first half of the batch is
    chosen, the second half rejected.

    Args:
        x: [2 B, S, H] of the model.
        target: [2 B, S], the token that each position predicts, or ignore_index (of the prompt and
            padding).
        ref_x, ref_weight, ref_bias: of the reference, which gets no gradient.
        average_log_prob: a sequence's mean over its tokens instead of its sum (ipo needs it).

    Raises:
        ValueError: an odd batch, or what `linear_log_probs` and `dpo_loss` refuse.
    """
    if x.dim() != 3 or x.shape[0] % 2:
        raise ValueError(
            f"linear_dpo_loss: x must be [2 B, S, H], chosen sequences before rejected ones, got "
            f"{list(x.shape)}"
        )
    with torch.no_grad():
        ref = linear_log_probs(ref_x, ref_weight, target, ref_bias, ignore_index=ignore_index)
    own = linear_log_probs(x, weight, target, bias, ignore_index=ignore_index)
    own, ref = own.sum(1), ref.sum(1)
    if average_log_prob:
        count = (target != ignore_index).sum(1).clamp_min(1)
        own, ref = own / count, ref / count
    return dpo_loss(
        *own.chunk(2),
        *ref.chunk(2),
        beta=beta,
        label_smoothing=label_smoothing,
        loss_type=loss_type,
    )


# ---- policy gradients ----------------------------------------------------------------------------


def grpo_loss(
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    old_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    beta: float = 0.0,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    loss_type: Literal["grpo", "bnpo", "dr_grpo"] = "grpo",
    max_completion_length: int | None = None,
) -> Tensor:
    """Group relative policy optimisation over `linear_log_probs` of completions, by TRL's and
    Liger's names.

    With r = exp(log_probs - old_log_probs) and A the advantage of a token's sequence, a token's
    loss is ``-min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A) + beta k``, where k is
    ``exp(ref - own) - (ref - own) - 1``.

    Args:
        log_probs: [B, S] of the policy.
        advantages: [B].
        mask: [B, S], nonzero for tokens of the completion.
        old_log_probs: [B, S] of the policy that sampled; None is log_probs without gradient.
        ref_log_probs: [B, S] of the reference; needed where beta is not 0.
        loss_type: ``"grpo"`` is the mean over sequences of their means, ``"bnpo"`` the mean over
            all tokens, ``"dr_grpo"`` the sum over B max_completion_length (S where None).

    Raises:
        ValueError: beta without ref_log_probs, or another loss_type.

    Shao et al., "DeepSeekMath" (2024), arXiv:2402.03300; Liu et al. (Dr. GRPO), arXiv:2503.20783.
    """
    # Hidden tokens may hold infinities and NaN: they are masked before exp, whose gradient would
    # multiply them by 0.
    hidden = mask == 0
    log_probs = log_probs.masked_fill(hidden, 0.0)
    old = log_probs.detach() if old_log_probs is None else old_log_probs.masked_fill(hidden, 0.0)
    ratio, advantage = torch.exp(log_probs - old), advantages[:, None]
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    losses = -torch.minimum(ratio * advantage, clipped * advantage)
    if beta:
        if ref_log_probs is None:
            raise ValueError(f"grpo_loss: beta is {beta}; ref_log_probs must be given")
        away = ref_log_probs.masked_fill(hidden, 0.0) - log_probs
        losses = losses + beta * (torch.exp(away) - away - 1)
    kept = (~hidden).to(losses.dtype)
    losses = losses.masked_fill(hidden, 0.0)
    if loss_type == "grpo":
        return (losses.sum(1) / kept.sum(1).clamp_min(1)).mean()
    if loss_type == "bnpo":
        return losses.sum() / kept.sum().clamp_min(1)
    if loss_type == "dr_grpo":
        return losses.sum() / (losses.shape[0] * (max_completion_length or losses.shape[1]))
    raise ValueError(f"grpo_loss: loss_type must be grpo, bnpo or dr_grpo, got {loss_type!r}")


# ---- distillation --------------------------------------------------------------------------------


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
) -> Tensor:
    """Distillation: the divergence of student and teacher over all classes, without either's
    logits in memory.

    With T and S the softmax of teacher's and student's logits / temperature, a token's loss is
    ``KL(T || S)`` for beta 0, ``KL(S || T)`` for beta 1, and between them, with M = beta T +
    (1 - beta) S, ``beta KL(T || M) + (1 - beta) KL(S || M)``: Liger's fused linear JSD.

    Args:
        x: [..., H] of the student, float32, bfloat16, float16 or float64.
        weight, bias: [V, H] and [V] of the student.
        teacher_x, teacher_weight, teacher_bias: of the teacher, for the same tokens and classes. H
            and dtype may differ from the student's. The teacher gets no gradient.
        target: [...] int64; tokens whose target is ignore_index do not count. None counts all.
        reduction: ``"mean"`` over the tokens that count, or ``"sum"``.

    Returns:
        [] float32 (float64 for float64). Gradients of x, weight and bias are made in the forward
        pass. Not twice differentiable.

    Memory beyond arguments and results: 8 V H bytes where weight requires a gradient, the bytes of
    x, and some 160 MiB.

    Raises:
        ValueError: shapes that do not fit, beta outside [0, 1], a temperature that is not positive,
            another reduction.

    Hinton et al. (2015), arXiv:1503.02531; Agarwal et al. (GKD), arXiv:2306.13649.
    """
    name = "linear_kl_div"
    _check_temperature(name, temperature)
    if not 0 <= beta <= 1:
        raise ValueError(f"{name}: beta must be between 0 and 1, got {beta}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"{name}: reduction must be mean or sum, got {reduction!r}")
    if x.shape[:-1] != teacher_x.shape[:-1]:
        raise ValueError(
            f"{name}: teacher_x must have x's tokens {list(x.shape[:-1])}, got "
            f"{list(teacher_x.shape[:-1])}"
        )
    if weight.shape[0] != teacher_weight.shape[0]:
        raise ValueError(
            f"{name}: teacher_weight must have weight's {weight.shape[0]} classes, got "
            f"{teacher_weight.shape[0]}"
        )
    rows, wide = x.reshape(-1, x.shape[-1]), stats_dtype(x)
    counts = rows.new_ones(rows.shape[0], dtype=wide)
    if target is not None:
        counts = (target.reshape(-1) != ignore_index).to(wide)
    loss = _Divergence.apply(
        rows,
        weight,
        bias,
        teacher_x.detach().reshape(-1, teacher_x.shape[-1]),
        teacher_weight.detach(),
        None if teacher_bias is None else teacher_bias.detach(),
        counts,
        beta,
        1.0 / temperature,
    )
    return loss / counts.sum() if reduction == "mean" else loss


class _Divergence(torch.autograd.Function):
    """The sum of the rows' divergences. The gradients of this sum are made with it, block after
    block of rows, and multiplied in backward."""

    @staticmethod
    def forward(ctx, x, weight, bias, teacher_x, teacher_weight, teacher_bias, counts, beta, scale):  # type: ignore[override]
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        wide, classes = counts.dtype, weight.shape[0]
        step = rows_at_once(x, classes, _BLOCK_BYTES)
        loss = x.new_zeros((), dtype=wide)
        dx, dweight, dbias = [], None, None
        for at in range(0, x.shape[0], step):
            s = slice(at, at + step)
            own = _log_softmax(x[s], weight, bias, scale, wide)
            other = _log_softmax(teacher_x[s], teacher_weight, teacher_bias, scale, wide)
            part, dz = _divergence(own, other, beta)
            # masked and not multiplied: a row that does not count may hold NaN
            hidden = counts[s] == 0
            loss = loss + part.masked_fill(hidden, 0.0).sum()
            dz = (dz * scale).masked_fill(hidden[:, None], 0.0).to(x.dtype)
            if need_x:
                dx.append(gemm(dz, weight))
            if need_weight:
                kept = x[s].masked_fill(hidden[:, None], 0.0)
                dweight = gemm(dz.mT, kept, c=dweight, out_dtype=wide)
            if need_bias:
                rows = dz.sum(0, dtype=wide)
                dbias = rows if dbias is None else dbias + rows
        empty = x.shape[0] == 0
        ctx.save_for_backward(
            (x.new_zeros(x.shape) if empty else torch.cat(dx)) if need_x else None,
            (weight.new_zeros(weight.shape, dtype=wide) if empty else dweight)
            if need_weight
            else None,
            (bias.new_zeros(bias.shape, dtype=wide) if empty else dbias) if need_bias else None,
        )
        ctx.dtype = x.dtype
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):  # type: ignore[override]
        grads = [None if t is None else (t * grad).to(ctx.dtype) for t in ctx.saved_tensors]
        return *grads, None, None, None, None, None, None


def _log_softmax(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: float, wide: torch.dtype
) -> Tensor:
    z = gemm(x, weight.mT, None if bias is None else bias.to(x.dtype), out_dtype=wide)
    return F.log_softmax(z.to(wide) * scale, -1)


def _divergence(own: Tensor, other: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """(divergence [n], its gradient by the student's scaled logits [n, V]) of log-probabilities."""
    p, q = own.exp(), other.exp()
    if beta == 0:
        return (q * (other - own)).sum(-1), p - q
    if beta == 1:
        away = own - other
        loss = (p * away).sum(-1)
        return loss, p * (away - loss[:, None])
    middle = torch.log(beta * q + (1 - beta) * p)
    loss = beta * (q * (other - middle)).sum(-1) + (1 - beta) * (p * (own - middle)).sum(-1)
    slope = (1 - beta) * (own - middle)
    return loss, p * (slope - (p * slope).sum(-1, keepdim=True))


# ---- routers -------------------------------------------------------------------------------------


def load_balancing_loss(
    router_logits: Tensor | Sequence[Tensor],
    top_k: int,
    mask: Tensor | None = None,
) -> Tensor:
    """The load balancing loss of a mixture of experts (Switch Transformers, equations 4 to 6), as
    transformers' load_balancing_loss_func computes it.

    ``E sum over e of f_e P_e``: f_e is the number of a token's top_k choices that are e, averaged
    over tokens, and P_e the mean of the router's probability. It is top_k where all experts are
    chosen alike.

    Args:
        router_logits: [..., E] of one layer, or a sequence of these, whose tokens are joined.
        top_k: the number of experts that each token is sent to.
        mask: [...], nonzero for tokens that count; the same for every layer.

    Returns:
        [] float32 (float64 for float64). f has no gradient.

    Fedus et al. (2021), arXiv:2101.03961.
    """
    layers = [router_logits] if isinstance(router_logits, Tensor) else list(router_logits)
    experts = layers[0].shape[-1]
    wide = stats_dtype(layers[0])
    p = torch.cat([t.reshape(-1, experts).to(wide) for t in layers]).softmax(-1)
    kept = p.new_ones(p.shape[0], 1)
    if mask is not None:
        kept = mask.reshape(-1, 1).to(wide).repeat(len(layers), 1)
        p = p.masked_fill(kept == 0, 0.0)
    count = kept.sum()
    chosen = torch.zeros_like(p).scatter(-1, p.topk(top_k, -1).indices, 1.0)
    share = (chosen * kept).sum(0) / count
    return experts * (share * (p.sum(0) / count)).sum()


def router_z_loss(router_logits: Tensor | Sequence[Tensor], mask: Tensor | None = None) -> Tensor:
    """The mean over tokens of ``logsumexp(router_logits)^2``, which keeps a router's logits small.

    Args: as in `load_balancing_loss`.

    Zoph et al., "ST-MoE" (2022), arXiv:2202.08906, equation 5.
    """
    layers = [router_logits] if isinstance(router_logits, Tensor) else list(router_logits)
    wide = stats_dtype(layers[0])
    lse = torch.cat([t.to(wide).logsumexp(-1).reshape(-1) for t in layers])
    if mask is None:
        return lse.square().mean()
    kept = mask.reshape(-1).to(wide).repeat(len(layers))
    return lse.square().masked_fill(kept == 0, 0.0).sum() / kept.sum()
