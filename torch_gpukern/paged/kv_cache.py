# SPDX-License-Identifier: BSD-3-Clause
"""PagedKVCache: keys and values of many growing sequences, in pages that sequences share and copy
on write (Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention" (2023), arXiv:2309.06180).

The pages of all layers are in two tensors, [layers, num_blocks, block_size, heads_kv, head_dim].
The owners of pages are recorded on the host, so that no call waits for a device. They are in NumPy
arrays, so that no mode of torch (a default device, inference_mode, forward AD) affects them. A call
takes a few array operations, whatever the number of tokens. A call that raises has changed nothing.
Threads may share a cache, because calls lock it. One step of generation::

    cache = PagedKVCache(num_blocks=512, block_size=16, heads_kv=4, head_dim=64, layers=len(model))
    sequences = [cache.allocate() for _ in prompts]
    ...
    slots = cache.extend(sequences)                  # room for one token each
    table, lens = cache.block_table(sequences), cache.seq_lens(sequences)
    for i, layer in enumerate(model):
        q, k, v = layer.qkv(x)                       # [B, heads, head_dim] each
        cache.write(k, v, slots, layer=i)
        out = paged_attn(q, cache.k[i], cache.v[i], table, lens)

For a captured step, `fill_` writes the tensors that the graph reads. docs/paged_cache.md shows
shared prefixes, drafts and windows.

Paging is after Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention" (2023), arXiv:2309.06180.
"""

from collections.abc import Sequence
from operator import index
from threading import RLock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..ops.shared_prefix import SharedPrefix
from ..ops.wrong_types import refuse_non_tensors
from ..pickled import as_bytes, as_codes
from .arguments import as_counts, check_prefix_targets, check_targets, copy_into
from .bookkeeping import Bookkeeping, alone
from .growth import Growth, OutOfPages
from .pages import KVPages
from .pool import NO_PAGE
from .scales import KVCacheScales
from .sequences import largest
from .shared import groups_of

__all__ = ["KVCacheScales", "OutOfPages", "PagedKVCache"]


