# SPDX-License-Identifier: BSD-3-Clause
"""Tensors over layouts, and reference algorithms on them.

A tensor is a layout, an offset and, optionally, data: a list or a torch tensor that offsets index.
The algorithms (copy, axpby, transform, fold, gemm) are slow definitions for comparison with
kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .algebra import Tiler
from .core import Coord, IntTuple, Layout, Refusal, flatten, text_of, unflatten
from .swizzle import OfLayout, Swizzled, parse

MEMORIES = ("registers", "shared", "global")


class Tensor(OfLayout):
    """A layout over data.

    Args:
        layout: a layout, its text, or a swizzled layout.
        data: what the offsets index: a list, a torch tensor of one dimension, or None.
        offset: the offset of coordinate 0.
        memory: "registers", "shared", "global" or None. Slices and tiles inherit it, and
            `choose_copy` reads it.

    `t[1, 2]` is an element, or its offset if there are no data. `t[None, 2]` is a slice that shares
    the data.
    """

    def __init__(
        self,
        layout: Layout | Swizzled | str,
        data: Any = None,
        offset: int = 0,
        memory: str | None = None,
    ) -> None:
        layout = parse(layout) if isinstance(layout, str) else layout
        if not isinstance(layout, (Layout, Swizzled)):
            raise TypeError(
                f"Tensor: layout is {layout!r}; expected a layout, swizzled or not, or its text"
            )
        if memory is not None and memory not in MEMORIES:
            raise ValueError(f"Tensor: memory is {memory!r}; expected {', '.join(MEMORIES)}")
        self.layout, self.data, self.offset, self.memory = layout, data, offset, memory
        # a swizzle applies to addresses, so the offset is added before it
        if isinstance(layout, Swizzled) and offset:
            self.layout, self.offset = (
                Swizzled(layout.swizzle, layout.layout, layout.offset + offset),
                0,
            )

    @classmethod
    def of(cls, tensor: Any) -> Tensor:
        """A tensor over a torch tensor, or over any array that supports DLPack (NumPy, JAX, CuPy).
        The layout follows from its shape and strides.

        It shares the array's memory. Negative strides (NumPy) are kept; the offset is then that of
        coordinate 0. Raises ValueError for an array without elements.
        """
        back: list[int] = []
        if not hasattr(tensor, "as_strided"):
            import torch

            # torch aborts the process on a negative stride, so reverse those dimensions first
            back = [m for m, step in enumerate(getattr(tensor, "strides", None) or ()) if step < 0]
            if back:
                tensor = tensor[
                    tuple(
                        slice(None, None, -1 if m in back else 1) for m in range(len(tensor.shape))
                    )
                ]
            tensor = torch.from_dlpack(tensor)
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        if 0 in shape:
            raise ValueError(
                f"Tensor.of: shape is {shape}; a layout has 1 or more elements in each mode"
            )
        reach = 1 + sum((s - 1) * d for s, d in zip(shape, stride))
        data = tensor.detach().as_strided((reach,), (1,))
        if not shape:
            return cls(Layout(1, 0), data)
        stride = tuple(-d if m in back else d for m, d in enumerate(stride))
        return cls(Layout(shape, stride), data, sum((shape[m] - 1) * -stride[m] for m in back))

    def view(self) -> Any:
        """A torch tensor over the same memory, with one dimension for each leaf of the layout.

        Raises Refusal for a swizzle or a negative stride, which torch cannot express, TypeError if
        the data are no torch tensor, and IndexError if the layout leaves the data.
        """
        data = self._need_data("view")
        if not hasattr(data, "as_strided"):
            raise TypeError(f"view: the data are {type(data).__name__}; expected a torch tensor")
        if data.dim() != 1:
            raise ValueError(
                f"view: the data have {data.dim()} dimensions; offsets index one (Tensor.of takes "
                f"more)"
            )
        if isinstance(self.layout, Swizzled):
            raise Refusal(
                "view",
                "layout",
                self.layout.layout,
                None,
                f"{self.layout.swizzle} is no sum of strides",
            )
        back = next((m for m, (_, d) in enumerate(self.layout.leaves) if d < 0), None)
        if back is not None:
            raise Refusal("view", "layout", self.layout, back, "torch has no strides below 0")
        first, last = self.offset, self.offset + self.layout.cosize - 1
        if first < 0 or last >= data.numel():
            reached = first if first < 0 else last
            raise IndexError(
                f"view: {self.layout} reaches offset {reached} of data with {data.numel()} elements"
            )
        step = data.stride(0)
        shape, stride = (
            [s for s, _ in self.layout.leaves],
            [d * step for _, d in self.layout.leaves],
        )
        return data.as_strided(shape, stride, data.storage_offset() + first * step)

    def __dlpack__(self, **options: Any) -> Any:
        """`view()` for libraries with DLPack: numpy.from_dlpack(t), jax.dlpack.from_dlpack(t)."""
        return self.view().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.view().__dlpack_device__()

    def group(self, first: int, last: int) -> Tensor:
        """Modes first to last - 1 as one mode."""
        return Tensor(self.layout.group(first, last), self.data, self.offset, self.memory)

    @property
    def offsets(self) -> list[int]:
        """The offset of every element, in the order of the index."""
        return (
            [o + self.offset for o in self.layout.offsets] if self.offset else self.layout.offsets
        )

    def __call__(self, *coord: Coord) -> int:
        """The offset of an element."""
        return self.offset + self.layout(*coord)

    def __getitem__(self, coord: Any) -> Any:
        coord = _coord(coord)
        if _keeps(coord):
            layout, at = self.layout.slice(coord)
            return Tensor(layout, self.data, self.offset + at, self.memory)
        at = self.offset + self.layout(coord)
        return at if self.data is None else self.data[at]

    def __setitem__(self, coord: Any, value: Any) -> None:
        self._need_data("set")[self.offset + self.layout(_coord(coord))] = value

    def divided(self, divide: Callable[[Layout, Tiler], Layout], tiler: Tiler) -> Tensor:
        """The same elements with the layout divide(layout, tiler)."""
        if isinstance(self.layout, Swizzled):
            layout = Swizzled(
                self.layout.swizzle, divide(self.layout.layout, tiler), self.layout.offset
            )
            return Tensor(layout, self.data, memory=self.memory)
        return Tensor(divide(self.layout, tiler), self.data, self.offset, self.memory)

    def _need_data(self, op: str) -> Any:
        if self.data is None:
            raise ValueError(f"{op}: the tensor of layout {self.layout} has no data")
        return self.data

    def values(self) -> Any:
        """The elements in the order of the index: a list, or a torch tensor of one dimension."""
        data, offsets = self._need_data("values"), self.offsets
        return data[offsets] if hasattr(data, "index_put_") else [data[o] for o in offsets]

    def fill(self, values: Any) -> None:
        """Sets the elements in the order of the index. Each offset must occur once."""
        data, offsets = self._need_data("fill"), self.offsets
        written_once("fill", "tensor", self)
        if hasattr(data, "index_put_"):
            data[offsets] = data.new_tensor(values) if isinstance(values, list) else values
        else:
            for o, value in zip(offsets, values):
                data[o] = value

    def __repr__(self) -> str:
        if isinstance(self.data, Coordinates) and isinstance(self.layout, Layout):
            stride = unflatten(
                iter([self.data.basis(d) for _, d in self.layout.leaves]), self.layout.shape
            )
            start = text_of(self.data[self.offset])
            return f"Tensor({text_of(self.layout.shape)}:{text_of(stride)} from {start})"
        where = f" from {self.offset}" if self.offset else ""
        memory = f" in {self.memory}" if self.memory else ""
        return f"Tensor({self.layout}{where}{memory}{', no data' if self.data is None else ''})"


DIGIT = 32  # bits of a coordinate's entry in an offset of an identity tensor


class Coordinates:
    """The data of an identity tensor. An offset encodes a coordinate, 32 bits for each entry, so
    that no entry carries into the next."""

    def __init__(self, shape: IntTuple) -> None:
        self.shape = shape
        self.rank = len(flatten(shape))

    def __getitem__(self, offset: int) -> IntTuple:
        mask = (1 << DIGIT) - 1
        return unflatten(iter([offset >> DIGIT * m & mask for m in range(self.rank)]), self.shape)

    def basis(self, stride: int) -> str:
        """A stride as CuTe prints it: 4@1 adds 4 to entry 1 of the coordinate."""
        entries = enumerate(flatten(self[stride]))
        return "+".join(f"{step}@{m}" for m, step in entries if step) or "0"


def identity_tensor(shape: IntTuple | Layout) -> Tensor:
    """The tensor whose element at a coordinate is that coordinate.

    Divide, partition or slice it like a tensor of data. It then gives the original coordinate of
    each element, even beyond the end, which a predicate compares with the shape. Nested shapes have
    nested coordinates.

    >>> local_tile(identity_tensor((10, 8)), (4, 4), (2, 1))[3, 0]
    (11, 4)
    """
    shape = shape.shape if isinstance(shape, Layout) else shape
    strides = iter([1 << DIGIT * m for m in range(len(flatten(shape)))])
    return Tensor(Layout(shape, unflatten(strides, shape)), Coordinates(shape))


def as_tensor(x: Tensor | Layout | Swizzled | str) -> Tensor:
    return x if isinstance(x, Tensor) else Tensor(x)


def _coord(coord: Any) -> Any:
    if isinstance(coord, slice):
        if coord != slice(None):
            raise ValueError(
                "a tensor over a layout takes ':' or numbers; divide it for parts of a mode"
            )
        return None
    return tuple(map(_coord, coord)) if isinstance(coord, tuple) else coord


def _keeps(coord: Any) -> bool:
    return coord is None or (isinstance(coord, tuple) and any(map(_keeps, coord)))


def written_once(op: str, argument: str, tensor: Tensor) -> None:
    """Raises Refusal if two elements of a tensor share an offset. It names the first mode that
    makes them overlap."""
    inner = tensor.layout.layout if isinstance(tensor.layout, Swizzled) else tensor.layout
    if inner.injective:
        return
    for m in range(len(inner.leaves)):
        leaves = inner.leaves[: m + 1]
        if not Layout(tuple(s for s, _ in leaves), tuple(d for _, d in leaves)).injective:
            raise Refusal(op, argument, inner, m, "it writes an element twice")


def _pair(op: str, a: Tensor, b: Tensor) -> None:
    if a.size != b.size:
        raise ValueError(
            f"{op}: {a.layout} has {a.size} elements, {b.layout} has {b.size}; both must have as "
            f"many"
        )


def copy(src: Tensor, dst: Tensor, mask: Sequence[bool] | None = None) -> None:
    """dst(i) = src(i) for every index i, or for those whose mask is true. All reads happen before
    the first write."""
    _pair("copy", src, dst)
    written_once("copy", "dst", dst)
    if mask is None:
        dst.fill(src.values())
        return
    if len(mask) != src.size:
        raise ValueError(f"copy: the mask has {len(mask)} entries for {src.size} elements")
    data, from_ = dst._need_data("copy"), src._need_data("copy")
    for o, value in [(d, from_[s]) for d, s, m in zip(dst.offsets, src.offsets, mask) if m]:
        data[o] = value


def axpby(a: float, x: Tensor, b: float, y: Tensor) -> None:
    """y(i) = a x(i) + b y(i). If b = 0, y is not read."""
    _pair("axpby", x, y)
    xs = x.values()
    if not isinstance(xs, list):
        y.fill(a * xs if b == 0 else a * xs + b * y.values())
        return
    y.fill([a * u for u in xs] if b == 0 else [a * u + b * v for u, v in zip(xs, y.values())])


def transform(f: Callable, *tensors: Tensor) -> None:
    """last(i) = f(first(i), ...), where f takes the tensors before the last, or the last itself if
    it is the only one. f gets scalars if data are lists, and whole 1-D tensors if they are torch
    tensors.
    """
    *inputs, out = tensors
    inputs = inputs or [out]
    for x in inputs:
        _pair("transform", x, out)
    values = [x.values() for x in inputs]
    out.fill(list(map(f, *values)) if isinstance(values[0], list) else f(*values))


def fold(x: Tensor, start: Any, f: Callable[[Any, Any], Any]) -> Any:
    """Folds the elements in the order of the index: f(... f(f(start, x(0)), x(1)) ..., x(size -
    1))."""
    for value in x.values():
        start = f(start, value)
    return start


def gemm(a: Tensor, b: Tensor, c: Tensor) -> None:
    """c(m, n) += sum over k of a(m, k) b(n, k). As in CuTe, both operands have k last."""
    for name, x in (("a", a), ("b", b), ("c", c)):
        if x.rank != 2:
            raise ValueError(f"gemm: {name} = {x.layout} has {x.rank} modes; expected 2")
    (m, k), (n, k_b), (m_c, n_c) = ([mode.size for mode in plain(x).modes] for x in (a, b, c))
    if (k, m, n) != (k_b, m_c, n_c):
        raise ValueError(
            f"gemm: a is ({m},{k}), b is ({n},{k_b}), c is ({m_c},{n_c}); expected (M,K), (N,K), "
            f"(M,N)"
        )
    written_once("gemm", "c", c)
    x, y, z = a.values(), b.values(), c.values()
    if not isinstance(x, list):
        out = z.reshape(n, m).to(x.dtype) + y.reshape(k, n).T @ x.reshape(k, m)
        c.fill(out.reshape(-1).to(z.dtype))
        return
    rows = [x[i::m] for i in range(m)]
    c.fill(
        [
            z[i + j * m] + sum(map(lambda u, v: u * v, rows[i], y[j::n]))
            for j in range(n)
            for i in range(m)
        ]
    )


def plain(x: Tensor) -> Layout:
    """The tensor's layout without its swizzle."""
    return x.layout.layout if isinstance(x.layout, Swizzled) else x.layout
