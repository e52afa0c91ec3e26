# SPDX-License-Identifier: BSD-3-Clause
"""Counts how often each token occurs in the answers of requests with penalties, and marks the tokens of
their prompts.

The counts stay on the device, in a row for each request. A step sends only the tokens that are new since
the last step, so that its cost does not grow with the answer. `sample_tokens` reads the rows in place,
and adds the drafted tokens itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .request import Request
from .transfer import on_device


class Counts:
    """
    Args:
        slots: requests that are known at once. Memory is 5 bytes a slot and token, taken at the
            first request that has a penalty.
    """

    def __init__(self, slots: int, vocab: int, device: torch.device) -> None:
        self.slots, self.vocab, self.device = slots, vocab, device
        self.answer: Tensor | None = None  # int32 [slots, vocab]
        self.prompt: Tensor | None = None  # bool [slots, vocab]
        self.known: dict[Request, tuple[int, int]] = {}  # a slot, and how many tokens it counts
        self.free = list(range(slots))

    def drop(self, request: Request) -> None:
        """Gives the request's slot back."""
        if request in self.known:
            self.free.append(self.known.pop(request)[0])

    def slot(self, request: Request) -> int:
        return self.known[request][0]

    def count(self, wanted: Sequence[Request]) -> tuple[Tensor, Tensor]:
        """Counts the tokens that these requests have got since the last call. Returns int32 counts
        of the answers and bool marks of the prompts, each [slots, vocab]."""
        if self.answer is None or self.prompt is None:
            self.answer = torch.zeros(self.slots, self.vocab, dtype=torch.int32, device=self.device)
            self.prompt = torch.zeros(self.slots, self.vocab, dtype=torch.bool, device=self.device)
        in_prompt: list[int] = []  # places of the flat tables
        in_answer: list[int] = []
        for request in wanted:
            if request not in self.known:
                slot = self.free.pop()
                self.answer[slot].zero_()
                self.prompt[slot].zero_()
                self.known[request] = slot, 0
            slot, seen = self.known[request]
            first = slot * self.vocab
            prompt = len(request.prompt)
            in_prompt += [first + t for t in request.tokens[seen:prompt]]
            in_answer += [first + t for t in request.tokens[max(seen, prompt) :]]
            self.known[request] = slot, len(request.tokens)
        if in_prompt:
            self.prompt.view(-1).index_fill_(0, self.places(in_prompt), True)
        if in_answer:
            at = self.places(in_answer)
            ones = torch.ones_like(at, dtype=torch.int32)
            self.answer.view(-1).scatter_add_(0, at, ones)
        return self.answer, self.prompt

    def places(self, values: list[int]) -> Tensor:
        return on_device(values, torch.int64, self.device)
