"""The barrier protocol of gemm_skewed_sm90a.cu as a model, run as test_pipeline.py runs that of gemm_sm90a.cu: one block,
whose warps and copies go on in any order.

A run fails when nothing can go on, when something lands where it is still read or in a block that has left, when bytes are
read that are not their step's, or when a barrier gets an arrival too many. Then each rule is broken in turn.
"""

import os
import random
from dataclasses import dataclass, replace

import pytest
from test_pipeline import Barrier, Wrong, interleave

SCHEDULES = 36_000 if os.environ.get("GPUKERN_TEST_ALL") == "1" else 6_000


def ended(barrier, parity):
    return lambda: barrier.ended(parity)


class Block:
    """A ring of slots, and agents that walk it."""

    def __init__(self, kernel, rng):
        self.k, self.rng = kernel, rng
        self.events = []  # copies on their way, products that run, arrivals that follow copies
        self.running = 0

    def barriers(self, name, count):
        count += {f"{name} count + 1": 1, f"{name} count - 1": -1}.get(self.k.broken, 0)
        return [Barrier(count) for _ in range(self.k.slots)]

    def walk(self, parity_of=None):
        """(tile, step), slot and parity, step after step. parity_of: whose parity may be the broken rule."""
        for i in range(self.k.tiles * self.k.steps):
            parity = 0 if parity_of and self.k.broken == f"{parity_of} parity" else i // self.k.slots & 1
            yield divmod(i, self.k.steps), i % self.k.slots, parity

    def reach(self):
        if not self.running:
            raise Wrong("a block that has left is reached")

    def agent(self, steps):
        yield from steps
        self.running -= 1

    def run(self):
        agents = [self.agent(steps) for steps in self.agents()]
        self.running = len(agents)
        interleave(agents, self.events, self.rng)


# ---- gemm_skewed_sm90a ----
BOX = 6  # bytes of a copy of weights or of a token's window; a unit of no meaning
BOXES, WINDOW_WARPS, MAKER_WARPS, TOKENS = 2, 2, 2, 2  # MAKER_WARPS: EACH_MAKES / 32; TOKENS: rounds of a maker


@dataclass(frozen=True)
class Skewed:
    warpgroups: int = 2
    groups: int = 1
    slots: int = 3
    tiles: int = 2
    steps: int = 4
    broken: str = ""  # the rule that is not kept

    def block(self, rng):
        # a group comes to slots of its own, else the phase of its step two rounds ago may answer
        even = self.groups > 1 and self.broken != "slots of both groups"
        slots = rng.randint(1, 2) * 2 if even else rng.randint(2, 5)
        return SkewedBlock(replace(self, slots=slots, tiles=rng.randint(1, 3), steps=rng.randint(1, 5)), rng)


class SkewedBlock(Block):
    """gemm_skewed_sm90a_kernel; the names are the kernel's."""

    def __init__(self, kernel, rng):
        super().__init__(kernel, rng)
        slots = range(kernel.slots)
        makers = {"full counts no makers": 0, "a maker warp tells for all": 1}.get(kernel.broken, MAKER_WARPS)
        self.copied = self.barriers("copied", WINDOW_WARPS)
        self.full = self.barriers("full", 1 + makers)
        self.empty = self.barriers("empty", kernel.warpgroups)
        # windows that each warp copies of a step: none past the tokens' ends or the last token
        self.tokens = {at: [rng.randint(0, TOKENS) for _ in range(WINDOW_WARPS)] for at, _, _ in self.walk()}
        self.windows = [{} for _ in slots]  # (warp, token) -> the step whose window it is
        self.slots = [{} for _ in slots]  # box of weights or part of the tokens -> the step whose bytes it holds
        self.looking = [0 for _ in slots]  # makers
        self.reading = [0 for _ in slots]  # products

    def agents(self):
        yield self.weights()
        yield from (self.window_warp(warp) for warp in range(WINDOW_WARPS))
        yield from (self.makers(group, warp) for group in range(self.k.groups) for warp in range(MAKER_WARPS))
        yield from (self.products() for _ in range(self.k.warpgroups))

    # ---- weights ----
    def box_lands(self, slot, box, at):
        self.reach()
        self.put(slot, ("weights", box), at)
        self.full[slot].land(BOX)

    def put(self, slot, piece, at):
        if self.reading[slot]:
            raise Wrong("a slot is overwritten while a product reads it")
        self.slots[slot][piece] = at

    def weights(self):
        broken = self.k.broken
        for at, slot, parity in self.walk("weights'"):
            if broken != "weights without empty":
                yield ended(self.empty[slot], parity ^ 1)
            self.full[slot].arrive(BOXES * BOX + {"too much announced": 1, "too little announced": -BOX}.get(broken, 0))
            for box in range(BOXES):
                yield None
                self.events.append((self.box_lands, slot, box, at))

    # ---- windows of the tokens ----
    def window_lands(self, slot, window, at):
        self.reach()
        if self.looking[slot]:
            raise Wrong("a window is overwritten while a maker reads it")
        self.windows[slot][window] = at
        self.copied[slot].land(BOX)

    def window_warp(self, warp):
        broken = self.k.broken
        for at, slot, parity in self.walk("windows'"):
            count = self.tokens[at][warp]
            if broken != "windows without empty":
                yield ended(self.empty[slot], parity ^ 1)
            if count or broken != "no windows, no arrival":
                self.copied[slot].arrive(0 if broken == "windows not announced" else count * BOX)
            for token in range(count):
                yield None
                self.events.append((self.window_lands, slot, (warp, token), at))

    # ---- tokens ----
    def look(self, slot, at):
        for warp, count in enumerate(self.tokens[at]):
            if any(self.windows[slot].get((warp, token)) != at for token in range(count)):
                raise Wrong("a maker reads other windows than its step's")

    def makers(self, group, warp):
        broken = self.k.broken
        turn = 0 if broken in ("both groups take every step", "both groups are first") else group
        for at, slot, parity in self.walk("makers'"):
            copied = ended(self.copied[slot], parity)
            if turn > 0:
                turn -= 1
                continue
            turn = 0 if broken == "both groups take every step" else self.k.groups - 1
            if broken != "makers without copied":
                yield copied
            if broken == "makers tell before their tokens":
                self.full[slot].arrive()
                yield None
            self.looking[slot] += 1
            for part in range(TOKENS):
                self.look(slot, at)
                yield None
                self.put(slot, ("tokens", warp, part), at)
                yield None
            self.looking[slot] -= 1
            if broken != "makers tell before their tokens" and (broken != "a maker warp tells for all" or warp == 0):
                self.full[slot].arrive()
            yield None

    # ---- products ----
    def see(self, slot, at):
        pieces = [("weights", box) for box in range(BOXES)]
        pieces += [("tokens", warp, part) for warp in range(MAKER_WARPS) for part in range(TOKENS)]
        for piece in pieces:
            if self.slots[slot].get(piece) != at:
                raise Wrong(f"a product reads other {piece[0]} than its step's")

    def finish(self, queue):
        slot, at = queue.pop(0)
        self.reading[slot] -= 1
        self.see(slot, at)

    def products(self):
        broken, queue = self.k.broken, []
        for at, slot, parity in self.walk("products'"):
            step, before = at[1], (slot - 1) % self.k.slots
            if broken != "products without full":
                yield ended(self.full[slot], parity)
            self.see(slot, at)
            self.reading[slot] += 1
            queue.append((slot, at))
            self.events.append((self.finish, queue))
            yield None
            if broken != "products not awaited":
                yield lambda: len(queue) <= 1
            if broken == "let go a step early":
                self.empty[slot].arrive()
            elif step > 0:
                self.empty[before].arrive()
            if step < self.k.steps - 1:
                continue
            yield lambda: not queue
            if broken not in ("let go a step early", "last step kept"):
                self.empty[slot].arrive()
            yield None


