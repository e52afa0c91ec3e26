# SPDX-License-Identifier: BSD-3-Clause
"""``F.scaled_dot_product_attention`` on gpukern, through torch's registry of flash attention
implementations.

::

    import torch_gpukern.integrations.sdpa  # registers, changes nothing yet
    from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

    activate_flash_attention_impl("gpukern")
    ...
    restore_flash_attention_impl()

Every call that PyTorch sends to its flash kernels, forward and backward, on the CPU and on CUDA,
runs gpukern's. This includes nn.MultiheadAttention and everything else that calls SDPA.

Calls with attn_mask are served too. PyTorch passes every mask as float, which is a bias here, with
a gradient. On CUDA PyTorch's flash kernel takes no mask, so this file also replaces its
memory-efficient and its cuDNN kernel for masked calls. A row whose keys are all hidden gives 0. So
does a row whose mask is the lowest finite number for every key; PyTorch averages the values there.

A call that gpukern does not serve goes to PyTorch's own kernel with the original arguments: a debug
mask, a mask with dropout, on CUDA a head_dim above 256, or shapes or dtypes beyond gpukern's
kernels.

PyTorch chooses the kernel first. These calls never get here: calls without a mask that it sends to
cuDNN or its memory-efficient kernel, all calls of its math kernel, and the inference fast path of
nn.MultiheadAttention and nn.TransformerEncoderLayer.
``torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION)`` makes PyTorch choose the flash
kernels.
"""

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._library import are_deterministic, ops
from ..ops.dropout import drawn
from ..ops.flash_attn import _flash_attn, _flash_attn_masked
from ..ops.op import unwrapped

__all__ = ["register"]

_CPU = "_scaled_dot_product_flash_attention_for_cpu"
_CUDA = "_scaled_dot_product_flash_attention"
_EFFICIENT = "_scaled_dot_product_efficient_attention"
_CUDNN = "_scaled_dot_product_cudnn_attention"


class _Handle:
    """The handle that torch keeps while gpukern is active. Removing the library restores PyTorch's
    own kernels."""

    def __init__(self, library: torch.library.Library):
        self.library: torch.library.Library | None = library

    def remove(self) -> None:
        if self.library is not None:
            self.library._destroy()
        self.library = None


