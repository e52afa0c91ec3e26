# SPDX-License-Identifier: BSD-3-Clause
"""Models with random weights, for tests and load tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

SIZES = {  # Llamas: hidden, intermediate, layers, heads, heads_kv, vocabulary
    "tiny": (128, 256, 2, 4, 2, 512),
    "small": (512, 1536, 8, 8, 2, 8192),
    "8b": (4096, 14336, 32, 32, 8, 128256),
}
# Models with latent attention and experts: hidden, intermediate, intermediate of an expert, layers,
# heads, vocabulary, experts, experts of a token, shared experts, and the widths of the latent, of the
# rotary part, of the rest of a head and of a value
LATENT_SIZES = {
    "tiny-latent": (128, 256, 64, 2, 4, 512, 8, 2, 1, 64, 16, 32, 32),
    "v2-lite": (2048, 10944, 1408, 27, 16, 102400, 64, 6, 2, 512, 64, 128, 128),
}
SHAPES = (*SIZES, *LATENT_SIZES)
SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}


def random_model(
    size: str, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0
) -> nn.Module:
    """A model of SHAPES with random weights."""
    if size in SIZES:
        return random_llama(size, device, dtype, seed)
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    hidden, wide, expert, layers, heads, vocab, experts, each, shared, *widths = LATENT_SIZES[size]
    names = "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"
    config = DeepseekV2Config(
        hidden_size=hidden,
        intermediate_size=wide,
        moe_intermediate_size=expert,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=vocab,
        n_routed_experts=experts,
        num_experts_per_tok=each,
        n_shared_experts=shared,
        q_lora_rank=None,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        max_position_embeddings=8192,
        **dict(zip(names, widths, strict=True)),
        **SPECIAL,
    )
    return _made(DeepseekV2ForCausalLM, config, device, dtype, seed)


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
        **SPECIAL,
    )
    return _made(LlamaForCausalLM, config, device, dtype, seed)


def _made(kind: Any, config: Any, device: str, dtype: torch.dtype, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # a cast afterwards would need the memory of float32
    try:
        with torch.device(device):
            return kind(config).eval()
    finally:
        torch.set_default_dtype(default)
