# SPDX-License-Identifier: BSD-3-Clause
"""Whether a network computes over pages what it computes alone.

Some models of transformers attend by code of their own, find positions in a mask, or keep other
states than keys and values. Over pages they would answer, and answer wrongly. So two prompts run
once when the server begins, packed and then a token each, and their logits are compared.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..paged.scales import CODES
from .fused import ROUNDED, most_off
from .models import ATTENTION, TransformersModel

LENGTHS = (9, 6)  # of the prompts; the last token of each is decoded


def served(
    net: Any,
    pages: int,
    *,
    dtype: torch.dtype | None = None,
    scales: dict[str, Tensor] | None = None,
    ranks: int = 1,
) -> TransformersModel:
    """The network over pages. dtype, scales and ranks are those of TransformersModel.

    Raises:
        ValueError: it does not run there, or its logits are others.
    """
    name = type(net).__name__
    try:
        model = TransformersModel(net, pages, dtype=dtype, scales=scales, ranks=ranks)
        found, want = over_pages(model), alone(net, model.vocab)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, IndexError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        first = (str(error).strip() or "no text").splitlines()[0]
        raise ValueError(
            f"{name} is not served: over pages it raises {type(error).__name__}: {first}"
        ) from error
    off = ((found - want).abs().max() / want.std()).item()
    codes = model.cache.k.dtype if model.cache.k.dtype in CODES else None
    most = most_off(net) if codes is None else ROUNDED
    if not off <= most:
        why = (
            "Its attention is not transformers' attention function, or it keeps more than keys and "
            "values"
            if codes is None
            else "Its keys or values need more than these 8 bits; leave --kv-cache out"
        )
        raise ValueError(
            f"{name} is not served{'' if codes is None else f' with a cache of {codes}'}: its logits "
            f"over pages are off by {off:.2g} of their standard deviation; expected at most "
            f"{most:g}. {why}"
        )
    return model


def prompts_of(vocab: int) -> list[list[int]]:
    return [[(17 * i + 5 * n) % min(vocab, 250) for i in range(n)] for n in LENGTHS]


def over_pages(model: TransformersModel) -> Tensor:
    """float32 [4, vocab]: the logits behind each prompt without its last token, then behind that."""
    prompts, cache = prompts_of(model.vocab), model.cache
    handles = [cache.allocate() for _ in prompts]
    try:
        counts = [len(p) - 1 for p in prompts]
        model.begin(handles, counts)
        ids = [t for p in prompts for t in p[:-1]]
        positions = [i for n in counts for i in range(n)]
        starts, last = [0, counts[0]], [counts[0] - 1, sum(counts) - 1]
        first = model.forward(ids, positions, last, starts, [[], []]).clone()
        model.begin(handles, [1, 1])
        before = [p[-3:-1] for p in prompts]
        second = model.forward([p[-1] for p in prompts], counts, [0, 1], [0, 1], before)
        return torch.cat([first, second]).float()
    finally:
        for handle in handles:
            cache.free(handle)


@torch.inference_mode()
def alone(net: Any, vocab: int) -> Tensor:
    """The same logits without a cache, by transformers' plain attention."""
    net.set_attn_implementation("eager")
    try:
        rows = [
            net(input_ids=torch.tensor([p], device=net.device), use_cache=False).logits[0, -2:]
            for p in prompts_of(vocab)
        ]
    finally:
        net.set_attn_implementation(ATTENTION)
    return torch.stack(rows, 1).flatten(0, 1).float()
