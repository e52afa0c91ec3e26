# SPDX-License-Identifier: BSD-3-Clause
"""The facts of ``gpukern info`` (what is installed) and the checks of ``gpukern doctor`` (what
works)."""

import importlib.metadata
import json
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import __version__, check_errors, flash_attn, gemm, reference
from .._library import FILE, NAMESPACE, ops
from ..tuning import cache

OLDEST_CUDA = (8, 0)


def facts() -> dict[str, Any]:
    """The facts of this installation, in types that JSON has."""
    try:
        isa, reason = ops.cpu_isa.default(), ops.cpu_isa_reason.default()
    except RuntimeError as error:  # GPUKERN_CPU names an instruction set that this machine lacks
        isa, reason = str(error), ""
    devices = []
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            capability = ".".join(map(str, torch.cuda.get_device_capability(i)))
            devices.append(
                {
                    "device": f"cuda:{i}",
                    "name": torch.cuda.get_device_name(i),
                    "capability": capability,
                }
            )
    return {
        "gpukern": __version__,
        "library": FILE,
        "ops": f"torch.ops.{NAMESPACE}",
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "cpu_isa": isa,
        "cpu_isa_reason": reason,
        "cpu_isas": ops.cpu_isas.default().split(","),
        "threads": torch.get_num_threads(),
        "cuda_kernels": [name for name in ops.cuda_kernels.default().split(",") if name],
        "cuda_devices": devices,
    }


class Check(NamedTuple):
    """The result of one check.

    Attributes:
        name: what was checked.
        ok: whether it works; None if it is missing and nothing needs it.
        found: what was found.
        todo: what the user can do about it.
    """

    name: str
    ok: bool | None
    found: str
    todo: str = ""


