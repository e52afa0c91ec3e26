# SPDX-License-Identifier: BSD-3-Clause
"""Latent attention (MLA) of transformers' models without expanded keys and values.

Layers of latent attention compress keys and values of all heads to a latent c for each token. k_pe is
the rotary part of the keys, which all heads share. The expansion W_k, W_v can be absorbed into the
query and the result:

    k[h, j] = [W_k[h] c[j], k_pe[j]]       v[h, j] = W_v[h] c[j]
    q k^T = [W_k^T q_nope, q_pe] [c, k_pe]^T       P v = W_v (P c)

So attention runs over a single head of rows [c, k_pe], which are 576 wide in DeepSeek's models. The
first 512 columns are also the values. (DeepSeek-AI, "DeepSeek-V2" (2024), arXiv:2405.04434, section
2.1 and appendix C.)

transformers' layers have a method `expand_kv(c, k_pe)`, which computes k and v from the cached c and
k_pe. If it is replaced by a function that returns c and k_pe, the attention function gets these
instead of keys and values, and attends with an `Absorbed`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..ops import gemm
from .layers import Linear, has_hooks

__all__ = ["Absorbed", "absorbed", "is_latent", "latents_of", "replaced_expansion"]

# The attributes by which a layer is recognised.
WIDTHS = "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"
# The modules of such a layer. A layer with other modules, such as an indexer that hides keys, computes
# something else.
MODULES = {
    *("q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm"),
    *("kv_b_proj", "o_proj"),
}
# The attribute of a layer whose expand_kv `accelerate` replaced (integrations/transformers_latent.py)
ABSORBED = "_gpukern_latent"
TOKENS = 3  # of the trial in `absorbed`
# The largest root mean square error of the trial, relative to the standard deviation. A layer that
# computes something else differs by more than 1.
MOST = 0.05


class Absorbed:
    """The products that replace a layer's expansion.

    Attributes:
        latent: the widths of c and k_pe.
        heads: the number of heads.
        nope: the columns of q without the rotary part.
        width_v: the columns of v.
        decoded: the weight of kv_b_proj, if that is quantised; otherwise None.
    """

    def __init__(self, module: Any) -> None:
        self.latent = module.kv_lora_rank, module.qk_rope_head_dim
        self.nope, self.width_v = module.qk_nope_head_dim, module.v_head_dim
        self.expand = module.kv_b_proj
        self.decoded: Tensor | None = None
        if not is_plain(self.expand):
            # The product of a quantised layer with the identity is its weight.
            self.decoded = self.expand(_identity(module, self.latent[0])).T
        self.heads = self.weight.shape[0] // (self.nope + self.width_v)

    @property
    def weight(self) -> Tensor:
        """[heads * (nope + width_v), latent[0]]"""
        return self.expand.weight if self.decoded is None else self.decoded

    def parts(self) -> tuple[Tensor, Tensor]:
        """W_k [heads, nope, latent[0]] and W_v [heads, width_v, latent[0]], views."""
        weight = self.weight.unflatten(0, (self.heads, -1))
        return weight[:, : self.nope], weight[:, self.nope :]

    @staticmethod
    def expanded(module: Any, c: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values that the layer itself makes of c and k_pe."""
        return type(module).expand_kv(module, c, k_pe)

    def queries(self, q: Tensor) -> Tensor:
        """q [.., heads, T, nope + latent[1]] -> [.., T, heads, sum of latent], contiguous."""
        up = gemm(q[..., : self.nope], self.parts()[0])
        return torch.cat([x.transpose(-3, -2) for x in (up, q[..., self.nope :])], -1)

    def values(self, out: Tensor) -> Tensor:
        """out [.., T, heads, latent[0]] of attention over latents -> [.., T, heads, width_v]"""
        return gemm(out.transpose(-3, -2), self.parts()[1].mT).transpose(-3, -2)


def is_plain(layer: Any) -> bool:
    """Whether calling the layer multiplies by its weight and does nothing else."""
    return (
        type(layer) in (nn.Linear, Linear)
        and getattr(layer, "activation", "none") == "none"
        and layer.bias is None
        and "forward" not in vars(layer)
        and not has_hooks(layer)
    )


def is_latent(module: nn.Module) -> bool:
    """Whether a module is an attention layer whose keys and values come from latents."""
    return hasattr(module, "kv_b_proj") and all(hasattr(module, name) for name in WIDTHS)


@contextmanager
def replaced_expansion(layers: Collection[Any], replace: Callable[[Any], Any]) -> Iterator[None]:
    """Inside the context the expand_kv of each layer is what `replace` makes of it."""
    before = [(layer, vars(layer).get("expand_kv")) for layer in layers]
    try:
        for layer in layers:
            layer.expand_kv = replace(layer.expand_kv)
        yield
    finally:
        for layer, own in before:
            if own is None:
                vars(layer).pop("expand_kv", None)
            else:
                layer.expand_kv = own


def absorbed(module: Any) -> Absorbed:
    """The products that replace a latent layer's expansion. A trial with random c and k_pe compares them
    with the layer's own keys and values.

    Raises:
        ValueError: the layer computes something else.
    """
    name = type(module).__name__
    if not hasattr(type(module), "expand_kv"):
        raise ValueError(
            f"{name} has no expand_kv, so it caches keys and values of all heads; expected a later "
            f"transformers, or layers that cache latents"
        )
    more = sorted(set(module._modules) - MODULES)
    if more:
        raise ValueError(f"{name} does more than latent attention: {', '.join(more)}")
    if "expand_kv" in vars(module) and ABSORBED not in vars(module):
        raise ValueError(f"{name} has an expand_kv that another tool replaced; put its own back")
    with torch.no_grad():
        found = Absorbed(module)
        like = found.weight
        gen = torch.Generator().manual_seed(0)
        c, k_pe = (
            torch.randn(1, 1, TOKENS, n, generator=gen).to(like.device, like.dtype)
            for n in found.latent
        )
        keys, values = type(module).expand_kv(module, c, k_pe)
        up_k, up_v = (c[0].float() @ x.float().mT for x in found.parts())
        rotary = k_pe[0].float().expand(found.heads, -1, -1)
        for own, ours in ((keys, torch.cat([up_k, rotary], -1)), (values, up_v)):
            agrees = own.shape[1:] == ours.shape
            if agrees:
                agrees = (own[0].float() - ours).square().mean().sqrt() <= MOST * ours.std()
            if not agrees:
                raise ValueError(f"{name} expands its latents by more than kv_b_proj")
    return found


def latents_of(net: nn.Module) -> tuple[tuple[int, int], int] | None:
    """(the widths of c and k_pe, the number of layers of its cache) of a network with latent attention;
    None for any other network.

    Raises:
        ValueError: layers of several widths.
    """
    layers = [m for m in net.modules() if is_latent(m)]
    if not layers:
        return None
    widths = {(m.kv_lora_rank, m.qk_rope_head_dim) for m in layers}
    if len(widths) > 1:
        raise ValueError(f"its layers have latents of several widths: {sorted(widths)}")
    return widths.pop(), 1 + max(m.layer_idx for m in layers)


def _identity(module: Any, width: int) -> Tensor:
    like = module.kv_a_layernorm.weight
    return torch.eye(width, dtype=like.dtype, device=like.device)
