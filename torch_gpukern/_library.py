"""What every op file shares: the compiled library, and how Python kernels are put on its ops.

An op has its schema and its CPU and CUDA kernels in C++. From Python it gets, each on the dispatch
key of that purpose:

- a fake function: dtype, shape and strides of the results, for torch.compile, torch.export and meta
  tensors;
- an Autograd kernel: a torch.autograd.Function where a gradient is wanted, else straight on to the
  kernel below. The dispatcher's way into Python and back takes 2 to 3 us, so the public functions
  look first and spare it where nothing but this kernel would see the call (public). Below it they call
  the op's twin of the same kernel, `_name` (twin), which autograd passes by: excluding autograd for
  one call takes 1.2 us;
- an Autocast kernel: casts what autocast may cast, then goes on below autocast.
"""

import functools
import inspect
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import flop_counter

# The GPUKERN_NAMESPACE of the C++ build; the two must agree.
NAMESPACE = "gpukern"
FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "libgpukern_torch.so")
OLDEST_TORCH = (2, 10)


def _mapped_copies() -> list[str]:
    """Files named like ours that this process has loaded; outside Linux those that torch did."""
    paths = set(torch.ops.loaded_libraries)
    try:
        with open("/proc/self/maps") as maps:
            paths.update(line.split(maxsplit=5)[5].strip() for line in maps if line.count("/"))
    except OSError:
        pass
    return sorted(p for p in paths if os.path.basename(p) == os.path.basename(FILE))


def _load() -> None:
    """Loads the library once; every way in which this can fail is one line that says what to do."""
    version = tuple(int(x) for x in torch.__version__.split(".")[:2])
    if version < OLDEST_TORCH:
        raise ImportError(
            f"torch_gpukern needs torch >= {'.'.join(map(str, OLDEST_TORCH))}, this is torch "
            f"{torch.__version__}: pip install --upgrade torch"
        )
    if not os.path.exists(FILE):
        raise ImportError(
            f"torch_gpukern: {FILE} does not exist: build it with `make build` "
            "(or `pip install -e .`) at the root of the repository"
        )
    if hasattr(getattr(torch.ops, NAMESPACE), "gemm"):
        # A second definition of a namespace ends the interpreter, so it must not be tried.
        copies = _mapped_copies()
        if any(os.path.samefile(p, FILE) for p in copies if os.path.exists(p)):
            return
        raise ImportError(
            f"torch_gpukern: the ops of namespace '{NAMESPACE}' are already defined by "
            f"{', '.join(copies) or 'a library that cannot be named'}; {FILE} cannot be loaded "
            "beside it: import one of the two only, or build one with another GPUKERN_NAMESPACE"
        )
    try:
        torch.ops.load_library(FILE)
    except OSError as error:
        raise ImportError(
            f"torch_gpukern: {FILE} does not load with torch {torch.__version__}: "
            f"{error.__cause__ or error}; rebuild it with `make build` (or `pip install -e .`)"
        ) from error
    if not hasattr(getattr(torch.ops, NAMESPACE), "gemm"):
        raise ImportError(
            f"torch_gpukern: {FILE} defines no ops in namespace '{NAMESPACE}': it was built with "
            f"another GPUKERN_NAMESPACE, which NAMESPACE in {__file__} must name too"
        )


_load()

ops = getattr(torch.ops, NAMESPACE)
_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def _replace_earlier_import() -> None:
    """Whoever imports the package again after taking it out of sys.modules has the compiled library still, and with it what
    the first import registered from Python: that goes, and functions of the first import run on what this one registers.
    """
    kept = "_registered_from_python"  # where sys.modules is not asked
    earlier = vars(ops).get(kept)
    if earlier is not None:
        earlier._destroy()
    setattr(ops, kept, _library)


_replace_earlier_import()

# Bound once: every call pays for what a kernel looks up.
below_autograd = torch._C._AutoDispatchBelowAutograd
any_requires_grad = torch._C._any_requires_grad
is_grad_enabled = torch.is_grad_enabled
is_compiling = torch.compiler.is_compiling
is_dynamo_compiling = torch.compiler.is_dynamo_compiling
are_deterministic = torch._C._get_deterministic_algorithms
transforms_active = torch._C._are_functorch_transforms_active
has_torch_function = torch._C._has_torch_function  # of an argument, or a mode's
jit_trace = torch._C._get_tracing_state  # None outside torch.jit.trace
any_autocast = torch._C._is_any_autocast_enabled
_KeySet, _Key = torch._C.DispatchKeySet, torch._C.DispatchKey
_AUTOCAST_KEYS = _KeySet(_Key.AutocastCPU) | _KeySet(_Key.AutocastCUDA)


