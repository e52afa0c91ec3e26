# SPDX-License-Identifier: BSD-3-Clause
"""What is served, from a model's directory: the network, its tokenizer, its end tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..nn import load_quantized, patch
from .extras import MODELS, need
from .random_models import random_llama
from .tokenizer import Bytes, Tokenizer

CONFIG = "config.json"


class Loaded(NamedTuple):
    net: nn.Module
    tokenizer: Any  # of tokenizer.py
    stop_ids: frozenset[int]


def load(directory: str | Path, device: torch.device, dtype: torch.dtype) -> Loaded:
    """A causal language model of transformers, or one that `gpukern quantize` wrote. Norms and MLPs
    are patched.

    Raises:
        ValueError: no directory, no config.json, no tokenizer, a model of another kind.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(
            f"MODEL_DIR is {directory}, which is no directory; expected one with {CONFIG}, "
            f"*.safetensors and a tokenizer, as transformers saves it"
        )
    if not (directory / CONFIG).exists():
        raise ValueError(f"{directory} has no {CONFIG}; expected a model as transformers saves it")
    (transformers,) = need(MODELS)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(
            f"{directory} has no tokenizer that transformers can load: {first_line(error)}"
        ) from None
    net = network(transformers, directory, dtype).to(device).eval()
    patch(net, say=None)
    return Loaded(net, Tokenizer(tokenizer), end_tokens(net, tokenizer))


def random(size: str, device: torch.device, dtype: torch.dtype) -> Loaded:
    """Random weights, whose tokens are bytes."""
    need(MODELS)
    net = random_llama(size, str(device), dtype)
    patch(net, say=None)
    return Loaded(net, Bytes(), frozenset())


def network(transformers: Any, directory: Path, dtype: torch.dtype) -> nn.Module:
    about = json.loads((directory / CONFIG).read_text()).get("quantization_config") or {}
    if "gpukern" not in about:
        return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    config = transformers.AutoConfig.from_pretrained(directory)
    del config.quantization_config
    net = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    load_quantized(net, directory)
    return net


def end_tokens(net: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer: those of the generation config and the tokenizer's."""
    found: set[int] = set()
    for ends in (net.generation_config.eos_token_id, tokenizer.eos_token_id):
        found.update(ends if isinstance(ends, list) else [] if ends is None else [ends])
    return frozenset(found)


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
