# SPDX-License-Identifier: BSD-3-Clause
"""A model of the barrier protocol of Hopper's gemm (csrc/cuda/product/shell.cuh and gemm/hopper.cuh),
run under random schedules. It has mbarriers, and in each block of a cluster a copying thread and several
warpgroups. Copies and products may end at any time.

A run fails if nothing can proceed, if a copy lands in a stage that a product still reads, if a
product reads bytes of another step, if partial sums are added to the wrong tile, or if something
reaches a block that has exited. Then each rule of the protocol is broken in turn, and the model
must detect it.
"""

import functools
import os
import random
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

SCHEDULES = 60_000 if os.environ.get("GPUKERN_TEST_ALL") == "1" else 10_000
# bytes of a stage's operands and of the sums that a warpgroup sends; arbitrary numbers
A_BYTES, B_BYTES, SUM_BYTES = 12, 12, 8
WARPS = 4


class Wrong(Exception):
    pass


CUDA = Path(__file__).resolve().parents[3] / "csrc" / "cuda"


@functools.cache
def arrivals(source, barrier, which=0, warps=WARPS, **names):
    """The arrivals that end a phase of a barrier, read from the kernel's source where the barrier
    is initialised. So a count that changes there breaks the model.

    which: selects one of several such places. names: values of names in the source. warps: the
    warps of a warpgroup in the model, instead of the kernel's 4 (128 threads)."""
    made = rf"(?:{re.escape(barrier)}\.init\(|mbarrier_init\({re.escape(barrier)}, |bar_(?:sync|arrive)\({re.escape(barrier)}, )([^;]*?)\)[,;]"  # noqa: E501
    found = re.findall(made, (CUDA / source).read_text())
    expression = re.sub(r"\w+::", "", found[which])
    for number, count in ((4, warps), (256, 2 * warps), (128, warps), (32, 1)):
        expression = re.sub(rf"\b{number}\b", str(count), expression)
    return eval(expression, {}, names)


class Barrier:
    """An mbarrier. A phase ends when `count` arrivals have come and no announced byte is missing.
    Bytes may come before they are announced, so the missing bytes may be negative for a while."""

    __slots__ = ("count", "pending", "missing", "phase")

    def __init__(self, count):
        self.count = self.pending = count
        self.missing = self.phase = 0

    def arrive(self, expect=0):
        self.missing += expect
        self.pending -= 1
        if self.pending < 0:
            raise Wrong("an arrival too many")
        self.settle()

    def land(self, count):
        self.missing -= count
        self.settle()

    def settle(self):
        if self.pending == 0 and self.missing == 0:
            self.phase += 1
            self.pending = self.count

    def ended(self, parity):
        """mbarrier.try_wait.parity. Before its first phase has ended, a barrier returns true for
        parity 1."""
        return self.phase & 1 != parity


def ended(barrier, parity):
    return lambda: barrier.ended(parity)


class Sync:
    """bar.sync and barrier.cluster: agents proceed when `count` of them have arrived."""

    def __init__(self, count):
        self.count = count
        self.come = 0

    def arrive(self):
        self.come += 1
        until = (self.come - 1) // self.count * self.count + self.count
        return lambda: self.come >= until


def interleave(agents, events, rng):
    """Runs agents, and the events that they start, in random order. An agent yields None, or a
    function that returns whether it may proceed."""
    agents = [[agent, None] for agent in agents]
    # one may hardly ever come to run, or the copies and products
    slow = rng.randrange(2 * len(agents))
    misses = 0
    while agents or events:
        i = int(rng.random() * (len(agents) + len(events)))
        if i == slow and rng.random() < 0.95:
            continue
        if i >= len(agents):
            i -= len(agents)
            events[i], events[-1] = events[-1], events[i]
            call, *args = events.pop()
            call(*args)
            continue
        agent = agents[i]
        if agent[1] and not agent[1]():
            misses += 1
            if misses % 64 == 0 and not events and not any(a[1] is None or a[1]() for a in agents):
                raise Wrong("nothing can go on")
            continue
        try:
            agent[1] = next(agent[0])
        except StopIteration:
            agents[i] = agents[-1]
            agents.pop()


HOPPER = "product/gemm/hopper.cuh"
# the arrivals that release a stage: of ping-pong, of the other schedules, and for each writer
EMPTY = re.compile(r"EMPTY_ARRIVALS = \(Shape::PING_PONG \? (\w+) : (\w+)\) \* (\w+);")


