# SPDX-License-Identifier: BSD-3-Clause
"""Scales of 8-bit pages. A value is its stored code times its scale."""

from math import isfinite

import torch
from torch import Tensor

CODES = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
SMALLEST = 2.0**-126  # scale, so that none is a subnormal number


def of_layers(name: str, scale: Tensor | None, pages: Tensor) -> Tensor | None:
    """Checks a PagedKVCache's scale against its pages [layers, num_blocks, block_size, heads_kv,
    head_dim] and returns it."""
    if scale is None:
        return None
    layers, blocks, _, heads, _ = pages.shape
    allowed = [(), (heads,), (layers, heads), (layers, blocks, heads)]
    if pages.dtype not in CODES:
        raise ValueError(
            f"PagedKVCache: {name} is given and dtype is {pages.dtype}; scales are of 8-bit pages"
        )
    if (
        not isinstance(scale, Tensor)
        or scale.dtype != torch.float32
        or scale.device != pages.device
    ):
        got = (
            f"{scale.dtype} on {scale.device}"
            if isinstance(scale, Tensor)
            else type(scale).__name__
        )
        raise ValueError(
            f"PagedKVCache: {name} is {got}; expected a float32 tensor on {pages.device}"
        )
    if tuple(scale.shape) not in allowed:
        shapes = ", ".join(str(list(shape)) for shape in allowed)
        raise ValueError(
            f"PagedKVCache: {name} has shape {list(scale.shape)}; expected one of {shapes}"
        )
    return scale


def layer_scale(scale: Tensor | None, layer: int) -> Tensor | None:
    """The scale of a layer: [], [heads_kv] or [num_blocks, heads_kv]."""
    return scale if scale is None or scale.dim() < 2 else scale[layer]


class KVCacheScales:
    """Calibrates the scales of an 8-bit cache: the largest key and value of each layer and head,
    over the largest code.

    ::

        found = KVCacheScales(layers=len(model), heads_kv=8, dtype=torch.float8_e4m3fn)
        for i, layer in enumerate(model):        # on text like that to be served
            q, k, v = layer.qkv(x)
            found.observe(k, v, layer=i)
        how = dict(layers=len(model), dtype=found.dtype, **found.scales())
        cache = PagedKVCache(512, 16, heads_kv=8, head_dim=128, **how)

    Args:
        layers, heads_kv: those of the cache.
        dtype: that of its pages: float8_e4m3fn, float8_e5m2 or int8.
        device: the device of the keys.

    Raises:
        ValueError: another dtype.
    """

    def __init__(
        self,
        layers: int,
        heads_kv: int,
        dtype: torch.dtype,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        if dtype not in CODES:
            raise ValueError(
                f"KVCacheScales: dtype is {dtype}; expected one of {', '.join(map(str, CODES))}"
            )
        self.dtype = dtype
        with torch.inference_mode(False):  # so that observe() works inside and outside of it
            self.k_amax = torch.zeros(layers, heads_kv, device=device, dtype=torch.float32)
            self.v_amax = torch.zeros(layers, heads_kv, device=device, dtype=torch.float32)

    @torch.no_grad()
    def observe(self, k: Tensor, v: Tensor, layer: int = 0) -> None:
        """Takes keys [..., heads_kv, head_dim] and values [..., heads_kv, head_dim_v] of a layer
        into account. The host does not wait for the device."""
        for name, x, amax in (("k", k, self.k_amax), ("v", v, self.v_amax)):
            if x.dim() < 2 or x.shape[-2] != amax.shape[1]:
                raise ValueError(
                    f"KVCacheScales.observe: {name} is {list(x.shape)}; expected [..., "
                    f"{amax.shape[1]}, head_dim]"
                )
            if x.numel():
                amax[layer] = torch.maximum(
                    amax[layer], x.abs().amax(-1).flatten(0, -2).amax(0).float()
                )

    def scales(self, margin: float = 1.0) -> dict[str, Tensor]:
        """``{"k_scale": ..., "v_scale": ...}``, [layers, heads_kv] float32 each, for
        `PagedKVCache`.

        Args:
            margin: factor of the largest values seen, above 0. A factor above 1 leaves room for
                larger values, which otherwise saturate.

        Raises:
            ValueError: a layer that was not observed, or a head whose values were all 0; a value
                that is infinite or NaN; a margin of 0 or less, or one that makes a scale infinite.
        """
        if not 0 < margin < float("inf"):
            raise ValueError(
                f"KVCacheScales.scales: margin is {margin}; expected a finite number above 0"
            )
        found = {}
        for name, amax in (("k_scale", self.k_amax), ("v_scale", self.v_amax)):
            for layer, sizes in enumerate(amax.tolist()):
                for why, heads in (
                    (
                        "a value that is infinite or NaN",
                        [h for h, size in enumerate(sizes) if not isfinite(size)],
                    ),
                    ("no value but 0", [h for h, size in enumerate(sizes) if size == 0]),
                ):
                    if heads:
                        which = "all heads" if len(heads) == len(sizes) else f"heads {heads}"
                        raise ValueError(
                            f"KVCacheScales.scales: {name[0]} of layer {layer}, {which}, had "
                            f"{why}; expected finite values that "
                            f"are not all 0: call observe(k, v, layer={layer}) on text that is "
                            f"like what comes, or set that scale"
                        )
            scale = (amax * (margin / LARGEST[self.dtype])).clamp_min(SMALLEST)
            if not scale.isfinite().all():
                raise ValueError(
                    f"KVCacheScales.scales: margin is {margin}; {name} would be infinite, expected "
                    f"a smaller factor"
                )
            found[name] = scale
        return found
