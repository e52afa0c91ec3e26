# SPDX-License-Identifier: BSD-3-Clause
"""The next token from logits, and drafts of the next tokens from what stands before."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on both and on nothing else (Philox)."""
    key = np.array([seed % 2**64, position], np.uint64)
    return (int(np.random.Philox(key=key).random_raw()) >> 11) * 2.0**-53


def pick(logits: Tensor, settings: list) -> list[int]:
    """A token for each row of logits [R, vocab]; settings[r] is the request and the position that
    its token will have."""
    best = logits.argmax(-1)
    drawn = [r for r, (request, _) in enumerate(settings) if request.temperature > 0]
    if drawn:
        requests = [settings[r] for r in drawn]
        temperature, top_p, number = (
            torch.tensor(x, device=logits.device, dtype=torch.float64)[:, None]
            for x in (
                [max(request.temperature, 1e-6) for request, _ in requests],
                [request.top_p for request, _ in requests],
                [uniform(request.seed, position) for request, position in requests],
            )
        )
        p, order = (
            (logits[drawn].double() / temperature)
            .softmax(-1)
            .sort(dim=-1, descending=True, stable=True)
        )
        before = p.cumsum(-1) - p
        p = p.where(before < top_p, 0)  # the first is always in
        total = p.cumsum(-1)
        rank = (total <= number * total[:, -1:]).sum(-1, keepdim=True).clamp_max(p.shape[-1] - 1)
        best[drawn] = order.gather(-1, rank)[:, 0]
    return best.tolist()


class NGrams:
    """Where the n-grams of a sequence were last seen, for drafts after prompt lookup (Saxena
    2023)."""

    def __init__(self, longest: int = 3, shortest: int = 2) -> None:
        self.sizes = range(longest, shortest - 1, -1)
        # an n-gram, and where the token after it stands
        self.after: dict[tuple[int, ...], int] = {}
        self.known = 0

    def draft(self, tokens: list[int], most: int) -> list[int]:
        """At most so many tokens that followed the longest n-gram at the end of tokens, when it was
        last seen."""
        for end in range(self.known, len(tokens)):  # n-grams that end before the last token
            for n in self.sizes:
                if n <= end:
                    self.after[tuple(tokens[end - n : end])] = end
        self.known = len(tokens)
        for n in self.sizes:
            at = self.after.get(tuple(tokens[len(tokens) - n :])) if n <= len(tokens) else None
            if at is not None:
                return tokens[at : at + most]
        return []
