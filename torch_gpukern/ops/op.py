# SPDX-License-Identifier: BSD-3-Clause
"""Op: an op of the library, its schema by name, and the ways to call it.

Public functions call `Op.call`. If no gradient is wanted, `Op.call` excludes autograd's dispatch
keys, so that the dispatcher does not enter the Autograd kernel in Python and return: this saves 2
to 3 us. The Autograd kernel excludes them for its own calls. Modes, subclasses, autocast, tracers
and fake tensors see the op as usual.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._library import (
    NAMESPACE,
    any_autocast,
    any_requires_grad,
    below_autograd,
    has_torch_function,
    is_compiling,
    is_grad_enabled,
    jit_trace,
    ops,
    transforms_active,
)
from .parallel import before
from .wrong_types import WrongType, refuse_types

__all__ = ["Op", "has_tangent", "unwrapped"]

_NUMBER_TYPES = ("float", "int", "SymInt", "bool", "Optional[float]")
_TENSORS = {Tensor, torch.nn.Parameter}
_NUMBERS = (int, float)  # not bool, which is no number to a schema
# Types for which a schema accepts every value or none. The exception: integers of more than 64 bits
# are refused.
_PLAIN = {*_TENSORS, type(None), bool, int, float, str, torch.dtype}


class Op:
    """An op of the library: its schema by name, and the ways to call it."""

    every: list["Op"] = []

    def __init__(self, name: str):
        self.name = name
        self.qualified = f"{NAMESPACE}::{name}"
        self.said = self.qualified  # the name in error texts: X_fwd is called X there, as in C
        self.overload = getattr(ops, name).default
        arguments = self.overload._schema.arguments
        self.names = tuple(a.name for a in arguments)
        self.places = {name: i for i, name in enumerate(self.names)}
        self.required = sum(not a.has_default_value() for a in arguments)
        self.defaults = tuple(_default(a.default_value) for a in arguments)
        self._named_defaults = dict(zip(self.names, self.defaults, strict=True))
        self._from_last = tuple(
            (i, self.defaults[i]) for i in reversed(range(self.required, len(arguments)))
        )
        self.results = tuple(r.name for r in self.overload._schema.returns)
        types = [str(a.type) for a in arguments]
        # ScalarType, where `type` says int
        self._types = {a.name: str(a.real_type) for a in arguments}
        self.tensors = tuple(i for i, t in enumerate(types) if t in ("Tensor", "Optional[Tensor]"))
        self.numbers = tuple(i for i, t in enumerate(types) if t in _NUMBER_TYPES)
        self.bools = tuple(i for i, t in enumerate(types) if t == "bool")
        self.unguarded = unwrapped(self.overload)
        self.all = self  # X_fwd if the op is X and has one
        self.whole_sequences = False  # it must see all keys of a sequence
        self.out: Callable | None = None  # its .out overload
        self.differentiate: Callable | None = None  # (*args) if a gradient is wanted
        self.transformed: Callable | None = None  # (*args) under a transform of torch.func
        self.casts: dict[str, Callable] = {}  # device -> (*args) cast as autocast does
        # types of a call that the schema takes -> the places of its ints
        self._served: dict[tuple[type, ...], tuple[int, ...]] = {}
        Op.every.append(self)

    def set_defaults_of(self, public: Callable) -> None:
        """Replaces the defaults of a public function by the schema's objects, so that `call` can
        recognise them by `is`."""

        def interned(name: str, default: Any) -> Any:
            ours = self._named_defaults.get(name)
            return ours if ours == default and type(ours) is type(default) else default

        public.__kwdefaults__ = {
            n: interned(n, d) for n, d in (public.__kwdefaults__ or {}).items()
        }

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
            raise TypeError(
                f"{self.qualified}: it has no argument of {set(given) - set(self.names)}"
            )
        return self.call(*args)

    def call(self, *args: Any) -> Any:
        """Calls the op with all its arguments, by the shortest path that gives its results.

        If only the Autograd kernel would see the call, this function calls it directly if a
        gradient is wanted, and skips it otherwise. A tracing compiler, torch.jit.trace, torch.func,
        autocast, modes and subclasses see the op.
        """
        if (
            is_compiling()
            or forward_ad._current_level >= 0
            or transforms_active()
            or jit_trace() is not None
        ):
            return self._seen(args)
        # Trailing defaults are left out: torch fills them in faster than it converts arguments.
        # Equal numbers count, as they do for the dispatcher: what a call keeps for its gradients
        # may depend on how many arguments come, and checkpointing takes both ways.
        n = self.required
        for place, default in self._from_last:
            given = args[place]
            if given is not default and not (
                type(given) in _NUMBERS and type(default) in _NUMBERS and given == default
            ):
                n = place + 1
                break
        args = args[:n]
        if has_torch_function(args):
            return self._seen(args)
        for i in self.bools:
            if i < n and args[i] is not True and args[i] is not False:
                self.refuse_non_bool(i, args[i])
        before(self.name, self.whole_sequences)
        if is_grad_enabled() and any_requires_grad(*args):
            types = tuple(map(type, args))
            ints = self._served.get(types)
            if ints is not None and not any_autocast() and (not ints or _fit(args, ints)):
                return self.differentiate(*args)
            return self._by_the_op(types, args)
        guard = below_autograd()  # until `del`; a `with` would call into C++ twice more, 0.4 us
        try:
            return self.unguarded(*args)
        except RuntimeError:
            self.refuse_types(args, {})
            raise
        finally:
            del guard

    def below(self, *args: Any) -> Any:
        """The op below autograd."""
        guard = below_autograd()
        try:
            return self.unguarded(*args)
        except RuntimeError:
            self.refuse_types(args, {})
            raise
        finally:
            del guard

    def _seen(self, args: tuple) -> Any:
        """A call that a mode, subclass, tracer or transform sees."""
        for i in self.bools:
            if i < len(args) and args[i] is not True and args[i] is not False:
                self.refuse_non_bool(i, args[i])
        self.refuse_number_gradients(args)
        return self.overload(*args) if is_compiling() else self._by_the_overload(args)

    def _by_the_op(self, types: tuple[type, ...], args: tuple) -> Any:
        """A call with types that no call has had so far. If the schema accepts them, later calls
        take the short path. If it refuses them, the error names the op."""
        results = self._by_the_overload(args)
        if _PLAIN.issuperset(types) and not any(
            types[i] in _TENSORS for i in self.numbers if i < len(types)
        ):
            self._served[types] = tuple(i for i, t in enumerate(types) if t is int)
        return results

    def _by_the_overload(self, args: Sequence) -> Any:
        try:
            return self.overload(*args)
        except RuntimeError:
            self.refuse_types(args, {})
            raise

    def refuse_non_bools(self, args: Sequence, kwargs: dict[str, Any]) -> None:
        """ValueError if a bool argument is given as anything else."""
        for i in self.bools:
            self.refuse_non_bool(i, args[i] if i < len(args) else kwargs.get(self.names[i], False))

    def refuse_non_bool(self, i: int, x: Any) -> None:
        """ValueError unless x is a bool. torch would accept any number and None, which a call with
        the argument order of another library passes."""
        if isinstance(x, Tensor):
            self.refuse_number_gradients((*(None,) * i, x))
            if x.dtype is torch.bool and x.dim() == 0:
                return
        if isinstance(x, (bool, torch.SymBool)):
            return
        raise WrongType(f"{self.said}: {self.names[i]} must be True or False, got {x!r}")

    def refuse_types(self, args: Sequence, kwargs: dict[str, Any]) -> None:
        """WrongType if the schema does not take an argument's type. Its text says more than
        torch's."""
        given = dict(zip(self.names, args)) | kwargs
        refuse_types(
            self.said, ((n, self._types[n], x) for n, x in given.items() if n in self._types)
        )

    def refuse_number_gradients(self, args: Sequence, kwargs: dict[str, Any] | None = None) -> None:
        """ValueError if a number argument is given as a tensor that requires a gradient."""
        for name, x in (kwargs or {}).items():
            if isinstance(x, Tensor) and self.places.get(name) in self.numbers:
                self.refuse_number_gradients((*(None,) * self.places[name], x))
        for i in self.numbers:
            if i >= len(args):
                return
            x = args[i]
            if not isinstance(x, Tensor):  # it may be a symbol, whose class dynamo cannot hash
                continue
            if (x.requires_grad and is_grad_enabled()) or has_tangent(x):
                argument = self.names[i]
                raise ValueError(
                    f"{self.said}: {argument} is a number without a gradient, got a tensor that "
                    f"requires one; "
                    f"pass {argument}.detach()"
                )


def _default(x: Any) -> Any:
    """A default as public functions pass it: 0.0 and 1.0 as integers
    (keywords.keep_defaults_constant), a string interned."""
    if type(x) is float and x in (0.0, 1.0):
        return int(x)
    return sys.intern(x) if type(x) is str else x


def _fit(args: Sequence, ints: Sequence[int]) -> bool:
    return all(-(2**63) <= args[i] < 2**63 for i in ints)


def unwrapped(op: torch._ops.OpOverload) -> Callable:
    """The function that op(...) calls, without `guard` (define.py) and without 0.4 us of wrappers.
    torch.compile can trace only op itself."""
    call = op._op
    while hasattr(call, "__wrapped__"):
        call = call.__wrapped__
    return call


def has_tangent(x: Tensor) -> bool:
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None
