# SPDX-License-Identifier: BSD-3-Clause
"""The tensors of a PagedKVCache: its pages, their scales, and writes at slots. Sequences are in
sequences.py."""

from collections.abc import Iterator
from contextlib import contextmanager
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..ops import kv_cache_write, kv_cache_write_latent, rope_kv_write
from .scales import CODES, layer_scale, of_layers

DTYPES = torch.float32, torch.bfloat16, torch.float16, torch.float64
LATENT_ROW = 512, 64  # the widths of latent rows in 8 bits (csrc/include/gpukern_latent.h)
LATENT_BYTES = 656


class KVPages:
    """Keys and values of all layers, in pages.

    Attributes:
        k: [layers, num_blocks, block_size, heads_kv, head_dim].
        v: [layers, num_blocks, block_size, heads_kv, head_dim_v]. With latents, a view of k.
        k_scale, v_scale: scales of 8-bit pages, as `PagedKVCache` takes them.
        latent: the widths of the latent and of the rotary part of a row, or None.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        heads_kv: int,
        head_dim: int,
        layers: int,
        head_dim_v: int,
        dtype: torch.dtype,
        device: torch.device | str | None,
        k_scale: Tensor | None,
        v_scale: Tensor | None,
        latent: tuple[int, int] | None = None,
    ) -> None:
        self.latent = latent
        dtypes = DTYPES + CODES
        if latent is not None:
            dtypes = (*DTYPES, torch.uint8) if latent == LATENT_ROW else DTYPES
        if dtype not in dtypes:
            of = "" if latent is None else f" of latents {latent}"
            raise ValueError(
                f"PagedKVCache: dtype{of} is {dtype}; expected one of {', '.join(map(str, dtypes))}"
            )
        shape = index(layers), index(num_blocks), index(block_size), heads_kv
        if dtype == torch.uint8:
            head_dim = LATENT_BYTES
        # Slots without a token are never read, so they need no zeros. Tensors that are made outside
        # inference_mode work inside and outside it.
        with torch.inference_mode(False):
            self.k = torch.empty(*shape, head_dim, dtype=dtype, device=device)
            if latent is None:
                self.v = torch.empty(*shape, head_dim_v, dtype=dtype, device=device)
            else:
                self.v = self.k[..., : latent[0]]
        self.k_scale = of_layers("k_scale", k_scale, self.k)
        self.v_scale = of_layers("v_scale", v_scale, self.v)

    @property
    def nbytes(self) -> int:
        """The bytes of all pages, without their scales."""
        return sum(x.numel() * x.element_size() for x in self._pages())

    def _pages(self) -> tuple[Tensor, ...]:
        """The tensors that hold the pages, each once."""
        return (self.k, self.v) if self.latent is None else (self.k,)

    def write(self, k: Tensor, v: Tensor, slots: Tensor, layer: int = 0) -> None:
        """Writes new keys k [T, heads_kv, head_dim] and values v [T, heads_kv, head_dim_v] of one
        layer at `slots` [T], as `kv_cache_write`. With latents, k is the latents [T, 1, latent[0]]
        and v the rotary part of the keys [T, 1, latent[1]], as in `kv_cache_write_latent`.
        """
        pages = self.k[layer]
        if self.latent is None:
            kv_cache_write(k, v, pages, self.v[layer], slots, **self.scales(layer))
        elif self.latent == LATENT_ROW:
            kv_cache_write_latent(k, v, pages, slots)
        else:
            width = self.latent[0]
            kv_cache_write(k, v, pages[..., :width], pages[..., width:], slots)

    def rope_write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        slots: Tensor,
        layer: int = 0,
        *,
        q_weight: Tensor | None = None,
        k_weight: Tensor | None = None,
        eps: float = 1e-6,
        interleaved: bool = False,
    ) -> Tensor:
        """`rope_kv_write` into one layer: rotates q and k, writes k and v at `slots`, in one
        launch. With q_weight or k_weight, the heads are normalised before they are rotated. Returns
        the rotated q [T, heads_q, head_dim].

        Raises:
            ValueError: the cache holds latents.
        """
        if self.latent is not None:
            raise ValueError(
                "PagedKVCache.rope_write: the cache holds latents, which are not rotated; rotate "
                "q and the rotary part by rope, and call write"
            )
        how = {"q_weight": q_weight, "k_weight": k_weight, "eps": eps, "interleaved": interleaved}
        pages = self.k[layer], self.v[layer]
        return rope_kv_write(
            q, k, v, cos, sin, positions, *pages, slots, **how, **self.scales(layer)
        )

    def scales(self, layer: int = 0) -> dict[str, Any]:
        """The keyword arguments k_scale and v_scale of a layer for `paged_attn` and
        `kv_cache_write`. A scale that was not given is left out. For latents of 8 bits, whose rows
        hold their scales, it is the latent_format of `paged_attn`.
        """
        if self.latent is not None:
            return {"latent_format": "fp8_656"} if self.k.dtype == torch.uint8 else {}
        found = {
            "k_scale": layer_scale(self.k_scale, layer),
            "v_scale": layer_scale(self.v_scale, layer),
        }
        return {name: scale for name, scale in found.items() if scale is not None}

    def _check_rows(self, what: str, k: Tensor, v: Tensor, tokens: int) -> None:
        """Raises ValueError unless k is [layers, tokens, heads_kv, head_dim] and v is [layers,
        tokens, heads_kv, head_dim_v], or the parts of latents, of a dtype and on a device that can
        be written."""
        pages = self.k
        dtypes: tuple[torch.dtype, ...] = (pages.dtype,)
        if pages.dtype in CODES:
            dtypes = DTYPES
        elif pages.dtype == torch.uint8:
            dtypes = DTYPES[:3]
        widths = self.latent or (self.k.shape[4], self.v.shape[4])
        for name, x, width in (("k", k, widths[0]), ("v", v, widths[1])):
            expected = pages.shape[0], tokens, pages.shape[3], width
            if tuple(x.shape) != expected or x.dtype not in dtypes or x.device != pages.device:
                raise ValueError(
                    f"PagedKVCache.{what}: {name} is {list(x.shape)} {x.dtype} on {x.device}; "
                    f"expected {list(expected)} {' or '.join(map(str, dtypes))} on {pages.device}"
                )

    def _copy_rows(self, source: int, target: int, tokens: int) -> None:
        """Copies the first tokens of a page, and its scales, to another page in all layers."""
        for pages in self._pages():
            pages[:, target, :tokens] = pages[:, source, :tokens]
        for scale in self._page_scales():
            _set_page(scale, target, scale[:, source])

    def _move_rows(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copies the tokens at the slots `sources` to the slots `targets`, in all layers. All rows are
        read before the first one is written. Rows of latents are in k only: v is a view of k, and
        moving it, too, would move rows a second time."""
        at, to = (torch.from_numpy(x).to(self.k.device) for x in (sources, targets))
        for pages in self._pages():
            rows = (pages.view(torch.uint8) if pages.dtype in CODES else pages).flatten(1, 2)
            rows.index_copy_(1, to, rows.index_select(1, at))

    @contextmanager
    def _copied_scales(self, copies: list[tuple[int, int, int]]) -> Iterator[None]:
        """A context for the body that writes new tokens to copies of shared pages. It copies the
        scales first, because the body rounds the new tokens by them. If the body raises, the scales are
        restored.
        """
        before = [
            (scale, target, scale[:, target].clone())
            for scale in self._page_scales()
            for _, target, _ in copies
        ]
        try:
            for scale in self._page_scales():
                for source, target, _ in copies:
                    _set_page(scale, target, scale[:, source])
            yield
        except BaseException:
            for scale, target, was in before:
                _set_page(scale, target, was)
            raise

    def _page_scales(self) -> list[Tensor]:
        """The scales that are given per page, [layers, num_blocks, heads_kv]."""
        return [
            scale
            for scale in (self.k_scale, self.v_scale)
            if scale is not None and scale.dim() == 3
        ]


def _set_page(scale: Tensor, page: int, values: Tensor) -> None:
    # a tensor made in inference_mode can only be written inside it
    with torch.inference_mode(scale.is_inference()):
        scale[:, page] = values
