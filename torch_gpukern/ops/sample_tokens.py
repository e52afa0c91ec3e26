# SPDX-License-Identifier: BSD-3-Clause
"""sample_tokens: a token of each row of logits: the public function and its declaration."""

import torch
from torch import Tensor

from .._library import bytes_of
from . import fakes
from .define import define_op

__all__ = ["sample_tokens"]


def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    number: Tensor,
    *,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    counts: Tensor | None = None,
    prompt: Tensor | None = None,
    slots: Tensor | None = None,
    drafted: Tensor | None = None,
    presence_penalty: Tensor | None = None,
    frequency_penalty: Tensor | None = None,
    repetition_penalty: Tensor | None = None,
) -> Tensor:
    """Draws a token from each row of logits, after penalties, temperature, min_p, top_k and top_p.
    One launch on CUDA, without a sort.

    A row of ``slots`` that is not negative changes its logits first. ``n`` is how often its row of
    counts and its drafted tokens have a token::

        y = logit / repetition_penalty if logit > 0 else logit * repetition_penalty
                                                     # if n > 0 or the prompt has the token
        y = y - frequency_penalty * n - presence_penalty * (n > 0)

    Then ``p = exp((y - max(y)) / temperature)``. Tokens with ``p < min_p`` go. top_k keeps the k
    likeliest tokens. top_p keeps the likeliest of these, up to the first whose sum is at least
    top_p of theirs; at least one. Among equally likely tokens lower ones come first. The token is
    the first whose share, summed in the tokens' order, exceeds ``number``.

    The result is exact and reproducible. Probabilities are integer weights, multiples of 2^-43 of
    the largest, so no sum depends on its order. A row's token depends on its own arguments alone,
    not on the other rows, and it is the same on the CPU and on CUDA. A token that is less than
    2^-44 as likely as the likeliest is never drawn.

    Args:
        logits: [R, V] float32, bfloat16, float16 or float64, V from 1 to 2^20 - 1. Rows may have
            any stride. If the last dimension is not contiguous, logits is copied first.
        temperature: [R] float64 or float32. A row that is not above 0 gets the token with the
            largest logit, the lowest one of equals. Infinity makes all tokens equally likely whose
            logits are finite.
        number: [R] float64 or float32, uniform in [0, 1). One below 0 or NaN counts as 0, one from
            1 on draws the last token that has a weight.
        top_k: [R] int64 or int32. Below 1, or V and more: off.
        top_p: [R] float64 or float32. 1 and more, and NaN: off. 0 and less: the likeliest token.
        min_p: [R] float64 or float32. 0 and less: off. Above 1 or NaN: no token has a weight, and
            the row gets the token with the largest logit.
        counts: [S, V] int32: how often answers have each token. The penalties need it, and slots.
            A count with its drafted tokens is below 2^31.
        prompt: [S, V] bool or uint8: whether the prompts have each token.
        slots: [R] int64 or int32: the row of counts and prompt of each row. A negative one has no
            penalties.
        drafted: [R, D] int64 or int32: further tokens of the answers, which are not in counts. -1
            is none, as is any other number that is no token.
        presence_penalty: [R] float64 or float32, by default 0.
        frequency_penalty: likewise.
        repetition_penalty: [R] float64 or float32, by default 1.

    Returns:
        [R] int64. A row with NaN gets the first NaN. Otherwise a row with +inf gets the first +inf,
        and a row of only -inf token 0. On CUDA no value of a tensor is read on the host, so the
        call can be captured in a graph.

    There is no gradient.

    Raises:
        ValueError: a shape, dtype or device that the op does not take.
        IndexError: a slot past counts. CUDA gives such a row no penalties, and the next call or
            `check_errors` raises.

    Holtzman, Buys, Du, Forbes and Choi, "The Curious Case of Neural Text Degeneration" (2019),
    arXiv:1904.09751 (top_p); Keskar, McCann, Varshney, Xiong and Socher, "CTRL" (2019),
    arXiv:1909.05858 (repetition_penalty); Nguyen and others, "Turning Up the Heat: Min-p Sampling"
    (2024), arXiv:2407.01082.
    """
    if isinstance(prompt, Tensor) and prompt.dtype is torch.bool:
        prompt = bytes_of(prompt)
    return _sample_tokens.call(
        logits,
        temperature,
        number,
        top_k,
        top_p,
        min_p,
        counts,
        prompt,
        slots,
        drafted,
        presence_penalty,
        frequency_penalty,
        repetition_penalty,
    )


def _symbolic(logits, temperature, number, top_k, top_p, min_p, counts, slots, **_):
    fakes.sizes(
        "sample_tokens",
        logits=(logits, "R V"),
        temperature=(temperature, "R"),
        number=(number, "R"),
        top_k=(top_k, "R"),
        top_p=(top_p, "R"),
        min_p=(min_p, "R"),
        counts=(counts, "S V"),
        slots=(slots, "R"),
    )
    return (logits.new_empty(logits.shape[:1], dtype=torch.int64),)


_sample_tokens = define_op(
    "sample_tokens",
    public=sample_tokens,
    symbolic=_symbolic,
    refuse="sample_tokens: a token has no gradient",
)
