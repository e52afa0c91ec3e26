# SPDX-License-Identifier: BSD-3-Clause
"""A model of the barrier protocol of flash_attn_fp8_sm90a.cu, run under random schedules like the
model of flash_attn_fwd_sm90a.cu in test_pipeline_attn.py.

It simulates the tile finder, the loader, the producer warps that transpose V and copy its mean, and
the warps of the consumer warpgroups. A run fails on a deadlock, on an overwrite of a stage, a mean
or a tile's description that is being read, and on a read of wrong bytes. A second test breaks each
rule of the protocol in turn and expects a failure.
"""

import itertools
import os
from dataclasses import dataclass, replace

import pytest
from test_pipeline import Barrier, Sync, Wrong, arrivals, interleave
from test_pipeline_attn import MANY, OTHER, OVERWRITTEN, STUCK, Product, Ring, schedules

SCHEDULES = 20_000 if os.environ.get("GPUKERN_TEST_ALL") == "1" else 800
WARPS = 2  # per warpgroup; the kernel has four
TRANSPOSERS = 2
BOX = 3  # bytes of one TMA copy; any number will do


@dataclass(frozen=True)
class Kernel:
    warpgroups: int = 2
    stages: int = 2  # stages of K and of transposed V; the kernel has four
    descriptions: int = 2  # the kernel has four
    q_buffers: int = 2
    # if False, scores are not kept: to redo a block, all warps of a warpgroup multiply Q K^T again
    keeps_scores: bool = True
    broken: str = ""  # the rule that is broken

    def block(self, rng):
        tiles = []
        for _ in range(rng.randint(1, 4)):
            blocks = rng.choice((0, 1, 1, 2, 3, 5))
            tiles.append(
                (
                    blocks,
                    tuple(
                        max(blocks - rng.choice((0, 0, 1, 2)), 0) for _ in range(self.warpgroups)
                    ),
                )
            )
        return Block(self, tiles, rng)