def checks() -> Iterator[Check]:
    """Runs all checks. Small calls are compared with the reference."""
    known = facts()
    yield Check("library", True, f"gpukern {__version__}, {FILE}")
    try:
        yield Check("cpu", True, f"{ops.cpu_isa.default()} of {', '.join(known['cpu_isas'])}")
    except RuntimeError as error:
        yield Check(
            "cpu", False, str(error), "unset GPUKERN_CPU, or name one that this machine has"
        )
        return
    yield _runs("cpu")
    yield from _cuda(known)
    yield _tuned(bool(known["cuda_kernels"] and known["cuda_devices"]))
    yield _compiler()
    for package, what in (
        ("transformers", 'attn_implementation="gpukern"'),
        ("triton", "torch.compile on CUDA"),
        ("vllm", "--attention-backend GPUKERN"),
    ):
        if package != "transformers" and not (known["cuda_kernels"] and known["torch_cuda"]):
            continue  # this build cannot use it
        try:
            yield Check(package, True, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield Check(package, None, "not installed", f"pip install {package}, for {what}")


def _runs(device: str) -> Check:
    name = f"calls on {device}"
    try:
        error = max(_errors(torch.device(device)))
        check_errors()
    except Exception as problem:  # the user must see it, whatever it is
        return Check(
            name,
            False,
            f"{type(problem).__name__}: {problem}",
            "report this with the output of `gpukern info`",
        )
    if not error < 1e-4:
        return Check(
            name,
            False,
            f"results are wrong by {error:.1e}",
            "report this with the output of `gpukern info`",
        )
    return Check(
        name,
        True,
        f"gemm and flash_attn, forward and backward, within {error:.0e} of the reference",
    )


def _errors(device: torch.device) -> Iterator[float]:
    gen = torch.Generator().manual_seed(0)

    def difference(ours: Callable, theirs: Callable, *shapes: tuple[int, ...]) -> Iterator[float]:
        inputs = [torch.randn(shape, generator=gen, dtype=torch.float64) for shape in shapes]
        mine = [x.float().to(device).requires_grad_() for x in inputs]
        exact = [x.float().double().requires_grad_() for x in inputs]
        results = []
        for call, xs in ((ours, mine), (theirs, exact)):
            out = call(*xs)
            results.append([out, *torch.autograd.grad(out.sum(), xs)])
        for got, ref in zip(*results):
            yield ((got.cpu().double() - ref).abs().max() / ref.abs().max()).item()

    yield from difference(
        lambda a, b: gemm(a, b, activation="silu"),
        lambda a, b: reference.gemm(a, b, activation="silu"),
        (65, 72),
        (72, 40),
    )
    yield from difference(
        lambda *x: flash_attn(*x, is_causal=True),
        lambda *x: reference.flash_attn(*x, is_causal=True),
        *[(1, 2, 70, 32)] * 3,
    )


def _cuda(known: dict[str, Any]) -> Iterator[Check]:
    kernels, devices = known["cuda_kernels"], known["cuda_devices"]
    if not kernels:
        todo = "to use a GPU, build with nvcc (CUDA 12.8 or later) on the path: GPUKERN_CUDA=1 pip install ."
        yield Check("cuda", False if devices else None, "this build has no CUDA kernels", todo)
        return
    if not devices:
        if torch.version.cuda is None:
            found, todo = (
                f"torch {torch.__version__} is built without CUDA",
                "install a CUDA build of torch to use a GPU",
            )
        else:
            found, todo = (
                f"torch {torch.__version__} finds no CUDA device",
                "see nvidia-smi, CUDA_VISIBLE_DEVICES, the driver",
            )
        yield Check("cuda", None, f"{len(kernels)} kernel instances; {found}", todo)
        return
    yield Check("cuda", True, f"{len(kernels)} kernel instances for {len(devices)} devices")
    for device in devices:
        if tuple(map(int, device["capability"].split("."))) < OLDEST_CUDA:
            found = f"{device['name']}, compute capability {device['capability']}"
            yield Check(
                device["device"],
                False,
                found,
                "gpukern's kernels begin at 8.0 (Ampere); use another device or the CPU",
            )
        else:
            yield _runs(device["device"])


def _tuned(can_tune: bool) -> Check:
    path = cache.default_path()
    if path is None:
        return Check("tuned gemms", None, "GPUKERN_TUNED is off")
    if not path.exists():
        return Check(
            "tuned gemms",
            None,
            f"{path} does not exist",
            "gpukern tune gemm --shapes ..., where the default is slow" if can_tune else "",
        )
    devices, problem = cache.read(path)
    if problem:
        return Check("tuned gemms", False, f"{path}: {problem}", f"remove {path}, and tune again")
    return Check("tuned gemms", True, f"{path}: {', '.join(devices) or 'no device'}")


def _compiler() -> Check:
    """Checks what torch.compile needs on the CPU: a C++ compiler and Python.h."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not any(map(shutil.which, ("g++", "clang++", "c++"))):
        return Check(
            "torch.compile",
            None,
            "no C++ compiler on the path",
            "apt-get install g++, to compile for the CPU",
        )
    if not header.exists():
        return Check(
            "torch.compile",
            None,
            f"{header} does not exist",
            "apt-get install python3-dev, to compile for the CPU",
        )
    return Check("torch.compile", True, "a C++ compiler and Python.h")


def report(as_json: bool) -> int:
    """Prints every check and returns 1 if one failed, otherwise 0."""
    done = []
    for check in checks():
        done.append(check)
        if not as_json:
            mark = {True: "ok", False: "FAILED", None: "-"}[check.ok]
            print(f"{mark:6}  {check.name}: {check.found}", flush=True)
            if check.todo and not check.ok:
                print(f"        to do: {check.todo}")
    failed = sum(check.ok is False for check in done)
    if as_json:
        print(json.dumps([check._asdict() for check in done], indent=2))
    else:
        print("all checks passed" if not failed else f"{failed} of {len(done)} checks failed")
    return int(failed > 0)
