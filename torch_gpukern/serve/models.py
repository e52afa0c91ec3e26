# SPDX-License-Identifier: BSD-3-Clause
"""Models that the engine runs. Each has a PagedKVCache and runs a packed batch over it.

    begin(handles, counts, mask=None, rows=None)      reserves the pages of a step; OutOfPages where they are too few
    forward(ids, positions, rows, starts, before)     logits [len(rows), vocab] of the rows of the packed tokens

`mask` is bool [T, S], for a step whose drafts have branches: which new tokens of its own request each
token sees, instead of those before it. `rows` of begin is how many rows forward will ask for, one of
each request unless given.

On CUDA a step in which every request has one token is a captured graph. So are, after `prepare`,
steps with drafts or with short prompts (captured.py). If several ranks serve a model (shards.py),
rank 0 sends each step to the others (ranks.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..nn.latent import Absorbed, absorbed, is_latent, latents_of, replaced_expansion
from ..ops import SharedPrefix, attn_merge, flash_attn_varlen, paged_attn
from ..paged.kv_cache import PagedKVCache
from . import captured
from .captured import CAPTURED_BATCH, CAPTURED_TOKENS, PROMPT_KEYS, Captured, Shape, Shapes
from .fused import Fused, fuse
from .ranks import Capture, CopyingCache, Others, Run
from .transfer import moved, on_device

ATTENTION = "gpukern_paged"
LAYERS = ("full_attention", "sliding_attention")  # of transformers' layer_types
# New tokens of a request from which on a step expands latents. For fewer the further launches cost
# more than the arithmetic that they save.
EXPANDED_TOKENS = 256


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
        self.graphs: dict[Shape, Captured] = {}
        self.graph: Captured | None = None  # of the step that began
        self.best: Tensor | None = None  # the largest logits' tokens, where the graph has them
        self.captured_batch = captured_batch if self.device.type == "cuda" else 0
        self.shapes = Shapes(captured.decoding(captured_batch)).below(max_length)
        self.keys = 0  # of the longest request of the step that began, with its new tokens
        self.pool: Any = None  # the memory that all graphs share
        self.others: Others | None = None  # the ranks that this one sends its steps to
        # whether tokens that are on the device alone can be a step's input
        plain = type(self).tokens_of is Model.tokens_of
        self.follows = self.device.type == "cuda" and plain
        self.branches = plain

    def lead(self, others: Others) -> None:
        """From now on the other ranks run each step of this one."""
        self.cache.take_copies()
        self.others, self.follows = others, False

    def shape_of(
        self, counts: list[int], rows: int, mask: bool = False, keys: float = math.inf
    ) -> Shape | None:
        """The captured step for requests with so many tokens each, and logits of so many rows. keys:
        those of the longest request, if they are known."""
        if not 0 < len(counts) <= self.captured_batch:
            return None
        return self.shapes.of(counts, rows, mask, keys)

    def captures(self, counts: list[int]) -> bool:
        """Whether a step of requests with so many tokens each, without drafts, is a captured
        graph."""
        return self.shape_of(counts, len(counts)) is not None

    def draft_room(self, requests: int, drafted: int = CAPTURED_TOKENS) -> int:
        """How many drafted tokens fit into the captured step that so many requests with so many
        drafted tokens take, or into the largest."""
        shape = self.shapes.draft(requests, drafted) if self.captured_batch else None
        return 0 if shape is None else shape.tokens - requests

    def graph_ms(self, requests: int, drafted: int) -> float | None:
        """What the graph takes of a step of requests with one token each and so many drafted ones,
        before they have keys, if they are as long as those of the last step. None if it is not
        captured."""
        shape = self.shape_of([1] * requests, requests, keys=self.keys)
        if drafted and shape is not None:
            shape = self.shapes.draft(requests, drafted)
        graph = self.graphs.get(shape) if shape is not None else None
        return None if graph is None else graph.ms

    def shares_prefixes(self, counts: list[int]) -> bool:
        """Whether requests of such a step that share pages read them once. Other ranks have no
        handles, and so no prefixes. A captured graph would read as many groups as it has requests,
        each with a table as wide as the model's longest sequence, which has not been measured."""
        return self.others is None and not self.captures(counts)

    def begin(
        self,
        handles: list[int],
        counts: list[int],
        mask: np.ndarray | None = None,
        rows: int | None = None,
    ) -> None:
        cache, longest = self.cache, max(counts)
        self.keys = keys = self._length(handles, counts)
        rows = len(counts) if rows is None else rows
        shape = self.shape_of(counts, rows, mask is not None, keys)
        if shape in self.shapes.prompts and keys > PROMPT_KEYS:
            shape = None
        if shape is not None:
            self.need(shape)
            self.graph = graph = self.graphs[shape]
            graph.begin(cache, handles, counts, mask)
            self.step = graph.step
            if self.others is not None:
                arrays = graph.arrays(cache.block_size)
                self.sent = Run(shape, cache.take_copies(), arrays, longest, [])
            return
        columns = -(-keys // cache.block_size)
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
            self.sent = Run(None, cache.take_copies(), arrays, longest, [])

    def _length(self, handles: list[int], counts: list[int]) -> int:
        """Tokens of the longest request, with its new ones."""
        return int((self.cache.lengths(handles) + counts).max())

    def need(self, shape: Shape) -> None:
        """Captures a step, on all ranks, unless it is captured already."""
        if shape not in self.graphs:
            if self.others is not None:
                self.others.tell(Capture(shape))
            self.graphs[shape] = self.capture(shape)

    def prepare(self, batch: int, drafts: int = 0, branches: int = 1) -> None:
        """Captures the steps of up to `batch` requests, so that no request waits for that: those of
        one token each, those with up to so many drafts in so many branches, and those with short
        prompts. The one with the most logits comes first: the others then fit into its memory."""
        if not self.captured_batch:
            return
        batch = min(batch, self.captured_batch)
        whole = self.shapes.decoding
        self.shapes = Shapes.upto(batch, drafts, branches).below(self.max_length)
        for shape in sorted(self.shapes.all, key=lambda s: (s.rows, s.tokens), reverse=True):
            self.need(shape)
        self.shapes = self.shapes._replace(decoding=whole)

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
        if run.shape is not None:
            self.graph = self.graphs[run.shape]
            self.graph.repeat(arrays)
            self.step = self.graph.step
        else:
            self.eager(arrays, run.longest)
        self.step_of(tokens, positions, run.rows)

    def step_of(self, tokens: Any, positions: Any, rows: list[int]) -> Tensor:
        """The logits of the step that began."""
        self.best = None
        if self.graph is None:
            ids = tokens if isinstance(tokens, Tensor) else self.ints(tokens)
            return self.run(ids, self.ints(positions), self.ints(rows))
        logits, self.best = self.graph.run(tokens, positions, rows)
        return logits

    def ints(self, numbers: Any) -> Tensor:
        return on_device(numbers, torch.int64, self.device)

    def capture(self, shape: Shape) -> Captured:
        """A graph of a step."""
        one = torch.tensor(self.tokens_of([0], [0], [[]]))
        # the branches of a tree may be longer than any sequence
        longest = shape.keys or self.max_length
        width = -(-(longest + shape.columns) // self.cache.block_size)
        inputs = captured.inputs_of(shape, tuple(one.shape[1:]), width, self.device)
        here = inputs.here
        self.step = step = Step(
            here["slots"],
            here["table"],
            here["lens"],
            here["starts"] if shape.longest > 1 else None,
            shape.longest,
            mask=here["mask"] if shape.columns else None,
            window=self.window,
        )

        def work() -> tuple[Tensor, Tensor]:
            logits = self.run(here["tokens"], here["positions"], here["rows"])
            return logits, logits.argmax(-1)

        with torch.inference_mode():
            if self.pool is None:
                self.pool = captured.new_pool()
            graph, results = captured.record(work, self.pool)
        return Captured(shape, step, inputs, graph, *results)

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
    other over expanded keys and values, which is a third of the arithmetic. With dtype torch.uint8
    the cache stores latents in 8 bits, if they are 512 + 64 wide.

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
        with replaced_expansion(self.latents, lambda expand: _kept):
            yield

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
