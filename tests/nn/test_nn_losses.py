# SPDX-License-Identifier: BSD-3-Clause
"""Losses over a linear head without its logits, against formulas in float64 with the logits."""

import pytest
import torch
import torch.nn.functional as F
from conftest import generator, randn
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import torch_gpukern.nn as gnn
from torch_gpukern.ops import linear_cross_entropy_chunks as chunks

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def leaf(gen, *shape, dtype, size=1.0):
    return (randn(gen, *shape, dtype=torch.float64) * size).to(dtype).requires_grad_()


def exact(*tensors):
    return [t.detach().double().requires_grad_() for t in tensors]


def assert_grads(got, want, dtype, times=1):
    for mine, theirs in zip(got, want, strict=True):
        size = float(theirs.grad.abs().max())
        off = float((mine.grad.double() - theirs.grad).abs().max())
        assert off <= times * TOLERANCE[dtype] * size, (tuple(mine.shape), off / size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("low_memory, hidden", [(True, 16), (False, 16), (False, 4)])
def test_linear_log_probs(dtype, temperature, low_memory, hidden, monkeypatch):
    """low_memory=False keeps the gradient of the logits, but not of more rows than dweight's sum
    has bytes for."""
    monkeypatch.setattr(chunks, "_MOST_BYTES", 50 * 8 * 6)
    gen = generator("log probs")
    x, w, b = (leaf(gen, *n, dtype=dtype) for n in ((3, 7, hidden), (50, hidden), (50,)))
    target = torch.randint(50, (3, 7), generator=gen)
    target[1, 2:4] = -100
    grad = randn(gen, 3, 7)
    how = {"temperature": temperature, "low_memory": low_memory}
    got = gnn.linear_log_probs(x, w, target, b, **how)
    got.backward(grad.to(got.dtype))
    ex, ew, eb = exact(x, w, b)
    logp = F.log_softmax((ex @ ew.mT + eb) / temperature, -1)
    want = logp.gather(-1, target.clamp_min(0)[..., None])[..., 0].masked_fill(target < 0, 0)
    want.backward(grad.double())
    assert got.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    torch.testing.assert_close(
        got.double(),
        want,
        rtol=1e-4 if got.dtype is torch.float32 else 1e-12,
        atol=1e-4 if got.dtype is torch.float32 else 1e-12,
    )
    assert_grads((x, w, b), (ex, ew, eb), dtype)
    if not low_memory:
        with pytest.raises(NotImplementedError, match="it is not twice differentiable"):
            again = gnn.linear_log_probs(x, w, target, b, **how).sum()
            once = torch.autograd.grad(again, w, create_graph=True)[0]
            once.sum().backward()


@pytest.mark.parametrize("hidden", [16, 3])
def test_linear_log_probs_that_keep_the_gradient_of_logits(hidden):
    gen = generator("log probs", "kept")
    made = [leaf(gen, *n, dtype=torch.float64) for n in ((7, hidden), (9, hidden), (9,))]
    target = torch.randint(9, (7,), generator=gen)
    target[3] = -100
    assert (chunks.all_rows(made[0], 7) == 7) == (hidden == 16)

    def kept(x, w, b):
        return gnn.linear_log_probs(x, w, target, b, temperature=1.3, low_memory=False)

    assert gradcheck(kept, made)
    for i in range(3):  # one gradient alone
        some = [t if j == i else t.detach() for j, t in enumerate(made)]
        one, among = (torch.autograd.grad(kept(*t).sum(), t[i])[0] for t in (some, made))
        torch.testing.assert_close(one, among, rtol=1e-12, atol=1e-14)
    compiled = torch.compile(kept, fullgraph=True, backend="aot_eager", dynamic=True)
    want = torch.autograd.grad(kept(*made).sum(), made)
    for x, y in zip(torch.autograd.grad(compiled(*made).sum(), made), want, strict=True):
        assert torch.equal(x, y)
    x = made[0].detach().half() * 1e-2
    x, w = x.requires_grad_(), made[1].detach().half().requires_grad_()
    loss = gnn.linear_log_probs(x, w, target, low_memory=False).sum() * 2.0**16
    grads = torch.autograd.grad(loss, (x, w))  # a gradient scaler's factor overflows in no product
    again = gnn.linear_log_probs(x, w, target).sum() * 2.0**16
    for g, h in zip(grads, torch.autograd.grad(again, (x, w)), strict=True):
        torch.testing.assert_close(g, h, rtol=2e-2, atol=2e-2 * float(h.abs().max()))


def divergence(own, other, beta):
    p, q = own.exp(), other.exp()
    if beta == 0:
        return (q * (other - own)).sum(-1)
    if beta == 1:
        return (p * (own - other)).sum(-1)
    m = (beta * q + (1 - beta) * p).log()
    return beta * (q * (other - m)).sum(-1) + (1 - beta) * (p * (own - m)).sum(-1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("reduction, low_memory", [("mean", False), ("sum", False), ("mean", True)])
def test_linear_kl_div(dtype, beta, reduction, low_memory, monkeypatch):
    """Over several blocks of rows; a row that does not count may hold NaN."""
    monkeypatch.setattr(chunks, "_MOST_BYTES", 50 * 8 * 6)
    gen = generator("kl")
    x, w, b = (leaf(gen, *n, dtype=dtype) for n in ((2, 13, 16), (50, 16), (50,)))
    tx, tw, tb = (leaf(gen, *n, dtype=dtype) for n in ((2, 13, 24), (50, 24), (50,)))
    target = torch.randint(50, (2, 13), generator=gen)
    target[0, 3:6] = -100
    with torch.no_grad():
        x[0, 4] = torch.nan
    how = {"beta": beta, "temperature": 1.7, "reduction": reduction, "low_memory": low_memory}
    got = gnn.linear_kl_div(x, w, tx, tw, b, tb, target=target, **how)
    got.backward()
    ex, ew, eb, etx, etw, etb = exact(x, w, b, tx, tw, tb)
    logs = (
        F.log_softmax((a.nan_to_num() @ c.mT + d) / 1.7, -1)
        for a, c, d in ((ex, ew, eb), (etx, etw, etb))
    )
    rows = divergence(*logs, beta)[target >= 0]
    want = rows.mean() if reduction == "mean" else rows.sum()
    want.backward()
    torch.testing.assert_close(
        got.double(), want.detach(), rtol=1e-4 if dtype is not torch.float64 else 1e-12, atol=0
    )
    assert tx.grad is None and tw.grad is None
    assert torch.equal(x.grad[0, 4], torch.zeros(16, dtype=dtype))
    ex.grad[0, 4] = 0
    assert_grads((x, w, b), (ex, ew, eb), dtype)


@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("teacher", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_kl_div_over_more_rows_than_are_kept(dtype, teacher, many, low_memory, monkeypatch):
    """dweight is a sum over blocks of rows. `many`: logits stand in later rows of their gradient,
    as on CUDA. The teacher may have another dtype."""
    monkeypatch.setattr(chunks, "_MOST_BYTES", 50 * 8 * 9)
    monkeypatch.setattr(chunks, "_prefers_many_rows", lambda x: many)
    gen = generator("kl", "many rows")
    x, w, b = (leaf(gen, *n, dtype=dtype) for n in ((90, 8), (50, 8), (50,)))
    tx, tw = (leaf(gen, *n, dtype=teacher) for n in ((90, 12), (50, 12)))
    assert chunks.kept_rows(x, 90) < 90
    got = gnn.linear_kl_div(x, w, tx, tw, b, beta=0.4, low_memory=low_memory)
    got.backward()
    ex, ew, eb, etx, etw = exact(x, w, b, tx, tw)
    logs = F.log_softmax(ex @ ew.mT + eb, -1), F.log_softmax(etx @ etw.mT, -1)
    want = divergence(*logs, 0.4).mean()
    want.backward()
    rough = 1e-12 if dtype is teacher is torch.float64 else 1e-4
    torch.testing.assert_close(got.double(), want.detach(), rtol=rough, atol=0)
    if teacher is not torch.float64 and dtype is torch.float64:
        dtype = torch.float32  # the teacher's logits are float32
    # with low_memory each of 23 blocks rounds the sum of dweight
    assert_grads((x, w, b), (ex, ew, eb), dtype, times=2 if low_memory else 1)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("rows, low_memory", [(4, False), (40, False), (4, True)])
def test_linear_kl_div_gradcheck(beta, rows, low_memory, monkeypatch):
    """All of dz is kept for 4 rows, a sum for 40, and with low_memory."""
    monkeypatch.setattr(chunks, "_MOST_BYTES", 5 * 8 * 14)
    gen = generator("kl", "gradcheck")
    made = [leaf(gen, *n, dtype=torch.float64) for n in ((rows, 6), (5, 6), (5,))]
    tx, tw, tb = (leaf(gen, *n, dtype=torch.float64).detach() for n in ((rows, 3), (5, 3), (5,)))
    target = torch.arange(rows) % 3 - 1
    target[target < 0] = -100
    how = {"target": target, "beta": beta, "temperature": 1.3, "low_memory": low_memory}

    def loss(x, w, b):
        return gnn.linear_kl_div(x, w, tx, tw, b, tb, **how)

    assert gradcheck(loss, made)
    for i in range(3):  # one gradient alone
        some = [t if j == i else t.detach() for j, t in enumerate(made)]
        alone, among = (torch.autograd.grad(loss(*t), t[i])[0] for t in (some, made))
        torch.testing.assert_close(alone, among, rtol=1e-10, atol=1e-14)
    plain = loss(*[t.detach() for t in made])
    torch.testing.assert_close(plain, loss(*made).detach(), rtol=1e-12, atol=0)
    with pytest.raises(NotImplementedError, match="linear_kl_div: it is not twice differentiable"):
        once = torch.autograd.grad(loss(*made), made[0], create_graph=True)[0]
        once.sum().backward()


def test_linear_kl_div_of_no_rows_and_of_none_that_count():
    x, w = torch.ones(0, 4, requires_grad=True), torch.ones(5, 4, requires_grad=True)
    total = gnn.linear_kl_div(x, w, torch.ones(0, 3), torch.ones(5, 3), reduction="sum")
    total.backward()
    assert total == 0 and x.grad.shape == (0, 4) and (w.grad == 0).all()
    x = torch.ones(3, 4, requires_grad=True)
    target = torch.full((3,), -100)
    mean = gnn.linear_kl_div(x, w, torch.ones(3, 3), torch.ones(5, 3), target=target)
    assert mean.isnan()
    assert all((g == 0).all() for g in torch.autograd.grad(mean, (x, w)))


def test_linear_kl_div_under_autocast():
    gen = generator("kl", "autocast")
    x, w = leaf(gen, 7, 16, dtype=torch.float32), leaf(gen, 30, 16, dtype=torch.float32)
    tx, tw = leaf(gen, 7, 16, dtype=torch.float32), leaf(gen, 30, 16, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = gnn.linear_kl_div(x, w, tx, tw)
    assert got.dtype is torch.float32
    grads = torch.autograd.grad(got, (x, w))
    assert all(g.dtype is torch.float32 for g in grads)
    short = [t.detach().bfloat16().requires_grad_() for t in (x, w, tx, tw)]
    want = gnn.linear_kl_div(*short)
    assert torch.equal(got, want)
    for g, h in zip(grads, torch.autograd.grad(want, short[:2]), strict=True):
        assert torch.equal(g, h.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [40, 700])
def test_losses_on_every_device(dtype, rows, device):
    """700 rows are more than are kept, and their logits stand in their gradient's later rows. An
    error is at most twice that of the formulas with logits of the same dtype."""
    gen = generator("losses", "device", rows)
    made = [leaf(gen, *n, dtype=dtype) for n in ((rows, 48), (1000, 48), (rows, 64), (1000, 64))]
    x, w, tx, tw = (t.detach().to(device) for t in made)
    x, w = x * 0.5, w * 0.5
    target = torch.randint(1000, (rows,), generator=gen).to(device)
    target[5:9] = -100
    kept = target >= 0

    def formula(x, w, tx, tw, loss):
        own = F.log_softmax((x @ w.mT).to(torch.promote_types(x.dtype, torch.float32)), -1)
        if loss == "log probs":
            return own.gather(-1, target.clamp_min(0)[:, None])[:, 0][kept].sum()
        other = F.log_softmax((tx @ tw.mT).to(own.dtype), -1)
        return divergence(own, other, float(loss))[kept].mean()

    def ours(x, w, tx, tw, loss, low_memory):
        if loss == "log probs":
            return gnn.linear_log_probs(x, w, target, low_memory=low_memory).sum()
        how = {"target": target, "beta": float(loss), "low_memory": low_memory}
        return gnn.linear_kl_div(x, w, tx, tw, **how)

    def differentiated(call, *given):
        x, w, *rest = given
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        return torch.autograd.grad(call(*leaves, *rest), leaves)

    for loss in ("0", "0.5", "1", "log probs"):
        wide = [t.double() for t in (x, w, tx, tw)]
        want = differentiated(lambda *g, loss=loss: formula(*g, loss), *wide)
        theirs = differentiated(lambda *g, loss=loss: formula(*g, loss), x, w, tx, tw)
        for low_memory in (False, True):
            got = differentiated(
                lambda *g, loss=loss, low=low_memory: ours(*g, loss, low), x, w, tx, tw
            )
            for mine, other, exactly in zip(got, theirs, want, strict=True):
                size = float(exactly.abs().max())
                off, allowed = (float((t.double() - exactly).abs().max()) for t in (mine, other))
                slack = 0.1 if dtype.itemsize == 2 else 1
                assert off <= 2 * allowed + slack * TOLERANCE[dtype] * size, (loss, low_memory)


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that an op makes."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return result


def test_no_logits_in_memory(monkeypatch):
    monkeypatch.setattr(chunks, "_MOST_BYTES", 1 << 17)
    gen = generator("memory")
    x, w = leaf(gen, 2048, 8, dtype=torch.float32), leaf(gen, 512, 8, dtype=torch.float32)
    logits = 2048 * 512 * 4
    with Largest() as seen:
        gnn.linear_kl_div(x, w, x.detach(), w.detach() * 2).backward()
    assert seen.bytes < logits / 8


def logps(x, w, target):
    return F.log_softmax(x @ w.mT, -1).gather(-1, target.clamp_min(0)[..., None])[..., 0] * (
        target >= 0
    )


@pytest.mark.parametrize("low_memory", [True, False])
@pytest.mark.parametrize("kind", ["sigmoid", "robust", "hinge", "ipo"])
def test_linear_dpo_loss(kind, low_memory):
    gen = generator("dpo")
    x, w = leaf(gen, 6, 9, 16, dtype=torch.float32), leaf(gen, 40, 16, dtype=torch.float32)
    rx, rw = leaf(gen, 6, 9, 16, dtype=torch.float32), leaf(gen, 40, 16, dtype=torch.float32)
    target = torch.randint(40, (6, 9), generator=gen)
    target[:, :2] = -100
    smooth = 0.1 if kind in ("sigmoid", "robust") else 0.0
    how = {
        "beta": 0.3,
        "label_smoothing": smooth,
        "loss_type": kind,
        "average_log_prob": kind == "ipo",
        "low_memory": low_memory,
    }
    got = gnn.linear_dpo_loss(x, w, target, rx, rw, **how)
    got.loss.backward()
    ex, ew, erx, erw = exact(x, w, rx, rw)
    own, ref = (
        logps(a, b, target).sum(1) / (7 if kind == "ipo" else 1) for a, b in ((ex, ew), (erx, erw))
    )
    margin = (own[:3] - ref[:3]) - (own[3:] - ref[3:])
    up, down = -F.softplus(-0.3 * margin), -F.softplus(0.3 * margin)
    want = {
        "sigmoid": -0.9 * up - 0.1 * down,
        "robust": (-0.9 * up + 0.1 * down) / 0.8,
        "hinge": (1 - 0.3 * margin).clamp_min(0),
        "ipo": (margin - 1 / 0.6) ** 2,
    }[kind].mean()
    want.backward()
    torch.testing.assert_close(got.loss.double(), want.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        got.chosen_rewards.double(), 0.3 * (own - ref)[:3].detach(), rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(
        got.rejected_rewards.double(), 0.3 * (own - ref)[3:].detach(), rtol=1e-4, atol=1e-4
    )
    assert rx.grad is None and rw.grad is None
    if want.detach() != 0:
        assert_grads((x, w), (ex, ew), torch.float16)


@pytest.mark.parametrize("kind", ["grpo", "bnpo", "dr_grpo"])
def test_grpo_loss(kind):
    gen = generator("grpo")
    x, w = leaf(gen, 4, 9, 16, dtype=torch.float32), leaf(gen, 40, 16, dtype=torch.float32)
    target = torch.randint(40, (4, 9), generator=gen)
    mask = torch.arange(9) < torch.tensor([9, 4, 1, 0])[:, None]
    old, ref = (logps(x, w, target).detach() + 0.3 * randn(gen, 4, 9) for _ in range(2))
    old[~mask] = -torch.inf
    advantages = randn(gen, 4)
    how = {
        "old_log_probs": old,
        "ref_log_probs": ref,
        "beta": 0.04,
        "epsilon_high": 0.28,
        "loss_type": kind,
    }
    got = gnn.grpo_loss(gnn.linear_log_probs(x, w, target), advantages, mask, **how)
    got.backward()
    ex, ew = exact(x, w)
    own, total, tokens = logps(ex, ew, target), 0.0, 0
    for i, row in enumerate(mask.tolist()):
        each = []
        for j, seen in enumerate(row):
            if seen:
                r, a = (own[i, j] - old[i, j].double()).exp(), advantages[i].double()
                clipped = r.clamp(0.8, 1.28)
                away = ref[i, j].double() - own[i, j]
                each.append(-torch.minimum(r * a, clipped * a) + 0.04 * (away.exp() - away - 1))
        if each:
            whole = torch.stack(each)
            total = total + (whole.mean() if kind == "grpo" else whole.sum())
            tokens += len(each)
    want = total / {"grpo": 4, "bnpo": tokens, "dr_grpo": 36}[kind]
    want.backward()
    torch.testing.assert_close(got.double(), want.detach(), rtol=1e-4, atol=1e-6)
    assert_grads((x, w), (ex, ew), torch.float16)
    first = gnn.grpo_loss(gnn.linear_log_probs(x, w, target), advantages, mask)
    assert torch.isfinite(first)


@pytest.mark.parametrize("masked", [False, True])
def test_losses_of_routers(masked):
    """transformers' own function is the second judge."""
    gen = generator("routers")
    layers = [leaf(gen, 2 * 5, 6, dtype=torch.float32) for _ in range(3)]
    mask = torch.ones(2, 5, dtype=torch.int64)
    mask[1, 3:] = 0
    given = mask if masked else None
    got = gnn.load_balancing_loss(layers, 2, given)
    z = gnn.router_z_loss(layers, given)
    (got + z).backward()
    other = exact(*layers)
    kept = mask.reshape(-1).repeat(3).double() if masked else torch.ones(30, dtype=torch.float64)
    logits = torch.cat(other)
    p = logits.softmax(-1) * kept[:, None]
    f = torch.zeros(6, dtype=torch.float64)
    for row, chosen in enumerate(logits.topk(2).indices.tolist()):
        for e in chosen:
            f[e] += kept[row]
    want = 6 * (f / kept.sum() * p.sum(0) / kept.sum()).sum()
    want_z = (logits.exp().sum(-1).log() ** 2 * kept).sum() / kept.sum()
    (want + want_z).backward()
    torch.testing.assert_close(got.double(), want.detach(), rtol=1e-5, atol=0)
    torch.testing.assert_close(z.double(), want_z.detach(), rtol=1e-5, atol=0)
    assert_grads(layers, other, torch.float32)
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    theirs = mixtral.load_balancing_loss_func(tuple(layers), 6, 2, given)
    torch.testing.assert_close(got, theirs, rtol=1e-5, atol=0)


def test_one_graph():
    gen = generator("compiled losses")
    x, w = leaf(gen, 4, 6, 16, dtype=torch.float32), leaf(gen, 40, 16, dtype=torch.float32)
    target = torch.randint(40, (4, 6), generator=gen)

    def every(x, w):
        logp = gnn.linear_log_probs(x, w, target)
        return (
            gnn.linear_kl_div(x, w, x.detach() * 2, w.detach(), target=target, beta=0.5)
            + gnn.linear_kl_div(x, w, x.detach() * 2, w.detach(), low_memory=True)
            + gnn.linear_dpo_loss(x, w, target, x.detach(), w.detach()).loss
            + gnn.grpo_loss(logp, x[:, 0, 0].detach(), target > 3)
            + gnn.load_balancing_loss(x, 2)
            + gnn.router_z_loss(x)
        )

    want = torch.autograd.grad(every(x, w), (x, w))
    torch._dynamo.reset()
    got = torch.autograd.grad(
        torch.compile(every, fullgraph=True, backend="aot_eager")(x, w), (x, w)
    )
    torch.testing.assert_close(got, want)


def test_refusals():
    x, w, t = torch.ones(2, 3, 4), torch.ones(5, 4), torch.zeros(2, 3, dtype=torch.int64)
    for call, text in (
        (
            lambda: gnn.linear_log_probs(x, w, t, temperature=0.0),
            "linear_log_probs: temperature must be positive and finite, got 0.0",
        ),
        (
            lambda: gnn.linear_kl_div(x, w, x, w, beta=1.5),
            "linear_kl_div: beta must be between 0 and 1, got 1.5",
        ),
        (
            lambda: gnn.linear_kl_div(x, w, x[:1], w),
            r"linear_kl_div: teacher_x must have x's tokens \[2, 3\], got \[1, 3\]",
        ),
        (
            lambda: gnn.linear_kl_div(x, w, x, w[:4]),
            "linear_kl_div: teacher_weight must have weight's 5 classes, got 4",
        ),
        (
            lambda: gnn.linear_kl_div(x, w, x, w, reduction="none"),
            "linear_kl_div: reduction must be mean or sum, got 'none'",
        ),
        (
            lambda: gnn.linear_dpo_loss(x[:1], w, t[:1], x[:1], w),
            r"linear_dpo_loss: x must be \[2 B, S, H\]",
        ),
        (
            lambda: gnn.dpo_loss(*4 * [torch.zeros(2)], loss_type="other"),
            "dpo_loss: loss_type must be sigmoid, robust, hinge or ipo, got 'other'",
        ),
        (
            lambda: gnn.dpo_loss(*4 * [torch.zeros(2)], label_smoothing=0.5),
            "dpo_loss: label_smoothing must be at least 0 and below 0.5",
        ),
        (
            lambda: gnn.grpo_loss(torch.zeros(2, 3), torch.zeros(2), t, beta=0.1),
            "grpo_loss: beta is 0.1; ref_log_probs must be given",
        ),
        (
            lambda: gnn.grpo_loss(torch.zeros(2, 3), torch.zeros(2), t, loss_type="x"),
            "grpo_loss: loss_type must be grpo, bnpo or dr_grpo, got 'x'",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{text}"):
            call()


@pytest.mark.parametrize("low_memory", (False, True))
def test_divergence_of_no_tokens(low_memory):
    x, weight = torch.randn(0, 8), torch.randn(5, 8, requires_grad=True)
    teacher = weight.detach()
    how = dict(low_memory=low_memory, reduction="sum")
    loss = gnn.linear_kl_div(x, weight, x, teacher, **how)
    assert loss == 0 and (torch.autograd.grad(loss, weight)[0] == 0).all()


@pytest.mark.parametrize(
    "target", (torch.zeros(6, 2).long(), torch.zeros(2, 6), torch.zeros(3).long())
)
def test_divergence_refuses_targets_of_other_tokens(target):
    x, weight = torch.randn(2, 6, 8), torch.randn(5, 8)
    with pytest.raises(ValueError, match="target must be integers of shape"):
        gnn.linear_kl_div(x, weight, x, weight, target=target)


def test_losses_compile_with_dynamic_lengths():
    weight, teacher = torch.randn(5, 8), torch.randn(5, 8)
    torch._dynamo.reset()
    call = torch.compile(
        lambda x, t: (
            gnn.linear_kl_div(x, weight, x, teacher, temperature=1.5)
            + gnn.linear_log_probs(x, weight, t, temperature=1.5).sum()
        ),
        fullgraph=True,
        dynamic=True,
        backend="aot_eager",
    )
    for n in (3, 7):
        x, t = torch.randn(n, 8), torch.randint(0, 5, (n,))
        want = gnn.linear_kl_div(x, weight, x, teacher, temperature=1.5)
        want = want + gnn.linear_log_probs(x, weight, t, temperature=1.5).sum()
        torch.testing.assert_close(call(x, t), want)


@pytest.mark.parametrize("size", (3, 4))
def test_preference_and_policy_losses_refuse_shapes_that_would_be_broadcast(size):
    """With B = S even advantages of each token gave a number: the sum over B B S terms."""
    one = torch.zeros(3)
    with pytest.raises(ValueError, match=r"dpo_loss: rejected must have shape \[3\], got \[3, 1\]"):
        gnn.dpo_loss(one, one[:, None], one, one)
    logs = torch.zeros(3, size)
    for advantages in (torch.zeros(3, size), torch.zeros(3, 1), torch.zeros(size + 1)):
        with pytest.raises(ValueError, match=r"log_probs must be \[B, S\] and advantages \[B\]"):
            gnn.grpo_loss(logs, advantages, torch.ones(3, size), loss_type="bnpo")
    with pytest.raises(ValueError, match="mask must have shape"):
        gnn.grpo_loss(logs, one, torch.ones(size), loss_type="bnpo")
    with pytest.raises(ValueError, match="ref_log_probs must have shape"):
        gnn.grpo_loss(logs, one, torch.ones(3, size), ref_log_probs=logs[:1], beta=0.1)
    for top_k in (0, 5):
        with pytest.raises(ValueError, match="top_k must be 1 to the number of experts 4"):
            gnn.load_balancing_loss(torch.zeros(3, 4), top_k)
