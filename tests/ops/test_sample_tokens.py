# SPDX-License-Identifier: BSD-3-Clause
"""sample_tokens against its definition in PyTorch, bit for bit, and against integers in Python.

The definition is `reference.sample_tokens`, which sorts. One test checks the definition's weights
with exact arithmetic, and another its tokens with plain loops over Python integers.
"""

import math
from decimal import Decimal, localcontext
from fractions import Fraction

import pytest
import torch
from conftest import generator, randn, strided

import torch_gpukern as gk
from torch_gpukern.reference import sampling

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
KINDS = ("smooth", "ties", "peaked", "flat", "broken")


def uniform(gen, *shape, dtype=torch.float64):
    return torch.rand(*shape, generator=gen, dtype=torch.float64).to(dtype)


def integers(gen, low, high, *shape, dtype=torch.int64):
    return torch.randint(low, high, shape, generator=gen).to(dtype)


def some(gen, rows, share, otherwise, values):
    """`values`, but `otherwise` in a share of the rows."""
    return torch.where(uniform(gen, rows) < share, torch.full_like(values, otherwise), values)


def logits_of(gen, rows, vocab, kind, dtype):
    x = randn(gen, rows, vocab, std=3.0)
    if kind == "ties":
        x = (2 * x).round() / 2
    if kind == "peaked":
        x = 20 * x
    if kind == "flat":
        x = torch.full_like(x, 1.25)
    if kind == "broken":
        for row in range(rows):
            bad = (math.nan, math.inf, -math.inf)[row % 3]
            if row % 4 == 3:
                x[row] = bad
            else:
                x[row, integers(gen, 0, vocab, 2)] = bad
    return x.to(dtype)


