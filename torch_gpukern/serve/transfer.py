# SPDX-License-Identifier: BSD-3-Clause
"""Copies numbers from the host to a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def on_device(values: Sequence, dtype: torch.dtype, device: torch.device) -> Tensor:
    return moved(torch.tensor(values, dtype=dtype), device)


def moved(numbers: Tensor, device: torch.device) -> Tensor:
    """The numbers on the device. The copy is from pinned memory, so the host does not wait for it."""
    if device.type == "cuda":
        return numbers.pin_memory().to(device, non_blocking=True)
    return numbers.to(device)
