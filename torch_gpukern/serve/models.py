# SPDX-License-Identifier: BSD-3-Clause
"""Models that the engine runs. Each has a PagedKVCache and runs a packed batch over it.

    begin(handles, counts, mask=None)                 reserves the pages of a step; OutOfPages where they are too few
    forward(ids, positions, rows, starts, before)     logits [len(rows), vocab] of the rows of the packed tokens

`mask` is bool [T, S], for a step whose drafts have branches: which new tokens of its own request each
token sees, instead of those before it.

On CUDA a step in which every request has one token is a captured graph, one for each of the sizes
that `sizes_upto` lists. Steps with drafts, and so all steps with a mask, are not
captured. If several ranks serve a model (shards.py), rank 0 sends each step to the others (ranks.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..nn.latent import Absorbed, absorbed, is_latent, latents_of
from ..ops import SharedPrefix, attn_merge, flash_attn_varlen, paged_attn
from ..paged.kv_cache import PagedKVCache
from .fused import Fused, fuse
from .ranks import Capture, CopyingCache, Others, Run
from .transfer import moved, on_device

ATTENTION = "gpukern_paged"
LAYERS = ("full_attention", "sliding_attention")  # of transformers' layer_types
CAPTURED_BATCH = 256  # requests of the largest captured step
# New tokens of a request from which on a step expands latents. For fewer the further launches cost
# more than the arithmetic that they save.
EXPANDED_TOKENS = 256


def sizes_upto(batch: int) -> list[int]:
    """The sizes of captured steps for at most so many requests. Powers of two to 32, then two sizes
    between consecutive ones: up to 256 there are 12, and at most a third of a step's rows is
    inactive above 32."""
    sizes = [1]
    while sizes[-1] < batch:
        last = sizes[-1]
        power = 1 << (last.bit_length() - 1)
        sizes.append(3 * power // 2 if last == power >= 32 else 2 * power)
    return sizes


class Step:
    """What attention reads in a step: the slots of the new tokens, tables, lengths, where each
    request's tokens begin, and the keys that requests share, or a mask over the new tokens. `window`
    is the model's, for a step with a mask."""

    def __init__(
        self,
        slots: Tensor,
        table: Tensor,
        lens: Tensor,
        starts: Tensor | None,
        longest: int,
        prefix: SharedPrefix | None = None,
        mask: Tensor | None = None,
        window: int | None = None,
    ) -> None:
        self.slots, self.table, self.lens = slots, table, lens
        self.starts, self.longest = starts, longest
        self.prefix, self.mask, self.window = prefix, mask, window
        self.old: Tensor | None = None  # keys before the new tokens, if latents are expanded
        self.has_old = False

    def attend(self, cache: PagedKVCache, layer: int, q: Tensor, **rules) -> Tensor:
        """q [T, Hq, D] of tokens whose keys and values are written -> [T, Hq, D]"""
        if self.mask is not None:
            self.check(rules)
            rules["attn_mask"] = self.mask
        return self._over_pages(cache, layer, q, self.lens, rules)

    def attend_old(
        self, cache: PagedKVCache, layer: int, q: Tensor, **rules
    ) -> tuple[Tensor, Tensor]:
        """out [T, Hq, D] and lse [T, Hq] over the keys before the new tokens."""
        rules |= {"is_causal": False, "return_lse": True}
        return self._over_pages(cache, layer, q, self.old, rules)

    def _over_pages(
        self, cache: PagedKVCache, layer: int, q: Tensor, lens: Tensor | None, rules: dict[str, Any]
    ) -> Any:
        """The tokens of the step over the first `lens` keys of each request."""
        return paged_attn(
            q,
            cache.k[layer],
            cache.v[layer],
            self.table,
            lens,
            cu_seqlens_q=self.starts,
            max_seqlen_q=self.longest,
            prefix=self.prefix,
            **cache.scales(layer),
            **rules,
        )

    def check(self, rules: dict[str, Any]) -> None:
        """Attention counts distances in places, and a drafted token of a second branch is not at the
        place of its position. Requests with branches are within `window`, so a window that is as wide
        hides nothing from them.

        Raises:
            ValueError: a narrower window, or slopes.
        """
        left = rules.get("window_left", -1)
        if left >= 0 and (self.window is None or left + 1 < self.window):
            raise ValueError(
                f"a layer has a sliding window of {left + 1} keys; the model's attribute `window` is "
                f"{self.window}, and drafts with branches need the narrowest window there"
            )
        if rules.get("alibi_slopes") is not None:
            raise ValueError("a layer has alibi_slopes; expected none beside drafts with branches")


