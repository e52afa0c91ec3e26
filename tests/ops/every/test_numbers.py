# SPDX-License-Identifier: BSD-3-Clause
"""Arguments that are numbers: tensors that want a gradient are refused by name, and floats that
float32 cannot hold have their limit or are refused.
"""

import math

import pytest
import torch
from conftest import FLOATS, ops, torch_gpukern


def calls(device):
    """op -> a call of it that wants gradients."""
    x = torch.ones(1, 2, 4, 8, device=device, requires_grad=True)
    packed = torch.ones(4, 2, 8, device=device, requires_grad=True)
    cu = torch.tensor([0, 4], dtype=torch.int32, device=device)
    cache = torch.ones(2, 4, 2, 8, device=device)
    table, lens = (
        torch.zeros(4, 1, dtype=torch.int32, device=device),
        torch.ones(4, dtype=torch.int32, device=device),
    )
    out, lse = ops.flash_attn_fwd(x.detach(), x.detach(), x.detach())
    packed_out = ops.flash_attn_varlen_fwd(*(packed.detach(),) * 3, cu, cu, 4, 4)
    varlen = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=4, max_seqlen_k=4)
    pages = dict(q=packed, k_cache=cache, v_cache=cache, block_table=table, seq_lens=lens)
    qkv, tokens = dict(q=x, k=x, v=x), dict(q=packed, k=packed, v=packed, **varlen)
    product = dict(a=x, b=x.detach().mT)
    grads = dict(grad_out=out, **qkv, out=out, lse=lse)
    packed_grads = dict(grad_out=packed_out[0], **tokens, out=packed_out[0], lse=packed_out[1])
    return {
        "gemm": product,
        "gemm_fwd": product,
        "flash_attn": qkv,
        "flash_attn_fwd": qkv,
        "flash_attn_bwd": grads,
        "flash_attn_varlen": tokens,
        "flash_attn_varlen_fwd": tokens,
        "flash_attn_varlen_bwd": packed_grads,
        "paged_attn": pages,
        "paged_attn_fwd": pages,
    }


def numbers_of(op):
    """The arguments of an op that are numbers: name -> default, None where there is none."""
    kinds = ("float", "Optional[float]", "int", "SymInt", "bool")
    arguments = getattr(ops, op).default._schema.arguments
    return {
        a.name: a.default_value if a.has_default_value() else None
        for a in arguments
        if str(a.type) in kinds
    }


def learnable(default, device):
    """A number that wants a gradient. It is the default where there is one, which no shortcut may
    drop, and otherwise 4, the length of each sequence."""
    value = 4 if default is None else default
    return torch.nn.Parameter(torch.tensor(float(value), device=device))


def ways_in(op):
    packet = getattr(ops, op)
    public = getattr(torch_gpukern, op, None)
    return [f for f in (public, packet, packet.default) if f is not None]


@pytest.mark.parametrize("op", calls("cpu"))
def test_a_number_that_wants_a_gradient_is_refused_by_name(op, device):
    call, numbers = calls(device)[op], numbers_of(op)
    assert len(numbers) > 1
    for argument, default in numbers.items():
        for f in ways_in(op):
            with pytest.raises(ValueError) as error:
                f(**call | {argument: learnable(default, device)})
            assert str(error.value) == (
                f"gpukern::{op.removesuffix('_fwd')}: {argument} is a number without a gradient, "
                f"got a tensor that requires one; "
                f"pass {argument}.detach()"
            )


@pytest.mark.parametrize("op", ("gemm", "flash_attn", "flash_attn_varlen", "paged_attn"))
def test_it_is_refused_by_position_too_and_taken_without_a_gradient(op, device):
    call = calls(device)[op]
    argument = "alpha" if op == "gemm" else "scale"
    names = [a.name for a in getattr(ops, op).default._schema.arguments]
    defaults = [a.default_value for a in getattr(ops, op).default._schema.arguments]
    place = names.index(argument)
    args = [call.get(n, d) for n, d in zip(names[:place], defaults, strict=False)]
    number = torch.tensor(0.5, device=device, requires_grad=True)
    public = getattr(torch_gpukern, op)
    for f in (
        lambda *args: public(**dict(zip(names, args, strict=False))),
        getattr(ops, op),
        getattr(ops, op).default,
    ):
        with pytest.raises(ValueError, match=f"^gpukern::{op}: {argument} is a number"):
            f(*args, number)
        want = f(*args, 0.5)
        assert torch.equal(f(*args, number.detach()), want)
        with torch.no_grad():  # no gradient is asked for, so none is lost
            assert torch.equal(f(*args, number), want)


def test_a_number_with_a_tangent_is_refused():
    x = torch.ones(1, 1, 4, 8)
    for f in ways_in("flash_attn"):
        with pytest.raises(ValueError, match="scale is a number without a gradient"):
            torch.func.jvp(
                lambda s, f=f: f(x, x, x, scale=s), (torch.tensor(1.0),), (torch.tensor(1.0),)
            )
        with pytest.raises(ValueError, match="scale is a number without a gradient"):
            torch.func.grad(lambda s, f=f: f(x, x, x, scale=s).sum())(torch.tensor(1.0))


@pytest.mark.parametrize("fullgraph", (True, False))
def test_compiled_code_refuses_it_by_name(fullgraph):
    x, s = torch.ones(1, 1, 4, 8, requires_grad=True), torch.nn.Parameter(torch.tensor(1.0))
    for f in (torch_gpukern.flash_attn, ops.flash_attn.default):
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda x, s, f=f: f(x, x, x, softcap=s), backend="aot_eager", fullgraph=fullgraph
        )
        with pytest.raises(Exception, match="softcap"):
            compiled(x, s)
    torch._dynamo.reset()


