# SPDX-License-Identifier: BSD-3-Clause
"""linear_cross_entropy against F.cross_entropy of F.linear in float64: the error is at most twice
that of PyTorch in the same dtype."""

import gc
import itertools

import pytest
import torch
import torch.nn.functional as F
from conftest import Exact, generator, randn, run_python, same_bits
from torch.autograd import gradcheck, gradgradcheck

import torch_gpukern as gk
from torch_gpukern.ops import linear_cross_entropy_chunks as chunks

UNIT = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float64: 2**-53}
RULES = {
    "plain": {},
    "all": dict(label_smoothing=0.1, softcap=5.0, logit_scale=0.5, ignore_index=3, weighted=True),
    "smooth": dict(label_smoothing=0.2, logit_scale=2.0),
    "capped": dict(softcap=3.0, weighted=True, z_loss=0.02),
    "near 1": dict(z_loss=0.01),
}
MODES = {
    "mean": dict(reduction="mean"),
    "sum": dict(reduction="sum"),
    "none": dict(reduction="none"),
    "low": dict(reduction="mean", low_memory=True),
}


def statement(
    x,
    w,
    target,
    b=None,
    *,
    class_weight=None,
    softcap=0.0,
    logit_scale=1.0,
    low_memory=False,
    z_loss=0.0,
    **how,
):
    z = F.linear(x, w, b)
    z = (z if z.dtype == torch.float64 else z.float()) * logit_scale
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    loss = F.cross_entropy(z.flatten(0, -2), target.flatten(), class_weight, **how)
    if z_loss:
        kept = (target != how.get("ignore_index", -100)).flatten()
        more = z_loss * z.flatten(0, -2).logsumexp(-1).square() * kept
        loss = loss + {"none": more, "sum": more.sum()}.get(
            how.get("reduction"), more.sum() / kept.sum()
        )
    return loss.view(target.shape) if how.get("reduction") == "none" else loss


def small_steps(monkeypatch):
    """Forces small steps in rows and classes, although the problem is small."""
    monkeypatch.setattr(chunks, "_CPU_BYTES", 1 << 12)
    monkeypatch.setattr(chunks, "_MOST_BYTES", 1 << 12)
    monkeypatch.setattr(chunks, "_COPY_BYTES", 1 << 10)
    monkeypatch.setattr(chunks, "_FEWEST_CPU_ROWS", 3)


