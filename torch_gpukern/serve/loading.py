# SPDX-License-Identifier: BSD-3-Clause
"""Loads a model's directory: the network and its end tokens for the process of the engine, the tokenizer
for the process of HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..nn import load_quantized, patch, quantize
from ..nn.quant.files import stays_in
from ..nn.quant.quantized import HoldsCodes
from ..nn.quant.recommended import recommended
from ..nn.quant.schemes import IMPORTED, SCHEMES
from .eight_bit import TEXTS, dtype_of, scales_of
from .extras import MODELS, need
from .memory import pages_beside
from .models import TransformersModel
from .probe import served
from .random_models import random_model
from .sampling import check_vocabulary
from .shards import shard
from .tokenizer import Bytes, Tokenizer

CONFIG = "config.json"
RECIPES = tuple(r for r in SCHEMES if r not in IMPORTED and not SCHEMES[r].static)


class What(NamedTuple):
    """What is served, as the command's flags say."""

    directory: str | None
    random: str | None  # a shape of random_models.py
    dtype: torch.dtype
    pages: int | None  # None on a GPU: what fits into `memory`
    recipe: str | None = None  # of RECIPES, or auto
    cache: str | None = None  # of CACHES
    batch: int = 1
    ranks: int = 1
    step_tokens: int = 1
    drafts: int = 0
    memory: float = 0.9  # the share of a GPU's memory for weights, pages and steps
    draft_branches: int = 1


class Ready(NamedTuple):
    """What an engine needs."""

    model: TransformersModel
    stop_ids: frozenset[int]  # of the generation config; the tokenizer may have others
    recipe: str | None


def ready(what: What, device: torch.device, rank: int = 0) -> Ready:
    """The model over pages, on one of its ranks. It reads a tokenizer only to choose the scales of an
    8-bit cache: texts and tokens are the business of HTTP's process.

    Raises:
        ValueError: the model, or a setting that it does not take, by name.
    """
    if what.random is not None:
        net, stop_ids = random(what.random, device, what.dtype), frozenset()
    else:
        assert what.directory is not None
        net = load(what.directory, what.dtype)
        stop_ids = ids_of(net.generation_config.eos_token_id)
    shard(net, rank, what.ranks)
    net.to(device)
    recipe = what.recipe
    if recipe == "auto":
        recipe = recommended(what.batch, device).recipe
    if recipe is not None:
        quantised(net, recipe)
    dtype, scales = None, None
    if what.cache is not None:
        dtype = dtype_of(net, what.cache)
        if dtype != torch.uint8:
            scales = scales_of(net, dtype, prompts_of(tokenizer_of(what), net), ranks=what.ranks)
    pages = what.pages
    if pages is None:
        pages = pages_beside(
            net,
            what.memory,
            itemsize=(dtype or next(net.parameters()).dtype).itemsize,
            batch=what.batch,
            step_tokens=what.step_tokens,
            drafts=what.drafts,
            branches=what.draft_branches,
            ranks=what.ranks,
        )
    model = served(net, pages, dtype=dtype, scales=scales, ranks=what.ranks)
    return Ready(model, stop_ids, recipe)


def quantised(net: nn.Module, recipe: str) -> None:
    before = next((m.scheme for m in net.modules() if isinstance(m, HoldsCodes)), None)
    if before is not None:
        raise ValueError(
            f"--recipe is {recipe}, and the directory's weights are {before} already; leave "
            f"--recipe out, or serve the directory that they were made from"
        )
    quantize(net, recipe, skip=stays_in(net), say=None)


def prompts_of(tokenizer: Any, net: Any) -> list[list[int]]:
    """TEXTS as tokens of the model."""
    vocab = net.config.get_text_config().vocab_size
    return [[t % vocab for t in tokenizer.encode(text)] for text in TEXTS]


def tokenizer_of(what: What) -> Any:
    """The tokenizer, and nothing of the model.

    Raises:
        ValueError: no directory, no config.json, no tokenizer, too large a vocabulary.
    """
    if what.random is not None:
        return Bytes()
    assert what.directory is not None
    transformers = checked(Path(what.directory))
    try:
        inner = transformers.AutoTokenizer.from_pretrained(what.directory)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(
            f"{what.directory} has no tokenizer that transformers can load: {first_line(error)}"
        ) from None
    return Tokenizer(inner)


def checked(directory: Path) -> Any:
    """transformers, if it can load the directory's model, as far as config.json says."""
    if not directory.is_dir():
        raise ValueError(
            f"MODEL_DIR is {directory}, which is no directory; expected one with {CONFIG}, "
            f"*.safetensors and a tokenizer, as transformers saves it"
        )
    if not (directory / CONFIG).exists():
        raise ValueError(f"{directory} has no {CONFIG}; expected a model as transformers saves it")
    (transformers,) = need(MODELS)
    config = transformers.AutoConfig.from_pretrained(directory)
    check_vocabulary(config.get_text_config().vocab_size)
    return transformers


def load(directory: str | Path, dtype: torch.dtype) -> nn.Module:
    """A causal language model of transformers, or one that `gpukern quantize` wrote, on the CPU.
    Norms and MLPs are patched.

    Raises:
        ValueError: no directory, no config.json, too large a vocabulary, a model of another kind.
    """
    directory = Path(directory)
    return network(checked(directory), directory, dtype)


def random(size: str, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Random weights, whose tokens are bytes."""
    need(MODELS)
    net = random_model(size, str(device), dtype)
    patch(net, say=None)
    return net


def network(transformers: Any, directory: Path, dtype: torch.dtype) -> nn.Module:
    """Patched, which comes before quantising: `patch` looks at plain weights."""
    about = json.loads((directory / CONFIG).read_text()).get("quantization_config")
    if not about:
        net = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
        patch(net, say=None)
        return net
    config = transformers.AutoConfig.from_pretrained(directory)
    del config.quantization_config
    net = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    patch(net, say=None)
    load_quantized(net, directory)
    return net


def ids_of(given: int | list[int] | None) -> frozenset[int]:
    """The tokens of an eos_token_id."""
    return frozenset(given if isinstance(given, list) else [] if given is None else [given])


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
