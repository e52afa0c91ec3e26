# SPDX-License-Identifier: BSD-3-Clause
"""CuTe's layout algebra in plain Python, to compute, check and draw the layouts that kernels use.

    >>> from torch_gpukern import layout
    >>> layout.logical_divide("(4,2,3):(2,1,8)", "4:2")
    Layout('((2,2),(2,3)):((4,1),(2,8))')

It needs neither a GPU nor the compiled library. An operation without an exact result raises
`Refusal`, which names the mode that is to blame. docs/layout.md explains the notation, with
pictures.
"""

from . import atoms, banks, pictures, tma
from .algebra import (
    coalesce,
    complement,
    compose,
    left_inverse,
    max_common_layout,
    max_common_vector,
    recast,
    right_inverse,
    same,
)
from .banks import sectors, wavefronts, ways
from .core import Layout, Refusal, as_layout, join
from .divide import (
    blocked_product,
    flat_divide,
    flat_product,
    logical_divide,
    logical_product,
    overhang,
    raked_product,
    tiled_divide,
    tiled_product,
    zipped_divide,
    zipped_product,
)
from .memory import CopyChoice, choose_copy, fragment_like, make_tensor
from .swizzle import Swizzle, Swizzled, parse
from .tensor import Tensor, axpby, copy, fold, gemm, identity_tensor, transform
from .tiled import TiledCopy, TiledMma
from .tiling import inside, local_partition, local_tile, make_layout_tv, tile_to_shape
from .tma import TmaBox, WgmmaDescriptor, tma_box, wgmma_descriptor
from .values import from_values


def size(layout: Layout | str) -> int:
    """The number of coordinates of a layout."""
    return as_layout(layout).size


def cosize(layout: Layout | str) -> int:
    """The number of offsets from the lowest to the highest, both included."""
    return as_layout(layout).cosize


__all__ = [
    "CopyChoice",
    "Layout",
    "Refusal",
    "Swizzle",
    "Swizzled",
    "Tensor",
    "TiledCopy",
    "TiledMma",
    "TmaBox",
    "WgmmaDescriptor",
    "as_layout",
    "atoms",
    "axpby",
    "banks",
    "blocked_product",
    "choose_copy",
    "coalesce",
    "complement",
    "compose",
    "copy",
    "cosize",
    "flat_divide",
    "flat_product",
    "fold",
    "fragment_like",
    "from_values",
    "gemm",
    "identity_tensor",
    "inside",
    "join",
    "left_inverse",
    "local_partition",
    "local_tile",
    "logical_divide",
    "logical_product",
    "make_layout_tv",
    "make_tensor",
    "max_common_layout",
    "max_common_vector",
    "overhang",
    "parse",
    "pictures",
    "raked_product",
    "recast",
    "right_inverse",
    "same",
    "sectors",
    "size",
    "tile_to_shape",
    "tiled_divide",
    "tiled_product",
    "tma",
    "tma_box",
    "transform",
    "wavefronts",
    "ways",
    "wgmma_descriptor",
    "zipped_divide",
    "zipped_product",
]
