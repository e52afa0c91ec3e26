# SPDX-License-Identifier: BSD-3-Clause
"""AttnMask: an attention mask in the form that kernels read, and the functions that make one.

A mask is cut into tiles of 128 queries x 128 keys. Attention skips empty tiles, runs full tiles as
if there were no mask, and reads 128 bits per row of partial tiles. A mask is built once, without
waiting for its device, and serves forward and backward of every layer.
"""

from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ._library import NAMESPACE, bytes_of, is_compiling
from .ops.attn_mask import DENSE, KEPT, RANGES, STORES, TILE, Layout
from .ops.attn_mask import attn_mask as _attn_mask
from .ops.wrong_types import refuse_types

__all__ = [
    "AttnMask",
    "MaskTiles",
    "attn_mask_blocks",
    "attn_mask_columns",
    "attn_mask_of",
    "attn_mask_ranges",
    "tree_mask",
]

_REAL = torch.float64, torch.float32, torch.bfloat16, torch.float16


class AttnMask:
    """A mask for `flash_attn`: which keys each query sees. It does not share memory with the
    tensors that it was made from.

    Make one with `attn_mask_of`, `attn_mask_ranges`, `attn_mask_columns` or `attn_mask_blocks`.
    Equal masks give the same bits of attention, whichever function made them.

    Make it on the device of q. A mask that was made on the CPU and moved serves the forward on CUDA
    alone; the backward refuses it.

    A mask can be copied, pickled and passed to a compiled or an exported program. To read a file
    that holds one, call `torch.load` and `torch.export.load` within
    ``torch.serialization.safe_globals([AttnMask])``. Kernels trust a mask's content, so load only
    files that you trust.

    Attributes:
        shape: (B, H, Sq, Sk); B or H is 1 if all sequences or all heads share the mask.
        device: the mask's device.
        data: the stored mask, opaque (csrc/core/attn_mask.h has the layout).
    """

    def __init__(self, data: Tensor, store: int, seq_q: int, seq_k: int):
        self.data = data
        self.store = store
        self.seq_q = seq_q
        self.seq_k = seq_k

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.data.shape[0], self.data.shape[1], self.seq_q, self.seq_k)

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        """The mask's size in bytes."""
        return self.data.numel() * 4

    def __repr__(self) -> str:
        return f"AttnMask(shape={tuple(self.shape)}, device='{self.device}', {self.nbytes / 1e6:.1f} MB)"

    def dense(self) -> Tensor:
        """The mask as a bool tensor [B, H, Sq, Sk]; true means that the query sees the key."""
        layout = Layout(self.store, self.seq_q, self.seq_k, False)
        batch, heads, seq_q, seq_k = self.shape
        out = self.data.new_empty(self.shape, dtype=torch.bool)  # under vmap as data is
        for tile in range(layout.tiles_q):
            rows = slice(tile * TILE, min((tile + 1) * TILE, seq_q))
            out[:, :, rows] = self._rows_of(layout, tile)[:, :, : rows.stop - rows.start, :seq_k]
        return out

    def tiles(self) -> "MaskTiles":
        """Which tiles of 128 x 128 are empty, partial and full. `print` shows a picture."""
        layout = Layout(self.store, self.seq_q, self.seq_k, False)
        classes = self._flags(layout) & 3
        table = torch.tensor([0, 2, 1, 1], dtype=torch.uint8, device=self.device)
        return MaskTiles(table[classes.long()])

    def _flags(self, layout: Layout) -> Tensor:
        """The flags of all tiles, [B, H, nq, nk] int32. Bits 0-1: 0 empty, 1 full, 2 partial with
        stored bits, 3 partial by ranges. Other bits: the slot of the stored bits."""
        four = self.data[..., layout.flags : layout.tiles, None]
        flags = (four >> 8 * torch.arange(4, device=self.device) & 255).flatten(2)
        return flags[..., : layout.tiles_q * layout.tiles_k].unflatten(
            2, (layout.tiles_q, layout.tiles_k)
        )

    def _rows_of(self, layout: Layout, tile: int) -> Tensor:
        """Whether the 128 queries of a tile see a key, bool [B, H, 128, 128 nk]."""
        flag = self._flags(layout)[:, :, tile]
        kind = (flag & 3).long()
        words = self.data[..., layout.words : layout.source].unflatten(2, (-1, 512))
        if self.store == DENSE:
            words = words[:, :, tile * layout.tiles_k : (tile + 1) * layout.tiles_k]
        else:
            slot = (tile * KEPT + (flag.long() >> 2)).clamp(max=words.shape[2] - 1)
            words = words.take_along_dim(slot[..., None], 2)
        # the words are in the order of a warpgroup's accumulators (csrc/core/attn_mask.h)
        row, column = torch.meshgrid(*2 * [torch.arange(TILE, device=self.device)], indexing="ij")
        word = 2 * (32 * (row // 16) + 4 * (row % 8) + column % 8 // 2) + row % 16 // 8
        bits = words[..., word] >> (2 * (column // 8) + column % 2) & 1  # [B, H, nk, 128, 128]
        sees = torch.where((kind == 2)[..., None, None], bits.bool(), (kind == 1)[..., None, None])
        if self.store != DENSE:
            sees = torch.where((kind == 3)[..., None, None], self._by_ranges(layout, tile), sees)
        return sees.transpose(2, 3).flatten(3)

    def _by_ranges(self, layout: Layout, tile: int) -> Tensor:
        """Whether the queries of a tile see a key according to the stored ranges, bool
        [B, H, nk, 128, 128]."""
        count = self.seq_q if self.store == RANGES else self.seq_k
        source = self.data[..., layout.source : layout.source + 4 * count].unflatten(2, (count, 4))
        row = torch.arange(tile * TILE, (tile + 1) * TILE, device=self.device)[:, None]
        key = torch.arange(layout.tiles_k * TILE, device=self.device)
        if self.store == RANGES:
            a, b, c, d = source[:, :, row[:, 0].clamp(max=count - 1)][..., None].unbind(3)
            sees = ((a <= key) & (key < b)) | ((c <= key) & (key < d))
        else:
            a, b, c, d = source[:, :, key.clamp(max=count - 1)][:, :, None].unbind(4)
            sees = ~(((a <= row) & (row < b)) | ((c <= row) & (row < d)))
        return sees.unflatten(3, (layout.tiles_k, TILE)).transpose(2, 3)


def _flatten(mask: AttnMask) -> tuple[list[Tensor], tuple[int, int, int]]:
    return [mask.data], (mask.store, mask.seq_q, mask.seq_k)


def _flatten_with_keys(mask: AttnMask) -> tuple[list[tuple[Any, Tensor]], tuple[int, int, int]]:
    tensors, context = _flatten(mask)
    return [(pytree.GetAttrKey("data"), tensors[0])], context


def _unflatten(tensors: Any, context: tuple[int, int, int]) -> AttnMask:
    (data,) = tensors
    return AttnMask(data, *context)


# torch.export names its inputs by the keys, and writes the context as JSON, which has no tuples
pytree.register_pytree_node(
    AttnMask,
    _flatten,
    _unflatten,
    serialized_type_name="torch_gpukern.AttnMask",
    to_dumpable_context=list,
    from_dumpable_context=tuple,
    flatten_with_keys_fn=_flatten_with_keys,
)


class MaskTiles:
    """The result of `AttnMask.tiles`: the class of each tile, with a table of counts and a picture.

    Attributes:
        classes: uint8 [B, H, ceil(Sq / 128), ceil(Sk / 128)]: 0 empty, 1 partial, 2 full.
    """

    EMPTY, PARTIAL, FULL = 0, 1, 2
    CHARACTERS = "·▒█"

    def __init__(self, classes: Tensor):
        self.classes = classes

    def counts(self) -> dict[str, int]:
        """Tiles of each class, over all sequences and heads."""
        names = ("empty", "partial", "full")
        return {name: int((self.classes == i).sum()) for i, name in enumerate(names)}

    def picture(self, sequence: int = 0, head: int = 0) -> str:
        """Text with a line for each tile of queries and a character for each tile of keys: · empty,
        ▒ partial, █ full."""
        rows = self.classes[sequence, head].tolist()
        return "\n".join("".join(self.CHARACTERS[x] for x in row) for row in rows)

    def __repr__(self) -> str:
        batch, heads, tiles_q, tiles_k = self.classes.shape
        counts = ", ".join(f"{n} {name}" for name, n in self.counts().items())
        head = f"{tiles_q} x {tiles_k} tiles of 128 queries x 128 keys, {batch} x {heads} masks: {counts}"
        return f"{head}\n{self.picture()}" if self.classes.numel() else head


# ---- functions that make a mask ------------------------------------------------------------------


def _fail(name: str, text: str, error: type[Exception] = ValueError) -> Exception:
    return error(f"{NAMESPACE}::{name}: {text}")


def _by_head(name: str, argument: str, x: Tensor, dims: int, letters: str) -> Tensor:
    """x with `dims` dimensions: up to two missing leading ones become 1."""
    if not isinstance(x, Tensor):
        raise _fail(name, f"{argument} must be a tensor, got {type(x).__name__}", TypeError)
    refuse_types(f"{NAMESPACE}::{name}", ((argument, "Tensor", x),))
    if not dims - 2 <= x.dim() <= dims:
        raise _fail(
            name, f"{argument} must have {dims - 2} to {dims} dimensions {letters}, got {x.dim()}"
        )
    return x[(None,) * (dims - x.dim())]


def _plain(x: Any) -> Any:
    """A number of NumPy's as an int, so that a file that holds the mask needs no NumPy."""
    return index(x) if isinstance(x, np.integer) else x


def _built(
    source: str, first: Tensor, seq_q: int, seq_k: int, is_causal: bool = False, **blocks: Any
) -> AttnMask:
    for length, x in (("seq_q", seq_q), ("seq_k", seq_k)):
        if isinstance(x, Tensor):  # the op would take it, and the mask would keep a tensor
            raise _fail("attn_mask", f"{length} must be an int, got a tensor; pass int({length})")
    if not is_compiling():
        seq_q, seq_k = _plain(seq_q), _plain(seq_k)
    data = _attn_mask.call_named(
        first=first,
        source=source,
        seq_q=seq_q,
        seq_k=seq_k,
        is_causal=is_causal,
        transposed=first.device.type == "cuda",
        **blocks,
    )
    return AttnMask(data, STORES[source], seq_q, seq_k)


def attn_mask_of(mask: Tensor, *, seq_k: int | None = None) -> AttnMask:
    """A mask from a bool tensor or from packed bits.

    Args:
        mask: bool [B|1, H|1, Sq, Sk], true if the query sees the key; or uint8
            [B|1, H|1, Sq, ceil(Sk / 8)], where bit j % 8 of byte j // 8 is key j. B and H may be
            left out. Any strides.
        seq_k: the number of keys, for uint8 only, since the last byte may have unused bits.
            Default: 8 times the bytes of a row.

    Raises:
        ValueError: another dtype or shape.
    """
    name = "attn_mask_of"
    mask = _by_head(name, "mask", mask, 4, "[B, H, Sq, Sk]")
    if mask.dtype is torch.bool:
        if seq_k is not None:
            raise _fail(name, "seq_k is for bits (uint8): leave it out")
        return _built("bool", bytes_of(mask), mask.shape[2], mask.shape[3])
    if mask.dtype is not torch.uint8:
        what = "; pass it as bias" if mask.dtype.is_floating_point else ""
        raise _fail(name, f"mask must be bool, or uint8 of packed bits, got {mask.dtype}{what}")
    return _built("bits", mask, mask.shape[2], 8 * mask.shape[3] if seq_k is None else seq_k)


def attn_mask_ranges(ranges: Tensor, seq_k: int) -> AttnMask:
    """A mask from one or two ranges of keys for each query.

    A mask of 131,072 queries and as many keys takes 20 MB on CUDA, whatever its ranges are.

    Args:
        ranges: int32 [B|1, H|1, Sq, 2 or 4]: a query sees the keys [x, y) and, with 4 entries, also
            [z, w). A range with x >= y is empty. Ranges are cut to [0, seq_k). B and H may be left
            out.
        seq_k: the number of keys.

    Raises:
        ValueError: another dtype or shape.
    """
    ranges = _by_head("attn_mask_ranges", "ranges", ranges, 4, "[B, H, Sq, 2 or 4]")
    return _built("ranges", ranges, ranges.shape[2], seq_k)


def attn_mask_columns(rows: Tensor, seq_q: int, *, is_causal: bool) -> AttnMask:
    """A mask from ranges of queries that do not see a key: FlashMask's ``startend_row_indices``.

    Args:
        rows: int32 [B|1, H|1, Sk, n], where c0 to c3 are the n entries of key j. With is_causal,
            n = 1 hides the key from queries i >= c0, and n = 2 from c0 <= i < c1; both also hide it
            from i < j. Without is_causal, n = 2 hides it from i >= c0 and from i < c1, and n = 4
            from c0 <= i < c1 and from c2 <= i < c3.
        seq_q: the number of queries.
        is_causal: selects the form of rows, and becomes part of the mask.

    Raises:
        ValueError: another dtype or shape.

    Source: Wang et al., "FlashMask: Efficient and Rich Mask Extension of FlashAttention" (2024),
    arXiv:2410.01359.
    """
    rows = _by_head("attn_mask_columns", "rows", rows, 4, "[B, H, Sk, n]")
    try:
        return _built("columns", rows, seq_q, rows.shape[2], is_causal)
    except ValueError as error:  # the op calls rows by the name of the form
        text = str(error).replace("attn_mask: columns", "attn_mask_columns: rows")
        raise ValueError(text) from None


def attn_mask_blocks(
    kv_num_blocks: Tensor,
    kv_indices: Tensor,
    full_kv_num_blocks: Tensor | None = None,
    full_kv_indices: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    seq_q: int,
    seq_k: int,
) -> AttnMask:
    """A mask from lists of 128 x 128 blocks, as in FlexAttention's BlockMask.

    Args:
        kv_num_blocks: int32 [B|1, H|1, ceil(seq_q / 128)]: the number of blocks of keys that each
            tile of queries sees partially.
        kv_indices: int32 [B|1, H|1, ceil(seq_q / 128), n]: the indices of these blocks, in any
            order. Entries after the first kv_num_blocks are not read.
        full_kv_num_blocks, full_kv_indices: likewise for blocks that are seen completely.
        mask: what is seen of the partial blocks: bool or bits, as in `attn_mask_of`. Without it
            they are seen completely.
        seq_q, seq_k: the number of queries and keys.

    Raises:
        ValueError: another dtype or shape.
        IndexError: a count or an index is out of range. On CUDA, the next call or `check_errors`
            raises it.
    """
    name = "attn_mask_blocks"
    num = _by_head(name, "kv_num_blocks", kv_num_blocks, 3, "[B, H, nq]")
    given = {"kv_indices": _by_head(name, "kv_indices", kv_indices, 4, "[B, H, nq, n]")}
    if full_kv_num_blocks is not None:
        given["full_kv_num_blocks"] = _by_head(
            name, "full_kv_num_blocks", full_kv_num_blocks, 3, "[B, H, nq]"
        )
    if full_kv_indices is not None:
        given["full_kv_indices"] = _by_head(
            name, "full_kv_indices", full_kv_indices, 4, "[B, H, nq, n]"
        )
    is_bits = False
    if mask is not None:
        mask = _by_head(name, "mask", mask, 4, "[B, H, Sq, Sk]")
        if mask.dtype not in (torch.bool, torch.uint8):
            raise _fail(name, f"mask must be bool, or uint8 of packed bits, got {mask.dtype}")
        is_bits = mask.dtype is torch.uint8
        given["mask"] = mask if is_bits else bytes_of(mask)
    lists = _expanded(name, {"kv_num_blocks": num, **given})
    return _built("blocks", lists.pop("kv_num_blocks"), seq_q, seq_k, is_bits=is_bits, **lists)


def tree_mask(
    parents: Tensor | Sequence[int] | Sequence[Sequence[int]],
    *,
    device: torch.device | str | None = None,
) -> Tensor:
    """A mask over the tokens of a tree, each of which sees its ancestors and itself: the `attn_mask`
    of `paged_attn` for drafts of several branches.

    Args:
        parents: for each token the number of its parent, which is smaller than its own; -1, or any
            negative number, if it has none. A sequence of integers, or an integer tensor, [S] or
            [B, S].
        device: of the mask; None is that of a tensor, or torch's default device.

    Returns:
        bool [S, S] or [B, S, S].

    Raises:
        ValueError: another dtype or shape; or a number that is not smaller than the token's own. The
            numbers of a tensor on CUDA are not read on the host, and so not checked.
    """
    name = "tree_mask"
    given = parents if isinstance(parents, Tensor) else torch.tensor(parents, device="cpu")
    if not given.numel():
        given = given.long()  # torch.tensor([]) is float32
    if given.dtype in (torch.bool, *_REAL) or given.dim() not in (1, 2):
        raise _fail(
            name,
            f"parents must be integers [S] or [B, S], got {list(given.shape)} of {given.dtype}",
        )
    number = torch.arange(given.shape[-1], device=given.device)
    if given.device.type == "cpu" and not is_compiling() and (given >= number).any():
        raise _fail(name, f"parents is {given.tolist()}; a parent comes before its token")
    if not isinstance(parents, Tensor) and device is None:
        device = torch.get_default_device()
    given = given.long() if device is None else given.to(device, torch.long)
    number = number.to(given.device)
    # Step i reaches ancestors of up to 2^i generations. Sums of ones are positive in any dtype.
    sees = (given[..., None] == number) | (number[:, None] == number)
    for _ in range((given.shape[-1] - 1).bit_length() if given.shape[-1] else 0):
        steps = sees.float()
        sees = steps @ steps > 0
    return sees


def _expanded(name: str, lists: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors [B|1, H|1, ...], expanded to one number of sequences and of heads."""
    batch, heads = (max(x.shape[dim] for x in lists.values()) for dim in (0, 1))
    for argument, x in lists.items():
        if x.shape[0] not in (1, batch) or x.shape[1] not in (1, heads):
            raise _fail(
                name,
                f"{argument} has {x.shape[0]} sequences and {x.shape[1]} heads, expected 1 or "
                f"{batch} and 1 or {heads}, as the other lists",
            )
    return {argument: x.expand(batch, heads, *x.shape[2:]) for argument, x in lists.items()}
