# SPDX-License-Identifier: BSD-3-Clause
"""The layout algebra (torch_gpukern.layout) beside pycute on random layouts.

pycute (nvidia-cutlass 4.2.0) is the published algebra, but it is not the judge. If the two differ,
the values of the layout decide, and the difference must be listed in DEVIATIONS.
"""

import os
import random

from conftest import judge

from torch_gpukern import layout as L
from torch_gpukern.layout import Layout, Refusal

pycute = judge("pycute")

CASES = 20_000 if os.environ.get("GPUKERN_TEST_ALL") == "1" else 1_000

# Where pycute 4.2.0 differs, by function. Each must occur in its test, so that no entry outlives
# its cause.
DEVIATIONS = {
    "compose": {
        "wrong": "returns a layout whose values are not a(b(i)); here: refused, or the right "
        "layout",
        "past the end": "b leaves a's domain, a's last mode goes on; here: refused",
        "gives up": "fails an assertion although a layout exists",
    },
    "complement": {
        "holes": "returns a layout that leaves holes or overlaps the argument; here: refused",
        "gives up": "fails an assertion for overlapping modes; here: refused",
    },
    "right_inverse": {
        "stops early": "stops at a stride of 0 or at an overlap, or chooses otherwise between "
        "equal strides",
    },
    "cosize": {
        "negative strides": "the offset of the last index, plus 1; here: the length of the range "
        "of all offsets",
    },
    "divide": {
        "wrong": "as compose and complement, of which it is made",
        "past the end": "a tile that reaches past the layout's end; here the last mode of "
        "coalesce(layout) goes on",
        "gives up": "fails an assertion although a layout exists, or where here it is refused",
    },
    "product": {
        "wrong": "as compose and complement, of which it is made",
        "gives up": "fails an assertion although a layout exists, or where here it is refused",
    },
}


# ---- layouts are pairs of tuples (shape, stride) here --------------------------------------------


def ours(function, *arguments):
    """Our answer as a pair of tuples, or None if we refuse."""
    arguments = [Layout(*a) if isinstance(a, tuple) else a for a in arguments]
    try:
        leaves = function(*arguments).flat().leaves
    except Refusal:
        return None
    return tuple(shape for shape, _ in leaves), tuple(stride for _, stride in leaves)


def text(layout):
    return ":".join("(" + ",".join(map(str, numbers)) + ")" for numbers in layout)


def flat(layout):
    """A pycute layout as a pair of tuples."""
    return tuple(tuple(pycute.flatten(part)) for part in (layout.shape, layout.stride))


def size(layout):
    return pycute.product(layout[0])


def at(layout, index):
    offset = 0
    for shape, stride in zip(*layout):
        index, digit = divmod(index, shape)
        offset += digit * stride
    return offset


def values(layout):
    return [at(layout, i) for i in range(size(layout))]


def theirs(function, *arguments):
    """pycute's answer as a pair of tuples, or None if an assertion of it fails."""
    arguments = [pycute.Layout(*a) if isinstance(a, tuple) else a for a in arguments]
    try:
        return flat(function(*arguments))
    except (AssertionError, ZeroDivisionError):
        return None


def random_layout(rng, modes=3, shapes=8, strides=24, low=0):
    n = rng.randint(1, modes)
    return tuple(rng.randint(1, shapes) for _ in range(n)), tuple(
        rng.randint(low, strides) for _ in range(n)
    )


def tile_like(rng, modes=3):
    """Random layouts like those of kernels: powers of two, with strides that are products of
    shapes, in any order."""
    shapes = [2 ** rng.randint(0, 3) for _ in range(rng.randint(1, modes))]
    order = rng.sample(range(len(shapes)), len(shapes))
    strides, stride = [0] * len(shapes), 2 ** rng.choice((0, 0, 0, 1))
    for mode in order:
        strides[mode] = stride
        stride *= shapes[mode]
    return tuple(shapes), tuple(strides)


def any_layout(rng):
    return tile_like(rng) if rng.random() < 0.5 else random_layout(rng)


def deviations(function, seen):
    """Every listed deviation of the function occurred, and no other."""
    assert set(seen) == set(DEVIATIONS[function]), {kind: case for kind, case in seen.items()}


def test_coalesce_size_at():
    rng = random.Random(1)
    layouts = [random_layout(rng, modes=5, low=-3) for _ in range(CASES)] + [
        tile_like(rng) for _ in range(CASES)
    ]
    for a in layouts:
        assert ours(L.coalesce, a) == theirs(pycute.coalesce, a), text(a)
        assert L.size(Layout(*a)) == size(a)
        i = rng.randrange(size(a))
        assert Layout(*a)(i) == at(a, i) == pycute.Layout(*a)(i), (text(a), i)


def test_cosize():
    rng = random.Random(2)
    layouts = [random_layout(rng, low=-3 if i % 2 else 0) for i in range(CASES)]
    seen = {}
    for a in layouts:
        offsets, answer = values(a), L.cosize(Layout(*a))
        assert answer == max(offsets) - min(offsets) + 1, text(a)
        if pycute.cosize(pycute.Layout(*a)) != answer:
            assert min(a[1]) < 0, text(a)
            seen["negative strides"] = a
    deviations("cosize", seen)


def is_composition(layout, a, b):
    return size(layout) == size(b) and values(layout) == [at(a, i) for i in values(b)]