def register(name: str = "gpukern") -> None:
    """Adds gpukern to `torch.nn.attention.list_flash_attention_impls`, which importing this module
    does already.

    Raises:
        ImportError: a torch without the registry.
    """
    try:
        from torch.nn.attention import register_flash_attention_impl
    except ImportError as error:
        raise ImportError(
            f"torch_gpukern: torch {torch.__version__} has no registry of flash attention "
            f"implementations: "
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
        _override(library, _EFFICIENT, "CUDA", _forward_efficient)
        _override(library, f"{_EFFICIENT}_backward", "CUDA", _backward_efficient)
        _override(library, _CUDNN, "CUDA", _forward_cudnn)
        _override(library, f"{_CUDNN}_backward", "CUDA", _backward_cudnn)
    return _Handle(library)


def _override(library: torch.library.Library, name: str, key: str, ours: Callable) -> None:
    """Replaces PyTorch's kernel by `ours`. If `ours` returns None, PyTorch's own kernel serves the
    call."""
    own = torch.library.get_kernel(f"aten::{name}", key).call_boxed
    ours = _as_torch_calls(ours, getattr(torch.ops.aten, name).default._schema)

    def kernel(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        found = ours(*args, **kwargs)
        return own(keys, *args, **kwargs) if found is None else found

    with warnings.catch_warnings():  # torch warns that a kernel is overridden
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        library.impl(name, kernel, key, with_keyset=True, allow_override=True)


def _as_torch_calls(ours: Callable, schema: torch.FunctionSchema) -> Callable:
    """`ours`, callable with positional arguments in the order of this torch's schema. The parameters
    of `ours` have the names of the schema's arguments. If their order is the same, `ours` itself is
    returned, because a wrapper would cost time in every call. torch leaves out arguments that have
    their default value.
    """
    names = [a.name for a in schema.arguments if not a.kwarg_only]
    known = [
        p.name
        for p in inspect.signature(ours).parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    if names[: len(known)] == known:
        return ours
    return lambda *args, **kwargs: ours(**dict(zip(names, args)), **kwargs)


# Called without `guard` (ops/define.py), which refuses attention inside context_parallel. Here
# PyTorch is the caller: context_parallel passes parts of a sequence and merges the results itself.
_forward_op, _masked_op = _flash_attn.all.unguarded, _flash_attn_masked.all.unguarded
_backward_op = unwrapped(ops.flash_attn_bwd.default)
_masked_backward_op = unwrapped(ops.flash_attn_masked_bwd.default)

_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))


_serves_head_dim = functools.cache(ops.serves_head_dim.default)
# On CUDA PyTorch sends calls with a wider head_dim here only if they have a mask. Gpukern has no
# tensor core kernel for these, so PyTorch's own kernel is faster.
_MOST_ON_CUDA = 256


def _serves(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> bool:
    dtype, of_q, of_k, of_v = q.dtype, q.shape, k.shape, v.shape
    if dtype not in _DTYPES or k.dtype is not dtype or v.dtype is not dtype:
        return False
    if (
        not len(of_q) == len(of_k) == len(of_v) == 4
        or 0 in of_q
        or 0 in of_k
        or 0 in of_v
        or of_q[1] % of_k[1]
    ):
        return False
    if q.is_cuda:
        # With different lengths, PyTorch's CUDA kernel aligns causal masks to the bottom right.
        # SDPA never makes such calls.
        if is_causal and of_q[2] != of_k[2]:
            return False
        if max(of_q[3], of_v[3]) > _MOST_ON_CUDA:
            return False
    return _serves_head_dim(of_q[3], q.is_cuda) and _serves_head_dim(of_v[3], q.is_cuda)


def _bias_of(q: Tensor, k: Tensor, mask: Tensor) -> Tensor | None:
    """A float mask as a bias of 4 dimensions. None if its dtype or shape cannot be a bias."""
    if mask.dtype not in (q.dtype, torch.float32) or not 2 <= mask.dim() <= 4:
        return None
    bias, full = mask[(None,) * (4 - mask.dim())], (*q.shape[:3], k.shape[2])
    return bias if all(n in (1, all_) for n, all_ in zip(bias.shape, full, strict=True)) else None


def _stored(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """x with the given strides. Compiled code expects the strides of PyTorch's own kernel."""
    return x if x.stride() == strides else x.new_empty_strided(x.shape, strides).copy_(x)


def _heads_inside(x: Tensor) -> tuple[int, ...]:
    """Strides of [B, H, S, D] stored [B, S, H, D]."""
    _, h, s, d = x.shape
    return (h * s * d, d, h * d, 1)


def _is_dense(x: Tensor) -> bool:
    return x.is_contiguous() or x.stride() == _heads_inside(x)


# ---- kernels -------------------------------------------------------------------------------------
# Parameters have the schema's names. A function returns None if PyTorch's own kernel must serve the
# call: with debug masks, with a mask and dropout, or with `more` and `others`, arguments that only
# another version of torch has. On the CPU PyTorch itself sends dropout to its math kernel. On CUDA
# our seed, int64 [2], is returned where PyTorch returns the state of its generator, uint64 [2].


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float | None,
    mask: Tensor | None = None,
    **dropout: Any,
) -> tuple[Tensor, Tensor] | None:
    if not _serves(q, k, v, is_causal):
        return None
    if mask is not None:
        bias = _bias_of(q, k, mask)
        if bias is None:
            return None
        found = _masked_op(q, k, v, bias=bias, is_causal=is_causal, scale=scale)
    else:
        found = _forward_op(q, k, v, is_causal, scale, **dropout)
    if _is_dense(q):
        return found
    out, lse = found
    return _stored(out, torch.empty_like(q).stride()), lse


def _backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float | None,
    mask: Tensor | None = None,
    need_bias: bool = False,
    **dropout: Any,
) -> tuple[Tensor, ...] | None:
    """The gradients of q, k, v and, with need_bias, of the mask."""
    if not _serves(q, k, v, is_causal):
        return None
    if mask is not None:
        bias = _bias_of(q, k, mask)
        if bias is None:
            return None
        found = _masked_backward_op(
            grad_out, q, k, v, out, lse.contiguous(), bias=bias, is_causal=is_causal, scale=scale,
            deterministic=are_deterministic(), need_bias=need_bias,
        )  # fmt: skip
        return (*found[:3], found[4]) if need_bias else found[:3]
    return _backward_op(
        grad_out,
        q,
        k,
        v,
        out,
        lse.contiguous(),
        None,
        is_causal,
        scale,
        deterministic=are_deterministic(),
        **dropout,
    )[:3]


def _forward_cpu(
    query, key, value, dropout_p=0.0, is_causal=False, *more, attn_mask=None, scale=None, **others
) -> tuple | None:
    if dropout_p or more or others:
        return None
    found = _forward(query, key, value, is_causal, scale, attn_mask)
    if found is None:
        return None
    out, lse = found
    batch, heads, seq = lse.shape
    return out, _stored(lse, (heads * seq, 1, heads))


def _backward_cpu(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    dropout_p,
    is_causal,
    *more,
    attn_mask=None,
    scale=None,
    **others,
) -> tuple | None:
    if dropout_p or more or others:
        return None
    found = _backward(grad_out, query, key, value, out, logsumexp, is_causal, scale, attn_mask)
    return None if found is None else tuple(_stored(x, _heads_inside(x)) for x in found)


def _forward_cuda(
    query,
    key,
    value,
    dropout_p=0.0,
    is_causal=False,
    return_debug_mask=False,
    *more,
    scale=None,
    **others,
) -> tuple | None:
    if return_debug_mask or more or others or not _serves(query, key, value, is_causal):
        return None
    dropout = {"dropout_p": dropout_p, "dropout_seed": drawn(query)} if dropout_p else {}
    out, lse = _forward(query, key, value, is_causal, scale, **dropout)
    # As PyTorch's own: no cumulative lengths; without dropout the state of a generator that nothing
    # was drawn from.
    state = (
        dropout["dropout_seed"].view(torch.uint64)
        if dropout
        else query.new_empty(2, dtype=torch.uint64)
    )
    offset = query.new_empty((), dtype=torch.uint64)
    return out, lse, None, None, query.shape[2], key.shape[2], state, offset, query.new_empty(0)


def _backward_cuda(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    philox_seed,
    philox_offset,
    *more,
    scale=None,
    **others,
) -> tuple | None:
    if more or others:
        return None
    dropout = (
        {"dropout_p": dropout_p, "dropout_seed": philox_seed.view(torch.int64)} if dropout_p else {}
    )
    found = _backward(grad_out, query, key, value, out, logsumexp, is_causal, scale, **dropout)
    if found is None:
        return None
    inputs = query, key, value
    return tuple(
        g if _is_dense(x) else _stored(g, torch.empty_like(x).stride())
        for g, x in zip(found, inputs)
    )


# ---- CUDA's calls with a mask --------------------------------------------------------------------


def _narrow(bias: Tensor) -> Tensor:
    """bias with size 1 in the dimensions that PyTorch's `expand` repeated."""
    return bias[tuple(slice(0, 1) if step == 0 else slice(None) for step in bias.stride())]


def _no_state(q: Tensor) -> tuple[Tensor, Tensor]:
    """Two unused tensors in place of the generator's state. Without dropout nothing is drawn."""
    return q.new_empty((), dtype=torch.int64), q.new_empty((), dtype=torch.int64)


def _forward_efficient(
    query,
    key,
    value,
    attn_bias,
    compute_log_sumexp,
    dropout_p=0.0,
    is_causal=False,
    *more,
    scale=None,
    **others,
) -> tuple | None:
    if attn_bias is None or dropout_p or is_causal or more or others:
        return None
    found = _forward(query, key, value, False, scale, _narrow(attn_bias))
    if found is None:
        return None
    out, lse = found
    batch, heads, seq = lse.shape
    padded = lse.new_empty(batch, heads, -(-seq // 32) * 32 if compute_log_sumexp else 0)
    if compute_log_sumexp:
        padded[:, :, :seq] = lse
    return _stored(out, _heads_inside(out)), padded, *_no_state(query)


def _backward_efficient(
    grad_out_,
    query,
    key,
    value,
    attn_bias,
    out,
    logsumexp,
    philox_seed,
    philox_offset,
    dropout_p,
    grad_input_mask,
    is_causal=False,
    *more,
    scale=None,
    **others,
) -> tuple | None:
    if attn_bias is None or dropout_p or is_causal or more or others:
        return None
    need = grad_input_mask[3]
    bias = attn_bias if need else _narrow(attn_bias)
    lse = logsumexp[:, :, : query.shape[2]]
    found = _backward(grad_out_, query, key, value, out, lse, False, scale, bias, need_bias=need)
    if found is None:
        return None
    grads = tuple(_stored(x, _heads_inside(x)) for x in found[:3])
    return *grads, found[3] if need else None


def _forward_cudnn(
    query,
    key,
    value,
    attn_bias,
    compute_log_sumexp,
    dropout_p=0.0,
    is_causal=False,
    return_debug_mask=False,
    *more,
    scale=None,
    **others,
) -> tuple | None:
    if attn_bias is None or dropout_p or is_causal or return_debug_mask or more or others:
        return None
    found = _forward(query, key, value, False, scale, _narrow(attn_bias))
    if found is None:
        return None
    out, lse = found
    lengths = query.shape[2], key.shape[2]
    return out, lse[..., None], None, None, *lengths, *_no_state(query), None


def _backward_cudnn(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    philox_seed,
    philox_offset,
    attn_bias,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    *more,
    scale=None,
    **others,
) -> tuple | None:
    if attn_bias is None or dropout_p or is_causal or more or others:
        return None
    lse = logsumexp[..., 0]
    found = _backward(grad_out, query, key, value, out, lse, False, scale, _narrow(attn_bias))
    if found is None:
        return None
    inputs = query, key, value
    return tuple(
        g if _is_dense(x) else _stored(g, torch.empty_like(x).stride())
        for g, x in zip(found, inputs, strict=True)
    )


register()
