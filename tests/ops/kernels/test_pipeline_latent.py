# SPDX-License-Identifier: BSD-3-Clause
"""A model of the barrier protocol of paged_latent_sm90a.cu (latent_loop.cuh), run under random
schedules. It has the loading warp and the warps of both warpgroups. Copies and products may end at
any time.

A run fails if nothing can proceed, if a buffer is overwritten while it is read, or if a read sees
bytes of another step. Then each rule of the protocol is broken in turn, and the model must detect
it. The wait for the rotary part is not broken, because the order of the copies implies it.
"""

import os
import random
from dataclasses import dataclass

import pytest
from test_pipeline import Barrier, Sync, Wrong, arrivals, ended, interleave

SCHEDULES = 10_000 if os.environ.get("GPUKERN_TEST_ALL") == "1" else 400
WARPS = 2  # warps of a warpgroup; the kernel has four
PANELS = ((0, 1), (2, 3), (4,))  # of each part of a chunk; the kernel has four, four and one
ROPE = 2  # the part that holds the rotary columns, and later P
KERNEL = "attn/paged/paged_latent_sm90a.cu"


def count(barrier):
    """The arrivals of a barrier, read from the kernel's source and scaled to this model's warps."""
    found = arrivals(KERNEL, f"smem_s + S::{barrier}", warps=WARPS)
    return found // 4 * WARPS if barrier == "Q_EMPTY" else found


@dataclass(frozen=True)
class Kernel:
    broken: str = ""  # the rule that is broken


class Place:
    """A buffer in shared memory: what it contains, and how many reads of it are under way."""

    def __init__(self, name):
        self.name, self.held, self.reading = name, None, 0

    def write(self, what):
        if self.reading:
            raise Wrong(f"{self.name} is overwritten while it is read")
        self.held = what

    def begin(self, what):
        if self.held != what:
            raise Wrong(f"{self.name} holds {self.held}, not {what}")
        self.reading += 1

    def end(self):
        self.reading -= 1


class Product:
    """Asynchronous products of a warp, which read some buffers until they end."""

    def __init__(self, block, places, what):
        self.places, self.done = places, False
        for place in places:
            place.begin(what[place] if isinstance(what, dict) else what)
        block.events.append((self.end,))

    def end(self):
        for place in self.places:
            place.end()
        self.done = True


