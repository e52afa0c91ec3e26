# SPDX-License-Identifier: BSD-3-Clause
"""Which memory a tensor lies in, tensors that own theirs, and the instruction that a copy between
two of them would be."""

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
    """A tensor over memory of its own, all 0: a list, or where there is a dtype a torch tensor of
    it.

    memory: "registers", "shared" or "global". Strides below 0 begin as far up as they reach down.
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
    """Registers for a part of a tensor: its shape, compact, what lies nearest in it nearest here
    too; stride 0 stays 0."""
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
    """What copy(src, dst) would be for one thread: the instructions of PTX, bytes of an access, and
    how many accesses."""

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
    """Where its elements lie, counted from a multiple of 16 bytes: a torch tensor knows where its
    data begin, and their step."""
    data = tensor.data
    if not hasattr(data, "data_ptr") or data.dim() != 1 or tensor.memory == "registers":
        return tensor.offsets
    first, step = data.data_ptr() % WIDEST // size, data.stride(0)
    return [first + o * step for o in tensor.offsets]


def _runs(src: list[int], dst: list[int], width: int) -> bool:
    """Whether the elements fall into aligned groups of `width` that lie side by side in both, in
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

    Both say their memory (`Tensor(..., memory=)`). A tensor's data begin at a multiple of 16 bytes,
    or where its torch tensor does; swizzles, offsets and strides decide from there. From global to
    shared memory it is cp.async from arch 80 on and from 4 bytes on, else a load and a store.
    Copies by several threads together are none of these: see `atoms.ldmatrix`, `tma_box`.

    Args:
        elem_bytes: needed where no side has a torch tensor.
        arch: 70, 80, 90, ..: the compute capability times ten.

    >>> choose_copy(Tensor("(8,4):(1,64)", memory="global"), Tensor("(8,4):(1,8)", memory="shared"), elem_bytes=2)
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
    # a register has any place; what counts is that the values of an access lie in registers side by
    # side
    width, places = WIDEST // size, (_placed(src, size), _placed(dst, size))
    # a register is moved whole, and values of 16 bits one by one
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
