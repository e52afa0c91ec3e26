# SPDX-License-Identifier: BSD-3-Clause
"""A model of the barrier protocol of flash_attn_bwd_wide_sm90a.cu, run like that of the narrower
kernel in test_pipeline_attn_bwd.py. It has the two blocks of a pair. Each has the warp that loads,
the warp that sends dS to the other block, and the warps of two warpgroups. Copies and products may
end at any time. No barrier says that the other block has read a dS: the other block sends its dS of
the next step only after both of its warpgroups have finished this step.

With a bias (flash_attn_bwd_masked_wide_sm90a.cu) a copy stores dS as its gradient, and two warps
read dS to sum it.

A run fails if nothing can proceed, if something is overwritten while it is read, if anything reads
bytes of another step, or if a copy or an arrival reaches a block that has exited. Then each rule is
broken in turn.
"""

import os
import random
import re
from dataclasses import dataclass

import pytest
from test_pipeline import CUDA, Sync, Wrong, arrivals, interleave
from test_pipeline_attn import Ring

SCHEDULES = 10_000 if os.environ.get("GPUKERN_TEST_ALL") == "1" else 500
WARPS = 2  # warps of a warpgroup; the kernel has four
WEIGHTS, GRADIENTS = 0, 1  # the warpgroups
READS = {
    "s": "q",
    "dp": "o",
    "dv": "o",
    "dk": "q",
    "dq": ("ds",),
    "dq of peer": ("peer ds",),
}  # product -> what it reads


@dataclass(frozen=True)
class Kernel:
    o_stages: int = 1
    bias: bool = False
    broken: str = ""  # the rule that is broken


class Place:
    """A buffer in shared memory: the step whose bytes it contains, by part, and how many
    products read it."""

    def __init__(self, name, parts=1):
        self.name, self.held, self.reading = name, [None] * parts, 0

    def write(self, step, part=0):
        if self.reading:
            raise Wrong(f"{self.name} is overwritten while it is read")
        self.held[part] = step

    def read(self, step, count=0):
        if self.held != [step] * len(self.held):
            raise Wrong(f"{self.name} holds another step")
        self.reading += count


def senders(bias):
    """The arrivals at BAR_SENT_DS."""
    made = r"BWD_SENT_DS = (128 \+ 32) \+ \(bwd_collects<Tile> \? (64) : 0\);"
    source = (CUDA / "attn/backward/bwd_producer.cuh").read_text()
    assert re.search(made, source)
    return WARPS + 1 + 2 * bias


