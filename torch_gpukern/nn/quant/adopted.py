# SPDX-License-Identifier: BSD-3-Clause
"""Layers of models that transformers loaded in a form of another tool, made ours in place.

`adopt` takes what from_pretrained leaves in a model: an nn.Linear of compressed-tensors, whose
tensors are packed and whose forward decodes them for each call, and transformers' FP8Linear. The
importers make each a `QuantizedLinear` with the same weight (foreign.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .foreign import _float8, _of_format
from .quantize import config_entry
from .quantized import QuantizedLinear

__all__ = ["Adopted", "adopt"]


class Adopted:
    """What `adopt` did. ``replaced`` maps each layer's name to its recipe, ``left`` each other
    layer's to the reason. `restore` puts all back."""

    def __init__(self, model: torch.nn.Module):
        self.model = model
        self.replaced: dict[str, str] = {}
        self.left: dict[str, str] = {}
        self._before: list[tuple[Any, type, dict[str, Any]]] = []
        self._config: tuple[Any, Any] | None = None
        self._hook: tuple[Any, Any] | None = None  # compressed-tensors' handle, and its function

    def restore(self) -> None:
        for module, kind, attributes in self._before:
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(attributes)
        if self._config is not None:
            self.model.config.quantization_config, quantizer = self._config
            if quantizer is not None:
                self.model.hf_quantizer = quantizer  # type: ignore[assignment]
        if self._hook is not None:
            handle, hook = self._hook
            self.model._forward_pre_hooks[handle.id] = hook
            self.model.ct_decompress_hook = handle
        self._before, self._config, self._hook = [], None, None
        self.replaced.clear()


def adopt(model: torch.nn.Module) -> Adopted:
    """Makes a model's layers of compressed-tensors and of FP8Linear ours, in place.

    compressed-tensors decodes all of its layers at the model's first call. So if one of them is in a
    form that is not read, all of them stay.
    """
    done = Adopted(model)
    for name, module in list(model.named_modules()):
        if not isinstance(module, torch.nn.Linear):
            continue
        try:
            with torch.no_grad():
                layer = _layer_of(module)
        except (ValueError, KeyError, AttributeError) as error:
            done.left[name] = f"{type(module).__name__}: {error}"
            continue
        if layer is not None:
            _become(done, module, layer)
            done.replaced[name] = layer.scheme
    compressed = [n for n in done.left if hasattr(model.get_submodule(n), "quantization_scheme")]
    if compressed:
        done.restore()
        return done
    if done.replaced and (handle := vars(model).pop("ct_decompress_hook", None)) is not None:
        done._hook = handle, model._forward_pre_hooks.pop(handle.id)
    config = getattr(model, "config", None)
    if done.replaced and hasattr(config, "quantization_config"):
        quantizer = vars(model).pop("hf_quantizer", None)
        done._config = config.quantization_config, quantizer
        config.quantization_config = config_entry(", ".join(sorted(set(done.replaced.values()))))
    return done


def _layer_of(module: Any) -> QuantizedLinear | None:
    """The layer that an importer makes of a module. None if it is in no form of another tool."""
    tensors: dict[str, Tensor] = {
        name: t.detach()
        for name, t in (*module._parameters.items(), *module._buffers.items())
        if t is not None and name != "bias"
    }
    if type(module).__name__ == "FP8Linear" and "weight_scale_inv" in tensors:
        if module.activation_scheme != "dynamic":
            raise ValueError(f"activation_scheme {module.activation_scheme!r} is not read")
        blocks = module.block_size
        if blocks is not None and list(blocks) != [128, 128]:
            raise ValueError(f"blocks of {list(blocks)} are not read")
        return _float8(
            tensors["weight"], tensors["weight_scale_inv"], None, module.block_size is not None
        )
    scheme = getattr(module, "quantization_scheme", None)
    if scheme is None:
        return None
    status = getattr(getattr(module, "quantization_status", None), "value", None)
    if status != "compressed":
        raise ValueError(
            f"its weights are decoded (quantization_status is {status}), as compressed-tensors does "
            f"at the first call; call accelerate before"
        )
    about = scheme.model_dump(mode="json")
    return _of_format(about["format"], about["weights"], about["input_activations"], tensors)


def _become(done: Adopted, module: Any, layer: QuantizedLinear) -> None:
    state = dict(vars(module))
    for kind in ("_parameters", "_buffers"):
        state[kind] = dict(state[kind])
    state["_non_persistent_buffers_set"] = set(state["_non_persistent_buffers_set"])
    done._before.append((module, type(module), state))
    bias = module._parameters.get("bias")
    some = bias if bias is not None else layer._tensors()["weight_scale"]
    like = some.dtype if some.dtype in (torch.bfloat16, torch.float16) else torch.bfloat16
    for name in ("forward", "quantization_scheme", "quantization_status"):
        vars(module).pop(name, None)
    module._parameters = {"bias": bias}
    module._buffers = {}
    module.__class__ = QuantizedLinear
    module._hold(layer.scheme, layer.in_features, layer.out_features, layer._tensors())
    if "input_order" in layer._buffers:
        module.order_input(layer._buffers["input_order"])
    module.weight_like = torch.empty(0, dtype=like, device=some.device)
