# SPDX-License-Identifier: BSD-3-Clause
"""Small sums over the GPUs of one host by one kernel. Each rank writes its part into the other
ranks' mailboxes, buffers in torch's symmetric memory (csrc/cuda/collective/sum_over_ranks.cu).

A set of mailboxes may only serve calls that run one after the other. So each stream has a set of
its own. Each capture into a CUDA graph has one, too, because two graphs may replay at the same
time. The mailboxes of a capture are never freed.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from .._library import ops
from .ranks import Ranks
from .symmetric import Symmetric, reaches_all

__all__ = ["mailboxes_for"]

# The largest x in bytes. With two ranks each rank writes all of x, which takes 6 us at this size.
# That is as much as NCCL's start and its second kernel, which this path saves. With more ranks each
# rank sums a part of a large x, and writes at most 1.5 times as many bytes.
MOST_BYTES = 2 << 20
_LEAST_ELEMENTS, _MOST_RANKS = 1 << 14, 16
_MOST_CHUNKS = 4


def chunk_bytes(ranks: int) -> int:
    """The size of a chunk: 64 MiB for up to four ranks, and 16 MiB a rank for more."""
    return max(64 << 20, ranks * (16 << 20))


class _Chunk:
    """Symmetric memory, zeroed on every rank, from which mailboxes are allocated."""

    def __init__(self, ranks: Ranks, device: torch.device):
        self.size = chunk_bytes(ranks.size)
        self.used = 0
        self._symmetric = Symmetric(self.size, ranks, device)
        self._symmetric.data.zero_()
        torch.cuda.synchronize(device)
        dist.barrier(ranks.group)
        torch.cuda.synchronize(device)

    def cut(self, size: int, ranks: int) -> list[Tensor] | None:
        """Each rank's next `size` bytes; None if the chunk has less."""
        at = self.used
        if at + size > self.size:
            return None
        self.used += size
        return [
            self._symmetric.handle.get_buffer(r, (size,), torch.uint8, at) for r in range(ranks)
        ]


class _Mailboxes:
    """The mailboxes of a group on this rank's GPU."""

    def __init__(self, ranks: Ranks, device: torch.device):
        self._ranks, self._device = ranks, device
        self._chunks: list[_Chunk] = []
        # key: (capture id, stream, largest number of elements)
        self._of: dict[tuple[int, int, int], list[Tensor]] = {}

    def of(self, elements: int) -> list[Tensor] | None:
        """Each rank's mailboxes for the current stream. None in a capture if no chunk has enough
        memory left."""
        stream = torch.cuda.current_stream(self._device).cuda_stream
        capture = ops.capture_id(stream) if torch.cuda.is_current_stream_capturing() else 0
        most = max(_LEAST_ELEMENTS, 1 << (elements - 1).bit_length())
        key = capture, stream, most
        found = self._of.get(key)
        if found is None:
            size = ops.mailbox_bytes(most, self._ranks.size)
            if not capture:
                self._reserve(size)
            for chunk in self._chunks:
                if found := chunk.cut(size, self._ranks.size):
                    self._of[key] = found
                    break
        return found

    def _reserve(self, size: int) -> None:
        """Allocates a chunk unless one has `size` bytes and half a chunk more free. A capture cannot
        allocate chunks, so the half is for later captures."""
        free = max((chunk.size - chunk.used for chunk in self._chunks), default=0)
        reserve = chunk_bytes(self._ranks.size) // 2
        if free < reserve + size and len(self._chunks) < _MOST_CHUNKS:
            self._chunks.append(_Chunk(self._ranks, self._device))


_known: dict[str, tuple[dist.ProcessGroup, _Mailboxes | None]] = {}


def mailboxes_for(x: Tensor, ranks: Ranks) -> list[Tensor] | None:
    """Each rank's mailboxes for the sum of x over ranks on the current stream, or None if another
    transport must serve. All ranks get the same answer for an x of the same shape. A group whose
    first such call is inside a capture gets None there, and NCCL serves it.
    """
    if (
        x.device.type != "cuda"
        or x.dtype != torch.float32
        or not x.numel()
        or not 2 <= ranks.size <= _MOST_RANKS
    ):
        return None
    if x.numel() * x.element_size() > MOST_BYTES:
        return None
    name, group = ranks.group.group_name, ranks.group
    if name not in _known or _known[name][0] is not group:  # another group may reuse the name
        if torch.cuda.is_current_stream_capturing():
            return None
        _known[name] = group, _Mailboxes(ranks, x.device) if reaches_all(x.device, ranks) else None
    mailboxes = _known[name][1]
    return None if mailboxes is None else mailboxes.of(x.numel())