def below_autocast() -> torch._C._ExcludeDispatchKeyGuard:
    """Context without casts: in an Autocast kernel, and in backward, where dtypes are settled."""
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS)


def fake(name: str) -> Callable:
    """Decorator: the fake function of an op. Tensors must be on one device, as the kernels ask."""

    def register(function: Callable) -> Callable:
        names = tuple(inspect.signature(function).parameters)

        def checked(*args, **kwargs):
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            tensors = [(n, x) for n, x in given.items() if isinstance(x, Tensor)]
            first_name, first = tensors[0]
            for other, x in tensors[1:]:
                if x.device != first.device:
                    raise ValueError(
                        f"{NAMESPACE}::{name}: {other} is on {x.device}, {first_name} is on "
                        f"{first.device}; they must be on one device"
                    )
            return function(*args, **kwargs)

        torch.library.register_fake(f"{NAMESPACE}::{name}", checked, lib=_library)
        return function

    return register


_autograd_kernels: dict[str, Callable] = {}


def autograd(name: str) -> Callable:
    """Decorator: the Autograd kernel of an op. Torch leaves out trailing defaults."""

    def register(function: Callable) -> Callable:
        def kernel(*args):
            if forward_ad._current_level >= 0:
                _refuse_tangents(name, args)
            return function(*args)

        _library.impl(name, kernel, "Autograd")
        _autograd_kernels[name] = function
        _guard_numbers(name)
        return function

    return register


# Per op the places and names of its arguments that are numbers or bools.
_numbers: dict[str, tuple[tuple[int, str], ...]] = {}
_NUMBER_TYPES = ("float", "int", "SymInt", "bool", "Optional[float]")


def _guard_numbers(name: str) -> None:
    """Has calls of torch.ops.gpukern.<name> refuse a number that is a tensor with a gradient.

    Torch reads such a tensor's value before the first kernel sees the call, and its gradient would be lost in silence. So
    the check stands where Python enters the op, in _op of the overload and of its packet.
    """
    packet = getattr(ops, name)
    arguments = [a.name for a in packet.default._schema.arguments]
    _numbers[name] = tuple(
        (i, a.name) for i, a in enumerate(packet.default._schema.arguments) if str(a.type) in _NUMBER_TYPES
    )
    if not _numbers[name]:
        return
    for holder in (packet.default, packet):
        holder._op = _guarded(name, arguments, holder._op, packet.default)
        # torch.jit.script asks for an op by what the packet calls
        torch.jit._builtins._register_builtin(holder._op, f"{NAMESPACE}::{name}")


def _guarded(name: str, arguments: list[str], op: Callable, overload: Callable) -> Callable:
    @functools.wraps(op)
    def call(*args, **kwargs):
        if is_dynamo_compiling():  # the frame on its own, after a graph break: dynamo knows the overload
            return overload(*args, **kwargs)
        refuse_number_gradients(name, args)
        for argument, x in kwargs.items():
            if isinstance(x, Tensor) and argument in arguments:
                refuse_number_gradients(name, (*(None,) * arguments.index(argument), x))
        return op(*args, **kwargs)

    return call


def refuse_number_gradients(name: str, args: Sequence) -> None:
    """ValueError where an argument of an op that is a number is given as a tensor that wants a gradient."""
    for i, argument in _numbers[name]:
        if i >= len(args):
            return
        x = args[i]
        if not isinstance(x, Tensor):  # a symbol too: dynamo has no hash of its class
            continue
        if (x.requires_grad and is_grad_enabled()) or _has_tangent(x):
            raise ValueError(
                f"{NAMESPACE}::{name}: {argument} is a number without a gradient, got a tensor that requires one; "
                f"pass {argument}.detach()"
            )


def _has_tangent(x: Tensor) -> bool:
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def _refuse_tangents(name: str, args: Sequence) -> None:
    """In forward mode: a result without a tangent would say that its derivative is zero."""
    if any(isinstance(x, Tensor) and _has_tangent(x) for x in args):
        raise NotImplementedError(
            f"{NAMESPACE}::{name}: it has no forward-mode derivative (torch.func.jvp, torch.autograd.forward_ad); "
            "use reverse mode (torch.autograd.grad)"
        )


