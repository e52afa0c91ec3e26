# SPDX-License-Identifier: BSD-3-Clause
"""A group of ranks: its name, its members, and the check that all ranks make the same call."""

import hashlib
import json
import os
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

# Newer torch releases have all_gather_single and warn about the older name.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Group = ProcessGroup | DeviceMesh | None


def process_group(group: Group) -> ProcessGroup:
    """Converts `group` to a `ProcessGroup`. None stands for the group of all ranks."""
    if group is None:
        group = dist.group.WORLD
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group: a DeviceMesh must have 1 dimension, got {group.ndim}: pass mesh['its "
                f"dimension']"
            )
        group = group.get_group()
    if not isinstance(group, ProcessGroup):
        raise ValueError(
            f"group must be a ProcessGroup, a DeviceMesh of 1 dimension or None, got "
            f"{type(group).__name__}; is torch.distributed initialised, and is this rank a member?"
        )
    return group


def of_name(name: str) -> ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)


def _timeout_s(group: ProcessGroup) -> float:
    """The timeout of the group's CUDA backend, or torch's default."""
    try:
        return group._get_backend(torch.device("cuda")).options._timeout.total_seconds()
    except (RuntimeError, AttributeError):  # no such backend, or one without options
        return dist.distributed_c10d.default_pg_timeout.total_seconds()


class Ranks:
    """A group, this process's rank in it, and its size."""

    def __init__(self, name: str):
        self.group = of_name(name)
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)
        self.timeout_s = _timeout_s(self.group)  # after it, a kernel stops waiting for a rank

    def peer(self, rank: int) -> int:
        """Converts a rank of this group to a global rank, as point-to-point calls need it."""
        return dist.get_global_rank(self.group, rank)

    def around(self, step: int) -> tuple[int, int]:
        """The ranks `step` after and `step` before this one, modulo the group's size."""
        return (self.rank + step) % self.size, (self.rank - step) % self.size


_known: dict[str, Ranks] = {}


def ranks_of(name: str) -> Ranks:
    """The `Ranks` of a group, cached: asking torch takes longer than starting a copy."""
    found = _known.get(name)
    if found is None or found.group is not of_name(name):  # another group may reuse the name
        found = _known[name] = Ranks(name)
    return found


def size_of(name: str) -> int:
    return dist.get_world_size(of_name(name))


def rank_in(name: str) -> int:
    return dist.get_rank(of_name(name))


def checked(device: torch.device) -> bool:
    """True if ranks compare their calls, that is, unless GPUKERN_DIST_CHECK is 0 or a CUDA graph is
    being captured."""
    if os.environ.get("GPUKERN_DIST_CHECK") == "0":
        return False
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def agree(
    ranks: Ranks,
    op: str,
    device: torch.device,
    describe: Callable[[], dict[str, Any]],
    rows: int = 0,
) -> list[int]:
    """Checks that all ranks make the same call. If they do not, every rank raises ValueError.

    describe: returns the values that must be the same on all ranks, by argument. It may raise any
    error about this rank's own arguments. The other ranks then raise, too, instead of waiting for
    this one.
    rows: a number that may differ by rank.

    Returns every rank's `rows`. If ranks do not compare calls, all are assumed to have this rank's
    number.
    """
    if not checked(device):
        describe()
        return [rows] * ranks.size
    try:
        mine, error = {"the function": op} | describe(), None
    except Exception as raised:
        mine, error = {}, raised
    text = json.dumps([mine, None if error is None else str(error)], default=str)
    # The error flag is sent beside the digest, because digests are equal if all ranks raise the
    # same error.
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    sent = torch.tensor([digest, error is not None, rows], dtype=torch.int64, device=device)
    received = sent.new_empty(ranks.size * 3)
    # TORCH_NCCL_BLOCKING_WAIT limits only the handle's `wait`. Without it, tolist() below would
    # wait for a dead rank for ever.
    all_gather(received, sent, group=ranks.group, async_op=True).wait()
    digests = received.view(ranks.size, 3).tolist()
    failed = any(bad for _, bad, _ in digests)
    if not failed and len({number for number, _, _ in digests}) == 1:
        return [each for _, _, each in digests]
    texts: list[Any] = [None] * ranks.size
    dist.all_gather_object(texts, text, group=ranks.group)
    if error is not None:
        raise error
    calls = [json.loads(x) for x in texts]
    for rank, (_, wrong) in enumerate(calls):
        if wrong is not None:
            raise ValueError(f"{op}: rank {rank} refused the call: {wrong}")
    first = calls[0][0]
    for rank, (call, _) in enumerate(calls[1:], 1):
        for argument in {**first, **call}:
            a, b = first.get(argument), call.get(argument)
            if a != b:
                raise ValueError(
                    f"{op}: {argument} is {a} on rank 0, {b} on rank {rank}; all ranks must pass "
                    f"the same"
                )
    raise ValueError(f"{op}: the ranks' calls differ")


def refuse(group: ProcessGroup, op: str, device: torch.device, text: str) -> NoReturn:
    """Raises ValueError for an argument that is checked before the op itself is called.

    This rank first takes part in the comparison of calls. The other ranks then raise, too, instead
    of waiting for it."""
    error = ValueError(f"{op}: {text}")

    def describe() -> dict[str, Any]:
        raise error

    if group.size() > 1 and not torch.compiler.is_compiling():
        agree(Ranks(group.group_name), op, device, describe)
    raise error


def facts(**tensors: Tensor | None) -> dict[str, Any]:
    """dtype and shape by argument name, for `agree`."""
    return {
        name: None if x is None else f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
        for name, x in tensors.items()
    }
