# SPDX-License-Identifier: BSD-3-Clause
"""Transfers between the GPUs of one host by their copy engines, over torch's symmetric memory.

NCCL's kernels occupy SMs. A product whose grid fills the GPU waits for those SMs, so that transfer
and product run one after the other instead of together. A copy engine needs no SM. A rank's buffer
is mapped into the address space of every rank of the group. A barrier on the stream tells the ranks
that a buffer has been written, or read.

**Buffers.** A transfer takes a buffer from the group's pool and releases it when its result has
arrived. The buffer may be written again after the next barrier, because every rank has then read
it. Ranks make the same calls with the same sizes, so all take the same buffer. A barrier orders
only its own stream. So a stream that uses the pool first waits for the stream that used it before.
An op releases its buffers before it returns; `define_op_of_ranks` releases those of an op that
raises.

Only copies between two GPUs are used, no multicast. NCCL serves instead if
``GPUKERN_DIST_SYMMETRIC=0``, in a CUDA graph's capture, for small transfers and for groups that
span hosts.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.define import define_op
from .ranks import Ranks

__all__ = ["Pool", "Symmetric", "define_op_of_ranks", "pool_for", "reaches_all"]

# Bounds of a pool: the smallest and largest transfer in bytes, the number of buffers, and the bytes
# of all buffers. With 32k tokens a rank, 8 key heads of 128 and 8 ranks, the sums of dK and dV take
# 1.9 GB.
_LEAST_BYTES, _MOST_BYTES, _MOST_BUFFERS, _HELD_BYTES = 1 << 20, 4 << 30, 8, 8 << 30
_MOST_VIEWS = 256  # cached per buffer; eight blocks of eight ranks take 120


class Symmetric:
    """Device memory of every rank that all ranks of the group can access."""

    def __init__(self, size: int, ranks: Ranks, device: torch.device):
        import torch.distributed._symmetric_memory as symm_mem

        step = 2 << 20
        self.data = symm_mem.empty(
            (size + step - 1) // step * step, dtype=torch.uint8, device=device
        )
        self.handle = symm_mem.rendezvous(self.data, ranks.group.group_name)


@dataclasses.dataclass
class Buffer:
    data: Tensor  # bytes
    handle: Any
    busy: bool = False
    released: int = -1  # the pool's number of barriers when it was released
    views: dict[tuple, Tensor] = dataclasses.field(default_factory=dict)


class Pool:
    """The buffers of a group on this rank's GPU, and the stream of their copies."""

    def __init__(self, ranks: Ranks, device: torch.device):
        self.ranks, self.device, self.barriers = ranks, device, 0
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._buffers: list[Buffer] = []
        self._last: Any = None  # the stream that used the pool last
        # Once several streams use the pool: an event after the last stream's last read, if no other
        # use of the pool followed it.
        self._read: Any = None
        self._several = False

    def _use(self) -> None:
        """Makes the current stream wait for the barriers and reads of the stream that used the pool
        last."""
        here = torch.cuda.current_stream(self.device)
        if self._last is not None and here != self._last:
            self._several = True
            here.wait_stream(self._last) if self._read is None else here.wait_event(self._read)
        self._last, self._read = here, None

    def take(self, size: int) -> Buffer:
        """A buffer of at least `size` bytes on every rank that no rank reads or writes any more."""
        self._use()
        fits = [x for x in self._buffers if not x.busy and x.data.numel() >= size]
        found = next((x for x in fits if x.released < self.barriers), None)
        in_use = sum(x.data.numel() for x in self._buffers)
        if found is None and len(self._buffers) < _MOST_BUFFERS and in_use + size <= _HELD_BYTES:
            found = self._made(size)
        if found is None and fits:
            found = fits[0]
            self.barrier(found)
        if found is None:  # all are too small or busy: replace the idle ones
            torch.cuda.synchronize(self.device)
            dist.barrier(self.ranks.group)
            self._buffers = [x for x in self._buffers if x.busy]
            found = self._made(size)
        found.busy = True
        return found

    def _made(self, size: int) -> Buffer:
        symmetric = Symmetric(size, self.ranks, self.device)
        made = Buffer(symmetric.data, symmetric.handle)
        self._buffers.append(made)
        return made

    def barrier(self, buffer: Buffer) -> None:
        """A barrier of all ranks on the current stream: later work sees what every rank did before.
        If a rank has died, it ends in a CUDA error."""
        self._use()
        buffer.handle.barrier(channel=0, timeout_ms=int(self.ranks.timeout_s * 1e3))
        self.barriers += 1

    def release(self, buffer: Buffer) -> None:
        """Releases a buffer whose last reads have been issued on the current stream."""
        self._use()
        if self._several:
            self._read = self._last.record_event()
        buffer.busy, buffer.released = False, self.barriers

    def give_back(self) -> None:
        """Releases the buffers of a call that raised, behind the copies it started."""
        taken = [x for x in self._buffers if x.busy]
        if taken:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
        for buffer in taken:
            self.release(buffer)

    def view(
        self, buffer: Buffer, rank: int, shape: Sequence[int], dtype: torch.dtype, at: int = 0
    ) -> Tensor:
        """A view of a rank's buffer from element `at` on. Views are cached, because making one
        takes as long as starting a copy."""
        key = rank, tuple(shape), dtype, at
        found = buffer.views.get(key)
        if found is None:
            if len(buffer.views) >= _MOST_VIEWS:
                buffer.views.clear()
            with torch.inference_mode(False):  # so that every mode may write it
                found = buffer.views[key] = buffer.handle.get_buffer(rank, key[1], dtype, at)
        return found

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Context in which work goes to the pool's stream, after what the current stream has so
        far."""
        here, device = torch.cuda.current_stream(self.device), torch.cuda.current_device()
        self.stream.wait_stream(here)
        torch.cuda.set_stream(self.stream)
        try:
            yield
        finally:
            torch.cuda.set_stream(here)
            if device != self.device.index:
                torch.cuda.set_device(device)


_pools: dict[str, tuple[dist.ProcessGroup, Pool | None]] = {}


def pool_for(device: torch.device, ranks: Ranks, size: int) -> Pool | None:
    """The group's pool, or None if another transport must serve a transfer of `size` bytes; `size`
    must be the same on all ranks."""
    if (
        device.type != "cuda"
        or not _LEAST_BYTES <= size <= _MOST_BYTES
        or torch.cuda.is_current_stream_capturing()
    ):
        return None
    name, group = ranks.group.group_name, ranks.group
    if name not in _pools or _pools[name][0] is not group:  # another group may reuse the name
        _pools[name] = group, Pool(ranks, device) if reaches_all(device, ranks) else None
    return _pools[name][1]


def give_back(group: str, **_: Any) -> None:
    """Releases the pool's buffers after an op of this group has raised."""
    _, pool = _pools.get(group, (None, None))
    if pool is not None:
        pool.give_back()


# Declares an op whose kernel may hold buffers of the pool.
define_op_of_ranks = functools.partial(define_op, after_error=give_back)


def reaches_all(device: torch.device, ranks: Ranks) -> bool:
    """Whether symmetric memory serves the group: all ranks are processes of one host, their GPUs
    can access each other, and no rank has switched it off. All ranks must call it."""
    mine = (socket.gethostname(), device.index, os.environ.get("GPUKERN_DIST_SYMMETRIC") != "0")
    told: list[Any] = [None] * ranks.size
    dist.all_gather_object(told, mine, group=ranks.group)
    ok = all(host == mine[0] and wanted for host, _, wanted in told)
    ok = ok and importlib.util.find_spec("torch.distributed._symmetric_memory") is not None
    answers: list[Any] = [None] * ranks.size
    visible = torch.cuda.device_count()
    near = ok and all(
        i == device.index or i >= visible or torch.cuda.can_device_access_peer(device, i)
        for _, i, _ in told
    )
    dist.all_gather_object(answers, near, group=ranks.group)
    return all(answers)
