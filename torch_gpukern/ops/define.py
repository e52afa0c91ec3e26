# SPDX-License-Identifier: BSD-3-Clause
"""define_op: what Python adds to an op, declared once.

An op has its schema in C++, and its CPU and CUDA kernels there or, where it is made of others or of
several ranks, in Python. Names, places and defaults of its arguments are read from the schema; what
is declared here is handed arguments, saved tensors and gradients by those names. From a declaration
an op gets, each on the dispatch key of that purpose:

- a fake function: dtype, shape and strides of the results, for torch.compile, torch.export and meta
  tensors;
- an Autograd kernel: a torch.autograd.Function where a gradient is wanted, else straight on below
  autograd;
- an Autocast kernel: casts what autocast may cast, then goes on below autocast;
- a rule for torch.vmap, which folds the new dimension into those that the op has (batching.py);
- a FLOP formula.

**torch.func.** The fast Function takes 5 us; torch.func asks for the form with `setup_context`,
which takes 50. It has the same rules and is called only where a transform that differentiates is
active (gradients.py).
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

# ---- the ways in ---------------------------------------------------------------------------------


def guard(op: Op) -> None:
    """Has calls of torch.ops.gpukern.<op> pass through Python first.

    There a number that is a tensor with a gradient is refused: torch reads such a tensor's value
    before the first kernel sees the call, and its gradient would be lost in silence. And there
    torch.func's transforms meet the Function that they can read. And there sharding rules and
    torch's context_parallel are seen to (parallel.py). So the guard stands where Python enters the
    op, in _op of the overload and of its packet.
    """

    def guarded(bare: Callable) -> Callable:
        @functools.wraps(bare)
        def call(*args, **kwargs):
            # the frame on its own, after a graph break: dynamo knows the overload
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
                return bare(*args, **kwargs)
            except RuntimeError:
                op.refuse_types(args, kwargs)
                raise

        return call

    packet = getattr(ops, op.name)
    # the packet by the overload too: with an .out its errors would name no op
    for holder in (op.overload, packet):
        holder._op = guarded(op.bare)
    # torch.jit.script asks for an op by what the packet calls
    torch.jit._builtins._register_builtin(packet._op, op.qualified)


def _checked(op: Op, args: tuple, kwargs: dict[str, Any]) -> tuple:
    """All arguments in order; what the schema does not take is refused by a call of the op."""
    if len(args) > len(op.names) or not set(kwargs) <= set(op.names[len(args) :]):
        op.bare(*args, **kwargs)
    if not set(op.names[len(args) : op.required]) <= set(kwargs):
        op.bare(*args, **kwargs)
    return op.bound(args, kwargs)


def _transformed(op: Op, args: tuple) -> Any:
    """What a transform of torch.func that differentiates is handed. It sees no Autocast kernel, so
    that casts come first."""
    device = next(x.device.type for x in args if isinstance(x, Tensor))
    if device in op.casts and torch.is_autocast_enabled(device):
        args = op.casts[device](*args)
    with below_autocast():
        return op.transformed(*args)


def _differentiating() -> bool:
    """Whether a transform of torch.func that differentiates is active: not vmap alone, not forward
    mode."""
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
    """Registers all of an op that Python knows, and returns it; X_fwd, where there is one, with it
    (`.all`).

    Functions are called with keywords, arguments by their names in the schema, so that each names
    what it reads and takes the rest as ``**_``.

    Args:
        public: the function of torch_gpukern, whose defaults are the schema's.
        symbolic: ``symbolic(**arguments)`` returns empty tensors, one for each result of X_fwd or
            X, where sizes are symbols (fakes.py).
        backward: ``backward(needs, **values)`` returns the gradients by argument name, for those
            named in the set `needs` at least. values: what `save` kept, the arguments of the call,
            and of what it did not give the default where backward names it; `grad_<result>`
            likewise, None where that has no gradient. None where the op has no gradient.
        save: ``save(needs, args, *results)`` returns what backward reads beside the arguments that
            are no tensors: a tuple of tensors (or None), and a dict of the rest by name. needs: for
            each argument whether its gradient is wanted; args without trailing defaults. By default
            all tensors are kept, arguments and results.
        saved: names of the tensors that `save` returns.
        reads_all: ``reads_all(args)`` says whether backward reads more than the first result; by
            default it does. Where it is declared, `backward` is handed the gradients of all
            results, in a second derivative for one.
        without_gradient: arguments that may not require a gradient.
        refuse: text of the NotImplementedError that a backward raises, for an op without one.
        refuse_fwd: likewise, for X_fwd.
        autocast: names of the arguments that autocast casts; or ``autocast(dtype, to,
            **arguments)``, which returns those that it has cast by `to(x, dtype)`.
        flops: ``flops(**arguments)`` of shapes in place of tensors.
        fold: how torch.vmap's dimension folds into those of the op (batching.py).
        whole_sequences: the op must see all keys of a query: it is refused where a rank has a part
        of them (parallel.py). kernel: ``kernel(**arguments)`` of an op that is made of others in
        Python: it serves the CPU and CUDA, nothing is cast below
            it, and `symbolic` states its results also where all sizes are numbers.
        after_error: ``after_error(**arguments)`` is called where the kernel raises.
    """
    op = Op(name)
    if kernel is not None:
        _register_kernel(op, kernel, after_error)
    doors = [op]
    if hasattr(ops, f"{name}_fwd"):
        op.all = Op(f"{name}_fwd")
        op.all.said = op.said
        doors.append(op.all)
    for door in doors:
        door.whole_sequences = whole_sequences
        if public is not None:
            door.set_defaults_of(public)
        no_backward = refuse_fwd if door is not op and refuse_fwd else refuse
        if no_backward:
            gradients.refuse(door, no_backward)
        else:
            gradients.differentiate(door, op, backward, save, saved, reads_all, without_gradient)
        fakes.register(door, symbolic, first=door is not op.all, composed=kernel is not None)
        register_autograd(door, _autograd_kernel(door))
        if autocast or kernel is not None:
            _register_autocast(door, autocast)
        if "group" not in op.names:  # ranks that batch differently would wait for each other
            batching.register(door, fold)
        guard(door)
        if flops is not None:
            register_flops(door, flops)
    if hasattr(getattr(ops, name), "out"):
        out.define(op, symbolic)
    if public is not None:
        keywords.hide_unknown(public)
    return op


# ---- what is registered --------------------------------------------------------------------------


def register_autograd(op: Op, kernel: Callable) -> None:
    """The Autograd kernel, `kernel` of arguments without trailing defaults, but for forward mode,
    which has no rule: a result without a tangent would say that its derivative is zero."""

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
            if transforms_active():  # not entered from Python, or it would have met guard
                raise RuntimeError(
                    f"{op.qualified}: call it from Python where torch.func transforms it "
                    f"(functorch)"
                )
            return op.differentiate(*args)
        return op.below(*args)

    return kernel


def _register_autocast(op: Op, rule: Sequence[str] | Callable) -> None:
    """The Autocast kernels."""

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
    """`given` as autocast on that device has it. Float64 and tensors of another device are never
    cast."""
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
    """Whether its last two dimensions are stored the other way round. Asked of symbolic strides,
    this guards nothing new."""
    return x.dim() > 1 and x.stride(-1) != 1 and x.stride(-2) == 1


def cast_as_stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype), of a transposed view the cast of what is stored, transposed, as F.linear casts
    its weight. Inductor's CPU code gives wrong values where several such casts of the view meet in
    one kernel (torch 2.13 and 2.14).
    """
    return x.mT.to(dtype).mT if is_transposed(x) else x.to(dtype)


