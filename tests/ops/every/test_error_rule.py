# SPDX-License-Identifier: BSD-3-Clause
"""assert_close_as finds errors of the size that it is there for: its bound is stated before a
result is looked at."""

import math
from functools import partial

import pytest
import torch
from attention_cases import reordered
from conftest import (
    FLOATS,
    MOST_DRAWS,
    SAMPLE,
    Lazily,
    assert_close_as,
    draws_of,
    f64,
    generator,
    ops,
    orders,
    product,
    randn,
    reference,
    shuffled,
    torch_gemm,
    yard_dtype,
)


@pytest.mark.parametrize("values", (1, 63, 64, 65, 1000, SAMPLE - 1, SAMPLE, 10 * SAMPLE))
def test_number_of_draws_is_known_beforehand(values):
    """A result that no bound admits is found wrong after draws_of(values) draws, one that is right
    after the first. One that is within a rounding needs none."""
    ref, asked = torch.ones(values, dtype=torch.float64), []

    def yards(draw):
        asked.append(draw)
        return [(ref.float() * (1 + 1e-6), ref)]

    assert_close_as(yards, ref.float(), ref)
    assert asked == []
    assert_close_as(yards, ref.float() * (1 + 1e-6), ref)
    assert asked == [0]
    asked.clear()
    with pytest.raises(AssertionError, match="max error"):
        assert_close_as(yards, 1.01 * ref.float(), ref)
    assert asked == list(range(draws_of(values)))
    assert 1 <= len(asked) <= MOST_DRAWS and (
        len(asked) == MOST_DRAWS or values * len(asked) >= SAMPLE
    )


def test_large_results_are_held_to_their_own_inputs():
    """Other inputs may make larger errors: nothing that they make excuses a tensor of SAMPLE
    values."""
    ref = torch.ones(SAMPLE, dtype=torch.float64)
    got = ref.float()
    got[7] += 1e-5

    def yards(draw):
        return [((ref * (1 + 1e-6 if draw == 0 else 1.5)).float(), ref)]

    with pytest.raises(AssertionError, match="max error 1.00"):
        assert_close_as(yards, got, ref)


def test_no_yardstick_is_asked_for_without_need():
    """The worst yardstick counts, wherever it stands. Those behind one that admits the result are
    not computed, and those before it are computed once."""
    ref, asked = torch.ones(SAMPLE, dtype=torch.float64), []

    def each():
        for error in (1e-6, 4e-6, 1.0):
            asked.append(error)
            yield (ref * (1 + error)).float()

    yards = Lazily(each())
    assert_close_as(yards, (ref * (1 + 7e-6)).float(), ref)
    assert_close_as(yards, (ref * (1 + 7e-6)).float(), ref)
    assert asked == [1e-6, 4e-6]
    few = Lazily(y for y, _ in zip(each(), range(2)))
    with pytest.raises(AssertionError, match="max error 8.9.*PyTorch makes 4.0"):
        assert_close_as(few, (ref * (1 + 9e-6)).float(), ref)


@pytest.mark.parametrize("shape", ((1, 64, 1), (5, 64, 3), (64, 64, 64)), ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_planted_error_in_gemm(dtype, shape):
    """One product of K left out in one element, as a loop that ends too early leaves it out."""
    m, k, n = shape
    gen = generator("planted", dtype, shape)
    a, b = (randn(gen, *s, dtype=dtype) for s in ((m, k), (k, n)))
    a[-1, -1] = b[-1, -1] = 1.0  # a product of ordinary size
    narrow = yard_dtype(dtype)

    def yards(draw):
        x = shuffled(gen, a, b) if draw else (a, b)
        want = reference.gemm(*f64(x), out_dtype=torch.float64)
        return [(torch_gemm(*(t.to(narrow) for t in x), order=o), want) for o in orders(gen, k)]

    out, ref = ops.gemm(a, b), product(*f64((a, b)))
    assert_close_as(yards, out, ref)
    out[-1, -1] -= 1.0
    with pytest.raises(AssertionError, match="max error"):
        assert_close_as(yards, out, ref)


@pytest.mark.parametrize("which", (0, 1), ids=("out", "lse"))
@pytest.mark.parametrize("seq_q", (1, 65))
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_planted_error_in_attention(dtype, seq_q, which):
    """The last row does not see its last key, as a bound that is one too small has it."""
    gen = generator("planted", dtype, seq_q)
    q, k, v = (randn(gen, 1, 1, s, 64, dtype=dtype) for s in (seq_q, 33, 33))
    # a score of about 2, a weight of about a tenth: one below a rounding shows nowhere
    k[:, :, -1] = 0.25 * q[:, :, -1]

    def yards(draw):
        x = shuffled(gen, q, k, v) if draw else (q, k, v)
        want = reference.flash_attn(*f64(x), return_lse=True)[which]
        return [(run[which], want) for run in reordered(*x, {})]

    got, ref = (
        ops.flash_attn_fwd(q, k, v)[which],
        reference.flash_attn(*f64((q, k, v)), return_lse=True)[which],
    )
    assert_close_as(yards, got, ref)
    got[:, :, -1] = ops.flash_attn_fwd(q[:, :, -1:], k[:, :, :-1], v[:, :, :-1])[which][:, :, 0]
    with pytest.raises(AssertionError, match="max error"):
        assert_close_as(yards, got, ref)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_planted_error_of_twice_the_bound(dtype):
    """The smallest that it promises to find in a tensor of SAMPLE values: just above the stated
    bound."""
    gen = generator("twice", dtype)
    a, b = (randn(gen, 64, 64, dtype=dtype) for _ in range(2))
    ref, narrow = product(*f64((a, b))), yard_dtype(dtype)
    yards = [torch_gemm(a.to(narrow), b.to(narrow))]
    ratio = torch.finfo(dtype).eps / torch.finfo(narrow).eps
    own = max((y.double() - ref).abs().max().item() for y in yards) * ratio
    rounding = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(ref.abs().max().item()))
    bound = (3 if dtype == torch.float64 else 2) * own + rounding
    out, at = ops.gemm(a, b).double(), ref.abs().argmin()
    for size, found in ((0.9, False), (1.2, True)):
        out.view(-1)[at] = ref.view(-1)[at] + size * bound
        check = partial(assert_close_as, lambda draw: yards, out.to(dtype), ref)
        if found:
            with pytest.raises(AssertionError, match="max error"):
                check()
        else:
            check()
