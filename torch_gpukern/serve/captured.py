# SPDX-License-Identifier: BSD-3-Clause
"""Steps that are captured as CUDA graphs: which there are, what they read, how they are recorded.

A graph has fixed sizes, its Shape, and a step takes the smallest shape that has room for it. The
tokens of all requests are packed in each. What is behind a step's own is inactive: requests of
length 0, and tokens with slot -1 that belong to no request.

    decoding    one token of each request; for many requests that are short there are graphs of
                their own
    drafts      up to 1 + drafts tokens of each request; logits of every token. With branches each
                such graph has a mask, whose columns are the tokens that a request may have. Chains
                then take it, too, with a mask of the causal rule: without one they would need as
                many graphs again.
    prompts     one token of most requests and short chunks of prompts; logits of one token a request
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

CAPTURED_BATCH = 256  # requests of the largest captured step
# Tokens of the largest captured step that is not of one token a request. On an H200 a step of 256
# tokens of an 8B model takes the device about as long as its launches take the host, so a graph of
# more would gain nothing.
CAPTURED_TOKENS = 256
# From so many requests on, decoding steps of short ones have graphs of their own. Attention chooses
# its kernel by the columns of the block table, which are the longest length that the host vouches
# for. With the model's longest it takes four blocks for each request and kv head, and that many
# blocks of 64 requests of 100 keys cost 43 us a layer, where the keys are read in 6 (8 kv heads,
# H200). With short tables it takes one block.
SHORT_REQUESTS = 32
# Keys of a short request, at most: for each request of the step, and in all. One block reads a key in
# 16 ns, and four for each of n requests take 0.7 n us. Above SHORT_KEYS `paged_attn` takes its other
# kernels.
SHORT_KEYS_EACH, SHORT_KEYS = 32, 1920
# Up to so many tokens a step is bound by reading the weights, and it takes longer with each further
# 64: an 8B model without keys takes 4.2 ms for 5 tokens, 4.5 for 64, 5.4 for 72 to 128, 6.9 for 192,
# 7.3 for 256 (bfloat16, H200).
FREE_TOKENS = 64
DRAFT_TOKENS = (64, 128, 192, CAPTURED_TOKENS)
PROMPT_TOKENS = (64, 128, 192, CAPTURED_TOKENS)
# Requests of captured steps with prompts, and the fewest tokens of such a step. One request has no
# graphs of its own: attention would take the kernel for prompts, which is 1.3 ms slower for 256 tokens
# without older ones (32 layers, H200).
PROMPT_REQUESTS = {16: 64, 128: 192}
# A step with a prompt and a longer request is not captured: attention in a graph of many requests
# reads the older keys again for every 16 rows.
PROMPT_KEYS = 2048


class Shape(NamedTuple):
    """The sizes of a captured step."""

    requests: int
    tokens: int  # of all requests
    longest: int  # tokens of a request, at most
    rows: int  # whose logits it computes
    columns: int = 0  # of its mask over new tokens; 0 is no mask
    keys: int = 0  # of a request, at most; 0 is no bound but the model's

    def holds(self, requests: int, tokens: int, longest: int, rows: int) -> bool:
        return (
            requests <= self.requests
            and tokens <= self.tokens
            and longest <= self.longest
            and rows <= self.rows
        )


def sizes_upto(batch: int) -> list[int]:
    """The numbers of requests of captured steps for at most so many. Powers of two to 32, then two
    sizes between consecutive ones: up to 256 there are 12, and at most a third of a step's rows is
    inactive above 32."""
    sizes = [1]
    while sizes[-1] < batch:
        last = sizes[-1]
        power = 1 << (last.bit_length() - 1)
        sizes.append(3 * power // 2 if last == power >= 32 else 2 * power)
    return sizes


def decoding(batch: int) -> list[Shape]:
    sizes = sizes_upto(batch)
    short = [n for n in sizes if n >= SHORT_REQUESTS]
    return [
        *(Shape(n, n, 1, n) for n in sizes),
        *(Shape(n, n, 1, n, keys=min(SHORT_KEYS_EACH * n, SHORT_KEYS)) for n in short),
    ]


def drafted(batch: int, drafts: int, branches: int) -> list[Shape]:
    """For few requests a step with all drafts, one for each number of them. For more, steps of
    DRAFT_TOKENS, each for all numbers of requests that leave a third of it for drafts."""
    if not drafts:
        return []
    longest = 1 + drafts * branches
    columns = longest if branches > 1 else 0
    sizes = sizes_upto(batch)
    shapes = [(n, n * longest) for n in sizes if n * longest <= FREE_TOKENS]
    for tokens in DRAFT_TOKENS:
        most = max((n for n in sizes if 3 * n <= 2 * tokens), default=0)
        if most * longest > tokens - FREE_TOKENS and most * longest > FREE_TOKENS:
            shapes.append((most, tokens))
    return [Shape(n, tokens, longest, tokens, columns) for n, tokens in shapes]


def prompted(batch: int) -> list[Shape]:
    shapes, fewer = [], 0
    for n, least in PROMPT_REQUESTS.items():
        if fewer < batch:
            shapes += [Shape(n, t, t, n) for t in PROMPT_TOKENS if t >= least]
        fewer = n
    return shapes


class Shapes(NamedTuple):
    """All shapes of a model."""

    decoding: list[Shape]
    drafts: list[Shape] = []
    prompts: list[Shape] = []

    @classmethod
    def upto(cls, batch: int, drafts: int, branches: int) -> Shapes:
        return cls(decoding(batch), drafted(batch, drafts, branches), prompted(batch))

    def below(self, longest: int) -> Shapes:
        """Without shapes of short requests that may be as long as the model's longest."""
        return self._replace(decoding=[s for s in self.decoding if s.keys < longest])

    @property
    def all(self) -> list[Shape]:
        return [*self.decoding, *self.drafts, *self.prompts]

    def of(self, counts: list[int], rows: int, mask: bool, keys: float = math.inf) -> Shape | None:
        """The shape of a step with so many tokens of each request, and logits of so many. keys: those
        of the longest request, if they are known."""
        longest, families = max(counts), (self.drafts,)
        if not mask:
            families = (self.decoding,) if longest == 1 else (self.drafts, self.prompts)
        for family in families:
            found = smallest(
                s
                for s in family
                if s.holds(len(counts), sum(counts), longest, rows)
                and (s.columns or not mask)
                and keys <= (s.keys or math.inf)
            )
            if found is not None:
                return found
        return None

    def draft(self, requests: int, drafted: int) -> Shape | None:
        """The shape of a step of requests with one token each and so many drafted ones; if none has
        the room, the largest."""
        room = [s for s in self.drafts if s.requests >= requests]
        most = max((s.tokens for s in room), default=0)
        return smallest(s for s in room if s.tokens >= min(requests + drafted, most))


