# SPDX-License-Identifier: BSD-3-Clause
"""transformers: ``experts_implementation="gpukern"`` after `register_experts`: mixtures of experts
over grouped_gemm."""

import torch
from torch import Tensor

from ..nn.moe import grouped_experts
from ..ops import swiglu

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
    which = "gate_up_proj" if module.has_gate else "up_proj"
    up, down = getattr(module, which), module.down_proj
    biases = {}
    if module.has_bias:
        biases = {"up_bias": getattr(module, f"{which}_bias"), "down_bias": module.down_proj_bias}
    if not module.is_transposed:
        up, down = up.mT, down.mT
    x = hidden_states.to(up.dtype)  # autocast casts no parameter
    after = module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None
    out = grouped_experts(
        x, top_k_index, top_k_weights, up, down, _gate_of(module), **biases, after=after
    )
    return out.to(hidden_states.dtype)


def _gate_of(module: torch.nn.Module):
    """SwiGLU in one pass where the model's own is that."""
    if not module.has_gate:
        return module.act_fn
    if type(module)._apply_gate.__name__ != "_default_apply_gate":
        return module._apply_gate
    silu = (
        isinstance(module.act_fn, torch.nn.SiLU) or type(module.act_fn).__name__ == "SiLUActivation"
    )
    return swiglu if silu else module._apply_gate
