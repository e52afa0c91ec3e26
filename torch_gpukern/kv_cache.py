"""PagedKVCache: keys and values of many growing sequences, in pages shared and copied on write.

The pages of all layers live in two tensors, [layers, num_blocks, block_size, heads_kv, head_dim]. Which page belongs to whom
is kept on the host, so that nothing here waits for a device, and not in torch's tensors, so that no mode of torch around a
call (a default device, inference_mode, forward AD) reaches it. A call is a few array operations, whatever the number of
tokens. A call that raises has changed nothing. One step of generation::

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

from collections.abc import Iterable, Iterator, Sequence
from operator import index

import numpy as np
import torch
from torch import Tensor

from .ops import kv_cache_write
from .paged.arguments import as_counts, as_handles, as_salt, as_tokens, copy_into
from .paged.growth import Growth, OutOfPages
from .paged.pool import NO_PAGE, PagePool, digest

__all__ = ["OutOfPages", "PagedKVCache"]


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
        for name, size in (("num_blocks", num_blocks), ("block_size", block_size), ("layers", layers)):
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
        self._pool = PagePool(self.num_blocks)
        self._row_of: dict[int, int] = {}  # of a handle in the arrays below
        self._free_rows: list[int] = []
        self._next_handle = 0
        # A sequence of n tokens has the first ceil(n / block_size) entries of its row; behind them, and where pages were
        # released, stands NO_PAGE.
        self._table = np.full((0, 1), NO_PAGE, np.int32)
        self._lengths = np.zeros(0, np.int64)  # tokens
        self._released = np.zeros(0, np.int64)  # pages, counted from the first
        self._known_by: list[list[bytes]] = []  # what the chain of digests begins with, then a digest for each page
        self._seen = np.zeros(0, np.int64)  # scratch of _rows
        self._asked = list[int](), np.zeros(0, np.intp)  # what _rows was asked last: a step asks again

    def __repr__(self) -> str:
        layers, blocks, size, heads, dim = self.k.shape
        return (
            f"PagedKVCache({len(self._row_of)} sequences, {blocks - self.free_blocks} of "
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
        return list(self._row_of)

    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        return int(self._lengths[self._row(sequence)])

    def pages(self, sequence: int) -> list[int]:
        """The pages of a sequence, in the order of its tokens; -1 for those that were released."""
        return self._pages(self._row(sequence)).tolist()

    def allocate(self, salt: bytes | str = b"") -> int:
        """A new sequence without tokens; returns its handle. Its pages come with `extend`.

        Args:
            salt: what else than its tokens the keys depend on, such as the name of an adapter; `match`
                finds pages of equal salt only.
        """
        handle, _ = self._add([as_salt(salt)])
        return handle

    def fork(self, sequence: int, length: int | None = None) -> int:
        """A new sequence with the same first tokens, on the same pages; returns its handle.

        No key is copied here. When either of the two grows into a last page that is partly filled,
        `extend` gives it a copy of that page first, so neither sees the other's tokens.

        Args:
            sequence: a handle.
            length: tokens of the new sequence; None is all.

        Raises:
            ValueError: length is more than the sequence has, or lies in pages that were released.
        """
        parent = self._row(sequence)
        length = int(self._lengths[parent]) if length is None else index(length)
        self._check_lengths("fork", np.array([parent]), np.array([length]))
        n = -(-length // self.block_size)
        handle, row = self._add(self._known_by[parent][: 1 + length // self.block_size])
        self._table[row, :n] = self._table[parent, :n]
        self._lengths[row] = length
        self._released[row] = self._released[parent]
        self._pool.share(self._table[row, self._released[row] : n])
        return handle

    def free(self, sequence: int) -> None:
        """Ends a sequence. Its pages return to the pool, except those that another sequence still
        shares.
        """
        row = self._row(sequence)
        pages = self._pages(row)
        self._pool.drop(pages[self._released[row] :].copy())
        pages[:] = NO_PAGE
        del self._row_of[sequence]
        self._asked = [], self._asked[1][:0]
        self._free_rows.append(row)

    def truncate(self, sequences: int | Sequence[int], lengths: int | Sequence[int]) -> None:
        """Takes the last tokens of sequences back, such as drafted ones that were rejected.

        Args:
            sequences: B handles, none twice, or one.
            lengths: tokens that each keeps, or one number for all.

        Raises:
            ValueError: a length is more than the sequence has, or lies in pages that were released. No
                sequence has changed.
        """
        handles = as_handles(sequences)
        rows = self._rows("truncate", handles)
        after = np.empty(len(rows), np.int64)
        after[:] = as_counts("truncate", lengths, len(rows), "lengths")
        self._check_lengths("truncate", rows, after)
        before = -(-self._lengths[rows] // self.block_size)
        kept = -(-after // self.block_size)
        self._lengths[rows] = after
        for i in np.flatnonzero(kept < before):
            pages = self._table[rows[i], kept[i] : before[i]]
            self._pool.drop(pages.copy())
            pages[:] = NO_PAGE
        for row, n in zip(rows.tolist(), after.tolist()):
            del self._known_by[row][1 + n // self.block_size :]

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
        rows = self._rows("release", as_handles(sequences))
        upto = np.maximum(self._lengths[rows] - index(window_left), 0) // self.block_size
        for i in np.flatnonzero(upto > self._released[rows]):
            row = rows[i]
            pages = self._table[row, self._released[row] : upto[i]]
            self._pool.drop(pages.copy())
            pages[:] = NO_PAGE
            self._released[row] = upto[i]

    def publish(self, sequence: int, tokens: Sequence[int] | np.ndarray | Tensor) -> None:
        """Makes the full pages of a sequence known by their tokens, for `match`. Its keys and values
        must be written.

        What was published stays after the sequence is freed until `extend` needs the pages; those that
        were used the longest ago go first. It never changes: a sequence that is cut back into such a
        page and grows again gets a copy of it.

        Args:
            sequence: a handle.
            tokens: its token ids from the first on; what stands behind its last full page, or in pages
                that it has published already, is not read.

        Raises:
            ValueError: tokens are not integers, or fewer than the full pages hold.
        """
        row = self._row(sequence)
        chain, size = self._known_by[row], self.block_size
        full = int(self._lengths[row]) // size
        if full < len(chain):
            return
        ids = as_tokens("publish", tokens)
        if len(ids) < full * size:
            raise ValueError(f"PagedKVCache.publish: {len(ids)} tokens; the full pages hold {full * size}")
        for i in range(len(chain) - 1, full):
            chain.append(digest(chain[-1], ids[i * size : (i + 1) * size]))
            page = int(self._table[row, i])
            if page != NO_PAGE:
                self._pool.publish(page, chain[-1])

    def match(self, tokens: Sequence[int] | np.ndarray | Tensor, salt: bytes | str = b"") -> tuple[int, int]:
        """A new sequence on the published pages that hold the first of these tokens.

        Args:
            tokens: token ids from the first on. A model needs a query for its next token: leave the
                last one out.
            salt: as in `allocate`.

        Returns:
            the handle, and how many tokens it has: a multiple of block_size, 0 where nothing is known.
        """
        ids, size = as_tokens("match", tokens), self.block_size
        chain = [as_salt(salt)]

        def digests() -> Iterator[bytes]:
            for i in range(len(ids) // size):
                chain.append(digest(chain[-1], ids[i * size : (i + 1) * size]))
                yield chain[-1]

        pages = np.array(self._pool.find(digests()), np.int32)
        handle, row = self._add(chain[: 1 + len(pages)])
        self._need_columns(len(pages))
        self._table[row, : len(pages)] = pages
        self._lengths[row] = len(pages) * size
        self._pool.share(pages)
        return handle, len(pages) * size

    def forget(self) -> None:
        """Forgets what was published, as new weights ask for. No sequence changes."""
        self._pool.forget()

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
        rows = self._rows("extend", sequences)
        growth = Growth(self, rows, as_counts("extend", counts, len(rows)))
        with growth:
            return self._tensor(growth.slots)

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
        added = as_counts("append", counts, len(sequences))
        total = int(np.sum(np.broadcast_to(added, len(sequences))))
        for name, x, cache in (("k", k, self.k), ("v", v, self.v)):
            expected = cache.shape[0], total, *cache.shape[3:]
            if tuple(x.shape) != expected or x.dtype != cache.dtype or x.device != cache.device:
                raise ValueError(
                    f"PagedKVCache.append: {name} is {list(x.shape)} {x.dtype} on {x.device}; "
                    f"expected {list(expected)} {cache.dtype} on {cache.device}"
                )
        with Growth(self, self._rows("extend", sequences), added) as growth:
            slots = self._tensor(growth.slots)
            for layer in range(self.k.shape[0]):  # into rows that no sequence has yet
                self.write(k[layer], v[layer], slots, layer)
        return slots

    def block_table(self, sequences: Sequence[int], width: int | None = None) -> Tensor:
        """The pages of each sequence: [B, width] int32, -1 where a sequence has no further page.

        Args:
            sequences: B handles.
            width: columns; None is the most pages that one of them has, at least 1. A fixed width
                keeps a compiled or captured step valid.
        """
        rows = self._rows("block_table", sequences, distinct=False)
        longest = self._longest(rows)
        width = max(longest, 1) if width is None else index(width)
        if width < longest:
            raise ValueError(f"PagedKVCache.block_table: width is {width}, a sequence has {longest} pages")
        table = np.full((len(rows), width), NO_PAGE, np.int32)
        table[:, :longest] = self._table[rows, :longest]
        return self._tensor(table)

    def seq_lens(self, sequences: Sequence[int]) -> Tensor:
        """The length of each sequence: [B] int32."""
        return self._tensor(self._lengths[self._rows("seq_lens", sequences, distinct=False)].astype(np.int32))

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
        rows = self._rows("fill_", sequences)
        self._check_targets(len(rows), block_table, seq_lens, slots)
        if slots is None:
            self._fill(rows, self._lengths[rows], block_table, seq_lens)
            return
        with Growth(self, rows, as_counts("fill_", counts, len(rows))) as growth:
            new = growth.slots
            if len(new) > len(slots):
                raise ValueError(f"PagedKVCache.fill_: slots has {len(slots)} elements for {len(new)} tokens")
            if len(new) < len(slots):
                new = np.append(new, np.full(len(slots) - len(new), -1))
            self._fill(rows, growth.ends, block_table, seq_lens)
            copy_into(slots, new)

    def _fill(self, rows: np.ndarray, lengths: np.ndarray, block_table: Tensor, seq_lens: Tensor) -> None:
        n = len(rows)
        longest = -(-int(lengths.max(initial=0)) // self.block_size)
        if longest > block_table.shape[1]:
            raise ValueError(
                f"PagedKVCache.fill_: block_table has {block_table.shape[1]} columns, a sequence has {longest} pages"
            )
        if n < len(seq_lens):
            lengths = np.append(lengths, np.zeros(len(seq_lens) - n, np.int64))
        copy_into(seq_lens, lengths.astype(np.int32))
        if longest:
            copy_into(block_table[:n, :longest], self._table[rows, :longest])

    def _check_targets(self, n: int, block_table: Tensor, seq_lens: Tensor, slots: Tensor | None) -> None:
        for name, x, dims, dtypes in (
            ("block_table", block_table, 2, (torch.int32,)),
            ("seq_lens", seq_lens, 1, (torch.int32,)),
            ("slots", slots, 1, (torch.int64, torch.int32)),
        ):
            if x is not None and (x.dim() != dims or x.dtype not in dtypes or x.device != self.k.device):
                raise ValueError(
                    f"PagedKVCache.fill_: {name} is {list(x.shape)} {x.dtype} on {x.device}; expected "
                    f"{dims} dimensions, {' or '.join(map(str, dtypes))} on {self.k.device}"
                )
        if len(block_table) != len(seq_lens) or len(seq_lens) < n:
            raise ValueError(
                f"PagedKVCache.fill_: block_table has {len(block_table)} rows, seq_lens has {len(seq_lens)}; "
                f"expected as many of both, and at least {n}"
            )

    def _tensor(self, numbers: np.ndarray) -> Tensor:
        """A new tensor on the device, which is named, so a default one does not count."""
        return torch.from_numpy(numbers).to(self.k.device)

    # ---- rows ----

    def _row(self, sequence: int) -> int:
        try:
            return self._row_of[sequence]
        except KeyError:
            raise _unknown(sequence) from None

    def _rows(self, what: str, sequences: Iterable[int], distinct: bool = True) -> np.ndarray:
        """The rows of B handles."""
        sequences = list(sequences)
        if sequences == self._asked[0]:
            return self._asked[1]
        try:
            rows = np.fromiter(map(self._row_of.__getitem__, sequences), np.intp, len(sequences))
        except KeyError as error:
            raise _unknown(error.args[0]) from None
        if distinct and len(rows) > 1:
            order = np.arange(len(rows))
            self._seen[rows] = order
            if (self._seen[rows] != order).any():
                raise ValueError(f"PagedKVCache.{what}: a sequence is named twice")
        if distinct:
            self._asked = sequences, rows
        return rows

    def _pages(self, row: int) -> np.ndarray:
        """A view of the entries of one row that are in use."""
        return self._table[row, : -(-int(self._lengths[row]) // self.block_size)]

    def _longest(self, rows: np.ndarray) -> int:
        """The most pages that one of these has."""
        return -(-int(self._lengths[rows].max(initial=0)) // self.block_size)

    def _add(self, known_by: list[bytes]) -> tuple[int, int]:
        """The handle and the row of a new sequence."""
        if not self._free_rows:
            old = len(self._lengths)
            more = max(old, 8)
            self._table = np.pad(self._table, ((0, more), (0, 0)), constant_values=NO_PAGE)
            self._lengths, self._released, self._seen = (
                np.pad(x, (0, more)) for x in (self._lengths, self._released, self._seen)
            )
            self._known_by += [[] for _ in range(more)]
            self._free_rows = list(range(old + more - 1, old - 1, -1))
        row = self._free_rows.pop()
        handle = self._next_handle
        self._next_handle += 1
        self._row_of[handle] = row
        self._lengths[row] = self._released[row] = 0
        self._known_by[row] = known_by
        return handle, row

    def _need_columns(self, n: int) -> None:
        have = self._table.shape[1]
        if n > have:
            self._table = np.pad(self._table, ((0, 0), (0, max(n, 2 * have) - have)), constant_values=NO_PAGE)

    def _check_lengths(self, what: str, rows: np.ndarray, lengths: np.ndarray) -> None:
        have = self._lengths[rows]
        least = self._released[rows] * self.block_size
        for i in np.flatnonzero((lengths > have) | (lengths < least))[:1]:
            raise ValueError(
                f"PagedKVCache.{what}: length is {lengths[i]}; the sequence has {have[i]} tokens"
                + (f", the first {least[i]} of which were released" if least[i] else "")
            )


def _unknown(sequence: object) -> KeyError:
    return KeyError(f"PagedKVCache: {sequence} is not a sequence of this cache, or was freed")