class Block:
    def __init__(self, kernel, steps, rng, meeting):
        self.k, self.steps, self.rng, self.meeting = kernel, steps, rng, meeting
        self.peer, self.events, self.gone = None, None, 0
        self.ring = Ring(
            2, arrivals("attn/backward/bwd_consumer.cuh", "typename S::Ring(smem_s + S::RING)")
        )
        self.o_ring = Ring(
            kernel.o_stages,
            arrivals("attn/backward/bwd_consumer.cuh", "typename S::ORing(smem_s + S::O_RING)"),
        )
        self.peer_ring = Ring(2, 0)  # full alone
        self.places = {
            "q": [Place("Q") for _ in range(2)],
            "o": [Place("dO") for _ in range(kernel.o_stages)],
            "ds": [Place("dS", WARPS) for _ in range(2)],
            "peer ds": [Place("dS of the other block") for _ in range(2)],
        }
        self.p = [Place("P") for _ in range(WARPS)]
        self.p_ready, self.ds_ready, self.own_ds = Sync(2 * WARPS), Sync(2 * WARPS), Sync(WARPS)
        # warpgroup 1, the warp that sends and with a bias the two that sum
        apart = kernel.broken == "sent before it is summed"  # the sums wait by themselves
        self.ds_sent = [Sync(senders(kernel.bias and not apart)) for _ in range(2)]
        self.records = [Place("the place of a step") for _ in range(2)]
        self.stores = 0  # copies of dS to memory that still read it
        self.products, self.issued, self.done = [[], []], [[0] * WARPS, [0] * WARPS], [0, 0]

    def agents(self):
        for run in (self.weights, self.gradients):
            yield from (self.whole(run(w)) for w in range(WARPS))
        yield self.whole(self.load())
        yield self.whole(self.send())
        if self.k.bias:
            for _ in range(2):
                yield self.whole(self.collect())

    def whole(self, agent):
        """Runs a warp, then the cluster barrier at its end."""
        yield from agent
        if self.k.broken != "left alone":
            yield self.meeting.arrive()
        self.gone += 1

    def reached(self):
        if self.gone == agents_of(self.k):
            raise Wrong("a block that has left is reached")

    def place(self, name, n):
        return self.places[name][n % len(self.places[name])]

    # ---- copies ----
    def lands(self, name, n, barrier):
        self.reached()
        self.place(name, n).write(n)
        barrier.land(1)

    def load(self):
        for n in range(self.steps):
            for name, ring in (("q", self.ring), ("o", self.o_ring)):
                if self.k.broken != f"{name} loaded without empty":
                    yield ring.is_empty(n)
                ring.fill(n, 1)
                self.events.append((self.lands, name, n, ring.full[n % ring.stages]))
                yield None

    def sent(self, n):
        self.reached()
        self.place("ds", n).reading -= 1
        self.peer.lands("peer ds", n, self.peer.peer_ring.full[n % 2])

    def send(self):
        for n in range(self.steps):
            if self.k.broken != "sent before it is stored":
                yield self.ds_sent[n % 2].arrive()
            self.peer_ring.fill(n, 1)
            self.place("ds", n).read(n, 1)
            self.events.append((self.sent, n))
            yield None

    # ---- the gradient of a bias ----
    def collect(self):
        for n in range(self.steps):
            if self.k.broken == "sent before it is summed":
                yield lambda n=n: self.ds_sent[n % 2].come > n // 2 * (WARPS + 1) + WARPS
            else:
                waits = self.ds_sent[n % 2].arrive()
                if self.k.broken != "summed before it is stored":
                    yield waits
            self.records[n % 2].read(n, 1)
            self.place("ds", n).read(n, 1)
            for _ in range(8):  # takes a while
                yield None
            self.records[n % 2].read(n, -1)
            self.place("ds", n).read(n, -1)

    def store(self, n):
        self.place("ds", n).read(n, 1)
        self.stores += 1
        self.events.append((self.stored, n))

    def stored(self, n):
        self.place("ds", n).read(n, -1)
        self.stores -= 1

    # ---- products of a warpgroup, in order ----
    def issue(self, group, w, kind, n):
        products = self.products[group]
        if self.issued[group][w] == len(products):
            products.append([kind, n, 0])
            for name in READS[kind]:
                self.place(name, n).read(n, 1)
        product = products[self.issued[group][w]]
        product[2] += 1
        if product[2] == WARPS:
            self.events.append((self.finish, group))
        self.issued[group][w] += 1

    def finish(self, group):
        kind, n, _ = self.products[group][self.done[group]]
        self.done[group] += 1
        for name in READS[kind]:
            self.place(name, n).read(n, -1)

    def wait_group(self, group, w, pending=0):
        return lambda: self.done[group] >= self.issued[group][w] - pending

    # ---- a warp of a warpgroup ----
    def make_dq(self, group, w, n):
        broken, signals = self.k.broken, w == 0
        self.issue(group, w, "dq", n)
        if group == WEIGHTS:
            if broken != "dO released before dV":
                yield self.wait_group(group, w, 1)
            if signals:
                self.o_ring.release(n)
        if broken != "the other dS not awaited":
            yield self.peer_ring.is_full(n)
        self.issue(group, w, "dq of peer", n)
        yield self.ring.is_full(min(n + 1, self.steps - 1))
        if broken != "released before dQ":
            yield self.wait_group(group, w)
        if signals:
            self.ring.release(n)
        if broken == "released before dQ":
            yield self.wait_group(group, w)

    def weights(self, w):
        if self.steps:
            yield self.ring.is_full(0)
        for n in range(self.steps):
            self.issue(WEIGHTS, w, "s", n)
            yield self.wait_group(WEIGHTS, w)
            self.p[w].write(n)
            self.p_ready.arrive()  # bar.arrive does not wait
            if self.k.broken != "dO not awaited":
                yield self.o_ring.is_full(n)
            self.issue(WEIGHTS, w, "dv", n)
            waits = self.ds_ready.arrive()
            if self.k.broken != "dS not awaited":
                yield waits
            yield from self.make_dq(WEIGHTS, w, n)

    def gradients(self, w):
        if self.steps:
            yield self.ring.is_full(0)
        for n in range(self.steps):
            yield self.o_ring.is_full(n)
            self.issue(GRADIENTS, w, "dp", n)
            yield self.wait_group(GRADIENTS, w)
            if w == 0:
                self.o_ring.release(n)
            waits = self.p_ready.arrive()
            if self.k.broken != "P not awaited":
                yield waits
            self.p[w].read(n, 1)
            yield None
            self.p[w].read(n, -1)
            if self.k.bias and w == 0:
                self.records[n % 2].write(n)
            self.place("ds", n).write(n, w)
            self.ds_sent[n % 2].arrive()  # bar.arrive, as the next
            self.ds_ready.arrive()
            if self.k.bias and w == 0 and self.k.broken != "stores not awaited":
                yield lambda: self.stores == 0
            waits = self.own_ds.arrive()
            if self.k.broken != "own dS not awaited":
                yield waits
            if self.k.bias and w == 0:
                self.store(n)
            self.issue(GRADIENTS, w, "dk", n)
            yield from self.make_dq(GRADIENTS, w, n)
        if self.k.bias and w == 0:
            yield lambda: self.stores == 0


