# SPDX-License-Identifier: BSD-3-Clause
"""FSDP2's all-gather of `Fp8Linear` weights in 8 bits.

FSDP2 (`torch.distributed.fsdp.fully_shard`) keeps a part of each weight on a rank and gathers the
whole before forward and before backward. `Fp8Linear` then rounds the whole weight to e4m3. Here
each rank rounds its part first, and the ranks gather the codes: a quarter of float32's bytes, a
half of bfloat16's. All ranks round by one scale, that of the largest size over all ranks, so codes
and scale have the bits of the weight that is gathered first and rounded then. The optimizer sees
the parts in their own dtype as before.

A part is a `_Part`, whose hooks FSDP2 calls (fsdp_pre_all_gather, fsdp_post_all_gather). The whole
weight is a `GatheredWeight`: codes and a scale that stand for a tensor of the weight's dtype.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ...ops import quantize
from .fp8 import E4M3, Fp8Linear, GatheredWeight, scale_of

__all__ = ["fp8_all_gather"]


def fp8_all_gather(model: torch.nn.Module) -> list[str]:
    """Lets FSDP2 gather the weights of a model's `Fp8Linear` layers as e4m3 codes.

    Call it before `fully_shard`, and make the optimizer after that, as ever::

        gnn.quantize(model, "fp8-train")
        gnn.fp8_all_gather(model)
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)

    Results and gradients have the bits of the same model without it. Each gather also sends one
    number a weight, the largest size. With ``MixedPrecisionPolicy(param_dtype=...)`` a weight is
    cast to that dtype before it is rounded, as FSDP2 does.

    Args:
        model: a model that is not sharded yet. Its layers keep their parameters' names and dtypes.

    Returns:
        The names of the layers whose weights are gathered in 8 bits.

    Raises:
        ValueError: a layer with delayed scaling, whose scale follows from earlier calls on the whole
            weight; a weight that is sharded already; or no `Fp8Linear` in the model.

    Eager only: FSDP2's hooks run outside of compiled graphs.
    """
    found = {n: m for n, m in model.named_modules() if isinstance(m, Fp8Linear)}
    if not found:
        raise ValueError(
            "fp8_all_gather: the model has no Fp8Linear; call nn.quantize(model, 'fp8-train') first"
        )
    for name, layer in found.items():
        if layer.scaling != "current":
            raise ValueError(
                f"fp8_all_gather: {name} has delayed scaling, expected scaling='current' (recipe "
                "'fp8-train')"
            )
        if type(layer.weight.data) is not Tensor and not isinstance(layer.weight, _Part):
            raise ValueError(
                f"fp8_all_gather: the weight of {name} is a {type(layer.weight.data).__name__}, "
                "expected a plain tensor; call it before fully_shard"
            )
    parts: dict[torch.nn.Parameter, torch.nn.Parameter] = {}  # layers may share a weight
    for layer in found.values():
        old = layer.weight
        if not isinstance(old, _Part):
            if old not in parts:
                part = old.detach().as_subclass(_Part)
                parts[old] = torch.nn.Parameter(part, requires_grad=old.requires_grad)
            layer.weight = parts[old]
    return list(found)


_aten = torch.ops.aten
# what FSDP2 and DTensor make a part by; the results of all other ops are plain tensors
_MAKES_A_PART = {
    _aten.clone.default,
    _aten.detach.default,
    _aten.empty_like.default,
    _aten._to_copy.default,
    _aten.new_empty.default,
    _aten.new_zeros.default,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.view.default,
}


class _Part(Tensor):
    """A rank's part of a weight: a tensor with the hooks that FSDP2 looks for."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        with torch._C._DisableTorchDispatch():
            out = func(*args, **(kwargs or {}))
            if func not in _MAKES_A_PART:
                return out
            return (
                [x.as_subclass(cls) for x in out]
                if isinstance(out, (list, tuple))
                else out.as_subclass(cls)
            )

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: torch.nn.Module,
        mp_policy: Any,
    ) -> tuple[tuple[Tensor, ...], Any]:
        rows = -(-outer_size[0] // mesh.size())  # of a part; the last parts may have fewer
        part = self.as_subclass(Tensor)
        if tuple(part.shape[1:]) != tuple(outer_size[1:]):
            raise ValueError(
                f"fp8_all_gather: expected weights in parts of rows, Shard(0), got a part "
                f"{list(part.shape)} of {list(outer_size)}"
            )
        if mp_policy.param_dtype is not None:
            part = part.to(mp_policy.param_dtype)
        seen = _largest(part, mesh)
        scale = scale_of(seen, seen, E4M3)
        codes = part.new_zeros(rows, outer_size[1], dtype=torch.uint8)
        if len(part):
            codes[: len(part)] = quantize(part, E4M3, "tensor", scale=scale)[0].view(torch.uint8)
        return (codes,), (scale, outer_size)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Any:
        (codes,), (scale, size) = all_gather_outputs, metadata
        if out is not None:
            # the codes are in the same memory as before
            out.scale = scale  # type: ignore[attr-defined]
            return None
        return GatheredWeight(codes[: size[0]].view(E4M3), scale, param_dtype), ()

    def __reduce_ex__(self, protocol):  # a checkpoint has plain tensors
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


def _largest(part: Tensor, mesh: DeviceMesh) -> Tensor:
    """The largest size over all ranks' parts; inf if any of them has an infinity or NaN."""
    seen = (
        part.detach().abs().amax().float()
        if part.numel()
        else part.new_zeros((), dtype=torch.float32)
    )
    seen = torch.where(seen.isfinite(), seen, torch.inf)
    dist.all_reduce(seen, dist.ReduceOp.MAX, group=mesh.get_group())
    return seen
