"""The barrier protocol of gemm_skewed_sm90a.cu as a model, run as test_pipeline.py runs that of gemm_sm90a.cu: the blocks of a
cluster, whose warps and copies go on in any order.

A run fails when nothing can go on, when something lands where it is still read or in a block that does not run yet or has
left, when something is read that is not its step's or tile's, or when a barrier gets an arrival too many. Then each rule is
broken in turn.
"""

import os
import random
from dataclasses import dataclass, replace

import pytest
from test_pipeline import Barrier, Wrong, interleave

SCHEDULES = 36_000 if os.environ.get("GPUKERN_TEST_ALL") == "1" else 6_000
BOX = 6  # bytes of a copy; a unit of no meaning
COPIERS, ADDERS = 2, 2  # threads that copy, warps that multiply


def ended(barrier, parity):
    return lambda: barrier.ended(parity)


class Sync:
    """bar.sync and barrier.cluster: who comes goes on when `count` have come."""

    def __init__(self, count):
        self.count = count
        self.come = 0

    def arrive(self):
        self.come += 1
        until = (self.come - 1) // self.count * self.count + self.count
        return lambda: self.come >= until


@dataclass(frozen=True)
class Skewed:
    parts: int = 1  # blocks of a cluster, which have one tile
    slots: int = 3
    tiles: int = 2
    steps: int = 4
    broken: str = ""  # the rule that is not kept

    def cluster(self, rng):
        tiles = rng.randint(1, 3) if self.parts == 1 else 1
        return Cluster(replace(self, slots=rng.randint(2, 5), tiles=tiles, steps=rng.randint(1, 5)), rng)


class Cluster:
    """gemm_skewed_sm90a_kernel; the names are the kernel's."""

    def __init__(self, kernel, rng):
        self.k, self.rng = kernel, rng
        self.events = []  # copies on their way
        self.all = Sync(kernel.parts * (COPIERS + ADDERS))
        self.owners = rng.randint(1, kernel.parts)  # blocks with tokens: few tokens leave some without
        self.blocks = [Block(self, part) for part in range(kernel.parts)]

    def run(self):
        interleave([agent for block in self.blocks for agent in block.agents()], self.events, self.rng)


class Block:
    def __init__(self, cluster, part):
        self.c, self.k, self.part = cluster, cluster.k, part
        slots = range(self.k.slots)
        self.runs = False  # from the start on, which is another one's for each block
        self.living = COPIERS + ADDERS
        self.full = self.barriers("full", COPIERS)
        self.empty = self.barriers("empty", ADDERS)
        self.adders = Sync(ADDERS)
        self.slots = [{} for _ in slots]  # piece -> the step whose bytes it holds
        self.reading = [0 for _ in slots]
        self.sums = [None] * ADDERS  # of a warp -> the tile that they are of
        self.totals = {}  # (part, warp that added them) -> tile
        self.all_totals = Barrier(1)  # counts them, where there are parts; announced before any other block runs
        wrong = {"totals: too much announced": 1, "totals: too little announced": -BOX}.get(self.k.broken, 0)
        self.owns = part < cluster.owners
        self.all_totals.arrive(self.k.parts * ADDERS * BOX + wrong if self.owns else 0)

    def barriers(self, name, count):
        count += {f"{name} count + 1": 1, f"{name} count - 1": -1}.get(self.k.broken, 0)
        return [Barrier(count) for _ in range(self.k.slots)]

    def walk(self, parity_of):
        """(tile, step), slot and parity, step after step. parity_of: whose parity may be the broken rule."""
        for i in range(self.k.tiles * self.k.steps):
            parity = 0 if self.k.broken == f"{parity_of} parity" else i // self.k.slots & 1
            yield divmod(i, self.k.steps), i % self.k.slots, parity

    def reach(self):
        if not self.runs or not self.living:
            raise Wrong("a block that does not run is reached")

    def agents(self):
        late = self.c.rng.random() < 0.5
        for role, count in ((self.copier, COPIERS), (self.adder, ADDERS)):
            yield from (self.agent(role(i), late) for i in range(count))

    def agent(self, steps, late):
        for _ in range(self.c.rng.randint(0, 40) if late else 0):
            yield None
        self.runs = True
        yield from steps
        self.living -= 1

    # ---- copies: a window of tokens and a box of weights ----
    def lands(self, slot, piece, at):
        self.reach()
        if self.reading[slot]:
            raise Wrong("a slot is overwritten while a product reads it")
        self.slots[slot][piece] = at
        self.full[slot].land(BOX)

    def copier(self, thread):
        broken, rng = self.k.broken, self.c.rng
        start = self.c.all.arrive() if self.k.parts > 1 else None
        for at, slot, parity in self.walk("copiers'"):
            window, weights = ("window", thread), ("weights", thread)
            pieces = [window, weights] if rng.randint(0, 1) else [weights]  # there is no such token, or it has ended
            if broken != "copies without empty":
                yield ended(self.empty[slot], parity ^ 1)
            wrong = {"too much announced": 1, "too little announced": -BOX}.get(broken, 0)
            if window not in pieces:
                self.slots[slot][window] = at  # nothing to copy, nothing to read
            self.full[slot].arrive(len(pieces) * BOX + wrong)
            for piece in pieces:
                yield None
                self.c.events.append((self.lands, slot, piece, at))
        if start:
            yield start

    # ---- products ----
    def see(self, slot, at):
        for thread in range(COPIERS):
            for piece in ("window", "weights"):
                if self.slots[slot].get((piece, thread)) != at:
                    raise Wrong(f"a product reads another {piece} than its step's")

    def adder(self, warp):
        broken, parts = self.k.broken, self.k.parts
        start = self.c.all.arrive() if parts > 1 else None
        for at, slot, parity in self.walk("adders'"):
            tile, step = at
            if broken != "products without full":
                yield ended(self.full[slot], parity)
            if broken == "let go before it is read":
                self.empty[slot].arrive()
            self.reading[slot] += 1
            self.see(slot, at)
            yield None
            self.see(slot, at)
            self.reading[slot] -= 1
            last = step == self.k.steps - 1
            if broken != "let go before it is read" and not (broken == "last step kept" and last):
                self.empty[slot].arrive()
            yield None
            if last:
                yield from self.end_of(tile, warp, start)

    def end_of(self, tile, warp, start):
        broken, parts = self.k.broken, self.k.parts
        self.sums[warp] = tile
        yield None
        if broken != "totals before all sums":
            yield self.adders.arrive()
        if start and broken != "totals to blocks that may not run":
            yield start
        for block in self.c.blocks[: self.c.owners]:
            if any(of != tile for of in self.sums):
                raise Wrong("other sums are added than the tile's")
            if parts > 1:
                self.c.events.append((block.total_lands, self.part, warp, tile))
            else:
                block.totals[self.part, warp] = tile
            yield None
        if parts == 1 and broken != "results before their totals":
            yield self.adders.arrive()
        if parts > 1 and broken != "results before all totals":
            yield ended(self.all_totals, 0)
        yield from self.store(tile)

    def total_lands(self, part, warp, tile):
        self.reach()
        self.totals[part, warp] = tile
        self.all_totals.land(BOX)

    def store(self, tile):
        if not self.owns:
            return
        for part in range(self.k.parts):
            for warp in range(ADDERS):
                if self.totals.get((part, warp)) != tile:
                    raise Wrong("other totals are stored than the tile's")
                yield None