def settings_of(gen, rows, vocab, float_dtype=torch.float64, int_dtype=torch.int64):
    """Temperatures from 0 on; top_k, top_p and min_p, each off in some rows, at and past their
    ends in others."""
    temperature = some(gen, rows, 0.1, 0.0, 0.05 + 2 * uniform(gen, rows))
    top_k = some(gen, rows, 0.3, 0, integers(gen, -1, min(vocab, 60) + 3, rows))
    top_k = torch.where(uniform(gen, rows) < 0.1, vocab // 2, top_k)
    top_p = some(gen, rows, 0.3, 1.0, uniform(gen, rows))
    top_p = torch.where(uniform(gen, rows) < 0.1, 0.0, top_p)
    min_p = some(gen, rows, 0.5, 0.0, 0.2 * uniform(gen, rows))
    min_p = torch.where(uniform(gen, rows) < 0.05, 1.0, min_p)
    return {
        "temperature": temperature.to(float_dtype),
        "number": uniform(gen, rows).to(float_dtype).clamp_max(1 - 2**-24),
        "top_k": top_k.to(int_dtype),
        "top_p": top_p.to(float_dtype),
        "min_p": min_p.to(float_dtype),
    }


def penalties_of(gen, rows, vocab, slots=5, float_dtype=torch.float64, int_dtype=torch.int64):
    often = (uniform(gen, slots, vocab) < 0.3).int()
    return {
        "counts": often * integers(gen, 1, 4, slots, vocab, dtype=torch.int32),
        "prompt": uniform(gen, slots, vocab) < 0.2,
        "slots": integers(gen, -1, slots, rows, dtype=int_dtype),
        "drafted": integers(gen, -1, vocab, rows, 3, dtype=int_dtype),
        "presence_penalty": (2 * uniform(gen, rows) - 0.5).to(float_dtype),
        "frequency_penalty": (uniform(gen, rows) - 0.3).to(float_dtype),
        "repetition_penalty": (0.5 + uniform(gen, rows)).to(float_dtype),
    }


def on(device, given):
    return {name: x.to(device) for name, x in given.items()}


def check(logits, given, device):
    """The op's tokens are the definition's, computed on the CPU."""
    want = gk.reference.sample_tokens(logits, **given)
    out = gk.sample_tokens(logits.to(device), **on(device, given))
    assert out.dtype == torch.int64 and out.shape == want.shape and out.device.type == device
    wrong = (out.cpu() != want).nonzero().flatten().tolist()
    assert not wrong, [(row, out[row].item(), want[row].item()) for row in wrong[:5]]
    return want


# ---- the definition itself -----------------------------------------------------------------------


def test_weights_are_exponentials():
    """e^x 2^43 with a relative error below 2^-47, against 50 digits; monotonic but for rounding."""
    x = torch.cat(
        (
            torch.linspace(-31, 0, 3001, dtype=torch.float64),
            -uniform(generator("weights"), 3000) * 31,
            torch.tensor([0.0, -0.0, -1e-300, -(2.0**-53)], dtype=torch.float64),
        )
    )
    got = sampling.scaled_exp(x).tolist()
    with localcontext() as context:
        context.prec = 50
        for value, e in zip(x.tolist(), got):
            want = Decimal(value).exp() * 2**43
            assert abs(Decimal(e) - want) < want * Decimal(2) ** -47
    assert got[3000] == 2.0**43  # e^0
    assert sampling.scaled_exp(torch.tensor([-31.01, -math.inf, math.nan])).tolist() == [0, 0, 0]
    e = sampling.scaled_exp(x.sort().values)
    assert ((e[1:] - e[:-1]) >= -(e[1:] * 2.0**-47)).all()


def stated(weights, keep, number):
    """The token of integer weights, of which `keep` stay: plain integers."""
    total = sum(w for w, stays in zip(weights, keep) if stays)
    place = min(int(number * float(total)), total - 1)
    upto = 0
    for token, (w, stays) in enumerate(zip(weights, keep)):
        upto += w * stays
        if stays and upto > place:
            return token
    raise AssertionError("no token")


@pytest.mark.parametrize("kind", ("smooth", "ties"))
def test_tokens_are_those_of_python(kind, device):
    """Weights of the definition, then everything else with Python's integers and sorted()."""
    gen = generator("python", kind)
    rows, vocab = 200, 40
    logits = logits_of(gen, rows, vocab, kind, torch.float32)
    given = settings_of(gen, rows, vocab)
    out = gk.sample_tokens(logits.to(device), **on(device, given)).tolist()
    for row in range(rows):
        t, number, k, p, least = (given[n][row].item() for n in given)
        y = logits[row].double()
        if t == 0:
            assert out[row] == y.tolist().index(max(y.tolist()))
            continue
        x = (y - y.max()) * (1 / t)
        e = sampling.scaled_exp(x)
        weights = [w if v >= least * 2.0**43 else 0 for w, v in zip(e.round().long().tolist(), e)]
        order = sorted(range(vocab), key=lambda i: (weights[i] == 0, -x[i].item(), i))
        order = [i for i in order if weights[i]]
        if 0 < k < vocab:
            order = order[:k]
        if p < 1:
            total, before, stay = sum(weights[i] for i in order), 0, []
            for i in order:
                if stay and not float(before) < p * float(total):
                    break
                stay.append(i)
                before += weights[i]
            order = stay
        assert out[row] == stated(weights, [i in order for i in range(vocab)], number), row


# ---- the kernels ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", (1, 2, 7, 300, 5003))
def test_tokens(vocab, dtype, kind, device):
    gen = generator("sample", vocab, str(dtype), kind)
    rows = 48
    logits = logits_of(gen, rows, vocab, kind, dtype)
    check(logits, settings_of(gen, rows, vocab), device)
    check(logits, settings_of(gen, rows, vocab) | penalties_of(gen, rows, vocab), device)


@pytest.mark.parametrize("kind", ("smooth", "ties", "flat"))
@pytest.mark.parametrize("vocab", (128_256, 262_144))
def test_large_vocabularies(vocab, kind, device):
    """Top_k within and beyond the keys that shared memory holds, and classes of ties beyond it."""
    gen = generator("large", vocab, kind)
    top_k = torch.tensor([0, 1, 50, 4095, 4096, 4097, 20_000, vocab - 1])
    top_p = torch.tensor([0.9, 1.0, 0.95, 0.5, 1.0, 0.9, 1.0, 0.999], dtype=torch.float64)
    rows = len(top_k)
    logits = logits_of(gen, rows, vocab, kind, torch.bfloat16 if kind == "ties" else torch.float32)
    given = {
        "temperature": torch.tensor([1.0, 0.3, 1.0, 5.0, 100.0, 2.0, 1.0, 1e-3]).double(),
        "number": uniform(gen, rows),
        "top_k": top_k,
        "top_p": top_p,
    }
    check(logits, given, device)
    check(logits, {n: given[n] for n in ("temperature", "number")}, device)
    given["min_p"] = torch.full((rows,), 0.02, dtype=torch.float64)
    check(logits, given | penalties_of(gen, rows, vocab), device)


@pytest.mark.parametrize("kind", ("smooth", "ties"))
@pytest.mark.parametrize("rows", (1, 20, 60, 140))
def test_rows_of_several_blocks(rows, kind, device):
    """An H200 has 8, 4, 2 blocks or 1 for a row. Rows begin at any alignment; a part may lie in
    the last vectors alone."""
    gen = generator("blocks", rows, kind)
    vocab = 16_387
    for dtype in (torch.float32, torch.bfloat16, torch.float64)[: 3 if rows < 100 else 1]:
        logits = logits_of(gen, rows, vocab, kind, dtype)
        given = settings_of(gen, rows, vocab)
        given["top_k"] = torch.where(uniform(gen, rows) < 0.2, 5000, given["top_k"])
        penalties = penalties_of(gen, rows, vocab, slots=3)
        check(logits, given, device)
        check(logits, given | penalties, device)
        penalties["counts"] *= uniform(gen, 3, vocab) < 0.05
        penalties["prompt"] &= uniform(gen, 3, vocab) < 0.05
        penalties["drafted"] = integers(gen, -1, vocab, rows, 40)
        check(logits, given | penalties, device)


@pytest.mark.parametrize("rows,vocab", ((1, 262_144), (140, 40_000)))
def test_counts_of_every_token(rows, vocab, device):
    """More tokens with penalties than shared memory has room for."""
    gen = generator("every", rows)
    logits = logits_of(gen, rows, vocab, "smooth", torch.float32)
    given = settings_of(gen, rows, vocab) | penalties_of(gen, rows, vocab, slots=2)
    given["slots"] = integers(gen, 0, 2, rows)
    given["counts"] += 1
    check(logits, given, device)


def test_penalties_that_are_not_finite(device):
    """0 times infinity is NaN, so such a penalty changes tokens without a count, too."""
    gen = generator("penalties")
    inf, nan = math.inf, math.nan
    values = vector(inf, -inf, nan, 0, 0, 0, 1, 1, 1)
    others = vector(0, 0, 0, inf, -inf, nan, inf, -inf, 1)
    for vocab in (9, 5003):
        logits = logits_of(gen, 9, vocab, "smooth", torch.float32)
        given = {
            "temperature": torch.ones(9).double(),
            "number": uniform(gen, 9),
            "counts": (uniform(gen, 2, vocab) < 0.1).int(),
            "slots": torch.arange(9) % 2,
            "frequency_penalty": values,
            "presence_penalty": others,
        }
        check(logits, given, device)
        check(logits, given | {"counts": torch.ones(2, vocab, dtype=torch.int32)}, device)
        given |= {"frequency_penalty": 0 * vector(*[1] * 9), "presence_penalty": vector(*[0] * 9)}
        check(logits, given | {"repetition_penalty": values}, device)


def test_extreme_values(device):
    """Temperatures, logits and settings at the ends of their types."""
    gen = generator("extreme")
    vocab = 600
    cases = []
    for dtype, scales in (
        (torch.float32, (1e-38, 1e-20, 1.0, 1e30, 3e37)),
        (torch.float64, (1e300,)),
    ):
        for scale in scales:
            for t in (1e-300, 1e-30, 1e-3, 1.0, 1e3, 1e30, 1e38, 1e300):
                cases.append((dtype, scale, t))
    for dtype, scale, t in cases:
        logits = (randn(gen, 6, vocab, dtype=torch.float64) * scale).to(dtype)
        given = {
            "temperature": torch.full((6,), t, dtype=torch.float64),
            "number": torch.tensor([0.0, 0.3, 1 - 2**-53, 0.5, 0.999, 1.5], dtype=torch.float64),
            "top_k": torch.tensor([0, 5, 0, 100, 599, 600]),
            "top_p": torch.tensor([1.0, 1.0, 0.7, 0.9, 1e-9, -1.0], dtype=torch.float64),
        }
        check(logits, given, device)


def vector(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def test_an_infinite_temperature(device):
    """All finite logits have the same weight. Infinite ones have none, and do not count for top_k
    and top_p."""
    logits = torch.tensor([-math.inf, 2.0, 0.5, -math.inf, 1.0, -3.0]).repeat(8, 1)
    number = torch.arange(8, dtype=torch.float64) / 8
    heat = torch.full((8,), math.inf, dtype=torch.float64)
    for settings, want in (
        ({}, [1, 1, 2, 2, 4, 4, 5, 5]),
        ({"top_k": torch.full((8,), 2)}, [1, 1, 1, 1, 2, 2, 2, 2]),
        ({"top_p": torch.full((8,), 0.5)}, [1, 1, 1, 1, 2, 2, 2, 2]),
        ({"top_p": torch.zeros(8)}, [1] * 8),
    ):
        given = {"temperature": heat, "number": number, **settings}
        assert check(logits, given, device).tolist() == want
        assert check(logits.double(), given, device).tolist() == want


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32), ids=str)
def test_numbers_outside(dtype, device):
    """A number below 0 or NaN is 0; one from 1 on draws the last token with a weight."""
    logits = torch.tensor([[0.0, 1.0, 0.0, -100.0]]).expand(7, -1)
    number = vector(-1.0, math.nan, -math.inf, 1.0, 1.5, 1e30, math.inf, dtype=dtype)
    given = {"temperature": torch.ones(7), "number": number}
    assert check(logits, given, device).tolist() == [0, 0, 0, 2, 2, 2, 2]


