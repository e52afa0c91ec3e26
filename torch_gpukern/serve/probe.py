# SPDX-License-Identifier: BSD-3-Clause
"""Checks that a network gives the same logits over pages as without a cache.

Some models of transformers attend by code of their own, find positions in a mask, or keep other states
than keys and values. Over pages they would give wrong answers without an error. So two prompts run once
when the server starts: first both packed without their last tokens, then a step with the last tokens.
Their logits are compared with those of the network without a cache and with eager attention.

In 16 bits another order of the same operations gives other logits, and the difference grows with the
depth and the width of the model. So eager attention is also compared with another attention of
transformers. The logits over pages may differ TIMES as much as these two.

A difference is the root mean square over all logits, relative to their standard deviation. The largest
difference would not do, because it grows with the number of logits: it was 0.27 for a model of 8e9 random
weights in bfloat16.

A cache of latents in 8 bits is compared with the network whose latents are rounded in the same way.
Rounding may send tokens to other experts, which changed the logits of a small random model by 0.2. Over
pages its logits then differed by 0.0003 in float32, so the 8 bits need no larger limit.

Measured margins: docs/serving.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..nn.latent import replaced_expansion
from ..paged.scales import CODES, LARGEST, SMALLEST
from .fused import is_exact
from .models import TransformersModel

LENGTHS = (9, 6)  # of the prompts; the last token of each is decoded
EXACT = 2e-3  # the difference that is allowed in float32
ROUNDED = 0.03  # in fewer bits, at least this difference is allowed,
TIMES = 2.0  # or this many times the difference between two attentions without a cache,
MOST = 0.7  # but never more than this. (The difference between unrelated logits is 1.4.)
# With 8-bit keys and values three times as much is allowed. (Measured: with e4m3 the difference was 4.4
# times that between two attentions.)
CODED = 3.0
BLOCK = 128  # columns of a latent in 8 bits that share a scale


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
        ValueError: it does not run over pages, or its logits differ.
    """
    name = type(net).__name__
    try:
        model = TransformersModel(net, pages, dtype=dtype, scales=scales, ranks=ranks)
        found = over_pages(model)
        with rounded_latents(model):
            want = alone(net, model.vocab, "eager")
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, IndexError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        first = (str(error).strip() or "no text").splitlines()[0]
        raise ValueError(
            f"{name} is not served: over pages it raises {type(error).__name__}: {first}"
        ) from error
    codes = model.cache.k.dtype if model.cache.k.dtype in (*CODES, torch.uint8) else None
    off = apart(found, want)
    with rounded_latents(model):
        most = most_off(net, want, coded=codes)
    if not off <= most:
        why = (
            "Its attention is not transformers' attention function, or it keeps more than keys and "
            "values"
            if codes not in CODES
            else "Its keys or values need more than these 8 bits; leave --kv-cache out"
        )
        raise ValueError(
            f"{name} is not served{'' if codes is None else f' with a cache of {codes}'}: its logits "
            f"over pages are off by {off:.2g} of their standard deviation; expected at most "
            f"{most:.2g}. {why}"
        )
    return model


def prompts_of(vocab: int) -> list[list[int]]:
    return [[(17 * i + 5 * n) % min(vocab, 250) for i in range(n)] for n in LENGTHS]


def over_pages(model: TransformersModel) -> Tensor:
    """float32 [4, vocab]: for each prompt the logits behind its last token but one, then for each
    prompt those behind its last token."""
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


def apart(x: Tensor, y: Tensor) -> float:
    """The root mean square difference over y's standard deviation."""
    return ((x - y).square().mean().sqrt() / y.std()).item()


def most_off(net: Any, want: Tensor, *, coded: torch.dtype | None = None) -> float:
    """The difference that is allowed over pages. want: the logits of `alone` with eager attention.
    coded: the dtype of an 8-bit cache, or None."""
    if is_exact(net) and coded is None:
        return EXACT
    most = max(ROUNDED, TIMES * rounding(net, want))
    return min(CODED * most if coded in CODES else most, MOST)


@contextmanager
def rounded_latents(model: TransformersModel) -> Iterator[None]:
    """Inside the context latent layers expand latents that are rounded as a cache of 8 bits rounds
    them. Nothing changes for another cache."""
    layers = model.latents if model.cache.k.dtype == torch.uint8 else {}
    with replaced_expansion(layers, _of_rounded):
        yield


def _of_rounded(expand: Any) -> Any:
    """`expand` behind the rounding of a row of 656 bytes (docs/paged_cache.md)."""

    def rounded(c: Tensor, k_pe: Tensor) -> Any:
        blocks = c.float().unflatten(-1, (-1, BLOCK))
        scale = blocks.abs().amax(-1, keepdim=True) / LARGEST[torch.float8_e4m3fn]
        scale = scale.clamp(min=SMALLEST)
        codes = (blocks / scale).to(torch.float8_e4m3fn)
        wide = (codes.float() * scale).flatten(-2)
        return expand(wide.to(c.dtype), k_pe.to(torch.bfloat16).to(k_pe.dtype))

    return rounded


def rounding(net: Any, want: Tensor) -> float:
    """The difference between the logits of eager attention and of another attention of transformers; 0 if
    the network has only eager attention."""
    from ..integrations.transformers import register

    register()
    for way in ("sdpa", "gpukern"):
        try:
            return apart(alone(net, want.shape[1], way), want)
        except (ValueError, NotImplementedError):  # it does not run with this attention
            continue
    return 0.0


@torch.inference_mode()
def alone(net: Any, vocab: int, way: str) -> Tensor:
    """The logits of `over_pages` without a cache, with the attention `way` of transformers."""
    before = net.config._attn_implementation
    net.set_attn_implementation(way)
    try:
        rows = [
            net(input_ids=torch.tensor([p], device=net.device), use_cache=False).logits[0, -2:]
            for p in prompts_of(vocab)
        ]
    finally:
        net.set_attn_implementation(before)
    return torch.stack(rows, 1).flatten(0, 1).float()