def autocast(name: str, cast: Callable[[torch.dtype, Sequence, Callable], tuple]) -> None:
    """The Autocast kernels of an op; `cast(dtype, args, to)` returns its arguments, cast.

    `to(x, dtype)` casts one argument where autocast may: a floating-point tensor of the device that
    is not float64.
    """
    op = getattr(ops, name).default

    def register(device: str, key: str) -> None:
        def to(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
            if x is None or x.dtype is torch.float64 or not x.is_floating_point() or x.device.type != device:
                return x
            return x.to(dtype)

        def kernel(*args):
            args = cast(torch.get_autocast_dtype(device), args, to)
            with below_autocast():
                return op(*args)

        _library.impl(name, kernel, key)

    register("cpu", "AutocastCPU")
    register("cuda", "AutocastCUDA")


# Who looks at calls, or has no kernel of ours: the keys at which a twin hands over to its op.
_HANDED_OVER = (
    "Python",  # modes, tensor subclasses, fake tensors
    "AutocastCPU",
    "AutocastCUDA",
    "Tracer",
    "FuncTorchDynamicLayerBackMode",  # transforms outside another of torch.func
    "NestedTensorCPU",
    "NestedTensorCUDA",
    "CompositeExplicitAutograd",  # meta, sparse and all other devices
)


def twin(name: str, short: bool = False) -> Callable:
    """The op `name` below autograd, for calls that want no gradient: its twin, `_name`, has the same kernels but none of
    autograd. Modes, tensor subclasses, autocast, and devices that have no kernel are handed the op itself. short: the twin
    that takes the op's first arguments alone (ops/box.h).
    """
    twin_name = f"_{name}_short" if short else f"_{name}"
    op = bare(getattr(ops, name).default)

    def hand_over(*args):
        return call_below(op, args)

    _library.impl(twin_name, torch.library.fallthrough_kernel, "Autograd")
    for key in _HANDED_OVER:
        _library.impl(twin_name, hand_over, key)
    return bare(getattr(ops, twin_name).default)


def public(name: str, below: Callable) -> Callable:
    """The op for public functions. Where nothing but its Autograd kernel would see a call that wants a gradient, that kernel
    is called here, and one that wants none goes past it to `below`, its twin: either spares the dispatcher a way into
    Python and back. A compiler that traces, torch.jit.trace, torch.func, autocast, modes and subclasses see the op, at once or from the twin.
    """
    op = getattr(ops, name).default
    twin_of_ours = f"{NAMESPACE}::_"

    def call(*args):
        if traced() or has_torch_function(args):
            refuse_number_gradients(name, args)
            return op(*args)
        try:
            if is_grad_enabled() and any_requires_grad(*args):
                refuse_number_gradients(name, args)
                return op(*args) if any_autocast() else _autograd_kernels[name](*args)
            return below(*args)
        except RuntimeError as error:  # an argument of a type that the schema does not take
            if not str(error).startswith(twin_of_ours):
                raise
        return op(*args)  # says so by the op's name

    return call


def flop_formula(*names: str) -> Callable:
    """Decorator: the FLOP formula of ops, for torch.utils.flop_counter, in place of an earlier import's."""
    packets = [getattr(ops, name) for name in names]
    for packet in packets:
        flop_counter.flop_registry.pop(packet, None)
    return flop_counter.register_flop_formula(packets)


def call_below(op: Callable, args: Sequence):
    """op(*args) below autograd."""
    guard = below_autograd()  # from here on; `with` would call into C++ twice more, 0.4 us
    try:
        return op(*args)
    finally:
        del guard


def needs_op(*args) -> bool:
    """Whether a compiler traces, or the Autograd kernel has anything to do but pass these on."""
    return traced() or (is_grad_enabled() and any_requires_grad(*args))


def traced() -> bool:
    """Whether a compiler, torch.jit.trace, forward mode or torch.func may look at the call."""
    return is_compiling() or forward_ad._current_level >= 0 or transforms_active() or jit_trace() is not None


def bare(op: torch._ops.OpOverload) -> Callable:
    """What op(...) calls, 0.4 us sooner; for kernels, since torch.compile traces op itself only."""
    return getattr(op._op, "__wrapped__", op._op)  # without the check of numbers


def apply_of(function: type[torch.autograd.Function]) -> Callable:
    """function.apply without 5 us of preparation for functorch, whose transforms it cannot serve."""
    apply = super(torch.autograd.Function, function).apply

    def call(*args):
        if transforms_active():
            return function.apply(*args)  # raises, and says what a transform needs
        return apply(*args)

    return call


class _NoBackward(torch.autograd.Function):
    """An op whose results have no gradient; torch by itself would pass zeros, silently."""

    @staticmethod
    def forward(ctx, op, message, *args):
        ctx.message = message
        return call_below(op, args)

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(ctx.message)


def refuse_backward(name: str, reason: str) -> None:
    """The Autograd kernel of an op that runs it and raises NotImplementedError in backward."""
    op = bare(getattr(ops, name).default)
    apply = apply_of(_NoBackward)
    message = f"{NAMESPACE}::{reason}"

    @autograd(name)
    def kernel(*args):
        if is_grad_enabled() and any_requires_grad(*args):
            return apply(op, message, *args)
        return call_below(op, args)