def test_settings_that_are_not_numbers_or_beyond_their_ends(device):
    """top_p: NaN and 1 or more are off, 0 or less leave one token. min_p: NaN and more than 1 leave
    none, so the row gets the largest logit. top_k at the ends of its types."""
    gen = generator("beyond")
    logits = logits_of(gen, 8, 40, "ties", torch.float32)
    plain = {"temperature": torch.ones(8).double(), "number": uniform(gen, 8)}
    free = check(logits, plain, device)
    best = logits.argmax(-1)
    for values, want in (
        (vector(math.nan, 1, 2, math.inf, math.nan, 1, 1, 1), free),
        (vector(0, -0.0, -1, -math.inf, 0, 5e-324, 1e-300, 0), best),
    ):
        assert torch.equal(check(logits, plain | {"top_p": values}, device), want)
    for values, want in (
        (vector(0, -0.0, -1, -math.inf, 0, 5e-324, 1e-300, 0), free),
        (vector(math.nan, 1.5, 2, math.inf, math.nan, 1 + 2**-52, 9, 9), best),
    ):
        assert torch.equal(check(logits, plain | {"min_p": values}, device), want)
    for dtype in (torch.int64, torch.int32):
        ends = torch.iinfo(dtype)
        off = torch.tensor([ends.min, ends.max, 0, -1, 40, 41, ends.max, ends.min], dtype=dtype)
        assert torch.equal(check(logits, plain | {"top_k": off}, device), free)


