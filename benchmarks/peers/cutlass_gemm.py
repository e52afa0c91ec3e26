# SPDX-License-Identifier: BSD-3-Clause
"""a @ b by cutlass_gemm.cu, as build/peers/libcutlass_gemm.so.

It is compiled at the first call (half a minute), if nvcc and the wheel nvidia-cutlass, which has
the headers, are there. A library that was compiled before is used again.
"""

import ctypes
import os
import shutil
import subprocess
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
BUILD = Path(os.environ.get("GPUKERN_BUILD_DIR", HERE.parent.parent / "build"))
LIBRARY = BUILD / "peers" / "libcutlass_gemm.so"


def headers() -> Path | None:
    """CUTLASS's own tree in the wheel nvidia-cutlass."""
    spec = find_spec("cutlass_library")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / "source" / "include" / "cute" / "tensor.hpp").exists():
            return Path(folder) / "source"
    return None


def missing() -> str:
    """Why it is not available here; empty if it is."""
    if LIBRARY.exists():
        return ""
    lacks = [
        name
        for name, there in (("nvcc", shutil.which("nvcc")), ("nvidia-cutlass", headers()))
        if not there
    ]
    return f"{LIBRARY.name} is not built, and there is no {' and no '.join(lacks)}" if lacks else ""


@cache
def library() -> ctypes.CDLL:
    if why := missing():
        raise OSError(f"cutlass_gemm: {why}")
    if not LIBRARY.exists():
        LIBRARY.parent.mkdir(parents=True, exist_ok=True)
        options = [
            "-std=c++17",
            "-O3",
            "-DNDEBUG",
            "-shared",
            "-Xcompiler",
            "-fPIC",
            "--expt-relaxed-constexpr",
        ]
        options += ["-gencode=arch=compute_90a,code=sm_90a"]
        options += [f"-I{headers() / folder}" for folder in ("include", "tools/util/include")]
        subprocess.run(["nvcc", *options, "-o", LIBRARY, HERE / "cutlass_gemm.cu"], check=True)
    lib = ctypes.CDLL(str(LIBRARY))
    lib.cutlass_gemm_workspace_bytes.restype = ctypes.c_size_t
    lib.cutlass_gemm_workspace_bytes.argtypes = 3 * [ctypes.c_int]
    lib.cutlass_gemm.argtypes = [
        *(3 * [ctypes.c_void_p]),
        *(3 * [ctypes.c_int]),
        *(2 * [ctypes.c_void_p]),
    ]
    return lib


def gemm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] @ b [K, N] in bfloat16, dense rows, K and N multiples of 8."""
    (m, k), n = a.shape, b.shape[1]
    out = torch.empty(m, n, dtype=a.dtype, device=a.device)
    lib = library()
    workspace = torch.empty(
        lib.cutlass_gemm_workspace_bytes(m, n, k), dtype=torch.uint8, device=a.device
    )
    pointers = [x.data_ptr() for x in (a, b, out)]
    stream = torch.cuda.current_stream().cuda_stream
    status = lib.cutlass_gemm(*pointers, m, n, k, workspace.data_ptr() or None, stream)
    if status:
        raise RuntimeError(f"cutlass_gemm: CUTLASS answers status {status} to {m} x {n} x {k}")
    return out
