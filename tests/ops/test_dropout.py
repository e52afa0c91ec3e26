# SPDX-License-Identifier: BSD-3-Clause
"""Dropout: the mask is computed here with Python integers, values and gradients by PyTorch's
functions with that mask."""

import pytest
import torch
import torch.nn.functional as F
from conftest import generator, randn, same_bits
from torch.autograd import gradcheck

import torch_gpukern as gk

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
UNIT = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float64: 2**-53}


def philox(seed: int, offset: int, index: int) -> list[int]:
    """Philox4x32-10 as in its paper."""
    c, k = (
        [index & 0xFFFFFFFF, index >> 32, offset & 0xFFFFFFFF, offset >> 32],
        [seed & 0xFFFFFFFF, seed >> 32],
    )
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def stated_mask(n: int, p: float, seed: torch.Tensor) -> torch.Tensor:
    s, o = (int(x) & 2**64 - 1 for x in seed)
    words = [w for i in range((n + 3) // 4) for w in philox(s, o, i)][:n]
    return torch.tensor([w < int((1 - p) * 2**32 + 0.5) for w in words], dtype=torch.bool)


def seed_of(*values, device="cpu"):
    return torch.tensor(values, dtype=torch.int64, device=device)


def test_the_generator_is_philox():
    """The known answers of the authors' library, Random123."""
    assert philox(0, 0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 2**64 - 1
    assert philox(ones, ones, ones) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.parametrize(
    "shape", ((1,), (3,), (64,), (257,), (5, 7), (3, 8), (2, 3, 40), (2, 1031))
)
def test_mask(shape, device):
    seed = seed_of(-(2**62) + 12345, 2**40 + 7, device=device)
    n = torch.Size(shape).numel()
    for p in (0.0, 0.1, 0.5, 1.0):
        assert torch.equal(gk.dropout_mask(shape, p, seed).cpu().flatten(), stated_mask(n, p, seed))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", (1, 5, 8, 100, 264, 1000))
def test_values_and_gradients(n, dtype, device):
    gen = generator("dropout", n, str(dtype))
    x, r, g = (randn(gen, 6, n, dtype=dtype, device=device) for _ in range(3))
    b, seed, p = randn(gen, n, dtype=dtype, device=device), seed_of(1, 2, device=device), 0.25
    keep = gk.dropout_mask((6, n), p, seed)
    wide = torch.float64  # in float32 the slope of F.gelu's tanh is off by up to 18 units by itself

    def dropped(y):
        return torch.where(keep, y.to(wide) * (1 / (1 - p)), 0)

    cases = {
        "dropout": (lambda x, r, b: gk.dropout(x, p, seed), lambda x, r, b: dropped(x)),
        "add": (
            lambda x, r, b: gk.dropout_add(x, r, p, seed),
            lambda x, r, b: dropped(x) + r.to(wide),
        ),
        "gelu": (
            lambda x, r, b: gk.bias_gelu_dropout(x, b, p, seed),
            lambda x, r, b: dropped(F.gelu(x.to(wide) + b.to(wide))),
        ),
        "tanh": (
            lambda x, r, b: gk.bias_gelu_dropout(x, b, p, seed, approximate="tanh"),
            lambda x, r, b: dropped(F.gelu(x.to(wide) + b.to(wide), approximate="tanh")),
        ),
        "no bias": (
            lambda x, r, b: gk.bias_gelu_dropout(x, None, p, seed),
            lambda x, r, b: dropped(F.gelu(x.to(wide))),
        ),
    }
    for name, (ours, theirs) in cases.items():
        leaves = [y.detach().clone().requires_grad_() for y in (x, r, b)]
        got, want = ours(*leaves), theirs(*leaves)
        grads = torch.autograd.grad(got, leaves, g, allow_unused=True)
        expected = torch.autograd.grad(want, leaves, g.to(wide), allow_unused=True)
        for y, z in zip((got, *grads), (want, *expected), strict=True):
            if z is None:
                assert y is None or not y.any(), name
                continue
            error = (y.double() - z.double()).abs().max() / z.double().abs().max().clamp(min=1)
            assert y.dtype == dtype and error <= 8 * UNIT[dtype], f"{name}: {error}"
        assert (got[~keep] == (r[~keep] if name == "add" else 0)).all()


def test_ends(device):
    x = torch.tensor([[1.0, float("nan"), float("inf"), -2.0, 0.0]], device=device)
    seed = seed_of(5, 6, device=device)
    assert torch.equal(gk.dropout(x, 0.0, seed).nan_to_num(7), x.nan_to_num(7))
    assert same_bits(gk.dropout(x, 1.0, seed), torch.zeros_like(x))
    assert gk.dropout(torch.tensor(2.0, device=device), 0.0).item() == 2.0
    assert gk.dropout(x[:, :0], 0.5).shape == (1, 0)
    dropped = gk.dropout(x.expand(100, 5), 0.5, seed)
    assert (dropped[~gk.dropout_mask((100, 5), 0.5, seed)] == 0).all()  # NaN too


def test_strides(device):
    """The mask depends on the shape, not on strides. Results may be views inside other tensors."""
    gen, seed = generator("dropout strides"), seed_of(3, 4, device=device)
    x = randn(gen, 4, 6, 16, device=device)
    want = gk.dropout(x.contiguous(), 0.3, seed)
    for other in (
        x.transpose(0, 1).contiguous().transpose(0, 1),
        x.mT.contiguous().mT,
        torch.stack((x, x), -1)[..., 0],
    ):
        assert torch.equal(gk.dropout(other, 0.3, seed), want)
    assert torch.equal(gk.dropout(torch.cat((x, x), -1)[..., :16], 0.3, seed), want)
    # not at a multiple of 16 bytes
    odd = torch.cat((x.flatten(), x.flatten()))[1:385].view(4, 6, 16)
    assert torch.equal(gk.dropout_mask((4, 6, 16), 0.3, seed), gk.dropout(odd, 0.3, seed) != 0)


def test_as_many_as_asked(device):
    """The share of kept elements, and the correlation with neighbours and with another offset's
    mask, are within 5 standard deviations."""
    n, p = 1 << 20, 0.1
    a, b = (
        gk.dropout_mask((n,), p, seed_of(11, o, device=device)).double() - (1 - p) for o in (0, 1)
    )
    deviation = (p * (1 - p)) ** 0.5
    assert abs(a.mean()) < 5 * deviation / n**0.5
    for other in (b, a.roll(1), a.roll(4), a.roll(256)):
        assert abs((a * other).mean()) < 5 * deviation**2 / n**0.5


def test_seed_of_the_generator(device):
    x = torch.ones(1000, device=device)
    torch.manual_seed(3)
    first, second = gk.dropout(x, 0.5), gk.dropout(x, 0.5)
    torch.manual_seed(3)
    assert torch.equal(gk.dropout(x, 0.5), first) and not torch.equal(first, second)


@pytest.mark.parametrize("p", (0, 0.0))
def test_no_dropout_draws_no_seed(p, device):
    """As in F.dropout, the generator does not advance, and vmap sees no random operation."""
    x = torch.randn(4, 5, device=device)
    calls = (
        (lambda x: gk.dropout(x, p), x),
        (lambda x: gk.dropout_add(x, 2 * x, p), 3 * x),
        (lambda x: gk.bias_gelu_dropout(x, None, p), torch.nn.functional.gelu(x)),
    )
    for call, want in calls:
        state = torch.get_rng_state(), device == "cuda" and torch.cuda.get_rng_state()
        torch.testing.assert_close(call(x), want)
        torch.testing.assert_close(torch.vmap(call)(x), want)
        assert torch.equal(torch.get_rng_state(), state[0])
        assert device != "cuda" or torch.equal(torch.cuda.get_rng_state(), state[1])


@pytest.mark.parametrize("p", (0, 0.0))
def test_no_dropout_draws_no_seed_in_a_graph(p):
    """As in F.dropout. vmap inside of a compiled function raised an error at the draw."""
    x = torch.randn(4, 5)
    calls = (
        lambda x: gk.dropout(x, p),
        lambda x: gk.dropout_add(x, 2 * x, p),
        lambda x: gk.bias_gelu_dropout(x, None, p),
    )
    for call in calls:
        torch._dynamo.reset()
        want, state = call(x), torch.get_rng_state()
        for way in (call, torch.vmap(call)):
            torch.testing.assert_close(torch.compile(way, backend="aot_eager")(x), want)
        assert torch.equal(torch.get_rng_state(), state)


def test_gradcheck(device):
    gen, seed = generator("dropout gradcheck"), seed_of(8, 9, device=device)
    x, r = (randn(gen, 3, 5, dtype=torch.float64, device=device).requires_grad_() for _ in range(2))
    b = randn(gen, 5, dtype=torch.float64, device=device).requires_grad_()
    assert gradcheck(lambda x: gk.dropout(x, 0.4, seed), (x,))
    assert gradcheck(lambda x, r: gk.dropout_add(x, r, 0.4, seed), (x, r))
    assert torch.autograd.gradgradcheck(lambda x, r: gk.dropout_add(x, r, 0.4, seed), (x, r))
    for how in ("none", "tanh"):
        assert gradcheck(
            lambda x, b, how=how: gk.bias_gelu_dropout(x, b, 0.4, seed, approximate=how), (x, b)
        )


@pytest.mark.gpu
def test_one_mask_on_both_devices():
    for shape in ((3, 5), (128, 4096), (7, 4099)):
        seed = seed_of(21, 22)
        x = torch.randn(shape)
        on = gk.dropout(x.cuda(), 0.3, seed.cuda())
        assert torch.equal(on.cpu(), gk.dropout(x, 0.3, seed))
        assert torch.equal(
            gk.dropout(x.cuda().bfloat16(), 0.3, seed.cuda()).cpu() != 0,
            gk.dropout_mask(shape, 0.3, seed) & (x.bfloat16() != 0),
        )


@pytest.mark.gpu
def test_a_captured_graph_reads_the_seed():
    x, seed = torch.randn(64, 1024, device="cuda"), seed_of(1, 2, device="cuda")
    gk.dropout(x, 0.5, seed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gk.dropout(x, 0.5, seed)
    for numbers in ((1, 2), (1, 3), (7, 7)):
        seed.copy_(seed_of(*numbers))
        graph.replay()
        assert same_bits(out, gk.dropout(x, 0.5, seed_of(*numbers, device="cuda")))
