# SPDX-License-Identifier: BSD-3-Clause
"""kl_div: the divergence of student's and teacher's logits and its gradient, against formulas in
float64. An error is at most twice that of the same formulas in the dtype's own float32, plus one
rounding."""

import math

import pytest
import torch
from conftest import generator, randn, run_python
from torch.autograd import gradcheck

import torch_gpukern as gk

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
UNIT = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float64: 2**-53}
BETAS = (0.0, 0.3, 1.0)
# for every cluster of the CUDA kernels and the CPU's block sums; whole vectors and others
COLUMNS = (
    1,
    2,
    7,
    8,
    100,
    1000,
    1032,
    4104,
    8192,
    12000,
    12288,
    20000,
    32000,
    40001,
    65544,
    128256,
)


def formulas(z, teacher, beta, temperature):
    """(loss, gradient by z) of rows whose logits are finite, in their dtype."""
    s, t = (x / temperature for x in (z, teacher))
    s, t = s.log_softmax(-1), t.log_softmax(-1)
    p, q = s.exp(), t.exp()
    if beta == 0:
        return (q * (t - s)).sum(-1), (p - q) / temperature
    if beta == 1:
        loss = (p * (s - t)).sum(-1)
        return loss, p * (s - t - loss[..., None]) / temperature
    m = (beta * q + (1 - beta) * p).log()
    loss = beta * (q * (t - m)).sum(-1) + (1 - beta) * (p * (s - m)).sum(-1)
    slope = (1 - beta) * (s - m)
    return loss, p * (slope - (p * slope).sum(-1, keepdim=True)) / temperature


def near(name, got, theirs, want, size):
    scale = want.abs().max().clamp(min=size)
    error, allowed = (got.double() - want).abs().max(), 2 * (theirs.double() - want).abs().max()
    slack = 1024 if got.dtype is torch.float64 else 8 if got.dtype is torch.float32 else 2
    assert error <= allowed + slack * UNIT[got.dtype] * scale, (
        f"{name}: {error:.3g}, allowed {allowed:.3g} + {slack * UNIT[got.dtype] * scale:.3g}"
    )


def drawn(gen, n, dtype, device, rows=(2, 3)):
    student = 2 * randn(gen, *rows, n, dtype=torch.float64, device=device)
    teacher = 0.7 * student + randn(gen, *rows, n, dtype=torch.float64, device=device)
    return student.to(dtype), teacher.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", COLUMNS)
@pytest.mark.parametrize("beta", BETAS)
def test_kl_div(n, dtype, beta, device):
    if n > 40001 and dtype is torch.float64:
        pytest.skip("one way for every length")
    student, teacher = drawn(generator("kl_div", n), n, dtype, device)
    student.requires_grad_()
    wide = torch.promote_types(dtype, torch.float32)
    for temperature in (1.0, 1.7):
        got = gk.kl_div(student, teacher, beta=beta, temperature=temperature)
        assert got.dtype is wide and got.shape == (2, 3)
        grad = torch.autograd.grad(got.sum(), student)[0]
        assert grad.dtype is dtype
        how = beta, temperature
        want, want_grad = formulas(student.detach().double(), teacher.double(), *how)
        theirs, their_grad = formulas(student.detach().to(wide), teacher.to(wide), *how)
        near("loss", got.detach(), theirs, want, float(student.detach().abs().max()))
        near("gradient", grad, their_grad.to(dtype), want_grad, 1 / n)
        alone = gk.kl_div(student.detach(), teacher, beta=beta, temperature=temperature)
        assert torch.equal(alone, got.detach())


@pytest.mark.parametrize("n", (7, 1000, 20000, 40001, 128256))
@pytest.mark.parametrize("beta", BETAS)
def test_written_over_the_logits_and_in_16_bits(n, beta, device):
    gen = generator("kl_div", "in place", n)
    student, teacher = drawn(gen, n, torch.float32, device, rows=(5,))
    want, want_grad = torch.ops.gpukern.kl_div_fwd(student, teacher, None, beta, 1.3)
    for dtype in (torch.bfloat16, torch.float16):
        loss, out = torch.empty_like(want), torch.full_like(student, math.nan, dtype=dtype)
        torch.ops.gpukern.kl_div_grad(student, teacher, loss, out, None, beta, 1.3)
        assert torch.equal(loss, want) and torch.equal(out, want_grad.to(dtype))
        narrow, narrow_teacher = student.to(dtype), teacher.to(dtype)
        exact, exact_grad = torch.ops.gpukern.kl_div_fwd(narrow, narrow_teacher, None, beta, 1.3)
        torch.ops.gpukern.kl_div_grad(narrow, narrow_teacher, loss, narrow, None, beta, 1.3)
        assert torch.equal(loss, exact) and torch.equal(narrow, exact_grad)
    torch.ops.gpukern.kl_div_grad(student, teacher, loss, student, None, beta, 1.3)
    assert torch.equal(loss, want) and torch.equal(student, want_grad)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", (7, 1000, 20000, 40001))
