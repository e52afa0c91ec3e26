# SPDX-License-Identifier: BSD-3-Clause
"""Draws the next token of each row of logits, on the logits' device. The host does not wait for it.

`sample_tokens` draws them in one launch on CUDA. A token depends only on its row's logits, settings and
random number, not on the other rows of a batch or on the device. The settings of a step are copied to the
device as one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..ops import sample_tokens
from .counts import Counts
from .request import Request, Scores
from .transfer import moved, on_device

MOST_TOKENS = 2**20 - 1  # of a vocabulary: sample_tokens takes no more (csrc/api/sample_tokens.c)


def check_vocabulary(vocab: int) -> None:
    """Raises ValueError if tokens of such a vocabulary cannot be drawn."""
    if vocab > MOST_TOKENS:
        raise ValueError(
            f"the model's vocabulary has {vocab:,} tokens; serve draws from at most "
            f"{MOST_TOKENS:,}, because sample_tokens takes no more"
        )


class Place(NamedTuple):
    """A row of logits: its request, the position of its token, and the drafted tokens before it."""

    request: Request
    position: int
    drafted: Sequence[int] = ()


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on both and on nothing else (Philox)."""
    key = np.array([seed % 2**64, position], np.uint64)
    return (int(np.random.Philox(key=key).random_raw()) >> 11) * 2.0**-53


class Drawn:
    """Tokens of a step, on their way to the host."""

    def __init__(self, tokens: Tensor, scores: list[Scores | None]) -> None:
        self.tokens, self.scores = tokens, scores
        self.host, self.came = tokens, None
        if tokens.is_cuda:
            self.host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self.host.copy_(tokens, non_blocking=True)
            self.came = torch.cuda.Event()
            self.came.record()

    def get(self) -> list[int]:
        """Waits for the device to have drawn them, not for what it was given since."""
        if self.came is not None:
            self.came.synchronize()
        return self.host.tolist()


class Sampler:
    """Draws the tokens of a step, and keeps the counts that penalties need."""

    def __init__(self, slots: int, vocab: int, device: torch.device) -> None:
        check_vocabulary(vocab)
        self.vocab, self.device = vocab, device
        self.counts = Counts(slots, vocab, device)

    def ints(self, values: Sequence[int]) -> Tensor:
        return on_device(values, torch.int64, self.device)

    def draw(self, logits: Tensor, places: Sequence[Place], best: Tensor | None = None) -> Drawn:
        """A token for each row of logits [R, vocab], and its scores where they are asked for.
        `best` has the rows' largest logits' tokens, where they are known."""
        plain = all(r.temperature == 0 and not r.penalised for r, *_ in places)
        if best is not None and plain:
            tokens = best
        else:
            tokens = sample_tokens(logits, **self.settings(places))
        return Drawn(tokens, self.scores(logits, tokens, places))

    def settings(self, places: Sequence[Place]) -> dict[str, Tensor]:
        """The arguments of `sample_tokens` for these rows, but for the logits."""
        requests = [place.request for place in places]
        floats = {
            "temperature": [r.temperature for r in requests],
            "number": [uniform(p.request.seed, p.position) for p in places],
            "top_p": [r.top_p for r in requests],
            "min_p": [r.min_p for r in requests],
        }
        ints = {"top_k": [min(max(r.top_k, 0), self.vocab) for r in requests]}
        drafts: list[list[int]] = []
        tables: dict[str, Tensor] = {}
        penalised = [place for place in places if place.request.penalised]
        if penalised:
            floats |= {
                name: [getattr(r, name) for r in requests]
                for name in ("presence_penalty", "frequency_penalty", "repetition_penalty")
            }
            answer, prompt = self.counts.count([place.request for place in penalised])
            tables = {"counts": answer, "prompt": prompt}
            ints["slots"] = [self.counts.slot(r) if r.penalised else -1 for r in requests]
            most = max(len(place.drafted) for place in penalised)
            drafts = [
                [place.drafted[i] if i < len(place.drafted) else -1 for place in places]
                for i in range(most)
            ]
        rows = [
            torch.tensor([*floats.values()], dtype=torch.float64),
            torch.tensor([*ints.values(), *drafts], dtype=torch.int64).view(torch.float64),
        ]
        table = moved(torch.cat(rows), self.device)
        whole = table[len(floats) :].view(torch.int64)
        given = tables | dict(zip(floats, table)) | dict(zip(ints, whole))
        if drafts:
            given["drafted"] = whole[len(ints) :].T
        return given

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