def register_flops(op: Op, flops: Callable) -> None:
    """For torch.utils.flop_counter, in place of an earlier import's."""
    packet = getattr(ops, op.name)

    def formula(*args, out_shape=None, **kwargs) -> int:
        return flops(**op.named(args) | kwargs)

    flop_counter.flop_registry.pop(packet, None)
    flop_counter.register_flop_formula([packet])(formula)


# ---- code that torch.compile keeps ---------------------------------------------------------------


def tag_compiled_code() -> None:
    """Has torch.compile's caches on disk tell our versions apart.

    Their keys hold an op's name, but neither its schema nor what it does: code that was cached
    before an upgrade would call this library with the arguments, strides and gradients of that one.
    `torch.compiler.config.cache_key_tag` is part of every key. Ours is added to one that is set
    already, once for all of the process, which compiles anew after an upgrade of gpukern; without
    an upgrade its caches serve as ever.
    """
    # gradients and casts, which graphs hold
    rules = [path.read_text() for path in Path(__file__).parent.glob("*.py")]
    config = torch.compiler.config
    tag = tag_of([*_schemas(), *rules])
    tags = config.cache_key_tag.split("+") if config.cache_key_tag else []
    if tag not in tags:  # the package may be imported again
        config.cache_key_tag = "+".join([*tags, tag])


def _schemas() -> list[str]:
    """The schemas of all ops that the compiled library has registered, ops of several ranks too.

    Read by name: torch makes a Python object of each of its own schemas to list them (10.6 ms of an
    import, by name 3.8).
    """
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith(f"{NAMESPACE}::")]
    parts = [name.partition(".") for name in names]
    return [str(torch._C._get_schema(name, overload)) for name, _, overload in parts]


def tag_of(schemas: Sequence[str]) -> str:
    """Name, version and a digest of schemas and rules, for builds of one version."""
    digest = hashlib.sha256("\n".join(sorted(schemas)).encode()).hexdigest()[:12]
    return f"{NAMESPACE}-{ops.version.default()}-{digest}"