def judge(shape, h, v, dtype, how, device, bias=True, needs=(True, True, True)):
    gen = generator("linear cross entropy", shape, h, v, str(how))
    x, w, b = randn(gen, *shape, h), 0.4 * randn(gen, v, h), randn(gen, v)
    target = torch.randint(v, shape, generator=gen).to(device)
    how = dict(how)
    target.view(-1)[1::5] = how.get("ignore_index", -100)
    weight = torch.rand(v, generator=gen).to(device) + 0.5 if how.pop("weighted", False) else None
    grad = randn(gen, *(shape if how.get("reduction") == "none" else ())).abs() + 0.1

    def run(fn, run_dtype):
        leaves = [t.to(dtype).to(run_dtype).to(device).detach().clone() for t in (x, w, b)]
        for leaf, need in zip(leaves, needs, strict=True):
            leaf.requires_grad_(need)
        wide = torch.float64 if run_dtype == torch.float64 else torch.float32
        more = {} if weight is None else {"class_weight": weight.to(wide)}
        loss = fn(leaves[0], leaves[1], target, leaves[2] if bias else None, **more, **how)
        asked = [
            leaf for leaf, need in zip(leaves, (*needs[:2], needs[2] and bias), strict=True) if need
        ]
        return [loss.detach(), *torch.autograd.grad(loss, asked, grad.to(loss))]

    ours, theirs = run(gk.linear_cross_entropy, dtype), run(statement, dtype)
    with Exact():
        exact = run(statement, torch.float64)
    assert ours[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for name, got, yard, ref in zip(("loss", "1", "2", "3"), ours, theirs, exact, strict=False):
        assert got.shape == ref.shape and (name == "loss" or got.dtype == dtype)
        error, allowed = (got.double() - ref).abs().max(), 2 * (yard.double() - ref).abs().max()
        # logits near 20 have larger errors than the others
        slack = {torch.float64: 32, torch.float32: 32}.get(dtype, 2)
        assert error <= allowed + slack * UNIT[got.dtype] * ref.abs().max(), (name, error, allowed)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", UNIT, ids=str)
def test_values(dtype, mode, device, monkeypatch):
    """More rows than 4 H and fewer; all rows at once, and some at a time."""
    for rules in RULES.values():
        judge((3, 11), 16, 50, dtype, rules | MODES[mode], device)
    small_steps(monkeypatch)
    for (shape, h, v), rules in itertools.product(
        (((3, 11), 16, 50), ((7,), 40, 33), ((90,), 8, 300)), RULES.values()
    ):
        judge(shape, h, v, dtype, rules | MODES[mode], device, bias=shape != (7,))
    for many in (False, True):  # True stores logits in later rows of dz, on the CPU, too
        monkeypatch.setattr(chunks, "_prefers_many_rows", lambda x, many=many: many)
        for needs in itertools.product((True, False), repeat=3):
            if any(needs):
                judge((40,), 9, 21, dtype, RULES["all"] | MODES[mode], device, needs=needs)


def test_chunks_of_rows_and_the_memory_of_their_logits():
    """Each row is computed once, in order. The logits of a chunk are stored in rows of dz that are
    written later, if these hold a larger chunk than the buffer, or the largest that is asked for."""

    def chunks_of(dz, rows, buffer, most):
        blocks = chunks._Blocks(False, rows, buffer.shape[0], most, False)
        return chunks._z_chunks(dz, rows, blocks, lambda: buffer, many=True)

    for rows, v, step in ((8192, 131, 256), (1000, 8, 3), (130, 7, 50), (5, 9, 1), (1, 1, 1)):
        dz, at, most = torch.empty(rows, v, dtype=torch.bfloat16), 0, 0
        buffer = torch.empty(step, v)
        for s, z in chunks_of(dz, rows, buffer, rows):
            assert (
                s.start == at
                and z.shape == (s.stop - at, v)
                and z.is_contiguous()
                and z.data_ptr() % 16 == 0
            )
            at, most = s.stop, max(most, z.shape[0])
            if z.shape[0] > step:
                begin = (z.data_ptr() - dz.data_ptr()) // 2
                assert at * v <= begin and begin + 2 * z.numel() <= dz.numel()
        assert at == rows and (most > 9 * step if rows == 8192 else True)
        at, inside = 0, 0
        for s, z in chunks_of(dz, rows, buffer, step):
            assert s.start == at and z.shape == (s.stop - at, v) and z.shape[0] <= step
            at, begin = s.stop, (z.data_ptr() - dz.data_ptr()) // 2
            if z.data_ptr() != buffer.data_ptr():
                assert s.stop * v <= begin and begin + 2 * z.numel() <= dz.numel()
                inside += 1
        assert at == rows and (inside > 25 if rows == 8192 else True)


@pytest.mark.parametrize("mode", MODES)
def test_gradcheck(mode, device):
    gen = generator("gradcheck", mode)
    x, w, b = (
        randn(gen, *s, dtype=torch.float64, device=device) for s in ((2, 3, 4), (5, 4), (5,))
    )
    target = torch.tensor([[0, 4, -100], [2, 2, 1]], device=device)
    leaves = [t.requires_grad_() for t in (x, w, b)]

    def loss(x, w, b):
        return gk.linear_cross_entropy(
            x, w, target, b, label_smoothing=0.1, softcap=3.0, z_loss=0.1, **MODES[mode]
        )

    assert gradcheck(loss, leaves)
    with pytest.raises(
        NotImplementedError, match="gpukern::linear_cross_entropy: it is not twice differentiable"
    ):
        gradgradcheck(loss, leaves)


def test_class_weights_of_zero(device):
    """A mean over weights whose sum is 0 is NaN, and so are the gradients of rows that count, as in
    PyTorch."""
    gen = generator("zero weights")
    x, w = randn(gen, 3, 4, device=device).requires_grad_(), randn(gen, 6, 4, device=device)
    target = torch.tensor([0, 5, 2], device=device)
    for low in (False, True):
        loss = gk.linear_cross_entropy(
            x, w, target, class_weight=torch.zeros(6, device=device), low_memory=low
        )
        (dx,) = torch.autograd.grad(loss, x)
        assert loss.isnan() and dx.isnan().all()


@pytest.mark.parametrize("scale", (2.0**-24, 2.0**24))
def test_a_mean_does_not_depend_on_the_size_of_class_weights(scale, device):
    """Its float16 gradients do not depend on it, either; they would underflow or overflow with the
    weights. Also under autocast."""
    gen = generator("size of weights")
    x, w = (
        randn(gen, *s, dtype=torch.float16, device=device).requires_grad_()
        for s in ((40, 16), (30, 16))
    )
    target = torch.randint(30, (40,), generator=gen).to(device)
    target[3] = -100
    weight = torch.rand(30, generator=gen).to(device) + 0.1

    def run(x, w, size, low):
        loss = gk.linear_cross_entropy(
            x, w, target, class_weight=size * weight, label_smoothing=0.1, low_memory=low
        )
        return [loss, *torch.autograd.grad(loss, (x, w))]

    floats = [t.detach().float().requires_grad_() for t in (x, w)]
    for low in (False, True):
        want = run(x, w, 1.0, low)
        assert all(map(torch.equal, run(x, w, scale, low), want)) and all(
            g.abs().max() > 1e-4 for g in want[1:]
        )
        with torch.autocast(torch.device(device).type, torch.float16):
            assert all(
                torch.equal(got, one.float())
                for got, one in zip(run(*floats, scale, low), want, strict=True)
            )
    zero = gk.linear_cross_entropy(x, w, target, class_weight=0 * weight)
    assert zero.isnan()


def test_rows_that_are_ignored_and_no_rows(device):
    gen = generator("ignored")
    x, w = (randn(gen, *s, device=device).requires_grad_() for s in ((6, 4), (5, 4)))
    target = torch.full((6,), 2, device=device)
    for low in (False, True):
        loss = gk.linear_cross_entropy(x, w, target, ignore_index=2, low_memory=low)
        assert loss.isnan()
        assert all((g == 0).all() for g in torch.autograd.grad(loss, (x, w)))
        assert (
            gk.linear_cross_entropy(x, w, target, ignore_index=2, reduction="sum", low_memory=low)
            == 0
        )
        none = gk.linear_cross_entropy(x[:0], w, target[:0], reduction="sum", low_memory=low)
        assert none == 0 and (torch.autograd.grad(none, w)[0] == 0).all()
        assert gk.linear_cross_entropy(x[:0], w, target[:0], low_memory=low).isnan()
    padded, kept = x.detach().clone(), [0, 3, 4, 5]
    padded[1], padded[2] = torch.nan, torch.inf
    padded.requires_grad_()
    target = torch.tensor([1, -100, -100, 0, 4, 2], device=device)
    for more in ({}, {"low_memory": True}, {"reduction": "none"}):
        loss = gk.linear_cross_entropy(padded, w, target, softcap=2.0, **more).sum()
        grad = torch.autograd.grad(loss, (padded, w))[0]
        assert (grad[1:3] == 0).all() and grad[kept].isfinite().all(), more
    target = torch.full((6,), 2, device=device)
    one = gk.linear_cross_entropy(
        x, w[:1], torch.zeros(6, dtype=torch.long, device=device), reduction="none"
    )
    assert (one == 0).all()
    assert gk.linear_cross_entropy(x[0], w, target[0], reduction="none").shape == ()


@pytest.mark.parametrize("mode", MODES)
def test_bits_repeat(mode, device, monkeypatch):
    small_steps(monkeypatch)
    gen = generator("bits")
    x, w, b = (
        randn(gen, *s, dtype=torch.bfloat16, device=device).requires_grad_()
        for s in ((50, 8), (70, 8), (70,))
    )
    target = torch.randint(70, (50,), generator=gen).to(device)
    loss = gk.linear_cross_entropy(x, w, target, b, **MODES[mode]).sum()
    first = torch.autograd.grad(loss, (x, w, b), retain_graph=True)
    again = torch.autograd.grad(loss, (x, w, b))
    assert all(same_bits(p, q) for p, q in zip(first, again, strict=True))


def test_sums_of_one_sign_and_loss_scales(device, monkeypatch):
    """dweight is summed in float32, also over several blocks of rows; a gradient scaler's factor
    does not overflow float16."""
    small_steps(monkeypatch)
    for dtype, scale in ((torch.bfloat16, 1.0), (torch.float16, 65536.0)):
        x = torch.ones(3000, 2, dtype=dtype, device=device).requires_grad_()
        w = torch.zeros(2, 2, dtype=dtype, device=device).requires_grad_()
        target = torch.zeros(3000, dtype=torch.long, device=device)
        for low in (False, True):
            loss = gk.linear_cross_entropy(x, w, target, low_memory=low) * scale
            dw = torch.autograd.grad(loss, w)[0]
            want = torch.tensor([-0.5, 0.5], device=device) * scale
            torch.testing.assert_close(dw.float(), want[:, None].expand(2, 2), rtol=1e-2, atol=0)


def test_autocast(device):
    gen = generator("autocast")
    x, w, b = (randn(gen, *s, device=device).requires_grad_() for s in ((9, 16), (20, 16), (20,)))
    target = torch.randint(20, (9,), generator=gen).to(device)
    for low in (False, True):
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            loss = gk.linear_cross_entropy(x, w, target, b, low_memory=low)
        halves = [t.detach().bfloat16().requires_grad_() for t in (x, w, b)]
        want = gk.linear_cross_entropy(halves[0], halves[1], target, halves[2], low_memory=low)
        assert torch.equal(loss, want)
        grads, exact = torch.autograd.grad(loss, (x, w, b)), torch.autograd.grad(want, halves)
        assert all(
            p.dtype == torch.float32 and torch.equal(p, q.float())
            for p, q in zip(grads, exact, strict=True)
        )


@pytest.mark.parametrize("mode", MODES)
def test_dynamic_lengths_compile_once(mode, device):
    def step(x, w, b, target):
        return gk.linear_cross_entropy(x * 1.5, w, target, b, label_smoothing=0.1, **MODES[mode])

    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
    for rows in (5, 17, 33, 70):  # up to 2 H, and above
        gen = generator("dynamic", rows)
        x, w, b = (randn(gen, *s, device=device) for s in ((rows, 16), (33, 16), (33,)))
        target = torch.randint(33, (rows,), generator=gen).to(device)
        leaves = [[t.clone().requires_grad_() for t in (x, w, b)] for _ in range(2)]
        got, want = compiled(*leaves[0], target), step(*leaves[1], target)
        got.sum().backward(), want.sum().backward()
        assert torch.equal(got, want) and all(
            torch.equal(a.grad, c.grad) for a, c in zip(*leaves, strict=True)
        )
    assert len(graphs) == 1


def test_aot_with_dynamic_lengths(device):
    """Forward and backward through AOTAutograd: fakes of symbolic sizes agree with the kernels."""

    def step(x, w, target):
        return gk.linear_cross_entropy(x, w, target, softcap=4.0)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (6, 50, 150):
        gen = generator("aot", rows)
        x, w = (randn(gen, *s, dtype=torch.bfloat16, device=device) for s in ((rows, 16), (33, 16)))
        target = torch.randint(33, (rows,), generator=gen).to(device)
        leaves = [[t.clone().requires_grad_() for t in (x, w)] for _ in range(2)]
        got, want = compiled(*leaves[0], target), step(*leaves[1], target)
        got.backward(), want.backward()
        assert torch.equal(got, want) and all(
            torch.equal(a.grad, c.grad) for a, c in zip(*leaves, strict=True)
        )


def test_the_op_has_the_same_arguments(device):
    gen = generator("op")
    x, w = randn(gen, 5, 8, device=device), randn(gen, 9, 8, device=device)
    target = torch.randint(9, (5,), generator=gen).to(device)
    got = torch.ops.gpukern.linear_cross_entropy(
        x, w, target, label_smoothing=0.1, reduction="sum", low_memory=True
    )
    assert torch.equal(
        got,
        gk.linear_cross_entropy(
            x, w, target, label_smoothing=0.1, reduction="sum", low_memory=True
        ),
    )


def call(**changes):
    good = dict(x=torch.ones(2, 3), weight=torch.ones(5, 3), target=torch.tensor([0, 4]))
    return gk.linear_cross_entropy(**(good | changes))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(weight=torch.ones(5, 4)), "weight has 4 columns, x has 3; they must match"),
        (dict(weight=torch.ones(5, 3).bfloat16()), "weight must be float32, got bfloat16"),
        (dict(weight=torch.ones(3)), r"weight must have 2 dimensions \[V, H\], got 1"),
        (dict(target=torch.zeros(3, dtype=torch.long)), r"target must have shape \[2\], got \[3\]"),
        (dict(target=torch.zeros(2, dtype=torch.int32)), "target must be int64, got int32"),
        (dict(bias=torch.ones(4)), r"bias must have shape \[5\], got \[4\]"),
        (dict(class_weight=torch.ones(5).double()), "class_weight must be float32, got float64"),
        (dict(label_smoothing=1.5), "label_smoothing must be between 0 and 1, got 1.5"),
        (dict(softcap=-1.0), "softcap must be 0"),
        (dict(logit_scale=float("inf")), "logit_scale must be finite, got inf"),
        (dict(z_loss=float("nan")), "z_loss must be finite, got nan"),
        (dict(reduction="max"), "reduction must be none, mean or sum, got 'max'"),
        (
            dict(class_weight=torch.ones(5, requires_grad=True)),
            "class_weight requires a gradient and has none",
        ),
    ],
    ids=str,
)
def test_refuses(changes, text):
    for low in (False, True):
        with pytest.raises(ValueError, match=f"gpukern::linear_cross_entropy.*: {text}"):
            call(x=torch.ones(2, 3, requires_grad=True), low_memory=low, **changes)


