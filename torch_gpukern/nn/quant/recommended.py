# SPDX-License-Identifier: BSD-3-Clause
"""Recommends the recipe that decodes fastest for a number of simultaneous requests on a device.

The figures are those of docs/quantise.md: tokens a second of a model in the shape of Llama 3 8B,
divided by those of the same model in bfloat16.
"""

from typing import NamedTuple

import torch

__all__ = ["Recommendation", "recommended"]


class Recommendation(NamedTuple):
    recipe: str
    why: str


# (largest number of requests, recipe, ratio to bfloat16) on one H200. With 64 requests int8 has 1.34
# and fp8 1.30. fp8 is recommended, because int8 codes are coarse in a row that has a few very large
# activations.
HOPPER = ((32, "w4", "1.8 with one request, 1.6 with 16"), (1 << 30, "fp8", "1.3 with 64"))


def recommended(requests: int, device: torch.device | str = "cuda") -> Recommendation:
    """The recipe for `requests` that decode at once on a device of this machine.

    Raises:
        ValueError: requests is below 1.
    """
    if requests < 1:
        raise ValueError(f"recommended: requests is {requests}; expected 1 or more")
    device = torch.device(device)
    if device.type != "cuda":
        return Recommendation("int8", "products of int8 codes are the fastest on a CPU")
    name, major = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)[0]
    if major != 9:
        return Recommendation(
            "int8",
            f"on {name} no decoding was measured; int8 products run at 1.8 times the rate of "
            f"bfloat16 without WGMMA",
        )
    recipe, ratio = next((recipe, ratio) for most, recipe, ratio in HOPPER if requests <= most)
    where = "" if "H200" in name else f"; measured on an H200, this is {name}"
    return Recommendation(recipe, f"bfloat16's tokens times {ratio}{where}")
