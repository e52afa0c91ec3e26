"""PagedKVCache: keys and values of many growing sequences, in pages shared and copied on write.

The pages of all layers live in two tensors, [layers, num_blocks, block_size, heads_kv, head_dim].
Which page belongs to whom is kept on the host, so that nothing here waits for a device, and not in tensors, so that no mode
of torch around a call (a default device, inference_mode, forward AD) reaches it. A call that raises has changed nothing. One
step of generation::

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

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index

import torch
from torch import Tensor

from .ops import kv_cache_write

__all__ = ["OutOfPages", "PagedKVCache"]


class OutOfPages(RuntimeError):
    """The cache has fewer free pages than a call needs; the call has changed nothing."""


@dataclass
class _Sequence:
    pages: array  # int32
    length: int  # tokens


@dataclass
class _Growth:
    """What `extend` will change, settled before anything does."""

    lengths: list[tuple[_Sequence, int]]  # the new ones
    pages: list[tuple[_Sequence, list[int]]]  # further pages of a sequence
    copies: list[tuple[_Sequence, int, int, int]]  # its shared last page, the page in its place, rows that are filled
    slots: Tensor  # [tokens] int64


_NO_PAGE = array("i", [-1])


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
        self.num_blocks = index(num_blocks)
        self.block_size = index(block_size)
        shape = index(layers), self.num_blocks, self.block_size, heads_kv
        # Rows that no token was written to are never read, so they need no zeros. A cache made in inference_mode serves
        # outside of it too.
        with torch.inference_mode(False):
            self.k = torch.empty(*shape, head_dim, dtype=dtype, device=device)
            self.v = torch.empty(*shape, head_dim if head_dim_v is None else head_dim_v, dtype=dtype, device=device)
        self._free = list(reversed(range(self.num_blocks)))  # pages without an owner, the next one last
        self._owners = [0] * self.num_blocks  # sequences that own each page
        self._sequences: dict[int, _Sequence] = {}
        self._next_handle = 0

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
        return self._add(array("i"), 0)

    def fork(self, sequence: int) -> int:
        """A new sequence with the same tokens, on the same pages; returns its handle.

        No key is copied here. When either of the two grows into a last page that is partly filled,
        `extend` gives it a copy of that page first, so neither sees the other's tokens.
        """
        parent = self._get(sequence)
        for page in parent.pages:
            self._owners[page] += 1
        return self._add(parent.pages[:], parent.length)

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

    def extend(self, sequences: Sequence[int], counts: int | Sequence[int] = 1) -> Tensor:
        """Makes room for new tokens and counts them to their sequences at once, before they are
        written.

        Args:
            sequences: B handles, none twice.
            counts: new tokens of each sequence, or one number for all; integers, whose values are copied.

        Returns:
            slots [sum of counts] int64 for `write` and `kv_cache_write`: the tokens of the first
            sequence, then those of the second, and so on.

        Raises:
            OutOfPages: the pool has not enough free pages for all of them. No sequence has changed.
            ValueError: counts that are not integers, are negative, or are not one for each sequence.
        """
        sequences = list(sequences)
        growth = self._plan(sequences, _as_counts("extend", counts, len(sequences)))
        self._commit(growth)
        return growth.slots

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
        sequences = list(sequences)
        counts = _as_counts("append", counts, len(sequences))
        for name, x, cache in (("k", k, self.k), ("v", v, self.v)):
            expected = cache.shape[0], sum(counts), *cache.shape[3:]
            if tuple(x.shape) != expected or x.dtype != cache.dtype or x.device != cache.device:
                raise ValueError(
                    f"PagedKVCache.append: {name} is {list(x.shape)} {x.dtype} on {x.device}; "
                    f"expected {list(expected)} {cache.dtype} on {cache.device}"
                )
        growth = self._plan(sequences, counts)
        for layer in range(self.k.shape[0]):  # into rows that no sequence has yet
            self.write(k[layer], v[layer], growth.slots, layer)
        self._commit(growth)
        return growth.slots

    def block_table(self, sequences: Sequence[int], width: int | None = None) -> Tensor:
        """The pages of each sequence: [B, width] int32, -1 where a sequence has no further page.

        Args:
            sequences: B handles.
            width: columns; None is the most pages that one of them has, at least 1. A fixed width
                keeps a compiled or captured step valid.
        """
        found = [self._get(s) for s in sequences]
        longest = max((len(x.pages) for x in found), default=0)
        width = max(longest, 1) if width is None else index(width)
        if width < longest:
            raise ValueError(f"PagedKVCache.block_table: width is {width}, a sequence has {longest} pages")
        table = array("i")
        for x in found:
            table += x.pages
            table += _NO_PAGE * (width - len(x.pages))
        return self._tensor(table).view(len(found), width)

    def seq_lens(self, sequences: Sequence[int]) -> Tensor:
        """The length of each sequence: [B] int32."""
        return self._tensor(array("i", [self._get(s).length for s in sequences]))

    def _tensor(self, numbers: array) -> Tensor:
        """A new tensor on the device, [n] int32 or int64. The device is named, so a default one does not count."""
        dtype = torch.int32 if numbers.typecode == "i" else torch.int64
        if not numbers:  # torch.asarray takes no empty buffer
            return torch.empty(0, dtype=dtype, device=self.k.device)
        return torch.asarray(numbers, dtype=dtype, device=self.k.device)

    def _get(self, sequence: int) -> _Sequence:
        try:
            return self._sequences[sequence]
        except KeyError:
            raise KeyError(f"PagedKVCache: {sequence} is not a sequence of this cache, or was freed") from None

    def _add(self, pages: array, length: int) -> int:
        handle = self._next_handle
        self._next_handle += 1
        self._sequences[handle] = _Sequence(pages, length)
        return handle

    def _plan(self, sequences: list[int], counts: list[int]) -> _Growth:
        """How the sequences grow; changes nothing."""
        grown = [self._get(s) for s in sequences]
        if len(set(sequences)) != len(grown):
            raise ValueError("PagedKVCache.extend: a sequence is named twice")

        # New pages, and copies of shared last pages. Of the owners of such a page the last one to be served keeps it.
        owners = dict[int, int]()
        shared, new = list[_Sequence](), 0
        for x, n in zip(grown, counts, strict=True):
            new += max(0, -(-(x.length + n) // self.block_size) - len(x.pages))
            if n and x.length % self.block_size:
                last = x.pages[-1]
                left = owners.get(last, self._owners[last])
                if left > 1:
                    shared.append(x)
                    owners[last] = left - 1
        if new + len(shared) > len(self._free):
            raise OutOfPages(
                f"PagedKVCache.extend: {new + len(shared)} pages are needed for {sum(counts)} "
                f"tokens, {len(self._free)} of {self.num_blocks} are free"
            )

        free = reversed(self._free)
        copies = [(x, x.pages[-1], next(free), x.length % self.block_size) for x in shared]
        lasts = {id(x): own for x, _, own, _ in copies}
        pages, lengths, slots = [], [], array("q")
        for x, n in zip(grown, counts, strict=True):
            more = list[int]()
            position, end = x.length, x.length + n
            while position < end:
                place, offset = divmod(position, self.block_size)
                if place >= len(x.pages):
                    more.append(page := next(free))
                else:
                    page = lasts.get(id(x), x.pages[place])
                rows = min(self.block_size - offset, end - position)
                slots.extend(range(page * self.block_size + offset, page * self.block_size + offset + rows))
                position += rows
            pages.append((x, more))
            lengths.append((x, end))
        return _Growth(lengths, pages, copies, self._tensor(slots))

    def _commit(self, growth: _Growth) -> None:
        """The pages are copied first, which may fail; what follows cannot."""
        for _, shared, own, rows in growth.copies:  # the rows behind them may be written already
            self.k[:, own, :rows] = self.k[:, shared, :rows]
            self.v[:, own, :rows] = self.v[:, shared, :rows]
        taken = [own for _, _, own, _ in growth.copies]
        for x, shared, own, _ in growth.copies:
            self._owners[shared] -= 1
            x.pages[-1] = own
        for x, more in growth.pages:
            x.pages.extend(more)
            taken += more
        for page in taken:
            self._owners[page] = 1
        del self._free[len(self._free) - len(taken) :]
        for x, length in growth.lengths:
            x.length = length


def _as_counts(what: str, counts: int | Iterable[int], n: int) -> list[int]:
    """counts of n sequences as ints of our own: a tensor that its owner changes later must not change a length."""
    given = counts.tolist() if hasattr(counts, "tolist") else counts
    try:
        copied = [index(x) for x in given] if isinstance(given, Iterable) else [index(given)] * n
    except TypeError:
        raise ValueError(
            f"PagedKVCache.{what}: counts must be an integer or a sequence of integers, got {counts!r}"
        ) from None
    if len(copied) != n:
        raise ValueError(f"PagedKVCache.{what}: counts has {len(copied)} elements, sequences has {n}")
    if any(x < 0 for x in copied):
        raise ValueError(f"PagedKVCache.{what}: counts has {min(copied)}; expected no negative number")
    return copied
