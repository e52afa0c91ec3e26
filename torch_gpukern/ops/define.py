"""define_op: what Python adds to an op, declared once.

An op has its schema and its CPU and CUDA kernels in C++. Names, places and defaults of its arguments are read from the
schema; what is declared here is handed arguments, saved tensors and gradients by those names. From a declaration an op
gets, each on the dispatch key of that purpose:

- a fake function: dtype, shape and strides of the results, for torch.compile, torch.export and meta tensors;
- an Autograd kernel: a torch.autograd.Function where a gradient is wanted, else straight on below autograd;
- an Autocast kernel: casts what autocast may cast, then goes on below autocast;
- a rule for torch.vmap, which folds the new dimension into those that the op has (batching.py);
- a FLOP formula.

**Below autograd.** A call that wants no gradient skips the Autograd kernel, which spares it the dispatcher's way into
Python and back, 2 to 3 us: `Op.call` excludes autograd's keys, and so does the kernel for what it computes itself. Who
looks at calls (modes, subclasses, autocast, tracers, fake tensors) sees the op as ever.

**torch.func.** The fast Function takes 5 us; torch.func asks for the form with `setup_context`, which takes 50. It has
the same rules and is called only where a transform that differentiates is active (gradients.py).
"""

import functools
import hashlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import flop_counter

from .._library import (
    NAMESPACE,
    any_autocast,
    any_requires_grad,
    below_autocast,
    below_autograd,
    has_torch_function,
    is_compiling,
    is_dynamo_compiling,
    is_grad_enabled,
    jit_trace,
    library,
    ops,
    transforms_active,
)
from . import batching, gradients, keywords, out, parallel

__all__ = ["Op", "define_op", "tag_compiled_code"]

_NUMBER_TYPES = ("float", "int", "SymInt", "bool", "Optional[float]")
_TENSORS = {Tensor, torch.nn.Parameter}
# The types of arguments that a schema takes or refuses whatever their value, but for integers of more than 64 bits.
_PLAIN = {*_TENSORS, type(None), bool, int, float, str, torch.dtype}


