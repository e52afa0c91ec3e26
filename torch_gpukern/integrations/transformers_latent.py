# SPDX-License-Identifier: BSD-3-Clause
"""transformers: latent attention (DeepSeek's) over the latents in the cache.

For each token transformers' caches hold two parts: the latent c and the rotary key k_pe. In every
step a layer computes keys and values of all heads from all cached parts (its method `expand_kv`).
`absorb` replaces expand_kv by a function that returns c and k_pe unchanged. The attention function
then chooses: it attends over c and k_pe (`nn.latent.Absorbed`), which is less arithmetic for a few
queries, or it expands them as before.

`LatentCache` stores c and k_pe of a token side by side, so that `paged_attn` reads them in place.
The parts of any other cache are copied into such rows first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

from .._library import ops
from ..nn.latent import ABSORBED, absorbed, is_latent, is_plain
from ..nn.rows import served
from ..ops import paged_attn

__all__ = ["LatentCache", "absorb", "latent_layer_of"]

# Rows of a sequence are allocated in multiples of this: the Hopper kernel takes pages of a multiple
# of 16 keys.
ROWS = 64


class Layer:
    """What `absorb` adds to a layer.

    name: the name of the attention function that takes c and k_pe.
    """

    def __init__(self, module: Any, name: str) -> None:
        self.products, self.name = absorbed(module), name
        latent = self.products.latent
        self.fits = {  # whether paged_attn takes rows of these widths on CUDA and elsewhere
            cuda: all(ops.serves_head_dim(n, cuda) for n in (sum(latent), latent[0]))
            for cuda in (False, True)
        }

    def passes_latents(self, module: Any) -> bool:
        """Whether expand_kv returns c and k_pe in this pass. With gradients it does not, because
        `paged_attn` has none. Other attention functions need keys and values."""
        return not torch.is_grad_enabled() and module.config._attn_implementation == self.name

    def is_cheaper(self, queries: int) -> bool:
        """Whether attention over latents is less arithmetic than expanding them.

        For each key and head a query takes ``(c + k_pe) + c`` multiplications over latents, and
        ``nope + k_pe + width_v`` over expanded keys and values. The expansion takes ``c`` for each
        of its ``nope + width_v`` columns.
        """
        p = self.products
        c, k_pe = p.latent
        head = p.nope + k_pe + p.width_v
        return queries * (2 * c + k_pe - head) <= c * (p.nope + p.width_v)

    def takes(self, module: Any, query: Tensor, c: Tensor, k_pe: Tensor) -> bool:
        """Whether our kernels can multiply the operands without copies, and it pays."""
        expand = module.kv_b_proj
        if expand is not self.products.expand or not is_plain(expand):
            return False  # it was replaced later, by a quantised layer or an adapter
        return (
            query.dtype == c.dtype == k_pe.dtype == expand.weight.dtype
            and served(query, c, k_pe, expand.weight)
            and self.fits[c.is_cuda]
            and self.is_cheaper(query.shape[2])
        )

    def attend(
        self,
        query: Tensor,
        c: Tensor,
        k_pe: Tensor,
        scale: float | None,
        first: Tensor | None,
        lengths: Tensor,
    ) -> Tensor:
        """query [B, H, Sq, nope + k_pe], c and k_pe [B, 1, Sk, ..] -> [B, Sq, H, width_v].

        The last query of sequence b has the position of key ``lengths[b] - 1`` and sees keys
        ``[first[b], lengths[b])``. Both are int32.
        """
        batch, _, new, width = query.shape
        rows, table = rows_of(c, k_pe)
        q = self.products.queries(query).flatten(0, 1)
        scale = width**-0.5 if scale is None else scale
        pages = rows, rows[..., : c.shape[-1]]
        out = paged_attn(q, *pages, table, lengths, scale=scale, kv_start=first)
        return self.products.values(out.unflatten(0, (batch, new)))


def rows_of(c: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
    """(rows [B, n, 1, width of c + width of k_pe], a block table of one page for each sequence).
    The rows are a view if c and k_pe are neighbours in memory, otherwise a copy."""
    batch, _, keys, wide = c.shape
    width = wide + k_pe.shape[-1]
    table = torch.arange(batch, dtype=torch.int32, device=c.device)[:, None]
    if not torch.compiler.is_compiling():
        row, sequence = c.stride(2), c.stride(0)
        page = sequence // row if batch > 1 else keys
        if (
            k_pe.stride() == c.stride()
            and k_pe.data_ptr() == c.data_ptr() + wide * c.element_size()
            and row >= width
            and c.stride(3) == 1
            and (batch == 1 or (sequence % row == 0 and sequence >= keys * row))
        ):
            # The page of a single sequence is rounded up to ROWS if the memory behind the keys
            # belongs to the storage. Rows behind the last key are not read.
            rounded = -(-keys // ROWS) * ROWS
            start, end = c.storage_offset(), c.untyped_storage().nbytes() // c.element_size()
            if batch == 1 and start + rounded * row <= end:
                page = rounded
            sizes, strides = (batch, page, 1, width), (sequence, row, row, 1)
            return c.as_strided(sizes, strides), table
    rows = c.new_empty(batch, -(-keys // ROWS) * ROWS, 1, width)
    rows[:, :keys, 0, :wide] = c[:, 0]
    rows[:, :keys, 0, wide:] = k_pe[:, 0]
    return rows, table


def absorb(model: torch.nn.Module, name: str) -> tuple[dict[str, int], dict[str, str], Callable]:
    """Replaces expand_kv of each latent layer of the model by a function that returns c and k_pe, for
    the attention function `name`.

    Returns:
        (the number of layers that were changed, by class; the classes that were left, and why; a
        function that restores all layers).
    """
    done: dict[str, int] = {}
    left: dict[str, str] = {}
    changed = []
    for module in model.modules():
        if not is_latent(module):
            continue
        kind = type(module).__name__
        if ABSORBED in vars(module):
            left[kind] = "they attend over latents already"
            continue
        try:
            layer = Layer(module, name)
            if layer.products.decoded is not None:
                raise ValueError(f"{kind}'s kv_b_proj is not a plain nn.Linear")
        except ValueError as error:
            left[kind] = str(error)
            continue
        own = module.expand_kv
        setattr(module, ABSORBED, layer)
        module.expand_kv = partial(_expand, module, own)
        changed.append(module)
        done[kind] = done.get(kind, 0) + 1

    def restore() -> None:
        for module in changed:
            vars(module).pop("expand_kv", None)
            vars(module).pop(ABSORBED, None)

    return done, left, restore


def _expand(module: Any, own: Callable, c: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
    return (c, k_pe) if getattr(module, ABSORBED).passes_latents(module) else own(c, k_pe)


def latent_layer_of(module: Any) -> Layer | None:
    """The module's `Layer` if its attention function gets c and k_pe in this pass, otherwise None."""
    layer = getattr(module, ABSORBED, None)
    return layer if layer is not None and layer.passes_latents(module) else None