def test_rows_that_are_not_finite(device):
    """NaN is larger than any number, infinity too."""
    nan, inf = math.nan, math.inf
    logits = torch.tensor([[0, inf, nan, nan], [0, inf, inf, 9], [-inf] * 4, [-inf, -inf, 3, -inf]])
    for temperature in (0.0, 1.0, 1e-310, inf):
        given = {
            "temperature": torch.full((4,), temperature, dtype=torch.float64),
            "number": torch.full((4,), 0.9),
        }
        assert check(logits, given, device).tolist() == [2, 1, 0, 2]


def test_expanded_tensors(device):
    """Strides of 0, as expand gives them: of logits, vectors, counts and drafted tokens."""
    gen = generator("expanded")
    logits = logits_of(gen, 1, 30, "ties", torch.float32).expand(9, -1)
    given = settings_of(gen, 1, 30) | penalties_of(gen, 1, 30, slots=1)
    given |= {"number": uniform(gen, 9), "slots": torch.tensor([0, 1, 1, 0, 2, -1, -7, 0, 2])}
    rows = {n: 3 if n in ("counts", "prompt") else 9 for n in given}

    def laid(n, x):  # .to() keeps strides of 0 only if it copies nothing
        return x if len(x) == rows[n] else x.to(device).expand(rows[n], *x.shape[1:])

    want = check(
        logits.contiguous(), {n: laid(n, x).cpu().contiguous() for n, x in given.items()}, device
    )
    given = {n: laid(n, x).to(device) for n, x in given.items()}
    assert given["counts"].stride(0) == given["top_p"].stride(0) == 0
    out = gk.sample_tokens(logits[:1].to(device).expand(9, -1), **given)
    assert torch.equal(out.cpu(), want)