def test_compose():
    rng = random.Random(3)
    pairs = [(any_layout(rng), any_layout(rng)) for _ in range(CASES)]
    pairs += [(tile_like(rng), tile_like(rng, modes=2)) for _ in range(CASES)]
    seen = {}
    agreed = 0
    for a, b in pairs:
        answer, other = ours(L.compose, a, b), theirs(pycute.composition, a, b)
        inside = max(values(b)) < size(a)
        if answer is not None:
            assert inside and is_composition(answer, a, b), (text(a), text(b), answer)
        if other is None:
            if answer is not None:
                seen["gives up"] = (a, b)
        elif not inside:
            assert answer is None
            seen["past the end"] = (a, b)
        elif not is_composition(other, a, b):
            seen["wrong"] = (a, b)
        else:  # with the same values the layouts are equal, except for merged modes
            assert answer is not None, (text(a), text(b), other)
            assert theirs(pycute.coalesce, answer) == theirs(pycute.coalesce, other), (
                text(a),
                text(b),
                answer,
            )
            agreed += 1
    deviations("compose", seen)
    assert agreed > len(pairs) // 10


def tiles(layout, rest):
    """Whether (layout without zero strides, rest) reaches each offset below its size once."""
    kept = [(n, d) for n, d in zip(*layout) if d != 0] + list(zip(*rest))
    both = tuple(zip(*kept)) or ((1,), (0,))
    return 0 not in both[0] and sorted(values(both)) == list(range(size(both)))


def test_complement():
    rng = random.Random(4)
    cases = [(any_layout(rng), rng.randint(1, 100)) for _ in range(CASES)]
    seen = {}
    for a, n in cases:
        answer, other = ours(L.complement, a, n), theirs(pycute.complement, a, n)
        if answer is not None:
            assert tiles(a, answer) and answer == other, (text(a), n, answer, other)
        elif other is None:
            seen["gives up"] = (a, n)
        else:
            assert not tiles(a, other), (text(a), n, other)
            seen["holes"] = (a, n)
    deviations("complement", seen)


def test_right_inverse():
    rng = random.Random(5)
    layouts = [any_layout(rng) for _ in range(CASES)] + [
        random_layout(rng, 4, 4, 2) for _ in range(CASES)
    ]
    seen = {}
    for a in layouts:
        answer, other = ours(L.right_inverse, a), theirs(pycute.right_inverse, a)
        assert [at(a, i) for i in values(answer)] == list(range(size(answer))), (text(a), answer)
        if answer != other:
            assert size(other) <= size(answer) and len(set(values(a))) < size(a), (
                text(a),
                answer,
                other,
            )
            seen["stops early"] = a
    deviations("right_inverse", seen)


def test_divide():
    rng = random.Random(6)
    pairs = [(any_layout(rng), any_layout(rng)) for _ in range(CASES)]
    pairs += [(tile_like(rng), tile_like(rng, modes=2)) for _ in range(CASES)]
    seen = {}
    agreed = 0
    for a, tile in pairs:
        answer, other = ours(L.logical_divide, a, tile), theirs(pycute.logical_divide, a, tile)
        if answer is not None:
            overhang = L.overhang(Layout(*a), Layout(*tile))
            assert size(answer) == size(a) + overhang and overhang >= 0
            assert all(at(answer, i) == at(a, t) for i, t in enumerate(values(tile)) if t < size(a))
            if overhang == 0 and tiles(tile, ((1,), (0,))):
                assert sorted(values(answer)) == sorted(values(a)), (text(a), text(tile), answer)
        if other is None:
            seen["gives up"] = (a, tile)
        elif answer is not None and theirs(pycute.coalesce, answer) == theirs(
            pycute.coalesce, other
        ):
            agreed += 1
        elif max(values(tile)) >= size(a) or size(other) > size(a):
            seen["past the end"] = (a, tile)
        else:
            assert sorted(values(other)) != sorted(values(a)), (text(a), text(tile), answer, other)
            seen["wrong"] = (a, tile)
    deviations("divide", seen)
    assert agreed > len(pairs) // 10


def test_product():
    rng = random.Random(7)
    pairs = [(any_layout(rng), any_layout(rng)) for _ in range(CASES)]
    pairs += [(tile_like(rng), tile_like(rng, modes=2)) for _ in range(CASES)]
    seen = {}
    agreed = 0
    for a, copies in pairs:
        answer, other = (
            ours(L.logical_product, a, copies),
            theirs(pycute.logical_product, a, copies),
        )
        n = size(a)
        if answer is not None:
            assert size(answer) == n * size(copies) and values(answer)[:n] == values(a), (
                text(a),
                text(copies),
                answer,
            )
            if len(set(values(a))) == n and len(set(values(copies))) == size(copies):
                assert len(set(values(answer))) == size(answer), (text(a), text(copies), answer)
        if other is None:
            seen["gives up"] = (a, copies)
        elif answer is not None and theirs(pycute.coalesce, answer) == theirs(
            pycute.coalesce, other
        ):
            agreed += 1
        else:
            rest = theirs(pycute.complement, a, n * pycute.cosize(pycute.Layout(*copies)))
            first, second = (
                tuple(part[i] for part in other) for i in (slice(len(a[0])), slice(len(a[0]), None))
            )
            right = tiles(a, rest) and first == a and is_composition(second, rest, copies)
            assert not right, (text(a), text(copies), answer, other)
            seen["wrong"] = (a, copies)
    deviations("product", seen)
    assert agreed > len(pairs) // 10
