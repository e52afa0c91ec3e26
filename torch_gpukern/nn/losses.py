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

from .._library import is_grad_enabled
from ..ops import linear_cross_entropy
from ..ops.fakes import stats_dtype
from ..ops.linear_cross_entropy import row_losses
from ..ops.linear_kl_div import linear_kl_div

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


def linear_log_probs(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float = 0.0,
    low_memory: bool = True,
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
        low_memory: compute the logits again in backward. False keeps their gradient in x's dtype
            and saves one of four products.

    Returns:
        [...] float32 (float64 for float64). Gradients of x, weight and bias.

    Memory beyond arguments and results is at most 4 M H bytes + 512 MiB for M tokens
    (`linear_cross_entropy` without a reduction). With ``low_memory=False`` and gradients it is
    b M V + 2 b M H bytes + 256 MiB (b bytes a number), if b M V is at most 8 V H.

    Raises:
        ValueError: a temperature that is not positive, or what `linear_cross_entropy` refuses.
        IndexError: a target that is no class.
    """
    _check_temperature("linear_log_probs", temperature)
    given = [t for t in (x, weight, bias) if t is not None]
    needed = is_grad_enabled() and any([t.requires_grad for t in given])
    if not low_memory and needed:
        return -row_losses(x, weight, target, bias, ignore_index, softcap, 1.0 / temperature)
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
    if not 0 < temperature < math.inf:
        raise ValueError(f"{owner}: temperature must be positive and finite, got {temperature}")


def _check_shapes(owner: str, first: Tensor, **others: Tensor | None) -> None:
    """Other shapes would be broadcast, and the loss be a mean over pairs that do not exist."""
    for name, t in others.items():
        if t is not None and t.shape != first.shape:
            raise ValueError(
                f"{owner}: {name} must have shape {list(first.shape)}, got {list(t.shape)}"
            )


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
        ValueError: another loss_type, label_smoothing outside [0, 0.5), or shapes that differ.

    Rafailov et al., "Direct Preference Optimization" (2023), arXiv:2305.18290; Azar et al. (IPO),
    arXiv:2310.12036; Chowdhury et al. (robust), arXiv:2403.00409.
    """
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(
            f"dpo_loss: label_smoothing must be at least 0 and below 0.5, got {label_smoothing}"
        )
    _check_shapes(
        "dpo_loss", chosen, rejected=rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected
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
    low_memory: bool = True,
) -> DPOLoss:
    """`dpo_loss` of hidden states, as in Liger's fused linear DPO: the first half of the batch is
    chosen, the second half rejected.

    Args:
        x: [2 B, S, H] of the model.
        target: [2 B, S], the token that each position predicts, or ignore_index (of the prompt and
            padding).
        ref_x, ref_weight, ref_bias: of the reference, which gets no gradient.
        average_log_prob: a sequence's mean over its tokens instead of its sum (ipo needs it).
        low_memory: as in `linear_log_probs`. False saves one of five products.

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
    own = linear_log_probs(
        x, weight, target, bias, ignore_index=ignore_index, low_memory=low_memory
    )
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
        ValueError: beta without ref_log_probs, another loss_type, or shapes that do not fit.

    Shao et al., "DeepSeekMath" (2024), arXiv:2402.03300; Liu et al. (Dr. GRPO), arXiv:2503.20783.
    """
    if log_probs.dim() != 2 or advantages.shape != log_probs.shape[:1]:
        raise ValueError(
            f"grpo_loss: log_probs must be [B, S] and advantages [B], got "
            f"{list(log_probs.shape)} and {list(advantages.shape)}"
        )
    _check_shapes(
        "grpo_loss", log_probs, mask=mask, old_log_probs=old_log_probs, ref_log_probs=ref_log_probs
    )
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

    Raises:
        ValueError: a top_k below 1 or above the number of experts.

    Fedus et al. (2021), arXiv:2101.03961.
    """
    layers = [router_logits] if isinstance(router_logits, Tensor) else list(router_logits)
    experts = layers[0].shape[-1]
    if not 1 <= top_k <= experts:
        raise ValueError(
            f"load_balancing_loss: top_k must be 1 to the number of experts {experts}, got {top_k}"
        )
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