class Block:
    """A thread block, with the kernel's names. A tile is (its number of key blocks, the number of
    them that each warpgroup's rows see)."""

    def __init__(self, kernel, tiles, rng):
        k = self.k = kernel
        self.tiles, self.rng, self.events = [*tiles, None], rng, []
        warps = k.warpgroups * WARPS

        def counts(ring, transposers=TRANSPOSERS):
            source, ring = "attn/forward/fp8_producer.cuh", f"typename S::{ring})"
            return arrivals(
                source, ring, warps=WARPS, WARPGROUPS=k.warpgroups, TRANSPOSERS=transposers
            )

        loaders = 0 if k.broken == "description: transposers do not count" else TRANSPOSERS
        self.described = Ring(k.descriptions, counts("TileRing(smem_s + S::TILE_RING", loaders))
        released, told = counts("Ring(smem_s + S::VT_RING")
        self.rings = {
            "q": Ring(k.q_buffers, counts("QRing(smem_s + S::Q_RING")),
            "k": Ring(k.stages, counts("Ring(smem_s + S::K_RING")),
            "raw": Ring(2, counts("RawRing(smem_s + S::RAW_RING")),
            "v": Ring(k.stages, released),
        }
        told = 1 if k.broken == "v told by one warp" else told
        self.rings["v"].full = [Barrier(told) for _ in range(k.stages)]
        self.told, self.mean = [None] * k.descriptions, [None] * k.descriptions
        self.held = {name: [{} for _ in range(ring.stages)] for name, ring in self.rings.items()}
        self.reading = {name: [0] * ring.stages for name, ring in self.rings.items()}
        self.meetings = [Sync(WARPS) for _ in range(k.warpgroups)]
        self.products = [[] for _ in range(k.warpgroups)]
        self.done, self.issued = [0] * k.warpgroups, [0] * warps
        blocks = range(sum(t[0] for t in tiles))
        self.again = [
            [not k.keeps_scores and rng.random() < 0.3 for _ in blocks] for _ in range(k.warpgroups)
        ]

    def run(self):
        warps = [self.consume(g, w) for g in range(self.k.warpgroups) for w in range(WARPS)]
        turners = [self.transpose(part) for part in range(TRANSPOSERS)]
        interleave([self.find_tiles(), self.load_tiles(), *turners, *warps], self.events, self.rng)

    def write(self, name, step, part, what):
        ring = self.rings[name]
        if self.reading[name][step % ring.stages]:
            raise Wrong(f"{name} is overwritten while it is read")
        self.held[name][step % ring.stages][part] = what

    def whole(self, name, step, parts=1):
        held = self.held[name][step % self.rings[name].stages]
        if any(held.get(part) != step for part in range(parts)):
            raise Wrong(f"{name}: reads other bytes")

    def tell(self, n):
        if self.told[n % self.k.descriptions] != n:
            raise Wrong("a description is overwritten while it is read")
        return self.tiles[n]

    # ---- the producer warpgroup ----
    def find_tiles(self):
        for n in range(len(self.tiles)):
            yield self.described.is_empty(n)
            self.told[n % self.k.descriptions] = n
            self.described.fill(n)
            yield None

    def lands(self, name, step):
        self.write(name, step, 0, step)
        ring = self.rings[name]
        ring.full[step % ring.stages].land(BOX)

    def load(self, name, step):
        if self.k.broken != f"{name} loaded without empty":
            yield self.rings[name].is_empty(step)
        self.rings[name].fill(step, BOX)
        yield None
        self.events.append((self.lands, name, step))

    def load_q(self, n):
        t = self.tell(n)
        if t and t[0]:
            yield from self.load("q", n)
        else:
            yield self.rings["q"].is_empty(n)
            self.rings["q"].fill(n)

    def load_tiles(self):
        ahead = self.k.q_buffers == 2
        yield self.described.is_full(0)
        if ahead:
            yield from self.load_q(0)
        step = 0
        for n in itertools.count():
            if self.tell(n) is None:
                break
            blocks = self.tell(n)[0]
            for j in range(max(blocks, 1)):
                if j < blocks:
                    yield from self.load("k", step + j)
                    yield from self.load("raw", step + j)
                if ahead and j == min(1, max(blocks - 1, 0)):
                    yield self.described.is_full(n + 1)
                    yield from self.load_q(n + 1)
                if not ahead and j == 0:
                    yield from self.load_q(n)
            step += blocks
            self.described.release(n)
            if not ahead:
                yield self.described.is_full(n + 1)
        if not ahead:
            yield from self.load_q(n)

    def transpose(self, part):
        broken, raw, v, step = self.k.broken, self.rings["raw"], self.rings["v"], 0
        for n in itertools.count():
            yield self.described.is_full(n)
            if self.tell(n) is None:
                break
            blocks = self.tell(n)[0]
            for j in range(blocks):
                at = step + j
                if broken != "raw not awaited":
                    yield raw.is_full(at)
                if broken != "v written without empty":
                    yield v.is_empty(at)
                if j == 0 and part == 0:
                    self.mean[n % self.k.descriptions] = None
                if broken == "raw released before it is read":
                    raw.release(at)
                self.whole("raw", at)
                self.reading["raw"][at % raw.stages] += 1
                yield None
                self.whole("raw", at)
                self.reading["raw"][at % raw.stages] -= 1
                self.write("v", at, part, at)
                yield None
                if part == 0 and j == blocks - 1 and broken != "mean not awaited":
                    self.mean[n % self.k.descriptions] = n
                if broken != "v told by one warp" or part == 0:
                    v.fill(at)
                if broken != "raw released before it is read":
                    raw.release(at)
            self.tell(n)
            step += blocks
            if broken not in (
                "description kept by a transposer",
                "description: transposers do not count",
            ):
                self.described.release(n)

    # ---- products of a warpgroup ----
    def see(self, product):
        if product.kind == "scores":
            self.whole("k", product.step)
            self.whole("q", product.n)
        else:
            self.whole("v", product.step, TRANSPOSERS)

    def mark(self, product, count):
        if product.kind == "scores":
            self.reading["q"][product.n % self.k.q_buffers] += count
            self.reading["k"][product.step % self.k.stages] += count
        else:
            self.reading["v"][product.step % self.k.stages] += count

    def issue(self, group, w, kind, n, step):
        me, products = group * WARPS + w, self.products[group]
        if self.issued[me] == len(products):
            products.append(Product(kind, n, 0, step))
            self.see(products[-1])
            self.mark(products[-1], 1)
        product = products[self.issued[me]]
        self.issued[me] += 1
        product.issued += 1
        if product.issued == WARPS:
            self.events.append((self.finish, group))

    def finish(self, group):
        product = self.products[group][self.done[group]]
        self.done[group] += 1
        self.mark(product, -1)
        self.see(product)

    def wait_group(self, group, w, pending):
        return lambda: self.done[group] >= self.issued[group * WARPS + w] - pending

    # ---- a consumer ----
    def consume(self, group, w):
        broken = self.k.broken
        q, k, v = self.rings["q"], self.rings["k"], self.rings["v"]

        def release(ring, step):
            if w == 0:
                ring.release(step)

        def wait_and_release(ring, step, pending, name):
            if broken == f"{name} released before the wait":
                release(ring, step)
            yield self.wait_group(group, w, pending)
            if broken not in (f"{name} released before the wait", f"{name} kept"):
                release(ring, step)

        step = 0
        for n in itertools.count():
            yield q.is_full(n)
            t = self.tell(n)
            if t is None:
                break
            blocks, own = t[0], t[1][group]
            for j in range(own):
                if broken == "q released before the last scores" and j == own - 1:
                    release(q, n)
                if broken != "k not awaited":
                    yield k.is_full(step + j)
                self.issue(group, w, "scores", n, step + j)
                if j:
                    if broken != "v not awaited":
                        yield v.is_full(step + j - 1)
                    self.issue(group, w, "values", n, step + j - 1)
                if j and not self.k.keeps_scores:
                    yield self.wait_group(group, w, 1)
                    yield None  # the weights
                    yield self.meetings[group].arrive()
                    again = self.again[group][step + j]
                    if not again or broken == "k released before it is read again":
                        release(k, step + j)
                    yield from wait_and_release(v, step + j - 1, 0, "v")
                    if again:
                        self.issue(group, w, "scores", n, step + j)
                        yield self.wait_group(group, w, 0)
                        if broken != "k released before it is read again":
                            release(k, step + j)
                    continue
                yield from wait_and_release(k, step + j, int(j > 0), "k")
                yield None  # the weights
                if j:
                    yield from wait_and_release(v, step + j - 1, 0, "v")
            if not own and broken != "q released before all warps have seen it":
                yield self.meetings[group].arrive()
            if not (own and broken == "q released before the last scores") and broken != "q kept":
                release(q, n)
            if own:
                yield v.is_full(step + own - 1)
                self.issue(group, w, "values", n, step + own - 1)
                yield from wait_and_release(v, step + own - 1, 0, "v")
            for j in range(step + own, step + blocks):
                if broken != "pass: no wait":
                    yield k.is_full(j)
                    yield v.is_full(j)
                if broken != "pass: released before all warps have waited":
                    yield self.meetings[group].arrive()
                release(k, j)
                release(v, j)
            yield None
            if blocks and self.mean[n % self.k.descriptions] != n:
                raise Wrong("another mean is added")
            self.tell(n)
            step += blocks
            self.described.release(n)