class Block:
    def __init__(self, kernel, tiles, rng):
        self.k, self.tiles, self.rng = kernel, tiles, rng
        self.full = [
            [Barrier(count("FULL + S::FULL_OF_CHUNK * w + 8 * panel")) for _ in range(5)]
            for _ in range(2)
        ]
        self.empty = [
            [Barrier(count("EMPTY + 24 * w + 8 * part")) for _ in range(3)] for _ in range(2)
        ]
        self.ready = [Barrier(count("READY + 8 * w")) for _ in range(2)]
        self.q_full, self.q_empty = Barrier(count("Q_FULL")), Barrier(count("Q_EMPTY"))
        self.q = Place("q")
        self.panels = [[Place(f"panel {p} of chunk {w}") for p in range(5)] for w in range(2)]
        self.missing = [Place(f"missing pages of chunk {w}") for w in range(2)]
        self.refs = [[Place(f"references of {w}") for _ in range(WARPS)] for w in range(2)]
        self.sums = [[[Place("sums") for _ in range(WARPS)] for _ in range(2)] for _ in range(2)]
        self.own = [Sync(WARPS) for _ in range(2)]
        self.both = Sync(2 * WARPS)
        self.events = []

    def agents(self):
        yield self.produce()
        for w in range(2):
            for warp in range(WARPS):
                yield self.consume(w, warp)

    def copy(self, places, what, barrier):
        barrier.arrive(expect=len(places))

        def land(place):
            place.write(what)
            barrier.land(1)

        self.events.extend((land, place) for place in places)

    def produce(self):
        parity, q_parity = [0, 0], 0
        for n, chunks in enumerate(self.tiles):
            if chunks == 0:
                continue
            if self.k.broken != "q is not waited for":
                yield ended(self.q_empty, q_parity ^ 1)
            self.copy([self.q], n, self.q_full)
            q_parity ^= 1
            for t in range(0, chunks, 2):
                order = [(0, 0), (1, 1), (0, 1), (0, 2), (1, 0), (1, 2)]
                for w, part in order:
                    if t + w >= chunks:
                        continue
                    if self.k.broken != f"part {part} is not waited for":
                        yield ended(self.empty[w][part], parity[w] ^ 1)
                    if part == ROPE:
                        self.missing[w].write((n, t + w))
                    for panel in PANELS[part]:
                        self.copy([self.panels[w][panel]], (n, t + w), self.full[w][panel])
                    yield None
                parity[0] ^= 1
                parity[1] ^= t + 1 < chunks

    def consume(self, w, warp):
        x = 1 - w
        full = ready = q_parity = turn = 0
        for n, chunks in enumerate(self.tiles):
            if chunks == 0:
                continue
            yield ended(self.q_full, q_parity)
            q_parity ^= 1
            for t in range(0, chunks, 2):
                two = t + 1 < chunks
                has = w == 0 or two
                if has:
                    own = (n, t + w)
                    running = []
                    for part in (w, x, ROPE):
                        for panel in PANELS[part]:
                            yield ended(self.full[w][panel], full)
                            place = self.panels[w][panel]
                            running.append(Product(self, [self.q, place], {self.q: n, place: own}))
                    self.missing[w].begin(own)
                    self.missing[w].end()
                    yield lambda r=running: all(product.done for product in r)
                    full ^= 1
                    if t + 2 + w >= chunks and self.k.broken != "q is not released":
                        self.q_empty.arrive()
                    self.refs[w][warp].write(own)
                    if self.k.broken != "P is written early":
                        yield self.own[w].arrive()
                    if warp == 0:
                        # all warps write their rows of P; one stands for them
                        self.panels[w][PANELS[ROPE][0]].write(("P", own))
                    yield None
                    self.ready[w].arrive()
                    values = [self.panels[w][panel] for panel in PANELS[w]]
                    mine = Product(self, values, own)
                    if self.k.broken == "released while it is read":
                        self.empty[w][w].arrive()
                if w == 1 or two:
                    theirs = (n, t + x)
                    if self.k.broken != "P is not waited for":
                        yield ended(self.ready[x], ready)
                    ready ^= 1
                    p = self.panels[x][PANELS[ROPE][0]]
                    p.begin(("P", theirs))
                    self.refs[x][warp].begin(theirs)
                    yield None
                    self.refs[x][warp].end()
                    p.end()
                    other = Product(self, [self.panels[x][panel] for panel in PANELS[w]], theirs)
                    if has:
                        yield lambda m=mine: m.done
                        if self.k.broken != "released while it is read":
                            self.empty[w][w].arrive()
                    yield lambda o=other: o.done
                    self.empty[x][w].arrive()
                    self.empty[x][ROPE].arrive()
                else:
                    yield lambda m=mine: m.done
                    if self.k.broken != "released while it is read":
                        self.empty[w][w].arrive()
            if w == 1 and chunks == 1 and self.k.broken != "q of a single chunk is not released":
                self.q_empty.arrive()
            side = 0 if self.k.broken == "one place for the sums" else turn
            turn ^= 1
            self.sums[side][w][warp].write(n)
            yield self.both.arrive()
            self.sums[side][x][warp].begin(n)
            yield None
            self.sums[side][x][warp].end()


def run(kernel, seed):
    rng = random.Random(seed)
    tiles = [rng.choice((0, 1, 2, 3, 4, 5, 7)) for _ in range(rng.randrange(1, 5))]
    block = Block(kernel, tiles, rng)
    interleave(list(block.agents()), block.events, rng)


def test_protocol():
    for seed in range(SCHEDULES):
        run(Kernel(), seed)


@pytest.mark.parametrize(
    "broken",
    (
        "q is not waited for",
        "q is not released",
        "q of a single chunk is not released",
        "part 0 is not waited for",
        "part 1 is not waited for",
        "P is written early",
        "P is not waited for",
        "released while it is read",
        "one place for the sums",
    ),
)
def test_each_rule_is_needed(broken):
    with pytest.raises(Wrong):
        for seed in range(20 * SCHEDULES):
            run(Kernel(broken), seed)
