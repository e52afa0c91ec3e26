# SPDX-License-Identifier: BSD-3-Clause
"""define_op: what Python adds to an op, declared once.

C++ registers an op's schema and its CPU and CUDA kernels. An op that calls other ops, or that runs
on several ranks, has its kernel in Python. The schema gives names, order and defaults of the
arguments, and every function declared here takes its values by those names. A declaration adds to
an op:

- a fake function, which gives dtype, shape and strides of the results to torch.compile,
  torch.export and meta tensors;
- an Autograd kernel, which applies a torch.autograd.Function if a gradient is wanted and otherwise
  calls the op below autograd;
- an Autocast kernel, which casts the arguments that autocast may cast and calls the op below
  autocast;
- a rule for torch.vmap, which folds the new dimension into an existing one (batching.py);
- a FLOP formula.

**torch.func.** The fast autograd.Function takes 5 us a call. torch.func needs the form with
`setup_context`, which takes 50 us. Both use the same rules. The slow form is called only under a
transform that differentiates (gradients.py).
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import flop_counter

from .._library import (
    NAMESPACE,
    any_requires_grad,
    below_autocast,
    is_dynamo_compiling,
    is_grad_enabled,
    library,
    ops,
    transforms_active,
)
from . import batching, fakes, gradients, keywords, out, parallel
from .op import Op, has_tangent

__all__ = ["Op", "define_op", "guard", "tag_compiled_code"]

# ---- calls from Python ---------------------------------------------------------------------------


def guard(op: Op) -> None:
    """Makes calls of torch.ops.gpukern.<op> pass through Python first.

    The guard does three things that no kernel can do:

    - It refuses a tensor that requires a gradient where the op takes a number. torch reads such a
      tensor's value before any kernel sees the call, so its gradient would silently be lost.
    - It gives torch.func's transforms the autograd.Function that they can read.
    - It registers sharding rules and refuses attention inside context_parallel (parallel.py).

    It replaces `_op` of the overload and of its packet. Every call from Python goes through `_op`.
    """

    def guarded(unguarded: Callable) -> Callable:
        @functools.wraps(unguarded)
        def call(*args, **kwargs):
            # After a graph break dynamo traces this frame by itself. It knows the overload.
            if is_dynamo_compiling():
                return op.overload(*args, **kwargs)
            op.refuse_number_gradients(args, kwargs)
            if op.bools:
                op.refuse_non_bools(args, kwargs)
            parallel.before(op.name, op.whole_sequences)
            if "out" in kwargs and op.out is not None:
                return op.out(*args, **kwargs)
            if op.transformed is not None and transforms_active() and _differentiating():
                return _transformed(op, _checked(op, args, kwargs))
            try:
                return unguarded(*args, **kwargs)
            except RuntimeError:
                op.refuse_types(args, kwargs)
                raise

        return call

    packet = getattr(ops, op.name)
    # The packet gets the guard too: if the op has an .out overload, the packet's own errors would
    # not name the op.
    for holder in (op.overload, packet):
        holder._op = guarded(op.unguarded)
    # torch.jit.script looks an op up by the function that the packet calls
    torch.jit._builtins._register_builtin(packet._op, op.qualified)


def _checked(op: Op, args: tuple, kwargs: dict[str, Any]) -> tuple:
    """All arguments in order. If the schema does not take them, the op is called so that torch
    raises its error."""
    if len(args) > len(op.names) or not set(kwargs) <= set(op.names[len(args) :]):
        op.unguarded(*args, **kwargs)
    if not set(op.names[len(args) : op.required]) <= set(kwargs):
        op.unguarded(*args, **kwargs)
    return op.bound(args, kwargs)


def _transformed(op: Op, args: tuple) -> Any:
    """Calls the form for torch.func's differentiating transforms. No Autocast kernel runs under
    such a transform, so the arguments are cast first."""
    device = next(x.device.type for x in args if isinstance(x, Tensor))
    if device in op.casts and torch.is_autocast_enabled(device):
        args = op.casts[device](*args)
    with below_autocast():
        return op.transformed(*args)


def _differentiating() -> bool:
    """Whether torch.func differentiates in reverse mode. vmap and forward mode do not count."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    keys = [interpreter.key() for interpreter in stack]
    return torch._C._functorch.TransformType.Grad in keys


# ---- define_op -----------------------------------------------------------------------------------


