# SPDX-License-Identifier: BSD-3-Clause
"""The ten masks of docs/masks.md, 1,280 tokens each, with the text that the page says of them. Run
as a program, it prints them."""

import torch

import torch_gpukern as gk

TOKENS = 1280


def _ranges(*columns):
    wide = [c if isinstance(c, torch.Tensor) else torch.full((TOKENS,), c) for c in columns]
    return gk.attn_mask_ranges(torch.stack(wide, -1).to(torch.int32), TOKENS)


def masks():
    """(title, AttnMask) of each."""
    i = torch.arange(TOKENS)
    document = torch.tensor([0, 300, 400, 900, TOKENS])
    begin = document[torch.searchsorted(document, i, right=True) - 1]
    image = torch.where((i >= 450) & (i < 800), 800, 0)
    answer = torch.where(i < 384, 0, 384 + (i - 384) // 300 * 300)
    blocks = torch.tensor(
        [[(3 * q + 5 * k) % 4 == 0 and k <= q for k in range(10)] for q in range(10)]
    )
    count = blocks.sum(-1).to(torch.int32)
    lists = (~blocks).to(torch.int32).argsort(dim=-1, stable=True).to(torch.int32)
    late = (i - 299).clamp(min=64)
    padding = (i >= 200) & (i < 1100) & (i // 40 % 9 != 4)
    return [
        ("Causal", _ranges(0, i + 1)),
        ("Sliding window of 300", _ranges(i - 299, i + 1)),
        ("Window of 300 and 64 tokens that all see", _ranges(late, i + 1, 0, (i + 1).clamp(max=64))),
        ("Documents, causal inside", _ranges(begin, i + 1)),
        ("Prefix-LM: the first 500 tokens see each other", _ranges(0, (i + 1).clamp(min=500))),
        ("Image tokens 450 to 800 see each other", _ranges(0, torch.maximum(i + 1, image))),
        ("Chunks of 400", _ranges(i // 400 * 400, i + 1)),
        ("A question of 384 tokens and three answers", _ranges(0, (i + 1).clamp(max=384), answer, i + 1)),
        ("Padding with holes, causal", gk.attn_mask_of(padding[None, :] & (i[:, None] >= i))),
        ("Block-sparse", gk.attn_mask_blocks(count, lists, seq_q=TOKENS, seq_k=TOKENS)),
    ]  # fmt: skip


if __name__ == "__main__":
    for title, mask in masks():
        print(f"**{title}**\n\n```\n{mask.tiles().picture()}\n```\n")