# --------------------------------------------------------------------------------------------------
# what float32 does not hold


def attend(op, q, k, v, **numbers):
    """Rows of q [n, d] over keys [m, d] by one of the three attentions: [n, d]; paged has no
    gradient."""
    if op == "flash_attn":
        return ops.flash_attn(q[None, None], k[None, None], v[None, None], **numbers)[0, 0]
    if op == "flash_attn_varlen":
        cu = [torch.tensor([0, len(x)], dtype=torch.int32, device=q.device) for x in (q, k)]
        return ops.flash_attn_varlen(
            q[:, None], k[:, None], v[:, None], *cu, len(q), len(k), **numbers
        )[:, 0]
    table = torch.zeros(1, 1, dtype=torch.int32, device=q.device)
    lens = torch.tensor([len(k)], dtype=torch.int32, device=q.device)
    return ops.paged_attn(
        q[:, None], k[None, :, None], v[None, :, None], table, lens, is_causal=False, **numbers
    )[:, 0]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", ("flash_attn", "flash_attn_varlen", "paged_attn"))
def test_softcap_at_both_ends(op, dtype, device):
    """A cap far below every score makes them equal; one far above them is none."""
    rows = torch.zeros(1, 8, dtype=dtype, device=device)
    rows[0, 0] = 1
    keys = torch.zeros(2, 8, dtype=dtype, device=device)
    keys[1, 0] = 1
    scores = 1 / (1 + math.exp(-1))  # the weight of the second key where the cap is none
    for softcap, want in [(c, 0.5) for c in (5e-324, 1e-310, 1e-46, 1e-39, 1e-38, 1e-30, 1e-12)] + [
        (c, scores) for c in (1e6, 1e20, 1e30, 1e37, 3e38, 1e39, 1e200, 1e308)
    ]:
        leaves = [x.clone().requires_grad_(op != "paged_attn") for x in (rows, keys, keys)]
        for scale in (1.0, 1e-3):
            weight = want if want == 0.5 else 1 / (1 + math.exp(-scale))
            out = attend(op, *leaves, scale=scale, softcap=softcap)
            assert abs(out[0, 0].item() - weight) < 4e-3, (softcap, scale)
        if op == "paged_attn":
            continue
        dq, dk, dv = torch.autograd.grad(
            attend(op, *leaves, scale=1.0, softcap=softcap).sum(), leaves
        )
        change = (
            want * (1 - want)
        )  # of the weight by either score, where tanh is not flat: at 0, and everywhere without a cap
        for got, exact in (
            (dq[0, 0], 0 if want == 0.5 else change),
            (dk[0, 0], -change),
            (dk[1, 0], 0 if want == 0.5 else change),
            (dv[0, 0], 1 - want),
            (dv[1, 0], want),
        ):
            assert abs(got.item() - exact) < 4e-3, (softcap, got, exact)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_scales_at_both_ends(dtype, device):
    x = torch.zeros(2, 8, dtype=dtype, device=device)
    x[1, 0] = 1
    for op in ("flash_attn", "flash_attn_varlen", "paged_attn"):
        for scale in (5e-324, 1e-46, 1e-39, -1e-300, 0.0):  # all scores are equal
            assert (attend(op, x, x, x, scale=scale)[:, 0].double() - 0.5).abs().max() < 1e-6
            assert (
                attend(op, x, x, x, scale=scale, softcap=3.0)[:, 0].double() - 0.5
            ).abs().max() < 1e-6
        assert attend(op, x, x, x, scale=1e38)[:, 0].tolist() == [0.5, 1]
        if dtype is torch.float64:
            assert attend(op, x, x, x, scale=1e300)[:, 0].tolist() == [0.5, 1]
            continue
        name = str(dtype).removeprefix("torch.")
        for scale in (1e39, -1e39, 3.4e38, 1e308):
            with pytest.raises(ValueError) as error:
                attend(op, x, x, x, scale=scale)
            assert str(error.value) == (
                f"gpukern::{op}: scale must be at most 1e38 in size where q is {name}, got "
                f"{scale:g}"
            )
        with pytest.raises(ValueError, match="scale must be at most 1e37 times softcap in size"):
            attend(op, x, x, x, scale=1e30, softcap=1e-9)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_alpha_and_beta_at_both_ends(dtype, device):
    one, c = (
        torch.ones(8, 8, dtype=dtype, device=device),
        torch.ones(8, 8, dtype=dtype, device=device),
    )
    for name in ("alpha", "beta"):
        for number in (1e39, -1e39, 1e-39, 1e-46, 1e308, 5e-324):
            if dtype is torch.float64:
                want = number * 8 + 1 if name == "alpha" else 8 + number
                got = ops.gemm(one, one, c=c, **{name: number})
                assert torch.equal(got, torch.full_like(got, want))
                continue
            with pytest.raises(ValueError) as error:
                ops.gemm(one, one, c=c, **{name: number})
            assert str(error.value) == (
                f"gpukern::gemm: {name} must be 0 or a number that float32 holds (1.2e-38 to "
                f"3.4e38) where a is "
                f"{str(dtype).removeprefix('torch.')}, got {number:g}"
            )
        for number in (0.0, -0.0, 1.2e-38, -3.4e38, math.inf):
            got = ops.gemm(
                one,
                one,
                c=c,
                out_dtype=None if dtype is torch.float64 else torch.float32,
                **{name: number},
            )
            want = number * 8 + 1 if name == "alpha" else 8 + number
            assert (
                abs(got[0, 0].item() - want) <= 1e-6 * abs(want)
                or got[0, 0].item() == want
                or abs(want) > 3.4e38
            )
