# SPDX-License-Identifier: BSD-3-Clause
"""QuantizedLinear: what an nn.Linear becomes."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._library import NAMESPACE
from ...ops import gemm, silu_mul_quantize
from ...ops.gemm import Activation
from ...ops.wrong_types import refuse_non_tensors
from ...pickled import EIGHT_BITS, as_codes
from ...reference import ACTIVATIONS
from ..layers import has_hooks
from .schemes import GROUPED, SCHEMES, Tensors, half_of
from .straight_through import straight_through

__all__ = ["QuantizedLinear"]

FORMAT = "gpukern-weight"  # the magic word of a state_dict
VERSION = 1  # of the layout of the codes in it
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _product(
    x: Tensor, bias: Tensor | None, scheme: str, n: int, names: tuple[str, ...], *tensors: Tensor
) -> Tensor:
    with torch.no_grad():
        return SCHEMES[scheme].product(x, dict(zip(names, tensors, strict=True)), n, bias, "none")


def _keep(ctx: Any, inputs: tuple, result: Any) -> None:
    x, bias, scheme, n, names, *tensors = inputs
    ctx.save_for_backward(*tensors)
    ctx.about = scheme, n, x.shape[1], x.dtype, names, None if bias is None else bias.dtype


def _gradients(ctx: Any, grad: Tensor):
    scheme, n, k, dtype, names, bias_dtype = ctx.about
    dx = dbias = None
    if ctx.needs_input_grad[0]:
        half = half_of(grad)
        w = SCHEMES[scheme].decode(dict(zip(names, ctx.saved_tensors, strict=True)), n, k, half)
        dx = gemm(grad.to(half), w, out_dtype=torch.float32 if dtype is torch.float32 else None)
    if ctx.needs_input_grad[1]:
        dbias = grad.sum(0, dtype=torch.float32).to(bias_dtype)
    return (dx, dbias, None, None, None, *[None] * len(names))


_straight_through = straight_through(_product, _keep, _gradients)


class HoldsCodes(torch.nn.Module):
    """A module whose weights are buffers of codes and scales, which keep their dtypes.

    Buffers hold 8-bit floats as uint8, because gloo, and with it DistributedDataParallel on the
    CPU, cannot send 8-bit floats. The state_dict has them in their own dtype, and a magic, a version
    and the recipe beside them.
    """

    scheme: str
    names: tuple[str, ...]
    code_dtypes: dict[str, torch.dtype]  # of the buffers that hold 8-bit floats as uint8

    def _hold_tensors(self, recipe: str, tensors: Tensors) -> None:
        self.scheme, self.names = recipe, tuple(tensors)
        self.code_dtypes = {n: t.dtype for n, t in tensors.items() if t.dtype in EIGHT_BITS}
        for name, t in tensors.items():
            # as its shape says: a [1, N] of strides (1, 1) counts as overlapping in a broadcast
            t = t.flatten().view(t.shape)
            self.register_buffer(name, t.view(torch.uint8) if name in self.code_dtypes else t)

    def _tensors(self) -> Tensors:
        """The recipe's tensors in the dtypes that its products read."""
        tensors: Tensors = {name: self._buffers[name] for name in self.names}  # type: ignore[misc]
        for name, dtype in self.code_dtypes.items():
            tensors[name] = tensors[name].view(dtype)
        return tensors

    def _apply(self, fn: Callable, recurse: bool = True):
        """Codes and scales go where the module goes, in the dtypes that they have. One that cannot
        go leaves all as it was."""
        self._leave_joint()
        tensors = {name: self._buffers[name] for name in self.names}
        moved, like = {}, vars(self).get("weight_like")
        for name, t in tensors.items():
            there = fn(t)
            moved[name] = there if there.dtype is t.dtype else t.to(there.device)
        self._buffers.update(dict.fromkeys(self.names))
        try:
            super()._apply(fn, recurse)
        except BaseException:
            self._buffers.update(tensors)
            raise
        self._buffers.update(moved)
        if like is not None:
            self.weight_like = fn(like)
        return self

    def _leave_joint(self) -> None:
        """Products that were joined with other layers' do not know the tensors that will come."""
        if (joint := vars(self).get("joint")) is not None:
            joint[0].stale()

    # ---- what a state_dict says of itself ----

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        """Tensors that are a part of a joined weight are copied: files of safetensors hold no
        tensors that share memory."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.names if "joint" in vars(self) and not keep_vars else ():
            t = destination[prefix + name]
            if t.untyped_storage().nbytes() != t.numel() * t.element_size():
                destination[prefix + name] = t.clone()
        for name, dtype in self.code_dtypes.items():
            destination[prefix + name] = destination[prefix + name].view(dtype)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *rest: Any) -> None:
        """Another recipe's state is refused before any of it is copied."""
        self._leave_joint()
        for name, dtype in self.code_dtypes.items():
            given = state_dict.get(prefix + name)
            if isinstance(given, Tensor) and given.dtype is not torch.uint8:
                state_dict[prefix + name] = given.to(dtype).view(torch.uint8)
        if (state := state_dict.get(f"{prefix}_extra_state")) is not None:
            check_state(state, self.scheme)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def get_extra_state(self) -> Tensor:
        return state_of(self.scheme)

    def set_extra_state(self, state: Tensor) -> None:
        check_state(state, self.scheme)


