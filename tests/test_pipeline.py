"""The barrier protocol of Hopper's gemm (csrc/cuda/gemm/hopper.cuh) as a model: mbarriers, one copying thread and WGS warpgroups in each block of a
cluster, copies and products that end whenever they like, under random schedules.

A run fails when nothing can go on, when a copy lands in a slot that a product still reads, when a product reads bytes
that are not those of its step, when halves of sums meet the wrong tile, or when something reaches a block that has left.
Each rule of the protocol is then broken in turn, and the model must see it.
"""

import os
import random
from dataclasses import dataclass, replace

import pytest

SCHEDULES = 60_000 if os.environ.get("GPUKERN_TEST_ALL") == "1" else 10_000
A_BYTES, B_BYTES, HALF_BYTES = 12, 12, 8  # of a slot and of the halves that a warpgroup sends; units of no meaning
WARPS = 4


class Wrong(Exception):
    pass


class Barrier:
    """A phase ends when `count` arrivals have come and no announced byte is missing; bytes may come before they are
    announced, so that the count of missing ones goes below 0 for a while."""

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
        """mbarrier.try_wait.parity: before its first phase has ended, a barrier says yes to parity 1."""
        return self.phase & 1 != parity


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


def interleave(agents, events, rng):
    """Runs agents, which yield None or what they wait for, and the events that they leave, in any order."""
    agents = [[agent, None] for agent in agents]
    slow = rng.randrange(2 * len(agents))  # one may hardly ever come to run, or the copies and products
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


@dataclass(frozen=True)
class Kernel:
    cm: int = 1  # blocks that share b
    cn: int = 1  # blocks that share a
    ck: int = 1  # parts of k
    warpgroups: int = 2
    stages: int = 3
    tiles: int = 2
    steps: int = 4  # of k, before it is cut into parts
    turned: bool = False  # tf32.cuh: fragments of a are loaded two products ahead, four products a step
    ping_pong: bool = False  # each warpgroup has whole tiles, and multiplies while the other stores
    broken: str = ""  # the rule that is not kept

    @property
    def blocks(self):
        return self.cm * self.cn * self.ck