class Inputs:
    """The numbers that a captured step reads. They lie in one buffer, so that a step copies them
    once: in pinned memory, `host`, and on the device, `here`."""

    def __init__(
        self, shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]], device: torch.device
    ) -> None:
        sizes = {
            name: torch.Size(shape).numel() * dtype.itemsize
            for name, (dtype, shape) in shapes.items()
        }
        there = torch.zeros(sum(sizes.values()), dtype=torch.uint8, pin_memory=True)
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
        self.sent = torch.cuda.Event()

    def wait(self) -> None:
        """Until the last copy has been made, so that `host` may be written."""
        self.sent.synchronize()

    def send(self) -> None:
        self.buffers[1].copy_(self.buffers[0], non_blocking=True)
        self.sent.record()


class Captured(NamedTuple):
    """A graph of a step and what it reads and writes, which stays as long as the graph."""

    step: Step
    graph: Any
    inputs: Inputs
    rows: Tensor
    logits: Tensor
    best: Tensor  # the largest logit's token


class Model:
    """What both kinds share. `run` is the network: logits of the wanted rows of packed tokens.

    Attributes:
        window: the keys of its narrowest sliding window; None if it has none.
        branches: whether drafts may have branches. The tokens of a step are then not in the order of
            their positions.
    """

    window: int | None = None

    def __init__(
        self, cache: PagedKVCache, vocab: int, max_length: int, captured_batch: int = 0
    ) -> None:
        self.cache, self.vocab, self.max_length = cache, vocab, max_length
        self.device = cache.k.device
        self.graphs: dict[int, Captured] = {}
        self.graph: Captured | None = None  # of the step that began
        self.best: Tensor | None = None  # the largest logits' tokens, where the graph has them
        self.captured_batch = captured_batch if self.device.type == "cuda" else 0
        self.sizes = sizes_upto(self.captured_batch)
        self.pool: Any = None  # the memory that all graphs share
        self.width = -(-max_length // cache.block_size)
        self.others: Others | None = None  # the ranks that this one sends its steps to
        # whether tokens that are on the device alone can be a step's input
        plain = type(self).tokens_of is Model.tokens_of
        self.follows = self.device.type == "cuda" and plain
        self.branches = plain

    def lead(self, others: Others) -> None:
        """From now on the other ranks run each step of this one."""
        self.cache.take_copies()
        self.others, self.follows = others, False

    def captures(self, counts: list[int]) -> bool:
        """Whether a step of requests with so many tokens each is a captured graph."""
        return max(counts) == 1 and len(counts) <= self.captured_batch

    def shares_prefixes(self, counts: list[int]) -> bool:
        """Whether requests of such a step that share pages read them once. Other ranks have no
        handles, and so no prefixes. A captured graph would read as many groups as it has requests,
        each with a table as wide as the model's longest sequence, which has not been measured."""
        return self.others is None and not self.captures(counts)

    def begin(self, handles: list[int], counts: list[int], mask: np.ndarray | None = None) -> None:
        cache, longest = self.cache, max(counts)
        if mask is None and self.captures(counts):
            size = self.sizes[bisect_left(self.sizes, len(handles))]
            self.need(size)
            self.graph = graph = self.graphs[size]
            graph.inputs.wait()
            host = graph.inputs.host
            cache.fill_(handles, host["table"], host["lens"], host["slots"])
            self.step = graph.step
            if self.others is not None:
                n = len(handles)
                arrays = {name: host[name].numpy()[:n].copy() for name in ("lens", "slots")}
                columns = -(-int(arrays["lens"].max()) // cache.block_size)
                arrays["table"] = host["table"].numpy()[:n, :columns].copy()
                self.sent = Run(size, cache.take_copies(), arrays, 1, [])
            return
        lengths = [cache.length(h) + n for h, n in zip(handles, counts, strict=True)]
        columns = -(-max(lengths) // cache.block_size)
        table = torch.full((len(handles), columns), -1, dtype=torch.int32)
        lens = torch.empty(len(handles), dtype=torch.int32)
        slots = torch.empty(sum(counts), dtype=torch.int64)
        cache.fill_(handles, table, lens, slots, counts)
        arrays = {"table": table.numpy(), "lens": lens.numpy(), "slots": slots.numpy()}
        if longest > 1:
            arrays["starts"] = np.cumsum([0, *counts], dtype=np.int32)
        if mask is not None:
            arrays["mask"] = mask
        shares = mask is None and self.shares_prefixes(counts)
        self.eager(arrays, longest, cache.shared_prefix(handles, counts) if shares else None)
        if self.others is not None:
            self.sent = Run(0, cache.take_copies(), arrays, longest, [])

    def need(self, size: int) -> None:
        """Captures a step of `size` requests, on all ranks, unless it is captured already."""
        if size not in self.graphs:
            if self.others is not None:
                self.others.tell(Capture(size))
            self.graphs[size] = self.capture(size)

    def prepare(self, batch: int) -> None:
        """Captures the steps of up to `batch` requests, so that no request waits for that. The
        largest comes first: the others then fit into its memory."""
        if self.captured_batch:
            for size in reversed(sizes_upto(min(batch, self.captured_batch))):
                self.need(size)

    def eager(
        self, arrays: dict[str, np.ndarray], longest: int, prefix: SharedPrefix | None = None
    ) -> None:
        """Begins a step that is not captured."""
        here = {name: moved(torch.from_numpy(x), self.device) for name, x in arrays.items()}
        self.graph = None
        self.step = Step(
            here["slots"],
            here["table"],
            here["lens"],
            here.get("starts"),
            longest,
            prefix,
            here.get("mask"),
            self.window,
        )

    @torch.inference_mode()
    def forward(
        self,
        ids: list[int] | Tensor,
        positions: list[int],
        rows: list[int],
        starts: list[int],
        before: list,
    ) -> Tensor:
        """starts[i] is where request i's tokens begin, before[i] its two tokens before these, where
        it has them. If the model follows, ids may be a tensor on its device, and before is empty."""
        if isinstance(ids, Tensor):
            return self.step_of(ids, positions, rows)
        tokens = self.tokens_of(ids, starts, before)
        if self.others is None:
            return self.step_of(tokens, positions, rows)
        more = {"tokens": np.array(tokens), "positions": np.array(positions)}
        self.others.tell(self.sent._replace(arrays=self.sent.arrays | more, rows=rows))
        try:
            return self.step_of(tokens, positions, rows)
        except BaseException as error:
            self.others.failed(error)
            raise

    @torch.inference_mode()
    def follow(self, run: Run) -> None:
        """The step of rank 0 on another rank."""
        arrays = run.arrays
        tokens, positions = arrays.pop("tokens"), arrays.pop("positions")
        if run.size:
            self.graph = self.graphs[run.size]
            inputs = self.graph.inputs
            inputs.wait()
            host, n = inputs.host, len(arrays["lens"])
            for name in ("lens", "slots"):
                host[name].numpy()[:n] = arrays[name]
            host["lens"][n:] = 0
            host["slots"][n:] = -1
            host["table"].numpy()[:n, : arrays["table"].shape[1]] = arrays["table"]
        else:
            self.eager(arrays, run.longest)
        self.step_of(tokens, positions, run.rows)

    def step_of(self, tokens: Any, positions: Any, rows: list[int]) -> Tensor:
        """The logits of the step that began."""
        self.best = None
        if self.graph is None:
            ids = tokens if isinstance(tokens, Tensor) else self.ints(tokens)
            return self.run(ids, self.ints(positions), self.ints(rows))
        inputs, logits, best = self.graph.inputs, self.graph.logits, self.graph.best
        n = len(positions)
        inputs.host["positions"].numpy()[:n] = positions
        if isinstance(tokens, Tensor):
            inputs.send()
            inputs.here["tokens"][:n].copy_(tokens)
        else:
            inputs.host["tokens"].numpy()[:n] = tokens
            inputs.send()
        self.graph.graph.replay()
        if len(rows) == n:
            self.best = best[:n]
            return logits[:n]
        # Where a step has room for one token of a prompt, that row's logits are not asked for.
        return logits[self.ints(rows)]

    def ints(self, numbers: Any) -> Tensor:
        return on_device(numbers, torch.int64, self.device)

    def capture(self, size: int) -> Captured:
        """A graph of a step of `size` requests. Rows behind the batch are inactive: length 0, slot
        -1."""
        one = torch.tensor(self.tokens_of([0] * size, list(range(size)), [[]] * size))
        inputs = Inputs(
            {
                "tokens": (torch.int64, tuple(one.shape)),
                "positions": (torch.int64, (size,)),
                "slots": (torch.int64, (size,)),
                "lens": (torch.int32, (size,)),
                "table": (torch.int32, (size, self.width)),
            },
            self.device,
        )
        inputs.host["tokens"].copy_(one)
        inputs.host["slots"].fill_(-1)
        inputs.send()
        here, rows = inputs.here, torch.arange(size, device=self.device)
        tokens, positions = here["tokens"], here["positions"]
        self.step = step = Step(here["slots"], here["table"], here["lens"], None, 1)
        with torch.inference_mode():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                # libraries set themselves up outside of the capture
                self.run(tokens, positions, rows).argmax(-1)
            torch.cuda.current_stream().wait_stream(side)
            if self.pool is None:
                self.pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                logits = self.run(tokens, positions, rows)
                best = logits.argmax(-1)
        return Captured(step, graph, inputs, rows, logits, best)

    def tokens_of(self, ids: list[int], starts: list[int], before: list) -> list:
        return ids

    def run(self, tokens: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        raise NotImplementedError


class TransformersModel(Model):
    """A causal language model of transformers whose attention layers take an attention function and
    their layer_idx.

    Sliding windows and softcap are served. All layers share one cache, so that no page is released.
    dtype is the cache's, the model's unless given; scales are those of a cache of 8 bits. `ranks` is
    by how many the model's heads were divided (shards.py).

    Mixtures of experts run over grouped_gemm from then on.

    Layers of latent attention (DeepSeek's) attend over their latents (nn/latent.py); the cache
    stores nothing else. In a step with long prompts, the new tokens of a request attend to each
    other over expanded keys and values, which is a third of the arithmetic. With dtype torch.uint8 it stores them in 8
    bits, if they are 512 + 64 wide.

    Layers in Llama's form whose norms and MLP are patched run fused (fused.py). Their weights are
    joined when the TransformersModel is made: quantise, load and patch before.
    """

    def __init__(
        self,
        model: Any,
        num_blocks: int,
        block_size: int = 16,
        *,
        dtype: torch.dtype | None = None,
        scales: dict[str, Any] | None = None,
        captured_batch: int = CAPTURED_BATCH,
        ranks: int = 1,
    ) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface

        AttentionInterface.register(ATTENTION, self._attention)
        AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)
        model.set_attn_implementation(ATTENTION)
        group_experts(model)
        config = model.config.get_text_config()
        for kind in getattr(config, "layer_types", None) or ():
            if kind not in LAYERS:
                raise ValueError(f"a layer is {kind}; expected {' or '.join(LAYERS)}")
        weight = next(model.parameters())
        latents = latents_of(model)
        self.latents = {m: absorbed(m) for m in model.modules() if latents and is_latent(m)}
        shape: dict[str, Any]
        if latents is not None:
            shape = {"latent": latents[0], "layers": latents[1]}
        else:
            heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
            dim = getattr(config, "head_dim", None)
            shape = {
                "heads_kv": heads // ranks,
                "head_dim": dim or config.hidden_size // config.num_attention_heads,
                "layers": config.num_hidden_layers,
            }
        cache = (PagedKVCache if ranks == 1 else CopyingCache)(
            num_blocks,
            block_size,
            **shape,
            dtype=dtype or weight.dtype,
            device=weight.device,
            **(scales or {}),
        )
        super().__init__(cache, config.vocab_size, config.max_position_embeddings, captured_batch)
        self.window = getattr(config, "sliding_window", None) or None
        self.model, self.ranks = model.eval(), ranks
        self.config, self.attention = config, config._attn_implementation
        self.heard: Any = None  # is told of each call of attention, while layers are tried
        self.fused = Fused()
        self.fused = fuse(self)

    def eager(
        self, arrays: dict[str, np.ndarray], longest: int, prefix: SharedPrefix | None = None
    ) -> None:
        super().eager(arrays, longest, prefix)
        if not self.latents or longest < EXPANDED_TOKENS:
            return
        counts = np.diff(arrays["starts"])
        old = arrays["lens"] - counts
        # paged_attn wants as many keys as queries, or none
        if ((old == 0) | (old >= counts)).all():
            self.step.old = moved(torch.from_numpy(old.astype(np.int32)), self.device)
            self.step.has_old = bool(old.any())

    def run(self, tokens: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        if (attention := self.config._attn_implementation) != self.attention:
            raise RuntimeError(
                f"the model's attention is {attention}, so it does not read the pages; expected "
                f"{self.attention}, which TransformersModel has set; make the TransformersModel after "
                f"accelerate and set_attn_implementation"
            )
        with self.fused.active(self), self.latents_kept():
            out = self.model(
                input_ids=tokens[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=rows,
                served_by=self,
            )
        return out.logits[0].float()

    @contextmanager
    def latents_kept(self) -> Iterator[None]:
        """Inside the context latent layers hand latents to attention. Outside, their keys and
        values, as other attention functions expect, or what `accelerate` has put there."""
        before = [(m, vars(m).get("expand_kv")) for m in self.latents]
        try:
            for module in self.latents:
                module.expand_kv = _kept
            yield
        finally:
            for module, own in before:
                if own is None:
                    vars(module).pop("expand_kv", None)
                else:
                    module.expand_kv = own

    @staticmethod
    def _attention(
        module, query, key, value, attention_mask, served_by, scaling=None, dropout=0.0, **kwargs
    ):
        """query [1, Hq, T, D], key and value [1, Hkv, T, D] of the packed new tokens, or for a latent
        layer [1, 1, T, ..] of both parts of their rows; returns [1, T, Hq, D]."""
        rules = {
            "scale": scaling,
            "softcap": kwargs.get("softcap") or 0.0,
            "sinks": kwargs.get("s_aux"),
        }
        if kwargs.get("sliding_window"):
            rules["window_left"] = kwargs["sliding_window"] - 1
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        step, cache, layer = served_by.step, served_by.cache, module.layer_idx
        latent = served_by.latents.get(module)
        plain = not rules["softcap"] and rules["sinks"] is None and "window_left" not in rules
        if latent is not None and step.old is not None and plain:
            cache.write(k, v, step.slots, layer)
            return _expanded(step, cache, module, latent, query, key, value, scaling)[None], None
        if latent is not None:
            q = latent.queries(query[0])
        if served_by.heard is not None:
            served_by.heard(layer, q, rules)
        cache.write(k, v, step.slots, layer)
        out = step.attend(cache, layer, q, **rules)
        return (out if latent is None else latent.values(out))[None], None


def _expanded(
    step: Step,
    cache: PagedKVCache,
    module: Any,
    latent: Absorbed,
    query: Tensor,
    c: Tensor,
    k_pe: Tensor,
    scale: float | None,
) -> Tensor:
    """The attention of a step whose new tokens see each other over expanded keys and values, and
    older tokens over latents: [T, Hq, Dv]."""
    new = (x[0].transpose(0, 1) for x in (query, *latent.expanded(module, c, k_pe)))
    bounds = step.starts, step.starts, step.longest, step.longest
    out, lse = flash_attn_varlen(*new, *bounds, is_causal=True, scale=scale, return_lse=True)
    if not step.has_old:
        return out
    q = latent.queries(query[0])
    mixed, old_lse = step.attend_old(cache, module.layer_idx, q, scale=scale)
    return attn_merge(out, lse, latent.values(mixed), old_lse)[0]


def group_experts(net: Any) -> None:
    """Mixtures of experts become products that do not wait for the device, so that a step can be
    captured. grouped_gemm takes float32 and 16 bits."""
    found = [m for m in net.modules() if hasattr(m, "has_gate") and hasattr(m, "is_transposed")]
    if not found or any(p.dtype is torch.float64 for p in found[0].parameters()):
        return
    from ..integrations.transformers_experts import register_experts

    register_experts()
    net.set_experts_implementation("gpukern")


def _kept(c: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
    """In the place of a latent layer's expand_kv."""
    return c, k_pe
