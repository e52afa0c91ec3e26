"""PagedKVCache: keys and values of many growing sequences, in pages shared and copied on write.

The pages of all layers live in two tensors, [layers, num_blocks, block_size, heads_kv, head_dim].
Which page belongs to whom is kept on the host, so that nothing here waits for a device. One step of
generation::

    cache = PagedKVCache(num_blocks=512, block_size=16, heads_kv=4, head_dim=64, layers=len(model))
    sequences = [cache.allocate() for _ in prompts]
    ...
    slots = cache.extend(sequences)                  # room for one token each
    table, lens = cache.block_table(sequences), cache.seq_lens(sequences)
    for i, layer in enumerate(model):
        q, k, v = layer.qkv(x)                       # [B, heads, head_dim] each
        cache.write(k, v, slots, layer=i)
        out = paged_attn(q, cache.k[i], cache.v[i], table, lens)

after Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention" (2023), arXiv:2309.06180.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .ops import kv_cache_write

__all__ = ["OutOfPages", "PagedKVCache"]


class OutOfPages(RuntimeError):
    """The cache has fewer free pages than a call needs; the call has changed nothing."""


@dataclass
class _Sequence:
    row: int  # of the table kept on the host
    pages: list[int]
    length: int  # tokens


class PagedKVCache:
    """A pool of pages and the sequences that own them.

    Args:
        num_blocks: pages in the pool, for all sequences together.
        block_size: tokens in a page.
        heads_kv: heads of k and v.
        head_dim: width of a key.
        layers: layers that share the block tables.
        head_dim_v: width of a value; None is head_dim.
        dtype: of the pages; None is torch's default dtype.
        device: of the pages and of every tensor that is returned; None is torch's default device.

    Attributes:
        k: [layers, num_blocks, block_size, heads_kv, head_dim]; ``k[i]`` is layer i's k_cache of
            `paged_attn`.
        v: [layers, num_blocks, block_size, heads_kv, head_dim_v].
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        heads_kv: int,
        head_dim: int,
        *,
        layers: int = 1,
        head_dim_v: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        for name, size in (
            ("num_blocks", num_blocks),
            ("block_size", block_size),
            ("layers", layers),
        ):
            if size < 1:
                raise ValueError(f"PagedKVCache: {name} is {size}; expected at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = layers, num_blocks, block_size, heads_kv
        # Rows that no token was written to are never read, so they need no zeros.
        self.k = torch.empty(*shape, head_dim, dtype=dtype, device=device)
        self.v = torch.empty(*shape, head_dim if head_dim_v is None else head_dim_v, dtype=dtype, device=device)
        self._free = list(reversed(range(num_blocks)))  # pages without an owner, the next one last
        self._owners = [0] * num_blocks  # sequences that own each page
        self._sequences: dict[int, _Sequence] = {}
        self._next_handle = 0
        # block_table() gathers rows of this table instead of building lists of lists in every step.
        self._table = torch.full((8, 8), -1, dtype=torch.int32)
        self._free_rows = list(range(7, -1, -1))

    def __repr__(self) -> str:
        layers, blocks, size, heads, dim = self.k.shape
        return (
            f"PagedKVCache({len(self._sequences)} sequences, {blocks - self.free_blocks} of "
            f"{blocks} pages of {size} tokens used, {layers} layers, {heads} heads, "
            f"head_dim {dim}, {self.k.dtype}, {self.k.device})"
        )

    @property
    def free_blocks(self) -> int:
        """Pages that no sequence owns."""
        return len(self._free)

    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        return self._get(sequence).length

    def pages(self, sequence: int) -> list[int]:
        """The pages of a sequence, in the order of its tokens."""
        return list(self._get(sequence).pages)

    def allocate(self) -> int:
        """A new sequence without tokens; returns its handle. Its pages come with `extend`."""
        return self._add([], 0)

    def fork(self, sequence: int) -> int:
        """A new sequence with the same tokens, on the same pages; returns its handle.

        No key is copied here. When either of the two grows into a last page that is partly filled,
        `extend` gives it a copy of that page first, so neither sees the other's tokens.
        """
        parent = self._get(sequence)
        for page in parent.pages:
            self._owners[page] += 1
        return self._add(list(parent.pages), parent.length)

    def free(self, sequence: int) -> None:
        """Ends a sequence. Its pages return to the pool, except those that another sequence still
        shares.
        """
        ended = self._get(sequence)
        del self._sequences[sequence]
        for page in reversed(ended.pages):
            self._owners[page] -= 1
            if self._owners[page] == 0:
                self._free.append(page)
        self._table[ended.row] = -1
        self._free_rows.append(ended.row)

    def extend(self, sequences: Sequence[int], counts: int | Sequence[int] = 1) -> Tensor:
        """Makes room for new tokens and counts them to their sequences at once, before they are
        written.

        Args:
            sequences: B handles, none twice.
            counts: new tokens of each sequence, or one number for all.

        Returns:
            slots [sum of counts] int64 for `write` and `kv_cache_write`: the tokens of the first
            sequence, then those of the second, and so on.

        Raises:
            OutOfPages: the pool has not enough free pages for all of them. No sequence has changed.
        """
        grown = [self._get(s) for s in sequences]
        counts = [counts] * len(grown) if isinstance(counts, int) else list(counts)
        if len(counts) != len(grown):
            raise ValueError(f"PagedKVCache.extend: counts has {len(counts)} elements, sequences has {len(grown)}")
        if len(set(sequences)) != len(grown):
            raise ValueError("PagedKVCache.extend: a sequence is named twice")
        if any(n < 0 for n in counts):
            raise ValueError(f"PagedKVCache.extend: counts has {min(counts)}; expected no negative number")

        # What is needed is settled before anything changes: new pages, and copies of shared last
        # pages. Of the owners of such a page the last one to be served keeps it.
        owners = dict[int, int]()
        copies, new = [], 0
        for x, n in zip(grown, counts, strict=True):
            new += max(0, -(-(x.length + n) // self.block_size) - len(x.pages))
            if n and x.length % self.block_size:
                last = x.pages[-1]
                left = owners.get(last, self._owners[last])
                if left > 1:
                    copies.append(x)
                    owners[last] = left - 1
        if new + len(copies) > len(self._free):
            raise OutOfPages(
                f"PagedKVCache.extend: {new + len(copies)} pages are needed for {sum(counts)} "
                f"tokens, {len(self._free)} of {self.num_blocks} are free"
            )

        for x in copies:
            shared, own = x.pages[-1], self._take()
            self.k[:, own] = self.k[:, shared]
            self.v[:, own] = self.v[:, shared]
            self._owners[shared] -= 1
            x.pages[-1] = own
            self._table[x.row, len(x.pages) - 1] = own
        slots = []
        for x, n in zip(grown, counts, strict=True):
            for position in range(x.length, x.length + n):
                index, offset = divmod(position, self.block_size)
                if index == len(x.pages):
                    x.pages.append(self._take())
                    self._widen(index + 1)
                    self._table[x.row, index] = x.pages[-1]
                slots.append(x.pages[index] * self.block_size + offset)
            x.length += n
        return torch.tensor(slots, dtype=torch.int64).to(self.k.device)

    def write(self, k: Tensor, v: Tensor, slots: Tensor, layer: int = 0) -> None:
        """Writes new keys k [T, heads_kv, head_dim] and values v [T, heads_kv, head_dim_v] of one
        layer at `slots` [T].
        """
        kv_cache_write(k, v, self.k[layer], self.v[layer], slots)

    def append(self, sequences: Sequence[int], k: Tensor, v: Tensor, counts: int | Sequence[int] = 1) -> Tensor:
        """`extend` and `write` in one, where the keys of all layers are at hand.

        Args:
            sequences: B handles, none twice.
            k: [T, heads_kv, head_dim] of the only layer, or [layers, T, heads_kv, head_dim]; tokens
                in the order of the sequences.
            v: [T, heads_kv, head_dim_v] or [layers, T, heads_kv, head_dim_v].
            counts: new tokens of each sequence, or one number for all; they add up to T.

        Returns:
            slots [T] int64, where the tokens were written.
        """
        k, v = (x if x.dim() == 4 else x[None] for x in (k, v))
        tokens = counts * len(sequences) if isinstance(counts, int) else sum(counts)
        for name, x, cache in (("k", k, self.k), ("v", v, self.v)):
            expected = cache.shape[0], tokens, *cache.shape[3:]
            if tuple(x.shape) != expected or x.dtype != cache.dtype or x.device != cache.device:
                raise ValueError(
                    f"PagedKVCache.append: {name} is {list(x.shape)} {x.dtype} on {x.device}; "
                    f"expected {list(expected)} {cache.dtype} on {cache.device}"
                )
        slots = self.extend(sequences, counts)
        for layer in range(self.k.shape[0]):
            self.write(k[layer], v[layer], slots, layer)
        return slots

    def block_table(self, sequences: Sequence[int], width: int | None = None) -> Tensor:
        """The pages of each sequence: [B, width] int32, -1 where a sequence has no further page.

        Args:
            sequences: B handles.
            width: columns; None is the most pages that one of them has, at least 1. A fixed width
                keeps a compiled or captured step valid.
        """
        found = [self._get(s) for s in sequences]
        longest = max((len(x.pages) for x in found), default=0)
        if width is None:
            width = max(longest, 1)
        elif width < longest:
            raise ValueError(f"PagedKVCache.block_table: width is {width}, a sequence has {longest} pages")
        self._widen(width)
        return self._table[[x.row for x in found], :width].to(self.k.device)

    def seq_lens(self, sequences: Sequence[int]) -> Tensor:
        """The length of each sequence: [B] int32."""
        return torch.tensor([self._get(s).length for s in sequences], dtype=torch.int32).to(self.k.device)

    def _get(self, sequence: int) -> _Sequence:
        try:
            return self._sequences[sequence]
        except KeyError:
            raise KeyError(f"PagedKVCache: {sequence} is not a sequence of this cache, or was freed") from None

    def _add(self, pages: list[int], length: int) -> int:
        if not self._free_rows:
            rows = self._table.shape[0]
            self._table = torch.cat([self._table, torch.full_like(self._table, -1)])
            self._free_rows.extend(range(2 * rows - 1, rows - 1, -1))
        row = self._free_rows.pop()
        self._widen(len(pages))
        self._table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        handle = self._next_handle
        self._next_handle += 1
        self._sequences[handle] = _Sequence(row, pages, length)
        return handle

    def _take(self) -> int:
        page = self._free.pop()
        self._owners[page] = 1
        return page

    def _widen(self, width: int) -> None:
        """Columns for rows of `width` pages, at least doubled where there are too few."""
        missing = width - self._table.shape[1]
        if missing > 0:
            more = max(missing, self._table.shape[1])
            self._table = torch.nn.functional.pad(self._table, (0, more), value=-1)