# ---- a cache of rows -----------------------------------------------------------------------------


def _check_parts(c: Tensor) -> None:
    if c.shape[1] != 1:
        raise ValueError(
            f"LatentCache: a layer caches keys of {c.shape[1]} heads; expected the latents of layers "
            f"with expand_kv: pip install --upgrade transformers, or use its own caches"
        )


class LatentLayer(DynamicLayer):
    """A layer of a LatentCache that grows. keys and values are views of `rows` [B, 1, capacity,
    width], unless transformers has replaced them, for example by reordering the batch."""

    rows: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            _check_parts(key_states)
            self.lazy_initialization(key_states, value_states)
        if torch.compiler.is_compiling() or (
            torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad)
        ):
            # Writing in place would break gradients and compiled graphs.
            return super().update(key_states, value_states, *args, **kwargs)
        old, new, wide = self.get_seq_length(), key_states.shape[2], key_states.shape[3]
        end, rows = old + new, self.rows
        if not self._is_view() or rows is None or end > rows.shape[2]:
            capacity = -(-max(end, old + old // 2) // ROWS) * ROWS
            sizes = key_states.shape[0], 1, capacity, wide + value_states.shape[3]
            rows = key_states.new_empty(sizes)
            if old:
                rows[:, :, :old, :wide] = self.keys
                rows[:, :, :old, wide:] = self.values
            self.rows = rows
        rows[:, :, old:end, :wide] = key_states
        rows[:, :, old:end, wide:] = value_states
        self.keys, self.values = rows[:, :, :end, :wide], rows[:, :, :end, wide:]
        return self.keys, self.values

    def _is_view(self) -> bool:
        keys, values, rows = self.keys, self.values, self.rows
        return (
            rows is not None
            and keys.dim() == 4
            and keys.data_ptr() == rows.data_ptr()
            and values.data_ptr() == rows[..., keys.shape[3] :].data_ptr()
            and keys.stride() == values.stride() == rows.stride()
            and keys.shape[0] == rows.shape[0]
        )

    def reset(self) -> None:
        super().reset()
        self.rows = None


class StaticLatentLayer(StaticLayer):
    """A layer of a LatentCache with a fixed capacity."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        _check_parts(key_states)
        self.device = key_states.device
        self.batch_size, self.num_heads = key_states.shape[:2]
        self.k_head_dim, self.v_head_dim = key_states.shape[3], value_states.shape[3]
        width = self.k_head_dim + self.v_head_dim
        rows = key_states.new_zeros(self.batch_size, 1, self.max_cache_len, width)
        self.keys, self.values = rows.split([self.k_head_dim, self.v_head_dim], -1)
        self.cumulative_length = self.cumulative_length.to(self.device)
        if not torch.compiler.is_compiling():  # as in StaticLayer, for CUDA graphs
            for x in (self.keys, self.values, self.cumulative_length):
                torch._dynamo.mark_static_address(x)
        self.is_initialized = True


class LatentCache(Cache):
    """A cache for models with latent attention that stores both parts of a token side by side.

    ::

        accelerate(model)
        model.generate(ids, cache=LatentCache(model.config))  # or past_key_values=

    transformers' own caches give the same results, but every step copies their parts into rows.

    Args:
        config: the model's config.
        max_cache_len: tokens of each sequence, rounded up to a multiple of 64. If it is None, the
            cache grows.

    Raises:
        ValueError: the model has layers without latent attention.
    """

    def __init__(self, config: Any, max_cache_len: int | None = None) -> None:
        config = config.get_text_config(decoder=True)
        kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
        if not hasattr(config, "kv_lora_rank") or kinds:
            raise ValueError(
                f"LatentCache: {type(config).__name__} has "
                f"{'no kv_lora_rank' if not kinds else 'layers of ' + ', '.join(sorted(kinds))}; "
                f"expected a model whose layers are all latent attention; use transformers' caches"
            )
        if max_cache_len is None:
            super().__init__(layer_class_to_replicate=LatentLayer)
            return
        length = -(-max_cache_len // ROWS) * ROWS
        layers = [StaticLatentLayer(max_cache_len=length) for _ in range(config.num_hidden_layers)]
        super().__init__(layers=layers)