KERNELS = {"tiles in turn": Skewed(), "two parts": Skewed(parts=2), "three parts": Skewed(parts=3)}


def schedules(kernel, count, seed):
    rng = random.Random(seed)
    for _ in range(count):
        kernel.cluster(rng).run()


@pytest.mark.parametrize("name", KERNELS)
def test_the_protocol_holds(name):
    schedules(KERNELS[name], SCHEDULES // len(KERNELS), name)


OVERWRITTEN, STUCK, OTHER, MANY = "overwritten while", "nothing can go on", "reads another", "an arrival too many"
SUMS, TOTALS, REACHED = "other sums", "other totals", "does not run"
TURN, PARTS = "tiles in turn", "two parts"
BROKEN = {  # kernel and rule -> what may then go wrong first
    (TURN, "copies without empty"): f"{OVERWRITTEN}|{OTHER}|{MANY}",
    (TURN, "too much announced"): STUCK,
    (TURN, "too little announced"): f"{OTHER}|{STUCK}",
    (TURN, "full count - 1"): f"{OTHER}|{MANY}|{STUCK}",
    (TURN, "full count + 1"): STUCK,
    (TURN, "empty count - 1"): f"{OVERWRITTEN}|{OTHER}|{MANY}|{STUCK}",
    (TURN, "empty count + 1"): STUCK,
    (TURN, "products without full"): OTHER,
    (TURN, "let go before it is read"): f"{OVERWRITTEN}|{OTHER}",
    (TURN, "last step kept"): STUCK,
    (TURN, "copiers' parity"): ".",
    (TURN, "adders' parity"): f"{OTHER}|{STUCK}",
    (TURN, "totals before all sums"): f"{SUMS}|{TOTALS}",
    (TURN, "results before their totals"): f"{TOTALS}|{SUMS}",
    (PARTS, "totals before all sums"): SUMS,
    (PARTS, "totals to blocks that may not run"): f"{REACHED}|{TOTALS}",
    (PARTS, "results before all totals"): f"{TOTALS}|{REACHED}",
    (PARTS, "totals: too much announced"): STUCK,
    (PARTS, "totals: too little announced"): f"{TOTALS}|{STUCK}",
    (PARTS, "products without full"): OTHER,
    (PARTS, "copies without empty"): f"{OVERWRITTEN}|{OTHER}|{MANY}",
}


@pytest.mark.parametrize("kernel, rule", BROKEN)
def test_a_broken_rule_is_seen(kernel, rule):
    with pytest.raises(Wrong, match=BROKEN[kernel, rule]):
        schedules(replace(KERNELS[kernel], broken=rule), 4000, rule)  # some show in 1 of 300
