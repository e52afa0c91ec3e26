# SPDX-License-Identifier: BSD-3-Clause
"""Finds the scales of an 8-bit cache: a key scale and a value scale for each layer and head.

The model answers a few texts over a cache of its own dtype. A scale is the largest key or value of
these texts and answers, times MARGIN, over the largest code. No data set is needed. The texts include
first tokens, whose keys are the largest in many models.

Latents (nn/latent.py) need no such scales: each row is stored with its own, one for 128 columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..nn.latent import latents_of
from ..paged.pages import LATENT_ROW
from ..paged.scales import KVCacheScales
from .engine import Engine
from .models import TransformersModel
from .request import Request

CACHES = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}
TEXTS = (
    "The sea is salty because rivers carry minerals from the land, and only the water leaves it.",
    "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n",
    '{"name": "lamp", "price": 49.90, "sizes": [12, 18, 24], "in stock": true}',
    "Question: How many days has a leap year? Answer: It has 366 days, one more than other years.",
)
ANSWER = 96  # tokens that the model adds to each text, drawn at temperature 1
# A later key may be larger by this factor than all that were seen before its code saturates. A larger
# factor costs int8 resolution. It costs e4m3 none, because its codes are floating-point numbers.
MARGIN = 1.25


def dtype_of(net: Any, name: str) -> torch.dtype:
    """The dtype of a network's cache for a name of CACHES.

    Raises:
        ValueError: the network caches latents, which have no form of this name.
    """
    latents = latents_of(net)
    if latents is None:
        return CACHES[name]
    if name != "e4m3" or latents[0] != LATENT_ROW:
        raise ValueError(
            f"--kv-cache is {name}, and the model caches latents {latents[0]}; expected e4m3 and "
            f"latents {LATENT_ROW}; leave --kv-cache out"
        )
    return torch.uint8


def scales_of(
    net: Any, dtype: torch.dtype, prompts: Sequence[Sequence[int]], *, ranks: int = 1
) -> dict[str, Tensor]:
    """``k_scale`` and ``v_scale`` for a PagedKVCache of this dtype, [layers, heads_kv] float32.

    Args:
        net: a transformers network, as TransformersModel takes it.
        dtype: one of CACHES.
        prompts: token ids of the texts.
        ranks: as TransformersModel takes it.

    Raises:
        ValueError: a key or value is infinite or NaN, or all of a head are 0.
    """
    size = 16
    limit = net.config.get_text_config().max_position_embeddings
    prompts = [list(p)[: max(limit - 1, 1)] for p in prompts if len(p)]
    answers = [min(ANSWER, limit - len(p)) for p in prompts]
    pages = sum(-(-(len(p) + n) // size) for p, n in zip(prompts, answers, strict=True))
    model = TransformersModel(net, pages, size, ranks=ranks, captured_batch=0)
    cache = model.cache
    cache.k.zero_()  # so that places that are not written do not count as large values
    cache.v.zero_()
    longest = max(map(len, prompts))
    engine = Engine(
        model, max_batch=len(prompts), max_step_tokens=len(prompts) * longest, max_drafts=0
    )
    engine.submit_all(
        [
            Request(prompt, max_tokens=n, temperature=1.0, seed=i)
            for i, (prompt, n) in enumerate(zip(prompts, answers, strict=True))
        ]
    )
    while engine.step():
        pass
    layers, _, _, heads, _ = cache.k.shape
    found = KVCacheScales(layers, heads, dtype, device=cache.k.device)
    for layer in range(layers):
        found.observe(cache.k[layer], cache.v[layer], layer)
    return found.scales(MARGIN)
