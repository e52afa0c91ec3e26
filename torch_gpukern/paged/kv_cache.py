# SPDX-License-Identifier: BSD-3-Clause
"""PagedKVCache: keys and values of many growing sequences, in pages shared and copied on write.

The pages of all layers live in two tensors, [layers, num_blocks, block_size, heads_kv, head_dim].
Which page belongs to whom is kept on the host, so that nothing here waits for a device, and not in
torch's tensors, so that no mode of torch around a call (a default device, inference_mode, forward
AD) reaches it. A call is a few array operations, whatever the number of tokens. A call that raises
has changed nothing. Threads may share a cache: a call that reads or changes the tables has them for
itself. One step of generation::

    cache = PagedKVCache(num_blocks=512, block_size=16, heads_kv=4, head_dim=64, layers=len(model))
    sequences = [cache.allocate() for _ in prompts]
    ...
    slots = cache.extend(sequences)                  # room for one token each
    table, lens = cache.block_table(sequences), cache.seq_lens(sequences)
    for i, layer in enumerate(model):
        q, k, v = layer.qkv(x)                       # [B, heads, head_dim] each
        cache.write(k, v, slots, layer=i)
        out = paged_attn(q, cache.k[i], cache.v[i], table, lens)

A captured step reads tensors that `fill_` writes instead. docs/paged_cache.md has shared prefixes,
drafts and windows.

after Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention" (2023), arXiv:2309.06180.
"""

from collections.abc import Sequence
from operator import index
from threading import RLock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..ops.wrong_types import refuse_non_tensors
from ..pickled import as_bytes, as_codes
from .arguments import as_counts, check_targets, copy_into
from .bookkeeping import Bookkeeping, alone
from .growth import Growth, OutOfPages
from .pages import KVPages
from .pool import NO_PAGE
from .scales import KVCacheScales
from .sequences import largest

__all__ = ["KVCacheScales", "OutOfPages", "PagedKVCache"]