class Op:
    """An op of the library: its schema by name, and the ways to call it."""

    every: list["Op"] = []

    def __init__(self, name: str):
        self.name = name
        self.qualified = f"{NAMESPACE}::{name}"
        self.overload = getattr(ops, name).default
        arguments = self.overload._schema.arguments
        self.names = tuple(a.name for a in arguments)
        self.places = {name: i for i, name in enumerate(self.names)}
        self.required = sum(not a.has_default_value() for a in arguments)
        self.defaults = tuple(_interned(a.default_value) for a in arguments)
        self._named_defaults = dict(zip(self.names, self.defaults, strict=True))
        self.results = tuple(r.name for r in self.overload._schema.returns)
        types = [str(a.type) for a in arguments]
        self.tensors = tuple(i for i, t in enumerate(types) if t in ("Tensor", "Optional[Tensor]"))
        self.numbers = tuple(i for i, t in enumerate(types) if t in _NUMBER_TYPES)
        self.bools = tuple(i for i, t in enumerate(types) if t == "bool")
        self.bare = _unwrapped(self.overload)
        self.all = self  # X_fwd, where the op is X and has one
        self.whole_sequences = False  # it must see all of each
        self.out: Callable | None = None  # its .out overload
        self.differentiate: Callable | None = None  # (*args) where a gradient is wanted
        self.transformed: Callable | None = None  # likewise, where torch.func transforms
        self.casts: dict[str, Callable] = {}  # device -> (*args) cast as autocast does
        self._served: dict[tuple[type, ...], tuple[int, ...]] = {}  # types that the schema takes: places of ints
        Op.every.append(self)

    def set_defaults_of(self, public: Callable) -> None:
        """A function that has this op's arguments gets the schema's defaults for its literals, so that `is` finds them."""
        schema = dict(zip(self.names, self.defaults, strict=True))

        def interned(name: str, default: Any) -> Any:
            return schema[name] if name in schema and schema[name] == default else default

        public.__kwdefaults__ = {n: interned(n, d) for n, d in (public.__kwdefaults__ or {}).items()}

    def value(self, args: Sequence, name: str) -> Any:
        """One argument of a call that leaves out trailing defaults."""
        i = self.places[name]
        return args[i] if i < len(args) else self.defaults[i]

    def named(self, args: Sequence) -> dict[str, Any]:
        """Arguments by name, with the defaults that `args` leaves out."""
        return dict(zip(self.names, (*args, *self.defaults[len(args) :]), strict=True))

    def bound(self, args: Sequence, kwargs: dict[str, Any]) -> tuple:
        """All arguments in the schema's order."""
        return tuple((self.named(args) | kwargs).values())

    def call_named(self, **given: Any) -> Any:
        """`call` of arguments by name."""
        args = (self._named_defaults | given).values()
        if len(args) != len(self.names):
            raise TypeError(f"{self.qualified}: it has no argument of {set(given) - set(self.names)}")
        return self.call(*args)

    def call(self, *args: Any) -> Any:
        """The op, the shortest way that gives its results.

        Where nothing but its Autograd kernel would see the call, that is called here if a gradient is wanted and skipped if
        none is. A compiler that traces, torch.jit.trace, torch.func, autocast, modes and subclasses see the op.
        """
        for i in self.bools:
            if args[i] is not True and args[i] is not False:
                self.refuse_non_bool(i, args[i])
        if (
            is_compiling()
            or forward_ad._current_level >= 0
            or transforms_active()
            or jit_trace() is not None
            or has_torch_function(args)
        ):
            self.refuse_number_gradients(args)
            return self.overload(*args)
        parallel.meet()
        if self.whole_sequences:
            parallel.before_attention(self.name)
        # Trailing defaults are left out: the schema fills them in sooner than it reads them.
        n, required, defaults = len(args), self.required, self.defaults
        while n > required and args[n - 1] is defaults[n - 1]:
            n -= 1
        args = args[:n]
        if is_grad_enabled() and any_requires_grad(*args):
            types = tuple(map(type, args))
            ints = self._served.get(types)
            if ints is not None and not any_autocast() and (not ints or _fit(args, ints)):
                return self.differentiate(*args)
            return self._by_the_op(types, args)
        guard = below_autograd()  # from here on; `with` would call into C++ twice more, 0.4 us
        try:
            return self.bare(*args)
        finally:
            del guard

    def below(self, *args: Any) -> Any:
        """The op below autograd."""
        guard = below_autograd()
        try:
            return self.bare(*args)
        finally:
            del guard

    def _by_the_op(self, types: tuple[type, ...], args: tuple) -> Any:
        """A call of types that the schema has not taken yet: if it refuses them, it does so in the name of the op."""
        results = self.overload(*args)
        if _PLAIN.issuperset(types) and not any(types[i] in _TENSORS for i in self.numbers if i < len(types)):
            self._served[types] = tuple(i for i, t in enumerate(types) if t is int)
        return results

    def refuse_non_bools(self, args: Sequence, kwargs: dict[str, Any]) -> None:
        """ValueError where an argument that is true or false is given as anything else."""
        for i in self.bools:
            self.refuse_non_bool(i, args[i] if i < len(args) else kwargs.get(self.names[i], False))

    def refuse_non_bool(self, i: int, x: Any) -> None:
        """torch takes any number and None, which a call in the order of another library would hand over."""
        if isinstance(x, Tensor):
            self.refuse_number_gradients((*(None,) * i, x))
            if x.dtype is torch.bool and x.dim() == 0:
                return
        if isinstance(x, (bool, torch.SymBool)):
            return
        raise ValueError(f"{self.qualified}: {self.names[i]} must be True or False, got {x!r}")

    def refuse_number_gradients(self, args: Sequence, kwargs: dict[str, Any] | None = None) -> None:
        """ValueError where an argument that is a number is given as a tensor that wants a gradient."""
        for name, x in (kwargs or {}).items():
            if isinstance(x, Tensor) and self.places.get(name) in self.numbers:
                self.refuse_number_gradients((*(None,) * self.places[name], x))
        for i in self.numbers:
            if i >= len(args):
                return
            x = args[i]
            if not isinstance(x, Tensor):  # a symbol too: dynamo has no hash of its class
                continue
            if (x.requires_grad and is_grad_enabled()) or _has_tangent(x):
                argument = self.names[i]
                raise ValueError(
                    f"{self.qualified}: {argument} is a number without a gradient, got a tensor that requires one; "
                    f"pass {argument}.detach()"
                )


_known: dict[str | float, Any] = {}


def _interned(default: Any) -> Any:
    """One object for each default, whichever op has it, so that `is` finds it."""
    if type(default) is str:
        return sys.intern(default)
    return _known.setdefault(default, default) if type(default) is float else default


def _fit(args: Sequence, ints: Sequence[int]) -> bool:
    return all(-(2**63) <= args[i] < 2**63 for i in ints)


def _unwrapped(op: torch._ops.OpOverload) -> Callable:
    """What op(...) calls, 0.4 us sooner and without the guard of _guard; torch.compile traces op itself only."""
    call = op._op
    while hasattr(call, "__wrapped__"):
        call = call.__wrapped__
    return call


