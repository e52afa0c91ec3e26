# SPDX-License-Identifier: BSD-3-Clause
"""A model of the barrier protocol of flash_attn_bwd_sm90a.cu, run like that of the forward in
test_pipeline_attn.py. It has the warp that loads, and the warps of two consumer warpgroups. Copies
and products may end at any time. With a mask or a bias a stage holds its words, too, and dS goes
to memory as the gradient of the bias. The warp that loads copies the words or computes them. In
the model Q and dO are in flight meanwhile; the kernel loads them after it has computed the words.

A product of a warpgroup begins to read when its first warp issues it. It ends for all its warps at
the same time, after the products before it. A run fails if nothing can proceed, if a stage of Q or
dO or a buffer of dS is overwritten while it is read, or if anything reads the wrong bytes. Then
each rule is broken in turn.
"""

import itertools
import os
import random
from dataclasses import dataclass, replace

import pytest
from test_pipeline import Barrier, Sync, Wrong, arrivals, ended, interleave
from test_pipeline_attn import Ring, schedules

SCHEDULES = 10_000 if os.environ.get("GPUKERN_TEST_ALL") == "1" else 800
GROUPS, WARPS = 2, 2  # warpgroups, and warps of a warpgroup; the kernel has four warps
BOXES, BOX = 2, 3  # panels of a copy, and bytes of a panel; arbitrary numbers


def made(barrier):
    return arrivals("attn/backward/bwd_consumer.cuh", barrier, warps=WARPS)


@dataclass(frozen=True)
class Kernel:
    stages: int = 2
    buffers: int = 2  # buffers of dS
    masked: bool = False  # words in each stage, and dS stored
    broken: str = ""  # the rule that is broken

    def block(self, rng):
        return Block(self, [rng.random() < 0.3 for _ in range(rng.randint(0, 6))], rng)


