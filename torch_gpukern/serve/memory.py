# SPDX-License-Identifier: BSD-3-Clause
"""How many pages of a cache fit beside a model on a GPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..nn.latent import latents_of
from ..paged.pages import LATENT_BYTES
from .captured import CAPTURED_BATCH, Shapes

GIB = 2**30
# Bytes for each logit of a step: in the model's dtype, in float32, and what sampling makes of them.
BYTES_OF_A_LOGIT = 12
BYTES_OF_A_CAPTURED_LOGIT = 4  # in float32, kept for each graph; the rest is memory of all graphs


def bytes_of_page(net: Any, block_size: int, itemsize: int, ranks: int) -> int:
    """Of the keys and values, or the latents, of all layers on one rank. net: of transformers."""
    latents = latents_of(net)
    if latents is not None:
        (c, k_pe), layers = latents
        return layers * block_size * (LATENT_BYTES if itemsize == 1 else (c + k_pe) * itemsize)
    config = net.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * block_size * (heads // ranks) * dim * itemsize


def bytes_of_steps(
    config: Any, batch: int, step_tokens: int, drafts: int, branches: int = 1
) -> int:
    """What a step needs beside weights and pages, estimated from above: its activations, and the
    logits of the longest step and of all captured ones. drafts: of a branch."""
    width = max(getattr(config, "intermediate_size", None) or 4 * config.hidden_size, 1)
    per_token = 3 * width + 8 * config.hidden_size
    if getattr(config, "kv_lora_rank", None):
        # queries over latents, their two parts, results; keys and values of new tokens
        row = config.kv_lora_rank + config.qk_rope_head_dim
        head = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
        per_token += config.num_attention_heads * (3 * row + 3 * head)
    shapes = Shapes.upto(min(batch, CAPTURED_BATCH), drafts, branches).all
    # a captured step may have more tokens than any step that is asked for
    activations = 4 * max(step_tokens, *(shape.tokens for shape in shapes)) * per_token
    captured = [shape.rows for shape in shapes]
    rows = min(batch * (1 + drafts * branches), step_tokens) + max(captured)
    bytes_of_logits = BYTES_OF_A_LOGIT * rows + BYTES_OF_A_CAPTURED_LOGIT * sum(captured)
    return activations + bytes_of_logits * config.vocab_size


def pages_beside(
    net: Any,
    share: float,
    *,
    itemsize: int,
    block_size: int = 16,
    batch: int = 1,
    step_tokens: int = 1,
    drafts: int = 0,
    branches: int = 1,
    ranks: int = 1,
) -> int:
    """Pages that fit into `share` of the GPU's memory, beside what is taken now and what steps
    need. All ranks get the number of the fullest one.

    Raises:
        ValueError: fewer than two do.
    """
    config = net.config.get_text_config()
    device = next(net.parameters()).device
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    steps = bytes_of_steps(config, batch, step_tokens, drafts, branches)
    room = free - (1 - share) * total - steps
    pages = int(room // bytes_of_page(net, block_size, itemsize, ranks))
    if ranks > 1:
        least = torch.tensor(pages, device=device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        pages = int(least)
    if pages < 2:
        raise ValueError(
            f"--memory is {share:g}: of {total / GIB:.3g} GiB {free / GIB:.3g} are free, steps take "
            f"up to {steps / GIB:.2g}, and no page fits; raise --memory, lower --batch or "
            f"--step-tokens, or give --pages"
        )
    return pages