@pytest.mark.parametrize("beta", BETAS)
def test_masked_rows_are_not_read(n, dtype, beta, device):
    student, teacher = drawn(generator("kl_div", "mask", n), n, dtype, device, rows=(6,))
    mask = torch.tensor([1, 0, 1, 1, 0, 0], device=device).bool()
    want = gk.kl_div(student, teacher, beta=beta)
    student[1], teacher[4], student[5] = math.nan, math.nan, math.inf
    student.requires_grad_()
    got = gk.kl_div(student, teacher, mask=mask, beta=beta)
    grad = torch.autograd.grad(got.sum(), student)[0]
    assert torch.equal(got[mask], want[mask]) and (got[~mask] == 0).all()
    assert (grad[~mask] == 0).all() and grad.isfinite().all() and (grad[mask] != 0).any()
    strided = torch.stack((mask, ~mask), 1)[:, 0]
    assert torch.equal(got, gk.kl_div(student, teacher, mask=strided, beta=beta))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", (40, 4104, 40000))
@pytest.mark.parametrize("beta", BETAS)
def test_classes_without_probability(n, dtype, beta, device):
    """-inf on both sides adds nothing. Where only the teacher excludes a class, KL(T || S) is
    finite; where only the student does, KL(S || T)."""
    student, teacher = drawn(generator("kl_div", "inf", n), n, dtype, device, rows=(4,))
    none = torch.arange(n, device=device) % 3 == 1
    none[: n // 2] = True  # whole vectors and blocks of columns
    student[:, none], teacher[:, none] = -math.inf, -math.inf
    kept = [x[:, ~none] for x in (student, teacher)]
    want, want_grad = torch.ops.gpukern.kl_div_fwd(*kept, None, beta, 1.0)
    loss, grad = torch.ops.gpukern.kl_div_fwd(student, teacher, None, beta, 1.0)
    close = {"rtol": 1e-5, "atol": 1e-5 if dtype is not torch.float64 else 1e-12}
    torch.testing.assert_close(loss, want, **close)
    rough = 2 * UNIT[dtype] + (1e-5 if dtype is not torch.float64 else 0)
    torch.testing.assert_close(grad[:, ~none], want_grad, rtol=rough, atol=1e-6)
    assert (grad[:, none] == 0).all()
    one = int((~none).nonzero()[0])
    (teacher if beta == 0 else student)[:, one] = -math.inf
    loss, grad = torch.ops.gpukern.kl_div_fwd(student, teacher, None, beta, 1.0)
    assert loss.isfinite().all() and grad.isfinite().all()
    exact = [x.double()[:, ~none] for x in (student, teacher)]
    want = gk.reference.kl_div(*exact, beta=beta)
    torch.testing.assert_close(loss.double(), want, rtol=1e-4, atol=1e-5)
    if 0 < beta < 1:  # and the other way round
        loss, grad = torch.ops.gpukern.kl_div_fwd(teacher, student, None, beta, 1.0)
        assert loss.isfinite().all() and grad.isfinite().all()
        torch.testing.assert_close(
            loss.double(), gk.reference.kl_div(*exact[::-1], beta=beta), rtol=1e-4, atol=1e-5
        )


LEAST = "the dtype's lowest number"


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64), ids=str)
@pytest.mark.parametrize("n", (1024, 5000, 40000))
@pytest.mark.parametrize("from_end", (True, False))
@pytest.mark.parametrize(
    "student_has, teacher_has, beta",
    [
        (-math.inf, -1e4, 0.0),
        (-1e4, -math.inf, 1.0),
        (LEAST, LEAST, 0.0),
        (LEAST, LEAST, 0.3),
        (LEAST, LEAST, 1.0),
    ],
)
def test_masked_columns_of_a_part(student_has, teacher_has, beta, from_end, n, dtype, device):
    """Columns of a thread, a block or a part of a cluster that have no weight beside the whole row:
    their differences, which may be infinite, count nothing."""
    student, teacher = drawn(generator("kl_div", "part", n), n, dtype, device, rows=(3,))
    count = n // 3 // 8 * 8
    for masked in (8, count):
        hidden = slice(n - masked, n) if from_end else slice(0, masked)
        kept = torch.ones(n, dtype=torch.bool, device=device)
        kept[hidden] = False
        x, y = student.clone(), teacher.clone()
        x[:, hidden] = torch.finfo(dtype).min if student_has is LEAST else student_has
        y[:, hidden] = torch.finfo(dtype).min if teacher_has is LEAST else teacher_has
        loss, grad = torch.ops.gpukern.kl_div_fwd(x, y, None, beta, 1.0)
        want, want_grad = formulas(x[:, kept].double(), y[:, kept].double(), beta, 1.0)
        exact = dtype is torch.float64
        torch.testing.assert_close(loss.double(), want, rtol=1e-4, atol=1e-10 if exact else 1e-5)
        torch.testing.assert_close(
            grad[:, kept].double(), want_grad, rtol=2 * UNIT[dtype] + 1e-4, atol=1e-6
        )
        assert (grad[:, ~kept] == 0).all()