def define_op(
    name: str,
    *,
    symbolic: Callable,
    public: Callable | None = None,
    backward: Callable | None = None,
    save: Callable | None = None,
    saved: Sequence[str] = (),
    reads_all: Callable | None = None,
    without_gradient: Sequence[str] = (),
    refuse: str | None = None,
    refuse_fwd: str | None = None,
    autocast: Sequence[str] | Callable = (),
    flops: Callable | None = None,
    fold: Callable | None = None,
    whole_sequences: bool = False,
    kernel: Callable | None = None,
    after_error: Callable | None = None,
) -> Op:
    """Registers everything that Python adds to an op, and returns the op. If X_fwd exists, it is
    registered too and becomes the op's `.all`.

    Functions are called with keywords. Each names the arguments that it reads, by their names in the
    schema, and takes the rest as ``**_``.

    Args:
        public: the function of torch_gpukern. Its defaults become the schema's objects.
        symbolic: ``symbolic(**arguments)`` returns one empty tensor for each result of X_fwd (or of
            X). It is called if a size is a symbol (fakes.py).
        backward: ``backward(needs, **values)`` returns gradients by argument name, at least for the
            names in the set `needs`. It may name as parameters what `save` kept, the arguments of
            the call, and `grad_<result>`, which is None for a result without a gradient. An
            argument that the call left out has its default. Leave backward out if the op has no
            gradient, and pass `refuse`.
        save: ``save(needs, args, *results)`` returns a tuple of tensors (or None) and a dict of
            other values by name. These are handed to backward, beside the arguments that are not
            tensors. needs says for each argument whether its gradient is wanted; args has no
            trailing defaults. By default all tensors are kept, arguments and results.
        saved: names of the tensors that `save` returns.
        reads_all: ``reads_all(args)`` says whether backward reads more than the first result. By
            default it does. If reads_all is given, `backward` may get gradients of all results: a
            second derivative differentiates through the others.
        without_gradient: arguments that may not require a gradient.
        refuse: text of the NotImplementedError that a backward raises, for an op without one.
        refuse_fwd: likewise, for X_fwd.
        autocast: names of the arguments that autocast casts; or ``autocast(dtype, to,
            **arguments)``, which returns those that it has cast by `to(x, dtype)`.
        flops: ``flops(**arguments)``, which gets shapes in place of tensors.
        fold: how torch.vmap's dimension folds into those of the op (batching.py).
        whole_sequences: the op must see all keys of a query. It is refused if a rank has only a part
            of them (parallel.py).
        kernel: ``kernel(**arguments)`` of an op that is written in Python. It serves the CPU and
            CUDA, and autocast is off inside it. `symbolic` states its results even if all sizes are
            numbers.
        after_error: ``after_error(**arguments)`` is called if the kernel raises.
    """
    op = Op(name)
    if kernel is not None:
        _register_kernel(op, kernel, after_error)
    variants = [op]
    if hasattr(ops, f"{name}_fwd"):
        op.all = Op(f"{name}_fwd")
        op.all.said = op.said
        variants.append(op.all)
    for variant in variants:
        variant.whole_sequences = whole_sequences
        if public is not None:
            variant.set_defaults_of(public)
        no_backward = refuse_fwd if variant is not op and refuse_fwd else refuse
        if no_backward:
            gradients.refuse(variant, no_backward)
        else:
            gradients.differentiate(variant, op, backward, save, saved, reads_all, without_gradient)
        fakes.register(variant, symbolic, first=variant is not op.all, composed=kernel is not None)
        register_autograd(variant, _autograd_kernel(variant))
        if autocast or kernel is not None:
            _register_autocast(variant, autocast)
        if "group" not in op.names:  # ranks that batch differently would wait for each other
            batching.register(variant, fold)
        guard(variant)
        if flops is not None:
            register_flops(variant, flops)
    if hasattr(getattr(ops, name), "out"):
        out.define(op, symbolic)
    if public is not None:
        keywords.hide_unknown(public)
    return op


# ---- what is registered --------------------------------------------------------------------------


def register_autograd(op: Op, kernel: Callable) -> None:
    """Registers the Autograd kernel `kernel`, which takes arguments without trailing defaults.

    Forward mode has no rule and is refused. Without the refusal the result would have no tangent,
    which means that its derivative is zero.
    """

    def checked(*args):
        if forward_ad._current_level >= 0 and any(
            isinstance(x, Tensor) and has_tangent(x) for x in args
        ):
            raise NotImplementedError(gradients.no_forward_mode(op))
        return kernel(*args)

    library.impl(op.name, checked, "Autograd")