KERNELS = {
    "two warpgroups": Kernel(),
    "two warpgroups, four stages": Kernel(stages=4, descriptions=4),
    "three warpgroups": Kernel(warpgroups=3),
    "three warpgroups, four stages": Kernel(warpgroups=3, stages=4, descriptions=4),
    "one Q": Kernel(q_buffers=1, descriptions=4),
    "one Q, scores multiplied again": Kernel(q_buffers=1, keeps_scores=False),
}


@pytest.mark.parametrize("name", KERNELS)
def test_the_protocol_holds(name):
    schedules(KERNELS[name], SCHEDULES // len(KERNELS), name)


BROKEN = {  # rule -> what may then go wrong first
    "k loaded without empty": f"k {OVERWRITTEN}|k: {OTHER}|{STUCK}",
    "raw loaded without empty": f"raw {OVERWRITTEN}|raw: {OTHER}|{STUCK}",
    "q loaded without empty": f"q {OVERWRITTEN}|q: {OTHER}|{MANY}",
    "raw not awaited": f"raw: {OTHER}",
    "raw released before it is read": f"raw {OVERWRITTEN}|raw: {OTHER}",
    "v written without empty": f"v {OVERWRITTEN}|v: {OTHER}|{MANY}|{STUCK}",
    "v told by one warp": f"v: {OTHER}|v {OVERWRITTEN}",
    "mean not awaited": "another mean",
    "description kept by a transposer": STUCK,
    "description: transposers do not count": f"a description {OVERWRITTEN}|{STUCK}",
    "k not awaited": f"k: {OTHER}",
    "v not awaited": f"v: {OTHER}",
    "k released before the wait": f"k {OVERWRITTEN}",
    "v released before the wait": f"v {OVERWRITTEN}",
    "k kept": STUCK,
    "v kept": STUCK,
    "q kept": STUCK,
    "q released before the last scores": f"q {OVERWRITTEN}|q: {OTHER}",
    "q released before all warps have seen it": f"{STUCK}|q: {OTHER}",
    "pass: no wait": f"{OVERWRITTEN}|{OTHER}|{MANY}|{STUCK}|another mean",
    "pass: released before all warps have waited": STUCK,
    "k released before it is read again": f"k {OVERWRITTEN}|k: {OTHER}",
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_seen(rule):
    # where there are two stages, a tile's second K comes only after all scores of the tile before
    kernel = KERNELS[
        "one Q, scores multiplied again"
        if rule.endswith("again")
        else "two warpgroups, four stages"
        if rule.startswith("q")
        else "two warpgroups"
    ]
    with pytest.raises(Wrong, match=BROKEN[rule]):
        schedules(replace(kernel, broken=rule), 4000, rule)
