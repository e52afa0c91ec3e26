# SPDX-License-Identifier: BSD-3-Clause
"""Measures what each recipe of torch_gpukern.nn.quantize costs the demo's model: held-out bits per
byte, bits per weight, CPU time per byte.

python examples/demo/quantise.py [--steps 400] [--kib 64] [--recipes w4 fp8 ...] [--caches]
[--checkpoint build/demo/quantise.pt]

Trains the model of train.py for some steps, or reads the checkpoint of an earlier run. Then it
quantises the matrices of the blocks by every recipe in turn; embedding and head stay. The recipes
qat-... first train for --qat-steps more steps. The row "bfloat16, trained on" does the same without
rounding, which separates the effect of the steps from that of the recipe. CPU time is that of this
process only.

--caches measures the cost of 8-bit keys and values instead: every window is written to pages and
read from them.
"""

from __future__ import annotations

import argparse
import functools
import math
import time
from pathlib import Path

import torch
from data import Corpus, batches, load_corpus, windows
from model import GPT, Config, GpukernOps, Positions, grams_of
from torch import Tensor, nn
from torch.nn import functional as F
from train import BATCH, CONFIG, ROOT, Progress, learner

import torch_gpukern
from torch_gpukern import KVCacheScales, PagedKVCache
from torch_gpukern.nn import RECIPES, quantize

TRAINED_ON = "bfloat16, trained on"
# Of 1e-4, 3e-4, 1e-3 and 3e-3, the best for qat-w4 and qat-fp8. At 1e-3 the rate alone costs as
# much as fp8's rounding.
QAT_RATE = 3e-4


