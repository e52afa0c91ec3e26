# SPDX-License-Identifier: BSD-3-Clause
"""The definition of `sample_tokens` in plain PyTorch, part of `reference`.

A probability becomes an integer weight, in units of 2^-43 of the largest one. Sums of integers do not
depend on their order. All operations before that are sums, products and quotients of float64, each
rounded once, in the order of csrc/formats/sample_weight.h. So every device draws the same tokens as the
kernels.
"""

from decimal import Decimal, localcontext

import torch
from torch import Tensor

__all__ = ["sample_tokens"]

ONE = (
    2.0**43
)  # the weight of the likeliest token; the sum of up to 2^20 - 1 of them fits into int64
LEAST = -31.0  # a smaller exponent has the weight 0


def _powers() -> list[float]:
    """2^(j / 32) for j below 32, rounded to nearest."""
    with localcontext() as context:
        context.prec = 60
        return [float(Decimal(2) ** (Decimal(j) / 32)) for j in range(32)]


POWERS = _powers()


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
    """int64 [R]: a token for each row of logits [R, V]. csrc/include/gpukern_sample.h has the
    equations. A `number` below 0 or NaN counts as 0. A number of 1 or more counts as the largest one
    below 1."""
    x = logits.double()
    rows, vocab = x.shape
    if counts is not None and slots is not None:
        times = _times(counts, slots, drafted)
        marks = torch.zeros_like(times, dtype=torch.bool)
        if prompt is not None:
            marks = _rows_of(prompt, slots) != 0
        changed = _penalised(
            x,
            times.double(),
            marks,
            _column(presence_penalty, x, 0.0),
            _column(frequency_penalty, x, 0.0),
            _column(repetition_penalty, x, 1.0),
        )
        x = torch.where(slots[:, None] >= 0, changed, x)
    best = x.argmax(-1)
    drawn = temperature.double() > 0
    inverse = 1.0 / torch.where(drawn, temperature.double(), 1.0)
    x = (x - x.amax(-1, keepdim=True)) * inverse[:, None]
    e = scaled_exp(x)
    if min_p is not None:
        e = torch.where(e >= (min_p.double() * ONE)[:, None], e, 0.0)
    # Tokens without a weight must be last in the order of x. Their x may be NaN: that of a logit of -inf
    # if the temperature is inf.
    x = torch.where(e > 0, x, -torch.inf)
    w = e.round().long()
    if top_k is not None or top_p is not None:
        most = torch.full((rows,), vocab, device=x.device)
        if top_k is not None:
            most = torch.where(top_k > 0, top_k.long(), most).clamp_max(vocab)
        share = torch.ones_like(inverse) if top_p is None else top_p.double()
        filtered = (most < vocab) | (share < 1)
        w = torch.where(~filtered[:, None] | among(x, w, most, share), w, 0)
    total = w.sum(-1)
    within = number.double().nan_to_num(0.0).clamp(0.0, 1.0)
    place = (within * total).long().minimum(total - 1).clamp_min(0)
    token = (w.cumsum(-1) <= place[:, None]).sum(-1)
    return torch.where(drawn & (total > 0), token, best)


def _column(values: Tensor | None, like: Tensor, otherwise: float) -> Tensor:
    if values is None:
        return like.new_full((1, 1), otherwise)
    return values.double()[:, None]


def _rows_of(table: Tensor, slots: Tensor) -> Tensor:
    """[R, V]: the row of each slot; zeros for a slot below 0."""
    there = slots >= 0
    rows = table.new_zeros(len(slots), table.shape[1])
    rows[there] = table[slots[there].long()]
    return rows


def _times(counts: Tensor, slots: Tensor, drafted: Tensor | None) -> Tensor:
    """int64 [R, V]: how often the answer of each row has each token."""
    times = _rows_of(counts, slots).long()
    if drafted is not None:
        vocab = counts.shape[1]
        there = (drafted >= 0) & (drafted < vocab)
        at = torch.where(there, drafted.long(), 0)
        times = times.scatter_add(1, at, there.long())
    return times


def _penalised(x, times, in_prompt, presence, frequency, repetition) -> Tensor:
    found = times > 0
    x = torch.where(in_prompt | found, torch.where(x > 0, x / repetition, x * repetition), x)
    return x - frequency * times - presence * found.double()


def scaled_exp(x: Tensor) -> Tensor:
    """e^x 2^43 for float64 x from LEAST to 0, with a relative error below 2^-47; 0 for any other x and
    for NaN. Rounded, these are the weights."""
    seen = x >= LEAST
    x = torch.where(seen, x, 0.0)
    n = (x * float.fromhex("0x1.71547652b82fep+5")).round()
    r = x - n * float.fromhex("0x1.62e42fefa3800p-6")  # this product and the next are exact
    r = r - n * float.fromhex("0x1.ef35793c76800p-50")
    series = r * (1 / 120) + 1 / 24
    series = r * series + 1 / 6
    series = r * series + 0.5
    series = r * series + 1.0
    series = r * series + 1.0
    i = n.long()
    scale = ((i >> 5) + 43 + 1023 << 52).view(torch.float64)
    powers = torch.tensor(POWERS, dtype=torch.float64, device=x.device)
    return torch.where(seen, powers[i & 31] * series * scale, 0.0)


def among(x: Tensor, w: Tensor, most: Tensor, share: Tensor) -> Tensor:
    """bool [R, V]: the tokens that top_k (`most`) and then top_p (`share`) keep, for values x with
    weights w.

    In sorted order, the first tokens are kept. If tokens have the same value as the last kept one, those
    with lower indices are kept.
    """
    values, order = x.sort(-1, descending=True)
    rank = torch.arange(x.shape[-1], device=x.device)
    first = rank < most[:, None]
    w = w.gather(-1, order) * first
    before, total = w.cumsum(-1) - w, w.sum(-1, keepdim=True)
    bound = torch.where(share[:, None] < 1, share[:, None] * total, torch.inf)
    stay = (first & (before < bound)).sum(-1, keepdim=True).clamp_min(1)
    last = values.gather(-1, stay - 1)
    room = stay - (values > last).sum(-1, keepdim=True)
    equal = x == last
    return (x > last) | (equal & (equal.cumsum(-1) <= room))
