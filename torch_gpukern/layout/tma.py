# SPDX-License-Identifier: BSD-3-Clause
"""TMA boxes and WGMMA descriptors, derived from layouts and checked against the hardware's limits.

box = tma_box("(m=4096,k=1024):(1024,1)", {"m": 128, "k": 64}, elem_bytes=2, swizzle=128)
box.smem                                  # in shared memory: Sw<3,3,3> o 0 o (128,64):(64,1)
wgmma_descriptor(box.smem, elem_bytes=2)  # the descriptor with which wgmma reads it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .core import Layout, Refusal, as_layout
from .swizzle import Swizzle, Swizzled, parse

SPANS = (0, 32, 64, 128)  # bytes of a swizzled row; 0: none
MAX_SIZE, MAX_STRIDE_BYTES, MAX_BOX, MAX_STEP, MAX_DIMS = 1 << 32, 1 << 40, 256, 8, 5


def span_swizzle(span: int, elem_bytes: int = 1) -> Swizzle:
    """TMA's swizzle of rows of 32, 64 or 128 bytes (0: none), on offsets of elements."""
    if span not in SPANS:
        raise ValueError(f"swizzle is {span} bytes; expected 0, 32, 64 or 128")
    return Swizzle(max(SPANS.index(span), 0), 4, 3).recast(8, 8 * elem_bytes)