@pytest.mark.parametrize("op", ("cross_entropy", "linear_cross_entropy", "low_memory"))
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(weight=torch.ones(1, 5)), r"weight must have shape \[5\], got \[1, 5\]"),
        (dict(weight=torch.ones(0)), r"weight must have shape \[5\], got \[0\]"),
        (dict(weight=torch.ones(())), r"weight must have shape \[5\], got \[\]"),
        (dict(weight=[1.0] * 5), "weight must be a Tensor or None, got list"),
        (dict(weight=torch.ones(5, dtype=torch.int64)), "weight must be float32, got int64"),
        (dict(weight=torch.ones(5, device="meta")), "weight is on meta"),
        (dict(target=torch.zeros(2)), "target must be int64, got float32"),
        (dict(target=[0, 4]), "target must be a Tensor, got list"),
        (dict(target=None), "target must be a Tensor, got None"),
        (dict(target=torch.zeros(2, dtype=torch.long, device="meta")), "target is on meta"),
        (dict(ignore_index=None), "ignore_index must be an int, got None"),
        (dict(ignore_index="a"), "ignore_index must be an int, got 'a'"),
        (dict(softcap=torch.ones(2)), r"softcap must be a number, got a tensor of shape \[2\]"),
    ],
    ids=str,
)
def test_refuses_beside_class_weights(op, changes, text):
    """The mean uses weights and targets before the op sees them, but errors still come from the
    op."""
    given = dict(target=torch.tensor([0, 4]), weight=torch.ones(5), z_loss=0.1) | changes
    with pytest.raises(
        ValueError,
        match=f"^gpukern::{'cross_entropy' if op == 'cross_entropy' else 'linear'}.*{text}",
    ):
        if op == "cross_entropy":
            gk.cross_entropy(torch.ones(2, 5), **given)
        else:
            call(class_weight=given.pop("weight"), low_memory=op == "low_memory", **given)


