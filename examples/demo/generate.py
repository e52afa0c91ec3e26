# SPDX-License-Identifier: BSD-3-Clause
"""Generation with a continuous batch: sequences join when a place is free and leave when they are
done; each step runs one packed batch in which a newcomer brings its whole prompt and every other
sequence its last byte.

Two ways to keep keys and values, with one interface (`join`, `begin`, `attend`, `leave`):
PagedRunner on torch_gpukern's PagedKVCache and paged_attn, PaddedRunner on PyTorch's built-ins,
one padded row per place and scaled_dot_product_attention over it.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from model import GPT, Config, GpukernOps, Positions, TorchOps
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


@dataclass
class Request:
    """A prompt, how many bytes to add to it, and what was added."""

    prompt: bytes
    new_bytes: int
    text: bytearray = field(default_factory=bytearray)
    handle: int = -1
    cached: int = 0  # bytes whose keys are in the cache

    def pending(self) -> bytes:
        """The bytes that the next step has to run."""
        return (self.prompt + bytes(self.text))[self.cached :]

    def done(self) -> bool:
        return len(self.text) >= self.new_bytes


class PagedRunner:
    """Pages of 16 tokens; newcomers and running sequences share one rope_kv_write and one
    paged_attn call per layer."""

    rotated = False

    def __init__(
        self, config: Config, places: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        from torch_gpukern import PagedKVCache, paged_attn

        block_size = 16
        self.ops = GpukernOps()
        self.paged_attn = paged_attn
        self.cache = PagedKVCache(
            num_blocks=places * config.context // block_size,
            block_size=block_size,
            heads_kv=config.heads_kv,
            head_dim=config.head_dim,
            layers=config.layers,
            dtype=dtype,
            device=device,
        )
        self.device = device

    def join(self, request: Request) -> None:
        request.handle = self.cache.allocate()

    def leave(self, request: Request) -> None:
        self.cache.free(request.handle)

    def begin(self, batch: list[Request], counts: list[int]) -> None:
        """Reserves the pages of this step's tokens; counts[i] of sequence i."""
        handles = [request.handle for request in batch]
        self.slots = self.cache.extend(handles, counts)
        self.table = self.cache.block_table(handles)
        self.lens = self.cache.seq_lens(handles)
        starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        # without lengths every sequence has the same number of tokens: plain decode
        self.starts = starts.to(self.device) if max(counts) > 1 else None
        self.longest = max(counts)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, at: Positions) -> Tensor:
        """q [T, heads_q, head_dim], k and v [T, heads_kv, head_dim], not yet rotated -> like q"""
        cache = self.cache
        q = cache.rope_write(q, k, v, at.cos, at.sin, at.positions, self.slots, layer, **at.norm())
        new = {"cu_seqlens_q": self.starts, "max_seqlen_q": self.longest}
        return self.paged_attn(q, cache.k[layer], cache.v[layer], self.table, self.lens, **new)