class PagedKVCache(Bookkeeping, KVPages):
    """A pool of pages and the sequences that own them.

    Args:
        num_blocks: pages in the pool, for all sequences together.
        block_size: tokens in a page.
        heads_kv: heads of k and v. Not with `latent`.
        head_dim: width of a key. Not with `latent`.
        layers: layers that share the block tables.
        head_dim_v: width of a value; None is head_dim. Not with `latent`.
        latent: the widths of a row of latent attention (MLA), (512, 64) in DeepSeek's models: the
            compressed keys and values, and the part of the keys that carries the rotary position.
            A row is then stored once: v is a view of the first columns of k.
        dtype: dtype of the pages: float32, bfloat16, float16 or float64, or the 8-bit
            float8_e4m3fn, float8_e5m2 or int8; None is torch's default dtype. Latents (512, 64) in
            8 bits are torch.uint8, rows of 656 bytes that hold their own scales.
        device: device of the pages and of every tensor that is returned; None is torch's default
            device.
        k_scale: for 8-bit pages, the factor from a stored code to the key, float32: [] or
            [heads_kv] for all layers, [layers, heads_kv], or [layers, num_blocks, heads_kv] with a
            scale for each page. The user sets the scales of a page before its keys are written;
            they are copied with the page. None is 1. `KVCacheScales` finds scales by calibration.
        v_scale: likewise for values.

    Attributes:
        k: [layers, num_blocks, block_size, heads_kv, head_dim]; ``k[i]`` is the k_cache of layer i
            for `paged_attn`. With latents [layers, num_blocks, block_size, 1, sum of the widths],
            in uint8 [.., 656].
        v: [layers, num_blocks, block_size, heads_kv, head_dim_v]. With latents ``k[..., :512]``.
        k_scale, v_scale: as given.
        latent: as given.

    Raises:
        ValueError: a size below 1 or missing, another dtype, heads or scales beside latents, or a
            scale whose shape, dtype or device is wrong.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        heads_kv: int | None = None,
        head_dim: int | None = None,
        *,
        layers: int = 1,
        head_dim_v: int | None = None,
        latent: tuple[int, int] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        sizes: dict[str, Any] = {"num_blocks": num_blocks, "block_size": block_size}
        if latent is not None:
            given = {"heads_kv": heads_kv, "head_dim": head_dim, "head_dim_v": head_dim_v}
            given |= {"k_scale": k_scale, "v_scale": v_scale}
            wrong = [name for name, x in given.items() if x is not None]
            if wrong:
                raise ValueError(
                    f"PagedKVCache: {wrong[0]} is given beside latent; a row of latents has one "
                    f"head and the widths of latent, and holds its own scales: leave it out"
                )
            if not isinstance(latent, (tuple, list)) or len(latent) != 2:
                raise ValueError(
                    f"PagedKVCache: latent is {latent!r}; expected two widths, such as (512, 64)"
                )
            latent = index(latent[0]), index(latent[1])
            sizes |= {"latent[0]": latent[0], "latent[1]": latent[1]}
            heads_kv, head_dim, head_dim_v = 1, sum(latent), latent[0]
        for name, size in (("heads_kv", heads_kv), ("head_dim", head_dim)):
            if size is None:
                raise ValueError(f"PagedKVCache: {name} is missing; expected a size, or latent")
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        sizes |= {"heads_kv": heads_kv, "head_dim": head_dim}
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
            latent,
        )
        Bookkeeping.__init__(self, num_blocks, block_size)

    def __getstate__(self) -> dict[str, Any]:
        left = ("_lock",) if self.latent is None else ("_lock", "v")  # v is a view of k
        return as_bytes({name: x for name, x in self.__dict__.items() if name not in left})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(as_codes(state))
        if self.latent is not None:
            self.v = self.k[..., : self.latent[0]]
        self._lock = RLock()

    def __repr__(self) -> str:
        layers, blocks, size, heads, dim = self.k.shape
        form = f"{heads} heads, head_dim {dim}"
        if self.latent is not None:
            form = f"latents {self.latent[0]} + {self.latent[1]}"
        return (
            f"PagedKVCache({len(self.sequences)} sequences, {blocks - self.free_blocks} of "
            f"{blocks} pages of {size} tokens used, {layers} layers, {form}, "
            f"{self.k.dtype}, {self.k.device})"
        )

    @alone
    def extend(self, sequences: Sequence[int], counts: int | Sequence[int] = 1) -> Tensor:
        """Makes room for new tokens. They count as part of their sequences at once, before they are
        written.

        Args:
            sequences: B different handles.
            counts: the integer number of new tokens of each sequence, or one number for all.

        Returns:
            slots [sum of counts] int64 for `write` and `kv_cache_write`: those of the first
            sequence's tokens, then those of the second's, and so on.

        Raises:
            OutOfPages: the pool does not have enough free pages. No sequence has changed.
            ValueError: counts are not integers, are negative, or are not one for each sequence.
        """
        rows = self._sequences.rows("extend", sequences)
        with self._growth(rows, as_counts("extend", counts, len(rows))) as growth:
            return self._tensor(growth.slots)

    @alone
    def append(
        self, sequences: Sequence[int], k: Tensor, v: Tensor, counts: int | Sequence[int] = 1
    ) -> Tensor:
        """`extend` and `write` in one call, for keys and values of all layers.

        Args:
            sequences: B different handles.
            k: [T, heads_kv, head_dim] of the only layer, or [layers, T, heads_kv, head_dim]; tokens
                in the order of the sequences. With latents, both parts as in `write`.
            v: [T, heads_kv, head_dim_v] or [layers, T, heads_kv, head_dim_v].
            counts: new tokens of each sequence, or one number for all; they add up to T.

        Returns:
            slots [T] int64, where the tokens were written.

        Raises:
            OutOfPages, ValueError: as `extend`; or k or v has the wrong shape, dtype or device.
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
            for layer in range(self.k.shape[0]):  # to slots that no sequence owns yet
                self.write(k[layer], v[layer], slots, layer)
        return slots

    @alone
    def keep(
        self,
        sequences: Sequence[int],
        lengths: Sequence[int],
        kept: Sequence[Sequence[int]],
    ) -> None:
        """Keeps some of the last tokens of sequences and removes the others, for example the
        accepted path of a tree of drafts. Keys and values of kept tokens are copied, so that they
        follow each other.

        Args:
            sequences: B different handles.
            lengths: the first tokens that each sequence keeps.
            kept: for each sequence the positions of the tokens that follow these: ascending, and
                at least its length. They become the positions from its length on.

        Raises:
            ValueError: a length is as in `truncate` or a position is wrong; tokens would move into
                a page that is shared or published, or to a page with another scale (k_scale or
                v_scale given per page). No sequence has changed.
        """
        sequences, found = list(sequences), [list(map(index, x)) for x in kept]
        rows = self._sequences.rows("keep", sequences)
        first = np.empty(len(rows), np.int64)
        first[:] = as_counts("keep", lengths, len(rows), "lengths")
        if len(found) != len(rows):
            raise ValueError(
                f"PagedKVCache.keep: kept has {len(found)} entries for {len(rows)} sequences"
            )
        sources, targets = self._sequences.moves(rows, first, found)
        if self._page_scales() and (sources // self.block_size != targets // self.block_size).any():
            raise ValueError(
                "PagedKVCache.keep: a token would move to another page, and scales are given per "
                "page; give scales per head, or keep tokens within their pages"
            )
        if len(sources):
            self._move_rows(sources, targets)
        self._sequences.truncate(rows, first + np.array([len(x) for x in found], np.int64))

    @alone
    def block_table(self, sequences: Sequence[int], width: int | None = None) -> Tensor:
        """The block table [B, width] int32: the pages of each sequence, then -1.

        Args:
            sequences: B handles.
            width: columns; None is the number of pages of the longest sequence, at least 1. A fixed
                width keeps a compiled or captured step valid.

        Raises:
            ValueError: a sequence has more than `width` pages.
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
        """Writes a batch into given tensors, such as those that a captured graph reads. With
        `slots`, it also extends the sequences, so that one call does all the bookkeeping of a step.

        Rows after the B sequences become inactive: length 0, and slot -1, which `kv_cache_write`
        skips. Table entries that `paged_attn` does not read are left unchanged. The host does not
        wait for the device; the copies are ordered on the current stream. The tensors may also be
        on the CPU, where the user copies them himself.

        Args:
            sequences: B different handles.
            block_table: [R, width] int32, R at least B.
            seq_lens: [R] int32.
            slots: [T] int64 or int32, T at least the sum of counts; None does not extend the
                sequences.
            counts: as in `extend`.

        Raises:
            OutOfPages, ValueError: as `extend`; or a tensor is too small, or has another dtype or
                device. No sequence has changed.
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

    @alone
    def shared_prefix(
        self, sequences: Sequence[int], counts: int | Sequence[int] = 1
    ) -> SharedPrefix | None:
        """The keys that these sequences share, for ``paged_attn(..., prefix=)`` of their newest
        tokens. None if they share too little to gain from it.

        Call it after `extend`. Neighbours in `sequences` are compared; `by_pages` puts those that
        share pages next to each other.

        Args:
            sequences: B handles.
            counts: the query tokens of each sequence, or one number for all.

        Raises:
            ValueError: counts as in `extend`.
        """
        rows = self._sequences.rows("shared_prefix", sequences, distinct=False)
        groups = self._groups(rows, as_counts("shared_prefix", counts, len(rows)))
        return groups and SharedPrefix(*map(self._tensor, groups))

    @alone
    def fill_shared_prefix_(
        self, sequences: Sequence[int], prefix: SharedPrefix, count: int = 1
    ) -> bool:
        """Writes `shared_prefix` into given tensors, such as those that a captured graph reads.

        Groups after the last one have length 0. One of them owns the query tokens of the inactive
        rows, as `fill_` makes them. The host does not wait for the device.

        Args:
            sequences: B handles.
            prefix: block_table [R, width], seq_lens [R], cu_seqlens_q [R + 1] and kv_start [R]
                int32, R at least B.
            count: the query tokens of each of the R rows.

        Returns:
            Whether anything is shared. If not, all lengths are 0, and a call without prefix gives
            the same result in less time.

        Raises:
            ValueError: a tensor is too small, or has another dtype or device.
        """
        rows = self._sequences.rows("fill_shared_prefix_", sequences, distinct=False)
        table, lens, tokens, own = prefix
        check_prefix_targets(len(rows), self.k.device, prefix)
        groups = self._groups(rows, as_counts("fill_shared_prefix_", count, len(rows)))
        n, room = len(rows), len(lens)
        keys, kv_start = np.zeros((2, room), np.int32)
        ends = np.full(room, room * count, np.int32)
        if groups is None:
            ends[0] = n * count
        else:
            pages, its_keys, its_tokens, its_own = groups
            if pages.shape[1] > table.shape[1]:
                raise ValueError(
                    f"PagedKVCache.fill_shared_prefix_: block_table has {table.shape[1]} columns, "
                    f"{pages.shape[1]} pages are shared"
                )
            keys[: len(its_keys)] = its_keys
            ends[: len(its_keys)] = its_tokens[1:]
            kv_start[:n] = its_own
            copy_into(table[: len(pages), : pages.shape[1]], pages)
        copy_into(lens, keys)
        copy_into(tokens, np.append(np.int32(0), ends))
        copy_into(own, kv_start)
        return groups is not None

    def _groups(
        self, rows: np.ndarray, counts: int | np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None:
        """The arrays of a SharedPrefix, or None."""
        queries = np.empty(len(rows), np.int64)
        queries[:] = counts
        most = self._sequences.seen_pages(rows, queries)
        table = self._sequences.table[rows, : max(largest(most), 1)]
        groups = groups_of(table, most, queries, self.block_size, self.k.device.type)
        if groups is None:
            return None
        starts, pages = groups
        shared = np.full((len(pages), largest(pages)), NO_PAGE, np.int32)
        for row, first, n in zip(shared, starts, pages):
            row[:n] = table[first, :n]
        keys = (pages * self.block_size).astype(np.int32)
        tokens = np.append(0, queries.cumsum())[starts].astype(np.int32)
        return shared, keys, tokens, np.repeat(keys, np.diff(starts))

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
        """A new tensor on the cache's device, whatever torch's default device is."""
        return torch.from_numpy(numbers).to(self.k.device)