# ---- the ways in ---------------------------------------------------------------------------------


def _guard(op: Op) -> None:
    """Has calls of torch.ops.gpukern.<op> pass through Python first.

    There a number that is a tensor with a gradient is refused: torch reads such a tensor's value before the first kernel
    sees the call, and its gradient would be lost in silence. And there torch.func's transforms meet the Function that they
    can read. And there sharding rules and torch's context_parallel are seen to (parallel.py). So the guard stands where Python
    enters the op, in _op of the overload and of its packet.
    """

    def guarded(bare: Callable) -> Callable:
        @functools.wraps(bare)
        def call(*args, **kwargs):
            if is_dynamo_compiling():  # the frame on its own, after a graph break: dynamo knows the overload
                return op.overload(*args, **kwargs)
            op.refuse_number_gradients(args, kwargs)
            if op.bools:
                op.refuse_non_bools(args, kwargs)
            parallel.meet()
            if op.whole_sequences:
                parallel.before_attention(op.name)
            if "out" in kwargs and op.out is not None:
                return op.out(*args, **kwargs)
            if op.transformed is not None and transforms_active() and _differentiating():
                return _transformed(op, _checked(op, args, kwargs))
            return bare(*args, **kwargs)

        return call

    packet = getattr(ops, op.name)
    for holder in (op.overload, packet):  # the packet by the overload too: with an .out its errors would name no op
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
    """What a transform of torch.func that differentiates is handed. It sees no Autocast kernel, so that casts come first."""
    device = next(x.device.type for x in args if isinstance(x, Tensor))
    if device in op.casts and torch.is_autocast_enabled(device):
        args = op.casts[device](*args)
    with below_autocast():
        return op.transformed(*args)