def _register_kernel(op: Op, kernel: Callable, after_error: Callable | None) -> None:
    def run(*args):
        given = op.named(args)
        try:
            return kernel(**given)
        except BaseException:
            if after_error is not None:
                after_error(**given)
            raise

    for device in ("CPU", "CUDA"):
        library.impl(op.name, run, device)


def _autograd_kernel(op: Op) -> Callable:
    def kernel(*args):
        if is_grad_enabled() and any_requires_grad(*args):
            if transforms_active():  # a call from Python would have gone through `guard`
                raise RuntimeError(
                    f"{op.qualified}: call it from Python where torch.func transforms it "
                    f"(functorch)"
                )
            return op.differentiate(*args)
        return op.below(*args)

    return kernel


def _register_autocast(op: Op, rule: Sequence[str] | Callable) -> None:
    """Registers the Autocast kernels."""

    def register(device: str, key: str) -> None:
        def cast(*args):
            return cast_arguments(rule, device, op.named(args)).values()

        def kernel(*args):
            args = cast(*args)
            with below_autocast():
                return op.overload(*args)

        library.impl(op.name, kernel, key)
        op.casts[device] = cast

    for device, key in AUTOCAST_KEYS.items():
        register(device, key)


AUTOCAST_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


def cast_arguments(
    rule: Sequence[str] | Callable, device: str, given: dict[str, Any]
) -> dict[str, Any]:
    """Casts `given` as autocast on that device does. Float64, integers and tensors of another
    device are never cast."""
    dtype = torch.get_autocast_dtype(device)

    def to(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        if (
            x is None
            or x.dtype is torch.float64
            or not x.is_floating_point()
            or x.device.type != device
        ):
            return x
        return cast_as_stored(x, dtype)

    return given | (
        rule(dtype, to, **given) if callable(rule) else {n: to(given[n], dtype) for n in rule}
    )


def is_transposed(x: Tensor) -> bool:
    """Whether x is stored as the transpose of its last two dimensions: only the second last has
    stride 1."""
    return x.dim() > 1 and x.stride(-1) != 1 and x.stride(-2) == 1


def cast_as_stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype). For a transposed view, the stored tensor is cast and the result is transposed,
    as F.linear casts its weight. If the view itself is cast several times in one kernel, Inductor's
    CPU code gives wrong values (torch 2.13 and 2.14).
    """
    return x.mT.to(dtype).mT if is_transposed(x) else x.to(dtype)


def register_flops(op: Op, flops: Callable) -> None:
    """Registers a formula with torch.utils.flop_counter, and replaces that of an earlier import."""
    packet = getattr(ops, op.name)

    def formula(*args, out_shape=None, **kwargs) -> int:
        return flops(**op.named(args) | kwargs)

    flop_counter.flop_registry.pop(packet, None)
    flop_counter.register_flop_formula([packet])(formula)


# ---- code that torch.compile keeps ---------------------------------------------------------------


def tag_compiled_code() -> None:
    """Makes torch.compile's disk caches distinguish versions of gpukern.

    A cache key contains an op's name, but neither its schema nor its behaviour. Code cached before
    an upgrade would call the new library with the old arguments, strides and gradients.
    `torch.compiler.config.cache_key_tag` is part of every key, so a tag is added to it, once in a
    process. After an upgrade everything is compiled anew.
    """
    # compiled graphs contain gradients and casts, so the sources that state them are part of the
    # tag
    rules = [path.read_text() for path in Path(__file__).parent.glob("*.py")]
    config = torch.compiler.config
    tag = tag_of([*_schemas(), *rules])
    tags = config.cache_key_tag.split("+") if config.cache_key_tag else []
    if tag not in tags:  # the package may be imported again
        config.cache_key_tag = "+".join([*tags, tag])


def _schemas() -> list[str]:
    """The schemas of all ops that the compiled library has registered, including those that run on
    several ranks.

    Each schema is read by its name, which takes 3.8 ms of an import. Listing all schemas takes 10.6
    ms, because torch makes a Python object of each of its own.
    """
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith(f"{NAMESPACE}::")]
    parts = [name.partition(".") for name in names]
    return [str(torch._C._get_schema(name, overload)) for name, _, overload in parts]


def tag_of(schemas: Sequence[str]) -> str:
    """Name, version and a digest of schemas and rules. The digest distinguishes builds of one
    version."""
    digest = hashlib.sha256("\n".join(sorted(schemas)).encode()).hexdigest()[:12]
    return f"{NAMESPACE}-{ops.version.default()}-{digest}"