def test_counts_at_the_ends_of_int32(device):
    """Counts that reach the largest int32 with their drafted tokens or pass it, and counts below 0.
    Drafted tokens outside the vocabulary, and counts without rows, change nothing."""
    gen = generator("ends")
    logits = logits_of(gen, 6, 9, "smooth", torch.float32)
    one = torch.ones(6, dtype=torch.float64)
    for value in (2**31 - 3, 2**31 - 1, -1, -(2**31)):
        given = {
            "temperature": one,
            "number": uniform(gen, 6),
            "counts": torch.full((2, 9), value, dtype=torch.int32),
            "slots": torch.tensor([0, 1, 0, 1, -1, -(2**40)]),
            "drafted": torch.tensor([[0, 0], [1, -1], [8, 9], [-5, 2**40], [0, 0], [1, 1]]),
            "presence_penalty": one,
            "frequency_penalty": 1e-9 * one,
            "repetition_penalty": 1.5 * one,
        }
        check(logits, given, device)
    given |= {"counts": given["counts"][:0], "slots": torch.full((6,), -1)}
    plain = {n: given[n] for n in ("temperature", "number")}
    assert torch.equal(check(logits, given, device), check(logits, plain, device))


def test_equal_x_of_unequal_logits(device):
    """Logits so near each other, beside a large one, that float64 gives them the same x: the lower
    tokens stay."""
    near = 2.0**-60 * torch.arange(1, 9, dtype=torch.float64)
    logits = torch.cat((torch.tensor([1.0], dtype=torch.float64), near)).flip(0).expand(64, -1)
    given = {
        "temperature": torch.full((64,), 0.5, dtype=torch.float64),
        "number": torch.arange(64, dtype=torch.float64) / 64,
        "top_k": torch.full((64,), 4),
    }
    assert set(check(logits.contiguous(), given, device).tolist()) == {8, 0, 1, 2}
    check(logits.float().contiguous(), given, device)


def test_numbers_and_integers_of_32_bits(device):
    gen = generator("narrow")
    logits = logits_of(gen, 64, 300, "smooth", torch.float32)
    kinds = {"float_dtype": torch.float32, "int_dtype": torch.int32}
    given = settings_of(gen, 64, 300, **kinds) | penalties_of(gen, 64, 300, **kinds)
    check(logits, given, device)


