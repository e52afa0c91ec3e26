# SPDX-License-Identifier: BSD-3-Clause
"""Layers on gpukern: modules with the weights and names of PyTorch's and transformers' own, and `patch` for a model that stands."""

from .layers import MLP, Attention, Linear
from .patching import Patched, patch
from .rows import LayerNorm, LinearCrossEntropy, RMSNorm, RotaryEmbedding

__all__ = [
    "MLP",
    "Attention",
    "LayerNorm",
    "Linear",
    "LinearCrossEntropy",
    "Patched",
    "RMSNorm",
    "RotaryEmbedding",
    "patch",
]
