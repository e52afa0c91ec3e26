# SPDX-License-Identifier: BSD-3-Clause
"""Loads the compiled library, and binds the parts of torch that every call asks for its state."""

import contextlib
import os
from collections.abc import Iterator

import torch
from torch.autograd import forward_ad

# The GPUKERN_NAMESPACE of the C++ build; the two must agree.
NAMESPACE = "gpukern"
FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "libgpukern_torch.so")
OLDEST_TORCH = (2, 10)


def _mapped_copies() -> list[str]:
    """The loaded files with our library's name; outside Linux only those that torch loaded."""
    paths = set(torch.ops.loaded_libraries)
    try:
        with open("/proc/self/maps") as maps:
            paths.update(line.split(maxsplit=5)[5].strip() for line in maps if line.count("/"))
    except OSError:
        pass
    return sorted(p for p in paths if os.path.basename(p) == os.path.basename(FILE))


def _load() -> None:
    """Loads the library once. Every failure raises an ImportError of one line that says what to
    do."""
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
        # A second definition of the namespace would abort the interpreter.
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
library = torch.library.Library(NAMESPACE, "FRAGMENT")


def _replace_earlier_import() -> None:
    """Removes what an earlier import of the package registered from Python.

    If the package is removed from sys.modules and imported again, the compiled library stays
    loaded, with the earlier registrations. Functions of the earlier import then use the new
    registrations.
    """
    kept = "_registered_from_python"  # an attribute of `ops`, which outlives sys.modules
    earlier = vars(ops).get(kept)
    if earlier is not None:
        earlier._destroy()
    setattr(ops, kept, library)


_replace_earlier_import()

# Bound once, because every call would pay for the attribute lookups.
below_autograd = torch._C._AutoDispatchBelowAutograd
any_requires_grad = torch._C._any_requires_grad
is_grad_enabled = torch.is_grad_enabled
is_compiling = torch.compiler.is_compiling
is_dynamo_compiling = torch.compiler.is_dynamo_compiling
are_deterministic = torch._C._get_deterministic_algorithms
transforms_active = torch._C._are_functorch_transforms_active
has_torch_function = torch._C._has_torch_function  # an argument's, or a mode's
jit_trace = torch._C._get_tracing_state  # None outside torch.jit.trace
any_autocast = torch._C._is_any_autocast_enabled
_KeySet, _Key = torch._C.DispatchKeySet, torch._C.DispatchKey
_AUTOCAST_KEYS = _KeySet(_Key.AutocastCPU) | _KeySet(_Key.AutocastCUDA)


def below_autocast() -> torch._C._ExcludeDispatchKeyGuard:
    """Context without autocast's casts, for Autocast kernels and for backward, whose dtypes are
    fixed."""
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS)


_MODE_KEYS = _KeySet(_Key.Python) | _KeySet(_Key.PythonTLSSnapshot)


@contextlib.contextmanager
def below_modes() -> Iterator[None]:
    """Context below torch's modes and autograd: an op's kernel is called directly, even with a
    compiler's fake tensors."""
    below, without = below_autograd(), torch._C._ExcludeDispatchKeyGuard(_MODE_KEYS)
    try:
        with without:
            yield
    finally:
        del below


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    """A bool tensor as uint8, without a copy except under torch.func: vmap of torch 2.10 and 2.11
    cannot view a dtype."""
    if not is_compiling() and transforms_active():
        return x.to(torch.uint8)
    return x.view(torch.uint8)


def traced() -> bool:
    """Whether a compiler, torch.jit.trace, forward-mode AD or torch.func may observe the call."""
    return (
        is_compiling()
        or forward_ad._current_level >= 0
        or transforms_active()
        or jit_trace() is not None
    )