def test_strided_tensors_in_poison(device):
    """Rows of any stride and alignment between NaN, and vectors of any stride."""
    gen = generator("strides")
    for vocab in (5, 301, 4100):
        for dtype in DTYPES:
            for offset in range(4):
                logits = logits_of(gen, 9, vocab, "ties", dtype)
                given = settings_of(gen, 9, vocab) | penalties_of(gen, 9, vocab)
                want = gk.reference.sample_tokens(logits, **given)
                given = on(device, given)
                spread = {
                    n: x[:, None].expand(-1, 3).contiguous()[:, 1]
                    for n, x in given.items()
                    if x.dim() == 1
                }
                spread["drafted"] = given["drafted"].T.contiguous().T
                wide = torch.full((5, 2 * vocab + 1), 7, dtype=torch.int32, device=device)
                spread["counts"] = wide[:, 1 : vocab + 1].copy_(given["counts"])
                laid = strided(logits.to(device), offset=offset, pad=3)
                out = gk.sample_tokens(laid, **(given | spread))
                assert torch.equal(out.cpu(), want)
                laid = strided(logits.to(device), order=(1, 0))  # copied first
                assert torch.equal(gk.sample_tokens(laid, **given).cpu(), want)


def test_a_row_depends_on_itself_alone(device):
    gen = generator("alone")
    logits = logits_of(gen, 40, 1000, "smooth", torch.float32).to(device)
    given = on(device, settings_of(gen, 40, 1000) | penalties_of(gen, 40, 1000))
    shared = ("counts", "prompt")
    whole = gk.sample_tokens(logits, **given)
    for row in range(40):
        one = {n: x if n in shared else x[row : row + 1] for n, x in given.items()}
        assert gk.sample_tokens(logits[row : row + 1], **one) == whole[row]
    order = torch.randperm(40, generator=gen).to(device)
    mixed = {n: x if n in shared else x[order] for n, x in given.items()}
    assert torch.equal(gk.sample_tokens(logits[order], **mixed), whole[order])


def test_every_number_gets_its_share(device):
    """Numbers on a fine grid: how many of them get a token is its weight's share to within one step
    of the grid. That holds by counting, not by chance."""
    steps = 4096
    logits = torch.tensor([0.1, -2.0, 1.3, 0.1, -40.0, 0.9], device=device).expand(steps, -1)
    number = torch.arange(steps, dtype=torch.float64, device=device) / steps
    one = torch.ones_like(number)
    for given in (
        {},
        {"top_k": (3 * one).long()},
        {"top_p": 0.8 * one},
        {"min_p": 0.3 * one},
    ):
        out = gk.sample_tokens(logits, one, number, **given).cpu()
        x = logits[0].cpu().double()
        p = (x - x.max()).exp()
        if "min_p" in given:
            p[p < 0.3] = 0
        order = sorted(range(6), key=lambda i: (-p[i].item(), i))
        if "top_k" in given:
            p[order[3:]] = 0
        if "top_p" in given:
            before = 0.0
            for i in order:
                share = p[i].item()
                if before >= 0.8 * p.sum().item() and before > 0:
                    p[i] = -1
                before += share
            p = p.clamp_min(0)
        p = p / p.sum()
        assert (out[1:] >= out[:-1]).all()
        for token in range(6):
            assert abs((out == token).sum().item() - steps * p[token].item()) <= 1


