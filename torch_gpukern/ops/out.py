# SPDX-License-Identifier: BSD-3-Clause
"""The .out overload of an op, which writes its result into a given tensor."""

import functools
import threading
from collections.abc import Callable

import torch
from torch.autograd.graph import increment_version

from .._library import (
    NAMESPACE,
    any_requires_grad,
    below_autograd,
    is_dynamo_compiling,
    is_grad_enabled,
    library,
    ops,
)
from . import fakes, parallel
from .op import Op, unwrapped
from .wrong_types import refuse_non_tensors

__all__ = ["define"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_calls = threading.local()  # running: this thread is inside a call of an .out overload


def define(op: Op, symbolic: Callable) -> None:
    """Defines X.out, which writes its result into `out`. It has no gradient and no autocast rule,
    and is otherwise like X."""
    op.out = getattr(ops, op.name).out
    name, unguarded = f"{op.name}.out", unwrapped(op.out)

    @functools.wraps(unguarded)
    def call(*args, **kwargs):
        if not is_dynamo_compiling():
            op.refuse_number_gradients(args, kwargs)
            op.refuse_non_bools(args, kwargs)
            parallel.before(name, op.whole_sequences)
        inner = getattr(_calls, "running", False)
        _calls.running = True
        try:
            unguarded(*args, **kwargs)
        except RuntimeError:
            op.refuse_types(args, kwargs)
            if "out" in kwargs:
                refuse_non_tensors(op.said, out=kwargs["out"])
            raise
        finally:
            _calls.running = inner
        into = kwargs["out"]
        # torch's own .out ops return out. Our schema returns nothing. Tracers and
        # __torch_dispatch__ rely on the schema: tracers pass tensors of other types, and
        # __torch_dispatch__ calls the op from inside a call.
        return into if type(into) in _PLAIN and not inner else None

    op.out._op = call

    def out_fake(*args, out, **kwargs):
        first, *_ = fakes.made(op, symbolic, op.named(args) | kwargs)
        text = f"{op.qualified}: out must have shape {list(first.shape)}, got {list(out.shape)}"
        same = out.dim() == first.dim()
        for got, want in zip(out.shape, first.shape) if same else ():
            same = same and got == want
        torch._check_with(ValueError, same, lambda: text)

    def kernel(*args, out, **kwargs):
        if is_grad_enabled() and any_requires_grad(*args, *kwargs.values(), out):
            raise NotImplementedError(
                f"{NAMESPACE}::{name}: it has no backward and an input requires a gradient; call "
                f"it under torch.no_grad()"
            )
        guard = below_autograd()
        try:
            unguarded(*args, out=out, **kwargs)
        finally:
            del guard
        increment_version(out)  # autograd must notice if a tensor that it has saved changes

    torch.library.register_fake(f"{NAMESPACE}::{name}", out_fake, lib=library)
    library.impl(name, kernel, "Autograd")