def test_arguments_that_are_none():
    for name, low in itertools.product(("x", "weight", "target"), (False, True)):
        with pytest.raises(
            ValueError, match=f"^gpukern::linear_cross_entropy: {name} must be a Tensor, got None"
        ):
            call(low_memory=low, **{name: None})


def test_targets_that_are_no_class(device):
    for low in (False, True):
        if torch.device(device).type == "cpu":
            with pytest.raises(
                IndexError,
                match=r"linear_cross_entropy: target .* in \[0, 5\) or ignore_index, got 5 in row "
                r"1",
            ):
                call(target=torch.tensor([0, 5]), low_memory=low)


PEAK = """
import resource, sys
import torch
import torch_gpukern as gk
def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) * 1024
m, h, v, low = {m}, {h}, {v}, {low}
x, w = torch.randn(m, h).bfloat16().requires_grad_(), (torch.randn(v, h) / 16).bfloat16().requires_grad_()
target, b = torch.randint(v, (m,)), torch.zeros(v).bfloat16().requires_grad_()
small = [t.detach()[:8].clone().requires_grad_() for t in (x, w)]
gk.linear_cross_entropy(*small, target[:8] % 8, low_memory=low).backward()
open("/proc/self/clear_refs", "w").write("5")
before = peak()
gk.linear_cross_entropy(x, w, target, b, low_memory=low).backward()
print(peak() - before)
"""