@pytest.mark.parametrize("beta", BETAS)
def test_nan_and_distant_logits(beta, device):
    for n in (40, 4104, 40000):
        student, teacher = drawn(generator("kl_div", "nan", n), n, torch.float32, device, rows=(4,))
        student[0, n // 3] = math.nan
        teacher[2, n - 1] = math.nan
        loss, grad = torch.ops.gpukern.kl_div_fwd(student, teacher, None, beta, 1.0)
        assert loss[[0, 2]].isnan().all() and loss[[1, 3]].isfinite().all()
        assert grad[[1, 3]].isfinite().all() and grad[[0, 2]].isnan().any(-1).all()
        # a shift of all logits of a row changes nothing, and distant classes have no weight
        student, teacher = drawn(generator("kl_div", "far", n), n, torch.float32, device, rows=(4,))
        student[:, 1::2] -= 300
        teacher[:, 1::2] -= 300
        want, want_grad = formulas(student.double()[:, ::2], teacher.double()[:, ::2], beta, 1.0)
        loss, grad = torch.ops.gpukern.kl_div_fwd(student + 500, teacher - 200, None, beta, 1.0)
        torch.testing.assert_close(loss.double(), want, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(grad[:, ::2].double(), want_grad, rtol=1e-2, atol=1e-5)


def test_equal_rows_have_no_divergence(device):
    for n in (8, 1000, 40000):
        z = randn(generator("kl_div", "equal", n), 3, n, device=device)
        for beta in BETAS:
            loss, grad = torch.ops.gpukern.kl_div_fwd(z, z.clone(), None, beta, 1.0)
            assert loss.abs().max() < 1e-6 and grad.abs().max() < 1e-6


@pytest.mark.parametrize("beta", BETAS)
def test_gradcheck(beta, device):
    gen = generator("kl_div", "gradcheck")
    student, teacher = drawn(gen, 9, torch.float64, device)
    student.requires_grad_()
    mask = torch.tensor([[1, 0, 1], [1, 1, 1]], device=device)
    assert gradcheck(
        lambda z: gk.kl_div(z, teacher, mask=mask.bool(), beta=beta, temperature=1.4), (student,)
    )
    with pytest.raises(NotImplementedError, match="kl_div: it is not twice differentiable"):
        once = torch.autograd.grad(gk.kl_div(student, teacher).sum(), student, create_graph=True)[0]
        once.sum().backward()
    with pytest.raises(ValueError, match="teacher_logits requires a gradient and has none"):
        gk.kl_div(student, teacher.clone().requires_grad_())


def test_strides_and_empty_rows(device):
    gen = generator("kl_div", "strides")
    student, teacher = drawn(gen, 2056, torch.bfloat16, device, rows=(3, 4))
    want = torch.ops.gpukern.kl_div_fwd(student, teacher, None, 0.3, 1.0)
    swapped = student.transpose(0, 1).contiguous().transpose(0, 1)
    padded = torch.nn.functional.pad(teacher, (0, 5))[..., :2056]
    for pair in ((swapped, teacher), (student, padded), (student.mT.contiguous().mT, teacher)):
        got = torch.ops.gpukern.kl_div_fwd(*pair, None, 0.3, 1.0)
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-6)
    none = student[:0]
    assert gk.kl_div(none, none).shape == (0, 4)


def test_refuses_shared_results(device):
    z, room = torch.zeros(2, 8, device=device), torch.zeros(16, device=device)
    with pytest.raises(ValueError, match="kl_div_grad: dlogits shares memory with loss"):
        torch.ops.gpukern.kl_div_grad(z, z.clone(), room[:2], room.view(2, 8), None)


EVERY_ISA = """
import torch, torch_gpukern as gk
from torch_gpukern import reference
torch.manual_seed(1)
for dtype, rough in ((torch.float32, 2e-6), (torch.bfloat16, 5e-3), (torch.float16, 1e-3)):
    for n in (1, 7, 33, 1024, 3001):
        z, t = (2 * torch.randn(3, n)).to(dtype), torch.randn(3, n).to(dtype)
        for beta in (0.0, 0.3, 1.0):
            x = z.double().requires_grad_()
            want = reference.kl_div(x, t.double(), beta=beta, temperature=1.3)
            want.sum().backward()
            loss, grad = torch.ops.gpukern.kl_div_fwd(z, t, None, beta, 1.3)
            assert (loss - want).abs().max() < 3e-6, (dtype, n, beta, (loss - want).abs().max())
            size = x.grad.abs().max() + 1 / n
            assert ((grad - x.grad).abs().max() / size) < rough, (dtype, n, beta)
print("all good on", torch.ops.gpukern.cpu_isa())
"""


@pytest.mark.parametrize("isa", torch.ops.gpukern.cpu_isas().split(","))
def test_every_instruction_set(isa):
    assert f"all good on {isa}" in run_python(EVERY_ISA, {"GPUKERN_CPU": isa}).stdout