KERNELS = {
    "two groups": Skewed(warpgroups=1, groups=2),
    "one group": Skewed(warpgroups=2, groups=1),
}


def schedules(kernel, count, seed):
    rng = random.Random(seed)
    for _ in range(count):
        kernel.block(rng).run()


@pytest.mark.parametrize("name", KERNELS)
def test_the_protocol_holds(name):
    schedules(KERNELS[name], SCHEDULES // len(KERNELS), name)


OVERWRITTEN, STUCK, OTHER, MANY = "overwritten while", "nothing can go on", "reads other", "an arrival too many"
TWO, ONE = "two groups", "one group"
BROKEN = {  # kernel and rule -> what may then go wrong first
    (TWO, "weights without empty"): f"{OVERWRITTEN}|{OTHER}|{MANY}",
    (TWO, "windows without empty"): f"{OVERWRITTEN}|{OTHER}|{MANY}|{STUCK}",
    (TWO, "windows not announced"): f"{OTHER}|{STUCK}",
    (TWO, "no windows, no arrival"): STUCK,
    (TWO, "too much announced"): STUCK,
    (TWO, "too little announced"): f"{OTHER}|{STUCK}",
    (TWO, "makers without copied"): f"{OTHER} windows",
    (TWO, "slots of both groups"): f"{OTHER}|{OVERWRITTEN}|{MANY}|{STUCK}",
    (TWO, "makers tell before their tokens"): f"{OTHER} tokens",
    (TWO, "a maker warp tells for all"): f"{OTHER} tokens",
    (TWO, "both groups take every step"): ".",
    (TWO, "both groups are first"): ".",
    (TWO, "copied count - 1"): f"{OTHER} windows|{MANY}|{STUCK}",
    (TWO, "copied count + 1"): STUCK,
    (TWO, "full counts no makers"): f"{OTHER}|{MANY}",
    (TWO, "full count - 1"): f"{OTHER}|{MANY}|{STUCK}",
    (TWO, "full count + 1"): STUCK,
    (TWO, "empty count - 1"): MANY,
    (TWO, "empty count + 1"): STUCK,
    (TWO, "products without full"): OTHER,
    (TWO, "products not awaited"): OVERWRITTEN,
    (TWO, "let go a step early"): OVERWRITTEN,
    (TWO, "last step kept"): STUCK,
    (TWO, "weights' parity"): ".",
    (TWO, "windows' parity"): ".",
    (TWO, "makers' parity"): ".",
    (TWO, "products' parity"): f"{OTHER}|{STUCK}",
    (ONE, "makers without copied"): f"{OTHER} windows",
    (ONE, "full counts no makers"): f"{OTHER}|{MANY}",
    (ONE, "empty count - 1"): ".",
    (ONE, "empty count + 1"): STUCK,
    (ONE, "let go a step early"): OVERWRITTEN,
}


@pytest.mark.parametrize("kernel, rule", BROKEN)
def test_a_broken_rule_is_seen(kernel, rule):
    with pytest.raises(Wrong, match=BROKEN[kernel, rule]):
        schedules(replace(KERNELS[kernel], broken=rule), 4000, rule)  # some show in 1 of 300