@pytest.mark.parametrize("dtype", UNIT, ids=str)
def test_what_forward_keeps(dtype):
    """Forward keeps dz of all rows, or at most twice the bytes of dweight's sum."""
    x, size = torch.empty(0, 24, dtype=dtype), dtype.itemsize
    total = 24 * (8 if dtype == torch.float64 else 4)
    for rows in (0, 1, 23, 24, 25, 47, 48, 49, 95, 96, 97, 5000):
        kept = int(chunks.kept_rows(x, rows)) * size
        assert kept == (rows * size if rows * size <= 2 * total else total)


@pytest.mark.parametrize("low", (False, True))
@pytest.mark.parametrize(("m", "h", "v"), ((512, 64, 30000), (1152, 16, 120000)))
def test_memory_of_the_cpu(m, h, v, low):
    """The memory is that of the docstring, beside 2 (M + V) H bytes of results and a bias. (torch
    keeps 6 M V bytes and more.) With the second shape, dz of all rows is too large to keep."""
    used = int(run_python(PEAK.format(m=m, h=h, v=v, low=low)).stdout)
    extra = 4 * m * h + (512 << 20) if low else min(2 * m * v, 8 * v * h) + 2 * m * h + (256 << 20)
    assert used <= 2 * (m + v) * h + extra + (16 << 20)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("low", (False, True))