class Cluster:
    """A cluster of gemm_sm90a_kernel and its siblings; the names are those of hopper.cuh."""

    def __init__(self, kernel, rng):
        k = self.k = kernel
        self.rng = rng
        self.events = []  # copies on their way and products that run
        self.neighbours = k.cm + k.cn - 1
        readers = 1 if k.ping_pong and k.broken != "ping-pong: both count as readers" else k.warpgroups
        readers = readers * self.neighbours + {"empty count + 1": 1, "empty count - 1": -1}.get(k.broken, 0)
        blocks, slots = range(k.blocks), range(k.stages)
        self.full = [[Barrier(1) for _ in slots] for _ in blocks]
        self.empty = [[Barrier(readers) for _ in slots] for _ in blocks]
        self.traded = [Barrier(1) for _ in blocks]
        self.untraded = [Barrier(k.warpgroups * WARPS) for _ in blocks]
        turn_count = 1 if k.broken == "ping-pong: a warp tells for all" else WARPS
        self.turns = [[Barrier(turn_count) for _ in range(k.warpgroups)] for _ in blocks]
        self.slots = [[{} for _ in slots] for _ in blocks]  # piece -> the step whose bytes it holds
        self.reading = [[0 for _ in slots] for _ in blocks]
        self.halves = [[None] * k.warpgroups for _ in blocks]
        self.at_end = 0
        self.running = [1 + k.warpgroups for _ in blocks]

    def steps_of(self, block):
        part, each = block // (self.k.cm * self.k.cn), -(-self.k.steps // self.k.ck)
        return range(part * each, max(part * each, min(part * each + each, self.k.steps)))

    def place(self, block):
        cm, cn = self.k.cm, self.k.cn
        return block % cm, block // cm % cn, block // (cm * cn) * cm * cn

    def reach(self, block):
        if not self.running[block]:
            raise Wrong("a block that has left is reached")

    def next_of(self, slot, parity):
        return (slot + 1, parity) if slot + 1 < self.k.stages else (0, parity ^ 1)

    def skip(self, slot, parity, count):
        if self.k.broken == "ping-pong: no skip":
            return slot, parity
        at = slot + count
        flips = 0 if self.k.broken == "ping-pong: skips without parity" else at // self.k.stages & 1
        return at % self.k.stages, parity ^ flips

    # ---- copies ----
    def land(self, block, slot, piece, step, count):
        self.reach(block)
        if self.reading[block][slot]:
            raise Wrong("a slot is overwritten while it is read")
        self.slots[block][slot][piece] = step
        self.full[block][slot].land(count)

    def copies(self, block):
        cm, cn, broken = self.k.cm, self.k.cn, self.k.broken
        tile_m, tile_n, first = self.place(block)
        row = [first + tile_m + cm * j for j in range(cn)]
        column = [first + cm * tile_n + j for j in range(cm)]
        a_part = 0 if broken == "all copy the first part" else tile_n
        b_part = 0 if broken == "all copy the first part" else tile_m
        expected = A_BYTES + B_BYTES + {"b not announced": -B_BYTES, "too much announced": 1}.get(broken, 0)
        if broken == "no multicast":
            row, column = [block], [block]
        slot = parity = 0
        for tile in range(self.k.tiles):
            for k in self.steps_of(block):
                empty, before = self.empty[block][slot], parity if broken == "filler's parity" else parity ^ 1
                if broken != "empty not awaited":
                    yield lambda empty=empty, before=before: empty.ended(before)
                self.full[block][slot].arrive(expected)
                yield None
                for there in row:
                    self.events.append((self.land, there, slot, ("a", a_part), (tile, k), A_BYTES // cn))
                yield None
                for there in column:
                    self.events.append((self.land, there, slot, ("b", b_part), (tile, k), B_BYTES // cm))
                slot, parity = self.next_of(slot, parity)
        for _ in range(self.k.stages if broken != "no barrier at the end" else 0):  # all have let go
            empty, before = self.empty[block][slot], parity ^ 1
            yield lambda empty=empty, before=before: empty.ended(before)
            slot, parity = self.next_of(slot, parity)
        yield from self.leave(block)

    # ---- products ----
    def finish(self, block, queue):
        """The oldest product of a warpgroup is done."""
        slot, step = queue.pop(0)
        self.reading[block][slot] -= 1
        self.see(block, slot, step)

    def see(self, block, slot, step):
        held = self.slots[block][slot]
        pieces = [("a", i) for i in range(self.k.cn)] + [("b", i) for i in range(self.k.cm)]
        if any(held.get(piece) != step for piece in pieces):
            raise Wrong("a product reads other bytes than its step's")

    def let_go(self, block, slot):
        tile_m, tile_n, first = self.place(block)
        cm, cn = self.k.cm, self.k.cn
        near = [first + j + cm * tile_n for j in range(cm)]
        near += [first + tile_m + cm * j for j in range(cn) if j != tile_n]
        if self.k.broken == "let go at home only":
            near = [block] * len(near)
        for there in near:
            self.reach(there)
            self.empty[there][slot].arrive()
            yield None

    def products_turned(self, block, tile, slot, parity):
        """multiply_turned: fragments are read when they are loaded, b while a product runs. Returns slot and parity."""
        broken, queue, steps = self.k.broken, [], self.steps_of(block)
        for k in steps:
            full, fresh = self.full[block][slot], k == steps[0]
            if fresh:
                yield lambda full=full, parity=parity: full.ended(parity)
                self.see(block, slot, (tile, k))
            here = slot
            for product in range(4):
                self.reading[block][here] += 1
                queue.append((here, (tile, k)))
                self.events.append((self.finish, block, queue))
                yield None
                if broken != "products not awaited":
                    yield lambda: len(queue) <= 2
                if product == (0 if broken == "let go a product early" else 1) and not fresh:
                    yield from self.let_go(block, (here - 1) % self.k.stages)
                if product < 2:
                    self.see(block, here, (tile, k))
                    continue
                if product == 2:
                    slot, parity = self.next_of(slot, parity)
                    full = self.full[block][slot]
                    if k != steps[-1] and broken != "full not awaited":
                        yield lambda full=full, parity=parity: full.ended(parity)
                if k != steps[-1]:
                    self.see(block, slot, (tile, k + 1))
        yield lambda: not queue
        if steps:
            yield from self.let_go(block, (slot - 1) % self.k.stages)
        return slot, parity

    def tell(self, block, warpgroup):
        """Each warp tells the other warpgroup that it is its turn; what a block's last tile tells, nobody awaits."""
        for _ in range(WARPS):
            self.reach(block)
            self.turns[block][warpgroup ^ 1].arrive()
            yield None

    def products(self, block, warpgroup):
        broken, queue, trades, ping_pong = self.k.broken, [], 0, self.k.ping_pong
        slot = parity = 0
        turn = {"ping-pong: nobody is first": 0, "ping-pong: both are first": 1}.get(broken, warpgroup ^ 1)
        if ping_pong and warpgroup > 0:
            slot, parity = self.skip(slot, parity, self.k.steps)
        for tile in range(warpgroup, self.k.tiles, 2) if ping_pong else range(self.k.tiles):
            steps = () if self.k.turned else self.steps_of(block)
            if self.k.turned:
                slot, parity = yield from self.products_turned(block, tile, slot, parity)
            if ping_pong and broken != "ping-pong: no wait":
                mine = self.turns[block][warpgroup]
                yield lambda mine=mine, turn=turn: mine.ended(turn)
                turn ^= broken != "ping-pong: one parity"
            if broken == "ping-pong: tells before its products":
                yield from self.tell(block, warpgroup)
            for k in steps:
                full = self.full[block][slot]
                if broken != "full not awaited":
                    yield lambda full=full, parity=parity: full.ended(parity)
                self.see(block, slot, (tile, k))
                self.reading[block][slot] += 1
                queue.append((slot, (tile, k)))
                self.events.append((self.finish, block, queue))
                yield None
                if broken != "products not awaited":
                    yield lambda: len(queue) <= 1
                if broken == "let go a step early":
                    yield from self.let_go(block, slot)
                elif k != steps[0]:
                    yield from self.let_go(block, (slot - 1) % self.k.stages)
                slot, parity = self.next_of(slot, parity)
                if broken == "reader's parity":
                    parity = 0
            last = (slot - 1) % self.k.stages
            if ping_pong:
                if broken not in ("ping-pong: tells before its products", "ping-pong: tells nobody"):
                    yield from self.tell(block, warpgroup)
                slot, parity = self.skip(slot, parity, self.k.steps)
            yield lambda: not queue
            if steps and broken not in ("let go a step early", "last step kept"):
                yield from self.let_go(block, last)
            if self.k.ck > 1:
                yield from self.trade(block, warpgroup, tile, trades)
                trades ^= broken != "trade's parity"
        yield from self.leave(block)

    # ---- halves of sums ----
    def half_lands(self, block, warpgroup, tile):
        self.reach(block)
        if self.halves[block][warpgroup] is not None:
            raise Wrong("a half is overwritten before it is read")
        self.halves[block][warpgroup] = tile
        self.traded[block].land(HALF_BYTES)

    def trade(self, block, warpgroup, tile, parity):
        there = block ^ (self.k.cm * self.k.cn)
        if warpgroup == 0:
            self.traded[block].arrive(HALF_BYTES * self.k.warpgroups)
            yield None
        if self.k.broken != "trade without empty":
            yield lambda: self.untraded[block].ended(parity ^ 1)
        self.events.append((self.half_lands, there, warpgroup, tile))
        yield lambda: self.traded[block].ended(parity)
        if self.halves[block][warpgroup] != tile:
            raise Wrong("halves of two tiles are added")
        self.halves[block][warpgroup] = None
        for _ in range(WARPS):
            self.reach(there)
            self.untraded[there].arrive()
            yield None

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


CLUSTERS = {  # the shapes of tiles.h, and the pair along n and the four that it tried
    "one block": Kernel(warpgroups=2),
    "one warpgroup": Kernel(warpgroups=1),
    "two rows": Kernel(cm=2),
    "two rows, one warpgroup": Kernel(cm=2, warpgroups=1),
    "two columns": Kernel(cn=2),
    "two by two": Kernel(cm=2, cn=2),
    "four rows": Kernel(cm=4, warpgroups=1),
    "two parts of k": Kernel(ck=2),
    "two parts of k, one warpgroup": Kernel(ck=2, warpgroups=1),
    "two parts of two rows": Kernel(cm=2, ck=2, warpgroups=1),
    "turned tf32, two columns": Kernel(cn=2, turned=True),
    "turned tf32, two parts of k": Kernel(ck=2, warpgroups=1, turned=True),
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
    "let go a step early": ("one block", OVERWRITTEN),
    "let go a product early": ("turned tf32, two columns", OVERWRITTEN),
    "products not awaited": ("one block", OVERWRITTEN),
    "empty count - 1": ("one block", "."),
    "empty count + 1": ("two rows", STUCK),
    "empty not awaited": ("one block", "."),
    "full not awaited": ("one block", OTHER),
    "filler's parity": ("one block", STUCK),
    "reader's parity": ("one block", f"{STUCK}|{OTHER}"),
    "b not announced": ("one block", f"{STUCK}|{OTHER}"),
    "too much announced": ("one block", STUCK),
    "last step kept": ("one block", STUCK),
    "all copy the first part": ("two rows", OTHER),
    "no multicast": ("two rows", STUCK),
    "let go at home only": ("two rows", f"{OVERWRITTEN}|{OTHER}"),
    "no barrier at the end": ("two by two", "has left"),
    "trade without empty": ("two parts of k", "hal"),
    "trade's parity": ("two parts of k", f"{STUCK}|hal"),
    "ping-pong: no wait": ("ping-pong", OTHER),
    "ping-pong: tells before its products": ("ping-pong", OTHER),
    "ping-pong: tells nobody": ("ping-pong", STUCK),
    "ping-pong: a warp tells for all": ("ping-pong", f"{OTHER}|{STUCK}"),
    "ping-pong: nobody is first": ("ping-pong", STUCK),
    "ping-pong: both are first": ("ping-pong", OTHER),
    "ping-pong: one parity": ("ping-pong", f"{STUCK}|{OTHER}"),
    "ping-pong: no skip": ("ping-pong", f"{STUCK}|{OTHER}"),
    "ping-pong: skips without parity": ("ping-pong", f"{STUCK}|{OTHER}"),
    "ping-pong: both count as readers": ("ping-pong, two rows", STUCK),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_seen(rule):
    cluster, what = BROKEN[rule]
    with pytest.raises(Wrong, match=what):
        schedules(replace(CLUSTERS[cluster], broken=rule), 4000, rule)  # some show in 1 of 300
