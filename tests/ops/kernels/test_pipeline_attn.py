# SPDX-License-Identifier: BSD-3-Clause
"""A model of the barrier protocol of flash_attn_fwd_sm90a.cu, run like that of gemm_sm90a.cu in
test_pipeline.py. It has the thread that finds tiles, the thread that loads, and the warps of the
consumer warpgroups. Copies, products and stores may end at any time. With a mask or a bias one more
warp loads (fwd_masked.cuh): mask words, a bias, distances, or more columns of K.

A product of a warpgroup begins to read when its first warp issues it. It ends for all its warps at
the same time, after the products before it. A run fails if nothing can proceed, if a stage, a row
of Q or a tile's description is overwritten while it is read, if anything reads the wrong bytes, or
if something is in flight in a block that has exited. Then each rule is broken in turn.
"""

import itertools
import os
import random
from dataclasses import dataclass, replace

import pytest
from test_pipeline import Barrier, Sync, Wrong, arrivals, ended, interleave

SCHEDULES = 30_000 if os.environ.get("GPUKERN_TEST_ALL") == "1" else 3_000
WARPS = 2  # warps of a warpgroup; the kernel has four
BOXES, BOX = 2, 3  # panels of a copy, and bytes of a panel; arbitrary numbers


@dataclass(frozen=True)
class Kernel:
    warpgroups: int = 2
    q_buffers: int = 2
    stages: int = 2
    ordered: bool = True
    overlap: bool = True
    descriptions: int = 2  # buffers for descriptions; the kernel has four
    # What one more warp loads: "words" of partial blocks, a "bias" [.., Sq, Sk], the "distances" of
    # a bias by distance, or the bias of keys as "lifted" columns of K.
    side: str = ""
    # The steps that take a block of keys of a mask, whose words they share: with two, the last
    # block of a tile may have one.
    steps: int = 1
    # K and V of a block in two stages each (fwd_wide.cuh): halves of the columns and of the keys
    halves: bool = False
    broken: str = ""  # the rule that is broken

    def block(self, rng):
        tiles = [Tile.any(self.warpgroups, rng) for _ in range(rng.randint(1, 4))]
        if self.side:
            tiles = [t.beside(self.side, self.steps) for t in tiles]
        return Block(self, tiles, rng)


