# SPDX-License-Identifier: BSD-3-Clause
"""Models with random weights, for tests and load tests."""

from __future__ import annotations

import torch
from torch import nn

SIZES = {  # hidden, intermediate, layers, heads, heads_kv, vocabulary
    "tiny": (128, 256, 2, 4, 2, 512),
    "small": (512, 1536, 8, 8, 2, 8192),
    "8b": (4096, 14336, 32, 32, 8, 128256),
}


def random_llama(
    size: str, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0
) -> nn.Module:
    """A Llama with random weights: "tiny" and "small" for a CPU, "8b" in the shape of Llama 3 8B."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, intermediate, layers, heads, heads_kv, vocab = SIZES[size]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads_kv,
        vocab_size=vocab,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # 8b in float32 would take twice the memory for a moment
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(default)