@dataclass(frozen=True)
class TmaBox:
    """The arguments of cuTensorMapEncodeTiled, and the box's layout in shared memory. Dimension 0
    is the one of stride 1.

    Attributes:
        sizes: the tensor's elements in each dimension.
        strides_bytes: the strides of dimensions 1 and up, in bytes.
        box: the box's elements in each dimension.
        steps: element strides; a box of b elements with step s copies ceil(b / s) of them.
        order: the tensor's mode that each dimension is.
        swizzle: 0, 32, 64 or 128 bytes.
        elem_bytes: bytes per element.
        smem: coordinate among the copied elements, in the tensor's modes -> offset in elements.
    """

    sizes: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...]
    order: tuple[int, ...]
    swizzle: int
    elem_bytes: int
    smem: Layout | Swizzled

    @property
    def bytes(self) -> int:
        """The bytes of one copy, which the mbarrier must expect. They do not change if the box
        reaches beyond the tensor."""
        n = self.elem_bytes
        for b, step in zip(self.box, self.steps):
            n *= -(-b // step)
        return n

    def __str__(self) -> str:
        rows = [
            ("dimensions", self.sizes),
            ("strides, bytes", self.strides_bytes),
            ("box", self.box),
            ("element strides", self.steps),
            ("swizzle", f"{self.swizzle} bytes" if self.swizzle else "none"),
            ("bytes a copy", self.bytes),
            ("shared memory", self.smem),
        ]
        return "\n".join(f"{name:16}{value}" for name, value in rows)


def tma_box(
    tensor: Layout | str,
    box: Sequence[int] | dict[str, int],
    *,
    elem_bytes: int,
    swizzle: int = 0,
    base: int = 0,
    steps: Sequence[int] | None = None,
) -> TmaBox:
    """The tensor map of a tensor in global memory and a box of it.

    Args:
        tensor: the tensor's layout in elements: at most 5 modes, without nesting, one of stride 1.
        box: the elements of each mode that the box spans, in the tensor's order or by name; at most
            256.
        elem_bytes: bytes per element.
        swizzle: 0, 32, 64 or 128 bytes; the box's row must not be longer.
        base: the address of the tensor's first element.
        steps: the box takes every steps[i]-th element of mode i; at most 8, and 1 for the mode of
            stride 1.

    Raises:
        Refusal: TMA cannot describe the tensor or box; the text names the mode.
    """
    tensor = as_layout(tensor)
    modes = tensor.modes
    rank = len(modes)
    if isinstance(box, dict):
        box = [box.get(name, 1) for name in tensor.names] if tensor.names else []
    steps = [1] * rank if steps is None else list(steps)
    if len(box) != rank or len(steps) != rank:
        raise ValueError(
            f"tma_box: {tensor} has {rank} modes; box has {len(box)} entries, steps {len(steps)}"
        )
    if not 1 <= rank <= MAX_DIMS or any(isinstance(mode.shape, tuple) for mode in modes):
        raise Refusal("tma_box", "tensor", tensor, None, "TMA takes 1 to 5 modes without nesting")
    if base % 16:
        raise Refusal(
            "tma_box",
            "tensor",
            tensor,
            None,
            f"it begins at byte {base}, which must be a multiple of 16",
        )
    inner = max(
        (m for m in range(rank) if modes[m].stride == 1), key=lambda m: modes[m].size, default=None
    )
    if inner is None:
        raise Refusal("tma_box", "tensor", tensor, None, "no mode has stride 1")
    if steps[inner] != 1:
        why = (
            f"its element stride is {steps[inner]}; TMA takes every element of the mode of stride 1"
        )
        raise Refusal("tma_box", "tensor", tensor, inner, why)
    order = (inner, *(m for m in range(rank) if m != inner))
    for m in order:
        n, stride = modes[m].shape, modes[m].stride * elem_bytes
        if n > MAX_SIZE:
            raise Refusal("tma_box", "tensor", tensor, m, f"its size is {n}; at most 2^32")
        # TMA also checks the stride of a mode of size 1
        if m != inner and (stride < (n > 1) or stride % 16 or stride >= MAX_STRIDE_BYTES):
            raise Refusal(
                "tma_box",
                "tensor",
                tensor,
                m,
                f"its stride is {stride} bytes; a multiple of 16 below 2^40",
            )
        if not 1 <= box[m] <= MAX_BOX:
            raise Refusal(
                "tma_box", "tensor", tensor, m, f"the box takes {box[m]} of it; 1 to {MAX_BOX}"
            )
        if not 1 <= steps[m] <= MAX_STEP:
            raise Refusal(
                "tma_box", "tensor", tensor, m, f"its element stride is {steps[m]}; 1 to {MAX_STEP}"
            )
    row_bytes = box[inner] * elem_bytes
    if row_bytes % 16:
        raise Refusal(
            "tma_box",
            "tensor",
            tensor,
            inner,
            f"the box's row is {row_bytes} bytes; a multiple of 16",
        )
    pattern = span_swizzle(swizzle, elem_bytes)
    if swizzle and row_bytes > swizzle:
        why = f"the box's row is {row_bytes} bytes; with this swizzle at most {swizzle}: take several boxes"
        raise Refusal("tma_box", "tensor", tensor, inner, why)
    brought = [-(-b // step) for b, step in zip(box, steps)]
    strides, before = [0] * rank, 1
    for m in order:
        strides[m] = before
        before *= brought[m]
    smem: Layout | Swizzled = Layout(tuple(brought), tuple(strides), tensor.names)
    if swizzle:
        smem = Swizzled(pattern, smem)
    return TmaBox(
        sizes=tuple(modes[m].shape for m in order),
        strides_bytes=tuple(modes[m].stride * elem_bytes for m in order[1:]),
        box=tuple(box[m] for m in order),
        steps=tuple(steps[m] for m in order),
        order=order,
        swizzle=swizzle,
        elem_bytes=elem_bytes,
        smem=smem,
    )


# ---- WGMMA descriptors ---------------------------------------------------------------------------

# Bits 62-63 of a descriptor.
_SWIZZLE_CODE = {0: 0, 128: 1, 64: 2, 32: 3}


@dataclass(frozen=True)
class WgmmaDescriptor:
    """How wgmma finds an operand in shared memory.

    Attributes:
        major: "k" if k is contiguous, "mn" if m or n is.
        swizzle: 0, 32, 64 or 128 bytes.
        leading, stride: byte distances. K-major: stride is the distance to the next 8 rows;
            leading, used without a swizzle, that to the next 16 bytes of k. MN-major with a
            swizzle: leading is the distance to the next swizzled row of m or n, stride that to the
            next 8 of k. MN-major without a swizzle has the two exchanged.
        address: the byte address in shared memory.
    """

    major: str
    swizzle: int
    leading: int
    stride: int
    address: int = 0

    @property
    def bits(self) -> int:
        """The descriptor's 64 bits: address, leading and stride, each over 16, and the swizzle."""
        return (
            (self.address & 0x3FFFF) >> 4
            | (self.leading >> 4 & 0x3FFF) << 16
            | (self.stride >> 4 & 0x3FFF) << 32
            | _SWIZZLE_CODE[self.swizzle] << 62
        )

    @classmethod
    def of_bits(cls, bits: int, major: str = "k") -> WgmmaDescriptor:
        """The descriptor with these 64 bits."""
        spans = {code: span for span, code in _SWIZZLE_CODE.items()}
        fields = [(bits >> at & 0x3FFF) << 4 for at in (16, 32, 0)]
        return cls(major, spans[bits >> 62 & 3], *fields)

    def __str__(self) -> str:
        span = f"{self.swizzle}-byte swizzle" if self.swizzle else "no swizzle"
        return (
            f"{self.bits:#018x}: {self.major.upper()}-major, {span}, leading {self.leading}, "
            f"stride {self.stride} bytes"
        )


def _canonical(
    major: str, span: int, leading: int, stride: int, unit: int, mn: int, k: int, elem_bytes: int
) -> int:
    """The byte offset, before the swizzle, at which wgmma reads element (mn, k). unit: elements in
    16 bytes."""
    per_row = (span or 16) // elem_bytes
    if major == "k":
        if span:
            return mn // 8 * stride + mn % 8 * span + k * elem_bytes
        return mn // 8 * stride + mn % 8 * 16 + k // unit * leading + k % unit * elem_bytes
    chunk, row = mn // per_row, mn % per_row * elem_bytes
    if span:
        return chunk * leading + k // 8 * stride + k % 8 * span + row
    return chunk * stride + k // 8 * leading + k % 8 * 16 + row


def wgmma_descriptor(
    operand: Layout | Swizzled | str, *, elem_bytes: int = 2, address: int = 0, k: int | None = None
) -> WgmmaDescriptor:
    """The descriptor of an operand (m or n, k) in shared memory.

    Args:
        operand: its layout in elements.
        elem_bytes: bytes per element.
        address: its byte address in shared memory.
        k: the elements of k that one instruction reads; by default 32 bytes.

    Every element that the instruction reads is checked.

    Raises:
        Refusal: no descriptor describes the layout; the text names an element that wgmma would read
            elsewhere.
    """
    if isinstance(operand, str):
        operand = parse(operand)
    inner = operand.layout if isinstance(operand, Swizzled) else operand
    if inner.rank != 2:
        raise Refusal(
            "wgmma_descriptor",
            "operand",
            inner,
            None,
            f"it has {inner.rank} modes; expected (m or n, k)",
        )
    span = _span_of(operand, elem_bytes)
    mn_size, k_size = inner[0].size, inner[1].size
    unit, k = 16 // elem_bytes, k or 32 // elem_bytes
    if k_size < k:
        raise Refusal(
            "wgmma_descriptor",
            "operand",
            inner,
            None,
            f"it has {k_size} of k; one instruction reads {k}",
        )

    def byte(mn: int, at_k: int) -> int:
        return inner(mn, at_k) * elem_bytes

    per_row = (span or 16) // elem_bytes
    if inner(0, 1) == 1:
        major = "k"
        stride = byte(8, 0) if mn_size > 8 else 8 * (span or 16)
        leading = 16 if span or k <= unit else byte(0, unit)
    elif mn_size > 1 and inner(1, 0) == 1:
        major = "mn"
        by_k = byte(0, 8) if k > 8 else 8 * (span or 16)
        by_mn = byte(per_row, 0) if mn_size > per_row else 16
        leading, stride = (by_mn, by_k) if span else (by_k, by_mn)
    else:
        raise Refusal(
            "wgmma_descriptor", "operand", inner, None, "neither m or n nor k has stride 1"
        )
    if major == "mn" and elem_bytes != 2:
        raise Refusal(
            "wgmma_descriptor", "operand", inner, None, "only elements of 16 bits may lie MN-major"
        )
    for at_k in range(k):
        for mn in range(mn_size):
            want = _canonical(major, span, leading, stride, unit, mn, at_k, elem_bytes)
            if byte(mn, at_k) != want:
                why = (
                    f"element ({mn},{at_k}) lies at byte {byte(mn, at_k)}; with "
                    f"{major.upper()}-major, leading {leading}, stride {stride} wgmma reads byte "
                    f"{want}"
                )
                raise Refusal("wgmma_descriptor", "operand", inner, None, why)
    return WgmmaDescriptor(major, span, leading, stride, address)


def _span_of(operand: Layout | Swizzled, elem_bytes: int) -> int:
    if isinstance(operand, Layout):
        return 0
    for span in SPANS:
        if operand.swizzle == span_swizzle(span, elem_bytes) or (
            span == 0 and operand.swizzle.bits == 0
        ):
            return span
    known = ", ".join(str(span_swizzle(span, elem_bytes)) for span in SPANS[1:])
    raise Refusal(
        "wgmma_descriptor",
        "operand",
        operand.layout,
        None,
        f"{operand.swizzle} is none of wgmma's: {known}",
    )
