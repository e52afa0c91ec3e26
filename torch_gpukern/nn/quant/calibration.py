# SPDX-License-Identifier: BSD-3-Clause
"""calibrate: statistics of the inputs of a model's layers over some batches."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...cli.terminal import progress
from .quantized import rows_of

__all__ = ["Observed", "calibrate"]


class Observed(NamedTuple):
    """Statistics of a layer's input.

    Attributes:
        amax: float32 [], the largest absolute value.
        square: float32 [K], the mean square of each column.
    """

    amax: Tensor
    square: Tensor


def calibrate(
    model: torch.nn.Module,
    batches: Iterable[Any],
    modules: Mapping[str, torch.nn.Module] | None = None,
    *,
    show: bool = True,
) -> dict[str, Observed]:
    """Runs the model without gradients in evaluation mode and returns the statistics of each
    layer's input.

    Args:
        model: any module.
        batches: the model is called as ``model(*batch)`` if batch is a tuple or list, as
            ``model(**batch)`` if it is a mapping, and as ``model(batch)`` otherwise.
        modules: the layers to observe, by name; None: every nn.Linear.
        show: whether to show the progress on stderr.

    Returns:
        A dictionary by name. Layers that were never called are missing.

    Raises:
        ValueError: there is no batch.
    """
    if modules is None:
        modules = {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    sums: dict[str, list[Any]] = {}  # name: [amax, sum of squares by column, number of rows]

    def observing(name: str):
        """A hook that adds the input of the layer `name` to its statistics."""

        def hook(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
            given = args[0] if args else kwargs.get("input")
            if not isinstance(given, Tensor):
                return  # the layer's forward will raise and say what it expects
            x = rows_of(given.detach()).float()
            if not len(x):
                return
            found = sums.setdefault(name, [x.new_zeros(()), x.new_zeros(x.shape[1]), 0])
            if x.numel():
                found[0] = torch.maximum(found[0], x.abs().amax())
            found[1] += x.square().sum(0)
            found[2] += len(x)

        return hook

    hooks = [
        m.register_forward_pre_hook(observing(name), with_kwargs=True)
        for name, m in modules.items()
    ]
    modes = {m: m.training for m in model.modules()}
    count = 0
    try:
        model.eval()
        with torch.no_grad():
            for batch in progress(batches, "calibrating", "batch") if show else batches:
                count += 1
                if isinstance(batch, Mapping):
                    model(**batch)
                elif isinstance(batch, (tuple, list)):
                    model(*batch)
                else:
                    model(batch)
    finally:
        for hook in hooks:
            hook.remove()
        for m, training in modes.items():
            m.training = training
    if not count:
        raise ValueError("calibrate: there is no batch")
    return {name: Observed(amax, square / n) for name, (amax, square, n) in sums.items()}
