# SPDX-License-Identifier: BSD-3-Clause
"""PagedKVCache: keys and values of many growing sequences, in pages shared and copied on write.

The pages of all layers live in two tensors, [layers, num_blocks, block_size, heads_kv, head_dim]. Which page belongs to whom
is kept on the host, so that nothing here waits for a device, and not in torch's tensors, so that no mode of torch around a
call (a default device, inference_mode, forward AD) reaches it. A call is a few array operations, whatever the number of
tokens. A call that raises has changed nothing. Threads may share a cache: a call that reads or changes the tables has them
for itself. One step of generation::

    cache = PagedKVCache(num_blocks=512, block_size=16, heads_kv=4, head_dim=64, layers=len(model))
    sequences = [cache.allocate() for _ in prompts]
    ...
    slots = cache.extend(sequences)                  # room for one token each
    table, lens = cache.block_table(sequences), cache.seq_lens(sequences)
    for i, layer in enumerate(model):
        q, k, v = layer.qkv(x)                       # [B, heads, head_dim] each
        cache.write(k, v, slots, layer=i)
        out = paged_attn(q, cache.k[i], cache.v[i], table, lens)

A captured step reads tensors that `fill_` writes instead. docs/serving.md has shared prefixes, drafts and windows.

after Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention" (2023), arXiv:2309.06180.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from operator import index
from threading import RLock
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from .ops import kv_cache_write, rope_kv_write
from .ops.wrong_types import refuse_non_tensors
from .paged import prefixes
from .paged.arguments import as_counts, as_handles, as_tokens, check_targets, copy_into
from .paged.growth import Growth, OutOfPages
from .paged.pool import NO_PAGE, PagePool
from .paged.scales import CODES, KVCacheScales, layer_scale, of_layers
from .paged.sequences import Sequences, largest

__all__ = ["KVCacheScales", "OutOfPages", "PagedKVCache"]

DTYPES = torch.float32, torch.bfloat16, torch.float16, torch.float64

P = ParamSpec("P")
R = TypeVar("R")


def alone(method: Callable[Concatenate["PagedKVCache", P], R]) -> Callable[Concatenate["PagedKVCache", P], R]:
    """A method that no other thread's call comes between."""

    @wraps(method)
    def locked(self: "PagedKVCache", *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            return method(self, *args, **kwargs)

    return locked


class PagedKVCache:
    """A pool of pages and the sequences that own them.

    Args:
        num_blocks: pages in the pool, for all sequences together.
        block_size: tokens in a page.
        heads_kv: heads of k and v.
        head_dim: width of a key.
        layers: layers that share the block tables.
        head_dim_v: width of a value; None is head_dim.
        dtype: of the pages: float32, bfloat16, float16, float64 or, of 8 bits, float8_e4m3fn, float8_e5m2, int8;
            None is torch's default dtype.
        device: of the pages and of every tensor that is returned; None is torch's default device.
        k_scale: what a stored key is worth, for 8-bit pages: float32 [] or [heads_kv] for every layer, [layers, heads_kv], or
            [layers, num_blocks, heads_kv], a scale for each page, which is the caller's to set before keys are written and
            which goes along when a page is copied. None is 1. `KVCacheScales` finds scales by a run.
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
        sizes = {"num_blocks": num_blocks, "block_size": block_size, "heads_kv": heads_kv, "head_dim": head_dim}
        sizes |= {"layers": layers, "head_dim_v": head_dim if head_dim_v is None else head_dim_v}
        for name, size in sizes.items():
            if index(size) < 1:
                raise ValueError(f"PagedKVCache: {name} is {size}; expected at least 1")
        if (dtype := dtype or torch.get_default_dtype()) not in DTYPES + CODES:
            raise ValueError(f"PagedKVCache: dtype is {dtype}; expected one of {', '.join(map(str, DTYPES + CODES))}")
        self.num_blocks = index(num_blocks)
        self.block_size = index(block_size)
        shape = index(layers), self.num_blocks, self.block_size, heads_kv
        # Rows that no token was written to are never read, so they need no zeros. A cache made in inference_mode serves
        # outside of it too.
        with torch.inference_mode(False):
            self.k = torch.empty(*shape, head_dim, dtype=dtype, device=device)
            self.v = torch.empty(*shape, sizes["head_dim_v"], dtype=dtype, device=device)
        self.k_scale = of_layers("k_scale", k_scale, self.k)
        self.v_scale = of_layers("v_scale", v_scale, self.v)
        self._pool = PagePool(self.num_blocks)
        self._sequences = Sequences(self._pool, self.block_size)
        self._lock = RLock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: x for name, x in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = RLock()

    def __repr__(self) -> str:
        layers, blocks, size, heads, dim = self.k.shape
        return (
            f"PagedKVCache({len(self.sequences)} sequences, {blocks - self.free_blocks} of "
            f"{blocks} pages of {size} tokens used, {layers} layers, {heads} heads, "
            f"head_dim {dim}, {self.k.dtype}, {self.k.device})"
        )

    @property
    def free_blocks(self) -> int:
        """Pages that no sequence owns, those among them that `match` may still find."""
        return self._pool.available

    @property
    def sequences(self) -> list[int]:
        """The handles of all sequences, the oldest first."""
        return self._sequences.handles

    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        return int(self._sequences.lengths[self._sequences.row(sequence)])

    @alone
    def pages(self, sequence: int) -> list[int]:
        """The pages of a sequence, in the order of its tokens; -1 for those that were released."""
        return self._sequences.pages(self._sequences.row(sequence)).tolist()

    @alone
    def allocate(self, salt: bytes | str = b"") -> int:
        """A new sequence without tokens; returns its handle. Its pages come with `extend`.

        Args:
            salt: what else than its tokens the keys depend on, such as the name of an adapter; `match`
                finds pages of equal salt only.

        Raises:
            ValueError: salt is neither str nor bytes.
        """
        return self._sequences.add([prefixes.root(salt)])[0]

    @alone
    def fork(self, sequence: int, length: int | None = None) -> int:
        """A new sequence with the same first tokens, on the same pages; returns its handle.

        No key is copied here. When either of the two grows into a last page that is partly filled,
        `extend` gives it a copy of that page first, so neither sees the other's tokens.

        Args:
            sequence: a handle.
            length: tokens of the new sequence; None is all.

        Raises:
            ValueError: length is more than the sequence has, or so small that a later query would see
                pages that were released.
        """
        return self._sequences.fork(sequence, length)

    @alone
    def free(self, sequence: int) -> None:
        """Ends a sequence. Its pages return to the pool, except those that another sequence still
        shares.
        """
        self._sequences.remove(sequence)

    @alone
    def truncate(self, sequences: int | Sequence[int], lengths: int | Sequence[int]) -> None:
        """Takes the last tokens of sequences back, such as drafted ones that were rejected.

        Args:
            sequences: B handles, none twice, or one.
            lengths: tokens that each keeps, or one number for all.

        Raises:
            ValueError: a length is more than the sequence has, or so small that a later query would see
                pages that were released. No sequence has changed.
        """
        rows = self._sequences.rows("truncate", as_handles(sequences))
        after = np.empty(len(rows), np.int64)
        after[:] = as_counts("truncate", lengths, len(rows), "lengths")
        self._sequences.truncate(rows, after)

    @alone
    def release(self, sequences: int | Sequence[int], window_left: int) -> None:
        """Gives pages back that no later query sees through a window; -1 stands in their place.

        Call it between the attention over the newest tokens and the next `extend`: the next query
        stands at position `length` and sees no key below ``length - window_left``. All layers of this
        cache must have that window, or a smaller one.

        Args:
            sequences: B handles, none twice, or one.
            window_left: of `paged_attn`, at least 0.
        """
        if index(window_left) < 0:
            raise ValueError(f"PagedKVCache.release: window_left is {window_left}; expected at least 0")
        self._sequences.release(self._sequences.rows("release", as_handles(sequences)), index(window_left))

    @alone
    def publish(self, sequence: int, tokens: Sequence[int] | np.ndarray | Tensor) -> None:
        """Makes the full pages of a sequence known by their tokens, for `match`. Its keys and values
        must be written.

        What was published stays after the sequence is freed until `extend` needs the pages; those that
        were used the longest ago go first. It never changes: a sequence that is cut back into such a
        page and grows again gets a copy of it. A sequence that had tokens at the last `forget` is not
        published.

        Args:
            sequence: a handle.
            tokens: its token ids from the first on; what stands behind its last full page, or in pages
                that it has published already, is not read.

        Raises:
            ValueError: tokens are not integers, or fewer than the full pages hold.
        """
        row = self._sequences.row(sequence)
        known = len(self._sequences.chains[row]) - 1
        if known < int(self._sequences.lengths[row]) // self.block_size and self._sequences.may_publish(row):
            prefixes.publish(self._sequences, row, as_tokens("publish", tokens))

    @alone
    def match(self, tokens: Sequence[int] | np.ndarray | Tensor, salt: bytes | str = b"") -> tuple[int, int]:
        """A new sequence on the published pages that hold the first of these tokens.

        Args:
            tokens: token ids from the first on. A model needs a query for its next token: leave the
                last one out.
            salt: as in `allocate`.

        Returns:
            the handle, and how many tokens it has: a multiple of block_size, 0 where nothing is known.
        """
        return prefixes.match(self._sequences, [prefixes.root(salt)], as_tokens("match", tokens))

    @alone
    def forget(self) -> None:
        """Forgets what was published, as new weights ask for. No sequence changes, but what sequences have now, and
        what they and their forks write behind it, is not published any more: it may depend on keys of the old weights.
        """
        self._pool.forget()
        self._sequences.forget()

    @alone
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
        rows = self._sequences.rows("extend", sequences)
        with self._growth(rows, as_counts("extend", counts, len(rows))) as growth:
            return self._tensor(growth.slots)

    def write(self, k: Tensor, v: Tensor, slots: Tensor, layer: int = 0) -> None:
        """Writes new keys k [T, heads_kv, head_dim] and values v [T, heads_kv, head_dim_v] of one
        layer at `slots` [T].
        """
        kv_cache_write(k, v, self.k[layer], self.v[layer], slots, **self.scales(layer))

    def rope_write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        slots: Tensor,
        layer: int = 0,
        *,
        q_weight: Tensor | None = None,
        k_weight: Tensor | None = None,
        eps: float = 1e-6,
        interleaved: bool = False,
    ) -> Tensor:
        """`write` of keys that are rotated first, and normalised where there are weights, with their queries, in one launch:
        `rope_kv_write` into one layer. Returns q [T, heads_q, head_dim] rotated.
        """
        how = {"q_weight": q_weight, "k_weight": k_weight, "eps": eps, "interleaved": interleaved}
        pages = self.k[layer], self.v[layer]
        return rope_kv_write(q, k, v, cos, sin, positions, *pages, slots, **how, **self.scales(layer))

    def scales(self, layer: int = 0) -> dict[str, Tensor]:
        """The k_scale and v_scale of a layer, as `paged_attn` and `kv_cache_write` take them by name; those that are 1 are
        left out.
        """
        found = {"k_scale": layer_scale(self.k_scale, layer), "v_scale": layer_scale(self.v_scale, layer)}
        return {name: scale for name, scale in found.items() if scale is not None}

    @alone
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
        refuse_non_tensors("PagedKVCache.append", k=k, v=v)
        k, v = (x if x.dim() == 4 else x[None] for x in (k, v))
        sequences = list(sequences)
        added = as_counts("append", counts, len(sequences))
        total = int(np.sum(np.broadcast_to(added, len(sequences))))
        for name, x, cache in (("k", k, self.k), ("v", v, self.v)):
            expected = cache.shape[0], total, *cache.shape[3:]
            dtypes = DTYPES if cache.dtype in CODES else (cache.dtype,)
            if tuple(x.shape) != expected or x.dtype not in dtypes or x.device != cache.device:
                raise ValueError(
                    f"PagedKVCache.append: {name} is {list(x.shape)} {x.dtype} on {x.device}; "
                    f"expected {list(expected)} {' or '.join(map(str, dtypes))} on {cache.device}"
                )
        with self._growth(self._sequences.rows("extend", sequences), added) as growth:
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
            raise ValueError(f"PagedKVCache.block_table: width is {width}, a sequence has {longest} pages")
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
        """Writes a batch into tensors of the caller's, such as those that a captured graph reads; with
        `slots` it calls `extend` first, so that it is all the bookkeeping of a step.

        Rows behind the B sequences become inactive: length 0, slots -1, which `kv_cache_write` skips.
        Entries of the table that `paged_attn` does not read keep what they hold. Nothing waits for the
        device, and the copies are in order on the current stream.

        Args:
            sequences: B handles, none twice.
            block_table: [R, width] int32, R at least B.
            seq_lens: [R] int32.
            slots: [T] int64 or int32, T at least the sum of counts; None leaves the sequences as they are.
            counts: as in `extend`.

        Raises:
            OutOfPages, ValueError: as `extend`; or a tensor is too small, or of another dtype or device.
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
                raise ValueError(f"PagedKVCache.fill_: slots has {len(slots)} elements for {len(new)} tokens")
            if len(new) < len(slots):
                new = np.append(new, np.full(len(slots) - len(new), -1))
            self._fill(rows, growth.ends, block_table, seq_lens)
            copy_into(slots, new)

    def _fill(self, rows: np.ndarray, lengths: np.ndarray, block_table: Tensor, seq_lens: Tensor) -> None:
        n = len(rows)
        longest = -(-largest(lengths) // self.block_size)
        if longest > block_table.shape[1]:
            raise ValueError(
                f"PagedKVCache.fill_: block_table has {block_table.shape[1]} columns, a sequence has {longest} pages"
            )
        if n < len(seq_lens):
            lengths = np.append(lengths, np.zeros(len(seq_lens) - n, np.int64))
        copy_into(seq_lens, lengths.astype(np.int32))
        if longest:
            copy_into(block_table[:n, :longest], self._sequences.table[rows, :longest])

    def _growth(self, rows: np.ndarray, counts: int | np.ndarray) -> Growth:
        return Growth(self._sequences, rows, counts, self._copy_rows)

    def _copy_rows(self, source: int, target: int, tokens: int) -> None:
        """The first tokens of a page into another one, in all layers."""
        for pages, scale in ((self.k, self.k_scale), (self.v, self.v_scale)):
            pages[:, target, :tokens] = pages[:, source, :tokens]
            if scale is not None and scale.dim() == 3:
                with torch.inference_mode(scale.is_inference()):  # one that was made there changes nowhere else
                    scale[:, target] = scale[:, source]

    def _tensor(self, numbers: np.ndarray) -> Tensor:
        """A new tensor on the device, which is named, so a default one does not count."""
        return torch.from_numpy(numbers).to(self.k.device)