def agents_of(kernel):
    return 2 * WARPS + 2 + 2 * kernel.bias


def schedules(kernel, count, seed):
    rng = random.Random(seed)
    for _ in range(count):
        steps, meeting, events = rng.randint(0, 6), Sync(2 * agents_of(kernel)), []
        pair = [Block(kernel, steps, rng, meeting) for _ in range(2)]
        for block, other in zip(pair, pair[::-1], strict=True):
            block.peer, block.events = other, events
        interleave([agent for block in pair for agent in block.agents()], events, rng)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("o_stages", [1, 2])
def test_the_protocol_holds(o_stages, bias):
    schedules(Kernel(o_stages, bias), SCHEDULES, f"{o_stages} stages")


OVERWRITTEN, OTHER, MANY = "overwritten while", "holds another step", "an arrival too many"
BROKEN = {  # rule -> what may then go wrong first
    "q loaded without empty": f"{OVERWRITTEN}|{OTHER}|{MANY}",
    "o loaded without empty": f"{OVERWRITTEN}|{OTHER}|{MANY}",
    "sent before it is stored": f"{OTHER}|{OVERWRITTEN}|{MANY}",
    "dO released before dV": f"{OVERWRITTEN}|{OTHER}",
    "the other dS not awaited": f"{OTHER}|{OVERWRITTEN}",
    "released before dQ": f"{OVERWRITTEN}|{OTHER}",
    "dO not awaited": f"{OTHER}|{OVERWRITTEN}",
    "dS not awaited": f"{OTHER}|{OVERWRITTEN}",
    "own dS not awaited": f"{OTHER}|{OVERWRITTEN}",
    "P not awaited": OTHER,
    "left alone": "has left is reached",
    # with a bias
    "summed before it is stored": f"{OTHER}|{OVERWRITTEN}",
    "sent before it is summed": f"{OVERWRITTEN}|{OTHER}",
    "stores not awaited": f"{OVERWRITTEN}|{OTHER}",
}


WITH_BIAS = "summed before it is stored", "sent before it is summed", "stores not awaited"


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_seen(rule):
    with pytest.raises(Wrong, match=BROKEN[rule]):
        schedules(Kernel(bias=rule in WITH_BIAS, broken=rule), 4000, rule)
