# SPDX-License-Identifier: BSD-3-Clause
"""Arguments of a PagedKVCache: checks, copies into NumPy arrays, and writes into the user's
tensors.
"""

from collections.abc import Iterable, Sequence
from operator import index

import numpy as np
import torch
from torch import Tensor

from ..ops.shared_prefix import SharedPrefix

CPU = torch.device("cpu")


def as_handles(sequences: int | Sequence[int]) -> Sequence[int]:
    return sequences if isinstance(sequences, Iterable) else [sequences]


def as_tokens(what: str, tokens: Sequence[int] | np.ndarray | Tensor) -> np.ndarray:
    """tokens as [n] int64."""
    ids = np.asarray(tokens.cpu() if isinstance(tokens, Tensor) else tokens)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(
            f"PagedKVCache.{what}: tokens must be integers in one dimension, got {ids.dtype} "
            f"{list(ids.shape)}"
        )
    return ids.astype(np.int64)


def as_counts(
    what: str, counts: int | Iterable[int], n: int, name: str = "counts"
) -> int | np.ndarray:
    """The counts of n sequences, or one count for all, copied: if the user changes a tensor later,
    no length may change."""
    # a decoding step calls this, and the checks below would show in its time
    if type(counts) is int and counts >= 0:
        return counts
    given = counts.tolist() if hasattr(counts, "tolist") else counts
    try:
        copied = [index(x) for x in given] if isinstance(given, Iterable) else index(given)
    except TypeError:
        raise ValueError(
            f"PagedKVCache.{what}: {name} must be an integer or a sequence of integers, got "
            f"{counts!r}"
        ) from None
    if isinstance(copied, list):
        if len(copied) != n:
            raise ValueError(
                f"PagedKVCache.{what}: {name} has {len(copied)} elements, sequences has {n}"
            )
        least = min(copied, default=0)
    else:
        least = copied
    if least < 0:
        raise ValueError(f"PagedKVCache.{what}: {name} has {least}; expected no negative number")
    return np.array(copied, np.int64) if isinstance(copied, list) else copied


def copy_into(target: Tensor, numbers: np.ndarray) -> None:
    """Copies numbers to a tensor. For a GPU they go through pinned memory, so that the host does
    not wait; torch keeps that memory until the copy has ended."""
    if target.device.type == "cpu":
        # NumPy, because torch might wake its thread pool
        np.copyto(target.numpy(), numbers, casting="same_kind")
    else:
        target.copy_(torch.from_numpy(numbers).to(target.dtype).pin_memory(), non_blocking=True)


def check_prefix_targets(n: int, device: torch.device, prefix: SharedPrefix) -> None:
    """Raises ValueError unless the tensors of a SharedPrefix can hold the groups of n sequences."""
    room = len(prefix.seq_lens)
    for name, dims, length in (
        ("block_table", 2, room),
        ("seq_lens", 1, max(room, n)),
        ("cu_seqlens_q", 1, room + 1),
        ("kv_start", 1, room),
    ):
        x = getattr(prefix, name)
        if (
            x.dim() != dims
            or x.dtype != torch.int32
            or x.device not in (device, CPU)
            or len(x) != length
        ):
            raise ValueError(
                f"PagedKVCache.fill_shared_prefix_: {name} is {list(x.shape)} {x.dtype} on "
                f"{x.device}; expected {dims} dimensions, the first of {length}, int32 on {device}"
            )


def check_targets(
    n: int, device: torch.device, block_table: Tensor, seq_lens: Tensor, slots: Tensor | None
) -> None:
    """Raises ValueError unless the user's tensors can hold a batch of n sequences. They are on the
    cache's device, or on the CPU."""
    for name, x, dims, dtypes in (
        ("block_table", block_table, 2, (torch.int32,)),
        ("seq_lens", seq_lens, 1, (torch.int32,)),
        ("slots", slots, 1, (torch.int64, torch.int32)),
    ):
        if x is not None and (
            x.dim() != dims or x.dtype not in dtypes or x.device not in (device, CPU)
        ):
            raise ValueError(
                f"PagedKVCache.fill_: {name} is {list(x.shape)} {x.dtype} on {x.device}; expected "
                f"{dims} dimensions, {' or '.join(map(str, dtypes))} on {device}"
            )
    if len(block_table) != len(seq_lens) or len(seq_lens) < n:
        raise ValueError(
            f"PagedKVCache.fill_: block_table has {len(block_table)} rows, seq_lens has "
            f"{len(seq_lens)}; "
            f"expected as many of both, and at least {n}"
        )
