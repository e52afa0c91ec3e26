# SPDX-License-Identifier: BSD-3-Clause
"""Layers on gpukern, with the weights and names of PyTorch's and transformers' own. `patch` and
`quantize` change an existing model in place.
"""

from .layers import MLP, Attention, Linear
from .losses import (
    DPOLoss,
    dpo_loss,
    grpo_loss,
    linear_dpo_loss,
    linear_kl_div,
    linear_log_probs,
    load_balancing_loss,
    router_z_loss,
)
from .moe import MoE, grouped_experts
from .patching import Patched, patch
from .quant.calibration import Observed, calibrate
from .quant.files import quantize_directory
from .quant.fp8 import Fp8Linear
from .quant.fp8_gather import fp8_all_gather
from .quant.importers import from_awq, from_compressed_tensors, from_gptq, from_torchao
from .quant.importers_4bit import (
    from_bitsandbytes,
    from_mxfp4,
    from_nvfp4,
    from_pack_quantized,
)
from .quant.loading import load_quantized
from .quant.qat import QatLinear
from .quant.quantize import RECIPES, Quantized, quantize
from .quant.quantized import QuantizedLinear
from .quant.schemes import prune_2_4
from .rows import LayerNorm, LinearCrossEntropy, RMSNorm, RotaryEmbedding

__all__ = [
    "MLP",
    "RECIPES",
    "Attention",
    "DPOLoss",
    "Fp8Linear",
    "LayerNorm",
    "Linear",
    "LinearCrossEntropy",
    "MoE",
    "Observed",
    "Patched",
    "QatLinear",
    "Quantized",
    "QuantizedLinear",
    "RMSNorm",
    "RotaryEmbedding",
    "calibrate",
    "dpo_loss",
    "fp8_all_gather",
    "from_awq",
    "from_bitsandbytes",
    "from_compressed_tensors",
    "from_gptq",
    "from_mxfp4",
    "from_nvfp4",
    "from_pack_quantized",
    "from_torchao",
    "grouped_experts",
    "grpo_loss",
    "linear_dpo_loss",
    "linear_kl_div",
    "linear_log_probs",
    "load_balancing_loss",
    "load_quantized",
    "patch",
    "prune_2_4",
    "quantize",
    "quantize_directory",
    "router_z_loss",
]
