# SPDX-License-Identifier: BSD-3-Clause
"""a + b in CuTe DSL, an element a thread and 16 bytes a thread, to be read beside
learn/patterns/vector_add.cu. Needs nvidia-cutlass-dsl and a GPU; a kernel is compiled when a dtype
first comes."""

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings.driver import CUstream
from cutlass.cute.runtime import from_dlpack

THREADS = 256


@cute.kernel
def add_kernel(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor):
    i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    if i < cute.size(out):
        out[i] = a[i] + b[i]


@cute.jit
def add_each(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, stream: CUstream):
    blocks = cute.ceil_div(cute.size(out), THREADS)
    add_kernel(a, b, out).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)


@cute.kernel
def add_wide_kernel(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor):
    """Tensors ((elements of 16 bytes), (so many)): a thread takes one column."""
    i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    if i < cute.size(out, mode=[1]):
        out[None, i].store(a[None, i].load() + b[None, i].load())


@cute.jit
def add_wide(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, stream: CUstream):
    wide = cutlass.const_expr(128 // out.element_type.width)
    a, b, out = (cute.zipped_divide(x, (wide,)) for x in (a, b, out))
    blocks = cute.ceil_div(cute.size(out, mode=[1]), THREADS)
    add_wide_kernel(a, b, out).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)


COMPILED = {}


def call(kernel, align: int, *tensors: torch.Tensor) -> None:
    views = [
        from_dlpack(x, assumed_align=align).mark_layout_dynamic(leading_dim=0) for x in tensors
    ]
    stream = CUstream(torch.cuda.current_stream().cuda_stream)
    key = kernel, tensors[0].dtype
    if key not in COMPILED:
        COMPILED[key] = cute.compile(kernel, *views, stream)
    COMPILED[key](*views, stream)


def add(a: torch.Tensor, b: torch.Tensor, vectorised: bool = True) -> torch.Tensor:
    """a + b of one shape and dtype. vectorised: 16 bytes a thread, and the rest by elements."""
    shape, a, b = a.shape, a.contiguous().view(-1), b.contiguous().view(-1)
    out = torch.empty_like(a)
    whole = a.numel() // (16 // a.element_size()) * (16 // a.element_size()) if vectorised else 0
    if whole:
        call(add_wide, 16, *(x[:whole] for x in (a, b, out)))
    if whole < a.numel():
        call(add_each, a.element_size(), *(x[whole:] for x in (a, b, out)))
    return out.view(shape)