class Block:
    """A block of the kernel; the names are the kernel's. ragged[n]: the tile of step n has rows
    that must not be read."""

    def __init__(self, kernel, ragged, rng):
        self.k, self.ragged, self.rng = kernel, ragged, rng
        self.events = []  # copies and products in flight
        self.ring = Ring(kernel.stages, made("typename S::Ring(smem_s + S::RING)"))
        self.raw = Barrier(made("smem_s + S::RAW"))
        self.names = "qow" if kernel.masked else "qo"
        self.held = {name: [{} for _ in range(kernel.stages)] for name in self.names}
        self.reading = {name: [0] * kernel.stages for name in self.names}
        self.made = [kernel.masked and rng.random() < 0.5 for _ in ragged]
        self.ds = [[None] * (GROUPS * WARPS) for _ in range(kernel.buffers)]
        self.reading_ds = [0] * kernel.buffers
        self.storing = 0  # stores of dS that still read it
        self.meeting = Sync(made("BAR_CONSUMERS"))
        # for each warpgroup, in order: [kind, step, warps that issued it]
        self.products = [[] for _ in range(GROUPS)]
        self.done = [0] * GROUPS
        self.issued = [0] * (GROUPS * WARPS)

    def run(self):
        interleave(
            [self.load_tiles(), *(self.consume(g, w) for g in range(GROUPS) for w in range(WARPS))],
            self.events,
            self.rng,
        )

    # ---- the loader ----
    def put(self, name, n, box):
        stage = n % self.k.stages
        if self.reading[name][stage]:
            raise Wrong(f"{name} is overwritten while it is read")
        self.held[name][stage][box] = n, self.ragged[n]

    def lands(self, name, n, box, barrier):
        self.put(name, n, box)
        barrier.land(BOX)

    def copy(self, names, n, barrier):
        for name in names:
            for box in range(BOXES):
                self.events.append((self.lands, name, n, box, barrier))
                yield None

    def load(self, n, barrier):
        if self.k.broken != "loaded without empty":
            yield self.ring.is_empty(n)
        yield from self.copy("qo", n, barrier)
        copied = "w" if self.k.masked and not self.made[n] else ""
        early = self.k.broken == "announced before the words are made"
        if early:
            barrier.arrive((2 + len(copied)) * BOXES * BOX)
        if self.made[n]:
            for box in range(BOXES):
                self.put("w", n, box)
                yield None
        if not early:
            barrier.arrive((2 + len(copied)) * BOXES * BOX)
        yield from self.copy(copied, n, barrier)

    def load_tiles(self):
        parity = 0
        for n, ragged in enumerate(self.ragged):
            full = self.ring.full[n % self.k.stages]
            yield from self.load(n, self.raw if ragged else full)
            if not ragged:
                continue
            if self.k.broken != "cleared before the copies have come":
                yield ended(self.raw, parity)
            parity ^= 1
            for name in "qo":
                if self.k.broken != "not cleared":
                    stage = self.held[name][n % self.k.stages]
                    stage.update({box: (n, False) for box in stage if stage[box][0] == n})
            full.arrive()

    # ---- products of a warpgroup ----
    def see(self, kind, n):
        stage = n % self.k.stages
        for name in {"scores": "qo", "dv": "o", "dk": "q", "dq": ""}[kind]:
            for box in range(BOXES):
                step, ragged = self.held[name][stage].get(box, (None, None))
                if step != n:
                    raise Wrong("a product reads other bytes")
                if ragged:
                    raise Wrong("a product reads rows that must not be read")
        if kind == "dq" and self.ds[n % self.k.buffers] != [n] * (GROUPS * WARPS):
            raise Wrong("a product reads other dS")

    def mark(self, kind, n, count):
        for name in {"scores": "qo", "dv": "o", "dk": "q", "dq": ""}[kind]:
            self.reading[name][n % self.k.stages] += count
        if kind == "dq":
            self.reading_ds[n % self.k.buffers] += count

    def issue(self, group, w, kind, n):
        me, products = group * WARPS + w, self.products[group]
        if self.issued[me] == len(products):
            products.append([kind, n, 0])
            self.see(kind, n)
            self.mark(kind, n, 1)
        products[self.issued[me]][2] += 1
        if products[self.issued[me]][2] == WARPS:
            self.events.append((self.finish, group))
        self.issued[me] += 1

    def finish(self, group):
        kind, n, _ = self.products[group][self.done[group]]
        self.done[group] += 1
        self.mark(kind, n, -1)
        self.see(kind, n)

    def wait_group(self, group, w, pending):
        me = group * WARPS + w
        return lambda: self.done[group] >= self.issued[me] - pending

    # ---- mask words and the gradient of the bias ----
    def read_words(self, n):
        stage = n % self.k.stages
        self.reading["w"][stage] += 1
        for _ in range(2):
            if any(self.held["w"][stage].get(box, (None,))[0] != n for box in range(BOXES)):
                raise Wrong("a warp reads other bytes")
            yield None
        self.reading["w"][stage] -= 1

    def store_ds(self, n):
        self.see("dq", n)
        self.storing += 1
        self.reading_ds[n % self.k.buffers] += 1
        self.events.append((self.ds_is_read, n))

    def ds_is_read(self, n):
        self.see("dq", n)
        self.storing -= 1
        self.reading_ds[n % self.k.buffers] -= 1

    # ---- a warp ----
    def consume(self, group, w):
        broken, me, steps = self.k.broken, group * WARPS + w, len(self.ragged)

        def await_tiles(n):
            if broken != "not awaited":
                yield self.ring.is_full(n)

        def release(n):
            if n >= 0 and w == 0 and broken != "kept":
                self.ring.release(n)

        if steps:
            yield from await_tiles(0)
        for n in range(steps):
            self.issue(group, w, "scores", n)  # S and dP
            yield self.wait_group(group, w, 0)
            if broken == "released before the words are read":
                release(n)
            elif broken != "released before dK":
                release(n - 1)
            if self.k.masked:
                yield from self.read_words(n)
            buffer = n % self.k.buffers
            if self.reading_ds[buffer]:
                raise Wrong("dS is overwritten while it is read")
            self.ds[buffer][me] = n
            self.issue(group, w, "dv", n)
            stores = self.k.masked and me == 0
            if stores and broken != "the store not awaited":
                yield lambda: not self.storing
            if broken != "no meeting":
                yield self.meeting.arrive()
            if stores:
                self.store_ds(n)
            self.issue(group, w, "dq", n)
            if broken == "released before dK":
                release(n)
            self.issue(group, w, "dk", n)
            yield from await_tiles(min(n + (broken != "the next tile not awaited"), steps - 1))
            yield self.wait_group(group, w, 0)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("stages", [2, 4])