def smallest(shapes: Iterable[Shape]) -> Shape | None:
    return min(shapes, key=lambda s: (s.tokens, s.requests, not s.keys), default=None)


class Inputs:
    """The numbers that a captured step reads. They lie in one buffer, so that a step copies them
    once: in pinned memory, `host`, and on the device, `here`. The last is copied as far as it is
    used."""

    def __init__(
        self, shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]], device: torch.device
    ) -> None:
        sizes = {
            name: torch.Size(shape).numel() * dtype.itemsize
            for name, (dtype, shape) in shapes.items()
        }
        cuda = device.type == "cuda"
        there = torch.zeros(sum(sizes.values()), dtype=torch.uint8, pin_memory=cuda)
        self.buffers = there, torch.zeros_like(there, device=device)
        self.host, self.here = (
            {
                name: part.view(dtype).view(shape)
                for part, (name, (dtype, shape)) in zip(
                    buffer.split(list(sizes.values())), shapes.items(), strict=True
                )
            }
            for buffer in self.buffers
        )
        self.last = [*sizes][-1]
        self.before = len(there) - sizes[self.last]
        self.sent = torch.cuda.Event() if cuda else None

    def wait(self) -> None:
        """Until the last copy has been made, so that `host` may be written."""
        if self.sent is not None:
            self.sent.synchronize()

    def send(self, rows: int) -> None:
        """rows: those of the last tensor that are used."""
        end = self.before + self.host[self.last][:rows].nbytes
        there, here = self.buffers
        here[:end].copy_(there[:end], non_blocking=True)
        if self.sent is not None:
            self.sent.record()


