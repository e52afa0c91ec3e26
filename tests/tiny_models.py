# SPDX-License-Identifier: BSD-3-Clause
"""Small networks of transformers with random weights, for tests of several folders."""

import torch

MIXTURE = {  # the names of all families that the tests use
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
LATENT = {  # DeepSeek's
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


def causal_lm(family, *, seed=0, dtype=torch.bfloat16, **sizes):
    """A model of a family of transformers' AutoModelForCausalLM."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def latent_lm(kind, *, attention=None, **sizes):
    """A model of latent attention, with weights so large that attention decides tokens."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    if attention is not None:
        config._attn_implementation = attention
    net = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for weight in net.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.15)
    return net