@dataclass(frozen=True)
class Kernel:
    cm: int = 1  # blocks that share b
    cn: int = 1  # blocks that share a
    ck: int = 1  # splits of k
    warpgroups: int = 2
    stages: int = 3
    tiles: int = 2
    steps: int = 4  # of k, before it is cut into parts
    # tf32.cuh: fragments of a are loaded two products ahead, with four products per step
    swapab: bool = False
    halved: bool = False  # one more tile, whose k is divided between the two blocks of a pair
    ping_pong: bool = False  # warpgroups have whole tiles; one multiplies while the other stores
    broken: str = ""  # the rule that is broken

    @property
    def blocks(self):
        return self.cm * self.cn * self.ck


class Cluster:
    """A cluster of one of gemm's schedules; the names are those of hopper.cuh."""

    def __init__(self, kernel, rng):
        k = self.k = kernel
        self.rng = rng
        self.events = []  # copies and products in flight
        self.neighbours = k.cm + k.cn - 1
        (counts,) = EMPTY.findall((CUDA / HOPPER).read_text())
        alternate = k.ping_pong and k.broken != "ping-pong: both count as consumers"
        names = {"WGS": k.warpgroups, "WRITERS": self.neighbours}
        consumers = eval(f"{counts[0 if alternate else 1]} * {counts[2]}", {}, names)
        consumers += {"empty count + 1": 1, "empty count - 1": -1}.get(k.broken, 0)
        blocks, stages = range(k.blocks), range(k.stages)
        self.full = [[Barrier(1) for _ in stages] for _ in blocks]
        self.empty = [[Barrier(consumers) for _ in stages] for _ in blocks]
        # hopper.cuh makes two more barriers for ping-pong, for split-K, and for the last tiles that
        # are halved
        use = 1 if k.ck > 1 else 2
        self.exchanged = [Barrier(arrivals(HOPPER, "more_s", use)) for _ in blocks]
        unexchanged = arrivals(HOPPER, "more_s + 8", use, SPLITS=k.ck, WGS=k.warpgroups)
        self.unexchanged = [Barrier(unexchanged) for _ in blocks]
        turn_count = (
            1 if k.broken == "ping-pong: a warp tells for all" else arrivals(HOPPER, "more_s", 0)
        )
        self.turns = [[Barrier(turn_count) for _ in range(k.warpgroups)] for _ in blocks]
        # for each stage: part of the stage -> the step whose bytes it contains
        self.stages = [[{} for _ in stages] for _ in blocks]
        self.reading = [[0 for _ in stages] for _ in blocks]
        # distance of the sender -> the tile whose sums arrived
        self.sums = [[{} for _ in range(k.warpgroups)] for _ in blocks]
        self.at_end = 0
        self.running = [1 + k.warpgroups for _ in blocks]

    def steps_of(self, block, tile):
        if tile == self.k.tiles:  # halved
            each = -(-self.k.steps // 2)
            return range(block * each, block * each + each)
        part, each = block // (self.k.cm * self.k.cn), -(-self.k.steps // self.k.ck)
        return range(part * each, max(part * each, min(part * each + each, self.k.steps)))

    def place(self, block):
        cm, cn = self.k.cm, self.k.cn
        return block % cm, block // cm % cn, block // (cm * cn) * cm * cn

    def reach(self, block):
        if not self.running[block]:
            raise Wrong("a block that has left is reached")

    def next_of(self, stage, parity):
        return (stage + 1, parity) if stage + 1 < self.k.stages else (0, parity ^ 1)

    def skip(self, stage, parity, count):
        if self.k.broken == "ping-pong: no skip":
            return stage, parity
        at = stage + count
        flips = 0 if self.k.broken == "ping-pong: skips without parity" else at // self.k.stages & 1
        return at % self.k.stages, parity ^ flips

    # ---- copies ----
    def land(self, block, stage, piece, step, count):
        self.reach(block)
        if self.reading[block][stage]:
            raise Wrong("a stage is overwritten while it is read")
        self.stages[block][stage][piece] = step
        self.full[block][stage].land(count)

    def copies(self, block):
        cm, cn, broken = self.k.cm, self.k.cn, self.k.broken
        tile_m, tile_n, first = self.place(block)
        row = [first + tile_m + cm * j for j in range(cn)]
        column = [first + cm * tile_n + j for j in range(cm)]
        a_part = 0 if broken == "all copy the first part" else tile_n
        b_part = 0 if broken == "all copy the first part" else tile_m
        expected = (
            A_BYTES
            + B_BYTES
            + {"b not announced": -B_BYTES, "too much announced": 1}.get(broken, 0)
        )
        if broken == "no multicast":
            row, column = [block], [block]
        stage = parity = 0
        for tile in range(self.k.tiles + self.k.halved):
            alone = tile == self.k.tiles and broken != "halved: multicast"
            for k in self.steps_of(block, tile):
                empty, before = (
                    self.empty[block][stage],
                    parity if broken == "producer's parity" else parity ^ 1,
                )
                if broken != "empty not awaited":
                    yield lambda empty=empty, before=before: empty.ended(before)
                self.full[block][stage].arrive(expected)
                yield None
                if alone:
                    for i in range(cn):
                        self.events.append(
                            (self.land, block, stage, ("a", i), (tile, k), A_BYTES // cn)
                        )
                    for i in range(cm):
                        self.events.append(
                            (self.land, block, stage, ("b", i), (tile, k), B_BYTES // cm)
                        )
                    stage, parity = self.next_of(stage, parity)
                    continue
                for there in row:
                    self.events.append(
                        (self.land, there, stage, ("a", a_part), (tile, k), A_BYTES // cn)
                    )
                yield None
                for there in column:
                    self.events.append(
                        (self.land, there, stage, ("b", b_part), (tile, k), B_BYTES // cm)
                    )
                stage, parity = self.next_of(stage, parity)
        # all consumers have released their stages
        for _ in range(self.k.stages if broken != "no barrier at the end" else 0):
            empty, before = self.empty[block][stage], parity ^ 1
            yield lambda empty=empty, before=before: empty.ended(before)
            stage, parity = self.next_of(stage, parity)
        yield from self.leave(block)

    # ---- products ----
    def finish(self, block, queue):
        """The oldest product of a warpgroup ends."""
        stage, step = queue.pop(0)
        self.reading[block][stage] -= 1
        self.see(block, stage, step)

    def see(self, block, stage, step):
        held = self.stages[block][stage]
        pieces = [("a", i) for i in range(self.k.cn)] + [("b", i) for i in range(self.k.cm)]
        if any(held.get(piece) != step for piece in pieces):
            raise Wrong("a product reads other bytes than its step's")

    def release(self, block, stage):
        tile_m, tile_n, first = self.place(block)
        cm, cn = self.k.cm, self.k.cn
        near = [first + j + cm * tile_n for j in range(cm)]
        near += [first + tile_m + cm * j for j in range(cn) if j != tile_n]
        if self.k.broken == "release at home only":
            near = [block] * len(near)
        for there in near:
            self.reach(there)
            self.empty[there][stage].arrive()
            yield None

    def products_swapab(self, block, tile, stage, parity):
        """multiply_swapab: fragments of a are read when they are loaded, b while a product runs.
        Returns stage and parity."""
        broken, queue, steps = self.k.broken, [], self.steps_of(block, tile)
        for k in steps:
            full, fresh = self.full[block][stage], k == steps[0]
            if fresh:
                yield lambda full=full, parity=parity: full.ended(parity)
                self.see(block, stage, (tile, k))
            here = stage
            for product in range(4):
                self.reading[block][here] += 1
                queue.append((here, (tile, k)))
                self.events.append((self.finish, block, queue))
                yield None
                if broken != "products not awaited":
                    yield lambda: len(queue) <= 2
                if product == (0 if broken == "released a product early" else 1) and not fresh:
                    yield from self.release(block, (here - 1) % self.k.stages)
                if product < 2:
                    self.see(block, here, (tile, k))
                    continue
                if product == 2:
                    stage, parity = self.next_of(stage, parity)
                    full = self.full[block][stage]
                    if k != steps[-1] and broken != "full not awaited":
                        yield lambda full=full, parity=parity: full.ended(parity)
                if k != steps[-1]:
                    self.see(block, stage, (tile, k + 1))
        yield lambda: not queue
        if steps:
            yield from self.release(block, (stage - 1) % self.k.stages)
        return stage, parity

    def tell(self, block, warpgroup):
        """Each warp lets the other warpgroup proceed. After a block's last tile, no warpgroup waits
        for it."""
        for _ in range(WARPS):
            self.reach(block)
            self.turns[block][warpgroup ^ 1].arrive()
            yield None

    def products(self, block, warpgroup):
        broken, queue, exchanges, ping_pong = self.k.broken, [], 0, self.k.ping_pong
        stage = parity = 0
        turn = {"ping-pong: nobody is first": 0, "ping-pong: both are first": 1}.get(
            broken, warpgroup ^ 1
        )
        if ping_pong and warpgroup > 0:
            stage, parity = self.skip(stage, parity, self.k.steps)
        for tile in (
            range(warpgroup, self.k.tiles, 2) if ping_pong else range(self.k.tiles + self.k.halved)
        ):
            steps = () if self.k.swapab else self.steps_of(block, tile)
            if self.k.swapab:
                stage, parity = yield from self.products_swapab(block, tile, stage, parity)
            if ping_pong and broken != "ping-pong: no wait":
                mine = self.turns[block][warpgroup]
                yield lambda mine=mine, turn=turn: mine.ended(turn)
                turn ^= broken != "ping-pong: one parity"
            if broken == "ping-pong: tells before its products":
                yield from self.tell(block, warpgroup)
            for k in steps:
                full = self.full[block][stage]
                if broken != "full not awaited":
                    yield lambda full=full, parity=parity: full.ended(parity)
                self.see(block, stage, (tile, k))
                self.reading[block][stage] += 1
                queue.append((stage, (tile, k)))
                self.events.append((self.finish, block, queue))
                yield None
                if broken != "products not awaited":
                    yield lambda: len(queue) <= 1
                if broken == "released a step early":
                    yield from self.release(block, stage)
                elif k != steps[0]:
                    yield from self.release(block, (stage - 1) % self.k.stages)
                stage, parity = self.next_of(stage, parity)
                if broken == "consumer's parity":
                    parity = 0
            last = (stage - 1) % self.k.stages
            if ping_pong:
                if broken not in (
                    "ping-pong: tells before its products",
                    "ping-pong: tells nobody",
                ):
                    yield from self.tell(block, warpgroup)
                stage, parity = self.skip(stage, parity, self.k.steps)
            yield lambda: not queue
            if steps and broken not in ("released a step early", "last step kept"):
                yield from self.release(block, last)
            if tile == self.k.tiles and not ping_pong:
                yield from self.add_halves(block, warpgroup)
            if self.k.ck > 1:
                yield from self.exchange(block, warpgroup, tile, exchanges)
                exchanges ^= broken != "exchange's parity"
        yield from self.leave(block)

    # ---- parts of sums ----
    def sums_land(self, block, warpgroup, distance, tile):
        self.reach(block)
        if distance in self.sums[block][warpgroup]:
            raise Wrong("sums are overwritten before they are read")
        self.sums[block][warpgroup][distance] = tile
        self.exchanged[block].land(SUM_BYTES)

    def exchange(self, block, warpgroup, tile, parity):
        each, parts = self.k.cm * self.k.cn, self.k.ck
        there = [(block + d * each) % (parts * each) for d in range(1, parts)]
        if warpgroup == 0:
            self.exchanged[block].arrive(SUM_BYTES * self.k.warpgroups * (parts - 1))
            yield None
        if self.k.broken != "exchange without empty":
            yield lambda: self.unexchanged[block].ended(parity ^ 1)
        for distance, other in enumerate(there):
            self.events.append((self.sums_land, other, warpgroup, distance, tile))
            yield None
        yield lambda: self.exchanged[block].ended(parity)
        if [*self.sums[block][warpgroup].values()] != [tile] * (parts - 1):
            raise Wrong("sums of two tiles are added")
        self.sums[block][warpgroup] = {}
        for _ in range(WARPS):
            for other in there:
                self.reach(other)
                self.unexchanged[other].arrive()
                yield None

    def ring_lands(self, warpgroup):
        """The second block's sums arrive in the first block's ring."""
        if any(self.reading[0]):
            raise Wrong("a stage is overwritten while it is read")
        self.stages[0] = [{} for _ in self.stages[0]]
        self.sums_land(0, warpgroup, 0, self.k.tiles)

    def add_halves(self, block, warpgroup):
        full, free = self.exchanged[0], self.unexchanged[1]
        if block == 1:
            if self.k.broken != "halved: the ring is not awaited":
                yield lambda: free.ended(0)
            self.events.append((self.ring_lands, warpgroup))
            return
        if warpgroup == 0:
            full.arrive(SUM_BYTES * self.k.warpgroups)
            yield None
        for _ in range(WARPS):
            self.reach(1)
            free.arrive()
            yield None
        yield lambda: full.ended(0)
        if self.sums[0][warpgroup] != {0: self.k.tiles}:
            raise Wrong("sums of two tiles are added")

    # ---- the end ----
    def leave(self, block):
        self.at_end += 1
        if self.k.broken != "no barrier at the end":
            yield lambda: self.at_end == self.k.blocks * (1 + self.k.warpgroups)
        self.running[block] -= 1

    def run(self):
        agents = []
        for block in range(self.k.blocks):
            agents.append(self.copies(block))
            agents += [self.products(block, w) for w in range(self.k.warpgroups)]
        interleave(agents, self.events, self.rng)


CLUSTERS = {  # the shapes of tiles.h, and the two by two that it tried
    "one block": Kernel(warpgroups=2),
    "one warpgroup": Kernel(warpgroups=1),
    "two rows": Kernel(cm=2),
    "two rows, one warpgroup": Kernel(cm=2, warpgroups=1),
    "two columns": Kernel(cn=2),
    "two by two": Kernel(cm=2, cn=2),
    "four rows": Kernel(cm=4, warpgroups=1),
    "four columns": Kernel(cn=4, warpgroups=1),
    "four rows of two": Kernel(cm=4, cn=2, warpgroups=1),
    "split-K by two": Kernel(ck=2),
    "split-K by two, one warpgroup": Kernel(ck=2, warpgroups=1),
    "split-K by four": Kernel(ck=4),
    "split-K by four, one warpgroup": Kernel(ck=4, warpgroups=1),
    "two rows, a halved tile": Kernel(cm=2, halved=True),
    "two columns, a halved tile": Kernel(cn=2, halved=True),
    "two parts of two rows": Kernel(cm=2, ck=2, warpgroups=1),
    "swap-AB tf32, two columns": Kernel(cn=2, swapab=True),
    "swap-AB tf32, split-K by two": Kernel(ck=2, warpgroups=1, swapab=True),
    "ping-pong": Kernel(ping_pong=True),
    "ping-pong, two rows": Kernel(cm=2, ping_pong=True),
    "ping-pong, two by two": Kernel(cm=2, cn=2, ping_pong=True),
}


def schedules(kernel, count, seed):
    rng = random.Random(seed)
    for _ in range(count):
        steps, stages = rng.randint(1, 5 + kernel.ping_pong), rng.randint(2, 4 + kernel.ping_pong)
        tiles = rng.randint(1, 3 + 2 * kernel.ping_pong)
        Cluster(replace(kernel, steps=steps, stages=stages, tiles=tiles), rng).run()


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_protocol_holds(name):
    schedules(CLUSTERS[name], SCHEDULES // len(CLUSTERS), name)


OVERWRITTEN, STUCK, OTHER = "overwritten while", "nothing can go on", "reads other bytes"
BROKEN = {  # rule -> a cluster that shows it, and what may then go wrong first
    "released a step early": ("one block", OVERWRITTEN),
    "released a product early": ("swap-AB tf32, two columns", OVERWRITTEN),
    "products not awaited": ("one block", OVERWRITTEN),
    "empty count - 1": ("one block", "."),
    "empty count + 1": ("two rows", STUCK),
    "empty not awaited": ("one block", "."),
    "full not awaited": ("one block", OTHER),
    "producer's parity": ("one block", STUCK),
    "consumer's parity": ("one block", f"{STUCK}|{OTHER}"),
    "b not announced": ("one block", f"{STUCK}|{OTHER}"),
    "too much announced": ("one block", STUCK),
    "last step kept": ("one block", STUCK),
    "all copy the first part": ("two rows", OTHER),
    "no multicast": ("two rows", STUCK),
    "release at home only": ("two rows", f"{OVERWRITTEN}|{OTHER}"),
    "no barrier at the end": ("two by two", "has left"),
    "exchange without empty": ("split-K by two", "sums"),
    "exchange's parity": ("split-K by two", f"{STUCK}|sums"),
    "halved: multicast": ("two rows, a halved tile", "."),
    "halved: the ring is not awaited": ("two rows, a halved tile", "."),
    "ping-pong: no wait": ("ping-pong", OTHER),
    "ping-pong: tells before its products": ("ping-pong", OTHER),
    "ping-pong: tells nobody": ("ping-pong", STUCK),
    "ping-pong: a warp tells for all": ("ping-pong", f"{OTHER}|{STUCK}"),
    "ping-pong: nobody is first": ("ping-pong", STUCK),
    "ping-pong: both are first": ("ping-pong", OTHER),
    "ping-pong: one parity": ("ping-pong", f"{STUCK}|{OTHER}"),
    "ping-pong: no skip": ("ping-pong", f"{STUCK}|{OTHER}"),
    "ping-pong: skips without parity": ("ping-pong", f"{STUCK}|{OTHER}"),
    "ping-pong: both count as consumers": ("ping-pong, two rows", STUCK),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_seen(rule):
    cluster, what = BROKEN[rule]
    with pytest.raises(Wrong, match=what):
        # some broken rules show in only 1 of 300 schedules
        schedules(replace(CLUSTERS[cluster], broken=rule), 4000, rule)
