# SPDX-License-Identifier: BSD-3-Clause
"""transformers: ``experts_implementation="gpukern"`` after `register_experts`: mixtures of experts
over grouped_gemm."""

import torch
from torch import Tensor

from ..nn.moe import names_of_experts, transformers_experts

__all__ = ["register_experts"]


def register_experts(name: str = "gpukern") -> None:
    """Adds gpukern's experts to transformers: then ``experts_implementation=name`` is taken
    wherever "grouped_mm" is.

    ::

        torch_gpukern.integrations.transformers_experts.register_experts()
        model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="gpukern")
        model.set_experts_implementation("gpukern")  # or later

    Experts with a gate or without, with biases, weights stored either way, a gate of the model's
    own (gpt-oss); float32, bfloat16 and float16, with gradients. Nothing waits for the device.

    Raises:
        ImportError: a transformers whose experts cannot be replaced.

    Gale et al., "MegaBlocks" (2022), arXiv:2211.15841.
    """
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        import transformers

        raise ImportError(
            f"torch_gpukern: experts of transformers {transformers.__version__} cannot be "
            f"replaced: "
            "pip install --upgrade transformers"
        ) from error
    ALL_EXPERTS_FUNCTIONS.register(name, _experts)


def _experts(
    module: torch.nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    up, down = (getattr(module, name) for name in names_of_experts(module))
    if not module.is_transposed:
        up, down = up.mT, down.mT
    x = hidden_states.to(up.dtype)  # autocast casts no parameter
    out = transformers_experts(module, x, top_k_index, top_k_weights, up, down)
    return out.to(hidden_states.dtype)
