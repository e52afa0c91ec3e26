"""``F.scaled_dot_product_attention`` on gpukern, through torch's registry of flash attention implementations.

::

    import torch_gpukern.integrations.sdpa  # registers, changes nothing yet
    from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

    activate_flash_attention_impl("gpukern")
    ...
    restore_flash_attention_impl()

Every call that PyTorch sends to its flash kernels, forward and backward, on the CPU and on CUDA, runs gpukern's; so do
nn.MultiheadAttention and what else is made of SDPA. A call that gpukern does not serve (a mask, dropout, a debug mask,
shapes or dtypes beyond its kernels') goes to PyTorch's own kernel with the arguments it came with. PyTorch chooses before us: calls
that it gives to cuDNN, to its memory-efficient or its math kernel, and the inference fast path of nn.MultiheadAttention and
nn.TransformerEncoderLayer, never come here. ``torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION)`` insists.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._library import are_deterministic, ops
from ..ops.flash_attn import _flash_attn, _flash_attn_bwd

__all__ = ["register"]

_CPU = "_scaled_dot_product_flash_attention_for_cpu"
_CUDA = "_scaled_dot_product_flash_attention"


class _Handle:
    """What torch keeps while we are active. Without the library PyTorch's own kernels are back."""

    def __init__(self, library: torch.library.Library):
        self.library: torch.library.Library | None = library

    def remove(self) -> None:
        if self.library is not None:
            self.library._destroy()
        self.library = None


def register(name: str = "gpukern") -> None:
    """Adds gpukern to `torch.nn.attention.list_flash_attention_impls`, which importing this module does already.

    Raises:
        ImportError: a torch without the registry.
    """
    try:
        from torch.nn.attention import register_flash_attention_impl
    except ImportError as error:
        raise ImportError(
            f"torch_gpukern: torch {torch.__version__} has no registry of flash attention implementations: "
            "pip install 'torch>=2.11'"
        ) from error
    register_flash_attention_impl(name, register_fn=_activate)


def _activate() -> _Handle:
    library = torch.library.Library("aten", "IMPL")
    _override(library, _CPU, "CPU", _forward_cpu)
    _override(library, f"{_CPU}_backward", "CPU", _backward_cpu)
    if torch.version.cuda is not None and ops.cuda_kernels.default():
        _override(library, _CUDA, "CUDA", _forward_cuda)
        _override(library, f"{_CUDA}_backward", "CUDA", _backward_cuda)
    return _Handle(library)


def _override(library: torch.library.Library, name: str, key: str, ours: Callable) -> None:
    """Puts ours in the place of PyTorch's kernel; it is given the arguments by name, as the schema of this torch has them,
    and returns None for a call that it does not serve.
    """
    own = torch.library.get_kernel(f"aten::{name}", key)
    arguments = getattr(torch.ops.aten, name).default._schema.arguments
    positional = [a.name for a in arguments if not a.kwarg_only]
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}

    def kernel(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        found = ours({**defaults, **dict(zip(positional, args)), **kwargs})
        return own.call_boxed(keys, *args, **kwargs) if found is None else found

    with warnings.catch_warnings():  # that a kernel is overridden, which is what was asked for
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        library.impl(name, kernel, key, with_keyset=True, allow_override=True)


# Past what the ops do for callers of theirs: PyTorch has made this call of its own, inside context_parallel too, which hands us
# the parts of a sequence and merges what we make of them.
_forward_op, _backward_op = _flash_attn.all.bare, _flash_attn_bwd.bare

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _serves(call: dict) -> bool:
    q, k, v = call["query"], call["key"], call["value"]
    if call["dropout_p"] or call.get("attn_mask") is not None or call.get("return_debug_mask"):
        return False
    if q.dtype not in _DTYPES or not q.dim() == k.dim() == v.dim() == 4 or not q.dtype == k.dtype == v.dtype:
        return False
    if not q.numel() or not k.numel() or not v.numel() or not k.shape[1] or q.shape[1] % k.shape[1]:
        return False
    if q.is_cuda:
        # PyTorch's CUDA kernel counts causal calls of two lengths from the bottom right, and SDPA never sends any.
        square = not call["is_causal"] or q.shape[2] == k.shape[2]
        return square and all(x.shape[3] % 8 == 0 and x.shape[3] <= 256 for x in (q, v))
    return q.shape[3] <= 512 and v.shape[3] <= 512


def _stored(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """x where compiled code expects it: it learnt the strides of PyTorch's own kernel."""
    return x if x.stride() == strides else x.new_empty_strided(x.shape, strides).copy_(x)


def _heads_inside(x: Tensor) -> tuple[int, ...]:
    """Strides of [B, H, S, D] stored [B, S, H, D]."""
    _, h, s, d = x.shape
    return (h * s * d, d, h * d, 1)


def _is_dense(x: Tensor) -> bool:
    return x.is_contiguous() or x.stride() == _heads_inside(x)


def _forward(call: dict) -> tuple[Tensor, Tensor] | None:
    if not _serves(call):
        return None
    q, v = call["query"], call["value"]
    out, lse = _forward_op(q, call["key"], v, call["is_causal"], call["scale"])
    if not _is_dense(q):
        out = _stored(out, torch.empty_like(q).stride())
    return out, lse


def _backward(call: dict) -> tuple[Tensor, Tensor, Tensor] | None:
    if not _serves(call):
        return None
    q, k, v, lse = call["query"], call["key"], call["value"], call["logsumexp"]
    return _backward_op(
        call["grad_out"], q, k, v, call["out"], lse.contiguous(), None, call["is_causal"], call["scale"],
        deterministic=are_deterministic(),
    )[:3]  # fmt: skip


def _forward_cpu(call: dict) -> tuple | None:
    found = _forward(call)
    if found is None:
        return None
    out, lse = found
    batch, heads, seq = lse.shape
    return out, _stored(lse, (heads * seq, 1, heads))


def _backward_cpu(call: dict) -> tuple | None:
    found = _backward(call)
    return None if found is None else tuple(_stored(x, _heads_inside(x)) for x in found)


def _forward_cuda(call: dict) -> tuple | None:
    found = _forward(call)
    if found is None:
        return None
    out, lse = found
    q = call["query"]
    # As PyTorch's own without dropout: no cumulative lengths, the state of a generator that nothing was drawn from.
    state, offset = q.new_empty(2, dtype=torch.uint64), q.new_empty((), dtype=torch.uint64)
    return out, lse, None, None, q.shape[2], call["key"].shape[2], state, offset, q.new_empty(0)


def _backward_cuda(call: dict) -> tuple | None:
    found = _backward(call)
    if found is None:
        return None
    inputs = (call["query"], call["key"], call["value"])
    return tuple(g if _is_dense(x) else _stored(g, torch.empty_like(x).stride()) for g, x in zip(found, inputs))


register()