class PaddedRunner:
    """What PyTorch alone offers: a padded row per place, causal SDPA for each prompt and one masked
    SDPA for all running sequences."""

    rotated = True

    def __init__(
        self,
        config: Config,
        places: int,
        dtype: torch.dtype,
        device: torch.device,
        backend: SDPBackend | None = None,
    ) -> None:
        self.backend = backend
        shape = config.layers, places, config.heads_kv, config.context, config.head_dim
        self.ops = TorchOps()
        self.k, self.v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self.device = device
        self.free = list(range(places))

    def join(self, request: Request) -> None:
        request.handle = self.free.pop()

    def leave(self, request: Request) -> None:
        self.free.append(request.handle)

    def begin(self, batch: list[Request], counts: list[int]) -> None:
        """Where this step's tokens go, and which keys a running sequence may see."""
        rows, positions, self.prompts, running = [], [], [], []
        for request, count in zip(batch, counts):
            first = len(rows)
            rows += [request.handle] * count
            positions += range(request.cached, request.cached + count)
            if count > 1:
                self.prompts.append((slice(first, first + count), request.handle, count))
            else:
                running.append((first, request.handle, request.cached + 1))
        self.rows, self.positions = (torch.tensor(x, device=self.device) for x in (rows, positions))
        if running:
            tokens, handles, lens = (torch.tensor(x, device=self.device) for x in zip(*running))
            self.longest = max(length for _, _, length in running)
            # [running, longest]
            mask = torch.arange(self.longest, device=self.device) < lens[:, None]
            self.running = tokens, handles, mask[:, None, None]
        else:
            self.running = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, heads_q, head_dim], k and v [T, heads_kv, head_dim] -> like q"""
        with nullcontext() if self.backend is None else sdpa_kernel(self.backend):
            return self._attend(layer, q, k, v)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.k[layer][self.rows, :, self.positions] = k
        self.v[layer][self.rows, :, self.positions] = v
        out = torch.empty_like(q)
        for tokens, row, count in self.prompts:
            k_row, v_row = (x[layer, row, :, :count][None] for x in (self.k, self.v))
            q_row = q[tokens].transpose(0, 1)[None]
            y = F.scaled_dot_product_attention(q_row, k_row, v_row, is_causal=True, enable_gqa=True)
            out[tokens] = y[0].transpose(0, 1)
        if self.running is not None:
            tokens, rows, mask = self.running
            k_rows, v_rows = (x[layer, rows, :, : self.longest] for x in (self.k, self.v))
            q_rows = q[tokens][:, :, None]
            y = F.scaled_dot_product_attention(q_rows, k_rows, v_rows, mask, enable_gqa=True)
            out[tokens] = y[:, :, 0]
        return out


@dataclass
class Generation:
    """What a run gave: logits [steps of all sequences, vocab] in the order they were made, bytes
    added, seconds, and the most sequences that ran at once."""

    logits: Tensor
    new_bytes: int
    seconds: float
    steps: int


@torch.inference_mode()
def generate(
    model: GPT,
    runner: PagedRunner | PaddedRunner,
    requests: list[Request],
    places: int,
    temperature: float,
    follow: list[bytes] | None = None,
) -> Generation:
    """Runs all requests, at most `places` at once. With `follow`, the texts of an earlier run, the
    sampled byte is replaced by that run's, so that two runs see the same inputs to the end."""
    generator = torch.Generator().manual_seed(0)
    waiting, batch = deque(enumerate(requests)), []
    logits, steps, grams = [], 0, model.config.grams
    start = time.perf_counter()
    while waiting or batch:
        while waiting and len(batch) < places:
            runner.join(waiting[0][1])
            batch.append(waiting.popleft())
        running = [request for _, request in batch]
        pending = [request.pending() for request in running]
        runner.begin(running, [len(x) for x in pending])
        tokens, positions = [], []
        for request, new in zip(running, pending):
            seen = bytes(grams - 1) + request.prompt + bytes(request.text)
            for i in range(request.cached, request.cached + len(new)):
                tokens.append(seen[i : i + grams][::-1])
                positions.append(i)
            request.cached += len(new)
        packed = torch.tensor([list(x) for x in tokens], device=runner.device)
        at = torch.tensor(positions, device=runner.device)
        out = model(packed, at, runner.ops, runner.attend, runner.rotated)
        ends = torch.tensor([len(x) for x in pending], device=runner.device).cumsum(0) - 1
        out = out[ends]  # [sequences, vocab]: the last byte of each
        probabilities = (out / temperature).softmax(dim=-1).cpu()
        picked = torch.multinomial(probabilities, 1, generator=generator)[:, 0].tolist()
        for (index, request), byte in zip(batch, picked):
            request.text.append(byte if follow is None else follow[index][len(request.text)])
        logits.append(out)
        steps += 1
        for _, request in batch:
            if request.done():
                runner.leave(request)
        batch = [entry for entry in batch if not entry[1].done()]
    seconds = time.perf_counter() - start
    return Generation(torch.cat(logits), sum(r.new_bytes for r in requests), seconds, steps)


def for_inference(model: GPT, dtype: torch.dtype) -> GPT:
    """A copy with weights of the dtype; the tables of the rotary positions stay in float32."""
    twin = copy.deepcopy(model)
    for parameter in twin.parameters():
        parameter.data = parameter.data.to(dtype)
    return twin
