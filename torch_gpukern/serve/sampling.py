# SPDX-License-Identifier: BSD-3-Clause
"""The next token of each row of logits, on the logits' device and without a host sync.

A probability becomes an integer weight, a multiple of 2^-43 of the largest one. Sums of integers do
not depend on their order. So a token depends on its row's logits, settings and number alone: not on
the other rows of a batch, nor on the device. Tokens less than 2^-44 as likely as the likeliest one
are never drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .counts import Counts
from .request import Request, Scores
from .transfer import on_device

ONE = 2.0**43  # the weight of the likeliest token: 2^20 tokens of this weight have a sum below 2^63
SHORT = 1024  # up to so many of the largest logits topk finds; past that all are sorted


class Place(NamedTuple):
    """A row of logits: whose it is, the position of its token, the drafted tokens before it."""

    request: Request
    position: int
    drafted: Sequence[int] = ()


class Draws(NamedTuple):
    """How tokens are drawn from some rows. Tensors are float64 or int64 [rows], or [some rows]."""

    temperature: Tensor
    min_p: Tensor
    number: Tensor  # uniform in [0, 1)
    filtered: Tensor  # which of the rows have a top_k or a top_p
    top_k: Tensor  # of those rows
    top_p: Tensor
    largest: int  # of their top_k; the vocabulary where one has no top_k


class Penalties(NamedTuple):
    rows: Tensor
    answer: Tensor  # int32 [some rows, vocab]: how often the answer has the token
    prompt: Tensor  # bool [some rows, vocab]: whether the prompt has it
    presence: Tensor
    frequency: Tensor
    repetition: Tensor


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on both and on nothing else (Philox)."""
    key = np.array([seed % 2**64, position], np.uint64)
    return (int(np.random.Philox(key=key).random_raw()) >> 11) * 2.0**-53


# ---- on the device -------------------------------------------------------------------------------


def penalised(logits: Tensor, p: Penalties) -> Tensor:
    """float64 [rows, vocab]"""
    x = logits[p.rows]
    answer, repetition = p.answer.double(), p.repetition[:, None]
    x = torch.where(
        p.prompt | (p.answer > 0), torch.where(x > 0, x / repetition, x * repetition), x
    )
    x = x - p.frequency[:, None] * answer - p.presence[:, None] * (p.answer > 0)
    return logits.index_copy(0, p.rows, x)


def weights(x: Tensor) -> Tensor:
    """int64 weights of log probabilities whose largest is 0. NaN has none."""
    return (x.exp() * ONE).nan_to_num(0.0).round().long()


def among(x: Tensor, top_k: Tensor, top_p: Tensor, largest: int) -> Tensor:
    """bool [rows, vocab]: the tokens that top_k and then top_p leave, of log probabilities x.

    The least value that stays is found in sorted order. Of tokens with that value as many stay as
    there is room for, the lower ones first.
    """
    count = min(largest, x.shape[-1])
    if count <= SHORT:
        values = x.topk(count, -1).values
    else:
        values = x.sort(-1, descending=True).values[:, :count]
    rank = torch.arange(count, device=x.device)
    first = rank < top_k[:, None]
    w = weights(values) * first
    before, total = w.cumsum(-1) - w, w.sum(-1, keepdim=True)
    stay = (first & (before < top_p[:, None] * total)).sum(-1, keepdim=True).clamp_min(1)
    last = values.gather(-1, stay - 1)
    room = stay - (values > last).sum(-1, keepdim=True)
    equal = x == last
    return (x > last) | (equal & (equal.cumsum(-1) <= room))


def draw(logits: Tensor, best: Tensor, d: Draws) -> Tensor:
    """int64 [rows]: a token of each row of float64 logits; `best` where no token has a weight."""
    x = (logits - logits.amax(-1, keepdim=True)) / d.temperature[:, None]
    x = torch.where(x.exp() >= d.min_p[:, None], x, -torch.inf)
    if d.largest:
        some = x[d.filtered]
        some = torch.where(among(some, d.top_k, d.top_p, d.largest), some, -torch.inf)
        x = x.index_copy(0, d.filtered, some)
    w = weights(x)
    total = w.sum(-1)
    place = (d.number * total).long().minimum(total - 1)
    token = (w.cumsum(-1) <= place[:, None]).sum(-1)
    return torch.where(total > 0, token, best)