class QuantizedLinear(HoldsCodes):
    """``x @ weight.mT + bias`` with the weight in few bits. `torch_gpukern.nn.quantize` makes it of
    an nn.Linear; its recipe says how weight and activations are rounded.

    x is [..., K] float32, bfloat16 or float16, and the result has its dtype. If the recipe leaves
    activations in 16 bits, a float32 x is rounded to bfloat16 first. The gradient of x is that of a
    product with the decoded weight, as if nothing had been rounded. The weight has no gradient.
    ``.to(dtype)`` casts only the bias. The state_dict has the tensors by name, a magic word and
    the version of their layout. Tensors of another version or recipe are refused by name.

    ``weight`` decodes the weight whenever it is read, in the dtype that the module's weight had. It
    serves merges of adapters and models that multiply by it themselves.
    """

    in_features: int
    out_features: int
    activation: Activation = "none"  # of the class, as in Linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        recipe: str = "w4",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.register_parameter(
            "bias", torch.nn.Parameter(torch.zeros(out_features, **options)) if bias else None
        )
        self._hold(
            recipe, in_features, out_features, empty_of(recipe, out_features, in_features, device)
        )

    def _hold(self, recipe: str, k: int, n: int, tensors: Tensors) -> None:
        self.in_features, self.out_features = k, n
        self._hold_tensors(recipe, tensors)

    def order_input(self, order: Tensor) -> None:
        """Has the layer read column order[i] of x as its column i: groups of k that were not in
        order (GPTQ's act-order)."""
        self.register_buffer("input_order", order)

    @property
    def weight(self) -> Tensor:
        like = getattr(self, "weight_like", None)
        some = next(iter(self._buffers.values()))
        return self.decoded(half_of(some) if like is None else like.dtype)  # type: ignore[arg-type]

    def decoded(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [N, K] that the layer multiplies by, rounded to dtype."""
        w = SCHEMES[self.scheme].decode(self._tensors(), self.out_features, self.in_features, dtype)
        order = self._buffers.get("input_order")
        return w if order is None else torch.empty_like(w).index_copy_(1, order, w)

    def forward(self, input: Tensor) -> Tensor:  # named as in nn.Linear
        if (joint := vars(self).get("joint")) is not None:  # nn/joint.py
            part = joint[0].part(joint[1], input)
            if part is not None:
                return part
        x = taken("QuantizedLinear", input, self.in_features)
        rows, order = rows_of(x), self._buffers.get("input_order")
        if order is not None:
            rows = rows.index_select(1, order)
        bias, tensors = self.bias, self._tensors()
        if torch.is_grad_enabled() and (
            x.requires_grad or (bias is not None and bias.requires_grad)
        ):
            out = _straight_through(
                rows, bias, self.scheme, self.out_features, self.names, *tensors.values()
            )
            out = ACTIVATIONS[self.activation](out)
        else:
            out = SCHEMES[self.scheme].product(
                rows, tensors, self.out_features, bias, self.activation
            )
        return out if x.dim() == 2 else out.reshape(*x.shape[:-1], self.out_features)

    def after_swiglu(self, gate: Tensor, up: Tensor) -> Tensor | None:
        """The layer's result for ``silu(gate) * up``, which is quantised without being rounded to 16
        bits before. None if the layer takes no codes, does more than a product, or a gradient is
        needed."""
        scheme = SCHEMES[self.scheme]
        if scheme.codes is None or "input_order" in self._buffers or self.activation != "none":
            return None
        if type(self) is not QuantizedLinear or "forward" in vars(self) or has_hooks(self):
            return None
        bias = self.bias
        if torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in (gate, up, bias)
        ):
            return None
        codes, scale = silu_mul_quantize(rows_of(gate), rows_of(up), *scheme.codes)
        assert scheme.of_codes is not None
        out = scheme.of_codes(codes, scale, self._tensors(), bias, "none", gate.dtype)
        return out if gate.dim() == 2 else out.reshape(*gate.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        bits = 8 * sum(t.numel() * t.element_size() for t in self._tensors().values())
        each = bits / max(1, self.in_features * self.out_features)
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, "
            f"recipe={self.scheme}, bits={each:.2f}"
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Earlier pickles have 8-bit floats among their buffers."""
        super().__setstate__({**state, "_buffers": as_codes(state["_buffers"])})
        if "code_dtypes" not in state:
            self._hold(
                self.scheme,
                self.in_features,
                self.out_features,
                {name: self._buffers.pop(name) for name in self.names},
            )

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *rest: Any) -> None:
        """Groups may be of another size than the layer was made with, their scales of another
        floating dtype, and columns in an order of their own. Another recipe's state is refused
        before any of it is copied."""
        if (state := state_dict.get(f"{prefix}_extra_state")) is not None:
            check_state(state, self.scheme)
        order = state_dict.get(f"{prefix}input_order")
        self._buffers.pop("input_order", None)
        if order is not None:
            self.order_input(
                torch.empty_like(order, device=next(iter(self._tensors().values())).device)
            )
        for name in ("weight_scale", "weight_zero", "weight_shift"):
            own, given = self._buffers.get(name), state_dict.get(prefix + name)
            if own is None or given is None or self.scheme not in GROUPED:
                continue
            alike = own.dtype is given.dtype or (own.dtype in _FLOATS and given.dtype in _FLOATS)
            if alike and given.dim() == 2 and given.shape[1] == self.out_features:
                self._buffers[name] = torch.empty_like(given, device=own.device)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def taken(layer: str, x: Tensor, k: int) -> Tensor:
    """x [..., K] as a layer of few bits takes it: under autocast a float32 one in autocast's dtype;
    another is refused."""
    refuse_non_tensors(layer, x=x)
    if x.dtype is torch.float32 and not x.is_meta and torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if x.dtype not in _FLOATS:
        raise ValueError(f"{layer}: x must be float32, bfloat16 or float16, got {str(x.dtype)[6:]}")
    if x.dim() == 0:
        raise ValueError(
            f"{layer}: x must have shape [.., {k}], got a scalar; pass rows of {k} columns"
        )
    if x.shape[-1] != k:
        raise ValueError(
            f"{layer}: x has {x.shape[-1]} columns, the weight has {k}; they must match"
        )
    return x


