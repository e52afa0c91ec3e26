# SPDX-License-Identifier: BSD-3-Clause
"""A group of ranks: its name, who is in it, and whether they agree about a call."""

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

# The name of newer releases, where the older one warns.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Group = ProcessGroup | DeviceMesh | None


def process_group(group: Group) -> ProcessGroup:
    """The group that a caller means; None is that of all ranks."""
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
            f"{type(group).__name__}; "
            "is torch.distributed initialised, and this rank a member?"
        )
    return group


def of_name(name: str) -> ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)


def _timeout_s(group: ProcessGroup) -> float:
    """The group's own, of the backend that serves GPUs."""
    try:
        return group._get_backend(torch.device("cuda")).options._timeout.total_seconds()
    except (RuntimeError, AttributeError):  # no such backend, or one without options
        return dist.distributed_c10d.default_pg_timeout.total_seconds()


class Ranks:
    """The ranks of a group, as one of them sees them."""

    def __init__(self, name: str):
        self.group = of_name(name)
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)
        self.timeout_s = _timeout_s(self.group)  # after which a kernel gives up on a rank

    def peer(self, rank: int) -> int:
        """The number that point-to-point calls know a rank of this group by."""
        return dist.get_global_rank(self.group, rank)

    def around(self, step: int) -> tuple[int, int]:
        """The rank `step` behind this one in the circle, and the one `step` before."""
        return (self.rank + step) % self.size, (self.rank - step) % self.size


_known: dict[str, Ranks] = {}


def ranks_of(name: str) -> Ranks:
    """`Ranks` of a group, made once: asking torch takes longer than beginning a copy."""
    found = _known.get(name)
    if found is None or found.group is not of_name(name):  # a name may come back for another group
        found = _known[name] = Ranks(name)
    return found


def size_of(name: str) -> int:
    return dist.get_world_size(of_name(name))


def rank_in(name: str) -> int:
    return dist.get_rank(of_name(name))


def checked(device: torch.device) -> bool:
    """Whether ranks compare their calls."""
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
    """Returns where every rank describes its call alike, and raises ValueError on every rank where
    one does not.

    rows: a number that ranks may have differently. Returned are those of all; without the
    comparison this rank's, for all.

    `describe` returns what must be the same everywhere, by argument. It may raise for what is wrong
    on its own rank: the others learn of it, whatever the error is, so that none waits for a rank
    that has left.
    """
    if not checked(device):
        describe()
        return [rows] * ranks.size
    try:
        mine, error = {"the function": op} | describe(), None
    except Exception as raised:
        mine, error = {}, raised
    text = json.dumps([mine, None if error is None else str(error)], default=str)
    # An error is told apart by a second number, so that equal errors of all ranks are found too.
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    sent = torch.tensor([digest, error is not None, rows], dtype=torch.int64, device=device)
    met = sent.new_empty(ranks.size * 3)
    # By its handle: TORCH_NCCL_BLOCKING_WAIT bounds `wait` alone, and a dead rank would be waited
    # for below, without end.
    all_gather(met, sent, group=ranks.group, async_op=True).wait()
    digests = met.view(ranks.size, 3).tolist()
    failed = any(bad for _, bad, _ in digests)
    if not failed and len({number for number, _, _ in digests}) == 1:
        return [each for _, _, each in digests]
    told: list[Any] = [None] * ranks.size
    dist.all_gather_object(told, text, group=ranks.group)
    if error is not None:
        raise error
    calls = [json.loads(x) for x in told]
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
    """Raises a ValueError that is found before the op that all ranks enter: there too, so that none
    waits for this one."""
    error = ValueError(f"{op}: {text}")

    def describe() -> dict[str, Any]:
        raise error

    if group.size() > 1 and not torch.compiler.is_compiling():
        agree(Ranks(group.group_name), op, device, describe)
    raise error


def facts(**tensors: Tensor | None) -> dict[str, Any]:
    """Shape and dtype by argument, for `agree`."""
    return {
        name: None if x is None else f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
        for name, x in tensors.items()
    }
