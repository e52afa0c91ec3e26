# SPDX-License-Identifier: BSD-3-Clause
"""Transfers by copy engines, with fake streams, events and buffers, so that neither a GPU nor a second
rank is needed. A wait must take the right event, and an op that raises must release its buffers."""

import contextlib

import pytest
import torch
import torch.distributed as dist

from torch_gpukern import distributed as gd
from torch_gpukern.distributed import products, symmetric, transport


class Ranks:
    rank, size = 0, 4

    def around(self, step):
        return (self.rank + step) % self.size, (self.rank - step) % self.size


class Pool:
    """A fake pool that counts copies. The event after the nth copy is the number n."""

    def __init__(self):
        self.stream, self.copies = self, 0

    def record_event(self):
        return self.copies

    @contextlib.contextmanager
    def copying(self):
        yield


@pytest.mark.parametrize("steps", (1, 2, 3))
@pytest.mark.parametrize("second", ((), (1,), (2,), (3,), (1, 3), (2, 3), (1, 2, 3)))
def test_waiting_for_ranks_waits_for_the_last_copy_of_each(steps, second, monkeypatch):
    """The ranks in `second` have two runs of rows. Second runs are copied after the first runs of all
    ranks."""
    moving, pool = transport.Gather.__new__(transport.Gather), Pool()
    moving._pool, moving._ranks, moving._posted, moving._last_copy = pool, Ranks(), [], {}
    moving._runs = [[(0, 0, 1)] * (2 if rank in second else 1) for rank in range(4)]
    moving.whole = [torch.empty(0)]
    copied = {}  # by rank: the number of its last copy

    def copy(source, *run):
        pool.copies += 1
        copied[source] = pool.copies

    moving._copy_others(copy)
    waited = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    current = type("Stream", (), {"wait_event": staticmethod(waited.append)})
    moving.wait_for(steps)
    assert waited == [max(copied[(0 - step) % 4] for step in range(1, steps + 1))]


def test_an_op_that_raises_releases_the_buffers_of_its_group(monkeypatch):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        pool = symmetric.Pool.__new__(symmetric.Pool)
        busy, idle = (symmetric.Buffer(torch.empty(1), None, busy=x) for x in (True, False))
        pool._buffers, pool.device, pool.stream, pool.barriers = [busy, idle], "cpu", "copies", 7
        waited = []
        current = type("Stream", (), {"wait_stream": staticmethod(waited.append)})
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
        pool._last, pool._read, pool._several = current, None, False
        monkeypatch.setitem(symmetric._pools, group.group_name, (group, pool))

        def fails(*args, **kwargs):
            raise RuntimeError("no memory for the product")

        monkeypatch.setattr(products, "_product", fails)
        for call in (gd.gemm_all_reduce, gd.gemm_reduce_scatter):
            busy.busy, busy.released = True, -1
            with pytest.raises(RuntimeError, match="no memory for the product"):
                call(torch.ones(2, 3), torch.ones(3, 4))
            assert not busy.busy and busy.released == 7 and idle.released == -1
        assert waited == ["copies"] * 2  # buffers are free once their copies have ended
    finally:
        dist.destroy_process_group()