def _differentiating() -> bool:
    """Whether a transform of torch.func that differentiates is active: not vmap alone, not forward mode."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    keys = [interpreter.key() for interpreter in stack]
    return torch._C._functorch.TransformType.Grad in keys


def _has_tangent(x: Tensor) -> bool:
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


# ---- define_op -----------------------------------------------------------------------------------


def define_op(
    name: str,
    *,
    fake: Callable,
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
) -> Op:
    """Registers all of an op that Python knows, and returns it; X_fwd, where there is one, with it (`.all`).

    Functions are called with keywords, arguments by their names in the schema, so that each names what it reads and takes
    the rest as ``**_``.

    Args:
        public: the function of torch_gpukern, whose defaults are the schema's.
        fake: ``fake(**arguments)`` returns empty tensors, one for each result of X_fwd or X.
        backward: ``backward(needs, **values)`` returns the gradients by argument name, for those named in the set `needs`
            at least. values: what `save` kept, `grad_<result>` for each result (None where it has no gradient), and None
            for those that the call does not return. None where the op has no gradient.
        save: ``save(needs, args, *results)`` returns what backward reads beside the arguments that are no tensors: a tuple
            of tensors (or None), and a dict of the rest by name. needs: for each argument whether its gradient is wanted;
            args without trailing defaults. By default all tensors are kept, arguments and results.
        saved: names of the tensors that `save` returns.
        reads_all: ``reads_all(args)`` says whether backward reads more than the first result; by default it does. Where it
            is declared, `backward` is handed the gradients of all results, in a second derivative for one.
        without_gradient: arguments that may not require a gradient.
        refuse: text of the NotImplementedError that a backward raises, for an op without one.
        refuse_fwd: likewise, for X_fwd.
        autocast: names of the arguments that autocast casts; or ``autocast(dtype, to, **arguments)``, which returns those
            that it has cast by `to(x, dtype)`.
        flops: ``flops(**arguments)`` of shapes in place of tensors.
        fold: how torch.vmap's dimension folds into those of the op (batching.py).
        whole_sequences: the op must see all keys of a query: it is refused where a rank has a part of them (parallel.py).
    """
    op = Op(name)
    doors = [op]
    if hasattr(ops, f"{name}_fwd"):
        op.all = Op(f"{name}_fwd")
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
        register_fake(door, fake, first=door is not op.all)
        register_autograd(door, _autograd_kernel(door))
        if autocast:
            _register_autocast(door, autocast)
        batching.register(door, fold)
        _guard(door)
        if flops is not None:
            register_flops(door, flops)
    if hasattr(getattr(ops, name), "out"):
        out.define(op, fake, _unwrapped)
    if public is not None:
        keywords.hide_unknown(public)
    return op


# ---- what is registered --------------------------------------------------------------------------


def register_fake(op: Op, fake: Callable, first: bool = False) -> None:
    """first: the op returns the first of what `fake` returns. Tensors must be on one device, as the kernels ask."""

    def checked(*args, **kwargs):
        given = op.named(args) | kwargs
        tensors = [(n, x) for n, x in given.items() if isinstance(x, Tensor)]
        first_name, one = tensors[0]
        for other, x in tensors[1:]:
            if x.device != one.device:
                raise ValueError(
                    f"{op.qualified}: {other} is on {x.device}, {first_name} is on {one.device}; they must be on one device"
                )
        results = fake(**given)
        return results[0] if first else results

    torch.library.register_fake(op.qualified, checked, lib=library)


def register_autograd(op: Op, kernel: Callable) -> None:
    """The Autograd kernel, `kernel` of arguments without trailing defaults, but for forward mode, which has no rule: a
    result without a tangent would say that its derivative is zero."""

    def checked(*args):
        if forward_ad._current_level >= 0 and any(isinstance(x, Tensor) and _has_tangent(x) for x in args):
            raise NotImplementedError(gradients.no_forward_mode(op))
        return kernel(*args)

    library.impl(op.name, checked, "Autograd")


def _autograd_kernel(op: Op) -> Callable:
    def kernel(*args):
        if is_grad_enabled() and any_requires_grad(*args):
            if transforms_active():  # not entered from Python, or it would have met _guard
                raise RuntimeError(f"{op.qualified}: call it from Python where torch.func transforms it (functorch)")
            return op.differentiate(*args)
        return op.below(*args)

    return kernel


def _register_autocast(op: Op, names: Sequence[str] | Callable) -> None:
    """The Autocast kernels. Float64 and tensors of another device are never cast."""

    def register(device: str, key: str) -> None:
        def to(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
            if x is None or x.dtype is torch.float64 or not x.is_floating_point() or x.device.type != device:
                return x
            return cast_as_stored(x, dtype)

        def cast(*args):
            dtype, given = torch.get_autocast_dtype(device), op.named(args)
            changed = names(dtype, to, **given) if callable(names) else {n: to(given[n], dtype) for n in names}
            return (given | changed).values()

        def kernel(*args):
            args = cast(*args)
            with below_autocast():
                return op.overload(*args)

        library.impl(op.name, kernel, key)
        op.casts[device] = cast

    register("cpu", "AutocastCPU")
    register("cuda", "AutocastCUDA")


def is_transposed(x: Tensor) -> bool:
    """Whether its last two dimensions are stored the other way round. Asked of symbolic strides, this guards nothing new."""
    return x.dim() > 1 and x.stride(-1) != 1 and x.stride(-2) == 1


def cast_as_stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype), of a transposed view the cast of what is stored, transposed, as F.linear casts its weight. Inductor's CPU
    code gives wrong values where several such casts of the view meet in one kernel (torch 2.13 and 2.14).
    """
    return x.mT.to(dtype).mT if is_transposed(x) else x.to(dtype)


def register_flops(op: Op, flops: Callable) -> None:
    """For torch.utils.flop_counter, in place of an earlier import's."""
    packet = getattr(ops, op.name)

    def formula(*args, out_shape=None, **kwargs) -> int:
        return flops(**op.named(args) | kwargs)

    flop_counter.flop_registry.pop(packet, None)
    flop_counter.register_flop_formula([packet])(formula)


# ---- code that torch.compile keeps -----------------------------------------------------------------


def tag_compiled_code() -> None:
    """Has torch.compile's caches on disk tell our versions apart.

    Their keys hold an op's name, but neither its schema nor what it does: code that was cached before an upgrade would call
    this library with the arguments, strides and gradients of that one. `torch.compiler.config.cache_key_tag` is part of
    every key. Ours is added to one that is set already, once for all of the process, which compiles anew after an upgrade
    of gpukern; without an upgrade its caches serve as ever.
    """
    rules = [path.read_text() for path in Path(__file__).parent.glob("*.py")]  # gradients and casts, which graphs hold
    config, tag = torch.compiler.config, tag_of([*(str(op.overload._schema) for op in Op.every), *rules])
    tags = config.cache_key_tag.split("+") if config.cache_key_tag else []
    if tag not in tags:  # the package may be imported again
        config.cache_key_tag = "+".join([*tags, tag])


def tag_of(schemas: Sequence[str]) -> str:
    """Name, version and a digest of schemas and rules, for builds of one version."""
    digest = hashlib.sha256("\n".join(sorted(schemas)).encode()).hexdigest()[:12]
    return f"{NAMESPACE}-{ops.version.default()}-{digest}"
