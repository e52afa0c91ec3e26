# SPDX-License-Identifier: BSD-3-Clause
"""The gemm ladder from Python: calls libgpukern_ladder.so, which `make learn` builds.

`python learn/benchmarks/ladder.py [SIZE [RUNG ..]]` calls each rung and torch.matmul once at SIZE
cubed, for a profiler or a sanitizer. Without RUNG it calls rungs 1 to 13. GPUKERN_BUILD_DIR names
another build folder.
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = Path(os.environ.get("GPUKERN_BUILD_DIR", ROOT / "build")) / "libgpukern_ladder.so"

F32 = (1, 2, 3, 4, 5, 14, 15)  # rungs that take float32: those without tensor cores


class _Rung(ctypes.Structure):
    """gk_ladder_rung"""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("change", ctypes.c_char_p),
        ("source", ctypes.c_char_p),
        ("predicted_tflops", ctypes.c_double),
        ("after", ctypes.c_int32),
        ("arch", ctypes.c_int32),
    ]


@dataclass(frozen=True)
class Rung:
    number: int
    name: str
    change: str
    source: str  # from the top of the tree
    predicted_tflops: float
    after: int  # the rung that this one stands behind; 0 for those that stand in order
    arch: int


@cache
def library() -> ctypes.CDLL:
    """Loads the library. Raises OSError if it is not built; the build needs both CUDA architectures
    and GPUKERN_BUILD_TESTS."""
    if not LIBRARY.exists():
        raise OSError(
            f"ladder: {LIBRARY} is not there; `make learn GPUKERN_CUDA=1` makes it where nvcc is"
        )
    lib = ctypes.CDLL(str(LIBRARY))
    sizes = 3 * [ctypes.c_int64]
    lib.gk_ladder_rungs.restype = ctypes.POINTER(_Rung)
    lib.gk_ladder_rungs.argtypes = [ctypes.POINTER(ctypes.c_int32)]
    lib.gk_ladder_workspace_bytes.restype = ctypes.c_size_t
    lib.gk_ladder_workspace_bytes.argtypes = [ctypes.c_int32, *sizes]
    lib.gk_ladder_gemm.restype = ctypes.c_int
    lib.gk_ladder_gemm.argtypes = [
        ctypes.c_int32,
        *(3 * [ctypes.c_void_p]),
        *sizes,
        *(2 * [ctypes.c_void_p]),
    ]
    lib.gk_ladder_gemm_f32.restype = ctypes.c_int
    lib.gk_ladder_gemm_f32.argtypes = [
        ctypes.c_int32,
        *(3 * [ctypes.c_void_p]),
        *sizes,
        ctypes.c_void_p,
    ]
    lib.gk_last_error.restype = ctypes.c_char_p
    return lib


def _file(source: str) -> str:
    """Path of a rung's source from the top of the tree: ladder/X.cu is in learn/, gemm/X.cu in
    csrc/cuda/product/."""
    return f"learn/{source}" if source.startswith("ladder/") else f"csrc/cuda/product/{source}"


def rungs() -> list[Rung]:
    count = ctypes.c_int32()
    found = library().gk_ladder_rungs(ctypes.byref(count))
    return [
        Rung(
            i + 1,
            r.name.decode(),
            r.change.decode(),
            _file(r.source.decode()),
            r.predicted_tflops,
            r.after,
            r.arch,
        )
        for i, r in enumerate(found[: count.value])
    ]


def gemm(rung: int, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a [M, K] @ b [K, N] by one rung, on torch's current stream. Operands are dense bfloat16, or
    float32 for the rungs of F32."""
    dtype = torch.float32 if a.dtype == torch.float32 else torch.bfloat16
    for name, x in (("a", a), ("b", b)) + ((("out", out),) if out is not None else ()):
        if x.dtype != dtype or x.dim() != 2 or not x.is_contiguous():
            raise ValueError(
                f"ladder: {name} is {x.dtype} of shape {tuple(x.shape)}; expected a dense {dtype} "
                f"matrix"
            )
    (m, k), n = a.shape, b.shape[1]
    if b.shape[0] != k or (out is not None and out.shape != (m, n)):
        raise ValueError(
            f"ladder: a {tuple(a.shape)}, b {tuple(b.shape)} and out do not fit each other"
        )
    lib = library()
    out = torch.empty(m, n, dtype=a.dtype, device=a.device) if out is None else out
    stream = torch.cuda.current_stream().cuda_stream if a.is_cuda else None
    pointers = [x.data_ptr() for x in (a, b, out)]
    if dtype == torch.float32:
        if lib.gk_ladder_gemm_f32(rung, *pointers, m, n, k, stream):
            raise RuntimeError(lib.gk_last_error().decode())
        return out
    nbytes = lib.gk_ladder_workspace_bytes(rung, m, n, k)
    workspace = torch.empty(nbytes, dtype=torch.uint8, device=a.device) if nbytes else None
    at = workspace.data_ptr() if nbytes else None
    if lib.gk_ladder_gemm(rung, *pointers, m, n, k, at, stream):
        raise RuntimeError(lib.gk_last_error().decode())
    return out


def main(argv: list[str]) -> int:
    if not torch.cuda.is_available():
        raise SystemExit("ladder: torch finds no CUDA device")
    size, *numbers = map(int, argv or ["4096"])
    torch.manual_seed(0)
    a, b = (torch.randn(size, size, device="cuda").bfloat16() for _ in range(2))
    for number in numbers or [rung.number for rung in rungs() if rung.after == 0]:
        gemm(number, a, b)
    torch.matmul(a, b)
    torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
