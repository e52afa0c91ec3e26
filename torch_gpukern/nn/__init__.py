# SPDX-License-Identifier: BSD-3-Clause
"""Layers on gpukern: modules with the weights and names of PyTorch's and transformers' own, and `patch` for a model that stands."""

from .layers import MLP, Attention, Linear
from .patching import Patched, patch

__all__ = ["MLP", "Attention", "Linear", "Patched", "patch"]