def test_the_protocol_holds(stages, masked):
    schedules(Kernel(stages=stages, masked=masked), SCHEDULES, f"{stages} stages")


OVERWRITTEN, STUCK, OTHER, MANY = (
    "overwritten while",
    "nothing can go on",
    "reads other bytes",
    "an arrival too many",
)
BROKEN = {  # rule -> what may then go wrong first
    "loaded without empty": f"{OVERWRITTEN}|{OTHER}|{MANY}",
    "cleared before the copies have come": f"must not be read|{OTHER}|{MANY}",
    "not cleared": "must not be read",
    "not awaited": f"{OTHER}|must not be read",
    "the next tile not awaited": f"{OTHER}|must not be read",
    "kept": STUCK,
    "no meeting": "other dS|dS is",
    "released before dK": f"{OVERWRITTEN}|{OTHER}",
    "released before the words are read": f"{OVERWRITTEN}|{OTHER}",
    "the store not awaited": "dS is overwritten|other dS",
    "announced before the words are made": f"{OVERWRITTEN}|{OTHER}",
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_seen(rule):
    with pytest.raises(Wrong, match=BROKEN[rule]):
        masked = "words" in rule or "store" in rule
        schedules(Kernel(broken=rule, masked=masked), 4000, rule)


def test_one_buffer_of_ds_is_too_few():
    """With one buffer, a warpgroup would store dS while the other's dQ of the previous step reads
    it."""
    with pytest.raises(Wrong, match="dS is overwritten|other dS"):
        schedules(replace(Kernel(), buffers=1), 4000, "one buffer")


# ---- the parts of a tile of keys (join_parts of flash_attn_bwd_masked_sm90a.cu) ----
class Parts:
    """Every warp of a part stores its sums. One thread then counts the part, and the warps of the
    part that counts last read the sums of all parts."""

    def __init__(self, parts, broken, rng):
        self.parts, self.broken, self.rng = parts, broken, rng
        self.warps = GROUPS * WARPS
        self.stored = [[False] * self.warps for _ in range(parts)]
        self.counted, self.last, self.joined = 0, [None] * parts, 0
        self.meeting = [Sync(made("BAR_CONSUMERS")) for _ in range(parts)]

    def run(self):
        agents = [self.warp(part, w) for part in range(self.parts) for w in range(self.warps)]
        interleave(agents, [], self.rng)
        assert self.joined == self.warps

    def warp(self, part, w):
        yield None
        self.stored[part][w] = True
        if self.broken != "counted before all have stored":
            yield self.meeting[part].arrive()
        if w == 0:
            self.counted += 1
            self.last[part] = self.counted == self.parts
        if self.broken != "the count not awaited":
            yield self.meeting[part].arrive()
        if self.last[part] is None:
            raise Wrong("a warp does not know whether its part is the last")
        if self.last[part]:
            for other in range(self.parts):
                if not self.stored[other][w]:
                    raise Wrong("sums are read before they are stored")
                yield None
            self.joined += 1


def join(broken, count):
    rng = random.Random(broken)
    for _ in range(count):
        Parts(rng.randint(2, 5), broken, rng).run()


def test_the_last_part_reads_all_sums():
    join("", SCHEDULES)


@pytest.mark.parametrize("rule", ("counted before all have stored", "the count not awaited"))
def test_a_broken_join_is_seen(rule):
    with pytest.raises(Wrong, match="before they are stored|does not know"):
        join(rule, 4000)


# ---- the order of additions in deterministic kernels, over a grid ----
def run_turns(visits, sms, rng):
    """Simulates ordered additions. visits[x] lists the tiles that block x adds to, in its order. At
    each tile, blocks with lower numbers add first. Blocks start in the order of their numbers,
    `sms` at a time. Returns the order of additions at each tile; raises Wrong if nothing can
    proceed."""
    before = [
        {t: sum(t in other for other in visits[:x]) for t in tiles}
        for x, tiles in enumerate(visits)
    ]
    return play(visits, before, sms, rng)


def play(visits, before, sms, rng):
    added = {t: [] for tiles in visits for t in tiles}
    running, at, started = [], [0] * len(visits), 0
    while started < len(visits) or running:
        while started < len(visits) and len(running) < sms:
            running, started = [*running, started], started + 1
        running = [x for x in running if at[x] < len(visits[x])]
        able = [x for x in running if len(added[visits[x][at[x]]]) == before[x][visits[x][at[x]]]]
        if running and not able:
            raise Wrong("every block waits for its turn")
        for x in rng.sample(able, rng.randint(min(1, len(able)), len(able))):
            added[visits[x][at[x]]].append(x)
            at[x] += 1
    return added


def visits_of(rng, up):
    """The visits of blocks under a bound on the right: the tiles [lo, hi) of a block rise with its
    keys, and the last keys have the lowest block number."""
    blocks, tiles = rng.randint(1, 12), rng.randint(1, 15)
    lo = sorted(rng.randint(0, tiles - 1) if up else 0 for _ in range(blocks))
    hi = sorted(rng.choice((tiles, rng.randint(max(lo) + 1, tiles))) for _ in range(blocks))
    rows = [list(range(a, b)) for a, b in zip(lo, hi, strict=True)]
    return rows[::-1] if up else [row[::-1] for row in rows]


def test_turns_never_stop_the_grid_and_keep_one_order():
    rng = random.Random(5)
    for n in range(400):
        visits = visits_of(rng, n % 2 == 0)
        for sms in (1, 2, 5, 100):
            for order in run_turns(visits, sms, rng).values():
                assert order == sorted(order)


def test_turns_in_an_order_that_wraps_stop_a_grid_larger_than_the_machine():
    """The order that BwdOrderedStep avoids: each block begins at a different tile, and the block
    that begins at a tile adds first. A grid larger than the machine would stop."""
    blocks = 8
    visits = [[(x + n) % blocks for n in range(blocks)] for x in range(blocks)]
    before = [{t: (t - x) % blocks for t in range(blocks)} for x in range(blocks)]
    assert play(visits, before, blocks, random.Random(0))
    with pytest.raises(Wrong, match="waits for its turn"):
        play(visits, before, blocks - 1, random.Random(0))


# ---- the order of additions in deterministic kernels, within a block ----
class Turns:
    """keep_order() and the warps that add. others[n]: whether the blocks before have added to the
    tile of step n, which happens at any time."""

    def __init__(self, steps, broken, rng):
        self.steps, self.broken, self.rng = steps, broken, rng
        self.turn, self.added = (
            Barrier(made("smem_s + S::TURN")),
            Barrier(made("smem_s + S::ADDED")),
        )
        self.others, self.released, self.adds = [False] * steps, [False] * steps, [0] * steps
        self.events = [(self.others.__setitem__, n, True) for n in range(steps)]

    def run(self):
        interleave(
            [self.keep_order(), *(self.add() for _ in range(GROUPS * WARPS))], self.events, self.rng
        )
        assert all(self.released)

    def keep_order(self):
        if self.broken != "the first turn not awaited":
            yield lambda: self.others[0]
        self.turn.arrive()
        for n in range(self.steps):
            ready, more = False, n + 1 < self.steps
            for polls in itertools.count():
                if polls == 100_000:
                    raise Wrong("nothing can go on")
                ready = ready or (more and self.others[n + 1])
                if self.broken == "the additions not awaited" or self.added.ended(n & 1):
                    break
                yield None
            if ready:
                self.turn.arrive()
                yield None
            if self.adds[n] != GROUPS * WARPS:
                raise Wrong("a turn is passed on before the additions")
            self.released[n] = True
            if more and not ready:
                yield lambda n=n: self.others[n + 1]
                self.turn.arrive()

    def add(self):
        for n in range(self.steps):
            if self.broken != "the turn not awaited":
                yield ended(self.turn, n & 1)
            if not self.others[n]:
                raise Wrong("an addition out of turn")
            self.adds[n] += 1
            yield None
            self.added.arrive()


def play_turns(broken, count):
    rng = random.Random(broken)
    for _ in range(count):
        Turns(rng.randint(1, 6), broken, rng).run()


def test_the_next_turn_may_be_told_before_this_one_is_passed_on():
    play_turns("", SCHEDULES)


@pytest.mark.parametrize(
    "rule", ("the first turn not awaited", "the additions not awaited", "the turn not awaited")
)
def test_a_broken_turn_is_seen(rule):
    with pytest.raises(Wrong, match="out of turn|passed on before|an arrival too many"):
        play_turns(rule, 4000)
