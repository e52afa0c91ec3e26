# SPDX-License-Identifier: BSD-3-Clause
"""The next token from logits."""

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