def sample(
    logits: Tensor, rows: Tensor | None, draws: Draws | None, penalties: Penalties | None
) -> Tensor:
    """int64 [R]: a token for each row of logits [R, vocab]. `rows` are drawn as `draws` says, the
    others get the token with the largest logit."""
    x = logits.double() if draws is not None or penalties is not None else logits
    if penalties is not None:
        x = penalised(x, penalties)
    best = x.argmax(-1)
    if rows is None or draws is None:
        return best
    return best.index_copy(0, rows, draw(x[rows], best[rows], draws))


# ---- on the host ---------------------------------------------------------------------------------


class Sampler:
    """Draws the tokens of a step, and keeps the counts that penalties need."""

    def __init__(self, slots: int, vocab: int, device: torch.device) -> None:
        self.vocab, self.device = vocab, device
        self.counts = Counts(slots, vocab, device)

    def floats(self, values: Sequence[float]) -> Tensor:
        return on_device(values, torch.float64, self.device)

    def ints(self, values: Sequence[int]) -> Tensor:
        return on_device(values, torch.int64, self.device)

    def pick(
        self, logits: Tensor, places: Sequence[Place], best: Tensor | None = None
    ) -> tuple[list[int], list[Scores | None]]:
        """A token for each row of logits [R, vocab], and its scores where they are asked for.
        `best` has the rows' largest logits' tokens, where they are known."""
        drawn = [r for r, place in enumerate(places) if place.request.temperature > 0]
        penalties = self.penalties(places)
        if best is not None and not drawn and penalties is None:
            tokens = best
        else:
            tokens = sample(
                logits,
                self.ints(drawn) if drawn else None,
                self.draws([places[r] for r in drawn]) if drawn else None,
                penalties,
            )
        scores = self.scores(logits, tokens, places)
        return tokens.tolist(), scores

    def draws(self, places: Sequence[Place]) -> Draws:
        requests = [place.request for place in places]
        filtered = [i for i, r in enumerate(requests) if r.top_p < 1 or 0 < r.top_k < self.vocab]
        top_k = [
            min(requests[i].top_k, self.vocab) if requests[i].top_k > 0 else self.vocab
            for i in filtered
        ]
        return Draws(
            self.floats([r.temperature for r in requests]),
            self.floats([r.min_p for r in requests]),
            self.floats([uniform(p.request.seed, p.position) for p in places]),
            self.ints(filtered),
            self.ints(top_k),
            self.floats([requests[i].top_p for i in filtered]),
            max(top_k, default=0),
        )

    def penalties(self, places: Sequence[Place]) -> Penalties | None:
        rows = [r for r, place in enumerate(places) if place.request.penalised]
        if not rows:
            return None
        requests = [places[r].request for r in rows]
        answer, prompt = self.counts.rows([(places[r].request, places[r].drafted) for r in rows])
        return Penalties(
            self.ints(rows),
            answer,
            prompt,
            self.floats([r.presence_penalty for r in requests]),
            self.floats([r.frequency_penalty for r in requests]),
            self.floats([r.repetition_penalty for r in requests]),
        )

    def scores(
        self, logits: Tensor, tokens: Tensor, places: Sequence[Place]
    ) -> list[Scores | None]:
        found: list[Scores | None] = [None] * len(places)
        asked = [r for r, place in enumerate(places) if place.request.logprobs is not None]
        if not asked:
            return found
        rows = self.ints(asked)
        logprobs = logits[rows].double().log_softmax(-1)
        most = max(places[r].request.logprobs or 0 for r in asked)
        best = logprobs.topk(most, -1)
        of_token = logprobs.gather(-1, tokens[rows][:, None])[:, 0].tolist()
        values, ids = best.values.tolist(), best.indices.tolist()
        for i, r in enumerate(asked):
            n = places[r].request.logprobs or 0
            found[r] = Scores(of_token[i], list(zip(ids[i][:n], values[i][:n])))
        return found