@dataclass(frozen=True)
class Tile:
    blocks: int  # blocks of keys
    own: tuple  # how many of them the rows of each warpgroup see
    ragged: bool  # the last block of V has rows that may contain NaN
    # Blocks come last to first (fwd_block): a warpgroup passes the blocks that it does not see before
    # its own.
    backwards: bool
    # If not backwards, with a window: how many of the first blocks a warpgroup's rows do not see.
    unseen: tuple
    partial: tuple = ()  # the steps whose blocks have mask words

    def beside(self, side, steps):
        """The tile where a mask or a bias is loaded. A mask makes all warpgroups take all
        blocks."""
        seen = tuple(own + unseen for own, unseen in zip(self.own, self.unseen))
        own = (self.blocks,) * len(seen) if side == "words" else seen
        kept = 1 + len(set(self.own))  # every kept-th block has words
        partial = tuple(j for j in range(self.blocks) if j // steps % kept == 0)
        unseen = (0,) * len(self.own)
        return replace(self, own=own, backwards=False, unseen=unseen, partial=partial)

    def lead(self, group):
        if self.backwards:
            return self.blocks - self.own[group] if self.own[group] else 0
        return self.unseen[group]

    def ragged_step(self):
        return 0 if self.backwards else self.blocks - 1

    @staticmethod
    def any(warpgroups, rng):
        blocks = rng.choice((0, 1, 1, 2, 3, 4, 5))
        own = [blocks - rng.choice((0, 0, 1, 2, 5)) for _ in range(warpgroups)]
        own = [max(n, 0) for n in own]
        ragged, backwards, windowed = rng.random() < 0.3, rng.random() < 0.4, rng.random() < 0.3
        unseen = [rng.randrange(n) if n and windowed and not backwards else 0 for n in own]
        return Tile(
            blocks, tuple(n - u for n, u in zip(own, unseen)), ragged, backwards, tuple(unseen)
        )


class Ring:
    def __init__(self, stages, consumers, producers=1):
        self.stages = stages
        self.full = [Barrier(producers) for _ in range(stages)]
        self.empty = [Barrier(consumers) for _ in range(stages)]

    def is_full(self, step):
        return ended(self.full[step % self.stages], step // self.stages & 1)

    def is_empty(self, step):
        return ended(self.empty[step % self.stages], step // self.stages & 1 ^ 1)

    def fill(self, step, expect=0):
        self.full[step % self.stages].arrive(expect)

    def release(self, step):
        self.empty[step % self.stages].arrive()


class Product:
    def __init__(self, kind, n, j, step):
        self.kind, self.n, self.j, self.step = kind, n, j, step
        self.issued = 0


class Block:
    """A block of the kernel; the names are the kernel's."""

    def __init__(self, kernel, tiles, rng):
        k = self.k = kernel
        self.tiles, self.rng = [*tiles, None], rng
        kinds = (
            ("tma", "tma", "direct", "parts") if kernel.q_buffers == 2 else ("registers", "parts")
        )
        self.store_kind = rng.choice(kinds)
        self.events = []  # copies, products and stores in flight
        warps = k.warpgroups * WARPS

        def counts(ring, **names):
            return arrivals(
                "attn/forward/fwd_loop.cuh",
                f"typename S::{ring})",
                warps=WARPS,
                WARPGROUPS=k.warpgroups,
                **names,
            )

        q_counts = (
            k.warpgroups
            if k.broken == "q counts warpgroups"
            else counts("QRing(smem_s + S::Q_RING")
        )
        loaders = 0 if k.broken == "description: loader does not count" else 1 + bool(k.side)
        self.described = Ring(
            k.descriptions, counts("TileRing(smem_s + S::TILE_RING", LOADERS=loaders)
        )
        self.rings = {
            "q": Ring(k.q_buffers, q_counts),
            "k": Ring(k.stages, *counts("KvRing(smem_s + S::K_RING", LIFT=k.side == "lifted")),
            "v": Ring(k.stages, counts("KvRing(smem_s + S::V_RING")),
        }
        if k.broken == "lifted: k counts one loader":
            self.rings["k"] = Ring(k.stages, counts("KvRing(smem_s + S::K_RING", LIFT=1)[0])
        self.add_side_rings()
        # the tile of each description; None while it is written
        self.told = [None] * k.descriptions
        self.held = {name: [{} for _ in range(ring.stages)] for name, ring in self.rings.items()}
        self.reading = {name: [0] * ring.stages for name, ring in self.rings.items()}
        # for each stage: the warps that have cleared their rows of V's tail
        self.cleared = [set() for _ in range(k.stages)]
        groups = range(k.warpgroups)
        self.turns = [
            Sync(arrivals("attn/forward/fwd_products.cuh", "1 + warpgroup", warps=WARPS))
            for _ in groups
        ]
        self.meetings = [
            Sync(arrivals("attn/forward/fwd_products.cuh", "4 + warpgroup", warps=WARPS))
            for _ in groups
        ]
        self.products = [[] for _ in groups]  # of a warpgroup, in order
        self.done = [0 for _ in groups]
        self.issued = [0] * warps
        # for each warp: the blocks of its scores, its weights, and its weights as an operand
        self.s, self.w, self.p = [None] * warps, [None] * warps, [None] * warps
        self.ready = [False] * warps  # whether s belongs to the next tile
        self.storing = [0] * warps
        self.alive = 2 + bool(k.side) + warps

    def add_side_rings(self):
        k, file = self.k, "attn/forward/fwd_loop.cuh"
        stages, barrier = {
            "words": (2, "tma_ring<S::WORDS_STAGES>(smem_s + S::WORDS_RING)"),
            "distances": (2, "tma_ring<S::TABLE_STAGES>(smem_s + S::BIAS_RING)"),
            "bias": (1, "tma_ring<1>(smem_s + S::BIAS_RING + 16 * w)"),
        }.get(k.side, (0, ""))
        self.taken = [0] * (k.warpgroups * WARPS)  # stages that a warp has read
        if not stages:
            return
        count = arrivals(file, barrier, warps=WARPS, WARPGROUPS=k.warpgroups)
        if k.broken == "side counts warpgroups":
            count //= WARPS
        for g in range(k.warpgroups if k.side == "bias" else 1):
            self.rings[k.side, g] = Ring(stages, count)

    def run(self):
        agents = [self.consume(g, w) for g in range(self.k.warpgroups) for w in range(WARPS)]
        agents += [self.load_side()] if self.k.side else []
        interleave([self.find_tiles(), self.load_tiles(), *agents], self.events, self.rng)

    def reach(self):
        if not self.alive:
            raise Wrong("something is under way in a block that has left")

    def stages_of(self, step):
        """The counts of the stages of a step in the rings of K and V."""
        return (2 * step, 2 * step + 1) if self.k.halves else (step,)

    # ---- the tile finder ----
    def find_tiles(self):
        for n in range(len(self.tiles)):
            if self.k.broken != "description written without empty":
                yield self.described.is_empty(n)
            self.told[n % self.k.descriptions] = None
            yield None
            self.told[n % self.k.descriptions] = n
            self.described.fill(n)
            yield None
        self.alive -= 1

    def tell(self, n):
        """Reads the description of tile n."""
        if self.told[n % self.k.descriptions] != n:
            raise Wrong("a description is overwritten while it is read")
        return self.tiles[n]

    # ---- the loader ----
    def lands(self, name, step, box, what):
        self.reach()
        ring = self.rings[name]
        stage = step % ring.stages
        if self.reading[name][stage]:
            raise Wrong(f"{name} is overwritten while it is read")
        rows = range(self.k.warpgroups * WARPS) if name == "q" else (0,)
        self.held[name][stage].update({(box, row): what for row in rows})
        if name == "v":
            self.cleared[stage].clear()
        ring.full[stage].land(BOX)

    def load(self, name, step):
        ring = self.rings[name]
        if self.k.broken != f"{name} loaded without empty":
            yield ring.is_empty(step)
        ring.fill(step, BOXES * BOX + (self.k.broken == f"{name}: too much announced"))
        for box in range(BOXES):
            yield None
            self.events.append((self.lands, name, step, box, (name, step)))

    def load_q(self, n):
        t = self.tell(n)
        if t and t.blocks:
            yield from self.load("q", n)
        else:
            if self.k.broken != "no tile told without empty":
                yield self.rings["q"].is_empty(n)
            self.rings["q"].fill(n)

    def load_tiles(self):
        broken, ahead = self.k.broken, self.k.q_buffers == 2
        if broken != "description not awaited":
            yield self.described.is_full(0)
        if ahead:
            yield from self.load_q(0)
        step = 0
        for n in itertools.count():
            if self.tell(n) is None:
                break
            blocks = self.tell(n).blocks
            if ahead and broken == "next q before the tile's k":
                yield self.described.is_full(n + 1)
                yield from self.load_q(n + 1)
            for j in range(blocks + 1):
                if j < blocks:
                    self.tell(n)
                    for at in self.stages_of(step + j):
                        yield from self.load("k", at)
                if not ahead and j == 0:
                    yield from self.load_q(n)
                if j > 0:
                    self.tell(n)
                    for at in self.stages_of(step + j - 1):
                        yield from self.load("v", at)
                if ahead and j == min(2, blocks) and broken != "next q before the tile's k":
                    if broken != "description not awaited":
                        yield self.described.is_full(n + 1)
                    yield from self.load_q(n + 1)
            step += blocks
            if broken != "description kept by the loader":
                self.described.release(n)
            if not ahead and broken != "description not awaited":
                yield self.described.is_full(n + 1)
        if not ahead:
            yield from self.load_q(n)
        self.alive -= 1

    # ---- the warp that loads a mask or a bias ----
    def load_side(self):
        side, broken = self.k.side, self.k.broken
        step, loaded = 0, [0] * self.k.warpgroups
        for n in itertools.count():
            yield self.described.is_full(n)
            if self.tell(n) is None:
                break
            t = self.tell(n)
            for j in range(t.blocks):
                if side == "words":
                    takers = [0] if j in t.partial and j % self.k.steps == 0 else []
                elif side == "bias":
                    takers = [g for g in range(self.k.warpgroups) if j < t.own[g]]
                else:
                    takers = [0]
                for g in takers:
                    name = "k" if side == "lifted" else (side, g)
                    at = step + j if side == "lifted" else loaded[g]
                    if broken != "side loaded without empty":
                        yield self.rings[name].is_empty(at)
                    self.tell(n)
                    self.rings[name].fill(at, BOX)
                    yield None
                    what = ("lifted", at) if side == "lifted" else (side, n, j)
                    self.events.append((self.lands, name, at, "side", what))
                    loaded[g] += 1
            step += t.blocks
            if broken != "description kept by the side's loader":
                self.described.release(n)
        self.alive -= 1

    def read_side(self, side, group, w, n, j, step=None, keeps=False):
        """A warp reads what was loaded for step j of tile n and releases it, unless it keeps it.
        step: counted by K's steps, not by what the warp took."""
        if self.k.side != side:
            return
        me, broken = group * WARPS + w, self.k.broken
        name = side, group if side == "bias" else 0
        ring = self.rings[name]
        by_steps = step is not None and broken != "distances counted by blocks taken"
        at = step if by_steps else self.taken[me]
        if broken == "side released before it is read":
            ring.release(at)
        if broken != "side not awaited":
            yield ring.is_full(at)
        for _ in range(2):
            if self.held[name][at % ring.stages].get(("side", 0)) != (side, n, j):
                raise Wrong("reads other bytes of the mask or bias")
            yield None
        if keeps:
            return
        if broken != "side released before it is read":
            ring.release(at)
        self.taken[me] += 1

    def read_words(self, group, w, n, j):
        t, steps, broken = self.tell(n), self.k.steps, self.k.broken
        if self.k.side != "words" or j not in t.partial:
            return
        later = j % steps < steps - 1  # another step of the block reads the words
        if broken != "words of an incomplete block kept":
            later = later and j < t.blocks - 1
        if broken == "words released in each step":
            later = False
        yield from self.read_side("words", group, w, n, j - j % steps, keeps=later)

    # ---- products of a warpgroup ----
    def see(self, group, product):
        """Checks that a product reads the right bytes, at its beginning and at its end."""
        rows = range(group * WARPS, group * WARPS + WARPS)
        if product.kind == "scores":
            q, k = product.n % self.k.q_buffers, product.step % self.k.stages
            ours = all(
                self.held["k"][k].get((box, 0)) == ("k", product.step) for box in range(BOXES)
            )
            held_q = self.held["q"][q]
            if self.k.side == "lifted":
                lifted = self.held["k"][k].get(("side", 0))
                ours = ours and lifted == ("lifted", product.step)
            if not ours or any(
                held_q.get((box, row)) != ("q", product.n) for box in range(BOXES) for row in rows
            ):
                raise Wrong("a product reads other bytes")
            return
        v, t = product.step % self.k.stages, self.tiles[product.n]
        if any(self.held["v"][v].get((box, 0)) != ("v", product.step) for box in range(BOXES)):
            raise Wrong("a product reads other bytes")
        if t.ragged and product.j == t.ragged_step() and not self.cleared[v].issuperset(rows):
            raise Wrong("a product reads rows past the sequence")

    def mark(self, product, count):
        """Marks the stages that a product reads."""
        if product.kind == "scores":
            self.reading["q"][product.n % self.k.q_buffers] += count
            self.reading["k"][product.step % self.k.stages] += count
        else:
            self.reading["v"][product.step % self.k.stages] += count

    def issue(self, group, w, kind, n, j, step):
        me, products = group * WARPS + w, self.products[group]
        if self.issued[me] == len(products):
            product = Product(kind, n, j, step)
            products.append(product)
            self.see(group, product)
            self.mark(product, 1)
        product = products[self.issued[me]]
        self.issued[me] += 1
        product.issued += 1
        if kind == "scores":
            self.s[me] = None
        elif self.p[me] != (n, j):
            raise Wrong("a product reads other weights")
        if product.issued == WARPS:
            self.events.append((self.finish, group))

    def finish(self, group):
        product = self.products[group][self.done[group]]
        self.done[group] += 1
        self.mark(product, -1)
        self.see(group, product)
        rows = slice(group * WARPS, group * WARPS + WARPS)
        if product.kind == "scores":
            if not self.k.halves or product.step % 2:  # the last one of a block
                self.s[rows] = [(product.n, product.j)] * WARPS
        elif self.p[rows] != [(product.n, product.j)] * WARPS:
            raise Wrong("a product reads other weights")

    def wait_group(self, group, w, pending):
        me = group * WARPS + w
        return lambda: self.done[group] >= self.issued[me] - pending

    def turn_begin(self, group):
        if self.k.ordered:
            yield self.turns[group].arrive()

    def turn_end(self, group):
        if self.k.ordered:
            self.turns[(group + 1) % self.k.warpgroups].arrive()

    # ---- a tile of a warp ----
    def weights(self, me, n, j):
        self.tell(n)
        if self.s[me] != (n, j):
            raise Wrong("other scores are read")

    def release_q(self, me, n):
        if n is not None:
            if self.k.broken != "q released before the store has read it":
                yield lambda: not self.storing[me]
            self.rings["q"].release(n)

    def follows(self, n):
        """Whether the first scores of tile n + 1 are issued behind the last values of tile n; the
        same for all warpgroups."""
        now, then = self.tell(n), self.tell(n + 1)
        alike = (
            then
            and min(now.own)
            and min(then.own)
            and not (now.backwards or then.backwards or max(then.unseen))
        )
        ends = [own + unseen for own, unseen in zip(now.own, now.unseen)]
        return bool(alike and self.store_kind != "parts" and now.blocks - min(ends) < self.k.stages)

    def tile(self, group, w, n, step, last_q):
        """first_block, other_blocks and last_values of the consumer."""
        broken, overlap, t = self.k.broken, self.k.overlap, self.tell(n)
        me, first = group * WARPS + w, t.lead(group)
        end = first + t.own[group]
        k, v = self.rings["k"], self.rings["v"]
        ahead = self.k.q_buffers == 2
        # weights are packed while the next scores, which are issued early, are computed
        late = overlap and ahead

        def issue_scores(j):
            for half, at in enumerate(self.stages_of(step + j)):
                if half and broken != "second half of k not awaited":
                    yield k.is_full(at)
                self.issue(group, w, "scores", n, j, at)

        def values_full(j):
            for at in self.stages_of(step + j):
                yield v.is_full(at)

        def issue_values(j):
            for at in self.stages_of(step + j):
                self.issue(group, w, "values", n, j, at)

        def scores(j):
            stages = self.stages_of(step + j)
            later = len(stages) * int(overlap and j > first)  # products that are issued behind
            if broken == "q released before the last scores" and not ahead and j == end - 1:
                yield from self.release_q(me, last_q)
            if broken == "k released before the wait" and w == 0:
                for at in stages:
                    k.release(at)
            if self.k.halves and j > first and broken != "k released before the wait":
                yield self.wait_group(group, w, later + 1 + (broken == "first half released early"))
                if w == 0:
                    k.release(stages[0])
                stages = stages[1:]
            if broken != "scores not awaited":
                yield self.wait_group(group, w, later)
            if broken not in ("k released before the wait", "k kept") and w == 0:
                for at in stages:
                    k.release(at)
            if (
                not ahead
                and j == end - 1
                and broken not in ("q kept", "q released before the last scores")
            ):
                yield from self.release_q(me, last_q)

        def release_v(j):
            if broken not in ("v released before the wait", "v kept") and w == 0:
                for at in self.stages_of(step + j):
                    v.release(at)

        def clear(j):
            for at in self.stages_of(step + j):
                self.cleared[at % self.k.stages].add(me)
            if broken != "cleared without a barrier":
                yield self.meetings[group].arrive()

        def clear_tail():
            if t.ragged and not t.backwards and end == t.blocks:
                yield from clear(end - 1)

        yield from self.read_words(group, w, n, first)
        if not self.ready[me]:
            if broken != "k not awaited":
                yield k.is_full(self.stages_of(step + first)[0])
            yield from self.read_side("distances", group, w, n, first, step + first)
            yield from self.turn_begin(group)
            yield from issue_scores(first)
            self.turn_end(group)
            yield from scores(first)
        yield from self.read_side("bias", group, w, n, first)
        yield None
        self.weights(me, n, first)
        self.w[me] = n, first
        if not late:
            self.p[me] = self.w[me]
        if ahead and broken != "q kept":
            yield from self.release_q(me, last_q)
        if t.ragged and t.backwards and first == 0:
            yield from values_full(0)
            yield from clear(0)
        for j in range(first + 1, end):
            if broken != "k not awaited":
                yield k.is_full(self.stages_of(step + j)[0])
            yield from self.read_side("distances", group, w, n, j, step + j)
            yield from self.turn_begin(group)
            yield from issue_scores(j)
            if late:
                self.p[me] = self.w[me]
            if broken != "v not awaited":
                yield from values_full(j - 1)
            issue_values(j - 1)
            self.turn_end(group)
            if broken == "v released before the wait" and w == 0:
                for at in self.stages_of(step + j - 1):
                    v.release(at)
            yield from self.read_words(group, w, n, j)
            yield from self.read_side("bias", group, w, n, j)
            yield from scores(j)
            if not overlap:
                release_v(j - 1)
            yield None
            self.weights(me, n, j)
            self.w[me] = n, j
            if not overlap or broken == "weights packed before the wait":
                self.p[me] = self.w[me]
            # a wait that is already satisfied ends a basic block; it waits for something this warp has
            if overlap:
                held = self.rings["q"].is_full(n) if ahead else lambda: True
                yield v.is_full(step + j - 1) if broken == "v awaited again" else held
                yield self.wait_group(group, w, 0)
                release_v(j - 1)
                self.weights(me, n, j)  # a row may compute the block again
            if not late:
                self.p[me] = self.w[me]
        if late:
            self.p[me] = self.w[me]
        self.ready[me] = False
        if late:
            if broken != "next description not awaited":
                yield self.described.is_full(n + 1)
            self.ready[me] = self.follows(n)
        if self.ready[me]:
            yield from self.last_and_next(group, w, n, step, end, clear_tail, release_v)
            return
        if broken != "v not awaited":
            yield from values_full(end - 1)
        yield from clear_tail()
        yield from self.turn_begin(group)
        issue_values(end - 1)
        self.turn_end(group)
        if broken == "v released before the wait" and w == 0:
            for at in self.stages_of(step + end - 1):
                v.release(at)
        yield self.wait_group(group, w, 0)
        release_v(end - 1)

    def last_and_next(self, group, w, n, step, end, clear_tail, release_v):
        """Issues the last values of tile n and the first scores of tile n + 1 together. The store
        overlaps with the scores."""
        broken, k, v, blocks = self.k.broken, self.rings["k"], self.rings["v"], self.tell(n).blocks
        me, then = group * WARPS + w, step + blocks
        if broken != "next q not awaited":
            yield self.rings["q"].is_full(n + 1)
        yield from self.passes(group, w, step + end, blocks - end)
        yield v.is_full(step + end - 1)
        yield from clear_tail()
        yield from self.read_side("distances", group, w, n + 1, 0, then)
        yield from self.turn_begin(group)
        self.issue(group, w, "values", n, end - 1, step + end - 1)
        if broken != "next k not awaited":
            yield k.is_full(then)
        self.issue(group, w, "scores", n + 1, 0, then)
        if broken != "next scores: no turn":
            self.turn_end(group)
        if broken == "v released before the wait" and w == 0:
            v.release(step + end - 1)
        if broken == "next k released before the wait" and w == 0:
            k.release(then)
        yield self.wait_group(group, w, 1)
        release_v(end - 1)
        yield from self.store_tile(me, n)
        yield self.wait_group(group, w, 0)
        if broken not in ("next k released before the wait", "next k kept") and w == 0:
            k.release(then)

    def passes(self, group, w, step, blocks):
        """Consumer::pass. One warp releases the stage for all, so each warp must have seen the
        stage full before. Otherwise it would wait for a phase two phases ago. A warpgroup's turn
        synchronises its warps, as a barrier of their own would."""
        broken, k, v = self.k.broken, self.rings["k"], self.rings["v"]
        late = broken == "pass: released before all warps have waited"

        if self.k.halves:
            yield from self.passes_halves(group, w, step, blocks)
            return

        def waits(j):
            if broken != "pass: no wait":
                yield k.is_full(j)
                yield v.is_full(j)

        for j in range(step, step + blocks):
            if not late:
                yield from waits(j)
            if not self.k.ordered and not late:
                yield self.meetings[group].arrive()
            elif broken != "pass: no turn":
                yield from self.turn_begin(group)
                self.turn_end(group)
            if late:
                yield from waits(j)
            if w == 0 and broken != "pass: no release":
                k.release(j)
                v.release(j)
            if self.k.side == "distances" and broken != "pass: distances kept":
                yield self.rings["distances", 0].is_full(j)
                self.rings["distances", 0].release(j)

    def passes_halves(self, group, w, step, blocks):
        """Consumer<T, FwdHopper512, ..>::pass. K of the next block is loaded in the place of this
        block's K, and the other warpgroup may need it in its next turn. V of this block is loaded
        behind it."""
        broken, k, v = self.k.broken, self.rings["k"], self.rings["v"]
        for j in range(step, step + blocks):
            stages = self.stages_of(j)
            for at in stages:
                yield k.is_full(at)
            if broken == "pass: v awaited before k is released":
                for at in stages:
                    yield v.is_full(at)
            if broken == "pass: k released in turn":
                yield from self.turn_begin(group)
            else:
                yield self.meetings[group].arrive()
            if w == 0:
                for at in stages:
                    k.release(at)
            if broken != "pass: k released in turn":
                yield from self.turn_begin(group)
            self.turn_end(group)
            for at in stages:
                yield v.is_full(at)
            if broken != "pass: released before all warps have waited":
                yield self.meetings[group].arrive()
            if w == 0:
                for at in stages:
                    v.release(at)

    # ---- results ----
    def store_reads(self, me, n):
        self.reach()
        stage = n % self.k.q_buffers
        self.reading["q"][stage] -= 1
        self.storing[me] -= 1
        self.see_results(me, n)

    def see_results(self, me, n):
        if any(
            self.held["q"][n % self.k.q_buffers].get((box, me)) != ("out", n)
            for box in range(BOXES)
        ):
            raise Wrong("other results are stored")

    def store_tile(self, me, n):
        stage = n % self.k.q_buffers
        self.tell(n)
        yield None
        if self.store_kind in ("parts", "registers"):
            return
        self.held["q"][stage].update({(box, me): ("out", n) for box in range(BOXES)})
        yield None
        self.tell(n)
        if self.store_kind == "tma":
            self.storing[me] += 1
            self.reading["q"][stage] += 1
            self.events.append((self.store_reads, me, n))
        else:
            self.see_results(me, n)
            yield None
            self.see_results(me, n)

    def consume(self, group, w):
        broken, q_buffers, me = self.k.broken, self.k.q_buffers, group * WARPS + w
        if (
            self.k.ordered
            and group == self.k.warpgroups - 1
            and broken != "nobody has the first turn"
        ):
            self.turns[0].arrive()
        step = 0
        for n in itertools.count():
            if broken != "q not awaited":
                yield self.rings["q"].is_full(n)
            t = self.tell(n)
            if t is None:
                break
            own, lead = t.own[group], t.lead(group)
            last_q = n if q_buffers == 1 else n - 1 if n > 0 else None
            if lead:
                if q_buffers == 2 and broken != "q kept until the first block":
                    yield from self.release_q(me, last_q)
                    last_q = None
                yield from self.passes(group, w, step, lead)
            if own:
                yield from self.tile(group, w, n, step, last_q)
            else:
                self.ready[me] = False
                if broken != "q kept where no key is seen":
                    yield from self.release_q(me, last_q)
            if not self.ready[me]:
                yield from self.passes(group, w, step + lead + own, t.blocks - lead - own)
                if not own and t.blocks and broken != "no turn where no key is seen":
                    yield from self.turn_begin(group)
                    self.turn_end(group)
            step += own if broken == "others' blocks not counted" else t.blocks
            if broken == "description released before the store":
                self.described.release(n)
            if not self.ready[me]:
                yield from self.store_tile(me, n)
            if broken not in ("description released before the store", "description kept"):
                self.described.release(n)
        if broken != "leaves before its store is read":
            yield lambda: not self.storing[me]
        self.alive -= 1


KERNELS = {
    "two warpgroups": Kernel(),
    "two warpgroups, one q": Kernel(q_buffers=1),
    "three warpgroups": Kernel(warpgroups=3, overlap=False),
    "three warpgroups, overlapped": Kernel(warpgroups=3),
    "three warpgroups, one q": Kernel(warpgroups=3, q_buffers=1),
    "two warpgroups, not ordered": Kernel(ordered=False),
    "two warpgroups, one q, not ordered": Kernel(q_buffers=1, ordered=False, overlap=False),
    "three warpgroups, four stages": Kernel(warpgroups=3, stages=4, overlap=False),
    "two warpgroups, four descriptions": Kernel(descriptions=4),
    "mask words": Kernel(side="words"),
    "mask words, two steps": Kernel(side="words", steps=2),
    "mask words, two steps, one q": Kernel(side="words", steps=2, q_buffers=1),
    "bias": Kernel(side="bias", descriptions=4),
    "bias, one q": Kernel(side="bias", q_buffers=1),
    "distances": Kernel(side="distances", descriptions=4),
    "distances, one q": Kernel(side="distances", q_buffers=1),
    "halves": Kernel(q_buffers=1, halves=True, descriptions=4),
    "lifted keys": Kernel(side="lifted", descriptions=4),
    "lifted keys, one q": Kernel(side="lifted", q_buffers=1),
}


def schedules(kernel, count, seed):
    rng = random.Random(seed)
    for _ in range(count):
        kernel.block(rng).run()


@pytest.mark.parametrize("name", KERNELS)
def test_the_protocol_holds(name):
    schedules(KERNELS[name], SCHEDULES // len(KERNELS), name)


OVERWRITTEN, STUCK, OTHER, MANY = (
    "is overwritten while",
    "nothing can go on",
    "reads other bytes",
    "an arrival too many",
)
TOLD, WEIGHTS, SCORES, RESULTS, TAIL = (
    "a description is",
    "other weights",
    "other scores",
    "other results",
    "rows past",
)
AHEAD, ONE_Q, FREE, SERIAL = (
    "two warpgroups",
    "two warpgroups, one q",
    "two warpgroups, not ordered",
    "three warpgroups",
)
BROKEN = {  # kernel and rule -> what may then go wrong first
    (AHEAD, "description written without empty"): f"{TOLD}|{STUCK}",
    (AHEAD, "description not awaited"): TOLD,
    (AHEAD, "description released before the store"): TOLD,
    (AHEAD, "description kept"): STUCK,
    (AHEAD, "description kept by the loader"): STUCK,
    (AHEAD, "description: loader does not count"): f"{TOLD}|{MANY}|{STUCK}",
    (AHEAD, "next q before the tile's k"): STUCK,
    (AHEAD, "k loaded without empty"): f"k {OVERWRITTEN}|{OTHER}|{STUCK}",
    (AHEAD, "v loaded without empty"): f"v {OVERWRITTEN}|{OTHER}|{STUCK}",
    (AHEAD, "q loaded without empty"): f"q {OVERWRITTEN}|{OTHER}|{RESULTS}|{MANY}",
    (AHEAD, "k: too much announced"): STUCK,
    (AHEAD, "v: too much announced"): STUCK,
    (AHEAD, "q: too much announced"): STUCK,
    (AHEAD, "k not awaited"): OTHER,
    (AHEAD, "v not awaited"): f"{OTHER}|{TAIL}",
    (AHEAD, "q not awaited"): f"{OTHER}|{TOLD}",
    (AHEAD, "k released before the wait"): f"k {OVERWRITTEN}",
    (AHEAD, "v released before the wait"): f"v {OVERWRITTEN}",
    (SERIAL, "k released before the wait"): f"k {OVERWRITTEN}",
    (SERIAL, "v released before the wait"): f"v {OVERWRITTEN}",
    (AHEAD, "k kept"): STUCK,
    (AHEAD, "v kept"): STUCK,
    (AHEAD, "q kept"): STUCK,
    (AHEAD, "q kept where no key is seen"): STUCK,
    (AHEAD, "q kept until the first block"): STUCK,
    (ONE_Q, "q kept"): STUCK,
    (AHEAD, "q counts warpgroups"): f"{MANY}|q {OVERWRITTEN}|{RESULTS}|{OTHER}|{STUCK}",
    (AHEAD, "q released before the store has read it"): f"q {OVERWRITTEN}|{RESULTS}",
    (ONE_Q, "q released before the last scores"): f"q {OVERWRITTEN}|{OTHER}",
    (ONE_Q, "q kept where no key is seen"): STUCK,
    (ONE_Q, "q loaded without empty"): f"q {OVERWRITTEN}|{OTHER}|{MANY}",
    (AHEAD, "next description not awaited"): TOLD,
    (AHEAD, "next q not awaited"): OTHER,
    (AHEAD, "next k not awaited"): OTHER,
    (AHEAD, "next k kept"): STUCK,
    (AHEAD, "next k released before the wait"): f"k {OVERWRITTEN}",
    (AHEAD, "next scores: no turn"): STUCK,
    (AHEAD, "scores not awaited"): f"{SCORES}|k {OVERWRITTEN}",
    (AHEAD, "weights packed before the wait"): WEIGHTS,
    (FREE, "cleared without a barrier"): TAIL,
    (AHEAD, "nobody has the first turn"): STUCK,
    (AHEAD, "pass: no turn"): STUCK,
    (SERIAL, "pass: no turn"): STUCK,
    (AHEAD, "no turn where no key is seen"): STUCK,
    (SERIAL, "no turn where no key is seen"): STUCK,
    (AHEAD, "pass: no release"): STUCK,
    (AHEAD, "pass: released before all warps have waited"): STUCK,
    (FREE, "pass: released before all warps have waited"): f"{STUCK}|{SCORES}",
    (AHEAD, "v awaited again"): STUCK,
    (FREE, "v awaited again"): STUCK,
    (FREE, "pass: no wait"): f"{OVERWRITTEN}|{OTHER}|{MANY}|{STUCK}",
    (AHEAD, "others' blocks not counted"): f"{STUCK}|{OTHER}|{MANY}",
    (AHEAD, "leaves before its store is read"): "has left",
    ("halves", "pass: v awaited before k is released"): STUCK,
    ("halves", "pass: k released in turn"): STUCK,
    ("halves", "pass: released before all warps have waited"): f"{STUCK}|v {OVERWRITTEN}",
    ("halves", "second half of k not awaited"): OTHER,
    ("halves", "first half released early"): f"k {OVERWRITTEN}|{STUCK}",
    ("halves", "k released before the wait"): f"k {OVERWRITTEN}",
    ("halves", "v released before the wait"): f"v {OVERWRITTEN}",
    ("halves", "v not awaited"): f"{OTHER}|{TAIL}",
    ("halves", "k loaded without empty"): f"k {OVERWRITTEN}|{OTHER}|{STUCK}|{MANY}",
    ("halves", "v loaded without empty"): f"v {OVERWRITTEN}|{OTHER}|{STUCK}|{MANY}",
    ("mask words", "side counts warpgroups"): f"{MANY}|{OVERWRITTEN}|{OTHER}|{STUCK}",
    ("mask words", "side loaded without empty"): f"{OTHER}|{MANY}|{STUCK}",
    ("mask words", "side not awaited"): OTHER,
    ("mask words", "side released before it is read"): f"{OTHER}|{STUCK}",
    ("mask words", "description kept by the side's loader"): STUCK,
    ("mask words, two steps", "words released in each step"): f"{OTHER}|{MANY}|{STUCK}",
    ("mask words, two steps", "words of an incomplete block kept"): f"{OTHER}|{STUCK}",
    ("mask words, two steps, one q", "side not awaited"): OTHER,
    ("bias", "side not awaited"): OTHER,
    ("bias", "side loaded without empty"): f"{OTHER}|{MANY}|{STUCK}",
    ("bias", "side released before it is read"): f"{OTHER}|{STUCK}",
    ("distances", "side not awaited"): OTHER,
    ("distances", "side loaded without empty"): f"{OTHER}|{MANY}|{STUCK}",
    ("distances", "side released before it is read"): f"{OTHER}|{STUCK}",
    ("distances", "distances counted by blocks taken"): f"{OTHER}|{MANY}|{STUCK}",
    ("distances", "pass: distances kept"): STUCK,
    ("lifted keys", "lifted: k counts one loader"): f"{OTHER}|{MANY}|{STUCK}",
    ("lifted keys", "side loaded without empty"): f"k {OVERWRITTEN}|{OTHER}|{MANY}|{STUCK}",
    ("lifted keys", "description kept by the side's loader"): STUCK,
}


@pytest.mark.parametrize("kernel, rule", BROKEN)
def test_a_broken_rule_is_seen(kernel, rule):
    with pytest.raises(Wrong, match=BROKEN[kernel, rule]):
        # some broken rules show in only 1 of 300 schedules
        schedules(replace(KERNELS[kernel], broken=rule), 4000, rule)
