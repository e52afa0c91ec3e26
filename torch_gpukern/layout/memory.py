# SPDX-License-Identifier: BSD-3-Clause
"""Tensors that own their memory, and the instructions by which one thread would copy between two
tensors, given the memory (registers, shared, global) of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .core import Layout, unflatten
from .swizzle import Swizzled, parse
from .tensor import MEMORIES, Tensor, as_tensor, plain

__all__ = ["CopyChoice", "choose_copy", "fragment_like", "make_tensor"]

WIDEST = 16  # bytes of one thread's access
CP_ASYNC = {
    4: "cp.async.ca.shared.global",
    8: "cp.async.ca.shared.global",
    16: "cp.async.cg.shared.global",
}
TYPES = {1: "b8", 2: "b16", 4: "b32", 8: "v2.b32", 16: "v4.b32"}


def make_tensor(
    layout: Layout | Swizzled | str, memory: str = "registers", dtype: Any = None
) -> Tensor:
    """A tensor over new memory, filled with 0: a torch tensor if dtype is given, otherwise a list.

    memory: "registers", "shared" or "global". With negative strides, the offset of coordinate 0 is
    such that the lowest offset is 0.
    """
    layout = parse(layout) if isinstance(layout, str) else layout
    lowest = layout.layout.lowest + layout.offset if isinstance(layout, Swizzled) else layout.lowest
    begin = max(-lowest, 0)
    length = max(Tensor(layout, offset=begin).offsets) + 1
    if dtype is None:
        data: Any = [0] * length
    else:
        import torch

        data = torch.zeros(length, dtype=dtype)
    return Tensor(layout, data, begin, memory)


def fragment_like(tensor: Tensor | Layout | Swizzled | str, dtype: Any = None) -> Tensor:
    """A tensor in registers for a part of a tensor. It has the part's shape and compact strides in
    the order of the part's strides. Stride 0 stays 0."""
    tensor = as_tensor(tensor)
    layout = plain(tensor)
    leaves = layout.leaves
    strides, before = [0] * len(leaves), 1
    for m in sorted(range(len(leaves)), key=lambda m: abs(leaves[m][1])):
        size, stride = leaves[m]
        if stride and size > 1:
            strides[m], before = before, before * size
    return make_tensor(
        Layout(layout.shape, unflatten(iter(strides), layout.shape)), "registers", dtype
    )


@dataclass(frozen=True)
class CopyChoice:
    """How one thread would copy: PTX instructions, bytes per access and number of accesses."""

    instructions: tuple[str, ...]
    bytes: int
    accesses: int

    def __str__(self) -> str:
        return f"{self.accesses} x {' + '.join(self.instructions)} ({self.bytes} bytes)"


def _elem_bytes(src: Tensor, dst: Tensor, given: int | None) -> int:
    sizes = {x.data.element_size() for x in (src, dst) if hasattr(x.data, "element_size")}
    if given is not None:
        sizes.add(given)
    if len(sizes) != 1:
        raise ValueError(
            f"choose_copy: elements have {sorted(sizes) or 'no'} bytes; give elem_bytes, one for "
            f"both"
        )
    return sizes.pop()


def _placed(tensor: Tensor, size: int) -> list[int]:
    """The elements' places, in elements from a multiple of 16 bytes. A torch tensor's own address
    and stride are included."""
    data = tensor.data
    if not hasattr(data, "data_ptr") or data.dim() != 1 or tensor.memory == "registers":
        return tensor.offsets
    first, step = data.data_ptr() % WIDEST // size, data.stride(0)
    return [first + o * step for o in tensor.offsets]


def _runs(src: list[int], dst: list[int], width: int) -> bool:
    """Whether the elements form aligned groups of `width` that are contiguous in both tensors, in
    the same order."""
    order = sorted(range(len(dst)), key=dst.__getitem__)
    for i in range(0, len(order), width):
        group = order[i : i + width]
        for offsets in (src, dst):
            first = offsets[group[0]]
            if first % width or [offsets[j] for j in group] != list(range(first, first + width)):
                return False
    return len(order) % width == 0


def choose_copy(
    src: Tensor, dst: Tensor, elem_bytes: int | None = None, arch: int = 90
) -> CopyChoice:
    """The instructions by which one thread would copy src to dst: the widest that both sides allow,
    up to 16 bytes.

    Both tensors must have a memory (`Tensor(..., memory=)`). Data are assumed to begin at a
    multiple of 16 bytes, unless they are a torch tensor, whose address is used. From global to
    shared memory, arch 80 and newer use cp.async for 4 bytes or more; otherwise a load and a store
    are used. Copies
    by several threads together are not considered: see `atoms.ldmatrix` and `tma_box`.

    Args:
        elem_bytes: bytes per element; needed if neither tensor has a torch tensor.
        arch: the compute capability times ten: 70, 80, 90, ..

    Raises:
        ValueError: a memory or elem_bytes is missing, or the sizes differ.

    >>> src, dst = Tensor("(8,4):(1,64)", memory="global"), Tensor("(8,4):(1,8)", memory="shared")
    >>> choose_copy(src, dst, elem_bytes=2)
    CopyChoice(instructions=('cp.async.cg.shared.global',), bytes=16, accesses=4)
    """
    for name, x in (("src", src), ("dst", dst)):
        if x.memory is None:
            raise ValueError(
                f"choose_copy: {name} = {x.layout} does not say its memory; expected "
                f"{', '.join(MEMORIES)}"
            )
    if src.size != dst.size:
        raise ValueError(
            f"choose_copy: {src.layout} has {src.size} elements, {dst.layout} has {dst.size}"
        )
    size = _elem_bytes(src, dst, elem_bytes)
    if size not in TYPES:
        raise ValueError(f"choose_copy: elements have {size} bytes; expected 1, 2, 4, 8 or 16")
    # Registers need no alignment of an address, but the values of an access must be in consecutive
    # registers.
    width, places = WIDEST // size, (_placed(src, size), _placed(dst, size))
    # between registers, a move takes two 8-bit values or a single wider one
    if src.memory == dst.memory == "registers":
        width = 2 if size == 1 else 1
    while width > 1 and not _runs(*places, width):
        width //= 2
    wide = width * size
    accesses = src.size // width
    if (src.memory, dst.memory) == ("global", "shared") and arch >= 80 and wide in CP_ASYNC:
        return CopyChoice((CP_ASYNC[wide],), wide, accesses)
    parts = []
    if src.memory != "registers":
        parts.append(f"ld.{src.memory}.{TYPES[wide]}")
    if dst.memory != "registers":
        parts.append(f"st.{dst.memory}.{TYPES[wide]}")
    if not parts:
        part = min(wide, 4)
        return CopyChoice((f"mov.{TYPES[max(part, 2)]}",), part, src.size * size // part)
    return CopyChoice(tuple(parts), wide, accesses)