class Captured:
    """A graph of a step and what it reads and writes, which stays as long as the graph.

    Attributes:
        ms: what a replay takes, of requests without keys.
    """

    def __init__(
        self, shape: Shape, step: Any, inputs: Inputs, graph: Any, logits: Tensor, best: Tensor
    ) -> None:
        self.shape, self.step, self.inputs, self.graph = shape, step, inputs, graph
        self.logits, self.best = logits, best  # best: the largest logit's token of each row
        self.ms = milliseconds(graph)
        self.requests = self.tokens = 0  # of the step that began

    def begin(
        self, cache: Any, handles: list[int], counts: list[int], mask: np.ndarray | None
    ) -> None:
        """Reserves the pages of a step, and writes what attention reads."""
        self.inputs.wait()
        host = self.inputs.host
        each = counts if self.shape.longest > 1 else 1
        cache.fill_(handles, host["table"], host["lens"], host["slots"], each)
        self.rest(counts, mask)

    def rest(self, counts: list[int] | np.ndarray, mask: np.ndarray | None) -> None:
        """Writes where each request's tokens begin, and the mask."""
        self.requests, self.tokens = n, t = len(counts), int(sum(counts))
        if self.shape.longest == 1:
            return
        starts = self.inputs.host["starts"].numpy()
        np.cumsum(counts, out=starts[1 : n + 1])
        starts[n + 1 :] = t
        if self.shape.columns:
            if mask is None:  # chains
                places = np.arange(t) - np.repeat(starts[:n], counts)
                mask = np.arange(self.shape.columns) <= places[:, None]
            self.inputs.host["mask"].numpy()[:t, : mask.shape[1]] = mask

    def arrays(self, block_size: int) -> dict[str, np.ndarray]:
        """What another rank needs to begin the step."""
        host = {name: x.numpy() for name, x in self.inputs.host.items()}
        n, t = self.requests, self.tokens
        columns = -(-int(host["lens"].max()) // block_size)
        found = {
            "lens": host["lens"][:n],
            "slots": host["slots"][:t],
            "table": host["table"][:n, :columns],
            "mask": host["mask"][:t],
        }
        if self.shape.longest > 1:
            found["starts"] = host["starts"][: n + 1]
        return {name: x.copy() for name, x in found.items()}

    def repeat(self, arrays: dict[str, np.ndarray]) -> None:
        """Begins a step that another rank has begun."""
        self.inputs.wait()
        host = {name: x.numpy() for name, x in self.inputs.host.items()}
        lens, slots, table = arrays["lens"], arrays["slots"], arrays["table"]
        n, t = len(lens), len(slots)
        host["lens"][:n], host["lens"][n:] = lens, 0
        host["slots"][:t], host["slots"][t:] = slots, -1
        host["table"][:n, : table.shape[1]] = table
        counts = np.diff(arrays["starts"]) if "starts" in arrays else np.ones(n, np.int32)
        self.rest(counts, arrays["mask"])

    def run(self, tokens: Any, positions: Any, rows: list[int]) -> tuple[Tensor, Tensor]:
        """(logits, their largest one's tokens) of the step that began. tokens: on the host, or a
        tensor on the device."""
        inputs, n = self.inputs, len(positions)
        if len(rows) > self.shape.rows:
            raise ValueError(
                f"a step asks for {len(rows)} rows of logits, and its graph has {self.shape.rows}; "
                f"begin must be told of the rows"
            )
        inputs.host["positions"].numpy()[:n] = positions
        inputs.host["rows"].numpy()[: len(rows)] = rows
        if isinstance(tokens, Tensor):
            inputs.send(self.requests)
            inputs.here["tokens"][:n].copy_(tokens)
        else:
            inputs.host["tokens"].numpy()[:n] = tokens
            inputs.send(self.requests)
        self.graph.replay()
        return self.logits[: len(rows)], self.best[: len(rows)]


def inputs_of(shape: Shape, token: tuple[int, ...], width: int, device: torch.device) -> Inputs:
    """The inputs of a step of this shape, all inactive. token: the shape of a token; width: columns
    of the block table."""
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "tokens": (torch.int64, (shape.tokens, *token)),
        "positions": (torch.int64, (shape.tokens,)),
        "slots": (torch.int64, (shape.tokens,)),
        "rows": (torch.int64, (shape.rows,)),
        "lens": (torch.int32, (shape.requests,)),
        "starts": (torch.int32, (shape.requests + 1,)),
        # rows of whole words, so that int32 may stand behind it
        "mask": (torch.bool, (shape.tokens, -(-shape.columns // 4) * 4)),
        "table": (torch.int32, (shape.requests, width)),
    }
    inputs = Inputs(tensors, device)
    inputs.host["slots"].fill_(-1)
    inputs.send(shape.requests)
    return inputs


def new_pool() -> Any:
    """Memory that graphs share."""
    return torch.cuda.graph_pool_handle()


def record(work: Callable[[], tuple[Tensor, ...]], pool: Any) -> tuple[Any, tuple[Tensor, ...]]:
    """A graph of what `work` launches, and its results, in the memory of a pool."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()  # libraries set themselves up outside of the capture
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        results = work()
    return graph, results


def milliseconds(graph: Any) -> float:
    """Of the second of two replays."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)
