# SPDX-License-Identifier: BSD-3-Clause
"""PEFT: adapters over our layers.

PEFT accepts `gnn.Linear`, `Fp8Linear` and `QatLinear` for LoRA, because they are subclasses of
nn.Linear. `register` adds two cases that it refuses: LoRA over a `QuantizedLinear`, whose weight is not
a parameter, and GLoRA over a `gnn.Linear`. It also lets ``target_modules="all-linear"`` find quantised
layers.
"""

from typing import Any

import torch

try:
    from peft.tuners import tuners_utils as _utils
    from peft.tuners.lora import layer as _lora_layer
    from peft.tuners.lora import model as _lora_model
    from peft.tuners.tuners_utils import BaseTunerLayer
except ImportError as error:
    raise ImportError("torch_gpukern: adapters need peft: pip install peft") from error

from ..nn.layers import Linear
from ..nn.quant.quantized import QuantizedLinear

__all__ = ["QuantizedLoraLinear", "register"]

# Initialisations that do not change the base layer's weight. The others (PiSSA, OLoRA, LoftQ, CorDA)
# subtract from it, and a quantised weight would be rounded again.
_INITIALISATIONS = (True, False, "gaussian", "orthogonal", "eva")
_ALL_LINEAR = "_maybe_include_all_linear_layers"  # of PEFT's tuners_utils


class QuantizedLoraLinear(_lora_layer.Linear):
    """LoRA over a `QuantizedLinear`: the quantised product plus the adapter's product.

    Raises:
        ValueError: DoRA, or an initialisation that changes the base's weight.
        NotImplementedError: merging while the base is quantised. The sum of weight and adapter
            would be rounded again.
    """

    def __init__(self, base_layer: torch.nn.Module, adapter_name: str, config: Any, **kwargs: Any):
        _refuse_unserved(base_layer, config)
        super().__init__(base_layer, adapter_name, config=config, **kwargs)

    def update_layer(self, adapter_name: str, r: int, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("config") is not None:
            _refuse_unserved(self.get_base_layer(), kwargs["config"])
        super().update_layer(adapter_name, r, *args, **kwargs)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        base = self.get_base_layer()
        if not isinstance(base, QuantizedLinear):  # Quantized.restore was called in the meantime
            super().merge(safe_merge, adapter_names)
            return
        raise NotImplementedError(
            f"gpukern: an adapter cannot be merged into a QuantizedLinear of recipe {base.scheme}, "
            f"whose weight would be rounded again; call Quantized.restore() first, or do not merge"
        )


def _refuse_unserved(base: torch.nn.Module, config: Any) -> None:
    where = f"gpukern: LoRA over a QuantizedLinear of recipe {getattr(base, 'scheme', '?')}"
    if config.use_dora:
        raise ValueError(f"{where}: use_dora must be False, DoRA trains the norm of the weight")
    if config.init_lora_weights not in _INITIALISATIONS:
        raise ValueError(
            f"{where}: init_lora_weights must be one of "
            f"{', '.join(map(str, _INITIALISATIONS))}, got {config.init_lora_weights!r}, which "
            f"changes the base's weight"
        )


def register() -> None:
    """Adds gpukern's layers to PEFT's LoRA and GLoRA, for the whole process.

    ::

        torch_gpukern.integrations.peft.register()
        gnn.quantize(model, "w4", skip=SKIP)
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))

    A second call does nothing. Call it before ``PeftModel.from_pretrained``, too.

    Raises:
        ImportError: peft is not installed, or chooses layers in another way.
    """
    if not hasattr(_lora_model, "dispatch_default"):
        import peft

        raise ImportError(
            f"torch_gpukern: peft {peft.__version__} chooses layers in another way: pip install "
            f"--upgrade peft"
        )
    if not hasattr(_lora_model.dispatch_default, "_gpukern_before"):
        _lora_model.dispatch_default = _dispatch_after(_lora_model.dispatch_default)
    include = getattr(_utils, _ALL_LINEAR, None)
    if include is not None and not hasattr(include, "_gpukern_before"):
        setattr(_utils, _ALL_LINEAR, _all_linear_after(include))
    try:
        from peft.tuners.glora import model as glora_model
    except ImportError:  # a peft without GLoRA
        return
    kind = glora_model.GloraModel
    if not hasattr(kind._create_new_module, "_gpukern_before"):
        made = _glora_after(kind._create_new_module, glora_model.GloraLinear)
        kind._create_new_module = staticmethod(made)


def _all_linear_after(before: Any) -> Any:
    def include(peft_config, model):
        asked = getattr(peft_config, "target_modules", None)
        config = before(peft_config, model)
        if isinstance(asked, str) and asked.lower() == "all-linear":
            ours = {name for name, m in model.named_modules() if isinstance(m, QuantizedLinear)}
            for name, module in model.named_modules():
                if isinstance(module, BaseTunerLayer):  # it is a target itself, its base is not
                    ours -= {f"{name}.{inner}" for inner, _ in module.named_modules()}
            head = (
                model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
            )
            ours -= {name for name, module in model.named_modules() if module is head}
            config.target_modules = set(config.target_modules) | ours
        return config

    include._gpukern_before = before  # type: ignore[attr-defined]
    return include


def _base_of(target: torch.nn.Module) -> torch.nn.Module:
    return target.get_base_layer() if isinstance(target, BaseTunerLayer) else target


def _dispatch_after(before: Any) -> Any:
    def dispatch(target, adapter_name, config, parameter_name=None, **kwargs):
        if isinstance(_base_of(target), QuantizedLinear) and parameter_name is None:
            return QuantizedLoraLinear(target, adapter_name, config=config, **kwargs)
        return before(target, adapter_name, config=config, parameter_name=parameter_name, **kwargs)

    dispatch._gpukern_before = before  # type: ignore[attr-defined]
    return dispatch


def _glora_after(before: Any, layer: Any) -> Any:
    def create(peft_config, adapter_name, target, **kwargs):
        base = _base_of(target)
        if type(base) is Linear and base.activation == "none":
            return layer(target, adapter_name, config=peft_config)
        if isinstance(base, QuantizedLinear):
            raise ValueError(
                f"gpukern: GLoRA changes the base's weight, and that of a QuantizedLinear of "
                f"recipe {base.scheme} cannot be changed; use LoRA"
            )
        return before(peft_config, adapter_name, target, **kwargs)

    create._gpukern_before = before  # type: ignore[attr-defined]
    return create