def rows_of(x: Tensor) -> Tensor:
    """[..., K] -> [rows, K], also where K is 0."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def state_of(recipe: str) -> Tensor:
    """A layer's recipe in a state_dict: a magic, a version and its name, as bytes."""
    return torch.tensor(list(f"{FORMAT} {VERSION} {recipe}".encode()), dtype=torch.uint8)


def fields_of(state: Any) -> tuple[str, str, str]:
    """The magic, the version and the recipe in what `state_of` wrote. Another state has another
    magic."""
    is_bytes = isinstance(state, Tensor) and state.dtype is torch.uint8 and state.dim() == 1
    text = bytes(state.tolist()).decode(errors="replace") if is_bytes else repr(state)
    magic, _, rest = text.partition(" ")
    version, _, scheme = rest.partition(" ")
    return magic, version, scheme


def check_state(state: Any, recipe: str) -> None:
    """ValueError unless `state` is what a layer of this recipe, and of this version, wrote."""
    magic, version, scheme = fields_of(state)
    who = f"{NAMESPACE}: QuantizedLinear"
    if magic != FORMAT:
        raise ValueError(f"{who}: the state is no {FORMAT}, it begins with {magic[:24]!r}")
    if version != str(VERSION):
        raise ValueError(
            f"{who}: the state is {FORMAT} of version {version}, this gpukern reads version "
            f"{VERSION}"
        )
    if scheme != recipe:
        raise ValueError(f"{who}: the state is of recipe {scheme}, the layer is of {recipe}")


def empty_of(recipe: str, n: int, k: int, device: torch.device | str | None = None) -> Tensors:
    """A recipe's tensors, zeros."""
    spec = SCHEMES[recipe].spec(n, k)
    return {
        name: torch.zeros(
            shape, dtype=torch.uint8 if dtype.itemsize == 1 else dtype, device=device
        ).view(dtype)
        for name, (shape, dtype) in spec.items()
    }
