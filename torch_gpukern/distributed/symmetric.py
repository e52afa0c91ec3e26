# SPDX-License-Identifier: BSD-3-Clause
"""Transfers between the GPUs of one host by their copy engines, over torch's symmetric memory.

NCCL's kernels occupy SMs, and a product whose grid fills the GPU waits for those: what was meant to
go beside it goes before it. A copy engine needs none. A rank's buffer lies in the address space of
every rank of the group; a barrier on the stream says that it is written, or read.

**Buffers.** A transfer takes one from the group's pool and gives it back when its result is there.
It may be written again once a barrier followed: then every rank has read it. Ranks make the same
calls with the same sizes, so all take the same buffer. A barrier speaks for its stream alone: a
stream goes on behind the one that used the pool before. An op holds buffers no longer than it runs;
one that raises gives them back (`define_op_of_ranks`).

Only copies between two GPUs are used, no multicast. ``GPUKERN_DIST_SYMMETRIC=0`` switches it off,
NCCL then serves; so it does in a CUDA graph's capture, for small transfers and for groups that span
hosts.
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

_LEAST_BYTES, _MOST_BYTES, _MOST_BUFFERS = 1 << 20, 1 << 30, 8
_MOST_VIEWS = 64  # of a buffer


class Symmetric:
    """Bytes of every rank that all ranks reach."""

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
    released: int = -1  # how many barriers there had been
    views: dict[tuple, Tensor] = dataclasses.field(default_factory=dict)


class Pool:
    """The buffers of a group on this rank's GPU, and the stream that copies."""

    def __init__(self, ranks: Ranks, device: torch.device):
        self.ranks, self.device, self.barriers = ranks, device, 0
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._buffers: list[Buffer] = []
        self._last: Any = None  # the stream that used the pool last
        # with several streams: behind what it read last, where nothing followed in the pool
        self._read: Any = None
        self._several = False

    def _use(self) -> None:
        """The current stream goes on behind what the last one did with the pool: its barriers and
        reads."""
        here = torch.cuda.current_stream(self.device)
        if self._last is not None and here != self._last:
            self._several = True
            here.wait_stream(self._last) if self._read is None else here.wait_event(self._read)
        self._last, self._read = here, None

    def take(self, size: int) -> Buffer:
        """A buffer of that many bytes on every rank, which no rank reads or writes any more."""
        self._use()
        fits = [x for x in self._buffers if not x.busy and x.data.numel() >= size]
        found = next((x for x in fits if x.released < self.barriers), None)
        if found is None and len(self._buffers) < _MOST_BUFFERS:
            found = self._made(size)
        if found is None and fits:
            found = fits[0]
            self.barrier(found)
        if found is None:  # all are too small, or in use: begin anew
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
        """On the current stream: what any rank did before it is done. A rank that died ends it in a
        CUDA error."""
        self._use()
        buffer.handle.barrier(channel=0, timeout_ms=int(self.ranks.timeout_s * 1e3))
        self.barriers += 1

    def release(self, buffer: Buffer) -> None:
        """What has been begun on the current stream reads it last."""
        self._use()
        if self._several:
            self._read = self._last.record_event()
        buffer.busy, buffer.released = False, self.barriers

    def give_back(self) -> None:
        """What a call that raised has taken, once its copies have ended."""
        taken = [x for x in self._buffers if x.busy]
        if taken:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
        for buffer in taken:
            self.release(buffer)

    def view(
        self, buffer: Buffer, rank: int, shape: Sequence[int], dtype: torch.dtype, at: int = 0
    ) -> Tensor:
        """A rank's buffer, from element `at` on. Views are kept: making one takes as long as
        beginning a copy."""
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
        """What is begun in it goes on the pool's stream, behind what the current stream has begun."""
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
    """The group's pool, or None where a transfer of `size` bytes, the same on all ranks, goes
    another way."""
    if (
        device.type != "cuda"
        or not _LEAST_BYTES <= size <= _MOST_BYTES
        or torch.cuda.is_current_stream_capturing()
    ):
        return None
    name, group = ranks.group.group_name, ranks.group
    if name not in _pools or _pools[name][0] is not group:  # a name may come back for another group
        _pools[name] = group, Pool(ranks, device) if reaches_all(device, ranks) else None
    return _pools[name][1]


def give_back(group: str, **_: Any) -> None:
    """An op of these arguments raised: the buffers that it took from the group's pool are free
    again."""
    _, pool = _pools.get(group, (None, None))
    if pool is not None:
        pool.give_back()


# Declares an op whose kernel may hold buffers of the pool.
define_op_of_ranks = functools.partial(define_op, after_error=give_back)


def reaches_all(device: torch.device, ranks: Ranks) -> bool:
    """Whether all ranks are processes of one host, each with a GPU that reaches the others', and
    want this."""
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