def test_weights_are_exact(device):
    """Rows of two logits, x and 0: the numbers just below and just above the end of the first one's
    share. An error of one unit of 2^-43 in the weight changes the token."""
    gen = generator("exact")
    edges = torch.linspace(-31, 0, 4097, dtype=torch.float64)
    # Near 0 a weight has the most digits. One fused multiply-add in the series changes one weight in
    # some 450,000 there (measured).
    x = torch.cat((-31 * uniform(gen, 20_000), -0.7 * uniform(gen, 4_000_000), edges))
    weights = sampling.scaled_exp(x).round()
    x, weights = x[weights > 0], weights[weights > 0]
    logits = torch.stack((x, torch.zeros_like(x)), 1).to(device)
    one = torch.ones_like(x, device=device)
    for half, want in ((-0.5, 0), (0.5, 1)):
        number = (weights + half) / (weights + 2.0**43)
        out = gk.sample_tokens(logits, one, number.to(device))
        assert (out == want).all()
        counts = torch.zeros(1, 2, dtype=torch.int32, device=device)
        slots = torch.zeros(len(x), dtype=torch.int64, device=device)
        out = gk.sample_tokens(logits, one, number.to(device), counts=counts, slots=slots)
        assert (out == want).all()


def test_exact_edges(device):
    """A number at the end of a share: the weight of four equal logits is 2^43 each."""
    logits = torch.zeros(5, 4, device=device)
    number = torch.tensor([0.0, 0.25, 0.5, 0.75, 1 - 2**-53], dtype=torch.float64, device=device)
    one = torch.ones_like(number)
    assert gk.sample_tokens(logits, one, number).tolist() == [0, 1, 2, 3, 3]
    below = torch.nextafter(number[1:], -one[1:])
    assert gk.sample_tokens(logits[1:], one[1:], below).tolist() == [0, 1, 2, 3]
    # top_p keeps a token while the sum before it is below its share: at 0.5, exactly two
    half = gk.sample_tokens(logits, one, number, top_p=0.5 * one)
    assert half.tolist() == [0, 0, 1, 1, 1]
    assert Fraction(number[4].item()) < 1


def test_the_longest_rows(device):
    """The sum of 2^20 - 1 weights of 2^43 is below 2^63. One more column is refused."""
    n = 2**20 - 1
    one = torch.ones(1, dtype=torch.float64, device=device)
    logits = torch.zeros(1, n, device=device)
    assert gk.sample_tokens(logits, one, 0.75 * one).item() == 3 * n // 4
    half = gk.sample_tokens(logits, one, 0.75 * one, top_p=0.5 * one)
    assert half.item() == 3 * 2**19 // 4
    with pytest.raises(ValueError, match="columns, got 1048576"):
        gk.sample_tokens(torch.zeros(1, n + 1, device=device), one, one)


def test_no_rows(device):
    empty = torch.empty(0, dtype=torch.float64, device=device)
    assert gk.sample_tokens(torch.empty(0, 5, device=device), empty, empty).shape == (0,)


def test_slots_past_the_counts(device):
    gen = generator("slots")
    logits = logits_of(gen, 4, 50, "smooth", torch.float32).to(device)
    given = on(device, settings_of(gen, 4, 50) | penalties_of(gen, 4, 50))
    given["slots"] = torch.tensor([0, 4, 5, -1], device=device)
    if device == "cpu":
        with pytest.raises(IndexError, match=r"slots\[2\] = 5"):
            gk.sample_tokens(logits, **given)
        return
    out = gk.sample_tokens(logits, **given)
    torch.cuda.synchronize()
    with pytest.raises(IndexError, match="sample_tokens: slots"):
        gk.check_errors()
    given["slots"] = torch.tensor([0, 4, -1, -1], device=device)
    assert torch.equal(out, gk.sample_tokens(logits, **given))


@pytest.mark.gpu
def test_cuda_is_one_launch_and_may_be_captured():
    gen = generator("captured")
    logits = logits_of(gen, 64, 5000, "smooth", torch.float32).cuda()
    given = on("cuda", settings_of(gen, 64, 5000) | penalties_of(gen, 64, 5000))
    want = gk.sample_tokens(logits, **given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gk.sample_tokens(logits, **given)
    graph.replay()
    assert torch.equal(out, want)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        gk.sample_tokens(logits, **given)
        torch.cuda.synchronize()
    kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 1, [e.name for e in kernels]