class PagedKVCache(Bookkeeping, KVPages):
    """A pool of pages and the sequences that own them.

    Args:
        num_blocks: pages in the pool, for all sequences together.
        block_size: tokens in a page.
        heads_kv: heads of k and v.
        head_dim: width of a key.
        layers: layers that share the block tables.
        head_dim_v: width of a value; None is head_dim.
        dtype: of the pages: float32, bfloat16, float16, float64 or, of 8 bits, float8_e4m3fn,
            float8_e5m2, int8; None is torch's default dtype.
        device: of the pages and of every tensor that is returned; None is torch's default device.
        k_scale: what a stored key is worth, for 8-bit pages: float32 [] or [heads_kv] for every
            layer, [layers, heads_kv], or [layers, num_blocks, heads_kv], a scale for each page,
            which is the caller's to set before keys are written and which goes along when a page is
            copied. None is 1. `KVCacheScales` finds scales by a run.
        v_scale: likewise for values.

    Attributes:
        k: [layers, num_blocks, block_size, heads_kv, head_dim]; ``k[i]`` is layer i's k_cache of
            `paged_attn`.
        v: [layers, num_blocks, block_size, heads_kv, head_dim_v].
        k_scale, v_scale: as given.
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
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        sizes = {
            "num_blocks": num_blocks,
            "block_size": block_size,
            "heads_kv": heads_kv,
            "head_dim": head_dim,
        }
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        sizes |= {"layers": layers, "head_dim_v": head_dim_v}
        for name, size in sizes.items():
            if index(size) < 1:
                raise ValueError(f"PagedKVCache: {name} is {size}; expected at least 1")
        dtype = dtype or torch.get_default_dtype()
        scales = k_scale, v_scale
        KVPages.__init__(
            self,
            num_blocks,
            block_size,
            heads_kv,
            head_dim,
            layers,
            head_dim_v,
            dtype,
            device,
            *scales,
        )
        Bookkeeping.__init__(self, num_blocks, block_size)

    def __getstate__(self) -> dict[str, Any]:
        return as_bytes({name: x for name, x in self.__dict__.items() if name != "_lock"})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(as_codes(state))
        self._lock = RLock()

    def __repr__(self) -> str:
        layers, blocks, size, heads, dim = self.k.shape
        return (
            f"PagedKVCache({len(self.sequences)} sequences, {blocks - self.free_blocks} of "
            f"{blocks} pages of {size} tokens used, {layers} layers, {heads} heads, "
            f"head_dim {dim}, {self.k.dtype}, {self.k.device})"
        )

    @alone
    def extend(self, sequences: Sequence[int], counts: int | Sequence[int] = 1) -> Tensor:
        """Makes room for new tokens and counts them to their sequences at once, before they are
        written.

        Args:
            sequences: B handles, none twice.
            counts: new tokens of each sequence, or one number for all; integers, whose values are
            copied.

        Returns:
            slots [sum of counts] int64 for `write` and `kv_cache_write`: the tokens of the first
            sequence, then those of the second, and so on.

        Raises:
            OutOfPages: the pool has not enough free pages for all of them. No sequence has changed.
            ValueError: counts that are not integers, are negative, or are not one for each
            sequence.
        """
        rows = self._sequences.rows("extend", sequences)
        with self._growth(rows, as_counts("extend", counts, len(rows))) as growth:
            return self._tensor(growth.slots)

    @alone
    def append(
        self, sequences: Sequence[int], k: Tensor, v: Tensor, counts: int | Sequence[int] = 1
    ) -> Tensor:
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
        refuse_non_tensors("PagedKVCache.append", k=k, v=v)
        k, v = (x if x.dim() == 4 else x[None] for x in (k, v))
        sequences = list(sequences)
        added = as_counts("append", counts, len(sequences))
        total = int(np.sum(np.broadcast_to(added, len(sequences))))
        self._check_rows("append", k, v, total)
        with (
            self._growth(self._sequences.rows("extend", sequences), added) as growth,
            self._copied_scales(growth.copies),
        ):
            slots = self._tensor(growth.slots)
            for layer in range(self.k.shape[0]):  # into rows that no sequence has yet
                self.write(k[layer], v[layer], slots, layer)
        return slots

    @alone
    def block_table(self, sequences: Sequence[int], width: int | None = None) -> Tensor:
        """The pages of each sequence: [B, width] int32, -1 where a sequence has no further page.

        Args:
            sequences: B handles.
            width: columns; None is the most pages that one of them has, at least 1. A fixed width
                keeps a compiled or captured step valid.
        """
        rows = self._sequences.rows("block_table", sequences, distinct=False)
        longest = self._sequences.longest(rows)
        width = max(longest, 1) if width is None else index(width)
        if width < longest:
            raise ValueError(
                f"PagedKVCache.block_table: width is {width}, a sequence has {longest} pages"
            )
        table = np.full((len(rows), width), NO_PAGE, np.int32)
        table[:, :longest] = self._sequences.table[rows, :longest]
        return self._tensor(table)

    @alone
    def seq_lens(self, sequences: Sequence[int]) -> Tensor:
        """The length of each sequence: [B] int32."""
        rows = self._sequences.rows("seq_lens", sequences, distinct=False)
        return self._tensor(self._sequences.lengths[rows].astype(np.int32))

    @alone
    def fill_(
        self,
        sequences: Sequence[int],
        block_table: Tensor,
        seq_lens: Tensor,
        slots: Tensor | None = None,
        counts: int | Sequence[int] = 1,
    ) -> None:
        """Writes a batch into tensors of the caller's, such as those that a captured graph reads;
        with
        `slots` it calls `extend` first, so that it is all the bookkeeping of a step.

        Rows behind the B sequences become inactive: length 0, slots -1, which `kv_cache_write`
        skips.
        Entries of the table that `paged_attn` does not read keep what they hold. Nothing waits for
        the
        device, and the copies are in order on the current stream.

        Args:
            sequences: B handles, none twice.
            block_table: [R, width] int32, R at least B.
            seq_lens: [R] int32.
            slots: [T] int64 or int32, T at least the sum of counts; None leaves the sequences as
            they are.
            counts: as in `extend`.

        Raises:
            OutOfPages, ValueError: as `extend`; or a tensor is too small, or of another dtype or
            device.
                No sequence has changed.
        """
        rows = self._sequences.rows("fill_", sequences)
        check_targets(len(rows), self.k.device, block_table, seq_lens, slots)
        if slots is None:
            self._fill(rows, self._sequences.lengths[rows], block_table, seq_lens)
            return
        with self._growth(rows, as_counts("fill_", counts, len(rows))) as growth:
            new = growth.slots
            if len(new) > len(slots):
                raise ValueError(
                    f"PagedKVCache.fill_: slots has {len(slots)} elements for {len(new)} tokens"
                )
            if len(new) < len(slots):
                new = np.append(new, np.full(len(slots) - len(new), -1))
            self._fill(rows, growth.ends, block_table, seq_lens)
            copy_into(slots, new)

    def _fill(
        self, rows: np.ndarray, lengths: np.ndarray, block_table: Tensor, seq_lens: Tensor
    ) -> None:
        n = len(rows)
        longest = -(-largest(lengths) // self.block_size)
        if longest > block_table.shape[1]:
            raise ValueError(
                f"PagedKVCache.fill_: block_table has {block_table.shape[1]} columns, a sequence "
                f"has {longest} pages"
            )
        if n < len(seq_lens):
            lengths = np.append(lengths, np.zeros(len(seq_lens) - n, np.int64))
        copy_into(seq_lens, lengths.astype(np.int32))
        if longest:
            copy_into(block_table[:n, :longest], self._sequences.table[rows, :longest])

    def _growth(self, rows: np.ndarray, counts: int | np.ndarray) -> Growth:
        return Growth(self._sequences, rows, counts, self._copy_rows)

    def _tensor(self, numbers: np.ndarray) -> Tensor:
        """A new tensor on the device, which is named, so a default one does not count."""
        return torch.from_numpy(numbers).to(self.k.device)