@pytest.mark.parametrize(
    ("m", "h", "v"),
    (
        (4096, 1024, 64000),
        (8192, 1024, 64000),
        (8192, 4096, 32000),
        (512, 2048, 128000),
        (8192, 64, 128000),
    ),
)
def test_memory_of_cuda(m, h, v, low):
    x = torch.randn(m, h, device="cuda").bfloat16().requires_grad_()
    w = (torch.randn(v, h, device="cuda") / 16).bfloat16().requires_grad_()
    target = torch.randint(v, (m,), device="cuda")
    for _ in range(2):
        x.grad = w.grad = None
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gk.linear_cross_entropy(x, w, target, low_memory=low).backward()
    extra = 4 * m * h + (512 << 20) if low else min(2 * m * v, 8 * v * h) + 2 * m * h + (256 << 20)
    assert torch.cuda.max_memory_allocated() - before <= 2 * (m + v) * h + extra


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode", MODES)
def test_captured_on_the_first_call(mode):
    x = torch.randn(300, 64, device="cuda").bfloat16().requires_grad_()
    w = torch.randn(1000, 64, device="cuda").bfloat16().requires_grad_()
    target = torch.randint(1000, (300,), device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = gk.linear_cross_entropy(x, w, target, **MODES[mode])
        grads = torch.autograd.grad(loss.sum(), (x, w))
    graph.replay()
    want = gk.linear_cross_entropy(x, w, target, **MODES[mode])
    assert torch.equal(loss, want)
    assert all(map(torch.equal, grads, torch.autograd.grad(want.sum(), (x, w))))