class LayerOps(GpukernOps):
    """The model's products through nn.Linear modules with the same weights, which `quantize` can
    replace."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.layers = nn.Module()
        self.of: dict[int, nn.Module] = {}
        for i, block in enumerate(model.blocks):
            for name, w in block.named_parameters():
                layer = torch_gpukern.nn.Linear(*w.shape, bias=False)
                layer.weight.data.copy_(w.detach().mT)
                self.layers.add_module(f"block{i}_{name}", layer)
                self.of[id(w)] = layer

    def linear(self, x: Tensor, w: Tensor) -> Tensor:
        layer = self.of.get(id(w))
        return self.gemm(x, w) if layer is None else layer(x)


def trained(corpus: Corpus, config: Config, steps: int) -> GPT:
    """Trains the model. Learning rates follow the share of the steps that is done."""
    torch.manual_seed(0)
    model = GPT(config)
    step, feed = (
        learner(model, GpukernOps(), torch.bfloat16),
        batches(corpus.train, BATCH["cpu"], config.context, seed=1),
    )
    progress, smooth = Progress(steps, "steps", "training"), None
    for done in range(steps):
        bits = step(*next(feed), done / steps).item() / math.log(2)
        smooth = bits if smooth is None else 0.95 * smooth + 0.05 * bits
        progress.show(done + 1, f"{smooth:.3f} bits per byte")
    return model


def bits_per_byte(model: GPT, ops, text: Tensor) -> tuple[float, float]:
    """(bits, CPU microseconds) per byte of text."""
    nats, done, context, began = 0.0, 0, model.config.context, time.process_time()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for tokens, targets in windows(text, BATCH["cpu"], context, overlap=context // 4):
            nats += model.loss(tokens, targets, ops, reduction="sum").item()
            done += int((targets >= 0).sum())
    return nats / math.log(2) / done, (time.process_time() - began) / done * 1e6


def measured(
    model: GPT, corpus: Corpus, recipe: str, text: Tensor, qat_steps: int
) -> tuple[float, float, float]:
    """(bits per byte, bits per weight, CPU us per byte)."""
    ops, context = LayerOps(model), model.config.context
    weights = sum(p.numel() for p in ops.layers.parameters())
    feed = batches(corpus.train, BATCH["cpu"], context, seed=2)

    def through(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model.loss(tokens, targets, ops)

    class Whole(nn.Module):  # what calibration calls
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.call = ops.layers, through

        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
            return self.call(tokens, targets)

    first, done = [next(feed) for _ in range(2)], None
    if not recipe.startswith("bfloat16"):
        done = quantize(Whole(), recipe, calibration=first, say=None)
    if recipe.startswith("qat-") or recipe == TRAINED_ON:
        optimizer = torch.optim.AdamW(ops.layers.parameters(), lr=QAT_RATE, weight_decay=0.0)
        for i in range(qat_steps):
            optimizer.param_groups[0]["lr"] = QAT_RATE * (1 - i / qat_steps)
            through(*next(feed)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if done is not None:
            done.finish()
    bits, us = bits_per_byte(model, ops, text)
    held = 8 * sum(t.numel() * t.element_size() for t in ops.layers.buffers()) / weights
    return bits, 16.0 if done is None else held, us


def paged_nats(model: GPT, cache: PagedKVCache, tokens: Tensor, targets: Tensor) -> float:
    """The loss of a batch of windows whose keys and values are read from the cache."""
    batch, context = tokens.shape
    handles = [cache.allocate() for _ in range(batch)]
    slots = cache.extend(handles, context)
    table, lens = cache.block_table(handles), cache.seq_lens(handles)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, at: Positions) -> Tensor:
        q = cache.rope_write(q, k, v, at.cos, at.sin, at.positions, slots, layer, **at.norm())
        return torch_gpukern.paged_attn(
            q, cache.k[layer], cache.v[layer], table, lens, **cache.scales(layer)
        )

    grams, positions = (
        grams_of(tokens, model.config.grams).flatten(0, 1),
        torch.arange(context).repeat(batch),
    )
    logits = model(grams, positions, GpukernOps(), attend, rotated=False)
    for handle in handles:
        cache.free(handle)
    return F.cross_entropy(logits, targets.flatten(), reduction="sum").item()


def cache_rows(model: GPT, corpus: Corpus, text: Tensor):
    """(cache, scales, bits per byte) for each kind of cache. Scales per head are calibrated on two
    batches."""
    c = model.config
    feed = batches(corpus.train, BATCH["cpu"], c.context, seed=2)
    calibration = [next(feed)[0] for _ in range(2)]
    ones, blocks = torch.ones(c.layers, c.heads_kv), BATCH["cpu"] * c.context // 16
    codes = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
    kinds = [(torch.bfloat16, None), *((d, "heads") for d in codes), (torch.float8_e4m3fn, "1")]
    for dtype, kind in kinds:
        scales = {}
        if kind == "heads":
            found = KVCacheScales(c.layers, c.heads_kv, dtype)

            def observe(
                layer: int, q: Tensor, k: Tensor, v: Tensor, found: KVCacheScales
            ) -> Tensor:
                found.observe(k, v, layer)
                return (
                    GpukernOps()
                    .causal_attention(*(t.transpose(1, 2) for t in (q, k, v)))
                    .transpose(1, 2)
                )

            for tokens in calibration:
                at = torch.arange(c.context)
                model(
                    grams_of(tokens, c.grams),
                    at,
                    GpukernOps(),
                    functools.partial(observe, found=found),
                )
            scales = found.scales()
        elif kind:
            scales = {"k_scale": ones, "v_scale": ones}
        cache = PagedKVCache(
            blocks, 16, c.heads_kv, c.head_dim, layers=c.layers, dtype=dtype, **scales
        )
        nats, done = 0.0, 0
        for tokens, targets in windows(text, BATCH["cpu"], c.context, overlap=c.context // 4):
            nats += paged_nats(model, cache, tokens, targets)
            done += int((targets >= 0).sum())
        yield str(dtype).removeprefix("torch."), kind or "", nats / math.log(2) / done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=int, default=400, help="of training, batches of 8 x 512 bytes"
    )
    parser.add_argument("--kib", type=int, default=64, help="held-out text that is scored")
    parser.add_argument("--qat-steps", type=int, default=40)
    parser.add_argument(
        "--recipes", nargs="+", default=[r for r in RECIPES if not r.startswith("fp8-train")]
    )
    parser.add_argument(
        "--caches", action="store_true", help="keys and values in 8 bits, not weights"
    )
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "build" / "demo" / "quantise.pt")
    args = parser.parse_args()
    corpus = load_corpus()
    if args.checkpoint.exists():
        held = torch.load(args.checkpoint, weights_only=True)
        model = GPT(Config(**held["config"]))
        model.load_state_dict(held["weights"])
    else:
        model = trained(corpus, CONFIG["cpu"], args.steps)
        args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"config": vars(model.config), "weights": model.state_dict()}, args.checkpoint)
    text = corpus.held_out[: 1024 * args.kib + 1]
    if args.caches:
        print("| cache | scales | bits per byte | more than bfloat16 |\n|---|---|---|---|")
        first = None
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            for name, kind, bits in cache_rows(model, corpus, text):
                first = bits if first is None else first
                print(f"| {name} | {kind} | {bits:.4f} | {bits - first:+.4f} |", flush=True)
        return
    print(
        "| recipe | bits per byte | more than bfloat16 | bits a weight | CPU us a byte "
        "|\n|---|---|---|---|---|"
    )
    first = None
    more = [TRAINED_ON] if any(r.startswith("qat-") for r in args.recipes) else []
    for recipe in ["bfloat16", *more, *args.recipes]:
        bits, size, us = measured(model, corpus, recipe, text, args.qat_steps)
        first = bits if first is None else first
        print(
            f"| {recipe} | {bits:.4f} | {bits - first:+.4f} | {size:.2f} | {us:.1f} |", flush=True
        )


if __name__ == "__main__":
    main()
